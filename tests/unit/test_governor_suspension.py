"""Test suspending and resuming containers: the order of the driver's calls, and errors.

The driver is a fake here; tests/container/test_suspension.py uses that of the simulated GPU.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from governor import checkpoint_work, suspension
from governor.checkpoint_work import CHECKPOINTED, LOCKED, RUNNING, CheckpointError, Checkpointing
from governor.container import Container
from governor.errors import RefusedError, StateError
from governor.suspension import Suspender
from libcontrol import pages
from tests.unit.governor_world import MetricsWorld, until
from vdriver.nvml import ProcessMemory

Told = list[str]


@dataclass
class PlayedDriver:
    """Processes by pid, with their states; calls in `failing` fail for these processes."""

    states: dict[int, int]
    failing: dict[str, set[int]] = field(default_factory=dict)
    calls: Told = field(default_factory=list)

    def state(self, pid: int) -> int | None:
        return self.states.get(pid)

    def _step(self, name: str, pid: int, before: int, after: int) -> None:
        assert self.states[pid] == before, (name, pid)
        self.calls.append(f"{name} {pid}")
        if pid in self.failing.get(name, ()):
            raise CheckpointError(f"process {pid}: {name} failed")
        self.states[pid] = after

    def lock(self, pid: int, wait_ms: int) -> None:
        assert wait_ms == 500
        self._step("lock", pid, RUNNING, LOCKED)

    def checkpoint(self, pid: int) -> None:
        self._step("checkpoint", pid, LOCKED, CHECKPOINTED)

    def restore(self, pid: int) -> None:
        self._step("restore", pid, CHECKPOINTED, LOCKED)

    def unlock(self, pid: int) -> None:
        self._step("unlock", pid, LOCKED, RUNNING)


@pytest.fixture
def alive() -> Iterator[dict[int, int]]:
    """The pidfds of two running processes and of one that has ended, by pid."""
    sleeping = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    ended = subprocess.Popen(["true"])
    found = {one.pid: os.pidfd_open(one.pid) for one in (*sleeping, ended)}
    ended.wait()
    yield found
    for one in sleeping:
        one.kill()
        one.wait()
    for fd in found.values():
        os.close(fd)


def test_all_processes_are_locked_before_the_first_is_checkpointed(
    alive: dict[int, int], capfd: pytest.CaptureFixture[str]
) -> None:
    one, two, _ = alive
    driver = PlayedDriver(dict.fromkeys(alive, RUNNING))
    work = Checkpointing(driver, alive)  # type: ignore[arg-type]
    work.suspend(500)
    assert driver.calls == [
        f"{call} {pid}" for call in ("lock", "checkpoint") for pid in (one, two)
    ]
    driver.calls.clear()
    work.resume()
    assert driver.calls == [f"{call} {pid}" for call in ("restore", "unlock") for pid in (one, two)]
    said = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert said == [{"pid": pid} for pid in (one, two, one, two)]


@pytest.mark.parametrize("name", ["lock", "checkpoint"])
def test_if_a_process_cannot_be_suspended_all_run_again(
    alive: dict[int, int], name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    _, two, _ = alive
    driver = PlayedDriver(dict.fromkeys(alive, RUNNING), {name: {two}})
    with pytest.raises(CheckpointError, match=f"process {two}: {name} failed"):
        Checkpointing(driver, alive).suspend(500)  # type: ignore[arg-type]
    assert set(driver.states.values()) == {RUNNING}
    assert '{"undone": true}' in capfd.readouterr().out


def test_if_a_process_cannot_be_resumed_either_both_errors_are_reported(
    alive: dict[int, int], capfd: pytest.CaptureFixture[str]
) -> None:
    one, two, _ = alive
    failing = {"checkpoint": {two}, "restore": {one}}
    driver = PlayedDriver(dict.fromkeys(alive, RUNNING), failing)
    with pytest.raises(
        CheckpointError, match=f"{two}: checkpoint failed; then process {one}: rest"
    ):
        Checkpointing(driver, alive).suspend(500)  # type: ignore[arg-type]
    assert "undone" not in capfd.readouterr().out


def test_resume_continues_from_any_state(alive: dict[int, int]) -> None:
    one, two, _ = alive
    driver = PlayedDriver({one: LOCKED, two: CHECKPOINTED})
    Checkpointing(driver, alive).resume()  # type: ignore[arg-type]
    assert driver.calls == [f"restore {two}", f"unlock {one}", f"unlock {two}"]
    driver.calls.clear()
    Checkpointing(driver, alive).resume()  # type: ignore[arg-type]
    assert driver.calls == []


def test_a_process_without_cuda_is_left_alone_and_a_failed_one_is_an_error(
    alive: dict[int, int], capfd: pytest.CaptureFixture[str]
) -> None:
    one, two, _ = alive
    driver = PlayedDriver({two: RUNNING})
    Checkpointing(driver, alive).suspend(500)  # type: ignore[arg-type]
    assert driver.calls == [f"lock {two}", f"checkpoint {two}"]
    driver.states[one] = checkpoint_work.FAILED
    with pytest.raises(CheckpointError, match=f"process {one}: it failed permanently"):
        Checkpointing(driver, alive).resume()  # type: ignore[arg-type]
    assert driver.states[two] == RUNNING  # although the other one has failed
    capfd.readouterr()
    driver.calls.clear()
    with pytest.raises(CheckpointError, match=f"process {one}: an earlier attempt failed"):
        Checkpointing(driver, alive).suspend(500)  # type: ignore[arg-type]
    assert driver.calls == []
    assert '{"undone": true}' in capfd.readouterr().out  # so the container runs on


def run_work(*arguments: str) -> list[dict[str, Any]]:
    code = "from governor.checkpoint_work import main; main()"
    command = [sys.executable, "-c", code, str(os.getpid()), *arguments]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [json.loads(line) for line in output.splitlines()]


def test_a_libcuda_without_the_calls_is_an_error_that_changes_nothing(tmp_path: Path) -> None:
    undone, error = run_work(str(tmp_path / "libcuda.so.1"), "suspend", "1")
    assert undone == {"undone": True}
    assert "cannot open shared object file" in error["error"]
    undone, error = run_work("libc.so.6", "suspend", "1")
    assert undone == {"undone": True}
    assert error == {
        "error": "the driver has no checkpoint calls, which were introduced in version 570"
    }


# The governor's part


@pytest.fixture
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("s")


def governed(
    directory: Path, build_dir: Path, story: Any, *, libcuda: str | None = "/no/libcuda.so.1"
) -> None:
    """Run a story with a container whose first process has registered nothing."""

    async def run() -> None:
        world = MetricsWorld(directory, build_dir / "libcontrol")
        try:
            container = await world.admit("one")
            state = world.server._state
            path = None if libcuda is None else Path(libcuda)
            suspender = world.server.suspender = Suspender(world.server.admissions, state, path)
            await story(SimpleNamespace(world=world, container=container, suspender=suspender))
        finally:
            world.close()

    asyncio.run(run())


def holds(container: Container) -> int:
    return pages.read(container.grant, 0, "grant_header", "holds")


def refused(work: Coroutine[Any, Any, Any]) -> Any:
    async def expect() -> str:
        with pytest.raises(RefusedError) as caught:
            await work
        return caught.value.message

    return expect()


def test_a_container_without_processes_is_suspended_and_resumed(
    directory: Path, build_dir: Path
) -> None:
    async def story(it: SimpleNamespace) -> None:
        container = it.container
        answer = await it.suspender.suspend({"id": "one"})
        assert answer["processes"] == 0
        assert container.suspension == "suspended"
        assert container.row.suspended
        assert holds(container) == 0
        container.configure(replace(it.world.config, hold_launches=True))  # a reload
        assert holds(container) == 0
        assert await refused(it.suspender.suspend({"id": "one"})) == (
            "the container is already suspended"
        )
        await it.suspender.resume({"id": "one"})
        assert (container.suspension, container.row.suspended, holds(container)) == ("", False, 1)

    governed(directory, build_dir, story)


def test_what_cannot_be_suspended_is_refused(directory: Path, build_dir: Path) -> None:
    async def story(it: SimpleNamespace) -> None:
        assert await refused(it.suspender.suspend({"id": "two"})) == (
            "no container 'two' shares a GPU on this node"
        )
        it.container.findings.frozen = True
        for op in (it.suspender.suspend, it.suspender.resume):
            assert (
                await refused(op({"id": "one"})) == "the container is frozen because of a violation"
            )
        it.container.findings.frozen = False
        assert await refused(it.suspender.resume({"id": "one"})) == "the container is not suspended"
        it.container._mps = SimpleNamespace(describe=lambda: None, unlink=lambda _: None)
        assert "MPS" in await refused(it.suspender.suspend({"id": "one"}))
        assert it.container.suspension == ""
        assert holds(it.container) == 1

    governed(directory, build_dir, story)


def test_a_governor_without_a_driver_refuses(directory: Path, build_dir: Path) -> None:
    async def story(it: SimpleNamespace) -> None:
        assert "without the driver's libcuda" in await refused(it.suspender.suspend({"id": "one"}))

    governed(directory, build_dir, story, libcuda=None)


def test_a_state_that_cannot_be_written_leaves_the_container_running(
    directory: Path, build_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(it: SimpleNamespace) -> None:
        def fail(_: object) -> None:
            raise StateError("the disk is full", hint="make room")

        with monkeypatch.context() as patch:
            patch.setattr(it.world.server._state, "put", fail)
            with pytest.raises(StateError):
                await it.suspender.suspend({"id": "one"})
        assert (it.container.suspension, it.container.row.suspended) == ("", False)
        assert holds(it.container) == 1

    governed(directory, build_dir, story)


def test_if_the_driver_cannot_be_loaded_the_container_keeps_running(
    directory: Path, build_dir: Path
) -> None:
    async def story(it: SimpleNamespace) -> None:
        await it.world.join(it.container)
        message = await refused(it.suspender.suspend({"id": "one"}))
        assert message.startswith(
            "the container cannot be suspended: /no/libcuda.so.1: cannot open"
        )
        assert (it.container.suspension, it.container.row.suspended) == ("", False)

    governed(directory, build_dir, story)


@pytest.mark.parametrize(
    "program", ["import os; os._exit(1)", "print('nonsense')", "while 1: pass"]
)
def test_if_the_calls_end_without_a_result_the_container_stays_suspended(
    directory: Path, build_dir: Path, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    """Some of its processes may be suspended."""

    def command(module: str, arguments: list[str]) -> list[str]:
        assert module == "governor.checkpoint_work"
        assert arguments[2] in ("suspend", "resume")
        return [sys.executable, "-c", program]

    monkeypatch.setattr(suspension, "module_command", command)
    monkeypatch.setattr(suspension, "EXTRA_S", 1.0)

    async def story(it: SimpleNamespace) -> None:
        await it.world.join(it.container)
        await refused(it.suspender.suspend({"id": "one", "wait": 0.001}))
        assert (it.container.suspension, it.container.row.suspended) == ("suspended", True)
        await refused(it.suspender.resume({"id": "one"}))
        assert (it.container.suspension, it.container.row.suspended) == ("suspended", True)

    governed(directory, build_dir, story)


def test_the_suspension_of_a_container_that_ends_is_refused(
    directory: Path, build_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = directory / "over"
    program = f"while not os.path.exists({str(over)!r}): time.sleep(0.01)"
    command = [sys.executable, "-c", f"import os, time\n{program}\nprint('{{\"done\": true}}')"]
    monkeypatch.setattr(suspension, "module_command", lambda *_: command)

    async def story(it: SimpleNamespace) -> None:
        await it.world.join(it.container)
        work = asyncio.create_task(it.suspender.suspend({"id": "one"}))
        await until(lambda: it.container.row.suspended)
        assert it.container.suspension == "suspending"
        it.world.server.admissions.end(it.container, "ended")
        over.touch()
        with pytest.raises(RefusedError, match="the container has ended"):
            await work

    governed(directory, build_dir, story)


def said(*lines: dict[str, Any]) -> list[str]:
    program = "\n".join(f"print({json.dumps(line)!r})" for line in lines)
    return [sys.executable, "-c", program]


BUSY = {"error": "process 1: its work did not end within 1 s", "busy": True}


def test_work_that_waits_for_other_work_of_the_container_gets_several_attempts(
    directory: Path, build_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container that is stopped in the middle of a collective operation cannot end the operation.

    So the container is allowed to run for a moment between two attempts.
    """
    answers = [said({"undone": True}, BUSY)] * 2 + [said({"pid": 1}, {"pid": 2}, {"done": True})]
    waits: list[int] = []
    paused: list[bool] = []

    def command(_: str, arguments: list[str]) -> list[str]:
        waits.append(int(arguments[3]))
        return answers.pop(0)

    monkeypatch.setattr(suspension, "module_command", command)

    async def story(it: SimpleNamespace) -> None:
        it.world.runner.pause = lambda _, is_paused: paused.append(is_paused)
        for _ in range(2):
            await it.world.join(it.container)
        answer = await it.suspender.suspend({"id": "one"})
        assert answer["processes"] == 2
        assert waits == [1000, 2000, 4000]
        assert paused == [True, False, True, False, True]
        # The last attempt gets what is left of the time.
        answers[:] = [said({"done": True})] + [said({"undone": True}, BUSY)] * 3
        await it.suspender.resume({"id": "one"})
        waits.clear()
        message = await refused(it.suspender.suspend({"id": "one", "wait": 4.5}))
        assert message.endswith("its work did not end within 1 s")
        assert waits == [1000, 2000, 1500]
        assert it.container.suspension == ""
        assert not paused[-1]

    governed(directory, build_dir, story)


