"""The records that a run wrote, read back: `metrics.jsonl` and `rejects.jsonl`, torn lines and resumes included."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

LINE_LIMIT = 1 << 20  # bytes; a longer line is not a metrics line, and is skipped without being held in memory


class Line(BaseModel):
    """One JSON line. Unknown fields are ignored, so that an older report reads a newer run."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class Step(Line):
    """One optimizer step, as `train/metrics.py` writes it. `loss` and `grad_norm` are None where they were not finite, and where no token
    of the step is in the loss."""

    stage: str
    stage_index: int
    step: int  # in the stage, from 1
    global_step: int
    loss: float | None  # a supervised token, over the whole step
    lr: dict[str, float]  # by part
    grad_norm: float | None
    applied: bool
    outcome: str | None = None  # "applied", "not finite", "overflow" or "no targets"; runs of older versions may have none
    slots: int
    real: int
    visual: int
    text: int
    supervised: int
    documents: int
    images: int
    patches: int
    sample_ids: int = 0  # older versions wrote none
    real_tokens_per_s: float  # over step_s
    step_s: float  # from the end of the step before to the end of this one
    seconds: dict[str, float]  # by cause ("data_wait", "compute", ..., "other"): they add up to step_s
    padding: float  # share of slots
    memory_bytes: int
    wall: str
    attempt: int
    flops: dict[str, int] = {}  # by part, forward and backward; runs of older versions have none
    flops_recomputed: int = 0
    flops_per_s: float | None = None  # without what is recomputed, over step_s
    mfu: float | None = None  # flops_per_s of the device's peak, where that is known
    hfu: float | None = None  # the same with what is recomputed
    allocator_retries: int | None = None
    imbalance: dict[str, float | None] = {}  # by part, work of the busiest rank over an equal share
    epoch: float | None = None  # epochs of the stage's data done

    @model_validator(mode="before")
    @classmethod
    def _no_loss(cls, line: dict[str, Any]) -> dict[str, Any]:
        """Older versions wrote 0 as the loss of a step without supervised tokens."""
        return line | {"loss": None, "grad_norm": None} if line.get("outcome") == "no targets" else line


class Validation(Line):
    """One pass over the held-out data of a stage."""

    stage: str
    global_step: int
    loss: float | None
    supervised: int


class Part(Line):
    """A part of the model in a stage."""

    part: str
    parameters: int
    trained: int
    how: str
    lr: float | None


class Origin(Line):
    """A source of data in a stage."""

    path: str
    layout: str
    samples: int | None
    exact: bool
    held_out: int | None


class BatchSize(Line):
    max_tokens: int
    max_patches: int
    packs_per_step: int


class StageStart(Line):
    """The start record of a stage, as `train/summary.py` writes it when the stage starts."""

    stage: str
    stage_index: int
    steps: int
    epochs: int | None
    family: str
    model: str | None  # the folder that the run started from; None for a fresh model
    parts: tuple[Part, ...]
    sources: tuple[Origin, ...]
    validation: tuple[Origin, ...]
    batch: BatchSize
    optimizer: str
    schedule: str
    kernels: tuple[str, ...] = ()  # older versions wrote none


@dataclass(frozen=True)
class History:
    """A run's lines in order. After a resume, steps are done again: what came after the checkpoint that it started from is lost work, and
    of two lines of a global step the later one counts."""

    steps: tuple[Step, ...]  # one per global step, rising
    validations: tuple[Validation, ...]  # one per global step, rising
    starts: tuple[dict[str, Any], ...]  # one an attempt: its stamps
    lost: int  # steps that a resume did again or has yet to do again
    spent_s: dict[str, float]  # by cause over all attempts, lost work included
    unreadable: int  # lines that a kill tore, or that are of no known kind
    stages: dict[str, StageStart] = field(default_factory=dict)  # by name, as the last attempt started it; older versions wrote none


def read_history(path: Path) -> History:
    """The history in a `metrics.jsonl`. OSError reaches the caller; a bad line is counted, never fatal."""
    steps: dict[int, Step] = {}
    validations: dict[int, Validation] = {}
    starts: list[dict[str, Any]] = []
    spent_s: Counter[str] = Counter()
    stages: dict[str, StageStart] = {}
    lost = unreadable = 0
    for line in json_lines(path):
        try:
            match line:
                case {"kind": "step"}:
                    step = Step.model_validate(line | {"seconds": causes(line)})
                    lost += step.global_step in steps
                    steps[step.global_step] = step
                    spent_s.update(step.seconds)
                case {"kind": "validation"}:
                    validation = Validation.model_validate(line)
                    validations[validation.global_step] = validation
                case {"kind": "stage"}:
                    stage = StageStart.model_validate(line)
                    stages[stage.stage] = stage
                case {"kind": "start"}:
                    if starts and (kept := resumed_from(line)) is not None:
                        lost += sum(number > kept for number in steps)
                        steps = {number: one for number, one in steps.items() if number <= kept}
                        validations = {number: one for number, one in validations.items() if number <= kept}
                    starts.append({k: v for k, v in line.items() if k != "kind"})
                case {"kind": "end"}:
                    pass  # how an attempt ended: for the ledger
                case _:
                    unreadable += 1
        except ValidationError:
            unreadable += 1
    return History(
        tuple(steps[i] for i in sorted(steps)),
        tuple(validations[i] for i in sorted(validations)),
        tuple(starts),
        lost,
        dict(spent_s),
        unreadable,
        stages,
    )


def resumed_from(start: dict[str, Any]) -> int | None:
    """The steps that an attempt had when it started: those of its checkpoint, or 0 without one. None where the line does not say."""
    step = start.get("resumed_from", "")
    return 0 if step is None else step if isinstance(step, int) else None


def causes(line: dict[str, Any]) -> dict[str, Any]:
    """The seconds of a step line by cause: every field `CAUSE_s` but those that are no cause."""
    others = ("step_s", "real_tokens_per_s", "flops_per_s", "elapsed_s")
    return {name.removesuffix("_s"): v for name, v in line.items() if name.endswith("_s") and name not in others}


@dataclass(frozen=True)
class RejectSummary:
    """Rejected samples by cause, most frequent first, and the first few lines."""

    by_cause: tuple[tuple[str, int], ...]
    first: tuple[dict[str, Any], ...]


def read_rejects(path: Path, show: int = 20) -> RejectSummary:
    """A summary of a `rejects.jsonl`; an absent file has no rejects."""
    causes: Counter[str] = Counter()
    first: list[dict[str, Any]] = []
    if path.exists():
        for line in json_lines(path):
            if line is None:
                continue
            causes[str(line.get("cause", "unknown"))] += 1
            if len(first) < show:
                first.append(line)
    return RejectSummary(tuple(causes.most_common()), tuple(first))


def json_lines(path: Path) -> Iterator[dict[str, Any] | None]:
    """Each line's JSON object, or None for a line that holds none. A last line without its newline was torn: not yielded.

    NaN and infinities, which JSON has no word for, become None.
    """
    with open(path, "rb") as file:
        while raw := file.readline(LINE_LIMIT):
            if not raw.endswith(b"\n"):
                if len(raw) < LINE_LIMIT:
                    return  # the end of the file
                while raw and not raw.endswith(b"\n"):
                    raw = file.readline(LINE_LIMIT)
                yield None
                continue
            try:
                value = json.loads(raw, parse_constant=lambda _: None)
            except (ValueError, RecursionError):  # UnicodeDecodeError and JSONDecodeError are ValueErrors
                value = None
            yield value if isinstance(value, dict) else None
