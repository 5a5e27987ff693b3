"""Simulates a cluster of GPU nodes in virtual time, to show what sharing does at scale.

This is not a model of GPUs: whether quotas hold is shown elsewhere. It records which pod is placed
when, by kube-scheduler's rules. Pods are tried in order of arrival, and none blocks another. Nodes
are tried from where the previous pod's trial ended, until enough are feasible. The best score by
CPU wins, as with NodeResourcesFit. On a node the first GPU with room is taken, in the slice's
order, as by the allocator of DynamicResources. A GPU's capacities are 100 of `compute` and 100 of
`memory`.

Pods that did not fit are retried as soon as another pod ends; a real scheduler lets up to 10 s
pass.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

GPUS = 8
WHOLE = 100
CPU = 96_000
"""CPU of a node, in thousandths. Pods ask for 10 CPUs with a whole GPU, so CPU is never short."""
CPU_OF_GPU = 10_000

# Percentage of tasks by the number of GPUs that they ask for; 0 is a part of one. Weng et al.,
# "Beware of Fragmentation", USENIX ATC '23, Table 1: these are percentages of all tasks, of which
# 13.3 % ask for no GPU.
MIX = {0: 37.8, 1: 48.0, 2: 0.2, 4: 0.2, 8: 0.5}
PARTS = tuple(range(20, 95, 5))
"""Percentages of a GPU that sharing tasks ask for, with equal probability: 0.55 of a GPU on
average. With the mix above they are then 28.1 % of all GPUs asked for; that table says 28.5 %."""
# Run time: the simulator's published log of the 2020 trace (alibaba/clusterdata,
# cluster-trace-gpu-v2020/simulator) has a mean of 5,039 s; the paper on that trace (Weng et al.,
# "MLaaS in the Wild", NSDI '22) has a median of 23 min. This log-normal distribution has both.
MEAN_S = 5039.0
MEDIAN_S = 23 * 60.0
SIGMA = math.sqrt(2 * math.log(MEAN_S / MEDIAN_S))


@dataclass(frozen=True)
class Shape:
    """What a pod asks for: `compute` and `memory` of each of `count` GPUs, in percent."""

    count: int
    compute: int
    memory: int

    @property
    def gpus(self) -> float:
        """GPU time asked for, in GPUs."""
        return self.count * self.compute / WHOLE


@dataclass(frozen=True)
class Arm:
    """A policy of a cluster: whether GPUs are shared, and which nodes are preferred."""

    name: str
    shares: bool
    packs: bool
    """Prefers fuller nodes (MostAllocated) instead of emptier ones, which is the default."""


ARMS = (
    Arm("whole GPUs", shares=False, packs=False),
    Arm("whole GPUs, packed", shares=False, packs=True),
    Arm("shares", shares=True, packs=False),
    Arm("shares, packed", shares=True, packs=True),
)


@dataclass(frozen=True)
class Scenario:
    """A cluster and its load: `load` is the GPU time asked for, as a fraction of all its GPUs."""

    nodes: int = 1000
    load: float = 0.9
    hours: float = 6.0
    warm_hours: float = 1.0
    sharing: float | None = None
    """What sharing tasks ask for, as a fraction of the total; None is the trace's fraction."""
    seed: int = 1


@dataclass
class Outcome:
    """What happened between `warm_hours` and `hours`."""

    running: float = 0.0
    """Mean GPU time asked for by the pods that ran, as a fraction of all GPUs."""
    taken: float = 0.0
    """Mean GPU time that no other pod could have had, as a fraction of all GPUs."""
    waits: list[float] = field(default_factory=list)
    """Sorted waits of pods in seconds; for pods that still waited, their waits so far."""
    left_waiting: int = 0
    pods: int = 0

    def quantile(self, part: float) -> float:
        """Return the wait that the fraction `part` of all pods does not exceed."""
        return (
            self.waits[min(int(part * len(self.waits)), len(self.waits) - 1)] if self.waits else 0.0
        )

    @property
    def mean_wait(self) -> float:
        """Return the mean wait."""
        return sum(self.waits) / len(self.waits) if self.waits else 0.0


