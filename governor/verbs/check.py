"""`tidegate check`: is the configuration right, and is the node ready for containers."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from governor.client import ask
from governor.config import Config, describe, read_config
from governor.errors import ConfigError, TidegateError
from vdriver.errors import VdriverError
from vdriver.manifest import Manifest, read_manifest

SUMMARY = "check a configuration file, or this node"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's own options."""
    parser.add_argument("file", nargs="?", help="check this configuration file only")
    parser.add_argument("--config", help="the node's configuration (/etc/tidegate/config.yaml)")
    parser.add_argument("--runtime-dir", help="the governor's directory (/run/tidegate)")
    parser.add_argument("--driver-dir", help="the mirror's directory (/var/lib/tidegate/driver)")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def run(args: argparse.Namespace) -> int:
    """Print what is in force; the exit status is that of the first thing that is wrong."""
    if args.file:
        config = read_config(args.file)
        if args.json:
            print(json.dumps(describe(config), indent=2))
        else:
            print(f"{args.file}: accepted")
        return 0
    config = read_config(args.config)
    if args.runtime_dir:
        config = replace(config, runtime_dir=args.runtime_dir)
    if args.driver_dir:
        config = replace(config, driver_dir=args.driver_dir)
    findings: dict[str, Any] = {"configuration": describe(config)}
    status = 0
    for name, look in (("mirror", _look_at_mirror), ("governor", _look_at_governor)):
        try:
            findings[name] = look(config)
        except (TidegateError, VdriverError) as e:
            findings[name] = f"{e.code}: {e}"
            status = status or e.status
    if args.json:
        print(json.dumps(findings, indent=2))
    else:
        print("configuration: accepted")
        for name in ("mirror", "governor"):
            print(f"{name}: {findings[name]}")
    return status


def _look_at_mirror(config: Config) -> str:
    manifest = read_manifest((Path(config.driver_dir) / "current").resolve())
    _refuse_stale(manifest)
    return f"driver {manifest.version} ({manifest.kind}), generation {manifest.generation}"


def _refuse_stale(manifest: Manifest) -> None:
    for watched in manifest.watch:
        try:
            found = Path(watched.path).stat()
        except OSError as e:
            raise ConfigError(
                f"the mirror is stale: {watched.path}: {e.strerror}", hint="run tidegate refresh"
            ) from e
        if (found.st_size, found.st_mtime_ns) != (watched.size, watched.mtime_ns):
            raise ConfigError(
                f"the mirror is stale: {watched.path} has changed", hint="run tidegate refresh"
            )


def _look_at_governor(config: Config) -> str:
    answer = ask(config, "ping")
    return f"version {answer['version']}, process {answer['pid']}"
