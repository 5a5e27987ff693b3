"""The test that shows whether driver calls have an effect on a GPU, on the simulated GPU and with calls that have none."""

from __future__ import annotations

import ctypes
import json
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from governor.config import Config
from governor.hardware.probe import NAME, NotProbedError, Results, WithoutEffectError, probe
from governor.quota import Device
from governor.runners import RunnerMaker
from simgpu import simgpu
from simgpu.steering import SimulatedHardware
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


class Broken:
    """Hardware with one call that is replaced."""

    def __init__(self, hardware: SimulatedHardware, name: str, value: object) -> None:
        self._hardware = hardware
        setattr(self, name, lambda *_, **__: value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._hardware, name)


def test_calls_that_work_pass_and_leave_nothing(gpu: SimpleNamespace) -> None:
    probe(gpu.hardware, gpu.library, gpu.uuid)
    assert gpu.hardware._rows()[1] == []  # no context is left


@pytest.mark.parametrize(
    ("call", "value", "reason"),
    [
        ("find", [], "the channels of a process were not found"),
        ("switch", None, "a process that was switched off worked on"),
        ("set_slice", None, "time slices of 8 to 1 had no effect: 60 ms of work took "),
        ("used_ns", {}, "the trace shows 0 ms of 160"),
    ],
)
def test_a_call_without_an_effect_is_found(
    gpu: SimpleNamespace, call: str, value: object, reason: str
) -> None:
    hardware: Any = Broken(gpu.hardware, call, value)
    with pytest.raises(WithoutEffectError, match=f"^{reason}"):
        probe(hardware, gpu.library, gpu.uuid)


def test_a_gpu_on_which_no_process_can_work_is_not_judged(gpu: SimpleNamespace) -> None:
    with pytest.raises(NotProbedError, match=r"cannot work on it: CUDA has no GPU GPU-0{8}-"):
        probe(gpu.hardware, gpu.library, "GPU-00000000-0000-0000-0000-000000000000")
    with pytest.raises(NotProbedError, match=r"cannot work on it: .*libnone"):
        probe(gpu.hardware, "/nowhere/libnone.so", gpu.uuid)


def test_a_test_that_hangs_ends_within_its_time(gpu: SimpleNamespace) -> None:
    """Otherwise a driver that hangs would keep the governor from starting."""
    began = time.monotonic()
    with pytest.raises(NotProbedError, match="the test took too long"):
        probe(gpu.hardware, gpu.library, gpu.uuid, 0.02)
    assert time.monotonic() - began < 20


# ---- when it is made, and what follows ----


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


class FakeNvml:
    """A real GPU, as far as the choice asks."""

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


class Choice:
    """Makes runners of a GPU with a given result of its test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, state: Path) -> None:
        self.state = state
        self.probed = 0
        self.closed = 0
        self.result: Exception | None = None
        self.opens: Exception | None = None
        monkeypatch.setattr("governor.runners.open_hardware", self.open)
        monkeypatch.setattr("governor.runners.probe", self.probe)
        monkeypatch.setattr("governor.runners.HardwareRunner", lambda *_, **__: "steered")
        monkeypatch.setattr("governor.runners.Runner", lambda *_: SimpleNamespace(by="grants"))

    def open(self, *_: object) -> object:
        if self.opens:
            raise self.opens
        return self

    def close(self) -> None:
        self.closed += 1

    def probe(self, *_: object) -> None:
        self.probed += 1
        if self.result:
            raise self.result

    def make(self, scheduling: str, processes: Sequence[ProcessMemory] = (), **more: Any) -> str:
        """Return `steered`, or why grants divide the time."""
        config = Config(scheduling=scheduling, state_dir=str(self.state), **more)
        nvml: Any = FakeNvml(processes)
        nothing: Any = None
        maker = RunnerMaker(nothing, config, nvml, Path("/libcuda"), nothing, nothing)
        made: Any = maker.make(DEVICE)
        return "steered" if made == "steered" else f"grants: {made.not_steered}"


@pytest.fixture
def choice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Choice:
    return Choice(monkeypatch, tmp_path)


def test_a_gpu_is_tested_once_and_then_steered_even_if_it_is_in_use(choice: Choice) -> None:
    assert choice.make("auto", SCREEN) == "steered"
    assert choice.make("auto", BUSY) == "steered"
    assert choice.make("hardware", BUSY) == "steered"
    assert (choice.probed, choice.closed) == (1, 0)


@pytest.mark.parametrize("scheduling", ["auto", "hardware"])
def test_a_gpu_on_which_a_call_has_no_effect_is_shared_by_grants(
    choice: Choice, scheduling: str
) -> None:
    choice.result = WithoutEffectError("no effect")
    assert choice.make(scheduling) == "grants: no effect"
    assert choice.make(scheduling, BUSY) == "grants: no effect"  # known from the first time
    assert (choice.probed, choice.closed) == (1, 2)
    choice.result = None
    assert choice.make(scheduling) == "steered"  # a negative result is tested again


@pytest.mark.parametrize("scheduling", ["auto", "hardware"])
def test_a_gpu_that_cannot_be_tested_is_steered_only_if_the_configuration_says_so(
    choice: Choice, scheduling: str
) -> None:
    untested = "grants: whether it can be steered was not tested: "
    made = choice.make(scheduling, BUSY)
    assert made == ("steered" if scheduling == "hardware" else untested + "other processes use it")
    choice.result = NotProbedError("a process cannot work on it: cuInit answers 2")
    made = choice.make(scheduling)
    assert made == (
        "steered"
        if scheduling == "hardware"
        else untested + "a process cannot work on it: cuInit answers 2"
    )
    assert not list(choice.state.iterdir())


def test_what_keeps_a_gpu_from_being_steered_is_told(choice: Choice) -> None:
    choice.opens = OSError("no steering service answers")
    assert choice.make("auto") == "grants: no steering service answers"
    assert choice.make("gate") == "grants: "
    mps = {"0": {"strategy": "mps"}}
    assert choice.make("auto", gpus=mps) == "grants: "
    assert choice.make("hardware", gpus=mps) == "grants: it is shared by mps"
    assert choice.probed == 0


def test_all_tests_of_a_node_have_one_limit(
    choice: Choice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunnerMaker.__init__, "__defaults__", (0.0,))
    assert choice.make("auto").endswith("not tested: the tests of other GPUs took too long")
    assert choice.make("hardware") == "steered"
    assert choice.probed == 0


def test_a_result_that_cannot_be_kept_counts_until_the_governor_ends(choice: Choice) -> None:
    choice.state = Path("/proc/no")
    assert choice.make("auto") == "steered"
    assert choice.make("auto") == "steered"
    assert choice.probed == 2
