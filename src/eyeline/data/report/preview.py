"""Samples as the model sees them: pieces of text, those in the loss marked, and thumbnails of their images."""

import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from PIL import Image as Pillow

from eyeline.core.batch import IGNORE, Budget, Document, Sample
from eyeline.core.errors import BadSample
from eyeline.data.images.decode import upright
from eyeline.data.images.patches import image_patches
from eyeline.data.plan.sizing import Sizing
from eyeline.data.reader import Reader, sizing_of
from eyeline.data.text.documents import document_of, until
from eyeline.data.text.tokenizer import Encoder

LONGEST_PIECE = 1_200  # characters of a piece that are shown: its start and its end
MOST_PIECES = 60
MOST_SOURCES = 24  # of which samples are shown
THUMBNAIL = 192  # pixels, the longer side
THUMBNAILS = 4  # of a sample


@dataclass(frozen=True)
class Piece:
    """A part of a document: text, or the visual tokens of one image."""

    text: str  # control tokens spelt out; empty for an image
    trained: bool = False  # whether it is in the loss
    image: int | None = None  # which image of the document, from 1
    tokens: int = 0


@dataclass(frozen=True)
class SamplePreview:
    """One sample as it is trained on."""

    id: str
    source: str  # as the recipe names it
    tokens: int
    supervised: int
    pieces: tuple[Piece, ...]
    thumbnails: tuple[bytes, ...]  # JPEG, made here from decoded pixels; the first few
    images: int  # all that it has


def sample_previews(reader: Reader, budget: Budget, count: int, thumbnails: bool) -> list[SamplePreview]:
    """The first usable training samples as the budget leaves them, without augmentation: `count`, some of each source, and of each at
    least one."""
    sources = reader.training.index.sources[:MOST_SOURCES] if count else ()
    out: list[list[SamplePreview]] = [[] for _ in sources]
    arriving = [_usable(reader, sizing_of(reader, budget), source) for source in range(len(sources))]
    open = list(range(len(sources)))
    while open and sum(map(len, out)) < max(count, len(sources)):
        for n in [*open]:
            if sum(map(len, out)) >= max(count, len(sources)):
                break
            found = next(arriving[n], None)
            if found is None:
                open.remove(n)
                continue
            sample, document = found
            out[n].append(_preview_of(sample, document, sources[n].source.path, reader.encoder, thumbnails))
    return [shown for of_source in out for shown in of_source]


def _usable(reader: Reader, sizing: Sizing, source: int) -> Iterator[tuple[Sample, Document]]:
    side, rows = reader.training, reader.training.index.sources[source]
    for shard in range(side.shards(source)):
        index, sized = side.index.shard(source, shard), sizing(source, shard)
        for number in np.flatnonzero(side.kept_rows(source, shard) & sized.usable_R).tolist():
            try:
                sample = rows.read(index.place(shard, number))
                if number in sized.messages:
                    sample = until(sample, sized.messages[number])
                media = [image_patches(item, reader.rule) for item in sample.media] if reader.rule else []
                yield sample, document_of(sample, reader.encoder, reader.rule, media)
            except BadSample:  # `data_report` counts and names them
                continue


def _preview_of(sample: Sample, document: Document, source: str, encoder: Encoder, thumbnails: bool) -> SamplePreview:
    return SamplePreview(
        id=sample.id,
        source=source,
        tokens=len(document.tokens_T),
        supervised=int((document.labels_T != IGNORE).sum()),
        pieces=short_pieces(pieces_of(document, encoder)),
        thumbnails=tuple(thumbnail(upright(image)) for image in sample.images[:THUMBNAILS]) if thumbnails else (),
        images=len(sample.images),
    )


def pieces_of(document: Document, encoder: Encoder) -> tuple[Piece, ...]:
    """The pieces of a document, in order."""
    trained_T = np.zeros(len(document.tokens_T), bool)
    trained_T[1:] = document.labels_T[:-1] != IGNORE  # label t is the token at t+1
    image_T = np.full(len(document.tokens_T), -1)
    image_T[document.visual_M] = np.repeat(np.arange(len(document.images)), [image.tokens for image in document.images])
    out: list[Piece] = []
    for start, end in _runs(zip(trained_T.tolist(), image_T.tolist(), strict=True)):
        if image_T[start] >= 0:
            out.append(Piece("", image=int(image_T[start]) + 1, tokens=end - start))
        else:
            text = encoder.decode(document.tokens_T[start:end].tolist(), special=True)
            out.append(Piece(text, bool(trained_T[start]), tokens=end - start))
    return tuple(out)


def short_pieces(pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
    """The pieces, long ones with their middle cut out, and at most `MOST_PIECES` of them."""
    half = MOST_PIECES // 2
    if len(pieces) > MOST_PIECES:
        gap = Piece(f" … {len(pieces) - 2 * half:,} pieces … ", tokens=sum(piece.tokens for piece in pieces[half:-half]))
        pieces = (*pieces[:half], gap, *pieces[-half:])
    return tuple(Piece(_short_text(piece.text), piece.trained, piece.image, piece.tokens) for piece in pieces)


def _short_text(text: str) -> str:
    if len(text) <= LONGEST_PIECE:
        return text
    half = LONGEST_PIECE // 2
    return f"{text[:half]} … {len(text) - 2 * half:,} characters … {text[-half:]}"


def thumbnail(rgb: Pillow.Image) -> bytes:
    """A small JPEG of the pixels, without the metadata of the file."""
    rgb.thumbnail((THUMBNAIL, THUMBNAIL))
    out = io.BytesIO()
    Pillow.fromarray(np.asarray(rgb)).save(out, format="JPEG", quality=80)
    return out.getvalue()


def _runs(values: Iterable[object]) -> list[tuple[int, int]]:
    """Bounds of the runs of equal values."""
    all = list(values)
    cuts = [n for n in range(1, len(all)) if all[n] != all[n - 1]]
    return list(zip([0, *cuts], [*cuts, len(all)], strict=True)) if all else []
