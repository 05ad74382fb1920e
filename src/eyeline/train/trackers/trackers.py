"""The trackers of a run, by the names that its recipe gives (`report_to`)."""

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, assert_never

from eyeline.evals.result import Asked
from eyeline.parallel.telemetry import report_nothing
from eyeline.train.trackers.tracker import About, InThread, Name, Tracker, figures_of


class Trackers:
    """All trackers of a run; none where it names none."""

    def __init__(self, names: Sequence[Name], about: About | None, logging_steps: int) -> None:
        self._every = logging_steps
        self._open = [InThread(name, opener(name, about)) for name in names] if about is not None else []
        self._steps = 0  # of the stage

    def line(self, line: Mapping[str, Any]) -> None:
        """A line of metrics.jsonl. Of steps, the first, the last and every `logging_steps`-th of a stage."""
        if line["kind"] == "stage":
            self._steps = line["steps"]
        if line["kind"] == "step" and line["step"] % self._every and line["step"] not in (1, self._steps):
            return
        if self._open and (figures := figures_of(line)):
            step = int(line["global_step"])
            for one in self._open:
                one.tell(lambda tracker: tracker.figures(step, figures))

    def samples(self, step: int, answers: Sequence[Asked]) -> None:
        for one in self._open:
            one.tell(lambda tracker: tracker.samples(step, answers))

    def close(self) -> None:
        for one in self._open:
            one.close()
        self._open = []


def opener(name: Name, about: About) -> Callable[[], Tracker]:
    """What opens a tracker. The package is imported when it is called, in the tracker's own thread."""

    def opened() -> Tracker:
        about.out.mkdir(parents=True, exist_ok=True)
        report_nothing()
        match name:
            case "tensorboard":
                from eyeline.train.trackers.tensorboard import TensorBoard

                return TensorBoard(about)
            case "wandb":
                from eyeline.train.trackers.wandb import WeightsAndBiases

                return WeightsAndBiases(about)
            case "trackio":
                from eyeline.train.trackers.trackio import Trackio

                return Trackio(about)
            case "mlflow":
                from eyeline.train.trackers.mlflow import MLflow

                return MLflow(about)
            case _:
                assert_never(name)

    return opened


def missing(names: Sequence[Name]) -> list[str]:
    """A problem for each tracker whose package is not installed."""
    return [
        f"report_to: {name} needs the package {name}, which is not installed. Install it with `pip install 'eyeline[{name}]'`, or "
        "leave it out: metrics.jsonl has every figure"
        for name in names
        if find_spec(name) is None
    ]
