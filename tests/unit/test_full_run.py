"""Test that tools/test-full runs every part even if one fails, and reports how each part ended."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PARTS = ["check", "test", "slow", "alone", "cluster", "bookworm", "trixie", "noble"]


@pytest.fixture
def checkout(tmp_path):
    """A checkout in which every program that the script calls is a stand-in.

    A stand-in logs its arguments, and fails if the file `fails` contains them.
    """
    stand_in = (
        "#!/bin/sh\n"
        f'said="$(basename "$0") $*"; echo "$said" >>{tmp_path}/calls; echo "said: $said"\n'
        f'echo "== 3 passed, 1 skipped in 2.50s (0:00:02) =="; echo "after pytest"\n'
        f'! grep -qxF "$said" {tmp_path}/fails\n'
    )
    (tmp_path / "fails").touch()
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools/test-full", tmp_path / "tools/test-full")
    for name in ("bootstrap", "fuzz-environment", "fetch-kubectl", "arm64", "clean-root"):
        (tmp_path / "tools" / name).write_text(stand_in)
    for name in ("bin/make", ".venv/bin/python"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(stand_in)
    for path in (*tmp_path.glob("tools/*"), tmp_path / "bin/make", tmp_path / ".venv/bin/python"):
        path.chmod(0o755)
    return tmp_path


def run(checkout, *parts, **environment):
    """Run the script."""
    return subprocess.run(
        [checkout / "tools/test-full", *parts],
        env={"PATH": f"{checkout}/bin:/usr/bin:/bin", **environment},
        check=False,
        capture_output=True,
        text=True,
    )


def rows(checkout):
    """Return the rows of the summary: each part, its state and its result."""
    lines = (checkout / "build/test-full/summary").read_text().splitlines()
    found = [re.fullmatch(r"(\w+) +(ok|FAILED|not run) +\d+ s  (.*)", line) for line in lines]
    assert all(found), lines
    return [match.groups() for match in found]


def test_all_parts_run_in_order(checkout):
    done = run(checkout, TIDEGATE_CLUSTER_BIN="/opt/kubernetes")
    assert done.returncode == 0, done.stderr
    summary = "3 passed, 1 skipped in 2.50s (0:00:02)"
    assert rows(checkout) == [(part, "ok", summary) for part in PARTS]
    calls = (checkout / "calls").read_text().splitlines()
    assert [call for call in calls if call != "make build"] == [
        "make check",
        "make test",
        "fuzz-environment ",
        "bootstrap cpio debootstrap rpm secilc",
        "fetch-kubectl ",
        "python -m pytest -n3 --hypothesis-profile=search -m (slow or hypothesis) and not alone",
        "python -m pytest -n0 -m alone",
        "python -m pytest -n0 -s -m cluster",
        "clean-root bookworm",
        "clean-root trixie",
        "clean-root noble",
    ]
    assert done.stdout.endswith((checkout / "build/test-full/summary").read_text())
    assert "said: make check" in (checkout / "build/test-full/check.log").read_text()
    assert "said: make check" in done.stdout


def test_a_part_that_fails_does_not_end_the_run(checkout):
    (checkout / "fails").write_text("make test\nfetch-kubectl \nclean-root trixie\n")
    done = run(checkout, TIDEGATE_CLUSTER_BIN="/opt/kubernetes")
    assert done.returncode == 1
    assert [row[:2] for row in rows(checkout)] == [
        ("check", "ok"),
        ("test", "FAILED"),
        ("slow", "FAILED"),
        ("alone", "ok"),
        ("cluster", "ok"),
        ("bookworm", "ok"),
        ("trixie", "FAILED"),
        ("noble", "ok"),
    ]
    # If the preparation of a part fails, its tests do not start.
    assert "--hypothesis-profile" not in (checkout / "calls").read_text()


def test_the_emulated_part_runs_if_it_is_named(checkout):
    assert run(checkout, "arm64").returncode == 0
    assert [row[0] for row in rows(checkout)] == ["arm64"]
    assert (checkout / "calls").read_text() == "make build\narm64 \n"


def test_parts_can_be_chosen(checkout):
    done = run(checkout, "noble", "check")
    assert done.returncode == 0
    assert [row[0] for row in rows(checkout)] == ["noble", "check"]
    assert (checkout / "calls").read_text() == "clean-root noble\nmake check\n"


def test_an_unknown_part_is_refused_before_anything_runs(checkout):
    done = run(checkout, "check", "forky")
    assert (done.returncode, done.stdout) == (2, "")
    accepted = " ".join([*PARTS, "arm64"])
    assert done.stderr == f"test-full: no part is called forky; the parts are {accepted}\n"
    assert not (checkout / "calls").exists()


def test_a_missing_cluster_is_named_in_the_table(checkout):
    done = run(checkout, "cluster")
    assert done.returncode == 0
    assert rows(checkout) == [("cluster", "not run", "TIDEGATE_CLUSTER_BIN is not set")]
    assert not (checkout / "calls").exists()


def test_the_row_of_the_checks_has_the_number_that_passed(checkout):
    (checkout / "bin/make").write_text(
        "#!/bin/sh\necho 'mypy FAILED 3.0 s'\necho '19 checks passed, 1 failed: mypy'\necho 'make: ***'\nexit 2\n"
    )
    assert run(checkout, "check").returncode == 1
    assert rows(checkout) == [("check", "FAILED", "19 checks passed, 1 failed: mypy")]


def test_the_row_of_a_part_without_pytests_summary_has_the_last_line_of_its_log(checkout):
    (checkout / "bin/make").write_text("#!/bin/sh\necho one\necho 'make: *** No rule'\nexit 2\n")
    done = run(checkout, "check")
    assert done.returncode == 1
    assert rows(checkout) == [("check", "FAILED", "make: *** No rule")]


def test_make_passes_the_parts():
    makefile = (ROOT / "Makefile").read_text()
    assert "\ttools/test-full $(PARTS)\n".replace("\t", "\t@") in makefile
    (named,) = re.findall(r"^# The parts of test-full .*: (.*)\.$", makefile, re.MULTILINE)
    assert named.split() == [*PARTS, "arm64"]
