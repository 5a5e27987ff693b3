"""Containers that bypass the control library, under runc with a simulated GPU: they are detected in time, throttled
and stopped. Honest containers are never accused.

The culprit loads a copy of the driver's own libcuda (stray.c). The tests take the times of freezes from the governor's
log and from the container's own ticks.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from bench.machine import ROOT, Simulated
from bench.node import BenchNode, Running
from governor import cgroups
from governor.client import ask
from governor.metrics import OWNER
from simgpu import simgpu
from simgpu.testing import SimulatedDriver
from tests.container.bundles import compile_c
from tests.container.nodes import WAIT_S, events, show_output, units, wait_for

GIB = 1 << 30
SOON_S = 2.0


class SimulatedWithStray(Simulated):
    """The simulated GPU; each image also has the culprit and its own driver."""

    def __init__(self, work: Path, build: Path, devices: int = 1) -> None:
        super().__init__(work, build, devices=devices)
        source = Path(__file__).with_name("stray.c").read_text()
        self.programs.append(compile_c(source, work / "stray", "-ldl"))
        self.programs.append(shutil.copy(build / "simgpu/libcuda.so.1", work / "own-driver.so"))


Place = Callable[..., contextlib.AbstractContextManager[BenchNode]]


@pytest.fixture
def place(
    tmp_path_factory: pytest.TempPathFactory, build_dir: Path, require: Callable[..., None]
) -> Place:
    """Return a context manager that makes a node with the given settings."""
    require("gcc", "runc")

    @contextlib.contextmanager
    def make(**settings: object) -> Iterator[BenchNode]:
        machine = SimulatedWithStray(tmp_path_factory.mktemp("violations"), build_dir)
        with BenchNode(machine, settings=settings) as node:
            yield node

    return make


def start(node: BenchNode, name: str, *ways: str, **annotations: str) -> Running:
    quota = {"memory": "2Gi", "compute": "20", **annotations}
    return node.start(name, ["/usr/bin/stray", *ways], quota)


def burner(node: BenchNode, name: str, *options: str, **annotations: str) -> Running:
    arguments = [
        "/usr/bin/simgpu-workload", "--seconds", "60", "--out", "/out/progress.bin", *options,
    ]  # fmt: skip
    return node.start(name, arguments, {"memory": "2Gi", "compute": "20", **annotations})


def violations(node: BenchNode, container: Running) -> dict[str, dict[str, Any]]:
    """Return the violations that `tidegate ps --json` shows for a container: the last one of each kind."""
    known = {one["id"]: one for one in ask(node.config, "list")["containers"]}
    if container.identifier not in known:
        return {}
    return {one["kind"]: one for one in known[container.identifier]["violations"]}


def scrape(node: BenchNode) -> dict[tuple[str, ...], float]:
    """Return the metrics by name and label values, with the values in the order of the labels'
    names; labels in `OWNER` are left out.
    """
    body = get(node, "metrics.sock", "/metrics")
    return {
        (
            sample.name,
            *(sample.labels[name] for name in sorted(sample.labels.keys() - set(OWNER))),
        ): sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    }


def get(node: BenchNode, name: str, target: str) -> bytes:
    """Return what one of the governor's sockets answers to a browser or a scraper."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(WAIT_S)
        client.connect(str(node.runtime_dir / name))
        client.sendall(f"GET {target} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        with client.makefile("rb") as stream:
            answer = stream.read()
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    return bytes(body)


def had(node: BenchNode, container: Running) -> dict[str, Any]:
    """Return the page's series of a container for the last 15 minutes; empty until the first step is complete."""
    answer = json.loads(get(node, "web.sock", "/api/v1/history"))
    return next((one for one in answer["series"] if one["id"] == container.identifier), {})


def began(container: Running) -> float:
    path = container.out / "began"

    def there() -> float:
        assert container.process.poll() is None, show_output(container)
        return path.stat().st_mtime if path.exists() else 0.0

    return float(wait_for(there, "the culprit"))


def logged_at(event: dict[str, Any]) -> float:
    """Return the time of an event in the governor's log, in seconds since 1970."""
    return dt.datetime.fromisoformat(event["timestamp"]).timestamp()


def pids_of(container: Running, node: BenchNode) -> list[int]:
    done = subprocess.run(
        [
            "runc",
            "--root",
            str(node.state_dir),
            "ps",
            "--format",
            "json",
            container.identifier,
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    return list(json.loads(done.stdout))


def expect_soon(play: Callable[[], list[float]]) -> None:
    """Play a round, up to three times, until all delays that it returns are below SOON_S.

    A busy machine may delay a round.
    """
    rounds = []
    for _ in range(3):
        rounds.append(play())
        if max(rounds[-1]) < SOON_S:
            return
    pytest.fail(f"each round had a delay of {SOON_S} s or longer: {rounds}")


def test_memory_taken_past_the_library_is_reported_within_two_seconds(place: Place) -> None:
    def play() -> list[float]:
        with place(metrics={"listen": "unix"}, web={"listen": "unix"}) as node:
            neighbour = burner(node, "neighbour", compute="40")
            culprit = start(
                node, "culprit", "child", "own", f"take:{3 * GIB}", "began", "sleep:60000"
            )
            since = began(culprit)
            child = max(pids_of(culprit, node))
            delays = []
            for kind in ("memory", "unregistered"):
                found = wait_for(lambda k=kind: violations(node, culprit).get(k), kind)
                delays.append(found["began"] - since)
                assert found["pid"] == child
                assert found["ended"] is None
                assert found["gpu"].startswith("GPU-")
            assert violations(node, culprit)["memory"]["found"] >= 3 * GIB
            assert 2 * GIB < violations(node, culprit)["memory"]["allowed"] < 2.5 * GIB
            gpu = violations(node, culprit)["memory"]["gpu"]
            shown = scrape(node)
            assert shown["tidegate_violations_total", "memory"] == 1
            assert shown["tidegate_container_violation", culprit.identifier, gpu, "memory"] == 1
            assert shown["tidegate_container_violation", neighbour.identifier, gpu, "memory"] == 0
            assert shown["tidegate_container_memory_seen_bytes", culprit.identifier, gpu] >= 3 * GIB
            assert shown["tidegate_container_memory_charged_bytes", culprit.identifier, gpu] == 0
            held, charged, grants, launches = (
                shown[f"tidegate_container_{name}_total", neighbour.identifier, gpu]
                for name in ("held_seconds", "charged_seconds", "grants", "launches")
            )
            assert 0 < charged <= held
            assert min(grants, launches) > 0
            assert shown["tidegate_gpu_held_seconds_total", gpu, "0"] >= held
            assert shown["tidegate_gpu_looks_total", gpu, "0"] > 4
            os.kill(child, signal.SIGKILL)
            wait_for((culprit.out / "ended").exists, "the child's end")
            ended = (culprit.out / "ended").stat().st_mtime
            wait_for(
                lambda: all(one["ended"] for one in violations(node, culprit).values()), "the end"
            )
            delays += [one["ended"] - ended for one in violations(node, culprit).values()]
            reported = events(node, "violation", "violation-ended")
            # There is one event when each violation began and one when it ended, and none for
            # another container; no action was taken.
            assert sorted((one["event"], one["kind"]) for one in reported) == [
                ("violation", "memory"),
                ("violation", "unregistered"),
                ("violation-ended", "memory"),
                ("violation-ended", "unregistered"),
            ]
            assert {one["container"] for one in reported} == {culprit.identifier}
            assert reported[0]["policy"] == "report"
            assert violations(node, neighbour) == {}
            assert not events(node, "container-frozen", "violation-stopped")
            # The page still shows the container after its end.
            node.delete(culprit)
            wait_for(lambda: had(node, culprit).get("ended"), "the culprit to be over on the page")
            wait_for(
                lambda: any(25 < used < 45 for used in had(node, neighbour)["used"][1:]),
                "a whole step with the neighbour's share",
            )
            assert set(had(node, neighbour)["guarantee"]) == {40}
            state = json.loads(get(node, "web.sock", "/api/v1/state"))
            assert [one["id"] for one in state["containers"]] == [neighbour.identifier]
            assert [(one["id"], one["kind"]) for one in state["violations"]] == [
                (one["container"], one["kind"]) for one in reported[:2]
            ]
            assert b"<title>Tidegate</title>" in get(node, "web.sock", "/")
            return delays

    expect_soon(play)


@pytest.mark.parametrize(
    "ways",
    [
        pytest.param(("own",), id="stranger"),
        pytest.param(("join", "own"), id="registered", marks=pytest.mark.slow),
    ],
)
def test_work_without_a_grant_is_reported_within_two_seconds(
    place: Place, ways: tuple[str, ...]
) -> None:
    def play() -> list[float]:
        with place() as node:
            neighbour = burner(node, "neighbour", compute="40")
            # Utilisation soon after a start is not counted, so the culprit pauses before it works.
            culprit = start(
                node, "culprit", *ways, "sleep:1500", "began", "burn:3000", "sleep:60000"
            )
            since = began(culprit)
            found = wait_for(lambda: violations(node, culprit).get("compute"), "compute")
            assert found["pid"] in pids_of(culprit, node)
            assert found["found"] >= 5
            assert set(violations(node, culprit)) == {
                "compute",
                *(["unregistered"] if ways == ("own",) else []),
            }
            wait_for(lambda: violations(node, culprit)["compute"]["ended"], "the end")
            assert len([one for one in events(node, "violation") if one["kind"] == "compute"]) == 1
            assert violations(node, neighbour) == {}
            return [found["began"] - since]

    expect_soon(play)


def test_a_registered_process_that_holds_more_than_its_quota_is_reported(place: Place) -> None:
    def play() -> list[float]:
        with place() as node:
            culprit = start(
                node, "culprit", "join", "own", f"take:{2 * GIB}", "began", "sleep:60000"
            )
            since = began(culprit)
            found = wait_for(lambda: violations(node, culprit).get("memory"), "memory")
            assert set(violations(node, culprit)) == {"memory"}
            return [found["began"] - since]

    expect_soon(play)


def test_memory_that_is_held_in_bursts_is_reported_and_stopped(place: Place) -> None:
    """Each burst is given back before it has been held for a second, so a single burst is not a violation."""
    with place(on_violation="stop") as node:
        culprit = start(
            node, "culprit", "join", "own", "began", f"bursts:{5 * GIB}", memory="1200Mi"
        )
        since = began(culprit)
        assert node.wait(culprit, WAIT_S) == 128 + signal.SIGKILL
        [stopped, *_] = wait_for(lambda: events(node, "violation-stopped"), "the event")
        [found] = events(node, "violation")
        assert (stopped["kind"], found["kind"]) == ("memory", "memory")
        assert logged_at(stopped) - since < SOON_S + 3
        # Memory that was promised to others is available.
        victim = start(node, "victim", "join", f"take:{10 * GIB}", memory="11Gi")
        assert node.wait(victim, WAIT_S) == 0, show_output(victim)


@pytest.mark.slow
@pytest.mark.alone
def test_honest_containers_are_not_accused(place: Place) -> None:
    """Six containers run at once: two that saturate the GPU, two that come and go, one with units
    of work that outlast their grants and are not waited for, and one that fills its quota. After
    that the governor stops answering, and the containers grant themselves the GPU.
    """
    with place(longest_ms=100) as node:
        burner(node, "one", compute="20")
        burner(node, "two", compute="20", **{"compute-limit": "60"})
        burner(node, "short-pauses", "--gap-us", "700000", compute="10")
        burner(node, "long-pauses", "--unit-us", "50000", "--gap-us", "2500000", compute="10")
        burner(node, "long", "--unit-us", "1500000", compute="10")
        # This container fills the part of its quota that a context leaves free.
        full = start(
            node, "full", "join", f"take:{1488 << 20}", "began", "sleep:60000", compute="5"
        )
        began(full)
        time.sleep(8)
        with node.frozen_governor():
            time.sleep(2.5)
        time.sleep(3)
        assert [one.name for one in node.running if violations(node, one)] == []
        assert events(node, "violation") == []
        assert len(node.list_containers()) == len(node.running) == 6
        long = [one for one in node.list_containers().values() if one["id"].endswith("-long")]
        reported = long[0]["devices"][0]
        # Without this the test would prove nothing: the container was charged more time than its
        # grants can last, so its work has outlasted them.
        assert reported["held_ns"] > reported["grants"] * 150_000_000


def ticks(container: Running) -> int:
    try:
        return (container.out / "ticks").stat().st_size
    except FileNotFoundError:
        return 0


def stands_still(container: Running) -> bool:
    """Return whether the container did nothing for a third of a second."""
    before = ticks(container)
    time.sleep(0.35)
    return ticks(container) == before > 0


@pytest.mark.slow
@pytest.mark.alone
def test_use_of_a_gpu_that_was_not_granted_is_shown(
    tmp_path: Path, build_dir: Path, require: Callable[..., None]
) -> None:
    require("gcc", "runc")
    with BenchNode(SimulatedWithStray(tmp_path, build_dir, devices=2)) as node:

        def told(config: dict[str, Any]) -> None:
            config["process"]["env"].append("CUDA_VISIBLE_DEVICES=1")

        command = ["/usr/bin/simgpu-workload", "--seconds", "60", "--out", "/out/progress.bin"]
        quota = {"memory": "2Gi", "compute": "20", "devices": "0"}
        lost = node.start("lost", [*command, "--memory", str(GIB)], quota, edit=told)

        def used() -> list[dict[str, Any]]:
            return [
                use for one in ask(node.config, "list")["containers"] for use in one["elsewhere"]
            ]

        wait_for(lambda: used() and used()[0]["memory"] > GIB, "use of the other GPU", 20)
        (one,) = used()
        assert (one["index"], len(events(node, "gpu-not-granted"))) == (1, 1)
        assert violations(node, lost) == {}
        done = subprocess.run(
            [sys.executable, "-m", "governor.cli", "ps", "--runtime-dir", str(node.runtime_dir)],
            cwd=ROOT, capture_output=True, text=True, check=True,
        )  # fmt: skip
        _, row, line = done.stdout.splitlines()
        assert row.endswith("uses GPU 1 (not its own)")
        assert line.startswith("not its own: ")
        lost.process.kill()


def test_throttling_freezes_for_longer_and_longer_and_thaws(place: Place) -> None:
    with place(on_violation="throttle") as node:
        neighbour = burner(node, "neighbour", compute="40")
        culprit = start(node, "culprit", "own", f"take:{3 * GIB}", "began", "tick")
        began(culprit)

        def is_frozen(container: Running) -> bool:
            return bool(node.list_containers()[container.identifier]["frozen"])

        def neighbour_works_alone() -> bool:
            before = units(neighbour)
            return stands_still(culprit) and units(neighbour) > before

        # On a slow machine the test may miss a freeze; the next one lasts longer.
        wait_for(lambda: is_frozen(culprit) and stands_still(culprit), "a freeze")
        assert not is_frozen(neighbour)
        wait_for(lambda: len(events(node, "container-frozen")) >= 3, "the third time")
        frozen, thawed = events(node, "container-frozen"), events(node, "container-thawed")
        assert [one["seconds"] for one in frozen[:3]] == [1, 2, 4]
        assert [one["why"] for one in thawed[:2]] == ["time", "time"]
        assert len(events(node, "violation")) == 2  # memory and unregistered, once each
        wait_for(neighbour_works_alone, "the neighbour to work while the culprit is frozen")
        # A runtime can end the container although it is frozen.
        since = time.monotonic()
        node.delete(culprit)
        assert culprit.process.poll() is not None
        assert time.monotonic() - since < 5
        wait_for(lambda: len(ask(node.config, "list")["containers"]) == 1, "its end")
        wait_for(lambda: not (node.runtime_dir / "frozen.json").exists(), "the record")


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGTERM, id="stops", marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, id="dies"),
    ],
)
def test_no_container_stays_frozen_after_the_governor_ends(
    place: Place, number: signal.Signals
) -> None:
    with place(on_violation="throttle") as node:
        culprit = start(node, "culprit", "own", f"take:{3 * GIB}", "began", "tick")
        began(culprit)
        record = node.runtime_dir / "frozen.json"
        # The second freeze lasts two seconds, and each later one longer. The test stops the
        # governor before that time ends, so its end cannot be what thaws the container.
        wait_for(
            lambda: len(events(node, "container-frozen")) >= 2 and record.exists(), "a long freeze"
        )
        node.stop_governor(number)
        if number == signal.SIGKILL:
            assert stands_still(culprit)
            node.start_governor()
            assert events(node, "container-thawed")[-1]["why"] == "left over"
        else:
            assert events(node, "container-thawed")[-1]["why"] == "stopping"
        assert not record.exists()
        assert not stands_still(culprit)


