"""A run is kept as one file, and the published page is written from such files alone."""

import json
from pathlib import Path

import jsonschema
import pytest

from bench import report_docs, run
from bench.progress import NS_PER_MS, Profile, Progress, Stamp
from bench.provenance import describe_machine, describe_run, find_commit, publishable
from bench.report import (
    RefusedAllocation,
    ReportedContainer,
    ReportedGpu,
    build_report,
    write_report,
)

GIB = 1 << 30

COUNTERS = {"launches": 9, "waits": 2, "grants": 3, "markers": 4, "busy_ns": 5}
GOVERNOR = {"training": {"lookups": 140, "devices": [COUNTERS]}, "notebook": {}}


def container(name, compute, share):
    every = NS_PER_MS * 100 // share
    stamps = [Stamp(i * every, 0) for i in range(30 * share + 1)]
    profile = Profile({0: float(NS_PER_MS)}, 1.0, len(stamps) - 1)
    return ReportedContainer(name, compute, 3 * GIB, 2 * GIB, 0, Progress(stamps, profile), profile)


@pytest.fixture
def demo(tmp_path):
    containers = [container("training", 45, 44), container("notebook", 15, 16)]
    report = build_report(
        ReportedGpu("nvidia", "NVIDIA H200", "580.159.04"),
        containers,
        RefusedAllocation(4 * GIB, 3 * GIB, "CUDA_ERROR_OUT_OF_MEMORY"),
        detail={"jobs": {"training": "resnet18", "notebook": "gru"}, "governor": GOVERNOR},
    )
    write_report(tmp_path / "demo", report, containers)
    return tmp_path / "demo"


def keep(demo, out, *more):
    return run.main(["--suite", "shares", "--from", str(demo), "--out", str(out), *more])


def test_a_demo_run_becomes_one_result(demo, tmp_path):
    assert keep(demo, tmp_path / "r.json") == 0
    result = json.loads((tmp_path / "r.json").read_text())
    run.validate(result)
    assert result["suite"] == "shares"
    assert result["gpu"]["name"] == "NVIDIA H200"
    assert result["configuration"]["jobs"] == {"training": "resnet18", "notebook": "gru"}
    assert "governor" not in result["configuration"]
    assert result["raw"]["counters"]["training"] == {
        "lookups": 140, "launches": 9, "waits": 2, "grants": 3, "markers": 4
    }  # fmt: skip
    assert [one["name"] for one in result["summary"]["containers"]] == ["training", "notebook"]
    assert run.result_name(result) == f"{result['date'][:10]}-shares-nvidia-h200.json"


def test_an_existing_result_is_not_overwritten(demo, tmp_path, capsys):
    (tmp_path / "r.json").write_text("kept")
    assert keep(demo, tmp_path / "r.json") == 1
    assert "exists: choose another name with --out" in capsys.readouterr().err
    assert (tmp_path / "r.json").read_text() == "kept"


def test_samples_of_another_run_are_refused(demo, tmp_path, capsys):
    samples = json.loads((demo / "progress.json").read_text())
    samples["work_us"]["training"] = [w + 100 for w in samples["work_us"]["training"]]
    (demo / "progress.json").write_text(json.dumps(samples))
    assert keep(demo, tmp_path / "r.json") == 1
    assert "they are not from the same run" in capsys.readouterr().err


def test_a_directory_without_a_run_is_refused_with_the_command_to_run(tmp_path, capsys):
    assert keep(tmp_path, tmp_path / "r.json") == 1
    assert (
        "run `python -m bench.demo`, and pass the directory that contains its"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("suite", "runner"),
    [("quota", "bench.quota"), ("gangs", "bench.gangs"), ("mirror", "bench.mirror")],
)
def test_each_suite_names_the_run_that_it_needs(suite, runner, tmp_path, capsys):
    assert run.main(["--suite", suite, "--from", str(tmp_path)]) == 1
    assert (
        f"run `python -m {runner}`, and pass the directory that contains its"
        in capsys.readouterr().err
    )


def test_a_report_of_another_suite_is_refused(demo, tmp_path, capsys):
    assert run.main(["--suite", "mirror", "--from", str(demo), "--out", str(tmp_path / "r")]) == 1
    assert "is not from `python -m bench.mirror`" in capsys.readouterr().err


