"""Run NVIDIA's MPS daemon for one GPU: start it, watch it, and restart it.

`nvidia-cuda-mps-control` listens on two sockets. On `control` it accepts clients, and the commands
that are permitted to a client's user. On `control_privileged` it accepts all commands from its own
user, root, which is also the user in most containers. Therefore a container gets only `control`, as
a hard link in its own directory, and never the daemon's directory.

The daemon has its own session and outlives the governor, so that containers continue while the
governor is away. The next governor recognises it as the process that listens on the socket. A fatal
fault in one client ends the work of all clients, and the server accepts no new clients until all
have disconnected. Clients that do not disconnect in time are cut off: the daemon is killed and
restarted.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import select
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from governor.config import Config
from governor.errors import GovernorError
from governor.quota import Device
from vdriver.manifest import Manifest

log = structlog.get_logger()

PROGRAM = "nvidia-cuda-mps-control"
DIRECTORY = "mps"
"""Subdirectory of a container's directory in which its driver is told to look for the daemon."""
READY_S = 10.0
POLL_S = 0.1
SHORTEST_S, LONGEST_S = 0.2, 10.0
"""Shortest and longest pause between two starts, in seconds. The pause doubles each time the daemon
ends again."""
LIVED_S = 60.0
"""If the daemon ran for at least this many seconds, the next pause is the shortest again."""
LOG_LIMIT = 8 << 20
READ_LIMIT = 1 << 20
TOLD_S = 0.05
BURST_S = 1.0
"""Events about clients and commands are always counted, but reported at most twenty times a second
(one per TOLD_S, after a burst of BURST_S): tenants can cause any number of them, and each is a line
in the governor's log."""

_FAILED = -1
_MULTIUSER = b"multiuser-server"
_PREFIX = re.compile(r"\[[-0-9]+ [:.0-9]+ +[A-Z][a-z]+ +([0-9]+)\] ?")


@dataclass(frozen=True)
class Tools:
    """The host's programs for MPS, and its driver libraries, which the server loads."""

    control: Path
    search: str  # PATH, in which the daemon looks for the server
    libraries: str
    multiuser: bool  # accepts clients from all users; otherwise from one user at a time


def find_tools(manifest: Manifest) -> Tools:
    """Return the host's programs from which a generation was mirrored.

    Raise GovernorError if there are none.
    """
    root = Path(manifest.root)
    sources = {
        Path(file.path).name: root / file.source.lstrip("/")
        for file in manifest.files
        if file.role in ("program", "origin") and file.source
    }
    control = sources.get(PROGRAM)
    if control is None:
        raise GovernorError(
            f"the driver {manifest.version} on this node has no {PROGRAM}",
            hint="install it and run tidegate refresh, or leave mps out of strategies",
        )
    server = sources.get("nvidia-cuda-mps-server", control)
    directories = dict.fromkeys([str(control.parent), str(server.parent), "/usr/bin", "/bin"])
    libraries = sources.get("libcuda-origin.so.1", control).parent
    try:
        multiuser = _MULTIUSER in control.read_bytes()
    except OSError as e:
        raise GovernorError(f"{control}: {e.strerror}", hint="run tidegate refresh") from e
    return Tools(control, ":".join(directories), str(libraries), multiuser)


@dataclass(frozen=True)
class MpsEvent:
    """An event that a line of the daemon's or the server's log reports.

    `pid` is a client's. `writer` is the process that wrote the line, according to its prefix.
    """

    kind: str
    text: str
    pid: int | None = None
    writer: int = 0


_EVENTS = (
    ("fault", re.compile(r"Client process (\d+) encountered a fatal GPU error")),
    (
        "fault",
        re.compile(r"Server is handling a fatal GPU error|Server encountered a fatal exception"),
    ),
    ("refused", re.compile(r"Failed to accept new client|Teardown in progress")),
    ("refused", re.compile(r"Device \(uuid .*\) is (?:not supported|invisible)")),
    ("client", re.compile(r"NEW CLIENT (\d+) from user")),
    ("server-started", re.compile(r"NEW SERVER \d+: Ready|Creating server context")),
    ("server-ended", re.compile(r"Server \d+ exited with status")),
    ("command", re.compile(r"Cmd:")),
)


def read_line(line: str) -> MpsEvent | None:
    """Return the event in a line of a log, or None if it is of no interest.

    A client's command is logged verbatim, including line breaks, so a client can forge lines. The
    client is unlikely to know the daemon's pid, which is in the prefix of genuine lines.
    """
    prefix = _PREFIX.match(line)
    if not prefix:
        return None
    text = line[prefix.end() :].strip()
    for kind, pattern in _EVENTS:
        found = pattern.match(text)
        if found:
            pid = int(found[1]) if found.groups() else None
            return MpsEvent(kind, text[:200], pid, int(prefix[1]))
    return None


