"""Tests of oci_hook.plan, and of the manifest and image from which it makes a plan."""

from __future__ import annotations

import copy
import fcntl
import json
import os
import subprocess
import sys
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

import oci_hook.image
from oci_hook import ldcache
from oci_hook.apply import Applier, CreatedContainer, Undo
from oci_hook.client import Grant
from oci_hook.errors import (
    BundleError,
    ImageError,
    MirrorMismatchError,
    NoMirrorError,
    UnservedImageError,
)
from oci_hook.image import Image, PathInImage, inspect_image, look_at, look_for_drivers, search_path
from oci_hook.manifest import (
    changed_files,
    check_fresh,
    choose_share,
    hold_generation,
    module_version,
    parse_manifest,
    read_manifest,
)
from oci_hook.plan import (
    BindDirectory,
    BindFile,
    CacheMapping,
    Plan,
    WriteCache,
    plan_cache,
    plan_container,
)
from vdriver.manifest import validate

ROOT = Path(__file__).parents[2]
LIBDIR = "usr/lib/x86_64-linux-gnu"
TARGET = f"{LIBDIR}/glibc-hwcaps/x86-64-v2"
TARGET32 = "usr/lib/i386-linux-gnu/tidegate"
IMAGE = Image(LIBDIR, TARGET, None)
V = "580.159.04"
SMALL = ["libcuda.so", "libcuda.so.1", f"libcuda.so.{V}", "libnvidia-nvvm.so.4"]
NVVM = f"libnvidia-nvvm.so.{V}"
GLX = f"libGLX_nvidia.so.{V}"
DOCUMENT: dict[str, Any] = {
    "schema": 2,
    "generation": f"{V}-0123456789ab",
    "driver": {"version": V, "kind": "nvidia"},
    "machine": "x86_64",
    "sets": [
        {
            "capabilities": ["compute", "display", "graphics", "utility"],
            "lib64": "lib64",
            "names64": [*SMALL, NVVM, GLX, "libGLX_nvidia.so.0", "libodd.so.580.159.04"],
            "lib32": "lib32",
            "names32": [GLX, "libGLX_nvidia.so.0"],
        },
        {
            "capabilities": ["compute", "graphics", "utility"],
            "lib64": "sets/compute,graphics,utility/lib64",
            "names64": [*SMALL, NVVM, GLX, "libGLX_nvidia.so.0"],
        },
        {
            "capabilities": ["compute", "utility"],
            "lib64": "sets/compute,utility/lib64",
            "names64": [*SMALL, NVVM],
        },
    ],
    "programs": [
        {"path": "bin/nvidia-smi", "capability": "utility"},
        {"path": "bin/nvidia-ngx-updater", "capability": "graphics"},
    ],
    "places": [
        {
            "name": "vulkan-icd",
            "source": "data/vulkan-icd",
            "capability": "graphics",
            "targets": ["/etc/vulkan/icd.d", "/usr/share/vulkan/icd.d"],
            "looks": "all",
            "files": ["nvidia_layers.json", "nvidia_icd.json"],
        },
        {
            "name": "gbm",
            "source": "data/gbm",
            "capability": "display",
            "targets": ["{libdir}/gbm"],
            "looks": "one",
            "files": ["nvidia-drm_gbm.so"],
        },
    ],
    "binds": [
        {"path": "/run/nvidia-persistenced", "capability": "utility"},
        {"path": "/tmp/nvidia-mps", "capability": "video"},
    ],
    "files": [
        {"path": "lib64/libcuda.so.1", "role": "control", "soname": "libcuda.so.1"},
        {"path": "lib64/libcuda.so", "role": "link", "target": "libcuda.so.1"},
        {"path": f"lib64/libcuda.so.{V}", "role": "link", "target": "libcuda.so.1"},
        {"path": f"lib64/{NVVM}", "role": "library", "soname": "libnvidia-nvvm.so.4"},
        {"path": "lib64/libnvidia-nvvm.so.4", "role": "link", "target": NVVM},
        {"path": f"lib64/libodd.so.{V}", "role": "library", "soname": "libodd.so.1"},
        {"path": f"lib64/{GLX}", "role": "library", "soname": "libGLX_nvidia.so.0"},
        {"path": "lib64/libGLX_nvidia.so.0", "role": "link", "target": GLX},
        {"path": f"lib32/{GLX}", "role": "library", "soname": "libGLX_nvidia.so.0"},
        {"path": "lib32/libGLX_nvidia.so.0", "role": "link", "target": GLX},
        {"path": "lib64/origin/libcuda-origin.so.1", "role": "origin", "soname": "libcuda.so.1"},
        {"path": "bin/nvidia-smi", "role": "program"},
    ],
    "source": {
        "root": "/",
        "watch": [
            {
                "path": "/usr/lib/libcuda.so.580.159.04",
                "role": "driver",
                "size": 1,
                "mtime_ns": 2,
            }
        ],
    },
}
GENERATION = f"/var/lib/tidegate/driver/{V}-0123456789ab"
MANIFEST = parse_manifest(json.dumps(DOCUMENT).encode(), GENERATION)
DEFAULT = choose_share(MANIFEST, ("compute", "utility"))
GRANT = Grant("k1", "/run/tidegate/containers/k1", ("GPU-x",), 1, 50)


def changed(**change: Any) -> Any:
    return parse_manifest(json.dumps({**DOCUMENT, **change}).encode(), GENERATION)


