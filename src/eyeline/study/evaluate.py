"""`eyeline eval`: ask a run its recipe's questions, and keep the result in the run folder."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from eyeline.bundle.bundle import open_bundle, refuse_other_version
from eyeline.bundle.computing import choose_kernels
from eyeline.bundle.fill import load_for_generation
from eyeline.core.batch import Sample
from eyeline.core.errors import Refused
from eyeline.core.log import say, visible
from eyeline.core.words import counted, duration, percent
from eyeline.core.world import World
from eyeline.data.sets import open_each, training_samples
from eyeline.evals.exact_match import Prior, exact_match, prior_of
from eyeline.evals.metric import metric_named, normalise_answer
from eyeline.evals.result import Result, write_result
from eyeline.generate.generate import here as local
from eyeline.models import spec
from eyeline.parallel.join import joined, started
from eyeline.parallel.launch import Machine, machine
from eyeline.parallel.mesh import Mesh, MeshSizes, mesh_of
from eyeline.train.environment import environment
from eyeline.train.run import COMPUTE, Run, from_yaml


def evaluate(
    folder: Path,
    *,
    show: int = 0,
    limit: int | None = None,
    checkpoint: Literal["newest", "best"] = "newest",
    shards: int = -1,
) -> Result:
    """Answer the questions, write RUN/eval.json (eval-first-N.json with a `limit`), print the scores and `show` answers.

    Ranks share out the questions, and the weights: each has one of `shards` parts of them, or of as many as there are ranks where that is
    -1. The result is that of one process; rank 0 writes and shows it. Refused without questions or checkpoint.
    """
    run = evaluated_run(folder)
    place = started()
    sizes = sizes_for(shards, place.size)
    here = machine(run.device, run.threads, run.deterministic, place)
    with joined(place, here.device.type, 60 * run.mesh.timeout_minutes) as world:
        mesh = None if sizes.dp_shard == 1 else world.by_each(lambda: mesh_of(sizes, world, here.device.type))
        result, name = _asked(run, folder, here, world, mesh, checkpoint, limit)
        path = folder / ("eval.json" if limit is None else f"eval-first-{limit}.json")  # a part is not the recipe's evaluation
        world.by_first(lambda: write_result(path, result))
    if place.first:
        _show(result, show)
        say(f"{name}: {path}")
    return result


def sizes_for(shards: int, ranks: int) -> MeshSizes:
    """The mesh of an evaluation, whatever mesh the run was trained on. Raises Refused."""
    if shards == 0 or shards < -1 or ranks % shards:
        raise Refused(
            f"--dp-shard={shards}: wanted a number that divides the {counted(ranks, 'rank')}, 1 for the whole model on each, or -1 for all"
        )
    return MeshSizes(dp_shard=ranks if shards == -1 else shards, dp_replicate=1 if shards == -1 else ranks // shards)


def evaluated_run(folder: Path) -> Run:
    """The recipe of a run folder, with its evaluation. Raises Refused."""
    recipe = folder / "recipe.yaml"
    if not recipe.is_file():
        raise Refused(f"{folder} is not a run folder: it has no recipe.yaml. Give the folder that `eyeline train` wrote, such as runs/NAME")
    refuse_other_version(folder / "model")  # first: the recipe of such a run has other names too
    try:
        run = from_yaml(recipe.read_text(encoding="utf-8"), folder)
    except ValueError as error:
        raise Refused(f"{recipe} cannot be read by this version of Eyeline: {error}. Restore it as `eyeline train` wrote it") from error
    if run.evaluation is None:
        raise Refused(f"{recipe} has no evaluation. Add evaluation.sources to the recipe and run `eyeline train` again: it may change")
    return run


def _asked(
    run: Run,
    folder: Path,
    here: Machine,
    world: World,
    mesh: Mesh | None,
    checkpoint: Literal["newest", "best"],
    limit: int | None,
) -> tuple[Result, str]:
    """The result of asking every question, on every rank the same, and the name of the checkpoint."""
    evaluation = run.evaluation
    assert evaluation is not None, "`evaluated_run` gives no other"
    metric = metric_named(evaluation.metric)
    found = open_bundle(folder, checkpoint, world)
    assert found.checkpoint is not None, "a run has one"
    model = world.by_each(lambda: load_for_generation(found, here.device, COMPUTE[run.precision], mesh))
    choose_kernels(model, here, COMPUTE[run.precision], trains=False)
    asked = world.by_each(lambda: open_each(evaluation.sources))
    prior, questions, also_trained_on = Prior({}, ""), 0, 0

    def look_at_training_data() -> None:
        nonlocal prior, questions, also_trained_on
        learned = dict.fromkeys(sample for stage in run.stages for sample in training_samples(stage.data))  # stages share samples
        prior = prior_of(learned, normalise_answer if metric.code is None else str.strip)
        for _, _, row in islice((row for rows in asked for row in rows.kept_rows()), limit):
            questions += 1
            also_trained_on += isinstance(row, Sample) and row in learned

    world.by_first(look_at_training_data)
    with Progress(transient=True, disable=not world.first) as bar:
        task = bar.add_task("answering", total=questions)
        result = exact_match(
            model,
            spec(found.bundle.config),
            found.bundle.encoder(),
            asked,
            prior,
            metric=metric,
            max_new_tokens=evaluation.max_new_tokens,
            limit=limit,
            stamps={"checkpoint": found.checkpoint.folder.name, "data": [s.path for s in evaluation.sources], **environment(here)},
            progress=lambda done: bar.update(task, completed=done),
            world=world,
            anywhere=local if mesh is None else lambda mine: any(world.gather(mine)),
        )
    counts = world.by_first(lambda: {"also_trained_on": also_trained_on})
    return result.model_copy(update=counts), found.checkpoint.folder.name


def _show(result: Result, show: int) -> None:
    """Print the scores, remarks on them, and the first answers."""
    console = Console()
    console.print(scores(result))
    for line in remarks(result):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    for one in result.samples[:show]:
        mark = "right" if one.correct else f"{'wrong' if not one.score else f'score {one.score:.2f}'}, it is {one.answer!r}"
        console.print(visible(f"{one.id}: {one.question} → {one.prediction!r} ({mark})"), markup=False, highlight=False)


def scores(result: Result) -> Table:
    """Accuracy over all and by kind of question, next to the text-only baseline."""
    table = Table(title=f"{result.metric}, {counted(result.questions, 'question')}, {duration(result.seconds)}", title_justify="left")
    for column in ("", "questions", "accuracy", "text-only baseline"):
        table.add_column(column, justify="right" if column else "left")
    for kind, score in result.by_kind.items() if any(result.by_kind) else ():
        table.add_row(
            Text(visible(kind) or "(no kind)"),
            f"{score.questions:,}",
            percent(score.accuracy),
            percent(result.text_only.by_kind[kind].accuracy),
        )
    table.add_row(
        "all", f"{result.overall.questions:,}", percent(result.overall.accuracy), percent(result.text_only.overall.accuracy), style="bold"
    )
    return table


def remarks(result: Result) -> Iterator[str]:
    """Remarks on the scores."""
    yield f"text-only baseline: {result.text_only.how}"
    if result.given:
        yield f"asked: the last question of each sample; {result.given:,} earlier answers were given as context"
    if result.rejected:
        yield "not asked: " + ", ".join(f"{cause} {count}" for cause, count in result.rejected.items())
    if result.warning:
        yield f"warning: {result.warning}"
