"""The CUDA graphs of a stage, captured before its first step; and what has none: refused by name, before anything is written."""

from collections.abc import Callable, Iterator

import torch

from eyeline.core.errors import Refused
from eyeline.core.log import say
from eyeline.core.plan import Plan
from eyeline.core.words import counted, duration
from eyeline.models import Model
from eyeline.models.compiled import attention_problem
from eyeline.models.qwen3_5 import GatedDeltaNet
from eyeline.parallel.launch import Machine
from eyeline.train.compile import made_up_batches
from eyeline.train.cuda_graph import GraphedUpdate, captures
from eyeline.train.fixed_batch import capacities_of
from eyeline.train.metrics import Clock
from eyeline.train.optim import AdamW
from eyeline.train.run import COMPUTE, Adapted, Checkpointing, Run, Stage

Notify = Callable[[str], object]
GRAPHS = "cuda_graph: true", "cuda_graph: false"
WORTH = 2048  # tokens of a micro-batch, about, from which on a GPU computes longer than the host takes to ask for the kernels


def graph_problems(run: Run, world_size: int = 1) -> Iterator[str]:
    """Settings that do not go with `cuda_graph: true`."""
    if not run.cuda_graph:
        return
    if world_size > 1:
        yield f"cuda_graph is for one device, and there are {world_size} ranks, whose collectives are not captured. Leave it out"
    if run.precision != "bf16":
        why = "attention reads document bounds on the host" if run.precision == "fp32" else "the loss scale is a number of the host"
        yield f"cuda_graph with precision: {run.precision}: {why}. Set precision: bf16"
    if run.compile != "none":
        yield f"cuda_graph with compile: {run.compile} is not there yet. Leave one of them out"
    if run.float8 != "none":
        yield f"cuda_graph with float8: {run.float8} is not there yet. Leave one of them out"
    if run.top_k_probabilities:
        yield "cuda_graph with top_k_probabilities: they are taken from the pass, which the host does not run. Leave one of them out"
    if run.max_spike_steps:
        yield "cuda_graph with max_spike_steps: a graph skips only steps that are not finite. Leave one of them out"
    for stage in run.stages:
        yield from (f"stages.{stage.name}.{line}. Leave one of them out" for line in _stage_problems(stage))


def _stage_problems(stage: Stage) -> Iterator[str]:
    how, optimizer = stage.gradient_checkpointing, stage.optimizer
    if not isinstance(optimizer, AdamW):
        yield f"optimizer.kind: {optimizer.kind} with cuda_graph: it takes numbers of the step from the host"
    elif optimizer.small:
        yield "optimizer with cuda_graph: with state_dtype, offload or in_backward it takes numbers of the step from the host"
    if isinstance(how, Checkpointing) and how.offload:
        yield "gradient_checkpointing.offload with cuda_graph: activations are copied to memory of the host that differs from step to step"
    if stage.distill is not None:
        yield "distill with cuda_graph: batches with a teacher's probabilities have no fixed size yet"
    for part, one in stage.trains.items():
        if isinstance(one, Adapted) and one.quantize != "none":
            yield f"trains.{part}.quantize with cuda_graph: packed weights have not been captured yet"


def model_problem(plan: Plan[Model]) -> str | None:
    """The reason why a model cannot be captured; None where it can be."""
    if plan.spec.language.experts is not None:
        return (
            "cuda_graph with a mixture of experts: how many rows an expert gets differs from batch to batch, and on most GPUs its kernel "
            "reads that on the host. Leave cuda_graph out"
        )
    if any(isinstance(module, GatedDeltaNet) for module in plan.model.modules()):
        return "cuda_graph with Gated DeltaNet: its chunks are derived from document bounds on the host. Leave cuda_graph out"
    return None


def device_problem(run: Run, device: torch.device) -> str | None:
    """The reason why graphs cannot be captured on a device; None where they can be."""
    if run.cuda_graph and device.type != "cuda":
        return f"cuda_graph captures what a GPU runs, and this run is on {device.type}. Leave it out"
    return None


def refuse_without_graphs(run: Run, here: Machine) -> None:
    """Raise Refused where graphs are to be captured and the device has none, or other settings do not go with them."""
    problem = device_problem(run, here.device)
    if problems := [*([problem] if problem else []), *graph_problems(run)]:
        raise Refused("\n  ".join(problems))


def worth_lines(run: Run, device: torch.device) -> Iterator[str]:
    """What `check` says of graphs: when they save time."""
    sizes = {stage.name: stage.batch.budget.tokens for stage in run.stages if stage.batch.chosen}
    small = {name: tokens for name, tokens in sizes.items() if tokens <= WORTH}
    if run.cuda_graph:
        yield (
            "cuda_graph: experimental. The update of each stage is captured before its first step; validation is not. Batches are padded "
            f"to fixed sizes, and logits are computed for all tokens: it is worth it below about {WORTH:,} tokens per micro-batch"
        )
        for name, tokens in sizes.items():
            if name not in small:
                yield f"cuda_graph: stage {name} has {tokens:,} tokens per micro-batch. It gains little and pads more: measure it both ways"
    elif device.type == "cuda" and small and not [*graph_problems(run.model_copy(update={"cuda_graph": True}))]:
        name, tokens = next(iter(small.items()))
        yield f"cuda_graph: true may save time: stage {name} has {tokens:,} tokens per micro-batch (experimental, see docs/gpu.md)"


def graphed_update(
    plan: Plan[Model], run: Run, stage: Stage, optimizers: list[torch.optim.Optimizer], here: Machine, clock: Clock, notify: Notify = say
) -> GraphedUpdate:
    """The update of a stage, captured on made-up batches of its size: nothing of them stays. Raises Refused for a model that has none."""
    problem = model_problem(plan) or attention_problem(plan.model, here.capability, COMPUTE[run.precision], *GRAPHS)
    if problem:
        raise Refused(problem)
    start, budget = clock.now(), stage.batch.budget
    capacities = capacities_of(plan.spec.image, budget)
    made_up = list(made_up_batches(plan, budget))
    graphs = GraphedUpdate(plan.model, optimizers, capacities, made_up, stage.max_grad_norm, captures(here.device), notify)
    say(f"cuda_graph: {counted(3 * len(made_up), 'graph')} were captured in {duration(clock.now() - start)}")
    return graphs
