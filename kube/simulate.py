"""A cluster of GPU nodes under kube-scheduler's rules, in virtual time: what sharing does at scale.

Not a model of GPUs: whether quotas hold is shown elsewhere. It counts who is placed when, by the
rules that a cluster has: pods in order of arrival, none blocks another; nodes are tried from where
the last pod's trial ended until enough are feasible; the best score by CPU wins, as of
NodeResourcesFit; on a node the first GPU in the slice's order that has room is taken, as of the
allocator of DynamicResources. A GPU's capacities are 100 of `compute` and 100 of `memory`.

Pods that did not fit are tried again as soon as one ends; a real scheduler lets up to 10 s pass.
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
"""Of a node, in thousandths; pods ask for 10 CPUs with a whole GPU, so it is never short."""
CPU_OF_GPU = 10_000

# GPU tasks by how many GPUs they ask for; 0 is a part of one. Weng et al., "Beware of
# Fragmentation", USENIX ATC '23, Table 1: these parts of all tasks, and 13.3 % ask for none.
MIX = {0: 37.8, 1: 48.0, 2: 0.2, 4: 0.2, 8: 0.5}
PARTS = tuple(range(20, 95, 5))
"""Percent that sharing tasks ask for, each as likely: 0.55 of a GPU on average. With the mix above
they are then 28.1 % of all GPUs asked for; that table says 28.5 %."""
# Run time: the simulator's published log of the 2020 trace (alibaba/clusterdata,
# cluster-trace-gpu-v2020/simulator) has a mean of 5,039 s; the paper on that trace (Weng et al.,
# "MLaaS in the Wild", NSDI '22) a median of 23 min. A log-normal distribution has both.
MEAN_S = 5039.0
MEDIAN_S = 23 * 60.0
SIGMA = math.sqrt(2 * math.log(MEAN_S / MEDIAN_S))


@dataclass(frozen=True)
class Shape:
    """What a pod asks for: of each of `count` GPUs so much."""

    count: int
    compute: int
    memory: int

    @property
    def gpus(self) -> float:
        """How much GPU time that is, in GPUs."""
        return self.count * self.compute / WHOLE


@dataclass(frozen=True)
class Arm:
    """A way to run a cluster: whether GPUs are shared, and which nodes are preferred."""

    name: str
    shares: bool
    packs: bool
    """Fuller nodes first (MostAllocated), instead of emptier ones, which is the default."""


ARMS = (
    Arm("whole GPUs", shares=False, packs=False),
    Arm("whole GPUs, packed", shares=False, packs=True),
    Arm("shares", shares=True, packs=False),
    Arm("shares, packed", shares=True, packs=True),
)


@dataclass(frozen=True)
class Scenario:
    """A cluster and what comes to it. `load` is what is asked for, as a part of all its GPUs."""

    nodes: int = 1000
    load: float = 0.9
    hours: float = 6.0
    warm_hours: float = 1.0
    sharing: float | None = None
    """What sharing tasks ask for, as a part of all; None is the trace's."""
    seed: int = 1


@dataclass
class Outcome:
    """What happened between `warm_hours` and `hours`."""

    running: float = 0.0
    """GPU time that was asked for by pods that ran, as a part of all GPUs': the mean."""
    taken: float = 0.0
    """GPUs' time that nobody else could have had."""
    waits: list[float] = field(default_factory=list)
    """Seconds, in order of size; of those that still waited, so far."""
    left_waiting: int = 0
    pods: int = 0

    def quantile(self, part: float) -> float:
        """Return the wait that such a part of all pods does not exceed."""
        return (
            self.waits[min(int(part * len(self.waits)), len(self.waits) - 1)] if self.waits else 0.0
        )

    @property
    def mean_wait(self) -> float:
        """Return the mean wait."""
        return sum(self.waits) / len(self.waits) if self.waits else 0.0


def mix_for(sharing: float | None) -> dict[int, float]:
    """Return the mix in which sharing tasks ask for such a part of all GPUs."""
    if sharing is None:
        return dict(MIX)
    part = sum(PARTS) / len(PARTS) / WHOLE
    rest = sum(weight * count for count, weight in MIX.items() if count)
    if sharing >= 1:
        return {0: 1.0}
    return {**MIX, 0: sharing / (1 - sharing) * rest / part}


def draw_shape(draw: random.Random, kinds: Sequence[int], weights: Sequence[float]) -> Shape:
    """Draw what a pod asks for; its memory is between half and one and a half of its part."""
    (count,) = draw.choices(kinds, weights)
    if count:
        return Shape(count, WHOLE, WHOLE)
    compute = draw.choice(PARTS)
    memory = min(max(round(compute * draw.uniform(0.5, 1.5) / 5) * 5, 5), WHOLE)
    return Shape(1, compute, memory)


class Cluster:
    """Nodes, and the scheduler's way through them."""

    def __init__(self, nodes: int, arm: Arm, draw: random.Random) -> None:
        self.arm = arm
        self._draw = draw
        self._compute = [[WHOLE] * GPUS for _ in range(nodes)]
        self._memory = [[WHOLE] * GPUS for _ in range(nodes)]
        self._cpu = [CPU] * nodes
        self._largest = [WHOLE] * nodes
        """The most compute that a GPU of a node has left: most trials end there."""
        self._next = 0
        # kube-scheduler scores so many feasible nodes at most (percentageOfNodesToScore is 0).
        self._enough = max(100, nodes * max(5, 50 - nodes // 125) // 100)

    def needs(self, shape: Shape) -> Shape:
        """Return what is allocated for a shape."""
        return shape if self.arm.shares else Shape(shape.count, WHOLE, WHOLE)

    def fit(self, node: int, shape: Shape) -> list[int]:
        """Return the GPUs of a node that a shape gets: the first with room; none if too few."""
        compute, memory = self._compute[node], self._memory[node]
        found = []
        for gpu in range(GPUS):
            if compute[gpu] >= shape.compute and memory[gpu] >= shape.memory:
                found.append(gpu)
                if len(found) == shape.count:
                    return found
        return []

    def choose(self, shape: Shape) -> tuple[int, list[int]] | None:
        """Return the node and the GPUs for a shape; None where it fits nowhere."""
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
                score = score * 100 // CPU  # scores are 0 to 100
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
        """Take what a shape needs (-1), or give it back (1)."""
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
    """Whether its wait is looked at: not of those that were there at the beginning."""


def simulate(scenario: Scenario, arm: Arm) -> Outcome:
    """Return what happens to a scenario's pods; the same pods come whatever the arm."""
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
        # Where one of its shape waits already, nothing has become free for it.
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
        # Whoever waits fits nowhere else; the order is that of arrival.
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

    # Those that run already at 0, as many as in the long run: more of long ones, and for what is
    # left of them.
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
