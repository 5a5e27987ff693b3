"""Build a node's root as a tree of files, run `tidegate setup` in it, and take snapshots of the tree."""

from __future__ import annotations

import json
import os
import stat
import time
from pathlib import Path

from governor import cli


def put(root: Path, path: str, content: str | bytes, mode: int = 0o644) -> Path:
    """Write a file with exactly these bytes: newlines are not translated."""
    file = root / path.lstrip("/")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    file.chmod(mode)
    return file


def put_programs(root: Path, directory: str = "/usr/bin") -> None:
    for name in ("tidegate-hook", "tidegate-runtime"):
        put(root, f"{directory}/{name}", "#!/bin/sh\n", 0o755)


def put_process(root: Path, pid: int, *words: str) -> None:
    """Create the /proc entry of a process with this tree as its root."""
    put(root, f"/proc/{pid}/cmdline", "".join(f"{word}\0" for word in words))
    (root / f"proc/{pid}/root").symlink_to(root)


def put_service(
    root: Path,
    pid: int,
    *,
    unit: bool,
    age_s: float = 100,
    command: str = "podman --log-level=info system service",
) -> None:
    """Create the /proc entry of Podman's API service, with the fields that are read."""
    put_process(root, pid, *command.split())
    since_boot = int((time.clock_gettime(time.CLOCK_BOOTTIME) - age_s) * os.sysconf("SC_CLK_TCK"))
    put(root, f"/proc/{pid}/stat", f"{pid} (pod (man)) S " + "0 " * 18 + f"{since_boot} 0 0\n")
    group = "/system.slice/podman.service" if unit else "/user.slice/x.scope"
    put(root, f"/proc/{pid}/cgroup", f"1:name=systemd:{group}\n0::{group}\n")


def put_monitor(
    root: Path, pid: int, name: str, directories: tuple[str, ...], annotations: dict[str, str]
) -> None:
    """Create the /proc entry of a container's monitor with these hooks directories in its restart command."""
    bundle = f"/var/lib/containers/storage/overlay-containers/{name}/userdata"
    put(root, f"{bundle}/config.json", json.dumps({"annotations": annotations}))
    hooks = [word for directory in directories for word in ("--hooks-dir", directory)]
    given = ["--root", "/var/lib/containers/storage", *hooks, "container", "cleanup", name]
    put_process(
        root, pid, "/usr/bin/conmon", "--api-version", "1", "-c", name, "-r", "/usr/bin/runc", "-b", bundle,
        "-n", name, "--exit-command", "/usr/bin/podman",
        *(word for one in given for word in ("--exit-command-arg", one)),
    )  # fmt: skip


def put_crio_programs(root: Path, directory: str = "/usr/bin") -> None:
    """Install the programs by which CRI-O starts containers: on its path, or in /usr/libexec/crio."""
    for name in ("conmon", "crun"):
        put(root, f"{directory}/{name}", "#!/bin/sh\n", 0o755)


def setup(root: Path, *words: str) -> int:
    return cli.main(["setup", *words, "--root", str(root)])


def text(root: Path, path: str) -> str:
    return (root / path.lstrip("/")).read_bytes().decode()


def snapshot(root: Path) -> dict[str, tuple[int, bytes]]:
    """Return every path with its type and mode, and its content."""
    found = {}
    for directory, names, files in os.walk(root):
        for name in names + files:
            path = Path(directory, name)
            mode = path.lstat().st_mode
            content = b""
            if stat.S_ISLNK(mode):
                content = str(path.readlink()).encode()
            elif stat.S_ISREG(mode):
                content = path.read_bytes()
            found[str(path.relative_to(root))] = (mode, content)
    return found
