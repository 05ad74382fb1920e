"""`metrics.jsonl`: every figure of a run, by the definitions of docs/metrics.md.

A step's wall time runs from the end of the step before to its own end, and every second of it has a name: data wait,
compute, validation, checkpoint and so on, other. Rates are non-padding tokens over that wall time; nothing is left out.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from eyeline.core.batch import Counts
from eyeline.core.files import append_line, make_folder
from eyeline.core.plan import Part
from eyeline.core.run_folder import SPENDINGS, Spending
from eyeline.core.step import Step
from eyeline.models.flops import Flops
from eyeline.train.step import Report
from eyeline.train.stragglers import OwnTimes


@dataclass(frozen=True)
class StepFigures:
    """One line of metrics.jsonl, and what the display shows."""

    stage: str
    stage_index: int
    step: int  # in the stage, from 1
    steps: int  # of the stage
    global_step: int
    report: Report
    lr: Mapping[Part, float]
    seconds: Mapping[str, float]  # spending -> seconds; with "other" they add up to "step"
    memory_bytes: int
    rejected: int  # samples of the stage so far
    flops: Flops  # of the step's batches
    peak: float | None  # FLOPs per second that all devices could do in this run's precision; None where it is not known
    imbalance: Mapping[str, float]  # by part: cost of the slowest rank of each micro-batch, over the mean; 1 on one rank
    epoch: float | None = None  # epochs of the stage's data done so far; None where each source has epochs of its own
    spike: bool = False  # the loss is far above those before it
    slow_ranks: Sequence[int] = ()  # ranks that have been slow over the last steps
    reserved_bytes: int | None = None  # of the accelerator's allocator, at its highest; None on a CPU
    allocator_retries: int | None = None  # how often the allocator was out of memory and tried again, so far; None on a CPU
    top_k: Mapping[str, float] | None = None  # mean probability of the most likely token ("1"), the next ("2") and so on
    sample_ids: int = 0  # the same for the same samples, in whatever order and on whatever ranks
    unchanged: float | None = None  # share of the sampled weights that are the same in bfloat16 after the update; None where not sampled

    @property
    def flops_per_s(self) -> float:
        """What the model needs, over the step's full wall time."""
        return self.flops.total / self.seconds["step"]

    def share_of_peak(self, flops: int) -> float | None:
        return flops / self.seconds["step"] / self.peak if self.peak else None

    @property
    def real_tokens_per_s(self) -> float:
        return self.report.counts.real / self.seconds["step"]

    @property
    def padding(self) -> float:
        """The share of token slots that hold padding."""
        counts = self.report.counts
        return 1 - counts.real / counts.slots if counts.slots else 0.0

    def line(self) -> dict[str, Any]:
        experts = self.report.experts
        outcome = self.report.outcome
        finite = outcome != "not finite"  # JSON has no NaN: such figures are null
        return {
            "kind": "step",
            "stage": self.stage,
            "stage_index": self.stage_index,
            "step": self.step,
            "global_step": self.global_step,
            "loss": self.report.loss if finite else None,
            "grad_norm": self.report.grad_norm if finite and outcome != "overflow" else None,
            "applied": outcome == "applied",
            "outcome": outcome,
            "loss_scale": self.report.loss_scale,
            "lr": dict(self.lr),
            **asdict(self.report.counts),
            "sample_ids": self.sample_ids,
            "expert_max_over_mean": experts.max_over_mean if experts else None,
            "experts_unused": experts.unused if experts else None,
            "balance_loss": experts.balance_loss if experts and finite else None,
            "divergence": self.report.divergence if finite else None,
            "padding": self.padding,
            "real_tokens_per_s": self.real_tokens_per_s,
            **{f"{name}_s": value for name, value in self.seconds.items()},
            "memory_bytes": self.memory_bytes,
            "reserved_bytes": self.reserved_bytes,
            "allocator_retries": self.allocator_retries,
            "rejected": self.rejected,
            "flops": self.flops.by_part,
            "flops_recomputed": self.flops.again,
            "flops_per_s": self.flops_per_s,
            "mfu": self.share_of_peak(self.flops.total),
            "hfu": self.share_of_peak(self.flops.total + self.flops.again),
            "bf16_unchanged": self.unchanged,
            "top_k": dict(self.top_k) if self.top_k is not None else None,
            "imbalance": dict(self.imbalance),
            "epoch": self.epoch,
            "spike": self.spike,
            "slow_ranks": list(self.slow_ranks),
        }


