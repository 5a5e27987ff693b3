"""Tests that read and mirror the drivers that Debian ships.

vdriver/libraries.toml names their packages. They are downloaded once into build/driver-cache, some
110 MB for each ordinary branch. If a suite has a later driver of the same branch by now, that
driver is read and mirrored, and the slow test of the packages' contents prints the new values for
the table.
"""

import contextlib
import fcntl
import json
import os
import re
import shlex
import shutil
import subprocess
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

from bench.readelf import exports_by_readelf, fields_by_readelf, fields_of, readelf
from tests.conftest import lack
from vdriver.discover import find_driver
from vdriver.elf import read_exports, read_library
from vdriver.errors import LibraryError
from vdriver.refresh import refresh
from vdriver.tables import read_tables
from vdriver.verify import verify

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / "build" / "driver-cache"
KEYS = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
COMPONENTS = "contrib non-free"
SMALL = {"large": [], "large32": [], "components": COMPONENTS, "components32": "non-free"}
# The keys that a stanza must have, each with an example, and the packages with the files that the
# tests look for.
KEYS_OF_A_BRANCH = {
    "version": '"550.163.01"',
    "suite": '"trixie"',
    "tier": '"slow"',
    "packages": '["libcuda1", "libnvidia-ml1"]',
    "packages32": '["libcuda1", "libnvidia-ml1"], or []',
}
PACKAGES = (
    "*cuda1", "*ml1", "*-smi", "*-opencl-icd", "*-vdpau-driver", "*-driver-bin", "nvidia*-alternative",
    "xserver-xorg-video-nvidia*",
)  # fmt: skip
# apt's messages for a name that the archive does not have. Any other failure is one of the network
# or of the mirror.
UNKNOWN = re.compile(
    "Unable to locate package|No packages found|no installation candidate|does not have a Release file"
)
TRIPLETS = ("", "i386-linux-gnu", "x86_64-linux-gnu")


def branches():
    """Yield the table's branches, and each ordinary one again, marked slow, with its large packages."""
    table = tomllib.loads((ROOT / "vdriver" / "libraries.toml").read_text())
    for number, stanza in enumerate(table["branch"], 1):
        name = stanza.get("version", f"number-{number}")
        branch = {"name": name, "large": [], "large32": [], "components": COMPONENTS} | stanza
        if stanza.get("tier") == "ordinary":
            yield pytest.param(branch | SMALL | {"whole": False}, id=name)
            name, branch = f"{name}-whole", branch | {"name": f"{name}-whole"}
        yield pytest.param(branch | {"whole": True}, id=name, marks=pytest.mark.slow)


def refuse(branch, what):
    """Fail the test, with one line about a wrong stanza."""
    version = branch["name"].removesuffix("-whole")
    pytest.fail(f"vdriver/libraries.toml: [[branch]] {version} {what}", pytrace=False)


def debian_sources(suite, components, components32):
    """Return deb822 sources of another suite on the mirrors that the system's own apt uses."""
    targets = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(REPO_URI)"],
        check=False,
        capture_output=True,
        text=True,
    )
    mirrors = {line.rstrip("/") for line in targets.stdout.splitlines()}
    mirror = min((m for m in mirrors if m.endswith("/debian")), default=None)
    if mirror is None or not KEYS.exists():
        lack("needs Debian's package sources and debian-archive-keyring")
    wanted = [(mirror, suite.removesuffix("-security"), components, "amd64")]
    # Only the needed indexes are requested: a mirror that is being updated can lack others.
    wanted.append((*wanted[0][:2], components32, "i386"))
    if suite.endswith("-security"):
        others = (m for m in mirrors if m.endswith("/debian-security"))
        uri = min(others, default=f"{mirror}-security")
        wanted.append((uri, suite, "non-free", "amd64 i386"))
    return "\n".join(
        f"Types: deb\nURIs: {uri}\nSuites: {name}\nComponents: {parts}\n"
        f"Architectures: {architectures}\nSigned-By: {KEYS}\n"
        for uri, name, parts, architectures in wanted
    )


