"""A planned pack -> Batch: read, decode, lay out. Runs in this process or in workers, with the same result."""

import os
import signal
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import resource_tracker
from typing import TypeVar

import numpy as np
from torch.utils.data import DataLoader, Dataset

from eyeline.core.batch import IGNORE, Batch, Budget, Document, Image, Picture, Sample, Video
from eyeline.core.errors import BadSample, StorageFailed
from eyeline.core.facts import ImageRule
from eyeline.core.randomness import rng_for
from eyeline.data.batches import batch_of
from eyeline.data.documents import Tokenised, laid_out, tokenised
from eyeline.data.images import Augment, Resized, Size, augmented, cut, grey, medium_key, resized
from eyeline.data.rejects import Reject
from eyeline.data.sources import Place, Rows
from eyeline.data.tokenizer import Encoder

KEPT_PICTURE_BYTES = 256 << 20  # resized pictures that a process remembers
PREFETCHED = 2  # packs ahead for each worker

T = TypeVar("T")


@dataclass(frozen=True)
class Row:
    """One planned row."""

    source: int
    place: Place
    messages: int | None  # how many are kept of a long one; None: all
    tokens: int  # of its document
    patches: int
    tokenised: Tokenised | None  # ids that the index keeps; None: they are made again
    sizes: tuple[Size, ...]  # of its media, as the index found them


@dataclass(frozen=True)
class Visit:
    """Rows that look at the same pictures."""

    address: tuple[int, ...]  # of its randomness
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Fetched:
    batch: Batch
    rejects: tuple[Reject, ...]  # rows whose pictures turned out to be unusable: they keep their place, without labels


@dataclass(frozen=True, eq=False)
class Fetch:
    """`fetch(visits) -> Fetched`. A value that pickles; what it remembers changes how fast it is, never what it gives."""

    sources: tuple[Rows, ...]
    encoder: Encoder
    rule: ImageRule | None
    budget: Budget | None
    seed: int
    augment: Augment | None  # None: pictures as they are
    _kept: dict[str, Resized] = field(default_factory=dict, repr=False)
    _bytes: list[int] = field(default_factory=lambda: [0], repr=False)

    def __call__(self, visits: Sequence[Visit]) -> Fetched:
        documents: list[Document] = []
        rejects: list[Reject] = []
        for visit in visits:
            media: tuple[Picture | Video, ...] = ()
            prepared: dict[str, tuple[Image, ...] | BadSample] = {}
            for row in visit.rows:
                known = row.tokenised
                if known is None or len(row.sizes) > len(media):  # rows of a visit show the same: one of them is read
                    sample = self._sample(row)
                    media = max(media, sample.media, key=len)
                    known = known or tokenised(sample.messages, self.encoder, self.rule)
                shown = [self._images(medium, visit, prepared) for medium in media[: len(known.slices)]]
                bad = next((images for images in shown if isinstance(images, BadSample)), None)
                document = self._document(row, known, shown)
                if bad is not None:
                    rejects.append(Reject.of(*self.sources[row.source].named(row.place), bad))
                    document = replace(document, labels_T=np.full_like(document.labels_T, IGNORE))
                documents.append(document)
        return Fetched(batch_of(documents, self.budget), tuple(rejects))

    def _sample(self, row: Row) -> Sample:
        """The row, as much of it as is kept."""
        try:
            sample = self.sources[row.source].read(row.place)
        except BadSample as changed:
            raise self._changed(row, str(changed)) from changed
        return sample if row.messages is None else Sample(sample.id, sample.messages[: row.messages], sample.kind)

    def _document(self, row: Row, known: Tokenised, shown: Sequence[tuple[Image, ...] | BadSample]) -> Document:
        images = [grey(self._rule, row.sizes[n]) if isinstance(found, BadSample) else found for n, found in enumerate(shown)]
        document = laid_out(self.sources[row.source].named(row.place)[0], known, images, self.encoder, self.rule)
        if len(document.tokens_T) != row.tokens:
            raise self._changed(row, f"{len(document.tokens_T)} tokens where {row.tokens} were planned")
        return document

    def _changed(self, row: Row, what: str) -> StorageFailed:
        _, file, number = self.sources[row.source].named(row.place)
        return StorageFailed(
            f"{file} row {number}, or a picture of it, has changed since it was indexed: {what}. Restore it; a plan must not change"
        )

    def _images(
        self, medium: Picture | Video, visit: Visit, prepared: dict[str, tuple[Image, ...] | BadSample]
    ) -> tuple[Image, ...] | BadSample:
        """The medium prepared once for all rows of the visit."""
        key = medium_key(medium)
        if key not in prepared:
            try:
                prepared[key] = self._prepared(medium, key, visit, len(prepared))
            except BadSample as bad:
                prepared[key] = bad
        return prepared[key]

    @property
    def _rule(self) -> ImageRule:
        assert self.rule is not None, "the plan rejects pictures for a model without a tower"
        return self.rule

    def _prepared(self, medium: Picture | Video, key: str, visit: Visit, number: int) -> tuple[Image, ...]:
        whole = self._kept.get(key)
        if whole is None:
            whole = resized(medium, self._rule)
            size = sum(canvas.nbytes for canvases in whole.canvases for canvas in canvases)
            if self._bytes[0] + size <= KEPT_PICTURE_BYTES:
                self._kept[key] = whole
                self._bytes[0] += size
        if self.augment is None or not self.augment.active:
            return cut(whole, self._rule, key)
        rng = partial(rng_for, self.seed, "augment", *visit.address, number)
        return cut(augmented(whole, self.augment, rng), self._rule, f"{key}@{'.'.join(map(str, visit.address))}")

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_kept": {}, "_bytes": [0]}


