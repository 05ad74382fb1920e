"""`eyeline compare`: launches that are made up, whose times are known; and the statistics of their ratios."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import eyeline.study.compare as compare_module
from eyeline.core.errors import Refused
from eyeline.study.compare import Varied, compare, has_ended, launches, refuse_unequal_work, results, varied, verdict, work
from eyeline.study.pairs import ratio_of, t_quantile
from tests.study.test_report import step_line
from tests.train.recipe import tiny_run

VARY = Varied("threads", ("1", "2"))


class Launcher:
    """Writes runs of five steps after the warm-up, each as long as `times` say, and remembers the order."""

    def __init__(self, times: dict[str, list[float]], **changed: Any) -> None:
        self.times, self.changed = {value: iter(each) for value, each in times.items()}, changed
        self.asked: list[str] = []

    def __call__(self, overrides: Sequence[str], log: Path) -> int:
        value, folder = overrides[0].partition("=")[2], Path(overrides[1].partition("=")[2])
        self.asked.append(value)
        step_s = next(self.times[value])
        lines: list[dict[str, Any]] = [{"kind": "start", "hardware": "a machine", "attempt": 1, "resumed_from": None}]
        for n in range(1, 9):
            startup = 7.0 if n in (1, 5) else 0.0  # another stage starts in step 5
            spent = {"startup_s": startup, "compile_s": 0.0, "checkpoint_s": 0.5, "validation_s": 0.25, "step_s": step_s + startup + 0.75}
            more = self.changed if value == "2" and n == 6 else {}
            lines.append(step_line(n, **spent, flops={"language": 4_000}, sample_ids=n) | more)
        folder.mkdir()
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"kind": "end", "outcome": "done"}]))
        return 0


def test_launches_take_turns_and_what_is_no_training_is_left_out(tmp_path: Path) -> None:
    """Twice as fast in every pair, on a machine that slows down by half from pair to pair."""
    launcher = Launcher({"1": [2.0, 3.0, 4.5], "2": [1.0, 1.5, 2.25]})
    found = launches(VARY, 3, tmp_path, launcher)
    assert launcher.asked == ["1", "2", "2", "1", "1", "2"]
    assert [[one.seconds for one in of_repeat] for of_repeat in found] == [[10.0, 5.0], [15.0, 7.5], [22.5, 11.25]]
    assert (found[0][0].steps, found[0][0].startup_s) == (5, 14.0)
    refuse_unequal_work(VARY, found)
    ratio = results(VARY, found)["2"]
    assert (ratio.ratio, ratio.sd) == (pytest.approx(0.5), pytest.approx(0))
    assert verdict(VARY, "2", ratio).startswith("threads=2 takes 50.0% less time than threads=1 (3 pairs")
    again = Launcher({})
    assert launches(VARY, 3, tmp_path, again) == found and again.asked == []  # all is there already


def test_an_interrupted_launch_is_not_measured(tmp_path: Path) -> None:
    launches(VARY, 1, tmp_path, Launcher({"1": [1.0], "2": [1.0]}))
    metrics = tmp_path / "1-1" / "metrics.jsonl"
    metrics.write_text(metrics.read_text().rpartition('{"kind": "end"')[0])
    with pytest.raises(Refused, match="measured in one piece"):
        has_ended(tmp_path / "1-1")


def test_a_launch_that_fails_is_told_with_the_end_of_its_output(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"(?s)threads=1 ended with code 7.*it does not fit"):
        launches(VARY, 2, tmp_path, lambda overrides, log: log.write_text("lines\nit does not fit\n") and 7)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"sample_ids": 99}, "sample_ids 6 and 99"),
        ({"real": 91}, "real 90 and 91"),
        ({"flops": {"language": 1}}, "FLOPs of language 4,000 and 1"),
    ],
)
def test_other_work_is_refused_by_step_and_number(tmp_path: Path, changed: dict[str, Any], named: str) -> None:
    found = launches(VARY, 2, tmp_path, Launcher({"1": [1.0] * 2, "2": [1.0] * 2}, **changed))
    with pytest.raises(Refused, match=f"threads=1 and threads=2 did other work in step 6: {named}"):
        refuse_unequal_work(VARY, found)


def test_ratio_has_the_interval_of_students_t() -> None:
    """Logs of 0.1, 0.2 and 0.3: their mean is 0.2, their SD 0.1, and t of two degrees of freedom at 97.5 % is 4.303, at 80 % 1.061."""
    found = ratio_of([1.0, 2.0, 4.0], [math.exp(0.1), 2 * math.exp(0.3), 4 * math.exp(0.2)])
    error = 0.1 / math.sqrt(3)
    assert (found.mean, found.sd) == (pytest.approx(0.2), pytest.approx(0.1))
    assert [math.log(end) for end in found.interval] == pytest.approx([0.2 - 4.303 * error, 0.2 + 4.303 * error], abs=1e-4)
    assert math.log(1 + found.smallest_effect) == pytest.approx((4.303 + 1.061) * error, abs=1e-3)
    assert not found.is_seen
    assert "no difference between threads=2 and threads=1 is seen" in verdict(VARY, "2", found)
    assert "One of 36.3% or more would be found" in verdict(VARY, "2", found)
    assert verdict(VARY, "2", ratio_of([1.0, 1.0], [0.3, 1.2])).startswith("nothing can be said of threads=2 and threads=1: the times of 2")
    slower = ratio_of([1.0, 2.0], [1.21, 2.42])
    assert slower.is_seen and verdict(VARY, "2", slower).startswith("threads=2 takes 21.0% more time")


@pytest.mark.parametrize(
    ("share", "freedom", "value"),
    [(0.975, 1, 12.706), (0.975, 4, 2.776), (0.975, 30, 2.042), (0.8, 1, 1.376), (0.8, 9, 0.883)],
)
def test_quantiles_of_t_are_those_of_the_tables(share: float, freedom: int, value: float) -> None:
    assert t_quantile(share, freedom) == pytest.approx(value, abs=5e-4)


def test_values_are_split_at_commas_outside_of_brackets() -> None:
    assert varied("stages.0.optimizer={kind: adamw, eps: 1},{kind: muon}") == Varied(
        "stages.0.optimizer", ("{kind: adamw, eps: 1}", "{kind: muon}")
    )
    for wrong in ("", "threads", "threads=1", "threads=1,", "threads=1,1"):
        with pytest.raises(Refused, match="wanted KEY=A,B"):
            varied(wrong)


def test_values_that_mean_the_same_recipe_are_refused(tmp_path: Path) -> None:
    vary = Varied("stages.0.max_grad_norm", ("1", "1.0"))
    with pytest.raises(Refused, match=r"stages.0.max_grad_norm=1 and stages.0.max_grad_norm=1.0 are the same recipe"):
        compare(lambda more: tiny_run(tmp_path, *more), "tiny", [], vary, 2, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_real_launches_do_equal_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Recomputed blocks in one of two values: other FLOPs are done, the same are needed, and losses are equal."""
    import eyeline.train.loop as loop

    def here(recipe: str, overrides: Sequence[str], log: Path) -> int:
        loop.train(tiny_run(tmp_path, *overrides))
        return 0

    monkeypatch.setattr(compare_module, "in_new_process", here)
    key = "stages.0.gradient_checkpointing"
    compare(lambda more: tiny_run(tmp_path, *more), "tiny", [], Varied(key, ("false", "true")), 2, tmp_path / "out")
    found = json.loads((tmp_path / "out/compare.json").read_text())
    assert found["steps"] == 5 and len(found["seconds"]) == 2
    said = capsys.readouterr().out
    assert found["verdicts"][0] in said.replace("\n", " ") or key in said
    losses = said.rpartition("loss of the last step: ")[2].split()[:2]
    assert losses[0].rstrip(",") == losses[1]


def test_work_is_what_a_step_did_and_not_how_fast() -> None:
    from eyeline.study.history import Step

    fast, slow = (Step.model_validate(step_line(1, step_s=s, loss=s, seconds={})) for s in (1.0, 2.0))
    assert work(fast) == work(slow)
