"""Dynamic loss scaling of `precision: fp16`, whose smallest number is 6e-8: the loss is multiplied by a factor before the backward pass, so
that small gradients are not rounded to zero, and gradients are divided by it, in float32, before anything looks at them.

The factor follows torch.amp.GradScaler: halved after a step whose gradients are not finite, which is skipped; doubled after GROWTH_STEPS
that were applied. It does not fall below LEAST: where gradients overflow there, the factor is not what makes them.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch.nn import Parameter

from eyeline.core.shards import is_sharded

FIRST, LEAST, GROWTH_STEPS = 65536.0, 1.0, 2000


def scaling_line(precision: str, resumed_at: float | None = None) -> str | None:
    """What a user of fp16 is told before it starts. `resumed_at`: the loss scale of the checkpoint that a run resumes from."""
    if precision != "fp16":
        return None
    if resumed_at is not None:
        return f"fp16: the loss scale is {resumed_at:,.0f}, as in the checkpoint, and adapts; a step whose gradients overflow is skipped"
    return f"fp16: the loss scale starts at {FIRST:,.0f} and adapts; a step whose gradients overflow is skipped, as a few first ones may be"


class LossScale(NamedTuple):
    """The factor of the next step. Two plain numbers: they are in a checkpoint's state."""

    factor: float = FIRST
    good_steps: int = 0  # that were applied since it changed last

    def after(self, applied: bool) -> "LossScale":
        """The factor after a step that was applied, or skipped since it was not finite."""
        if not applied:
            return LossScale(max(self.factor / 2, LEAST), 0)
        grows = self.good_steps + 1 == GROWTH_STEPS
        return LossScale(self.factor * 2 if grows else self.factor, 0 if grows else self.good_steps + 1)


@torch.no_grad()
def unscale(parameters: Iterable[Parameter], factor: float) -> None:
    """Divide gradients, which are in float32, by a power of two."""
    gradients = [p.grad.to_local() if is_sharded(p.grad) else p.grad for p in parameters if p.grad is not None]  # type: ignore[attr-defined]
    if gradients:
        torch._foreach_mul_(gradients, 1 / factor)  # pyright: ignore[reportPrivateImportUsage]
