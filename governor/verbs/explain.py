"""`tidegate explain`: show what a container would get, and why.

It takes the same steps as the hook (parse annotations, read the mirror and the image, plan) up to
the request to the governor. It sends no request and changes nothing.
"""

from __future__ import annotations

import argparse
import os
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from governor.config import Config
    from oci_hook.image import Image
    from oci_hook.manifest import MirrorBind, MirrorManifest, WantedParts
    from oci_hook.plan import PlacePlan, Plan
    from oci_hook.request import Request

SUMMARY = "Show what a container would get, and why"
WIDTH = 110
KEY = "<key>"  # the governor chooses it when it admits the container


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `explain`."""
    container = parser.add_argument_group("the container")
    container.add_argument(
        "--bundle", metavar="DIR", help="read annotations and root from its config.json"
    )
    container.add_argument(
        "--annotation",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an annotation, which replaces the bundle's; may be repeated",
    )
    container.add_argument("--rootfs", metavar="DIR", help="the container's root file system")
    parser.add_argument(
        "--config", metavar="FILE", help="the node's configuration (/etc/tidegate/config.yaml)"
    )
    parser.add_argument(
        "--driver-dir",
        default="/var/lib/tidegate/driver",
        metavar="DIR",
        help="where generations of the driver's mirror are (default %(default)s)",
    )
    parser.add_argument(
        "--hook",
        default="/usr/bin/tidegate-hook",
        metavar="FILE",
        help="the path under which a claim adds the hook to config.json (default %(default)s)",
    )
    parser.add_argument(
        "--module-version",
        default="/proc/driver/nvidia/version",
        metavar="FILE",
        help="file with the kernel module's version (default %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Print the explanation; raise the error that the hook would raise."""
    for line in _lines(args):
        print(line)
    return 0


def _lines(args: argparse.Namespace) -> Iterator[str]:
    from governor.client import node_config
    from oci_hook.claims import find_claims
    from oci_hook.errors import NoMirrorError, UnservedImageError
    from oci_hook.request import check_request, parse_annotations, refuse_beside

    container = _container(args)
    claims = find_claims(container.document, args.hook)
    if claims:
        uids = ", ".join(dict(claims))
        yield (
            f"claims {uids} determine which GPUs it gets and how much of each: tidegate claims"
            " shows them"
        )
        refuse_beside(container.annotations, f"claim {uids}")
    elif not container.annotations:
        yield "no annotation under tidegate.gpu/: the container is left alone"
        return
    request = parse_annotations(container.annotations)
    check_request(request, container.annotations)
    rootfd = None if container.root is None else _open_root(container.root)
    try:
        yield "request"
        # With a claim, only the last two lines depend on the request.
        said = list(_request(request, node_config(args.config, None)))[-2 if claims else 0 :]
        yield from (f"  {line}" for line in said)
        try:
            yield from _prepared(args, rootfd, container, request)
        except (NoMirrorError, UnservedImageError) as e:
            if not request.optional:
                raise
            yield "result"
            yield f"  starts without a GPU, because tidegate.gpu/driver is optional: {e.message}"
    finally:
        if rootfd is not None:
            os.close(rootfd)


class _Container(NamedTuple):
    """A container, as described by the command line."""

    annotations: dict[str, str]  # those with the prefix tidegate.gpu/
    root: str | None  # its root file system; None if none was named
    volumes: tuple[str, ...]  # where the bundle mounts something, relative to the root
    document: dict[str, Any]  # the bundle's config.json, empty without one


def _container(args: argparse.Namespace) -> _Container:
    """Return the container; raise the hook's errors for a bundle, RequestError for an option."""
    from governor.errors import RequestError
    from oci_hook.quick import PREFIX
    from oci_hook.request import PARSERS
    from oci_hook.state import OciState, our_annotations, parse_config, read_config

    annotations: dict[str, str] = {}
    volumes: tuple[str, ...] = ()
    document: dict[str, Any] = {}
    root = args.rootfs
    if args.bundle is not None:
        directory = str(Path(args.bundle).absolute())
        config = read_config(
            directory,
            hint="name a bundle with --bundle, or give --rootfs and --annotation instead",
        )
        bundle = parse_config(config, directory)
        annotations = our_annotations(
            OciState(ident="", pid=0, bundle=directory, annotations={}), bundle
        )
        document = bundle.document
        volumes = tuple(_volumes(document))
        root = root or bundle.root
    for given in args.annotation:
        name, equals, value = given.partition("=")
        if not equals:
            raise RequestError(
                f"--annotation {given} has no value", hint="write it like tidegate.gpu/memory=8Gi"
            )
        if name.startswith(PREFIX):
            annotations[name] = value
        elif name in PARSERS:
            raise RequestError(
                f"--annotation {given} does not begin with {PREFIX}",
                hint=f"did you mean {PREFIX}{name}?",
            )
    return _Container(annotations, root, volumes, document)


