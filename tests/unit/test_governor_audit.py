"""Test the auditor with stub containers: the processes that it counts, its reports, its actions and its cleanup.

Tests with real containers are in tests/container/test_violations.py.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import selectors
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from governor import audit, cgroups
from governor.account import GpuSample
from governor.arbiter import Stats
from governor.audit import Auditor, _Watched
from governor.cgroups import CannotFreezeError, Membership
from governor.config import Config
from governor.container import Container
from governor.counters import Tally
from governor.members import Members
from governor.pace import LINES
from governor.quota import Device, Quota
from governor.usage import Charge, Passing
from governor.violations import MAX_ELSEWHERE, Findings
from vdriver.nvml import ProcessMemory, ProcessUse

GIB = 1 << 30
DEVICE = Device(0, "GPU-0", "made up", 16 * GIB)
CONTEXT = Config().context_memory
NEVER = 999_999_999  # not the pid of any process


class Made:
    """The part of a container that an auditor uses."""

    def __init__(self, name: str, pid: int = NEVER, device: Device = DEVICE) -> None:
        self.identifier = name
        self.pid = pid
        self.quota = Quota(2 * GIB, 20, 20)
        self.context_memory = CONTEXT
        self.devices = (device,)
        self.findings = Findings(1)
        self.membership = Membership()
        self.registered: set[int] = set()
        self.now = Stats()
        self.lets_pass = Passing(0, 0, pending=False)
        self.killed = 0
        self.alive = True
        self.is_moving = False
        self.others: list[Any] = []

    @property
    def members(self) -> Members:
        first: Any = SimpleNamespace(
            identifier=self.identifier,
            pid=self.pid,
            membership=self.membership,
            has_ended=lambda: not self.alive,
        )
        return Members([first, *self.others])

    @property
    def gpus(self) -> Made:
        return self

    @property
    def account(self) -> Made:
        return self

    def pids(self) -> frozenset[int]:
        return frozenset(self.registered)

    def stats(self, _: int) -> Stats:
        return self.now

    def passing(self, _: int) -> Passing:
        return self.lets_pass

    def kill(self) -> None:
        self.killed += 1


class MadeGroup:
    """A control group that records the calls."""

    hierarchy = cgroups.V2
    path = "/one"

    def __init__(self, record: Path) -> None:
        self.record = record
        self.did: list[str] = []

    def freeze(self) -> None:
        assert self.path in self.record.read_text()  # recorded before it is frozen
        self.did.append("freeze")

    def thaw(self) -> None:
        self.did.append("thaw")

    def close(self) -> None: ...


class VirtualTime:
    """Replaces the module `time` in the auditor: time passes at once while all tasks sleep."""

    CLOCK_BOOTTIME = time.CLOCK_BOOTTIME
    clock_gettime_ns = staticmethod(time.clock_gettime_ns)
    SINCE_1970_NS = 1_800_000_000 * 10**9

    def __init__(self) -> None:
        self.now_ns = 10**15

    def monotonic_ns(self) -> int:
        return self.now_ns

    def monotonic(self) -> float:
        return self.now_ns / 1e9

    def time_ns(self) -> int:
        return self.now_ns + self.SINCE_1970_NS

    def time(self) -> float:
        return self.time_ns() / 1e9


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop that runs on a `VirtualTime`."""

    def __init__(self, clock: VirtualTime) -> None:
        class Selector(selectors.SelectSelector):
            def select(self, timeout: float | None = None) -> Any:
                clock.now_ns += round((timeout or 0) * 1e9)
                return super().select(0)

        super().__init__(Selector())
        self._clock = clock

    def time(self) -> float:
        return self._clock.monotonic()


