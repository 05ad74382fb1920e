"""A planned pack -> Batch: tokenise, decode, lay out. Runs in this process or in workers, with the same result."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from eyeline.core.batch import IGNORE, Batch, Budget, Document, Image, Picture, Sample, Video
from eyeline.core.errors import BadSample
from eyeline.core.facts import ImageRule
from eyeline.core.randomness import rng_for
from eyeline.data.batches import batch_of
from eyeline.data.documents import document_of
from eyeline.data.images import Augment, Resized, augmented, cut, grey, medium_key, resized, size_of
from eyeline.data.rejects import Reject
from eyeline.data.tokenizer import Encoder


@dataclass(frozen=True)
class Row:
    """One sample with what is needed to name it."""

    sample: Sample
    file: str
    row: int


@dataclass(frozen=True)
class Visit:
    epoch: int
    number: int
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Fetched:
    batch: Batch | None  # None for a pack of nothing
    rejects: tuple[Reject, ...]  # rows whose pictures turned out to be unusable: they keep their place, without labels


@dataclass(frozen=True, eq=False)
class Fetch:
    """`fetch(visits) -> Fetched`. A value that pickles; what it remembers changes how fast it is, never what it gives."""

    encoder: Encoder
    rule: ImageRule | None
    budget: Budget | None
    seed: int
    augment: Augment | None  # None: pictures as they are
    keep_pictures: bool  # remember resized pictures: for sets that fit into memory
    _kept: dict[str, Resized] = field(default_factory=dict, repr=False)

    def __call__(self, visits: Sequence[Visit]) -> Fetched:
        documents: list[Document] = []
        rejects: list[Reject] = []
        for visit in visits:
            prepared: dict[str, tuple[Image, ...] | BadSample] = {}
            for row in visit.rows:
                shown = [self._images(medium, visit, prepared) for medium in row.sample.media]
                bad = next((images for images in shown if isinstance(images, BadSample)), None)
                sound = [
                    self._stand_in(medium) if isinstance(images, BadSample) else images
                    for medium, images in zip(row.sample.media, shown, strict=True)
                ]
                document = document_of(row.sample, self.encoder, self.rule, sound)
                if bad is not None:
                    rejects.append(Reject.of(row.sample.id, row.file, row.row, bad))
                    document = replace(document, labels_T=np.full_like(document.labels_T, IGNORE))
                documents.append(document)
        return Fetched(batch_of(documents, self.budget) if documents else None, tuple(rejects))

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

    def _prepared(self, medium: Picture | Video, key: str, visit: Visit, number: int) -> tuple[Image, ...]:
        assert self.rule is not None, "the plan rejects pictures for a model without a tower"
        whole = self._kept.get(key)
        if whole is None:
            whole = resized(medium, self.rule)
            if self.keep_pictures:
                self._kept[key] = whole
        if self.augment is None or not self.augment.active:
            return cut(whole, self.rule, key)
        rng = partial(rng_for, self.seed, "augment", visit.epoch, visit.number, number)
        return cut(augmented(whole, self.augment, rng), self.rule, f"{key}@{visit.epoch}.{visit.number}")

    def _stand_in(self, medium: Picture | Video) -> tuple[Image, ...]:
        assert self.rule is not None
        try:
            size = size_of(medium, self.rule)
        except BadSample:  # its header was sound when it was planned: what stands in may be smaller than its place
            size = (1, 1) if isinstance(medium, Picture) else (len(medium.frames), 1, 1)
        return grey(self.rule, size)

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_kept": {}}
