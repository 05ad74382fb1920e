"""One optimizer update. Sums and counts first, one division at the end."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from eyeline.core.batch import Batch, Counts
from eyeline.core.errors import fitting
from eyeline.core.plan import Part
from eyeline.core.step import Slot, Step
from eyeline.models.decoder import Output
from eyeline.models.moe import Aux, Balance, Bias, balance_loss, move_biases
from eyeline.parallel.copies import on_device
from eyeline.parallel.ranks import Ranks
from eyeline.train.in_backward import updating
from eyeline.train.loss_scale import LEAST, unscale
from eyeline.train.slices import gradients_in_slices, outputs_in_slices
from eyeline.train.small_adamw import SmallAdamW

Outcome = Literal["applied", "not finite", "overflow", "spike", "no targets"]  # overflow: of gradients, by the loss scale of fp16


@dataclass(frozen=True)
class ExpertLoad:
    """Where the tokens of one step went."""

    max_over_mean: float  # tokens of the busiest expert over the mean of its layer; of the layer where this is largest
    unused: int  # experts that got no token, over all layers
    balance_loss: float | None  # the loss that balances them, without its coefficient; None where there is none


@dataclass(frozen=True)
class Report:
    """What one step did."""

    # nats per label, over every label of the step, without what balances experts and the divergence from a teacher; None without labels
    loss: float | None
    grad_norm: float | None  # of all trainable parameters together, before clipping; None without labels
    outcome: Outcome  # weights and optimizer are untouched unless "applied"
    counts: Counts
    experts: ExpertLoad | None = None  # of a model that has some
    divergence: float | None = None  # nats per label that the divergence from a teacher added; None where none adds any
    loss_scale: float | None = None  # what the loss was multiplied by, in fp16


def update(
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    data: Step,
    ranks: Ranks,
    *,
    max_grad_norm: float | None,
    balance: Balance | None,
    seed: int,
    step: int,
    before_update: Callable[[float, float, Outcome], Outcome] = lambda _loss, _norm, outcome: outcome,
    loss_scale: float | None = None,
) -> Report:
    """Run every micro-batch forward and backward, clip, and apply the update unless something is not finite.

    The loss is summed over labels and divided once by the step's count, so that gradients do not depend on how the step is
    cut into micro-batches and ranks. `step` counts over the whole run: dropout is addressed by (seed, step, pack).
    `balance` says how the experts of MoE layers are balanced: what `set_balance` was given.
    `before_update` gets the loss, the norm, and what would become of the step, before anything is changed, and returns what becomes of it:
    a finite step may be skipped, by all ranks alike. `loss_scale` is what the loss is multiplied by for the backward passes, and gradients
    are divided by before they are looked at.
    Optimizers with `in_backward` have updated each parameter when its gradient was there, whether all were finite or not.
    A parameter that no micro-batch of any rank used has no gradient and is left alone: neither moved nor decayed. Nothing here
    depends on what this rank holds, only on what all ranks do together (`data.slots`): so they run the same passes.
    """
    if data.counts.supervised == 0:
        return Report(None, None, "no targets", data.counts)
    inside = [one for one in optimizers if isinstance(one, SmallAdamW) and one.in_backward]
    with updating(inside) if inside else nullcontext(list[Tensor]()) as norms:
        sums = add_gradients(model, data, ranks, balance, seed, step, loss_scale)
    parameters = [p for p in model.parameters() if p.grad is not None]
    ranks.sum_gradients(parameters)
    if loss_scale is not None:
        unscale(parameters, loss_scale)
    # of no gradients it is a zero on the host
    norm = torch.linalg.vector_norm(torch.stack(norms)) if norms else ranks.norm(parameters).to(sums.loss.device)
    loss, added, divergence = ranks.sum(torch.stack([sums.loss, sums.added, sums.divergence]))
    tokens_NE = None if sums.tokens_NE is None else ranks.sum(sums.tokens_NE)
    figures = [loss - added - divergence, norm, (loss.isfinite() & norm.isfinite()).float(), divergence]
    if tokens_NE is not None:
        figures += [*spread(tokens_NE.float()), added]
    # the one wait for the device in a step: a non-finite step must be decided before the optimizer touches its state
    loss_value, norm_value, finite, diverged, *routed = torch.stack(figures).tolist()
    outcome = before_update(loss_value, norm_value, outcome_of(loss_value, bool(finite), loss_scale))
    if outcome == "applied":
        if max_grad_norm:
            ranks.clip(parameters, max_grad_norm, norm)
        with fitting(f"the optimizer's state in step {step + 1}"):  # which it makes in its first step
            for optimizer in optimizers:
                optimizer.step()
        if tokens_NE is not None and isinstance(balance, Bias):
            here_NE = tokens_NE if ranks.pipeline is None else tokens_NE[ranks.pipeline.own_moe_layers]
            move_biases(model, here_NE, balance.rate)
    model.zero_grad(set_to_none=True)
    return Report(loss_value, norm_value, outcome, data.counts, expert_load(routed, balance), diverged or None, loss_scale)


def outcome_of(loss: float, finite: bool, loss_scale: float | None) -> Outcome:
    """What becomes of a step whose loss and gradients are finite or not. A smaller loss scale can help where the loss itself is finite."""
    if finite:
        return "applied"
    return "overflow" if loss_scale is not None and loss_scale > LEAST and math.isfinite(loss) else "not finite"


class Sums(NamedTuple):
    """What the micro-batches of this rank add to the step."""

    loss: Tensor  # over the step's labels, with what balances experts
    added: Tensor  # that, alone
    divergence: Tensor  # what a teacher added, alone
    tokens_NE: Tensor | None  # that each expert of each MoE layer got


def add_gradients(
    model: nn.Module, data: Step, ranks: Ranks, balance: Balance | None, seed: int, step: int, loss_scale: float | None = None
) -> Sums:
    """Run the micro-batches that have labels on some rank forward and backward: their gradients are then at the parameters, times
    `loss_scale`."""
    if ranks.pipeline is not None:
        return Sums(*gradients_in_slices(data, parts_ended(data.slots), ranks, ranks.pipeline, balance, seed, step, loss_scale))
    supervised, device = data.counts.supervised, next(model.parameters()).device
    total, added, divergence = (torch.zeros((), device=device) for _ in range(3))
    tokens_NE: Tensor | None = None
    running = [i for i, slot in enumerate(data.slots) if slot.counts.supervised]
    ended = parts_ended(data.slots)
    arriving = on_device((ranks.rows(data.batches[i].with_draws(seed, step)) for i in running), device)
    for i in running:
        with fitting(partial(batch_description, data.batches[i], f"micro-batch {i} of step {step + 1}")):
            _, batch = next(arriving)  # the copy of a batch may not fit, either
            ranks.sum_next(model, ended[i])
            with ranks.dealt(batch, data.slots[i]) as dealt:
                loss, load, diverged = model(dealt)
            if diverged is not None:
                divergence += diverged
            if load is not None:
                counted_NE = load.tokens_NE * (batch.counts.supervised > 0)  # a pack without labels runs for other ranks' sake alone
                tokens_NE = counted_NE if tokens_NE is None else tokens_NE + counted_NE
                if isinstance(balance, Aux):
                    auxiliary = balance.coef * batch.counts.supervised * balance_loss(load, ranks.sum_of_pack)
                    loss, added = loss + auxiliary, added + auxiliary.detach()
            loss = loss / supervised
            if loss.requires_grad:  # text alone never reaches a projector or tower that learns alone
                (loss if loss_scale is None else loss * loss_scale).backward()
            total += loss.detach()
    return Sums(total, added / supervised, divergence / supervised, tokens_NE)


def parts_ended(slots: Sequence[Slot]) -> list[tuple[Part, ...]]:
    """The parts, for each slot, that have got gradients in the step and get no more after it."""
    language = [n for n, slot in enumerate(slots) if slot.counts.supervised][-1:]
    images = [n for n, slot in enumerate(slots) if slot.counts.supervised and slot.image_gradients][-1:]
    ends: dict[Part, list[int]] = {"language": language, "vision": images, "projector": images}
    return [tuple(part for part, last in ends.items() if n in last) for n in range(len(slots))]


def spread(tokens_NE: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens of the busiest expert over its layer's mean, in the layer where that is largest; and the experts that got none."""
    return (tokens_NE.amax(1) / tokens_NE.mean(1).clamp_min(1e-9)).max(), (tokens_NE == 0).sum().float()


