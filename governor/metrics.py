"""Metrics for Prometheus: their definitions, their collection, and an HTTP endpoint.

The numbers are read on the governor's event loop, where all of their sources are written. They are
formatted on a separate thread. A scrape within a quarter of a second of another one gets the same
numbers, so frequent scraping costs the governor little.
"""

from __future__ import annotations

import itertools
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from email.message import Message
from pathlib import Path
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import make_wsgi_app
from prometheus_client.registry import Collector

from governor import VERSION, httpd
from governor.arbiter import WAIT_BOUNDS_NS, Waits
from governor.claims import Claim
from governor.config import Config
from governor.container import Container
from governor.counters import GpuTime, Looks
from governor.residency import Whereabouts
from governor.server import Server
from governor.violations import KINDS

S = 1e-9  # nanoseconds

GPU = ("gpu", "index")
OWNER = ("namespace", "pod", "claim")
"""Labels of a container that Kubernetes runs; empty for others."""
CONTAINER = ("container", "gpu", *OWNER)
CLAIM = ("claim", "uid", "share", "gpu")


@dataclass(frozen=True)
class Described:
    """One metric: its name without `_total`, its kind, its labels and its meaning."""

    name: str
    kind: str
    labels: tuple[str, ...]
    doc: str

    @property
    def shown(self) -> str:
        """The name that a query uses."""
        return f"{self.name}_total" if self.kind == "counter" else self.name

    @property
    def samples(self) -> tuple[str, ...]:
        """The names of its samples, as served."""
        if self.kind == "histogram":
            return tuple(f"{self.name}_{part}" for part in ("bucket", "count", "sum"))
        return (self.shown,)


def _gauge(name: str, labels: tuple[str, ...], doc: str) -> Described:
    return Described(f"tidegate_{name}", "gauge", labels, doc)


def _counter(name: str, labels: tuple[str, ...], doc: str) -> Described:
    return Described(f"tidegate_{name}", "counter", labels, doc)


def _histogram(name: str, labels: tuple[str, ...], doc: str) -> Described:
    return Described(f"tidegate_{name}", "histogram", labels, doc)


