"""A node for real engines: a root file system unpacked from packages, in namespaces and control
groups of its own.

`tools/engine-root SUITE` unpacks the packages. Here that root gets a tmpfs as its upper layer, and
pivot_root changes to it. So dockerd, containerd and podman run with the paths that they are built
for, and this machine is not changed: nothing is installed, no file of the host is written, and
everything disappears with the mount namespace. The PID of a process is the same as on the host,
because a governor outside the node needs it. `EngineHost.leave` finds and reports everything that
engines or containers have left.
"""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from tests.container.bundles import ROOT

PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
END_S = 15.0

# Paths that engines create by default.
HOST_PLACES = (
    *("/etc/cni", "/etc/containerd", "/etc/containers", "/etc/docker", "/etc/tidegate"),
    *("/run/containerd", "/run/containers", "/run/crun", "/run/docker", "/run/docker.pid"),
    *("/run/docker.sock", "/run/libpod", "/run/netns", "/run/nri", "/run/runc", "/run/tidegate"),
    *("/var/lib/cni", "/var/lib/containerd", "/var/lib/containers", "/var/lib/docker"),
    *("/var/lib/tidegate", "/usr/bin/tidegate-hook", "/usr/bin/tidegate-runtime"),
    *("/dev/shm/libpod_lock", "/opt/cni", "/opt/containerd"),
)

# $1 is the unpacked root and $2 an empty directory of the host. The other arguments are directories that have the same
# path inside, the checkout first, or SOURCE:TARGET. Standard input has a line for each hierarchy of control groups; the
# node ends when standard input is closed.
SETUP = r"""
set -eu
root=$1; place=$2; shift 2
mount -t tmpfs -o mode=755,size=4g tmpfs "$place"
mkdir "$place/upper" "$place/scratch" "$place/root" "$place/var"
new=$place/root
mount -t overlay overlay -o "lowerdir=$root,upperdir=$place/upper,workdir=$place/scratch" "$new"
mount -t proc proc "$new/proc"
mount -t sysfs sysfs "$new/sys"
mount -t tmpfs -o mode=755 tmpfs "$new/dev"
for device in null zero full random urandom tty; do
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
mkdir "$new/run/lock"
mount -t tmpfs -o mode=1777 tmpfs "$new/tmp"
# An overlay cannot have an overlay as its upper layer.
for name in docker containerd containers; do
    mkdir -p "$place/var/$name" "$new/var/lib/$name"
    mount --bind "$place/var/$name" "$new/var/lib/$name"
done
mount -t tmpfs -o mode=1777 tmpfs "$new/var/tmp"
checkout=$1
for pair; do
    source=${pair%%:*}; target=$new${pair##*:}
    mkdir -p "$target"
    mount --rbind "$source" "$target"
done
mount -o remount,bind,ro "$new$checkout"  # otherwise another Python would leave its compiled files there
while read -r kind options name && [ "$kind" != end ]; do
    if [ "$kind" = cgroup2 ]; then
        mount -t cgroup2 cgroup2 "$new/sys/fs/cgroup"
        # A group that has processes of its own cannot enable controllers for groups below it.
        mkdir "$new/sys/fs/cgroup/init"
        echo 0 >"$new/sys/fs/cgroup/init/cgroup.procs"
        for controller in $(cat "$new/sys/fs/cgroup/cgroup.controllers"); do
            echo "+$controller" >"$new/sys/fs/cgroup/cgroup.subtree_control"
        done
    else
        mountpoint -q "$new/sys/fs/cgroup" || mount -t tmpfs -o mode=755 tmpfs "$new/sys/fs/cgroup"
        mkdir "$new/sys/fs/cgroup/$name"
        mount -t cgroup -o "$options" cgroup "$new/sys/fs/cgroup/$name"
    fi
done
for name in resolv.conf hosts machine-id; do [ -e "$new/etc/$name" ] || : >"$new/etc/$name"; done
echo engines >"$new/etc/hostname"
echo engines >/proc/sys/kernel/hostname
cd "$new"
pivot_root . .     # mounts the old root on top of the new one
umount --lazy .    # unmounts the old root
ip link set lo up
mount --make-rshared /  # as systemd does: a mount of the hook that is not private would be detected
echo ready
exec cat >/dev/null
"""


class Hierarchy(NamedTuple):
    """A hierarchy of control groups, and the group in it that is the node's root."""

    kind: str
    options: str
    mountpoint: Path
    group: Path

    @property
    def members(self) -> Path:
        """The file to which a process that joins the node writes its PID."""
        return self.group / ("init" if self.kind == "cgroup2" else ".") / "cgroup.procs"


