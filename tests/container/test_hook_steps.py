"""Races that never miss: the paths that the hook walks, creates and mounts on are changed while the
hook is stopped between two system calls.

A program that swaps names in a loop next to the hook may miss the window for years. These tests hit
each window, by exchanging names at every step in turn, and by single changes at the steps that
create, write, rename and mount.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.container.assault import assault, below_root, exchange, remove, run_nothing
from tests.container.bundles import LIBDIR, ROOT, TARGET, DiskBundle, Runtime
from tests.container.canary import Canary
from tests.container.conftest import HookNode
from tests.container.held import HeldContainer
from tests.container.steps import O_CREAT, Steps, SystemCall, faults
from tests.container.test_hook_rules import settled

CACHE = "etc/ld.so.cache"


@pytest.fixture
def canary(tmp_path: Path) -> Canary:
    return Canary(tmp_path / "canary")


class Swap:
    """A name in the image and, next to it, a link to the host; `put(True)` puts the link in the
    name's place.
    """

    def __init__(self, bundle: DiskBundle, canary: Canary, place: str, number: int = 0) -> None:
        self.path = bundle.rootfs / place
        self.link = bundle.rootfs / f"swap{number}"
        self.link.symlink_to(canary.path / place)
        self.swapped = False
        self.count = 0

    def put(self, swapped: bool) -> None:  # noqa: FBT001 - it is the state
        if swapped != self.swapped:
            exchange(self.path, self.link)
            self.swapped = swapped
            self.count += 1


def accesses_image(step: SystemCall) -> bool:
    """Return whether the hook accesses the image at this step: by openat2, or in the container's namespace."""
    return step.name == "openat2" or step.inside


PATTERNS: dict[str, Callable[[int], bool]] = {
    "every step": lambda n: n % 2 == 0,
    "every step, the other way": lambda n: n % 2 == 1,
    "in twos": lambda n: n % 4 < 2,
    "in twos, later": lambda n: (n + 1) % 4 < 2,
    "one in three": lambda n: n % 3 == 0,
    "two in three": lambda n: n % 3 > 0,
}
QUICK = {"every step", "every step, the other way", "in twos"}
SWAPPED = [
    "usr",
    "usr/lib",
    LIBDIR,
    f"{LIBDIR}/glibc-hwcaps",
    TARGET,
    "usr/bin",
    "run",
    "run/tidegate",
    "etc",
]
MAY_BE_THERE = {f"{LIBDIR}/glibc-hwcaps", TARGET, "run/tidegate"}


@pytest.mark.parametrize(
    "pattern", [pytest.param(p, marks=() if p in QUICK else pytest.mark.slow) for p in PATTERNS]
)
@pytest.mark.parametrize("place", SWAPPED)
def test_a_directory_that_is_a_link_at_every_other_step(
    node: HookNode, runtime: Runtime, canary: Canary, place: str, pattern: str
) -> None:
    """R2: the hook uses the file that it checked. The path on the host exists in the image too, so that the hook does not stop there."""
    bundle = run_nothing(node.bundle(""))
    if place in MAY_BE_THERE:
        (bundle.rootfs / place).mkdir(parents=True)
    inside = below_root(bundle, canary.path / place)
    inside.parent.mkdir(parents=True)
    shutil.copytree(bundle.rootfs / place, inside, symlinks=True)
    swap = Swap(bundle, canary, place)
    steps = 0

    def react(step: SystemCall) -> None:
        nonlocal steps
        if accesses_image(step):
            steps += 1
            swap.put(PATTERNS[pattern](steps))

    settled(assault(node, runtime, bundle, canary, react))
    assert swap.count >= 3, "the window was not hit"


