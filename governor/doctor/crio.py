"""Check CRI-O: whether it can start with its configuration, and which program its handler runs."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import PurePosixPath

from governor.doctor.finding import Finding, UnseenError, note, ok, warning, wrong
from governor.doctor.node import BrokenError, ExaminedNode, read_json, read_toml
from governor.doctor.programs import wrapper_settings
from governor.doctor.wrapper import NAME, examine_wrapper
from governor.setup import crio_config
from governor.setup.crio_config import Configuration
from oci_hook.runtime import CONFIG, RUNTIMES

SETUP = "tidegate setup crio"
NOT_HERE = "CRI-O is not set up here: it has no configuration"


def configuration(node: ExaminedNode) -> Configuration | None:
    """Return CRI-O's configuration from its files, or None if there are no files."""

    def is_directory(path: str) -> bool:
        status = node.stat(path)
        return status is not None and stat.S_ISDIR(status.st_mode)

    config, found = Configuration(), False
    for path in crio_config.files(node.names, is_directory):
        document = read_toml(node, path)
        if document is not None:
            config.add(path, document)
            found = True
    return config if found else None


def _runs(node: ExaminedNode, path: str) -> bool:
    try:
        status = node.stat(path)
    except UnseenError:
        return True  # it may exist: its directory is not readable
    return status is not None and stat.S_ISREG(status.st_mode) and bool(status.st_mode & 0o111)


def starts(node: ExaminedNode) -> Iterator[Finding]:
    """Check whether CRI-O starts: its runtimes, its monitors, and the hooks that it reads."""
    config = configuration(node)
    if config is None:
        yield note(NOT_HERE)
        return
    faults = [
        (fault, SETUP if fault.startswith(f"the handler {NAME} ") else remedy)
        for fault, remedy in config.faults(lambda path: _runs(node, path))
    ]
    faults += _hooks(node, config)
    for fault, remedy in faults:
        yield wrong(f"CRI-O does not start: {fault}", remedy)
    if not faults:
        yield ok(f"CRI-O finds everything that {crio_config.MAIN} and {crio_config.DROP_INS} name")


def _hooks(node: ExaminedNode, config: Configuration) -> Iterator[tuple[str, str]]:
    for directory in config.hooks_directories:
        for name in node.names(directory):
            path = f"{directory}/{name}"
            try:
                document = read_json(node, path) if name.endswith(".json") else None
            except BrokenError:
                continue  # hooks.in-force reports it
            if not (stages := crio_config.unknown_stages(document)):
                continue
            hook = (document or {}).get("hook")
            program = PurePosixPath(str(hook.get("path") if isinstance(hook, dict) else ""))
            yield (
                f"{path} names the stage {stages[0][:40]}, which CRI-O does not support",
                f"rm {path} && tidegate setup podman"
                if program.name.startswith(f"{NAME}-")
                else f"remove {directory} from CRI-O's hooks_dir, or move the file",
            )


def handler(node: ExaminedNode) -> Iterator[Finding]:
    """Check CRI-O's handler `tidegate`, and that its wrapper executes CRI-O's runtime."""
    config = configuration(node)
    if config is None:
        yield note(NOT_HERE)
    elif not config.handlers.get(NAME):
        yield note(f"CRI-O has no handler {NAME}", SETUP)
    else:
        what = f"CRI-O's handler {NAME}"
        yield examine_wrapper(node, config.handlers[NAME].get("runtime_path"), what, SETUP)
        yield _runtime(node, config, what)


def _runtime(node: ExaminedNode, config: Configuration, what: str) -> Finding:
    """Check that the wrapper executes the same runtime for CRI-O as the default handler does."""

    def runs(path: str) -> bool:
        return _runs(node, path)

    settings = wrapper_settings(node)
    named = settings.runtime_for.get(config.text("runtime_root", NAME)) or settings.runtime
    real = named or next(filter(runs, RUNTIMES), "")
    default = config.default(runs)
    own = config.program(default, runs)
    if not real:
        return wrong(f"{what}: the wrapper has no runtime to execute", SETUP)
    if not runs(real):
        return wrong(
            f"{what}: the wrapper executes {real}, which is missing",
            f"install it, or correct {CONFIG}",
        )
    if own is not None and default != NAME and not _same(node, own, real):
        return warning(
            f"{what}: the wrapper executes {real}, but the default handler {default}"
            f" executes {own}",
            f"correct {CONFIG}" if named else SETUP,
        )
    return ok(f"{what}: the wrapper executes {real}")


def _same(node: ExaminedNode, path: str, other: str) -> bool:
    one, two = node.stat(path), node.stat(other)
    return (
        one is not None and two is not None and (one.st_dev, one.st_ino) == (two.st_dev, two.st_ino)
    )
