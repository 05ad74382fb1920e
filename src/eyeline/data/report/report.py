"""The figures of `eyeline check` and `eyeline data`, as records: nothing here prints.

Of large data some shards of each source are looked at, evenly spread: their indexes say how long samples are and how large images
are. Of these rows some are *examined*, evenly spread again: read, and their images decoded. How much that is, `Depth` says.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from eyeline.core.batch import Budget, Sample
from eyeline.core.errors import BadSample
from eyeline.data.images.decode import unusual_properties
from eyeline.data.images.image_files import content_key, image_key
from eyeline.data.plan.blend import Side
from eyeline.data.plan.index import KEPT_OPEN
from eyeline.data.plan.order import Longs
from eyeline.data.plan.plan import RowOf, reject_of
from eyeline.data.plan.shard_index import INSIDE, OWN, ShardIndex
from eyeline.data.plan.sizing import Sized, Sizing
from eyeline.data.reader import Reader, sizing_of
from eyeline.data.rejects import Reject
from eyeline.data.report.budgets import UNBOUNDED, Packing, packings
from eyeline.data.report.duplicates import Duplicates, SampleHashes, duplicates, hashes_of
from eyeline.data.sets import texts
from eyeline.data.sources.sources import Rows
from eyeline.data.sources.unread import Unread, short_columns, unread

T = TypeVar("T")

EXAMPLES = 3  # rejects that are named, of each cause
BARS = 32
KINDS = 12  # that are counted by name


@dataclass(frozen=True)
class Depth:
    """The amount of data that is examined."""

    shards: int = 32  # of each source at most, evenly spread
    rows: int = 20_000  # of each source; once there are this many, no further shard is examined
    examined: int = 2_000  # samples at most, evenly spread over the sources
    compared: int = 0  # samples at most that are compared with each other
    packed: bool = False  # whether other budgets are tried


QUICK = Depth()
THOROUGH = Depth(rows=200_000, compared=50_000, packed=True)
WHOLE = Depth(shards=2**62, rows=2**62, examined=2**62, compared=2**62, packed=True)


@dataclass(frozen=True)
class Measure:
    """Some numbers: how many, their sum, and how they are spread."""

    count: int
    total: float
    least: float
    median: float  # of an even number, the mean of the middle two
    high: float  # p99
    most: float
    edges: tuple[float, ...]  # of the bars of a histogram
    bars: tuple[int, ...]
    log: bool  # whether edges grow by a factor

    @staticmethod
    def of(values_N: NDArray[np.int64] | NDArray[np.float64]) -> "Measure | None":
        """The measure of non-negative numbers; None if there are none."""
        if not len(values_N):
            return None
        ranked_N = np.sort(values_N)
        edges, log = _edges(float(ranked_N[0]), float(ranked_N[-1]), float(np.median(ranked_N)), ranked_N.dtype.kind == "i")
        return Measure(
            count=len(ranked_N),
            total=float(ranked_N.sum()),
            least=float(ranked_N[0]),
            median=float(np.median(ranked_N)),
            high=float(ranked_N[-(-99 * len(ranked_N) // 100) - 1]),
            most=float(ranked_N[-1]),
            edges=tuple(edges.tolist()),
            bars=tuple(np.histogram(ranked_N, edges)[0].tolist()),
            log=log,
        )

    @property
    def mean(self) -> float:
        return self.total / self.count


def _edges(least: float, most: float, median: float, whole: bool) -> tuple[NDArray[np.floating], bool]:
    """Edges of up to BARS bars, and whether they grow by a factor: where most numbers are small and a few large."""
    if least > 0 and (most > 8 * median or (not whole and most > 2 * least)):
        return np.geomspace(least, most * (1 + 1e-9), BARS + 1), True
    if whole:  # bars as wide as each other, on numbers that can be
        step = max(-(-(int(most) - int(least) + 1) // BARS), 1)
        return np.arange(int(least), int(most) + step + 1, step) - 0.5, False
    return np.linspace(least, most if most > least else least + 1, BARS + 1, dtype=np.float64), False


@dataclass(frozen=True)
class Epoch:
    """The size of an epoch, `repeat` included, of usable rows."""

    visits: float
    tokens: float
    visual: float


@dataclass(frozen=True)
class Images:
    """The number of different images that the examined training rows show."""

    samples: int  # rows that show any
    different: int  # by their bytes where all rows were examined, else by where they are stored


@dataclass(frozen=True)
class SourceFound:
    """One source as it was recognised, and its part in what is trained on."""

    path: str
    layout: str
    why: str
    training: int  # samples
    validation: int
    repeat: int
    weight: float
    visits: float  # share of the visits to samples that can be used
    tokens: float  # share of the tokens
    visual: float  # share of the visual tokens
    where: str | None  # the expression that chooses its rows
    left_out: int  # rows that it leaves out
    kinds: tuple[tuple[str, int], ...]  # the most frequent ones, of the rows looked at; empty when it has none
    more_kinds: int  # others

    @property
    def rows(self) -> int:
        return self.training + self.validation


@dataclass(frozen=True)
class DataReport:
    """Figures of the training and validation rows that were looked at."""

    sources: tuple[SourceFound, ...]
    training: int  # samples
    validation: int
    epoch: (
        Epoch | None
    )  # None where sources are interleaved in proportion to their weights (`mix: interleave`), each with epochs of its own
    exact: bool  # whether all were counted; of large data a part of the shards is, and the numbers of samples follow from their sizes
    looked: int  # rows whose index was read
    examined: int  # of them, those that were read, and whose images were decoded
    tokens: Measure | None  # of a document, visual ones included; None when none is usable
    text: Measure | None
    visual: Measure | None
    supervised: Measure | None
    answers: Measure | None  # tokens of each answer that is supervised, its end included
    images_per_sample: Measure | None  # of a sample, frames of videos not counted one by one
    widths: Measure | None  # pixels of each image, upright; those that rows of a shard share count once
    heights: Measure | None
    aspects: Measure | None  # width over height
    trained: int  # of the examined, those to train on
    trained_rejected: int  # and of these, those that cannot be used: `max_reject_rate` is about them
    rejects: dict[str, int]  # of the examined, by cause; samples with nothing to learn are under no_target
    rejected: tuple[Reject, ...]  # the first few of each cause
    unusual: dict[str, int]  # what is unusual about usable images, and how many have it
    decoded: int  # distinct images that were decoded
    control_strings: int  # samples whose text spells out a control token; it stays text
    said: int  # answers of the examined samples, without
    masked: int  # those that the data mark as left out of the loss
    not_supervised: int  # of them, those that the template leaves out of the loss
    template: str
    budgets: tuple[Packing, ...]  # the stage's own first; empty when no sample is left
    duplicates: Duplicates | None  # None when nothing was compared
    unread: tuple[str, ...]  # warnings of images that rows name and nothing reads, and of limits that are not obeyed
    refused: bool  # whether a source is refused: most of its rows name images, and none shows one
    images: "Images"


def data_report(reader: Reader, budget: Budget, depth: Depth = QUICK, others: dict[str, SampleHashes] | None = None) -> DataReport:
    """Look at samples, training and validation alike: nothing is trained or written. `others` are sets that a model is evaluated
    on, in addition to the validation set."""
    own = reader.validation.index is not reader.training.index
    if reader.training.index.folder is None:  # then indexes are only remembered: no more than there is room for, so that none is made twice
        depth = _remembered(reader, depth)
    sides = [Looked.of(reader, budget, validates, depth) for validates in ((False, True) if reader.validates else (False,))]
    learning, validating = sides[0], sides[1:]
    asked = [(side, row) for side in sides for row in side.rows]
    examined = _Examined.of(reader, _evenly_spaced(asked, depth.examined))
    sizes_M2 = np.concatenate([side.sizes() for side in sides])
    lengths = {name: np.concatenate([side.column(name) for side in sides]) for name in ("tokens", "visual", "supervised")}
    every = (*learning.side.index.sources, *(validating[0].side.index.sources if validating and own else ()))
    unseen = [Unread() if reader.data.prepared else unread(rows) for rows in every]
    found, epoch = _source_reports(reader, learning, validating, own)
    return DataReport(
        sources=tuple(replace(source, why=_with_keys(source.why, of)) for source, of in zip(found, unseen, strict=True)),
        epoch=epoch,
        training=sum(learning.counts),
        validation=sum(count for side in validating for count in side.counts),
        exact=all(side.exact for side in sides),
        looked=len(asked),
        examined=examined.samples,
        trained=examined.trained,
        trained_rejected=examined.trained_rejected,
        tokens=Measure.of(lengths["tokens"]),
        text=Measure.of(lengths["tokens"] - lengths["visual"]),
        visual=Measure.of(lengths["visual"]),
        supervised=Measure.of(lengths["supervised"]),
        answers=Measure.of(np.concatenate([side.answers() for side in sides])),
        images_per_sample=Measure.of(np.concatenate([side.images_per_sample() for side in sides])),
        widths=Measure.of(sizes_M2[:, 1]),
        heights=Measure.of(sizes_M2[:, 0]),
        aspects=Measure.of(sizes_M2[:, 1] / sizes_M2[:, 0]),
        rejects=dict(examined.causes.most_common()),
        rejected=tuple(reject for cause, _ in examined.causes.most_common() for reject in examined.rejected[cause]),
        unusual=dict(examined.unusual.most_common()),
        decoded=len(examined.decoded),
        control_strings=examined.spelt,
        said=examined.said,
        masked=examined.masked,
        not_supervised=examined.said - examined.supervised,
        template=reader.encoder.template.name,
        budgets=packings(reader, frozenset((s, h) for s, h, _ in learning.rows), budget, others=depth.packed),
        duplicates=_compare(sides, depth.compared, others or {}) if depth.compared else None,
        unread=tuple(dict.fromkeys(line for of in unseen for line in of.warnings)),
        refused=any(of.refusal is not None for of in unseen),
        images=examined.images if examined.samples == len(asked) else learning.images(),
    )


def budgets_to_choose_from(reader: Reader) -> tuple[Packing, ...]:
    """The packings of budgets that suit the data, smaller ones first. They are the same wherever indexes are kept."""
    rows = Looked.of(reader, UNBOUNDED, False, _remembered(reader, QUICK)).rows
    return packings(reader, frozenset((source, shard) for source, shard, _ in rows), None)


def _remembered(reader: Reader, depth: Depth) -> Depth:
    """A depth at which as many indexes are read as memory keeps."""
    own = reader.validation.index is not reader.training.index
    sources = len(reader.training.index.sources) + (len(reader.validation.index.sources) if own else 0)
    return replace(depth, shards=max(1, min(depth.shards, KEPT_OPEN // (sources + 1))))


@dataclass(frozen=True, eq=False)
class Looked:
    """The rows of a side that are looked at: those of some shards of each source where it has many."""

    side: Side
    sizing: Sizing
    rows: list[RowOf]  # shard by shard
    numbers: dict[tuple[int, int], Longs]  # of each shard, in the same order
    counts: list[int]  # rows that each source has on this side
    left_out: list[int]  # and rows that `where` leaves out of each
    exact: bool  # whether that was counted
    validates: bool  # whether it is the validation set

    @staticmethod
    def of(reader: Reader, budget: Budget, validates: bool, depth: Depth) -> "Looked":
        side = reader.validation if validates else reader.training
        numbers: dict[tuple[int, int], Longs] = {}
        counts: list[int] = []
        left_out: list[int] = []
        exact = True
        for source, opened in enumerate(side.index.sources):
            shards = range(side.shards(source))
            chosen: list[int] = []
            found = met = 0
            for shard in _spread_order(_evenly_spaced(shards, depth.shards)):
                if met >= depth.rows:  # of both sides: held-out samples are in the same shards
                    break
                chosen.append(shard)
                numbers[source, shard] = np.flatnonzero(side.kept_rows(source, shard))
                found, met = found + len(numbers[source, shard]), met + len(side.index.shard(source, shard))
            share = sum(opened.shards[n].bytes for n in chosen) / max(sum(opened.shards[n].bytes for n in shards), 1)
            counts.append(found if len(chosen) == len(shards) else round(found / share))
            out = sum(side.left_out(source, shard) for shard in chosen)
            left_out.append(out if len(chosen) == len(shards) else round(out / share))
            exact &= len(chosen) == len(shards)
        numbers = dict(sorted(numbers.items()))
        rows = [(source, shard, number) for (source, shard), of_shard in numbers.items() for number in of_shard.tolist()]
        return Looked(side, sizing_of(reader, budget, validates), rows, numbers, counts, left_out, exact, validates)

    def _of_shards(self, of: Callable[[ShardIndex, Sized, Longs], Longs], source: int | None = None) -> Longs:
        """The values of `of` for the usable rows of each shard, concatenated."""
        found = [np.empty(0, np.int64)]
        for (s, shard), number_R in self.numbers.items():
            if source is None or s == source:
                sized = self.sizing(s, shard)
                found.append(of(self.side.index.shard(s, shard), sized, number_R[sized.usable_R[number_R]]))
        return np.concatenate(found)

    def column(self, name: str, source: int | None = None) -> Longs:
        """Tokens, visual or supervised ones of each usable row."""
        return self._of_shards(lambda _, sized, number_R: getattr(sized, f"{name}_R")[number_R], source)

    def images_per_sample(self) -> Longs:
        """Stills and videos of each usable row."""
        return self._of_shards(lambda index, _, number_R: np.diff(index.media_R1)[number_R])

    def answers(self) -> Longs:
        """Tokens of each answer that is supervised."""
        return self._of_shards(_answers)

    def sizes(self) -> Longs:
        """Height and width of each image; those that several rows of a shard share, once."""

        def of(index: ShardIndex, _: Sized, number_R: Longs) -> Longs:
            first = np.unique(index.images_R[number_R], return_index=True)[1]
            rows = np.sort(number_R[first])
            media = [m for row in rows.tolist() for m in range(int(index.media_R1[row]), int(index.media_R1[row + 1]))]
            return index.sizes_M3[media, 1:].astype(np.int64).ravel()

        return self._of_shards(of).reshape(-1, 2)

    def skipped(self, source: int) -> int:
        """Members of archives that belong to no data set."""
        return sum(self.side.index.shard(s, shard).skipped for s, shard in self.numbers if s == source)

    def images(self) -> Images:
        """The number of different images (by location, frames included) that the usable rows show."""
        found: set[Any] = set()
        samples = 0
        for (source, shard), number_R in self.numbers.items():
            index, own = self.side.index.shard(source, shard), self.side.index.sources[source].file_of(shard).path
            usable_R = np.zeros(len(index), bool)
            usable_R[number_R] = self.sizing(source, shard).usable_R[number_R]
            count_R = np.diff(index.frames_M1[index.media_R1])
            samples += int((usable_R & (count_R > 0)).sum())
            row_N = np.repeat(np.arange(len(index)), count_R)
            shown_N, inside_N, own_N = usable_R[row_N], index.file_N == INSIDE, index.file_N == OWN
            keys = [index.files[file] for file in np.unique(index.file_N[shown_N & ~inside_N & ~own_N]).tolist()]
            spans_N2 = np.stack([index.start_N, index.length_N], axis=1)[shown_N & own_N]
            keys += [f"{own}@{start}+{length}" for start, length in np.unique(spans_N2, axis=0).tolist()]
            found.update(keys)
            order_N = np.arange(len(row_N)) - index.frames_M1[index.media_R1][row_N]
            rows = index.images_R[row_N[shown_N & inside_N]].tolist()
            found |= {*zip(rows, order_N[shown_N & inside_N].tolist(), strict=True)}
        return Images(samples, len(found))

    def kinds(self, source: int) -> Counter[str]:
        """Rows of each kind."""
        out: Counter[str] = Counter()
        for (s, shard), number_R in self.numbers.items():
            if s == source:
                index = self.side.index.shard(s, shard)
                kind, count = np.unique(index.kind_R[number_R], return_counts=True)
                out.update({index.kinds[k]: n for k, n in zip(kind.tolist(), count.tolist(), strict=True) if k >= 0 and index.kinds[k]})
        return out


def _answers(index: ShardIndex, _: Sized, number_R: Longs) -> Longs:
    """Lengths of the runs of trained ids in these rows."""
    steps = np.diff(
        index.trained_U.astype(np.int8), prepend=0, append=0
    )  # no row begins with an answer, so no run continues in another one
    start_A, end_A = np.flatnonzero(steps == 1), np.flatnonzero(steps == -1)
    row_A = np.searchsorted(index.bounds_R1, start_A, side="right") - 1
    return (end_A - start_A)[np.isin(row_A, number_R)]


def _evenly_spaced(values: Sequence[T], most: int) -> list[T]:
    """At most `most` of them, evenly spread, in order."""
    if len(values) <= most:
        return list(values)
    return [values[n] for n in np.linspace(0, len(values) - 1, most).astype(int)]


def _spread_order(values: Sequence[T]) -> list[T]:
    """The values in bit-reversed order: every prefix is spread about evenly."""
    digits = max(len(values) - 1, 1).bit_length()
    return [values[n] for n in sorted(range(len(values)), key=lambda n: f"{n:0{digits}b}"[::-1])]


@dataclass(eq=False)
class _Examined:
    """The findings of reading samples and decoding their images."""

    samples: int
    causes: Counter[str]
    rejected: dict[str, list[Reject]]
    unusual: Counter[str]
    decoded: dict[str, BadSample | None]
    trained: int = 0
    trained_rejected: int = 0
    contents: dict[str, str] = field(default_factory=dict)  # of each that could be read: the key of its bytes
    showing: int = 0  # training samples with images
    shown: set[str] = field(default_factory=set)  # contents of theirs
    spelt: int = 0
    said: int = 0
    masked: int = 0
    supervised: int = 0

    @staticmethod
    def of(reader: Reader, chosen: list[tuple[Looked, RowOf]]) -> "_Examined":
        out = _Examined(len(chosen), Counter(), {}, Counter(), {})
        for side, (source, shard, number) in chosen:
            sized, rows = side.sizing(source, shard), side.side.index.sources[source]
            index = side.side.index.shard(source, shard)
            training = side.side is reader.training
            out.trained += training
            if number in sized.rejects:
                out.trained_rejected += training
                out._reject(reject_of(side.sizing, (source, shard, number)))
                continue
            place = index.place(shard, number)
            sample = rows.read(place)
            out.spelt += any(control in text for text in texts(sample) for control in reader.encoder.all_controls)
            out.said += sum(message.role == "assistant" and message.supervised for message in sample.messages)
            out.masked += sum(not message.supervised for message in sample.messages)
            out.supervised += int((np.diff(index.tokenised(number).trained_U.astype(np.int8), prepend=0) == 1).sum())
            bad = _images_of(sample, out.decoded, out.contents, out.unusual)
            if bad is not None:
                out.trained_rejected += training
                out._reject(rows.reject(place, bad))
            elif not side.validates and sample.media:
                out.showing += 1
                out.shown |= {out.contents[image_key(image)] for image in sample.images}
        return out

    @property
    def images(self) -> Images:
        return Images(self.showing, len(self.shown))

    def _reject(self, reject: Reject) -> None:
        self.causes[reject.cause] += 1
        named = self.rejected.setdefault(reject.cause, [])
        if len(named) < EXAMPLES:
            named.append(reject)


def _images_of(sample: Sample, decoded: dict[str, BadSample | None], contents: dict[str, str], unusual: Counter[str]) -> BadSample | None:
    """Decode those images that were not decoded before; the first complaint about one of the sample's."""
    first: BadSample | None = None
    for image in sample.images:
        key = image_key(image)
        if key not in decoded:
            decoded[key] = None
            try:
                contents[key] = content_key(image)
                unusual.update(unusual_properties(image))
            except BadSample as bad:
                decoded[key] = bad
        first = first or decoded[key]
    return first


