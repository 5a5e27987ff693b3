"""Decide from NVML's samples whether a container violates its quota.

The module is pure: it uses no clock, driver or file. A sample can be wrong, because its values are
not read at one instant, and legitimate work is still visible after its grant. Therefore a single
sample is never a violation: a `ViolationDetector` (one for each container and GPU) reports a
violation once when it has lasted for some time, and once when it is over. That time is either
uninterrupted or cumulative: the cumulative time catches a program that complies from time to time,
in case a sample is taken just then. Units are bytes, percent and nanoseconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from governor.quota import Device

MEMORY, UNREGISTERED, COMPUTE = KINDS = ("memory", "unregistered", "compute")

LIBRARIES = 128 << 20
"""Bytes by which the code of libraries may exceed a quota; see libcontrol/loads.h."""

MEMORY_NS = 1_000_000_000
"""Time for which each sample has to show more memory than is allowed before that is a violation.
If a process frees memory and another allocates it, one sample may show both. Memory that the driver
took is charged within a quarter of a second, and then allocations are refused."""
MEMORY_LOOKS = 4
"""Minimum number of such samples."""
MEMORY_SUM_NS = 1_000_000_000
"""The excess memory is summed up as bytes times time, even if samples in between show no excess. It
is a violation when the sum reaches the allowed memory times this time."""

UNREGISTERED_NS = 500_000_000
"""Time for which a process has to compute without having registered. A new process registers before
it has a context, and one that has ended may still be listed."""
UNREGISTERED_LOOKS = 2
"""Minimum number of samples that show such a process."""
UNREGISTERED_SUM_NS = 500_000_000
"""The same time as a sum over short-lived processes, even if samples in between show none."""
SUM_LOOKS = 3
"""Minimum number of samples in a sum."""
SAMPLE_NS = 250_000_000
"""Maximum time for which one sample counts towards a sum."""
LEAK = 0.1
"""Fraction of the time without an observed violation that is subtracted from a sum. A sample is
seldom wrong, because NVML's list comes from one call. If it is, the error is at most the allowed
memory, which is counted twice if one process freed it and another allocated it."""

GONE_NS = 500_000_000
"""A memory or registration violation is over when no sample has shown it for this time."""

SETTLE_NS = 1_000_000_000
"""NVML's utilisation samples cover up to the last second. For this time after a container had the
GPU or reported work, samples may still show that work."""
SAMPLES = 3
SAMPLED_NS = 400_000_000
"""Minimum number of samples, and the minimum time that they span, to show that a container without
a grant is working."""
EVIDENCE_NS = 2_500_000_000
"""Samples older than this are forgotten."""
WORKLESS_NS = 2_000_000_000
"""A compute violation is over when no sample has named the container for this time."""
LEAST_PERCENT = 5
"""Lowest percentage that counts: a context's own housekeeping stays below it."""
LATE_NS = 750_000_000
"""If samples are further apart than this, the time in between is not judged: a container grants
itself its share while the governor does not respond (`on_governor_loss`)."""

MAX_ELSEWHERE = 32
"""Maximum number of reported processes of a container on GPUs that were not granted to it."""
MAX_EPISODES = 32
"""Number of violations of a container that are kept; ongoing ones are always kept."""


def allowed_memory(limit: int, context_bytes: int) -> int:
    """Return the bytes that a container with a quota of `limit` bytes may hold according to NVML.

    That is the sum of three parts: the quota; 128 MiB for libraries that are loaded with a first
    kernel, because no program expects a launch to fail because of a framework's code; and a quarter
    of a context, because a context that was created while there was room may be larger than
    configured.
    """
    return limit + LIBRARIES + context_bytes // 4


@dataclass(frozen=True)
class ProcessSample:
    """One of NVML's utilisation samples for a container's process, on the monotonic clock."""

    time_ns: int
    pid: int
    percent: int


@dataclass(frozen=True)
class Facts:
    """The findings from one sample about a container on one GPU."""

    now_ns: int
    allowed: int
    memory: Mapping[int, int]
    """Each process's memory according to NVML, registered or not, in bytes by host pid."""
    unregistered: frozenset[int] = frozenset()
    """The processes that compute without having registered."""
    samples: Sequence[ProcessSample] = ()
    idle: bool = False
    """Whether the container has had no grant, and reported no work, since the previous sample."""
    frozen: bool = False
    """Whether the governor has frozen the container, so that a lack of evidence proves nothing."""


@dataclass
class Episode:
    """A violation from its beginning to its end: what was found, and what was allowed.

    For memory, both `found` and `allowed` are in bytes. For an unregistered process, `found` is in
    bytes, and for compute it is in percent of the GPU; in both cases `allowed` is 0. Times are
    seconds since 1970.
    """

    kind: str
    gpu: str
    pid: int
    found: int
    allowed: int
    began: float = 0.0
    ended: float | None = None

    def describe(self) -> dict[str, Any]:
        """Return the violation as plain values."""
        return {
            "kind": self.kind,
            "gpu": self.gpu,
            "pid": self.pid,
            "found": self.found,
            "allowed": self.allowed,
            "began": round(self.began, 3),
            "ended": None if self.ended is None else round(self.ended, 3),
        }


