"""Translates an allocated ResourceClaim into a request to the governor.

The scheduler has chosen the GPU, the bytes of memory and the percentage of time. Its decision is in
the claim's status, which a tenant cannot write. The functions are pure.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from governor.cdi import CLAIM_KIND, claim_device
from kube.errors import ClaimError
from kube.names import COMPUTE, DRIVER, MEMORY
from kube.parameters import of_request
from kube.quantity import MIB, whole

_UID = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,63}")
_LABEL = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
_REQUEST = re.compile(rf"{_LABEL.pattern}(?:/{_LABEL.pattern})?")
MAX_SHARES = 32
"""Maximum number of results in an allocation."""


@dataclass(frozen=True)
class Reference:
    """The namespace, name and uid of a claim, as the kubelet passes them."""

    namespace: str
    name: str
    uid: str

    def __str__(self) -> str:
        return f"claim {self.namespace}/{self.name}"

    def check(self) -> None:
        """Refuse an invalid uid, because the uid becomes part of a file name."""
        if not _UID.fullmatch(self.uid):
            raise ClaimError(
                f"{self} has the uid {self.uid[:80]!r}, which is not valid",
                hint="see the kubelet's log",
            )


@dataclass(frozen=True)
class AllocatedShare:
    """One result of the allocation; memory is in bytes, compute in percent."""

    name: str
    request: str
    pool: str
    device: str
    uuid: str
    memory: int
    compute: int
    compute_limit: int
    strategy: str
    work_class: str = "throughput"
    parking: str = "allowed"
    share_id: str | None = None
    """The scheduler's identifier of this part of the device."""

    @property
    def base_request(self) -> str:
        """The request as a container names it: `gpu` for the alternative `gpu/h100`."""
        return self.request.partition("/")[0]

    def cdi_name(self, uid: str) -> str:
        """Return the name of the share's CDI device."""
        return claim_device(uid, self.name)

    def cdi_id(self, uid: str) -> str:
        """Return the fully qualified name of the share's CDI device, as engines accept it."""
        return f"{CLAIM_KIND}={self.cdi_name(uid)}"


@dataclass(frozen=True)
class AllocatedClaim:
    """An allocated claim, with only the shares of this driver."""

    reference: Reference
    shares: tuple[AllocatedShare, ...]

    def describe(self) -> dict[str, Any]:
        """Return the request that announces the claim to the governor."""
        return {
            "uid": self.reference.uid,
            "namespace": self.reference.namespace,
            "name": self.reference.name,
            "shares": [
                {
                    "name": share.name,
                    "device": share.uuid,
                    "memory": share.memory,
                    "compute": share.compute,
                    "compute_limit": share.compute_limit,
                    "strategy": share.strategy,
                    # Older governors support neither classes nor parking.
                    **({"class": share.work_class} if share.work_class == "latency" else {}),
                    **({"parking": share.parking} if share.parking == "never" else {}),
                }
                for share in self.shares
            ],
        }


def read_claim(
    document: Mapping[str, Any], reference: Reference, pool: str, devices: Mapping[str, str]
) -> AllocatedClaim:
    """Return the part of a ResourceClaim for this node; raise ClaimError if it cannot be served.

    `pool` is this node's pool, and `devices` maps the names of its devices to the GPUs' UUIDs.
    """
    reference.check()
    try:
        return _read_claim(document, reference, pool, devices)
    except (AttributeError, KeyError, TypeError) as e:
        raise ClaimError(
            f"{reference} does not have the form of resource.k8s.io/v1: {e!r}"[:300],
            hint="this driver does not support the version of the API server",
        ) from e


def _read_claim(
    document: Mapping[str, Any], reference: Reference, pool: str, devices: Mapping[str, str]
) -> AllocatedClaim:
    uid = (document.get("metadata") or {}).get("uid")
    if uid != reference.uid:
        raise ClaimError(
            f"{reference} has the uid {uid}, but the kubelet is preparing {reference.uid}",
            hint="the claim was deleted and created again; recreate the pod as well",
        )
    allocation = (document.get("status") or {}).get("allocation")
    if not allocation:
        raise ClaimError(
            f"{reference} is not allocated", hint="wait for the scheduler, or see the pod's events"
        )
    chosen = allocation.get("devices") or {}
    results = [one for one in chosen.get("results") or () if one.get("driver") == DRIVER]
    if not results:
        raise ClaimError(
            f"{reference} has no device of {DRIVER}", hint="use one of Tidegate's device classes"
        )
    if len(results) > MAX_SHARES:
        raise ClaimError(
            f"{reference} has {len(results)} devices", hint=f"ask for {MAX_SHARES} at most"
        )
    config = chosen.get("config") or ()
    counts: Counter[str] = Counter()
    shares = []
    for result in results:
        request = str(result.get("request"))
        if not _REQUEST.fullmatch(request):
            raise ClaimError(
                f"{reference} has a result for the request {request[:130]!r}, which is not a valid"
                " name",
                hint="name requests as DNS labels",
            )
        # The order of the results never changes, so a name always refers to the same share.
        name = f"{request}/{counts[request]}"
        counts[request] += 1
        shares.append(_share(result, reference, name, pool=pool, devices=devices, config=config))
    return AllocatedClaim(reference, tuple(shares))


