"""Score an answer: by exact match, or by a function of the user's own, `score(prediction, answer)`, with or without `row`."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any

from eyeline.core.errors import Refused
from eyeline.core.user_code import CodeFailed, UserFunction, is_code, user_function


def normalise_answer(answer: str) -> str:
    """The answer in lower case, without white space and punctuation around it."""
    return " ".join(answer.casefold().split()).strip(" .,!?")


FINAL_ANSWER = "final_answer"  # the metric's name
MARKER = "Answer:"  # what the final answer of a reasoned one follows


def final_answer(text: str) -> str:
    """What follows the last `Answer:` of a text; all of it where there is none."""
    found = list(re.finditer(re.escape(MARKER), text, re.IGNORECASE))
    return text[found[-1].end() :].strip() if found else text


@dataclass(frozen=True)
class Metric:
    """A function that gives each answer a score from 0 to 1. A score of an evaluation is their mean."""

    code: UserFunction | None = None  # None: exact match, 1 or 0
    final: bool = False  # exact match of what follows `Answer:`

    @property
    def name(self) -> str:
        return ("exact match of final answers" if self.final else "exact match") if self.code is None else self.code.name

    @property
    def identity(self) -> str:
        return self.name if self.code is None else self.code.identity

    def score(self, prediction: str, answer: str, row: Callable[[], Any]) -> float:
        """The score of a prediction; `row` reads the row that the question is of, as its file has it. Refused, with file and line, where a
        function fails or returns no number from 0 to 1."""
        if self.final:
            prediction, answer = final_answer(prediction), final_answer(answer)
        if self.code is None:
            return int(normalise_answer(prediction) == normalise_answer(answer))
        try:
            score = self.code(prediction, answer, **({"row": row()} if self.code.takes("row") else {}))
        except CodeFailed as failed:
            raise Refused(f"{failed}. It was to score {prediction[:80]!r} where {answer[:80]!r} is right") from failed
        if not isinstance(score, Real) or not 0 <= float(score) <= 1:
            what = f"returned {score!r:.80} for {prediction[:80]!r} where {answer[:80]!r} is right"
            raise Refused(f"{self.code.file}: {self.code.function} {what}; wanted a number from 0 to 1")
        return float(score)


EXACT_MATCH = Metric()


def metric_named(name: str) -> Metric:
    """The metric of a setting. Refused, with the line, for a function that cannot be used."""
    if name == FINAL_ANSWER:
        return Metric(final=True)
    return Metric(user_function(name, ("prediction", "answer"), ("row",)) if is_code(name) else None)
