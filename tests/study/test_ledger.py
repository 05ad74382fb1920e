"""The ledger of made-up logs whose seconds are known by hand, and of a run that was killed."""

import json
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import eyeline.train.loop as loop
from eyeline.core.files import read_lines
from eyeline.study.ledger import CAUSES, Ledger, ledger_of, read_ledger
from tests.command import Command
from tests.train.recipe import tiny_run

NOON = 1_780_000_000.0  # seconds since 1970


class Log:
    """Lines as a run writes them, on a clock that is moved by hand. The wall clock may be wrong by `off`."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []
        self.time, self.off, self.attempt = NOON, 0.0, 0
        self._start = NOON

    def launch(self, startup: float, resumed_from: int | None = None) -> None:
        """A process that takes `startup` seconds until it writes its first line."""
        self._start, self.attempt = self.time, self.attempt + 1
        self.time += startup
        self.line("start", resumed_from=resumed_from)

    def step(self, number: int, **spent: float) -> None:
        self.time += sum(spent.values()) - spent.get("startup", 0.0)  # which has passed already
        self.line("step", global_step=number, step_s=sum(spent.values()), **{f"{name}_s": s for name, s in spent.items()})

    def end(self, **spent: float) -> None:
        self.time += sum(spent.values())
        self.line("end", outcome="done", **{f"{name}_s": s for name, s in spent.items()})

    def line(self, kind: str, **more: Any) -> None:
        wall = datetime.fromtimestamp(self.time + self.off, UTC).isoformat(timespec="milliseconds")
        self.lines.append({"kind": kind, **more, "elapsed_s": self.time - self._start, "wall": wall, "attempt": self.attempt})


def seconds(ledger: Ledger) -> dict[str, float]:
    """What is not zero."""
    return {name: pytest.approx(s) for name, s in ledger.seconds.items() if s > 1e-6}


def killed_in_a_save() -> Log:
    """Three steps with a checkpoint after the second; the process is killed while it saves the third step's, 7 s in; 13 s later it is
    launched again."""
    log = Log()
    log.launch(startup=10)
    log.step(1, startup=10, data_wait=1, compute=4)
    log.step(2, data_wait=1, compute=4, checkpoint=2)
    log.step(3, data_wait=2, compute=5, other=1)
    log.time += 7 + 13
    log.launch(startup=9, resumed_from=2)
    log.step(3, startup=9, data_wait=1, compute=5)
    log.step(4, compute=5, validation=3)
    log.end(checkpoint=2)
    return log


KILLED = {"startup": 19.0, "data_wait": 3.0, "compute": 18.0, "validation": 3.0, "checkpoint": 4.0, "lost_work": 8.0, "down_time": 20.0}


def test_a_kill_in_a_save_costs_the_steps_since_the_last_one() -> None:
    log = killed_in_a_save()
    found = ledger_of(log.lines)
    assert seconds(found) == KILLED
    assert found.wall_s == pytest.approx(log.time - NOON) and found.wall_s == pytest.approx(75)
    assert (found.attempts, found.lost_steps, found.goodput) == (2, 1, pytest.approx(18 / 75))


@pytest.mark.parametrize("jump", [3600.0, -3600.0])
def test_a_clock_that_jumps_while_a_run_trains_moves_nothing(jump: float) -> None:
    log = Log()
    log.launch(startup=10)
    log.step(1, startup=10, compute=5)
    log.off = jump
    log.step(2, compute=5)
    log.time += 20
    log.launch(startup=10, resumed_from=1)
    log.step(2, startup=10, compute=5)
    found = ledger_of(log.lines)
    assert seconds(found) == {"startup": 20.0, "compute": 10.0, "lost_work": 5.0, "down_time": 20.0}
    assert found.clock_back_s == 0


def test_a_clock_set_back_between_attempts_is_told(tmp_path: Path) -> None:
    """An hour back, over 20 s of down time: it looks like 3,580 s before the end of the first attempt. No second is negative."""
    log = Log()
    log.launch(startup=10)
    log.step(1, startup=10, compute=5)
    log.time += 20
    log.off = -3600.0
    log.launch(startup=10, resumed_from=1)
    log.step(2, startup=10, compute=5)
    found = ledger_of(log.lines)
    assert seconds(found) == {"startup": 20.0, "compute": 10.0}
    assert found.clock_back_s == pytest.approx(3580)
    assert any("set back by at least 3,580 s" in line for line in found.remarks())


def test_an_attempt_that_overlaps_the_next_is_not_counted_twice() -> None:
    """Two machines that do not see each other's lock: attempt 2 starts 3 s before the last step that attempt 1 writes before it, and
    attempt 1 makes two more steps meanwhile. All is over after 41 s."""
    log, late = Log(), Log()
    late.lines, late.attempt = log.lines, 1
    log.launch(startup=10)
    log.step(1, startup=10, compute=5)
    late.time = NOON + 12
    late.launch(startup=9)
    log.step(2, compute=6, other=1)
    log.step(3, compute=6)
    late.step(1, startup=9, compute=20)
    found = ledger_of(log.lines)
    assert seconds(found) == {"startup": 10 + 6, "compute": 20.0, "lost_work": 5.0}
    assert found.wall_s == pytest.approx(late.time - NOON) and found.wall_s == pytest.approx(41)
    assert (found.overlap_s, found.lost_steps, found.clock_back_s) == (pytest.approx(16), 1, 0)


def test_a_torn_line_costs_its_own_step_alone(tmp_path: Path) -> None:
    """The line of step 3 is torn by the kill: its 8 s are found as down time. One torn in the middle of an attempt is unrecorded."""
    path = tmp_path / "metrics.jsonl"

    def with_line(number: int, text: str) -> Ledger:
        texts = [json.dumps(line) for line in killed_in_a_save().lines]
        path.write_text("\n".join([*texts[:number], text, *texts[number + 1 :]]) + "\n")
        return read_ledger(path)

    last = with_line(3, '{"kind": "step", "global_st')
    assert seconds(last) == {name: s for name, s in KILLED.items() if name != "lost_work"} | {"down_time": 28.0}
    middle = with_line(2, "\x00" * 30)  # step 2: 1 s of waiting, 4 s of compute, 2 s of saving
    assert seconds(middle) == KILLED | {"data_wait": 2.0, "compute": 14.0, "checkpoint": 2.0, "unrecorded": 7.0}
    assert last.wall_s == pytest.approx(75) and middle.wall_s == pytest.approx(75)


def test_an_attempt_that_never_made_a_step_is_startup() -> None:
    log = Log()
    log.launch(startup=10)
    log.time += 30
    log.line("stage", stage="tune")
    log.time += 5
    log.launch(startup=10)
    log.step(1, startup=10, compute=5)
    assert seconds(ledger_of(log.lines)) == {"startup": 50.0, "compute": 5.0, "down_time": 5.0}


def test_lines_of_older_versions_add_up_without_elapsed_seconds() -> None:
    lines: Iterable[dict[str, Any]] = [
        {"kind": "start", "wall": "2026-01-01T00:00:00+00:00", "attempt": 1, "resumed_from": None},
        {"kind": "step", "global_step": 1, "step_s": 5.0, "compute_s": 3.0, "other_s": 2.0, "wall": "2026-01-01T00:00:05+00:00"},
    ]
    assert seconds(ledger_of(lines)) == {"compute": 3.0, "other": 2.0}


def test_ledger_of_a_killed_run_adds_up_to_its_wall_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, eyeline: Command) -> None:
    """Killed in step 6 of 8, with a checkpoint after the fourth; then resumed. Against the wall clock's first and last moment."""
    run, update = tiny_run(tmp_path, "save_minutes=null"), loop.update

    class Killed(BaseException):
        pass

    def killed(*args: Any, step: int, **more: Any) -> Any:
        if step == 5:
            raise Killed
        return update(*args, step=step, **more)

    monkeypatch.setattr(loop, "update", killed)
    with pytest.raises(Killed):
        loop.train(run)
    monkeypatch.setattr(loop, "update", update)
    loop.train(run)
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    first, last = (datetime.fromisoformat(lines[at]["wall"]).timestamp() for at in (0, -1))
    found = read_ledger(tmp_path / "run" / "metrics.jsonl")
    wall_s = last - first + lines[0]["elapsed_s"]
    assert found.wall_s == pytest.approx(wall_s, rel=0.01, abs=0.01)
    assert found.seconds["unrecorded"] <= 0.01 * wall_s
    assert (found.attempts, found.lost_steps) == (2, 1)
    assert found.seconds["lost_work"] > 0 and set(found.seconds) == set(CAUSES)
    done = eyeline("report", str(tmp_path / "run"))
    assert done.code == 0
    assert "goodput" in done.out and "2 attempts, 1 step done again" in done.out
