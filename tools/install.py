#!/usr/bin/env python3
"""Installs Tidegate under DESTDIR, for `make install` and for both package formats.

    tools/install.py --build build/install --vendor build/vendor [--destdir DIR] [--prefix /usr]

The C parts come from meson and must have been built. Nothing is byte-compiled, started or enabled:
a package does that when it is installed on a node.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parent.parent
CODE = ("oci_hook", "vdriver", "libcontrol", "governor", "kube")
# Files that only the repository needs: the API table and its code generators, and a simulation.
LEFT_OUT = (
    *("libcontrol/api/", "libcontrol/gen.py", "libcontrol/coverage.py"),
    *("libcontrol/functions.toml", "libcontrol/declared.toml"),
    *("kube/gen.py", "kube/simulate.py"),
)
PROGRAMS = {
    "tidegate": "governor",
    "tidegate-governor": "governor",
    "tidegate-steering": "governor",
    "tidegate-hook": "oci_hook",
    "tidegate-runtime": "oci_hook",
    "tidegate-forkserver": "oci_hook",
}
FRONT = ("tidegate-hook", "tidegate-runtime")
# Targets of the commands in bin; the C programs execute the scripts of the same names.
COMMANDS = {
    "tidegate": "governor/tidegate",
    "tidegate-governor": "governor/tidegate-governor",
    "tidegate-hook": "oci_hook/front/tidegate-hook",
    "tidegate-runtime": "oci_hook/front/tidegate-runtime",
}
# Files in the packages that are needed at run time.
SUFFIXES = {".py", ".json", ".toml", ".html", ".css", ".js"}
# Directories of packaging/ that `tidegate setup` or an administrator copies from.
SHARED = ("hooks.d", "crio", "containerd", "grafana", "prometheus", "kubernetes", "selinux")
# Documents, laid out as in the repository, so that links point to the same places.
DOCUMENTS = (
    *("ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "README.md", "SECURITY.md"),
    "simgpu/README.md",
)
DOCUMENT_TREES = ("docs", "examples")
COMPLETIONS = {
    "bash": "share/bash-completion/completions",
    "fish": "share/fish/vendor_completions.d",
}


class Installer:
    """Installs files under a root, with modes that do not depend on the umask."""

    def __init__(self, destdir: Path, prefix: str) -> None:
        self.destdir = destdir
        self.prefix = prefix
        self.written: set[Path] = set()

    def place(self, path: str) -> Path:
        """Return the target of a path, under the prefix unless absolute; create its parent."""
        target = self.destdir / str(PurePosixPath(self.prefix, path)).lstrip("/")
        missing = [d for d in (target.parent, *target.parent.parents) if not d.exists()]
        target.parent.mkdir(parents=True, exist_ok=True)
        for directory in missing:
            directory.chmod(0o755)
        return target

    def file(self, path: str, data: bytes, mode: int = 0o644) -> None:
        """Write a file atomically, because a program that uses the old one may be running."""
        target = self.place(path)
        making = target.with_name(f".{target.name}.new")
        making.write_bytes(data)
        making.chmod(mode)
        making.replace(target)
        self.written.add(target)

    def link(self, path: str, to: str) -> None:
        """Make a relative link atomically, because engines cannot start containers without it."""
        target = self.place(path)
        making = target.with_name(f".{target.name}.new")
        making.unlink(missing_ok=True)
        making.symlink_to(os.path.relpath(self.place(to), target.parent))
        making.replace(target)

    def remove_others(self, path: str) -> None:
        """Remove everything below a directory except what this run wrote."""
        directory = self.place(path)
        for found in sorted(directory.rglob("*"), reverse=True):  # contents before directories
            if found.is_dir() and not found.is_symlink():
                with contextlib.suppress(OSError):  # it is not empty
                    found.rmdir()
            elif found not in self.written:
                found.unlink()


def files(directory: Path) -> Iterator[Path]:
    """Yield every file below a directory, in order, except what Python and editors leave behind."""
    for path in sorted(directory.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts and not path.name.startswith("."):
            yield path


def code(to: Installer, python: str, build: Path) -> None:
    """Install the packages, and the commands as links: programs locate their code by path."""
    for package in CODE:
        for path in files(ROOT / package):
            name = str(path.relative_to(ROOT))
            is_program = path.name in PROGRAMS
            if name.startswith(LEFT_OUT) or not (is_program or path.suffix in SUFFIXES):
                continue
            data = path.read_bytes()
            if is_program:
                data = data.replace(b"#!/usr/bin/python3 ", f"#!{python} ".encode(), 1)
            to.file(f"lib/tidegate/python/{name}", data, 0o755 if is_program else 0o644)
    for name in FRONT:
        front = f"oci_hook/front/{name}"
        to.file(f"lib/tidegate/python/{front}", (build / front).read_bytes(), 0o755)
    for command, program in COMMANDS.items():
        to.link(f"bin/{command}", f"lib/tidegate/python/{program}")


def shared(to: Installer, unit_dir: str, zsh_dir: str, sysconf_dir: str) -> None:
    """Install the files that other programs read."""
    packaging = ROOT / "packaging"
    for name in SHARED:
        for path in files(packaging / name):
            mode = 0o755 if path.stat().st_mode & stat.S_IXUSR else 0o644
            to.file(f"share/tidegate/{path.relative_to(packaging)}", path.read_bytes(), mode)
    commands = re.compile(rb"/usr/(?=(bin|lib)/tidegate)")
    for path in files(packaging / "systemd"):
        preset = path.suffix == ".preset"
        directory = "lib/systemd/system-preset" if preset else unit_dir
        data = commands.sub(f"{to.prefix.rstrip('/')}/".encode(), path.read_bytes())
        to.file(f"{directory}/{path.name}", data)
    for path in files(packaging / "udev"):
        to.file(f"lib/udev/rules.d/{path.name}", path.read_bytes())
    for path in files(packaging / "man"):
        to.file(f"share/man/man{path.suffix[1:]}/{path.name}", path.read_bytes())
    for shell, directory in {**COMPLETIONS, "zsh": zsh_dir}.items():
        for path in files(packaging / "completions" / shell):
            to.file(f"{directory}/{path.name}", path.read_bytes())
    config = f"{sysconf_dir}/tidegate"
    if not (to.destdir / f"{config}/config.yaml".lstrip("/")).exists():
        to.file(f"{config}/config.yaml", (packaging / "config.yaml").read_bytes())
    to.place(f"{config}/config.d/x")


def documents(to: Installer) -> None:
    """Install the documents."""
    trees = (path for tree in DOCUMENT_TREES for path in files(ROOT / tree))
    for path in (*(ROOT / name for name in DOCUMENTS), *trees):
        mode = 0o755 if path.stat().st_mode & stat.S_IXUSR else 0o644
        to.file(f"share/doc/tidegate/{path.relative_to(ROOT)}", path.read_bytes(), mode)
    to.link("share/doc/tidegate/packaging/kubernetes", "share/tidegate/kubernetes")


def main() -> None:
    """Install everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--destdir", default="/", type=Path, help="a root to install into")
    parser.add_argument("--prefix", default="/usr")
    parser.add_argument("--sysconf-dir", default="/etc")
    parser.add_argument("--unit-dir", default="lib/systemd/system")
    parser.add_argument("--zsh-dir", default="share/zsh/vendor-completions")
    parser.add_argument("--python", default="/usr/bin/python3", help="the node's Python")
    parser.add_argument(
        "--build", type=Path, required=True, help="meson's build directory, for the same prefix"
    )
    parser.add_argument(
        "--vendor", type=Path, required=True, help="the directory that tools/vendor.py made"
    )
    args = parser.parse_args()
    if not args.prefix.startswith("/") or not args.python.startswith("/"):
        parser.error("--prefix and --python must be absolute paths")
    if not args.vendor.is_dir():
        parser.error(f"{args.vendor} does not exist; tools/vendor.py makes it")
    to = Installer(args.destdir.absolute(), args.prefix)
    # Without tags meson would also install libcuda.so, which is for linking.
    meson = ["meson", "install", "-C", args.build, "--no-rebuild", "--quiet", "--tags", "runtime"]
    subprocess.run([*meson, "--destdir", to.destdir], check=True)
    code(to, args.python, args.build)
    for path in files(args.vendor):
        to.file(f"lib/tidegate/vendor/{path.relative_to(args.vendor)}", path.read_bytes())
    # Files from older versions would still be found by imports. They are removed last, because a
    # container that starts during the installation needs the hook.
    for name in ("python", "vendor"):
        to.remove_others(f"lib/tidegate/{name}")
    shared(to, args.unit_dir, args.zsh_dir, args.sysconf_dir)
    documents(to)


if __name__ == "__main__":
    main()
