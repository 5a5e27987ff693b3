"""Updates the mirror of the host's driver: the implementation of `tidegate refresh`.

It finds the driver, plans a generation, writes it and activates it. It returns the changes and
prints nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vdriver.control import fit_control, read_control
from vdriver.discover import find_driver
from vdriver.driver import Skipped
from vdriver.elf_cache import ElfCache
from vdriver.errors import MirrorError
from vdriver.manifest import Manifest
from vdriver.mirror import Progress, apply_mirror, current_manifest, exclusive, is_fresh
from vdriver.plan import DATA, Copy, MirrorPlan, plan_mirror

DRIVERS = ("origin", "library", "program", "data")  # roles of files from the driver's packages
READINGS = "readings.json"  # next to the generations: the cache of ElfCache


@dataclass(frozen=True)
class RefreshResult:
    """The changes that a refresh made, or that a dry run predicts.

    `manifest` is the generation in force afterwards; after a dry run that is the previous one, if
    any, and `changed` is whether a real run would change it. `how` counts the files by how their
    content was obtained, and `aside` is the path to which a damaged generation was moved.
    `rewritten` names driver files that have new content but the same build id, which no
    package update causes.
    """

    plan: MirrorPlan
    manifest: Manifest | None
    previous: Manifest | None
    changed: bool
    skipped: tuple[Skipped, ...]
    dry_run: bool = False
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()
    how: dict[str, int] = field(default_factory=dict)
    aside: Path | None = None
    rewritten: tuple[str, ...] = ()


def refresh(
    root: str | Path,
    output: str | Path,
    control: str | Path,
    *,
    driver_directories: Sequence[str | Path] | None = None,
    sockets: bool = False,
    dry_run: bool = False,
    repair: bool = False,
    accept_loss: bool = False,
    hard_links: bool = True,
    progress: Progress | None = None,
) -> RefreshResult:
    """Make a mirror of the driver found under `root` the active one in `output`.

    `control` is the directory with the two control libraries. With `sockets`, containers get the
    directories with the sockets of the driver's services. With `dry_run` nothing is written. With
    `repair` the content of the generation in force is read and checked. With `accept_loss` the
    driver may lack files that its mirror has. Without `hard_links` no hard link to a file on the
    host is made. `progress` is called with the number of bytes done and the total. Raise
    DriverError or LibraryError if the driver is not usable, and MirrorError if the mirror cannot
    be made.
    """

    def find_and_plan() -> MirrorPlan:
        driver = find_driver(root, driver_directories, read=readings.read, sockets=sockets)
        libraries = fit_control(read_control(control, readings.read), driver)
        plan = plan_mirror(driver, libraries)
        if not accept_loss:
            _require_whole(plan, current_manifest(output))
        return plan

    readings = ElfCache(Path(output, READINGS))
    if dry_run:
        return _predict(find_and_plan(), output)
    if not Path(output).exists():
        find_and_plan()  # fails if there is no driver, before a directory is created
    # The lock is held during the search, so the later of two runs has seen the later driver.
    with exclusive(output) as directory:
        plan = find_and_plan()
        applied = apply_mirror(
            plan, directory, repair=repair, hard_links=hard_links, progress=progress
        )
        with contextlib.suppress(OSError):  # on failure, the next run just reads all files again
            readings.save()
    before, after = applied.previous, applied.manifest
    return _compare(
        RefreshResult(
            plan=plan,
            manifest=after,
            previous=before,
            changed=applied.changed,
            skipped=plan.driver.skipped,
            how=applied.how,
            aside=applied.aside,
            rewritten=_rewritten(before, after),
        ),
        _content(before),
        _content(after),
    )


def _predict(plan: MirrorPlan, output: str | Path) -> RefreshResult:
    """Return the result that a real run would have."""
    before = current_manifest(output)
    return _compare(
        RefreshResult(
            plan=plan,
            manifest=before,
            previous=before,
            changed=before is None or not is_fresh(plan, output, before),
            dry_run=True,
            skipped=plan.driver.skipped,
        ),
        # The new content is known only after a copy, so no file counts as replaced.
        dict.fromkeys((f.path for f in before.files) if before else (), ""),
        dict.fromkeys((o.path for o in plan.operations), ""),
    )


def _compare(
    result: RefreshResult, old: Mapping[str, str], new: Mapping[str, str]
) -> RefreshResult:
    """Return the result with the paths that differ between `old` and `new`.

    Both map a path to a digest or to a link's target, or to "" if the content is not known.
    """
    return dataclasses.replace(
        result,
        added=tuple(sorted(new.keys() - old.keys())),
        removed=tuple(sorted(old.keys() - new.keys())),
        replaced=tuple(p for p in sorted(new.keys() & old.keys()) if new[p] != old[p]),
    )


def _require_whole(plan: MirrorPlan, previous: Manifest | None) -> None:
    """Refuse a driver that is being upgraded: containers would get half of it until a reboot.

    A package manager replaces one package after another. If the version is still that of the
    generation in force, either of two signs shows that an upgrade is in progress: a library or
    program is gone, or a file has changed while libcuda's directory has libraries of another
    version.
    """
    driver = plan.driver
    if previous is None or previous.version != driver.version:
        return
    had = {f.path: (f.size, f.build_id) for f in previous.files if f.role in DRIVERS}
    has = {
        o.path: (o.size, o.build_id)
        for o in plan.operations
        if isinstance(o, Copy) and o.role in DRIVERS
    }
    lost = sorted(p for p in had.keys() - has.keys() if not p.startswith(f"{DATA}/"))
    sign = None
    if lost:
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        sign = f"no longer has {lost[0]}{more}, which the mirror has"
    elif driver.others and had != has:
        sign = f"has files that differ from its mirror's, next to libraries of {driver.others[0]}"
    if sign is not None:
        raise MirrorError(
            f"driver {driver.version} below {driver.root} {sign}",
            hint="wait for the driver's installation to end; if the loss is intended, "
            "run tidegate refresh --accept-loss",
        )


def _content(manifest: Manifest | None) -> dict[str, str]:
    files = manifest.files if manifest else ()
    return {f.path: f.target or f.sha256 or "" for f in files}


def _rewritten(before: Manifest | None, after: Manifest | None) -> tuple[str, ...]:
    known = {(f.source, f.build_id): f.sha256 for f in (before.files if before else ())}
    return tuple(
        f.source
        for f in (after.files if after else ())
        if f.source is not None
        and f.build_id is not None
        and known.get((f.source, f.build_id), f.sha256) != f.sha256
    )
