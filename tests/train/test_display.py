"""What a person sees while a run trains."""

import io
import re
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from eyeline.train.display import SMOOTHED_STEPS, Lines, Log, Pace, Terminal, View
from eyeline.train.run import Stage
from eyeline.train.step import ExpertLoad
from eyeline.train.summary import Tally
from eyeline.train.trainable import Row, table
from tests.train.figures import step_figures


def figures(step: int, seconds: float, steps: int = 100) -> Any:
    return SimpleNamespace(step=step, steps=steps, seconds={"step": seconds + 7, "startup": 1, "validation": 2, "checkpoint": 4})


def test_eta_is_shown_from_the_second_step_on() -> None:
    """At the start of a stage, or of a resumed run: the first step waits for workers, and says nothing about the others."""
    for begin in (1, 40):
        pace = Pace()
        assert pace.left(figures(begin, 90.0)) == "–"
        pace.left(figures(begin + 1, 2.0))
        assert pace.left(figures(begin + 2, 2.0)) == f"{(98 - begin) * 2 // 60}:{(98 - begin) * 2 % 60:02d}"  # the median of 90, 2, 2


def test_next_stage_starts_anew() -> None:
    pace = Pace()
    assert [pace.left(figures(step, 2.0, 2)) for step in (1, 2)] == ["–", "0:00"]
    assert [pace.left(figures(step, 60.0, 200)) for step in (1, 2)] == ["–", "3:18:00"]
    assert Pace().left(figures(1, 60.0, 1)) == "0:00"


SHOWN = {  # every figure of `step_figures`, by the name that stands above it or before it
    "loss": "0.1234", "smoothed": "0.1234", "epoch": "1.75", "lr": "1.00e-05 1.00e-03 2.00e-05", "grad norm": "1.50", "tokens/s": "180",
    "steps/s": "2.00", "data wait": "10.0%", "padding": "10.0%", "skipped": "12", "experts": "1.25× mean, 3 unused", "memory": "123.00 GiB",
}  # fmt: skip


def painted(width: int, **changed: Any) -> list[str]:
    """The lines of the live display."""
    view, log = View(), Log(10)
    shown = step_figures(experts=ExpertLoad(1.25, 3, None), **changed)
    log.line(shown, width)
    view.show(shown, log.cells(shown), "3:18:00")
    out = io.StringIO()
    Console(file=out, force_terminal=False, width=width).print(view)
    return out.getvalue().splitlines()


@pytest.mark.parametrize("width", [40, 50, 60, 72, 80, 100, 120, 200])
@pytest.mark.parametrize("stage", ["tune", "a-stage-whose-name-has-forty-characters-"])
def test_a_narrow_terminal_gets_fewer_columns_and_no_number_is_cut(width: int, stage: str) -> None:
    lines = painted(width, stage=stage)
    assert len(lines) == 3, "a bar, one line of names, one of values"
    assert max(map(len, lines)) <= width
    bar, heads, values = lines
    assert "1,234/25,000" in bar and "ETA 3:18:00" in bar
    names = [name for name in SHOWN if name in heads]
    assert names[:2] == ["loss", "smoothed"]
    starts = [heads.index(name) for name in names]
    assert starts == sorted(starts)
    assert [values[a:b].strip() for a, b in zip(starts, [*starts[1:], None], strict=True)] == [SHOWN[name] for name in names]
    assert heads.split() == " ".join(names).split(), "no part of a name is left"
    assert "…" not in heads + values
    room = width - max(len(heads), len(values)) - 3
    assert all(max(len(name), len(value)) > room - 2 for name, value in SHOWN.items() if name not in names), "none that is left out fits"
    if width == 200:
        assert names == list(SHOWN)


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_lines_scroll_by_above_the_live_display(width: int) -> None:
    """One per `logging_steps` steps, the first and the last; each fits the terminal, and its figures are whole."""
    out = io.StringIO()
    shown = Terminal(Console(file=out, force_terminal=True, width=width, color_system=None), 10)
    for step in range(1, 26):
        shown.step(step_figures(step, 25))
    said = re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue()))
    lines = [line for line in said if line.startswith("tune ") and " · " in line]
    assert [line.split()[1] for line in lines] == ["1/25", "10/25", "20/25", "25/25"]
    for line in lines:
        assert len(line) <= width
        cells = line.split(" · ")[1:]
        assert cells[0] == "loss 0.1234"
        for cell in cells:
            name = next(name for name in (*SHOWN, "ETA") if cell.startswith(f"{name} "))
            assert name == "ETA" or cell == f"{name} {SHOWN[name]}"
    assert len(lines[1].split(" · ")) == {40: 3, 60: 4, 80: 5, 200: 12}[width]


