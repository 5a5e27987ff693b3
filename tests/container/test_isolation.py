"""Containers that attack each other: no container can see, change or connect to what the governor
keeps for another. A container that writes arbitrary values into its own ledger takes nothing from
the others. The attacker is hostile.c, which runs as root of its container.
"""

from __future__ import annotations

import collections
import contextlib
import re
import signal
import socket
import stat
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.machine import ROOT, Simulated
from bench.node import BenchNode, Running
from bench.progress import read_stamps
from governor.cgroups import read_cgroups
from governor.client import ask
from governor.container import container_key
from libcontrol import layout, pages
from tests.container.bundles import Runtime, compile_c
from tests.container.nodes import (
    WAIT_S,
    begin,
    clear,
    directory,
    events,
    show_output,
    start_worker,
    wait_for,
)

S = 1_000_000_000
UNIT_NS = 500_000
"""GPU time that one unit of the workload takes, in nanoseconds."""


class WithHostile(Simulated):
    """The simulated GPU; each image also has the attacker."""

    def __init__(self, work: Path, build: Path) -> None:
        super().__init__(work, build)
        source = Path(__file__).with_name("hostile.c").read_text()
        self.programs.append(compile_c(source, work / "hostile", f"-I{ROOT}/libcontrol"))


def runtime_script(name: str, work: Path) -> str:
    """Return the path of a script that runs the runtime, for callers that expect a single word:
    crun needs a mount namespace here.
    """
    command = Runtime(name, work).command()
    command = command[: command.index("--root")]
    quoted = " ".join(f"'{word}'" for word in command)
    path = work / f"{name}-here"
    path.write_text(f'#!/bin/sh\nexec {quoted} "$@"\n')
    path.chmod(0o755)
    return str(path)


@pytest.fixture(scope="module", params=["runc", "crun"])
def node(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    build_dir: Path,
    require: Callable[..., None],
) -> Iterator[BenchNode]:
    require("gcc", request.param)
    work = tmp_path_factory.mktemp("isolation")
    with BenchNode(
        WithHostile(work, build_dir), runtime=runtime_script(request.param, work)
    ) as made:
        yield made


@pytest.fixture(autouse=True)
def clean(node: BenchNode) -> Iterator[None]:
    yield
    clear(node)


def inside(node: BenchNode, container: Running) -> int:
    """Return the PID on the host of a container's first process."""
    return int(node.list_containers()[container.identifier]["pid"])


def as_attacker(**process: Any) -> Callable[[dict[str, Any]], None]:
    """Return an edit of config.json that sets attributes of the process, such as its user, and adds
    a /tmp that it may write to.
    """

    def edit(config: dict[str, Any]) -> None:
        config["process"] |= process
        # runc gives a mount the mode of the directory below it.
        options = [f"uid={process.get('user', {}).get('uid', 0)}"]
        config["mounts"].append(
            {"destination": "/tmp", "type": "tmpfs", "source": "tmp", "options": options}
        )

    return edit


def in_namespace_of(pid: int, **process: Any) -> Callable[[dict[str, Any]], None]:
    """Return the edit of `as_attacker` that also puts the process into another container's PID
    namespace, as in a pod that shares it.
    """
    first = as_attacker(**process)

    def edit(config: dict[str, Any]) -> None:
        first(config)
        for namespace in config["linux"]["namespaces"]:
            if namespace["type"] == "pid":
                namespace["path"] = f"/proc/{pid}/ns/pid"

    return edit


def contents(path: Path) -> dict[str, tuple[int, int, int]]:
    """Return the mode (with the file type), the owner and the size of each file in a directory."""
    return {
        one.name: (one.lstat().st_mode, one.lstat().st_uid, one.lstat().st_size)
        for one in path.iterdir()
    }


def descriptors(fds: Path) -> collections.Counter[str]:
    """Count a process's open files by kind, without those of ended containers, whose pages are
    unmapped later.
    """
    found: collections.Counter[str] = collections.Counter()
    for fd in fds.iterdir():
        with contextlib.suppress(OSError):
            name = re.sub(r"\d+", "N", str(fd.readlink()))
            found[name] += not name.endswith("(deleted)")
    return found


NONE: dict[str, Any] = {"capabilities": {}}
ATTACKERS: dict[str, Callable[[int], Callable[[dict[str, Any]], None]]] = {
    "root": lambda _: as_attacker(),
    "user": lambda _: as_attacker(user={"uid": 1000, "gid": 1000}, **NONE),
    "root-shared-pids": lambda pid: in_namespace_of(pid, **NONE),
    "user-shared-pids": lambda pid: in_namespace_of(pid, user={"uid": 1000, "gid": 1000}, **NONE),
}


