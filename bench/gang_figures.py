"""Computes the figures of bench.gangs from its raw data, and reads nvidia-smi's topology.

Shares are percentages of a GPU; times are in nanoseconds unless a name gives another unit.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from bench.events import SAMPLE_NS, trailing
from bench.progress import NS_PER_MS, NS_PER_S
from bench.quota_measure import windows

NEAR = 5.0
"""Distance from its share within which a container counts as having recovered, in points over
100 ms."""

ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


def read_topology(text: str) -> dict[str, Any]:
    """Read the connections between GPUs, and their NUMA nodes, from `nvidia-smi topo -m`."""
    lines = [ESCAPE.sub("", line).split("\t") for line in text.splitlines()]
    head: list[str] = next((line for line in lines if "GPU1" in (x.strip() for x in line)), [])
    names = [cell.strip() for cell in head]
    ways: dict[str, str] = {}
    nodes: dict[str, int] = {}
    numa = names.index("NUMA Affinity") if "NUMA Affinity" in names else None
    for line in lines:
        cells = [cell.strip() for cell in line]
        if line is head or not re.fullmatch(r"GPU\d+", cells[0]):
            continue
        for name, cell in zip(names, cells, strict=False):
            if re.fullmatch(r"GPU\d+", name) and int(name[3:]) > int(cells[0][3:]):
                ways[f"{cells[0][3:]}-{name[3:]}"] = cell
        if numa is not None and numa < len(cells) and cells[numa].isdecimal():
            nodes[cells[0][3:]] = int(cells[numa])
    return {"ways": ways, "nodes": nodes}


def own_topology(gpus: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the topology in the same form, from the governor's report of its GPUs."""
    return {
        "ways": {
            f"{gpu['index']}-{route['to']}": f"NV{route['nvlinks']}"
            if route["nvlinks"]
            else route["pcie"] or "?"
            for gpu in gpus
            for route in gpu["routes"]
            if route["to"] > gpu["index"]
        },
        "nodes": {
            str(gpu["index"]): gpu["numa_node"] for gpu in gpus if gpu["numa_node"] is not None
        },
    }


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Return the minimum, the median and the maximum."""
    if not values:
        return None
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}


def percent(work_us: Sequence[int]) -> float | None:
    """Return work, which is given in steps of 10 ms, as a share."""
    return round(statistics.fmean(work_us) * 1e5 / SAMPLE_NS, 2) if work_us else None


def back_after(work_us: Sequence[int], event: Mapping[str, int], share: float) -> float | None:
    """Return how soon after the governor's restart a container's work was near its share.

    The time in ms begins when the restarted governor answers, and ends when the work of the last
    100 ms is within `NEAR` of the share. It is None if that did not happen before the next event.
    """
    for end, done in trailing(work_us, event["returned_ns"], event["until_ns"]):
        if abs(done - share) <= NEAR:
            return max(0.0, (end * SAMPLE_NS - event["returned_ns"]) / NS_PER_MS)
    return None


def after(work_us: Sequence[int], from_ns: int) -> float | None:
    """Return the share in the second that begins at `from_ns`; None if it is incomplete."""
    first = -(-from_ns // SAMPLE_NS)
    steps = work_us[max(0, first) : first + NS_PER_S // SAMPLE_NS]
    return percent(steps) if first >= 0 and len(steps) == NS_PER_S // SAMPLE_NS else None


def summarise_tenant(tenant: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """Return the figures of one container on one GPU."""
    work, share = tenant["work_us"], tenant["compute"]
    found: dict[str, Any] = {
        **{key: tenant[key] for key in ("name", "gpu", "compute")},
        "delivered": percent(work),
        "charged": round(tenant["governor"]["charged_ns"] / seconds / 1e7, 2)
        if tenant["governor"]
        else None,
    }
    errors = [abs(one - share) for one in windows(work, NS_PER_S)]
    if errors and not tenant.get("events"):
        found["error_1s"] = round(statistics.fmean(errors), 2)
    if tenant.get("events"):
        found["back_ms"] = [back_after(work, event, share) for event in tenant["events"]]
        found["second_s"] = [after(work, e["returned_ns"] + NS_PER_S) for e in tenant["events"]]
        found["away_s"] = [
            percent(work[e["killed_ns"] // SAMPLE_NS : e["returned_ns"] // SAMPLE_NS])
            for e in tenant["events"]
        ]
    return found


def summarise_arm(
    arm: Mapping[str, Any], native: Mapping[str, Any], counted: Sequence[str]
) -> dict[str, Any]:
    """Return the figures of containers that ran side by side.

    `native` has the same jobs' answers without Tidegate, by job; `counted` has the checkpoints of
    the job that trained without it.
    """
    jobs = []
    for one in arm["jobs"]:
        answer = one["answer"]
        alone = native.get(one["job"], {})
        job = {
            "name": one["name"],
            "job": one["job"],
            "status": one["status"],
            **{key: answer.get(key) for key in ("iterations", "longest_s", "checked", "wrong")},
            "rate": rate(answer),
            "of_native": round(100 * rate(answer) / rate(alone), 1) if rate(alone) else None,
        }
        if answer.get("checkpoints"):
            pairs = list(zip(answer["checkpoints"], counted, strict=False))
            job["same_as_native"] = f"{sum(a == b for a, b in pairs)} of {len(pairs)}"
        jobs.append(job)
    tenants = [summarise_tenant(one, arm["seconds"]) for one in arm["tenants"]]
    return {"jobs": jobs, "tenants": tenants}


def rate(answer: Mapping[str, Any]) -> float:
    """Return iterations per second, or 0 if there is no answer."""
    return round(answer["iterations"] / answer["seconds"], 2) if answer.get("seconds") else 0.0


def summarise(parts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the figures of all parts, from their raw data alone."""
    native = {name: one["answer"] for name, one in parts.get("native", {}).get("jobs", {}).items()}
    counted = native.get("processes-train", {}).get("checkpoints", [])
    summary: dict[str, Any] = {}
    for name, part in parts.items():
        figures: dict[str, Any] = {"failed": part["error"], "seconds": part["took_s"]}
        if name == "native":
            figures["jobs"] = {
                job: {
                    "rate": rate(answer),
                    **{key: answer.get(key) for key in ("longest_s", "wrong", "how", "transports")},
                }
                for job, answer in native.items()
            }
        elif name == "topology" and "own" in part:
            figures["own"], figures["driver"] = part["own"], part.get("driver")
            figures["same"] = None if figures["driver"] is None else part["own"] == part["driver"]
        elif name == "samples":
            figures["rounds"] = [
                {
                    **{key: one[key] for key in ("processes", "failed")},
                    **{call: spread(taken) for call, taken in one["us"].items()},
                }
                for one in part.get("looks", [])
            ]
        for arm, raw in part.get("arms", {}).items():
            figures.setdefault("arms", {})[arm] = summarise_arm(raw, native, counted)
        summary[name] = figures
    return summary
