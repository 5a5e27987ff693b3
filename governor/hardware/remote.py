"""Steer a GPU's scheduler through the steering service, with the interface of `runner.Closeable`.

The driver calls need CAP_SYS_ADMIN and the system call pidfd_getfd, which let a process do nearly
anything on the host. A governor that was installed from a package has neither. It decides, and the
service (`service`) makes the calls.
"""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from governor.hardware.activity import Full
from governor.hardware.channel import SOCKET, VERSION, Channel

START_S = 10.0
"""Longest wait for the service, in seconds; the service manager starts it at the first
connection."""
CALL_S = 10.0
"""Longest wait, in seconds, for a call that usually takes a millisecond. If a call takes longer,
the GPU's time is divided by grants from then on."""
FIND_S = 120.0
"""Longest wait for a search, in seconds; a thorough one takes several seconds."""
N_TRIES = 20
RETRY_S = 0.1


class OutdatedServiceError(OSError):
    """The service is a different version; it exits when the governor that it serves ends."""


class RemoteHeld(NamedTuple):
    """What a process has on the GPU; `data` identifies it to the service."""

    pid: int
    key: int
    n_groups: int
    data: list[Any]


class RemoteHardware:
    """One GPU, steered by the service at a socket; methods raise OSError if the service fails."""

    def __init__(self, uuid: str, path: str = SOCKET) -> None:
        self._channel, self._searches = _open(uuid, path)
        self.n_lost = 0
        self.elsewhere_s = 0.0
        self.returned_ns: Mapping[int, int] = {}
        self.early_turns: Mapping[int, int] = {}
        self.full_turns: Sequence[Full] = ()

    def watchdog(self) -> RemoteWatchdog:
        """Return the service's watchdog, which has run since the GPU was opened."""
        return RemoteWatchdog(self._channel)

    def close(self) -> None:
        """End the connection; the service then switches on what is off."""
        self._channel.close()
        self._searches.close()

    def find(self, pid: int, pidfd: int, *, thorough: bool = False) -> Sequence[RemoteHeld]:
        """Return what a process has on the GPU; nothing if it is gone or has no context."""
        began = time.monotonic()
        try:
            answer = self._searches.ask({"find": pid, "thorough": thorough}, [pidfd])
        except OSError:
            # The time that the service spent is not known, but is at most the time that has passed.
            self.elsewhere_s += time.monotonic() - began
            raise
        self.elsewhere_s += float(answer["cost"])
        return [RemoteHeld(*one) for one in answer["held"]]

    def switch(self, held: Sequence[RemoteHeld], *, on: bool) -> None:
        """Switch the channels of these holdings on or off."""
        if held:
            self._channel.ask({"switch": [one.data for one in held], "on": on})

    def set_slice(self, held: RemoteHeld, ns: int) -> None:
        """Set the time slice, in ns, of each of the process's channel groups."""
        self._channel.ask({"slice": held.data, "ns": ns})

    def tokens(self, held: Sequence[RemoteHeld]) -> list[Any]:
        """Return the values that are passed to the service's watchdog for these holdings."""
        return [one.data for one in held]

    def used_ns(self) -> Mapping[int, int]:
        """Return how long each process has been on the GPU since the last call, in ns by pid.

        Also update `n_lost`, `returned_ns`, `early_turns` and `full_turns` (`steering.Hardware`).
        """
        answer = self._channel.ask({"used": True})
        self.n_lost = int(answer["lost"])
        self.returned_ns = dict(answer["returned"])
        self.early_turns = Counter(dict(answer["early"]))
        self.full_turns = [Full(*turn) for turn in answer["full"]]
        return Counter(dict(answer["used"]))


class RemoteWatchdog:
    """The service's watchdog, with the interface of `watchdog.Watchdog`.

    Each request for the used time also makes the service report to the watchdog that the governor
    is alive.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._announced: list[Any] = []

    def tell(self, off: Sequence[Any]) -> None:
        """Announce what is about to be switched off."""
        if list(off) != self._announced:
            self._channel.ask({"off": list(off)})
            self._announced = list(off)

    def close(self) -> None:
        """Do nothing: the watchdog ends with the connection, after switching on what is off."""


def _open(uuid: str, path: str) -> tuple[Channel, Channel]:
    """Connect, and return a channel for steering and one for searches.

    A service of another version still serves a governor that is ending, and is then replaced.
    """
    for i in range(N_TRIES):
        try:
            return _open_once(uuid, path)
        except OutdatedServiceError:
            if i + 1 == N_TRIES:
                raise
            time.sleep(RETRY_S)
    raise AssertionError


def _open_once(uuid: str, path: str) -> tuple[Channel, Channel]:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    search_end, service_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    channel, searches = Channel(sock, START_S), Channel(search_end, FIND_S)
    try:
        try:
            sock.connect(path)
        except OSError as e:
            raise OSError(f"no steering service answers at {path}: {e.strerror}") from e
        with service_end:
            answer = channel.ask({"open": uuid, "version": VERSION}, [service_end.fileno()])
        if answer.get("version") != VERSION:
            raise OutdatedServiceError(
                f"the steering service has a different version; "
                f"restart tidegate-steering, then tidegate-governor ({path})"
            )
        sock.settimeout(CALL_S)
    except BaseException:
        service_end.close()
        channel.close()
        searches.close()
        raise
    return channel, searches
