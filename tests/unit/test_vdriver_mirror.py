"""Tests of vdriver.mirror on a real file system: content, interrupted runs, damage and repair."""

import fcntl
import hashlib
import json
import os
import shutil
import signal
import stat
import sys
from pathlib import Path

import pytest

from tests.unit.vdriver_trees import elf, put, put_control, put_driver, tree
from vdriver import elf_cache, mirror
from vdriver.content import check_content, digest
from vdriver.errors import MirrorError
from vdriver.manifest import read_manifest, validate
from vdriver.refresh import refresh

V = "535.261.03"


@pytest.fixture
def host(tmp_path):
    """A host with a small driver, control libraries, and room for the mirror."""
    lib = tmp_path / "root/usr/lib64"
    put_driver(lib, V)
    put(lib / f"libnvidia-nvvm.so.{V}", elf("libnvidia-nvvm.so.4"))
    put(tmp_path / "root/usr/bin/nvidia-smi", elf(program=True), 0o700)
    put_control(tmp_path / "control")
    return tmp_path


def run(host, **kwargs):
    return refresh(host / "root", host / "out", host / "control", **kwargs)


def apply(plan, out):
    with mirror.exclusive(out) as directory:
        return mirror.apply_mirror(plan, directory)


def upgrade(host, version="550.54.14"):
    for old in (host / "root/usr/lib64").iterdir():
        old.unlink()
    put_driver(host / "root/usr/lib64", version)


def require_whole(output):
    """Check that the generation in force matches its manifest, byte for byte."""
    manifest = read_manifest(output / "current")
    assert str((output / "current").readlink()) == manifest.generation
    validate(manifest.to_json())
    assert digest(manifest) == manifest.generation.rpartition("-")[2]
    base = output / manifest.generation
    for entry in manifest.files:
        path = base / entry.path
        if entry.target is not None:
            assert str(path.readlink()) == entry.target
            assert path.resolve(strict=True).is_relative_to(base)
        else:
            content = path.read_bytes()
            assert (len(content), hashlib.sha256(content).hexdigest()) == (entry.size, entry.sha256)
    return manifest


def test_the_layout_of_a_generation(host):
    old = os.umask(0o077)
    try:
        result = run(host)
    finally:
        os.umask(old)
    manifest = require_whole(host / "out")
    assert result.manifest == manifest
    assert tree(host / "out" / manifest.generation) == {
        "bin": "0o755",
        "bin/nvidia-smi": "0o755",
        "lib64": "0o755",
        "lib64/libcuda.so": "libcuda.so.1",
        "lib64/libcuda.so.1": "0o644",
        f"lib64/libcuda.so.{V}": "libcuda.so.1",
        "lib64/libnvidia-ml.so": "libnvidia-ml.so.1",
        "lib64/libnvidia-ml.so.1": "0o644",
        f"lib64/libnvidia-ml.so.{V}": "libnvidia-ml.so.1",
        "lib64/libnvidia-nvvm.so": "libnvidia-nvvm.so.4",
        "lib64/libnvidia-nvvm.so.4": f"libnvidia-nvvm.so.{V}",
        f"lib64/libnvidia-nvvm.so.{V}": "0o644",
        "lib64/origin": "0o755",
        "lib64/origin/libcuda-origin.so.1": "0o644",
        "lib64/origin/libnvidia-ml-origin.so.1": "0o644",
        "manifest.json": "0o644",
    }
    base = host / "out" / manifest.generation
    assert stat.S_IMODE(base.stat().st_mode) == 0o755
    assert (base / "lib64/libcuda.so.1").read_bytes() == (
        host / "control/libcuda.so.1"
    ).read_bytes()
    assert (base / "lib64/origin/libcuda-origin.so.1").read_bytes() == (
        host / f"root/usr/lib64/libcuda.so.{V}"
    ).read_bytes()


