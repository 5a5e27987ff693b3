"""Findings of a check: what was found, how bad it is, and how to fix it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """How bad a finding is, in ascending order."""

    OK = "ok"
    NOTE = "note"  # neither right nor wrong, for instance an engine that is not used
    UNSEEN = "unseen"  # it could not be examined, so nothing is known about it
    WARNING = "warning"  # containers start, but something else suffers, or will
    WRONG = "wrong"  # containers do not start or run ungoverned, or another user could become root


@dataclass(frozen=True)
class Finding:
    """One line for an operator; `remedy` is a command, or a step if no command does it."""

    state: Severity
    found: str
    remedy: str | None = None


class UnseenError(Exception):
    """Something cannot be examined; the message says what and why."""

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
    """Report what is wrong but does not stop any container."""
    return Finding(Severity.WARNING, found, remedy)


def wrong(found: str, remedy: str) -> Finding:
    """Report what stops containers, leaves them ungoverned, or lets another user become root."""
    return Finding(Severity.WRONG, found, remedy)
