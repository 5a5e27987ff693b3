"""Logs one JSON line for each run of the hook, to a file or to syslog.

A failure to log never makes a container fail.
"""

from __future__ import annotations

import os
import time

SYSLOG = "/dev/log"
PRIORITY_INFO = 30  # daemon.info
PRIORITY_ERROR = 27  # daemon.err


class RunEvent:
    """The log record of a run, with the duration of each phase in milliseconds."""

    def __init__(self, stage: str, log: str | None, began: float | None = None) -> None:
        """Begin now, or at `began`, a time on the monotonic clock."""
        self.fields: dict[str, object] = {"event": "hook-done", "stage": stage}
        self.phases: dict[str, float] = {}
        self.log = log
        self.begin = self.last = time.monotonic() if began is None else began

    def phase(self, name: str) -> None:
        """Record the end of a phase."""
        now = time.monotonic()
        self.phases[name] = round((now - self.last) * 1000, 2)
        self.last = now

    def emit(self, outcome: str, **fields: object) -> None:
        """Write the log line; called once for each run."""
        from oci_hook.light_json import dump_json

        # In the governor's format; a log file has no other timestamp.
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self.fields |= {"timestamp": stamp, "outcome": outcome, **fields, "ms": self.phases}
        self.fields["total_ms"] = round((time.monotonic() - self.begin) * 1000, 2)
        line = dump_json(self.fields)
        try:
            if self.log is None:
                self._syslog(line, PRIORITY_ERROR if outcome == "failed" else PRIORITY_INFO)
            else:
                flags = (
                    os.O_WRONLY
                    | os.O_APPEND
                    | os.O_CREAT
                    | os.O_NOFOLLOW
                    | os.O_CLOEXEC
                    | os.O_NONBLOCK
                )
                fd = os.open(self.log, flags, 0o640)
                try:
                    os.write(fd, line.encode() + b"\n")
                finally:
                    os.close(fd)
        except OSError:
            pass

    def _syslog(self, line: str, priority: int) -> None:
        import _socket as socket  # without socket's enums and selectors

        text = f"<{priority}>tidegate-hook[{os.getpid()}]: {line}".encode()
        s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        try:
            s.setblocking(False)
            s.sendto(text, SYSLOG)
        finally:
            s.close()


def complain(line: str) -> None:
    """Write the one line that the runtime shows; errors are ignored.

    The log has the line as well: if no client requests a runtime's output, containerd gives the
    runtime a standard error that cannot be written to.
    """
    try:
        os.write(2, line.encode() + b"\n")
    except OSError:
        return
