"""Functions that a program looks up and that the control library does not know are forwarded,
counted or refused, according to the node's configuration.

The driver is lookup_shim.c: the simulated one with functions of future versions.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from mmap import mmap
from pathlib import Path

import pytest

from libcontrol import coverage, layout, pages
from tests.conftest import ROOT
from tests.unit.memory_node import GIB, LAUNCH, Agent, MemoryNode, need_namespaces
from tests.unit.test_control_process import until, wait_until

FORWARD, COUNT, REFUSE = range(3)
FOUND = [0, 99, 0]  # result, what the function returns, status
LACKED = [500, None, 1]

FIND = """
def outcome(result, pointer, status):
    function = ctypes.CFUNCTYPE(ctypes.c_int)(pointer.value) if pointer.value else None
    return [result, function() if function else None, status]
def find(name, version=13000, flags=0):
    pointer, status = ctypes.c_void_p(7), ctypes.c_int(7)
    result = driver.try_call('cuGetProcAddress_v2', name.encode(), ctypes.byref(pointer), version, flags,
                             ctypes.byref(status))
    return outcome(result, pointer, status.value)
def find_old(name, version=11030):
    pointer = ctypes.c_void_p(7)
    result = driver.try_call('cuGetProcAddress', name.encode(), ctypes.byref(pointer), version, 0)
    return outcome(result, pointer, None)
"""


@pytest.fixture
def node(build_dir: Path, tmp_path: Path) -> Iterator[MemoryNode]:
    need_namespaces()
    played = MemoryNode(build_dir, tmp_path, GIB, shim=ROOT / "tests/unit/lookup_shim.c")
    yield played
    played.close()


def start(node: MemoryNode, policy: int) -> Agent:
    pages.write(node.grant, 0, "grant_header", "unknown_functions", policy)
    agent = node.agent(context=False)
    agent.run(FIND)
    return agent


def names_in(ledger: mmap) -> list[str]:
    places = (place.partition(b"\0")[0] for place in pages.read_unknown(ledger))
    return [place.decode() for place in places if place]


def named(node: MemoryNode) -> list[str]:
    """Return the names in the container's ledger."""
    return names_in(node.ledger)


@pytest.mark.parametrize(
    ("policy", "answer", "names"),
    [
        (FORWARD, FOUND, []),
        (COUNT, FOUND, ["cuOfTomorrow", "cuOfNextYear"]),
        (REFUSE, LACKED, ["cuOfTomorrow", "cuOfNextYear"]),
        (77, FOUND, []),  # a policy of a newer governor
    ],
)
def test_the_policy_decides_what_happens_to_an_unknown_function(
    node: MemoryNode, policy: int, answer: list[object], names: list[str]
) -> None:
    agent = start(node, policy)
    for _ in range(3):
        assert agent.run("find('cuOfTomorrow')") == answer
    assert agent.run("find_old('cuOfNextYear')") == [*answer[:2], None]
    assert named(node) == names
    assert pages.read(node.ledger, 0, "ledger_header", "n_unknown") == len(names)


def test_only_the_first_refusal_is_reported_on_standard_error(
    node: MemoryNode, capfd: pytest.CaptureFixture[str]
) -> None:
    agent = start(node, REFUSE)
    agent.run("for i in range(100): find(f'cuNumber{i}')")
    [line] = [line for line in capfd.readouterr().err.splitlines() if "refused" in line]
    assert line.startswith("tidegate: cuNumber0 was refused, because the control library does not")


@pytest.mark.parametrize("policy", [FORWARD, COUNT, REFUSE])
def test_a_known_function_is_found_under_every_policy(node: MemoryNode, policy: int) -> None:
    agent = start(node, policy)
    for name in ("cuInit", "cuMemAlloc", "cuLaunchKernel", "cuGetErrorName", "cuCtxSynchronize"):
        call = f"driver.try_call('cuGetProcAddress_v2', b'{name}', ctypes.byref(found), 13000, 0, None)"
        assert agent.run(f"found = ctypes.c_void_p()\nresult = {call}") is None
        assert agent.run("[result, bool(found)]") == [0, True]
    assert agent.run("find('cuCtxGetId')") == FOUND  # which the simulated driver lacks
    assert agent.run("find('cuCtxGetId_v2_ptsz')") == FOUND
    assert named(node) == []


def test_every_function_of_the_table_is_known(node: MemoryNode) -> None:
    """A function that has to be hooked passes only in the form that is hooked; all other functions
    always pass.
    """
    agent = start(node, REFUSE)
    effects = coverage.read_effects()
    plain = sorted(name for name, effect in effects.items() if effect not in coverage.GOVERNED)
    assert len(plain) > 350
    assert agent.run(f"[n for n in {plain} if find(n, 99000) != {FOUND}]") == []
    assert named(node) == []
    governed = sorted(set(effects) - set(plain))
    assert len(governed) > 100
    assert agent.run(f"[n for n in {governed} if find(n, 99000) != {LACKED}]") == []


