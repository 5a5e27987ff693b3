"""Docker, containerd and podman start containers by quota: real engines, the real hook, runtime, governor and mirror.

The engines are those of this machine's release, in a node of their own (engine_host.py); tests of newer releases are slow. One
governor serves all engines of a node, as on a real one.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import yaml

from bench.machine import Simulated
from bench.node import BenchNode
from governor.client import ask
from governor.doctor.checks import examine
from governor.doctor.engines import docker_labels
from governor.doctor.finding import Severity
from governor.doctor.node import ExaminedNode
from tests.conftest import lack
from tests.container.bundles import ROOT, make_rootfs
from tests.container.engine_host import EngineHost, describe_process, machine
from tests.container.engines import (
    ENGINES,
    IMAGE,
    ContainerdCri,
    Crio,
    Ctr,
    Docker,
    Engine,
    Podman,
    PodmanCrun,
    Started,
    StartError,
    crio_binds,
    pack_image,
    plain,
    top_layer,
)
from tests.container.nodes import wait_for

GOOD = {"memory": "2Gi", "compute": "40"}
WRONG = {"memory": "much"}
WORKLOAD = (
    *("/usr/bin/simgpu-workload", "--unit-us", "500", "--seconds", "600"),
    *("--out", "/out/progress.bin", "--wait-file", "/out/begin"),
)
IDLE = ("/usr/bin/sleep", "infinity")
CONTROL = "/usr/lib/x86_64-linux-gnu/glibc-hwcaps/x86-64-v2/libcuda.so.1"
GIB = 1 << 30


class OldDocker(Docker):
    """Docker before version 24, which has no annotations for containers: where the node allows it,
    variables replace them.
    """

    annotates = False

    def knows_cdi(self) -> bool:
        return False

    settings: ClassVar = {
        "runtimes": {
            "tidegate": {
                "path": "/usr/bin/tidegate-runtime",
                "runtimeArgs": ["--tidegate-config", "/etc/tidegate/runtime-docker"],
            }
        }
    }

    def start(self, image: Path) -> None:
        self.host.write("/etc/tidegate/runtime-docker", "environment allow\n")
        super().start(image)

    def _options(self, started: Started, *, ours: bool) -> list[str]:
        options = ["--runtime", "tidegate" if ours else "runc"]
        for key, value in started.annotations.items():
            name = key.rpartition("/")[2].replace("-", "_").upper()
            options += ["--env", f"TIDEGATE_{name}={value}"]
        return options


@dataclass
class EngineSite:
    """A node with a governor, a mirror and engines."""

    node: BenchNode
    host: EngineHost
    image: Path
    rootfs: Path  # of the image
    engines: dict[str, Engine]

    def books(self) -> dict[str, dict]:
        """Return the governor's containers, by id."""
        return {one["id"]: one for one in ask(self.node.config, "list")["containers"]}

    def traces(self) -> set[str]:
        """Return what exists on the node for containers: mounts, control groups, directories of the governor."""
        found = {*self.host.mounts(), *self.host.groups(), *self.directories()}
        # This is Podman's own bind mount of its storage on itself; a process of podman leaves it in
        # place while another process of podman runs.
        return found - {"/var/lib/containers/storage/overlay"}

    def directories(self) -> set[str]:
        """Return the directories that the governor has for containers."""
        return {path.name for path in (self.node.runtime_dir / "containers").iterdir()}


