"""docs/tutorial.md, run unchanged: each of its commands in one shell, on the simulated GPU.

There are two differences: nothing is built, and the container's program works for 8 s instead of 60.

The shell sees the machine's files with a /run, a /var/lib and a /dev/shm of its own, so that the tutorial's
paths are a node's. A change of the page changes the input of this test.
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

# /run, because container engines and Tidegate have directories there; the others for what the page makes.
OWN = "mount --make-rprivate / && for d in /run /var/lib /dev/shm; do mount -t tmpfs -o mode=755 tmpfs $d; done"


def typed() -> list[tuple[str, str]]:
    """Return each heading of the page with the commands below it, without those that build."""
    blocks = markdown.fences(PAGE.read_text())
    assert sum("--seconds 60" in block.text for block in blocks) == 1
    heads = [
        (line.number, match[2])
        for line in markdown.prose(PAGE.read_text())
        if (match := markdown.HEADING.match(line.text))
    ]
    return [
        (
            [head for at, head in heads if at < block.line][-1],
            block.text.replace("--seconds 60", "--seconds 8"),
        )
        for block in blocks
        if block.language == "sh" and block.text != "make build"
    ]


@pytest.fixture(scope="module")
def shown(require: Callable[..., None]) -> dict[str, str]:
    """Return what the shell printed below each heading."""
    require("runc", "unshare", "bash")
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
        # The governor, too, if the page did not run to its end.
        with suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGKILL)
    assert shell.returncode == 0, out
    parts = re.split(rf"^{END}(.*)\n", out, flags=re.MULTILINE)[1:]
    found: dict[str, str] = {}
    for head, text in zip(parts[::2], parts[1::2], strict=True):
        found[head] = found.get(head, "") + text
    return found


def test_each_part_of_the_tutorial_shows_what_it_says(shown):
    assert "100 %" in shown["3. The governor"]
    assert '"tidegate.gpu/compute": "40"' in shown["4. A container"]
    row = re.search(r"^first .*$", shown["4. A container"], re.MULTILINE)
    assert row, shown["4. A container"]
    assert "40" in row[0]
    assert "timeslice" in row[0]
    assert "60" in shown["5. Another quota, while it runs"]
    refused = shown["6. One that asks for too much"]
    assert "of memory left to grant" in refused
    assert refused.endswith("it did not start\n")


def test_the_container_of_the_tutorial_gets_what_it_was_given(shown):
    units = int(re.search(r'"units": ([0-9]+)', shown["7. What it got done"])[1])
    # 2,000 units take all of the GPU's time in a second; the quota was first 40 % and then 60 % of it.
    assert 0.36 * 16_000 < units < 0.62 * 16_000
