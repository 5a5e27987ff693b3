"""Check the container engines on the node: which are installed, and whether they use Tidegate.

Docker and containerd are queried for the configuration in force. If they do not answer, and for
other engines, the configuration files are read. An engine that is not set up is not an error; there
is a warning only if none is set up.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import partial
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from governor.doctor.finding import Finding, Severity, UnseenError, note, ok, warning, wrong
from governor.doctor.node import (
    BrokenError,
    ExaminedNode,
    objects,
    parse_toml,
    read_json,
    read_toml,
    strings,
    table,
)
from governor.doctor.programs import examine_program, wrapper_settings
from governor.doctor.wrapper import EXAMPLE, NAME, examine_wrapper
from governor.setup.tomltext import merged
from governor.versions import parse_version
from oci_hook.quick import PREFIX
from oci_hook.runtime import CONFIG

DAEMON_JSON = "/etc/docker/daemon.json"
CONTAINERD = (
    "/etc/containerd/config.toml",
    "/var/lib/rancher/k3s/agent/etc/containerd/config.toml",
    "/var/lib/rancher/rke2/agent/etc/containerd/config.toml",
)
DOCKER_INFO = ("docker", "--host", "unix:///run/docker.sock", "info", "--format", "{{json .}}")
DOCKER_PS = (*DOCKER_INFO[1:3], "ps", "--all", "--no-trunc", "--format", "{{.Names}}\t{{.Labels}}")
ANNOTATIONS_SINCE = 24

_CLASS = re.compile(r"\[([!^]?)([^]]+)\]")


def _version(node: ExaminedNode, program: str) -> Iterator[Finding]:
    """Report the installed version of a program."""
    path = node.find(program)
    if path is None:
        yield note(f"{program} is not installed")
        return
    try:
        said = node.run(path, "--version")
    except UnseenError as e:
        raise UnseenError(f"{path} exists, but its version is not known: {e.message}") from e
    version = parse_version(said)
    yield ok(f"{path}, {'.'.join(map(str, version)) if version else said.strip()[:80]}")


runc = partial(_version, program="runc")
crun = partial(_version, program="crun")
containerd_version = partial(_version, program="containerd")
crio_version = partial(_version, program="crio")
podman_version = partial(_version, program="podman")
nerdctl = partial(_version, program="nerdctl")


# Docker


def docker_info(node: ExaminedNode) -> dict[str, Any] | None:
    """Return the output of `docker info`, or None if dockerd does not answer."""
    client = node.find("docker")
    if client is None:
        return None
    try:
        answer = json.loads(node.run(client, *DOCKER_INFO[1:]))
    except (UnseenError, ValueError):
        return None
    return answer if isinstance(answer, dict) and answer.get("ServerVersion") else None


def _has_docker(node: ExaminedNode) -> bool:
    return node.find("dockerd") is not None or node.stat(DAEMON_JSON) is not None


def docker_version(node: ExaminedNode) -> Iterator[Finding]:
    """Report Docker's version, and check whether it supports annotations."""
    info = docker_info(node)
    if info is None and not _has_docker(node):
        yield note("Docker is not installed (dockerd)")
        return
    if info is not None:
        said = f"dockerd {info['ServerVersion']} is running"
    else:
        said = node.run(node.find("dockerd") or "dockerd", "--version").strip()
    version = parse_version(said)
    if version is None or version[0] >= ANNOTATIONS_SINCE:
        yield ok(said)
        return
    found = f"{said}: docker run --annotation was introduced in {ANNOTATIONS_SINCE}.0"
    if wrapper_settings(node).environment == "allow":
        yield note(f"{found}; environment variables replace annotations ({CONFIG})")
    else:
        yield warning(
            found,
            f"install Docker {ANNOTATIONS_SINCE} or newer, or write "
            f"`environment allow` to {CONFIG}",
        )


