"""`tidegate top`: show the current state of GPUs and containers, repeatedly."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

from governor.client import node_config
from governor.errors import GovernorError
from governor.listing import Listing, columns, percent, safe, table, trouble_lines

SUMMARY = "Show GPUs and containers live"
EPILOG = """\
On a terminal the screen is redrawn: q quits, the space bar redraws at once. Output to a pipe or a
file consists of plain lines. The columns are those of tidegate ps. If the governor stops, the
command reports that and waits until the governor is running again.

"""
BARS = ((120, 20), (95, 10), (0, 5))
"""Pairs of a terminal's minimum width and the length of a bar, both in columns."""

OPEN = "\x1b[?1049h\x1b[?25l"  # the alternate screen, without a cursor
CLOSE = "\x1b[?25h\x1b[?1049l"


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.1 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0.1 to 3600")
    return value


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 1 << 31:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's own options."""
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--interval",
        type=_seconds,
        default=2.0,
        metavar="SECONDS",
        help="interval between updates (default %(default)g)",
    )
    parser.add_argument(
        "--count", type=_count, metavar="N", help="number of updates (default: unlimited)"
    )
    parser.add_argument(
        "--config", metavar="FILE", help="configuration file (/etc/tidegate/config.yaml)"
    )
    parser.add_argument(
        "--runtime-dir", metavar="DIR", help="the governor's directory (/run/tidegate)"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON document on one line for each update"
    )


def run(args: argparse.Namespace) -> int:
    """Show GPUs and containers until the count is reached or the user quits."""
    config = node_config(args.config, args.runtime_dir)
    listing = Listing(config)
    if args.json or not _is_screen():
        return _print(args, listing)
    with _screen() as wait:
        shown = 0
        while True:
            _draw(listing, args.interval)
            shown += 1
            if shown == args.count or wait(args.interval):
                return 0


def _is_screen() -> bool:
    """Return whether the command is interactive, at a terminal with cursor control."""
    able = os.environ.get("TERM", "dumb") != "dumb"
    return able and sys.stdout.isatty() and sys.stdin.isatty()


def _read_state(listing: Listing) -> dict[str, Any]:
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "gpus": listing.gpus(),
        "containers": listing.containers(),
    }


def _print(args: argparse.Namespace, listing: Listing) -> int:
    """Print lines; the first request must succeed, but later ones may fail."""
    shown = 0
    while True:
        began = time.monotonic()
        try:
            look = _read_state(listing)
        except GovernorError as e:
            if not shown:
                raise
            print(f"tidegate: {e}", file=sys.stderr, flush=True)
        else:
            print(json.dumps(look) if args.json else "\n".join(_lines(look)), flush=True)
        shown += 1
        if shown == args.count:
            return 0
        time.sleep(max(0.0, began + args.interval - time.monotonic()))


def _lines(look: dict[str, Any]) -> list[str]:
    containers = look["containers"]
    return [look["time"], *_gpu_lines(look), *table(containers), *trouble_lines(containers)]


def _gpu_lines(look: dict[str, Any], width: int = BARS[0][0]) -> list[str]:
    """Return a line for each GPU: its time and memory in use, and what is left to grant."""
    rows = []
    bar = next(length for least, length in BARS if width >= least)
    names = width >= BARS[0][0]
    for gpu in look["gpus"]:
        # Containers that share a claim each report the total of all of them.
        accounts = {one["key"]: one for one in look["containers"]}
        own = [
            (one, device)
            for one in accounts.values()
            for device in one["devices"]
            if device["uuid"] == gpu["uuid"]
        ]
        rates = [device["delivered"] for _, device in own if device["delivered"] is not None]
        used = sum(_on_gpu(one, device) for one, device in own)
        parked = sum(_parked(one) for one, _ in own)
        words = [f"parked {parked >> 20} MiB"] if parked else []
        words += ["lost"] if gpu["lost"] else ["closed"] if gpu["closed"] else []
        rows.append(
            [
                f"GPU {gpu['index']}",
                *([safe(gpu["name"])[:32]] if names else []),
                f"time [{_bar(sum(rates), 100, bar)}] {percent(sum(rates))} %",
                f"memory [{_bar(used, gpu['memory'], bar)}] {used >> 20}/{gpu['memory'] >> 20} MiB",
                f"left {gpu['compute_left']} % {gpu['memory_left'] >> 20} MiB",
                ", ".join(words),
            ]
        )
    return columns(rows) if rows else ["no GPU is shared"]


