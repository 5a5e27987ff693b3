"""A mirror on a disk that is full, read-only, or not the same as the driver's."""

import subprocess

import pytest

from tests.unit.test_vdriver_mirror import require_whole
from tests.unit.vdriver_trees import elf, put, put_control, put_driver
from vdriver.errors import MirrorError
from vdriver.refresh import refresh

V = "535.261.03"


@pytest.fixture
def host(tmp_path, require):
    """A driver, and an output directory on a file system of its own with room for one generation."""
    require("mount", "umount")
    put_driver(tmp_path / "root/usr/lib64", V)
    put_control(tmp_path / "control")
    out = tmp_path / "out"
    out.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", out], check=True)
    yield tmp_path
    subprocess.run(["umount", "-l", out], check=True)


def run(host):
    return refresh(host / "root", host / "out", host / "control")


def names(host):
    return sorted(p.name for p in (host / "out").iterdir() if p.name != "readings.json")


def test_a_full_disk_gives_one_line_and_leaves_the_old_generation_in_force(host):
    first = run(host).manifest
    lib = host / "root/usr/lib64"
    for old in lib.iterdir():
        old.unlink()
    put_driver(lib, "550.54.14")
    put(lib / "libnvidia-nvvm.so.550.54.14", elf("libnvidia-nvvm.so.4") + bytes(1 << 20))
    with pytest.raises(MirrorError) as caught:
        run(host)
    line = str(caught.value)
    assert (
        "No space left on device; the mirror takes 1 MiB, but only 0 MiB are free; make room in"
        in line
    )
    assert "tidegate gc" in line
    assert "\n" not in line
    assert require_whole(host / "out") == first
    assert names(host) == [first.generation, "current"]
    (lib / "libnvidia-nvvm.so.550.54.14").unlink()
    assert run(host).manifest.version == "550.54.14"


def test_an_output_that_became_read_only_keeps_its_generation(host):
    first = run(host).manifest
    put_driver(host / "root/usr/local/nvidia/lib64", "550.54.14")
    put(host / "root/proc/driver/nvidia/version", b"NVRM version: x Kernel Module  550.54.14  x\n")
    subprocess.run(["mount", "-o", "remount,ro", host / "out"], check=True)
    with pytest.raises(
        MirrorError, match=r"Read-only file system; mount it writable, or name another"
    ):
        run(host)
    assert require_whole(host / "out") == first


def test_on_another_file_system_everything_is_copied_and_narrower_sets_are_links(host):
    put(host / f"root/usr/lib64/libnvcuvid.so.{V}", elf("libnvcuvid.so.1"))
    result = run(host)
    assert set(result.how) == {"copied"}
    base = host / "out" / require_whole(host / "out").generation
    assert (base / "sets/compute+utility/lib64/libcuda.so.1").samefile(base / "lib64/libcuda.so.1")
    again = put(
        host / "control/libcuda.so.1", elf("libcuda.so.1", ("libcuda-origin.so.1",), tag="newer")
    )
    assert again.exists()
    assert run(host).how == {"copied": 2, "shared": 3}


def test_leftovers_that_cannot_be_removed_do_no_harm(host):
    left = host / "out/.tmp-gc-old/lib64"
    left.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", left], check=True)
    try:
        assert run(host).changed
        assert require_whole(host / "out").version == V
    finally:
        subprocess.run(["umount", left], check=True)
    run(host)
    assert not left.exists()
