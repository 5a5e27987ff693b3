"""`python -m bench.programs [NAME ...]`: compares native and governed runs of programs.

Each program in examples/workloads/programs runs natively, and then in a container with a quota,
through the hook and a governor. Both runs must have the same exit status, the same named checks and
the same values, within the program's own tolerance, and the second run must print no line that is
new. The governor's counters must show that the second run was governed. The results are written to
programs.json and printed as a table; the exit status is 1 if a program differs.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.demo import driver_answers, name_gpu
from bench.images import (
    INSIDE,
    SOURCE,
    TOOLS_INSIDE,
    NvidiaImage,
    SimulatedImage,
    first_gpu,
    make_tools,
)
from bench.machine import ROOT, MachineError
from bench.node import BenchNode, last_json
from bench.provenance import describe_run
from governor.config import parse_quantity
from governor.errors import TidegateError
from vdriver.errors import VdriverError

NOT_HERE = 77
TOLERANCE = 1e-3
FLOOR = 1e-3
"""Values below this are compared with the absolute tolerance that a value of this size has."""

LINES_KEPT = 60
COMPUTE = 50

REPORT_S = 0.5
"""Time in seconds after which the counters include all launches of a program: under an open grant
the control library reports launches five times a second.
"""


@dataclass(frozen=True)
class ProgramKind:
    """A program: its time limit in seconds, the module that it needs, additional capabilities."""

    seconds: int
    needs: str = "ctypes"
    capabilities: tuple[str, ...] = ()


PROGRAMS = {
    "driver": ProgramKind(60),
    "threads": ProgramKind(60),
    "forks": ProgramKind(120),
    "staticrt": ProgramKind(60),
    "managed": ProgramKind(60),
    "green": ProgramKind(60),
    "mps": ProgramKind(90),
    "train": ProgramKind(120, "torch"),
    "inference": ProgramKind(120, "torch"),
    "compile": ProgramKind(240, "torch"),
    "graphs": ProgramKind(120, "torch"),
    "loader": ProgramKind(180, "torch"),
    "distributed": ProgramKind(180, "torch"),
    "oom": ProgramKind(120, "torch"),
    "expandable": ProgramKind(120, "torch"),
    "asyncalloc": ProgramKind(120, "torch"),
    "triton_kernels": ProgramKind(120, "triton"),
    "jax_jit": ProgramKind(180, "jax"),
    "cupy_arrays": ProgramKind(120, "cupy"),
    "kvcache": ProgramKind(180, "torch"),
    "sleepwake": ProgramKind(120),
    "processes": ProgramKind(120),
    "many": ProgramKind(240),
    "plugin": ProgramKind(120, "torch"),
    "generate": ProgramKind(300, "transformers"),
    "profiler": ProgramKind(120, "torch"),
    "nvcc": ProgramKind(120),
    "sanitizer": ProgramKind(180),
    # The driver lets only administrators read counters, unless its configuration says otherwise.
    "counters": ProgramKind(180, capabilities=("CAP_SYS_ADMIN",)),
    "debugger": ProgramKind(180),
}

ENGINES = ("kvcache", "sleepwake", "processes", "many", "plugin", "generate")
"""Programs that use the GPU as serving engines do."""

CUDA_TOOLS = ("profiler", "nvcc", "sanitizer", "counters", "debugger")
"""Programs that run CUDA's tools."""

GROUPS = {"engines": ENGINES, "tools": CUDA_TOOLS}
"""Names that select several programs."""

ON_SIMULATED = ("driver", "threads", "forks", "sleepwake", "processes", "many")
"""Programs that need only the driver API, and kernels that the simulated GPU supports."""


@dataclass
class ProgramRun:
    """One run of a program; `status` is None if it did not end in time."""

    status: int | None
    seconds: float
    answer: dict[str, Any]
    lines: list[str]

    @property
    def missing(self) -> str | None:
        """The requirement that this machine does not meet, or None."""
        return self.answer.get("missing") if self.status == NOT_HERE else None


@dataclass
class Seen:
    """The largest values that the governor reported for a container's counters on its first GPU."""

    launches: int = 0
    lookups: int = 0
    memory_peak: int = 0
    grants: int = 0

    def take(self, one: Mapping[str, Any]) -> None:
        """Update the maxima with the current counters; a process's counts are lost when it ends."""
        if not one:
            return
        device = one["devices"][0]
        self.lookups = max(self.lookups, one["lookups"])
        for name in ("launches", "memory_peak", "grants"):
            setattr(self, name, max(getattr(self, name), device[name]))


