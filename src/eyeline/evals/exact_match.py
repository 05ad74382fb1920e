"""Exact match: every question answered greedily, and compared with the true answer word for word."""

import base64
import io
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from PIL import Image as Pillow

from eyeline.core.batch import Budget, Document, Picture, Sample, Text
from eyeline.core.errors import BadSample, Refused
from eyeline.core.facts import Facts
from eyeline.core.randomness import seed_for
from eyeline.data.images.decode import decode
from eyeline.data.images.image_files import image_key
from eyeline.data.sources.sources import Rows
from eyeline.data.text.documents import until_supervised
from eyeline.data.text.tokenizer import Encoder
from eyeline.evals.result import Asked, Blind, Result, Score
from eyeline.generate.generate import generate
from eyeline.generate.prompts import Prompts
from eyeline.generate.sampling import Sampling
from eyeline.models import Model

SHOWN = 10  # samples in eval.json, and as many wrong answers
WINDOW = 2048  # samples that are put in order of their images at a time
THUMBNAIL = 320  # pixels of the longer side of a shown image
BUDGET = Budget(tokens=16_384, patches=16_384)  # of a round of questions: the tokens that its cache has room for


def normalised(answer: str) -> str:
    """What counts of an answer: not its case, nor its white space, nor full stops and the like around it."""
    return " ".join(answer.casefold().split()).strip(" .,!?")


def question_of(sample: Sample) -> str:
    """All text before the last answer."""
    return "\n".join(part.text for message in sample.messages[:-1] for part in message.parts if isinstance(part, Text))


def answer_of(sample: Sample) -> str:
    """The last answer."""
    return "".join(part.text for part in sample.messages[-1].parts if isinstance(part, Text))


@dataclass(frozen=True)
class Prior:
    """What somebody would answer who knows the training questions by heart and never looks at an image."""

    answers: dict[str, str]  # question -> its most frequent answer, normalised
    default: str  # the most frequent answer of all, for questions that training never asked

    how: str = "the most frequent answer to the same question in the training data, else the most frequent answer of all"

    def guess(self, question: str) -> str:
        return self.answers.get(question, self.default)


def prior_of(samples: Iterable[Sample]) -> Prior:
    """The prior of these samples. Of equally frequent answers the one met first."""
    by_question: dict[str, Counter[str]] = defaultdict(Counter)
    overall: Counter[str] = Counter()
    for sample in samples:
        sample = until_supervised(sample)
        answer = normalised(answer_of(sample))
        by_question[question_of(sample)][answer] += 1
        overall[answer] += 1
    return Prior({question: most_frequent(counts) for question, counts in by_question.items()}, most_frequent(overall) if overall else "")


def most_frequent(counts: Counter[str]) -> str:
    return counts.most_common(1)[0][0]  # stable: a Counter keeps the order in which it met its keys


def usable(sources: Iterable[Rows], rejected: Counter[str]) -> Iterator[Sample]:
    """Every sample of the sources in order, up to its last answer that is in the loss; the unusable ones are counted in `rejected` by
    cause."""
    for rows in sources:
        for _, _, found in rows.kept():
            if isinstance(found, BadSample):
                rejected[found.cause] += 1
            else:
                yield until_supervised(found)


@dataclass(frozen=True)
class Answered:
    """One question with the model's answer."""

    sample: Sample
    prediction: str
    cut: bool

    @property
    def correct(self) -> bool:
        return normalised(self.prediction) == normalised(answer_of(self.sample))


def exact_match(
    model: Model,
    facts: Facts,
    encoder: Encoder,
    asked: Sequence[Rows],
    prior: Prior,
    *,
    max_new_tokens: int,
    limit: int | None = None,
    budget: Budget = BUDGET,
    stamps: dict[str, Any] | None = None,
    progress: Callable[[int], None] | None = None,
) -> Result:
    """Ask the last question of every sample (of the first `limit`). `progress` hears the number of questions answered.

    Samples that cannot be asked are counted under `rejected` and are in no score. Refused when none can. The model's
    training mode is put back.
    """
    begin = time.monotonic()
    rejected: Counter[str] = Counter()
    tally = Tally(prior)
    was_training = model.training
    model.eval()
    try:
        samples = islice(usable(asked, rejected), limit)
        for answered in answers(model, facts, encoder, samples, max_new_tokens, budget, rejected):
            tally.add(answered)
            if progress is not None:
                progress(tally.questions)
    finally:
        model.train(was_training)
    if not tally.questions:
        raise Refused(
            f"nothing could be asked: {dict(sorted(rejected.items())) or 'the sources are empty'}. Run `eyeline check` on the recipe."
        )
    overall = tally.overall
    return Result(
        accuracy=overall.accuracy,
        questions=overall.questions,
        overall=overall,
        by_kind=tally.by_kind(tally.right),
        blind=Blind(how=prior.how, overall=score(tally.guessed.total(), tally.questions), by_kind=tally.by_kind(tally.guessed)),
        rejected=dict(rejected),
        given=tally.given,
        cut=tally.cut,
        max_new_tokens=max_new_tokens,
        seconds=time.monotonic() - begin,
        stamps=stamps or {},
        samples=tuple(shown(answered) for answered in tally.shown()),
        wrong=tuple(shown(answered) for answered in tally.wrong()),
    )


