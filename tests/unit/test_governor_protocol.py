"""Test the governor's socket: requests, their answers, and that an unconfirmed admission is undone.

The server runs on a thread with the real arbiter library. A container is a `sleep` process with its
pidfd.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import mmap
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings

from governor import cli
from governor.allocations import AllocationTable
from governor.arbiter import WHOLE, Runner, load_library
from governor.config import Config
from governor.container import container_key
from governor.quota import Device
from governor.requests import SCHEMA_FILE
from governor.reservations import RESERVED_S
from governor.server import LINE_LIMIT, Server
from libcontrol import layout, pages
from tests.conftest import examples
from tests.fuzz.documents import corpus, is_valid, mutated

GIB = 1 << 30
UUID = "GPU-00000000-0000-0000-0000-000000000001"
OTHER = "GPU-00000000-0000-0000-0000-000000000002"
ADMIT: dict[str, Any] = {
    "v": 1,
    "op": "admit",
    "id": "one",
    "pid": 4711,
    "bundle": "/bundle",
    "annotations": {"tidegate.gpu/memory": "4Gi", "tidegate.gpu/compute": "60"},
    "identity": {"user": "root"},
}
RESERVE = {
    "v": 1,
    "op": "reserve",
    "annotations": ADMIT["annotations"],
    "identity": {},
}
SHARE = {"name": "gpu/0", "device": UUID, "memory": 4 * GIB, "compute": 60}
CLAIM: dict[str, Any] = {
    "v": 1,
    "op": "claim",
    "uid": "4c6e3a1e-9d2b-4bd3-8f0a-0d5b3b1c2a77",
    "namespace": "default",
    "name": "train",
    "shares": [SHARE],
}
VALIDATOR = jsonschema.Draft202012Validator(json.loads(SCHEMA_FILE.read_text()))


class GovernorThread:
    """A server on a separate thread."""

    def __init__(self, directory: Path, library_dir: Path, uuids: Sequence[str] = (UUID,)) -> None:
        self.directory = directory
        config = Config(
            runtime_dir=str(directory), library_dir=str(library_dir), placement="spread"
        )
        library = load_library(library_dir)
        self.runners = {uuid: Runner(library, config) for uuid in uuids}
        self.runner = self.runners[UUID]
        devices = [Device(i, uuid, "simulated", 16 * GIB, i) for i, uuid in enumerate(uuids)]
        self.server = Server(config, AllocationTable(devices, config), self.runners)
        self.path = str(directory / "governor.sock")
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(self.path)
        self.listener.listen()
        self.listener.setblocking(False)
        self.loop = asyncio.new_event_loop()
        self.errors: list[dict[str, Any]] = []
        self.loop.set_exception_handler(lambda _, context: self.errors.append(context))
        self.task = self.loop.create_task(self.server.serve(self.listener))
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_until_complete(self.task)
        except asyncio.CancelledError:
            self.server.close()
            left = asyncio.all_tasks(self.loop)
            self.loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        finally:
            self.loop.close()

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.task.cancel)
        self.thread.join(10)
        self.listener.close()
        for runner in self.runners.values():
            runner.close()

    def directories(self) -> list[str]:
        return [path.name for path in (self.directory / "containers").glob("*")]


class GovernorClient:
    """A connection to the governor."""

    def __init__(self, governor: GovernorThread) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(10)
        self.socket.connect(governor.path)
        self.stream = self.socket.makefile("rb")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stream.close()
        self.socket.close()

    def raw(self, data: bytes, *fds: int) -> bytes:
        """Send bytes and return the answer's line, empty if the connection is closed."""
        try:
            sent = socket.send_fds(self.socket, [data], list(fds)) if fds else 0
            self.socket.sendall(data[sent:])
            return self.stream.readline()
        except (BrokenPipeError, ConnectionResetError):
            return b""

    def ask(self, request: dict[str, Any], *fds: int) -> dict[str, Any]:
        return dict(json.loads(self.raw(json.dumps(request).encode() + b"\n", *fds)))

    def error(self, request: dict[str, Any], *fds: int) -> tuple[str, str]:
        answer = self.ask(request, *fds)
        assert answer["ok"] is False
        assert set(answer["error"]) == {"code", "message", "hint"}
        return answer["error"]["code"], answer["error"]["message"]