@dataclass
class Comparison:
    """The two runs of a program."""

    name: str
    native: ProgramRun
    governed: ProgramRun
    seen: Seen
    differences: list[str] = field(default_factory=list)

    @property
    def result(self) -> str:
        """How the two runs compare, in a few words."""
        if self.native.missing:
            return "not here"
        if self.differences:
            return "differs"
        same = self.native.answer["digest"] == self.governed.answer["digest"]
        return "the same" if same else "the same within tolerance"


def split_output(text: str) -> tuple[dict[str, Any], list[str]]:
    """Return the program's answer, and the other lines that it and its libraries printed."""
    answer = last_json(text)
    if "program" not in answer:
        answer = {}
    others = [line.rstrip() for line in text.splitlines() if line.strip()]
    return answer, [line for line in others if not line.startswith('{"program": ')]


def shape_of(line: str) -> str:
    """Return a line without the parts that vary: numbers, addresses, temporary names."""
    line = re.sub(r"/(?:tmp|dev/shm)/\S*", "/tmp/...", line)  # noqa: S108 - text, no file
    return re.sub(r"0x[0-9a-fA-F]+|\d+(?:\.\d+)?", "#", line).strip()


def new_lines(native: Sequence[str], governed: Sequence[str]) -> list[str]:
    """Return the lines that only the governed run printed, each shape once."""
    known = {shape_of(line) for line in native}
    fresh: dict[str, str] = {}
    for line in governed:
        shape = shape_of(line)
        if shape not in known:
            fresh.setdefault(shape, line)
    return list(fresh.values())


def numbers_of(value: Any) -> list[float] | None:
    """Return a value as numbers, or None if it is not numeric."""
    values = value if isinstance(value, list) else [value]
    if all(isinstance(one, (int, float)) and not isinstance(one, bool) for one in values):
        return [float(one) for one in values]
    return None


def is_near(native: Any, governed: Any, tolerance: float) -> bool:
    """Return whether two values agree.

    Numbers agree if they differ by at most `tolerance` times the largest of them; text must be
    identical.
    """
    first, second = numbers_of(native), numbers_of(governed)
    if first is None or second is None:
        return bool(native == governed)
    if len(first) != len(second):
        return False
    scale = max((abs(one) for one in first + second), default=0.0)
    allowed = tolerance * max(scale, FLOOR)
    # A NaN is not near any value, not even itself.
    return all(abs(a - b) <= allowed for a, b in zip(first, second, strict=True))


def compare_checks(native: Mapping[str, bool], governed: Mapping[str, bool]) -> list[str]:
    """Return a line for each check that fails in or is missing from at least one of the runs."""
    found = []
    for name in dict.fromkeys([*native, *governed]):
        if name not in governed:
            found.append(f"check “{name}” is missing from the governed run")
        elif name not in native:
            found.append(f"check “{name}” is missing from the native run")
        elif not native[name]:
            runs = "the native run" if governed[name] else "both runs"
            found.append(f"check “{name}” fails in {runs}")
        elif not governed[name]:
            found.append(f"check “{name}” fails in the governed run")
    return found


def compare_values(native: Mapping[str, Any], governed: Mapping[str, Any]) -> list[str]:
    """Return a line for each value that differs between the runs."""
    found = []
    tolerances = native["tolerances"]
    first, second = native["values"], governed["values"]
    for name in dict.fromkeys([*first, *second]):
        if name not in first or name not in second:
            found.append(f"value “{name}” is missing from one run")
        elif not is_near(first[name], second[name], tolerances.get(name, TOLERANCE)):
            one, two = shorten(first[name]), shorten(second[name])
            found.append(f"value “{name}” is {one} in the native run, {two} in the governed run")
    return found


def shorten(value: Any) -> str:
    """Return a value as text that fits in a line."""
    text = json.dumps(value)
    return text if len(text) < 120 else text[:117] + "..."


def compare(native: ProgramRun, governed: ProgramRun, seen: Seen) -> list[str]:
    """Return a line for each difference, and for each sign that the second run was not governed."""
    if native.missing:
        return []
    found = []
    for which, arm in (("native", native), ("governed", governed)):
        if arm.missing:
            found.append(f"only the {which} run lacks a requirement: {arm.missing}")
        elif arm.status is None:
            found.append(f"the {which} run did not end within its time limit")
        elif arm.status:
            found.append(f"the {which} run ended with status {arm.status}")
        elif not arm.answer:
            found.append(f"the {which} run gave no answer")
    if "checks" in native.answer and "checks" in governed.answer:
        found += compare_checks(native.answer["checks"], governed.answer["checks"])
        found += compare_values(native.answer, governed.answer)
    found += [f"new line: {line}" for line in new_lines(native.lines, governed.lines)]
    least = governed.answer.get("launches", 1)
    if seen.launches < least:
        found.append(
            f"the governor counted {seen.launches} launches, but there were at least {least}"
        )
    if seen.memory_peak <= 0:
        found.append("the governor has charged no memory")
    return found