def rank_line(figures: StepFigures, step: Step, own: OwnTimes) -> dict[str, Any]:
    """The line of a step in the metrics of one rank: what is its own."""
    counts = sum((batch.counts for batch in step.batches), Counts.zero())
    return {
        "stage": figures.stage,
        "step": figures.step,
        "global_step": figures.global_step,
        **asdict(counts),
        **{f"{name}_s": value for name, value in figures.seconds.items()},
        "flops": own.flops,
        "own_forward_s": own.forward_s,
        "own_data_s": own.data_s,
    }


class Clock:
    """Gives every second of a run a name. Monotonic: a change of the machine's clock moves nothing."""

    def __init__(self, now: Callable[[], float] = time.monotonic, started: float | None = None) -> None:
        """`now` gives seconds since some moment. `started`: what it gave when the process started; time since then is startup."""
        self.now = now
        moment = now()
        self._start = self._mark = moment if started is None else started
        self._booked = moment  # up to here each second is in `_spent`, or has no name
        self._spent: dict[str, float] = {"startup": moment - self._start}
        self._named = 0.0
        self.phase = "other"  # what time is spent on now

    @contextmanager
    def spending(self, on: Spending) -> Iterator[None]:
        """Count the seconds inside as spent on `on`, and on nothing else: what is inside of another spending is not counted there."""
        self._book()
        before, self.phase = self.phase, on
        try:
            yield
        finally:
            self._book()
            self.phase = before

    def lap(self) -> dict[str, float]:
        """Seconds since the last lap by name, "step" in all and "other" for what had no name; then start again from zero."""
        self._book()
        total, spent = self._booked - self._mark, self._spent
        self._mark, self._spent = self._booked, {}
        named = {name: spent.get(name, 0.0) for name in SPENDINGS}
        return {"step": total, **named, "other": max(total - sum(named.values()), 0.0)}

    def named(self) -> float:
        """Seconds so far that were spent on something that has a name."""
        self._book()
        return self._named

    def elapsed(self) -> float:
        """Seconds since the process started."""
        return self.now() - self._start

    def _book(self) -> None:
        now = self.now()
        if self.phase != "other":
            self._spent[self.phase] = self._spent.get(self.phase, 0.0) + now - self._booked
            self._named += now - self._booked
        self._booked = now


def with_starved(seconds: dict[str, float], idle_s: float) -> dict[str, float]:
    """The seconds of a step, with the part of "other" for which the device waited for the host under a name of its own."""
    starved = min(idle_s, seconds["other"])
    return {**seconds, "host_starved": starved, "other": seconds["other"] - starved}


RANKS = "metrics-ranks"  # of a run folder: the metrics of each rank


def write_rank(folder: Path, rank: int, line: dict[str, Any], attempt: int) -> None:
    """Append one line to the file of a rank."""
    make_folder(folder / RANKS)
    append_line(folder / RANKS / f"rank-{rank:05d}.jsonl", {**line, "attempt": attempt})


def write(folder: Path, line: dict[str, Any], attempt: int) -> None:
    """Append one line, with the time of day (durations come from the monotonic clock, and only the time between two attempts from this
    one) and the attempt."""
    wall = datetime.now(UTC).isoformat(timespec="milliseconds")
    append_line(folder / "metrics.jsonl", {**line, "wall": wall, "attempt": attempt})
