"""Plans for an engine's files: made by the engines' modules, carried out by `apply`."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from governor import install_paths
from governor.errors import SetupError
from governor.setup import tomltext
from governor.setup.files import HostFile, Root
from governor.setup.journal import Journal, Part
from governor.versions import parse_version
from oci_hook.runtime import CONFIG as WRAPPER
from oci_hook.runtime import SettingsError, parse_node

HANDLER = "tidegate"
ANNOTATIONS = "tidegate.gpu/*"
WRITTEN = "# Written by `tidegate setup {0}`; `tidegate setup {0} --undo` takes it out."


@dataclass(frozen=True)
class SetupOptions:
    """What the command line says of an engine's setup."""

    bin_dir: str = "/usr/bin"
    config: str | None = None
    default: bool = False
    hooks_dir: str | None = None
    base_spec: bool = False
    containerd_version: str | None = None

    def program(self, name: str) -> str:
        """Return where a program of ours is on the node."""
        return f"{self.bin_dir.rstrip('/')}/{name}"


@dataclass(frozen=True)
class Change:
    """A file's intended content, None if it is to be removed, and what of it is ours."""

    path: str
    text: str | None
    parts: tuple[Part, ...]


def _accept(_output: str) -> str | None:
    return None


@dataclass(frozen=True)
class Validation:
    """A command of the engine's that reads its configuration and says whether it is right.

    `validate` runs it before anything is written, in a view in which the plan's changes appear as
    made. If it fails, setup changes nothing and prints its last line.
    """

    command: tuple[str, ...]
    # Standard error of versions that do not know the command; these are not asked.
    unsupported: tuple[str, ...] = ()
    # Returns what is wrong with the command's output, None if nothing is.
    check: Callable[[str], str | None] = _accept


@dataclass
class SetupPlan:
    """Changes to one engine's files, notes for the operator, and the steps left to the operator."""

    changes: list[Change] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    todo: list[str] = field(default_factory=list)
    validation: Validation | None = None

    def missing(self, root: Root, program: str) -> None:
        """Add a note if a program does not exist yet."""
        if not root.runs(program):
            self.notes.append(
                f"{root.shown(program)} is not there yet: install it before a container asks for it"
            )

    def look_at_wrapper(self, root: Root, options: SetupOptions) -> None:
        """Note what the wrapper runtime lacks, or that it enters another hook than is meant."""
        self.missing(root, options.program("tidegate-runtime"))
        meant = options.program("tidegate-hook")
        try:
            hook = parse_node(root.peek(WRAPPER), root.shown(WRAPPER)).hook
        except SettingsError as e:
            self.notes.append(str(e))
            return
        if hook != meant:
            self.notes.append(
                f"the wrapper runtime enters {hook}: write `hook {meant}` to {root.shown(WRAPPER)}"
            )


def packaged(name: str) -> str:
    """Return the text of a file of packaging/, from the checkout or as installed."""
    file = install_paths.shared_file(name)
    if file is not None:
        return file.read_text(encoding="utf-8")
    raise SetupError(
        f"/usr/share/tidegate/{name} is missing", hint="reinstall the package tidegate"
    )


def read_toml(root: Root, path: str, file: HostFile | None = None) -> dict[str, Any]:
    """Return a TOML file's content, nothing if there is none; SetupError if it is broken."""
    file = file or root.read(path)
    if file is None:
        return {}
    try:
        return tomltext.parse(file.text())
    except ValueError as e:
        raise SetupError(f"{file.path} is no TOML: {e}", hint="correct it first") from e


def table(tree: Any, *path: str) -> dict[str, Any]:
    """Return the table at a path, an empty one if there is none."""
    for key in path:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree if isinstance(tree, dict) else {}


def strings(value: Any) -> list[str]:
    """Return the strings of an array, none if it is not an array."""
    return [v for v in value if isinstance(v, str)] if isinstance(value, list) else []


def untouched(root: Root, journal: Journal, engine: str, path: str) -> bool:
    """Return whether a file is as we wrote it."""
    entry, file = journal.entry(engine, path), root.read(path)
    return bool(entry and file and entry.steps[-1].after == file.data)


def output(root: Root, *command: str) -> str | None:
    """Return what a program of the engine prints; None if it cannot be asked here.

    If it fails, SetupError with the last line that it printed.
    """
    program = shutil.which(command[0])
    if root.root != "/" or program is None:
        return None
    try:
        done = subprocess.run(
            [program, *command[1:]],
            check=False,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=30,
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        raise SetupError(f"{' '.join(command)}: {e}", hint="see what is wrong with it") from e
    if done.returncode:
        last = done.stderr.strip().rpartition("\n")[2][-500:]
        raise SetupError(
            f"{' '.join(command)} ended with {done.returncode}: {last}",
            hint="correct what it says first",
        )
    return done.stdout


def version(text: str | None) -> tuple[int, int] | None:
    """Return the first version in a text, major and minor."""
    found = parse_version(text or "")
    return found and found[:2]
