"""Finds a container's claims from this hook's entries in config.json.

The node's driver writes the entries into a CDI specification for each claim, and only the engine
copies them into config.json: annotations and environment, which a tenant sets, cannot name a claim.
A container with several shares has several entries; the first of them handles all shares.
"""

from __future__ import annotations

import os

from oci_hook.edits import members
from oci_hook.errors import BundleError, HookError, show
from oci_hook.quick import parse_arguments

TYPE_CHECKING = False  # importing typing takes 3 ms
if TYPE_CHECKING:
    from typing import Any

STAGES = ("prestart", "createRuntime")  # in the order in which a runtime runs them
HINT = "the node driver writes claims and their entries: see the log of tidegate-dra"


def leads_to(path: object, own: str) -> bool:
    """Return whether a hook entry's path leads to this hook, under this or another name."""
    if path == own:
        return True
    if type(path) is not str or not path.startswith("/") or "\0" in path:
        return False
    try:
        one, other = os.stat(path), os.stat(own)
    except OSError:
        return False
    return (one.st_dev, one.st_ino) == (other.st_dev, other.st_ino)


def find_claims(document: dict[str, Any], own: str) -> tuple[tuple[str, str], ...]:
    """Return the shares in config.json as (claim, name); `own` is this hook's path.

    Raise BundleError if a device of tidegate.gpu/shared is requested as well: its GPU would not
    belong to the claim.
    """
    found: dict[tuple[str, str], None] = {}
    shared = False
    for stage in STAGES:
        for hook in members(document, "hooks", stage):
            args = hook.get("args")
            if not leads_to(hook.get("path"), own) or type(args) is not list:
                continue
            words = [word if type(word) is str else "" for word in args[1:]]
            claims = any(word.partition("=")[0] in ("--claim", "--share") for word in words)
            shared = shared or "--governed" in words
            if not claims:
                continue
            try:
                options = parse_arguments(words)
            except HookError as e:
                raise BundleError(
                    f"an entry of the hook in config.json has invalid arguments: {e.message}",
                    hint=HINT,
                ) from e
            found[options.claim, options.share] = None
    if found and shared:
        uid, _ = next(iter(found))
        raise BundleError(
            f"config.json asks for a device of tidegate.gpu/shared together with claim {show(uid)}",
            hint="ask for only one of the two",
        )
    return tuple(found)


def require_named(claims: tuple[tuple[str, str], ...], own: tuple[str, str]) -> None:
    """Refuse the share in this hook's own arguments if config.json does not name it."""
    if own[0] and own not in claims:
        raise BundleError(
            f"the hook was started for share {show(own[1])} of claim {show(own[0])}, which"
            " config.json does not name",
            hint=HINT,
        )


def as_request(claims: tuple[tuple[str, str], ...]) -> list[dict[str, Any]]:
    """Return the shares in the format of the governor's protocol."""
    names: dict[str, list[str]] = {}
    for uid, share in claims:
        names.setdefault(uid, []).append(share)
    return [{"uid": uid, "shares": shares} for uid, shares in names.items()]
