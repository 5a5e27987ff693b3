"""Takes screenshots of the governor's web page after a 15-minute demo.

`python -m bench.page` runs containers on two simulated GPUs: a training job alongside a container
with a load that comes in bursts, a notebook for a while, a container that allocates more than its
memory quota, one that is refused, one that bypasses its quota, and one that is alone on the second
GPU. It writes docs/figures/page.png and page-narrow.png: wide and light, narrow and dark.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.machine import ROOT, MachineError, Simulated
from bench.node import BenchNode
from tools.browser import Browser, BrowserError, BrowserPage

PORT = 9465
GIB = 1 << 30
STRAY = ROOT / "tests/container/stray.c"
ROWS = "document.querySelectorAll('.gpu tbody tr').length"


class PageGpus(Simulated):
    """Two simulated GPUs, and in each image a program that loads its own driver."""

    def __init__(self, work: Path, build: Path) -> None:
        super().__init__(work, build, devices=2)
        program = work / "stray"
        subprocess.run(["gcc", "-O1", "-o", str(program), str(STRAY), "-ldl"], check=True)
        driver = work / "own-driver.so"
        driver.write_bytes((build / "simgpu/libcuda.so.1").read_bytes())
        self.programs += [program, driver]


def say(text: str) -> None:
    """Print one line of progress immediately."""
    print(text, flush=True)


class PageScene:
    """The containers of the demo, and when each starts."""

    def __init__(self, node: BenchNode, seconds: float) -> None:
        self._node = node
        self._seconds = seconds

    def work(self, name: str, part: float, *options: str, **quota: str) -> None:
        """Start a container that computes for part of the time."""
        seconds = str(self._seconds * part)
        command = [*self._node.machine.command("burn", inside=True), "--seconds", seconds]
        command += ["--out", "/out/progress.bin", *options]
        annotations = {key.replace("_", "-"): value for key, value in quota.items()}
        annotations.setdefault("devices", "0")

        def set_devices(config: dict[str, Any]) -> None:
            # Without device nodes, a program finds its GPUs by this variable alone.
            config["process"]["env"].append(f"CUDA_VISIBLE_DEVICES={annotations['devices']}")

        self._node.start(name, command, annotations, edit=set_devices)

    def stray(self) -> None:
        """Start a container that bypasses the control library."""
        ways = ["join", "own", f"take:{2 * GIB}", f"sleep:{int(self._seconds * 1000)}"]
        quota = {"devices": "0", "compute": "5", "memory": "1Gi"}
        self._node.start("legacy-app", ["/usr/bin/stray", *ways], quota)

    def acts(self) -> list[tuple[float, str, Callable[[], None]]]:
        """Return the acts of the demo: fraction of the time, description, function."""
        memory = {"memory": "3Gi"}
        takes = ("--memory", str(2 * GIB))
        return [
            (0.0, "training", lambda: self.work(
                "training", 1, *takes, compute="45", compute_limit="100", **memory)),
            (0.0, "inference", lambda: self.work(
                "inference", 1, "--bursts", "7", "--duty", "45", "--memory", str(GIB),
                compute="30", compute_limit="60", **memory)),
            (0.0, "batch, alone on the second GPU", lambda: self.work(
                "batch", 1, *takes, compute="20", compute_limit="100", devices="1", **memory)),
            (0.2, "notebook", lambda: self.work(
                "notebook", 0.45, "--memory", str(GIB), compute="15", **memory)),
            (0.35, "one that asks for more memory than there is", lambda: self.work(
                "too-large", 0.1, compute="5", memory="100Gi")),
            (0.5, "one that allocates more than its quota", lambda: self.work(
                "report-job", 0.1, "--allocate", str(2 * GIB), compute="5", memory="1Gi")),
            (0.7, "one that bypasses its quota", self.stray),
        ]  # fmt: skip

    def play(self) -> None:
        """Run all acts at their times."""
        began = time.monotonic()
        for at, title, act in self.acts():
            time.sleep(max(0.0, began + at * self._seconds - time.monotonic()))
            say(f"{time.monotonic() - began:6.1f} s  {title}")
            act()
        time.sleep(max(0.0, began + self._seconds - 6 - time.monotonic()))


def take_pictures(page: BrowserPage, output: Path) -> None:
    """Write the two screenshots of an open page."""
    page.wait(f"{ROWS} >= 5")
    for name, width, scheme in (("page.png", 1280, "light"), ("page-narrow.png", 420, "dark")):
        page.prefer(color_scheme=scheme)
        page.size(width, 800)
        page.screenshot(output / name)
        say(f"{output / name}")
    if complaints := page.complaints():
        raise BrowserError(f"the browser reported errors: {'; '.join(complaints)}")


def main(argv: list[str] | None = None) -> int:
    """Run the demo; return 0 if the screenshots were taken."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.page", description=__doc__.split("\n", maxsplit=1)[0]
    )
    parser.add_argument("--seconds", type=float, default=930, help="how long it runs (930)")
    parser.add_argument("--output", type=Path, default=ROOT / "docs/figures")
    parser.add_argument("--work", type=Path, default=ROOT / "build/page")
    parser.add_argument("--build", type=Path, default=ROOT / "build/meson")
    args = parser.parse_args(argv)
    os.environ["PATH"] += ":/usr/sbin:/sbin"
    os.environ["TZ"] = "UTC"
    args.work.mkdir(parents=True, exist_ok=True)
    for before in ("bundles", "state"):
        shutil.rmtree(args.work / before, ignore_errors=True)
    args.output.mkdir(parents=True, exist_ok=True)
    settings = {"web": {"listen": f"127.0.0.1:{PORT}"}}
    try:
        # The browser is started first: if there is none, the run fails at once, not after 15 min.
        with (
            Browser() as browser,
            browser.page() as page,
            BenchNode(PageGpus(args.work, args.build), settings=settings) as node,
        ):
            node.prefix = ""
            PageScene(node, args.seconds).play()
            page.open(f"http://127.0.0.1:{PORT}/")
            take_pictures(page, args.output)
    except (BrowserError, MachineError) as e:
        print(f"page: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
