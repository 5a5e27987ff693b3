"""Podman: hooks by oci-hooks(5), the files of packaging/hooks.d.

They lie in /etc, and Podman by itself reads /usr/share alone (4.3 to 5.x: DefaultHooksDirs), so a
drop-in of containers.conf names both. In /usr/share CRI-O would find them, too.
"""

from __future__ import annotations

import json
from typing import Any

from governor.errors import SetupError
from governor.setup import crio
from governor.setup.files import Root
from governor.setup.journal import Journal
from governor.setup.plan import (
    WRITTEN,
    Change,
    Options,
    Plan,
    packaged,
    read_toml,
    table,
    untouched,
)

HOOKS_DIR = "/etc/containers/oci/hooks.d"
HOOKS = ("50-tidegate-devices.json", "50-tidegate-end.json", "50-tidegate.json")
# Where Podman itself looks, unless it is told otherwise.
DEFAULT = ("/usr/share/containers/oci/hooks.d",)
CONFIGS = ("/usr/share/containers/containers.conf", "/etc/containers/containers.conf")
DROP_INS = "/etc/containers/containers.conf.d"
DROP_IN = f"{DROP_INS}/50-tidegate.conf"
UNDONE = "nothing: Podman reads hooks at each start of a container"


def plan(root: Root, journal: Journal, options: Options) -> Plan:
    """Say what the hooks' files shall be, and have Podman read them; SetupError where it cannot."""
    directory = (options.hooks_dir or HOOKS_DIR).rstrip("/")
    if directory in crio.hooks_directories(root):
        raise SetupError(
            f"CRI-O reads hooks from {root.shown(directory)} as well, and does not start with "
            "the stage precreate",
            hint="name another directory with --hooks-dir, or take it out of CRI-O's hooks_dir",
        )
    program = options.program("tidegate-hook")
    result = Plan()
    for name in HOOKS:
        path, text = f"{directory}/{name}", packaged(f"hooks.d/{name}")
        text = text.replace("/usr/bin/tidegate-hook", program)
        file = root.read(path)
        if file is not None and not untouched(root, journal, "podman", path):
            found = _hook(file.path, file.text())
            if found.get("path") != program:
                raise SetupError(
                    f"{file.path} is a hook that runs {str(found.get('path'))[:80]}, not {program}",
                    hint="remove it, or name its directory with --bin-dir",
                )
            continue
        result.changes.append(Change(path, text, ({"whole": True},)))
    read, by = _directories(root)
    if directory not in read:
        result.changes.append(_drop_in(root, [*read, directory], by))
    result.missing(root, program)
    result.todo = [UNDONE]
    return result


def _drop_in(root: Root, directories: list[str], by: str | None) -> Change:
    """Return a file that has Podman read hooks from these directories."""
    if root.read(DROP_IN) is not None or (by and by.startswith(DROP_INS) and by > DROP_IN):
        raise SetupError(
            f"{root.shown(by or DROP_IN)} has Podman read hooks from {', '.join(directories[:-1])}",
            hint=f'add "{directories[-1]}" to hooks_dir there, or name one with --hooks-dir',
        )
    comment = WRITTEN.format("podman")
    quoted = ", ".join(json.dumps(d, ensure_ascii=False) for d in directories)
    text = f"{comment}\n[engine]\nhooks_dir = [{quoted}]\n"
    return Change(DROP_IN, text, ({"key": ["engine", "hooks_dir"], "comments": [comment]},))


def _directories(root: Root) -> tuple[list[str], str | None]:
    """Return where Podman reads hooks, and the file that says so."""
    found, by = list(DEFAULT), None
    drop_ins = [f"{DROP_INS}/{name}" for name in root.names(DROP_INS) if name.endswith(".conf")]
    for path in (*CONFIGS, *drop_ins):
        value = table(read_toml(root, path), "engine").get("hooks_dir")
        if isinstance(value, list):
            appended = any(isinstance(v, dict) and v.get("append") for v in value)
            names = [v.rstrip("/") for v in value if isinstance(v, str)]
            found, by = [*found, *names] if appended else names, path
    return found, by


def _hook(shown: str, text: str) -> dict[str, Any]:
    try:
        return table(json.loads(text), "hook")
    except (ValueError, RecursionError) as e:
        raise SetupError(f"{shown} is no JSON: {e}", hint="remove it first") from e
