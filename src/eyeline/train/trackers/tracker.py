"""What a tracker is told, and how: by a thread of its own, behind metrics.jsonl.

A tracker can be slow, unreachable or broken. The loop only puts what it has into a queue; a tracker that fails, or is far behind, is said
once and dropped, and the run continues. Nothing is in a tracker that is not in the run folder.
"""

import base64
import io
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image as Pillow

from eyeline.core.log import warn
from eyeline.evals.result import Asked

Name = Literal["tensorboard", "wandb", "trackio", "mlflow"]
ONLINE: tuple[Name, ...] = ("wandb", "mlflow")  # those that can send to a server

WAITING = 10_000  # lines that a tracker may be behind
CLOSING_S = 60.0  # at the end, to write what waits
NOT_FIGURES = ("stage_index", "step", "global_step", "attempt")  # numbers that say where a line belongs


@dataclass(frozen=True)
class About:
    """The run that a tracker shows."""

    folder: Path  # of the run; trackers write into its folder `trackers`
    id: str
    name: str
    recipe: Mapping[str, Any]  # resolved
    recipe_text: str
    resumed_from: int | None  # steps of the checkpoint that this attempt starts from
    online: bool  # whether what can be sent somewhere is

    @property
    def out(self) -> Path:
        return self.folder / "trackers"


class Tracker(Protocol):
    """One that is open."""

    def figures(self, step: int, figures: Mapping[str, float]) -> None: ...

    def samples(self, step: int, answers: Sequence[Asked]) -> None:
        """Questions of the validation data with their images, and what the model answers now."""
        ...

    def close(self) -> None: ...


class InThread:
    """A tracker that a thread opens and calls."""

    def __init__(self, name: str, open_tracker: Callable[[], Tracker]) -> None:
        self.name = name
        self._waiting: queue.Queue[Callable[[Tracker], None] | None] = queue.Queue(WAITING)
        self._failed: str | None = None
        self._said = False
        self._thread = threading.Thread(target=self._run, args=(open_tracker,), daemon=True, name=f"tracker {name}")
        self._thread.start()

    def tell(self, what: Callable[[Tracker], None]) -> None:
        """Have the thread do it, if the tracker is still there."""
        try:
            if self._failed is None:
                self._waiting.put_nowait(what)
        except queue.Full:
            self._failed = f"it is {WAITING:,} lines behind"
        self._say_failure()

    def close(self) -> None:
        """Wait until all is written, but not for ever."""
        if self._failed is None:
            try:
                self._waiting.put(None, timeout=CLOSING_S)
                self._thread.join(CLOSING_S)
            except queue.Full:
                pass
            if self._thread.is_alive():
                self._failed = f"it has not written everything within {CLOSING_S:.0f} s"
        self._say_failure()

    def _say_failure(self) -> None:
        if self._failed is not None and not self._said:
            self._said = True
            warn(f"report_to: {self.name} is dropped: {self._failed}. The run continues, and metrics.jsonl has everything")

    def _run(self, open_tracker: Callable[[], Tracker]) -> None:
        try:
            tracker = open_tracker()
            while (what := self._waiting.get()) is not None:
                what(tracker)
            tracker.close()
        except BaseException as error:  # noqa: BLE001 - whatever a package of others raises must not end the run; it is said
            self._failed = f"{type(error).__name__}: {error}".strip().rstrip(".")


def figures_of(line: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a step's or validation's line by name: `train/loss`, `train/lr/vision`, `validation/loss`."""
    found: dict[str, float] = {}

    def add(name: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for inner, one in value.items():
                add(f"{name}/{inner}", one)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found[name] = float(value)

    prefix = {"step": "train", "validation": "validation"}.get(str(line.get("kind")))
    for name, value in line.items() if prefix else ():
        if name not in NOT_FIGURES:
            add(f"{prefix}/{name}", value)
    return found


def pixels(image: str) -> NDArray[np.uint8]:
    """Rows × columns × 3 of an image that an answer has as a data URL."""
    with Pillow.open(io.BytesIO(base64.b64decode(image.partition(",")[2]))) as opened:
        return np.asarray(opened.convert("RGB"))


def caption(asked: Asked) -> str:
    """A question with its answers, as text."""
    return f"{asked.question.strip()}\nmodel: {asked.prediction}\nanswer: {asked.answer}"
