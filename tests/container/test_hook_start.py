"""A container starts with its share of a GPU: the hook under real runtimes."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from oci_hook import cleanup
from oci_hook.cleanup import HookTrace
from tests.container.bundles import (
    GPU,
    LIBDIR,
    ROOT,
    TARGET,
    VERSION,
    Runtime,
    add_user_namespace,
    compile_c,
    make_library,
)
from tests.container.conftest import HookNode
from tests.container.held import HeldContainer

PROBE = "probe libcuda.so.1 libnvidia-ml.so.1 libcuda.so libnvidia-ptxjitcompiler.so.1"
FOUND = f"""\
libcuda.so.1: /{TARGET}/libcuda.so.1 tidegate's libcuda
libnvidia-ml.so.1: /{TARGET}/libnvidia-ml.so.1 tidegate's libnvidia-ml
libcuda.so: /{TARGET}/libcuda.so.1 tidegate's libcuda
libnvidia-ptxjitcompiler.so.1: /{TARGET}/libnvidia-ptxjitcompiler.so.1 tidegate's libnvidia-ptxjitcompiler
"""
# Without a cache, the loader searches its default directories: /lib/<triplet> before
# /usr/lib/<triplet>
SEARCHED = FOUND.replace(" /usr/lib/", " /lib/")


def host_mounts(own: Path) -> list[str]:
    """Return the host's mounts, without their ids, which change.

    At the same time, other tests mount in their own directories, and the roots of releases are made
    in build/. In the temporary directory and in build/, only mounts below `own` are returned. The
    nodes of benchmarks have directories in /run, one for each process.
    """
    lines = [
        line.split(" ", 4)[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()
    ]
    others = (f"{tempfile.gettempdir()}/", f"{ROOT}/build/", "/run/tidegate-")
    own_paths = (f"{own}/", f"/run/tidegate-{os.getpid()}/")
    return [line for line in lines if line.startswith(own_paths) or not line.startswith(others)]


@pytest.mark.parametrize("stage", ["prestart", "createRuntime"])
def test_a_container_finds_the_mirror_and_its_grant(
    node: HookNode, runtime: Runtime, stage: str
) -> None:
    """The container finds libraries by dlopen and by ldconfig -p, the program, and the grant; the
    governor is told of start and end.
    """
    before = host_mounts(node.base)
    command = (
        f"{PROBE}; nvidia-smi; ls -A /run/tidegate; stat -c %s /run/tidegate/grant; ldconfig -p"
    )
    bundle = node.bundle(command, stage=stage)
    ran = runtime.run(bundle)
    assert (ran.status, ran.stderr) == (0, "")
    libraries, _, rest = ran.stdout.partition("tidegate test smi\n")
    assert libraries == FOUND
    assert rest.startswith("grant\n4096\n")
    assert f"\tlibcuda.so.1 (libc6,x86-64) => /{TARGET}/libcuda.so.1\n" in rest
    assert f"\tlibcuda.so (libc6,x86-64) => /{TARGET}/libcuda.so\n" in rest
    assert "\tlibc.so.6 (libc6,x86-64" in rest

    node.governor.wait_idle()
    admit, confirm, release = node.governor.requests
    assert (admit["v"], admit["op"], admit["fds"]) == (1, "admit", 1)
    assert admit["annotations"] == {"tidegate.gpu/memory": "8Gi", "tidegate.gpu/compute": "50"}
    assert admit["bundle"] == str(bundle.path)
    assert confirm["op"] == "confirm"
    assert (release["op"], release["id"]) == ("release", admit["id"])
    assert host_mounts(node.base) == before

    start, stop = node.events()
    assert (start["event"], start["stage"], start["outcome"]) == ("hook-done", stage, "prepared")
    assert (start["id"], start["devices"], start["operations"]) == (admit["id"], [GPU], 4)
    assert set(start["ms"]) == {
        "state",
        "import",
        "request",
        "manifest",
        "image",
        "admit",
        "plan",
        "apply",
        "confirm",
    }
    assert (stop["stage"], stop["outcome"]) == ("poststop", "released")


def test_the_mounts_are_read_only_and_private(node: HookNode, runc: Runtime) -> None:
    """Root in the container cannot write through any of the mounts, and they belong to the container alone."""
    command = (
        f"for f in /{TARGET}/x /run/tidegate/x /usr/bin/nvidia-smi; do touch $f 2>/dev/null && echo wrote $f; done;"
        "cat /proc/self/mountinfo"
    )
    ran = runc.run(node.bundle(command))
    assert "wrote" not in ran.stdout
    mounts = {}
    for line in ran.stdout.splitlines():
        words = line.split()
        mounts[words[4]] = (words[5], words[6])
    # Flags such as relatime are the host's.
    for target, flags in {
        f"/{TARGET}": {"ro", "nosuid", "nodev"},
        "/usr/bin/nvidia-smi": {"ro", "nosuid", "nodev"},
        "/run/tidegate": {"ro", "nosuid", "nodev", "noexec"},
    }.items():
        options, propagation = mounts[target]
        assert flags <= set(options.split(",")), target
        assert propagation == "-", target


def test_a_read_only_root_is_served(node: HookNode, runtime: Runtime) -> None:
    bundle = node.bundle(f"{PROBE}; touch /x 2>/dev/null || echo read-only")
    bundle.config["root"]["readonly"] = True
    ran = runtime.run(bundle)
    assert ran.status == 0, ran.stderr
    assert ran.stdout == FOUND + "read-only\n"


def test_a_user_namespace_is_served(node: HookNode, runtime: Runtime) -> None:
    """What the hook leaves in the image belongs to the container's root, not to the host's."""
    bundle = node.bundle(
        f"{PROBE}; stat -c '%u %n' /{LIBDIR}/glibc-hwcaps /etc/ld.so.cache; stat -c %s /run/tidegate/grant"
    )
    add_user_namespace(bundle)
    for directory in [bundle.path, *bundle.path.parents][:-2]:
        directory.chmod(directory.stat().st_mode | 0o011)
    ran = runtime.run(bundle)
    assert ran.status == 0, ran.stderr
    assert ran.stdout == f"{FOUND}0 /{LIBDIR}/glibc-hwcaps\n0 /etc/ld.so.cache\n4096\n"


def test_a_user_namespace_is_served_from_directories_that_only_root_can_read(
    node: HookNode, runtime: Runtime
) -> None:
    """The driver's directory has mode 0700: only the hook can reach what it mounts."""
    node.own_mirror()
    node.driver_dir.chmod(0o700)
    bundle = node.bundle(
        f"{PROBE}; nvidia-smi; cat /etc/vulkan/icd.d/*",
        annotations={"tidegate.gpu/memory": "8Gi", "tidegate.gpu/capabilities": "graphics"},
    )
    add_user_namespace(bundle)
    for directory in [bundle.path, *bundle.path.parents][:-2]:
        directory.chmod(directory.stat().st_mode | 0o011)
    ran = runtime.run(bundle)
    assert (ran.status, ran.stderr) == (0, "")
    assert ran.stdout == f"{FOUND}tidegate test smi\nthe driver's nvidia_icd.json\n"


