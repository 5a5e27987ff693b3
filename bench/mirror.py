"""`python -m bench.mirror`: mirrors a node's whole driver, verifies it, and runs it in containers.

Compares what is read from each file of the driver with readelf's output, times refreshes and
`tidegate verify`, and, through the hook, starts containers that have no driver except the mirror:
nvidia-smi, PyTorch, EGL and Vulkan. Writes report.json, and exits with status 1 if one of these
steps failed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench.machine import ROOT, MachineError, Nvidia
from bench.node import BenchNode, last_json
from bench.provenance import describe_run
from bench.readelf import exports_by_readelf, fields_by_readelf, fields_of
from vdriver.discover import find_driver
from vdriver.elf import Library, read_exports

FIRST, AGAIN = 3, 7
"""Number of times that a driver is mirrored from scratch, and that a mirror is refreshed."""

PINK = [255, 0, 255, 255]
TORCH = """
import json, torch
a = torch.randn(2048, 2048, device="cuda")
maps = {line.split()[-1] for line in open("/proc/self/maps") if "/" in line}
print(json.dumps({
    "product": float((a @ a).sum()),
    "device": torch.cuda.get_device_name(0),
    "memory": torch.cuda.mem_get_info()[1],
    "mapped": sorted(p for p in maps if "libcuda" in p and "cudart" not in p or "libnvidia" in p),
}))
"""


class GraphicsNode(Nvidia):
    """The machine's own root as the image, along with the loaders of EGL and Vulkan."""

    def __init__(self, work: Path, build: Path, gl: Path | None) -> None:
        super().__init__(work, build)
        self.gl = gl

    def make_rootfs(self, directory: Path) -> None:
        """Add the mount point for the loaders."""
        super().make_rootfs(directory)
        (directory / "gl").mkdir(exist_ok=True)

    def spec(self) -> dict[str, Any]:
        """Return the machine's part of a bundle, with the loaders."""
        spec = super().spec()
        if self.gl is not None:
            spec["mounts"].append(
                {
                    "destination": "/gl",
                    "type": "bind",
                    "source": str(self.gl),
                    "options": ["bind", "ro"],
                }
            )
            spec["env"].append("LD_LIBRARY_PATH=/gl")
        return spec


def tidegate(*arguments: str) -> tuple[float, int, dict[str, Any]]:
    """Run the command; return the seconds that it took, its status and its answer.

    An installed command has bytecode, so PYTHONDONTWRITEBYTECODE is removed from the environment.
    """
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "governor.cli", *arguments, "--json"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    seconds = time.monotonic() - start
    if done.stderr:
        print(done.stderr, end="", file=sys.stderr)
    return seconds, done.returncode, json.loads(done.stdout or "{}")


def differences(library: Library) -> list[str]:
    """Return the names of the fields for which readelf has a different value."""
    own, expected = fields_of(library), fields_by_readelf(library.path)
    differ = [name for name in expected if own[name] != expected[name]]
    if read_exports(library.path) != exports_by_readelf(library.path):
        differ.append("exports")
    return differ


def compare() -> dict[str, Any]:
    """Compare what is read from this machine's driver with the output of readelf."""
    driver = find_driver()
    files = [driver.cuda, driver.nvml, *driver.libraries, *driver.libraries32, *driver.programs]
    differ = {f.path: d for f in files if (d := differences(f.library))}
    return {"version": driver.version, "files": len(files), "differ": differ}


def refreshes(mirror: Path, build: Path) -> dict[str, Any]:
    """Mirror the driver a few times from scratch, and then refresh it a few times."""
    command = ["refresh", "--output", str(mirror), "--control-dir", str(build / "libcontrol")]
    first, again = [], []
    for _ in range(FIRST):
        shutil.rmtree(mirror, ignore_errors=True)
        seconds, status, answer = tidegate(*command)
        if status or not answer["changed"]:
            raise MachineError(
                f"tidegate refresh ended with status {status};"
                " it should have succeeded and made a generation"
            )
        first.append(round(seconds, 4))
    for _ in range(AGAIN):
        seconds, status, second = tidegate(*command)
        if status or second["changed"]:
            raise MachineError(
                f"a repeated tidegate refresh ended with status {status};"
                " it should have succeeded without changing anything"
            )
        again.append(round(seconds, 4))
    names = sum(o.startswith(("mirror", "link", "rewrite", "write")) for o in answer["operations"])
    return {
        "first_s": first,
        "again_s": again,
        "how": answer["how"],
        "bytes": answer["size"],
        "names": names,
    }


def contained(node: BenchNode, name: str, command: list[str], **annotations: str) -> dict[str, Any]:
    """Run a command in a container that has no driver except the mirror."""
    container = node.start(name, command, {"memory": "8Gi", "compute": "50", **annotations})
    status = node.wait(container, 120)
    print(f"{name}: status {status}", flush=True)
    if status and name != "without":
        print(container.output)
    return {"status": status, **(last_json(container.output) or {"output": container.output})}


def run_containers(work: Path, build: Path, gl: Path | None) -> dict[str, Any]:
    """Run the programs that use a driver; `without` runs graphics without the capability."""
    graphics = [sys.executable, "/workload/graphics.py"]
    with BenchNode(GraphicsNode(work, build, gl)) as node:
        return {
            "smi": contained(node, "smi", ["nvidia-smi"]),
            "torch": contained(node, "torch", [sys.executable, "-c", TORCH]),
            "graphics": contained(
                node, "graphics", graphics, capabilities="compute,graphics,utility"
            ),
            "all": contained(node, "all", graphics, capabilities="all"),
            "without": contained(node, "without", graphics),
        }


def faults(report: dict[str, Any]) -> list[str]:
    """Return the names of the checks that failed."""
    ran = report["containers"]
    good = {
        "readelf agrees": not report["readelf"]["differ"],
        "verify": report["verify"]["status"] == 0,
        **{name: ran[name]["status"] == 0 for name in ("smi", "torch", "graphics", "all")},
        "a pixel drawn": ran["graphics"].get("egl", {}).get("pixel") == PINK,
        "a Vulkan device": bool(ran["graphics"].get("vulkan", {}).get("devices")),
        "no graphics without the capability": ran["without"]["status"] == 2,
    }
    return [name for name, holds in good.items() if not holds]


def main(argv: list[str] | None = None) -> int:
    """Run all steps, and write the report."""
    parser = argparse.ArgumentParser(prog="python -m bench.mirror", description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "build/mirror")
    parser.add_argument(
        "--gl",
        type=Path,
        help="a directory with libEGL.so.1, libGLdispatch.so.0 and libvulkan.so.1, if this "
        "machine, whose root is the containers' image, lacks them",
    )
    args = parser.parse_args(argv)
    output = args.output.absolute()
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    build = ROOT / "build" / "meson"
    mirror = output / "mirror"
    report: dict[str, Any] = {"run": describe_run(), "readelf": compare()}
    try:
        report["refresh"] = refreshes(mirror, build)
        seconds, status, answer = tidegate("verify", "--driver-dir", str(mirror))
        report["verify"] = {"seconds": round(seconds, 4), "status": status, **answer}
        report["containers"] = run_containers(
            output / "work", build, args.gl and args.gl.absolute()
        )
    except MachineError as e:
        print(f"mirror: {e}", file=sys.stderr)
        return 1
    finally:
        (output / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    wrong = faults(report)
    print(json.dumps({k: report[k] for k in ("readelf", "refresh", "containers")}))
    print(f"mirror: {'failed: ' + ', '.join(wrong) if wrong else 'all checks passed'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
