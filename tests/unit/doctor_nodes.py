"""Build nodes for `tidegate doctor` from trees of files laid out like hosts, canned command output
and a fake governor.

`Host.right()` lays out a host on which every check that needs no root passes. A test then breaks
one thing.
"""

from __future__ import annotations

import json
import os
import socketserver
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from governor import VERSION
from governor.config import Config
from governor.doctor.checks import Examined, examine
from governor.doctor.finding import UnseenError
from governor.doctor.node import ExaminedNode, open_node
from tests.unit.vdriver_generation import (
    put_control_with_origin,
    put_generation,
    small_driver,
)
from tests.unit.vdriver_trees import put_kernel

V = "580.159.04"
LIBRARIES = "usr/lib/x86_64-linux-gnu"
UUID = "GPU-6d0b7ab0-2f4f-4d5e-9b3a-0c2d9d2a7f10"
SMI = f"0, {UUID}, Disabled, Default, Enabled\n"

FLAGS = "processor\t: 0\nflags\t\t: fpu sse2 ssse3 cx16 sse4_1 sse4_2 popcnt lahf_lm avx\n"

GPU = {
    "index": 0,
    "uuid": UUID,
    "lost": None,
    "closed": None,
}


class Host:
    """A host below `root`. `commands` maps a program's name to its output; other programs cannot be run."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(mode=0o755, exist_ok=True)
        self.commands: dict[str, str] = {}
        self.ran: list[tuple[str, ...]] = []

    def put(self, path: str, content: str = "", mode: int = 0o644) -> Path:
        """Write a file and create its parent directories."""
        file = self.root / path.lstrip("/")
        file.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        file.write_text(content)
        file.chmod(mode)
        return file

    def json(self, path: str, document: object) -> Path:
        """Write a JSON file."""
        return self.put(path, json.dumps(document))

    def program(self, path: str, answer: str | None = None) -> Path:
        """Install a program that prints `answer`, whatever its arguments are."""
        if answer is not None:
            self.commands[Path(path).name] = answer
        return self.put(path, "#!/bin/sh\n", 0o755)

    def remove(self, path: str) -> None:
        """Remove a file."""
        (self.root / path.lstrip("/")).unlink()

    def run(self, command: Sequence[str]) -> str:
        """Return the program's canned output."""
        self.ran.append(tuple(command))
        name = Path(command[0]).name
        if name not in self.commands:
            raise UnseenError(f"{name} cannot be run: No such file or directory")
        return self.commands[name]

    def node(self, **changes: Any) -> ExaminedNode:
        """Open the host as doctor does, with `changes` applied to the configuration."""
        node = open_node(str(self.root))
        config = Config(**{**vars(node.config), **changes}) if changes else node.config
        return replace(node, config=config, runner=self.run)

    def check(self, check: str, **changes: Any) -> list[str]:
        """Return what one check reports: "state: found", followed by " -> remedy" if it has one."""
        return [words(examined) for examined in examine(self.node(**changes), [check])]

    def put_driver(self) -> None:
        """Install a driver of four libraries, and load its kernel module."""
        for name, content in small_driver(V).items():
            path = self.put(f"{LIBRARIES}/{name}")
            path.write_bytes(content)
        put_kernel(self.root, V, opened=True)
        self.put(
            "proc/driver/nvidia/gpus/0000:3b:00.0/information",
            f"Model: \t\t NVIDIA H200\nGPU UUID: \t {UUID}\nDevice Minor: \t 0\n",
        )
        self.put(
            "proc/devices", "Character devices:\n195 nvidia\n511 nvidia-uvm\n\nBlock devices:\n"
        )

    def put_mirror(self) -> Path:
        """Make a mirror of that driver, as its current generation."""
        control = put_control_with_origin(self.root / "usr/lib/tidegate/x86_64-linux-gnu")
        directory = self.root / "var/lib/tidegate/driver"
        directory.mkdir(parents=True)
        generation = put_generation(directory, V, small_driver(V), control)
        # This is a file that the generation watches, with the time stamp from the manifest.
        os.utime(self.put("nowhere"), ns=(0, 0))
        return generation

    @classmethod
    def right(cls, root: Path) -> Host:
        """Lay out a host on which only the device nodes are missing: creating those needs root."""
        host = cls(root)
        host.put("proc/sys/kernel/osrelease", "6.1.0-28-amd64\n")
        host.put("proc/cpuinfo", FLAGS)
        host.put("proc/self/mounts", "cgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n")
        host.put_driver()
        host.put_mirror()
        host.commands["nvidia-smi"] = SMI
        host.program("usr/bin/python3", "3.11.2\n")
        host.put("usr/bin/tidegate-hook", "#!/usr/bin/python3 -ISE\n", 0o755)
        host.put("usr/bin/tidegate-runtime", "#!/usr/bin/python3 -ISE\n", 0o755)
        host.program("usr/sbin/runc", "runc version 1.1.5+ds1\n")
        host.program("usr/bin/dockerd", "Docker version 26.1.5+dfsg1, build a72d7cd\n")
        host.json(
            "etc/docker/daemon.json",
            {"runtimes": {"tidegate": {"path": "/usr/bin/tidegate-runtime"}}},
        )
        return host


def words(examined: Examined) -> str:
    """Format a finding as one line."""
    finding = examined.finding
    return f"{finding.state}: {finding.found}" + (f" -> {finding.remedy}" if finding.remedy else "")


@contextmanager
def governor(host: Host, **answers: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Serve `ping`, `gpus` and `list` at the governor's socket, as the protocol defines them."""
    told: dict[str, Any] = {
        "ping": {"pid": 4711, "version": VERSION},
        "gpus": {"placement": "spread", "gpus": [dict(GPU)], "left_out": []},
        "list": {"containers": []},
        "config": {"files": [], "since": 0.0, "refused": None, "changes": [], "error": None},
        **answers,
    }

    class PingHandler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            request = json.loads(self.rfile.readline())
            self.wfile.write(json.dumps({"ok": True, **told[request["op"]]}).encode() + b"\n")

    directory = host.root / "run/tidegate"
    directory.mkdir(parents=True, exist_ok=True)
    # The path of a socket has at most 107 bytes. A test's directory may be longer.
    before = Path.cwd()
    os.chdir(directory)
    try:
        server = socketserver.UnixStreamServer("governor.sock", PingHandler)
    finally:
        os.chdir(before)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield told
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
        (directory / "governor.sock").unlink()
