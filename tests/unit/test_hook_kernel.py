"""Tests of oci_hook.kernel: confined path walks, errors, and the types of light_ctypes."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from oci_hook import kernel, light_ctypes

# This program renames a directory as fast as it can, so that the kernel cannot tell where a ".."
# led.
DISTURB = """
import os, sys
os.chdir(sys.argv[1])
os.mkdir("one")
print("ready", flush=True)
while True:
    os.rename("one", "two")
    os.rename("two", "one")
"""


def test_a_path_walk_succeeds_while_others_rename(tmp_path: Path) -> None:
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


def test_a_path_walk_that_never_succeeds_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Busy:
        calls = 0

        def syscall(self, *_: object) -> int:
            self.calls += 1
            ctypes.set_errno(kernel.errno.EAGAIN)
            return -1

    busy = Busy()
    monkeypatch.setattr(kernel, "_libc", busy)
    monkeypatch.setattr(kernel.time, "sleep", lambda _: None)
    with pytest.raises(BlockingIOError):
        kernel.open_in_root(3, "lib")
    assert busy.calls == kernel.TRIES


TYPES = (
    "c_int",
    "c_uint",
    "c_long",
    "c_ulong",
    "c_size_t",
    "c_char_p",
    "c_uint8",
    "c_uint32",
    "c_uint64",
)


@pytest.mark.parametrize("name", TYPES)
def test_the_types_are_those_of_ctypes(name: str) -> None:
    light, full = getattr(light_ctypes, name), getattr(ctypes, name)
    assert ctypes.sizeof(light) == ctypes.sizeof(full)
    assert light._type_.lower() == full._type_.lower()
    assert (light._type_.isupper()) == (full._type_.isupper())


def test_a_failed_call_raises_its_errno() -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        kernel.setns(-1, 0, "nothing")
    assert ctypes.get_errno() == kernel.errno.EBADF


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/a", "../a"])
def test_a_path_in_place_of_a_name_is_refused(tmp_path: Path, name: str) -> None:
    """A path in place of a name is a bug in the caller: it is refused before any system call."""
    (tmp_path / "a").mkdir()
    directory = os.open(tmp_path / "a", os.O_PATH | os.O_DIRECTORY)
    calls = (
        lambda: kernel.open_child(directory, name),
        lambda: kernel.mkdirat(directory, name, 0o755),
        lambda: kernel.create(directory, name, 0o600),
        lambda: kernel.unlinkat(directory, name),
        lambda: kernel.unlinkat(directory, name, directory=True),
        lambda: kernel.symlinkat("a", directory, name),
        lambda: kernel.set_link(directory, name, (0, 0), 0),
        lambda: kernel.renameat(directory, name, "b"),
        lambda: kernel.renameat(directory, "b", name),
        lambda: kernel.exchange(directory, name, "b"),
        lambda: kernel.exchange(directory, "b", name),
    )
    for call in calls:
        with pytest.raises(ValueError, match="is not the name of one entry"):
            call()
    os.close(directory)
