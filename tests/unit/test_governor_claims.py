"""Test claims: each is allocated once and never lost, however often it is announced.

The governor's modules are real, with a stub for the arbiter's thread. A container is an idle
process. Tests with real containers are in tests/container/test_claims.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import sqlite3
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import jsonschema
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from governor import metrics
from governor.admissions import Pending
from governor.allocations import AllocationTable
from governor.arbiter import Runner
from governor.claims import Claim, ClaimShare, merge, parse_claim, uses_key
from governor.config import Config
from governor.container import container_key
from governor.errors import OccupiedError, RefusedError, RequestError, StateError
from governor.quota import Device, Quota
from governor.server import Server
from governor.state import NAME, State
from tests.conftest import examples
from tests.unit.test_governor_recover import IdleRunner

GIB = 1 << 30
MIB = 1 << 20
FREE = 16 * GIB - 512 * MIB
ROOT = Path(__file__).resolve().parents[2]
GPUS = [Device(i, f"GPU-00000000-0000-0000-0000-{i:012x}", "stub", 16 * GIB, i) for i in range(3)]
ANSWERS = json.loads((ROOT / "governor/answers.schema.json").read_text())


def share(
    name: str = "gpu/0", gpu: int = 0, memory: int = 4 * GIB, compute: int = 70, **more: Any
) -> dict[str, Any]:
    return {"name": name, "device": GPUS[gpu].uuid, "memory": memory, "compute": compute, **more}


def told(
    uid: str, *shares: dict[str, Any], namespace: str = "default", name: str = ""
) -> dict[str, Any]:
    return {
        "uid": uid,
        "namespace": namespace,
        "name": name or f"name-{uid}",
        "shares": list(shares or (share(),)),
    }


def in_memory() -> Path:
    """Make a directory in memory if possible. Its path is short enough for sockets."""
    memory = "/dev/shm"
    return Path(tempfile.mkdtemp(dir=memory if os.access(memory, os.W_OK) else None))


def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "120"])


def use(uid: str, *names: str) -> dict[str, Any]:
    return {"uid": uid, "shares": list(names or ("gpu/0",))}


def check_answer(kind: str, answer: dict[str, Any]) -> None:
    jsonschema.validate(answer, {**ANSWERS, "$ref": f"#/$defs/{kind}"})


class ClaimsWorld:
    """Successive governors on the same directories, and containers that outlive them."""

    def __init__(self, directory: Path, **options: Any) -> None:
        self.config = Config(
            runtime_dir=str(directory / "run"), state_dir=str(directory / "state"), **options
        )
        (directory / "run" / "containers").mkdir(parents=True, exist_ok=True)
        self.devices = list(GPUS)
        self.children: dict[str, subprocess.Popen[bytes]] = {}
        self.state = cast("State", None)
        self.server = cast("Server", None)

    async def start(self) -> None:
        self.state = State(Path(self.config.state_dir) / NAME)
        self.state.load()
        runners = {device.uuid: cast("Runner", IdleRunner()) for device in self.devices}
        self.server = Server(
            self.config, AllocationTable(self.devices, self.config), runners, self.state
        )
        await self.server.adopt()

    def kill(self) -> None:
        """Discard the governor as if its process were killed: nothing more is written."""
        for container in self.server.containers.values():
            container._state = container._slots._state = State()  # discards their writes
            container.close(keep=True)
        self.state.close()

    async def restart(self) -> None:
        self.kill()
        await self.start()

    def claim(self, document: dict[str, Any]) -> dict[str, Any]:
        answer = self.server.bookings.claim(document)
        check_answer("claim", answer)
        return answer

    def claims(self) -> dict[str, dict[str, Any]]:
        listed = {"ok": True, "claims": self.server.bookings.describe()}
        check_answer("claims", listed)
        return {one["uid"]: one for one in listed["claims"]}

    async def begin(
        self, name: str, *uses: dict[str, Any], **more: Any
    ) -> tuple[dict[str, Any], list[Pending]]:
        """Request a container without confirming it."""
        self.children[name] = child = sleeper()
        request = {
            "id": name, "pid": child.pid, "bundle": f"/bundles/{name}", "annotations": {},
            "identity": {"namespace": "default", "pod": f"pod-{name}"}, "claims": list(uses), **more,
        }  # fmt: skip
        pending: list[Pending] = []
        descriptors = [os.pidfd_open(child.pid)]
        try:
            answer = await self.server.admissions.admit(request, descriptors, pending)
        finally:
            for fd in descriptors:
                os.close(fd)
        return answer, pending

    async def admit(self, name: str, *uses: dict[str, Any], **more: Any) -> dict[str, Any]:
        answer, pending = await self.begin(name, *uses, **more)
        assert self.server.admissions.confirm(pending) == {"ok": True}
        return answer

    async def end(self, name: str, *, wait: bool = True) -> None:
        child = self.children.pop(name)
        child.kill()
        child.wait()
        if wait:
            await until(lambda: name not in self.ids())

    def ids(self) -> list[str]:
        return [
            member.identifier for one in self.server.containers.values() for member in one.members
        ]

    def booked(self, gpu: int = 0) -> tuple[int, int]:
        """Return how much of a GPU's memory and time is allocated."""
        one = self.server._allocations._gpus[gpu]
        return one.memory_used, one.compute_used

    def close(self) -> None:
        for container in list(self.server.containers.values()):
            container.close()
        self.state.close()
        for child in self.children.values():
            child.kill()
            child.wait()


