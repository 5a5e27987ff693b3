#!/usr/bin/env python3
"""Fills a directory with the Python modules that packages ship themselves, each with its licence.

    tools/vendor.py DIR          the module that no distribution has: nvidia-ml-py, as installed
    tools/vendor.py --all DIR    all modules but PyYAML, for distributions that lack them for the
                                 Python version in use (RHEL); pip fetches requirements-vendor.lock

Only pure Python modules are shipped: a compiled one would tie a package to one version of Python.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NAME = "nvidia-ml-py"
MODULE = "pynvml.py"


def licence(text: str) -> str:
    """Return the licence, which is the comment at the beginning of a module."""
    lines = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.strip("#").removeprefix(" "))
    found = "\n".join(lines).strip()
    if "Redistribution and use" not in found:
        raise SystemExit(
            f"vendor: {MODULE} does not begin with its licence; find out where the licence is"
        )
    return found + "\n"


def from_here(directory: Path) -> None:
    """Copy nvidia-ml-py, which is a single module, with the licence in a separate file."""
    try:
        found = metadata.distribution(NAME)
    except metadata.PackageNotFoundError:
        raise SystemExit(f"vendor: {NAME} is not installed; run make bootstrap first") from None
    source = Path(str(found.locate_file(MODULE)))
    shutil.copyfile(source, directory / MODULE)
    note = f"{MODULE}: {NAME} {found.version}\n\n"
    (directory / f"{NAME}.LICENSE").write_text(note + licence(source.read_text("utf-8")), "utf-8")


def by_pip(directory: Path) -> None:
    """Install the packages in requirements-vendor.lock with pip."""
    lock = ROOT / "requirements-vendor.lock"
    options = ["--no-deps", "--no-compile", "--require-hashes", "--only-binary", ":all:"]
    pure = ["--platform", "any", "--implementation", "py", "--abi", "none"]
    source = ["--target", str(directory), "--requirement", str(lock)]
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", *options, *pure, *source],
        check=True,
    )
    shutil.rmtree(directory / "bin", ignore_errors=True)
    for tests in ("jsonschema/tests", "jsonschema/benchmarks"):
        shutil.rmtree(directory / tests, ignore_errors=True)
    # The metadata directory is kept, because it contains the licence. pip's records of the
    # installation are removed.
    for info in directory.glob("*.dist-info"):
        for name in ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json"):
            (info / name).unlink(missing_ok=True)


def main() -> None:
    """Fill the directory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("directory", type=Path)
    args = parser.parse_args()
    shutil.rmtree(args.directory, ignore_errors=True)
    args.directory.mkdir(parents=True)
    if args.all:
        by_pip(args.directory)
    from_here(args.directory)
    if compiled := sorted(args.directory.rglob("*.so")):
        raise SystemExit(f"vendor: {compiled[0]} is compiled")


if __name__ == "__main__":
    main()
