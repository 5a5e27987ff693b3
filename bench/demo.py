"""Runs the demo: containers with quotas share a GPU, and one requests more memory than its quota.

`python -m bench.demo` finds an NVIDIA GPU or falls back to the simulated one, mirrors the driver,
starts a governor, and runs real containers under a real runtime with Tidegate's hook in their
config.json. First the same jobs run together without Tidegate. The demo prints a table at
the end, and writes report.json, report.svg and progress.json to its output directory.

The delivered share is progress: the work done, relative to the work that the same job does alone in
the same time, measured outside any container and without Tidegate, in the same run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench.machine import ROOT, Machine, MachineError, Nvidia, Simulated, wait_set_up
from bench.node import BenchNode, Running, last_json
from bench.progress import (
    MAX_UNIT_NS,
    NS_PER_S,
    Profile,
    Progress,
    ProgressError,
    check_units,
    read_stamps,
    solo_profile,
)
from bench.report import (
    RefusedAllocation,
    ReportedContainer,
    ReportedGpu,
    build_report,
    render_table,
    write_report,
)
from governor.config import parse_quantity
from governor.errors import TidegateError
from vdriver.errors import VdriverError
from vdriver.manifest import read_manifest

BUSY = 0.25
"""Fraction of the processors that other programs may use before the demo warns about them."""

MIB = 1 << 20
ALLOWED, ASKED = 1024 * MIB, 2048 * MIB
"""Memory quota of the container that requests too much, and the size of its request, in bytes."""
NAMES = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta")
SETTLE_S = 1.0


def say(text: str) -> None:
    """Print one line of progress immediately."""
    print(text, flush=True)


def driver_answers() -> bool:
    """Return whether a kernel module serves /dev/nvidiactl; opening a leftover node fails."""
    try:
        os.close(os.open("/dev/nvidiactl", os.O_RDWR | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def find_machine(args: argparse.Namespace, work: Path, build: Path) -> Machine:
    """Return the machine with a real GPU if there is one, unless a simulated GPU is requested."""
    if not args.simulated and driver_answers():
        return Nvidia(work, build, options=["--compile"] if args.compile else [])
    return Simulated(work, build)


def run_solo(
    machine: Machine, job: str, seconds: float, longest_ns: float = MAX_UNIT_NS
) -> Profile:
    """Run a job alone, outside any container, and return the durations of its units."""
    out = machine.work / "solo" / f"{job}.bin"
    out.parent.mkdir(parents=True, exist_ok=True)
    command = [*machine.command(job, inside=False), "--seconds", str(seconds), "--out", str(out)]
    done = subprocess.run(
        command,
        env={**os.environ, **machine.environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=seconds + 300,
    )
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        raise MachineError(f"the job {job} failed alone: {' '.join(last)}")
    machine.remember(job, last_json(done.stdout))
    profile = solo_profile(read_stamps(out))
    check_units(profile, longest_ns)
    return profile


def run_without(
    machine: Machine, jobs: dict[str, str], profiles: dict[str, Profile], seconds: float
) -> dict[str, Progress]:
    """Run the jobs at the same time without Tidegate; return the progress of each."""
    root = machine.work / "without"
    shutil.rmtree(root, ignore_errors=True)
    with contextlib.ExitStack() as stack:
        started = []
        for i, job in enumerate(jobs.values()):
            own = root / str(i)
            own.mkdir(parents=True)
            command = [
                *machine.command(job, inside=False), "--seconds", str(seconds + 2 * SETTLE_S),
                "--out", str(own / "progress.bin"), "--wait-file", str(own / "begin"),
            ]  # fmt: skip
            output = stack.enter_context((own / "output").open("w"))
            environment = {**os.environ, **machine.environment}
            process = stack.enter_context(
                subprocess.Popen(command, env=environment, stdout=output, stderr=output)
            )
            stack.callback(process.kill)
            started.append(process)
        wait_set_up(root, started)
        for i in range(len(started)):
            (root / str(i) / "begin").touch()
        for i, process in enumerate(started):
            if process.wait(seconds + 120):
                last = (root / str(i) / "output").read_text(errors="replace").strip()[-200:]
                raise MachineError(f"a job failed while the others ran: {last}")
    return {
        name: Progress(read_stamps(root / str(i) / "progress.bin"), profiles[job])
        for i, (name, job) in enumerate(jobs.items())
    }


def watch(node: BenchNode, until: float, began: float, quotas: dict[str, int]) -> None:
    """Show once a second, until a given time, how much the governor has charged each container.

    On a terminal each line replaces the previous one.
    """
    in_place = sys.stdout.isatty()
    before: dict[str, int] = {}
    last = time.monotonic()
    while (now := time.monotonic()) < until:
        time.sleep(min(1.0, max(0.0, until - now)))
        node.list_containers()
        elapsed = time.monotonic() - last
        last = time.monotonic()
        cells = []
        for container in node.running:
            if container.name not in quotas or not container.seen:
                continue
            device = container.seen["devices"][0]
            charged = device["charged_ns"]
            if container.name in before:
                share = (charged - before[container.name]) / elapsed / 1e7
                bar = "#" * round(share / 5)
                cells.append(f"{container.name} {share:5.1f} % {bar:<10}")
            before[container.name] = charged
        if cells:
            line = f"  {last - began:5.1f} s  " + "  ".join(cells)
            print(f"\r{line}\x1b[K" if in_place else f"{line}\n", end="", flush=True)
    if in_place:
        print(flush=True)


def ask_for_too_much(
    node: BenchNode, limit: int, requested: int, job: str
) -> tuple[RefusedAllocation, int]:
    """Run a container that allocates more than its quota; return the result and its exit status."""
    arguments = [*node.machine.command(job, inside=True), "--allocate", str(requested)]
    container = node.start("greedy", arguments, {"memory": str(limit), "compute": "1"})
    status = node.wait(container, 120)
    answer = last_json(container.output)
    result = str(answer.get("result", ""))
    if not result:
        raise MachineError(
            f"the container that asks for too much ended with status {status}: "
            + " ".join(container.output.split())[-400:]
        )
    return RefusedAllocation(requested, limit, result), status


def name_gpu(node: BenchNode) -> ReportedGpu:
    """Return the GPU as the driver's own NVML names it."""
    from governor.daemon import original_nvml

    code = (
        "import sys, json; from vdriver.nvml import Nvml\n"
        "with Nvml(sys.argv[1]) as n: print(json.dumps([n.gpus()[0].name, n.driver_version()]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(original_nvml(str(node.driver_dir)))],
        cwd=ROOT,
        env={**os.environ, **node.machine.environment},
        capture_output=True,
        text=True,
        check=True,
    )
    name, driver = json.loads(done.stdout)
    return ReportedGpu(node.machine.kind, name, driver)