@pytest.fixture
def governor(
    request: pytest.FixtureRequest, tmp_path: Path, build_dir: Path
) -> Iterator[GovernorThread]:
    made = GovernorThread(tmp_path, build_dir / "libcontrol", getattr(request, "param", (UUID,)))
    try:
        yield made
    finally:
        made.close()
    assert not made.thread.is_alive()
    assert made.errors == []
    assert made.directories() == []


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "60"])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def pidfd(sleeper: subprocess.Popen[bytes]) -> Iterator[int]:
    fd = os.pidfd_open(sleeper.pid)
    yield fd
    os.close(fd)


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def listed(governor: GovernorThread) -> list[str]:
    with GovernorClient(governor) as client:
        return [one["id"] for one in client.ask({"v": 1, "op": "list"})["containers"]]


@pytest.mark.parametrize(
    "request_",
    [
        ADMIT,
        {**ADMIT, "annotations": {}, "identity": {}},
        {**ADMIT, "reservation": "x", "nodes": [0, 1], "exact": True},
        RESERVE,
        {**RESERVE, "replaces": "x" * 64},
        {"v": 1, "op": "confirm"},
        {"v": 1, "op": "list"},
        {"v": 1, "op": "gpus"},
        {"v": 1, "op": "config"},
        {"v": 1, "op": "reload"},
        {"v": 1, "op": "ping"},
        {**ADMIT, "claims": [{"uid": "a-b", "shares": ["gpu/0"]}]},
        CLAIM,
        {**CLAIM, "shares": [{**SHARE, "compute_limit": 100, "strategy": "mps"}] * 64},
        {"v": 1, "op": "unclaim", "uid": "a"},
        {"v": 1, "op": "claims"},
        {"v": 1, "op": "release", "id": "x" * 1024},
        {"v": 1, "op": "set", "id": "one", "compute": 100},
        {"v": 1, "op": "set", "id": "one", "memory": 1, "compute": 1, "compute_limit": 1},
        {"v": 1, "op": "set", "id": "one", "class": "latency"},
    ],
)
def test_valid_requests_conform_to_the_schema(request_: dict[str, Any]) -> None:
    assert VALIDATOR.is_valid(request_)


BAD: list[Any] = [
    [],
    None,
    "ping",
    {},
    {"op": "ping"},
    {"v": 2, "op": "ping"},
    {"v": True, "op": "ping"},
    {"v": 1, "op": "stop"},
    {"v": 1, "op": "ping", "more": 1},
    {"v": 1, "op": "gpus", "id": "one"},
    {"v": 1, "op": "reload", "file": "/etc/passwd"},
    {"v": 1, "op": "release"},
    {"v": 1, "op": "release", "id": ""},
    {"v": 1, "op": "release", "id": 1},
    {"v": 1, "op": "set", "id": "one"},
    {"v": 1, "op": "set", "compute": 10},
    {"v": 1, "op": "set", "id": "one", "compute": 0},
    {"v": 1, "op": "set", "id": "one", "compute": 101},
    {"v": 1, "op": "set", "id": "one", "compute": 10.5},
    {"v": 1, "op": "set", "id": "one", "memory": 0},
    {"v": 1, "op": "set", "id": "one", "memory": "4Gi"},
    {"v": 1, "op": "set", "id": "one", "pid": 3},
    {"v": 1, "op": "release", "id": "x" * 1025},
    *({k: v for k, v in ADMIT.items() if k != name} for name in ADMIT if name not in ("v", "op")),
    {**ADMIT, "pid": 0},
    {**ADMIT, "pid": "1"},
    {**ADMIT, "annotations": {"tidegate.gpu/memory": 4}},
    {**ADMIT, "annotations": {"other/memory": "4Gi"}},
    {**ADMIT, "identity": {"uid": 0}},
    {**ADMIT, "bundle": "x" * 4097},
    {**ADMIT, "more": 1},
    {**ADMIT, "nodes": [-1]},
    {**ADMIT, "nodes": [0] * 257},
    {**ADMIT, "exact": 1},
    {**RESERVE, "id": "one"},
    {**RESERVE, "replaces": "x" * 65},
    {"v": 1, "op": "reserve"},
    {**RESERVE, "claims": []},
    *({k: v for k, v in CLAIM.items() if k != name} for name in CLAIM if name not in ("v", "op")),
    *({**CLAIM, "uid": uid} for uid in ("", "-a", "a/b", "a b", "a\n", "x" * 65, 1)),
    *({**CLAIM, "name": name} for name in ("", "A", "a\n", "x" * 254)),
    *({**CLAIM, "shares": shares} for shares in ([], [SHARE] * 65, {}, None)),
    *(
        {**CLAIM, "shares": [{**SHARE, name: value}]}
        for name, value in (
            *(("name", "a b"), ("name", ""), ("device", "x" * 65), ("device", "GPU\n")),
            *(("memory", 0), ("memory", 1 << 60), ("compute", 0), ("compute", 101)),
            *(("compute", 1.5), ("compute_limit", 0), ("strategy", "passthrough"), ("more", 1)),
        )
    ),
    {"v": 1, "op": "unclaim"},
    {"v": 1, "op": "unclaim", "uid": ""},
    {"v": 1, "op": "unclaim", "uid": "a", "namespace": "b"},
    {"v": 1, "op": "claims", "uid": "a"},
    {**ADMIT, "claims": [{"uid": "a", "shares": []}]},
    {**ADMIT, "claims": [{"uid": "a", "shares": ["a"], "memory": 1}]},
    {**ADMIT, "claims": {"uid": "a", "shares": ["a"]}},
]


