"""Draws line charts as self-contained SVG documents.

The module has no dependencies: `make demo` may have to install everything that it needs, and on two
cores a plotting library would take longer to install than everything else together. The module
draws lines, levels, ticks and labels, and contains nothing about GPUs.

The colours are Okabe and Ito's, which colour-blind readers can tell apart, and every line also has
its name at its right end. The chart has its own background, light or dark as the reader's
browser prefers, so it stays legible on any page.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

FONT = "Inter, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif"


@dataclasses.dataclass(frozen=True)
class Theme:
    """The colours of one appearance."""

    paper: str
    edge: str
    grid: str
    ink: str
    faint: str
    lines: tuple[str, ...]


LIGHT = Theme(
    paper="#ffffff",
    edge="#d0d7de",
    grid="#e6eaee",
    ink="#1f2328",
    faint="#59636e",
    lines=("#0072b2", "#d55e00", "#009e73", "#b8528f", "#a87900", "#3a94c9", "#555b61"),
)
DARK = Theme(
    paper="#14181d",
    edge="#3d444d",
    grid="#272d34",
    ink="#f0f3f6",
    faint="#a3acb6",
    lines=("#4aa8e0", "#f58442", "#2fc296", "#d98bbd", "#e6b02e", "#8fcbee", "#aab2ba"),
)

Point = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Series:
    """One named line: thick over `points`, thin and translucent over `fine`, dashed at `level`."""

    name: str
    points: Sequence[Point]
    note: str = ""
    """A second line of the label at the right end."""
    fine: Sequence[Point] = ()
    level: float | None = None


@dataclasses.dataclass(frozen=True)
class Chart:
    """A line chart with its text."""

    title: str
    subtitle: str
    description: str
    """A description of the chart for readers who cannot see it."""
    x_label: str
    y_label: str
    series: Sequence[Series]
    y_unit: str = ""
    """Unit that follows each number on the vertical axis."""
    key: Sequence[tuple[str, str]] = ()
    """Meaning of line styles: (`thick`, `thin` or `dashed`, text)."""
    x_range: tuple[float, float] | None = None
    y_min: float | None = 0.0
    y_max: float | None = None
    width: int = 960
    height: int = 520


def nice_ticks(low: float, high: float, wanted: int = 6) -> list[float]:
    """Return about `wanted` round numbers from `low` to `high`, in steps of 1, 2 or 5."""
    span = high - low
    if not (math.isfinite(span) and span > 0):
        return [low]
    rough = span / max(1, wanted)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def number(value: float) -> str:
    """Return a coordinate or a tick in as few characters as possible."""
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Return positions near `wanted`, in order, `gap` or more apart, within bounds if possible."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    placed = [0.0] * len(wanted)
    floor = low
    for index in order:
        placed[index] = max(wanted[index], floor)
        floor = placed[index] + gap
    ceiling = high
    for index in reversed(order):
        placed[index] = min(placed[index], ceiling)
        ceiling = placed[index] - gap
    return placed


def style_sheet(series: int) -> str:
    """Return the rules for both appearances; viewers without media queries show the light one."""

    def rules(theme: Theme) -> str:
        lines = "".join(
            f".s{i}{{stroke:{theme.lines[i % len(theme.lines)]}}}"
            f".t{i}{{fill:{theme.lines[i % len(theme.lines)]}}}"
            for i in range(series)
        )
        return (
            f".paper{{fill:{theme.paper};stroke:{theme.edge}}}.grid{{stroke:{theme.grid}}}"
            f".axis{{stroke:{theme.faint}}}.ink{{fill:{theme.ink}}}.faint{{fill:{theme.faint}}}"
            f".key{{stroke:{theme.faint}}}{lines}"
        )

    return (
        f"text{{font-family:{FONT};font-size:13px}}"
        "path,line{fill:none;stroke-linecap:round;stroke-linejoin:round}"
        ".thick{stroke-width:2.6}.thin{stroke-width:1;stroke-opacity:.38}"
        ".dashed{stroke-width:1.4;stroke-dasharray:2 5}"
        f"{rules(LIGHT)}@media (prefers-color-scheme:dark){{{rules(DARK)}}}"
    )


class Canvas:
    """Maps a chart's values to positions on its page, and collects the elements."""

    TOP, RIGHT, BOTTOM, LEFT = 84, 196, 84, 84

    def __init__(self, chart: Chart) -> None:
        self.chart = chart
        self.parts: list[str] = []
        points = [p for s in chart.series for p in (*s.points, *s.fine)]
        xs = [x for x, _ in points] or [0.0, 1.0]
        ys = [y for _, y in points] + [s.level for s in chart.series if s.level is not None]
        self.x0, self.x1 = chart.x_range or (min(xs), max(xs))
        self.y0 = min(ys, default=0.0) if chart.y_min is None else chart.y_min
        self.y1 = max(ys, default=1.0) * 1.06 if chart.y_max is None else chart.y_max
        self.x1 = self.x1 if self.x1 > self.x0 else self.x0 + 1
        self.y1 = self.y1 if self.y1 > self.y0 else self.y0 + 1
        self.right = chart.width - self.RIGHT
        self.bottom = chart.height - self.BOTTOM

    def x(self, value: float) -> float:
        """Return the position of `value` on the page, from the left."""
        return self.LEFT + (value - self.x0) / (self.x1 - self.x0) * (self.right - self.LEFT)

    def y(self, value: float) -> float:
        """Return the position of `value`, from the top; one outside the range is on its edge."""
        inside = min(max(value, self.y0), self.y1)
        return self.bottom - (inside - self.y0) / (self.y1 - self.y0) * (self.bottom - self.TOP)

    def add(self, element: str) -> None:
        """Add one element."""
        self.parts.append(element)

    def text(self, x: float, y: float, words: str, css: str, extra: str = "") -> None:
        """Add text."""
        place = f'x="{number(x)}" y="{number(y)}"'
        gap = " " if extra else ""
        self.add(f'<text {place} class="{css}"{gap}{extra}>{escape(words)}</text>')

    def line(self, x1: float, y1: float, x2: float, y2: float, css: str) -> None:
        """Add a straight line between positions on the page."""
        ends = f'x1="{number(x1)}" y1="{number(y1)}" x2="{number(x2)}" y2="{number(y2)}"'
        self.add(f'<line {ends} class="{css}"/>')

    def path(self, points: Sequence[Point], css: str) -> None:
        """Add a line through points given as values; where x would decrease, a new line begins."""
        steps = []
        last = math.inf
        for x, y in points:
            steps.append(f"{'M' if x < last else 'L'}{number(self.x(x))} {number(self.y(y))}")
            last = x
        if steps:
            self.add(f'<path d="{"".join(steps)}" class="{css}"/>')


