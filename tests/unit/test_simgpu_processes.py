"""The simulated GPU with several processes: their death, pids, NVML, fork, and the workload."""

from __future__ import annotations

import itertools
import json
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from simgpu import simgpu
from simgpu.testing import MS, Context, SimulatedDriver, environment, start_python
from tests.conftest import lack

MIB = 1 << 20

HOG = """
driver.call("cuInit", 0)
context = driver.context()
driver.allocate(100 << 20)
for _ in range(1000):
    context.burn(1000 * MS)
print("ready", flush=True)
input()
"""


@pytest.fixture
def gpus(tmp_path: Path) -> Path:
    simgpu.create(tmp_path / "gpus")
    return tmp_path / "gpus"


@pytest.fixture
def gpu(gpus: Path) -> Path:
    return gpus / "gpu0"


@pytest.fixture
def start(build_dir: Path, gpus: Path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Start programs that print "ready". Those still running at the end are killed."""
    programs = []

    def start_one(program: str) -> subprocess.Popen[str]:
        process = start_python(build_dir, gpus, program)
        programs.append(process)
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
        return process

    yield start_one
    for process in programs:
        process.kill()
        process.communicate()


@contextmanager
def running(command: list[str], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """Run a process, and kill it when the block ends, so a failing test does not wait for it."""
    with subprocess.Popen(command, **options) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_until(condition: Callable[[], object], process: subprocess.Popen[Any]) -> None:
    """Wait for a condition that a process brings about. Fail if the process ends or after 30 s."""
    deadline = time.monotonic() + 30
    while not condition():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.001)


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()


def nvml(build: Path, gpus: Path, expression: str, *prefix: str) -> object:
    """Evaluate an expression about device `d` with pynvml, in a separate process."""
    program = (
        "import ctypes, json, pynvml\n"
        "from pynvml import *\n"
        f"pynvml.nvmlLib = ctypes.CDLL({str(build / 'simgpu' / 'libnvidia-ml.so.1')!r})\n"
        "nvmlInit()\n"
        "d = nvmlDeviceGetHandleByIndex(0)\n"
        f"print(json.dumps({expression}))\n"
    )
    return json.loads(
        subprocess.run(
            [*prefix, sys.executable, "-c", program],
            env=environment(build, gpus), check=True, capture_output=True, text=True,
        ).stdout
    )  # fmt: skip


PROCESSES = "[[p.pid, p.usedGpuMemory] for p in nvmlDeviceGetComputeRunningProcesses(d)]"


def test_memory_of_a_killed_process_is_free(
    build_dir: Path, gpu: Path, start: Callable[[str], subprocess.Popen[str]]
) -> None:
    hog = start(HOG)
    driver = SimulatedDriver(build_dir)
    with driver.attached(gpu.parent):
        context = driver.context()
        assert driver.free_memory() == (16384 - 512 - 512 - 100) * MIB
        kill(hog)
        assert driver.free_memory() == (16384 - 512) * MIB
        # The hog's 1000 s of work are gone, so this ends soon.
        before = driver.clock()
        context.burn(MS)
        context.synchronize()
        assert driver.clock() - before < 10_000 * MS
        assert [context.pid for context in simgpu.status(gpu).contexts] == [os.getpid()]


def test_memory_of_dead_processes_is_reclaimed_when_it_is_needed(
    build_dir: Path, gpu: Path, start: Callable[[str], subprocess.Popen[str]]
) -> None:
    hog = start(HOG)
    driver = SimulatedDriver(build_dir)
    with driver.attached(gpu.parent):
        driver.context()
        kill(hog)
        driver.allocate((16384 - 512) * MIB)


def test_a_holder_of_the_lock_may_be_killed(
    build_dir: Path, gpu: Path, start: Callable[[str], subprocess.Popen[str]]
) -> None:
    holder = start(
        'driver.call("cuInit", 0)\n'
        "context = driver.context()\n"
        "context.burn(1000 * MS)\n"
        'print("ready", flush=True)\n'
        'driver.call("simgpu_hold", 0)\n'
    )
    driver = SimulatedDriver(build_dir)
    # The process takes the lock soon after it prints. Until then, the loop only polls the lock.
    deadline = time.monotonic() + 30
    while simgpu.status(gpu).recoveries == 0:
        assert time.monotonic() < deadline, "no process recovered the lock of a killed holder"
        lock = int.from_bytes(gpu.read_bytes()[0x1000:0x1004], "little")
        if lock:
            kill(holder)
            with driver.attached(gpu.parent):
                driver.context().burn(MS)
    status = simgpu.status(gpu)
    assert (status.recoveries, status.used, status.contexts) == (1, 0, ())


def test_processes_killed_at_any_moment_leave_nothing(
    build_dir: Path, gpus: Path, gpu: Path
) -> None:
    program = [str(build_dir / "simgpu/simgpu-workload"), "--unit-us", "1", "--depth", "512"]
    command = [*program, "--seconds", "60"]
    env = environment(build_dir, gpus)
    with running(command, env=env, stdout=subprocess.PIPE) as survivor:
        for n in range(30):
            with running(command, env=env), running(command, env=env):
                time.sleep(0.002 * (n % 10))
        completed = simgpu.status(gpu).contexts[0].completed
        survivor.send_signal(signal.SIGTERM)
        output, _ = survivor.communicate(timeout=10)
    assert survivor.returncode == 0
    assert json.loads(output)["units"] > 0
    assert completed > 0
    driver = SimulatedDriver(build_dir)
    with driver.attached(gpus):
        driver.context()
        assert driver.free_memory() == (16384 - 512) * MIB


def test_nvml_lists_the_processes_of_others(
    build_dir: Path, gpus: Path, start: Callable[[str], subprocess.Popen[str]]
) -> None:
    assert nvml(build_dir, gpus, PROCESSES) == []
    hog = start(HOG)
    assert nvml(build_dir, gpus, PROCESSES) == [[hog.pid, 612 * MIB]]
    second = start(HOG)
    listed = sorted([[hog.pid, 612 * MIB], [second.pid, 612 * MIB]])
    assert nvml(build_dir, gpus, PROCESSES) == listed
    assert nvml(build_dir, gpus, "nvmlDeviceGetMemoryInfo(d).used") == 2 * 612 * MIB
    kill(hog)
    assert nvml(build_dir, gpus, PROCESSES) == [[second.pid, 612 * MIB]]
    status = simgpu.status(gpus / "gpu0")
    assert [(process.pid, process.memory) for process in status.processes] == [
        (second.pid, 612 * MIB)
    ]


def test_nvml_shows_pids_as_its_own_namespace_sees_them(build_dir: Path, gpus: Path) -> None:
    plain = ["unshare", "--pid", "--fork", "--kill-child"]
    for inside in (plain, [*plain, "--user", "--map-root-user"]):
        if subprocess.run([*inside, "true"], check=False, capture_output=True).returncode == 0:
            break
    else:
        lack("this machine does not allow pid namespaces")
    workload = [str(build_dir / "simgpu/simgpu-workload"), "--seconds", "60"]
    with running(
        [*inside, *workload, "--wait-file", str(gpus / "go")], env=environment(build_dir, gpus)
    ) as outer:
        wait_until((gpus / "go.ready").exists, outer)
        children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split()
        unseen = nvml(build_dir, gpus, PROCESSES, *inside)
        used = nvml(build_dir, gpus, "nvmlDeviceGetMemoryInfo(d).used", *inside)
        listed = nvml(build_dir, gpus, PROCESSES)
    assert listed == [[int(children[0]), 514 * MIB]]
    assert (unseen, used) == ([], 514 * MIB)  # invisible, not dead


def test_pynvml_reads_a_device(build_dir: Path, gpus: Path) -> None:
    uuid = f"GPU-{simgpu.device_uuid(1, 0)}"
    assert nvml(build_dir, gpus, "nvmlSystemGetDriverVersion()") == "999.10.1"
    assert nvml(build_dir, gpus, "nvmlSystemGetCudaDriverVersion()") == 13000
    assert nvml(build_dir, gpus, "nvmlDeviceGetCount()") == 1
    assert nvml(build_dir, gpus, "nvmlDeviceGetName(d)") == "Tidegate Simulated GPU"
    assert nvml(build_dir, gpus, "nvmlDeviceGetUUID(d)") == uuid
    assert nvml(build_dir, gpus, f"nvmlDeviceGetIndex(nvmlDeviceGetHandleByUUID({uuid!r}))") == 0
    # The simulated GPU is no kernel device, so a container cannot be given a device node.
    with pytest.raises(subprocess.CalledProcessError):
        nvml(build_dir, gpus, "nvmlDeviceGetMinorNumber(d)")
    assert nvml(build_dir, gpus, "nvmlDeviceGetPciInfo(d).busId") == "00000000:01:00.0"
    memory = "nvmlDeviceGetMemoryInfo(d, version=nvmlMemory_v2)"
    assert nvml(build_dir, gpus, f"[{memory}.total, {memory}.used]") == [16384 * MIB, 0]
    assert nvml(build_dir, gpus, "nvmlDeviceGetUtilizationRates(d).gpu") == 0


def test_cuda_and_nvml_work_in_one_process(build_dir: Path, gpus: Path) -> None:
    """Each library has a slot, and neither mistakes the other's for that of a dead process."""
    expression = (
        "(lambda driver: [driver.call('cuInit', 0), driver.context(), driver.allocate(1 << 20),"
        " nvmlDeviceGetMemoryInfo(d).used, nvmlShutdown(), nvmlInit(), driver.free_memory(),"
        " nvmlDeviceGetComputeRunningProcesses(d)[0].pid == __import__('os').getpid()][3::3])"
        f"(__import__('simgpu.testing').testing.SimulatedDriver(__import__('pathlib').Path({str(build_dir)!r})))"
    )
    assert nvml(build_dir, gpus, expression) == [514 * MIB, (16384 - 514) * MIB]


def test_a_forked_child_starts_without_cuda(build_dir: Path, gpus: Path) -> None:
    process = start_python(
        build_dir,
        gpus,
        """
import ctypes, os
driver.call("cuInit", 0)
context = driver.context()
context.burn(MS)
child = os.fork()
if child == 0:
    count = ctypes.c_int()
    assert driver.try_call("cuDeviceGetCount", ctypes.byref(count)) == 3
    driver.call("cuInit", 0)
    own = driver.context()
    assert driver.free_memory() == (16384 - 1024) << 20
    own.burn(MS)
    own.synchronize()
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
context.synchronize()
print(driver.free_memory() >> 20)
""",
    )
    output, _ = process.communicate()
    assert (process.returncode, output) == (0, f"7\n{16384 - 512}\n")


def test_a_closed_descriptor_ends_the_attachment(build_dir: Path, gpus: Path) -> None:
    process = start_python(
        build_dir,
        gpus,
        """
driver.call("cuInit", 0)
context = driver.context()
import os
open(os.environ["SIMGPU_DIR"] + "/gpu0").close()
print("ready", flush=True)
input()
print(context.try_burn(MS))
""",
    )
    assert process.stdout
    assert process.stdout.readline() == "ready\n"
    driver = SimulatedDriver(build_dir)
    with driver.attached(gpus):
        driver.context()
        assert driver.free_memory() == (16384 - 512) * MIB
    output, _ = process.communicate("\n")
    assert output == "4\n"


# The workload


LEAVES_NONE = """
import ctypes, os, subprocess, sys
assert ctypes.CDLL(None).prctl(36, 1, 0, 0, 0) == 0  # PR_SET_CHILD_SUBREAPER
subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, check=True)
try:
    os.waitpid(-1, 0)
except ChildProcessError:
    sys.exit(0)
sys.exit("a process was left")
"""
"""A program that runs a command, and fails if the command does not wait for a process of its own."""


def workload(build: Path, gpus: Path, *options: object) -> tuple[int, str, str]:
    done = subprocess.run(
        [str(build / "simgpu/simgpu-workload"), *map(str, options)],
        env=environment(build, gpus), capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def read_ends(path: Path) -> list[int]:
    records = list(struct.iter_unpack("<QQ", path.read_bytes()))
    assert {kind for _, kind in records} <= {0}
    return [end for end, _ in records]


def test_the_workload_writes_the_end_of_each_unit(
    build_dir: Path, gpus: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    options = ("--seconds", 0.1, "--unit-us", 200, "--out", out, "--memory", 3000000)
    code, output, _ = workload(build_dir, gpus, *options)
    report = json.loads(output)
    ends = read_ends(out)
    assert code == 0
    assert (report["result"], report["memory"]) == ("CUDA_SUCCESS", 3000000)
    assert report["units"] == len(ends) > 64
    # No other process uses the GPU, and work is launched ahead. On a sane machine the stream never
    # runs empty, and no unit is ever shorter than it should be.
    assert min(b - a for a, b in itertools.pairwise(ends)) == 200_000


def test_the_workload_reports_the_result_of_an_allocation(build_dir: Path, gpus: Path) -> None:
    code, output, _ = workload(build_dir, gpus, "--allocate", 1 << 40)
    assert (code, json.loads(output)["result"]) == (1, "CUDA_ERROR_OUT_OF_MEMORY")
    code, output, _ = workload(build_dir, gpus, "--allocate", 1 << 20)
    assert (code, json.loads(output)["result"]) == (0, "CUDA_SUCCESS")


def test_the_first_process_ends_after_the_others(build_dir: Path, gpus: Path) -> None:
    program = [str(build_dir / "simgpu/simgpu-workload"), "--allocate", "4096", "--processes", "4"]
    done = subprocess.run(
        [sys.executable, "-c", LEAVES_NONE, *program],
        env=environment(build_dir, gpus), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


def test_the_workload_names_the_call_that_failed(build_dir: Path, gpus: Path) -> None:
    code, _, error = workload(build_dir, gpus, "--memory", 1 << 40)
    assert (code, error) == (1, "simgpu-workload: cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY\n")
    code, _, error = workload(build_dir, gpus / "none")
    assert (code, error) == (1, "simgpu-workload: cuInit: CUDA_ERROR_NO_DEVICE\n")


def test_the_workload_starts_and_stops_on_request(
    build_dir: Path, gpus: Path, tmp_path: Path
) -> None:
    out, go = tmp_path / "out", tmp_path / "go"
    options = ["--seconds", "60", "--out", str(out), "--wait-file", str(go)]
    with running(
        [str(build_dir / "simgpu/simgpu-workload"), *options],
        env=environment(build_dir, gpus), stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        wait_until((tmp_path / "go.ready").exists, process)
        assert out.read_bytes() == b""
        go.touch()
        wait_until(lambda: out.stat().st_size, process)
        process.terminate()
        output, _ = process.communicate(timeout=10)
    assert process.returncode == 0
    assert json.loads(output)["units"] == len(read_ends(out))


def test_the_command_line_creates_and_shows_devices(tmp_path: Path) -> None:
    python = [sys.executable, "-m", "simgpu"]
    made = subprocess.run(
        [*python, "create", "--dir", tmp_path, "--devices", "2", "--memory", "8GiB"],
        check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    assert made == f"{tmp_path}/gpu0\n{tmp_path}/gpu1\n"
    shown = subprocess.run(
        [*python, "status", "--dir", tmp_path], check=True, capture_output=True, text=True
    ).stdout
    devices = json.loads(shown)["devices"]
    assert [(device["device"], device["total"]) for device in devices] == [
        ("gpu0", 8 << 30),
        ("gpu1", 8 << 30),
    ]


@pytest.mark.parametrize("text", ["", "16GB", "-1", "1.5GiB"])
def test_an_invalid_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        simgpu.size(text)


def test_the_status_names_the_process_of_a_context(build_dir: Path, gpus: Path, gpu: Path) -> None:
    driver = SimulatedDriver(build_dir)
    with driver.attached(gpus):
        context: Context = driver.context()
        assert context.handle
        assert simgpu.status(gpu).processes[0].pid == os.getpid()