def run_alone(machine: Machine, jobs: Iterable[str]) -> dict[str, Profile]:
    """Return the duration of each job's units when the job has the GPU to itself."""
    profiles: dict[str, Profile] = {}
    for job in dict.fromkeys(jobs):
        say(f"alone, without Tidegate: {job}, {machine.solo_seconds:g} s")
        profiles[job] = run_solo(machine, job, machine.solo_seconds)
    return profiles


def wait_for_result(
    node: BenchNode,
    container: Running,
    *,
    quota: int,
    memory: int,
    profile: Profile,
    without: Progress | None,
) -> ReportedContainer:
    """Wait for a container to end, and return its results."""
    status = node.wait(container, 120)
    return ReportedContainer(
        name=container.name,
        compute=quota,
        memory_limit=memory,
        memory_peak=container.memory_peak,
        exit=status,
        progress=Progress(read_stamps(container.out / "progress.bin"), profile),
        profile=profile,
        without=without,
    )


def measure(
    args: argparse.Namespace, machine: Machine
) -> tuple[dict[str, Any], list[ReportedContainer]]:
    """Run everything, and return the report and the containers' results."""
    quotas = dict(zip(NAMES, args.quotas, strict=False))
    jobs = dict(zip(quotas, args.jobs * len(quotas), strict=False))
    memory = parse_quantity(args.memory, "--memory")
    settings = {"scheduling": "auto", **dict(args.set)}
    with BenchNode(machine, runtime=args.runtime, settings=settings) as node:
        gpu = name_gpu(node)
        manifest = read_manifest((node.driver_dir / "current").resolve())
        say(f"GPU: {gpu.name} ({gpu.kind}), driver {gpu.driver}, mirror {manifest.generation}")
        profiles = run_alone(machine, jobs.values())
        without = {}
        if args.without:
            say(f"all together, without Tidegate: {args.without:g} s")
            without = run_without(machine, jobs, profiles, args.without)
        say(
            f"{len(quotas)} containers under {args.runtime}: "
            + ", ".join(f"{name} {quota} % {jobs[name]}" for name, quota in quotas.items())
        )
        say(f"halfway, container greedy, with {ALLOWED // MIB} MiB, asks for {ASKED // MIB} MiB")
        containers = start_all(node, args, quotas, jobs, memory)
        begin = time.clock_gettime_ns(time.CLOCK_MONOTONIC) + int(SETTLE_S * NS_PER_S)
        began = time.monotonic()
        half = began + SETTLE_S + args.seconds / 2
        watch(node, half, began, quotas)
        refused, refused_exit = ask_for_too_much(node, ALLOWED, ASKED, next(iter(jobs.values())))
        say(f"  greedy: {refused.result}")
        watch(node, began + SETTLE_S + args.seconds, began, quotas)
        node.list_containers()
        seen = {container.name: container.seen for container in containers}
        results = [
            wait_for_result(
                node,
                one,
                quota=quotas[one.name],
                memory=memory,
                profile=profiles[jobs[one.name]],
                without=without.get(one.name),
            )
            for one in containers
        ]
        # The simulated GPU's clock is that of this machine.
        whole = (begin, begin + int(args.seconds * NS_PER_S))
        span = whole if machine.kind == "simulated" else None
        report = build_report(
            gpu,
            results,
            refused,
            span=span or inner_span(results, args.seconds),
            detail={
                "jobs": jobs,
                "runtime": args.runtime,
                "refused_exit": refused_exit,
                "settings": settings,
                "governor": seen,
            },
        )
    return report, results


