"""Schedules against numbers done by hand."""

import math

import pytest

from eyeline.train.schedule import WSD, Constant, Cosine, Linear, factor


def every(schedule, steps: int) -> list[float]:
    return [factor(schedule, step, steps) for step in range(steps)]


def test_constant() -> None:
    assert every(Constant(warmup_ratio=0.4), 5) == [0.5, 1.0, 1.0, 1.0, 1.0]


def test_linear_reaches_the_floor_one_step_after_the_last() -> None:
    assert every(Linear(warmup_ratio=0.0, min_lr_ratio=0.0), 4) == pytest.approx([1.0, 0.75, 0.5, 0.25])
    assert every(Linear(warmup_ratio=0.2, min_lr_ratio=0.5), 5) == pytest.approx([1.0, 1.0, 0.875, 0.75, 0.625])


def test_cosine() -> None:
    half = 0.5 * (1 + math.cos(math.pi / 4))
    assert every(Cosine(warmup_ratio=0.0), 4) == pytest.approx([1.0, half, 0.5, 1 - half])
    assert every(Cosine(warmup_ratio=0.0, min_lr_ratio=0.2), 2) == pytest.approx([1.0, 0.6])


def test_wsd() -> None:
    assert every(WSD(warmup_ratio=0.2, decay_ratio=0.4, min_lr_ratio=0.0), 10) == pytest.approx([0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25])


@pytest.mark.parametrize(
    "schedule", [Constant(warmup_ratio=1.0), Linear(warmup_ratio=1.0), Cosine(warmup_ratio=1.0), WSD(warmup_ratio=1.0, decay_ratio=0.0)]
)
def test_warmup_may_be_everything(schedule) -> None:
    assert every(schedule, 4) == [0.25, 0.5, 0.75, 1.0]


@pytest.mark.parametrize("schedule", [Constant(), Linear(), Cosine(), WSD(), WSD(warmup_ratio=0.5, decay_ratio=0.5)])
@pytest.mark.parametrize("steps", [1, 2, 3, 7, 100])
def test_no_step_is_wasted_or_overshoots(schedule, steps: int) -> None:
    assert all(0 < value <= 1 for value in every(schedule, steps))


def test_wsd_refuses_a_decay_that_starts_in_the_warmup() -> None:
    with pytest.raises(ValueError, match="add up to more than 1"):
        WSD(warmup_ratio=0.5, decay_ratio=0.6)
