"""Attacks by images that try to get more than their share: the rules that follow from the CVEs of
runc and of NVIDIA's toolkit.

R1  no container path is a mount's source     R2  resolve once, act on the descriptor
R3  create only with O_EXCL|O_NOFOLLOW        R4  replace a file by rename, below a descriptor
R5  execute nothing of the image              R7  the environment and the working directory are hostile
R8  mounts are private                        R9  the image's environment grants nothing
R10 check a source's type on its descriptor   R12 no descriptor survives into the container
R13 never in the container's namespaces       R14 limits everywhere     R15 values are data     R16 never the host's root
docs/reference/hook-rules.md says where each rule is implemented and tested. This file has the attacks on a
container that is held where a runtime would run its hooks. Those in test_hook_rules.py run under
runc and crun, and those in test_hook_steps.py between the hook's system calls.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.container.assault import put_odd
from tests.container.bundles import LIBDIR, TARGET, DiskBundle, Runtime, compile_c
from tests.container.conftest import HookNode
from tests.container.held import HeldContainer
from tests.container.test_hook_start import SEARCHED, host_mounts, tree

PROBE = "probe libcuda.so.1 libnvidia-ml.so.1 libcuda.so libnvidia-ptxjitcompiler.so.1"


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Path]:
    """A directory of the host that must not change."""
    path = tmp_path / "victim"
    for name in ("usr/bin", LIBDIR, "etc", "run", "x86-64-v2"):
        (path / name).mkdir(parents=True)
    (path / "etc/ld.so.cache").write_bytes(b"the host's cache")
    (path / "file").write_bytes(b"the host's file")
    before, mounts = contents(path), host_mounts(tmp_path)
    yield path
    assert contents(path) == before
    assert host_mounts(tmp_path) == mounts


def contents(root: Path) -> dict[str, tuple[tuple[int, int, int], bytes]]:
    return {
        name: (what, (root / name).read_bytes() if (root / name).is_file() else b"")
        for name, what in tree(root).items()
    }


def replace_by_link(path: Path, text: str) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(text)


def attack(node: HookNode, bundle: DiskBundle) -> tuple[int, str]:
    """Run the hook; whatever it reports, its mounts are inside the root, and it prints at most one line."""
    with HeldContainer(bundle) as held:
        before = set(held.all_mounts())
        done = held.hook(node.hook)
        outside = [
            m for m in set(held.all_mounts()) - before if not m.startswith(f"{bundle.rootfs}/")
        ]
        assert outside == []
        if done.returncode:
            assert set(held.all_mounts()) == before
            assert done.stderr.count("\n") == 1
    assert done.returncode in (0, 66, 71, 76), done.stderr
    return done.returncode, done.stderr


PLACES = [
    "usr",
    "usr/lib",
    LIBDIR,
    f"{LIBDIR}/glibc-hwcaps",
    TARGET,
    "usr/bin",
    "usr/bin/nvidia-smi",
    "run",
    "run/tidegate",
    "etc",
    "etc/ld.so.cache",
]


@pytest.mark.parametrize(
    "text",
    ["{victim}", "../../../../../../../../..{victim}", "/proc/1/root{victim}", "/proc/self/cwd"],
)
@pytest.mark.parametrize("place", PLACES)
def test_a_link_to_the_host_in_every_place(
    node: HookNode, victim: Path, place: str, text: str
) -> None:
    """R2, R3, R4: the link is followed inside the root or refused; the host does not change."""
    bundle = node.bundle("true")
    replace_by_link(bundle.rootfs / place, text.format(victim=victim))
    attack(node, bundle)


@pytest.mark.parametrize("place", PLACES)
def test_a_link_whose_target_exists_inside_is_followed_inside(
    node: HookNode, victim: Path, place: str
) -> None:
    """The image has the victim's path too: the hook makes its files at that path in the image."""
    bundle = node.bundle("true")
    inside = bundle.rootfs / str(victim).lstrip("/")
    shutil.copytree(victim, inside)
    replace_by_link(bundle.rootfs / place, str(victim))
    attack(node, bundle)


