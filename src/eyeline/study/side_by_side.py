"""`eyeline report A B`: the numbers of several runs next to one another, if they were measured alike.

A number is only as comparable as what it was measured with. Every line of metrics.jsonl has the `attempt` that wrote it, whose start line
has the stamps: versions, machine, device, world size, precision; a stage's has the kernels. Runs whose stamps differ are refused unless
that is asked for.
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from eyeline.core.errors import Refused
from eyeline.core.log import say, visible
from eyeline.core.words import counted, gib, percent
from eyeline.evals.result import Result
from eyeline.study.history import History, Step, read_history
from eyeline.study.ledger import Ledger, read_ledger
from eyeline.study.page import metric, number
from eyeline.study.report import evaluation, flop_rate, padding, rate, utilisation, validation_loss_of, weighted_loss
from eyeline.train.display import SMOOTHED_STEPS
from eyeline.train.run import Run, from_yaml, leaves

WARM_UP = 3  # first steps of an attempt, which compile kernels and fill caches
OF_AN_ATTEMPT = ("resumed_from", "elapsed_s", "wall", "attempt", "kind")  # in a start line, and no stamp


@dataclass(frozen=True)
class Known:
    """What is known of a run."""

    name: str
    history: History
    ledger: Ledger
    evaluation: Result | None
    settings: Mapping[str, Any]  # of its recipe, by dotted path


def side_by_side(folders: Sequence[Path], different: bool) -> None:
    """Print a table of the runs. Refused where their stamps differ, unless `different`."""
    runs = [known(folder) for folder in folders]
    unlike = differing([stamps(run.history) for run in runs])
    if unlike and not different:
        listed = "\n  ".join(f"{name}: {' | '.join(values)}" for name, values in unlike.items())
        raise Refused(
            f"these runs were not measured alike, so their numbers cannot be compared:\n  {listed}\n"
            "Add --different to see them side by side anyway"
        )
    console = Console()
    console.print(table("numbers", runs, numbers(runs)))
    settings = {name: values for name, values in differing([run.settings for run in runs]).items() if name not in ("name", "out")}
    if settings:
        console.print(table("settings that differ", runs, settings))
    if unlike:
        console.print(table("measured differently", runs, unlike))
    for line in remarks(runs):
        say(line)


def known(folder: Path) -> Known:
    """All of a run. Refused where the folder is not one, or has no step."""
    metrics = folder / "metrics.jsonl"
    if not metrics.is_file():
        raise Refused(f"{folder} is not a run folder: it has no metrics.jsonl. Give folders that `eyeline train` wrote, such as runs/NAME")
    history = read_history(metrics)
    if not history.steps:
        raise Refused(f"{metrics} holds no step yet: there is nothing to compare. Train first")
    asked, recipe = evaluation(folder), folder / "recipe.yaml"
    settings = leaves(_recipe(recipe).model_dump(mode="json")) if recipe.is_file() else {}
    return Known(str(folder), history, read_ledger(metrics), asked if isinstance(asked, Result) else None, settings)


def _recipe(path: Path) -> Run:
    try:
        return from_yaml(path.read_text(encoding="utf-8"), path.parent)
    except ValueError as error:
        raise Refused(f"{path} cannot be read by this version of Eyeline: {error}") from error


def stamps(history: History) -> dict[str, Any]:
    """What the run's numbers were measured with; of attempts that differ, all that there was."""
    found: dict[str, Any] = {}
    for name in dict.fromkeys(name for start in history.starts for name in start if name not in OF_AN_ATTEMPT):
        values = [start[name] for start in history.starts if name in start]
        if name == "peak":  # measured by each run; its name says how
            values = [value["name"] if isinstance(value, dict) else value for value in values]
        alike = all(value == values[0] for value in values)
        found[name] = values[0] if alike else values
    kernels = list(dict.fromkeys(line for stage in history.stages.values() for line in stage.kernels))
    return found | ({"kernels": kernels} if kernels else {})


