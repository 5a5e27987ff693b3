"""The hook's line, where crun sends what hooks write to /dev/null.

crun says of a hook that failed its exit code alone. What crun itself writes to standard error
reaches the user: conmon reads it and hands it to Podman or CRI-O. So the line is written there,
through the parent process, which is the crun that started the hook. Podman prefers crun's log
where that is one JSON document, so the line is added there, too.
"""

from __future__ import annotations

import os
import stat

NULL = os.makedev(1, 3)
FLAGS = os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


caller = 0
"""The process that a child of the fork server works for; crun is the parent of that."""


def tell(line: str) -> None:
    """Write the line where the user of crun sees it; whatever is in the way, it is left."""
    try:
        parent = _parent(caller) if caller else os.getppid()
        own = os.fstat(2)
        if not (stat.S_ISCHR(own.st_mode) and own.st_rdev == NULL):
            return  # the runtime reads it
        with open(f"/proc/{parent}/cmdline", "rb", buffering=0) as file:
            words = os.fsdecode(file.read(1 << 16)).split("\0")
        if "crun" not in os.path.basename(words[0]):  # it may run from a copy without a name
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
