"""The layout that `make install` produces and every package has, and facts that are stated in one place only."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
import threading
import tomllib
from pathlib import Path

import pytest
import yaml
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile

from governor import VERSION
from governor.config import Config, parse_config
from tests.conftest import ROOT, lack
from tests.packages.make import laid_out
from tools.markdown import links

PACKAGING = ROOT / "packaging"
TRIPLET = "x86_64-linux-gnu"


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory, build_dir: Path) -> Path:
    """The prefix of an installation below another root, made with a umask that would lock other users out."""
    base = tmp_path_factory.mktemp("install")
    before = os.umask(0o077)
    try:
        return laid_out(base / "root", build_dir, base / "vendor")
    finally:
        os.umask(before)


def root_of(prefix: Path) -> Path:
    """Return the directory that would be / on a node."""
    return next(p for p in prefix.parents if p.name == "root" and (p / "etc").is_dir())


def names(directory: Path, *skip: str) -> list[str]:
    """Return the paths below a directory that are not directories, without those that start with a name in
    `skip`.
    """
    found = (str(p.relative_to(directory)) for p in directory.rglob("*") if not p.is_dir())
    return sorted(name for name in found if not name.startswith(skip))


def run(*command: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd="/",
        env={"PATH": "/usr/bin:/bin", **environment},
    )


def test_the_expected_files_are_installed(prefix: Path) -> None:
    # These directories change with each new page, completion and dashboard.
    others = ("lib/tidegate/python/", "share/man/", "share/bash-completion/", "share/zsh/")
    shared = ("share/tidegate/grafana/", "share/tidegate/prometheus/", "share/tidegate/kubernetes/")
    assert names(prefix, *others, *shared, "share/fish/", "share/doc/") == [
        "bin/tidegate",
        "bin/tidegate-governor",
        "bin/tidegate-hook",
        "bin/tidegate-runtime",
        "lib/systemd/system-preset/80-tidegate.preset",
        "lib/systemd/system/tidegate-driver-changed.service",
        "lib/systemd/system/tidegate-forkserver.service",
        "lib/systemd/system/tidegate-gc.service",
        "lib/systemd/system/tidegate-governor.service",
        "lib/systemd/system/tidegate-refresh.path",
        "lib/systemd/system/tidegate-refresh.service",
        "lib/systemd/system/tidegate-steering.service",
        "lib/systemd/system/tidegate-steering.socket",
        "lib/systemd/system/tidegate-watch@.path",
        "lib/tidegate/libtidegate-arbiter.so",
        "lib/tidegate/vendor/nvidia-ml-py.LICENSE",
        "lib/tidegate/vendor/pynvml.py",
        f"lib/tidegate/{TRIPLET}/libcuda.so.1",
        f"lib/tidegate/{TRIPLET}/libnvidia-ml.so.1",
        "lib/udev/rules.d/70-tidegate.rules",
        "share/tidegate/containerd/runtimeclass.yaml",
        "share/tidegate/crio/50-tidegate.conf",
        "share/tidegate/hooks.d/50-tidegate-devices.json",
        "share/tidegate/hooks.d/50-tidegate-end.json",
        "share/tidegate/hooks.d/50-tidegate.json",
        "share/tidegate/selinux/tidegate.cil",
    ]
    assert names(root_of(prefix) / "etc") == ["tidegate/config.yaml"]
    assert (root_of(prefix) / "etc/tidegate/config.d").is_dir()


def test_all_code_is_installed_except_generators(prefix: Path) -> None:
    code = names(prefix / "lib/tidegate/python")
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "oci_hook", "vdriver", "governor", "kube"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout.splitlines()  # fmt: skip
    makers = {"kube/gen.py", "kube/simulate.py"}
    front = ("oci_hook/front/tidegate-hook", "oci_hook/front/tidegate-runtime")
    sources = (".proto", ".c", ".h", "meson.build")
    used = sorted([*front, *(n for n in tracked if n not in makers and not n.endswith(sources))])
    assert [n for n in code if not n.startswith("libcontrol/")] == used
    assert [n for n in code if n.startswith("libcontrol/")] == [
        "libcontrol/__init__.py", "libcontrol/layout.py", "libcontrol/pages.py",
    ]  # fmt: skip


def test_files_are_readable_by_all_users_and_writable_only_by_root(prefix: Path) -> None:
    """Engines run some of them as root, and the user of a container reads others, whatever the umask of the
    installation was.
    """
    programs = {"tidegate", "tidegate-governor", "tidegate-hook", "tidegate-runtime"}
    programs |= {"tidegate-forkserver", "tidegate-steering"}
    programs.add("install-node")  # a node of a cluster runs it
    for path in prefix.rglob("*"):
        if path.is_symlink():
            continue
        documents = path.is_relative_to(prefix / "share/doc")
        if documents and path.is_file():
            # Examples that can be executed are executed in place.
            assert stat.S_IMODE(path.stat().st_mode) in (0o644, 0o755), path
            continue
        runs = path.is_dir() or path.name in programs or ".so" in path.name
        runs = runs and path.parent.name != "completions"  # completions are named after programs
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode in ((0o755,) if runs and ".so" not in path.name else (0o644, 0o755)), path
        assert runs or mode == 0o644, path


def test_links_of_the_documents_lead_to_installed_files(prefix: Path) -> None:
    documents = prefix / "share/doc/tidegate"
    pages = sorted(documents.rglob("*.md"))
    assert documents / "docs/howto/install.md" in pages
    followed = 0
    for page in pages:
        for link in links(page.read_text()):
            # Packages install the licence where their distribution expects it.
            if link.path and not link.outside and link.path != "LICENSE":
                assert (page.parent / link.path).exists(), f"{page}:{link.line}: {link.target}"
                followed += 1
    assert followed > 100


def test_commands_are_links_to_their_code(prefix: Path) -> None:
    for name in ("tidegate", "tidegate-governor", "tidegate-hook", "tidegate-runtime"):
        link = prefix / "bin" / name
        assert not link.readlink().is_absolute()
        assert link.resolve().is_relative_to(prefix / "lib/tidegate/python")
    first = {
        path.name: path.read_bytes().split(b"\n")[0]
        for path in (*(prefix / "bin").iterdir(), *scripts(prefix))
        if path.read_bytes()[:4] != b"\x7fELF"
    }
    # The hook uses only Python's own library; the command also uses the distribution's modules.
    assert first == {
        "tidegate": b"#!/usr/bin/python3 -I",
        "tidegate-governor": b"#!/usr/bin/python3 -I",
        "tidegate-hook": b"#!/usr/bin/python3 -ISE",
        "tidegate-runtime": b"#!/usr/bin/python3 -ISEXutf8",
        "tidegate-forkserver": b"#!/usr/bin/python3 -ISEXutf8",
        "tidegate-steering": b"#!/usr/bin/python3 -I",
    }


def scripts(prefix: Path) -> list[Path]:
    """Return the scripts that the C programs and units execute."""
    names = ("tidegate-hook", "tidegate-runtime", "tidegate-forkserver")
    code = prefix / "lib/tidegate/python"
    return [*(code / "oci_hook" / name for name in names), code / "governor/tidegate-steering"]


def test_commands_start_from_anywhere_and_ignore_the_environment(
    prefix: Path, tmp_path: Path
) -> None:
    hostile = tmp_path / "governor"
    hostile.mkdir()
    (hostile / "__init__.py").write_text("raise SystemExit('the environment was minded')\n")
    version = run(
        prefix / "bin/tidegate", "--version", PYTHONPATH=str(tmp_path), PYTHONHOME="/none"
    )
    assert (version.returncode, version.stdout) == (0, f"tidegate {VERSION}\n"), version.stderr
    asked = run(prefix / "bin/tidegate-hook", PYTHONPATH=str(tmp_path))
    assert "usage: tidegate-hook" in asked.stderr


IMPORT_ALL = """
import importlib, pkgutil, sys
code, vendor, packages = sys.argv[1:]
sys.path[:0] = [code, vendor, packages]
ours = ("oci_hook", "vdriver", "libcontrol", "governor", "kube")
for name in ours:
    package = importlib.import_module(name)
    for found in pkgutil.walk_packages(package.__path__, f"{name}."):
        if not found.name.endswith("__main__"):
            importlib.import_module(found.name)
