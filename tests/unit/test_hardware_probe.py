"""Test the probe of the driver calls' effect, on the simulated GPU and with calls without one."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from governor.arbiter import load_library
from governor.config import Config
from governor.hardware.driver import DriverCallError
from governor.hardware.probe import NAME, NotProbedError, Results, WithoutEffectError, probe
from governor.hardware.runner import HardwareRunner
from governor.quota import Device
from governor.runners import Opener, RunnerMaker, wait_opened
from simgpu import simgpu
from simgpu.steering import SimulatedHardware
from vdriver.errors import NvmlError
from vdriver.nvml import ProcessMemory


@pytest.fixture
def gpu(build_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A simulated GPU that runs in real time."""
    monkeypatch.setenv("SIMGPU_DIR", str(simgpu.create(tmp_path / "gpus")[0].parent))
    # Once attached to GPUs, a library keeps them and sees no later ones.
    copy = tmp_path / "libnvidia-ml.so.1"
    copy.write_bytes((build_dir / "simgpu/libnvidia-ml.so.1").read_bytes())
    nvml, handle = ctypes.CDLL(str(copy)), ctypes.c_void_p()
    assert nvml.nvmlInit_v2() == 0
    assert nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(handle)) == 0
    name = ctypes.create_string_buffer(96)
    assert nvml.nvmlDeviceGetUUID(handle, name, len(name)) == 0
    uuid = name.value.decode()
    hardware = SimulatedHardware(nvml, handle, uuid)
    library = build_dir / "simgpu/libcuda.so.1"
    return SimpleNamespace(hardware=hardware, uuid=uuid, library=str(library))


N_TRIES = 10


def run_probe(
    gpu: SimpleNamespace,
    hardware: Any = None,
    *,
    uuid: str = "",
    library: str = "",
    others: Sequence[set[int]] = (),
    is_ending: Callable[[], bool] = lambda: False,
) -> None:
    """Test the GPU; `others` has the PIDs of other processes that compute on it, for each check.

    On a busy machine, the processes of the test may have to wait for a CPU. The test is then
    repeated.
    """
    where = hardware or gpu.hardware, library or gpu.library, uuid or gpu.uuid
    for n in range(1, N_TRIES + 1):
        looks = itertools.chain(others, itertools.repeat(set()))
        try:
            probe(*where, partial(next, looks), is_ending)
        except NotProbedError as e:
            if n == N_TRIES or "the test's worker processes had to wait for a CPU" not in str(e):
                raise
        else:
            return


class Broken:
    """Hardware with one call replaced."""

    def __init__(self, hardware: SimulatedHardware, name: str, value: object) -> None:
        self._hardware = hardware
        setattr(self, name, lambda *_, **__: value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._hardware, name)


def test_calls_that_work_pass_and_leave_nothing(gpu: SimpleNamespace) -> None:
    run_probe(gpu)
    assert gpu.hardware._rows()[1] == []  # no context is left


@pytest.mark.parametrize(
    ("call", "value", "reason"),
    [
        ("find", [], "the channels of a process were not found"),
        ("switch", None, "a process that was switched off continued to work"),
        ("set_slice", None, "time slices of 8 to 1 had no effect: 60 ms of work took "),
        ("used_ns", {}, "the trace shows only 0 ms of 160 ms of work"),
        (
            "used_ns",
            {2**31: 160_000_000},
            "the trace has the PIDs of another namespace: run the governor in the host's PID namespace",
        ),
    ],
)
def test_a_call_without_an_effect_is_found(
    gpu: SimpleNamespace, call: str, value: object, reason: str
) -> None:
    hardware: Any = Broken(gpu.hardware, call, value)
    with pytest.raises(WithoutEffectError, match=f"^{reason}"):
        run_probe(gpu, hardware)


