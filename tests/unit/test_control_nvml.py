"""The control library's substitute for NVML on the simulated driver, with a grant that the test writes.

The path of a container's grant is fixed, so each program runs in a separate mount namespace, where
/run/tidegate is a directory of the test. GPU 0 belongs to the container; GPU 1 does not.
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from libcontrol import api, layout, pages
from simgpu import simgpu
from simgpu.testing import environment, start_python
from tests.conftest import lack, need

MIB = 1 << 20
GIB = 1 << 30
NOW_US = 1_800_000_000_000_000
NO_INSTANCE = 0xFFFFFFFF
SUCCESS, UNINITIALIZED, INVALID_ARGUMENT, NOT_SUPPORTED, NOT_FOUND = 0, 1, 2, 3, 6
INSUFFICIENT_SIZE, FUNCTION_NOT_FOUND, VERSION_MISMATCH = 7, 13, 25

# What a program has in scope: the library, its structures from pynvml, and the two GPUs.
PRELUDE = """
import ctypes, json, os, sys, threading, time
from ctypes import byref, c_uint, c_ulonglong, c_int, sizeof
import pynvml
nvml = ctypes.CDLL(sys.argv[1])
pynvml.nvmlLib = nvml
for name in ("nvmlDeviceGetHandleByIndex_v2",):
    getattr(nvml, name).argtypes = [c_uint, ctypes.c_void_p]

def handle(index):
    device = ctypes.c_void_p()
    assert nvml.nvmlDeviceGetHandleByIndex_v2(index, byref(device)) == 0
    return device

def entries(name, room, entry, *fields, device=None):
    '''Ask for a list with this much room (None: no array); return answer, count and entries.'''
    count = c_uint(room or 0)
    array = (entry * (room or 1))()
    got = getattr(nvml, name)(device or own, byref(count), array if room is not None else None)
    n = count.value if got == 0 and room else 0
    return [got, count.value, [[getattr(one, field) for field in fields] for one in array[:n]]]

def start():
    global own, other
    assert nvml.nvmlInit_v2() == 0
    own, other = handle(0), handle(1)
