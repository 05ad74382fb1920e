"""Learning-rate schedules: pure functions from a step to a factor between `floor` and 1."""

import math
from typing import Annotated, Literal, assert_never

from pydantic import Field, model_validator

from eyeline.core.settings import Settings, Share


class Constant(Settings):
    """Warm-up, then 1."""

    kind: Literal["constant"] = "constant"
    warmup: Share = 0.0  # share of the stage's steps that rise linearly from 0


class Linear(Settings):
    """Warm-up, then a straight line down to `floor`."""

    kind: Literal["linear"] = "linear"
    warmup: Share = 0.03
    floor: Share = 0.0


class Cosine(Settings):
    """Warm-up, then half a cosine down to `floor` (Loshchilov and Hutter 2017, without restarts)."""

    kind: Literal["cosine"] = "cosine"
    warmup: Share = 0.03
    floor: Share = 0.0


class WSD(Settings):
    """Warm-up, stable, decay (Hu et al. 2024): 1 until the last `decay` share of the steps, then straight down to `floor`."""

    kind: Literal["wsd"] = "wsd"
    warmup: Share = 0.03
    decay: Share = 0.2
    floor: Share = 0.0

    @model_validator(mode="after")
    def _fits(self) -> "WSD":
        if self.warmup + self.decay > 1:
            raise ValueError(f"warmup {self.warmup:g} and decay {self.decay:g} are shares of the same steps and add up to more than 1")
        return self


Schedule = Annotated[Constant | Linear | Cosine | WSD, Field(discriminator="kind")]


def factor(schedule: Schedule, step: int, steps: int) -> float:
    """What the learning rate is multiplied by in `step` (0-based) of `steps`.

    Warm-up ends with the full rate: its k-th of n steps has (k + 1) / n, so that no step has a rate of zero. What follows
    it goes from 1 in its first step towards `floor`, which would be reached one step after the last.
    """
    rising = round(schedule.warmup * steps)
    if step < rising:
        return (step + 1) / rising
    done = (step - rising) / max(steps - rising, 1)  # share of the steps after warm-up that are behind us
    match schedule:
        case Constant():
            return 1.0
        case Linear(floor=floor):
            return 1.0 - (1.0 - floor) * done
        case Cosine(floor=floor):
            return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * done))
        case WSD(floor=floor, decay=decay):
            falling = round(decay * steps)
            into = step - (steps - falling)
            return 1.0 if into < 0 else 1.0 - (1.0 - floor) * into / falling
        case _:
            assert_never(schedule)
