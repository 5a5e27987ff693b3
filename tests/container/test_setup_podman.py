"""`tidegate setup podman` on a node with a real Podman and Buildah: containers get the hooks, and
images can be built.

The command runs on the node, as root would run it, so it can query Podman. The hook is a stub that
records the stage for which it was started; test_engines.py tests what the real hook does. Podman 6
refuses control groups of version 1, so its node has only version 2.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from tests.container.bundles import ROOT, make_rootfs
from tests.container.engine_host import CommandResult, EngineHost
from tests.container.engines import CONTAINERS_CONF, IMAGE, pack_image
from tests.container.nodes import wait_for
from tests.container.test_engines import SUITES, unpacked
from tests.container.test_setup_engines import HOOK

FORMER = "/etc/containers/oci/hooks.d"  # Buildah reads it, too
OWN = "/etc/tidegate/hooks.d"
CONF = "/etc/containers/containers.conf.d/50-tidegate.conf"
STAGES = {"precreate", "createRuntime", "poststop"}
RUN = ("run", "--rm", "--pull=never", "--network=none", "--annotation=tidegate.gpu/memory=4Gi")
SOCKET = "unix:///run/podman/podman.sock"
# This writes the hooks to the engine's own directory, which earlier versions of Tidegate used.
FORMERLY = f"""
import sys
from governor import cli
from governor.setup import podman
podman.HOOKS_DIR, podman.BUILDAH = {FORMER!r}, ()
sys.exit(cli.main(["setup", "podman"]))
"""


@dataclass
class PodmanSite:
    """A node with Podman and an image, and without any configuration of Tidegate."""

    host: EngineHost

    def python(self, *arguments: str) -> CommandResult:
        return self.host.run("env", f"PYTHONPATH={ROOT}", "python3", "-B", *arguments)

    def setup(self, *words: str) -> str:
        """Run `tidegate setup podman` on the node; return its output."""
        ran = self.python("-m", "governor.cli", "setup", "podman", *words)
        assert ran.status == 0, ran.text
        return ran.stdout

    def refused(self, *words: str) -> str:
        """Run `tidegate setup podman` on the node, require a refusal, and return the message."""
        ran = self.python("-m", "governor.cli", "setup", "podman", *words)
        assert ran.status == 73, ran.text
        return ran.stderr

    def doctor(self, check: str) -> list[str]:
        """Return what one of doctor's checks found. Doctor runs outside the node, because the node
        lacks the modules that it needs.
        """
        done = subprocess.run(
            [sys.executable, "-m", "governor.cli", "doctor", "--json", "--root", f"/proc/{self.host.pid}/root"],
            check=False, cwd=ROOT, capture_output=True, text=True,
        )  # fmt: skip
        found = json.loads(done.stdout)["findings"]
        return [
            f"{one['state']}: {one['found']} -> {one['remedy']}"
            for one in found
            if one["id"] == check
        ]

    def run(self, *options: str) -> set[str]:
        """Run a container that asks for a GPU; return the stages for which the hook was started."""
        self.host.check("podman", *options, *RUN, IMAGE, "/usr/bin/sleep", "0")
        return self.stages()

    def stages(self) -> set[str]:
        """Return the stages for which the hook was started since the last call."""
        file = self.host.path("/tmp/started")
        lines = file.read_text().splitlines() if file.exists() else []
        file.unlink(missing_ok=True)
        return {line.split()[0] for line in lines}

    def build(self) -> CommandResult:
        """Build an image with a RUN step that no cache contains."""
        step = f'RUN ["/usr/bin/sleep", "0.{time.monotonic_ns()}"]'
        self.host.write("/tmp/build/Containerfile", f"FROM {IMAGE}\n{step}\n")
        return self.host.run("podman", "build", "--pull=never", "--network=none", "/tmp/build")

    def buildah(self) -> CommandResult:
        """Run a command in a working container of Buildah."""
        name = self.host.check("buildah", "from", "--pull-never", IMAGE).strip()
        ran = self.host.run("buildah", "run", "--network=none", name, "/usr/bin/sleep", "0")
        self.host.check("buildah", "rm", name)
        return ran

    def files(self) -> dict[str, bytes]:
        """Return the files in /etc/containers and /etc/tidegate."""
        return {
            str(path).partition("/root")[2]: path.read_bytes()
            for directory in ("/etc/containers", "/etc/tidegate")
            for path in self.host.path(directory).rglob("*")
            if path.is_file()
        }


@pytest.fixture(
    scope="module", params=[*SUITES, pytest.param("experimental", marks=pytest.mark.slow)]
)
def node(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    require: Callable[..., None],
) -> Iterator[PodmanSite]:
    require("gcc", "nsenter", "unshare", "setpriv")
    root = unpacked(request.param)
    base = tmp_path_factory.mktemp("p")
    rootfs = make_rootfs(base / "rootfs", base / "tools")
    with EngineHost(root, base, cgroup2_only=request.param == "experimental") as host:
        host.write("/usr/bin/tidegate-hook", HOOK, 0o755)
        host.write("/etc/containers/containers.conf", CONTAINERS_CONF.format(runtime="runc"))
        image = pack_image(rootfs, host.work / "image.tar")
        host.check("podman", "load", "--input", str(image))
        versions = host.check("podman", "--version") + host.check("buildah", "--version")
        print(f"engine: {' '.join(versions.split())}")
        yield PodmanSite(host)


@pytest.fixture
def site(node: PodmanSite) -> Iterator[PodmanSite]:
    """The node, on which nothing is set up before and after the test."""
    before = node.files()
    yield node
    node.setup("--undo")
    assert node.files() == before


def test_images_are_built_after_setup_and_containers_get_the_hooks(site: PodmanSite) -> None:
    assert site.run() == set()
    assert "to do: nothing, because Podman reads the hooks" in site.setup()
    assert site.run() == STAGES
    for ran in (site.build(), site.buildah()):
        assert ran.status == 0, ran.text
    assert site.stages() == set()
    assert site.setup() == "podman: already set up, nothing to do\n"
    assert site.doctor("hooks.stages")[0].startswith("ok: ")
    assert site.doctor("podman.hooks")[0].startswith("ok: ")
    site.setup("--undo")
    assert site.run() == set()


@pytest.mark.slow
def test_hooks_in_a_directory_that_buildah_reads_are_found_and_moved(site: PodmanSite) -> None:
    assert site.python("-c", FORMERLY).status == 0
    assert site.run() == STAGES
    for ran in (site.build(), site.buildah()):
        assert 'unable to setup OCI hooks: unknown stage "precreate"' in ran.text
    assert site.doctor("hooks.stages") == [
        (
            f"wrong: {FORMER}/50-tidegate-devices.json has the stage precreate, which Buildah does not support: "
            "`podman build` and `buildah run` fail "
            f"-> rm {FORMER}/50-tidegate-devices.json && tidegate setup podman"
        )
    ]
    assert f"podman: {FORMER}/50-tidegate-devices.json removed" in site.setup()
    assert site.run() == STAGES
    for ran in (site.build(), site.buildah()):
        assert ran.status == 0, ran.text
    assert site.doctor("hooks.stages")[0].startswith("ok: ")


@pytest.mark.slow
def test_doctors_remedy_for_an_unknown_stage_works(site: PodmanSite) -> None:
    assert site.python("-c", FORMERLY).status == 0
    [line] = site.doctor("hooks.stages")
    remedy = re.sub(
        r"\btidegate setup", "python3 -B -m governor.cli setup", line.rpartition(" -> ")[2]
    )
    site.host.check("env", f"PYTHONPATH={ROOT}", "sh", "-c", remedy)
    assert site.run() == STAGES
    assert site.build().status == 0
    assert site.doctor("hooks.stages")[0].startswith("ok: ")


@pytest.fixture
def service(site: PodmanSite) -> Iterator[Callable[[], int]]:
    """Return a function that restarts Podman's API service and returns its PID."""
    running: list[subprocess.Popen[bytes]] = []
    site.host.path("/run/podman").mkdir(exist_ok=True)

    def again() -> int:
        while running:
            site.host.stop(running.pop())
        command = ("podman", "system", "service", "--time=0", SOCKET)
        running.append(site.host.start(*command, log=site.host.work / "service.log"))
        pid = running[0].pid
        wait_for(
            lambda: site.host.run("podman", "--remote", "--url", SOCKET, "version").status == 0,
            "the API service",
        )
        return pid

    yield again
    while running:
        site.host.stop(running.pop())


