"""`python -m bench.parking`: several models on one GPU that does not have enough memory for all.

Each container holds memory with known contents: blocks of the driver API, or the weights of a model
in PyTorch (model.py and torch_model.py in examples/workloads/programs). The models are asked
in turn, so the one that is asked has to come back from host memory while another one leaves.
Alongside them, a container whose memory is never parked runs kernels all the time. Then two
containers that always compute, and do not fit together, use the GPU in turn. Before the models
start, the same program is asked without Tidegate, with the GPU to itself. The part `deaths`
(deaths.py) kills processes while their memory moves.

The run fails if contents differ, if no answer comes within 2 minutes, or if a container holds more
device memory than its quota. It reports how long the first kernel waits, at what rate memory
moves, what the neighbour loses and what two busy containers deliver. The results are written to
parking.json.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.arms import ArmContainer
from bench.deaths import judge_deaths, measure_deaths, summarise_deaths
from bench.demo import driver_answers, name_gpu
from bench.events import pid_of
from bench.images import INSIDE, SOURCE, NvidiaImage, SimulatedImage
from bench.machine import ROOT, Machine, MachineError
from bench.node import BenchNode, Running, last_json
from bench.progress import NS_PER_S
from bench.provenance import describe_run
from bench.quota import FOREVER_S, start_one
from bench.quota_measure import wait_for_end
from governor.errors import TidegateError
from vdriver.errors import VdriverError

MIB = 1 << 20


@dataclass(frozen=True)
class ModelProgram:
    """A program in examples/workloads/programs.

    `more` is the part of its quota, in bytes, beyond the memory that it holds: for contexts,
    modules and working memory.
    """

    file: str
    more: int


PROGRAMS = {
    "driver": ModelProgram("model.py", 768 * MIB),
    "torch": ModelProgram("torch_model.py", 1536 * MIB),
}
BUSY = PROGRAMS["driver"]
PARTS = ("models", "pair", "deaths")
READY_S = 300.0
ANSWER_S = 120.0
PAUSE_S = 1.1
"""Seconds between two questions: the minimum time for which a container stays on the GPU."""
DEVICE = "0"
"""All containers share this GPU, even if the machine has more."""
NEIGHBOUR = ArmContainer(30, limit=100)


def read_turns(path: Path) -> list[tuple[float, int]]:
    """Return pairs of a time in seconds and the number of turns until that time."""
    lines = (line.split() for line in path.read_text().splitlines())
    return [(float(line[0]), int(line[1])) for line in lines if len(line) == 2]


def rate_between(turns: Sequence[tuple[float, int]], begin: float, end: float) -> float:
    """Return the turns per second in a span of time."""
    inside = [one for one in turns if begin <= one[0] <= end]
    if len(inside) < 2:
        return 0.0
    return (inside[-1][1] - inside[0][1]) / (end - begin)


def model_command(
    machine: Machine, held: int, program: ModelProgram = BUSY, *, busy: bool = False
) -> list[str]:
    """Return the command for a model that holds `held` bytes, in a container of this machine."""
    return [
        machine.python,  # type: ignore[attr-defined]
        f"{INSIDE}/{program.file}",
        "--bytes", str(held),
        "--out", "/out",
        *(["--busy"] if busy else []),
    ]  # fmt: skip


def start_model(
    node: BenchNode,
    name: str,
    held: int,
    program: ModelProgram = BUSY,
    *,
    busy: bool = False,
    compute: str = "10",
) -> Running:
    """Start a container that holds `held` bytes, and wait until it does."""
    quota = {
        "memory": str(held + program.more),
        "compute": compute,
        "compute-limit": "100",
        "devices": DEVICE,
    }
    container = node.start(name, model_command(node.machine, held, program, busy=busy), quota)
    node.wait_ready([container.out / "begin.ready"], READY_S)
    return container


def ask_model(out: Path, number: int) -> dict[str, Any]:
    """Ask a model, and return its answer with the times of the question and the answer, in s."""
    asked = time.monotonic()
    (out / f"ask.{number}").touch()
    deadline = asked + ANSWER_S
    path = out / f"answer.{number}"
    while not path.exists():
        if time.monotonic() > deadline:
            raise MachineError(f"a model did not answer within {ANSWER_S:g} s")
        time.sleep(0.001)
    return {"asked": asked, "answered": time.monotonic(), **json.loads(path.read_text())}


def measure_native(
    machine: Machine, python: str, held: int, rounds: int, program: ModelProgram
) -> list[dict[str, Any]]:
    """Return the answers of the program without Tidegate, with the GPU to itself."""
    out = machine.work / "native"
    out.mkdir()
    environment = {**os.environ, **machine.environment}
    command = [python, str(SOURCE / program.file), "--bytes", str(held), "--out", str(out)]
    model = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + READY_S
        while not (out / "begin.ready").exists():
            if model.poll() is not None or time.monotonic() > deadline:
                raise MachineError("the model failed without Tidegate")
            time.sleep(0.02)
        answers = [ask_model(out, i) for i in range(rounds)]
        (out / "stop").touch()
        output, _ = model.communicate(timeout=READY_S)
    finally:
        model.kill()
        model.wait()
    if last_json(output).get("wrong") != 0:
        raise MachineError(f"the contents are wrong without Tidegate: {output.strip()}")
    return answers


def parking_of(node: BenchNode, container: Running) -> dict[str, Any]:
    """Return what the governor reports about a container's parked memory."""
    reported = node.list_containers()[container.identifier]
    used = reported["devices"][0]["memory_used"]
    return {**reported["parking"], "used": used, "limit": reported["devices"][0]["memory_limit"]}


