"""Test the log of the services."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

LOGS = """
import structlog
from governor import logs
logs.configure()
for number in range(3):
    structlog.get_logger().info("counted", number=number)
"""


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_line_of_the_log_is_one_write(unbuffered: str) -> None:
    """Several processes may write to one file, so parts of lines would be mixed."""
    reading, writing = os.pipe2(os.O_DIRECT | os.O_CLOEXEC)  # a read returns what one write wrote
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    with os.fdopen(writing, "wb") as pipe:
        subprocess.run(
            [sys.executable, "-c", LOGS], stderr=pipe, env=environment, check=True, timeout=60
        )
    with os.fdopen(reading, "rb", buffering=0) as pipe:
        writes = list(iter(lambda: pipe.read(4096), b""))
    assert [one.count(b"\n") for one in writes] == [1, 1, 1]
    assert all(one.startswith(b"{") and one.endswith(b"}\n") for one in writes)
