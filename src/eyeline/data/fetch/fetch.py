"""A planned pack -> Batch: read, decode, assemble. Runs in this process or in workers, with the same result."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from eyeline.core.batch import IGNORE, Batch, Budget, Document, EncodedImage, Image, Likely, Sample, Span, Video
from eyeline.core.errors import BadSample, StorageFailed
from eyeline.core.image_rule import ImageRule
from eyeline.core.randomness import rng_for
from eyeline.core.recent import Recent
from eyeline.core.world import ALONE, World
from eyeline.data.containers.container import File, persistent
from eyeline.data.fetch.batches import batch_of
from eyeline.data.images.decode import Size
from eyeline.data.images.image_files import frames_of, in_memory, media_key
from eyeline.data.images.patches import Augment, Resized, Room, cut, grey_images, resize, with_augmentation
from eyeline.data.rejects import Reject
from eyeline.data.sources.sources import Place, Rows
from eyeline.data.text.documents import Tokenised, assemble, tokenise, until, with_likely
from eyeline.data.text.tokenizer import Encoder
from eyeline.data.workers import At, Phase, Workers, in_order

# resized images that a process remembers: those used last, of the ones that come again
KEPT_IMAGES, KEPT_IMAGE_BYTES = 1 << 16, 128 << 20
NEAR_BYTES = 64 << 10  # between two images in one file: up to this many unused bytes are read instead of a second request
TOKEN_BYTES = 64  # per token, in all index arrays of a batch together; about

T = TypeVar("T")


@dataclass(frozen=True)
class RowToRead:
    """One planned row."""

    source: int
    place: Place
    messages: int | None  # how many are kept of a long one; None: all
    tokens: int  # of its document
    patches: int
    tokenised: Tokenised | None  # ids that the index keeps; None: they are made again
    sizes: tuple[Size, ...]  # of its media, as the index found them
    verdict: BadSample | None = None  # it has killed a worker alone: nothing of it is touched


@dataclass(frozen=True)
class GroupToRead:
    """Rows that look at the same images."""

    address: tuple[int, ...]  # of its randomness
    rows: tuple[RowToRead, ...]
    media: tuple[EncodedImage | Video, ...] | None  # by location; None: a row has them
    again: bool  # whether other image groups look at them too


@dataclass(frozen=True)
class PackToRead:
    """A pack for a worker. Its parts are its rows."""

    groups: tuple[GroupToRead, ...]
    bytes: int  # about what the batch will have

    def only(self, part: int) -> Self:
        group, row = self._where()[part]
        return replace(self, groups=(replace(self.groups[group], rows=(self.groups[group].rows[row],)),))

    def without(self, part: int, bad: BadSample) -> Self:
        group, row = self._where()[part]
        rows = self.groups[group].rows
        changed = replace(self.groups[group], rows=(*rows[:row], replace(rows[row], verdict=bad), *rows[row + 1 :]))
        return replace(self, groups=(*self.groups[:group], changed, *self.groups[group + 1 :]))

    def _where(self) -> list[tuple[int, int]]:
        return [(v, r) for v, group in enumerate(self.groups) for r in range(len(group.rows))]


def _unwatched(part: int, phase: Phase) -> None:
    pass


def _patches(groups: Sequence[GroupToRead]) -> int:
    """The patches that were planned."""
    return sum(max(row.patches for row in group.rows) for group in groups)


class _Room:
    """Memory for the patches of a pack. Images are cut into it one after another, so a batch has them end to end where they are."""

    def __init__(self, rule: ImageRule | None, patches: int):
        self.left_PC = np.empty((patches, 3 * rule.frames * rule.patch**2) if rule else (0, 0), np.uint8)

    def __call__(self, patches: int) -> NDArray[np.uint8] | None:
        if patches > len(self.left_PC):
            return None
        taken_PC, self.left_PC = self.left_PC[:patches], self.left_PC[patches:]
        return taken_PC


class Lost(NamedTuple):
    """A planned row that turned out to be unusable."""

    reject: Reject
    epoch: int  # of its source, in which it was planned
    row: tuple[int, int, int]  # source, shard, number

    @property
    def plain(self) -> list[Any]:
        """The same as plain values, for other ranks."""
        reject = self.reject
        return [[reject.id, reject.file, reject.row, reject.field, reject.cause, reject.message], self.epoch, list(self.row)]

    @staticmethod
    def of(plain: list[Any]) -> "Lost":
        reject, epoch, (source, shard, number) = plain
        return Lost(Reject(*reject), epoch, (source, shard, number))


@dataclass(frozen=True)
class Fetched:
    batch: Batch
    lost: tuple[Lost, ...]  # rows whose images turned out to be unusable: they keep their place, without labels


@dataclass(frozen=True, eq=False)
class Fetch:
    """`fetch(job) -> Fetched`. A value that pickles; what it remembers changes how fast it is, never what it gives."""

    sources: tuple[Rows, ...]
    encoder: Encoder
    rule: ImageRule | None
    budget: Budget | None
    seed: int
    augment: Augment | None  # None: images as they are
    retries: int  # of reading an image from a store that fails
    likely: bool = False  # whether documents have the likeliest tokens of the teachers that wrote them
    _kept: Recent[str, Resized] = field(default_factory=Recent, repr=False)

    def job(self, groups: tuple[GroupToRead, ...], verdicts: Mapping[tuple[str, str], Reject]) -> PackToRead:
        """The pack as a job, without the samples that crash a worker."""
        if verdicts:
            groups = tuple(replace(group, rows=tuple(self._judged(row, verdicts) for row in group.rows)) for group in groups)
        numbers = 3 * self.rule.frames * self.rule.patch**2 if self.rule else 0
        tokens = self.budget.tokens if self.budget and groups else sum(row.tokens for group in groups for row in group.rows)
        return PackToRead(groups, tokens * TOKEN_BYTES + _patches(groups) * numbers)

    def _judged(self, row: RowToRead, verdicts: Mapping[tuple[str, str], Reject]) -> RowToRead:
        id = self.sources[row.source].id(row.place)
        if not any(id == known for _, known in verdicts):  # else lines would be counted for every row
            return row
        known = verdicts.get((self.sources[row.source].origin_of(row.place)[1], id))
        return row if known is None else replace(row, verdict=BadSample(known.cause, known.field, known.message))

    def __call__(self, job: PackToRead, at: At = _unwatched) -> Fetched:
        found: list[tuple[RowToRead, Tokenised | None, list[tuple[Image, ...] | BadSample]]] = []
        teachers: list[Likely | None] = []
        lost: list[Lost] = []
        room = _Room(self.rule, _patches(job.groups))
        if job.groups:  # rows are seldom read again; still a file that changes stops the run
            first = job.groups[0].rows[0]
            at(0, "reading")
            self.sources[first.source].file_of(first.place.shard).check()
        for group in job.groups:
            media: tuple[EncodedImage | Video, ...] | None = None
            decoded: dict[str, tuple[Image, ...] | BadSample] = {}
            for row in group.rows:
                part = len(found)
                if row.verdict is not None:
                    lost.append(self._lost(group, row, row.verdict))
                    found.append((row, None, []))
                    teachers.append(None)
                    continue
                at(part, "reading")
                if media is None and group.media:
                    media = self._together(group.media)
                known = row.tokenised
                teacher: Likely | None = None
                if self.likely or known is None or len(row.sizes) > len(media or ()):  # rows of a group show the same: one of them is read
                    sample = self._sample(row)
                    teacher = sample.messages[-1].likely if self.likely else None
                    media = max(media or (), sample.media, key=len)
                    at(part, "decoding")
                    known = known or tokenise(sample.messages, self.encoder, self.rule)
                media = media or ()
                shown = [self._images(item, group, decoded, room, partial(at, part)) for item in media[: len(known.slices)]]
                bad = next((images for images in shown if isinstance(images, BadSample)), None)
                if bad is not None:
                    at(part, "reading")  # lines are counted
                    lost.append(self._lost(group, row, bad))
                found.append((row, known, shown))
                teachers.append(teacher)
        # one after another, with nothing decoded between: the processor has what that takes at hand
        documents = [self._document(row, known, shown) for row, known, shown in found]
        documents = [d if t is None else with_likely(d, t) for d, t in zip(documents, teachers, strict=True)]
        at(-1, "idle")
        return Fetched(batch_of(documents, self.budget), tuple(lost))

    def _lost(self, group: GroupToRead, row: RowToRead, bad: BadSample) -> Lost:
        return Lost(self._reject(row, bad), group.address[0], (row.source, row.place.shard, row.place.number))

    def _reject(self, row: RowToRead, bad: BadSample) -> Reject:
        return self.sources[row.source].reject(row.place, bad)

    def _together(self, media: tuple[EncodedImage | Video, ...]) -> tuple[EncodedImage | Video, ...]:
        """The same media, with the bytes of those that are close to each other in one file, in one request."""
        wanted = [item for item in media if media_key(item) not in self._kept]
        spans = {image.source for item in wanted for image in frames_of(item) if isinstance(image.source, Span)}
        runs: list[list[Span]] = []
        for span in sorted(spans, key=lambda span: (str(span.path), span.start)):
            last = runs[-1][-1] if runs else None
            if last is None or last.path != span.path or not 0 <= span.start - last.start - last.length <= NEAR_BYTES:
                runs.append([])
            runs[-1].append(span)
        data: dict[Span, bytes] = {}
        for run in runs:
            start, end = run[0].start, run[-1].start + run[-1].length
            read = File(run[0].path, run[0].stamp, self.retries).read(start, end - start)
            data |= {span: read[span.start - start : span.start - start + span.length] for span in run}

        def with_bytes(image: EncodedImage) -> EncodedImage:
            source = image.source
            return replace(image, source=replace(source, data=data[source])) if isinstance(source, Span) and source in data else image

        return tuple(
            replace(item, frames=tuple(map(with_bytes, item.frames))) if isinstance(item, Video) else with_bytes(item) for item in media
        )

    def _sample(self, row: RowToRead) -> Sample:
        """The row, as much of it as is kept."""
        try:
            sample = self.sources[row.source].read(row.place)
        except BadSample as changed:
            raise self._change_error(row, str(changed)) from changed
        return sample if row.messages is None else until(sample, row.messages)

    def _document(self, row: RowToRead, known: Tokenised | None, shown: Sequence[tuple[Image, ...] | BadSample]) -> Document:
        """The document of a row, without labels where something of it cannot be shown. Nothing is known of what may not be touched."""
        id = self.sources[row.source].id(row.place)
        if known is None:
            return _blank(id, row.tokens)
        images = [grey_images(self._rule, row.sizes[n]) if isinstance(found, BadSample) else found for n, found in enumerate(shown)]
        document = assemble(id, known, images, self.encoder, self.rule)
        if len(document.tokens_T) != row.tokens:
            raise self._change_error(row, f"{len(document.tokens_T)} tokens where {row.tokens} were planned")
        bad = any(isinstance(found, BadSample) for found in shown)
        return replace(document, labels_T=np.full_like(document.labels_T, IGNORE)) if bad else document

    def _change_error(self, row: RowToRead, what: str) -> StorageFailed:
        _, file, number = self.sources[row.source].origin_of(row.place)
        return StorageFailed(
            f"{file} row {number}, or an image of it, has changed since it was indexed: {what}. Restore it; a plan must not change"
        )

    def _images(
        self,
        item: EncodedImage | Video,
        group: GroupToRead,
        decoded: dict[str, tuple[Image, ...] | BadSample],
        room: Room,
        phase: Callable[[Phase], None],
    ) -> tuple[Image, ...] | BadSample:
        """The images of a media item, decoded once for all rows of the image group."""
        key = media_key(item)
        if key not in decoded:
            try:
                decoded[key] = self._decoded_images(item, key, group, len(decoded), room, phase)
            except BadSample as bad:
                decoded[key] = bad
        return decoded[key]

    @property
    def _rule(self) -> ImageRule:
        assert self.rule is not None, "the plan rejects images for a model without a tower"
        return self.rule

    def _decoded_images(
        self, item: EncodedImage | Video, key: str, group: GroupToRead, number: int, room: Room, phase: Callable[[Phase], None]
    ) -> tuple[Image, ...]:
        whole = self._kept.get(key)
        if whole is None:
            phase("reading")
            encoded = persistent(partial(in_memory, item), self.retries)
            phase("decoding")
            try:
                whole = resize(encoded, self._rule)
            except MemoryError as error:
                raise BadSample("decoder_memory", "image", f"{item.name} needs more memory than a decoder may use") from error
            if group.again:
                self._kept.keep(key, whole, KEPT_IMAGES, whole.bytes, KEPT_IMAGE_BYTES)
        if self.augment is None or not self.augment.active:
            return cut(whole, self._rule, key, room)
        rng = partial(rng_for, self.seed, "augment", *group.address, number)
        return cut(with_augmentation(whole, self.augment, rng), self._rule, f"{key}@{'.'.join(map(str, group.address))}", room)


def _blank(id: str, tokens: int) -> Document:
    """A document that takes the place of a row that must not be decoded."""
    nothing = np.empty(0, np.int32)
    return Document(id, np.zeros(tokens, np.int32), np.full(tokens, IGNORE, np.int32), nothing, ())


def fetched_in_order(
    asked: Iterator[tuple[T, tuple[GroupToRead, ...]]],
    fetch: Fetch,
    workers: Workers,
    verdicts: Mapping[tuple[str, str], Reject],
    group: World = ALONE,
) -> Iterator[tuple[T, Fetched]]:
    """The result of each pack, in the order of the plan. With workers, some packs are prefetched.

    `verdicts` are samples that have killed a worker before, by file and id: they are not tried again. Of a `group` of ranks that share
    packs the first one fetches, and the others are sent what it has: so they have the same batch, and what it rejected.
    """
    if not group.first:
        for mark, _ in asked:
            sent = group.from_first(_nothing)
            assert sent is not None, "ranks that share packs plan alike"
            yield mark, sent
        group.from_first(_nothing)
        return
    jobs = ((mark, fetch.job(groups, verdicts)) for mark, groups in asked)
    fetched = in_order(jobs, fetch, workers) if workers.count else ((mark, fetch(job)) for mark, job in jobs)
    if group.size == 1:
        yield from fetched
    else:
        yield from _sent(fetched, group)


def _sent(fetched: Iterator[tuple[T, Fetched]], group: World) -> Iterator[tuple[T, Fetched]]:
    """The same, each sent to the other ranks of the group; an expected error ends them, too."""
    marks: list[T] = []

    def batch() -> Fetched | None:
        for mark, found in fetched:
            marks.append(mark)
            return found
        return None

    while (found := group.from_first(batch)) is not None:
        yield marks.pop(), found


def _nothing() -> Fetched | None:
    """What a rank that does not fetch has to send."""