def inner_span(results: list[ReportedContainer], seconds: float) -> tuple[int, int]:
    """Return the span in which all jobs ran, less the settling time, on the GPU's own clock."""
    begin = max(one.progress.begin for one in results) + int(SETTLE_S * NS_PER_S)
    end = min(one.progress.end for one in results)
    return begin, min(end, begin + int(seconds * NS_PER_S))


def start_all(
    node: BenchNode,
    args: argparse.Namespace,
    quotas: dict[str, int],
    jobs: dict[str, str],
    memory: int,
) -> list[Running]:
    """Start the containers, wait until each is set up, and make them begin together."""
    containers = []
    take = max(memory - parse_quantity(args.leave, "--leave"), 0)
    for name, quota in quotas.items():
        arguments = [
            *node.machine.command(jobs[name], inside=True),
            "--seconds", str(args.seconds + SETTLE_S + 2),
            "--out", "/out/progress.bin",
            "--wait-file", "/out/begin",
        ]  # fmt: skip
        if node.machine.kind == "simulated":
            arguments += ["--memory", str(take)]
        annotations = {"compute": str(quota), "memory": str(memory)}
        containers.append(node.start(name, arguments, annotations))
    node.wait_ready([c.out / "begin.ready" for c in containers], 240)
    node.list_containers()
    for container in containers:
        (container.out / "begin").touch()
    return containers


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.demo", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument(
        "--without", type=float, default=6, metavar="SECONDS",
        help="how long the jobs first run together without Tidegate (6); 0: not at all",
    )  # fmt: skip
    parser.add_argument(
        "--quotas",
        type=lambda text: [int(part) for part in text.split(",")],
        default=[45, 30, 15],
        help="guaranteed shares in percent (45,30,15)",
    )
    parser.add_argument(
        "--jobs",
        type=lambda text: text.split(","),
        help="jobs of the containers, assigned in turn (on a real GPU: resnet18,transformer,gru)",
    )
    parser.add_argument("--memory", default="3Gi", help="memory quota of each container (3Gi)")
    parser.add_argument(
        "--leave",
        default="768Mi",
        help="part of the quota that a simulated job leaves free (768Mi)",
    )
    parser.add_argument("--output", type=Path, default=ROOT / "build/demo")
    parser.add_argument("--build", type=Path, default=ROOT / "build/meson")
    parser.add_argument("--runtime", default="runc", help="runc or crun")
    parser.add_argument("--simulated", action="store_true", help="always use a simulated GPU")
    parser.add_argument("--compile", action="store_true", help="torch.compile in the workloads")
    parser.add_argument(
        "--set",
        type=lambda text: (text.partition("=")[0], json.loads(text.partition("=")[2])),
        action="append",
        default=[],
        metavar="OPTION=VALUE",
        help="an option of the governor's configuration",
    )
    return parser.parse_args(argv)


