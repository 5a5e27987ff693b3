"""CUDA IPC of memory that can be parked."""

from __future__ import annotations

import array
import contextlib
import os
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from simgpu.testing import CudaError
from tests.conftest import ROOT
from tests.unit.memory_node import CONTEXT, GIB, MIB, Agent, need_namespaces
from tests.unit.parking_node import PARKED, WORDS, ParkingNode, until

SIZE = 100 * MIB
PROCESS, SERIAL, SECRET = slice(8, 16), slice(16, 24), slice(24, 40)

SHARING = """
class Handle(ctypes.Structure):
    _fields_ = [('reserved', ctypes.c_char * 64)]
def share(address):
    handle = ctypes.create_string_buffer(64)
    driver.call('cuIpcGetMemHandle', handle, address)
    return handle.raw.hex()
def opened(handle, name='cuIpcOpenMemHandle_v2', flags=1):
    return driver.get(name, Handle.from_buffer_copy(bytes.fromhex(handle)), flags)
def closed(address):
    driver.call('cuIpcCloseMemHandle', address)
def attribute(number, address):
    value = ctypes.c_uint64()
    driver.call('cuPointerGetAttribute', ctypes.byref(value), number, address)
    return value.value
"""


@pytest.fixture(scope="module", autouse=True)
def _namespaces() -> None:
    need_namespaces()


@pytest.fixture
def node(build_dir: Path, tmp_path: Path) -> Iterator[ParkingNode]:
    node = ParkingNode(build_dir, tmp_path, GIB)
    yield node
    node.close()


def start(node: ParkingNode) -> Agent:
    agent = node.agent()
    agent.run(WORDS + SHARING)
    return agent


@pytest.fixture
def polled(build_dir: Path, tmp_path: Path) -> Iterator[ParkingNode]:
    """A node whose driver exports descriptors that can be polled, as NVIDIA's does."""
    node = ParkingNode(build_dir, tmp_path, GIB, ROOT / "tests/unit/memory_shim.c")
    yield node
    node.close()


@pytest.fixture
def owner(node: ParkingNode) -> Agent:
    agent = start(node)
    agent.run(f"block = driver.allocate({SIZE}); fill(block, {SIZE}, 3)")
    return agent


@pytest.fixture
def guest(node: ParkingNode) -> Agent:
    return start(node)


def handle_of(owner: Agent, what: str = "block") -> str:
    handle = owner.run(f"share({what})")
    assert isinstance(handle, str)
    return handle


def fails_with(agent: Agent, program: str) -> str:
    with pytest.raises(CudaError) as failure:
        agent.run(program)
    return failure.value.name.removeprefix("CUDA_ERROR_")


@pytest.mark.parametrize("name", ["cuIpcOpenMemHandle_v2", "cuIpcOpenMemHandle"])
def test_two_processes_use_the_same_memory(owner: Agent, guest: Agent, name: str) -> None:
    handle = handle_of(owner)
    guest.run(f"theirs = opened('{handle}', '{name}')")
    assert guest.run(f"holds(theirs, {SIZE}, 3)")
    guest.run(f"fill(theirs, {SIZE}, 4)")
    assert owner.run(f"holds(block, {SIZE}, 4)")
    guest.run("closed(theirs)")
    assert fails_with(guest, "closed(theirs)") == "INVALID_VALUE"


def test_the_handle_of_a_block_stays_the_same(owner: Agent) -> None:
    owner.run("other = driver.allocate(2 << 20)")
    first = handle_of(owner)
    assert handle_of(owner) == handle_of(owner, "block + 4096") == first
    assert handle_of(owner, "other") != first


