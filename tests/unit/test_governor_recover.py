"""Test the recovery by a starting governor: live processes, authentic ledgers, and what its
predecessor left behind.

The containers are processes that register as the control library does. The arbiter's thread is a
stub.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, cast

import pytest
from structlog.testing import capture_logs

from governor import cgroups, metrics, processes, recover
from governor.account import GpuSample
from governor.admissions import Pending
from governor.allocations import AllocationTable
from governor.arbiter import Runner, Stats, Waits
from governor.audit import Auditor
from governor.config import Config
from governor.container import Container, container_key
from governor.errors import StateError
from governor.pace import LINES
from governor.processes import (
    FileIdentity,
    Identity,
    cgroup_names,
    first_of,
    identify,
    mapped,
    open_process,
    start_time,
)
from governor.quota import Device, Quota
from governor.server import Server
from governor.shared_memory import MAPPED, find_ledger, make_ledger, memfd_device, open_grant
from governor.state import NAME, State
from libcontrol import layout, pages
from tests.conftest import lack
from vdriver.nvml import ProcessMemory, ProcessUse

GIB = 1 << 30
UUID = "GPU-00000000-0000-0000-0000-000000000001"
DEVICE = Device(0, UUID, "stub", 16 * GIB)
PATIENCE_S = 10.0

# Registers as a process's first cuInit does, maps the ledger, and follows commands.
PROCESS = """
import mmap, os, socket, struct, sys
def ask(byte):
    s = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    s.connect(sys.argv[1])
    s.settimeout(10)
    s.send(byte)
    data, fds, _, _ = socket.recv_fds(s, 4, 1)
    return s, struct.unpack("I", data)[0], fds
held = []
for line in sys.stdin:
    command, _, value = line.strip().partition(" ")
    if command in ("register", "again"):
        s, slot, fds = ask(b"r" if command == "register" else b"a")
        held.append(s)
        inode = os.fstat(fds[0]).st_ino if fds else 0
        if command == "register" and fds:
            ledger = mmap.mmap(fds[0], 0)
            at = 4096 + slot * 8192
            ledger[at + 4:at + 8] = struct.pack("I", os.getpid())
        for fd in fds:
            os.close(fd)
        print(slot, inode, flush=True)
    elif command == "charge":  # memory is the ninth field of the device's part
        at = 4096 + slot * 8192 + 128 + 48
        ledger[at:at + 8] = struct.pack("Q", int(value))
        print("charged", flush=True)
    elif command == "become":
        os.execv(sys.executable, [sys.executable, "-c", value, sys.argv[1]])
"""


class IdleRunner:
    """An arbiter's thread that does nothing."""

    together = None
    is_steered = False
    not_steered = ""

    def __init__(self) -> None:
        self.adopted: list[object] = []

    def add(self, *_: object, **more: object) -> int:
        self.adopted.append(more["is_adopted"])
        return 0

    def enter(self, *_: object) -> None: ...

    def leave(self, *_: object) -> None: ...

    def remove(self, tenant: int) -> None: ...

    def set(self, *_: object, **__: object) -> None: ...

    def watch(self, *_: object) -> None: ...

    def stats(self, _: int) -> Stats:
        return Stats()

    def waits(self, _: int) -> Waits:
        return Waits()


