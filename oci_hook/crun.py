"""Delivers the hook's error line under crun, which sends the output of hooks to /dev/null.

crun reports only the exit code of a failed hook. What crun itself writes to standard error reaches
the user: conmon reads it and passes it to Podman or CRI-O. So the hook writes the line to the
standard error of its parent process, which is the crun that started it. Podman prefers crun's log
if that is a single JSON document. The line is therefore appended to the log as well, which is then
no longer a single document.
"""

from __future__ import annotations

import os
import stat

from oci_hook import apart

NULL = os.makedev(1, 3)
FLAGS = os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def tell(line: str) -> None:
    """Write the line to where crun's own messages go; errors are ignored."""
    try:
        if apart.is_abandoned():
            return  # another process may now have the caller's pid
        parent = _parent(apart.caller) if apart.caller else os.getppid()
        own = os.stat(f"/proc/{apart.caller or 'self'}/fd/2")
        if not (stat.S_ISCHR(own.st_mode) and own.st_rdev == NULL):
            return  # the runtime reads the hook's standard error
        with open(f"/proc/{parent}/cmdline", "rb", buffering=0) as file:
            words = os.fsdecode(file.read(1 << 16)).split("\0")
        if "crun" not in os.path.basename(words[0]):  # /proc/PID/exe may be an unnamed copy
            return
        _append(f"/proc/{parent}/fd/2", line)
        log = _find_log(words)
        if log.startswith("/"):
            _append(log, line, os.O_NOFOLLOW)
    except (OSError, ValueError, IndexError):
        pass


def _parent(pid: int) -> int:
    with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
        return int(file.read(4096).rpartition(b") ")[2].split()[1])


def _append(path: str, line: str, more: int = 0) -> None:
    fd = os.open(path, FLAGS | more)
    try:
        os.write(fd, f"{line}\n".encode())
    finally:
        os.close(fd)


def _find_log(words: list[str]) -> str:
    from oci_hook.runtime import parse_call

    return parse_call(words[1:], like_crun=True).log
