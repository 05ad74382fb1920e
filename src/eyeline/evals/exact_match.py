"""Every question answered greedily, and the answer scored against the true one: word for word, or by a metric of the user's."""

import base64
import io
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any, NamedTuple

from PIL import Image as Pillow

from eyeline.core.batch import Budget, Document, EncodedImage, Sample, Text
from eyeline.core.errors import BadSample, Refused
from eyeline.core.plan import Spec
from eyeline.core.randomness import seed_for
from eyeline.core.world import ALONE, World
from eyeline.data.images.decode import decode
from eyeline.data.images.image_files import image_key
from eyeline.data.images.patches import outlines
from eyeline.data.sources.sources import Place, Rows
from eyeline.data.text.documents import up_to_last_supervised
from eyeline.data.text.tokenizer import Encoder
from eyeline.evals.metric import EXACT_MATCH, Metric, normalise_answer
from eyeline.evals.result import Asked, Result, Score, TextOnly
from eyeline.generate.generate import Answer, Anywhere, generate, here
from eyeline.generate.prompts import Prompts
from eyeline.generate.sampling import Sampling
from eyeline.models import Model

SHOWN = 10  # samples in eval.json, and as many wrong answers
WINDOW = 2048  # samples that are put in order of their images at a time
THUMBNAIL = 320  # pixels of the longer side of a shown image
BUDGET = Budget(tokens=16_384, patches=16_384)  # of a round of questions: the tokens that its cache has room for


def question_of(sample: Sample) -> str:
    """All text before the last answer."""
    return "\n".join(part.text for message in sample.messages[:-1] for part in message.parts if isinstance(part, Text))


def answer_of(sample: Sample) -> str:
    """The last answer."""
    return "".join(part.text for part in sample.messages[-1].parts if isinstance(part, Text))


@dataclass(frozen=True)
class Prior:
    """The text-only baseline: an answer from the training questions alone, without the image."""

    answers: dict[str, str]  # question -> its most frequent answer
    default: str  # the most frequent answer of all, for questions that training never asked

    how: str = "the most frequent answer to the same question in the training data, else the most frequent answer of all"

    def guess(self, question: str) -> str:
        return self.answers.get(question, self.default)


def prior_of(samples: Iterable[Sample], alike: Callable[[str], str] = normalise_answer) -> Prior:
    """The prior of these samples, in which answers are one that are `alike`. Of equally frequent answers the one met first."""
    by_question: dict[str, Counter[str]] = defaultdict(Counter)
    overall: Counter[str] = Counter()
    for sample in samples:
        sample = up_to_last_supervised(sample)
        answer = alike(answer_of(sample))
        by_question[question_of(sample)][answer] += 1
        overall[answer] += 1
    return Prior({question: most_frequent(counts) for question, counts in by_question.items()}, most_frequent(overall) if overall else "")


def most_frequent(counts: Counter[str]) -> str:
    return counts.most_common(1)[0][0]  # stable: a Counter keeps the order in which it met its keys


class Question(NamedTuple):
    """The last question of a sample, and where its row is."""

    sample: Sample
    rows: Rows
    place: Place

    def row(self) -> Any:
        """The row as its file has it."""
        return self.rows.container.row(self.place)


def usable(sources: Iterable[Rows], rejected: Counter[str]) -> Iterator[Question]:
    """Every sample of the sources in order, up to its last answer that is in the loss; the unusable ones are counted in `rejected` by
    cause."""
    for rows in sources:
        for place, _, found in rows.kept_rows():
            if isinstance(found, BadSample):
                rejected[found.cause] += 1
            else:
                yield Question(up_to_last_supervised(found), rows, place)


class Said(NamedTuple):
    """The model's answer to a question."""

    prediction: str
    cut: bool
    score: float


@dataclass(frozen=True)
class Answered:
    """One question with the model's answer, and with what a guess without the image would be worth."""

    sample: Sample
    prediction: str
    cut: bool
    score: float
    guessed: float

    @property
    def correct(self) -> bool:
        return self.score == 1


