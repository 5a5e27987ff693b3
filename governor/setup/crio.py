"""Set up CRI-O: add a handler in crio.conf.d, derived from the default one, and its runtime."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable
from typing import Any

from governor.errors import SetupError
from governor.setup import crio_config
from governor.setup.crio_config import DROP_INS, MAIN, Configuration, search
from governor.setup.files import Root
from governor.setup.journal import Journal
from governor.setup.plan import (
    HANDLER,
    WRITTEN,
    Change,
    SetupOptions,
    SetupPlan,
    Validation,
    packaged,
    read_toml,
    table,
    untouched,
)
from oci_hook.runtime import CONFIG as WRAPPER
from oci_hook.runtime import NodeSettings, SettingsError, parse_node

NAME = "50-tidegate.conf"
UNDONE = "delete the pods of runtime class tidegate, then run systemctl restart crio"
RUNTIMES = ("crio", "runtime", "runtimes")
# Keys of the default handler that determine its program; here the program is the wrapper.
OF_THE_PROGRAM = frozenset(
    ("inherit_default_runtime", "platform_runtime_paths", "runtime_path", "runtime_type")
)
COMMENT = WRITTEN.format("crio")


def plan(root: Root, journal: Journal, options: SetupOptions) -> SetupPlan:
    """Plan CRI-O's files.

    Raise SetupError if CRI-O has a different handler `tidegate`, or would not start with its files.
    """
    path = options.config or f"{DROP_INS}/{NAME}"
    program = options.program("tidegate-runtime")
    ours = untouched(root, journal, "crio", path)
    config = _read(root, without=path if ours else "")
    for origin, handler in _handlers(root, without=path if ours else ""):
        if handler.get("runtime_path") != program:
            raise SetupError(
                f"handler {HANDLER} in {root.shown(origin)} is "
                f"{str(handler.get('runtime_path'))[:80]}, not {program}",
                hint="remove the handler, or name the program's directory with --bin-dir",
            )
    if HANDLER not in config.handlers and root.read(path) is not None and not ours:
        raise SetupError(
            f"{root.shown(path)} exists, but has no handler {HANDLER}", hint="move it away"
        )
    _look_at_hooks(root, config)
    result = SetupPlan()
    base = _base(config, root.runs)
    if HANDLER not in config.handlers:
        handler = _handler(config, base, program)
        config.add(path, {"crio": {"runtime": {"runtimes": {HANDLER: handler}}}})
        part = {"tables": [*RUNTIMES, HANDLER], "comments": [COMMENT]}
        result.changes.append(Change(path, _text(handler), (part,)))
    for fault, remedy in config.faults(root.runs):
        # The required restart would leave the node without CRI-O.
        raise SetupError(f"CRI-O does not start: {fault}", hint=f"{remedy} first")
    real = config.program(base, root.runs)
    if real is not None:
        _name_runtime(root, journal, config.text("runtime_root", HANDLER), real, result)
    result.look_at_wrapper(root, options)
    if search("crio", root.runs) is None:
        result.notes.append("CRI-O is not installed, so the new files were not checked")
    result.todo = [
        "systemctl restart crio    # containers keep running",
        "tidegate setup crio --runtime-class | kubectl apply -f -    # once per cluster",
    ]
    if path == MAIN or path.startswith(f"{DROP_INS}/"):
        result.validation = Validation(
            ("crio", "config"), check=lambda said: _complaint(said, root.runs)
        )
    return result


def _files(root: Root) -> list[str]:
    """Return CRI-O's files, including all drop-ins, in the order in which it reads them."""

    def is_directory(path: str) -> bool:
        real = root.find(path)
        return real is not None and root.is_dir(real)

    return list(crio_config.files(root.names, is_directory))


def _read(root: Root, *, without: str = "") -> Configuration:
    config = Configuration()
    for path in _files(root):
        if path != without:
            config.add(path, read_toml(root, path))
    return config


def _handlers(root: Root, *, without: str) -> list[tuple[str, dict[str, Any]]]:
    """Return each file that has the handler `tidegate`, and that handler."""
    found = []
    for path in _files(root):
        handler = table(read_toml(root, path), *RUNTIMES).get(HANDLER)
        if handler is not None and path != without:
            found.append(
                (path, handler if isinstance(handler, dict) else {"runtime_path": handler})
            )
    return found


def hooks_directories(root: Root) -> list[str]:
    """Return CRI-O's hook directories; none if it has no configuration."""
    if all(root.read(path) is None for path in _files(root)):
        return []
    return list(_read(root).hooks_directories)