def mix_for(sharing: float | None) -> dict[int, float]:
    """Return the mix in which sharing tasks ask for the fraction `sharing` of all GPUs."""
    if sharing is None:
        return dict(MIX)
    part = sum(PARTS) / len(PARTS) / WHOLE
    rest = sum(weight * count for count, weight in MIX.items() if count)
    if sharing >= 1:
        return {0: 1.0}
    return {**MIX, 0: sharing / (1 - sharing) * rest / part}


def draw_shape(draw: random.Random, kinds: Sequence[int], weights: Sequence[float]) -> Shape:
    """Draw what a pod asks for; its memory is between 0.5 and 1.5 times its compute."""
    (count,) = draw.choices(kinds, weights)
    if count:
        return Shape(count, WHOLE, WHOLE)
    compute = draw.choice(PARTS)
    memory = min(max(round(compute * draw.uniform(0.5, 1.5) / 5) * 5, 5), WHOLE)
    return Shape(1, compute, memory)


class Cluster:
    """The nodes, and the scheduler's choice among them."""

    def __init__(self, nodes: int, arm: Arm, draw: random.Random) -> None:
        self.arm = arm
        self._draw = draw
        self._compute = [[WHOLE] * GPUS for _ in range(nodes)]
        self._memory = [[WHOLE] * GPUS for _ in range(nodes)]
        self._cpu = [CPU] * nodes
        self._largest = [WHOLE] * nodes
        """The most compute that a GPU of each node has left, which decides most trials."""
        self._next = 0
        # Number of feasible nodes that kube-scheduler scores (percentageOfNodesToScore is 0).
        self._enough = max(100, nodes * max(5, 50 - nodes // 125) // 100)

    def needs(self, shape: Shape) -> Shape:
        """Return what is allocated for a shape."""
        return shape if self.arm.shares else Shape(shape.count, WHOLE, WHOLE)

    def fit(self, node: int, shape: Shape) -> list[int]:
        """Return the GPUs of a node for a shape: the first with room, or none if too few have."""
        compute, memory = self._compute[node], self._memory[node]
        found = []
        for gpu in range(GPUS):
            if compute[gpu] >= shape.compute and memory[gpu] >= shape.memory:
                found.append(gpu)
                if len(found) == shape.count:
                    return found
        return []

    def choose(self, shape: Shape) -> tuple[int, list[int]] | None:
        """Return the node and the GPUs for a shape, None if it fits nowhere."""
        nodes = len(self._cpu)
        best: tuple[int, list[int]] | None = None
        top, ties, feasible = -1, 0, 0
        largest, most = self._largest, shape.compute
        node = self._next
        for _ in range(nodes):
            if largest[node] >= most and (gpus := self.fit(node, shape)):
                feasible += 1
                free = self._cpu[node]
                score = CPU - free if self.arm.packs else free
                score = score * 100 // CPU  # to the scheduler's range, 0 to 100
                if score > top:
                    best, top, ties = (node, gpus), score, 1
                elif score == top:
                    ties += 1
                    if self._draw.randrange(ties) == 0:
                        best = (node, gpus)
                if feasible >= self._enough:
                    break
            node = node + 1 if node + 1 < nodes else 0
        self._next = (node + 1) % nodes
        return best

    def change(self, node: int, gpus: Sequence[int], shape: Shape, cpu: int, sign: int) -> None:
        """Take what a shape needs (sign -1), or give it back (sign 1)."""
        for gpu in gpus:
            self._compute[node][gpu] += sign * shape.compute
            self._memory[node][gpu] += sign * shape.memory
        self._largest[node] = max(self._compute[node])
        self._cpu[node] += sign * cpu


@dataclass
class _Pod:
    shape: Shape
    duration: float
    arrived: float
    counts: bool
    """Whether its wait is recorded: not for pods of the initial state and the warm-up."""


def simulate(scenario: Scenario, arm: Arm) -> Outcome:
    """Return what happens to a scenario's pods, which are the same for all arms."""
    arrivals = random.Random(scenario.seed)  # noqa: S311 - no secret
    cluster = Cluster(scenario.nodes, arm, random.Random(scenario.seed + 1))  # noqa: S311
    mix = mix_for(scenario.sharing)
    kinds, weights = list(mix), list(mix.values())
    all_gpus = scenario.nodes * GPUS
    part = sum(PARTS) / len(PARTS) / WHOLE
    each = sum(w * (kind or part) for kind, w in mix.items()) / sum(weights)
    rate = scenario.load * all_gpus / each / MEAN_S
    end, warm = scenario.hours * 3600, scenario.warm_hours * 3600

    outcome = Outcome()
    running: list[tuple[float, int, int, list[int], Shape, _Pod]] = []
    waiting: dict[Shape, deque[_Pod]] = {}
    serial = 0
    used = taken = 0.0
    last = 0.0

    def account(now: float) -> None:
        nonlocal last
        span = min(now, end) - max(last, warm)
        if span > 0:
            outcome.running += used * span
            outcome.taken += taken * span
        last = now

    def start(pod: _Pod, node: int, gpus: list[int], now: float) -> None:
        nonlocal serial, used, taken
        needs = cluster.needs(pod.shape)
        cluster.change(node, gpus, needs, round(CPU_OF_GPU * pod.shape.gpus), -1)
        serial += 1
        heapq.heappush(running, (now + pod.duration, serial, node, gpus, needs, pod))
        used += pod.shape.gpus
        taken += needs.gpus
        if pod.counts:
            outcome.waits.append(now - pod.arrived)

    def arrive(pod: _Pod, now: float) -> None:
        found = None
        needs = cluster.needs(pod.shape)
        # If a pod of the same shape is waiting already, there is no room for this one either.
        if not waiting.get(needs):
            found = cluster.choose(needs)
        if found:
            start(pod, *found, now)
        else:
            waiting.setdefault(needs, deque()).append(pod)

    def finish(now: float) -> None:
        nonlocal used, taken
        _, _, node, gpus, needs, pod = heapq.heappop(running)
        cluster.change(node, gpus, needs, round(CPU_OF_GPU * pod.shape.gpus), 1)
        used -= pod.shape.gpus
        taken -= needs.gpus
        # The waiting pods fit on no other node; they are placed in order of arrival.
        while True:
            fitting = [
                (queue[0].arrived, shape)
                for shape, queue in waiting.items()
                if queue and cluster.fit(node, shape)
            ]
            if not fitting:
                return
            _, shape = min(fitting, key=lambda one: one[0])
            start(waiting[shape].popleft(), node, cluster.fit(node, shape), now)

    # Pods that are running at time 0, as many as in the steady state: long ones are more frequent
    # (a length-biased distribution), and each runs for a random rest of its time.
    for _ in range(round(rate * MEAN_S)):
        shape = draw_shape(arrivals, kinds, weights)
        length = arrivals.lognormvariate(math.log(MEDIAN_S) + SIGMA**2, SIGMA)
        arrive(_Pod(shape, length * arrivals.random(), 0.0, counts=False), 0.0)
    now = 0.0
    while True:
        now += arrivals.expovariate(rate)
        while running and running[0][0] <= min(now, end):
            moment = running[0][0]
            account(moment)
            finish(moment)
        if now > end:
            break
        account(now)
        shape = draw_shape(arrivals, kinds, weights)
        length = arrivals.lognormvariate(math.log(MEDIAN_S), SIGMA)
        outcome.pods += now > warm
        arrive(_Pod(shape, length, now, counts=now > warm), now)
    account(end)
    for queue in waiting.values():
        late = [end - pod.arrived for pod in queue if pod.counts]
        outcome.left_waiting += len(late)
        outcome.waits += late
    outcome.waits.sort()
    outcome.running /= all_gpus * (end - warm)
    outcome.taken /= all_gpus * (end - warm)
    return outcome
