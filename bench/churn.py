"""Measures whether guarantees hold while containers come and go.

`python -m bench.churn` runs a container that always has work, the witness, and starts others with
random shares and kinds of work alongside it. Some of these end on their own; others are killed with
SIGKILL. With --kills the governor is killed as well, every 20 s. From the stamps of each container
the program computes the share of GPU time that the container got, and its longest wait for the GPU.
It writes churn.json.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.arms import Arm, ArmContainer
from bench.demo import find_machine, name_gpu
from bench.events import now
from bench.machine import ROOT, Machine, MachineError
from bench.node import BenchNode, Running
from bench.progress import NS_PER_S, Profile, Progress, ProgressError, read_stamps
from bench.provenance import describe_run
from bench.quota import find_profiles, start_one
from bench.quota_measure import profile_of, waits
from governor.client import ask
from governor.errors import TidegateError
from vdriver.errors import VdriverError

WITNESS = ArmContainer(20, memory="600Mi")
"""The container that always has work, from the beginning to the end of the run."""

_KINDS = {
    "saturating": ArmContainer(10),
    "tiny": ArmContainer(10, 50),
    "long": ArmContainer(10, 20_000, depth=8),
    "persistent": ArmContainer(10, 50_000, form="persistent", depth=4),
    "graph": ArmContainer(10, form="graph", depth=16),
    "pauses": ArmContainer(10, 1000, gap_us=500),
    "bursts": ArmContainer(10, bursts=1),
    "processes": ArmContainer(10, processes=2),
    "latency": ArmContainer(10, gap_us=4000, latency=True),
}

KINDS = {name: replace(kind, memory=f"{600 * kind.processes}Mi") for name, kind in _KINDS.items()}
"""The kinds of work; the simulated GPU's workload has only `saturating` and `tiny`."""

SIMULATED = ("saturating", "tiny")
MOST = 8
"""Maximum number of containers in addition to the witness."""

SHARES = (5, 10, 15, 20, 30)
LIVES_S = (1.5, 3.0, 6.0, 12.0)
BETWEEN_S = (0.0, 0.2, 1.0)
"""Pauses before the next container is started, in seconds; one of them is drawn each time."""

KILL_EVERY_S = 20.0
SETTLE_NS = NS_PER_S
"""Time after a container's first unit from which its share counts, in ns."""

LEAST_NS = NS_PER_S
"""Shortest time over which a share is computed, in ns."""

DISTURBED_NS = 3 * NS_PER_S
"""Time after the governor is killed during which shares are not expected to hold, in ns: nothing
divides the GPU until the next governor has taken over."""


@dataclass
class Visit:
    """A container in the run."""

    kind: str
    tenant: ArmContainer
    container: Running
    killed_at: float | None
    """Time at which it is killed, in seconds of the monotonic clock; before `begin`, counted from
    the beginning of its work. None if it ends on its own."""
    begun: float | None = None
    status: int | None = None
    killed: bool = field(default=False)

    def begin(self) -> None:
        """Let the container begin to work once it is set up."""
        if self.begun is None and (self.container.out / "begin.ready").exists():
            (self.container.out / "begin").touch()
            self.begun = time.monotonic()
            if self.killed_at is not None:
                self.killed_at += self.begun

    def end(self, node: BenchNode) -> bool:
        """Kill the container if that is due; return whether it has ended."""
        is_due = self.begun is not None and self.killed_at is not None and not self.killed
        if is_due and time.monotonic() >= (self.killed_at or 0):
            self.killed = True
            with contextlib.suppress(subprocess.CalledProcessError):
                node.kill(self.container)
        self.status = self.container.process.poll()
        return self.status is not None