def test_the_manifest_has_watched_files_and_the_origin_of_content(host):
    run(host)
    document = json.loads((host / "out/current/manifest.json").read_text())
    assert document["driver"] == {"version": V, "kind": "nvidia"}
    assert document["sets"] == [
        {
            "capabilities": ["compute", "utility"],
            "lib64": "lib64",
            "names64": sorted(
                p.name for p in (host / "out/current/lib64").iterdir() if p.name != "origin"
            ),
        }
    ]
    assert document["programs"] == [{"path": "bin/nvidia-smi", "capability": "utility"}]
    assert document["source"]["root"] == str(host / "root")
    lib = host / "root/usr/lib64"
    watched = [("driver", lib / f"libcuda.so.{V}"), ("driver", lib / f"libnvidia-ml.so.{V}")]
    watched += [("control", host / f"control/{n}.so.1") for n in ("libcuda", "libnvidia-ml")]
    assert document["source"]["watch"] == [
        {
            "path": str(p),
            "role": role,
            "size": p.stat().st_size,
            "mtime_ns": p.stat().st_mtime_ns,
        }
        for role, p in watched
    ]
    (origin,) = (f for f in document["files"] if f["path"] == "lib64/origin/libcuda-origin.so.1")
    assert origin["source"] == f"/usr/lib64/libcuda.so.{V}"
    assert (origin["role"], origin["capability"], origin["soname"]) == (
        "origin",
        "compute",
        "libcuda.so.1",
    )


def test_the_name_of_a_generation_depends_only_on_its_content(host):
    one = run(host).manifest
    other = refresh(host / "root", host / "elsewhere", host / "control").manifest
    assert one.generation == other.generation
    document = json.loads((host / "elsewhere/current/manifest.json").read_text())
    del document["generation"], document["source"]
    for file in document["files"]:
        file.pop("source", None)
        file.pop("mtime_ns", None)
    document["files"].sort(key=lambda f: f["path"])
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    assert one.generation == f"{V}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def test_a_second_run_without_changes_writes_and_reads_nothing(host, monkeypatch):
    # The cache of readings is a separate file, which the second run would write, because the
    # libraries are old enough by then.
    monkeypatch.setattr(elf_cache, "SETTLED_NS", 10**18)
    first = run(host)
    before = {p: p.lstat() for p in (host / "out").rglob("*")}
    monkeypatch.setattr(mirror._Writer, "materialise", lambda _: pytest.fail("content was read"))
    second = run(host)
    assert (first.changed, second.changed) == (True, False)
    assert second.manifest == first.manifest
    assert {p: p.lstat().st_mtime_ns for p in before} == {
        p: s.st_mtime_ns for p, s in before.items()
    }
    assert (second.added, second.removed, second.replaced) == ((), (), ())


def test_a_dry_run_writes_nothing(host):
    result = run(host, dry_run=True)
    assert result.changed
    assert result.manifest is None
    assert "lib64/libcuda.so.1" in result.added
    assert not (host / "out").exists()


def test_an_upgrade_switches_and_keeps_the_old_generation(host):
    first = run(host).manifest
    upgrade(host)
    second = run(host)
    assert second.changed
    assert second.previous == first
    assert f"lib64/libnvidia-nvvm.so.{V}" in second.removed
    assert "lib64/libcuda.so.550.54.14" in second.added
    assert second.replaced == (
        "lib64/origin/libcuda-origin.so.1",
        "lib64/origin/libnvidia-ml-origin.so.1",
    )
    require_whole(host / "out")
    assert (host / "out" / first.generation / "manifest.json").exists()


def test_a_new_control_library_makes_a_new_generation(host):
    first = run(host).manifest
    put(host / "control/libcuda.so.1", elf("libcuda.so.1", ("libcuda-origin.so.1",), tag="newer"))
    second = run(host)
    assert second.manifest.generation != first.generation
    assert second.replaced == ("lib64/libcuda.so.1",)


def test_an_optional_library_that_is_reinstalled_with_other_content_is_noticed(host):
    run(host)
    put(host / f"root/usr/lib64/libnvidia-nvvm.so.{V}", elf("libnvidia-nvvm.so.4", tag="patched"))
    assert run(host).replaced == (f"lib64/libnvidia-nvvm.so.{V}",)


def test_a_touched_driver_keeps_its_generation_with_new_times(host):
    first = run(host).manifest
    os.utime(host / f"root/usr/lib64/libcuda.so.{V}", ns=(1, 10**18))
    second = run(host)
    assert not second.changed
    assert second.manifest.generation == first.generation
    assert second.manifest.watch[0].mtime_ns == 10**18
    assert require_whole(host / "out").watch == second.manifest.watch
    # Readings are kept only for files that are old enough, which depends on how busy this machine
    # is.
    names = {p.name for p in (host / "out").iterdir()} - {"readings.json"}
    assert names == {first.generation, "current"}


