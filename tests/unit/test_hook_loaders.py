"""Test where a loader of aarch64 finds the driver.

For aarch64, glibc has no glibc-hwcaps subdirectory; up to version 2.36, it searches `tls`. The
directories that these loaders search were read from the output of `ld.so --help` and of
LD_DEBUG=libs of Debian's glibc 2.31, 2.36 and 2.41, under emulation.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from oci_hook import ldcache
from oci_hook.errors import ImageError, UnservedImageError
from oci_hook.image import Image, inspect_image, look_for_drivers, search_path
from oci_hook.plan import CacheMapping, plan_cache

LIBDIR = "usr/lib/aarch64-linux-gnu"
# Strings that are in the loader of each version.
LOADERS = {
    "2.31": b"\x7fELF \0tls\0 \0atomics\0",
    "2.36": b"\x7fELF glibc-hwcaps \0tls\0 \0atomics\0",
    "2.41": b"\x7fELF glibc-hwcaps \0atomics\0 No subdirectories of glibc-hwcaps directories are searched",
}
CACHE = ldcache.write(ldcache.Cache(()))


@dataclass(frozen=True)
class ArmImage:
    """An image for aarch64, with the descriptors that the hook has."""

    root: Path
    rootfd: int
    procfd: int

    def put(self, path: str, content: bytes = b"") -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_bytes(content)

    def use_glibc(self, version: str, *, cache: bytes | None = CACHE) -> None:
        self.put(f"{LIBDIR}/libc.so.6")
        self.put("lib/ld-linux-aarch64.so.1", LOADERS[version])
        if cache is not None:
            self.put("etc/ld.so.cache", cache)

    def inspect(self, *, compat32: bool = False) -> Image:
        return inspect_image(self.rootfd, self.procfd, "aarch64", compat32=compat32)

    def look(self, *variables: str) -> Image:
        image = self.inspect()
        process = {"env": list(variables)}
        search = search_path(self.rootfd, self.procfd, image, {"process": process})
        return look_for_drivers(self.rootfd, image, search)


@pytest.fixture
def arm(tmp_path: Path) -> Iterator[ArmImage]:
    rootfd, procfd = (os.open(p, os.O_PATH | os.O_DIRECTORY) for p in (tmp_path, "/proc"))
    yield ArmImage(tmp_path, rootfd, procfd)
    os.close(rootfd)
    os.close(procfd)


@pytest.mark.parametrize("version", ["2.31", "2.36"])
def test_an_older_glibc_finds_the_driver_in_tls(arm: ArmImage, version: str) -> None:
    arm.use_glibc(version, cache=None)
    image = arm.inspect()
    assert (image.target, image.by_cache) == (f"{LIBDIR}/tls", False)


def test_glibc_from_2_37_on_finds_the_driver_through_the_cache_only(arm: ArmImage) -> None:
    arm.use_glibc("2.41")
    image = arm.inspect()
    assert (image.target, image.by_cache) == (f"{LIBDIR}/tidegate", True)
    [change] = [
        plan_cache(image.cache, (CacheMapping(image.target, ("libcuda.so.1",), 0x0A03, True),))
    ]
    assert change is not None
    after = ldcache.parse(change.content)
    assert after is not None
    [entry] = after.entries
    assert (entry.flags, entry.path) == (0x0A03, f"/{LIBDIR}/tidegate/libcuda.so.1".encode())


@pytest.mark.parametrize("cache", [None, b"", b"not one"])
def test_without_a_cache_the_image_is_refused(arm: ArmImage, cache: bytes | None) -> None:
    arm.use_glibc("2.41", cache=cache)
    with pytest.raises(UnservedImageError, match=r"no ld\.so\.cache, by which glibc on aarch64"):
        arm.inspect()


def test_a_damaged_cache_is_refused_though_it_names_no_driver(arm: ArmImage) -> None:
    arm.use_glibc("2.41", cache=CACHE[:20] + b"\xff" * 28)
    cache = arm.inspect().cache
    lead = CacheMapping(f"{LIBDIR}/tidegate", ("libcuda.so.1",), 0x0A03, True)
    with pytest.raises(ImageError, match="but the driver's libraries are found through it"):
        plan_cache(cache, (lead,))
    assert plan_cache(cache, (lead._replace(required=False),)) is None


@pytest.mark.parametrize("directory", ["opt/own", LIBDIR, "usr/local/cuda-13.0/compat"])
def test_a_driver_that_would_come_before_the_cache_is_refused(
    arm: ArmImage, directory: str
) -> None:
    arm.use_glibc("2.41")
    arm.put(f"{directory}/libcuda.so.1")
    with pytest.raises(ImageError, match=rf"/{directory} has a driver of its own \(libcuda.so.1\)"):
        arm.look(f"LD_LIBRARY_PATH=/{directory}")


def test_a_driver_in_compat_is_refused_even_if_no_path_names_it_yet(arm: ArmImage) -> None:
    """An entry point script may add the directory to the search path."""
    arm.use_glibc("2.41")
    arm.put("usr/local/cuda/compat/libcuda.so.1")
    with pytest.raises(ImageError, match="compat has a driver of its own"):
        arm.look()


def test_a_driver_in_a_default_directory_comes_after_the_cache(arm: ArmImage) -> None:
    arm.use_glibc("2.41")
    arm.put(f"{LIBDIR}/libcuda.so.1")
    assert arm.look("LD_LIBRARY_PATH=/opt/empty").own == ()


@pytest.mark.parametrize("below", ["", "/aarch64", "/atomics", "/aarch64/atomics"])
def test_with_an_older_glibc_the_images_own_driver_comes_after_tls(
    arm: ArmImage, below: str
) -> None:
    arm.use_glibc("2.36")
    arm.put(f"opt/own{below}/libcuda.so.1")
    image = arm.look("LD_LIBRARY_PATH=/opt/own")
    assert (image.own, image.subdirectory) == (("opt/own",), "tls")


def test_platform_is_aarch64(arm: ArmImage) -> None:
    arm.use_glibc("2.36")
    arm.put("opt/aarch64/libcuda.so.1")
    assert arm.look("LD_LIBRARY_PATH=/opt/$PLATFORM").own == ("opt/aarch64",)


def test_no_32_bit_libraries_are_looked_for(arm: ArmImage) -> None:
    arm.use_glibc("2.41")
    image = arm.inspect(compat32=True)
    assert (image.target32, image.reason32) == (None, "32-bit libraries are served on x86_64 only")


def test_musl_and_a_missing_loader_are_named(arm: ArmImage) -> None:
    arm.put("lib/ld-musl-aarch64.so.1")
    with pytest.raises(UnservedImageError, match="built on musl"):
        arm.inspect()
    arm.put(f"{LIBDIR}/libc.so.6")
    with pytest.raises(UnservedImageError, match=r"no loader \(/lib/ld-linux-aarch64\.so\.1 is"):
        arm.inspect()


def test_a_machine_other_than_x86_64_and_aarch64_is_refused(arm: ArmImage) -> None:
    with pytest.raises(
        ImageError, match="for riscv64 are not supported, only those for x86_64 and aarch64"
    ):
        inspect_image(arm.rootfd, arm.procfd, "riscv64")


def test_sonames_are_compared_with_the_machines_signedness_of_char() -> None:
    """A byte above 127 is negative in a `char` of x86, and large in one of aarch64."""
    names = ("libz.so.1", "libä.so.1")
    for flags, first in ((ldcache.FLAGS_X86_64, 0), (ldcache.FLAGS_AARCH64, 1)):
        sonames = tuple(name.encode() for name in names)
        cache = ldcache.with_libraries(ldcache.Cache(()), b"/x", sonames, flags)
        assert cache.entries[0].soname == sonames[first]  # the cache is in descending order