@pytest.mark.parametrize(
    "attacker_kind",
    [pytest.param(w, marks=[pytest.mark.slow] if "user" in w else [], id=w) for w in ATTACKERS],
)
def test_no_container_reaches_another_containers_files(node: BenchNode, attacker_kind: str) -> None:
    victim = start_worker(node, f"victim-{attacker_kind}", compute="20")
    begin(victim)
    has = directory(node, victim)
    before, page = contents(has), (has / "grant").read_bytes()
    fds = Path(f"/proc/{node.governor_pid}/fd")
    kinds = descriptors(fds)
    attacker = node.start(
        f"attacker-{attacker_kind}",
        ["/usr/bin/hostile", "prowl", str(has), container_key(victim.identifier)],
        {"memory": "1Gi", "compute": "20"},
        edit=ATTACKERS[attacker_kind](inside(node, victim)),
    )
    assert node.wait(attacker, WAIT_S) == 0, attacker.output
    tried = re.fullmatch(r"tried (\d+), and (\d+) at (\d+) processes\n", attacker.output)
    assert tried, attacker.output
    alone, at_others, others = map(int, tried.groups())
    assert alone > 700
    # In a shared PID namespace, the attacker finds at least the victim's process, and tries many
    # kinds of access to each process.
    assert (others > 0) == ("shared" in attacker_kind)
    assert at_others >= 150 * others
    assert contents(has) == before
    after = (has / "grant").read_bytes()
    assert (after[:16], after[24:64]) == (page[:16], page[24:64])  # all but the heartbeat
    assert victim.process.poll() is None, show_output(victim)
    wait_for(lambda: attacker.identifier not in node.list_containers(), "the attacker's end")
    wait_for(lambda: not descriptors(fds) - kinds, f"{descriptors(fds) - kinds} to be closed", 10)
    done = [e for e in events(node, "process-registered") if e["container"] == victim.identifier]
    assert len(done) == 1


def test_the_attacker_detects_accesses_that_succeed(node: BenchNode) -> None:
    """In its own directory the attacker succeeds with accesses that are denied elsewhere. Otherwise
    the test above would prove nothing.
    """
    attacker = node.start(
        "self", ["/usr/bin/hostile", "prowl", "/run/tidegate", "."],
        {"memory": "1Gi", "compute": "20"}, edit=as_attacker(),
    )  # fmt: skip
    assert node.wait(attacker, WAIT_S) == 0, attacker.output
    for way in ("list", "read", "stat", "connect to", "follow a link to"):
        assert f"WORKED: {way} /run/tidegate" in attacker.output, way
    for way in (
        "write",
        "truncate",
        "append",
        "unlink",
        "rename",
        "link",
        "chmod",
        "bind",
        "create",
    ):
        found = [
            x for x in attacker.output.splitlines() if x.startswith(f"WORKED: {way} /run/tidegate/")
        ]
        assert [line for line in found if ".." not in line] == [], way


def test_a_socket_registers_only_processes_of_its_container(node: BenchNode) -> None:
    """The kernel does not separate processes with equal rights that see each other: the governor
    checks the caller's container.
    """
    victim = start_worker(node, "host", compute="20")
    begin(victim)
    pid = inside(node, victim)
    attacker = node.start(
        "guest", ["/usr/bin/hostile", "knock", "1"], {"memory": "1Gi", "compute": "20"},
        edit=in_namespace_of(pid),
    )  # fmt: skip
    assert node.wait(attacker, WAIT_S) == 0, attacker.output
    assert attacker.output == "slot -1, no ledger\n"
    [refused] = events(node, "process-refused")[-1:]
    assert refused["container"] == victim.identifier
    assert len(node.list_containers()[victim.identifier]["processes"]) == 1


def with_control_groups(config: dict[str, Any]) -> None:
    """Edit config.json: the host's control groups are at /cgroups, under the host's paths."""
    config["mounts"].append(
        {"destination": "/cgroups", "type": "bind", "source": "/sys/fs/cgroup", "options": ["rbind", "rw"]}
    )  # fmt: skip


