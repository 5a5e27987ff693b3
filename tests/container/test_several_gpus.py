"""A node with several GPUs: containers get GPUs that are close to each other, and a quota on each
of them.

The node has four simulated GPUs in two pairs with NVLink, 0 with 3 and 1 with 2, so that the pairs
do not follow from the order of the indices.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.machine import Simulated
from bench.node import BenchNode, Running, last_json
from governor import cli
from governor.client import ask
from simgpu import simgpu
from tests.container.bundles import compile_c
from tests.container.nodes import WAIT_S, clear, directory, show_output, wait_for

MIB = 1 << 20
GIB = 1 << 30
UUIDS = [f"GPU-{simgpu.device_uuid(1, index)}" for index in range(4)]

PROBE_C = r"""
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static void *cuda;
static double seconds;
static struct use {
    int device;
    void *context;
    size_t total, free, taken, units;
    int error;
} uses[8];

static void must(int error, const char *call)
{
    if (error) {
        printf("%s: %d\n", call, error);
        exit(1);
    }
}

static int (*find(const char *name))()
{
    int (*found)() = (int (*)())dlsym(cuda, name);

    must(!found, name);
    return found;
}

static double now(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}

/* Allocate all the memory of a device that is available. */
static void fill(struct use *use)
{
    int (*allocate)(unsigned long long *, size_t) = (int (*)(unsigned long long *, size_t))find("cuMemAlloc_v2");
    int (*info)(size_t *, size_t *) = (int (*)(size_t *, size_t *))find("cuMemGetInfo_v2");
    unsigned long long address;

    must(info(&use->free, &use->total), "cuMemGetInfo");
    while (!(use->error = allocate(&address, 64 << 20)))
        use->taken += 64 << 20;
}

/* Kernels of 0.5 ms, eight of them at a time. */
static void *work(void *data)
{
    int (*launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **,
                  void **) = (void *)find("cuLaunchKernel");
    int (*load)(void **, const void *) = (void *)find("cuModuleLoadData");
    int (*get)(void **, void *, const char *) = (void *)find("cuModuleGetFunction");
    unsigned long long ns = 500000;
    void *parameters[] = {&ns}, *module, *function;
    struct use *use = data;
    double end = now() + seconds;

    must(find("cuCtxSetCurrent")(use->context), "cuCtxSetCurrent");
    must(load(&module, "image"), "cuModuleLoadData");
    must(get(&function, module, "burn"), "cuModuleGetFunction");
    while (now() < end) {
        for (int i = 0; i < 8; i++, use->units++)
            must(launch(function, 1, 1, 1, 1, 1, 1, 0, NULL, parameters, NULL), "cuLaunchKernel");
        must(find("cuCtxSynchronize")(), "cuCtxSynchronize");
    }
    return NULL;
}

