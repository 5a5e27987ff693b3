"""The RPM packages, built here for Fedora and for RHEL 9: files, dependencies, scriptlets, and an installation of the files.

The tests do not use Fedora. rpm installs the packages on a fresh Debian 12, which has the version
of Python that RHEL 9's package needs, 3.11; the scriptlets and the installed programs run there.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from governor import VERSION
from tests.conftest import ROOT, need
from tests.container.engine_host import CommandResult
from tests.container.engines import Podman
from tests.packages.make import NEWER, package
from tests.packages.node import (
    ENGINES_OWN,
    SIMGPU,
    PackageNode,
    assert_works,
    fresh_node,
    of_the_node,
    start,
    workload_image,
)

pytestmark = pytest.mark.slow

RHEL = ("rhel 9", "dist .el9")


@pytest.fixture(scope="module")
def fedora(require: Callable[..., None]) -> Path:
    require("rpmbuild")
    return package("rpm")


@pytest.fixture(scope="module")
def rhel(require: Callable[..., None]) -> Path:
    require("rpmbuild")
    return package("rpm", *RHEL)


def ask(rpm: Path, *query: str) -> list[str]:
    done = subprocess.run(
        ["rpm", "--query", "--package", *query, rpm],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    return done.stdout.splitlines()


def scriptlets(rpm: Path) -> dict[str, str]:
    """Return the text of each scriptlet, by name."""
    text = "\n".join(ask(rpm, "--scripts", "--triggers"))
    parts = re.split(r"^(\w+) scriptlet \(using /bin/sh\).*$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_the_files_of_the_package_are_those_of_make_install(fedora: Path) -> None:
    others = (
        "/usr/lib/tidegate/python", "/usr/share/tidegate", "/usr/share/man/", "/usr/share/zsh/",
        "/usr/share/bash-completion/", "/usr/share/fish/", "/usr/share/doc/", "/usr/share/licenses/",
    )  # fmt: skip
    assert [n for n in ask(fedora, "--list") if not n.startswith(others)] == [
        "/etc/tidegate",
        "/etc/tidegate/config.d",
        "/etc/tidegate/config.yaml",
        *(f"/usr/bin/{n}" for n in ("tidegate", "tidegate-governor", "tidegate-hook", "tidegate-runtime")),
        "/usr/lib/systemd/system-preset/80-tidegate.preset",
        *(
            f"/usr/lib/systemd/system/{p.name}"
            for p in sorted((ROOT / "packaging/systemd").iterdir())
            if p.suffix != ".preset"
        ),
        "/usr/lib/tidegate",
        "/usr/lib/tidegate/libtidegate-arbiter.so",
        "/usr/lib/tidegate/vendor",
        "/usr/lib/tidegate/vendor/nvidia-ml-py.LICENSE",
        "/usr/lib/tidegate/vendor/pynvml.py",
        "/usr/lib/tidegate/x86_64-linux-gnu",
        "/usr/lib/tidegate/x86_64-linux-gnu/libcuda.so.1",
        "/usr/lib/tidegate/x86_64-linux-gnu/libnvidia-ml.so.1",
        "/usr/lib/udev/rules.d/70-tidegate.rules",
    ]  # fmt: skip
    assert ask(fedora, "--configfiles") == ["/etc/tidegate/config.yaml"]


@pytest.mark.parametrize("which", ["fedora", "rhel"])
def test_no_package_can_depend_on_tidegate_for_the_driver(
    request: pytest.FixtureRequest, which: str
) -> None:
    rpm = request.getfixturevalue(which)
    provided = ask(rpm, "--provides")
    assert {line.split()[0] for line in provided} == {
        "config(tidegate)",
        "tidegate",
        "tidegate(x86-64)",
    }
    assert not [line for line in ask(rpm, "--requires") if "cuda" in line or "nvidia" in line]


def test_the_fedora_package_requires_every_module_that_it_uses(fedora: Path) -> None:
    asked = {line for line in ask(fedora, "--requires") if "python" in line}
    assert asked == {
        "/usr/bin/python3", "python3 >= 3.11", "python3-jsonschema >= 4.10", "python3-prometheus_client >= 0.16",
        "python3-pyelftools >= 0.29", "python3-pyyaml >= 6.0", "python3-structlog >= 22.3",
    }  # fmt: skip


def test_the_rhel_9_package_uses_a_newer_python_and_brings_its_modules(
    rhel: Path, tmp_path: Path
) -> None:
    """RHEL 9's python3 is 3.9. RHEL 9 also has 3.11, but packages only one of the modules that
    Tidegate needs for it, PyYAML.
    """
    assert rhel.name == f"tidegate-{VERSION}-1.el9.x86_64.rpm"
    asked = {line for line in ask(rhel, "--requires") if "python" in line}
    assert asked == {"/usr/bin/python3.11", "python3.11 >= 3.11", "python3.11-pyyaml >= 6.0"}
    root = unpack(rhel, tmp_path)
    for name in ("tidegate", "tidegate-governor"):
        assert (root / "usr/bin" / name).read_text().startswith("#!/usr/bin/python3.11 -I")
    # Containers are started through C programs, which run these scripts.
    for name in ("tidegate-hook", "tidegate-runtime", "tidegate-forkserver"):
        script = root / "usr/lib/tidegate/python/oci_hook" / name
        assert script.read_text().startswith("#!/usr/bin/python3.11 -I")
    vendor = root / "usr/lib/tidegate/vendor"
    brought = {p.name for p in vendor.iterdir() if p.is_dir() and not p.name.endswith(".dist-info")}
    assert {
        "jsonschema",
        "pyrsistent",
        "attr",
        "elftools",
        "structlog",
        "prometheus_client",
    } <= brought
    assert not list(vendor.rglob("*.so"))
    for info in vendor.glob("*.dist-info"):
        licences = [p for p in info.rglob("*") if p.name.upper().startswith(("LICENSE", "COPYING"))]
        assert licences, info.name


def test_the_rhel_9_package_can_use_another_python(
    require: Callable[..., None], tmp_path: Path
) -> None:
    """Neither 3.11 nor 3.12 is supported for as long as RHEL 9 is."""
    require("rpmbuild")
    rpm = package("rpm", *RHEL, "rhel_python 3.12")
    asked = {line for line in ask(rpm, "--requires") if "python" in line}
    assert asked == {"/usr/bin/python3.12", "python3.12 >= 3.11", "python3.12-pyyaml >= 6.0"}
    hook = unpack(rpm, tmp_path) / "usr/lib/tidegate/python/oci_hook/tidegate-hook"
    assert hook.read_text().startswith("#!/usr/bin/python3.12 -I")


def unpack(rpm: Path, directory: Path) -> Path:
    """Unpack a package's files, and return their root."""
    need("rpm2cpio", "cpio")
    archive = subprocess.run(["rpm2cpio", rpm], capture_output=True, check=True).stdout
    root = directory / "root"
    root.mkdir()
    command = ["cpio", "--quiet", "--extract", "--make-directories"]
    subprocess.run(command, cwd=root, input=archive, check=True)
    return root


