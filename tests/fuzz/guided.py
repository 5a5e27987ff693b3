"""Run Atheris on one kind of document: `python -m tests.fuzz.guided KIND DIRECTORY [libFuzzer's options]`.

Inputs that fail are written to crash-*. Add them to corpus/KIND.jsonl with the correct verdict.
"""

import os
import sys

import atheris

with atheris.instrument_imports(
    include=["oci_hook", "governor", "json"], exclude=["tests"], enable_loader_override=False
):
    from tests.fuzz.documents import KINDS, hold

WORDS = (
    "tidegate.gpu/", "memory", "compute", "compute-limit", "count", "devices", "strategy", "capabilities", "driver", "reservation",
    "annotations", "root", "path", "bundle", "\\ud800", "\\u0000", "1e999", "NaN", "4194304", "1125899906842624",
)  # fmt: skip


def main() -> None:
    kind = sys.argv.pop(1)
    assert kind in KINDS
    atheris.Setup(sys.argv, lambda data: hold(kind, data) and None)
    atheris.Fuzz()


if __name__ == "__main__":
    sys.setrecursionlimit(1000)
    os.environ.clear()
    main()
