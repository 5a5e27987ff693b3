"""Parses mount tables, and finds the generations of the mirror that their mounts use."""

from __future__ import annotations

import os
import posixpath
import re
from dataclasses import dataclass
from typing import NamedTuple

ESCAPE = re.compile(rb"\\([0-7]{3})")
LAYERS = re.compile(r"(?:lowerdir|datadir|upperdir|workdir)\+?=(.*)", re.DOTALL)
MOUNTS = 2_000_000  # maximum number of mount ids that are remembered, about 200 MB


class Mount(NamedTuple):
    """A line of mountinfo, unescaped: `device` is major:minor, `root` a path in the file system."""

    ident: int
    device: str
    root: str
    point: str
    type: str
    options: tuple[str, ...]


class Location(NamedTuple):
    """The location of a directory: the device, and the path in its file system, as in mountinfo."""

    device: str
    path: str


@dataclass(frozen=True)
class Sought:
    """The directories that are looked for in mount tables.

    `driver` is the location of the driver directory and `paths` are its paths; `places` maps the
    name of each generation to its location, and `directories` maps the (st_dev, st_ino) of each
    directory in a generation to NAME/PATH.
    """

    driver: Location
    paths: tuple[str, ...]
    places: dict[str, Location]
    directories: dict[tuple[int, int], str]


def parse_mountinfo(data: bytes, faults: list[str] | None = None) -> list[Mount]:
    """Return the mounts in the content of a mountinfo file, proc_pid_mountinfo(5).

    A line that cannot be parsed is left out and reported in `faults`. Raise ValueError instead if
    `faults` is None.
    """
    mounts = []
    for line in data.split(b"\n"):  # a carriage return may be part of a name
        if not line:
            continue
        try:
            mounts.append(_parse_line(line))
        except (ValueError, IndexError) as e:
            text = f"not a line of mountinfo: {show(os.fsdecode(line[:200]))}"
            if faults is None:
                raise ValueError(text) from e
            faults.append(text)
    return mounts


def _parse_line(line: bytes) -> Mount:
    fields = line.split(b" ")
    end = fields.index(b"-", 6)
    return Mount(
        int(fields[0]),
        os.fsdecode(fields[2]),
        _unescape(fields[3]),
        _unescape(fields[4]),
        _unescape(fields[end + 1]),
        # Commas in a value are escaped; commas between options are not.
        tuple(_unescape(o) for o in b" ".join(fields[end + 3 :]).split(b",")),
    )


def _unescape(text: bytes) -> str:
    return os.fsdecode(ESCAPE.sub(lambda m: bytes([int(m[1], 8) & 0xFF]), text))


def show(text: str) -> str:
    """Return text from another process without characters that control a terminal."""
    safe = os.fsencode(text).decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else "?" for c in safe)


def locate(mount: Mount, path: str) -> Location:
    """Return the location of `path`, which is on `mount`, in its file system."""
    below = posixpath.relpath(path, mount.point)
    return Location(mount.device, posixpath.normpath(posixpath.join(mount.root, below)))


def layers(options: tuple[str, ...]) -> list[str]:
    """Return the normalised absolute paths of the layers in an overlay's options."""
    found = []
    for option in options:
        match = LAYERS.fullmatch(option)
        for part in re.findall(r"(?:\\.|[^:\\])+", match[1], re.DOTALL) if match else ():
            path = re.sub(r"\\(.)", r"\1", part, flags=re.DOTALL)
            if path.startswith("/"):
                found.append("/" + posixpath.normpath(path).lstrip("/"))
    return found


def names_in_use(mounts: list[Mount], sought: Sought) -> set[str]:
    """Return the generations that `mounts` use: those that contain the root of a mount.

    An overlay is on another device, and mountinfo shows its layers by the paths with which it was
    mounted. A layer in a generation uses that generation; any other layer in the driver directory
    (`current`, which may now point elsewhere, or the directory as a whole) uses all of them.
    """
    used: set[str] = set()
    driver = sought.driver
    aliases = {
        _join(m.point, posixpath.relpath(driver.path, m.root))
        for m in mounts
        if m.device == driver.device and f"{driver.path}/".startswith(f"{m.root.rstrip('/')}/")
    }
    for mount in mounts:
        if mount.type == "overlay":
            for layer in layers(mount.options):
                for path in {*sought.paths, *aliases}:
                    if f"{layer}/".startswith(f"{path}/"):
                        used |= _named(layer[len(path) + 1 :].partition("/")[0], sought.places)
        # mountinfo shows a deleted directory as PATH//deleted, which counts as under PATH here.
        root = f"{mount.root}/"
        for name, (device, path) in sought.places.items():
            if mount.device == device and root.startswith(f"{path}/"):
                used.add(name)
    return used


def _join(point: str, below: str) -> str:
    return posixpath.normpath(posixpath.join(point, below))


def _named(entry: str, places: dict[str, Location]) -> set[str]:
    if not re.fullmatch(r"[0-9A-Za-z.]+-[0-9a-f]{12}(\..+)?|\.tmp-.+", entry):
        return set(places)
    # The entry may have been renamed since: set aside as damaged, or by an interrupted removal.
    return {n for n in places if n == entry or n.startswith(f"{entry}.") or f"-{entry}" in n}
