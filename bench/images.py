"""The images of containers that run the programs in examples/workloads/programs."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.machine import ROOT, TRIPLET, MachineError, Nvidia, Simulated

SOURCE = ROOT / "examples/workloads/programs"
INSIDE = "/workload/programs"
TOOLS_INSIDE = "/tools"

# RPATH of the linked program, with the usual library directories.
RPATH = f"/usr/lib/{TRIPLET}:/usr/lib64:/usr/local/nvidia/lib64"
STUB_C = "int cuInit(void) { return 1; }\nint cuDeviceTotalMem_v2(void) { return 1; }\n"


class NvidiaImage(Nvidia):
    """The machine's root as the image, with a loader cache that does not contain the driver."""

    def __init__(self, work: Path, build: Path, tools: Path) -> None:
        super().__init__(work, build)
        self.tools = tools
        self.python = sys.executable

    def make_rootfs(self, directory: Path) -> None:
        """Make the overlay; the driver is mounted outside it, so ldconfig leaves the driver out."""
        super().make_rootfs(directory)
        subprocess.run(["ldconfig", "-r", str(directory)], check=True, stderr=subprocess.DEVNULL)

    def spec(self) -> dict[str, Any]:
        """Return the machine's part of a bundle, with the tools, and /sys as in any container."""
        spec = super().spec()
        spec["mounts"] += [
            bind(self.tools, TOOLS_INSIDE),
            {
                "destination": "/sys",
                "type": "sysfs",
                "source": "sysfs",
                "options": ["nosuid", "noexec", "nodev", "ro"],
            },
        ]
        return spec


class SimulatedImage(Simulated):
    """The small image of the simulated GPU, with this machine's Python in it."""

    def __init__(self, work: Path, build: Path, tools: Path, **kind: Any) -> None:
        super().__init__(work, build, **kind)
        self.tools = tools
        self.python = str(Path(sys.executable).resolve())

    def make_rootfs(self, directory: Path) -> None:
        """Make the image, with the libraries that Python and its C extension modules need."""
        super().make_rootfs(directory)
        modules = Path(sysconfig.get_path("stdlib")) / "lib-dynload"
        libraries = directory / "usr/lib" / TRIPLET
        for library in needed_by([Path(self.python), *modules.glob("*.so")]):
            if not (libraries / library.name).exists():
                shutil.copy(library.resolve(), libraries / library.name)

    def spec(self) -> dict[str, Any]:
        """Return the device, Python, the programs, and the tools."""
        spec = super().spec()
        standard = sysconfig.get_path("stdlib")
        spec["mounts"] += [
            bind(Path(standard), standard),
            bind(Path(self.python), self.python),
            bind(SOURCE, INSIDE),
            bind(self.tools, TOOLS_INSIDE),
        ]
        spec["env"] = ["PYTHONDONTWRITEBYTECODE=1"]
        return spec


def bind(source: Path, destination: str) -> dict[str, Any]:
    """Return a read-only mount for an OCI configuration."""
    return {
        "destination": destination,
        "type": "bind",
        "source": str(source),
        "options": ["bind", "ro"],
    }


def needed_by(files: Sequence[Path]) -> list[Path]:
    """Return the libraries that ldd finds for files on this machine."""
    done = subprocess.run(
        ["ldd", *map(str, files)], capture_output=True, text=True, check=False
    ).stdout
    return sorted({Path(path) for path in re.findall(r"=> (/\S+) \(0x", done)})


def make_tools(directory: Path, *, cuda: bool) -> None:
    """Compile the helpers that some programs run, as far as this machine can."""
    directory.mkdir(parents=True)
    if shutil.which("gcc"):
        stub = directory / "stub"
        stub.mkdir()
        subprocess.run(
            [
                "gcc", "-shared", "-fPIC", "-nostdlib", "-Wl,-soname,libcuda.so.1",
                "-o", str(stub / "libcuda.so"), "-x", "c", "-",
            ],
            input=STUB_C.encode(), check=True,
        )  # fmt: skip
        subprocess.run(
            [
                "gcc", "-O1", "-o", str(directory / "linked"), str(SOURCE / "linked.c"),
                f"-L{stub}", "-lcuda", "-ldl", f"-Wl,--disable-new-dtags,-rpath,{RPATH}",
            ],
            check=True,
        )  # fmt: skip
    if cuda and shutil.which("nvcc"):
        subprocess.run(
            [
                "nvcc", "-O1", "-cudart", "static",
                "-o", str(directory / "staticrt"), str(SOURCE / "staticrt.cu"),
            ],
            check=True,
        )  # fmt: skip


def first_gpu() -> str:
    """Return the UUID of this machine's first GPU."""
    command = ["nvidia-smi", "--id=0", "--query-gpu=uuid", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as e:
        raise MachineError(f"nvidia-smi does not name the first GPU: {e}") from e
    return done.stdout.strip()