def expert_load(figures: Sequence[float], balance: Balance | None) -> ExpertLoad | None:
    """The report of `spread` and of what the auxiliary loss added; None of a model without experts, which has no figures."""
    if not figures:
        return None
    largest, unused, added = figures
    return ExpertLoad(largest, int(unused), added / balance.coef if isinstance(balance, Aux) else None)


def batch_description(batch: Batch, what: str) -> str:
    """What a batch on the host holds, and its longest document."""
    lengths = batch.cu_S1.diff()[: len(batch.ids)]
    longest = f"; its longest document is {batch.ids[int(lengths.argmax())]} with {int(lengths.max()):,}" if batch.ids else ""
    counts = batch.counts
    return f"{what} ({counts.slots:,} tokens{longest}; {counts.patches:,} patches, the largest image has {batch.longest_image:,})"


@torch.no_grad()
def validate(model: nn.Module, batches: Iterable[Batch], ranks: Ranks) -> tuple[float, int]:
    """The loss in nats per label over all batches of all ranks, which have as many each, and the number of labels. Dropout is off
    meanwhile."""
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    total = torch.zeros(2, device=device, dtype=torch.float64)  # loss, labels
    arriving = on_device(map(ranks.rows, batches), device)
    outputs = outputs_of(model, arriving) if ranks.pipeline is None else outputs_in_slices(arriving, ranks.pipeline)
    for here, output in outputs:
        total[0] += output.out
        total[1] += 0 if here.labels_L is None else len(here.labels_L)
    model.train(was_training)
    loss, labels = ranks.sum(total).tolist()
    return loss / max(labels, 1), int(labels)


def outputs_of(model: nn.Module, arriving: Iterator[tuple[Batch, Batch]]) -> Iterator[tuple[Batch, Output]]:
    """Each batch as it came, with what the model gives for it."""
    while True:
        with fitting("a batch of validation"):  # the copy of the next one
            here, batch = next(arriving, (None, None))
        if here is None or batch is None:
            return
        with fitting(partial(batch_description, here, "a batch of validation")):
            output = model(batch)
        yield here, output
