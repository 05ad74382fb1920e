"""The figures of a step."""

from typing import Any

from eyeline.core.batch import Counts
from eyeline.models.flops import NONE
from eyeline.train.metrics import StepFigures
from eyeline.train.step import Report


def step_figures(step: int = 1_234, steps: int = 25_000, loss: float = 0.1234, **changed: Any) -> StepFigures:
    """A step of half a second: 90 of 100 slots are tokens, 10 of them in the loss."""
    counts = Counts(slots=100, real=90, visual=32, text=58, supervised=changed.pop("supervised", 10), documents=4, images=2, patches=128)
    report = Report(loss, 1.5, changed.pop("outcome", "applied"), counts, changed.pop("experts", None))
    seconds = {"step": 0.5, "startup": 0.0, "data_wait": 0.05, "compute": 0.4, "validation": 0.0, "checkpoint": 0.0, "other": 0.05}
    fields: dict[str, Any] = {
        "stage": "tune", "stage_index": 0, "step": step, "steps": steps, "global_step": step, "report": report,
        "lr": {"vision": 1e-5, "projector": 1e-3, "language": 2e-5}, "seconds": seconds, "memory_bytes": 123 * 2**30, "rejected": 12,
        "flops": NONE, "peak": None, "imbalance": {}, "epoch": 1.75,
    }  # fmt: skip
    return StepFigures(**(fields | changed))
