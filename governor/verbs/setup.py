"""`tidegate setup`: make a container engine use Tidegate, or undo that."""

from __future__ import annotations

import argparse
import importlib
from typing import TYPE_CHECKING, cast

from governor.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Callable

    from governor.setup.apply import Edit
    from governor.setup.files import Root
    from governor.setup.journal import Journal
    from governor.setup.plan import SetupOptions, SetupPlan

SUMMARY = "Make a container engine use Tidegate"

ENGINES = ("docker", "podman", "containerd", "crio")
# The engines to which each option applies.
FOR = {
    "default": ("docker",),
    "hooks_dir": ("podman",),
    "base_spec": ("containerd",),
    "containerd_version": ("containerd",),
    "config": ("docker", "containerd", "crio"),
    "runtime_class": ("containerd", "crio"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's own options."""
    parser.add_argument("engine", choices=ENGINES, help="the engine to configure")
    parser.add_argument("--dry-run", action="store_true", help="write nothing; show the difference")
    parser.add_argument("--undo", action="store_true", help="restore the previous configuration")
    parser.add_argument("--root", default="/", metavar="DIR", help="the node's root (default /)")
    parser.add_argument(
        "--bin-dir",
        default="/usr/bin",
        metavar="DIR",
        help="where tidegate-hook and tidegate-runtime are on the node (default %(default)s)",
    )
    parser.add_argument(
        "--config", metavar="FILE", help="the engine's configuration file, if it is not the default"
    )
    parser.add_argument(
        "--default",
        action="store_true",
        help="docker: also make tidegate-runtime the default runtime",
    )
    parser.add_argument(
        "--hooks-dir", metavar="DIR", help="podman: directory from which it reads hooks"
    )
    parser.add_argument(
        "--containerd-version",
        metavar="1.7",
        help="containerd: the version to assume if containerd cannot be run",
    )
    parser.add_argument(
        "--base-spec",
        action="store_true",
        help="containerd: add the hook through a base_runtime_spec, without the wrapper runtime",
    )
    parser.add_argument(
        "--runtime-class",
        action="store_true",
        help="containerd, crio: only print the RuntimeClass for Kubernetes",
    )


def run(args: argparse.Namespace) -> int:
    """Print the changes, and make them."""
    _check(args)
    from governor.setup.files import Root
    from governor.setup.plan import SetupOptions, packaged

    if args.runtime_class:
        print(packaged("containerd/runtimeclass.yaml"), end="")
        return 0
    root = Root(args.root)
    if args.undo:
        return _undo(root, args)
    options = SetupOptions(
        bin_dir=args.bin_dir,
        config=args.config,
        default=args.default,
        hooks_dir=args.hooks_dir,
        base_spec=args.base_spec,
        containerd_version=args.containerd_version,
    )
    return _set_up(root, args, options)


def _check(args: argparse.Namespace) -> None:
    for name, engines in FOR.items():
        if getattr(args, name) and args.engine not in engines:
            raise RequestError(
                f"--{name.replace('_', '-')} is for {' and '.join(engines)}",
                hint="leave it out",
            )
    for name in ("bin_dir", "config", "hooks_dir"):
        value = getattr(args, name)
        if value is not None and (not value.startswith("/") or not value.isprintable()):
            raise RequestError(
                f"--{name.replace('_', '-')} is {value!r}", hint="give an absolute path"
            )


def _set_up(root: Root, args: argparse.Namespace, options: SetupOptions) -> int:
    from governor.setup import apply, journal
    from governor.setup.validate import validate

    module = importlib.import_module(f"governor.setup.{args.engine}")
    make = cast("Callable[[Root, Journal, SetupOptions], SetupPlan]", module.plan)
    plan = make(root, journal.read(root), options)
    changes = apply.edits(root, plan)
    for change in changes:
        print(change.diff(root), end="")
    unchecked = validate(root, plan.validation, changes)
    if changes and not args.dry_run:
        apply.set_up(root, args.engine, changes)
    for note in [*plan.notes, *unchecked]:
        print(f"note: {note}")
    if not changes:
        print(f"{args.engine}: already set up, nothing to do")
        return 0
    for change in changes:
        print(f"{args.engine}: {root.shown(change.path)} {_done(change, args)}")
    for line in plan.todo:
        print(f"to do: {line}")
    return 0


def _done(change: Edit, args: argparse.Namespace) -> str:
    word = "removed" if change.after is None else "written"
    return f"would be {word}" if args.dry_run else word


def _undo(root: Root, args: argparse.Namespace) -> int:
    from governor.setup import apply, journal

    known = args.engine in journal.read(root).engines
    undo = apply.plan_undo(root, args.engine)
    for change in undo.edits:
        print(change.diff(root), end="")
    if not args.dry_run:
        apply.undo(root, args.engine, undo.edits)
    for note in undo.notes:
        print(f"note: {note}")
    for change in undo.edits:
        print(f"{args.engine}: {root.shown(change.path)} {_done(change, args)}")
    if not known:
        print(f"{args.engine}: not set up by this command, nothing to undo")
    elif not undo.edits:
        print(f"{args.engine}: the engine's files contain no Tidegate configuration")
    else:
        print(f"to do: {importlib.import_module(f'governor.setup.{args.engine}').UNDONE}")
    return 0