def test_opened_memory_is_charged_once(owner: Agent, guest: Agent) -> None:
    handle = handle_of(owner)
    guest.run(f"theirs = [opened('{handle}') for _ in range(3)]")
    assert guest.run("len(set(theirs))") == 1
    assert guest.field("memory") == guest.field("unseen") == SIZE
    assert guest.seen == CONTEXT
    assert owner.charged == SIZE
    guest.run("closed(theirs[0]); closed(theirs[0])")
    assert guest.field("memory") == SIZE
    guest.run("closed(theirs[0])")
    assert guest.field("memory") == guest.field("unseen") == 0


def test_memory_that_the_quota_does_not_cover_is_not_opened(
    node: ParkingNode, owner: Agent, guest: Agent
) -> None:
    handle = handle_of(owner)
    left = node.limit - node.used()
    owner.run(f"rest = driver.allocate({left - SIZE // 2})")
    assert guest.refuses(f"opened('{handle}')")
    assert guest.field("memory") == guest.field("unseen") == 0
    owner.run("driver.call('cuMemFree_v2', rest)")
    guest.run(f"closed(opened('{handle}'))")


def test_memory_that_others_may_open_stays_on_the_gpu(
    node: ParkingNode, owner: Agent, guest: Agent
) -> None:
    owner.run("other = driver.allocate(8 << 20); fill(other, 8 << 20, 5)")
    guest.run(f"theirs = opened('{handle_of(owner)}')")
    assert node.report(owner, "movable") == 8 * MIB
    node.park(owner)
    until(lambda: node.report(guest, "residency") == PARKED)
    assert owner.seen == CONTEXT + SIZE
    guest.send(f"holds(theirs, {SIZE}, 3)")
    until(lambda: node.report(guest, "awaiting") == 1)
    node.unpark(owner)
    assert guest.answer() is True
    assert owner.run(f"holds(block, {SIZE}, 3) and holds(other, 8 << 20, 5)")


def test_memory_exists_until_the_last_process_closes_it(
    node: ParkingNode, owner: Agent, guest: Agent
) -> None:
    handle = handle_of(owner)
    guest.run(f"theirs = opened('{handle}')")
    owner.run("driver.call('cuMemFree_v2', block)")
    assert owner.charged == owner.field("memory") == 0
    third = start(node)
    assert fails_with(third, f"opened('{handle}')") == "MAP_FAILED"
    owner.kill()
    assert fails_with(third, f"opened('{handle}')") == "MAP_FAILED"
    assert guest.run(f"holds(theirs, {SIZE}, 3)")
    guest.run("closed(theirs)")
    assert guest.field("memory") == 0


def test_opened_memory_cannot_be_freed_or_unmapped(owner: Agent, guest: Agent) -> None:
    guest.run(f"theirs = opened('{handle_of(owner)}')")
    for call in ("cuMemFree_v2', theirs", f"cuMemUnmap', theirs, {SIZE}"):
        assert guest.number(f"driver.try_call('{call})") == 1
    assert guest.run(f"holds(theirs, {SIZE}, 3)")
    assert guest.field("memory") == SIZE


def test_opened_memory_has_the_drivers_attributes(owner: Agent, guest: Agent) -> None:
    capable, allowed, begin, size = 10, 14, 11, 12
    assert owner.run(f"[attribute(one, block) for one in ({capable}, {allowed})]") == [1, 0]
    guest.run(f"theirs = opened('{handle_of(owner)}')")
    assert guest.run(f"attribute({capable}, theirs)") == 0
    assert guest.run(f"attribute({begin}, theirs + 4096) == theirs")
    assert guest.run(f"attribute({size}, theirs)") == SIZE
    assert guest.run("attribute(1, theirs) == context")
    assert fails_with(guest, "share(theirs)") == "INVALID_VALUE"


def test_a_process_does_not_open_its_own_memory(owner: Agent) -> None:
    assert fails_with(owner, f"opened('{handle_of(owner)}')") == "INVALID_CONTEXT"


def test_flags_are_checked_as_by_the_driver(owner: Agent, guest: Agent) -> None:
    assert fails_with(guest, f"opened('{handle_of(owner)}', flags=2)") == "INVALID_VALUE"


