"""Sample -> Document: one tokenisation, with the mask known from the segments."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from eyeline.core.batch import IGNORE, Document, Image, Ints, Message, Sample, Text
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


def _pieces(messages: Sequence[Message], encoder: Encoder, prompt: bool) -> list[tuple[list[int] | int, bool]]:
    """Runs of the document in order: (ids, trained), or (number of a picture, False).

    Text between two controls is encoded in one run, except that a run is broken where training begins or ends.
    """
    out: list[tuple[list[int] | int, bool]] = []
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
                out.append(([encoder.controls[segment.token]], segment.trained))
            case Media():
                out.append((segment.picture, False))
    if run:
        out.append((encoder.ids(run), trained))
    return out


@dataclass(frozen=True, eq=False)
class Rendered:
    """A conversation as ids, labels aligned, without its pixels. The arrays are shared: never change them."""

    tokens_T: Ints
    labels_T: Ints
    visual_M: Ints
    supervised: int


def rendered(messages: Sequence[Message], encoder: Encoder, visual: tuple[int, ...], prompt: bool) -> Rendered:
    """Render and tokenise; `visual` has the number of visual tokens of each picture, in order.

    Label t is the token at t+1 where that one is trained. Short conversations are remembered by the encoder: data sets repeat
    them, and everything is measured before it is fetched.
    """
    key = (prompt, visual, *((m.role, *(p.text if isinstance(p, Text) else None for p in m.parts)) for m in messages))
    known = encoder.remembered(key)
    if known is not None:
        return known
    tokens: list[int] = []
    trained_spans: list[tuple[int, int]] = []
    visual_spans: list[tuple[int, int]] = []
    for ids, trained in _pieces(messages, encoder, prompt):
        begin = len(tokens)
        if isinstance(ids, int):
            tokens += [encoder.image_token] * visual[ids]
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
    for array in (tokens_T, labels_T, visual_M):
        array.flags.writeable = False
    return encoder.remember(key, Rendered(tokens_T, labels_T, visual_M, int((labels_T != IGNORE).sum())), size=len(tokens))


def measure(sample: Sample, encoder: Encoder, rule: ImageRule | None) -> Measured:
    """Sizes of `document_of(sample)`, without any pixels. Raises the same BadSample for its text."""
    _answered(sample)
    pictures = len(sample.pictures)
    if pictures and rule is None:
        raise BadSample("picture_without_tower", "image", f"{sample.id} has a picture and this model has no vision tower")
    units = rule.units(1, 1) if rule else ()  # of every picture
    known = rendered(sample.messages, encoder, tuple(unit.tokens for unit in units) * pictures, False)
    patches = pictures * sum(unit.grid.patches for unit in units)
    return Measured(len(known.tokens_T), len(known.visual_M), known.supervised, patches)


def document_of(sample: Sample, encoder: Encoder, images: Sequence[Image]) -> Document:
    """Tokens and labels of a whole conversation; `images` are its pictures in order, prepared. BadSample without an answer."""
    _answered(sample)
    known = rendered(sample.messages, encoder, tuple(image.tokens for image in images), False)
    return Document(sample.id, known.tokens_T, known.labels_T, known.visual_M, tuple(images))


def prompt_of(sample: Sample | Sequence[Message], encoder: Encoder, images: Sequence[Image]) -> Document:
    """A conversation up to the point where the last answer begins, for generation; nothing is labelled.

    A last assistant message is left out, if there is one. `images` are the pictures in order, prepared.
    """
    messages = sample.messages if isinstance(sample, Sample) else tuple(sample)
    if messages and messages[-1].role == "assistant":
        messages = messages[:-1]
    known = rendered(messages, encoder, tuple(image.tokens for image in images), True)
    return Document(sample.id if isinstance(sample, Sample) else "prompt", known.tokens_T, known.labels_T, known.visual_M, tuple(images))


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
    whole = measure(sample, encoder, rule)

    def fits(size: Measured) -> bool:
        return size.tokens <= tokens and size.patches <= patches

    if fits(whole):
        return sample, whole
    ends = [n + 1 for n, m in enumerate(sample.messages) if m.role == "assistant"]
    first = _until(sample, ends[0]) if policy == "shrink" and len(ends) > 1 else sample
    size = measure(first, encoder, rule)
    if not fits(size):
        what = f"{size.tokens} tokens (of at most {tokens}) and {size.patches} patches (of at most {patches})"
        raise BadSample("too_long", "messages", f"{'it' if first is sample else 'its first exchange'} needs {what}")
    # the most exchanges that fit lie in [few, many): halved, since a conversation may have thousands and each look reads it all
    few, many = 1, len(ends)
    while many - few > 1:
        middle = (few + many) // 2
        if fits(measure(_until(sample, ends[middle - 1]), encoder, rule)):
            few = middle
        else:
            many = middle
    kept = _until(sample, ends[few - 1])
    return kept, measure(kept, encoder, rule)


def _until(sample: Sample, messages: int) -> Sample:
    return Sample(sample.id, sample.messages[:messages], sample.kind)
