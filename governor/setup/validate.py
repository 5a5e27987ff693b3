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

LONGEST = 500  # characters; a line from the engine is shown up to this length


def validate(root: Root, validation: Validation | None, edits: Sequence[Edit]) -> list[str]:
    """Let an engine check the planned files.

    Raise SetupError with the engine's message if the check fails. Return a note for the operator if
    the check was not possible. There is no check if the root is not /.
    """
    if validation is None or not edits or root.root != "/":
        return []
    program = shutil.which(validation.command[0])
    if program is None:
        return [f"{validation.command[0]} is not installed, so the new files were not checked"]
    said = " ".join(validation.command)
    files = {_real(root, edit.path): edit.after for edit in edits}
    try:
        done = view.run([program, *validation.command[1:]], files)
    except view.ViewError as e:
        why = f"no private view of them could be created ({e})"
        return [f"`{said}` could not check the new files, because {why}"]
    except (OSError, subprocess.TimeoutExpired) as e:
        raise SetupError(
            f"{said}: {e}", hint="nothing was changed; fix the cause and try again"
        ) from e
    if done.returncode and any(word in done.stderr for word in validation.unsupported):
        what = f"this {validation.command[0]} does not support `{said}`"
        return [f"{what}, so the new files were not checked"]
    if done.returncode:
        lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        reason = (lines or [""])[-1].strip()[-LONGEST:]
        fault = f"`{said}` exits with status {done.returncode}: {reason}"
    else:
        fault = validation.check(done.stdout) or ""
    if fault:
        raise SetupError(
            f"with the new files, {fault}", hint="nothing was changed; correct that first"
        )
    return []


def _real(root: Root, path: str) -> str:
    """Return the resolved path of a file, which need not exist."""
    missing = []
    while (real := root.find(path)) is None:
        path, _, name = path.rpartition("/")
        missing.append(name)
    return "/".join([real.rstrip("/"), *reversed(missing)])
