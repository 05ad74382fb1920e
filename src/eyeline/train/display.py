"""What a person sees while a run trains: a live table in a terminal, plain lines elsewhere."""

from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from eyeline.core.log import say, say_at_once
from eyeline.train.metrics import StepFigures


class Display(Protocol):
    """Shows steps, and lines between them."""

    def step(self, figures: StepFigures) -> None: ...
    def note(self, message: str) -> None: ...
    def stopping(self, message: str) -> None: ...
    def close(self) -> None: ...


def display(console: Console, log_every: int) -> Display:
    """The live display if the console is a terminal, else a line every `log_every` steps."""
    return Terminal(console) if console.is_terminal else Lines(log_every)


class Lines:
    """A line every `every` steps, and for the last step of a stage. Its rates and shares are of all steps since the line before."""

    def __init__(self, every: int):
        self._every = every
        self._pace = Pace()
        self._since: list[StepFigures] = []

    def step(self, figures: StepFigures) -> None:
        left = self._pace.left(figures)
        self._since.append(figures)
        if figures.step % self._every == 0 or figures.step in (1, figures.steps):
            cells = " · ".join(f"{name} {value}" for name, value in [*_cells(figures, self._since), ("left", left)])
            say(f"{figures.stage} {figures.step}/{figures.steps} · {cells}")
            self._since = []

    def note(self, message: str) -> None:
        say(message)

    def stopping(self, message: str) -> None:
        """Called by a signal's handler."""
        say_at_once(message)

    def close(self) -> None:
        pass


class Terminal:
    """A bar with the time left, above the latest figures."""

    def __init__(self, console: Console):
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("[dim]passed"),
            console=console,
        )
        self._task = self._bar.add_task("")
        self._pace = Pace()
        self._table: Table | None = None
        self._notice: str | None = None
        self._live = Live(get_renderable=self._view, console=console, refresh_per_second=4)

    def _view(self) -> Group:
        """What is painted: the bar, the latest figures, and what was said that must stay on the screen."""
        notice = None if self._notice is None else Text(self._notice, style="bold")
        return Group(self._bar, *(part for part in (self._table, notice) if part is not None))

    def step(self, figures: StepFigures) -> None:
        self._bar.update(self._task, description=figures.stage, total=figures.steps, completed=figures.step)
        table = Table.grid(padding=(0, 3))
        pairs = [*_cells(figures, [figures]), ("left", self._pace.left(figures))]
        table.add_row(*(f"[dim]{name}[/]" for name, _ in pairs))
        table.add_row(*(value for _, value in pairs))
        self._table = table
        self._live.start()  # with the first step: before it there is nothing to show

    def note(self, message: str) -> None:
        self._live.console.print(message, markup=False, highlight=False)

    def stopping(self, message: str) -> None:
        """Called by a signal's handler, in the middle of anything else: it only sets what the next refresh paints."""
        self._notice = message
        if not self._live.is_started:
            say_at_once(message)

    def close(self) -> None:
        self._live.stop()


class Pace:
    """The time left in a stage, by the median of its last steps, without what is not theirs: startup, validation, checkpoints."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=50)

    def left(self, figures: StepFigures) -> str:
        if figures.step == 1:
            self._recent.clear()
        first = not self._recent  # it waits for workers to start, and says little about the others
        spent = figures.seconds
        self._recent.append(spent["step"] - spent["startup"] - spent["validation"] - spent["checkpoint"])
        if first and figures.step < figures.steps:
            return "–"
        minutes, seconds = divmod(int((figures.steps - figures.step) * median(self._recent)), 60)
        return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}" if minutes >= 60 else f"{minutes}:{seconds:02d}"


def _cells(figures: StepFigures, since: Sequence[StepFigures]) -> list[tuple[str, str]]:
    """Names and values: of the step itself, and over the steps `since` the last ones shown where a single step says little."""
    report = figures.report
    wall, waited = (sum(one.seconds[name] for one in since) for name in ("step", "data_wait"))
    real, slots = (sum(getattr(one.report.counts, name) for one in since) for name in ("real", "slots"))
    return [
        ("loss", f"{report.loss:.4f}" if report.outcome == "applied" else report.outcome),
        ("lr", " ".join(f"{rate:.2e}" for rate in dict.fromkeys(figures.lr.values()))),
        ("grad norm", f"{report.grad_norm:.2f}"),
        ("real tokens/s", f"{real / wall:,.0f}"),
        ("data wait", f"{waited / wall:.0%}"),
        ("padding", f"{1 - real / slots if slots else 0:.1%}"),
        *([("experts", f"{experts.max_over_mean:.2f}× mean, {experts.unused} unused")] if (experts := report.experts) else []),
        ("memory", f"{figures.memory_bytes / 2**30:.2f} GiB"),
    ]