def test_the_smoothed_loss_is_a_mean_over_supervised_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    """The mean is over the last 20 applied steps of the stage: a step without labels or with a loss that is not finite has none."""
    shown = Lines(1)
    losses = [(9.0, 5), *[(1.0, 30)] * (SMOOTHED_STEPS - 1), (4.0, 10)]
    for step, (loss, supervised) in enumerate(losses, 1):
        shown.step(step_figures(step, 30, loss=loss, supervised=supervised))
    shown.step(step_figures(22, 30, loss=float("nan"), outcome="not finite"))
    shown.step(step_figures(23, 30, loss=0.0, supervised=0, outcome="no targets"))
    shown.step(step_figures(1, 30, loss=3.0, stage="next"))
    smoothed = [line.split("smoothed ")[1].split(" ")[0] for line in capsys.readouterr().out.splitlines()]
    assert smoothed[:2] == ["9.0000", f"{(45 + 30) / 35:.4f}"]
    assert smoothed[20] == smoothed[21] == smoothed[22] == f"{(19 * 30 + 40) / 580:.4f}"
    assert smoothed[23] == "3.0000"


def test_rates_of_a_line_are_over_the_steps_since_the_line_before(capsys: pytest.CaptureFixture[str]) -> None:
    shown = Lines(10)
    for step in range(1, 11):
        seconds = dict(step_figures().seconds) | {"step": 1.0 if step == 5 else 0.5}
        shown.step(step_figures(step, 10, seconds=seconds))
    first, last = capsys.readouterr().out.splitlines()
    assert "tokens/s 180 · steps/s 2.00 · data wait 10.0%" in first
    assert f"tokens/s {9 * 90 / 5:,.0f} · steps/s {9 / 5:.2f} · data wait {9 * 0.05 / 5:.1%}" in last


def test_a_terminal_shows_no_bar_before_the_first_step() -> None:
    out = io.StringIO()
    shown = Terminal(Console(file=out, force_terminal=True, width=80), 10)
    shown.note("stage a")
    shown.close()
    assert out.getvalue() == "stage a\n"


def test_stop_is_printed_at_once_without_live_display(capfd: pytest.CaptureFixture[str]) -> None:
    out = io.StringIO()
    shown = Terminal(Console(file=out, force_terminal=True, width=80), 10)
    shown.stopping("stopping")
    assert capfd.readouterr().out == "stopping\n"
    shown.step(step_figures())
    shown.stopping("stopping now")
    shown.close()
    assert capfd.readouterr().out == ""
    assert re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue()).rstrip().endswith("\nstopping now")


def test_status_is_shown_until_the_next_step() -> None:
    """Before the first step with the time that it has taken. An alert stays through steps."""
    view = View()

    def seen() -> str:
        out = io.StringIO()
        Console(file=out, width=60).print(view)
        return out.getvalue()

    view.status = "first step: reading and indexing data"
    assert seen() == "first step: reading and indexing data 0:00\n"
    view.notice = "stopping after this step"
    view.show(step_figures(), Log(1).cells(step_figures()), "1:00")
    assert "first step" not in seen()
    assert seen().endswith("\nstopping after this step\n")
    view.status = "validating"
    assert seen().endswith("\nvalidating\nstopping after this step\n")


@pytest.mark.parametrize("width", [40, 50, 60, 72, 80, 100, 120, 200])
def test_no_number_of_what_a_stage_trains_is_cut(width: int) -> None:
    out = io.StringIO()
    lora = "LoRA r 16, α 32 on q k v o gate up down"
    rows = [Row("vision", 411_000_000, 0, "frozen", None), Row("language", 8_190_735_360, 43_646_976, lora, 1e-4)]
    Console(file=out, width=width).print(table(cast(Stage, SimpleNamespace(name="tune")), rows, width))
    said = out.getvalue()
    assert "…" not in said
    assert said.startswith("stage tune")
    for whole in ("411,000,000", "8,190,735,360", "43,646,976", "0.0001", "frozen", "language"):
        assert whole in said
    assert max(map(len, said.splitlines())) <= width


def test_a_run_ends_with_the_result_of_its_last_stage() -> None:
    """The loss and validation loss of an earlier stage are of other data. Skipped samples are those of all stages."""
    tally = Tally()
    for step in (1, 2):
        tally.step(step_figures(step, 2, loss=0.001, stage="first", rejected=2))
    tally.validated("first", 2, 0.0005, 0.0005)
    tally.step(step_figures(1, 4, loss=3.0, stage="last", rejected=0))
    assert "validation" not in tally.line(3), "the last stage has none yet"
    tally.validated("last", 1, 0.5, 0.5)
    tally.step(step_figures(2, 4, loss=1.0, stage="last", supervised=30, rejected=5))
    tally.validated("last", 2, 0.75, 0.5)
    said = tally.line(1_004)
    assert said.startswith("done: 1,004 steps in 0:0")
    assert " · loss 1.5000 (mean of the last 2 steps) · validation loss 0.7500, best 0.5000 at step 1 of the stage" in said
    assert "7 samples skipped" in said
    tally.step(step_figures(3, 4, loss=9.0, stage="last", outcome="overflow"))
    assert "loss 1.5000 (mean of the last 2 steps)" in tally.line(4), "a skipped step is none of them"
    assert Tally().line(4) == "done: 4 steps", "nothing was left to train"
