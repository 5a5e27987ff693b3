"""Run an engine's own check of the files that setup would write, before they are written."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from typing import TYPE_CHECKING

from governor.errors import SetupError
from governor.setup import view
from governor.setup.files import Root
from governor.setup.plan import Validation

if TYPE_CHECKING:
    from governor.setup.apply import Edit

LONGEST = 500  # most characters of an engine's line that are shown


def validate(root: Root, validation: Validation | None, edits: Sequence[Edit]) -> list[str]:
    """Have an engine read its files as they would be; SetupError with its own line if it fails.

    Returns notes for the operator: that the engine could not be asked. An engine that is not
    installed is not asked, and below another root than / no program runs.
    """
    if validation is None or not edits or root.root != "/":
        return []
    program = shutil.which(validation.command[0])
    if program is None:
        return []
    said = " ".join(validation.command)
    files = {_real(root, edit.path): edit.after for edit in edits}
    try:
        done = view.run([program, *validation.command[1:]], files)
    except view.ViewError as e:
        return [f"`{said}` could not check the new files: no private view of them ({e})"]
    except (OSError, subprocess.TimeoutExpired) as e:
        raise SetupError(f"{said}: {e}", hint="nothing was changed; see what is wrong") from e
    if done.returncode and any(word in done.stderr for word in validation.unsupported):
        return [f"this {validation.command[0]} does not know `{said}`: the new files are unchecked"]
    if done.returncode:
        lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        fault = f"`{said}` ends with {done.returncode}: {(lines or [''])[-1].strip()[-LONGEST:]}"
    else:
        fault = validation.check(done.stdout) or ""
    if fault:
        raise SetupError(
            f"with the new files {fault}", hint="nothing was changed; correct what it says first"
        )
    return []


def _real(root: Root, path: str) -> str:
    """Return where a file is or will be, without symbolic links."""
    missing = []
    while (real := root.find(path)) is None:
        path, _, name = path.rpartition("/")
        missing.append(name)
    return "/".join([real.rstrip("/"), *reversed(missing)])
