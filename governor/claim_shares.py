"""The shares of claims in the allocation table.

A claim's memory counts as memory that may be parked, or as memory that stays on the GPU. The choice
is made when the claim is booked, and again when a container uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from governor.claims import Claim, ClaimShare, words
from governor.completion import check_memory, may_park
from governor.errors import OccupiedError, RefusedError
from governor.gpu_quotas import GpuQuotas, NodeGpus, share_key, share_quota, unit_of
from governor.quota import MIB, Device, Quota, show_memory, unparkable


@dataclass(frozen=True)
class _Entry:
    """A share in the table of its GPU."""

    gpu: GpuQuotas
    claim: Claim
    share: ClaimShare

    @property
    def quota(self) -> Quota:
        """The quota that is granted now."""
        return self.gpu.quotas[share_key(self.claim, self.share)]

    @property
    def booked(self) -> Quota:
        """The quota as it was booked."""
        return share_quota(self.claim, self.share, self.gpu)

    def grant(self, quota: Quota) -> None:
        """Replace the quota."""
        self.gpu.quotas[share_key(self.claim, self.share)] = quota


class ClaimShares:
    """The shares of the claims that are booked on the node's GPUs."""

    def __init__(self, gpus: NodeGpus) -> None:
        self._gpus = gpus

    def admit(self, claim: Claim) -> Claim:
        """Add the shares of a claim, and return it as booked; on RefusedError, nothing changes."""
        booked = replace(claim, parkable=self._may_park(claim))
        try:
            for share in booked.shares:
                self._admit_share(booked, share)
        except RefusedError:
            self.leave(claim)
            raise
        return booked

    def change(self, old: Claim, new: Claim) -> Claim:
        """Replace a claim with another; return it as booked. On RefusedError, nothing changes."""
        undo = self.undo(old)
        self.leave(old)
        try:
            return self.admit(new)
        except RefusedError:
            undo()
            raise

    def undo(self, claim: Claim) -> Callable[[], None]:
        """Return a function that books a removed claim again, exactly as it is booked now.

        `restore` and `release` depend on the host memory that is left, which may have changed.
        """
        before = [(entry, entry.quota) for entry in self._entries(_shares_of(claim))]

        def book() -> None:
            for entry, quota in before:
                entry.grant(quota)

        return book

    def restore(self, claim: Claim) -> tuple[str, ...]:
        """Add a claim that was admitted before; return the UUIDs of its GPUs that are gone.

        Its memory counts as memory that stays, until it is known which containers are running.
        """
        for share in claim.shares:
            gpu = self._gpus.by_uuid.get(share.device)
            if gpu is not None:
                _Entry(gpu, claim, share).grant(share.quota)
        return tuple(
            share.device for share in claim.shares if share.device not in self._gpus.by_uuid
        )

    def leave(self, claim: Claim) -> None:
        """Remove a claim; one that is not in the table is not an error."""
        for entry in self._entries(_shares_of(claim)):
            del entry.gpu.quotas[share_key(claim, entry.share)]

    def devices(self, claim: Claim, uuids: Iterable[str]) -> tuple[Device, ...]:
        """Return GPUs of a claim, for a container that is about to use them, in NVML's order.

        Raise RefusedError if one does not answer or accepts no containers.
        """
        gpus = sorted((self._find(claim, uuid) for uuid in uuids), key=lambda gpu: gpu.device.index)
        for gpu in gpus:
            why = gpu.lost or gpu.closed
            if why is not None:
                what = "accepts no containers at present" if gpu.lost is None else "does not answer"
                raise RefusedError(
                    f"GPU {gpu.device.index} of {claim} {what}: {why}",
                    hint="see the governor's log and the kernel's",
                )
            if gpu.strategy == "mps" and len(gpus) > 1:
                raise RefusedError(
                    f"{claim} has {len(gpus)} GPUs, and GPU {gpu.device.index} uses strategy"
                    " mps: a client of MPS can have only one",
                    hint="ask for one GPU, or for timeslice",
                )
        return tuple(gpu.device for gpu in gpus)

    def use(self, shares: Sequence[tuple[Claim, ClaimShare]], capabilities: Iterable[str]) -> bool:
        """Return whether a container with these shares may be parked.

        If its claim may be parked but the container may not, its memory counts as memory that stays
        on the GPU until the container ends. Raise RefusedError, and change nothing, if there is no
        room.
        """
        own = [_Entry(self._find(claim, share.device), claim, share) for claim, share in shares]
        before = [entry.quota for entry in own]
        why = self._why_not_parked(own, unparkable(capabilities))
        self.set_parking(shares, parking=not why)
        if not why:
            return True
        # A claim that was booked as one whose memory stays already has room for it.
        parkable = any(entry.claim.parkable for entry in own)
        full = self._full([entry.gpu for entry in own])
        if full is None or not (parkable or any(quota.parking for quota in before)):
            return False
        for entry, quota in zip(own, before, strict=True):
            entry.grant(quota)
        raise RefusedError(
            f"the container's memory cannot be parked, because {why}, and GPU {full.device.index}"
            f" has no room for {show_memory(sum(quota.memory for quota in before))} that must stay"
            " there",
            hint="set parking: never in the parameters of the claim, so that it is not booked where"
            " there is no room",
        )

    def release(self, claim: Claim, names: Collection[str]) -> None:
        """Count a claim's shares `names`, which no container uses, as they were booked.

        If the host has no room for all of them, they continue to count as memory that stays.
        """
        staying = [
            entry
            for entry in self._entries(_shares_of(claim))
            if entry.share.name in names and not entry.quota.parking
        ]
        if sum(entry.quota.memory for entry in staying) <= self._gpus.host_left():
            for entry in staying:
                entry.grant(entry.booked)

    def set_parking(self, shares: Sequence[tuple[Claim, ClaimShare]], *, parking: bool) -> None:
        """Note whether the container that has these shares may be parked."""
        for entry in self._entries(shares):
            entry.grant(replace(entry.quota, parking=parking))

    def _entries(self, shares: Iterable[tuple[Claim, ClaimShare]]) -> list[_Entry]:
        """Return those of the shares that are in the table."""
        entries = []
        for claim, share in shares:
            gpu = self._gpus.by_uuid.get(share.device)
            if gpu is not None and share_key(claim, share) in gpu.quotas:
                entries.append(_Entry(gpu, claim, share))
        return entries

    def _find(self, claim: Claim, uuid: str) -> GpuQuotas:
        gpu = self._gpus.by_uuid.get(uuid)
        if gpu is not None:
            return gpu
        amounts = [words(share.quota) for share in claim.shares if share.device == uuid]
        raise RefusedError(
            f"{claim} asks for {' and '.join(amounts)} of {uuid}, which this node does not have"
            f"{self._gpus.why_left_out()}",
            hint="tidegate check lists its GPUs",
        )

    def _may_park(self, claim: Claim) -> bool:
        """Return whether the memory of a claim's containers may be parked.

        A container may have all shares of its claim. If host memory is short, the claim is booked
        as one whose memory stays on the GPU.
        """
        allowed = all(share.parking == "allowed" for share in claim.shares)
        gpus = len({share.device for share in claim.shares})
        return (
            may_park(self._gpus.config, gpus, allowed=allowed)
            and self._find(claim, claim.shares[0].device).supports_parking
            and sum(share.quota.memory for share in claim.shares) <= self._gpus.host_left()
        )

    def _admit_share(self, claim: Claim, share: ClaimShare) -> None:
        gpu = self._find(claim, share.device)
        check_memory(share.quota.memory, self._gpus.config, f"{claim}: memory")
        if gpu.lost is not None:
            raise RefusedError(
                f"{claim} asks for {words(share.quota)} of GPU {gpu.device.index}, which does not"
                f" answer: {gpu.lost}",
                hint="see the kernel log",
            )
        if share.strategy not in ("auto", gpu.strategy):
            raise RefusedError(
                f"{claim} asks for {words(share.quota)} of GPU {gpu.device.index} with"
                f" strategy {share.strategy}, but that GPU uses {gpu.strategy}",
                hint="leave strategy out, or configure the node to share that GPU in this way",
            )
        quota = share_quota(claim, share, gpu)
        room = self._gpus.room(gpu, quota, unit_of(share_key(claim, share)))
        if not room.holds(quota):
            short = f"{claim} asks for {room.short_of(quota)}"
            if quota.memory > room.whole:
                raise RefusedError(short, hint=f"ask for {room.whole // MIB}Mi of memory at most")
            # The server knows which claims and containers occupy the GPU.
            raise OccupiedError(short, hint="wait", device=share.device)
        _Entry(gpu, claim, share).grant(quota)

    def _why_not_parked(self, own: Sequence[_Entry], others: Sequence[str]) -> str:
        """Return why a container with these shares may not be parked, or an empty string.

        `others` are the capabilities that do not allow it.
        """
        if others:
            return f"it asks for the capability {', '.join(others)}"
        if len({entry.claim.uid for entry in own}) > 1:
            return "it has shares of several claims"
        if not all(entry.claim.parkable for entry in own):
            return "its claim was booked as one whose memory stays on the GPU"
        for entry in own:
            if not entry.gpu.supports_parking:
                return f"GPU {entry.gpu.device.index} now uses strategy {entry.gpu.strategy}"
        # Room in host memory has already been set aside for memory that may be parked.
        staying = [entry.quota.memory for entry in own if not entry.quota.parking]
        if staying and sum(staying) > self._gpus.host_left():
            return "no host memory is left for it"
        return ""

    def _full(self, gpus: Iterable[GpuQuotas]) -> GpuQuotas | None:
        """Return the first GPU whose fixed memory leaves no room for its largest parkable quota."""
        for gpu in gpus:
            if gpu.memory_fixed + gpu.memory_parkable[0] > self._gpus.whole(gpu):
                return gpu
        return None


def _shares_of(claim: Claim) -> list[tuple[Claim, ClaimShare]]:
    return [(claim, share) for share in claim.shares]
