"""Case `ranks`: optimizer steps of one model on two ranks (gloo), ours against plain FSDP2, and two ranks against one process."""

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from bench.measure import LEAST_PAIRS, Comparison, Conditions, Fact, Result, Stopwatch, Timed, interleaved
from bench.work import Sized, documents, made
from eyeline.bundle.bundle import open_bundle
from eyeline.bundle.fill import fill
from eyeline.core.batch import Document
from eyeline.core.errors import Refused
from eyeline.core.step import step_alone, step_of
from eyeline.core.world import World
from eyeline.data.fetch.batches import batch_of
from eyeline.models.shape import shape
from eyeline.parallel.join import STORE, joined, started
from eyeline.parallel.mesh import MeshSizes, mesh_of
from eyeline.parallel.place import place
from eyeline.parallel.ranks import ONE_DEVICE, ranks_of
from eyeline.train.optim import AdamW, make_optimizers, set_learning_rates
from eyeline.train.step import update

SIZED = Sized(image=64, width=256, layers=4)
RANKS, TOKENS, ROWS, STEPS, WARM_UP = 2, 130, 4, 10, 2
LR = 1e-3
TOLERANCE = 1e-5
Losses = list[float]
Side = Callable[[], tuple[Timed, Losses]]


def run(pairs: int = LEAST_PAIRS) -> Result:
    """Start the ranks, which time the sides in turn, and read what rank 0 has found."""
    conditions = Conditions()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bundle, _ = made(SIZED, folder / "model")
        token = bundle.encoder().image_token
        context = multiprocessing.get_context("spawn")
        found = context.SimpleQueue()
        ranks = [context.Process(target=as_rank, args=(rank, folder, token, pairs, found)) for rank in range(RANKS)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        if any(rank.exitcode for rank in ranks) or found.empty():
            raise Refused(f"ranks ended with {[rank.exitcode for rank in ranks]}: see above.")
        times, worst, parameters = found.get()
    return Result(
        case="ranks",
        command="python -m bench ranks",
        work=f"{STEPS} optimizer steps (after {WARM_UP} that are not timed) of a model of {parameters:,} parameters in LLaVA's form, "
        f"everything trained, AdamW, clipping, fp32; {RANKS} ranks of one thread each over gloo, {ROWS} samples of {TOKENS} "
        "tokens per rank and step, laid out inside the time. Peer: the same module with `fully_shard` on every block and on the "
        "whole, gradients summed by FSDP2, `clip_grad_norm_` and AdamW, without any of Eyeline's code around it. One process "
        "takes all samples of a step in as many micro-batches. CPU time is of all ranks together.",
        agreement=f"the losses of all {WARM_UP + STEPS} steps agree within {worst:.1e}",
        comparisons=(
            Comparison(
                name="against plain FSDP2", unit="optimizer steps", amount=STEPS, ours=times["ours"], peer=times["fsdp2"], limit=1.05,
                judged="time",
            ),
            Comparison(
                name="two ranks against one", unit="optimizer steps", amount=STEPS, ours=times["ours"], peer=times["one"], limit=None,
                judged="time",
            ),
        ),
        facts=(Fact(name="largest difference of a step's loss", value=worst, limit=f"≤ {TOLERANCE}", met=True),),
        **conditions.read(),  # type: ignore[arg-type]  # its three fields
    )  # fmt: skip


def as_rank(rank: int, folder: Path, token: int, pairs: int, found: Any) -> None:
    """One rank: times the sides together with the other; rank 0 puts what came out into `found`."""
    places = {"RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": RANKS, STORE: folder / "store"}
    os.environ |= {name: str(value) for name, value in places.items()}
    torch.set_num_threads(1)
    with joined(started(), "cpu", 600) as world:
        docs = documents(SIZED, token, [TOKENS] * (RANKS * ROWS * (WARM_UP + STEPS)))
        sides = {"ours": ours(world, folder, docs), "fsdp2": plain(world, folder, docs), "one": alone(world, folder, docs)}
        losses = {name: side()[1] for name, side in sides.items()}
        others = ("fsdp2", "one") if world.first else ("fsdp2",)  # the second rank waits while there is one
        worst = max(abs(a - b) for other in others for a, b in zip(losses["ours"], losses[other], strict=True))
        if worst > TOLERANCE:
            raise Refused(f"the losses of the sides differ by up to {worst:.2g} (at most {TOLERANCE}): they do not do the same work.")
        with nullcontext() if world.first else redirect_stdout(None):
            times = interleaved({name: together(world, side) for name, side in sides.items()}, pairs, "ranks")
        if world.first:
            config = open_bundle(folder / "model").bundle.config
            found.put((times, worst, sum(p.numel() for p in shape(config).model.parameters())))
        world.gather(None)


def together(world: World, side: Side) -> Callable[[], Timed]:
    """The CPU time of all ranks, and the wall time of the slowest."""

    def once() -> Timed:
        world.gather(None)
        every = world.gather(side()[0])
        return Timed(cpu_s=sum(one.cpu_s for one in every), wall_s=max(one.wall_s for one in every))

    return once


def packs(docs: list[Document], step: int) -> list[list[Document]]:
    """Those of all ranks."""
    first = step * RANKS * ROWS
    return [docs[first + rank * ROWS : first + (rank + 1) * ROWS] for rank in range(RANKS)]


def ours(world: World, folder: Path, docs: list[Document]) -> Side:
    mesh = mesh_of(MeshSizes(), world, "cpu")
    assert mesh is not None
    ranks = ranks_of(mesh)

    def side() -> tuple[Timed, Losses]:
        opened = open_bundle(folder / "model")
        plan = shape(opened.bundle.config)
        place(plan, "cpu", mesh)
        fill(plan, opened.bundle.config, dict.fromkeys(plan.spec.parts, opened.weights))
        plan.model.train()
        optimizers = make_optimizers(plan, AdamW())
        set_learning_rates(optimizers, dict.fromkeys(plan.spec.parts, LR), 1.0)

        def step(number: int) -> float:
            batch = batch_of(packs(docs, number)[world.rank], None)
            counts = [[of] for of in world.gather(batch.counts)]
            data = step_of([batch], [world.rank], counts, [[(0, 0)] * RANKS], {}, None)
            report = update(plan.model, optimizers, data, ranks, max_grad_norm=1.0, balance=None, seed=0, step=number)
            assert report.loss is not None, "every document here has labels"
            return report.loss

        return timed_steps(step)

    return side


def plain(world: World, folder: Path, docs: list[Document]) -> Side:
    """What a careful user writes with FSDP2 alone."""

    def side() -> tuple[Timed, Losses]:
        opened = open_bundle(folder / "model")
        plan = shape(opened.bundle.config)
        place(plan, "cpu")
        fill(plan, opened.bundle.config, dict.fromkeys(plan.spec.parts, opened.weights))
        model = plan.model.train()
        for blocks in (model.vision.blocks, model.language.blocks):  # type: ignore[union-attr]
            for block in blocks:  # type: ignore[union-attr]
                fully_shard(block)  # type: ignore[arg-type]
        fully_shard(model)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        optimizer = adamw(model)

        def step(number: int) -> float:
            batch = batch_of(packs(docs, number)[world.rank], None)
            labels = torch.tensor(float(batch.counts.supervised))
            torch.distributed.all_reduce(labels)
            loss = model(batch).out / labels
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            total: Tensor = loss.detach().clone()
            torch.distributed.all_reduce(total)
            return total.item()

        return timed_steps(step)

    return side


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """As ours has it: betas, and no decay."""
    settings = AdamW()
    return torch.optim.AdamW(model.parameters(), lr=LR, betas=settings.betas, eps=settings.eps, weight_decay=0.0, fused=True)


def alone(world: World, folder: Path, docs: list[Document]) -> Side:
    """Rank 0 as the only process; the other waits."""

    def side() -> tuple[Timed, Losses]:
        if not world.first:
            return Timed(cpu_s=0, wall_s=0), [0.0] * (WARM_UP + STEPS)
        opened = open_bundle(folder / "model")
        plan = shape(opened.bundle.config)
        place(plan, "cpu")
        fill(plan, opened.bundle.config, dict.fromkeys(plan.spec.parts, opened.weights))
        plan.model.train()
        optimizers = make_optimizers(plan, AdamW())
        set_learning_rates(optimizers, dict.fromkeys(plan.spec.parts, LR), 1.0)

        def step(number: int) -> float:
            data = step_alone([batch_of(pack, None) for pack in packs(docs, number)])
            loss = update(plan.model, optimizers, data, ONE_DEVICE, max_grad_norm=1.0, balance=None, seed=0, step=number).loss
            assert loss is not None, "every document here has labels"
            return loss

        return timed_steps(step)

    return side


def timed_steps(step: Callable[[int], float]) -> tuple[Timed, Losses]:
    """The time of the steps after the warm-up, and every loss."""
    losses, watch = [], Stopwatch()
    for number in range(WARM_UP + STEPS):
        if number == WARM_UP:
            watch = Stopwatch()
        losses.append(step(number))
    return watch.read(), losses
