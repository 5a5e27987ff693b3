"""`tidegate convert`: turn pods that ask other products for a GPU into pods with a claim."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from governor.config import parse_quantity
from governor.errors import ConfigError, RequestError
from vdriver.errors import one_line

SUMMARY = "Turn pods that ask HAMi, gpu-manager or NVIDIA's plugin for a GPU into pods with claims"
LOST = 1
"""The exit status if something could not be converted."""
LARGEST = 32 << 20
"""Maximum size of the manifests, in bytes."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's own options."""
    parser.add_argument(
        "file", metavar="FILE", help="manifests as YAML or JSON; - is standard input"
    )
    parser.add_argument(
        "--gpu-memory",
        type=_mebibytes,
        default=0,
        metavar="SIZE",
        help="memory of one GPU, for example 80Gi; gpumem-percentage is a percentage of it",
    )
    parser.add_argument(
        "--compute",
        type=_percent,
        default=10,
        metavar="PERCENT",
        help="percent guaranteed to pods that ask HAMi for memory only (%(default)s)",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON document: the manifests as a List, and the notes",
    )


def run(args: argparse.Namespace) -> int:
    """Print the manifests; print losses to stderr, and return 1 if there are any."""
    from kube.convert import convert
    from kube.convert_pod import ConvertOptions
    from kube.yamltext import UnreadableError

    name = "standard input" if args.file == "-" else args.file
    try:
        result = convert(_read(args.file), ConvertOptions(args.gpu_memory, args.compute))
    except UnreadableError as e:
        raise RequestError(
            f"{name}: {e}", hint="give manifests as YAML or JSON, and render a chart first"
        ) from e
    if args.json:
        print(result.json())
    else:
        sys.stdout.write(result.text)
        for note in result.notes:
            sys.stderr.write(f"{one_line(str(note))}\n")
    return LOST if result.lost else 0


def _read(file: str) -> str:
    try:
        data = sys.stdin.buffer.read(LARGEST + 1) if file == "-" else Path(file).read_bytes()
        if len(data) > LARGEST:
            raise RequestError(
                f"{file} has more than 32 MiB", hint="give fewer manifests at a time"
            )
        return data.decode()
    except OSError as e:
        raise RequestError(
            f"{file} cannot be read: {e.strerror}", hint="name a file with manifests"
        ) from e
    except UnicodeDecodeError as e:
        raise RequestError(f"{file} is not UTF-8", hint="save it as UTF-8") from e


def _mebibytes(text: str) -> int:
    try:
        amount = parse_quantity(text, "--gpu-memory") >> 20
    except ConfigError as e:
        raise argparse.ArgumentTypeError(str(e)) from e
    if not amount:
        raise argparse.ArgumentTypeError("it must be at least 1Mi")
    return amount


def _percent(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 100:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to 100")
    return int(text)