import pynvml
for name, module in sys.modules.items():
    if name.partition(".")[0] in (*ours, "pynvml") and not module.__file__.startswith((code, vendor)):
        raise SystemExit(f"{name} came from {module.__file__}")
from governor import install_paths as paths
print(paths.library_dir(), paths.control_dir(), paths.shared_file("crio/50-tidegate.conf"))
"""


def test_every_module_is_found_in_the_installation_with_its_libraries(prefix: Path) -> None:
    private = prefix / "lib/tidegate"
    packages = next(p for p in sys.path if p.endswith("site-packages"))
    done = run(
        sys.executable, "-I", "-S", "-B", "-c", IMPORT_ALL,
        private / "python", private / "vendor", packages,
    )  # fmt: skip
    assert done.stdout.split() == [
        str(private), str(private / TRIPLET), str(prefix / "share/tidegate/crio/50-tidegate.conf")
    ], done.stderr  # fmt: skip


def test_no_loader_of_the_node_finds_the_control_library(prefix: Path) -> None:
    """A program that loads libcuda.so.1 outside of containers gets the driver or an error."""
    found = names(prefix)
    assert [n for n in found if "libcuda" in n or "libnvidia-ml" in n] == [
        f"lib/tidegate/{TRIPLET}/libcuda.so.1", f"lib/tidegate/{TRIPLET}/libnvidia-ml.so.1"
    ]  # fmt: skip
    assert not [n for n in found if "ld.so.conf" in n]
    for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
        with (prefix / "lib/tidegate" / TRIPLET / name).open("rb") as file:
            dynamic = next(
                s for s in ELFFile(file).iter_sections() if isinstance(s, DynamicSection)
            )
            paths = [t.runpath for t in dynamic.iter_tags() if t.entry.d_tag == "DT_RUNPATH"]
        assert paths == ["$ORIGIN/origin"]


def test_the_control_library_contains_its_release(prefix: Path) -> None:
    library = (prefix / "lib/tidegate" / TRIPLET / "libcuda.so.1").read_bytes()
    assert f"tidegate-control {VERSION}\0".encode() in library


def test_units_run_installed_programs(prefix: Path) -> None:
    below = f"/{prefix.relative_to(root_of(prefix))}"
    for unit in (prefix / "lib/systemd/system").glob("*.service"):
        for program in re.findall(r"^ExecStart=-?(\S*tidegate\S*)", unit.read_text(), re.MULTILINE):
            assert program.startswith((f"{below}/bin/", f"{below}/lib/tidegate/")), unit
            assert (prefix / Path(program).relative_to(below)).exists()


def test_a_second_installation_removes_old_files_and_keeps_the_configuration(
    tmp_path: Path, build_dir: Path
) -> None:
    root = tmp_path / "root"
    prefix = laid_out(root, build_dir, tmp_path / "vendor")
    code = prefix / "lib/tidegate/python/governor"
    left = [
        code / name for name in ("old.py", "old/__init__.py", "__pycache__/cli.cpython-311.pyc")
    ]
    for old in left:
        old.parent.mkdir(exist_ok=True)
        old.write_text("")
    (code / "link").symlink_to("/nowhere")
    config = root / "etc/tidegate/config.yaml"
    config.write_text("placement: pack\n")
    before = names(prefix)
    laid_out(root, build_dir, tmp_path / "vendor")
    assert not any(old.exists() or old.parent.exists() for old in left[1:])
    gone = {str(path.relative_to(prefix)) for path in (*left, code / "link")}
    assert set(before) - set(names(prefix)) == gone
    assert config.read_text() == "placement: pack\n"


def test_engines_find_every_program_during_a_second_installation(
    tmp_path: Path, build_dir: Path
) -> None:
    """A container that starts or ends during the installation is handled by one of the two versions."""
    prefix = laid_out(tmp_path / "root", build_dir, tmp_path / "vendor")
    programs = [prefix / "bin" / name for name in ("tidegate-hook", "tidegate-runtime")]
    modules = [prefix / "lib/tidegate/python/oci_hook" / name for name in ("entry.py", "client.py")]
    missing: set[Path] = set()
    looks, over = 0, threading.Event()

    def look() -> None:
        nonlocal looks
        while not over.is_set():
            missing.update(path for path in (*programs, *modules) if not path.exists())
            looks += 1

    looking = threading.Thread(target=look)
    looking.start()
    laid_out(tmp_path / "root", build_dir, tmp_path / "vendor")
    over.set()
    looking.join()
    assert looks > 100
    assert missing == set()


# The sample configuration


def options(text: str) -> list[str]:
    """Return every option of the sample with its comment sign removed. Each option of a section is
    preceded by the line of its section.
    """
    found, section = [], ""
    for line in text.splitlines():
        if re.match(r"#[a-z_]+:$", line):
            section = line[1:]
        elif re.match(r"#[a-z_]+:", line):
            found.append(line[1:])
        elif re.match(r"#  [a-z_]+:", line):
            found.append(f"{section}\n{line[1:]}")
    return found


def test_every_option_of_the_sample_is_accepted_and_is_the_default() -> None:
    text = (PACKAGING / "config.yaml").read_text()
    assert parse_config(text) == Config()
    lines = options(text)
    known = json.loads((ROOT / "governor/config.schema.json").read_text())["properties"]
    inner = sum(len(one.get("properties", "x")) for one in known.values())
    assert len(lines) == inner
    # Options with a default that depends on the machine, and an example of an option that has no default.
    depends = ("library_dir", "spin_us", "lookahead_us", "gpus", "defaults:\n  memory")
    for line in lines:
        config = parse_config(line)
        if not line.startswith(depends):
            assert config == Config(), line
    assert all(isinstance(yaml.safe_load(line), dict) for line in lines)


# Facts that are defined in one place


def test_the_version_is_defined_in_one_place() -> None:
    # The manual pages are generated from these directories.
    places = [
        "governor",
        "vdriver",
        "oci_hook",
        "libcontrol",
        "tools",
        "packaging",
        ":!packaging/man",
        # tests/kubernetes/test_manifests.py checks which image a cluster gets.
        ":!packaging/kubernetes",
    ]
    again = subprocess.run(
        ["git", "grep", "-lF", VERSION, "--", *places, "pyproject.toml", "meson.build"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    ).stdout.split()  # fmt: skip
    assert again == ["governor/__init__.py"]


def minima() -> dict[str, str]:
    """Return the oldest supported version of each module."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = dict(re.fullmatch(r"([a-z-]+)>=([0-9.]+)", d).groups() for d in project["dependencies"])  # type: ignore[union-attr]
    return {"python": project["requires-python"].removeprefix(">="), **found}


