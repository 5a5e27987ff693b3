"""The simulated driver's NVML: lists and samples of processes, queried as an application would."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from simgpu import simgpu
from simgpu.testing import environment

MIB = 1 << 20
SUCCESS, INVALID_ARGUMENT, NOT_SUPPORTED, NOT_FOUND, INSUFFICIENT_SIZE = 0, 2, 3, 6, 7
VERSION_MISMATCH = 25

# One process has both roles: it queries NVML, and its context burns on the virtual clock.
PRELUDE = """
import ctypes, json, os, sys, pynvml
from ctypes import byref, c_uint, c_ulonglong, c_int
from pathlib import Path
from pynvml import *
from simgpu.testing import *
build = Path(sys.argv[1])
driver = SimulatedDriver(build)
nvml = pynvml.nvmlLib = ctypes.CDLL(str(build / "simgpu/libnvidia-ml.so.1"))
driver.call("cuInit", 0)
driver.set_clock(1000 * MS)
context = driver.context()
nvmlInit()
d = nvmlDeviceGetHandleByIndex(0)

def work(busy_ms, all_ms):
    now = driver.clock()
    context.burn(busy_ms * MS)
    context.synchronize()
    driver.set_clock(now + all_ms * MS)
"""


@pytest.fixture
def ask(tmp_path: Path, build_dir: Path) -> Any:
    """Return a function that runs a program and returns the JSON that it prints."""
    simgpu.create(tmp_path, virtual_clock=True)

    def run(program: str, **variables: str) -> Any:
        done = subprocess.run(
            [sys.executable, "-c", PRELUDE + program, str(build_dir)],
            env=environment(build_dir, tmp_path) | variables,
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


def test_every_form_of_a_list_has_the_process(ask: Any) -> None:
    listed, none = ask(
        "class v1(ctypes.Structure):\n"
        "    _fields_ = [('pid', c_uint), ('usedGpuMemory', c_ulonglong)]\n"
        "def get(name, entry, room):\n"
        "    count, array = c_uint(room), (entry * 4)()\n"
        "    got = getattr(nvml, name)(d, byref(count), array if room else None)\n"
        "    return [got, count.value, array[0].pid == os.getpid(), array[0].usedGpuMemory]\n"
        "base = 'nvmlDeviceGet%sRunningProcesses'\n"
        "forms = [('', v1), ('_v2', c_nvmlProcessInfo_v2_t), ('_v3', c_nvmlProcessInfo_v3_t)]\n"
        "print(json.dumps([[get(base % 'Compute' + s, e, n) for s, e in forms for n in (0, 4)],"
        " [get(base % k + s, e, 4)[:2] for k in ('Graphics', 'MPSCompute') for s, e in forms]]))"
    )
    assert listed == [[INSUFFICIENT_SIZE, 1, False, 0], [SUCCESS, 1, True, 512 * MIB]] * 3
    assert none == [[SUCCESS, 0]] * 6


def test_details_are_versioned(ask: Any) -> None:
    assert ask(
        "def get(version, mode):\n"
        "    a = c_nvmlProcessDetailList_v1_t()\n"
        "    array = (c_nvmlProcessDetail_v1_t * 4)()\n"
        "    a.version, a.mode, a.numProcArrayEntries, a.procArray = version, mode, 4, array\n"
        "    return [nvml.nvmlDeviceGetRunningProcessDetailList(d, byref(a)),"
        " a.numProcArrayEntries, array[0].usedGpuMemory]\n"
        "v = nvmlProcessDetailList_v1\n"
        "print(json.dumps([get(v, 0), get(v, 1), get(v, 3), get(v + 1, 0)]))"
    ) == [
        [SUCCESS, 1, 512 * MIB],
        [SUCCESS, 0, 0],
        [INVALID_ARGUMENT, 4, 0],
        [INVALID_ARGUMENT, 4, 0],
    ]


def test_a_process_is_sampled_by_the_gpus_clock(ask: Any) -> None:
    first, second, later, info = ask(
        "def get(since=0):\n"
        "    try:\n"
        "        samples = nvmlDeviceGetProcessUtilization(d, since)\n"
        "    except NVMLError as e:\n"
        "        return e.value\n"
        "    return [[s.pid == os.getpid(), s.smUtil] for s in samples]\n"
        "first = get()\n"
        "work(300, 1000)\n"
        "second = get()\n"
        "driver.set_clock(driver.clock() + 600 * MS)\n"
        "get()\n"
        "work(60, 600)\n"
        "later = get()\n"
        "a = c_nvmlProcessesUtilizationInfo_v1_t()\n"
        "array = (c_nvmlProcessUtilizationInfo_v1_t * 4)()\n"
        "a.version, a.processSamplesCount, a.procUtilArray = ProcessesUtilizationInfo_v1, 4, array\n"
        "f = nvml.nvmlDeviceGetProcessesUtilizationInfo\n"
        "info = [f(d, byref(a)), a.processSamplesCount, array[0].smUtil]\n"
        "a.version = 1\n"
        "print(json.dumps([first, second, later, info + [f(d, byref(a))]]))"
    )
    assert first == NOT_FOUND  # there are no earlier samples
    assert second == [[True, 30]]
    assert later == [[True, 10]]
    assert info == [SUCCESS, 1, 10, VERSION_MISMATCH]


def test_accounting_is_off_unless_it_is_turned_on(ask: Any) -> None:
    program = (
        "count, pids = c_uint(4), (c_uint * 4)()\n"
        "s = c_nvmlAccountingStats_t()\n"
        "listed = [nvml.nvmlDeviceGetAccountingPids(d, byref(count), pids), pids[0] == os.getpid()]\n"
        "f = nvml.nvmlDeviceGetAccountingStats\n"
        "print(json.dumps([listed, f(d, os.getpid(), byref(s)), s.maxMemoryUsage,"
        " f(d, 1, byref(s))]))"
    )
    assert ask(program) == [[NOT_SUPPORTED, False], NOT_SUPPORTED, 0, NOT_SUPPORTED]
    assert ask(program, SIMGPU_ACCOUNTING="1") == [[SUCCESS, True], SUCCESS, 512 * MIB, NOT_FOUND]


def test_samples_of_the_device_are_current(ask: Any) -> None:
    assert ask(
        "def get(kind, last):\n"
        "    value, count, array = c_int(), c_uint(4), (c_nvmlSample_t * 4)()\n"
        "    got = nvml.nvmlDeviceGetSamples(d, kind, c_ulonglong(last), byref(value),"
        " byref(count), array)\n"
        "    return [got, value.value, count.value, array[0].sampleValue.uiVal]\n"
        "print(json.dumps([get(1, 0), get(1, 2**63)[0], get(2, 0)[0],"
        " nvmlDeviceGetDynamicPstatesInfo(d).utilization[0].percentage]))"
    ) == [[SUCCESS, 1, 1, 0], NOT_FOUND, NOT_SUPPORTED, 0]


def test_locations_and_links_are_reported_as_configured(tmp_path: Path, build_dir: Path) -> None:
    places = ("0/0/0/0", "0/0/0/0", "0/0/0/1", "0/0/1/0", "0/1/0/0", "1/0/0/0")
    links = ("0-1=4", "1-5=2", "switch=3")
    topology = simgpu.MachineTopology(places, links)
    simgpu.create(tmp_path, devices=7, topology=topology)
    program = """
