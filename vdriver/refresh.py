"""From the host's driver to the generation in force, as one call.

The story of `tidegate refresh`: find, plan, apply. Says what changed, prints nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vdriver.control import read_control
from vdriver.discover import Skipped, find_driver
from vdriver.manifest import Manifest
from vdriver.mirror import apply_mirror, current_manifest, is_fresh
from vdriver.plan import MirrorPlan, plan_mirror


@dataclass(frozen=True)
class RefreshResult:
    """What a refresh did, or would do.

    `manifest` is the generation in force afterwards; after a dry run that is the one from before,
    if any, and `changed` says whether a real run would make another.
    """

    plan: MirrorPlan
    manifest: Manifest | None
    previous: Manifest | None
    changed: bool
    dry_run: bool
    added: tuple[str, ...]
    removed: tuple[str, ...]
    replaced: tuple[str, ...]
    skipped: tuple[Skipped, ...]


def refresh(
    root: str | Path,
    output: str | Path,
    control: str | Path,
    *,
    driver_directories: Sequence[str | Path] | None = None,
    dry_run: bool = False,
) -> RefreshResult:
    """Put the mirror of the driver below `root` in force in `output`.

    `control` is the directory of the two control libraries. With `dry_run` nothing is written.
    """
    driver = find_driver(root, driver_directories)
    plan = plan_mirror(driver, read_control(control))
    if dry_run:
        before = after = current_manifest(output)
        changed = before is None or not is_fresh(plan, output, before)
        # What the content would be is known after a copy only, so nothing counts as replaced.
        old = dict.fromkeys((f.path for f in before.files) if before else (), "")
        new = dict.fromkeys((o.path for o in plan.operations), "")
    else:
        applied = apply_mirror(plan, output)
        before, after, changed = applied.previous, applied.manifest, applied.changed
        old, new = _content(before), _content(after)
    return RefreshResult(
        plan=plan,
        manifest=after,
        previous=before,
        changed=changed,
        dry_run=dry_run,
        added=tuple(sorted(new.keys() - old.keys())),
        removed=tuple(sorted(old.keys() - new.keys())),
        replaced=tuple(p for p in sorted(new.keys() & old.keys()) if new[p] != old[p]),
        skipped=driver.skipped,
    )


def _content(manifest: Manifest | None) -> dict[str, str]:
    files = manifest.files if manifest else ()
    return {f.path: f.target or f.sha256 or "" for f in files}
