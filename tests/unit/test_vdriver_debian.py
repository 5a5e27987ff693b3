"""The driver that Debian ships, read and mirrored. Downloads some 25 MB once, into build/driver-cache."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.conftest import lack
from tests.unit.vdriver_trees import put_control
from vdriver.discover import find_driver
from vdriver.elf import read_library
from vdriver.refresh import refresh

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / "build" / "driver-cache"
PACKAGES = {
    "current": (
        "libcuda1",
        "libnvidia-ml1",
        "nvidia-smi",
        "libnvidia-ptxjitcompiler1",
        "libnvidia-cfg1",
        "libnvidia-allocator1",
        "libcudadebugger1",
        "libnvidia-pkcs11-openssl3",
        "libnvidia-encode1",
        "libnvcuvid1",
        "nvidia-opencl-icd",
        "nvidia-cuda-mps",
    ),
    # A second driver in the same suite, in a directory that only an alternative leads to.
    "tesla": ("libnvidia-tesla-cuda1", "libnvidia-tesla-ml1"),
}

pytestmark = pytest.mark.slow


def debian_sources():
    """The system's own Debian mirror and key for bookworm, as deb822 with the component non-free."""
    for file in sorted(Path("/etc/apt/sources.list.d").glob("*.sources")):
        for stanza in re.split(r"\n\s*\n", file.read_text()):
            fields = dict(re.findall(r"^([A-Za-z-]+):[ \t]*(.*)$", stanza, re.MULTILINE))
            if "bookworm" in fields.get("Suites", "").split():
                fields["Components"] = "non-free"
                return "".join(f"{k}: {v}\n" for k, v in fields.items())
    return None


def download(names, directory):
    """Download packages with a configuration and a state of their own; the system's apt is not touched."""
    sources = debian_sources()
    if sources is None:
        lack("needs Debian 12's package sources")
    state = CACHE / "apt"
    for name in ("lists/partial", "archives/partial"):
        (state / name).mkdir(parents=True, exist_ok=True)
    directory.mkdir(parents=True)
    (state / "debian.sources").write_text(sources)
    options = {
        "Dir::Etc::sourcelist": state / "debian.sources",
        "Dir::Etc::sourceparts": "/dev/null",
        "Dir::State": state,
        "Dir::State::status": "/dev/null",
        "Dir::Cache": state,
        "APT::Architecture": "amd64",
        "APT::Sandbox::User": "",
        "Acquire::http::Timeout": "20",
        "Acquire::Retries": "1",
    }
    apt = ["apt-get", "-q", *(w for k, v in options.items() for w in ("-o", f"{k}={v}"))]
    for command in ([*apt, "update", "--error-on=any"], [*apt, "download", *names]):
        done = subprocess.run(
            command, cwd=directory, check=False, capture_output=True, text=True, timeout=300
        )
        if done.returncode:
            directory.rmdir()
            lack(f"cannot download Debian's driver ({done.stderr.strip().splitlines()[-1:]})")


@pytest.fixture(scope="module", params=sorted(PACKAGES))
def driver_root(request):
    """A root with the packages' files, and the alternatives that their maintainer scripts would set."""
    if not Path("/usr/bin/apt-get").exists() or not Path("/usr/bin/dpkg-deb").exists():
        lack("needs apt-get and dpkg-deb")
    root = CACHE / request.param / "root"
    if not root.exists():
        packages = CACHE / request.param / "packages"
        if not packages.exists():
            download(PACKAGES[request.param], packages)
        work = root.with_name("root.new")
        for package in sorted(packages.glob("*.deb")):
            subprocess.run(["dpkg-deb", "-x", package, work], check=True)
        alternatives = work / "etc/alternatives"
        alternatives.mkdir(parents=True, exist_ok=True)
        for link in sorted(work.glob("usr/lib/x86_64-linux-gnu/nvidia/*/lib*.so.[0-9]")):
            (alternatives / f"nvidia--{link.name}").symlink_to(f"/{link.relative_to(work)}")
            (work / "usr/lib/x86_64-linux-gnu" / link.name).symlink_to(
                f"/etc/alternatives/nvidia--{link.name}"
            )
        work.rename(root)
    return root


def libraries(root):
    return [p for p in sorted(root.rglob("*.so*")) if p.is_file() and not p.is_symlink()]


def readelf(path):
    text = subprocess.run(
        ["readelf", "-Wdhn", path],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "LC_ALL": "C"},
    ).stdout
    soname = re.search(r"\(SONAME\).*\[(.*)\]", text)
    runpath = re.search(r"\((?:RUNPATH|RPATH)\).*\[(.*)\]", text)
    build_id = re.search(r"Build ID: (\w+)", text)
    return (
        re.search(r"Class:\s+ELF(\d+)", text)[1],
        re.search(r"Machine:\s+(.*)", text)[1],
        soname and soname[1],
        tuple(re.findall(r"\(NEEDED\).*\[(.*)\]", text)),
        runpath and runpath[1],
        build_id and build_id[1],
    )


def test_every_library_reads_as_readelf_reads_it(driver_root):
    found = libraries(driver_root)
    assert len(found) >= 2
    machines = {"x86_64": "Advanced Micro Devices X86-64", "i386": "Intel 80386"}
    for path in found:
        ours = read_library(path)
        assert (
            str(ours.bits),
            machines[ours.machine],
            ours.soname,
            ours.needed,
            ours.runpath,
            ours.build_id,
        ) == readelf(path), path
        assert path.name.endswith(f".so.{ours.version}")


def test_the_driver_is_found_whole(driver_root):
    driver = find_driver(driver_root)
    version = driver.cuda.library.version
    assert driver.version == version
    assert driver.kind == "nvidia"
    assert driver.cuda.library.soname == "libcuda.so.1"
    assert driver.skipped == ()
    files = {driver.cuda.name, driver.nvml.name, *(f.name for f in driver.libraries)}
    assert files == {p.name for p in libraries(driver_root)}


def test_every_soname_of_the_mirror_resolves_to_a_file_that_has_it(driver_root, tmp_path):
    result = refresh(driver_root, tmp_path / "out", put_control(tmp_path / "control"))
    base = tmp_path / "out" / result.manifest.generation
    lib64 = base / "lib64"
    mirrored = {f.path.removeprefix("lib64/"): f for f in result.manifest.files}
    taken = {
        f.name for f in find_driver(driver_root).libraries if f.capability in ("compute", "utility")
    }
    assert taken <= mirrored.keys()
    for entry in result.manifest.files:
        path = base / entry.path
        assert path.resolve(strict=True).is_relative_to(base)
        if entry.role in ("library", "control") and entry.soname:
            assert read_library((lib64 / entry.soname).resolve()).soname == entry.soname
    # A library of the driver that another one needs is answered inside the mirror, or is none of the driver's.
    own = {p.name.partition(".so")[0] for p in libraries(driver_root)}
    for name in taken:
        for needed in read_library(lib64 / name).needed:
            if needed.partition(".so")[0] in own:
                assert (lib64 / needed).resolve(strict=True).is_relative_to(base)
    assert read_library(lib64 / "origin/libcuda-origin.so.1").soname == "libcuda.so.1"
    assert refresh(driver_root, tmp_path / "out", tmp_path / "control").changed is False
