"""The reasons for which the hook refuses a start: each has its exit status and one line, and
nothing is left behind.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from oci_hook.apply import CreatedContainer
from oci_hook.cleanup import HookTrace, remember, take_back
from oci_hook.errors import BundleError
from tests.container.bundles import LIBDIR, TARGET, DiskBundle, Runtime, compile_c, make_library
from tests.container.conftest import HookNode
from tests.container.held import HeldContainer
from tests.container.test_hook_start import everything, host_mounts, tree


def check_line(line: str) -> None:
    """Check that the hook prints one printable line: what is wrong, then what to do."""
    assert line.endswith("\n")
    assert line.count("\n") == 1
    assert line[:-1].isascii()
    assert line[:-1].isprintable()
    assert line.startswith("tidegate: ")
    assert "; " in line


def refuse(
    node: HookNode, bundle: DiskBundle, status: int, message: str, *, stdin: bytes | None = None
) -> None:
    """Require that the hook ends with this status and this message, and leaves everything as it
    was.
    """
    files = tree(bundle.rootfs)
    mounts = host_mounts(node.base)
    cache = (
        (bundle.rootfs / "etc/ld.so.cache").read_bytes()
        if (bundle.rootfs / "etc/ld.so.cache").is_file()
        else b""
    )
    with HeldContainer(bundle) as held:
        before = held.all_mounts()
        done = held.hook(node.hook, stdin=stdin)
        assert (done.returncode, done.stdout) == (status, ""), done.stderr
        check_line(done.stderr)
        assert message in done.stderr
        assert held.all_mounts() == before
    assert host_mounts(node.base) == mounts
    assert tree(bundle.rootfs) == files
    if cache:
        assert (bundle.rootfs / "etc/ld.so.cache").read_bytes() == cache
    node.governor.wait_idle()
    assert (node.governor.admitted, node.governor.confirmed) == ({}, set())
    (event,) = node.events()
    assert (event["outcome"], event["message"] in done.stderr) == ("failed", True)


@pytest.mark.parametrize("stdin", [b"", b"{", b"[1]", b'{"id": 7}', b"\x00\xff"])
def test_a_broken_state(node: HookNode, stdin: bytes) -> None:
    refuse(node, node.bundle("true"), 65, "OCI state", stdin=stdin)


def test_a_missing_config(node: HookNode) -> None:
    bundle = node.bundle("true")
    with HeldContainer(bundle) as held:
        (bundle.path / "config.json").unlink()
        done = held.hook(node.hook)
    assert done.returncode == 66
    check_line(done.stderr)
    assert "config.json: No such file or directory" in done.stderr


def test_an_unreadable_config(node: HookNode) -> None:
    bundle = node.bundle("true")
    with HeldContainer(bundle) as held:
        (bundle.path / "config.json").unlink()
        (bundle.path / "config.json").mkdir()
        done = held.hook(node.hook)
    assert done.returncode == 66
    check_line(done.stderr)


@pytest.mark.parametrize(
    "root",
    [{}, {"path": ""}, {"path": "/"}, {"path": "../../../../../.."}, {"path": "/proc/1/root"}],
)
def test_a_root_that_is_missing_or_the_hosts(node: HookNode, root: dict[str, str]) -> None:
    bundle = node.bundle("true")
    bundle.config["root"] = root
    refuse(node, bundle, 66, "root.path")


def test_a_missing_root(node: HookNode) -> None:
    bundle = node.bundle("true")
    bundle.config["root"] = {"path": "elsewhere"}
    refuse(node, bundle, 66, "elsewhere: No such file or directory")


@pytest.mark.parametrize(
    ("annotations", "message"),
    [
        ({"tidegate.gpu/memoryy": "8Gi"}, "did you mean tidegate.gpu/memory?"),
        ({"tidegate.gpu/compute": "101"}, "tidegate.gpu/compute is '101'"),
        ({"tidegate.gpu/compute": "50", "tidegate.gpu/compute-limit": "20"}, "compute-limit is 20"),
        ({"tidegate.gpu/strategy": "\n\x1b[2J\u202eevil"}, "is '\\n\\x1b[2J\\u202eevil'"),
        ({"tidegate.gpu/\n\x1b]0;x\x07": "1"}, "tidegate.gpu/\\n\\x1b]0;x\\x07 is unknown"),
        ({"tidegate.gpu/" + "k" * 5000: "1"}, "is unknown"),
        ({"tidegate.gpu/memory": "%s%n{0}$(touch /x)`id`"}, "'%s%n{0}$(touch /x)`id`'"),
    ],
)
def test_an_annotation_that_is_not_accepted(
    node: HookNode, annotations: dict[str, str], message: str
) -> None:
    refuse(node, node.bundle("true", annotations=annotations), 64, message)


def test_no_mirror(node: HookNode) -> None:
    node.driver_dir.unlink()
    node.driver_dir.mkdir()
    refuse(node, node.bundle("true"), 69, "run `tidegate refresh`")


def test_capabilities_without_a_set(node: HookNode) -> None:
    bundle = node.bundle("true", annotations={"tidegate.gpu/capabilities": "compute,video"})
    refuse(node, bundle, 69, "does not provide video, only compute,graphics,utility")


def test_a_stale_mirror_names_the_file(node: HookNode) -> None:
    generation = node.own_mirror()
    manifest = json.loads((generation / "manifest.json").read_text())
    manifest["source"]["watch"][0]["mtime_ns"] += 1
    (generation / "manifest.json").write_text(json.dumps(manifest))
    refuse(node, node.bundle("true"), 72, manifest["source"]["watch"][0]["path"])


def test_a_damaged_manifest(node: HookNode) -> None:
    (node.own_mirror() / "manifest.json").write_text("{")
    refuse(node, node.bundle("true"), 72, "is not a manifest")


@pytest.mark.parametrize("what", ["missing", "link", "fifo", "directory"])
def test_a_mirror_with_something_else_in_a_programs_place(node: HookNode, what: str) -> None:
    """R10: a source's type is checked on the descriptor that is mounted; earlier mounts are removed again."""
    program = node.own_mirror() / "bin" / "nvidia-smi"
    program.unlink()
    match what:
        case "link":
            program.symlink_to("/etc/shadow")
        case "fifo":
            os.mkfifo(program)
        case "directory":
            program.mkdir()
    refuse(node, node.bundle("true"), 72, "bin/nvidia-smi")


