"""Test the identification of a process's container, and freezing, with fake and with real kernel files."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from governor import audit, cgroups, processes
from governor.cgroups import FREEZER, V2, CannotFreezeError, Group, Membership, open_group
from governor.container import Container
from tests.conftest import lack

SELF, SHIM, INIT = "self", 50, 100


class Kernel:
    """/proc and control groups as plain directories."""

    def __init__(self, directory: Path) -> None:
        self.proc = directory / "proc"
        self.v2 = directory / "cgroup"
        self.freezer = directory / "freezer"
        self.mounts = {V2: self.v2, FREEZER: self.freezer}
        (self.proc / "self").mkdir(parents=True)
        for path in self.mounts.values():
            path.mkdir()

    def process(self, pid: int | str, *groups: str, parent: int = 0, numbers: str = "100") -> None:
        path = self.proc / str(pid)
        path.mkdir(exist_ok=True)
        (path / "cgroup").write_text("".join(f"{group}\n" for group in groups))
        (path / "status").write_text(f"Name:\tx\nPPid:\t{parent}\nNSpid:\t{numbers}\n")

    def group(self, path: str, frozen: str = "0") -> Path:
        """Make a group of version 2."""
        made = self.v2 / path.lstrip("/")
        made.mkdir(parents=True)
        (made / "cgroup.freeze").write_text(frozen)
        return made / "cgroup.freeze"

    def old_group(self, path: str, state: str = "THAWED") -> Path:
        """Make a group of version 1's freezer."""
        made = self.freezer / path.lstrip("/")
        made.mkdir(parents=True)
        (made / "freezer.state").write_text(state)
        (made / "freezer.self_freezing").write_text("0" if state == "THAWED" else "1")
        return made / "freezer.state"

    def membership(self, pid: int = INIT) -> Membership:
        return cgroups.find_membership(pid, self.proc)

    def open(self, membership: Membership, others: dict[str, Membership] | None = None) -> Group:
        return open_group(membership, INIT, others or {}, self.mounts, self.proc)


@pytest.fixture
def kernel(tmp_path: Path) -> Kernel:
    made = Kernel(tmp_path)
    made.process(SELF, "0::/system.slice/tidegate.service")
    made.process(SHIM, "0::/system.slice/containerd.service")
    return made


def test_a_control_group_counts_if_governor_and_parent_are_outside(kernel: Kernel) -> None:
    kernel.process(SELF, "3:freezer:/", "2:cpu,cpuacct:/system", "1:name=systemd:/user", "0::/")
    kernel.process(SHIM, "3:freezer:/", "2:cpu,cpuacct:/", "1:name=systemd:/session-1", "0::/x")
    kernel.process(
        INIT,
        "4:pids:/../outside",
        "3:freezer:/pod/one",
        "2:cpu,cpuacct:/system",
        "1:name=systemd:/session-1",
        "0::/x",
        parent=SHIM,
    )
    membership = kernel.membership()
    assert membership == Membership({"freezer": "/pod/one"}, None)
    assert membership.has_cgroups({"freezer": "/pod/one"})
    assert membership.has_cgroups({"freezer": "/pod/one/inner", "": "/elsewhere"})
    assert not membership.has_cgroups({"freezer": "/pod/one-more"})
    assert not membership.has_cgroups({"freezer": "/pod"})
    assert not membership.has_cgroups({"": "/pod/one"})
    assert not membership.has_cgroups({})