NODE_METRICS = (
    _gauge("build_info", ("version",), "Always 1; the governor's version is in the label"),
    _gauge("containers", (), "Containers that share the node's GPUs"),
    _counter("admissions", (), "Containers that were admitted"),
    _counter("admissions_refused", ("code",), "Containers that were refused, by the error's code"),
    _counter("violations", ("kind",), "Violations that began, by kind"),
    _counter("throttles", (), "Times that a container was frozen for a violation"),
    _counter("stops", (), "Containers that were killed for a violation"),
    _gauge(
        "memory_overbook_ratio",
        (),
        "Memory that may be granted on a GPU, as a multiple of the GPU's own memory"
        " (memory.overbook)",
    ),
    _gauge("host_memory_taken_bytes", (), "Host memory that is allocated for parked memory"),
    _gauge(
        "host_memory_needed_bytes",
        (),
        "Memory quotas of all containers that may be parked, added up",
    ),
    _gauge(
        "host_memory_limit_bytes",
        (),
        "Upper limit of tidegate_host_memory_needed_bytes (memory.host)",
    ),
)
GPU_METRICS = (
    _gauge("gpu_info", (*GPU, "name", "strategy"), "Always 1; name and strategy are in the labels"),
    _gauge("gpu_containers", GPU, "Containers that share the GPU"),
    _gauge("gpu_memory_bytes", GPU, "Memory of the GPU"),
    _gauge("gpu_memory_grantable_bytes", GPU, "Memory that can still be granted"),
    _gauge(
        "gpu_memory_granted_bytes",
        GPU,
        "Memory that is granted; with memory.overbook, that may exceed the GPU's",
    ),
    _gauge("gpu_time_grantable_ratio", GPU, "Part of the GPU's time that can still be guaranteed"),
    _gauge("gpu_steered", GPU, "1 while its own scheduler divides its time, 0 while grants do"),
    _gauge("gpu_lost", GPU, "1 while the GPU does not answer and no part of it is granted"),
    _counter("gpu_held_seconds", GPU, "Time for which containers held the GPU"),
    _counter("gpu_charged_seconds", GPU, "GPU time that they used"),
    _counter(
        "gpu_lent_seconds",
        GPU,
        "Charged time beyond the guarantees of containers that may exceed them",
    ),
    _counter(
        "gpu_handover_seconds",
        GPU,
        "Time that was held but not used, in settled grants; divided by the number of"
        " grants, it is the mean per grant",
    ),
    _counter("gpu_grants", GPU, "Grants of GPU time"),
    _counter("gpu_looks", GPU, "NVML samples"),
    _counter("gpu_looks_failed", GPU, "NVML samples that failed"),
    _counter("gpu_look_seconds", GPU, "Time that NVML samples took"),
    _gauge(
        "gpu_mps_running",
        GPU,
        "1 while its MPS server accepts clients; only for GPUs that use strategy mps",
    ),
    _counter("gpu_mps_faults", GPU, "Fatal faults that ended the work of its MPS clients"),
    _counter("gpu_mps_clients_refused", GPU, "Clients that its MPS server refused"),
    _counter(
        "gpu_mps_commands",
        GPU,
        "Commands that its MPS daemon received but the governor did not send",
    ),
    _counter("gpu_mps_starts", GPU, "Starts of its MPS daemon"),
)
CONTAINER_METRICS = (
    _gauge(
        "container_processes", ("container", *OWNER), "Processes of the container that use a GPU"
    ),
    _gauge("container_frozen", ("container", *OWNER), "1 while it is frozen for a violation"),
    _gauge("container_suspended", ("container", *OWNER), "1 while it is suspended"),
    _gauge("container_compute_guarantee_ratio", CONTAINER, "Guaranteed part of the GPU's time"),
    _gauge("container_compute_limit_ratio", CONTAINER, "Limit, as a part of the GPU's time"),
    _gauge("container_latency", CONTAINER, "1 if its class is latency"),
    _counter("container_held_seconds", CONTAINER, "Time for which it held the GPU"),
    _counter("container_charged_seconds", CONTAINER, "GPU time that it used"),
    _counter(
        "container_lent_seconds",
        CONTAINER,
        "Charged time beyond its guarantee, second by second, if it may exceed it",
    ),
    _counter(
        "container_handover_seconds",
        CONTAINER,
        "Time that was held but not used, in settled grants",
    ),
    _counter("container_grants", CONTAINER, "Grants of GPU time"),
    _histogram(
        "container_grant_wait_seconds",
        CONTAINER,
        "Waits for grants, from when the governor sees that it wants the GPU",
    ),
    _counter(
        "container_grants_overdue",
        CONTAINER,
        "Grants that were revoked because it had not given them back in time",
    ),
    _counter("container_launches", CONTAINER, "Calls that started work, by its own count"),
    _counter("container_waits", CONTAINER, "Of those, calls that had to wait for GPU time"),
    _counter("container_wait_seconds", CONTAINER, "Time for which they waited"),
    _counter(
        "container_allocations_refused",
        CONTAINER,
        "Allocations refused because of the quota",
    ),
    _gauge("container_memory_limit_bytes", CONTAINER, "Memory that it may use"),
    _gauge("container_memory_used_bytes", CONTAINER, "Memory in use: charged, and the driver's"),
    _gauge("container_memory_charged_bytes", CONTAINER, "Memory that it allocated"),
    _gauge(
        "container_memory_overhead_bytes",
        CONTAINER,
        "Memory that the driver took by itself: contexts, code",
    ),
    _gauge("container_memory_seen_bytes", CONTAINER, "Memory of its processes according to NVML"),
    _gauge(
        "container_memory_peak_bytes", CONTAINER, "Maximum memory that was in use at any one time"
    ),
    _counter("container_violations", (*CONTAINER, "kind"), "Violations that began, by kind"),
    _gauge("container_violation", (*CONTAINER, "kind"), "1 while a violation is ongoing"),
    _gauge(
        "container_residency",
        (*CONTAINER, "state"),
        "1 for the state of its memory: resident, leaving, parked or coming; this metric and those"
        " that follow exist only for containers whose memory may be parked",
    ),
    _gauge("container_memory_movable_bytes", CONTAINER, "Memory that can be parked"),
    _gauge(
        "container_memory_parked_bytes",
        CONTAINER,
        "Memory that is in use, but in host memory and not on the GPU",
    ),
    _gauge(
        "container_host_memory_bytes", CONTAINER, "Host memory that is ready for its parked memory"
    ),
    _counter("container_times_parked", CONTAINER, "Times that its memory was parked"),
    _counter("container_moved_bytes", CONTAINER, "Memory that was moved, in both directions"),
    _counter(
        "container_move_seconds",
        CONTAINER,
        "Time that these moves took, summed over all processes",
    ),
    _counter(
        "container_away_seconds",
        CONTAINER,
        "Time for which calls waited for its memory, summed over all threads",
    ),
    _gauge("container_awaiting_calls", CONTAINER, "Calls that are waiting for its memory now"),
)
CLAIM_METRICS = (
    _gauge("claim_memory_bytes", CLAIM, "Memory of a claim's share, used by a container or not"),
    _gauge("claim_compute_guarantee_ratio", CLAIM, "Part of the GPU's time that it guarantees"),
    _gauge("claim_containers", CLAIM, "Containers that use the share"),
)
METRICS = (*NODE_METRICS, *GPU_METRICS, *CONTAINER_METRICS, *CLAIM_METRICS)

