"""`python -m bench.gangs [PART ...]`: measures containers with several GPUs on a node with two.

Each part has a time limit and reports its progress. When it ends, for whatever reason, its results
are written to gangs.json, and the next part begins.

  topology  the distances between GPUs in `tidegate check`, compared with `nvidia-smi topo -m`
  samples   the cost of an NVML sample, with 0 and 8 processes on the GPU
  native    the job of examples/workloads/gang.py alone, without Tidegate: its rate, and the
            duration of its units
  hogs      the job in a container with 30 % of both GPUs, while a hog with 60 % runs on each
  restart   the job trains while hogs run and the governor is killed and restarted
  rivals    two containers with 45 % of both GPUs, each with its own job

The job runs in two processes, and in one with both GPUs. A container's share of a GPU is computed
from the stamps of its units, on that GPU's clock, as in bench.quota.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.demo import SETTLE_S, driver_answers, name_gpu, run_solo, say
from bench.events import SAMPLE_NS, pid_of
from bench.gang_bench import (
    GPUS,
    HOG,
    NVLINK_OFF,
    SET_UP_S,
    Bench,
    GangJob,
    GangNvidia,
    GangSimulated,
)
from bench.gang_figures import own_topology, read_topology, summarise
from bench.limits import time_limit
from bench.machine import ROOT, MachineError
from bench.node import BenchNode, Running, last_json
from bench.progress import NS_PER_S, Progress, ProgressError, read_stamps, solo_profile
from bench.provenance import describe_run
from bench.quota_measure import COUNTERS, LONGEST_NS, work
from governor.client import ask
from governor.daemon import original_nvml
from governor.errors import TidegateError
from vdriver.errors import VdriverError
from vdriver.manifest import read_manifest

SPARE_S = 1.0
FOREVER_S = 300.0
AWAY_S = (0.0, 0.5, 1.5)
"""Times without a governor, one after each kill, in seconds."""
BETWEEN_S = 3.5
ROUNDS = 100
"""Number of NVML samples that are timed."""
TAIL = 40
"""Number of lines of a log that are kept if a part fails."""


# ---- the parts ----

Keep = dict[str, Any]


def topology(bench: Bench, keep: Keep) -> None:
    """Compare placement's view of the GPUs with nvidia-smi's."""
    config = str(bench.machine.work / "config.yaml")
    for name, more in (("text", []), ("json", ["--json"])):
        done = subprocess.run(
            [sys.executable, "-m", "governor.cli", "check", "--config", config, *more],
            cwd=ROOT, capture_output=True, text=True, check=False, timeout=20,
        )  # fmt: skip
        keep[f"check_{name}"] = done.stdout if name == "text" else json.loads(done.stdout)
        keep["check_status"] = done.returncode
    say(keep["check_text"])
    keep["check_json"].pop("configuration", None)  # it contains only paths of this machine
    keep["own"] = own_topology(keep["check_json"]["gpus"])
    smi = shutil.which("nvidia-smi") or "/usr/local/nvidia/bin/nvidia-smi"
    if bench.machine.kind != "nvidia":
        return
    keep["smi"] = {}
    for words in ("topo -m", "topo -p2p r", "nvlink -s"):
        done = subprocess.run(
            [smi, *words.split()], capture_output=True, text=True, check=False, timeout=20
        )
        keep["smi"][words] = done.stdout + done.stderr
    say(keep["smi"]["topo -m"])
    keep["driver"] = read_topology(keep["smi"]["topo -m"])


def samples(bench: Bench, keep: Keep) -> None:
    """Time NVML samples."""
    keep["looks"] = []
    environment = {
        **os.environ, **bench.machine.environment, "CUDA_VISIBLE_DEVICES": bench.uuids[0],
    }  # fmt: skip
    for n in (0, 8):
        folder = bench.machine.work / "samples"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for i in range(n):
            ready = folder / str(i)
            command = [
                *bench.machine.command(HOG, inside=False), "--seconds", "60",
                "--wait-file", str(ready),
            ]  # fmt: skip
            with (folder / "output").open("w") as output:
                process = subprocess.Popen(
                    command, env=environment, start_new_session=True, text=True,
                    stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                )  # fmt: skip
            bench.started.append(process)
        deadline = time.monotonic() + 30
        while len(list(folder.glob("*.ready"))) < n:
            if time.monotonic() > deadline:
                raise MachineError(f"{n} burners were not ready within 30 s")
            time.sleep(0.05)
        for i in range(n):
            (folder / str(i)).touch()
        time.sleep(1)
        done = subprocess.run(
            [sys.executable, "-m", "bench.nvml_cost", bench.nvml, bench.uuids[0], str(ROUNDS)],
            cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
        if done.returncode:
            raise MachineError(f"bench.nvml_cost failed: {done.stderr[-300:]}")
        keep["looks"].append(last_json(done.stdout))
        bench.clean()


def native(bench: Bench, keep: Keep) -> None:
    """Run the jobs, and the hog, alone and without Tidegate."""
    keep["jobs"] = {}
    bench.hog = run_solo(bench.machine, HOG, 3.0, longest_ns=LONGEST_NS)
    for job, usual in (
        (GangJob("processes"), 6.0),
        (GangJob("single"), 6.0),
        (GangJob("processes", "train"), 10.0),
    ):
        out = bench.machine.work / "native" / job.name
        say(f"  alone: {job.name}")
        try:
            answer = bench.native(job, bench.seconds(usual) + SPARE_S, out)
            profiles = [solo_profile(read_stamps(out / f"gpu{gpu}.bin")) for gpu in range(GPUS)]
        except (MachineError, ProgressError, subprocess.TimeoutExpired) as e:
            keep.setdefault("failures", []).append(f"{job.name}: {e}")
            bench.clean()
            continue
        bench.profiles[job.name] = profiles
        units = [{str(kind): round(ns) for kind, ns in one.durations.items()} for one in profiles]
        keep["jobs"][job.name] = {"answer": answer, "units_ns": units}
        say(f"  {json.dumps({**answer, 'checkpoints': len(answer['checkpoints'])})}")
    if keep.get("failures"):
        raise MachineError("; ".join(keep["failures"]))


Script = Callable[[Bench, Sequence[Running]], list[dict[str, int]]]


def beside(
    bench: Bench,
    jobs: Sequence[tuple[GangJob, int]],
    hogs: int,
    usual: float,
    script: Script | None = None,
) -> dict[str, Any]:
    """Run jobs with a share of both GPUs, and a hog on each GPU unless its share `hogs` is 0."""
    seconds = bench.seconds(usual)
    length = FOREVER_S if script else seconds + SETTLE_S + SPARE_S
    containers: list[tuple[Running, GangJob | None, int, list[int]]] = [
        (bench.start_job(job, compute, length), job, compute, list(range(GPUS)))
        for job, compute in jobs
    ]
    containers += [
        (bench.start_hog(gpu, hogs, length), None, hogs, [gpu])
        for gpu in range(GPUS if hogs else 0)
    ]
    running = [container for container, *_ in containers]
    bench.node.wait_ready([one.out / "begin.ready" for one in running], SET_UP_S)
    bench.node.list_containers()
    for one in running:
        (one.out / "begin").touch()
    time.sleep(SETTLE_S)
    bench.node.check_scheduling()
    bench.node.list_containers()
    before = {one.name: one.seen for one in running}
    began = time.monotonic()
    events: list[dict[str, int]] = []
    if script:
        events = script(bench, running)
    else:
        watch(running, began + seconds)
    passed = time.monotonic() - began
    bench.node.list_containers()
    after = {one.name: one.seen for one in running}
    if script:
        for one, job, *_ in containers:
            if job is None:
                os.kill(pid_of(bench.node, one), signal.SIGTERM)
            else:
                (one.out / "end").touch()
    statuses = {one.name: bench.node.wait(one, 90) for one in running}
    answers = [
        {
            "name": one.name, "job": job.name, "compute": compute,
            "status": statuses[one.name], "answer": last_json(one.output),
        }
        for one, job, compute, _ in containers
        if job is not None
    ]  # fmt: skip
    tenants: list[dict[str, Any]] = []
    for gpu in range(GPUS):
        tenants += measure_gpu(bench, gpu, containers, passed, events)
    for tenant in tenants:
        name, uuid = tenant["name"], bench.uuids[tenant["gpu"]]
        # A restarted governor starts counting from zero.
        tenant["governor"] = {} if script else difference(before[name], after[name], uuid)
    return {"seconds": round(passed, 3), "jobs": answers, "tenants": tenants}


def watch(running: Sequence[Running], until: float) -> None:
    """Wait, and print the last line of each job's output every five seconds."""
    while (left := until - time.monotonic()) > 0:
        time.sleep(min(5.0, left))
        for one in running:
            lines = (one.bundle / "output").read_text(errors="replace").splitlines()
            if lines:
                say(f"  {one.name}: {lines[-1][:160]}")
            if one.process.poll() not in {None, 0}:
                raise MachineError(f"{one.name} ended with {one.process.returncode}")