def test_a_container_that_its_runtime_paused_is_left_alone(place: Place) -> None:
    with place(on_violation="throttle") as node:
        culprit = start(node, "culprit", "own", f"take:{3 * GIB}", "sleep:500", "began", "tick")
        began(culprit)
        wait_for(lambda: events(node, "container-thawed"), "the end of the first time")
        # The governor observes the container for 2.5 s before the next freeze. On a slow machine
        # the test may miss that time; runc does not pause a frozen container.
        runc = ["runc", "--root", str(node.state_dir)]
        pause = [*runc, "pause", culprit.identifier]
        wait_for(lambda: subprocess.run(pause, check=False).returncode == 0, "a pause")
        n_frozen = len(events(node, "container-frozen"))
        wait_for(lambda: events(node, "violation-throttle-failed"), "a logged failure")
        assert events(node, "violation-throttle-failed")[-1]["error"] == "it is already frozen"
        assert stands_still(culprit)
        assert len(events(node, "container-frozen")) == n_frozen
        subprocess.run([*runc, "resume", culprit.identifier], check=True)


def test_stopping_kills_the_container(place: Place) -> None:
    with place(on_violation="stop") as node:
        neighbour = burner(node, "neighbour", compute="40")
        culprit = start(node, "culprit", "child", "own", "began", "tick")
        since = began(culprit)
        assert node.wait(culprit, WAIT_S) == 128 + signal.SIGKILL
        [stopped, *_] = wait_for(lambda: events(node, "violation-stopped"), "the event")
        assert stopped["kind"] == "unregistered"
        assert stopped["container"] == culprit.identifier
        assert logged_at(stopped) - since < SOON_S + 2
        wait_for(lambda: len(ask(node.config, "list")["containers"]) == 1, "its end")
        assert neighbour.process.poll() is None