def unpacked(suite: str) -> Path:
    """Return the root file system with the engines of a release."""
    done = subprocess.run(
        [str(ROOT / "tools/engine-root"), suite],
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    if done.returncode:
        lack(f"needs engines of {suite}: {done.stderr.strip()}")
    return ROOT / "build/engines" / suite


SUITES = [
    pytest.param(suite, marks=[] if suite == machine() else [pytest.mark.slow])
    for suite in dict.fromkeys((machine(), "bookworm", "trixie", "forky", "resolute", "stonking"))
]


@pytest.fixture(scope="module", params=SUITES)
def site(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    build_dir: Path,
    require: Callable[..., None],
) -> Iterator[EngineSite]:
    require("gcc", "nsenter", "unshare", "setpriv")
    yield from make_site(request.param, tmp_path_factory.mktemp("e"), build_dir)


def make_site(
    suite: str, base: Path, build_dir: Path, *, cgroup2_only: bool = False
) -> Iterator[EngineSite]:
    """Make a node with the engines of a release; `cgroup2_only` is as in engine_host.py."""
    root = unpacked(suite)
    (base / "node").mkdir()
    machine_ = Simulated(base / "node", build_dir)
    rootfs = make_rootfs(base / "rootfs", base / "tools")
    for program in (build_dir / "simgpu/simgpu-workload", build_dir / "burner"):
        (rootfs / "usr/bin" / program.name).write_bytes(program.read_bytes())
        (rootfs / "usr/bin" / program.name).chmod(0o755)
    with BenchNode(machine_) as node:
        binds = [
            str(node.runtime_dir),
            f"{node.runtime_dir}:/run/tidegate",
            f"{node.driver_dir}:/var/lib/tidegate/driver",
            str(machine_.directory),
            str(build_dir),  # the driver's files, which the hook compares
        ]
        binds += crio_binds()
        with EngineHost(root, base, binds=binds, cgroup2_only=cgroup2_only) as host:
            image = pack_image(rootfs, host.work / "image.tar")
            for program in ("tidegate-hook", "tidegate-runtime"):
                built = build_dir / "oci_hook/front" / program
                host.path(f"/usr/bin/{program}").symlink_to(built)
            # The server runs in the namespaces of the engines, as on a real node: it serves only
            # callers in the same ones.
            server = host.start(
                str(ROOT / "oci_hook/tidegate-forkserver"), log=host.work / "forkserver.log"
            )
            listening = host.path("/run/tidegate/forkserver.sock")
            wait_for(lambda: listening.exists() or server.poll() is not None, "the fork server")
            made = EngineSite(node, host, image, rootfs, {})
            yield made
            for engine in reversed(made.engines.values()):
                engine.stop()
            assert host.stop(server) == 0, (host.work / "forkserver.log").read_text()
        assert not made.books()


@pytest.fixture(params=ENGINES, ids=lambda kind: kind.name)
def engine(site: EngineSite, request: pytest.FixtureRequest) -> Iterator[Engine]:
    """An engine of the node, started on first use; its containers are gone after the test."""
    yield from used(site, request.param)


def used(site: EngineSite, kind: type[Engine]) -> Iterator[Engine]:
    if kind.name not in site.engines:
        if kind is Docker and old_docker(site.host):
            kind = OldDocker
        one = kind(site.host, {str(site.node.machine.directory): "/dev/tidegate-simgpu"})
        one.start(site.image)
        site.engines[kind.name] = one
        print(f"engine: {one.version()}")
    found = site.engines[kind.name]
    yield found
    for started in found.running.copy():
        found.remove(started)
    wait_for(lambda: not site.books(), "no container to be registered")


def old_docker(host: EngineHost) -> bool:
    """Return whether this is a Docker without annotations."""
    return int(host.check("dockerd", "--version").split()[2].partition(".")[0]) < 24


def wait_ready(started: Started) -> None:
    """Wait until the workload is set up."""
    ready = started.out / "begin.ready"
    wait_for(lambda: ready.exists() or not Path(f"/proc/{started.pid}").exists(), "the workload")
    assert ready.exists()


def begin(site: EngineSite, started: Started) -> None:
    """Let the workload begin, and wait until the governor has counted a launch."""
    (started.out / "begin").touch()
    wait_for(
        lambda: site.books()[started.identifier]["devices"][0]["launches"] > 0, "a counted launch"
    )


def mount_points(engine: Engine, started: Started) -> list[str]:
    """Return the mount points in a container."""
    ran = engine.exec(started, "cat", "/proc/1/mountinfo")
    assert ran.status == 0, ran.text
    return sorted(line.split()[4] for line in ran.stdout.splitlines())


def test_a_container_with_annotations_is_governed(site: EngineSite, engine: Engine) -> None:
    engine.remove(engine.run(*IDLE))  # what an engine makes for its first container may stay
    before = site.traces()
    started = engine.run(*WORKLOAD, annotations=GOOD)
    wait_ready(started)
    [seen] = [one for one in site.books().values() if one["id"] == started.identifier]
    assert seen["confirmed"]
    assert seen["control_group"]  # identifies its processes
    assert seen["pid"] == started.pid
    assert len(seen["processes"]) == 1
    assert seen["devices"][0]["memory_limit"] == 2 * GIB
    assert CONTROL in engine.exec(started, "cat", "/proc/1/maps").stdout
    begin(site, started)
    engine.remove(started)
    wait_for(lambda: not site.books(), "the container to leave the books")
    wait_for(lambda: site.traces() <= before, "every trace of the container to go", 5)


FIND = """
import json, sys
sys.path.insert(0, sys.argv[1])
from governor.names import find_name
print(json.dumps(find_name(*json.loads(sys.argv[2]))))
"""


def test_a_container_is_shown_under_its_engines_name(site: EngineSite, engine: Engine) -> None:
    """The name comes from the files that the engine itself has written, as `tidegate ps` reads them on the node."""
    started = engine.run(*IDLE, annotations=GOOD)
    seen = site.books()[started.identifier]
    entry = json.dumps([seen["id"], seen["bundle"], seen["identity"]])
    found = json.loads(site.host.check("python3", "-c", FIND, str(ROOT), entry))
    expected = {
        Docker: ["docker", started.name, ""],
        Podman: ["podman", started.name, ""],
        ContainerdCri: ["containerd", "main", f"team/{started.name}"],
        Crio: ["cri-o", "main", f"team/{started.name}"],
        Ctr: ["containerd", "", ""],  # ctr gives a container only an id
    }
    assert found == next(names for kind, names in expected.items() if isinstance(engine, kind))


CHECKS_OF: dict[type[Engine], tuple[str, ...]] = {
    Docker: ("docker.version", "docker.runtime", "docker.labels"),
    Ctr: ("containerd.version", "containerd.handler"),
    Podman: ("podman.version", "podman.hooks"),
    Crio: ("crio.version", "crio.configuration", "crio.handler"),
}


def test_doctor_finds_nothing_wrong_with_the_engine_and_reports_its_version(
    site: EngineSite, engine: Engine
) -> None:
    """doctor reads the output and the files of the engine's own programs, which change with their versions."""
    node = ExaminedNode(f"/proc/{site.host.pid}/root", runner=lambda c: site.host.check(*c))
    ids = next(found for kind, found in CHECKS_OF.items() if isinstance(engine, kind))
    findings = {
        one.id: one.finding for one in examine(node, (*ids, "runc.version", "crun.version"))
    }
    states = {identifier: finding.state for identifier, finding in findings.items()}
    expected = dict.fromkeys(states, Severity.OK)
    if isinstance(engine, OldDocker):  # which has no annotations
        expected["docker.version"] = Severity.WARNING
    assert states == expected, findings
    version = re.search(r" (\d+\.[\d.]+)", engine.version())
    assert version is not None
    assert version[1] in findings[ids[0]].found


def test_a_container_without_annotations_is_the_same_as_without_tidegate(
    site: EngineSite, engine: Engine
) -> None:
    ungoverned = engine.run(*IDLE, ours=False)
    beside = engine.run(*IDLE)
    assert plain(beside.config()) == plain(ungoverned.config())
    assert beside.written() == ungoverned.written()
    assert mount_points(engine, beside) == mount_points(engine, ungoverned)
    assert not site.books()


def test_a_wrong_annotation_fails_the_start_with_our_line(site: EngineSite, engine: Engine) -> None:
    with pytest.raises(StartError) as caught:
        engine.run(*IDLE, annotations=WRONG)
    text = str(caught.value)
    assert text.count("tidegate: ") == 1, text
    # An engine without annotations uses a variable.
    assert "tidegate.gpu/memory is 'much'" in text or "TIDEGATE_MEMORY is 'much'" in text
    assert not site.books()
    assert not site.directories()


def test_an_optional_driver_is_mounted_if_the_image_supports_it(
    site: EngineSite, engine: Engine
) -> None:
    """The image is inspected before config.json is edited: every engine has mounted the image by
    then.
    """
    started = engine.run(*IDLE, annotations={**GOOD, "driver": "optional"})
    assert set(site.books()) == {started.identifier}
    assert "tidegate.gpu/reservation" in started.config()["annotations"]


def test_a_program_executed_in_a_container_is_governed(engine: Engine) -> None:
    started = engine.run(*IDLE, annotations=GOOD)
    ran = engine.exec(started, *WORKLOAD[:3], "--allocate", str(3 * GIB))
    assert "CUDA_ERROR_OUT_OF_MEMORY" in ran.stdout, ran.text
    ran = engine.exec(started, *WORKLOAD[:3], "--allocate", str(GIB))
    assert "CUDA_SUCCESS" in ran.stdout, ran.text


def compose_file(site: EngineSite, key: str) -> Path:
    """Write the documented Compose file, with our image, and with its annotations under `key`."""
    page = (ROOT / "docs/howto/engines.md").read_text()
    text = page.split("### Docker Compose", 1)[1].split("```yaml\n", 1)[1].split("```", 1)[0]
    document = yaml.safe_load(text)
    (service,) = document["services"].values()
    service |= {"image": IMAGE, "command": "/usr/bin/sleep 3600", "network_mode": "none"}
    service[key] = service.pop("annotations")
    path = site.host.work / key / "compose.yaml"
    path.parent.mkdir()
    path.write_text(yaml.safe_dump(document))
    return path


def compose_version(host: EngineHost) -> tuple[int, int]:
    """Return the version of Docker Compose."""
    found = re.search(r"(\d+)\.(\d+)", host.check("docker", "compose", "version", "--short"))
    assert found
    return int(found[1]), int(found[2])


@pytest.mark.parametrize("engine", [Docker], ids=lambda kind: kind.name, indirect=True)
def test_a_service_of_compose_is_governed_by_its_annotations_and_not_by_labels(
    site: EngineSite, engine: Engine
) -> None:
    host = site.host
    if host.run("docker", "compose", "version").status:
        pytest.skip(f"{engine.version()} has no Compose of its own")

    def compose(key: str, *words: str) -> str:
        file = site.host.work / key / "compose.yaml"
        return host.check("docker", "compose", "--file", str(file), *words)

    for key in ("annotations", "labels"):
        compose_file(site, key)
        compose(key, "up", "--detach")
    try:
        asked, labelled = (
            compose(key, "ps", "--quiet").strip() for key in ("annotations", "labels")
        )
        books = site.books()
        # Compose before 2.26 reads annotations and drops them (docs/howto/engines.md): Ubuntu 24.04 has 2.24.
        if compose_version(host) >= (2, 26):
            assert set(books) == {asked}
            assert books[asked]["devices"][0]["memory_limit"] == 4 * GIB
        else:
            assert not books
        config = (
            engine.bundle(Started(engine, "labelled", labelled, site.host.work)) + "/config.json"
        )
        assert "tidegate.gpu/" not in host.path(config).read_text()
        node = ExaminedNode(f"/proc/{host.pid}/root", runner=lambda command: host.check(*command))
        (said,) = docker_labels(node)
        assert said.state is Severity.WARNING
        assert "labels-first-1 has the label tidegate.gpu/compute, " in said.found
    finally:
        for key in ("annotations", "labels"):
            compose(key, "down", "--timeout", "0")
    wait_for(lambda: not site.books(), "the service to leave the books")


# Not for CRI: a kubelet starts another container instead.
@pytest.mark.parametrize(
    "engine", [Docker, Ctr, Podman, PodmanCrun], ids=lambda kind: kind.name, indirect=True
)
def test_a_restarted_container_is_governed_again(site: EngineSite, engine: Engine) -> None:
    started = engine.run(*WORKLOAD, annotations=GOOD)
    first = started.pid
    wait_ready(started)
    kept = started.written()
    for _ in range(2):
        (started.out / "begin.ready").unlink()
        (started.out / "begin").unlink(missing_ok=True)
        engine.restart(started)
        wait_ready(started)
        assert started.pid != first
        assert site.books()[started.identifier]["pid"] == started.pid
        begin(site, started)
        assert started.written() == kept


def put_cdi(site: EngineSite, tmp_path: Path) -> None:
    """Write the node's CDI file, as `tidegate cdi generate` makes it."""
    file = tmp_path / "tidegate.json"
    subprocess.run(
        [sys.executable, "-m", "governor.cli", "cdi", "generate", "--output", str(file),
         "--driver-dir", str(site.node.driver_dir)],
        check=True, cwd=ROOT, env={**os.environ, **site.node.machine.environment},
    )  # fmt: skip
    site.host.write("/etc/cdi/tidegate.json", file.read_text())


def test_a_device_of_cdi_is_governed_without_our_runtime(
    site: EngineSite, engine: Engine, tmp_path: Path
) -> None:
    """The hook comes with the device; the quota still comes from annotations."""
    if not engine.knows_cdi():
        pytest.skip(f"{engine.version()} does not support CDI")
    put_cdi(site, tmp_path)
    started = engine.run(
        *WORKLOAD, annotations=GOOD, ours=False, devices=("tidegate.gpu/shared=0",)
    )
    wait_ready(started)
    assert set(site.books()) == {started.identifier}
    assert site.books()[started.identifier]["devices"][0]["memory_limit"] == 2 * GIB
    begin(site, started)


def test_a_cdi_device_is_refused_with_the_reason_if_no_annotations_reach_the_hook(
    site: EngineSite, engine: Engine, tmp_path: Path
) -> None:
    """This happens with containerd's default handler, which passes no annotations on."""
    if not engine.knows_cdi():
        pytest.skip(f"{engine.version()} does not support CDI")
    put_cdi(site, tmp_path)
    with pytest.raises(StartError) as caught:
        engine.run(*WORKLOAD, ours=False, devices=("tidegate.gpu/shared=0",))
    said = "the container has a device of tidegate.gpu/shared, but no annotation"
    assert said in str(caught.value)
    assert "runtimeClassName: tidegate" in str(caught.value)
    assert site.books() == {}


NO_LIBRARY = (
    "libcuda.so.1: libcuda.so.1: cannot open shared object file: No such file or directory\n"
)


@pytest.mark.parametrize(
    "engine", [Docker, Podman, PodmanCrun], ids=lambda kind: kind.name, indirect=True
)
def test_a_commit_of_an_ended_container_contains_nothing_of_ours(
    site: EngineSite, engine: Engine
) -> None:
    """The layer is the same as without Tidegate, except for entries that equal the image's."""
    ungoverned = engine.run(*IDLE, ours=False)
    governed = engine.run(*WORKLOAD, annotations=GOOD)
    wait_ready(governed)
    layers = []
    for n, started in enumerate((ungoverned, governed)):
        engine.end(started)
        archive = site.host.work / f"{engine.name}-ended-{n}.tar"
        engine.commit(started, f"docker.io/library/tidegate-test:ended-{n}", archive)
        layers.append(top_layer(archive, site.rootfs))
        archive.unlink()
    assert layers[1] == layers[0]
    again = engine.run(*IDLE, ours=False, image="docker.io/library/tidegate-test:ended-1")
    assert engine.exec(again, "probe", "libcuda.so.1").stdout == NO_LIBRARY
    assert not list((site.node.runtime_dir / "traces").iterdir())


@pytest.mark.parametrize("engine", [Docker, Podman], ids=lambda kind: kind.name, indirect=True)
def test_a_commit_of_a_running_container_contains_no_driver_file_and_runs_without_tidegate(
    site: EngineSite, engine: Engine
) -> None:
    """The image keeps two empty directories, which are mount points, and the ld.so.cache that the hook wrote."""
    ungoverned = engine.run(*IDLE, ours=False)
    governed = engine.run(*WORKLOAD, annotations=GOOD)
    wait_ready(governed)
    layers = []
    for n, started in enumerate((ungoverned, governed)):
        archive = site.host.work / f"{engine.name}-{n}.tar"
        engine.commit(started, f"docker.io/library/tidegate-test:commit-{n}", archive)
        layers.append(set(top_layer(archive)))
        archive.unlink()
    again = engine.run(*IDLE, ours=False, image="docker.io/library/tidegate-test:commit-1")
    assert engine.exec(again, "probe", "libcuda.so.1").stdout == NO_LIBRARY
    assert layers[1] - layers[0] == {
        "etc/ld.so.cache",
        "run/tidegate",
        CONTROL.strip("/").rpartition("/")[0],
    }
    listed = engine.exec(again, "ls", "-A", "/run/tidegate", CONTROL.rpartition("/")[0])
    assert (listed.status, listed.stdout.split()[2:]) == (0, [])
    # A container of the new image, which already has these, is governed again.
    anew = engine.run(*WORKLOAD, annotations=GOOD, image="docker.io/library/tidegate-test:commit-1")
    wait_ready(anew)
    begin(site, anew)


@pytest.mark.parametrize("engine", [ContainerdCri], ids=lambda kind: kind.name, indirect=True)
@pytest.mark.parametrize("privileged", [False, True])
def test_the_sandbox_of_a_pod_takes_no_quota(
    site: EngineSite, engine: ContainerdCri, monkeypatch: pytest.MonkeyPatch, *, privileged: bool
) -> None:
    """A pod's annotations reach its sandbox, too, which has the container's handler."""
    monkeypatch.setattr(engine, "privileged", privileged)
    started = engine.run(*IDLE, annotations=GOOD)
    assert set(site.books()) == {started.identifier}


def test_leftovers_of_engines_are_reported_and_removed(tmp_path: Path) -> None:
    """Test the harness itself: `EngineHost.leave` reports the processes that still run."""
    host = EngineHost(unpacked(machine()), tmp_path).__enter__()
    try:
        daemon = host.start("sleep", "1000", log=tmp_path / "log")
        host.check("sh", "-c", "sleep 1001 >/dev/null 2>&1 & mount -t tmpfs tmpfs /tmp")
        [stray] = host.processes() - {daemon.pid}
        for pid in (daemon.pid, stray):
            wait_for(lambda pid=pid: "(sleep " in describe_process(pid), "its program to be there")
        groups = [hierarchy.group for hierarchy in host.hierarchies]
    finally:
        left = host.leave(patience=0.1)
    assert left == [
        f"a daemon runs: {daemon.pid} (sleep 1000)",
        f"a process runs: {stray} (sleep 1001)",
    ]
    wait_for(lambda: not Path(f"/proc/{stray}").exists(), "the stray process's parent to notice")
    assert not any(group.exists() for group in groups)
    assert f"{tmp_path}/place" not in Path("/proc/self/mountinfo").read_text()