def test_a_service_that_keeps_running_is_reported_until_it_is_restarted(
    site: PodmanSite, service: Callable[[], int]
) -> None:
    remote = ("--remote", "--url", SOCKET)
    pid = service()
    todo = f"kill {pid}, and start `podman system service` again; containers keep running"
    assert site.setup().splitlines()[-1] == f"to do: {todo}"
    assert site.run() == STAGES
    assert site.run(*remote) == set(), "if it reads containers.conf again, no note is needed"
    assert site.setup().splitlines()[0] == (
        f"note: process {pid} (podman system service) started before the hooks were set up, and starts containers "
        f"without them: {todo}"
    )
    assert site.doctor("podman.service") == [
        (
            f"wrong: process {pid} (podman system service) started before {CONF} was written: "
            f"containers that it starts get no GPU and no quota -> {todo}"
        )
    ]
    service()
    assert site.run(*remote) == STAGES
    assert site.setup() == "podman: already set up, nothing to do\n"
    assert site.doctor("podman.service")[0].startswith("ok: ")


@pytest.mark.slow
def test_a_container_that_a_policy_restarts_without_the_hooks_is_reported(site: PodmanSite) -> None:
    """Podman 5.8 and newer: conmon gets the hook directories as options when it is started."""
    asks = ("--annotation=tidegate.gpu/memory=4Gi", "--restart=always", "--network=none")
    for name, options in (("asks", asks), ("plain", asks[1:])):
        site.host.check("podman", "run", "--detach", "--pull=never", f"--name={name}", *options, IMAGE, "/usr/bin/sleep", "2")  # fmt: skip
    try:
        restart_asked = "podman restart asks" in site.setup()
        # The first restart may have begun before the hooks were set up.
        await_restarts(site, 1)
        site.stages()
        await_restarts(site, 2)
        assert restart_asked is ("createRuntime" not in site.stages())
        found = site.doctor("podman.service")[0]
        assert (
            found.startswith("warning: the container asks was started before the ") is restart_asked
        )
        await_restarts(site, 3)
        assert ("note: asks started before the hooks were set up" in site.setup()) is restart_asked
        site.host.check("podman", "restart", "--time=0", "asks")
        wait_for(lambda: "createRuntime" in site.stages(), "the hook")
        assert site.setup() == "podman: already set up, nothing to do\n"
    finally:
        # A container that is being restarted at that moment is not removed.
        remove = ("podman", "rm", "--force", "--time=0", "--ignore", "asks", "plain")
        wait_for(lambda: site.host.run(*remove).status == 0, "the containers to be removed")


