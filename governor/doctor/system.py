"""Check the kernel, the processor, the control groups, and the security modules."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterator

from governor.cgroups import find_mounts
from governor.doctor.finding import (
    Finding,
    UnseenError,
    listed,
    note,
    ok,
    unseen,
    warning,
    wrong,
)
from governor.doctor.node import ExaminedNode
from governor.doctor.service import process
from oci_hook import kernel

CALLS = (
    ("open_tree and move_mount", (5, 2)),
    ("openat2", (5, 6)),
    ("mount_setattr", (5, 12)),
)
"""System calls that the hook needs, with the version of Linux that introduced each."""
NEWER = "boot Linux 5.12 or newer (Debian 11: linux-image-amd64 from bullseye-backports)"
RELABEL = (
    "semanage fcontext -a -t container_file_t '{path}(/.*)?' && restorecon -R {path}, "
    "or start the container with --security-opt label=disable"
)
V2 = {"cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3"}  # flags of x86-64-v2, as in cpuinfo
CAP_SYS_ADMIN = 21
LABELS = ("container_file_t", "container_ro_file_t", "container_share_t")


def calls(node: ExaminedNode) -> Iterator[Finding]:
    """Check whether the kernel has the system calls that the hook needs for paths and mounts."""
    release = (node.read("/proc/sys/kernel/osrelease") or "").strip()
    match = re.match(r"([0-9]+)\.([0-9]+)", release)
    if match is None:
        yield unseen(f"/proc/sys/kernel/osrelease contains {release!r}, which is not a version")
        return
    version = (int(match[1]), int(match[2]))
    lacking = [f"{name} ({a}.{b})" for name, (a, b) in CALLS if version < (a, b)]
    # A distribution may have backported a call, and a seccomp filter may block one.
    if node.alive:
        refused = dict(_refused())
        if not refused:
            yield ok(f"Linux {release} has {listed([name for name, _ in CALLS])}")
            return
        if set(refused.values()) != {errno.ENOSYS}:
            yield wrong(
                f"Linux {release} refuses {listed(list(refused))}: "
                f"{os.strerror(next(iter(refused.values())))}",
                "remove the seccomp filter from the service that starts containers here",
            )
            return
        lacking = list(refused)
    if lacking:
        yield wrong(
            f"Linux {release} lacks {listed(lacking)}: the hook cannot start containers", NEWER
        )
    else:
        yield ok(f"Linux {release} has {listed([name for name, _ in CALLS])}")


def processor(node: ExaminedNode) -> Iterator[Finding]:
    """Check whether loaders search the hwcaps subdirectory on which the driver is mounted."""
    cpuinfo = node.read("/proc/cpuinfo") or ""
    if re.search(r"^CPU implementer\s*:", cpuinfo, re.MULTILINE):
        yield ok("on aarch64 the loader does not select directories by CPU features")
        return
    found = re.search(r"^flags\s*:(.*)$", cpuinfo, re.MULTILINE)
    if found is None:
        yield unseen("/proc/cpuinfo lists no processor flags")
        return
    lacking = sorted(V2 - set(found[1].split()))
    if lacking:
        yield wrong(
            f"the processor is below x86-64-v2 (no {listed(lacking)}): loaders skip the driver's "
            "directory, and find an image's own driver, which is not governed",
            "give the virtual machine an x86-64-v2 processor (QEMU: -cpu host; Proxmox: type host)",
        )
    else:
        yield ok("the processor supports x86-64-v2")


def _refused() -> Iterator[tuple[str, int]]:
    """Make each call with invalid arguments; yield those that fail as if missing or blocked.

    Without CAP_SYS_ADMIN the mount calls return EPERM, as they do under a seccomp filter. They then
    count as available.
    """
    there = {errno.EBADF, errno.ENOENT, errno.EINVAL}
    if not _has_sys_admin():
        there.add(errno.EPERM)

    # An empty path without AT_EMPTY_PATH, or an invalid descriptor: nothing is opened, mounted or
    # changed.
    asked: dict[str, Callable[[], object]] = {
        "open_tree": lambda: kernel.open_tree("", dirfd=-1),
        "move_mount": lambda: kernel.move_mount(-1, -1, ""),
        "openat2": lambda: kernel.openat2(-1, "", os.O_PATH, kernel.RESOLVE_IN_ROOT),
        "mount_setattr": lambda: kernel.mount_setattr(-1, kernel.MOUNT_ATTR_RDONLY, 0, ""),
    }
    for name, ask in asked.items():
        try:
            ask()
        except OSError as e:
            if e.errno not in there:
                yield name, e.errno or 0


def _has_sys_admin() -> bool:
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:  # noqa: PTH123
        found = re.search(r"^CapEff:\s*([0-9a-f]+)", file.read(), re.MULTILINE)
    return found is not None and bool(int(found[1], 16) >> CAP_SYS_ADMIN & 1)


def cgroups(node: ExaminedNode) -> Iterator[Finding]:
    """Report the cgroup version; check whether any is mounted, and whether crun accepts it."""
    mounts = node.read("/proc/self/mounts")
    if mounts is None:
        raise UnseenError("/proc/self/mounts does not exist")
    rows = [line.split() for line in mounts.splitlines()]
    kinds = {row[2]: row[1] for row in rows if len(row) > 2 and row[2] in ("cgroup", "cgroup2")}
    match kinds:
        case {"cgroup": _, "cgroup2": unified}:
            yield from _hybrid(node, unified)
        case {"cgroup2": _}:
            yield ok("cgroup v2")
        case {"cgroup": _}:
            yield ok("cgroup v1")
        case _:
            yield wrong(
                "no cgroup file system is mounted: runtimes cannot start containers",
                "mount -t cgroup2 none /sys/fs/cgroup",
            )


def _hybrid(node: ExaminedNode, unified: str) -> Iterator[Finding]:
    found = f"cgroup v1, with cgroup v2 at {unified} (hybrid)"
    crun = node.find("crun")
    if not crun:
        yield ok(found)
    elif not (node.read(f"{unified}/cgroup.controllers") or "").strip():
        yield ok(f"{found}, without controllers in cgroup v2")
    else:
        yield warning(
            f"{found}: {crun} refuses that (cgroups in hybrid mode not supported)",
            "use runc, or boot with systemd.unified_cgroup_hierarchy=1",
        )


def throttling(node: ExaminedNode) -> Iterator[Finding]:
    """Check whether containers can be frozen, if the configuration asks for that."""
    if node.config.on_violation != "throttle":
        yield ok(f"on_violation is {node.config.on_violation}: containers are not frozen")
        return
    if not node.alive:
        raise UnseenError(f"cannot check freezing: {node.root} is not the running system")
    mounts = [str(path) for path in find_mounts().values()]
    pid = process(node)
    shut = [] if pid is None else _read_only(node, pid, mounts)
    if shut:
        yield warning(
            f"on_violation is throttle, but {', '.join(shut)} is read-only in the sandbox of the "
            "governor's unit",
            "set ProtectControlGroups=no in a drop-in of tidegate-governor.service, and restart it",
        )
    elif mounts:
        yield ok(
            f"on_violation is throttle, and containers can be frozen through {', '.join(mounts)}"
        )
    else:
        yield warning(
            "on_violation is throttle, but neither cgroup v2 nor the v1 freezer is mounted",
            "mount -t cgroup -o freezer none /sys/fs/cgroup/freezer, or set on_violation: report",
        )


def _read_only(node: ExaminedNode, pid: int, mounts: list[str]) -> list[str]:
    """Return the mounts that are read-only for a process."""
    rows = [line.split() for line in (node.read(f"/proc/{pid}/mountinfo") or "").splitlines()]
    options = {row[4]: row[5].split(",") for row in rows if len(row) > 5}  # the last one is on top
    return [path for path in mounts if "ro" in options.get(path, [])]


def security(node: ExaminedNode) -> Iterator[Finding]:
    """Check whether SELinux or AppArmor blocks a container's access to Tidegate's mounts."""
    enforce = node.read("/sys/fs/selinux/enforce")
    apparmor = (node.read("/sys/module/apparmor/parameters/enabled") or "").startswith("Y")
    if enforce is not None and enforce.strip() == "1":
        yield from _labels(node)
    elif enforce is not None:
        yield ok("SELinux is permissive")
    if apparmor:
        yield note(
            "AppArmor is on: a container's profile has to let it read /run/tidegate and the "
            "driver's libraries, and connect to the socket there"
        )
    if enforce is None and not apparmor:
        yield ok("neither SELinux nor AppArmor is on")


def _labels(node: ExaminedNode) -> Iterator[Finding]:
    for path in (f"{node.config.runtime_dir}/containers", f"{node.config.driver_dir}/current"):
        host = node.host(path)
        if host is None or node.stat(path) is None:
            continue  # other checks report that it does not exist
        try:
            context = os.getxattr(host, "security.selinux").decode(errors="replace")
        except OSError as e:
            raise UnseenError(f"the SELinux label of {path}: {e.strerror}") from e
        kind = (context.strip("\0").split(":") + [""] * 3)[2]
        label = f"type {kind}" if kind else "no label"
        if kind in LABELS:
            yield ok(f"SELinux is enforcing, and {path} has {label}")
        else:
            yield warning(
                f"SELinux is enforcing, and {path} has {label}: containers may be unable to read "
                "it (Tidegate has not been tested with this label)",
                RELABEL.format(path=path.removesuffix("/containers").removesuffix("/current")),
            )