def execute(node: BenchNode, container: Running, *arguments: str) -> str:
    """Run a program in a running container through its runtime; return its output."""
    command = [
        node.runtime,
        "--root",
        str(node.state_dir),
        "exec",
        container.identifier,
        *arguments,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_process_that_moves_to_a_lower_group_still_belongs_to_the_container(
    node: BenchNode,
) -> None:
    """systemd does this as the first process: it moves itself to init.scope, and moves its services
    to other groups. `exec` starts processes in the group above both.
    """
    container = node.start(
        "systemd", ["/usr/bin/hostile", "nest"], {"memory": "1Gi", "compute": "20"},
        edit=with_control_groups,
    )  # fmt: skip
    wait_for((container.out / "nested").exists, "it to register")
    wait_for(lambda: show_output(container) == "slot 0, a ledger\n", "what it says")
    pid = inside(node, container)
    moved = read_cgroups(pid)
    assert {path.rpartition("/")[2] for path in moved.values()} <= {"init.scope", ""}, moved
    knock = ("/usr/bin/hostile", "knock", "self")
    assert execute(node, container, *knock) == "slot 1, a ledger\n"
    node.stop_governor(signal.SIGKILL)
    node.start_governor()
    assert len(node.list_containers()[container.identifier]["processes"]) == 1
    assert execute(node, container, *knock) == "slot 1, a ledger\n"
    # A neighbour that shares its PID namespace is still refused.
    attacker = node.start(
        "neighbour", ["/usr/bin/hostile", "knock", "1"], {"memory": "1Gi", "compute": "20"},
        edit=in_namespace_of(pid),
    )  # fmt: skip
    assert node.wait(attacker, WAIT_S) == 0, attacker.output
    assert attacker.output == "slot -1, no ledger\n"


def test_users_of_the_host_cannot_register_at_a_containers_socket(node: BenchNode) -> None:
    """A process of root on the host can connect, but is not registered."""
    victim = start_worker(node, "watched", compute="20")
    begin(victim)
    path = directory(node, victim) / "governor.sock"
    unprivileged = (
        f"import os, socket; os.setuid(65534); socket.socket(socket.AF_UNIX).connect({str(path)!r})"
    )
    done = subprocess.run(
        [sys.executable, "-c", unprivileged], capture_output=True, text=True, check=False
    )
    assert "PermissionError" in done.stderr
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        client.settimeout(WAIT_S)
        client.sendall(layout.REGISTER)
        answer, fds, _, _ = socket.recv_fds(client, 16, 4)
    assert (int.from_bytes(answer, "little"), fds) == (layout.NO_SLOT, [])


@pytest.mark.parametrize("node", ["runc"], indirect=True)  # one runtime is enough for the governor
def test_the_directory_of_containers_is_private_from_the_start(node: BenchNode) -> None:
    path = node.runtime_dir / "containers"
    node.stop_governor()
    assert not list(path.iterdir())
    path.chmod(0o755)  # as an older version of the governor left it
    node.start_governor()
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    node.stop_governor()
    path.rmdir()
    node.start_governor()
    assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_a_process_that_enters_without_the_engine_is_refused_with_a_hint(node: BenchNode) -> None:
    victim = start_worker(node, "entered", compute="20")
    begin(victim)
    knock = ("/usr/bin/hostile", "knock", "self")
    enter = ["nsenter", "--target", str(inside(node, victim)), "--mount", "--pid", "--ipc", "--uts"]
    done = subprocess.run(
        [*enter, *knock], capture_output=True, text=True, timeout=WAIT_S, check=True
    )
    assert done.stdout == "slot -1, no ledger\n"
    # The log is rate-limited, so lines about refusals in earlier tests may come late.
    [refused] = wait_for(
        lambda: [
            one for one in events(node, "process-refused") if one["container"] == victim.identifier
        ],
        "the refusal in the log",
    )
    assert refused["error"].endswith("; enter with the engine's exec, not nsenter")
    assert execute(node, victim, *knock) == "slot 1, a ledger\n"


def share(container: Running, first: int, last: int) -> float:
    """Return the work that a container did between two times, in percent of the GPU."""
    stamps = [s for s in read_stamps(container.out / "progress.bin") if first <= s.time < last]
    return 100 * len(stamps) * UNIT_NS / (last - first)


QUOTAS = {"honest-a": 40, "honest-b": 30}


@pytest.mark.parametrize("node", ["runc"], indirect=True)  # one runtime is enough for the governor
def test_nonsense_in_a_ledger_takes_nothing_from_other_containers(node: BenchNode) -> None:
    pair = [start_worker(node, name, compute=str(quota)) for name, quota in QUOTAS.items()]
    burn = node.machine.command("burn", inside=True)
    hostile = node.start(
        "scribbler",
        ["/usr/bin/hostile", "scribble", f"/usr/bin/{Path(burn[0]).name}", *burn[1:], "--seconds", "600", "--out", "/out/progress.bin"],
        {"memory": "1Gi", "compute": "30"},
    )  # fmt: skip
    begin(*pair)
    wait_for(
        lambda: (hostile.out / "scribbling").exists() or hostile.process.poll() is not None, "it"
    )
    assert hostile.process.poll() is None, show_output(hostile)
    time.sleep(0.5)
    found: list[list[float]] = []
    while len(found) < 5:  # on a busy machine single measurements may be off
        first = time.monotonic_ns()
        time.sleep(3)
        assert {one["id"] for one in ask(node.config, "list", timeout=10)["containers"]} == {
            container.identifier for container in (*pair, hostile)
        }
        found.append([share(container, first, first + 5 * S // 2) for container in pair])
        shares = zip(found[-1], QUOTAS.values(), strict=True)
        if all(0.8 * quota < part < 1.25 * quota for part, quota in shares):
            break
    for i, quota in enumerate(QUOTAS.values()):
        # A good measurement before the fifth is used alone: in it, a container may make up for work
        # that it lost in an earlier one.
        parts = [found[-1]] if len(found) < 5 else found
        assert 0.6 * quota < statistics.median(part[i] for part in parts) < 1.4 * quota, found
    # The governor owns its page, which still has the same values.
    page = (directory(node, hostile) / "grant").read_bytes()
    device = layout.grant_device(0)
    assert pages.read(page, device, "grant_device", "memory_limit") == 1 << 30
    # Containers can still end and start.
    node.kill(hostile)
    wait_for(lambda: hostile.identifier not in node.list_containers(), "its end")
    late = start_worker(node, "late", compute="30", memory="1Gi")
    begin(late)
    assert "Traceback" not in (node.work / "governor.log").read_text()