"""

OTHER = """
driver.call("cuInit", 0)
context = driver.context(DEVICE)
print("ready", flush=True)
input()
"""


class NvmlContainer:
    """A grant that the test writes, the substitute with the simulated driver behind it, and programs inside."""

    def __init__(self, directory: Path, build: Path) -> None:
        self.directory = directory
        self.build = build
        self.gpus = directory / "gpus"
        simgpu.create(self.gpus, devices=2)
        self.library = directory / "lib/libnvidia-ml.so.1"
        (directory / "lib/origin").mkdir(parents=True)
        shutil.copy(build / "libcontrol/libnvidia-ml.so.1", self.library)
        self.origin = directory / "lib/origin/libnvidia-ml-origin.so.1"
        shutil.copy(build / "simgpu/libnvidia-ml.so.1", self.origin)
        self.run_directory = directory / "run"
        self.run_directory.mkdir()
        self.variables: dict[str, str] = {}
        self.page: mmap.mmap

    def make_grant(self, *, size: int = layout.GRANT_FILE_SIZE, uuid: bytes | None = None) -> None:
        """Write a grant of 3 GiB on GPU 0, of which 1 GiB is used, with a utilisation of 40 % of the cap."""
        with (self.run_directory / "grant").open("w+b") as file:
            file.truncate(size)
            self.page = mmap.mmap(file.fileno(), size)
        device: dict[str, int | bytes] = {
            "uuid": uuid or simgpu.device_uuid(1, 0).bytes,
            "memory_limit": 3 * GIB,
            "memory_used": GIB,
            "utilisation": 40,
        }
        pages.init_grant(self.page, settings={}, devices=[device])

    def list_processes(self, *processes: dict[str, int], time_us: int = NOW_US) -> None:
        """Fill the usage part of the grant page. Values that exist per GPU are those of GPU 0."""
        wide = {field.name for field in layout.USAGE_ENTRY.fields if field.n > 1}
        pages.write_usage(
            self.page,
            [
                {
                    "state": 1,
                    **{
                        name: [value] + [0] * (layout.N_DEVICES - 1) if name in wide else value
                        for name, value in process.items()
                    },
                }
                for process in processes
            ],
            time_us,
        )

    def run(self, program: str) -> Any:
        """Run a program inside after nvmlInit, and return the JSON that it prints."""
        return self.run_raw(f"start()\n{program}")

    def run_raw(self, program: str) -> Any:
        """Run a program inside without nvmlInit, and return the JSON that it prints."""
        done = subprocess.run(
            self.command(program), env=self.environment(),
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def command(self, program: str) -> list[str]:
        inside = (
            "mount -t tmpfs tmpfs /run && mkdir /run/tidegate"
            f' && mount --bind {self.run_directory} /run/tidegate && exec "$@"'
        )
        return [
            "unshare", *([] if os.geteuid() == 0 else ["-r"]), "--mount", "sh", "-c", inside, "sh",
            sys.executable, "-c", PRELUDE + program, str(self.library),
        ]  # fmt: skip

    def environment(self) -> dict[str, str]:
        known = environment(self.build, self.gpus) | self.variables
        del known["LD_LIBRARY_PATH"]
        return known


@pytest.fixture
def bare(tmp_path: Path, build_dir: Path) -> NvmlContainer:
    """A container without a grant."""
    need("unshare", "mount")
    allowed = subprocess.run(
        ["unshare", *([] if os.geteuid() == 0 else ["-r"]), "--mount", "true"],
        capture_output=True, check=False,
    )  # fmt: skip
    if allowed.returncode:
        lack("needs a mount namespace")
    return NvmlContainer(tmp_path, build_dir)


@pytest.fixture
def container(bare: NvmlContainer) -> NvmlContainer:
    bare.make_grant()
    bare.list_processes(
        {"pid": 7, "memory": 600 * MIB, "memory_peak": 700 * MIB, "utilisation": 30, "start_us": 5},
        {"pid": 9, "memory": 0, "utilisation": 0},
        {"pid": 12, "memory": 424 * MIB, "memory_peak": 424 * MIB, "mean_utilisation": 3},
    )
    return bare


@pytest.fixture
def neighbour(container: NvmlContainer) -> Iterator[Callable[[int], int]]:
    """Start a process outside of any container with a context on a GPU, and return its pid."""
    started = []

    def start(device: int) -> int:
        process = start_python(
            container.build, container.gpus, OTHER.replace("DEVICE", str(device))
        )
        started.append(process)
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
        return process.pid

    yield start
    for process in started:
        process.communicate("\n", timeout=10)


# Memory


def test_memory_is_the_quota(container: NvmlContainer) -> None:
    assert container.run(
        "one = pynvml.nvmlDeviceGetMemoryInfo(own)\n"
        "two = pynvml.nvmlDeviceGetMemoryInfo(own, pynvml.nvmlMemory_v2)\n"
        "print(json.dumps([[m.total, m.used, m.free] for m in (one, two)] + [two.reserved]))"
    ) == [[3 * GIB, GIB, 2 * GIB]] * 2 + [0]


def test_use_beyond_the_quota_leaves_nothing_free(container: NvmlContainer) -> None:
    base = layout.grant_device(0)
    pages.write(container.page, base, "grant_device", "memory_used", 2**64 - 1)
    assert container.run(
        "m = pynvml.nvmlDeviceGetMemoryInfo(own)\nprint(json.dumps([m.total, m.used, m.free]))"
    ) == [3 * GIB, 3 * GIB, 0]


def test_arguments_of_a_memory_call_are_checked_by_the_driver(container: NvmlContainer) -> None:
    assert container.run(
        "m = pynvml.c_nvmlMemory_v2_t()\n"
        "m.version = 1\n"
        "f, g = nvml.nvmlDeviceGetMemoryInfo, nvml.nvmlDeviceGetMemoryInfo_v2\n"
        "print(json.dumps([f(own, None), g(own, None), g(own, byref(m)), f(None, byref(m))]))"
    ) == [INVALID_ARGUMENT, INVALID_ARGUMENT, VERSION_MISMATCH, INVALID_ARGUMENT]


def test_every_call_before_nvml_is_initialised_reports_uninitialized(
    container: NvmlContainer,
) -> None:
    assert container.run_raw(
        "room = ctypes.create_string_buffer(4096)\n"
        "memory = pynvml.c_nvmlMemory_v2_t()\n"
        "memory.version = pynvml.nvmlMemory_v2\n"
        f"names = {[fn.name for fn in api.NVML]!r}\n"
        "def ask(name):\n"
        "    first = byref(memory) if name.endswith('MemoryInfo_v2') else byref(room)\n"
        "    return getattr(nvml, name)(None, first, *[byref(room)] * 4)\n"
        "print(json.dumps({name: ask(name) for name in names}))"
    ) == {fn.name: UNINITIALIZED for fn in api.NVML}


# Lists of processes

LISTS = [
    ("nvmlDeviceGetComputeRunningProcesses", "c_nvmlProcessInfo_v1_t"),
    ("nvmlDeviceGetComputeRunningProcesses_v2", "c_nvmlProcessInfo_v2_t"),
    ("nvmlDeviceGetComputeRunningProcesses_v3", "c_nvmlProcessInfo_v3_t"),
]
OWN = [[7, 600 * MIB], [12, 424 * MIB]]


@pytest.mark.parametrize(("name", "entry"), LISTS)
def test_every_form_of_the_list_has_only_the_processes_of_the_container(
    container: NvmlContainer, neighbour: Callable[[int], int], name: str, entry: str
) -> None:
    neighbour(0)
    fields = "'pid', 'usedGpuMemory'"
    assert container.run(
        # An entry of the first form is shorter, so the array is filled with that form's own stride.
        "class c_nvmlProcessInfo_v1_t(ctypes.Structure):\n"
        "    _fields_ = [('pid', c_uint), ('usedGpuMemory', c_ulonglong)]\n"
        f"entry = globals().get({entry!r}) or getattr(pynvml, {entry!r})\n"
        f"print(json.dumps([entries({name!r}, n, entry, {fields}) for n in (None, 1, 2, 8)]))"
    ) == [
        [INSUFFICIENT_SIZE, 2, []],
        [INSUFFICIENT_SIZE, 2, []],
        [SUCCESS, 2, OWN],
        [SUCCESS, 2, OWN],
    ]


def test_an_entry_names_no_mig_instance(container: NvmlContainer) -> None:
    assert container.run(
        "print(json.dumps(entries('nvmlDeviceGetComputeRunningProcesses_v3', 2,"
        " pynvml.c_nvmlProcessInfo_v3_t, 'gpuInstanceId', 'computeInstanceId')))"
    ) == [SUCCESS, 2, [[NO_INSTANCE, NO_INSTANCE]] * 2]


@pytest.mark.parametrize("kind", ["Graphics", "MPSCompute"])
@pytest.mark.parametrize("version", ["", "_v2", "_v3"])
def test_lists_of_graphics_and_mps_processes_are_empty(
    container: NvmlContainer, kind: str, version: str
) -> None:
    assert (
        container.run(
            f"name = 'nvmlDeviceGet{kind}RunningProcesses{version}'\n"
            "print(json.dumps([entries(name, n, pynvml.c_nvmlProcessInfo_v3_t) for n in (None, 4)]))"
        )
        == [[SUCCESS, 0, []]] * 2
    )


def test_arguments_of_a_list_are_checked_as_the_driver_does(container: NvmlContainer) -> None:
    assert container.run(
        "f = nvml.nvmlDeviceGetComputeRunningProcesses_v3\n"
        "room, none = c_uint(4), c_uint(0)\n"
        "print(json.dumps([f(own, None, None), f(own, byref(room), None),"
        " f(None, byref(none), None), f(own, byref(none), None)]))"
    ) == [INVALID_ARGUMENT, INVALID_ARGUMENT, INVALID_ARGUMENT, INSUFFICIENT_SIZE]


def test_the_driver_answers_for_another_gpu_of_the_node(
    container: NvmlContainer, neighbour: Callable[[int], int]
) -> None:
    pid = neighbour(1)
    listed, memory, detailed, error = container.run(
        "m = pynvml.nvmlDeviceGetMemoryInfo(other)\n"
        "listed = entries('nvmlDeviceGetComputeRunningProcesses_v3', 8,"
        " pynvml.c_nvmlProcessInfo_v3_t, 'pid', 'usedGpuMemory', device=other)\n"
        "detailed = pynvml.nvmlDeviceGetRunningProcessDetailList(other,"
        " pynvml.nvmlProcessDetailList_v1, 0)\n"
        "stats = pynvml.c_nvmlAccountingStats_t()\n"
        "print(json.dumps([listed, [m.total, m.used], [one.pid for one in detailed],"
        " nvml.nvmlDeviceGetAccountingStats(other, 1, byref(stats))]))"
    )
    assert listed == [SUCCESS, 1, [[pid, 512 * MIB]]]
    assert memory == [16 * GIB, 512 * MIB]
    assert detailed == [pid]
    assert error == NOT_SUPPORTED


DETAILS = """
def details(mode, room, version=None):
    answer = pynvml.c_nvmlProcessDetailList_v1_t()
    answer.version = pynvml.nvmlProcessDetailList_v1 if version is None else version
    answer.mode, answer.numProcArrayEntries = mode, room or 0
    array = (pynvml.c_nvmlProcessDetail_v1_t * 8)()
    if room is not None:
        answer.procArray = array
    got = nvml.nvmlDeviceGetRunningProcessDetailList(own, byref(answer))
    n = answer.numProcArrayEntries
    fields = ("pid", "usedGpuMemory", "gpuInstanceId", "usedGpuCcProtectedMemory")
    return [got, n, [[getattr(p, f) for f in fields] for p in array[:n]] if got == 0 else []]
