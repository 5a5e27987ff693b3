"""`python -m bench.overhead`: measures the control library's cost to callers of the driver API.

It runs bench/overhead.c natively and governed in a container, in turn (A B B A), each time as a new
process, and writes overhead.json with every sample. With `--stub` the driver is bench/stub.c, whose
functions return at once, so that only the control library's own cost remains; there is no container
then, only a grant page. With `--step` it compares PyTorch steps (bench.step).

Then it measures the same in one governed process that has both libraries: the control library, and
the driver's library behind it. Samples from the two alternate. This excludes differences between
processes, which can make a launch some 100 ns slower or faster.

A pair is a native run and the governed one that follows or precedes it. The difference is the
median over the pairs of the differences between the runs' medians; its interval is a bootstrap of
the pairs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.demo import find_machine
from bench.figures import at_least, in_turn, interval
from bench.machine import ROOT, Machine, MachineError, Simulated
from bench.node import BenchNode, Running, last_json
from bench.provenance import describe_run
from bench.sandbox import GrantSandbox, control_folder
from bench.step import KINDS, measure_steps, render_steps, summarise_steps
from governor.errors import TidegateError
from vdriver.errors import VdriverError
from vdriver.manifest import read_manifest

ALONE = (
    "launch", "launch-median", "alloc-async", "memory-info", "look-up-ours", "look-up", "load",
    "alloc", "alloc-1000", "alloc-100000",
)  # fmt: skip
"""Measurements that are taken alone, with an open grant."""
WITHIN = tuple(name for name in ALONE if name != "load")
"""Measurements that are taken against the driver's library in the same process."""
AGAINST = ("--against", "libcuda-origin.so.1")

BESIDE = ("launch-median",)
"""Measurements taken while another container wants the GPU; they exclude calls that wait."""

TITLES = {
    "alone": "alone",
    "within": "alone, both in one process",
    "beside": "while another container waits",
    "within_beside": "while another container waits, both in one process",
}
"""The parts of a report."""

STUB_UUID = b"tidegate stub 0."
RUN_S = 120.0
"""Time limit of one run, in seconds."""

Samples = dict[str, list[float]]
Arm = Callable[[Sequence[str]], Samples]


# ---- figures ----


def summarise(pairs: Sequence[dict[str, Samples]]) -> dict[str, dict[str, float]]:
    """Return each measurement's native and governed ns, and the difference with its interval."""
    summary = {}
    for measure in pairs[0]["native"]:
        native = [statistics.median(pair["native"][measure]) for pair in pairs]
        governed = [statistics.median(pair["governed"][measure]) for pair in pairs]
        differences = [b - a for a, b in zip(native, governed, strict=True)]
        low, high = interval(differences)
        summary[measure] = {
            "native_ns": round(statistics.median(native), 1),
            "governed_ns": round(statistics.median(governed), 1),
            "difference_ns": round(statistics.median(differences), 1),
            "low_ns": round(low, 1),
            "high_ns": round(high, 1),
        }
    return summary


def render_table(summary: dict[str, dict[str, float]]) -> str:
    """Return a summary as a table, in ns."""
    lines = [f"{'':22}{'native':>12}{'governed':>12}{'difference':>12}   95 %"]
    lines += [
        f"{name:22}{one['native_ns']:12.1f}{one['governed_ns']:12.1f}{one['difference_ns']:12.1f}"
        f"   {one['low_ns']:.1f} to {one['high_ns']:.1f}"
        for name, one in summary.items()
    ]
    return "\n".join(lines)


# ---- runs ----


def run_pairs(
    arms: dict[str, Arm], measures: Sequence[str], pairs: int
) -> list[dict[str, Samples]]:
    """Run native and governed in turn."""
    results = []
    for i, order in enumerate(in_turn(pairs)):
        results.append({name: arms[name](measures) for name in order})
        print(f"  pair {i + 1} of {pairs}", flush=True)
    return results


