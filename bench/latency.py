"""How long requests take next to endless work: without Tidegate, and with it in each way.

`python -m bench.latency` runs a service that gets requests at random (Poisson arrivals, the same in
every arm) next to jobs that keep the GPU busy. For each arm it prints the mean and the 99th
percentile of the time from a request's arrival to its end, and what the jobs did, relative to what
one of them does alone. Arms, all in one run: the service alone, without Tidegate and with it
(`governed`); both without Tidegate; `gate`, with grants at the launch; `hardware`, with the GPU's
own scheduler; and `latency`, the same with a service of that class and a cap. The time of every
request is kept in latency.json.
"""

from __future__ import annotations

import abc
import argparse
import contextlib
import json
import os
import shutil
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from bench.demo import find_machine, name_gpu
from bench.machine import ROOT, Machine, MachineError
from bench.node import Node
from bench.progress import read_stamps
from bench.provenance import describe_run
from governor.errors import TidegateError
from vdriver.errors import VdriverError

UNIT_US = 100
UNITS = 20
"""A request is 20 kernels of 0.1 ms."""
SET_UP_S = 60.0
SETTLE_S = 1.0
"""Time for which the jobs run before the first request, seconds."""
TRAINING_SETTLE_S = 3.0
"""The same for a training."""
SERVICE = f"burner-{UNIT_US}"
JOB = "burner-500"
MEMORY = "4Gi"
"""Quota of a training."""
ROOM = 10
"""Guarantee of the service beyond what its requests take, in points; the jobs share the rest."""


class Way(NamedTuple):
    """How an arm shares the GPU; without Tidegate if `scheduling` is None."""

    name: str
    scheduling: str | None = None
    service: Mapping[str, str] = MappingProxyType({"compute-limit": "100"})


CAPPED = MappingProxyType({"compute-limit": "70", "class": "latency"})
ALONE = (Way("alone"), Way("governed", "hardware", CAPPED))
BESIDE = (
    Way("native"),
    Way("hardware", "hardware"),
    Way("latency", "hardware", CAPPED),
    Way("gate", "gate"),  # last: at half load a request takes seconds
)


class Arm(abc.ABC):
    """Where and how programs are started."""

    inside: bool

    def __init__(self, machine: Machine, work: Path) -> None:
        self.machine, self.work = machine, work

    @abc.abstractmethod
    def start(self, name: str, arguments: Sequence[str], quota: Mapping[str, str]) -> Path:
        """Start a program, and return its directory, which the program sees as /out."""

    @abc.abstractmethod
    def end(self) -> None:
        """End what was started."""


class Outside(Arm):
    """Ordinary processes directly on the driver."""

    inside = False

    def __init__(self, machine: Machine, work: Path) -> None:
        super().__init__(machine, work)
        self._running: list[subprocess.Popen[bytes]] = []

    def start(self, name: str, arguments: Sequence[str], quota: Mapping[str, str]) -> Path:  # noqa: ARG002
        """Start a process."""
        out = self.work / name
        out.mkdir(parents=True)
        command = [argument.replace("/out/", f"{out}/") for argument in arguments]
        environment = {**os.environ, **self.machine.environment}
        with (out / "output").open("wb") as output:
            self._running.append(subprocess.Popen(command, env=environment, stdout=output))
        return out

    def end(self) -> None:
        """Terminate the processes; each of them writes what it has."""
        for process in self._running:
            process.terminate()
        for process in self._running:
            process.wait(SET_UP_S)


class Inside(Arm):
    """Containers on a node with a governor."""

    inside = True

    def __init__(self, machine: Machine, work: Path, node: Node) -> None:
        super().__init__(machine, work)
        self._node = node

    def start(self, name: str, arguments: Sequence[str], quota: Mapping[str, str]) -> Path:
        """Start a container."""
        return self._node.start(name, arguments, {"memory": "1Gi", **quota}).out

    def end(self) -> None:
        """Remove the containers."""
        for container in self._node.running:
            self._node.delete(container)
        self._node.check_scheduling()


@contextlib.contextmanager
def open_arm(machine: Machine, work: Path, scheduling: str | None) -> Iterator[Arm]:
    """Provide an arm with that scheduling; None: without Tidegate."""
    if scheduling is None:
        yield Outside(machine, work)
        return
    with Node(machine, settings={"scheduling": scheduling}, keep_machine=True) as node:
        yield Inside(machine, work, node)


def wait_for(path: Path) -> None:
    """Wait until a program reports that it is set up."""
    deadline = time.monotonic() + SET_UP_S
    while not path.exists():
        if time.monotonic() > deadline:
            raise MachineError(f"{path} is not there after {SET_UP_S:g} s; see output beside it")
        time.sleep(0.01)