int main(int argc, char **argv)
{
    pthread_t threads[8];
    double begin;
    char own[1024] = "";
    FILE *file;
    int n;

    /* Without the variable, does what a program that does not know its GPUs has to do. */
    if (!getenv("CUDA_VISIBLE_DEVICES")) {
        file = fopen("/run/tidegate/devices", "r");
        must(!file || !fgets(own, sizeof(own), file), "/run/tidegate/devices");
        own[strcspn(own, "\n")] = 0;
        setenv("CUDA_VISIBLE_DEVICES", own, 1);
    }
    cuda = dlopen("libcuda.so.1", RTLD_NOW);
    must(!cuda, "dlopen");
    must(find("cuInit")(0), "cuInit");
    must(find("cuDeviceGetCount")(&n), "cuDeviceGetCount");
    for (int i = 0; i < n; i++) {
        must(find("cuDeviceGet")(&uses[i].device, i), "cuDeviceGet");
        must(find("cuDevicePrimaryCtxRetain")(&uses[i].context, uses[i].device), "cuDevicePrimaryCtxRetain");
        must(find("cuCtxSetCurrent")(uses[i].context), "cuCtxSetCurrent");
        if (!strcmp(argv[1], "fill"))
            fill(&uses[i]);
    }
    if (argc > 2) {
        while (access("/out/begin", F_OK))
            usleep(2000);
        seconds = atof(argv[2]);
    }
    begin = now();
    for (int i = 0; seconds && i < n; i++)
        pthread_create(&threads[i], NULL, work, &uses[i]);
    for (int i = 0; seconds && i < n; i++)
        pthread_join(threads[i], NULL);
    printf("{\"seconds\": %f, \"devices\": [", now() - begin);
    for (int i = 0; i < n; i++)
        printf("%s{\"total\": %zu, \"free\": %zu, \"taken\": %zu, \"error\": %d, \"units\": %zu}", i ? ", " : "",
               uses[i].total, uses[i].free, uses[i].taken, uses[i].error, uses[i].units);
    puts("]}");
    fflush(stdout);
    if (!strcmp(argv[1], "fill")) {
        fclose(fopen("/out/full", "w"));
        while (access("/out/end", F_OK))
            usleep(2000);
    }
    return 0;
}
"""


class Pairs(Simulated):
    """Four GPUs in two pairs; a container sees those of CUDA_VISIBLE_DEVICES."""

    visible: str | None = None

    def spec(self) -> dict[str, Any]:
        """Return the specification, with CUDA_VISIBLE_DEVICES set to `visible`."""
        env = [] if self.visible is None else [f"CUDA_VISIBLE_DEVICES={self.visible}"]
        return {**super().spec(), "env": env}


@pytest.fixture(scope="module")
def node(
    tmp_path_factory: pytest.TempPathFactory, build_dir: Path, require: Callable[..., None]
) -> Iterator[BenchNode]:
    require("gcc", "runc")
    work = tmp_path_factory.mktemp("several")
    compile_c(PROBE_C, work / "probe", "-ldl", "-lpthread", "-w")
    places = ["0/0/0/0", "1/0/0/0", "1/1/0/0", "0/1/0/0"]
    options = [word for place in places for word in ("--place", place)]
    options += ["--nvlink", "0-3=4", "--nvlink", "1-2=4"]
    machine = Pairs(work, build_dir, devices=4, options=options)
    machine.programs.append(work / "probe")
    with BenchNode(machine, settings={"placement": "topology"}) as made:
        yield made


@pytest.fixture(autouse=True)
def clean(node: BenchNode) -> Iterator[None]:
    yield
    clear(node)


def start(
    node: BenchNode,
    name: str,
    *arguments: str,
    visible: list[int] | None = None,
    **annotations: str,
) -> Running:
    """Start the probe, which uses its own GPUs, or those of the node that `visible` names."""
    assert isinstance(node.machine, Pairs)
    node.machine.visible = visible and ",".join(UUIDS[index] for index in visible)
    named = {key.replace("_", "-"): value for key, value in annotations.items()}
    return node.start(name, ["/usr/bin/probe", *arguments], {"memory": "2Gi", **named})


def seen(node: BenchNode, container: Running) -> list[dict[str, Any]]:
    """Return what the governor reports about a container's GPUs, as soon as it is registered."""
    wait_for(
        lambda: (
            container.identifier in node.list_containers() or container.process.poll() is not None
        ),
        "a container",
    )
    assert container.identifier in node.list_containers(), show_output(container)
    devices: list[dict[str, Any]] = node.list_containers()[container.identifier]["devices"]
    return devices


def indices(node: BenchNode, container: Running) -> list[int]:
    return [device["index"] for device in seen(node, container)]


def gpus(node: BenchNode) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = ask(node.config, "gpus")["gpus"]
    return found


def finish(node: BenchNode, container: Running, *, warnings: int = 0) -> list[dict[str, Any]]:
    """Let a probe end, and return what it reports about the GPUs that it saw."""
    (container.out / "end").touch()
    (container.out / "begin").touch()
    assert node.wait(container, WAIT_S) == 0, container.output
    assert container.output.count("tidegate: ") == warnings
    devices: list[dict[str, Any]] = last_json(container.output)["devices"]
    return devices


def taken(container: Running) -> list[int]:
    """Return how many bytes a probe took on each of its GPUs, once they are full."""
    answer = wait_for(lambda: last_json(show_output(container)), "full GPUs")
    return [device["taken"] for device in answer["devices"]]