class Churn:
    """Starts and ends containers at random."""

    def __init__(self, node: BenchNode, kinds: Mapping[str, ArmContainer], seed: int) -> None:
        self.node = node
        self.kinds = kinds
        self.draw = random.Random(seed)  # noqa: S311
        self.present: list[Visit] = []
        self.ended: list[Visit] = []
        self._next_at = 0.0

    def start(self) -> None:
        """Start a container, if it is time for one and there is room."""
        room = 100 - WITNESS.compute - sum(one.tenant.compute for one in self.present)
        shares = [share for share in SHARES if share <= room]
        if not shares or len(self.present) >= MOST or time.monotonic() < self._next_at:
            return
        kind = self.draw.choice(list(self.kinds))
        share = self.draw.choice(shares)
        tenant = replace(
            self.kinds[kind],
            compute=share,
            limit=self.draw.choice((share, min(100, 2 * share), 100)),
        )
        life = self.draw.choice(LIVES_S)
        killed_at = life * self.draw.random() if self.draw.random() < 0.3 else None
        container = start_one(self.node, tenant, life)
        self.present.append(Visit(kind, tenant, container, killed_at))
        self._next_at = time.monotonic() + self.draw.choice(BETWEEN_S)

    def step(self) -> None:
        """Let ready containers begin to work, kill those that are due, and remove ended ones."""
        for visit in [*self.present]:
            visit.begin()
            if visit.end(self.node):
                self.present.remove(visit)
                self.ended.append(visit)
                self.node.running.remove(visit.container)

    def finish(self) -> None:
        """Wait up to 30 s for the remaining containers to end."""
        deadline = time.monotonic() + 30
        while self.present and time.monotonic() < deadline:
            self.step()
            time.sleep(0.05)


def describe(
    visit: Visit, profile: Profile, disturbed: Sequence[tuple[int, int]]
) -> dict[str, Any]:
    """Return, from a container's own stamps, its share in percent and its longest wait."""
    tenant = visit.tenant
    row: dict[str, Any] = {
        "kind": visit.kind, "compute": tenant.compute, "limit": tenant.limit,
        "killed": visit.killed, "status": visit.status,
    }  # fmt: skip
    if visit.status and not visit.killed:
        output = (visit.container.bundle / "output").read_text(errors="replace")
        row["error"] = " ".join(output.split())[-200:]
        return row
    if not tenant.is_endless:
        return row
    try:
        stamps = read_stamps(visit.container.out / "progress.bin")
    except (ProgressError, OSError):
        return row  # it was killed before its first unit
    begin, end = stamps[0].time + SETTLE_NS, stamps[-1].time
    if end - begin < LEAST_NS:
        return row
    row |= {
        "seconds": round((end - begin) / NS_PER_S, 2),
        "share": round(100 * Progress(stamps, profile).share(begin, end), 2),
        "wait_ms": round(waits(stamps, profile, begin, end)["most_us"] / 1000, 1),
        "disturbed": any(a < end and b > begin for a, b in disturbed),
    }
    return row


