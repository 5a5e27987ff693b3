"""Allocation table: which container has which part of which GPU.

It is pure: it uses no file, clock or driver. The sum of guaranteed shares never exceeds 100 %. The
sum of memory quotas never exceeds a GPU's memory less the reserve, times `memory.overbook`; and all
containers that may not be parked fit together with any single one of the others. `placement`
chooses the GPUs of a container, and `shortage` explains a refusal.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from governor.claims import Claim, ClaimShare, words
from governor.completion import check_count, check_memory, complete_quota, may_park
from governor.config import Config
from governor.errors import OccupiedError, RefusedError
from governor.gpu_quotas import CLAIMED, GpuQuotas, share_key, share_quota, unit_of
from governor.placement import GpuState, Nearness, place
from governor.quota import MIB, PARKABLE, Device, Quota, show_memory
from governor.shortage import Room, refuse_any, refuse_named
from oci_hook.request import Request
from vdriver.nvml import Topology


@dataclass(frozen=True)
class Nodes:
    """The device nodes of GPUs that a container has, by their minor numbers.

    The set is empty if the engine was not asked to create any, or if the machine has none. With
    `exact` the GPUs were chosen by name, so the container is to have each of them.
    """

    minors: frozenset[int] = frozenset()
    exact: bool = False

    def has(self, device: Device) -> bool:
        """Return whether the container has a GPU's node, as far as its nodes are known."""
        return not self.minors or device.minor is None or device.minor in self.minors

    def __str__(self) -> str:
        return ", ".join(f"/dev/nvidia{minor}" for minor in sorted(self.minors))


