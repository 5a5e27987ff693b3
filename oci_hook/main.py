"""The stages of the hook, for containers that may request a GPU.

`oci_hook.entry` has already handled all other containers. Modules that only a GPU container needs
are imported once the container is known to be one.
"""

from __future__ import annotations

import os
import sys

from oci_hook.errors import (
    BundleError,
    HookError,
    InternalError,
    show,
)
from oci_hook.light_typing import suppress
from oci_hook.log import RunEvent, complain
from oci_hook.quick import CONFIG_LIMIT, PREFIX, HookOptions, may_mention_us
from oci_hook.state import (
    OciState,
    is_sandbox,
    our_annotations,
    parse_config,
    parse_document,
    parse_state,
    read_config,
)


def prepare(options: HookOptions, state: OciState, event: RunEvent) -> str:
    """Prepare one container; return the outcome."""
    config = read_config(state.bundle)
    governed = options.governed or options.claim != ""
    if (
        not governed
        and not may_mention_us(config)
        and not any(name.startswith(PREFIX) for name in state.annotations)
    ):
        return "no-request"
    bundle = parse_config(config, state.bundle)
    annotations = our_annotations(state, bundle, governed=governed)
    if not annotations and not governed:
        return "no-request"
    from oci_hook.claims import find_claims, require_named

    claims = find_claims(bundle.document, os.path.abspath(sys.argv[0]))
    require_named(claims, (options.claim, options.share))
    if claims and claims[0] != (options.claim, options.share):
        return "prepared-already"  # the first share's hook entry prepares it, before or after
    if claims:
        event.fields["claims"] = list(dict(claims))  # their uids
    if "pod" in bundle.identity:
        event.fields["pod"] = f"{bundle.identity.get('namespace', '')}/{bundle.identity['pod']}"
    event.phase("state")

    from oci_hook.start import Start, prepare_container

    return prepare_container(Start(options, state, bundle, annotations, claims, event))


def precreate(options: HookOptions, data: bytes | None, event: RunEvent) -> str:
    """Handle Podman's own stage: edit config.json from stdin and write it to stdout."""
    if data is None:
        raise BundleError(
            f"config.json on stdin is larger than {CONFIG_LIMIT} bytes", hint="make it smaller"
        )
    from oci_hook.edits import HookEntry, add_hook_entry
    from oci_hook.light_json import dump_json
    from oci_hook.reserve import Settings, edit_config

    settings = Settings(
        # The path by which the hook was executed: the engine's hook file names that path, too.
        entry=HookEntry(os.path.abspath(sys.argv[0]), options.given),
        runtime_dir=options.runtime_dir,
        dev_dir=options.dev_dir,
        driver_dir=options.driver_dir,
        module_version=options.module_version,
        timeout=options.timeout / 2,
    )
    name = "config.json on stdin"
    try:
        outcome, edited = edit_config(data, "", name, settings, event)
    except HookError as e:
        # Podman shows only the exit status of this stage. At the next stage the hook will find the
        # same error, and Podman shows that stage's error line.
        document, _, _ = parse_document(data, name)
        add_hook_entry(document, settings.entry)
        outcome, edited = "edited", dump_json(document).encode()
        event.fields |= {"code": e.code, "message": e.message}
    event.phase("edit")
    from oci_hook.files import write_all

    write_all(1, data if edited is None else edited)
    return outcome


def release(options: HookOptions, state: OciState) -> str:
    """Remove what the hook created, and report the end, so that the governor notices it sooner."""
    from oci_hook import cleanup

    cleanup.take_back(options.runtime_dir, state.id)
    cleanup.sweep_apart(options.runtime_dir)
    asks = any(name.startswith(PREFIX) for name in state.annotations)
    governed = options.governed or options.claim != ""
    if not governed and (is_sandbox(state.annotations) or not asks):
        return "no-request"
    from oci_hook.client import Client

    client = Client(options.runtime_dir, min(options.timeout, 5.0))
    client.release(state.id)
    client.close()
    return "released"


def serve(options: HookOptions, raw: bytes | None, event: RunEvent) -> str:
    """Run a stage and return its outcome; `raw` was read from standard input."""
    if options.stage == "precreate":
        return precreate(options, raw, event)
    state = parse_state(raw, needs_pid=options.stage != "poststop")
    event.fields["id"] = show(state.id, 128)
    if options.stage == "poststop":
        return release(options, state)
    return prepare(options, state, event)


def begin_event(options: HookOptions, raw: bytes | None, began: float) -> RunEvent:
    """Return the event for a run whose work was not begun, or was done by another process."""
    event = RunEvent(options.stage or "?", options.log, began)
    if raw is not None and options.stage != "precreate":
        with suppress(HookError):  # the container may have no id
            event.fields["id"] = show(parse_state(raw, needs_pid=False).id, 128)
    return event


def fail(e: Exception, options: HookOptions, event: RunEvent | None) -> int:
    """Report what went wrong; return the exit status."""
    error = e if isinstance(e, HookError) else _internal(e)
    complain(error.line())
    from oci_hook.apart import is_abandoned
    from oci_hook.crun import tell

    tell(error.line())
    event = event or RunEvent(options.stage or "?", options.log)
    # The event for an abandoned start has already been logged; this one reports its worker's end.
    outcome = "abandoned" if is_abandoned() else "failed"
    event.emit(outcome, code=error.code, message=error.message, hint=error.hint)
    # The container has ended in any case, so an error does not make `poststop` fail.
    return 0 if options.stage == "poststop" else error.status


def _internal(e: Exception) -> InternalError:
    """Return the error for an unexpected exception, with the place that raised it."""
    frame = e.__traceback__
    while frame and frame.tb_next:
        frame = frame.tb_next
    where = (
        f"{os.path.basename(frame.tb_frame.f_code.co_filename)}:{frame.tb_lineno}" if frame else "?"
    )
    return InternalError(
        f"{type(e).__name__} at {where}: {show(e)}",
        hint="report this in the project's issue tracker",
    )