def fetched_in_order(asked: Iterator[tuple[T, tuple[Visit, ...]]], fetch: Fetch, workers: int) -> Iterator[tuple[T, Fetched]]:
    """What came of each pack, in the plan's order. With workers, some packs are fetched ahead of their turn."""
    if workers == 0:
        for mark, visits in asked:
            yield mark, fetch(visits)
        return
    waiting: deque[T] = deque()

    def ahead() -> Iterator[tuple[Visit, ...]]:
        for mark, visits in asked:
            waiting.append(mark)
            yield visits

    loader = DataLoader(
        _Asked(fetch),
        batch_size=None,
        sampler=_Once(ahead()),
        num_workers=workers,
        prefetch_factor=PREFETCHED,
        multiprocessing_context="spawn",  # a fork would copy threads of torch and tokenizers in mid-flight
        worker_init_fn=partial(_end_without, os.getpid()),
    )
    for fetched in _started(loader):
        if isinstance(fetched, StorageFailed):
            raise fetched
        yield waiting.popleft(), fetched


class _Asked(Dataset[Fetched | StorageFailed]):
    """A map-style data set for torch's DataLoader whose index is the pack itself."""

    def __init__(self, fetch: Fetch):
        self.fetch = fetch

    def __getitem__(self, visits: tuple[Visit, ...]) -> Fetched | StorageFailed:
        try:
            return self.fetch(visits)
        except StorageFailed as error:  # raised by a worker, it would arrive as a traceback in a string
            return error


@dataclass(frozen=True)
class _Once:
    """A sampler for torch's DataLoader."""

    indices: Iterator[tuple[Visit, ...]]

    def __iter__(self) -> Iterator[tuple[Visit, ...]]:
        return self.indices


def _end_without(parent: int, _: int) -> None:
    """End this worker if the process that started it was killed meanwhile: torch takes whoever is the parent now for the main one."""
    if os.getppid() != parent:
        os._exit(0)


def _started(loader: DataLoader) -> Iterator[Fetched | StorageFailed]:
    """The loader's items. Its workers are deaf to SIGINT and SIGTERM from their first moment.

    Ctrl-C reaches every process of a terminal, and schedulers send SIGTERM to every process of a job; the main one ends the run
    in order, and its workers with it. They inherit what is blocked here; the main one has what came meanwhile right after.
    """
    resource_tracker.ensure_running()  # it unblocks both signals when it starts, which would be after the first worker's semaphores
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        return iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
