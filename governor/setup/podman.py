"""Set up Podman: install the files in packaging/hooks.d, hooks in the format of oci-hooks(5).

The hooks are in a separate directory. A drop-in for containers.conf adds it to the directories that
Podman already reads. The directory is separate because one of the hooks has the stage `precreate`,
which only Podman supports. Buildah, which Podman also uses for `podman build`, reads the two
directories of oci-hooks(5) regardless of hooks_dir (setupOCIHooks in run_linux.go, 1.28 to 1.45),
and fails at each RUN step if a file there has a stage that it does not support. CRI-O does not
start with such a file.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from governor.errors import SetupError
from governor.setup import crio, services
from governor.setup.files import Root
from governor.setup.journal import Journal
from governor.setup.plan import (
    WRITTEN,
    Change,
    SetupOptions,
    SetupPlan,
    Validation,
    output,
    packaged,
    read_toml,
    table,
    untouched,
    version,
)

HOOKS_DIR = "/etc/tidegate/hooks.d"
HOOKS = ("50-tidegate-devices.json", "50-tidegate-end.json", "50-tidegate.json")
# Podman's default directories.
DEFAULT = ("/usr/share/containers/oci/hooks.d",)
# Buildah's directories, independent of the configuration.
BUILDAH = (*DEFAULT, "/etc/containers/oci/hooks.d")
CONFIGS = ("/usr/share/containers/containers.conf", "/etc/containers/containers.conf")
DROP_INS = "/etc/containers/containers.conf.d"
# Podman 6 reads all of these, sorted by file name.
MORE_DROP_INS = (
    "/usr/share/containers/containers.conf.d",
    "/usr/share/containers/containers.rootful.conf.d",
    DROP_INS,
    "/etc/containers/containers.rootful.conf.d",
)
DROP_IN = f"{DROP_INS}/50-tidegate.conf"
COMMENT = WRITTEN.format("podman")
UNDONE = "nothing, because Podman reads the hooks each time it starts a container"
ASK = ("podman", "--help")


def plan(root: Root, journal: Journal, options: SetupOptions) -> SetupPlan:
    """Plan the hooks' files and the drop-in.

    Raise SetupError if Podman would not read the hooks.
    """
    known = _known(root, journal)
    directory = posixpath.normpath(options.hooks_dir or _directory(known))
    _require_own(root, directory)
    program = options.program("tidegate-hook")
    result = SetupPlan()
    for name in HOOKS:
        path, text = f"{directory}/{name}", packaged(f"hooks.d/{name}")
        text = text.replace("/usr/bin/tidegate-hook", program)
        file = root.read(path)
        if file is not None and not untouched(root, journal, "podman", path):
            found = _hook(file.path, file.text())
            if found.get("path") != program:
                raise SetupError(
                    f"{file.path} is a hook that runs {str(found.get('path'))[:80]}, not {program}",
                    hint="remove the file, or name the program's directory with --bin-dir",
                )
            continue
        result.changes.append(Change(path, text, ({"whole": True},)))
    moved = [path for path in known if path.rpartition("/")[0] != directory]
    for path in moved:
        if not untouched(root, journal, "podman", path):
            raise SetupError(
                f"{root.shown(path)} must be moved to {root.shown(directory)}, but has been"
                " edited since setup wrote it",
                hint="move it there by hand, and run the command again",
            )
    left = {path.rpartition("/")[0] for path in moved}
    asked = default_hooks_dirs(output(root, *ASK))
    drop_in, read = _drop_in(root, journal, directory, left, asked)
    _look_at_others(root, read, {*moved, *(f"{directory}/{name}" for name in HOOKS)})
    if drop_in is not None:
        result.changes.append(drop_in)
    # The removals come last, because Podman uses the old directory until it reads the new one.
    result.changes += [Change(path, None, ({"whole": True},)) for path in moved]
    result.missing(root, program)
    _look_at_processes(root, result, drop_in, directory)
    wanted = [directory, *(d for d in asked or () if d not in left)]
    result.validation = Validation(ASK, check=lambda said: _lacking(said, wanted))
    return result


def _known(root: Root, journal: Journal) -> list[str]:
    """Return the hooks that an earlier setup wrote and that still exist."""
    paths = [e.path for e in journal.engines.get("podman", ()) if e.path.endswith(HOOKS)]
    return [path for path in paths if root.read(path) is not None]


def _directory(known: list[str]) -> str:
    """Return the default directory for the hooks: that of an earlier setup, if there was one."""
    named = [path.rpartition("/")[0] for path in known]
    return next((d for d in named if d not in BUILDAH), HOOKS_DIR)


def _require_own(root: Root, directory: str) -> None:
    """Refuse a directory that is also read by programs that do not support the stage precreate."""
    if _is_one_of(root, directory, BUILDAH):
        raise SetupError(
            f"Buildah also reads hooks from {root.shown(directory)}, and fails to build images if "
            "one of the hooks has the stage precreate",
            hint=f"leave --hooks-dir out (the default is {HOOKS_DIR}), or name another directory",
        )
    if _is_one_of(root, directory, crio.hooks_directories(root)):
        raise SetupError(
            f"CRI-O also reads hooks from {root.shown(directory)}, and does not start if one of the"
            " hooks has the stage precreate",
            hint="name another directory with --hooks-dir, or remove it from CRI-O's hooks_dir",
        )
    # The drop-in applies to all users, and Podman starts no container if it cannot read a
    # directory.
    if (closed := root.closed(directory)) is not None:
        raise SetupError(
            f"other users cannot read {root.shown(closed)}, so their Podman would start no "
            f"container if the hooks were in {root.shown(directory)}",
            hint="chmod o+rx it, or name another directory with --hooks-dir",
        )


def _is_one_of(root: Root, directory: str, others: Iterable[str]) -> bool:
    """Return whether a directory is one of the others, directly or through links."""
    real = root.find(f"{directory}/.")
    return any(
        directory == other or (real is not None and real == root.find(f"{other}/."))
        for other in others
    )


def _drop_in(
    root: Root, journal: Journal, directory: str, left: set[str], asked: tuple[str, ...] | None
) -> tuple[Change | None, tuple[str, ...]]:
    """Return the drop-in that adds a directory of hooks, and all directories read with it.

    The drop-in is None if Podman reads the directory already. `left` are the directories from which
    the hooks are moved. `asked` are those that Podman reports, if known.
    """
    before, behind = _sources(root)
    file = root.read(DROP_IN)
    ours = untouched(root, journal, "podman", DROP_IN)
    if file is None or ours:
        base = _read(root, before)
        now = _read(root, behind, base).directories
        if not ours and directory in now:
            return None, now
        names = list(base.directories)
        if asked is not None:
            # Podman may also read a file that setup does not know of, and that adds to the
            # drop-in's list or replaces it.
            names = [d for d in names if d in asked]
            names += [d for d in asked if d not in {*now, *left, directory}]
        names = list(dict.fromkeys([*names, directory]))
        quoted = ", ".join(json.dumps(name, ensure_ascii=False) for name in names)
        text: str | None = f"{COMMENT}\n[engine]\nhooks_dir = [{quoted}]\n"
        found = base.then(names, DROP_IN)
    else:
        found = _read(root, [*before, DROP_IN])
        now = _read(root, behind, found).directories
        if directory in now:
            return None, now
        text = None  # it was edited, or setup did not write it
    found = _read(root, behind, found)
    if text is None or directory not in found.directories:
        for_it = "".join(f' instead of "{old}"' for old in sorted(left & {*found.directories}))
        raise SetupError(
            f"{root.shown(found.by or DROP_IN)} makes Podman read hooks from "
            f"{', '.join(found.directories)}",
            hint=f'write "{directory}"{for_it} to hooks_dir there, and run the command again',
        )
    part = {"key": ["engine", "hooks_dir"], "comments": [COMMENT]}
    return Change(DROP_IN, text, (part,)), found.directories


@dataclass(frozen=True)
class _HooksDir:
    """The value of hooks_dir after reading some files, and the last of these that sets it."""

    directories: tuple[str, ...] = DEFAULT
    by: str | None = None
    append: bool = False  # set by a file: that file and later ones add to the list

    def then(self, value: list[Any], by: str) -> _HooksDir:
        """Return the value after reading one more file, `by`, which sets it to `value`."""
        attributes = [v["append"] for v in value if isinstance(v, dict) and "append" in v]
        append = bool(attributes[-1]) if attributes else self.append
        names = tuple(v.rstrip("/") for v in value if isinstance(v, str))
        return _HooksDir((*self.directories, *names) if append else names, by, append)


def _read(root: Root, paths: Iterable[str], base: _HooksDir | None = None) -> _HooksDir:
    """Return the value of hooks_dir after reading these files."""
    found = base or _HooksDir()
    for path in paths:
        value = table(read_toml(root, path), "engine").get("hooks_dir")
        if isinstance(value, list):
            found = found.then(value, path)
    return found


def _sources(root: Root) -> tuple[list[str], list[str]]:
    """Return the files that Podman reads, in its order: before the drop-in, and after it."""
    release = version(output(root, "podman", "--version"))
    directories = (DROP_INS,) if release and release < (6, 0) else MORE_DROP_INS
    # Of two files with the same name, the one in the later directory takes precedence.
    paths = {
        name: f"{directory}/{name}"
        for directory in directories
        for name in root.names(directory)
        if name.endswith(".conf")
    }
    own = DROP_IN.rpartition("/")[2]
    before = [path for name, path in sorted(paths.items()) if name < own]
    return [*CONFIGS, *before], [path for name, path in sorted(paths.items()) if name > own]


def _look_at_others(root: Root, found: Iterable[str], ours: set[str]) -> None:
    """Raise SetupError if a file that setup did not write makes Podman run the hook as well."""
    for directory in found:
        for name in root.names(directory):
            path = f"{directory}/{name}"
            if not name.endswith(".json") or path in ours:
                continue
            try:
                program = table(json.loads(root.peek(path)), "hook").get("path")
            except (ValueError, RecursionError):
                continue  # Podman itself reports it
            if isinstance(program, str) and program.endswith("/tidegate-hook"):
                raise SetupError(
                    f"{root.shown(path)} already adds the hook to every container",
                    hint="remove the file, and run the command again",
                )


def _look_at_processes(
    root: Root, result: SetupPlan, drop_in: Change | None, directory: str
) -> None:
    """Report processes that are still using the hook directories with which they started."""
    file = root.read(DROP_IN)
    changes = drop_in is not None and (file is None or file.text() != drop_in.text)
    found = [
        service
        for service in services.running(root.root)
        if changes or (file is not None and service.started < root.changed(file.real))
    ]
    names = services.unaware(root.root, directory)
    restart = f"podman restart {' '.join(names)}"
    if changes:
        result.todo = [service.restart for service in found]
        if names:
            result.todo.append(
                f"{restart}    # if a restart policy restarts them, they run without the hooks"
            )
    else:
        result.notes += [
            f"{service.shown} started before the hooks were set up, and starts containers without "
            f"them: {service.restart}"
            for service in found
        ]
        if names:
            result.notes.append(
                f"{', '.join(names)} started before the hooks were set up, and if a restart "
                f"policy restarts them, they run without the hooks: {restart}"
            )
    result.todo = result.todo or [UNDONE]


def default_hooks_dirs(said: str | None) -> tuple[str, ...] | None:
    """Return the directories that `podman --help` shows as the default of --hooks-dir."""
    found = re.search(r"^\s*--hooks-dir .*\(default \[(.*)\]\)$", said or "", re.MULTILINE)
    return tuple(d.rstrip("/") for d in found[1].split(",")) if found else None


def _lacking(said: str, wanted: Iterable[str]) -> str | None:
    """Return an error if Podman would not read hooks from all of these directories."""
    found = default_hooks_dirs(said)
    lacking = [d for d in wanted if found is not None and d not in found]
    if not lacking:
        return None
    return (
        f"Podman would read hooks from {', '.join(found or ()) or 'no directory'} but not from"
        f" {', '.join(lacking)}, because another containers.conf takes precedence"
    )


def _hook(shown: str, text: str) -> dict[str, Any]:
    try:
        return table(json.loads(text), "hook")
    except (ValueError, RecursionError) as e:
        raise SetupError(f"{shown} is not JSON: {e}", hint="remove it first") from e
