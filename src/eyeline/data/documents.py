"""Sample -> Document: one tokenisation, with the mask known from the segments."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from eyeline.core.batch import IGNORE, Document, Image, Message, Picture, Sample, Text
from eyeline.core.errors import BadSample
from eyeline.core.facts import ImageRule
from eyeline.data.templates import Content, Control, Media
from eyeline.data.tokenizer import Encoder

TooLong = Literal["reject", "shrink"]


@dataclass(frozen=True)
class Measured:
    """Sizes of a document that is not made yet."""

    tokens: int
    visual: int  # of the tokens, those of pictures
    supervised: int
    patches: int  # of all its pictures


def _pieces(messages: Sequence[Message], encoder: Encoder, prompt: bool) -> list[tuple[tuple[int, ...] | int, bool]]:
    """Runs of the document in order: (ids, trained), or (number of a picture, False).

    Text between two controls is encoded in one run, except that a run is broken where training begins or ends.
    """
    out: list[tuple[tuple[int, ...] | int, bool]] = []
    run, trained = "", False
    for segment in encoder.template.segments(messages, prompt):
        if isinstance(segment, Content):
            if segment.trained != trained and run:
                out.append((encoder.ids(run), trained))
                run = ""
            run, trained = run + segment.text, segment.trained
            continue
        if run:
            out.append((encoder.ids(run), trained))
            run = ""
        match segment:
            case Control():
                out.append(((encoder.controls[segment.token],), segment.trained))
            case Media():
                out.append((segment.picture, False))
    if run:
        out.append((encoder.ids(run), trained))
    return out


def measure(sample: Sample, encoder: Encoder, rule: ImageRule | None) -> Measured:
    """Sizes of `document_of(sample)`, without any pixels. Raises the same BadSample for its text."""
    _answered(sample)
    tokens = supervised = visual = pictures = 0
    for ids, trained in _pieces(sample.messages, encoder, prompt=False):
        if isinstance(ids, int):
            visual += _rule(rule, sample.id).tokens
            pictures += 1
        else:
            tokens += len(ids)
            supervised += len(ids) if trained else 0
    return Measured(tokens + visual, visual, supervised, pictures * rule.grid.patches if rule else 0)


def document_of(sample: Sample, encoder: Encoder, rule: ImageRule | None, images: Sequence[Image]) -> Document:
    """Tokens and labels of a whole conversation; `images` are its pictures in order, prepared.

    Label t is the token at t+1 where that one is trained. BadSample when the sample has pictures and the model none.
    """
    _answered(sample)
    return _document(sample.id, sample.messages, encoder, rule, images, prompt=False)


def prompt_of(sample: Sample | Sequence[Message], encoder: Encoder, rule: ImageRule | None, images: Sequence[Image]) -> Document:
    """A conversation up to the point where the last answer begins, for generation; nothing is labelled.

    A last assistant message is left out, and of `images` those that it would have shown.
    """
    messages = sample.messages if isinstance(sample, Sample) else tuple(sample)
    if messages and messages[-1].role == "assistant":
        messages = messages[:-1]
    shown = sum(isinstance(p, Picture) for m in messages for p in m.parts)
    return _document(sample.id if isinstance(sample, Sample) else "prompt", messages, encoder, rule, images[:shown], prompt=True)


def _document(
    id: str, messages: Sequence[Message], encoder: Encoder, rule: ImageRule | None, images: Sequence[Image], prompt: bool
) -> Document:
    tokens: list[int] = []
    trained_spans: list[tuple[int, int]] = []
    visual_spans: list[tuple[int, int]] = []
    for ids, trained in _pieces(messages, encoder, prompt):
        begin = len(tokens)
        if isinstance(ids, int):
            _rule(rule, id)
            tokens += [encoder.image_token] * images[ids].tokens
            visual_spans.append((begin, len(tokens)))
        else:
            tokens += ids
            if trained:
                trained_spans.append((begin, len(tokens)))
    tokens_T = np.array(tokens, dtype=np.int32)
    labels_T = np.full(len(tokens), IGNORE, dtype=np.int32)
    if not prompt:
        for begin, end in trained_spans:  # begin is never 0: a question comes first
            labels_T[begin - 1 : end - 1] = tokens_T[begin:end]
    visual_M = np.concatenate([np.arange(*span, dtype=np.int32) for span in visual_spans] or [np.empty(0, np.int32)])
    return Document(id, tokens_T, labels_T, visual_M, tuple(images))


def _rule(rule: ImageRule | None, id: str) -> ImageRule:
    if rule is None:
        raise BadSample("picture_without_tower", "image", f"{id} has a picture and this model has no vision tower")
    return rule


def _answered(sample: Sample) -> None:
    """BadSample when there is nothing to learn."""
    answers = [m for m in sample.messages if m.role == "assistant"]
    if not answers:
        raise BadSample("no_target", "messages", "no assistant message, so there is nothing to learn")
    for number, message in enumerate(sample.messages):
        if message.role == "assistant" and not any(isinstance(p, Text) and p.text.strip() for p in message.parts):
            raise BadSample("no_target", f"messages[{number}]", "the assistant's message is empty")


def fitted(sample: Sample, tokens: int, patches: int, policy: TooLong, encoder: Encoder, rule: ImageRule | None) -> tuple[Sample, Measured]:
    """The sample, or as many of its first exchanges as fit into `tokens` and `patches`, and its sizes.

    An exchange is what leads to one answer, and that answer. Nothing is ever cut inside one, so a picture never loses its
    tokens. BadSample `too_long` when the policy is `reject`, or when the first exchange alone does not fit.
    """
    size = measure(sample, encoder, rule)
    kept = sample
    while size.tokens > tokens or size.patches > patches:
        shorter = _without_last_exchange(kept) if policy == "shrink" else None
        if shorter is None:
            what = f"{size.tokens} tokens (of at most {tokens}) and {size.patches} patches (of at most {patches})"
            raise BadSample("too_long", "messages", f"{'its first exchange' if kept is not sample else 'it'} needs {what}")
        kept, size = shorter, measure(shorter, encoder, rule)
    return kept, size


def _without_last_exchange(sample: Sample) -> Sample | None:
    ends = [n + 1 for n, m in enumerate(sample.messages) if m.role == "assistant"]
    return Sample(sample.id, sample.messages[: ends[-2]], sample.kind) if len(ends) > 1 else None
