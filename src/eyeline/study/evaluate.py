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
from eyeline.data.sets import open_each, training_samples
from eyeline.evals.exact_match import exact_match, prior_of
from eyeline.evals.metric import metric_named, normalise_answer
from eyeline.evals.result import Result, write_result
from eyeline.models import spec
from eyeline.parallel.launch import machine
from eyeline.train.environment import environment
from eyeline.train.run import COMPUTE, from_yaml


def evaluate(folder: Path, *, show: int = 0, limit: int | None = None, checkpoint: Literal["newest", "best"] = "newest") -> Result:
    """Answer the questions, write RUN/eval.json (eval-first-N.json with a `limit`), print the scores and `show` answers.

    Refused without questions or checkpoint.
    """
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
    metric = metric_named(run.evaluation.metric)
    here = machine(run.device, run.threads, run.deterministic)
    found = open_bundle(folder, checkpoint)
    assert found.checkpoint is not None, "a run has one"
    model = load_for_generation(found, here.device, COMPUTE[run.precision])
    choose_kernels(model, here, COMPUTE[run.precision], trains=False)
    asked = open_each(run.evaluation.sources)
    learned = dict.fromkeys(sample for stage in run.stages for sample in training_samples(stage.data))  # stages share samples
    prior = prior_of(learned, normalise_answer if metric.code is None else str.strip)
    questions = also_trained_on = 0
    for _, _, row in islice((row for rows in asked for row in rows.kept_rows()), limit):
        questions += 1
        also_trained_on += isinstance(row, Sample) and row in learned
    with Progress(transient=True) as bar:
        task = bar.add_task("answering", total=questions)
        result = exact_match(
            model,
            spec(found.bundle.config),
            found.bundle.encoder(),
            asked,
            prior,
            metric=metric,
            max_new_tokens=run.evaluation.max_new_tokens,
            limit=limit,
            stamps={"checkpoint": found.checkpoint.folder.name, "data": [s.path for s in run.evaluation.sources], **environment(here)},
            progress=lambda done: bar.update(task, completed=done),
        ).model_copy(update={"also_trained_on": also_trained_on})
    path = folder / ("eval.json" if limit is None else f"eval-first-{limit}.json")  # a part is not the recipe's evaluation
    write_result(path, result)
    console = Console()
    console.print(scores(result))
    for line in remarks(result):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    for one in result.samples[:show]:
        mark = "right" if one.correct else f"{'wrong' if not one.score else f'score {one.score:.2f}'}, it is {one.answer!r}"
        console.print(visible(f"{one.id}: {one.question} → {one.prediction!r} ({mark})"), markup=False, highlight=False)
    say(f"{found.checkpoint.folder.name}: {path}")
    return result


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
