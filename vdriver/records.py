"""Creates manifest records from a plan: for a generation and for each of its files."""

from __future__ import annotations

import os
from pathlib import Path

from vdriver.manifest import Manifest, ManifestFile, Watched
from vdriver.plan import Copy, MirrorPlan, PlannedLink


def describe_generation(
    plan: MirrorPlan, generation: str, files: tuple[ManifestFile, ...]
) -> Manifest:
    """Return the manifest of a generation with these files."""
    driver = plan.driver
    watched = (
        *(("driver", f.library) for f in (driver.cuda, driver.nvml)),
        *(("control", library) for library in (plan.control.cuda, plan.control.nvml)),
    )
    return Manifest(
        generation=generation,
        version=driver.version,
        kind=driver.kind,
        machine=driver.machine,
        sets=plan.sets,
        programs=plan.programs,
        places=plan.places,
        binds=plan.binds,
        files=files,
        root=str(Path(driver.root).absolute()),
        watch=tuple(
            Watched(os.path.realpath(w.path), role, w.size, w.mtime_ns) for role, w in watched
        ),
    )


def copy_entry(operation: Copy, sha256: str | None) -> ManifestFile:
    """Return the manifest record of a copied file."""
    return ManifestFile(
        path=operation.path,
        role=operation.role,
        capability=operation.capability,
        soname=operation.soname,
        build_id=operation.build_id,
        size=operation.size,
        mtime_ns=operation.mtime_ns,
        sha256=sha256,
        source=operation.below_root,
    )


def link_entry(operation: PlannedLink) -> ManifestFile:
    """Return the manifest record of a symbolic link."""
    return ManifestFile(
        path=operation.path,
        role="link",
        capability=operation.capability,
        target=operation.target,
    )
