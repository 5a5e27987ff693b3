"""`python -m tests.gpu.wrapper`: a container with `tidegate-runtime` on this machine, and what
`tidegate doctor` finds.

It runs on the machine's own control groups; the machines of other tests have only version 1. It
checks whether the governor identifies a container by its control group, finds a process that joins
the group from outside, and recognises one that was started by `exec`; whether config.json was
edited, the program has our library and its quota, and nothing is left after `delete`. Each printed
line is a finding.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.machine import ROOT, Machine, MachineError, Nvidia, Simulated, make_bundle
from bench.node import BenchNode
from governor.cgroups import FREEZER, V2, find_mounts, read_cgroups
from governor.client import ask

QUOTA_MIB = 3072
ANNOTATIONS = {"memory": f"{QUOTA_MIB}Mi", "compute": "30"}
NAME = "wrapper"
WAIT_S = 30.0
BURN = ["/usr/bin/burner", "--unit-us", "500", "--seconds", "120", "--out", "/out/{}.bin"]
MUST = ("kernel.", "cgroup.", "driver.", "mirror.", "governor.")
"""Prefixes of doctor's checks that must pass on any machine; the machine need not have engines and packages."""
LIBRARY = "glibc-hwcaps/x86-64-v2"
LIBRARY_DIRS = ("usr/lib/x86_64-linux-gnu", "usr/lib64")


@dataclass
class WrapperReport:
    """The findings, and those of them that are wrong."""

    seen: dict[str, Any] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def say(self, what: str, found: object, *, right: bool = True) -> None:
        """Print a finding, and keep it."""
        self.seen[what] = found
        if not right:
            self.wrong.append(f"{what}: {found}")
        print(f"{'ok' if right else 'WRONG':5} {what:34} {found}", flush=True)


class Wrapped:
    """A container that the wrapper runtime creates, starts and deletes."""

    def __init__(self, node: BenchNode) -> None:
        """Write the container's bundle, as an engine without knowledge of Tidegate would, and the node's settings."""
        self.node = node
        self.begun: list[subprocess.Popen[bytes]] = []
        self.ident = f"tidegate-{os.getpid()}-{NAME}"
        self.bundle = node.work / "bundles" / NAME
        real = shutil.which(node.runtime)
        if real is None:
            raise MachineError(f"{node.runtime} is not installed")
        self.settings = node.work / "runtime.conf"
        self.settings.write_text(
            f"runtime {real}\n"
            f"hook {ROOT}/oci_hook/tidegate-hook\n"
            f"hook-arguments {' '.join(node.hook_arguments())}\n"
            f"runtime-dir {node.runtime_dir}\n"
            f"log {node.work}/runtime.log\n"
        )
        make_bundle(
            self.bundle,
            machine=node.machine,
            name=NAME,
            arguments=[part.format("first") for part in BURN],
            annotations={f"tidegate.gpu/{key}": value for key, value in ANNOTATIONS.items()},
            hook=[],
        )
        config = self.config()
        del config["hooks"]
        config["linux"]["devices"] = []
        config["linux"]["resources"]["devices"] = [{"allow": False, "access": "rwm"}]
        (self.bundle / "config.json").write_text(json.dumps(config))

    def config(self) -> dict[str, Any]:
        """Return the current config.json."""
        found: dict[str, Any] = json.loads((self.bundle / "config.json").read_text())
        return found

    def run(self, *arguments: str, output: str = "output") -> subprocess.Popen[bytes]:
        """Start a command of the wrapper, with its output in the file `output`."""
        command = [
            str(ROOT / "oci_hook/tidegate-runtime"),
            *("--tidegate-config", str(self.settings), "--root", str(self.node.state_dir)),
        ]
        with (self.node.work / output).open("ab") as file:
            process = subprocess.Popen(
                [*command, *arguments], stdin=subprocess.DEVNULL, stdout=file, stderr=file
            )
        self.begun.append(process)
        return process

    def do(self, *arguments: str) -> None:
        """Run a command of the wrapper to its end; raise MachineError with its output if it fails."""
        name = f"output-{arguments[0]}"
        if self.run(*arguments, output=name).wait(60):
            said = (self.node.work / name).read_text(errors="replace").split()
            raise MachineError(f"{arguments[0]} failed: {' '.join(said)[-600:]}")

    def delete(self) -> None:
        """Delete the container, and wait for the commands that run in it."""
        self.do("delete", "--force", self.ident)
        for process in self.begun:
            process.wait(60)

    def seen(self) -> dict[str, Any] | None:
        """Return what the governor reports about the container."""
        known = {one["id"]: one for one in ask(self.node.config, "list")["containers"]}
        return known.get(self.ident)

    def left(self) -> dict[str, str]:
        """Return which of the paths that a start of the container creates exist in the image, by path."""
        root = self.bundle / "rootfs"
        places = ["run/tidegate", "usr/bin/nvidia-smi", *(f"{d}/{LIBRARY}" for d in LIBRARY_DIRS)]
        found = {place: "there" for place in places if os.path.lexists(root / place)}
        cache = root / "etc/ld.so.cache"
        if cache.exists():
            status = cache.stat()
            found["etc/ld.so.cache"] = f"{status.st_size} bytes, {status.st_mtime_ns}"
        return found