def test_a_new_form_of_a_function_that_has_to_be_hooked_is_named_with_its_version(
    node: MemoryNode,
) -> None:
    agent = start(node, COUNT)
    assert agent.run("find('cuMemAlloc', 99000)") == FOUND
    assert agent.run("find('cuMemcpyDtoDAsync', 99010, 2)") == FOUND
    assert named(node) == ["cuMemAlloc@99000", "cuMemcpyDtoDAsync@99010"]


def test_look_ups_before_cuinit_are_reported_after_it(node: MemoryNode) -> None:
    agent = start(node, REFUSE)
    # A child has no part of the ledger until its own cuInit.
    agent.run(
        f"""
r, w = os.pipe()
pid = os.fork()
if pid == 0:
    early = [find('cuOfTomorrow') for _ in range(20)] + [find('cuAtOnce')]
    os.write(w, b'y' if early == [{LACKED}] * 21 else b'n')
    os.read(0, 0)
    driver.call('cuInit', 0)
    os.write(w, b'.')
    os._exit(0)
os.waitpid(pid, 0)
said = os.read(r, 10).decode()
"""
    )
    assert agent.run("said") == "y."
    assert sorted(named(node)) == ["cuAtOnce", "cuOfTomorrow"]


def test_names_looked_up_while_the_governor_is_away_are_reported_when_it_is_back(
    node: MemoryNode,
) -> None:
    pages.write(node.grant, 0, "grant_header", "unknown_functions", COUNT)
    with node.away():
        agent = node.agent(bare=True)
        agent.run(FIND)
        agent.run("find('cuAtOnce')")
        agent.run("driver.call('cuInit', 0); context = out('cuCtxCreate_v2', 0, 0)")
        agent.run("find('cuOfTomorrow')")
        agent.run(LAUNCH)
        agent.run("launch(1000); driver.call('cuCtxSynchronize')")  # from here on it has a helper
        assert named(node) == []
    assert agent.run("find('cuOfNextYear')") == FOUND
    wait_until(lambda: len(named(node)) == 3)
    assert sorted(named(node)) == ["cuAtOnce", "cuOfNextYear", "cuOfTomorrow"]
    assert list(node._slots.values()) == [agent.process.pid]


def test_names_in_a_ledger_that_was_lost_are_in_the_next_one(node: MemoryNode) -> None:
    agent = start(node, COUNT)
    agent.run("context = out('cuCtxCreate_v2', 0, 0)")
    agent.run(LAUNCH)
    agent.run("launch(1000); driver.call('cuCtxSynchronize')")
    agent.run("find('cuOfTomorrow')")
    assert agent.slot is not None
    with node.other_ledger(agent.slot) as ledger:
        node.hang_up()
        wait_until(lambda: node.returned)
        agent.run("find('cuOfNextYear')")
        wait_until(lambda: len(names_in(ledger)) == 2)
        assert sorted(names_in(ledger)) == ["cuOfNextYear", "cuOfTomorrow"]


def test_a_child_that_was_forked_during_a_look_up_can_start(node: MemoryNode) -> None:
    """The first look-up maps the grant page under a lock. A pipe in place of the page blocks it."""
    page, kept, pipe = (node.runtime / name for name in ("grant", "kept", "pipe"))
    agent = node.agent(bare=True)
    agent.run(FIND)
    page.rename(kept)
    os.mkfifo(page)
    agent.run("thread = threading.Thread(target=find, args=['cuOfTomorrow']); thread.start()")
    time.sleep(0.3)  # until it is in the call
    page.rename(pipe)
    kept.rename(page)
    agent.run(
        """
child = os.fork()
if child == 0:
    os._exit(driver.try_call('cuInit', 0))
def ended():
    global status
    pid, status = os.waitpid(child, os.WNOHANG)
    return pid
"""
    )
    try:
        until(agent, "ended()")
    except AssertionError:
        agent.run("os.kill(child, 9)")
        raise
    finally:
        os.close(os.open(pipe, os.O_RDWR))
    assert agent.run("status") == 0
    assert agent.run("thread.join()") is None


def test_the_setting_is_followed_while_a_program_runs(node: MemoryNode) -> None:
    agent = start(node, COUNT)
    assert agent.run("find('cuOfTomorrow')") == FOUND
    pages.write(node.grant, 0, "grant_header", "unknown_functions", REFUSE)
    assert agent.run("find('cuOfTomorrow')") == LACKED
    pages.write(node.grant, 0, "grant_header", "unknown_functions", FORWARD)
    assert agent.run("find('cuOfTheDayAfter')") == FOUND
    assert named(node) == ["cuOfTomorrow"]


def test_names_are_truncated_and_their_number_is_bounded(node: MemoryNode) -> None:
    agent = start(node, COUNT)
    other = node.agent(context=False)
    other.run(FIND)
    agent.run("for i in range(10): find(f'cuNumber{i}')")
    other.run("find('cu' + 'x' * 200)")
    other.run("for i in range(100): find(f'cuNumber{i}')")
    found = named(node)
    assert found[:11] == [*(f"cuNumber{i}" for i in range(10)), "cu" + "x" * 45]
    assert found[11:] == [f"cuNumber{i}" for i in range(10, 15)]
    assert len(found) == layout.N_UNKNOWN
    assert pages.read(node.ledger, 0, "ledger_header", "n_unknown") == layout.N_UNKNOWN
