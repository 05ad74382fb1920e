"""`eyeline bench step`: real training steps of a recipe's shape on this machine, with made-up weights and a made-up batch, timed.

It is the counterpart of `bench roofline`: the same full micro-batches, the code that trains, and a clock. It needs no data, no
weights and no run folder, so it says what a machine reaches before anything is downloaded.
"""

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from eyeline.bundle.computing import choose_kernels
from eyeline.core.errors import fitting
from eyeline.core.files import write_json
from eyeline.core.log import say
from eyeline.core.plan import Plan
from eyeline.core.randomness import torch_rng_for
from eyeline.core.step import step_alone
from eyeline.core.words import counted, gib, percent
from eyeline.data.fetch.full_batch import full_batch
from eyeline.models import Config, Model, flops
from eyeline.parallel.launch import Machine, machine
from eyeline.parallel.place import place
from eyeline.parallel.ranks import ONE_DEVICE
from eyeline.study.roofline.roofline import config_for, one_device_lines, resized, stage_index
from eyeline.train.compile import compile_first, refuse_attention, refuse_without_compiler
from eyeline.train.environment import environment
from eyeline.train.float8 import refuse_without_float8
from eyeline.train.graph_start import graphed_update, refuse_without_graphs
from eyeline.train.in_backward import refuse_in_backward
from eyeline.train.loss_scale import LEAST
from eyeline.train.metrics import Clock
from eyeline.train.optim import make_optimizers
from eyeline.train.peak import peak_stamp
from eyeline.train.run import COMPUTE, Run
from eyeline.train.step import Report, update
from eyeline.train.trainable import needed_memory, plan_of


@dataclass(frozen=True)
class Timed:
    """Steps of one stage, one after another on one device."""

    seconds: Sequence[float]  # of each step, until the device had finished it
    slots: int  # token positions of a step
    flops: float  # that the model needs for a step, forward and backward
    peak: float | None  # FLOP/s that MFU is a share of
    peak_name: str | None
    memory_bytes: int  # in use at its highest; on a CPU the resident set of the process
    planned_bytes: int  # that `eyeline check` estimates

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def mfu(self) -> float | None:
        return None if self.peak is None else self.flops / self.median_s / self.peak


def bench_steps(
    run: Run,
    *,
    stage: str | None,
    size: str | None,
    tokens: int | None,
    patches: int | None,
    packs: int | None,
    steps: int,
    warm_up: int,
    out: Path | None,
) -> None:
    """Time steps of a stage, print what they reached, and write it to `out`."""
    here = machine(run.device, run.threads, run.deterministic)
    refuse_without_compiler(run, here)
    refuse_without_float8(run, here)
    refuse_without_graphs(run, here)
    index = stage_index(run, stage)
    asked = resized(run, index, tokens, patches, packs)
    refuse_in_backward(asked)
    with fitting("a step of this size"):
        timed = time_steps(asked, index, config_for(run, size), steps, warm_up, here)
    for line in (*one_device_lines(run), *lines(timed, here)):
        say(line)
    if out is not None:
        about = {
            "recipe": run.name,
            "stage": run.stages[index].name,
            "model": size or run.model.path or run.name,
            "compile": run.compile,
            "cuda_graph": run.cuda_graph,
        }
        figures = {**asdict(timed), "median_s": timed.median_s, "mfu": timed.mfu}
        write_json(out, {"format": 1, "measured": True, **about, **figures, "environment": environment(here)})


def time_steps(run: Run, index: int, config: Config, steps: int, warm_up: int, here: Machine) -> Timed:
    """Train `warm_up` steps, then `steps` on the clock, on the same full micro-batch again and again, at a learning rate of 0."""
    stage = run.stages[index]
    packs = stage.batch.packs_per_step
    plan = plan_of(run, index, config)
    place(plan, here.device)
    fill_evenly(plan, run.seed)
    choose_kernels(plan.model, here, COMPUTE[run.precision], trains=True)
    refuse_attention(plan, run, here)
    arithmetic = flops.count(plan.model, plan.spec.image)
    optimizers = make_optimizers(plan, stage.optimizer, run.seed)
    plan.model.train()
    if run.compile == "blocks":
        compile_first(plan, run, stage, ONE_DEVICE, Clock())
    graphs = graphed_update(plan, run, stage, optimizers, here, Clock()) if run.cuda_graph else None
    batch = full_batch(plan.spec.image, plan.spec.vocab_size, stage.batch.budget)

    def train(step: int) -> Report:
        if graphs is not None:
            return graphs.update(step_alone([batch] * packs), run.seed, step)
        how: dict[str, Any] = {"max_grad_norm": stage.max_grad_norm, "balance": stage.experts, "seed": run.seed}
        how["loss_scale"] = LEAST if run.precision == "fp16" else None  # as much work at any factor
        return update(plan.model, optimizers, step_alone([batch] * packs), ONE_DEVICE, **how, step=step)

    for step in range(warm_up):
        train(step)
    seconds = []
    for step in range(warm_up, warm_up + steps):
        _finish(here)
        start = time.perf_counter()
        report = train(step)
        _finish(here)
        seconds.append(time.perf_counter() - start)
        assert report.outcome == "applied", f"a step of made-up weights was dropped: {report.outcome}"
    peak = peak_stamp(here, run.precision, ())
    return Timed(
        seconds=seconds,
        slots=packs * batch.counts.slots,
        flops=packs * sum(arithmetic.of(batch).by_part.values()),
        peak=None if peak is None else peak["flops_per_s"],
        peak_name=None if peak is None else peak["name"],
        memory_bytes=here.memory_bytes(),
        planned_bytes=needed_memory(run, index, config, None).total,
    )


@torch.no_grad()
def fill_evenly(plan: Plan[Model], seed: int) -> None:
    """Give every matrix small random numbers, drawn on its device, and everything else ones: in float arithmetic the time of a step does
    not depend on what is in them."""
    rng: torch.Generator | None = None
    for _, x, entry in plan.tensors():
        if x.ndim < 2 or not x.is_floating_point():
            x.fill_(0 if entry.role == "buffer" else 1)
            continue
        rng = rng or torch_rng_for(seed, "weights", device=x.device)
        x.uniform_(-0.02, 0.02, generator=rng)


def lines(timed: Timed, here: Machine) -> Iterator[str]:
    """What is printed of them."""
    low, high = min(timed.seconds), max(timed.seconds)
    yield (
        f"measured: {timed.median_s:.4f} s per step, median of {counted(len(timed.seconds), 'step')} ({low:.4f} to {high:.4f}); "
        f"{timed.slots / timed.median_s:,.0f} tokens/s, {timed.flops / timed.median_s / 1e12:,.2f} TFLOP/s"
    )
    yield f"MFU {percent(timed.mfu)} of {timed.peak_name}" if timed.mfu is not None else "MFU: the peak of this device is not known"
    whose = "of the device" if here.device.type == "cuda" else "of the whole process"
    yield f"memory: {gib(timed.memory_bytes)} {whose} at its highest; `eyeline check` estimates {gib(timed.planned_bytes)} for a GPU"


def _finish(here: Machine) -> None:
    if here.device.type == "cuda":
        torch.cuda.synchronize(here.device)