MAX_TEXT = 1024
"""Longest text of a label, in characters: an id is not longer."""

CODES = ("annotation", "refused", "request")
"""Codes of refusals that are exported from the start, so that the first one shows as an increase.
"""


_FAMILIES = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}


class _Families:
    """The families of one scrape, in the order of the description."""

    def __init__(self) -> None:
        self._known = {metric.name: metric for metric in METRICS}
        self._made: dict[str, Metric] = {}
        for metric in METRICS:
            kind: Any = _FAMILIES[metric.kind]
            self._made[metric.name] = kind(metric.name, metric.doc, labels=metric.labels)

    def add(self, labels: Sequence[str], **values: float) -> None:
        """Add a sample to each of these metrics; raise KeyError for one that is not described."""
        for name, value in values.items():
            family: Any = self._made[f"tidegate_{name}"]
            family.add_metric(labels[: len(self._known[family.name].labels)], value)

    def add_waits(self, labels: Sequence[str], waits: Waits) -> None:
        """Add the histogram of a container's waits for its grants."""
        bounds = [*(f"{ns * S:g}" for ns in WAIT_BOUNDS_NS), "+Inf"]
        buckets = list(zip(bounds, itertools.accumulate(waits.counts), strict=True))
        family: Any = self._made["tidegate_container_grant_wait_seconds"]
        family.add_metric(labels, buckets, waits.ns * S)

    def all(self) -> list[Metric]:
        """Return all families."""
        return list(self._made.values())


def collect(server: Server) -> list[Metric]:
    """Return every metric as of now.

    It runs on the governor's event loop, so that the numbers are consistent.
    """
    families = _Families()
    tally = server.tally
    containers = list(server.containers.values())
    families.add((VERSION,), build_info=1)
    members = sum(len(container.members) for container in containers)
    families.add((), containers=members, admissions=tally.admitted)
    families.add((), throttles=tally.throttles, stops=tally.stops)
    families.add((), memory_overbook_ratio=server.config.memory.overbook)
    host = {f"host_memory_{name}_bytes": value for name, value in server.host_memory().items()}
    families.add((), **host)
    for code in sorted({*CODES, *tally.refused}):
        families.add((code,), admissions_refused=tally.refused[code])
    for kind in KINDS:
        families.add((kind,), violations=tally.violations[kind])
    # Read once: a GPU's time is the sum over its containers.
    times = [container.account.gpu_times() for container in containers]
    _add_gpus(families, server, tally.gpu_times(times))
    for container, own in zip(containers, times, strict=True):
        _add_container(families, container, own)
    for claim in server.claims.values():
        _add_claim(families, server, claim)
    return families.all()


