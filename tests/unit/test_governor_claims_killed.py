"""Test that a governor may be killed at any step of work on a claim: the next one keeps all promises.

A step is a call of one of the governor's functions. The governor runs in a forked process, which
kills itself at the n-th call.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from governor.errors import TidegateError
from tests.unit.test_governor_claims import GIB, ClaimsWorld, in_memory, share, sleeper, told, use

MODULES = ("server", "state", "books", "claims", "container", "region", "recover")
CONTAINERS = ("one", "two")


class Killed:
    """A profiler that counts calls and returns of the governor's functions.

    It kills this process at one of them.
    """

    def __init__(self, at: int) -> None:
        self.at = at
        self.calls = 0

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if event not in ("call", "return") or frame.f_globals.get("__name__") not in self.names:
            return
        self.calls += 1
        if self.calls == self.at:
            os.kill(os.getpid(), signal.SIGKILL)

    names = frozenset(f"governor.{module}" for module in MODULES)


class KillScene:
    """Directories and containers that outlive the governors that run on them and are killed."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        (directory / "run" / "containers").mkdir(parents=True)
        self.sleepers = {name: sleeper() for name in CONTAINERS}

    def run(self, act: Callable[[KilledGovernor], Awaitable[None]], at: int = 0) -> list[Any]:
        """Run a governor that may be killed at a step, and return its answers.

        If the governor was not killed, the last answer is its number of calls.
        """
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.close(read)
                with contextlib.redirect_stdout(io.StringIO()):
                    asyncio.run(self._govern(act, at, write))
            except BaseException:  # noqa: BLE001 - pytest does not handle it in this process
                traceback.print_exc()
            os.kill(os.getpid(), signal.SIGKILL)
        os.close(write)
        with os.fdopen(read, "rb") as stream:
            said = stream.read()
        os.waitpid(pid, 0)
        return [json.loads(line) for line in said.splitlines()]

    async def _govern(
        self, act: Callable[[KilledGovernor], Awaitable[None]], at: int, write: int
    ) -> None:
        world = ClaimsWorld(self.directory)
        await world.start()
        governor = KilledGovernor(world, self.sleepers, write)
        killed = Killed(at)
        if at:
            sys.setprofile(killed)
        await act(governor)
        sys.setprofile(None)
        governor.say({"calls": killed.calls})

    def end(self, name: str) -> None:
        """End a container, whether or not a governor ended it before being killed."""
        self.sleepers[name].kill()
        self.sleepers[name].wait()

    def close(self) -> None:
        for one in self.sleepers.values():
            one.kill()
            one.wait()
        shutil.rmtree(self.directory)


class KilledGovernor:
    """A running governor that writes its answers to a pipe."""

    def __init__(
        self, world: ClaimsWorld, sleepers: dict[str, subprocess.Popen[bytes]], write: int
    ) -> None:
        self.world = world
        self._sleepers = sleepers
        self._write = write

    def say(self, word: dict[str, Any]) -> None:
        os.write(self._write, json.dumps(word).encode() + b"\n")

    def claim(self, uid: str = "a", compute: int = 60) -> None:
        try:
            self.world.server.bookings.claim(told(uid, share(compute=compute)))
            self.say({"claimed": [uid, compute]})
        except TidegateError as e:
            self.say({"refused": str(e)})

    def unclaim(self, uid: str = "a") -> None:
        self.world.server.bookings.unclaim(uid)
        self.say({"unclaimed": uid})

    async def admit(self, name: str) -> None:
        request = {
            "id": name, "pid": self._sleepers[name].pid, "bundle": "/b", "annotations": {}, "identity": {},
            "claims": [use("a")],
        }  # fmt: skip
        pending: list[Any] = []
        try:
            await self.world.server.admissions.admit(
                request, [os.pidfd_open(self._sleepers[name].pid)], pending
            )
            if pending:
                self.world.server.admissions.confirm(pending)
        except TidegateError as e:
            self.say({"refused": str(e)})
        else:
            self.say({"admitted": name})

    async def end(self, name: str) -> None:
        self._sleepers[name].kill()
        for container in list(self.world.server.containers.values()):
            for member in list(container.members):
                if member.identifier == name:
                    self.world.server.admissions.part(container, member, "ended")
        self.say({"ended": name})

    def look(self) -> None:
        world = self.world
        self.say(
            {
                "claims": {uid: one["shares"][0]["compute"] for uid, one in world.claims().items()},
                "written": {
                    uid: one.shares[0].quota.compute for uid, one in world.state.claims.items()
                },
                "leaving": sorted(uid for uid, one in world.claims().items() if one["leaving"]),
                "containers": sorted(world.ids()),
                "booked": world.booked(),
                "directories": len(
                    list((world.state._path.parents[1] / "run/containers").iterdir())
                ),  # type: ignore[union-attr]
            }
        )