def test_the_rhel_package_runs_under_its_python(rhel: Path, tmp_path: Path) -> None:
    """The only module that it needs from the system is PyYAML. Debian 12's Python is also 3.11."""
    import sys

    import yaml

    if sys.version_info[:2] != (3, 11):
        pytest.skip("this machine's Python is not 3.11")
    root = unpack(rhel, tmp_path)
    (tmp_path / "site").mkdir()
    for name in ("yaml", "_yaml"):
        (tmp_path / "site" / name).symlink_to(Path(yaml.__file__).parents[1] / name)
    program = (
        "import sys; sys.path[:0] = sys.argv[1:]; import governor.daemon, governor.metrics, vdriver.elf, pynvml\n"
        "from elftools.elf.elffile import ELFFile; from governor.config import parse_config\n"
        "print(parse_config('placement: pack').placement, [p for p in sys.path if p.endswith('-packages')])\n"
    )
    private = root / "usr/lib/tidegate"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program, private / "python", private / "vendor", tmp_path / "site"],
        capture_output=True, text=True, check=False, cwd="/", timeout=60,
    )  # fmt: skip
    assert done.stdout == "pack []\n", done.stderr


@pytest.mark.parametrize("which", ["fedora", "rhel"])
def test_the_scriptlets_do_the_same_as_debians_scripts(
    request: pytest.FixtureRequest, which: str
) -> None:
    said = scriptlets(request.getfixturevalue(which))
    assert set(said) == {"postinstall", "preuninstall", "postuninstall", "triggerin"}
    python = "/usr/bin/python3.11" if which == "rhel" else "/usr/bin/python3"
    assert said["postinstall"].index(f"{python} -m compileall") < said["postinstall"].index(
        "systemctl"
    )
    assert (
        "preset tidegate-refresh.service tidegate-refresh.path tidegate-steering.socket"
        in said["postinstall"]
    )
    before = said["preuninstall"]
    removal = before.index("if [ $1 -eq 0 ]; then\n    refuse_in_use\n    undo_setups\nfi")
    stop = (
        "systemctl --no-reload disable --now tidegate-forkserver.service tidegate-governor.service"
    )
    assert removal < before.index(stop)
    after = said["postuninstall"]
    assert "try-restart tidegate-refresh.service tidegate-governor.service" in after
    assert after.rindex("remove_state") > after.rindex("if [ $1 -eq 0 ]")
    for text in said.values():
        assert "@" not in text
        assert "%" not in text.replace("%/", "")
        assert subprocess.run(["sh", "-n"], input=text, text=True, check=False).returncode == 0


