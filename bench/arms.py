"""Defines the arms of `bench.quota`, which are containers that run side by side, and its suites.

All arms of all suites run with the governor's default configuration, except that grants always
divide the time: one quantum, one strategy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

OWN_DRIVER = "own-driver.so"
"""Name of the copy of the driver's libcuda in a container's /usr/bin."""


@dataclass(frozen=True)
class ArmContainer:
    """A container in an arm: its shares in percent, and what it runs."""

    compute: int
    unit_us: int = 500
    limit: int | None = None
    """Cap up to which it may be lent time, in percent; None: no more than its guarantee."""
    gap_us: int = 0
    """Pause after each unit, in microseconds."""
    bursts: int = 0
    """Seed of its bursts: it alternates between working for 0.2 to 2 s and resting; 0: none."""
    depth: int = 64
    """Units that it launches ahead."""
    form: str = ""
    """Form of a unit (bench/burner.c); empty: one kernel."""
    duty: int = 70
    """Percentage of the time in which it computes, if it computes in bursts."""
    processes: int = 1
    """Number of processes in the container, which do the same at the same time."""
    memory: str = "1Gi"
    program: str = ""
    """The program that it runs instead of the burner."""
    latency: bool = False
    """Whether its class is latency."""
    goes_around: bool = False
    """Whether it loads a copy of the driver's own libcuda instead of Tidegate's."""

    @property
    def job(self) -> str:
        """The job that it runs, without pauses. Its work is compared with that of the job alone."""
        return self.program or f"burner-{self.unit_us}{'-' if self.form else ''}{self.form}"

    @property
    def is_endless(self) -> bool:
        """Whether it always has work, in one process, so that it waits only for the GPU."""
        return not (self.gap_us or self.bursts or self.processes > 1)

    @property
    def options(self) -> list[str]:
        """Command-line options in addition to those of the job."""
        if self.program:
            return []
        options = ["--depth", str(self.depth)]
        if self.gap_us:
            options += ["--gap-us", str(self.gap_us)]
        if self.bursts:
            options += ["--bursts", str(self.bursts), "--duty", str(self.duty)]
        if self.processes > 1:
            options += ["--processes", str(self.processes)]
        if self.goes_around:
            options += ["--driver", f"/usr/bin/{OWN_DRIVER}"]
        return options


@dataclass(frozen=True)
class Arm:
    """Containers that run at the same time."""

    tenants: tuple[ArmContainer, ...]
    seconds: float = 12
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Options of the governor's configuration."""
    native: bool = True
    """Whether the arm is meaningful without Tidegate: the same work at the same time."""
    script: str = ""
    """What happens during the arm (bench/events.py); empty: nothing, for `seconds`."""
    visitors: tuple[ArmContainer, ...] = ()
    """Containers that come and go in the script."""
    times: int = 0
    """Number of events in the script."""
    real: bool = False
    """Whether it needs a real GPU and PyTorch."""


def strict(*shares: int, unit_us: int = 500, seconds: float = 12) -> Arm:
    """Return an arm of saturating containers with these shares."""
    return Arm(
        tuple(ArmContainer(share, unit_us) for share in shares), seconds, native=len(shares) > 1
    )


def _bursts(duties: tuple[int, ...], *, elastic: bool) -> Arm:
    """Return four containers that work in bursts, always from the same seeds."""
    tenants = tuple(
        ArmContainer(25, limit=100 if elastic else None, bursts=seed, duty=duty)
        for seed, duty in enumerate(duties, 1)
    )
    return Arm(tenants, 8, native=elastic)


def _beside(n: int, neighbour: ArmContainer) -> Arm:
    return Arm((ArmContainer(50), *[neighbour] * n), 6)


NEIGHBOURS = {
    "gpu": ArmContainer(10),
    "memory": ArmContainer(10, form="sweep"),
    "launch": ArmContainer(10, form="tiny", depth=4),
}
LOADS = {
    "load-30": (30, 30, 30, 30),
    "load-60": (60, 60, 60, 60),
    "load-90": (90, 90, 90, 90),
    "uneven-some": (90, 70, 50, 30),
    "uneven-much": (100, 100, 20, 20),
}
"""Percentage of the time in which each of four containers computes."""

SHAPES = {
    "50us": ArmContainer(30, 50),
    "5000us": ArmContainer(30, 5000),
    "20000us": ArmContainer(30, 20_000),
    "50000us": ArmContainer(30, 50_000, depth=8),
    "persistent": ArmContainer(30, 50_000, form="persistent", depth=4),
    "cooperative": ArmContainer(30, form="cooperative"),
    "graph": ArmContainer(30, form="graph", depth=16),
    "copy": ArmContainer(30, form="copy", depth=8),
    "sync": ArmContainer(30, form="sync", depth=0),
}


OUTLASTS = {"20ms": 20_000, "900ms": 900_000, "2000ms": 2_000_000}
"""Durations of kernels that outlast their grant, in microseconds."""


def _scripted() -> dict[str, Arm]:
    """Return the arms with a script, which acts on the containers while they run."""
    return {
        # The second container takes the remaining time: it is not capped, and its guarantee is
        # below half.
        "settle-quota": Arm(
            (ArmContainer(30), ArmContainer(40, limit=100)), native=False, script="set", times=6
        ),
        "settle-neighbour": Arm(
            (ArmContainer(30, limit=100),),
            native=False,
            script="neighbour",
            visitors=(ArmContainer(70),),
            times=3,
        ),
        # The witness's cap leaves 40 % of the time to the victim, nearly all of which is lent to
        # it. The victim therefore holds the GPU in about four of ten kills.
        "killed": Arm(
            (ArmContainer(50, limit=60),),
            native=False,
            script="kill",
            visitors=(ArmContainer(2, limit=100, memory="640Mi"),),
            times=20,
        ),
        "stopped": Arm((ArmContainer(50), ArmContainer(50)), native=False, script="stop", times=20),
    }


