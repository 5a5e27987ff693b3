"""The main job: containers under runc share a simulated GPU by quota, with the real hook and the real governor.

One node serves all tests of this file. The workload is a C program on the driver API. A second program, compiled
here, makes the queries that a program makes before it allocates.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import pytest

from bench.machine import TRIPLET, Simulated
from bench.node import BenchNode, Running, last_json
from bench.progress import read_stamps
from governor.client import ask
from libcontrol import layout
from tests.container.bundles import compile_c
from tests.container.nodes import (
    WAIT_S,
    begin,
    clear,
    directory,
    show_output,
    start_worker,
    units,
    wait_for,
    wait_ready,
)

MIB = 1 << 20
GIB = 1 << 30
MS = 1_000_000
CONTEXT = 520 * MIB  # default charge for a process's context
GRANTABLE = 16 * GIB - 512 * MIB  # the simulated GPU less the reserve

PROBE_C = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#define FIND(name) *(void **)&name = dlsym(cuda, #name)
static int (*cuInit)(unsigned), (*cuDeviceGet)(int *, int), (*cuDevicePrimaryCtxRetain)(void **, int);
static int (*cuCtxSetCurrent)(void *), (*cuMemAlloc_v2)(unsigned long long *, size_t);
static int (*cuMemGetInfo_v2)(size_t *, size_t *), (*cuDeviceTotalMem_v2)(size_t *, int);

static void must(int error, const char *call)
{
    if (error) {
        printf("%s: %d\n", call, error);
        exit(1);
    }
}

static void open_driver(void)
{
    void *cuda = dlopen("libcuda.so.1", RTLD_NOW), *context;
    int device;

    if (!cuda) {
        puts(dlerror());
        exit(1);
    }
    FIND(cuInit); FIND(cuDeviceGet); FIND(cuDevicePrimaryCtxRetain); FIND(cuCtxSetCurrent);
    FIND(cuMemAlloc_v2); FIND(cuMemGetInfo_v2); FIND(cuDeviceTotalMem_v2);
    must(cuInit(0), "cuInit");
    must(cuDeviceGet(&device, 0), "cuDeviceGet");
    must(cuDevicePrimaryCtxRetain(&context, device), "cuDevicePrimaryCtxRetain");
    must(cuCtxSetCurrent(context), "cuCtxSetCurrent");
}

static int show(size_t take)
{
    struct { unsigned long long total, free, used; } memory;
    int (*init)(void), (*handle)(unsigned, void **), (*info)(void *, void *);
    size_t total, free_bytes, of;
    unsigned long long address;
    Dl_info where;
    void *nvml, *device;

    open_driver();
    must(cuMemAlloc_v2(&address, take), "cuMemAlloc");
    must(cuDeviceTotalMem_v2(&total, 0), "cuDeviceTotalMem");
    must(cuMemGetInfo_v2(&free_bytes, &of), "cuMemGetInfo");
    nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    if (!nvml) {
        puts(dlerror());
        return 1;
    }
    *(void **)&init = dlsym(nvml, "nvmlInit_v2");
    *(void **)&handle = dlsym(nvml, "nvmlDeviceGetHandleByIndex_v2");
    *(void **)&info = dlsym(nvml, "nvmlDeviceGetMemoryInfo");
    must(init(), "nvmlInit");
    must(handle(0, &device), "nvmlDeviceGetHandleByIndex");
    must(info(device, &memory), "nvmlDeviceGetMemoryInfo");
    dladdr((void *)cuInit, &where);
    printf("{\"library\": \"%s\", \"total\": %zu, \"free\": %zu, \"of\": %zu, \"nvml_total\": %llu}\n",
           where.dli_fname, total, free_bytes, of, memory.total);
    return 0;
}

/*
 * Children allocate in turns, so that each gets some memory, until the driver refuses. They keep it
 * until /out/end exists.
 */
static int share(int children, size_t chunk)
{
    int pipes[16][2], answers[16][2], alive = children, sum = 0;

    for (int i = 0; i < children; i++) {
        if (pipe(pipes[i]) || pipe(answers[i]))
            return 1;
        if (fork())
            continue;
        open_driver();
        for (char go; read(pipes[i][0], &go, 1) == 1 && go;) {
            unsigned long long address;
            int error = cuMemAlloc_v2(&address, chunk);

            if (write(answers[i][1], &error, sizeof(error)) < 0)
                _exit(1);
        }
        while (access("/out/end", F_OK))
            usleep(2000);
        _exit(0);
    }
    printf("{\"taken\": [");
    for (int got[16] = {0}, full[16] = {0}; alive;) {
        for (int i = 0; i < children; i++) {
            int error = 0;

            if (full[i])
                continue;
            if (write(pipes[i][1], "1", 1) < 0 || read(answers[i][0], &error, sizeof(error)) <= 0)
                return 1;
            if (!error) {
                got[i]++;
                continue;
            }
            full[i] = error;
            alive--;
            if (write(pipes[i][1], "", 1) < 0)
                return 1;
        }
        for (int i = 0; !alive && i < children; i++)
            printf("%s[%d, %d]", i ? ", " : "", got[i], full[i]);
    }
    printf("]}\n");
    fclose(fopen("/out/full", "w"));
    for (int i = 0, status; i < children; i++) {
        wait(&status);
        sum |= status;
    }
    return sum != 0;
}

int main(int argc, char **argv)
{
    setvbuf(stdout, NULL, _IONBF, 0);
    if (argc == 3 && !strcmp(argv[1], "show"))
        return show(strtoull(argv[2], NULL, 10));
    if (argc == 4 && !strcmp(argv[1], "share"))
        return share(atoi(argv[2]), strtoull(argv[3], NULL, 10));
    return 2;
}
"""


