"""What a container gets besides the 64-bit libraries: files in places, directories of the host and
32-bit libraries; and the generation from which it gets them.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.container.bundles import LIBDIR, TARGET, VERSION, DiskBundle, Runtime, make_library
from tests.container.conftest import HookNode
from tests.container.held import HeldContainer
from tests.container.test_hook_attack import wait_for
from tests.container.test_hook_refuse import refuse
from tests.container.test_hook_start import FOUND, PROBE, host_mounts, tree

LIBDIR32 = "usr/lib/i386-linux-gnu"
TARGET32 = f"{LIBDIR32}/tidegate"


def asking(capabilities: str) -> dict[str, str]:
    return {"tidegate.gpu/memory": "8Gi", "tidegate.gpu/capabilities": capabilities}


def test_a_container_for_graphics_gets_the_drivers_files(node: HookNode, runtime: Runtime) -> None:
    """The container gets the libraries of the larger set, whole directories, and sockets of the
    host; nothing changes on the host.
    """
    before = host_mounts(node.base)
    sockets = node.made / "host-sockets"
    command = (
        f"probe libGLX_nvidia.so.0 libcuda.so.1 /{LIBDIR}/gbm/nvidia-drm_gbm.so;"
        "cat /etc/vulkan/icd.d/nvidia_icd.json /usr/share/glvnd/egl_vendor.d/10_nvidia.json"
        f" /usr/share/nvidia/nvidia-application-profiles-rc; ls {sockets}; ls {sockets}/..;"
        "cat /proc/self/mountinfo"
    )
    bundle = node.bundle(command, annotations=asking("graphics"))
    ran = runtime.run(bundle)
    assert (ran.status, ran.stderr) == (0, "")
    said, _, mounts = ran.stdout.partition("socket\nhost-sockets\n")
    assert said == (
        f"libGLX_nvidia.so.0: /{TARGET}/libGLX_nvidia.so.0 tidegate's libGLX_nvidia\n"
        f"libcuda.so.1: /{TARGET}/libcuda.so.1 tidegate's libcuda\n"
        f"/{LIBDIR}/gbm/nvidia-drm_gbm.so: /{LIBDIR}/gbm/nvidia-drm_gbm.so tidegate's gbm\n"
        "the driver's nvidia_icd.json\n"
        "the driver's 10_nvidia.json\n"
        "the driver's nvidia-application-profiles-rc\n"
    )
    options = {line.split()[4]: set(line.split()[5].split(",")) for line in mounts.splitlines()}
    for target in ("/etc/vulkan/icd.d", "/usr/share/nvidia", str(sockets)):
        assert {"ro", "nosuid", "nodev", "noexec"} <= options[target], target
    assert {"ro", "nosuid", "nodev"} <= options[f"/{LIBDIR}/gbm"]
    assert "noexec" not in options[f"/{LIBDIR}/gbm"]
    assert host_mounts(node.base) == before
    assert "skipped" not in node.events()[0]


def test_a_container_without_graphics_gets_no_graphics_files(node: HookNode, runc: Runtime) -> None:
    ran = runc.run(node.bundle(f"{PROBE} libGLX_nvidia.so.0; ls -A /usr/share /etc/vulkan"))
    found, _, rest = ran.stdout.partition("libGLX_nvidia.so.0: ")
    assert found == FOUND
    assert rest.endswith("No such file or directory\n")


def test_files_of_the_image_stay_beside_the_drivers(node: HookNode, runtime: Runtime) -> None:
    """Both directories have files of the image. In the first, the driver's file is mounted over a
    file of the same name.
    """
    bundle = node.bundle(
        "cat /etc/vulkan/icd.d/*; cat /usr/share/vulkan/icd.d/*; cat /usr/share/glvnd/egl_vendor.d/*;"
        "cat /etc/glvnd/egl_vendor.d/*",
        annotations=asking("graphics"),
    )
    for path, text in {
        "etc/vulkan/icd.d/intel.json": "the image's intel\n",
        "etc/vulkan/icd.d/nvidia_icd.json": "the image's nvidia\n",
        "usr/share/vulkan/icd.d/radeon.json": "the image's radeon\n",
        "usr/share/glvnd/egl_vendor.d/50_mesa.json": "the image's mesa\n",
    }.items():
        (bundle.rootfs / path).parent.mkdir(parents=True, exist_ok=True)
        (bundle.rootfs / path).write_text(text)
    before = tree(bundle.rootfs)
    ran = runtime.run(bundle)
    assert ran.status == 0, ran.stderr
    assert ran.stdout == (
        "the image's intel\nthe driver's nvidia_icd.json\nthe image's radeon\nthe image's mesa\n"
        "the driver's 10_nvidia.json\n"
    )
    assert "skipped" not in node.events()[0]
    own = bundle.rootfs / "etc/vulkan/icd.d/nvidia_icd.json"
    assert own.read_text() == "the image's nvidia\n"
    assert tree(bundle.rootfs).keys() == before.keys()


@pytest.mark.parametrize("there", [(), ("icd.d",)])
def test_a_volume_of_the_configuration_leaves_a_place_the_next_directory(
    node: HookNode, runtime: Runtime, there: tuple[str, ...]
) -> None:
    """The runtime mounts the volume in the container only: from the host's side the directory is empty."""
    bundle = node.bundle(
        "ls -AR /etc/vulkan; cat /usr/share/vulkan/icd.d/*", annotations=asking("graphics")
    )
    volume = node.base / "volume"
    volume.mkdir()
    for name in there:
        (volume / name).mkdir()
    bundle.config["mounts"].append(
        {
            "destination": "/etc/vulkan",
            "type": "bind",
            "source": str(volume),
            "options": ["rbind", "rprivate"],
        }
    )
    (bundle.rootfs / "usr/share/vulkan/icd.d").mkdir(parents=True)
    ran = runtime.run(bundle)
    assert ran.status == 0, ran.stderr
    assert ran.stdout.count("nvidia_icd.json") == 1
    assert ran.stdout.endswith("the driver's nvidia_icd.json\n")
    assert "skipped" not in node.events()[0]
    assert [path.name for path in volume.iterdir()] == list(there)