def _add_claim(families: _Families, server: Server, claim: Claim) -> None:
    for share in claim.shares:
        labels = (f"{claim.namespace}/{claim.name}", claim.uid, share.name, share.device)
        users = [c for c in server.containers.values() if (claim.uid, share.name) in c.uses]
        families.add(
            labels,
            claim_memory_bytes=share.quota.memory,
            claim_compute_guarantee_ratio=share.quota.compute / 100,
            claim_containers=sum(len(container.members) for container in users),
        )


def _add_gpus(families: _Families, server: Server, times: Mapping[str, GpuTime]) -> None:
    shown = {gpu["uuid"]: gpu for gpu in server.allocations.describe()["gpus"]}
    for device in server.allocations.devices:
        room = shown[device.uuid]
        labels = (device.uuid, str(device.index), device.name, room["strategy"])
        lost = room["lost"] is not None
        sharing = [c for c in server.containers.values() if device in c.devices]
        looks = server.tally.looks.get(device.uuid, Looks())
        families.add(
            labels,
            gpu_info=1,
            gpu_containers=sum(len(container.members) for container in sharing),
            gpu_memory_bytes=device.memory,
            gpu_memory_grantable_bytes=0 if lost else room["memory_left"],
            gpu_memory_granted_bytes=room["memory_granted"],
            gpu_time_grantable_ratio=0 if lost else room["compute_left"] / 100,
            gpu_steered=server.scheduling(device.uuid)["scheduling"] == "hardware",
            gpu_lost=lost,
            gpu_looks=looks.made,
            gpu_looks_failed=looks.failed,
            gpu_look_seconds=looks.seconds,
        )
        mps = server.mps.get(device.uuid)
        if mps is not None:
            families.add(
                labels,
                gpu_mps_running=mps.state == "running",
                gpu_mps_faults=mps.counts.faults,
                gpu_mps_clients_refused=mps.counts.refused,
                gpu_mps_commands=mps.counts.commands,
                gpu_mps_starts=mps.counts.starts,
            )
        time_of = times.get(device.uuid, GpuTime())
        families.add(
            labels,
            gpu_held_seconds=time_of.held_ns * S,
            gpu_charged_seconds=time_of.charged_ns * S,
            gpu_lent_seconds=time_of.lent_ns * S,
            gpu_handover_seconds=time_of.handover_ns * S,
            gpu_grants=time_of.grants,
        )


def _add_container(families: _Families, container: Container, times: Mapping[str, GpuTime]) -> None:
    findings = container.findings
    name = _text(container.identifier)
    identity = container.members[0].row.owner.identity
    owner = (
        _text(identity.get("namespace", "")),
        _text(identity.get("pod", "")),
        ",".join(dict.fromkeys(f"{claim.namespace}/{claim.name}" for claim, _ in container.claims)),
    )
    families.add(
        (name, *owner),
        container_processes=len(container.pids()),
        container_frozen=findings.frozen,
        container_suspended=bool(container.suspension),
    )
    for i, device in enumerate(container.devices):
        labels = (name, device.uuid, *owner)
        quota, time_of, counted = container.quota, times[device.uuid], container.account.counted(i)
        memory = container.account.memory(i)
        families.add(
            labels,
            container_compute_guarantee_ratio=quota.compute / 100,
            container_compute_limit_ratio=quota.compute_limit / 100,
            container_latency=quota.is_latency,
            container_held_seconds=time_of.held_ns * S,
            container_charged_seconds=time_of.charged_ns * S,
            container_lent_seconds=time_of.lent_ns * S,
            container_handover_seconds=time_of.handover_ns * S,
            container_grants=time_of.grants,
            container_grants_overdue=time_of.overdue,
            container_launches=counted["launches"],
            container_waits=counted["waits"],
            container_wait_seconds=counted["wait_ns"] * S,
            container_allocations_refused=counted["refused"],
            container_memory_limit_bytes=quota.memory,
            container_memory_used_bytes=memory.used,
            container_memory_charged_bytes=memory.charged,
            container_memory_overhead_bytes=memory.overhead,
            container_memory_seen_bytes=findings.seen[i],
            container_memory_peak_bytes=memory.peak,
        )
        families.add_waits(labels, container.gpus.waits(i))
        for kind in KINDS:
            families.add(
                (*labels, kind),
                container_violations=findings.counts[i][kind],
                container_violation=findings.lasts(device.uuid, kind),
            )
        _add_parking(families, container, labels)