GRAPHICS = {"tidegate.gpu/memory": "8Gi", "tidegate.gpu/capabilities": "graphics"}
DIRECTORIES = [
    "etc/vulkan",
    "etc/vulkan/icd.d",
    "usr/share",
    "usr/share/vulkan/icd.d",
    "usr/share/nvidia",
    f"{LIBDIR}/gbm",
]


@pytest.mark.parametrize(
    "text",
    [
        "/etc",
        "{victim}",
        "../../../../../../../../../..",
        "/proc/1/root{victim}",
        "/nowhere/at/all",
        "{name}",
        "../" * 60 + "{name}",
    ],
)
@pytest.mark.parametrize("place", DIRECTORIES)
@pytest.mark.parametrize("inside", [False, True])
def test_a_link_where_files_of_the_driver_go_costs_at_most_these_files(
    node: HookNode, victim: Path, place: str, text: str, *, inside: bool
) -> None:
    """Files in a place are optional: the container starts, whatever the image has there, and the
    host does not change.
    """
    bundle = node.bundle("true", annotations=GRAPHICS)
    if inside:
        shutil.copytree(victim, bundle.rootfs / str(victim).lstrip("/"))
    replace_by_link(
        bundle.rootfs / place, text.format(victim=victim, name=(bundle.rootfs / place).name)
    )
    assert attack(node, bundle) == (0, "")


@pytest.mark.parametrize("kind", ["file", "fifo", "device", "full of links"])
@pytest.mark.parametrize("place", DIRECTORIES)
def test_odd_files_in_a_place_do_not_fail_the_start(
    node: HookNode, victim: Path, place: str, kind: str
) -> None:
    bundle = node.bundle("true", annotations=GRAPHICS)
    path = bundle.rootfs / place
    path.parent.mkdir(parents=True, exist_ok=True)
    match kind:
        case "file":
            path.touch()
        case "fifo":
            os.mkfifo(path)
        case "device":
            os.mknod(path, 0o020666, os.makedev(1, 5))
        case "full of links":
            path.mkdir()
            for name in ("nvidia_icd.json", "nvidia-application-profiles-rc", "vulkan"):
                (path / name).symlink_to(victim / "file")
    assert attack(node, bundle) == (0, "")


@pytest.mark.parametrize("kind", ["link inside", "link outside", "fifo", "directory", "file"])
def test_a_single_file_is_bound_over_a_regular_one_only(
    node: HookNode, victim: Path, kind: str
) -> None:
    """The image has other files in both directories, and in the first also an entry that has the
    name of the driver's file.
    """
    bundle = node.bundle("true", annotations=GRAPHICS)
    for directory in ("etc/vulkan/icd.d", "usr/share/vulkan/icd.d"):
        (bundle.rootfs / directory).mkdir(parents=True)
        (bundle.rootfs / directory / "other.json").touch()
    path = bundle.rootfs / "etc/vulkan/icd.d/nvidia_icd.json"
    match kind:
        case "link inside":
            path.symlink_to("/etc/ld.so.cache")
        case "link outside":
            path.symlink_to(victim / "file")
        case "fifo":
            os.mkfifo(path)
        case "directory":
            path.mkdir()
        case "file":
            path.write_text("the image's")
    with HeldContainer(bundle) as held:
        assert held.hook(node.hook).returncode == 0
        at = f"/{path.relative_to(bundle.rootfs)}"
        assert (at in held.mounts()) == (kind == "file")
        assert "/etc/ld.so.cache" not in held.mounts()
    skipped = node.events()[0].get("skipped", [])
    assert [s.partition(":")[0] for s in skipped] == ([] if kind == "file" else [at])


