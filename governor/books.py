"""Admission: who has how much of which GPU. Pure: no file, no clock, no driver.

The sum of memory quotas never passes a GPU's memory less the reserve, the sum of guaranteed shares
never passes 100 %. A refusal names the resource that is short and by how much.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from governor.config import Config
from governor.errors import RefusedError
from oci_hook.request import Request

MIB = 1 << 20


@dataclass(frozen=True)
class Quota:
    """What one container may use of each of its GPUs: bytes, percent."""

    memory: int
    compute: int
    compute_limit: int


@dataclass(frozen=True)
class Device:
    """One GPU of the node."""

    index: int
    uuid: str
    name: str
    memory: int


@dataclass
class _Gpu:
    device: Device
    quotas: dict[str, Quota] = field(default_factory=dict)

    @property
    def memory_used(self) -> int:
        return sum(quota.memory for quota in self.quotas.values())

    @property
    def compute_used(self) -> int:
        return sum(quota.compute for quota in self.quotas.values())


def check_memory(memory: int, config: Config, what: str) -> None:
    """Refuse memory in which no process could make a context; `what` names it to the reader."""
    if memory < config.context_memory:
        raise RefusedError(
            f"{what} is {memory} bytes, a process's context alone takes {config.context_memory}",
            hint=f"ask for at least {-(-config.context_memory // MIB)}Mi",
        )


def complete_quota(request: Request, config: Config) -> Quota:
    """Return the quota that a request means on this node, or refuse what can never work."""
    memory = request.memory if request.memory is not None else config.defaults.memory
    if memory is None:
        raise RefusedError(
            "annotation tidegate.gpu/memory is missing",
            hint="add it (like 8Gi), or set defaults.memory in the node's configuration",
        )
    check_memory(memory, config, "annotation tidegate.gpu/memory")
    if request.strategy not in ("auto", "timeslice"):
        raise RefusedError(
            f"annotation tidegate.gpu/strategy is {request.strategy}, this node offers timeslice",
            hint="leave it out, or write auto",
        )
    if request.compute is not None:
        compute = request.compute
        limit = request.compute_limit if request.compute_limit is not None else compute
    else:
        limit = (
            request.compute_limit
            if request.compute_limit is not None
            else config.defaults.compute_limit
        )
        compute = min(config.defaults.compute, limit)
    return Quota(memory, compute, limit)


class Books:
    """The GPUs of the node and what is granted of them."""

    def __init__(self, devices: list[Device], config: Config) -> None:
        self._config = config
        self._gpus = [_Gpu(device) for device in devices]

    @property
    def devices(self) -> tuple[Device, ...]:
        """The GPUs in NVML's order."""
        return tuple(gpu.device for gpu in self._gpus)

    def admit(self, key: str, request: Request) -> tuple[Quota, tuple[Device, ...]]:
        """Enter a container and return its quota and GPUs; RefusedError changes nothing."""
        quota = complete_quota(request, self._config)
        if not self._gpus:
            raise RefusedError("this node has no GPU", hint="run tidegate check on the node")
        if request.devices:
            chosen = [self._find(name) for name in request.devices]
            if len({gpu.device.uuid for gpu in chosen}) != len(chosen):
                raise RefusedError(
                    "annotation tidegate.gpu/devices names a GPU twice", hint="name each once"
                )
            for gpu in chosen:
                self._check(gpu, quota)
        else:
            chosen = self._place(quota, request.gpus or 1)
        for gpu in chosen:
            gpu.quotas[key] = quota
        return quota, tuple(gpu.device for gpu in chosen)

    def change(self, key: str, quota: Quota) -> None:
        """Give a container another quota on the GPUs that it has; RefusedError changes nothing."""
        check_memory(quota.memory, self._config, "memory")
        if quota.compute_limit < quota.compute:
            raise RefusedError(
                f"the limit of {quota.compute_limit} % is below the guarantee of {quota.compute} %",
                hint="give both: --compute and --compute-limit",
            )
        own = [gpu for gpu in self._gpus if key in gpu.quotas]
        before = [gpu.quotas.pop(key) for gpu in own]
        try:
            for gpu in own:
                self._check(gpu, quota)
        except RefusedError:
            for gpu, old in zip(own, before, strict=True):
                gpu.quotas[key] = old
            raise
        for gpu in own:
            gpu.quotas[key] = quota

    def leave(self, key: str) -> None:
        """Strike a container out; one that is not in the books is no error."""
        for gpu in self._gpus:
            gpu.quotas.pop(key, None)

    def _find(self, name: str) -> _Gpu:
        for gpu in self._gpus:
            if name in (gpu.device.uuid, str(gpu.device.index)):
                return gpu
        known = ", ".join(f"{gpu.device.index} ({gpu.device.uuid})" for gpu in self._gpus)
        raise RefusedError(
            f"annotation tidegate.gpu/devices names {name}, this node has {known}",
            hint="name one of those",
        )

    def _shortage(self, gpu: _Gpu, quota: Quota) -> str | None:
        memory = gpu.device.memory - self._config.memory_reserve - gpu.memory_used
        if quota.memory > memory:
            return (
                f"GPU {gpu.device.index} has {max(memory, 0) // MIB} MiB of memory left to grant, "
                f"{-(-quota.memory // MIB)} MiB were asked for"
            )
        compute = 100 - gpu.compute_used
        if quota.compute > compute:
            return (
                f"GPU {gpu.device.index} has {compute} % of its time left to guarantee, "
                f"{quota.compute} % were asked for"
            )
        return None

    def _check(self, gpu: _Gpu, quota: Quota) -> None:
        shortage = self._shortage(gpu, quota)
        if shortage:
            raise RefusedError(shortage, hint="ask for less, or wait until a container ends")

    def _place(self, quota: Quota, count: int) -> list[_Gpu]:
        fitting = [gpu for gpu in self._gpus if self._shortage(gpu, quota) is None]
        if len(fitting) < count:
            reasons = "; ".join(
                reason for gpu in self._gpus if (reason := self._shortage(gpu, quota)) is not None
            )
            raise RefusedError(
                f"{count} of {len(self._gpus)} GPUs were asked for, {len(fitting)} have room"
                + (f": {reasons}" if reasons else ""),
                hint="ask for less, or wait until a container ends",
            )
        spread = self._config.placement == "spread"
        fitting.sort(
            key=lambda gpu: (
                (gpu.compute_used, gpu.memory_used)
                if spread
                else (-gpu.compute_used, -gpu.memory_used)
            )
        )
        return fitting[:count]
