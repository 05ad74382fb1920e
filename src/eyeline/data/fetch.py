"""A planned pack -> Batch: tokenise, decode, lay out. Runs in this process or in workers, with the same result."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from eyeline.core.batch import IGNORE, Batch, Budget, Document, Image, Picture, Sample
from eyeline.core.errors import BadSample
from eyeline.core.facts import ImageRule
from eyeline.core.randomness import rng_for
from eyeline.data.batches import batch_of
from eyeline.data.documents import document_of
from eyeline.data.images import Augment, Pixels, augmented, cut, decode, grey, picture_key, resized
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
    _kept: dict[str, Pixels] = field(default_factory=dict, repr=False)

    def __call__(self, visits: Sequence[Visit]) -> Fetched:
        documents: list[Document] = []
        rejects: list[Reject] = []
        for visit in visits:
            images: dict[str, Image | BadSample] = {}
            for row in visit.rows:
                shown = [self._image(picture, visit, images) for picture in row.sample.pictures]
                bad = next((image for image in shown if isinstance(image, BadSample)), None)
                sound = [self._stand_in() if isinstance(image, BadSample) else image for image in shown]
                document = document_of(row.sample, self.encoder, sound)
                if bad is not None:
                    rejects.append(Reject.of(row.sample.id, row.file, row.row, bad))
                    document = replace(document, labels_T=np.full_like(document.labels_T, IGNORE))
                documents.append(document)
        return Fetched(batch_of(documents, self.budget) if documents else None, tuple(rejects))

    def _image(self, picture: Picture, visit: Visit, images: dict[str, Image | BadSample]) -> Image | BadSample:
        """The picture prepared once for all rows of the visit."""
        key = picture_key(picture)
        if key not in images:
            try:
                images[key] = self._prepared(picture, key, visit, len(images))
            except BadSample as bad:
                images[key] = bad
        return images[key]

    def _prepared(self, picture: Picture, key: str, visit: Visit, number: int) -> Image:
        assert self.rule is not None, "the plan rejects pictures for a model without a tower"
        square = self._kept.get(key)
        if square is None:
            square = resized(decode(picture), self.rule)
            if self.keep_pictures:
                self._kept[key] = square
        if self.augment is None or not self.augment.active:
            return cut(square, self.rule, key)
        rng = rng_for(self.seed, "augment", visit.epoch, visit.number, number)
        return cut(augmented(square, self.augment, rng), self.rule, f"{key}@{visit.epoch}.{visit.number}")

    def _stand_in(self) -> Image:
        assert self.rule is not None
        return grey(self.rule)

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_kept": {}}
