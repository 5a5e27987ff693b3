"""Images of every kind under a real governor, on a simulated GPU: no container gets more than its quota, whatever its
image contains.

`assert_governed` checks the program's output: with a quota of 2 GiB, our library refuses it 3 GiB and gives it 1 GiB. Each kind
of image is started by runc and by crun. docs/reference/images.md has a row for each.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.machine import Simulated, make_bundle
from bench.node import BenchNode
from tests.container.bundles import (
    LIBDIR,
    ContainerResult,
    DiskBundle,
    Runtime,
    add_user_namespace,
    compile_c,
    make_library,
)

GIB = 1 << 30
CUDA = "usr/local/cuda-12.4"
COMPAT = f"{CUDA}/compat"
ASK_C = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
/*
 * Allocates each of the given sizes, and prints which library did so. The program may be linked
 * with an RPATH.
 */
int main(int argc, char **argv) {
        void *cuda = dlopen("libcuda.so.1", RTLD_NOW), *context;
        if (!cuda)
                return puts(dlerror()), 1;
        int (*init)(unsigned) = (int (*)(unsigned))dlsym(cuda, "cuInit");
        int (*retain)(void **, int) = (int (*)(void **, int))dlsym(cuda, "cuDevicePrimaryCtxRetain");
        int (*current)(void *) = (int (*)(void *))dlsym(cuda, "cuCtxSetCurrent");
        int (*allocate)(unsigned long long *, size_t) =
                (int (*)(unsigned long long *, size_t))dlsym(cuda, "cuMemAlloc_v2");
        unsigned long long at;
        Dl_info info;
        if (!init || init(0) || retain(&context, 0) || current(context))
                return puts("no context"), 1;
        for (int i = 1; i < argc; i++)
                printf("%d ", allocate(&at, strtoull(argv[i], NULL, 0)));
        dladdr((void *)init, &info);
        printf("%s\n", info.dli_fname);
        return 0;
}
"""
QUICK_LEVELS = {
    "default": "x86-64-v3",
    "opt": "x86-64-v4",
    "compat": "x86-64-v2",
    "rpath": "x86-64-v3",
}
REFUSED, GIVEN = 2, 0  # CUDA_ERROR_OUT_OF_MEMORY, CUDA_SUCCESS


class Images(Simulated):
    """The simulated GPU, with a program that allocates more than its quota."""

    def __init__(self, work: Path, build: Path) -> None:
        super().__init__(work, build)
        self.ask = compile_c(ASK_C, work / "ask", "-ldl")
        self.programs.append(self.ask)


@pytest.fixture(scope="module")
def site(
    tmp_path_factory: pytest.TempPathFactory, build_dir: Path, require: Callable[..., None]
) -> Iterator[BenchNode]:
    require("gcc", "runc")
    with BenchNode(Images(tmp_path_factory.mktemp("images"), build_dir)) as node:
        yield node


Make = Callable[..., DiskBundle]


@pytest.fixture
def make(site: BenchNode, tmp_path: Path) -> Make:
    """Return a function that makes a bundle with a quota of 2 GiB and a program that requests
    3 GiB.
    """

    def make_one(*program: str, **annotations: str) -> DiskBundle:
        import json

        path = tmp_path / "bundle"
        asked = {"memory": "2Gi", "compute": "40", **annotations}
        make_bundle(
            path,
            machine=site.machine,
            name="image",
            arguments=program or ("/usr/bin/ask", str(3 * GIB), str(GIB)),
            annotations={f"tidegate.gpu/{key}": value for key, value in asked.items()},
            hook=site.hook_arguments(),
        )
        bundle = DiskBundle(path, path / "rootfs", json.loads((path / "config.json").read_text()))
        bundle.config["linux"]["namespaces"] = [
            n for n in bundle.config["linux"]["namespaces"] if n["type"] != "network"
        ]
        return bundle

    return make_one


def assert_governed(ran: ContainerResult, library: str = "") -> None:
    """Check that our library answered the program."""
    assert ran.status == 0, ran.stdout + ran.stderr
    words = ran.stdout.split()
    assert words[:2] == [str(REFUSED), str(GIVEN)], ran.stdout
    assert "/glibc-hwcaps/x86-64-v2/libcuda.so.1" in words[2] or words[2] == library, words


