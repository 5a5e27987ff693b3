"""Test the findings of `tidegate doctor` about the kernel, control groups and security modules."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from governor.config import Config
from governor.doctor import system
from governor.doctor.checks import examine
from governor.doctor.node import ExaminedNode
from tests.unit.doctor_nodes import FLAGS, Host, words

V1 = "cgroup /sys/fs/cgroup/memory cgroup rw,memory 0 0\n"
V2 = "cgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n"
UNIFIED = "cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n"


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path / "root")


@pytest.mark.parametrize(
    ("release", "said"),
    [
        (
            "6.1.0-28-amd64",
            "ok: Linux 6.1.0-28-amd64 has open_tree and move_mount, openat2 and mount_setattr",
        ),
        ("5.14.0-427.el9.x86_64", "ok: Linux 5.14.0-427.el9.x86_64 has open_tree and move_mount, "),
        ("5.12", "ok: Linux 5.12 has open_tree and move_mount, "),
        (
            "5.10.0-30-amd64",
            "wrong: Linux 5.10.0-30-amd64 lacks mount_setattr (5.12): the hook cannot start containers -> boot Linux 5.12",
        ),
        (
            "5.4.0-200-generic",
            "wrong: Linux 5.4.0-200-generic lacks openat2 (5.6) and mount_setattr (5.12): ",
        ),
        (
            "4.18.0-553.el8.x86_64",
            "wrong: Linux 4.18.0-553.el8.x86_64 lacks open_tree and move_mount (5.2), openat2 (5.6) and mount_setattr",
        ),
        ("", "unseen: /proc/sys/kernel/osrelease contains '', which is not a version"),
        ("six", "unseen: /proc/sys/kernel/osrelease contains 'six', which is not a version"),
    ],
)
def test_a_kernel_has_the_calls_of_its_version(host: Host, release: str, said: str) -> None:
    host.put("proc/sys/kernel/osrelease", f"{release}\n")
    [found] = host.check("kernel.calls")
    assert found.startswith(said)


@pytest.mark.parametrize(
    ("mounts", "said"),
    [
        (V2, "ok: cgroup v2"),
        (V1, "ok: cgroup v1"),
        (
            V1 + UNIFIED,
            "ok: cgroup v1, with cgroup v2 at /sys/fs/cgroup/unified (hybrid)",
        ),
        (
            "proc /proc proc rw 0 0\n",
            (
                "wrong: no cgroup file system is mounted: runtimes cannot start containers"
                " -> mount -t cgroup2 none /sys/fs/cgroup"
            ),
        ),
    ],
)
def test_the_version_of_control_groups_is_reported(host: Host, mounts: str, said: str) -> None:
    host.put("proc/self/mounts", mounts)
    assert host.check("cgroup.version") == [said]


def test_crun_is_reported_where_cgroup_v2_has_controllers_beside_v1(host: Host) -> None:
    host.put("proc/self/mounts", V1 + UNIFIED)
    host.program("usr/bin/crun")
    assert host.check("cgroup.version") == [
        (
            "ok: cgroup v1, with cgroup v2 at /sys/fs/cgroup/unified (hybrid), "
            "without controllers in cgroup v2"
        )
    ]
    host.put("sys/fs/cgroup/unified/cgroup.controllers", "cpu io\n")
    assert host.check("cgroup.version") == [
        (
            "warning: cgroup v1, with cgroup v2 at /sys/fs/cgroup/unified (hybrid): "
            "/usr/bin/crun refuses that (cgroups in hybrid mode not supported)"
            " -> use runc, or boot with systemd.unified_cgroup_hierarchy=1"
        )
    ]


def test_a_processor_for_which_loaders_skip_x86_64_v2_directories_is_wrong(host: Host) -> None:
    assert host.check("kernel.processor") == ["unseen: /proc/cpuinfo lists no processor flags"]
    host.put("proc/cpuinfo", FLAGS)
    assert host.check("kernel.processor") == ["ok: the processor supports x86-64-v2"]
    host.put("proc/cpuinfo", FLAGS.replace("ssse3", "").replace("sse4_2", ""))
    [found] = host.check("kernel.processor")
    assert found.startswith("wrong: the processor is below x86-64-v2 (no sse4_2 and ssse3): ")
    host.put("proc/cpuinfo", "processor\t: 0\nFeatures\t: fp asimd\nCPU implementer\t: 0x41\n")
    assert host.check("kernel.processor") == [
        "ok: on aarch64 the loader does not select directories by CPU features"
    ]


def test_mounts_that_cannot_be_read_are_reported_as_unseen(host: Host) -> None:
    assert host.check("cgroup.version") == ["unseen: /proc/self/mounts does not exist"]


def test_freezing_is_checked_only_where_the_configuration_requires_it(host: Host) -> None:
    assert host.check("cgroup.freezer") == ["ok: on_violation is report: containers are not frozen"]
    assert host.check("cgroup.freezer", on_violation="throttle") == [
        f"unseen: cannot check freezing: {host.root} is not the running system"
    ]


def test_selinux_and_apparmor_are_reported(host: Host) -> None:
    assert host.check("security.modules") == ["ok: neither SELinux nor AppArmor is on"]
    host.put("sys/fs/selinux/enforce", "0")
    assert host.check("security.modules") == ["ok: SELinux is permissive"]
    host.put("sys/module/apparmor/parameters/enabled", "Y\n")
    assert [line.partition(":")[0] for line in host.check("security.modules")] == ["ok", "note"]


def test_files_without_a_label_are_reported_where_selinux_enforces(host: Host) -> None:
    host.put("sys/fs/selinux/enforce", "1")
    host.put("run/tidegate/containers/key/grant")
    [found] = host.check("security.modules")
    # The file system of a test may have no labels at all.
    assert found.startswith(
        (
            "unseen: the SELinux label of /run/tidegate/containers: ",
            "warning: SELinux is enforcing, and /run/tidegate/containers has type ",
        )
    )


def look_here(check: str, **changes: Any) -> list[str]:
    """Return a check's findings on this machine."""
    return [words(found) for found in examine(ExaminedNode(config=Config(**changes)), [check])]