def download(branch, directory):
    """Download packages with a separate apt configuration and state; the system's are not changed."""
    state = CACHE / "apt" / branch["suite"]
    for name in ("lists/partial", "archives/partial"):
        (state / name).mkdir(parents=True, exist_ok=True)
    suite, components = branch["suite"], branch["components"]
    components32 = branch.get("components32", components)
    (state / "debian.sources").write_text(debian_sources(suite, components, components32))
    options = {
        "Dir::Etc::sourcelist": state / "debian.sources",
        "Dir::Etc::sourceparts": "/dev/null",
        "Dir::State": state,
        "Dir::State::status": "/dev/null",
        "Dir::Cache": state,
        "APT::Architecture": "amd64",
        "APT::Architectures": "amd64,i386",
        "APT::Sandbox::User": "",
        "Acquire::http::Timeout": "20",
        "Acquire::Languages": "none",
        "Acquire::Retries": "1",
    }
    apt = ["apt-get", "-q", *(w for k, v in options.items() for w in ("-o", f"{k}={v}"))]
    names = [f"{n}:amd64" for n in branch["packages"] + branch["large"]]
    names += [f"{n}:i386" for n in branch["packages32"] + branch["large32"]]
    for command in ([*apt, "update", "--error-on=any"], [*apt, "download", *names]):
        done = subprocess.run(
            command, cwd=directory, check=False, capture_output=True, text=True, timeout=600
        )
        if not done.returncode:
            continue
        errors = [line for line in done.stderr.splitlines() if line.startswith("E: ")]
        unknown = [line.removeprefix("E: ") for line in errors if UNKNOWN.search(line)]
        if unknown:
            where = f"{suite} ({components}): {'; '.join(unknown)}"
            refuse(branch, f"names what is not in {where}; correct suite, components or packages")
        lack(f"cannot download Debian's driver ({' '.join(errors[:1])})")


def set_alternatives(root, script):
    """Set the links that a package's postinst would set with update-alternatives."""
    prefix = re.search(r'prefix="(.*--)"', script)[1]
    links = []
    for call in re.findall(r"^\s+\$\((add_(?:multiarch_)?slave .*)\)$", script, re.MULTILINE):
        command, *words = shlex.split(call)
        if command == "add_slave":
            link, name, source = words
            links.append((link, prefix + name, source))
            continue
        # The empty triplet means no subdirectory. As in the script, a name ends with its triplet.
        for triplet in TRIPLETS:
            top, below, file, source_top, *rest = words
            source = Path(source_top, triplet, *rest[:1], rest[2] if rest[2:] else file)
            name = f"{prefix}{file}-{triplet}".rstrip("-")
            links.append((str(Path(top, triplet, below, file)), name, str(source)))
    for link, name, source in re.findall(r"--install (\S+) (\S+) (/usr\S*)", script):
        links.append((link, name, source))
    for link, name, source in links:
        place, alternative = root / link[1:], root / "etc/alternatives" / name
        if not os.path.lexists(root / source[1:]) or os.path.lexists(place):
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(f"/etc/alternatives/{name}")
        alternative.symlink_to(source)


def unpack(packages, root):
    """Unpack packages into one root and set their alternatives: the driver's, then those of GLX."""
    scripts = {}
    for package in sorted(packages.glob("*.deb")):
        subprocess.run(["dpkg-deb", "-x", package, root], check=True)
        if "alternative" in package.name:
            postinst = ["dpkg-deb", "-I", package, "postinst"]
            scripts[package.name] = subprocess.run(
                postinst, check=True, capture_output=True, text=True
            ).stdout
    (root / "etc/alternatives").mkdir(parents=True, exist_ok=True)
    for _, script in sorted(scripts.items(), key=lambda item: item[0].startswith("glx-")):
        set_alternatives(root, script)