def test_an_invalid_request_is_refused_and_the_connection_stays_open(
    governor: GovernorThread, pidfd: int
) -> None:
    with GovernorClient(governor) as client:
        for document in BAD:
            assert not VALIDATOR.is_valid(document)
            code, message = client.error(document)
            assert code == "request"
            assert len(message) <= 200
        for line in (b"", b"{", b"\xff\xfe", b"[" * 5000, b'{"v": 1, "op": "ping"} x'):
            answer = json.loads(client.raw(line + b"\n"))
            assert answer["error"]["code"] == "request"
        surrogate = json.dumps({**ADMIT, "id": "\ud800"})
        assert json.loads(client.raw(surrogate.encode() + b"\n", pidfd))["ok"] is False
        assert client.ask({"v": 1, "op": "ping"})["pid"] == os.getpid()
    assert listed(governor) == []


def test_requests_may_come_in_pieces_and_together(governor: GovernorThread) -> None:
    with GovernorClient(governor) as client:
        line = b'{"v": 1, "op": "ping"}\n'
        for byte in line[:-1]:
            client.socket.sendall(bytes([byte]))
        assert json.loads(client.raw(line[-1:]))["ok"]
        assert json.loads(client.raw(line * 3))["ok"]
        assert [json.loads(client.stream.readline())["ok"] for _ in range(2)] == [True, True]


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_a_line_that_is_too_long_ends_the_connection(governor: GovernorThread, end: bytes) -> None:
    with GovernorClient(governor) as client:
        assert client.raw(b'{"v": 1, "op": "ping"' + b" " * LINE_LIMIT + b"}" + end) == b""
    assert listed(governor) == []


def test_an_admission_is_confirmed_and_outlives_its_connection(
    governor: GovernorThread, pidfd: int, sleeper: subprocess.Popen[bytes]
) -> None:
    with GovernorClient(governor) as client:
        answer = client.ask(ADMIT, pidfd)
        directory = governor.directory / "containers" / container_key("one")
        assert answer == {
            "ok": True,
            "key": container_key("one"),
            "directory": str(directory),
            "devices": [{"uuid": UUID, "index": 0, "minor": 0}],
            "memory": 4 * GIB,
            "compute": 60,
            "compute_limit": 60,
            "class": "throughput",
            "strategy": "timeslice",
        }
        names = {path.name for path in directory.iterdir()}
        assert names == {"grant", "devices", "governor.sock"}
        assert (directory / "devices").read_text() == f"{UUID}\n"
        assert client.ask({"v": 1, "op": "confirm"}) == {"ok": True}
    assert listed(governor) == ["one"]
    sleeper.kill()
    wait_for(lambda: listed(governor) == [])
    assert governor.directories() == []


def test_an_unconfirmed_admission_is_undone(governor: GovernorThread, pidfd: int) -> None:
    for _ in range(3):  # each takes more than half, so the previous one must be gone
        with GovernorClient(governor) as client:
            assert client.ask(ADMIT, pidfd)["ok"]
            assert governor.directories() == [container_key("one")]
        wait_for(lambda: listed(governor) == [])
        assert governor.directories() == []


def test_an_admission_whose_hook_is_stuck_ends_with_the_container(
    governor: GovernorThread, pidfd: int, sleeper: subprocess.Popen[bytes]
) -> None:
    """A root file system that does not answer keeps the hook's process alive and its connection
    open.
    """
    with GovernorClient(governor) as client:
        assert client.ask(ADMIT, pidfd)["ok"]
        sleeper.kill()  # as the runtime does after a failed start
        wait_for(lambda: listed(governor) == [])
        assert governor.directories() == []
        # This is the hook's request once the file system answers.
        assert client.error({"v": 1, "op": "confirm"})[0] == "request"
    assert listed(governor) == []


