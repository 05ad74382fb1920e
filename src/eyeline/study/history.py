"""What a run wrote about itself, read back: `metrics.jsonl` and `rejects.jsonl`, torn lines and resumes included."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

LINE_LIMIT = 1 << 20  # bytes; a longer line is no metrics line, and is skipped without being held in memory


class Line(BaseModel):
    """One JSON line. Unknown fields are ignored, so that an older report reads a newer run."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class Step(Line):
    """One optimizer step, as `train/metrics.py` writes it. `loss` and `grad_norm` are None where they were not finite."""

    stage: str
    stage_index: int
    step: int  # in the stage, from 1
    global_step: int
    loss: float | None  # a supervised token, over the whole step
    lr: dict[str, float]  # by part
    grad_norm: float | None
    applied: bool
    slots: int
    real: int
    visual: int
    text: int
    supervised: int
    documents: int
    images: int
    patches: int
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


class Validation(Line):
    """One pass over the held-out data."""

    stage: str
    global_step: int
    loss: float | None
    supervised: int


@dataclass(frozen=True)
class History:
    """A run's lines in order. After a resume, steps are done again: the later line of a global step is the one that counts."""

    steps: tuple[Step, ...]  # one a global step, rising
    validations: tuple[Validation, ...]  # one a global step, rising
    starts: tuple[dict[str, Any], ...]  # one an attempt: its stamps
    done_twice: int  # step lines that a resume replaced: work that was lost
    spent_s: dict[str, float]  # by cause over all attempts, lost work included
    unreadable: int  # lines that a kill tore, or that are of no known kind


def read_history(path: Path) -> History:
    """The history in a `metrics.jsonl`. OSError reaches the caller; a bad line is counted, never fatal."""
    steps: dict[int, Step] = {}
    validations: dict[int, Validation] = {}
    starts: list[dict[str, Any]] = []
    spent_s: Counter[str] = Counter()
    done_twice = unreadable = 0
    for line in json_lines(path):
        try:
            match line:
                case {"kind": "step"}:
                    step = Step.model_validate(line | {"seconds": causes(line)})
                    done_twice += step.global_step in steps
                    steps[step.global_step] = step
                    spent_s.update(step.seconds)
                case {"kind": "validation"}:
                    validation = Validation.model_validate(line)
                    validations[validation.global_step] = validation
                case {"kind": "start"}:
                    starts.append({k: v for k, v in line.items() if k != "kind"})
                case _:
                    unreadable += 1
        except ValidationError:
            unreadable += 1
    return History(
        tuple(steps[i] for i in sorted(steps)),
        tuple(validations[i] for i in sorted(validations)),
        tuple(starts),
        done_twice,
        dict(spent_s),
        unreadable,
    )


def causes(line: dict[str, Any]) -> dict[str, Any]:
    """The seconds of a step line by cause: every field `CAUSE_s` but those that are no cause."""
    others = ("step_s", "real_tokens_per_s", "flops_per_s")
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
