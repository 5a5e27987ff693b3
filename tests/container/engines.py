"""Run real engines (dockerd, containerd through ctr and through CRI, podman, CRI-O), each on a node
of its own, with the same set of operations.

A container is started detached, with or without annotations, and with our runtime or hook or with neither. If a start
fails, the engine's message is raised as `StartError`: the text that a user sees.
"""

from __future__ import annotations

import abc
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from tests.container.bundles import ROOT
from tests.container.cri import Cri, CriError, strings
from tests.container.engine_host import CommandResult, EngineHost

IMAGE = "docker.io/library/tidegate-test:latest"
PREFIX = "tidegate.gpu/"
READY_S = 30.0
ENVIRONMENT = "PATH=/usr/sbin:/usr/bin"


class StartError(Exception):
    """The engine's message about a container that did not start."""


def pack_image(
    rootfs: Path,
    archive: Path,
    name: str = IMAGE,
    *,
    environment: Sequence[str] = (ENVIRONMENT,),
    command: Sequence[str] = ("/usr/bin/sleep", "infinity"),
) -> Path:
    """Write a root file system as an image of one layer, in the format of `docker save`, which every engine reads."""
    import hashlib

    layer = archive.with_suffix(".layer")
    with tarfile.open(layer, "w") as tar:
        tar.add(rootfs, arcname=".", filter=_as_root)
    digest = hashlib.sha256(layer.read_bytes()).hexdigest()
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Env": list(environment), "Cmd": list(command)},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
        "history": [{"created_by": "tidegate's tests"}],
    }
    data = json.dumps(config).encode()
    config_name = f"{hashlib.sha256(data).hexdigest()}.json"
    manifest = [{"Config": config_name, "RepoTags": [name], "Layers": ["layer.tar"]}]
    with tarfile.open(archive, "w") as tar:
        for member, content in (
            (config_name, data),
            ("manifest.json", json.dumps(manifest).encode()),
        ):
            entry = tarfile.TarInfo(member)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
        tar.add(layer, arcname="layer.tar")
    layer.unlink()
    return archive