def finish(node: BenchNode, container: Running) -> dict[str, Any]:
    """Make a model end, and return its report on its contents."""
    (container.out / "stop").touch()
    status = node.wait(container, READY_S)
    answer = last_json(container.output)
    if status or not answer:
        raise MachineError(f"a model ended with {status}: {container.output.strip()[-300:]}")
    return answer


def measure_models(
    node: BenchNode, n_models: int, held: int, rounds: int, program: ModelProgram
) -> dict[str, Any]:
    """Ask models in turn, alongside a container that computes; return the measurements."""
    models = []
    for i in range(n_models):
        models.append(start_model(node, f"model-{i}", held, program))
        print(f"model {i + 1} of {n_models} has its memory", flush=True)
    neighbour = start_one(node, NEIGHBOUR, FOREVER_S, more={"parking": "never", "devices": DEVICE})
    node.wait_ready([neighbour.out / "begin.ready"], READY_S)
    (neighbour.out / "begin").touch()
    time.sleep(2)
    asked = []
    for i in range(rounds):
        for j, model in enumerate(models):
            before = parking_of(node, model)
            answer = ask_model(model.out, i)
            after = parking_of(node, model)
            asked.append({"model": j, **answer, "before": before, "after": after})
            time.sleep(PAUSE_S)
        waits = [one["first_s"] for one in asked[-n_models:]]
        print(
            f"round {i + 1} of {rounds}: first kernels after {min(waits)} to {max(waits)} s",
            flush=True,
        )
    ends = [finish(node, model) for model in models]
    os.kill(pid_of(node, neighbour), signal.SIGTERM)
    stamps = wait_for_end(node, [neighbour])[0]
    times = [(one.time - stamps.ahead_ns) / NS_PER_S for one in stamps.stamps]
    return {"asked": asked, "ends": ends, "neighbour": neighbour_rates(times, asked)}


