"""Images that rows name where nothing reads them: in another column, in the text, or as a placeholder of another trainer.

A vision-language model would be trained on the text alone, and its loss would not show it. Some rows of a source are looked at, however
large it is.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from eyeline.core.batch import Sample, Text
from eyeline.core.errors import BadSample
from eyeline.core.locations import Location
from eyeline.data.containers.container import Container, Place
from eyeline.data.containers.parquet import Tables
from eyeline.data.containers.tars import Tars
from eyeline.data.images.image_files import image_key
from eyeline.data.layouts.layouts import MEDIA, Layout
from eyeline.data.layouts.media import IMAGE_COLUMNS, parse_list
from eyeline.data.sources.naming import Named, named_by, named_in, placeholders_in
from eyeline.data.sources.sources import Rows

FIRST, FURTHER = 100, 20  # rows that are looked at: of the first shard, and of others
SHARDS = 4  # others, evenly spread
OPENED = 8  # rows of which files without an image's ending are opened, to see whether they are images
MEMBERS = 2  # samples of an archive of which members without a known ending are read
VALUES, DEPTH = 512, 8  # values of a row that are looked at, and how deep they are nested
SENTENCES = 4  # of each kind
SURE = ("here", "there", "outside")  # an image is there; a name alone counts where most rows have one and show no image
PART_KEYS = {  # keys of a part of a message that are read, by its type
    "text": ("text", "value"),
    "input_text": ("text", "value"),
    "image": ("image", "path", "url", "index"),
    "image_url": ("image_url", "value"),
    "input_image": ("image_url", "value"),
    "video": ("video", "timestamps", "sample_fps", "fps"),
    "video_url": ("video_url", "timestamps", "sample_fps", "fps"),
}
SIZES = ("min_pixels", "max_pixels", "total_pixels", "resized_height", "resized_width")  # by which other trainers limit one image
CUTS = ("nframes", "min_frames", "max_frames", "video_start", "video_end")  # and take frames of one video


@dataclass(frozen=True)
class Unread:
    """Images that rows of a source name, and nothing reads."""

    warnings: tuple[str, ...] = ()
    refusal: str | None = None  # where no row shows an image and most name one, of those that were looked at
    keys: tuple[str, ...] = ()  # of parts of messages


@dataclass(eq=False)
class _Count:
    """Rows that name something in one way, and the first of them."""

    named: Named
    row: str  # which the first is
    rows: int = 0
    sure: bool = False


@dataclass(eq=False)
class _Found:
    """The findings in the rows that were examined."""

    looked: int = 0
    showing: int = 0  # rows that show an image or video
    read: int = 0  # rows that are not rejected
    naming: int = 0  # rows that name one that nothing reads, or have a placeholder
    columns: dict[str, _Count] = field(default_factory=dict)
    texts: dict[str, _Count] = field(default_factory=dict)
    placeholders: dict[str, _Count] = field(default_factory=dict)
    limits: dict[str, _Count] = field(default_factory=dict)
    keys: dict[str, None] = field(default_factory=dict)


def unread(rows: Rows) -> Unread:
    """Look at some rows of a source. A function of the user's may read any column, so nothing is said of them."""
    if rows.layout.code is not None:
        return Unread((), None, ())
    found = _Found()
    for place, row in _some(rows):
        if rows.source.categories is None or rows.layout.kind(row) in rows.source.categories:
            _look(found, rows, place, row)
    for counts in (found.columns, found.texts):
        for way in [way for way, count in counts.items() if not count.sure and 2 * count.rows <= found.looked]:
            del counts[way]
    named = [] if rows.layout.text_only else [*_column_lines(found, rows), *_text_lines(found)]
    sentences = [*named, *_placeholder_lines(found)]
    limits = [f"{rows.path}: {line}" for line in _limit_lines(found)]
    if found.showing or 2 * found.naming <= found.looked or rows.layout.text_only or not sentences:
        return Unread((*(f"{rows.path}: {line}" for line in sentences), *limits), None, tuple(found.keys))
    what = f"none of the {found.looked} rows looked at shows an image, and {found.naming} of them name one"
    said = " ".join(f"{line[0].upper()}{line[1:]}." for line in sentences)
    return Unread(tuple(limits), f"{rows.path}: {what}. {said} Or set images: ignore, to train on the text alone", tuple(found.keys))