"""


def test_the_detailed_list_checks_its_size_version_and_mode(container: NvmlContainer) -> None:
    own = [[pid, used, NO_INSTANCE, 0] for pid, used in OWN]
    assert container.run(
        DETAILS + "print(json.dumps([details(0, None), details(0, 1), details(0, 8),"
        " details(1, 8), details(2, 8), details(3, 8), details(0, 8, 7)]))"
    ) == [
        [INSUFFICIENT_SIZE, 2, []],
        [INSUFFICIENT_SIZE, 2, []],
        [SUCCESS, 2, own],
        [SUCCESS, 0, []],
        [SUCCESS, 0, []],
        [INVALID_ARGUMENT, 8, []],
        [INVALID_ARGUMENT, 8, []],
    ]
    assert container.run(
        "print(json.dumps(nvml.nvmlDeviceGetRunningProcessDetailList(own, None)))"
    ) == (INVALID_ARGUMENT)


# Utilisation


def test_utilisation_is_the_containers(container: NvmlContainer) -> None:
    assert container.run(
        "rates = pynvml.nvmlDeviceGetUtilizationRates(own)\n"
        "states = pynvml.nvmlDeviceGetDynamicPstatesInfo(own)\n"
        "print(json.dumps([rates.gpu, rates.memory, states.utilization[0].percentage,"
        " states.utilization[1].percentage, pynvml.nvmlDeviceGetUtilizationRates(other).gpu,"
        " nvml.nvmlDeviceGetUtilizationRates(own, None)]))"
    ) == [40, 0, 40, 0, 0, INVALID_ARGUMENT]


def test_a_utilisation_of_any_value_is_shown_as_at_most_100_percent(
    container: NvmlContainer,
) -> None:
    base = layout.grant_device(0)
    pages.write(container.page, base, "grant_device", "utilisation", 2**32 - 1)
    assert container.run("print(pynvml.nvmlDeviceGetUtilizationRates(own).gpu)") == 100


SAMPLES = """
def samples(kind, last, room):
    value, count = c_int(-1), c_uint(room or 0)
    array = (pynvml.c_nvmlSample_t * 4)()
    got = nvml.nvmlDeviceGetSamples(own, kind, c_ulonglong(last), byref(value), byref(count),
                                    array if room is not None else None)
    return [got, value.value, count.value, array[0].timeStamp, array[0].sampleValue.uiVal]
