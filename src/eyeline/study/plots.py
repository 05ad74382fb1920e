"""Curves and bars as SVG. The one file that imports matplotlib; it draws on figures of its own and never touches pyplot's state.

Grounds are clear and lines of a middle grey, so that a plot can be read on a light page and on a dark one.
"""

import io
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # Okabe and Ito: told apart by colour-blind readers
GREY = "#7d8087"
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "eyeline",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.unicode_minus": False,
    "savefig.transparent": True,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), GREY),
}
WIDE, NARROW = 7.4, 3.9  # inches: of a plot over the step, and of the same one for a narrow page
HEIGHT = 2.6
LEFT, BELOW = 0.8, 0.55  # margins: the same in every plot over the step, so that they stand exactly one below the other
POINTS = 400  # a curve is thinned to this many; more cannot be seen at this width


@dataclass(frozen=True)
class Curve:
    """One named line. `y` is None where there is no value; `weight` weighs points that are merged when the curve is thinned."""

    name: str
    x: Sequence[int]
    y: Sequence[float | None]
    weight: Sequence[float] | None = None
    dots: bool = False  # few values far apart: a marker each
    piece: Sequence[int | str] | None = None  # of each point: where it changes, as between two stages, the line is broken
    pale: bool = False  # what a smoother curve is drawn over
    dashed: bool = False  # so that a curve below it can be seen

    def pieces(self) -> Iterator["Curve"]:
        """The curve as curves that are each drawn in one line."""
        marks = self.piece if self.piece is not None else [0] * len(self.x)
        starts = [n for n in range(len(self.x)) if n == 0 or marks[n] != marks[n - 1]]
        for a, b in zip(starts, [*starts[1:], len(self.x)], strict=True):
            weight = self.weight[a:b] if self.weight is not None else None
            yield replace(self, x=self.x[a:b], y=self.y[a:b], weight=weight, piece=None)


def smooth(curve: Curve, points: int) -> Curve:
    """At each point the weighted mean of it and of those before it, `points` in all, in its piece of the curve; None where the curve has
    no value. Means are sums divided once."""
    weights = curve.weight if curve.weight is not None else [1.0] * len(curve.x)
    out: list[float | None] = []
    recent: deque[tuple[float, float]] = deque(maxlen=points)
    for n, y in enumerate(curve.y):
        if curve.piece is not None and n and curve.piece[n] != curve.piece[n - 1]:
            recent.clear()
        if y is not None:
            recent.append((y * weights[n], weights[n]))
        total = sum(weight for _, weight in recent)
        out.append(sum(part for part, _ in recent) / total if y is not None and total else None)
    return replace(curve, y=out, pale=False)


def together(curves: Sequence[Curve]) -> list[Curve]:
    """Curves with equal values as one, under all their names; each later one dashed, so that curves which meet in places are all seen."""
    names: dict[tuple[float | None, ...], list[str]] = {}
    for curve in curves:
        names.setdefault(tuple(curve.y), []).append(curve.name)
    first = {curve.name: curve for curve in curves}
    return [replace(first[of[0]], name=", ".join(of), dashed=n > 0) for n, of in enumerate(names.values())]


@dataclass(frozen=True)
class Thinned:
    """At most `points` values: the weighted mean, least and greatest of each run of neighbours. NaN where none had a value."""

    x: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]


def thin(curve: Curve, points: int = POINTS) -> Thinned:
    """Merge neighbours until at most `points` are left. Means are sums divided once: Σ w·y / Σ w over the values that exist."""
    count = len(curve.x)
    size = max(1, math.ceil(count / max(points, 1)))
    weights = curve.weight if curve.weight is not None else [1.0] * count
    out = Thinned([], [], [], [])
    for start in range(0, count, size):
        span = range(start, min(start + size, count))
        pairs = [(y, weights[i]) for i in span if (y := curve.y[i]) is not None]
        total = sum(w for _, w in pairs)
        out.x.append(sum(curve.x[i] for i in span) / len(span))
        out.mean.append(sum(y * w for y, w in pairs) / total if total else math.nan)
        out.low.append(min((y for y, _ in pairs), default=math.nan))
        out.high.append(max((y for y, _ in pairs), default=math.nan))
    return out