def test_a_cache_that_leads_elsewhere_is_corrected(node: HookNode, runtime: Runtime) -> None:
    """The image has its own libcuda and a cache that maps it: ours is found, and the other entries stay."""
    bundle = node.bundle("probe libcuda.so.1 libother.so.1; ldconfig -p")
    make_library(bundle.rootfs / "opt/cuda/libcuda.so.1", "libcuda.so.1", "the image's libcuda")
    make_library(bundle.rootfs / "opt/cuda/libother.so.1", "libother.so.1", "the image's other")
    (bundle.rootfs / "etc/ld.so.conf").write_text("/opt/cuda\n")
    subprocess.run(["ldconfig", "-r", str(bundle.rootfs), "-X"], check=True)
    ran = runtime.run(bundle)
    assert ran.status == 0, ran.stderr
    assert ran.stdout.startswith(
        f"libcuda.so.1: /{TARGET}/libcuda.so.1 tidegate's libcuda\n"
        "libother.so.1: /opt/cuda/libother.so.1 the image's other\n"
    )
    assert "=> /opt/cuda/libcuda.so.1" not in ran.stdout
    assert "=> /opt/cuda/libother.so.1" in ran.stdout


@pytest.mark.parametrize("cache", ["missing", "directory", "dangling"])
def test_an_image_without_a_cache_is_served(node: HookNode, runc: Runtime, cache: str) -> None:
    """The loader searches the directory even without a cache."""
    bundle = node.bundle(PROBE)
    path = bundle.rootfs / "etc/ld.so.cache"
    path.unlink()
    if cache == "directory":
        path.mkdir()
    elif cache == "dangling":
        path.symlink_to("/nowhere")
    ran = runc.run(bundle)
    assert (ran.status, ran.stdout) == (0, SEARCHED), ran.stderr