"""


def test_the_list_of_samples_contains_the_governors_last_sample(container: NvmlContainer) -> None:
    assert container.run(
        SAMPLES + f"print(json.dumps([samples(1, 0, None), samples(1, 0, 4), samples(2, 0, 1),"
        f" samples(1, {NOW_US - 1}, 4)[0], samples(1, {NOW_US}, 4)[0], samples(1, 0, 0)[0],"
        " samples(0, 0, 4)[0]]))"
    ) == [
        [SUCCESS, 1, 1, 0, 0],
        [SUCCESS, 1, 1, NOW_US, 40],
        [NOT_SUPPORTED, -1, 1, 0, 0],  # the simulated GPU does not report memory utilisation
        SUCCESS,
        NOT_FOUND,
        INVALID_ARGUMENT,
        NOT_SUPPORTED,
    ]


UTILISATION = """
def used(last, room):
    count = c_uint(room or 0)
    array = (pynvml.c_nvmlProcessUtilizationSample_t * 8)()
    got = nvml.nvmlDeviceGetProcessUtilization(own, array if room is not None else None,
                                               byref(count), c_ulonglong(last))
    n = count.value if got == 0 else 0
    return [got, count.value, [[p.pid, p.timeStamp, p.smUtil, p.memUtil] for p in array[:n]]]