def test_a_restart_puts_the_drivers_files_where_they_were(node: HookNode, runc: Runtime) -> None:
    bundle = node.bundle("cat /etc/vulkan/icd.d/*", annotations=asking("graphics"))
    assert runc.run(bundle).stdout == "the driver's nvidia_icd.json\n"
    first = tree(bundle.rootfs)
    assert runc.run(bundle).stdout == "the driver's nvidia_icd.json\n"
    assert tree(bundle.rootfs) == first


def test_a_read_only_root_gets_no_files_and_the_log_says_so(node: HookNode) -> None:
    bundle = node.bundle("true", annotations=asking("graphics"))
    for directory in (TARGET, "run/tidegate", "usr/share/nvidia"):
        (bundle.rootfs / directory).mkdir(parents=True)
    with HeldContainer(bundle) as held:
        remount = ["mount", "-o", "remount,bind,ro", str(bundle.rootfs)]
        subprocess.run(["nsenter", "-m", "-t", str(held.process.pid), *remount], check=True)
        done = held.hook(node.hook)
        assert (done.returncode, done.stderr) == (0, "")
        assert held.mounts() == ["", "/run/tidegate", f"/{TARGET}", "/usr/share/nvidia"]
    assert node.events()[0]["skipped"] == [
        f"/{place}: Read-only file system"
        for place in (
            "usr/bin/nvidia-smi",
            "etc/vulkan/icd.d",
            "usr/share/glvnd/egl_vendor.d",
            f"{LIBDIR}/gbm",
            str(node.made / "host-sockets").lstrip("/"),
        )
    ]


def test_a_place_that_the_image_cannot_take_is_logged(node: HookNode, runc: Runtime) -> None:
    bundle = node.bundle("echo started", annotations=asking("graphics"))
    (bundle.rootfs / "etc/vulkan").write_text("a file\n")
    (bundle.rootfs / "usr/share").symlink_to("/nowhere")
    ran = runc.run(bundle)
    assert (ran.status, ran.stdout) == (0, "started\n"), ran.stderr
    assert node.events()[0]["skipped"] == [
        (
            "place vulkan-icd: /etc/vulkan/icd.d: /etc/vulkan is not a directory; /usr/share/vulkan/icd.d: /usr/share is"
            " not a directory"
        ),
        "place profiles: /usr/share/nvidia: /usr/share is not a directory; /etc/nvidia: the image has no such directory",
    ]