def exists(directory: str) -> bool:
    return Path(directory, "grant").exists()


async def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


def run(scene: Callable[[ClaimsWorld], Awaitable[None]], **options: Any) -> None:
    """Run a coroutine function in a separate world with short paths for its sockets."""
    directory = in_memory()

    async def whole() -> None:
        world = ClaimsWorld(directory, **options)
        try:
            await world.start()
            await asyncio.wait_for(scene(world), 60)
        finally:
            world.close()

    try:
        asyncio.run(whole())
    finally:
        shutil.rmtree(directory)


# ---- one claim ----


def test_a_claim_is_allocated_whether_a_container_uses_it_or_not() -> None:
    async def scene(world: ClaimsWorld) -> None:
        answer = world.claim(told("a", share(compute_limit=90)))
        assert answer["shares"] == [
            {
                "name": "gpu/0", "device": GPUS[0].uuid, "uuid": GPUS[0].uuid, "index": 0, "minor": 0,
                "memory": 4 * GIB, "compute": 70, "compute_limit": 90, "strategy": "auto",
                "memory_used": 0, "containers": [],
            }
        ]  # fmt: skip
        assert world.booked() == (4 * GIB, 70)
        assert (await world.admit("one", use("a")))["compute_limit"] == 90
        assert world.booked() == (4 * GIB, 70)
        assert world.claims()["a"]["shares"][0]["containers"] == ["one"]
        await world.end("one")
        assert world.booked() == (4 * GIB, 70)
        assert world.server.bookings.unclaim("a") == {"ok": True}
        assert world.booked() == (0, 0)
        assert (world.claims(), world.state.claims) == ({}, {})
        assert world.server.bookings.unclaim("a") == {"ok": True}

    run(scene)


def test_a_claim_that_is_announced_again_changes_nothing() -> None:
    async def scene(world: ClaimsWorld) -> None:
        document = told("a", share("gpu/0"), share("gpu/1", gpu=1))
        first = world.claim(document)
        assert world.claim(document) == first
        assert world.claim({**document, "shares": document["shares"][::-1]}) == first
        await world.restart()
        assert world.claim(document) == first
        assert [world.booked(gpu) for gpu in range(3)] == [(4 * GIB, 70)] * 2 + [(0, 0)]

    run(scene)