@pytest.mark.parametrize("inside", ["nothing", "an empty directory", "files"])
@pytest.mark.parametrize("second", ["nothing", "an empty directory", "files", "a volume"])
def test_a_volume_where_files_of_the_driver_go_is_left_alone(
    node: HookNode, victim: Path, inside: str, second: str
) -> None:
    """The volume is the user's: nothing is made in it, and nothing is mounted on it. The next directory is used."""
    bundle = node.bundle("true", annotations=GRAPHICS)
    etc, share = "etc/vulkan/icd.d", "usr/share/vulkan/icd.d"
    volume = victim / "run"
    for directory, content in ((bundle.rootfs / share, second), (volume / "icd.d", inside)):
        if content != "nothing":
            directory.mkdir(parents=True)
        if content == "files":
            (directory / "other.json").touch()
    volumes = ["etc/vulkan"] + (["usr/share/vulkan"] if second == "a volume" else [])
    with HeldContainer(bundle) as held:
        for place in volumes:
            (bundle.rootfs / place).mkdir(parents=True, exist_ok=True)
            command = ["mount", "--bind", str(volume), str(bundle.rootfs / place)]
            subprocess.run(["nsenter", "-m", "-t", str(held.process.pid), *command], check=True)
        assert held.hook(node.hook).returncode == 0
        found = [m for m in held.mounts() if "vulkan" in m]
    if inside != "nothing":
        assert [p.name for p in (volume / "icd.d").iterdir()] == (
            ["other.json"] if inside == "files" else []
        )
        shutil.rmtree(volume / "icd.d")
    at = {"files": [f"/{share}/nvidia_icd.json"], "a volume": ["/usr/share/vulkan"]}
    assert found == ["/etc/vulkan", *at.get(second, [f"/{share}"])]
    assert node.events()[0].get("skipped", []) == (
        [f"place vulkan-icd: /{etc}: it is on a volume; /{share}: it is on a volume"]
        if second == "a volume"
        else []
    )


@pytest.mark.parametrize(
    "place", ["usr/lib", LIBDIR, TARGET, "run/tidegate", "etc", "usr/bin/nvidia-smi"]
)
@pytest.mark.usefixtures("victim")
def test_loops_and_dangling_links_cause_at_most_one_line(node: HookNode, place: str) -> None:
    for text in (Path(place).name, "/nowhere/at/all", "../" * 60 + place):
        bundle = node.bundle("true", name=f"bundle{abs(hash(text))}")
        replace_by_link(bundle.rootfs / place, text)
        attack(node, bundle)


@pytest.mark.parametrize(
    "kind", ["fifo", "socket", "char", "directory", "endless", "zeros", "hostile", "hard link"]
)
@pytest.mark.parametrize(
    "place",
    [
        "etc/ld.so.cache",
        "usr/bin/nvidia-smi",
        TARGET,
        "usr/lib64/ld-linux-x86-64.so.2",
        "run/tidegate",
    ],
)
def test_odd_files_neither_hang_nor_break_the_hook(
    node: HookNode, victim: Path, place: str, kind: str
) -> None:
    """R14: types are checked on descriptors before anything is opened for reading, and sizes are bounded."""
    bundle = node.bundle("true")
    path = bundle.rootfs / place
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        path.unlink()
    match kind:
        case "fifo" | "socket" | "char" | "endless":
            put_odd(path, kind)
        case "directory":
            path.mkdir()
        case "zeros":
            path.write_bytes(b"glibc-ld.so.cache1.1" + bytes(1 << 20))
        case "hostile":
            path.write_bytes(b"glibc-ld.so.cache1.1" + b"\xff" * 4096)
        case "hard link":
            os.link(victim / "file", path)
    begin = time.monotonic()
    attack(node, bundle)
    assert time.monotonic() - begin < 5


