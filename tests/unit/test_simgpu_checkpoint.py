"""The simulated GPU: checkpointing a process from outside."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from simgpu import simgpu
from simgpu.testing import MS, CudaError, SimulatedDriver, environment, start_python

MIB = 1 << 20
RUNNING, LOCKED, CHECKPOINTED = 0, 1, 2

TENANT = """
import sys
driver.call("cuInit", 0)
context = driver.context()
block = driver.allocate(100 << 20)
driver.call("cuMemsetD32_v2", block, 7, 1024)
print("ready", flush=True)
for line in sys.stdin:
    eval(line)
    print(driver.read_words(block, 1)[0] & 0xffffffff, flush=True)
"""


class OtherProcess:
    """A process that evaluates each line that it reads, then prints a word of its 100 MiB."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.pid = process.pid
        assert self.read(30) == "ready"

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def read(self, timeout_s: float) -> str | None:
        """Return the next line, or None if it comes late; a thread continues to wait for it."""
        lines: list[str] = []
        stdout = self.process.stdout
        assert stdout is not None
        thread = threading.Thread(target=lambda: lines.append(stdout.readline().strip()))
        thread.start()
        thread.join(timeout_s)
        self.late = thread if thread.is_alive() else None
        self.lines = lines
        return lines[0] if lines else None

    def read_late(self) -> str:
        """Return the line for which `read` did not wait long enough."""
        assert self.late is not None
        self.late.join(30)
        return self.lines[0]


@pytest.fixture
def gpus(tmp_path: Path) -> Path:
    simgpu.create(tmp_path / "gpus", memory=2048 * MIB, context_memory=512 * MIB)
    return tmp_path / "gpus"


@pytest.fixture
def start(build_dir: Path, gpus: Path) -> Iterator[Callable[[], OtherProcess]]:
    programs: list[subprocess.Popen[str]] = []

    def start_one() -> OtherProcess:
        programs.append(start_python(build_dir, gpus, TENANT))
        return OtherProcess(programs[-1])

    yield start_one
    for process in programs:
        process.kill()
        process.communicate()


@pytest.fixture
def driver(build_dir: Path, gpus: Path) -> Iterator[SimulatedDriver]:
    driver = SimulatedDriver(build_dir)
    with driver.attached(gpus):
        yield driver


class LockArgs(ctypes.Structure):
    _fields_ = (("timeoutMs", ctypes.c_uint), ("rest", ctypes.c_ubyte * 60))


def step(driver: SimulatedDriver, name: str, pid: int, *, timeout_ms: int = 0) -> None:
    args = ctypes.byref(LockArgs(timeout_ms)) if timeout_ms else None
    driver.call(f"cuCheckpointProcess{name}", pid, args)


def state(driver: SimulatedDriver, pid: int) -> int:
    found = ctypes.c_uint()
    driver.call("cuCheckpointProcessGetState", pid, ctypes.byref(found))
    return found.value


def seen(build_dir: Path, gpus: Path) -> Any:
    """Return each process's memory by pid, and the memory in use, in bytes, as NVML shows them."""
    program = (
        "import ctypes, json, pynvml\n"
        "from pynvml import *\n"
        f"pynvml.nvmlLib = ctypes.CDLL({str(build_dir / 'simgpu' / 'libnvidia-ml.so.1')!r})\n"
        "nvmlInit()\n"
        "d = nvmlDeviceGetHandleByIndex(0)\n"
        "p = {p.pid: p.usedGpuMemory for p in nvmlDeviceGetComputeRunningProcesses(d)}\n"
        "print(json.dumps([p, nvmlDeviceGetMemoryInfo(d).used]))\n"
    )
    command = [sys.executable, "-c", program]
    environ = environment(build_dir, gpus)
    return json.loads(subprocess.run(command, env=environ, check=True, capture_output=True).stdout)


def test_a_process_goes_through_the_states_and_keeps_its_memory(
    driver: SimulatedDriver, start: Callable[[], OtherProcess], build_dir: Path, gpus: Path
) -> None:
    tenant = start()
    assert state(driver, tenant.pid) == RUNNING
    step(driver, "Lock", tenant.pid)
    assert state(driver, tenant.pid) == LOCKED
    tenant.say("0")
    assert tenant.read(0.3) is None  # its call waits
    assert seen(build_dir, gpus) == [{str(tenant.pid): 612 * MIB}, 612 * MIB]
    step(driver, "Checkpoint", tenant.pid)
    assert state(driver, tenant.pid) == CHECKPOINTED
    assert seen(build_dir, gpus) == [{}, 0]
    assert simgpu.status(gpus / "gpu0").used == 0
    step(driver, "Restore", tenant.pid)
    assert state(driver, tenant.pid) == LOCKED
    assert seen(build_dir, gpus) == [{str(tenant.pid): 612 * MIB}, 612 * MIB]
    step(driver, "Unlock", tenant.pid)
    assert state(driver, tenant.pid) == RUNNING
    assert tenant.read_late() == "7"


