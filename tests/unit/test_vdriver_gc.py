"""Tests of the inputs of `tidegate gc`: mountinfo, names, locks, disk blocks.

The removal itself needs root; tests/container/test_gc.py tests it.
"""

from __future__ import annotations

import fcntl
import os

import pytest

from governor import cli
from vdriver import generations
from vdriver.generations import blocks
from vdriver.mountinfo import Location, Mount, Sought, locate, names_in_use, parse_mountinfo

OLD = "550.163.01-0123456789ab"
NEW = "580.159.04-ba9876543210"
PLACES = {OLD: Location("254:0", f"/var/lib/tidegate/driver/{OLD}")}
D = "/var/lib/tidegate/driver"
SOUGHT = Sought(Location("254:0", D), (D, "/srv/driver"), PLACES, {})


def mount(root, *, device="254:0", kind="ext4", options="rw", ident=40, point="/x"):
    return Mount(ident, device, root, point, kind, tuple(options.split(",")))


@pytest.fixture
def driver_dir(tmp_path):
    for name in (OLD, NEW):
        (tmp_path / name).mkdir()
    (tmp_path / "current").symlink_to(NEW)
    return tmp_path


def gc(driver_dir, *more):
    return cli.main(["gc", "--driver-dir", str(driver_dir), *more])


def test_mountinfo_is_parsed_with_escapes_and_optional_fields():
    data = (
        b"36 35 98:0 /a\\040b\\134c /mnt\\0112 rw,noatime shared:7 master:1 - ext3 /dev/root rw,errors=continue\n"
        b"2391 34 0:4 mnt:[4026532208] /run/pin rw - nsfs nsfs rw\n"
    )
    assert parse_mountinfo(data) == [
        Mount(36, "98:0", "/a b\\c", "/mnt\t2", "ext3", ("rw", "errors=continue")),
        Mount(2391, "0:4", "mnt:[4026532208]", "/run/pin", "nsfs", ("rw",)),
    ]


@pytest.mark.parametrize(
    ("root", "point", "path", "expected"),
    [
        ("/", "/", "/var/lib/tidegate/driver", "/var/lib/tidegate/driver"),
        ("/", "/var", "/var/lib/tidegate/driver", "/lib/tidegate/driver"),
        ("/@var", "/var", "/var/lib/tidegate/driver", "/@var/lib/tidegate/driver"),
        ("/srv/d", "/var/lib/tidegate/driver", "/var/lib/tidegate/driver", "/srv/d"),
    ],
    ids=["root", "a partition", "a btrfs subvolume", "a bind mount"],
)
def test_a_directory_is_located_in_its_file_system(root, point, path, expected):
    place = locate(Mount(1, "0:31", root, point, "btrfs", ()), path)
    assert place == Location("0:31", expected)


LAYERS = {
    "a layer": f"rw,lowerdir={D}/{OLD}/lib64:/image",
    "the last layer": f"rw,lowerdir=/image:{D}/{OLD}/lib64",
    "one of its own": f"rw,lowerdir+=/image,lowerdir+={D}/{OLD}/bin",
    "data": f"rw,lowerdir=/image,datadir+={D}/{OLD}/data",
    "by the link": f"rw,lowerdir={D}/current/lib64:/image",
    "by another name of the directory": "rw,lowerdir=/srv/driver/current/lib64:/image",
    "roundabout": f"rw,lowerdir=/var//lib/./tidegate/x/../driver/{OLD}:/image",
    "the whole directory": f"rw,lowerdir={D}:/image",
    "a colon in another": f"rw,lowerdir=/a\\:b:{D}/current",
}


@pytest.mark.parametrize(
    "used",
    [
        mount(f"{D}/{OLD}"),
        mount(f"{D}/{OLD}/lib64"),
        mount(f"{D}/{OLD}/sets/utility/lib64"),
        mount(f"{D}/{OLD}//deleted"),
        mount(f"{D}/{OLD}/bin/nvidia-smi//deleted"),
        *(mount("/", device="0:50", kind="overlay", options=o) for o in LAYERS.values()),
    ],
    ids=["itself", "lib64", "a set", "deleted", "a deleted file", *LAYERS],
)
def test_a_mount_of_a_generation_or_of_a_file_in_it_is_a_use(used):
    assert names_in_use([mount("/"), used], SOUGHT) == {OLD}


OTHERS = {
    "a layer": f"rw,lowerdir={D}/{NEW}/lib64",
    "its name elsewhere": f"rw,lowerdir=/mnt/{OLD}:/mnt/b",
    "its name in an option": f"rw,redirect_dir={D}/{OLD},lowerdir=/image",
    "its path further down": f"rw,lowerdir=/mnt{D}/{OLD}:/mnt/b",
    "a longer directory": f"rw,lowerdir={D}s/current:/image",
    "its path behind a colon of a name": f"rw,lowerdir=/a\\:{D}/{OLD}:/image",
}


@pytest.mark.parametrize(
    "other",
    [
        mount("/"),
        mount("/var/lib/tidegate/driver"),
        mount(f"{D}/{OLD}.damaged-0/lib64"),
        mount(f"{D}/{OLD}c"),
        mount(f"{D}/{NEW}/lib64"),
        mount(f"{D}/{OLD}/lib64", device="254:16"),
        *(mount("/", device="0:50", kind="overlay", options=o) for o in OTHERS.values()),
    ],
    ids=["root", "above", "damaged", "a longer name", "another", "another device", *OTHERS],
)
def test_other_mounts_are_not_a_use(other):
    assert names_in_use([other], SOUGHT) == set()


