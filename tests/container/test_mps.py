"""The strategy mps: containers are clients of one daemon, which is watched and restarted, and
outlives the governor.

The daemon is a stand-in, simgpu/mps_control.c; containers, mounts, control library and governor are
real.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.machine import Simulated
from bench.node import BenchNode, Running, last_json
from governor.client import ask
from libcontrol import layout
from simgpu import simgpu
from tests.container.bundles import compile_c
from tests.container.nodes import (
    WAIT_S,
    begin,
    clear,
    directory,
    events,
    start_worker,
    units,
    wait_for,
)

PROBE_C = r"""
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

static int reach(const char *path)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_SEQPACKET, 0);

    strncpy(address.sun_path, path, sizeof address.sun_path - 1);
    return connect(fd, (struct sockaddr *)&address, sizeof address) ? errno : 0;
}

int main(int argc, char **argv)
{
    void *cuda = dlopen("libcuda.so.1", RTLD_NOW);
    int (*init)(unsigned) = (int (*)(unsigned))dlsym(cuda, "cuInit");
    int (*attribute)(int *, int, int) = (int (*)(int *, int, int))dlsym(cuda, "cuDeviceGetAttribute");
    int error, mps = -1, made, count = 0;
    const char *variable;
    DIR *directory;

    if (argc > 1 && close(open("/out/waits", O_CREAT | O_WRONLY, 0600)) == 0)
        while (argv[1] && access("/out/go", F_OK))
            usleep(1000);
    error = init(0);
    if (!error)
        attribute(&mps, 133, 0);
    variable = getenv("CUDA_MPS_PIPE_DIRECTORY");
    directory = opendir("/run/tidegate/mps");
    while (directory && readdir(directory))
        count++;
    made = open("/run/tidegate/mps/mine", O_CREAT | O_WRONLY, 0600) < 0 ? errno : 0;
    printf("{\"error\": %d, \"mps\": %d, \"variable\": \"%s\", \"entries\": %d, \"made\": %d,"
           " \"unlinked\": %d, \"control\": %d, \"privileged\": %d}\n",
           error, mps, variable ? variable : "", count, made,
           unlink("/run/tidegate/mps/control") ? errno : 0, reach("/run/tidegate/mps/control"),
           reach("/run/tidegate/mps/control_privileged"));
    return 0;
}
"""


class WithMps(Simulated):
    """Two simulated GPUs with a driver that has the programs of MPS."""

    def __init__(self, work: Path, build: Path) -> None:
        super().__init__(work, build, devices=2)
        self.visible = UUIDS[1]
        self.programs.append(work / "probe")
        self.library_dir = work / "library"
        shutil.copytree(
            build / "simgpu", self.library_dir, symlinks=True, ignore=shutil.ignore_patterns("*.p")
        )
        self.library_dir.joinpath("mps-control").rename(
            self.library_dir / "nvidia-cuda-mps-control"
        )

    @property
    def refresh_arguments(self) -> list[str]:
        return ["--library-dir", str(self.library_dir)]

    def spec(self) -> dict[str, Any]:
        return {**super().spec(), "env": [f"CUDA_VISIBLE_DEVICES={self.visible}"]}


UUIDS = [f"GPU-{simgpu.device_uuid(1, index)}" for index in range(2)]
SETTINGS = {
    "strategies": ["timeslice", "mps"],
    "gpus": {"1": {"strategy": "mps"}},
    "mps_fault_s": 6,  # within this time a test starts a container and reads reports
}


@pytest.fixture(scope="module")
def node(
    tmp_path_factory: pytest.TempPathFactory, build_dir: Path, require: Callable[..., None]
) -> Iterator[BenchNode]:
    require("gcc", "runc")
    work = tmp_path_factory.mktemp("mps")
    compile_c(PROBE_C, work / "probe", "-ldl")
    with BenchNode(WithMps(work, build_dir), settings=SETTINGS) as made:
        yield made


@pytest.fixture(autouse=True)
def clean(node: BenchNode) -> Iterator[None]:
    wait_for(lambda: mps(node)["state"] == "running", "the daemon")
    yield
    clear(node)


def mps(node: BenchNode) -> dict[str, Any]:
    """Return the governor's report about the daemon of GPU 1."""
    found: dict[str, Any] = ask(node.config, "gpus")["gpus"][1]["mps"]
    return found


def probe(node: BenchNode, name: str, **annotations: str) -> dict[str, Any]:
    assert isinstance(node.machine, WithMps)
    node.machine.visible = UUIDS[1]
    container = node.start(
        name, ["/usr/bin/probe"], {"memory": "1Gi", "compute": "10", **annotations}
    )
    assert node.wait(container, WAIT_S) == 0, container.output
    return {**last_json(container.output), "output": container.output}


def worker(node: BenchNode, name: str, **annotations: str) -> Running:
    assert isinstance(node.machine, WithMps)
    node.machine.visible = UUIDS[int(annotations["devices"])]
    container = start_worker(node, name, **{"memory": "1Gi", "compute": "30", **annotations})
    begin(container)
    return container


