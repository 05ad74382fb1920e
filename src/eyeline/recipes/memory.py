"""The lines of `check` about a stage on its device: the memory that it needs, the size of packs that `batch: auto` takes for it, and the
adapter that the first one starts from."""

from collections.abc import Iterator, Sequence

from eyeline.bundle.bundle import Bundle
from eyeline.bundle.peft_adapter import adapter_lines
from eyeline.core.errors import Refused
from eyeline.core.words import gib
from eyeline.core.world import World
from eyeline.models import Config
from eyeline.models.shape import shape
from eyeline.parallel.launch import machine
from eyeline.parallel.mesh import model_problems
from eyeline.recipes.problems import problems_of_ranks
from eyeline.study.data_page import Block, Grid, Line
from eyeline.train.auto_batch import Choice, Chosen, choose_batches, device_bytes
from eyeline.train.loop import run_folder
from eyeline.train.run import Run
from eyeline.train.start import adapter_of
from eyeline.train.trainable import memory_of_slices, needed_memory, new_rows_of, plan_of, rank_problems, shares_of


def memory_lines(run: Run, config: Config, bundle: Bundle | None, world_size: int) -> Iterator[str]:
    """What the model of each stage needs on the device of each rank. `bundle`: where new tokens are looked up, if there are any."""
    if run.mesh.pp > 1 and [
        *problems_of_ranks(run, world_size),
        *rank_problems(run, world_size),
        *model_problems(run.mesh, shape(config, trains={})),
    ]:
        return
    for index, stage in enumerate(run.stages):
        if not stage.batch.chosen:
            continue
        try:
            shares = shares_of(run, world_size)
            apart = None if bundle is None else new_rows_of(run, index, bundle)
            if run.mesh.pp > 1:
                count = -(-stage.batch.packs_per_step // (world_size // run.mesh.same_packs))
                needed, slices = memory_of_slices(run, index, config, apart, shares, count)
                yield f"slices of stage {stage.name}, by FLOPs of a full micro-batch: blocks {slices}"
            else:
                needed = needed_memory(run, index, config, apart, shares)
        except Refused:
            continue  # among the settings' problems already
        most = ", of the slices that need the most" if run.mesh.pp > 1 else ""
        each = f"memory of stage {stage.name}" + (f" per rank{most}" if world_size > 1 else "")
        rows = ", activations as if it had all rows of its pack" if run.mesh.per_pack > 1 else ""
        yield f"{each}: {needed}; together about {gib(needed.total)} (counted for a GPU on full micro-batches{rows})"


SIZES = ("max_tokens", "max_patches", "padding", "too long", "memory")  # columns of the table of what `batch: auto` tried


def chosen_batches(run: Run, bundle: Bundle | None, world_size: int, world: World) -> Chosen:
    """The run with the sizes of packs that `batch: auto` takes here, or has taken in its folder."""
    if bundle is None or all(stage.batch.chosen for stage in run.stages):
        return Chosen(run)
    try:
        device = device_bytes(machine(run.device, world=world))
    except Refused:  # among the device's problems already
        device = None
    return choose_batches(run, bundle, run_folder(run), device, world_size)


def blocks_of_choices(choices: Sequence[Choice]) -> Iterator[Block]:
    """What `auto` takes for each stage, and the sizes that it chose from."""
    for choice in choices:
        yield Line(str(choice))
        yield Grid(SIZES, tuple(choice.table), numbers=0)


def starting_adapter(run: Run, bundle: Bundle, resumes: bool) -> list[str]:
    """What the adapter has that the model starts with, and what becomes of it; nothing where the run resumes and reads it no more."""
    if resumes:
        return []
    try:
        adapter = adapter_of(run)
        plan = plan_of(run, 0, bundle.config, apart=new_rows_of(run, 0, bundle))
    except Refused:  # among the settings' problems already
        return []
    return [] if adapter is None else adapter_lines(adapter, plan, run.stages[0].name)
