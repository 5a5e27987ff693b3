"""Describes the origin of a measurement: its command, time, commit and machine."""

from __future__ import annotations

import datetime as dt
import os
import pathlib
import platform
import shlex
import subprocess
import sys
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
UNKNOWN = "unknown"
SETTINGS = "TIDEGATE_BENCH_SETTINGS"
"""Environment variable with options of the governor's configuration, as YAML, for any benchmark."""


def find_commit(root: pathlib.Path = ROOT) -> str:
    """Return the commit of the working tree.

    It ends with `-dirty` if tracked files differ, and is `unknown` in a copy without git.
    """
    git = ["git", "-C", str(root)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, check=True)
        changed = [*git, "diff", "--quiet", "HEAD"]
        dirty = subprocess.run(changed, capture_output=True, check=False).returncode
    except (OSError, subprocess.CalledProcessError):
        return UNKNOWN
    return head.stdout.decode().strip() + ("-dirty" if dirty else "")


def describe_machine() -> dict[str, Any]:
    """Return the machine's processor, cores, memory and kernel, on which figures depend."""
    model = platform.machine()
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    if cpuinfo.exists():
        named = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        model = named[0].partition(":")[2].strip() if named else model
    return {
        "processor": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
    }


def publishable(argument: str, root: pathlib.Path = ROOT) -> str:
    """Return an argument in publishable form: a path outside `root` is reduced to its last part."""
    path = pathlib.PurePath(argument)
    if not path.is_absolute():
        return argument
    return str(path.relative_to(root)) if path.is_relative_to(root) else path.name


def describe_run() -> dict[str, Any]:
    """Return a description of this process: command, time in UTC, commit and machine."""
    module = getattr(sys.modules.get("__main__"), "__spec__", None)
    program = ["python", "-m", module.name] if module else sys.argv[:1]
    if SETTINGS in os.environ:  # they change what was measured
        program = ["env", f"{SETTINGS}={os.environ[SETTINGS]}", *program]
    return {
        "command": shlex.join(map(publishable, [*program, *sys.argv[1:]])),
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "commit": find_commit(),
        "machine": describe_machine(),
    }
