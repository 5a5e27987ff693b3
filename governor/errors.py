"""Exceptions of the governor and the command, classified as an operator would classify them.

Every error is one line: the message states what was found, the hint what to do. `code` is stable
and has a row in docs/reference/errors.md; `status` is the exit status of `tidegate`.
"""

from __future__ import annotations

from vdriver.errors import OperatorError


class TidegateError(OperatorError):
    """A fault in the node, its configuration or a request."""

    is_logged = False
    """Whether the error has its own event in the log, so that no refusal is logged for it."""


class ConfigError(TidegateError):
    """The configuration cannot be read or is invalid."""

    code = "config"
    status = 78  # EX_CONFIG


class RequestError(TidegateError):
    """A request to the governor is malformed."""

    code = "request"
    status = 65  # EX_DATAERR


class RefusedError(TidegateError):
    """The node cannot grant what a container asks for."""

    code = "refused"
    status = 77  # EX_NOPERM


class OccupiedError(RefusedError):
    """The GPU of a claim exists, but its share is still in use; a later attempt may succeed.

    `device` is the GPU's UUID.
    """

    code = "occupied"
    status = 75  # EX_TEMPFAIL

    def __init__(self, message: str, *, hint: str, device: str = "") -> None:
        super().__init__(message, hint=hint)
        self.device = device


class GovernorError(TidegateError):
    """The governor does not answer, or cannot start."""

    code = "governor"
    status = 75  # EX_TEMPFAIL


class StateError(TidegateError):
    """Persistent state cannot be written."""

    code = "database"
    status = 74  # EX_IOERR


class SetupError(TidegateError):
    """A container engine's configuration cannot be read or changed."""

    code = "setup"
    status = 73  # EX_CANTCREAT