def test_a_damaged_generation_is_set_aside_and_recreated(host):
    first = run(host).manifest
    put(host / "out" / first.generation / "lib64/libcuda.so.1", b"something else")
    assert run(host).changed
    require_whole(host / "out")
    assert (
        host / f"out/{first.generation}.damaged-0/lib64/libcuda.so.1"
    ).read_bytes() == b"something else"


def test_repair_finds_damage_with_the_same_size_and_time(host):
    first = run(host).manifest
    damaged = host / "out" / first.generation / "lib64/libcuda.so.1"
    status = damaged.stat()
    content = damaged.read_bytes()
    put(damaged, content[:-1] + bytes([content[-1] ^ 1]))
    os.utime(damaged, ns=(status.st_mtime_ns, status.st_mtime_ns))
    assert not run(host).changed
    assert run(host, repair=True).changed
    assert require_whole(host / "out").generation == first.generation
    assert (host / f"out/{first.generation}.damaged-0/lib64/libcuda.so.1").exists()
    assert not run(host, repair=True).changed


def test_a_source_that_changes_while_it_is_copied_fails_the_run(host, monkeypatch):
    def slow(reader, _):
        os.utime(reader, ns=(1, 1))
        return False

    first = run(host).manifest
    upgrade(host)
    monkeypatch.setattr(mirror, "_reflink", slow)
    with pytest.raises(MirrorError, match="changed while it was being read"):
        run(host)
    assert require_whole(host / "out") == first
    # Readings are kept for files that were not changed within the last tenth of a second.
    names = {p.name for p in (host / "out").iterdir()} - {"readings.json"}
    assert names == {first.generation, "current"}


def test_content_is_shared_if_the_file_system_supports_it(host, monkeypatch):
    lib, other = host / "root/usr/lib64", host / f"root/usr/lib64/libnvidia-nvvm.so.{V}"
    other.chmod(0o664)  # writable by users other than root
    result = run(host)
    base = host / "out" / result.manifest.generation
    origin = base / "lib64/origin/libcuda-origin.so.1"
    assert not (base / f"lib64/libnvidia-nvvm.so.{V}").samefile(other)
    if os.getuid() == 0 and "reflinked" not in result.how:
        assert origin.samefile(lib / f"libcuda.so.{V}")
        assert result.how == {"hard-linked": 2, "copied": 4}
    monkeypatch.setattr(os, "link", lambda *_, **__: (_ for _ in ()).throw(OSError(1, "no links")))
    elsewhere = refresh(host / "root", host / "elsewhere", host / "control")
    assert set(elsewhere.how) <= {"reflinked", "copied"}
    assert elsewhere.manifest.generation == result.manifest.generation
    require_whole(host / "elsewhere")


def test_a_new_generation_shares_unchanged_files_with_the_previous_one(host):
    first = run(host).manifest
    put(host / "control/libcuda.so.1", elf("libcuda.so.1", ("libcuda-origin.so.1",), tag="newer"))
    second = run(host)
    assert second.how["shared"] == 4  # both originals, nvvm, nvidia-smi
    for name in ("lib64/origin/libcuda-origin.so.1", f"lib64/libnvidia-nvvm.so.{V}"):
        old, new = (host / "out" / g / name for g in (first.generation, second.manifest.generation))
        assert old.samefile(new)


def test_no_file_of_a_damaged_generation_is_reused(host):
    first = run(host).manifest
    damaged = host / "out" / first.generation / f"lib64/libnvidia-nvvm.so.{V}"
    time = damaged.stat().st_mtime_ns
    content = damaged.read_bytes()
    damaged.unlink()
    put(damaged, b"\0" * len(content))
    os.utime(damaged, ns=(time, time))
    put(host / "control/libcuda.so.1", elf("libcuda.so.1", ("libcuda-origin.so.1",), tag="newer"))
    run(host)
    require_whole(host / "out")


def test_a_driver_file_that_was_rewritten_in_place_makes_another_generation(host):
    first = run(host).manifest
    with (host / f"root/usr/lib64/libnvidia-nvvm.so.{V}").open("r+b") as file:
        file.seek(0, os.SEEK_END)
        file.write(b"appended in place")
    second = run(host)
    assert second.changed
    assert second.manifest.generation != first.generation
    require_whole(host / "out")