class Harness:
    """Runs programs natively and governed on one machine."""

    def __init__(self, machine: NvidiaImage | SimulatedImage, quota: int) -> None:
        self.machine = machine
        self.quota = quota
        # On a simulated GPU, memory is freed only once the machine has an idle core.
        self.within_ms = 200 if machine.kind == "nvidia" else 2000
        # A program that uses all GPUs in the machine gets only the first, in both runs.
        self.variables = {"CUDA_VISIBLE_DEVICES": first_gpu()} if machine.kind == "nvidia" else {}

    def options(self, tools: str) -> list[str]:
        """Return the options for both runs."""
        return ["--quota", str(self.quota), "--within-ms", str(self.within_ms), "--tools", tools]

    def run_native(self, name: str) -> ProgramRun:
        """Run a program directly on this machine, with its own empty caches."""
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
            return self._run_native(name, home)

    def _run_native(self, name: str, home: str) -> ProgramRun:
        environment = {
            **os.environ,
            **self.machine.environment,
            **self.variables,
            "PYTHONDONTWRITEBYTECODE": "1",
            "HOME": home,
            "TRITON_CACHE_DIR": f"{home}/triton",
            "TORCHINDUCTOR_CACHE_DIR": f"{home}/inductor",
        }
        command = [
            self.machine.python, str(SOURCE / f"{name}.py"), *self.options(str(self.machine.tools))
        ]  # fmt: skip
        begin = time.monotonic()
        path = self.machine.work / "native" / name
        path.parent.mkdir(exist_ok=True)
        with path.open("w") as output:
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            status: int | None
            try:
                status = process.wait(PROGRAMS[name].seconds)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                status = None
        return ProgramRun(
            status, time.monotonic() - begin, *split_output(path.read_text(errors="replace"))
        )

    def configure(self, config: dict[str, Any], kind: ProgramKind) -> None:
        """Add the variables, and the program's capabilities, to a container's configuration."""
        process = config["process"]
        process["env"] += [f"{name}={text}" for name, text in self.variables.items()]
        for capabilities in process["capabilities"].values():
            capabilities += [one for one in kind.capabilities if one not in capabilities]

    def run_governed(self, node: BenchNode, name: str) -> tuple[ProgramRun, Seen]:
        """Run a program in a container, and read its counters until all have been reported."""
        arguments = [
            self.machine.python, f"{INSIDE}/{name}.py", *self.options(TOOLS_INSIDE),
            "--governed", "--hold", "/out/hold",
        ]  # fmt: skip
        annotations = {
            "memory": str(self.quota),
            "compute": str(COMPUTE),
            "compute-limit": "100",
            "devices": "0",
        }
        begin = time.monotonic()
        edit = functools.partial(self.configure, kind=PROGRAMS[name])
        container = node.start(name, arguments, annotations, edit=edit)
        seen = Seen()
        status: int | None = None
        ended = True
        ready: float | None = None
        while container.process.poll() is None:
            if ready is None and (container.out / "hold.ready").exists():
                ready = time.monotonic()
            node.list_containers()
            seen.take(container.seen)
            if ready is not None and time.monotonic() > ready + REPORT_S:
                (container.out / "hold").touch()
            if time.monotonic() > begin + PROGRAMS[name].seconds:
                ended = False
                node.delete(container)
                break
            time.sleep(0.03)
        if ended:
            status = node.wait(container, 10)
        text = (container.bundle / "output").read_text(errors="replace")
        return ProgramRun(status, time.monotonic() - begin, *split_output(text)), seen

    def compare(self, node: BenchNode, name: str) -> Comparison:
        """Run a program both ways, unless the module that it needs is not installed."""
        needs = PROGRAMS[name].needs
        if importlib.util.find_spec(needs) is None:
            absent = ProgramRun(NOT_HERE, 0.0, {"missing": f"Python has no module {needs}"}, [])
            return Comparison(name, absent, absent, Seen())
        native = self.run_native(name)
        if native.missing:
            return Comparison(name, native, native, Seen())
        governed, seen = self.run_governed(node, name)
        return Comparison(name, native, governed, seen, compare(native, governed, seen))


