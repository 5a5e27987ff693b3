"""Types and helpers for plans to change an engine's files, which `apply` carries out."""

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
    """Command-line options for an engine's setup."""

    bin_dir: str = "/usr/bin"
    config: str | None = None
    default: bool = False
    hooks_dir: str | None = None
    base_spec: bool = False
    containerd_version: str | None = None

    def program(self, name: str) -> str:
        """Return the path of one of Tidegate's programs on the node."""
        return f"{self.bin_dir.rstrip('/')}/{name}"


@dataclass(frozen=True)
class Change:
    """A file's new content, None if it is to be removed, and the parts that setup writes."""

    path: str
    text: str | None
    parts: tuple[Part, ...]


def _accept(_output: str) -> str | None:
    return None


@dataclass(frozen=True)
class Validation:
    """A command of the engine that checks its configuration.

    `validate` runs it before anything is written, in a view in which the plan's changes appear to
    have been made. If it fails, setup changes nothing and prints the last line of its output.
    """

    command: tuple[str, ...]
    # What versions without the command print on stderr; with these, nothing is checked.
    unsupported: tuple[str, ...] = ()
    # Returns an error in the command's output, None if there is none.
    check: Callable[[str], str | None] = _accept


@dataclass
class SetupPlan:
    """Changes to one engine's files, with notes and remaining steps for the operator."""

    changes: list[Change] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    todo: list[str] = field(default_factory=list)
    validation: Validation | None = None

    def missing(self, root: Root, program: str) -> None:
        """Add a note if a program does not exist yet."""
        if not root.runs(program):
            self.notes.append(
                f"{root.shown(program)} does not exist yet: install it before a container needs it"
            )

    def look_at_wrapper(self, root: Root, options: SetupOptions) -> None:
        """Add a note if the wrapper runtime is missing, or would add a different hook."""
        self.missing(root, options.program("tidegate-runtime"))
        meant = options.program("tidegate-hook")
        try:
            hook = parse_node(root.peek(WRAPPER), root.shown(WRAPPER)).hook
        except SettingsError as e:
            self.notes.append(str(e))
            return
        if hook != meant:
            self.notes.append(
                f"the wrapper runtime adds {hook}: write `hook {meant}` to {root.shown(WRAPPER)}"
            )


def packaged(name: str) -> str:
    """Return the text of a file in packaging/, from the checkout or as installed."""
    file = install_paths.shared_file(name)
    if file is not None:
        return file.read_text(encoding="utf-8")
    raise SetupError(
        f"/usr/share/tidegate/{name} is missing", hint="reinstall the package tidegate"
    )


def read_toml(root: Root, path: str, file: HostFile | None = None) -> dict[str, Any]:
    """Return a TOML file's content, empty if there is no file.

    Raise SetupError if it is invalid.
    """
    file = file or root.read(path)
    if file is None:
        return {}
    try:
        return tomltext.parse(file.text())
    except ValueError as e:
        raise SetupError(f"{file.path} is not TOML: {e}", hint="correct it first") from e


def table(tree: Any, *path: str) -> dict[str, Any]:
    """Return the table at a path, an empty one if there is none."""
    for key in path:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree if isinstance(tree, dict) else {}


def strings(value: Any) -> list[str]:
    """Return the strings in an array, none if it is not an array."""
    return [v for v in value if isinstance(v, str)] if isinstance(value, list) else []


def untouched(root: Root, journal: Journal, engine: str, path: str) -> bool:
    """Return whether a file is as setup wrote it."""
    entry, file = journal.entry(engine, path), root.read(path)
    return bool(entry and file and entry.steps[-1].after == file.data)


def output(root: Root, *command: str) -> str | None:
    """Return the output of an engine's program, or None if it cannot be run here.

    If it fails, raise SetupError with the last line that it printed.
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
        raise SetupError(f"{' '.join(command)}: {e}", hint="run it by hand to see the error") from e
    if done.returncode:
        last = done.stderr.strip().rpartition("\n")[2][-500:]
        raise SetupError(
            f"{' '.join(command)} exited with status {done.returncode}: {last}",
            hint="correct that first",
        )
    return done.stdout


def version(text: str | None) -> tuple[int, int] | None:
    """Return the first version in a text, major and minor."""
    found = parse_version(text or "")
    return found and found[:2]