def test_a_layer_below_another_mount_of_the_driver_directory_is_a_use():
    """A container may have the host's root mounted."""
    host = mount("/", point="/host")
    layer = mount("/", device="0:50", kind="overlay", options=f"lowerdir=/host{D}/{OLD}/lib64:/a")
    assert names_in_use([host, layer], SOUGHT) == {OLD}
    assert names_in_use([layer], SOUGHT) == set()


def test_a_layer_of_a_generation_that_was_set_aside_later_is_a_use():
    place = {f"{OLD}.damaged-0": Location("254:0", f"{D}/{OLD}.damaged-0")}
    layer = mount("/", device="0:50", kind="overlay", options=f"lowerdir={D}/{OLD}/lib64")
    sought = Sought(Location("254:0", D), (D,), place, {})
    assert names_in_use([layer], sought) == {f"{OLD}.damaged-0"}


def test_text_that_is_not_utf_8_or_has_line_breaks_is_parsed():
    data = (
        b"36 35 0:50 / /mnt/a\rb\xe2\x80\xa8 rw - fuse.\xff x rw\n"
        b"37 35 0:51 / /o rw - overlay o rw,lowerdir=/a\\054b:/c\n"
    )
    first, second = parse_mountinfo(data)
    assert (first.point, first.type) == ("/mnt/a\rb\u2028", "fuse.\udcff")
    assert second.options == ("rw", "lowerdir=/a,b:/c")


def test_an_invalid_line_is_reported_and_the_others_are_parsed():
    faults: list[str] = []
    data = b"36 35 0:50 / /a rw - ext4 x rw\n37 \x1b[2J\n38 35 0:50 / /b rw - ext4 x rw\n"
    assert [m.ident for m in parse_mountinfo(data, faults)] == [36, 38]
    assert faults == ["not a line of mountinfo: 37 ?[2J"]


def test_the_generation_in_force_is_kept(driver_dir, capsys):
    (driver_dir / OLD).rmdir()
    assert gc(driver_dir) == 0
    assert capsys.readouterr().out == f"{NEW}  kept: in force\n"


def test_a_lock_keeps_a_generation(driver_dir, capsys):
    fd = os.open(driver_dir / OLD, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_SH)
    assert gc(driver_dir) == 0
    os.close(fd)
    assert capsys.readouterr().out == (
        f"{OLD}  kept: locked by a starting container, or by tidegate verify\n{NEW}  kept: in force\n"
    )
    assert (driver_dir / OLD).is_dir()


def test_a_leftover_that_a_refresh_removes_in_the_meantime_is_skipped(
    driver_dir, capsys, monkeypatch
):
    def names_then_refresh(directory):
        names = list_generations(directory)
        left.rmdir()
        return names

    list_generations = generations._generations
    (driver_dir / OLD).rmdir()
    left = driver_dir / f".tmp-gc-{OLD}"
    left.mkdir()
    monkeypatch.setattr(generations, "_generations", names_then_refresh)
    assert gc(driver_dir) == 0
    assert capsys.readouterr().out == (
        f"{left.name}  kept: moved or removed by a refresh in the meantime\n{NEW}  kept: in force\n"
    )


def test_a_directory_that_a_refresh_removes_during_the_walk_is_skipped(driver_dir, monkeypatch):
    def walk(directory):
        yield str(directory), ["lib64"], []
        yield str(directory / "lib64"), [], []

    monkeypatch.setattr(os, "walk", walk)
    assert list(generations._directories(driver_dir, {OLD: -1}).values()) == [OLD]


@pytest.mark.parametrize("target", [None, "550.1-aaaaaaaaaaaa", "..", "/", "current"])
def test_without_a_generation_in_force_nothing_is_removed(driver_dir, capsys, target):
    (driver_dir / "current").unlink()
    if target is not None:
        (driver_dir / "current").symlink_to(target)
    assert gc(driver_dir) == 72
    assert capsys.readouterr().err == (
        f"tidegate: {driver_dir}/current: no generation is in force; run tidegate refresh\n"
    )
    assert (driver_dir / OLD).is_dir()


def test_a_directory_without_generations_has_nothing_to_remove(tmp_path, capsys):
    (tmp_path / "backup").mkdir()
    assert gc(tmp_path) == 0
    assert capsys.readouterr().out == f"no generation in {tmp_path}\n"
    assert gc(tmp_path / "absent") == 72
    assert "No such file or directory; run tidegate refresh first" in capsys.readouterr().err


def test_bytes_are_counted_if_all_links_of_a_file_are_removed(tmp_path):
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    inside.mkdir()
    outside.mkdir()
    empty = blocks(inside)
    page = os.urandom(4096 * 16)
    (inside / "a").write_bytes(page)
    (inside / "b").hardlink_to(inside / "a")
    (inside / "c").write_bytes(page)
    (outside / "c").hardlink_to(inside / "c")
    os.sync()
    assert blocks(inside) - empty == 65536
    (outside / "c").unlink()
    assert blocks(inside) - empty == 131072