def hierarchies(name: str, *, cgroup2_only: bool = False) -> list[Hierarchy]:
    """Return the hierarchies that the node gets: version 2 if the machine has nothing else,
    otherwise those of version 1.

    If there is version 1, version 2 is left out, because crun 1.8 refuses a machine that has both.
    With `cgroup2_only` the node gets version 2 only, with the controllers that version 1 does not
    use: Podman 6 refuses version 1.
    """
    own = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        own[controllers] = path
    found = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        words = line.split()
        kind, _, options = words[words.index("-") + 1 :]
        mountpoint = Path(words[4])
        if kind == "cgroup2":
            # At the top: only the root group may have both processes and groups with controllers.
            found.append(Hierarchy(kind, options, mountpoint, mountpoint / name))
        elif kind == "cgroup":
            options = ",".join(o for o in options.split(",") if o not in ("rw", "ro"))
            controllers = ",".join(
                o for o in options.split(",") if o not in ("xattr", "clone_children")
            )
            path = next(
                p for c, p in own.items() if set(c.split(",")) == set(controllers.split(","))
            )
            found.append(
                Hierarchy(
                    kind, options, mountpoint, mountpoint / os.path.relpath(path, words[3]) / name
                )
            )
    first = [one for one in found if one.kind == "cgroup" and not cgroup2_only]
    return first or [one for one in found if one.kind == "cgroup2"]


def groups(group: Path) -> Iterator[Path]:
    """Iterate over a control group and the groups below it, innermost first."""
    for directory, _, _ in os.walk(group, topdown=False):
        yield Path(directory)


def members(group: Path) -> set[int]:
    """Return the processes in a control group and below."""
    found = set()
    for one in groups(group):
        try:
            found |= {int(line) for line in (one / "cgroup.procs").read_text().split()}
        except OSError:  # the group was removed, or is threaded
            continue
    return found


def describe_process(pid: int) -> str:
    """Describe a process for a message: its PID and command line."""
    try:
        line = (
            Path(f"/proc/{pid}/cmdline")
            .read_bytes()
            .replace(b"\0", b" ")
            .decode("utf-8", "replace")
        )
    except OSError:
        return f"{pid} (gone)"
    return f"{pid} ({line.strip()[:120]})"


def host_state() -> dict[str, object]:
    """Return what engines could change on this machine: names and their current values."""
    state: dict[str, object] = {place: os.path.lexists(place) for place in HOST_PLACES}
    state["network interfaces"] = sorted(path.name for path in Path("/sys/class/net").iterdir())
    return state


class CommandResult(NamedTuple):
    """The result of a command."""

    status: int
    stdout: str
    stderr: str

    @property
    def text(self) -> str:
        """The output as a user would see it: standard output, then standard error."""
        return self.stdout + self.stderr