def test_the_lock_waits_for_work_and_may_time_out(
    driver: SimulatedDriver, start: Callable[[], OtherProcess], gpus: Path
) -> None:
    tenant = start()
    tenant.say("context.burn(5000 * MS)")  # long enough for a busy machine
    while not any(one.pending for one in simgpu.status(gpus / "gpu0").contexts):
        assert tenant.process.poll() is None
    with pytest.raises(CudaError, match="NOT_READY"):
        step(driver, "Lock", tenant.pid, timeout_ms=50)
    assert state(driver, tenant.pid) == RUNNING
    began = driver.clock()
    step(driver, "Lock", tenant.pid, timeout_ms=20_000)
    assert driver.clock() - began > 100 * MS
    step(driver, "Unlock", tenant.pid)
    assert tenant.read(30) == "7"


def test_a_wrong_state_and_an_unknown_process_are_errors(
    driver: SimulatedDriver, start: Callable[[], OtherProcess]
) -> None:
    tenant = start()
    for name in ("Checkpoint", "Restore", "Unlock"):
        with pytest.raises(CudaError, match="ILLEGAL_STATE"):
            step(driver, name, tenant.pid)
    for name in ("Lock", "Checkpoint", "Restore", "Unlock"):
        with pytest.raises(CudaError, match="INVALID_VALUE"):
            step(driver, name, 1)
    with pytest.raises(CudaError, match="INVALID_VALUE"):
        state(driver, 1)


def test_a_restore_needs_room_and_can_be_tried_again(
    driver: SimulatedDriver, start: Callable[[], OtherProcess]
) -> None:
    tenant = start()
    step(driver, "Lock", tenant.pid)
    step(driver, "Checkpoint", tenant.pid)
    driver.context()
    blocks = [driver.allocate(size * MIB) for size in (900, 600)]
    with pytest.raises(CudaError, match="OUT_OF_MEMORY"):
        step(driver, "Restore", tenant.pid)
    assert state(driver, tenant.pid) == CHECKPOINTED
    assert driver.free_memory() == 36 * MIB
    driver.call("cuMemFree_v2", blocks[1])
    step(driver, "Restore", tenant.pid)
    step(driver, "Unlock", tenant.pid)
    tenant.say("0")
    assert tenant.read(30) == "7"


def test_a_process_that_dies_while_checkpointed_leaves_nothing(
    driver: SimulatedDriver, start: Callable[[], OtherProcess], build_dir: Path, gpus: Path
) -> None:
    tenant = start()
    step(driver, "Lock", tenant.pid)
    step(driver, "Checkpoint", tenant.pid)
    tenant.process.kill()
    tenant.process.wait()
    with pytest.raises(CudaError, match="INVALID_VALUE"):
        state(driver, tenant.pid)
    next_one = start()  # it may get the same slot in the device's file
    assert state(driver, next_one.pid) == RUNNING
    assert seen(build_dir, gpus) == [{str(next_one.pid): 612 * MIB}, 612 * MIB]


def test_another_caller_can_continue_after_one_that_died_between_two_gpus(
    build_dir: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "pair"
    simgpu.create(directory, devices=2)
    process = start_python(build_dir, directory, TENANT)
    try:
        tenant = OtherProcess(process)
        driver = SimulatedDriver(build_dir)
        with driver.attached(directory):
            for name, state_then in (("Lock", LOCKED), ("Checkpoint", CHECKPOINTED)):
                step(driver, name, tenant.pid)
                put_state(directory / "gpu1", state_then - 1)
                assert state(driver, tenant.pid) == state_then
                put_state(directory / "gpu1", state_then)
            put_state(directory / "gpu0", LOCKED)
            assert state(driver, tenant.pid) == CHECKPOINTED
            step(driver, "Restore", tenant.pid)
            put_state(directory / "gpu0", RUNNING)
            step(driver, "Unlock", tenant.pid)
            assert state(driver, tenant.pid) == RUNNING
    finally:
        process.kill()
        process.communicate()


def put_state(gpu: Path, value: int) -> None:
    """Write the state of the device's first attachment: the tenant's, which came first."""
    with gpu.open("r+b") as file:
        file.seek(simgpu.SLOTS_OFFSET + 20)
        file.write(value.to_bytes(4, "little"))