def test_no_governor(node: HookNode) -> None:
    node.timeout = 6.0  # the hook waits half as long, in case the governor restarts
    (node.base / "run/governor.sock").unlink()
    refuse(node, node.bundle("true"), 75, "governor.sock (connect: there is no socket)")


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("silent", "did not answer admit within 2 s"),
        ("close", "closed the connection during admit"),
        ("garbage", 'answered admit with ["what?"]'),
    ],
)
def test_a_governor_that_does_not_answer(node: HookNode, mode: str, message: str) -> None:
    node.governor.mode = mode
    node.timeout = 4.0  # for the whole hook; it waits half as long for an answer
    begin = time.monotonic()
    refuse(node, node.bundle("true"), 75, message)
    assert time.monotonic() - begin < 10


def test_the_governors_refusal_is_shown_unchanged(node: HookNode) -> None:
    node.governor.mode = "refuse"
    refuse(
        node,
        node.bundle("true"),
        77,
        "tidegate: GPU memory: 8Gi asked, 2Gi free on every GPU; ask for less",
    )


def test_a_refusal_does_not_affect_a_container_with_the_same_id(node: HookNode) -> None:
    """A container of another engine runs with that id: the record of what was made in its image
    must remain until it ends.
    """
    node.governor.mode = "refuse"
    bundle = node.bundle("true")
    made = [HookTrace("directory", "run")]
    with HeldContainer(bundle) as held:
        ident = f"held-{held.process.pid}"
        remember(str(node.base / "run"), ident, os.getpid(), str(bundle.rootfs), made)
        assert held.hook(node.hook).returncode == 77
    assert (node.base / "run/traces" / ident).exists()


