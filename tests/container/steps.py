"""Run the hook, and stop it before each system call that could harm the host.

`tests/container/steps.c` is the tracer. With it, a test causes a race in every run, at the step
that it chooses, and does not depend on chance. What the hook opened is known from the kernel, not
inferred from the source.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import re
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

SOURCE = Path(__file__).with_name("steps.c")
LINE = re.compile(rb'([<>]) (\d+) (.*?)"([^"]*)"(?: "([^"]*)")?')

AT_FDCWD = -100
O_CREAT, O_EXCL, O_ACCMODE, O_NOFOLLOW, O_PATH = 0o100, 0o200, 3, 0o400000, 0o10000000
O_CLOEXEC = 0o2000000
NO_XDEV, NO_MAGICLINKS, NO_SYMLINKS, BENEATH, IN_ROOT = 1, 2, 4, 8, 16
UNDUMPABLE = (4, 0)  # PR_SET_DUMPABLE

NEVER = {
    "creat", "fsopen", "fsmount", "pivot_root", "chroot", "chdir", "unshare", "mkdir", "mknod", "mknodat", "link",
    "linkat", "symlink", "symlinkat", "unlink", "rmdir", "rename", "truncate", "chmod", "fchmodat", "chown", "lchown",
    "fchownat", "setxattr", "mount", "open",
}  # fmt: skip
STARTS = {"execve", "execveat", "vfork", "clone3"}  # not `clone`, because the hook forks
NAMES = {"mkdirat", "unlinkat", "renameat", "renameat2"}


@functools.cache
def tracer() -> Path:
    """Compile the tracer, once, and return its path."""
    path = Path(tempfile.mkdtemp(prefix="steps-")) / "steps"
    atexit.register(shutil.rmtree, path.parent, ignore_errors=True)
    subprocess.run(["gcc", "-O1", "-o", str(path), str(SOURCE)], check=True)
    return path


@dataclass
class SystemCall:
    """One system call; `result` is None before the call is made."""

    number: int
    pid: int
    name: str
    numbers: tuple[int, ...]
    path: str
    cwd: str
    inside: bool  # the hook is in the container's mount namespace
    result: int | None = None
    file: str = ""  # the file of the resulting descriptor

    def __str__(self) -> str:
        return f"{self.number} {self.name}{self.numbers} {self.path!r} = {self.result} {self.file}"


def _text(raw: bytes | None) -> str:
    return re.sub(r"\\x(..)", lambda m: chr(int(m[1], 16)), (raw or b"").decode())


class Steps:
    """`with Steps(react) as steps`: run `steps.argv(hook)`; `react` is called while the hook is stopped."""

    def __init__(self, react: Callable[[SystemCall], None] | None = None) -> None:
        self.react = react or (lambda _: None)
        self.runs: list[list[SystemCall]] = []
        self.failed: list[BaseException] = []

    def __enter__(self) -> Self:
        self.directory = Path(tempfile.mkdtemp(prefix="steps-"))
        self.path = self.directory / "socket"
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(str(self.path))
        self.listener.listen(4)
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.thread.join()
        shutil.rmtree(self.directory)
        if kind is None and self.failed:
            raise self.failed[0]

    def argv(self, command: list[str]) -> list[str]:
        """Return the command that runs `command` in single steps."""
        return [str(tracer()), str(self.path), *command]

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            with connection, connection.makefile("rb") as lines:
                try:
                    self._follow(connection, lines)
                except BaseException as e:  # noqa: BLE001 - the test's thread raises it
                    self.failed.append(e)

    def _follow(self, connection: socket.socket, lines: object) -> None:
        steps: list[SystemCall] = []
        self.runs.append(steps)
        inside: set[int] = set()  # processes
        for line in lines:  # type: ignore[attr-defined]
            match = LINE.match(line)
            assert match, line
            if match[1] == b">":
                pid, name, *numbers = match[3].split()
                step = SystemCall(
                    number=int(match[2]),
                    pid=int(pid),
                    name=name.decode(),
                    numbers=tuple(map(int, numbers)),
                    path=_text(match[4]),
                    cwd=_text(match[5]),
                    inside=int(pid) in inside,
                )
                steps.append(step)
                try:
                    self.react(step)
                finally:
                    with contextlib.suppress(OSError):
                        connection.sendall(b".")
            else:
                step = steps[int(match[2]) - 1]
                step.result, step.file = int(match[3]), _text(match[4])
                if step.name == "setns" and step.result == 0:
                    inside ^= {step.pid}


def faults(steps: list[SystemCall], root: Path) -> list[str]:
    """Return what the hook did that it must never do, whatever the image; `root` is the container's
    root.

    Calls before the hook is undumpable are not examined: Python loads its own files from the host
    during that time.
    """
    found = [str(step) for step in steps if step.name in STARTS]
    found = [f"R5, R6: it started something: {start}" for start in found[1:]]
    at = [n for n, s in enumerate(steps) if s.name == "prctl" and s.numbers[:2] == UNDUMPABLE]
    entered = [n for n, s in enumerate(steps) if s.name == "setns"]
    if entered and (not at or at[0] > entered[0]):
        found.append("R13: it entered the container's namespace before it was undumpable")
    begin = min([*at, *entered, len(steps)])
    return found + [fault for step in steps[begin:] if (fault := _fault(step, str(root)))]


def _fault(step: SystemCall, root: str) -> str | None:
    flags = step.numbers[2] if len(step.numbers) > 2 else 0
    if step.name in NEVER:
        return f"R2, R3, R4: a path: {step}"
    if f"{step.cwd}/".startswith(f"{root}/"):
        return f"R12: its working directory is in the container's root: {step}"
    if step.name == "openat2":
        return _walk_fault(step, root)
    if step.name in NAMES and (step.numbers[0] == AT_FDCWD or "/" in step.path):
        return f"R3, R4: a path: {step}"
    if step.name == "umount2" and not (
        re.fullmatch(r"self/fd/\d+", step.path) and step.cwd == "/proc"
    ):
        return f"R2: a path: {step}"
    if not step.inside:
        return None
    if step.name in ("open_tree", "mount_setattr"):
        return f"R1: a source is taken in the container's namespace: {step}"
    if step.name == "openat":
        if flags & O_CREAT:
            if (
                flags & O_EXCL
                and flags & O_NOFOLLOW
                and "/" not in step.path
                and step.numbers[0] >= 0
            ):
                return None
            return f"R3: created without O_EXCL and O_NOFOLLOW on a directory's descriptor: {step}"
        if flags & O_ACCMODE:
            return f"R11: opened for writing: {step}"
        if step.path == root and flags & O_PATH:
            return None
        if step.path == "thread-self/mountinfo" and step.numbers[0] >= 0:
            return None
        if re.fullmatch(r"self/fd/\d+", step.path) and step.numbers[0] >= 0:
            # This is a file that was reached before, reopened for reading through a descriptor in
            # /proc.
            there = f"{step.file}/".startswith(f"{root}/") or step.result is None or step.result < 0
            return None if there else f"R2: it left the root: {step}"
        return f"R2: opened by path: {step}"
    return None


def _walk_fault(step: SystemCall, root: str) -> str | None:
    _, _, flags, resolve = step.numbers
    if not flags & O_CLOEXEC:
        return f"R12: without O_CLOEXEC: {step}"
    if flags & (O_ACCMODE | O_CREAT):
        return f"R11: opened for writing: {step}"
    if step.path == root and not step.inside and resolve & NO_SYMLINKS and flags & O_PATH:
        return None  # the root itself, by a path that contains no link
    confined = (
        resolve & (IN_ROOT | NO_MAGICLINKS) == IN_ROOT | NO_MAGICLINKS
        or resolve & (IN_ROOT | NO_SYMLINKS) == IN_ROOT | NO_SYMLINKS
        or (resolve & (NO_SYMLINKS | NO_XDEV) == NO_SYMLINKS | NO_XDEV and "/" not in step.path)
    )
    if not confined:
        return f"R2: a walk that may leave the root: {step}"
    inside = f"{step.file}/".startswith(f"{root}/") or step.file.endswith(" (deleted)")
    if step.result is not None and step.result >= 0 and not inside:
        return f"R2: it left the root: {step}"
    return None