def test_a_start_after_an_end_that_was_not_reported(node: HookNode, runtime: Runtime) -> None:
    """After a loss of power no end was reported: the hook finds what is left over, and nothing accumulates."""
    bundle = node.bundle(PROBE)
    del bundle.config["hooks"]["poststop"]
    assert runtime.run(bundle).stdout == FOUND
    shutil.rmtree(node.base / "run/traces")
    first = tree(bundle.rootfs)
    for _ in range(2):
        ran = runtime.run(bundle)
        assert (ran.status, ran.stdout) == (0, FOUND), ran.stderr
        assert tree(bundle.rootfs) == first
    assert node.events()[-1]["operations"] == 3  # the cache already has the entries


def tree(root: Path) -> dict[str, tuple[int, int, int]]:
    """Return every entry below a directory with its mode, size and owner."""
    found = {}
    for directory, names, files in os.walk(root):
        for name in [*names, *files]:
            path = Path(directory) / name
            stat = path.lstat()
            found[str(path.relative_to(root))] = (
                stat.st_mode,
                0 if path.is_dir() else stat.st_size,
                stat.st_uid,
            )
    return found


def everything(path: Path) -> tuple[object, ...]:
    """Return all that identifies a file, except its inode number and ctime."""
    s = path.lstat()
    content = path.readlink() if path.is_symlink() else path.read_bytes()
    attributes = {n: os.getxattr(path, n, follow_symlinks=False) for n in os.listxattr(path)}
    return s.st_mode, s.st_uid, s.st_gid, s.st_nlink, s.st_mtime_ns, content, attributes


def test_a_running_container_adds_little_to_its_image(node: HookNode, runc: Runtime) -> None:
    """It adds one chain of directories, one placeholder per program, and the cache, but no empty
    file for each library.
    """
    bundle = node.bundle("true")
    del bundle.config["hooks"]["poststop"]
    before = tree(bundle.rootfs)
    assert runc.run(bundle).status == 0
    after = tree(bundle.rootfs)
    assert set(after) - set(before) == {
        f"{LIBDIR}/glibc-hwcaps",
        TARGET,
        "run/tidegate",
        "usr/bin/nvidia-smi",
    }
    assert {name for name in before if before[name] != after[name]} == {"etc/ld.so.cache"}


@pytest.mark.parametrize("cache", ["file", "link", "hostile"])
def test_nothing_stays_in_the_image(node: HookNode, runtime: Runtime, cache: str) -> None:
    """The end removes what the start created, including the places for graphics. The image's cache is
    restored, with its original time.
    """
    bundle = node.bundle(
        f"{PROBE}; nvidia-smi",
        annotations={"tidegate.gpu/memory": "8Gi", "tidegate.gpu/capabilities": "all"},
    )
    path = bundle.rootfs / "etc/ld.so.cache"
    os.utime(path, ns=(1, 1))
    path.chmod(0o640)
    if cache == "link":
        path.rename(bundle.rootfs / "etc/other")
        path.symlink_to("other")
    if cache == "hostile":
        bundle.config["process"]["args"][2] += "; touch /etc/more"
    before, kept = tree(bundle.rootfs), everything(path)
    ran = runtime.run(bundle)
    assert (ran.status, ran.stdout) == (0, FOUND + "tidegate test smi\n"), ran.stderr
    added = {"etc/more"} if cache == "hostile" else set()
    after = tree(bundle.rootfs)
    assert set(after) - set(before) == added
    assert set(before) - set(after) == set()
    assert everything(path) == kept
    assert list((node.base / "run/traces").iterdir()) == []