@pytest.fixture
def scenes() -> Iterator[Callable[[], KillScene]]:
    made: list[KillScene] = []

    def make() -> KillScene:
        made.append(KillScene(in_memory()))
        return made[-1]

    yield make
    for scene in made:
        scene.close()


async def tell(governor: KilledGovernor) -> None:
    governor.claim()


async def tell_other(governor: KilledGovernor) -> None:
    governor.claim(compute=90)


async def admit(governor: KilledGovernor) -> None:
    await governor.admit("one")


async def join(governor: KilledGovernor) -> None:
    await governor.admit("two")


async def take_back(governor: KilledGovernor) -> None:
    governor.unclaim()


async def end_one(governor: KilledGovernor) -> None:
    await governor.end("one")


async def look(governor: KilledGovernor) -> None:
    governor.look()


Act = Callable[[KilledGovernor], Awaitable[None]]
CASES: dict[str, tuple[tuple[Act, ...], Act, Act]] = {
    # For each case: the preparation, the action during which the governor is killed, and what is
    # requested afterwards.
    "tell": ((), tell, tell),
    "change": ((tell,), tell_other, tell_other),
    "take back": ((tell,), take_back, take_back),
    "admit": ((tell,), admit, admit),
    "join": ((tell, admit), join, join),
    "take back in use": ((tell, admit), take_back, take_back),
    "end of the last": ((tell, admit, take_back), end_one, take_back),
    "end of one of two": ((tell, admit, join), end_one, tell),
}


def steps(count: int, most: int = 24) -> list[int]:
    """Return at most `most` of `count` steps, evenly spread."""
    return list(range(1, count + 1, max(1, -(-count // most))))


def one_case(
    scenes: Callable[[], KillScene], name: str, choose: Callable[[int], list[int]]
) -> None:
    before, act, again = CASES[name]

    async def all_before(governor: KilledGovernor) -> None:
        for step in before:
            await step(governor)

    def prepared() -> KillScene:
        scene = scenes()
        assert not any("refused" in word for word in scene.run(all_before))
        return scene

    whole = prepared()
    (*_, last) = whole.run(act, at=1 << 30)
    assert last["calls"] > 5
    ends = act is end_one
    if ends:
        whole.end("one")
    final = after(whole, again)
    for at in choose(last["calls"]):
        scene = prepared()
        said = scene.run(act, at=at)
        if ends:
            scene.end("one")
        (found, *_) = scene.run(look)
        promised = [word for word in said if "calls" not in word]
        check(name, found, promised, at)
        # A client that got no answer repeats its request. The result is then the same as without
        # the kill.
        assert after(scene, again) == final, at
        scene.close()
        scene.directory.mkdir()  # so that the fixture can remove it


def after(scene: KillScene, again: Act) -> dict[str, Any]:
    async def act(governor: KilledGovernor) -> None:
        await again(governor)
        governor.look()

    (*_, found, _) = scene.run(act)
    return dict(found)


def check(name: str, found: dict[str, Any], promised: list[dict[str, Any]], at: int) -> None:
    """Check the invariants after a kill at any time: each claim is booked once, as written, and promises are kept."""
    assert found["claims"] == found["written"], at
    booked = list(found["claims"].values())
    assert found["booked"] == [4 * GIB * len(booked), sum(booked)], at
    assert found["directories"] == (1 if found["containers"] else 0), at
    if name in ("tell", "take back"):
        assert found["claims"] in ({}, {"a": 60}), at
    else:
        assert found["claims"] in ({"a": 60}, {"a": 90}, {}), at
    for word in promised:
        if "claimed" in word:
            uid, compute = word["claimed"]
            assert found["claims"][uid] == compute, at
        if "unclaimed" in word:
            assert (
                word["unclaimed"] not in found["claims"] or word["unclaimed"] in found["leaving"]
            ), at
        if "admitted" in word:
            assert word["admitted"] in found["containers"], at
    if name in ("admit", "join", "take back in use", "end of one of two"):
        assert "a" in found["claims"], at
    if name in ("join", "take back in use"):
        assert "one" in found["containers"], at


@pytest.mark.parametrize("name", CASES)
def test_a_governor_can_be_killed_at_any_step(scenes: Callable[[], KillScene], name: str) -> None:
    one_case(scenes, name, lambda count: steps(count, 3))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_governor_can_be_killed_at_many_steps(scenes: Callable[[], KillScene], name: str) -> None:
    one_case(scenes, name, lambda count: steps(count, 40))