def fill(node: BenchNode, start_one: Callable[[str], Running], room: list[int]) -> Running:
    """Start up to three probes, until one fills its GPUs, and return it.

    `room` is how many bytes it has to take on each GPU. If this machine delays the governor by a
    second, the library does not wait until the contexts are measured, and a probe may get less. No
    probe may get more.
    """
    for name in ("first", "second", "third"):
        container = start_one(name)
        found = taken(container)
        assert all(one <= most for one, most in zip(found, room, strict=True)), found
        if found == room:
            return container
        node.kill(container)
        node.wait(container, WAIT_S)
        wait_for(lambda c=container: c.identifier not in node.list_containers(), "its end")
    pytest.fail(f"a probe took {found} bytes, and should have taken {room}")


def test_each_of_two_gpus_has_a_memory_quota(node: BenchNode) -> None:
    container = fill(
        node,
        lambda name: start(node, f"memory-{name}", "fill", count="2", compute="30"),
        [1536 * MIB] * 2,
    )
    assert indices(node, container) == [0, 3]

    def held() -> list[int]:
        return [device["memory_used"] for device in seen(node, container)]

    assert max(held()) <= 2 * GIB
    wait_for(lambda: held() == [2 * GIB] * 2, "the governor to account for the memory")
    shown = finish(node, container)
    assert len(shown) == 2
    for device in shown:
        assert device["total"] == 2 * GIB
        # Less the context: 512 MiB as the driver reports it, 520 MiB until that is known.
        assert 2 * GIB - 520 * MIB <= device["free"] <= 2 * GIB - 512 * MIB
        assert device["error"] == 2  # CUDA_ERROR_OUT_OF_MEMORY


def test_one_process_is_governed_on_both_of_its_gpus(node: BenchNode) -> None:
    container = start(node, "time", "work", "4", count="2", compute="30")
    beside = start(node, "beside", "work", "4", devices="3", compute="50")
    assert (indices(node, container), indices(node, beside)) == ([0, 3], [3])
    (beside.out / "begin").touch()
    both = finish(node, container)
    assert len(both) == 2
    [other] = finish(node, beside)
    length = last_json(container.output)["seconds"]
    for device in both:
        # The container gets 30 % and no more, also on the GPU where it is alone.
        assert 0.05 < device["units"] * 0.0005 / length < 0.36
    assert 0.05 < other["units"] * 0.0005 / last_json(beside.output)["seconds"] < 0.58


def test_a_program_that_sees_one_of_two_gpus_uses_the_quota_of_that_one(node: BenchNode) -> None:
    container = fill(
        node,
        lambda name: start(node, f"one-{name}", "fill", visible=[0], devices="3,0", compute="10"),
        [1536 * MIB],
    )
    assert indices(node, container) == [3, 0]
    wait_for(
        lambda: [d["memory_used"] for d in seen(node, container)] == [0, 2 * GIB],
        "the governor to account for the memory",
    )
    [device] = finish(node, container)
    assert device["total"] == 2 * GIB


def test_the_file_of_gpus_has_the_requested_order(node: BenchNode) -> None:
    container = start(node, "order", "fill", devices="2,0", compute="10")
    listed = directory(node, container) / "devices"
    assert indices(node, container) == [2, 0]
    assert listed.read_text() == f"{UUIDS[2]},{UUIDS[0]}\n"
    wait_for((container.out / "full").exists, "full GPUs")
    assert [device["total"] for device in finish(node, container)] == [2 * GIB, 2 * GIB]


def test_a_program_on_a_gpu_that_was_not_granted_gets_a_message(node: BenchNode) -> None:
    container = start(node, "elsewhere", "work", "1", visible=[1, 0, 3], devices="0", compute="10")
    assert indices(node, container) == [0]
    assert len(finish(node, container, warnings=1)) == 3
    assert (
        "tidegate: this process uses a GPU that was not granted to its container, and is not "
        "governed there: set CUDA_VISIBLE_DEVICES to the value in /run/tidegate/devices\n"
    ) in container.output


def test_a_single_gpu_is_taken_from_a_broken_pair_first(node: BenchNode) -> None:
    names = iter("abcdef")

    def place(**annotations: str) -> list[int]:
        return indices(node, start(node, f"place-{next(names)}", "work", "1", **annotations))

    assert place(compute="60") == [0]
    assert place(compute="60") == [3]  # its pair is already broken
    assert place(count="2", compute="60") == [1, 2]
    assert place(compute="40") == [0]  # as full as GPU 3, and with a lower index
    refused = start(node, "refused", "work", "1", count="2", compute="50")
    assert node.wait(refused, WAIT_S) != 0
    assert (
        "tidegate: 2 of 4 GPUs were requested, but none has room: "
        "GPU 1 has 40 % of its time left to guarantee, but 50 % was requested (10 % short), and 3 others "
        "are short by as much or more, although all GPUs together have 120 %; ask for 40 % of the time at most, or wait until a container ends"
    ) in refused.output