def on_the_gpu(node: BenchNode, pids: list[int], seconds: float) -> float:
    """Return the percentage of the simulated GPU's time that the processes use in the next `seconds` seconds."""
    looks = []
    for pause in (seconds, 0):
        status = simgpu.status(node.machine.directory / "gpu0")
        busy = sum(context.busy for context in status.contexts if context.pid in pids)
        looks.append((status.now, busy))
        time.sleep(pause)
    (begun, before), (ended, after) = looks
    return 100 * (after - before) / (ended - begun)


def expect_quota(node: BenchNode, pids: list[int]) -> None:
    """Require that the processes get their quota of 20 %, and are neither frozen nor killed.

    A governor that is delayed switches them off late, and deducts that later: one of three windows
    suffices.
    """
    windows = []
    for _ in range(3):
        windows.append(on_the_gpu(node, pids, 4))
        if 15 < windows[-1] < 23:
            return
    pytest.fail(f"the quota is 20 %, and they had {windows}")


def test_limit_holds_a_process_that_bypasses_the_library_to_the_quota(place: Place) -> None:
    """The container has its own driver, endless kernels and a neighbour that leaves time unused.
    The container keeps running.
    """
    with place(on_violation="limit", scheduling="hardware") as node:
        neighbour = burner(node, "neighbour", compute="40")
        culprit = start(node, "culprit", "own", "began", "burn:60000", compute="20")
        began(culprit)
        [held] = wait_for(lambda: events(node, "process-held"), "it to be held")
        assert held["pid"] in pids_of(culprit, node)
        time.sleep(1)
        expect_quota(node, [held["pid"]])
        (listed,) = [
            c for c in ask(node.config, "list")["containers"] if c["id"] == culprit.identifier
        ]
        assert listed["devices"][0]["charged_ns"] > 0.15e9
        assert violations(node, culprit)["unregistered"]["ended"] is None
        assert violations(node, neighbour) == {}
        culprit_processes = pids_of(culprit, node)
        node.delete(culprit)
        wait_for(lambda: len(ask(node.config, "list")["containers"]) == 1, "its end")
        assert not [pid for pid in culprit_processes if Path(f"/proc/{pid}").exists()]


