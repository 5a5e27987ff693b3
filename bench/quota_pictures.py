"""Draws docs/figures/quota-*.svg, the pictures that explain quotas.

`python -m bench.quota_pictures` writes the pictures in docs/explanation/quotas.md; `--check` fails
if they are stale. Most of them show decisions by the real arbiter, which the governor uses as well
(`make build` builds it). The clock is virtual, and the containers are a model: each runs units
of 0.2 ms for as long as it is awake. So the pictures are the same on any machine. Results from real
GPUs are in docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from bench.plot import DARK, FONT, LIGHT, Theme, nice_ticks, number
from governor.arbiter import NEVER, NO_TENANT, WHOLE, Arbiter, arbiter_config, load_library
from governor.config import Config

ROOT = Path(__file__).resolve().parent.parent
FIGURES = ROOT / "docs/figures"
MS = 1_000_000
UNIT = MS // 5
HAND_OVER = 150_000


@dataclass
class ModelContainer:
    """A container in the model: it wants the GPU unless it is asleep."""

    name: str
    guarantee: int
    limit: int
    asleep: tuple[int, int] = (0, 0)
    """Start and end of its sleep, in ns."""
    done: int = 0
    lent: int = 0
    """The part of `done` that is known to have been lent."""
    grants: list[tuple[int, int, bool]] = field(default_factory=list)
    """Start and end of each piece of work, and whether its time was lent."""

    def wants(self, now: int) -> bool:
        """Return whether it has work."""
        return not self.asleep[0] <= now < self.asleep[1]

    def share(self, begin: int, end: int) -> float:
        """Return the percentage of the GPU's time for which it ran between two times."""
        worked = sum(max(0, min(stop, end) - max(start, begin)) for start, stop, _ in self.grants)
        return 100 * worked / (end - begin)