def _source_reports(reader: Reader, learning: Looked, validating: list[Looked], own: bool) -> tuple[tuple[SourceFound, ...], Epoch | None]:
    """The sources to learn from, then those to validate on where they are others; and an epoch of the first."""
    blended = reader.data.mix == "interleave"
    usable = [len(learning.column("tokens", n)) for n in range(len(learning.counts))]
    looked = [sum(len(of) for (s, _), of in learning.numbers.items() if s == n) for n in range(len(learning.counts))]
    visits = [
        (rows.source.weight if blended else rows.source.repeat * learning.counts[n] / max(looked[n], 1)) * (1 if blended else usable[n])
        for n, rows in enumerate(learning.side.index.sources)
    ]
    summed = [
        [v * m for v, m in zip(visits, (_mean(learning.column(name, n)) for n in range(len(visits))), strict=True)]
        for name in ("tokens", "visual")
    ]
    shares = list(zip(*(_shares(values) for values in (visits, *summed)), strict=True))
    out: list[SourceFound] = []
    for n, rows in enumerate(learning.side.index.sources):
        validation = validating[0].counts[n] if validating and not own else 0
        kinds = learning.kinds(n)
        figures = (learning.counts[n], validation, rows.source.repeat, rows.source.weight)
        left_out = learning.left_out[n] + (validating[0].left_out[n] if validating and not own else 0)
        out.append(_source_report(rows, figures, shares[n], left_out, kinds, learning.skipped(n)))
    for n, rows in enumerate(validating[0].side.index.sources if validating and own else ()):
        side, figures = validating[0], (0, validating[0].counts[n], 1, 1.0)
        out.append(_source_report(rows, figures, (0.0, 0.0, 0.0), side.left_out[n], side.kinds(n), side.skipped(n)))
    return tuple(out), None if blended else Epoch(sum(visits), *map(sum, summed))