class AllocationTable:
    """The GPUs of the node, and the quotas granted on them.

    `left_out` are GPUs that NVML lists but that cannot be shared, by index, with the reason.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        config: Config,
        topology: Topology | None = None,
        left_out: Mapping[int, str] | None = None,
    ) -> None:
        self._config = config
        self._gpus = [
            GpuQuotas(device, strategy=config.strategy_of(device.index, device.uuid))
            for device in devices
        ]
        self._topology = topology or Topology()
        self._near = Nearness([device.uuid for device in devices], self._topology)
        self._left_out = dict(left_out or {})

    def configure(self, config: Config) -> None:
        """Use a new configuration for later admissions; the GPUs' strategies do not change."""
        self._config = config

    @property
    def devices(self) -> tuple[Device, ...]:
        """The GPUs in NVML's order."""
        return tuple(gpu.device for gpu in self._gpus)

    def admit(
        self,
        key: str,
        request: Request,
        nodes: Nodes | None = None,
        *,
        annotated: bool = True,
    ) -> tuple[Quota, tuple[Device, ...]]:
        """Add a container and return its quota and GPUs; on RefusedError, nothing changes.

        Named GPUs are returned in the order in which they were named, others in NVML's order. All
        of them are GPUs of which the container has device nodes, as far as these are known.
        `annotated` affects only the wording of a refusal.
        """
        nodes = nodes or Nodes()
        quota = complete_quota(request, self._config, annotated=annotated)
        reached = self._reached(nodes)
        if nodes.exact and nodes.minors and not request.devices and request.gpus is None:
            request = request._replace(devices=reached)
        count = len(request.devices) or request.gpus or 1
        check_count(count, request)
        quota = replace(quota, parking=may_park(request, self._config, count))
        if request.devices:
            chosen = self._named(request, nodes)
            self._check_strategy(chosen, request)
            self._check(chosen, quota)
        else:
            chosen = self._place(quota, count, request, nodes)
        quota = replace(quota, parking=chosen[0].may_park(quota))
        self._check_host(quota)
        for gpu in chosen:
            gpu.quotas[key] = quota
        return quota, tuple(gpu.device for gpu in chosen)

    def _reached(self, nodes: Nodes) -> tuple[str, ...]:
        """Return the shared GPUs of which a container has device nodes.

        Raise RefusedError if there are none.
        """
        if not self._gpus:
            reasons = "".join(
                f"; GPU {i} is not shared: {why}" for i, why in self._left_out.items()
            )
            raise RefusedError(
                f"this node has no GPU{reasons}", hint="run tidegate check on the node"
            )
        reached = tuple(gpu.device.uuid for gpu in self._gpus if nodes.has(gpu.device))
        if not reached:
            raise RefusedError(
                f"the container has {nodes}, which belongs to no GPU that this node shares",
                hint="tidegate check lists the GPUs that it shares",
            )
        return reached

    def _named(self, request: Request, nodes: Nodes) -> list[GpuQuotas]:
        """Return the GPUs that a request names.

        Raise RefusedError if the container cannot have them.
        """
        chosen = [self._find(name) for name in request.devices]
        if len({gpu.device.uuid for gpu in chosen}) != len(chosen):
            raise RefusedError(
                "annotation tidegate.gpu/devices names a GPU twice", hint="name each once"
            )
        for gpu in chosen:
            if not nodes.has(gpu.device):
                raise RefusedError(
                    f"annotation tidegate.gpu/devices names GPU {gpu.device.index}, whose node"
                    f" /dev/nvidia{gpu.device.minor} the container does not have",
                    hint="give it that node, or name a GPU that it has",
                )
        return chosen

    def restore(self, key: str, quota: Quota, uuids: tuple[str, ...]) -> tuple[Device, ...]:
        """Add a running container with the quota and the GPUs that it has.

        The room is not checked: the container may have more than a new one would get. Raise
        RefusedError, and change nothing, if a GPU is gone.
        """
        devices = self.named(uuids)
        for uuid in uuids:
            self._gpu(uuid).quotas[key] = quota
        return devices

    def named(self, uuids: Iterable[str]) -> tuple[Device, ...]:
        """Return GPUs by their UUIDs; raise RefusedError for one that the node no longer has."""
        known = {gpu.device.uuid: gpu.device for gpu in self._gpus}
        for uuid in uuids:
            if uuid not in known:
                raise RefusedError(
                    f"this node no longer has GPU {uuid}", hint="see the kernel log, or reboot"
                )
        return tuple(known[uuid] for uuid in uuids)

    def change(self, key: str, quota: Quota) -> None:
        """Give a container another quota on its GPUs; on RefusedError, nothing changes."""
        check_memory(quota.memory, self._config, "memory")
        if quota.compute_limit < quota.compute:
            raise RefusedError(
                f"the limit of {quota.compute_limit} % is below the guarantee of {quota.compute} %",
                hint="give both: --compute and --compute-limit",
            )
        own = [gpu for gpu in self._gpus if key in gpu.quotas]
        before = [gpu.quotas.pop(key) for gpu in own]
        try:
            self._check(own, quota)
            if any(gpu.may_park(quota) for gpu in own):
                self._check_host(quota)
        except RefusedError:
            for gpu, old in zip(own, before, strict=True):
                gpu.quotas[key] = old
            raise
        for gpu in own:
            gpu.quotas[key] = quota

    def leave(self, key: str) -> None:
        """Remove a container; one that is not in the allocation table is not an error."""
        for gpu in self._gpus:
            gpu.quotas.pop(key, None)

    def admit_claim(self, claim: Claim) -> Claim:
        """Add the shares of a claim, and return it as booked; on RefusedError, nothing changes."""
        booked = replace(claim, parkable=self._may_park_claim(claim))
        try:
            for share in booked.shares:
                self._admit_share(booked, share)
        except RefusedError:
            self.leave_claim(claim)
            raise
        return booked

    def _may_park_claim(self, claim: Claim) -> bool:
        """Return whether the memory of a claim's containers may be parked.

        A container may have all shares of its claim. If host memory is short, the claim is booked
        as one whose memory stays on the GPU.
        """
        return (
            self._config.memory.overbook > 1
            and all(share.parking == "allowed" for share in claim.shares)
            and len({share.device for share in claim.shares}) == 1
            and self._claimed(claim, claim.shares[0].device).strategy == "timeslice"
            and sum(share.quota.memory for share in claim.shares) <= self._host_left()
        )

    def _admit_share(self, claim: Claim, share: ClaimShare) -> None:
        gpu = self._claimed(claim, share.device)
        check_memory(share.quota.memory, self._config, f"{claim}: memory")
        if gpu.lost is not None:
            raise RefusedError(
                f"{claim} asks for {words(share.quota)} of GPU {gpu.device.index}, which does not"
                f" answer: {gpu.lost}",
                hint="see the kernel log",
            )
        if share.strategy not in ("auto", gpu.strategy):
            raise RefusedError(
                f"{claim} asks for {words(share.quota)} of GPU {gpu.device.index} by"
                f" {share.strategy}, but that GPU is shared by {gpu.strategy}",
                hint="leave strategy out, or configure the node to share that GPU in this way",
            )
        quota = share_quota(claim, share, gpu)
        room = self._room(gpu, quota, unit_of(share_key(claim, share)))
        if not room.holds(quota):
            short = f"{claim} asks for {room.short_of(quota)}"
            if quota.memory > room.whole:
                raise RefusedError(short, hint=f"ask for {room.whole // MIB}Mi of memory at most")
            # The server knows which claims and containers occupy the GPU.
            raise OccupiedError(short, hint="wait", device=share.device)
        gpu.quotas[share_key(claim, share)] = quota

    def use_shares(
        self,
        shares: Sequence[tuple[Claim, ClaimShare]],
        capabilities: Iterable[str],
    ) -> bool:
        """Return whether a container with these shares may be parked.

        If it may not although a claim may, its memory counts as memory that stays until its end.
        Raise RefusedError, and change nothing, if there is no room for that.
        """
        own = [(self._claimed(claim, share.device), claim, share) for claim, share in shares]
        before = [gpu.quotas[share_key(claim, share)] for gpu, claim, share in own]
        why = self._why_not_parked(own, sorted(set(capabilities) - PARKABLE))
        self.set_parking(shares, parking=not why)
        if not why:
            return True
        # A claim that was booked with room for memory that stays needs no more now.
        if not any(claim.parkable for claim, _ in shares) and not any(
            one.parking for one in before
        ):
            return False
        for gpu in {gpu.device.uuid: gpu for gpu, _, _ in own}.values():
            whole = gpu.device.memory - self._config.memory_reserve
            if gpu.memory_fixed + gpu.memory_parkable[0] <= whole:
                continue
            for (one, claim, share), quota in zip(own, before, strict=True):
                one.quotas[share_key(claim, share)] = quota
            raise RefusedError(
                f"the container's memory cannot be parked, because {why}, and GPU"
                f" {gpu.device.index} has no room for"
                f" {show_memory(sum(quota.memory for quota in before))} that stay there",
                hint="set parking: never in the parameters of the claim, so that it is not booked"
                " where there is no room",
            )
        return False

    def _why_not_parked(
        self, own: Sequence[tuple[GpuQuotas, Claim, ClaimShare]], others: Sequence[str]
    ) -> str:
        """Return why a container with these shares may not be parked, or an empty string."""
        if others:
            return f"it asks for the capability {', '.join(others)}"
        if len({claim.uid for _, claim, _ in own}) > 1:
            return "it has shares of several claims"
        if not all(share_quota(claim, share, gpu).parking for gpu, claim, share in own):
            return "its claim was booked so, or the GPU is shared by mps"
        staying = [
            gpu.quotas[share_key(claim, share)].memory
            for gpu, claim, share in own
            if not gpu.quotas[share_key(claim, share)].parking
        ]
        # With `staying` empty, it counts already.
        if staying and sum(staying) > self._host_left():
            return "no host memory is left for it"
        return ""

    def release_claim(self, claim: Claim, names: Collection[str]) -> None:
        """Count shares of a claim that no container uses as they were booked.

        If the host has no room for all of them, they go on to count as memory that stays.
        """
        known = {gpu.device.uuid: gpu for gpu in self._gpus}
        staying = [
            (known[share.device], share_key(claim, share), share)
            for share in claim.shares
            if share.name in names
            and share.device in known
            and share_key(claim, share) in known[share.device].quotas
            and not known[share.device].quotas[share_key(claim, share)].parking
        ]
        if sum(share.quota.memory for _, _, share in staying) <= self._host_left():
            for gpu, key, share in staying:
                gpu.quotas[key] = share_quota(claim, share, gpu)

    def set_parking(self, shares: Sequence[tuple[Claim, ClaimShare]], *, parking: bool) -> None:
        """Note whether the container that has these shares may be parked."""
        known = {gpu.device.uuid: gpu for gpu in self._gpus}
        for claim, share in shares:
            gpu, key = known.get(share.device), share_key(claim, share)
            if gpu is not None and key in gpu.quotas:
                gpu.quotas[key] = replace(gpu.quotas[key], parking=parking)

    def change_claim(self, old: Claim, new: Claim) -> Claim:
        """Replace a claim by another, and return it as booked; on RefusedError, nothing changes."""
        before = [
            (gpu, key, quota)
            for gpu in self._gpus
            for key, quota in gpu.quotas.items()
            if key in {share_key(old, share) for share in old.shares}
        ]
        self.leave_claim(old)
        try:
            return self.admit_claim(new)
        except RefusedError:
            for gpu, key, quota in before:
                gpu.quotas[key] = quota
            raise

    def restore_claim(self, claim: Claim) -> tuple[str, ...]:
        """Add a claim that was admitted before; return the UUIDs of its GPUs that are gone.

        Its memory counts as memory that stays, until it is known which containers run.
        """
        known = {gpu.device.uuid: gpu for gpu in self._gpus}
        for share in claim.shares:
            if share.device in known:
                gpu = known[share.device]
                gpu.quotas[share_key(claim, share)] = share.quota
        return tuple(share.device for share in claim.shares if share.device not in known)

    def leave_claim(self, claim: Claim) -> None:
        """Remove a claim; one that is not in the allocation table is not an error."""
        for share in claim.shares:
            self.leave(share_key(claim, share))

    def claimed(self, claim: Claim, uuids: Iterable[str]) -> tuple[Device, ...]:
        """Return GPUs of a claim, for a container that is about to use them, in NVML's order.

        Raise RefusedError if one does not answer or takes no container.
        """
        gpus = sorted(
            (self._claimed(claim, uuid) for uuid in uuids), key=lambda gpu: gpu.device.index
        )
        for gpu in gpus:
            why = gpu.lost or gpu.closed
            if why is not None:
                what = "takes no container now" if gpu.lost is None else "does not answer"
                raise RefusedError(
                    f"GPU {gpu.device.index} of {claim} {what}: {why}",
                    hint="see the governor's log and the kernel's",
                )
            if gpu.strategy == "mps" and len(gpus) > 1:
                raise RefusedError(
                    f"{claim} has {len(gpus)} GPUs, and GPU {gpu.device.index} is shared by mps:"
                    " a client of MPS can have only one",
                    hint="ask for one GPU, or for timeslice",
                )
        return tuple(gpu.device for gpu in gpus)

    def _claimed(self, claim: Claim, uuid: str) -> GpuQuotas:
        for gpu in self._gpus:
            if gpu.device.uuid == uuid:
                return gpu
        reasons = "".join(f"; GPU {i} is not shared: {why}" for i, why in self._left_out.items())
        amounts = [words(share.quota) for share in claim.shares if share.device == uuid]
        raise RefusedError(
            f"{claim} asks for {' and '.join(amounts)} of {uuid}, which this node does not have"
            f"{reasons}",
            hint="tidegate check lists its GPUs",
        )

    def set_lost(self, uuid: str, reason: str | None) -> None:
        """Stop granting parts of a GPU that does not answer, or resume (`reason` None).

        Existing allocations stay.
        """
        self._gpu(uuid).lost = reason

    def set_closed(self, uuid: str, reason: str | None) -> None:
        """Stop admitting containers to a GPU, or resume (`reason` None); existing ones stay."""
        self._gpu(uuid).closed = reason

    def _gpu(self, uuid: str) -> GpuQuotas:
        return next(gpu for gpu in self._gpus if gpu.device.uuid == uuid)

    def describe(self) -> dict[str, Any]:
        """Return the values that `tidegate check` shows about the GPUs: bytes, percent, routes."""
        return {
            "placement": self._config.placement,
            "context_memory": self._config.context_memory,
            "gpus": [self._describe(gpu) for gpu in self._gpus],
            "left_out": [
                {"index": index, "reason": reason}
                for index, reason in sorted(self._left_out.items())
            ],
        }

    def _describe(self, gpu: GpuQuotas) -> dict[str, Any]:
        any_quota = Quota(0, 0, 0, parking=self._config.memory.overbook > 1)
        room = self._room(gpu, any_quota)
        routes = []
        for other in self._gpus:
            route = self._topology.routes.get(frozenset((gpu.device.uuid, other.device.uuid)))
            if route is not None and other is not gpu:
                pcie = None if route.ancestor is None else route.ancestor.name
                routes.append({"to": other.device.index, "nvlinks": route.nvlinks, "pcie": pcie})
        return {
            "index": gpu.device.index,
            "uuid": gpu.device.uuid,
            "name": gpu.device.name,
            "memory": max(gpu.device.memory - self._config.memory_reserve, 0),
            "memory_offered": self._offered(gpu),
            "memory_left": room.memory,
            "memory_granted": gpu.memory_used,
            "compute_left": room.compute,
            "containers": sum(not key.startswith(CLAIMED) for key in gpu.quotas),
            "claims": sum(key.startswith(CLAIMED) for key in gpu.quotas),
            "strategy": gpu.strategy,
            "closed": gpu.closed,
            "numa_node": self._topology.nodes.get(gpu.device.uuid),
            "pci": self._topology.addresses.get(gpu.device.uuid),
            "lost": gpu.lost,
            "routes": routes,
        }

    def _find(self, name: str) -> GpuQuotas:
        for gpu in self._gpus:
            if name in (gpu.device.uuid, str(gpu.device.index)):
                return gpu
        for index, reason in self._left_out.items():
            if name == str(index):
                raise RefusedError(
                    f"annotation tidegate.gpu/devices names {name}, which cannot be shared: "
                    f"{reason}",
                    hint="name another, or restart tidegate-governor once that GPU answers",
                )
        known = ", ".join(f"{gpu.device.index} ({gpu.device.uuid})" for gpu in self._gpus)
        raise RefusedError(
            f"annotation tidegate.gpu/devices names {name}, but this node has {known}",
            hint="name one of those",
        )

    def _offered(self, gpu: GpuQuotas) -> int:
        """Return the bytes to which the memory quotas on a GPU may add up."""
        whole = gpu.device.memory - self._config.memory_reserve
        times = self._config.memory.overbook if gpu.strategy == "timeslice" else 1
        return max(min(int(whole * times), whole + self._config.memory.host_limit), 0)

    def _room(self, gpu: GpuQuotas, quota: Quota, unit: str = "") -> Room:
        """Return what a GPU has left for a container that may or may not be parked, as `quota`.

        `unit` names the claim to which the quota belongs.
        """
        whole = gpu.device.memory - self._config.memory_reserve
        left = self._offered(gpu) - gpu.memory_used
        sizes = gpu.parkable_by_unit()
        beside = sizes[unit] if gpu.may_park(quota) else max(sizes.values(), default=0)
        there = gpu.memory_fixed + beside
        return Room(
            gpu.device.index,
            max(min(left, whole - there), 0),
            max(100 - gpu.compute_used, 0),
            max(whole, 0),
        )

    def _takes(self, gpu: GpuQuotas, request: Request) -> bool:
        """Return whether a GPU is shared in a way that the container wants or can use."""
        if request.strategy != "auto":
            return gpu.strategy == request.strategy
        # A client of MPS uses one server, and each GPU has its own server.
        several = (len(request.devices) or request.gpus or 1) > 1
        return gpu.strategy == "timeslice" or not several

    def _check_strategy(self, gpus: Sequence[GpuQuotas], request: Request) -> None:
        """Refuse named GPUs that are shared by another strategy, or that take no container now."""
        for gpu in gpus:
            if not self._takes(gpu, request):
                asked = (
                    f"annotation tidegate.gpu/strategy is {request.strategy}"
                    if request.strategy != "auto"
                    else "a container can have only one GPU by that strategy"
                )
                raise RefusedError(
                    f"GPU {gpu.device.index} is shared by {gpu.strategy}, but {asked}",
                    hint=self._strategy_hint(request),
                )
            if gpu.closed is not None:
                raise RefusedError(
                    f"GPU {gpu.device.index} takes no container now: {gpu.closed}",
                    hint="name another, or see the governor's log",
                )

    def _strategy_hint(self, request: Request) -> str:
        wanted = "timeslice" if request.strategy == "auto" else request.strategy
        others = [str(g.device.index) for g in self._gpus if g.strategy == wanted]
        if not others:
            return "leave tidegate.gpu/strategy out, or ask for one GPU"
        return f"this node shares GPU {', '.join(others)} by {wanted}"

    def _host_left(self) -> int:
        """Return the bytes of host memory that are left for quotas that may be parked."""
        taken = sum(gpu.memory_parkable[1] for gpu in self._gpus)
        return max(self._config.memory.host_limit - taken, 0)

    def _check_host(self, quota: Quota) -> None:
        """Refuse a container whose memory would find no room in host memory when it is parked."""
        left = self._host_left()
        if quota.parking and quota.memory > left:
            raise RefusedError(
                f"the node keeps {self._config.memory.host_limit // MIB} MiB of host memory for"
                f" parked memory, of which {left // MIB} MiB are left, but"
                f" {-(-quota.memory // MIB)} MiB are needed",
                hint="raise memory.host in the node's configuration, or set tidegate.gpu/parking to"
                " never",
            )

    def _check(self, gpus: Sequence[GpuQuotas], quota: Quota) -> None:
        """Refuse a quota that does not fit on each of these GPUs."""
        for gpu in gpus:
            if gpu.lost is not None:
                raise RefusedError(
                    f"GPU {gpu.device.index} does not answer: {gpu.lost}",
                    hint="name another, or see the kernel log",
                )
        rooms = [self._room(gpu, quota) for gpu in gpus]
        if not all(room.holds(quota) for room in rooms):
            raise refuse_named(rooms, quota, self._config.context_memory)

    def _place(self, quota: Quota, count: int, request: Request, nodes: Nodes) -> list[GpuQuotas]:
        within = [gpu for gpu in self._gpus if nodes.has(gpu.device)]
        if nodes.minors and len(within) < count:
            raise RefusedError(
                f"annotation tidegate.gpu/count is {count}, but the container has only {nodes}",
                hint="give it more device nodes, or ask for fewer GPUs",
            )
        answering = [gpu for gpu in within if gpu.lost is None]
        if not answering:
            raise RefusedError(
                f"none of the {len(within)} GPUs answers: {within[0].lost}",
                hint="see the kernel log",
            )
        fitting = [gpu for gpu in answering if self._takes(gpu, request)]
        if not fitting:
            wanted = "timeslice" if request.strategy == "auto" else request.strategy
            raise RefusedError(
                f"no GPU that answers is shared by {wanted}, which this container needs",
                hint=self._strategy_hint(request),
            )
        taking = [gpu for gpu in fitting if gpu.closed is None]
        if not taking:
            raise RefusedError(
                f"GPU {fitting[0].device.index} takes no container now: {fitting[0].closed}",
                hint="try again, or see the governor's log",
            )
        rooms = {gpu.device.uuid: self._room(gpu, quota) for gpu in taking}
        if sum(room.holds(quota) for room in rooms.values()) < count:
            least = self._config.context_memory
            raise refuse_any(list(rooms.values()), quota, count, least)
        standings = [
            GpuState(
                fits=gpu.device.uuid in rooms and rooms[gpu.device.uuid].holds(quota),
                empty=gpu in within and gpu.lost is None and gpu.closed is None and not gpu.quotas,
                compute_used=min(gpu.compute_used, 100),
                memory_used=gpu.memory_used,
            )
            for gpu in self._gpus
        ]
        positions = place(self._config.placement, standings, count, self._near)
        return [self._gpus[i] for i in positions]