class EngineHost:
    """A node: `with EngineHost(root, base) as host`, then `host.run("docker", "ps")`. Leaving fails if anything is left.

    `root` is the output of tools/engine-root, `base` a directory of the test. `host.work`, below
    it, has the same path inside, as do the checkout (read-only) and each directory in `binds`,
    which may also be SOURCE:TARGET. `cgroup2_only` is as in `hierarchies`.
    """

    _count = 0

    def __init__(
        self, root: Path, base: Path, *, binds: Sequence[str] = (), cgroup2_only: bool = False
    ) -> None:
        EngineHost._count += 1
        self.name = f"tidegate-engines-{os.getpid()}-{EngineHost._count}"
        self.root = root
        self.work = base / "shared"
        self.binds = [str(ROOT), str(self.work), *binds]
        self.place = base / "place"
        self.hierarchies = hierarchies(self.name, cgroup2_only=cgroup2_only)
        self.daemons: list[subprocess.Popen[bytes]] = []
        self._init: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        self._before = host_state()
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self.leave)
            self._make()
            on_failure.pop_all()
        return self

    def _make(self) -> None:
        self.place.mkdir(parents=True)
        self.work.mkdir(exist_ok=True)
        for hierarchy in self.hierarchies:
            hierarchy.group.mkdir()
            # A cpuset group without processors or memory nodes accepts no process.
            for setting in ("cpuset.cpus", "cpuset.mems"):
                own = hierarchy.group / setting
                if hierarchy.kind == "cgroup" and own.exists() and not own.read_text().strip():
                    own.write_text((hierarchy.group.parent / setting).read_text())
        joins = " ".join(f"'{h.group}/cgroup.procs'" for h in self.hierarchies)
        script = (
            f'for file in {joins}; do echo $$ >"$file" || exit; done;'
            ' exec unshare --mount --net --ipc --uts --cgroup --propagation private sh -c "$@"'
        )
        self._init = subprocess.Popen(
            ["sh", "-c", script, "sh", SETUP, "sh", str(self.root), str(self.place), *self.binds],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={"PATH": PATH},
            start_new_session=True,
        )
        assert self._init.stdin is not None
        assert self._init.stdout is not None
        assert self._init.stderr is not None
        lines = [f"{h.kind} {h.options} {h.mountpoint.name}\n" for h in self.hierarchies]
        self._init.stdin.write("".join([*lines, "end\n"]))
        self._init.stdin.flush()
        if self._init.stdout.readline() != "ready\n":
            raise AssertionError(f"no node for engines: {self._init.stderr.read()}")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        left = self.leave()
        if error is None:
            assert not left, "\n".join(left)

    @property
    def pid(self) -> int:
        """The process that keeps the namespaces alive."""
        assert self._init is not None
        return self._init.pid

    def path(self, inside: str | Path) -> Path:
        """Return the path on the host of a path of the node."""
        return Path(f"/proc/{self.pid}/root{inside}")

    def write(self, inside: str, text: str, mode: int = 0o644) -> None:
        """Write a file of the node."""
        path = self.path(inside)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(mode)

    def command(self, *arguments: str, dies: bool = False) -> list[str]:
        """Return the command line that runs a command on the node; with `dies` the command dies with the test."""
        joins = " ".join(f"'{h.members}'" for h in self.hierarchies)
        with_parent = "setpriv --pdeathsig KILL " if dies else ""
        script = (
            f'for file in {joins}; do echo $$ >"$file" || exit; done;'
            f' exec {with_parent}nsenter -t {self.pid} -m -n -i -u -C -- "$@"'
        )
        return ["sh", "-c", script, "sh", *arguments]

    def run(
        self, *arguments: str, timeout: float = 60, stdin: bytes | None = None
    ) -> CommandResult:
        """Run a command to its end."""
        done = self.run_bytes(*arguments, timeout=timeout, stdin=stdin)
        return CommandResult(
            done.returncode,
            done.stdout.decode(errors="replace"),
            done.stderr.decode(errors="replace"),
        )

    def run_bytes(
        self, *arguments: str, timeout: float = 60, stdin: bytes | None = None
    ) -> subprocess.CompletedProcess[bytes]:
        """Run a command to its end, with output that need not be text."""
        return subprocess.run(
            self.command(*arguments),
            input=stdin or b"",
            capture_output=True,
            check=False,
            timeout=timeout,
            env={"PATH": PATH, "HOME": "/root"},
        )

    def check(self, *arguments: str, timeout: float = 60, stdin: bytes | None = None) -> str:
        """Run a command, require that it succeeds, and return its output."""
        ran = self.run(*arguments, timeout=timeout, stdin=stdin)
        assert ran.status == 0, f"{' '.join(arguments)}: {ran.text}"
        return ran.stdout

    def start(self, *arguments: str, log: Path) -> subprocess.Popen[bytes]:
        """Start a daemon."""
        with log.open("ab") as output:
            daemon = subprocess.Popen(
                self.command(*arguments, dies=True),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={"PATH": PATH, "HOME": "/root"},
            )
        self.daemons.append(daemon)
        return daemon

    def stop(self, daemon: subprocess.Popen[bytes], number: int = signal.SIGTERM) -> int:
        """Stop a daemon."""
        self.daemons.remove(daemon)
        daemon.send_signal(number)
        try:
            return daemon.wait(END_S)
        except subprocess.TimeoutExpired:
            daemon.kill()
            return daemon.wait()

    def processes(self) -> set[int]:
        """Return every process of the node, except the one that keeps the namespaces alive."""
        return members(self.hierarchies[0].group) - {self.pid}

    def mounts(self) -> list[str]:
        """Return the mount points of the node."""
        lines = Path(f"/proc/{self.pid}/mountinfo").read_text().splitlines()
        return sorted(line.split()[4] for line in lines)

    def groups(self) -> set[str]:
        """Return the control groups below the node's, as paths in each hierarchy."""
        return {
            str(path.relative_to(hierarchy.group))
            for hierarchy in self.hierarchies
            for path in groups(hierarchy.group)
        }

    def leave(self, patience: float = 5) -> list[str]:
        """End the node, and return what engines or containers left, one line for each item.

        Processes have `patience` seconds to end on their own.
        """
        left = []
        for daemon in self.daemons.copy():
            if daemon.poll() is None:
                left.append(f"a daemon runs: {describe_process(daemon.pid)}")
            self.stop(daemon, signal.SIGKILL)
        if self._init is not None:
            deadline = time.monotonic() + patience
            while (pids := self.processes()) and time.monotonic() < deadline:
                time.sleep(0.02)
            left += [f"a process runs: {describe_process(pid)}" for pid in sorted(pids)]
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            while self.processes() and time.monotonic() < deadline + END_S:
                time.sleep(0.02)
            # This reads standard error, too: nothing else reads what the script writes there after
            # `ready`.
            self._init.communicate(timeout=END_S)
            self._init = None
        for hierarchy in self.hierarchies:
            if not hierarchy.group.exists():
                continue
            for group in groups(hierarchy.group):
                try:
                    group.rmdir()
                except OSError as e:
                    left.append(f"a control group stays: {group} ({e.strerror})")
        left += [
            f"a mount stays: {line.split()[4]}"
            for line in Path("/proc/self/mountinfo").read_text().splitlines()
            if str(self.place) in line
        ]
        if self.place.exists():
            left += [f"a file stays: {path}" for path in self.place.iterdir()]
            if not left:
                self.place.rmdir()
        after = host_state()
        left += [
            f"{name} of this machine was {value} and is {after[name]}"
            for name, value in self._before.items()
            if after[name] != value
        ]
        return left


def machine() -> str:
    """Return the code name of this machine's release, or an empty string if it has none."""
    for line in Path("/etc/os-release").read_text().splitlines():
        name, _, value = line.partition("=")
        if name == "VERSION_CODENAME":
            return value.strip('"')
    return ""


TRIPLET = f"{platform.machine()}-linux-gnu"