def exact_match(
    model: Model,
    spec: Spec,
    encoder: Encoder,
    asked: Sequence[Rows],
    prior: Prior,
    *,
    metric: Metric = EXACT_MATCH,
    max_new_tokens: int,
    limit: int | None = None,
    budget: Budget = BUDGET,
    stamps: dict[str, Any] | None = None,
    progress: Callable[[int], None] | None = None,
    world: World = ALONE,
    anywhere: Anywhere = here,
) -> Result:
    """Ask the last question of every sample (of the first `limit`). `progress` hears the number of questions answered.

    Samples that cannot be asked are counted under `rejected` and are in no score. Refused when none can. The model's
    training mode is put back. Ranks answer the same rounds of questions as one process would, each some of them, and return the result
    of rank 0, whose `prior` and `progress` are used; `anywhere` is for those that share the model's weights.
    """
    start = time.monotonic()
    rejected: Counter[str] = Counter()
    tally = Tally()

    def add(answered: Sequence[tuple[Question, Said | str]]) -> None:
        for question, said in answered:
            if isinstance(said, str):
                rejected[said] += 1
                continue
            guessed = metric.score(prior.guess(question_of(question.sample)), answer_of(question.sample), question.row)
            tally.add(Answered(question.sample, *said, guessed))
            if progress is not None:
                progress(tally.questions)

    was_training = model.training
    model.eval()
    try:
        questions = islice(usable(asked, rejected), limit)
        for answered in answers(model, spec, encoder, questions, metric, max_new_tokens, budget, rejected, world, anywhere):
            world.by_first(partial(add, answered))
    finally:
        model.train(was_training)
    return world.by_first(lambda: result_of(tally, metric, prior, rejected, max_new_tokens, time.monotonic() - start, stamps or {}))


def result_of(
    tally: "Tally", metric: Metric, prior: Prior, rejected: Counter[str], max_new_tokens: int, seconds: float, stamps: dict[str, Any]
) -> Result:
    """The result of all answers. Refused where there are none."""
    if not tally.questions:
        raise Refused(
            f"no question could be asked: {dict(sorted(rejected.items())) or 'the sources are empty'}. Run `eyeline check` on the recipe."
        )
    overall = tally.overall
    return Result(
        metric=metric.identity,
        accuracy=overall.accuracy,
        questions=overall.questions,
        overall=overall,
        by_kind=tally.by_kind(tally.right),
        text_only=TextOnly(how=prior.how, overall=mean(sum(tally.guessed.values()), tally.questions), by_kind=tally.by_kind(tally.guessed)),
        rejected=dict(rejected),
        given=tally.given,
        cut=tally.cut,
        max_new_tokens=max_new_tokens,
        seconds=seconds,
        stamps=stamps,
        samples=tuple(asked_of(answered) for answered in tally.samples()),
        wrong=tuple(asked_of(answered) for answered in tally.wrong()),
    )