def read_samples(text: str, measures: Sequence[str]) -> Samples:
    """Return the program's samples; raise MachineError if a requested measurement is missing."""
    found = last_json(text)
    if sorted(found) != sorted(measures):
        last = text.strip().splitlines()[-1:] or ["it printed nothing"]
        raise MachineError(f"the program did not measure everything: {last[0][:200]}")
    return {name: [float(value) for value in found[name]] for name in measures}


def read_pairs(text: str, measures: Sequence[str]) -> list[dict[str, Samples]]:
    """Return the pairs of samples of a process with both libraries, each as if from two runs."""
    found = last_json(text)
    if sorted(found) != sorted(measures):
        last = text.strip().splitlines()[-1:] or ["it printed nothing"]
        raise MachineError(f"the program did not measure everything: {last[0][:200]}")
    return [
        {
            "native": {name: [float(found[name][i][0])] for name in measures},
            "governed": {name: [float(found[name][i][1])] for name in measures},
        }
        for i in range(len(found[measures[0]]))
    ]


def run_program(command: Sequence[str], environment: dict[str, str]) -> str:
    """Run the program outside a container, and return its output."""
    done = subprocess.run(
        command,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=RUN_S,
    )
    if done.returncode:
        raise MachineError(f"{command[0]} failed: {done.stderr.strip()[:200]}")
    return done.stdout


def measure_stub(args: argparse.Namespace) -> dict[str, Any]:
    """Measure with the stub as the driver, with an open grant and with a deadline."""
    control, stub = args.build / "libcontrol/libcuda.so.1", args.build / "libcuda-stub.so"
    control_folder(args.output / "governed", control, stub)
    (args.output / "native").mkdir()
    shutil.copy(stub, args.output / "native/libcuda.so.1")
    program = [str(args.build / "overhead"), *args.options]
    report: dict[str, Any] = {"gpu": {"kind": "stub", "name": "stub", "driver": "none"}}
    with GrantSandbox(args.output / "sandbox", [STUB_UUID]) as sandbox:

        def arm(name: str) -> Arm:
            environment = {"LD_LIBRARY_PATH": str(args.output / name)}

            def run(measures: Sequence[str]) -> Samples:
                before = sandbox.counter("launches")
                output = run_program(sandbox.command(*program, *measures), environment)
                if (sandbox.counter("launches") > before) != (name == "governed"):
                    raise MachineError(f"the {name} run was not {name}")
                return read_samples(output, measures)

            return run

        arms = {name: arm(name) for name in ("native", "governed")}
        report["alone"] = run_pairs(arms, ALONE, args.pairs)

        def within(measures: Sequence[str]) -> list[dict[str, Samples]]:
            environment = {"LD_LIBRARY_PATH": str(args.output / "governed")}
            command = sandbox.command(*program, *measures, *AGAINST)
            return read_pairs(run_program(command, environment), measures)

        report["within"] = within(WITHIN)
        # The grant must not end during the runs: a hand-over is not the library's own cost.
        sandbox.grant_until(time.monotonic_ns() + 10**13)
        report["beside"] = run_pairs(arms, BESIDE, args.pairs)
        report["within_beside"] = within(BESIDE)
    return report


