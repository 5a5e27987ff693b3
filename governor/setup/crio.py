"""CRI-O: a handler in a drop-in of crio.conf.d."""

from __future__ import annotations

import json

from governor.errors import SetupError
from governor.setup.files import Root
from governor.setup.journal import Journal
from governor.setup.plan import (
    HANDLER,
    WRITTEN,
    Change,
    Options,
    Plan,
    packaged,
    read_toml,
    strings,
    table,
    untouched,
)

MAIN = "/etc/crio/crio.conf"
DROP_INS = "/etc/crio/crio.conf.d"
NAME = "50-tidegate.conf"
HOOKS_DIR = "/usr/share/containers/oci/hooks.d"
UNDONE = "systemctl restart crio    # containers go on"
RUNTIMES = ("crio", "runtime", "runtimes")


def plan(root: Root, journal: Journal, options: Options) -> Plan:
    """Say what the drop-in shall be; SetupError where CRI-O has another handler of the name."""
    path = options.config or f"{DROP_INS}/{NAME}"
    program = options.program("tidegate-runtime")
    result = Plan()
    for where in _files(root):
        found = table(read_toml(root, where), *RUNTIMES).get(HANDLER)
        if found is None or (where == path and untouched(root, journal, "crio", path)):
            continue
        if not isinstance(found, dict) or found.get("runtime_path") != program:
            shown = found.get("runtime_path") if isinstance(found, dict) else found
            raise SetupError(
                f"handler {HANDLER} in {root.shown(where)} is {str(shown)[:80]}, not {program}",
                hint="remove it, or name its directory with --bin-dir",
            )
        return result
    _look_at_hooks(root)
    if root.read(path) is not None and not untouched(root, journal, "crio", path):
        raise SetupError(
            f"{root.shown(path)} is there, and has no handler {HANDLER}", hint="move it away"
        )
    text = packaged(f"crio/{NAME}").replace("/usr/bin/tidegate-runtime", program)
    part = {"tables": [*RUNTIMES, HANDLER], "comments": [WRITTEN.format("crio")]}
    result.changes.append(Change(path, text, (part,)))
    result.look_at_wrapper(root, options)
    result.todo = [
        UNDONE,
        "tidegate setup crio --runtime-class | kubectl apply -f -    # once a cluster",
    ]
    return result


def _files(root: Root) -> list[str]:
    """Return CRI-O's files in its order: it reads whatever lies in the directory."""
    return [MAIN, *(f"{DROP_INS}/{name}" for name in root.names(DROP_INS))]


def hooks_directories(root: Root) -> list[str]:
    """Return where CRI-O reads hooks, none where it has no configuration."""
    paths = [path for path in _files(root) if root.read(path) is not None]
    found = [HOOKS_DIR] if paths else []
    for path in paths:
        runtime = table(read_toml(root, path), "crio", "runtime")
        if "hooks_dir" in runtime:
            found = [d.rstrip("/") for d in strings(runtime["hooks_dir"])]
    return found


def _look_at_hooks(root: Root) -> None:
    """Refuse where a hook of ours would be entered by CRI-O and by the runtime."""
    for directory in hooks_directories(root):
        for name in root.names(directory):
            file = root.read(f"{directory}/{name}") if name.endswith(".json") else None
            if file is None:
                continue
            try:
                hook = table(json.loads(file.text()), "hook").get("path")
            except (ValueError, RecursionError):
                continue  # CRI-O says so itself
            if isinstance(hook, str) and hook.endswith("/tidegate-hook"):
                raise SetupError(
                    f"CRI-O reads {file.path}, which enters the hook into each container already",
                    hint="remove it, or take its directory out of hooks_dir: the handler does it",
                )
