"""What a person sees while a run trains."""

import io
from types import SimpleNamespace
from typing import Any

from rich.console import Console

from eyeline.train.display import Pace, Terminal


def figures(step: int, seconds: float, steps: int = 100) -> Any:
    return SimpleNamespace(step=step, steps=steps, seconds={"step": seconds + 7, "startup": 1, "validation": 2, "checkpoint": 4})


def test_the_time_left_is_told_from_the_second_step_on() -> None:
    """Of a stage or of what goes on: the first step that is seen waits for workers, and nothing is known of the others."""
    for begin in (1, 40):
        pace = Pace()
        assert pace.left(figures(begin, 90.0)) == "–"
        pace.left(figures(begin + 1, 2.0))
        assert pace.left(figures(begin + 2, 2.0)) == f"{(98 - begin) * 2 // 60}:{(98 - begin) * 2 % 60:02d}"  # the median of 90, 2, 2


def test_the_next_stage_begins_anew() -> None:
    pace = Pace()
    assert [pace.left(figures(step, 2.0, 2)) for step in (1, 2)] == ["–", "0:00"]
    assert [pace.left(figures(step, 60.0, 200)) for step in (1, 2)] == ["–", "3:18:00"]
    assert Pace().left(figures(1, 60.0, 1)) == "0:00"


def test_a_terminal_shows_no_bar_before_the_first_step() -> None:
    out = io.StringIO()
    shown = Terminal(Console(file=out, force_terminal=True, width=80))
    shown.note("stage a")
    shown.close()
    assert out.getvalue() == "stage a\n"
