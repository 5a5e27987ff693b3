"""A node's root as a tree of files, `tidegate setup` in it as it is typed, and what the tree is afterwards."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from governor import cli


def put(root: Path, path: str, content: str | bytes, mode: int = 0o644) -> Path:
    """Make a file, with the bytes that are given: no newline is translated."""
    file = root / path.lstrip("/")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    file.chmod(mode)
    return file


def put_programs(root: Path, directory: str = "/usr/bin") -> None:
    for name in ("tidegate-hook", "tidegate-runtime"):
        put(root, f"{directory}/{name}", "#!/bin/sh\n", 0o755)


def setup(root: Path, *words: str) -> int:
    return cli.main(["setup", *words, "--root", str(root)])


def text(root: Path, path: str) -> str:
    return (root / path.lstrip("/")).read_bytes().decode()


def snapshot(root: Path) -> dict[str, tuple[int, bytes]]:
    """Every path with its type and mode, and what is in it."""
    found = {}
    for directory, names, files in os.walk(root):
        for name in names + files:
            path = Path(directory, name)
            mode = path.lstat().st_mode
            content = b""
            if stat.S_ISLNK(mode):
                content = str(path.readlink()).encode()
            elif stat.S_ISREG(mode):
                content = path.read_bytes()
            found[str(path.relative_to(root))] = (mode, content)
    return found
