"""Test the findings of `tidegate doctor` about the mirror, the governor and its database."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from governor.verbs.check import look_at_mirror
from oci_hook.errors import MirrorMismatchError
from tests.unit.doctor_nodes import GPU, Host, V, governor
from tests.unit.vdriver_trees import put_kernel

MIB = 1 << 20


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path / "root")


def test_a_mirror_in_force_is_right(host: Host) -> None:
    host.put_driver()
    generation = host.put_mirror()
    assert host.check("mirror.in-force") == [
        f"ok: generation {generation.name}, driver {V} (nvidia)"
    ]
    [found] = host.check("mirror.content")
    assert found.startswith("ok: ")


def test_no_mirror_is_wrong(host: Host) -> None:
    assert host.check("mirror.in-force") == [
        f"wrong: no driver mirror at {host.root}/var/lib/tidegate/driver/current -> run `tidegate refresh`"
    ]
    assert host.check("mirror.content") == ["note: no generation is in force"]


def test_a_mirror_of_another_version_than_the_module_is_wrong(host: Host) -> None:
    host.put_driver()
    generation = host.put_mirror()
    put_kernel(host.root, "580.95.05")
    [found] = host.check("mirror.in-force")
    assert found.startswith(
        f"wrong: mirror {generation.name} is for driver {V}, but the kernel module is 580.95.05 -> reboot"
    )


def test_a_mirror_that_a_pod_made_names_files_as_that_container_saw_them(host: Host) -> None:
    """If the container's root is not mounted, the files are looked up on the node.

    Files that are not visible are not reported.
    """
    host.put_driver()
    generation = host.put_mirror()
    path = generation / "manifest.json"
    document = json.loads(path.read_text())
    library = host.put("usr/lib/libcuda.so.580", "a driver's")
    status = library.stat()
    document["source"] = {
        "root": "/host-of-a-test",
        "watch": [
            {
                "path": f"/host-of-a-test{library}",
                "role": "driver",
                "size": status.st_size,
                "mtime_ns": status.st_mtime_ns,
            }
        ],
    }
    driver_dir = str(generation.parent)
    path.write_text(json.dumps(document))
    assert look_at_mirror(driver_dir)[1] is None
    os.utime(library, ns=(1, 1))
    # No kernel module on this machine reports a version, so a changed file is an error.
    with pytest.raises(MirrorMismatchError, match=f"{library} has changed since"):
        look_at_mirror(driver_dir)
    library.unlink()
    assert look_at_mirror(driver_dir)[1] is None


def test_a_driver_that_changed_after_the_mirror_was_made_is_a_warning(host: Host) -> None:
    host.put_driver()
    host.put_mirror()
    os.utime(host.root / "nowhere", ns=(1, 1))
    [found] = host.check("mirror.in-force")
    assert found.startswith("warning: generation ")
    assert found.endswith("nowhere has changed since the mirror was made -> tidegate refresh")
    # Without a module that reports a version, only the files can be compared.
    host.remove("proc/driver/nvidia/version")
    [found] = host.check("mirror.in-force")
    assert found.startswith("wrong: mirror ")


@pytest.mark.parametrize("damage", ["shorter", "gone", "stranger", "no manifest"])
def test_a_changed_generation_is_wrong(host: Host, damage: str) -> None:
    host.put_driver()
    generation = host.put_mirror()
    library = generation / f"lib64/libnvcuvid.so.{V}"
    match damage:
        case "shorter":
            library.write_bytes(library.read_bytes()[:-1])
        case "gone":
            library.unlink()
        case "stranger":
            (generation / "lib64/libstranger.so.1").touch()
        case _:
            (generation / "manifest.json").write_text("{}")
    [found] = host.check("mirror.content")
    assert found.startswith("wrong: ")
    assert "tidegate refresh" in found


def test_the_content_of_files_is_not_read(host: Host) -> None:
    """Files of equal size are compared only by `tidegate verify`: a driver's files total about a
    gigabyte.
    """
    host.put_driver()
    generation = host.put_mirror()
    library = generation / f"lib64/libnvcuvid.so.{V}"
    library.write_bytes(b"\0" * library.stat().st_size)
    assert host.check("mirror.content")[0].startswith("ok: ")


class FileSystemWithRoom:
    """What `statvfs` returns for a file system with this much free space."""

    def __init__(self, free: int, *, inodes: int = 1 << 20, read_only: bool = False) -> None:
        self.f_bavail, self.f_frsize = free // 4096, 4096
        self.f_files, self.f_favail = 1 << 20, inodes
        self.f_flag = os.ST_RDONLY if read_only else 0


@pytest.mark.parametrize(
    ("room", "states"),
    [
        (FileSystemWithRoom(4096 * MIB), ["ok", "ok"]),
        (FileSystemWithRoom(500 * MIB), ["warning", "ok"]),
        (FileSystemWithRoom(1 * MIB), ["warning", "wrong"]),
        (FileSystemWithRoom(4096 * MIB, inodes=3), ["warning", "wrong"]),
        (FileSystemWithRoom(4096 * MIB, read_only=True), ["wrong", "wrong"]),
    ],
)
def test_room_is_required_for_a_generation_and_for_the_database(
    host: Host, monkeypatch: pytest.MonkeyPatch, room: FileSystemWithRoom, states: list[str]
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: room)
    assert [line.partition(":")[0] for line in host.check("mirror.room")] == states


def test_the_configuration_is_checked_as_by_the_governor(host: Host) -> None:
    assert host.check("governor.configuration") == [
        "ok: /etc/tidegate/config.yaml does not exist: the defaults are in force"
    ]
    host.put("etc/tidegate/config.yaml", "placement: pack\n")
    assert host.check("governor.configuration") == ["ok: /etc/tidegate/config.yaml is accepted"]
    host.put("etc/tidegate/config.yaml", "quantum_msec: 4\n")
    [found] = host.check("governor.configuration")
    assert found.startswith("wrong: ")
    assert found.endswith("quantum_msec is not an option -> did you mean quantum_ms?")


def test_drop_ins_are_read_as_by_the_governor(host: Host) -> None:
    host.put("etc/tidegate/config.d/20-b.yaml", "placement: pack\n")
    host.put("etc/tidegate/config.d/10-a.yaml", "placement: topology\nspin_us: 7\n")
    assert (host.node().config.placement, host.node().config.spin_us) == ("pack", 7)
    assert host.check("governor.configuration") == [
        "ok: /etc/tidegate/config.d/10-a.yaml, /etc/tidegate/config.d/20-b.yaml are accepted"
    ]
    host.put("etc/tidegate/config.d/30-c.yml", "placement: spread\n")
    assert host.check("governor.configuration")[1] == (
        "warning: /etc/tidegate/config.d/30-c.yml is not read: its name does not end in .yaml"
        " -> mv /etc/tidegate/config.d/30-c.yml /etc/tidegate/config.d/30-c.yaml"
    )
    host.remove("etc/tidegate/config.d/30-c.yml")
    # A link is resolved as on that node.
    host.put("etc/ours.yaml", "placement: topology\n")
    (host.root / "etc/tidegate/config.d/40-d.yaml").symlink_to("/etc/ours.yaml")
    assert host.node().config.placement == "topology"
    host.remove("etc/ours.yaml")
    assert host.check("governor.configuration") == [
        "wrong: /etc/tidegate/config.d/40-d.yaml: No such file -> name a readable file"
    ]
    host.remove("etc/tidegate/config.d/40-d.yaml")
    host.put("etc/tidegate/config.d/50-e.yaml", "placement: up\n")
    [found] = host.check("governor.configuration")
    assert found.startswith(
        "wrong: /etc/tidegate/config.d/50-e.yaml: placement: 'up' is not one of"
    )


def test_a_configuration_that_is_not_in_force_is_a_warning(tmp_path: Path) -> None:
    host = Host(tmp_path / "n")
    with governor(host) as told:
        config = told["config"]
        assert host.check("governor.in-force") == ["ok: the defaults are in force"]
        config["files"] = ["/etc/tidegate/config.yaml"]
        assert host.check("governor.in-force") == [
            "ok: the governor is using the configuration in its files: /etc/tidegate/config.yaml"
        ]
        config["changes"] = [
            {"option": "placement", "effect": "next"},
            {"option": "spin_us", "effect": "restart"},
            {"option": "on_violation", "effect": "now"},
        ]
        assert host.check("governor.in-force") == [
            "warning: the governor is not using the values of placement, on_violation in its files -> tidegate reload",
            "warning: the governor is not using the values of spin_us in its files -> systemctl restart tidegate-governor",
        ]
        config.update(
            changes=[], since=1e9, error={"message": "f: x is not an option", "hint": "look"}
        )
        [found] = host.check("governor.in-force")
        assert found == (
            "warning: f: x is not an option: the governor continues with the configuration from 2001-09-09T01:46:40Z,"
            " and a restart would fail -> correct it (look), then tidegate reload"
        )
        config["refused"] = {"message": "f: x is not an option", "hint": "look", "at": 1e9 + 60}
        [found] = host.check("governor.in-force")
        assert " (a newer one was refused at 2001-09-09T01:47:40Z), and a restart would" in found
    assert host.check("governor.in-force")[0].startswith("note: the governor does not answer")


def test_a_governor_that_answers_is_right(tmp_path: Path) -> None:
    host = Host(tmp_path / "n")
    with governor(host) as told:
        assert host.check("governor.answers") == [
            f"ok: version {told['ping']['version']}, process 4711"
        ]
        assert host.check("governor.gpus") == ["ok: GPU 0 is shared"]
        told["ping"]["version"] = "0.0.9"
        assert host.check("governor.answers")[0].startswith(
            "warning: the governor has version 0.0.9, but this command has version "
        )


def test_a_governor_that_is_away_is_wrong(host: Host) -> None:
    [found] = host.check("governor.answers")
    assert found.startswith("wrong: the governor does not answer at ")
    assert found.endswith("-> start tidegate-governor as root")
    host.put("usr/lib/systemd/system/tidegate-governor.service")
    [found] = host.check("governor.answers")
    assert "-> systemctl start tidegate-governor" in found
    assert host.check("governor.gpus")[0].startswith("note: the governor does not answer")


def test_lost_closed_and_unshared_gpus_are_reported(tmp_path: Path) -> None:
    host = Host(tmp_path / "n")
    with governor(host) as told:
        lost = {**GPU, "index": 1, "lost": "GPU is lost"}
        closed = {**GPU, "index": 2, "closed": "its MPS server is being started"}
        told["gpus"]["gpus"] += [lost, closed]
        told["gpus"]["left_out"] = [{"index": 3, "reason": "NVML does not report its memory"}]
        assert [line.partition(" ->")[0] for line in host.check("governor.gpus")] == [
            "warning: GPU 1 is lost: GPU is lost",
            "warning: GPU 2 accepts no containers at present: its MPS server is being started",
            "warning: GPU 3 is not shared: NVML does not report its memory",
            "ok: GPU 0 is shared",
        ]
        told["gpus"]["gpus"] = [lost]
        assert host.check("governor.gpus")[-1].startswith("wrong: no GPU accepts containers")


def test_containers_with_unidentifiable_processes_are_reported(tmp_path: Path) -> None:
    host = Host(tmp_path / "n")
    with governor(host) as told:
        assert host.check("governor.membership")[0].startswith("ok: each of 0 containers")
        told["list"]["containers"] = [
            {"id": "a", "control_group": True},
            {"id": "of an older governor"},
        ]
        assert host.check("governor.membership")[0].startswith("ok: each of 2 containers")
        told["list"]["containers"] += [{"id": "b" * 100, "control_group": False}]
        [found] = host.check("governor.membership")
        assert found.startswith(
            "warning: the governor cannot see the control groups of 1 of 3 containers "
        )
        assert f"({'b' * 64})" in found
        assert "-> run the governor in the host's control group namespace" in found
    assert host.check("governor.membership")[0].startswith("note: the governor does not answer")


def test_a_database_that_was_recently_moved_away_is_a_warning(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.put("var/lib/tidegate/state.db")
    quiet = "ok: no database was set aside in the last 7 days"
    assert host.check("governor.database") == [quiet]
    host.put("var/lib/tidegate/state.db.damaged-1")
    host.put("var/lib/tidegate/state.db.damaged-1-wal")
    [found] = host.check("governor.database")
    assert found.startswith(
        "warning: /var/lib/tidegate/state.db.damaged-1: 0 hours ago the governor found that its database was damaged"
    )
    later = time.time() + 8 * 86400
    monkeypatch.setattr(time, "time", lambda: later)
    assert host.check("governor.database") == [f"{quiet}, 1 before that"]