def ldconfig(bundle: DiskBundle, *directories: str) -> None:
    """Write the image's ld.so.cache, with these directories besides the loader's own."""
    (bundle.rootfs / "etc/ld.so.conf").write_text("".join(f"/{d}\n" for d in directories))
    subprocess.run(["ldconfig", "-r", str(bundle.rootfs), "-X"], check=True)


def own_driver(bundle: DiskBundle, site: BenchNode, directory: str) -> None:
    """Put a driver of the image's own into a directory: the simulated GPU's driver, without the
    control library.
    """
    (bundle.rootfs / directory).mkdir(parents=True, exist_ok=True)
    built = site.machine.build / "simgpu"
    for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
        shutil.copy(built / name, bundle.rootfs / directory / f"{name}.999")
        (bundle.rootfs / directory / name).symlink_to(f"{name}.999")


def environment(bundle: DiskBundle, path: str) -> None:
    bundle.config["process"]["env"].append(f"LD_LIBRARY_PATH={path}")


def test_a_driver_of_the_images_own_is_not_governed_without_tidegate(
    site: BenchNode, make: Make, runtime: Runtime
) -> None:
    """The premise of the tests below: without Tidegate the image's own driver is used, and gives
    the program what it asks for.
    """
    bundle = make(driver="optional")
    own_driver(bundle, site, COMPAT)
    environment(bundle, f"/{COMPAT}")
    del bundle.config["hooks"]
    ran = runtime.run(bundle)
    assert ran.stdout.split() == [str(GIVEN), str(GIVEN), f"/{COMPAT}/libcuda.so.1"], ran.stderr


@pytest.mark.parametrize("layout", ["debian", "fedora", "distroless"])
def test_a_layout_is_governed(make: Make, runtime: Runtime, layout: str) -> None:
    """The layouts are those with and without ld.so.cache, with libraries below a triplet or in
    /usr/lib64, and with only glibc and the program.
    """
    bundle = make()
    root = bundle.rootfs
    if layout == "fedora":
        for library in (root / LIBDIR).iterdir():
            library.rename(root / "usr/lib64" / library.name)
        (root / LIBDIR).rmdir()
        ldconfig(bundle, "usr/lib64")
    elif layout == "debian":
        ldconfig(bundle)
    else:
        assert sorted(p.name for p in (root / "usr/bin").iterdir()) == [
            "ask",
            "burner",
            "simgpu-workload",
        ]
        assert not (root / "etc/ld.so.cache").exists()
    assert_governed(runtime.run(bundle))


@pytest.mark.parametrize("kind", ["read-only root", "user namespace"])
def test_a_restricted_container_is_governed(make: Make, runtime: Runtime, kind: str) -> None:
    bundle = make()
    if kind == "read-only root":
        bundle.config["root"]["readonly"] = True
    else:
        add_user_namespace(bundle)
        for directory in [bundle.path, *bundle.path.parents][:-2]:
            directory.chmod(directory.stat().st_mode | 0o011)
    assert_governed(runtime.run(bundle))


@pytest.mark.parametrize("search", ["compat", "link", "lib.real", "relative", "default", "opt"])
def test_a_driver_of_the_images_own_comes_after_ours(
    site: BenchNode, make: Make, runtime: Runtime, search: str
) -> None:
    """CUDA's compat packages, or any other directory, come first on LD_LIBRARY_PATH."""
    bundle = make()
    place, path = {
        "compat": (COMPAT, f"/{COMPAT}:/usr/local/nvidia/lib64"),
        "link": (COMPAT, "/usr/local/cuda/compat"),
        "lib.real": (f"{COMPAT}/lib.real", "/usr/local/cuda/compat/lib"),
        "relative": (COMPAT, f"{COMPAT};"),
        "default": (LIBDIR, f"/{LIBDIR}"),
        "opt": ("opt/app/lib", "/nowhere:/opt//app/./lib/"),
    }[search]
    own_driver(bundle, site, place)
    (bundle.rootfs / "usr/local").mkdir(exist_ok=True)
    (bundle.rootfs / "usr/local/cuda").symlink_to("/" + CUDA)
    if search == "lib.real":
        (bundle.rootfs / COMPAT / "lib").symlink_to("lib.real")
    environment(bundle, path)
    assert_governed(runtime.run(bundle))


