"""Complete a container's request with the node's defaults, and check it.

The functions are pure; `governor.allocations` decides whether there is room.
"""

from __future__ import annotations

from collections.abc import Iterable

from governor.config import Config
from governor.errors import RefusedError
from governor.quota import MIB, Quota, show_memory, unparkable
from libcontrol.layout import N_DEVICES
from oci_hook.request import Request


def check_memory(memory: int, config: Config, what: str) -> None:
    """Refuse memory that is too small for a process's context; `what` names it in the message."""
    if memory < config.context_memory:
        raise RefusedError(
            f"{what} is {show_memory(memory)}, but a process's context alone takes"
            f" {show_memory(config.context_memory)}",
            hint=f"ask for at least {-(-config.context_memory // MIB)}Mi",
        )


def complete_quota(request: Request, config: Config, *, annotated: bool = True) -> Quota:
    """Return the quota of a request, completed with this node's defaults.

    Raise RefusedError if that quota is not usable. `annotated` tells whether the container has
    annotations. If it has none, it was recognised only by a device of tidegate.gpu/shared, and the
    engine may have dropped the user's annotations.
    """
    memory = request.memory if request.memory is not None else config.defaults.memory
    if memory is None and not annotated:
        raise RefusedError(
            "the container has a device of tidegate.gpu/shared, but no annotation that says how"
            " much memory it may use",
            hint="add tidegate.gpu/memory (for example, 8Gi); if it is already there, the engine"
            " did not pass it to the hook, as happens with every containerd handler except tidegate"
            " (run tidegate setup containerd, then set runtimeClassName: tidegate); or set"
            " defaults.memory in the node's configuration",
        )
    if memory is None:
        raise RefusedError(
            "annotation tidegate.gpu/memory is missing",
            hint="add it (for example, 8Gi), or set defaults.memory in the node's configuration",
        )
    check_memory(memory, config, "annotation tidegate.gpu/memory")
    if request.strategy not in ("auto", *config.strategies):
        raise RefusedError(
            f"annotation tidegate.gpu/strategy is {request.strategy}, but this node offers"
            f" {' and '.join(config.strategies)}",
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
    return Quota(memory, compute, limit, request.work_class)


def may_park(config: Config, gpus: int, capabilities: Iterable[str] = (), *, allowed: bool) -> bool:
    """Return whether memory on this number of GPUs may be parked, where the GPU supports it.

    `allowed` tells whether the container or the claim allows it. The memory of a container with
    several GPUs would have to be moved on all of them at once.
    """
    return allowed and config.memory.overbook > 1 and gpus == 1 and not unparkable(capabilities)


def check_count(count: int, request: Request) -> None:
    """Refuse a number of GPUs that no container can have."""
    if count > N_DEVICES:
        raise RefusedError(
            f"{count} GPUs were requested, but a container may have at most {N_DEVICES}",
            hint=f"ask for {N_DEVICES} at most",
        )
    if request.strategy == "mps" and count > 1:
        raise RefusedError(
            f"annotation tidegate.gpu/strategy is mps and {count} GPUs were requested, but a"
            " client of MPS can have only one",
            hint="ask for one GPU, or for timeslice",
        )
