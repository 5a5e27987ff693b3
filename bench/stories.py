"""Runs the stories in examples/: sets up a node, runs a story's containers, and prints a table.

A story is `examples/<name>/run`. It calls `play` with a scene, a function that starts containers
and states what it expects of them. Progress goes to standard error, the table to standard output;
the status is 0 if everything was as expected. A node consists of the simulated GPU, a mirror of its
driver, a governor with the story's config.yaml, and runc. The annotations of the containers, as an
engine would pass them, are in the story's containers.yaml.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import yaml

from bench.machine import ROOT, Machine, MachineError, Nvidia, Simulated
from bench.node import BenchNode, Running, last_json
from bench.progress import ProgressError, read_stamps
from governor.errors import TidegateError
from vdriver.errors import VdriverError

SET_UP_S = 60.0
"""Time within which a program must be ready to begin, in seconds."""

SPARE_S = 60.0
"""Longest wait for a program to end, or for the governor to forget containers, in seconds."""


class StoryError(Exception):
    """A story cannot be run to its end; the message is one line."""


@dataclass(frozen=True)
class StoryRow:
    """A row of the table; `met` is None if nothing was expected."""

    what: str
    expected: str
    measured: str
    met: bool | None


@dataclass
class StoryProgram:
    """A program that stamps its work, in a container or outside."""

    name: str
    out: Path
    process: subprocess.Popen[str]
    container: Running | None = None
    begun: float = 0.0
    """The time at which the story let it begin, in seconds of CLOCK_MONOTONIC."""

    @property
    def output(self) -> str:
        """What the program has printed so far."""
        path = self.container.bundle / "output" if self.container else self.out / "output"
        return path.read_text(errors="replace")

    def times(self) -> list[float]:
        """Return when each unit of the program's work was done, in seconds of CLOCK_MONOTONIC."""
        ahead = int(last_json(self.output).get("clock_ns", 0))
        return [(stamp.time - ahead) / 1e9 for stamp in read_stamps(self.out / "progress.bin")]