def info(last, room, version=None):
    answer = pynvml.c_nvmlProcessesUtilizationInfo_v1_t()
    answer.version = pynvml.ProcessesUtilizationInfo_v1 if version is None else version
    answer.lastSeenTimeStamp, answer.processSamplesCount = last, room or 0
    array = (pynvml.c_nvmlProcessUtilizationInfo_v1_t * 8)()
    if room is not None:
        answer.procUtilArray = array
    got = nvml.nvmlDeviceGetProcessesUtilizationInfo(own, byref(answer))
    n = answer.processSamplesCount if got == 0 else 0
    return [got, answer.processSamplesCount, [[p.pid, p.timeStamp, p.smUtil] for p in array[:n]]]
"""


def test_processes_that_worked_are_sampled(container: NvmlContainer) -> None:
    assert container.run(
        UTILISATION + "print(json.dumps([used(0, None), used(0, 0), used(0, 8), info(0, None),"
        f" info(0, 8), used({NOW_US}, 8)[0], info({NOW_US}, 8)[0], info(0, 8, 5)[0],"
        " nvml.nvmlDeviceGetProcessUtilization(own, None, None, c_ulonglong(0)),"
        " nvml.nvmlDeviceGetProcessesUtilizationInfo(own, None)]))"
    ) == [
        [INSUFFICIENT_SIZE, 1, []],
        [INSUFFICIENT_SIZE, 1, []],
        [SUCCESS, 1, [[7, NOW_US, 30, 0]]],
        [INSUFFICIENT_SIZE, 1, []],
        [SUCCESS, 1, [[7, NOW_US, 30]]],
        NOT_FOUND,
        NOT_FOUND,
        VERSION_MISMATCH,
        INVALID_ARGUMENT,
        INVALID_ARGUMENT,
    ]


def test_without_work_no_sample_is_found(container: NvmlContainer) -> None:
    container.list_processes({"pid": 7, "memory": MIB})
    assert container.run(UTILISATION + "print(json.dumps([used(0, None), info(0, 8)]))") == [
        [NOT_FOUND, 0, []],
        [NOT_FOUND, 8, []],
    ]


# Accounting

ACCOUNTING = """
def pids(room):
    count, array = c_uint(room or 0), (c_uint * 8)()
    got = nvml.nvmlDeviceGetAccountingPids(own, byref(count), array if room else None)
    return [got, count.value, list(array[:count.value]) if got == 0 else []]

def stats(pid):
    s = pynvml.c_nvmlAccountingStats_t()
    got = nvml.nvmlDeviceGetAccountingStats(own, pid, byref(s))
    return [got, s.gpuUtilization, s.maxMemoryUsage, s.time, s.startTime, s.isRunning]