@pytest.mark.slow
@pytest.mark.parametrize("back", [True, False])
@pytest.mark.parametrize("place", SWAPPED)
def test_a_directory_that_is_a_link_at_one_step(
    node: HookNode, tmp_path: Path, place: str, *, back: bool
) -> None:
    """R2: the directory is a link at each step in turn, for that step alone or from then on."""
    at, seen = 0, 1
    while at < seen:
        at += 1
        bundle = node.bundle("true", name=f"bundle{at}")
        if place in MAY_BE_THERE:
            (bundle.rootfs / place).mkdir(parents=True)
        canary = Canary(tmp_path / f"canary{at}")
        swap = Swap(bundle, canary, place)
        count = 0

        def react(step: SystemCall, swap: Swap = swap, at: int = at) -> None:
            nonlocal count
            if accesses_image(step):
                count += 1
                swap.put(count == at or (count > at and not back))

        canary.watch()
        with Steps(react) as steps, HeldContainer(bundle) as held:
            done = held.hook(steps.argv(node.hook))
            outside = [m for m in held.all_mounts() if m.startswith(str(canary.path))]
        assert outside == []
        assert done.returncode in (0, 71, 76), done.stderr
        (run,) = steps.runs
        assert faults(run, bundle.rootfs) == []
        canary.check()
        assert swap.count > 0 or count < at
        seen = max(seen, count)
        shutil.rmtree(bundle.path)
    assert at > 30


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_directories_that_become_links_at_random(
    node: HookNode, runtime: Runtime, canary: Canary, seed: int
) -> None:
    """R2: several directories change at once, at random; the seed reproduces the changes."""
    draw = random.Random(seed)  # noqa: S311
    bundle = run_nothing(node.bundle(""))
    places = draw.sample(SWAPPED, 3)
    places = [p for p in places if not any(p != q and p.startswith(f"{q}/") for q in places)]
    for place in places:
        (bundle.rootfs / place).mkdir(parents=True, exist_ok=True)
    swaps = [Swap(bundle, canary, place, n) for n, place in enumerate(places)]

    def react(step: SystemCall) -> None:
        if accesses_image(step):
            for swap in swaps:
                swap.put(draw.random() < 0.5)

    settled(assault(node, runtime, bundle, canary, react))


def makes(name: str) -> Callable[[SystemCall], bool]:
    """Return a predicate for the step that creates a file of this name."""
    return lambda s: s.name == "openat" and s.path == name and bool(s.numbers[2] & O_CREAT)


def makes_directory(name: str) -> Callable[[SystemCall], bool]:
    return lambda s: s.name == "mkdirat" and s.path == name


def opens(path: str, *, inside: bool = True) -> Callable[[SystemCall], bool]:
    return lambda s: s.name == "openat2" and s.path == path and s.inside == inside


def reads_again(path: str) -> Callable[[SystemCall, list[SystemCall]], bool]:
    """Return a predicate for the step that opens for reading what the previous step opened with
    O_PATH.
    """
    return lambda s, before: (
        s.name == "openat" and s.path.startswith("self/fd/") and before[-1].path == path
    )


def mounts(number: int) -> Callable[[SystemCall, list[SystemCall]], bool]:
    """Return a predicate for the mount with this number, counted from 0."""
    return lambda s, before: (
        s.name == "move_mount" and [b.name for b in before].count("move_mount") == number
    )


TEMPORARY = ".ld.so.cache.tidegate"

# For each moment: the step, the name that is replaced, and what replaces it below the canary.
MOMENTS: dict[str, tuple[Callable[..., bool], str, str]] = {
    "the cache is made": (makes(TEMPORARY), f"etc/{TEMPORARY}", "etc/ld.so.cache"),
    "the cache is put in place": (lambda s: s.name == "renameat2", CACHE, CACHE),
    "the new cache is put in place": (
        lambda s: s.name == "renameat2",
        f"etc/{TEMPORARY}",
        CACHE,
    ),
    "the old cache goes": (
        lambda s: s.name == "unlinkat" and not s.inside,
        f"etc/{TEMPORARY}",
        CACHE,
    ),
    "the cache is read": (reads_again(CACHE), CACHE, CACHE),
    "the loader is read": (
        reads_again("lib64/ld-linux-x86-64.so.2"),
        "usr/lib64/ld-linux-x86-64.so.2",
        "file",
    ),
    "a program's place is made": (makes("nvidia-smi"), "usr/bin/nvidia-smi", "usr/bin/nvidia-smi"),
    "a program's place was made": (
        opens("nvidia-smi"),
        "usr/bin/nvidia-smi",
        "usr/bin/nvidia-smi",
    ),
    "a program is mounted": (mounts(2), "usr/bin/nvidia-smi", "usr/bin/nvidia-smi"),
    "the libraries' place is made": (
        makes_directory("glibc-hwcaps"),
        f"{LIBDIR}/glibc-hwcaps",
        "etc",
    ),
    "the libraries' place was made": (opens("glibc-hwcaps"), f"{LIBDIR}/glibc-hwcaps", "etc"),
    "the place below it is made": (makes_directory("x86-64-v2"), TARGET, "x86-64-v2"),
    "the place below it was made": (opens("x86-64-v2"), TARGET, "x86-64-v2"),
    "the libraries are mounted": (mounts(0), TARGET, "x86-64-v2"),
    "the grant's place is made": (makes_directory("tidegate"), "run/tidegate", "run/tidegate"),
    "the grant's place was made": (opens("tidegate"), "run/tidegate", "run/tidegate"),
    "the grant is mounted": (mounts(1), "run/tidegate", "run/tidegate"),
    "the image is looked at": (opens(TARGET, inside=False), f"{LIBDIR}", LIBDIR),
    "the governor is asked": (lambda s: s.name == "connect", "usr/lib", "usr/lib"),
    "the namespace is entered": (lambda s: s.name == "setns", "usr", "usr"),
}
THINGS = ["link", "hard link", "fifo", "directory", "char"]