@contextlib.contextmanager
def stopped(node: BenchNode, *containers: Running) -> Iterator[None]:
    """Keep containers from ending during the block: the events that were reported for them would be
    removed with them.
    """
    known = node.list_containers()
    pids = [pid for container in containers for pid in known[container.identifier]["processes"]]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def alive(pid: int) -> bool:
    return (
        Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes() != b""
    )


def test_a_container_is_a_client_and_sees_one_socket_that_it_cannot_change(node: BenchNode) -> None:
    seen = probe(node, "client", strategy="mps")
    output = seen.pop("output")
    # The container sees ".", ".." and "control" on a read-only mount, and cannot reach the socket
    # for commands.
    assert seen == {
        "error": 0, "mps": 1, "variable": "/run/tidegate/mps", "entries": 3, "made": 30, "unlinked": 30,
        "control": 0, "privileged": 2,
    }, output  # fmt: skip
    assert "tidegate: " not in output


def test_auto_uses_the_strategy_of_any_gpu_with_room(node: BenchNode) -> None:
    first = worker(node, "first", devices="0")
    second = worker(node, "second", devices="1")
    known = node.list_containers()
    one, two = (known[container.identifier] for container in (first, second))
    assert (one["strategy"], one["mps"]) == ("timeslice", None)
    assert (two["strategy"], two["mps"]["state"]) == ("mps", "running")
    assert not (directory(node, first) / "mps").exists()
    page = (directory(node, second) / "grant").read_bytes()
    strategy = layout.grant_device(0) + layout.offsets(layout.GRANT_DEVICE)["strategy"]
    assert page[strategy] == 1
    assert (
        int.from_bytes(page[layout.offsets(layout.GRANT_HEADER)["inflight_ns"] :][:8], "little")
        == 1_000_000
    )


@pytest.mark.parametrize(
    ("annotations", "line"),
    [
        (
            {"strategy": "timeslice", "devices": "1"},
            "GPU 1 uses strategy mps, but annotation tidegate.gpu/strategy is timeslice; this node uses timeslice on GPU 0",
        ),
        (
            {"strategy": "mps", "devices": "0"},
            "GPU 0 uses strategy timeslice, but annotation tidegate.gpu/strategy is mps; this node uses mps on GPU 1",
        ),
        (
            {"strategy": "mps", "count": "2"},
            "annotation tidegate.gpu/strategy is mps and 2 GPUs were requested, but a client of MPS can have only one; ask for one GPU, or for timeslice",
        ),
        (
            {"strategy": "passthrough"},
            "annotation tidegate.gpu/strategy is passthrough, but this node offers timeslice and mps; leave it out, or write auto",
        ),
    ],
)
def test_a_strategy_that_a_gpu_does_not_offer_is_refused_in_one_line(
    node: BenchNode, annotations: dict[str, str], line: str
) -> None:
    container = node.start(f"no-{len(line)}", ["/usr/bin/probe"], {"memory": "1Gi", **annotations})
    assert node.wait(container, WAIT_S) != 0
    assert f"tidegate: {line}" in container.output


def test_a_daemon_that_is_killed_is_started_again_and_new_containers_reach_it(
    node: BenchNode,
) -> None:
    before = mps(node)
    neighbour = worker(node, "neighbour", devices="1")
    link = directory(node, neighbour) / "mps/control"
    inode = link.stat().st_ino
    with stopped(node, neighbour):
        os.kill(before["pid"], signal.SIGKILL)
        wait_for(lambda: mps(node)["pid"] not in (0, before["pid"]), "another daemon")
        wait_for(lambda: mps(node)["state"] == "running", "the daemon")
        wait_for(lambda: link.stat().st_ino != inode, "the link to the new socket")
        logs = (directory(node, neighbour) / "mps/events").read_text()
        assert (
            "daemon-ended: the MPS server has ended; restart the programs that used the GPU" in logs
        )
    after = mps(node)
    assert (after["starts"], after["ends"]) == (before["starts"] + 1, before["ends"] + 1)
    [ended] = events(node, "mps-daemon-ended")
    assert ended["containers"] == [neighbour.identifier]
    assert probe(node, "next", strategy="mps")["mps"] == 1


