"""The images of a cluster, as archives that `ctr images import` reads: the nodes have no registry.

Tidegate's own image is built from the Containerfile of packaging/kubernetes, whose instructions are
executed one by one, as in tests/packages/test_image.py.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

from tests.cluster.cluster_node import PAUSE_IMAGE
from tests.conftest import ROOT
from tests.container.bundles import compile_c, make_rootfs
from tests.container.engines import pack_image
from tests.packages.make import fresh_root, package
from tests.packages.test_image import FILE, ImageBuild, instructions

TIDEGATE_IMAGE = "registry.example/tidegate:0.1.0"
WORKLOAD_IMAGE = "docker.io/library/workload:latest"
SAMPLE_IMAGE = "nvcr.io/nvidia/k8s/cuda-sample:nbody-cuda11.6.0-ubuntu18.04"
"""The image that the examples in packaging/kubernetes/examples use."""

# The program of a pod's sandbox, which keeps the pod's namespaces: it sleeps, and reaps orphaned processes.
PAUSE_C = r"""
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>
static void end(int number) { _exit(0); }
static void reap(int number) { while (waitpid(-1, 0, WNOHANG) > 0) ; }
int main(void) {
        signal(SIGINT, end);
        signal(SIGTERM, end);
        signal(SIGCHLD, reap);
        for (;;)
                pause();
}
"""

# Replaces NVIDIA's sample: it runs work on the simulated GPU for 5 s, and records its progress.
SAMPLE = """#!/bin/sh
exec /usr/bin/simgpu-workload --unit-us 500 --seconds 5 --out /tmp/progress.bin
"""

SOURCES = (
    *("governor", "kube", "libcontrol", "oci_hook", "packaging", "simgpu", "tools", "vdriver"),
    *("meson.build", "meson_options.txt", "pyproject.toml", "requirements-kubernetes.lock"),
)
"""Sources of Tidegate's image."""


def pause_image(base: Path) -> Path:
    """Make the image that every pod's sandbox runs."""
    rootfs = base / "pause"
    compile_c(PAUSE_C, rootfs / "pause", "-static")
    return pack_image(rootfs, base / "pause.tar", PAUSE_IMAGE, command=("/pause",))


def workload_images(base: Path, build: Path) -> list[Path]:
    """Make an image with this machine's C library and programs for the simulated GPU, and one with the name of NVIDIA's
    sample.
    """
    rootfs = make_rootfs(base / "workload", base / "tools")
    shutil.copy(build / "simgpu/simgpu-workload", rootfs / "usr/bin")
    shutil.copy(build / "burner", rootfs / "usr/bin")
    for name in ("libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1"):
        path = Path("/lib/x86_64-linux-gnu") / name
        shutil.copy(path.resolve(), rootfs / "usr/lib/x86_64-linux-gnu" / name)
    subprocess.run(["ldconfig", "-r", str(rootfs), "-X"], check=True)
    images = [pack_image(rootfs, base / "workload.tar", WORKLOAD_IMAGE)]
    sample = rootfs / "tmp/sample"
    sample.write_text(SAMPLE)
    sample.chmod(0o755)
    images.append(pack_image(rootfs, base / "sample.tar", SAMPLE_IMAGE))
    return images


def _digest() -> str:
    """Return a digest of the current sources of the image."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--", *SOURCES],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    whole = hashlib.sha256()
    for name in sorted(listing.split("\0")):
        path = ROOT / name
        if name and path.is_file():
            whole.update(f"{name}\0{path.stat().st_mode & 0o777:o}\0".encode() + path.read_bytes())
    return whole.hexdigest()[:16]


def tidegate_image() -> Path:
    """Make Tidegate's image from this working tree, in build/cluster-images, once for each state of
    the sources.
    """
    directory = ROOT / "build/cluster-images"
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        archive = directory / f"{_digest()}.tar"
        if not archive.exists():
            for old in sorted(directory.glob("*.tar"), key=lambda path: path.stat().st_mtime)[:-1]:
                old.unlink()
            _make(archive)
    return archive


def _make(archive: Path) -> None:
    work = archive.with_suffix(f".{os.getpid()}")
    work.mkdir()
    try:
        build = ImageBuild(work, fresh_root("trixie", slim=True), package("deb"))
        for instruction, words in instructions(FILE.read_text()):
            build.do(instruction, words)
        image = list(build.stages.values())[-1]
        making = work / "image.tar"
        environment = tuple(f"{name}={value}" for name, value in image.environment.items())
        command = tuple(image.command)
        pack_image(image.root, making, TIDEGATE_IMAGE, environment=environment, command=command)
        making.rename(archive)
    finally:
        shutil.rmtree(work)