@dataclass
class Stage:
    """The node and the programs of a story, with the methods that a scene uses."""

    story: Path
    node: BenchNode
    machine: Machine
    containers: dict[str, Mapping[str, str]]
    rows: list[StoryRow] = field(default_factory=list)
    outside: list[StoryProgram] = field(default_factory=list)

    def say(self, text: str) -> None:
        """Print a line of progress immediately."""
        print(text, file=sys.stderr, flush=True)

    # ---- programs ----

    def contain(
        self,
        name: str,
        job: str,
        seconds: float,
        *options: str,
        like: str | None = None,
        before: Sequence[str] = (),
    ) -> StoryProgram:
        """Start a container with a job that waits for `begin`."""
        return self.run(
            name,
            [*self.machine.command(job, inside=True), *self.options("/out", seconds), *options],
            like=like,
            before=before,
        )

    def run(
        self,
        name: str,
        arguments: Sequence[str],
        *,
        like: str | None = None,
        before: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> StoryProgram:
        """Start a container with any command.

        It has the annotations of `like` in containers.yaml, by default those under its own name;
        `before` is put in front of the runtime's command line.
        """

        def edit(config: dict[str, Any]) -> None:
            # Another story on this machine may have a container with the same name.
            config["linux"]["cgroupsPath"] = f"tidegate-{os.getpid()}-{name}"
            config["process"]["env"] += [f"{k}={v}" for k, v in (environment or {}).items()]

        asked = {
            key.removeprefix("tidegate.gpu/"): value
            for key, value in self.containers[like or name].items()
        }
        container = self.node.start(name, arguments, asked, before=before, edit=edit)
        return StoryProgram(name, container.out, container.process, container)

    def leave_outside(self, name: str, job: str, seconds: float, *options: str) -> StoryProgram:
        """Start a job directly on the driver: without a container, and without Tidegate."""
        out = self.place(name)
        command = self.machine.command(job, inside=False)
        return self.run_outside(name, [*command, *self.options(str(out), seconds), *options])

    def run_outside(
        self, name: str, arguments: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> StoryProgram:
        """Start any command directly on the driver."""
        out = self.place(name)
        with (out / "output").open("w") as output:
            process = subprocess.Popen(
                arguments,
                env={**os.environ, **self.machine.environment, **(environment or {})},
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, text=True,
            )  # fmt: skip
        program = StoryProgram(name, out, process)
        self.outside.append(program)
        return program

    def place(self, name: str) -> Path:
        """Return an empty directory for a program outside containers."""
        out = self.machine.work / "outside" / name
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        return out

    @staticmethod
    def options(out: str, seconds: float) -> list[str]:
        """Return the options that every job takes: duration, file for stamps, file to wait for."""
        return [
            "--seconds", str(seconds), "--out", f"{out}/progress.bin",
            "--wait-file", f"{out}/begin",
        ]  # fmt: skip

    def begin(self, *programs: StoryProgram) -> None:
        """Wait until these programs are set up, and let them begin; raise StoryError on failure."""
        deadline = time.monotonic() + SET_UP_S
        for program in programs:
            while not (program.out / "begin.ready").exists():
                if program.process.poll() is not None:
                    raise StoryError(f"{program.name} ended before it began: {tail(program)}")
                if time.monotonic() > deadline:
                    raise StoryError(f"{program.name} was not ready within {SET_UP_S:.0f} s")
                time.sleep(0.01)
        for program in programs:
            program.begun = time.monotonic()
            (program.out / "begin").touch()

    def wait(self, *programs: StoryProgram) -> None:
        """Wait until these programs have ended; raise StoryError if one failed."""
        for program in programs:
            if self.status(program):
                raise StoryError(f"{program.name} failed: {tail(program)}")

    def status(self, program: StoryProgram) -> int:
        """Wait for a program to end, and return its status; raise StoryError after SPARE_S."""
        try:
            return program.process.wait(SPARE_S)
        except subprocess.TimeoutExpired:
            raise StoryError(f"{program.name} did not end within {SPARE_S:.0f} s") from None

    def learn(self, job: str, seconds: float, *options: str) -> StoryProgram:
        """Run a job alone directly on the driver, so that other runs of it do the same work."""
        alone = self.leave_outside(f"{job}-alone", job, seconds, *options)
        self.begin(alone)
        self.wait(alone)
        self.machine.remember(job, last_json(alone.output))
        return alone

    def know(self, job: str) -> None:
        """Measure how much work a unit of a job contains, while nothing else is running.

        The simulated GPU's own program does not need this.
        """
        if self.machine.kind == "nvidia":
            self.say(f"   measuring how much work a unit of {job} contains")
            self.learn(job, 1.0)

    def clear(self) -> None:
        """Remove all containers, and wait until the governor has forgotten them."""
        for container in self.node.running:
            self.node.delete(container)
        self.node.running.clear()
        deadline = time.monotonic() + SPARE_S
        while self.node.list_containers():
            if time.monotonic() > deadline:
                raise StoryError("the governor still has containers that have ended")
            time.sleep(0.02)

    def end_outside(self) -> None:
        """End the programs that run outside containers."""
        for program in self.outside:
            if program.process.poll() is None:
                program.process.kill()
                program.process.wait()

    # ---- observation ----

    def command(self, *words: str) -> list[str]:
        """Return a `tidegate` command for this node."""
        config = str(self.machine.work / "config.yaml")
        return [sys.executable, "-P", "-m", "governor.cli", *words, "--config", config]

    def show(self, *words: str, after: float = 0.0) -> None:
        """Run a `tidegate` command, `after` seconds from now, and show its output."""
        time.sleep(after)
        done = subprocess.run(
            self.command(*words), env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        output = done.stdout + done.stderr
        self.say(f"\n$ tidegate {' '.join(words)}\n{output.rstrip()}\n")

    # ---- the table ----

    def tell(self, what: str, measured: str) -> None:
        """Add a row with a measured value that is not judged."""
        self.rows.append(StoryRow(what, "", measured, None))

    def expect(self, what: str, expected: str, measured: str, *, met: bool) -> None:
        """Add a row with the expected and the measured value, and whether they agree."""
        self.rows.append(StoryRow(what, expected, measured, met))

    def at_most(self, what: str, measured: float, most: float, unit: str) -> None:
        """Expect a number of at most `most`."""
        self.expect(
            what, f"at most {most:g} {unit}", f"{measured:.1f} {unit}", met=measured <= most
        )

    def at_least(self, what: str, measured: float, least: float, unit: str) -> None:
        """Expect a number of at least `least`."""
        self.expect(
            what, f"at least {least:g} {unit}", f"{measured:.1f} {unit}", met=measured >= least
        )


def read_containers(story: Path) -> dict[str, Mapping[str, str]]:
    """Return each container's annotations; a story without containers.yaml provides its own."""
    path = story / "containers.yaml"
    return (yaml.safe_load(path.read_text()) or {}) if path.exists() else {}


def read_settings(story: Path) -> dict[str, Any]:
    """Return the story's config.yaml; a story without one has the defaults."""
    path = story / "config.yaml"
    return (yaml.safe_load(path.read_text()) or {}) if path.exists() else {}


def tail(program: StoryProgram) -> str:
    """Return the end of a program's output, on one line."""
    return " ".join(program.output.split())[-300:] or "it printed nothing"


# ---- figures ----


def share(program: StoryProgram, unit_us: float, begin: float, end: float) -> float:
    """Return a program's work between two moments, as a percentage of the GPU.

    Each unit that the program finished counts as the time that a unit takes when it runs alone.
    """
    done = sum(begin <= moment < end for moment in program.times())
    return 100 * done * unit_us / 1e6 / (end - begin)


def answers(program: StoryProgram, pause_us: float) -> list[float]:
    """Return how long each request to a program that pauses between requests took, in ms."""
    moments = program.times()
    # The first two are left out, because Tidegate does not yet know how long such work takes.
    taken = [(b - a) * 1e3 - pause_us / 1e3 for a, b in itertools.pairwise(moments)]
    if len(taken) <= 4:
        raise StoryError(f"{program.name} has answered {len(taken)} requests, too few to judge")
    return taken[2:]


def percentile(values: Sequence[float], percent: int) -> float:
    """Return the given percentile of the values."""
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def render(rows: Sequence[StoryRow]) -> str:
    """Return the table."""
    met = {None: "", True: "yes", False: "NO"}
    cells = [
        ("what", "expected", "measured", "met"),
        *((row.what, row.expected or "-", row.measured, met[row.met]) for row in rows),
    ]
    widths = [max(len(line[i]) for line in cells) for i in range(4)]
    cells.insert(1, tuple("-" * width for width in widths))  # type: ignore[arg-type]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    )


# ---- the play ----

Scene = Callable[[Stage], None]


def play(
    story: str,
    scene: Scene,
    *,
    simgpu: Sequence[str] = (),
    real: bool = False,
    programs: Sequence[str] = (),
    machine: Callable[[Path, Path], Machine] | None = None,
) -> NoReturn:
    """Play the story whose script is at the path `story`, and exit with its status.

    `simgpu` are options of `simgpu create`, `programs` are additional built programs for
    containers; `real` allows a real GPU, and `machine` makes a machine other than the default.
    """
    folder = Path(story).resolve().parent
    parser = argparse.ArgumentParser(
        prog=f"examples/{folder.name}/run", description=sys.modules["__main__"].__doc__
    )
    parser.add_argument(
        "--build", type=Path, default=ROOT / "build/meson", help="directory of the built C parts"
    )
    if real:
        parser.add_argument("--gpu", action="store_true", help="use this machine's GPU")
    args = parser.parse_args()
    args.build = args.build.resolve()
    os.environ["PATH"] += ":/usr/sbin:/sbin"
    check_machine(args.build)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    work = ROOT / "build/stories" / folder.name
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    began = time.monotonic()
    try:
        if real and args.gpu:
            on: Machine = Nvidia(work, args.build)
        elif machine:
            on = machine(work, args.build)
        else:
            on = Simulated(work, args.build, options=simgpu)
        on.programs += [args.build / program for program in programs]
        with set_stage(folder, on) as stage:
            scene(stage)
    except (
        StoryError, MachineError, ProgressError, TidegateError, VdriverError,
        subprocess.CalledProcessError,
    ) as e:  # fmt: skip
        print(f"run: {e}\nrun: the logs are in {work}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    print(render(stage.rows), flush=True)
    print(f"{time.monotonic() - began:.1f} s; logs in {work}", file=sys.stderr)
    missed = [row.what for row in stage.rows if row.met is False]
    if missed:
        print(f"run: not as expected: {'; '.join(missed)}", file=sys.stderr)
    sys.exit(1 if missed else 0)


def check_machine(build: Path) -> None:
    """Exit with a message if this machine cannot run a story."""
    if os.geteuid() != 0:
        print("run: containers need root; run it as root", file=sys.stderr)
        sys.exit(77)
    if shutil.which("runc") is None:
        print("run: runc is not installed; apt-get install runc", file=sys.stderr)
        sys.exit(69)
    if not (build / "burner").exists():
        print("run: nothing is built; run 'make build' first", file=sys.stderr)
        sys.exit(69)


@contextlib.contextmanager
def set_stage(folder: Path, machine: Machine) -> Iterator[Stage]:
    """Make a node for the story, and remove it afterwards."""
    with BenchNode(machine, settings={"scheduling": "auto", **read_settings(folder)}) as node:
        # A node has its own runtime directory, so names need not differ between runs.
        node.prefix = ""
        stage = Stage(folder, node, machine, read_containers(folder))
        stage.say(f"{folder.name}: a {machine.kind} GPU, its driver mirrored, a governor")
        try:
            yield stage
        finally:
            stage.end_outside()
