"""Builds the C parts and adds them to the wheel, which suits one architecture and any Python 3."""

from __future__ import annotations

import platform
import re
import subprocess
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SHARED = ("hooks.d", "crio", "containerd", "grafana", "prometheus", "kubernetes", "selinux")
UNITS = ("systemd", "udev", "config.yaml")
CODE = "tidegate/python"
"""Directory of the packages in the wheel; packaging/wheel/tidegate explains the choice."""


class WheelBuild(BuildHookInterface[Any]):
    """Called by hatchling for each wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build with meson, and list the files to include; an editable install needs neither."""
        if version == "editable":
            return
        root = Path(self.root)
        build = root / "build/wheel"
        again = ["--reconfigure"] if (build / "build.ninja").exists() else []
        options = ["--prefix=/usr", "-Dtests=false", "-Dwerror=false"]
        subprocess.run(["meson", "setup", build, *options, *again], cwd=root, check=True)
        subprocess.run(["meson", "compile", "-C", build], check=True)
        made, how = root / "build/wheel-root", ("--no-rebuild", "--strip")
        subprocess.run(
            ["meson", "install", "-C", build, *how, "--tags", "runtime", "--destdir", made],
            check=True,
        )
        private = made / "usr/lib/tidegate"
        libraries = sorted(private.rglob("*.so*"))
        included = {str(p): f"{CODE}/libcontrol/lib/{p.relative_to(private)}" for p in libraries}
        for program in ("tidegate-hook", "tidegate-runtime"):
            included[str(build / "oci_hook/front" / program)] = f"{CODE}/oci_hook/front/{program}"
        for name in (*SHARED, *UNITS):
            if (root / "packaging" / name).exists():
                included[str(root / "packaging" / name)] = f"{CODE}/governor/share/{name}"
        build_data["force_include"].update(included)
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-manylinux_2_{_glibc(libraries)}_{platform.machine()}"


def _glibc(libraries: list[Path]) -> int:
    """Return N for 2.N, the oldest glibc that has all symbol versions that the libraries need."""
    asked = [re.findall(rb"\bGLIBC_2\.([0-9]+)", path.read_bytes()) for path in libraries]
    return max(int(number) for found in asked for number in found)
