"""Detect violations by comparing NVML samples with the containers' ledgers, and respond.

There are three kinds of violations (defined in governor/violations.py): more memory than the quota,
a process that computes without having registered, and work without a grant. The response is
configured by `on_violation`: report it; hold the process to the container's quota through the GPU's
own scheduler; freeze the container, for a time that doubles while the violation lasts; or kill its
first process. A frozen container is thawed when its time is over, even if NVML fails, and when the
governor stops. If the governor dies, the next one thaws the container when it starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from governor import cgroups
from governor.account import GpuSample, RegisteredProcess
from governor.cgroups import CannotFreezeError, Group
from governor.config import Config
from governor.container import Container, find_owner
from governor.counters import Tally
from governor.pace import RateLimitedLog
from governor.processes import started_ns, status_fields
from governor.quota import Device
from governor.usage import SAMPLE_NS, Charge
from governor.violations import (
    COMPUTE,
    MAX_ELSEWHERE,
    WATCH_S,
    Episode,
    Facts,
    ProcessSample,
    ViolationDetector,
    allowed_memory,
    next_freeze,
)
from vdriver.nvml import ProcessMemory, ProcessUse

log = structlog.get_logger()

AUDIT_NS = SAMPLE_NS * 4 // 5
"""Minimum interval between two samples that are audited, in nanoseconds. Additional samples are
taken for processes that wait for memory."""

LISTED_NS = 1_000_000_000
"""Time for which NVML may list a process after its end, in nanoseconds."""

SMALL_NS = 10_000
BYTES_PER_NS = 20
QUIET = 0.02
"""Small copies and fills, and copies to and from the host, need no grant. Each takes at most
SMALL_NS, plus a nanosecond for every BYTES_PER_NS bytes. If they take less than the fraction QUIET
of the time, they do not count as work."""

_GONE = (errno.ENOENT, errno.ENODEV, errno.ENOTDIR)

POLL_S = 0.25
"""Interval at which a frozen container is checked for a pending SIGKILL, in seconds."""

RECORD = "frozen.json"

AGAIN_S = 5.0
"""Interval at which a failed thaw of a container is retried, in seconds; nothing else would thaw
the container."""


@dataclass
class _Device:
    """State of a container on one GPU between samples."""

    judge: ViolationDetector
    looked_ns: int
    told: tuple[int, ...] = ()
    passing_ns: int = 0
    """Upper bound on the time that copies and fills without a grant have taken so far."""
    is_idle: bool = False


@dataclass
class _Watched:
    """State of a container between samples."""

    container: Container
    lines: RateLimitedLog = field(default_factory=lambda: RateLimitedLog(log))
    devices: dict[str, _Device] = field(default_factory=dict)
    groups: list[Group] = field(default_factory=list)
    """Its control groups while they are frozen by the governor."""
    frozen_s: float | None = None
    """Duration of its last freeze, in seconds; None if no violation is ongoing."""
    thaw_at: float = 0.0
    watched_until: float = 0.0
    timer: asyncio.TimerHandle | None = None
    excused: str = ""
    """The last logged reason why it could not be frozen."""
    registered_ns: dict[int, int] = field(default_factory=dict)
    """When each process was last registered, for processes that were registered recently."""
    limited: dict[int, bool] = field(default_factory=dict)
    """Whether unregistered processes are held to the container's quota, by the index of each GPU on
    which the policy requires it."""

    @property
    def accused(self) -> bool:
        """Whether any violation is ongoing."""
        return any(device.judge.accuses for device in self.devices.values())

    def find_registered(self, now_ns: int) -> frozenset[int]:
        """Return the processes that are registered, or were until recently.

        NVML may still list a process shortly after the governor has seen its end.
        """
        for pid in self.container.pids():
            self.registered_ns[pid] = now_ns
        for pid in [p for p, at in self.registered_ns.items() if now_ns - at > LISTED_NS]:
            del self.registered_ns[pid]
        return frozenset(self.registered_ns)


class Auditor:
    """Audits the containers of one governor, on its event loop."""

    def __init__(self, containers: Mapping[str, Container], tally: Tally, config: Config) -> None:
        self._containers = containers
        self._tally = tally
        self._policy = config.on_violation
        self._watched: dict[Container, _Watched] = {}
        self._audited_ns: dict[str, int] = {}
        self._record = Path(config.runtime_dir) / RECORD
        self._began_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        self._left: list[dict[str, str]] = []  # entries of the record whose groups are still frozen
        self._again_at = 0.0
        self._thaw_leftovers()

    def configure(self, config: Config) -> None:
        """Apply a new configuration; a frozen container is still thawed when its time is over."""
        self._policy = config.on_violation

    # Sampling

    def wants_samples(self, device: Device) -> bool:
        """Return whether a GPU's utilisation samples are needed.

        They are needed if a container that has memory on the GPU was idle at the last audit. The
        samples reach back far enough to show which processes have worked since then.
        """
        return any(
            watched.container.findings.seen[i] and watched.devices[device.uuid].is_idle
            for watched in self._watched.values()
            for i, own in enumerate(watched.container.devices)
            if own.uuid == device.uuid and device.uuid in watched.devices
        )

    def audit(
        self,
        device: Device,
        sample: GpuSample,
        processes: Sequence[ProcessMemory],
        charges: Mapping[Container, Mapping[RegisteredProcess, Charge]],
    ) -> None:
        """Audit the containers against a sample of a GPU; `charges` were read before the sample."""
        now_ns = time.monotonic_ns()
        if now_ns - self._audited_ns.get(device.uuid, -AUDIT_NS) < AUDIT_NS:
            return
        self._audited_ns[device.uuid] = now_ns
        self._update_watched()
        if self._left and time.monotonic() >= self._again_at:
            self._thaw_again()
        owned = self._by_owner(device, processes)
        self._note_elsewhere(device, list(owned.get(None, {}).values()))
        # Only the samples have wall-clock times.
        wall_ns = time.time_ns() - time.monotonic_ns()
        for watched in list(self._watched.values()):
            container = watched.container
            if container not in charges:
                continue
            i = next(i for i, own in enumerate(container.devices) if own.uuid == device.uuid)
            own = owned.get(container, {})
            known = watched.find_registered(now_ns)
            container.findings.seen[i] = sum(one.used or 0 for one in own.values())
            idle = self._is_idle(watched, device, i, charges[container], now_ns)
            facts = Facts(
                now_ns=now_ns,
                allowed=allowed_memory(container.quota.memory, container.context_memory),
                memory={pid: one.used or 0 for pid, one in own.items()},
                unregistered=frozenset(
                    pid
                    for pid, one in own.items()
                    if pid not in known and one.computes and self._is_new(pid)
                ),
                samples=_samples(sample.samples, frozenset(own) | known, wall_ns),
                idle=idle,
                # A container that is being moved reports no work, and its memory is being copied.
                frozen=bool(watched.groups) or container.is_moving,
            )
            for episode, began in watched.devices[device.uuid].judge.observe(facts):
                self._report(watched, i, episode, began=began)
            strangers = [pid for pid, one in own.items() if pid not in known and one.computes]
            self._limit(watched, i, frozenset(strangers))
            self._act(watched)

    def _update_watched(self) -> None:
        """Forget containers that have ended, and watch new ones."""
        here = set(self._containers.values())
        for container in self._watched.keys() - here:
            watched = self._watched.pop(container)
            self._thaw(watched, "ended")
            for i, own in enumerate(container.devices):
                device = watched.devices.get(own.uuid)
                for episode in device.judge.end() if device is not None else ():
                    self._report(watched, i, episode, began=False)
        for container in here - self._watched.keys():
            self._watched[container] = _Watched(container)

    def _by_owner(
        self, device: Device, processes: Sequence[ProcessMemory]
    ) -> dict[Container | None, dict[int, ProcessMemory]]:
        """Return the processes by container; the key None holds those of no container on this GPU.

        A process is matched to a container by its registration, control group or pid namespace.
        """
        here = [
            one
            for one in self._watched.values()
            if any(own.uuid == device.uuid for own in one.container.devices)
        ]
        registered = {pid: one.container for one in here for pid in one.container.pids()}
        owned: dict[Container | None, dict[int, ProcessMemory]] = {}
        for one in processes:
            owner = registered.get(one.pid) or find_owner(one.pid, [w.container for w in here])
            owned.setdefault(owner, {})[one.pid] = one
        return owned

    def _note_elsewhere(self, device: Device, processes: Sequence[ProcessMemory]) -> None:
        """Record processes that belong to containers without an allocation on this GPU."""
        others = [
            one
            for one in self._watched.values()
            if all(own.uuid != device.uuid for own in one.container.devices)
        ]
        registered = {pid: one.container for one in others for pid in one.container.pids()}
        found: dict[Container, dict[int, int]] = {}
        for process in processes if others else ():
            owner = registered.get(process.pid) or find_owner(
                process.pid, [w.container for w in others]
            )
            if owner is not None and process.computes:
                found.setdefault(owner, {})[process.pid] = process.used or 0
        for one in others:
            held = dict(sorted(found.get(one.container, {}).items())[:MAX_ELSEWHERE])
            for pid in sorted(one.container.findings.note_elsewhere(device, held)):
                one.lines.warning(
                    "gpu-not-granted",
                    container=one.container.identifier,
                    gpu=device.index,
                    pid=pid,
                    hint="CUDA_VISIBLE_DEVICES should name the GPUs in /run/tidegate/devices",
                )

    def _is_new(self, pid: int) -> bool:
        """Return whether a process started after this governor.

        An older process may have had no governor to register with.
        """
        return started_ns(pid) > self._began_ns

    def _is_idle(
        self,
        watched: _Watched,
        device: Device,
        i: int,
        charges: Mapping[RegisteredProcess, Charge],
        now_ns: int,
    ) -> bool:
        """Return whether the container has had no grant and reported no work since the last sample.

        The report is not verified: a container that claims to have worked is not accused of
        `compute`. Nor is one whose processes allocate and free memory: the driver clears the memory
        and maps it on the GPU, and NVML shows that as their work (6 to 19 % on an H200).
        """
        stats = watched.container.account.stats(i)
        told = (
            int(stats.grants),
            int(stats.held_ns),
            sum(charge.busy_ns for charge in charges.values()),
            sum(charge.memory for charge in charges.values()),
            sum(charge.returned for charge in charges.values()),
        )
        passing = watched.container.account.passing(i)
        passing_ns = passing.count * SMALL_NS + passing.bytes // BYTES_PER_NS
        before = watched.devices.get(device.uuid)
        if before is None:
            before = watched.devices[device.uuid] = _Device(ViolationDetector(device.uuid), now_ns)
            idle = False
        else:
            passed = max(1, now_ns - before.looked_ns)
            idle = (
                not stats.since_ns
                and told == before.told
                and 0 <= passing_ns - before.passing_ns < QUIET * passed
                and not passing.pending
            )
        before.told, before.passing_ns, before.looked_ns = told, passing_ns, now_ns
        before.is_idle = idle
        return idle

    # Reporting

    def _report(self, watched: _Watched, i: int, episode: Episode, *, began: bool) -> None:
        container = watched.container
        if began:
            episode.began = time.time()
            container.findings.add(episode)
            container.findings.counts[i][episode.kind] += 1
            self._tally.violate(container.identifier, episode)
        else:
            episode.ended = time.time()
        (log.warning if began else log.info)(
            "violation" if began else "violation-ended",
            kind=episode.kind,
            container=container.identifier,
            gpu=container.devices[i].index,
            pid=episode.pid,
            found=_amount_text(episode.kind, episode.found),
            allowed=_amount_text(episode.kind, episode.allowed),
            **({"policy": self._policy} if began else {"seconds": _seconds(episode)}),
        )
        if began and self._policy == "stop":
            self._stop(container, episode)

    # Acting

    def _stop(self, container: Container, episode: Episode) -> None:
        try:
            container.kill()
        except OSError as e:
            log.warning("violation-stop-failed", container=container.identifier, error=e.strerror)
            return
        self._tally.stops += 1
        log.warning(
            "violation-stopped",
            container=container.identifier,
            kind=episode.kind,
            pid=container.pid,
        )

    def _limit(self, watched: _Watched, i: int, pids: frozenset[int]) -> None:
        """Hold unregistered processes to their container's quota, or stop doing so."""
        container = watched.container
        wanted = pids if self._policy == "limit" else frozenset()
        if not wanted and i not in watched.limited:
            return
        is_held = container.hold(i, wanted, lambda pid: find_owner(pid, [container]) is container)
        if wanted and not is_held and watched.limited.get(i, True):
            log.warning(
                "violation-limit-failed",
                container=container.identifier,
                error=f"grants divide the time of GPU {container.devices[i].index}",
                hint="set scheduling: hardware, or another on_violation",
            )
        if wanted:
            watched.limited[i] = is_held
        else:
            del watched.limited[i]

    def _act(self, watched: _Watched) -> None:
        """Freeze an accused container; do so again if it is still accused WATCH_S after a thaw."""
        if self._policy != "throttle" or watched.groups:
            return
        if watched.frozen_s is not None and time.monotonic() < watched.watched_until:
            return
        if watched.accused:
            self._freeze(watched)
        else:
            watched.frozen_s = None
            watched.excused = ""

    def _freeze(self, watched: _Watched) -> None:
        container = watched.container
        seconds = next_freeze(watched.frozen_s)
        stopped: list[Group] = []
        try:
            watched.groups = self._open_groups(watched)
            # Written before the freeze, so that a governor that dies in between leaves a record.
            self._write_record()
            for group in watched.groups:
                group.freeze()
                stopped.append(group)
        except (CannotFreezeError, OSError) as e:
            for group in stopped:
                try:
                    group.thaw()
                except (CannotFreezeError, OSError) as again:
                    self._keep_left(_entry(container, group), again)
            if watched.groups:
                for group in watched.groups:
                    group.close()
                watched.groups = []
                self._forget_record()
            if str(e) != watched.excused:
                watched.excused = str(e)
                log.warning(
                    "violation-throttle-failed", container=container.identifier, error=str(e)
                )
            return
        watched.frozen_s = seconds
        watched.excused = ""
        watched.thaw_at = time.monotonic() + seconds
        container.findings.frozen = True
        self._tally.throttles += 1
        for group in watched.groups:
            log.warning(
                "container-frozen",
                container=container.identifier,
                cgroup=group.path,
                seconds=seconds,
            )
        self._poll(watched)

    def _open_groups(self, watched: _Watched) -> list[Group]:
        """Open the control groups of a container's members.

        Raise CannotFreezeError if there is none. Members that cannot be frozen are omitted.
        """
        container = watched.container
        others = {
            member.identifier: member.membership
            for one in self._watched.values()
            if one is not watched
            for member in one.container.members
        }
        mounts = cgroups.find_mounts()
        groups: list[Group] = []
        reason = CannotFreezeError("its first process has ended")
        for member in container.members:
            try:
                group = cgroups.open_group(member.membership, member.pid, others, mounts)
            except CannotFreezeError as e:
                reason = e
                continue
            # The group was found by pid, which may be reused once the process has ended.
            if member.has_ended():
                group.close()
            else:
                groups.append(group)
        if not groups:
            raise reason
        return groups

    def _poll(self, watched: _Watched) -> None:
        left = max(0.0, watched.thaw_at - time.monotonic())
        loop = asyncio.get_running_loop()
        watched.timer = loop.call_later(min(POLL_S, left), self._tick, watched)

    def _tick(self, watched: _Watched) -> None:
        """Thaw a container when its time is over, or when it is being killed."""
        container = watched.container
        if container not in self._containers.values():
            self._thaw(watched, "ended")
        elif time.monotonic() >= watched.thaw_at:
            self._thaw(watched, "time")
        elif _is_killed(container):
            # With cgroups v1, a frozen process does not die even on SIGKILL.
            self._thaw(watched, "killed")
        else:
            self._poll(watched)

    def _thaw(self, watched: _Watched, why: str) -> None:
        if not watched.groups:
            return
        container, groups, watched.groups = watched.container, watched.groups, []
        if watched.timer is not None:
            watched.timer.cancel()
        for group in groups:
            try:
                group.thaw()
            except (CannotFreezeError, OSError) as e:
                is_left = self._keep_left(_entry(container, group), e)
                why = "failed" if is_left else "gone"  # the group, with all its processes
            group.close()
        container.findings.frozen = False
        watched.watched_until = time.monotonic() + WATCH_S
        self._forget_record()
        log.info("container-thawed", container=container.identifier, why=why)

    # The record of what is frozen

    def _write_record(self) -> None:
        frozen = self._left + [
            _entry(one.container, group) for one in self._watched.values() for group in one.groups
        ]
        if not frozen:
            self._record.unlink(missing_ok=True)
            return
        new = self._record.with_suffix(".new")
        new.write_text(json.dumps({"frozen": frozen}) + "\n", encoding="utf-8")
        new.replace(self._record)

    def _forget_record(self) -> None:
        """Update the record after a thaw; if that fails, a second thaw does no harm."""
        with contextlib.suppress(OSError):
            self._write_record()

    def _thaw_leftovers(self) -> None:
        """Thaw the containers that a dead governor left frozen."""
        try:
            frozen = list(json.loads(self._record.read_text(encoding="utf-8"))["frozen"])
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as e:
            log.warning("frozen-record-damaged", path=str(self._record), error=str(e))
            frozen = []
        for one in frozen:
            self._thaw_left(one, cgroups.find_mounts())
        self._forget_record()

    def _thaw_again(self) -> None:
        left, self._left = self._left, []
        for one in left:
            self._thaw_left(one, cgroups.find_mounts(), again=True)
        self._again_at = time.monotonic() + AGAIN_S
        self._forget_record()

    def _thaw_left(self, one: Any, mounts: Mapping[str, Path], *, again: bool = False) -> None:
        """Thaw a possibly malformed entry's group; keep the entry if the group stays frozen."""
        try:
            container = one.get("container")
            group = Group(str(one["hierarchy"]), str(one["cgroup"]), mounts)
            with contextlib.closing(group):
                group.thaw()
        except (CannotFreezeError, OSError, KeyError, AttributeError) as e:
            if not self._keep_left(one, e, again=again):
                log.info("container-thaw-failed", error=str(e))
        else:
            log.info("container-thawed", container=container, why="left over")

    def _keep_left(self, one: dict[str, str], e: Exception, *, again: bool = False) -> bool:
        """Keep the entry of a group whose thaw failed, unless the group is gone."""
        cause = e.__cause__ if isinstance(e, CannotFreezeError) else e
        if not isinstance(cause, OSError) or cause.errno in _GONE:
            return False
        self._left.append(one)
        self._again_at = time.monotonic() + AGAIN_S
        if not again:
            log.error(
                "container-stays-frozen",
                container=one.get("container"),
                cgroup=one.get("cgroup"),
                error=str(e),
            )
        return True

    def close(self) -> None:
        """Thaw every container: nothing else would."""
        for watched in self._watched.values():
            self._thaw(watched, "stopping")


def _entry(container: Container, group: Group) -> dict[str, str]:
    return {
        "container": container.identifier,
        "hierarchy": group.hierarchy,
        "cgroup": group.path,
    }


def _samples(
    samples: Sequence[ProcessUse], pids: frozenset[int], wall_ns: int
) -> tuple[ProcessSample, ...]:
    return tuple(
        ProcessSample(one.time_us * 1000 - wall_ns, one.pid, one.percent)
        for one in samples
        if one.pid in pids
    )


def _is_killed(container: Container) -> bool:
    """Return whether SIGKILL is pending for the first process of any member."""
    bit = 1 << (signal.SIGKILL - 1)
    return any(
        int(status_fields(member.pid).get(name, "0"), 16) & bit
        for member in container.members
        for name in ("SigPnd", "ShdPnd")
    )


def _amount_text(kind: str, amount: int) -> str:
    return f"{amount} %" if kind == COMPUTE else f"{amount >> 20} MiB"


def _seconds(episode: Episode) -> float:
    return round((episode.ended or 0.0) - episode.began, 1)
