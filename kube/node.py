"""Sends requests about GPUs, claims and containers to the socket of the node's governor."""

from __future__ import annotations

from typing import Any

from governor.client import ask
from governor.config import Config


class NodeClient:
    """The driver's requests to the governor, which raise the errors of `governor.client.ask`."""

    def __init__(self, runtime_dir: str, timeout: float = 10.0) -> None:
        self._config = Config(runtime_dir=runtime_dir)
        self._timeout = timeout

    def gpus(self) -> dict[str, Any]:
        """Return the GPUs that are shared, with the unallocated part of each."""
        return self._ask("gpus")

    def containers(self) -> list[dict[str, Any]]:
        """Return the containers, with their violations."""
        return list(self._ask("list")["containers"])

    def claim(self, claim: dict[str, Any]) -> list[dict[str, Any]]:
        """Announce a claim; return its shares, each with the GPU's index and device node.

        Announcing it again changes nothing.
        """
        return list(self._ask("claim", **claim)["shares"])

    def unclaim(self, uid: str) -> None:
        """Withdraw a claim; an unknown one is not an error."""
        self._ask("unclaim", uid=uid)

    def claims(self) -> list[dict[str, Any]]:
        """Return the announced claims."""
        return list(self._ask("claims")["claims"])

    def _ask(self, op: str, **fields: object) -> dict[str, Any]:
        return ask(self._config, op, self._timeout, **fields)
