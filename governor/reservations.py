"""Reserve GPUs for a container from the edit of its config.json until its admission."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from typing import Any

import structlog

from governor.allocations import AllocationTable
from governor.errors import RefusedError
from governor.quota import Device
from governor.requests import nodes_of
from oci_hook.request import Request, check_request, parse_annotations

log = structlog.get_logger()

RESERVED_S = 30.0
"""Time for which GPUs stay reserved for a container that does not start, in seconds."""
MAX_RESERVED = 1024


class Reservations:
    """The reservations of one node, by token."""

    def __init__(self, allocations: AllocationTable) -> None:
        self._allocations = allocations
        self._reserved: dict[str, tuple[tuple[Device, ...], asyncio.TimerHandle]] = {}

    def reserve(self, request: dict[str, Any]) -> dict[str, Any]:
        """Reserve GPUs for a container before their device nodes are added to its config.json."""
        parsed = parse_annotations(request["annotations"])
        check_request(parsed, request["annotations"])
        self._strike(request.get("replaces", ""))
        if len(self._reserved) >= MAX_RESERVED:
            raise RefusedError(
                f"{MAX_RESERVED} reservations are waiting for their containers",
                hint=f"try again in {RESERVED_S:g} s",
            )
        token = secrets.token_hex(16)
        quota, devices = self._allocations.admit(_reservation(token), parsed, nodes_of(request))
        expiry = asyncio.get_running_loop().call_later(RESERVED_S, self._expire, token)
        self._reserved[token] = (devices, expiry)
        return {
            "ok": True,
            "reservation": token,
            "expires_s": RESERVED_S,
            "devices": describe_devices(devices),
            **quota.describe(),
        }

    def _strike(self, token: str) -> tuple[Device, ...]:
        """Remove a reservation; an unknown or expired one is not an error."""
        devices, expiry = self._reserved.pop(token, ((), None))
        if expiry is not None:
            expiry.cancel()
            self._allocations.leave(_reservation(token))
        return devices

    def _expire(self, token: str) -> None:
        log.warning("reservation-expired", devices=[d.index for d in self._strike(token)])

    def redeem(self, request: dict[str, Any], parsed: Request) -> Request:
        """Return the request of a container with the GPUs that were reserved for it.

        If the reservation is gone, the request is unchanged: the container's device nodes still
        restrict it to the same GPUs.
        """
        devices = self._strike(request.get("reservation", ""))
        if not devices:
            return parsed
        return parsed._replace(devices=tuple(device.uuid for device in devices), gpus=None)


def _reservation(token: str) -> str:
    """Return a reservation's name in the allocation table; no container's key can equal it."""
    return f"reservation {token}"


def describe_devices(devices: Sequence[Device]) -> list[dict[str, Any]]:
    """Return GPUs in the form that is used in answers."""
    return [{"uuid": d.uuid, "index": d.index, "minor": d.minor} for d in devices]
