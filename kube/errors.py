"""Errors of the DRA driver and the device plugin: one line each, as in governor/errors.py."""

from __future__ import annotations

from typing import ClassVar

from governor.errors import TidegateError


class ClaimError(TidegateError):
    """The driver cannot serve a ResourceClaim, because of its content or its parameters."""

    code = "claim"
    status = 65  # EX_DATAERR


class ClusterError(TidegateError):
    """The API server does not answer, or rejects a request.

    `http` is the status of its answer, 0 if there was none.
    """

    code = "cluster"
    status = 75  # EX_TEMPFAIL

    def __init__(self, message: str, *, hint: str, http: int = 0) -> None:
        super().__init__(message, hint=hint)
        self.http = http


class GateError(TidegateError):
    """The cluster cannot share devices: its API server drops the fields that sharing needs."""

    code: ClassVar[str] = "gate"
    status: ClassVar[int] = 78  # EX_CONFIG


class CdiError(TidegateError):
    """A CDI specification cannot be written or removed."""

    code = "cdi"
    status = 73  # EX_CANTCREAT


class SocketError(TidegateError):
    """The kubelet's directory cannot be used, or another driver is using it."""

    code = "socket"
    status = 73