def _volumes(config: dict[str, Any]) -> Iterator[str]:
    """Yield the directories on which a config.json mounts something, without validating it."""
    mounts = config.get("mounts")
    for mount in mounts if isinstance(mounts, list) else []:
        destination = mount.get("destination") if isinstance(mount, dict) else None
        if isinstance(destination, str):
            yield os.path.normpath(f"/{destination}").strip("/")


def _open_root(root: str) -> int:
    """Open a root file system.

    Raise RequestError if it cannot be opened, and BundleError if it is the host's.
    """
    from governor.errors import RequestError
    from oci_hook.errors import BundleError

    try:
        rootfd = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as e:
        raise RequestError(
            f"root file system {root}: {e.strerror}", hint="name its directory with --rootfs"
        ) from e
    if os.path.samestat(os.fstat(rootfd), Path("/").stat()):
        os.close(rootfd)
        raise BundleError(
            f"root file system {root} is the host's own root",
            hint="name the container's with --rootfs",
        )
    return rootfd


def _parking(request: Request, config: Config) -> str:
    from governor.quota import show_memory, unparkable

    memory = config.memory
    if request.parking == "never":
        return "never"
    if memory.overbook <= 1:
        return "allowed, but never needed: this node grants no more memory than its GPUs have"
    if others := unparkable(request.capabilities):
        return f"allowed, but not possible with the capability {', '.join(others)}"
    if len(request.devices) > 1 or (request.gpus or 1) > 1:
        return "allowed, but not possible with several GPUs"
    size = request.memory or config.defaults.memory or 0
    return (
        f"allowed: while it is idle, its memory may be parked in host memory; this node reserves"
        f" {show_memory(memory.host_limit)} for that, of which this container needs up to"
        f" {show_memory(size)}"
    )


def _request(request: Request, config: Config) -> Iterator[str]:
    """Yield the requested values, and this node's defaults for the others."""
    defaults = config.defaults
    from governor.quota import show_memory

    if request.memory:
        yield f"memory        {show_memory(request.memory)} of each GPU"
    elif defaults.memory:
        yield f"memory        {show_memory(defaults.memory)} of each GPU, the node's default"
    else:
        missing = "not given, and this node has no default: the container would be refused"
        yield f"memory        {missing}"
    compute = request.compute or min(
        defaults.compute, request.compute_limit or defaults.compute_limit
    )
    limit = request.compute_limit or request.compute or defaults.compute_limit
    own = ""
    if not request.compute:
        own = ", the node's default" if compute == defaults.compute else ", because of the limit"
    yield f"compute       {compute} % of each GPU's time, guaranteed{own}"
    lends = "idle time is lent up to this limit" if limit != compute else "no idle time is lent"
    own = "" if request.compute or request.compute_limit else ", the node's default"
    yield f"compute-limit {limit} %{own}: {lends}"
    if request.devices:
        yield f"devices       {', '.join(request.devices)}"
    else:
        yield f"devices       {request.gpus or 1}, chosen by the governor"
    yield f"class         {request.work_class}"
    yield f"parking       {_parking(request, config)}"
    yield f"strategy      {request.strategy}"
    yield f"capabilities  {', '.join(request.capabilities)}"
    yield f"driver        {'optional' if request.optional else 'required'}"


def _prepared(
    args: argparse.Namespace, rootfd: int | None, container: _Container, request: Request
) -> Iterator[str]:
    from oci_hook.client import Grant
    from oci_hook.manifest import check_fresh, choose_share, module_version, read_manifest
    from oci_hook.plan import plan_container

    manifest = read_manifest(args.driver_dir)
    module = module_version(args.module_version)
    check_fresh(manifest, module)
    share = choose_share(manifest, request.capabilities)
    yield "driver"
    yield from (f"  {line}" for line in _driver(manifest, share, module, request.capabilities))
    yield "libraries"
    yield from (f"  {line}" for line in _libraries(manifest, share))
    if rootfd is None:
        yield from _unplaced(share)
        yield "result"
        yield (
            "  give the container's root file system with --rootfs or --bundle to see the mounts"
        )
        return
    image = _inspect(rootfd, container, manifest, share)
    grant = Grant(
        KEY, f"/run/tidegate/containers/{KEY}", (), request.memory or 0, request.compute or 0
    )
    yield "image"
    yield f"  /{image.library_dir} holds its C library"
    yield f"  /{image.target} is where its loader looks first"
    yield f"  {'has an' if image.cache is not None else 'has no'} ld.so.cache"
    if image.target32 is not None:
        yield f"  /{image.target32} is where 32-bit libraries go; ld.so.cache points there"
    elif share.compat32 == "offered":  # if they were requested, an error was raised
        yield f"  accepts no 32-bit libraries: {image.reason32}"
    plan = plan_container(manifest, share, grant, image)
    yield from _section("places", [line for p in plan.places for line in _place(p)])
    yield from _section("directories of this host", map(_bind, share.binds))
    yield "result, if the governor admits it"
    yield from (f"  {line}" for line in _operations(plan))