def test_a_gpu_on_which_no_process_can_work_is_not_judged(gpu: SimpleNamespace) -> None:
    with pytest.raises(
        NotProbedError,
        match=r"a worker process of the test cannot use the GPU: CUDA has no GPU GPU-0{8}-",
    ):
        run_probe(gpu, uuid="GPU-00000000-0000-0000-0000-000000000000")
    with pytest.raises(
        NotProbedError, match=r"a worker process of the test cannot use the GPU: .*libnone"
    ):
        run_probe(gpu, library="/nowhere/libnone.so")


@pytest.mark.parametrize("n_before", [0, 1, 2, 3, 4])
def test_beside_another_process_nothing_is_concluded(gpu: SimpleNamespace, n_before: int) -> None:
    """The other process starts before the test or during it; beside it, all work takes longer."""
    others = [set()] * n_before + [{1}] * 9
    with pytest.raises(NotProbedError, match=r"^other processes are using it$"):
        run_probe(gpu, others=others)


def test_a_missing_effect_beside_another_process_proves_nothing(gpu: SimpleNamespace) -> None:
    hardware = Broken(gpu.hardware, "switch", None)
    with pytest.raises(NotProbedError, match=r"^other processes are using it$"):
        run_probe(gpu, hardware, others=[set(), {1}])


@pytest.mark.parametrize(
    "error", [WithoutEffectError("no effect"), DriverCallError("a call", 0x57)]
)
def test_nothing_is_concluded_if_the_processes_were_ended(
    gpu: SimpleNamespace, error: Exception
) -> None:
    """A service manager may end these processes at the same time as the governor."""

    class Ending:
        def find(self, pid: int, _: int) -> None:
            os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)
            raise error

    with pytest.raises(NotProbedError, match="a worker process of the test has ended"):
        run_probe(gpu, Ending())


def test_a_test_that_hangs_ends_within_its_time(
    gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("governor.hardware.probe.WITHIN_S", 0.02)
    began = time.monotonic()
    with pytest.raises(NotProbedError, match="the test took too long"):
        run_probe(gpu)
    assert time.monotonic() - began < 20


def test_a_test_ends_with_the_governor(gpu: SimpleNamespace) -> None:
    ending = iter([False, True])
    with pytest.raises(NotProbedError, match="the governor is stopping"):
        run_probe(gpu, is_ending=lambda: next(ending))


# ---- when the test is made, and what follows from its result ----


def test_results_hold_for_a_gpu_a_driver_and_this_test(tmp_path: Path) -> None:
    directory = tmp_path / "state"  # it is created
    results = Results(str(directory), "580.1")
    assert results.get("GPU-1") is None
    results.put("GPU-1", "")
    results.put("GPU-2", "no effect")
    again = Results(str(directory), "580.1")
    assert (again.get("GPU-1"), again.get("GPU-2"), again.get("GPU-3")) == ("", "no effect", None)
    assert Results(str(directory), "590.1").get("GPU-1") is None
    stored = json.loads((directory / NAME).read_text())
    stored["GPU-1"]["version"] += 1
    (directory / NAME).write_text(json.dumps(stored))
    assert again.get("GPU-1") is None
    for damaged in ("", "[]", '{"GPU-1": 1}', '{"GPU-1": {"version": 1, "driver": "580.1"}}'):
        (directory / NAME).write_text(damaged)
        assert again.get("GPU-1") is None


def test_results_of_gpus_that_are_tested_at_once_are_all_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = threading.Barrier(2)
    read = Results._read

    def read_and_wait(results: Results) -> dict[str, Any]:
        found = read(results)
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.5)  # in vain if one waits for the other
        return found

    monkeypatch.setattr(Results, "_read", read_and_wait)
    with ThreadPoolExecutor() as threads:
        for uuid in ("GPU-1", "GPU-2"):
            threads.submit(Results(str(tmp_path), "580.1").put, uuid, "")
    assert sorted(json.loads((tmp_path / NAME).read_text())) == ["GPU-1", "GPU-2"]


class FakeNvml:
    """NVML of a real GPU, as far as the choice of a runner uses it."""

    def __init__(self, processes: Sequence[ProcessMemory] = ()) -> None:
        self._processes = tuple(processes)

    def simulated(self, _: str) -> None:
        return None

    def driver_version(self) -> str:
        return "580.1"

    def processes(self, _: str) -> tuple[ProcessMemory, ...]:
        return self._processes

    def busy(self, *_: object) -> tuple[()]:
        return ()


