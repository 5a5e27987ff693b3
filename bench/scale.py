"""Measures sharing in a cluster of 1,000 nodes, and the DRA driver's load on its API server.

    python -m bench.scale run        # a quarter of an hour; continues an earlier run
    python -m bench.scale requests   # half a minute
    python -m bench.scale docs       # tables and figures in docs/explanation/scale.md; --check

The cluster is the one in `kube.simulate`. The requests are counted as the driver makes them: its
publisher and claim driver run for each of many nodes, against an API server that stores and counts.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.plot import Chart, Series, render
from bench.provenance import ROOT, describe_run
from kube.simulate import ARMS, GPUS, ClusterPolicy, Scenario, SimulationOutcome, simulate

RESULTS = ROOT / "bench/results/scale"
SIMULATED = RESULTS / "2026-11-22-cluster.json"
COUNTED = RESULTS / "2026-11-23-requests.json"
PAGE = ROOT / "docs/explanation/scale.md"
FIGURES = ROOT / "docs/figures"
LOADS = (0.7, 0.8, 0.9, 1.0, 1.1)
SHARING = (0.4, 0.6, 0.8, 1.0)
HOURS, WARM = 2.0, 0.5
CLAIM_WRITES = {"create claim", "update claim", "delete claim", "create event"}
SIZES = (1, 10, 100, 1000)
CLAIMS = 20
"""Claims per node in the counted hour."""
STEPS = 60
"""Number of the driver's steps that are run, out of 1,800 per hour. A step without changes sends
nothing."""


def points() -> list[tuple[Scenario, ClusterPolicy]]:
    """Return every run: all arms by load, and two arms by the fraction of sharing tasks."""
    by_load = [
        (Scenario(load=load, hours=HOURS, warm_hours=WARM), arm) for load in LOADS for arm in ARMS
    ]
    by_mix = [
        (Scenario(load=1.0, hours=HOURS, warm_hours=WARM, sharing=part), arm)
        for part in SHARING
        for arm in (ARMS[0], ARMS[3])
    ]
    return by_load + by_mix


def summary(
    scenario: Scenario, arm: ClusterPolicy, outcome: SimulationOutcome, seconds: float
) -> dict[str, Any]:
    """Return a run as the file stores it."""
    return {
        "scenario": asdict(scenario),
        "arm": arm.name,
        "running": round(outcome.running, 4),
        "taken": round(outcome.taken, 4),
        "pods": outcome.pods,
        "left_waiting": outcome.left_waiting,
        "mean_wait_s": round(outcome.mean_wait, 1),
        "wait_s": {str(q): round(outcome.quantile(q), 1) for q in (0.5, 0.9, 0.99)},
        "waited": round(sum(wait > 0 for wait in outcome.waits) / max(len(outcome.waits), 1), 4),
        "seconds": round(seconds, 1),
    }


def load(path: Path) -> list[dict[str, Any]]:
    """Return the runs in a file."""
    runs: list[dict[str, Any]] = json.loads(path.read_text())["runs"]
    return runs


def save(path: Path, runs: list[dict[str, Any]]) -> None:
    """Write a file of runs, with their origin."""
    path.write_text(json.dumps({"about": describe_run(), "runs": runs}, indent=1) + "\n")


def run_cluster() -> None:
    """Simulate the runs that the file does not have yet."""
    done: list[dict[str, Any]] = load(SIMULATED) if SIMULATED.exists() else []
    known = {(json.dumps(one["scenario"]), one["arm"]) for one in done}
    for scenario, arm in points():
        if (json.dumps(asdict(scenario)), arm.name) in known:
            continue
        begin = time.process_time()
        outcome = simulate(scenario, arm)
        done.append(summary(scenario, arm, outcome, time.process_time() - begin))
        save(SIMULATED, done)
        print(json.dumps(done[-1]), file=sys.stderr, flush=True)


@dataclass
class CountingApiServer:
    """An API server that stores objects, and counts the requests and bytes of `kube.cluster`."""

    counts: Counter[str]

    def __init__(self) -> None:
        self.counts = Counter()
        self._slices: dict[str, dict[str, Any]] = {}
        self.claims: dict[str, dict[str, Any]] = {}

    def _count(self, request: str, document: Any) -> None:
        self.counts[request] += 1
        self.counts[f"{request} bytes"] += len(json.dumps(document, separators=(",", ":")))

    def slice(self, name: str) -> dict[str, Any] | None:
        """Return a slice."""
        found = self._slices.get(name)
        self._count("get slice", found)
        return json.loads(json.dumps(found)) if found else None

    def create_slice(self, body: dict[str, Any], *, dry_run: bool = False) -> dict[str, Any]:
        """Store a new slice, which is sent to its watchers."""
        return self._store(body, "dry run" if dry_run else "create slice", dry_run=dry_run)

    def replace_slice(self, body: dict[str, Any], *, dry_run: bool = False) -> dict[str, Any]:
        """Store a slice."""
        return self._store(body, "dry run" if dry_run else "update slice", dry_run=dry_run)

    def _store(self, body: dict[str, Any], request: str, *, dry_run: bool) -> dict[str, Any]:
        self._count(request, body)
        stored: dict[str, Any] = json.loads(json.dumps(body))
        stored["metadata"]["resourceVersion"] = str(sum(self.counts.values()))
        if not dry_run:
            self._slices[body["metadata"]["name"]] = stored
            self._count("watch event", stored)
        return stored

    def delete_slice(self, name: str) -> None:
        """Remove a slice."""
        self._count("delete slice", self._slices.pop(name, None))

    def claim(self, _namespace: str, name: str) -> dict[str, Any]:
        """Return a claim."""
        found = self.claims[name]
        self._count("get claim", found)
        return found


class GrantingGovernor:
    """A governor with eight H200 GPUs, which grants every claim."""

    def __init__(self) -> None:
        self._claims: dict[str, dict[str, Any]] = {}
        self.answer = {
            "driver": "580.159.04",
            "cuda": "13.0",
            "gpus": [
                {
                    "uuid": f"GPU-{i:08x}-0000-4000-8000-000000000000",
                    "index": i,
                    "name": "NVIDIA H200",
                    "memory": 141 << 30,
                    "strategy": "timeslice",
                    "pci": f"0000:{i + 1:02x}:00.0",
                    "numa_node": i // 4,
                    "routes": [{"to": j, "nvlinks": 18} for j in range(GPUS) if j != i],
                }
                for i in range(GPUS)
            ],
        }

    def gpus(self) -> dict[str, Any]:
        """Return the GPUs."""
        return self.answer

    def claim(self, claim: dict[str, Any]) -> list[dict[str, Any]]:
        """Grant a claim."""
        self._claims[claim["uid"]] = claim
        return [{**share, "uuid": share["device"], "minor": None} for share in claim["shares"]]

    def unclaim(self, uid: str) -> None:
        """Forget a claim."""
        self._claims.pop(uid, None)

    def claims(self) -> list[dict[str, Any]]:
        """Return the claims."""
        return list(self._claims.values())


def claim_of(name: str, node: str, device: str) -> dict[str, Any]:
    """Return a ResourceClaim as a scheduler has allocated it."""
    request = {
        "name": "gpu",
        "exactly": {
            "deviceClassName": "gpu-strict.tidegate.gpu",
            "allocationMode": "ExactCount",
            "count": 1,
            "capacity": {"requests": {"memory": "8Gi", "compute": "10"}},
        },
    }
    result = {
        "request": "gpu",
        "driver": "tidegate.gpu",
        "pool": node,
        "device": device,
        "shareID": "5f2f1d1e-3a52-4f0e-9b43-6c0b8d1f0a77",
        "consumedCapacity": {"memory": "8Gi", "compute": "10"},
    }
    parameters = {"apiVersion": "tidegate.gpu/v1", "kind": "TidegateConfig", "strict": True}
    config = {
        "source": "FromClass",
        "requests": ["gpu"],
        "opaque": {"driver": "tidegate.gpu", "parameters": parameters},
    }
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": name, "namespace": "default", "uid": f"uid-{name}"},
        "spec": {"devices": {"requests": [request]}},
        "status": {
            "allocation": {"devices": {"results": [result], "config": [config]}},
            "reservedFor": [{"resource": "pods", "name": name, "uid": f"pod-{name}"}],
        },
    }


def count_requests(nodes: int, directory: Path) -> dict[str, Any]:
    """Run the drivers of `nodes` nodes for an hour; one GPU on each node is lost for ten minutes.

    Claims come one by one and there is always room on the GPUs, so each claim causes an update of
    the slice.
    """
    import structlog

    from kube.cdi import Directory
    from kube.claims import Reference
    from kube.driver import ClaimDriver
    from kube.health import Taint
    from kube.names import TAINT_LOST
    from kube.publish import Publisher
    from kube.recheck import ANNOTATION, Recheck
    from kube.slices import device_name, make_slice

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    server, size = CountingApiServer(), 0
    for number in range(nodes):
        node = f"node-{number:04}"
        governor = GrantingGovernor()
        clock = [0.0]
        publisher = Publisher(server, clock=lambda now=clock: now[0])  # type: ignore[misc]
        driver = ClaimDriver(node, governor, server, Directory(directory / node))
        lost = {governor.answer["gpus"][3]["uuid"]: [Taint(TAINT_LOST, "does-not-answer")]}  # type: ignore[index]
        well = make_slice(node, "node-uid", governor.answer, {})
        ill = make_slice(node, "node-uid", governor.answer, lost)
        device = device_name(governor.answer["gpus"][0]["uuid"])  # type: ignore[index]
        recheck, reference = Recheck(), None
        for step in range(STEPS):
            clock[0] += 60.0
            driver.differs()
            wanted = copy.deepcopy(ill if 30 <= step < 40 else well)
            mark = recheck.next_mark(driver.entered, publisher.mark, clock[0], room=True)
            if mark is not None:
                wanted["metadata"]["annotations"] = {ANNOTATION: mark}
            if publisher.publish(wanted):
                recheck.updated(driver.entered, clock[0])
            if step % (STEPS // CLAIMS) == 0:
                if reference is not None:
                    driver.unprepare(reference)
                name = f"{node}-{step}"
                server.claims[name] = claim_of(name, node, device)
                reference = Reference("default", name, f"uid-{name}")
                driver.prepare(reference)
        size = len(json.dumps(well, separators=(",", ":")))
    return {
        "nodes": nodes,
        "claims_of_each": CLAIMS,
        "slice_bytes": size,
        "counts": dict(sorted(server.counts.items())),
    }


def run_requests() -> None:
    """Count the requests for each size of the cluster."""
    found = []
    for nodes in SIZES:
        with tempfile.TemporaryDirectory() as directory:
            found.append(count_requests(nodes, Path(directory)))
        print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    save(COUNTED, found)


# The page


def cluster_tables(runs: list[dict[str, Any]]) -> str:
    """Return the tables for the simulated cluster."""
    by_load = [one for one in runs if one["scenario"]["sharing"] is None]
    lines = [
        "| requested | | running | taken | mean wait | 90 % wait at most | 99 % | still waiting |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for load in LOADS:
        for arm in ARMS:
            one = next(o for o in by_load if o["scenario"]["load"] == load and o["arm"] == arm.name)
            lines.append(
                f"| {load * 100:.0f} % | {arm.name} | {one['running'] * 100:.1f} % "
                f"| {one['taken'] * 100:.1f} % | {span(one['mean_wait_s'])} "
                f"| {span(one['wait_s']['0.9'])} | {span(one['wait_s']['0.99'])} "
                f"| {one['left_waiting'] / one['pods'] * 100:.1f} % |"
            )
    return "\n".join(lines)


def mix_table(runs: list[dict[str, Any]]) -> str:
    """Return the table by the fraction of the demand that shares GPUs."""
    lines = [
        "| requested as shares | whole GPUs: running | mean wait | packed: running | mean wait |",
        "| --- | --- | --- | --- | --- |",
    ]
    for part in (None, *SHARING):
        cells = []
        for arm in (ARMS[0], ARMS[3]):
            one = next(
                o
                for o in runs
                if o["scenario"]["sharing"] == part
                and o["scenario"]["load"] == 1.0
                and o["arm"] == arm.name
            )
            cells += [f"{one['running'] * 100:.1f} %", span(one["mean_wait_s"])]
        name = "28 % (the trace)" if part is None else f"{part * 100:.0f} %"
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def span(seconds: float) -> str:
    """Return a duration for a table."""
    if seconds < 0.5:
        return "0"
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def request_table(found: list[dict[str, Any]]) -> str:
    """Return the table of the counted requests."""
    lines = [
        "| nodes | writes per node | writes per claim | reads per claim | bytes | events | bytes |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for one in found:
        counts, nodes = one["counts"], one["nodes"]
        claims = nodes * one["claims_of_each"]
        writes = counts["create slice"] + counts.get("update slice", 0)
        of_claims = sum(n for request, n in counts.items() if request in CLAIM_WRITES)
        lines.append(
            f"| {nodes} | {writes / nodes:.2f} | {of_claims / claims:.2f} "
            f"| {counts['get claim'] / claims:.2f} | {counts['get claim bytes'] / claims:.0f} "
            f"| {counts['watch event'] / nodes:.2f} "
            f"| {counts['watch event bytes'] / counts['watch event']:.0f} |"
        )
    return "\n".join(lines)


def figure(runs: list[dict[str, Any]], key: str, words: dict[str, str], unit: float) -> str:
    """Return a figure over the load, with a line for each arm."""
    series = [
        Series(
            arm.name,
            [
                (one["scenario"]["load"] * 100, one[key] * unit)
                for one in runs
                if one["arm"] == arm.name and one["scenario"]["sharing"] is None
            ],
        )
        for arm in ARMS
    ]
    return render(
        Chart(
            title=words["title"],
            subtitle="1,000 nodes with 8 GPUs each; simulated",
            description=words["description"],
            x_label="GPU time requested, % of all GPUs",
            y_label=words["y"],
            series=series,
            y_min=float(words.get("low", "0")),
        )
    )


def document() -> dict[Path, str]:
    """Return the page and its figures, by path; raise ValueError if the page lacks a marker."""
    runs, found = load(SIMULATED), load(COUNTED)
    page = PAGE.read_text()
    for name, table in (
        ("cluster", cluster_tables(runs)),
        ("mix", mix_table(runs)),
        ("requests", request_table(found)),
    ):
        begin, end = f"<!-- {name}: python -m bench.scale docs -->\n", f"<!-- end of {name} -->"
        before, _, rest = page.partition(begin)
        _, ended, after = rest.partition(end)
        if not ended:
            raise ValueError(f"{PAGE} lacks {begin.strip()} or, after it, {end}")
        page = f"{before}{begin}{table}\n{end}{after}"
    running = {
        "title": "GPU time of running pods",
        "y": "% of all GPUs",
        "low": "60",
        "description": "By load and by method of allocation: whole GPUs level off first.",
    }
    waiting = {
        "title": "How long a pod waits for its GPU",
        "y": "minutes, mean",
        "description": "By load and by method of allocation: with whole GPUs, pods begin to wait"
        " at a load of 90 %.",
    }
    return {
        PAGE: page,
        FIGURES / "scale-running.svg": figure(runs, "running", running, 100),
        FIGURES / "scale-waiting.svg": figure(runs, "mean_wait_s", waiting, 1 / 60),
    }


def main() -> int:
    """Run the simulation, count the requests, or write the documents."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=("run", "requests", "docs"))
    parser.add_argument(
        "--check", action="store_true", help="only check that documents are current"
    )
    args = parser.parse_args()
    RESULTS.mkdir(parents=True, exist_ok=True)
    if args.action == "docs":
        try:
            files = document()
        except ValueError as e:
            print(f"scale: {e}", file=sys.stderr)
            return 1
        stale = [p for p, text in files.items() if not p.exists() or p.read_text() != text]
        if args.check and stale:
            names = ", ".join(str(path.relative_to(ROOT)) for path in stale)
            print(f"not current: {names}; run: python -m bench.scale docs")
            return 1
        for path, text in files.items():
            if path in stale:
                path.write_text(text)
        print(f"{len(files)} files are current")
        return 0
    if args.action == "run":
        run_cluster()
    else:
        run_requests()
    return 0


if __name__ == "__main__":
    sys.exit(main())