@contextlib.contextmanager
def alone(name):
    """Hold a lock of the cache, which excludes other test runs."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="module", params=branches())
def branch(request):
    """A branch of the table, checked for the keys and packages that the tests need."""
    stanza = request.param
    for key, example in KEYS_OF_A_BRANCH.items():
        if key not in stanza:
            refuse(stanza, f"has no {key}; write for example {key} = {example}")
    for pattern in PACKAGES:
        if not any(fnmatch(name, pattern) for name in stanza["packages"]):
            refuse(stanza, f"has no package {pattern}; add it to packages")
    return stanza


@pytest.fixture(scope="module")
def driver_root(branch):
    """A root with the packages' files, and the alternatives that their maintainer scripts would set."""
    if not shutil.which("apt-get") or not shutil.which("dpkg-deb"):
        lack("needs apt-get and dpkg-deb")
    place = CACHE / branch["name"]
    wanted = {
        key: branch[key]
        for key in ("suite", "components", "packages", "packages32", "large", "large32")
    }
    with alone(branch["suite"]):
        made_from = place / "branch.json"
        made = SMALL | json.loads(made_from.read_text()) if made_from.exists() else {}
        if made | wanted != made:
            shutil.rmtree(place, ignore_errors=True)
            (place / "packages").mkdir(parents=True)
            download(branch, place / "packages")
            unpack(place / "packages", place / "root")
            shutil.rmtree(place / "packages")
            made_from.write_text(json.dumps(wanted))
    return place / "root"


def libraries(root):
    return [p for p in sorted(root.rglob("*.so*")) if p.is_file() and not p.is_symlink()]


def everything(root):
    """Yield each regular file of the packages with read_library's result: (path, library, reason)."""
    for path in sorted(root.rglob("*")):
        if path.is_symlink() or not path.is_file():
            continue
        try:
            yield path, read_library(path), None
        except LibraryError as e:
            yield path, None, e.message.removeprefix(f"{path}: ")


def test_every_library_and_program_is_read_as_readelf_reads_it(driver_root, branch):
    bits = []
    for path, ours, _ in everything(driver_root):
        if ours is not None:
            bits.append(ours.bits)
            assert fields_of(ours) == fields_by_readelf(path), path
    # 340.108 has the fewest. The exact numbers of a branch are in its `seen`.
    assert bits.count(64) >= 22
    assert bits.count(32) >= 12 * bool(branch["packages32"])


@pytest.mark.slow
def test_the_packages_match_the_table(driver_root, branch):
    """To fix a failure, write the values of the error line into the table."""
    if not branch["whole"]:
        pytest.skip("the table counts the large packages too")
    found = [lib for path, lib, _ in everything(driver_root) if lib and ".so" in path.name]
    bits = [lib.bits for lib in found]
    seen = f"{bits.count(64)} 64-bit libraries, {bits.count(32)} 32-bit libraries"
    version = find_driver(driver_root).version
    if version != branch["version"]:
        carries = f"is not what {branch['suite']} carries"
        refuse(branch, f'{carries}; write version = "{version}" and seen = "{seen}"')
    if seen != branch.get("seen"):
        refuse(branch, f'has another seen than its packages; write seen = "{seen}"')


def test_every_library_and_program_exports_what_readelf_lists(driver_root):
    names = {}
    for path, ours, _ in everything(driver_root):
        if ours is not None:
            names[path.name] = read_exports(path)
            assert names[path.name] == exports_by_readelf(path), path
    cuda = next(n for name, n in names.items() if name.startswith("libcuda.so."))
    assert {"cuInit", "cuLaunchKernel", "cuMemAlloc_v2"} <= set(cuda)


def test_every_other_file_is_refused_and_readelf_agrees(driver_root):
    reasons = set()
    for path, ours, reason in everything(driver_root):
        if ours is not None:
            continue
        text = readelf(path, "-hl")
        if reason == "not an ELF file":
            # The last two messages are for a file that is shorter than a header.
            assert re.search(
                "Not an ELF file|Failed to read file('s magic number| header)", text.stderr
            ), path
        elif reason == "neither a library nor a program (ET_REL)":
            assert re.search(r"Type:\s+REL ", text.stdout), path
        else:
            # 470's firmware for a RISC-V core, with segments laid out for that core's loader.
            assert reason == "loaded segments overlap or are out of order", path
            addresses = [int(a, 16) for a in re.findall(r"LOAD\s+\S+\s+(\S+)", text.stdout)]
            assert addresses != sorted(addresses)
            assert path.parts[-4:-2] == ("firmware", "nvidia")
        reasons.add(reason)
    assert "not an ELF file" in reasons


