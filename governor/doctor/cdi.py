"""Check CDI files, Tidegate's and NVIDIA's: whether the devices that they define still exist."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from governor.cdi import CLAIM_KIND
from governor.doctor.driver import gpus, needs_none
from governor.doctor.finding import Finding, note, ok, warning, wrong
from governor.doctor.node import BrokenError, ExaminedNode, objects, read_json, table
from governor.doctor.programs import examine_program
from governor.doctor.wrapper import NAME

DIRECTORIES = ("/etc/cdi", "/run/cdi")  # /var/run is a link to /run
GENERATE = "tidegate cdi generate --output /var/run/cdi/tidegate.json"


@dataclass(frozen=True)
class CdiFile:
    """A CDI file; `fault` is the reason why engines ignore it."""

    path: str
    kind: str
    document: dict[str, Any]
    fault: str | None = None

    def edits(self) -> Iterator[dict[str, Any]]:
        """Yield its edits to containers: those for all, then those for each device."""
        yield table(self.document, "containerEdits")
        for device in objects(self.document, "devices"):
            yield table(device, "containerEdits")


def files(node: ExaminedNode) -> tuple[CdiFile, ...]:
    """Return the CDI files on the node."""
    return tuple(
        _read(node, f"{directory}/{name}")
        for directory in DIRECTORIES
        for name in node.names(directory)
        if name.endswith((".json", ".yaml"))
    )


def _read(node: ExaminedNode, path: str) -> CdiFile:
    document: Any
    try:
        if path.endswith(".json"):
            document = read_json(node, path)
        else:
            import yaml

            try:
                document = yaml.safe_load(node.read(path) or "")
            except (yaml.YAMLError, RecursionError) as e:
                raise BrokenError(f"{path} is not YAML: {' '.join(str(e).split())[:120]}") from e
    except BrokenError as e:
        return CdiFile(path, "", {}, str(e))
    kind = document.get("kind") if isinstance(document, dict) else None
    if not isinstance(kind, str) or "/" not in kind:
        return CdiFile(path, "", {}, f"{path} has no kind (VENDOR/CLASS)")
    return CdiFile(path, kind, document)


def is_ours(file: CdiFile) -> bool:
    """Return whether a file describes Tidegate's devices."""
    return file.kind.partition("/")[0].split(".")[0] == NAME


def our_files(node: ExaminedNode) -> tuple[CdiFile, ...]:
    """Return Tidegate's CDI files that can be read."""
    return tuple(file for file in files(node) if is_ours(file))


def fresh(node: ExaminedNode) -> Iterator[Finding]:
    """Check whether Tidegate's CDI files name existing devices and programs, and all GPUs."""
    found = files(node)
    for file in found:
        if file.fault is not None:
            yield warning(f"{file.fault}: engines ignore the file", f"rm {file.path}")
        elif is_ours(file):
            yield from _examine(node, file)
    if not any(is_ours(file) for file in found):
        yield note(f"Tidegate has no CDI file in {' or '.join(DIRECTORIES)}", GENERATE)


def _examine(node: ExaminedNode, file: CdiFile) -> Iterator[Finding]:
    named: set[str] = set()
    programs: set[str] = set()
    stages: set[str] = set()
    for edits in file.edits():
        for device in objects(edits, "deviceNodes"):
            path = str(device.get("hostPath") or device.get("path"))
            named.add(path)
            if reason := _stale(node, path, device):
                yield wrong(f"{file.path} is stale: {reason}", GENERATE)
        for hook in objects(edits, "hooks"):
            programs.add(str(hook.get("path")))
            stages.add(str(hook.get("hookName")))
            if not hook.get("env"):
                yield wrong(
                    f"{file.path}: a hook has no env: the image's environment may reach it",
                    GENERATE,
                )
    for path in sorted(programs):
        yield examine_program(node, path, f"{file.path}:")
    if stages and "poststop" not in stages:
        yield warning(
            f"{file.path} has no poststop hook, which reports a container's end, so files created "
            "in the container's layer at its start remain there",
            GENERATE,
        )
    # A claim's file has only the claim's GPUs.
    lacking = (
        []
        if needs_none(node) or file.kind == CLAIM_KIND
        else [f"/dev/nvidia{g.minor}" for g in gpus(node) if f"/dev/nvidia{g.minor}" not in named]
    )
    if lacking and named:
        yield warning(f"{file.path} is stale: it lacks {', '.join(lacking)}", GENERATE)
    else:
        yield ok(f"{file.path} ({file.kind}) names {len(named)} device nodes")


def _stale(node: ExaminedNode, path: str, device: dict[str, Any]) -> str | None:
    """Return why a device node in a file does not match the one that exists, or None if it does."""
    status = node.stat(path)
    if status is None:
        return f"{path} is missing"
    wanted = device.get("major"), device.get("minor")
    if stat.S_ISCHR(status.st_mode) and all(isinstance(number, int) for number in wanted):
        number = os.major(status.st_rdev), os.minor(status.st_rdev)
        if number != wanted:
            return f"{path} is {number[0]}:{number[1]}; the file says {wanted[0]}:{wanted[1]}"
    return None
