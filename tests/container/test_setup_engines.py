"""`tidegate setup` on a node with real engines: afterwards they start our programs, and after --undo they do not.

The programs that it sets up are stubs here, which record that they were started: a runtime that executes runc, and a
hook that passes config.json on. test_engines.py tests what the real programs do with a container.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
import tomllib
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from governor import cli
from governor.setup import plan
from tests.container.bundles import ROOT, make_rootfs
from tests.container.cri import Cri, strings
from tests.container.engine_host import CommandResult, EngineHost
from tests.container.engines import CONTAINERS_CONF, IMAGE, pack_image
from tests.container.test_engines import SUITES, unpacked
from tests.unit.setup_tree import put, put_programs, setup
from tests.unit.test_setup_containerd import CONFIG as CONTAINERD_TOML
from tests.unit.test_setup_containerd import NODE2, V2, V3

RUNTIME = '#!/bin/sh\necho runtime >>/tmp/started\nexec runc "$@"\n'
HOOK = """#!/bin/sh
echo "$1 $PATH" >>/tmp/started
[ "$1" != precreate ] || exec cat
cat >/dev/null
"""
PATHS = "/usr/sbin:/usr/bin:/sbin:/bin"
ASKS = ("--annotation", "tidegate.gpu/memory=4Gi")
DAEMON = '{\n  "bridge": "none",\n  "iptables": false,\n  "ip6tables": false,\n  "ip-forward": false\n}\n'
CONFIG2 = """version = 2 # as it was
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{image}"
restrict_oom_score_adj = true
"""
CONFIG3 = """version = 3 # as it was
[plugins.'io.containerd.cri.v1.images'.pinned_images]
sandbox = "{image}"
[plugins.'io.containerd.cri.v1.runtime']
restrict_oom_score_adj = true
"""
CONFIG4 = CONFIG3.replace("version = 3", "version = 4")
RELOAD_S = 20.0


def containerd_config(release: str) -> str:
    """Return a config.toml of the newest version that a containerd reads."""
    found = plan.version(release)
    assert found is not None
    newest = CONFIG2 if found < (2, 0) else CONFIG3 if found < (2, 3) else CONFIG4
    return newest.format(image=IMAGE)


@dataclass
class SetupSite:
    """A node, an image, and a record of the programs that were started."""

    host: EngineHost
    image: Path

    def setup(self, *words: str) -> None:
        """Run `tidegate setup` on the host, with the node's root: no engine is queried, and no file
        of the host is touched.
        """
        assert cli.main(["setup", *words, "--root", f"/proc/{self.host.pid}/root"]) == 0

    def started(self) -> list[str]:
        """Return which of our programs were started since the last call."""
        file = self.host.path("/tmp/started")
        lines = file.read_text().splitlines() if file.exists() else []
        file.unlink(missing_ok=True)
        return sorted(set(lines))


@pytest.fixture(scope="module", params=SUITES)
def site(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    require: Callable[..., None],
) -> Iterator[SetupSite]:
    require("gcc", "nsenter", "unshare", "setpriv")
    root = unpacked(request.param)
    base = tmp_path_factory.mktemp("s")
    rootfs = make_rootfs(base / "rootfs", base / "tools")
    with EngineHost(root, base) as host:
        host.write("/usr/bin/tidegate-runtime", RUNTIME, 0o755)
        host.write("/usr/bin/tidegate-hook", HOOK, 0o755)
        yield SetupSite(host, pack_image(rootfs, host.work / "image.tar"))


def answers(site: SetupSite, *command: str) -> str:
    """Wait until a command that queries a daemon succeeds, and return its output. Raise
    AssertionError after `RELOAD_S` seconds.
    """
    deadline = time.monotonic() + RELOAD_S
    while True:
        try:
            return site.host.check(*command)
        except AssertionError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def test_podman(site):
    host = site.host
    host.write("/etc/containers/containers.conf", CONTAINERS_CONF.format(runtime="runc"))
    host.check("podman", "load", "--input", str(site.image))
    run = ("podman", "run", "--rm", "--pull=never", "--network=none")
    site.setup("podman")
    host.check(*run, *ASKS, IMAGE, "/usr/bin/sleep", "0")
    # Each stage runs in the environment that its entry sets.
    stages = ("createRuntime", "poststop", "precreate")
    assert site.started() == [f"{stage} {PATHS}" for stage in stages]
    host.check(*run, IMAGE, "/usr/bin/sleep", "0")
    assert site.started() == []
    site.setup("podman", "--undo")
    host.check(*run, *ASKS, IMAGE, "/usr/bin/sleep", "0")
    assert site.started() == []


def test_docker(site):
    host = site.host
    host.write("/etc/docker/daemon.json", DAEMON)
    log = host.work / "dockerd.log"
    command = ("dockerd", "--host=unix:///var/run/docker.sock")
    run = ("docker", "run", "--rm", "--network=none")
    known = (
        "docker",
        "info",
        "--format",
        "{{.DefaultRuntime}} {{range $k, $v := .Runtimes}}{{$k}} {{end}}",
    )
    daemon = host.start(*command, log=log)
    try:
        answers(site, "docker", "version")
        host.check("docker", "load", "-i", str(site.image))
        site.setup("docker")
        # The PID of the daemon in this node's file is the PID on the host.
        pid = int(host.path("/run/docker.pid").read_text())
        os.kill(pid, signal.SIGHUP)
        deadline = time.monotonic() + RELOAD_S
        while "tidegate" not in host.check(*known):
            assert time.monotonic() < deadline, "setup says that a reload is enough"
            time.sleep(0.1)
        host.check(*run, "--runtime=tidegate", IMAGE, "/usr/bin/sleep", "0")
        assert site.started() == ["runtime"]
        host.check(*run, IMAGE, "/usr/bin/sleep", "0")
        assert site.started() == []
        site.setup("docker", "--default")
        os.kill(pid, signal.SIGHUP)
        deadline = time.monotonic() + RELOAD_S
        while not host.check(*known).startswith("tidegate "):
            assert time.monotonic() < deadline, "setup says that a reload is enough for the default"
            time.sleep(0.1)
        host.check(*run, IMAGE, "/usr/bin/sleep", "0")
        assert site.started() == ["runtime"]
        site.setup("docker", "--undo")
        assert host.path("/etc/docker/daemon.json").read_text() == DAEMON
        host.stop(daemon)
        daemon = host.start(*command, log=log)
        answers(site, "docker", "version")  # `docker info` exits with 0 in any case
        assert host.check(*known).startswith("runc ")
        assert "tidegate" not in host.check(*known)
    finally:
        host.stop(daemon)


@pytest.fixture
def containerd(site) -> Iterator[Callable[[], None]]:
    """A function that restarts containerd."""
    host = site.host
    running: list[subprocess.Popen[bytes]] = []

    def again() -> None:
        while running:
            host.stop(running.pop())
        running.append(host.start("containerd", log=host.work / "containerd.log"))
        answers(site, "ctr", "version")

    yield again
    while running:
        host.stop(running.pop())


def pod(site: SetupSite, handler: str) -> dict:
    """Start a pod with a container; return the container's config.json."""
    cri = Cri(site.host, "/run/containerd/containerd.sock")
    deadline = time.monotonic() + RELOAD_S
    while not cri.call("ImageService/ImageStatus", {1: {1: IMAGE}}).get(1):
        assert time.monotonic() < deadline, "CRI does not see the image"
        time.sleep(0.05)
    name = uuid.uuid4().hex[:8]
    asks = strings({"tidegate.gpu/memory": "4Gi", "example.org/x": "1"})
    # The network of the node: there is no CNI here.
    sandbox = {1: {1: name, 2: name, 3: "team"}, 3: "/tmp", 7: asks, 8: {2: {1: {1: 2}}}}
    made = cri.call("RuntimeService/RunPodSandbox", {1: sandbox, 2: handler})[1][0].decode()
    config = {
        1: {1: "main"}, 2: {1: IMAGE}, 3: ["/usr/bin/sleep", "100"], 11: "main.log", 15: {2: {3: {1: 2}}},
    }  # fmt: skip
    container = cri.call("RuntimeService/CreateContainer", {1: made, 2: config, 3: sandbox})
    identifier = container[1][0].decode()
    cri.call("RuntimeService/StartContainer", {1: identifier})
    bundle = f"/run/containerd/io.containerd.runtime.v2.task/k8s.io/{identifier}/config.json"
    found = json.loads(site.host.path(bundle).read_text())
    cri.call("RuntimeService/StopPodSandbox", {1: made})
    cri.call("RuntimeService/RemovePodSandbox", {1: made})
    return found


