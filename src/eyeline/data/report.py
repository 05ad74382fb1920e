"""What `eyeline check` says about data: counts, lengths, odd pictures, rejects, and samples as the model sees them."""

import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from rich.text import Text

from eyeline.core.batch import IGNORE, Budget, Document, Sample
from eyeline.core.errors import BadSample
from eyeline.core.log import visible
from eyeline.data.blend import Side
from eyeline.data.documents import document_of
from eyeline.data.images import oddities, picture_key, prepare
from eyeline.data.loader import Reader
from eyeline.data.plan import RowOf, reject_of
from eyeline.data.rejects import Reject
from eyeline.data.sets import texts, training_samples
from eyeline.data.tokenizer import Encoder

EXAMINED_SHARDS = 32  # of each source at most, evenly spread
EXAMINED = 2_000  # samples at most, evenly spread over the sources
SHOWN_REJECTS = 10


@dataclass(frozen=True)
class Spread:
    """Least, median and most of some lengths."""

    least: int
    median: int
    most: int

    @staticmethod
    def of(values: list[int]) -> "Spread | None":
        return Spread(min(values), int(statistics.median(values)), max(values)) if values else None


@dataclass(frozen=True)
class SourceFound:
    """One source as it was recognised."""

    path: str
    layout: str
    why: str
    rows: int
    repeat: int


@dataclass(frozen=True)
class DataReport:
    """Figures are of the `examined` samples, which are all of them when the set is small."""

    sources: tuple[SourceFound, ...]
    training: int  # samples
    validation: int
    exact: bool  # whether all were counted; of large data a part of the shards is, and the numbers of samples follow from their sizes
    examined: int
    tokens: Spread | None  # of a document, visual ones included; None when none is usable
    visual: Spread | None
    supervised: Spread | None
    rejects: dict[str, int]  # by cause; samples with nothing to learn are under no_target
    rejected: tuple[Reject, ...]  # the first few
    odd: dict[str, int]  # what is unusual about usable pictures, and how many have it
    pictures: int  # distinct ones that were decoded
    control_strings: int  # samples whose text spells out a control token; it stays text


def data_report(reader: Reader, budget: Budget, examined: int = EXAMINED) -> DataReport:
    """Measure samples, training and validation alike, and decode all their pictures: nothing is trained or written."""
    lengths: dict[str, list[int]] = {"tokens": [], "visual": [], "supervised": []}
    causes: Counter[str] = Counter()
    odd: Counter[str] = Counter()
    rejected: list[Reject] = []
    pictures: dict[str, BadSample | None] = {}
    asked: list[tuple[bool, RowOf]] = []
    counts: list[list[int]] = []  # of each side, of each source
    exact = True
    for judges in (False, True) if reader.validates else (False,):
        found, of_source, all_there = _rows_of(reader.judges if judges else reader.training)
        asked += [(judges, row) for row in found]
        counts.append(of_source)
        exact &= all_there
    chosen = [asked[n] for n in np.linspace(0, len(asked) - 1, min(examined, len(asked))).astype(int)]
    spelt = 0
    for judges, (source, shard, number) in chosen:
        sizing = reader.sizing(budget, judges)
        sized, rows = sizing(source, shard), sizing.index.sources[source]
        place = sizing.index.shard(source, shard).place(shard, number)
        if number not in sized.rejects:
            sample = rows.read(place)
            spelt += any(control in text for text in texts(sample) for control in reader.encoder.controls)
            bad = _pictures_of(sample, pictures, odd)
            if bad is None:
                for name, values in lengths.items():
                    values.append(int(getattr(sized, f"{name}_R")[number]))
                continue
            known = Reject.of(*rows.named(place), bad=bad)
        else:
            known = reject_of(sizing, (source, shard, number))
        causes[known.cause] += 1
        if len(rejected) < SHOWN_REJECTS:
            rejected.append(known)
    own = reader.judges.index is not reader.training.index
    opened = [*reader.training.index.sources, *(reader.judges.index.sources if own else ())]
    rows_of = [n for side in counts for n in side] if own else [sum(sides) for sides in zip(*counts, strict=True)]
    return DataReport(
        sources=tuple(
            SourceFound(r.source.path, r.layout.name, r.layout.why, n, r.source.repeat) for r, n in zip(opened, rows_of, strict=True)
        ),
        training=sum(counts[0]),
        validation=sum(map(sum, counts[1:])),
        exact=exact,
        examined=len(chosen),
        tokens=Spread.of(lengths["tokens"]),
        visual=Spread.of(lengths["visual"]),
        supervised=Spread.of(lengths["supervised"]),
        rejects=dict(causes.most_common()),
        rejected=tuple(rejected),
        odd=dict(odd.most_common()),
        pictures=len(pictures),
        control_strings=spelt,
    )


