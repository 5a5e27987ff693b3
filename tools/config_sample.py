"""Generates packaging/config.yaml, the commented-out configuration that packages install.

`python tools/config_sample.py` writes the file; `--check` fails if it is stale.
"""

from __future__ import annotations

import json
import posixpath
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from governor.config import SCHEMA_FILE, Config  # noqa: E402
from tools.config_reference import accepted, shown  # noqa: E402
from tools.generated import write_or_check  # noqa: E402

FILE = ROOT / "packaging/config.yaml"
COLUMNS = 96
# Example values of options whose default is described in words.
EXAMPLES = {
    "library_dir": "/usr/lib/tidegate",
    "spin_us": "250",
    "lookahead_us": "120",
    "gpus": "{}",
    "memory": "4Gi",
}

HEAD = """\
# Tidegate's configuration on this node. Commented-out values are defaults or examples.
#
# The files /etc/tidegate/config.d/*.yaml are read after this one, in the order of their names.
# `tidegate check` reports whether the whole configuration is accepted. Sizes are bytes, or whole
# numbers with Ki, Mi, Gi or Ti. Percentages refer to one GPU.
"""


def _plain(text: str) -> str:
    """Return the text of Markdown without its markup; a link's document follows its text."""
    linked = re.sub(r"\[([^]]*)\]\(([^)]*)\)", lambda m: f"{m[1]} ({_document(m[2])})", text)
    return re.sub(r"\(([^()]*) \(([^()]*)\)\)", r"(\1: \2)", linked).replace("`", "")


def _document(link: str) -> str:
    """Return the target of a link in the pages of docs/reference."""
    return posixpath.normpath(f"docs/reference/{link.partition('#')[0]}")


def entry(name: str, option: dict[str, Any], value: object, indent: str) -> list[str]:
    """Return an option's meaning, the accepted values, and its default as it would be written."""
    text = f"{_sentence(option['description'])} Accepted: {_plain(accepted(name, option))}."
    default = _plain(shown(name, value, option))
    if name in EXAMPLES:
        text += f" Default: {default}."
        default = EXAMPLES[name]
    return [*_comment(text), f"#{indent}{name}: {default}"]


def _sentence(text: str) -> str:
    plain = _plain(text).rstrip(".")
    return f"{plain[0].upper()}{plain[1:]}."


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, COLUMNS, initial_indent="# ", subsequent_indent="# ")


def sample() -> str:
    """Return the whole file."""
    options = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))["properties"]
    blocks = []
    for name, option in options.items():
        value = getattr(Config(), name)
        if "properties" not in option:
            blocks.append(entry(name, option, value, ""))
            continue
        lines = [*_comment(_sentence(option["description"])), f"#{name}:"]
        for inner, one in option["properties"].items():
            lines += entry(inner, one, getattr(value, inner), "  ")
        blocks.append(lines)
    return HEAD + "".join("\n" + "\n".join(block) + "\n" for block in blocks)


if __name__ == "__main__":
    sys.exit(write_or_check({FILE: sample()}, "tools/config_sample.py"))
