"""Prepares a container that requests a GPU, in four steps that use the results of earlier ones.

`read_request` parses the request, `inspect` examines the node and the image, `admit` asks the
governor, and `mount` applies the plan. `oci_hook.main` imports this module, and with it all modules
that only these steps need, once it has found that a container requests a GPU.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from oci_hook import cleanup, kernel
from oci_hook.apply import CreatedContainer, MountNamespace, Undo, apply_plan, explain
from oci_hook.claims import as_request
from oci_hook.client import PATIENCE, Client, Grant, require_reachable
from oci_hook.edits import (
    check_devices,
    gpu_nodes,
    refuse_foreign,
    require_no_gpu,
    take_reservation,
)
from oci_hook.errors import NoMirrorError, UnservedImageError, show
from oci_hook.gvisor import refuse_process
from oci_hook.image import Image, inspect_image, look_at_places, look_for_drivers, search_path
from oci_hook.log import RunEvent
from oci_hook.manifest import (
    MirrorManifest,
    WantedParts,
    check_fresh,
    choose_share,
    module_version,
    read_manifest,
)
from oci_hook.plan import Plan, plan_container
from oci_hook.quick import DeferredDeadline, HookOptions, shield
from oci_hook.request import Request, check_request, parse_annotations
from oci_hook.state import Bundle, OciState

Shares = tuple[tuple[str, str], ...]
"""Shares of claims, as (uid, name)."""


class Start(NamedTuple):
    """One start of a container: the hook's options, and the input from the runtime and engine."""

    options: HookOptions
    state: OciState
    bundle: Bundle
    annotations: dict[str, str]
    claims: Shares
    event: RunEvent


class Asked(NamedTuple):
    """A container's request, and the device nodes that it already has."""

    request: Request
    reservation: str
    nodes: tuple[int, ...]


class NodeAndImage(NamedTuple):
    """The node's mirror, the parts of it that the container gets, and the container's image.

    `home` is the absolute path of the container's root, without links, for the container's note.
    """

    manifest: MirrorManifest
    share: WantedParts
    container: CreatedContainer
    image: Image
    home: str


def prepare_container(start: Start) -> str:
    """Prepare one container; return the outcome."""
    options, state, bundle, event = start.options, start.state, start.bundle, start.event
    event.phase("import")
    kernel.set_undumpable()
    refuse_process(state.pid)
    asked = read_request(start)
    event.phase("request")
    try:
        found = inspect(start, asked)
    except (NoMirrorError, UnservedImageError) as e:
        if not asked.request.optional:
            raise
        require_no_gpu(bundle.document, e)
        event.fields |= {"code": e.code, "message": e.message}
        return "without-gpu"
    except OSError as e:
        raise explain(e, f"examine {show(bundle.root)}") from e
    # Half of the deadline, so that a missing answer is not reported as a missed deadline.
    client = Client(options.runtime_dir, options.timeout / 2, PATIENCE)
    try:
        grant = admit(start, asked, found, client)
        event.phase("admit")
        if grant.already:
            return "prepared-already"
        check_devices(grant.minors, asked.nodes)
        plan = plan_container(found.manifest, found.share, grant, found.image)
        event.fields |= {
            "key": grant.key,
            "devices": list(grant.devices),
            "memory": grant.memory,
            "compute": grant.compute,
            "strategy": grant.strategy,
            "operations": len(plan.operations),
            "plan": plan.describe(),
        }
        event.phase("plan")
        mount(start, found, plan, client)
    finally:
        client.close()
    # Some engines do not report the end of a container, so old notes are removed now and then.
    if state.pid % cleanup.SWEEP == 0:  # pids are arbitrary: about one start in SWEEP
        shield()
        cleanup.sweep_apart(options.runtime_dir)
    return "prepared"


def read_request(start: Start) -> Asked:
    """Parse the container's request. Raise HookError if no node could accept it."""
    annotations, document = start.annotations, start.bundle.document
    reservation = take_reservation(annotations)
    refuse_foreign(document)
    nodes = gpu_nodes(document)
    request = parse_annotations(annotations)
    check_request(request, annotations)
    require_reachable(start.options.runtime_dir)
    return Asked(request, reservation, nodes)


def inspect(start: Start, asked: Asked) -> NodeAndImage:
    """Examine the node's mirror and the container's image."""
    options, state, bundle, event = start.options, start.state, start.bundle, start.event
    manifest = read_manifest(options.driver_dir)
    check_fresh(manifest, module_version(options.module_version))
    share = choose_share(manifest, asked.request.capabilities)
    event.fields |= {"generation": manifest.generation}
    event.phase("manifest")
    container = CreatedContainer(state.pid, bundle.root)
    # Clean up after an earlier container with this id that ended without a report.
    cleanup.take_back(options.runtime_dir, state.id)
    place = os.fstat(container.rootfd)
    home = kernel.path_of(container.procfd, container.rootfd)
    # Held until this process ends: another start or end on this root sees either everything that
    # this start creates, or none of it.
    cleanup.lock(options.runtime_dir, place.st_dev, place.st_ino)
    image = inspect_image(
        container.rootfd,
        container.procfd,
        manifest.machine,
        compat32=share.compat32 != "no",
    )
    with MountNamespace(container) as rootfd:
        search = search_path(rootfd, container.procfd, image, bundle.document)
        image = look_for_drivers(rootfd, image, search)
        if share.places:
            image = look_at_places(rootfd, image, share)
    event.phase("image")
    return NodeAndImage(manifest, share, container, image, home)


def admit(start: Start, asked: Asked, found: NodeAndImage, client: Client) -> Grant:
    """Have the governor admit the container; return the admission. Raise HookError if refused."""
    options, state = start.options, start.state
    return client.admit(
        ident=state.id,
        pid=state.pid,
        pidfd=found.container.pidfd,
        bundle=state.bundle,
        annotations=start.annotations,
        identity=start.bundle.identity,
        reservation=asked.reservation,
        nodes=asked.nodes,
        exact=options.governed or options.claim != "",
        **({"claims": as_request(start.claims)} if start.claims else {}),
    )


def mount(start: Start, found: NodeAndImage, plan: Plan, client: Client) -> None:
    """Apply the plan and confirm the admission; on failure, undo the plan and log what is left."""
    options, state, event = start.options, start.state, start.event
    undo, noted = Undo(), False
    try:
        skipped = [*plan.skipped, *apply_plan(plan, found.manifest.hold, found.container, undo)]
        try:
            with DeferredDeadline():
                cleanup.remember(
                    options.runtime_dir, state.id, state.pid, found.home, undo.traces()
                )
                noted = True
        except OSError as e:
            skipped.append(f"what was created for this container will not be removed: {e.strerror}")
        if skipped:
            event.fields["skipped"] = skipped
        event.phase("apply")
        client.confirm()
        undo.forget()
        event.phase("confirm")
    except BaseException:
        shield()
        left = undo.run(found.container)
        # If `noted` is false, a note with this id belongs to a running container of another engine.
        # If something is `left`, the note stays for the clean-up at the container's end.
        if noted and not left:
            cleanup.forget(options.runtime_dir, state.id)
        if left:
            event.fields["left_behind"] = left
        raise