OF_FILES = {"etc/ld.so.cache", "usr/bin/nvidia-smi", "file"}
CASES = [
    pytest.param(moment, thing, marks=() if "link" in thing else pytest.mark.slow)
    for moment, (_, _, of_host) in MOMENTS.items()
    for thing in THINGS
    if thing != "hard link" or of_host in OF_FILES  # directories have no hard links
]


@pytest.mark.parametrize(("moment", "thing"), CASES)
def test_a_name_is_replaced_at_one_moment(
    node: HookNode, runtime: Runtime, canary: Canary, moment: str, thing: str
) -> None:
    """R2, R3, R4, R10: between check and use, another file takes the name."""
    when, place, of_host = MOMENTS[moment]
    bundle = run_nothing(node.bundle(""))
    path = bundle.rootfs / place
    before: list[SystemCall] = []
    hit: list[SystemCall] = []

    def react(step: SystemCall) -> None:
        two = when.__code__.co_argcount == 2
        if not hit and (when(step, before) if two else when(step)):
            hit.append(step)
            if path.exists() or path.is_symlink():
                path.rename(bundle.rootfs / "was-there")
            match thing:
                case "link":
                    path.symlink_to(canary.path / of_host)
                case "hard link":
                    os.link(canary.path / of_host, path)
                    canary.events()  # drops the events that the test itself caused
                case "fifo":
                    os.mkfifo(path)
                case "directory":
                    path.mkdir()
                case "char":
                    os.mknod(path, 0o020666, os.makedev(1, 5))
        before.append(step)

    outcome = assault(node, runtime, bundle, canary, react, links=thing == "hard link")
    remove(path)
    assert hit, "the window was not hit"
    if outcome.outcome == "failed":
        assert outcome.code in ("mount", "image"), outcome.event


CHECKED = {"x86-64-v2": (TARGET, "/dev"), "tidegate": ("run/tidegate", "/dev"), "nvidia-smi": ("usr/bin/nvidia-smi", "/etc/ld.so.preload")}  # fmt: skip


@pytest.mark.parametrize("name", CHECKED)
def test_a_target_that_is_a_link_after_it_was_checked(
    node: HookNode, runtime: Runtime, canary: Canary, name: str
) -> None:
    """R2: the mount is made on the file that was checked, not on a later file of that name, even if
    that is in the container's root.
    """
    place, elsewhere = CHECKED[name]
    bundle = run_nothing(node.bundle(""))
    before: list[SystemCall] = []
    hit: list[SystemCall] = []

    def react(step: SystemCall) -> None:
        if (
            step.name == "statx"
            and before[-1].name == "openat2"
            and before[-1].path == name
            and not hit
        ):
            hit.append(step)
            (bundle.rootfs / place).rename(bundle.rootfs / "was-there")
            (bundle.rootfs / place).symlink_to(elsewhere)
        before.append(step)

    outcome = assault(node, runtime, bundle, canary, react)
    assert hit, "the window was not hit"
    assert "/was-there" in outcome.targets
    assert elsewhere not in outcome.targets


WITHOUT = """
import sys
sys.path.insert(0, {root!r})
from oci_hook import kernel
kernel.RESOLVE_IN_ROOT = kernel.RESOLVE_NO_MAGICLINKS = 0
from oci_hook.entry import main
main()
"""