class Child:
    """A process of a container."""

    def __init__(self, path: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(path)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.pid = self.process.pid

    async def ask(self, line: str) -> str:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return (await asyncio.to_thread(self.process.stdout.readline)).strip()

    async def numbers(self, line: str) -> tuple[int, ...]:
        return tuple(map(int, (await self.ask(line)).split()))

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


class RecoveryWorld:
    """Successive governors on the same directories."""

    def __init__(self, directory: Path) -> None:
        self.config = Config(runtime_dir=str(directory / "run"), state_dir=str(directory / "state"))
        self.containers_dir = directory / "run" / "containers"
        self.containers_dir.mkdir(parents=True)
        self.children: list[Child] = []
        self.runner = IdleRunner()
        self.state = State(directory / "state" / NAME)
        self.server = cast("Server", None)
        self.devices = [DEVICE]

    async def start(self) -> None:
        self.state = State(Path(self.config.state_dir) / NAME)
        self.state.load()
        allocations = AllocationTable(self.devices, self.config)
        runners = {device.uuid: cast("Runner", self.runner) for device in self.devices}
        self.server = Server(self.config, allocations, runners, self.state)
        await self.server.adopt()

    async def stop(self) -> None:
        self.server.close()
        self.state.close()

    async def restart(self) -> None:
        await self.stop()
        await self.start()

    def child(self, container: Container) -> Child:
        child = Child(container.directory / "governor.sock")
        self.children.append(child)
        return child

    async def admit(
        self, name: str = "one", *, confirm: bool = True, first: Child | None = None
    ) -> Container:
        """Admit a container with an idle child as its first process."""
        if first is None:
            first = Child(Path("/"))
            self.children.append(first)
        request = {
            "id": name, "pid": first.pid, "bundle": f"/bundles/{name}", "identity": {"pod": f"pod-{name}"},
            "annotations": {"tidegate.gpu/memory": "4Gi", "tidegate.gpu/compute": "30"},
        }  # fmt: skip
        pending: list[Pending] = []
        await self.server.admissions.admit(request, [os.pidfd_open(first.pid)], pending)
        if confirm:
            self.server.admissions.confirm(pending)
        return pending[0][0]

    def first(self, container: Container) -> Child:
        return next(child for child in self.children if child.pid == container.pid)

    def one(self, name: str = "one") -> Container:
        return self.server.containers[container_key(name)]

    def close(self) -> None:
        for container in list(self.server.containers.values()):
            container.close()
        self.state.close()
        for child in self.children:
            child.kill()


Play = Callable[[Callable[[RecoveryWorld], Awaitable[None]]], None]


@pytest.fixture
def play() -> Iterator[Play]:
    """Run a coroutine function with a separate world, with short paths for its sockets."""
    directory = Path(tempfile.mkdtemp())

    def run(scene: Callable[[RecoveryWorld], Awaitable[None]]) -> None:
        async def whole() -> None:
            world = RecoveryWorld(directory)
            try:
                await world.start()
                await asyncio.wait_for(scene(world), 60)
            finally:
                world.close()

        asyncio.run(whole())

    yield run
    shutil.rmtree(directory)


async def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


def charged(container: Container) -> list[int]:
    return [
        pages.read(container.ledger, layout.ledger_device(slot, 0), "ledger_device", "memory")
        for slot in range(4)
    ]


# ---- a governor and its successor ----


def test_processes_keep_their_slots_and_their_charges(play: Play) -> None:
    async def scene(world: RecoveryWorld) -> None:
        container = await world.admit()
        a, b, c = (world.child(container) for _ in range(3))
        assert [(await child.numbers("register"))[0] for child in (a, b, c)] == [0, 1, 2]
        for child, amount in ((a, 100), (b, 200), (c, 300)):
            await child.ask(f"charge {amount}")
        inode = os.fstat(container.ledger_fd).st_ino
        pages.write(container.ledger, pages.slot_base(3), "ledger_slot", "state", 1)  # nonsense
        await world.stop()
        b.kill()
        await world.start()
        again = world.one()
        assert again is not container
        assert again.pids() == {a.pid, c.pid}
        assert charged(again) == [100, 0, 300, 0]
        assert pages.device_sums(again.ledger, ["memory"], 0)["memory"] == 400
        assert (again.quota, again.confirmed) == (Quota(4 * GIB, 30, 30), True)
        assert world.server._allocations._gpus[0].memory_used == 4 * GIB
        # The processes return to their slots, and a new one gets a free slot.
        assert await a.numbers("again") == (0, inode)
        assert await c.numbers("again") == (2, inode)
        assert await world.child(again).numbers("register") == (1, inode)
        # A process that connects twice still gets only one slot.
        assert (await a.numbers("again"))[0] == layout.NO_SLOT

    play(scene)


def test_a_process_that_was_not_registered_cannot_return(play: Play) -> None:
    async def scene(world: RecoveryWorld) -> None:
        container = await world.admit()
        stranger = world.child(container)
        assert await stranger.numbers("again") == (layout.NO_SLOT, 0)
        assert container.pids() == frozenset()

    play(scene)


def test_a_process_that_executed_another_program_is_new(play: Play) -> None:
    async def scene(world: RecoveryWorld) -> None:
        container = await world.admit()
        child = world.child(container)
        await child.numbers("register")
        await child.ask("charge 100")
        await world.stop()
        assert child.process.stdin
        child.process.stdin.write("become " + repr(PROCESS)[1:-1].join(["exec('", "')"]) + "\n")
        child.process.stdin.flush()
        await world.start()
        assert world.one().pids() == {child.pid}
        slot, _ = await child.numbers("register")
        assert world.one().pids() == {child.pid}
        assert charged(world.one()) == [0, 0, 0, 0]
        assert slot == 0

    play(scene)


@pytest.fixture
def groups() -> Iterator[Callable[[str, int], None]]:
    """Put a process into a control group below a new one with the name docker-one.scope."""
    mounts = cgroups.find_mounts()
    hierarchy = next((one for one in (cgroups.FREEZER, cgroups.V2) if one in mounts), None)
    if os.geteuid() != 0 or hierarchy is None:
        lack("needs root and control groups")
    own = cgroups.read_cgroups("self").get(hierarchy, "/").strip("/")
    top = mounts[hierarchy] / own / f"tidegate-test-{os.getpid()}" / "docker-one.scope"
    made: list[Path] = []

    def enter(inner: str, pid: int) -> None:
        path = top / inner
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            lack(f"needs a control group: {e.strerror}")
        made.append(path)
        (path / "cgroup.procs").write_text(str(pid))

    yield enter
    deadline = time.monotonic() + PATIENCE_S
    for path in sorted({*made, top, top.parent}, reverse=True):
        while path.exists():
            with contextlib.suppress(OSError):
                path.rmdir()
            assert time.monotonic() < deadline, path


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "not kept"])
def test_membership_does_not_change_when_the_first_process_moves(
    play: Play, groups: Callable[[str, int], None], *, kept: bool
) -> None:
    """The first process may move to a group below its own, as systemd does, before or after any process registers."""

    async def scene(world: RecoveryWorld) -> None:
        first = Child(Path("/"))
        world.children.append(first)
        groups("", first.pid)
        container = await world.admit(first=first)
        own = container.members[0].membership
        groups("init.scope", first.pid)
        child = world.child(container)
        groups("system.slice", child.pid)
        assert await child.numbers("register") == (0, os.fstat(container.ledger_fd).st_ino)
        await world.stop()
        if not kept:  # not kept by the previous governor
            state = State(Path(world.config.state_dir) / NAME)
            state.load()
            state.put(replace(state.containers[container.key], membership=None))
            state.close()
        await world.start()
        again = world.one()
        assert again.members[0].membership == own
        assert world.state.containers[again.key].membership == own
        # `executed` is in the container's group, as after the engine's exec; `outer` is outside of
        # it; `other` is in another container's group.
        executed, outer, other = (world.child(again) for _ in range(3))
        groups("", executed.pid)
        groups("../docker-two.scope", other.pid)
        assert (await executed.numbers("register"))[0] == 1
        assert (await outer.numbers("register"))[0] == layout.NO_SLOT
        assert (await other.numbers("register"))[0] == layout.NO_SLOT

    play(scene)