def _on_gpu(container: dict[str, Any], device: dict[str, Any]) -> int:
    """Return the bytes that a container has on a GPU.

    What is suspended or parked counts against the quota, but is in host memory.
    """
    if container.get("suspension") == "suspended":
        return 0
    return max(0, int(device["memory_used"]) - _parked(container))


def _parked(container: dict[str, Any]) -> int:
    """Return the bytes of a container that are parked; it has a single GPU if any are."""
    return int((container.get("parking") or {}).get("parked", 0))


def _bar(value: float, most: float, length: int) -> str:
    full = round(length * min(1.0, value / most)) if most > 0 else 0
    return "#" * full + "." * (length - full)


def _size() -> os.terminal_size:
    """Return the terminal's size now; COLUMNS and LINES may be out of date."""
    with contextlib.suppress(OSError):
        size = os.get_terminal_size(sys.stdout.fileno())
        if size.columns and size.lines:
            return size
    return shutil.get_terminal_size()


def _draw(listing: Listing, interval: float) -> None:
    size = _size()
    clock = time.strftime("%H:%M:%S")
    try:
        look = _read_state(listing)
        n = len(look["containers"])
        title = (
            f"tidegate top  {clock}  {n} container{'s' * (n != 1)}  every {interval:g} s, q ends"
        )
        lines = [title, "", *_gpu_lines(look, size.columns), ""]
        lines += table(look["containers"], size.columns)
        bad = trouble_lines(look["containers"])
    except GovernorError as e:
        lines, bad = [f"tidegate top  {clock}", "", safe(e)], []
    # Violations have to be visible, so they take precedence if not all lines fit.
    room = max(1, size.lines - len(bad))
    shown = [line[: size.columns] for line in lines[:room]]
    shown += [f"\x1b[7m{line[: size.columns]}\x1b[0m" for line in bad[: size.lines - 1]]
    sys.stdout.write("\x1b[H" + "\r\n".join(f"{line}\x1b[K" for line in shown) + "\x1b[J")
    sys.stdout.flush()


@contextlib.contextmanager
def _screen() -> Iterator[Any]:
    """Take over the terminal, and restore it at the end, even after an exception.

    Yield a function that waits a number of seconds, or until the window is resized or a key is
    pressed; it returns whether the user wants to quit.
    """
    import termios
    import tty

    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)
    woken, wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def enter() -> None:
        tty.setcbreak(keyboard)
        os.write(sys.stdout.fileno(), OPEN.encode())

    def leave() -> None:
        os.write(sys.stdout.fileno(), CLOSE.encode())
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)

    def end(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    def stop(_number: int, _frame: FrameType | None) -> None:
        leave()
        os.kill(os.getpid(), signal.SIGSTOP)
        enter()
        resize(0, None)

    def resize(_number: int, _frame: FrameType | None) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(wake, b".")

    def wait(seconds: float) -> bool:
        readable, _, _ = select.select([keyboard, woken], [], [], seconds)
        if woken in readable:
            os.read(woken, 64)
        if keyboard in readable:
            key = os.read(keyboard, 64)
            return not key or key[:1] in b"qQ\x04"
        return False

    handlers = {
        signal.SIGTERM: end,
        signal.SIGHUP: end,
        signal.SIGTSTP: stop,
        signal.SIGWINCH: resize,
    }
    old = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        enter()
        yield wait
    finally:
        with contextlib.suppress(OSError, termios.error):  # the terminal may be gone
            leave()
        for number, handler in old.items():
            signal.signal(number, handler)
        os.close(woken)
        os.close(wake)
