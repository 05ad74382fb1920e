"""The trainable parameters of a stage: freezing by subtree, LoRA, precision, and the table that says so."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from eyeline.bundle.bundle import Bundle
from eyeline.bundle.rows import new_rows
from eyeline.core.batch import Budget
from eyeline.core.plan import PARTS, NewRows, Part, Plan
from eyeline.models import Config, Model
from eyeline.models.float8 import float8_layers
from eyeline.models.layers import Recompute
from eyeline.models.lora import LoRA
from eyeline.models.shape import SAVED, Ways, shape
from eyeline.parallel.mesh import problems as mesh_problems
from eyeline.parallel.mesh import schedule_problems
from eyeline.parallel.shares import WHOLE, Shares
from eyeline.parallel.slices import own_slices
from eyeline.train.graph_start import graph_problems, model_problem
from eyeline.train.memory import Memory, activations_of, activations_of_slices, fewest_recomputed, memory_of
from eyeline.train.optim import AdamW, AdamW8bit, updates_in_backward
from eyeline.train.run import COMPUTE, Adapted, Checkpointing, Full, Run, Stage
from eyeline.train.slices import cuts_for


@dataclass(frozen=True)
class Row:
    """One part in the table of what trains."""

    part: Part
    parameters: int  # with adapters
    trained: int
    how: str
    lr: float | None


def trained_in_full(stages: Sequence[Stage]) -> list[Part]:
    """The parts of which one of these stages trains every parameter."""
    return [part for part in PARTS if any(isinstance(stage.trains.get(part), Full) for stage in stages)]


def adapters_of(stage: Stage) -> dict[Part, LoRA]:
    """The LoRA settings of the parts that a stage adapts, without the learning rates: what a checkpoint must know."""
    return {
        part: LoRA(**{name: getattr(trained, name) for name in LoRA.model_fields})
        for part, trained in stage.trains.items()
        if isinstance(trained, Adapted)
    }


def saved_modules(stage: Stage) -> list[str]:
    """The paths of the modules that a stage trains in full in parts that it adapts."""
    return [
        f"{part}.{SAVED[name]}"
        for part, trained in stage.trains.items()
        if isinstance(trained, Adapted)
        for name in trained.modules_to_save
        if name in SAVED
    ]


def ways_of(stage: Stage) -> Ways:
    """What of the model a stage trains."""
    return Ways(
        {part: "full" if isinstance(trained, Full) else "adapters" for part, trained in stage.trains.items()},
        {part: trained.freeze_layers for part, trained in stage.trains.items()},
        saved_modules(stage),
    )


def rates(stage: Stage) -> dict[Part, float]:
    """Part -> peak learning rate, of the parts that learn."""
    return {part: trained.lr for part, trained in stage.trains.items()}


def checkpointed(stage: Stage, blocks: Collection[Part]) -> tuple[Part, ...]:
    """The parts whose activations are recomputed in the backward pass; `blocks` are those that have blocks."""
    match stage.gradient_checkpointing:
        case bool(wanted):
            return tuple(blocks) if wanted else ()
        case Checkpointing(parts=parts):
            return tuple(blocks) if parts is None else parts
        case parts:
            return parts


def recomputed(stage: Stage, blocks: Mapping[Part, Sequence[str]]) -> dict[Part, Recompute]:
    """The blocks of each part whose activations are recomputed; `blocks` are all that there are. With memory_gb, at most these are."""
    how = stage.gradient_checkpointing
    how = how if isinstance(how, Checkpointing) else Checkpointing()
    selective = how.policy == "selective"
    return {
        part: Recompute(frozenset(range(0, len(blocks[part]), how.every)), selective, how.offload)
        for part in checkpointed(stage, blocks)
        if part in blocks
    }


EMBEDDING = {"embed_tokens", "lm_head"}  # modules with a row for each token


def new_rows_of(run: Run, index: int, bundle: Bundle) -> NewRows | None:
    """The rows of new tokens that a stage trains apart: where it adapts the language model, whose other rows stay as they are."""
    trained = run.stages[index].trains.get("language")
    if not run.model.add_tokens or not isinstance(trained, Adapted) or EMBEDDING & set(trained.modules_to_save):
        return None
    return new_rows(bundle, run.model.add_tokens)


def plan_of(
    run: Run, index: int, config: Config, biased: bool = False, apart: NewRows | None = None, shares: Shares = WHOLE
) -> Plan[Model]:
    """The model of a stage, on the meta device: with its adapters, frozen and stored as the stage wants it. `biased`: its weights come
    with biases that balance experts. `apart`: what `new_rows_of` gives. `shares`: how ranks share out its parameters."""
    stage = run.stages[index]
    plan = shape(
        config,
        trains=ways_of(stage),
        adapters=adapters_of(stage),
        compute_dtype=COMPUTE[run.precision],
        # what no stage from here on trains: its values came from such a checkpoint, or are never updated again
        narrow=() if run.precision == "fp32" else PARTS,
        later=[ways_of(later) for later in run.stages[index + 1 :]],
        balance=stage.experts,
        biased=biased,
        new_rows=apart,
    )
    how, again = stage.gradient_checkpointing, recomputed(stage, plan.blocks)
    if isinstance(how, Checkpointing) and how.memory_gb is not None and again:
        whole = shares.whole_gradients(stage.batch.packs_per_step)
        room = int(how.memory_gb * 1e9) - memory_of(plan, stage.optimizer, shares, whole).total
        again = fewest_recomputed(plan, stage.batch.budget, again, room, _padded(run, plan))
    plan.model.recompute(again)
    if run.float8 != "none":
        for layer in float8_layers(plan.model, plan.blocks["language"]).layers:
            layer.float8 = run.float8
    return plan


def _padded(run: Run, plan: Plan[Model]) -> bool:
    """Return whether batches are padded for CUDA graphs. Where `cuda_graph` is refused they are not: what reads bounds on the host has
    none in a padded batch without memory."""
    return run.cuda_graph and not [*graph_problems(run)] and model_problem(plan) is None


def needed_memory(run: Run, index: int, config: Config, apart: NewRows | None, shares: Shares = WHOLE) -> Memory:
    """What a stage needs on each rank, with the activations that a GPU would have; the last two as in `plan_of`."""
    plan, stage = plan_of(run, index, config, apart=apart, shares=shares), run.stages[index]
    return memory_with(plan, run, stage, stage.batch.budget, shares)


def memory_with(plan: Plan[Model], run: Run, stage: Stage, budget: Budget, shares: Shares) -> Memory:
    """The same for packs of a budget, by the stage's plan."""
    kept = memory_of(plan, stage.optimizer, shares, shares.whole_gradients(stage.batch.packs_per_step))
    return replace(kept, activations=activations_of(plan, budget, _padded(run, plan)))