def test_a_container_without_its_own_control_group_is_logged(
    play: Play, groups: Callable[[str, int], None]
) -> None:
    async def scene(world: RecoveryWorld) -> None:
        with capture_logs() as logs:
            container = await world.admit()
            other = Child(Path("/"))
            world.children.append(other)
            groups("", other.pid)
            await world.admit("two", first=other)
            await world.restart()
        said = [one for one in logs if one["event"] == "membership-unknown"]
        assert [(one["container"], one["log_level"]) for one in said] == [("one", "warning")] * 2
        told = {one.identifier: one.describe()[0] for one in world.server.containers.values()}
        assert {name: one["control_group"] for name, one in told.items()} == {
            "one": False, "two": True
        }  # fmt: skip
        # In this case no process is refused.
        assert (await world.child(container).numbers("register"))[0] == 0

    play(scene)


def test_foreign_processes_do_not_keep_the_containers_own_processes_out(
    play: Play, groups: Callable[[str, int], None]
) -> None:
    async def scene(world: RecoveryWorld) -> None:
        first = Child(Path("/"))
        world.children.append(first)
        groups("", first.pid)
        container = await world.admit(first=first)
        child = world.child(container)
        groups("", child.pid)
        path = str(container.directory / "governor.sock")

        def knock(byte: bytes) -> bytes:
            with socket.socket(socket.AF_UNIX) as s:
                s.connect(path)
                s.settimeout(PATIENCE_S)
                s.send(byte)
                return s.recv(4)

        begun = time.monotonic()
        with contextlib.ExitStack() as stack, capture_logs() as logs:
            for byte in (layout.REGISTER, layout.AGAIN) * 200:  # the burst and more
                answer = await asyncio.to_thread(knock, byte)
                assert answer == layout.NO_SLOT.to_bytes(4, "little")
            lines = [one for one in logs if one["event"] == "process-refused"]
            assert 1 <= len(lines) <= LINES + 1 + (time.monotonic() - begun)
            for _ in range(200):
                silent = stack.enter_context(socket.socket(socket.AF_UNIX))
                await asyncio.to_thread(silent.connect, path)
            assert (await child.numbers("register"))[0] == 0
            assert (await child.numbers("again"))[0] == layout.NO_SLOT  # it is already registered

    play(scene)


