"""The record that `eval.json` holds: written by `exact_match.py`, read by reports."""

from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from eyeline.core.errors import Refused
from eyeline.core.files import write_json
from eyeline.core.problems import lines_of
from eyeline.core.settings import Settings


class Score(Settings):
    """The scores of answers to a number of questions."""

    questions: int
    correct: int | float  # right answers, by exact match; else the sum of their scores, from 0 to 1 each
    accuracy: float  # correct / questions


class TextOnly(Settings):
    """The scores of the text-only baseline on the same questions."""

    how: str
    overall: Score
    by_kind: dict[str, Score]


class Asked(Settings):
    """One question as the report shows it."""

    id: str
    kind: str
    question: str
    answer: str
    prediction: str
    correct: bool
    score: int | float | None = None  # None: of a version that had exact match alone
    images: tuple[str, ...]  # data URLs, made small


class Result(Settings):
    """Accuracy over the samples that were asked: the mean of their scores. Its leaves `accuracy` and `questions` are the headline."""

    version: Literal[2] = 2
    metric: str = "exact match"  # or the file, function and digest of a metric of the user's
    accuracy: float
    questions: int
    overall: Score
    by_kind: dict[str, Score]
    text_only: TextOnly
    rejected: dict[str, int]  # samples that could not be asked, by cause: not in `questions`
    given: int = 0  # answers before the last question of a sample: shown to the model, not asked
    also_trained_on: int = 0  # questions that the recipe's stages train on, answer and all
    cut: int  # answers that reached the limit of tokens before they ended
    max_new_tokens: int  # that limit
    seconds: float  # wall time of asking
    stamps: dict[str, Any]  # checkpoint, data, hardware, commit: given by the caller
    samples: tuple[Asked, ...]  # some questions, chosen at random, independent of their answers
    wrong: tuple[Asked, ...] = ()  # some that were answered wrongly, chosen the same way

    @property
    def warning(self) -> str | None:
        """The reason why the scores may be too high."""
        if not self.also_trained_on:
            return None
        return (
            f"{self.also_trained_on:,} of {self.questions:,} questions are also trained on: this is not a score on new questions. "
            "Give the recipe's evaluation data that no stage trains on"
        )


def write_result(path: Path, result: Result) -> None:
    """Write eval.json. StorageFailed where that is impossible."""
    write_json(path, result.model_dump(mode="json"))


def read_result(path: Path) -> Result:
    """The result in an eval.json; Refused with the field at fault where it is none."""
    try:
        return Result.model_validate_json(path.read_bytes())
    except ValidationError as error:
        wrong = lines_of(Result, None, error)[0]
        raise Refused(f"{path} is not an evaluation of version 2: {wrong}. Run `eyeline eval` again to replace it.") from error
