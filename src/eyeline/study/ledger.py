"""The ledger of a run (its goodput): every second of wall time from the first launch to the last line, by what it was spent on.

    attempt 1   startup, compile, data wait, compute, …         monotonic durations, as its lines have them
    down time   from its last line to the start of attempt 2     wall clock, the only place where it is used
    attempt 2   …

Steps that attempt 2 did again are lost work: what attempt 1 spent on them, but for startup and compiling, is counted there alone.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from eyeline.core.log import say
from eyeline.core.run_folder import SPENDINGS
from eyeline.core.words import counted, percent
from eyeline.study.history import causes, json_lines, resumed_from

LOST, DOWN, UNRECORDED = "lost_work", "down_time", "unrecorded"
CAUSES = (*SPENDINGS, "host_starved", "other", LOST, DOWN, UNRECORDED)
KEPT_OF_LOST = ("startup", "compile")  # what a step that is done again had cost before it: an attempt pays it in any case
MEANINGS = {
    "startup": "imports, loading, building the model",
    "compile": "compiling before the first step",
    "data_wait": "the loop waited for a batch",
    "compute": "forward, backward and update of steps that were kept: the goodput",
    "communication": "the host waited in collectives, or for slower ranks",
    "validation": "validation loss and answers",
    "checkpoint": "training stood still for a checkpoint",
    "host_starved": "the GPU waited for the host between two updates",
    "other": "between steps: metrics, display",
    LOST: "steps after the last kept checkpoint, done again by the next attempt",
    DOWN: "between the last line of an attempt and the start of the next",
    UNRECORDED: "after the last step of an attempt that was killed, and lines that cannot be read",
}


@dataclass(frozen=True)
class Ledger:
    """Seconds by cause; they add up to the wall time."""

    seconds: Mapping[str, float]
    attempts: int
    lost_steps: int
    overlap_s: float  # of attempts that still ran when the next one had started: not in `seconds`, whose wall time that one has
    clock_back_s: float  # by which the wall clock was set back between attempts: their down time is not known, and counted as 0

    @property
    def wall_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def goodput(self) -> float:
        """The share of the wall time in which steps that were kept were computed."""
        return self.seconds["compute"] / self.wall_s if self.wall_s else 0.0

    def rows(self) -> list[tuple[str, float]]:
        """What was spent, largest first, without what would be shown as 0.0 s."""
        return sorted(((name, value) for name, value in self.seconds.items() if value >= 0.05), key=lambda row: -row[1])

    def remarks(self) -> list[str]:
        """What a reader of the table must know of it."""
        found = [f"{counted(self.attempts, 'attempt')}, {counted(self.lost_steps, 'step')} done again"] if self.attempts > 1 else []
        if self.overlap_s:
            found.append(f"{self.overlap_s:,.1f} s are not in it: an attempt still ran while the next one did")
        if self.clock_back_s:
            found.append(f"the wall clock was set back by at least {self.clock_back_s:,.0f} s between attempts: down time may be missing")
        return found


@dataclass
class _Attempt:
    """One launch, as far as its lines have been read."""

    number: int
    spent: Counter[str] = field(default_factory=Counter)
    elapsed_s: float = 0.0  # since its process started
    last_wall: float | None = None  # seconds since 1970, of its last line
    early_s: float = 0.0  # by which it started before the last line of the attempt before, by the wall clock
    shared_s: float = 0.0  # of its startup, while the attempt before still ran

    def moved_on(self, line: Mapping[str, Any]) -> None:
        self.elapsed_s = max(self.elapsed_s, _number(line.get("elapsed_s")), sum(self.spent.values()))
        self.last_wall = _moment(line) or self.last_wall

    def closed(self) -> Any:
        """All its seconds. Before the first step ends all there is, is startup."""
        out: Any = Counter(self.spent)  # of seconds
        out[UNRECORDED if self.spent else "startup"] += max(self.elapsed_s - sum(self.spent.values()), 0.0)
        out["startup"] -= min(self.shared_s, out["startup"])
        return out


def read_ledger(path: Path) -> Ledger:
    """The ledger in a `metrics.jsonl`. OSError reaches the caller; lines that cannot be read are left out, and their time is unrecorded."""
    return ledger_of(json_lines(path))


def ledger_of(lines: Iterable[Mapping[str, Any] | None]) -> Ledger:
    """The ledger of lines in the order in which they were written."""
    total: Any = Counter()  # of seconds; a Counter's values are declared as whole numbers
    attempt, attempts, lost_steps, overlap_s, back_s = _Attempt(0), 0, 0, 0.0, 0.0
    kept: dict[int, Mapping[str, float]] = {}  # what each step that counts so far has cost

    def lose(numbers: Iterable[int]) -> int:
        found = [number for number in numbers if number in kept]
        for number in found:
            moved = {name: s for name, s in kept.pop(number).items() if name not in KEPT_OF_LOST}
            total.subtract(moved)
            total[LOST] += sum(moved.values())
        return len(found)

    for line in lines:
        if line is None:
            continue
        number = int(_number(line.get("attempt", attempt.number)))
        if line.get("kind") == "start":
            total.update(attempt.closed())
            begin, gap = _moment(line), 0.0
            if attempts and attempt.last_wall is not None and begin is not None:
                gap = begin - _number(line.get("elapsed_s")) - attempt.last_wall
                total[DOWN] += max(gap, 0.0)
            back_s += attempt.early_s
            attempt, attempts = _Attempt(number, early_s=max(-gap, 0.0)), attempts + 1
            if (first := resumed_from(dict(line))) is not None:
                lost_steps += lose([step for step in kept if step > first])
            attempt.moved_on(line)
        elif number < attempt.number:
            overlap_s += sum(_spent(line).values()) + attempt.early_s
            attempt.shared_s, attempt.early_s = attempt.shared_s + attempt.early_s, 0.0  # both ran: the clock was right
        else:
            spent = _spent(line)
            if line.get("kind") == "step":
                step = int(_number(line.get("global_step")))
                lost_steps += lose([step])
                kept[step] = spent
            attempt.spent.update(spent)
            attempt.moved_on(line)
    total.update(attempt.closed())
    return Ledger({name: total.get(name, 0.0) for name in CAUSES}, attempts, lost_steps, overlap_s, back_s + attempt.early_s)


def show_ledger(run: Path) -> None:
    """Print the ledger of a run folder."""
    ledger = read_ledger(run / "metrics.jsonl")
    Console().print(table(ledger))
    for line in ledger.remarks():
        say(line)


def table(ledger: Ledger) -> Table:
    """The ledger for a terminal."""
    out = Table(title=f"wall time (goodput {percent(ledger.goodput)})", title_justify="left")
    for name, justify in (("cause", "left"), ("time", "right"), ("share", "right"), ("", "left")):
        out.add_column(name, justify=justify)  # type: ignore[arg-type]  # a literal of rich
    for name, seconds in ledger.rows():
        out.add_row(name.replace("_", " "), f"{seconds:,.1f} s", percent(seconds / ledger.wall_s), MEANINGS[name])
    out.add_row("all", f"{ledger.wall_s:,.1f} s", percent(1.0), "", style="bold")
    return out


def _spent(line: Mapping[str, Any]) -> dict[str, float]:
    """The seconds of a line by cause; none where it has none."""
    if line.get("kind") not in ("step", "end"):
        return {}
    found: Counter[str] = Counter()
    for name, seconds in causes(dict(line)).items():
        found[name if name in CAUSES else "other"] += _number(seconds)  # type: ignore[assignment]  # seconds are no whole numbers
    return dict(found)


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _moment(line: Mapping[str, Any]) -> float | None:
    """The wall clock's time of a line."""
    try:
        return datetime.fromisoformat(str(line.get("wall"))).timestamp()
    except ValueError:
        return None