def test_an_unused_claim_may_change_its_content() -> None:
    async def scene(world: ClaimsWorld) -> None:
        world.claim(told("a", share("x", compute=70), share("y", gpu=1)))
        world.claim(told("a", share("x", compute=80, gpu=2)))
        assert [world.booked(gpu) for gpu in range(3)] == [(0, 0), (0, 0), (4 * GIB, 80)]
        with pytest.raises(RefusedError, match="GPU 0"):
            world.claim(told("a", share("x", compute=90, gpu=2), share("y", memory=17 * GIB)))
        assert [world.booked(gpu) for gpu in range(3)] == [(0, 0), (0, 0), (4 * GIB, 80)]
        await world.admit("one", use("a", "x"))
        with pytest.raises(RefusedError) as caught:
            world.claim(told("a", share("x", compute=10)))
        assert str(caught.value).startswith(
            f"claim default/name-a is used by container 'one' with 4096 MiB and 80 % of {GPUS[2].uuid},"
            f" and cannot be changed to 4096 MiB and 10 % of {GPUS[0].uuid}; "
        )
        assert world.booked(2) == (4 * GIB, 80)
        await world.end("one", wait=False)  # the governor has not noticed yet
        world.claim(told("a", share("x", compute=10)))
        assert [world.booked(gpu) for gpu in range(3)] == [(4 * GIB, 10), (0, 0), (0, 0)]

    run(scene)


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ([share(memory=FREE + MIB)], "15873 MiB of memory on GPU 0, but only 15872 MiB is left; ask for 15872Mi"),
        ([share(compute=60), share("gpu/1", compute=50)], "50 % of the time of GPU 0, but only 40 % is left"),
        ([{**share(), "device": "GPU-none"}], "claim default/train asks for 4096 MiB and 70 % of GPU-none, which this node does not have"),
        ([share(memory=MIB)], "memory is 1Mi, but a process's context alone takes"),
        ([share(strategy="mps")], "claim default/train asks for 4096 MiB and 70 % of GPU 0 with strategy mps, but that GPU uses timeslice"),
        ([share("gpu/0"), share("gpu/1", gpu=1, compute=60)], "must have the same quota on each of its GPUs"),
    ],
)  # fmt: skip
def test_a_refusal_names_the_claim_and_the_shortage(
    shares: list[dict[str, Any]], message: str
) -> None:
    async def scene(world: ClaimsWorld) -> None:
        with pytest.raises(RefusedError) as caught:
            world.claim(told("a", *shares, name="train"))
        assert str(caught.value).startswith("claim default/train")
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)
        assert [world.booked(gpu) for gpu in range(3)] == [(0, 0)] * 3
        assert (world.claims(), world.state.claims) == ({}, {})

    run(scene)