def plot(
    curves: Sequence[Curve],
    label: str,
    borders: Sequence[tuple[int, str]] = (),
    log: bool = False,
    span: tuple[int, int] | None = None,
    epochs: Sequence[tuple[int, str]] = (),
    width: float = WIDE,
) -> str:
    """An SVG of `curves` over the step. `borders` are stage starts (step, name); `log` asks for a logarithmic axis; `span` is the first and
    last step of the axis. `epochs` are marks of a second axis above.

    The same input gives the same bytes. Names are drawn as they are: no mark-up in them is obeyed. Plots of one span have the same margins,
    so that a step is at the same place in all of them.
    """
    with matplotlib.rc_context(STYLE):
        height = HEIGHT + (0.35 if epochs else 0)
        figure = Figure(figsize=(width, height))
        axes = figure.add_axes((LEFT / width, BELOW / height, 1 - (LEFT + 0.15) / width, (HEIGHT - BELOW - 0.25) / height))
        for curve, colour in zip(curves, COLOURS * (1 + len(curves) // len(COLOURS)), strict=False):
            draw(axes, curve, colour)
        values = [y for curve in curves for y in curve.y if y is not None]
        if log and values and min(values) > 0:
            axes.set_yscale("log")
        for step, name in borders:
            axes.axvline(step, color=GREY, linewidth=0.8, linestyle=":")
            top = axes.get_xaxis_transform()
            axes.text(step, 1.0, f" {name[:24]}", transform=top, fontsize=7.5, va="bottom", parse_math=False)
        axes.set_xlabel("step", loc="left")
        figure.text(0.01, axes.get_position().y0 + axes.get_position().height / 2, label, rotation=90, va="center", parse_math=False)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8 if width == WIDE else 4))
        axes.xaxis.set_major_formatter(FuncFormatter(_plain))
        if span is not None:
            room = max(span[1] - span[0], 1) * 0.01
            axes.set_xlim(span[0] - room, span[1] + room)
        _values(axes)
        _calm(axes)
        if epochs:
            above = axes.secondary_xaxis(1.1)
            apart = (axes.get_xlim()[1] - axes.get_xlim()[0]) * 0.3 / width  # so that no label covers another
            kept = [mark for n, mark in enumerate(epochs) if n == 0 or mark[0] - epochs[n - 1][0] >= apart]
            above.set_xticks([step for step, _ in kept], [name for _, name in kept])
            above.spines["top"].set_visible(False)
            above.tick_params(length=2, labelsize=7.5, pad=1)
            figure.text(0.01, 1 - 0.18 / height, "epoch", fontsize=7.5, va="center")
        if len(curves) > 1 or "," in curves[0].name:
            legend = figure.legend(frameon=False, fontsize=8, loc="lower right", ncols=4, borderpad=0, columnspacing=1.2)
            for text in legend.get_texts():
                text.set_parse_math(False)
        return _svg(figure)


def _values(axes: Axes) -> None:
    """Plain numbers on the value axis: 25,000 and 0.01, and where they are long 1.2M."""
    axes.yaxis.set_major_formatter(FuncFormatter(_short))
    if axes.get_yscale() == "log":
        low, high = axes.get_ylim()
        subs = (1.0,) if high > 1000 * low else (1.0, 3.0) if high > 20 * low else (1.0, 2.0, 3.0, 5.0, 7.0)
        axes.yaxis.set_major_locator(LogLocator(subs=subs))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.yaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 2.5, 5, 10]))


def bars(edges: Sequence[float], counts: Sequence[int], label: str, log: bool) -> str:
    """An SVG of a histogram: `counts` between `edges`; `log` when these grow by a factor. The same input gives the same bytes."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(3.6, 1.9), layout="constrained")
        axes = figure.add_subplot()
        axes.stairs(counts, edges, fill=True, color=COLOURS[0], alpha=0.75, linewidth=0)
        if log:
            axes.set_xscale("log")
            wide = edges[-1] > 20 * edges[0]
            axes.xaxis.set_major_locator(
                LogLocator(subs=(1.0,) if edges[-1] > 2000 * edges[0] else (1.0, 3.0) if wide else (1.0, 1.5, 2.0, 3.0, 5.0))
            )
            axes.xaxis.set_major_formatter(FuncFormatter(_plain))
            axes.xaxis.set_minor_formatter(NullFormatter())
        else:
            axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
            axes.xaxis.set_major_formatter(FuncFormatter(_plain))
        axes.set_xlabel(label)
        axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=4))
        axes.yaxis.set_major_formatter(FuncFormatter(_plain))
        _calm(axes)
        return _svg(figure)


def _short(value: float, _: int | None = None) -> str:
    power = max((p for p in (2, 3, 4) if abs(value) >= 1000**p), default=0)
    return f"{value / 1000**power:,.6g}{' kMGT'[power].strip()}"


def _plain(value: float, _: int | None = None) -> str:
    return f"{value:,.12g}"


def _calm(axes: Axes) -> None:
    axes.grid(color=GREY, alpha=0.22, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.patch.set_visible(False)


def _svg(figure: Figure) -> str:
    out = io.BytesIO()
    figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    return out.getvalue().decode()


def draw(axes: Axes, curve: Curve, colour: str) -> None:
    """One curve: the mean of each piece as a line, and what was merged into each point as a pale band."""
    pieces = list(curve.pieces())
    for n, piece in enumerate(pieces):
        thinned = thin(piece, max(POINTS * len(piece.x) // max(len(curve.x), 1), 2))
        if len(thinned.x) < len(piece.x) and not curve.dots:
            axes.fill_between(thinned.x, thinned.low, thinned.high, color=colour, alpha=0.15, linewidth=0)
        alone = len(thinned.x) == 1 and not curve.pale
        axes.plot(
            thinned.x,
            thinned.mean,
            color=colour,
            alpha=0.55 if curve.pale else 1.0,
            linewidth=0.8 if curve.pale else 1.3,
            linestyle=(0, (4, 3)) if curve.dashed else "-",
            marker="o" if curve.dots or alone else "",
            markersize=3.5,
            label=curve.name if n == 0 else "_",
        )