"""


def test_accounting_that_is_off_is_not_supported(container: NvmlContainer) -> None:
    assert container.run(ACCOUNTING + "print(json.dumps([pids(None)[0], stats(7)[0]]))") == [
        NOT_SUPPORTED,
        NOT_SUPPORTED,
    ]


def test_accounting_covers_only_the_processes_of_the_container(
    container: NvmlContainer, neighbour: Callable[[int], int]
) -> None:
    foreign = neighbour(0)
    container.variables["SIMGPU_ACCOUNTING"] = "1"
    assert container.run(
        ACCOUNTING + f"print(json.dumps([pids(None), pids(2), stats(7), stats(12),"
        f" stats({foreign})[0], nvml.nvmlDeviceGetAccountingStats(own, 7, None)]))"
    ) == [
        [INSUFFICIENT_SIZE, 2, []],
        [SUCCESS, 2, [7, 12]],
        [SUCCESS, 0, 700 * MIB, 0, 5, 1],
        [SUCCESS, 3, 424 * MIB, 0, 0, 1],
        NOT_FOUND,
        INVALID_ARGUMENT,
    ]


# Grants of other kinds

EVERYTHING = """
listed = entries('nvmlDeviceGetComputeRunningProcesses_v3', 8, pynvml.c_nvmlProcessInfo_v3_t, 'pid')
print(json.dumps([pynvml.nvmlDeviceGetMemoryInfo(own).total, listed,
                  pynvml.nvmlDeviceGetUtilizationRates(own).gpu]))
