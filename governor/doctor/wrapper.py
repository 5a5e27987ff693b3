"""Check the program that an engine runs as Tidegate's runtime."""

from __future__ import annotations

from pathlib import PurePosixPath

from governor.doctor.finding import Finding, wrong
from governor.doctor.node import BrokenError, ExaminedNode
from governor.doctor.programs import examine_program, wrapper_settings
from oci_hook.quick import PREFIX
from oci_hook.runtime import CONFIG, HOOK

NAME = "tidegate"
"""Name of the runtime or handler in every engine's configuration."""
EXAMPLE = f"{PREFIX}memory"


def examine_wrapper(
    node: ExaminedNode, path: object, what: str, remedy: str, *, elsewhere: bool = False
) -> Finding:
    """Check that the program that an engine runs is the wrapper runtime, and is executable.

    `elsewhere` is true if the engine passes arguments, so that the wrapper may have other settings.
    """
    if path is None:
        return wrong(f"{what} specifies no program", remedy)
    if not isinstance(path, str) or not path.startswith("/"):
        return wrong(f"{what} runs {path!r}, which is not an absolute path", remedy)
    if not PurePosixPath(path).name.startswith(f"{NAME}-"):
        return wrong(f"{what} runs {path}, which is not the wrapper tidegate-runtime", remedy)
    lacks = None if elsewhere else _unhooked(node, path, what)
    return lacks or examine_program(node, path, f"{what},")


def _unhooked(node: ExaminedNode, path: str, what: str) -> Finding | None:
    """Report a checkout's wrapper that would add a hook which is not installed."""
    own = str(PurePosixPath(path).with_name("tidegate-hook"))
    try:
        hook = wrapper_settings(node).hook
    except BrokenError:
        return None  # files.runtime reports it
    if hook != HOOK or own == HOOK or node.stat(HOOK) is not None or node.stat(own) is None:
        return None
    return wrong(
        f"{what}: {path} adds the hook {HOOK}, which is missing",
        f"write `hook {own}` to {CONFIG}",
    )