def test_the_table_of_gpus_shows_what_is_left_and_their_connections(
    node: BenchNode, capsys: pytest.CaptureFixture[str]
) -> None:
    container = start(node, "table", "work", "1", count="2", memory="4Gi", compute="30")
    assert indices(node, container) == [0, 3]
    config = node.work / "config.yaml"
    cli.main(["check", "--config", str(config)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[lines.index("placement: topology") + 1 :] == [
        "GPU  NAME                    MEMORY LEFT         TIME LEFT  STRATEGY   SCHEDULING  CONTAINERS  NUMA  GPU0  GPU1  GPU2  GPU3",
        "0    Tidegate Simulated GPU  11776 of 15872 MiB  70 %       timeslice  gate        1           0     -     SYS   SYS   NV4",
        "1    Tidegate Simulated GPU  15872 of 15872 MiB  100 %      timeslice  gate        0           1     SYS   -     NV4   SYS",
        "2    Tidegate Simulated GPU  15872 of 15872 MiB  100 %      timeslice  gate        0           1     SYS   NV4   -     SYS",
        "3    Tidegate Simulated GPU  11776 of 15872 MiB  70 %       timeslice  gate        1           0     NV4   SYS   SYS   -",
    ]
    cli.main(["check", "--config", str(config), "--json"])
    shown = json.loads(capsys.readouterr().out)
    assert shown["gpus"] == gpus(node)
    assert shown["gpus"][3]["routes"][0] == {"to": 0, "nvlinks": 4, "pcie": "NODE"}


@pytest.mark.slow
@pytest.mark.alone
def test_a_gpu_that_falls_off_the_bus_is_passed_over_until_it_is_back(node: BenchNode) -> None:
    assert isinstance(node.machine, Pairs)
    path = node.machine.directory / "gpu0"
    simgpu.set_lost(path, lost=True)
    try:
        wait_for(lambda: gpus(node)[0]["lost"], "the governor to notice")
        container = start(node, "after", "work", "1", count="2")
        assert indices(node, container) == [1, 2]
        refused = start(node, "named", "work", "1", devices="0")
        assert node.wait(refused, WAIT_S) != 0
        assert "GPU 0 does not answer: GPU is lost" in refused.output
        finish(node, container)
    finally:
        simgpu.set_lost(path, lost=False)
    wait_for(lambda: gpus(node)[0]["lost"] is None, "the governor to notice")
    assert indices(node, start(node, "back", "work", "1", count="2")) == [0, 3]


def test_a_gpu_that_is_lost_at_the_start_does_not_block_the_others(
    node: BenchNode, capsys: pytest.CaptureFixture[str]
) -> None:
    assert isinstance(node.machine, Pairs)
    path = node.machine.directory / "gpu1"
    node.stop_governor()
    log = node.work / "governor.log"
    known = log.stat().st_size
    simgpu.set_lost(path, lost=True)
    try:
        node.start_governor()
        events = [json.loads(line) for line in log.read_text()[known:].splitlines()]
        [left_out] = [event for event in events if event["event"] == "gpu-left-out"]
        assert (left_out["gpu"], left_out["reason"]) == (1, "GPU is lost")
        cli.main(["check", "--config", str(node.work / "config.yaml")])
        assert "GPU 1 is not shared: GPU is lost" in capsys.readouterr().out.splitlines()
        container = start(node, "rest", "work", "1", count="2")
        assert indices(node, container) == [0, 3]
        for device in finish(node, container):
            assert device["units"] > 0
        refused = start(node, "gone", "work", "1", devices="1")
        assert node.wait(refused, WAIT_S) != 0
        assert "names 1, which cannot be shared: GPU is lost" in refused.output
    finally:
        simgpu.set_lost(path, lost=False)
        node.stop_governor()
        node.start_governor()
    assert [gpu["index"] for gpu in gpus(node)] == [0, 1, 2, 3]
