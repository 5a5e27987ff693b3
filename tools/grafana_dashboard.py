"""Generates packaging/grafana/tidegate.json, a dashboard of the governor's metrics.

`python tools/grafana_dashboard.py` writes it; `--check` fails if it is stale. The panels are
defined in ROWS; everything else that Grafana needs is the same for all of them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools.generated import write_or_check  # noqa: E402

FILE = ROOT / "packaging/grafana/tidegate.json"

SOURCE = {"type": "prometheus", "uid": "${source}"}
SHORT = {
    "{NODE}": '{instance=~"$instance"}',
    "{GPU}": '{instance=~"$instance",gpu=~"$gpu"}',
    "{OF}": '{instance=~"$instance",gpu=~"$gpu",container=~"$container"}',
    "[I]": "[$__rate_interval]",
}
"""Abbreviations in the queries below: selections of series, and the interval."""
GPU = "GPU {{index}} {{instance}}"
CONTAINER = "{{container}} GPU {{gpu}}"


@dataclass(frozen=True)
class Panel:
    """A panel: its title and unit, and its queries, each with the legend of its series."""

    title: str
    doc: str
    queries: Mapping[str, str]
    unit: str = "short"
    most: float | None = None
    stacked: bool = False


@dataclass(frozen=True)
class PanelRow:
    """Panels below a title: single values (`stat`) or curves (`timeseries`)."""

    title: str
    panels: tuple[Panel, ...]
    kind: str = "timeseries"
    width: int = 12


ROWS = (
    PanelRow(
        "Nodes",
        (
            Panel("Containers", "Sharing GPUs now", {"sum(tidegate_containers{NODE})": ""}),
            Panel(
                "GPUs lost",
                "GPUs that do not answer; no part of them is allocated",
                {"sum(tidegate_gpu_lost{NODE})": ""},
            ),
            Panel(
                "Violations now",
                "Containers that are bypassing their quota",
                {"sum(tidegate_container_violation{OF}) or vector(0)": ""},
            ),
            Panel(
                "Admissions refused",
                "In the time shown, by the error's code",
                {
                    "sum by (code) (increase(tidegate_admissions_refused_total{NODE}[$__range]))": (
                        "{{code}}"
                    )
                },
            ),
            Panel(
                "Versions",
                "Versions of the running governors",
                {"count by (version) (tidegate_build_info{NODE})": "{{version}}"},
            ),
        ),
        "stat",
        4,
    ),
    PanelRow(
        "GPUs",
        (
            Panel(
                "GPU time used",
                "Fraction of each GPU's time that containers used",
                {"rate(tidegate_gpu_charged_seconds_total{GPU}[I])": GPU},
                "percentunit",
                most=1,
            ),
            Panel(
                "GPU time left to guarantee",
                "What the next container can request",
                {"tidegate_gpu_time_grantable_ratio{GPU}": GPU},
                "percentunit",
                most=1,
            ),
            Panel(
                "Memory left to grant",
                "What the next container can request",
                {"tidegate_gpu_memory_grantable_bytes{GPU}": GPU},
                "bytes",
            ),
            Panel(
                "Cost of a hand-over",
                "Time held and not used, per grant",
                {
                    "rate(tidegate_gpu_handover_seconds_total{GPU}[I])"
                    " / rate(tidegate_gpu_grants_total{GPU}[I])": GPU
                },
                "s",
            ),
            Panel(
                "Fraction of NVML samples that fail",
                "Until one succeeds, the memory that the driver takes by itself is not known",
                {
                    "rate(tidegate_gpu_looks_failed_total{GPU}[I])"
                    " / rate(tidegate_gpu_looks_total{GPU}[I])": GPU
                },
                "percentunit",
                most=1,
            ),
            Panel(
                "Duration of an NVML sample",
                "Time that the driver takes to answer",
                {
                    "rate(tidegate_gpu_look_seconds_total{GPU}[I])"
                    " / rate(tidegate_gpu_looks_total{GPU}[I])": GPU
                },
                "s",
            ),
        ),
    ),
    PanelRow(
        "Containers",
        (
            Panel(
                "GPU time",
                "Fraction of the GPU's time that each container used",
                {"rate(tidegate_container_charged_seconds_total{OF}[I])": CONTAINER},
                "percentunit",
                stacked=True,
            ),
            Panel(
                "Fraction of the guarantee used",
                "At 1 the container used all of its guarantee, and what exceeds 1 was lent;"
                " below 1, a container that did not wait needed less",
                {
                    "rate(tidegate_container_charged_seconds_total{OF}[I])"
                    " / tidegate_container_compute_guarantee_ratio{OF}": CONTAINER
                },
                "percentunit",
            ),
            Panel(
                "Lent",
                "GPU time beyond the guarantee, which others left idle",
                {"rate(tidegate_container_lent_seconds_total{OF}[I])": CONTAINER},
                "percentunit",
                stacked=True,
            ),
            Panel(
                "Waiting for GPU time",
                "Seconds per second, summed over all threads, as counted by the container itself",
                {"rate(tidegate_container_wait_seconds_total{OF}[I])": CONTAINER},
                "s",
            ),
            Panel(
                "Memory in use",
                "Memory that the container allocated, and that the driver took for it",
                {"tidegate_container_memory_used_bytes{OF}": CONTAINER},
                "bytes",
                stacked=True,
            ),
            Panel(
                "Fraction of the memory quota in use",
                "At 1, allocations are refused",
                {
                    "tidegate_container_memory_used_bytes{OF}"
                    " / tidegate_container_memory_limit_bytes{OF}": CONTAINER
                },
                "percentunit",
                most=1,
            ),
            Panel(
                "Allocations refused",
                "Because they did not fit into the quota",
                {
                    "increase(tidegate_container_allocations_refused_total{OF}[I])": CONTAINER,
                },
            ),
            Panel(
                "Grants taken back",
                "Because the container's work outlasted them",
                {"rate(tidegate_container_grants_overdue_total{OF}[I])": CONTAINER},
                "cps",
            ),
        ),
    ),
    PanelRow(
        "Violations",
        (
            Panel(
                "Ongoing violations",
                "By container, kind and GPU",
                {"tidegate_container_violation{OF}": "{{container}} {{kind}} GPU {{gpu}}"},
                most=1,
            ),
            Panel(
                "What was done about them",
                "Containers that were frozen or killed",
                {
                    "increase(tidegate_throttles_total{NODE}[I])": "frozen {{instance}}",
                    "increase(tidegate_stops_total{NODE}[I])": "killed {{instance}}",
                },
            ),
        ),
    ),
    PanelRow(
        "Parked memory",
        (
            Panel(
                "Memory granted, as a fraction of the GPU's memory",
                "Above 1, memory of idle containers is parked while others need the room",
                {"tidegate_gpu_memory_granted_bytes{GPU} / tidegate_gpu_memory_bytes{GPU}": GPU},
                "percentunit",
            ),
            Panel(
                "Host memory for parked memory",
                "What is taken now, what the quotas may need, and the maximum (memory.host)",
                {
                    "tidegate_host_memory_taken_bytes{NODE}": "taken {{instance}}",
                    "tidegate_host_memory_needed_bytes{NODE}": "needed {{instance}}",
                    "tidegate_host_memory_limit_bytes{NODE}": "at most {{instance}}",
                },
                "bytes",
            ),
            Panel(
                "Where the memory of containers is",
                "Containers that may be parked, by where their memory is",
                {"sum by (state) (tidegate_container_residency{OF})": "{{state}}"},
                stacked=True,
            ),
            Panel(
                "Memory parked",
                "In use, but in host memory and not on the GPU",
                {"tidegate_container_memory_parked_bytes{OF}": CONTAINER},
                "bytes",
                stacked=True,
            ),
            Panel(
                "Memory moved",
                "From the GPU and back to it",
                {"rate(tidegate_container_moved_bytes_total{OF}[I])": CONTAINER},
                "Bps",
                stacked=True,
            ),
            Panel(
                "Waiting for parked memory",
                "Seconds per second, summed over all threads, as counted by the container itself",
                {"rate(tidegate_container_away_seconds_total{OF}[I])": CONTAINER},
                "s",
            ),
        ),
    ),
    PanelRow(
        "GPUs shared through MPS",
        (
            Panel(
                "MPS server running",
                "At 0, it accepts no clients",
                {"tidegate_gpu_mps_running{GPU}": GPU},
                most=1,
            ),
            Panel(
                "Faults, and starts of the daemon",
                "Each of them ends the work of all clients",
                {
                    "increase(tidegate_gpu_mps_faults_total{GPU}[I])": f"faults, {GPU}",
                    "increase(tidegate_gpu_mps_starts_total{GPU}[I])": f"starts, {GPU}",
                },
            ),
        ),
    ),
)

VARIABLES = (
    ("instance", "Node", "label_values(tidegate_build_info, instance)"),
    ("gpu", "GPU", "label_values(tidegate_gpu_info{NODE}, gpu)"),
    (
        "container",
        "Container",
        "label_values(tidegate_container_memory_limit_bytes{GPU}, container)",
    ),
)

HEIGHT = 8
STAT_HEIGHT = 4
COLUMNS = 24


def written_out(query: str) -> str:
    """Return a query with the abbreviations expanded."""
    for short, long in SHORT.items():
        query = query.replace(short, long)
    return query


def panel_json(panel: Panel, row: PanelRow, number: int, x: int, y: int) -> dict[str, Any]:
    """Return a panel in Grafana's format."""
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.most is not None:
        defaults["max"] = panel.most
    options: dict[str, Any]
    if row.kind == "stat":
        options = {"reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}}
    else:
        defaults["custom"] = {
            "lineWidth": 1,
            "fillOpacity": 20,
            "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
        }
        options = {
            "legend": {"displayMode": "table", "placement": "bottom", "calcs": ["mean", "max"]},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    return {
        "id": number,
        "type": row.kind,
        "title": panel.title,
        "description": panel.doc,
        "datasource": SOURCE,
        "gridPos": {
            "x": x,
            "y": y,
            "w": row.width,
            "h": STAT_HEIGHT if row.kind == "stat" else HEIGHT,
        },
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": [
            {
                "refId": chr(ord("A") + i),
                "datasource": SOURCE,
                "expr": written_out(query),
                "legendFormat": legend or "__auto",
                "instant": row.kind == "stat",
                "range": row.kind != "stat",
            }
            for i, (query, legend) in enumerate(panel.queries.items())
        ],
    }


def panels_json() -> list[dict[str, Any]]:
    """Return all panels, those of each row after its title, from left to right and downwards."""
    panels: list[dict[str, Any]] = []
    y = 0
    for row in ROWS:
        title = {"type": "row", "title": row.title, "collapsed": False, "panels": []}
        grid = {"x": 0, "y": y, "w": COLUMNS, "h": 1}
        panels.append({"id": len(panels) + 1, **title, "gridPos": grid})
        y += 1
        height = STAT_HEIGHT if row.kind == "stat" else HEIGHT
        side_by_side = COLUMNS // row.width
        for i, panel in enumerate(row.panels):
            x = i % side_by_side * row.width
            line = y + i // side_by_side * height
            panels.append(panel_json(panel, row, len(panels) + 1, x, line))
        y += -(-len(row.panels) // side_by_side) * height
    return panels


def dashboard() -> str:
    """Return the file."""
    variables: list[dict[str, Any]] = [
        {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
    ]
    variables += [
        {
            "name": name,
            "label": label,
            "type": "query",
            "datasource": SOURCE,
            "query": {"query": written_out(query), "refId": name},
            "definition": written_out(query),
            "refresh": 2,
            "includeAll": True,
            "multi": True,
            "allValue": ".*",
            "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
            "sort": 1,
        }
        for name, label, query in VARIABLES
    ]
    return (
        json.dumps(
            {
                "uid": "tidegate",
                "title": "Tidegate",
                "description": "The panels are explained in docs/howto/see-what-happens.md",
                "tags": ["gpu", "tidegate"],
                "schemaVersion": 38,
                "editable": True,
                "graphTooltip": 1,
                "time": {"from": "now-1h", "to": "now"},
                "refresh": "30s",
                "timezone": "browser",
                "templating": {"list": variables},
                "annotations": {"list": []},
                "links": [],
                "panels": panels_json(),
            },
            indent=1,
        )
        + "\n"
    )


if __name__ == "__main__":
    sys.exit(write_or_check({FILE: dashboard()}, "tools/grafana_dashboard.py"))