def neighbour_rates(times: Sequence[float], asked: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the neighbour's units per second while a model comes back and while none moves."""

    def rate(spans: Sequence[tuple[float, float]]) -> float:
        seconds = sum(end - begin for begin, end in spans)
        return round(sum(any(a < one <= b for a, b in spans) for one in times) / seconds, 1)

    moves = [(one["asked"], one["asked"] + one["first_s"]) for one in asked]
    rests = [(one["answered"] + 0.2, one["answered"] + PAUSE_S - 0.1) for one in asked]
    return {"moving": rate(moves), "resting": rate(rests)}


def measure_pair(node: BenchNode, held: int, seconds: float) -> dict[str, Any]:
    """Let one container compute alone, then two that do not fit together; return their rates."""
    first = start_model(node, "busy-0", held, busy=True, compute="40")
    begun = time.monotonic()
    time.sleep(min(seconds / 4, 10))
    alone = rate_between(read_turns(first.out / "turns"), begun + 1, time.monotonic())
    second = start_model(node, "busy-1", held, busy=True, compute="40")
    # The first move of each container is slow, because its host memory is being pinned.
    deadline = time.monotonic() + READY_S
    while not all(parking_of(node, one)["moved"] > held for one in (first, second)):
        if time.monotonic() > deadline:
            raise MachineError("two busy containers did not take turns")
        time.sleep(0.1)
    begun = time.monotonic()
    time.sleep(seconds)
    ended = time.monotonic()
    pair = [read_turns(one.out / "turns") for one in (first, second)]
    ends = [finish(node, one) for one in (first, second)]
    return {
        "alone": alone,
        "together": [rate_between(turns, begun, ended) for turns in pair],
        "ends": ends,
        "turns": pair,
    }


def judge_models(models: Mapping[str, Any]) -> list[str]:
    """Return the faults in models that were asked in turn."""
    found = []
    for i, one in enumerate(models["asked"]):
        if one["wrong"]:
            found.append(f"answer {i}, from model {one['model']}: {one['wrong']} parts are wrong")
        found += [
            f"answer {i}: {one[when]['used']} bytes of {one[when]['limit']}"
            for when in ("before", "after")
            if one[when]["used"] > one[when]["limit"]
        ]
    if not any(one["before"]["residency"] == "parked" for one in models["asked"]):
        found.append("no model had to come back")
    return found


def judge(report: Mapping[str, Any]) -> list[str]:
    """Return the faults in a run, one line each."""
    parts = [report[part] for part in ("models", "pair") if part in report]
    found = judge_models(report["models"]) if "models" in report else []
    found += judge_deaths(report["deaths"]) if "deaths" in report else []
    found += [
        f"{one['wrong']} of {one['blocks']} blocks have wrong contents at the end"
        for part in parts
        for one in part["ends"]
        if one["wrong"]
    ]
    found += [
        f"a busy container did {rate} turns per second"
        for part in parts
        for rate in part.get("together", [])
        if rate <= 0
    ]
    return found


def summarise_models(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return the medians of the waits in seconds, the rate in GB/s, and the neighbour's ratio."""
    came = [one for one in report["models"]["asked"] if one["before"]["residency"] == "parked"]
    waits = [one["first_s"] for one in came]
    rates = report["models"]["neighbour"]
    moved = [
        (one["after"]["moved"] - one["before"]["moved"])
        / max(one["after"]["move_ns"] - one["before"]["move_ns"], 1)
        for one in came
    ]
    return {
        "native_first_s": statistics.median(one["first_s"] for one in report["native"]),
        "came": len(came),
        "first_s": round(statistics.median(waits), 4) if waits else None,
        "longest_first_s": max(waits, default=None),
        "came_gb_s": round(statistics.median(moved), 1) if moved else None,
        "neighbour": round(rates["moving"] / rates["resting"], 4) if rates["resting"] else None,
    }


def summarise(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of the parts that ran; `pair` is the work of two relative to one alone."""
    found = summarise_models(report) if "models" in report else {}
    if "pair" in report:
        pair = report["pair"]
        together, alone = sum(pair["together"]), pair["alone"]
        found["pair"] = round(together / alone, 4) if alone else None
    if "deaths" in report:
        found["deaths"] = summarise_deaths(report["deaths"])
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options for the machine, the models, and the two busy containers."""
    parser.add_argument("--simulated", action="store_true", help="always use a simulated GPU")
    parser.add_argument(
        "--parts",
        default="models,pair",
        help="parts to run, from models,pair,deaths (models,pair)",
    )
    parser.add_argument("--program", choices=sorted(PROGRAMS), default="driver")
    parser.add_argument("--models", type=int, default=5)
    parser.add_argument("--held-mib", type=int, default=16384, help="memory of a model (16384)")
    parser.add_argument("--overbook", type=float, default=1.7)
    parser.add_argument(
        "--reserve-mib", type=int, default=512, help="memory that is not granted (512)"
    )
    parser.add_argument("--host-mib", type=int, help="host memory for parked memory")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument(
        "--pair-mib", type=int, help="memory of each of the two busy containers (--held-mib)"
    )
    parser.add_argument(
        "--seconds", type=float, default=60, help="duration of the parts pair and deaths (60)"
    )
    parser.add_argument("--kill-every", type=int, default=300, help="ms between kills (300)")
    parser.add_argument("--scheduling", choices=["auto", "hardware", "gate"], default="gate")
    parser.add_argument("--output", type=Path, default=ROOT / "build/parking")
    parser.add_argument("--build", type=Path, default=ROOT / "build/meson")


def settings_of(args: argparse.Namespace) -> dict[str, object]:
    """Return the settings for the governor's configuration."""
    memory: dict[str, object] = {"overbook": args.overbook}
    if args.host_mib is not None:
        memory["host"] = f"{args.host_mib}Mi"
    return {
        "scheduling": args.scheduling,
        "memory": memory,
        "memory_reserve": f"{args.reserve_mib}Mi",
    }


def measure_part(node: BenchNode, part: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return the measurements of one part of a run."""
    held, program = args.held_mib * MIB, PROGRAMS[args.program]
    pair = (args.pair_mib or args.held_mib) * MIB
    if part == "pair":
        return {part: measure_pair(node, pair, args.seconds)}
    if part == "deaths":
        return {part: measure_deaths(node, pair, int(args.seconds), args.kill_every)}
    machine = node.machine
    native = measure_native(machine, machine.python, held, args.rounds, program)  # type: ignore[attr-defined]
    models = measure_models(node, args.models, held, args.rounds, program)
    return {"native": native, "models": models}


def measure_parts(
    machine: Machine, parts: Sequence[str], args: argparse.Namespace
) -> dict[str, Any]:
    """Return the report of a run, in which each part has a separate governor."""
    settings = settings_of(args)
    report = {"settings": settings, "held": args.held_mib * MIB, "program": args.program}
    for part in parts:
        with BenchNode(machine, settings=settings, keep_machine=True) as node:
            report["gpu"] = asdict(name_gpu(node))
            report.update(measure_part(node, part, args))
    return report


def main(argv: list[str] | None = None) -> int:
    """Run, print the findings and write parking.json; return 1 if there are faults."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.parking", description=__doc__.split("\n", maxsplit=1)[0]
    )
    add_arguments(parser)
    args = parser.parse_args(argv)
    parts = args.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(
            f"no part is called {', '.join(sorted(unknown))}; parts are {', '.join(PARTS)}"
        )
    output, build = args.output.resolve(), args.build.resolve()
    shutil.rmtree(output, ignore_errors=True)
    tools = output / "tools"
    tools.mkdir(parents=True)
    real = not args.simulated and driver_answers()
    machine = (NvidiaImage if real else SimulatedImage)(output, build, tools)
    machine.programs.append(build / "oom_stress")
    try:
        os.environ.update(machine.environment)  # for the driver's NVML in this process
        with contextlib.closing(machine):
            report = measure_parts(machine, [part for part in PARTS if part in parts], args)
    except (MachineError, TidegateError, VdriverError, subprocess.SubprocessError) as e:
        print(f"parking: {e}", file=sys.stderr)
        return 1
    report["run"] = describe_run()
    report["summary"], report["wrong"] = summarise(report), judge(report)
    (output / "parking.json").write_text(json.dumps(report) + "\n")
    print(json.dumps(report["summary"]))
    for line in report["wrong"]:
        print(f"WRONG: {line}")
    return 1 if report["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
