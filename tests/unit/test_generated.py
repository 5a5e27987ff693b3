"""Generated files: a check detects any change to them, and CONTRIBUTING.md lists all generators."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tools import check

GENERATED = {
    "generated C": ("libcontrol/*.gen.*",),
    "generated gRPC": ("kube/api/*.py",),
    "generated documents": ("docs/benchmarks.md",),
    "configuration page": ("docs/reference/configuration.md",),
    "configuration sample": ("packaging/config.yaml",),
    "commands page": ("docs/reference/commands.md",),
    "manual pages": ("packaging/man/*",),
    "completions": ("packaging/completions/*/*",),
    "scale page": ("docs/explanation/scale.md", "docs/figures/scale-r*.svg"),
    "metrics page": ("docs/reference/metrics.md",),
    "dashboard": ("packaging/grafana/tidegate.json",),
    "rules of the hook": ("docs/reference/hook-rules.md",),
}
"""For each check with --check, the generated files that it compares."""
COMPARED_BY_A_TEST = ["-m bench.quota_pictures"]  # test_bench_quota_pictures.py
ELSEWHERE = {"CUDA headers": "-m tools.cuda_headers"}
"""Checks with --check that need more than the tree, with their generators. test_cuda_headers.py
tests them.
"""
SAYS_SO = re.compile(
    r"(?:[Ww]ritten|[Gg]enerated) by (?:`python|the protocol buffer|the gRPC|tools/|python )"
)


def files_of(root: Path, name: str) -> list[Path]:
    found = [path for pattern in GENERATED[name] for path in sorted(root.glob(pattern))]
    assert found, name
    return found


def spoil(path: Path) -> None:
    """Change one letter of what is generated."""
    text = path.read_text()
    # This page is written by hand, except for tables between marks.
    begin = text.find("bench.scale docs -->") if path.name == "scale.md" else len(text) // 2
    at = text.find("e", begin + 20) if text.find("e", begin + 20) >= 0 else text.find("e")
    path.write_text(text[:at] + "X" + text[at + 1 :])


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree, in which every generated file has a wrong letter."""
    root = tmp_path_factory.mktemp("tree")
    for name in check.tracked():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, root / name, follow_symlinks=False)
    for name in GENERATED:
        for path in files_of(root, name):
            spoil(path)
    return root


def test_each_check_of_generated_files_is_tried() -> None:
    assert {*GENERATED, *ELSEWHERE} == {
        name for name, words in check.commands().items() if words[-1] == "--check"
    }


def test_a_wrong_letter_is_noticed_in_every_generated_file(copy: Path) -> None:
    commands = check.commands()

    def run(name: str) -> tuple[str, int, str]:
        done = subprocess.run(commands[name], cwd=copy, capture_output=True, text=True, check=False)
        return name, done.returncode, done.stdout + done.stderr

    with ThreadPoolExecutor(2) as pool:
        for name, status, said in pool.map(run, GENERATED):
            assert status == 1, f"{name}: {said}"
            for path in files_of(copy, name):
                assert path.name in said, f"{name}: {said}"


def test_every_file_that_says_it_is_generated_has_a_check() -> None:
    known = {path for name in GENERATED for path in files_of(ROOT, name)}
    for name in check.tracked():
        path = ROOT / name
        if path.suffix in (".png", ".svg", ".lock") or path.is_symlink():
            continue
        first = path.read_bytes()[:300].decode(errors="replace")
        if SAYS_SO.search("".join(first.splitlines(keepends=True)[:2])):
            assert path in known, name


def test_contributing_lists_all_generators() -> None:
    (block,) = re.findall(r"^```sh\n(\.venv/bin/python -m libcontrol\.gen .*?)^```$",
                          (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE | re.DOTALL)  # fmt: skip
    told = [shlex.join(shlex.split(line, comments=True)[1:]) for line in block.splitlines()]
    expected = [
        shlex.join(words[1:-1] if words[0] == sys.executable else words[:-1]).removesuffix(
            " --check"
        )
        for words in (check.commands()[name] for name in GENERATED)
    ]
    expected[expected.index("tools/mutate.py")] += " --page"
    assert sorted(told) == sorted([*expected, *COMPARED_BY_A_TEST, *ELSEWHERE.values()])