def shares_of(run: Run, world_size: int) -> Shares:
    """How so many ranks share out parameters; those of one where the mesh does not fit them."""
    return WHOLE if [*mesh_problems(run.mesh, world_size)] else Shares(run.mesh, world_size)


def memory_of_slices(run: Run, index: int, config: Config, apart: NewRows | None, shares: Shares, count: int) -> tuple[Memory, str]:
    """`needed_memory` of the rank that needs the most, where ranks have slices of the model; and the blocks of each, in words. `count`:
    micro-batches of a step."""
    stage, most = run.stages[index], None
    plan = plan_of(run, index, config, apart=apart)
    cuts = cuts_for(plan, stage.batch.budget, run.mesh.slices)
    for rank in sorted({0, 1, run.mesh.pp - 1}):  # from the second on, each has fewer micro-batches under way than the one before
        own = own_slices(plan_of(run, index, config, apart=apart), cuts, rank, run.mesh.pp)
        activations = activations_of_slices(own, stage.batch.budget, rank, run.mesh.pp, count)
        whole = shares.whole_gradients(stage.batch.packs_per_step)
        memory = replace(memory_of(own, stage.optimizer, shares, whole), activations=activations)
        most = memory if most is None or memory.total > most.total else most
    assert most is not None
    return most, ", ".join(f"{cut.start}–{cut.stop - 1}" if len(cut) > 1 else f"{cut.start}" for cut in cuts)


def axis_problems(run: Run) -> Iterator[str]:
    """Settings that do not go with tensor or pipeline parallelism."""
    for stage in run.stages:
        how = stage.gradient_checkpointing
        if run.mesh.pp > 1 and isinstance(how, Checkpointing) and how.memory_gb is not None:
            yield (
                f"stages.{stage.name}.gradient_checkpointing.memory_gb counts one micro-batch on one device, and with "
                f"mesh.pp={run.mesh.pp} several are under way. Name the parts, or use every"
            )
    for stage in run.stages if run.mesh.vocab_parallel else ():
        trained = stage.trains.get("language")
        if run.model.add_tokens and isinstance(trained, Adapted) and not EMBEDDING & set(trained.modules_to_save):
            yield (
                f"stages.{stage.name}: trains rows of new tokens (model.add_tokens) apart from the vocabulary, which mesh.vocab_parallel "
                "shares out. Leave vocab_parallel out, or put embed_tokens in modules_to_save"
            )
        if stage.distill is not None:
            yield (
                f"stages.{stage.name}.distill: a teacher's likeliest tokens are of the whole vocabulary, which mesh.vocab_parallel shares "
                "out. Leave one of them out"
            )


