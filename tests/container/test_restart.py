"""A governor that is killed and restarted under load: nothing is lost, and containers notice only
the delay.

Real containers under runc on the simulated GPU, with the real hook and the real governor.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import sqlite3
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench import memory
from bench.machine import Simulated
from bench.node import BenchNode, Running, last_json
from bench.progress import RECORD, read_stamps
from governor.client import ask
from governor.container import container_key
from governor.state import NAME
from tests.container.bundles import compile_c
from tests.container.nodes import (
    WAIT_S,
    begin,
    clear,
    events,
    show_output,
    start_worker,
    units,
    wait_for,
)
from vdriver.nvml import Nvml

MIB = 1 << 20
GIB = 1 << 30
MS = 1_000_000
S = 1_000_000_000
UNIT_NS = 500_000  # of the workload
CHUNK = 64 * MIB
LIMIT = 3 * GIB  # of the processes that compete for memory

FILLER_C = r"""
/*
 * Allocates chunks until an allocation fails, and creates /out/full. Then, whenever /out/ask
 * appears, allocates one more chunk, frees one, allocates one again, has another process try to
 * create a context, and writes the results to /out/answer. Ends when /out/end exists.
 */
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#define FIND(name) *(void **)&name = dlsym(cuda, #name)
static int (*cuInit)(unsigned), (*cuDevicePrimaryCtxRetain)(void **, int), (*cuCtxSetCurrent)(void *);
static int (*cuMemAlloc_v2)(unsigned long long *, size_t), (*cuMemFree_v2)(unsigned long long);

static int begin(void)
{
    void *cuda = dlopen("libcuda.so.1", RTLD_NOW), *context;
    int error;

    FIND(cuInit); FIND(cuDevicePrimaryCtxRetain); FIND(cuCtxSetCurrent); FIND(cuMemAlloc_v2); FIND(cuMemFree_v2);
    if ((error = cuInit(0)) || (error = cuDevicePrimaryCtxRetain(&context, 0)))
        return error;
    return cuCtxSetCurrent(context);
}