def cache_of(*, flags: int = 0x303, **libraries: str) -> bytes:
    entries = tuple(
        ldcache.CachedLibrary(flags, n.encode(), p.encode()) for n, p in libraries.items()
    )
    return ldcache.write(ldcache.Cache(entries))


def image_of(cache: bytes | None = None, **looks: str) -> Image:
    """Return an image in Debian's layout. Each path maps to its state, or to the reason why it is
    unusable.
    """
    states = {
        "etc/vulkan/icd.d": "absent",
        "usr/share/vulkan/icd.d": "absent",
        f"{LIBDIR}/gbm": "absent",
        **looks,
    }
    return Image(
        LIBDIR,
        TARGET,
        cache,
        looks={
            path: PathInImage(state)
            if state in ("absent", "empty", "full")
            else PathInImage("unusable", state)  # type: ignore[arg-type]
            for path, state in states.items()
        },
    )


def plan_of(*capabilities: str, image: Image) -> Plan:
    return plan_container(MANIFEST, choose_share(MANIFEST, capabilities), GRANT, image)


def test_the_sample_follows_the_schema() -> None:
    validate(DOCUMENT)


def test_a_plan_is_described_for_operators() -> None:
    cache = cache_of(**{"libcuda.so.1": "/opt/cuda/libcuda.so.1"})
    plan = plan_of("compute", "utility", image=Image(LIBDIR, TARGET, cache))
    assert plan.describe() == [
        f"bind {GENERATION}/sets/compute,utility/lib64 -> /{TARGET} [ro,nosuid,nodev]",
        "bind /run/tidegate/containers/k1 -> /run/tidegate [ro,nosuid,nodev,noexec]",
        f"bind {GENERATION}/bin/nvidia-smi -> /usr/bin/nvidia-smi [ro,nosuid,nodev,file]",
        "bind /run/nvidia-persistenced -> /run/nvidia-persistenced [ro,nosuid,nodev,noexec]",
        "write /etc/ld.so.cache [3 libraries, required]",
    ]
    assert (plan.places, plan.skipped) == ((), ())


def test_sources_are_on_the_host_and_targets_in_the_container() -> None:
    for operation in plan_of("all", image=image_of()).operations:
        assert isinstance(operation, BindDirectory | BindFile)
        assert operation.source.startswith(
            ("/var/lib/tidegate/driver/", "/run/tidegate/containers/", "/run/nvidia-persistenced")
        )
        assert not operation.target.startswith("/")


def test_sources_in_the_generation_are_opened_below_its_descriptor() -> None:
    """The generation's path may lead to another generation when the source is opened."""
    image = image_of(cache_of(), **{ETC: "full", SHARE: "full"})._replace(target32=TARGET32)
    binds = [
        operation
        for operation in plan_of("all", image=image).operations
        if isinstance(operation, BindDirectory | BindFile)
    ]
    assert [operation.held for operation in binds] == [
        "lib64",
        "",
        "lib32",
        "bin/nvidia-smi",
        "bin/nvidia-ngx-updater",
        "data/vulkan-icd/nvidia_icd.json",
        "data/vulkan-icd/nvidia_layers.json",
        "data/gbm",
        "",
    ]
    for operation in binds:
        own = operation.source.startswith(f"{GENERATION}/")
        assert operation.source == f"{GENERATION}/{operation.held}" if own else not operation.held


def test_the_cache_gets_sonames_and_development_links_that_exist() -> None:
    assert DEFAULT.names64 == ("libcuda.so", "libcuda.so.1", "libnvidia-nvvm.so.4")
    assert choose_share(MANIFEST, ("graphics",)).names64 == (
        "libGLX_nvidia.so.0",
        "libcuda.so",
        "libcuda.so.1",
        "libnvidia-nvvm.so.4",
    )


def test_a_cache_that_already_has_the_entries_is_not_written() -> None:
    leads = (
        CacheMapping(TARGET, ("liba.so.1",)),
        CacheMapping(TARGET32, ("liba.so.1",), ldcache.FLAGS_I386),
    )
    operation = plan_cache(cache_of(), leads)
    assert isinstance(operation, WriteCache)
    assert (operation.strays, operation.by_cache, operation.added) == ((), "", 2)
    assert plan_cache(operation.content, leads) is None


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        (ldcache.FLAGS_I386, "the driver's 32-bit libraries"),
        (ldcache.FLAGS_AARCH64, "the driver's libraries"),
    ],
)
def test_a_cache_that_is_needed_but_cannot_be_written_is_an_error(
    tmp_path: Path, flags: int, what: str
) -> None:
    """The image has no /etc any more. The error names the libraries that the cache was to lead to."""
    operation = plan_cache(cache_of(), (CacheMapping(TARGET, ("liba.so.1",), flags, True),))
    assert operation is not None
    rootfd, procfd = (os.open(p, os.O_PATH | os.O_DIRECTORY) for p in (tmp_path, "/proc"))
    container = CreatedContainer.__new__(CreatedContainer)
    container.procfd = procfd
    applier = Applier(container, rootfd, Undo(), {})
    with pytest.raises(ImageError) as caught:
        applier.execute(operation, -1)
    os.close(rootfd)
    os.close(procfd)
    assert caught.value.line() == (
        f"tidegate: /etc/ld.so.cache in the image does not lead to {what} and cannot be replaced"
        " (No such file or directory); use a root file system that the runtime can write to"
    )


@pytest.mark.parametrize("cache", [None, b"", b"no cache", b"\x7fELF" * 100])
def test_a_file_that_is_not_a_cache_is_not_written(cache: bytes | None) -> None:
    assert plan_cache(cache, (CacheMapping(TARGET, ("liba.so.1",)),)) is None