def rank_problems(run: Run, world_size: int) -> Iterator[str]:
    """Settings that do not fit a number of ranks, and those that are of one device."""
    yield from graph_problems(run, world_size)
    for stage in run.stages if world_size > 1 else ():
        yield from (f"stages.{stage.name}.{line}" for line in schedule_problems(run.mesh, world_size, stage.batch.packs_per_step))
        if isinstance(stage.optimizer, AdamW8bit) and run.mesh.tp > 1:
            yield (
                f"stages.{stage.name}.optimizer.kind: the moments of adamw_8bit are in blocks within the rows of weights, and "
                f"mesh.tp={run.mesh.tp} cuts rows. Use kind: adamw with state_dtype: bf16, or mesh.dp_shard in place of tp"
            )
        if isinstance(stage.optimizer, AdamW | AdamW8bit) and stage.optimizer.offload:
            less = "; state_dtype: bf16 halves each rank's share" if isinstance(stage.optimizer, AdamW) else ""
            yield (
                f"stages.{stage.name}.optimizer.offload keeps the moments of one device on the host, and there are {world_size} ranks, "
                f"which share them out (mesh.dp_shard). Leave it out{less}"
            )
        if updates_in_backward(stage.optimizer):
            yield (
                f"stages.{stage.name}.optimizer.in_backward updates a weight as soon as its gradient is there, and {world_size} ranks sum "
                "theirs after the backward pass. Leave it out; mesh.dp_shard leaves each rank a share of gradients and moments"
            )
        for part, lora in adapters_of(stage).items():
            if lora.quantize != "none":
                yield (
                    f"stages.{stage.name}.trains.{part}.quantize: weights in NF4 are on one device, and there are {world_size} ranks, "
                    "which share out weights (mesh.dp_shard). Leave it out"
                )


def rows_of(plan: Plan[Model], stage: Stage) -> list[Row]:
    """The table of what trains, a row per part."""
    rows = [_row(plan, stage, part) for part in plan.spec.parts]
    for row in rows:
        assert (row.trained > 0) == (row.part in stage.trains), f"{row.part}: {row.trained} parameters train, contrary to the recipe"
    return rows


NUMBERS = {"plain": 1, "nf4": 2, "scale": 0}  # of a weight, in each number that is stored


def _row(plan: Plan[Model], stage: Stage, part: Part) -> Row:
    entries = {name: entry for name, entry in plan.whole.items() if entry.part == part and entry.tied_to is None}
    sizes = [(math.prod(entry.shape) * NUMBERS[entry.storage], entry.trains) for entry in entries.values() if entry.role != "buffer"]
    trained = stage.trains.get(part)
    match trained:
        case None:
            how = "frozen"
        case Full():
            how = "full" + (f" from block {trained.freeze_layers}" if trained.freeze_layers else "")
        case Adapted():
            targets = trained.targets if isinstance(trained.targets, str) else " ".join(trained.targets)
            kind = f"{'rs' if trained.rslora else ''}{'DoRA' if trained.dora else 'LoRA'}"
            kind += {"none": "", "nf4": " on weights in NF4,", "nf4_double": " on weights in NF4 with scales in 8 bits,"}[trained.quantize]
            how = f"{kind} r {trained.rank}, α {trained.alpha:g} on {targets}"
            how += f" from block {trained.freeze_layers}" if trained.freeze_layers else ""
            how += "".join(f", {name} in full" for name in trained.modules_to_save)
            rows = [entry.shape[0] for name, entry in entries.items() if name.endswith("embed.new_rows")]
            how += f", {rows[0]} new tokens" if rows else ""
    return Row(part, sum(size for size, _ in sizes), sum(size for size, trains in sizes if trains), how, trained.lr if trained else None)


def table(stage: Stage, rows: list[Row], width: int) -> Table | Text:
    """The table printed at the start of a stage; where it is wider than the terminal, a line per part, so that no number is cut."""
    out = Table(title=f"stage {stage.name}", title_justify="left")
    for column in ("part", "parameters", "trained", "how", "learning rate"):
        out.add_column(column, justify="right" if column in ("parameters", "trained", "learning rate") else "left", no_wrap=True)
    for row in rows:
        out.add_row(row.part, f"{row.parameters:,}", f"{row.trained:,}", row.how, f"{row.lr:g}" if row.lr else "–")
    endless = Console(width=10_000)
    if Measurement.get(endless, endless.options, out).maximum <= width:
        return out
    lines = (
        f"{row.part}: {row.parameters:,} parameters, {row.trained:,} trained, {row.how}" + (f", lr {row.lr:g}" if row.lr else "")
        for row in rows
    )
    return Text("\n".join([f"stage {stage.name}", *lines]))
