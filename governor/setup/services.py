"""Find Podman's processes that are still using the hook directories with which they started.

`podman system service` reads containers.conf only when it starts. The command with which Podman
restarts a container is among the arguments of the container's monitor, conmon; since Podman 5.8,
the directories are options of that command. In both cases, the files in those directories are read
each time a container starts.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

from oci_hook.quick import PREFIX

UNIT = "podman.service"
LIMIT = 4 << 20  # bytes; a file is read up to this size


@dataclass(frozen=True)
class PodmanService:
    """A process that serves Podman's API; `started` is in seconds since 1970."""

    pid: int
    unit: str | None  # systemd unit, None if it was started in another way
    started: float

    @property
    def shown(self) -> str:
        """The name to show to an operator."""
        return self.unit or f"process {self.pid} (podman system service)"

    @property
    def restart(self) -> str:
        """The command that restarts it; containers are not affected."""
        if self.unit is not None:
            return f"systemctl restart {self.unit}    # containers keep running"
        return f"kill {self.pid}, and start `podman system service` again; containers keep running"


def running(root: str) -> list[PodmanService]:
    """Return the API services of the root user's Podman with the root directory `root`, by pid.

    A service of another user cannot reach the governor, with or without hooks.
    """
    found = []
    for pid, words in processes(root, "podman"):
        if ("system", "service") not in itertools.pairwise(words):
            continue
        directory = f"{root}/proc/{pid}"
        try:
            groups = _read(f"{directory}/cgroup").splitlines()
            since_boot = int(_read(f"{directory}/stat").rpartition(")")[2].split()[19])
        except (OSError, ValueError, IndexError):
            continue  # it has ended
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot / os.sysconf("SC_CLK_TCK")
        unit = UNIT if any(UNIT in line.split("/") for line in groups) else None
        found.append(PodmanService(pid, unit, time.time() - age))
    return found


def unaware(root: str, directory: str) -> list[str]:
    """Return the names of containers with our annotations that Podman restarts without these hooks.

    Only containers with a restart policy would be restarted; the policy is only in Podman's
    database.
    """
    found = []
    for _, words in processes(root, "conmon"):
        options = dict(itertools.pairwise(words))
        given = [w for o, w in itertools.pairwise(words) if o == "--exit-command-arg"]
        hooks = [d.rstrip("/") for o, d in itertools.pairwise(given) if o == "--hooks-dir"]
        if not hooks or directory in hooks:
            continue
        try:
            document = json.loads(_read(f"{root}{options['-b']}/config.json"))
            if any(name.startswith(PREFIX) for name in document["annotations"]):
                found.append(options["-n"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            continue  # it has ended, or is not one of Podman's containers
    return sorted(found)


def processes(root: str, program: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the processes with this root directory that run a program, with their arguments."""
    try:
        pids = sorted(int(name) for name in os.listdir(f"{root}/proc") if name.isdecimal())  # noqa: PTH208
        owner = os.stat(root).st_uid  # noqa: PTH116
    except OSError:
        return
    for pid in pids:
        directory = f"{root}/proc/{pid}"
        try:
            words = _read(f"{directory}/cmdline").split("\0")
            if PurePosixPath(words[0]).name != program:
                continue
            if os.stat(directory).st_uid != owner:  # noqa: PTH116
                continue
            if not os.path.samefile(f"{directory}/root", root):  # noqa: PTH121
                continue
        except OSError:
            continue
        yield pid, words


def _read(path: str) -> str:
    with open(path, "rb") as file:  # noqa: PTH123
        return file.read(LIMIT).decode(errors="replace")