def test_a_failed_confirmation_undoes_everything(node: HookNode) -> None:
    """All mounts were made and the cache was written: everything is undone, and the old cache is
    restored.
    """
    node.governor.mode = "deny-confirm"
    refuse(node, node.bundle("true"), 77, "the admission is gone")


def test_files_that_could_not_be_removed_are_removed_at_the_containers_end(node: HookNode) -> None:
    """A file blocks the removal of a directory at first. The runtime also reports the end of a
    container that failed to start.
    """
    node.governor.mode = "deny-confirm"
    bundle = node.bundle("true")
    before = tree(bundle.rootfs)
    way = bundle.rootfs / LIBDIR / "glibc-hwcaps/in the way"
    node.governor.before_confirm = way.touch
    with HeldContainer(bundle) as held:
        assert held.hook(node.hook).returncode == 77
        ident = f"held-{held.process.pid}"
    assert node.events()[-1]["left_behind"]
    way.unlink()
    take_back(str(node.base / "run"), ident)
    assert tree(bundle.rootfs).keys() == before.keys()


NO_EXCHANGE_C = r"""
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>
/* Runs a program for which renameat2 fails as on a file system that cannot exchange names. */
int main(int argc, char **argv) {
        struct sock_filter filter[] = {
                BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
                BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_renameat2, 0, 1),
                BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EINVAL),
                BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
        };
        struct sock_fprog program = {4, filter};
        if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) < 0)
                return 99;
        execv(argv[1], argv + 1);
        return 98;
}
"""


@pytest.mark.parametrize("root", ["bind", "overlay", "no exchange"])
@pytest.mark.parametrize("kind", ["link", "mode, owner and time", "hard link"])
def test_a_restored_cache_is_identical_to_the_original(
    node: HookNode, kind: str, root: str
) -> None:
    """An overlay has no hard links between its layers, so there the cache is a file of the upper layer."""
    node.governor.mode = "deny-confirm"
    bundle = node.bundle("true")
    etc = bundle.rootfs / "etc"
    cache, other = etc / "ld.so.cache", etc / "other"
    match kind:
        case "link":
            cache.rename(other)
            cache.symlink_to("other")
        case "mode, owner and time":
            os.chown(cache, 7, 8)
            cache.chmod(0o600)
            os.setxattr(cache, "user.note", b"kept")
            os.utime(cache, ns=(1, 1))
        case "hard link":
            other.hardlink_to(cache)
    mount = ""
    if root == "overlay":
        layers = {f"{name}dir": node.base / name for name in ("lower", "upper", "work")}
        bundle.rootfs.rename(layers["lowerdir"])
        for directory in (layers["upperdir"], layers["workdir"], bundle.rootfs):
            directory.mkdir()
        options = ",".join(f"{name}={directory}" for name, directory in layers.items())
        mount = f'mount -t overlay -o {options} none "$1"'
        if kind == "hard link":
            mount += ' && ln -f "$1/etc/ld.so.cache" "$1/etc/other"'
    argv = node.hook
    if root == "no exchange":
        argv = [str(compile_c(NO_EXCHANGE_C, node.base / "no-exchange")), *argv]
    with HeldContainer(bundle, mount=mount) as host, HeldContainer(bundle, host=host) as held:
        seen = Path(f"/proc/{held.process.pid}/root{etc}")
        before = {path.name: everything(path) for path in seen.iterdir()}
        done = held.hook(argv)
        assert (done.returncode, "the admission is gone" in done.stderr) == (77, True), done.stderr
        assert {path.name: everything(path) for path in seen.iterdir()} == before
    assert "left_behind" not in node.events()[0]


