"""Test tools/fuzz-environment with a fake pip: which results are failures, and when it rebuilds."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

PYTHON = """#!/bin/sh
case "$1 $2" in
"-m pip") echo pip >>"$LOG"; [ -z "$FAIL" ] || { echo "ERROR: $FAIL" >&2; exit 1; } ;;
"-m venv") mkdir -p build/fuzz/bin; cp "$0" build/fuzz/bin/python ;;
"-c "*) shift; exec "$REAL" -ISc "import platform, sys, sysconfig; $BEFORE
$1" ;;
*) exit 2 ;;
esac
"""


class Checkout:
    """A directory with the script, a lock file and a .venv."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.log = directory / "log"
        self.made = directory / "build/fuzz/stamp"
        (directory / "tools").mkdir()
        (directory / ".venv/bin").mkdir(parents=True)
        shutil.copy(ROOT / "tools/fuzz-environment", directory / "tools")
        (directory / "requirements-fuzz.lock").write_text("atheris==3\n")
        python = directory / ".venv/bin/python"
        python.write_text(PYTHON)
        python.chmod(0o755)

    def run(self, *, fail: str = "", before: str = "") -> subprocess.CompletedProcess[str]:
        """Run the script. `fail` is pip's error, and `before` runs in the Python that the script queries."""
        machine = 'platform.machine = lambda: "x86_64"; platform.libc_ver = lambda: ("glibc", "2")'
        site = f'sysconfig.get_path = lambda _: "{self.directory}"'
        environment = {
            **os.environ, "LOG": str(self.log), "REAL": sys.executable, "FAIL": fail,
            "BEFORE": f"{machine}; {site}; sys.version_info = (3, 13, 1); {before}",
        }  # fmt: skip
        return subprocess.run(
            [self.directory / "tools/fuzz-environment"],
            env=environment, capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip

    def installs(self) -> int:
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_the_environment_is_created_once(checkout: Checkout) -> None:
    for _ in range(2):
        done = checkout.run()
        assert (done.returncode, done.stderr) == (0, "")
        assert checkout.made.exists()
    assert checkout.installs() == 1


@pytest.mark.parametrize(
    "fail",
    [
        "THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE",
        "No matching distribution found for atheris==3",  # also if the index is unreachable
    ],
)
def test_an_installation_that_fails_is_a_failure(checkout: Checkout, fail: str) -> None:
    done = checkout.run(fail=fail)
    assert done.returncode == 1
    assert fail in done.stderr
    assert done.stderr.splitlines()[-1].startswith("fuzz-environment: Atheris was not installed; ")
    assert not checkout.made.parent.exists()


@pytest.mark.parametrize(
    "other",
    [
        "sys.version_info = (3, 15, 0)",
        'platform.machine = lambda: "aarch64"',
        'platform.libc_ver = lambda: ("", "")',
    ],
)
def test_where_atheris_has_no_wheel_its_tests_are_skipped(checkout: Checkout, other: str) -> None:
    assert checkout.run().returncode == 0
    done = checkout.run(before=other)
    assert done.returncode == 0
    assert "Atheris has no wheel for this Python" in done.stderr
    assert not checkout.made.parent.exists()  # made for the previous Python
    assert checkout.installs() == 1


@pytest.mark.parametrize("other", ['sys.version = "3.14"', 'sys.base_prefix = "/opt/python"'])
def test_another_python_recreates_the_environment(checkout: Checkout, other: str) -> None:
    assert checkout.run().returncode == 0
    assert checkout.run(before=other).returncode == 0
    assert checkout.installs() == 2


def test_another_lock_recreates_the_environment(checkout: Checkout) -> None:
    assert checkout.run().returncode == 0
    (checkout.directory / "requirements-fuzz.lock").write_text("atheris==4\n")
    assert checkout.run().returncode == 0
    assert checkout.installs() == 2
