"""Generations on a real file system: what they hold, that nothing is half made, and what a crash leaves."""

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
from vdriver import mirror
from vdriver.errors import MirrorError
from vdriver.manifest import read_manifest, validate
from vdriver.refresh import refresh

V = "535.261.03"


@pytest.fixture
def host(tmp_path):
    """A host with a small driver, control libraries, and room for the mirror."""
    lib = tmp_path / "root/usr/lib64"
    put_driver(lib, V)
    put(lib / f"libnvidia-nvvm.so.{V}", elf("libnvidia-nvvm.so.4"), 0o755)
    put(tmp_path / "root/usr/bin/nvidia-smi", elf(program=True), 0o700)
    put_control(tmp_path / "control")
    return tmp_path


def run(host, **kwargs):
    return refresh(host / "root", host / "out", host / "control", **kwargs)


def upgrade(host, version="550.54.14"):
    for old in (host / "root/usr/lib64").iterdir():
        old.unlink()
    put_driver(host / "root/usr/lib64", version)


def require_whole(output):
    """The generation in force holds exactly what its manifest says, byte for byte."""
    manifest = read_manifest(output / "current")
    assert str((output / "current").readlink()) == manifest.generation
    validate(manifest.to_json())
    assert mirror.digest(manifest.files) == manifest.generation.rpartition("-")[2]
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


def test_a_generation_is_laid_out_as_the_contract_says(host):
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


def test_the_manifest_names_what_makes_it_stale_and_where_content_came_from(host):
    run(host)
    document = json.loads((host / "out/current/manifest.json").read_text())
    assert document["driver"] == {"version": V, "kind": "nvidia"}
    assert document["sets"] == [
        {"capabilities": ["compute", "utility"], "lib64": "lib64", "bin": ["bin/nvidia-smi"]}
    ]
    assert document["source"]["root"] == str(host / "root")
    lib = host / "root/usr/lib64"
    watched = [lib / f"libcuda.so.{V}", lib / f"libnvidia-ml.so.{V}"]
    watched += [host / "control/libcuda.so.1", host / "control/libnvidia-ml.so.1"]
    assert document["source"]["watch"] == [
        {"path": str(p), "size": p.stat().st_size, "mtime_ns": p.stat().st_mtime_ns}
        for p in watched
    ]
    (origin,) = (f for f in document["files"] if f["path"] == "lib64/origin/libcuda-origin.so.1")
    assert origin["source"] == f"/usr/lib64/libcuda.so.{V}"
    assert (origin["role"], origin["capability"], origin["soname"]) == (
        "origin",
        "compute",
        "libcuda.so.1",
    )


def test_the_name_of_a_generation_follows_from_its_content_alone(host):
    one = run(host).manifest
    other = refresh(host / "root", host / "elsewhere", host / "control").manifest
    assert one.generation == other.generation
    total = hashlib.sha256()
    for f in sorted(one.files, key=lambda f: f.path):
        kind, content = ("link", f.target) if f.target else ("file", f.sha256)
        total.update(f"{f.path}\0{kind}\0{content}\n".encode())
    assert one.generation == f"{V}-{total.hexdigest()[:12]}"


def test_a_second_run_without_changes_writes_and_reads_nothing(host, monkeypatch):
    first = run(host)
    before = {p: p.lstat() for p in (host / "out").rglob("*")}
    monkeypatch.setattr(mirror, "_transfer", lambda *_: pytest.fail("content was read"))
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
    put(host / "control/libcuda.so.1", elf("libcuda.so.1", tag="newer"))
    second = run(host)
    assert second.manifest.generation != first.generation
    assert second.replaced == ("lib64/libcuda.so.1",)


def test_an_optional_library_that_is_reinstalled_with_other_content_is_noticed(host):
    run(host)
    put(host / f"root/usr/lib64/libnvidia-nvvm.so.{V}", elf("libnvidia-nvvm.so.4", tag="patched"))
    assert run(host).replaced == (f"lib64/libnvidia-nvvm.so.{V}",)


def test_a_driver_that_was_touched_keeps_its_generation_and_is_fresh_again(host):
    first = run(host).manifest
    os.utime(host / f"root/usr/lib64/libcuda.so.{V}", ns=(1, 10**18))
    second = run(host)
    assert not second.changed
    assert second.manifest.generation == first.generation
    assert second.manifest.watch[0].mtime_ns == 10**18
    assert require_whole(host / "out").watch == second.manifest.watch
    assert sorted(p.name for p in (host / "out").iterdir()) == [first.generation, "current"]


def test_a_generation_that_somebody_changed_is_made_again_beside_the_damaged_one(host):
    first = run(host).manifest
    put(host / "out" / first.generation / "lib64/libcuda.so.1", b"something else")
    assert run(host).changed
    require_whole(host / "out")
    assert (
        host / f"out/{first.generation}.damaged-0/lib64/libcuda.so.1"
    ).read_bytes() == b"something else"


def test_a_source_that_changes_while_it_is_copied_fails_the_run(host, monkeypatch):
    transfer = mirror._transfer

    def slow(reader, writer):
        digest = transfer(reader, writer)
        os.utime(reader, ns=(1, 1))
        return digest

    first = run(host).manifest
    upgrade(host)
    monkeypatch.setattr(mirror, "_transfer", slow)
    with pytest.raises(MirrorError, match="changed while it was being read"):
        run(host)
    assert require_whole(host / "out") == first
    assert sorted(p.name for p in (host / "out").iterdir()) == [first.generation, "current"]


def test_a_rewritten_driver_file_leaves_the_mirror_alone(host):
    manifest = run(host).manifest
    with (host / f"root/usr/lib64/libcuda.so.{V}").open("r+b") as file:
        file.write(b"overwritten in place")
    require_whole(host / "out")
    mirrored = host / "out" / manifest.generation / "lib64/origin/libcuda-origin.so.1"
    assert mirrored.stat().st_nlink == 1


def test_an_output_that_cannot_be_written_is_one_line(host):
    put(host / "out", b"a file")
    with pytest.raises(MirrorError, match=r"out: File exists; make room"):
        run(host)


def test_a_control_library_under_a_wrong_name_is_refused(host):
    put(host / "control/libcuda.so.1", elf("libother.so.1"))
    with pytest.raises(MirrorError, match=r"soname libother\.so\.1"):
        run(host)
    (host / "control/libcuda.so.1").unlink()
    with pytest.raises(MirrorError, match=r"no control library: .*libcuda\.so\.1.*--control-dir"):
        run(host)


def test_everything_is_durable_before_it_is_named(host, monkeypatch):
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
    assert steps[-4:] == ["rename", "fsync", "replace", "fsync"]


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
    """Run `function` in a child that is killed before its file system call number `step`; True if it got that far."""
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
@pytest.mark.parametrize("case", ["first", "upgrade", "touched", "stale"])
def test_a_refresh_killed_at_any_step_leaves_a_whole_generation_in_force(host, case):
    from vdriver.control import read_control
    from vdriver.discover import find_driver
    from vdriver.plan import plan_mirror

    template, out = host / "template", host / "out"
    template.mkdir()
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
        killed = killed_at(step, lambda: mirror.apply_mirror(plan, out))
        step += 1
        if (out / "current").exists() or before is not None or not killed:
            after = require_whole(out)
            assert (
                before is None
                or after.generation == before.generation
                or after.version == "550.54.14"
            )
        mirror.apply_mirror(plan, out)
        assert require_whole(out).version == plan.driver.version
        assert not [p.name for p in out.iterdir() if p.name.startswith(".tmp-")]
    assert step > 20
    print(f"{case}: killed before each of {step - 1} calls")