def test_a_damaged_cache_matters_only_if_it_names_driver_libraries() -> None:
    broken = ldcache.NEW_MAGIC + b"\xff" * 60
    lead = CacheMapping(TARGET, ("liba.so.1",))
    assert plan_cache(broken, (lead,)) is None
    with pytest.raises(ImageError, match="is damaged"):
        plan_cache(broken + b"liba.so.1\0", (lead,))


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        (
            None,
            "the image has no ld.so.cache, and the driver's 32-bit libraries are found only through it",
        ),
        (b"no cache", "the image has no ld.so.cache, and"),
        (
            ldcache.NEW_MAGIC + b"\xff" * 60,
            "is damaged .*, but the driver's 32-bit libraries are found through it",
        ),
        (ldcache.OLD_HEADER.pack(ldcache.OLD_MAGIC, 0), "a format from before glibc 2.2"),
    ],
)
def test_compat32_needs_a_cache(cache: bytes | None, message: str) -> None:
    with pytest.raises(ImageError, match=message):
        plan_cache(
            cache, (CacheMapping(TARGET32, ("liba.so.1",), ldcache.FLAGS_I386, required=True),)
        )


@pytest.mark.parametrize(
    ("asked", "chosen"),
    [
        (("compute", "utility"), "sets/compute,utility/lib64"),
        (("utility",), "sets/compute,utility/lib64"),
        (("graphics",), "sets/compute,graphics,utility/lib64"),
        (("compute", "graphics"), "sets/compute,graphics,utility/lib64"),
        (("display",), "lib64"),
        (("compat32", "display"), "lib64"),
        (("all",), "lib64"),
    ],
)
def test_the_smallest_set_that_has_all_is_chosen(asked: tuple[str, ...], chosen: str) -> None:
    assert choose_share(MANIFEST, asked).mirror_set.lib64 == chosen


def test_the_set_determines_programs_places_and_binds() -> None:
    """Only graphics is requested, but the set also has utility, so its program and sockets are
    included.
    """
    share = choose_share(MANIFEST, ("graphics",))
    assert [p.path for p in share.programs] == ["bin/nvidia-smi", "bin/nvidia-ngx-updater"]
    assert [p.name for p in share.places] == ["vulkan-icd"]
    assert [b.path for b in share.binds] == ["/run/nvidia-persistenced"]
    assert [p.name for p in choose_share(MANIFEST, ("all",)).places] == ["vulkan-icd", "gbm"]
    assert (DEFAULT.places, [p.path for p in DEFAULT.programs]) == ((), ["bin/nvidia-smi"])


@pytest.mark.parametrize(
    ("asked", "line"),
    [
        (
            ("graphics", "ngx", "video"),
            (
                f"tidegate: this node's driver {V} does not provide ngx,video, only compute,display,graphics,utility;"
                " ask for these in tidegate.gpu/capabilities, or run `tidegate refresh` after installing the rest of"
                " the driver"
            ),
        ),
        (
            ("compat32", "graphics"),
            (
                f"tidegate: this node's driver {V} has no 32-bit libraries; install them and run `tidegate refresh`, or"
                " leave compat32 out of tidegate.gpu/capabilities"
            ),
        ),
    ],
)
def test_missing_capabilities_are_reported(asked: tuple[str, ...], line: str) -> None:
    with pytest.raises(NoMirrorError) as caught:
        choose_share(MANIFEST, asked)
    assert caught.value.line() == line


def test_it_is_an_error_if_no_set_has_all_capabilities() -> None:
    sets = copy.deepcopy(DOCUMENT["sets"])[1:]
    sets[1]["capabilities"] = ["compute", "utility", "video"]
    with pytest.raises(NoMirrorError, match="does not provide graphics,video together, only"):
        choose_share(changed(sets=sets), ("graphics", "video"))


def test_all_takes_32_bit_libraries_only_where_driver_and_image_have_them() -> None:
    assert choose_share(MANIFEST, ("all",)).compat32 == "offered"
    only64 = [s for s in DOCUMENT["sets"] if "lib32" not in s]
    assert choose_share(changed(sets=only64), ("all",)).compat32 == "no"
    cache = cache_of()
    plan = plan_of("all", image=image_of(cache)._replace(reason32="the image has no 32-bit glibc"))
    assert plan.skipped == ("compat32: the image has no 32-bit glibc",)
    plan = plan_of("all", image=image_of(cache)._replace(target32=TARGET32))
    assert f"bind {GENERATION}/lib32 -> /{TARGET32} [ro,nosuid,nodev]" in plan.describe()
    assert plan.describe()[-1] == "write /etc/ld.so.cache [5 libraries]"


def test_compat32_is_refused_if_the_image_does_not_support_it() -> None:
    """The user asked for 32-bit libraries explicitly."""
    with pytest.raises(ImageError) as caught:
        plan_of("compat32", "display", image=image_of()._replace(reason32="the image has none"))
    assert caught.value.line() == (
        "tidegate: the image has none; install 32-bit glibc in the image and run ldconfig in it, or leave compat32"
        " out of tidegate.gpu/capabilities"
    )


