"""Parses Kubernetes quantities exactly: `8Gi`, `30`, `1500m`, `2e9`; the functions are pure."""

from __future__ import annotations

import re
from fractions import Fraction

MIB = 1 << 20

_FORM = re.compile(r"([+-]?)([0-9]{1,30}(?:\.[0-9]{0,30})?|\.[0-9]{1,30})(\D.*)?", re.DOTALL)
_EXPONENT = re.compile(r"[eE]([+-]?[0-9]{1,2})")
_SUFFIXES = {
    "n": Fraction(1, 10**9),
    "u": Fraction(1, 10**6),
    "m": Fraction(1, 10**3),
    "": Fraction(1),
    **{suffix: Fraction(10 ** (3 * i)) for i, suffix in enumerate("kMGTPE", 1)},
    **{f"{suffix}i": Fraction(1 << (10 * i)) for i, suffix in enumerate("KMGTPE", 1)},
}


def parse_quantity(value: str | int) -> Fraction:
    """Return the value of a quantity; raise ValueError if it is not one."""
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError(f"{value!r} is not a quantity")  # noqa: TRY004 - one error for all
    match = _FORM.fullmatch(str(value))
    if match is None:
        raise ValueError(f"{value!r} is not a quantity")
    sign, digits, suffix = match[1], match[2], match[3] or ""
    exponent = _EXPONENT.fullmatch(suffix)
    if exponent:
        factor = Fraction(10) ** int(exponent[1])
    elif suffix in _SUFFIXES:
        factor = _SUFFIXES[suffix]
    else:
        raise ValueError(f"{value!r} is not a quantity")
    number = Fraction(f"0{digits}" if digits.startswith(".") else digits.rstrip("."))
    return (-number if sign == "-" else number) * factor


def whole(value: str | int) -> int:
    """Return the value of a quantity that is a whole number; raise ValueError if it is not."""
    number = parse_quantity(value)
    if number.denominator != 1:
        raise ValueError(f"{value!r} is not a whole number")
    return int(number)


def show_bytes(number: int) -> str:
    """Return a number of bytes as a quantity, in Mi if it is a whole number of MiB."""
    return f"{number // MIB}Mi" if number % MIB == 0 and number else str(number)