def test_all_libraries_of_the_driver_are_found(driver_root):
    driver = find_driver(driver_root)
    assert driver.kind == "nvidia"
    assert driver.version == driver.cuda.library.version
    assert driver.cuda.library.soname == "libcuda.so.1"
    assert driver.skipped == ()
    assert {f.name for f in driver.programs} >= {"nvidia-smi"}
    bits = {64: {driver.cuda.name, driver.nvml.name}, 32: set()}
    bits[64] |= {f.name for f in driver.libraries} | {
        Path(f.path).name for f in driver.data if f.path
    }
    bits[32] |= {f.name for f in driver.libraries32}
    for path, ours, _ in everything(driver_root):
        # The OpenCL loader belongs to the image, like libGL.
        if ours is not None and ".so" in path.name and not path.name.startswith("libOpenCL."):
            assert path.name in bits[ours.bits], path


def test_configuration_and_modules_are_found_by_place(driver_root, branch):
    places = {}
    for file in find_driver(driver_root).data:
        places.setdefault(file.place, []).append(file.name)
    assert places["opencl"] == ["nvidia.icd"]
    assert places["vdpau"] == ["libvdpau_nvidia.so.1"]
    assert places["xorg-driver"] == ["nvidia_drv.so"]
    assert "nvidia-drm-outputclass.conf" in places["xorg-conf"]
    assert [n for n in places["nvidia"] if n.endswith("-rc")]
    if "nvidia-vulkan-icd" in branch["packages"]:
        assert places["vulkan-icd"] == ["nvidia_icd.json"]
        assert places["egl-vendor"] == ["10_nvidia.json"]
        assert places["gbm"] == ["nvidia-drm_gbm.so"]
        assert places["wine"] == ["_nvngx.dll", "nvngx.dll"]
    if "firmware-nvidia-gsp" in branch["large"]:
        assert places["firmware"] == ["gsp_ga10x.bin", "gsp_tu10x.bin"]


def test_the_mirror_matches_its_manifest_and_each_library_loads_from_it(
    driver_root, build_dir, tmp_path
):
    """If libraries are missing on this machine, run `apt-get install libx11-6 libxext6`."""
    result = refresh(driver_root, tmp_path / "out", build_dir / "libcontrol")
    report = verify(tmp_path / "out" / result.manifest.generation)
    assert report.faults == ()
    assert [x.path for x in report.libraries if x.outcome == "failed"] == []
    for one in report.libraries:
        if one.outcome == "loaded":
            continue
        # The library is a 32-bit one, needs a newer Debian or a separate package, or needs Mesa or
        # Wayland, which not every machine has.
        assert one.path.startswith("lib32/") or re.search(
            r"GLIBC_|is not installed with this driver|lib(gbm|GL|EGL|wayland-\w+)\.so", one.detail
        ), one
    loaded = {x.path.removeprefix("lib64/") for x in report.libraries if x.outcome == "loaded"}
    assert {"libcuda.so.1", "libnvidia-ml.so.1"} <= loaded
    for name in ("libcuda", "libnvidia-ml"):
        control = tmp_path / "out" / result.manifest.generation / "lib64" / f"{name}.so.1"
        origin = control.parent / "origin" / f"{name}-origin.so.1"
        # The control library exports no function that this driver lacks, and every function that
        # both have.
        complete = set(read_exports((build_dir / "libcontrol" / control.name).resolve()))
        assert set(read_exports(control)) == complete & set(read_exports(origin))
    assert len(loaded) >= 18
    own = {p.name.partition(".so")[0] for p in libraries(driver_root)}
    for base in ("lib64", "lib32"):
        directory = tmp_path / "out" / result.manifest.generation / base
        for path in directory.glob("*.so.*"):
            if path.is_symlink():
                continue
            library = read_library(path)
            if library.soname:
                assert read_library((directory / library.soname).resolve()).soname == library.soname
            for needed in library.needed:
                if needed.partition(".so")[0] in own:
                    assert (directory / needed).exists(), (path, needed)
    assert refresh(driver_root, tmp_path / "out", build_dir / "libcontrol").changed is False


def test_no_library_of_a_branch_is_unknown_to_the_table(driver_root):
    """To fix a failure, add the name to a capability in vdriver/libraries.toml (docs/howto/add-a-driver-branch.md)."""
    driver = find_driver(driver_root)
    names = {f.name for f in (*driver.libraries, *driver.libraries32)}
    assert {n for n in names if not read_tables().knows(n)} == set()
