"""Samples -> requests -> answers with verdicts. Used by the job and by --dry."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from eyeline.core.batch import Message, Sample, Text
from eyeline.core.errors import BadSample
from eyeline.core.randomness import seed_for
from eyeline.data.sources.sources import Place, Rows
from eyeline.data.text.documents import up_to_last_supervised
from eyeline.data.text.templates import Content, Control, Template
from eyeline.distill.prompts import Asked, Prompt, asked, question_text, true_answer
from eyeline.distill.settings import Distill
from eyeline.distill.teacher import Asking, Request, Said
from eyeline.distill.verdicts import Parsed, flaw, parsed, verdicts

SEEDS = 0x7FFFFFFF  # largest one that every server takes


@dataclass(frozen=True)
class Answered:
    """One answer to a sample."""

    prompt: str  # its id
    n: int  # which of the answers to it, from 0
    seed: int | None  # None: the teacher takes none
    marker: str
    said: Said
    found: Parsed
    cause: str | None  # that it is rejected for; None: it is kept


@dataclass(frozen=True)
class Outcome:
    """A sample and what came back."""

    id: str
    sample: Sample | None  # None: it cannot be asked
    bad: BadSample | None
    answers: tuple[Answered, ...]

    @property
    def kept(self) -> list[Answered]:
        return [one for one in self.answers if one.cause is None]

    @property
    def cause(self) -> str | None:
        """Why nothing is kept of the sample: what most of its answers are rejected for. None: something is."""
        if self.bad is not None:
            return self.bad.cause
        causes = [one.cause for one in self.answers if one.cause is not None]
        return max(causes, key=causes.count) if len(causes) == len(self.answers) else None


class Row(NamedTuple):
    """The location of a sample."""

    source: int
    place: Place


@dataclass(frozen=True, eq=False)
class Asker:
    """What is asked, and how answers are examined. Pickles."""

    sources: tuple[Rows, ...]
    settings: Distill
    prompts: tuple[Prompt, ...]
    teacher: Asking
    seed: int

    def outcomes(self, rows: Sequence[Row]) -> list[Outcome]:
        """Ask for each sample, and examine the answers."""
        samples = [self._sample(row) for row in rows]
        forms = [self._forms(sample) for _, sample in samples]
        requests = [
            Request(form.messages, self._seed(row.source, id, prompt, n))
            for row, (id, _), of in zip(rows, samples, forms, strict=True)
            if not isinstance(of, BadSample)
            for prompt, form in zip(self.prompts, of, strict=True)
            for n in range(self.settings.n)
        ]
        said = iter(zip(requests, self.teacher.answers(requests), strict=True))
        return [self._outcome(id, sample, of, said) for (id, sample), of in zip(samples, forms, strict=True)]

    def _sample(self, row: Row) -> tuple[str, Sample | BadSample]:
        rows = self.sources[row.source]
        id = rows.id(row.place)
        try:
            return id, up_to_last_supervised(rows.read(row.place))
        except BadSample as bad:
            return id, bad

    def _forms(self, sample: Sample | BadSample) -> list[Asked] | BadSample:
        if isinstance(sample, BadSample):
            return sample
        try:
            return [asked(prompt, sample) for prompt in self.prompts]
        except BadSample as bad:
            return bad

    def _seed(self, source: int, id: str, prompt: Prompt, n: int) -> int:
        return seed_for(self.seed, f"distill {source} {id} {prompt.id}", n) & SEEDS

    def _outcome(self, id: str, sample: Sample | BadSample, forms: list[Asked] | BadSample, said: "zip[tuple[Request, Said]]") -> Outcome:
        if isinstance(forms, BadSample) or isinstance(sample, BadSample):
            return Outcome(id, None, forms if isinstance(forms, BadSample) else None, ())
        question, images = question_text(sample), len(sample.images)
        made: list[Answered] = []
        for prompt, form in zip(self.prompts, forms, strict=True):
            for n in range(self.settings.n):
                request, one = next(said)
                found = parsed(one, form.marker, form.rewrites_question)
                cause = flaw(one, found, self.settings.filters, question, form.instructions, images, form.rewrites_question)
                seed = request.seed if self.teacher.keeps_seeds else None
                made.append(Answered(prompt.id, n, seed, form.marker, one, found, cause))
        causes = verdicts([a.cause for a in made], [a.found for a in made], true_answer(sample), self.settings.accept, self.settings.keep)
        answers = tuple(Answered(**{**vars(a), "cause": cause}) for a, cause in zip(made, causes, strict=True))
        return Outcome(id, sample, None, answers)


def final_answer(outcome: Outcome, answer: Answered, settings: Distill) -> str:
    """The final answer that the student learns: the sample's own where it agrees with it, since evaluations compare with that form."""
    assert outcome.sample is not None and answer.found.answer is not None
    return true_answer(outcome.sample) if settings.accept.by == "truth" else answer.found.answer


def answer_text(rationale: str, answer: str, marker: str, thinks: bool) -> str:
    """What the student learns to write: the rationale between <think> and </think>, or, without them, before a line with the answer."""
    if thinks:
        return f"<think>\n{rationale}\n</think>\n\n{answer}"
    return f"{rationale}\n\n{marker} {answer}" if rationale else answer


def template_thinks(template: Template) -> bool:
    """Return whether a template trains on the reasoning of a conversation's last answer."""
    if "</think>" not in template.controls:
        return False
    messages = [Message("user", (Text("q"),)), Message("assistant", (Text(answer_text("reason", "answer", "", thinks=True)),))]
    segments = template.segments(messages)
    return any(isinstance(one, Control) and one.token == "</think>" and one.trained for one in segments) and any(
        isinstance(one, Content) and one.trained and "reason" in one.text for one in segments
    )
