"""Test tests.gpu.coverage_probe, which finds functions of cuda.h that bypass Tidegate.

The tests cover its calls and rules, and run the coverage probe itself on the simulated GPU.
"""

import os
import re
import subprocess
import sys

import pytest

from libcontrol.coverage import base_name, read_declarations, read_effects
from tests.conftest import lack
from tests.gpu import coverage_probe

CALLED = re.compile(r"^(?:CASE|VARIANT|NOT_HERE)\((cu\w+), ", re.MULTILINE)
# Functions that are declared in headers other than cuda.h, or in none.
ELSEWHERE = re.compile(
    r"cudbg|cuGL|cuWGL|cuEGL|cuVDPAU|cuProfiler|cuGraphics(GL|EGL|VDPAU)"
    r"|cuGraphicsResourceGetMappedEglFrame|cuEventCreateFromEGLSync|cuMemGetAttribute"
)
MIB = 1 << 20


def ran(**changes):
    row = {
        "outcome": "ran", "host": False, "paid": False, "late": False, "result": 0, "wall_us": 1.0, "gpu_us": 2.0,
        "waited": False, "process": 0, "device": 0, "returned": {}, "after": {},
    }  # fmt: skip
    return row | changes


def faults(native, governed=None, quota=64 << 30):
    return coverage_probe.judge_call(("cuX", ""), native, governed or native, quota).faults


def test_each_function_of_the_reference_is_called_or_has_a_reason_not_to_be():
    calls = coverage_probe.SOURCE.with_name("coverage_probe_calls.h").read_text()
    called = {base_name(name) for name in CALLED.findall(calls)}
    expected = {name for name in read_effects() if not ELSEWHERE.match(name)}
    assert called == expected


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        (ran(), None),
        (ran(process=64 * MIB), "takes 64 MiB unseen"),
        (ran(process=64 * MIB, returned={"memory": 64 * MIB}), None),
        (ran(process=64 * MIB, after={"memory": 64 * MIB, "unseen": 64 * MIB}), None),
        (ran(process=64 * MIB, after={"memory": 2 * MIB}), "takes 64 MiB unseen"),
        (ran(process=64 * MIB, after={"memory": -64 * MIB}), "takes 64 MiB unseen"),
        (ran(device=512 * MIB, after={"provisional": 520 * MIB}), None),
        (ran(device=4096 * MIB, after={"provisional_ns": 5}), "takes 4096 MiB unseen"),
        (ran(device=4096 * MIB, after={"provisional": -5}), "takes 4096 MiB unseen"),
        (ran(process=-512 * MIB), "frees 512 MiB unseen"),
        (ran(process=-512 * MIB, returned={"memory": -512 * MIB}), None),
        (ran(process=64 * MIB, paid=True), None),
        (ran(process=MIB), None),
        (ran(gpu_us=1000.0), "works 1000 us past the gate"),
        (ran(gpu_us=1000.0, returned={"launches": 1}), None),
        (ran(gpu_us=1000.0, returned={"small": 3}), None),
        (ran(gpu_us=1000.0, returned={"transfers": 1}), "works 1000 us on the device, counted as"),
        (ran(gpu_us=1000.0, returned={"transfers": 1}, host=True), None),
        (ran(gpu_us=1000.0, host=True), "works 1000 us past the gate"),
        (ran(gpu_us=60.0, waited=True), None),
        (ran(gpu_us=60.0), "works 60 us past the gate"),
    ],
)
def test_effects_of_a_call_must_be_in_the_ledger(row, fault):
    found = faults(row)
    assert len(found) == (fault is not None)
    assert fault is None or found[0].startswith(fault)


@pytest.mark.parametrize(
    ("name", "excused"),
    [
        ("cuLaunchHostFunc", True),
        ("cuLaunchHostFunc_ptsz", True),
        ("cuStreamAddCallback", True),
        ("cuStreamAddCallback_ptsz", True),
        ("cuLaunchHostFuncOfTomorrow", False),
        ("cuGraphLaunch_ptsz", False),
    ],
)
def test_a_stream_that_waits_for_the_host_does_not_work(name, excused):
    idle, busy = ran(name=name), ran(name=name, gpu_us=1000.0)
    expected = () if excused else ("works 1000 us past the gate",)
    assert faults(busy) == expected
    assert faults(idle, busy) == expected
    assert faults(busy, busy | {"returned": {"transfers": 1}}) == (
        () if excused else ("works 1000 us on the device, counted as a transfer",)
    )


