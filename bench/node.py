"""Sets up a node for a run: a mirror, a governor, and containers under a real runtime."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml

from bench.machine import ROOT, Machine, MachineError, make_bundle
from bench.provenance import SETTINGS
from governor.client import ask
from governor.config import Config
from governor.errors import GovernorError, TidegateError

READY_S = 20.0


@dataclass
class Running:
    """A container that has been started."""

    name: str
    identifier: str
    bundle: Path
    process: subprocess.Popen[str]
    output: str = ""
    memory_peak: int = 0
    seen: dict[str, Any] = field(default_factory=dict)

    @property
    def out(self) -> Path:
        """Its /out directory, on the host."""
        return self.bundle / "out"


class BenchNode:
    """A context manager with a fresh mirror and a governor that answers."""

    def __init__(
        self,
        machine: Machine,
        *,
        runtime: str = "runc",
        settings: Mapping[str, object] | None = None,
        keep_machine: bool = False,
    ) -> None:
        self.machine = machine
        self._keep_machine = keep_machine
        self.runtime = runtime
        self.work = machine.work
        self.driver_dir = self.work / "driver"
        # On a tmpfs, and short: the path of a socket is limited to 107 bytes.
        self.runtime_dir = Path("/run") / f"tidegate-{os.getpid()}"
        # A benchmark measures either grants or the GPU's own scheduler: the default is not `auto`.
        self.settings = {
            "scheduling": "gate",
            **(settings or {}),
            **yaml.safe_load(os.environ.get(SETTINGS, "{}")),
            "runtime_dir": str(self.runtime_dir),
            "state_dir": str(self.work / "state"),
            "driver_dir": str(self.driver_dir),
            "library_dir": str(machine.build / "libcontrol"),
        }
        self.config = Config(runtime_dir=str(self.runtime_dir))
        self.prefix = f"tidegate-{os.getpid()}-"  # of the containers' ids
        self.state_dir = self.runtime_dir / "runtime"
        self.running: list[Running] = []
        self._governor: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        try:
            self.refresh()
            self.start_governor()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for container in self.running:
            self.delete(container)
        self._collect_mps_logs()
        self.stop_governor()
        shutil.rmtree(self.runtime_dir, ignore_errors=True)
        if not self._keep_machine:
            self.machine.close()

    def _collect_mps_logs(self) -> None:
        """Copy the logs of MPS, and wait until no container is using its daemons.

        They then exit with the governor.
        """
        for logs in (self.runtime_dir / "mps").glob("*/log"):
            shutil.copytree(logs, self.work / "mps" / logs.parent.name, dirs_exist_ok=True)
            deadline = time.monotonic() + 5
            with contextlib.suppress(GovernorError):
                while ask(self.config, "list")["containers"] and time.monotonic() < deadline:
                    time.sleep(0.05)

    @property
    def governor_pid(self) -> int:
        """The pid of the governor."""
        assert self._governor is not None
        return self._governor.pid

    def refresh(self) -> None:
        """Mirror the driver."""
        command = [
            sys.executable, "-m", "governor.cli", "refresh",
            "--output", str(self.driver_dir),
            "--control-dir", str(self.machine.build / "libcontrol"),
            *self.machine.refresh_arguments,
        ]  # fmt: skip
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise MachineError(done.stderr.strip() or "tidegate refresh failed")

    def start_governor(self) -> None:
        """Start a governor, and wait until it answers."""
        self.work.mkdir(parents=True, exist_ok=True)
        self.runtime_dir.mkdir(parents=True, exist_ok=True)
        path = self.work / "config.yaml"
        path.write_text(yaml.safe_dump(self.settings))
        log = self.work / "governor.log"
        with log.open("ab") as stderr:
            self._governor = subprocess.Popen(
                [sys.executable, "-m", "governor.daemon", "--config", str(path)],
                cwd=ROOT,
                env={**os.environ, **self.machine.environment},
                stderr=stderr,
            )
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline:
            with contextlib.suppress(GovernorError):
                ask(self.config, "ping", timeout=1)
                return
            if self._governor.poll() is not None:
                break
            time.sleep(0.05)
        last = log.read_text().strip().splitlines()[-1:]
        raise MachineError(f"the governor did not start: {' '.join(last)}")

    def stop_governor(self, number: int = signal.SIGTERM) -> None:
        """End the governor with a signal; kill it if it has not ended 10 s later."""
        if self._governor is not None:
            self._governor.send_signal(number)
            try:
                self._governor.wait(10)
            except subprocess.TimeoutExpired:
                self._governor.kill()
                self._governor.wait()
            self._governor = None

    @contextlib.contextmanager
    def frozen_governor(self) -> Iterator[None]:
        """Stop the governor for the duration of the block, as if it were extremely slow."""
        assert self._governor is not None
        self._governor.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._governor.send_signal(signal.SIGCONT)

    def hook_arguments(self) -> list[str]:
        """Return the hook's options for this node."""
        return [
            "--runtime-dir", str(self.runtime_dir),
            "--driver-dir", str(self.driver_dir),
            "--log", str(self.work / "hook.log"),
        ]  # fmt: skip

    def start(
        self,
        name: str,
        arguments: Sequence[str],
        annotations: Mapping[str, str],
        *,
        stage: str = "createRuntime",
        edit: Callable[[dict[str, Any]], None] | None = None,
        before: Sequence[str] = (),
    ) -> Running:
        """Start a container; its output is read by `wait`.

        `edit` may change its config.json; `before` is put in front of the runtime's command line.
        """
        identifier = f"{self.prefix}{name}"
        bundle = self.work / "bundles" / name
        make_bundle(
            bundle,
            machine=self.machine,
            name=name,
            arguments=arguments,
            annotations={f"tidegate.gpu/{key}": value for key, value in annotations.items()},
            hook=self.hook_arguments(),
            stage=stage,
        )
        if edit is not None:
            config = json.loads((bundle / "config.json").read_text())
            edit(config)
            (bundle / "config.json").write_text(json.dumps(config))
        output = (bundle / "output").open("w")
        process = subprocess.Popen(
            [
                *before,
                self.runtime,
                "--root",
                str(self.state_dir),
                "run",
                "--bundle",
                str(bundle),
                identifier,
            ],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )
        output.close()
        container = Running(name, identifier, bundle, process)
        self.running.append(container)
        return container

    def list_containers(self) -> dict[str, dict[str, Any]]:
        """Return the governor's report of the containers, by id, and remember memory peaks."""
        known = {one["id"]: one for one in ask(self.config, "list")["containers"]}
        for container in self.running:
            if container.identifier in known:
                container.seen = known[container.identifier]
                peak = max((d["memory_peak"] for d in container.seen["devices"]), default=0)
                container.memory_peak = max(container.memory_peak, peak)
        return known

    def check_scheduling(self) -> None:
        """Raise MachineError if grants divided a GPU's time although its scheduler should have.

        Otherwise an arm for the GPU's own scheduler would silently show the figures for grants.
        """
        for gpu in ask(self.config, "gpus")["gpus"]:
            if self.settings.get("scheduling") == "hardware" != gpu["scheduling"]:
                raise MachineError(
                    f"grants divided the time of GPU {gpu['index']}: {gpu['not_steered']}"
                )

    def wait(self, container: Running, timeout: float) -> int:
        """Wait for a container to end; return its status, or raise MachineError after `timeout`."""
        try:
            status = container.process.wait(timeout)
        except subprocess.TimeoutExpired as e:
            raise MachineError(
                f"container {container.name} did not end within {timeout:g} s;"
                f" see {container.bundle}/output"
            ) from e
        container.output = (container.bundle / "output").read_text(errors="replace")
        return status

    def kill(self, container: Running) -> None:
        """Send SIGKILL to the whole container."""
        subprocess.run(
            [self.runtime, "--root", str(self.state_dir), "kill", container.identifier, "KILL"],
            check=True,
            capture_output=True,
        )

    def delete(self, container: Running) -> None:
        """Make sure that a container is no longer running."""
        if container.process.poll() is None:
            subprocess.run(
                [
                    self.runtime,
                    "--root",
                    str(self.state_dir),
                    "delete",
                    "--force",
                    container.identifier,
                ],
                check=False,
                capture_output=True,
            )
            with contextlib.suppress(subprocess.TimeoutExpired):
                container.process.wait(10)

    def clear(self) -> None:
        """End all containers, and make sure that there is a governor without containers."""
        left = [*self.running]
        # Even if what follows fails, later calls wait only for their own containers.
        self.running.clear()
        for container in left:
            self.delete(container)
            self.machine.remove_bundle(container.bundle)
        try:
            deadline = time.monotonic() + 10
            while ask(self.config, "list")["containers"] and time.monotonic() < deadline:
                time.sleep(0.05)
        except TidegateError:
            self.stop_governor(signal.SIGKILL)
            self.start_governor()

    def wait_ready(self, paths: Sequence[Path], timeout: float) -> None:
        """Wait until each workload has reported that it is set up.

        Raise MachineError if a container ends first, or after `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while not all(path.exists() for path in paths):
            for container in self.running:
                status = container.process.poll()
                if status is not None:
                    text = (container.bundle / "output").read_text(errors="replace").strip()
                    raise MachineError(
                        f"container {container.name} ended with status {status} before it began to"
                        f" work: {' '.join(text.splitlines()[-3:])}"
                    )
            if time.monotonic() > deadline:
                raise MachineError(f"a workload was not ready within {timeout:g} s")
            time.sleep(0.02)


def last_json(text: str) -> dict[str, Any]:
    """Return the last line of `text` that is a JSON object; an empty one if there is none."""
    for line in reversed(text.splitlines()):
        with contextlib.suppress(ValueError):
            value = json.loads(line)
            if isinstance(value, dict):
                return value
    return {}