# Which rows


def _some(rows: Rows) -> Iterator[tuple[Place, Any]]:
    """Some rows with all of their columns. Those that cannot be parsed are left out: they are rejected by name."""
    shards = [n for n, shard in enumerate(rows.shards) if not shard.joined]
    others = shards[1:] if rows.source.limit is None else []
    chosen = [others[len(others) * n // SHARDS - 1] for n in range(1, SHARDS + 1)] if len(others) > SHARDS else others
    for shard in (*shards[:1], *chosen):
        most = min(FIRST if shard == shards[0] else FURTHER, rows.source.limit or FIRST)
        yield from ((place, row) for place, row in _head(rows.container, shard, most) if not isinstance(row, BadSample))


def _head(container: Container, shard: int, most: int) -> Iterator[tuple[Place, Any | BadSample]]:
    """The first rows of a shard, with the columns that no layout reads."""
    match container:
        case Tables():
            yield from container.head(shard, most)
        case Tars():
            found = list(islice(container.rows(shard), most))
            parts = {part for _, row in found if isinstance(row, dict) for part, value in row.items() if value is None}
            whole = replace(container, wanted=(*container.wanted, *parts))
            few = [row for _, row in islice(whole.rows(shard), MEMBERS)] if parts else []
            starts = {part: _bytes(row.get(part)) for row in few if isinstance(row, dict) for part in parts}
            for place, row in found:  # members of one name are taken to be of one kind
                yield place, {**row, **{p: starts.get(p) for p in parts if p in row and row[p] is None}} if isinstance(row, dict) else row
        case _:
            yield from islice(container.rows(shard), most)


def _bytes(text: Any) -> bytes | None:
    """The first bytes of an archive member that was read as text."""
    return text[:4096].encode("utf-8", "surrogateescape") if isinstance(text, str) else None


# A row


def _look(found: _Found, rows: Rows, place: Place, row: Any) -> None:
    """Add what one row names."""
    id = rows.id(place)
    # rows before a later shard would have to be counted: that is the whole file
    name = f"row {rows.origin_of(place)[2]:,}" if place.shard == 0 else id
    found.looked += 1
    applied: Any = row
    try:
        applied = rows.layout.mapping.apply(rows.layout.shape, row)
        sample: Sample | None = rows.layout.read(row, id, rows.root)
    except BadSample:  # is rejected with its own message; an unread column may be why
        sample = None
    shown = {image_key(image) for image in sample.images} if sample else set[str]()
    found.showing += bool(shown)
    found.read += sample is not None
    columns: dict[str, Named] = {}
    for where, key, value in _values(applied, rows.layout, sample is None):
        if key in (*SIZES, *CUTS):
            _count(found.limits, {where: Named(str(value), "here")}, name)
        named = named_by(value, rows.root, key, found.looked <= OPENED or where in found.columns)
        if named is not None and named.key not in shown and (named.state in SURE or not (shown or key == "id")):
            columns.setdefault(where, named)
    texts, placeholders = _in_texts(sample, rows.root, shown) if sample else ({}, {})
    found.keys |= dict.fromkeys(_part_keys(applied, rows.layout))
    _count(found.columns, columns, name)
    _count(found.texts, texts, name)
    _count(found.placeholders, placeholders, name)
    found.naming += bool(columns or texts or placeholders)


def _count(counts: dict[str, _Count], ways: dict[str, Named], row: str) -> None:
    """Add a row, by the ways in which it names something."""
    for way, named in ways.items():
        count = counts.setdefault(way, _Count(named, row))
        count.rows += 1
        count.sure |= named.state in SURE


class _Value(NamedTuple):
    where: str  # "meta.photo", "messages[].images[]"
    key: str  # the last name of it
    value: Any


def _values(row: Any, layout: Layout, rejected: bool) -> Iterator[_Value]:
    """The values of a row that are no text which its layout reads. Of a `rejected` row, those of other columns alone."""
    if not isinstance(row, dict):
        return
    text = {*layout.shape.keys, "text", "content", "value", "type"}
    waiting = [
        (_Value(name, name, value), 0)
        for name, value in row.items()
        if name not in layout.shape.columns or (not rejected and name in (*MEDIA, *layout.shape.turns))
    ]
    for _ in range(VALUES):
        if not waiting:
            return
        (where, key, value), depth = waiting.pop(0)
        inner = _unpacked(value, key)
        if depth < DEPTH and isinstance(inner, list):
            waiting += [(_Value(f"{where}[]", key, item), depth + 1) for item in inner[:VALUES]]
        elif depth < DEPTH and isinstance(inner, dict) and not isinstance(inner.get("bytes"), bytes):
            waiting += [(_Value(f"{where}.{name}", str(name), item), depth + 1) for name, item in inner.items()]
        elif value is not None and not (where.startswith(layout.shape.turns) and isinstance(value, str) and key in text):
            yield _Value(where, key, value)


def _unpacked(value: Any, key: str) -> Any:
    """A list that is written as JSON, as a list; anything else as it is."""
    try:
        return parse_list(value, key) if isinstance(value, str) else value
    except BadSample:
        return value


def _in_texts(sample: Sample, root: Location, shown: set[str]) -> tuple[dict[str, Named], dict[str, Named]]:
    """The images that a sample's texts name, by the form in which they do, and the placeholders of other trainers."""
    named: dict[str, Named] = {}
    placeholders: dict[str, Named] = {}
    for message in sample.messages:
        for part in message.parts:
            if isinstance(part, Text):
                found, rest = named_in(part.text, root)
                for one in found:
                    if one.key not in shown or not one.key:
                        named.setdefault(one.form, one)
                for name in placeholders_in(rest, message.role == "assistant"):
                    placeholders.setdefault(name, Named(name, "here"))
    return named, placeholders


def _part_keys(row: Any, layout: Layout) -> Iterator[str]:
    """Keys of parts of messages that nothing reads."""
    for column in layout.shape.turns if isinstance(row, dict) else ():
        turns = _unpacked(row.get(column), column)
        contents = [turn.get("content") for turn in turns if isinstance(turn, dict)] if isinstance(turns, list) else []
        for part in (part for content in contents if isinstance(content, list) for part in content):
            read = PART_KEYS.get(part.get("type", "")) if isinstance(part, dict) and isinstance(part.get("type"), str) else None
            if read is None:
                continue
            where = f"{column}[].content[]"
            yield from (f"{where}.{key}" for key, value in part.items() if value is not None and key not in ("type", *read))
            inner = part.get("image_url")
            if "image_url" in read and isinstance(inner, dict):
                yield from (f"{where}.image_url.{key}" for key, value in inner.items() if value not in (None, "auto") and key != "url")


# What is said of it


def _column_lines(found: _Found, rows: Rows) -> Iterator[str]:
    for where, count in islice(found.columns.items(), SENTENCES):
        what = "videos" if count.named.video else "images"
        says = {"here": f"holds {what}", "url": f"holds URLs of {what}"}.get(count.named.state, f"names {what}")
        rest = "" if count.named.state != "absent" else f", which does not exist in {rows.root}"
        often, remedy = _how_often(found, count), _remedy(found, rows, where, count)
        yield f"column {_column(where)} {says} and is not read ({often}: {_quote(count.named)}{rest}). {remedy}"


def _column(where: str) -> str:
    """The column that a list or an object {bytes, path} of images is in."""
    return where.removesuffix(".path").removesuffix("[]")


def _remedy(found: _Found, rows: Rows, where: str, count: _Count) -> str:
    """The setting that makes the column be read."""
    name, named = _column(where), count.named
    if named.video:
        return "Extract the frames of each video, and list their paths in the column video"
    if isinstance(rows.container, Tars) and named.state == "here" and "." not in name:
        return f"Give the members the ending of an image, .jpg or .png, in place of .{name}"
    places = " and write <image> in the question where each is shown" if rows.layout.name == "llava" and found.read else ""
    if "[]" in name:
        return f"Put the images of a row into a column of their own, images, as a list in their order{',' if places else ''}{places}"
    if found.showing or len(found.columns) > 1:
        return f"Put all images of a row into one column, images, as a list{',' if places else ''}{places}"
    first = "Write"
    if named.state == "url":
        first = "Nothing is downloaded: fetch the images, put the paths of the files there, and write"
    elif named.form:  # in a text with others
        first = "Write the paths of a row as a list in JSON, and"
    elif named.name.lower().startswith("file://"):
        first = "Write the paths without file://, and"
    mapped = [(ours, theirs) for ours, theirs in rows.layout.mapping.columns if ours not in IMAGE_COLUMNS]
    columns = ", ".join(f"{ours}: {theirs}" for ours, theirs in (("image", name), *mapped))
    folder = ""
    if named.state == "outside":
        folder = " and images: / (or another folder that holds all images)"
    elif named.state == "absent":
        folder = f" and images: {_folder_with(rows.root, named.name) or 'the folder that these paths start from'}"
    return f"{first} columns: {{{columns}}}{folder} for this source{',' if places else ''}{places}"


def _folder_with(root: Location, name: str) -> Path | None:
    """The folder in `root` or above it from which a path leads to a file."""
    if not isinstance(root, Path) or os.path.isabs(name):
        return None
    try:
        with os.scandir(root) as entries:
            inner = sorted(root / entry.name for entry in islice(entries, 1000) if entry.is_dir())
    except OSError:
        return None
    return next((folder for folder in (*inner, *list(root.parents)[:3]) if os.path.isfile(folder / name)), None)


def _text_lines(found: _Found) -> Iterator[str]:
    for form, count in islice(found.texts.items(), SENTENCES):
        what = "a video" if count.named.video else "an image"
        yield (
            f"the text names {what} by {form}, which would be trained on as words ({_how_often(found, count)}: {_quote(count.named)}). "
            "Put the paths into a column image (several as a list), and write <image> in the text where each was"
        )


def _placeholder_lines(found: _Found) -> Iterator[str]:
    if not found.placeholders:
        return
    ranked = sorted(found.placeholders.items(), key=lambda item: -item[1].rows)
    names = ", ".join(name for name, _ in ranked[:SENTENCES])
    remedy = "Delete them: <image>, or a part of type image, says where an image is shown"
    if not found.showing:
        put = "Write" if found.columns else "Put the paths of the images into a column image (several as a list), and write"
        remedy = f"{put} <image> where each belongs"
    yield (
        f"the text has {names} ({_how_often(found, ranked[0][1])}): other trainers put an image there, and here it would be trained "
        f"on as words. "
        f"{remedy}"
    )


def _limit_lines(found: _Found) -> Iterator[str]:
    for keys, remedy in (
        (SIZES, "the model's own rule resizes every image. Set limits for all when you import the model (--min-pixels, --max-pixels)"),
        (CUTS, "every frame that is listed is used. List those that you want"),
    ):
        counts = {where: count for where, count in found.limits.items() if where.rpartition(".")[2].removesuffix("[]") in keys}
        if counts:
            most = max(counts.values(), key=lambda count: count.rows)
            is_not = "is not read" if len(counts) == 1 else "are not read"
            yield f"{', '.join(short_columns(list(counts)))} {is_not} ({_how_often(found, most)}): {remedy}"


def short_columns(names: list[str]) -> list[str]:
    """Names of which those that are in the same place as the one before are given without it: a[].b, c."""
    places = [name.rpartition(".")[0] for name in names]
    return [name.rpartition(".")[2] if n and places[n] == places[n - 1] else name for n, name in enumerate(names)]


def _how_often(found: _Found, count: _Count) -> str:
    return f"{count.rows:,} of {found.looked:,} rows looked at, first in {count.row}"


def _quote(named: Named) -> str:
    return repr(named.name if len(named.name) <= 80 else f"{named.name[:80]}…")
