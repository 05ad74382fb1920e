"""The micro-batches of a step where ranks have slices of the model: what `step.py` does pass by pass, by the schedule of a pipeline."""

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from eyeline.core.batch import Batch, Budget
from eyeline.core.errors import fitting
from eyeline.core.plan import Part, Plan
from eyeline.core.step import Step
from eyeline.data.fetch.full_batch import full_batch
from eyeline.models import flops
from eyeline.models.decoder import Output
from eyeline.models.moe import Aux, Balance, Load, Routed, balance_loss, load_of
from eyeline.parallel.copies import on_device
from eyeline.parallel.mesh import Mesh
from eyeline.parallel.ranks import Ranks
from eyeline.parallel.rows import padded
from eyeline.parallel.slices import Asked, Cuts, DepthCosts, cuts_of, own_slices

if TYPE_CHECKING:  # torch.distributed takes a while to import, and a single process needs none of it
    from eyeline.parallel.pipeline import Pipeline

M = TypeVar("M", bound=nn.Module)


def cuts_for(plan: Plan[Any], budget: Budget, slices: int) -> Cuts:
    """The slices of a model by what they compute of a full micro-batch; DeepStack's blocks are in the first."""
    work = flops.work_of(full_batch(plan.spec.image, plan.spec.vocab_size, budget), plan.spec.image)
    first, blocks, last = flops.along_depth(plan.model, plan.spec.image, work)
    deep = 0 if plan.spec.vision is None else plan.spec.vision.deepstack
    return cuts_of(DepthCosts(first, blocks, last), slices, deep)


def cut_along_depth(plan: Plan[M], budget: Budget, mesh: Mesh | None) -> Plan[M]:
    """What this rank has of a planned model, where ranks have slices of it; else the plan as it is."""
    if mesh is None or mesh.pipeline is None:
        return plan
    return own_slices(plan, cuts_for(plan, budget, mesh.sizes.slices), mesh.pipeline.rank, mesh.pipeline.ranks)


def gradients_in_slices(
    data: Step,
    ended: Sequence[Collection[Part]],
    ranks: Ranks,
    pipeline: "Pipeline",
    balance: Balance | None,
    seed: int,
    step: int,
    loss_scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Run the micro-batches that have labels on some rank forward and backward. What this rank adds to the step: the loss, of which what
    balances experts, and the divergence from a teacher (from the last slice); and the tokens of the experts of all layers, not zero for
    those that are here. `ended`: `step.py: parts_ended`. `loss_scale`: as in `step.py: add_gradients`."""
    device, supervised = next(pipeline.plan.model.parameters()).device, data.counts.supervised
    total, added, divergence = (torch.zeros((), device=device) for _ in range(3))
    layers, experts = pipeline.moe_layers, pipeline.plan.spec.language.experts
    tokens_NE = torch.zeros(len(layers), experts, dtype=torch.int64, device=device) if layers and experts else None

    def routed(batch: Batch, numbers: Sequence[int], found: Sequence[Routed]) -> None:
        if tokens_NE is not None and found:
            tokens_NE[list(numbers)] += load_of(found).tokens_NE * (batch.counts.supervised > 0)

    def loss_of(batch: Batch, output: Any, before_2E: Tensor | None) -> Tensor:
        nonlocal total, added, divergence
        loss, load, diverged = output
        if diverged is not None:
            divergence += diverged
        if before_2E is not None and isinstance(balance, Aux):
            auxiliary = balance.coef * batch.counts.supervised * balance_loss(joined(load, before_2E), ranks.sum_of_pack)
            loss, added = loss + auxiliary, added + auxiliary.detach()
        loss = loss / supervised
        total += loss.detach()
        return loss if loss_scale is None else loss * loss_scale

    running = [i for i, slot in enumerate(data.slots) if slot.counts.supervised]
    tokens = max(len(batch.tokens_T) for batch in data.batches)
    own = [ranks.rows(padded(data.batches[i].with_draws(seed, step), tokens)) for i in running]
    arriving = (batch for _, batch in on_device(own, device))
    model = pipeline.plan.model
    asked = Asked(routed, loss_of, lambda n: ranks.sum_next(model, ended[running[n]]), tokens_NE is not None and isinstance(balance, Aux))
    with fitting(f"a micro-batch of step {step + 1} ({tokens:,} tokens; {len(running)} micro-batches, of which several are under way)"):
        pipeline.run(arriving, len(own), len(own[0].tokens_T), asked)
    return total, added / supervised, divergence / supervised, tokens_NE


def joined(load: Load | None, before_2E: Tensor) -> Load:
    """The load of a last slice, with that of all slices before as one more layer."""
    tokens_NE, mass_NE = before_2E[:1].detach(), before_2E[1:]
    if load is None:
        return Load(tokens_NE, mass_NE)
    return Load(torch.cat([tokens_NE, load.tokens_NE.float()]), torch.cat([mass_NE, load.mass_NE]))


def outputs_in_slices(arriving: Iterator[tuple[Batch, Batch]], pipeline: "Pipeline") -> Iterator[tuple[Batch, Output]]:
    """Each batch as it came, with what the model gives for it: on the rank of the last slice. The others compute as many."""
    for here, batch in arriving:
        with fitting("a batch of validation"):
            output = pipeline.run_forward(batch)
        if output is not None:
            yield here, output