def run(
    arm: Arm,
    n_jobs: int,
    mean_us: int,
    seconds: float,
    iterations: Mapping[str, str],
    *,
    job: str = JOB,
    guarantee: int | None = None,
    service_quota: Mapping[str, str] = MappingProxyType({}),
) -> Any:
    """Return the requests' times in ms and the jobs' units per second.

    There is no service if `mean_us` is 0. Without a `guarantee` it is ROOM points more than what
    the requests take.
    """

    def command(kind: str, *more: str) -> list[str]:
        if not kind.startswith("burner-"):
            own = arm.machine.command(kind, inside=arm.inside)
            return [*own, "--wait-file", "/out/begin", *more]
        given = ["--iterations", iterations[kind]] if kind in iterations else []
        program = "/usr/bin/burner" if arm.inside else str(arm.machine.build / "burner")
        unit = kind.split("-")[1]
        return [program, "--unit-us", unit, *given, "--wait-file", "/out/begin", *more]

    if guarantee is None:
        guarantee = ROOM + (100 * UNITS * UNIT_US // mean_us if mean_us else 0)
    jobs = [
        arm.start(
            f"job-{i}",
            command(job, "--seconds", "3600", "--out", "/out/progress.bin"),
            {
                "compute": str((100 - guarantee) // n_jobs),
                "compute-limit": "100",
                **({} if job.startswith("burner-") else {"memory": MEMORY}),
            },
        )
        for i in range(n_jobs)
    ]
    service = None
    if mean_us:
        options = ("--requests", str(mean_us), "--units", str(UNITS), "--seconds", str(seconds))
        service = arm.start(
            "service",
            command(SERVICE, *options, "--out", "/out/requests.bin"),
            {"compute": str(guarantee), **service_quota},
        )
    try:
        for out in [*jobs, *([service] if service else [])]:
            wait_for(out / "begin.ready")
        for out in jobs:
            (out / "begin").touch()
        time.sleep(SETTLE_S if job.startswith("burner-") else TRAINING_SETTLE_S)
        begin = time.monotonic()
        if service:
            (service / "begin").touch()
            output = (service.parent if arm.inside else service) / "output"
            while not output.read_text().strip():
                if time.monotonic() > begin + 10 * seconds + SET_UP_S:
                    raise MachineError(f"the service did not end; see {output}")
                time.sleep(0.05)
        else:
            time.sleep(seconds)
        passed = time.monotonic() - begin
        units = [_units(out, passed) for out in jobs]
    finally:
        arm.end()
    requests = _requests(service) if service else []
    return {"requests_ms": requests, "units_per_s": [round(n, 2) for n in units]}


def _units(out: Path, passed: float) -> float:
    """Return the units per second over the last part of the run; stamps are on the GPU's clock."""
    stamps = [stamp.time for stamp in read_stamps(out / "progress.bin")]
    if len(stamps) < 2:
        return 0.0
    late = [s for s in stamps if s >= stamps[-1] - int(passed * 1e9)]
    return (len(late) - 1) / ((late[-1] - late[0]) / 1e9) if len(late) > 1 else 0.0


def _requests(service: Path) -> list[float]:
    data = (service / "requests.bin").read_bytes()
    return [round(took / 1e6, 3) for _, took in struct.iter_unpack("<QQ", data)]


def label_of(mean_us: int, n_jobs: int, way: str, guarantee: int | None) -> str:
    """Return an arm's name; a guarantee is in it if it was asked for."""
    label = f"every-{mean_us}us-{n_jobs}-jobs-{way}"
    return label if guarantee is None else f"{label}-{guarantee}"


def summarise(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of each arm: ms, and percent of what one job does alone."""
    found = {}
    for arm in report["arms"]:
        times = sorted(arm["requests_ms"])
        name = label_of(arm["mean_us"], arm["jobs"], arm["arm"], arm.get("guarantee"))
        found[name] = {
            "n": len(times),
            "mean_ms": round(statistics.fmean(times), 3),
            "p99_ms": round(times[min(len(times) - 1, int(len(times) * 0.99))], 3),
            "jobs": [round(100 * n / report["solo_units_per_s"], 1) for n in arm["units_per_s"]],
        }
    return found


def show(one: Mapping[str, Any]) -> str:
    """Return an arm's figures as a row."""
    row = f"mean {one['mean_ms']:8.2f} ms  p99 {one['p99_ms']:8.2f} ms  n {one['n']}"
    jobs = one["jobs"]
    return f"{row}  jobs {' '.join(map(str, jobs))} = {sum(jobs):.1f} %" if jobs else row


def calibrate(machine: Machine, work: Path, job: str) -> tuple[dict[str, str], float]:
    """Return the iterations of each kind of unit, and the units per second of a job alone."""
    iterations: dict[str, str] = {}
    for one in (SERVICE, job):
        if not one.startswith("burner-"):
            continue
        program = [str(machine.build / "burner"), "--unit-us", one.split("-")[1]]
        done = subprocess.run(
            [*program, "--seconds", "0.5"],
            env={**os.environ, **machine.environment},
            capture_output=True,
            text=True,
            check=True,
        )
        iterations[one] = str(json.loads(done.stdout)["iterations"])
    solo = run(Outside(machine, work / "solo"), 1, 0, 3.0, iterations, job=job)["units_per_s"][0]
    return iterations, float(solo)


def _gpu(machine: Machine) -> dict[str, Any]:
    """Return a description of the GPU, as results have it."""
    machine.work /= "gpu"
    with Node(machine, keep_machine=True) as node:
        return asdict(name_gpu(node))


def main(argv: list[str] | None = None) -> int:
    """Measure; the status is 1 if an arm could not be run."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.latency", description=__doc__.split("\n", maxsplit=1)[0]
    )
    parser.add_argument("--output", type=Path, default=ROOT / "build/latency")
    parser.add_argument("--build", type=Path, default=ROOT / "build/meson")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each arm")
    parser.add_argument("--mean-us", type=int, nargs="+", default=[20000, 4000])
    parser.add_argument("--jobs", type=int, nargs="+", default=[1, 3])
    ways = [way.name for way in (*ALONE, *BESIDE)]
    parser.add_argument("--job", default=JOB, help="what the jobs do: burner-US, resnet18, ...")
    parser.add_argument(
        "--guarantees", type=int, nargs="+", default=[None],
        help="of the service, in percent, each in an arm of its own; the jobs share the rest",
    )  # fmt: skip
    parser.add_argument("--ways", nargs="+", choices=ways, default=ways)
    parser.add_argument("--simulated", action="store_true", help="also where there is a GPU")
    args = parser.parse_args(argv)
    args.compile = False
    args.output, args.build = args.output.resolve(), args.build.resolve()
    shutil.rmtree(args.output, ignore_errors=True)
    args.output.mkdir(parents=True)
    report: dict[str, Any] = {"arms": [], "run": describe_run(), "unit_us": UNIT_US, "units": UNITS}
    report["job"] = args.job
    try:
        machine = find_machine(args, args.output / "machine", args.build)
        with contextlib.closing(machine):
            iterations, solo = calibrate(machine, args.output, args.job)
            report |= {"gpu": _gpu(machine), "solo_units_per_s": solo}
            for mean_us, way, n_jobs, guarantee in plan(args):
                label = label_of(mean_us, n_jobs, way.name, guarantee)
                machine.work = args.output / label
                with open_arm(machine, args.output / label / "arm", way.scheduling) as arm:
                    got = run(
                        arm,
                        n_jobs,
                        mean_us,
                        args.seconds,
                        iterations,
                        job=args.job,
                        guarantee=guarantee,
                        service_quota=way.service,
                    )
                got |= {"arm": way.name, "jobs": n_jobs, "mean_us": mean_us}
                if guarantee is not None:
                    got["guarantee"] = guarantee
                report["arms"].append(got)
                row = show(list(summarise(report).values())[-1])
                share = "" if guarantee is None else f"{guarantee}/{100 - guarantee}"
                what = f"every {mean_us / 1000:g} ms, {n_jobs} jobs, {way.name:8} {share:5}"
                print(what, row, flush=True)
                keep(args.output, report)  # the arms that follow may take long
    except (MachineError, TidegateError, VdriverError, subprocess.SubprocessError) as e:
        print(f"latency: {e}", file=sys.stderr)
        return 1
    return 0


def plan(args: argparse.Namespace) -> Iterator[tuple[int, Way, int, int | None]]:
    """Yield each arm: mean time between requests in us, way, number of jobs and guarantee."""
    for mean_us in args.mean_us:
        alone = [(way, 0) for way in ALONE]
        beside = [(way, n) for n in args.jobs for way in BESIDE]
        for way, n_jobs in (*alone, *beside):
            if way.name not in args.ways:
                continue
            is_shared = n_jobs > 0 and way.scheduling is not None
            for guarantee in args.guarantees if is_shared else [None]:
                yield mean_us, way, n_jobs, guarantee


def keep(output: Path, report: Mapping[str, Any]) -> None:
    """Write the results so far."""
    text = json.dumps({**report, "summary": summarise(report)})
    (output / "latency.json").write_text(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