class Contained:
    """The governed runs: each in its own container, all under one governor."""

    def __init__(self, node: BenchNode, options: Sequence[str]) -> None:
        self.node = node
        self.options = options
        self.n = 0

    def start(self, command: Sequence[str], **annotations: str) -> Running:
        """Start a container with a unique name."""
        self.n += 1
        return self.node.start(f"run{self.n}", command, {"memory": "4Gi", **annotations})

    def alone(self, measures: Sequence[str]) -> Samples:
        """Run with the whole GPU and no other container."""
        return read_samples(self._run(measures, compute="100"), measures)

    def beside(self, measures: Sequence[str]) -> Samples:
        """Run with half of the GPU, while a neighbour with the other half keeps it busy."""
        return read_samples(self._run_beside(measures), measures)

    def within(self, measures: Sequence[str]) -> list[dict[str, Samples]]:
        """Run alone, against the driver's library in the same process."""
        return read_pairs(self._run([*measures, *AGAINST], compute="100"), measures)

    def within_beside(self, measures: Sequence[str]) -> list[dict[str, Samples]]:
        """Run against the driver's library in the same process, alongside a neighbour."""
        return read_pairs(self._run_beside([*measures, *AGAINST]), measures)

    def _run_beside(self, arguments: Sequence[str]) -> str:
        machine = self.node.machine
        busy = [*machine.command("burner-500", inside=True), "--seconds", str(RUN_S)]
        neighbour = self.start([*busy, "--wait-file", "/out/begin"], compute="50")
        self.node.wait_ready([neighbour.out / "begin.ready"], 60)
        (neighbour.out / "begin").touch()
        output = self._run(arguments, compute="50")
        if neighbour.process.poll() is not None:
            raise MachineError("the neighbour ended before the measurement")
        self.node.kill(neighbour)
        self.node.wait(neighbour, 30)
        self.node.running.remove(neighbour)
        return output

    def _run(self, arguments: Sequence[str], **annotations: str) -> str:
        command = ["/usr/bin/overhead", *self.options, *arguments, "--leave-file", "/out/leave"]
        container = self.start(command, **annotations)
        self.node.wait_ready([container.out / "leave.ready"], RUN_S)
        self.node.list_containers()
        (container.out / "leave").touch()
        if self.node.wait(container, 30):
            raise MachineError(f"a container failed: {container.output.strip()[-200:]}")
        if not container.seen["devices"][0]["launches"]:
            raise MachineError("the governor saw no launch: the run was not governed")
        self.node.running.remove(container)
        return container.output


