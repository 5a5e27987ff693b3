"""`python -m tests.container.start_times` measures how long container starts take, per engine.

The engines are those of this machine's release, or of the release that --suite names, on the node
of test_engines.py: real daemons, the C programs, the fork server, a governor and a mirror. In each
round, every engine starts one container in each of three ways, and removes it before the next. The
rounds use all orders of the three ways in turn:

native      the engine's own runtime, as on a node without Tidegate
ungoverned  our runtime or hooks, and a container that requests nothing
governed    our runtime or hooks, and a container that requests a share

CRI-O is among the engines if `TIDEGATE_ENGINE_BIN` names a directory with its programs
(docs/testing.md).

Times are wall-clock times, from the engine's command (or first CRI call) to its return with the
container running. The program prints the medians of the differences from the native start of the
same round. All times are written to build/starts/starts.json, which has the format of the results
in bench/results.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench.machine import Simulated
from bench.node import BenchNode
from bench.provenance import describe_run
from tests.container.bundles import ROOT, make_rootfs
from tests.container.engine_host import EngineHost, machine
from tests.container.engines import ENGINES, Docker, Engine, crio_binds, pack_image
from tests.container.nodes import wait_for
from tests.container.test_engines import OldDocker, old_docker

ASKED = {"memory": "600Mi", "compute": "1"}
IDLE = ("/usr/bin/sleep", "infinity")
WAYS = ("native", "ungoverned", "governed")
PAUSE_S = 0.3
"""Time in seconds that an engine gets to finish its work after a container's end: Podman starts
another process for that.
"""
PROGRAMS = ("tidegate-hook", "tidegate-runtime")


def start(engine: Engine, way: str) -> float:
    """Start a container and remove it; return how many milliseconds the start took."""
    annotations = ASKED if way == "governed" else {}
    time.sleep(PAUSE_S)
    began = time.monotonic()
    started = engine.run(*IDLE, annotations=annotations, ours=way != "native")
    took = (time.monotonic() - began) * 1000
    engine.remove(started)
    return round(took, 2)


def measure(engines: Sequence[Engine], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return the milliseconds of each engine and way, round by round."""
    taken: dict[str, dict[str, list[float]]] = {e.name: {way: [] for way in WAYS} for e in engines}
    for engine in engines:
        for way in WAYS:
            start(engine, way)  # to fill caches
    orders = list(itertools.permutations(WAYS))
    for i in range(rounds):
        for engine in engines:
            for way in orders[i % len(orders)]:
                taken[engine.name][way].append(start(engine, way))
        print(f"round {i + 1} of {rounds}", file=sys.stderr, flush=True)
    return taken


def summarise(taken: dict[str, dict[str, list[float]]]) -> dict[str, dict[str, float]]:
    """Return the medians in milliseconds: of the native starts, and of the additional time compared
    with a native start of the same round, with its standard error.
    """
    summary = {}
    for name, ways in taken.items():
        summary[name] = {"native_ms": round(statistics.median(ways["native"]), 1)}
        for way in WAYS[1:]:
            more = [ours - own for ours, own in zip(ways[way], ways["native"], strict=True)]
            # This is the standard error of a median, for a normal distribution.
            error = 1.25 * statistics.stdev(more) / len(more) ** 0.5
            summary[name] |= {
                f"{way}_adds_ms": round(statistics.median(more), 1),
                f"{way}_error_ms": round(error, 1),
            }
    return summary


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and write starts.json."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.container.start_times", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--suite", default=machine(), help="the release of the engines")
    parser.add_argument("--engine", action="append", choices=[kind.name for kind in ENGINES])
    parser.add_argument("--output", type=Path, default=ROOT / "build/starts")
    parser.add_argument("--build", type=Path, default=ROOT / "build/meson")
    parser.add_argument("--without-server", action="store_true", help="no fork server")
    args = parser.parse_args(argv)
    if args.rounds < 2:
        parser.error("--rounds is 2 or more: the summary has standard errors")
    if os.geteuid() != 0:
        print("start_times: engines need root", file=sys.stderr)
        return 77
    subprocess.run([ROOT / "tools/engine-root", args.suite], check=True)
    raw: dict[str, dict[str, dict[str, list[float]]]] = {}
    configuration: dict[str, object] = {"release": args.suite, "rounds": args.rounds}
    report: dict[str, object] = {
        "suite": "starts",
        **describe_run(),
        "gpu": {"kind": "simulated", "name": "Tidegate Simulated GPU", "driver": "simulated"},
        "configuration": configuration,
        "raw": raw,
    }
    with tempfile.TemporaryDirectory(prefix="tidegate-starts-") as name:
        base = Path(name)
        (base / "node").mkdir()
        simulated = Simulated(base / "node", args.build)
        rootfs = make_rootfs(base / "rootfs", base / "tools")
        with BenchNode(simulated) as node:
            binds = [
                str(node.runtime_dir),
                f"{node.runtime_dir}:/run/tidegate",
                f"{node.driver_dir}:/var/lib/tidegate/driver",
                str(simulated.directory),
                str(args.build),
                *crio_binds(),
            ]
            with EngineHost(ROOT / "build/engines" / args.suite, base, binds=binds) as host:
                for program in PROGRAMS:
                    built = args.build / "oci_hook/front" / program
                    host.path(f"/usr/bin/{program}").symlink_to(built)
                server = None
                if not args.without_server:
                    log = host.work / "forkserver.log"
                    server = host.start(str(ROOT / "oci_hook/tidegate-forkserver"), log=log)
                    listening = host.path("/run/tidegate/forkserver.sock")
                    wait_for(listening.exists, "the fork server")
                image = pack_image(rootfs, host.work / "image.tar")
                engines = []
                for kind in ENGINES:
                    if args.engine and kind.name not in args.engine:
                        continue
                    if kind is Docker and old_docker(host):
                        kind = OldDocker  # noqa: PLW2901 - the same engine, with variables
                    engine = kind(host, {str(simulated.directory): "/dev/tidegate-simgpu"})
                    engine.start(image)
                    engines.append(engine)
                configuration["engines"] = {e.name: e.version() for e in engines}
                raw["ms"] = measure(engines, args.rounds)
                for engine in reversed(engines):
                    engine.stop()
                if server:
                    host.stop(server)
    report["summary"] = summarise(raw["ms"])
    shutil.rmtree(args.output, ignore_errors=True)
    args.output.mkdir(parents=True)
    (args.output / "starts.json").write_text(json.dumps(report) + "\n")
    print(json.dumps(report["summary"], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