def wait_for(condition: Callable[[], Any], seconds: float = WAIT_S) -> Any:
    """Return the value of a condition as soon as it is true, or its last value after the timeout."""
    deadline = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def look_at_host(report: WrapperReport) -> None:
    """Report the kernel, the control groups and the runtime of this machine."""
    mounts = find_mounts()
    versions = {V2: "version 2", FREEZER: "version 1 (freezer)"}
    report.say("kernel", platform.release())
    report.say(
        "control groups",
        ", ".join(f"{versions.get(kind, kind)} at {path}" for kind, path in mounts.items())
        or "none that can freeze",
    )
    said = subprocess.run(["runc", "--version"], capture_output=True, text=True, check=False).stdout
    report.say("runtime", said.partition("\n")[0])


def examine(report: WrapperReport, node: BenchNode, when: str) -> None:
    """Run `tidegate doctor`; a problem in one of the checks of MUST counts as wrong."""
    command = ["-m", "governor.cli", "doctor", "--json", "--config", str(node.work / "config.yaml")]
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    try:
        findings = json.loads(done.stdout)["findings"]
    except (ValueError, KeyError):
        report.say(f"doctor, {when}", f"no answer: {done.stderr.strip()[-300:]}", right=False)
        return
    report.seen[f"findings, {when}"] = findings
    counts: dict[str, int] = {}
    for one in findings:
        counts[one["state"]] = counts.get(one["state"], 0) + 1
        must = one["id"].startswith(MUST)
        bad = "the check failed" in one["found"] or (must and one["state"] in ("wrong", "unseen"))
        if bad or one["state"] not in ("ok", "note") or one["id"].startswith("cgroup."):
            report.say(f"doctor: {one['id']}", f"{one['state']}: {one['found']}", right=not bad)
    report.say(f"doctor, {when}", ", ".join(f"{n} {state}" for state, n in counts.items()))


def look_at_start(report: WrapperReport, container: Wrapped, pid: int) -> None:
    """Report the device nodes, hook, library and memory that the container was given."""
    config = container.config()
    nodes = sorted(device["path"] for device in config["linux"]["devices"])
    real = container.node.machine.kind == "nvidia"
    report.say("nodes in config.json", ", ".join(nodes) or "none", right=bool(nodes) == real)
    hooks = [hook["path"] for hook in config.get("hooks", {}).get("createRuntime", [])]
    report.say("hook in config.json", ", ".join(hooks), right=len(hooks) == 1)

    def libraries() -> set[str]:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        return {line.split()[-1] for line in lines if "libcuda" in line}

    found = wait_for(lambda: [name for name in libraries() if LIBRARY in name])
    report.say("library of the program", ", ".join(found) or str(libraries()), right=bool(found))
    if real:
        query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
        container.run("exec", container.ident, *query, output="smi").wait(60)
        said = (container.node.work / "smi").read_text(errors="replace").strip()
        report.say("nvidia-smi's memory.total, MiB", said, right=said == str(QUOTA_MIB))