def test_the_cache_maps_each_word_size_to_its_own_directory() -> None:
    cache = cache_of(**{"libGLX_nvidia.so.0": "/old/libGLX_nvidia.so.0"}, flags=0x3)
    plan = plan_of("compat32", "display", image=image_of(cache)._replace(target32=TARGET32))
    write = plan.operations[-1]
    assert isinstance(write, WriteCache)
    assert write.strays == ("/old/libGLX_nvidia.so.0",)
    assert write.by_cache == "the driver's 32-bit libraries"
    after = ldcache.parse(write.content)
    assert after is not None
    assert [(e.flags, e.path.decode()) for e in after.entries if b"GLX" in e.soname] == [
        (0x303, f"/{TARGET}/libGLX_nvidia.so.0"),
        (0x3, f"/{TARGET32}/libGLX_nvidia.so.0"),
    ]


ETC, SHARE = "etc/vulkan/icd.d", "usr/share/vulkan/icd.d"


@pytest.mark.parametrize(
    ("etc", "share", "how", "target", "others"),
    [
        ("absent", "full", "directory", ETC, ()),
        ("empty", "absent", "directory", ETC, ()),
        ("full", "absent", "directory", SHARE, (f"/{ETC}: the image has files there",)),
        ("full", "empty", "directory", SHARE, (f"/{ETC}: the image has files there",)),
        ("full", "full", "files", ETC, ()),
        ("a file", "empty", "directory", SHARE, (f"/{ETC}: a file",)),
        ("a file", "full", "files", SHARE, (f"/{ETC}: a file",)),
        ("full", "a file", "files", ETC, ()),
        ("a file", "a loop", "skipped", "", (f"/{ETC}: a file", f"/{SHARE}: a loop")),
    ],
)
def test_the_target_of_a_place_that_is_searched_everywhere(
    etc: str, share: str, how: str, target: str, others: tuple[str, ...]
) -> None:
    """The first directory without files of the image is used; single files are used if all
    directories have some.
    """
    plan = plan_of("graphics", image=image_of(**{ETC: etc, SHARE: share}))
    (choice,) = plan.places
    assert (choice.how, choice.target, choice.others) == (how, target, others)
    made = [o.describe() for o in plan.operations if "data/" in o.describe()]
    source = f"{GENERATION}/data/vulkan-icd"
    expected = {
        "directory": [f"bind {source} -> /{target} [ro,nosuid,nodev,noexec]"],
        "files": [
            f"bind {source}/{name} -> /{target}/{name} [ro,nosuid,nodev,noexec,file]"
            for name in ("nvidia_icd.json", "nvidia_layers.json")
        ],
        "skipped": [],
    }
    assert made == expected[how]
    reason = f"place vulkan-icd: /{ETC}: a file; /{SHARE}: a loop"
    assert plan.skipped == ((reason,) if how == "skipped" else ())


@pytest.mark.parametrize(
    ("first", "second", "how", "target"),
    [
        ("absent", "absent", "directory", "etc/a"),
        ("empty", "empty", "directory", "etc/a"),
        ("absent", "empty", "directory", "usr/b"),
        ("absent", "full", "files", "usr/b"),
        ("full", "empty", "files", "etc/a"),
        ("a file", "full", "files", "usr/b"),
        ("absent", "a file", "directory", "etc/a"),
        ("a file", "absent", "skipped", ""),
    ],
)
def test_the_target_of_a_place_that_is_searched_in_one_directory(
    first: str, second: str, how: str, target: str
) -> None:
    """The first existing directory is that of the image's distribution."""
    place = {
        **DOCUMENT["places"][0],
        "targets": ["/etc/a", "/usr/b"],
        "looks": "one",
        "files": ["f"],
    }
    manifest = changed(places=[place])
    image = image_of(**{"etc/a": first, "usr/b": second})
    (choice,) = plan_container(manifest, choose_share(manifest, ("graphics",)), GRANT, image).places
    assert (choice.how, choice.target) == (how, target)


def test_files_below_the_library_directory_may_be_executed() -> None:
    """Programs map these files as code. All other files are data."""
    plan = plan_of("all", image=image_of())
    assert [o.describe() for o in plan.operations if "data/" in o.describe()] == [
        f"bind {GENERATION}/data/vulkan-icd -> /etc/vulkan/icd.d [ro,nosuid,nodev,noexec]",
        f"bind {GENERATION}/data/gbm -> /{LIBDIR}/gbm [ro,nosuid,nodev]",
    ]


def test_two_places_do_not_cover_each_other() -> None:
    other = {
        **DOCUMENT["places"][0],
        "name": "below",
        "targets": ["/etc/vulkan", "/etc/vulkan/icd.d/deep", "/usr/share/vulkan/icd.d"],
    }
    manifest = changed(places=[DOCUMENT["places"][0], other])
    image = image_of(**{"etc/vulkan": "empty", "etc/vulkan/icd.d/deep": "absent"})
    plan = plan_container(manifest, choose_share(manifest, ("graphics",)), GRANT, image)
    assert [c.target for c in plan.places] == ["etc/vulkan/icd.d", "usr/share/vulkan/icd.d"]
    assert plan.places[1].others == (
        "/etc/vulkan: other driver files are mounted there",
        "/etc/vulkan/icd.d/deep: other driver files are mounted there",
    )


def test_the_driver_store_of_wsl_may_be_executed() -> None:
    manifest = changed(
        driver={"version": V, "kind": "wsl"},
        binds=[{"path": "/usr/lib/wsl/drivers", "capability": "compute"}],
    )
    plan = plan_container(manifest, choose_share(manifest, ("compute",)), GRANT, image_of())
    assert plan.describe()[-1] == (
        "bind /usr/lib/wsl/drivers -> /usr/lib/wsl/drivers [ro,nosuid,nodev]"
    )