def test_a_container_that_ended_while_no_governor_ran_is_removed(play: Play) -> None:
    async def scene(world: RecoveryWorld) -> None:
        container = await world.admit()
        stays = await world.admit("two")
        await world.stop()
        world.first(container).kill()
        await world.start()
        assert set(world.server.containers) == {stays.key}
        assert [path.name for path in world.containers_dir.iterdir()] == [stays.key]
        assert world.state.containers.keys() == {stays.key}
        assert world.server._allocations._gpus[0].memory_used == 4 * GIB

    play(scene)


def test_an_unconfirmed_container_is_removed(play: Play) -> None:
    async def scene(world: RecoveryWorld) -> None:
        container = await world.admit(confirm=False)
        assert world.state.containers[container.key].confirmed is False
        row = world.state.containers[container.key]
        await world.stop()
        # Both the row and the directory exist, as after a kill.
        container.directory.mkdir()
        state = State(Path(world.config.state_dir) / NAME)
        state.load()
        state.put(row)
        state.close()
        await world.start()
        assert world.server.containers == {}
        assert list(world.containers_dir.iterdir()) == []
        assert world.state.containers == {}

    play(scene)


def test_the_pages_quota_takes_precedence(play: Play) -> None:
    async def scene(world: RecoveryWorld) -> None:
        container = await world.admit()
        await world.server.admissions.set(
            {"id": "one", "memory": 5 * GIB, "compute": 20, "compute_limit": 70}
        )
        quota = Quota(5 * GIB, 20, 70)
        assert world.state.containers[container.key].quota == quota
        await world.server.admissions.set({"id": "one", "class": "latency"})
        quota = Quota(5 * GIB, 20, 70, "latency")
        assert world.state.containers[container.key].quota == quota
        await world.restart()
        assert world.one().quota == quota
        # This is the state after a kill between the writes of the database and the page. No answer
        # was sent, so the page's quota is just as valid.
        world.state.put(replace(world.one().row, quota=Quota(6 * GIB, 1, 1)))
        await world.restart()
        assert world.one().quota == quota
        assert world.state.containers[container.key].quota == quota
        assert world.server._allocations._gpus[0].compute_used == 20

    play(scene)


def test_the_scheduler_knows_which_containers_an_earlier_governor_admitted(play: Play) -> None:
    """The earlier governor may have set their slices."""

    async def scene(world: RecoveryWorld) -> None:
        await world.admit()
        await world.restart()
        await world.admit("two")
        assert world.runner.adopted == [False, True, False]

    play(scene)


