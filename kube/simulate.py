"""Simulates a cluster of GPU nodes in virtual time, to show the effect of sharing at scale.

This is not a model of GPUs: other tests show whether quotas hold. The simulation records when each
pod is placed according to kube-scheduler's rules. Pods are tried in order of arrival, and none
blocks another. The search for a node begins where the previous pod's search ended, and stops when
enough nodes are feasible. The node with the best CPU score wins, as with NodeResourcesFit. On a
node the first GPU with room is taken, in the ResourceSlice's order, as the allocator of
DynamicResources does. A GPU's capacities are 100 of `compute` and 100 of `memory`.

Pods that did not fit are retried as soon as another pod ends; a real scheduler waits up to 10 s.
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
"""CPU of a node, in millicores. Pods ask for 10 CPUs with a whole GPU, so CPU is never short."""
CPU_OF_GPU = 10_000

# Percentage of tasks by the number of GPUs that they ask for; 0 means a part of one GPU. Weng et
# al., "Beware of Fragmentation", USENIX ATC '23, Table 1: these are percentages of all tasks, of
# which 13.3 % ask for no GPU.
MIX = {0: 37.8, 1: 48.0, 2: 0.2, 4: 0.2, 8: 0.5}
PARTS = tuple(range(20, 95, 5))
"""Percentages of a GPU that sharing tasks ask for, with equal probability: 0.55 of a GPU on
average. With the mix above they amount to 28.1 % of all GPUs requested; that table has 28.5 %."""
# Run time: the simulator's published log of the 2020 trace (alibaba/clusterdata,
# cluster-trace-gpu-v2020/simulator) has a mean of 5,039 s; the paper on that trace (Weng et al.,
# "MLaaS in the Wild", NSDI '22) has a median of 23 min. This log-normal distribution has both.
MEAN_S = 5039.0
MEDIAN_S = 23 * 60.0
SIGMA = math.sqrt(2 * math.log(MEAN_S / MEDIAN_S))


@dataclass(frozen=True)
class PodShape:
    """What a pod asks for: `compute` and `memory` of each of `count` GPUs, in percent."""

    count: int
    compute: int
    memory: int

    @property
    def gpus(self) -> float:
        """GPU time requested, in GPUs."""
        return self.count * self.compute / WHOLE


@dataclass(frozen=True)
class ClusterPolicy:
    """A policy for a cluster: whether GPUs are shared, and which nodes are preferred."""

    name: str
    shares: bool
    packs: bool
    """Prefers fuller nodes (MostAllocated); the default prefers emptier ones."""


ARMS = (
    ClusterPolicy("whole GPUs", shares=False, packs=False),
    ClusterPolicy("whole GPUs, packed", shares=False, packs=True),
    ClusterPolicy("shares", shares=True, packs=False),
    ClusterPolicy("shares, packed", shares=True, packs=True),
)


@dataclass(frozen=True)
class Scenario:
    """A cluster and its load: `load` is the GPU time requested, as a fraction of all its GPUs."""

    nodes: int = 1000
    load: float = 0.9
    hours: float = 6.0
    warm_hours: float = 1.0
    sharing: float | None = None
    """GPU time that sharing tasks ask for, as a fraction of the total; None: as in the trace."""
    seed: int = 1


@dataclass
class SimulationOutcome:
    """The results for the time between `warm_hours` and `hours`."""

    running: float = 0.0
    """Mean GPU time requested by the pods that ran, as a fraction of all GPUs."""
    taken: float = 0.0
    """Mean GPU time that no other pod could have had, as a fraction of all GPUs."""
    waits: list[float] = field(default_factory=list)
    """Sorted waits of pods in seconds; for pods that were still waiting, their waits so far."""
    left_waiting: int = 0
    pods: int = 0

    def quantile(self, part: float) -> float:
        """Return the wait that the fraction `part` of all pods does not exceed."""
        return (
            self.waits[min(int(part * len(self.waits)), len(self.waits) - 1)] if self.waits else 0.0
        )

    @property
    def mean_wait(self) -> float:
        """Mean wait, in seconds."""
        return sum(self.waits) / len(self.waits) if self.waits else 0.0


def mix_for(sharing: float | None) -> dict[int, float]:
    """Return the mix in which sharing tasks ask for this fraction of all GPUs requested."""
    if sharing is None:
        return dict(MIX)
    part = sum(PARTS) / len(PARTS) / WHOLE
    whole_gpus = sum(weight * count for count, weight in MIX.items() if count)
    if sharing >= 1:
        return {0: 1.0}
    return {**MIX, 0: sharing / (1 - sharing) * whole_gpus / part}


def draw_shape(draw: random.Random, kinds: Sequence[int], weights: Sequence[float]) -> PodShape:
    """Draw what a pod asks for; its memory is between 0.5 and 1.5 times its compute."""
    (count,) = draw.choices(kinds, weights)
    if count:
        return PodShape(count, WHOLE, WHOLE)
    compute = draw.choice(PARTS)
    memory = min(max(round(compute * draw.uniform(0.5, 1.5) / 5) * 5, 5), WHOLE)
    return PodShape(1, compute, memory)


class SimulatedCluster:
    """The nodes, and the scheduler's choice among them."""

    def __init__(self, nodes: int, arm: ClusterPolicy, draw: random.Random) -> None:
        self.arm = arm
        self._draw = draw
        self._compute = [[WHOLE] * GPUS for _ in range(nodes)]
        self._memory = [[WHOLE] * GPUS for _ in range(nodes)]
        self._cpu = [CPU] * nodes
        self._largest = [WHOLE] * nodes
        """For each node, the most compute left on one GPU; this rules out most nodes quickly."""
        self._next = 0
        # Number of feasible nodes that kube-scheduler scores (percentageOfNodesToScore is 0).
        self._enough = max(100, nodes * max(5, 50 - nodes // 125) // 100)

    def needs(self, shape: PodShape) -> PodShape:
        """Return what is allocated for a shape."""
        return shape if self.arm.shares else PodShape(shape.count, WHOLE, WHOLE)

    def fit(self, node: int, shape: PodShape) -> list[int]:
        """Return the GPUs of a node for a shape: the first with room, none if too few have room."""
        compute, memory = self._compute[node], self._memory[node]
        found = []
        for gpu in range(GPUS):
            if compute[gpu] >= shape.compute and memory[gpu] >= shape.memory:
                found.append(gpu)
                if len(found) == shape.count:
                    return found
        return []

    def choose(self, shape: PodShape) -> tuple[int, list[int]] | None:
        """Return the node and the GPUs for a shape, or None if it fits nowhere."""
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
                    self._next = (node + 1) % nodes
                    break
            node = node + 1 if node + 1 < nodes else 0
        # A search of all nodes ends where it began, so the next search begins there as well.
        return best

    def change(self, node: int, gpus: Sequence[int], shape: PodShape, cpu: int, sign: int) -> None:
        """Take what a shape needs (sign -1), or give it back (sign 1)."""
        for gpu in gpus:
            self._compute[node][gpu] += sign * shape.compute
            self._memory[node][gpu] += sign * shape.memory
        self._largest[node] = max(self._compute[node])
        self._cpu[node] += sign * cpu


@dataclass
class _SimulatedPod:
    shape: PodShape
    duration: float
    arrived: float
    counts: bool
    """Whether its wait is recorded; waits in the initial state and the warm-up are not."""


class _Simulation:
    """A scenario on a cluster, event by event; times are in seconds."""

    def __init__(self, scenario: Scenario, arm: ClusterPolicy) -> None:
        self.arrivals = random.Random(scenario.seed)  # noqa: S311 - no secret
        chance = random.Random(scenario.seed + 1)  # noqa: S311
        self.cluster = SimulatedCluster(scenario.nodes, arm, chance)
        mix = mix_for(scenario.sharing)
        self.kinds, self.weights = list(mix), list(mix.values())
        self.all_gpus = scenario.nodes * GPUS
        part = sum(PARTS) / len(PARTS) / WHOLE
        each = sum(w * (kind or part) for kind, w in mix.items()) / sum(self.weights)
        self.rate = scenario.load * self.all_gpus / each / MEAN_S
        self.end, self.warm = scenario.hours * 3600, scenario.warm_hours * 3600
        self.outcome = SimulationOutcome()
        # A heap by end: end, serial number, node, GPUs, what is allocated there, pod.
        self.running: list[tuple[float, int, int, list[int], PodShape, _SimulatedPod]] = []
        self.waiting: dict[PodShape, deque[_SimulatedPod]] = {}
        self.serial = 0
        self.used = self.taken = 0.0
        self.last = 0.0

    def account(self, now: float) -> None:
        """Add the GPU time that was used and taken since the last call."""
        span = min(now, self.end) - max(self.last, self.warm)
        if span > 0:
            self.outcome.running += self.used * span
            self.outcome.taken += self.taken * span
        self.last = now

    def start(self, pod: _SimulatedPod, node: int, gpus: list[int], now: float) -> None:
        """Run a pod on a node."""
        needs = self.cluster.needs(pod.shape)
        self.cluster.change(node, gpus, needs, round(CPU_OF_GPU * pod.shape.gpus), -1)
        self.serial += 1
        heapq.heappush(self.running, (now + pod.duration, self.serial, node, gpus, needs, pod))
        self.used += pod.shape.gpus
        self.taken += needs.gpus
        if pod.counts:
            self.outcome.waits.append(now - pod.arrived)

    def arrive(self, pod: _SimulatedPod, now: float) -> None:
        """Run a pod, or let it wait."""
        found = None
        needs = self.cluster.needs(pod.shape)
        # If a pod of the same shape is already waiting, there is no room for this one either.
        if not self.waiting.get(needs):
            found = self.cluster.choose(needs)
        if found:
            self.start(pod, *found, now)
        else:
            self.waiting.setdefault(needs, deque()).append(pod)

    def finish(self, now: float) -> None:
        """End the pod that ends first, and run those that were waiting for the room it frees."""
        _, _, node, gpus, needs, pod = heapq.heappop(self.running)
        self.cluster.change(node, gpus, needs, round(CPU_OF_GPU * pod.shape.gpus), 1)
        self.used -= pod.shape.gpus
        self.taken -= needs.gpus
        # The waiting pods fit on no other node; they are placed in order of arrival.
        while True:
            fitting = [
                (queue[0].arrived, shape)
                for shape, queue in self.waiting.items()
                if queue and self.cluster.fit(node, shape)
            ]
            if not fitting:
                return
            _, shape = min(fitting, key=lambda one: one[0])
            self.start(self.waiting[shape].popleft(), node, self.cluster.fit(node, shape), now)

    def fill(self) -> None:
        """Run as many pods at time 0 as in the steady state.

        Long-running pods are more frequent (a length-biased distribution), and each has a random
        part of its run time left.
        """
        for _ in range(round(self.rate * MEAN_S)):
            shape = draw_shape(self.arrivals, self.kinds, self.weights)
            length = self.arrivals.lognormvariate(math.log(MEDIAN_S) + SIGMA**2, SIGMA)
            remaining = length * self.arrivals.random()
            self.arrive(_SimulatedPod(shape, remaining, 0.0, counts=False), 0.0)

    def run(self) -> None:
        """Let pods arrive and end until the scenario ends."""
        now = 0.0
        while True:
            now += self.arrivals.expovariate(self.rate)
            while self.running and self.running[0][0] <= min(now, self.end):
                moment = self.running[0][0]
                self.account(moment)
                self.finish(moment)
            if now > self.end:
                break
            self.account(now)
            shape = draw_shape(self.arrivals, self.kinds, self.weights)
            length = self.arrivals.lognormvariate(math.log(MEDIAN_S), SIGMA)
            self.outcome.pods += now > self.warm
            self.arrive(_SimulatedPod(shape, length, now, counts=now > self.warm), now)
        self.account(self.end)


def simulate(scenario: Scenario, arm: ClusterPolicy) -> SimulationOutcome:
    """Return what happens to a scenario's pods, which are the same for all arms."""
    run = _Simulation(scenario, arm)
    run.fill()
    run.run()
    outcome = run.outcome
    for queue in run.waiting.values():
        late = [run.end - pod.arrived for pod in queue if pod.counts]
        outcome.left_waiting += len(late)
        outcome.waits += late
    outcome.waits.sort()
    outcome.running /= run.all_gpus * (run.end - run.warm)
    outcome.taken /= run.all_gpus * (run.end - run.warm)
    return outcome
