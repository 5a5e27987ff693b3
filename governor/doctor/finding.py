"""The type of a check's findings: text, severity, and remedy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """Severity of a finding, in ascending order."""

    OK = "ok"
    NOTE = "note"  # neither right nor wrong, for instance an engine that is not used
    UNSEEN = "unseen"  # it could not be examined, so nothing is known about it
    WARNING = "warning"  # containers start, but something else suffers, or will
    WRONG = "wrong"  # containers do not start or run ungoverned, or another user could become root


@dataclass(frozen=True)
class Finding:
    """One line for an operator; `remedy` is a command, or an instruction if there is none."""

    state: Severity
    found: str
    remedy: str | None = None


class UnseenError(Exception):
    """Something cannot be examined; the message gives the reason."""

    def __init__(self, message: str, *, remedy: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy


def ok(found: str) -> Finding:
    """Report that something is right."""
    return Finding(Severity.OK, found)


def note(found: str, remedy: str | None = None) -> Finding:
    """Report something that is neither right nor wrong."""
    return Finding(Severity.NOTE, found, remedy)


def unseen(found: str, remedy: str | None = None) -> Finding:
    """Report what could not be examined, and why."""
    return Finding(Severity.UNSEEN, found, remedy)


def warning(found: str, remedy: str) -> Finding:
    """Report a fault that does not stop any container."""
    return Finding(Severity.WARNING, found, remedy)


def wrong(found: str, remedy: str) -> Finding:
    """Report a fault that stops containers, leaves them ungoverned, or lets a user become root."""
    return Finding(Severity.WRONG, found, remedy)


def listed(names: Sequence[str]) -> str:
    """Return names as text, such as `a, b and c`."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def name_gpus(indices: Sequence[object]) -> str:
    """Return GPUs as text, such as `GPU 0`, or `GPUs 0, 1 and 2`."""
    return f"GPU{'s' * (len(indices) > 1)} {listed([str(index) for index in indices])}"
