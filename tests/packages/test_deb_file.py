"""The file of the Debian package: its contents, dependencies and scripts, and lintian's reports.

The package is built for these tests, which takes as long as all other tests here together;
test_deb.py installs and removes it.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from governor import VERSION
from tests.conftest import ROOT
from tests.packages.make import package
from tools.install import DOCUMENT_TREES, DOCUMENTS


@pytest.fixture(scope="module")
def deb(require: Callable[..., None]) -> Path:
    require("dpkg-buildpackage", "dh")
    return package("deb")


def listing(deb: Path) -> list[str]:
    """Return the names in a package that are not directories."""
    text = subprocess.run(
        ["dpkg-deb", "--contents", deb], capture_output=True, text=True, check=True
    ).stdout
    found = (line.split(None, 5) for line in text.splitlines())
    return sorted(w[5].split(" -> ")[0].removeprefix(".") for w in found if w[0][0] != "d")


def scripts(deb: Path, tmp_path: Path) -> Path:
    """Unpack a package's control file and scripts, and return their directory."""
    subprocess.run(["dpkg-deb", "--control", deb, tmp_path / "control"], check=True)
    return tmp_path / "control"


@pytest.mark.slow
def test_lintian_reports_nothing(require: Callable[..., None], deb: Path) -> None:
    """The exceptions are in packaging/debian/tidegate.lintian-overrides, each with its reason."""
    require("lintian")
    changes = next(deb.parent.glob("tidegate_*.changes"))
    # There are units and no init.d script. Only Debian 12's lintian complains about that. Newer versions do not know
    # the tag, and complain about an override of it.
    tag = "package-supports-alternative-init-but-no-init.d-script"
    known = Path(f"/usr/share/lintian/tags/p/{tag}.tag").exists()
    tags = [tag] if known else []
    # Ubuntu's debhelper omits the upstream changelog, and lintian takes CHANGELOG.md for it.
    if "/usr/share/doc/tidegate/changelog.gz" not in listing(deb):
        tags.append("wrong-name-for-upstream-changelog")
    but = ("--suppress-tags", ",".join(tags)) if tags else ()
    done = subprocess.run(
        ["lintian", "--profile", "debian", "--fail-on", "error,warning,info", "--display-info", *but, changes],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


def test_dependencies_are_declared_and_no_library_is_provided(deb: Path, tmp_path: Path) -> None:
    control = scripts(deb, tmp_path)
    text = (control / "control").read_text()
    fields = dict(re.findall(r"^([A-Z][A-Za-z-]+): (.*)$", text, re.MULTILINE))
    assert fields["Version"] == f"{VERSION}-1"
    depends = {word.split()[0] for word in fields["Depends"].split(", ")}
    assert depends == {
        "libc6", "python3", "python3-jsonschema", "python3-prometheus-client", "python3-pyelftools",
        "python3-structlog", "python3-yaml",
    }  # fmt: skip
    assert not {"Provides", "Conflicts", "Replaces"} & set(fields)
    # With shlibs or symbols, other packages would get a dependency on this one for libcuda.so.1.
    assert sorted(p.name for p in control.iterdir()) == [
        "conffiles", "control", "md5sums", "postinst", "postrm", "prerm",
    ]  # fmt: skip
    assert (control / "conffiles").read_text().split() == ["/etc/tidegate/config.yaml"]
    assert "ldconfig" not in "".join(p.read_text() for p in control.iterdir())


def test_the_files_of_the_package_are_those_of_make_install(deb: Path) -> None:
    found = listing(deb)
    trees = tuple(f"/usr/share/doc/tidegate/{tree}/" for tree in DOCUMENT_TREES)
    own = [
        n
        for n in found
        if not n.startswith(("/usr/lib/tidegate/python/", "/usr/share/tidegate/", *trees))
    ]
    pages = (
        "/usr/share/man/",
        "/usr/share/bash-completion/",
        "/usr/share/zsh/",
        "/usr/share/fish/",
    )
    units = "/usr/lib/systemd/system/"
    upstream = "/usr/share/doc/tidegate/changelog.gz" in found  # Ubuntu's debhelper omits it
    assert [n for n in own if not n.startswith((*pages, units))] == [
        "/etc/tidegate/config.yaml",
        *(f"/usr/bin/{n}" for n in ("tidegate", "tidegate-governor", "tidegate-hook", "tidegate-runtime")),
        "/usr/lib/tidegate/libtidegate-arbiter.so",
        "/usr/lib/tidegate/vendor/nvidia-ml-py.LICENSE",
        "/usr/lib/tidegate/vendor/pynvml.py",
        "/usr/lib/tidegate/x86_64-linux-gnu/libcuda.so.1",
        "/usr/lib/tidegate/x86_64-linux-gnu/libnvidia-ml.so.1",
        "/usr/lib/udev/rules.d/70-tidegate.rules",
        *(f"/usr/share/doc/tidegate/{n}" for n in (
            *DOCUMENTS[:-1], "changelog.Debian.gz", *(["changelog.gz"] if upstream else []), "copyright", "packaging/kubernetes",
            DOCUMENTS[-1],
        )),
        "/usr/share/lintian/overrides/tidegate",
        "/usr/share/python3/runtime.d/tidegate.rtupdate",
    ]  # fmt: skip
    assert sorted(Path(n).name for n in own if n.startswith(units)) == sorted(
        p.name for p in (ROOT / "packaging/systemd").iterdir() if p.suffix != ".preset"
    )
    assert not [n for n in found if n.endswith(".pyc")]


def test_the_scripts_run_their_steps_in_order(deb: Path, tmp_path: Path) -> None:
    control = scripts(deb, tmp_path)
    postinst, prerm, postrm = ((control / n).read_text() for n in ("postinst", "prerm", "postrm"))
    # Bytecode is compiled before anything runs, and the mirror is made before the governor starts,
    # because the governor's unit requires it.
    steps = [
        "py3compile",
        "\n    move_hooks\n",
        "_dh_action 'tidegate-refresh.path'",
        "_dh_action 'tidegate-governor.service'",
    ]
    assert [postinst.index(step) for step in steps] == sorted(postinst.index(s) for s in steps)
    # An upgrade restarts the governor instead of stopping it, so that running containers are without one only for a
    # moment.
    assert "_dh_action=restart" in postinst
    assert '"$1" = remove' in prerm.partition("deb-systemd-invoke stop")[0].rpartition("\nif ")[2]
    assert prerm.index("refuse_in_use\n") < prerm.index("undo_setups\n") < prerm.index("py3clean")
    assert "#INCLUDE#" not in postinst + prerm + postrm
    for script in (postinst, prerm, postrm):
        assert subprocess.run(["sh", "-n"], input=script, text=True, check=False).returncode == 0