def test_reserved_gpus_are_kept_for_one_container(governor: GovernorThread, pidfd: int) -> None:
    with GovernorClient(governor) as client:
        answer = client.ask(RESERVE)
        assert answer["devices"] == [{"uuid": UUID, "index": 0, "minor": 0}]
        assert answer["expires_s"] == RESERVED_S
        token = answer["reservation"]
        assert client.error(RESERVE)[0] == "refused"  # each takes more than half
        assert client.error(ADMIT, pidfd)[0] == "refused"
        assert client.ask({**ADMIT, "reservation": token}, pidfd)["ok"]
        assert client.error({**ADMIT, "id": "two", "reservation": token}, pidfd)[0] == "refused"
        assert listed(governor) == ["one"]


@pytest.mark.parametrize("governor", [(UUID, OTHER)], ids=["two GPUs"], indirect=True)
def test_of_two_containers_that_race_for_a_reservation_one_gets_it(
    governor: GovernorThread, pidfd: int
) -> None:
    """Both containers have the reservation's token, as after a bundle was copied.

    The loser gets the GPU that has the most room at that time.
    """
    third = {"tidegate.gpu/memory": "1Gi", "tidegate.gpu/compute": "30"}
    with GovernorClient(governor) as client:
        token = client.ask({**RESERVE, "annotations": third})["reservation"]
    answers: dict[str, dict[str, Any]] = {}
    ready = threading.Barrier(2)
    clients = {name: GovernorClient(governor) for name in ("one", "two")}

    def admit(name: str) -> None:
        ready.wait()
        request = {**ADMIT, "annotations": third, "id": name, "reservation": token}
        answers[name] = clients[name].ask(request, pidfd)

    threads = [threading.Thread(target=admit, args=(name,)) for name in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    given = [[device["uuid"] for device in answer["devices"]] for answer in answers.values()]
    assert sorted(given) == [[UUID], [OTHER]]
    with GovernorClient(governor) as client:
        gpus = client.ask({"v": 1, "op": "gpus"})["gpus"]
    assert [gpu["compute_left"] for gpu in gpus] == [70, 70]
    for one in clients.values():
        one.__exit__()


def test_a_container_that_redeems_another_reservation_gets_its_own_quota(
    governor: GovernorThread, pidfd: int
) -> None:
    """A reservation determines GPUs. The quota is taken from the request, and checked again."""
    with GovernorClient(governor) as client:
        small = {"tidegate.gpu/memory": "1Gi", "tidegate.gpu/compute": "10"}
        token = client.ask({**RESERVE, "annotations": small})["reservation"]
        assert client.ask(ADMIT, pidfd)["ok"]
        large = {**ADMIT, "id": "two", "reservation": token}
        assert client.error(large, pidfd)[0] == "refused"
        assert listed(governor) == ["one"]
        # The container for which the reservation was made has lost it, and gets what is left.
        late = {**ADMIT, "id": "three", "annotations": small, "reservation": token}
        assert client.ask(late, pidfd)["memory"] == GIB


def test_a_guessed_reservation_is_invalid(governor: GovernorThread, pidfd: int) -> None:
    with GovernorClient(governor) as client:
        token = client.ask(RESERVE)["reservation"]
        assert len(token) == 32
        for guess in ("", "x", token[:-1], token.upper() + "0", f"reservation {token}"):
            with GovernorClient(governor) as guesser:
                assert guesser.error({**ADMIT, "reservation": guess}, pidfd)[0] == "refused", guess
                assert guesser.error({**RESERVE, "replaces": guess})[0] == "refused", guess
        assert client.ask({**ADMIT, "reservation": token}, pidfd)["ok"]


def test_a_reservation_that_was_replaced_is_invalid(governor: GovernorThread, pidfd: int) -> None:
    with GovernorClient(governor) as client:
        first = client.ask(RESERVE)["reservation"]
        second = client.ask({**RESERVE, "replaces": first})["reservation"]
        assert first != second
        assert client.error({**ADMIT, "reservation": first}, pidfd)[0] == "refused"
        assert client.ask({**ADMIT, "reservation": second}, pidfd)["ok"]


def test_an_unconfirmed_reservation_expires(
    governor: GovernorThread, pidfd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("governor.reservations.RESERVED_S", 0.2)
    with GovernorClient(governor) as client:
        token = client.ask(RESERVE)["reservation"]
        wait_for(lambda: client.ask({"v": 1, "op": "gpus"})["gpus"][0]["compute_left"] == 100)
        # A container that comes too late gets what is left.
        assert client.ask({**ADMIT, "reservation": token}, pidfd)["ok"]


def test_a_refused_reservation_leaves_nothing(governor: GovernorThread) -> None:
    with GovernorClient(governor) as client:
        wrong = {**RESERVE, "annotations": {"tidegate.gpu/memory": "1Ti"}}
        assert client.error(wrong)[0] == "refused"
        assert client.ask({"v": 1, "op": "gpus"})["gpus"][0]["compute_left"] == 100


def test_only_a_container_that_has_ended_is_released(
    governor: GovernorThread, pidfd: int, sleeper: subprocess.Popen[bytes]
) -> None:
    """A running container cannot be released: otherwise another engine with a container of the same
    id could end it.
    """
    with GovernorClient(governor) as client:
        assert client.ask(ADMIT, pidfd)["ok"]
        assert client.ask({"v": 1, "op": "confirm"})["ok"]
        assert client.ask({"v": 1, "op": "release", "id": "stranger"}) == {"ok": True}
        assert client.ask({"v": 1, "op": "release", "id": "one"}) == {"ok": True}
        assert listed(governor) == ["one"]
        sleeper.kill()
        os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
        assert client.ask({"v": 1, "op": "release", "id": "one"}) == {"ok": True}
        assert listed(governor) == []
        assert governor.directories() == []
        assert client.ask({"v": 1, "op": "release", "id": "one"}) == {"ok": True}
        assert client.error({"v": 1, "op": "confirm"})[0] == "request"


def test_an_id_is_admitted_once(governor: GovernorThread, pidfd: int) -> None:
    with GovernorClient(governor) as client, GovernorClient(governor) as other:
        assert client.ask(ADMIT, pidfd)["ok"]
        code, message = other.error(ADMIT, pidfd)
        assert (code, message) == ("refused", "container 'one' is already registered")
        assert other.error({"v": 1, "op": "confirm"})[0] == "request"
        assert client.ask({"v": 1, "op": "confirm"})["ok"]
    assert listed(governor) == ["one"]


def test_a_hook_that_is_entered_twice_finds_its_container_prepared(
    governor: GovernorThread, pidfd: int
) -> None:
    with GovernorClient(governor) as client, GovernorClient(governor) as other:
        answer = client.ask(ADMIT, pidfd)
        assert other.error(ADMIT, pidfd)[0] == "refused"  # the first hook is still at work
        assert client.ask({"v": 1, "op": "confirm"})["ok"]
        assert other.ask(ADMIT, pidfd) == {**answer, "already": True}
    assert listed(governor) == ["one"]
    stranger = subprocess.Popen(["sleep", "60"])
    try:
        fd = os.pidfd_open(stranger.pid)
        with GovernorClient(governor) as client:
            assert client.error(ADMIT, fd)[0] == "refused"
        os.close(fd)
    finally:
        stranger.kill()
        stranger.wait()


def test_an_admission_without_a_pidfd_is_refused(governor: GovernorThread) -> None:
    with GovernorClient(governor) as client:
        assert client.error(ADMIT) == ("request", "admit was sent without a pidfd")
    assert listed(governor) == []


def test_confirm_needs_an_admission(governor: GovernorThread) -> None:
    with GovernorClient(governor) as client:
        assert client.error({"v": 1, "op": "confirm"})[0] == "request"


@pytest.mark.parametrize(
    ("annotations", "code"),
    [
        ({"tidegate.gpu/memory": "lots"}, "annotation"),
        ({"tidegate.gpu/colour": "red"}, "annotation"),
        ({"tidegate.gpu/memory": "1Ti"}, "refused"),
        ({}, "refused"),
    ],
)
def test_a_refusal_leaves_nothing(
    governor: GovernorThread, pidfd: int, annotations: dict[str, str], code: str
) -> None:
    with GovernorClient(governor) as client:
        assert client.error({**ADMIT, "annotations": annotations}, pidfd)[0] == code
        assert governor.directories() == []
        assert client.ask(ADMIT, pidfd)["ok"]  # on the same connection


def test_a_refusal_by_a_full_gpu_leaves_nothing(governor: GovernorThread, pidfd: int) -> None:
    with mmap.mmap(-1, layout.GRANT_SIZE) as grant, mmap.mmap(-1, layout.LEDGER_SIZE) as ledger:
        tenants = [governor.runner.add(0, WHOLE, grant, 0, ledger) for _ in range(256)]
        try:
            with GovernorClient(governor) as client:
                for _ in range(3):  # each asks for more than half, so nothing may stay allocated
                    code, message = client.error(ADMIT, pidfd)
                    assert (code, message) == ("governor", "256 containers already share this GPU")
            assert listed(governor) == []
            assert governor.directories() == []
        finally:
            for tenant in tenants:
                governor.runner.remove(tenant)
    with GovernorClient(governor) as client:
        assert client.ask(ADMIT, pidfd)["ok"]


def test_a_container_that_floods_its_socket_does_not_block_the_gpu(
    governor: GovernorThread,
) -> None:
    noisy, ours = socket.socketpair()
    governor.runner.watch(ours.fileno())
    stop = threading.Event()

    def flood() -> None:
        with contextlib.suppress(OSError):
            while not stop.is_set():
                noisy.send(bytes(1 << 16))

    thread = threading.Thread(target=flood)
    thread.start()
    with mmap.mmap(-1, layout.GRANT_SIZE) as grant, mmap.mmap(-1, layout.LEDGER_SIZE) as ledger:
        pages.init_grant(grant, settings={}, devices=[{"uuid": bytes(16)}])
        pages.init_ledger(ledger)
        time.sleep(0.05)  # the runner is reading by now
        tenant = governor.runner.add(WHOLE, WHOLE, grant, 0, ledger)
        try:
            pages.write(ledger, 0, "ledger_header", "n_slots", 1)
            pages.write(ledger, pages.slot_base(0), "ledger_slot", "state", 1)
            pages.write(ledger, layout.ledger_device(0, 0), "ledger_device", "want", 1)
            deadline = time.monotonic() + 20
            while not pages.read(grant, layout.grant_device(0), "grant_device", "deadline_ns"):
                assert time.monotonic() < deadline, "no grant"
                time.sleep(0.01)
        finally:
            stop.set()
            noisy.shutdown(socket.SHUT_RDWR)
            thread.join()
            noisy.close()
            ours.close()
            governor.runner.remove(tenant)


def test_a_grant_on_an_earlier_page_is_withdrawn(governor: GovernorThread) -> None:
    """A grant on the page of a previous governor is no longer valid."""
    epoch = 2**31 + 17
    with mmap.mmap(-1, layout.GRANT_SIZE) as grant, mmap.mmap(-1, layout.LEDGER_SIZE) as ledger:
        base = layout.grant_device(0)
        old = {"epoch": epoch, "deadline_ns": layout.OPEN, "signal": 3, "standby_ns": 5}
        pages.init_grant(grant, settings={}, devices=[{"uuid": bytes(16), **old}])
        pages.init_ledger(ledger)
        tenant = governor.runner.add(WHOLE, WHOLE, grant, 0, ledger)
        try:
            assert pages.read(grant, base, "grant_device", "deadline_ns") == 0
            assert pages.read(grant, base, "grant_device", "standby_ns") == 0
            assert pages.read(grant, base, "grant_device", "signal") > 3
            assert pages.read(grant, 0, "grant_header", "heartbeat_ns")
            pages.write(ledger, 0, "ledger_header", "n_slots", 1)
            pages.write(ledger, pages.slot_base(0), "ledger_slot", "state", 1)
            pages.write(ledger, layout.ledger_device(0, 0), "ledger_device", "want", 1)
            wait_for(lambda: pages.read(grant, base, "grant_device", "deadline_ns"))
            assert pages.read(grant, base, "grant_device", "epoch") == epoch + 1
        finally:
            governor.runner.remove(tenant)


def test_a_directory_that_cannot_be_made_leaves_nothing(
    governor: GovernorThread, pidfd: int
) -> None:
    blocked = governor.directory / "containers"
    blocked.write_text("not a directory\n")
    before = descriptors()
    with GovernorClient(governor) as client:
        for _ in range(3):
            code, message = client.error(ADMIT, pidfd)
            assert code == "refused"
            assert message.startswith("the container's directory cannot be created")
    wait_for(lambda: descriptors() <= before)
    blocked.unlink()
    with GovernorClient(governor) as client:
        assert client.ask(ADMIT, pidfd)["ok"]


def test_descriptors_of_a_container_are_closed_with_it(
    governor: GovernorThread, pidfd: int
) -> None:
    """Closing them must not wait for Python's cycle collector.

    A node that starts many containers would run out of descriptors.
    """

    def begin_and_end() -> None:
        with GovernorClient(governor) as client:
            assert client.ask(ADMIT, pidfd)["ok"]
        wait_for(lambda: listed(governor) == [])

    begin_and_end()  # opens everything that is opened only once
    gc.disable()
    try:
        before = descriptors()
        for _ in range(5):
            begin_and_end()
        wait_for(lambda: descriptors() <= before + 1)
    finally:
        gc.enable()


def test_a_container_that_has_already_ended_is_removed(
    governor: GovernorThread, pidfd: int, sleeper: subprocess.Popen[bytes]
) -> None:
    sleeper.kill()
    sleeper.wait()
    with GovernorClient(governor) as client:
        assert client.ask(ADMIT, pidfd)["ok"]
        wait_for(lambda: listed(governor) == [])
        assert client.error({"v": 1, "op": "confirm"})[0] == "request"


# ---- a new quota for a running container ----


def test_a_new_quota_holds_from_now_on(governor: GovernorThread, pidfd: int) -> None:
    with GovernorClient(governor) as client:
        assert client.ask(ADMIT, pidfd)["ok"]
        assert client.ask({"v": 1, "op": "confirm"})["ok"]
        new = {"memory": 8 * GIB, "compute": 20, "compute_limit": 90, "class": "latency"}
        assert client.ask({"v": 1, "op": "set", "id": "one", **new}) == {"ok": True, **new}
        (one,) = client.ask({"v": 1, "op": "list"})["containers"]
        assert (one["compute"], one["compute_limit"], one["class"]) == (20, 90, "latency")
        assert one["devices"][0]["memory_limit"] == 8 * GIB
        grant = governor.directory / "containers" / container_key("one") / "grant"
        with grant.open("rb") as file, mmap.mmap(file.fileno(), 4096, prot=mmap.PROT_READ) as page:
            base = layout.grant_device(0)
            found = {
                name: pages.read(page, base, "grant_device", name)
                for name in ("memory_limit", "compute", "compute_limit", "work_class")
            }
        assert found == {
            "memory_limit": 8 * GIB, "compute": WHOLE // 5, "compute_limit": WHOLE * 9 // 10,
            "work_class": 1,
        }  # fmt: skip


def test_a_strict_container_stays_strict_and_an_elastic_one_elastic(
    governor: GovernorThread, pidfd: int
) -> None:
    with GovernorClient(governor) as client:
        assert client.ask(ADMIT, pidfd)["ok"]  # 60 %, and no more
        change = {"v": 1, "op": "set", "id": "one"}
        assert client.ask({**change, "compute": 30})["compute_limit"] == 30
        assert client.ask({**change, "compute_limit": 50})["compute"] == 30
        assert client.ask({**change, "compute": 40})["compute_limit"] == 50
        assert client.ask({**change, "compute": 70})["compute_limit"] == 70


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"compute": 50}, "GPU 0 has 40 % of its time left to guarantee, but 50 % was requested"),
        ({"memory": 13 * GIB}, "MiB of memory left to grant"),
        ({"memory": GIB // 4}, "a process's context alone takes"),
        ({"compute": 40, "compute_limit": 30}, "the limit of 30 % is below the guarantee of 40 %"),
        ({"compute_limit": 10}, "the limit of 10 % is below the guarantee of 30 %"),
    ],
)
def test_an_impossible_quota_changes_nothing(
    governor: GovernorThread, pidfd: int, change: dict[str, int], words: str
) -> None:
    small = {"tidegate.gpu/memory": "4Gi", "tidegate.gpu/compute": "30"}
    with GovernorClient(governor) as client, GovernorClient(governor) as other:
        assert client.ask(ADMIT, pidfd)["ok"]  # 60 %
        assert other.ask({**ADMIT, "id": "two", "annotations": small}, pidfd)["ok"]
        before = client.ask({"v": 1, "op": "list"})["containers"]
        code, message = client.error({"v": 1, "op": "set", "id": "two", **change})
        assert code == "refused"
        assert words in message
        assert client.ask({"v": 1, "op": "list"})["containers"] == before