def play(library: Any, jobs: Sequence[ModelContainer], until: int) -> None:
    """Have the arbiter share a GPU among the jobs for `until` ns, and record their grants."""
    config = Config(spin_us=250, lookahead_us=120)
    with Arbiter(library, arbiter_config(config)) as arbiter:
        numbers = [
            arbiter.add(job.guarantee * WHOLE // 100, job.limit * WHOLE // 100, 0) for job in jobs
        ]
        changes = sorted({at for job in jobs for at in job.asleep})
        now, last = 0, NO_TENANT
        while now < until:
            for tenant, job in zip(numbers, jobs, strict=True):
                arbiter.sign(tenant, now)
                arbiter.want(tenant, now, want=job.wants(now))
                arbiter.busy(tenant, job.done)
            view = arbiter.step(now)
            later = [at for at in changes if at > now]
            if view.holder == NO_TENANT:
                now = min([view.wake_ns, *later, until])
                continue
            job = jobs[numbers.index(view.holder)]
            # Whether a grant was lent is known only when the same container's next one begins.
            lent = arbiter.stats(view.holder).lent_ns
            if job.grants and lent > job.lent:
                job.grants[-1] = (*job.grants[-1][:2], True)
            job.lent = lent
            start = view.start_ns + (HAND_OVER if view.holder != last else 0)
            last = view.holder
            # The container runs until it falls asleep or its grant ends. The deadline may change
            # during the grant.
            while view.holder == last:
                asleep = job.asleep[0] if job.asleep[0] > start else NEVER
                end = min(view.deadline_ns, asleep, until)
                decided = view.deadline_ns - MS // 2
                if view.deadline_ns != NEVER and now >= min(decided, end):
                    break
                now = min([decided if view.deadline_ns != NEVER else NEVER, end, *later])
                if now >= end:
                    break
                for tenant, other in zip(numbers, jobs, strict=True):
                    arbiter.sign(tenant, now)
                    arbiter.want(tenant, now, want=other.wants(now))
                view = arbiter.step(now)
                later = [at for at in changes if at > now]
            units = max(1, -(-(end - start - UNIT // 2) // UNIT))
            stop = min(start + units * UNIT, max(end, start + UNIT))
            now = max(now, stop)
            job.done += stop - start
            job.grants.append((start, stop, False))
            arbiter.busy(last, job.done)
            arbiter.want(last, now, want=job.wants(now))
            arbiter.released(now, processes=1)


@dataclass(frozen=True)
class Words:
    """The title, subtitle and description of a picture."""

    title: str
    subtitle: str
    description: str


def style() -> str:
    """Return the CSS rules for the light and the dark theme."""

    def rules(theme: Theme) -> str:
        colours = "".join(
            f".f{i}{{fill:{colour}}}.h{i}{{stroke:{colour}}}"
            for i, colour in enumerate(theme.lines[:4])
        )
        return (
            f".paper{{fill:{theme.paper};stroke:{theme.edge}}}.ink{{fill:{theme.ink}}}"
            f".faint{{fill:{theme.faint}}}.grid{{stroke:{theme.grid}}}.axis{{stroke:{theme.faint}}}"
            f".row{{fill:{theme.grid}}}{colours}"
        )

    return (
        f"text{{font-family:{FONT};font-size:13px}}line{{stroke-linecap:round}}"
        f"{rules(LIGHT)}@media (prefers-color-scheme:dark){{{rules(DARK)}}}"
    )


def document(words: Words, height: int, parts: Sequence[str], hatched: int = 0) -> str:
    """Return a self-contained SVG document that defines `hatched` hatch patterns."""
    width = 960
    patterns = "".join(
        f'<pattern id="p{i}" width="6" height="6" patternUnits="userSpaceOnUse" '
        f'patternTransform="rotate(45)"><line x1="0" y1="0" x2="0" y2="6" class="h{i}" '
        'stroke-width="5"/></pattern>'
        for i in range(hatched)
    )
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" aria-labelledby="title desc">'
    )
    return "\n".join(
        [
            head,
            f'<title id="title">{escape(words.title)}</title>',
            f'<desc id="desc">{escape(words.description)}</desc>',
            f"<style>{style()}</style>",
            *([f"<defs>{patterns}</defs>"] if patterns else []),
            f'<rect x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="8" class="paper"/>',
            text(28, 36, words.title, "ink", 'style="font-size:19px;font-weight:600"'),
            text(28, 58, words.subtitle, "faint"),
            *parts,
            "</svg>\n",
        ]
    )


def text(x: float, y: float, words: str, css: str, extra: str = "") -> str:
    """Return a text element at a position."""
    return f'<text x="{number(x)}" y="{number(y)}" class="{css}" {extra}>{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, paint: str) -> str:
    """Return a rectangle; `paint` is its class or its fill."""
    place = f'x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}"'
    return f"<rect {place} {paint}/>"


LEFT, RIGHT, ROW, BAR = 150.0, 800.0, 52.0, 34.0


def strips(words: Words, jobs: Sequence[ModelContainer], begin: int, end: int) -> str:
    """Draw a row for each job that shows when it ran, hatched where the time was lent."""
    top = 84.0
    bottom = top + ROW * len(jobs)

    def at(moment: int) -> float:
        return LEFT + (min(max(moment, begin), end) - begin) / (end - begin) * (RIGHT - LEFT)

    parts = []
    for tick in nice_ticks(0, (end - begin) / MS, 10):
        x = at(begin + int(tick * MS))
        parts.append(
            f'<line x1="{number(x)}" y1="{number(top)}" x2="{number(x)}" '
            f'y2="{number(bottom + 4)}" class="grid"/>'
        )
        parts.append(text(x, bottom + 21, number(tick), "faint", 'text-anchor="middle"'))
    parts.append(text((LEFT + RIGHT) / 2, bottom + 42, "ms", "ink", 'text-anchor="middle"'))
    for row, job in enumerate(jobs):
        y = top + ROW * row + (ROW - BAR) / 2
        parts.append(box(LEFT, y, RIGHT - LEFT, BAR, 'class="row" opacity=".45"'))
        parts.append(text(28, y + 15, job.name, f"f{row}", 'style="font-weight:600"'))
        cap = f" to {job.limit} %" if job.limit != job.guarantee else " %"
        parts.append(text(28, y + 31, f"{job.guarantee}{cap}", "faint", 'style="font-size:12px"'))
        for start, stop, lent in job.grants:
            if stop > begin and start < end:
                paint = f'fill="url(#p{row})"' if lent else f'class="f{row}"'
                parts.append(box(at(start), y, at(stop) - at(start), BAR, paint))
        got = f"{job.share(begin, end):.0f} % of this time"
        parts.append(text(RIGHT + 14, y + 22, got, "ink"))
    key = bottom + 70
    parts.append(box(LEFT, key - 11, 26, 13, 'class="f0"'))
    parts.append(text(LEFT + 34, key, "guaranteed", "faint", 'style="font-size:12px"'))
    if any(lent for job in jobs for *_, lent in job.grants):
        parts.append(box(LEFT + 130, key - 11, 26, 13, 'fill="url(#p0)"'))
        parts.append(text(LEFT + 164, key, "lent", "faint", 'style="font-size:12px"'))
    return document(words, int(key + 22), parts, hatched=len(jobs))


def guarantees(library: Any) -> str:
    """Draw three containers that always have work."""
    jobs = [
        ModelContainer("alpha", 45, 45),
        ModelContainer("beta", 30, 30),
        ModelContainer("gamma", 15, 15),
    ]
    play(library, jobs, 1_300 * MS)
    return strips(
        Words(
            "One container at a time, each for its guaranteed share",
            "Three containers that always have work, no borrowing: 45, 30 and 15 % of the GPU",
            "Grants of 4 to 8 ms in turn; for a tenth of the time no container may use the GPU.",
        ),
        jobs,
        1_000 * MS,
        1_100 * MS,
    )


def lending(library: Any) -> str:
    """Draw what others get while one container is idle, and how it gets its time back."""
    asleep = (1_030 * MS, 1_075 * MS)
    jobs = [
        ModelContainer("owner", 50, 100, asleep),
        ModelContainer("borrower", 20, 100),
        ModelContainer("capped", 20, 20),
    ]
    play(library, jobs, 1_300 * MS)
    return strips(
        Words(
            "Idle time is lent, and comes back with the next grant",
            "The owner has nothing to do from 30 to 75 ms; one neighbour may borrow, the other may "
            "not",
            "While the owner is idle the borrower gets its time; the capped container does not.",
        ),
        jobs,
        1_000 * MS,
        1_120 * MS,
    )


def memory() -> str:
    """Draw how a GPU's memory is promised to containers."""
    whole = 81_408  # MiB, as in docs/reference/placement.md
    config = Config()
    reserve, context = config.memory_reserve >> 20, config.context_memory >> 20
    parts_of = [("alpha", 32_768, 24_000), ("beta", 16_384, 9_000), ("gamma", 10_240, 10_240)]
    left, right, top, tall = 28.0, 932.0, 92.0, 56.0
    scale = (right - left) / whole
    out = [box(left, top, right - left, tall, 'class="row" opacity=".45"')]
    x = left
    for index, (name, quota, used) in enumerate(parts_of):
        wide = quota * scale
        out.append(box(x, top, wide - 2, tall, f'fill="url(#p{index})" opacity=".45"'))
        out.append(box(x, top, used * scale - 2, tall, f'class="f{index}"'))
        label = f"{name}: {quota >> 10} GiB"
        out.append(text(x, top + tall + 20, label, f"f{index}", 'style="font-weight:600"'))
        use = "all of it used" if used == quota else f"{used / 1024:.1f} GiB used"
        out.append(text(x, top + tall + 37, use, "faint", 'style="font-size:12px"'))
        x += wide
    free = whole - reserve - sum(quota for _, quota, _ in parts_of)
    out.append(text(x + 8, top + tall + 20, f"left to grant: {free / 1024:.1f} GiB", "ink"))
    out.append(
        box(
            right - max(3, reserve * scale),
            top,
            max(3, reserve * scale),
            tall,
            'class="axis faint"',
        )
    )
    out.append(
        text(
            right,
            top - 10,
            f"memory_reserve: {reserve} MiB",
            "faint",
            'text-anchor="end" style="font-size:12px"',
        )
    )
    out.append(
        text(
            left,
            top + tall + 68,
            f"Each process that uses the GPU takes {context} MiB of its container's quota for its "
            "context (context_memory).",
            "faint",
            'style="font-size:12px"',
        )
    )
    return document(
        Words(
            "Memory is never promised twice",
            "Example: a GPU with 79.5 GiB, and three containers. Solid: used; hatched: unused, but "
            "reserved for the container",
            "Quotas lie side by side in the GPU's memory; what is left can be granted.",
        ),
        int(top + tall + 92),
        out,
        hatched=len(parts_of),
    )


def pictures(build: Path) -> dict[Path, str]:
    """Return every picture, by file."""
    library = load_library(build / "libcontrol")
    return {
        FIGURES / "quota-guarantees.svg": guarantees(library),
        FIGURES / "quota-lending.svg": lending(library),
        FIGURES / "quota-memory.svg": memory(),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Write the pictures, or check them."""
    parser = argparse.ArgumentParser(prog="bench.quota_pictures", description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail when a picture is stale")
    args = parser.parse_args(argv)
    build = Path(os.environ.get("TIDEGATE_BUILD", ROOT / "build/meson"))
    stale = 0
    for path, content in pictures(build).items():
        if not args.check:
            path.write_text(content, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != content:
            stale = 1
            print(f"{path.relative_to(ROOT)} is stale; run python -m bench.quota_pictures")
    return stale


if __name__ == "__main__":
    sys.exit(main())
