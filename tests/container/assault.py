"""An attack on the hook under a real runtime, and the conditions that must hold after it, whether or not it
succeeded.
"""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.container.bundles import (
    LIBDIR,
    TARGET,
    ContainerResult,
    DiskBundle,
    Runtime,
    add_hook,
    compile_c,
)
from tests.container.canary import SECRET, Canary
from tests.container.conftest import HookNode
from tests.container.steps import O_CLOEXEC, Steps, SystemCall, faults

TRAP_C = r"""
#include <fcntl.h>
#include <unistd.h>
/* A process that runs or loads this on the host leaves a file there; a container does not have the directory. */
static void __attribute__((constructor)) spring(void) {
        int fd = open(MARKER, O_CREAT | O_WRONLY | O_APPEND, 0600);
        if (fd >= 0)
                close(fd);
}
#ifndef LIBRARY
int main(void) {
        return 0;
}
#endif
"""
TRAPS = ("usr/sbin/ldconfig", "usr/bin/python3", "usr/bin/env", "usr/bin/mount", "usr/bin/logger")
PRELOAD = "trap.so"
LOOK = (
    f"ls -aR /etc /run /usr/bin /usr/lib64 /{LIBDIR} 2>/dev/null; cat /run/tidegate/{SECRET} /file;"
    "cat /proc/self/mountinfo; echo done"
)