DEVICE = Device(0, "GPU-1", "H200", 1 << 37, 0)
BUSY = (ProcessMemory(7, 1 << 20),)
SCREEN = (ProcessMemory(7, 1 << 20, computes=False),)


class Openings:
    """The part of a governor that opens GPUs, with a given result of their test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, state: Path) -> None:
        self.state = state
        self.probed = 0
        self.closed = 0
        self.result: Exception | None = None
        self.opens: Exception | None = None
        self.ending = threading.Event()
        monkeypatch.setattr("governor.runners.open_hardware", self.open)
        monkeypatch.setattr("governor.runners.probe", self.probe)

    def open(self, *_: object) -> object:
        if self.opens:
            raise self.opens
        return self

    def close(self) -> None:
        self.closed += 1

    def probe(
        self,
        _hardware: object,
        _library: str,
        _uuid: str,
        computing: Callable[[], list[int]],
        *_: object,
    ) -> None:
        if computing():
            raise NotProbedError("other processes are using it")
        self.probed += 1
        if self.result:
            raise self.result

    def maker(
        self, scheduling: str, processes: Sequence[ProcessMemory] = (), **more: Any
    ) -> RunnerMaker:
        config = Config(scheduling=scheduling, state_dir=str(self.state), **more)
        nvml: Any = FakeNvml(processes)
        nothing: Any = SimpleNamespace(grants=None)
        return RunnerMaker(nothing, config, nvml, Path("/libcuda"), nothing)

    def try_open(self, scheduling: str, processes: Sequence[ProcessMemory] = ()) -> str:
        """Return `steered`, or why the GPU is not, with a `!` if that is final."""
        opener = Opener(self.maker(scheduling, processes), DEVICE)
        try:
            assert opener.open(self.ending) is self
        except WithoutEffectError as e:
            return f"{e}!"
        except (NotProbedError, OSError) as e:
            return str(e)
        return "steered"


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Openings:
    return Openings(monkeypatch, tmp_path)


def test_a_gpu_is_tested_once_and_then_steered_even_if_it_is_in_use(node: Openings) -> None:
    assert node.try_open("auto", SCREEN) == "steered"
    assert node.try_open("auto", BUSY) == "steered"
    assert node.try_open("hardware", BUSY) == "steered"
    assert (node.probed, node.closed) == (1, 0)


@pytest.mark.parametrize("scheduling", ["auto", "hardware"])
def test_a_gpu_on_which_a_call_has_no_effect_is_shared_by_grants(
    node: Openings, scheduling: str
) -> None:
    node.result = WithoutEffectError("no effect")
    assert node.try_open(scheduling) == "no effect!"
    assert node.try_open(scheduling, BUSY) == "no effect"  # known from the first time
    assert (node.probed, node.closed) == (1, 2)
    node.result = None
    assert node.try_open(scheduling) == "steered"  # a negative result is tested again


@pytest.mark.parametrize("scheduling", ["auto", "hardware"])
def test_a_gpu_that_cannot_be_tested_is_steered_only_if_the_configuration_says_so(
    node: Openings, scheduling: str
) -> None:
    def expect(reason: str) -> str:
        untested = f"the test of whether it can be steered was not completed: {reason}"
        return "steered" if scheduling == "hardware" else untested

    assert node.try_open(scheduling, BUSY) == expect("other processes are using it")
    node.result = NotProbedError(
        "a worker process of the test cannot use the GPU: cuInit answers 2"
    )
    assert node.try_open(scheduling) == expect(
        "a worker process of the test cannot use the GPU: cuInit answers 2"
    )
    node.result = NvmlError("the processes on it are not known", hint="none")
    assert node.try_open(scheduling) == expect("the processes on it are not known")
    assert not list(node.state.iterdir())


def test_a_driver_that_refuses_a_call_in_the_test_fails_it(node: Openings) -> None:
    node.result = DriverCallError("a call", 0x56)
    assert node.try_open("auto").endswith("!")
    assert list(node.state.iterdir())


@pytest.mark.parametrize("scheduling", ["auto", "hardware"])
def test_a_test_cut_short_by_the_end_of_the_governor_steers_nothing(
    node: Openings, scheduling: str
) -> None:
    node.result = NotProbedError("the governor is stopping")
    node.ending.set()
    assert node.try_open(scheduling).endswith("the governor is stopping")
    assert node.closed == 1


def test_the_number_of_gpus_that_are_tested_at_once_is_limited(node: Openings) -> None:
    """Otherwise the processes of the tests would wait for processors."""
    maker = node.maker("auto")
    maker.turns = threading.Semaphore(0)
    thread = threading.Thread(target=Opener(maker, DEVICE).open, args=(node.ending,))
    thread.start()
    thread.join(0.3)
    assert node.probed == 0
    maker.turns.release()
    thread.join(20)
    assert node.probed == 1
    maker.turns.acquire()
    node.ending.set()
    other = Opener(maker, Device(1, "GPU-2", "H200", 1 << 37, 0))
    with pytest.raises(NotProbedError, match="the governor is stopping"):
        other.open(node.ending)


def test_what_keeps_a_gpu_from_being_steered_is_logged_once(
    node: Openings, capfd: pytest.CaptureFixture[str]
) -> None:
    node.opens = OSError("no steering service answers")
    opener = Opener(node.maker("auto"), DEVICE)
    for _ in range(3):
        with pytest.raises(OSError, match="no steering service answers"):
            opener.open(node.ending)
    assert capfd.readouterr().out.count("no steering service answers") == 1
    assert node.probed == 0


def test_a_result_that_cannot_be_kept_counts_until_the_governor_ends(node: Openings) -> None:
    node.state = Path("/proc/no")
    opener = Opener(node.maker("auto"), DEVICE)
    opener.open(node.ending)
    opener.open(node.ending)
    assert node.probed == 1


# ---- which GPUs are tested ----


@pytest.mark.parametrize(
    ("scheduling", "strategy", "expected"),
    [
        ("auto", "timeslice", "opens"),
        ("hardware", "timeslice", "opens"),
        ("gate", "timeslice", "grants: "),
        ("auto", "mps", "grants: "),
        ("hardware", "mps", "grants: it uses strategy mps"),
    ],
)
def test_only_gpus_shared_by_time_slices_are_steered(
    node: Openings, monkeypatch: pytest.MonkeyPatch, scheduling: str, strategy: str, expected: str
) -> None:
    monkeypatch.setattr("governor.runners.HardwareRunner", lambda *_, **__: "opens")
    monkeypatch.setattr("governor.runners.Runner", lambda *_: SimpleNamespace())
    made: Any = node.maker(scheduling, gpus={"0": {"strategy": strategy}}).make(DEVICE)
    assert (made if made == "opens" else f"grants: {made.not_steered}") == expected


def test_the_governor_waits_for_the_tests_for_a_short_time(
    build_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hooks wait in the meantime, and once containers work, no test can be made."""
    monkeypatch.setattr("governor.runners.START_S", 1.5)
    released = threading.Event()

    def opens(its_ending: threading.Event) -> Any:
        while not (released.wait(0.01) or its_ending.is_set()):
            pass
        raise OSError("it cannot be opened")

    library = load_library(build_dir / "libcontrol")
    runners = [HardwareRunner(library, Config(), opens, gpu=i) for i in range(8)]
    with ExitStack() as stack:
        for runner in runners:
            stack.callback(runner.close)
        began = time.monotonic()
        wait_opened(runners)
        assert 1.5 <= time.monotonic() - began < 12  # for all together, not 1.5 s for each
        released.set()
        monkeypatch.setattr("governor.runners.START_S", 20)
        wait_opened(runners)
        assert all(runner.not_steered == "it cannot be opened" for runner in runners)
