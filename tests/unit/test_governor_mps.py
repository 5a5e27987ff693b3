"""Test how the governor runs NVIDIA's MPS daemon: parsing of its logs, permission to command it, and its end.

The log lines are those of driver 550's programs. Where the driver packages of
test_vdriver_debian.py have been downloaded, the daemon is NVIDIA's own: it needs no GPU until a
client connects.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import shutil
import signal
import socket
import struct
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from governor import mps
from governor.config import Config
from governor.errors import GovernorError
from governor.mps import (
    DIRECTORY,
    LOG_LIMIT,
    PROGRAM,
    Follower,
    Mps,
    MpsEvent,
    Tools,
    find_tools,
    read_line,
)
from governor.quota import Device
from tests.conftest import lack
from vdriver.manifest import Manifest, ManifestFile

ROOT = Path(__file__).resolve().parents[2]
DEVICE = Device(0, "GPU-00000000-0000-0000-0000-000000000001", "simulated", 16 << 30)
CONTROL = "[2026-11-22 02:53:36.999 Control  6701] "
SERVER = "[2026-11-22 02:53:36.999 Server  6901] "


@pytest.mark.parametrize(
    ("line", "event"),
    [
        (SERVER + "Client process 4711 encountered a fatal GPU error.", ("fault", 4711)),
        (SERVER + "Server is handling a fatal GPU error.", ("fault", None)),
        (CONTROL + "Server encountered a fatal exception. Shutting down", ("fault", None)),
        (CONTROL + "Server 6781 exited with status 1", ("server-ended", None)),
        (CONTROL + "NEW SERVER 6781: Ready", ("server-started", None)),
        (CONTROL + "NEW CLIENT 8 from user 0: Server already exists", ("client", 8)),
        (CONTROL + "NEW CLIENT 8 from user 1000: Server is not ready, push client to pending list", ("client", 8)),
        (SERVER + "Failed to accept new client. Maximum number of clients (60) reached.", ("refused", None)),
        (SERVER + "Teardown in progress, client creation denied", ("refused", None)),
        (SERVER + "Creating server context on device 0 (NVIDIA H200)", ("server-started", None)),
        (CONTROL + "Cmd:shutdown_server 12889 -f", ("command", None)),
    ],
)  # fmt: skip
def test_events_are_read_from_lines_of_the_logs(line: str, event: tuple[str, int | None]) -> None:
    found = read_line(line)
    assert found is not None
    assert (found.kind, found.pid) == event


@pytest.mark.parametrize(
    "line",
    [
        "", "[", CONTROL, CONTROL + "Accepting connection...", CONTROL + "NEW UI", CONTROL + "UI closed",
        # A client chooses the text of a command, which may contain line breaks.
        "Client process 4711 encountered a fatal GPU error.",
        CONTROL + 'Unknown command "Client process 1 encountered a fatal GPU error."',
        "\x00\xff", "x" * 100_000,
    ],
)  # fmt: skip
def test_other_lines_yield_no_event(line: str) -> None:
    assert read_line(line) is None


def test_lines_are_returned_once_and_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log"
    path.write_text("of the one before\n")
    follower = Follower(path)
    assert follower.lines() == []
    with path.open("a") as file:
        file.write("one\ntwo\nthr")
    assert follower.lines() == ["one", "two"]
    with path.open("a") as file:
        file.write("ee\n")
    assert follower.lines() == ["three"]
    monkeypatch.setattr(mps, "LOG_LIMIT", 64)
    with path.open("a") as file:
        file.write("y" * 80 + "\n")
    assert follower.lines() == ["y" * 80]
    assert path.stat().st_size == 0
    with path.open("a") as file:
        file.write("anew\n")
    assert follower.lines() == ["anew"]
    path.unlink()
    assert follower.lines() == []


def manifest(root: Path, *files: ManifestFile) -> Manifest:
    return Manifest("g", "550.163.01", "nvidia", "x86_64", (), (), (), (), files, str(root), ())


def program(name: str, source: str) -> ManifestFile:
    return ManifestFile(f"bin/{name}", "program", source=source)


def test_the_hosts_own_programs_and_libraries_are_used(tmp_path: Path) -> None:
    (tmp_path / "usr/bin").mkdir(parents=True)
    (tmp_path / "usr/bin" / PROGRAM).write_bytes(b"...-multiuser-server...")
    tools = find_tools(
        manifest(
            tmp_path,
            program(PROGRAM, f"/usr/bin/{PROGRAM}"),
            program("nvidia-cuda-mps-server", "/usr/sbin/nvidia-cuda-mps-server"),
            ManifestFile("lib64/origin/libcuda-origin.so.1", "origin", source="/usr/lib/nvidia/libcuda.so.550.163.01"),
        )
    )  # fmt: skip
    assert tools == Tools(
        tmp_path / "usr/bin" / PROGRAM,
        f"{tmp_path}/usr/bin:{tmp_path}/usr/sbin:/usr/bin:/bin",
        f"{tmp_path}/usr/lib/nvidia",
        True,
    )


def test_an_error_names_the_driver_that_lacks_the_programs() -> None:
    with pytest.raises(GovernorError, match=f"550.163.01 on this node has no {PROGRAM}"):
        find_tools(manifest(Path("/")))


def daemons() -> list[Path]:
    """Return the paths of NVIDIA's own daemons."""
    return sorted((ROOT / "build/driver-cache").glob(f"*/root/usr/bin/{PROGRAM}"))