def test_a_fault_is_reported_to_all_containers_whose_work_it_ends(node: BenchNode) -> None:
    first = worker(node, "faulty", devices="1")
    second = worker(node, "bystander", devices="1")
    elsewhere = worker(node, "elsewhere", devices="0")
    before = mps(node)
    [pid] = node.list_containers()[first.identifier]["processes"]
    with stopped(node, first, second):
        os.kill(before["pid"], signal.SIGUSR1)
        wait_for(lambda: mps(node)["faults"] == before["faults"] + 1, "the fault to be seen")
        fault = next(e for e in reversed(events(node, "mps-fault")) if e["by"])
        assert fault["by"] == first.identifier
        assert fault["text"] == f"Client process {pid} encountered a fatal GPU error."
        assert fault["containers"] == [first.identifier, second.identifier]
        logs = [(directory(node, c) / "mps/events").read_text() for c in (first, second)]
        assert "fault: a process of this container had a fatal fault" in logs[0]
        assert "fault: a process of another container had a fatal fault" in logs[1]
    # The fault ends both; a container that shares nothing with them continues.
    for container in (first, second):
        assert node.wait(container, WAIT_S) != 0
        assert "cuLaunchKernel: CUDA_ERROR_LAUNCH_FAILED" in container.output
    count = units(elsewhere)
    wait_for(lambda: units(elsewhere) > count + 20, "the neighbour on the other GPU to continue")
    wait_for(lambda: mps(node)["state"] == "running", "the server to take clients again")
    assert mps(node)["pid"] == before["pid"]
    assert probe(node, "healed", strategy="mps")["mps"] == 1


def test_a_client_that_stays_after_a_fault_keeps_others_out_only_briefly(node: BenchNode) -> None:
    stays = worker(node, "stays", devices="1")
    before = mps(node)
    with stopped(node, stays):
        os.kill(before["pid"], signal.SIGUSR1)
        wait_for(lambda: mps(node)["state"] == "fault", "the fault to be seen")
        refused = node.start("early", ["/usr/bin/probe"], {"memory": "1Gi", "strategy": "mps"})
        assert node.wait(refused, WAIT_S) != 0
        assert (
            "tidegate: GPU 1 accepts no containers at present: after a fault, its MPS server is waiting for its clients to leave;"
            in refused.output
        )
        wait_for(lambda: mps(node)["pid"] not in (0, before["pid"]), "another daemon")
        wait_for(lambda: mps(node)["state"] == "running", "the daemon")
        assert probe(node, "later", strategy="mps")["mps"] == 1


def test_commands_of_a_container_are_counted_and_quit_has_no_effect(node: BenchNode) -> None:
    worker(node, "there", devices="1")
    before = mps(node)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as s:
        s.connect(
            str(
                node.runtime_dir
                / "mps"
                / ask(node.config, "gpus")["gpus"][1]["uuid"]
                / "pipe/control"
            )
        )
        assert s.recv(16) == b"OUTBHELL\0"
        s.sendall(b"OUTBCRED\0")
        s.sendall(struct.pack("I", 4))
        s.sendall(struct.pack("Q", 6))
        s.sendall(b"quit\n\0")
    wait_for(lambda: mps(node)["commands"] == before["commands"] + 1, "the command to be seen")
    assert events(node, "mps-command")[-1]["text"] == "Cmd:quit"
    assert mps(node)["pid"] == before["pid"]
    assert mps(node)["state"] == "running"


def test_a_program_that_finds_no_daemon_is_refused_with_a_message(node: BenchNode) -> None:
    pipe = node.runtime_dir / "mps" / ask(node.config, "gpus")["gpus"][1]["uuid"] / "pipe"
    container = node.start(
        "alone", ["/usr/bin/probe", "wait"], {"memory": "1Gi", "strategy": "mps"}
    )
    wait_for((container.out / "waits").exists, "a container")
    (pipe / "control").rename(pipe / "away")
    try:
        (directory(node, container) / "mps/control").unlink()
        (container.out / "go").touch()
        assert node.wait(container, WAIT_S) == 0
    finally:
        (pipe / "away").rename(pipe / "control")
    assert last_json(container.output)["error"] == 802  # CUDA_ERROR_SYSTEM_NOT_READY
    assert (
        "tidegate: this container's strategy is mps, but the driver found no MPS server at /run/tidegate/mps: "
        "see tidegate ps --json on the node\n"
    ) in container.output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_daemon_and_containers_outlive_the_governor(
    node: BenchNode, number: signal.Signals
) -> None:
    container = worker(node, f"outlives-{number}", devices="1")
    before = mps(node)
    node.stop_governor(number)
    try:
        assert alive(before["pid"])
        count = units(container)
        wait_for(lambda: units(container) > count + 5, "the container to continue")
    finally:
        node.start_governor()
    after = mps(node)
    assert (after["state"], after["pid"], after["starts"]) == ("running", before["pid"], 0)
    assert events(node, "mps-adopted")
    known = node.list_containers()[container.identifier]
    assert (known["strategy"], known["mps"]["pid"]) == ("mps", before["pid"])
    count = units(container)
    wait_for(lambda: units(container) > count + 20, "the container to continue")
    assert probe(node, f"after-{number}", strategy="mps")["mps"] == 1


def test_an_unused_daemon_ends_with_the_governor(node: BenchNode) -> None:
    pid = mps(node)["pid"]
    node.stop_governor()
    try:
        assert not alive(pid)
    finally:
        node.start_governor()
    wait_for(lambda: mps(node)["state"] == "running", "the daemon")
    assert mps(node)["pid"] != pid
