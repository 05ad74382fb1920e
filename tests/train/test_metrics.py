"""The figures of a step's line, by hand."""

from pathlib import Path
from typing import Any

import pytest

import eyeline.train.loop as loop
from eyeline.core.files import read_lines
from eyeline.models.flops import NONE, Flops
from eyeline.train.metrics import Clock
from eyeline.train.schedule import factor
from eyeline.train.trainable import rates
from tests.train.figures import step_figures
from tests.train.recipe import tiny_run


def test_rates_of_a_line_leave_padding_out() -> None:
    """90 of 100 slots in half a second; 3 products in the forward pass and 6 in the backward pass, and 1 again."""
    flops = Flops({**NONE.forward, "language": 3_000}, {**NONE.backward, "language": 6_000}, 1_000)
    line = step_figures(flops=flops, peak=90_000.0).line()
    assert line["real_tokens_per_s"] == 180
    assert line["padding"] == pytest.approx(0.1)
    assert line["flops_per_s"] == 18_000 and line["flops_recomputed"] == 1_000
    assert line["mfu"] == 0.2
    assert line["flops"]["language"] == 9_000


def test_every_second_of_a_step_has_a_name() -> None:
    now = 0.0
    clock = Clock(lambda: now)
    with clock.spending("data_wait"):
        now += 2
    now += 1
    with clock.spending("compute"):
        now += 4
    with clock.spending("data_wait"):
        now += 8
    nothing = {"startup": 0, "validation": 0, "checkpoint": 0}
    assert clock.lap() == {"step": 15, "data_wait": 10, "compute": 4, "other": 1} | nothing
    now += 16
    assert clock.lap() == {"step": 16, "data_wait": 0, "compute": 0, "other": 16} | nothing


def test_each_step_has_its_rates_and_its_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates go by the step of the stage, and dropout by the step and seed of the whole run."""
    seen: list[tuple[int, int, dict[str, float]]] = []
    real = loop.update

    def update(model: Any, optimizers: Any, *args: Any, seed: int, step: int, **more: Any) -> Any:
        seen.append((seed, step, {group["part"]: group["lr"] for optimizer in optimizers for group in optimizer.param_groups}))
        return real(model, optimizers, *args, seed=seed, step=step, **more)

    monkeypatch.setattr(loop, "update", update)
    run = tiny_run(tmp_path, "seed=5")
    loop.train(run)
    assert [(seed, step) for seed, step, _ in seen] == [(5, step) for step in range(8)]
    wanted = [
        {part: rate * factor(stage.schedule, step, 4) for part, rate in rates(stage).items()} for stage in run.stages for step in range(4)
    ]
    assert [lr for *_, lr in seen] == wanted
    assert [line["lr"] for line in read_lines(tmp_path / "run" / "metrics.jsonl") if line["kind"] == "step"] == wanted