@pytest.mark.parametrize("place", SWAPPED)
def test_without_the_rule_the_race_reaches_the_host(
    node: HookNode, canary: Canary, place: str
) -> None:
    """The same race against a hook that does not confine its walks: with one of the patterns the
    hook reaches the host.
    """
    reached = []
    for number, pattern in enumerate(PATTERNS.values()):
        bundle = node.bundle("true", name=f"bundle{number}")
        if place in MAY_BE_THERE:
            (bundle.rootfs / place).mkdir(parents=True)
        swap = Swap(bundle, canary, place)
        steps_seen = [0]

        def react(
            step: SystemCall, swap: Swap = swap, seen: list[int] = steps_seen, pattern=pattern
        ) -> None:
            if accesses_image(step):
                seen[0] += 1
                swap.put(pattern(seen[0]))

        hook = ["/usr/bin/python3", "-ISE", "-c", WITHOUT.format(root=str(ROOT)), *node.hook[1:]]
        with Steps(react) as steps, HeldContainer(bundle) as held:
            held.hook(steps.argv(hook))
        (run,) = steps.runs
        reached += [
            s.file for s in run if s.name == "openat2" and s.file.startswith(str(canary.path))
        ]
        if reached:
            return
    pytest.fail("no pattern hit the window")


@pytest.mark.parametrize("what", ["process", "generation", "grant", "rootfs", "bundle"])
def test_an_object_of_the_host_disappears_meanwhile(
    node: HookNode, canary: Canary, what: str
) -> None:
    """R2, R13: the hook does not look up an object again by number or name if the object is gone
    when the hook enters or mounts it.
    """
    node.own_mirror()
    bundle = run_nothing(node.bundle(""))
    gone = canary.path / "gone"
    hit = False

    def react(step: SystemCall) -> None:
        nonlocal hit
        if step.name != "open_tree" or hit:
            return
        hit = True
        match what:
            case "process":
                held.process.kill()
                held.process.wait()
            case "generation":
                generation = node.driver_dir.resolve() / (node.driver_dir / "current").readlink()
                generation.rename(node.base / "aside")
                generation.symlink_to(canary.path)
            case "grant":
                (directory,) = (node.base / "run/containers").iterdir()
                directory.rename(node.base / "aside")
            case "rootfs":
                bundle.rootfs.rename(bundle.path / "aside")
                bundle.rootfs.symlink_to(canary.path)
            case "bundle":
                bundle.path.rename(node.base / "aside")
                bundle.path.symlink_to(canary.path)

    canary.watch()
    with Steps(react) as steps, HeldContainer(bundle) as held:
        done = held.hook(steps.argv(node.hook))
        mounted = [] if what == "process" else held.all_mounts()
    canary.check()
    (run,) = steps.runs
    assert hit
    assert not gone.exists()
    assert not any(m.startswith(str(canary.path)) for m in mounted)
    expected = {"process": 66, "generation": 0, "grant": 72, "rootfs": 66, "bundle": 71}[what]
    assert done.returncode == expected, done.stderr
    assert faults(run, bundle.rootfs) == [] or what in ("rootfs", "bundle")


def test_the_tracer_detects_each_fault(tmp_path: Path) -> None:
    """`faults` finds each fault that it knows in a program with that fault, so that a clean result
    for the hook means something.
    """
    import subprocess

    script = """
import ctypes, os, sys
root = sys.argv[1]
libc = ctypes.CDLL(None)
d = os.open(root, os.O_PATH)
if sys.argv[2] != "dumpable":
    libc.prctl(4, 0, 0, 0, 0)
how = (ctypes.c_uint64 * 3)(os.O_PATH | os.O_CLOEXEC, 0, 18)
if sys.argv[2] in ("cloexec",): how[0] = os.O_PATH
if sys.argv[2] in ("walk",): how[2] = 2
if sys.argv[2] in ("inside", "dumpable"): libc.setns(os.open("/proc/self/ns/mnt", 0), 0)
match sys.argv[2]:
    case "cloexec": libc.syscall(437, d, b"etc", how, 24)
    case "walk": libc.syscall(437, d, b"etc", how, 24)
    case "exec": os.system("true")
    case "chdir": os.chdir(root)
    case "mkdir": os.mkdir(root + "/x")
    case "mkdirat": os.mkdir("etc/x", dir_fd=d)
    case "umount": libc.umount2(b"/nowhere", 2)
    case "inside": os.open(root + "/etc/file", os.O_RDONLY)
"""
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/file").touch()
    for what, word in {
        "cloexec": "R12",
        "walk": "R2",
        "exec": "R5",
        "chdir": "a path",
        "mkdir": "a path",
        "mkdirat": "a path",
        "umount": "a path",
        "inside": "opened by path",
        "dumpable": "R13",
        "nothing": "",
    }.items():
        with Steps() as steps:
            subprocess.run(
                steps.argv(["/usr/bin/python3", "-IS", "-c", script, str(tmp_path), what]),
                check=False,
            )
        found = faults(steps.runs[0], tmp_path)
        assert any(word in fault for fault in found) if word else found == [], (what, found)