def test_nothing_of_the_image_is_executed(node: HookNode, runc: Runtime, tmp_path: Path) -> None:
    """R5, R7: the hook ignores programs, libraries and Python modules of the image, and its environment."""
    bundle = node.bundle(PROBE)
    marker = tmp_path / "marker"
    source = f'#include <fcntl.h>\n__attribute__((constructor)) static void run(void) {{ open("{marker}", O_CREAT | O_WRONLY, 0600); }}'
    preload = compile_c(source, bundle.rootfs / "evil.so", "-shared", "-fPIC")
    script = f"#!/bin/sh\ntouch {marker}\n"
    for name in ("usr/sbin/ldconfig", "usr/bin/python3", "usr/bin/nvidia-smi"):
        (bundle.rootfs / name).write_text(script)
        (bundle.rootfs / name).chmod(0o755)
    module = f"import os\nos.close(os.open({str(marker)!r}, os.O_CREAT))\n"
    for directory in (bundle.path, bundle.rootfs):
        for name in (
            "json.py",
            "socket.py",
            "oci_hook.py",
            "sitecustomize.py",
            "ctypes.py",
            "re.py",
        ):
            (directory / name).write_text(module)
    hostile = {
        "PYTHONPATH": str(bundle.path),
        "PYTHONHOME": str(bundle.path),
        "PYTHONSTARTUP": str(bundle.path / "json.py"),
        "LD_PRELOAD": str(preload),
        "LD_LIBRARY_PATH": str(bundle.rootfs / LIBDIR),
    }
    bundle.config["process"]["env"] += [
        f"{name}={value}" for name, value in hostile.items() if name != "LD_LIBRARY_PATH"
    ]
    for stage in ("createRuntime", "poststop"):
        del bundle.config["hooks"][stage][0]["env"]
    # Without `env` in the hook entry, the hook inherits the runtime's own environment
    del hostile["LD_PRELOAD"], hostile["LD_LIBRARY_PATH"]
    ran = runc.run(bundle, env=hostile)
    assert ran.status == 0, ran.stderr
    assert node.events()[0]["outcome"] == "prepared"
    assert not marker.exists()
    with HeldContainer(bundle) as held:
        assert held.hook(node.hook, env=hostile, cwd=bundle.path).returncode == 0
        assert (
            held.hook(node.hook, env=hostile, cwd=bundle.rootfs, stage="poststop").returncode == 0
        )
    assert not marker.exists()


@pytest.mark.usefixtures("victim")
def test_a_shared_mount_is_refused(node: HookNode) -> None:
    """R8: a mount that is made on a shared mount would appear on the host."""
    bundle = node.bundle("true")
    bundle.write()
    with HeldContainer(bundle, propagation="shared") as held:
        before = held.all_mounts()
        done = held.hook(node.hook)
        assert done.returncode == 71
        assert "is on a shared mount; mount it with private or slave propagation" in done.stderr
        assert held.all_mounts() == before


def test_a_volume_that_links_of_the_image_lead_to_gets_no_files(
    node: HookNode, victim: Path
) -> None:
    """R3: nothing is created in a host directory that is mounted into the container, wherever links lead."""
    for place in ("run", LIBDIR + "/glibc-hwcaps", "usr/bin"):
        bundle = node.bundle("true", name="bundle-" + place.replace("/", "-"))
        (bundle.rootfs / "data").mkdir()
        if place == "usr/bin":
            (bundle.rootfs / "usr/bin").rename(bundle.rootfs / "usr/programs")
        replace_by_link(bundle.rootfs / place, "/data")
        with HeldContainer(bundle) as held:
            command = ["mount", "--bind", str(victim / "run"), str(bundle.rootfs / "data")]
            subprocess.run(["nsenter", "-m", "-t", str(held.process.pid), *command], check=True)
            done = held.hook(node.hook)
        assert done.returncode == (0 if place == "usr/bin" else 76), done.stderr
        assert list((victim / "run").iterdir()) == []