@pytest.mark.parametrize("base_spec", [False, True], ids=["wrapper", "base spec"])
def test_containerd(site, containerd, base_spec, monkeypatch):
    host = site.host
    version = host.check("containerd", "--version").split()[2].lstrip("v")
    content = containerd_config(version)
    host.write("/etc/containerd/config.toml", content)
    spec = host.check("ctr", "oci", "spec")
    # Below another root, setup queries no engine: here the node's own ctr answers.
    monkeypatch.setattr(
        "governor.setup.containerd.output", lambda _root, *c: spec if c[0] == "ctr" else None
    )
    words = ["--containerd-version", version, *(["--base-spec"] if base_spec else [])]
    site.setup("containerd", *words)
    containerd()
    host.check("ctr", "-n", "k8s.io", "images", "import", str(site.image))
    ours = pod(site, "tidegate")
    asked = {key for key in ours["annotations"] if not key.startswith("io.kubernetes.")}
    assert asked == {"tidegate.gpu/memory"}
    if base_spec:
        assert site.started() == [f"createRuntime {PATHS}"]
    else:
        assert site.started() == ["runtime"]
        assert "hooks" not in ours
    # The default handler is unchanged, and the container is the same under ours.
    plain = pod(site, "runc")
    assert site.started() == []
    for one in (plain, ours):
        for key in ("annotations", "hooks", "hostname"):
            one.pop(key, None)
        one["linux"].pop("cgroupsPath")
        one["process"]["env"] = [e for e in one["process"]["env"] if not e.startswith("HOSTNAME=")]
    assert strip(ours) == strip(plain)
    site.setup("containerd", "--undo")
    assert host.path("/etc/containerd/config.toml").read_text() == content
    assert [p.name for p in host.path("/etc/containerd").iterdir()] == ["config.toml"]
    containerd()
    pod(site, "runc")
    assert site.started() == []


