"""A cluster's node: containerd and a kubelet on a Debian root file system, in separate namespaces.

Unlike the nodes of tests/container, it has a PID namespace and a disk: `ClusterNode.crash` ends all of its processes at
once, as a reset does, and the files below /etc, /opt and /var are still there when it boots again, with a new boot id. Its
GPU is a simulated one in /dev, with a driver in the directory where NVIDIA's would be.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

from tests.cluster.binaries import Binaries
from tests.conftest import ROOT
from tests.container.engine_host import (
    END_S,
    PATH,
    TRIPLET,
    CommandResult,
    describe_process,
    groups,
    hierarchies,
    host_state,
    members,
)

SIMGPU = "/dev/tidegate-simgpu"
LIBDIR = f"/usr/lib/{TRIPLET}"
PAUSE_IMAGE = "registry.k8s.io/pause:3.10"
GPU_MEMORY = "128GiB"
READY_S = 90.0

# Kernel settings that every kubelet writes. A node has files with these values mounted over
# /proc/sys, because a write from any namespace changes the settings of the whole machine.
KERNEL = {
    "kernel/keys/root_maxbytes": "25000000",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
}

# $1 is the unpacked root, $2 the disk, $3 the node's name, and $4 the directory of this machine that the node sees,
# read-only and under the same path. Standard input has a line for each setting and each hierarchy of control groups; the
# node ends when standard input is closed. This shell is the first process of the PID namespace: while it waits for its
# child, it also reaps orphaned processes.
BOOT = r"""
set -eu
root=$1; disk=$2; name=$3; programs=$4
new=$disk/root
mkdir -p "$disk/upper" "$disk/scratch" "$new"
mount -t overlay overlay -o "lowerdir=$root,upperdir=$disk/upper,workdir=$disk/scratch" "$new"
mount -t proc proc "$new/proc"
mount -t sysfs sysfs "$new/sys"
mount -t tmpfs -o mode=755 tmpfs "$new/dev"
for device in null zero full random urandom tty kmsg; do
    touch "$new/dev/$device"
    mount --bind "/dev/$device" "$new/dev/$device"
done
mkdir "$new/dev/pts" "$new/dev/shm" "$new/dev/mqueue"
mount -t devpts -o newinstance,ptmxmode=666 devpts "$new/dev/pts"
ln -s pts/ptmx "$new/dev/ptmx"
ln -s /proc/self/fd "$new/dev/fd"
mount -t tmpfs -o mode=1777 tmpfs "$new/dev/shm"
mount -t mqueue mqueue "$new/dev/mqueue"
mkdir -p "$new/tmp" "$new/run" "$new/root"
mount -t tmpfs -o mode=755 tmpfs "$new/run"
mkdir "$new/run/lock" "$new/run/kernel"
mount -t tmpfs -o mode=1777 tmpfs "$new/tmp"
# An overlay cannot have an overlay as its upper layer.
for directory in containerd kubelet; do
    mkdir -p "$disk/$directory" "$new/var/lib/$directory"
    mount --bind "$disk/$directory" "$new/var/lib/$directory"
done
mkdir -p "$new$programs"
mount --bind "$programs" "$new$programs"
mount -o remount,bind,ro "$new$programs"
while read -r kind first second && [ "$kind" != end ]; do
    case "$kind" in
        setting)  # a file of /proc/sys and its value
            file=$new/run/kernel/$(echo "$first" | tr / .)
            echo "$second" >"$file"
            mount --bind "$file" "$new/proc/sys/$first" ;;
        cgroup2)
            mount -t cgroup2 cgroup2 "$new/sys/fs/cgroup"
            # A group that has processes of its own cannot enable controllers for groups below it.
            mkdir -p "$new/sys/fs/cgroup/init"
            echo 0 >"$new/sys/fs/cgroup/init/cgroup.procs"
            for controller in $(cat "$new/sys/fs/cgroup/cgroup.controllers"); do
                echo "+$controller" >"$new/sys/fs/cgroup/cgroup.subtree_control"
            done ;;
        cgroup)
            mountpoint -q "$new/sys/fs/cgroup" || mount -t tmpfs -o mode=755 tmpfs "$new/sys/fs/cgroup"
            mkdir "$new/sys/fs/cgroup/$second"
            mount -t cgroup -o "$first" cgroup "$new/sys/fs/cgroup/$second" ;;
    esac
