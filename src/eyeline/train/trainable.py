"""What learns in a stage: freezing by subtree, LoRA, precision, and the table that says so."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text
from torch import nn

from eyeline.core.facts import PARTS, Facts, Part, part_of
from eyeline.core.randomness import torch_rng_for
from eyeline.models import Model
from eyeline.models.lora import LoRA, merge, wrap
from eyeline.models.moe import set_balance
from eyeline.train.run import Adapted, Full, Run, Stage


@dataclass(frozen=True)
class Row:
    """One part in the table of what learns."""

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
        part: LoRA(**trained.model_dump(exclude={"how", "lr"})) for part, trained in stage.trains.items() if isinstance(trained, Adapted)
    }


def rates(stage: Stage) -> dict[Part, float]:
    """Part -> peak learning rate, of the parts that learn."""
    return {part: trained.lr for part, trained in stage.trains.items()}


def wrap_all(model: nn.Module, facts: Facts, adapters: Mapping[Part, LoRA], seed: int) -> None:
    """Put adapters of the given shape on the model, freshly initialised."""
    for part, lora in adapters.items():
        wrap(model, facts, part, lora, torch_rng_for(seed, f"lora {part}"))


def halved(run: Run, index: int = 0) -> set[Part]:
    """Parts that no stage from `index` on trains in full, of a bf16 run: what is frozen of them is bfloat16."""
    full = {part for stage in run.stages[index:] for part, trained in stage.trains.items() if isinstance(trained, Full)}
    return set(PARTS) - full if run.precision == "bf16" else set()


def checkpointed(stage: Stage, facts: Facts) -> tuple[Part, ...]:
    """The parts whose activations are recomputed in the backward pass."""
    wanted = stage.gradient_checkpointing
    if isinstance(wanted, bool):
        return tuple(facts.blocks) if wanted else ()
    return wanted


def prepare(model: Model, facts: Facts, run: Run, index: int, adapters: Mapping[Part, LoRA]) -> list[Row]:
    """Make stage `index`'s parameters trainable and all others not, set which blocks are recomputed, and return the table.
    `adapters` are those on the model now.

    Adapters that the stage does not continue are merged into the weights first. In a bf16 run what is frozen now and never
    trained in full by a later stage is kept in bf16: its values came from such a checkpoint or are never updated again.
    """
    stage = run.stages[index]
    wanted = adapters_of(stage)
    if dict(adapters) != wanted:
        merge(model)
        wrap_all(model, facts, wanted, run.seed)

    half = halved(run, index)
    for name, parameter in model.named_parameters():
        part = part_of(facts, name)
        match stage.trains.get(part):
            case None:
                learns = False
            case Full():
                learns = not any(name.startswith(root + ".") for root in facts.unused)
            case Adapted():
                learns = name.rpartition(".")[2] in ("lora_A", "lora_B")
        parameter.requires_grad_(learns)
        # norms, biases and a memory's rates of forgetting are few numbers, which some checkpoints keep in float32
        if not learns and part in half and parameter.ndim > 1:
            parameter.data = parameter.data.to(torch.bfloat16)

    model.recompute(checkpointed(stage, facts))
    set_balance(model, stage.experts)

    rows = [_row(model, facts, stage, part) for part in PARTS if part in facts.parts]
    for row in rows:
        assert (row.trained > 0) == (row.part in stage.trains), f"{row.part}: {row.trained} parameters train, contrary to the recipe"
    return rows


def _row(model: nn.Module, facts: Facts, stage: Stage, part: Part) -> Row:
    parameters = [p for name, p in model.named_parameters() if part_of(facts, name) == part]
    trained = stage.trains.get(part)
    match trained:
        case None:
            how = "frozen"
        case Full():
            how = "full"
        case Adapted():
            targets = trained.targets if isinstance(trained.targets, str) else " ".join(trained.targets)
            how = f"LoRA r {trained.rank}, α {trained.alpha:g} on {targets}"
    return Row(
        part,
        sum(p.numel() for p in parameters),
        sum(p.numel() for p in parameters if p.requires_grad),
        how,
        trained.lr if trained else None,
    )


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