class Tally:
    """Sums over the answers so far, divided once at the end."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()  # by kind, like the next two
        self.right: dict[str, float] = defaultdict(int)  # sums of scores
        self.guessed: dict[str, float] = defaultdict(int)
        self.given = 0
        self.cut = 0
        self._shown: dict[int, Answered] = {}
        self._wrong: dict[int, Answered] = {}

    def add(self, answered: Answered) -> None:
        sample = answered.sample
        self.asked[sample.kind] += 1
        self.right[sample.kind] += answered.score
        self.guessed[sample.kind] += answered.guessed
        self.given += sum(message.role == "assistant" for message in sample.messages[:-1])
        self.cut += answered.cut
        # the samples with the smallest digests: chosen at random, and the same ones in any order
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
        return mean(sum(self.right.values()), self.questions)

    def by_kind(self, right: Mapping[str, float]) -> dict[str, Score]:
        return {kind: mean(right.get(kind, 0), self.asked[kind]) for kind in sorted(self.asked)}

    def samples(self) -> list[Answered]:
        return [self._shown[digest] for digest in sorted(self._shown)]

    def wrong(self) -> list[Answered]:
        return [self._wrong[digest] for digest in sorted(self._wrong)]


def mean(correct: float, questions: int) -> Score:
    return Score(questions=questions, correct=correct, accuracy=correct / questions)


def answers(
    model: Model,
    spec: Spec,
    encoder: Encoder,
    questions: Iterable[Question],
    metric: Metric,
    max_new_tokens: int,
    budget: Budget,
    rejected: Counter[str],
    world: World,
    anywhere: Anywhere,
) -> Iterator[list[tuple[Question, Said | str]]]:
    """The questions of some rounds, in order of images within windows, each with the greedy answer, or with the cause why it cannot be
    asked. Of several ranks each answers one round at a time, and hears what the others have answered.

    Rounds are the same for any number of ranks, since in one answer the others of its round may change a rounding. They are planned by
    the images' headers, so that each image is decoded on one rank; a sample without a usable header is counted in `rejected`.
    """
    sampling = Sampling(max_new_tokens=max_new_tokens)
    prompts = Prompts(encoder, spec.image)
    planned = rounds(questions, Prompts(encoder, spec.image, outlines), max_new_tokens, budget, spec.max_positions, rejected)
    while slot := world.by_each(lambda: list(islice(planned, world.size))):
        own = slot[world.rank] if world.rank < len(slot) else []
        made = world.by_each(partial(prompts_of, own, prompts))
        asked = [prompt for _, prompt in made if isinstance(prompt, Document)]
        said = iter(generate(model, spec, asked, sampling, encoder.stop_ids, None, anywhere))
        ended = [(question, prompt if isinstance(prompt, str) else next(said)) for question, prompt in made]
        told = world.gather_patiently(world.by_each(partial(scored, ended, encoder, metric)))
        questions_of = [question for round in slot for question, _ in round]
        yield list(zip(questions_of, chain.from_iterable(told), strict=True))


def prompts_of(round: Iterable[tuple[Question, Document]], prompts: Prompts) -> list[tuple[Question, Document | str]]:
    """The questions of a round that was planned by headers, with their prompts, or with the cause why there is none."""

    def made(question: Question) -> Document | str:
        try:
            return prompts.prompt(question.sample)
        except BadSample as bad:
            return bad.cause

    return [(question, made(question)) for question, _ in round]


def scored(ended: Iterable[tuple[Question, Answer | str]], encoder: Encoder, metric: Metric) -> list[Said | str]:
    """Answers as text, with their scores; a cause stays one."""

    def said(question: Question, answer: Answer) -> Said:
        prediction = encoder.decode(after_reasoning(answer.tokens, encoder))
        return Said(prediction, answer.finish == "length", metric.score(prediction, answer_of(question.sample), question.row))

    return [answer if isinstance(answer, str) else said(question, answer) for question, answer in ended]


def after_reasoning(tokens: Sequence[int], encoder: Encoder) -> Sequence[int]:
    """The tokens of an answer without the reasoning before it, which templates end with a control token."""
    end = encoder.controls.get("</think>")
    return tokens[len(tokens) - tuple(reversed(tokens)).index(end) :] if end in tokens else tokens


def rounds(
    questions: Iterable[Question], prompts: Prompts, max_new_tokens: int, budget: Budget, longest: int, rejected: Counter[str]
) -> Iterator[list[tuple[Question, Document]]]:
    """Prompts that are answered together: their cache has room for at most `budget.tokens`, and their images, each counted
    once, have at most `budget.patches`. A prompt that is larger than that is a round of its own."""
    round: list[tuple[Question, Document]] = []
    longest_prompt = 0
    patches: dict[str, int] = {}
    for question in by_image(questions):
        try:
            prompt = prompts.prompt(question.sample)
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
        round.append((question, prompt))
        longest_prompt, patches = wider, more
    if round:
        yield round


def by_image(questions: Iterable[Question]) -> Iterator[Question]:
    """The same questions, those on one image side by side within windows."""
    iterator = iter(questions)
    while window := list(islice(iterator, WINDOW)):
        yield from sorted(window, key=lambda question: [image_key(image) for image in question.sample.images])


def asked_of(answered: Answered) -> Asked:
    """A sample as eval.json keeps it."""
    sample = answered.sample
    return Asked(
        id=sample.id,
        kind=sample.kind,
        question=question_of(sample),
        answer=answer_of(sample),
        prediction=answered.prediction,
        correct=answered.correct,
        score=answered.score,
        images=tuple(thumbnail(image) for image in sample.images),
    )


def thumbnail(image: EncodedImage) -> str:
    """A data URL of the image as the model's preprocessing saw it, upright and opaque, made small. A small one is kept exactly."""
    rgb = Pillow.fromarray(decode(image))
    small = max(rgb.size) <= THUMBNAIL // 2
    rgb.thumbnail((THUMBNAIL, THUMBNAIL))
    file = io.BytesIO()
    rgb.save(file, format="PNG" if small else "JPEG", quality=85)
    return f"data:image/{'png' if small else 'jpeg'};base64,{base64.b64encode(file.getvalue()).decode()}"