def test_a_file_system_that_cannot_exchange_names_gets_the_new_cache(node: HookNode) -> None:
    bundle = node.bundle("true")
    with HeldContainer(bundle) as held:
        no_exchange = compile_c(NO_EXCHANGE_C, node.base / "no-exchange")
        assert held.hook([str(no_exchange), *node.hook]).returncode == 0
    (cache,) = (bundle.rootfs / "etc").iterdir()
    assert f"/{TARGET}/libcuda.so.1\0".encode() in cache.read_bytes()


def test_a_failure_half_way_undoes_the_earlier_mounts(node: HookNode) -> None:
    """The hook has mounted the libraries and the grant when it finds that the program's path is a
    directory.
    """
    bundle = node.bundle("true")
    (bundle.rootfs / "usr/bin/nvidia-smi").mkdir()
    refuse(node, bundle, 76, "/usr/bin/nvidia-smi in the image is not a regular file")


def test_an_image_on_musl(node: HookNode) -> None:
    bundle = node.bundle("true")
    (bundle.rootfs / LIBDIR / "libc.so.6").unlink()
    (bundle.rootfs / "usr/lib/ld-musl-x86_64.so.1").write_bytes(b"musl")
    refuse(node, bundle, 76, "the image is built on musl")


def test_an_image_without_a_loader(node: HookNode) -> None:
    bundle = node.bundle("true")
    (bundle.rootfs / "usr/lib64/ld-linux-x86-64.so.2").unlink()
    refuse(node, bundle, 76, "the image has no loader")


def test_an_image_with_files_in_the_directory(node: HookNode) -> None:
    bundle = node.bundle("true")
    make_library(bundle.rootfs / TARGET / "libfast.so.1", "libfast.so.1", "fast")
    refuse(node, bundle, 76, f"/{TARGET} in the image is not empty (libfast.so.1)")


def test_a_damaged_cache_that_names_libcuda(node: HookNode) -> None:
    bundle = node.bundle("true")
    (bundle.rootfs / "etc/ld.so.cache").write_bytes(
        b"glibc-ld.so.cache1.1" + b"\xff" * 40 + b"libcuda.so.1\0"
    )
    refuse(node, bundle, 76, "/etc/ld.so.cache in the image is damaged")


def test_a_cache_that_leads_elsewhere_and_cannot_be_written(node: HookNode) -> None:
    """/etc is a mount of the host: the hook must not write to it, and the image's own library would be found first."""
    bundle = node.bundle("true")
    make_library(bundle.rootfs / "opt/cuda/libcuda.so.1", "libcuda.so.1", "the image's libcuda")
    (bundle.rootfs / "etc/ld.so.conf").write_text("/opt/cuda\n")
    subprocess.run(["ldconfig", "-r", str(bundle.rootfs), "-X"], check=True)
    bundle.write()
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
    check_line(done.stderr)
    assert "leads to /opt/cuda/libcuda.so.1 and cannot be replaced" in done.stderr


def test_a_root_file_system_that_cannot_be_written(node: HookNode) -> None:
    bundle = node.bundle("true")
    bundle.write()
    with HeldContainer(bundle) as held:
        remount = ["mount", "-o", "remount,bind,ro", str(bundle.rootfs)]
        subprocess.run(["nsenter", "-m", "-t", str(held.process.pid), *remount], check=True)
        done = held.hook(node.hook)
        assert held.mounts() == [""]
    assert done.returncode == 71
    check_line(done.stderr)
    assert "Read-only file system" in done.stderr


def test_a_read_only_root_that_was_prepared_is_served(node: HookNode) -> None:
    """The image already has the directories, and its cache does not name our libraries: nothing has
    to be written.
    """
    bundle = node.bundle("true")
    (bundle.rootfs / TARGET).mkdir(parents=True)
    (bundle.rootfs / "run/tidegate").mkdir()
    with HeldContainer(bundle) as held:
        remount = ["mount", "-o", "remount,bind,ro", str(bundle.rootfs)]
        subprocess.run(["nsenter", "-m", "-t", str(held.process.pid), *remount], check=True)
        done = held.hook(node.hook)
        assert (done.returncode, done.stderr) == (0, "")
        assert held.mounts() == ["", "/run/tidegate", f"/{TARGET}"]
    assert node.events()[0]["skipped"] == ["/usr/bin/nvidia-smi: Read-only file system"]