def measure_gpu(
    bench: Bench,
    gpu: int,
    containers: Sequence[tuple[Running, GangJob | None, int, list[int]]],
    seconds: float,
    events: Sequence[Mapping[str, int]],
) -> list[dict[str, Any]]:
    """Return the work of each container on one GPU, in steps of 10 ms of that GPU's clock."""
    runs: list[tuple[Running, int, Progress | None]] = []
    ahead = 0
    for one, job, compute, gpus in containers:
        if gpu not in gpus:
            continue
        profile = bench.hog
        path = one.out / "progress.bin"
        if job is not None:
            profiles = bench.profiles.get(job.name)
            profile = profiles[gpu] if profiles else None
            path = one.out / f"gpu{gpu}.bin"
        else:
            ahead = int(last_json(one.output).get("clock_ns", 0))
        progress = None
        if profile is not None:
            with contextlib.suppress(ProgressError, OSError):
                progress = Progress(read_stamps(path), profile)
        runs.append((one, compute, progress))
    known = [progress for *_, progress in runs if progress is not None]
    if not known:
        begin = end = 0
    else:
        begin = max(one.begin for one in known) + int(SETTLE_S * NS_PER_S)
        end = min(*(one.end for one in known), begin + int(seconds * NS_PER_S))
    placed = [{key: at + ahead - begin for key, at in event.items()} for event in events if known]
    return [
        {
            "name": one.name,
            "gpu": gpu,
            "compute": compute,
            "work_us": work(progress, begin, end, SAMPLE_NS) if progress else [],
            **({"events": placed} if placed else {}),
        }
        for one, compute, progress in runs
    ]


