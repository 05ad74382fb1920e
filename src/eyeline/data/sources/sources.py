"""Sources of samples: containers of rows, recognised by content, and read by a layout."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, get_args

from pydantic import AfterValidator, Field, model_validator

from eyeline.core.batch import Role, Sample
from eyeline.core.errors import BadSample, Refused, StorageFailed, nearest
from eyeline.core.locations import Location
from eyeline.core.settings import Positive, PositiveFloat, Settings
from eyeline.core.user_code import is_code
from eyeline.data.containers.arrow import FILE_MAGIC, MESSAGE, open_arrow
from eyeline.data.containers.coco import open_coco
from eyeline.data.containers.container import HASHED, RETRIES, Container, File, Place, Shard
from eyeline.data.containers.csv_rows import open_table
from eyeline.data.containers.joined import join_containers
from eyeline.data.containers.json_rows import lists_in_lines, open_lines, open_list
from eyeline.data.containers.parquet import open_parquet
from eyeline.data.containers.sidecars import open_sidecars
from eyeline.data.containers.tars import Tars, open_tars
from eyeline.data.layouts.layouts import COLUMNS, Layout, Mapping, Name, layout_of
from eyeline.data.rejects import Reject
from eyeline.data.signals.chosen import Chosen, choose, signals_folder
from eyeline.data.signals.where import where_of
from eyeline.data.sources.folders import (
    at_the_start,
    common_folder,
    image_folder,
    is_folder,
    matching,
    no_match_hint,
    parse_location,
    resolve_location,
)
from eyeline.data.sources.source_files import SourceFiles, source_files_in

IGNORE = "ignore"  # in place of a folder of images


def _known_layout(layout: str) -> str:
    known = get_args(Name)
    if layout not in known and not is_code(layout):
        function = f" Name its function, too: {layout}:read." if layout.endswith(".py") else nearest(layout, known)
        raise ValueError(f"got {layout!r}, wanted {', '.join(known)}, or a function of your own as FILE.py:FUNCTION.{function}")
    return layout


def _known_expression(text: str) -> str:
    return where_of(text).text


class Source(Settings):
    """One set of samples."""

    # a file, a folder, a pattern of files (a/*.tar), package:NAME/folder for one inside an installed Python package, or the URL of any but
    # the last in an object store (s3://, gs://, az://)
    path: str
    # the folder or URL that image paths start from; by default the folder that the file is in. Or `ignore`: rows are text, whatever images
    # they name in columns that are not read
    images: str | None = None
    # by default detected; or FILE.py:FUNCTION, a function of your own that makes messages of a row
    layout: Annotated[str, AfterValidator(_known_layout)] | None = None
    columns: dict[str, str] = Field(default={})  # where they have other names, ours: theirs: {image: photo, caption: meta.title}
    roles: dict[Role, str] = Field(default={})  # the same for speakers: {assistant: bot}
    categories: tuple[str, ...] | None = None  # keep only samples of these categories
    # keep only rows of which this is true: an expression over signals, such as `width >= 224 and not duplicate`
    where: Annotated[str, AfterValidator(_known_expression)] | None = None
    signals: str | None = None  # the folder of these, which `eyeline prepare --signals` wrote; by default `signals`, next to `path`
    repeat: Positive = 1  # visits an epoch
    limit: Positive | None = None  # keep only this many, the first ones
    weight: PositiveFloat = 1.0  # its share, against the other sources', with mix: interleave

    @model_validator(mode="after")
    def _no_idle_signals(self) -> "Source":
        if self.signals is not None and self.where is None:
            raise ValueError("signals names figures for where: to choose rows by, and there is no where:. Add it, or leave signals out")
        return self

    @property
    def choice(self) -> str:
        """What leaves rows out, in words."""
        return "categories, where and limit" if self.where is not None else "categories and limit"


@dataclass(frozen=True)
class Rows:
    """An opened source: a list of shards, each read in order, and any row by its place. Pickles small.

    Every row is given, whatever `categories`, `where` and `limit` say: they choose among what was read.
    """

    source: Source
    path: Location
    root: Location  # of the images
    layout: Layout
    container: Container
    retries: int  # of a store that fails
    chosen: Chosen | None = None  # what `where` leaves; None: all

    @property
    def shards(self) -> tuple[Shard, ...]:
        """In the order of the files."""
        return self.container.shards

    def rows_in(self, shard: int) -> Iterator[tuple[Place, str | None, Sample | BadSample]]:
        """(place, kind, the sample or why there is none) of every row of a shard, in order. A row that cannot be parsed has no kind."""
        for place, row in self.container.rows(shard):
            kind, found = (None, row) if isinstance(row, BadSample) else self.layout.parsed(row, self.id(place), self.root)
            yield place, kind, found

    def kept_rows(self) -> Iterator[tuple[Place, str | None, Sample | BadSample]]:
        """The rows that `categories`, `where` and `limit` leave, as `rows_in` gives them, in order. A row that cannot be parsed is of every
        kind."""
        kinds, left = self.source.categories, self.source.limit
        for shard in range(len(self.shards)):
            mask = None if self.chosen is None else self.chosen.mask(shard)
            for place, kind, found in self.rows_in(shard):
                if left == 0:
                    return
                if (kinds is None or kind is None or kind in kinds) and (mask is None or mask[place.number]):
                    left = None if left is None else left - 1
                    yield place, kind, found

    def read(self, place: Place) -> Sample:
        """One row as a Sample. Raises BadSample, and StorageFailed when its file has changed."""
        return self.layout.read(self.container.row(place), self.id(place), self.root)

    def id(self, place: Place) -> str:
        """The name of a row, equal in every run."""
        return self.container.id(place)

    def origin_of(self, place: Place) -> tuple[str, str, int]:
        """Id, file and row number in the file, for messages."""
        return self.container.origin_of(place)

    def reject(self, place: Place, bad: BadSample) -> Reject:
        """The reject of a row that cannot be used; for a text file with the line number that editors show."""
        line = self.container.line(place)
        reject = Reject.of(*self.origin_of(place), bad)
        return reject if line is None else replace(reject, message=f"{reject.message} (line {line})")

    def file_of(self, shard: int) -> File:
        """The file of a shard."""
        return self.container.file_of(shard)

    def skipped(self, shard: int) -> int:
        """Members of an archive that belong to no data set, such as `._a.jpg`. Known once its rows were read."""
        return self.container.skipped(shard) if isinstance(self.container, Tars) else 0


def open_source(source: Source, retries: int = RETRIES) -> Rows:
    """Find the files, recognise their layout and list their shards. Refused, with what was found, when that cannot be done.

    A store that fails while rows are read is asked `retries` times more.
    """
    found = _source_files(source, retries)
    text_only = source.images == IGNORE
    root = found.folder if source.images is None or text_only else image_folder(source.images, retries)
    own = source.layout is not None and is_code(source.layout)
    if own and (source.columns or source.roles):
        raise Refused(f"{source.path}: columns and roles say what a known layout is called, and {source.layout} reads rows. Leave them out")
    columns = {} if own else source.columns or found.columns or {}
    mapping = Mapping(tuple(sorted(columns.items())), tuple(sorted(source.roles.items())))
    container = open_container(found, None if own else (*COLUMNS, *mapping.columns_read), mapping.columns_read, retries)
    layout = replace(layout_of(found.path, container, source.layout, mapping), text_only=text_only)
    if found.skipped:
        layout = replace(layout, why=f"{layout.why}; skipped: {found.skipped}")
    rows = Rows(source, found.path, root, layout, container, retries)
    return rows if source.where is None else replace(rows, chosen=_chosen(rows, source.where))


def _chosen(rows: Rows, where: str) -> Chosen:
    setting = rows.source.signals
    folder = signals_folder(None if setting is None else parse_location(setting), rows.path)
    named = setting is not None
    return choose(where_of(where), folder, rows.path, rows.root, rows.layout.identity, rows.shards, rows.retries, named)


def _source_files(source: Source, retries: int) -> SourceFiles:
    """The files of a source."""
    files = matching(source.path, retries)
    if files is not None:
        if not files:
            raise Refused(f"no file matches {parse_location(source.path)}{no_match_hint(source.path)}")
        return SourceFiles(parse_location(source.path), common_folder(files), files)
    path = resolve_location(source.path, retries)
    return source_files_in(path, retries) if is_folder(path) else SourceFiles(path, path.parent, [path])


def open_container(found: SourceFiles, columns: tuple[str, ...] | None, members: tuple[str, ...], retries: int) -> Container:
    """Open the container of the files, recognised by their first bytes. Refused when they hold no rows that can be read. `columns` are
    those that are read of
    a table (None: all), `members` those of an archive that are columns of their own."""
    files, folder = found.files, found.folder
    if found.texts is not None:
        return open_sidecars(files, found.texts, folder, retries)
    head = _head(files[0], retries)
    if head.startswith(b"PAR1"):
        return open_parquet(files, folder, columns, retries)
    if head.startswith((FILE_MAGIC, MESSAGE)):
        return open_arrow(files, folder, columns, retries, found.features)
    if head[257:262] == b"ustar" or ".tar" in files[0].suffixes or files[0].suffix == ".tgz":
        return open_tars(files, folder, members, found.note, found.indexes or {}, retries)
    if len(files) == 1:
        return _open_text(files[0], head, columns, retries, HASHED)
    return join_containers(
        [_open_text(file, _head(file, retries), columns, retries, HASHED // len(files)) for file in files], files, folder
    )


def _head(path: Location, retries: int) -> bytes:
    try:
        file = File.of(path, retries)
        return file.read(0, min(file.size, 4096))
    except StorageFailed as failed:
        raise at_the_start(failed) from failed


def _open_text(path: Location, head: bytes, columns: tuple[str, ...] | None, retries: int, hashed: int) -> Container:
    """A file of rows that are text, of which JSON lines up to a size are identified by their content."""
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    what = next((name for magic, name in NO_ROWS.items() if text.upper().startswith(magic)), None)
    if what is None and path.suffix.lower() in (".csv", ".tsv") and text:
        return open_table(path, columns or COLUMNS, retries)
    if text.startswith(b"["):
        return open_lines(path, retries, hashed) if lists_in_lines(path, retries) else open_list(path, retries)
    if text.startswith(b"{"):
        return open_coco(path, text, retries) or open_lines(path, retries, hashed)
    wanted = "a JSON list of rows, JSON lines or .csv (UTF-8), Parquet, Arrow, or a tar archive"
    raise Refused(f"{path} is {what or f'something that starts with {text[:12]!r}' if text else 'empty'}; wanted: {wanted}")


NO_ROWS = {  # how files begin that hold none
    b"\x1f\x8b": "gzip: unpack it first",
    b"PK\x03\x04": "a zip archive: unpack it first",
    b"\x28\xb5\x2f\xfd": "zstandard: unpack it first",
    b"\xff\xfe": "UTF-16: save it as UTF-8",
    b"\xfe\xff": "UTF-16: save it as UTF-8",
    b"<!DOCTYPE": "a web page: the download returned one (perhaps an error) instead of the file",
    b"<HTML": "a web page: the download returned one (perhaps an error) instead of the file",
    b"VERSION HTTPS://GIT-LFS": "a Git LFS pointer: fetch the file with git lfs pull",
    b"\xff\xd8\xff": "an image",
    b"\x89PNG": "an image",
}
