"""The rules of `eyeline explain`: each looks at the facts of a run or of a trace, and names one cause of lost time, or none.

A rule is named after its cause. What it finds has evidence in numbers, the ceiling of the gain (the share of wall time that would be won
if the cause were gone, and nothing else changed), and a counterfactual that shows it. Thresholds are in one table, each with its reason;
they follow from what the numbers mean.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from eyeline.core.words import counted, percent
from eyeline.study.explain.run_facts import RunFacts
from eyeline.study.explain.trace_facts import TraceFacts

OF_STEPS, OF_RUN, OF_PROFILE = "the steps after warm-up", "the whole run", "the profiled steps"
AGAIN = "train again with {setting} and another out, and compare by eyeline report RUN RUN"


class Threshold(NamedTuple):
    value: float
    reason: str


THRESHOLDS = {
    "share": Threshold(0.1, "of wall time at least, for every cause: less is hardly worth a change, and steps swing by as much"),
    "python": Threshold(0.3, "of a step on a CPU outside of operators: about a fifth is usual, and the profiler adds to it"),
    "waits": Threshold(0.75, "÷ workers, of the steps: equally slow workers delay one step in `workers` or more, a slow one fewer"),
    "rank": Threshold(0.75, "of the median rate of the other ranks: the same number by which a run itself names slow ranks"),
    "reads": Threshold(1.5, "per step: one, the verdict on non-finite values, is in every step"),
    "retries": Threshold(0.1, "of the steps with a retry at least: a few happen while the first steps fill memory"),
}


@dataclass(frozen=True)
class Finding:
    """A cause of lost time."""

    cause: str
    ceiling: float | None  # share of the wall time of `of` that could be won at most; None where it is not known
    of: str
    evidence: str
    computed: str  # how the ceiling was computed
    counterfactual: str  # what would show it


class Names(NamedTuple):
    """What counterfactuals are about: a recipe that can be given to a command, and a stage in it."""

    recipe: str
    stage: str


def over(name: str, value: float) -> bool:
    return value >= THRESHOLDS[name].value


def data_wait(run: RunFacts, names: Names) -> Finding | None:
    share = run.spent.get("data_wait", 0.0) / run.wall_s
    return finding_of_data(run, names) if over("share", share) and not is_one_worker(run) else None


def slow_worker(run: RunFacts, names: Names) -> Finding | None:
    share = run.spent.get("data_wait", 0.0) / run.wall_s
    if not over("share", share) or not is_one_worker(run):
        return None
    workers = run.workers or 0
    rank = f" of rank {longest_waiting(run)}" if run.ranks else ""
    return Finding(
        "slow_worker",
        share,
        OF_STEPS,
        f"the loop waited {run.spent['data_wait']:,.1f} s for batches, all of it in {run.waiting_steps:,} of {counted(run.steps, 'step')}: "
        f"{counted(workers, 'worker')}{rank} that were equally slow would delay {percent(1 / workers)} of them or more",
        "data_wait_s of these steps, all of it",
        f"eyeline compare {names.recipe} --vary stages.{names.stage}.data.workers={workers},0: without workers no one of them can delay "
        "the others. Look what else runs on the processor of the slow one; a few samples that are slow to decode look the same",
    )


def is_one_worker(run: RunFacts) -> bool:
    """Whether waits are long and rare: results come in order, so one slow worker delays the others, which are done meanwhile."""
    return bool(run.workers and run.workers > 1) and run.waiting_steps < THRESHOLDS["waits"].value / (run.workers or 1) * run.steps


def longest_waiting(run: RunFacts) -> int:
    return max(run.ranks, key=lambda rank: run.ranks[rank].own_data_s)


def finding_of_data(run: RunFacts, names: Names) -> Finding:
    seconds, workers = run.spent["data_wait"], run.workers or 0
    most = longest_waiting(run) if run.ranks else None
    whose = f"; longest on rank {most}: {run.ranks[most].own_data_s:,.1f} s for its own" if most is not None else ""
    return Finding(
        "data_wait",
        seconds / run.wall_s,
        OF_STEPS,
        f"the loop waited {seconds:,.1f} s for batches, in {run.waiting_steps:,} of {counted(run.steps, 'step')}{whose} "
        f"(data.workers: {'not known' if run.workers is None else workers})",
        "data_wait_s of these steps, all of it",
        f"eyeline compare {names.recipe} --vary stages.{names.stage}.data.workers={workers},{2 * workers or 4}; what the rest of a step takes: "
        f"eyeline bench step {names.recipe}, whose data are made up and in memory",
    )


def launch_gaps(run: RunFacts, names: Names) -> Finding | None:
    seconds = run.spent.get("host_starved", 0.0)
    if not over("share", seconds / run.wall_s):
        return None
    return Finding(
        "launch_gaps",
        seconds / run.wall_s,
        OF_STEPS,
        f"between two updates the GPU waited {seconds:,.1f} s for the host",
        "host_starved_s of these steps, all of it; gaps inside of steps are seen by a profile only",
        f"eyeline profile {names.recipe} shows all gaps; eyeline compare {names.recipe} --vary compile=none,blocks",
    )


def communication(run: RunFacts, names: Names) -> Finding | None:
    share = run.exchange_s / run.wall_s
    if not over("share", share):
        return None
    least = "the rank that waited least in each step" if run.ranks else "rank 0, waiting for slower ranks included"
    return Finding(
        "communication",
        share,
        OF_STEPS,
        f"{run.exchange_s:,.1f} s in collectives while nothing was computed ({least})",
        "communication_s of these steps, all of it",
        AGAIN.format(setting="mesh.sync_each_batch=false, mesh.reshard_after_forward=never or mesh.dp_replicate"),
    )


def imbalance(run: RunFacts, names: Names) -> Finding | None:
    share = run.unequal_s / run.wall_s
    if not over("share", share):
        return None
    part = max(("language", "vision"), key=lambda part: run.imbalance[part])
    setting = "mesh.balance_images=true" if part == "vision" else "fewer batch.max_tokens and more batch.packs_per_step"
    return Finding(
        "imbalance",
        share,
        OF_STEPS,
        f"the rank with the most work had {run.imbalance['all']:.2f} times an equal share (language {run.imbalance['language']:.2f}, "
        f"vision {run.imbalance['vision']:.2f})",
        "compute_s × (1 - 1 / imbalance.all), step by step",
        AGAIN.format(setting=setting),
    )


def slow_rank(run: RunFacts, names: Names) -> Finding | None:
    rates = {rank: facts.flops_per_s for rank, facts in run.ranks.items() if facts.flops_per_s}
    if len(rates) < 2:
        return None
    slow = min(rates, key=lambda rank: rates[rank])
    ratio = rates[slow] / statistics.median(rate for rank, rate in rates.items() if rank != slow)
    share = (1 - ratio) * run.ranks[slow].compute_s / run.wall_s
    if ratio >= THRESHOLDS["rank"].value or not over("share", share):
        return None
    return Finding(
        "slow_rank",
        share,
        OF_STEPS,
        f"rank {slow} does {percent(ratio)} of the FLOPs per second of the other ranks (median over steps, forward passes of the language "
        "model without collectives)",
        "compute_s of that rank × (1 - its rate over the median of the others)",
        f"eyeline bench machine on the machine of rank {slow} and on another; train again without it, and compare tokens per second per rank",
    )


def validation(run: RunFacts, names: Names) -> Finding | None:
    return standing_still(
        run, "validation", AGAIN.format(setting="a larger validation_steps, or a smaller validation_fraction (of a source: limit)")
    )


def checkpoint(run: RunFacts, names: Names) -> Finding | None:
    return standing_still(run, "checkpoint", AGAIN.format(setting="async_save=true, or a larger save_steps"))


def standing_still(run: RunFacts, cause: str, counterfactual: str) -> Finding | None:
    seconds = run.spent.get(cause, 0.0)
    if not over("share", seconds / run.wall_s):
        return None
    return Finding(
        cause,
        seconds / run.wall_s,
        OF_STEPS,
        f"training stood still for {seconds:,.1f} s",
        f"{cause}_s of these steps, all of it",
        counterfactual,
    )


def lost_work(run: RunFacts, names: Names) -> Finding | None:
    share = run.lost_s / run.whole_s
    if not over("share", share):
        return None
    return Finding(
        "lost_work",
        share,
        OF_RUN,
        f"{counted(run.lost_steps, 'step')} done again in {counted(run.attempts, 'attempt')}, which had taken {run.lost_s:,.1f} s",
        "lost work of the ledger (eyeline report) over all wall time",
        "a smaller save_steps or save_minutes, with async_save=true: a kill then costs less. eyeline report shows lost work",
    )


def fragmentation(run: RunFacts, names: Names) -> Finding | None:
    ceiling = None if run.retry_s is None else run.retry_s * run.retries / run.wall_s
    if not over("retries", run.retry_steps / run.steps) or (ceiling is not None and not over("share", ceiling)):
        return None
    cost = "equally many in all steps, so what one costs is not known" if run.retry_s is None else f"{run.retry_s:.2f} s each"
    return Finding(
        "fragmentation",
        ceiling,
        OF_STEPS,
        f"the allocator gave memory back and asked again {run.retries:,} times, in {run.retry_steps:,} of {counted(run.steps, 'step')} ({cost})",
        "retries × the slope of compute_s over the retries of a step (least squares)",
        f"eyeline compare {names.recipe} --vary stages.{names.stage}.gradient_checkpointing=false,true, or fewer batch.max_tokens; "
        "unset PYTORCH_ALLOC_CONF, so that expandable_segments is on",
    )


def data_wait_in_trace(trace: TraceFacts, names: Names) -> Finding | None:
    share = trace.data_wait_s / trace.wall_s
    if not over("share", share):
        return None
    return Finding(
        "data_wait",
        share,
        OF_PROFILE,
        f"{trace.data_wait_s:,.2f} s from the start of a step to its first operator" + (", with an idle GPU" if trace.gpu else ""),
        "that time, all of it",
        f"eyeline bench step {names.recipe}: what a step takes with data that are made up and in memory; then raise data.workers",
    )


def launch_gaps_in_trace(trace: TraceFacts, names: Names) -> Finding | None:
    gap_s = max(trace.host_s - trace.busy_s, 0.0) if trace.gpu else trace.host_s
    if not over("share" if trace.gpu else "python", gap_s / trace.wall_s):
        return None
    return Finding(
        "launch_gaps",
        gap_s / trace.wall_s,
        OF_PROFILE,
        f"the host needed {trace.host_s:,.3f} s to ask for kernels, and the GPU {trace.busy_s:,.3f} s to run them"
        if trace.gpu
        else f"{trace.host_s:,.3f} s in Python, outside of every operator, and {trace.busy_s:,.3f} s in operators",
        "the host's time beyond the GPU's" if trace.gpu else "time outside of operators, without waiting for data",
        f"eyeline compare {names.recipe} --vary compile=none,blocks; then larger packs (batch.max_tokens)",
    )


def host_reads(trace: TraceFacts, names: Names) -> Finding | None:
    if not trace.gpu or not over("reads", trace.reads / trace.steps):
        return None
    kept_s = trace.data_wait_s + trace.compile_s + trace.allocator_s + max(trace.host_s, trace.busy_s)
    share = max(trace.wall_s - kept_s, 0.0) / trace.wall_s
    if not over("share", share):
        return None
    return Finding(
        "host_reads",
        share,
        OF_PROFILE,
        f"the host waited for the GPU {trace.reads / trace.steps:,.0f} times per step, where one is needed, and the GPU was idle for "
        f"{percent(trace.idle_s / trace.wall_s)} of the time",
        "all time but the longer one of the host's work and the GPU's, and waiting for data",
        f"eyeline bench roofline {names.recipe}: its waits are those of Eyeline's own code. In trace.json, cudaStreamSynchronize has the "
        "operator that waits above it",
    )


def memory_bound(trace: TraceFacts, names: Names) -> Finding | None:
    share = trace.chained_s / trace.wall_s
    if not over("share", share):
        return None
    what = "kernels" if trace.gpu else "operators"
    return Finding(
        "memory_bound",
        share,
        OF_PROFILE,
        f"{trace.passes / trace.steps:,.0f} {what} per step that read and write and compute little took "
        f"{percent(trace.pass_s / trace.wall_s)}; most of it {trace.costliest[:60]}",
        "of each chain of such passes all but the longest one: one kernel for the chain takes about as long as that",
        f"eyeline compare {names.recipe} --vary compile=none,blocks; eyeline bench roofline {names.recipe}: its columns `fused`",
    )


def recompilation(trace: TraceFacts, names: Names) -> Finding | None:
    share = trace.compile_s / trace.wall_s
    if not over("share", share):
        return None
    return Finding(
        "recompilation",
        share,
        OF_PROFILE,
        f"{trace.compile_s:,.2f} s compiling, after warm-up",
        "time inside of the compiler, all of it",
        f"eyeline compare {names.recipe} --vary compile=blocks,none; TORCH_LOGS=recompiles names what differed",
    )


def communication_in_trace(trace: TraceFacts, names: Names) -> Finding | None:
    share = trace.exchange_s / trace.wall_s
    if not over("share", share):
        return None
    return Finding(
        "communication",
        share,
        OF_PROFILE,
        f"kernels of communication ran for {trace.exchange_s:,.3f} s with no other kernel",
        "that time, all of it",
        AGAIN.format(setting="mesh.sync_each_batch=false, mesh.reshard_after_forward=never or mesh.dp_replicate"),
    )


def fragmentation_in_trace(trace: TraceFacts, names: Names) -> Finding | None:
    share = trace.allocator_s / trace.wall_s
    if not over("share", share):
        return None
    return Finding(
        "fragmentation",
        share,
        OF_PROFILE,
        f"{trace.allocations / trace.steps:,.0f} calls of the driver per step to get or give back memory took {trace.allocator_s:,.2f} s",
        "the time of these calls, all of it",
        "fewer batch.max_tokens, or gradient_checkpointing=true; unset PYTORCH_ALLOC_CONF, so that expandable_segments is on",
    )


OF_RUNS: Sequence[Callable[[RunFacts, Names], Finding | None]] = (
    data_wait,
    slow_worker,
    launch_gaps,
    communication,
    imbalance,
    slow_rank,
    validation,
    checkpoint,
    lost_work,
    fragmentation,
)
OF_TRACES: Sequence[Callable[[TraceFacts, Names], Finding | None]] = (
    data_wait_in_trace,
    launch_gaps_in_trace,
    host_reads,
    memory_bound,
    recompilation,
    communication_in_trace,
    fragmentation_in_trace,
)


def largest_first(found: Sequence[Finding | None]) -> list[Finding]:
    """The findings by their ceilings; one that is not known comes last."""
    return sorted((one for one in found if one), key=lambda one: -(one.ceiling or 0.0))