def test_a_quota_below_the_memory_in_use_is_refused(governor: GovernorThread, pidfd: int) -> None:
    with GovernorClient(governor) as client:
        assert client.ask(ADMIT, pidfd)["ok"]
        container = governor.server.containers[container_key("one")]
        container.account.used = lambda _: 3 * GIB  # type: ignore[method-assign]
        change = {"v": 1, "op": "set", "id": "one"}
        code, message = client.error({**change, "memory": 2 * GIB})
        assert (code, message) == (
            "refused", "the container uses 3072 MiB, but 2048 MiB was requested"
        )  # fmt: skip
        # A bare number means bytes, which is hardly what was intended.
        answer = client.ask({**change, "memory": 100})["error"]
        assert answer["message"] == "the container uses 3072 MiB, but 100 bytes was requested"
        assert answer["hint"] == "write it like 3072Mi"
        assert client.ask({**change, "memory": 3 * GIB})["memory"] == 3 * GIB
        # The driver took memory beyond the quota. The quota may still grow.
        container.account.used = lambda _: 5 * GIB  # type: ignore[method-assign]
        assert client.ask({**change, "memory": 4 * GIB})["memory"] == 4 * GIB


def test_the_quota_of_an_unknown_container_cannot_be_changed(governor: GovernorThread) -> None:
    with GovernorClient(governor) as client:
        code, message = client.error({"v": 1, "op": "set", "id": "nobody", "compute": 1})
        assert (code, message) == ("refused", "no container 'nobody' shares a GPU on this node")


