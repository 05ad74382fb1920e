"""Updates in the backward pass: a parameter is updated as soon as its gradient is there, and the gradient freed, so that gradients of one
block at most exist at once. What looks at all gradients before an update is refused by name."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from eyeline.core.errors import NotFinite, Refused
from eyeline.train.optim import updates_in_backward
from eyeline.train.run import Run, Stage
from eyeline.train.small_adamw import SmallAdamW


@contextmanager
def updating(optimizers: Sequence[SmallAdamW]) -> Iterator[list[Tensor]]:
    """While it is entered, these optimizers update each parameter in the backward pass. The norms of the gradients that they took."""
    norms: list[Tensor] = []
    hooks = [
        parameter.register_post_accumulate_grad_hook(partial(_update, optimizer, name, group, norms))
        for optimizer in optimizers
        for group in optimizer.param_groups
        for name, parameter in zip(group["names"], group["params"], strict=True)
    ]
    try:
        yield norms
    finally:
        for hook in hooks:
            hook.remove()


def _update(optimizer: SmallAdamW, name: str, group: dict[str, Any], norms: list[Tensor], parameter: Tensor) -> None:
    assert isinstance(parameter, nn.Parameter) and parameter.grad is not None
    norms.append(torch.linalg.vector_norm(parameter.grad))
    optimizer.update(name, parameter, group)
    parameter.grad = None


def refuse_spoiled_weights(stage: Stage, finite: bool, step: int, evidence: Path) -> None:
    """Raise NotFinite after a step that is not finite, where it has changed weights by then: before they are saved."""
    if not finite and updates_in_backward(stage.optimizer):
        raise NotFinite(
            f"Step {step} has a loss or gradient that is not finite, and optimizer.in_backward had changed weights when that was known: "
            f"they are not saved. With stages.{stage.name}.optimizer.in_backward=false and max_nonfinite_steps=5 the same command resumes "
            f"from the last checkpoint, and skips such a step. {evidence} says which samples this one had. Or lower the learning rate."
        )


def refuse_in_backward(run: Run) -> None:
    """Raise Refused where weights are to be updated in the backward pass and other settings do not go with that."""
    if problems := [*in_backward_problems(run)]:
        raise Refused("\n  ".join(problems))


def in_backward_problems(run: Run) -> Iterator[str]:
    """Settings that look at all gradients of a step before the update, or need them again after it."""
    for stage in run.stages:
        here = f"stages.{stage.name}.optimizer.in_backward updates a weight as soon as its gradient is there,"
        if not updates_in_backward(stage.optimizer):
            continue
        if stage.max_grad_norm:
            yield (
                f"{here} and max_grad_norm clips by the norm of all gradients. Set stages.{stage.name}.max_grad_norm=0, or leave "
                "in_backward out"
            )
        if stage.batch.packs_per_step > 1:
            yield (
                f"{here} and batch.packs_per_step={stage.batch.packs_per_step} adds up gradients of several micro-batches before it. Set "
                f"packs_per_step to 1 and raise max_tokens, or leave in_backward out"
            )
        if run.max_nonfinite_steps:
            yield (
                f"{here} so a step that is not finite cannot be dropped as max_nonfinite_steps={run.max_nonfinite_steps} says. Set "
                "max_nonfinite_steps=0: the run then stops there, and its last checkpoint is from before it. Or leave in_backward out"
            )
        if run.keep_bad_steps:
            yield (
                f"{here} so the weights before a step that is not finite or has a loss spike are gone when that is known, and "
                f"keep_bad_steps={run.keep_bad_steps} would keep them. Set keep_bad_steps=0, or leave in_backward out"
            )
        if run.max_spike_steps:
            yield (
                f"{here} so a step with a loss spike cannot be skipped as max_spike_steps={run.max_spike_steps} says. Set "
                "max_spike_steps=0, or leave in_backward out"
            )
        if run.precision == "fp16":
            yield (
                f"{here} and precision: fp16 looks for overflows in all gradients before it. Use precision: bf16, or leave in_backward out"
            )