def look_at_membership(report: WrapperReport, container: Wrapped, pid: int) -> None:
    """Report whether the governor knows which processes belong to the container."""
    own, theirs, mounts = read_cgroups("self"), read_cgroups(pid), find_mounts()
    kind = next((k for k in mounts if theirs.get(k, "/") not in ("/", own.get(k))), None)
    report.say(
        "the container's control group",
        f"{mounts[kind]}{theirs[kind]}" if kind is not None else f"none of its own: {theirs}",
        right=kind is not None,
    )
    known = container.seen() or {}
    report.say(
        "has a control group that the governor sees",
        known.get("control_group"),
        right=bool(known.get("control_group")),
    )
    container.run("exec", container.ident, *[p.format("second") for p in BURN])
    both = wait_for(lambda: len((container.seen() or {}).get("processes", ())) == 2)
    report.say("processes, with one by exec", (container.seen() or {}).get("processes"), right=both)
    if kind is None:
        return
    procs = f"{mounts[kind]}{theirs[kind]}/cgroup.procs"
    command = container.node.machine.command("burner-500", inside=False)
    arguments = [*command, "--seconds", "120", "--out", str(container.node.work / "stray.bin")]
    with (container.node.work / "output-stray").open("wb") as log:
        stray = subprocess.Popen(
            ["sh", "-c", 'echo $$ >"$0" && exec "$@"', procs, *arguments],
            env={**os.environ, **container.node.machine.environment},
            stdout=log,
            stderr=log,
        )
    try:

        def accused() -> list[str]:
            found = (container.seen() or {}).get("violations", [])
            return [one["kind"] for one in found if one["pid"] == stray.pid]

        wait_for(lambda: "unregistered" in accused() or stray.poll() is not None)
        report.say(
            "a process that joined the group",
            f"accused: {', '.join(accused()) or 'of nothing'}"
            + (f"; it ended with {stray.poll()}" if stray.poll() is not None else ""),
            right="unregistered" in accused(),
        )
    finally:
        stray.kill()
        stray.wait()


def look_at_container(report: WrapperReport, node: BenchNode) -> None:
    """Create, start and delete a container with the wrapper."""
    container = Wrapped(node)
    before = container.left()
    pid_file = node.work / "pid"
    make = ("create", "--bundle", str(container.bundle), "--pid-file", str(pid_file))
    container.do(*make, container.ident)
    try:
        container.do("start", container.ident)
        pid = int(pid_file.read_text())
        report.say("started by the wrapper", f"process {pid}")
        look_at_start(report, container, pid)
        look_at_membership(report, container, pid)
        examine(report, node, "a container runs")
    finally:
        container.delete()
    gone = wait_for(lambda: container.seen() is None)
    report.say("after delete, to the governor", "gone" if gone else container.seen(), right=gone)
    after = container.left()
    report.say("after delete, in the image", after or "nothing of ours", right=after == before)
    notes = sorted(path.name for path in (node.runtime_dir / "traces").glob("*"))
    report.say("after delete, notes", notes or "none", right=not notes)


def main(argv: list[str] | None = None) -> int:
    """Run all checks, write DIR/wrapper.json, and return 1 if something is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.wrapper", description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "build/wrapper")
    parser.add_argument("--simulated", action="store_true", help="on the simulated GPU")
    args = parser.parse_args(argv)
    shutil.rmtree(args.output, ignore_errors=True)
    args.output.mkdir(parents=True)
    report = WrapperReport()
    kind: type[Machine] = Simulated if args.simulated else Nvidia
    try:
        look_at_host(report)
        with BenchNode(kind(args.output.resolve(), ROOT / "build/meson")) as node:
            examine(report, node, "nothing runs")
            look_at_container(report, node)
    except (MachineError, OSError, subprocess.SubprocessError) as e:
        report.say("ended early", str(e), right=False)
    (args.output / "wrapper.json").write_text(
        json.dumps({"wrong": report.wrong, **report.seen}, indent=1, default=str) + "\n"
    )
    print(f"wrapper: {'; '.join(report.wrong) or 'as it should be'}")
    return int(bool(report.wrong))


if __name__ == "__main__":
    sys.exit(main())
