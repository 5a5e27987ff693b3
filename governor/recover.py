"""Find the containers running when a governor starts, from the stored state and from /proc.

The state identifies containers and processes by pid and start time. If the state was damaged,
what it lacks is found through the mounts and mappings of the running processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from mmap import mmap
from pathlib import Path

import structlog

from governor.cgroups import find_membership
from governor.claims import Claim, Use, parse_claim
from governor.config import Config
from governor.container import CLAIMS, RecoveredContainer, container_key
from governor.errors import TidegateError
from governor.processes import (
    FileIdentity,
    Identity,
    Mounted,
    cgroup_names,
    first_of,
    first_of_each,
    mapped,
    mounted_below,
    open_process,
    pid_namespace,
    read_status,
)
from governor.quota import Device, Quota
from governor.shared_memory import (
    MAPPED,
    Ledger,
    PageError,
    close_ledger,
    find_ledger,
    open_grant,
    read_quota,
)
from governor.state import ContainerRow, MemberRow, Owner, ProcessRow, State
from libcontrol import layout, pages

log = structlog.get_logger()

CONTAINERS = "containers"
_KEY = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True)
class FoundContainer:
    """A running container; `pidfd` refers to its first process."""

    identifier: str
    pidfd: int
    quota: Quota
    devices: tuple[str, ...]
    recovered: RecoveredContainer
    owner: Owner
    uses: tuple[Use, ...] = ()
    claims: tuple[Claim, ...] = ()
    """The claims that are recorded in its directory, in case the state has lost them."""

    def close(self) -> None:
        """Close its descriptors, if it is not taken over."""
        os.close(self.pidfd)
        for _, pidfd in (*self.recovered.others, *self.recovered.processes):
            os.close(pidfd)
        if self.recovered.ledger is not None:
            close_ledger(self.recovered.ledger)


def find_containers(
    config: Config, state: State, devices: Sequence[Device]
) -> Iterator[FoundContainer]:
    """Yield the running containers; remove the remains of others."""
    search = _Search(Path(config.runtime_dir) / CONTAINERS, state, [d.uuid for d in devices])
    looks: list[tuple[str, Callable[[], FoundContainer | None]]] = [
        (row.key, partial(search.known, row)) for row in state.containers.values()
    ]
    # Unknown directories are listed before the first container is taken over, because from then on
    # this governor writes to the state.
    looks += [(path.name, partial(search.recovered, path)) for path in search.unknown()]
    for key, look in looks:
        with contextlib.ExitStack() as search.opened:
            try:
                found = look()
            except Exception as e:  # one container must not keep the others from being found
                log.exception("container-not-adopted", key=key, error=repr(e))
                continue
            if found is None:
                continue
            search.opened.pop_all()
        yield found


class _Search:
    def __init__(self, directory: Path, state: State, uuids: list[str]) -> None:
        self._directory = directory
        self._state = state
        self._uuids = uuids
        self._taken: set[FileIdentity] = {row.ledger for row in state.containers.values()}
        self.opened = contextlib.ExitStack()
        """Closes the descriptors of a container that is not found after all."""

    def _open(self, process: Identity) -> int | None:
        pidfd = open_process(process)
        if pidfd is not None:
            self.opened.callback(os.close, pidfd)
        return pidfd

    @cached_property
    def _mounted(self) -> Mounted:
        """Processes that have a container's directory mounted.

        They are searched for only if needed, because that reads all of /proc.
        """
        return mounted_below(self._directory.name, self._directory.stat().st_dev)

    def known(self, row: ContainerRow) -> FoundContainer | None:
        """Return a container that the state lists, if it was confirmed and is still running."""
        living = [
            (member, pidfd)
            for member in row.members
            if member.confirmed and (pidfd := self._open(member.process)) is not None
        ]
        if not living:
            self._state.leave(row.key)
            shutil.rmtree(self._directory / row.key, ignore_errors=True)
            why = "ended" if row.confirmed else "unconfirmed"
            log.info("container-ended", container=row.identifier, key=row.key, why=why)
            return None
        row = row.of([member for member, _ in living])
        grant = self._grant(row.key)
        if grant is not None:
            try:
                # The page takes precedence, because the processes follow it. A change of the quota
                # is written there last, but before the answer is sent.
                quota, devices = read_quota(grant, self._uuids)
                if devices != row.devices:
                    raise PageError("its GPUs are not the container's")
                row = replace(row, quota=quota)
            except PageError as e:
                log.error("grant-damaged", key=row.key, error=str(e))
                grant = None
        return self._found(row, [pidfd for _, pidfd in living], grant)

    def unknown(self) -> list[Path]:
        """Return the directories without a row in the state."""
        known = self._state.containers
        return sorted(
            path
            for path in self._directory.iterdir()
            if _KEY.fullmatch(path.name) and path.name not in known
        )

    def recovered(self, directory: Path) -> FoundContainer | None:
        """Return a container that is not in the state, if processes have its directory mounted."""
        key = directory.name
        processes = self._mounted.by_name.get(key)
        if not processes and not self._mounted.is_whole:
            log.error("container-not-recovered", key=key, error="processes cannot be examined")
            return None
        if not processes:
            shutil.rmtree(directory, ignore_errors=True)
            log.info("container-ended", key=key, why="no process has its directory mounted")
            return None
        uses, claims = self._claims(directory)
        firsts = first_of_each(processes) if uses else [first_of(processes)]
        living = [(p, fd) for p in firsts if (fd := self._open(p)) is not None]
        process = living[0][0] if living else firsts[0]
        grant = self._grant(key)
        try:
            if not living or grant is None:
                raise PageError("its quota is not known")
            quota, devices = read_quota(grant, self._uuids)
        except PageError as e:
            log.error("container-not-recovered", key=key, pid=process.pid, error=str(e))
            return None
        names = (name for name in cgroup_names(process.pid) if container_key(name) == key)
        identifier = next(names, None)
        row = ContainerRow(
            key, identifier, process, quota, devices, FileIdentity(0, 0), confirmed=True
        )
        others = tuple(
            MemberRow(None, p, confirmed=True, membership=find_membership(p.pid))
            for p, _ in living[1:]
        )
        row = replace(row, uses=uses, others=others)
        log.warning("container-recovered", container=identifier, key=key, pid=process.pid)
        return self._found(row, [pidfd for _, pidfd in living], grant, claims)

    def _claims(self, directory: Path) -> tuple[tuple[Use, ...], tuple[Claim, ...]]:
        """Return the shares and claims that are recorded in a directory."""
        try:
            document = json.loads((directory / CLAIMS).read_text(encoding="utf-8"))
            claims = tuple(parse_claim(one) for one in document["claims"])
            uses = tuple((str(uid), str(name)) for uid, name in document["uses"])
        except FileNotFoundError:
            return (), ()
        except (OSError, ValueError, KeyError, TypeError, TidegateError) as e:
            log.error("claims-not-recovered", key=directory.name, error=str(e))
            return (), ()
        return uses, claims

    def _grant(self, key: str) -> mmap | None:
        try:
            return open_grant(self._directory / key / "grant")
        except PageError as e:
            log.error("grant-damaged", key=key, error=str(e))
            return None

    def _found(
        self,
        row: ContainerRow,
        pidfds: Sequence[int],
        grant: mmap | None,
        claims: tuple[Claim, ...] = (),
    ) -> FoundContainer:
        rows = dict(self._state.processes.get(row.key, {}))
        living: dict[int, tuple[ProcessRow, int]] = {}
        for slot, known in rows.items():
            own = self._open(known.process)
            if own is None:
                self._state.unregister(row.key, slot)
            else:
                living[slot] = known, own
        ledger = self._ledger(row, [known.process for known, _ in living.values()])
        if ledger is not None:
            self.opened.callback(close_ledger, ledger)
            self._taken.add(ledger.file)
            for known, own in self._unregistered(row, ledger, set(rows)):
                if any(known.process == other.process for other, _ in living.values()):
                    os.close(own)
                    continue
                self.opened.callback(os.close, own)
                living[known.slot] = known, own
                self._state.register(row.key, known)
        elif living:
            log.error("ledger-lost", container=row.identifier, key=row.key)
        return FoundContainer(
            row.identifier or f"recovered-{row.key}",
            pidfds[0],
            row.quota,
            row.devices,
            RecoveredContainer(
                row.key,
                grant,
                ledger,
                tuple(living.values()),
                row.membership,
                tuple(zip(row.others, pidfds[1:], strict=True)),
                row.suspended,
            ),
            row.owner,
            row.uses,
            claims,
        )

    def _ledger(self, row: ContainerRow, processes: list[Identity]) -> Ledger | None:
        wanted = row.ledger if row.ledger.inode else None
        others = self._taken - {row.ledger}
        ledger = find_ledger(processes, wanted, others)
        if ledger is None:
            # No process is using the GPU, or the state lacks these processes.
            ledger = find_ledger(self._mounted.by_name.get(row.key, []), wanted, others)
        return ledger

    def _unregistered(
        self, row: ContainerRow, ledger: Ledger, named: set[int]
    ) -> Iterator[tuple[ProcessRow, int]]:
        """Yield the processes of slots that are in use but missing from the damaged state.

        A slot contains its process's pid in that process's own namespace. The process must also
        have the ledger mapped.
        """
        slots = {
            slot: pages.read(ledger.page, pages.slot_base(slot), "ledger_slot", "pid")
            for slot in range(layout.N_SLOTS)
            if slot not in named
            and pages.read(ledger.page, pages.slot_base(slot), "ledger_slot", "state")
        }
        if not slots:
            return
        file = ledger.file
        numbered: dict[int, list[Identity]] = {}
        for process in self._mounted.by_name.get(row.key, []):
            status = read_status(process.pid)
            if status is not None and any(
                inode == file.inode for _, inode in mapped(process.pid, MAPPED, file.device)
            ):
                numbered.setdefault(status.numbers[-1], []).append(process)
        for slot, number in slots.items():
            candidates = numbered.get(number, [])
            if len(candidates) > 1:
                # They are in different pid namespaces, as in containers that share a claim.
                base = pages.slot_base(slot)
                home = pages.read(ledger.page, base, "ledger_slot", "namespace")
                candidates = [one for one in candidates if pid_namespace(one.pid) == home != 0]
            pidfd = open_process(candidates[0]) if len(candidates) == 1 else None
            if pidfd is not None:
                yield ProcessRow(slot, candidates[0], time.time_ns() // 1000), pidfd