def await_restarts(site: PodmanSite, count: int) -> None:
    """Wait until Podman has restarted the container `count` times, so that it has just started."""
    inspect = ("podman", "inspect", "--format", "{{.RestartCount}}", "asks")
    wait_for(lambda: int(site.host.check(*inspect)) >= count, "a restart")


def test_files_that_podman_rejects_change_nothing(site: PodmanSite) -> None:
    broken = "/etc/containers/containers.conf.d/60.conf"
    site.host.write(broken, "[engine]\ncgroup_manager = 4\n")
    before = site.files()
    assert re.search(r"60\.conf\S* toml: line 2 ", site.refused())
    assert site.files() == before
    site.host.path(broken).unlink()
    # The file is valid, but the resulting configuration is not what setup needs.
    conf = site.host.path("/etc/containers/containers.conf").read_text()
    site.host.write("/root/.config/containers/containers.conf", f'{conf}hooks_dir = ["/x"]\n')
    try:
        version = int(site.host.check("podman", "--version").split()[2].partition(".")[0])
        if version == 5:
            assert site.refused().endswith(
                "with the new files, Podman would read hooks from /x but not from "
                f"{OWN}, because another containers.conf takes precedence; nothing was changed; correct that first\n"
            )
            assert not site.host.path(OWN).exists()
        else:
            # Podman 4.3 does not read root's own file. Podman 6 reads it instead of the one in
            # /etc, before the drop-ins, and /x stays in force.
            assert f'"{OWN}"]' in site.setup()
            assert site.run() == STAGES
            assert ('"/x"' in site.host.path(CONF).read_text()) is (version == 6)
    finally:
        site.host.path("/root/.config/containers/containers.conf").unlink()
