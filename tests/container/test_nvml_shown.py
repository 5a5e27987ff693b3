"""What NVML shows inside a busy container: its own quota, its own process, its own utilisation."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from bench.machine import Simulated
from bench.node import BenchNode, Running
from tests.container.bundles import compile_c

MIB = 1 << 20
GIB = 1 << 30
CONTEXT = 512 * MIB
WAIT_S = 60.0

# Starts the workload, and prints what NVML shows while it runs, as one JSON object per line.
WATCH_C = r"""
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

struct process { unsigned pid; unsigned long long used; unsigned gi, ci; };
struct memory { unsigned long long total, free, used; };
struct rates { unsigned gpu, memory; };

static void *nvml;

static int must(int error, const char *what)
{
    if (error) {
        printf("%s: %d\n", what, error);
        exit(1);
    }
    return 0;
}

static void *find(const char *name)
{
    void *found = nvml ? dlsym(nvml, name) : NULL;

    if (!found)
        must(-1, name);
    return found;
}

int main(int argc, char **argv)
{
    int (*memory_info)(void *, struct memory *), (*rates)(void *, struct rates *);
    int (*list)(void *, unsigned *, struct process *), status;
    void *device;
    pid_t child = fork();

    if (!child) {
        execv(argv[1], argv + 1);
        _exit(127);
    }
    setvbuf(stdout, NULL, _IOLBF, 0);
    nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    must(((int (*)(void))find("nvmlInit_v2"))(), "nvmlInit");
    must(((int (*)(unsigned, void **))find("nvmlDeviceGetHandleByIndex_v2"))(0, &device), "handle");
    memory_info = find("nvmlDeviceGetMemoryInfo");
    rates = find("nvmlDeviceGetUtilizationRates");
    list = find("nvmlDeviceGetComputeRunningProcesses_v3");
    while (!waitpid(child, &status, WNOHANG)) {
        struct process listed[8];
        struct memory memory;
        struct rates used;
        unsigned n = 8;

        must(memory_info(device, &memory), "memory");
        must(rates(device, &used), "rates");
        must(list(device, &n, listed), "processes");
        printf("{\"total\": %llu, \"used\": %llu, \"gpu\": %u, \"processes\": [", memory.total,
               memory.used, used.gpu);
        for (unsigned i = 0; i < n; i++)
            printf("%s[%u, %llu]", i ? ", " : "", listed[i].pid, listed[i].used);
        printf("], \"child\": %d}\n", child);
        usleep(50000);
    }
    return argc < 2 || status != 0;
}
"""


@pytest.fixture
def node(tmp_path: Path, build_dir: Path, require: Callable[..., None]) -> Iterator[BenchNode]:
    require("gcc", "runc")
    compile_c(WATCH_C, tmp_path / "watch", "-ldl")
    machine = Simulated(tmp_path, build_dir)
    machine.programs.append(tmp_path / "watch")
    with BenchNode(machine) as made:
        yield made


def start(node: BenchNode, name: str, program: list[str], **annotations: str) -> Running:
    arguments = [
        *program, *node.machine.command("burn", inside=True),
        "--seconds", "5", "--out", "/out/progress.bin", "--memory", str(256 * MIB),
    ]  # fmt: skip
    return node.start(name, arguments, {"memory": "2Gi", **annotations})


def watch(node: BenchNode, container: Running) -> list[dict[str, Any]]:
    """Wait for a container's end, and return the samples of the second half of its run, without the
    last ones.
    """
    assert node.wait(container, WAIT_S) == 0, container.output
    looks = [json.loads(line) for line in container.output.splitlines() if '"child"' in line]
    assert len(looks) >= 20
    return looks[len(looks) // 2 : -5]


def check(looks: list[dict[str, Any]]) -> bool:
    """Check the quota, the process and its memory; return whether the GPU was fully used.

    On a busy machine the workload may launch late, which leaves the GPU idle for a while.
    """
    for look in looks:
        [[pid, used]] = look["processes"]
        assert (look["total"], pid, used) == (2 * GIB, look["child"], look["used"])
        assert 0 < pid < 100  # a PID of the container, not of the host
        # The context, the requested memory, and the ring that the workload stamps into.
        assert CONTEXT + 256 * MIB <= used <= CONTEXT + 272 * MIB
    usual = median(look["gpu"] for look in looks)
    assert usual <= 100
    return usual >= 85


def test_a_container_alone_sees_its_own_quota_and_process(node: BenchNode) -> None:
    annotations = {"compute": "30", "compute-limit": "100"}
    assert any(
        check(watch(node, start(node, name, ["/usr/bin/watch"], **annotations)))
        for name in ("first", "second", "third")
    )


def test_each_of_two_containers_sees_its_own_quota_and_process(node: BenchNode) -> None:
    quotas = {"first": "60", "second": "20"}  # percent of the GPU, of which each uses all
    for number in range(3):
        running = [
            start(node, f"{name}-{number}", ["/usr/bin/watch"], compute=quota)
            for name, quota in quotas.items()
        ]
        used = [check(watch(node, container)) for container in running]
        if all(used):
            return
    pytest.fail("a GPU was shown as idle for a while in each of three runs")
