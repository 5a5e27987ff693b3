"""The quotas that are granted on one GPU, of containers and of claims."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from governor.claims import Claim, ClaimShare
from governor.quota import Device, Quota

CLAIMED = "claim "
"""Prefix of the names of claims' shares in the table; a container's name there is its key."""


@dataclass
class GpuQuotas:
    """One GPU of the allocation table."""

    device: Device
    quotas: dict[str, Quota] = field(default_factory=dict)
    strategy: str = "timeslice"
    lost: str | None = None  # why it does not answer
    closed: str | None = None  # why it temporarily takes no container, although it answers

    @property
    def memory_used(self) -> int:
        """The memory of all quotas."""
        return sum(quota.memory for quota in self.quotas.values())

    @property
    def memory_fixed(self) -> int:
        """The memory of containers that may not be parked."""
        return sum(quota.memory for quota in self.quotas.values() if not quota.parking)

    @property
    def memory_parkable(self) -> tuple[int, int]:
        """The memory of containers that may be parked: that of the largest one, and of all."""
        sizes = self.parkable_by_unit().values()
        return max(sizes, default=0), sum(sizes)

    def parkable_by_unit(self) -> Counter[str]:
        """Return the memory of the containers and claims that may be parked, by name.

        A container may have all shares of its claim, so they have to fit together.
        """
        sizes: Counter[str] = Counter()
        for key, quota in self.quotas.items():
            if quota.parking:
                sizes[unit_of(key)] += quota.memory
        return sizes

    def may_park(self, quota: Quota) -> bool:
        """Return whether a container with this quota may be parked here.

        The memory of clients of an MPS server is in the server's contexts.
        """
        return quota.parking and self.strategy == "timeslice"

    @property
    def compute_used(self) -> int:
        """The guarantees of all quotas, in percent."""
        return sum(quota.compute for quota in self.quotas.values())


def share_key(claim: Claim, share: ClaimShare) -> str:
    """Return the name of a claim's share in the allocation table."""
    return f"{CLAIMED}{claim.uid} {share.name}"


def unit_of(key: str) -> str:
    """Return the name of what is parked together: a claim, with all its shares, or a container."""
    return " ".join(key.split(" ", 2)[:2]) if key.startswith(CLAIMED) else key


def share_quota(claim: Claim, share: ClaimShare, gpu: GpuQuotas) -> Quota:
    """Return the quota of a share, as it was booked."""
    quota = replace(share.quota, parking=claim.parkable)
    return replace(quota, parking=gpu.may_park(quota))
