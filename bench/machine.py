"""Provides the two kinds of machine for a run: one with a simulated GPU and one with a real GPU.

`Simulated` makes device files and runs the C workload; `Nvidia` uses the node's driver and runs
PyTorch. A workload has the same interface on both: `--seconds`, `--out`, `--wait-file`,
`--allocate`.
"""

from __future__ import annotations

import abc
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parent.parent
TRIPLET = f"{platform.machine()}-linux-gnu"
GLIBC = ("libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1")


class MachineError(Exception):
    """The machine lacks something that the run needs; the message is one line."""


class Machine(abc.ABC):
    """The machine for a run: a GPU, its driver, and how a workload is started on it."""

    kind: Literal["simulated", "nvidia"]
    solo_seconds: float

    def __init__(self, work: Path, build: Path) -> None:
        self.work = work
        self.build = build
        self.programs: list[Path] = []  # additional programs for a container's /usr/bin

    @property
    @abc.abstractmethod
    def refresh_arguments(self) -> list[str]:
        """Arguments that `tidegate refresh` needs to find the driver."""

    @property
    @abc.abstractmethod
    def environment(self) -> dict[str, str]:
        """Environment variables for the governor and for workloads outside containers."""

    @abc.abstractmethod
    def command(self, job: str, *, inside: bool) -> list[str]:
        """Return the command that runs a job, without the options that all workloads share."""

    def remember(self, job: str, answer: dict[str, Any]) -> None:  # noqa: B027 - optional
        """Keep the report of a job's solo run, for a governed run of the same work."""

    @abc.abstractmethod
    def make_rootfs(self, directory: Path) -> None:
        """Make a container's root file system at `directory`."""

    @abc.abstractmethod
    def spec(self) -> dict[str, Any]:
        """Return this machine's part of a bundle: mounts, devices, device rules, environment."""

    def remove_bundle(self, bundle: Path) -> None:
        """Remove the bundle of a container that has ended."""
        shutil.rmtree(bundle, ignore_errors=True)

    def close(self) -> None:  # noqa: B027 - optional
        """Remove what was created outside the work directory."""


class Simulated(Machine):
    """The simulated GPU: device files on a tmpfs, and a small C program that calls the driver."""

    kind = "simulated"
    solo_seconds = 4.0

    def __init__(
        self,
        work: Path,
        build: Path,
        *,
        unit_us: int = 500,
        devices: int = 1,
        options: Sequence[str] = (),
    ) -> None:
        super().__init__(work, build)
        self.unit_us = unit_us
        self.iterations: dict[str, str] = {}
        # In shared memory, not in the work directory.
        self.directory = Path("/dev/shm") / f"tidegate-simgpu-{os.getpid()}"  # noqa: S108
        subprocess.run(
            [
                sys.executable, "-m", "simgpu", "create",
                "--dir", str(self.directory), "--devices", str(devices), *options,
            ],
            check=True, cwd=ROOT, stdout=subprocess.DEVNULL,
        )  # fmt: skip

    @property
    def refresh_arguments(self) -> list[str]:
        """Arguments to use the simulated driver that was built."""
        return ["--library-dir", str(self.build / "simgpu")]

    @property
    def environment(self) -> dict[str, str]:
        """Variables that name the directories of the device and the driver outside containers."""
        return {
            "SIMGPU_DIR": str(self.directory),
            "LD_LIBRARY_PATH": str(self.build / "simgpu"),
        }

    def command(self, job: str, *, inside: bool) -> list[str]:
        """Return the C workload's command; burner-<us>[-<form>] sets a unit's length and form."""
        if job.count("-") == 2:
            program = "/usr/bin/burner" if inside else str(self.build / "burner")
            # The simulated GPU copies on the processor: larger blocks would dominate the run time.
            return [*burner_command(program, job, self.iterations), "--block", str(1 << 20)]
        unit = job.split("-")[1] if job.startswith("burner-") else str(self.unit_us)
        program = (
            "/usr/bin/simgpu-workload" if inside else str(self.build / "simgpu/simgpu-workload")
        )
        return [program, "--unit-us", unit]

    def make_rootfs(self, directory: Path) -> None:
        """Make a minimal image: this machine's glibc and the workload."""
        libraries = directory / "usr/lib" / TRIPLET
        libraries.mkdir(parents=True)
        for name in ("usr/bin", "usr/lib64", "proc", "dev", "sys", "tmp", "out", "etc", "run"):
            (directory / name).mkdir(exist_ok=True)
        (directory / "lib").symlink_to("usr/lib")
        (directory / "lib64").symlink_to("usr/lib64")
        loader = Path("/lib64/ld-linux-x86-64.so.2")
        shutil.copy(loader.resolve(), directory / "usr/lib64" / loader.name)
        for name in GLIBC:
            source = Path("/lib") / TRIPLET / name
            if not source.exists():
                raise MachineError(
                    f"{source} does not exist; the demo runs on Debian and Ubuntu, x86_64"
                )
            shutil.copy(source.resolve(), libraries / name)
        for program in (
            self.build / "simgpu/simgpu-workload",
            self.build / "burner",
            *self.programs,
        ):
            shutil.copy(program, directory / "usr/bin")

    def spec(self) -> dict[str, Any]:
        """Return the device, as a mount."""
        return {
            "mounts": [
                {
                    "destination": "/dev/tidegate-simgpu",
                    "type": "bind",
                    "source": str(self.directory),
                    "options": ["rbind", "rw", "nosuid", "noexec"],
                }
            ]
        }

    def remember(self, job: str, answer: dict[str, Any]) -> None:
        """Keep the number of iterations of the burner's loop per unit."""
        remember_iterations(self.iterations, job, answer)

    def close(self) -> None:
        """Remove the device."""
        shutil.rmtree(self.directory, ignore_errors=True)


