"""The wheel: its installation by pip into an environment, and the remaining steps that `tidegate install`
prints.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from governor import VERSION
from governor.verbs.install import _is_roots, script
from tests.conftest import ROOT, lack
from tests.packages.make import package

HIDDEN = "the units' sandboxes do not see it"
OTHERS = "users other than root may change it, and engines run it as root"


def wheel_tree(directory: Path) -> Path:
    """Lay out the files of packaging/ as in a wheel."""
    code = directory / "code"
    for name in ("systemd", "udev"):
        (code / "governor/share" / name).mkdir(parents=True)
        for path in (ROOT / "packaging" / name).iterdir():
            (code / "governor/share" / name / path.name).write_bytes(path.read_bytes())
    return code


def test_the_script_puts_everything_where_units_and_engines_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output is valid shell, and each file that it copies exists."""
    monkeypatch.setattr("governor.verbs.install._is_roots", lambda _: True)
    code = wheel_tree(tmp_path)
    # The units cannot see pytest's directory: the script would only report that, and exit.
    lines = [line for line in script(code, Path("/opt/tidegate/bin")) if line != "exit 1"]
    text = "\n".join(lines)
    assert subprocess.run(["sh", "-n"], input=text, text=True, check=False).returncode == 0
    for name in ("tidegate", "tidegate-governor", "tidegate-hook", "tidegate-runtime"):
        assert re.search(rf"^ln -sf \S+/{name} /usr/bin/{name}$", text, re.MULTILINE)
    named = re.findall(
        rf"{re.escape(str(code))}/governor/share/\S+\.(?:service|path|socket|rules)", text
    )
    assert all(Path(path).is_file() for path in named)
    assert {Path(path).name for path in named} == {
        path.name
        for path in [*(ROOT / "packaging/systemd").iterdir(), *(ROOT / "packaging/udev").iterdir()]
        if path.suffix != ".preset"
    }
    assert text.index("enable --now tidegate-refresh") < text.index(
        "enable --now tidegate-governor"
    )


@pytest.mark.parametrize(
    ("place", "roots", "reason"),
    [
        ("/home/u/venv/lib", True, HIDDEN),
        ("/tmp/x", True, HIDDEN),
        ("/opt/x", False, OTHERS),
        ("/root/x", False, f"{HIDDEN}, and {OTHERS}"),
        ("/opt/x\nrm -r", False, OTHERS),
    ],
)
def test_an_unsuitable_directory_ends_the_script_at_its_beginning(
    monkeypatch: pytest.MonkeyPatch, place: str, *, roots: bool, reason: str
) -> None:
    monkeypatch.setattr("governor.verbs.install._is_roots", lambda _: roots)
    lines = "\n".join(script(Path(place), Path(place))).splitlines()
    assert lines[0] == f"# {place} cannot be used: {reason}.".replace("\n", "?")
    assert lines[2] == "exit 1"


@pytest.mark.parametrize(
    ("steps", "roots"),
    [
        ("", True),
        ("chown 1000 opt/venv/lib", False),
        ("chown 1000 opt", False),
        ("chmod o+w opt/venv", False),
        ("chmod 1777 opt", True),
        ("chmod 1777 opt/venv/lib", False),
        ("chmod g+w opt/venv", True),
        ("chgrp 1000 opt/venv; chmod g+w opt/venv", False),
    ],
)
def test_a_directory_that_others_can_change_is_unsuitable(
    tmp_path: Path, steps: str, *, roots: bool
) -> None:
    """The owner of any parent directory can replace the directory."""
    if os.geteuid() != 0:
        lack("needs root")
    lib = tmp_path / "opt/venv/lib"
    lib.mkdir(parents=True)
    subprocess.run(["sh", "-ec", steps], cwd=tmp_path, check=True)
    assert _is_roots(lib) is roots


def test_nothing_is_replaced_if_a_package_is_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("governor.verbs.install._is_roots", lambda _: True)
    monkeypatch.setattr("governor.install_paths.PRIVATE", tmp_path)
    lines = list(script(Path("/opt/x/lib"), Path("/opt/x/bin")))
    assert lines[0].startswith(f"# {tmp_path} exists")
    assert lines[2] == "exit 1"


