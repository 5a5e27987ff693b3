"""`tidegate explain`: what a container would get, and why.

Walks the hook's own way - its annotations, its reading of the mirror and of the image, its plan -
up to the point where the governor would be asked. It asks nobody and changes nothing.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from oci_hook.image import Image
    from oci_hook.manifest import Manifest, MirrorSet
    from oci_hook.request import Request

SUMMARY = "Say what a container would get, and why"
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
        help="one annotation; may be repeated, and goes before the bundle's",
    )
    container.add_argument("--rootfs", metavar="DIR", help="the container's root file system")
    parser.add_argument(
        "--driver-dir",
        default="/var/lib/tidegate/driver",
        metavar="DIR",
        help="where generations of the driver's mirror are (default %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Print the explanation; an error of the hook's is this command's too."""
    for line in _lines(args):
        print(line)
    return 0


def _lines(args: argparse.Namespace) -> Iterator[str]:
    from oci_hook.errors import DriverError, UnservedImageError
    from oci_hook.request import check_request, parse_annotations

    annotations, root = _container(args)
    if not annotations:
        yield "no annotation below tidegate.gpu/: the container is left alone"
        return
    request = parse_annotations(annotations)
    check_request(request, annotations)
    yield "request"
    yield from (f"  {line}" for line in _request(request))
    try:
        yield from _prepared(args.driver_dir, root, request)
    except (DriverError, UnservedImageError) as e:
        if not request.optional:
            raise
        yield "result"
        yield f"  starts without a GPU, as tidegate.gpu/driver is optional: {e.message}"


def _container(args: argparse.Namespace) -> tuple[dict[str, str], str | None]:
    """Return the annotations that count and the root file system, None when none was named."""
    from governor.errors import RequestError
    from oci_hook.state import PREFIX, State, our_annotations, parse_config, read_config

    annotations: dict[str, str] = {}
    root = args.rootfs
    if args.bundle is not None:
        directory = str(Path(args.bundle).absolute())
        bundle = parse_config(read_config(directory), directory)
        annotations = our_annotations(
            State(ident="", pid=0, bundle=directory, annotations={}), bundle
        )
        root = root or bundle.root
    for given in args.annotation:
        name, equals, value = given.partition("=")
        if not equals:
            raise RequestError(
                f"--annotation {given} has no value", hint="write it like tidegate.gpu/memory=8Gi"
            )
        if name.startswith(PREFIX):
            annotations[name] = value
    return annotations, root


def _request(request: Request) -> Iterator[str]:
    """Say what was asked for, and what is assumed where nothing was said."""
    default = "not given: the node's default"
    yield (
        f"memory        {_bytes(request.memory)} of each GPU"
        if request.memory
        else f"memory        {default}"
    )
    limit = request.compute_limit or request.compute
    if request.compute:
        yield f"compute       {request.compute} % of each GPU's time, guaranteed"
    else:
        yield f"compute       {default}"
    if limit:
        lends = "idle time is lent up to it" if limit != request.compute else "no idle time is lent"
        yield f"compute-limit {limit} %: {lends}"
    if request.devices:
        yield f"devices       {', '.join(request.devices)}"
    else:
        yield f"devices       {request.gpus or 1}, chosen by the governor"
    yield f"strategy      {request.strategy}"
    yield f"capabilities  {', '.join(request.capabilities)}"
    yield f"driver        {'optional' if request.optional else 'required'}"


def _prepared(driver_dir: str, root: str | None, request: Request) -> Iterator[str]:
    from oci_hook.client import Grant
    from oci_hook.manifest import check_fresh, choose_set, read_manifest
    from oci_hook.plan import plan_container

    manifest = read_manifest(driver_dir)
    check_fresh(manifest)
    mirror_set = choose_set(manifest, request.capabilities)
    yield "driver"
    yield from (f"  {line}" for line in _driver(manifest, mirror_set))
    if root is None:
        yield "result"
        yield "  name the image's files with --rootfs or --bundle to see the mounts"
        return
    image = _inspect(root, manifest.machine)
    yield "image"
    yield f"  /{image.library_dir} holds its C library"
    yield f"  /{image.target} is where its loader looks first"
    yield f"  {'has an' if image.cache is not None else 'has no'} ld.so.cache"
    grant = Grant(
        KEY, f"/run/tidegate/containers/{KEY}", (), request.memory or 0, request.compute or 0
    )
    yield "result, if the governor admits it"
    for line in plan_container(manifest, mirror_set, grant, image).describe():
        yield f"  {line}"


def _driver(manifest: Manifest, mirror_set: MirrorSet) -> Iterator[str]:
    yield f"{manifest.version} ({manifest.machine}), generation {manifest.generation}"
    yield f"{len(mirror_set.sonames)} names of libraries for {', '.join(mirror_set.capabilities)}"
    if mirror_set.programs:
        yield f"programs {', '.join(p.rpartition('/')[2] for p in mirror_set.programs)}"


def _inspect(root: str, machine: str) -> Image:
    from governor.errors import RequestError
    from oci_hook.image import inspect_image

    try:
        rootfd = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as e:
        raise RequestError(
            f"root file system {root}: {e.strerror}", hint="name its directory with --rootfs"
        ) from e
    procfd = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return inspect_image(rootfd, procfd, machine)
    finally:
        os.close(procfd)
        os.close(rootfd)


def _bytes(value: int) -> str:
    for unit, size in (("Ti", 1 << 40), ("Gi", 1 << 30), ("Mi", 1 << 20), ("Ki", 1 << 10)):
        if value % size == 0:
            return f"{value // size}{unit}"
    return f"{value} bytes"