class Follower:
    """Reads the new lines of a log that another process writes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rest = b""
        self._at = path.stat().st_size if path.exists() else 0

    def lines(self) -> list[str]:
        """Return the complete lines that were added; a large log is truncated."""
        try:
            with self._path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size < self._at:
                    self._at, self._rest = 0, b""
                file.seek(self._at)
                data = file.read(READ_LIMIT)
        except OSError:
            return []
        self._at += len(data)
        # If lines are written faster than they are read, they are dropped: otherwise they would
        # fill /run.
        lost = self._at < size > 2 * LOG_LIMIT
        if self._at >= size > LOG_LIMIT or lost:
            with contextlib.suppress(OSError):
                os.truncate(self._path, 0)
            self._at = 0
        if lost:
            log.error("mps-log-lost", path=str(self._path), bytes=size)
            data = data[: data.rfind(b"\n") + 1]
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._rest = self._rest[-4096:]
        return [line.decode("utf-8", "replace") for line in lines]


@dataclass
class Counts:
    """Numbers of events since the governor started."""

    starts: int = 0
    ends: int = 0
    faults: int = 0
    refused: int = 0
    clients: int = 0
    commands: int = 0


class Mps:
    """The daemon for one GPU.

    `tell` is called with each event. `state` is starting, running, fault or down. Containers are
    admitted while it is `running`; otherwise `reason` is the reason for the refusal.
    """

    def __init__(
        self,
        device: Device,
        tools: Tools,
        config: Config,
        tell: Callable[[Mps, MpsEvent], None],
    ) -> None:
        self.device = device
        self.state = "starting"
        self.reason: str | None = "its MPS server is being started"
        self.counts = Counts()
        self._tools = tools
        self._multiuser = tools.multiuser
        self._fault_s = config.mps_fault_s
        self._tell = tell
        base = Path(config.runtime_dir) / "mps" / device.uuid
        self._pipe, self._logs = base / "pipe", base / "log"
        self._pid = 0
        self._pidfd = -1
        self._child: subprocess.Popen[bytes] | None = None
        self._fault_at: float | None = None
        self._was_killed = False
        self._reported_until = 0.0  # rate limit: when the reported events are used up
        self._tried = asyncio.Event()
        self._linked: dict[Path, int] = {}  # containers' directories, with their socket's inode

    def configure(self, config: Config) -> None:
        """Apply the time that a new configuration gives clients to leave after a fault."""
        self._fault_s = config.mps_fault_s

    # ---- containers

    def link(self, directory: Path) -> None:
        """Give a container access to the daemon, as /run/tidegate/mps inside it."""
        place = directory / DIRECTORY
        place.mkdir(mode=0o755, exist_ok=True)
        place.chmod(0o755)
        self._linked[place] = 0
        self._refresh(place)

    def unlink(self, directory: Path) -> None:
        """Forget a container."""
        self._linked.pop(directory / DIRECTORY, None)

    def _refresh(self, place: Path) -> None:
        """Renew a container's link: a restarted daemon listens on a new socket."""
        source = self._pipe / "control"
        new = place / ".control"
        try:
            inode = source.stat().st_ino
            if self._linked[place] == inode and (place / "control").exists():
                return
            new.unlink(missing_ok=True)
            os.link(source, new)
            new.rename(place / "control")
            self._linked[place] = inode
        except FileNotFoundError:
            return  # the daemon is not up yet, or the container is gone

    # ---- the daemon

    async def run(self) -> None:
        """Keep the daemon running until cancelled; the daemon then continues to run."""
        pause = SHORTEST_S
        while True:
            began = time.monotonic()
            try:
                await self._serve()
                reason = "its MPS daemon has ended, and is being restarted"
            except (OSError, GovernorError) as e:
                reason = f"its MPS daemon cannot be started: {e}"
            self._forget()
            self._set("down", reason)
            if self._was_killed or time.monotonic() - began > LIVED_S:
                pause = SHORTEST_S
            await asyncio.sleep(pause)
            pause = min(pause * 2, LONGEST_S)

    async def tried(self) -> None:
        """Wait until it is known whether the daemon starts."""
        await self._tried.wait()

    async def _serve(self) -> None:
        self._was_killed = False
        found = self._listener()
        if found:
            self._pid, self._pidfd = found, os.pidfd_open(found)
        # The logs are opened before the daemon writes a line: earlier lines are another daemon's,
        # or have been reported.
        followers = [Follower(self._logs / name) for name in ("control.log", "server.log")]
        if not found:
            self._spawn()
            await self._ready()
        self.counts.starts += not found
        log.info("mps-adopted" if found else "mps-started", gpu=self.device.index, pid=self._pid)
        self._set("running", None)
        writers = {self._pid}
        while not self._ended():
            writers.update(_children(self._pid))
            for place in list(self._linked):
                try:
                    self._refresh(place)
                except OSError as e:  # affects only that container
                    if self._linked[place] != _FAILED:
                        log.error("mps-link-failed", path=str(place), error=e.strerror)
                    self._linked[place] = _FAILED
            for follower in followers:
                for line in follower.lines():
                    event = read_line(line)
                    if event and event.writer in writers:
                        self._take(event)
            self._look_at_fault()
            await asyncio.sleep(POLL_S)
        self.counts.ends += 1
        self._tell(self, MpsEvent("daemon-ended", "the MPS daemon has ended"))

    def _listener(self) -> int:
        """Return the process that listens on the daemon's socket; 0 if none does."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
            probe.settimeout(1)  # a stopped daemon (SIGSTOP) does not accept, so limit the wait
            try:
                probe.connect(str(self._pipe / "control_privileged"))
            except OSError:
                return 0
            credentials = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        pid, uid, _ = struct.unpack("3i", credentials)
        return int(pid) if uid == os.geteuid() else 0

    def _spawn(self) -> None:
        for path in (self._pipe, self._logs):
            # A server that does not run as root needs access; containers do not see these
            # directories.
            path.mkdir(mode=0o755, parents=True, exist_ok=True)
        for name in ("control", "control_privileged", "control_lock", "log", f"{PROGRAM}.pid"):
            (self._pipe / name).unlink(missing_ok=True)
        command = [str(self._tools.control), "-f"]
        if self._multiuser:
            command.append("-multiuser-server")
        # In the foreground, the daemon writes its log to standard output.
        with (self._logs / "control.log").open("ab") as out:
            self._child = subprocess.Popen(
                command,
                cwd="/",
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        self._pid, self._pidfd = self._child.pid, os.pidfd_open(self._child.pid)

    def _environment(self) -> dict[str, str]:
        return {
            "PATH": self._tools.search,
            "LD_LIBRARY_PATH": self._tools.libraries,
            "CUDA_VISIBLE_DEVICES": self.device.uuid,
            "CUDA_MPS_PIPE_DIRECTORY": str(self._pipe),
            "CUDA_MPS_LOG_DIRECTORY": str(self._logs),
        }

    async def _ready(self) -> None:
        deadline = time.monotonic() + READY_S
        while self._listener() != self._pid:
            if self._ended():
                # The option's name is in the program, but only running the program shows whether
                # the option is accepted.
                self._multiuser = self._tools.multiuser and not self._multiuser
                raise GovernorError(
                    f"{PROGRAM} ended at once", hint=f"see {self._logs}/control.log"
                )
            if time.monotonic() > deadline:
                self._kill()
                raise GovernorError(
                    f"{PROGRAM} did not listen within {READY_S:g} s",
                    hint=f"see {self._logs}/control.log",
                )
            await asyncio.sleep(0.02)

    def _ended(self) -> bool:
        return _is_over(self._pidfd)

    def _forget(self) -> None:
        if self._pidfd >= 0:
            os.close(self._pidfd)
        if self._child is not None and self._child.poll() is None:
            self._child.kill()
            self._child.wait()
        self._pid, self._pidfd, self._child, self._fault_at = 0, -1, None, None

    # ---- events

    def _set(self, state: str, reason: str | None) -> None:
        if (state, reason) != (self.state, self.reason):
            self.state, self.reason = state, reason
            self._tried.set()
            self._tell(self, MpsEvent("state", state))

    def _take(self, event: MpsEvent) -> None:
        match event.kind:
            case "fault":
                # Both logs, and several lines in each, report one fault.
                if self._fault_at is None:
                    self.counts.faults += 1
                    self._fault_at = time.monotonic()
                    self._set(
                        "fault", "after a fault, its MPS server is waiting for its clients to leave"
                    )
                elif event.pid is None:
                    return
            case "refused":
                self.counts.refused += 1
            case "client":
                self.counts.clients += 1
            case "command":
                self.counts.commands += 1
            case "server-started" | "server-ended":
                self._recovered()
        if event.kind in ("refused", "client", "command"):
            now = time.monotonic()
            if self._reported_until > now:
                return
            self._reported_until = max(self._reported_until, now - BURST_S) + TOLD_S
        self._tell(self, event)

    def _recovered(self) -> None:
        self._fault_at = None
        self._set("running", None)

    def _look_at_fault(self) -> None:
        """Kill a server if its clients prevent its recovery; their contexts are lost anyway."""
        if self._fault_at is None or time.monotonic() - self._fault_at < self._fault_s:
            return
        log.warning("mps-ended-after-fault", gpu=self.device.index, waited_s=self._fault_s)
        self._was_killed = True
        self._kill()

    def _kill(self) -> None:
        """Kill the daemon and its server at once."""
        for pid in (*_children(self._pid), self._pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def stop(self) -> None:
        """Stop the daemon, because no container uses it any more."""
        if self._pid and not self._ended():
            self._kill()
            _is_over(self._pidfd, 5)
            log.info("mps-stopped", gpu=self.device.index)
        self._forget()

    def leave(self) -> None:
        """Leave the daemon running without the governor."""
        if self._child is not None:
            self._child.returncode = 0  # so that Popen does not warn about a running child
        self._child = None
        self._forget()

    def describe(self) -> dict[str, Any]:
        """Return the daemon's state for `tidegate ps` and `tidegate check`."""
        return {"state": self.state, "reason": self.reason, "pid": self._pid, **vars(self.counts)}


def _is_over(pidfd: int, seconds: float = 0) -> bool:
    """Return whether a process has ended, or ends within `seconds`."""
    poll = select.poll()  # select() rejects descriptors above 1023
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError, ValueError):
            found += [int(child) for child in task.read_text().split()]
    return found
