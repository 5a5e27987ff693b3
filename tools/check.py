"""Runs the linters in parallel, and reports for each whether it passed and how long it took.

A check is a command. A check of generated files prints the command that updates them. Exit status
77 means that this machine lacks something that the check needs; with CI=true, that is a failure.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
UNAVAILABLE = 77


@dataclass(frozen=True)
class CheckOutcome:
    """A check's output and exit status."""

    name: str
    status: int
    seconds: float
    output: str

    @property
    def state(self) -> str:
        """Return "ok", "unavailable" or "FAILED"."""
        if self.status == UNAVAILABLE and os.environ.get("CI") != "true":
            return "unavailable"
        return "FAILED" if self.status else "ok"


def tracked(*patterns: str) -> list[str]:
    """Return the repository's matching files, including untracked ones, except ignored ones."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *patterns],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    return sorted(path for path in set(listing.stdout.splitlines()) if (ROOT / path).exists())


def commands() -> dict[str, list[str]]:
    """Return every check by name, slowest first."""
    python = [sys.executable, "-m"]
    sources = [path for path in tracked("*.c", "*.h") if ".gen." not in path]
    # A lock file consists of digests, and a licence's text is fixed.
    prose = [path for path in tracked() if not path.endswith((".lock", "LICENSE"))]
    # The first word is in a test for misspelt annotations; LOOS is from the ELF standard, triggerin
    # from rpm.
    misspelt = "--ignore-words-list=memroy,loos,triggerin"
    checks = {
        **{
            f"{name} sanitizer": [*python, "tests.interposed.sanitize", name]
            for name in ("thread", "address", "undefined")
        },
        "aarch64": [sys.executable, "tools/aarch64.py"],
        "mypy": [*python, "mypy"],
        "codespell": ["codespell", misspelt, *prose],
        "clang-format": ["clang-format", "--dry-run", "-Werror", *sources],
        "generated C": [*python, "libcontrol.gen", "--check"],
        "generated gRPC": [*python, "kube.gen", "--check"],
        "generated documents": [*python, "bench.report_docs", "--check"],
        "configuration page": [sys.executable, "tools/config_reference.py", "--check"],
        "configuration sample": [sys.executable, "tools/config_sample.py", "--check"],
        "commands page": [sys.executable, "tools/commands_reference.py", "--check"],
        "manual pages": [sys.executable, "tools/man_pages.py", "--check"],
        "completions": [sys.executable, "tools/completions.py", "--check"],
        "scale page": [*python, "bench.scale", "docs", "--check"],
        "metrics page": [sys.executable, "tools/metrics_reference.py", "--check"],
        "dashboard": [sys.executable, "tools/grafana_dashboard.py", "--check"],
        "CUDA headers": [*python, "tools.cuda_headers", "--check"],
        "driver tables": [sys.executable, "tools/driver_tables.py"],
        "rules of the hook": [sys.executable, "tools/mutate.py", "--check"],
        "ruff check": ["ruff", "check", "--quiet"],
        "ruff format": ["ruff", "format", "--check", "--quiet"],
    }
    if not (ROOT / "bench" / "report_docs.py").exists():
        del checks["generated documents"]
    return checks


def run(name: str, command: list[str]) -> CheckOutcome:
    """Run one check."""
    start = time.monotonic()
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        check=False,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return CheckOutcome(name, done.returncode, time.monotonic() - start, done.stdout)


def main() -> int:
    """Run all checks, even if some fail; return the exit status."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        outcomes = list(pool.map(lambda check: run(*check), commands().items()))
    for outcome in outcomes:
        # The last line of a check that passed reports how much it checked.
        last = outcome.output.strip().rpartition("\n")[2] if outcome.state != "FAILED" else ""
        print(f"{outcome.name:20} {outcome.state:11} {outcome.seconds:5.1f} s  {last}".rstrip())
        if outcome.state == "FAILED":
            print(outcome.output, end="", flush=True)
    failed = [outcome.name for outcome in outcomes if outcome.state == "FAILED"]
    passed = sum(outcome.state == "ok" for outcome in outcomes)
    print(
        f"{passed} checks passed"
        + (f", {len(failed)} failed: {', '.join(failed)}" if failed else "")
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