def test_memory_opened_in_a_context_ends_with_it(owner: Agent, guest: Agent) -> None:
    handle = handle_of(owner)
    guest.run("other = driver.get('cuCtxCreate_v2', 0, 0)")
    guest.run(f"opened('{handle}'); opened('{handle}')")
    guest.run("driver.call('cuCtxDestroy_v2', other)")
    assert guest.field("memory") == 0
    assert guest.run(f"holds(opened('{handle}'), {SIZE}, 3)")
    assert guest.field("memory") == SIZE


def test_a_mapping_that_is_closed_during_a_capture_ends_after_it(
    owner: Agent, guest: Agent
) -> None:
    guest.run(f"theirs = opened('{handle_of(owner)}'); graph = ctypes.c_uint64()")
    guest.run(
        "stream = driver.get('cuStreamCreate', 1)\n"
        "driver.call('cuStreamBeginCapture_v2', stream, 2)\n"
        "driver.call('cuMemsetD8Async', theirs, 1, 4096, stream)\n"
        "closed(theirs)\n"
        "driver.call('cuStreamEndCapture', stream, ctypes.byref(graph))"
    )
    # The mapping still exists, so the memory is still charged.
    assert guest.field("memory") == guest.field("unseen") == SIZE
    assert fails_with(guest, "closed(theirs)") == "INVALID_VALUE"
    guest.run("again = driver.allocate(2 << 20)")
    assert guest.field("memory") == 2 * MIB
    assert guest.field("unseen") == 0
    assert guest.number("driver.try_call('cuMemcpyHtoD_v2', theirs, bytes(16), 16)") != 0


def test_memory_that_the_driver_allocated_is_shared_by_the_driver(
    owner: Agent, guest: Agent
) -> None:
    handle = handle_of(owner, "driver.allocate(100 << 10)")
    guest.run(f"theirs = opened('{handle}')")
    assert guest.field("memory") == guest.field("unseen") > 0
    guest.run("closed(theirs)")
    assert guest.field("memory") == 0


# ---- hostile and careless programs ----


