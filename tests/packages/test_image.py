"""The image of packaging/kubernetes: its Containerfile is executed line by line, and the pods' commands run in the result.

The image is not built by an engine, which would fetch its base from a registry. The base here is a fresh minimal system of
the same release. The instructions are interpreted as Docker's Dockerfile reference defines them.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from governor import VERSION
from tests.conftest import ROOT, lack
from tests.kubernetes.test_manifests import DIRECTORIES, containers, one, render
from tests.packages.make import fresh_root, package

FILE = ROOT / "packaging/kubernetes/Containerfile"
BASE = "docker.io/library/debian:13-slim"
PACKAGE = "build/packages/tidegate_*_amd64.deb"
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
NOBODY = "65534:0"

# The command runs in a mount and PID namespace of its own, so that none of its mounts and processes
# remain on the host.
ENTER = """mount -t proc proc "$0/proc" && exec chroot ${user:+"--userspec=$user"} "$0" "$@" """


@dataclass
class ImageStage:
    """A stage of the build: its root, and the environment and command of its containers."""

    root: Path
    environment: dict[str, str] = field(
        default_factory=lambda: {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
    )
    command: list[str] = field(default_factory=list)

    def run(
        self, *command: str, user: str = "", **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in the stage's root."""
        enter = (
            "unshare",
            "--mount",
            "--propagation",
            "private",
            "--pid",
            "--fork",
            "--kill-child",
        )
        return subprocess.run(
            [*enter, "sh", "-c", ENTER, str(self.root), *command],
            env={**self.environment, "user": user, **environment},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )  # fmt: skip


def instructions(text: str) -> list[tuple[str, str]]:
    """Return the instructions, each with its arguments."""
    lines = "".join(line for line in text.splitlines(keepends=True) if not line.startswith("#"))
    joined = re.sub(r"\\\n", " ", lines)
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in joined.splitlines() if line]


class ImageBuild:
    """The stages of a build, by name, in the order of the file."""

    def __init__(self, work: Path, base: Path, deb: Path) -> None:
        self.work, self.base, self.deb = work, base, deb
        self.stages: dict[str, ImageStage] = {}

    def do(self, instruction: str, words: str) -> None:
        """Execute one instruction in the current stage."""
        if instruction == "FROM":
            base, _, name = words.partition(" AS ")
            assert base == BASE
            root = self.work / f"stage-{len(self.stages)}"
            subprocess.run(["cp", "-a", "--reflink=auto", self.base, root], check=True)
            self.stages[name or "last"] = ImageStage(root)
            return
        image = list(self.stages.values())[-1]
        match instruction:
            case "RUN":
                self.run(image, words)
            case "COPY":
                self.copy(image, shlex.split(words))
            case "ENV":
                image.environment |= dict(word.split("=", 1) for word in shlex.split(words))
            case "CMD":
                image.command = json.loads(words)
            case "ENTRYPOINT":
                assert json.loads(words) == []
            case _:
                raise AssertionError(f"{instruction} is not known here")

    def run(self, image: ImageStage, command: str) -> None:
        """Run a line of shell, with this machine's settings for the network."""
        known = ("http_proxy", "https_proxy", "PIP_INDEX_URL")
        environment = {name: os.environ[name] for name in known if name in os.environ}
        bundle = image.root / "tmp/ca.crt"
        if CERTIFICATES.exists():
            shutil.copy(CERTIFICATES, bundle)
            environment["PIP_CERT"] = "/tmp/ca.crt"
        done = image.run("/bin/sh", "-c", command, DEBIAN_FRONTEND="noninteractive", **environment)
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        bundle.unlink(missing_ok=True)

    def copy(self, image: ImageStage, words: list[str]) -> None:
        """Copy a file from the build context, or a directory from another stage."""
        options = dict(word[2:].split("=") for word in words if word.startswith("--"))
        source, target = (word for word in words if not word.startswith("--"))
        to = image.root / target.lstrip("/")
        if "from" in options:
            origin = self.stages[options["from"]].root / source.lstrip("/")
            shutil.copytree(origin, to, symlinks=True, dirs_exist_ok=True)
            return
        path = self.deb if source == PACKAGE else ROOT / source
        to = to / path.name if target.endswith("/") else to
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, to)
        to.chmod(int(options.get("chmod", "644"), 8))


@pytest.fixture(scope="module")
def image(
    tmp_path_factory: pytest.TempPathFactory, require: Callable[..., None]
) -> Iterator[ImageStage]:
    require("dpkg-deb")
    if os.geteuid() != 0:
        lack("needs root")
    work = tmp_path_factory.mktemp("image")
    build = ImageBuild(work, fresh_root("trixie", slim=True), package("deb"))
    for instruction, words in instructions(FILE.read_text()):
        build.do(instruction, words)
    yield list(build.stages.values())[-1]
    shutil.rmtree(work)


@pytest.mark.slow
def test_the_image_contains_what_its_pods_run(image: ImageStage) -> None:
    assert image.run(*image.command).returncode == 0
    assert image.run("tidegate", "--version").stdout == f"tidegate {VERSION}\n"
    seen = set()
    for directory in DIRECTORIES:
        for container in containers(one(render(directory), "DaemonSet")):
            command = container["command"]
            if command[0].endswith("/install-node"):
                continue
            if command[0] == "nsenter":
                # The arguments name a program on the host, where install-node has put it.
                assert image.run("nsenter", "--help").returncode == 0
                seen.add("nsenter")
                continue
            user = NOBODY if container["securityContext"].get("runAsNonRoot") else ""
            done = image.run(*command, "--help", user=user)
            assert done.returncode == 0, f"{command}: {done.stderr}"
            seen.add(tuple(command[:3]) if command[0] == "python3" else command[0])
    assert {("python3", "-m", "kube.main"), ("python3", "-m", "kube.plugin")} < seen
    assert {("python3", "-m", "kube.expose"), "tidegate-governor", "nsenter"} < seen


@pytest.mark.slow
def test_the_image_contains_no_build_or_test_tools(image: ImageStage) -> None:
    for module in ("grpc_tools", "kubernetes_validate", "pytest"):
        assert image.run("python3", "-c", f"import {module}").returncode == 1
    assert not list((image.root / "tmp").iterdir())
    assert not list((image.root / "var/lib/apt/lists").glob("*"))


@pytest.mark.slow
def test_the_hook_can_be_installed_from_the_image(image: ImageStage) -> None:
    """The hook is installed into a directory of the image's own root, which stands in for the
    host's.
    """
    for _ in range(2):  # twice, because each start of the pod repeats it
        done = image.run(
            "/usr/libexec/tidegate/install-node", "--host", "/", "--to", "/opt/tidegate"
        )
        assert done.returncode == 0, done.stderr
    asked = image.run("/opt/tidegate/bin/tidegate-hook", "nonsense")
    assert (asked.returncode, asked.stderr[:9]) == (70, "tidegate:")
