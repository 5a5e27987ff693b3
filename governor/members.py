"""The members of a container: the containers, as engines created them, that use the same shares.

A container whose quota comes from its annotations has one member: itself.
"""

from __future__ import annotations

import select
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import overload

import structlog

from governor.cgroups import Membership, read_cgroups
from governor.processes import identify
from governor.state import ContainerRow, MemberRow

log = structlog.get_logger()


@dataclass(eq=False)
class Member:
    """A container as its engine created it; it lives as long as its first process."""

    identifier: str
    row: MemberRow
    pidfd: int

    @property
    def pid(self) -> int:
        """The pid of its first process."""
        return self.row.process.pid

    @property
    def membership(self) -> Membership:
        """What identifies its processes."""
        return self.row.membership or Membership()

    @property
    def confirmed(self) -> bool:
        """Whether its start has been confirmed."""
        return self.row.confirmed

    def has_ended(self) -> bool:
        """Return whether its first process has ended."""
        return is_readable(self.pidfd)

    def is_process(self, pidfd: int) -> bool:
        """Return whether a pidfd refers to its first process, and that process is alive."""
        process = identify(pidfd)
        return process.pid > 0 and process == self.row.process


class Members(Sequence[Member]):
    """The members of one container, oldest first."""

    def __init__(self, members: Iterable[Member]) -> None:
        self._members = list(members)

    @overload
    def __getitem__(self, index: int) -> Member: ...
    @overload
    def __getitem__(self, index: slice) -> list[Member]: ...
    def __getitem__(self, index: int | slice) -> Member | list[Member]:
        """Return a member, or several, by age."""
        return self._members[index]

    def __len__(self) -> int:
        """Return the number of members."""
        return len(self._members)

    def add(self, member: Member) -> None:
        """Add a member, as the youngest."""
        self._members.append(member)

    def remove(self, member: Member) -> None:
        """Remove a member."""
        self._members.remove(member)

    def confirmed(self, row: ContainerRow, member: Member) -> ContainerRow:
        """Return a copy of the container's row in which the member's start is confirmed."""
        return row.of(
            [replace(one.row, confirmed=True) if one is member else one.row for one in self]
        )

    def of(self, pid: int) -> Member | None:
        """Return the member that a process belongs to.

        A process that is in no member's control group belongs to the first member without a control
        group. If all members have one, the process belongs to no member (None).
        """
        groups = read_cgroups(pid)
        own = [one for one in self if one.membership.has_cgroups(groups)]
        return next(iter(own), next((m for m in self if not m.membership.cgroups), None))

    def has_cgroups(self, groups: Mapping[str, str]) -> bool:
        """Return whether a process in these control groups belongs to the container."""
        return any(member.membership.has_cgroups(groups) for member in self)

    def has_namespaces(self, namespaces: tuple[tuple[int, int], ...]) -> bool:
        """Return whether a process in these pid namespaces belongs to the container."""
        return any(member.membership.has_namespaces(namespaces) for member in self)

    def kill(self) -> None:
        """Kill each first process, and with it its pid namespace.

        Raise OSError if none could be killed. All are killed, because they share an account.
        """
        failed: list[OSError] = []
        for member in self:
            try:
                signal.pidfd_send_signal(member.pidfd, signal.SIGKILL)
            except OSError as e:
                failed.append(e)
        if len(failed) == len(self):
            raise failed[0]


def warn_if_unknown(member: Member) -> None:
    """Log a warning if a member's processes cannot be identified."""
    if not member.membership.cgroups:
        log.warning(
            "membership-unknown",
            container=member.identifier,
            error="it has no control group of its own that the governor can see; every process "
            "that reaches its socket is registered",
        )


def is_readable(fd: int) -> bool:
    """Return whether a descriptor is readable; for a pidfd, whether its process has ended."""
    poll = select.poll()  # select() rejects descriptors of 1024 and above
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))
