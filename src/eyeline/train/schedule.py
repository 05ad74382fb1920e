"""Learning-rate schedules: pure functions from a step to a factor between `min_lr_ratio` and 1."""

import math
from typing import Annotated, Any, Literal, Self, assert_never

from pydantic import Field, model_validator

from eyeline.core.settings import NotNegative, Settings, Share


class _Warmup(Settings):
    """The warm-up, in which the rate rises from 0 to 1: over a share of the stage's steps, or over a number of them."""

    warmup_ratio: Share | None = 0.03  # of the stage's steps
    warmup_steps: NotNegative | None = None  # or a number of steps

    @model_validator(mode="before")
    @classmethod
    def _steps_alone(cls, values: Any) -> Any:
        """Drop the default ratio if steps are given."""
        if isinstance(values, dict) and values.get("warmup_steps") is not None and "warmup_ratio" not in values:
            return values | {"warmup_ratio": None}
        return values

    @model_validator(mode="after")
    def _one_warmup(self) -> Self:
        if (self.warmup_ratio is None) == (self.warmup_steps is None):
            got = "neither is given" if self.warmup_steps is None else "both are given"
            raise ValueError(f"warmup_ratio and warmup_steps say the same, and {got}. Give one of them (warmup_steps: 0 for none)")
        return self

    def steps_of_warmup(self, steps: int) -> int:
        """The steps of warm-up of a stage of `steps`."""
        if self.warmup_steps is not None:
            return min(self.warmup_steps, steps)
        assert self.warmup_ratio is not None
        return round(self.warmup_ratio * steps)


class Constant(_Warmup):
    """Warm-up, then 1."""

    kind: Literal["constant"] = "constant"
    warmup_ratio: Share | None = 0.0


class Linear(_Warmup):
    """Warm-up, then a straight line down to `min_lr_ratio`."""

    kind: Literal["linear"] = "linear"
    min_lr_ratio: Share = 0.0  # of the full rate


class Cosine(_Warmup):
    """Warm-up, then half a cosine down to `min_lr_ratio` (Loshchilov and Hutter 2017, without restarts)."""

    kind: Literal["cosine"] = "cosine"
    min_lr_ratio: Share = 0.0


class WSD(_Warmup):
    """Warm-up, stable, decay (Hu et al. 2024): 1 until the last `decay_ratio` of the steps, then straight down to `min_lr_ratio`."""

    kind: Literal["wsd"] = "wsd"
    decay_ratio: Share = 0.2
    min_lr_ratio: Share = 0.0

    @model_validator(mode="after")
    def _fits(self) -> "WSD":
        if self.warmup_ratio is not None and self.warmup_ratio + self.decay_ratio > 1:
            raise ValueError(
                f"warmup_ratio {self.warmup_ratio:g} and decay_ratio {self.decay_ratio:g} are shares of the same steps and add up to "
                "more than 1. Lower one of them"
            )
        return self


Schedule = Annotated[Constant | Linear | Cosine | WSD, Field(discriminator="kind")]


def factor(schedule: Schedule, step: int, steps: int) -> float:
    """The factor of the learning rate in `step` (0-based) of `steps`.

    Warm-up ends with the full rate: its k-th of n steps has (k + 1) / n, so that no step has a rate of zero. What follows
    it goes from 1 in its first step towards `min_lr_ratio`, which would be reached one step after the last.
    """
    rising = schedule.steps_of_warmup(steps)
    if step < rising:
        return (step + 1) / rising
    done = (step - rising) / max(steps - rising, 1)  # share of the steps after warm-up that are behind us
    match schedule:
        case Constant():
            return 1.0
        case Linear(min_lr_ratio=least):
            return 1.0 - (1.0 - least) * done
        case Cosine(min_lr_ratio=least):
            return least + (1.0 - least) * 0.5 * (1.0 + math.cos(math.pi * done))
        case WSD(min_lr_ratio=least, decay_ratio=decay):
            falling = round(decay * steps)
            into = step - (steps - falling)
            return 1.0 if into < 0 else 1.0 - (1.0 - least) * into / falling
        case _:
            assert_never(schedule)