def processors_taken(seconds: float = 0.5, stat: Path = Path("/proc/stat")) -> float:
    """Return how many processors other programs keep busy, sampled over `seconds`."""

    def idle_and_all() -> tuple[int, int]:
        # user nice system idle iowait irq softirq steal; guest times are part of user's: proc(5)
        times = [int(field) for field in stat.read_text().split("\n", 1)[0].split()[1:9]]
        return times[3] + times[4], sum(times)

    idle, whole = idle_and_all()
    time.sleep(seconds)
    idle_now, whole_now = idle_and_all()
    passed = whole_now - whole
    return (os.cpu_count() or 1) * (1 - (idle_now - idle) / passed) if passed else 0.0


def load_line(taken: float) -> str:
    """Return a warning about the load of other programs, or an empty string if it is small."""
    if taken <= BUSY * (os.cpu_count() or 1):
        return ""
    return (
        f"demo: other programs keep {taken:.1f} of {os.cpu_count()} processors busy: "
        "shares may be off; stop those programs, or do not rely on this run"
    )


def main(argv: list[str] | None = None) -> int:
    """Run the demo; return 0 if the report could be made."""
    args = parse_arguments(argv)
    os.environ["PATH"] += ":/usr/sbin:/sbin"
    if os.geteuid() != 0:
        print("demo: mounts and containers need root; run it as root", file=sys.stderr)
        return 77
    if shutil.which(args.runtime) is None:
        print(
            f"demo: {args.runtime} is not installed; apt-get install {args.runtime}",
            file=sys.stderr,
        )
        return 69
    args.output, args.build = args.output.resolve(), args.build.resolve()
    shutil.rmtree(args.output, ignore_errors=True)
    args.output.mkdir(parents=True)
    try:
        if busy := load_line(processors_taken()):
            say(busy)
        machine = find_machine(args, args.output, args.build)
        if args.jobs is None:
            args.jobs = (
                ["burn"] if machine.kind == "simulated" else ["resnet18", "transformer", "gru"]
            )
        report, results = measure(args, machine)
    except (MachineError, ProgressError, TidegateError, VdriverError) as e:
        print(f"demo: {e}", file=sys.stderr)
        return 1
    write_report(args.output, report, results)
    say("")
    say(render_table(report))
    if busy:  # again, next to the shares
        say(f"\n{busy}")
    say(f"\n{args.output}/report.json\n{args.output}/report.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
