"""The table of driver calls, and its use on a stand-in for the kernel module (kernel_module.py)."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from governor.hardware import calls
from governor.hardware.activity import Full
from governor.hardware.discovery import (
    borrowed,
    control_descriptors,
    duplicate_descriptor,
    find_holdings,
    live_clients,
)
from governor.hardware.driver import DriverCallError, DriverClient, module_branch
from governor.hardware.nvidia import revive
from governor.hardware.trace import RESTORE, Residency, Switch, Trace
from tests.conftest import lack, need
from tests.unit.kernel_module import GPU_ID, UUID, KernelModule, make_nodes
from tools.check_driver_calls import assertions, branch_of, differences, layouts

ROOT = Path(__file__).resolve().parents[2]
# Debian's copies of NVIDIA's source: the version, and the SHA-256 of the package's .orig.tar.xz.
SOURCES = {
    "535.261.03": "14f64f53694d4a580ea68a561db02c2a8847790087a86f50fd2f40eac3eebb8f",
    "555.58.02": "fc821323e924edbc636fa61b66edf5918abb8517c53e18c4bd883fa495b05da8",
}
POOL = "pool/contrib/n/nvidia-open-gpu-kernel-modules/nvidia-open-gpu-kernel-modules_{}.orig.tar.xz"


@pytest.fixture
def module():
    return KernelModule()


@pytest.fixture
def nodes(tmp_path):
    return make_nodes(tmp_path)


@pytest.fixture
def device(nodes):
    return nodes["path"]


@pytest.fixture
def driver(module, nodes):
    with DriverClient(580, **nodes, ioctl=module.ioctl) as driver:
        yield driver


# ---- the table ----


@pytest.mark.parametrize("branch", [515, 535, 545, 580])
def test_fields_lie_within_their_structures(branch):
    found = layouts(branch)
    assert len({layout.name for layout in found}) == len(set(found))
    for layout in found:
        end = 0
        for field in sorted(layout.fields, key=lambda field: field.offset):
            assert field.offset >= end
            assert field.offset % min(8, calls.SIZES[field.type]) == 0
            end = field.offset + calls.SIZES[field.type] * field.n
        assert end <= layout.size


def test_a_list_that_is_too_long_is_refused():
    layout = calls.DISABLE_CHANNELS.parameters
    with pytest.raises(ValueError, match="holds 64, not 65"):
        layout.pack({"hClientList": list(range(65))})
    assert len(layout.pack({"hClientList": list(range(64))})) == 536


def test_a_difference_from_the_source_is_found(tmp_path):
    """The source in this test is almost empty: names are missing, and one has another number."""
    need("gcc")
    headers = tmp_path / "src/common/sdk/nvidia/inc"
    for name in {
        line.split("<")[1][:-1]
        for line in assertions(580).splitlines()
        if line.startswith("#include")
    }:
        (headers / name).parent.mkdir(parents=True, exist_ok=True)
        (headers / name).write_text("#include <stdint.h>\n" if name == "stddef.h" else "")
    (headers / "stddef.h").write_text("#define offsetof __builtin_offsetof\n")
    (headers / "nvos.h").write_text("#define NV01_ROOT_CLIENT 0x42\n")
    found = differences(tmp_path, 580)
    assert "NV01_ROOT_CLIENT is 0x41" in found
    assert any("NV2080_CTRL_CMD_FIFO_DISABLE_CHANNELS" in line for line in found)


def _mirror():
    targets = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(REPO_URI)"],
        check=False,
        capture_output=True,
        text=True,
    )
    found = [
        line.rstrip("/")
        for line in targets.stdout.splitlines()
        if line.rstrip("/").endswith("/debian")
    ]
    return found[0] if found else lack("needs Debian's package sources")


@pytest.mark.slow
@pytest.mark.parametrize("version", SOURCES)
def test_the_table_matches_the_published_source(version, tmp_path):
    need("gcc", "apt-get", "xz")
    archive = ROOT / "build/driver-cache" / f"source-{version}.tar.xz"
    archive.parent.mkdir(parents=True, exist_ok=True)
    if not archive.exists():
        helper = [
            "/usr/lib/apt/apt-helper",
            "-qq",
            "-o",
            "APT::Sandbox::User=root",
            "download-file",
        ]
        partial = tmp_path / "archive"
        done = subprocess.run(
            [*helper, f"{_mirror()}/{POOL.format(version)}", partial], check=False
        )
        if done.returncode:
            lack(f"needs the source of {version} from Debian's mirror")
        shutil.move(partial, archive)
    assert hashlib.sha256(archive.read_bytes()).hexdigest() == SOURCES[version]
    wanted = ["*/version.mk", "*/src/common/sdk/*", "*/src/nvidia/arch/nvalloc/unix/include/*"]
    unpack = [
        "tar",
        "-xJf",
        archive,
        "-C",
        tmp_path,
        "--strip-components=1",
        "--wildcards",
        *wanted,
    ]
    subprocess.run(unpack, check=True)
    assert branch_of(tmp_path) == int(version.partition(".")[0])
    assert differences(tmp_path, branch_of(tmp_path)) == []


# ---- calls ----


@pytest.mark.parametrize(
    ("text", "branch"),
    [
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build", 580),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.261.03  Sat Aug 16", 535),
        ("nothing that is known", None),
    ],
)
def test_the_branch_is_the_kernel_modules(tmp_path, text, branch):
    (tmp_path / "driver/nvidia").mkdir(parents=True)
    (tmp_path / "driver/nvidia/version").write_text(text)
    assert module_branch(tmp_path) == branch
    assert module_branch(tmp_path / "absent") is None


@pytest.mark.parametrize("branch", [515, 530, 535, 545, 580])
def test_gpus_are_opened_on_each_branch(branch, nodes):
    module = KernelModule(branch)
    with DriverClient(branch, **nodes, ioctl=module.ioctl) as driver:
        gpu = driver.gpu(UUID)
        Trace(driver, gpu, 16)
    assert (gpu.gpu_id, gpu.uuid) == (GPU_ID, UUID)


def test_an_older_branch_is_refused_before_anything_is_opened():
    with pytest.raises(
        DriverCallError,
        match="from branch 470, but Tidegate supports calls only from branch 515 onwards",
    ):
        DriverClient(470, path="/nowhere")


def test_an_error_names_the_call_and_the_drivers_answer(driver, module):
    module.refuse[calls.GET_TIME.name] = 0x56
    gpu = driver.gpu(UUID)
    with pytest.raises(DriverCallError, match="TIMER_GET_TIME: NV_ERR_NOT_SUPPORTED") as e:
        driver.gpu_time_ns(gpu)
    assert e.value.status == 0x56


def test_a_client_that_cannot_be_made_leaves_no_descriptor(device):
    def fail(*_):
        raise OSError(errno.ENODEV, "no such device")

    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(OSError, match="no such device"):
        DriverClient(580, path=device, ioctl=fail)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


# ---- discovery ----


@pytest.fixture
def other(device):
    """A process that has the control device open as descriptor 9."""
    process = subprocess.Popen(
        ["sh", "-c", 'exec 9<>"$1"; echo ready; exec sleep 60', "sh", device],
        stdout=subprocess.PIPE,
        text=True,
    )
    process.stdout.readline()
    process.pidfd = os.pidfd_open(process.pid)
    yield process
    os.close(process.pidfd)
    process.kill()
    process.wait()
    process.stdout.close()


@pytest.fixture
def number():
    """Provide the number of a descriptor that no call opens: it is far above those in use."""
    with Path(os.devnull).open() as file:
        fd = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, file.fileno() + 200)
    os.close(fd)
    return fd


@pytest.fixture
def found_by(monkeypatch, device):
    """Use an ordinary file as the device node, find descriptors by its path, and give their
    duplicates a fixed number.
    """
    monkeypatch.setattr(
        "governor.hardware.discovery.control_descriptors",
        lambda pid, *_: [
            int(entry.name)
            for entry in Path(f"/proc/{pid}/fd").iterdir()
            if os.path.realpath(entry) == device
        ],
    )

    def standing_for(fd):
        duplicates = []

        def duplicate(pidfd, other):
            copy = duplicate_descriptor(pidfd, other)
            os.dup2(copy, fd)
            os.close(copy)
            duplicates.append(fd)
            return fd

        monkeypatch.setattr("governor.hardware.discovery.duplicate_descriptor", duplicate)
        return duplicates

    return standing_for


def test_groups_are_found_from_outside_without_a_line_in_the_kernels_log(
    module, device, other, found_by, number
):
    client = module.process(number, n_contexts=2)
    found_by(number)
    with DriverClient(580, path=device, ioctl=module.ioctl) as driver:
        (holding,) = find_holdings(
            driver, other.pid, other.pidfd, live_clients(driver), device=device
        )
    assert (holding.pid, holding.client) == (other.pid, client)
    assert holding.descriptor == 9
    assert [(len(group.channels), group.gpu_id) for group in holding.groups] == [(8, GPU_ID)] * 2
    assert {g.handle for g in holding.groups} < set(module.objects(client, calls.GROUP.value))
    # Through other clients, only existing handles are looked up; handles that do not exist are
    # looked up only through our own client.
    assert {status for name, status in module.asked if name == calls.GET_HANDLE_INFO.name} == {0}


def test_a_client_of_another_process_is_left_alone(module, device, other, found_by, number):
    module.process(number + 1)
    found_by(number)
    with DriverClient(580, path=device, ioctl=module.ioctl) as driver:
        assert (
            find_holdings(driver, other.pid, other.pidfd, live_clients(driver), device=device) == []
        )
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(number)  # the duplicate was closed


def test_a_client_without_channels_is_not_found(module, device, other, found_by, number):
    client = module.process(number)
    for handle in list(module.objects(client, calls.GROUP.value)):
        del module.clients[client][1][handle]
    found_by(number)
    with DriverClient(580, path=device, ioctl=module.ioctl) as driver:
        assert (
            find_holdings(driver, other.pid, other.pidfd, live_clients(driver), device=device) == []
        )


def test_only_clients_that_are_older_than_ours_are_seen(module, device):
    first = module.process(600)
    with DriverClient(580, path=device, ioctl=module.ioctl) as driver:
        later = module.process(601)
        assert live_clients(driver) == [first]
        assert later > driver.client


def test_a_process_that_is_gone_is_an_error(driver, device):
    ended = subprocess.Popen(["true"])
    pidfd = os.pidfd_open(ended.pid)
    ended.wait()
    with pytest.raises(OSError, match="has ended"):
        find_holdings(driver, ended.pid, pidfd, [], device=device)
    os.close(pidfd)


def test_a_descriptor_is_recognised_by_its_device_number():
    with Path("/dev/null").open() as null, Path(os.devnull).open() as again:
        found = control_descriptors(os.getpid(), "/dev/null")
        assert {null.fileno(), again.fileno()} <= set(found)
        assert null.fileno() not in control_descriptors(os.getpid(), "/dev/zero")


# ---- steering ----


def test_slices_and_switches_reach_the_groups(module, nodes, other, found_by, number):
    device = nodes["path"]
    client = module.process(number)
    found_by(number)
    with DriverClient(580, **nodes, ioctl=module.ioctl) as driver:
        gpu = driver.gpu(UUID)
        (holding,) = find_holdings(
            driver, other.pid, other.pidfd, live_clients(driver), device=device
        )
        (group,) = holding.groups
        with borrowed(other.pidfd, holding.descriptor, device) as fd:
            driver.set_timeslice(client, group.handle, fd, 200)
            assert driver.timeslice_us(client, group.handle, fd) == 200
        pairs = [(client, channel) for channel in group.channels]
        driver.switch_channels(gpu, pairs, on=False)
        off = {handle for handle, item in module.objects(client, 0xC86F).items() if item.off}
        assert off == set(group.channels)
        driver.switch_channels(gpu, pairs, on=True)
        assert not any(item.off for item in module.objects(client, 0xC86F).values())


def test_more_channels_than_one_call_accepts_are_switched_in_several_calls(driver, module):
    client = module.process(600, n_contexts=12)
    channels = [(client, handle) for handle in module.objects(client, 0xC86F)]
    gpu = driver.gpu(UUID)
    driver.switch_channels(gpu, channels, on=False)
    assert all(item.off for item in module.objects(client, 0xC86F).values())
    assert (
        [name for name, _ in module.asked].count(calls.DISABLE_CHANNELS.name)
        == -(-len(channels) // 64)
        == 3
    )


# ---- the trace ----


@pytest.fixture
def trace(driver):
    gpu = driver.gpu(UUID)
    return Trace(driver, gpu, 8)


def test_the_trace_is_read_in_order_and_once(trace, module):
    module.turn(100, 7, 2_000_000)
    module.turn(200, 9, 1_000_000)
    found = trace.read()
    assert [(s.begins, s.pid, s.context, s.sequence) for s in found] == [
        (True, 100, 7, 0), (False, 100, 7, 1), (True, 200, 9, 2), (False, 200, 9, 3),
    ]  # fmt: skip
    assert found[1].at_ns - found[0].at_ns == 2_000_000 + RESTORE
    assert trace.read() == []


def test_the_trace_wraps_around_and_counts_dropped_records(trace, module):
    for pid in range(10):
        module.turn(pid, pid, 1000)
        assert [s.pid for s in trace.read()] == [pid, pid]
    assert trace.n_dropped == 0
    for pid in range(10):
        module.turn(pid, pid, 1000)
    assert len(trace.read()) == 7
    assert trace.n_dropped == 13


def test_the_error_for_a_refused_trace_states_the_reason(driver, module):
    gpu = driver.gpu(UUID)
    module.refuse[calls.BIND_TRACE.name] = 0x56
    with pytest.raises(
        DriverCallError, match="the trace of context switches: NV_ERR_NOT_SUPPORTED"
    ):
        Trace(driver, gpu, 8)


def test_time_on_the_gpu_is_added_up_by_process(trace, module):
    residency = Residency()
    module.turn(100, 7, 2_000_000)
    module.turn(200, 9, 1_000_000)
    module.turn(100, 7, 500_000, ends=False)
    residency.add(trace.read())
    residency.settle(module.now_ns)
    assert dict(residency.ns) == {100: 2_500_000, 200: 1_000_000}
    module.now_ns += 100
    residency.settle(module.now_ns)
    residency.settle(module.now_ns - 50)  # an earlier clock reading takes nothing back
    assert residency.ns[100] == 2_500_100


def test_a_process_that_is_off_is_not_resident_whether_its_end_is_recorded_or_not():
    """No other context follows, so neither the end of its turn nor the beginning of the next is
    recorded.
    """
    residency = Residency(restore_ns=0)
    residency.add([Switch(True, 1, 7, 100, 0)])
    residency.switched([1], 150, on=False)
    residency.switched([1], 400, on=True)
    residency.settle(450)
    assert residency.take() == ({1: 100}, {})
    residency.switched([1, 2], 500, on=False)
    residency.add([Switch(False, 1, 7, 480, 1)])  # this time the end is recorded, and read late
    residency.switched([1], 600, on=True)
    residency.settle(700)
    assert residency.take() == ({1: 30}, {})


def test_a_process_that_switches_itself_on_again_is_charged():
    residency = Residency(restore_ns=0)
    residency.add([Switch(True, 1, 7, 100, 0)])
    residency.switched([1], 150, on=False)
    residency.add([Switch(True, 1, 7, 300, 1)])
    residency.settle(350)
    assert residency.take() == ({1: 100}, {1: 50})
    residency.switched([1], 400, on=False)  # switched off again, which ends its turn
    residency.settle(500)
    assert residency.take() == ({1: 50}, {1: 50})


def test_turns_that_end_with_the_work_and_with_the_slice_are_told_apart():
    residency = Residency(restore_ns=0)
    residency.sliced(1, 1000)
    residency.sliced(2, 1000)
    at, n = 0, itertools.count()
    for pid, length in [(1, 500), (2, 1050), (1, 500), (2, 2000), (1, 400), (2, 100)]:
        residency.add(
            [Switch(True, pid, pid, at, next(n)), Switch(False, pid, pid, at + length, next(n))]
        )
        at += length
    early, full = residency.take_turns(at)
    assert early == {1: 2}  # the last turn's end is judged when the process is on again
    assert full == [Full(2, at - 500, at - 1550)]  # after the longer turn, no other context waited
    residency.add([Switch(True, 2, 2, at, next(n))])
    assert residency.take_turns(at) == ({2: 1}, [])


def test_a_turn_that_was_ended_by_switching_off_is_not_early():
    residency = Residency(restore_ns=0)
    residency.sliced(1, 1000)
    residency.add([Switch(True, 1, 7, 0, 0), Switch(False, 1, 7, 300, 1)])
    residency.switched([1], 350, on=False)
    residency.switched([1], 900, on=True)
    residency.add([Switch(True, 1, 7, 950, 2)])
    assert residency.take_turns(1000) == ({}, [])


def test_a_turn_that_was_ended_by_switching_off_is_judged_like_the_one_before():
    residency = Residency(restore_ns=0)
    residency.sliced(1, 1000)
    for begin, end in ((0, 1000), (1500, 1900)):
        residency.add([Switch(True, 1, 7, begin, 0), Switch(False, 1, 7, end, 1)])
    residency.switched([1], 2000, on=False)
    residency.settle(2000)
    assert residency.take_turns(2000) == ({}, [Full(1, 2000, 1000), Full(1, 500, 100)])


def test_lost_records_are_counted_and_time_is_charged_once(trace, module):
    residency = Residency()
    module.turn(100, 7, 1000, ends=False)  # its end and the turn of another process are lost
    module.lose(3)
    module.turn(300, 5, 400)
    residency.add(trace.read())
    assert residency.n_lost == 3
    assert sum(residency.ns.values()) == 1400
    assert residency.resident is None


def test_the_time_in_which_a_context_is_restored_is_charged_to_no_process():
    residency = Residency()
    turn = 1_002_000 + RESTORE  # a kernel of 1.002 ms (H200)
    residency.add([Switch(True, 1, 7, 0, 0), Switch(False, 1, 7, turn, 1)])
    residency.add(
        [Switch(True, 2, 9, 2 * turn, 2), Switch(False, 2, 9, 2 * turn + RESTORE // 2, 3)]
    )
    residency.add([Switch(True, 1, 7, 3 * turn, 4)])
    residency.settle(3 * turn + RESTORE)
    assert residency.take()[0] == {1: 1_002_000}
    residency.settle(3 * turn + RESTORE + 500)
    assert residency.take()[0] == {1: 500}


def test_the_end_of_another_context_ends_nothing():
    residency = Residency(restore_ns=0)
    residency.add([Switch(True, 1, 7, 100, 0), Switch(False, 2, 9, 150, 1)])
    assert residency.resident is not None
    assert residency.ns == {1: 50}


def test_the_tool_prints_its_usage():
    done = subprocess.run(
        [sys.executable, "-m", "tools.check_driver_calls"],
        check=False,
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 1
    assert "SOURCE [TAG...]" in done.stderr


def test_without_the_gpus_own_device_node_the_driver_gives_no_device(module, device):
    """The stand-in answers as an H200 did to a watchdog without NVML."""
    with (
        DriverClient(580, path=device, proc=Path("/nowhere"), ioctl=module.ioctl) as driver,
        pytest.raises(DriverCallError, match="NV01_DEVICE_0: NV_ERR_INSUFFICIENT_PERMISSIONS"),
    ):
        driver.gpu(UUID)


def _switch_off(module, nodes):
    """Switch two processes off, like a governor that is then killed; return the channels."""
    off = [
        (client, channel)
        for client in (module.process(600), module.process(601))
        for channel in module.objects(client, 0xC86F)
    ]
    with DriverClient(580, **nodes, ioctl=module.ioctl) as driver:
        driver.switch_channels(driver.gpu(UUID), off, on=False)
    return off


def _is_off(module, pair):
    return bool(module.clients[pair[0]][1][pair[1]].off)


def test_another_process_switches_on_channels_that_were_left_off(module, nodes):
    before = len(list(Path("/proc/self/fd").iterdir()))
    off = _switch_off(module, nodes)
    assert all(_is_off(module, pair) for pair in off)
    revive(UUID, off, **nodes, ioctl=module.ioctl)
    assert not any(_is_off(module, pair) for pair in off)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_process_that_has_ended_does_not_keep_others_off(module, nodes):
    off = _switch_off(module, nodes)
    del module.clients[off[0][0]]
    revive(UUID, off, **nodes, ioctl=module.ioctl)
    assert not any(_is_off(module, pair) for pair in off if pair[0] in module.clients)


def test_a_driver_that_refuses_to_switch_on_is_an_error(module, nodes):
    off = _switch_off(module, nodes)
    module.refuse[calls.DISABLE_CHANNELS.name] = 0x56
    with pytest.raises(DriverCallError, match="NV_ERR_NOT_SUPPORTED"):
        revive(UUID, off, **nodes, ioctl=module.ioctl)


def test_a_gpu_that_no_process_has_open_has_nothing_to_switch_on(module, nodes):
    revive("GPU-other", [(1, 2)], **nodes, ioctl=module.ioctl)
    assert calls.DISABLE_CHANNELS.name not in [name for name, _ in module.asked]