def docker_runtime(node: ExaminedNode) -> Iterator[Finding]:
    """Check whether Docker has the runtime `tidegate`, in its file and in the running dockerd."""
    info = docker_info(node)
    if info is None and not _has_docker(node):
        yield note("Docker is not installed (dockerd)")
        return
    named = table(read_json(node, DAEMON_JSON), "runtimes", NAME)
    running = table(info, "Runtimes", NAME)
    path = running.get("path") or named.get("path")
    if not path:
        yield note(f"{DAEMON_JSON} has no runtime {NAME}", "tidegate setup docker")
    elif info is not None and not running:
        yield wrong(
            f"{DAEMON_JSON} has the runtime {NAME}, but dockerd has not read it yet",
            "systemctl reload docker",
        )
    else:
        what = f"Docker's runtime {NAME}"
        given = running.get("runtimeArgs") or named.get("runtimeArgs")
        yield examine_wrapper(node, path, what, "tidegate setup docker", elsewhere=bool(given))
        if info is not None and running and not named:
            yield note(f"dockerd has the runtime {NAME}, which is not from {DAEMON_JSON}")


def docker_labels(node: ExaminedNode) -> Iterator[Finding]:
    """Check whether a Docker container requests a GPU by labels, which no runtime receives."""
    client = node.find("docker")
    if client is None:
        yield note("Docker is not installed (docker)")
        return
    quiet = True
    for line in node.run(client, *DOCKER_PS).splitlines():
        name, _, labels = line.partition("\t")
        ours = sorted(
            key for key, _, _ in (label.partition("=") for label in labels.split(","))
            if key.startswith(PREFIX)
        )  # fmt: skip
        if ours:
            quiet = False
            yield warning(
                f"Docker container {name} has the label {ours[0]}, which no runtime sees: the"
                " container runs without a GPU and without a quota",
                "write it under annotations: in the compose file (Compose 2.26 or newer), or use"
                " docker run --annotation, and recreate the container",
            )
    if quiet:
        yield ok(f"no Docker container has a label under {PREFIX}")


# containerd


class Containerd(NamedTuple):
    """A configuration of containerd; it is `whole` if it includes its defaults and all imports.

    `files` are the merged documents with their paths; the last one takes precedence.
    """

    document: dict[str, Any]
    whole: bool = False
    files: tuple[tuple[str, dict[str, Any]], ...] = ()


def containerd_config(node: ExaminedNode, path: str) -> Containerd | None:
    """Return containerd's configuration in force, or None if this file does not exist here."""
    document = read_toml(node, path)
    program = node.find("containerd")
    asked = None
    if path == CONTAINERD[0] and program is not None:
        document = document or {}  # containerd 1 fails if there is no file
        try:
            # This is the configuration with which containerd would start, not the running daemon's.
            asked = parse_toml(node.run(program, "config", "dump"))
        except (UnseenError, ValueError):
            asked = None
    if document is None:
        return None
    files = [(path, document)]
    for pattern in strings(document.get("imports")):
        directory = str(PurePosixPath(path).parent / PurePosixPath(pattern).parent)
        for name in node.names(directory):
            if fnmatchcase(name, PurePosixPath(pattern).name):
                imported = read_toml(node, f"{directory}/{name}") or {}
                files.append((f"{directory}/{name}", imported))
                document = merged(document, imported)
    return Containerd(asked or document, asked is not None, tuple(files))