def test_a_result_that_outgrows_the_repository_is_refused(demo, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(run, "MAX_BYTES", 1000)
    assert keep(demo, tmp_path / "r.json") == 1
    assert "bytes, above 1000: make the run shorter" in capsys.readouterr().err


def test_a_run_without_a_commit_takes_that_of_the_command_line(demo, tmp_path):
    report = json.loads((demo / "report.json").read_text())
    report["detail"]["run"]["commit"] = "unknown"
    (demo / "report.json").write_text(json.dumps(report))
    assert keep(demo, tmp_path / "r.json", "--commit", "a" * 40) == 0
    assert json.loads((tmp_path / "r.json").read_text())["commit"] == "a" * 40


@pytest.mark.parametrize("known", ["b" * 40, "a" * 40 + "-dirty"])
def test_a_run_that_names_its_commit_keeps_it(demo, tmp_path, capsys, known):
    """A result of a changed tree must not appear under a clean commit."""
    report = json.loads((demo / "report.json").read_text())
    report["detail"]["run"]["commit"] = known
    (demo / "report.json").write_text(json.dumps(report))
    assert keep(demo, tmp_path / "r.json", "--commit", "a" * 40) == 1
    assert capsys.readouterr().err == (
        f"bench.run: the run names its commit, {known}: leave out --commit\n"
    )
    assert keep(demo, tmp_path / "r.json") == 0
    assert json.loads((tmp_path / "r.json").read_text())["commit"] == known


@pytest.mark.parametrize("key", ["command", "date", "commit", "machine", "gpu", "raw", "summary"])
def test_a_result_that_lacks_its_origin_or_data_is_refused(demo, tmp_path, key):
    keep(demo, tmp_path / "r.json")
    result = json.loads((tmp_path / "r.json").read_text())
    del result[key]
    with pytest.raises(jsonschema.ValidationError, match=key):
        run.validate(result)


def test_the_page_is_made_from_the_results(demo, tmp_path, capsys):
    keep(demo, tmp_path / "bench/results/2026-01-02-shares-nvidia-h200.json")
    assert report_docs.main(["--check"], tmp_path) == 1
    assert "docs/benchmarks.md is stale" in capsys.readouterr().out
    assert report_docs.main([], tmp_path) == 0
    assert report_docs.main(["--check"], tmp_path) == 0
    page = (tmp_path / "docs/benchmarks.md").read_text()
    assert "| training | resnet18 | 45 % | 44.00 % | 2 GiB | 3 GiB |" in page
    assert "The error is 1.00 points in windows of 1 s and 1.00 in windows of 100 ms." in page
    assert "(figures/2026-01-02-shares-nvidia-h200.svg)" in page
    figure = tmp_path / "docs/figures/2026-01-02-shares-nvidia-h200.svg"
    assert figure.read_text().startswith("<svg")
    figure.write_text("edited")
    assert report_docs.main(["--check"], tmp_path) == 1


def test_without_a_result_there_is_nothing_to_publish(tmp_path):
    assert report_docs.main(["--check"], tmp_path) == 0
    assert report_docs.main([], tmp_path) == 0
    assert not (tmp_path / "docs").exists()


def test_every_kept_result_is_valid():
    for path in sorted(run.RESULTS.glob("*.json")):
        run.validate(json.loads(path.read_text()))
        assert path.stat().st_size <= run.MAX_BYTES


def test_a_tree_without_history_has_an_unknown_commit(tmp_path):
    assert find_commit(tmp_path) == "unknown"


def test_the_machine_is_described():
    machine = describe_machine()
    assert machine["cores"] >= 1
    assert machine["memory"] > 0


@pytest.mark.parametrize(
    ("argument", "published"),
    [
        ("--quotas", "--quotas"),
        ("45,30,15", "45,30,15"),
        ("/tree/bench/demo.py", "bench/demo.py"),
        ("/somewhere/private/demo", "demo"),
    ],
)
def test_no_path_of_a_machine_is_published(argument, published):
    assert publishable(argument, Path("/tree")) == published


def ran(name, **more):
    return {"status": 0, "output": name, **more}


@pytest.fixture
def mirrored(tmp_path):
    egl = {"renderer": "NVIDIA H200/PCIe/SSE2", "pixel": [255, 0, 255, 255]}
    graphics = ran("graphics", egl=egl, vulkan={"devices": ["NVIDIA H200"]})
    report = {
        "run": describe_run() | {"commit": "unknown"},
        "readelf": {"version": "580.159.04", "files": 34, "differ": {}},
        "refresh": {
            "first_s": [3.0, 2.0, 4.0],
            "again_s": [0.09, 0.08, 0.1],
            "how": {"copied": 38, "shared": 2},
            "bytes": 3 * GIB,
            "names": 84,
        },
        "verify": {"status": 0, "seconds": 0.8, "libraries": [{"outcome": "loaded"}] * 26},
        "containers": {
            "smi": ran("smi"),
            "torch": ran("torch", device="NVIDIA H200"),
            "graphics": graphics,
            "all": graphics,
            "without": {"status": 2},
        },
    }
    (tmp_path / "report.json").write_text(json.dumps(report))
    return report, tmp_path / "report.json"


def keep_mirror(path, *more):
    arguments = ["--suite", "mirror", "--from", str(path.parent), *more]
    return run.main([*arguments, "--out", str(path.with_name("r.json"))])


def test_a_mirror_run_becomes_one_result_and_a_table(mirrored):
    _, path = mirrored
    assert keep_mirror(path, "--commit", "c" * 40) == 0
    result = json.loads(path.with_name("r.json").read_text())
    assert result["summary"]["first_s"] == 3.0
    assert result["commit"] == "c" * 40
    text = report_docs.build_page({"r": result}).text
    assert "| names in the mirror | 84, 3 GiB (38 copied, 2 shared) |" in text
    assert "| a refresh without changes | 90 ms |" in text
    assert "| libraries that load from it | 26 of 26 |" in text


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"readelf": {"version": "1.2", "files": 1, "differ": {"/x": ["soname"]}}}, "readelf"),
        ({"verify": {"status": 72, "seconds": 1, "libraries": []}}, "verify"),
    ],
)
def test_a_mirror_run_that_failed_is_refused(mirrored, change, word, capsys):
    report, path = mirrored
    path.write_text(json.dumps(report | change))
    assert keep_mirror(path) == 1
    assert f"the run failed: {word}" in capsys.readouterr().err