def test_the_pages_memory_holds_until_the_first_sample(play: Play) -> None:
    async def scene(world: RecoveryWorld) -> None:
        container = await world.admit()
        a, b = world.child(container), world.child(container)
        await a.numbers("register")
        await b.numbers("register")
        now = time.monotonic_ns()
        container.account.reconcile(
            0, container.account.charges(0), GpuSample(now, {a.pid: 500, b.pid: 70})
        )
        base = layout.grant_device(0)

        def overhead() -> int:
            return pages.read(world.one().grant, base, "grant_device", "memory_overhead")

        assert overhead() == 570
        await world.restart()
        assert overhead() == 570
        b.kill()
        await until(lambda: world.one().pids() == {a.pid})
        assert overhead() == 570  # not reconciled yet
        world.one().account.reconcile(0, world.one().account.charges(0), None)  # NVML fails
        assert overhead() == 570
        again = world.one()
        again.account.reconcile(
            0, again.account.charges(0), GpuSample(time.monotonic_ns(), {a.pid: 500})
        )
        assert overhead() == 500

    play(scene)


def remove(page: Path) -> None:
    page.unlink()


def cut(page: Path) -> None:
    page.write_bytes(page.read_bytes()[:-1])


def blank(page: Path) -> None:
    page.write_bytes(bytes(layout.GRANT_FILE_SIZE))


def other_gpu(page: Path) -> None:
    content = bytearray(page.read_bytes())
    content[layout.grant_device(0)] ^= 1
    page.write_bytes(content)


def fifo(page: Path) -> None:
    page.unlink()
    os.mkfifo(page)


def link(page: Path) -> None:
    page.rename(page.with_name("elsewhere"))
    page.symlink_to("elsewhere")


def everybodys(page: Path) -> None:
    page.chmod(0o666)


@pytest.mark.parametrize("damage", [remove, cut, blank, other_gpu, fifo, link, everybodys])
def test_a_damaged_grant_page_is_logged_and_replaced(play, capfd, damage) -> None:
    async def scene(world: RecoveryWorld) -> None:
        container = await world.admit()
        child = world.child(container)
        await child.numbers("register")
        await world.stop()
        damage(container.directory / "grant")
        await world.start()
        again = world.one()
        assert again.quota == container.quota  # as in the database
        assert again.pids() == {child.pid}
        page = open_grant(again.directory / "grant")
        assert pages.read(page, layout.grant_device(0), "grant_device", "memory_limit") == 4 * GIB
        page.close()
        said = capfd.readouterr().out
        assert "grant-damaged" in said
        assert ("users other than its owner may write to it" in said) == (damage is everybodys)

    play(scene)


def open_kinds() -> list[str]:
    """Return the kinds of this process's descriptors of processes and of memory."""
    gc.collect()  # each memory map of an earlier test that is not collected yet has a descriptor
    links = [str(one.readlink()) for one in Path("/proc/self/fd").iterdir() if one.is_symlink()]
    return sorted(kind for link in links for kind in ("pidfd", "memfd") if kind in link)


def test_a_missing_gpu_affects_only_its_own_container(play, capfd) -> None:
    async def scene(world: RecoveryWorld) -> None:
        container = await world.admit()
        await world.child(container).ask("register")
        await world.stop()
        before = open_kinds()
        world.devices = [replace(DEVICE, uuid=UUID[:-1] + "2")]
        await world.start()
        assert world.server.containers == {}
        assert open_kinds() == before
        assert "container-not-adopted" in capfd.readouterr().out
        assert container.directory.exists()
        await world.stop()
        world.devices = [DEVICE]
        await world.start()
        assert world.one().quota == container.quota

    play(scene)


def test_a_container_whose_search_fails_leaves_no_descriptors(play, capfd, monkeypatch) -> None:
    async def scene(world: RecoveryWorld) -> None:
        container = await world.admit()
        await world.child(container).ask("register")
        await world.stop()
        before = open_kinds()

        def fail(*_: object) -> NoReturn:
            raise OSError(errno.EMFILE, "Too many open files")

        with monkeypatch.context() as patch:
            patch.setattr(recover, "find_ledger", fail)
            await world.start()
        assert world.server.containers == {}
        assert "container-not-adopted" in capfd.readouterr().out
        assert open_kinds() == before

    play(scene)


def test_directories_that_are_not_mounted_are_removed(play: Play) -> None:
    async def scene(world: RecoveryWorld) -> None:
        container = await world.admit()
        await world.stop()
        for name in ("0123456789abcdef", "not-ours"):
            (world.containers_dir / name).mkdir()
        await world.start()
        assert {path.name for path in world.containers_dir.iterdir()} == {container.key, "not-ours"}

    play(scene)


