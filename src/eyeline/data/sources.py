"""Where samples come from: containers of rows, found by what they are, and read by a layout."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from eyeline.core.batch import Role, Sample
from eyeline.core.errors import BadSample, Refused, StorageFailed
from eyeline.core.locations import Location, below
from eyeline.core.settings import Positive, PositiveFloat, Settings
from eyeline.data.arrow import FILE_MAGIC, MESSAGE, open_arrow
from eyeline.data.coco import open_coco
from eyeline.data.containers import RETRIES, Container, File, Place, Shard
from eyeline.data.csv_rows import open_table
from eyeline.data.folders import at_the_start, common_folder, files_below, image_folder, is_folder, located, matching, named
from eyeline.data.json_rows import open_lines, open_list
from eyeline.data.layouts import COLUMNS, Layout, Mapping, Name, recognised
from eyeline.data.parquet import open_parquet
from eyeline.data.tars import energon_shards, open_tars


class Source(Settings):
    """One set of samples."""

    # a file, a folder, a pattern of files (a/*.tar), package:NAME/folder for one inside an installed Python package, or the URL of any but
    # the last in an object store (s3://, gs://, az://)
    path: str
    images: str | None = None  # the folder or URL that picture paths start from; by default the folder that the file lies in
    layout: Name | None = None  # by default detected
    columns: dict[str, str] = Field(default={})  # where they have other names, ours: theirs: {image: photo, caption: meta.title}
    roles: dict[Role, str] = Field(default={})  # the same of who speaks: {assistant: bot}
    kinds: tuple[str, ...] | None = None  # keep only samples of these kinds
    repeat: Positive = 1  # visits an epoch
    limit: Positive | None = None  # keep only the first so many
    weight: PositiveFloat = 1.0  # its share, against the other sources', where they are blended by shares


@dataclass(frozen=True)
class Rows:
    """An opened source: a list of shards, each read in order, and any row by its place. Pickles small.

    Every row is given, whatever `kinds` and `limit` say: they choose among what was read.
    """

    source: Source
    path: Location
    root: Location  # of the images
    layout: Layout
    container: Container
    retries: int  # of a store that fails

    @property
    def shards(self) -> tuple[Shard, ...]:
        """In the order of the files."""
        return self.container.shards

    def rows_in(self, shard: int) -> Iterator[tuple[Place, str | None, Sample | BadSample]]:
        """(place, kind, the sample or why there is none) of every row of a shard, in order. A row that cannot be parsed has no kind."""
        for place, row in self.container.rows(shard):
            yield place, None if isinstance(row, BadSample) else self.layout.kind(row), self._sample(place, row)

    def kept(self) -> Iterator[tuple[Place, str | None, Sample | BadSample]]:
        """The rows that `kinds` and `limit` leave, as `rows_in` gives them, in order. A row that cannot be parsed is of every kind."""
        kinds, left = self.source.kinds, self.source.limit
        for shard in range(len(self.shards)):
            for place, kind, found in self.rows_in(shard):
                if left == 0:
                    return
                if kinds is None or kind is None or kind in kinds:
                    left = None if left is None else left - 1
                    yield place, kind, found

    def read(self, place: Place) -> Sample:
        """One row as a Sample. Raises BadSample, and StorageFailed when its file has changed."""
        return self.layout.read(self.container.row(place), self.named(place)[0], self.root)

    def named(self, place: Place) -> tuple[str, str, int]:
        """Id, file and row number in the file (in its shard, where nobody has counted the rows before), for messages."""
        return self.container.named(place)

    def lies_in(self, shard: int) -> File:
        """The file of a shard."""
        return self.container.lies_in(shard)

    def _sample(self, place: Place, row: Any) -> Sample | BadSample:
        try:
            return row if isinstance(row, BadSample) else self.layout.read(row, self.named(place)[0], self.root)
        except BadSample as bad:
            return bad


def open_source(source: Source, retries: int = RETRIES) -> Rows:
    """Find the files, recognise their layout and list their shards. Refused, with what was found, when that cannot be done.

    A store that fails while rows are read is asked `retries` times more.
    """
    path, folder, files = _files_of(source, retries)
    root = folder if source.images is None else image_folder(source.images, retries)
    mapping = Mapping(tuple(sorted(source.columns.items())), tuple(sorted(source.roles.items())))
    container = open_container(files, folder, mapping, retries)
    return Rows(source, path, root, recognised(path, container, source.layout, mapping), container, retries)


def _files_of(source: Source, retries: int) -> tuple[Location, Location, list[Location]]:
    """What messages call the source, the folder it lies in, and its files in order."""
    files = matching(source.path, retries)
    if files is not None:
        if not files:
            raise Refused(f"no file matches {named(source.path)}. Give another path")
        return named(source.path), common_folder(files), files
    path = located(source.path, retries)
    if not is_folder(path):
        return path, path.parent, [path]
    there = files_below(path, retries)
    questions = [file for file in there if file == path / "questions.json"]
    if questions:
        return questions[0], path, questions
    prepared = energon_shards(path, there, retries)
    if prepared is not None:
        return path, path, prepared
    found = {end: [file for file in there if file.suffix == f".{end}"] for end in ("tar", "parquet")}
    kinds = [end for end, files in found.items() if files]
    if len(kinds) == 1:
        files = found[kinds[0]]
        splits = {word for file in files for word in _SPLIT.findall(below(path, file).lower())}
        if len(splits) > 1:
            raise Refused(
                f"{path} holds files of {', '.join(sorted(splits))}, and they would all be used. Name one of them by a pattern, such as "
                f"{path}/**/*{min(splits, key=lambda word: word != 'train')}*.{kinds[0]}"
            )
        return path, path, files
    if kinds:
        raise Refused(f"{path} holds both .tar and .parquet files. Name one kind by a pattern, such as {path}/*.tar")
    names = [file.name for file in there if file.parent == path and file.suffix in (".json", ".jsonl")]
    raise Refused(
        f"{path} is a folder without a questions.json (easy-VQA's layout), .tar or .parquet files. "
        + (f"Give one of its files: {', '.join(names[:10])}" if names else "It holds no .json or .jsonl file either")
    )


_SPLIT = re.compile(r"(?:^|[/._-])(train|test|valid|validation|val|dev|eval)(?=[/._-])")


def open_container(files: list[Location], folder: Location, mapping: Mapping, retries: int) -> Container:
    """What the files are, told by their first bytes. Refused when they hold no rows that can be read."""
    first = files[0]
    try:
        file = File.of(first, retries)
        head = file.read(0, min(file.size, 4096))
    except StorageFailed as failed:
        raise at_the_start(failed) from failed
    if head.startswith(b"PAR1"):
        return open_parquet(files, folder, (*COLUMNS, *mapping.taken), retries)
    if head.startswith((FILE_MAGIC, MESSAGE)):
        return open_arrow(files, folder, (*COLUMNS, *mapping.taken), retries)
    if head[257:262] == b"ustar" or ".tar" in first.suffixes or first.suffix == ".tgz":
        return open_tars(files, folder, retries)
    if len(files) > 1:
        raise Refused(f"{first} and {len(files) - 1} more files are neither .tar nor .parquet. Give each as a source of its own")
    head = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if first.suffix.lower() in (".csv", ".tsv") and head and not head.startswith((b"\xff\xfe", b"\xfe\xff", b"\x1f\x8b", b"PK")):
        return open_table(first, (*COLUMNS, *mapping.taken), retries)
    if head.startswith(b"["):
        return open_list(first, retries)
    if head.startswith(b"{"):
        return open_coco(first, head, retries) or open_lines(first, retries)
    kinds = {b"\x1f\x8b": "gzip", b"PK": "a zip archive", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}
    what = next((name for magic, name in kinds.items() if head.startswith(magic)), f"something that begins with {head[:12]!r}")
    wanted = "a JSON list of rows, JSON lines or .csv (UTF-8), Parquet, or a tar archive"
    raise Refused(f"{first} is {what if head else 'empty'}; wanted: {wanted}")