def test_the_command_names_a_container_by_a_prefix_of_its_id(
    governor: GovernorThread, pidfd: int, capfd: pytest.CaptureFixture[str]
) -> None:
    def tidegate(*arguments: str) -> tuple[int, str]:
        status = cli.main(["set", *arguments, "--runtime-dir", str(governor.directory)])
        told = capfd.readouterr()
        # The governor in this process logs to the same stream.
        return status, (told.err or told.out).splitlines()[-1]

    with GovernorClient(governor) as client, GovernorClient(governor) as other:
        assert client.ask({**ADMIT, "id": "abcdef"}, pidfd)["ok"]
        small = {"tidegate.gpu/memory": "1Gi", "tidegate.gpu/compute": "10"}
        assert other.ask({**ADMIT, "id": "abxyz", "annotations": small}, pidfd)["ok"]
        assert tidegate("abc", "--compute", "40", "--memory", "12Gi") == (
            0, "abcdef: compute 40 %, limit 40 %, memory 12288 MiB, class throughput"
        )  # fmt: skip
        assert tidegate("ab", "--compute", "40") == (
            65, "tidegate: 2 containers have an id that begins with 'ab'; tidegate ps lists them"
        )  # fmt: skip
        assert tidegate("zz", "--compute", "40")[0] == 65
        assert tidegate("abc", "--compute", "95")[0] == 77
        assert tidegate("abc") == (
            65, "tidegate: nothing to change; give --memory, --compute, --compute-limit or --class"
        )  # fmt: skip


