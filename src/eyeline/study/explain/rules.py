"""The rules of `eyeline explain`: each looks at the facts of a run or of a trace, and names one cause of lost time, or none.

Thresholds are in one table, each with its reason; they follow from what the numbers mean, and are not fitted to single traces.
"""

import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

from eyeline.core.words import counted, percent
from eyeline.study.explain.findings import Finding, again, vary
from eyeline.study.explain.run_facts import RunFacts
from eyeline.study.explain.trace_facts import TraceFacts

OF_STEPS, OF_RUN, OF_PROFILE = "the steps after warm-up", "the whole run", "the profiled steps"
EXCHANGES = "; mesh.reshard_after_forward=never and mesh.dp_replicate also exchange less, for more memory"


class Threshold(NamedTuple):
    value: float
    reason: str


THRESHOLDS = {
    "share": Threshold(0.1, "of wall time at least, for every cause: less is hardly worth a change, and steps swing by as much"),
    "python": Threshold(0.3, "of a step on a CPU outside of operators: about a fifth is usual, and the profiler adds to it"),
    "waits": Threshold(0.75, "÷ workers, of the steps: equally slow workers delay one step in `workers` or more, a slow one fewer"),
    "alone": Threshold(
        0.25, "of the longest wait of a rank for its own data: ranks read the same data, so others wait as long unless its worker is slow"
    ),
    "rank": Threshold(0.75, "of the median rate of the other ranks: the same number by which a run itself names slow ranks"),
    "reads": Threshold(1.5, "per step: one, the verdict on non-finite values, is in every step"),
    "retries": Threshold(0.1, "of the steps with a retry at least: a few happen while the first steps fill memory"),
}


def over(name: str, value: float) -> bool:
    return value >= THRESHOLDS[name].value


def if_large(
    cause: str, seconds: float, wall: tuple[float, str], evidence: str, computed: str, counterfactual: str, least: str = "share"
) -> Finding | None:
    """A finding that could win this many seconds of a wall time (its seconds, and whose it is), if that is enough of it."""
    share = seconds / wall[0]
    return Finding(cause, share, wall[1], evidence, computed, counterfactual) if over(least, share) else None


def data_wait(run: RunFacts) -> Finding | None:
    if is_one_worker(run) or is_one_rank(run):
        return None
    seconds, longest = run.spent.get("data_wait", 0.0), longest_waiting(run)
    whose = "" if longest is None else f"; longest on rank {longest}: {run.ranks[longest].own_data_s:,.1f} s for its own"
    return if_large(
        "data_wait",
        seconds,
        (run.wall_s, OF_STEPS),
        f"the loop waited {seconds:,.1f} s for batches, in {run.waiting_steps:,} of {counted(run.steps, 'step')}{whose} "
        f"(data.workers: {'not known' if run.workers is None else run.workers})",
        "data_wait_s of these steps, all of it",
        vary(run.names, f"stages.{run.names.stage}.data.workers", run.workers or 0, 2 * (run.workers or 0) or 4)
        + f"; eyeline bench step {run.names.recipe} times steps whose data are made up and in memory",
    )


def slow_worker(run: RunFacts) -> Finding | None:
    seconds, longest, workers = run.spent.get("data_wait", 0.0), longest_waiting(run), run.workers or 0
    if longest is not None and is_one_rank(run):
        own_s = run.ranks[longest].own_data_s
        evidence = f"rank {longest} waited {own_s:,.1f} s for its own batches, the other ranks {others_wait(run):,.1f} s (median)"
    elif is_one_worker(run):
        evidence = (
            f"the loop waited {seconds:,.1f} s for batches, in only {run.waiting_steps:,} of {counted(run.steps, 'step')}: with {workers} "
            f"workers that are equally slow it waits in {percent(1 / workers)} of them or more"
        )
    else:
        return None
    return if_large(
        "slow_worker",
        seconds,
        (run.wall_s, OF_STEPS),
        evidence,
        "data_wait_s of these steps, all of it",
        vary(run.names, f"stages.{run.names.stage}.data.workers", workers, 0)
        + "; without workers the training process decodes, and no worker delays the others. Look what else runs on the processors of the "
        "workers. A few samples that are slow to decode look the same",
    )


def is_one_worker(run: RunFacts) -> bool:
    """Whether waits are rare: results come in order, so one slow worker delays the others, whose results are ready after it."""
    return bool(run.workers and run.workers > 1) and run.waiting_steps < THRESHOLDS["waits"].value / (run.workers or 1) * run.steps


def is_one_rank(run: RunFacts) -> bool:
    """Whether one rank waits for its own data, and the others hardly do; its workers are all that is different there."""
    longest = longest_waiting(run)
    return bool(run.workers) and longest is not None and others_wait(run) < THRESHOLDS["alone"].value * run.ranks[longest].own_data_s


def longest_waiting(run: RunFacts) -> int | None:
    """The rank that waited longest for its own data; None where ranks have not written their numbers."""
    return max(run.ranks, key=lambda rank: run.ranks[rank].own_data_s) if len(run.ranks) > 1 else None