def _arms() -> dict[str, Arm]:
    arms = {
        "thirds": strict(45, 30, 15, seconds=20),
        "tight": strict(49, 32, 16, seconds=20),
        "crowd": strict(50, 10, 10, 10, 10),
        "four-50us": strict(25, 25, 25, 25, unit_us=50),
        "four-500us": strict(25, 25, 25, 25),
        "units-20ms": strict(45, 30, 15, unit_us=20_000, seconds=20),
        "elastic": Arm(
            tuple(ArmContainer(25, limit=100, bursts=seed) for seed in (1, 2, 3, 4)), seconds=30
        ),
        "bursts-strict": Arm(
            tuple(ArmContainer(25, bursts=seed) for seed in (1, 2, 3, 4)), seconds=30, native=False
        ),
        "gaps": Arm((ArmContainer(50, 1000, gap_us=500), ArmContainer(50))),
        # Units shorter than a time slice of the GPU's own scheduler, with a pause after each.
        "short": Arm((ArmContainer(10, 50, gap_us=300), ArmContainer(45), ArmContainer(45))),
        "gaps-30": Arm((ArmContainer(30, 1000, gap_us=500), ArmContainer(50))),
        "many": strict(*[3] * 32),
        "sixty-four": Arm((ArmContainer(1, memory="640Mi"),) * 64, 12, native=False),
        "long": Arm((ArmContainer(50, 20_000), ArmContainer(50, 200)), 10),
        "long-30": Arm((ArmContainer(30, 20_000), ArmContainer(70, 200)), 10),
        "decode": Arm(
            (ArmContainer(30, 1100, program="decode-graph", memory="6Gi"), ArmContainer(70)),
            10,
            real=True,
        ),
        **_scripted(),
    }
    for share in range(10, 100, 10):
        arms[f"alone-{share}"] = strict(share, seconds=6)
    for unit_us in (50, 500):
        arms[f"two-{unit_us}us"] = strict(50, 50, unit_us=unit_us, seconds=10)
        arms[f"eight-{unit_us}us"] = strict(*[13] * 4, *[12] * 4, unit_us=unit_us, seconds=10)
    for n in (1, 2, 4, 8):
        arms[f"processes-{n}"] = Arm(
            (ArmContainer(40, processes=n, memory="8Gi"), ArmContainer(60)), 10
        )
    for kind, neighbour in NEIGHBOURS.items():
        for n in range(1, 5):
            arms[f"beside-{n}-{kind}"] = _beside(n, neighbour)
    for name, duties in LOADS.items():
        arms[name] = _bursts(duties, elastic=True)
        arms[f"{name}-strict"] = _bursts(duties, elastic=False)
    for name, unit_us in OUTLASTS.items():
        late = ArmContainer(10, unit_us, depth=1)
        arms[f"outlasts-{name}"] = Arm((late, ArmContainer(50, depth=4)), 40)
    for name, tenant in SHAPES.items():
        arms[f"shape-{name}"] = Arm((tenant, ArmContainer(70)), seconds=10)
    return arms


def _only_hardware() -> dict[str, Arm]:
    """Return arms that only the GPU's own scheduler can run.

    In `around-SHARE`, a program bypasses the control library, but another one does not. In
    `greedy-LIMIT`, a container of class latency has more work than its cap allows, alongside two
    others.
    """
    hardware = {"scheduling": "hardware"}
    settings = {**hardware, "on_violation": "limit"}
    neighbours = (ArmContainer(40, limit=100), ArmContainer(30, limit=100))
    greedy = {
        f"greedy-{limit}": Arm(
            (ArmContainer(20, limit=limit, latency=True), *neighbours), 10, hardware, native=False
        )
        for limit in (20, 30)
    }
    return greedy | {
        f"around-{share}": Arm(
            (ArmContainer(share, form="cooperative", goes_around=True), ArmContainer(90 - share)),
            10,
            settings,
            native=False,
        )
        for share in (10, 30, 60)
    }


ARMS = _arms()
# The same arms with the GPU's own scheduler. They run only if they are named.
HARDWARE = {
    f"hardware-{name}": replace(arm, settings={**arm.settings, "scheduling": "hardware"})
    for name, arm in ARMS.items()
}
# MPS is not available on every node: these arms, too, run only if they are named.
ARMS |= {
    f"mps-{name}": replace(ARMS[name], settings={"strategies": ["mps"]})
    for name in ("thirds", "tight", "four-50us", "four-500us")
}

# These arms, too, run only if they are named.
ARMS |= HARDWARE | _only_hardware()

SUITES: dict[str, tuple[str, ...]] = {
    "table7": ("thirds",),
    "sweep": tuple(f"alone-{share}" for share in range(10, 100, 10)),
    "table8": tuple(f"beside-{n}-{kind}" for kind in NEIGHBOURS for n in range(1, 5)),
    "aggregate": tuple(f"{n}-{unit}us" for unit in (50, 500) for n in ("two", "four", "eight")),
    "elastic": tuple(f"{name}{end}" for name in LOADS for end in ("", "-strict")),
    "longkernels": ("long", "long-30", "units-20ms"),
    "shapes": tuple(f"shape-{name}" for name in SHAPES),
    "graphs": ("shape-graph", "decode"),
    "settle": ("settle-quota", "settle-neighbour"),
    "killed": ("killed", "stopped"),
}