def test_claims_and_other_containers_share_the_allocation_table() -> None:
    async def scene(world: ClaimsWorld) -> None:
        asked = {
            "annotations": {
                "tidegate.gpu/memory": "4Gi",
                "tidegate.gpu/compute": "40",
                "tidegate.gpu/devices": "0",
            }
        }
        await world.admit("other", **asked)
        with pytest.raises(RefusedError, match="70 % of the time of GPU 0, but only 60 % is left"):
            world.claim(told("a"))
        world.claim(told("a", share(compute=60)))
        with pytest.raises(RefusedError, match="0 % of its time left"):
            await world.admit("another", **asked)

    run(scene)


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ([share(), share()], "two shares with the same name"),
        ([share(compute_limit=60)], "limit of 60 % is below the guarantee of 70 %"),
    ],
)
def test_a_contradictory_claim_is_refused(shares: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        parse_claim(told("a", *shares))


ODD = {
    "uid": ["", "..", "../a", "a/b", "a\n", "a b", "a" * 65, "-a", "\u0661", "\ud800", None, 1],
    "namespace": ["", "..", "../d", "d/e", "D", "d\n", "d" * 254, "\x1b[2J", "\u202e"],
    "name": ["", ".", "n/../m", "n\n", "n" * 254, "\u00e9"],
    "share": ["", "..", "/a", "a\n", "a b", "a" * 254, "a\0b", "\u00e9"],
    "device": ["", "..", "GPU-/x", "x" * 65, "x\n"],
    "memory": [0, -1, 1.5, 1 << 51, True, "8Gi", None, 10**400],
    "compute": [0, -1, 101, 0.5, True, "30", 10**30],
    "compute_limit": [0, 101, -5, "60"],
    "strategy": ["", "MPS", None, "fair"],
}


@pytest.mark.parametrize("field", ODD)
def test_invalid_names_and_numbers_never_become_a_claim(field: str) -> None:
    async def scene(world: ClaimsWorld) -> None:
        for value in ODD[field]:
            document = told("a")
            if field in ("uid", "namespace", "name"):
                document[field] = value
            else:
                document["shares"][0]["name" if field == "share" else field] = value
            line = json.dumps({"v": 1, "op": "claim", **document}).encode()
            answer = await world.server._answer(line, [], [])
            assert answer["error"]["code"] == "request", value
            assert answer["error"]["message"].isprintable()
        for line in (
            b"[" * 60000,
            b'{"v":1,"op":' + b"[" * 20000 + b"]" * 20000 + b"}",
            b"{}",
            b"1",
        ):
            assert (await world.server._answer(line, [], []))["error"]["code"] == "request"
        assert world.booked() == (0, 0)
        assert world.claims() == {}

    run(scene)


def test_claims_are_refused_when_there_is_no_room() -> None:
    """Each claim takes memory and time, so claims that take nothing cannot fill the table or the
    database.
    """

    async def scene(world: ClaimsWorld) -> None:
        for number in range(FREE // GIB):
            world.claim(told(f"c{number}", share(memory=GIB, compute=1)))
        for number in range(100, 300):
            with pytest.raises(
                RefusedError, match=f"^claim default/name-c{number} asks for 1024 MiB"
            ):
                world.claim(told(f"c{number}", share(memory=GIB, compute=1)))
        assert world.booked() == (FREE // GIB * GIB, FREE // GIB)
        assert len(world.state.claims) == FREE // GIB

    run(scene)


def test_a_claim_that_cannot_be_written_is_not_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(world: ClaimsWorld) -> None:
        world.claim(told("a", share(compute=10)))

        def full(*_: object) -> None:
            raise sqlite3.OperationalError("database or disk is full")

        with monkeypatch.context() as patch:
            patch.setattr(world.state, "_write", full)
            with pytest.raises(StateError):
                world.claim(told("b", share(compute=20)))
            with pytest.raises(StateError):
                world.claim(told("a", share(compute=30)))
            with pytest.raises(StateError):
                world.server.bookings.unclaim("a")
        assert world.booked() == (4 * GIB, 10)
        assert set(world.claims()) == {"a"}
        await world.restart()
        assert world.booked() == (4 * GIB, 10)

    run(scene)


# ---- containers of a claim ----


def test_containers_of_one_share_have_one_quota_and_one_directory() -> None:
    async def scene(world: ClaimsWorld) -> None:
        world.claim(told("a"))
        one, two = await world.admit("one", use("a")), await world.admit("two", use("a"))
        assert one == two
        assert one["key"] == uses_key([("a", "gpu/0")])
        (container,) = world.server.containers.values()
        assert container.gpus._runners[0].__class__ is IdleRunner
        assert len(container.gpus._tenants) == 1
        listed = container.describe()
        assert [(c["id"], c["identity"]["pod"], c["together"]) for c in listed] == [
            ("one", "pod-one", 2),
            ("two", "pod-two", 2),
        ]
        assert {c["key"] for c in listed} == {one["key"]}
        assert listed[0]["claims"] == [
            {"uid": "a", "namespace": "default", "name": "name-a", "shares": ["gpu/0"]}
        ]
        # The end of the first container ends nothing for the second.
        await world.end("one")
        assert exists(two["directory"])
        assert container.identifier == "two"
        await world.restart()
        assert world.ids() == ["two"]
        await world.end("two")
        assert not exists(two["directory"])
        assert world.booked() == (4 * GIB, 70)

    run(scene)


def test_an_init_container_and_then_the_main_one() -> None:
    async def scene(world: ClaimsWorld) -> None:
        world.claim(told("a", share("x"), share("y", gpu=1)))
        for name, shares in (("init", ("x",)), ("again", ("x",)), ("main", ("x", "y"))):
            await world.admit(name, use("a", *shares))
            assert world.ids() == [name]
            await world.end(name, wait=False)  # its end is not noticed at once
        assert world.booked(0) == world.booked(1) == (4 * GIB, 70)

    run(scene)


def test_containers_may_use_separate_shares_of_a_claim_but_not_overlapping_ones() -> None:
    async def scene(world: ClaimsWorld) -> None:
        world.claim(told("a", share("x"), share("y", gpu=1)))
        await world.admit("one", use("a", "x"))
        await world.admit("two", use("a", "y"))
        assert len(world.server.containers) == 2
        with pytest.raises(
            RefusedError,
            match=r"share x of claim default/name-a is in use by container 'one', whose set of shares"
            r" differs from this container's",
        ):
            await world.admit("three", use("a", "x", "y"))
        assert sorted(world.ids()) == ["one", "two"]

    run(scene)


def test_a_container_may_use_shares_of_two_claims_if_their_quotas_are_equal() -> None:
    async def scene(world: ClaimsWorld) -> None:
        world.claim(told("a", share(gpu=1)))
        world.claim(told("b", share(gpu=0)))
        answer = await world.admit("one", use("a"), use("b"))
        assert [device["index"] for device in answer["devices"]] == [0, 1]
        assert (answer["memory"], answer["compute"]) == (4 * GIB, 70)
        await world.end("one")
        world.claim(told("c", share(gpu=2, compute=60)))
        with pytest.raises(
            RefusedError,
            match=r"claim default/name-a with claim default/name-c has 4096 MiB and 70 %",
        ):
            await world.admit("two", use("a"), use("c"))

    run(scene)


def test_two_shares_of_one_gpu_are_added_up() -> None:
    async def scene(world: ClaimsWorld) -> None:
        world.claim(
            told("a", share("gpu/0", compute=30), share("gpu/1", compute=40, compute_limit=90))
        )
        answer = await world.admit("one", use("a", "gpu/0", "gpu/1"))
        assert len(answer["devices"]) == 1
        assert [answer[name] for name in ("memory", "compute", "compute_limit")] == [
            8 * GIB,
            70,
            100,
        ]

    run(scene)


def test_a_second_entry_of_the_hook_finds_the_container_prepared() -> None:
    async def scene(world: ClaimsWorld) -> None:
        world.claim(told("a"))
        answer = await world.admit("one", use("a"))
        first = world.children["one"]
        request = {
            "id": "one", "pid": first.pid, "bundle": "/b", "annotations": {}, "identity": {}, "claims": [use("a")]
        }  # fmt: skip
        fd = os.pidfd_open(first.pid)
        assert await world.server.admissions.admit(request, [fd], []) == {**answer, "already": True}
        with pytest.raises(RefusedError, match="already registered"):
            await world.server.admissions.admit({**request, "claims": []}, [fd], [])
        os.close(fd)
        with pytest.raises(RefusedError, match="already registered"):  # another container
            await world.begin("one", use("a"))
        first.kill()
        first.wait()

    run(scene)


def test_an_admission_that_is_not_confirmed_leaves_the_others_alone() -> None:
    async def scene(world: ClaimsWorld) -> None:
        world.claim(told("a"))
        _, first = await world.begin("one", use("a"))
        await world.admit("two", use("a"))
        world.server.admissions.part(*first[0], "unconfirmed")
        assert world.ids() == ["two"]
        with pytest.raises(RequestError, match="confirm without an admission"):
            world.server.admissions.confirm(first)
        _, third = await world.begin("three", use("a"))
        await world.restart()
        assert world.ids() == ["two"]  # an unconfirmed container does not come back
        assert third[0][1].identifier == "three"
        assert world.booked() == (4 * GIB, 70)

    run(scene)


@pytest.mark.parametrize(
    "name", ["memory", "compute", "compute-limit", "devices", "count", "strategy"]
)
def test_an_annotation_beside_a_claim_is_refused(name: str) -> None:
    async def scene(world: ClaimsWorld) -> None:
        world.claim(told("a", name="train"))
        value = {"memory": "1Gi", "strategy": "timeslice"}.get(name, "1")
        with pytest.raises(
            Exception, match=f"tidegate.gpu/{name} conflicts with claim default/train"
        ) as caught:
            await world.begin("one", use("a"), annotations={f"tidegate.gpu/{name}": value})
        assert caught.value.code == "annotation"  # type: ignore[attr-defined]
        assert world.ids() == []
        allowed = {"tidegate.gpu/capabilities": "compute", "tidegate.gpu/driver": "optional"}
        await world.admit("two", use("a"), annotations=allowed)

    run(scene)


@pytest.mark.parametrize(
    ("uses", "identity", "message"),
    [
        ([use("none")], {}, "claim none is not known to this node's governor"),
        ([use("a", "gpu/9")], {}, "claim default/train has no share 'gpu/9'; it has gpu/0"),
        ([use("a")], {"namespace": "other"}, "claim default/train is not in this container's namespace 'other'"),
        ([use("a"), use("none")], {}, "claim none is not known"),
    ],
)  # fmt: skip
def test_a_container_that_may_not_use_a_claim_gets_the_reason(
    uses: list[dict[str, Any]], identity: dict[str, str], message: str
) -> None:
    async def scene(world: ClaimsWorld) -> None:
        world.claim(told("a", name="train"))
        with pytest.raises(RefusedError, match=message):
            await world.begin("one", *uses, identity=identity)
        assert world.ids() == []
        assert world.booked() == (4 * GIB, 70)

    run(scene)


def test_a_gpu_that_does_not_answer_takes_no_container_of_a_claim() -> None:
    async def scene(world: ClaimsWorld) -> None:
        world.claim(told("a"))
        world.server.allocations.set_lost(GPUS[0].uuid, "GPU is lost")
        with pytest.raises(
            RefusedError, match="GPU 0 of claim default/name-a does not answer: GPU is lost"
        ):
            await world.admit("one", use("a"))
        with pytest.raises(
            RefusedError,
            match="claim default/name-b asks for 4096 MiB and 1 % of GPU 0, which does not answer",
        ):
            world.claim(told("b", share(compute=1)))
        world.server.allocations.set_lost(GPUS[0].uuid, None)
        await world.admit("two", use("a"))

    run(scene)


def test_a_quota_from_a_claim_cannot_be_changed_by_set() -> None:
    async def scene(world: ClaimsWorld) -> None:
        world.claim(told("a"))
        await world.admit("one", use("a"))
        with pytest.raises(RefusedError, match="has its quota from claim default/name-a"):
            await world.server.admissions.set({"id": "one", "compute": 10})

    run(scene)


# ---- the end of a claim ----


def test_a_claim_in_use_stays_allocated_until_its_last_container_has_ended() -> None:
    async def scene(world: ClaimsWorld) -> None:
        world.claim(told("a"))
        await world.admit("one", use("a"))
        await world.admit("two", use("a"))
        world.server.bookings.unclaim("a")
        world.server.bookings.unclaim("a")
        assert world.claims()["a"]["leaving"]
        with pytest.raises(RefusedError, match="claim default/name-a was taken back"):
            await world.admit("three", use("a"))
        await world.end("one")
        await world.restart()
        assert world.claims()["a"]["leaving"]
        assert world.booked() == (4 * GIB, 70)
        await world.end("two")
        await until(lambda: not world.claims())
        assert (world.booked(), world.state.claims) == ((0, 0), {})
        await world.restart()
        assert world.claims() == {}

    run(scene)


def test_the_refusal_of_a_claim_names_the_users_of_its_gpu() -> None:
    """The refusal names the container of a claim that was taken back, and names a container without
    a claim as such.
    """

    async def scene(world: ClaimsWorld) -> None:
        world.claim(told("old", share(compute=40)))
        await world.admit("its-container", use("old"))
        world.server.bookings.unclaim("old")
        with pytest.raises(OccupiedError) as caught:
            world.claim(told("new"))
        assert str(caught.value) == (
            "claim default/name-new asks for 70 % of the time of GPU 0, but only 60 % is left; wait: claim"
            " default/name-old (4096 MiB and 40 %), taken back, becomes free when its"
            " container 'its-container' ends"
        )
        annotations = {"memory": "4Gi", "compute": "20", "devices": "0"}
        await world.admit(
            "beside", annotations={f"tidegate.gpu/{k}": v for k, v in annotations.items()}
        )
        world.claim(told("other", share(compute=10, memory=GIB)))
        with pytest.raises(OccupiedError) as caught:
            world.claim(told("new"))
        assert caught.value.hint.endswith(
            "; container 'beside' (4096 MiB and 20 %) was started without the cluster's scheduler;"
            " claim default/name-other (1024 MiB and 10 %) holds a share of this GPU"
        )
        await world.end("beside")
        await world.end("its-container", wait=False)  # its end has not been noticed yet
        world.server.bookings.unclaim("other")
        world.claim(told("new"))
        assert world.booked() == (4 * GIB, 70)

    run(scene)


def test_a_claim_that_is_larger_than_its_gpu_is_not_told_to_wait() -> None:
    async def scene(world: ClaimsWorld) -> None:
        with pytest.raises(RefusedError) as caught:
            world.claim(told("a", share(compute=60), share("gpu/1", compute=50)))
        assert not isinstance(caught.value, OccupiedError)

    run(scene)


def test_a_leaving_claim_that_is_announced_again_stays() -> None:
    async def scene(world: ClaimsWorld) -> None:
        world.claim(told("a"))
        await world.admit("one", use("a"))
        world.server.bookings.unclaim("a")
        world.claim(told("a"))
        await world.admit("two", use("a"))
        for name in ("one", "two"):
            await world.end(name)
        await world.restart()
        assert (set(world.claims()), world.booked()) == ({"a"}, (4 * GIB, 70))

    run(scene)


def test_a_leaving_claim_is_removed_if_its_container_ended_without_a_governor() -> None:
    async def scene(world: ClaimsWorld) -> None:
        world.claim(told("a"))
        await world.admit("one", use("a"))
        world.server.bookings.unclaim("a")
        world.kill()
        await world.end("one", wait=False)
        await world.start()
        assert (world.claims(), world.booked(), world.state.claims) == ({}, (0, 0), {})

    run(scene)


# ---- reboots and damage ----


def test_a_claim_outlives_a_reboot(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(world: ClaimsWorld) -> None:
        world.claim(told("a"))
        await world.admit("one", use("a"))
        world.kill()
        monkeypatch.setattr("governor.state.boot_id", lambda: "another")
        await world.end("one", wait=False)
        shutil.rmtree(Path(world.config.runtime_dir) / "containers")
        (Path(world.config.runtime_dir) / "containers").mkdir()
        await world.start()
        assert (set(world.claims()), world.booked()) == ({"a"}, (4 * GIB, 70))
        await world.admit("one", use("a"))

    run(scene)


def test_a_claim_with_a_missing_gpu_is_logged_and_can_be_taken_back() -> None:
    async def scene(world: ClaimsWorld) -> None:
        world.claim(told("a", share("x"), share("y", gpu=1)))
        world.kill()
        world.devices = GPUS[:1]
        await world.start()
        assert [one["index"] for one in world.claims()["a"]["shares"]] == [0, None]
        with pytest.raises(
            RefusedError, match=f"claim default/name-a asks for 4096 MiB and 70 % of {GPUS[1].uuid}"
        ):
            await world.admit("one", use("a", "y"))
        await world.admit("two", use("a", "x"))
        await world.end("two")
        world.server.bookings.unclaim("a")
        assert world.booked() == (0, 0)

    run(scene)


def test_a_database_without_claims_is_migrated(tmp_path: Path) -> None:
    path = tmp_path / NAME
    state = State(path)
    state.load()
    state.close()
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("DROP TABLE claims")
        db.execute("PRAGMA user_version = 1")
        db.commit()
    state = State(path)
    state.load()
    claim = parse_claim(told("a"))
    state.put_claim(claim)
    state.close()
    again = State(path)
    again.load()
    assert again.claims == {"a": claim}
    again.close()


def test_a_claim_that_was_corrupted_on_disk_counts_as_damage(tmp_path: Path) -> None:
    path = tmp_path / NAME
    state = State(path)
    state.load()
    state.put_claim(parse_claim(told("a", share(compute=70))))
    state.close()
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("""UPDATE claims SET row = replace(row, '"compute": 70', '"compute": 10')""")
        db.commit()
    state = State(path)
    state.load()
    assert state.claims == {}
    assert (tmp_path / f"{NAME}.damaged-1").exists()
    state.close()


# ---- in any order ----

UIDS = ("a", "b", "c")
STEPS = st.one_of(
    st.tuples(st.just("claim"), st.sampled_from(UIDS), st.integers(0, 2), st.sampled_from((20, 50))),
    st.tuples(st.just("unclaim"), st.sampled_from(UIDS)),
    st.tuples(st.just("admit"), st.sampled_from(UIDS), st.integers(0, 3)),
    st.tuples(st.just("end"), st.integers(0, 3)),
    st.tuples(st.just("restart")),
)  # fmt: skip


@settings(max_examples=examples(15), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(STEPS, max_size=12))
@example(
    [
        ("claim", "a", 0, 20),
        ("admit", "a", 0),
        ("unclaim", "a"),
        ("restart",),
        ("end", 0),
        ("claim", "a", 1, 20),
    ]
)
def test_in_any_order_each_claim_is_allocated_exactly_once(steps: list[tuple[Any, ...]]) -> None:
    """The model consists of the claims, those that were taken back, and the running
    containers.
    """

    async def scene(world: ClaimsWorld) -> None:
        promised: dict[str, tuple[int, int]] = {}  # GPU and percent
        leaving: set[str] = set()
        runs: dict[str, str] = {}

        def settle() -> None:
            for uid in leaving - set(runs.values()):
                del promised[uid]
                leaving.discard(uid)

        for what, *values in steps:
            if what == "claim":
                uid, gpu, compute = values
                used = {
                    g: sum(c for u, (h, c) in promised.items() if h == g and u != uid)
                    for g in range(3)
                }
                same = promised.get(uid) == (gpu, compute)
                fits = used[gpu] + compute <= 100
                may = same or (uid not in runs.values() and fits)
                try:
                    world.claim(told(uid, share(gpu=gpu, compute=compute, memory=GIB)))
                    assert may
                    promised[uid] = gpu, compute
                    leaving.discard(uid)
                except RefusedError:
                    assert not may
            elif what == "unclaim":
                world.server.bookings.unclaim(values[0])
                if values[0] in promised:
                    leaving.add(values[0])
            elif what == "admit":
                uid, number = values
                name = f"c{number}"
                if name in runs:
                    continue
                try:
                    await world.admit(name, use(uid))
                    assert uid in promised
                    assert uid not in leaving
                    runs[name] = uid
                except RefusedError:
                    assert uid not in promised or uid in leaving
                    await world.end(name, wait=False)
            elif what == "end":
                name = f"c{values[0]}"
                if name in runs:
                    await world.end(name)
                    del runs[name]
            else:
                await world.restart()
            settle()
            assert set(world.claims()) == set(promised)
            assert set(world.state.claims) == set(promised)
            assert sorted(world.ids()) == sorted(runs)
            assert len(world.server.containers) == len(set(runs.values()))
            for gpu in range(3):
                own = [c for g, c in promised.values() if g == gpu]
                assert world.booked(gpu) == (len(own) * GIB, sum(own))

    run(scene)


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from((10, 20))), min_size=1, max_size=6))
def test_a_containers_quota_is_the_sum_of_its_shares(parts: list[tuple[int, int]]) -> None:
    shares = [
        ClaimShare(f"s{i}", GPUS[gpu].uuid, Quota(GIB, compute, compute))
        for i, (gpu, compute) in enumerate(parts)
    ]
    claim = Claim("a", "default", "a", tuple(shares))
    sums = {gpu: sum(c for g, c in parts if g == gpu) for gpu, _ in parts}
    counts = {gpu: sum(g == gpu for g, _ in parts) for gpu, _ in parts}
    equal = len({(sums[gpu], counts[gpu]) for gpu in sums}) == 1
    try:
        merged = merge([(claim, share) for share in shares])
        assert equal
        assert {GPUS[gpu].uuid for gpu in sums} == set(merged)
        assert {quota.compute for quota in merged.values()} == set(sums.values())
    except RefusedError:
        assert not equal


def test_keys_of_claims_and_of_containers_are_different() -> None:
    assert uses_key([("a", "b"), ("c", "d")]) == uses_key([("c", "d"), ("a", "b")])
    assert (
        len(
            {
                uses_key([("a", "b/c")]),
                uses_key([("a", "b"), ("a", "c")]),
                container_key("claims a/b/c"),
            }
        )
        == 3
    )


# ---- metrics ----


def test_metrics_have_labels_for_pod_and_claim() -> None:
    async def scene(world: ClaimsWorld) -> None:
        world.claim(told("a", name="train"))
        await world.admit("one", use("a"))
        await world.admit("two", use("a"))
        asked = {"annotations": {"tidegate.gpu/memory": "1Gi", "tidegate.gpu/devices": "1"}}
        await world.admit("alone", identity={}, **asked)
        families = {family.name: family for family in metrics.collect(world.server)}
        found = families["tidegate_container_memory_limit_bytes"].samples
        assert [sample.labels for sample in found] == [
            {"container": "one", "gpu": GPUS[0].uuid, "namespace": "default", "pod": "pod-one", "claim": "default/train"},
            {"container": "alone", "gpu": GPUS[1].uuid, "namespace": "", "pod": "", "claim": ""},
        ]  # fmt: skip
        claimed = families["tidegate_claim_memory_bytes"].samples
        assert [(one.labels, one.value) for one in claimed] == [
            ({"claim": "default/train", "uid": "a", "share": "gpu/0", "gpu": GPUS[0].uuid}, 4 * GIB)
        ]
        assert families["tidegate_containers"].samples[0].value == 3

    run(scene)


def test_names_of_pods_cannot_inject_metrics() -> None:
    """An engine reports these names, which users choose.

    They are labels of a series, which ends with its claim and its container.
    """
    hostile = 'a"} 1\nforged{x="\\\r\x1b[2J\ud800' + "x" * 20000

    async def scene(world: ClaimsWorld) -> None:
        for number in range(3):
            world.claim(told(f"c{number}", share(compute=10)))
            await world.admit(
                f"one-{number}",
                use(f"c{number}"),
                identity={"namespace": "default", "pod": f"{hostile}{number}"},
            )
            world.server.bookings.unclaim(f"c{number}")
            await world.end(f"one-{number}")
        world.claim(told("a", share(compute=10), name="train"))
        identity = {"namespace": "default", "pod": hostile}
        await world.admit("one", use("a"), identity=identity)
        families = list(metrics.collect(world.server))
        written = generate_latest(metrics._Snapshot(families)).decode()
        names = {family.name for family in families}
        read = list(text_string_to_metric_families(written))
        assert {family.name for family in read} <= names
        labels = [sample.labels for family in read for sample in family.samples]
        assert {one.get("claim", "") for one in labels} == {"", "default/train"}
        assert {one["container"] for one in labels if "container" in one} == {"one"}
        assert max(len(value) for one in labels for value in one.values()) <= 2000

    run(scene)