def wait_until_forgotten(node: BenchNode) -> None:
    """Wait until the governor has forgotten the container that ended."""
    deadline = time.monotonic() + 10
    while node.list_containers():
        if time.monotonic() > deadline:
            raise MachineError("the governor still has a container that ended 10 s ago")
        time.sleep(0.02)


def render_table(comparisons: Sequence[Comparison]) -> str:
    """Return a table with a row for each program, followed by the differences."""
    head = ("program", "native", "governed", "checks", "launches", "look-ups", "peak", "result")
    rows = [
        (
            one.name,
            f"{one.native.seconds:.1f} s",
            f"{one.governed.seconds:.1f} s",
            str(len(one.governed.answer.get("checks", ()))),
            str(one.seen.launches),
            str(one.seen.lookups),
            f"{one.seen.memory_peak / (1 << 20):.0f} MiB",
            one.result,
        )
        for one in comparisons
    ]
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (head, tuple("-" * width for width in widths), *rows)
    ]
    for one in comparisons:
        lines += [f"{one.name}: {difference}" for difference in one.differences]
        if one.result == "not here":
            lines.append(f"{one.name}: not run: {one.native.missing}")
    return "\n".join(lines)


def as_json(one: Comparison) -> dict[str, Any]:
    """Return a comparison in the form in which it is saved."""
    kept: dict[str, Any] = {"name": one.name, "result": one.result, "differences": one.differences}
    for which, arm in (("native", one.native), ("governed", one.governed)):
        kept[which] = {
            **asdict(arm),
            "seconds": round(arm.seconds, 3),
            "lines": arm.lines[-LINES_KEPT:],
        }
    kept["seen"] = asdict(one.seen)
    return kept


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.programs", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"one of {', '.join(PROGRAMS)}; or engines, for {', '.join(ENGINES)}; or tools, for"
        f" {', '.join(CUDA_TOOLS)}",
    )
    parser.add_argument("--memory", default="8Gi", help="memory quota of each container (8Gi)")
    parser.add_argument("--output", type=Path, default=ROOT / "build/programs")
    parser.add_argument("--build", type=Path, default=ROOT / "build/meson")
    parser.add_argument("--runtime", default="runc", help="runc or crun")
    parser.add_argument("--simulated", action="store_true", help="always use a simulated GPU")
    args = parser.parse_args(argv)
    named = [GROUPS.get(name, (name,)) for name in args.names]
    args.names = list(dict.fromkeys(itertools.chain.from_iterable(named)))
    unknown = set(args.names) - set(PROGRAMS)
    if unknown:
        parser.error(f"no program is called {', '.join(sorted(unknown))}")
    return args


def measure(
    args: argparse.Namespace, report: dict[str, Any], comparisons: list[Comparison]
) -> None:
    """Run the programs. If a program fails, `report` and `comparisons` hold the results so far."""
    real = not args.simulated and driver_answers()
    names = args.names or (list(PROGRAMS) if real else list(ON_SIMULATED))
    tools = args.output / "tools"
    make_tools(tools, cuda=real)
    image = NvidiaImage if real else SimulatedImage
    machine = image(args.output, args.build, tools)
    quota = parse_quantity(args.memory, "--memory")
    with BenchNode(machine, runtime=args.runtime, settings={"scheduling": "auto"}) as node:
        gpu = name_gpu(node)
        report |= {"gpu": asdict(gpu), "quota": quota, "compute": COMPUTE}
        harness = Harness(machine, quota)
        for name in names:
            one = harness.compare(node, name)
            comparisons.append(one)
            report["programs"] = [as_json(each) for each in comparisons]
            print(f"{name}: {one.result}", flush=True)
            wait_until_forgotten(node)


def main(argv: list[str] | None = None) -> int:
    """Run the programs, write programs.json, and print a table."""
    args = parse_arguments(argv)
    os.environ["PATH"] += ":/usr/sbin:/sbin"
    args.output, args.build = args.output.resolve(), args.build.resolve()
    shutil.rmtree(args.output, ignore_errors=True)
    args.output.mkdir(parents=True)
    report: dict[str, Any] = {"run": describe_run()}
    comparisons: list[Comparison] = []
    broken = False
    try:
        measure(args, report, comparisons)
    except (MachineError, TidegateError, VdriverError, subprocess.CalledProcessError) as e:
        print(f"programs: {e}", file=sys.stderr)
        broken = True
    finally:
        (args.output / "programs.json").write_text(json.dumps(report, indent=1) + "\n")
    print(render_table(comparisons))
    ran = [one for one in comparisons if one.result != "not here"]
    return 0 if ran and not broken and not any(one.differences for one in ran) else 1


if __name__ == "__main__":
    sys.exit(main())