done
for file in resolv.conf hosts; do [ -e "$new/etc/$file" ] || : >"$new/etc/$file"; done
[ -s "$new/etc/machine-id" ] || tr -d - </proc/sys/kernel/random/uuid >"$new/etc/machine-id"
echo "$name" >"$new/etc/hostname"
echo "$name" >/proc/sys/kernel/hostname
cd "$new"
pivot_root . .     # mounts the old root on top of the new one
umount --lazy .    # unmounts the old root
ip link set lo up
echo 1 >/proc/sys/net/ipv4/ip_forward
mount --make-rshared /  # as systemd does: a kubelet's mounts have to reach containers
echo ready
trap '' TERM INT
cat >/dev/null
"""

CONTAINERD = """version = 3
[plugins.'io.containerd.cri.v1.images'.pinned_images]
sandbox = "{pause}"
[plugins.'io.containerd.cri.v1.runtime']
# A sandbox's score of -998 needs CAP_SYS_RESOURCE, which root does not have on every machine.
restrict_oom_score_adj = true
[plugins.'io.containerd.cri.v1.runtime'.cni]
bin_dirs = ["{programs}"]
"""

KUBELET = {
    "apiVersion": "kubelet.config.k8s.io/v1beta1",
    "kind": "KubeletConfiguration",
    "authentication": {"anonymous": {"enabled": False}, "webhook": {"enabled": False}},
    "authorization": {"mode": "AlwaysAllow"},
    "cgroupDriver": "cgroupfs",
    "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
    # The machine may have only control groups of version 1.
    "failCgroupV1": False,
    "failSwapOn": False,
    "makeIPTablesUtilChains": False,
    "resolvConf": "",
    # The free space that the kubelet would measure is this machine's, not the node's.
    "evictionHard": {"memory.available": "0%", "nodefs.available": "0%", "imagefs.available": "0%"},
    "imageGCHighThresholdPercent": 100,
    "maxPods": 200,
    # By default the kubelet delays restarts of a container that is killed several times within ten minutes by up to five
    # minutes.
    "crashLoopBackOff": {"maxContainerRestartPeriod": "2s"},
}


class NodeDaemon:
    """A daemon of a node; `kill` ends it as a crash does, and leaves its children running."""

    def __init__(self, node: ClusterNode, name: str, command: list[str]) -> None:
        self.node = node
        self.name = name
        self.command = command
        self._entered: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """The daemon's PID on this machine; None while it is not running."""
        if self._entered is None or self._entered.poll() is not None:
            return None
        # nsenter forks to enter the PID namespace, and waits for its child.
        children = Path(f"/proc/{self._entered.pid}/task/{self._entered.pid}/children")
        found = children.read_text().split()
        return int(found[0]) if found else None

    def start(self) -> None:
        """Start the daemon; its output goes to NAME.log."""
        with self.node.log(self.name).open("ab") as log:
            self._entered = subprocess.Popen(
                self.node.command_line(*self.command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={"PATH": PATH, "HOME": "/root"},
            )

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Kill the daemon, and wait for its end."""
        if self._entered is None:
            return
        if (pid := self.pid) is not None:
            os.kill(pid, number)
        self._entered.wait(END_S)
        self._entered = None

    def check(self) -> None:
        """Raise AssertionError if the daemon has ended unexpectedly."""
        ended = self._entered is None or self._entered.poll() is not None
        assert not ended, f"{self.name} of {self.node.name} has ended\n{self.tail()}"

    def tail(self) -> str:
        """Return the end of the daemon's log."""
        path = self.node.log(self.name)
        return path.read_text(errors="replace")[-3000:] if path.exists() else ""


class ClusterNode:
    """A node, off until `boot`. `close` stops it and returns what is left of it on this machine."""

    def __init__(
        self,
        name: str,
        base: Path,
        *,
        binaries: Binaries,
        root: Path,
        build: Path,
        address: str,
        pods: str,
        devices: int = 1,
    ) -> None:
        """`root` is the output of tools/engine-root, `pods` the address range of pods in CIDR notation."""
        self.name = name
        self.base = base
        self.binaries = binaries
        self.root = root
        self.build = build
        self.address = address
        self.pods = pods
        self.devices = devices
        self.hierarchies = hierarchies(f"tidegate-cluster-{os.getpid()}-{name}")
        self.containerd = NodeDaemon(self, "containerd", ["containerd"])
        self.kubelet = NodeDaemon(self, "kubelet", self._kubelet_command())
        self.images: list[Path] = []
        self.pid = 0  # the first process, as a PID of this machine
        self._unshare: subprocess.Popen[str] | None = None
        self._before = host_state()
        base.mkdir(parents=True)

    @property
    def disk(self) -> Path:
        """The directory that persists across boots."""
        return self.base / "disk"

    def log(self, name: str) -> Path:
        """Return the file that receives the output of a daemon."""
        return self.base / f"{name}.log"

    def _kubelet_command(self) -> list[str]:
        return [
            self.binaries.path("kubelet"), "--config=/etc/kubernetes/kubelet.json",
            "--kubeconfig=/etc/kubernetes/kubelet.kubeconfig", f"--hostname-override={self.name}",
            f"--node-ip={self.address}", "--v=2",
        ]  # fmt: skip

    # Boot and shutdown.

    def boot(self) -> None:
        """Make the namespaces, the mounts and the GPU; only the node's first process runs afterwards."""
        self.disk.mkdir(exist_ok=True)
        for hierarchy in self.hierarchies:
            hierarchy.group.mkdir()
            for setting in ("cpuset.cpus", "cpuset.mems"):  # an empty cpuset accepts no process
                own = hierarchy.group / setting
                if hierarchy.kind == "cgroup" and own.exists() and not own.read_text().strip():
                    own.write_text((hierarchy.group.parent / setting).read_text())
        joins = " ".join(f"'{h.group}/cgroup.procs'" for h in self.hierarchies)
        script = (
            f'for file in {joins}; do echo $$ >"$file" || exit; done; exec unshare --mount --net --ipc --uts'
            ' --cgroup --pid --fork --kill-child --propagation private sh -c "$@"'
        )
        arguments = [self.root, self.disk, self.name, self.binaries.directory]
        self._unshare = subprocess.Popen(
            ["sh", "-c", script, "sh", BOOT, "sh", *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={"PATH": PATH},
            start_new_session=True,
        )
        settings = KERNEL | {"kernel/random/boot_id": str(uuid.uuid4())}
        lines = [f"setting {name} {value}\n" for name, value in settings.items()]
        lines += [f"{h.kind} {h.options} {h.mountpoint.name}\n" for h in self.hierarchies]
        assert self._unshare.stdin is not None
        assert self._unshare.stdout is not None
        assert self._unshare.stderr is not None
        self._unshare.stdin.write("".join([*lines, "end\n"]))
        self._unshare.stdin.flush()
        if self._unshare.stdout.readline() != "ready\n":
            text = self._unshare.stderr.read()
            self.crash()
            raise AssertionError(f"{self.name} does not boot: {text}")
        number = self._unshare.pid
        self.pid = int(Path(f"/proc/{number}/task/{number}/children").read_text().split()[0])
        self._plug_gpu()

    def _plug_gpu(self) -> None:
        subprocess.run(
            [
                *(sys.executable, "-m", "simgpu", "create", "--memory", GPU_MEMORY),
                *("--devices", str(self.devices)),
                *("--dir", str(self.path(SIMGPU))),
            ],
            cwd=ROOT,
            check=True,
            stdout=subprocess.DEVNULL,
        )
        if not self.path(f"{LIBDIR}/libcuda.so.1").is_symlink():
            for library in ("libcuda", "libnvidia-ml"):
                [file] = self.build.glob(f"simgpu/{library}.so.*.*[0-9]")
                path = self.path(f"{LIBDIR}/{file.name}")
                shutil.copy(file, path)
                path.with_name(f"{library}.so.1").symlink_to(file.name)
            self.check("ldconfig")

    def configure(self, kubeconfig: Path, authority: Path) -> None:
        """Write the configuration of containerd and the kubelet, before their first start."""
        self.write("/etc/containerd/config.toml", CONTAINERD.format(
            pause=PAUSE_IMAGE, programs=self.binaries.directory,
        ))  # fmt: skip
        network = {
            "cniVersion": "1.0.0",
            "name": "pods",
            "plugins": [
                {
                    "type": "ptp",
                    "ipam": {
                        "type": "host-local",
                        "ranges": [[{"subnet": self.pods}]],
                        "routes": [{"dst": "0.0.0.0/0"}],
                        # A reboot releases all addresses.
                        "dataDir": "/run/cni",
                    },
                }
            ],
        }
        self.write("/etc/cni/net.d/10-pods.conflist", json.dumps(network))
        settings = json.loads(json.dumps(KUBELET))
        settings["authentication"]["x509"] = {"clientCAFile": "/etc/kubernetes/ca.crt"}
        self.write("/etc/kubernetes/kubelet.json", json.dumps(settings))
        self.write("/etc/kubernetes/ca.crt", authority.read_text())
        self.write("/etc/kubernetes/kubelet.kubeconfig", embedded(kubeconfig), 0o600)

    def start(self) -> None:
        """Start containerd and the kubelet, as systemd would."""
        self.start_containerd()
        self.kubelet.start()

    def start_containerd(self) -> None:
        """Start containerd, and wait until it answers."""
        self.containerd.start()
        deadline = time.monotonic() + READY_S
        while (ran := self.run("ctr", "version")).status:
            self.containerd.check()
            assert time.monotonic() < deadline, f"{ran.text}\n{self.containerd.tail()}"
            time.sleep(0.1)

    def load(self, image: Path) -> None:
        """Load an image from an archive."""
        with image.open("rb") as file:
            done = subprocess.run(
                self.command_line("ctr", "-n", "k8s.io", "images", "import", "--local", "-"),
                stdin=file,
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
        assert done.returncode == 0, done.stdout + done.stderr

    def keep_fresh(self, image: str) -> None:
        """Put the control libraries of Tidegate's image at the paths that its mirror records.

        A mirror is refused if the files that it was made from have changed. For NVIDIA's driver
        only the version of the kernel module is compared. The simulated driver has no kernel
        module, so all files are compared. Because the DaemonSet makes the mirror in a container,
        the mirror records paths of the image, and paths of the node below /host.
        """
        place = "/usr/lib/tidegate"
        self.check("mkdir", "-p", "/tmp/image", place)
        self.check("ctr", "-n", "k8s.io", "images", "mount", image, "/tmp/image")
        self.check("cp", "-a", f"/tmp/image{place}/{TRIPLET}", place)
        self.check("ctr", "-n", "k8s.io", "images", "unmount", "--rm", "/tmp/image")
        self.path("/host").symlink_to("/")

    def crash(self) -> list[str]:
        """Kill all processes of the node at once, without notice; return a description of each
        process that did not end and each control group that could not be removed.
        """
        left = []
        if self._unshare is not None:
            if self._unshare.poll() is None:  # otherwise the PID may be that of another process
                if self.pid:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(self.pid, signal.SIGKILL)  # the kernel then ends its PID namespace
                else:
                    self._unshare.kill()
            self._unshare.communicate(timeout=60)
            self._unshare, self.pid = None, 0
            for daemon in (self.kubelet, self.containerd):
                daemon.kill()
        deadline = time.monotonic() + END_S
        while (pids := members(self.hierarchies[0].group)) and time.monotonic() < deadline:
            time.sleep(0.02)
        left += [f"a process runs: {describe_process(pid)}" for pid in pids]
        for hierarchy in self.hierarchies:
            for group in groups(hierarchy.group) if hierarchy.group.exists() else ():
                try:
                    group.rmdir()
                except OSError as e:
                    left.append(f"a control group stays: {group} ({e.strerror})")
        return left

    def close(self) -> list[str]:
        """Stop the node, remove its disk, and return what is left of it on this machine."""
        left = self.crash()
        left += [
            f"a mount stays: {line.split()[4]}"
            for line in Path("/proc/self/mountinfo").read_text().splitlines()
            if str(self.base) in line
        ]
        if not left:
            shutil.rmtree(self.disk, ignore_errors=True)
        after = host_state()
        return left + [
            f"{name} of this machine was {value} and is {after[name]}"
            for name, value in self._before.items()
            if after[name] != value
        ]

    # Files and processes of the node.

    def path(self, inside: str | Path) -> Path:
        """Return the path by which this machine reaches a path of the node."""
        return Path(f"/proc/{self.pid}/root{inside}")

    def write(self, inside: str, text: str, mode: int = 0o644) -> None:
        """Write a file of the node."""
        path = self.path(inside)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(mode)

    def command_line(self, *arguments: str) -> list[str]:
        """Return the command line that runs a command on the node."""
        joins = " ".join(f"'{h.members}'" for h in self.hierarchies)
        script = (
            f'for file in {joins}; do echo $$ >"$file" || exit; done;'
            f' exec nsenter -t {self.pid} -m -n -i -u -C -p -- "$@"'
        )
        return ["sh", "-c", script, "sh", *arguments]

    def run(self, *arguments: str, timeout: float = 60) -> CommandResult:
        """Run a command, and wait for its end."""
        done = subprocess.run(
            self.command_line(*arguments),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=timeout,
            env={"PATH": PATH, "HOME": "/root"},
        )
        return CommandResult(done.returncode, done.stdout, done.stderr)

    def check(self, *arguments: str, timeout: float = 60) -> str:
        """Run a command, require that it succeeds, and return its output."""
        ran = self.run(*arguments, timeout=timeout)
        assert ran.status == 0, f"{self.name}: {' '.join(arguments)}: {ran.text}"
        return ran.stdout

    def processes(self, *words: str) -> list[int]:
        """Return the processes whose command line contains these words in succession, as PIDs of
        this machine.

        Only the last component of a path is compared.
        """
        found = []
        for pid in members(self.hierarchies[0].group):
            try:
                line = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
            except OSError:
                continue
            line = [word.rpartition("/")[2] for word in line]
            if any(line[at : at + len(words)] == list(words) for at in range(len(line))):
                found.append(pid)
        return sorted(found)

    def mounts(self) -> list[str]:
        """Return the mount points of the node."""
        lines = Path(f"/proc/{self.pid}/mountinfo").read_text().splitlines()
        return sorted(line.split()[4] for line in lines)

    def groups(self) -> set[str]:
        """Return the control groups of pods, as paths relative to each hierarchy."""
        return {
            f"{hierarchy.mountpoint.name}/{path.relative_to(hierarchy.group)}"
            for hierarchy in self.hierarchies
            for path in groups(hierarchy.group)
            if "/pod" in str(path.relative_to(hierarchy.group))
        }


def embedded(kubeconfig: Path) -> str:
    """Return a kubeconfig with the contents of its files embedded."""
    import base64

    document = json.loads(kubeconfig.read_text())
    for section in (document["clusters"][0]["cluster"], document["users"][0]["user"]):
        for name in ("certificate-authority", "client-certificate", "client-key"):
            if name in section:
                data = Path(section.pop(name)).read_bytes()
                section[f"{name}-data"] = base64.b64encode(data).decode()
    return json.dumps(document)
