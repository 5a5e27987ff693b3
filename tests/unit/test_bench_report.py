"""A run of containers becomes report.json, report.svg and a table."""

import json
import xml.etree.ElementTree as ET
from dataclasses import replace

import jsonschema
import pytest

from bench.plot import Chart, Series, nice_ticks, number, render, spread
from bench.progress import NS_PER_MS, Profile, Progress, Stamp
from bench.report import (
    RefusedAllocation,
    ReportedContainer,
    ReportedGpu,
    build_report,
    chart_of,
    render_table,
    sample_progress,
    size,
    validate,
    write_report,
)

GIB = 1 << 30
SVG = "{http://www.w3.org/2000/svg}"


def container(name, compute, share, *, seconds=5, exit_status=0):
    """Return a container that delivered `share` percent, in units of 1 ms."""
    every = NS_PER_MS * 100 // share
    stamps = [Stamp(i * every, 0) for i in range(seconds * 10 * share + 1)]
    profile = Profile({0: float(NS_PER_MS)}, 1.0, len(stamps) - 1)
    progress = Progress(stamps, profile)
    return ReportedContainer(name, compute, 3 * GIB, 2 * GIB, exit_status, progress, profile)


def parse_svg(text):
    return ET.fromstring(text)  # noqa: S314 - our own output


@pytest.fixture
def containers():
    return [container("training", 45, 44), container("notebook", 15, 16, exit_status=137)]


@pytest.fixture
def report(containers):
    gpu = ReportedGpu("simulated", "Simulated GPU", "580.0")
    return build_report(
        gpu, containers, RefusedAllocation(4 * GIB, 3 * GIB, "CUDA_ERROR_OUT_OF_MEMORY")
    )


def test_the_shares_without_tidegate_are_next_to_those_with_it(containers):
    """Without Tidegate, both had 50 %; the first second of that run is left out."""
    containers = [
        replace(one, without=container("", 0, 50, seconds=4).progress) for one in containers
    ]
    gpu = ReportedGpu("simulated", "Simulated GPU", "580.0")
    report = build_report(
        gpu, containers, RefusedAllocation(4 * GIB, 3 * GIB, "CUDA_ERROR_OUT_OF_MEMORY")
    )
    validate(report)
    assert [one["without"] for one in report["containers"]] == [50, 50]
    table = render_table(report)
    assert "  without  delivered" in table
    assert "50.00 %    44.00 %" in table
    samples = sample_progress(containers, tuple(report["detail"]["span_ns"]))
    assert {len(work) for work in samples["without"]["work_us"].values()} == {300}
    chart = chart_of(report, samples)
    assert chart.x_range == (-3, pytest.approx(5, abs=0.02))
    assert [x for x, _ in chart.series[0].points] == [-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 3.5]
    assert chart.series[0].points[0][1] == pytest.approx(50)
    assert "Before 0 s, the jobs run without Tidegate" in chart.subtitle


def test_the_report_contains_what_was_promised_and_what_was_delivered(report):
    validate(report)
    assert {k: v for k, v in report.items() if k != "detail"} == {
        "gpu": {"kind": "simulated", "name": "Simulated GPU", "driver": "580.0"},
        "containers": [
            {
                "name": "training",
                "compute": 45,
                "delivered": 44.0,
                "memory_limit": 3 * GIB,
                "memory_peak": 2 * GIB,
                "exit": 0,
            },
            {
                "name": "notebook",
                "compute": 15,
                "delivered": 16.0,
                "memory_limit": 3 * GIB,
                "memory_peak": 2 * GIB,
                "exit": 137,
            },
        ],
        "refused": {
            "requested": 4 * GIB,
            "limit": 3 * GIB,
            "result": "CUDA_ERROR_OUT_OF_MEMORY",
        },
        "windows": {"1s": {"mean_abs_error_pp": 1.0}, "100ms": {"mean_abs_error_pp": 1.0}},
    }


