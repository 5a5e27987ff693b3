"""Copies and captures that CUDA 13.2 to 13.5 introduced, in a process with the control library.

work_shim.c implements these functions and is loaded in front of the simulated driver.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from libcontrol import pages
from tests.conftest import ROOT
from tests.unit.memory_node import GIB, LAUNCH, MIB, Agent, MemoryNode, need_namespaces
from tests.unit.test_control_process import NOT_READY, grant, until, until_field

OUT_OF_MEMORY = 2

COPIES = """
SIZE = 64 << 20
a, b = driver.allocate(SIZE), driver.allocate(SIZE)
pinned = out('cuMemHostAlloc', SIZE, 0)
s = out('cuStreamCreate', 1)
def plain(to, frm, size=SIZE, form=''):
    driver.call('cuMemcpyWithAttributesAsync' + form, to, frm, size, b'attributes', s)
class Op3(ctypes.Structure):
    _fields_ = [(n, ctypes.c_uint64) for n in (
        'from_type', 'frm', 'from_row', 'from_layer', 'from_hint',
        'to_type', 'to', 'to_row', 'to_layer', 'to_hint', 'width', 'height', 'depth', 'order')]
def cube(to, frm, size=SIZE):
    op = Op3(from_type=1, frm=frm, to_type=1, to=to, width=size // 16, height=4, depth=4, order=1)
    driver.call('cuMemcpy3DWithAttributesAsync', ctypes.byref(op), 0, s)
class Op(ctypes.Structure):
    _fields_ = [(n, ctypes.c_uint64) for n in (
        'from_type', 'frm', 'from_hint', 'to_type', 'to', 'to_hint', 'size', 'flags')]
def fabric(to, frm, size=SIZE, to_type=1):
    ops = (Op * 2)(*[Op(from_type=1, frm=frm, to_type=to_type, to=to, size=size // 2)] * 2)
    driver.call('cuFabricCpyBatchAsync', 2, ops, 0, s)
"""


@pytest.fixture
def node(build_dir: Path, tmp_path: Path) -> Iterator[MemoryNode]:
    need_namespaces()
    played = MemoryNode(build_dir, tmp_path, 4 * GIB, shim=ROOT / "tests/unit/work_shim.c")
    pages.write(played.grant, 0, "grant_header", "inflight_ns", 4_000_000)
    pages.write(played.grant, 0, "grant_header", "holds", 1)
    yield played
    played.close()


def start(node: MemoryNode) -> Agent:
    started = node.agent()
    started.run(LAUNCH + COPIES)
    grant(node, 2**64 - 1, 2)
    started.run("launch(1000, s); driver.call('cuStreamSynchronize', s)")
    return started


@pytest.fixture
def agent(node: MemoryNode) -> Agent:
    return start(node)


def counted(agent: Agent, program: str) -> dict[str, int]:
    """Return by how much each counter of the ledger grows while the program runs."""
    names = ("launches", "small", "transfers", "transfer_bytes")
    before = {name: agent.field(name) for name in names}
    agent.run(program)
    agent.run("driver.call('cuCtxSynchronize')")
    end = time.monotonic() + 5
    while True:
        grown = {name: agent.field(name) - value for name, value in before.items()}
        # A launch under a pass is counted when the pass ends.
        if any(grown.values()) or time.monotonic() > end:
            return {name: value for name, value in grown.items() if value}
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("plain(b, a)", {"launches": 1}),
        ("plain(b, a, form='_ptsz')", {"launches": 1}),
        ("plain(b, pinned)", {"transfers": 1, "transfer_bytes": 64 * MIB}),
        ("plain(b, a, 4096)", {"small": 1}),
        ("cube(b, a)", {"launches": 1}),
        ("cube(pinned, a)", {"small": 1}),
        ("fabric(b, a)", {"launches": 1}),
        ("fabric(b, pinned)", {"small": 1}),
        ("fabric(7, a, to_type=2)", {"launches": 1}),
    ],
)
def test_a_copy_is_counted_like_an_older_one(
    agent: Agent, program: str, expected: dict[str, int]
) -> None:
    assert counted(agent, program) == expected


TOGETHER = """
class Launch(ctypes.Structure):
    _fields_ = [('function', ctypes.c_void_p), *[(f'n{i}', ctypes.c_uint) for i in range(7)],
                ('stream', ctypes.c_void_p), ('parameters', ctypes.c_void_p)]
def together(n):
    launches = (Launch * n)(*[Launch(stream=s, n0=1, n1=1, n2=1, n3=1, n4=1, n5=1)] * n)
    return driver.try_call('cuLaunchCooperativeKernelMultiDevice', launches, n, 0)
"""
DENIED, INVALID_VALUE = 802, 1


def test_a_launch_on_several_gpus_is_refused_like_one_on_a_single_gpu(agent: Agent) -> None:
    """The process became a client of an MPS server, which its container's strategy rules out."""
    agent.run(TOGETHER)
    assert agent.run("together(1)") == 0
    agent.run("os.environ['SIMGPU_MPS'] = '1'")
    assert agent.run("driver.try_call('cuInit', 0)") == DENIED
    assert agent.run("together(1)") == DENIED
    assert agent.run("together(2)") == DENIED
    assert agent.run("driver.library.shim_n_together()") == 1


def test_a_launch_on_more_gpus_than_there_can_be_does_not_reach_the_driver(agent: Agent) -> None:
    agent.run(TOGETHER)
    assert agent.run("together(64)") == 0
    assert agent.run("together(65)") == INVALID_VALUE
    assert agent.run("driver.library.shim_n_together()") == 1


@pytest.mark.parametrize("copy", ["plain(b, a)", "cube(b, a)", "fabric(b, a)"])
def test_a_copy_within_the_gpu_waits_for_a_grant(node: MemoryNode, agent: Agent, copy: str) -> None:
    grant(node, 0, 3)
    agent.run(copy)
    assert agent.field("want") == 1
    assert agent.run("driver.try_call('cuStreamQuery', s)") == NOT_READY
    grant(node, 2**64 - 1, 4)
    until(agent, "driver.try_call('cuStreamQuery', s) == 0")


def test_a_graph_that_is_captured_again_is_neither_gated_nor_marked(
    node: MemoryNode, agent: Agent
) -> None:
    agent.run("graph = out('cuGraphCreate', 0)")
    assert agent.run("driver.try_call('cuStreamBeginRecaptureToGraph', s, 0, 0, None, None)") == 1
    agent.run("driver.call('cuStreamBeginRecaptureToGraph', s, 0, graph, None, None)")
    grant(node, 0, 3)
    # A held launch would return an error, and a marker would end the capture with one.
    agent.run("for _ in range(200): launch(1_000_000, s)")
    agent.run("made = ctypes.c_uint64()")
    agent.run("driver.call('cuStreamEndCapture', s, ctypes.byref(made))")
    assert agent.field("want") == 0
    agent.run("launch(1000, s)")
    assert agent.field("want") == 1  # the stream is an ordinary one again
    grant(node, 2**64 - 1, 4)
    until(agent, "driver.try_call('cuStreamQuery', s) == 0")


def test_nothing_is_added_to_a_stream_that_is_captured_for_graphics(
    node: MemoryNode, agent: Agent
) -> None:
    """The driver is not known to report such a stream as capturing, and the simulated one does not."""
    assert agent.run("driver.try_call('cuStreamBeginCaptureToCig', s, None)") == 1
    agent.run("other = out('cuStreamCreate', 1)")
    agent.run("driver.call('cuStreamBeginCaptureToCig', s, b'list')")
    agent.run("for _ in range(200): launch(1_000_000, s)")
    grant(node, 0, 3)
    agent.run("for _ in range(200): launch(1_000_000, s)")
    assert agent.run("driver.library.shim_n_drawn()") == 400
    assert agent.field("want") == 0
    agent.send("launch(1000, other)")  # only `s` is left alone
    until_field(agent, "want", 1)
    grant(node, 2**64 - 1, 4)
    agent.answer()
    assert agent.run("driver.try_call('cuStreamEndCaptureToCig', other)") == 1
    agent.run("launch(1_000_000, s)")
    assert agent.run("driver.library.shim_n_drawn()") == 401
    until(agent, "driver.try_call('cuStreamQuery', other) == 0")
    assert agent.run("driver.library.shim_n_wrong()") == 0
    agent.run("driver.call('cuStreamEndCaptureToCig', s)")
    grant(node, 0, 5)
    agent.send("launch(1000, s)")
    until_field(agent, "want", 1)
    grant(node, 2**64 - 1, 6)
    agent.answer()
    assert agent.run("driver.library.shim_n_drawn()") == 401
    until(agent, "driver.try_call('cuStreamQuery', s) == 0")


def test_a_capture_for_graphics_survives_a_call_that_ends_other_captures(
    node: MemoryNode, agent: Agent
) -> None:
    agent.run("driver.call('cuStreamBeginCaptureToCig', s, b'list')")
    agent.run("made = ctypes.c_uint64()")
    for form in ("", "_ptsz"):
        assert agent.run(f"driver.try_call('cuStreamEndCapture{form}', s, ctypes.byref(made))") != 0
    grant(node, 0, 3)
    agent.run("for _ in range(200): launch(1_000_000, s)")
    assert agent.run("driver.library.shim_n_drawn()") == 200
    assert agent.field("want") == 0
    assert agent.run("driver.library.shim_n_wrong()") == 0
    agent.run("driver.call('cuStreamEndCaptureToCig', s)")
    agent.send("launch(1000, s)")
    until_field(agent, "want", 1)
    grant(node, 2**64 - 1, 4)
    agent.answer()


def test_a_capture_for_graphics_that_cannot_be_followed_is_refused(
    node: MemoryNode, capfd: pytest.CaptureFixture[str]
) -> None:
    """The library follows 64 captures. Further captures to graphs are recognised by the driver's answer."""
    agent = start(node)
    agent.run("others = [out('cuStreamCreate', 1) for _ in range(65)]")
    agent.run("for other in others: driver.call('cuStreamBeginCapture_v2', other, 2)")
    begin = "driver.try_call('cuStreamBeginCaptureToCig', s, b'list')"
    assert [agent.run(begin) for _ in range(2)] == [OUT_OF_MEMORY] * 2
    grant(node, 0, 3)
    agent.run("launch(1000, others[64])")  # captured, so it waits for no grant
    assert agent.field("want") == 0
    agent.run("made = ctypes.c_uint64()")
    agent.run("driver.call('cuStreamEndCapture', others[0], ctypes.byref(made))")
    assert agent.run(begin) == 0
    agent.run("for _ in range(200): launch(1_000_000, s)")
    assert agent.field("want") == 0
    assert agent.run("driver.library.shim_n_drawn()") == 200
    assert agent.run("driver.library.shim_n_wrong()") == 0
    [line] = [line for line in capfd.readouterr().err.splitlines() if "refused" in line]
    assert line.startswith("tidegate: cuStreamBeginCaptureToCig was refused: 64 streams of this")
