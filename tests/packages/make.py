"""Packages of this working tree, built once per session, and fresh roots to install them into."""

from __future__ import annotations

import atexit
import fcntl
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT, lack

NEWER = "0.1.1"
_made: dict[tuple[str, ...], Path] = {}


def package(kind: str, *arguments: str, version: str = "") -> Path:
    """Build a package, once per session, and return its file; `version` overrides the version of the tree."""
    key = (kind, *arguments, version)
    if key not in _made:
        out = ROOT / "build/packages" / f"tests-{os.getpid()}-{len(_made)}"
        atexit.register(shutil.rmtree, out, ignore_errors=True)
        with (ROOT / "build/packages.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another worker would build in the same directory
            done = subprocess.run(
                ["tools/package", kind, *arguments],
                cwd=ROOT,
                env={**os.environ, "OUT": str(out), **({"VERSION": version} if version else {})},
                capture_output=True,
                text=True,
                timeout=900,
                check=False,
            )
        assert done.returncode == 0, done.stdout + done.stderr
        _made[key] = Path(done.stdout.split()[-1])
    return _made[key]


def fresh_root(suite: str, *, slim: bool = False) -> Path:
    """Return the root directory of a fresh system of a release, with engines and without Tidegate.

    With `slim`, it has no engines either.
    """
    done = subprocess.run(
        ["tools/package-root", suite, *(["slim"] if slim else [])],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    if done.returncode:
        lack(f"needs a root file system of {suite}: {done.stderr.strip()}")
    return ROOT / "build/package-roots" / (f"{suite}-slim" if slim else suite)


def laid_out(destdir: Path, build: Path, vendor: Path) -> Path:
    """Install meson's build into a directory, and return the path of the prefix in it.

    The build is that of the tests, so the prefix is the one with which it was configured.
    """
    options = json.loads((build / "meson-info/intro-buildoptions.json").read_text())
    prefix = next(one["value"] for one in options if one["name"] == "prefix")
    subprocess.run([sys.executable, "tools/vendor.py", vendor], cwd=ROOT, check=True)
    tools = str(Path(sys.executable).parent)  # contains meson
    where = ["--destdir", destdir, "--prefix", prefix, "--build", build, "--vendor", vendor]
    subprocess.run(
        [sys.executable, "tools/install.py", *where],
        cwd=ROOT,
        env={**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"},
        check=True,
    )
    return destdir / prefix.lstrip("/")