def put(path: Path, kind: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    match kind:
        case "empty":
            path.mkdir()
        case "full":
            path.mkdir()
            (path / "x").touch()
        case "file":
            path.touch()
        case "fifo":
            os.mkfifo(path)
        case "dangling":
            path.symlink_to("/nowhere/at/all")
        case "loop":
            path.symlink_to(path.name)
        case "host":
            path.symlink_to("/proc/self/root/etc")


@pytest.mark.parametrize(
    ("kind", "state", "reason"),
    [
        ("absent", "absent", ""),
        ("empty", "empty", ""),
        ("full", "full", ""),
        ("file", "unusable", "/etc/place is not a directory"),
        ("fifo", "unusable", "/etc/place is not a directory"),
        ("dangling", "unusable", "/etc/place is not a directory"),
        ("loop", "unusable", "/etc/place is not a directory"),
        ("host", "unusable", "/etc/place is not a directory"),
    ],
)
@pytest.mark.parametrize("below", ["", "/deep/er"])
def test_look_at_returns_the_state_of_a_path(
    tmp_path: Path, kind: str, state: str, reason: str, below: str
) -> None:
    (tmp_path / "etc").mkdir()
    put(tmp_path / "etc/place", kind)
    rootfd = os.open(tmp_path, os.O_PATH | os.O_DIRECTORY)
    look = look_at(rootfd, f"etc/place{below}")
    os.close(rootfd)
    if below and state in ("empty", "full"):
        state = "absent"  # the directory exists, and nothing below it
    assert look == PathInImage(state, reason)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("count", "width", "found"),
    [(1, 1, "0"), (3, 1, "0, 1, 2"), (9000, 200, r"[0-9]{117}\.\.\., \.\.\.")],
)
def test_a_directory_with_many_entries_is_not_read_to_its_end(
    tmp_path: Path, count: int, width: int, found: str
) -> None:
    """The mirror would be mounted on it, but the image has files in it. A few names are enough for
    the error.
    """
    (tmp_path / "lib64").mkdir()
    (tmp_path / "lib64/ld-linux-x86-64.so.2").write_bytes(b"glibc-hwcaps")
    target = tmp_path / TARGET
    target.mkdir(parents=True)
    (tmp_path / LIBDIR / "libc.so.6").touch()
    for i in range(count):
        (target / f"{i:0{width}}").touch()
    rootfd, procfd = (os.open(p, os.O_PATH | os.O_DIRECTORY) for p in (tmp_path, "/proc"))
    tracemalloc.start()
    with pytest.raises(ImageError, match=rf"/{TARGET} in the image is not empty \({found}\), "):
        inspect_image(rootfd, procfd, "x86_64")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    os.close(rootfd)
    os.close(procfd)
    assert peak < 1_500_000  # bytes; the loader is read in pieces of 1 MiB, 9000 names take 2 MiB


def make_node(tmp_path: Path, kind: str = "nvidia") -> tuple[Path, Path]:
    """Make a generation and put it in force; return the two files that its manifest watches."""
    watch = []
    for role in ("driver", "control"):
        file = tmp_path / role
        file.write_bytes(b"as it was")
        stat = file.stat()
        watch.append(
            {"path": str(file), "role": role, "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
        )
    generation = tmp_path / "drivers" / f"{V}-0123456789ab"
    generation.mkdir(parents=True)
    document = {
        **DOCUMENT,
        "driver": {"version": V, "kind": kind},
        "source": {"root": "/", "watch": watch},
    }
    validate(document)
    (generation / "manifest.json").write_text(json.dumps(document))
    (generation.parent / "current").symlink_to(generation.name)
    return tmp_path / "driver", tmp_path / "control"


@pytest.mark.parametrize("which", ["driver", "control"])
def test_a_fresh_mirror_passes_and_a_changed_host_does_not(tmp_path: Path, which: str) -> None:
    """Files are compared on hosts where no kernel module reports its version."""
    make_node(tmp_path)
    file = tmp_path / which
    manifest = read_manifest(str(tmp_path / "drivers"))
    assert manifest.directory == str(tmp_path / "drivers" / f"{V}-0123456789ab")
    check_fresh(manifest, None)
    file.write_bytes(b"newer")
    with pytest.raises(MirrorMismatchError, match=f"is stale: {file} has changed"):
        check_fresh(manifest, None)
    file.unlink()
    with pytest.raises(MirrorMismatchError, match=f"is stale: {file}: No such file"):
        check_fresh(manifest, None)


def test_an_upgraded_package_does_not_matter_while_the_same_module_runs(tmp_path: Path) -> None:
    """The mirror still has the libraries that match the module, and their control libraries."""
    driver, control = make_node(tmp_path)
    manifest = read_manifest(str(tmp_path / "drivers"))
    driver.unlink()
    control.write_bytes(b"newer")
    check_fresh(manifest, V)
    assert list(changed_files(manifest)) == [
        ("driver", f"{driver}: No such file or directory"),
        ("control", f"{control} has changed since the mirror was made"),
    ]


def test_a_module_of_another_version_is_refused_even_if_no_file_changed(tmp_path: Path) -> None:
    make_node(tmp_path)
    with pytest.raises(MirrorMismatchError) as caught:
        check_fresh(read_manifest(str(tmp_path / "drivers")), "580.126.09")
    assert caught.value.line() == (
        f"tidegate: mirror {V}-0123456789ab is for driver {V}, but the kernel module is 580.126.09; reboot or reload the"
        " module after a driver update, then run `tidegate refresh`"
    )


@pytest.mark.parametrize("kind", ["simulated", "wsl"])
def test_a_driver_without_a_kernel_module_does_not_ask_for_its_version(
    tmp_path: Path, kind: str
) -> None:
    """The host may have a real module in addition."""
    driver, _ = make_node(tmp_path, kind)
    manifest = read_manifest(str(tmp_path / "drivers"))
    check_fresh(manifest, "580.126.09")
    driver.write_bytes(b"newer")
    with pytest.raises(MirrorMismatchError, match="has changed"):
        check_fresh(manifest, V)


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.261.03  Mon Jun  9 17:42:14 UTC 2025\n",
            "535.261.03",
        ),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\n",
            "580.159.04",
        ),
        ("NVRM version: something else\n", None),
        ("", None),
    ],
)
def test_the_version_of_the_kernel_module_is_read(
    tmp_path: Path, text: str, version: str | None
) -> None:
    (tmp_path / "version").write_text(text)
    assert module_version(str(tmp_path / "version")) == version
    assert module_version(str(tmp_path / "absent")) is None
    assert module_version(str(tmp_path / "version" / "below")) is None
    with pytest.raises(MirrorMismatchError, match="Is a directory"):
        module_version(str(tmp_path))