def others_wait(run: RunFacts) -> float:
    """The median wait of the other ranks for their own data."""
    longest = longest_waiting(run)
    return statistics.median(facts.own_data_s for rank, facts in run.ranks.items() if rank != longest)


def launch_gaps(run: RunFacts) -> Finding | None:
    seconds = run.spent.get("host_starved", 0.0)
    return if_large(
        "launch_gaps",
        seconds,
        (run.wall_s, OF_STEPS),
        f"between two updates the GPU waited {seconds:,.1f} s for the host",
        "host_starved_s of these steps, all of it; gaps inside of steps are seen by a profile only",
        f"{vary(run.names, 'compile', 'none', 'blocks')}; eyeline profile {run.names.recipe} shows all gaps",
    )


def communication(run: RunFacts) -> Finding | None:
    least = "of the rank that waited least in each step" if run.ranks else "waiting for slower ranks included"
    return if_large(
        "communication",
        run.exchange_s,
        (run.wall_s, OF_STEPS),
        f"{run.exchange_s:,.1f} s in collectives while nothing was computed ({least})",
        "communication_s of these steps, all of it",
        again(run.names, "mesh.sync_each_batch=false") + EXCHANGES,
    )


def imbalance(run: RunFacts) -> Finding | None:
    of_vision = run.imbalance["vision"] > run.imbalance["language"]
    batch = f"stages.{run.names.stage}.batch"
    setting = "mesh.balance_images=true" if of_vision else f"{batch}.max_tokens=N {batch}.packs_per_step=M"
    return if_large(
        "imbalance",
        run.unequal_s,
        (run.wall_s, OF_STEPS),
        f"the rank with the most work had {run.imbalance['all']:.2f} times an equal share (language {run.imbalance['language']:.2f}, "
        f"vision {run.imbalance['vision']:.2f})",
        "compute_s × (1 - 1 / imbalance.all), step by step",
        again(run.names, setting) + ("" if of_vision else " (N smaller, M larger: more packs are shared out more evenly)"),
    )


def slow_rank(run: RunFacts) -> Finding | None:
    rates = {rank: facts.flops_per_s for rank, facts in run.ranks.items() if facts.flops_per_s}
    if len(rates) < 2:
        return None
    slow = min(rates, key=lambda rank: rates[rank])
    ratio = rates[slow] / statistics.median(rate for rank, rate in rates.items() if rank != slow)
    if over("rank", ratio):
        return None
    return if_large(
        "slow_rank",
        (1 - ratio) * run.ranks[slow].compute_s,
        (run.wall_s, OF_STEPS),
        f"rank {slow} does {percent(ratio)} of the FLOPs per second of the other ranks (median over steps, forward passes of the language "
        "model without collectives)",
        "compute_s of that rank × (1 - its rate / the median rate of the others)",
        f"eyeline bench machine on the machine of rank {slow} and on another one; what else runs there",
    )


def validation(run: RunFacts) -> Finding | None:
    return standing_still(run, "validation", again(run.names, "validation_steps=N") + " (N larger); or validate on fewer samples")


def checkpoint(run: RunFacts) -> Finding | None:
    return standing_still(run, "checkpoint", again(run.names, "async_save=true") + "; or with a larger save_steps")


def standing_still(run: RunFacts, cause: str, counterfactual: str) -> Finding | None:
    seconds = run.spent.get(cause, 0.0)
    evidence = f"training stood still for {seconds:,.1f} s in {counted(run.steps, 'step')}"
    return if_large(cause, seconds, (run.wall_s, OF_STEPS), evidence, f"{cause}_s of these steps, all of it", counterfactual)


def lost_work(run: RunFacts) -> Finding | None:
    return if_large(
        "lost_work",
        run.lost_s,
        (run.whole_s, OF_RUN),
        f"{counted(run.lost_steps, 'step')} of {run.lost_s:,.1f} s were done again, in {counted(run.attempts, 'attempt')}",
        "lost work over all wall time, as eyeline report has both",
        "a smaller save_steps or save_minutes, with async_save=true; eyeline report shows the lost work of the next run",
    )


def fragmentation(run: RunFacts) -> Finding | None:
    if not over("retries", run.retry_steps / run.steps):
        return None
    cost = "equally many in all steps, so what one costs is not known" if run.retry_s is None else f"{run.retry_s:.2f} s each"
    parts = (
        f"the allocator gave memory back and asked again {run.retries:,} times, in {run.retry_steps:,} of {counted(run.steps, 'step')}: "
        f"{cost}",
        "retries × the slope of compute_s over the retries of a step (least squares)",
        vary(run.names, f"stages.{run.names.stage}.gradient_checkpointing", "false", "true")
        + ", or fewer batch.max_tokens; unset PYTORCH_ALLOC_CONF, so that expandable_segments is on",
    )
    if run.retry_s is None:
        return Finding("fragmentation", None, OF_STEPS, *parts)
    return if_large("fragmentation", run.retry_s * run.retries, (run.wall_s, OF_STEPS), *parts)


