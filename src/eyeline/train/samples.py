"""Answers of the model to some validation questions while it trains, with their images: what a loss does not show.

Each validation writes `samples/step-NNNNNNNN.json` in the run folder; trackers and `eyeline watch` show them.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from eyeline.core.batch import Budget
from eyeline.core.files import make_folder, write_json
from eyeline.core.plan import Plan
from eyeline.core.run_folder import SAMPLES
from eyeline.core.world import ALONE
from eyeline.data.reader import Reader
from eyeline.data.text.documents import up_to_last_supervised
from eyeline.data.text.tokenizer import Encoder
from eyeline.data.validation import validation_samples
from eyeline.evals.exact_match import BUDGET, Answered, Question, answers, asked_of
from eyeline.evals.metric import EXACT_MATCH
from eyeline.evals.result import Asked
from eyeline.generate.generate import here
from eyeline.models import Model
from eyeline.train.run import Run

MAX_NEW_TOKENS = 32  # of an answer, where the recipe has no evaluation that says


def sample_problems(run: Run, ranks: int = 1) -> Iterator[str]:
    """Why the recipe's validation_samples cannot be answered, or its top_k_probabilities not be seen."""
    if run.top_k_probabilities and ranks > 1:
        yield f"top_k_probabilities are seen in one process, and there are {ranks} ranks. Set top_k_probabilities=0"
    if not run.validation_samples:
        return
    if run.validation_steps is None:
        yield "validation_samples are answered at each validation, and validation_steps is not set. Set it, or leave validation_samples out"
    if ranks > 1:
        yield f"validation_samples are answered by one process, and there are {ranks} ranks. Set validation_samples=0"
    for stage in run.stages:
        if stage.data.prepared is not None and (stage.data.validation_fraction or stage.data.validation):
            yield (
                f"validation_samples reads the sources of stage {stage.name}'s validation data, and data.prepared replaces them. "
                "Set validation_samples=0"
            )


def answered_samples(
    plan: Plan[Model], encoder: Encoder, reader: Reader, budget: Budget, count: int, max_new_tokens: int
) -> tuple[Asked, ...]:
    """The last questions of the first validation samples, each with its greedy answer. Dropout is off meanwhile."""
    questions = [Question(up_to_last_supervised(sample), rows, place) for rows, place, sample in validation_samples(reader, budget, count)]
    model, found = plan.model, dict[int, Asked]()
    was_training = model.training
    model.eval()
    try:
        rounds = answers(model, plan.spec, encoder, questions, EXACT_MATCH, max_new_tokens, BUDGET, Counter(), ALONE, here)
        for question, said in chain.from_iterable(rounds):
            if not isinstance(said, str):  # the cause why it cannot be asked
                found[id(question)] = asked_of(Answered(question.sample, *said, guessed=0))
    finally:
        model.train(was_training)
    return tuple(found[id(question)] for question in questions if id(question) in found)  # as listed, whatever was answered together


def write_samples(folder: Path, stage: str, global_step: int, answered: tuple[Asked, ...]) -> None:
    """One file in the run folder."""
    make_folder(folder / SAMPLES)
    value: dict[str, Any] = {"stage": stage, "global_step": global_step, "answers": [one.model_dump(mode="json") for one in answered]}
    write_json(folder / SAMPLES / f"step-{global_step:08d}.json", value)