def test_a_function_of_the_host_is_excused_only_from_the_gate():
    row = ran(name="cuLaunchHostFunc", gpu_us=1000.0)
    assert faults(row, row | {"process": 64 * MIB}) == ("takes 64 MiB unseen",)
    assert faults(row, row | {"result": 1}) == ("answers 1, natively 0",)


@pytest.mark.parametrize("change", [64 * MIB, -512 * MIB])
def test_memory_that_the_driver_takes_or_frees_may_be_found_by_the_governor(change):
    row = ran(process=change, late=True)
    said = (f"{'takes' if change > 0 else 'frees'} {abs(change) // MIB} MiB unseen",)
    assert faults(row, row | {"after": {"overhead": change}}) == ()
    # The overhead is not accepted if the call is not expected to have late overhead, or if it is
    # too small or has the wrong sign.
    assert faults(row | {"late": False}, row | {"after": {"overhead": change}}) == said
    assert faults(row, row | {"after": {"overhead": change // 4}}) == said
    assert faults(row, row | {"after": {"overhead": -change}}) == said
    # A second has passed, and no sample found the overhead. The ledger of a native row is ignored.
    assert faults(row | {"after": {"overhead": change}}, row) == said


def test_memory_that_leaves_the_process_but_not_the_gpu_stays_charged():
    row = ran(process=-64 * MIB, device=0)
    assert faults(row, row | {"returned": {"unseen": 64 * MIB}}) == ()
    assert faults(row, row | {"returned": {"unseen": -64 * MIB}}) == ("frees 64 MiB unseen",)


def test_any_call_may_make_the_driver_take_up_to_4_mib():
    assert faults(ran(process=2 * MIB, after={"overhead": 2 * MIB})) == ()
    assert faults(ran(process=4 * MIB, after={"overhead": 4 * MIB})) == ()
    assert faults(ran(process=6 * MIB, after={"overhead": 6 * MIB})) == ("takes 6 MiB unseen",)
    assert faults(ran(process=2 * MIB)) == ("takes 2 MiB unseen",)


def test_memory_that_a_call_announced_may_be_settled_by_the_governor_before_the_first_reading():
    settled = {"provisional": -MIB, "provisional_ns": 5, "overhead": 520 * MIB}
    assert faults(ran(process=6 * MIB, returned=settled)) == ()
    for wrong in ({"provisional_ns": 0}, {"overhead": 2 * MIB}, {"provisional": 1}):
        row = ran(process=6 * MIB, returned=settled | wrong)
        assert faults(row) == ("takes 6 MiB unseen",)


def test_overhead_that_the_governor_finds_does_not_excuse_work():
    row = ran(process=64 * MIB, late=True, gpu_us=1000.0, after={"overhead": 64 * MIB})
    assert faults(row) == ("works 1000 us past the gate",)


@pytest.mark.parametrize(
    ("row", "late"),
    [
        (ran(process=64 * MIB, after={"overhead": 64 * MIB}), True),
        (ran(device=-64 * MIB, after={"overhead": -64 * MIB}), True),
        (ran(process=64 * MIB, returned={"memory": 64 * MIB}, after={"overhead": 1}), False),
        (ran(process=64 * MIB, after={"provisional": 60 * MIB, "overhead": 1}), False),
        (ran(process=64 * MIB, after={"provisional": -5, "overhead": 1}), True),
        (ran(process=64 * MIB, paid=True, after={"overhead": 64 * MIB}), False),
        (ran(process=MIB, after={"overhead": MIB}), False),
        (ran(after={"overhead": 512 * MIB}), False),
    ],
)
def test_memory_that_only_the_governor_saw_is_reported_as_late(row, late):
    assert coverage_probe.found_late(row, row) is late
    assert coverage_probe.found_late(ran(paid=row["paid"]), row) is late


def test_a_call_is_judged_by_the_effects_in_either_run():
    assert faults(ran(process=64 * MIB), ran()) == ("takes 64 MiB unseen",)
    assert faults(ran(), ran(gpu_us=500.0)) == ("works 500 us past the gate",)


def test_a_quota_changes_no_result_except_that_of_memory_beyond_it():
    assert faults(ran(), ran(result=1)) == ("answers 1, natively 0",)
    assert faults(ran(), ran(result=2)) == ("answers 2, natively 0",)
    large = ran(process=4096 * MIB)
    assert "answers 2, natively 0" not in faults(large, ran(result=2), quota=1024 * MIB)
    leak = ran(result=1, detail="cuMemAlloc 13000")
    assert faults(ran(), leak) == ("answers 1, natively 0 (cuMemAlloc 13000)",)


def test_a_call_that_proves_nothing_is_reported_and_a_crash_with_a_quota_fails():
    refused = coverage_probe.judge_call(("cuX", ""), ran(result=801), ran(result=801), 0)
    assert (refused.faults, refused.unproven) == ((), "the driver answers 801")
    absent = {"outcome": "absent", "reason": "the driver has no such symbol"}
    crashed = {"outcome": "crashed", "reason": "signal 11"}
    assert coverage_probe.judge_call(("cuX", ""), absent, absent, 0).unproven == absent["reason"]
    assert faults(ran(), crashed) == ("crashed with a quota: signal 11",)
    assert faults(absent, crashed) == ("crashed with a quota, natively absent",)
    assert faults(absent, ran(result=801)) == ()
    assert faults(absent, ran()) == ("ran with a quota, natively absent",)


def test_a_judge_that_misses_a_known_effect_is_blind():
    rows = {(name, ""): ran(gpu_us=500.0, process=64 * MIB) for name in coverage_probe.CONTROLS}
    assert coverage_probe.blind(rows) == []
    rows["cuMemAlloc_v2", ""] = ran()
    del rows["cuLaunchKernel", ""]
    assert [line.split(":")[0] for line in coverage_probe.blind(rows)] == [
        "cuMemAlloc_v2",
        "cuLaunchKernel",
    ]
    _, wrong = coverage_probe.judge_all({}, {}, ["cuOfTomorrow"], 0)
    assert wrong[0] == "cuOfTomorrow: declared, and never called"


def test_a_header_of_an_older_cuda_is_skipped(tmp_path, monkeypatch):
    for name, version in (("cu12", 12090), ("cu13", 13000)):
        include = tmp_path / "nvidia" / name / "include"
        include.mkdir(parents=True)
        (include / "cuda.h").write_text(f"#define CUDA_VERSION {version}\n")
    old, new = (tmp_path / "nvidia" / name / "include" for name in ("cu12", "cu13"))
    assert coverage_probe.find_include([tmp_path, old, new]) == new
    assert coverage_probe.find_include([tmp_path, old]) is None
    monkeypatch.syspath_prepend(tmp_path)
    assert coverage_probe.packaged_includes()[:2] == [old, new]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """The coverage probe, and the directory of the headers that it was compiled with."""
    # The header pinned by requirements.lock, not the machine's toolkit: a later one declares more.
    include = coverage_probe.find_include(coverage_probe.packaged_includes())
    if include is None:
        lack("needs cuda.h of nvidia-cuda-runtime 13.5")
    program = tmp_path_factory.mktemp("probe") / "coverage_probe"
    coverage_probe.compile_probe(include, program)
    return program, include


def test_the_forms_that_are_called_are_those_that_the_header_declares(compiled):
    program, include = compiled
    assert coverage_probe.listed(program) == read_declarations(include / "cuda.h")


def test_the_judge_sees_memory_and_work_on_the_simulated_gpu(compiled, build_dir, tmp_path):
    program, _ = compiled
    create = [sys.executable, "-m", "simgpu", "create", "--dir", str(tmp_path)]
    subprocess.run(create, check=True, cwd=coverage_probe.ROOT, stdout=subprocess.DEVNULL)
    done = subprocess.run(
        [program, "--block", "4"],
        env=os.environ
        | {"SIMGPU_DIR": str(tmp_path), "LD_LIBRARY_PATH": str(build_dir / "simgpu")},
        check=True, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    rows = coverage_probe.read_rows(done.stdout)
    assert {name for name, _ in rows} == coverage_probe.listed(program)
    assert {row["outcome"] for row in rows.values()} <= {
        "ran",
        "absent",
        "unprepared",
        "not called",
    }
    assert coverage_probe.blind(rows, ["cuMemAlloc_v2", "cuLaunchKernel"]) == []
    assert rows["cuMemAlloc_v2", ""]["process"] == 64 * MIB
    assert rows["cuMemFree_v2", ""]["process"] == -64 * MIB
    assert 900 < rows["cuLaunchKernel", ""]["gpu_us"] < 5000
    assert 0 <= rows["cuStreamGetCtx", ""]["gpu_us"] < coverage_probe.WORKED_US
