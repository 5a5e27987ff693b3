"""Run the commands of docs/tutorial.md in one shell, on the simulated GPU, and compare their output
with the page.

Two commands differ from the page: nothing is built, and the container's program works for 8 s
instead of 60.

The shell sees the machine's files, but has its own /run, /var/lib and /dev/shm, so that the
tutorial can use the paths of a node. A change of the page changes the input of this test.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tools import markdown

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/tutorial.md"
END = "=== "

# /run is private because container engines and Tidegate have directories there, the others because
# the page creates files in them.
OWN = "mount --make-rprivate / && for d in /run /var/lib /dev/shm; do mount -t tmpfs -o mode=755 tmpfs $d; done"


VARIES = {
    "999.10.1-cff55a762d41": r"999\.10\.1-[0-9a-f]{12}",
    "process 4711": r"process [0-9]+",
    " 40/40/40 %": r" (?:[23][0-9]|4[0-3])/40/40 %",
    " 100 % timeslice": r" [0-9]+ % timeslice",
    '"units": 64000, "seconds": 60.0': r'"units": [0-9]+, "seconds": 8\.[0-9]+',
}
"""Output on the page that differs each time, and the pattern that it has to match."""


def headed() -> list[tuple[str, markdown.Fence]]:
    """Return each block of the page with the heading above it."""
    heads = [
        (line.number, match[2])
        for line in markdown.prose(PAGE.read_text())
        if (match := markdown.HEADING.match(line.text))
    ]
    return [
        ([head for at, head in heads if at < block.line][-1], block)
        for block in markdown.fences(PAGE.read_text())
    ]


def pattern(block: str) -> str:
    """Return a pattern for a block of output with single blanks; `...` stands for anything."""
    pieces = [" ".join(piece.split()) for piece in block.split("...")]
    whole = ".*?".join(re.escape(piece) for piece in pieces)
    for example, other in VARIES.items():
        whole = whole.replace(re.escape(example), other)
    return whole


def typed() -> list[tuple[str, str]]:
    """Return each heading of the page with the commands below it, without those that build."""
    blocks = headed()
    assert sum("--seconds 60" in block.text for _, block in blocks) == 1
    return [
        (head, block.text.replace("--seconds 60", "--seconds 8"))
        for head, block in blocks
        if block.language == "sh" and block.text != "make build"
    ]


def play() -> dict[str, str]:
    """Type the page into a shell, and return what it printed below each heading."""
    script = "\n".join(
        ["set -eu", "exec 2>&1"]
        + [f"echo {shlex.quote(END + head)}\n{block}" for head, block in typed()]
    )
    shell = subprocess.Popen(
        ["unshare", "--mount", "bash", "-c", f"{OWN} && exec bash -c {shlex.quote(script)}"],
        cwd=ROOT,
        env={**os.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, _ = shell.communicate(timeout=120)
    finally:
        # This also kills the governor, if the page did not run to its end.
        with suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGKILL)
    assert shell.returncode == 0, out
    parts = re.split(rf"^{END}(.*)\n", out, flags=re.MULTILINE)[1:]
    found: dict[str, str] = {}
    for head, text in zip(parts[::2], parts[1::2], strict=True):
        found[head] = found.get(head, "") + text
    return found


@pytest.fixture(scope="module")
def shown(require: Callable[..., None]) -> dict[str, str]:
    """Return what the shell printed below each heading."""
    require("runc", "unshare", "bash")
    return play()


def test_every_output_in_the_tutorial_is_what_its_commands_print(shown):
    blocks = [(head, block.text) for head, block in headed() if block.language in ("text", "json")]
    assert len(blocks) == 8
    for example in VARIES:
        assert any(example in " ".join(text.split()) for _, text in blocks), example
    position = dict.fromkeys(shown, 0)
    for head, text in blocks:
        printed = " ".join(shown[head].split())
        found = re.compile(pattern(text)).search(printed, position[head])
        assert found, f"{head}: the page shows\n{text}\nand the commands print\n{shown[head]}"
        position[head] = found.end()
    # Nothing else is printed, except for what the page leaves out at the beginning or replaces by
    # `...`.
    assert shown["5. Another quota, while it runs"].count("\n") == 1
    assert shown["8. Clean up"] == ""


def test_an_output_that_differs_is_detected():
    shape = re.compile(pattern("a ... b 40/40/40 %\n  100 %  timeslice"))
    assert shape.search("a x y b 39/40/40 % 98 % timeslice")
    for other in (
        "a b 39/41/40 % 98 % timeslice",
        "a b 40/40/40 % 98 % mps",
        "b 40/40/40 % 98 % timeslice",
    ):
        assert not shape.search(other), other


def test_the_container_of_the_tutorial_gets_its_quota(shown):
    def units(shown):
        return int(re.search(r'"units": ([0-9]+)', shown["7. How much work it did"])[1])

    # 2,000 units take all of the GPU's time in a second; the quota was first 40 % and then 60 % of it.
    found = [units(shown)]
    while found[-1] <= 0.36 * 16_000 and len(found) < 3:  # a busy machine delays the program
        found.append(units(play()))
    assert max(found) < 0.62 * 16_000, found
    assert found[-1] > 0.36 * 16_000, found
