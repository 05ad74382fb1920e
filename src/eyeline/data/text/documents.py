"""Sample -> Document: one tokenisation, with the mask known from the segments.

    tokenised    messages -> ids; knows no image's size, so that an index can keep it
    measured     with the sizes of the media: how large the document will be
    assemble     with the media themselves: the document

Dims: U ids with a placeholder for each still and slice of a video  W placeholders  T tokens  M visual tokens
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from eyeline.core.batch import IGNORE, Document, EncodedImage, Image, Ints, Likely, LikelyRows, Message, Sample, Text, Video
from eyeline.core.errors import BadSample
from eyeline.core.image_rule import ImageRule
from eyeline.data.images.decode import Size
from eyeline.data.images.patches import units_of
from eyeline.data.text.templates import Content, Control, Media
from eyeline.data.text.tokenizer import Encoder

Overlong = Literal["reject", "drop_turns"]


@dataclass(frozen=True, eq=False)
class Tokenised:
    """A conversation as ids, as far as its text says: nothing here depends on the size of an image.

    Each still, and each slice of a video, is one placeholder. The arrays are shared: never change them.
    """

    ids_U: Ints
    trained_U: NDArray[np.bool_]  # whether each is supervised
    places_W: Ints  # where in U the placeholders are, media in order
    slices: tuple[int, ...]  # how many of them each media item has: 1 for a still


@dataclass(frozen=True)
class Measured:
    """Sizes of a document that is not made yet."""

    tokens: int
    visual: int  # of the tokens, those of images
    supervised: int
    patches: int  # of all its images


def tokenise(messages: Sequence[Message], encoder: Encoder, rule: ImageRule | None, prompt: bool = False) -> Tokenised:
    """Render and tokenise, once. `prompt` opens an answer at the end. BadSample for what the template or the model does not take.

    Text between two controls is encoded in one run, except that a run is broken where an answer starts or ends, whether it is in the
    loss or not: a conversation has the same ids whatever is supervised. Short conversations are remembered by the encoder: data sets
    repeat them.
    """
    media = [part for message in messages for part in message.parts if not isinstance(part, Text)]
    if media and rule is None:
        raise BadSample("image_without_tower", "image", f"{media[0].name} is an image or a video, and this model reads text only")
    frames = rule.frames if rule else 1
    key = (prompt, frames, *((m.role, m.supervised, *map(_text_key, m.parts)) for m in messages))
    known = encoder.recall(key)
    if known is not None:
        return known
    ids: list[int] = []
    trained: list[bool] = []
    places: list[int] = []
    for run, supervised, placeholder in _runs(messages, encoder, prompt, frames):
        if placeholder:
            places.append(len(ids))
        ids += run
        trained += [supervised] * len(run)
    slices = tuple(-(-len(item.frames) // frames) if isinstance(item, Video) else 1 for item in media)
    made = Tokenised(np.array(ids, np.int32), np.array(trained, np.bool_), np.array(places, np.int32), slices)
    for array in (made.ids_U, made.trained_U, made.places_W):
        array.flags.writeable = False
    return encoder.remember(key, made, size=len(ids))


def _text_key(part: Text | EncodedImage | Video) -> Hashable:
    """A key of the effect that a part has on the text around it."""
    match part:
        case Text():
            return part.text
        case EncodedImage():
            return None
        case Video():
            return part.seconds


def _runs(messages: Sequence[Message], encoder: Encoder, prompt: bool, frames: int) -> Iterator[tuple[list[int], bool, bool]]:
    """Runs of the document in order: (ids, trained, whether it is the placeholder of a media item). Spaces next to a control token are
    dropped where the tokenizer says so of that token (`lstrip`, `rstrip`)."""
    run, trained, masked, strip = "", False, False, False  # strip: the control token before takes the spaces after it
    for segment in encoder.template.segments(messages, prompt, frames):
        if isinstance(segment, Content) and (segment.trained == trained or not run):
            run += segment.text.lstrip() if strip and not run else segment.text
            trained, masked = segment.trained, segment.masked
            continue
        before, after = (False, False) if isinstance(segment, Content) else encoder.strips.get(segment.token, (False, False))
        run = run.rstrip() if before else run
        if run:
            yield encoder.ids(run), trained and not masked, False
        run, strip = "", after
        match segment:
            case Content():
                run, trained, masked = segment.text, segment.trained, segment.masked
            case Control():
                yield [encoder.controls[segment.token]], segment.trained and not segment.masked, False
            case Media():
                yield [encoder.controls[segment.token]], False, True
    if run:
        yield encoder.ids(run), trained and not masked, False


def measure_document(known: Tokenised, sizes: Sequence[Size], rule: ImageRule | None) -> Measured:
    """Sizes of `assemble(known, ...)` from those of its media, without any pixels. BadSample for a size that the rule does not take."""
    units = [unit for size in sizes for unit in units_of(size, rule)] if rule else []
    visual = sum(unit.tokens for unit in units)
    marks = sum(unit.mark is not None for unit in units)
    tokens = len(known.ids_U) - len(known.places_W) + visual + marks
    return Measured(tokens, visual, int(known.trained_U.sum()), sum(unit.grid.patches for unit in units))


def assemble(id: str, known: Tokenised, media: Sequence[Sequence[Image]], encoder: Encoder, rule: ImageRule | None) -> Document:
    """Ids, aligned labels and positions of a conversation whose media are decoded: `media` has the images of each, in order.

    Label t is the token at t+1 where that one is trained. A still has all its images (tiles) in one place, a video one in each.
    The arrays of short ones are remembered by the encoder, and shared: never change them.
    """
    shown = tuple(image for images in media for image in images)
    forms = tuple((image.grid, image.merge, image.mark) for image in shown)
    grids = rule is not None and rule.positions == "grid"
    key = (known.ids_U.tobytes(), known.trained_U.tobytes(), known.places_W.tobytes(), known.slices, forms, grids)
    arrays = encoder.recall(key)
    if arrays is None:
        arrays = _arrays(known, media, encoder, grids)
        arrays = encoder.remember(key, arrays, size=len(arrays[0]))
    tokens_T, labels_T, visual_M, positions_T3 = arrays
    return Document(id, tokens_T, labels_T, visual_M, shown, positions_T3)


def _arrays(known: Tokenised, media: Sequence[Sequence[Image]], encoder: Encoder, grids: bool) -> tuple[Ints, Ints, Ints, Ints | None]:
    """Tokens, labels, places of visual tokens, and positions where rows and columns are some."""
    spans: list[Sequence[Image]] = []  # the images at each place
    for images, slices in zip(media, known.slices, strict=True):
        spans += [images] if slices == 1 else [(image,) for image in images]
    shown = [image for images in spans for image in images]
    length = len(known.ids_U) - len(spans) + sum(image.tokens + (image.mark is not None) for image in shown)
    learned_U = np.where(known.trained_U, known.ids_U, np.int32(IGNORE))
    tokens_T, learned_T = np.empty(length, np.int32), np.full(length, IGNORE, np.int32)
    starts: list[int] = []  # where the visual tokens of each image begin
    read = made = 0  # how far in U and in T
    for place, images in zip(known.places_W.tolist(), spans, strict=True):
        text_U, text_T = slice(read, place), slice(made, made + place - read)
        tokens_T[text_T], learned_T[text_T] = known.ids_U[text_U], learned_U[text_U]
        read, made = place + 1, text_T.stop
        for image in images:
            if image.mark is not None:
                tokens_T[made] = encoder.controls[image.mark]
                made += 1
            starts.append(made)
            tokens_T[made : made + image.tokens] = known.ids_U[place]
            made += image.tokens
    tokens_T[made:], learned_T[made:] = known.ids_U[read:], learned_U[read:]
    labels_T = np.full(length, IGNORE, np.int32)
    labels_T[:-1] = learned_T[1:]  # the first token is never trained: a question comes first
    visual_M = np.concatenate([np.arange(s, s + i.tokens, dtype=np.int32) for s, i in zip(starts, shown, strict=True)] or [EMPTY])
    positions_T3 = _positions(length, starts, shown) if grids else None
    for array in (tokens_T, labels_T, visual_M, *(() if positions_T3 is None else (positions_T3,))):
        array.flags.writeable = False
    return tokens_T, labels_T, visual_M, positions_T3


EMPTY = np.empty(0, np.int32)


def _positions(length: int, starts: Sequence[int], images: Sequence[Image]) -> Ints:
    """M-RoPE: (time, row, column). Text counts in all three. The tokens of an image share a time, rows and columns count from it,
    and what follows continues after the longer side (transformers' models/qwen3_vl/modeling_qwen3_vl.py: get_rope_index)."""
    steps_T = np.ones(length + 1, np.int32)
    for start, image in zip(starts, images, strict=True):
        end = start + image.tokens
        steps_T[start + 1 : end], steps_T[end] = 0, max(image.grid) // image.merge
    positions_T3 = np.repeat((np.cumsum(steps_T[:length], dtype=np.int32) - 1)[:, None], 3, 1)
    for start, image in zip(starts, images, strict=True):
        rows, columns = image.grid.rows // image.merge, image.grid.columns // image.merge
        positions_T3[start : start + image.tokens, 1] += np.repeat(np.arange(rows, dtype=np.int32), columns)
        positions_T3[start : start + image.tokens, 2] += np.tile(np.arange(columns, dtype=np.int32), rows)
    return positions_T3


def measure(sample: Sample, sizes: Sequence[Size], encoder: Encoder, rule: ImageRule | None) -> Measured:
    """Sizes of `document_of(sample)` from those of its media. Raises the same BadSample for its text."""
    require_answer(sample)
    return measure_document(require_targets(tokenise(sample.messages, encoder, rule)), sizes, rule)


def document_of(sample: Sample, encoder: Encoder, rule: ImageRule | None, media: Sequence[Sequence[Image]]) -> Document:
    """A whole conversation; `media` has the images of each of its images and videos in order. BadSample without an answer."""
    require_answer(sample)
    return assemble(sample.id, require_targets(tokenise(sample.messages, encoder, rule)), media, encoder, rule)


def with_likely(document: Document, likely: Likely) -> Document:
    """The document with its teacher's likeliest tokens at the labels of its last answer, as far as that has the teacher's own tokens: what
    the teacher found likely holds for what it had written before."""
    labelled = np.flatnonzero(document.labels_T != IGNORE)
    if not len(labelled):
        return document
    gaps = np.flatnonzero(np.diff(labelled) > 1)
    last = labelled[gaps[-1] + 1 :] if len(gaps) else labelled
    both = min(len(last), len(likely.ids))
    same = document.labels_T[last[:both]] == np.array(likely.ids[:both], np.int32)
    count = both if same.all() else int(same.argmin()) + 1
    top_RK = np.frombuffer(likely.top, np.int32).reshape(-1, likely.k)[:count]
    logp_RK = np.frombuffer(likely.logp, np.float16).reshape(-1, likely.k)[:count].astype(np.float32)
    return replace(document, likely=LikelyRows(last[:count].astype(np.int32), top_RK, logp_RK))


def prompt_of(sample: Sample | Sequence[Message], encoder: Encoder, rule: ImageRule | None, media: Sequence[Sequence[Image]]) -> Document:
    """A conversation up to the point where the last answer begins, for generation; nothing is labelled.

    A last assistant message is left out, if there is one. `media` has the images of each image and video in order.
    """
    messages = sample.messages if isinstance(sample, Sample) else tuple(sample)
    if messages and messages[-1].role == "assistant":
        messages = messages[:-1]
    known = tokenise(messages, encoder, rule, prompt=True)
    document = assemble(sample.id if isinstance(sample, Sample) else "prompt", known, media, encoder, rule)
    return replace(document, labels_T=np.full_like(document.labels_T, IGNORE))


def require_answer(sample: Sample) -> None:
    """BadSample when there is nothing to learn."""
    answers = [m for m in sample.messages if m.role == "assistant"]
    if not answers:
        raise BadSample("no_target", "messages", "no assistant message, so there is nothing to train on")
    if not any(message.supervised for message in answers):
        raise BadSample("no_target", "messages", "every answer is excluded from the loss, so nothing would be trained")
    for number, message in enumerate(sample.messages):
        if message.role == "assistant" and message.supervised and not any(isinstance(p, Text) and p.text.strip() for p in message.parts):
            raise BadSample("no_target", f"messages[{number}]", "the assistant's message is empty")


def require_targets(known: Tokenised) -> Tokenised:
    """Return `known` if any of its tokens is in the loss. BadSample where the template trains on the last answer alone, which is marked."""
    if not known.trained_U.any():
        why = "the template trains on the last answer alone, and that one is excluded from the loss"
        raise BadSample("no_target", "messages", why)
    return known


def fit_to_limits(
    sample: Sample, sizes: Sequence[Size], tokens: int, patches: int, policy: Overlong, encoder: Encoder, rule: ImageRule | None
) -> tuple[Sample, Measured]:
    """The sample, or as many of its first exchanges as fit into `tokens` and `patches`, and its sizes.

    An exchange is what leads to one answer, and that answer. Nothing is ever cut inside one, so an image never loses its
    tokens. `sizes` are those of the sample's media. BadSample `too_long` when the policy is `reject`, or when the first
    exchange alone does not fit. The last answer that is kept is in the loss, whatever others are marked as.
    """

    def measure_until(messages: int) -> Measured:
        part = until(sample, messages)
        return measure_document(tokenise(part.messages, encoder, rule), sizes[: len(part.media)], rule)

    def fits(size: Measured) -> bool:
        return size.tokens <= tokens and size.patches <= patches

    whole = measure(sample, sizes, encoder, rule)
    if fits(whole):
        return sample, whole
    ends = [n + 1 for n, m in enumerate(sample.messages) if m.role == "assistant"]
    alone = ends[0] if policy == "drop_turns" and len(ends) > 1 else len(sample.messages)
    size = measure_until(alone)
    if not fits(size):
        raise too_long(size.tokens, tokens, size.patches, patches, "it" if alone == len(sample.messages) else "its first exchange")
    # binary search for the most exchanges that fit, in [few, many): a conversation may have thousands, and each measurement reads all of it
    few, many = 1, len(ends)
    while many - few > 1:
        middle = (few + many) // 2
        if fits(measure_until(ends[middle - 1])):
            few = middle
        else:
            many = middle
    while few and not sample.messages[ends[few - 1] - 1].supervised:
        few -= 1
    if not few:
        raise BadSample("no_target", "messages", "every answer of the exchanges that fit is excluded from the loss")
    return until(sample, ends[few - 1]), measure_until(ends[few - 1])


def too_long(tokens: int, most_tokens: int, patches: int, most_patches: int, what: str = "it") -> BadSample:
    needs = f"{tokens} tokens (of at most {most_tokens}) and {patches} patches (of at most {most_patches})"
    return BadSample("too_long", "messages", f"{what} needs {needs}")


def until(sample: Sample, messages: int) -> Sample:
    """The first messages of the sample."""
    return Sample(sample.id, sample.messages[:messages], sample.kind)


def up_to_last_supervised(sample: Sample) -> Sample:
    """The sample up to its last answer that is in the loss: what an evaluation asks."""
    last = max((n for n, m in enumerate(sample.messages) if m.role == "assistant" and m.supervised), default=-1)
    return sample if last < 0 else until(sample, last + 1)
