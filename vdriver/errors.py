"""The errors in a driver and its mirror, grouped by the action that an operator takes.

Every error is one line: the message states what was found, and the hint states what to do.
`code` is stable and has a row in docs/reference/errors.md; `status` is the exit status of
`tidegate`.
"""

from __future__ import annotations

from typing import ClassVar


def one_line(text: str) -> str:
    """Return untrusted text as one line, without characters that control a terminal."""
    return "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))


class OperatorError(Exception):
    """An error that an operator can act on, in one line."""

    code: ClassVar[str] = "internal"
    status: ClassVar[int] = 70  # EX_SOFTWARE

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return one_line(f"{self.message}; {self.hint}")


class VdriverError(OperatorError):
    """A fault in the driver or the mirror."""

    code = "vdriver"


class LibraryError(VdriverError):
    """A file is not a library that a loader would accept: it is foreign, truncated or malicious."""

    code = "library"
    status = 65  # EX_DATAERR


class DriverError(VdriverError):
    """The host's driver is absent, incomplete, ambiguous or does not match the kernel module."""

    code = "driver"
    status = 69  # EX_UNAVAILABLE


class MirrorError(VdriverError):
    """The mirror cannot be written or read."""

    code = "mirror"
    status = 72  # EX_OSFILE


class NvmlError(VdriverError):
    """NVML cannot be loaded, or returns an error."""

    code = "nvml"
    status = 69  # EX_UNAVAILABLE
