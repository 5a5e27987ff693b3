"""What texts consist of, by hand: re takes 5 ms to import, and 2 more to compile our questions."""

from __future__ import annotations

DIGITS = "0123456789"
HEX = "0123456789abcdef"
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


def consists_of(text: str, characters: str) -> bool:
    """Tell whether a text has these characters and no others; one at least."""
    return text != "" and not text.strip(characters)


def is_number(text: str, most: int) -> bool:
    """Tell whether a text is a whole number from 1 to `most`, written as people write it."""
    return (
        consists_of(text, DIGITS)
        and text[0] != "0"
        and len(text) <= len(str(most))
        and int(text) <= most
    )


def is_version(text: str) -> bool:
    """Tell whether a text is a version of two to four numbers."""
    numbers = text.split(".")
    return 2 <= len(numbers) <= 4 and all(consists_of(n, DIGITS) for n in numbers)


def is_path(text: str) -> bool:
    """Tell whether the kernel takes a text for a path: half a pair and NUL are none.

    As in what os.fsdecode gives, U+DC80 to U+DCFF stand for bytes that are no text.
    """
    try:
        text.encode(errors="surrogateescape")
    except UnicodeEncodeError:
        return False
    return "\0" not in text


def is_below(path: str) -> bool:
    """Tell whether a path stays below where it begins, and has no odd parts."""
    return is_path(path) and {"", ".", ".."}.isdisjoint(path.split("/"))