@pytest.mark.parametrize("key", ["gpu", "containers", "refused", "windows"])
def test_a_report_that_lacks_a_part_is_refused(report, key):
    del report[key]
    with pytest.raises(jsonschema.ValidationError, match=key):
        validate(report)


def test_a_report_with_an_unknown_key_is_refused(report):
    with pytest.raises(jsonschema.ValidationError, match="verdict"):
        validate(report | {"verdict": "fine"})


def test_samples_add_up_to_the_progress(containers):
    samples = sample_progress(containers, (0, 4000 * NS_PER_MS))
    assert samples["step_ns"] == 10 * NS_PER_MS
    assert len(samples["work_us"]["training"]) == 400
    assert sum(samples["work_us"]["training"]) == pytest.approx(1_760_000, abs=1)


def test_the_directory_contains_the_report_its_data_and_its_chart(tmp_path, report, containers):
    write_report(tmp_path, report, containers)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "progress.json",
        "report.json",
        "report.svg",
    ]
    written = json.loads((tmp_path / "report.json").read_text())
    assert set(written["detail"].pop("run")) == {"command", "date", "commit", "machine"}
    assert written == report
    svg = parse_svg((tmp_path / "report.svg").read_text())
    words = {element.text for element in svg.iter(f"{SVG}text")}
    assert {"training", "quota 45 %, got 44.0 %", "100 ms windows", "time, s"} <= words
    assert svg.find(f"{SVG}title").text == "Delivered GPU time"
    assert "notebook: quota 15 %, got 16.0 %" in svg.find(f"{SVG}desc").text


def test_the_chart_has_a_point_for_every_window(report, containers):
    chart = chart_of(report, sample_progress(containers, (0, 5000 * NS_PER_MS)))
    training = chart.series[0]
    assert [x for x, _ in training.points] == pytest.approx([0.5, 1.5, 2.5, 3.5, 4.5])
    assert [y for _, y in training.points] == pytest.approx([44.0] * 5, abs=0.01)
    assert len(training.fine) == 50
    assert training.level == 45


def test_the_table_has_readable_units(report):
    assert render_table(report).splitlines() == [
        "GPU: Simulated GPU (simulated), driver 580.0",
        "",
        "container  quota  delivered  memory peak  memory limit  exit",
        "---------  -----  ---------  -----------  ------------  ----",
        "training    45 %    44.00 %        2 GiB         3 GiB     0",
        "notebook    15 %    16.00 %        2 GiB         3 GiB   137",
        "",
        ("distance from the quota: 1.00 points in windows of 1 s, 1.00 in windows of 100 ms"),
        "an allocation of 4 GiB under a limit of 3 GiB: CUDA_ERROR_OUT_OF_MEMORY",
    ]


@pytest.mark.parametrize(
    ("count", "words"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (545_259_520, "520 MiB"), (3 * GIB, "3 GiB")],
)
def test_byte_counts_are_rounded_to_binary_units(count, words):
    assert size(count) == words


def test_ticks_are_round_numbers():
    assert nice_ticks(0, 47.7) == [0, 10, 20, 30, 40]
    assert nice_ticks(0, 1) == [0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert nice_ticks(5, 5) == [5]


def test_numbers_have_no_trailing_zeros():
    assert [number(v) for v in (0.0, -0.001, 1.50, 20, 1 / 3)] == ["0", "0", "1.5", "20", "0.33"]


def test_labels_that_would_overlap_are_moved_apart():
    assert spread([100, 104, 300], 20, 0, 400) == [100, 120, 300]
    assert spread([390, 395], 20, 0, 400) == [380, 400]


def test_text_is_escaped_and_an_empty_chart_is_rendered():
    chart = Chart("a < b & c", "", "", "", "", [Series("<x>", ())])
    svg = parse_svg(render(chart))
    assert svg.find(f"{SVG}title").text == "a < b & c"
