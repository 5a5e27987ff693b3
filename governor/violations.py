"""What a look at NVML says against a container: that it holds or works more than is charged.

Pure: no clock, no driver, no file. A look can be wrong, because its numbers are not of one moment,
and honest work leaves traces after its grant. So a single look never makes a violation: a
`ViolationDetector` (one for each container and GPU) reports it once when it has lasted for a while,
and once when it is over. A while is uninterrupted time, or time that adds up: the sum finds a
program that keeps the rules for a moment now and then, when a look may come. Bytes, percent,
nanoseconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from governor.quota import Device

MEMORY, UNREGISTERED, COMPUTE = KINDS = ("memory", "unregistered", "compute")

LIBRARIES = 128 << 20
"""How many bytes the code of libraries may exceed a quota by, see libcontrol/loads.h."""

MEMORY_NS = 1_000_000_000
"""Time for which each look has to find more memory than is allowed, before that is a violation. A
process that gives memory back and another that takes it may both have it in one look. Within a
quarter of a second, memory that the driver took is charged, and new memory is refused."""
MEMORY_LOOKS = 4
MEMORY_SUM_NS = 1_000_000_000
"""Memory beyond what is allowed is summed up as bytes times time, even if looks without it lie in
between. The sum makes a violation when it is the allowed memory times this time."""

UNREGISTERED_NS = 500_000_000
"""Time for which a process has to compute without having registered. A process that starts
registers before it has a context, and one that ended may still be listed."""
UNREGISTERED_LOOKS = 2
UNREGISTERED_SUM_NS = 500_000_000
"""The same as a sum over processes that come and go, even if looks without any lie in between."""
SUM_LOOKS = 3
"""Minimum number of looks that a sum is made of."""
LOOK_NS = 250_000_000
"""A look says nothing about more time than this before it."""
LEAK = 0.1
"""Part of the time without a violation that is taken off its sum. A look is seldom wrong, because
NVML's list comes from one call, and then by what is allowed at most: it shows memory that one
process has given to another with both."""

GONE_NS = 500_000_000
"""A violation of memory or registration is over when nothing of it was seen for this time."""

SETTLE_NS = 1_000_000_000
"""NVML's samples reach back for up to a second. For this time after a container had the GPU or
reported work, samples may be of that work."""
SAMPLES = 3
SAMPLED_NS = 400_000_000
"""Number of samples, and the time over which they have to spread, that show that a container
without a grant works."""
EVIDENCE_NS = 2_500_000_000
"""Samples that are older are forgotten."""
WORKLESS_NS = 2_000_000_000
"""A violation of compute is over when no sample has named the container for this time."""
LEAST_PERCENT = 5
"""Lowest percentage that counts: a context's own housekeeping shows as this at most."""
LATE_NS = 750_000_000
"""Looks that are further apart say nothing about the time between: a container gives itself its
share when its governor does not answer (`on_governor_loss`)."""

MOST_ELSEWHERE = 32
"""Number of processes that are told of a container on GPUs that are not its own."""
MOST_EPISODES = 32
"""Number of violations that are remembered of a container; those that last are always kept."""


def allowed_memory(limit: int, context_bytes: int) -> int:
    """Return how many bytes a container with a quota of `limit` may hold by NVML's numbers.

    That is the quota; 128 MiB, by which libraries that come with a first kernel may exceed it, as
    no program expects a launch to fail for the code of a framework; and a quarter of a context,
    because a context that was created while there was room may be larger than the configuration
    says.
    """
    return limit + LIBRARIES + context_bytes // 4


@dataclass(frozen=True)
class ProcessSample:
    """One of NVML's samples of a process of the container, on the clock of the looks."""

    time_ns: int
    pid: int
    percent: int


@dataclass(frozen=True)
class Facts:
    """What one look says about a container on one GPU."""

    now_ns: int
    allowed: int
    memory: Mapping[int, int]
    """Bytes that NVML sees of each of its processes, registered or not, by host pid."""
    unregistered: frozenset[int] = frozenset()
    """Those of the processes that compute without having registered."""
    samples: Sequence[ProcessSample] = ()
    idle: bool = False
    """Whether it had no grant, and reported no work, since the previous look."""
    frozen: bool = False
    """Whether the governor has frozen it: what it does not do now, it may do again later."""