@pytest.mark.parametrize(
    ("moved", "groups"),
    [
        (["0::/pod/docker-abc.scope/init.scope"], {"": "/pod/docker-abc.scope"}),
        (["0::/pod/abc"], {"": "/pod/abc"}),
        # The container's own groups may have any name. The outermost match is the runtime's.
        (["0::/pod/abc/x/abc/y"], {"": "/pod/abc"}),
        (["0::/pod/abc.slice/y", "2:pids:/"], {"": "/pod/abc.slice/y"}),
        # A group that the runtime did not create does not have the container's name.
        (["0::/pod/abc/y", "2:pids:/session-7"], {"": "/pod/abc"}),
        # Another process is in the outermost group of that name as well.
        (["0::/abc/pod/abc/y"], {"": "/abc/pod/abc"}),
        (["0::/abc/y"], {"": "/abc/y"}),
    ],
)
def test_a_process_that_moved_is_identified_by_the_group_with_the_containers_name(
    kernel: Kernel, moved: list[str], groups: dict[str, str]
) -> None:
    kernel.process(SELF, "2:pids:/", "0::/abc/tidegate.service")
    kernel.process(INIT, *moved, parent=SHIM)
    is_named = {"abc", "docker-abc.scope"}.__contains__
    assert cgroups.find_membership(INIT, kernel.proc, is_named).cgroups == groups


def test_an_ended_process_has_no_membership(kernel: Kernel) -> None:
    assert kernel.membership(4711) == Membership({}, None)
    assert not Membership({}, None).has_cgroups({"": "/"})
    assert not Membership({}, None).has_namespaces(())
    assert processes.started_ns(4711, kernel.proc) == 0


def test_a_container_is_frozen_and_thawed_in_version_2(kernel: Kernel) -> None:
    kernel.process(INIT, "0::/kubepods.slice/one", parent=SHIM)
    file = kernel.group("/kubepods.slice/one")
    with contextlib.closing(kernel.open(kernel.membership())) as group:
        group.freeze()
        assert file.read_text() == "1"
        assert group.is_frozen()
        group.thaw()
        assert file.read_text() == "0"
        assert not group.is_frozen()


def test_a_container_is_frozen_and_thawed_in_version_1(kernel: Kernel) -> None:
    kernel.process(INIT, "7:cpuset,freezer:/one", "0::/", parent=SHIM)
    file = kernel.old_group("/one")
    with contextlib.closing(kernel.open(kernel.membership())) as group:
        group.freeze()
        assert file.read_text() == "FROZEN"
        group.thaw()
        assert file.read_text().startswith("THAWED")


def test_if_both_versions_exist_version_2_freezes(kernel: Kernel) -> None:
    kernel.process(INIT, "7:freezer:/one", "0::/one", parent=SHIM)
    kernel.old_group("/one")
    kernel.group("/one")
    with contextlib.closing(kernel.open(kernel.membership())) as group:
        assert group.hierarchy == V2


def test_where_version_2_cannot_freeze_version_1_is_used(kernel: Kernel) -> None:
    kernel.process(INIT, "7:freezer:/one", "0::/one", parent=SHIM)
    kernel.old_group("/one")
    (kernel.v2 / "one").mkdir()
    with contextlib.closing(kernel.open(kernel.membership())) as group:
        assert group.hierarchy == FREEZER


@pytest.mark.parametrize(("state", "frozen"), [("FROZEN", "0"), ("THAWED", "1"), ("FREEZING", "0")])
def test_a_container_that_another_program_froze_is_left_alone(
    kernel: Kernel, state: str, frozen: str
) -> None:
    kernel.process(INIT, "7:freezer:/one", "0::/one", parent=SHIM)
    kernel.old_group("/one", state)
    kernel.group("/one", frozen)
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(CannotFreezeError, match="it is already frozen"):
        kernel.open(kernel.membership())
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def refusal(
    kernel: Kernel, membership: Membership, others: dict[str, Membership] | None = None
) -> str:
    with pytest.raises(CannotFreezeError) as refused:
        kernel.open(membership, others)
    return str(refused.value)


