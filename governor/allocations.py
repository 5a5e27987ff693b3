"""Allocation table: which container has which part of which GPU.

It is pure: it uses no file, clock or driver. The sum of guaranteed shares never exceeds 100 %. The
sum of memory quotas never exceeds a GPU's memory less the reserve, times `memory.overbook`; and the
containers that may not be parked all fit alongside any single one that may. `placement` chooses
the GPUs for a container, and `shortage` explains a refusal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from governor.claim_shares import ClaimShares
from governor.completion import check_count, check_memory, complete_quota, may_park
from governor.config import Config
from governor.errors import RefusedError
from governor.gpu_quotas import CLAIMED, GpuQuotas, NodeGpus
from governor.placement import GpuState, Nearness, place
from governor.quota import MIB, Device, Quota
from governor.shortage import refuse_any, refuse_named
from oci_hook.request import Request
from vdriver.nvml import Topology


@dataclass(frozen=True)
class Nodes:
    """A container's device nodes of GPUs, by their minor numbers.

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
    """The GPUs of the node, and the quotas granted on them; `claims` holds the claims' quotas.

    `left_out` are GPUs that NVML lists but that cannot be shared, by index, with the reason.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        config: Config,
        topology: Topology | None = None,
        left_out: Mapping[int, str] | None = None,
    ) -> None:
        self._gpus = NodeGpus(devices, config, left_out or {})
        self.claims = ClaimShares(self._gpus)
        self._topology = topology or Topology()
        self._near = Nearness([device.uuid for device in devices], self._topology)

    def configure(self, config: Config) -> None:
        """Use a new configuration for later admissions; the GPUs' strategies do not change."""
        self._gpus.config = config

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

        Named GPUs are returned in the order in which they were named, others in NVML's order. The
        container has device nodes for all of them, as far as its nodes are known. `annotated`
        affects only the wording of a refusal.
        """
        nodes = nodes or Nodes()
        quota = complete_quota(request, self._gpus.config, annotated=annotated)
        reached = self._reached(nodes)
        if nodes.exact and nodes.minors and not request.devices and request.gpus is None:
            request = request._replace(devices=reached)
        count = len(request.devices) or request.gpus or 1
        check_count(count, request)
        allowed = request.parking == "allowed"
        parking = may_park(self._gpus.config, count, request.capabilities, allowed=allowed)
        quota = replace(quota, parking=parking)
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
        """Return the shared GPUs for which a container has device nodes.

        Raise RefusedError if there are none.
        """
        if not self._gpus:
            raise RefusedError(
                f"this node has no GPU{self._gpus.why_left_out()}",
                hint="run tidegate check on the node",
            )
        reached = tuple(gpu.device.uuid for gpu in self._gpus if nodes.has(gpu.device))
        if not reached:
            raise RefusedError(
                f"the container has {nodes}, but no GPU that this node shares",
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

        Whether there is room is not checked: the container may have more than a new one would get.
        Raise RefusedError, and change nothing, if a GPU is gone.
        """
        devices = self.named(uuids)
        for uuid in uuids:
            self._gpus.by_uuid[uuid].quotas[key] = quota
        return devices

    def named(self, uuids: Iterable[str]) -> tuple[Device, ...]:
        """Return GPUs by their UUIDs; raise RefusedError for one that the node no longer has."""
        uuids = tuple(uuids)
        for uuid in uuids:
            if uuid not in self._gpus.by_uuid:
                raise RefusedError(
                    f"this node no longer has GPU {uuid}", hint="see the kernel log, or reboot"
                )
        return tuple(self._gpus.by_uuid[uuid].device for uuid in uuids)

    def change(self, key: str, quota: Quota) -> None:
        """Give a container another quota on its GPUs; on RefusedError, nothing changes."""
        check_memory(quota.memory, self._gpus.config, "memory")
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

    def hold(self, key: str, quota: Quota) -> None:
        """Replace the quota of a container in the table, without checking the new one again."""
        for gpu in self._gpus:
            if key in gpu.quotas:
                gpu.quotas[key] = quota

    def leave(self, key: str) -> None:
        """Remove a container; an unknown key is not an error."""
        for gpu in self._gpus:
            gpu.quotas.pop(key, None)

    def set_lost(self, uuid: str, reason: str | None) -> None:
        """Stop granting parts of a GPU that does not answer, or resume (`reason` None).

        Existing allocations stay.
        """
        self._gpus.by_uuid[uuid].lost = reason

    def set_closed(self, uuid: str, reason: str | None) -> None:
        """Stop admitting containers to a GPU, or resume (`reason` None); existing ones stay."""
        self._gpus.by_uuid[uuid].closed = reason

    def describe(self) -> dict[str, Any]:
        """Return the values that `tidegate check` shows about the GPUs: bytes, percent, routes."""
        return {
            "placement": self._gpus.config.placement,
            "context_memory": self._gpus.config.context_memory,
            "gpus": [self._describe(gpu) for gpu in self._gpus],
            "left_out": [
                {"index": index, "reason": reason}
                for index, reason in sorted(self._gpus.left_out.items())
            ],
        }

    def _describe(self, gpu: GpuQuotas) -> dict[str, Any]:
        any_quota = Quota(0, 0, 0, parking=self._gpus.config.memory.overbook > 1)
        room = self._gpus.room(gpu, any_quota)
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
            "memory": self._gpus.whole(gpu),
            "memory_offered": self._gpus.offered(gpu),
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
        for index, reason in self._gpus.left_out.items():
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

    def _takes(self, gpu: GpuQuotas, request: Request) -> bool:
        """Return whether a GPU is shared in a way that the container wants or can use."""
        if request.strategy != "auto":
            return gpu.strategy == request.strategy
        # A client of MPS uses one server, and each GPU has its own server.
        several = (len(request.devices) or request.gpus or 1) > 1
        return gpu.strategy == "timeslice" or not several

    def _check_strategy(self, gpus: Sequence[GpuQuotas], request: Request) -> None:
        """Refuse named GPUs that use another strategy, or accept no container now."""
        for gpu in gpus:
            if not self._takes(gpu, request):
                asked = (
                    f"annotation tidegate.gpu/strategy is {request.strategy}"
                    if request.strategy != "auto"
                    else "a container can have only one GPU under that strategy"
                )
                raise RefusedError(
                    f"GPU {gpu.device.index} uses strategy {gpu.strategy}, but {asked}",
                    hint=self._strategy_hint(request),
                )
            if gpu.closed is not None:
                raise RefusedError(
                    f"GPU {gpu.device.index} accepts no containers at present: {gpu.closed}",
                    hint="name another, or see the governor's log",
                )

    def _strategy_hint(self, request: Request) -> str:
        wanted = "timeslice" if request.strategy == "auto" else request.strategy
        others = [str(g.device.index) for g in self._gpus if g.strategy == wanted]
        if not others:
            return "leave tidegate.gpu/strategy out, or ask for one GPU"
        plural = "s" if len(others) > 1 else ""
        return f"this node uses {wanted} on GPU{plural} {', '.join(others)}"

    def _check_host(self, quota: Quota) -> None:
        """Refuse a container whose memory would not fit into host memory when it is parked."""
        left = self._gpus.host_left()
        if quota.parking and quota.memory > left:
            limit = self._gpus.config.memory.host_limit
            raise RefusedError(
                f"the node keeps {limit // MIB} MiB of host memory for parked memory, of which"
                f" {left // MIB} MiB are left, but {-(-quota.memory // MIB)} MiB are needed",
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
        rooms = [self._gpus.room(gpu, quota) for gpu in gpus]
        if not all(room.holds(quota) for room in rooms):
            raise refuse_named(rooms, quota, self._gpus.config.context_memory)

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
                f"no GPU that answers uses strategy {wanted}, which this container needs",
                hint=self._strategy_hint(request),
            )
        taking = [gpu for gpu in fitting if gpu.closed is None]
        if not taking:
            raise RefusedError(
                f"GPU {fitting[0].device.index} accepts no containers at present:"
                f" {fitting[0].closed}",
                hint="try again, or see the governor's log",
            )
        rooms = {gpu.device.uuid: self._gpus.room(gpu, quota) for gpu in taking}
        if sum(room.holds(quota) for room in rooms.values()) < count:
            least = self._gpus.config.context_memory
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
        positions = place(self._gpus.config.placement, standings, count, self._near)
        return [self._gpus[i] for i in positions]
