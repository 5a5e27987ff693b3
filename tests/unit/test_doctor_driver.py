"""Test the findings of `tidegate doctor` about NVIDIA's driver.

Device nodes need root: tests/container/test_doctor.py tests the findings about them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.doctor_nodes import LIBRARIES, SMI, UUID, Host, V


@pytest.fixture
def host(tmp_path: Path) -> Host:
    host = Host(tmp_path / "root")
    host.put_driver()
    host.commands["nvidia-smi"] = SMI
    return host


def test_the_loaded_module_is_reported(host: Host) -> None:
    assert host.check("driver.module") == [
        f"ok: NVIDIA's open kernel module {V} is loaded; GPUs: 1"
    ]


def test_a_module_that_is_not_loaded_is_wrong(host: Host) -> None:
    host.remove("proc/driver/nvidia/version")
    assert host.check("driver.module") == [
        (
            "wrong: NVIDIA's kernel module is not loaded"
            " -> modprobe nvidia (if there is no such module, install the driver first)"
        )
    ]
    host.put("sys/module/nvidia/refcnt", "0")
    [found] = host.check("driver.module")
    assert found.startswith(
        "wrong: the kernel module nvidia is loaded, but /proc/driver/nvidia/version has"
    )


def test_wsl_needs_no_module(host: Host) -> None:
    host.remove("proc/driver/nvidia/version")
    host.put("dev/dxg")
    assert host.check("driver.module") == ["ok: WSL 2: the driver's kernel part belongs to Windows"]


def test_a_driver_that_a_refresh_would_find_is_right(host: Host) -> None:
    assert host.check("driver.libraries") == [f"ok: driver {V} (nvidia, x86_64) is complete"]


def test_libraries_of_another_version_than_the_module_are_wrong(host: Host) -> None:
    for path in (host.root / LIBRARIES).iterdir():
        path.rename(path.with_name(path.name.replace(V, "580.95.05")))
    [found] = host.check("driver.libraries")
    assert found.startswith(f"wrong: the kernel module is {V}, but the libraries are 580.95.05 in ")
    # A mirror in force still serves its own driver.
    host.put_mirror()
    [found] = host.check("driver.libraries")
    assert found.startswith(f"warning: the kernel module is {V}, ")


def test_missing_and_invalid_device_nodes_are_wrong(host: Host) -> None:
    host.put("dev/nvidia0")
    assert host.check("driver.nodes") == [
        "wrong: /dev/nvidiactl is missing: programs find no GPU -> nvidia-modprobe -c 255",
        "wrong: /dev/nvidia-uvm is missing: programs find no GPU -> nvidia-modprobe -u -c 0",
        "wrong: /dev/nvidia0 is not a character device -> rm /dev/nvidia0 && nvidia-modprobe -c 0",
    ]


def test_without_a_module_there_are_no_nodes(host: Host) -> None:
    host.remove("proc/driver/nvidia/version")
    assert host.check("driver.nodes") == [
        "note: there are no device nodes without NVIDIA's kernel module"
    ]


def test_links_in_dev_char_matter_to_systemd(host: Host) -> None:
    assert host.check("driver.links")[0].startswith("note: systemd is not running here")
    (host.root / "run/systemd/system").mkdir(parents=True)
    assert host.check("driver.links") == ["note: there are no device nodes that need a link"]
    host.put("dev/nvidiactl")
    host.put("dev/char/195:255")
    assert host.check("driver.links")[0].startswith("warning: /dev/char has no links to nvidia0: ")
    host.put("dev/char/195:0")
    assert host.check("driver.links") == ["ok: /dev/char has links to the device nodes"]


CLOSED = "wrong: GPU 0 is in compute mode"


@pytest.mark.parametrize(
    ("check", "answer", "said"),
    [
        ("driver.mig", SMI, "ok: MIG is not enabled on any GPU"),
        ("driver.mig", SMI.replace("Disabled", "[N/A]"), "ok: MIG is not enabled on any GPU"),
        ("driver.mig", SMI.replace("Disabled", "Enabled"), "warning: GPU 0 has MIG enabled: "),
        ("driver.compute-mode", SMI, "ok: the GPUs accept processes of several containers"),
        (
            "driver.compute-mode",
            SMI.replace("Default", "Exclusive_Process"),
            f"{CLOSED} Exclusive_Process",
        ),
        (
            "driver.compute-mode",
            SMI.replace("Default", "Prohibited"),
            f"{CLOSED} Prohibited: it accepts no process",
        ),
        ("driver.persistence", SMI, "ok: the GPUs stay initialised while no program uses them"),
        (
            "driver.persistence",
            f"0, {UUID}, Disabled, Default, Disabled\n",
            "note: persistence mode is off for GPU 0: ",
        ),
    ],
)
def test_modes_that_nvidia_smi_reports_are_checked(
    host: Host, check: str, answer: str, said: str
) -> None:
    host.commands["nvidia-smi"] = answer
    [found] = host.check(check)
    assert found.startswith(said)


def test_exclusive_mode_is_accepted_for_a_gpu_under_mps(host: Host) -> None:
    host.commands["nvidia-smi"] = SMI.replace("Default", "Exclusive_Process")
    mps = ("mps", "timeslice")
    assert host.check("driver.compute-mode", strategies=mps)[0].startswith("ok: ")
    host.commands["nvidia-smi"] = SMI.replace("Default", "Prohibited")
    assert host.check("driver.compute-mode", strategies=mps)[0].startswith("wrong: ")


@pytest.mark.parametrize("check", ["driver.mig", "driver.compute-mode", "driver.persistence"])
def test_modes_that_nvidia_smi_does_not_report_are_unseen(host: Host, check: str) -> None:
    del host.commands["nvidia-smi"]
    assert host.check(check) == ["unseen: nvidia-smi cannot be run: No such file or directory"]
    host.remove("proc/driver/nvidia/version")
    assert host.check(check) == [
        "note: nvidia-smi is not run: NVIDIA's kernel module is not loaded"
    ]


def put_mps(host: Host, pid: int, pipe: str | None) -> None:
    host.put(f"proc/{pid}/comm", "nvidia-cuda-mps\n")
    host.put(f"proc/{pid}/stat", f"{pid} (nvidia-cuda-mps) S 1\n")
    variable = "" if pipe is None else f"CUDA_MPS_PIPE_DIRECTORY={pipe}\0"
    host.put(f"proc/{pid}/environ", f"PATH=/bin\0{variable}")


def test_a_zombie_of_an_mps_daemon_is_ignored(host: Host) -> None:
    put_mps(host, 812, None)
    host.put("proc/812/stat", "812 (nvidia-cuda-mps) Z 1\n")
    assert host.check("driver.mps") == ["ok: no MPS daemon is running"]


def test_an_mps_daemon_that_is_not_the_governors_is_reported(host: Host) -> None:
    host.put("proc/1/comm", "systemd\n")
    assert host.check("driver.mps") == ["ok: no MPS daemon is running"]
    put_mps(host, 812, f"/run/tidegate/mps/{UUID}/pipe")
    assert host.check("driver.mps") == ["ok: the MPS daemons are the governor's"]
    put_mps(host, 900, None)
    assert host.check("driver.mps") == [
        (
            "warning: process 900 is an MPS daemon that is not the governor's (/tmp/nvidia-mps): its clients use a GPU outside of"
            " all quotas -> echo quit | CUDA_MPS_PIPE_DIRECTORY=/tmp/nvidia-mps nvidia-cuda-mps-control"
        )
    ]