def test_a_container_whose_socket_cannot_be_made_still_ends(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    async def scene(world: RecoveryWorld) -> None:
        container = await world.admit()
        child = world.child(container)
        await child.numbers("register")
        await world.stop()
        monkeypatch.setattr("governor.slots.Listener", fail)
        await world.start()
        assert world.one().pids() == {child.pid}
        world.first(container).kill()
        await until(lambda: not world.server.containers)
        assert not container.directory.exists()

    play(scene)


def test_a_directory_stays_if_processes_cannot_be_examined(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process may have the directory mounted."""

    def refuse(_: str) -> str:
        raise PermissionError

    async def scene(world: RecoveryWorld) -> None:
        await world.stop()
        left = world.containers_dir / "0123456789abcdef"
        left.mkdir()
        namespace = processes._mount_namespace
        monkeypatch.setattr(
            processes, "_mount_namespace", lambda pid: (namespace if pid == "self" else refuse)(pid)
        )
        await world.start()
        assert left.exists()
        monkeypatch.undo()
        await world.restart()
        assert not left.exists()

    play(scene)


def test_an_unwritable_disk_refuses_only_new_containers(play: Play) -> None:
    async def scene(world: RecoveryWorld) -> None:
        container = await world.admit()
        quota = container.quota
        assert world.state._db is not None
        world.state._db.execute("PRAGMA query_only = ON")
        with pytest.raises(StateError, match="cannot be written: attempt to write a readonly"):
            await world.admit("new")
        with pytest.raises(StateError):
            await world.server.admissions.set({"id": "one", "compute": 20})
        assert {path.name for path in world.containers_dir.iterdir()} == {container.key}
        assert container.quota == quota
        assert world.server._allocations._gpus[0].quotas == {container.key: quota}
        child = world.child(container)
        assert (await child.numbers("register"))[0] == 0
        world.state._db.execute("PRAGMA query_only = OFF")
        world.state.retry()
        await world.restart()
        assert world.one().pids() == {child.pid}
        await world.admit("new")

    play(scene)


# ---- which ledger is a container's ----

# Maps a file of the kind that its first argument names, under the ledger's name.
FAKER = """
import fcntl, mmap, os, sys
how, size = sys.argv[1], int(sys.argv[2])
name = "tidegate-ledger"
if how == "file":
    path = sys.argv[3] + "/memfd:tidegate-ledger (deleted)"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
else:
    fd = os.memfd_create(name, os.MFD_ALLOW_SEALING)
os.ftruncate(fd, {"short": 4096, "long": 2 * size}.get(how, size))
if how in ("sealed", "short", "long"):
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, 7)
if how == "given":
    fd = int(sys.argv[3])
pages = mmap.mmap(fd, 4096)
if how != "given":
    pages[:16] = b"TDGLEDGR" + (1).to_bytes(4, "little") + size.to_bytes(4, "little")
print(os.fstat(fd).st_ino, flush=True)
for line in sys.stdin:
    os.ftruncate(fd, 0)  # a process that reads it now gets a SIGBUS
    print("shrunk", flush=True)
"""


@contextlib.contextmanager
def faker(how: str, *more: str, fds: tuple[int, ...] = ()) -> Iterator[tuple[Identity, int]]:
    process = subprocess.Popen(
        [sys.executable, "-c", FAKER, how, str(layout.LEDGER_SIZE), *more],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=fds,
    )  # fmt: skip
    try:
        assert process.stdout
        inode = int(process.stdout.readline())
        yield Identity(process.pid, start_time(process.pid) or 0), inode
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("how", ["short", "long", "unsealed", "file"])
@pytest.mark.parametrize("is_known", [True, False])
def test_a_false_ledger_is_not_taken(tmp_path: Path, how: str, *, is_known: bool) -> None:
    with faker(how, str(tmp_path)) as (process, inode):
        file = FileIdentity(memfd_device(), inode) if is_known else None
        assert find_ledger([process], file, set()) is None


def test_a_ledger_of_another_container_is_not_taken() -> None:
    """A process received a descriptor of the other container's ledger."""
    theirs, ours = make_ledger(), make_ledger()
    os.set_inheritable(theirs.fd, True)
    with faker("given", str(theirs.fd), fds=(theirs.fd,)) as (process, inode):
        assert inode == theirs.file.inode
        assert find_ledger([process], ours.file, set()) is None
        assert find_ledger([process], None, {theirs.file}) is None
        found = find_ledger([process], theirs.file, set())
        assert found is not None
        found.page[100:108] = b"the same"
        assert theirs.page[100:108] == b"the same"


def test_a_sealed_memfd_is_taken_only_if_the_ledger_is_unknown() -> None:
    with faker("sealed") as (process, inode):
        device = memfd_device()
        assert find_ledger([process], FileIdentity(device, inode + 1), set()) is None
        found = find_ledger([process], None, set())
        assert found is not None
        assert found.file == FileIdentity(device, inode)
        later = process._replace(start=process.start + 1)  # as if the pid had been reused
        assert find_ledger([later], None, set()) is None


def test_nothing_is_opened_that_is_not_a_memfd(tmp_path: Path) -> None:
    """Opening a device may have an effect, so the file system is checked first."""
    with faker("file", str(tmp_path)) as (process, _):
        name = f"{tmp_path}/memfd:tidegate-ledger (deleted)"
        assert len(list(mapped(process.pid, name, tmp_path.stat().st_dev))) == 1
        assert list(mapped(process.pid, MAPPED, memfd_device())) == []
        assert list(mapped(process.pid, name, memfd_device())) == []


def test_a_governor_survives_any_mapping_of_a_container(play: Play) -> None:
    async def scene(world: RecoveryWorld) -> None:
        container = await world.admit()
        child = world.child(container)
        _, inode = await child.numbers("register")
        await child.ask("charge 100")
        container.ledger[:16] = bytes(16)  # any process that maps it may overwrite its header
        await world.restart()
        assert os.fstat(world.one().ledger_fd).st_ino == inode
        assert charged(world.one())[0] == 100
        await world.stop()
        with faker("short"), faker("unsealed"):
            child.kill()  # no process has the ledger open any more
            await world.start()
        assert os.fstat(world.one().ledger_fd).st_ino != inode
        assert (await world.child(world.one()).numbers("register"))[0] == 0

    play(scene)


# ---- processes ----


def test_a_process_is_identified_by_its_start_time() -> None:
    process = subprocess.Popen(["sleep", "60"])
    try:
        start = start_time(process.pid)
        assert start
        pidfd = open_process(Identity(process.pid, start))
        assert pidfd is not None
        assert identify(pidfd) == Identity(process.pid, start)
        assert open_process(Identity(process.pid, start + 1)) is None
    finally:
        process.kill()
        process.wait()
    assert open_process(Identity(process.pid, start)) is None
    assert identify(pidfd).pid == 0
    os.close(pidfd)
    assert open_process(Identity(0, 0)) is None
    assert start_time(process.pid) is None


def test_a_name_with_brackets_does_not_affect_the_start_time() -> None:
    rename = (
        "import ctypes, sys; ctypes.CDLL(None).prctl(15, b') R 1 (2 3', 0, 0, 0); print(); input()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", rename], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        before = start_time(process.pid)
        assert process.stdout
        process.stdout.readline()
        assert b") R 1 (2 3" in Path(f"/proc/{process.pid}/stat").read_bytes()
        assert start_time(process.pid) == before
    finally:
        process.kill()
        process.communicate()


def test_too_many_open_files_is_not_taken_for_an_ended_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "pidfd_open", fail)
    with pytest.raises(OSError, match="Too many"):
        open_process(Identity(os.getpid(), start_time(os.getpid()) or 0))


