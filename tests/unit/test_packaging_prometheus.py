"""Check the dashboard and the alerts of packaging/ with Prometheus's own tool and the metrics."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.exposition import generate_latest

from governor.metrics import METRICS, _Snapshot, collect
from tests.conftest import lack
from tests.unit.governor_world import MetricsWorld
from tools import grafana_dashboard

ROOT = Path(__file__).resolve().parents[2]
ALERTS = ROOT / "packaging/prometheus/tidegate-alerts.yaml"
DASHBOARD = ROOT / "packaging/grafana/tidegate.json"
SCENES = Path(__file__).with_name("tidegate-alerts.test.yaml")
HOWTO = ROOT / "docs/howto/see-what-happens.md"

LABELS = {metric.shown: set(metric.labels) for metric in METRICS}
SCRAPED = {"instance", "job"}
"""Labels that Prometheus adds to what it scrapes."""


@pytest.fixture(scope="module")
def promtool() -> str:
    if found := shutil.which("promtool"):
        return found
    done = subprocess.run(
        [ROOT / "tools/debian-programs", "promtool"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        lack(f"needs promtool: {done.stderr.strip()}")
    return f"{done.stdout.strip()}/usr/bin/promtool"


def run(*command: str | Path, text: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, input=text, check=False, timeout=60
    )


def rules() -> list[dict[str, Any]]:
    document = yaml.safe_load(ALERTS.read_text())
    return [rule for group in document["groups"] for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
    return [panel for panel in found if panel["type"] != "row"]


def queries() -> list[str]:
    """Return the dashboard's queries, with values for Grafana's variables."""
    filled = []
    for panel in panels():
        for target in panel["targets"]:
            text = target["expr"]
            for name, value in (("$__rate_interval", "5m"), ("$__range", "1h")):
                text = text.replace(name, value)
            filled.append(re.sub(r"\$[a-z]+", ".*", text))
    return filled


def named(expression: str) -> set[str]:
    return set(re.findall(r"\btidegate_[a-z_]+", expression))


def test_promtool_accepts_the_rules(promtool: str) -> None:
    done = run(promtool, "check", "rules", ALERTS)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{len(rules())} rules found" in done.stdout


def test_the_rules_fire_where_they_should_and_nowhere_else(promtool: str, tmp_path: Path) -> None:
    shutil.copy(ALERTS, tmp_path)
    scenes = Path(shutil.copy(SCENES, tmp_path))
    done = run(promtool, "test", "rules", scenes)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SUCCESS" in done.stdout


def test_each_alert_fires_in_a_scene(promtool: str, tmp_path: Path) -> None:
    """If a rule is mutated so that it never fires, its scene fails."""
    text, scenes = ALERTS.read_text(), tmp_path / SCENES.name
    document = yaml.safe_load(SCENES.read_text())
    for rule in rules():
        # Only the rule's own scenes are run: promtool takes 1 s for all of them.
        own = [one for one in document["tests"] if f'"{rule["alert"]}"' in str(one)]
        assert own, rule["alert"]
        scenes.write_text(yaml.safe_dump(document | {"tests": own}))
        mutated = yaml.safe_load(text)
        for group in mutated["groups"]:
            for one in group["rules"]:
                if one["alert"] == rule["alert"]:
                    one["expr"] = f"({one['expr']}) and on() vector(1) == 2"
        (tmp_path / ALERTS.name).write_text(yaml.safe_dump(mutated))
        assert run(promtool, "test", "rules", scenes).returncode != 0, rule["alert"]


def test_every_metric_that_is_named_exists() -> None:
    expressions = [rule["expr"] for rule in rules()] + queries()
    variables = json.loads(DASHBOARD.read_text())["templating"]["list"]
    expressions += [one["query"]["query"] for one in variables if one["type"] == "query"]
    for expression in expressions:
        for name in named(expression):
            assert name in LABELS, f"{name} in {expression}"
        known = SCRAPED.union(*(LABELS[name] for name in named(expression)))
        wanted = re.findall(r"[{,]\s*([a-z_]+)\s*(?:=~|!~|=|!=)", expression)
        for group in re.findall(r"\b(?:by|without|on)\s*\(([^)]*)\)", expression):
            wanted += [label.strip() for label in group.split(",") if label.strip()]
        assert set(wanted) <= known, expression


def test_texts_of_alerts_use_only_labels_that_the_alerts_have() -> None:
    for rule in rules():
        by = re.search(r"\bby \(([^)]*)\)", rule["expr"])
        has = set(by[1].split(", ")) if by else SCRAPED.union(*map(LABELS.get, named(rule["expr"])))
        for text in rule["annotations"].values():
            assert set(re.findall(r"\$labels\.([a-z_]+)", text)) <= has, rule["alert"]
        assert set(rule["annotations"]) == {"summary", "description"}
        assert rule["labels"]["severity"] in ("critical", "warning", "info")


def test_queries_of_panels_have_results(promtool: str, tmp_path: Path) -> None:
    """Each query becomes an alert on its absence, with one series of each metric. None may fire.

    In this way Prometheus itself finds labels that do not match, and functions for the wrong kind
    of metric.
    """
    values = {"instance": "n", "job": "tidegate"}
    series = []
    for metric in METRICS:
        labels = ",".join(
            f'{label}="{values.get(label, "x")}"' for label in (*sorted(SCRAPED), *metric.labels)
        )
        growth = "1+60x30" if metric.kind == "counter" else "1x30"
        series.append({"series": f"{metric.shown}{{{labels}}}", "values": growth})
    absent = [
        {"alert": f"Absent{i}", "expr": f"absent({query})"} for i, query in enumerate(queries())
    ]
    assert len(absent) >= 25
    (tmp_path / "absent.yaml").write_text(
        yaml.safe_dump({"groups": [{"name": "absent", "rules": absent}]})
    )
    expected = {"expr": "ALERTS", "eval_time": "20m", "exp_samples": []}
    (tmp_path / "test.yaml").write_text(
        yaml.safe_dump(
            {
                "rule_files": ["absent.yaml"],
                "tests": [
                    {"interval": "1m", "input_series": series, "promql_expr_test": [expected]}
                ],
            }
        )
    )
    done = run(promtool, "test", "rules", tmp_path / "test.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    # Without the series, the same test fails.
    document = yaml.safe_load((tmp_path / "test.yaml").read_text())
    document["tests"][0]["input_series"] = series[:1]
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(document))
    assert run(promtool, "test", "rules", tmp_path / "test.yaml").returncode != 0


def test_promtool_accepts_the_metrics(promtool: str, tmp_path: Path, build_dir: Path) -> None:
    async def scrape() -> str:
        world = MetricsWorld(tmp_path, build_dir / "libcontrol")
        try:
            await world.admit("one")
            return generate_latest(_Snapshot(collect(world.server))).decode()
        finally:
            world.close()

    done = run(promtool, "check", "metrics", text=asyncio.run(scrape()))
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_the_dashboard_is_consistent() -> None:
    document = json.loads(DASHBOARD.read_text())
    assert DASHBOARD.read_text() == grafana_dashboard.dashboard()
    identifiers = [panel["id"] for panel in document["panels"]]
    assert identifiers == sorted(set(identifiers))
    variables = {one["name"] for one in document["templating"]["list"]}
    used = set(re.findall(r"\$\{?([a-z]+)\b", json.dumps(document)))
    assert used - {"__rate_interval", "__range"} <= variables
    assert variables - used == set()
    taken = set()
    for panel in document["panels"]:
        grid = panel["gridPos"]
        assert grid["x"] + grid["w"] <= 24
        cells = {
            (x, y)
            for x in range(grid["x"], grid["x"] + grid["w"])
            for y in range(grid["y"], grid["y"] + grid["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
    for panel in panels():
        assert panel["title"]
        assert panel["description"]
        assert {target["datasource"]["uid"] for target in panel["targets"]} == {"${source}"}


def test_every_alert_is_explained() -> None:
    told = HOWTO.read_text()
    for rule in rules():
        assert f"| `{rule['alert']}` |" in told, rule["alert"]
    for name in re.findall(r"\| `(Tidegate[A-Za-z]+)` \|", told):
        assert name in {rule["alert"] for rule in rules()}, name
