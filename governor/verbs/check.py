"""`tidegate check`: check the configuration, and whether the node is ready for containers.

It is quick, and shows the configuration in force and what is left of each GPU. `tidegate doctor`
examines the whole node, and calls `look_at_mirror`.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from governor.client import ask
from governor.config import Config, describe, find_files, load_config
from governor.errors import TidegateError
from oci_hook.errors import HookError

if TYPE_CHECKING:
    from oci_hook.manifest import MirrorManifest

MIB = 1 << 20

SUMMARY = "Check a configuration file, or this node"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's own options."""
    parser.add_argument(
        "file", nargs="?", metavar="FILE", help="check this configuration file only"
    )
    parser.add_argument(
        "--config", metavar="FILE", help="the node's configuration (/etc/tidegate/config.yaml)"
    )
    parser.add_argument(
        "--runtime-dir", metavar="DIR", help="the governor's directory (/run/tidegate)"
    )
    parser.add_argument(
        "--driver-dir", metavar="DIR", help="the mirror's directory (/var/lib/tidegate/driver)"
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the findings; the exit status is that of the first error."""
    if args.file:
        loaded = load_config(_main_file(Path(args.file)))
        if args.json:
            print(json.dumps(describe(loaded.config), indent=2))
        else:
            print(f"{', '.join(loaded.files)}: accepted")
        return 0
    loaded = load_config(args.config)
    config = loaded.config
    if args.runtime_dir:
        config = replace(config, runtime_dir=args.runtime_dir)
    if args.driver_dir:
        config = replace(config, driver_dir=args.driver_dir)
    findings: dict[str, Any] = {"configuration": describe(config), "files": list(loaded.files)}
    status = 0
    for name, look in (("mirror", _look_at_mirror), ("governor", _look_at_governor)):
        try:
            findings[name] = look(config)
        except (TidegateError, HookError) as e:
            findings[name] = f"{e.message}; {e.hint}"
            status = status or e.status
    gpus = _look_at_gpus(config)
    if args.json:
        print(json.dumps({**findings, **gpus}, indent=2))
    else:
        print(
            f"configuration: {', '.join(loaded.files) or 'no file, the defaults apply'}: accepted"
        )
        for name in ("mirror", "governor"):
            print(f"{name}: {findings[name]}")
        if gpus:
            print("\n".join(_lines(gpus)))
    return status


def _main_file(file: Path) -> Path:
    """Return the main file of a drop-in, because the two are merged."""
    whole = file.absolute()  # a name without a directory may be given
    if whole.parent.suffix != ".d":
        return file
    main = whole.parent.with_suffix(".yaml")
    return main if whole in find_files(main) else file


def look_at_mirror(driver_dir: str, root: str = "/") -> tuple[MirrorManifest, str | None]:
    """Make the checks that the hook makes before it serves a container from the mirror.

    Return the manifest of the generation in force, and a later change that does not prevent
    containers from starting, or None. Raise HookError for one that does. `root` is the node's root
    directory.
    """
    from oci_hook.manifest import (
        MODULE_VERSION,
        changed_files,
        check_fresh,
        module_version,
        read_manifest,
    )

    below = root.rstrip("/")
    manifest = read_manifest(driver_dir)
    os.close(manifest.hold)
    watch = tuple(
        file._replace(path=below + path)
        for file in manifest.watch
        if (path := _visible_path(file.path, driver_dir)) is not None
    )
    manifest = manifest._replace(hold=-1, watch=watch)
    check_fresh(manifest, module_version(below + MODULE_VERSION))
    return manifest, next((changed for _, changed in changed_files(manifest)), None)


def _visible_path(path: str, driver_dir: str) -> str | None:
    """Return a watched file's path as seen by this process, or None if it is not visible.

    If a pod made the mirror of its node's driver (`refresh --root /host`), the paths are those in
    that container. Another container of the pod, with hostPID, sees the node's root at
    /proc/1/root; on the node itself the files are below /.
    """
    try:
        text = Path(driver_dir, "current", "manifest.json").read_text(encoding="utf-8")
        root = str(json.loads(text)["source"]["root"]).rstrip("/")
    except (OSError, ValueError, KeyError, TypeError):
        return path  # a damaged manifest is reported by its next reader
    if not root or os.path.isdir(root) or not path.startswith(f"{root}/"):  # noqa: PTH112
        return path
    rest = path[len(root) :]
    seen = (f"/proc/1/root{rest}", rest)
    return next((one for one in seen if os.path.exists(one)), None)  # noqa: PTH110


def _look_at_mirror(config: Config) -> str:
    manifest, changed = look_at_mirror(config.driver_dir)
    text = f"driver {manifest.version} ({manifest.kind}), generation {manifest.generation}"
    if changed is not None:
        return f"{text}; it serves containers, but {changed}: run tidegate refresh"
    return text


def _look_at_governor(config: Config) -> str:
    answer = ask(config, "ping")
    return f"version {answer['version']}, process {answer['pid']}"


def _look_at_gpus(config: Config) -> dict[str, Any]:
    """Return the governor's description of the GPUs; empty if it does not answer."""
    try:
        answer = ask(config, "gpus")
    except TidegateError:
        return {}  # the caller has already reported that it does not answer
    return {name: answer[name] for name in ("placement", "gpus", "left_out")}


def _lines(answer: dict[str, Any]) -> list[str]:
    """Return a table of the GPUs with what is left of them, and how they are connected."""
    gpus = answer["gpus"]
    columns = [f"GPU{gpu['index']}" for gpu in gpus] if len(gpus) > 1 else []
    rows = [
        [
            "GPU",
            "NAME",
            "MEMORY LEFT",
            "TIME LEFT",
            "STRATEGY",
            "SCHEDULING",
            "CONTAINERS",
            "NUMA",
            *columns,
        ]
    ]
    for gpu in gpus:
        ways = {route["to"]: _connection(route) for route in gpu["routes"]}
        rows.append(
            [
                str(gpu["index"]),
                gpu["name"],
                f"{gpu['memory_left'] // MIB} of {gpu['memory'] // MIB} MiB",
                f"{gpu['compute_left']} %" if gpu["lost"] is None else "lost",
                gpu["strategy"],
                gpu.get("scheduling", "gate"),
                str(gpu["containers"]),
                "?" if gpu["numa_node"] is None else str(gpu["numa_node"]),
                *(
                    "-" if other is gpu else ways.get(other["index"], "?")
                    for other in gpus
                    if columns
                ),
            ]
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"placement: {answer['placement']}"]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        lines.append("  ".join(cells).rstrip())
    lines += [f"GPU {gpu['index']} is lost: {gpu['lost']}" for gpu in gpus if gpu["lost"]]
    lines += [
        f"GPU {gpu['index']} accepts no containers at present: {gpu['closed']}"
        for gpu in gpus
        if gpu["closed"]
    ]
    lines += [f"GPU {one['index']} is not shared: {one['reason']}" for one in answer["left_out"]]
    return lines


def _connection(route: dict[str, Any]) -> str:
    """Return the connection between two GPUs in the notation of nvidia-smi topo -m."""
    return f"NV{route['nvlinks']}" if route["nvlinks"] else route["pcie"] or "?"