def test_a_place_that_fails_half_way_leaves_nothing(node: HookNode, runc: Runtime) -> None:
    """The hook creates the first directory of the path, the file system refuses the second, and the
    first is removed.
    """
    generation = node.own_mirror()
    manifest = json.loads((generation / "manifest.json").read_text())
    name = "n" * 300
    manifest["places"] = [{**manifest["places"][0], "targets": [f"/etc/made/{name}"]}]
    (generation / "manifest.json").write_text(json.dumps(manifest))
    bundle = node.bundle("echo started", annotations=asking("graphics"))
    assert runc.run(bundle).stdout == "started\n"
    assert node.events()[0]["skipped"] == [f"/etc/made/{name}: File name too long"]
    assert not (bundle.rootfs / "etc/made").exists()


@pytest.mark.parametrize("kind", ["link", "file"])
def test_a_link_in_place_of_a_directory_of_the_host_is_not_followed(
    node: HookNode, kind: str
) -> None:
    """Some of these directories are below /tmp, where any user of the host can create a link."""
    generation = node.own_mirror()
    path = node.base / "sockets"
    path.symlink_to("/etc") if kind == "link" else path.touch()
    manifest = json.loads((generation / "manifest.json").read_text())
    manifest["binds"] = [{"path": str(path), "capability": "utility"}]
    (generation / "manifest.json").write_text(json.dumps(manifest))
    bundle = node.bundle("true")
    with HeldContainer(bundle) as held:
        assert held.hook(node.hook).returncode == 0
        assert held.mounts() == ["", "/run/tidegate", "/usr/bin/nvidia-smi", f"/{TARGET}"]
    assert "skipped" not in node.events()[0]


def put_libc32(bundle: DiskBundle, directory: str = LIBDIR32) -> None:
    """Put a real i386 library under the C library's name, and add it to the image's ld.so.cache."""
    make_library(bundle.rootfs / directory / "libc.so.6", "libc.so.6", "i386", "-m32")
    (bundle.rootfs / "etc/ld.so.conf").write_text(f"/{directory}\n")
    subprocess.run(["ldconfig", "-r", str(bundle.rootfs), "-X"], check=True)


def put_byte(path: Path, offset: int, value: int) -> None:
    with path.open("r+b") as f:
        f.seek(offset)
        f.write(bytes([value]))


@pytest.mark.parametrize("asked", ["compat32,graphics", "all"])
@pytest.mark.parametrize("directory", [LIBDIR32, "usr/lib32", "usr/lib"])
def test_32_bit_libraries_are_found_by_the_cache(
    node: HookNode, runc: Runtime, asked: str, directory: str
) -> None:
    bundle = node.bundle(
        f"ldconfig -p; ls /{directory}/tidegate; probe libGLX_nvidia.so.0",
        annotations=asking(asked),
    )
    put_libc32(bundle, directory)
    ran = runc.run(bundle)
    assert ran.status == 0, ran.stderr
    lines = ran.stdout.splitlines()
    assert f"\tlibGLX_nvidia.so.0 (libc6) => /{directory}/tidegate/libGLX_nvidia.so.0" in lines
    assert f"\tlibGLX_nvidia.so.0 (libc6,x86-64) => /{TARGET}/libGLX_nvidia.so.0" in lines
    assert f" => /{directory}/libc.so.6\n" in ran.stdout
    assert f"libGLX_nvidia.so.{VERSION}" in lines
    assert lines[-1].endswith(f"/{TARGET}/libGLX_nvidia.so.0 tidegate's libGLX_nvidia")
    assert "libcuda.so.1 (libc6)" not in ran.stdout  # the quota would not apply to it


def test_the_set_also_determines_the_32_bit_libraries(node: HookNode, runc: Runtime) -> None:
    bundle = node.bundle(f"ls /{TARGET32}", annotations=asking("compat32,compute"))
    put_libc32(bundle)
    assert runc.run(bundle).stdout == (
        "libnvidia-ptxjitcompiler.so\nlibnvidia-ptxjitcompiler.so.1\n"
        f"libnvidia-ptxjitcompiler.so.{VERSION}\n"
    )