@pytest.fixture(scope="module")
def node(
    tmp_path_factory: pytest.TempPathFactory, build_dir: Path, require: Callable[..., None]
) -> Iterator[BenchNode]:
    require("gcc", "runc")
    work = tmp_path_factory.mktemp("main")
    compile_c(PROBE_C, work / "probe", "-ldl")
    machine = Simulated(work, build_dir)
    machine.programs += [work / "probe", build_dir / "stress"]
    with BenchNode(machine) as made:
        yield made


@pytest.fixture(autouse=True)
def clean(node: BenchNode) -> Iterator[None]:
    yield
    clear(node)


def directories(node: BenchNode) -> set[str]:
    """Return the names of the governor's directories for containers."""
    return {path.name for path in (node.runtime_dir / "containers").iterdir()}


def refusal(node: BenchNode, name: str, **annotations: str) -> str:
    """Start a container that must not start, and return our line in runc's output."""
    container = start_worker(node, name, **annotations)
    assert node.wait(container, WAIT_S) != 0
    assert not (container.out / "begin.ready").exists()
    assert container.output.count("tidegate: ") == 1, container.output
    return container.output[container.output.index("tidegate: ") :]


def is_granted(node: BenchNode, container: Running) -> bool:
    """Return whether a container holds the GPU now while another waits, according to the page that the governor
    writes.
    """
    page = (directory(node, container) / "grant").read_bytes()
    offsets = layout.offsets(layout.GRANT_DEVICE)
    base = layout.grant_device(0)
    deadline, start = (
        int.from_bytes(page[base + offsets[name] :][:8], "little")
        for name in ("deadline_ns", "start_ns")
    )
    now = time.monotonic_ns()
    return start < now and now + MS < deadline < layout.OPEN