def test_a_driver_file_that_was_rewritten_in_place_is_reported(host):
    path = host / f"root/usr/lib64/libnvidia-nvvm.so.{V}"
    first = run(host).manifest
    content = bytearray(path.read_bytes())
    at = content.index(b"GCC: ")
    with path.open("r+b") as file:
        file.seek(at)
        file.write(b"XXX")
    second = run(host)
    assert second.manifest.generation != first.generation
    assert second.rewritten == (f"/usr/lib64/libnvidia-nvvm.so.{V}",)
    require_whole(host / "out")
    assert run(host).rewritten == ()


def test_repair_sets_the_previous_generation_aside_if_its_content_changed(host):
    """The mirrored file is a hard link, so the driver's file has changed with it."""
    first = run(host).manifest
    with (host / "out/current/lib64" / f"libnvidia-nvvm.so.{V}").open("r+b") as file:
        file.seek(0, os.SEEK_END)
        file.write(b"more")
    second = run(host, repair=True)
    assert second.aside == host / f"out/{first.generation}.damaged-0"
    assert second.aside.is_dir()
    require_whole(host / "out")


def test_smaller_sets_are_directories_of_the_same_files(host):
    lib = host / "root/usr/lib64"
    put(lib / f"libnvcuvid.so.{V}", elf("libnvcuvid.so.1"))
    manifest = require_whole_sets(host, run(host).manifest)
    compute, everything = manifest.sets
    assert (compute.lib64, everything.lib64) == ("sets/compute+utility/lib64", "lib64")
    base = host / "out" / manifest.generation
    assert not (base / compute.lib64 / "libnvcuvid.so.1").exists()
    assert (base / compute.lib64 / "origin/libcuda-origin.so.1").samefile(
        base / "lib64/origin/libcuda-origin.so.1"
    )
    assert not run(host).changed
    (base / compute.lib64 / "libcuda.so").unlink()
    assert run(host).changed
    require_whole_sets(host, require_whole(host / "out"))


def require_whole_sets(host, manifest):
    """Check that each set's directory has its names, and that each name is the same as in lib64."""
    base = host / "out" / manifest.generation
    for s in manifest.sets:
        names = {p.name for p in (base / s.lib64).iterdir()} - {"origin"}
        assert names == set(s.names64)
        for name in names:
            here, there = base / s.lib64 / name, base / "lib64" / name
            assert here.is_symlink() == there.is_symlink()
            if here.is_symlink():
                assert here.readlink() == there.readlink()
            assert here.resolve(strict=True).read_bytes() == there.read_bytes()
    return manifest


def test_an_output_that_cannot_be_written_is_reported_in_one_line(host):
    put(host / "out", b"a file")
    with pytest.raises(
        MirrorError, match=r"out: File exists; move it out of the way, or name another directory"
    ):
        run(host)


def test_a_control_library_under_a_wrong_name_is_refused(host):
    put(host / "control/libcuda.so.1", elf("libother.so.1"))
    with pytest.raises(MirrorError, match=r"soname libother\.so\.1"):
        run(host)
    (host / "control/libcuda.so.1").unlink()
    with pytest.raises(MirrorError, match=r"no control library: .*libcuda\.so\.1.*--control-dir"):
        run(host)


def test_a_drivers_own_library_is_not_a_control_library(host):
    for stem in ("libcuda", "libnvidia-ml"):
        shutil.copy(host / f"root/usr/lib64/{stem}.so.{V}", host / f"control/{stem}.so.1")
    with pytest.raises(
        MirrorError, match=r"libcuda\.so\.1 is not a Tidegate control library: .*--control-dir"
    ):
        run(host)


def upgrade_some(host, *names):
    """Upgrade some libraries only, like a package manager in the middle of an upgrade."""
    lib = host / "root/usr/lib64"
    for name in names:
        (lib / f"{name}.so.{V}").unlink()
        put(lib / f"{name}.so.550.54.14", elf(f"{name}.so.1", tag="550"))


