"""Starts the jobs of `bench.gangs`, both in containers with several GPUs and natively."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.images import INSIDE, NvidiaImage, SimulatedImage, bind
from bench.machine import ROOT, MachineError
from bench.node import BenchNode, Running, last_json
from bench.progress import Profile

WORKLOADS = ROOT / "examples/workloads"
GPUS = 2
HOG = "burner-500"
SET_UP_S = 100.0
NVLINK_OFF = ("NCCL_NVLS_ENABLE=0", "NCCL_MNNVL_ENABLE=0")


class GangNvidia(NvidiaImage):
    """A real machine; `visible` lists the GPUs that programs in a container see by default."""

    visible: str | None = None

    def spec(self) -> dict[str, Any]:
        """Add the GPUs that a program sees unless it selects others."""
        return with_visible(super().spec(), self.visible)


class GangSimulated(SimulatedImage):
    """Two simulated GPUs with NVLink between them."""

    visible: str | None = None

    def __init__(self, work: Path, build: Path, tools: Path) -> None:
        places = ["--place", "0/0/0/0", "--place", "0/1/0/0", "--nvlink", "0-1=18"]
        super().__init__(work, build, tools, devices=GPUS, options=places)

    def spec(self) -> dict[str, Any]:
        """Mount all workloads at the path that they have on the real machine."""
        spec = with_visible(super().spec(), self.visible)
        spec["mounts"] = [m for m in spec["mounts"] if m["destination"] != INSIDE]
        spec["mounts"].append(bind(WORKLOADS, "/workload"))
        return spec


def with_visible(spec: dict[str, Any], visible: str | None) -> dict[str, Any]:
    """Return a machine's part of a bundle, with the variables for GPU programs added."""
    shown = [] if visible is None else [f"CUDA_VISIBLE_DEVICES={visible}"]
    return {**spec, "env": [*spec.get("env", []), *NVLINK_OFF, *shown]}


@dataclass(frozen=True)
class GangJob:
    """A job in gang.py: its form (two processes or one) and its work."""

    form: str = "processes"
    work: str = "reduce"

    @property
    def name(self) -> str:
        """Its name in the report."""
        return f"{self.form}-{self.work}"


@dataclass
class Bench:
    """The state that the parts of the benchmark share."""

    node: BenchNode
    machine: GangNvidia | GangSimulated
    args: argparse.Namespace
    uuids: list[str]
    nvml: str
    profiles: dict[str, list[Profile]] = field(default_factory=dict)  # by job, one per GPU
    hog: Profile | None = None
    started: list[subprocess.Popen[str]] = field(default_factory=list)
    names: int = 0

    def seconds(self, usual: float) -> float:
        """Return how long to measure, in seconds."""
        return float(self.args.seconds or usual)

    def command(self, job: GangJob, folder: str, seconds: float, out: str) -> list[str]:
        """Return the command that runs a job."""
        on = "torch" if self.machine.kind == "nvidia" else "simulated"
        return [
            self.machine.python, f"{folder}/gang.py", "--on", on, "--form", job.form,
            "--work", job.work, "--seconds", str(seconds), "--out", out,
            "--wait-file", f"{out}/begin",
        ]  # fmt: skip

    def start(self, name: str, arguments: Sequence[str], gpus: Sequence[int],
              compute: int, memory: str) -> Running:  # fmt: skip
        """Start a container with a share of some GPUs, which is also its cap."""
        self.names += 1
        self.machine.visible = ",".join(self.uuids[gpu] for gpu in gpus)
        try:
            return self.node.start(
                f"{name}-{self.names}",
                arguments,
                {"compute": str(compute), "memory": memory, "devices": ",".join(map(str, gpus))},
            )
        finally:
            self.machine.visible = None

    def start_job(self, job: GangJob, compute: int, seconds: float) -> Running:
        """Start a job in a container with both GPUs."""
        memory = "8Gi" if self.machine.kind == "nvidia" else "2Gi"
        return self.start(
            "job", self.command(job, "/workload", seconds, "/out"), range(GPUS), compute, memory
        )

    def start_hog(self, gpu: int, compute: int, seconds: float) -> Running:
        """Start a program that always has work on one GPU."""
        arguments = [
            *self.machine.command(HOG, inside=True), "--seconds", str(seconds),
            "--out", "/out/progress.bin", "--wait-file", "/out/begin",
        ]  # fmt: skip
        return self.start("hog", arguments, [gpu], compute, "2Gi")

    def keep_logs(self) -> None:
        """Copy the logs to a directory that is kept when the containers are removed."""
        logs = self.machine.work / "logs"
        logs.mkdir(exist_ok=True)
        for container in self.node.running:
            with contextlib.suppress(OSError):
                shutil.copy(container.bundle / "output", logs / f"{container.name}.log")
            for path in container.out.glob("nccl.*"):
                shutil.copy(path, logs / f"{container.name}-{path.name}.log")
        for name in ("governor.log", "hook.log"):
            with contextlib.suppress(OSError):
                shutil.copy(self.machine.work / name, logs / name)

    def clean(self) -> None:
        """End everything that a part has left running, and make sure that there is a governor."""
        for process in self.started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)
        self.started.clear()
        self.node.clear()

    def native(self, job: GangJob, seconds: float, out: Path) -> dict[str, Any]:
        """Run a job without Tidegate, and return its answer."""
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        (out / "begin").touch()
        log = self.machine.work / "logs" / f"native-{job.name}.log"
        log.parent.mkdir(exist_ok=True)
        with log.open("w") as output:
            process = subprocess.Popen(
                self.command(job, str(WORKLOADS), seconds, str(out)),
                env={**os.environ, **self.machine.environment},
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, text=True,
                start_new_session=True,
            )  # fmt: skip
        self.started.append(process)
        status = process.wait(seconds + SET_UP_S)
        if status:
            raise MachineError(f"{job.name} ended with {status}: {log.read_text()[-400:]}")
        return last_json(log.read_text())