@pytest.mark.parametrize(
    ("lack", "message"),
    [
        ("libc", "the image has no 32-bit glibc"),
        ("64-bit libc", "the image has no 32-bit glibc"),
        ("ELF class", "the image has no 32-bit glibc"),
        ("i386", "the image has no 32-bit glibc"),
        ("cache", "the image has no ld.so.cache"),
        ("room", f"/{TARGET32} in the image is not empty"),
    ],
)
def test_an_image_that_cannot_take_32_bit_libraries_gets_none(
    node: HookNode, runc: Runtime, lack: str, message: str
) -> None:
    """If they are requested by name, the start fails; if they are requested by `all`, they are left
    out.
    """
    bundles = [
        node.bundle("echo started", annotations=asking(asked), name=asked)
        for asked in ("all", "compat32")
    ]
    for bundle in bundles:
        put_libc32(bundle)
        match lack:
            case "libc":
                (bundle.rootfs / LIBDIR32 / "libc.so.6").unlink()
            case "64-bit libc":
                shutil.copy(
                    bundle.rootfs / LIBDIR / "libc.so.6", bundle.rootfs / LIBDIR32 / "libc.so.6"
                )
            case "ELF class":
                put_byte(bundle.rootfs / LIBDIR32 / "libc.so.6", 4, 2)  # ELFCLASS64
            case "i386":
                put_byte(bundle.rootfs / LIBDIR32 / "libc.so.6", 18, 40)  # EM_ARM
            case "cache":
                (bundle.rootfs / "etc/ld.so.cache").unlink()
            case "room":
                (bundle.rootfs / TARGET32).mkdir()
                (bundle.rootfs / TARGET32 / "x").touch()
    assert runc.run(bundles[0]).stdout == "started\n"
    assert node.events()[0]["skipped"][0].startswith(f"compat32: {message}")
    node.log.unlink()
    node.governor.confirmed.clear()
    refuse(node, bundles[1], 76, message)


def test_unreachable_32_bit_libraries_fail_the_start(node: HookNode) -> None:
    bundle = node.bundle("true", annotations=asking("compat32"))
    put_libc32(bundle)
    with HeldContainer(bundle) as held:
        etc = bundle.rootfs / "etc"
        subprocess.run(
            ["nsenter", "-m", "-t", str(held.process.pid), "mount", "--bind", str(etc), str(etc)],
            check=True,
        )
        before = held.all_mounts()
        done = held.hook(node.hook)
        assert held.all_mounts() == before
    assert done.returncode == 76
    assert "does not lead to the driver's 32-bit libraries and cannot be replaced" in done.stderr


def test_32_bit_libraries_that_the_driver_lacks_are_refused(node: HookNode) -> None:
    generation = node.own_mirror()
    manifest = json.loads((generation / "manifest.json").read_text())
    for entry in manifest["sets"]:
        del entry["lib32"], entry["names32"]
    (generation / "manifest.json").write_text(json.dumps(manifest))
    bundle = node.bundle("true", annotations=asking("compat32"))
    refuse(node, bundle, 69, f"this node's driver {VERSION} has no 32-bit libraries")


def test_a_kernel_module_of_another_version_is_refused(node: HookNode) -> None:
    (node.base / "module-version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.1.2  Release Build\n"
    )
    refuse(
        node,
        node.bundle("true"),
        72,
        f"is for driver {VERSION}, but the kernel module is 570.1.2; ",
    )


