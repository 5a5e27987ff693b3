"""The steering service: makes the driver calls that steer GPUs, for a governor without privileges.

These calls need CAP_SYS_ADMIN and the system call pidfd_getfd. This process has both and does
nothing else: it reads no configuration, accepts connections only from root (and its own user), and
makes no decisions.

A governor opens a connection for each GPU and sends the calls of `steering.Hardware` on it.
Searches can take a long time, so they use a second connection, which is passed with the first
message. When a connection ends, the session's watchdog switches on what was left off, before the
GPU can be opened again.

    tidegate-steering [--socket PATH] [--nvml LIBRARY]

A service manager may pass the listening socket. The process then exits when its last session ends,
and the next connection starts it again, so the next governor after an upgrade gets the new version.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import select
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from governor.hardware.channel import SOCKET, VERSION, Channel, close_all
from governor.hardware.driver import DriverCallError
from governor.hardware.nvidia import NvidiaHardware, require_rights
from governor.hardware.steering import Hardware
from governor.hardware.watchdog import Watchdog

SUMMARY = "Make the driver calls that steer the scheduler of GPUs, for tidegate-governor"
HELLO_S = 5.0
"""Longest wait for a connection's first message, in seconds."""
BUSY_S = 8.0
"""Longest wait for the end of the previous session with a GPU, in seconds: its watchdog switches on
what was left off."""
N_SESSIONS = 64
_FIRST_PASSED = 3


class Steerable(Hardware[Any], Protocol):
    """A GPU that can be steered, with names by which another process refers to what was found."""

    def watchdog(self) -> Watchdog:
        """Start a process that switches channels on again if they are left off."""

    def name(self, held: Any) -> list[Any]:
        """Return a JSON value that identifies a result of a search."""

    def named(self, data: Any) -> Any:
        """Return the result with this name.

        Raise ValueError or TypeError if the name is malformed.
        """

    def close(self) -> None:
        """Release its resources."""


Open = Callable[[str], Steerable]


class SteeringService:
    """Serves governors that connect to a listening socket."""

    def __init__(self, listener: socket.socket, open_gpu: Open, *, is_passed: bool) -> None:
        """Serve on `listener`; if `is_passed`, `run` returns after the last session.

        A listener is passed if the service manager owns it.
        """
        self._listener, self._open_gpu, self._is_passed = listener, open_gpu, is_passed
        self._threads: set[threading.Thread] = set()
        self._gpus: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()
        self._wake_reader, self._wake_writer = os.pipe()

    def run(self) -> None:
        """Accept connections; return after the last session if the listener was passed."""
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        poll.register(self._wake_reader, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll()}
            if self._wake_reader in ready:
                os.read(self._wake_reader, 1)
                # New connections stay in the backlog of the service manager's socket.
                if self._is_passed and not self._threads:
                    return
            if self._listener.fileno() in ready:
                self._accept()

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
        with self._lock:
            if len(self._threads) == N_SESSIONS or not _is_permitted(connection):
                connection.close()
                return
            self._threads.add(thread)
        thread.start()

    def _serve(self, connection: socket.socket) -> None:
        channel = Channel(connection, HELLO_S)
        try:
            with contextlib.suppress(OSError):
                self._session(channel, connection)
        finally:
            channel.close()
            with self._lock:
                self._threads.discard(threading.current_thread())
            os.write(self._wake_writer, b".")

    def _session(self, channel: Channel, connection: socket.socket) -> None:
        received = channel.receive()
        if received is None:
            return
        message, descriptors = received
        uuid = message.get("open")
        if message.get("version") != VERSION:
            close_all(descriptors)
            channel.send({"version": VERSION})  # the governor reports the mismatch
            return
        if not isinstance(uuid, str) or len(descriptors) != 1:
            close_all(descriptors)
            channel.send({"error": "the first message must open a GPU and carry one descriptor"})
            return
        searches = Channel(socket.socket(fileno=descriptors[0]))
        try:
            with self._exclusive(uuid), self._opened(uuid) as (hardware, watchdog):
                channel.send({"version": VERSION})
                connection.settimeout(None)
                finder = threading.Thread(
                    target=_search, args=(hardware, searches), daemon=True, name="search"
                )
                finder.start()
                Session(hardware, watchdog, channel).run()
        except (OSError, DriverCallError) as e:
            channel.send({"error": str(e)})
        finally:
            searches.close()

    @contextlib.contextmanager
    def _exclusive(self, uuid: str) -> Iterator[None]:
        """Hold the GPU for one session at a time: two would undo each other's calls."""
        with self._lock:
            gpu = self._gpus.setdefault(uuid, threading.Lock())
        if not gpu.acquire(timeout=BUSY_S):
            raise OSError("another governor is steering this GPU")
        try:
            yield
        finally:
            gpu.release()

    @contextlib.contextmanager
    def _opened(self, uuid: str) -> Iterator[tuple[Steerable, Watchdog]]:
        hardware = self._open_gpu(uuid)
        try:
            watchdog = hardware.watchdog()
            try:
                yield hardware, watchdog
            finally:
                watchdog.close()  # it switches on what is off
        finally:
            hardware.close()