def test_a_container_that_ends_while_its_held_launches_end_leaves_nothing(
    directory: Path, build_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suspension, "GRANTS_S", 0.2)

    async def story(it: SimpleNamespace) -> None:
        monkeypatch.setattr(it.container.account, "is_at_rest", lambda _: False)
        work = asyncio.create_task(it.suspender.suspend({"id": "one"}))
        await until(lambda: it.container.suspension)
        it.world.server.admissions.end(it.container, "ended")
        with pytest.raises(RefusedError, match="the container has ended"):
            await work
        assert not it.world.server._state.containers

    governed(directory, build_dir, story)


def test_processes_are_not_held_while_the_calls_are_made(directory: Path, build_dir: Path) -> None:
    async def story(it: SimpleNamespace) -> None:
        gpus = it.container.gpus
        held: list[frozenset[int]] = []
        gpus.is_steered = lambda _: True
        gpus.hold = lambda _, pids, __: held.append(pids) or []
        with it.container.left_alone():
            assert it.container.hold(0, frozenset({1}), lambda _: True)
        assert not held
        assert it.container.hold(0, frozenset({1}), lambda _: True)
        assert held == [frozenset({1})]

    governed(directory, build_dir, story)


def test_a_container_that_cannot_be_steered_again_is_still_resumed(
    directory: Path, build_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(it: SimpleNamespace) -> None:
        await it.suspender.suspend({"id": "one"})

        def fail() -> None:
            raise OSError(24, "Too many open files")

        paused: list[bool] = []
        it.world.runner.pause = lambda _, is_paused: paused.append(is_paused)
        monkeypatch.setattr(it.container._slots, "announce", fail)
        await it.suspender.resume({"id": "one"})
        assert (it.container.suspension, it.container.row.suspended, paused) == ("", False, [False])

    governed(directory, build_dir, story)


def test_a_reload_during_a_resume_that_finds_nothing_keeps_holds(
    directory: Path, build_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(it: SimpleNamespace) -> None:
        async def reload(*_: object) -> int:
            it.container.configure(it.world.config)
            assert holds(it.container) == 0
            return 0

        monkeypatch.setattr(it.suspender, "_work", reload)
        assert await refused(it.suspender.resume({"id": "one"})) == "the container is not suspended"
        assert holds(it.container) == 1

    governed(directory, build_dir, story)


def test_a_process_of_another_container_is_not_suspended_with_this_one(
    directory: Path, build_dir: Path
) -> None:
    """The process is in the pid namespace of both containers, as with `--pid=container:`."""

    async def story(it: SimpleNamespace) -> None:
        other = await it.world.admit("two", compute="20")
        child = await it.world.join(other)
        listed = [ProcessMemory(pid, 5, computes=True) for pid in (child.pid, os.getpid())]
        it.suspender._computing = lambda _: listed
        for container in (it.container, other):
            container.members.has_namespaces = lambda _: True
        uses = await it.suspender._uses(it.container)
        assert [one.pid for one in uses] == [os.getpid()]

    governed(directory, build_dir, story)