def get(f, *args):
    try:
        return f(*args)
    except NVMLError as e:
        return -e.value
every = [nvmlDeviceGetHandleByIndex(i) for i in range(7)]
def end(i, link):
    info = get(nvmlDeviceGetNvLinkRemotePciInfo, every[i], link)
    return [get(nvmlDeviceGetNvLinkState, every[i], link),
            get(nvmlDeviceGetNvLinkRemoteDeviceType, every[i], link),
            info if isinstance(info, int) else info.bus]
print(json.dumps([
    [get(nvmlDeviceGetTopologyCommonAncestor, every[0], other) for other in every[1:]],
    [get(lambda d: list(nvmlDeviceGetMemoryAffinity(d, 1, 0)), d) for d in every],
    [end(1, i) for i in (0, 3, 4, 6, 9, 17, 18)],
    get(nvmlDeviceGetNumaNodeId, every[0]),
]))
"""
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE.replace("driver.set_clock(1000 * MS)", "") + program,
         str(build_dir)],
        env=environment(build_dir, tmp_path),
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    levels, nodes, ends, own = json.loads(done.stdout)
    assert levels == [10, 20, 30, 40, 50, -NOT_SUPPORTED]
    assert nodes == [[1], [1], [1], [1], [1], [2], -NOT_SUPPORTED]
    to_first, to_last, to_switch = [1, 0, 1], [1, 0, 6], [1, 2, 0xC0 + 6 % 4]
    none = [0, -NOT_SUPPORTED, -NOT_SUPPORTED]
    assert ends == [
        to_first, to_first, to_last, to_switch, none, none, [-INVALID_ARGUMENT] * 3
    ]  # fmt: skip
    assert own == -NOT_SUPPORTED


@pytest.mark.parametrize(
    ("places", "links", "says"),
    [
        (("0/0/0",), (), "'0/0/0' is not a location"),
        (("0/0/0/x",), (), "is not a location"),
        ((), ("0-1",), "'0-1' is not an NVLink"),
        ((), ("0-1=10", "0-2=9"), "GPU 0 has 19 NVLinks: at most 18"),
        ((), ("0-7=1",), "'0-7=1' names a GPU that does not exist"),
        ((), ("1-1=1",), "'1-1=1' names one GPU twice"),
    ],
)
def test_an_impossible_topology_is_refused(
    tmp_path: Path, places: tuple[str, ...], links: tuple[str, ...], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        simgpu.create(tmp_path, devices=3, topology=simgpu.MachineTopology(places, links))


def test_a_lost_device_is_lost_to_nvml_until_it_is_back(tmp_path: Path, build_dir: Path) -> None:
    simgpu.create(tmp_path, devices=2)
    program = """
from simgpu import simgpu
def get(f, *args):
    try:
        f(*args)
    except NVMLError as e:
        return e.value
    return 0
one, two = (nvmlDeviceGetHandleByIndex(i) for i in range(2))
def every():
    return [get(nvmlDeviceGetHandleByIndex, 1), get(nvmlDeviceGetMemoryInfo, two),
            get(nvmlDeviceGetMemoryInfo, one), nvmlDeviceGetCount()]
seen = [every()]
for lost in (True, False):
    simgpu.set_lost(Path(os.environ["SIMGPU_DIR"]) / "gpu1", lost=lost)
    seen.append(every())
print(json.dumps(seen))
"""
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE.replace("driver.set_clock(1000 * MS)", "") + program,
         str(build_dir)],
        env=environment(build_dir, tmp_path),
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[0, 0, 0, 2], [15, 15, 0, 2], [0, 0, 0, 2]]