def _as_root(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = "root"
    return entry


def top_layer(archive: Path, rootfs: Path | None = None) -> list[str]:
    """Return the paths in the last layer of an image that `docker save` wrote, without directories
    that have other entries.

    With `rootfs`, files and directories that are the same there (mode, owner and content) are left out: an overlay
    copies everything that is touched.
    """
    with tarfile.open(archive) as tar:
        file = tar.extractfile("manifest.json")
        assert file is not None
        [image] = json.load(file)
        layer = tar.extractfile(image["Layers"][-1])
        assert layer is not None
        with tarfile.open(fileobj=io.BytesIO(layer.read())) as entries:
            names = {entry.name.removeprefix("./").rstrip("/"): entry for entry in entries}
            if rootfs is not None:
                names = {n: e for n, e in names.items() if not _same(entries, e, rootfs / n)}
    return sorted(
        name
        for name, entry in names.items()
        if name and not (entry.isdir() and any(n.startswith(f"{name}/") for n in names))
    )


def _same(entries: tarfile.TarFile, entry: tarfile.TarInfo, path: Path) -> bool:
    """Return whether a file or directory of a layer belongs to root and equals the one at a
    path.
    """
    if not path.exists() or (entry.uid, entry.gid) != (0, 0) or path.is_symlink():
        return False
    if entry.mode & 0o7777 != path.stat().st_mode & 0o7777:
        return False
    if entry.isdir():
        return path.is_dir()
    file = entries.extractfile(entry)
    return file is not None and path.is_file() and file.read() == path.read_bytes()


def plain(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config.json without the parts that differ between any two containers: ids, names, times, PIDs."""
    text = json.dumps(config, sort_keys=True)
    text = re.sub(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "ID", text)
    text = re.sub(r"[0-9a-f]{64}", "ID", text)
    text = re.sub(r"\b[0-9a-f]{32}\b|\b[0-9a-f]{12}\b", "ID", text)
    text = re.sub(r"tgt-[a-z0-9-]*", "NAME", text)
    text = re.sub(
        r"\d{4}-\d\d-\d\d[T ][0-9:.]+( ?[-+Z][0-9:]*)?( UTC| [-+]\d{4} \w+)?( m=\S+)?", "TIME", text
    )
    text = re.sub(r"/proc/\d+/", "/proc/PID/", text)
    loaded: dict[str, Any] = json.loads(text)
    # Podman writes these in random order.
    loaded["mounts"].sort(key=lambda mount: mount["destination"])
    loaded["process"]["env"].sort()
    return loaded


@dataclass
class Started:
    """A container that an engine has started."""

    engine: Engine
    name: str
    identifier: str  # the id that the runtime gets
    out: Path
    pod: str = ""
    annotations: Mapping[str, str] = field(default_factory=dict)
    devices: tuple[str, ...] = ()  # by their CDI names

    @property
    def pid(self) -> int:
        """Its first process, as a PID of the host."""
        return self.engine.pid(self)

    def config(self) -> dict[str, Any]:
        """Return config.json, as the runtime got it."""
        path = self.engine.host.path(f"{self.engine.bundle(self)}/config.json")
        loaded: dict[str, Any] = json.loads(path.read_bytes())
        return loaded

    def rootfs(self) -> str:
        """Return the mount point of its root file system on the node."""
        path = self.config()["root"]["path"]
        return path if path.startswith("/") else f"{self.engine.bundle(self)}/{path}"

    def written(self) -> list[str]:
        """Return the paths in the container's own layer, without directories that have other
        entries: what a commit keeps.
        """
        rootfs = self.rootfs()
        for line in Path(f"/proc/{self.engine.host.pid}/mountinfo").read_text().splitlines():
            words = line.split()
            if words[4] == rootfs:
                options = dict(option.partition("=")[::2] for option in words[-1].split(","))
                # Podman's mount options have paths relative to its directory.
                upper = options["upperdir"]
                base = rootfs.rpartition("/overlay/")[0] + "/overlay"
                upper = upper if upper.startswith("/") else f"{base}/{upper}"
                return _leaves(self.engine.host.path(upper))
        raise AssertionError(f"{rootfs} is not a mount of the node")


def _leaves(directory: Path) -> list[str]:
    return sorted(
        str(path.relative_to(directory))
        for path in directory.rglob("*")
        if path.is_symlink() or not path.is_dir() or not any(path.iterdir())
    )


class Engine(abc.ABC):
    """An engine on a node; it serves between `start` and `stop`."""

    name = ""
    annotates = True  # whether a user can give a container annotations

    def __init__(self, host: EngineHost, volumes: Mapping[str, str]) -> None:
        """`volumes` are mounts that every container gets, as SOURCE: DESTINATION."""
        self.host = host
        self.volumes = volumes
        self.running: list[Started] = []
        self.count = 0

    @abc.abstractmethod
    def start(self, image: Path) -> None:
        """Start the daemon, if there is one, and load the image."""

    def setup(self, *arguments: str) -> None:
        """Run `tidegate setup` for the node, from outside."""
        done = subprocess.run(
            [
                *(sys.executable, "-m", "governor.cli", "setup", *arguments),
                *("--root", f"/proc/{self.host.pid}/root"),
            ],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    @abc.abstractmethod
    def stop(self) -> None:
        """Stop the daemon."""

    @abc.abstractmethod
    def version(self) -> str:
        """Return the name and the versions of the programs."""

    def run(
        self,
        *arguments: str,
        annotations: Mapping[str, str] | None = None,
        ours: bool = True,
        image: str = IMAGE,
        devices: tuple[str, ...] = (),
    ) -> Started:
        """Start a container, with our runtime or hook; if `ours` is false, as on a node without
        Tidegate.
        """
        self.count += 1
        name = f"tgt-{self.name}-{self.count}"
        out = self.host.work / name
        out.mkdir()
        full = {f"{PREFIX}{key}": value for key, value in (annotations or {}).items()}
        started = Started(self, name, "", out, annotations=full, devices=devices)
        self.running.append(started)
        try:
            started.identifier = self._run(started, list(arguments), ours=ours, image=image)
        except StartError:
            self.remove(started)
            raise
        return started

    def remove(self, started: Started) -> None:
        """End and remove a container, or what a failed start left of it."""
        self.running.remove(started)
        self._remove(started)

    @abc.abstractmethod
    def _run(self, started: Started, arguments: list[str], *, ours: bool, image: str) -> str: ...

    def knows_cdi(self) -> bool:
        """Return whether a container may request devices by CDI."""
        return True

    @abc.abstractmethod
    def exec(self, started: Started, *arguments: str) -> CommandResult:
        """Run a command in a container."""

    @abc.abstractmethod
    def restart(self, started: Started) -> None:
        """Stop a container and start it again, on the same root file system."""

    def end(self, started: Started) -> None:
        """Stop a container without removing it."""
        raise NotImplementedError(
            f"{self.name} keeps nothing that has ended: leave it out of the test"
        )

    @abc.abstractmethod
    def _remove(self, started: Started) -> None: ...

    @abc.abstractmethod
    def pid(self, started: Started) -> int: ...

    @abc.abstractmethod
    def bundle(self, started: Started) -> str: ...

    def commit(self, started: Started, image: str, archive: Path) -> None:
        """Make an image of a container, and save it."""
        raise NotImplementedError(f"{self.name} commits no containers: leave it out of the test")

    def _mounts(self, started: Started) -> Iterator[tuple[str, str]]:
        yield from self.volumes.items()
        yield str(started.out), "/out"


def _started(ran: CommandResult) -> str:
    if ran.status:
        raise StartError(ran.text)
    return ran.stdout.split()[-1]


class Docker(Engine):
    """dockerd, which starts its own containerd."""

    name = "docker"
    settings: ClassVar[
        dict[str, object]
    ] = {}  # of a subclass that registers our runtime itself, without `tidegate setup`

    def start(self, image: Path) -> None:
        """Start dockerd, without a bridge and therefore without iptables."""
        settings = {
            "bridge": "none",
            "iptables": False,
            "ip6tables": False,
            "ip-forward": False,
            "features": {"cdi": True},
        }
        self.host.write("/etc/docker/daemon.json", json.dumps({**settings, **self.settings}))
        if not self.settings:
            self.setup("docker")
        log = self.host.work / "dockerd.log"
        self.daemon = self.host.start("dockerd", "--host=unix:///var/run/docker.sock", log=log)
        _await(self.host, self.daemon, log, "docker", "info")
        self.host.check("docker", "load", "-i", str(image))

    def stop(self) -> None:
        """Stop dockerd; its containerd ends with it."""
        self.host.stop(self.daemon)

    def version(self) -> str:
        """Return the versions of the daemon and its parts."""
        return "Docker " + self.host.check(
            "docker", "version", "--format", "{{.Server.Version}}, {{(index .Server.Components 1).Name}} "
            "{{(index .Server.Components 1).Version}}, runc {{(index .Server.Components 2).Version}}",
        ).strip()  # fmt: skip

    def knows_cdi(self) -> bool:
        client = self.host.check("docker", "version", "--format", "{{.Client.Version}}")
        return int(client.partition(".")[0]) >= 25

    def _options(self, started: Started, *, ours: bool) -> list[str]:
        options = ["--runtime", "tidegate" if ours else "runc"]
        for key, value in started.annotations.items():
            options += ["--annotation", f"{key}={value}"]
        return options

    def _run(self, started: Started, arguments: list[str], *, ours: bool, image: str) -> str:
        volumes = [f"--volume={source}:{target}" for source, target in self._mounts(started)]
        devices = [f"--device={device}" for device in started.devices]
        return _started(
            self.host.run(
                "docker", "run", "--detach", "--name", started.name, "--network=none", *volumes,
                *self._options(started, ours=ours), *devices, image, *arguments,
            )
        )  # fmt: skip

    def exec(self, started: Started, *arguments: str) -> CommandResult:
        return self.host.run("docker", "exec", started.name, *arguments)

    def restart(self, started: Started) -> None:
        self.host.check("docker", "restart", "-t", "0", started.name)

    def end(self, started: Started) -> None:
        self.host.check("docker", "stop", "-t", "0", started.name)

    def _remove(self, started: Started) -> None:
        self.host.check("docker", "rm", "--force", "--volumes", started.name)

    def pid(self, started: Started) -> int:
        return int(self.host.check("docker", "inspect", "--format", "{{.State.Pid}}", started.name))

    def bundle(self, started: Started) -> str:
        # dockerd also uses a containerd that is already running.
        for state in ("/run/docker/containerd/daemon", "/run/containerd"):
            bundle = f"{state}/io.containerd.runtime.v2.task/moby/{started.identifier}"
            if self.host.path(bundle).exists():
                return bundle
        raise AssertionError(f"{started.name} has no bundle")

    def commit(self, started: Started, image: str, archive: Path) -> None:
        self.host.check("docker", "commit", started.name, image)
        self.host.check("docker", "save", "--output", str(archive), image)


# A sandbox's OOM score of -998 needs CAP_SYS_RESOURCE, which root does not have on every machine.
CONTAINERD_2 = """version = 2
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{image}"
enable_cdi = true
restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
pod_annotations = ["tidegate.gpu/*"]
"""

CONTAINERD_3 = """version = 3
[plugins.'io.containerd.cri.v1.images'.pinned_images]
sandbox = "{image}"
[plugins.'io.containerd.cri.v1.runtime']
restrict_oom_score_adj = true
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
pod_annotations = ["tidegate.gpu/*"]
"""


class Ctr(Engine):
    """containerd, with its own command line."""

    name = "ctr"
    namespace = "default"
    daemon: subprocess.Popen[bytes] | None = None

    def start(self, image: Path) -> None:
        """Start containerd, with a handler for CRI, unless it already runs; load the image."""
        if not self.host.path("/run/containerd/containerd.sock").exists():
            self._start()
        self._load(image)

    def _start(self) -> None:
        text = CONTAINERD_2 if self._version() < (2, 0) else CONTAINERD_3
        text = text.format(image=IMAGE)
        if self._version() < (1, 7):
            text = text.replace("enable_cdi = true\n", "")
        self.host.write("/etc/containerd/config.toml", text)
        major, minor = self._version()
        self.setup("containerd", "--containerd-version", f"{major}.{minor}")
        log = self.host.work / "containerd.log"
        self.daemon = self.host.start("containerd", log=log)
        _await(self.host, self.daemon, log, "ctr", "version")

    def _version(self) -> tuple[int, int]:
        found = re.search(r" v?(\d+)\.(\d+)\.", self.host.check("containerd", "--version"))
        assert found is not None
        return int(found[1]), int(found[2])

    def knows_cdi(self) -> bool:
        return self._version() >= (2, 0)  # the option --device of ctr

    def _load(self, image: Path) -> None:
        self.host.check("ctr", "-n", self.namespace, "images", "import", str(image))

    def stop(self) -> None:
        """Stop containerd if this engine started it; the images disappear with the node."""
        if self.daemon is not None:
            self.host.stop(self.daemon)

    def version(self) -> str:
        """Return the versions of the daemon and of runc."""
        line = self.host.check("containerd", "--version").split()
        return f"containerd {line[2]}, {self.host.check('runc', '--version').splitlines()[0]}"

    def _ctr(self, *arguments: str) -> CommandResult:
        return self.host.run("ctr", "-n", self.namespace, *arguments)

    def _run(self, started: Started, arguments: list[str], *, ours: bool, image: str) -> str:
        options = [
            f"--mount=type=bind,src={source},dst={target},options=rbind:rw"
            for source, target in self._mounts(started)
        ]
        for key, value in started.annotations.items():
            options += ["--annotation", f"{key}={value}"]
        options += [f"--device={device}" for device in started.devices]
        if ours:
            options += ["--runc-binary", "/usr/bin/tidegate-runtime"]
        ran = self._ctr("run", "--detach", "--null-io", *options, image, started.name, *arguments)
        if ran.status:
            raise StartError(ran.text)
        return started.name

    def exec(self, started: Started, *arguments: str) -> CommandResult:
        self.count += 1
        return self._ctr(
            "tasks", "exec", "--exec-id", f"exec-{self.count}", started.name, *arguments
        )

    def _end(self, started: Started) -> None:
        self._ctr("tasks", "kill", "--signal", "KILL", started.name)
        deadline = time.monotonic() + READY_S
        while (ran := self._ctr("tasks", "delete", started.name)).status:
            if "not found" in ran.text:
                return
            assert time.monotonic() < deadline, ran.text
            time.sleep(0.05)

    def restart(self, started: Started) -> None:
        self._end(started)
        ran = self._ctr("tasks", "start", "--detach", "--null-io", started.name)
        assert ran.status == 0, ran.text

    def _remove(self, started: Started) -> None:
        self._end(started)
        ran = self._ctr("containers", "delete", started.name)
        assert ran.status == 0 or "not found" in ran.text, ran.text

    def pid(self, started: Started) -> int:
        for line in self._ctr("tasks", "list").stdout.splitlines():
            words = line.split()
            if words[0] == started.name:
                return int(words[1])
        raise AssertionError(f"{started.name} has no task")

    def bundle(self, started: Started) -> str:
        return (
            f"/run/containerd/io.containerd.runtime.v2.task/{self.namespace}/{started.identifier}"
        )


CONTAINER, NODE = 1, 2  # values of NamespaceMode: the container's own, the host's


def _labels(started: Started) -> dict[str, str]:
    """Return the labels that a kubelet gives to pods and their containers."""
    values = {"name": started.name, "uid": started.name, "namespace": "team"}
    return {f"io.kubernetes.pod.{key}": value for key, value in values.items()}


class OverCri(Engine):
    """An engine as a kubelet uses it: a sandbox with a container, both with the pod's handler."""

    cri: Cri
    privileged = False  # whether pods may be privileged
    handler = "runc"  # the handler of a pod without a runtime class

    def _connect(self, socket: str) -> None:
        """Wait until the engine serves CRI and has the image."""
        self.cri = Cri(self.host, socket)
        deadline = time.monotonic() + READY_S
        while not self.cri.call("ImageService/ImageStatus", {1: {1: IMAGE}}).get(1):
            assert time.monotonic() < deadline, "CRI does not see the image"
            time.sleep(0.05)

    def _sandbox(self, started: Started) -> dict[int, Any]:
        # The network of the node: there is no CNI here.
        return {
            1: {1: started.name, 2: started.name, 3: "team"},
            3: str(started.out),
            6: strings(_labels(started)),
            7: strings(started.annotations),
            8: {2: {1: {1: NODE, 2: CONTAINER}, 6: int(self.privileged)}},
        }

    def _run(self, started: Started, arguments: list[str], *, ours: bool, image: str) -> str:
        sandbox = self._sandbox(started)
        mounts = [{1: target, 2: source} for source, target in self._mounts(started)]
        try:
            request = {1: sandbox, 2: "tidegate" if ours else self.handler}
            answer = self.cri.call("RuntimeService/RunPodSandbox", request)
            started.pod = answer[1][0].decode()
            config = {
                1: {1: "main"},
                2: {1: image, 18: image},  # the image's id, and the name that the user specified
                3: arguments,
                7: mounts,
                9: strings({**_labels(started), "io.kubernetes.container.name": "main"}),
                11: "main.log",
                15: {2: {3: {1: NODE, 2: CONTAINER}}},
                17: [{1: device} for device in started.devices],
            }
            answer = self.cri.call(
                "RuntimeService/CreateContainer", {1: started.pod, 2: config, 3: sandbox}
            )
            started.identifier = answer[1][0].decode()
            self.cri.call("RuntimeService/StartContainer", {1: started.identifier})
        except CriError as e:
            raise StartError(str(e)) from e
        return started.identifier

    def exec(self, started: Started, *arguments: str) -> CommandResult:
        answer = self.cri.call(
            "RuntimeService/ExecSync", {1: started.identifier, 2: list(arguments), 3: 30}
        )
        out, error = (answer.get(n, [b""])[0].decode() for n in (1, 2))
        return CommandResult(answer.get(3, [0])[0], out, error)

    def restart(self, started: Started) -> None:
        raise NotImplementedError("a kubelet makes another container: leave CRI out of the test")

    def _remove(self, started: Started) -> None:
        if started.identifier:
            self.cri.call("RuntimeService/StopContainer", {1: started.identifier})
            self.cri.call("RuntimeService/RemoveContainer", {1: started.identifier})
        if started.pod:
            self.cri.call("RuntimeService/StopPodSandbox", {1: started.pod})
            self.cri.call("RuntimeService/RemovePodSandbox", {1: started.pod})


class ContainerdCri(OverCri, Ctr):
    """containerd, with its CRI plugin."""

    name = "cri"
    namespace = "k8s.io"

    def _load(self, image: Path) -> None:
        super()._load(image)
        self._connect("/run/containerd/containerd.sock")

    def version(self) -> str:
        """Return the versions of the daemon and of CRI."""
        answer = self.cri.call("RuntimeService/Version", {})
        return f"{super().version()}, CRI {answer[4][0].decode()}"

    def knows_cdi(self) -> bool:
        return self._version() >= (1, 7)

    def pid(self, started: Started) -> int:
        started_as = Started(self, started.identifier, started.identifier, started.out)
        return super().pid(started_as)


ENGINE_BIN = os.environ.get("TIDEGATE_ENGINE_BIN", "")
CRIO_PROGRAMS = ("crio", "pinns")
CRIO_BIN = "/opt/crio/bin"  # directory on the node
LIBEXEC = "/usr/libexec/crio"
PODMAN_LIBEXEC = "/usr/libexec/podman"
CRIO_SOCKET = "/run/crio/crio.sock"
# CRI-O serves HTTP and gRPC on the same socket.
CRIO_ANSWERS = ("curl", "--silent", "--unix-socket", CRIO_SOCKET, "http://localhost/info")

# The 10-crio.conf of CRI-O's own packages: the programs are not on PATH.
CRIO_PACKAGES = f"""[crio.runtime]
default_runtime = "crun"
[crio.runtime.runtimes.crun]
runtime_path = "{LIBEXEC}/crun"
runtime_root = "/run/crun"
monitor_path = "{LIBEXEC}/conmon"
[crio.runtime.runtimes.runc]
runtime_path = "{LIBEXEC}/runc"
runtime_root = "/run/runc"
monitor_path = "{LIBEXEC}/conmon"
"""

# Additional settings for a node without systemd, network plugins and registries, where containerd
# owns NRI's socket.
CRIO_NODE = """[crio.runtime]
cgroup_manager = "cgroupfs"
disable_hostport_mapping = true
[crio.image]
pause_image = "{image}"
signature_policy = "/etc/crio/policy.json"
[crio.nri]
enable_nri = false
"""


def crio_binds() -> list[str]:
    """Return a node's bind mounts for CRI-O: none if TIDEGATE_ENGINE_BIN is not set."""
    if not ENGINE_BIN:
        return []
    for program in CRIO_PROGRAMS:
        found = Path(ENGINE_BIN) / program
        assert os.access(found, os.X_OK), f"TIDEGATE_ENGINE_BIN has no program {found}"
    return [f"{ENGINE_BIN}:{CRIO_BIN}"]


def put_crio(host: EngineHost) -> None:
    """Install CRI-O as its own packages do.

    Debian has no package of CRI-O: its programs come from the directory that TIDEGATE_ENGINE_BIN names
    (`crio_binds`). conmon, crun and runc are taken from there, too, if it has them, and otherwise from the release.
    """
    for program in CRIO_PROGRAMS:
        host.path(f"/usr/bin/{program}").symlink_to(f"{CRIO_BIN}/{program}")
    host.check("mkdir", "-p", LIBEXEC, PODMAN_LIBEXEC)
    for program in ("/usr/bin/conmon", "/usr/bin/crun", "/usr/sbin/runc"):
        brought = f"{CRIO_BIN}/{Path(program).name}"
        host.check("cp", brought if host.path(brought).exists() else program, LIBEXEC)
    # Podman searches this directory first. On PATH, a handler without monitor_path would find
    # conmon as well.
    host.check("mv", "/usr/bin/conmon", PODMAN_LIBEXEC)
    host.write("/etc/crio/policy.json", '{"default": [{"type": "insecureAcceptAnything"}]}')
    host.write("/etc/crio/crio.conf.d/10-crio.conf", CRIO_PACKAGES)
    host.write("/etc/crio/crio.conf.d/20-node.conf", CRIO_NODE.format(image=IMAGE))


class Crio(OverCri):
    """CRI-O in the layout of its own packages."""

    name = "crio"
    handler = "crun"

    def start(self, image: Path) -> None:
        """Start CRI-O. It uses Podman's storage, so podman loads the image."""
        put_crio(self.host)
        self.host.check("podman", "load", "--input", str(image))
        self.setup("crio")
        self.serve()

    def serve(self) -> None:
        """Start the daemon, for the first time or again."""
        log = self.host.work / "crio.log"
        self.daemon = self.host.start("crio", log=log)
        _await(self.host, self.daemon, log, *CRIO_ANSWERS)
        self._connect(CRIO_SOCKET)

    def stop(self) -> None:
        """Stop CRI-O."""
        self.host.stop(self.daemon)

    def version(self) -> str:
        """Return the versions of the daemon, its monitor and its runtime."""
        answer = self.cri.call("RuntimeService/Version", {})
        words = [
            self.host.check(f"{LIBEXEC}/{program}", "--version").splitlines()[0]
            for program in ("conmon", "crun")
        ]
        return f"CRI-O {answer[3][0].decode()}, {', '.join(words)}"

    def pid(self, started: Started) -> int:
        return int(self.host.path(f"{self.bundle(started)}/pidfile").read_text())

    def bundle(self, started: Started) -> str:
        return f"/run/containers/storage/overlay-containers/{started.identifier}/userdata"


CONTAINERS_CONF = """[containers]
netns = "none"
log_driver = "k8s-file"
# Podman's defaults are higher than a machine without CAP_SYS_RESOURCE can set.
default_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]
# Where version 1 of control groups has the pids controller, version 2 lacks it.
pids_limit = 0
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "{runtime}"
"""


class Podman(Engine):
    """podman, which has no daemon, with our hook through oci-hooks(5)."""

    name = "podman"
    runtime = "runc"

    def start(self, image: Path) -> None:
        """Configure podman and load the image."""
        # One file for all engines: those that use another runtime name it on podman's command line.
        self.host.write("/etc/containers/containers.conf", CONTAINERS_CONF.format(runtime="runc"))
        self.setup("podman")
        self.host.path("/run/no-hooks").mkdir(exist_ok=True)
        self._podman("load", "--input", str(image))

    def _podman(self, *arguments: str, ours: bool = True) -> str:
        return self.host.check(*self._command(*arguments, ours=ours))

    def _command(self, *arguments: str, ours: bool = True) -> list[str]:
        hooks = [] if ours else ["--hooks-dir", "/run/no-hooks"]
        return ["podman", "--runtime", self.runtime, *hooks, *arguments]

    def stop(self) -> None:
        """Do nothing: there is no daemon to stop."""

    def version(self) -> str:
        """Return the versions of the program and its runtime."""
        runtime = self.host.check(self.runtime, "--version").splitlines()[0]
        return f"Podman {self._podman('--version').split()[-1]}, {runtime}"

    def _run(self, started: Started, arguments: list[str], *, ours: bool, image: str) -> str:
        options = [f"--volume={source}:{target}" for source, target in self._mounts(started)]
        options += [f"--device={device}" for device in started.devices]
        for key, value in started.annotations.items():
            options += ["--annotation", f"{key}={value}"]
        return _started(
            self.host.run(
                *self._command(
                    "run", "--detach", "--pull=never", "--name", started.name, "--network=none",
                    *options, image, *arguments, ours=ours,
                )
            )
        )  # fmt: skip

    def exec(self, started: Started, *arguments: str) -> CommandResult:
        return self.host.run(*self._command("exec", started.name, *arguments))

    def restart(self, started: Started) -> None:
        self._podman("restart", "--time=0", started.name)

    def end(self, started: Started) -> None:
        self._podman("stop", "--time=0", started.name)

    def _remove(self, started: Started) -> None:
        self._podman("rm", "--force", "--time=0", "--volumes", started.name)

    def pid(self, started: Started) -> int:
        return int(self._podman("inspect", "--format", "{{.State.Pid}}", started.name))

    def bundle(self, started: Started) -> str:
        return f"/var/lib/containers/storage/overlay-containers/{started.identifier}/userdata"

    def commit(self, started: Started, image: str, archive: Path) -> None:
        self._podman("commit", started.name, image)
        self._podman("save", "--output", str(archive), image)


class PodmanCrun(Podman):
    """podman with crun, which discards the output of hooks."""

    name = "podman-crun"
    runtime = "crun"


def _await(host: EngineHost, daemon: subprocess.Popen[bytes], log: Path, *command: str) -> None:
    """Wait until a daemon answers."""
    deadline = time.monotonic() + READY_S
    while (ran := host.run(*command)).status:
        last = log.read_text(errors="replace")[-2000:]
        assert daemon.poll() is None, f"{command[0]}'s daemon ended: {last}"
        assert time.monotonic() < deadline, f"{ran.text}\n{last}"
        time.sleep(0.1)


ENGINES: tuple[type[Engine], ...] = (
    *(Docker, Ctr, ContainerdCri, Podman, PodmanCrun),
    *((Crio,) if ENGINE_BIN else ()),
)
