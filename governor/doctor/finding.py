"""What a check says: what was found, whether that is right, and what mends it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """How right a thing is, the worst last."""

    OK = "ok"
    NOTE = "note"  # neither right nor wrong: an engine that is not used, say
    UNSEEN = "unseen"  # nobody could look, so nothing is said of it
    WARNING = "warning"  # containers start; something else suffers, or will
    WRONG = "wrong"  # containers do not start, go ungoverned, or others could become root by it


@dataclass(frozen=True)
class Finding:
    """One line for an operator; `remedy` is a command, or a step where no command does it."""

    state: State
    found: str
    remedy: str | None = None


class UnseenError(Exception):
    """Something cannot be looked at; the message says what and why."""

    def __init__(self, message: str, *, remedy: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy


def ok(found: str) -> Finding:
    """Say that something is right."""
    return Finding(State.OK, found)


def note(found: str, remedy: str | None = None) -> Finding:
    """Say something that is neither right nor wrong."""
    return Finding(State.NOTE, found, remedy)


def unseen(found: str, remedy: str | None = None) -> Finding:
    """Say what could not be looked at, and why."""
    return Finding(State.UNSEEN, found, remedy)


def warning(found: str, remedy: str) -> Finding:
    """Say what is wrong and stops no container."""
    return Finding(State.WARNING, found, remedy)


def wrong(found: str, remedy: str) -> Finding:
    """Say what stops containers, leaves them ungoverned, or hands the node to others."""
    return Finding(State.WRONG, found, remedy)
