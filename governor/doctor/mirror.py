"""Check whether the driver's mirror is usable and intact, and whether a new one would fit."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from governor.doctor.finding import Finding, UnseenError, note, ok, unseen, warning, wrong
from governor.doctor.node import AS_ROOT, ExaminedNode
from governor.verbs.check import look_at_mirror
from oci_hook.errors import HookError
from oci_hook.manifest import read_manifest

TYPICAL = 1200 << 20  # bytes; driver 580 is 1.1 GB with its 32-bit libraries and firmware
LEAST = 16 << 20


def _driver_dir(node: ExaminedNode) -> str:
    """Return the mirror's directory, which need not exist."""
    host = node.host(node.config.driver_dir)
    # The directory's mode is 0700, because any process that can open it could lock it.
    if node.stat(node.config.driver_dir) and host and not os.access(host, os.R_OK | os.X_OK):
        raise UnseenError(f"{node.config.driver_dir}: Permission denied", remedy=AS_ROOT)
    return host or node.root.rstrip("/") + node.config.driver_dir


def kind_of_mirror(node: ExaminedNode) -> str | None:
    """Return the kind of driver that is mirrored, or None if it is not known."""
    with contextlib.suppress(HookError, UnseenError):
        manifest = read_manifest(_driver_dir(node))
        os.close(manifest.hold)
        return manifest.kind
    return None


def in_force(node: ExaminedNode) -> Iterator[Finding]:
    """Check, as the hook does, whether containers can be served from the mirror."""
    try:
        manifest, changed = look_at_mirror(_driver_dir(node), node.root)
    except HookError as e:
        yield wrong(e.message, e.hint)
        return
    found = f"generation {manifest.generation}, driver {manifest.version} ({manifest.kind})"
    if changed is None:
        yield ok(found)
    else:
        yield warning(f"{found}; it serves containers, but {changed}", "tidegate refresh")


def content(node: ExaminedNode) -> Iterator[Finding]:
    """Check whether the generation in force matches its manifest, without reading the content."""
    from vdriver.errors import VdriverError
    from vdriver.verify import find_generation, verify

    driver_dir = _driver_dir(node)
    if not os.path.lexists(f"{driver_dir}/current"):
        yield note("no generation is in force")
        return
    try:
        report = verify(find_generation(driver_dir), load=False, read=False)
        report.require_intact()
    except VdriverError as e:
        yield wrong(e.message, e.hint)
        return
    yield ok(
        f"{len(report.manifest.files)} names and sizes match the manifest "
        "(tidegate verify reads the content)"
    )


def room(node: ExaminedNode) -> Iterator[Finding]:
    """Check whether there is room for another generation, and for the governor's database."""
    driver_dir = _driver_dir(node)
    needed = _size(driver_dir) or TYPICAL
    for what, path, least, state in (
        ("another generation", driver_dir, needed, warning),
        ("state.db", node.host(node.config.state_dir) or driver_dir, LEAST, wrong),
    ):
        there = path
        while not os.path.lexists(there):
            there = os.path.dirname(there)  # noqa: PTH120
        try:
            status = os.statvfs(there)
        except OSError as e:
            yield unseen(f"room for {what}: {there}: {e.strerror}", AS_ROOT)
            continue
        free = status.f_bavail * status.f_frsize
        if status.f_flag & os.ST_RDONLY:
            yield wrong(f"{there} is on a read-only file system", "mount it read-write")
        elif free < least:
            yield state(
                f"{free >> 20} MiB are free for {what} in {path}; up to "
                f"{least >> 20} MiB are needed",
                "free some space, for example with tidegate gc",
            )
        elif status.f_files and status.f_favail < 1000:
            yield state(f"only {status.f_favail} inodes are free in {path}", "remove files there")
        else:
            yield ok(f"{free >> 20} MiB are free for {what} in {path}")


def _size(driver_dir: str) -> int:
    """Return the size of the generation in force, in bytes; 0 if there is none."""
    from vdriver.errors import VdriverError
    from vdriver.manifest import read_manifest as read_whole

    try:
        manifest = read_whole(os.path.realpath(f"{driver_dir}/current"))
    except VdriverError:
        return 0
    return sum(file.size or 0 for file in manifest.files)