def strip(config: dict) -> dict:
    """Return a container's configuration without anything that is named after the container."""
    mounts = [{**m, "source": m["source"].rpartition("/")[2]} for m in config["mounts"]]
    return {**config, "mounts": mounts, "linux": {**config["linux"], "namespaces": None}}


DEFAULT = "what `containerd config default` prints"  # version 4 from 2.3 on


@pytest.mark.parametrize("content", [None, NODE2, "version = 2\n", DEFAULT])
@pytest.mark.parametrize("suite", SUITES)
def test_containerd_finds_the_handler_and_the_existing_settings(tmp_path, suite, content):
    """containerd itself reads its files; no daemon is started."""
    root, program = tmp_path, unpacked(suite) / "usr/bin/containerd"
    if content == DEFAULT:
        content = subprocess.run(
            [program, "config", "default"], check=True, capture_output=True, text=True
        ).stdout
    if content is not None:
        put(root, CONTAINERD_TOML, content)
    release = subprocess.run([program, "--version"], check=True, capture_output=True, text=True)
    put_programs(root)
    found = plan.version(release.stdout)
    assert found is not None
    version = ".".join(map(str, found))
    for words in ((), ("--containerd-version", version)):
        if content is None and not words:
            continue
        setup(root, "containerd", *words)
        file = root / CONTAINERD_TOML.lstrip("/")
        between = file.read_text()
        # Imports are absolute paths: here they have to lead into the root.
        file.write_text(re.sub("([\"'])/etc/", rf"\1{root}/etc/", between))
        dump = subprocess.run(
            [program, "--config", file, "config", "dump"],
            check=True,
            capture_output=True,
            text=True,
        )
        file.write_text(between)
        document = tomllib.loads(dump.stdout)
        plugin = V3 if found >= (2, 0) else V2
        known = document["plugins"][plugin]["containerd"]["runtimes"]
        assert set(known) >= {"runc", "tidegate"}
        assert known["tidegate"]["options"]["BinaryName"] == "/usr/bin/tidegate-runtime"
        assert known["tidegate"]["pod_annotations"][-1] == "tidegate.gpu/*"
        assert known["tidegate"]["container_annotations"] == ["tidegate.gpu/*"]
        if content == NODE2:
            assert known["tidegate"]["options"]["SystemdCgroup"] is True
            assert known["runc"]["options"]["SystemdCgroup"] is True
            assert known["runc"]["pod_annotations"] == ["example.org/*"]
            assert "registry.k8s.io/pause:3.9" in dump.stdout
        setup(root, "containerd", "--undo")


