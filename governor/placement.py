"""Choose a container's GPUs from those with room, without access to a file, a clock or the driver.

`spread` takes the emptiest GPUs and `pack` the fullest. `topology` takes GPUs that are near each
other. Two sets are compared by the distances of their farthest pairs; if these are equal, by those
of the next pairs, and so on, because GPUs that work together wait for the slowest route between
them. Among equally near sets, `topology` takes the one that leaves the most empty GPUs near each
other, then the fullest: taking the emptiest would soon use a part of every group, and leave no
whole group for the next container.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from vdriver.nvml import Ancestor, Topology

EXACT = 16
"""Up to this number of GPUs, all sets are compared; with more, a heuristic is used."""

_UNKNOWN = max(Ancestor) + 1


@dataclass(frozen=True)
class GpuState:
    """State of a GPU at placement time: its use (percent, bytes), and whether the quota fits.

    An `empty` GPU has no container, but can accept one.
    """

    fits: bool
    empty: bool
    compute_used: int
    memory_used: int


class Nearness:
    """Ranked distances between a node's GPUs: 0 is the smallest that occurs, then 1, 2, ...

    GPUs with more NVLinks between them are nearer. Next, their common ancestor on PCIe decides,
    then whether they are on the same NUMA node. An unknown property counts as farther than any
    known one.
    """

    def __init__(self, uuids: Sequence[str], topology: Topology) -> None:
        def key(one: str, other: str) -> tuple[int, int, int]:
            route = topology.routes.get(frozenset((one, other)))
            nodes = topology.nodes.get(one), topology.nodes.get(other)
            apart = 1 if None in nodes else 0 if nodes[0] == nodes[1] else 2
            if route is None:
                return 0, _UNKNOWN, apart
            ancestor = _UNKNOWN if route.ancestor is None else int(route.ancestor)
            return -route.nvlinks, ancestor, apart

        keys = sorted({key(*pair) for pair in combinations(uuids, 2)})
        rank = {one: i for i, one in enumerate(keys)}
        self.distances = tuple(
            tuple(-1 if one == other else rank[key(one, other)] for other in uuids) for one in uuids
        )
        self.levels = len(keys)


def place(policy: str, gpus: Sequence[GpuState], count: int, near: Nearness) -> tuple[int, ...]:
    """Return the positions of `count` GPUs that fit, in ascending order; that many must fit.

    The result is deterministic: of equal GPUs, the first ones are taken.
    """
    fitting = [i for i, gpu in enumerate(gpus) if gpu.fits]
    if policy == "topology":
        return _nearest(gpus, fitting, count, near)
    sign = 1 if policy == "spread" else -1
    fitting.sort(key=lambda i: (sign * gpus[i].compute_used, sign * gpus[i].memory_used))
    return tuple(sorted(fitting[:count]))


class _Costs:
    """The cost of a set of GPUs, as one number: a sum over its GPUs and over its pairs.

    Its digits, most significant first, are: the number of pairs at each distance, farthest first;
    the number of pairs of empty GPUs that are broken up, nearest first; the unused part of the
    GPUs' time, and of their memory. No digit overflows into the next, so comparing the
    numbers compares digit by digit.
    """

    def __init__(self, gpus: Sequence[GpuState], near: Nearness) -> None:
        n = len(gpus)
        base = n * n + 1  # more than the number of pairs, counted from both ends
        memory = max((gpu.memory_used for gpu in gpus), default=0) + 1
        compute = n * memory
        taken = 101 * n * compute
        distant = taken * base**near.levels

        def tie(i: int, j: int) -> int:
            together = i != j and gpus[i].empty and gpus[j].empty
            return taken * base ** (near.levels - 1 - near.distances[i][j]) if together else 0

        self.single = [
            sum(tie(i, j) for j in range(n))
            + compute * (100 - gpu.compute_used)
            + (memory - 1 - gpu.memory_used)
            for i, gpu in enumerate(gpus)
        ]
        # The tie of a pair was counted at both ends, so it is subtracted once.
        self.pair = [
            [0 if i == j else distant * base ** near.distances[i][j] - tie(i, j)
             for j in range(n)]
            for i in range(n)
        ]  # fmt: skip

    def adding(self, chosen: Sequence[int], gpu: int) -> int:
        """Return the cost of adding a GPU to `chosen`."""
        row = self.pair[gpu]
        return self.single[gpu] + sum(row[i] for i in chosen)


def _nearest(
    gpus: Sequence[GpuState], fitting: Sequence[int], count: int, near: Nearness
) -> tuple[int, ...]:
    costs = _Costs(gpus, near)
    if len(fitting) > EXACT:
        return min(
            (_grown(costs, fitting, count, seed) for seed in fitting),
            key=lambda found: (_total(costs, found), found),
        )
    best: tuple[int, ...] = ()
    least: int | None = None

    def extend(chosen: tuple[int, ...], cost: int, start: int) -> None:
        nonlocal best, least
        missing = count - len(chosen)
        if not missing:
            if least is None or cost < least:
                best, least = chosen, cost
            return
        for at in range(start, len(fitting) - missing + 1):
            gpu = fitting[at]
            extend((*chosen, gpu), cost + costs.adding(chosen, gpu), at + 1)

    extend((), 0, 0)
    return best


def _grown(costs: _Costs, fitting: Sequence[int], count: int, seed: int) -> tuple[int, ...]:
    chosen = [seed]
    while len(chosen) < count:
        rest = [gpu for gpu in fitting if gpu not in chosen]
        chosen.append(min(rest, key=lambda gpu: (costs.adding(chosen, gpu), gpu)))
    return tuple(sorted(chosen))


def _total(costs: _Costs, chosen: Sequence[int]) -> int:
    return sum(costs.adding(chosen[:i], gpu) for i, gpu in enumerate(chosen))
