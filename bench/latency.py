"""Measures how long requests take alongside endless work, with and without Tidegate.

`python -m bench.latency` runs a service that gets requests at random (Poisson arrivals, the same in
every arm) alongside jobs that keep the GPU busy, or several services that share the requests. A
request runs plain kernels, or a model in PyTorch (`--service`). For each arm it prints the mean
and the 99th percentile of the time from a request's arrival to its end, and the work of the jobs,
relative to that of one job alone. The arms, all in one run, are: the service alone, without
Tidegate and with it (`governed`); the service and the jobs without Tidegate (`native`), with grants
that gate launches (`gate`), with the GPU's own scheduler (`hardware`), and with that scheduler and
a service of class latency that has a cap (`latency`). The time of every request is kept in
latency.json.
"""

from __future__ import annotations

import abc
import argparse
import contextlib
import itertools
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
from bench.node import BenchNode
from bench.progress import read_stamps
from bench.provenance import describe_run
from governor.errors import TidegateError
from vdriver.errors import VdriverError

UNIT_US = 100
UNITS = 20
"""A request is 20 kernels of 0.1 ms, if the service does not run a model."""
MODELS = ("resnet18", "decode-graph")
TRIAL_US, TRIAL_S = 50_000, 3.0
"""Mean time between requests in us, and duration in seconds, of the run that times a model."""
SET_UP_S = 60.0
SETTLE_S = 1.0
"""Time for which the jobs run before the first request, in seconds."""
TRAINING_SETTLE_S = 3.0
"""The same for a job that trains a model."""
SERVICE = f"burner-{UNIT_US}"
JOB = "burner-500"
MEMORY = "4Gi"
"""Quota of a program in PyTorch."""
ROOM = 10
"""Guarantee of the services beyond what their requests take, in points; the jobs share the rest."""


class ArmLoad(NamedTuple):
    """The jobs and services in an arm."""

    n_jobs: int
    mean_us: int
    """Mean time between two requests to any service; 0 if there is no service."""
    seconds: float
    job: str = JOB
    service: str = SERVICE
    n_services: int = 1
    request_us: float = UNITS * UNIT_US
    """How long a request takes if nothing else is running."""
    asked: int | None = None
    """Guarantee of the services together, in percent; computed with ROOM if None."""

    @property
    def guarantee(self) -> int:
        """Guarantee of the services together, in percent."""
        if self.asked is not None:
            return self.asked
        return min(90, ROOM + (round(100 * self.request_us / self.mean_us) if self.mean_us else 0))


class SharingWay(NamedTuple):
    """How an arm shares the GPU; without Tidegate if `scheduling` is None."""

    name: str
    scheduling: str | None = None
    service: Mapping[str, str] = MappingProxyType({"compute-limit": "100"})


CAPPED = MappingProxyType({"compute-limit": "70", "class": "latency"})
ALONE = (SharingWay("alone"), SharingWay("governed", "hardware", CAPPED))
BESIDE = (
    SharingWay("native"),
    SharingWay("hardware", "hardware"),
    SharingWay("latency", "hardware", CAPPED),
    SharingWay("gate", "gate"),  # last: at half load a request takes seconds
)


class Site(abc.ABC):
    """Starts programs on a machine, in containers or outside."""

    inside: bool

    def __init__(self, machine: Machine, work: Path) -> None:
        self.machine, self.work = machine, work

    @abc.abstractmethod
    def start(self, name: str, arguments: Sequence[str], quota: Mapping[str, str]) -> Path:
        """Start a program, and return its directory, which the program sees as /out."""

    @abc.abstractmethod
    def end(self) -> None:
        """End the programs that were started."""


class Outside(Site):
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
        """Terminate the processes; each of them writes its results so far."""
        for process in self._running:
            process.terminate()
        for process in self._running:
            process.wait(SET_UP_S)


class NodeSite(Site):
    """Containers on a node with a governor."""

    inside = True

    def __init__(self, machine: Machine, work: Path, node: BenchNode) -> None:
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
def open_arm(machine: Machine, work: Path, scheduling: str | None) -> Iterator[Site]:
    """Provide the site of an arm with this scheduling, or without Tidegate if it is None."""
    if scheduling is None:
        yield Outside(machine, work)
        return
    with BenchNode(machine, settings={"scheduling": scheduling}, keep_machine=True) as node:
        yield NodeSite(machine, work, node)