class Stall(threading.Thread):
    """Measures how long this machine delays a thread that sleeps for a millisecond, because other programs run
    here, too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.longest = 0
        self._end = threading.Event()

    def run(self) -> None:
        before = time.monotonic_ns()
        while not self._end.is_set():
            time.sleep(0.001)
            now = time.monotonic_ns()
            self.longest = max(self.longest, now - before - MS)
            before = now

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self.join()


@pytest.mark.parametrize("stage", ["createRuntime", "prestart"])
def test_a_container_runs_governed(node: BenchNode, stage: str) -> None:
    before = directories(node)
    arguments = [
        *node.machine.command("burn", inside=True),
        "--seconds", "0.5", "--memory", str(GIB), "--out", "/out/progress.bin", "--wait-file", "/out/begin",
    ]  # fmt: skip
    container = node.start(
        f"governed-{stage}", arguments, {"memory": "3Gi", "compute": "30"}, stage=stage
    )
    wait_ready(container)
    [seen] = [c for c in node.list_containers().values() if c["id"] == container.identifier]
    assert seen["confirmed"]
    assert len(seen["processes"]) == 1
    [device] = seen["devices"]
    # The context, the requested memory, and the ring of a few slots that the workload stamps into.
    # A context is charged its expected size at first, and soon its real size, which is 512 MiB
    # here.
    assert 512 * MIB + GIB <= device["memory_used"] <= CONTEXT + GIB + 4 * MIB
    assert device["memory_limit"] == 3 * GIB
    (container.out / "begin").touch()
    wait_for(
        lambda: node.list_containers()[container.identifier]["devices"][0]["launches"] > 0,
        "a counted launch",
    )
    assert node.wait(container, WAIT_S) == 0, container.output
    assert last_json(container.output)["result"] == "CUDA_SUCCESS"
    assert len(read_stamps(container.out / "progress.bin")) > 50
    wait_for(lambda: not node.list_containers(), "the container to leave the books")
    assert directories(node) == before


def test_a_program_sees_its_quota(node: BenchNode) -> None:
    container = node.start("shown", ["/usr/bin/probe", "show", str(100 * MIB)], {"memory": "2Gi"})
    assert node.wait(container, WAIT_S) == 0, container.output
    seen = last_json(container.output)
    assert seen.pop("library").endswith(f"/{TRIPLET}/glibc-hwcaps/x86-64-v2/libcuda.so.1")
    free = 2 * GIB - CONTEXT - 100 * MIB
    assert seen == {"total": 2 * GIB, "free": free, "of": 2 * GIB, "nvml_total": 2 * GIB}


def test_an_allocation_beyond_the_quota_affects_no_other_container(node: BenchNode) -> None:
    neighbour = start_worker(node, "neighbour")
    begin(neighbour)
    command = node.machine.command("burn", inside=True)
    greedy = node.start("greedy", [*command, "--allocate", str(2 * GIB)], {"memory": "1Gi"})
    assert node.wait(greedy, WAIT_S) == 1
    answer = last_json(greedy.output)
    assert (answer["result"], answer["code"]) == ("CUDA_ERROR_OUT_OF_MEMORY", 2)
    before = units(neighbour)
    wait_for(lambda: units(neighbour) > before + 100, "the neighbour to continue")
    # The whole quota, less the context, can be allocated.
    modest = node.start("modest", [*command, "--allocate", str(GIB - CONTEXT)], {"memory": "1Gi"})
    assert node.wait(modest, WAIT_S) == 0, modest.output
    assert neighbour.process.poll() is None


def unit_times(container: Running) -> list[int]:
    """Return when each unit of work of a container ended, in nanoseconds."""
    return [stamp.time for stamp in read_stamps(container.out / "progress.bin")]


def pause_after_kill(node: BenchNode, victim: Running, waiter: Running, how: str) -> int:
    """Kill the victim; return the longest time in the next second in which the waiter did nothing.

    The result is in nanoseconds, less the longest time by which this machine delayed the test
    itself.
    """
    pid = node.list_containers()[victim.identifier]["pid"]
    with Stall() as stall:
        if how == "runc-kill":
            killed = time.monotonic_ns()
            node.kill(victim)
        else:
            while not is_granted(node, victim):
                time.sleep(0)
            killed = time.monotonic_ns()
            os.kill(pid, signal.SIGKILL)
        done = time.monotonic_ns()
        node.wait(victim, WAIT_S)
        time.sleep(max(0, (done - time.monotonic_ns()) / 1e9 + 1.2))
    wait_for(lambda: unit_times(waiter)[-1] > done + 1000 * MS, "the stamps of that second")
    times = unit_times(waiter)
    first = next(i for i, at in enumerate(times) if at > killed) - 1
    last = next(i for i, at in enumerate(times) if at > done + 1000 * MS)
    window = times[first : last + 1]
    return max(b - a for a, b in itertools.pairwise(window)) - stall.longest


@pytest.mark.parametrize("how", ["runc-kill", "in-its-grant"])
def test_a_killed_holder_delays_no_other_container(node: BenchNode, how: str) -> None:
    waiter = start_worker(node, f"waiter-{how}", memory="4Gi", compute="40")
    rest = {"memory": str(GRANTABLE - 4 * GIB), "compute": "60"}
    pauses = []
    for number in range(3):  # a busy machine may delay the waiter itself
        victim = start_worker(node, f"victim-{how}-{number}", memory="4Gi", compute="60")
        begin(victim, waiter)
        assert "memory left to grant" in refusal(node, f"early-{how}-{number}", **rest)
        pauses.append(pause_after_kill(node, victim, waiter, how) / MS)
        wait_for(
            lambda one=victim: one.identifier not in node.list_containers(), "the victim's end"
        )
        if pauses[-1] < 50:
            break
    assert pauses[-1] < 50, f"pauses of {pauses} ms"
    # The victim's share is free again: the heir gets all but the waiter's memory and time.
    heir = start_worker(node, f"heir-{how}", **rest)
    begin(heir)
    assert (
        node.list_containers()[heir.identifier]["devices"][0]["memory_limit"] == GRANTABLE - 4 * GIB
    )
    assert waiter.process.poll() is None


def test_containers_outlive_the_governor(node: BenchNode) -> None:
    pair = [start_worker(node, name) for name in ("survivor-a", "survivor-b")]
    try:
        begin(*pair)
        pids = [node.list_containers()[container.identifier]["pid"] for container in pair]
        killed = time.monotonic_ns()
        node.stop_governor(signal.SIGKILL)
        time.sleep(2.4)
        for container, pid in zip(pair, pids, strict=True):
            wait_for(lambda c=container: unit_times(c)[-1] > killed + 2400 * MS, "its work")
            after = [at for at in unit_times(container) if at > killed]
            # A unit takes 0.5 ms, and each of the two has 40 %; a tenth of that is sufficient.
            assert len(after) > (after[-1] - killed) / (0.5 * MS) * 0.04
            os.kill(pid, signal.SIGTERM)
            assert node.wait(container, WAIT_S) == 0, container.output
            assert last_json(container.output)["result"] == "CUDA_SUCCESS"
    finally:
        node.stop_governor(signal.SIGKILL)
        node.start_governor()


def start_stress(node: BenchNode, name: str) -> Running:
    """Start threads that use the driver in every way; any error except a lack of memory ends the
    program.
    """
    arguments = ["/usr/bin/stress", "--threads", "4", "--wait-file", "/out/begin", "--seconds", "0"]
    return node.start(name, arguments, {"memory": "2Gi", "compute": "40"})


def test_no_call_fails_while_the_governor_is_slow_frozen_killed_or_replaced(
    node: BenchNode,
) -> None:
    pair = [start_stress(node, name) for name in ("rider-a", "rider-b")]
    wait_ready(*pair)
    draw = random.Random(1)  # noqa: S311
    try:
        for _ in range(12):  # slow, but too briefly to count as away
            with node.frozen_governor():
                time.sleep(draw.uniform(0.02, 0.7))
            time.sleep(draw.uniform(0.01, 0.1))
        with node.frozen_governor():  # away, and back
            time.sleep(2.5)
        time.sleep(0.5)
        launches = {
            one["id"]: one["devices"][0]["launches"]
            for one in ask(node.config, "list", timeout=10)["containers"]
        }
        assert all(launches[container.identifier] > 100 for container in pair)
        node.stop_governor(signal.SIGKILL)
        time.sleep(1.5)
        node.start_governor()
        late = start_worker(node, "boarded", compute="20")
        begin(late)
        time.sleep(1)
        for container in pair:
            assert container.process.poll() is None, show_output(container)
            (container.out / "begin").touch()
        for container in pair:
            assert node.wait(container, WAIT_S) == 0, container.output
            assert last_json(container.output)["calls"] > 1000
    finally:
        node.stop_governor(signal.SIGKILL)
        node.start_governor()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_without_a_governor_nothing_starts_and_nothing_is_left(
    node: BenchNode, number: int
) -> None:
    def mounts() -> set[str]:
        ours = (str(node.work), str(node.runtime_dir))
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
        return {line for line in lines if any(path in line for path in ours)}

    before, known = mounts(), directories(node)
    node.stop_governor(number)
    try:
        line = refusal(node, f"orphan-{number}")
        assert line.startswith(
            f"tidegate: the governor is not reachable at {node.runtime_dir}/governor.sock"
        )
        assert "start tidegate-governor" in line
        assert mounts() == before
        assert directories(node) == known
        assert not list(node.state_dir.glob("*orphan*"))
    finally:
        node.start_governor()
    container = start_worker(node, f"adopted-{number}")
    begin(container)


@pytest.mark.parametrize(
    ("annotations", "says"),
    [
        pytest.param({"memory": "256Mi"}, "a process's context alone takes", id="below-a-context"),
        pytest.param(
            {"memory": "13824Mi"},
            "GPU 0 has 13824 MiB of memory left to grant, but 13825 MiB was requested",
            id="memory",
        ),
        pytest.param(
            {"compute": "61"},
            "GPU 0 has 60 % of its time left to guarantee, but 61 % was requested",
            id="compute",
        ),
        pytest.param(
            {"devices": "7"},
            "annotation tidegate.gpu/devices names 7, but this node has 0",
            id="device",
        ),
    ],
)
def test_a_request_that_cannot_be_granted_is_refused(
    node: BenchNode, annotations: dict[str, str], says: str, request: pytest.FixtureRequest
) -> None:
    case = request.node.callspec.id
    if case == "memory":
        annotations = {"memory": "13825Mi"}  # 2 of 15.5 GiB are taken: this is 1 MiB too much
    neighbour = start_worker(node, f"first-{case}")
    wait_ready(neighbour)
    before, known = ask(node.config, "list")["containers"], directories(node)
    line = refusal(node, f"refused-{case}", **annotations)
    assert says in line
    after = ask(node.config, "list")["containers"]
    assert [c["id"] for c in after] == [c["id"] for c in before] == [neighbour.identifier]
    assert directories(node) == known


def test_processes_of_a_container_share_one_account(node: BenchNode) -> None:
    chunk = 64 * MIB
    room = (3 * GIB - 2 * 512 * MIB) // chunk
    for number in range(3):
        container = node.start(
            f"family-{number}", ["/usr/bin/probe", "share", "2", str(chunk)], {"memory": "3Gi"}
        )
        highest = 0
        with contextlib.suppress(KeyError):
            while not (container.out / "full").exists() and container.process.poll() is None:
                for one in node.list_containers().values():
                    highest = max(highest, one["devices"][0]["memory_used"])
                time.sleep(0.005)
        assert (container.out / "full").exists(), show_output(container)
        taken = wait_for(lambda c=container: last_json(show_output(c)), "its answer")["taken"]
        blocks = sum(n for n, _ in taken)
        [device] = node.list_containers()[container.identifier]["devices"]
        assert blocks <= room
        assert max(highest, device["memory_peak"]) <= 3 * GIB
        # Before it refuses, a process waits until the governor has measured what the contexts
        # really take, but not for long: if this machine delays the governor, there is less room.
        if blocks == room:
            break
        node.kill(container)
        node.wait(container, WAIT_S)
    assert blocks == room
    assert [error for _, error in taken] == [2, 2]  # CUDA_ERROR_OUT_OF_MEMORY
    assert all(n > 5 for n, _ in taken)

    def seen() -> dict[str, Any]:
        return node.list_containers()[container.identifier]

    full = 2 * 512 * MIB + room * chunk
    wait_for(lambda: seen()["devices"][0]["memory_used"] == full, "the governor's sample")
    assert len(seen()["processes"]) == 2
    [device] = seen()["devices"]
    assert device["memory_peak"] <= 3 * GIB
    assert device["refused"] == 2
    (container.out / "end").touch()
    assert node.wait(container, WAIT_S) == 0, container.output