DEBIAN = {"python": "python3", "pyyaml": "python3-yaml"}
FEDORA = {"python": "%{python_package}", "prometheus-client": "python3-prometheus_client"}


def test_both_packages_have_the_dependencies_of_the_project() -> None:
    """nvidia-ml-py is in neither distribution's archive, so the packages contain it."""
    wanted = {name: version for name, version in minima().items() if name != "nvidia-ml-py"}
    control = (PACKAGING / "debian/control").read_text().partition("\nPackage:")[2]
    assert set(re.findall(r"^ (python3\S*) \(>= ([0-9.]+)\),$", control, re.MULTILINE)) == {
        (DEBIAN.get(name, f"python3-{name}"), version) for name, version in wanted.items()
    }
    spec = (
        (PACKAGING / "rpm/tidegate.spec")
        .read_text()
        .partition("Requires:       %{python_package} >=")
    )
    fedora = re.sub(r"%if 0%\{\?rhel\}.*?%else\n", "", spec[1] + spec[2], flags=re.DOTALL)
    assert set(re.findall(r"^Requires: +(\S*python\S*) >= ([0-9.]+)$", fedora, re.MULTILINE)) == {
        (FEDORA.get(name, f"python3-{name}"), version) for name, version in wanted.items()
    }


def test_modules_that_rhel_lacks_are_locked_for_its_package() -> None:
    lock = (ROOT / "requirements-vendor.lock").read_text()
    locked = dict(re.findall(r"^([a-z-]+)==([0-9.]+)", lock, re.MULTILINE))
    brought = set(minima()) - {"python", "pyyaml", "nvidia-ml-py"}
    assert brought <= set(locked)
    for name in brought:
        numbers = [tuple(map(int, v.split("."))) for v in (locked[name], minima()[name])]
        assert numbers[0] >= numbers[1]
    # From 4.18 on jsonschema needs rpds-py, which is compiled for one version of Python.
    assert tuple(map(int, locked["jsonschema"].split("."))) < (4, 18)