def test_a_missing_mirror_is_reported_with_a_hint(tmp_path: Path) -> None:
    with pytest.raises(NoMirrorError) as caught:
        read_manifest(str(tmp_path))
    assert (
        caught.value.line()
        == f"tidegate: no driver mirror at {tmp_path}/current; run `tidegate refresh`"
    )


SET = DOCUMENT["sets"][2]
PLACE = DOCUMENT["places"][0]


@pytest.mark.parametrize(
    "change",
    [
        {"schema": 1},
        {"schema": 3},
        {"sets": None},
        {"sets": [{}]},
        {"sets": [{**SET, "lib64": "../../etc"}]},
        {"sets": [{**SET, "lib64": "/etc"}]},
        {"sets": [{**SET, "lib32": "a//b", "names32": []}]},
        {"sets": [{**SET, "lib32": "lib32"}]},
        {"sets": [{**SET, "names64": ["libcuda.so.1", ".."]}]},
        {"sets": [{**SET, "names64": ["../libcuda.so.1"]}]},
        {"sets": [{**SET, "names64": [7]}]},
        {"programs": [{"path": "bin/../../x", "capability": "utility"}]},
        {"places": [{**PLACE, "source": "/etc"}]},
        {"places": [{**PLACE, "targets": ["etc/x"]}]},
        {"places": [{**PLACE, "targets": ["/etc/../x"]}]},
        {"places": [{**PLACE, "targets": ["{libdir}/../x"]}]},
        {"places": [{**PLACE, "targets": ["{libdir}"]}]},
        {"places": [{**PLACE, "targets": ["/"]}]},
        {"places": [{**PLACE, "targets": []}]},
        {"places": [{**PLACE, "looks": "some"}]},
        {"places": [{**PLACE, "files": ["../x"]}]},
        {"places": [{**PLACE, "files": []}]},
        {"binds": [{"path": "run/x", "capability": "utility"}]},
        {"binds": [{"path": "/run/../etc", "capability": "utility"}]},
        {"binds": [{"path": "/", "capability": "utility"}]},
        {"files": [{}]},
        {"source": {"watch": [{"path": "/x"}]}},
        {"source": {"watch": [{"path": "/x", "role": "other", "size": 1, "mtime_ns": 1}]}},
        {"driver": "x"},
        {"driver": {"version": V, "kind": "amd"}},
    ],
)
def test_a_damaged_manifest_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    make_node(tmp_path)
    path = tmp_path / "drivers" / "current" / "manifest.json"
    path.write_text(json.dumps({**DOCUMENT, **change}))
    with pytest.raises(MirrorMismatchError, match="is not a manifest"):
        read_manifest(str(tmp_path / "drivers"))


def test_only_missing_and_unknown_members_of_a_manifest_are_listed() -> None:
    """A set may have 32-bit libraries, so their members are not listed."""
    entry = {**SET, "lib32": "lib32", "names32": [], "odd": 1}
    del entry["lib64"]
    with pytest.raises(ValueError, match=r"^missing or unexpected members: \['lib64', 'odd'\]$"):
        changed(sets=[entry])


def lock_of_another_process(directory: Path) -> bool:
    """Return whether another process could lock a generation exclusively, as `tidegate gc` does."""
    code = "import fcntl, os, sys; fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    done = subprocess.run(
        [sys.executable, "-c", code, str(directory)], check=False, stderr=subprocess.DEVNULL
    )
    return done.returncode == 0


def test_a_generation_is_held_while_it_is_read(tmp_path: Path) -> None:
    make_node(tmp_path)
    generation = tmp_path / "drivers" / f"{V}-0123456789ab"
    assert lock_of_another_process(generation)
    manifest = read_manifest(str(tmp_path / "drivers"))
    assert not lock_of_another_process(generation)
    assert not os.get_inheritable(manifest.hold)
    read_manifest(str(tmp_path / "drivers"))  # hooks do not exclude each other
    os.close(manifest.hold)