class AuditWorld:
    """An auditor, its containers, and the container that each process belongs to."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch, **options: str) -> None:
        self.config = replace(Config(runtime_dir=str(directory)), **options)
        self.containers: dict[str, Container] = {}
        self.tally = Tally()
        self.clock = VirtualTime()
        self.owners: dict[int, Made] = {}
        self.group = MadeGroup(directory / "frozen.json")
        monkeypatch.setattr(audit, "time", self.clock)
        monkeypatch.setattr(audit, "AUDIT_NS", 0)
        monkeypatch.setattr(audit, "find_owner", self._find_owner)
        monkeypatch.setattr(audit, "started_ns", lambda pid: 2**62 if pid < 1000 else 1)
        self.patch = monkeypatch
        self.charge = Charge()
        self.auditor = Auditor(self.containers, self.tally, self.config)

    def _find_owner(self, pid: int, containers: Sequence[Container]) -> Made | None:
        owner = self.owners.get(pid)
        return owner if any(cast("Any", one) is owner for one in containers) else None

    def add(self, name: str, **more: Any) -> Made:
        made = Made(name, **more)
        self.containers[name] = cast("Container", made)
        return made

    def look(self, *processes: ProcessMemory, samples: tuple[ProcessUse, ...] = ()) -> None:
        look = GpuSample(
            self.clock.monotonic_ns(), {one.pid: one.used or 0 for one in processes}, samples
        )
        charges = {one: {cast("Any", object()): self.charge} for one in self.containers.values()}
        self.auditor.audit(DEVICE, look, processes, charges)

    async def looks(
        self,
        *processes: ProcessMemory,
        seconds: float = 1.4,
        samples: Callable[[], tuple[ProcessUse, ...]] = tuple,
    ) -> None:
        end = self.clock.monotonic() + seconds
        while self.clock.monotonic() < end:
            self.look(*processes, samples=samples())
            await asyncio.sleep(0.1)

    def named(self) -> tuple[ProcessUse, ...]:
        """Return a sample that shows process 1 at work now."""
        return (ProcessUse(1, self.clock.time_ns() // 1000, 99),)

    def play(self, scene: Awaitable[None]) -> list[dict[str, Any]]:
        """Run the scene; return the log events about violations and actions."""

        async def whole() -> None:
            await scene

        with (
            capture_logs() as logs,
            asyncio.Runner(loop_factory=lambda: VirtualLoop(self.clock)) as runner,
        ):
            runner.run(whole())
        return [dict(event) for event in logs]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., AuditWorld]:
    return lambda **options: AuditWorld(tmp_path, monkeypatch, **options)


def kinds(logs: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(one["event"], one["kind"]) for one in logs if one["event"].startswith("violation")]


def test_registered_and_unregistered_processes_count(world: Callable[..., AuditWorld]) -> None:
    made = world()
    one, two = made.add("one"), made.add("two")
    one.registered = {1}
    made.owners = {2: one, 3: two}
    allowed = 2 * GIB + (128 << 20) + CONTEXT // 4
    logs = made.play(
        made.looks(
            ProcessMemory(1, allowed),
            ProcessMemory(2, 1, computes=False),
            ProcessMemory(3, 5, computes=False),
            ProcessMemory(4, 9 * GIB),  # belongs to no container
        )
    )
    assert kinds(logs) == [("violation", "memory")]
    assert logs[0]["container"] == "one"
    assert (logs[0]["found"], logs[0]["allowed"], logs[0]["pid"]) == ("2306 MiB", "2306 MiB", 1)
    assert logs[0]["log_level"] == "warning"
    assert (one.findings.seen, two.findings.seen) == ([allowed + 1], [5])
    assert made.tally.violations == {"memory": 1}
    assert one.findings.counts[0] == {"memory": 1}
    [episode] = one.findings.episodes
    assert (episode.gpu, episode.found, episode.allowed) == ("GPU-0", allowed + 1, allowed)
    assert 0 <= made.clock.time() - episode.began < 1


def test_a_graphics_process_or_one_older_than_the_governor_is_not_accused(
    world: Callable[..., AuditWorld],
) -> None:
    made = world()
    one = made.add("one")
    one.registered = {3}
    made.owners = {1: one, 2000: one}
    drawing = ProcessMemory(1, GIB, computes=False)
    assert (
        kinds(made.play(made.looks(drawing, ProcessMemory(2000, GIB), ProcessMemory(3, 0)))) == []
    )
    assert one.findings.seen == [2 * GIB]
    assert kinds(made.play(made.looks(ProcessMemory(1, GIB)))) == [("violation", "unregistered")]


def test_a_process_that_was_registered_may_be_listed_for_a_moment_after_its_end(
    world: Callable[..., AuditWorld],
) -> None:
    """Many such moments do not add up either, as with programs that run for a second each."""
    made = world()
    one = made.add("one")
    made.owners = dict.fromkeys(range(1, 20), one)

    async def scene() -> None:
        for pid in range(1, 10):
            one.registered = {pid}
            await made.looks(ProcessMemory(pid, GIB), seconds=0.5)
            one.registered = set()
            await made.looks(ProcessMemory(pid, GIB), seconds=0.5)
        assert not one.findings.episodes
        await made.looks(ProcessMemory(9, GIB), seconds=2)

    assert kinds(made.play(scene())) == [("violation", "unregistered")]


@pytest.mark.parametrize(
    "honest",
    ["holds", "granted", "held", "small", "copies", "pending", "allocates", "frees", None],
)
def test_a_container_that_holds_the_gpu_or_reports_its_work_is_not_accused(
    world: Callable[..., AuditWorld], honest: str | None
) -> None:
    made = world()
    one = made.add("one")
    one.registered = {1}

    async def scene() -> None:
        for i in range(30):
            match honest:
                case "holds":
                    one.now.since_ns = 1
                case "granted":
                    one.now.grants = i
                case "held":
                    one.now.held_ns = i
                case "small":
                    one.lets_pass = Passing(1000 * i, 0, pending=False)
                case "copies":
                    one.lets_pass = Passing(i, i << 30, pending=False)
                case "pending":
                    one.lets_pass = Passing(0, 0, pending=True)
                case "allocates":
                    made.charge = Charge(memory=i)
                case "frees":
                    made.charge = Charge(memory=5, returned=i)
                case _:
                    one.lets_pass = Passing(i // 10, 0, pending=False)
            made.look(ProcessMemory(1, 0), samples=made.named())
            await asyncio.sleep(0.1)

    logs = made.play(scene())
    assert kinds(logs) == ([] if honest else [("violation", "compute")])
    if not honest:
        assert (logs[0]["found"], logs[0]["allowed"], logs[0]["pid"]) == ("99 %", "0 %", 1)


def test_utilisation_is_sampled_where_an_idle_container_has_memory(
    world: Callable[..., AuditWorld],
) -> None:
    made = world()
    one = made.add("one")
    one.registered = {1}
    wanted = []

    async def scene() -> None:
        for grants, memory in ((0, 0), (1, 5), (1, 5), (2, 5), (2, 0)):
            wanted.append(made.auditor.wants_samples(DEVICE))
            one.now.grants = grants
            made.look(ProcessMemory(1, memory))
            await asyncio.sleep(0.25)
        wanted.append(made.auditor.wants_samples(DEVICE))

    made.play(scene())
    # It was first idle, with memory, at the third sample.
    assert wanted == [False, False, False, True, False, False]
    assert not made.auditor.wants_samples(replace(DEVICE, uuid="GPU-1"))


def test_use_of_a_gpu_that_was_not_granted_is_shown_but_is_not_a_violation(
    world: Callable[..., AuditWorld],
) -> None:
    made = world(on_violation="stop")
    mine = made.add("mine")
    lost = made.add("lost", device=Device(1, "GPU-1", "another", 16 * GIB))
    lost.registered = {1}
    made.owners = {2: lost, 3: lost, 4: mine}

    def look(*processes: ProcessMemory) -> None:
        made.clock.now_ns += 10**9
        look = GpuSample(made.clock.now_ns, {one.pid: one.used or 0 for one in processes})
        charges = {cast("Container", mine): {cast("Any", object()): Charge()}}
        made.auditor.audit(DEVICE, look, processes, charges)

    async def scene() -> None:
        drawing = ProcessMemory(3, GIB, computes=False)
        for _ in range(3):
            look(ProcessMemory(1, GIB), ProcessMemory(2, 5), drawing, ProcessMemory(9, GIB))
        assert lost.findings.describe()["elsewhere"] == [
            {"gpu": "GPU-0", "index": 0, "pid": 1, "memory": GIB},
            {"gpu": "GPU-0", "index": 0, "pid": 2, "memory": 5},
        ]
        look(ProcessMemory(2, 7))
        assert [one["pid"] for one in lost.findings.describe_elsewhere()] == [2]
        look()
        assert lost.findings.describe()["elsewhere"] == []

    logs = made.play(scene())
    assert [(one["event"], one["container"], one["gpu"], one["pid"]) for one in logs] == [
        ("gpu-not-granted", "lost", 0, 1),
        ("gpu-not-granted", "lost", 0, 2),
    ]
    assert mine.findings.describe()["elsewhere"] == []
    assert (lost.killed, lost.findings.episodes) == (0, [])


def test_processes_on_another_gpu_fill_neither_the_log_nor_the_memory(
    world: Callable[..., AuditWorld],
) -> None:
    made = world()
    mine = made.add("mine")
    lost = made.add("lost", device=Device(1, "GPU-1", "another", 16 * GIB))

    async def scene() -> None:
        charges = {cast("Container", mine): {cast("Any", object()): Charge()}}
        for first in range(1, 10_000, 1000):
            processes = [ProcessMemory(first + i, 1) for i in range(100)]
            lost.registered = {one.pid for one in processes}
            made.clock.now_ns += 10**9
            made.auditor.audit(DEVICE, GpuSample(made.clock.now_ns, {}), processes, charges)
            assert len(lost.findings.elsewhere["GPU-0"][1]) == MAX_ELSEWHERE

    assert 0 < len(made.play(scene())) <= 2 * LINES


def test_stopping_kills_a_container_once(world: Callable[..., AuditWorld]) -> None:
    made = world(on_violation="stop")
    one = made.add("one")
    made.owners = {1: one}
    logs = made.play(made.looks(ProcessMemory(1, 0)))
    assert one.killed == 1
    assert made.tally.stops == 1
    assert [one["event"] for one in logs] == ["violation", "violation-stopped"]


def test_stopping_a_container_that_has_already_ended_is_logged_as_failed(
    world: Callable[..., AuditWorld],
) -> None:
    made = world(on_violation="stop")
    one = made.add("one")
    one.kill = lambda: (_ for _ in ()).throw(ProcessLookupError(3, "No such process"))  # type: ignore[method-assign,assignment]
    made.owners = {1: one}
    logs = made.play(made.looks(ProcessMemory(1, 0)))
    assert logs[-1]["event"] == "violation-stop-failed"
    assert made.tally.stops == 0


def test_a_container_is_frozen_and_thawed_without_samples(
    world: Callable[..., AuditWorld], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVML may fail permanently after the container has been frozen."""
    made = world(on_violation="throttle")
    one = made.add("one", pid=os.getpid())
    made.owners = {1: one}
    monkeypatch.setattr(cgroups, "open_group", lambda *_: made.group)

    async def scene() -> None:
        await made.looks(ProcessMemory(1, 0), seconds=0.9)
        assert made.group.did == ["freeze"]
        assert one.findings.frozen
        assert json.loads(made.group.record.read_text()) == {
            "frozen": [{"container": "one", "hierarchy": "", "cgroup": "/one"}]
        }
        await asyncio.sleep(1.5)
        assert made.group.did == ["freeze", "thaw"]
        assert not one.findings.frozen
        assert not made.group.record.exists()

    logs = made.play(scene())
    assert made.tally.throttles == 1
    assert [one["event"] for one in logs] == ["violation", "container-frozen", "container-thawed"]


