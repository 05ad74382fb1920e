"""`eyeline check` and `eyeline data`: print what a run would do, its data, its first samples, and every problem. Trains nothing."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from eyeline.bundle.bundle import Bundle, classes, read_description
from eyeline.checkpoint.store import newest_state
from eyeline.core.batch import Sample
from eyeline.core.errors import Refused
from eyeline.core.files import write_atomically
from eyeline.core.log import visible
from eyeline.core.randomness import seed_for
from eyeline.core.words import percent
from eyeline.core.world import ALONE, World
from eyeline.data.reader import reader_of
from eyeline.data.report.duplicates import SampleHashes, hashes_of
from eyeline.data.report.preview import SamplePreview, sample_previews
from eyeline.data.report.report import Depth, data_report
from eyeline.data.sets import open_each
from eyeline.distill import check as distilling
from eyeline.models import spec as spec_of
from eyeline.models.flops import Arithmetic, count
from eyeline.models.hf import mapping_of
from eyeline.models.shape import shape
from eyeline.parallel.mesh import model_problems
from eyeline.parallel.mesh import problems as mesh_problems
from eyeline.recipes.device import device_report
from eyeline.recipes.memory import blocks_of_choices, chosen_batches, memory_lines, starting_adapter
from eyeline.recipes.problems import (
    Finding,
    data_problems,
    evaluation_warnings,
    findings,
    problem_list,
    problems_of_ranks,
    settings_problems,
    untrained_tokens,
)
from eyeline.study.data_page import Block, Grid, Heading, Histogram, Line, StageData, blocks, data_page, flops_of, image_words
from eyeline.study.roofline.sizes import config_of
from eyeline.train.loop import run_folder
from eyeline.train.run import Run
from eyeline.train.start import description, description_at, refuse_another_recipe, refuse_changed_data
from eyeline.train.trainable import new_rows_of, plan_of

TRAINED = "bold green"


def check(run: Run, samples: int, console: Console | None = None, world_size: int = 1, world: World = ALONE) -> bool:
    """Print what a run would do on `world_size` ranks, its data and first samples, then every problem; whether there are none. Trains
    nothing. `world`: the ranks of which this one does so."""
    console = console or Console()
    settings = [*findings(run)]
    if run.distill is not None:  # which training does not need
        settings += [Finding(*line) for line in distilling.problems(run.distill)]
    found = [line.text for line in settings if not line.warns]
    found += [line for line in problems_of_ranks(run, world_size) if line not in found]
    try:
        bundle: Bundle | None = description_at(run, run_folder(run))
        encoder = bundle.encoder()
    except Refused:  # among the settings' problems already: without a model no sample can be shown
        bundle = encoder = None
    chosen = chosen_batches(run, bundle, world_size, world)
    run, found = chosen.run, [*found, *chosen.problems]
    try:
        refuse_another_recipe(run, run_folder(run))
    except Refused as error:
        found.append(f"out: {error}".replace("\n", "\n  "))
    if run.distill is not None and not any(line.startswith("distill.") for line in found):
        for line in distilling.lines(run.distill):
            say_line(console, line)
    if bundle is None or encoder is None:
        found += device_report(run, None, world).problems
        say_line(console, problem_list(run.name, found))
        return False
    if run.distill is not None:
        say_line(console, distilling.form_line(run.distill, encoder.template))
    saved = newest_state(run_folder(run) / "checkpoints") if not any(line.startswith("out: ") for line in found) else None
    device = device_report(run, bundle, world)
    found += device.problems
    if found:  # they need not wait until the data have been read
        say_line(console, problem_list(run.name, found))
    form = mapping_of(bundle.config).form(bundle.config)
    say_line(console, f"run folder: {run_folder(run)}")
    say_line(console, f"export: {form.name} form, for transformers' {classes(bundle, form)} ({form.reason})")
    for line in device.lines:
        say_line(console, line)
    if encoder.template.notice:
        say_line(console, encoder.template.notice)
    for line in (
        *starting_adapter(run, bundle, saved is not None),
        *_ranks(run, world_size),
        *memory_lines(run, bundle.config, bundle, world_size),
    ):
        say_line(console, line)
    print_blocks(console, blocks_of_choices(chosen.choices))
    for index in range(len(run.stages)):
        found += _stage_report(run, index, bundle, saved, 0 if index else samples, console)
    console.rule(characters="-")
    asked = [
        line.text for line in settings if line.warns and line.text.startswith(("evaluation: ", "model: ", "distill."))
    ]  # a stage's are in its report
    for line in (*device.warnings, *untrained_tokens(run, bundle), *evaluation_warnings(run), *asked):
        say_line(console, f"warning: {line}")
    say_line(console, problem_list(run.name, found) if found else f"{run.name}: no problems")
    return not found


def check_size(run: Run, size: str, world_size: int, console: Console | None = None) -> bool:
    """Print what a recipe would take of each rank with a published model in place of its own, which need not be there, nor its data; then
    what does not fit those ranks. Return whether all fits."""
    console, config = console or Console(), config_of(size)
    if run.model.add_tokens:
        raise Refused("--size leaves out the tokenizer, which model.add_tokens adds to. Leave add_tokens out: model.add_tokens=[]")
    say_line(console, f"{run.name} with {size}: the mesh and the memory alone, without the model and its data")
    problems = [*problems_of_ranks(run, world_size), *model_problems(run.mesh, shape(config, trains={}))]
    for line in (*_ranks(run, world_size), *memory_lines(run, config, None, world_size)) if not problems else ():
        say_line(console, line)
    say_line(console, problem_list(run.name, problems) if problems else f"{run.name}: no problems of the mesh")
    return not problems


def _stage_report(run: Run, index: int, bundle: Bundle, saved: dict[str, Any] | None, samples: int, console: Console) -> list[str]:
    """Print what there is to know about a stage's data; the problems with them. `saved`: the state that the run resumes from."""
    stage, spec, encoder, found = run.stages[index], spec_of(bundle.config), bundle.encoder(), list[str]()
    if not stage.batch.chosen:
        return []  # among the problems of batch: auto already
    try:
        reader = reader_of(stage.data, encoder, spec.image, seed_for(run.seed, "stage", index), longest=spec.max_positions)
    except Refused:
        return []  # among the settings' problems already
    if saved is not None and saved["progress"]["stage"] == index:
        try:
            own = read_description(run_folder(run) / "model").encoder()  # not one that is made of data which have changed
            refuse_changed_data(
                run, run_folder(run), reader_of(stage.data, own, spec.image, reader.seed, longest=spec.max_positions), saved
            )
        except Refused as error:
            found.append(f"{stage.name}: {error}")
    report = data_report(reader, stage.batch.budget)
    shown = sample_previews(reader, stage.batch.budget, samples, thumbnails=False)
    print_blocks(console, blocks(StageData(stage.name, stage.batch, report, tuple(shown))))
    found += data_problems(stage, report)
    return found


