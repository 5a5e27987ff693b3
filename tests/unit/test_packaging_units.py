"""Check the units and the udev rule of packaging/ with systemd's own tools and against the code."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from governor.config import Config
from governor.errors import ConfigError
from governor.hardware.channel import SOCKET

PACKAGING = Path(__file__).resolve().parents[2] / "packaging"
UNITS = PACKAGING / "systemd"
SERVICES = [
    "tidegate-refresh.service", "tidegate-driver-changed.service", "tidegate-gc.service",
    "tidegate-governor.service", "tidegate-steering.service",
]  # fmt: skip


def settings(unit: str, key: str) -> list[str]:
    """Return the values of a key, in order."""
    text = (UNITS / unit).read_text()
    return re.findall(rf"^{key}=(.*)$", text, re.MULTILINE)


@pytest.fixture
def host(tmp_path):
    """A root with the units and the programs that they name, which systemd-analyze looks up."""
    units = tmp_path / "usr/lib/systemd/system"
    shutil.copytree(UNITS, units)
    targets = ("sysinit", "basic", "paths", "sockets", "shutdown", "multi-user", "local-fs")
    for name in (*targets, "umount"):
        (units / f"{name}.target").write_text("[Unit]\nDefaultDependencies=no\n")
    names = [f"bin/{name}" for name in ("tidegate", "tidegate-governor", "sleep", "systemctl")]
    code = "lib/tidegate/python"
    servers = (f"{code}/oci_hook/tidegate-forkserver", f"{code}/governor/tidegate-steering")
    for name in (*names, *servers):
        program = tmp_path / "usr" / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
    return tmp_path


def verify(host):
    """Return the status and the complaints of systemd-analyze about the units below a root."""
    names = [p.name for p in UNITS.iterdir() if p.suffix != ".preset" and "@" not in p.name]
    done = subprocess.run(
        ["systemd-analyze", f"--root={host}", "--man=no", "verify", *names],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    return done.returncode, done.stderr


def test_systemd_accepts_the_units(require, host):
    require("systemd-analyze")
    assert verify(host) == (0, "")


def test_systemd_rejects_an_invalid_unit(require, host):
    require("systemd-analyze")
    unit = host / "usr/lib/systemd/system/tidegate-refresh.service"
    unit.write_text(unit.read_text().replace("Restart=on-failure", "Restart=always"))
    assert verify(host)[0] != 0


@pytest.mark.parametrize("service", SERVICES)
def test_the_exposure_of_a_service_is_two_points_at_most(require, service):
    require("systemd-analyze")
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=yes", "--threshold=20", UNITS / service],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def test_a_refresh_is_retried_after_a_changed_file_and_not_after_a_driver_error():
    assert settings("tidegate-refresh.service", "SuccessExitStatus") == ["SIGTERM"]
    prevented = settings("tidegate-refresh.service", "RestartPreventExitStatus")[0].split()
    assert "69" in prevented  # an error of the driver, see docs/reference/errors.md
    assert "72" not in prevented  # a file changed while it was being read


def test_each_watched_directory_is_an_instance_of_the_watch_unit(require):
    require("systemd-escape")
    instances = [w for w in settings("tidegate-refresh.path", "Wants") if "@" in w]
    places = subprocess.run(
        ["systemd-escape", "--unescape", "--template=tidegate-watch@.path", "--path", *instances],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert places == [
        "/usr/lib/x86_64-linux-gnu/nvidia/current",
        "/usr/lib/aarch64-linux-gnu/nvidia/current",
        "/usr/local/nvidia/lib64",
        "/run/nvidia/driver",
        "/run/nvidia/validations",
        "/usr/lib/tidegate/x86_64-linux-gnu",
        "/usr/lib/tidegate/aarch64-linux-gnu",
    ]


def test_loading_the_kernel_module_starts_a_packaged_unit():
    (rule,) = (
        line
        for line in (PACKAGING / "udev/70-tidegate.rules").read_text().splitlines()
        if not line.startswith("#")
    )
    match, keys = rule.split(", TAG")
    assert match == 'ACTION=="add", SUBSYSTEM=="module", KERNEL=="nvidia"'
    wanted = re.findall(r'ENV\{SYSTEMD_WANTS\}\+="([^"]+)"', keys)
    assert wanted == ["tidegate-driver-changed.service"]
    assert (UNITS / wanted[0]).is_file()
    assert keys.startswith('+="systemd", ')


def test_all_units_of_the_preset_can_be_enabled():
    lines = (UNITS / "80-tidegate.preset").read_text().splitlines()
    enabled = [line.split()[1] for line in lines if line.startswith("enable ")]
    assert enabled == [
        "tidegate-refresh.service", "tidegate-refresh.path", "tidegate-steering.socket",
        "tidegate-governor.service", "tidegate-forkserver.service",
    ]  # fmt: skip
    wanted = {unit: settings(unit, "WantedBy") for unit in enabled}
    assert wanted.pop("tidegate-steering.socket") == ["sockets.target"]
    assert set(map(tuple, wanted.values())) == {("multi-user.target",)}


def test_the_governor_connects_to_the_socket_of_the_steering_service():
    assert settings("tidegate-steering.socket", "ListenStream") == [SOCKET]
    assert settings("tidegate-governor.service", "Wants") == ["tidegate-steering.socket"]
    assert settings("tidegate-steering.socket", "SocketMode") == ["0600"]


def test_the_steering_service_has_the_rights_that_it_requires():
    """`require_rights` of governor/hardware/nvidia.py asks for two rights; the governor has
    neither.
    """
    (capabilities,) = settings("tidegate-steering.service", "CapabilityBoundingSet")
    assert "CAP_SYS_ADMIN" in capabilities.split()
    assert settings("tidegate-steering.service", "SystemCallFilter")[-1] == "pidfd_getfd"
    (governor,) = settings("tidegate-governor.service", "CapabilityBoundingSet")
    assert "CAP_SYS_ADMIN" not in governor.split()


MOUNTING = [
    "BindPaths",
    "BindReadOnlyPaths",
    "InaccessiblePaths",
    "NoExecPaths",
    "PrivateDevices",
    "PrivateIPC",
    "PrivateMounts",
    "PrivateNetwork",
    "PrivatePIDs",
    "PrivateTmp",
    "PrivateUsers",
    "ProcSubset",
    "ProtectClock",
    "ProtectControlGroups",
    "ProtectHome",
    "ProtectHostname",
    "ProtectKernelLogs",
    "ProtectKernelModules",
    "ProtectKernelTunables",
    "ProtectProc",
    "ProtectSystem",
    "ReadOnlyPaths",
    "ReadWritePaths",
    "RootDirectory",
    "RootImage",
    "TemporaryFileSystem",
    "DynamicUser",
    "MountAPIVFS",
    "StateDirectory",
    "CacheDirectory",
]


@pytest.mark.parametrize("key", MOUNTING)
def test_the_fork_server_stays_in_the_mount_namespace_of_the_host(key):
    """According to systemd.exec(5), each of these gives a service its own namespaces, in which no
    hook could work.
    """
    assert settings("tidegate-forkserver.service", key) == []


def test_the_unit_keeps_the_directories_for_the_next_governor():
    def one(key):
        (value,) = settings("tidegate-governor.service", key)
        return value

    config = Config()
    assert f"/run/{one('RuntimeDirectory')}" == config.runtime_dir
    assert one("RuntimeDirectoryPreserve") == "yes"  # containers mount the directory
    assert f"/var/lib/{one('StateDirectory')}" == config.state_dir
    assert one("Restart") == "always"
    # These are errors that an operator has to fix: argparse's, and `config` in
    # docs/reference/errors.md.
    assert one("RestartPreventExitStatus").split() == ["2", str(ConfigError.status)]