def difference(before: Mapping[str, Any], after: Mapping[str, Any], uuid: str) -> dict[str, int]:
    """Return the change of a container's governor counters on one GPU between two samples."""
    one, two = (
        next((device for device in seen.get("devices", []) if device["uuid"] == uuid), None)
        for seen in (before, after)
    )
    return {name: two[name] - one[name] for name in COUNTERS} if one and two else {}


def kill_governor(bench: Bench, running: Sequence[Running]) -> list[dict[str, int]]:
    """Kill the governor and restart it, a few times."""
    events = []
    time.sleep(1.5)
    for away in AWAY_S:
        killed = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        bench.node.stop_governor(signal.SIGKILL)
        time.sleep(away)
        bench.node.start_governor()
        returned = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        say(f"  no governor ran for {(returned - killed) / 1e9:.2f} s")
        watch(running, time.monotonic() + BETWEEN_S)
        until = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        events.append({"killed_ns": killed, "returned_ns": returned, "until_ns": until})
    return events


def arms(bench: Bench, keep: Keep, chosen: Mapping[str, Callable[[], dict[str, Any]]]) -> None:
    """Run the chosen arms; a failure in one does not affect the next."""
    keep["arms"], failures = {}, []
    for name, arm in chosen.items():
        say(f"  arm {name}")
        try:
            keep["arms"][name] = result = arm()
            ended = {job["name"]: job["status"] for job in result["jobs"]}
            failure = f"jobs ended with {ended}" if any(ended.values()) else ""
        except (MachineError, ProgressError, TidegateError, OSError) as e:
            failure = str(e) or repr(e)
        if failure:
            failures.append(f"{name}: {failure}")
            keep.setdefault("outputs", {})[name] = outputs(bench)
        bench.keep_logs()
        bench.clean()
    if failures:
        raise MachineError("; ".join(failures))


def hogs(bench: Bench, keep: Keep) -> None:
    """Run the job with 30 % while hogs with 60 % run."""
    arms(bench, keep, {
        form: lambda form=form: beside(bench, [(GangJob(form), 30)], 60, 30.0)  # type: ignore[misc]
        for form in ("processes", "single")
    })  # fmt: skip


def restart(bench: Bench, keep: Keep) -> None:
    """Train while the governor is killed and restarted."""
    arms(bench, keep, {
        "train": lambda: beside(bench, [(GangJob("processes", "train"), 40)], 50, 0, kill_governor)
    })  # fmt: skip


def rivals(bench: Bench, keep: Keep) -> None:
    """Run two jobs with 45 % against each other."""
    arms(bench, keep, {
        form: lambda form=form: beside(  # type: ignore[misc]
            bench, [(GangJob(form), 45), (GangJob(form), 45)], 0, 15.0
        )
        for form in ("processes", "single")
    })  # fmt: skip


@dataclass(frozen=True)
class GangPart:
    """A part, and its time limit in seconds."""

    run: Callable[[Bench, Keep], None]
    limit: int


PARTS = {
    "topology": GangPart(topology, 30),
    "samples": GangPart(samples, 60),
    "native": GangPart(native, 150),
    "hogs": GangPart(hogs, 190),
    "restart": GangPart(restart, 110),
    "rivals": GangPart(rivals, 150),
}


# ---- all of them ----