@pytest.mark.parametrize("joins", [False, True])
def test_a_program_that_bypasses_the_library_and_undoes_its_suspension_is_held_to_the_quota(
    place: Place, build_dir: Path, *, joins: bool
) -> None:
    """The driver lets processes of a container restore each other; here the test restores the
    program, which may have registered before.
    """
    with place(on_violation="limit", scheduling="hardware") as node:
        steps = [*(["join"] if joins else []), "own", "began", "burn:60000"]
        culprit = start(node, "culprit", *steps, compute="20")
        began(culprit)
        time.sleep(2)
        pids = pids_of(culprit, node)
        assert ask(node.config, "suspend", timeout=60, id=culprit.identifier)["processes"] == 1
        assert on_the_gpu(node, pids, 0.5) == 0
        driver = SimulatedDriver(build_dir)
        with driver.attached(node.machine.directory):
            for call in ("Restore", "Unlock"):
                for pid in pids:
                    driver.try_call(f"cuCheckpointProcess{call}", pid, None)
        wait_for(lambda: on_the_gpu(node, pids, 0.2) > 0, "work")
        time.sleep(1)
        expect_quota(node, pids)


def test_limit_reports_that_grants_divide_the_time(place: Place) -> None:
    with place(on_violation="limit") as node:
        culprit = start(node, "culprit", "own", "began", "sleep:60000")
        began(culprit)
        [failed] = wait_for(lambda: events(node, "violation-limit-failed"), "the line")
        assert failed["error"] == "grants divide the time of GPU 0"
        time.sleep(1)
        assert len(events(node, "violation-limit-failed")) == 1


def test_a_process_is_known_by_its_control_group_and_by_its_namespace(place: Place) -> None:
    """Under runc both identify the process; a process of the host matches neither."""
    with place() as node:
        container = start(node, "one", "began", "child", "sleep:60000")
        began(container)
        first, child = sorted(
            wait_for(lambda: len(p := pids_of(container, node)) == 2 and p, "two")
        )
        membership = cgroups.find_membership(first)
        assert membership.has_cgroups(cgroups.read_cgroups(child))
        assert membership.has_namespaces(cgroups.pid_namespaces(child))
        assert not membership.has_cgroups(cgroups.read_cgroups(os.getpid()))
        assert not membership.has_namespaces(cgroups.pid_namespaces(os.getpid()))