@dataclass
class Findings:
    """The findings about a container: written by the auditor, read for display."""

    n_devices: int
    episodes: list[Episode] = field(default_factory=list)
    frozen: bool = False
    seen: list[int] = field(init=False)
    """Memory of the container's processes, registered or not, in bytes by GPU, according to NVML in
    the last sample."""
    counts: list[Counter[str]] = field(init=False)
    """Violations that began, by kind, on each GPU."""
    elsewhere: dict[str, tuple[int, dict[int, int]]] = field(default_factory=dict)
    """GPUs that the container uses but was not granted, by UUID: their index, and the bytes of each
    process in the last sample, by host pid. This memory is not held to a quota, and is not a
    violation."""

    def __post_init__(self) -> None:
        self.seen = [0] * self.n_devices
        self.counts = [Counter() for _ in range(self.n_devices)]

    def add(self, episode: Episode) -> None:
        """Add a violation that has begun; if there are too many, drop the oldest that is over."""
        self.episodes.append(episode)
        if len(self.episodes) > MAX_EPISODES:
            over = next((one for one in self.episodes if one.ended is not None), None)
            if over is not None:
                self.episodes.remove(over)

    def note_elsewhere(self, gpu: Device, processes: dict[int, int]) -> frozenset[int]:
        """Record the container's processes that a sample found on a GPU not granted to it.

        Return those that the previous sample did not find there.
        """
        _, before = self.elsewhere.pop(gpu.uuid, (gpu.index, {}))
        if processes:
            self.elsewhere[gpu.uuid] = gpu.index, processes
        return frozenset(processes.keys() - before.keys())

    def lasts(self, gpu: str, kind: str) -> bool:
        """Return whether a violation of this kind is ongoing."""
        return any(
            one.ended is None and (one.gpu, one.kind) == (gpu, kind) for one in self.episodes
        )

    def describe(self) -> dict[str, Any]:
        """Return the findings for `tidegate ps --json`, with the newest violation last."""
        return {
            "frozen": self.frozen,
            "violations": [episode.describe() for episode in self.episodes],
            "elsewhere": self.describe_elsewhere(),
        }

    def describe_elsewhere(self) -> list[dict[str, Any]]:
        """Return the container's processes on GPUs not granted to it, as plain values."""
        return [
            {"gpu": uuid, "index": index, "pid": pid, "memory": memory}
            for uuid, (index, processes) in sorted(self.elsewhere.items())
            for pid, memory in sorted(processes.items())
        ][:MAX_ELSEWHERE]


class _Lasting:
    """A condition with hysteresis: it begins (ends) once it has held (been absent) for a while."""

    def __init__(self, begin_ns: int, looks: int, end_ns: int) -> None:
        self._begin_ns, self._looks, self._end_ns = begin_ns, looks, end_ns
        self._since: int | None = None
        self._times = 0
        self._last = 0
        self.lasts = False

    def observe(self, now_ns: int, *, is_so: bool) -> bool:
        """Return whether the condition lasts; `is_so` is whether it holds in this sample."""
        if is_so:
            self._since = now_ns if self._since is None else self._since
            self._times += 1
            self._last = now_ns
            if self._times >= self._looks and now_ns - self._since >= self._begin_ns:
                self.lasts = True
        else:
            self._since, self._times = None, 0
            if now_ns - self._last >= self._end_ns:
                self.lasts = False
        return self.lasts


class _Sum:
    """A leaky bucket for a condition that holds intermittently."""

    def __init__(self, full_ns: int, end_ns: int) -> None:
        self._full_ns, self._end_ns = full_ns, end_ns
        self._level = 0.0
        self._looks = 0
        self._looked: int | None = None
        self._last = 0
        self._lasts = False

    def observe(self, now_ns: int, rate: float) -> bool:
        """Return whether the condition lasts; `rate`, which fills the bucket, is 0 if it is absent.

        It lasts from the sample that fills the bucket until the condition has been absent for
        `end_ns`. The bucket is not emptied then, but only leaks, and the condition begins again
        once the bucket is full again.
        """
        passed = 0 if self._looked is None else min(now_ns - self._looked, SAMPLE_NS)
        self._looked = now_ns
        if rate > 0:
            self._level = min(self._level + rate * passed, 2.0 * self._full_ns)
            self._looks += 1
            self._last = now_ns
            self._lasts |= self._level >= self._full_ns and self._looks >= SUM_LOOKS
        else:
            self._level -= LEAK * passed
            if self._level <= 0:
                self._level, self._looks = 0.0, 0
            if now_ns - self._last >= self._end_ns:
                self._lasts = False
        return self._lasts


