"""What the lines of a run say about lost time: sums over its steps after warm-up, over its ranks, and the ledger of all of it."""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from eyeline.core.errors import Refused
from eyeline.study.explain.findings import Names, names_of
from eyeline.study.history import Step, json_lines, read_history
from eyeline.study.ledger import LOST, read_ledger
from eyeline.study.side_by_side import WARM_UP

NOT_OF_STEPS = ("startup", "compile")  # paid once per attempt or stage, not per step
WAITED = 0.1  # a step has waited for data if that took at least this share of a mean step: shorter waits are not seen among others


@dataclass(frozen=True)
class RankFacts:
    """One rank, over the same steps."""

    flops_per_s: float  # of the language model's forward passes, the median over steps: single steps are delayed by other processes
    compute_s: float
    own_data_s: float  # it waited for its own batches
    waiting_steps: int  # steps in which it did


@dataclass(frozen=True)
class RunFacts:
    """Numbers of a run. Seconds are those of the steps after warm-up, unless a name says otherwise."""

    steps: int
    wall_s: float
    spent: Mapping[str, float]  # seconds by the causes of a step's line
    waiting_steps: int  # steps that waited for data, on the rank that waited for the longest time
    workers: int | None  # processes that decode, on each rank; None if its recipe does not say
    ranks: Mapping[int, RankFacts]  # empty without `metrics_for_all_ranks`
    exchange_s: float  # exposed communication of the rank that waited least in each step: what others had more is waiting for slower ranks
    unequal_s: float  # computed by the rank with the most work in each step, beyond an equal share
    imbalance: Mapping[str, float]  # by part, the mean over steps: work of the busiest rank over an equal share
    retries: int  # of the allocator
    retry_steps: int  # steps that had some
    retry_s: float | None  # what one costs: the slope of a step's time over its retries; None where all steps had equally many
    whole_s: float  # wall time of the whole run, from its ledger
    lost_s: float  # of that, steps that were done again
    lost_steps: int
    attempts: int
    names: Names  # the stage is the one with the most of these steps


def facts_of_run(folder: Path) -> RunFacts:
    """The facts of a run folder. Refused where it has too few steps."""
    metrics = folder / "metrics.jsonl"
    history, ledger = read_history(metrics), read_ledger(metrics)
    warm = after_warm_up(history.steps)
    if not warm:
        raise Refused(f"{metrics} has no step after warm-up (the first {WARM_UP} of each stage and attempt): train for more steps")
    stage = Counter(step.stage for step in warm).most_common(1)[0][0]
    spent: Counter[str] = Counter()
    for step in warm:
        spent.update({name: s for name, s in step.seconds.items() if name not in NOT_OF_STEPS})  # type: ignore[arg-type]  # seconds
    wall_s = float(sum(spent.values()))
    lines = lines_of_ranks(folder / "metrics-ranks", warm)
    ranks = {rank: facts_of_rank(own, wall_s / len(warm)) for rank, own in lines.items()}
    most = max(ranks.values(), key=lambda rank: rank.own_data_s, default=None)
    waits = [step.seconds.get("data_wait", 0.0) for step in warm]
    retries, retry_s = retries_of(history.steps, warm)
    return RunFacts(
        steps=len(warm),
        wall_s=wall_s,
        spent=dict(spent),
        waiting_steps=most.waiting_steps if most else waiting(waits, wall_s / len(warm)),
        workers=workers_of(folder / "recipe.yaml", stage),
        ranks=ranks,
        exchange_s=exchange(warm, lines),
        unequal_s=sum(step.seconds.get("compute", 0.0) * (1 - 1 / max(step.imbalance.get("all") or 1.0, 1.0)) for step in warm),
        imbalance={part: statistics.fmean(step.imbalance.get(part) or 1.0 for step in warm) for part in ("language", "vision", "all")},
        retries=sum(retries),
        retry_steps=sum(number > 0 for number in retries),
        retry_s=retry_s,
        whole_s=ledger.wall_s,
        lost_s=ledger.seconds[LOST],
        lost_steps=ledger.lost_steps,
        attempts=ledger.attempts,
        names=names_of(folder, stage, int(history.starts[-1].get("world_size") or 1) if history.starts else 1),
    )


def after_warm_up(steps: Sequence[Step]) -> list[Step]:
    """The steps without the first few of each attempt, and of each stage in it, for which the loader has prefetched nothing."""
    seen: Counter[tuple[int, int]] = Counter()
    warm = []
    for step in steps:
        seen[step.attempt, step.stage_index] += 1
        if seen[step.attempt, step.stage_index] > WARM_UP:
            warm.append(step)
    return warm


def waiting(waits: Sequence[float], step_s: float) -> int:
    return sum(wait >= WAITED * step_s for wait in waits)


def workers_of(recipe: Path, stage: str) -> int | None:
    """`data.workers` of a stage. The file is read as it is, since a recipe of another version may no longer be valid."""
    try:
        stages = yaml.safe_load(recipe.read_text(encoding="utf-8"))["stages"]
        return next((int(one["data"]["workers"]) for one in stages if one["name"] == stage), None)
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError):
        return None


def lines_of_ranks(folder: Path, warm: Sequence[Step]) -> dict[int, list[Mapping[str, Any]]]:
    """Return the lines of these steps by rank; of two lines of a step, that of the attempt that counts."""
    wanted = {(step.attempt, step.global_step) for step in warm}
    found: dict[int, list[Mapping[str, Any]]] = {}
    for path in sorted(folder.glob("rank-*.jsonl")):
        own: list[Mapping[str, Any]] = [
            line for line in json_lines(path) if line and (line.get("attempt"), line.get("global_step")) in wanted
        ]
        if own:
            found[int(path.stem.removeprefix("rank-"))] = own
    return found


def facts_of_rank(lines: Sequence[Mapping[str, Any]], step_s: float) -> RankFacts:
    rates = [line["flops"] / line["own_forward_s"] for line in lines if line.get("own_forward_s")]
    waits = [line.get("own_data_s") or 0.0 for line in lines]
    return RankFacts(
        flops_per_s=statistics.median(rates) if rates else 0.0,
        compute_s=sum(line["compute_s"] for line in lines),
        own_data_s=sum(waits),
        waiting_steps=waiting(waits, step_s),
    )


def exchange(warm: Sequence[Step], lines: Mapping[int, Sequence[Mapping[str, Any]]]) -> float:
    """Seconds of communication, per step those of the rank that waited least: the last one to arrive waits for no other."""
    least: dict[int, float] = {}
    for line in (line for own in lines.values() for line in own):
        least[line["global_step"]] = min(least.get(line["global_step"], float("inf")), line["communication_s"])
    return sum(least.get(step.global_step, step.seconds.get("communication", 0.0)) for step in warm)


def retries_of(steps: Sequence[Step], warm: Sequence[Step]) -> tuple[list[int], float | None]:
    """The allocator's retries in each step after warm-up (lines count them from the start of an attempt), and the seconds that one costs,
    by least squares."""
    before: dict[int, int] = {}
    new: dict[int, int] = {}
    for step in steps:
        total = step.allocator_retries or 0
        new[step.global_step] = max(total - before.get(step.attempt, 0), 0)
        before[step.attempt] = total
    numbers = [new[step.global_step] for step in warm]
    if len(set(numbers)) < 2:
        return numbers, None
    times = [step.seconds.get("compute", 0.0) for step in warm]
    return numbers, max(statistics.linear_regression(numbers, times).slope, 0.0)