def cri_runtimes(document: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Return the handlers of containerd's CRI plugin, of any version, and the default's name."""
    for name, plugin in table(document, "plugins").items():
        if "cri" in name.split("."):
            settings = table(plugin, "containerd")
            if settings.get("runtimes"):
                default = settings.get("default_runtime_name")
                return table(settings, "runtimes"), default if isinstance(default, str) else ""
    return {}, ""


def names_default(document: dict[str, Any]) -> bool:
    """Return whether one of containerd's files sets the default handler."""
    plugins = table(document, "plugins")
    return any(
        "cri" in name.split(".") and "default_runtime_name" in table(plugins, name, "containerd")
        for name in plugins
    )


def passes(patterns: tuple[str, ...], name: str) -> bool:
    """Return whether an annotation matches a containerd pattern; `*` matches no slash."""
    parts = name.split("/")
    return any(
        len(wanted) == len(parts) and all(map(fnmatchcase, parts, wanted))
        for wanted in (_CLASS.sub(_python_class, pattern).split("/") for pattern in patterns)
    )


def _python_class(match: re.Match[str]) -> str:
    """Return a character class as fnmatch writes it: `!` negates instead of `^`."""
    sign, characters = match.groups()
    return f"[!{characters}]" if sign == "^" else f"[{characters}{sign}]"


def containerd_handler(node: ExaminedNode) -> Iterator[Finding]:
    """Check whether containerd has the handler `tidegate`, and passes annotations to it."""
    here = False
    for path in CONTAINERD:
        config = containerd_config(node, path)
        if config is None:
            continue
        here, document = True, config.document
        if any(
            name.rpartition(".")[2] == "cri" for name in strings(document.get("disabled_plugins"))
        ):
            yield note(
                f"{path} disables CRI, as Docker's package does: there are no handlers",
                "remove cri from disabled_plugins if Kubernetes uses this containerd",
            )
            continue
        handlers, default = cri_runtimes(document)
        if config.whole and default and handlers and default not in handlers:
            # containerd 1 takes a plugin's section from only one file, and does not merge the
            # defaults into it (issue 5837).
            yield wrong(
                f"{path}: the default handler {default} is not among {', '.join(handlers)}: "
                "containers that name no handler do not start",
                f"write [plugins.<CRI>.containerd.runtimes.{default}] next to the other handlers",
            )
        handler = table(handlers, NAME)
        if not handler:
            yield note(f"{path} has no handler {NAME}", "tidegate setup containerd")
            continue
        yield from _handler(node, handler, f"{path}: the handler {NAME}")
        lacking = [
            key
            for key in ("pod_annotations", "container_annotations")
            if not passes(strings(handler.get(key)), EXAMPLE)
        ]
        if lacking:
            yield wrong(
                f'{path}: {" and ".join(lacking)} of the handler {NAME} lack "{PREFIX}*": '
                "containers start, but without a GPU",
                "tidegate setup containerd",
            )
    if not here:
        yield note("containerd is not set up here: it has no configuration")


def _handler(node: ExaminedNode, handler: dict[str, Any], what: str) -> Iterator[Finding]:
    """Check whether a handler adds the hook, through the wrapper runtime or its base spec."""
    remedy = "tidegate setup containerd"
    spec = handler.get("base_runtime_spec")
    if not isinstance(spec, str) or not spec:
        yield examine_wrapper(node, table(handler, "options").get("BinaryName"), what, remedy)
        return
    document = read_json(node, spec)
    if document is None:
        yield wrong(f"{what} has the base spec {spec}, which is missing", f"{remedy} --base-spec")
        return
    hooks = [
        hook
        for stage in ("createRuntime", "prestart")
        for hook in objects(table(document, "hooks"), stage)
        if PurePosixPath(str(hook.get("path"))).name.startswith(f"{NAME}-")
    ]
    if not hooks:
        # Without a hook in the base spec, the handler must use the wrapper.
        yield examine_wrapper(node, table(handler, "options").get("BinaryName"), what, remedy)
    for hook in hooks:
        yield examine_program(node, str(hook["path"]), f"{what}, base spec {spec}:")
        if not strings(hook.get("env")):
            yield wrong(
                f"{spec}: a hook has no env: the image's environment may reach it",
                f"{remedy} --base-spec",
            )


def any_engine(node: ExaminedNode) -> Iterator[Finding]:
    """Check whether any engine on the node starts containers with Tidegate."""
    from governor.doctor.cdi import our_files
    from governor.doctor.crio import handler as crio_handler
    from governor.doctor.hooks import files, is_ours

    ready = []
    for name, check in (
        ("Docker", docker_runtime),
        ("containerd", containerd_handler),
        ("CRI-O", crio_handler),
    ):
        try:
            if any(finding.state is not Severity.NOTE for finding in check(node)):
                ready.append(name)
        except (UnseenError, BrokenError):
            continue  # its own check reports it
    if any(is_ours(hook) for hook in files(node)):
        ready.append("engines that read oci-hooks(5)")
    if our_files(node):
        ready.append("engines that support CDI")
    if ready:
        yield ok(f"Tidegate is set up for {', '.join(ready)}")
    else:
        yield warning(
            "no engine is set up for Tidegate: containers get a GPU only through a bundle's hook",
            "tidegate setup docker, podman, containerd or crio",
        )