class _Working:
    """Whether NVML's samples name a container that, according to its ledger, did no work.

    Under contention a sample names one process, with nearly all of the GPU, so the percentage means
    little. But a process that is named did work, although its container has had no grant for longer
    than a sample covers.
    """

    def __init__(self) -> None:
        self._looked: int | None = None
        self._idle_since = 0
        self._evidence: dict[int, ProcessSample] = {}  # by time
        self._last = 0
        self.lasts = False
        self.pid = 0
        self.percent = 0

    def observe(self, facts: Facts) -> bool:
        """Return whether the condition lasts, after a sample."""
        now_ns, before = facts.now_ns, self._looked
        self._looked = now_ns
        if before is None or not facts.idle or now_ns - before > LATE_NS:
            self._idle_since = now_ns
            self._evidence.clear()
        elif not facts.frozen:
            self._collect(facts)
        if facts.frozen:
            self._evidence.clear()
            self._last = now_ns
        elif now_ns - self._last >= WORKLESS_NS:
            self.lasts = False
        return self.lasts

    def _collect(self, facts: Facts) -> None:
        now_ns = facts.now_ns
        for sample in facts.samples:
            # If the clock was set back, times may be in the future.
            if (
                self._idle_since + SETTLE_NS < sample.time_ns <= now_ns
                and LEAST_PERCENT <= sample.percent <= 100  # drivers have reported nonsense
            ):
                self._evidence.setdefault(sample.time_ns, sample)
        for at in [at for at in self._evidence if at < now_ns - EVIDENCE_NS]:
            del self._evidence[at]
        times = sorted(self._evidence)
        if times and (self.lasts or (len(times) >= SAMPLES and times[-1] - times[0] >= SAMPLED_NS)):
            self.lasts = True
            self._last = max(self._last, times[-1])
            self.pid = self._evidence[times[-1]].pid
            percents = [sample.percent for sample in self._evidence.values()]
            self.percent = sum(percents) // len(percents)


class ViolationDetector:
    """The violations of one container on one GPU."""

    def __init__(self, gpu: str) -> None:
        self._gpu = gpu
        self._memory = _Lasting(MEMORY_NS, MEMORY_LOOKS, GONE_NS)
        self._memory_sum = _Sum(MEMORY_SUM_NS, GONE_NS)
        self._unregistered = _Lasting(UNREGISTERED_NS, UNREGISTERED_LOOKS, GONE_NS)
        self._unregistered_sum = _Sum(UNREGISTERED_SUM_NS, GONE_NS)
        self._working = _Working()
        self._episodes: dict[str, Episode] = {}

    @property
    def accuses(self) -> bool:
        """Whether a violation is ongoing."""
        return bool(self._episodes)

    def end(self) -> list[Episode]:
        """Return the ongoing violations; they are over, because the container has ended."""
        lasted = list(self._episodes.values())
        self._episodes.clear()
        return lasted

    def observe(self, facts: Facts) -> list[tuple[Episode, bool]]:
        """Return the violations that began (True) or ended (False) with this sample."""
        total = sum(facts.memory.values())
        stranger = max(facts.unregistered, key=lambda pid: facts.memory.get(pid, 0), default=0)
        largest = max(facts.memory, key=lambda pid: facts.memory[pid], default=0)
        now_ns, has_strangers = facts.now_ns, bool(facts.unregistered)
        beyond = max(0, total - facts.allowed) / max(1, facts.allowed)
        is_over = self._memory.observe(now_ns, is_so=beyond > 0)
        is_often_over = self._memory_sum.observe(now_ns, beyond)
        is_unregistered = self._unregistered.observe(now_ns, is_so=has_strangers)
        is_often_unregistered = self._unregistered_sum.observe(now_ns, float(has_strangers))
        lasting = {
            MEMORY: is_over or is_often_over,
            UNREGISTERED: is_unregistered or is_often_unregistered,
            COMPUTE: self._working.observe(facts),
        }
        found = {
            MEMORY: (largest, total, facts.allowed),
            UNREGISTERED: (stranger, facts.memory.get(stranger, 0), 0),
            COMPUTE: (self._working.pid, self._working.percent, 0),
        }
        changes = []
        for kind, lasts in lasting.items():
            if lasts and kind not in self._episodes:
                self._episodes[kind] = Episode(kind, self._gpu, *found[kind])
                changes.append((self._episodes[kind], True))
            elif not lasts and kind in self._episodes:
                changes.append((self._episodes.pop(kind), False))
        return changes


FIRST_S = 1.0
LONGEST_S = 32.0


def next_freeze(last_s: float | None) -> float:
    """Return the duration of the next freeze of a container, in seconds.

    `last_s` is the length of the previous freeze, None if this one is the first of a series.
    """
    return FIRST_S if last_s is None else min(2 * last_s, LONGEST_S)


WATCH_S = 2.5
"""Time for which a thawed container is watched, in seconds. Any violation shows up again within
this time."""