def draw_frame(canvas: Canvas) -> None:
    """Draw title, axes, grid and ticks."""
    chart = canvas.chart
    canvas.text(28, 36, chart.title, "ink", 'style="font-size:19px;font-weight:600"')
    canvas.text(28, 58, chart.subtitle, "faint")
    for value in nice_ticks(canvas.y0, canvas.y1):
        y = canvas.y(value)
        canvas.line(canvas.LEFT, y, canvas.right, y, "grid")
        words = f"{number(value)}{chart.y_unit}"
        canvas.text(canvas.LEFT - 10, y + 4.5, words, "faint", 'text-anchor="end"')
    for value in nice_ticks(canvas.x0, canvas.x1, 10):
        x = canvas.x(value)
        canvas.line(x, canvas.bottom, x, canvas.bottom + 5, "axis")
        canvas.text(x, canvas.bottom + 21, number(value), "faint", 'text-anchor="middle"')
    canvas.line(canvas.LEFT, canvas.bottom, canvas.right, canvas.bottom, "axis")
    middle = (canvas.LEFT + canvas.right) / 2
    canvas.text(middle, canvas.bottom + 42, chart.x_label, "ink", 'text-anchor="middle"')
    x, y = 24.0, (canvas.TOP + canvas.bottom) / 2
    turn = f'text-anchor="middle" transform="rotate(-90 {number(x)} {number(y)})"'
    canvas.text(x, y, chart.y_label, "ink", turn)


def draw_series(canvas: Canvas) -> None:
    """Draw all lines, thin ones first so that they do not cover thick ones, and their labels."""
    series = canvas.chart.series
    for index, one in enumerate(series):
        canvas.path(one.fine, f"thin s{index}")
    for index, one in enumerate(series):
        if one.level is not None:
            y = canvas.y(one.level)
            canvas.line(canvas.LEFT, y, canvas.right, y, f"dashed s{index}")
    for index, one in enumerate(series):
        canvas.path(one.points, f"thick s{index}")
    ends = [canvas.y(one.points[-1][1] if one.points else one.level or 0.0) for one in series]
    gap = 40.0 if any(one.note for one in series) else 20.0
    places = spread(ends, gap, canvas.TOP + 6, canvas.bottom - gap / 2)
    for index, (one, y) in enumerate(zip(series, places, strict=True)):
        canvas.text(canvas.right + 14, y + 2, one.name, f"t{index}", 'style="font-weight:600"')
        if one.note:
            canvas.text(canvas.right + 14, y + 18, one.note, "faint", 'style="font-size:12px"')


def draw_key(canvas: Canvas) -> None:
    """Draw the meaning of the line styles, below the axis."""
    x, y = float(canvas.LEFT), canvas.chart.height - 20
    for css, words in canvas.chart.key:
        canvas.line(x, y - 4.5, x + 26, y - 4.5, f"{css} key")
        canvas.text(x + 34, y, words, "faint", 'style="font-size:12px"')
        x += 34 + 6.6 * len(words) + 26


def render(chart: Chart) -> str:
    """Return the chart as a self-contained SVG document."""
    canvas = Canvas(chart)
    draw_frame(canvas)
    draw_series(canvas)
    draw_key(canvas)
    w, h = chart.width, chart.height
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {w} {h}" width="{w}" height="{h}" '
        'role="img" aria-labelledby="title desc">'
    )
    return "\n".join(
        [
            head,
            f'<title id="title">{escape(chart.title)}</title>',
            f'<desc id="desc">{escape(chart.description)}</desc>',
            f"<style>{style_sheet(len(chart.series))}</style>",
            f'<rect x=".5" y=".5" width="{w - 1}" height="{h - 1}" rx="8" class="paper"/>',
            *canvas.parts,
            "</svg>\n",
        ]
    )