def _look_at_hooks(root: Root, config: Configuration) -> None:
    """Refuse if both CRI-O and the runtime would add the hook."""
    for directory in config.hooks_directories:
        for name in root.names(directory):
            file = root.read(f"{directory}/{name}") if name.endswith(".json") else None
            if file is None:
                continue
            try:
                document = json.loads(file.text())
            except (ValueError, RecursionError):
                continue  # CRI-O itself reports it
            hook = table(document, "hook").get("path")
            if isinstance(hook, str) and hook.endswith("/tidegate-hook"):
                raise SetupError(
                    f"CRI-O reads {file.path}, which already adds the hook to every container",
                    hint="remove it, or take its directory out of hooks_dir: the handler adds the"
                    " hook",
                )
            if stages := crio_config.unknown_stages(document):
                raise SetupError(
                    f"CRI-O does not start: {file.path} names the stage {stages[0][:40]}",
                    hint="take its directory out of hooks_dir, or move the file elsewhere",
                )


def _base(config: Configuration, runs: Callable[[str], bool]) -> str:
    """Return the default handler, from which the handler `tidegate` is derived."""
    name = config.default(runs)
    if name == HANDLER:
        name = next((n for n in crio_config.BUILT_IN if config.program(n, runs)), name)
    if name == HANDLER:
        raise SetupError(
            f"CRI-O has no handler besides {HANDLER} that runs crun or runc",
            hint="install one of them, or write a handler for it",
        )
    kind = config.text("runtime_type", name)
    if kind == "vm":
        raise SetupError(
            f"CRI-O's default handler {name} has runtime_type vm, which has no OCI runtime",
            hint="set default_runtime to a handler that runs runc or crun",
        )
    return name


def _handler(config: Configuration, base: str, program: str) -> dict[str, Any]:
    """Return the handler `tidegate`: a copy of the default one with the wrapper as its program.

    If no file has the default handler, CRI-O's built-in values for it are not known here.
    """
    former = config.handlers.get(base, {})
    return {
        "runtime_path": program,
        "runtime_type": former.get("runtime_type") or "oci",
        # CRI-O's own default depends on its version.
        "runtime_root": former.get("runtime_root") or f"/run/{base}",
        **{
            key: value
            for key, value in former.items()
            if key not in {*OF_THE_PROGRAM, "runtime_root"}
        },
    }


def _text(handler: dict[str, Any]) -> str:
    """Return the packaged file with these values."""
    head = packaged(f"crio/{NAME}").partition("runtime_path")[0]
    lines = [f"{_key(key)} = {_value(value)}\n" for key, value in handler.items()]
    text = head + "".join(lines)
    wanted: dict[str, Any] = {HANDLER: handler}
    for name in reversed(RUNTIMES):
        wanted = {name: wanted}
    if tomllib.loads(text) != wanted:
        raise SetupError(
            "the default handler has a value that cannot be copied",
            hint=f"write the handler {HANDLER} by hand",
        )
    return text


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _value(name)


def _value(value: Any) -> str:
    """Format a value as TOML: a string, number, boolean, or a list or table of these."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return json.dumps(value) if isinstance(value, (bool, int, float)) else '""'


def _name_runtime(
    root: Root, journal: Journal, state_root: str, real: str, result: SetupPlan
) -> None:
    """Make the wrapper execute `real`, the default handler's runtime, for CRI-O's containers."""
    if not re.fullmatch(r"/\S*", state_root):
        return
    file = root.read(WRAPPER)
    text = file.text() if file else ""
    entry = journal.entry("crio", WRAPPER)
    for line in (line for part in (entry.parts if entry else ()) for line in part.get("lines", ())):
        text = re.sub(rf"(?m)^{re.escape(line)}\r?\n?", "", text)
    shown = root.shown(WRAPPER)
    try:
        settings = parse_node(text, shown)
    except SettingsError:
        settings = NodeSettings()  # `look_at_wrapper` reports the error
    named = settings.runtime_for.get(state_root) or settings.runtime
    if named:
        if named != real:
            result.notes.append(
                f"{shown} makes the wrapper execute {named} for CRI-O, but CRI-O's default handler"
                f" runs {real}: write `runtime-for {state_root} {real}` there to make them match"
            )
        return
    lines = [COMMENT, f"runtime-for {state_root} {real}"]
    text += "\n" if text and not text.endswith("\n") else ""
    text += "".join(f"{line}\n" for line in lines)
    result.changes.append(Change(WRAPPER, text, ({"lines": lines},)))


def _complaint(said: str, runs: Callable[[str], bool]) -> str | None:
    """Return an error in the output of `crio config`, which is what CRI-O would load, or None."""
    config = Configuration()
    try:
        config.add("crio config", tomllib.loads(said))
    except ValueError as e:
        return f"`crio config` does not print TOML: {e}"
    if HANDLER not in config.handlers:
        return f"CRI-O does not load the handler {HANDLER}: `crio config` does not show it"
    for fault, _ in config.faults(runs):
        return f"CRI-O would not start: {fault}"
    return None