def test_the_running_kernel_is_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    # Without these calls no test of the hook would pass.
    assert look_here("kernel.calls")[0].startswith("ok: Linux ")
    monkeypatch.setattr(system, "_refused", lambda: [("openat2", errno.EPERM)])
    assert " refuses openat2: Operation not permitted" in look_here("kernel.calls")[0]
    assert look_here("kernel.calls")[0].startswith("wrong: ")
    monkeypatch.setattr(system, "_refused", lambda: [("mount_setattr", errno.ENOSYS)])
    assert " lacks mount_setattr: the hook cannot start containers" in look_here("kernel.calls")[0]


def test_the_freezers_mount_must_be_writable_for_the_governor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    freezer = "/sys/fs/cgroup/freezer"
    monkeypatch.setattr(system, "find_mounts", lambda: {"freezer": Path(freezer)})
    monkeypatch.setattr(system, "process", lambda _: 4711)
    table = "47 46 0:33 / {} {} - cgroup cgroup rw,freezer\n"
    read = ExaminedNode.read

    def with_table(rows: str) -> None:
        monkeypatch.setattr(
            ExaminedNode,
            "read",
            lambda n, path: rows if path == "/proc/4711/mountinfo" else read(n, path),
        )

    with_table(table.format(freezer, "rw,relatime"))
    assert look_here("cgroup.freezer", on_violation="throttle") == [
        f"ok: on_violation is throttle, and containers can be frozen through {freezer}"
    ]
    # The sandbox of a unit adds a second mount on top.
    with_table(table.format(freezer, "rw") + table.format(freezer, "ro,relatime"))
    assert look_here("cgroup.freezer", on_violation="throttle") == [
        (
            f"warning: on_violation is throttle, but {freezer} is read-only in the sandbox of the governor's unit"
            " -> set ProtectControlGroups=no in a drop-in of tidegate-governor.service, and restart it"
        )
    ]


def test_a_freezer_must_be_mounted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "process", lambda _: None)
    monkeypatch.setattr(system, "find_mounts", lambda: {"freezer": Path("/sys/fs/cgroup/freezer")})
    assert look_here("cgroup.freezer", on_violation="throttle") == [
        "ok: on_violation is throttle, and containers can be frozen through /sys/fs/cgroup/freezer"
    ]
    monkeypatch.setattr(system, "find_mounts", dict)
    [found] = look_here("cgroup.freezer", on_violation="throttle")
    assert found.startswith(
        "warning: on_violation is throttle, but neither cgroup v2 nor the v1 freezer"
    )


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (
            "container_file_t",
            "ok: SELinux is enforcing, and /run/tidegate/containers has type container_file_t",
        ),
        (
            "var_run_t",
            "warning: SELinux is enforcing, and /run/tidegate/containers has type var_run_t: ",
        ),
    ],
)
def test_labels_are_those_that_containers_may_read(
    host: Host, monkeypatch: pytest.MonkeyPatch, kind: str, said: str
) -> None:
    host.put("sys/fs/selinux/enforce", "1")
    host.put("run/tidegate/containers/key/grant")
    label = f"system_u:object_r:{kind}:s0\0".encode()
    monkeypatch.setattr(os, "getxattr", lambda *_: label)
    [found] = host.check("security.modules")
    assert found.startswith(said)
