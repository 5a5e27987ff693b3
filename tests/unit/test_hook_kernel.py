"""Walks below a container's root, while the node goes on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from oci_hook import kernel

# Renames two directories as fast as it can: the kernel cannot tell then where a ".." led.
DISTURB = """
import os, sys
os.chdir(sys.argv[1])
os.mkdir("one")
print("ready", flush=True)
while True:
    os.rename("one", "two")
    os.rename("two", "one")
"""


def test_a_walk_goes_on_while_others_rename_and_mount(tmp_path: Path) -> None:
    inside, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    (inside / "usr/lib").mkdir(parents=True)
    (inside / "lib").symlink_to("usr/../usr/./lib/../../usr/lib")
    elsewhere.mkdir()
    root = os.open(inside, os.O_PATH)
    with subprocess.Popen(
        [sys.executable, "-c", DISTURB, elsewhere], stdout=subprocess.PIPE
    ) as other:
        try:
            assert other.stdout is not None
            other.stdout.readline()
            for _ in range(20_000):
                os.close(kernel.open_in_root(root, "lib"))
        finally:
            other.kill()
            os.close(root)


def test_a_walk_that_never_comes_to_an_end_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Busy:
        calls = 0

        def syscall(self, *_: object) -> int:
            self.calls += 1
            kernel.ctypes.set_errno(kernel.errno.EAGAIN)
            return -1

    busy = Busy()
    monkeypatch.setattr(kernel, "_libc", busy)
    monkeypatch.setattr(kernel.time, "sleep", lambda _: None)
    with pytest.raises(BlockingIOError):
        kernel.open_in_root(3, "lib")
    assert busy.calls == kernel.TRIES
