"""Check the hooks that Podman and CRI-O run for containers, as oci-hooks(5) describes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from governor.doctor.crio import configuration as crio_configuration
from governor.doctor.finding import Finding, UnseenError, note, ok, warning, wrong
from governor.doctor.node import BrokenError, ExaminedNode, read_json, read_toml, strings, table
from governor.doctor.programs import examine_program
from governor.doctor.wrapper import EXAMPLE, NAME
from governor.setup import services
from governor.setup.crio_config import STAGES as KNOWN
from governor.setup.podman import BUILDAH, HOOKS_DIR, default_hooks_dirs

VENDOR, LOCAL = BUILDAH
CONTAINERS_CONF = (
    "/usr/share/containers/containers.conf",
    "/etc/containers/containers.conf",
    "/etc/containers/containers.conf.d",
)
STAGES = {"prestart", "createRuntime"}
SETUP = "tidegate setup podman"


@dataclass(frozen=True)
class HookFile:
    """A file in a directory of hooks; `fault` is the reason why engines do not accept it."""

    path: str
    program: str
    args: tuple[str, ...]
    document: dict[str, Any]
    fault: str | None = None


def podman_dirs(node: ExaminedNode) -> tuple[tuple[str, ...], str | None]:
    """Return the hook directories of root's Podman, and the file that sets them, if any."""
    names = [*CONTAINERS_CONF[:2]]
    directory = CONTAINERS_CONF[2]
    names += [f"{directory}/{name}" for name in node.names(directory) if name.endswith(".conf")]
    found, by, append = [VENDOR], None, False
    for path in names:
        entries = table(read_toml(node, path), "engine").get("hooks_dir")
        if isinstance(entries, list):
            # A table with `append` in a list makes that list, and later ones, add to the previous
            # entries.
            append = ([e["append"] for e in entries if "append" in table(e)] or [append])[-1]
            found = [*(found if append else ()), *strings(entries)]
            by = path
    program = node.find("podman")
    try:
        asked = default_hooks_dirs(node.run(program, "--help")) if program else None
    except UnseenError:
        asked = None
    return tuple(asked or found), by


def crio_dirs(node: ExaminedNode) -> tuple[str, ...]:
    """Return CRI-O's hook directories; none if it is not set up."""
    config = crio_configuration(node)
    return () if config is None else config.hooks_directories


def directories(node: ExaminedNode) -> tuple[str, ...]:
    """Return all directories in which an engine may look for hooks."""
    return tuple(dict.fromkeys((VENDOR, LOCAL, HOOKS_DIR, *podman_dirs(node)[0], *crio_dirs(node))))


def files(node: ExaminedNode, among: tuple[str, ...] | None = None) -> tuple[HookFile, ...]:
    """Return the hooks in the directories `among`, or in all directories if that is None."""
    return tuple(
        _read(node, f"{directory}/{name}")
        for directory in (directories(node) if among is None else among)
        for name in node.names(directory)
        if name.endswith(".json")
    )


def _read(node: ExaminedNode, path: str) -> HookFile:
    try:
        document = read_json(node, path) or {}
    except BrokenError as e:
        return HookFile(path, "", (), {}, str(e))
    hook = table(document, "hook")
    program = hook.get("path")
    fault = None
    if document.get("version") != "1.0.0":
        fault = f"{path} has version {document.get('version')!r}, but only 1.0.0 is supported"
    elif not isinstance(program, str) or not program.startswith("/"):
        fault = f"{path}: hook.path is {program!r}, but must be an absolute path"
    name = program if isinstance(program, str) else ""
    return HookFile(path, name, strings(hook.get("args")), document, fault)


def is_ours(hook: HookFile) -> bool:
    """Return whether a hook is Tidegate's."""
    return PurePosixPath(hook.program).name.startswith(f"{NAME}-")


def in_force(node: ExaminedNode) -> Iterator[Finding]:
    """Check whether Tidegate's hooks can run, and report the other hooks."""
    found = files(node)
    for hook in found:
        if hook.fault is not None:
            yield wrong(
                f"{hook.fault}: with this file, Podman and CRI-O start no containers",
                f"rm {hook.path}",
            )
        elif is_ours(hook):
            yield from _examine(node, hook)
        elif node.stat(hook.program) is None:
            yield warning(
                f"{hook.path} names {hook.program}, which is missing: Podman and CRI-O ignore "
                "it, or start no container",
                f"rm {hook.path}",
            )
        else:
            yield note(f"{hook.path} runs {hook.program}")
    if not found:
        yield note(f"no hooks in {' or '.join(directories(node))}")