def measure_node(args: argparse.Namespace) -> dict[str, Any]:
    """Measure on a GPU, natively and in containers."""
    args.compile = False
    machine = find_machine(args, args.output, args.build)
    machine.programs.append(args.build / "overhead")
    program = [str(args.build / "overhead"), *args.options]
    report: dict[str, Any] = {}
    with BenchNode(machine) as node:
        version = read_manifest((node.driver_dir / "current").resolve()).version

        def native(measures: Sequence[str]) -> Samples:
            return read_samples(run_program([*program, *measures], machine.environment), measures)

        def native_beside(measures: Sequence[str]) -> Samples:
            busy = [*machine.command("burner-500", inside=False), "--seconds", str(RUN_S)]
            start = args.output / "begin"
            for path in (start, start.with_suffix(".ready")):
                path.unlink(missing_ok=True)
            with subprocess.Popen(
                [*busy, "--wait-file", str(start)],
                env={**os.environ, **machine.environment},
                stdout=subprocess.DEVNULL,
            ) as neighbour:
                try:
                    while not start.with_suffix(".ready").exists():
                        if neighbour.poll() is not None:
                            raise MachineError("the neighbour of a native run failed")
                        time.sleep(0.02)
                    start.touch()
                    samples = native(measures)
                    if neighbour.poll() is not None:
                        raise MachineError("the neighbour ended before the measurement")
                    return samples
                finally:
                    neighbour.kill()

        contained = Contained(node, args.options)
        report["alone"] = run_pairs(
            {"native": native, "governed": contained.alone}, ALONE, args.pairs
        )
        report["beside"] = run_pairs(
            {"native": native_beside, "governed": contained.beside}, BESIDE, max(args.pairs // 2, 2)
        )
        report["within"] = contained.within(WITHIN)
        report["within_beside"] = contained.within_beside(BESIDE)
        report["gpu"] = {"kind": machine.kind, "name": gpu_name(machine), "driver": version}
    return report


def measure_step(args: argparse.Namespace) -> dict[str, Any]:
    """Measure PyTorch steps on a GPU."""
    args.simulated = args.compile = False
    machine = find_machine(args, args.output, args.build)
    if machine.kind != "nvidia":
        machine.close()
        raise MachineError("--step needs an NVIDIA GPU and PyTorch")
    with BenchNode(machine) as node:
        version = read_manifest((node.driver_dir / "current").resolve()).version
        report = measure_steps(node, args.output, args.rounds, args.pairs, args.seconds)
    report["gpu"] = {"kind": machine.kind, "name": gpu_name(machine), "driver": version}
    return report


def gpu_name(machine: Machine) -> str:
    """Return the GPU's name as reported by the driver's nvidia-smi."""
    if isinstance(machine, Simulated):
        return "Tidegate Simulated GPU"
    done = subprocess.run(
        ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.splitlines()[0].strip()


def summarise_report(report: dict[str, Any]) -> dict[str, Any]:
    """Return a summary of the runs in a report."""
    summarise_one = summarise_steps if "train" in report else summarise
    kinds = [kind for kind in (*TITLES, *KINDS) if kind in report]
    return {kind: summarise_one(report[kind]) for kind in kinds}


def print_tables(summary: dict[str, Any]) -> None:
    """Print the measurements as tables."""
    if "train" in summary:
        print(f"\nms per step\n{render_steps(summary)}")
        return
    for kind, title in TITLES.items():
        print(f"\n{title}, ns\n{render_table(summary[kind])}")


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.overhead", description=__doc__.split("\n", maxsplit=1)[0]
    )
    parser.add_argument("--stub", action="store_true", help="use a driver that does nothing")
    parser.add_argument("--step", action="store_true", help="measure PyTorch steps, not calls")
    parser.add_argument("--simulated", action="store_true", help="always use a simulated GPU")
    parser.add_argument(
        "--pairs",
        type=at_least(1),
        help="number of pairs of a native and a governed run (10; 40 with --step)",
    )
    parser.add_argument(
        "--samples", type=at_least(1), default=20, help="batches of calls in a run (20)"
    )
    parser.add_argument(
        "--calls", type=at_least(1), help="calls in a batch (200; 20000 with --stub)"
    )
    parser.add_argument(
        "--seconds", type=float, default=0.2, help="duration of a run of steps, in seconds (0.2)"
    )
    parser.add_argument(
        "--rounds",
        type=at_least(1),
        default=8,
        help="number of rounds with --step, each with new processes (8)",
    )
    parser.add_argument("--output", type=Path, default=ROOT / "build/overhead")
    parser.add_argument("--build", type=Path, default=ROOT / "build/meson")
    args = parser.parse_args(argv)
    args.output, args.build = args.output.resolve(), args.build.resolve()
    args.pairs = args.pairs or (40 if args.step else 10)
    args.calls = args.calls or (20_000 if args.stub else 200)
    args.options = ["--samples", str(args.samples), "--calls", str(args.calls)]
    return args


def main(argv: list[str] | None = None) -> int:
    """Measure, print the tables and write overhead.json."""
    args = parse_arguments(argv)
    os.environ["PATH"] += ":/usr/sbin:/sbin"
    shutil.rmtree(args.output, ignore_errors=True)
    args.output.mkdir(parents=True)
    measure = measure_step if args.step else measure_stub if args.stub else measure_node
    try:
        report = measure(args)
    except (MachineError, TidegateError, VdriverError, subprocess.TimeoutExpired) as e:
        print(f"overhead: {e}", file=sys.stderr)
        return 1
    summary = summarise_report(report)
    report["run"] = describe_run()
    report["options"] = (
        {"rounds": args.rounds, "pairs": args.pairs, "seconds": args.seconds}
        if args.step
        else {"pairs": args.pairs, "samples": args.samples, "calls": args.calls}
    )
    report["summary"] = summary
    (args.output / "overhead.json").write_text(json.dumps(report) + "\n")
    print_tables(summary)
    return 0


if __name__ == "__main__":
    sys.exit(main())