class Session:
    """Answers a governor's requests about one open GPU."""

    def __init__(self, hardware: Steerable, watchdog: Watchdog, channel: Channel) -> None:
        self._hardware, self._watchdog, self._channel = hardware, watchdog, channel
        self._off: list[Any] = []
        self._requests: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            "used": self._used,
            "switch": self._switch,
            "slice": self._slice,
            "off": self._announce_off,
        }

    def run(self) -> None:
        """Answer until the connection ends."""
        while (received := self._channel.receive()) is not None:
            message, descriptors = received
            close_all(descriptors)
            name = next(iter(message), "")
            self._channel.send(_answer(self._requests.get(name), name, message))

    def _used(self, _: dict[str, Any]) -> dict[str, Any]:
        if self._off:
            self._watchdog.tell(self._off)  # the governor is alive
        used = self._hardware.used_ns()
        return {
            "used": list(used.items()),
            "returned": list(self._hardware.returned_ns.items()),
            "early": list(self._hardware.early_turns.items()),
            "full": list(self._hardware.full_turns),
            "lost": self._hardware.n_lost,
        }

    def _switch(self, message: dict[str, Any]) -> dict[str, Any]:
        held = [self._hardware.named(one) for one in message["switch"]]
        self._hardware.switch(held, on=message["on"] is True)
        return {}

    def _slice(self, message: dict[str, Any]) -> dict[str, Any]:
        self._hardware.set_slice(self._hardware.named(message["slice"]), int(message["ns"]))
        return {}

    def _announce_off(self, message: dict[str, Any]) -> dict[str, Any]:
        held = [self._hardware.named(one) for one in message["off"]]
        self._off = self._hardware.tokens(held)
        self._watchdog.tell(self._off)
        return {}


def _answer(
    request: Callable[[dict[str, Any]], dict[str, Any]] | None, name: str, message: dict[str, Any]
) -> dict[str, Any]:
    """Return the answer to a request, or an error."""
    if request is None:
        return {"error": f"the steering service does not support the request {name[:40]!r}"}
    try:
        return request(message)
    except (OSError, DriverCallError) as e:
        return {"error": str(e)}
    except (KeyError, TypeError, ValueError) as e:
        return {"error": f"the steering service does not understand the request: {e!r}"}


def _search(hardware: Steerable, searches: Channel) -> None:
    """Serve searches on a GPU until their connection ends."""

    def find(message: dict[str, Any], pidfd: int) -> dict[str, Any]:
        thorough = message.get("thorough") is True
        began = time.thread_time()
        found = hardware.find(int(message["find"]), pidfd, thorough=thorough)
        return {
            "held": [[one.pid, one.key, one.n_groups, hardware.name(one)] for one in found],
            "cost": time.thread_time() - began,
        }

    with contextlib.suppress(OSError):
        while (received := searches.receive()) is not None:
            message, descriptors = received
            try:
                request = functools.partial(find, pidfd=descriptors[0]) if descriptors else None
                searches.send(_answer(request, "find without a descriptor", message))
            finally:
                close_all(descriptors)


def _is_permitted(connection: socket.socket) -> bool:
    """Return whether the other end runs as root, or as the service's own user."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    uid: int = struct.unpack("3i", data)[1]
    return uid in (0, os.geteuid())


def passed_socket() -> socket.socket | None:
    """Return the socket that the service manager passed, if any (sd_listen_fds(3))."""
    if os.environ.get("LISTEN_PID") != str(os.getpid()) or os.environ.get("LISTEN_FDS") != "1":
        return None
    os.set_inheritable(_FIRST_PASSED, False)
    return socket.socket(fileno=_FIRST_PASSED)


def _bound(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    new = path.with_name(f"{path.name}.new")
    new.unlink(missing_ok=True)
    before = os.umask(0o177)
    try:
        listener.bind(str(new))
    finally:
        os.umask(before)
    listener.listen()
    new.rename(path)  # only now, because a bound socket that does not listen refuses connections
    return listener


def _open_nvidia(uuid: str) -> Steerable:
    require_rights()
    return NvidiaHardware(uuid)


def _opener(stack: contextlib.ExitStack, library: str | None) -> Open:
    """Return the function that opens a GPU: a real one, or one in the simulated NVML `library`."""
    if library is None:
        return _open_nvidia
    from simgpu.steering import SimulatedHardware
    from vdriver.nvml import Nvml

    nvml = stack.enter_context(Nvml(library))

    def open_simulated(uuid: str) -> Steerable:
        found = nvml.simulated(uuid)
        if found is None:
            raise OSError(f"{library} belongs to a real driver")
        return SimulatedHardware(*found, uuid)

    return open_simulated


def main(argv: Sequence[str] | None = None) -> int:
    """Run the service; return its exit status."""
    parser = argparse.ArgumentParser(prog="tidegate-steering", description=SUMMARY + ".")
    parser.add_argument("--socket", default=SOCKET, type=Path, help="where to listen")
    parser.add_argument("--nvml", help="steer the simulated GPUs of this NVML (in a checkout)")
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    passed = passed_socket()
    try:
        listener = passed or _bound(args.socket)
    except OSError as e:
        print(f"tidegate-steering: {args.socket}: {e.strerror}; run it as root", file=sys.stderr)
        return 1
    with contextlib.ExitStack() as stack:
        open_gpu = _opener(stack, args.nvml)
        SteeringService(listener, open_gpu, is_passed=passed is not None).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