def _add_parking(families: _Families, container: Container, labels: tuple[str, ...]) -> None:
    """Add the metrics for a container whose memory may be parked. Such a container has one GPU."""
    parking = container.describe_parking()
    if parking is None:
        return
    for place in Whereabouts:
        families.add(
            (*labels, place.value), container_residency=place.value == parking["residency"]
        )
    families.add(
        labels,
        container_memory_movable_bytes=parking["movable"],
        container_memory_parked_bytes=parking["parked"],
        container_host_memory_bytes=parking["host_memory"],
        container_times_parked=parking["times_parked"],
        container_moved_bytes=parking["moved"],
        container_move_seconds=parking["move_ns"] * S,
        container_away_seconds=parking["away_ns"] * S,
        container_awaiting_calls=parking["awaiting"],
    )


def _text(foreign: str) -> str:
    """Return untrusted text without lone surrogates, which cannot be encoded."""
    return foreign.encode("utf-8", "replace").decode()[:MAX_TEXT]


class _Snapshot(Collector):
    """The metrics of one scrape, as a registry for prometheus-client's application."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        """Return the metrics of one scrape."""
        return self._families


SAME_S = 0.25
"""Scrapes that are less than this time apart, in seconds, get the same numbers."""


class MetricsEndpoint(httpd.Endpoint):
    """Answers GET /metrics."""

    where = "metrics are at /metrics"

    def __init__(self, source: Callable[[], list[Metric]]) -> None:
        super().__init__("metrics")
        self._source = source
        self._kept: tuple[float, list[Metric]] | None = None

    def has(self, target: str) -> bool:
        """Return whether metrics are at `target`."""
        return target == "/metrics"

    async def answer(self, target: str, headers: Message) -> bytes:  # noqa: ARG002 - has one path
        """Return the metrics in a form that the client accepts."""
        environment = {
            "REQUEST_METHOD": "GET",
            "PATH_INFO": "/metrics",
            "QUERY_STRING": "",
            "HTTP_ACCEPT": headers.get("Accept", ""),
            "HTTP_ACCEPT_ENCODING": headers.get("Accept-Encoding", ""),
        }
        now = time.monotonic()
        if self._kept is None or now - self._kept[0] > SAME_S:
            self._kept = (now, self._source())
        app = make_wsgi_app(_Snapshot(self._kept[1]))
        return await self.in_thread(_run, app, environment)


def _run(app: Callable[..., Any], environment: Mapping[str, str]) -> bytes:
    """Return the whole answer from a WSGI application."""
    begun: list[tuple[str, list[tuple[str, str]]]] = []

    def start(status: str, headers: list[tuple[str, str]]) -> None:
        begun.append((status, headers))

    body = b"".join(app(environment, start))
    status, headers = begun[0]
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers)
    head = f"HTTP/1.1 {status}\r\n{lines}Content-Length: {len(body)}\r\n{httpd.CLOSE}\r\n"
    return head.encode() + body


def listening(config: Config) -> AbstractContextManager[socket.socket | None]:
    """Listen as configured; the value is None if metrics are off.

    The socket below `runtime_dir` is for root and its group. Raise GovernorError if listening
    fails.
    """
    path = Path(config.runtime_dir) / "metrics.sock"
    return httpd.listening(config.metrics.listen, path, "metrics", "metrics.listen")
