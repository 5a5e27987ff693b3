"""Maps the device plugin's units, each a GiB of a GPU's memory, to claims.

The kubelet allocates units and never reports when they are free again. But a unit has only one
owner: when it is given to a container, the container that had it before has ended. Likewise, when a
new claim overlaps an old one, the old one's container has ended. The functions are pure.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from governor.claims import NODE
from governor.errors import RefusedError
from kube.claims import AllocatedClaim, AllocatedShare, Reference

GIB = 1 << 30
NAMESPACE = NODE
"""Namespace of the plugin's claims in the governor; no namespace in a cluster has that name."""
_UNIT = re.compile(r"([A-Za-z0-9-]{1,58})\.([0-9]{1,4})")
_SHARE = re.compile(r"units-([0-9a-f]{1,240})")


@dataclass(frozen=True)
class UnitPolicy:
    """How much of a GPU's time comes with its memory, in percent; None means in proportion."""

    compute: int | None = None
    compute_limit: int = 100
    strategy: str = "auto"

    def share(self, units: int, all_units: int) -> tuple[int, int]:
        """Return the guarantee and the cap, in percent, for `units` of a GPU's `all_units`.

        Proportional shares are rounded down to whole percent, so they never add up to more than
        100. The exception is the minimum guarantee of 1 %, if the proportion would be less: on a
        GPU with more than 100 units, the governor may refuse a container although units are left.
        """
        part = units * 100 // all_units if self.compute is None else self.compute
        part = min(max(part, 1), 100)
        return part, max(part, self.compute_limit)


@dataclass(frozen=True)
class Units:
    """A set of units of one GPU, as the bits of a number."""

    uuid: str
    bits: int

    @property
    def count(self) -> int:
        """Number of units, which is their size in GiB."""
        return self.bits.bit_count()

    @property
    def share_name(self) -> str:
        """Name of their share, from which a later plugin can read the units back."""
        return f"units-{self.bits:x}"

    @property
    def uid(self) -> str:
        """Uid of their claim: the same units always give the same uid."""
        digest = hashlib.sha256(f"{self.uuid} {self.bits:x}".encode()).hexdigest()
        return f"plugin-{digest[:32]}"

    def overlaps(self, other: Units) -> bool:
        """Return whether the two sets have a unit in common."""
        return self.uuid == other.uuid and bool(self.bits & other.bits)


def unit_names(gpu: Mapping[str, Any]) -> list[str]:
    """Return the names of a GPU's units; a remainder below one GiB is left out.

    `gpu` is from the governor's answer.
    """
    return [f"{gpu['uuid'][:58]}.{index}" for index in range(gpu["memory"] // GIB)]


def parse_units(names: Iterable[str], gpus: Sequence[Mapping[str, Any]]) -> Units:
    """Return the units that a container was given; raise RefusedError if they cannot be used."""
    known = {str(gpu["uuid"])[:58]: gpu for gpu in gpus}
    chosen: dict[str, int] = {}
    for name in names:
        match = _UNIT.fullmatch(name)
        gpu = known.get(match[1]) if match else None
        if match is None or gpu is None or int(match[2]) >= gpu["memory"] // GIB:
            raise RefusedError(
                f"the kubelet allocated unit {name[:64]!r}, which this node does not have",
                hint="recreate the pod; the node's GPUs have changed",
            )
        chosen[gpu["uuid"]] = chosen.get(gpu["uuid"], 0) | 1 << int(match[2])
    if len(chosen) == 1:
        uuid, bits = chosen.popitem()
        return Units(uuid, bits)
    if not chosen:
        raise RefusedError("the kubelet allocated no unit", hint="ask for 1 or more")
    numbers = {gpu["uuid"]: gpu["index"] for gpu in gpus}
    parts = ", ".join(f"{bits.bit_count()} GiB on GPU {numbers[u]}" for u, bits in chosen.items())
    total = sum(bits.bit_count() for bits in chosen.values())
    raise RefusedError(
        f"{total} GiB were requested, but no GPU has that much left: the kubelet allocated {parts}",
        hint="ask for less, wait until a pod has ended, or use DRA, which allocates per GPU",
    )


def prefer(available: Iterable[str], included: Iterable[str], size: int) -> list[str]:
    """Return the best units for a container: those of the fullest GPU with enough room."""
    included = list(included)
    left: dict[str, list[int]] = {}
    for name in {*available, *included}:
        match = _UNIT.fullmatch(name)
        if match:
            left.setdefault(match[1], []).append(int(match[2]))
    fixed = [match[1] for match in map(_UNIT.fullmatch, included) if match]
    # If the kubelet has already chosen some units, the others have to be on the same GPU.
    candidates = [
        (len(units), gpu)
        for gpu, units in left.items()
        if len(units) >= size and all(gpu == other for other in fixed)
    ]
    if not candidates:
        others = sorted(set(available) - set(included))
        return [*included, *others][:size]
    _, gpu = min(candidates)
    free = [f"{gpu}.{index}" for index in sorted(left[gpu])]
    return [*included, *(name for name in free if name not in included)][:size]


def make_claim(units: Units, gpu: Mapping[str, Any], policy: UnitPolicy) -> AllocatedClaim:
    """Return the claim for `units`, as the governor and CDI need it."""
    compute, limit = policy.share(units.count, gpu["memory"] // GIB)
    share = AllocatedShare(
        name=units.share_name,
        request=units.share_name,
        pool=NAMESPACE,
        device=units.uuid,
        uuid=units.uuid,
        memory=units.count * GIB,
        compute=compute,
        compute_limit=limit,
        strategy=policy.strategy,
    )
    return AllocatedClaim(Reference(NAMESPACE, f"units-{units.uid[7:15]}", units.uid), (share,))


def read_back(claims: Iterable[Mapping[str, Any]]) -> dict[str, tuple[Units, AllocatedClaim]]:
    """Return the plugin's claims among the governor's, by uid, with their units."""
    found = {}
    for one in claims:
        shares = list(one.get("shares") or [])
        match = _SHARE.fullmatch(str(shares[0]["name"])) if len(shares) == 1 else None
        if one.get("namespace") != NAMESPACE or match is None or one.get("leaving"):
            continue
        share = shares[0]
        units = Units(str(share["device"]), int(match[1], 16))
        claim = AllocatedClaim(
            Reference(NAMESPACE, str(one["name"]), str(one["uid"])),
            (
                AllocatedShare(
                    name=str(share["name"]),
                    request=str(share["name"]),
                    pool=NAMESPACE,
                    device=units.uuid,
                    uuid=units.uuid,
                    memory=int(share["memory"]),
                    compute=int(share["compute"]),
                    compute_limit=int(share["compute_limit"]),
                    strategy=str(share["strategy"]),
                ),
            ),
        )
        found[str(one["uid"])] = units, claim
    return found