int main(int argc, char **argv)
{
    size_t chunk = strtoull(argv[1], NULL, 10);
    unsigned long long at, last = 0;
    int n = 0, error, status;

    if (argc > 2) {
        error = begin();
        printf("begin: %d\n", error);
        return error ? error : 0;
    }
    if ((error = begin()))
        return 1;
    while (!(error = cuMemAlloc_v2(&at, chunk))) {
        last = at;
        n++;
    }
    printf("%d chunks, then %d\n", n, error);
    fflush(stdout);
    close(open("/out/full", O_CREAT | O_WRONLY, 0666));
    while (access("/out/end", F_OK)) {
        int more, freed, again, other;
        FILE *file;

        if (access("/out/ask", F_OK)) {
            usleep(2000);
            continue;
        }
        more = cuMemAlloc_v2(&at, chunk);
        freed = cuMemFree_v2(last);
        again = cuMemAlloc_v2(&last, chunk);
        if (!fork())
            execl("/proc/self/exe", "filler", argv[1], "begin", NULL);
        wait(&status);
        other = WEXITSTATUS(status);
        unlink("/out/ask");
        file = fopen("/out/answering", "w");
        fprintf(file, "[%d, %d, %d, %d]\n", more, freed, again, other);
        fclose(file);
        rename("/out/answering", "/out/answer");
    }
    return 0;
}
"""


@pytest.fixture(scope="module")
def node(
    tmp_path_factory: pytest.TempPathFactory, build_dir: Path, require: Callable[..., None]
) -> Iterator[BenchNode]:
    require("gcc", "runc")
    work = tmp_path_factory.mktemp("restart")
    compile_c(FILLER_C, work / "filler", "-ldl")
    machine = Simulated(work, build_dir)
    machine.programs += [build_dir / "stress", build_dir / "oom_stress", work / "filler"]
    with BenchNode(machine) as made, pytest.MonkeyPatch.context() as patch:
        # For the driver's NVML in this process.
        patch.setenv("SIMGPU_DIR", machine.environment["SIMGPU_DIR"])
        yield made


@pytest.fixture(autouse=True)
def clean(node: BenchNode) -> Iterator[None]:
    """Leave no container running or registered."""
    yield
    node.stop_governor()
    node.start_governor()
    clear(node)
    assert not list((node.runtime_dir / "containers").iterdir())


def restart(node: BenchNode, number: int = signal.SIGKILL, away_s: float = 0.0) -> None:
    node.stop_governor(number)
    time.sleep(away_s)
    node.start_governor()


def known(node: BenchNode) -> dict[str, dict[str, Any]]:
    return {one["id"]: one for one in ask(node.config, "list")["containers"]}


def assert_same_record(
    before: dict[str, Any], after: dict[str, Any], *, processes: bool = True
) -> None:
    """Check that the record of a container is unchanged."""
    names = ["id", "key", "pid", "confirmed", "compute", "compute_limit"]
    for name in [*names, "processes"] if processes else names:
        assert before[name] == after[name], name
    for old, new in zip(before["devices"], after["devices"], strict=True):
        assert (old["uuid"], old["memory_limit"]) == (new["uuid"], new["memory_limit"])


def shares(container: Running, windows: list[tuple[int, int]]) -> list[float]:
    """Return the percentage of the GPU that a container had in each window, according to the
    stamps of its units of work.
    """
    times = [stamp.time for stamp in read_stamps(container.out / "progress.bin")]
    return [
        100 * UNIT_NS * sum(1 for at in times if begin < at <= end) / (end - begin)
        for begin, end in windows
    ]


def load(node: BenchNode, name: str) -> tuple[Running, Running]:
    """Start a program that uses the driver in every way, and processes that compete for memory and are killed."""
    stress = node.start(
        f"stress-{name}",
        ["/usr/bin/stress", "--threads", "2", "--wait-file", "/out/begin", "--seconds", "0"],
        {"memory": "2Gi", "compute": "10"},
    )
    allocator = node.start(
        f"oom-{name}",
        ["/usr/bin/oom_stress", "--processes", "2", "--threads", "2", "--kill-every", "400",
         "--seconds", "3600", "--end-file", "/out/end"],
        {"memory": str(LIMIT), "compute": "5"},
    )  # fmt: skip
    wait_for((stress.out / "begin.ready").exists, "the stress to begin")
    return stress, allocator


def end_load(node: BenchNode, stress: Running, allocator: Running) -> None:
    """End the load, and check that no call of the two programs failed."""
    (stress.out / "begin").touch()
    (allocator.out / "end").touch()
    assert node.wait(stress, WAIT_S) == 0, stress.output
    assert last_json(stress.output)["calls"] > 100
    assert node.wait(allocator, 120) == 0, allocator.output
    fought = last_json(allocator.output)
    assert (fought["wrong"], fought["total"]) == (0, LIMIT), fought
    assert fought["killed"] > 0  # how many depends on the length of the test
    assert fought["refused"]


def kill_governor_repeatedly(node: BenchNode, times: int) -> None:
    """Kill the governor `times` times under all kinds of load, and check each container every time."""
    draw = random.Random(times)  # noqa: S311
    quotas = {"large": 45, "small": 20}
    burners = [
        start_worker(node, f"{name}-{times}", memory="1Gi", compute=str(quota))
        for name, quota in quotas.items()
    ]
    stress, allocator = load(node, str(times))
    begin(*burners)
    all_containers = [*burners, stress, allocator]
    wait_for(lambda: len(known(node)) == len(all_containers), "all to be registered")
    before = known(node)
    windows = []
    for _ in range(times):
        node.stop_governor(signal.SIGKILL)
        # Shorter and longer than the time after which the library considers the governor away.
        time.sleep(draw.choice((0, 0, 0, 0, 0.3, 1.5)))
        node.start_governor()
        returned = time.monotonic_ns()
        after = known(node)
        assert set(after) == set(before)
        for identifier, old in before.items():
            # The allocator's processes come and go.
            assert_same_record(old, after[identifier], processes=identifier != allocator.identifier)
        windows.append((returned + S, returned + 2 * S))
        time.sleep(2.1)
        for container in all_containers:
            assert container.process.poll() is None, show_output(container)
    end_load(node, stress, allocator)
    for container, quota in zip(burners, quotas.values(), strict=True):
        node.kill(container)
        node.wait(container, WAIT_S)
        found = shares(container, windows)
        # The processes' threads share two cores here: the shares are just as low without a restart.
        assert statistics.fmean(found) > 0.3 * quota, found
        assert max(found) < quota + 5, found


def test_nothing_is_lost_if_the_governor_is_killed_three_times_under_load(node: BenchNode) -> None:
    kill_governor_repeatedly(node, 3)


@pytest.mark.slow
@pytest.mark.alone
def test_nothing_is_lost_if_the_governor_is_killed_a_hundred_times_under_load(
    node: BenchNode,
) -> None:
    kill_governor_repeatedly(node, 100)


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_shares_are_right_again_within_a_second(node: BenchNode, number: int) -> None:
    quotas = {"half": 50, "quarter": 25}
    pair = [
        start_worker(node, f"{name}-{number}", compute=str(quota)) for name, quota in quotas.items()
    ]
    begin(*pair)
    time.sleep(0.5)
    right, all_found = 0, []
    for n, away_s in enumerate(itertools.cycle((0, 0.2, 1.5, 0))):
        restart(node, number, away_s)
        window = (time.monotonic_ns() + S, time.monotonic_ns() + 2 * S)
        time.sleep(2.2)
        found = [shares(container, [window])[0] for container in pair]
        all_found.append(found)
        right += all(abs(one - q) < 3 for one, q in zip(found, quotas.values(), strict=True))
        # Other programs run on this machine, and may disturb a window.
        if n >= 3 and right >= 3:
            break
        assert n < 12, all_found
    assert {e["containers"] for e in events(node, "governor-started")[-4:]} == {2}


def ask_filler(container: Running) -> list[int]:
    """Have the filler make four attempts, and return their results.

    The filler allocates one more chunk, frees one, allocates one again, and creates a context in
    another process.
    """
    (container.out / "ask").touch()
    wait_for((container.out / "answer").exists, "an answer")
    found = json.loads((container.out / "answer").read_text())
    (container.out / "answer").unlink()
    return found


@pytest.mark.slow
def test_a_full_container_stays_full(node: BenchNode) -> None:
    container = node.start("full", ["/usr/bin/filler", str(CHUNK)], {"memory": "2Gi"})
    wait_for((container.out / "full").exists, "the container to be full")
    output, expected = (
        container.out.parent / "output",
        f"{(2 * GIB - 512 * MIB) // CHUNK} chunks, then 2\n",
    )
    # The output passes through the runtime, and may arrive after the file exists.
    wait_for(lambda: output.read_text() == expected, "what it says")
    # The results: out of memory, freed, allocated again, and no context for another process.
    assert ask_filler(container) == [2, 0, 0, 2]

    def used() -> int:
        return int(known(node)[container.identifier]["devices"][0]["memory_used"])

    wait_for(lambda: used() == 2 * GIB, "the last look")
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL):
        node.stop_governor(number)
        assert ask_filler(container)[:3] == [2, 0, 0]  # while there is no governor
        node.start_governor()
        for _ in range(5):  # at once, and during its first sample
            assert ask_filler(container)[:3] == [2, 0, 0]
            assert 2 * GIB - 16 * MIB <= used() <= 2 * GIB
        assert ask_filler(container) == [2, 0, 0, 2]
        wait_for(lambda: used() == 2 * GIB, "the first look")
    assert known(node)[container.identifier]["devices"][0]["memory_peak"] == 2 * GIB
    (container.out / "end").touch()
    assert node.wait(container, WAIT_S) == 0


def execute(node: BenchNode, container: Running, name: str, seconds: int) -> subprocess.Popen[str]:
    """Start one more process in a container; its PID is written to `name`.pid, its output to `name`.log."""
    with (container.out / f"{name}.log").open("w") as log:
        return subprocess.Popen(
            [
                node.runtime, "--root", str(node.state_dir), "exec",
                "--pid-file", str(container.out / f"{name}.pid"), container.identifier,
                *node.machine.command("burn", inside=True),
                "--seconds", str(seconds), "--out", f"/out/{name}.bin",
            ],
            stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip


def test_containers_and_processes_end_and_start_while_the_governor_is_away(node: BenchNode) -> None:
    ended = start_worker(node, "ended", memory="8Gi", compute="60")
    stays = start_worker(node, "stays", memory="2Gi", compute="30")
    begin(ended, stays)
    first = known(node)[stays.identifier]["processes"]
    known_to_both = execute(node, stays, "early", 600)
    wait_for(lambda: len(known(node)[stays.identifier]["processes"]) == 2, "one more")
    node.stop_governor(signal.SIGKILL)
    node.kill(ended)
    node.wait(ended, WAIT_S)
    os.kill(int((stays.out / "early.pid").read_text()), signal.SIGKILL)
    known_to_both.wait(WAIT_S)
    # These processes wait for the next governor, and one of them ends before it starts.
    inside = execute(node, stays, "inside", 600)
    gone = execute(node, stays, "gone", 600)
    wait_for((stays.out / "gone.pid").exists, "it to start")
    time.sleep(0.5)
    os.kill(int((stays.out / "gone.pid").read_text()), signal.SIGKILL)
    gone.wait(WAIT_S)
    node.start_governor()
    after = known(node)
    assert set(after) == {stays.identifier}
    assert set(first) <= set(after[stays.identifier]["processes"])
    directories = [path.name for path in (node.runtime_dir / "containers").iterdir()]
    assert directories == [container_key(stays.identifier)]
    pid = int((stays.out / "inside.pid").read_text())
    wait_for(lambda: pid in known(node)[stays.identifier]["processes"], "the second process")
    progress, read_log = stays.out / "inside.bin", (stays.out / "inside.log").read_text
    wait_for(lambda: progress.exists() and progress.stat().st_size > 100 * RECORD.size, "its work")
    os.kill(pid, signal.SIGTERM)
    assert inside.wait(WAIT_S) == 0, read_log()
    assert "enforces its quota without it" not in read_log()
    assert last_json(read_log())["units"] > 100
    wait_for(lambda: known(node)[stays.identifier]["processes"] == first, "the others to be gone")
    wait_for(
        lambda: known(node)[stays.identifier]["devices"][0]["memory_used"] < GIB, "their memory"
    )
    # The dead container's share is free.
    heir = start_worker(node, "heir", memory="8Gi", compute="60")
    begin(heir)


def test_a_changed_quota_survives_a_restart(node: BenchNode) -> None:
    container = start_worker(node, "changed", compute="60")
    begin(container)
    ask(node.config, "set", id=container.identifier, memory=3 * GIB, compute=20, compute_limit=30)
    before = known(node)
    restart(node)
    after = known(node)
    assert_same_record(before[container.identifier], after[container.identifier])
    assert after[container.identifier]["compute_limit"] == 30
    other = start_worker(node, "other", compute="80")
    begin(other)
    time.sleep(1.2)
    # The share is computed as a fraction of the sum of both, because other tests take processor
    # time from both, and in some windows more from one of them.
    parts = []
    while not parts or (abs(parts[-1] - 20) >= 4 and len(parts) < 5):
        now = time.monotonic_ns()
        time.sleep(2.1)
        mine, others = (shares(one, [(now, now + 2 * S)])[0] for one in (container, other))
        assert mine < 34  # with lent time, but never above its latest cap
        parts.append(100 * mine / (mine + others))
    assert abs(parts[-1] - 20) < 4, parts


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_start_while_the_governor_is_restarted_waits_for_it(node: BenchNode, number: int) -> None:
    node.stop_governor(number)
    container = start_worker(node, f"meanwhile-{number}")
    time.sleep(0.5)
    node.start_governor()
    begin(container)
    assert set(known(node)) == {container.identifier}


def test_a_start_whose_admission_is_interrupted_fails_and_leaves_nothing(node: BenchNode) -> None:
    os.kill(node.governor_pid, signal.SIGSTOP)
    container = start_worker(node, "early")
    time.sleep(0.5)
    node.stop_governor(signal.SIGKILL)
    assert node.wait(container, WAIT_S) != 0
    # The hook waited for the next governor, and gave up before it started.
    assert "tidegate: the governor is not reachable" in container.output, container.output
    node.start_governor()
    assert known(node) == {}
    assert list((node.runtime_dir / "containers").iterdir()) == []


def damage(node: BenchNode) -> None:
    file = node.work / "state" / NAME
    file.write_bytes(b"what a disk may do " * 300)
    file.with_name(f"{NAME}-wal").unlink(missing_ok=True)


def test_a_damaged_database_is_rebuilt_from_running_containers(node: BenchNode) -> None:
    pair = [start_worker(node, "a", compute="50"), start_worker(node, "b", compute="25")]
    stress, allocator = load(node, "damaged")
    begin(*pair)
    ask(node.config, "set", id=pair[1].identifier, compute=30, compute_limit=40)
    wait_for(lambda: len(known(node)) == 4, "all to be registered")
    before = known(node)
    node.stop_governor(signal.SIGKILL)
    # The directory of a container that has ended and that is recorded nowhere.
    (node.runtime_dir / "containers" / "0123456789abcdef").mkdir()
    damage(node)
    node.start_governor()
    after = known(node)
    assert set(after) == set(before)
    for identifier, old in before.items():
        assert_same_record(old, after[identifier], processes=identifier != allocator.identifier)
    [said] = events(node, "database-damaged")
    assert said["level"] == "error"
    assert Path(said["moved_to"]).read_bytes().startswith(b"what a disk may do")
    assert len(events(node, "container-recovered")) == 4
    # The rebuilt records are also stored.
    restart(node)
    assert set(known(node)) == set(before)
    for identifier, old in before.items():
        assert_same_record(
            old, known(node)[identifier], processes=identifier != allocator.identifier
        )
    assert len(events(node, "database-damaged")) == 1
    end_load(node, stress, allocator)


def test_a_lost_process_row_is_found_by_its_slot(node: BenchNode) -> None:
    """The database is in an older state, which lacks a process, as if its log had been
    truncated.
    """
    container = start_worker(node, "forgotten")
    begin(container)
    before = known(node)
    node.stop_governor(signal.SIGKILL)
    with contextlib.closing(sqlite3.connect(node.work / "state" / NAME)) as db:
        assert db.execute("DELETE FROM processes").rowcount == 1
        db.commit()
    node.start_governor()
    assert_same_record(before[container.identifier], known(node)[container.identifier])

    def work_of_a_second() -> int:
        at = units(container)
        time.sleep(1)
        return units(container) - at

    # The container's 40 % are 800 units in a second; a busy machine may delay it.
    assert any(work_of_a_second() > 400 for _ in range(5))


@pytest.mark.slow
def test_a_process_started_long_after_the_governor_was_killed_is_taken_over(
    node: BenchNode,
) -> None:
    container = start_worker(node, "patient")
    begin(container)
    node.stop_governor(signal.SIGKILL)
    try:
        time.sleep(11)
        alone = execute(node, container, "alone", 4)
        wait_for((container.out / "alone.bin").exists, "it to begin")
        time.sleep(1)
    finally:
        node.start_governor()
    pid = int((container.out / "alone.pid").read_text())
    wait_for(lambda: pid in known(node)[container.identifier]["processes"], "it to be registered")
    time.sleep(0.5)
    # The governor counts what the process launched and allocated while there was no governor.
    (device,) = known(node)[container.identifier]["devices"]
    assert (device["contexts"], device["memory_used"] >= GIB) == (2, True)
    assert alone.wait(WAIT_S) == 0
    log = (container.out / "alone.log").read_text()
    assert last_json(log)["units"] > 100
    assert "this process enforces its quota without it" in log
    assert "the governor is back" in log
    wait_for(
        lambda: pid not in known(node)[container.identifier]["processes"], "the end of the process"
    )


@pytest.mark.slow
def test_the_memory_quota_holds_while_governors_come_and_go(node: BenchNode) -> None:
    with Nvml(node.machine.build / "simgpu" / "libnvidia-ml.so.1") as nvml:
        uuid = nvml.gpus()[0].uuid
        before = nvml.memory_used(uuid) or 0
        allocator = node.start(
            "fought",
            ["/usr/bin/oom_stress", "--processes", "4", "--threads", "4", "--kill-every", "300", "--seconds", "40"],
            {"memory": str(LIMIT), "compute": "100"},
        )  # fmt: skip
        wait_for(lambda: any(one["processes"] for one in known(node).values()), "it to begin")
        samples: list[tuple[float, int]] = []
        draw = random.Random(3)  # noqa: S311
        end = time.monotonic() + 35
        while time.monotonic() < end:
            node.stop_governor(signal.SIGKILL)
            node.start_governor()
            until = time.monotonic() + draw.uniform(0.1, 2)
            while time.monotonic() < until:
                samples.append((time.monotonic(), (nvml.memory_used(uuid) or 0) - before))
                time.sleep(0.005)
    assert node.wait(allocator, 60) == 0, allocator.output
    fought = last_json(allocator.output)
    assert (fought["wrong"], fought["total"]) == (0, LIMIT), fought
    # Memory that belongs to no process (the driver's part of a context) is not in a quota: see bench/memory.py.
    most = LIMIT + 4 * (unattributed := 8 * MIB)
    assert memory.longest_stretch(samples, most) < memory.STRETCH_S, unattributed
