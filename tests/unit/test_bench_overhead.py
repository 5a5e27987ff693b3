"""The cost of a call: the figures from the samples, and a run on a driver that does nothing."""

import json
import os
import subprocess
import sys

import pytest

from bench import figures, overhead, report_docs, run, step
from bench.provenance import describe_run
from bench.sandbox import GrantSandbox, control_folder
from libcontrol import layout, pages
from tests.conftest import lack

STUB = b"tidegate stub 0."


@pytest.fixture
def room(tmp_path):
    """A sandbox, on machines where this process can create a mount namespace."""
    with GrantSandbox(tmp_path / "room", [STUB]) as made:
        done = subprocess.run(made.command("true"), capture_output=True, text=True, check=False)
        if done.returncode:
            lack(f"no mount namespace: {done.stderr.strip()}")
        yield made


def pair(native, governed):
    return {"native": {"launch": native}, "governed": {"launch": governed}}


def test_the_order_within_pairs_alternates():
    assert list(figures.in_turn(3)) == [
        ("native", "governed"), ("governed", "native"), ("native", "governed")
    ]  # fmt: skip


def test_a_difference_is_that_of_the_medians_of_a_pair():
    pairs = [pair([1, 2, 900], [12, 11, 13]), pair([2, 2, 2], [22, 22, 22]), pair([2], [12])]
    assert overhead.summarise(pairs)["launch"] == {
        "native_ns": 2.0, "governed_ns": 12.0, "difference_ns": 10.0,
        "low_ns": 10.0, "high_ns": 20.0,
    }  # fmt: skip


def test_the_interval_of_equal_values_is_a_point():
    assert figures.interval([3.0, 3.0, 3.0]) == (3.0, 3.0)


def test_the_interval_contains_the_median_and_is_within_the_samples():
    low, high = figures.interval([1.0, 2.0, 3.0, 4.0, 100.0])
    assert 1 <= low < 3 < high <= 100


def test_a_run_that_did_not_measure_everything_is_an_error():
    with pytest.raises(overhead.MachineError, match="overhead: cuInit returned 802"):
        overhead.read_samples("overhead: cuInit returned 802", ["launch"])


def test_with_the_stub_every_measure_is_taken_and_becomes_a_result(room, build_dir, tmp_path):
    del room
    out = tmp_path / "overhead"
    command = ["--stub", "--pairs", "1", "--samples", "2", "--calls", "50", "--output", str(out)]
    assert overhead.main([*command, "--build", str(build_dir)]) == 0
    report = json.loads((out / "overhead.json").read_text())
    for one in (report["alone"][0]["native"], report["alone"][0]["governed"]):
        assert sorted(one) == sorted(overhead.ALONE)
        assert all(len(samples) == 2 and min(samples) > 0 for samples in one.values())

    keep = ["--suite", "overhead", "--from", str(out), "--out"]
    assert run.main([*keep, str(tmp_path / "bench/results/r.json")]) == 0
    [page] = report_docs.plan_files(tmp_path).values()
    assert "### the stub" in page
    assert "| look-up-ours, alone |" in page

    report["summary"]["alone"]["launch"]["difference_ns"] += 1
    (out / "overhead.json").write_text(json.dumps(report))
    assert run.main([*keep, str(tmp_path / "claimed.json")]) == 1


