"""Runs a command in an aarch64 root file system, with each of its programs emulated.

    tools/emulated.py --emulator FILE [--bind DIRECTORY]... [--throwaway] ROOT COMMAND [ARGUMENT]...

The kernel starts the emulator for a program by itself (binfmt_misc), so programs in the root can
start each other as they would on a machine of their architecture. Since Linux 6.7, a user namespace
can have its own binfmt_misc entries, so nothing is registered on this machine: the command runs in
namespaces in which all users are mapped to themselves, as the first process's child, with its own
/proc. It uses this machine's network. When it ends, so does everything that it started. With
--throwaway, what it wrote to the root is then discarded.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import sys
from pathlib import Path

# From <linux/sched.h>, <linux/mount.h>, <linux/prctl.h> and <signal.h>.
CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWIPC = 0x20000, 0x10000000, 0x20000000, 0x8000000
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
PR_SET_PDEATHSIG, SIGKILL = 1, 9
NAME = "tidegate-aarch64"
# An ELF header: 64 bits, little-endian, any ABI, an executable or a shared object, EM_AARCH64.
MAGIC = r"\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00"
MASK = r"\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff"
# F: the emulator is opened now, not in the root, which does not contain it. P: the program sees its
# argv[0] as it was given.
FLAGS = "FP"
EVERYBODY = "0 0 4294967295"

libc = ctypes.CDLL(None, use_errno=True)


def must(result: int, what: str) -> None:
    """Raise OSError if a C library call failed."""
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def mount(source: str, target: Path, kind: str, flags: int = 0, *, options: str = "") -> None:
    """Mount a file system, or a directory with MS_BIND."""
    words = (source.encode(), bytes(target), kind.encode())
    result = libc.mount(*words, ctypes.c_ulong(flags), options.encode())
    must(result, f"mounting {source} on {target}")


def register(emulator: Path, place: Path) -> None:
    """Register the emulator with the binfmt_misc of this user namespace, mounted at `place`."""
    mount("binfmt_misc", place, "binfmt_misc")
    (place / "register").write_text(f":{NAME}:M::{MAGIC}:{MASK}:{emulator}:{FLAGS}")


def cover(root: Path) -> Path:
    """Mount an overlay with an upper layer in memory over a root; return its mount point."""
    place = root.with_name(f"{root.name}.over")
    place.mkdir(exist_ok=True)
    mount("tmpfs", place, "tmpfs")
    upper, work, merged = (place / name for name in ("upper", "work", "merged"))
    for directory in (upper, work, merged):
        directory.mkdir()
    options = f"lowerdir={root},upperdir={upper},workdir={work},userxattr"
    mount("overlay", merged, "overlay", options=options)
    return merged


def enter(root: Path, emulator: Path, binds: list[Path], *, throwaway: bool) -> None:
    """Mount what the command needs, and change into the root; called in the new namespaces."""
    mount("none", Path("/"), "", MS_REC | MS_PRIVATE)
    if throwaway:
        root = cover(root)
    else:
        # The root has to be a mount point, like a machine's root, for `unshare --mount`.
        mount(str(root), root, "", MS_BIND)
    mount("proc", root / "proc", "proc")
    register(emulator, root / "proc/sys/fs/binfmt_misc")
    mount("/dev", root / "dev", "", MS_BIND | MS_REC)
    for kind in ("tmp", "run"):
        mount("tmpfs", root / kind, "tmpfs")
    (root / "tmp").chmod(0o1777)
    for directory in binds:
        target = root / directory.relative_to("/")
        target.mkdir(parents=True, exist_ok=True)
        mount(str(directory), target, "", MS_BIND | MS_REC)
    here = Path.cwd()
    os.chroot(root)
    os.chdir(here if here.is_dir() else "/")


def run_first(command: list[str]) -> int:
    """As the first process of the namespace, run the command and reap orphans until it ends."""
    child = os.fork()
    if child == 0:
        try:
            os.execvp(command[0], command)  # noqa: S606 - there is nothing for a shell to do
        except OSError as e:
            print(f"emulated: {command[0]}: {e.strerror}", file=sys.stderr)
            os._exit(127)
    while True:
        pid, status = os.wait()
        if pid == child:
            return os.waitstatus_to_exitcode(status)


def run_inside(arguments: argparse.Namespace, unshared: int, mapped: int) -> int:
    """Create the namespaces, wait until their users are mapped, and run the command in them."""
    must(libc.unshare(CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC), "namespaces")
    os.close(unshared)
    os.read(mapped, 1)
    first = os.fork()  # a PID namespace begins with the next child
    if first:
        return os.waitstatus_to_exitcode(os.waitpid(first, 0)[1])
    must(libc.prctl(PR_SET_PDEATHSIG, SIGKILL), "prctl")
    root, emulator = arguments.root.resolve(), arguments.emulator.resolve()
    enter(root, emulator, arguments.bind, throwaway=arguments.throwaway)
    return run_first(arguments.command)


def run(arguments: argparse.Namespace) -> int:
    """Run the command in new namespaces, and return its status.

    Their users are mapped from outside, because a process inside could not map all of them.
    """
    unshared, unshared_end = os.pipe()
    mapped_end, mapped = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(unshared)
        os.close(mapped)
        must(libc.prctl(PR_SET_PDEATHSIG, SIGKILL), "prctl")
        return run_inside(arguments, unshared_end, mapped_end)
    os.close(unshared_end)
    os.read(unshared, 1)  # returns when the child has closed its end
    for name in ("uid_map", "gid_map"):
        Path(f"/proc/{child}/{name}").write_text(EVERYBODY)
    os.close(mapped)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main() -> int:
    """Parse the command line; return the command's exit status, or 128 plus its signal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--emulator", type=Path, required=True)
    parser.add_argument("--bind", type=Path, action="append", default=[])
    parser.add_argument("--throwaway", action="store_true")
    parser.add_argument("root", type=Path)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    try:
        status = run(parser.parse_args())
    except OSError as e:
        print(f"emulated: {e.strerror}", file=sys.stderr)
        status = 126
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())
