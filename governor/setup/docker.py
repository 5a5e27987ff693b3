"""Set up Docker: add a runtime to daemon.json, which has no drop-ins."""

from __future__ import annotations

import json
from collections.abc import Iterator

from governor.errors import SetupError
from governor.setup import jsontext
from governor.setup.files import Root
from governor.setup.journal import Journal, Part
from governor.setup.plan import (
    HANDLER,
    Change,
    SetupOptions,
    SetupPlan,
    Validation,
    output,
    version,
)
from governor.setup.services import processes

CONFIG = "/etc/docker/daemon.json"
UNDONE = (
    "systemctl restart docker    # a reload does not remove a runtime; containers "
    "are stopped unless live-restore is on"
)
# Other files that may contain dockerd's options: units (systemd.unit(5)), and environment files.
UNITS = (
    "/etc/systemd/system.control",
    "/run/systemd/system.control",
    "/run/systemd/transient",
    "/run/systemd/generator.early",
    "/etc/systemd/system",
    "/run/systemd/system",
    "/run/systemd/generator",
    "/usr/local/lib/systemd/system",
    "/usr/lib/systemd/system",
    "/lib/systemd/system",
    "/run/systemd/generator.late",
)
STARTERS = ("/etc/default/docker", "/etc/sysconfig/docker", "/etc/conf.d/docker")


def plan(root: Root, _journal: Journal, options: SetupOptions) -> SetupPlan:
    """Plan changes to daemon.json; raise SetupError if it has a different `tidegate` runtime."""
    path, program = options.config or CONFIG, options.program("tidegate-runtime")
    file = root.read(path)
    shown, text = root.shown(path), file.text() if file else ""
    try:
        document = jsontext.parse(text)
    except ValueError as e:
        raise SetupError(f"{shown} is not JSON: {e}", hint="correct it first") from e
    runtimes = document.get("runtimes", {})
    if not isinstance(runtimes, dict):
        raise SetupError(
            f'"runtimes" in {shown} is {json.dumps(runtimes)[:40]}', hint="make it an object"
        )
    ours = runtimes.get(HANDLER)
    if ours is not None and (not isinstance(ours, dict) or ours.get("path") != program):
        raise SetupError(
            f"runtime {HANDLER} in {shown} is {json.dumps(ours)[:80]}, not {program}",
            hint="remove the runtime, or name the program's directory with --bin-dir",
        )
    result, parts = SetupPlan(), list[Part]()
    if ours is None:
        parts.append({"member": ["runtimes", HANDLER]})
        if "runtimes" not in document:
            parts.append({"member": ["runtimes"], "only": {}})
        text = _put(shown, text, ("runtimes", HANDLER), {"path": program})
    former = document.get("default-runtime")
    if options.default and former != HANDLER:
        if not root.runs(program):
            raise SetupError(
                f"{root.shown(program)} does not exist: with --default no container would start",
                hint="install it first",
            )
        _look_at_flags(root, path)
        parts.append({"member": ["default-runtime"], "only": HANDLER, "former": former})
        text = _put(shown, text, ("default-runtime",), HANDLER)
    if parts:
        result.changes.append(Change(path, text, tuple(parts)))
    result.look_at_wrapper(root, options)
    found = version(output(root, "dockerd", "--version"))
    if found and found < (24, 0):
        result.notes.append(
            f"Docker {found[0]}.{found[1]} does not support annotations (24.0 is the first version"
            " that does): write `environment allow` to /etc/tidegate/runtime, as"
            " docs/howto/engines.md says"
        )
    # Docker 20.10 does not have `--validate`.
    result.validation = Validation(
        ("dockerd", "--validate", "--config-file", path), unsupported=("unknown flag: --validate",)
    )
    result.todo = [
        "systemctl reload docker    # dockerd rereads its runtimes; containers keep running",
    ]
    return result


def _put(shown: str, text: str, path: tuple[str, ...], value: object) -> str:
    try:
        return jsontext.put(text, path, value)
    except ValueError as e:
        raise SetupError(f"{shown}: {e}", hint="add the runtime by hand") from e


def _look_at_flags(root: Root, config: str) -> None:
    """Refuse if dockerd's command line has --default-runtime.

    If daemon.json sets it as well, dockerd does not start. Runtimes may be set in both places;
    dockerd then has all of them (as 26.1 and 28.5 report with --validate).
    """
    flag = "--default-runtime"
    if config != CONFIG:
        return
    where = [root.shown(path) for path in _starters(root) if flag in _active(root.peek(path))]
    where += [
        f"process {pid}"
        for pid, words in processes(root.root, "dockerd")
        if any(word.split("=")[0] == flag for word in words)
    ]
    if where:
        raise SetupError(
            f"{where[0]} starts dockerd with {flag}, and dockerd does not start "
            "if daemon.json sets it as well",
            hint=f"move what {flag} says to {root.shown(config)} first",
        )


def _active(text: str) -> str:
    """Return the lines of a unit or an environment file without comments."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith(("#", ";"))]
    return "\n".join(lines)


def _starters(root: Root) -> Iterator[str]:
    """Yield the files that may contain dockerd's command line, or a part of it."""
    yield from STARTERS
    for directory in UNITS:
        unit = f"{directory}/docker.service"
        drop_ins = (f"{unit}.d", f"{directory}/service.d")
        inside = [f"{d}/{n}" for d in drop_ins for n in root.names(d) if n.endswith(".conf")]
        for path in (unit, *inside):
            yield path
            for line in _active(root.peek(path)).splitlines():
                key, _, value = line.partition("=")
                if key.strip() == "EnvironmentFile":
                    named = value.strip().removeprefix("-").strip('"')
                    yield from root.matching(named) if "*" in named else [named]
