"""Reads and writes JSON with only the C part of `json`: the rest takes 7 ms to import (mostly re).

It accepts the same documents as `json` with the settings below, and returns the same results. A
document that is refused is parsed again by `json` itself, for an error that names the fault and its
position.
"""

from __future__ import annotations

TYPE_CHECKING = False  # importing typing takes 3 ms
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

    encode_basestring_ascii: Callable[[str], str]
    make_encoder: Callable[..., Callable[[object, int], tuple[str, ...]]] | None
    make_scanner: Callable[[object], Callable[[str, int], tuple[Any, int]]] | None
else:
    try:
        from _json import encode_basestring_ascii, make_encoder, make_scanner
    except ImportError:  # CPython can be built without _json; json then has only its Python code
        make_encoder = make_scanner = None

SPACE = " \t\n\r"  # whitespace in RFC 8259
# SystemError: before Python 3.12 the scanner fails without an exception if json is not imported.
REFUSED = (StopIteration, SystemError, ValueError, RecursionError)


def _number(text: str) -> int | float:
    """Return a number with a fraction or an exponent: 5.0 as an int; raise ValueError for 1e999."""
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"{text[:40]} is too large a number")
    return int(value) if value.is_integer() else value


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a number")


def _refuse_type(value: object) -> NoReturn:
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


class _ScannerSettings:
    """The settings of the scanner: the attributes of json.JSONDecoder that it reads."""

    strict = True
    object_hook = array_hook = None
    parse_int = int
    parse_float = staticmethod(_number)
    parse_constant = staticmethod(_refuse_constant)

    def __init__(self, pairs: Callable[[list[tuple[str, Any]]], Any] | None) -> None:
        self.object_pairs_hook = pairs


def load_json(data: bytes, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """Parse JSON according to its standard, without NaN; raise ValueError or RecursionError.

    For a document that is refused, `pairs` may be called twice with the same object.
    """
    text = data.decode()
    if make_scanner is not None:
        bare = text.strip(SPACE)
        try:
            value, end = make_scanner(_ScannerSettings(pairs))(bare, 0)
        except REFUSED:
            end = -1
        if end == len(bare):
            return value
    import json

    return json.loads(
        text, object_pairs_hook=pairs, parse_float=_number, parse_constant=_refuse_constant
    )


def dump_json(value: object) -> str:
    """Return a value as JSON in ASCII, like json.dumps."""
    if make_encoder is None:
        import json

        return json.dumps(value)
    markers: dict[int, object] = {}  # detects circular references
    encode = make_encoder(
        markers, _refuse_type, encode_basestring_ascii, None, ": ", ", ", False, False, True
    )
    return "".join(encode(value, 0))