@pytest.fixture(params=["stand-in", *(path.parts[-5] for path in daemons())])
def tools(request: pytest.FixtureRequest, build_dir: Path) -> Tools:
    if request.param == "stand-in":
        control = build_dir / "simgpu/mps-control"
    else:
        [control] = (path for path in daemons() if path.parts[-5] == request.param)
    return Tools(control, "/usr/bin:/bin", "/nonexistent", multiuser=False)


@pytest.fixture
def short() -> Iterator[Path]:
    """A short path, because a socket's path is limited to 107 bytes."""
    made = Path(tempfile.mkdtemp(prefix="tg"))
    yield made
    shutil.rmtree(made)


@contextlib.asynccontextmanager
async def running(made: Mps) -> AsyncIterator[None]:
    task = asyncio.get_running_loop().create_task(made.run())
    try:
        await until(lambda: made.state == "running")
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(15):
        while not condition():  # noqa: ASYNC110 - no event signals the condition
            await asyncio.sleep(0.02)


def command(path: Path, text: str) -> None:
    """Send the daemon a command as nvidia-cuda-mps-control does, with this process's own credentials."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as s:
        s.settimeout(5)
        s.connect(str(path))
        assert s.recv(100) == b"OUTBHELL\0"
        own = struct.pack("3i", os.getpid(), os.geteuid(), os.getegid())
        s.sendmsg([b"OUTBCRED\0"], [(socket.SOL_SOCKET, 2, own)])
        s.sendall(struct.pack("I", 4))
        s.sendall(struct.pack("Q", len(text) + 2))
        s.sendall(text.encode() + b"\n\0")


def test_a_daemon_is_started_commanded_killed_and_stopped(tools: Tools, short: Path) -> None:
    if os.geteuid() != 0:
        lack("needs root, as the governor's daemon does")
    told: list[MpsEvent] = []
    container = short / "container"
    container.mkdir()
    made = Mps(DEVICE, tools, Config(runtime_dir=str(short)), lambda _, event: told.append(event))

    async def story() -> None:
        assert made.reason is not None
        async with running(made):
            assert made.reason is None
            made.link(container)
            place = container / DIRECTORY
            assert [path.name for path in place.iterdir()] == ["control"]
            # Containers reach the daemon through the clients' socket, on which root has no special
            # rights.
            command(place / "control", "quit")
            await until(lambda: made.counts.commands == 1)
            assert made.state == "running"
            before = made.describe()["pid"]
            inode = (place / "control").stat().st_ino
            os.kill(before, signal.SIGKILL)
            await until(lambda: made.counts.starts == 2)
            await until(lambda: (place / "control").stat().st_ino != inode)
            command(place / "control", "get_server_list")
            await until(lambda: made.counts.commands == 2)
            # A command that contains a line in the log's format is not taken for a fault.
            fault = SERVER + "Client process 1 encountered a fatal GPU error."
            command(place / "control", f"nothing\n{fault}")
            await until(lambda: made.counts.commands == 3)
            await asyncio.sleep(0.3)
            assert made.counts.faults == 0
            # The daemon continues without its governor, and the next governor finds it.
            pid = made.describe()["pid"]
        made.leave()
        heir = Mps(DEVICE, tools, Config(runtime_dir=str(short)), lambda *_: None)
        async with running(heir):
            assert heir.describe()["pid"] == pid
            assert heir.counts.starts == 0
            await asyncio.sleep(0.3)
            assert heir.counts.commands == 0  # earlier commands are not reported again
        heir.stop()
        with pytest.raises(ConnectionRefusedError):
            command(container / DIRECTORY / "control", "get_server_list")

    asyncio.run(story())
    kinds = [event.kind for event in told if event.kind != "state"]
    assert kinds == ["command", "daemon-ended", "command", "command"]


def test_a_daemon_that_does_not_start_is_down_and_retried(short: Path) -> None:
    tools = Tools(Path("/bin/false"), "/bin", "/", multiuser=False)
    states: list[str] = []
    made = Mps(DEVICE, tools, Config(runtime_dir=str(short)), lambda m, _: states.append(m.state))

    async def story() -> None:
        task = asyncio.get_running_loop().create_task(made.run())
        await until(lambda: made.state == "down")
        assert made.reason is not None
        assert made.reason.startswith("its MPS daemon cannot be started: ")
        assert f"{PROGRAM} ended at once; see {short}/mps/" in made.reason
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(story())
    assert states == ["down"]


def test_a_daemon_without_the_option_for_all_users_is_started_for_one(
    short: Path, build_dir: Path
) -> None:
    picky = short / PROGRAM
    picky.write_text(f'#!/bin/sh\n[ $# = 1 ] && exec {build_dir}/simgpu/mps-control "$@"\n')
    picky.chmod(0o755)
    made = Mps(
        DEVICE,
        Tools(picky, "/usr/bin:/bin", "/", multiuser=True),
        Config(runtime_dir=str(short)),
        lambda *_: None,
    )

    async def story() -> None:
        async with running(made):
            assert made.counts.starts == 1
        made.stop()

    asyncio.run(story())


@pytest.fixture
def stand_in(build_dir: Path, short: Path) -> Mps:
    if os.geteuid() != 0:
        lack("needs root, as the governor's daemon does")
    tools = Tools(
        build_dir / "simgpu/mps-control", "/usr/bin:/bin", "/nonexistent", multiuser=False
    )
    return Mps(DEVICE, tools, Config(runtime_dir=str(short)), lambda *_: None)


def test_a_daemon_is_watched_by_a_governor_with_thousands_of_descriptors(stand_in: Mps) -> None:
    """Each process of a container takes three descriptors; select() handles 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))

    async def story() -> None:
        async with running(stand_in):
            await asyncio.sleep(0.3)
            assert stand_in.state == "running"
        stand_in.stop()

    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(1100):
            stack.callback(os.close, os.open("/dev/null", os.O_RDONLY))
        asyncio.run(story())