@pytest.mark.parametrize("script", sorted(p.name for p in (PACKAGING / "scripts").iterdir()))
def test_package_scripts_are_valid_shell(script: str) -> None:
    done = run("sh", "-n", PACKAGING / "scripts" / script)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_removal_that_undoes_the_last_setup_prints_no_error_about_the_journal(
    tmp_path: Path,
) -> None:
    journal = tmp_path / "journal.json"
    journal.write_text('{"docker": [], "podman": []}\n')
    script = (PACKAGING / "scripts/before-removal.sh").read_text()
    script = script.replace("/var/lib/tidegate/setup/journal.json", str(journal))
    # The last undo removes the journal.
    command = f'tidegate() {{ echo "$2"; [ "$2" = docker ] || rm {journal}; }}'
    done = run("sh", "-euc", f"{command}\n{script}\nundo_setups")
    assert (done.returncode, done.stdout, done.stderr) == (0, "docker\npodman\n", "")


@pytest.mark.parametrize(
    ("hook", "journal", "status", "output"),
    [
        (None, '{"podman": []}', 0, ("", "")),
        ("/usr/bin/tidegate-hook", None, 0, ("", "")),
        ("/opt/checkout/oci_hook/tidegate-hook", '{"podman": []}', 0, ("", "")),
        (
            "/usr/bin/tidegate-hook",
            '{"podman": []}',
            0,
            ("tidegate: X written\ntidegate: to do: Y\n", ""),
        ),
        (
            "/usr/bin/tidegate-hook",
            '{"podman": []}',
            73,
            (
                "",
                (
                    "tidegate: Podman's hooks are still in a directory where they make Buildah fail:"
                    " Z; move it\n"
                ),
            ),
        ),
    ],
)
def test_an_upgrade_moves_hooks_out_of_the_directory_that_buildah_reads(
    tmp_path: Path, hook: str | None, journal: str | None, status: int, output: tuple[str, str]
) -> None:
    script = (PACKAGING / "scripts/move-hooks.sh").read_text()
    for path, content in (
        ("/etc/containers/oci/hooks.d/50-tidegate-devices.json", hook and f'{{"path": "{hook}"}}'),
        ("/var/lib/tidegate/setup/journal.json", journal),
    ):
        assert script.count(path) == 1
        script = script.replace(path, str(tmp_path / Path(path).name))
        if content is not None:
            (tmp_path / Path(path).name).write_text(content)
    lines = "+++ x\npodman: X written\nto do: Y" if status == 0 else "tidegate: Z; move it"
    command = (
        f'tidegate() {{ [ "$*" = "setup podman" ] && printf "%s\\n" "{lines}"; return {status}; }}'
    )
    done = run("sh", "-euc", f"{command}\n{script}\nmove_hooks")
    assert (done.returncode, done.stdout, done.stderr) == (0, *output)