def wait_for(path: Path) -> None:
    """Wait until a program reports that it is set up."""
    deadline = time.monotonic() + SET_UP_S
    while not path.exists():
        if time.monotonic() > deadline:
            raise MachineError(f"{path} does not exist after {SET_UP_S:g} s; see output next to it")
        time.sleep(0.01)


def command(arm: Site, kind: str, iterations: Mapping[str, str], *more: str) -> list[str]:
    """Return the command that starts a program of this kind in an arm."""
    if not kind.startswith("burner-"):
        own = arm.machine.command(kind, inside=arm.inside)
        return [*own, "--wait-file", "/out/begin", *more]
    given = ["--iterations", iterations[kind]] if kind in iterations else []
    program = "/usr/bin/burner" if arm.inside else str(arm.machine.build / "burner")
    unit = kind.split("-")[1]
    return [program, "--unit-us", unit, *given, "--wait-file", "/out/begin", *more]


def start_jobs(arm: Site, load: ArmLoad, iterations: Mapping[str, str]) -> list[Path]:
    """Start the jobs; return their directories."""
    quota = {
        "compute": str((100 - load.guarantee) // max(1, load.n_jobs)),
        "compute-limit": "100",
        **({} if load.job.startswith("burner-") else {"memory": MEMORY}),
    }
    options = ("--seconds", "3600", "--out", "/out/progress.bin")
    return [
        arm.start(f"job-{i}", command(arm, load.job, iterations, *options), quota)
        for i in range(load.n_jobs)
    ]


def start_services(
    arm: Site, load: ArmLoad, iterations: Mapping[str, str], quota: Mapping[str, str]
) -> list[Path]:
    """Start the services, which share the requests and the guarantee; return their directories."""
    if not load.mean_us:
        return []
    n = load.n_services
    is_model = not load.service.startswith("burner-")
    options = ["--requests", str(load.mean_us * n), "--seconds", str(load.seconds)]
    options += [] if is_model else ["--units", str(UNITS)]
    quota = {
        "compute": str(load.guarantee // n),
        **({"memory": MEMORY} if is_model else {}),
        **quota,
    }
    found = []
    for i in range(n):
        own = [*options, "--seed", str(1 + i), "--out", "/out/requests.bin"]
        name = f"service-{i}" if i else "service"
        found.append(arm.start(name, command(arm, load.service, iterations, *own), quota))
    return found


def run(
    arm: Site,
    load: ArmLoad,
    iterations: Mapping[str, str],
    service_quota: Mapping[str, str] = MappingProxyType({}),
) -> Any:
    """Return the requests' times in ms and the jobs' units per second."""
    try:
        jobs = start_jobs(arm, load, iterations)
        services = start_services(arm, load, iterations, service_quota)
        for out in [*jobs, *services]:
            wait_for(out / "begin.ready")
        for out in jobs:
            (out / "begin").touch()
        time.sleep(SETTLE_S if load.job.startswith("burner-") else TRAINING_SETTLE_S)
        begin = time.monotonic()
        for out in services:
            (out / "begin").touch()
        if services:
            for out in services:
                wait_end(
                    (out.parent if arm.inside else out) / "output",
                    begin + 10 * load.seconds + SET_UP_S,
                )
        else:
            time.sleep(load.seconds)
        passed = time.monotonic() - begin
        units = [_units(out, passed) for out in jobs]
    finally:
        arm.end()
    requests = [took for out in services for took in _requests(out)]
    if services and not requests:
        raise MachineError(f"no request arrived in {load.seconds:g} s: increase --seconds")
    return {
        "requests_ms": requests,
        "units_per_s": [round(n, 2) for n in units],
    }


def wait_end(output: Path, deadline: float) -> None:
    """Wait until a service has printed how many requests it answered."""
    while not output.read_text().strip():
        if time.monotonic() > deadline:
            raise MachineError(f"the service did not end; see {output}")
        time.sleep(0.05)


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


def label_of(arm: Mapping[str, Any]) -> str:
    """Return an arm's name, with the number of services if there are several, and any guarantee."""
    label = f"every-{arm['mean_us']}us-{arm['jobs']}-jobs-{arm['arm']}"
    n = arm.get("services", 1)
    label += f"-{n}-services" if n > 1 else ""
    return label if arm.get("guarantee") is None else f"{label}-{arm['guarantee']}"


def summarise(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of each arm, over all its rounds.

    Request times are in ms, the work of each job is a percentage of what a job does alone. If there
    are several rounds, the minimum and maximum of the work of all jobs together are added.
    """
    by_label: dict[str, list[Mapping[str, Any]]] = {}
    for arm in report["arms"]:
        by_label.setdefault(label_of(arm), []).append(arm)
    percent = 100 / report["solo_units_per_s"]
    found = {}
    for label, arms in by_label.items():
        times = sorted(time for arm in arms for time in arm["requests_ms"])
        jobs = [
            statistics.fmean(each) for each in zip(*(a["units_per_s"] for a in arms), strict=True)
        ]
        found[label] = {
            "n": len(times),
            "mean_ms": round(statistics.fmean(times), 3),
            "p99_ms": round(times[min(len(times) - 1, int(len(times) * 0.99))], 3),
            "jobs": [round(percent * n, 1) for n in jobs],
        }
        sums = [sum(arm["units_per_s"]) for arm in arms]
        if len(arms) > 1 and jobs:
            found[label]["jobs_from"] = round(percent * min(sums), 1)
            found[label]["jobs_to"] = round(percent * max(sums), 1)
    return found


def show(one: Mapping[str, Any]) -> str:
    """Return an arm's figures as a row."""
    row = f"mean {one['mean_ms']:8.2f} ms  p99 {one['p99_ms']:8.2f} ms  n {one['n']}"
    jobs = one["jobs"]
    return f"{row}  jobs {' '.join(map(str, jobs))} = {sum(jobs):.1f} %" if jobs else row


def calibrate(machine: Machine, work: Path, load: ArmLoad) -> tuple[dict[str, str], ArmLoad, float]:
    """Return the iterations for each kind of unit, the load with its requests' time, and a rate.

    The rate is the number of units per second of a job that runs alone.
    """
    iterations: dict[str, str] = {}
    for one in (load.service, load.job):
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
    if not load.service.startswith("burner-"):
        alone = load._replace(n_jobs=0, mean_us=TRIAL_US, seconds=TRIAL_S)
        times = run(Outside(machine, work / "trial"), alone, iterations)["requests_ms"]
        load = load._replace(request_us=round(1000 * statistics.median(times), 1))
    one_job = load._replace(n_jobs=1, mean_us=0, seconds=3.0)
    solo = run(Outside(machine, work / "solo"), one_job, iterations)["units_per_s"][0]
    return iterations, load, float(solo)


def _gpu(machine: Machine) -> dict[str, Any]:
    """Return a description of the GPU in the format of the results."""
    machine.work /= "gpu"
    with BenchNode(machine, keep_machine=True) as node:
        return asdict(name_gpu(node))


def main(argv: list[str] | None = None) -> int:
    """Measure; return 1 if an arm could not be run."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.latency", description=__doc__.split("\n", maxsplit=1)[0]
    )
    parser.add_argument("--output", type=Path, default=ROOT / "build/latency")
    parser.add_argument("--build", type=Path, default=ROOT / "build/meson")
    parser.add_argument("--seconds", type=float, default=20.0, help="duration of each arm")
    parser.add_argument(
        "--rounds", type=int, default=1, help="rounds of all arms; every other one reversed"
    )
    parser.add_argument("--mean-us", type=int, nargs="+", default=[20000, 4000])
    parser.add_argument("--jobs", type=int, nargs="+", default=[1, 3])
    ways = [way.name for way in (*ALONE, *BESIDE)]
    parser.add_argument("--job", default=JOB, help="work of the jobs: burner-US, resnet18, ...")
    parser.add_argument(
        "--service", default=SERVICE, choices=(SERVICE, *MODELS), help="work of a request"
    )
    parser.add_argument(
        "--services", type=int, nargs="+", default=[1], help="services that share the requests"
    )
    parser.add_argument(
        "--guarantees", type=int, nargs="+", default=[None],
        help="guarantees of the service in percent, each in an arm of its own; the jobs share the"
        " rest",
    )  # fmt: skip
    parser.add_argument("--ways", nargs="+", choices=ways, default=ways)
    parser.add_argument("--simulated", action="store_true", help="always use a simulated GPU")
    args = parser.parse_args(argv)
    args.compile = False
    args.output, args.build = args.output.resolve(), args.build.resolve()
    shutil.rmtree(args.output, ignore_errors=True)
    args.output.mkdir(parents=True)
    report: dict[str, Any] = {"arms": [], "run": describe_run(), "unit_us": UNIT_US, "units": UNITS}
    report |= {"job": args.job, "service": args.service}
    try:
        machine = find_machine(args, args.output / "machine", args.build)
        with contextlib.closing(machine):
            measure(args, machine, report)
    except (MachineError, TidegateError, VdriverError, subprocess.SubprocessError) as e:
        print(f"latency: {e}", file=sys.stderr)
        return 1
    return 0


def measure(args: argparse.Namespace, machine: Machine, report: dict[str, Any]) -> None:
    """Run all arms, and keep the results of each."""
    kind = args.service if args.service == SERVICE else f"service-{args.service}"
    if machine.kind == "simulated" and kind != SERVICE:
        raise MachineError(f"the service {args.service} needs a real GPU and PyTorch")
    base = ArmLoad(0, 0, args.seconds, args.job, kind)
    iterations, base, solo = calibrate(machine, args.output, base)
    report |= {"gpu": _gpu(machine), "solo_units_per_s": solo, "request_us": base.request_us}
    report["iterations"] = iterations
    for number, way, load in rounds(args, base):
        got = {"arm": way.name, "jobs": load.n_jobs, "mean_us": load.mean_us}
        got |= {"services": load.n_services} if load.n_services > 1 else {}
        got |= {"guarantee": load.asked} if load.asked is not None else {}
        got |= {"round": number} if args.rounds > 1 else {}
        label = label_of(got) + (f"-{number}" if args.rounds > 1 else "")
        machine.work = args.output / label
        with open_arm(machine, args.output / label / "arm", way.scheduling) as arm:
            got |= run(arm, load, iterations, way.service)
        report["arms"].append(got)
        row = show(summarise(report | {"arms": [got]})[label_of(got)])
        share = "" if load.asked is None else f"{load.asked}/{100 - load.asked}"
        many = f"{load.n_services} services, " if load.n_services > 1 else ""
        mean_ms = load.mean_us / 1000
        title = f"every {mean_ms:g} ms, {many}{load.n_jobs} jobs, {way.name:8} {share:5}"
        print(title, row, flush=True)
        keep(args.output, report)  # the remaining arms may take a long time


def rounds(args: argparse.Namespace, base: ArmLoad) -> Iterator[tuple[int, SharingWay, ArmLoad]]:
    """Yield each round's number with each of its arms; every other round has the reverse order.

    Therefore a drift during the run, such as that of clocks, favours no arm.
    """
    arms = list(plan(args, base))
    for number in range(args.rounds):
        for way, load in arms if number % 2 == 0 else reversed(arms):
            yield number, way, load


def plan(args: argparse.Namespace, base: ArmLoad) -> Iterator[tuple[SharingWay, ArmLoad]]:
    """Yield how each arm shares the GPU, and its load."""
    for mean_us, n_services in itertools.product(args.mean_us, args.services):
        alone = [(way, 0) for way in ALONE]
        beside = [(way, n) for n in args.jobs for way in BESIDE]
        for way, n_jobs in (*alone, *beside):
            if way.name not in args.ways:
                continue
            is_shared = n_jobs > 0 and way.scheduling is not None
            for asked in args.guarantees if is_shared else [None]:
                yield (
                    way,
                    base._replace(
                        n_jobs=n_jobs, mean_us=mean_us, n_services=n_services, asked=asked
                    ),
                )


def keep(output: Path, report: Mapping[str, Any]) -> None:
    """Write the results so far."""
    text = json.dumps({**report, "summary": summarise(report)})
    (output / "latency.json").write_text(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