def differing(records: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """The values of every name in which the records differ; of mappings, only what differs in them."""
    out: dict[str, list[str]] = {}
    for name in dict.fromkeys(name for record in records for name in record):
        values = [record.get(name) for record in records]
        if all(value == values[0] for value in values):
            continue
        if all(isinstance(value, dict) for value in values):
            out |= {f"{name}.{inner}": texts for inner, texts in differing(values).items()}  # type: ignore[arg-type]  # all are mappings
        else:
            out[name] = ["–" if value is None else value if isinstance(value, str) else json.dumps(value) for value in values]
    return out


def numbers(runs: Sequence[Known]) -> dict[str, list[str]]:
    """A row per number. Rates and losses are sums divided once."""
    rows: dict[str, list[str]] = {}
    for run in runs:
        for name, value in of_run(run).items():
            rows.setdefault(name, []).append(value)
    return {name: values for name, values in rows.items() if any(value not in ("–", "none") for value in values)}


def of_run(run: Known) -> dict[str, str]:
    """The numbers of one run."""
    steps, last = run.history.steps, run.history.steps[-1].stage
    of_stage = [step for step in steps if step.stage == last]
    warm = after_warm_up(steps)
    mfu, hfu = utilisation(warm), utilisation(warm, lambda step: step.hfu)
    wall_s = sum(step.step_s for step in warm) or 1.0
    return {
        "steps": f"{steps[-1].global_step:,}",
        "samples": f"{sum(step.documents for step in steps):,}",
        "tokens": f"{sum(step.real for step in steps):,}",
        "supervised tokens": f"{sum(step.supervised for step in steps):,}",
        f"training loss, last {SMOOTHED_STEPS} steps": number(weighted_loss(of_stage[-SMOOTHED_STEPS:])),
        "validation loss": validation_loss_of(run.history, last) or "–",
        "exact match": percent(run.evaluation.accuracy) if run.evaluation else "–",
        "step time, median": f"{statistics.median(step.step_s for step in warm):.3f} s" if warm else "–",
        "tokens/s": f"{rate(warm):,.0f}" if warm else "–",
        "FLOP/s": metric(flop_rate(warm)) if warm else "–",
        "MFU": "–" if mfu is None else percent(mfu),
        "HFU": "–" if hfu is None else percent(hfu),
        "padding": percent(padding(steps)),
        "data wait": percent(sum(step.seconds.get("data_wait", 0.0) for step in warm) / wall_s),
        "peak memory": gib(max(step.memory_bytes for step in steps)),
        "allocator retries": "–" if steps[-1].allocator_retries is None else f"{steps[-1].allocator_retries:,}",
        "wall time": f"{run.ledger.wall_s:,.1f} s",
        "goodput": percent(run.ledger.goodput),
    }


def after_warm_up(steps: Sequence[Step]) -> list[Step]:
    """The steps without the first few of each attempt."""
    warm: list[Step] = []
    seen: dict[int, int] = {}
    for step in steps:
        seen[step.attempt] = seen.get(step.attempt, 0) + 1
        if seen[step.attempt] > WARM_UP:
            warm.append(step)
    return warm


def table(title: str, runs: Sequence[Known], rows: Mapping[str, Sequence[str]]) -> Table:
    """A row per name, a column per run."""
    out = Table(title=title, title_justify="left")
    out.add_column("")
    for run in runs:
        out.add_column(visible(run.name), justify="right", overflow="fold")
    for name, values in rows.items():
        out.add_row(name, *map(visible, values))
    return out


def remarks(runs: Sequence[Known]) -> list[str]:
    """What a reader of the table must know."""
    found = [f"rates are without the first {counted(WARM_UP, 'step')} of each attempt"]
    if len({run.history.steps[-1].global_step for run in runs}) > 1:
        found.append("the runs have different numbers of steps: compare their losses at equal steps only")
    return found