class Nvidia(Machine):
    """A real GPU: PyTorch on this machine's own root file system, seen through an overlay."""

    kind = "nvidia"
    solo_seconds = 8.0

    def __init__(self, work: Path, build: Path, *, options: Sequence[str] = ()) -> None:
        super().__init__(work, build)
        self.options = list(options)
        self.iterations: dict[str, str] = {}
        self._overlays: dict[Path, Path] = {}
        """The layers of each root file system that is mounted."""
        self._n_overlays = 0
        self._layers = Path("/run") / f"tidegate-layers-{os.getpid()}"
        self._layers.mkdir()
        _run("mount", "-t", "tmpfs", "tmpfs", str(self._layers))

    @property
    def refresh_arguments(self) -> list[str]:
        """No arguments: the driver is in the node's own directories."""
        return []

    @property
    def environment(self) -> dict[str, str]:
        """No variables: this is the machine as it is."""
        return {}

    def command(self, job: str, *, inside: bool) -> list[str]:
        """Return the burner's command for burner-<microseconds>, otherwise a PyTorch program's.

        decode-graph decodes tokens, service-<model> answers requests with a model, and a job named
        after a model trains it.
        """
        if job.startswith("burner-"):
            program = "/usr/bin/burner" if inside else str(self.build / "burner")
            return burner_command(program, job, self.iterations)
        folder = Path("/workload") if inside else ROOT / "examples/workloads"
        if job == "decode-graph":
            return [sys.executable, str(folder / "torch_decode.py")]
        if job.startswith("service-"):
            model = job.removeprefix("service-")
            return [sys.executable, str(folder / "torch_service.py"), "--model", model]
        return [sys.executable, str(folder / "torch_workload.py"), "--model", job, *self.options]

    def remember(self, job: str, answer: dict[str, Any]) -> None:
        """Keep the number of iterations of the burner's loop per unit."""
        remember_iterations(self.iterations, job, answer)

    def make_rootfs(self, directory: Path) -> None:
        """Mount an overlay of this machine's root file system.

        The overlay lacks the file systems that are mounted below /, and the driver's files in them.
        """
        directory.mkdir(parents=True)
        # Containers of different arms can have the same name.
        layers = self._layers / f"{self._n_overlays}-{directory.parent.name}"
        self._n_overlays += 1
        for name in ("upper", "scratch"):
            (layers / name).mkdir(parents=True)
        options = f"lowerdir=/,upperdir={layers}/upper,workdir={layers}/scratch"
        _run("mount", "-t", "overlay", "overlay", "-o", options, str(directory))
        self._overlays[directory] = layers
        for name in ("out", "workload"):
            (directory / name).mkdir(exist_ok=True)
        for program in (self.build / "burner", *self.programs):
            shutil.copy(program, directory / "usr/bin")

    def spec(self) -> dict[str, Any]:
        """Return the device nodes, the workload and a place for caches."""
        nodes = []
        gpus = sorted(str(path) for path in Path("/dev").glob("nvidia[0-9]*"))
        for path in (*gpus, "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"):
            try:
                status = os.stat(path)  # noqa: PTH116
            except OSError:
                continue
            nodes.append(
                {
                    "path": path,
                    "type": "c",
                    "major": os.major(status.st_rdev),
                    "minor": os.minor(status.st_rdev),
                    "fileMode": 0o666,
                    "uid": 0,
                    "gid": 0,
                }
            )
        return {
            "mounts": [
                {
                    "destination": "/workload",
                    "type": "bind",
                    "source": str(ROOT / "examples/workloads"),
                    "options": ["bind", "ro"],
                },
                {"destination": "/tmp", "type": "tmpfs", "source": "tmpfs"},  # noqa: S108
            ],
            "devices": nodes,
            "rules": [
                {
                    "allow": True,
                    "type": "c",
                    "major": node["major"],
                    "minor": node["minor"],
                    "access": "rwm",
                }
                for node in nodes
            ],
            "env": [
                "HOME=/tmp",
                "TRITON_CACHE_DIR=/tmp/triton",
                "TORCHINDUCTOR_CACHE_DIR=/tmp/inductor",
            ],
        }

    def remove_bundle(self, bundle: Path) -> None:
        """Unmount the overlay first, then remove the bundle.

        Otherwise every file of this machine would be marked as deleted in the overlay.
        """
        rootfs = bundle / "rootfs"
        layers = self._overlays.pop(rootfs, None)
        if layers is not None:
            subprocess.run(["umount", "-l", str(rootfs)], check=False)
        super().remove_bundle(bundle)
        if layers is not None:
            shutil.rmtree(layers, ignore_errors=True)

    def close(self) -> None:
        """Unmount the overlays."""
        for path in (*reversed(self._overlays), self._layers):
            subprocess.run(["umount", "-l", str(path)], check=False)
        self._layers.rmdir()