def test_compat_that_an_entry_point_puts_on_the_path_comes_after_ours(
    site: BenchNode, make: Make, runtime: Runtime
) -> None:
    """Nothing in config.json names the directory: a script of the image, or `exec` with an
    environment, puts it on the path.
    """
    bundle = make(
        "/usr/bin/env", f"LD_LIBRARY_PATH=/{COMPAT}", "/usr/bin/ask", str(3 * GIB), str(GIB)
    )
    shutil.copy("/usr/bin/env", bundle.rootfs / "usr/bin/env")
    own_driver(bundle, site, COMPAT)
    assert_governed(runtime.run(bundle))


@pytest.mark.parametrize("tags", ["--disable-new-dtags", "--enable-new-dtags"])
@pytest.mark.parametrize("path", ["/opt/app/lib", "$ORIGIN/../lib", "$ORIGIN", "$ORIGIN/../$LIB"])
def test_a_program_whose_rpath_leads_to_its_own_driver_gets_ours(
    site: BenchNode, make: Make, runtime: Runtime, path: str, tags: str
) -> None:
    """The path is in DT_RPATH, which is searched before everything else, or in DT_RUNPATH; PATH
    leads to the program through a link.
    """
    own = {
        "$ORIGIN": "opt/app/bin",
        "$ORIGIN/../$LIB": "opt/app/lib/x86_64-linux-gnu",
    }.get(path, "opt/app/lib")
    bundle = make("ask-rpath", str(3 * GIB), str(GIB))
    compile_c(ASK_C, bundle.rootfs / "opt/app/bin/ask-rpath", "-ldl", f"-Wl,{tags},-rpath,{path}")
    (bundle.rootfs / "opt/bin").mkdir()
    (bundle.rootfs / "opt/bin/ask-rpath").symlink_to("../app/bin/ask-rpath")
    bundle.config["process"]["env"].append("PATH=/nowhere:/opt/bin")
    own_driver(bundle, site, own)
    assert_governed(runtime.run(bundle))


@pytest.mark.parametrize("below", ["tls", "haswell", "haswell/avx512_1/x86_64", "x86_64"])
def test_a_driver_that_an_older_loader_finds_below_comes_after_ours(
    site: BenchNode, make: Make, runtime: Runtime, below: str
) -> None:
    """Loaders up to glibc 2.36 search these subdirectories. The directory that LD_LIBRARY_PATH
    names does not itself contain a driver.
    """
    bundle = make()
    own_driver(bundle, site, f"opt/app/lib/{below}")
    environment(bundle, "/opt/app/lib")
    assert_governed(runtime.run(bundle))


@pytest.mark.parametrize("platform", ["haswell", "x86_64"])
def test_a_driver_behind_platform_comes_after_ours(
    site: BenchNode, make: Make, runtime: Runtime, platform: str
) -> None:
    """A loader replaces $PLATFORM by one of these, depending on the processor."""
    bundle = make()
    own_driver(bundle, site, f"opt/{platform}/lib")
    environment(bundle, "/opt/$PLATFORM/lib")
    assert_governed(runtime.run(bundle))


def test_a_driver_in_a_directory_that_is_searched_before_glibc_s_comes_after_ours(
    site: BenchNode, make: Make, runtime: Runtime
) -> None:
    """In this root, /lib is not a link to /usr/lib: a loader searches /lib first."""
    bundle = make()
    (bundle.rootfs / "lib").unlink()
    own_driver(bundle, site, "lib/x86_64-linux-gnu")
    assert_governed(runtime.run(bundle))


BEFORE = [
    pytest.param(place, level, marks=() if QUICK_LEVELS.get(place) == level else pytest.mark.slow)
    for place in ("default", "compat", "opt", "rpath", "cache")
    for level in ("x86-64-v4", "x86-64-v3", "x86-64-v2")
]