"""


def test_without_a_grant_the_driver_answers(bare: NvmlContainer) -> None:
    assert bare.run(EVERYTHING) == [16 * GIB, [SUCCESS, 0, []], 0]


def test_a_grant_without_usage_governs_only_memory(bare: NvmlContainer) -> None:
    bare.make_grant(size=layout.GRANT_SIZE)
    assert bare.run(EVERYTHING) == [3 * GIB, [SUCCESS, 0, []], 0]


def test_a_longer_grant_of_a_later_governor_is_read(container: NvmlContainer) -> None:
    size = layout.GRANT_FILE_SIZE + 4096
    os.truncate(container.run_directory / "grant", size)
    pages.write(container.page, 0, "grant_header", "size", size)
    assert container.run(EVERYTHING) == [3 * GIB, [SUCCESS, 2, [[7], [12]]], 40]


@pytest.mark.parametrize(
    ("field", "value"), [("magic", 1), ("version", 2), ("size", 1), ("size", 1 << 30)]
)
def test_a_file_that_is_not_a_grant_is_not_read(
    container: NvmlContainer, field: str, value: int
) -> None:
    pages.write(container.page, 0, "grant_header", field, value)
    assert container.run(EVERYTHING) == [16 * GIB, [SUCCESS, 0, []], 0]


def test_numbers_of_devices_and_entries_are_bounded(container: NvmlContainer) -> None:
    pages.write(container.page, 0, "grant_header", "n_devices", 2**32 - 1)
    pages.write(container.page, layout.GRANT_USAGE, "usage_header", "n_entries", 2**32 - 1)
    assert container.run(EVERYTHING) == [3 * GIB, [SUCCESS, 2, [[7], [12]]], 40]
    assert container.run("print(pynvml.nvmlDeviceGetMemoryInfo(other).total)") == 16 * GIB


FAKE = r"""
#include <string.h>
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **d) { *d = (void *)(i + 1l); return 0; }
int nvmlDeviceGetUUID(void *d, char *u, unsigned n) {
    strcpy(u, d == (void *)1 ? "MIG-" UUID : "NEW-" UUID);
    return 0;
}
int nvmlDeviceGetMemoryInfo(void *d, unsigned long long m[3]) { m[0] = m[1] = m[2] = 5; return 0; }
"""


def fake_driver(container: NvmlContainer) -> None:
    """Put an old driver behind the substitute. Its first device is a MIG instance."""
    need("gcc")
    uuid = f'-DUUID="{simgpu.device_uuid(1, 0)}"'
    command = ["gcc", "-shared", "-fPIC", "-w", "-x", "c", "-", uuid, "-o", str(container.origin)]
    subprocess.run(command, input=FAKE, text=True, check=True)


def test_a_mig_instance_is_found_by_its_uuid(container: NvmlContainer) -> None:
    fake_driver(container)
    assert container.run(
        "print(json.dumps([pynvml.nvmlDeviceGetMemoryInfo(d).total for d in (own, other)]))"
    ) == [3 * GIB, 5]


def test_a_function_that_the_driver_lacks_is_not_found(container: NvmlContainer) -> None:
    fake_driver(container)
    lacked = [fn.name for fn in api.NVML if fn.name != "nvmlDeviceGetMemoryInfo"]
    assert container.run(
        f"print(json.dumps([getattr(nvml, n)(None, None, None, None, None, None)"
        f" for n in {lacked!r}]))"
    ) == [FUNCTION_NOT_FOUND] * len(lacked)


# Concurrent calls


def test_threads_whose_first_calls_coincide_agree(container: NvmlContainer) -> None:
    assert container.run(
        "barrier, answers = threading.Barrier(16), []\n"
        "def ask():\n"
        "    barrier.wait()\n"
        "    answers.append(entries('nvmlDeviceGetComputeRunningProcesses_v3', 8,"
        " pynvml.c_nvmlProcessInfo_v3_t, 'pid'))\n"
        "threads = [threading.Thread(target=ask) for _ in range(16)]\n"
        "[t.start() for t in threads]\n"
        "[t.join() for t in threads]\n"
        "maps = open('/proc/self/maps').read().count('/grant\\n')\n"
        "print(json.dumps([answers, maps]))"
    ) == [[[SUCCESS, 2, [[7], [12]]]] * 16, 1]


def test_a_reader_never_sees_a_mixture_of_two_sets_of_entries(container: NvmlContainer) -> None:
    """All entries of a set have the same number, so a list with two numbers mixes two writes."""
    end = threading.Event()

    def write() -> None:
        for number in itertools.cycle(range(1, 1000)):
            entry = {"pid": number, "memory": number}
            container.list_processes(*[entry] * layout.N_SLOTS)
            if end.is_set():
                return

    writer = threading.Thread(target=write)
    container.list_processes(*[{"pid": 1, "memory": 1}] * layout.N_SLOTS)
    writer.start()
    try:
        mixed, sets = container.run(
            "name, seen, mixed = 'nvmlDeviceGetComputeRunningProcesses_v3', set(), 0\n"
            "reads, end = 0, time.monotonic() + 40\n"
            "while reads < 3000 or (len(seen) <= 10 and time.monotonic() < end):\n"
            "    reads, begin = reads + 1, time.monotonic()\n"
            "    _, n, list_ = entries(name, 64, pynvml.c_nvmlProcessInfo_v3_t,"
            " 'pid', 'usedGpuMemory')\n"
            # The library waits no longer than this for a writer that stalls during a write.
            "    if time.monotonic() - begin >= 0.05: continue\n"
            "    numbers = {number for entry in list_ for number in entry}\n"
            "    mixed += len(numbers) != 1 or n != 64\n"
            "    seen |= numbers\n"
            "print(json.dumps([mixed, len(seen)]))"
        )
    finally:
        end.set()
        writer.join()
    assert mixed == 0
    assert sets > 10  # the page was written during the reads


def test_a_governor_that_died_while_writing_blocks_no_reader(container: NvmlContainer) -> None:
    pages.write(container.page, layout.GRANT_USAGE, "usage_header", "sequence", 1)
    for _ in range(5):  # a busy machine may delay the reader
        seconds, listed = container.run(
            "begin = time.monotonic()\n"
            "listed = entries('nvmlDeviceGetComputeRunningProcesses_v3', 8,"
            " pynvml.c_nvmlProcessInfo_v3_t, 'pid')\n"
            "print(json.dumps([time.monotonic() - begin, listed]))"
        )
        assert listed == [SUCCESS, 2, [[7], [12]]]
        if seconds < 1:
            break
    assert seconds < 1


def test_the_substitute_needs_no_libcuda_and_opens_nothing_but_the_grant(
    container: NvmlContainer,
) -> None:
    libraries, descriptors = container.run_raw(
        "before = len(os.listdir('/proc/self/fd'))\n"
        "start()\n"
        "between = len(os.listdir('/proc/self/fd'))\n"
        "pynvml.nvmlDeviceGetMemoryInfo(own)\n"
        "maps = open('/proc/self/maps').read()\n"
        "print(json.dumps(['libcuda' in maps, len(os.listdir('/proc/self/fd')) - between]))"
    )
    assert not libraries
    assert descriptors == 0