def ask(handle: bytes) -> tuple[bytes, list[int]]:
    """Request the memory of a handle as the library does; return the answer and the descriptors."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(20)
        (process,) = struct.unpack("Q", handle[PROCESS])
        connection.connect(f"\0tidegate-ipc-{process:016x}")
        connection.sendall(handle[SECRET] + handle[SERIAL])
        answer, fds, _, _ = socket.recv_fds(connection, 8, 4)
        return answer, fds


def test_only_a_process_with_a_handle_gets_the_memory(owner: Agent, guest: Agent) -> None:
    handle = bytearray.fromhex(handle_of(owner))
    handle[SECRET] = bytes(16)
    assert ask(bytes(handle)) == (b"", [])
    assert fails_with(guest, f"opened('{handle.hex()}')") == "MAP_FAILED"
    guest.run(f"closed(opened('{handle_of(owner)}'))")


def test_a_serial_number_that_no_handle_has_is_refused(owner: Agent) -> None:
    handle = bytearray.fromhex(handle_of(owner))
    owner.run("other = driver.allocate(2 << 20)")  # exists, and was never shared
    for serial in (0, 2, 1 << 63):
        handle[SERIAL] = struct.pack("Q", serial)
        assert ask(bytes(handle)) == (b"d", [])


def test_memory_that_lives_on_in_a_descriptor_stays_charged(polled: ParkingNode) -> None:
    owner = start(polled)
    owner.run(f"block = driver.allocate({SIZE})")
    answer, fds = ask(bytes.fromhex(handle_of(owner)))
    assert answer == b"d"
    owner.run("driver.call('cuMemFree_v2', block)")
    assert owner.field("memory") == owner.field("unseen") == SIZE
    for fd in fds:
        os.close(fd)
    until(lambda: owner.field("memory") == 0)
    assert owner.field("unseen") == 0


def test_silent_connections_do_not_block_others(owner: Agent, guest: Agent) -> None:
    handle = handle_of(owner)
    (process,) = struct.unpack("Q", bytes.fromhex(handle)[PROCESS])
    with contextlib.ExitStack() as stack:
        for _ in range(100):
            silent = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            silent.connect(f"\0tidegate-ipc-{process:016x}")
        for _ in range(3):
            guest.run(f"closed(opened('{handle}'))")


def test_signals_do_not_make_an_open_fail(owner: Agent, guest: Agent) -> None:
    guest.run(
        "import signal\n"
        "signal.signal(signal.SIGALRM, lambda *_: None)\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.0002, 0.0002)\n"
        f"for _ in range(200): closed(opened('{handle_of(owner)}'))\n"
        "signal.setitimer(signal.ITIMER_REAL, 0)"
    )


def test_a_child_of_a_process_that_has_ended_does_not_keep_others_waiting(
    owner: Agent, guest: Agent
) -> None:
    handle = handle_of(owner)
    owner.run("import time\npid = os.fork()\nif not pid: time.sleep(60); os._exit(0)")
    child = owner.number("pid")
    owner.kill()

    def fails_at_once() -> bool:
        began = time.monotonic()
        assert fails_with(guest, f"opened('{handle}')") == "MAP_FAILED"
        return time.monotonic() - began < 4

    try:
        assert any(fails_at_once() for _ in range(3))  # a wait takes 5 s each time
    finally:
        os.kill(child, 9)


def test_a_program_that_closes_the_librarys_descriptors_still_shares(
    owner: Agent, guest: Agent
) -> None:
    owner.run("others = [driver.allocate(2 << 20) for _ in range(3)]")
    handles = [handle_of(owner, f"others[{i}]") for i in range(3)]
    for handle in handles:
        owner.run("os.closerange(500, 600)")
        guest.run(f"closed(opened('{handle}'))")


REPLACE = """
import stat
def is_socket(number):
    try:
        return stat.S_ISSOCK(os.fstat(number).st_mode)
    except OSError:  # closed in the meantime
        return False
new = [int(n) for n in os.listdir('/proc/self/fd') if n not in before and int(n) >= 500]
ours = [n for n in new if is_socket(n)]
pipes = []
for number in ours if len(ours) >= 2 else []:
    reading, writing = os.pipe()
    os.write(writing, b'x' * 64)
    os.dup2(reading, number)
    os.close(reading)
    pipes.append(writing)
"""
"""A program that replaces the library's sockets that are not in `before` by pipes with the same
numbers, if there are at least two.
"""


def test_files_that_reuse_the_librarys_descriptor_numbers_are_left_alone(
    owner: Agent, guest: Agent
) -> None:
    """The program's pipes get the numbers of the listening socket and of a connection."""
    owner.run("before = set(os.listdir('/proc/self/fd'))")
    handle = handle_of(owner)
    (process,) = struct.unpack("Q", bytes.fromhex(handle)[PROCESS])
    with contextlib.ExitStack() as stack:
        for _ in range(20):  # the library drops a silent connection after a second
            silent = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            silent.connect(f"\0tidegate-ipc-{process:016x}")
            time.sleep(0.2)
            owner.run(REPLACE)
            if owner.number("len(pipes)"):
                break
        time.sleep(2.5)
    guest.run(f"closed(opened('{handle}'))")
    assert owner.number("len(ours)") >= 2
    assert owner.run("[len(os.read(number, 100)) for number in ours] == [64] * len(ours)")


def test_a_handle_of_another_size_maps_nothing(owner: Agent, guest: Agent) -> None:
    handle = array.array("Q", bytes.fromhex(handle_of(owner)))
    handle[5] *= 2
    assert fails_with(guest, f"opened('{handle.tobytes().hex()}')") == "NOT_SUPPORTED"
    assert guest.field("memory") == 0
