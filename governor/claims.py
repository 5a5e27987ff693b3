"""Claims: shares of GPUs that a cluster's scheduler gave to a pod, announced by the node driver.

A claim is booked from its announcement until it is taken back, whether or not a container uses it.
Containers that use the same shares, one after another or at the same time, share one quota. This
module is pure: it uses no file, clock or driver.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from governor.errors import RefusedError, RequestError
from governor.quota import LATENCY, MIB, THROUGHPUT, Quota
from libcontrol.layout import N_DEVICES

NODE = "node.tidegate.gpu"
"""Namespace of claims that are not objects of the cluster: they represent units that the kubelet
gave to pods of any namespace. It contains a dot, which the name of a real namespace cannot."""

MAX_SHOWN = 4
"""Maximum number of a claim's shares that are shown in one line."""
EQUAL = "a container must have the same quota on each of its GPUs"


@dataclass(frozen=True)
class ClaimShare:
    """A part of one GPU, by its UUID."""

    name: str
    device: str
    quota: Quota
    strategy: str = "auto"
    parking: str = "allowed"

    @property
    def request(self) -> str:
        """The claim's request for which the share was allocated: `gpu` of `gpu/0`."""
        return self.name.rpartition("/")[0] or self.name


@dataclass(frozen=True)
class Claim:
    """A claim with its shares, sorted by name; `leaving` once it has been taken back."""

    uid: str
    namespace: str
    name: str
    shares: tuple[ClaimShare, ...]
    leaving: bool = False
    parkable: bool = False
    """Whether it was booked as one whose containers may be parked."""

    def __str__(self) -> str:
        return f"claim {self.namespace}/{self.name}"

    def amounts(self) -> str:
        """Return the claim's amounts by GPU as text; if it has many shares, only the first few."""
        shown = [f"{words(share.quota)} of {share.device}" for share in self.shares[:MAX_SHOWN]]
        if len(self.shares) > MAX_SHOWN:
            shown.append(f"{len(self.shares) - MAX_SHOWN} more shares")
        return ", ".join(shown)

    def describe(self) -> dict[str, Any]:
        """Return the claim in the form that `parse_claim` accepts."""
        return {
            "uid": self.uid,
            "namespace": self.namespace,
            "name": self.name,
            **({"parkable": True} if self.parkable else {}),
            "shares": [
                {
                    "name": share.name,
                    "device": share.device,
                    "memory": share.quota.memory,
                    "compute": share.quota.compute,
                    "compute_limit": share.quota.compute_limit,
                    "strategy": share.strategy,
                    **({"class": LATENCY} if share.quota.is_latency else {}),
                    **({"parking": share.parking} if share.parking != "allowed" else {}),
                }
                for share in self.shares
            ],
        }

    def same(self, other: Claim) -> bool:
        """Return whether two claims are equal, apart from `leaving` and `parkable`."""
        return replace(self, leaving=False, parkable=False) == replace(
            other, leaving=False, parkable=False
        )


def parse_claim(document: Mapping[str, Any], *, leaving: bool = False) -> Claim:
    """Return the claim in a request that conforms to the schema.

    The order of its shares does not matter. Raise RequestError if it is not a valid claim.
    """
    shares = [
        ClaimShare(
            one["name"],
            one["device"],
            Quota(
                one["memory"],
                one["compute"],
                one.get("compute_limit", one["compute"]),
                one.get("class", THROUGHPUT),
            ),
            one.get("strategy", "auto"),
            one.get("parking", "allowed"),
        )
        for one in document["shares"]
    ]
    shares.sort(key=lambda share: share.name)
    claim = Claim(
        document["uid"],
        document["namespace"],
        document["name"],
        tuple(shares),
        leaving,
        parkable=document.get("parkable", False),
    )
    names = [share.name for share in shares]
    if len(set(names)) != len(names):
        raise RequestError(
            f"{claim} has two shares with the same name", hint="give each share a different name"
        )
    for share in shares:
        if share.quota.compute_limit < share.quota.compute:
            raise RequestError(
                f"{claim}, share {share.name}: the limit of {share.quota.compute_limit} % is below"
                f" the guarantee of {share.quota.compute} %",
                hint="raise the limit or lower the guarantee",
            )
    return claim


def check_claim(claim: Claim) -> None:
    """Refuse a claim that no container could use: a container gets all shares of a request."""
    for request in dict.fromkeys(share.request for share in claim.shares):
        merge([(claim, share) for share in claim.shares if share.request == request])


def merge(shares: Sequence[tuple[Claim, ClaimShare]]) -> dict[str, Quota]:
    """Return the quota on each GPU, by its UUID, of a container that has these shares.

    Several shares of one GPU are added up; the sum is of class latency if each of them is. Raise
    RefusedError if the GPUs' quotas are not equal.
    """
    quotas: dict[str, Quota] = {}
    for _, share in shares:
        before = quotas.get(share.device, Quota(0, 0, 0, share.quota.work_class))
        is_latency = before.is_latency and share.quota.is_latency
        quotas[share.device] = Quota(
            before.memory + share.quota.memory,
            before.compute + share.quota.compute,
            min(100, before.compute_limit + share.quota.compute_limit),
            LATENCY if is_latency else THROUGHPUT,
        )
    if len(quotas) > N_DEVICES:
        raise RefusedError(
            f"{_name(shares)} has {len(quotas)} GPUs, but a container may have at most {N_DEVICES}",
            hint=f"ask for {N_DEVICES} at most",
        )
    if len(set(quotas.values())) > 1:
        found = ", ".join(f"{words(quota)} of {uuid}" for uuid, quota in quotas.items())
        raise RefusedError(
            f"{_name(shares)} has {found}: {EQUAL}",
            hint="ask for the same amounts, each on a different GPU (distinctAttribute), or give"
            " each container one request",
        )
    if len(quotas) > 1 and any(share.strategy == "mps" for _, share in shares):
        raise RefusedError(
            f"{_name(shares)} has {len(quotas)} GPUs that use strategy mps, but a client of MPS"
            " can have only one",
            hint="ask for one GPU, or for timeslice",
        )
    return quotas


def _name(shares: Iterable[tuple[Claim, ClaimShare]]) -> str:
    return " with ".join(dict.fromkeys(str(claim) for claim, _ in shares))


def words(quota: Quota) -> str:
    """Return a quota as text."""
    limit = "" if quota.compute_limit == quota.compute else f" (at most {quota.compute_limit} %)"
    at_once = ", class latency" if quota.is_latency else ""
    return f"{quota.memory // MIB} MiB and {quota.compute} %{limit}{at_once}"


Use = tuple[str, str]
"""A share that a container uses: its claim's uid, and its name."""


def uses_key(uses: Iterable[Use]) -> str:
    """Return the name of the directory of the containers that use these shares.

    No container's id yields the same name, because no id contains a NUL.
    """
    text = "\0".join(("claims", *sorted(f"{uid}/{name}" for uid, name in uses)))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