@pytest.mark.parametrize(("place", "level"), BEFORE)
def test_a_driver_where_a_loader_looks_before_ours_is_refused(
    site: BenchNode, make: Make, runtime: Runtime, place: str, level: str
) -> None:
    """Nothing is mounted over such a directory, because that would hide the image's other libraries for newer processors."""
    bundle = make(*(["/opt/ask", str(3 * GIB), str(GIB)] if place == "rpath" else []))
    directory = {"default": LIBDIR, "compat": COMPAT}.get(place, "opt/app/lib")
    if place == "rpath":
        compile_c(ASK_C, bundle.rootfs / "opt/ask", "-ldl", "-Wl,-rpath,$ORIGIN/app/lib")
    own_driver(bundle, site, f"{directory}/glibc-hwcaps/{level}")
    if place == "cache":
        # The image's cache also leads to the directory. The hook could replace the cache, but it
        # cannot control the search along LD_LIBRARY_PATH.
        ldconfig(bundle, directory)
    environment(bundle, f"/{directory}")
    ran = runtime.run(bundle)
    assert (ran.status != 0, ran.stdout) == (True, "")
    if runtime.name == "runc":
        assert f"tidegate: /{directory}/glibc-hwcaps/{level} " in ran.stderr
        assert "libcuda.so.1" in ran.stderr
        assert ran.stderr.count("tidegate: ") == 1
    del bundle.config["hooks"]
    ran = runtime.run(bundle)
    if Path("/proc/cpuinfo").read_text().count("avx512vl"):  # what a loader requires for v4
        assert ran.stdout.split()[:2] == [str(GIVEN), str(GIVEN)], ran.stderr


def test_a_cache_does_not_lead_to_a_driver_for_newer_processors(
    site: BenchNode, make: Make, runtime: Runtime
) -> None:
    """Only the cache names the directory, and the hook makes the cache lead to our library."""
    bundle = make()
    own_driver(bundle, site, "opt/app/lib/glibc-hwcaps/x86-64-v3")
    own_driver(bundle, site, "opt/app/lib")
    ldconfig(bundle, "opt/app/lib")
    assert_governed(runtime.run(bundle))