def typed(site: SetupSite, *words: str) -> CommandResult:
    """Run `tidegate setup` on the node itself, where it queries engines."""
    return site.host.run(
        "env", f"PYTHONPATH={ROOT}", "python3", "-B", "-m", "governor.cli", "setup", *words
    )


def test_a_file_that_dockerd_rejects_is_not_written(site: SetupSite) -> None:
    host = site.host
    version = host.check("dockerd", "--version").split()[2]
    for content, reason in (
        (
            '{"nosuch": 1}\n',
            "the following directives don't match any configuration option: nosuch",
        ),
        ('{"log-level": "loud"}\n', "invalid logging level: loud"),
    ):
        host.write("/etc/docker/daemon.json", content)
        ran = typed(site, "docker")
        if version.startswith("20."):
            assert ran.status == 0
            assert "note: this dockerd does not support `dockerd --validate " in ran.stdout
            assert typed(site, "docker", "--undo").status == 0
        else:
            assert ran.status == 73
            assert ran.stderr.startswith(
                "tidegate: with the new files, `dockerd --validate --config-file /etc/docker/daemon.json` exits with status 1: "
            )
            assert ran.stderr.endswith(f"{reason}; nothing was changed; correct that first\n")
        assert host.path("/etc/docker/daemon.json").read_text() == content
    host.write("/etc/docker/daemon.json", DAEMON)
    assert typed(site, "docker").status == 0
    assert typed(site, "docker", "--undo").status == 0
    assert host.path("/etc/docker/daemon.json").read_text() == DAEMON


def test_a_file_that_containerd_rejects_is_not_written(
    site: SetupSite, containerd: Callable[[], None]
) -> None:
    """Setup itself does not detect these cases: an invalid file that only the new import includes,
    and a section that CRI rejects.
    """
    host = site.host
    version = host.check("containerd", "--version").split()[2].lstrip("v")
    major = int(version.partition(".")[0])
    content = containerd_config(version)
    host.write("/etc/containerd/config.toml", content)
    if major > 1:
        beside = "/etc/containerd/conf.d/tidegate-site.toml"
        host.write(beside, "root = 4\n")
        refused = typed(site, "containerd")
        assert refused.status == 73
        assert refused.stderr.startswith(
            "tidegate: with the new files, `containerd --config /etc/containerd/config.toml config dump` exits with status 1: "
        )
        assert "cannot decode TOML integer into struct field config.Config.Root" in refused.stderr
        assert refused.stderr.endswith("; nothing was changed; correct that first\n")
        host.path(beside).unlink()
        host.path("/etc/containerd/conf.d").rmdir()
    else:
        broken = content + '[plugins."io.containerd.grpc.v1.cri".containerd]\nsnapshotter = 4\n'
        host.write("/etc/containerd/config.toml", broken)
        refused = typed(site, "containerd")
        assert refused.status == 73
        assert "Can't convert 4(int64) to string" in refused.stderr
        assert host.path("/etc/containerd/config.toml").read_text() == broken
        host.write("/etc/containerd/config.toml", content)
    assert host.path("/etc/containerd/config.toml").read_text() == content
    assert [p.name for p in host.path("/etc/containerd").iterdir()] == ["config.toml"]
    ran = typed(site, "containerd")
    assert ran.status == 0, ran.text
    containerd()
    host.check("ctr", "-n", "k8s.io", "images", "import", str(site.image))
    pod(site, "tidegate")
    assert site.started() == ["runtime"]
    assert typed(site, "containerd", "--undo").status == 0
    assert host.path("/etc/containerd/config.toml").read_text() == content
