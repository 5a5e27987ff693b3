"""Turns the governor's findings about GPUs into health and device taints.

A taint keeps new pods away but evicts none: a finding can be wrong, and on a GPU that does not
answer, programs end on their own. An operator can evict them with a DeviceTaintRule. The functions
are pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kube.names import TAINT_BYPASS, TAINT_CLOSED, TAINT_LOST

HEALTHY, UNHEALTHY, UNKNOWN = "Healthy", "Unhealthy", "Unknown"

CLEAR_S = 30.0
"""Seconds by which a taint outlives its reason, so that a flapping taint is written once."""
MOST = 1000
"""Maximum length of a message in characters; the kubelet truncates at 1024."""


@dataclass(frozen=True, order=True)
class Taint:
    """A reason to schedule no new pod on a GPU: a key, and a label value."""

    key: str
    value: str

    def describe(self) -> dict[str, str]:
        """Return the taint in the form that a ResourceSlice uses."""
        return {"key": self.key, "value": self.value, "effect": "NoSchedule"}


@dataclass(frozen=True)
class Condition:
    """The state of a GPU, with the reasons as text and as taints for the scheduler."""

    health: str
    message: str = ""
    taints: tuple[Taint, ...] = ()


def judge(
    gpus: Iterable[Mapping[str, Any]], containers: Iterable[Mapping[str, Any]]
) -> dict[str, Condition]:
    """Return the condition of each GPU, by UUID, from the governor's answers."""
    accused: dict[str, list[tuple[str, str]]] = {}
    for container in containers:
        for violation in container.get("violations") or ():
            if violation.get("ended") is None:
                reason = (str(violation.get("kind")), str(container.get("id")))
                accused.setdefault(str(violation.get("gpu")), []).append(reason)
    return {gpu["uuid"]: _judge(gpu, accused.get(gpu["uuid"], [])) for gpu in gpus}


def _judge(gpu: Mapping[str, Any], accused: Sequence[tuple[str, str]]) -> Condition:
    taints, messages = [], []
    health = HEALTHY
    if gpu.get("lost"):
        health = UNHEALTHY
        taints.append(Taint(TAINT_LOST, "does-not-answer"))
        messages.append(f"the GPU does not answer: {gpu['lost']}")
    if gpu.get("closed"):
        health = UNHEALTHY
        taints.append(Taint(TAINT_CLOSED, str(gpu.get("strategy") or "closed")))
        messages.append(f"the GPU accepts no new containers: {gpu['closed']}")
    if accused:
        # The GPU is healthy, but a new pod would share it with a container that exceeds its share.
        kinds = sorted({kind for kind, _ in accused})
        taints.append(Taint(TAINT_BYPASS, kinds[0] if len(kinds) == 1 else "several"))
        names = ", ".join(sorted({f"{name[:64]} ({kind})" for kind, name in accused}))
        messages.append(f"containers bypass their quota: {names}")
    return Condition(health, "; ".join(messages)[:MOST], tuple(sorted(taints)))


@dataclass
class Damper:
    """Keeps taints for a while, so that a flapping taint is not written repeatedly."""

    clear_s: float = CLEAR_S
    _seen: dict[tuple[str, str], tuple[float, Taint]] = field(default_factory=dict)

    def settle(
        self, conditions: Mapping[str, Condition], now: float
    ) -> dict[str, tuple[Taint, ...]]:
        """Return the taints to show at `now` (monotonic seconds), by GPU."""
        current = {
            (uuid, taint.key): taint
            for uuid, condition in conditions.items()
            for taint in condition.taints
        }
        for key, taint in current.items():
            self._seen[key] = (now, taint)
        for key, (seen, _) in list(self._seen.items()):
            if key not in current and now - seen >= self.clear_s:
                del self._seen[key]
        return {
            uuid: tuple(sorted(taint for (gpu, _), (_, taint) in self._seen.items() if gpu == uuid))
            for uuid in conditions
        }