def _source_report(
    rows: Rows, figures: tuple[int, int, int, float], shares: tuple[float, float, float], left_out: int, kinds: Counter[str], skipped: int
) -> SourceFound:
    shown = tuple(kinds.most_common(KINDS))
    members = f"; skipped: {skipped:,} hidden, backup or system members of archives, such as ._a.jpg" if skipped else ""
    why, where = rows.layout.why + members, None if rows.chosen is None else rows.chosen.text
    return SourceFound(rows.source.path, rows.layout.name, why, *figures, *shares, where, left_out, shown, len(kinds) - len(shown))


def _with_keys(why: str, found: Unread) -> str:
    """The reason for the layout of a source, and the keys of its messages that are not read."""
    return f"{why}; not read of messages: {', '.join(short_columns(list(found.keys)))}" if found.keys else why


def _shares(values: list[float]) -> list[float]:
    return [value / (sum(values) or 1) for value in values]


def _mean(values_N: Longs) -> float:
    return float(values_N.mean()) if len(values_N) else 0.0


def _compare(sides: list[Looked], most: int, others: dict[str, SampleHashes]) -> Duplicates:
    """Samples of the sides, read and compared."""
    rows = sum(len(side.rows) for side in sides)
    chosen = [_evenly_spaced(side.rows, max(most * len(side.rows) // max(rows, 1), 1)) for side in sides]
    training, *validation = (hashes_of(_read_samples(side, some)) for side, some in zip(sides, chosen, strict=True))
    whole = sides[0].exact and len(chosen[0]) == len(sides[0].rows)
    return duplicates(training, ({"validation": validation[0]} if validation else {}) | others, whole)


def _read_samples(side: Looked, chosen: list[RowOf]) -> Iterator[Sample]:
    for source, shard, number in chosen:
        index = side.side.index.shard(source, shard)
        if not index.bad_R[number]:
            yield side.side.index.sources[source].read(index.place(shard, number))
