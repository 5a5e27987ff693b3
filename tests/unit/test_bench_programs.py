"""Which differences between a program's two runs bench.programs reports, and which it does not."""

import copy
import json

import pytest

from bench import images, programs, report_docs
from bench import run as bench_run
from bench.programs import Comparison, ProgramRun, Seen, compare, is_near, new_lines, split_output
from bench.provenance import describe_run

ANSWER = {
    "program": "train",
    "digest": "0123456789abcdef",
    "checks": {"the loss falls": True},
    "values": {"losses": [2.0, 1.0, 0.5], "words": ["a", "b"]},
    "tolerances": {"losses": 1e-2},
    "launches": 100,
    "notes": {},
}
NOT_COMPARED = {
    "program",
    "driver_api",
    "fill",
    "holder",
    "model",
    "torch_model",
    "engine_start",
    "cuda_tool",
}
SEEN = Seen(launches=100, lookups=40, memory_peak=1 << 29, grants=1)


def arm(status=0, lines=(), **changes):
    return ProgramRun(status, 1.0, {**copy.deepcopy(ANSWER), **changes}, list(lines))


def test_two_equal_runs_do_not_differ():
    assert compare(arm(), arm(), SEEN) == []
    assert Comparison("train", arm(), arm(), SEEN).result == "the same"


def test_values_may_differ_by_their_tolerance():
    near = arm(values={"losses": [2.0, 1.015, 0.5], "words": ["a", "b"]}, digest="f" * 16)
    assert compare(arm(), near, SEEN) == []
    assert Comparison("train", arm(), near, SEEN).result == "the same within tolerance"


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"losses": [2.0, 1.03, 0.5], "words": ["a", "b"]}, "value “losses” is [2.0, 1.0, 0.5]"),
        ({"losses": [2.0, 1.0], "words": ["a", "b"]}, "value “losses” is"),
        ({"losses": [2.0, float("nan"), 0.5], "words": ["a", "b"]}, "value “losses” is"),
        (
            {"losses": [2.0, 1.0, 0.5], "words": ["a", "c"]},
            'value “words” is ["a", "b"] in the native run',
        ),
        ({"losses": [2.0, 1.0, 0.5]}, "value “words” is missing from one run"),
    ],
)
def test_values_beyond_the_tolerance_are_a_difference(values, says):
    [found] = compare(arm(), arm(values=values), SEEN)
    assert found.startswith(says)


@pytest.mark.parametrize(
    ("native", "governed", "says"),
    [
        ({"a": True}, {"a": False}, "check “a” fails in the governed run"),
        ({"a": False}, {"a": True}, "check “a” fails in the native run"),
        ({"a": False}, {"a": False}, "check “a” fails in both runs"),
        ({"a": True, "b": True}, {"a": True}, "check “b” is missing from the governed run"),
        ({"a": True}, {"a": True, "b": True}, "check “b” is missing from the native run"),
    ],
)
def test_a_check_has_to_hold_in_both_runs(native, governed, says):
    assert compare(arm(checks=native), arm(checks=governed), SEEN) == [says]


@pytest.mark.parametrize(
    ("native", "governed", "says"),
    [
        (arm(), arm(status=139), "the governed run ended with status 139"),
        (arm(), arm(status=None), "the governed run did not end within its time limit"),
        (arm(status=1), arm(), "the native run ended with status 1"),
        (arm(), ProgramRun(0, 1.0, {}, []), "the governed run gave no answer"),
    ],
)
def test_how_a_run_ends_is_compared(native, governed, says):
    assert says in compare(native, governed, SEEN)


def test_a_run_that_was_not_governed_is_a_difference():
    assert compare(arm(), arm(), Seen()) == [
        "the governor counted 0 launches, but there were at least 100",
        "the governor has charged no memory",
    ]
    few = Seen(launches=99, memory_peak=1)
    assert compare(arm(), arm(), few) == [
        "the governor counted 99 launches, but there were at least 100"
    ]


def test_a_program_is_a_difference_if_only_one_of_the_runs_lacks_a_requirement():
    missing = ProgramRun(programs.NOT_HERE, 0.1, {"program": "mps", "missing": "no daemon"}, [])
    both = Comparison("mps", missing, missing, Seen(), compare(missing, missing, Seen()))
    assert both.differences == []
    assert both.result == "not here"
    assert "only the governed run lacks a requirement: no daemon" in compare(arm(), missing, SEEN)