def test_no_mount_namespace(node: HookNode) -> None:
    """The hook's mounts would appear on the host."""
    bundle = node.bundle("true")
    bundle.write()
    with HeldContainer(bundle) as held:
        mounts = host_mounts(node.base)
        done = held.hook(node.hook, stdin=held.state(pid=os.getpid()))
        assert (done.returncode, host_mounts(node.base)) == (66, mounts)
        check_line(done.stderr)
        assert "no mount namespace of its own" in done.stderr


def test_a_process_that_has_ended(node: HookNode) -> None:
    bundle = node.bundle("true")
    with HeldContainer(bundle) as held:
        ended = subprocess.Popen(["true"])
        ended.wait()
        done = held.hook(node.hook, stdin=held.state(pid=ended.pid))
    assert done.returncode == 66
    check_line(done.stderr)


def test_a_reused_pid_is_not_taken_for_the_containers(
    node: HookNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process ends while the hook opens its pidfd, and the next process gets its number."""
    bundle = node.bundle("true")
    with HeldContainer(bundle) as held, subprocess.Popen(["true"]) as ended:
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        gone = os.pidfd_open(ended.pid)
        monkeypatch.setattr(os, "pidfd_open", lambda _: gone)
        with pytest.raises(BundleError, match="of the OCI state has ended"):
            CreatedContainer(held.process.pid, str(bundle.rootfs))
    os.close(gone)


@pytest.mark.parametrize(
    "arguments", [[], ["createContainer"], ["--nope", "prestart"], ["--timeout", "x", "prestart"]]
)
def test_an_invalid_command_line(node: HookNode, arguments: list[str]) -> None:
    """R13: createContainer runs in the container's namespaces, where the hook never runs."""
    done = subprocess.run(
        [node.hook[0], *arguments],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 70
    check_line(done.stderr)
    assert "usage: tidegate-hook" in done.stderr


def test_poststop_never_fails(node: HookNode) -> None:
    bundle = node.bundle("true")
    (node.base / "run/governor.sock").unlink()
    with HeldContainer(bundle) as held:
        for stdin in (b"", b"{", held.state()):
            assert held.hook(node.hook, stage="poststop", stdin=stdin).returncode == 0
    assert {event["code"] for event in node.events()} == {"state", "governor"}


def test_runc_shows_the_hooks_message_and_status(node: HookNode, runc: Runtime) -> None:
    """The container's root is unchanged as well."""
    bundle = node.bundle("echo started", annotations={"tidegate.gpu/memory": "8GB"})
    before = tree(bundle.rootfs)
    ran = runc.run(bundle)
    assert ran.status != 0
    assert ran.stdout == ""
    assert re.search(
        r"exit status 64, .*tidegate: annotation tidegate.gpu/memory is '8GB', but must be",
        ran.stderr,
    )
    assert tree(bundle.rootfs) == before


def test_no_runtime_starts_a_refused_container(node: HookNode, runtime: Runtime) -> None:
    node.governor.mode = "refuse"
    bundle = node.bundle("echo started")
    ran = runtime.run(bundle)
    assert (ran.status != 0, ran.stdout) == (True, "")
    assert node.events()[0]["code"] == "refused"
    assert node.governor.admitted == {}


def test_a_log_that_cannot_be_written_fails_no_container(node: HookNode, runc: Runtime) -> None:
    node.log.mkdir()
    assert runc.run(node.bundle("echo started")).stdout == "started\n"
    node.log.rmdir()
    node.log.symlink_to(node.base / "elsewhere")
    shutil.rmtree(node.base / "bundle")
    assert runc.run(node.bundle("echo started")).stdout == "started\n"
    assert not Path(node.base / "elsewhere").exists()
