"""The display of a run while it trains: a live table in a terminal, plain lines elsewhere.

A terminal that is narrow gets fewer columns. No number is cut, since half a number is another number.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from eyeline.core.log import say, say_at_once, visible
from eyeline.core.words import duration, gib, percent
from eyeline.train.metrics import StepFigures

SMOOTHED_STEPS = 20  # steps that the smoothed loss is a mean of, in the display, in the last lines of a run and in the report
GAP = 3  # spaces between two columns
SHORTEST_BAR = 8


class Display(Protocol):
    """Shows steps, and lines between them."""

    def step(self, figures: StepFigures) -> None: ...

    def note(self, message: str) -> None:
        """A line that stays where it is printed."""
        ...

    def status(self, message: str) -> None:
        """Show what the run is doing until the next step, such as indexing data; an empty message ends it."""
        ...

    def stopping(self, message: str) -> None:
        """Show that the run stops, and when: a line that stays visible. May be called from a signal handler, in the middle of anything."""
        ...

    def close(self) -> None: ...


def display(console: Console, logging_steps: int) -> Display:
    """The live display if the console is a terminal, else lines; both print a line every `logging_steps` steps. None where it is quiet."""
    if console.quiet:
        return Silent()
    return Terminal(console, logging_steps) if console.is_terminal else Lines(logging_steps)


@dataclass(frozen=True)
class Cell:
    """A figure with its name. Cells of the lowest `rank` are the last to be left out where room is short."""

    name: str
    value: str
    rank: int
    usual: int = 0  # characters that its values have as a rule: a column that keeps its width does not make others come and go

    @property
    def width(self) -> int:
        return max(len(self.name), len(self.value), self.usual)


class Silent:
    """Shows nothing: another rank does."""

    def step(self, figures: StepFigures) -> None: ...

    def note(self, message: str) -> None: ...

    def status(self, message: str) -> None: ...

    def stopping(self, message: str) -> None: ...

    def close(self) -> None: ...


class Lines:
    """A line every `every` steps, and for the first and the last step of a stage."""

    def __init__(self, every: int):
        self._log = Log(every)

    def step(self, figures: StepFigures) -> None:
        if (line := self._log.line(figures, None)) is not None:
            say(line)

    def note(self, message: str) -> None:
        say(message)

    def status(self, message: str) -> None:
        pass

    def stopping(self, message: str) -> None:
        say_at_once(message)

    def close(self) -> None:
        pass


class Terminal:
    """A bar with the time left above the latest figures. A line every `every` steps scrolls by above them."""

    def __init__(self, console: Console, every: int):
        self._console = console
        self._log = Log(every)
        self._view = View()
        self._live = Live(self._view, console=console, refresh_per_second=4)

    def step(self, figures: StepFigures) -> None:
        self._live.start()
        line = self._log.line(figures, self._console.width)
        self._view.show(figures, self._log.cells(figures), self._log.left)
        if line is not None:
            self._live.console.print(line, markup=False, highlight=False, soft_wrap=True)
        if figures.step == figures.steps:
            self._live.refresh()
            self.close()

    def note(self, message: str) -> None:
        self._live.console.print(visible(message), markup=False, highlight=False)

    def status(self, message: str) -> None:
        self._view.status = message or None
        self._live.start()

    def stopping(self, message: str) -> None:
        self._view.notice = message  # painted by the next refresh, and by each one after it
        if not self._live.is_started:
            say_at_once(message)

    def close(self) -> None:
        """Leave the last figures on the screen. A later step starts a new display."""
        self._view.status = None
        self._live.stop()
        self._view = View(notice=self._view.notice)
        self._live = Live(self._view, console=self._console, refresh_per_second=4)


class Log:
    """The figures of a stage as they come: which steps get a line, and what their cells are."""

    def __init__(self, every: int):
        self._every = every
        self._pace = Pace()
        self._since: list[StepFigures] = []  # steps after the last line
        self._recent: deque[tuple[float, int]] = deque(maxlen=SMOOTHED_STEPS)
        self.left = ""

    def line(self, figures: StepFigures, width: int | None) -> str | None:
        """The line of this step if it has one, of at most `width` characters. Its rates and shares are of all steps since the line
        before."""
        if figures.step == 1:
            self._since.clear()
            self._recent.clear()
        self._since.append(figures)
        if figures.report.outcome == "applied" and figures.report.loss is not None:
            self._recent.append((figures.report.loss, figures.report.counts.supervised))
        self.left = self._pace.left(figures)
        if figures.step % self._every and figures.step not in (1, figures.steps):
            return None
        head = f"{figures.stage} {figures.step:,}/{figures.steps:,}"
        cells = [*self._cells(figures, self._since), Cell("ETA", self.left, 1)]
        self._since = []
        kept = cells if width is None else fitting(cells, width - len(head), lambda cell: len(f" · {cell.name} {cell.value}"))
        return "".join([head, *(f" · {cell.name} {cell.value}" for cell in kept)])

    def cells(self, figures: StepFigures) -> list[Cell]:
        """The figures of one step."""
        return self._cells(figures, [figures])

    def _cells(self, figures: StepFigures, since: Sequence[StepFigures]) -> list[Cell]:
        """The cells of a step: of the step itself, or over the steps `since` where one step says little."""
        report = figures.report
        wall, waited = (sum(one.seconds[name] for one in since) for name in ("step", "data_wait"))
        real, slots = (sum(getattr(one.report.counts, name) for one in since) for name in ("real", "slots"))
        labels = sum(count for _, count in self._recent)
        smoothed = sum(loss * count for loss, count in self._recent) / labels if labels else None
        return [
            Cell("loss", f"{report.loss:.4f}" if report.outcome == "applied" and report.loss is not None else report.outcome, 0, 7),
            Cell("smoothed", "–" if smoothed is None else f"{smoothed:.4f}", 2),
            *([] if figures.epoch is None else [Cell("epoch", f"{figures.epoch:,.2f}", 5)]),
            Cell("lr", " ".join(f"{rate:.2e}" for rate in dict.fromkeys(figures.lr.values())), 3),
            Cell("grad norm", "–" if report.grad_norm is None else f"{report.grad_norm:.2f}", 6),
            Cell("tokens/s", f"{real / wall:,.0f}", 4),
            Cell("steps/s", _speed(len(since) / wall), 7),
            Cell("data wait", percent(waited / wall), 9),
            Cell("padding", percent(1 - real / slots if slots else 0), 10),
            *([Cell("skipped", f"{figures.rejected:,}", 8)] if figures.rejected else []),
            *([Cell("experts", f"{load.max_over_mean:.2f}× mean, {load.unused} unused", 12)] if (load := report.experts) else []),
            Cell("memory", gib(figures.memory_bytes), 11, 9),
        ]


def _speed(per_s: float) -> str:
    """Steps per second with three figures, also where a step takes minutes."""
    return f"{per_s:.2f}" if per_s >= 0.1 else f"{per_s:.2g}"


def fitting(cells: Sequence[Cell], room: int, width: Callable[[Cell], int]) -> list[Cell]:
    """The cells that fit into the room, in their order: the first of rank in any case, then of each next one whether it fits too."""
    kept: set[int] = set()
    for n in sorted(range(len(cells)), key=lambda n: cells[n].rank):
        wanted = width(cells[n])
        if not kept or wanted <= room:
            kept.add(n)
            room -= wanted
    return [cell for n, cell in enumerate(cells) if n in kept]


class View:
    """The present contents of the screen, laid out at every refresh for the width of the terminal."""

    def __init__(self, notice: str | None = None) -> None:
        self.status: str | None = None
        self.notice = notice
        self._shown: tuple[StepFigures, Sequence[Cell], str] | None = None  # one assignment: another thread paints it
        self._start = time.monotonic()

    def show(self, figures: StepFigures, cells: Sequence[Cell], left: str) -> None:
        self.status = None
        self._shown = figures, cells, left

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        if self._shown is not None:
            figures, cells, left = self._shown
            yield self._bar(figures, left, width)
            yield _table(cells, width)
        if (status := self.status) is not None:
            since = f" {duration(time.monotonic() - self._start)}" if self._shown is None else ""  # the bar has its own
            yield Text(visible(status) + since, style="dim")
        if self.notice is not None:
            yield Text(visible(self.notice), style="bold yellow")

    def _bar(self, figures: StepFigures, left: str, width: int) -> Table:
        """The stage, a bar where there is room for one, the step, and the times."""
        elapsed = duration(time.monotonic() - self._start)
        name = figures.stage
        times = (("elapsed", elapsed, 2), ("ETA", left, 1))
        cells = fitting(
            [Cell("", f"{figures.step:,}/{figures.steps:,}", 0), *(Cell("", f"{what} {value}", rank) for what, value, rank in times)],
            width - min(len(name), 8) - 1,
            lambda cell: len(cell.value) + 2,
        )
        room = width - sum(len(cell.value) + 2 for cell in cells)
        bar = room - len(name) - 1
        row = Table.grid()
        row.add_column(no_wrap=True, width=min(len(name), room) if bar < SHORTEST_BAR else None, overflow="ellipsis")
        shown: list[Text | ProgressBar] = [Text(name, style="bold")]
        if bar >= SHORTEST_BAR:
            row.add_column()
            row.add_column(width=bar)
            shown += [Text(" "), ProgressBar(figures.steps, figures.step, width=bar)]
        for cell in cells:
            row.add_column(no_wrap=True)
            shown.append(Text(f"  {cell.value}"))
        row.add_row(*shown)
        return row


def _table(cells: Sequence[Cell], width: int) -> Group:
    """Names above values."""
    kept = fitting(cells, width + GAP, lambda cell: cell.width + GAP)
    heads, values = (
        (" " * GAP).join(text.ljust(cell.width) for text, cell in zip(texts, kept, strict=True)).rstrip()
        for texts in ([cell.name for cell in kept], [cell.value for cell in kept])
    )
    return Group(Text(heads, style="dim", no_wrap=True), Text(values, no_wrap=True))


class Pace:
    """The time left in a stage, by the median of its last steps, without what is not theirs: startup, validation, checkpoints."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=50)

    def left(self, figures: StepFigures) -> str:
        if figures.step == 1:
            self._recent.clear()
        first = not self._recent  # it waits for workers to start, and says little about the others
        spent = figures.seconds
        self._recent.append(spent["step"] - sum(spent.get(name, 0.0) for name in ("startup", "compile", "validation", "checkpoint")))
        if first and figures.step < figures.steps:
            return "–"
        return duration((figures.steps - figures.step) * median(self._recent))
