"""Test that a mistyped option yields one line, which refers to --help."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from governor import cli, daemon
from kube import main as dra


@pytest.mark.parametrize(
    ("run", "arguments", "line"),
    [
        (cli.main, ["ps", "--jsn"], "tidegate ps: --jsn is not accepted; see tidegate ps --help"),
        (cli.main, ["ps", "one\nmore"], "tidegate ps: one more is not accepted; see tidegate ps --help"),
        (
            cli.main,
            ["set"],
            "tidegate set: the following arguments are required: container; see tidegate set --help",
        ),
        (cli.main, [], "tidegate: the following arguments are required: VERB; see tidegate --help"),
        (
            daemon.main,
            ["--confg", "x"],
            "tidegate-governor: unrecognized arguments: --confg x; see tidegate-governor --help",
        ),
        (
            dra.main,
            ["--look-every", "soon"],
            "tidegate-dra: argument --look-every: invalid float value: 'soon'; see tidegate-dra --help",
        ),
    ],
)  # fmt: skip
def test_a_mistyped_option_is_reported_in_one_line(
    run: Callable[[list[str]], int],
    arguments: list[str],
    line: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as end:
        run(arguments)
    assert end.value.code == 2
    assert capfd.readouterr().err == f"{line}\n"


def test_an_unknown_verb_is_reported_in_one_line_with_the_known_verbs(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        cli.main(["sett"])
    [line] = capfd.readouterr().err.splitlines()
    assert "'sett'" in line
    assert all(verb in line for verb in cli.VERBS)
