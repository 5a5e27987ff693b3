"""`python -m bench.overhead --step`: times training steps and decoding, natively and governed.

Each arm is a process that is warmed up and runs steps for a moment on request, while the other one
is idle. The two values of a pair are thus taken within about half a second, and do not include
start-up time. The container is alone and has the whole GPU. Both arms stay on the same processors.

Two processes of the same program differ by up to a percent for as long as they live, depending on
where their memory is and on which processor each thread runs. There are therefore rounds, each with
two new processes and many pairs, and the bound accounts for the differences between rounds as well
as those between pairs.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.figures import bootstrap_rounds, in_turn
from bench.machine import ROOT, Machine, MachineError
from bench.node import BenchNode

KINDS = ("train", "decode-graph", "decode")
READY_S = 180.0
LATE_S = 30.0
"""Time that a run of steps may take beyond its duration, in seconds."""

N_CORES = 4

Pair = dict[str, dict[str, float]]
Round = list[Pair]


class Stepper:
    """A process controlled by files in `orders`; `failed` returns why it has ended, or None."""

    def __init__(self, orders: Path, seconds: float, failed: Callable[[], str | None]) -> None:
        self.orders = orders
        self.seconds = seconds
        self.failed = failed
        self.number = 0

    def _wait(self, path: Path, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not path.exists():
            reason = self.failed()
            if reason is not None:
                raise MachineError(f"a process that runs steps ended: {reason}")
            if time.monotonic() > deadline:
                raise MachineError(f"no {path.name} within {seconds:g} s")
            time.sleep(0.005)

    def ready(self) -> None:
        """Wait until the process is warmed up."""
        self._wait(self.orders / "ready", READY_S)

    def run(self) -> dict[str, float]:
        """Make the process run steps; return their number, total time, and the median step."""
        (self.orders / f"go-{self.number}").touch()
        done = self.orders / f"done-{self.number}"
        self._wait(done, self.seconds + LATE_S)
        self.number += 1
        answer = json.loads(done.read_text())
        return {name: float(answer[name]) for name in ("steps", "seconds", "step_ms")}

    def end(self) -> None:
        """Make the process end."""
        (self.orders / "end").touch()


def worker(kind: str, orders: Path, seconds: float, *, inside: bool) -> list[str]:
    """Return the command for a process that runs steps."""
    folder = Path("/workload") if inside else ROOT / "examples" / "workloads"
    return [
        sys.executable, str(folder / "torch_step.py"), "--cores", cores(),
        "--kind", kind, "--orders", str(orders), "--seconds", str(seconds),
    ]  # fmt: skip


def cores() -> str:
    """Return the processors that both arms use: the last N_CORES available ones."""
    return ",".join(map(str, sorted(os.sched_getaffinity(0))[-N_CORES:]))


@contextlib.contextmanager
def native_arm(
    command: Sequence[str], orders: Path, seconds: float, machine: Machine | None = None
) -> Iterator[Stepper]:
    """Run a process outside a container."""
    orders.mkdir(parents=True)
    environment = {**os.environ, **(machine.environment if machine else {})}
    log = orders / "output"
    with (
        log.open("w") as output,
        subprocess.Popen(command, env=environment, stdout=output, stderr=output) as process,
    ):

        def failed() -> str | None:
            if process.poll() is None:
                return None
            return f"status {process.returncode}, {log.read_text().strip()[-300:]}"

        try:
            yield Stepper(orders, seconds, failed)
            (orders / "end").touch()
            process.wait(LATE_S)
        finally:
            process.kill()


@contextlib.contextmanager
def governed_arm(node: BenchNode, kind: str, number: int, seconds: float) -> Iterator[Stepper]:
    """Run a process in a container that has the whole GPU."""
    command = worker(kind, Path("/out"), seconds, inside=True)
    container = node.start(f"step-{kind}-{number}", command, {"memory": "16Gi", "compute": "100"})

    def failed() -> str | None:
        status = container.process.poll()
        if status is None:
            return None
        text = (container.bundle / "output").read_text(errors="replace")
        return f"status {status}, {text.strip()[-300:]}"

    try:
        arm = Stepper(container.out, seconds, failed)
        yield arm
        node.list_containers()
        if not container.seen["devices"][0]["launches"]:
            raise MachineError("the governor saw no launch: the container was not governed")
        arm.end()
        node.wait(container, LATE_S)
    finally:
        node.delete(container)
        node.running.remove(container)


def run_steps(arms: Mapping[str, Stepper], pairs: int) -> list[Pair]:
    """Make both processes run steps in turn; discard the first run of each."""
    for arm in arms.values():
        arm.ready()
    for arm in arms.values():
        arm.run()
    return [{name: arms[name].run() for name in order} for order in in_turn(pairs)]


def summarise_steps(rounds: Sequence[Round]) -> dict[str, float]:
    """Return the ms of a step in each arm, and how much slower governed steps are, in percent.

    The latter is the mean over the rounds of the median of a round's pairs. `upper_95_percent` is
    the bound below which it lies with 95 % confidence.
    """
    took = {
        name: [step_ms(pair[name]) for pairs in rounds for pair in pairs]
        for name in ("native", "governed")
    }
    slower = [[100 * (slowdown(pair) - 1) for pair in pairs] for pairs in rounds]
    means = bootstrap_rounds(slower)
    return {
        "native_ms": round(statistics.median(took["native"]), 4),
        "governed_ms": round(statistics.median(took["governed"]), 4),
        "slower_percent": round(statistics.mean(map(statistics.median, slower)), 3),
        "upper_95_percent": round(means[round(0.95 * len(means)) - 1], 3),
    }


def slowdown(pair: Pair) -> float:
    """Return the median governed step as a multiple of the median native one.

    On a shared machine, a process occasionally loses its processor. One such pause is a tenth of
    the time of 40 steps of 4 ms, so a mean would hide the cost of the calls.
    """
    return step_ms(pair["governed"]) / step_ms(pair["native"])


def step_ms(turn: Mapping[str, float]) -> float:
    """Return the median step of a turn, or the mean if the result was made without medians."""
    return turn.get("step_ms") or 1000 * turn["seconds"] / turn["steps"]


def measure_steps(
    node: BenchNode, output: Path, rounds: int, pairs: int, seconds: float
) -> dict[str, Any]:
    """Measure each kind of step on a node; return the rounds of each."""
    report: dict[str, Any] = {}
    for kind in KINDS:
        report[kind] = []
        for number in range(rounds):
            orders = output / f"native-{kind}-{number}"
            command = worker(kind, orders, seconds, inside=False)
            with (
                native_arm(command, orders, seconds, node.machine) as native,
                governed_arm(node, kind, number, seconds) as governed,
            ):
                report[kind].append(run_steps({"native": native, "governed": governed}, pairs))
            middle = statistics.median(slowdown(pair) for pair in report[kind][-1])
            print(f"  {kind}, round {number + 1} of {rounds}: x{middle:.4f}", flush=True)
        print(f"  {kind}: {summarise_steps(report[kind])}", flush=True)
    return report


def render_steps(summary: Mapping[str, Mapping[str, float]]) -> str:
    """Return the summary as a table."""
    lines = [f"{'':14}{'native':>10}{'governed':>10}{'slower':>10}   upper 95 %"]
    lines += [
        f"{kind:14}{one['native_ms']:10.3f}{one['governed_ms']:10.3f}"
        f"{one['slower_percent']:8.2f} %   {one['upper_95_percent']:.2f} %"
        for kind, one in summary.items()
    ]
    return "\n".join(lines)
