"""One optimizer update. Sums and counts first, one division at the end."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from eyeline.core.batch import Batch, Counts
from eyeline.core.errors import fitting
from eyeline.models.moe import Aux, Balance, Bias, balance_loss, move_biases
from eyeline.parallel.copies import on_device

Outcome = Literal["applied", "not finite", "no targets"]


@dataclass(frozen=True)
class ExpertLoad:
    """Where the tokens of one step went."""

    max_over_mean: float  # tokens of the busiest expert over the mean of its layer; of the layer where this is largest
    unused: int  # experts that got no token, over all layers
    balance_loss: float | None  # the loss that balances them, without its coefficient; None where there is none


@dataclass(frozen=True)
class Report:
    """What one step did."""

    loss: float | None  # nats per label, over every label of the step, without what balances experts; None without labels
    grad_norm: float | None  # of all trainable parameters together, before clipping; None without labels
    outcome: Outcome  # weights and optimizer are untouched unless "applied"
    counts: Counts
    experts: ExpertLoad | None = None  # of a model that has some


def update(
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    micro_batches: Sequence[Batch],
    *,
    max_grad_norm: float | None,
    seed: int,
    step: int,
    balance: Balance | None = None,
) -> Report:
    """Run every micro-batch forward and backward, clip, and apply the update unless something is not finite.

    The loss is summed over labels and divided once by the step's count, so that gradients do not depend on how the step is
    cut into micro-batches. `step` counts over the whole run: dropout's randomness is addressed by (seed, step, micro-batch).
    `balance` says how the experts of MoE layers are balanced, as `set_balance` was told.
    A parameter that no micro-batch used has no gradient and is left alone: neither moved nor decayed.
    """
    counts = sum((batch.counts for batch in micro_batches), Counts.zero())
    if counts.supervised == 0:
        return Report(None, None, "no targets", counts)

    device = next(model.parameters()).device
    total, added = (torch.zeros((), device=device) for _ in range(2))
    tokens_NE: Tensor | None = None  # that each expert of each MoE layer got
    arriving = on_device((batch.with_draws(seed, step, i) for i, batch in enumerate(micro_batches)), device)
    for i, here in enumerate(micro_batches):
        with fitting(partial(described, here, f"micro-batch {i} of step {step + 1}")):
            batch = next(arriving)  # the copy of a batch may not fit, either
            if batch.counts.supervised == 0:
                continue
            loss, load = model(batch)
            if load is not None:
                tokens_NE = load.tokens_NE if tokens_NE is None else tokens_NE + load.tokens_NE
                if isinstance(balance, Aux):
                    auxiliary = balance.coef * batch.counts.supervised * balance_loss(load)
                    loss, added = loss + auxiliary, added + auxiliary.detach()
            loss = loss / counts.supervised
            if loss.requires_grad:  # text alone never reaches a projector or tower that learns alone
                loss.backward()
            total += loss.detach()

    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients).to(device)  # of no gradients it is a zero on the host
    added = added / counts.supervised
    figures = [total - added, norm, (total.isfinite() & norm.isfinite()).float()]
    if tokens_NE is not None:
        figures += [*spread(tokens_NE.float()), added]
    # the one wait for the device in a step: a non-finite step must be decided before the optimizer touches its state
    loss_value, norm_value, finite, *routed = torch.stack(figures).tolist()
    if finite:
        if max_grad_norm:
            torch.nn.utils.clip_grads_with_norm_([p for p in model.parameters() if p.grad is not None], max_grad_norm, norm)
        with fitting(f"the optimizer's state in step {step + 1}"):  # which it makes in its first step
            for optimizer in optimizers:
                optimizer.step()
        if tokens_NE is not None and isinstance(balance, Bias):
            move_biases(model, tokens_NE, balance.rate)
    model.zero_grad(set_to_none=True)
    return Report(loss_value, norm_value, "applied" if finite else "not finite", counts, expert_load(routed, balance))


def spread(tokens_NE: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens of the busiest expert over its layer's mean, in the layer where that is largest; and the experts that got none."""
    return (tokens_NE.amax(1) / tokens_NE.mean(1).clamp_min(1e-9)).max(), (tokens_NE == 0).sum().float()


def expert_load(figures: Sequence[float], balance: Balance | None) -> ExpertLoad | None:
    """The report of `spread` and of what the auxiliary loss added; None of a model without experts, which has no figures."""
    if not figures:
        return None
    largest, unused, added = figures
    return ExpertLoad(largest, int(unused), added / balance.coef if isinstance(balance, Aux) else None)


def described(batch: Batch, what: str) -> str:
    """What a batch on the host holds, and its longest document."""
    lengths = batch.cu_S1.diff()[: len(batch.ids)]
    longest = f"; its longest document is {batch.ids[int(lengths.argmax())]} with {int(lengths.max()):,}" if batch.ids else ""
    counts = batch.counts
    return f"{what} ({counts.slots:,} tokens{longest}; {counts.patches:,} patches, the largest image has {batch.longest_image:,})"


@torch.no_grad()
def validate(model: nn.Module, batches: Iterable[Batch]) -> tuple[float, int]:
    """The loss in nats a label over all of `batches`, and the number of labels. Dropout is off meanwhile."""
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    total = torch.zeros((), device=device, dtype=torch.float64)
    labels = 0
    for batch in batches:
        if batch.counts.supervised:
            with fitting(partial(described, batch, "a batch of validation")):
                total += model(batch.to(device)).out
            labels += batch.counts.supervised
    model.train(was_training)
    return float(total) / max(labels, 1), labels
