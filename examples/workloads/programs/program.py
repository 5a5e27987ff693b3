"""Common code for the test programs in this directory: options, named checks and values, JSON.

A program runs twice, alone and under a quota. A check has to be true in both runs; a value is
compared between them, within its tolerance; a note is for the reader.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

NOT_HERE = 77
"""The exit status of a program that needs a feature that this machine does not have."""

TOLERANCE = 1e-3
HOLD_S = 60.0

Value = float | str | Sequence[float] | Sequence[str]


class NotHereError(Exception):
    """This machine lacks a feature that the program needs; the text names it in one line."""


class ProgramCheck:
    """One run of a program: its options, and its results so far.

    `launches` is the minimum number of kernels and graphs that the processes alive at the end have
    launched; `until_end` holds resources, such as children, that are kept until then.
    """

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self.name = name
        self.governed: bool = options.governed
        self.quota: int = options.quota
        self.within_ms: int = options.within_ms
        self.tools: Path | None = options.tools
        self.hold: str | None = options.hold
        self.checks: dict[str, bool] = {}
        self.values: dict[str, Value] = {}
        self.tolerances: dict[str, float] = {}
        self.notes: dict[str, Any] = {}
        self.launches = 1
        self.until_end = contextlib.ExitStack()

    def check(self, name: str, holds: object, detail: object = "") -> None:
        """Record a check, and print it if it fails. All checks with one name have to hold."""
        self.checks[name] = self.checks.get(name, True) and bool(holds)
        if not holds:
            print(f"{self.name}: {name}: no ({detail})", file=sys.stderr, flush=True)

    def value(self, name: str, value: Value, tolerance: float = TOLERANCE) -> None:
        """Record a value: numbers are compared within a relative `tolerance`, text exactly."""
        numbers = value if isinstance(value, (list, tuple)) else [value]
        for number in numbers:
            if isinstance(number, float) and not math.isfinite(number):
                self.check("all values are finite", False, f"{name} is {number}")
        self.values[name] = value
        if tolerance != TOLERANCE:
            self.tolerances[name] = tolerance

    def note(self, name: str, value: Any) -> None:
        """Record a value for the reader, which is not compared."""
        self.notes[name] = value

    def tool(self, name: str) -> Path | None:
        """Return the path of a program that was compiled for this run, or None."""
        path = self.tools / name if self.tools else None
        return path if path and path.exists() else None

    def finish(self) -> int:
        """Print the results, wait so that this process can be inspected, and return the status."""
        bits = json.dumps([self.checks, self.values], sort_keys=True).encode()
        answer = {
            "program": self.name,
            "digest": hashlib.sha256(bits).hexdigest()[:16],
            "checks": self.checks,
            "values": self.values,
            "tolerances": self.tolerances,
            "launches": self.launches,
            "notes": self.notes,
        }
        print(json.dumps(answer), flush=True)
        if self.hold:
            Path(self.hold + ".ready").touch()
            wait_until(Path(self.hold).exists, HOLD_S)
        return 0 if all(self.checks.values()) else 1


def wait_until(condition: Callable[[], object], seconds: float, every: float = 0.005) -> bool:
    """Wait until the condition holds, `seconds` at most; return whether it does."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(every)
    return True


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--governed", action="store_true", help="a quota is in force")
    parser.add_argument(
        "--quota", type=int, default=8 << 30, help="bytes; without a quota, the program's own cap"
    )
    parser.add_argument("--within-ms", type=int, default=200, help="time limit for freed memory")
    parser.add_argument("--tools", type=Path, help="directory of the compiled programs")
    parser.add_argument("--hold", help="at the end, create HOLD.ready and wait for HOLD")
    return parser.parse_args()


def run(body: Callable[[ProgramCheck], None]) -> None:
    """Run a program and end the process with its status; an exception ends it with 1."""
    program = ProgramCheck(Path(sys.argv[0]).stem, parse_options())
    with program.until_end:
        try:
            body(program)
        except NotHereError as e:
            print(json.dumps({"program": program.name, "missing": str(e)}), flush=True)
            sys.exit(NOT_HERE)
        status = program.finish()
    sys.exit(status)


def child_environment(**more: str) -> dict[str, str]:
    """Return this process's environment for a child, with more variables."""
    return {**os.environ, **more}