def test_the_governor_its_neighbours_and_the_root_are_not_frozen(kernel: Kernel) -> None:
    kernel.process(INIT, "0::/system.slice", parent=0)
    kernel.group("/system.slice")
    assert kernel.membership().cgroups == {}  # the governor is in it
    assert "no control group of its own" in refusal(kernel, kernel.membership())
    assert "the governor is in" in refusal(kernel, Membership({"": "/system.slice"}))
    kernel.process(INIT, "0::/", parent=SHIM)
    assert "no control group of its own" in refusal(kernel, kernel.membership())
    kernel.process(INIT, "0::/pod/one", parent=SHIM)
    kernel.group("/pod/one")
    one, two = Membership({"": "/pod"}), Membership({"": "/pod/two"})
    assert refusal(kernel, one, {"two": two}) == "container 'two' is in its control group /pod"
    assert "has left" in refusal(kernel, two)
    kernel.process(INIT, "0::/gone", parent=SHIM)
    assert refusal(kernel, kernel.membership()) == "control group /gone: No such file or directory"


@pytest.mark.parametrize("path", ["", "/", "/..", "/one/../..", "/one/..", "/./one"])
def test_a_path_that_leads_elsewhere_is_refused(kernel: Kernel, path: str) -> None:
    kernel.group("/one")
    with pytest.raises(CannotFreezeError, match="belongs to no single container"):
        Group(V2, path, kernel.mounts)


def test_a_link_is_not_followed(kernel: Kernel) -> None:
    kernel.group("/one")
    (kernel.v2 / "link").symlink_to("one")
    with pytest.raises(CannotFreezeError, match="Not a directory"):
        Group(V2, "/link", kernel.mounts)
    (kernel.v2 / "two").mkdir()
    (kernel.v2 / "two/cgroup.freeze").symlink_to(kernel.v2 / "one/cgroup.freeze")
    with pytest.raises(CannotFreezeError, match="symbolic links"):
        Group(V2, "/two", kernel.mounts)
    with pytest.raises(CannotFreezeError, match="no freezer hierarchy"):
        Group(FREEZER, "/one", {V2: kernel.v2})


def test_mounts_are_read_as_the_kernel_writes_them(kernel: Kernel) -> None:
    (kernel.proc / "self/mountinfo").write_text(
        "30 25 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - tmpfs tmpfs rw,mode=755\n"
        "31 30 0:27 / /sys/fs/cgroup/my\\040own rw shared:10 - cgroup2 cgroup2 rw,nsdelegate\n"
        "32 30 0:28 / /sys/fs/cgroup/cpu,cpuacct rw shared:11 - cgroup cgroup rw,cpu,cpuacct\n"
        "33 30 0:29 /part /mnt/freezer rw - cgroup cgroup rw,freezer\n"
        "34 30 0:29 / /sys/fs/cgroup/freezer rw - cgroup cgroup rw,freezer\n"
        "35 30 0:27 / /mnt/again rw - cgroup2 none rw\n"
    )
    assert cgroups.find_mounts(kernel.proc) == {
        V2: Path("/sys/fs/cgroup/my own"),
        FREEZER: Path("/sys/fs/cgroup/freezer"),
    }


def test_the_start_time_is_found_after_a_name_with_parentheses(kernel: Kernel) -> None:
    kernel.process(INIT, "0::/")
    fields = " ".join(["S", "1"] + ["0"] * 17 + ["250", "0"])
    (kernel.proc / "100/stat").write_text(f"100 (a) (b c) {fields}\n")
    tick = os.sysconf("SC_CLK_TCK")
    assert processes.started_ns(INIT, kernel.proc) == 250 * 1_000_000_000 // tick
    now = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    assert 0 < processes.started_ns(os.getpid()) < now


# With the real kernel

INNER = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"


@contextlib.contextmanager
def running(*command: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        assert process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout
        process.stdout.close()


def children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]