def _section(title: str, lines: Iterable[str]) -> Iterator[str]:
    """Yield a section, or nothing if it would be empty."""
    found = list(lines)
    if found:
        yield title
        yield from (f"  {line}" for line in found)


def _driver(
    manifest: MirrorManifest, share: WantedParts, module: str | None, asked: tuple[str, ...]
) -> Iterator[str]:
    yield f"{manifest.version} ({manifest.machine}), generation {manifest.generation}"
    if module is not None and manifest.kind == "nvidia":
        yield f"the kernel module is {module} too"
    has = ", ".join(share.mirror_set.capabilities)
    if asked == ("all",):
        yield f"set of libraries for {has}: the largest"
    else:
        wanted = ", ".join(c for c in asked if c != "compat32")
        yield f"set of libraries for {has}: the smallest that has {wanted or 'any'}"
    match share.compat32:
        case "asked":
            yield "32-bit libraries, because compat32 was requested"
        case "offered":
            yield "32-bit libraries where the image has a 32-bit C library"
    if share.programs:
        names = (f"{p.path.rpartition('/')[2]} ({p.capability})" for p in share.programs)
        yield from _wrapped("programs ", names)


def _libraries(manifest: MirrorManifest, share: WantedParts) -> Iterator[str]:
    """Yield the set's libraries, grouped by the reason why they are in it."""
    from vdriver.manifest import read_manifest

    files = read_manifest(manifest.directory).files
    for directory, names, title in (
        ("lib64", share.mirror_set.names64, ""),
        ("lib32", share.mirror_set.names32 if share.compat32 != "no" else frozenset(), "32-bit "),
    ):
        groups: dict[str, list[str]] = {}
        for file in files:
            parent, _, name = file.path.rpartition("/")
            if parent != directory or name not in names or file.role == "link":
                continue
            if file.role == "control":
                group = "control"
            elif file.capability in share.mirror_set.capabilities:
                group = str(file.capability)
            else:
                group = "needed by these"
            groups.setdefault(group, []).append(file.soname or name)
        order = [*sorted(groups.keys() - {"control", "needed by these"}), "needed by these"]
        for group in ["control", *order]:
            if group in groups:
                found = sorted(groups[group])
                yield from _wrapped(f"{title + group:<15} {len(found):>3}: ", found)


def _wrapped(title: str, words: Iterable[str]) -> list[str]:
    """Join words with commas, on as many lines as needed."""
    return textwrap.wrap(
        ", ".join(words),
        WIDTH,
        initial_indent=title,
        subsequent_indent=" " * len(title),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _unplaced(share: WantedParts) -> Iterator[str]:
    """Yield the possible mount points of places, because no image was given."""
    yield from _section(
        "places", (f"{p.name}: {' or '.join(map(_shown, p.targets))}" for p in share.places)
    )
    yield from _section("directories of this host", map(_bind, share.binds))


def _shown(target: str) -> str:
    from oci_hook.manifest import LIBDIR

    return target if target.startswith(LIBDIR) else f"/{target}"


def _place(choice: PlacePlan) -> Iterator[str]:
    place = choice.place
    title = f"{place.name} ({place.capability}): "
    files = ", ".join(place.files)
    match choice.how:
        case "directory":
            yield f"{title}/{choice.target}, the whole directory: {files}"
        case "files":
            yield f"{title}/{choice.target}, single files beside the image's: {files}"
        case "skipped":
            yield f"{title}left out"
    yield from (f"  not {reason}" for reason in choice.others)


def _is_here(path: str) -> bool:
    return Path(path).is_dir() and not Path(path).is_symlink()


def _bind(bind: MirrorBind) -> str:
    here = "" if _is_here(bind.path) else ": does not exist now, left out"
    return f"{bind.path} ({bind.capability}){here}"


def _operations(plan: Plan) -> Iterator[str]:
    from oci_hook.plan import BindDirectory

    for operation in plan.operations:
        match operation:
            case BindDirectory(may_lack=True) if not _is_here(operation.source):
                continue
            case _:
                yield operation.describe()


def _inspect(
    rootfd: int, container: _Container, manifest: MirrorManifest, share: WantedParts
) -> Image:
    """Inspect the image as the hook does, and take the bundle's mounts into account."""
    from oci_hook.image import (
        VOLUME,
        PathInImage,
        inspect_image,
        look_at_places,
        look_for_drivers,
        search_path,
    )

    procfd = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        image = inspect_image(rootfd, procfd, manifest.machine, compat32=share.compat32 != "no")
        search = search_path(rootfd, procfd, image, container.document)
    finally:
        os.close(procfd)
    image = look_at_places(rootfd, look_for_drivers(rootfd, image, search), share)
    mounted = {
        path: PathInImage("unusable", VOLUME)
        for path in image.looks
        if any(f"{path}/".startswith(f"{volume}/") for volume in container.volumes)
    }
    return image._replace(looks=image.looks | mounted)
