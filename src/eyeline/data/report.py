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
from eyeline.data.documents import document_of
from eyeline.data.images import oddities, picture_key, prepare
from eyeline.data.loader import Reader, texts
from eyeline.data.rejects import Reject
from eyeline.data.tokenizer import Encoder

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
    asked = [(False, row) for row in reader.training] + [(True, row) for row in reader.judged]
    chosen = [asked[n] for n in np.linspace(0, len(asked) - 1, min(examined, len(asked))).astype(int)]
    spelt = 0
    for judges, row in chosen:
        measuring = reader.measuring(budget, judges)
        known = measuring(row)
        if not isinstance(known, Reject):
            sample = measuring.all.sample(row)
            spelt += any(control in text for text in texts(sample) for control in reader.encoder.controls)
            bad = _pictures_of(sample, pictures, odd)
            if bad is None:
                for name, values in lengths.items():
                    values.append(getattr(known.size, name))
                continue
            known = Reject.of(*measuring.all.named(row), bad)
        causes[known.cause] += 1
        if len(rejected) < SHOWN_REJECTS:
            rejected.append(known)
    found = [*reader.all.sources, *(reader.judges.sources if reader.judges is not reader.all else ())]
    return DataReport(
        sources=tuple(SourceFound(r.source.path, r.layout.name, r.layout.why, len(r), r.source.repeat) for r in found),
        training=len(reader.training),
        validation=len(reader.judged),
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
    for row in reader.training:
        if len(out) == count:
            break
        try:
            sample = reader.all.sample(row)
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