def _require_device(
    result: Mapping[str, Any], reference: Reference, pool: str, devices: Mapping[str, str]
) -> None:
    """Raise ClaimError if the allocated device is not a share of a GPU of this node."""
    request, device = str(result["request"]), str(result.get("device"))
    if result.get("pool") != pool:
        raise ClaimError(
            f"{reference}, request {request}: {_given(result)}device {device} was allocated"
            f" from the pool {result.get('pool')}, but this node's pool is {pool}",
            hint="the pod is not on its claim's node; recreate the pod",
        )
    if device not in devices:
        raise ClaimError(
            f"{reference}, request {request}: {_given(result)}device {device} was requested, but"
            " this node does not have it",
            hint="the GPU is gone or is no longer shared (tidegate check on the node);"
            " recreate the pod",
        )
    if result.get("adminAccess"):
        raise ClaimError(
            f"{reference}, request {request}: {_given(result)}device {device} was requested with"
            " administrative access",
            hint="ask for a share: no GPU is given outside the quotas",
        )


def _share(
    result: Mapping[str, Any],
    reference: Reference,
    name: str,
    *,
    pool: str,
    devices: Mapping[str, str],
    config: Sequence[Mapping[str, Any]],
) -> AllocatedShare:
    request, device = str(result["request"]), str(result.get("device"))
    _require_device(result, reference, pool, devices)
    consumed = result.get("consumedCapacity")
    if not consumed:
        raise ClaimError(
            f"{reference}, request {request}: device {device} was allocated without"
            f" {MEMORY} and {COMPUTE}",
            hint="the feature gate DRAConsumableCapacity has to be on in the API server, scheduler"
            " and kubelet; a claim that was created while it was off has lost its capacities, so"
            " recreate the claim, its template and the pod",
        )
    memory = _amount(consumed, MEMORY, f"{reference}, request {request}")
    compute = _amount(consumed, COMPUTE, f"{reference}, request {request}")
    if not 1 <= compute <= 100:
        raise ClaimError(
            f"{reference}, request {request}: {COMPUTE} is {compute} %",
            hint="ask for 1 to 100",
        )
    if memory < MIB:
        raise ClaimError(
            f"{reference}, request {request}: {MEMORY} is {memory} bytes",
            hint="ask for a whole number of Mi",
        )
    parameters = of_request(config, request, str(reference))
    limit = compute if parameters.compute_limit is None else parameters.compute_limit
    # Without a computeLimit, `strict: false` means 100 %, so only a computeLimit can be too small.
    if limit < compute:
        raise ClaimError(
            f"{reference}, request {request}: computeLimit is {limit} %,"
            f" but {COMPUTE} is {compute} %",
            hint=f"write {compute} or more, or strict: true",
        )
    return AllocatedShare(
        name=name,
        request=request,
        pool=pool,
        device=device,
        uuid=devices[device],
        memory=memory,
        compute=compute,
        compute_limit=limit,
        strategy=parameters.strategy,
        work_class=parameters.work_class,
        parking=parameters.parking,
        share_id=str(result["shareID"]) if result.get("shareID") else None,
    )


def _given(result: Mapping[str, Any]) -> str:
    """Return, as text, the capacities that the scheduler gave; empty if the result has none."""
    consumed = result.get("consumedCapacity") or {}
    capacities = {
        name: str(value)[:32]
        for name in (MEMORY, COMPUTE)
        if (value := consumed.get(name, consumed.get(f"{DRIVER}/{name}"))) is not None
    }
    if not capacities:
        return ""
    return ", ".join(f"{name} {value}" for name, value in capacities.items()) + " of "


def _amount(consumed: Mapping[str, Any], capacity: str, where: str) -> int:
    value = consumed.get(capacity, consumed.get(f"{DRIVER}/{capacity}"))
    if value is None:
        raise ClaimError(
            f"{where}: consumedCapacity has no {capacity}",
            hint="the claim was allocated from another version's ResourceSlice; recreate the pod",
        )
    try:
        number = whole(value)
    except ValueError as e:
        raise ClaimError(f"{where}: {capacity}: {e}", hint="ask for a whole number") from e
    if not 0 <= number < 1 << 50:
        raise ClaimError(f"{where}: {capacity} is {number}", hint="ask for no more than a GPU has")
    return number