def test_the_selinux_module_compiles(require: Callable[..., None], tmp_path: Path) -> None:
    """The module is compiled together with the types that it names. Only an enforcing node can tell whether it is
    sufficient.
    """
    require("secilc")
    labels = tmp_path / "file_contexts"
    policy = [ROOT / "tests/packages/policy.cil", ROOT / "packaging/selinux/tidegate.cil"]
    command = ["secilc", "--output", tmp_path / "policy", "--filecontext", labels, *policy]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    assert sorted(line.split() for line in labels.read_text().splitlines()) == [
        ["/run/tidegate/containers(/.*)?", "system_u:object_r:container_file_t:s0"],
        ["/var/lib/tidegate/driver(/.*)?", "system_u:object_r:container_ro_file_t:s0"],
    ]


@pytest.fixture
def node(tmp_path: Path, build_dir: Path, require: Callable[..., None]) -> Iterator[PackageNode]:
    with fresh_node("bookworm", tmp_path, build_dir, require) as node:
        yield node


@pytest.mark.parametrize("which", ["fedora", "rhel"])
def test_the_installed_package_runs_containers_is_upgraded_under_them_and_erased(
    request: pytest.FixtureRequest, node: PackageNode, tmp_path: Path, build_dir: Path, which: str
) -> None:
    host = node.host
    options = RHEL if which == "rhel" else ()
    # The package for RHEL contains these modules.
    modules = ("jsonschema", "prometheus-client", "pyelftools", "structlog")
    node.apt(
        "install", "rpm", "python3-yaml", *(f"python3-{m}" for m in modules if which == "fedora")
    )
    before = node.files()

    def rpm(*arguments: str) -> CommandResult:
        # rpm's database does not contain Debian's packages, and Debian's rpm would warn about that.
        return host.run("rpm", "--force-debian", "--nodeps", *arguments, timeout=120)

    def install(how: str, file: Path) -> None:
        ran = rpm(how, node.bring(file))
        assert (ran.status, ran.text) == (0, "")

    install("--install", request.getfixturevalue(which))
    assert host.check("tidegate", "--version") == f"tidegate {VERSION}\n"
    compiled = host.check("find", "/usr/lib/tidegate", "-name", "*.pyc").splitlines()
    assert any("/oci_hook/__pycache__/main.cpython-311." in path for path in compiled)
    wanted = "/etc/systemd/system/multi-user.target.wants/tidegate-governor.service"
    assert host.check("readlink", wanted).startswith("/")
    host.check("tidegate", "refresh")
    node.start_governor()
    found = json.loads(host.run("tidegate", "doctor", "--json").stdout)["findings"]
    assert [one for one in found if one["state"] == "wrong"] == []
    podman = of_the_node(Podman)(host, {str(node.gpu): SIMGPU})
    podman.start(workload_image(node, tmp_path, build_dir))
    running = start(podman, {"memory": "1Gi", "compute": "30"})
    assert len(node.books()) == 1
    assert host.check("find", "/usr/lib/tidegate", "-name", "*.pyc").splitlines() == compiled

    # After an upgrade the container is still governed, and the package cannot be erased.
    old = node.generation()
    install("--upgrade", package("rpm", *options, version=NEWER))
    assert host.check("tidegate", "--version") == f"tidegate {NEWER}\n"
    host.check("tidegate", "refresh")
    node.stop_governor()
    node.start_governor()
    assert node.generation() != old
    assert_works(running)
    assert len(node.books()) == 1
    refused = rpm("--erase", "tidegate")
    assert refused.status != 0
    assert "end them first" in refused.text
    assert_works(running)

    podman.remove(running)
    node.stop_governor()
    host.write("/etc/tidegate/config.yaml", "placement: pack\n")
    erased = rpm("--erase", "tidegate")
    assert erased.status == 0, erased.text
    left = {path for path in node.files() - before if not path.startswith(ENGINES_OWN)}
    assert left == {"/etc/tidegate", "/etc/tidegate/config.yaml.rpmsave"}
    assert not host.run("sh", "-c", "grep -rl tidegate /etc/containers").stdout
