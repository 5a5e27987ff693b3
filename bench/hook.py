"""`python -m bench.hook`: measures the cost of a container's start with the hook and the runtime.

Under runc and crun a static program is run in each of these ways, in turn, in `--rounds` rounds.
The result is the additional cost over the first way in the same round:

    bare       no hook
    trivial    a hook in C that does nothing, which is the least that a hook can cost
    asks-not   Tidegate's hook, in a container that requests nothing
    governed   Tidegate's hook, in a container that requests a share
    wrapper-asks-not, wrapper-governed   the same with tidegate-runtime, which inserts the hook

The hook and the runtime are the C programs, with a fork server. With `--scripts` they are the
Python scripts that the C programs execute if there is no server; the difference is the time that
the C programs and the server save.

Then `--crowd` containers are started 8 at a time, to measure how long each takes, and how many
descriptors and mounts they leave behind. The GPU is simulated: no part of a start uses one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.machine import ROOT, MachineError, Simulated, make_bundle
from bench.node import BenchNode
from bench.provenance import describe_run
from governor.client import ask
from governor.errors import TidegateError
from vdriver.errors import VdriverError

SCRIPTS = ROOT / "oci_hook"
BUILT = ROOT / "build/meson"
SERVER = ROOT / "oci_hook/tidegate-forkserver"
ASKED = {"tidegate.gpu/memory": "600Mi", "tidegate.gpu/compute": "1"}
WAYS = ("bare", "trivial", "asks-not", "governed", "wrapper-asks-not", "wrapper-governed")
TOGETHER = 8


def say(line: str) -> None:
    """Print a line of progress."""
    print(line, file=sys.stderr, flush=True)


class Starts:
    """Makes a bundle for each way of starting a container, and runs it."""

    def __init__(self, node: BenchNode, work: Path, programs: Path) -> None:
        self.node = node
        self.programs = programs
        self.work = work
        self.static = self._compile("static", "int main(void) { return 0; }")
        self.trivial = self._compile("trivial", "int main(void) { return 0; }")
        self.count = 0

    def _compile(self, name: str, source: str) -> Path:
        path = self.work / name
        command = ["gcc", "-O2", "-static", "-x", "c", "-", "-o", str(path)]
        subprocess.run(command, input=source.encode(), check=True)
        return path

    def bundle(self, way: str, name: str = "") -> Path:
        """Make the bundle for one way."""
        directory = self.work / "bundles" / (name or way)
        asks = way.endswith("governed")
        make_bundle(
            directory,
            machine=self.node.machine,
            name="start",
            arguments=["/usr/bin/static"],
            annotations=ASKED if asks else {},
            hook=self.node.hook_arguments(),
        )
        shutil.copy(self.static, directory / "rootfs/usr/bin/static")
        path = directory / "config.json"
        config = json.loads(path.read_text())
        for entries in config["hooks"].values():
            for entry in entries:
                entry["path"] = str(self.programs / "tidegate-hook")
        if way == "bare" or way.startswith("wrapper"):
            del config["hooks"]
        elif way == "trivial":
            entry = {"path": str(self.trivial), "env": ["PATH=/usr/bin"], "timeout": 60}
            config["hooks"] = {"createRuntime": [entry]}
        path.write_text(json.dumps(config))
        return directory

    def settings(self, runtime: str) -> Path:
        """Write the wrapper's settings."""
        path = self.work / f"{runtime}.conf"
        real = shutil.which(runtime)
        lines = (
            f"runtime {real}",
            f"hook {self.programs / 'tidegate-hook'}",
            f"hook-arguments {' '.join(self.node.hook_arguments())}",
            f"runtime-dir {self.node.runtime_dir}",
            # A directory without device nodes, because the GPU is simulated.
            f"dev-dir {self.work}",
        )
        path.write_text("\n".join(lines) + "\n")
        return path

    def run(self, runtime: str, way: str, bundle: Path) -> float:
        """Run a container to its end, and return the duration in milliseconds."""
        self.count += 1
        first = [runtime]
        if way.startswith("wrapper"):
            wrapper = str(self.programs / "tidegate-runtime")
            first = [wrapper, "--tidegate-config", str(self.settings(runtime))]
        command = [*first, "--root", str(self.work / f"state-{runtime}"), "run", "-b", str(bundle)]
        began = time.monotonic()
        done = subprocess.run(
            [*command, f"start-{os.getpid()}-{self.count}"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        took = (time.monotonic() - began) * 1000
        if done.returncode:
            raise MachineError(f"{way} under {runtime}: {' '.join(done.stderr.split())[-300:]}")
        return took


def measure_ways(starts: Starts, runtime: str, rounds: int) -> dict[str, list[float]]:
    """Return the milliseconds for each way, round by round."""
    bundles = {way: starts.bundle(way, f"{runtime}-{way}") for way in WAYS}
    taken: dict[str, list[float]] = {way: [] for way in WAYS}
    for way in WAYS:
        starts.run(runtime, way, bundles[way])  # warm up the page cache
    for i in range(rounds):
        for way in WAYS if i % 2 else reversed(WAYS):
            taken[way].append(round(starts.run(runtime, way, bundles[way]), 3))
        if i % 10 == 9:
            say(f"{runtime}: {i + 1} of {rounds} rounds")
    return taken


def held(pid: int) -> dict[str, int]:
    """Return the number of the governor's open descriptors, and of mounts on this host."""
    return {
        "descriptors": len(list(Path(f"/proc/{pid}/fd").iterdir())),
        "mounts": len(Path("/proc/self/mountinfo").read_text().splitlines()),
    }


def measure_crowd(starts: Starts, runtime: str, n: int) -> dict[str, Any]:
    """Start many containers that request a share, 8 at a time."""
    pid = starts.node.governor_pid
    before = held(pid)
    bundles = [starts.bundle("governed", f"{runtime}-crowd-{i}") for i in range(n)]

    def one(bundle: Path) -> float | str:
        try:
            return round(starts.run(runtime, "governed", bundle), 3)
        except MachineError as e:
            return str(e)

    with ThreadPoolExecutor(TOGETHER) as pool:
        results = list(pool.map(one, bundles))
    deadline = time.monotonic() + 10
    while ask(starts.node.config, "list")["containers"] and time.monotonic() < deadline:
        time.sleep(0.05)
    return {
        "ms": [r for r in results if not isinstance(r, str)],
        "failures": [r for r in results if isinstance(r, str)],
        "before": before,
        "after": held(pid),
        "containers_left": len(ask(starts.node.config, "list")["containers"]),
    }


def summarise(report: dict[str, Any]) -> dict[str, Any]:
    """Return the median cost that each way adds, and the crowd's figures, for each runtime."""
    summary: dict[str, Any] = {}
    for runtime, taken in report["ways"].items():
        bare = taken["bare"]
        added = {
            way: round(statistics.median(a - b for a, b in zip(taken[way], bare, strict=True)), 2)
            for way in WAYS[1:]
        }
        crowd = report["crowd"][runtime]
        summary[runtime] = {
            "bare_ms": round(statistics.median(bare), 2),
            "added_ms": added,
            **percentiles(crowd["ms"]),
            "failures": len(crowd["failures"]),
        }
    return summary


def percentiles(times: Sequence[float]) -> dict[str, float]:
    """Return the median and the 99th percentile of times in ms; nothing if no start succeeded."""
    ordered = sorted(times)
    if not ordered:
        return {}
    return {
        "crowd_p50_ms": round(statistics.median(ordered), 1),
        "crowd_p99_ms": round(ordered[max(0, -(-99 * len(ordered) // 100) - 1)], 1),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and write hook.json."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.hook", description=(__doc__ or "").split("\n", maxsplit=1)[0]
    )
    parser.add_argument("--output", type=Path, default=ROOT / "build/hook")
    parser.add_argument("--rounds", type=int, default=50, help="starts in each way (50)")
    parser.add_argument(
        "--crowd", type=int, default=100, help="number of containers to start, 8 at a time (100)"
    )
    parser.add_argument("--runtime", action="append", choices=("runc", "crun"))
    parser.add_argument("--scripts", action="store_true", help="use only the Python scripts")
    args = parser.parse_args(argv)
    if os.geteuid() != 0:
        print("hook: mounts and containers need root", file=sys.stderr)
        return 77
    if Path("/sys/fs/cgroup/unified").exists() and "TIDEGATE_BENCH_HOOK" not in os.environ:
        # crun refuses a hybrid cgroup hierarchy; without the unified part it is plain version 1.
        script = 'umount /sys/fs/cgroup/unified; exec "$@"'
        words = [sys.executable, "-m", "bench.hook", *(sys.argv[1:] if argv is None else argv)]
        command = ["unshare", "-m", "--propagation", "private", "sh", "-c", script, "sh", *words]
        return subprocess.run(
            command, check=False, env={**os.environ, "TIDEGATE_BENCH_HOOK": "1"}
        ).returncode
    shutil.rmtree(args.output, ignore_errors=True)
    report: dict[str, Any] = {"ways": {}, "crowd": {}, "run": describe_run()}
    runtimes = args.runtime or ["runc", "crun"]
    try:
        measure(args, runtimes, report)
    except (MachineError, TidegateError, VdriverError) as e:
        print(f"hook: {e}", file=sys.stderr)
        return 1
    report["summary"] = summarise(report)
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "hook.json").write_text(json.dumps(report) + "\n")
    print(json.dumps(report["summary"], indent=1))
    return 0 if not any(c["failures"] for c in report["crowd"].values()) else 1


def measure(args: argparse.Namespace, runtimes: Sequence[str], report: dict[str, Any]) -> None:
    """Measure under each runtime, on one node."""
    with tempfile.TemporaryDirectory(prefix="tidegate-hook-") as name:
        work = Path(name)
        machine = Simulated(work / "node", BUILT)
        with BenchNode(machine) as node, contextlib.ExitStack() as stack:
            programs = SCRIPTS
            if not args.scripts:
                programs = BUILT / "oci_hook/front"
                stack.enter_context(serving(node.runtime_dir))
            starts = Starts(node, work, programs)
            for runtime in runtimes:
                report["ways"][runtime] = measure_ways(starts, runtime, args.rounds)
                report["crowd"][runtime] = measure_crowd(starts, runtime, args.crowd)


@contextlib.contextmanager
def serving(runtime_dir: Path) -> Iterator[None]:
    """Run a fork server, and end it afterwards."""
    server = subprocess.Popen([str(SERVER), "--runtime-dir", str(runtime_dir)])
    try:
        deadline = time.monotonic() + 10
        while not (runtime_dir / "forkserver.sock").exists():
            if server.poll() is not None or time.monotonic() > deadline:
                raise MachineError("the fork server is not listening")
            time.sleep(0.01)
        yield
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    sys.exit(main())