def test_a_generation_that_is_removed_before_it_is_locked_is_not_used(tmp_path: Path) -> None:
    """`tidegate gc` holds the lock while another generation is put in force; the hook reads the new
    one.
    """
    make_node(tmp_path)
    drivers = tmp_path / "drivers"
    old, new = drivers / f"{V}-0123456789ab", drivers / f"{V}-abababababab"
    new.mkdir()
    lock = os.open(old, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    got: list[str] = []
    reader = threading.Thread(target=lambda: got.append(hold_generation(str(drivers))[0]))
    reader.start()
    wait_for_a_waiter(old)
    assert got == []
    (drivers / "next").symlink_to(new.name)
    (drivers / "next").rename(drivers / "current")
    old.rename(drivers / "trash")
    os.close(lock)
    reader.join(10)
    assert got == [str(new)]


def wait_for_a_waiter(directory: Path) -> None:
    """Wait until /proc/locks shows, by an arrow, that a process is waiting for the lock of a
    directory.
    """
    inode = f":{directory.stat().st_ino} "
    for _ in range(1000):
        lines = Path("/proc/locks").read_text().splitlines()
        if any("->" in line and inode in line for line in lines):
            return
        threading.Event().wait(0.01)
    pytest.fail("no process waits for the lock")


def test_a_link_to_a_missing_generation_is_an_error(tmp_path: Path) -> None:
    make_node(tmp_path)
    (tmp_path / "drivers" / f"{V}-0123456789ab").rename(tmp_path / "trash")
    with pytest.raises(
        MirrorMismatchError, match=r"/current points to /.*, which no longer exists"
    ):
        read_manifest(str(tmp_path / "drivers"))


@pytest.mark.parametrize(
    "process",
    [
        {"cwd": "/\ud800"},
        {"env": ["LD_LIBRARY_PATH=/opt/\ud800"]},
        {"env": ["PATH=/opt/\ud800"], "args": ["true"]},
        {"args": ["/bin/\ud800"]},
        {"cwd": "/\0"},
    ],
)
def test_half_a_surrogate_pair_in_a_path_is_refused_in_one_line(process: dict[str, Any]) -> None:
    """A config.json can contain one as an escape. It must not cause an internal error."""
    with pytest.raises(BundleError, match=r"process in config.json is .*, not a path"):
        search_path(-1, -1, IMAGE, {"process": {"cwd": "/", **process}})


def test_values_that_are_not_used_as_paths_may_be_anything() -> None:
    odd = {"cwd": 3, "args": [], "env": ["A=\ud800", 3, "LD_LIBRARY_PATH=/a:b;"]}
    assert search_path(-1, -1, IMAGE, {"process": odd}) == ["a", "b", ""]


def test_tokens_in_a_search_path_are_expanded_as_by_a_loader(tmp_path: Path) -> None:
    (tmp_path / "opt/app").mkdir(parents=True)
    (tmp_path / "usr/bin").mkdir(parents=True)
    (tmp_path / "opt/app/run").write_text("#!/bin/sh")
    (tmp_path / "usr/bin/run").symlink_to("/opt/app/run")
    names = "$ORIGIN/../lib:${ORIGIN}:/x/$LIB:/x/${PLATFORM}:y"
    process = {
        "cwd": "/w",
        "args": ["run"],
        "env": ["PATH=/bin:/usr/bin", f"LD_LIBRARY_PATH={names}"],
    }
    rootfd, procfd = (os.open(path, os.O_PATH | os.O_DIRECTORY) for path in (tmp_path, "/proc"))
    found = search_path(rootfd, procfd, IMAGE, {"process": process})
    os.close(rootfd)
    os.close(procfd)
    platforms = ["x/x86_64", "x/haswell", "x/xeon_phi"]
    assert found == ["opt/app/../lib", "opt/app", "x/lib/x86_64-linux-gnu", *platforms, "w/y"]


@pytest.mark.parametrize("there", ["glibc-hwcaps", "glibc-hwcaps/x86-64-v2"])
def test_a_directory_whose_links_lead_to_the_target_needs_no_mount(
    tmp_path: Path, there: str
) -> None:
    """No other mount is necessary, or possible: the link leads to Tidegate's own mount."""
    (tmp_path / LIBDIR / there).mkdir(parents=True)
    (tmp_path / "opt/lib").mkdir(parents=True)
    (tmp_path / "opt/lib/libcuda.so.1").touch()
    link = tmp_path / "opt/lib/glibc-hwcaps"
    link.symlink_to(f"/{LIBDIR}/glibc-hwcaps")
    rootfd = os.open(tmp_path, os.O_PATH | os.O_DIRECTORY)
    image = look_for_drivers(rootfd, Image(LIBDIR, TARGET, None), ["opt/lib"])
    link.unlink()
    other = look_for_drivers(rootfd, Image(LIBDIR, TARGET, None), ["opt/lib"])
    os.close(rootfd)
    assert (image.own, other.own) == ((), ("opt/lib",))


def look(tmp_path: Path, *search: str) -> Image:
    rootfd = os.open(tmp_path, os.O_PATH | os.O_DIRECTORY)
    try:
        return look_for_drivers(rootfd, Image(LIBDIR, TARGET, None), list(search))
    finally:
        os.close(rootfd)


def test_a_directory_named_libcuda_is_not_a_driver(tmp_path: Path) -> None:
    (tmp_path / LIBDIR).mkdir(parents=True)
    (tmp_path / "opt/lib/libcuda.so.1").mkdir(parents=True)
    (tmp_path / LIBDIR / "glibc-hwcaps/x86-64-v3/libcuda.so.1").mkdir(parents=True)
    assert look(tmp_path, "opt/lib").own == ()


def test_a_path_through_links_and_dots_is_refused(tmp_path: Path) -> None:
    """Resolved as text, the path is not the directory that a loader searches."""
    (tmp_path / "srv/app").mkdir(parents=True)
    (tmp_path / "srv/lib").mkdir()
    (tmp_path / "srv/lib/libcuda.so.1").touch()
    (tmp_path / "opt/lib").mkdir(parents=True)
    (tmp_path / "opt/link").symlink_to("/srv/app")
    with pytest.raises(ImageError, match=r"/opt/link/../lib has a driver .* links and \.\."):
        look(tmp_path, "opt/link/../lib")
    assert look(tmp_path, "opt/link/../../srv/../srv/lib").own == ("srv/lib",)


def inspect(tmp_path: Path) -> Image:
    rootfd, procfd = (os.open(p, os.O_PATH | os.O_DIRECTORY) for p in (tmp_path, "/proc"))
    try:
        return inspect_image(rootfd, procfd, "x86_64")
    finally:
        os.close(rootfd)
        os.close(procfd)


def test_a_directory_named_libc_is_not_glibc(tmp_path: Path) -> None:
    """The next directory may have a glibc."""
    (tmp_path / "usr/lib64").mkdir(parents=True)
    (tmp_path / "usr/lib64/ld-linux-x86-64.so.2").write_bytes(b"glibc-hwcaps")
    (tmp_path / LIBDIR / "libc.so.6").mkdir(parents=True)
    with pytest.raises(UnservedImageError, match="the image has no glibc"):
        inspect(tmp_path)
    (tmp_path / "usr/lib64/libc.so.6").touch()
    assert inspect(tmp_path).library_dir == "usr/lib64"


@pytest.mark.parametrize("kind", ["file", "dangling link", "fifo"])
def test_a_target_that_is_not_a_directory_is_refused(tmp_path: Path, kind: str) -> None:
    (tmp_path / "lib64").mkdir()
    (tmp_path / "lib64/ld-linux-x86-64.so.2").write_bytes(b"glibc-hwcaps")
    target = tmp_path / TARGET
    target.parent.mkdir(parents=True)
    (tmp_path / LIBDIR / "libc.so.6").touch()
    match kind:
        case "file":
            target.touch()
        case "fifo":
            os.mkfifo(target)
        case _:
            target.symlink_to("nowhere")
    with pytest.raises(ImageError, match=rf"/{TARGET} in the image is not a directory, "):
        inspect(tmp_path)


def test_platform_is_expanded_to_all_possible_values() -> None:
    """The value depends on the node's processor, so all possible values are checked."""
    process = {"env": ["LD_LIBRARY_PATH=/opt/$PLATFORM/lib:/a/${PLATFORM}"]}
    found = search_path(-1, -1, IMAGE, {"process": process})
    assert found == [
        *(f"opt/{platform}/lib" for platform in ("x86_64", "haswell", "xeon_phi")),
        *(f"a/{platform}" for platform in ("x86_64", "haswell", "xeon_phi")),
    ]


def test_a_search_path_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each directory takes a path walk in the image, so an image must not determine their number."""
    limit = oci_hook.image.SEARCH_LIMIT
    names = ":".join(f"/{n}" for n in range(limit + 1))
    with pytest.raises(ImageError, match="LD_LIBRARY_PATH names 257 directories"):
        search_path(-1, -1, IMAGE, {"process": {"env": [f"LD_LIBRARY_PATH={names}"]}})
    tried: list[str] = []

    def nothing(_root: int, _proc: int, path: str) -> None:
        tried.append(path)

    monkeypatch.setattr(oci_hook.image, "_look_at_program", nothing)
    process = {"args": ["run"], "env": [f"PATH={names}"]}
    assert search_path(-1, -1, IMAGE, {"process": process}) == []
    assert len(tried) == limit
    monkeypatch.setattr(oci_hook.image, "_look_at_program", lambda *_: ("/", names))
    assert len(search_path(-1, -1, IMAGE, {"process": process})) == limit


def test_the_search_for_compat_directories_has_limits_and_leaves_none_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other entries do not hide a directory with a driver; beyond a limit the image is refused."""
    limit = oci_hook.image.SEARCH_LIMIT
    monkeypatch.setattr(oci_hook.image, "LISTING_LIMIT", 3 * limit)
    rootfd = os.open(tmp_path, os.O_PATH | os.O_DIRECTORY)

    def fill(start: str, n: int) -> list[str]:
        for i in range(n):
            (tmp_path / f"usr/local/{start}-{i}").mkdir(parents=True, exist_ok=True)
        return oci_hook.image._compat_directories(rootfd)

    try:
        fill("other", 2 * limit - 1)
        assert len(fill("cuda", limit)) == limit * len(oci_hook.image.COMPAT)
        with pytest.raises(ImageError, match="more than 256 whose names start with cuda"):
            fill("cuda", limit + 1)
        (tmp_path / "usr/local/cuda-0").rmdir()
        with pytest.raises(ImageError, match="/usr/local in the image has more than 768 entries"):
            fill("more", 2)
    finally:
        os.close(rootfd)


def test_a_manifest_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_node(tmp_path)
    assert read_manifest(str(tmp_path / "drivers")).version == V
    monkeypatch.setattr("oci_hook.manifest.MANIFEST_LIMIT", 100)
    with pytest.raises(MirrorMismatchError, match=r"manifest.json is larger than 100 bytes"):
        read_manifest(str(tmp_path / "drivers"))