def _examine(node: ExaminedNode, hook: HookFile) -> Iterator[Finding]:
    yield examine_program(node, hook.program, f"{hook.path}:")
    stages = set(strings(hook.document.get("stages")))
    if not stages & {*STAGES, "precreate", "poststop"}:
        yield wrong(f"{hook.path} names none of Tidegate's stages: {sorted(stages)}", SETUP)
    if not strings(table(hook.document, "hook").get("env")):
        # CVE-2025-23266: without `env`, a hook of an older runc inherits the image's environment.
        yield wrong(
            f"{hook.path}: hook.env is empty: the image's environment may reach the hook", SETUP
        )
    when = table(hook.document, "when")
    if when.get("always") is not True and not any(
        _matches(pattern, EXAMPLE) for pattern in table(when, "annotations")
    ):
        yield wrong(f"{hook.path}: `when` matches none of Tidegate's annotations", SETUP)


def _matches(pattern: str, text: str) -> bool:
    try:
        return re.search(pattern, text) is not None
    except re.error:
        return False


def stages(node: ExaminedNode) -> Iterator[Finding]:
    """Check whether Buildah supports the stages of all hooks that it reads."""
    if node.find("podman") is None and node.find("buildah") is None:
        yield note("neither Buildah nor Podman (which includes Buildah) is installed")
        return
    right = True
    for hook in files(node, BUILDAH):
        unknown = sorted(set(strings(hook.document.get("stages"))) - KNOWN)
        if unknown:
            right = False
            yield wrong(
                f"{hook.path} has the stage {unknown[0][:40]}, which Buildah does not support: "
                "`podman build` and `buildah run` fail",
                f"rm {hook.path} && {SETUP}"
                if is_ours(hook)
                else f"move it to another directory, and add that to hooks_dir in "
                f"{CONTAINERS_CONF[1]}",
            )
    if right:
        yield ok("Buildah supports the stages of all hooks that it reads")


def podman(node: ExaminedNode) -> Iterator[Finding]:
    """Check whether root's Podman runs the hook at all of its stages."""
    if node.find("podman") is None:
        yield note("podman is not installed")
        return
    looked, said_by = podman_dirs(node)
    ours = [hook for hook in files(node, looked) if is_ours(hook) and hook.fault is None]
    elsewhere = [hook for hook in files(node) if is_ours(hook) and hook.fault is None]
    stages = {stage for hook in ours for stage in strings(hook.document.get("stages"))}
    if not ours and elsewhere and said_by:
        yield wrong(
            f"{said_by} makes Podman look for hooks in {', '.join(looked) or 'no directory'}, "
            f"but Tidegate's is {elsewhere[0].path}",
            f"add {PurePosixPath(elsewhere[0].path).parent} to hooks_dir in {said_by}",
        )
    elif not ours and elsewhere:
        directory = PurePosixPath(elsewhere[0].path).parent
        yield wrong(f"by default, Podman looks for hooks in {VENDOR}, not in {directory}", SETUP)
    elif not ours:
        yield note("Podman has no Tidegate hook", SETUP)
    elif not stages & STAGES:
        yield wrong(f"Tidegate's hook for Podman runs only at {sorted(stages)}", SETUP)
    elif "precreate" not in stages:
        yield warning(
            "Podman runs the hook, but not at the stage precreate, which gives the container "
            "its device nodes, so name them with --device",
            SETUP,
        )
    elif "poststop" not in stages:
        yield warning(
            "Podman runs the hook, but not at the stage poststop, which reports a container's end, "
            "so files created in the container's layer at its start remain there",
            SETUP,
        )
    else:
        yield ok(f"root's Podman runs {', '.join(hook.path for hook in ours)}")


def podman_service(node: ExaminedNode) -> Iterator[Finding]:
    """Check whether Podman's running services and containers use the directory of the hooks."""
    running = services.running(node.root)
    looked, said_by = podman_dirs(node)
    said = node.stat(said_by) if said_by is not None else None
    ours = [hook for hook in files(node, looked) if is_ours(hook)]
    for service in running:
        if ours and said is not None and service.started < said.st_ctime:
            yield wrong(
                f"{service.shown} started before {said_by} was written: containers that it starts "
                "get no GPU and no quota",
                service.restart,
            )
        else:
            yield ok(f"{service.shown} uses the configured hook directories")
    for name in (
        services.unaware(node.root, str(PurePosixPath(ours[0].path).parent)) if ours else ()
    ):
        yield warning(
            f"the container {name} was started before the hooks were set up: if it has a restart "
            "policy, Podman restarts it without a GPU and without a quota",
            f"podman restart {name}",
        )
    if not running:
        yield note("no Podman API service is running")


def doubled(node: ExaminedNode) -> Iterator[Finding]:
    """Check whether CRI-O would run the hook twice: through its handler and through a file."""
    config = crio_configuration(node)
    handler = None if config is None else config.handlers.get(NAME)
    both = [hook.path for hook in files(node, crio_dirs(node)) if is_ours(hook)]
    if handler and both:
        yield warning(
            f"CRI-O has the handler {NAME}, and finds {both[0]} as well",
            f"rm {both[0]}; for Podman, `{SETUP}` uses a directory that CRI-O does not read",
        )
    else:
        yield ok("CRI-O does not run the hook twice")