def test_containers_that_share_a_claim_are_frozen_together_as_far_as_possible(
    world: Callable[..., AuditWorld], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = world(on_violation="throttle")
    one = made.add("one", pid=os.getpid())
    made.owners = {1: one}
    groups = {name: MadeGroup(made.group.record) for name in ("/one", "/two")}
    for name, group in groups.items():
        group.path = name
    one.membership = Membership({"": "/one"})
    one.others = [
        SimpleNamespace(
            identifier=name, pid=os.getpid(), membership=Membership({"": f"/{name}"}), has_ended=lambda: False
        )
        for name in ("two", "three")
    ]  # fmt: skip

    def open_group(membership: Membership, *_: object) -> MadeGroup:
        path = membership.cgroups[""]
        if path not in groups:
            raise CannotFreezeError("it is already frozen")
        return groups[path]

    monkeypatch.setattr(cgroups, "open_group", open_group)

    async def scene() -> None:
        await made.looks(ProcessMemory(1, 0), seconds=0.9)
        assert [group.did for group in groups.values()] == [["freeze"]] * 2
        record = json.loads(made.group.record.read_text())["frozen"]
        assert [entry["cgroup"] for entry in record] == ["/one", "/two"]
        await asyncio.sleep(1.5)
        assert [group.did for group in groups.values()] == [["freeze", "thaw"]] * 2
        assert not made.group.record.exists()

    logs = made.play(scene())
    assert made.tally.throttles == 1
    assert [one["cgroup"] for one in logs if one["event"] == "container-frozen"] == ["/one", "/two"]


def test_if_one_of_two_groups_cannot_be_frozen_neither_stays_frozen(
    world: Callable[..., AuditWorld], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Freezing the second group fails after the first one has been frozen."""
    made = world(on_violation="throttle")
    one = made.add("one", pid=os.getpid())
    made.owners = {1: one}
    groups = [MadeGroup(made.group.record), MadeGroup(made.group.record)]

    def fail() -> None:
        raise CannotFreezeError("control group /two: Permission denied")

    groups[1].freeze = fail  # type: ignore[method-assign]
    one.others = [
        SimpleNamespace(
            identifier="two", pid=os.getpid(), membership=Membership(), has_ended=lambda: False
        )
    ]
    left = iter(groups * 100)
    monkeypatch.setattr(cgroups, "open_group", lambda *_: next(left))
    logs = made.play(made.looks(ProcessMemory(1, 0), seconds=0.9))
    assert groups[0].did[:2] == ["freeze", "thaw"]
    assert groups[0].did.count("freeze") == groups[0].did.count("thaw")
    assert made.tally.throttles == 0
    assert not made.group.record.exists()
    assert "violation-throttle-failed" in [one["event"] for one in logs]


@pytest.mark.parametrize("how", ["stopping", "ended", "killed"])
def test_a_frozen_container_may_be_thawed_early(
    world: Callable[..., AuditWorld], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    made = world(on_violation="throttle")
    one = made.add("one", pid=os.getpid())
    made.owners = {1: one}
    monkeypatch.setattr(cgroups, "open_group", lambda *_: made.group)
    monkeypatch.setattr(audit, "next_freeze", lambda _: 3600.0)

    async def scene() -> None:
        await made.looks(ProcessMemory(1, 0), seconds=0.9)
        assert made.group.did == ["freeze"]
        match how:
            case "stopping":
                made.auditor.close()
            case "ended":
                del made.containers["one"]
                await asyncio.sleep(0.6)
            case _:
                pending = {"SigPnd": "0000000000000000", "ShdPnd": "0000000000000100"}
                monkeypatch.setattr(audit, "status_fields", lambda _: pending)
                await asyncio.sleep(0.6)
        assert made.group.did == ["freeze", "thaw"]
        assert not made.group.record.exists()

    assert made.play(scene())[-1] == {
        "event": "container-thawed", "container": "one", "why": how, "log_level": "info",
    }  # fmt: skip


def test_a_container_that_cannot_be_frozen_is_logged_once(
    world: Callable[..., AuditWorld], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = world(on_violation="throttle")
    one = made.add("one")
    made.owners = {1: one}

    def refuse(*_: object) -> None:
        raise CannotFreezeError("it has no control group of its own")

    monkeypatch.setattr(cgroups, "open_group", refuse)
    logs = made.play(made.looks(ProcessMemory(1, 0)))
    assert [one["event"] for one in logs] == ["violation", "violation-throttle-failed"]
    assert logs[1]["error"] == "it has no control group of its own"
    assert made.tally.throttles == 0
    assert not one.findings.frozen


def test_if_the_record_cannot_be_written_nothing_stays_frozen(
    world: Callable[..., AuditWorld], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = world(on_violation="throttle")
    one = made.add("one")
    made.owners = {1: one}
    monkeypatch.setattr(cgroups, "open_group", lambda *_: made.group)
    (made.group.record.with_suffix(".new")).mkdir()
    logs = made.play(made.looks(ProcessMemory(1, 0)))
    assert [one["event"] for one in logs] == ["violation", "violation-throttle-failed"]
    assert made.group.did == []


@pytest.mark.parametrize(
    "content",
    [
        "", "{", "[]", "{}", '{"frozen": 3}', '{"frozen": [3, null, {}]}',
        '{"frozen": [{"hierarchy": "", "cgroup": "/"}]}',
        '{"frozen": [{"hierarchy": "", "cgroup": "/../../etc"}]}',
        '{"frozen": [{"hierarchy": "cpu", "cgroup": "/x"}]}',
        '{"frozen": [{"hierarchy": "", "cgroup": "/tidegate-is-not-there"}]}', "\udcff",
        '{"frozen": [{"hierarchy": "", "cgroup": "/a\\u0000b"}]}',
        '{"frozen": [{"hierarchy": "", "cgroup": "/\\ud800"}]}',
        "[" * 100_000,
    ],
)  # fmt: skip
def test_a_governor_starts_whatever_its_record_contains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    (tmp_path / "frozen.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    AuditWorld(tmp_path, monkeypatch)
    assert not (tmp_path / "frozen.json").exists()


def test_containers_that_a_dead_governor_left_frozen_are_thawed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = tmp_path / "cgroup/pod/one"
    group.mkdir(parents=True)
    (group / "cgroup.freeze").write_text("1")
    monkeypatch.setattr(cgroups, "find_mounts", lambda: {cgroups.V2: tmp_path / "cgroup"})
    left = [
        {"container": "gone", "hierarchy": "", "cgroup": "/pod/gone"},
        {"container": "one", "hierarchy": "", "cgroup": "/pod/one"},
    ]
    (tmp_path / "frozen.json").write_text(json.dumps({"frozen": left}))
    with capture_logs() as logs:
        AuditWorld(tmp_path, monkeypatch)
    assert (group / "cgroup.freeze").read_text() == "0"
    assert [one["container"] for one in logs if one["event"] == "container-thawed"] == ["one"]


def refuse_to_thaw(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Make thawing fail as on a read-only /sys/fs/cgroup; return a function that undoes this."""
    real = os.open

    def refuse(path: Any, flags: int, *more: Any, **named: Any) -> int:
        if path == "cgroup.freeze" and flags & os.O_WRONLY:
            raise OSError(errno.EROFS, "Read-only file system")
        return real(path, flags, *more, **named)

    monkeypatch.setattr(cgroups.os, "open", refuse)
    return lambda: monkeypatch.setattr(cgroups.os, "open", real)


def test_a_container_that_cannot_be_thawed_is_not_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drop-in that allows freezing is removed with the policy after a governor was killed."""
    group = tmp_path / "cgroup/pod/one"
    group.mkdir(parents=True)
    (group / "cgroup.freeze").write_text("1")
    monkeypatch.setattr(cgroups, "find_mounts", lambda: {cgroups.V2: tmp_path / "cgroup"})
    monkeypatch.setattr(audit, "AGAIN_S", 0.0)
    record = tmp_path / "frozen.json"
    left = {"container": "one", "hierarchy": "", "cgroup": "/pod/one"}
    record.write_text(json.dumps({"frozen": [left]}))
    allow = refuse_to_thaw(monkeypatch)
    with capture_logs() as logs:
        made = AuditWorld(tmp_path, monkeypatch)
        made.look()
        made.look()
        assert json.loads(record.read_text()) == {"frozen": [left]}
        assert [one["event"] for one in logs] == ["container-stays-frozen"]
        allow()
        made.look()
    assert (group / "cgroup.freeze").read_text() == "0"
    assert not record.exists()


def test_a_thaw_that_fails_is_tried_again(
    world: Callable[..., AuditWorld], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    group = tmp_path / "cgroup/one"
    group.mkdir(parents=True)
    (group / "cgroup.freeze").write_text("0")
    mounts = {cgroups.V2: tmp_path / "cgroup"}
    monkeypatch.setattr(cgroups, "find_mounts", lambda: mounts)
    monkeypatch.setattr(cgroups, "open_group", lambda *_: cgroups.Group("", "/one", mounts))
    monkeypatch.setattr(audit, "AGAIN_S", 0.0)
    made = world(on_violation="throttle")
    one = made.add("one", pid=os.getpid())
    made.owners = {1: one}

    async def scene() -> None:
        await made.looks(ProcessMemory(1, 0), seconds=0.9)
        assert (group / "cgroup.freeze").read_text() == "1"
        allow = refuse_to_thaw(monkeypatch)
        await asyncio.sleep(1.3)
        assert (group / "cgroup.freeze").read_text() == "1"
        assert made.group.record.exists()
        allow()
        made.look()
        assert (group / "cgroup.freeze").read_text() == "0"
        assert not made.group.record.exists()

    made.play(scene())


def test_a_group_that_stays_frozen_after_another_could_not_be_frozen_is_thawed_later(
    world: Callable[..., AuditWorld], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first = tmp_path / "cgroup/one/cgroup.freeze"
    first.parent.mkdir(parents=True)
    first.write_text("0")
    mounts = {cgroups.V2: tmp_path / "cgroup"}
    monkeypatch.setattr(cgroups, "find_mounts", lambda: mounts)
    monkeypatch.setattr(audit, "AGAIN_S", 0.0)
    made = world(on_violation="throttle")
    one = made.add("one", pid=os.getpid())
    made.owners = {1: one}
    one.others = [
        SimpleNamespace(
            identifier="two", pid=os.getpid(), membership=Membership(), has_ended=lambda: False
        )
    ]
    allow: list[Callable[[], None]] = []

    def fail() -> None:
        allow.append(refuse_to_thaw(monkeypatch))
        raise CannotFreezeError("control group /two: Read-only file system")

    made.group.freeze = fail  # type: ignore[method-assign]
    groups = [cgroups.Group("", "/one", mounts), made.group]

    def open_group(*_: object) -> Any:
        if not groups:
            raise CannotFreezeError("it is already frozen")
        return groups.pop(0)

    monkeypatch.setattr(cgroups, "open_group", open_group)

    async def scene() -> None:
        await made.looks(ProcessMemory(1, 0), seconds=0.9)
        assert first.read_text() == "1"
        record = json.loads(made.group.record.read_text())["frozen"]
        assert [entry["cgroup"] for entry in record] == ["/one"]
        allow[0]()
        made.look()
        assert first.read_text() == "0"
        assert not made.group.record.exists()

    logs = made.play(scene())
    assert "container-stays-frozen" in [one["event"] for one in logs]


def test_a_violation_ends_with_its_container(world: Callable[..., AuditWorld]) -> None:
    made = world()
    one = made.add("one")
    made.owners = {1: one}

    async def scene() -> None:
        await made.looks(ProcessMemory(1, 0))
        del made.containers["one"]
        await made.looks(ProcessMemory(1, 0), seconds=0.2)

    logs = made.play(scene())
    assert kinds(logs) == [("violation", "unregistered"), ("violation-ended", "unregistered")]
    [episode] = one.findings.episodes
    assert episode.ended is not None


def test_a_container_does_not_inherit_findings_from_one_of_the_same_name(
    world: Callable[..., AuditWorld],
) -> None:
    made = world()
    first = made.add("one")
    made.owners = {1: first}

    async def scene() -> None:
        await made.looks(ProcessMemory(1, 0), seconds=0.4)
        second = made.add("one")
        made.owners = {1: second}
        await made.looks(ProcessMemory(1, 0), seconds=0.3)
        assert second.findings.episodes == first.findings.episodes
        await made.looks(ProcessMemory(1, 0), seconds=0.9)
        assert len(second.findings.episodes) == 1

    made.play(scene())


class Holds(Made):
    """A container with two GPUs, whose schedulers are steered or not."""

    def __init__(self) -> None:
        super().__init__("one")
        self.devices = (DEVICE, Device(1, "GPU-1", "made up", 16 * GIB))
        self.is_steered = True
        self.held: dict[int, set[int]] = {}

    def hold(self, i: int, pids: frozenset[int], owns: object) -> bool:  # noqa: ARG002
        self.held[i] = set(pids)
        return self.is_steered


@pytest.fixture
def limiting(tmp_path: Path) -> tuple[Auditor, Holds, _Watched]:
    config = replace(Config(), runtime_dir=str(tmp_path), on_violation="limit")
    container = Holds()
    return Auditor({}, Tally(), config), container, _Watched(container)  # type: ignore[arg-type]


def test_a_process_that_is_held_on_one_gpu_is_released_there(limiting: Any) -> None:
    auditor, container, watched = limiting
    auditor._limit(watched, 0, frozenset({5}))
    auditor._limit(watched, 1, frozenset())
    assert container.held == {0: {5}}
    auditor.configure(replace(Config(), on_violation="report"))
    auditor._limit(watched, 1, frozenset())
    auditor._limit(watched, 0, frozenset({5}))
    assert container.held == {0: set()}


def test_a_process_that_cannot_be_held_is_logged_once(
    limiting: Any,
) -> None:
    auditor, container, watched = limiting

    def n_said() -> int:
        with capture_logs() as logs:
            for _ in range(3):
                auditor._limit(watched, 0, frozenset({5}))
                auditor._limit(watched, 1, frozenset())
        return [line["event"] for line in logs].count("violation-limit-failed")

    assert n_said() == 0
    container.is_steered = False
    assert n_said() == 1
    assert n_said() == 0