def test_only_lines_of_a_new_shape_are_new():
    native = ["[W1121 10:51:50.123 warn.cpp:12] a warning, pid 17", "cache in /tmp/tmpab12/x"]
    governed = [
        "[W1121 10:52:07.456 warn.cpp:12] a warning, pid 3",
        "cache in /tmp/tmpcd34/y",
        "CUDA error 2 at 0x7f0012",
        "CUDA error 2 at 0x7f0999",
    ]
    assert new_lines(native, governed) == ["CUDA error 2 at 0x7f0012"]
    assert compare(arm(lines=native), arm(lines=governed), SEEN) == [
        "new line: CUDA error 2 at 0x7f0012"
    ]


def test_the_answer_is_separated_from_other_output():
    text = f"a library speaks\n\n{json.dumps(ANSWER)}\nand again\n"
    assert split_output(text) == (ANSWER, ["a library speaks", "and again"])
    assert split_output('{"other": 1}\n') == ({}, ['{"other": 1}'])


@pytest.mark.parametrize(
    ("native", "governed", "near"),
    [
        (1, 1.0009, True),
        (1, 1.0011, False),
        (0.0, 5e-7, True),  # too small for a comparison to mean anything
        (0.0, 5e-6, False),
        ([1000.0, 0.0], [1000.0, 0.9], True),  # small compared with the largest number
        ("1", 1, False),
        (float("nan"), float("nan"), False),
    ],
)
def test_nearness_is_relative_to_the_largest_value(native, governed, near):
    assert is_near(native, governed, 1e-3) is near


def test_the_highest_value_of_each_counter_is_kept():
    def look(launches, peak, lookups):
        device = {"launches": launches, "memory_peak": peak, "grants": 1}
        return {"lookups": lookups, "devices": [device, {}]}

    seen = Seen()
    for one in (look(5, 10, 7), look(2, 30, 9), {}):  # a child has ended, then all
        seen.take(one)
    assert seen == Seen(launches=5, lookups=9, memory_peak=30, grants=1)


def test_the_table_names_every_difference():
    differs = Comparison(
        "oom", arm(), arm(), SEEN, ["value “a” is 1 in the native run, 2 in the governed run"]
    )
    text = programs.render_table([Comparison("train", arm(), arm(), SEEN), differs])
    assert "the same" in text.splitlines()[2]
    assert text.splitlines()[-1] == "oom: value “a” is 1 in the native run, 2 in the governed run"


def test_every_program_of_the_table_exists():
    files = {path.stem for path in images.SOURCE.glob("*.py")}
    assert files - NOT_COMPARED == set(programs.PROGRAMS)


def test_the_name_engines_selects_the_programs_that_work_as_engines_do():
    assert programs.parse_arguments(["engines"]).names == list(programs.ENGINES)
    named = programs.parse_arguments(["many", "train", "engines"]).names
    assert named[:2] == ["many", "train"]
    assert sorted(named) == sorted({"train", *programs.ENGINES})
    assert set(programs.ENGINES) <= set(programs.PROGRAMS)
    assert "engines" not in programs.PROGRAMS
    with pytest.raises(SystemExit):
        programs.parse_arguments(["engine"])


def test_a_run_becomes_a_result_and_a_section(tmp_path):
    ran = [
        Comparison("train", arm(), arm(digest="f" * 16), SEEN),
        Comparison("oom", arm(), arm(status=1), SEEN, ["the governed run ended with status 1"]),
    ]
    report = {
        "run": describe_run(),
        "gpu": {"kind": "nvidia", "name": "NVIDIA H200", "driver": "580.159.04"},
        "quota": 8 << 30,
        "compute": 50,
        "programs": [programs.as_json(one) for one in ran],
    }
    (tmp_path / "programs.json").write_text(json.dumps(report))
    out = tmp_path / "bench" / "results" / "r.json"
    arguments = ["--suite", "programs", "--from", str(tmp_path), "--out", str(out)]
    assert bench_run.main(arguments) == 0
    bench_run.validate(json.loads(out.read_text()))
    [text] = report_docs.plan_files(tmp_path).values()
    row = "| train | 1 | 2 | 100 | 40 | 512 MiB | the same within tolerance |"
    assert row in text
    assert "- oom: the governed run ended with status 1" in text
    del report["programs"]
    (tmp_path / "programs.json").write_text(json.dumps(report))
    assert bench_run.main([*arguments[:-1], str(tmp_path / "other.json")]) == 1
