"""Curves and bars as SVG. The one file that imports matplotlib; it draws on figures of its own and never touches pyplot's state.

Grounds are clear and lines of a middle grey, so that a plot can be read on a light page and on a dark one.
"""

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
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
POINTS = 400  # a curve is thinned to this many; more cannot be seen at this width


@dataclass(frozen=True)
class Curve:
    """One named line. `y` is None where there is no value; `weight` weighs points that are merged when the curve is thinned."""

    name: str
    x: Sequence[int]
    y: Sequence[float | None]
    weight: Sequence[float] | None = None
    dots: bool = False  # few values far apart: a marker each


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
    size = max(1, math.ceil(count / points))
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


def plot(curves: Sequence[Curve], label: str, borders: Sequence[tuple[int, str]] = (), log: bool = False) -> str:
    """An SVG of `curves` over the step. `borders` are stage starts (step, name); `log` asks for a logarithmic axis.

    The same input gives the same bytes. Names are drawn as they are: no mark-up in them is obeyed.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.4, 2.5), layout="constrained")
        axes = figure.add_subplot()
        for curve, colour in zip(curves, COLOURS * (1 + len(curves) // len(COLOURS)), strict=False):
            draw(axes, curve, colour)
        if log and all(y > 0 for c in curves for y in c.y if y is not None):
            axes.set_yscale("log")
        for step, name in borders:
            axes.axvline(step, color=GREY, linewidth=0.8, linestyle=":")
            top = axes.get_xaxis_transform()
            axes.text(step, 1.0, f" {name[:24]}", transform=top, fontsize=7.5, va="bottom", parse_math=False)
        axes.set_xlabel("step")
        axes.set_ylabel(label)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
        _calm(axes)
        if len(curves) > 1:
            legend = axes.legend(frameon=False, fontsize=8)
            for text in legend.get_texts():
                text.set_parse_math(False)
        return _svg(figure)


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
    """One curve: its mean as a line, and what was merged into each point as a pale band."""
    thinned = thin(curve)
    if len(thinned.x) < len(curve.x):
        axes.fill_between(thinned.x, thinned.low, thinned.high, color=colour, alpha=0.15, linewidth=0)
    marker = "o" if curve.dots or len(thinned.x) == 1 else ""
    axes.plot(thinned.x, thinned.mean, color=colour, linewidth=1.3, marker=marker, markersize=3.5, label=curve.name)