@pytest.mark.parametrize("cache", ["leads elsewhere", "nothing else", "damaged", "cut", "empty"])
def test_a_cache_does_not_lead_past_us(
    site: BenchNode, make: Make, runtime: Runtime, cache: str
) -> None:
    """The container is governed, or refused with the message about a damaged cache that names the
    driver's libraries.
    """
    bundle = make()
    own_driver(bundle, site, "opt/cuda")
    ldconfig(bundle, "opt/cuda")
    path = bundle.rootfs / "etc/ld.so.cache"
    data = path.read_bytes()
    if cache == "nothing else":
        subprocess.run(
            ["ldconfig", "-X", "-n", "-C", str(path), "-r", str(bundle.rootfs), "/opt/cuda"],
            check=True,
        )
        subprocess.run(["ldconfig", "-r", str(bundle.rootfs), "-X"], check=True)
    path.write_bytes(
        {
            "damaged": data[:60] + b"\xff" * 40 + data[100:],
            "cut": data[: len(data) * 2 // 3],
            "empty": b"",
        }.get(cache, data)
    )
    ran = runtime.run(bundle)
    if cache == "damaged":
        assert ran.status != 0
        if runtime.name == "runc":
            assert "tidegate: /etc/ld.so.cache in the image is damaged" in ran.stderr
        assert ran.stdout == ""
    else:
        assert_governed(ran)


def test_a_driver_in_a_volume_that_the_path_names_is_refused(
    site: BenchNode, make: Make, runtime: Runtime, tmp_path: Path
) -> None:
    """GKE and older operators provide the real driver like this; the hook puts nothing into a
    directory of the host.
    """
    bundle = make()
    volume = DiskBundle(tmp_path, tmp_path)
    own_driver(volume, site, "host-nvidia/lib64")
    bundle.config["mounts"].append(
        {
            "destination": "/usr/local/nvidia",
            "type": "bind",
            "source": str(tmp_path / "host-nvidia"),
            "options": ["rbind", "ro"],
        }
    )
    environment(bundle, "/usr/local/nvidia/lib:/usr/local/nvidia/lib64")
    ran = runtime.run(bundle)
    assert (ran.status != 0, ran.stdout) == (True, "")
    if runtime.name == "runc":
        assert (
            "tidegate: /usr/local/nvidia/lib64 has a driver of its own (libcuda.so.1)" in ran.stderr
        )


@pytest.mark.parametrize("hooked", [True, False])
@pytest.mark.parametrize(
    ("path", "link"),
    [
        ("/proc/self/root/opt/own", None),
        ("/proc/thread-self/root/opt/own", None),
        ("/proc/1/root/opt/own", None),
        ("/dev/fd/../root/opt/own", None),
        ("/opt/link/own", ("opt/link", "/proc/self/root/opt")),
        ("/opt/other", ("opt/other/libcuda.so.1", "../../proc/self/root/opt/own/libcuda.so.1")),
        (f"/{LIBDIR}", (f"{LIBDIR}/glibc-hwcaps", "/proc/self/root/opt/own/glibc-hwcaps")),
    ],
)
def test_a_driver_that_only_a_process_inside_finds_is_refused(
    site: BenchNode,
    make: Make,
    runtime: Runtime,
    path: str,
    link: tuple[str, str] | None,
    *,
    hooked: bool,
) -> None:
    """For a process inside, /proc/self/root is the container's own root; a lookup from outside does not follow it."""
    bundle = make()
    own_driver(bundle, site, "opt/own/glibc-hwcaps/x86-64-v2")
    own_driver(bundle, site, "opt/own")
    if link:
        (bundle.rootfs / link[0]).parent.mkdir(parents=True, exist_ok=True)
        (bundle.rootfs / link[0]).symlink_to(link[1])
    environment(bundle, path)
    if not hooked:
        del bundle.config["hooks"]
        ran = runtime.run(bundle)
        assert ran.stdout.split()[:2] == [str(GIVEN), str(GIVEN)], ran.stderr
        return
    ran = runtime.run(bundle)
    assert (ran.status != 0, ran.stdout) == (True, "")
    if runtime.name == "runc":
        assert "leads through /proc" in ran.stderr


@pytest.mark.parametrize("way", ["hook", "cdi hook", "mount"])
def test_a_driver_that_nvidias_toolkit_brings_is_refused(
    make: Make, runtime: Runtime, way: str
) -> None:
    """Chance must not decide which of the two drivers is found."""
    bundle = make()
    hooks: dict[str, Any] = bundle.config["hooks"]
    if way == "mount":
        bundle.config["mounts"].append(
            {
                "destination": f"/{LIBDIR}/libcuda.so.580.159.04",
                "type": "bind",
                "source": "/dev/null",
                "options": ["bind", "ro"],
            }
        )
    else:
        name = "nvidia-container-runtime-hook" if way == "hook" else "nvidia-cdi-hook"
        program = compile_c("int main(void) { return 0; }", bundle.path / name)
        stage = "prestart" if way == "hook" else "createContainer"
        hooks[stage] = [{"path": str(program), "args": [name], "env": ["A=b"]}]
    ran = runtime.run(bundle)
    assert (ran.status != 0, ran.stdout) == (True, "")
    if runtime.name == "runc":
        assert "brings its own driver" in ran.stderr


@pytest.mark.parametrize("driver", ["required", "optional"])
@pytest.mark.parametrize("kind", ["musl", "static", "no /usr/lib", "32-bit"])
def test_an_image_that_no_driver_can_serve(
    make: Make, runtime: Runtime, kind: str, driver: str
) -> None:
    """The refusal is one line; with `optional` the container runs without a GPU. A 32-bit glibc
    alone is not enough for libcuda.
    """
    bundle = make("/bin/hello", driver=driver)
    root = bundle.rootfs
    for path in root.iterdir():
        if path.is_symlink():
            path.unlink()
        elif path.name in ("usr", "lib", "lib64", "bin"):
            shutil.rmtree(path)
    (root / "bin").mkdir()
    compile_c(
        '#include <stdio.h>\nint main(void) { return !puts("hello"); }',
        root / "bin/hello",
        "-static",
    )
    message = "the image has no glibc"
    if kind == "musl":
        (root / "lib").mkdir()
        (root / "lib/ld-musl-x86_64.so.1").write_bytes(b"\x7fELF musl")
        message = "the image is built on musl"
    elif kind == "32-bit":
        (root / "usr/lib32").mkdir(parents=True)
        make_library(root / "usr/lib32/libc.so.6", "libc.so.6", "a libc", "-m32")
    elif kind == "static":
        (root / "usr/lib").mkdir(parents=True)
    ran = runtime.run(bundle)
    if driver == "optional":
        assert (ran.status, ran.stdout) == (0, "hello\n"), ran.stderr
        return
    assert (ran.status != 0, ran.stdout) == (True, "")
    if runtime.name == "runc":
        assert f"tidegate: {message}" in ran.stderr
        assert ran.stderr.count("tidegate: ") == 1