def wait_set_up(root: Path, started: Sequence[subprocess.Popen[bytes]]) -> None:
    """Wait until every workload has reported that it is set up.

    Workload i has the directory i of `root`, with its output and its `--wait-file`, named begin.
    """
    deadline = time.monotonic() + 240
    while len(list(root.glob("*/begin.ready"))) < len(started):
        for i, process in enumerate(started):
            if process.poll() is not None:
                last = (root / str(i) / "output").read_text(errors="replace").strip()[-200:]
                raise MachineError(f"a workload ended before it was ready: {last}")
        if time.monotonic() > deadline:
            raise MachineError("a workload was not ready within 240 s")
        time.sleep(0.02)


def burner_command(program: str, job: str, iterations: Mapping[str, str]) -> list[str]:
    """Return the command for burner-<us>, burner-<us>-null (default stream), burner-<us>-<form>."""
    _, unit, *more = job.split("-")
    command = [program, "--unit-us", unit]
    if more:
        command += ["--stream" if more[0] == "null" else "--form", more[0]]
    if job in iterations:
        command += ["--iterations", iterations[job]]
    return command


def remember_iterations(known: dict[str, str], job: str, answer: Mapping[str, Any]) -> None:
    """Keep the number of iterations per unit, if the job's last line reports it."""
    if "iterations" in answer:
        known[job] = str(answer["iterations"])


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise MachineError(f"{' '.join(command)}: {' '.join(done.stderr.split())}")


def _spec(
    directory: Path,
    extra: Mapping[str, Any],
    *,
    name: str,
    arguments: Sequence[str],
    annotations: Mapping[str, str],
    hook: Sequence[str],
    stage: str,
) -> dict[str, Any]:
    """Return the config.json of a bundle; `extra` is the machine's part of it."""
    return {
        "ociVersion": "1.0.2",
        "hostname": name,
        "process": {
            "user": {"uid": 0, "gid": 0},
            "args": list(arguments),
            "env": [
                "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
                *extra.get("env", []),
            ],
            "cwd": "/",
            "noNewPrivileges": True,
            "capabilities": {
                kind: ["CAP_DAC_OVERRIDE", "CAP_KILL"]
                for kind in ("bounding", "effective", "permitted")
            },
        },
        "root": {"path": "rootfs"},
        "annotations": dict(annotations),
        "mounts": _mounts(directory, extra),
        "hooks": {
            stage: [
                {
                    "path": str(ROOT / "oci_hook/tidegate-hook"),
                    "args": ["tidegate-hook", *hook],
                    # Never empty: some runtimes pass the container's environment to a hook that
                    # has none.
                    "env": ["PATH=/usr/sbin:/usr/bin:/sbin:/bin"],
                    "timeout": 60,
                }
            ]
        },
        "linux": {
            "namespaces": [{"type": t} for t in ("pid", "mount", "ipc", "uts", "network")],
            "devices": extra.get("devices", []),
            "resources": {
                "devices": [{"allow": False, "access": "rwm"}, *extra.get("rules", [])],
            },
        },
    }


def _mounts(directory: Path, extra: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {"destination": "/proc", "type": "proc", "source": "proc"},
        {
            "destination": "/dev",
            "type": "tmpfs",
            "source": "tmpfs",
            "options": ["nosuid", "strictatime", "mode=755", "size=65536k"],
        },
        {"destination": "/dev/shm", "type": "tmpfs", "source": "shm"},  # noqa: S108
        {
            "destination": "/out",
            "type": "bind",
            "source": str(directory / "out"),
            "options": ["bind", "rw"],
        },
        *extra.get("mounts", []),
    ]


def make_bundle(
    directory: Path,
    *,
    machine: Machine,
    name: str,
    arguments: Sequence[str],
    annotations: Mapping[str, str],
    hook: Sequence[str],
    stage: str = "createRuntime",
) -> Path:
    """Write an OCI bundle: a root file system and a config.json with Tidegate's hook.

    `hook` lists the hook's arguments that precede the stage. `<directory>/out` appears as /out in
    the container.
    """
    directory.mkdir(parents=True)
    (directory / "out").mkdir()
    machine.make_rootfs(directory / "rootfs")
    config = _spec(
        directory,
        machine.spec(),
        name=name,
        arguments=arguments,
        annotations=annotations,
        hook=[*hook, stage],
        stage=stage,
    )
    import json

    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return directory
