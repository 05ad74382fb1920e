"""The summary of a stage before its first step, and of a run after its last one: for the screen and for metrics.jsonl."""

import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from eyeline.bundle.bundle import Bundle
from eyeline.core.words import counted, duration
from eyeline.data.counts import Count, sample_counts
from eyeline.data.reader import Reader
from eyeline.data.sources.sources import Rows
from eyeline.train.display import SMOOTHED_STEPS
from eyeline.train.metrics import StepFigures
from eyeline.train.run import Run
from eyeline.train.trainable import Row

MOST_SOURCES = 5  # lines on the screen


def stage_record(run: Run, index: int, steps: int, rows: Sequence[Row], reader: Reader, bundle: Bundle) -> dict[str, Any]:
    """The line of metrics.jsonl that says what a stage trains, from what, and how: the model, its parts, the data, the batch."""
    stage = run.stages[index]
    own = bool(stage.data.validation)  # validation sources of their own, not a part that is held out
    validating = sample_counts(reader.validation) if reader.validates else []
    training = sample_counts(reader.training)
    held = [None] * len(training) if own else validating or [None] * len(training)
    return {
        "kind": "stage",
        "stage": stage.name,
        "stage_index": index,
        "steps": steps,
        "epochs": stage.epochs,
        "family": bundle.config.family,
        "model": run.model.path,
        "fresh": list(run.model.fresh),
        "weights": dict(run.model.weights),
        "template": bundle.template,
        "parts": [{"part": row.part, "parameters": row.parameters, "trained": row.trained, "how": row.how, "lr": row.lr} for row in rows],
        "sources": [_source(*one) for one in zip(reader.training.index.sources, training, held, strict=True)],
        "validation": [_source(*one, None) for one in zip(reader.validation.index.sources, validating, strict=True)] if own else [],
        "batch": stage.batch.model_dump(mode="json"),
        "optimizer": stage.optimizer.kind,
        "schedule": stage.schedule.kind,
    }


def _source(rows: Rows, count: Count, held: Count | None) -> dict[str, Any]:
    return {
        "path": rows.source.path,
        "layout": rows.layout.name,
        "container": rows.container.what,
        "samples": count.samples,
        "exact": count.exact,
        "held_out": held.samples if held else None,
    }


def stage_lines(record: dict[str, Any]) -> Iterator[str]:
    """The start record as lines of text: the data, and the size of a step."""
    sources = record["sources"]
    for source in sources[:MOST_SOURCES]:
        yield f"data: {_describe_source(source)}"
    if len(sources) > MOST_SOURCES:
        yield f"data: {counted(len(sources) - MOST_SOURCES, 'more source')}"
    for source in record["validation"][:MOST_SOURCES]:
        yield f"validation data: {_describe_source(source)}"
    batch = record["batch"]
    times = f"{batch['packs_per_step']} × " if batch["packs_per_step"] > 1 else ""
    patches = f" and {batch['max_patches']:,} patches" if batch["max_patches"] else ""
    length = counted(record["steps"], "step") + (f" ({counted(record['epochs'], 'epoch')})" if record["epochs"] else "")
    yield f"one step: up to {times}{batch['max_tokens']:,} tokens{patches}; {length}"


def _describe_source(source: dict[str, Any]) -> str:
    about = "" if source["exact"] else "about "
    samples = "" if source["samples"] is None else f", {about}{counted(source['samples'], 'sample')}"
    held = f", {about}{source['held_out']:,} more held out for validation" if source["held_out"] else ""
    return f"{source['path']} ({source['layout']}, {source['container']}){samples}{held}"


class Tally:
    """The figures that the end of a run prints: of its last stage, since the loss of another stage is not that of the model."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._steps: deque[StepFigures] = deque(maxlen=SMOOTHED_STEPS)
        self._validation: tuple[str, float] | None = None  # the last one: stage and loss
        self._best: tuple[float, int] | None = None  # of that stage: loss and step
        self._skipped: dict[str, int] = {}  # by stage

    def step(self, figures: StepFigures) -> None:
        if self._steps and self._steps[-1].stage != figures.stage:
            self._steps.clear()
        self._steps.append(figures)
        self._skipped[figures.stage] = figures.rejected

    def validated(self, stage: str, step: int, loss: float, best: float | None) -> None:
        """A validation loss, and the lowest one of the stage so far."""
        if self._validation is not None and self._validation[0] != stage:
            self._best = None
        self._validation = stage, loss
        if best is not None and (self._best is None or best != self._best[0]):
            self._best = best, step if best == loss else 0

    def line(self, steps: int) -> str:
        """The result in one line."""
        parts = [f"done: {counted(steps, 'step')}"]
        if not self._steps:
            return parts[0]
        parts[0] += f" in {duration(time.monotonic() - self._start)}"
        last = self._steps[-1].stage
        applied = [(r.loss, r.counts.supervised) for one in self._steps if (r := one.report).outcome == "applied" and r.loss is not None]
        if labels := sum(count for _, count in applied):
            loss = sum(loss * count for loss, count in applied) / labels
            parts.append(f"loss {loss:.4f} (mean of the last {counted(len(applied), 'step')})")
        if self._validation is not None and self._validation[0] == last:
            parts.append(self._validation_text(self._validation[1]))
        if skipped := sum(self._skipped.values()):
            parts.append(f"{counted(skipped, 'sample')} skipped (rejects.jsonl says why)")
        return " · ".join(parts)

    def _validation_text(self, loss: float) -> str:
        shown = f"validation loss {loss:.4f}" if math.isfinite(loss) else "validation loss not finite"
        if self._best is None:
            return shown
        best, step = self._best
        return f"{shown}, the best" if best == loss else f"{shown}, best {best:.4f}" + (f" at step {step:,} of the stage" if step else "")