def test_a_process_in_a_nested_namespace_belongs_to_the_container() -> None:
    if os.geteuid() != 0:
        lack("needs root")
    unshare = ["unshare", "--pid", "--fork", "--kill-child"]
    with running(*unshare, *unshare, sys.executable, "-c", INNER) as outside:
        first = children(outside.pid)[0]  # the second unshare: pid 1 of the first namespace
        innermost = children(first)[0]
        membership = cgroups.find_membership(first)
        assert membership.namespace
        assert membership.has_namespaces(cgroups.pid_namespaces(first))
        assert membership.has_namespaces(cgroups.pid_namespaces(innermost))
        assert not membership.has_namespaces(cgroups.pid_namespaces(outside.pid))
        assert not cgroups.find_membership(innermost).has_namespaces(cgroups.pid_namespaces(first))
        assert cgroups.find_membership(outside.pid).namespace is None  # in the test's namespace


def test_a_joined_namespace_does_not_identify_a_container() -> None:
    if os.geteuid() != 0:
        lack("needs root")
    unshare = ["unshare", "--pid", "--fork", "--kill-child"]
    with running(*unshare, sys.executable, "-c", INNER) as outside:
        first = children(outside.pid)[0]
        enter = ["nsenter", "--pid", "--target", str(first)]
        with running(*enter, sys.executable, "-c", INNER) as joined:
            other = children(joined.pid)[0]
            assert cgroups.find_membership(other).namespace is None
            assert cgroups.find_membership(first).has_namespaces(cgroups.pid_namespaces(other))


@pytest.mark.parametrize("hierarchy", [V2, FREEZER], ids=["v2", "v1"])
def test_the_kernel_freezes_and_thaws(hierarchy: str) -> None:
    mounts = cgroups.find_mounts()
    if os.geteuid() != 0 or hierarchy not in mounts:
        lack(f"needs root and a {hierarchy or 'version 2'} hierarchy")
    own = cgroups.read_cgroups("self").get(hierarchy, "/")
    path = f"{own.rstrip('/')}/tidegate-test-{os.getpid()}"
    directory = mounts[hierarchy] / path.lstrip("/")
    try:
        directory.mkdir()
    except OSError as e:
        lack(f"needs a control group: {e.strerror}")
    loop = "import os, time\nprint(0, flush=True)\nwhile True: time.sleep(0.005)"
    try:
        with running(sys.executable, "-c", loop) as process:
            (directory / "cgroup.procs").write_text(str(process.pid))
            membership = cgroups.find_membership(process.pid)
            assert path in membership.cgroups.values()
            group = open_group(membership, process.pid, {}, mounts)
            # In version 1, even SIGKILL does not end a frozen process, so a failing test would wait
            # for ever.
            with contextlib.closing(group), thawed_at_last(group):
                group.freeze()
                assert group.is_frozen()
                deadline = time.monotonic() + 10
                while (before := switches_before_pause(process.pid)) != switches(process.pid):
                    assert time.monotonic() < deadline
                with pytest.raises(CannotFreezeError, match="already frozen"):
                    open_group(membership, process.pid, {}, mounts)
                group.thaw()
                assert not group.is_frozen()
                while switches(process.pid) == before:
                    assert time.monotonic() < deadline
                group.freeze()
                switches_before_pause(process.pid)
                process.kill()
                while process.poll() is None and not is_killed(process.pid):
                    assert time.monotonic() < deadline
                group.thaw()
                process.wait(10)
    finally:
        deadline = time.monotonic() + 10
        while directory.exists():
            with contextlib.suppress(OSError):
                directory.rmdir()
            assert time.monotonic() < deadline


@contextlib.contextmanager
def thawed_at_last(group: cgroups.Group) -> Iterator[None]:
    try:
        yield
    finally:
        group.thaw()


def is_killed(pid: int) -> bool:
    """Return whether the governor finds that a process is being killed.

    In version 1, a frozen process cannot die before it is thawed.
    """
    return audit._is_killed(cast("Container", SimpleNamespace(members=[SimpleNamespace(pid=pid)])))


def switches(pid: int) -> int:
    return int(processes.status_fields(pid)["voluntary_ctxt_switches"])


def switches_before_pause(pid: int) -> int:
    """Pause so that a process that is not frozen runs; return its switches before that."""
    before = switches(pid)
    time.sleep(0.1)
    return before