def _rows_of(side: Side) -> tuple[list[RowOf], list[int], bool]:
    """Rows of a side, those of some shards of each source where it has many; how many each source has; whether that was counted."""
    rows: list[RowOf] = []
    counts: list[int] = []
    exact = True
    for source, opened in enumerate(side.index.sources):
        shards = range(side.shards(source))
        chosen = sorted({int(n) for n in np.linspace(0, len(shards) - 1, min(EXAMINED_SHARDS, len(shards)))}) if shards else []
        found = [(source, shard, int(number)) for shard in chosen for number in np.flatnonzero(side.kept(source, shard))]
        rows += found
        share = sum(opened.shards[n].bytes for n in chosen) / max(sum(opened.shards[n].bytes for n in shards), 1)
        counts.append(len(found) if len(chosen) == len(shards) else round(len(found) / share))
        exact &= len(chosen) == len(shards)
    return rows, counts, exact


def _pictures_of(sample: Sample, pictures: dict[str, BadSample | None], odd: Counter[str]) -> BadSample | None:
    """Decode those pictures that were not decoded before; the first complaint about one of the sample's."""
    first: BadSample | None = None
    for picture in sample.pictures:
        key = picture_key(picture)
        if key not in pictures:
            pictures[key] = None
            try:
                odd.update(oddities(picture))
            except BadSample as bad:
                pictures[key] = bad
        first = first or pictures[key]
    return first


def first_documents(reader: Reader, count: int) -> list[tuple[Sample, Document]]:
    """The first usable training samples, whole and without augmentation."""
    out: list[tuple[Sample, Document]] = []
    for sample in training_samples(reader.data):
        if len(out) == count:
            break
        try:
            media = [prepare(medium, reader.rule) for medium in sample.media] if reader.rule else []
            out.append((sample, document_of(sample, reader.encoder, reader.rule, media)))
        except BadSample:  # `data_report` counts and names them
            continue
    return out


TRAINED = "bold green"


def render_sample(document: Document, encoder: Encoder) -> Text:
    """The document as text, what is learned in bold green; runs of visual tokens as their number; control tokens spelt out."""
    trained_T = np.zeros(len(document.tokens_T), bool)
    trained_T[1:] = document.labels_T[:-1] != IGNORE  # label t is the token at t+1
    picture_T = np.full(len(document.tokens_T), -1)
    picture_T[document.visual_M] = np.repeat(np.arange(len(document.images)), [image.tokens for image in document.images])
    text = Text()
    for begin, end in _runs(zip(trained_T.tolist(), picture_T.tolist(), strict=True)):
        if picture_T[begin] >= 0:
            text.append(f"[picture {picture_T[begin] + 1}: {end - begin} tokens]", style="cyan")
        else:
            piece = encoder.decode(document.tokens_T[begin:end].tolist(), special=True)
            text.append(visible(piece), style=TRAINED if trained_T[begin] else "")
    return text


def _runs(values: Iterable[object]) -> list[tuple[int, int]]:
    """Bounds of the stretches of equal values."""
    all = list(values)
    cuts = [n for n in range(1, len(all)) if all[n] != all[n - 1]]
    return list(zip([0, *cuts], [*cuts, len(all)], strict=True)) if all else []