def test_a_driver_in_the_middle_of_an_upgrade_is_refused(host):
    first = run(host).manifest
    upgrade_some(host, "libnvidia-nvvm")
    with pytest.raises(
        MirrorError,
        match=r"no longer has lib64/libnvidia-nvvm\.so\.535\.261\.03, which the mirror has; "
        r"wait for the driver's installation to end; .*--accept-loss",
    ):
        run(host)
    with pytest.raises(MirrorError, match="no longer has"):
        run(host, dry_run=True)
    assert require_whole(host / "out") == first
    assert f"lib64/libnvidia-nvvm.so.{V}" in run(host, accept_loss=True).removed


def test_a_program_that_is_replaced_before_its_libraries_is_refused_too(host):
    first = run(host).manifest
    put(host / "root/usr/bin/nvidia-smi", elf(program=True, tag="550"), 0o755)
    put(host / "root/usr/lib64/libnvidia-ptxjitcompiler.so.550.54.14", elf("x.so.1"))
    with pytest.raises(
        MirrorError, match=r"has files that differ .* next to libraries of 550\.54\.14"
    ):
        run(host)
    assert require_whole(host / "out") == first


def test_a_leftover_of_an_older_driver_does_not_prevent_a_refresh(host):
    put(host / "root/usr/lib64/libnvidia-compiler.so.470.256.02", elf("x.so.1"))
    run(host)
    put(host / "control/libcuda.so.1", elf("libcuda.so.1", ("libcuda-origin.so.1",), tag="newer"))
    assert run(host).replaced == ("lib64/libcuda.so.1",)


def test_only_the_owner_may_open_and_so_lock_the_directory(host):
    (host / "out").mkdir(mode=0o755)
    run(host)
    assert stat.S_IMODE((host / "out").stat().st_mode) == 0o700


def test_repair_fixes_every_fault_that_verify_finds(host):
    put(host / f"root/usr/lib64/libnvcuvid.so.{V}", elf("libnvcuvid.so.1"))
    put(host / "root/etc/OpenCL/vendors/nvidia.icd", b"/opt/libnvidia-opencl.so.1")
    first = run(host).manifest
    base = host / "out" / first.generation
    compute = base / "sets/compute+utility/lib64"
    for damage in (
        (compute / "origin/libcuda-origin.so.1").unlink,
        lambda: put(base / "data/opencl/more.icd", b"libevil.so"),
        lambda: (base / "lib64").chmod(0o777),
        lambda: (base / "bin/nvidia-smi").chmod(0o644),
        lambda: ((compute / "libcuda.so.1").unlink(), put(compute / "libcuda.so.1", b"else")),
    ):
        damage()
        assert list(check_content(base, first)) != []
        result = run(host, repair=True)
        assert result.manifest.generation == first.generation
        assert result.aside is not None
        assert list(check_content(base, result.manifest)) == []


def test_a_damaged_generation_is_replaced_atomically(host, monkeypatch):
    first = run(host).manifest
    base = host / "out" / first.generation
    (base / "lib64/libcuda.so").unlink()
    seen = []

    def look(*arguments):
        assert (base / "manifest.json").exists()
        seen.append(arguments)
        return rename(*arguments)

    rename = os.rename
    monkeypatch.setattr(os, "rename", look)
    fsync = os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda fd: fsync(fd) if (base / "manifest.json").exists() else 1 / 0
    )
    assert run(host, repair=True).aside == host / f"out/{first.generation}.damaged-0"
    names = [Path(a[1]).name for a in seen]
    assert [n for n in names if n != "readings.json"] == [f"{first.generation}.damaged-0"]
    require_whole(host / "out")


def test_a_current_link_that_leads_out_of_the_directory_is_corrected(host):
    first = run(host).manifest
    shutil.move(host / "out" / first.generation, host / first.generation)
    (host / "out/current").unlink()
    (host / "out/current").symlink_to(f"../{first.generation}")
    assert run(host).changed
    assert str((host / "out/current").readlink()) == first.generation


def test_text_of_the_same_size_and_time_is_compared(host):
    icd = put(host / "root/etc/OpenCL/vendors/nvidia.icd", b"/opt/libnvidia-opencl.so.1")
    os.utime(icd, ns=(1, 1))
    run(host)
    put(icd, b"/opt/libnvidia-opencl.so.2")
    os.utime(icd, ns=(1, 1))
    assert run(host).replaced == ("data/opencl/nvidia.icd",)


def test_without_hard_links_no_file_is_shared_with_the_host(host):
    assert "hard-linked" not in run(host, hard_links=False).how