def measure(machine: Machine, args: argparse.Namespace) -> dict[str, Any]:
    """Run containers for the requested time; return the measurements."""
    kinds = {
        name: tenant
        for name, tenant in KINDS.items()
        if machine.kind == "nvidia" or name in SIMULATED
    }
    arms = {"churn": Arm((WITNESS, *kinds.values()))}
    profiles = find_profiles(machine, arms, args.solo)
    settings = {"scheduling": args.scheduling}
    kills: list[tuple[int, int]] = []
    with BenchNode(machine, settings=settings, keep_machine=True) as node:
        gpu = asdict(name_gpu(node))
        witness = Visit("witness", WITNESS, start_one(node, WITNESS, args.seconds + 5), None)
        churn = Churn(node, kinds, args.seed)
        node.wait_ready([witness.container.out / "begin.ready"], 60)
        witness.begin()
        began = time.monotonic()
        kill_at = began + KILL_EVERY_S
        while time.monotonic() < began + args.seconds:
            churn.start()
            churn.step()
            if args.kills and time.monotonic() >= kill_at:
                killed = now()
                node.stop_governor(signal.SIGKILL)
                node.start_governor()
                kills.append((killed, now() + DISTURBED_NS))
                kill_at = time.monotonic() + KILL_EVERY_S
                print(f"governor killed; {len(churn.ended)} containers have ended", flush=True)
            time.sleep(0.02)
        churn.finish()
        if node.wait(witness.container, 60):
            raise MachineError(f"{witness.container.name} failed; see its output")
        output = json.loads(witness.container.output.strip().splitlines()[-1])
        ahead_ns = int(output.get("clock_ns", 0))
        disturbed = [(a + ahead_ns, b + ahead_ns) for a, b in kills]
        time.sleep(1)
        left = len(ask(node.config, "list")["containers"])
        node.check_scheduling()
        stamps = read_stamps(witness.container.out / "progress.bin")
        profile = profile_of(profiles, WITNESS.job)
        run = Progress(stamps, profile)
        edges = range(stamps[0].time + SETTLE_NS, stamps[-1].time - NS_PER_S, NS_PER_S)
        return {
            "gpu": gpu,
            "scheduling": args.scheduling,
            "seed": args.seed,
            "n_kills": len(kills),
            "left": left + len(churn.present),
            "witness": {
                "compute": WITNESS.compute,
                "shares": [round(100 * run.share(a, a + NS_PER_S), 2) for a in edges],
                "disturbed": [any(c < a + NS_PER_S and d > a for c, d in disturbed) for a in edges],
                "waits": waits(stamps, profile, edges[0], edges[-1] + NS_PER_S),
            },
            "containers": [
                describe(visit, profile_of(profiles, visit.tenant.job), disturbed)
                for visit in churn.ended
            ],
        }


def summarise(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of a run, such as the number of points by which guarantees were missed."""
    witness, containers = result["witness"], result["containers"]
    quiet = [one for one in containers if "share" in one and not one["disturbed"]]
    short = sorted(one["share"] - one["compute"] for one in quiet)
    over = [one["share"] - one["limit"] for one in quiet]
    undisturbed = [
        share
        for share, disturbed in zip(witness["shares"], witness["disturbed"], strict=True)
        if not disturbed
    ]
    return {
        "containers": len(containers),
        "killed": sum(one["killed"] for one in containers),
        "failed": sum("error" in one for one in containers),
        "left": result["left"],
        "measured": len(quiet),
        "furthest_below": round(short[0], 2) if short else None,
        "below_1": sum(one < -1 for one in short),
        "furthest_above_cap": round(max(over), 2) if over else None,
        "witness_seconds": len(undisturbed),
        "witness_least": min(undisturbed, default=None),
        "witness_wait_ms": round(witness["waits"]["most_us"] / 1000, 1),
    }


def main(argv: list[str] | None = None) -> int:
    """Measure; return 1 if that failed."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.churn", description=__doc__.split("\n", maxsplit=1)[0]
    )
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=1, help="seed for starts and kills (1)")
    parser.add_argument("--kills", action="store_true", help="kill the governor every 20 s")
    parser.add_argument("--scheduling", choices=["hardware", "gate"], default="hardware")
    parser.add_argument(
        "--solo", type=float, default=3.0, help="duration of each job's solo run (default: 3 s)"
    )
    parser.add_argument("--simulated", action="store_true", help="always use a simulated GPU")
    parser.add_argument("--output", type=Path, default=ROOT / "build/churn")
    parser.add_argument("--build", type=Path, default=ROOT / "build/meson")
    args = parser.parse_args(argv)
    args.compile = False
    args.output, args.build = args.output.resolve(), args.build.resolve()
    shutil.rmtree(args.output, ignore_errors=True)
    args.output.mkdir(parents=True)
    try:
        machine = find_machine(args, args.output / "machine", args.build)
        try:
            result = measure(machine, args)
        finally:
            machine.close()
    except (
        MachineError, ProgressError, TidegateError, VdriverError, subprocess.SubprocessError,
    ) as e:  # fmt: skip
        print(f"churn: {e}", file=sys.stderr)
        return 1
    result |= {"run": describe_run(), "summary": summarise(result)}
    (args.output / "churn.json").write_text(json.dumps(result, separators=(",", ":")) + "\n")
    print(json.dumps(result["summary"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
