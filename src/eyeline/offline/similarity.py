"""The job that says how well the images of each row go with its answers, by a model with an image and a text tower: a partition of the
job `signals` -> the similarity of each row.

A tower may round otherwise on another machine, so what another attempt committed stands, and is not made again.

Dims: R rows  E width of vectors
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from eyeline.core.batch import EncodedImage, Image, Sample
from eyeline.core.errors import BadSample, StorageFailed
from eyeline.core.files import storage_failed
from eyeline.core.image_rule import ImageRule
from eyeline.data.containers.container import persistent
from eyeline.data.images.image_files import frames_of, image_key, in_memory
from eyeline.data.images.patches import image_patches
from eyeline.data.sources.sources import Rows
from eyeline.data.text.documents import require_answer
from eyeline.offline.attempt import Done, Job, is_whole
from eyeline.offline.local_jobs import folder_of, open_job, output_path, run_job
from eyeline.offline.manifests import manifests, missing_numbers
from eyeline.offline.measures import answers_of
from eyeline.offline.plan import Draft, Partition, Plan, existing_plan
from eyeline.offline.report import JOBS
from eyeline.offline.run import Where
from eyeline.offline.store import LocalStore

JOB = "similarity"
SIMILARITY = "similarity.npy"  # the output of a partition: a number per row, NaN where there is none
BLOCK = 512  # rows whose vectors are in memory together; an image that several of them show is encoded once
BATCH = 32  # images or texts of one pass
DIGITS = 6
WITHOUT_IMAGE = "without_image"

X = TypeVar("X")


class Towers(Protocol):
    """A model with two towers. Pickles; it is loaded where it is first used."""

    @property
    def identity(self) -> str: ...

    @property
    def rule(self) -> ImageRule: ...

    @property
    def device(self) -> str: ...

    def image_vectors(self, images: Sequence[Image]) -> NDArray[np.float32]: ...

    def text_vectors(self, texts: Sequence[str]) -> NDArray[np.float32]: ...


class Scores(NamedTuple):
    """The job, done, and the towers that it was done with."""

    plan: Plan
    towers: str


def known_scores(folder: Path) -> Scores | None:
    """Those that a folder has, if all are there."""
    plan = existing_plan(LocalStore(folder / JOBS / JOB))
    if plan is None or next(missing_numbers(plan), None) is not None:
        return None
    return Scores(plan, plan.head.identity["towers"])


def score(
    sources: tuple[Rows, ...], towers: Towers, folder: Path, identity: dict[str, Any], partitions: Sequence[Partition], where: Where
) -> Scores | None:
    """Compare images and texts of all rows. None where other jobs (`where`) have to do their share first."""
    plan = open_job(folder, JOB, {**identity, "towers": towers.identity}, lambda _: Draft(partitions), partitions)
    job = Job(JOB, WriteSimilarity(sources, towers), repeatable=False, accelerated=towers.device != "cpu")
    if not run_job(job, plan, where, folder, set()):
        return None
    return Scores(plan, towers.identity)


def similarities(scores: Scores) -> Iterator[NDArray[np.float64]]:
    """The numbers of each partition, in order. StorageFailed where they are not as they were committed."""
    for one in manifests(scores.plan):
        path = output_path(scores.plan, one, SIMILARITY)
        if not is_whole(path, one.outputs[0]):
            raise StorageFailed(f"{path} is missing or damaged. Delete {folder_of(scores.plan)} and run the same command: it is made again")
        yield np.load(path)


# One partition


@dataclass(frozen=True, eq=False)
class WriteSimilarity:
    """`write_similarity(partition, folder)`: the work on a shard of the sources. Pickles; the towers stay loaded between partitions."""

    sources: tuple[Rows, ...]
    towers: Towers

    def __call__(self, partition: Partition, folder: Path) -> Done:
        source, shard = partition.work
        rows, counts = self.sources[source], Counter[str]()
        found: list[float] = []
        samples = (sample for _, _, sample in rows.rows_in(shard))
        while block := list(islice(samples, BLOCK)):
            found += self._scored(block, rows.retries, counts)
        try:
            np.save(folder / SIMILARITY, np.array(found, np.float64))
        except OSError as error:
            raise storage_failed("write", folder, error) from error
        return Done({SIMILARITY: len(found) - counts.total()}, dict(sorted(counts.items())))

    def _scored(self, samples: Sequence[Sample | BadSample], retries: int, counts: Counter[str]) -> list[float]:
        """The similarity of each row: of several images the smallest. Those without one are counted by cause."""
        images, texts = _Vectors(self.towers.image_vectors), _Vectors(self.towers.text_vectors)
        pairs: list[tuple[list[int], int] | None] = []
        for sample in samples:
            try:
                pairs.append(self._pair(sample, retries, images, texts))
            except BadSample as bad:
                counts[bad.cause] += 1
                pairs.append(None)
        image_IE, text_JE = images.array(), texts.array()
        return [np.nan if pair is None else round(float((image_IE[pair[0]] @ text_JE[pair[1]]).min()), DIGITS) for pair in pairs]

    def _pair(self, sample: Sample | BadSample, retries: int, images: "_Vectors[Image]", texts: "_Vectors[str]") -> tuple[list[int], int]:
        """Which vectors belong to a row: of its images, of each video the first frame, and of its answers."""
        if isinstance(sample, BadSample):
            raise sample
        require_answer(sample)
        if not sample.media:
            raise BadSample(WITHOUT_IMAGE, "images", "there is none to compare the text with")
        firsts = [frames_of(item)[0] for item in sample.media]
        shown = [images.number(image_key(one), partial(self._patches, one, retries)) for one in firsts]
        text = "\n".join(answers_of(sample))
        return shown, texts.number(text, lambda: text)

    def _patches(self, image: EncodedImage, retries: int) -> Image:
        read = persistent(partial(in_memory, image), retries)
        assert isinstance(read, EncodedImage)
        [patches] = image_patches(read, self.towers.rule)
        return patches


@dataclass(frozen=True, eq=False)
class _Vectors(Generic[X]):
    """Vectors of different things, made a batch at a time in the order in which they come."""

    encode: Callable[[Sequence[X]], NDArray[np.float32]]
    numbers: dict[str, int | BadSample] = field(default_factory=dict)
    waiting: list[X] = field(default_factory=list)
    made: list[NDArray[np.float32]] = field(default_factory=list)

    def number(self, key: str, make: Callable[[], X]) -> int:
        """The number of a thing, which is made unless it is known. BadSample for one that cannot be."""
        if key not in self.numbers:
            try:
                one = make()
                self.numbers[key] = sum(map(len, self.made)) + len(self.waiting)
                self.waiting.append(one)
            except BadSample as bad:
                self.numbers[key] = bad
            if len(self.waiting) == BATCH:
                self._flush()
        found = self.numbers[key]
        if isinstance(found, BadSample):
            raise found
        return found

    def array(self) -> NDArray[np.float32]:
        self._flush()
        return np.concatenate(self.made) if self.made else np.empty((0, 1), np.float32)

    def _flush(self) -> None:
        if self.waiting:
            self.made.append(self.encode(self.waiting))
            self.waiting.clear()