def test_a_generation_is_durable_before_it_is_renamed(host, monkeypatch):
    synced, steps = set(), []
    fsync, rename, replace = os.fsync, os.rename, os.replace

    def record(fd):
        synced.add(os.fstat(fd).st_ino)
        steps.append("fsync")
        fsync(fd)

    def renamed(source, target):
        work = Path(source)
        inodes = {p.stat().st_ino for p in (work, *work.rglob("*")) if not p.is_symlink()}
        assert inodes <= synced
        steps.append("rename")
        rename(source, target)

    def replaced(source, target):
        steps.append("replace")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", record)
    monkeypatch.setattr(os, "rename", renamed)
    monkeypatch.setattr(os, "replace", replaced)
    run(host)
    # Afterwards only the cache of readings is written, if the libraries are old enough by now.
    named = len(steps) - steps[::-1].index("replace") + 1
    assert steps[named - 4 : named] == ["rename", "fsync", "replace", "fsync"]


CALLS = {
    os: [
        "open",
        "mkdir",
        "rename",
        "replace",
        "symlink",
        "fsync",
        "write",
        "fchmod",
        "chmod",
        "utime",
        "unlink",
        "rmdir",
        "link",
        "close",
    ],
    fcntl: ["ioctl", "flock"],
}


def killed_at(step, function):
    """Run `function` in a child that is killed after `step` file system calls.

    Return whether it was killed; False if it made no more calls than that.
    """
    pid = os.fork()
    if pid == 0:
        count = 0

        def wrap(call):
            def counted(*args, **kwargs):
                nonlocal count
                count += 1
                if count > step:
                    os.kill(os.getpid(), signal.SIGKILL)
                return call(*args, **kwargs)

            return counted

        try:
            for module, names in CALLS.items():
                for name in names:
                    setattr(module, name, wrap(getattr(module, name)))
            function()
        except BaseException as e:  # noqa: BLE001
            sys.stderr.write(f"{e!r}\n")
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) or os.waitstatus_to_exitcode(status) == 0
    return os.WIFSIGNALED(status)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize(
    "case",
    [
        "stale",
        *(pytest.param(case, marks=pytest.mark.slow) for case in ("first", "upgrade", "touched")),
    ],
)
def test_a_refresh_killed_at_any_step_leaves_a_complete_generation_in_force(host, case):
    from vdriver.control import read_control
    from vdriver.discover import find_driver
    from vdriver.plan import plan_mirror

    template, out = host / "template", host / "out"
    template.mkdir()
    # A second set, a file that is mirrored twice, and one that is rewritten.
    lib = host / "root/usr/lib64"
    put(lib / f"libvdpau_nvidia.so.{V}", elf("libvdpau_nvidia.so.1"))
    (lib / "libvdpau_nvidia.so.1").symlink_to(f"libvdpau_nvidia.so.{V}")
    put(host / "root/etc/OpenCL/vendors/nvidia.icd", b"/opt/libnvidia-opencl.so.1")
    put(lib / f"libEGL_nvidia.so.{V}", elf("libEGL_nvidia.so.0"))
    before = None
    if case != "first":
        before = refresh(host / "root", template, host / "control").manifest
    if case in ("upgrade", "stale"):
        upgrade(host)
    if case == "touched":
        os.utime(host / f"root/usr/lib64/libcuda.so.{V}", ns=(1, 10**18))
    if case == "stale":
        put(template / ".tmp-abc/lib64/half", b"x")
        (template / ".tmp-current").symlink_to("nowhere")
    plan = plan_mirror(find_driver(host / "root"), read_control(host / "control"))
    mirror.manifests.validate(
        before.to_json()
    ) if before else None  # imports jsonschema before the fork

    step, killed = 0, True
    while killed:
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(template, out, symlinks=True)
        killed = killed_at(step, lambda: apply(plan, out))
        step += 1
        if (out / "current").exists() or before is not None or not killed:
            after = require_whole(out)
            assert (
                before is None
                or after.generation == before.generation
                or after.version == "550.54.14"
            )
        apply(plan, out)
        assert require_whole(out).version == plan.driver.version
        assert not [p.name for p in out.iterdir() if p.name.startswith(".tmp-")]
    assert step > 20
    print(f"{case}: killed before each of {step - 1} calls")
