"""Book claims on this node, track their use by containers, and end them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import structlog

from governor.admissions import Admissions
from governor.allocations import AllocationTable
from governor.claims import (
    MAX_SHOWN,
    NODE,
    Claim,
    ClaimShare,
    Use,
    check_claim,
    parse_claim,
    words,
)
from governor.container import Container
from governor.errors import OccupiedError, RefusedError, StateError
from governor.recover import FoundContainer
from governor.state import State
from oci_hook.request import refuse_beside

log = structlog.get_logger()


class Bookings:
    """The claims of one node, by uid."""

    def __init__(self, allocations: AllocationTable, state: State, admissions: Admissions) -> None:
        self._allocations, self._state, self._admissions = allocations, state, admissions
        self.claims: dict[str, Claim] = {}

    def restore(self, claim: Claim) -> None:
        """Add a claim that an earlier governor booked."""
        self.claims[claim.uid] = claim
        for uuid in self._allocations.claims.restore(claim):
            log.error("claim-without-gpu", claim=_claim_name(claim), uid=claim.uid, gpu=uuid)

    def recover(self, found: FoundContainer) -> list[tuple[Claim, ClaimShare]]:
        """Return the shares that a container uses.

        Claims that the state has lost are recovered from the container's directory.
        """
        for claim in found.claims:
            if claim.uid not in self.claims:
                self.restore(claim)
                self._state.note_claim(claim)
                log.warning("claim-recovered", claim=_claim_name(claim), uid=claim.uid)
        shares = []
        for uid, name in found.uses:
            claim = self.claims[uid]
            shares.append((claim, next(share for share in claim.shares if share.name == name)))
        return shares

    def names(self, uses: Sequence[Use]) -> list[str]:
        """Return the names of claims; for an unknown claim, its uid."""
        known = (self.claims.get(uid) or uid for uid, _ in uses)
        return sorted({one if isinstance(one, str) else _claim_name(one) for one in known})

    def find_shares(
        self, uses: Sequence[Use], request: dict[str, Any]
    ) -> list[tuple[Claim, ClaimShare]]:
        """Return the shares that a container may use; raise RefusedError if it may not use them."""
        shares = []
        for uid, name in uses:
            claim = self.claims.get(uid)
            if claim is None:
                raise RefusedError(
                    f"claim {uid} is not known to this node's governor",
                    hint="the node driver announces claims: see the log of tidegate-dra",
                )
            if claim.leaving:
                raise RefusedError(
                    f"{claim} was taken back, but its last container has not ended yet",
                    hint="wait until that container has ended",
                )
            share = next((one for one in claim.shares if one.name == name), None)
            if share is None:
                raise RefusedError(
                    f"{claim} has no share {name[:64]!r}; it has"
                    f" {', '.join(one.name for one in claim.shares)}",
                    hint="install the same version of the hook and the node driver",
                )
            namespace = request["identity"].get("namespace", claim.namespace)
            if claim.namespace not in (namespace, NODE):
                raise RefusedError(
                    f"{claim} is not in this container's namespace {namespace[:64]!r}",
                    hint="have the pod use a claim in its own namespace",
                )
            shares.append((claim, share))
        refuse_beside(request["annotations"], " and ".join(sorted({str(c) for c, _ in shares})))
        self._keep_apart(uses)
        return shares

    def _keep_apart(self, uses: Sequence[Use]) -> None:
        """Refuse a container if its shares overlap another container's but are not the same."""
        for container in list(self._admissions.containers.values()):
            both = set(container.uses) & set(uses)
            if not both:
                continue
            # A member's end may not have been noticed yet, because a pod's containers start in
            # quick succession.
            for member in list(container.members):
                if member.has_ended():
                    self._admissions.part(container, member, "ended")
            if container.key not in self._admissions.containers or set(container.uses) == set(uses):
                continue
            uid, name = min(both)
            raise RefusedError(
                f"share {name} of {self.claims[uid]} is in use by container"
                f" {container.identifier[:64]!r}, whose set of shares differs from this"
                " container's",
                hint="give containers of one claim either the same requests, or requests that no"
                " other container uses",
            )

    def claim(self, request: dict[str, Any]) -> dict[str, Any]:
        """Book a claim, and store it before the answer; booking it again is not an error."""
        claim = parse_claim(request)
        known = self.claims.get(claim.uid)
        check_claim(claim)
        try:
            self._book(claim, known)
        except OccupiedError as e:
            if not e.device:
                raise
            e.hint = self._occupants(e.device, claim.uid)
            if not e.hint:
                # The claim's own shares together exceed the GPU, so waiting does not help.
                raise RefusedError(e.message, hint="ask for less of that GPU") from e
            raise
        if known is None or not known.same(claim):
            log.info(
                "claim-booked" if known is None else "claim-changed",
                claim=_claim_name(claim),
                uid=claim.uid,
                shares=claim.describe()["shares"],
            )
        return {"ok": True, "uid": claim.uid, "shares": self._describe_shares(claim)}

    def _book(self, claim: Claim, known: Claim | None) -> None:
        """Add a claim, or replace the known one; on error, nothing changes."""
        if known is not None and known.same(claim):
            if known.leaving:
                # The node driver took the claim back too early, or lost its own state, and is now
                # announcing the claim again.
                claim = replace(claim, parkable=known.parkable)
                self._state.put_claim(claim)
                self.claims[claim.uid] = claim
            return
        if known is None:
            self._part_ended({share.device for share in claim.shares})
            claim = self._allocations.claims.admit(claim)
            try:
                self._state.put_claim(claim)
            except StateError:
                self._allocations.claims.leave(claim)
                raise
        else:
            user = self._user_of(claim.uid)
            if user is not None:
                raise OccupiedError(
                    f"{known} is used by container {user.identifier[:64]!r} with {known.amounts()},"
                    f" and cannot be changed to {claim.amounts()}",
                    hint="wait until that container has ended",
                )
            undo = self._allocations.claims.undo(known)
            claim = self._allocations.claims.change(known, claim)
            try:
                self._state.put_claim(claim)
            except StateError:
                self._allocations.claims.leave(claim)
                undo()
                raise
        self.claims[claim.uid] = claim

    def _part_ended(self, devices: set[str]) -> None:
        """Remove members on these GPUs that have ended unnoticed."""
        for container in list(self._admissions.containers.values()):
            if any(device.uuid in devices for device in container.devices):
                for member in list(container.members):
                    if member.has_ended():
                        self._admissions.part(container, member, "ended")

    def _occupants(self, uuid: str, but: str) -> str:
        """Return a hint that lists the users of a GPU other than claim `but`; empty if none."""
        ending, booked = [], []
        for claim in list(self.claims.values()):
            quotas = [share.quota for share in claim.shares if share.device == uuid]
            if claim.uid == but or not quotas:
                continue
            user = self._user_of(claim.uid)
            if claim.uid not in self.claims:
                continue  # its last container has ended
            amount = f"{claim} ({' and '.join(words(quota) for quota in quotas)})"
            container = "" if user is None else f"container {user.identifier[:64]!r}"
            if claim.leaving:
                ending.append(f"{amount}, taken back, becomes free when its {container} ends")
            else:
                used = f", used by {container}" if container else ""
                booked.append(f"{amount} holds a share of this GPU{used}")
        beside = [
            f"container {one.identifier[:64]!r} ({words(one.quota)}) was started without the"
            " cluster's scheduler"
            for one in self._admissions.containers.values()
            if not one.uses and any(device.uuid == uuid for device in one.devices)
        ]
        found = [*ending, *beside, *booked]
        if not found:
            return ""
        more = [f"{len(found) - MAX_SHOWN} more (tidegate ps)"] if len(found) > MAX_SHOWN else []
        return "wait: " + "; ".join([*found[:MAX_SHOWN], *more])

    def unclaim(self, uid: str) -> dict[str, Any]:
        """Withdraw a claim, at once or when its last container has ended."""
        user = self._user_of(uid)
        claim = self.claims.get(uid)
        if claim is None:
            return {"ok": True}
        if user is None:
            self._state.strike_claim(uid)
            del self.claims[uid]
            self._allocations.claims.leave(claim)
            log.info("claim-released", claim=_claim_name(claim), uid=uid)
        elif not claim.leaving:
            leaving = replace(claim, leaving=True)
            self._state.put_claim(leaving)
            self.claims[uid] = leaving
            log.info("claim-leaving", claim=_claim_name(claim), uid=uid, container=user.identifier)
        return {"ok": True}

    def _user_of(self, uid: str) -> Container | None:
        """Return a container that uses a share of a claim.

        Members that have ended unnoticed are removed first.
        """
        for container in list(self._admissions.containers.values()):
            if not any(uid == own for own, _ in container.uses):
                continue
            for member in list(container.members):
                if member.has_ended():
                    self._admissions.part(container, member, "ended")
            if container.key in self._admissions.containers:
                return container
        return None

    def strike(self, claim: Claim) -> None:
        """Forget a claim that was taken back, if no container uses it any more."""
        if any(uid == claim.uid for c in self._admissions.containers.values() for uid, _ in c.uses):
            return
        del self.claims[claim.uid]
        self._allocations.claims.leave(claim)
        self._state.leave_claim(claim.uid)
        log.info("claim-released", claim=_claim_name(claim), uid=claim.uid)

    def describe(self) -> list[dict[str, Any]]:
        """Return the claims as `tidegate claims` shows them."""
        return [
            {
                **claim.describe(),
                "leaving": claim.leaving,
                "shares": self._describe_shares(claim),
            }
            for claim in self.claims.values()
        ]

    def leave(self, uses: Sequence[Use]) -> None:
        """Handle the end of the last container with these shares."""
        for uid in {uid for uid, _ in uses}:
            claim = self.claims.get(uid)
            if claim is None:
                continue
            self._allocations.claims.release(claim, {name for own, name in uses if own == uid})
            if claim.leaving:
                self.strike(claim)

    def release_unused(self) -> None:
        """Count the shares that no running container uses as they were booked.

        This is called after a restart of the governor.
        """
        used = {use for one in self._admissions.containers.values() for use in one.uses}
        for claim in self.claims.values():
            names = {share.name for share in claim.shares if (claim.uid, share.name) not in used}
            self._allocations.claims.release(claim, names)

    def _describe_shares(self, claim: Claim) -> list[dict[str, Any]]:
        known = {device.uuid: device for device in self._allocations.devices}
        shares = []
        for one, share in zip(claim.describe()["shares"], claim.shares, strict=True):
            device = known.get(share.device)
            users = [
                c for c in self._admissions.containers.values() if (claim.uid, share.name) in c.uses
            ]
            used = [
                c.account.used(i)
                for c in users
                for i, own in enumerate(c.devices)
                if own.uuid == share.device
            ]
            shares.append(
                {
                    **one,
                    "uuid": share.device,
                    "index": device and device.index,
                    "minor": device and device.minor,
                    "memory_used": sum(used),
                    "containers": [m.identifier for c in users for m in c.members],
                }
            )
        return shares

    def claimants(self, uuid: str) -> int:
        """Return the number of containers that have a part of a GPU through claims."""
        return sum(
            len(container.members)
            for container in self._admissions.containers.values()
            if container.uses and any(device.uuid == uuid for device in container.devices)
        )


def _claim_name(claim: Claim) -> str:
    return f"{claim.namespace}/{claim.name}"