def test_a_failed_link_does_not_stop_the_daemon_for_others(stand_in: Mps, short: Path) -> None:
    async def story() -> None:
        async with running(stand_in):
            (short / "container").mkdir()
            stand_in.link(short / "container")
            place = short / "container" / DIRECTORY
            pid = stand_in.describe()["pid"]
            (place / ".control").mkdir()
            (place / "control").unlink()
            await asyncio.sleep(0.5)
            assert stand_in.describe()["pid"] == pid
            (place / ".control").rmdir()
            await until((place / "control").exists)
        stand_in.stop()

    asyncio.run(story())


def test_a_log_that_grows_faster_than_it_is_read_does_not_fill_the_disk(tmp_path: Path) -> None:
    """/run is shared with other programs, and every command of a client is logged there."""
    path = tmp_path / "control.log"
    path.touch()
    follower = Follower(path)
    line = b"[2026-11-22 05:00:00.000 Control 7] Cmd: " + bytes(200) + b"\n"
    largest = 0
    for _ in range(30):
        with path.open("ab") as log:
            log.write(line * ((2 << 20) // len(line)))
        follower.lines()
        largest = max(largest, path.stat().st_size)
    assert largest <= 2 * LOG_LIMIT + (2 << 20)
    with path.open("ab") as log:
        log.write(CONTROL.encode() + b"Cmd: one\n")
    last = ""
    while lines := follower.lines():
        last = lines[-1]
    assert last.endswith("Cmd: one")


def test_endless_commands_of_a_client_are_counted_and_rarely_reported(
    build_dir: Path, short: Path
) -> None:
    if os.geteuid() != 0:
        lack("needs root, as the governor's daemon does")
    told: list[MpsEvent] = []
    tools = Tools(
        build_dir / "simgpu/mps-control", "/usr/bin:/bin", "/nonexistent", multiuser=False
    )
    made = Mps(DEVICE, tools, Config(runtime_dir=str(short)), lambda _, event: told.append(event))

    async def story() -> None:
        async with running(made):
            begun = time.monotonic()
            control = short / "mps" / DEVICE.uuid / "pipe" / "control"
            for _ in range(200):
                await asyncio.to_thread(command, control, "get_server_list")
            await until(lambda: made.counts.commands == 200)
            seconds = time.monotonic() - begun
            assert len([event for event in told if event.kind == "command"]) <= 20 * (seconds + 1)
        made.stop()

    asyncio.run(story())