@pytest.mark.parametrize("module", [True, False])
def test_a_package_upgrade_prevents_no_start_while_the_module_is_unchanged(
    node: HookNode, *, module: bool
) -> None:
    generation = node.own_mirror()
    manifest = json.loads((generation / "manifest.json").read_text())
    changed = [w for w in manifest["source"]["watch"] if w["role"] == "driver"]
    for file in changed:
        file["mtime_ns"] += 1
    (generation / "manifest.json").write_text(json.dumps(manifest))
    if not module:
        refuse(node, node.bundle("true"), 72, f"is stale: {changed[0]['path']} has changed")
        return
    (node.base / "module-version").write_text(
        f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {VERSION}  Mon Jun  9 17:42:14 UTC 2025\n"
    )
    with HeldContainer(node.bundle("true")) as held:
        done = held.hook(node.hook)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_generation_is_kept_while_a_hook_uses_it(node: HookNode) -> None:
    """`tidegate gc` asks for an exclusive lock, and gets it only when the hook has ended."""
    generation = node.own_mirror()
    node.governor.mode = "silent"
    node.timeout = 4.0
    collector = os.open(generation, os.O_RDONLY | os.O_DIRECTORY)
    with HeldContainer(node.bundle("true")) as held:
        hook = subprocess.Popen(
            [*node.hook, "createRuntime"], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert hook.stdin is not None
        hook.stdin.write(held.state())
        hook.stdin.close()
        wait_for(lambda: node.governor.requests)
        with pytest.raises(BlockingIOError):
            fcntl.flock(collector, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert hook.wait() == 75
    fcntl.flock(collector, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(collector)


def test_a_generation_replaced_by_name_is_not_mixed_with_the_old_one(
    node: HookNode, runc: Runtime
) -> None:
    """`tidegate refresh --repair` replaces a generation after a hook has read its manifest.

    The hook asks the governor after it has read the manifest and before it mounts, so the test
    replaces the generation then.
    """
    generation = node.own_mirror()
    other = node.base / "other"
    shutil.copytree(generation, other, symlinks=True)
    (other / "bin/nvidia-smi").write_text("#!/bin/sh\necho another smi\n")
    library = other / "lib64/libcuda.so.1"
    library.unlink()
    make_library(library, "libcuda.so.1", "another libcuda")
    (other / "data/vulkan-icd/nvidia_icd.json").write_text("another file\n")
    aside = generation.with_name(f"{generation.name}.damaged")

    def exchange() -> None:
        generation.rename(aside)
        other.rename(generation)

    node.governor.before_admit = exchange
    command = "nvidia-smi; cat /etc/vulkan/icd.d/*; probe libcuda.so.1"
    ran = runc.run(node.bundle(command, annotations=asking("graphics")))
    assert (ran.status, ran.stderr) == (0, "")
    assert ran.stdout == (
        "tidegate test smi\nthe driver's nvidia_icd.json\n"
        f"libcuda.so.1: /{TARGET}/libcuda.so.1 tidegate's libcuda\n"
    )
    assert aside.exists()


def waiters() -> list[list[str]]:
    """Return the waiters for locks of whole files from /proc/locks: number, "->", type, mode,
    access, process.
    """
    lines = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    return [words for words in lines if words[1:3] == ["->", "FLOCK"]]


def test_a_hook_that_starts_during_a_removal_takes_the_next_generation(node: HookNode) -> None:
    """The collector holds the lock, switches and removes the old generation; the hook waits and starts over."""
    old = node.own_mirror()
    new = old.with_name(f"{VERSION}-abababababab")
    shutil.copytree(old, new, symlinks=True)
    manifest = json.loads((new / "manifest.json").read_text())
    (new / "manifest.json").write_text(json.dumps({**manifest, "generation": new.name}))
    collector = os.open(old, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(collector, fcntl.LOCK_EX)
    with HeldContainer(node.bundle("true")) as held:
        hook = subprocess.Popen(
            [*node.hook, "createRuntime"], stdin=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert hook.stdin is not None
        hook.stdin.write(held.state())
        hook.stdin.close()
        children = Path(f"/proc/{hook.pid}/task/{hook.pid}/children")
        wait_for(lambda: set(children.read_text().split()) & {words[5] for words in waiters()})
        (node.driver_dir / "next").symlink_to(new.name)
        (node.driver_dir / "next").rename(node.driver_dir / "current")
        old.rename(node.driver_dir / "trash")
        os.close(collector)
        assert hook.wait() == 0
        assert hook.stderr is not None
        assert hook.stderr.read() == b""
        hook.stderr.close()
    assert node.events()[0]["generation"] == new.name


def test_mounts_of_the_host_below_a_directory_are_not_passed_on(node: HookNode) -> None:
    """The container did not ask for such a mount, and the mount would be writable if it is writable
    on the host.
    """
    generation = node.own_mirror()
    path = node.base / "sockets"
    (path / "below").mkdir(parents=True)
    manifest = json.loads((generation / "manifest.json").read_text())
    manifest["binds"] = [{"path": str(path), "capability": "utility"}]
    (generation / "manifest.json").write_text(json.dumps(manifest))
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(path / "below")], check=True)
    try:
        with HeldContainer(node.bundle("true")) as held:
            assert held.hook(node.hook).returncode == 0
            assert [m for m in held.mounts() if "sockets" in m] == [str(path)]
    finally:
        subprocess.run(["umount", str(path / "below")], check=True)


def test_a_volume_in_place_of_a_directory_of_the_host_stays(
    node: HookNode, runtime: Runtime
) -> None:
    """The mount in the configuration takes precedence over the driver's directory."""
    sockets = node.made / "host-sockets"
    bundle = node.bundle(f"ls -A {sockets}", annotations=asking("graphics"))
    volume = node.base / "volume"
    volume.mkdir()
    (volume / "own").touch()
    bundle.config["mounts"].append(
        {
            "destination": str(sockets),
            "type": "bind",
            "source": str(volume),
            "options": ["rbind", "rprivate"],
        }
    )
    ran = runtime.run(bundle)
    assert (ran.status, ran.stdout) == (0, "own\n"), ran.stderr
    assert f"{sockets}: it is on a volume" in node.events()[0]["skipped"]