@dataclass
class Episode:
    """A violation from its beginning to its end: what was found, and what was allowed.

    These are bytes for memory, bytes and 0 for an unregistered process, percent of the GPU and 0
    for compute. Times are seconds since 1970.
    """

    kind: str
    gpu: str
    pid: int
    found: int
    allowed: int
    began: float = 0.0
    ended: float | None = None

    def describe(self) -> dict[str, Any]:
        """Return it as plain values."""
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
    """What is remembered of a container: written by the auditor, read for display."""

    n_devices: int
    episodes: list[Episode] = field(default_factory=list)
    frozen: bool = False
    seen: list[int] = field(init=False)
    """Bytes that NVML saw of its processes, registered or not, on each GPU at the last look."""
    counts: list[Counter[str]] = field(init=False)
    """Violations that began, by kind, on each GPU."""
    elsewhere: dict[str, tuple[int, dict[int, int]]] = field(default_factory=dict)
    """GPUs that it uses and was not granted, by UUID: their index, and the bytes of each process at
    the last look, by host pid. Nothing holds these to a quota, and no rule forbids it."""

    def __post_init__(self) -> None:
        self.seen = [0] * self.n_devices
        self.counts = [Counter() for _ in range(self.n_devices)]

    def add(self, episode: Episode) -> None:
        """Remember a violation that begins; of too many, forget the oldest that is over."""
        self.episodes.append(episode)
        if len(self.episodes) > MOST_EPISODES:
            over = next((one for one in self.episodes if one.ended is not None), None)
            if over is not None:
                self.episodes.remove(over)

    def note_elsewhere(self, gpu: Device, processes: dict[int, int]) -> frozenset[int]:
        """Note which of its processes a look found on a GPU that is not its own.

        Returns those that the look before did not find there.
        """
        _, before = self.elsewhere.pop(gpu.uuid, (gpu.index, {}))
        if processes:
            self.elsewhere[gpu.uuid] = gpu.index, processes
        return frozenset(processes.keys() - before.keys())

    def lasts(self, gpu: str, kind: str) -> bool:
        """Return whether a violation of this kind lasts."""
        return any(
            one.ended is None and (one.gpu, one.kind) == (gpu, kind) for one in self.episodes
        )

    def describe(self) -> dict[str, Any]:
        """Return what `tidegate ps --json` shows: violations, the newest last."""
        return {
            "frozen": self.frozen,
            "violations": [episode.describe() for episode in self.episodes],
            "elsewhere": self.describe_elsewhere(),
        }

    def describe_elsewhere(self) -> list[dict[str, Any]]:
        """Return its processes on GPUs that are not its own, as plain values."""
        return [
            {"gpu": uuid, "index": index, "pid": pid, "memory": memory}
            for uuid, (index, processes) in sorted(self.elsewhere.items())
            for pid, memory in sorted(processes.items())
        ][:MOST_ELSEWHERE]


class _Lasting:
    """A condition that counts when it has held for a while, until it has not for a while."""

    def __init__(self, begin_ns: int, looks: int, end_ns: int) -> None:
        self._begin_ns, self._looks, self._end_ns = begin_ns, looks, end_ns
        self._since: int | None = None
        self._times = 0
        self._last = 0
        self.lasts = False

    def observe(self, now_ns: int, *, is_so: bool) -> bool:
        """Return whether the condition lasts, after a look in which it holds or not."""
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
    """A condition that holds now and then: a bucket that fills meanwhile, and leaks otherwise."""

    def __init__(self, full_ns: int, end_ns: int) -> None:
        self._full_ns, self._end_ns = full_ns, end_ns
        self._level = 0.0
        self._looks = 0
        self._looked: int | None = None
        self._last = 0
        self._lasts = False

    def observe(self, now_ns: int, rate: float) -> bool:
        """Return whether it lasts; `rate` is how fast the bucket fills, 0 if nothing was found.

        Once the bucket has been full, one more look with the condition is enough, until the bucket
        has leaked.
        """
        passed = 0 if self._looked is None else min(now_ns - self._looked, LOOK_NS)
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
    """Whether NVML's samples name a container that has done nothing according to its ledger.

    Under contention a sample names one process, with nearly all of the GPU. So the percentage says
    little. But that the process is named says that it worked, although its container has had no
    grant for longer than a sample reaches back.
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
        """Return whether it lasts."""
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
            # If the clock was set, times may lie in the future.
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
        """Whether a violation lasts."""
        return bool(self._episodes)

    def end(self) -> list[Episode]:
        """Return the violations that last; they are over, because the container has ended."""
        lasted = list(self._episodes.values())
        self._episodes.clear()
        return lasted

    def observe(self, facts: Facts) -> list[tuple[Episode, bool]]:
        """Return the violations that began (True) or ended (False) with this look."""
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
    """Return how long to freeze a container, in seconds.

    `last_s` is the length of the previous freeze, None if this one is the first in a row.
    """
    return FIRST_S if last_s is None else min(2 * last_s, LONGEST_S)


WATCH_S = 2.5
"""How long a thawed container is watched, in seconds: any violation shows again within this time.
"""