def test_the_images_environment_grants_nothing(node: HookNode, runc: Runtime) -> None:
    """R9: no variable of the image's environment gives the container anything."""
    bundle = node.bundle("ls -A /run", annotations={})
    bundle.config["process"]["env"] += [
        "NVIDIA_VISIBLE_DEVICES=all",
        "NVIDIA_DRIVER_CAPABILITIES=all",
        "tidegate.gpu/memory=8Gi",
        "TIDEGATE_MEMORY=8Gi",
    ]
    ran = runc.run(bundle)
    assert (ran.status, ran.stdout) == (0, "")
    assert node.governor.requests == []


def test_no_descriptor_reaches_the_container_or_stays_in_the_hook(
    node: HookNode, runtime: Runtime
) -> None:
    """R12: the hook passes on no descriptor, and closes those that it inherits."""
    ran = runtime.run(node.bundle("cd /proc/self/fd && ls -l . | cat"))
    assert "/tidegate" not in ran.stdout
    assert len(ran.stdout.splitlines()) <= 6, ran.stdout

    bundle = node.bundle("true", name="second")
    node.governor.mode = "silent"
    node.timeout = 8.0  # the hook waits half as long for an answer
    leak = os.open(node.base, os.O_RDONLY)
    with HeldContainer(bundle) as held:
        hook = subprocess.Popen(
            [*node.hook, "prestart"],
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=[leak],
            cwd=bundle.path,
        )
        assert hook.stdin is not None
        hook.stdin.write(held.state())
        hook.stdin.close()
        wait_for(lambda: node.governor.requests[-1]["op"] == "admit")
        links = [str(fd.readlink()) for fd in Path(f"/proc/{hook.pid}/fd").iterdir()]
        assert str(node.base) not in links
        assert hook.wait() == 75
    os.close(leak)


def wait_for(condition: object) -> None:
    assert callable(condition)
    for _ in range(500):
        if condition():
            return
        time.sleep(0.01)
    pytest.fail("it did not happen")


def test_an_oversized_config_is_refused(node: HookNode) -> None:
    """R14: the size of what the hook reads is limited."""
    bundle = node.bundle("true")
    with HeldContainer(bundle) as held:
        with (bundle.path / "config.json").open("ab") as f:
            f.write(b" " * (9 << 20))
        done = held.hook(node.hook)
    assert done.returncode == 66
    assert "is larger than 4194304 bytes" in done.stderr


def test_deep_nesting_and_long_numbers_are_refused(node: HookNode) -> None:
    """R14: the hook refuses deep nesting, long numbers and lone surrogates."""
    bundle = node.bundle("true")
    with HeldContainer(bundle) as held:
        for text in (
            '{"annotations": {"tidegate.gpu/memory": "1Gi"}, "x": ' + "[" * 200000,
            '{"annotations": {"tidegate.gpu/memory": "1Gi"}, "x": ' + "1" * 100000 + "}",
            '{"annotations": {"tidegate.gpu/memory": "\\ud800"}, "root": {"path": "rootfs"}}',
            '{"annotations": {"tidegate.gpu/\\ud800": "1"}, "root": {"path": "\\ud800"}}',
        ):
            (bundle.path / "config.json").write_text(text)
            done = held.hook(node.hook, stdin=held.state(annotations={}))
            assert done.returncode in (64, 66), done.stderr
            assert done.stderr.count("\n") == 1