def test_a_process_is_not_taken_for_ended_when_the_pidfd_is_the_last_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process = Identity(os.getpid(), start_time(os.getpid()) or 0)
    pidfd = os.dup(0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pidfd_open", lambda _: pidfd)
        patch.setattr(Path, "read_bytes", refuse)
        with pytest.raises(OSError, match="Too many"):
            open_process(process)
        assert start_time(process.pid) is None
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(pidfd)


def test_a_search_that_runs_out_of_files_is_not_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the directory of a running container would be removed."""
    monkeypatch.setattr(processes, "_mount_namespace", lambda pid: pid)
    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert processes.mounted_below("containers", 0) == processes.Mounted({}, is_whole=False)


def refuse(_: Path) -> bytes:
    raise OSError(errno.EMFILE, "Too many open files")


CGROUPS = [
    ("0::/system.slice/docker-{}.scope", "docker"),
    ("0::/machine.slice/libpod-{}.scope/container", "podman"),
    ("0::/kubepods.slice/kubepods-pod12_34.slice/crio-{}.scope", "crio"),
    ("0::/kubepods.slice/kubepods-pod12_34.slice/cri-containerd-{}.scope", "containerd"),
    ("0::/kubepods/besteffort/pod1/kubepods-besteffort:cri-containerd:{}", "containerd, cgroupfs"),
    ("4:memory:/{}\n0::/", "runc"),
    ("9:name=systemd:/user.slice/user-0.slice/{}", "runc, systemd"),
]


@pytest.mark.parametrize("text", [text for text, _ in CGROUPS], ids=[e for _, e in CGROUPS])
@pytest.mark.parametrize("identifier", ["0f" * 32, "my-container.v2"])
def test_an_id_is_found_in_a_cgroups_name(monkeypatch, text, identifier) -> None:
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: text.format(identifier) + "\n")
    assert identifier in list(cgroup_names(1))


def test_a_container_may_give_its_control_groups_any_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The container's first process is in a group that it created itself, and the container must
    still be adopted.
    """
    text = b"0::/system.slice/docker-one.scope/\xff\xfe\n".decode(errors="surrogateescape")
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: text)
    keys = [container_key(name) for name in cgroup_names(1)]
    assert container_key("one") in keys