@functools.cache
def traps() -> Path:
    """Compile a program, a static program and a library, each of which creates `marker` next to it when it runs."""
    path = Path(tempfile.mkdtemp(prefix="traps-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    define = f'-DMARKER="{path / "marker"}"'
    compile_c(TRAP_C, path / "program", define)
    compile_c(TRAP_C, path / PRELOAD, define, "-DLIBRARY", "-shared", "-fPIC")
    compile_c("int main(void) { return 0; }", path / "static", "-static")
    return path


def is_own(bundle: DiskBundle, place: str) -> bool:
    """Return whether a path of the image is a directory and has no component that is a link."""
    path = bundle.rootfs
    for part in place.split("/"):
        path /= part
        try:
            if not stat.S_ISDIR(path.lstat().st_mode):
                return False
        except FileNotFoundError:
            return False
    return True


def lay_traps(bundle: DiskBundle) -> None:
    """Put the traps where a tool for containers could run or load something from the image."""
    for name in TRAPS:
        if is_own(bundle, name.rpartition("/")[0]):
            (bundle.rootfs / name).unlink(missing_ok=True)
            shutil.copy(traps() / "program", bundle.rootfs / name)
    shutil.copy(traps() / PRELOAD, bundle.rootfs / PRELOAD)
    if is_own(bundle, "etc"):
        (bundle.rootfs / "etc/ld.so.preload").write_text(f"/{PRELOAD}\n")


def run_nothing(bundle: DiskBundle) -> DiskBundle:
    """Make the container run a static program. The image's own loader would hang on a FIFO."""
    shutil.copy(traps() / "static", bundle.rootfs / "static")
    bundle.config["process"]["args"] = ["/static"]
    return bundle


@dataclass
class AttackOutcome:
    """The result of an attack."""

    ran: ContainerResult
    steps: list[SystemCall]  # of the hook; empty if the runtime never started it
    event: dict[str, Any]  # what the hook logged; empty in the same case
    targets: list[str] = field(default_factory=list)  # its mount points, below the root

    @property
    def outcome(self) -> str:
        """prepared, without-gpu or failed; empty if there is no event."""
        return str(self.event.get("outcome", ""))

    @property
    def code(self) -> str:
        """The class of the error."""
        return str(self.event.get("code", ""))


def elsewhere(node: HookNode, bundle: DiskBundle) -> dict[str, tuple[int, int, int]]:
    """Describe all files of the node except the container's root and the files that the runtime and
    the governor write.
    """
    skip = (bundle.rootfs, bundle.path / "config.json", node.log)
    skip += tuple(node.base / name for name in ("run", "state", "canary"))
    found = {}
    for directory, names, files in os.walk(node.base):
        here = Path(directory)
        names[:] = [name for name in names if here / name not in skip]
        for path in (here / name for name in (*names, *files) if here / name not in skip):
            s = path.lstat()
            size = 0 if stat.S_ISDIR(s.st_mode) else s.st_size
            found[str(path.relative_to(node.base))] = (s.st_mode, size, s.st_uid)
    return found


def assault(
    node: HookNode,
    runtime: Runtime,
    bundle: DiskBundle,
    canary: Canary,
    react: Callable[[SystemCall], None] | None = None,
    *,
    stage: str = "createRuntime",
    links: bool = False,
) -> AttackOutcome:
    """Run the container with the hook in single steps. Check that nothing outside the container was
    touched and nothing from it ran on the host.
    """
    lay_traps(bundle)
    descriptors: set[str] = set()
    targets: list[str] = []

    def step_by_step(step: SystemCall) -> None:
        if step.name in ("move_mount", "setns"):
            descriptors.update(not_close_on_exec(step.pid))
        if step.name == "move_mount":
            target = Path(f"/proc/{step.pid}/fd/{step.numbers[2]}").readlink()
            targets.append(str(target).removeprefix(str(bundle.rootfs)))
        if react is not None:
            react(step)

    before = elsewhere(node, bundle)
    canary.watch()
    with Steps(step_by_step) as steps:
        bundle.config["hooks"] = {}
        add_hook(bundle.config, steps.argv(node.hook), stage=stage, poststop=False)
        ran = runtime.run(bundle)
    canary.check(links=links)
    assert elsewhere(node, bundle) == before
    assert not (traps() / "marker").exists()
    assert len(steps.runs) <= 1
    run = steps.runs[0] if steps.runs else []
    found = faults(run, bundle.rootfs)
    assert not found, "\n".join(found)  # pytest does not rewrite this module's asserts
    assert descriptors == set(), "R12: descriptors that a program of the container could get"
    assert not [t for t in targets if f"{t}/".startswith(("/proc/", "/dev/", "/sys/"))], (
        targets,
        ran,
    )
    assert "/" not in targets
    assert "" not in targets, "R10: the container's root itself"
    assert SECRET not in ran.stdout
    assert "the host's" not in ran.stdout
    for line in ran.stdout.splitlines():
        words = line.split(" ")
        if (
            len(words) > 9 and "-" in words
        ):  # a line of mountinfo: its fourth word is the mounted part of the file system
            assert not words[3].startswith(str(canary.path)), line
    events = node.events()
    if ran.status == 0:
        assert events, "the hook did not run"
    assert not events or events[-1]["outcome"] in ("prepared", "without-gpu", "failed")
    assert not events or events[-1].get("code") != "internal", events[-1]
    return AttackOutcome(ran, run, events[-1] if events else {}, targets)


def not_close_on_exec(pid: int) -> set[str]:
    """Return the descriptors of a process that would survive an execve, except the first three."""
    found = set()
    for entry in Path(f"/proc/{pid}/fdinfo").iterdir():
        flags = next(line for line in entry.read_text().splitlines() if "flags:" in line)
        if int(entry.name) > 2 and not int(flags.split()[1], 8) & O_CLOEXEC:
            found.add(str(Path(f"/proc/{pid}/fd/{entry.name}").readlink()))
    return found


def exchange(one: Path, other: Path) -> None:
    """Exchange two names atomically."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    done = libc.renameat2(-100, os.fsencode(one), -100, os.fsencode(other), 2)
    assert done == 0, os.strerror(ctypes.get_errno())


def put_link(path: Path, text: str) -> None:
    """Replace whatever is at a path by a link."""
    remove(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(text)


def remove(path: Path) -> None:
    """Remove whatever is at a path."""
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def put_odd(path: Path, kind: str) -> None:
    """Replace whatever is at a path by something that is not a regular file, or by an odd file."""
    remove(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    match kind:
        case "fifo":
            os.mkfifo(path)
        case "socket":
            directory = os.open(path.parent, os.O_PATH)
            with socket.socket(socket.AF_UNIX) as s:
                s.bind(f"/proc/self/fd/{directory}/{path.name}")
            os.close(directory)
        case "char":
            os.mknod(path, 0o020666, os.makedev(1, 5))  # /dev/zero
        case "block":
            os.mknod(path, 0o060666, os.makedev(7, 200))  # a loop device that is not in use
        case "directory":
            path.mkdir()
            (path / "x").touch()
        case "endless":
            with path.open("wb") as f:
                f.write(b"glibc-ld.so.cache1.1")
                f.truncate(1 << 40)
        case "empty":
            path.touch()
        case "dangling":
            path.symlink_to("nowhere")


def below_root(bundle: DiskBundle, path: Path) -> Path:
    """Return the path in the image that corresponds to a path of the host."""
    return bundle.rootfs / str(path).lstrip("/")


__all__ = [
    "LOOK",
    "TARGET",
    "AttackOutcome",
    "assault",
    "exchange",
    "put_link",
    "put_odd",
    "remove",
]