def test_the_gpus_are_listed_with_what_is_left_of_them(
    governor: GovernorThread, pidfd: int
) -> None:
    with GovernorClient(governor) as client:
        assert client.ask(ADMIT, pidfd)["ok"]  # 4 GiB, 60 %
        assert client.ask({"v": 1, "op": "gpus"}) == {
            "ok": True,
            "placement": "spread",
            "driver": None,
            "cuda": None,
            "context_memory": 520 << 20,
            "gpus": [
                {
                    "index": 0,
                    "uuid": UUID,
                    "name": "simulated",
                    "memory": 16 * GIB - GIB // 2,
                    "memory_offered": 16 * GIB - GIB // 2,
                    "memory_left": 12 * GIB - GIB // 2,
                    "memory_granted": 4 * GIB,
                    "compute_left": 40,
                    "containers": 1,
                    "claims": 0,
                    "strategy": "timeslice",
                    "scheduling": "gate",
                    "not_steered": "",
                    "mps": None,
                    "numa_node": None,
                    "pci": None,
                    "lost": None,
                    "closed": None,
                    "routes": [],
                }
            ],
            "left_out": [],
        }


@pytest.mark.hypothesis
def test_the_governor_answers_any_line_with_one_line(governor: GovernorThread, pidfd: int) -> None:
    """Any line gets an answer that conforms to the schema, and the next request is served."""
    ours = {"admit": "admitted", "reserve": "reserved"}
    lines = [entry.data for entry in corpus("request") if b"\n" not in entry.data]

    def ask(client: GovernorClient, line: bytes) -> None:
        answer = client.raw(line + b"\n", pidfd)
        document = json.loads(answer)
        assert is_valid("answer", answer), (line, answer)
        if document["ok"] and (op := json.loads(line)["op"]) in ours:
            assert is_valid(ours[op], answer), (line, answer)
        if not document["ok"]:
            assert document["error"]["code"] != "internal", (line, answer)

    @settings(max_examples=examples(100), deadline=None, suppress_health_check=list(HealthCheck))
    @given(data=mutated("request"), more=mutated("request"))
    def holds(data: bytes, more: bytes) -> None:
        with GovernorClient(governor) as client:
            for line in (data.replace(b"\n", b" "), more.replace(b"\n", b" ")):
                if len(line) < 60000:
                    ask(client, line)
            assert client.ask({"v": 1, "op": "list"})["ok"]

    for line in lines:  # each sends a descriptor, which belongs to its connection
        with GovernorClient(governor) as client:
            ask(client, line)
    holds()