def test_files_that_the_container_creates_in_our_directories_stay(
    node: HookNode, runc: Runtime
) -> None:
    """Only empty files and directories are removed. A cache that ldconfig wrote in the container
    loses only our entries.
    """
    bundle = node.bundle("echo /opt/own >/etc/ld.so.conf; ldconfig; true")
    make_library(bundle.rootfs / "opt/own/libown.so.1", "libown.so.1", "the image's")
    assert runc.run(bundle).status == 0
    assert not (bundle.rootfs / TARGET).exists()
    listed = subprocess.run(
        ["ldconfig", "-p", "-C", str(bundle.rootfs / "etc/ld.so.cache")],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "libc.so.6 (libc6,x86-64" in listed
    assert "/opt/own/libown.so.1" in listed
    assert "libcuda" not in listed


def test_links_left_by_a_container_do_not_lead_out_of_its_root(
    node: HookNode, runtime: Runtime
) -> None:
    """The container controls its root file system until its end: the cleanup changes nothing outside it."""
    victim = node.base / "victim"
    (victim / "tidegate").mkdir(parents=True)
    (victim / "nvidia-smi").touch()
    (victim / "ld.so.cache").write_bytes(b"the host's")
    before = tree(victim)
    bundle = node.bundle(
        "true", annotations={"tidegate.gpu/memory": "8Gi", "tidegate.gpu/capabilities": "utility"}
    )
    # What a container could have done while it ran; here it is done between the container's end and
    # our hook.
    swap = compile_c(
        f"""
#include <stdio.h>
#include <unistd.h>
int main(void) {{
        const char *places[] = {{"run", "usr/bin", "etc"}};
        char from[4096], to[4096];
        for (int i = 0; i < 3; i++) {{
                snprintf(from, sizeof from, "{bundle.rootfs}/%s", places[i]);
                snprintf(to, sizeof to, "{bundle.rootfs}/%s-was", places[i]);
                if (rename(from, to) || symlink("{victim}", from))
                        return 1;
        }}
        return 0;
}}
""",
        node.base / "swap",
    )
    stop = bundle.config["hooks"]["poststop"]
    bundle.config["hooks"]["poststop"] = [{"path": str(swap), "env": ["A=b"]}, *stop]
    ran = runtime.run(bundle)
    assert ran.status == 0, ran.stderr
    assert (bundle.rootfs / "run").is_symlink()
    assert tree(victim) == before
    assert (victim / "ld.so.cache").read_bytes() == b"the host's"


@pytest.mark.parametrize("stage", ["prestart", "createRuntime"])
def test_a_container_without_annotations_is_left_alone(
    node: HookNode, runtime: Runtime, stage: str
) -> None:
    """Without a GPU request, the hook needs no mirror and sends the governor nothing."""
    bundle = node.bundle(
        "ls -A /run; probe libcuda.so.1", stage=stage, annotations={"org.example/note": "hello"}
    )
    node.driver_dir.unlink()
    before = tree(bundle.rootfs)
    ran = runtime.run(bundle)
    assert ran.status == 0, ran.stderr
    assert (
        ran.stdout
        == "libcuda.so.1: libcuda.so.1: cannot open shared object file: No such file or directory\n"
    )
    assert tree(bundle.rootfs) == before
    assert (node.governor.requests, node.events()) == ([], [])


def test_a_loader_from_before_glibc_hwcaps_gets_tls(node: HookNode, runc: Runtime) -> None:
    """The old loader is a copy of this host's loader in which the name that it must not know is blanked out."""
    bundle = node.bundle(f"ls /{LIBDIR}/tls")
    loader = bundle.rootfs / "usr/lib64/ld-linux-x86-64.so.2"
    loader.write_bytes(loader.read_bytes().replace(b"glibc-hwcaps", b"glibc-xxcaps"))
    ran = runc.run(bundle)
    assert ran.status == 0, ran.stderr
    assert "libcuda.so.1\n" in ran.stdout


def test_a_red_hat_layout_is_served(node: HookNode, runtime: Runtime) -> None:
    """Libraries are in /usr/lib64, with a loader that searches there: the hook takes the directory
    from the image.
    """
    bundle = node.bundle(
        "ls /usr/lib64/glibc-hwcaps/x86-64-v2; LD_LIBRARY_PATH=/usr/lib64 probe libcuda.so.1"
    )
    for library in (bundle.rootfs / LIBDIR).iterdir():
        library.rename(bundle.rootfs / "usr/lib64" / library.name)
    (bundle.rootfs / LIBDIR).rmdir()
    (bundle.rootfs / "etc/ld.so.conf").write_text("/usr/lib64\n")
    subprocess.run(["ldconfig", "-r", str(bundle.rootfs), "-X"], check=True)
    ran = runtime.run(bundle)
    assert ran.status == 0, ran.stderr
    assert ran.stdout.endswith(
        "libcuda.so.1: /usr/lib64/glibc-hwcaps/x86-64-v2/libcuda.so.1 tidegate's libcuda\n"
    )


def test_a_program_of_the_image_is_hidden_and_not_changed(node: HookNode, runc: Runtime) -> None:
    bundle = node.bundle("nvidia-smi")
    own = bundle.rootfs / "usr/bin/nvidia-smi"
    own.write_text("#!/bin/sh\necho the image's\n")
    own.chmod(0o755)
    assert runc.run(bundle).stdout == "tidegate test smi\n"
    assert own.read_text() == "#!/bin/sh\necho the image's\n"


def test_the_grant_is_found_in_a_volume_over_run(node: HookNode, runc: Runtime) -> None:
    """A tmpfs on /run is the common case. A volume is accepted as well, because config.json mounts it there."""
    volume = node.base / "volume"
    volume.mkdir()
    for mount in (
        {"destination": "/run", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid"]},
        {
            "destination": "/run",
            "type": "bind",
            "source": str(volume),
            "options": ["rbind", "rprivate"],
        },
    ):
        bundle = node.bundle("stat -c %s /run/tidegate/grant", name=f"bundle-{mount['type']}")
        bundle.config["mounts"].append(mount)
        ran = runc.run(bundle)
        assert (ran.status, ran.stdout) == (0, "4096\n"), ran.stderr
    assert [p.name for p in volume.iterdir()] == ["tidegate"]


def test_ldconfig_in_the_container_still_works(node: HookNode, runtime: Runtime) -> None:
    """apt-get install runs ldconfig, which replaces our cache by a new one, and finds the mirror itself."""
    ran = runtime.run(node.bundle(f"ldconfig || echo failed; {PROBE}; ldconfig -p"))
    assert ran.status == 0, ran.stderr
    assert "failed" not in ran.stdout
    assert "tidegate's libcuda\n" in ran.stdout
    # ldconfig names the last link of a soname, which leads to the same library.
    (listed,) = [line for line in ran.stdout.splitlines() if line.startswith("\tlibcuda.so.1 ")]
    assert listed.endswith(f"/glibc-hwcaps/x86-64-v2/libcuda.so.{VERSION}")


def test_leftovers_of_a_killed_run_are_removed(node: HookNode, runc: Runtime) -> None:
    bundle = node.bundle(PROBE)
    for name in (".ld.so.cache.tidegate", ".ld.so.cache.tidegate-aside"):
        (bundle.rootfs / "etc" / name).write_bytes(b"half a cache")
    assert runc.run(bundle).stdout == FOUND
    assert [p.name for p in (bundle.rootfs / "etc").iterdir()] == ["ld.so.cache"]


IDMAP_C = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/mount.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <unistd.h>
/* idmap NAMESPACE ROOT: mount ROOT on itself, with its owners seen through a user namespace. */
int main(int argc, char **argv) {
        int userns = open(argv[1], O_RDONLY);
        int tree = syscall(SYS_open_tree, AT_FDCWD, argv[2], 1);
        struct mount_attr attr = {.attr_set = MOUNT_ATTR_IDMAP, .userns_fd = userns};
        if (syscall(SYS_mount_setattr, tree, "", AT_EMPTY_PATH, &attr, sizeof attr) < 0)
                return perror("mount_setattr"), 1;
        if (syscall(SYS_move_mount, tree, "", AT_FDCWD, argv[2], MOVE_MOUNT_F_EMPTY_PATH) < 0)
                return perror("move_mount"), 1;
        return 0;
}
"""


def test_an_idmapped_root_is_served(node: HookNode, tmp_path: Path) -> None:
    """The host's root user is not mapped on such a mount: what the hook creates belongs to the owner of its directory."""
    idmap = compile_c(IDMAP_C, tmp_path / "idmap")
    bundle = node.bundle("true")
    with subprocess.Popen(["unshare", "-U", "sleep", "30"]) as user:
        namespace = Path(f"/proc/{user.pid}")
        while (namespace / "ns/user").readlink() == Path("/proc/self/ns/user").readlink():
            time.sleep(0.01)
        for name in ("uid_map", "gid_map"):
            (namespace / name).write_text("0 100000 65536\n")
        with HeldContainer(bundle, mount=f'{idmap} {namespace}/ns/user "$1"') as held:
            done = held.hook(node.hook)
            assert (done.returncode, done.stderr) == (0, "")
            assert held.mounts() == ["", "/run/tidegate", "/usr/bin/nvidia-smi", f"/{TARGET}"]
        user.kill()
    for made in (
        f"{LIBDIR}/glibc-hwcaps",
        TARGET,
        "run/tidegate",
        "usr/bin/nvidia-smi",
        "etc/ld.so.cache",
    ):
        assert (bundle.rootfs / made).stat().st_uid == 0, (
            made
        )  # on disk, as if the container's root had made it


IDMAPPED_END = """
import os, subprocess, sys
idmap, namespace, root, run, tree = sys.argv[1:]
sys.path.insert(0, tree)
from oci_hook.cleanup import HookTrace, keep, remember, take_back
path = "etc/ld.so.cache"
below = os.open(root, os.O_PATH | os.O_DIRECTORY)
subprocess.run([idmap, namespace, root], check=True)
kept = keep(os.open(root, os.O_PATH | os.O_DIRECTORY), path, b"the image's")
os.unlink(path, dir_fd=below)
os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600, dir_fd=below))
ours = os.stat(path, dir_fd=below)
kept["ours"] = [ours.st_size, ours.st_mtime_ns]
remember(run, "c1", 1 << 30, root, [HookTrace("cache", path, kept)])
take_back(run, "c1")
"""


@pytest.mark.parametrize("cache", ["file", "link"])
def test_cleanup_restores_a_cache_on_an_idmapped_root(tmp_path: Path, cache: str) -> None:
    idmap = compile_c(IDMAP_C, tmp_path / "idmap")
    path = tmp_path / "rootfs/etc/ld.so.cache"
    path.parent.mkdir(parents=True)
    path.write_text("the image's")
    if cache == "link":
        path.rename(path.parent / "other")
        path.symlink_to("other")
    before = everything(path)
    with subprocess.Popen(["unshare", "-U", "sleep", "30"]) as user:
        namespace = Path(f"/proc/{user.pid}")
        while (namespace / "ns/user").readlink() == Path("/proc/self/ns/user").readlink():
            time.sleep(0.01)
        for name in ("uid_map", "gid_map"):
            (namespace / name).write_text("0 100000 65536\n")
        command = [
            "unshare",
            "-m",
            "python3",
            "-c",
            IDMAPPED_END,
            str(idmap),
            f"{namespace}/ns/user",
        ]
        tree_of_code = Path(__file__).parent.parent.parent
        arguments = [str(tmp_path / "rootfs"), str(tmp_path), str(tree_of_code)]
        subprocess.run([*command, *arguments], check=True, timeout=30)
        user.kill()
    assert everything(path) == before
    assert sorted(p.name for p in path.parent.iterdir()) == sorted(
        {path.name, *(["other"] if cache == "link" else [])}
    )


def test_an_optional_driver_starts_a_musl_image_without_it(node: HookNode, runc: Runtime) -> None:
    bundle = node.bundle(
        "/bin/true-static",
        annotations={"tidegate.gpu/memory": "1Gi", "tidegate.gpu/driver": "optional"},
    )
    shutil.rmtree(bundle.rootfs / "usr")
    for name in ("bin", "sbin", "lib", "lib64"):
        (bundle.rootfs / name).unlink()
    (bundle.rootfs / "bin").mkdir()
    (bundle.rootfs / "lib").mkdir()
    (bundle.rootfs / "lib/ld-musl-x86_64.so.1").write_bytes(b"\x7fELF musl")
    source = "int main(void) { return 42; }"
    subprocess.run(
        ["gcc", "-static", "-o", str(bundle.rootfs / "bin/true-static"), "-x", "c", "-"],
        input=source.encode(),
        check=True,
    )
    bundle.config["process"]["args"] = ["/bin/true-static"]
    ran = runc.run(bundle)
    assert ran.status == 42, ran.stderr
    assert node.governor.admitted == {}
    assert node.events()[0]["outcome"] == "without-gpu"
    assert "musl" in node.events()[0]["message"]


def test_versioned_names_are_found_too(node: HookNode, runc: Runtime) -> None:
    ran = runc.run(node.bundle(f"probe libcuda.so.{VERSION}"))
    assert ran.stdout.endswith(f"/glibc-hwcaps/x86-64-v2/libcuda.so.{VERSION} tidegate's libcuda\n")


def test_a_volume_over_a_directory_leaves_the_images_directory(
    node: HookNode, runtime: Runtime
) -> None:
    """A directory in a volume is not the image's directory of that name, so the latter is not removed at the end."""
    bundle = node.bundle("stat -c %s /run/tidegate/grant")
    (bundle.rootfs / "run/tidegate").mkdir()
    bundle.config["mounts"].append({"destination": "/run", "type": "tmpfs", "source": "tmpfs"})
    ran = runtime.run(bundle)
    assert (ran.status, ran.stdout) == (0, "4096\n"), ran.stderr
    assert (bundle.rootfs / "run/tidegate").is_dir()


def test_a_cache_that_is_a_link_to_the_host_changes_nothing_there(
    node: HookNode, runtime: Runtime
) -> None:
    """The link's target exists in the image and on the host. The link is restored with its owner and time."""
    victim = node.base / "victim"
    victim.write_bytes(b"the host's")
    before = everything(victim)
    bundle = node.bundle(PROBE)
    path, inside = bundle.rootfs / "etc/ld.so.cache", bundle.rootfs / str(victim).lstrip("/")
    inside.parent.mkdir(parents=True)
    path.rename(inside)
    path.symlink_to(victim)
    os.utime(path, ns=(1, 1), follow_symlinks=False)
    os.lchown(path, 1234, 1234)
    kept = everything(path)
    ran = runtime.run(bundle)
    assert (ran.status, ran.stdout) == (0, FOUND), ran.stderr
    assert everything(path) == kept
    assert everything(victim) == before


def test_nothing_is_removed_from_another_mount(node: HookNode) -> None:
    """A mount below a root on the host does not belong to the container."""
    root, run = node.base / "rootfs", node.base / "run"
    for directory in ("volume", "etc"):
        (root / directory).mkdir(parents=True)
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(root / directory)], check=True)
    try:
        (root / "volume/tidegate").mkdir()
        (root / "volume/smi").touch()
        (root / "etc/ld.so.cache").write_bytes(b"of the volume")
        rootfd = os.open(root, os.O_PATH | os.O_DIRECTORY)
        with pytest.raises(OSError, match="Invalid cross-device link"):
            cleanup.keep(rootfd, "etc/ld.so.cache", b"of the volume")
        os.close(rootfd)
        made = [HookTrace("directory", "volume/tidegate"), HookTrace("file", "volume/smi")]
        cleanup.remember(str(run), "c1", 1 << 30, str(root), made)
        cleanup.take_back(str(run), "c1")
        assert {p.name for p in (root / "volume").iterdir()} == {"tidegate", "smi"}
    finally:
        for directory in ("volume", "etc"):
            subprocess.run(["umount", str(root / directory)], check=True)


def test_the_callers_umask_has_no_effect(node: HookNode) -> None:
    """The container's programs need not be root to find the driver."""
    bundle = node.bundle("true")
    with HeldContainer(bundle) as held:
        hook = ["sh", "-c", 'umask 077 && exec "$@"', "sh", *node.hook]
        assert held.hook(hook).returncode == 0
    for place in (f"{LIBDIR}/glibc-hwcaps", TARGET, "run/tidegate", "usr/bin/nvidia-smi"):
        assert (bundle.rootfs / place).stat().st_mode & 0o777 == 0o755, place