def test_no_command_becomes_a_link_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside an environment, pip puts commands below /usr/local, on some systems into /usr/bin."""
    monkeypatch.setattr("governor.verbs.install._is_roots", lambda _: True)
    code = Path("/usr/local/lib/python3.11/dist-packages")
    for commands in ("/usr/local/bin", "/usr/bin"):
        links = [line.split()[2:] for line in script(code, Path(commands)) if line[:3] == "ln "]
        made = {link: to for to, link in links}
        assert made.get("/usr/bin/tidegate") == (
            "/usr/local/bin/tidegate" if commands == "/usr/local/bin" else None
        )
        assert made["/usr/bin/tidegate-hook"] == f"{code}/oci_hook/front/tidegate-hook"
        assert all(link != to for to, link in links)


def test_a_wheel_is_built_with_the_python_that_is_named(tmp_path: Path) -> None:
    def build() -> str:
        done = subprocess.run(
            ["tools/package", "wheel"],
            cwd=ROOT,
            env={
                **os.environ, "PYTHON": str(python), "OUT": str(tmp_path), "SOURCE_DATE_EPOCH": "0",
            },
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 1
        return done.stderr

    python = tmp_path / "python"
    assert build() == f"package: there is no {python}\n"
    python.write_text('#!/bin/sh\necho "$@" >"$OUT/called"\nexit 3\n')
    python.chmod(0o755)
    build()
    assert (tmp_path / "called").read_text().startswith("-m hatchling build ")


def test_a_suitable_directory_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("governor.verbs.install._is_roots", lambda _: True)
    assert "exit 1" not in list(
        script(Path("/opt/tidegate/lib/python3.11/site-packages"), Path("/opt/tidegate/bin"))
    )


@pytest.mark.slow
def test_the_wheel_is_for_this_architecture_and_any_python(require: Callable[..., None]) -> None:
    require("gcc")
    wheel = package("wheel")
    assert re.fullmatch(
        rf"tidegate-{re.escape(VERSION)}-py3-none-manylinux_2_\d+_x86_64\.whl", wheel.name
    )
    names = zipfile.ZipFile(wheel).namelist()
    for name in (
        "x86_64-linux-gnu/libcuda.so.1",
        "x86_64-linux-gnu/libnvidia-ml.so.1",
        "libtidegate-arbiter.so",
    ):
        assert f"tidegate/python/libcontrol/lib/{name}" in names
    assert not [n for n in names if n.endswith((".c", ".h", ".map", "meson.build", "/gen.py"))]
    assert "tidegate/python/governor/share/hooks.d/50-tidegate.json" in names
    # Another package in the same environment may have a name such as `governor`.
    assert {name.split("/")[0] for name in names} == {"tidegate", f"tidegate-{VERSION}.dist-info"}


@pytest.mark.slow
def test_pip_installs_a_command_that_finds_its_files(tmp_path: Path) -> None:
    wheel = package("wheel")
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    pip = [sys.executable, "-m", "pip", "--python", venv / "bin/python", "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--no-index", wheel], check=True, timeout=300)
    [site] = venv.glob("lib/python*/site-packages")
    for taken in ("governor", "kube", "libcontrol"):
        (site / taken).mkdir()
        (site / taken / "__init__.py").write_text("raise ImportError('of other software')\n")

    def run(*command: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(word) for word in command],
            capture_output=True, text=True, check=False, cwd="/", timeout=60,
        )  # fmt: skip

    assert run(venv / "bin/tidegate", "--version").stdout == f"tidegate {VERSION}\n"
    install = run(venv / "bin/tidegate", "install")
    assert install.returncode == 0, install.stderr
    [hook] = re.findall(r"^ln -sf (\S+) /usr/bin/tidegate-hook$", install.stdout, re.MULTILINE)
    # Engines run the hook by its path, with the system's Python, outside of the environment.
    assert "usage: tidegate-hook" in run(hook).stderr
    # The environment has no structlog, so the governor fails, but the traceback shows that its
    # code was found.
    stopped = run(venv / "bin/tidegate-governor", "--help").stderr
    assert "tidegate/python/governor/daemon.py" in stopped
    assert "'structlog'" in stopped
    code = "import sys; sys.path.insert(0, sys.argv[1]); from governor import install_paths; print(install_paths.control_dir())"
    found = run(venv / "bin/python", "-c", code, site / "tidegate/python")
    assert (Path(found.stdout.strip()) / "libcuda.so.1").is_file()
    class_ = run(venv / "bin/tidegate", "setup", "containerd", "--runtime-class")
    assert class_.stdout == (ROOT / "packaging/containerd/runtimeclass.yaml").read_text()
