"""The quotas of containers and claims that are granted on the node's GPUs, and what is left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from governor.claims import Claim, ClaimShare
from governor.config import Config
from governor.quota import Device, Quota
from governor.shortage import Room

CLAIMED = "claim "
"""Prefix of the names of claims' shares in the table; a container's name there is its key."""


@dataclass
class GpuQuotas:
    """One GPU in the allocation table."""

    device: Device
    quotas: dict[str, Quota] = field(default_factory=dict)
    strategy: str = "timeslice"
    lost: str | None = None  # why it does not answer
    closed: str | None = None  # why it temporarily accepts no containers, although it answers

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

        A container may have all shares of its claim, so all of them have to fit at the same time.
        """
        sizes: Counter[str] = Counter()
        for key, quota in self.quotas.items():
            if quota.parking:
                sizes[unit_of(key)] += quota.memory
        return sizes

    @property
    def supports_parking(self) -> bool:
        """Whether containers can be parked here.

        Clients of MPS cannot, because their memory is in the server's contexts.
        """
        return self.strategy == "timeslice"

    def may_park(self, quota: Quota) -> bool:
        """Return whether a container with this quota may be parked here."""
        return quota.parking and self.supports_parking

    @property
    def compute_used(self) -> int:
        """The guarantees of all quotas, in percent."""
        return sum(quota.compute for quota in self.quotas.values())


class NodeGpus:
    """The GPUs of the node in NVML's order, and what is left on each.

    `left_out` are GPUs that NVML lists but that cannot be shared, by index, with the reason.
    """

    def __init__(
        self, devices: Sequence[Device], config: Config, left_out: Mapping[int, str]
    ) -> None:
        self.config = config
        self.left_out = dict(left_out)
        self.by_uuid = {
            device.uuid: GpuQuotas(device, strategy=config.strategy_of(device.index, device.uuid))
            for device in devices
        }

    def __iter__(self) -> Iterator[GpuQuotas]:
        return iter(self.by_uuid.values())

    def __len__(self) -> int:
        return len(self.by_uuid)

    def __getitem__(self, index: int) -> GpuQuotas:
        return list(self.by_uuid.values())[index]

    def why_left_out(self) -> str:
        """Return text for the end of a message: why GPUs are not shared; empty if all are."""
        return "".join(f"; GPU {i} is not shared: {why}" for i, why in self.left_out.items())

    def whole(self, gpu: GpuQuotas) -> int:
        """Return the bytes of a GPU's memory that containers can use at the same time."""
        return max(gpu.device.memory - self.config.memory_reserve, 0)

    def offered(self, gpu: GpuQuotas) -> int:
        """Return the bytes to which the memory quotas on a GPU may add up."""
        whole = self.whole(gpu)
        times = self.config.memory.overbook if gpu.supports_parking else 1
        return min(int(whole * times), whole + self.config.memory.host_limit)

    def room(self, gpu: GpuQuotas, quota: Quota, unit: str = "") -> Room:
        """Return what a GPU has left for a container; its `quota` may or may not allow parking.

        `unit` names the claim to which the quota belongs.
        """
        whole = self.whole(gpu)
        left = self.offered(gpu) - gpu.memory_used
        sizes = gpu.parkable_by_unit()
        beside = sizes[unit] if gpu.may_park(quota) else max(sizes.values(), default=0)
        there = gpu.memory_fixed + beside
        return Room(
            gpu.device.index,
            max(min(left, whole - there), 0),
            max(100 - gpu.compute_used, 0),
            whole,
        )

    def host_left(self) -> int:
        """Return the bytes of host memory that are left for quotas that may be parked."""
        taken = sum(gpu.memory_parkable[1] for gpu in self)
        return max(self.config.memory.host_limit - taken, 0)


def share_key(claim: Claim, share: ClaimShare) -> str:
    """Return the name of a claim's share in the allocation table."""
    return f"{CLAIMED}{claim.uid} {share.name}"


def unit_of(key: str) -> str:
    """Return the name of what is parked together: a claim, with all its shares, or a container."""
    return " ".join(key.split(" ", 2)[:2]) if key.startswith(CLAIMED) else key


def share_quota(claim: Claim, share: ClaimShare, gpu: GpuQuotas) -> Quota:
    """Return the quota of a share, as it was booked."""
    return replace(share.quota, parking=claim.parkable and gpu.supports_parking)