def _ranks(run: Run, world_size: int) -> Iterator[str]:
    """How the ranks share out the parameters and the packs of a step."""
    if world_size == 1 or [*mesh_problems(run.mesh, world_size)]:
        return
    images = ", images dealt over all of them" if run.mesh.balance_images else ""
    sizes = {axis: getattr(run.mesh, axis) for axis in ("cp", "tp") if getattr(run.mesh, axis) > 1}
    pp = {"pp": run.mesh.pp} if run.mesh.pp > 1 else {}
    axes = pp | {"dp_replicate": run.mesh.dp_replicate, "dp_shard": run.mesh.dp_shard_of(world_size), **sizes}
    experts = f", experts over ep {run.mesh.ep}" if run.mesh.ep > 1 else ""
    yield f"{world_size} ranks: {' × '.join(f'{axis} {size}' for axis, size in axes.items())}{experts}{images}"
    groups = world_size // run.mesh.same_packs
    who = (
        "ranks"
        if run.mesh.same_packs == 1
        else f"group{'s' if groups > 1 else ''} of {run.mesh.same_packs} ranks that compute the same packs"
    )
    summed = "" if run.mesh.sync_each_batch else "; gradients are summed over ranks after the last"
    for stage in run.stages:
        packs = stage.batch.packs_per_step
        each = f"{-(-packs // groups)} gradient accumulation steps{summed}"
        yield f"stage {stage.name}: {packs} packs per step ÷ {groups} {who} = {each}"
        if run.mesh.pp > 1:
            waits, passes = run.mesh.bubble(-(-packs // groups))
            how = "1F1B" if run.mesh.pp_slices_per_rank == 1 else "interleaved 1F1B"
            share = percent(waits / passes)
            yield f"stage {stage.name}: {how} of {run.mesh.slices} slices; ranks wait for {waits} of {passes} passes (bubble), {share}"


def look(run: Run, out: Path, samples: int, depth: Depth, console: Console | None = None) -> Path:
    """Print all that there is to know about a recipe's data, and write it as a page; its path. Trains nothing, and needs no weights.

    Refused where the recipe, its model or its sources cannot be opened.
    """
    console = console or Console()
    if out.is_dir():
        raise Refused(f"{out} is a folder. Give the page a file's name: --out {out / 'data.html'}")
    if not out.parent.is_dir():
        raise Refused(f"{out.parent}, the folder of the page, does not exist. Create it, or give another --out")
    problems = [*settings_problems(run)]
    try:
        bundle = description(run)
        encoder = bundle.encoder()
        spec = spec_of(bundle.config)
        chosen = chosen_batches(run, bundle, 1, ALONE)
        run, problems = chosen.run, [*problems, *chosen.problems]
        if chosen.problems:
            raise Refused("; ".join(chosen.problems))
        asked = _evaluation(run, depth)
        found: list[StageData] = []
        with TemporaryDirectory() as indexes:  # stages and budgets that look at the same rows index them once
            for index, stage in enumerate(run.stages):
                data = stage.data if stage.data.cache else stage.data.model_copy(update={"cache": indexes})
                same = next((n for n, s in enumerate(run.stages[:index]) if (s.data, s.batch) == (stage.data, stage.batch)), None)
                if same is None:
                    with console.status(f"looking at the data of stage {stage.name}"):  # prints nothing outside a terminal
                        reader = reader_of(data, encoder, spec.image, seed_for(run.seed, "stage", index), longest=spec.max_positions)
                        report = data_report(reader, stage.batch.budget, depth, asked)
                        shown = tuple(sample_previews(reader, stage.batch.budget, samples, thumbnails=True))
                    problems += data_problems(stage, report)
                else:
                    report, shown = found[same].report, ()
                flops = _arithmetic(run, index, bundle)
                counted = tuple(flops_of(packing, flops, spec.image) for packing in report.budgets)
                found.append(StageData(stage.name, stage.batch, report, shown, counted, None if same is None else run.stages[same].name))
                print_blocks(console, blocks(found[-1]))
    except Refused as error:
        if problems:
            raise Refused(problem_list(run.name, problems)) from error
        raise
    console.rule(characters="-")
    if problems:
        say_line(console, problem_list(run.name, problems))
    write_atomically(out, data_page(run.name, found, problems))
    return out


def _arithmetic(run: Run, index: int, bundle: Bundle) -> Arithmetic:
    """The FLOPs of a stage's model, counted on one without weights."""
    plan = plan_of(run, index, bundle.config, apart=new_rows_of(run, index, bundle))
    return count(plan.model, plan.spec.image)


def _evaluation(run: Run, depth: Depth) -> dict[str, SampleHashes]:
    """The questions of the recipe's evaluation, to be compared with the samples that are trained on."""
    if run.evaluation is None:
        return {}
    rows = (row for source in open_each(run.evaluation.sources) for _, _, row in source.kept_rows())
    return {"evaluation": hashes_of(islice((row for row in rows if isinstance(row, Sample)), depth.compared))}


def print_blocks(console: Console, found: Iterator[Block]) -> None:
    """Print the report on data in a terminal. Markup and control characters in it have no effect."""
    for block in found:
        match block:
            case Heading(text, False):
                console.rule(Text(visible(text)), align="left", characters="-")
            case Line(text, warns):
                say_line(console, f"warning: {text}" if warns else text)
            case Grid(_, rows, str(line), _):
                for row in rows:
                    say_line(console, line.format(*row))
            case Grid(head, rows, None, numbers):
                table = Table()
                for n, column in enumerate(head):
                    table.add_column(Text(column), justify="right" if n >= numbers else "left")
                for row in rows:
                    table.add_row(*(Text(visible(cell)) for cell in row))
                console.print(table)
            case SamplePreview():
                console.rule(Text(visible(block.id)), align="left", characters="-")
                console.print(render(block))
            case Heading() | Histogram():  # for pages: its figures are in a table
                pass


def render(shown: SamplePreview) -> Text:
    """A sample as text, supervised text in bold green; runs of visual tokens as their number."""
    text = Text()
    for piece in shown.pieces:
        if piece.image is not None:
            text.append(image_words(piece.image, piece.tokens), style="cyan")
        else:
            text.append(visible(piece.text), style=TRAINED if piece.trained else "")
    return text


def say_line(console: Console, text: str) -> None:
    """One line as it is: neither mark-up nor control characters in names and data are obeyed."""
    console.print(visible(text), markup=False, soft_wrap=True)  # the terminal may wrap; a path in a file stays whole