class Tally:
    """Counts of answers so far: sums, divided once at the end."""

    def __init__(self, prior: Prior):
        self.prior = prior
        self.asked: Counter[str] = Counter()  # by kind, like the next two
        self.right: Counter[str] = Counter()
        self.guessed: Counter[str] = Counter()
        self.given = 0
        self.cut = 0
        self._shown: dict[int, Answered] = {}
        self._wrong: dict[int, Answered] = {}

    def add(self, answered: Answered) -> None:
        sample = answered.sample
        self.asked[sample.kind] += 1
        self.right[sample.kind] += answered.correct
        self.guessed[sample.kind] += self.prior.guess(question_of(sample)) == normalised(answer_of(sample))
        self.given += sum(message.role == "assistant" for message in sample.messages[:-1])
        self.cut += answered.cut
        # the samples with the smallest digests: chosen by nobody, and the same ones whatever the order
        digest = seed_for(0, f"shown {sample.id}")
        for kept in (self._shown, *([] if answered.correct else [self._wrong])):
            kept[digest] = answered
            if len(kept) > SHOWN:
                del kept[max(kept)]

    @property
    def questions(self) -> int:
        return self.asked.total()

    @property
    def overall(self) -> Score:
        return score(self.right.total(), self.questions)

    def by_kind(self, right: Counter[str]) -> dict[str, Score]:
        return {kind: score(right[kind], self.asked[kind]) for kind in sorted(self.asked)}

    def shown(self) -> list[Answered]:
        return [self._shown[digest] for digest in sorted(self._shown)]

    def wrong(self) -> list[Answered]:
        return [self._wrong[digest] for digest in sorted(self._wrong)]


def score(correct: int, questions: int) -> Score:
    return Score(questions=questions, correct=correct, accuracy=correct / questions)


def answers(
    model: Model, facts: Facts, encoder: Encoder, samples: Iterable[Sample], max_new_tokens: int, budget: Budget, rejected: Counter[str]
) -> Iterator[Answered]:
    """Greedy answers, in order of images within windows. A sample without a usable prompt is counted in `rejected`."""
    sampling = Sampling(max_new_tokens=max_new_tokens)
    for round in rounds(samples, Prompts(encoder, facts.image), max_new_tokens, budget, facts.max_positions, rejected):
        made = generate(model, facts, [prompt for _, prompt in round], sampling, encoder.stop_ids)
        for (sample, _), answer in zip(round, made, strict=True):
            yield Answered(sample, encoder.decode(answer.tokens), answer.finish == "length")


def rounds(
    samples: Iterable[Sample], prompts: Prompts, max_new_tokens: int, budget: Budget, longest: int, rejected: Counter[str]
) -> Iterator[list[tuple[Sample, Document]]]:
    """Prompts that are answered together: their cache has room for at most `budget.tokens`, and their images, each counted
    once, have at most `budget.patches`. A prompt that is larger than that is a round of its own."""
    round: list[tuple[Sample, Document]] = []
    longest_prompt = 0
    patches: dict[str, int] = {}
    for sample in by_picture(samples):
        try:
            prompt = prompts.prompt(sample)
            if len(prompt.tokens_T) >= longest:
                raise BadSample("too_long", "messages", f"{len(prompt.tokens_T)} tokens leave no room for an answer in {longest}")
        except BadSample as bad:
            rejected[bad.cause] += 1
            continue
        wider = max(longest_prompt, len(prompt.tokens_T))
        more = patches | {image.key: image.grid.patches for image in prompt.images}
        if round and ((len(round) + 1) * (wider + max_new_tokens) > budget.tokens or sum(more.values()) > budget.patches):
            yield round
            round, wider, more = [], len(prompt.tokens_T), {image.key: image.grid.patches for image in prompt.images}
        round.append((sample, prompt))
        longest_prompt, patches = wider, more
    if round:
        yield round


def by_picture(samples: Iterable[Sample]) -> Iterator[Sample]:
    """The same samples, those on one image side by side within windows."""
    iterator = iter(samples)
    while window := list(islice(iterator, WINDOW)):
        yield from sorted(window, key=lambda sample: [image_key(picture) for picture in sample.pictures])


def shown(answered: Answered) -> Asked:
    """A sample as eval.json keeps it."""
    sample = answered.sample
    return Asked(
        id=sample.id,
        kind=sample.kind,
        question=question_of(sample),
        answer=answer_of(sample),
        prediction=answered.prediction,
        correct=answered.correct,
        pictures=tuple(thumbnail(picture) for picture in sample.pictures),
    )


def thumbnail(picture: Picture) -> str:
    """A data URL of the image as the model's preprocessing saw it, upright and opaque, made small. A small one is kept exactly."""
    rgb = Pillow.fromarray(decode(picture))
    small = max(rgb.size) <= THUMBNAIL // 2
    rgb.thumbnail((THUMBNAIL, THUMBNAIL))
    file = io.BytesIO()
    rgb.save(file, format="PNG" if small else "JPEG", quality=85)
    return f"data:image/{'png' if small else 'jpeg'};base64,{base64.b64encode(file.getvalue()).decode()}"