def test_packages_include_each_script_and_no_other() -> None:
    texts = [
        (PACKAGING / "debian" / f"tidegate.{name}").read_text()
        for name in ("postinst", "prerm", "postrm")
    ]
    asked = [n for text in texts for n in re.findall(r"^#INCLUDE# (\S+)$", text, re.MULTILINE)]
    spec = re.findall(r"^@(\S+\.sh)@$", (PACKAGING / "rpm/tidegate.spec").read_text(), re.MULTILINE)
    # Both formats run the same scripts: after an upgrade, before a removal, and after a removal.
    assert (
        asked
        == spec
        == [
            "move-hooks.sh",
            *("in-use.sh", "before-removal.sh"),
            *("in-use.sh", "remove-state.sh"),
        ]
    )
    assert set(asked) == {path.name for path in (PACKAGING / "scripts").iterdir()}


# A script for a separate mount namespace. On a tmpfs, it makes the mounts of a test, one of which
# stands in for a container's mount.
NODE = """set -e
mount -t tmpfs none {base}
cd {base}
{steps}
{scripts}
{question}
"""


def on_a_node(base: Path, steps: str, question: str) -> subprocess.CompletedProcess[str]:
    """Run steps and a question below `base`, as a package's script would."""
    if os.geteuid() != 0:
        lack("needs root")
    base.mkdir()
    scripts = "".join(
        (PACKAGING / "scripts" / name).read_text() for name in ("in-use.sh", "remove-state.sh")
    )
    # This restricts removals to paths below `base`.
    for path in ("/usr/lib/", "/var/lib/", "/run/"):
        scripts = scripts.replace(path, f"{base}{path}")
    script = NODE.format(base=base, scripts=scripts, steps=steps, question=question)
    return run("unshare", "--mount", "sh", "-c", script)