def test_the_first_process_is_the_oldest_whose_parent_is_outside() -> None:
    script = "import subprocess; subprocess.Popen(['sleep', '60']); print(1, flush=True); input()"
    parent = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert parent.stdout
        parent.stdout.readline()
        child = int(Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text())
        late = subprocess.Popen(["sleep", "60"])
        try:
            known = [Identity(pid, start_time(pid) or 0) for pid in (late.pid, child, parent.pid)]
            assert first_of(known).pid == parent.pid
            assert first_of(known[:2]).pid == child  # it is older
        finally:
            late.kill()
            late.wait()
            os.kill(child, signal.SIGKILL)
    finally:
        parent.kill()
        parent.communicate()


def test_no_content_of_a_ledger_ends_the_governor(play: Play) -> None:
    """Whatever a ledger contains, samples, audits, listings and scrapes continue."""
    draw = random.Random(7)  # noqa: S311
    whole = [b"\xff" * layout.LEDGER_SIZE, bytes(layout.LEDGER_SIZE)]
    numbers = [0, 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1]

    async def scene(world: RecoveryWorld) -> None:
        container = await world.admit()
        children = [world.child(container) for _ in range(3)]
        for child in children:
            await child.numbers("register")
        auditor = Auditor(world.server.containers, world.server.tally, world.config)
        for round_ in range(120):
            before = container.account.charges(0)
            if round_ < len(whole):
                container.ledger[:] = whole[round_]
            else:
                for at in range(0, layout.LEDGER_SIZE // 8, 8):
                    number = draw.choice([*numbers, time.monotonic_ns(), draw.getrandbits(64)])
                    container.ledger[at : at + 8] = number.to_bytes(8, "little")
            seen = {child.pid: draw.choice([0, 1 << 30, 2**63]) for child in children}
            found = [ProcessMemory(pid, used) for pid, used in seen.items()]
            uses = tuple(
                ProcessUse(pid, draw.choice([0, time.time_ns() // 1000]), draw.getrandbits(8))
                for pid in seen
            )
            look = GpuSample(time.monotonic_ns(), seen, uses)
            container.account.reconcile(0, before, look if draw.random() < 0.9 else None)
            auditor._audited_ns.clear()
            auditor.audit(DEVICE, look, found, {container: before})
            json.dumps(container.describe())
            assert metrics.collect(world.server)
        auditor.close()
        assert world.one().pids() == {child.pid for child in children}

    play(scene)
