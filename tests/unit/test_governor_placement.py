"""Test placement: the set of GPUs that a container gets is compared with every other
possible set.
"""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from governor.allocations import AllocationTable
from governor.config import Config
from governor.errors import RefusedError
from governor.placement import EXACT, GpuState, Nearness, place
from governor.quota import MIB, Device
from oci_hook.request import Request, parse_annotations
from tests.conftest import examples
from vdriver.nvml import Ancestor, Route, Topology

GIB = 1 << 30
PIX, PXB, PHB, NODE, SYS = Ancestor.PIX, Ancestor.PXB, Ancestor.PHB, Ancestor.NODE, Ancestor.SYS


def uuids(n: int) -> list[str]:
    return [f"GPU-00000000-0000-0000-0000-{i:012x}" for i in range(n)]


def gpus(n: int, memory: int = 16 * GIB) -> list[Device]:
    return [Device(i, uuid, "simulated", memory) for i, uuid in enumerate(uuids(n))]


def ask(**annotations: object) -> Request:
    named = {f"tidegate.gpu/{k.replace('_', '-')}": str(v) for k, v in annotations.items()}
    return parse_annotations({"tidegate.gpu/memory": "1Gi", **named})


def two_sockets() -> Topology:
    """Return the topology of eight GPUs without NVLink.

    There are two sockets with two host bridges each; each bridge has a switch with two GPUs.
    """
    names = uuids(8)
    routes = {
        frozenset((names[a], names[b])): Route(
            0, PIX if a // 2 == b // 2 else NODE if a // 4 == b // 4 else SYS
        )
        for a, b in combinations(range(8), 2)
    }
    return Topology({name: i // 4 for i, name in enumerate(names)}, routes)


def linked(n: int, links: dict[tuple[int, int], int], ancestor: Ancestor = SYS) -> Topology:
    """Return a topology of GPUs that differ only in their NVLinks."""
    names = uuids(n)
    return Topology(
        {},
        {
            frozenset((names[a], names[b])): Route(links.get((a, b), 0), ancestor)
            for a, b in combinations(range(n), 2)
        },
    )


class PlacementNode:
    """An allocation table with a policy. Containers are named by consecutive numbers."""

    def __init__(self, n: int, topology: Topology, policy: str = "topology") -> None:
        self.allocations = AllocationTable(gpus(n), Config(placement=policy), topology)
        self.number = 0

    def start(self, **annotations: object) -> list[int]:
        self.number += 1
        _, devices = self.allocations.admit(str(self.number), ask(**annotations))
        return [device.index for device in devices]


# Examples of choices.


def test_a_pair_below_one_switch_is_nearer_than_one_across_sockets() -> None:
    node = PlacementNode(8, two_sockets())
    node.start(compute=100, devices=0)
    node.start(compute=100, devices=3)
    assert node.start(compute=100, count=2) == [4, 5]  # 1 and 2 are free as well, and on one socket


def test_four_gpus_are_taken_from_one_socket() -> None:
    node = PlacementNode(8, two_sockets())
    node.start(compute=100, devices=1)
    assert node.start(compute=100, count=4) == [4, 5, 6, 7]


def test_one_gpu_is_taken_from_a_group_that_is_already_in_use() -> None:
    node = PlacementNode(8, two_sockets())
    assert node.start(compute=60) == [0]
    assert node.start(compute=60) == [1]  # GPU 0 has no room
    assert node.start(compute=40) == [0]  # preferred to an empty GPU
    assert node.start(compute=60) == [2]  # this socket is already in use, and the other is not
    assert node.start(compute=60, count=4) == [4, 5, 6, 7]


def test_topology_leaves_a_pair_to_the_next_container_and_spread_does_not() -> None:
    pairs = linked(4, {(0, 1): 4, (2, 3): 4})
    near, spread = PlacementNode(4, pairs), PlacementNode(4, pairs, "spread")
    assert [near.start(compute=30) for _ in range(3)] == [[0], [0], [0]]
    assert near.start(compute=100, count=2) == [2, 3]
    assert [spread.start(compute=30) for _ in range(3)] == [[0], [1], [2]]
    with pytest.raises(RefusedError, match="2 of 4 GPUs were requested, but 1 has room"):
        spread.start(compute=100, count=2)


def test_more_nvlinks_are_nearer_than_pcie() -> None:
    names = uuids(4)
    topology = Topology(
        {},
        {
            frozenset((names[a], names[b])): Route(
                {(0, 2): 1, (1, 3): 2}.get((a, b), 0), PIX if (a, b) in ((0, 1), (2, 3)) else SYS
            )
            for a, b in combinations(range(4), 2)
        },
    )
    assert PlacementNode(4, topology).start(count=2) == [1, 3]


def test_a_cube_of_gpus_is_cut_between_its_quads() -> None:
    # A DGX-1 has two quads, each fully linked, and one or two links from each GPU to the other
    # half.
    links = {
        (0, 1): 1, (0, 2): 1, (0, 3): 2, (1, 2): 2, (1, 3): 1, (2, 3): 1,
        (4, 5): 1, (4, 6): 1, (4, 7): 2, (5, 6): 2, (5, 7): 1, (6, 7): 1,
        (0, 4): 2, (1, 5): 2, (2, 6): 2, (3, 7): 2,
    }  # fmt: skip
    node = PlacementNode(8, linked(8, links))
    assert node.start(compute=100, count=4) == [0, 1, 2, 3]
    assert node.start(compute=100, count=2) == [4, 7]
    assert node.start(compute=100, count=2) == [5, 6]


def test_the_numa_node_decides_where_nothing_else_is_known() -> None:
    names = uuids(4)
    topology = Topology(dict(zip(names, (0, 1, 0, 1), strict=True)), {})
    node = PlacementNode(4, topology)
    assert node.start(compute=100, count=2) == [0, 2]
    assert node.start(compute=100, count=2) == [1, 3]


def test_where_nothing_is_known_containers_are_packed() -> None:
    node = PlacementNode(3, Topology())
    node.start(compute=30, devices=1)
    assert node.start(compute=30) == [1]
    assert node.start(compute=30, count=2) == [0, 1]


def test_named_gpus_are_never_moved() -> None:
    node = PlacementNode(8, two_sockets())
    assert node.start(compute=50, devices="7,0") == [7, 0]
    node.start(compute=60, devices="2")
    with pytest.raises(RefusedError, match=r"^GPU 2 has 40 % of its time left"):
        node.start(compute=50, devices="2,3")


def test_a_lost_gpu_is_not_granted_and_its_neighbour_is_not_kept_free() -> None:
    node = PlacementNode(4, linked(4, {(0, 1): 4, (2, 3): 4}))
    node.allocations.set_lost(uuids(4)[1], "GPU is lost")
    assert node.start(compute=100) == [0]
    with pytest.raises(RefusedError, match=r"^GPU 1 does not answer: GPU is lost; name another"):
        node.start(devices=1)
    with pytest.raises(
        RefusedError, match="4 GPUs were requested, but this node has 3 GPUs to share"
    ):
        node.start(count=4)
    node.allocations.set_lost(uuids(4)[1], None)
    assert node.start(devices=1) == [1]


def test_if_no_gpu_answers_the_reason_is_reported() -> None:
    node = PlacementNode(2, Topology())
    for uuid in uuids(2):
        node.allocations.set_lost(uuid, "GPU is lost")
    with pytest.raises(RefusedError, match=r"^none of the 2 GPUs answers: GPU is lost"):
        node.start()


def test_a_gpu_that_could_not_be_read_is_refused_by_name_with_the_reason() -> None:
    allocations = AllocationTable(gpus(1), Config(), None, {1: "GPU is lost"})
    with pytest.raises(
        RefusedError, match="devices names 1, which cannot be shared: GPU is lost"
    ) as caught:
        allocations.admit("a", ask(devices=1))
    assert "restart" in caught.value.hint


def test_a_node_with_failing_gpus_reports_the_reason() -> None:
    with pytest.raises(
        RefusedError, match=r"^this node has no GPU; GPU 0 is not shared: GPU is lost;"
    ):
        AllocationTable([], Config(), None, {0: "GPU is lost"}).admit("a", ask())


def test_more_gpus_than_a_container_may_have_are_refused() -> None:
    with pytest.raises(
        RefusedError, match="17 GPUs were requested, but a container may have at most 16"
    ):
        PlacementNode(20, Topology()).start(count=17)
    with pytest.raises(
        RefusedError, match="17 GPUs were requested, but a container may have at most 16"
    ):
        PlacementNode(20, Topology()).start(devices=",".join(map(str, range(17))))


def test_near_gpus_are_chosen_where_not_all_sets_are_compared() -> None:
    n = EXACT * 2
    names = uuids(n)
    routes = {
        frozenset((names[a], names[b])): Route(0, PIX if a // 4 == b // 4 else SYS)
        for a, b in combinations(range(n), 2)
    }
    node = PlacementNode(n, Topology({}, routes))
    node.start(compute=100, devices="1,6,9")
    assert node.start(compute=100, count=4) == [12, 13, 14, 15]
    assert node.start(compute=100, count=3) == [0, 2, 3]


@pytest.mark.parametrize(
    ("wanted", "chosen"),
    [
        ({"compute": 30}, ([2], [0], [0])),
        ({"compute": 50}, ([2], [2], [7])),
        ({"compute": 50, "count": 2}, ([2, 3], [2, 3], [2, 3])),
        ({"compute": 30, "count": 2}, ([2, 3], [0, 1], [0, 1])),
        ({"compute": 40, "count": 4}, ([2, 3, 4, 5], [0, 1, 2, 6], [0, 1, 2, 3])),
    ],
)
def test_the_example_of_the_manual_holds(
    wanted: dict[str, object], chosen: tuple[list[int], ...]
) -> None:
    for policy, expected in zip(("spread", "pack", "topology"), chosen, strict=True):
        node = PlacementNode(8, two_sockets(), policy)
        for gpu in (0, 1, 6):
            node.start(compute=60, devices=gpu)
        assert node.start(**wanted) == expected


# Refusals.


@pytest.mark.parametrize(
    ("taken", "wanted", "line"),
    [
        pytest.param(
            [(10, 50), (12, 20), (14, 90)], {"memory": "8Gi", "compute": 30},
            "none of the 3 GPUs has room: GPU 0 has 5632 MiB of memory left to grant, but 8192 MiB "
            "was requested (2560 MiB short), and 2 others are short by as much or more, although all GPUs together have "
            "10752 MiB; ask for 5632Mi of memory at most, or wait until a container ends",
            id="memory, in pieces",
        ),
        pytest.param(
            [(2, 90), (2, 60), (2, 100)], {"compute": 50},
            "none of the 3 GPUs has room: GPU 1 has 40 % of its time left to guarantee, but 50 % "
            "was requested (10 % short), and 2 others are short by as much or more, although all GPUs together have 50 %; "
            "ask for 40 % of the time at most, or wait until a container ends",
            id="time, in pieces",
        ),
        pytest.param(
            [(14, 10), (2, 90)], {"memory": "8Gi", "compute": 50},
            "none of the 2 GPUs has room: GPU 1 has 10 % of its time left to guarantee, but 50 % "
            "was requested (40 % short), and 1 other is short by as much or more, though 1 has the memory and 1 "
            "the time; ask for 1536Mi of memory or 10 % of the time at most, or wait until a "
            "container ends",
            id="one has the memory, another the time",
        ),
        pytest.param(
            [(8, 90)], {"memory": "8Gi", "compute": 50},
            "GPU 0 has 7680 MiB of memory left to grant, but 8192 MiB was requested, and 10 % of its "
            "time left to guarantee, but 50 % was requested (512 MiB and 40 % short); ask for 7680Mi "
            "of memory with 10 % of the time at most, or wait until a container ends",
            id="both",
        ),
        pytest.param(
            [(15, 100)], {},
            "GPU 0 has 512 MiB of memory left to grant, but 1024 MiB was requested, and 0 % of its "
            "time left to guarantee, but 1 % was requested (512 MiB and 1 % short); wait until a "
            "container ends",
            id="nothing would fit",
        ),
        pytest.param(
            [(10, 50)], {"memory": "20Gi"},
            "GPU 0 has 5632 MiB of memory left to grant, but 20480 MiB was requested (14848 MiB short); "
            "ask for 5632Mi of memory at most",
            id="more than there is",
        ),
        pytest.param(
            [(15, 100)], {"memory": "20Gi"},
            "GPU 0 has 512 MiB of memory left to grant, but 20480 MiB was requested, and 0 % of its "
            "time left to guarantee, but 1 % was requested (19968 MiB and 1 % short); ask for 15872Mi "
            "of memory at most, once a container has ended",
            id="more than there is, and nothing would fit",
        ),
        pytest.param(
            [(2, 60)] * 6 + [(2, 10)] * 2, {"compute": 50, "count": 4},
            "4 of 8 GPUs were requested, but 2 have room: GPU 0 has 40 % of its time left to guarantee, but "
            "50 % was requested (10 % short), and 5 others are short by as much or more; "
            "ask for 40 % of the time or 2 GPUs at most, or wait until a container ends",
            id="too few GPUs",
        ),
        pytest.param(
            [(2, 60), (2, 70), (2, 10)], {"compute": 50, "devices": "2,1,0"},
            "GPU 1 has 30 % of its time left to guarantee, but 50 % was requested (20 % short), and "
            "another one has no room either; ask for 30 % of the time at most, or wait until a "
            "container ends",
            id="named",
        ),
    ],
)  # fmt: skip
def test_a_refusal_states_the_shortage_and_what_would_fit(
    taken: list[tuple[int, int]], wanted: dict[str, object], line: str
) -> None:
    allocations = AllocationTable(gpus(len(taken)), Config())
    for i, (gib, percent) in enumerate(taken):
        allocations.admit(str(i), ask(memory=f"{gib}Gi", compute=percent, devices=i))
    with pytest.raises(RefusedError) as caught:
        allocations.admit("new", ask(**wanted))
    assert str(caught.value) == line
    assert len(line) < 400


# Invariants.

ROUTES = st.builds(
    Route, st.integers(0, 3), st.one_of(st.none(), st.sampled_from([PIX, PXB, NODE, SYS]))
)


@st.composite
def topologies(draw: st.DrawFn, n: int) -> Topology:
    names = uuids(n)
    return Topology(
        {name: draw(st.integers(0, 1)) for name in names if draw(st.booleans())},
        {
            frozenset(pair): draw(ROUTES)
            for pair in combinations(names, 2)
            if draw(st.integers(0, 5))
        },
    )


@st.composite
def standings(draw: st.DrawFn, n: int) -> list[GpuState]:
    made = []
    for _ in range(n):
        empty = draw(st.booleans())
        compute, memory = (
            (0, 0) if empty else (draw(st.integers(1, 100)), draw(st.integers(1, 3)) * GIB)
        )
        made.append(GpuState(draw(st.booleans()) or draw(st.booleans()), empty, compute, memory))
    return made


@st.composite
def questions(draw: st.DrawFn) -> tuple[list[GpuState], int, Topology]:
    n = draw(st.integers(1, 8))
    found = draw(standings(n))
    fitting = sum(gpu.fits for gpu in found)
    if not fitting:
        found[0] = GpuState(True, found[0].empty, found[0].compute_used, found[0].memory_used)
        fitting = 1
    return found, draw(st.integers(1, fitting)), draw(topologies(n))


def way(topology: Topology, one: str, other: str) -> tuple[int, int, int]:
    """Return the distance of two GPUs in the manual's terms: a larger tuple is farther."""
    route = topology.routes.get(frozenset((one, other)), Route(0, None))
    nodes = [topology.nodes.get(one), topology.nodes.get(other)]
    numa = 1 if None in nodes else 0 if nodes[0] == nodes[1] else 2
    return -route.nvlinks, 99 if route.ancestor is None else int(route.ancestor), numa


def worth(chosen: tuple[int, ...], found: list[GpuState], topology: Topology) -> tuple[object, ...]:
    """Return the criteria for a set in order of precedence; smaller is better.

    They follow the manual, not the code.
    """
    names = uuids(len(found))
    inside = sorted((way(topology, names[a], names[b]) for a, b in combinations(chosen, 2)))[::-1]
    lost = [
        way(topology, names[a], names[b])
        for a, b in combinations(range(len(found)), 2)
        if found[a].empty and found[b].empty and (a in chosen or b in chosen)
    ]
    counts = Counter(lost)
    every = sorted({way(topology, a, b) for a, b in combinations(names, 2)})
    return (
        inside,  # the farthest pair first
        [counts[one] for one in every],  # empty pairs that are used up, the nearest first
        -sum(found[i].compute_used for i in chosen),
        -sum(found[i].memory_used for i in chosen),
        chosen,
    )


@settings(deadline=None, max_examples=examples(300))
@given(questions())
def test_no_other_set_is_better(question: tuple[list[GpuState], int, Topology]) -> None:
    found, count, topology = question
    near = Nearness(uuids(len(found)), topology)
    chosen = place("topology", found, count, near)
    fitting = [i for i, gpu in enumerate(found) if gpu.fits]
    others = combinations(fitting, count)
    assert chosen == min(others, key=lambda other: worth(other, found, topology))
    assert place("topology", found, count, near) == chosen


def test_no_other_set_is_better_among_sixteen_gpus() -> None:
    # Two boards of eight GPUs, each a cube, with quads of one NUMA node. Every third GPU is in use.
    names = uuids(EXACT)
    topology = Topology(
        {name: i // 4 for i, name in enumerate(names)},
        {
            frozenset((names[a], names[b])): Route(
                (a ^ b).bit_count() % 3 if a // 8 == b // 8 else 0,
                PXB if a // 2 == b // 2 else SYS,
            )
            for a, b in combinations(range(EXACT), 2)
        },
    )
    found = [GpuState(i != 5, i % 3 > 0, (0, i)[i % 3 == 0], 0) for i in range(EXACT)]
    near = Nearness(names, topology)
    for count in (2, 3, 4, 13):
        others = combinations((i for i in range(EXACT) if i != 5), count)
        best = min(others, key=lambda other: worth(other, found, topology))
        assert place("topology", found, count, near) == best


@settings(deadline=None, max_examples=examples(150))
@given(questions(), st.sampled_from(["pack", "spread"]))
def test_pack_takes_the_fullest_and_spread_the_emptiest(
    question: tuple[list[GpuState], int, Topology], policy: str
) -> None:
    found, count, topology = question
    chosen = place(policy, found, count, Nearness(uuids(len(found)), topology))
    fitting = [i for i, gpu in enumerate(found) if gpu.fits]
    assert len(chosen) == count
    assert set(chosen) <= set(fitting)
    assert list(chosen) == sorted(chosen)
    use = {i: (found[i].compute_used, found[i].memory_used) for i in fitting}
    for inside in chosen:
        for outside in set(fitting) - set(chosen):
            if policy == "pack":
                assert use[inside] >= use[outside]
            else:
                assert use[inside] <= use[outside]


ANNOTATIONS = st.fixed_dictionaries(
    {
        "memory": st.sampled_from(["1Gi", "3Gi", "7Gi", "15872Mi"]),
        "compute": st.integers(1, 100),
    },
    optional={"count": st.integers(1, 6)},
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("start"), ANNOTATIONS),
        st.tuples(st.just("named"), st.lists(st.integers(0, 6), min_size=1, max_size=3)),
        st.tuples(st.just("end"), st.integers(0, 20)),
        st.tuples(st.just("lose"), st.integers(0, 5)),
        st.tuples(st.just("regain"), st.integers(0, 5)),
    ),
    max_size=25,
)


@settings(deadline=None, max_examples=examples(150))
@given(st.integers(1, 6).flatmap(lambda n: st.tuples(st.just(n), topologies(n))), STEPS,
       st.sampled_from(["pack", "spread", "topology"]))  # fmt: skip
def test_no_sequence_grants_more_than_a_gpu_has_and_a_refusal_changes_nothing(
    world: tuple[int, Topology], steps: list[tuple[str, object]], policy: str
) -> None:
    n, topology = world
    allocations = AllocationTable(gpus(n), Config(placement=policy), topology)
    lost: set[int] = set()
    for number, (what, given_) in enumerate(steps):
        before = allocations.describe()
        if what == "end":
            allocations.leave(str(given_))
        elif what in ("lose", "regain"):
            assert isinstance(given_, int)
            if given_ < n:
                uuid = uuids(n)[given_]
                if what == "lose":
                    allocations.set_lost(uuid, "GPU is lost")
                    lost.add(given_)
                else:
                    allocations.set_lost(uuid, None)
                    lost.discard(given_)
        else:
            wanted: dict[str, object] = (
                dict(given_)
                if isinstance(given_, dict)
                else {"devices": ",".join(map(str, dict.fromkeys(given_)))}  # type: ignore[call-overload]
            )
            line = None
            try:
                quota, devices = allocations.admit(str(number), ask(**wanted))
            except RefusedError as e:
                line = str(e)
            if line is not None:
                assert allocations.describe() == before
                assert "\n" not in line
                assert len(line) < 600
            else:
                chosen = [device.index for device in devices]
                assert not lost & set(chosen)
                if "devices" in wanted:
                    assert ",".join(map(str, chosen)) == wanted["devices"]
                else:
                    assert chosen == sorted(set(chosen))
                    assert len(chosen) == wanted.get("count", 1)
                # What is left decreases by exactly the quota on the chosen GPUs, and by nothing on
                # the others.
                for old, new in zip(before["gpus"], allocations.describe()["gpus"], strict=True):
                    part = int(new["index"] in chosen)
                    assert old["memory_left"] - new["memory_left"] == part * quota.memory
                    assert old["compute_left"] - new["compute_left"] == part * quota.compute
        for gpu in allocations._gpus:
            assert sum(q.memory for q in gpu.quotas.values()) <= 16 * GIB - 512 * MIB
            assert sum(q.compute for q in gpu.quotas.values()) <= 100