def data_wait_in_trace(trace: TraceFacts) -> Finding | None:
    return if_large(
        "data_wait",
        trace.data_wait_s,
        (trace.wall_s, OF_PROFILE),
        f"{trace.data_wait_s:,.2f} s from the start of a step to its first operator" + (", with an idle GPU" if trace.gpu else ""),
        "that time, all of it",
        f"eyeline bench step {trace.names.recipe} times steps whose data are made up and in memory; then raise data.workers",
    )


def launch_gaps_in_trace(trace: TraceFacts) -> Finding | None:
    gpu = trace.gpu
    return if_large(
        "launch_gaps",
        max(trace.host_s - trace.busy_s, 0.0) if gpu else trace.host_s,
        (trace.wall_s, OF_PROFILE),
        f"the host needed {trace.host_s:,.3f} s to ask for kernels, and the GPU {trace.busy_s:,.3f} s to run them"
        if gpu
        else f"{trace.host_s:,.3f} s in Python, outside of every operator, and {trace.busy_s:,.3f} s in operators",
        "the host's time beyond the GPU's" if gpu else "time outside of operators, without waiting for data",
        f"{vary(trace.names, 'compile', 'none', 'blocks')}; then larger packs (batch.max_tokens)",
        "share" if gpu else "python",
    )


def host_reads(trace: TraceFacts) -> Finding | None:
    if not trace.gpu or not over("reads", trace.reads / trace.steps):
        return None
    kept_s = trace.data_wait_s + trace.compile_s + trace.allocator_s + max(trace.host_s, trace.busy_s)
    return if_large(
        "host_reads",
        max(trace.wall_s - kept_s, 0.0),
        (trace.wall_s, OF_PROFILE),
        f"the host waited for the GPU {trace.reads / trace.steps:,.0f} times per step, where one is needed, and the GPU was idle for "
        f"{percent(trace.idle_s / trace.wall_s)} of the time",
        "wall time without data wait and without the longer one of the host's work and the GPU's, which then overlap",
        f"eyeline bench roofline {trace.names.recipe} counts the waits of Eyeline's own code; in the trace, the operator above each "
        "cudaStreamSynchronize is the one that waits",
    )


def memory_bound(trace: TraceFacts) -> Finding | None:
    shortest_s = trace.host_s if trace.gpu else 0.0  # a GPU that waits for the host wins nothing by shorter kernels
    return if_large(
        "memory_bound",
        max(trace.busy_s - max(trace.busy_s - trace.chained_s, shortest_s), 0.0),
        (trace.wall_s, OF_PROFILE),
        f"{trace.passes / trace.steps:,.0f} {'kernels' if trace.gpu else 'operators'} per step that read and write and compute little took "
        f"{percent(trace.pass_s / trace.wall_s)} of the time; most of it {trace.costliest[:60]}",
        "of each chain of such passes all but the longest one, since one kernel for the chain takes about as long as that; with a GPU as "
        "far as it then still works longer than the host",
        f"{vary(trace.names, 'compile', 'none', 'blocks')}; eyeline bench roofline {trace.names.recipe} has columns for fused kernels",
    )


def recompilation(trace: TraceFacts) -> Finding | None:
    return if_large(
        "recompilation",
        trace.compile_s,
        (trace.wall_s, OF_PROFILE),
        f"{trace.compile_s:,.2f} s in PyTorch's compiler, after warm-up",
        "that time, all of it",
        f"{vary(trace.names, 'compile', 'blocks', 'none')}; with TORCH_LOGS=recompiles in the environment, training names what differed",
    )


def communication_in_trace(trace: TraceFacts) -> Finding | None:
    evidence = f"kernels of communication ran for {trace.exchange_s:,.3f} s with no other kernel"
    counterfactual = again(trace.names, "mesh.sync_each_batch=false") + EXCHANGES
    return if_large("communication", trace.exchange_s, (trace.wall_s, OF_PROFILE), evidence, "that time, all of it", counterfactual)


def fragmentation_in_trace(trace: TraceFacts) -> Finding | None:
    return if_large(
        "fragmentation",
        trace.allocator_s,
        (trace.wall_s, OF_PROFILE),
        f"{trace.allocations / trace.steps:,.0f} calls per step to get memory from the driver or give it back took "
        f"{trace.allocator_s:,.2f} s",
        "the time of these calls, all of it",
        "fewer batch.max_tokens, or gradient_checkpointing=true; unset PYTORCH_ALLOC_CONF, so that expandable_segments is on",
    )


OF_RUNS: Sequence[Callable[[RunFacts], Finding | None]] = (
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
OF_TRACES: Sequence[Callable[[TraceFacts], Finding | None]] = (
    data_wait_in_trace,
    launch_gaps_in_trace,
    host_reads,
    memory_bound,
    recompilation,
    communication_in_trace,
    fragmentation_in_trace,
)
