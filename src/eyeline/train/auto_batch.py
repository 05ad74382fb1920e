"""`batch: auto`: the size of packs, chosen before a run's first step, from the lengths of its samples and the memory of a device.

Sizes are powers of two, with patches in the proportion that the data have. Taken is the largest that fits, by the memory that `eyeline
check` counts, of those that lose fewest samples as too long and that the data fill often enough. The run's recipe.yaml keeps it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from eyeline.bundle.bundle import Bundle
from eyeline.core.batch import Budget
from eyeline.core.errors import Refused
from eyeline.core.log import say
from eyeline.core.plan import Spec
from eyeline.core.randomness import seed_for
from eyeline.core.words import gib, percent
from eyeline.core.world import World
from eyeline.data.reader import reader_of
from eyeline.data.report.budgets import LOST, Packing
from eyeline.data.report.report import budgets_to_choose_from
from eyeline.models import spec as spec_of
from eyeline.parallel.launch import Machine
from eyeline.parallel.mesh import model_problems
from eyeline.train.memory import Memory
from eyeline.train.run import Run, Stage
from eyeline.train.start import description_at, recorded_batches
from eyeline.train.trainable import memory_with, new_rows_of, plan_of, shares_of

OF_DEVICE = 0.9  # of a GPU's memory: PyTorch keeps some between allocations


@dataclass(frozen=True)
class Tried:
    """A size of packs, and what the stage needs with it."""

    packing: Packing
    memory: Memory | None  # None: not counted, since a smaller one does not fit


@dataclass(frozen=True)
class Choice:
    """What `auto` has taken for a stage, and from what."""

    stage: str
    room: int  # bytes of a device
    stated: bool  # whether the recipe says so
    tried: tuple[Tried, ...]
    taken: Packing

    def __str__(self) -> str:
        budget, whose = self.taken.budget, "memory_gb" if self.stated else f"{percent(OF_DEVICE)} of the device"
        return (
            f"batch of stage {self.stage}: auto takes max_tokens {budget.tokens:,} and max_patches {budget.patches:,}, {self._why()} "
            f"({gib(self.room)}: {whose})"
        )

    def _why(self) -> str:
        larger = [one for one in self.tried if one.packing.budget.tokens > self.taken.budget.tokens]
        if not larger:
            return "the largest size there is, which fits into memory"
        if larger[0].memory is None or larger[0].memory.total > self.room:
            return "the largest packs that fit into memory"
        return "since the data fill few packs of more"

    @property
    def table(self) -> list[tuple[str, ...]]:
        """The sizes, each with patches, padding, samples that are too long, and memory."""
        return [
            (
                f"{one.packing.budget.tokens:,}" + (" (taken)" if one.packing is self.taken else ""),
                f"{one.packing.budget.patches:,}",
                ("" if one.packing.settled else "about ") + percent(one.packing.waste),
                percent(one.packing.lost),
                "more than it has" if one.memory is None else gib(one.memory.total),
            )
            for one in self.tried
        ]


@dataclass(frozen=True)
class Chosen:
    """A run whose stages have sizes, but for those with problems."""

    run: Run
    choices: tuple[Choice, ...] = ()
    problems: tuple[str, ...] = ()


def device_bytes(here: Machine) -> int | None:
    """The memory of a GPU; None of a CPU, whose memory other programs share."""
    return torch.cuda.get_device_properties(here.device).total_memory if here.device.type == "cuda" else None


def with_batches(run: Run, folder: Path, here: Machine, world: World) -> Run:
    """The run with the sizes that `auto` takes, the same on every rank. Raises Refused with every problem."""
    if all(stage.batch.chosen for stage in run.stages):
        return run
    smallest = min((size for size in world.gather(device_bytes(here)) if size is not None), default=None)

    def work() -> dict[int, tuple[int, int]]:
        chosen = choose_batches(run, description_at(run, folder), folder, smallest, world.size, folder / "index")
        if chosen.problems:
            raise Refused("\n  ".join(chosen.problems))
        for choice in chosen.choices:
            say(str(choice))
        return {n: (stage.batch.budget.tokens, stage.batch.budget.patches) for n, stage in enumerate(chosen.run.stages)}

    sizes = world.by_first(work)
    return _with_sizes(run, {n: Budget(*size) for n, size in sizes.items()})


def choose_batches(run: Run, bundle: Bundle, folder: Path, device: int | None, world_size: int, cache: Path | None = None) -> Chosen:
    """The run with the sizes that its folder has on record, or that fit into `device` bytes on each of so many ranks. `cache`: where
    indexes are kept, which the run reads again."""
    run = _with_sizes(run, recorded_batches(run, folder))
    choices, problems = list[Choice](), list[str]()
    for index, stage in enumerate(run.stages):
        if stage.batch.chosen:
            continue
        try:
            choice = _choice(run, index, bundle, device, world_size, cache)
        except Refused as error:
            problems.append(f"stages.{stage.name}.batch: {error}")
        else:
            choices.append(choice)
            run = _with_sizes(run, {index: choice.taken.budget})
    return Chosen(run, tuple(choices), tuple(problems))


def _with_sizes(run: Run, sizes: dict[int, Budget]) -> Run:
    def of(n: int, stage: Stage) -> Stage:
        size = sizes.get(n)
        if stage.batch.chosen or size is None:
            return stage
        return stage.model_copy(update={"batch": stage.batch.model_copy(update={"max_tokens": size.tokens, "max_patches": size.patches})})

    return run.model_copy(update={"stages": tuple(of(n, stage) for n, stage in enumerate(run.stages))})


def _choice(run: Run, index: int, bundle: Bundle, device: int | None, world_size: int, cache: Path | None) -> Choice:
    """What `auto` takes for one stage. Raises Refused."""
    stage, spec = run.stages[index], spec_of(bundle.config)
    stated = stage.batch.memory_gb
    if stated is None and device is None:
        raise Refused(
            "auto needs the memory of a GPU, and this machine has none. State how many GB a device has for the stage: "
            f"stages.{stage.name}.batch={{auto: true, memory_gb: 16}}"
        )
    if run.mesh.pp > 1:
        raise Refused(f"auto counts the memory of whole models, and mesh.pp={run.mesh.pp} cuts them. Write max_tokens and max_patches")
    room = int((device or 0) * OF_DEVICE) if stated is None else int(stated * 1e9)
    data = stage.data if cache is None or stage.data.cache else stage.data.model_copy(update={"cache": str(cache)})
    reader = reader_of(data, bundle.encoder(), spec.image, seed_for(run.seed, "stage", index), longest=spec.max_positions)
    packings = [*_with_room_for_an_image(budgets_to_choose_from(reader), spec)]
    if not packings:
        raise Refused("auto finds no sample that can be used in the data, and no size for packs")
    shares = shares_of(run, world_size)
    plan = plan_of(run, index, bundle.config, apart=new_rows_of(run, index, bundle), shares=shares)
    tried: list[Tried] = []
    for packing in packings:
        over = tried and (tried[-1].memory is None or tried[-1].memory.total > room)
        tried.append(Tried(packing, None if over else memory_with(plan, run, stage, packing.budget, shares)))
    taken = _taken(tried, room, stage)
    if problems := [*model_problems(run.mesh, plan, taken.budget.tokens)]:
        raise Refused("; ".join(problems))
    return Choice(stage.name, room, stated is not None, tuple(tried), taken)


def _with_room_for_an_image(packings: Sequence[Packing], spec: Spec) -> Iterator[Packing]:
    """Those that can hold an image with some text, whatever the data have."""
    smallest = spec.image.units(1, 1) if spec.image is not None else ()
    tokens, patches = sum(unit.tokens for unit in smallest), sum(unit.grid.patches for unit in smallest)
    for packing in packings:
        if packing.budget.tokens > tokens:
            yield replace(packing, budget=Budget(packing.budget.tokens, max(packing.budget.patches, patches)))


def _taken(tried: Sequence[Tried], room: int, stage: Stage) -> Packing:
    """The size to take. Raises Refused where none fits, or those that fit lose more samples than the stage may."""
    fitting = [one.packing for one in tried if one.memory is not None and one.memory.total <= room]
    less = "Recompute activations (gradient_checkpointing: true), train less, or give it more memory"
    if not fitting:
        first = tried[0]
        assert first.memory is not None, "the first is counted"
        raise Refused(
            f"auto has {gib(room)} of a device, and with packs of {first.packing.budget.tokens:,} tokens, the smallest that suit the data, "
            f"the stage needs about {gib(first.memory.total)}: {first.memory}. {less}"
        )
    taken = min(fitting, key=lambda one: (not one.settled, max(one.lost, LOST), -one.budget.tokens))
    best = min(max(one.packing.lost, LOST) for one in tried)
    if stage.data.overlong == "reject" and taken.lost > max(stage.data.max_reject_rate, best):
        raise Refused(
            f"auto has {gib(room)} of a device, which packs of {taken.budget.tokens:,} tokens fit into at most, and {percent(taken.lost)} "
            f"of the samples are longer. {less}, or let data.overlong be drop_turns"
        )
    return taken