SWAP_C = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
/* Exchanges a directory with a link, for each pair of arguments, until killed. */
int main(int argc, char **argv) {
        for (;;)
                for (int i = 1; i + 1 < argc; i += 2)
                        renameat2(AT_FDCWD, argv[i], AT_FDCWD, argv[i + 1], RENAME_EXCHANGE);
}
"""


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [400])
@pytest.mark.parametrize(
    "places", [[f"{LIBDIR}/glibc-hwcaps", "run"], ["etc", "usr/bin"], ["usr", "run/tidegate"]]
)
def test_a_race_between_directory_and_link_changes_nothing_outside(
    node: HookNode, victim: Path, tmp_path: Path, places: list[str], rounds: int
) -> None:
    """R2: whatever the walk meets is inside the root, and the hook acts on what it opened.

    This test depends on timing, and is slow; test_hook_steps.py hits each window.
    """
    bundle = node.bundle("true")
    swap = compile_c(SWAP_C, tmp_path / "swap")
    arguments = []
    for i, place in enumerate(places):
        (bundle.rootfs / place).mkdir(parents=True, exist_ok=True)
        link = bundle.rootfs / f"link{i}"
        link.symlink_to(str(victim / place))
        arguments += [str(bundle.rootfs / place), str(link)]
    with HeldContainer(bundle) as held:

        def outside() -> set[str]:
            # Mounts are compared by number, because other tests rename directories that contain
            # mounts.
            lines = Path(f"/proc/{held.process.pid}/mountinfo").read_text().splitlines()
            inside = f"{bundle.rootfs}/"
            return {line.split()[0] for line in lines if not line.split()[4].startswith(inside)}

        swapper = subprocess.Popen([str(swap), *arguments])
        try:
            for _ in range(rounds):
                before = outside()
                done = held.hook(node.hook)
                assert outside() == before
                assert done.returncode in (0, 71, 76), done.stderr
        finally:
            swapper.kill()
            swapper.wait()
    # The fixture `victim` compares its content and the host's mounts


def test_an_image_whose_usr_lib_is_an_absolute_link_is_served(
    node: HookNode, runc: Runtime
) -> None:
    """Absolute links inside an image are common, and are resolved in the image."""
    bundle = node.bundle(PROBE)
    (bundle.rootfs / "etc/ld.so.cache").unlink()
    (bundle.rootfs / "usr/lib").rename(bundle.rootfs / "store")
    (bundle.rootfs / "usr/lib").symlink_to("/store")
    (bundle.rootfs / "run").rmdir()
    (bundle.rootfs / "var/run").mkdir()
    (bundle.rootfs / "run").symlink_to("/var/run")
    ran = runc.run(bundle)
    assert (ran.status, ran.stdout) == (0, SEARCHED), ran.stderr


def test_another_mount_at_the_path_of_the_root_is_refused(node: HookNode) -> None:
    bundle = node.bundle("true")
    with HeldContainer(bundle, mount='mount -t tmpfs none "$1"') as held:
        mounts = held.all_mounts()
        done = held.hook(node.hook)
        assert done.returncode == 66, done.stderr
        assert "is another directory in the container's namespace" in done.stderr
        assert held.all_mounts() == mounts
    node.governor.wait_idle()
    assert (node.governor.admitted, node.governor.confirmed) == ({}, set())


@pytest.mark.parametrize("is_above", [False, True])
def test_a_root_replaced_by_a_link_before_the_hook_runs_is_refused(
    node: HookNode, tmp_path: Path, *, is_above: bool
) -> None:
    """In both namespaces the link leads to the same directory of the host, which no runtime
    mounted.
    """
    bundle = node.bundle("true")
    victim = tmp_path / "victim"
    shutil.copytree(bundle.rootfs, victim, symlinks=True)
    before = contents(victim)
    with HeldContainer(bundle) as held:
        name = bundle.rootfs.parent if is_above else bundle.rootfs
        name.rename(name.with_name("moved"))
        if is_above:
            name.mkdir()
            shutil.copy(name.with_name("moved") / "config.json", name)
            name = bundle.rootfs
        name.symlink_to(victim)
        mounts = held.all_mounts()
        done = held.hook(node.hook)
        assert done.returncode == 66, done.stderr
        assert "is not a mount in the container's namespace" in done.stderr
        assert held.all_mounts() == mounts
    assert contents(victim) == before
    node.governor.wait_idle()
    assert (node.governor.admitted, node.governor.confirmed) == ({}, set())