def outputs(bench: Bench) -> dict[str, list[str]]:
    """Return the last lines of the logs of the containers and the governor."""
    paths = {one.name: one.bundle / "output" for one in bench.node.running}
    paths["governor"] = bench.machine.work / "governor.log"
    found = {}
    for name, path in paths.items():
        with contextlib.suppress(OSError):
            found[name] = path.read_text(errors="replace").splitlines()[-TAIL:]
    return found


def run_part(bench: Bench, name: str, seconds: float) -> Keep:
    """Run one part; return its results, and its error if it failed."""
    keep: Keep = {"error": None}
    begin = time.monotonic()
    try:
        with time_limit(seconds, name):
            PARTS[name].run(bench, keep)
    except Exception as e:  # noqa: BLE001 - no failure may affect the other parts
        keep["error"] = f"{type(e).__name__}: {e}"
        keep["trace"] = traceback.format_exc().splitlines()[-8:]
        keep.setdefault("outputs", {})["end"] = outputs(bench)
        say(f"{name}: {keep['error']}")
    keep["took_s"] = round(time.monotonic() - begin, 1)
    try:
        with time_limit(40, "the end of a part"):
            bench.keep_logs()
            bench.clean()
    except Exception as e:  # noqa: BLE001
        keep["error"] = keep["error"] or f"afterwards: {type(e).__name__}: {e}"
        say(f"{name}: afterwards: {e}")
    return keep


def find_machine(args: argparse.Namespace) -> GangNvidia | GangSimulated:
    """Return a machine with two GPUs."""
    tools = args.output / "tools"
    tools.mkdir()
    if args.simulated or not driver_answers():
        return GangSimulated(args.output, args.build, tools)
    return GangNvidia(args.output, args.build, tools)


def write(args: argparse.Namespace, report: dict[str, Any]) -> None:
    """Save the results so far."""
    report["summary"] = summarise(report["parts"])
    path = args.output / "gangs.json"
    path.with_suffix(".new").write_text(json.dumps(report, separators=(",", ":")) + "\n")
    path.with_suffix(".new").rename(path)


def measure(args: argparse.Namespace, report: dict[str, Any]) -> None:
    """Run the parts."""
    end = time.monotonic() + args.limit
    machine = find_machine(args)
    settings = {"placement": "topology", "scheduling": args.scheduling}
    report["scheduling"] = args.scheduling
    with BenchNode(machine, settings=settings) as node:
        gpus = ask(node.config, "gpus")["gpus"]
        if len(gpus) < GPUS:
            raise MachineError(f"there are {len(gpus)} GPUs; this needs {GPUS}")
        report["gpu"] = asdict(name_gpu(node))
        report["generation"] = read_manifest((node.driver_dir / "current").resolve()).generation
        nvml = str(original_nvml(str(node.driver_dir)))
        bench = Bench(node, machine, args, [gpu["uuid"] for gpu in gpus[:GPUS]], nvml)
        for name in args.names or PARTS:
            left = end - time.monotonic()
            say(f"-- {name}, {left:.0f} s left")
            if left < 10:
                report["parts"][name] = {"error": "no time was left", "took_s": 0.0}
            else:
                report["parts"][name] = run_part(bench, name, min(PARTS[name].limit, left))
            write(args, report)
            say(f"{name}: {json.dumps(report['summary'][name])}")


def main(argv: list[str] | None = None) -> int:
    """Run the parts; return 0 if each could be measured."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.gangs", description=__doc__.split("\n", maxsplit=1)[0]
    )
    parser.add_argument("names", nargs="*", metavar="PART", choices=[*PARTS, []], default=[])
    parser.add_argument("--seconds", type=float, help="duration of each arm (default: its own)")
    parser.add_argument("--limit", type=float, default=480, help="seconds for all parts (480)")
    parser.add_argument("--scheduling", choices=("gate", "hardware"), default="gate")
    parser.add_argument("--simulated", action="store_true", help="always use a simulated GPU")
    parser.add_argument("--output", type=Path, default=ROOT / "build/gangs")
    parser.add_argument("--build", type=Path, default=ROOT / "build/meson")
    args = parser.parse_args(argv)
    os.environ["PATH"] += ":/usr/sbin:/sbin"
    os.environ |= dict(word.split("=", 1) for word in NVLINK_OFF)
    args.output, args.build = args.output.resolve(), args.build.resolve()
    shutil.rmtree(args.output, ignore_errors=True)
    args.output.mkdir(parents=True)
    report: dict[str, Any] = {"run": describe_run(), "parts": {}}
    try:
        measure(args, report)
    except (MachineError, ProgressError, TidegateError, VdriverError) as e:
        print(f"gangs: {e}", file=sys.stderr)
        return 1
    say(f"{args.output}/gangs.json")
    return 1 if any(part["error"] for part in report["parts"].values()) else 0


if __name__ == "__main__":
    sys.exit(main())