def test_a_process_in_a_sandbox_reads_the_page_and_writes_the_ledger(room, build_dir, tmp_path):
    folder = control_folder(
        tmp_path / "lib", build_dir / "libcontrol/libcuda.so.1", build_dir / "libcuda-stub.so"
    )
    command = [str(build_dir / "overhead"), "launch", "--samples", "1", "--calls", "7"]
    done = subprocess.run(
        room.command(*command),
        env={**os.environ, "LD_LIBRARY_PATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    # There are two warm-up batches. Launches that used a pass are reported five times a second.
    assert 0 < room.counter("launches") <= 7 * 3


def test_a_recovered_page_has_no_changed_field(tmp_path):
    fields = [(0, layout.GRANT_HEADER, field) for field in layout.GRANT_HEADER.fields]
    base = layout.grant_device(0)
    fields += [(base, layout.GRANT_DEVICE, field) for field in layout.GRANT_DEVICE.fields]

    def read(room):
        return {
            (struct.name, field.name): pages.read(room.grant, base, struct.name, field.name)
            for base, struct, field in fields
            if field.name != "heartbeat_ns"
        }

    with (
        GrantSandbox(tmp_path / "a", [STUB]) as fresh,
        GrantSandbox(tmp_path / "b", [STUB]) as room,
    ):
        for base, struct, field in fields:
            for index in range(field.n):
                pages.write(room.grant, base, struct.name, field.name, 5, index=index)
        fresh.recover()
        room.recover()
        assert read(room) == read(fresh)


def test_a_sandbox_has_the_grants_that_its_owner_wrote(tmp_path):
    with GrantSandbox(tmp_path / "room", [STUB, bytes(16)], compute=5) as room:
        room.grant_until(0, device=1)
        page = (tmp_path / "room/grant").read_bytes()
    assert page[:8] == b"TDGGRANT"
    first, second = (
        page[layout.grant_device(i) : layout.grant_device(i) + layout.GRANT_DEVICE.size]
        for i in (0, 1)
    )
    at = layout.offsets(layout.GRANT_DEVICE)
    assert first[:16] == STUB
    assert first[at["deadline_ns"] :][:8] == b"\xff" * 8
    assert second[at["deadline_ns"] :][:8] == bytes(8)
    assert (first[at["epoch"]], second[at["epoch"]]) == (1, 2)
    assert first[at["compute"]] == 5


WORKER = """
import json, pathlib, sys, time
orders, ms = pathlib.Path(sys.argv[1]), float(sys.argv[2])
(orders / "ready").touch()
n = 0
while not (orders / "end").exists():
    if (orders / f"go-{n}").exists():
        if ms < 0:
            sys.exit("no GPU here")
        (orders / "partial").write_text(json.dumps({"steps": 10, "seconds": ms / 50, "step_ms": ms}))
        (orders / "partial").rename(orders / f"done-{n}")
        n += 1
    time.sleep(0.001)
"""


def arm(directory, ms):
    command = [sys.executable, "-c", WORKER, str(directory), str(ms)]
    return step.native_arm(command, directory, 1.0)


def test_two_processes_take_steps_in_turn(tmp_path):
    with arm(tmp_path / "a", 2.0) as native, arm(tmp_path / "b", 2.1) as governed:
        pairs = step.run_steps({"native": native, "governed": governed}, 4)
    assert len(pairs) == 4
    assert [list(pair) for pair in pairs[:2]] == [["native", "governed"], ["governed", "native"]]
    assert step.summarise_steps([pairs, pairs]) == {
        "native_ms": 2.0, "governed_ms": 2.1, "slower_percent": 5.0, "upper_95_percent": 5.0
    }  # fmt: skip


def test_a_process_that_ends_in_the_middle_is_an_error_with_its_message(tmp_path):
    with (
        pytest.raises(step.MachineError, match="status 1, no GPU here"),
        arm(tmp_path / "a", 1.0) as native,
        arm(tmp_path / "b", -1.0) as governed,
    ):
        step.run_steps({"native": native, "governed": governed}, 1)


def round_of(*seconds):
    return [
        {"native": {"step_ms": 10.0}, "governed": {"step_ms": 10 * governed}}
        for governed in seconds
    ]


def test_the_bound_is_above_the_median_and_within_the_samples():
    found = step.summarise_steps([round_of(0.99, 1.0, 1.01, 1.02, 1.03)])
    assert found["slower_percent"] == 1.0
    assert 1.0 < found["upper_95_percent"] <= 3.0


def test_differences_between_processes_widen_the_bound():
    same = step.summarise_steps([round_of(*[1.0] * 20)] * 4)
    differing = step.summarise_steps([round_of(*[at] * 20) for at in (0.99, 1.0, 1.0, 1.01)])
    assert same["slower_percent"] == differing["slower_percent"] == 0
    assert same["upper_95_percent"] == 0
    assert 0.2 < differing["upper_95_percent"] <= 1.0


def test_steps_become_a_result_and_a_section(tmp_path):
    pairs = [{"native": {"step_ms": 100.0}, "governed": {"step_ms": 110.0}}]
    report = {
        "train": [pairs], "decode": [pairs],
        "options": {"rounds": 1, "pairs": 1, "seconds": 1},
        "gpu": {"kind": "nvidia", "name": "NVIDIA H200", "driver": "580.159.04"},
        "run": describe_run(),
    }  # fmt: skip
    report["summary"] = overhead.summarise_report(report)
    (tmp_path / "overhead.json").write_text(json.dumps(report))
    out = tmp_path / "bench/results/r.json"
    keep = ["--suite", "overhead", "--from", str(tmp_path)]
    assert run.main([*keep, "--out", str(out)]) == 0
    assert json.loads(out.read_text())["suite"] == "step"
    [page] = report_docs.plan_files(tmp_path).values()
    assert "| train | 100.000 ms | 110.000 ms | 10.00 % | 10.00 % |" in page