@pytest.mark.parametrize(
    ("steps", "asked", "output"),
    [
        ("mkdir -p driver/g c; mount --bind driver/g c", "driver", "used"),
        ("mkdir -p driver/g driver2/g c; mount --bind driver2/g c", "driver", "unused"),
        ("mkdir -p driver/g c; mount --bind driver c", "driver", "unused"),
        # An administrator's link to a larger disk, or to a directory of such links.
        (
            "mkdir -p disk/tidegate/driver/g c; ln -s disk/tidegate state; mount --bind state/driver/g c",
            "state/driver",
            "used",
        ),
        ("mkdir -p disk/g c; ln -s disk link; ln -s link driver; mount --bind disk/g c", "driver", "used"),
        ("mkdir -p driver c; mount -t tmpfs n driver; mkdir driver/g; mount --bind driver/g c", "driver", "used"),
        (
            "mkdir -p 'a [b] \\c.*/g' driver c; mount --bind 'a [b] \\c.*' driver; mount --bind driver/g c",
            "driver",
            "used",
        ),
        ("mkdir -p drXver/g driver c; mount --bind drXver/g c", "dr.ver", "unused"),
        ("mkdir -p driver; mount -t tmpfs n driver", "driver", "unused"),
        ("ln -s nowhere driver", "driver", "unused"),
        ("mkfifo driver", "driver", "unused"),
        (":", "driver", "unused"),
    ],
)  # fmt: skip
def test_package_scripts_detect_a_mirror_that_containers_have_mounted(
    tmp_path: Path, steps: str, asked: str, output: str
) -> None:
    """The script detects such mounts wherever the mirror is, and whatever its name is."""
    base = tmp_path / "node"
    done = on_a_node(base, steps, f"if in_use {base}/{asked}; then echo used; else echo unused; fi")
    assert (done.returncode, done.stdout) == (0, f"{output}\n"), done.stderr


def test_a_removal_succeeds_although_a_disk_is_mounted(tmp_path: Path) -> None:
    """The disk stays mounted and is emptied, except for another disk that is mounted below it."""
    steps = (
        "mkdir -p var/lib/tidegate/driver run/tidegate/containers run/cdi usr/lib"
        "; mount -t tmpfs n var/lib/tidegate/driver; mkdir -p var/lib/tidegate/driver/g/other"
        "; touch var/lib/tidegate/driver/g/lib; mount -t tmpfs n var/lib/tidegate/driver/g/other"
        "; touch var/lib/tidegate/driver/g/other/kept"
    )
    done = on_a_node(tmp_path / "node", steps, "remove_state; echo removed; find .")
    assert done.returncode == 0, done.stderr
    assert "removed\n" in done.stdout
    assert "driver/g/other/kept" in done.stdout
    assert "driver/g/lib" not in done.stdout
    assert "run/tidegate" not in done.stdout


def test_the_preset_names_what_the_packages_enable() -> None:
    rules = (PACKAGING / "debian/rules").read_text()
    started = re.findall(r"dh_installsystemd (.*)", rules)
    spec = (PACKAGING / "rpm/tidegate.spec").read_text()
    preset = re.findall(
        r"^enable (\S+)", (PACKAGING / "systemd/80-tidegate.preset").read_text(), re.MULTILINE
    )
    words = " ".join(started).split()
    assert sorted(word for word in words if not word.startswith("--")) == sorted(preset)
    assert sorted(re.findall(r"^%systemd_post (.*)", spec, re.MULTILINE)[0].split()) == sorted(
        preset
    )
    # The mirror comes first, because the other units are skipped while there is none.
    assert started == [
        "tidegate-refresh.path tidegate-refresh.service",
        "--no-stop-on-upgrade tidegate-steering.socket",
        "tidegate-governor.service",
        "tidegate-forkserver.service",
    ]
