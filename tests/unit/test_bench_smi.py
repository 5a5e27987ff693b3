"""How bench.smi judges nvidia-smi's output: a correct view, and each way in which it can be wrong."""

from __future__ import annotations

import re

import pytest

from bench.smi import SmiOutput, judge, read_looks

OUTPUT = """\
look 7
gpu
NVIDIA H200, 580.159.04, 3072, 0, 3072, 0
apps
look 7
gpu
NVIDIA H200, 580.159.04, 3072, 562, 2510, 99
apps
7, 562
table
| N/A   33C    P0            120W /  700W |     562MiB /   3072MiB |     99%      Default |
monitor
# gpu         pid   type     sm    mem    enc    dec    jpg    ofa    command
# Idx           #    C/G      %      %      %      %      %      %    name
    0          7     C     99      -      -      -      -      -    burner
"""


def changed(old: str, new: str) -> list[str]:
    assert old in OUTPUT
    return judge(*read_looks(OUTPUT.replace(old, new)))


def test_the_last_sample_counts() -> None:
    looks, table, monitor = read_looks(OUTPUT)
    assert looks == [
        SmiOutput(7, "NVIDIA H200", "580.159.04", 3072, 0, 3072, 0),
        SmiOutput(7, "NVIDIA H200", "580.159.04", 3072, 562, 2510, 99, {7: 562}),
    ]
    assert table.count("\n") == 1
    assert judge(looks, table, monitor) == []


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("3072, 562, 2510", "143771, 562, 143209", "memory.total is 143771 MiB"),
        ("562, 2510", "562, 1000", "do not add up to the total"),
        ("7, 562\n", "7, 562\n9, 100\n", r"processes \[7, 9\]"),
        ("7, 562\n", "", r"processes \[\]"),
        ("7, 562\n", "7, [N/A]\n", "the burner has -1 MiB"),
        ("7, 562\n", "7, 900\n", "the burner has 900 MiB"),
        ("2510, 99", "2510, 12", "utilization.gpu is 12 %"),
        ("2510, 99", "2510, [N/A]", "utilization.gpu is -1 %"),
        ("  3072MiB", "143771MiB", "the table does not show"),
        ("    0          7     C", "    0          -     -", "pmon shows"),
        (
            "    0          7     C     99      -      -      -      -      -    burner\n",
            "",
            r"pmon shows \[\]",
        ),
    ],
)
def test_each_fault_is_reported(old: str, new: str, what: str) -> None:
    wrong = changed(old, new)
    assert len(wrong) == 1
    assert re.search(what, wrong[0])


def test_a_container_without_output_is_a_fault() -> None:
    assert judge(*read_looks("")) == ["nvidia-smi was not run"]
