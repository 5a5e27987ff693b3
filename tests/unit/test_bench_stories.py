"""The figures of stories are computed from stamps, and a table compares them with expectations."""

from __future__ import annotations

import json
import struct
import subprocess
from pathlib import Path

import pytest

from bench.stories import (
    StoryError,
    StoryProgram,
    StoryRow,
    answers,
    percentile,
    read_containers,
    read_settings,
    render,
    share,
)

S = 1_000_000_000


@pytest.fixture
def program(tmp_path: Path):
    """Make a program that has ended and left these stamps."""

    def make(*stamps_ns: int, clock_ns: int = 0) -> StoryProgram:
        data = b"".join(struct.pack("<QQ", stamp, 0) for stamp in stamps_ns)
        (tmp_path / "progress.bin").write_bytes(data)
        (tmp_path / "output").write_text("warning\n" + json.dumps({"clock_ns": clock_ns}) + "\n")
        ended = subprocess.Popen(["true"], text=True)
        ended.wait()
        return StoryProgram("p", tmp_path, ended)

    return make


def test_a_share_is_the_work_that_was_finished_in_a_span(program) -> None:
    # 100 units of 5 ms, one every 10 ms, from 2.0 s on.
    half = program(*(2 * S + i * S // 100 for i in range(100)))
    assert share(half, 5000, 2.0, 3.0) == pytest.approx(50)
    assert share(half, 5000, 2.0, 4.0) == pytest.approx(25)
    assert share(half, 5000, 4.0, 5.0) == 0


def test_stamps_of_the_gpus_clock_are_converted_to_this_machines_clock(program) -> None:
    assert program(7 * S, clock_ns=4 * S).times() == [3.0]


def test_an_answer_takes_the_time_between_two_answers_less_the_pause(program) -> None:
    # Answers are 30 ms apart, of which 20 ms are a pause. The first two are left out, because
    # Tidegate does not know yet how long such work takes.
    requests = program(
        0, 90_000_000, 170_000_000, *(170_000_000 + i * 30_000_000 for i in range(1, 9))
    )
    assert answers(requests, 20_000) == pytest.approx([10.0] * 8)


def test_too_few_answers_are_an_error(program) -> None:
    with pytest.raises(StoryError, match="answered 3 requests, too few"):
        answers(program(0, 10, 20, 30), 0)


def test_a_percentile_is_computed_from_the_values() -> None:
    assert percentile([float(i) for i in range(101)], 95) == 95
    assert percentile([1.0, 2.0, 3.0], 50) == 2


def test_the_table_shows_which_expectations_were_met() -> None:
    rows = [
        StoryRow("told", "", "8 ms", None),
        StoryRow("good", "at most 9 ms", "8 ms", met=True),
        StoryRow("bad", "at least 90 %", "8.0 %", met=False),
    ]
    assert render(rows) == (
        "what  expected       measured  met\n"
        "----  -------------  --------  ---\n"
        "told  -              8 ms\n"
        "good  at most 9 ms   8 ms      yes\n"
        "bad   at least 90 %  8.0 %     NO"
    )


def test_a_story_s_files_may_be_missing(tmp_path: Path) -> None:
    assert read_containers(tmp_path) == {}
    assert read_settings(tmp_path) == {}
    (tmp_path / "config.yaml").write_text("# nothing\n")
    assert read_settings(tmp_path) == {}
