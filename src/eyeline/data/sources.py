"""Where samples come from: containers of rows, found by what they are, and read by a layout."""

import glob
import importlib.util
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from eyeline.core.batch import Role, Sample
from eyeline.core.errors import BadSample, Refused, nearest
from eyeline.core.settings import Positive, PositiveFloat, Settings
from eyeline.data.arrow import FILE_MAGIC, MESSAGE, open_arrow
from eyeline.data.coco import open_coco
from eyeline.data.containers import RETRIES, Container, File, Place, Shard
from eyeline.data.csv_rows import open_table
from eyeline.data.json_rows import open_lines, open_list
from eyeline.data.layouts import COLUMNS, Layout, Mapping, Name, recognised
from eyeline.data.parquet import open_parquet
from eyeline.data.tars import energon_shards, open_tars


class Source(Settings):
    """One set of samples."""

    path: str  # a file, a folder, a pattern of files (a/*.tar), or package:NAME/folder for one inside an installed Python package
    images: str | None = None  # the folder that picture paths start from; by default the one that the file lies in
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
    path: Path
    root: Path  # of the images
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
    path, folder, files = _files_of(source)
    root = Path(os.path.abspath(source.images)) if source.images is not None else folder
    if not os.path.isdir(root):
        raise Refused(f"the folder of the images, {root}, does not exist. Set images: to the folder that picture paths start from")
    mapping = Mapping(tuple(sorted(source.columns.items())), tuple(sorted(source.roles.items())))
    container = open_container(files, folder, mapping, retries)
    return Rows(source, path, root, recognised(path, container, source.layout, mapping), container, retries)


def _files_of(source: Source) -> tuple[Path, Path, list[Path]]:
    """What messages call the source, the folder it lies in, and its files in order."""
    if any(letter in source.path for letter in "*?[") and not os.path.lexists(os.path.expanduser(source.path)):
        pattern = os.path.abspath(os.path.expanduser(source.path))
        files = [Path(name) for name in sorted(glob.glob(pattern, recursive=True)) if os.path.isfile(name)]
        if not files:
            raise Refused(f"no file matches {pattern}. Give another path")
        return Path(pattern), Path(os.path.commonpath([file.parent for file in files])), files
    path = _located(source.path)
    if not path.is_dir():
        return path, path.parent, [path]
    if (path / "questions.json").is_file():
        return path / "questions.json", path, [path / "questions.json"]
    prepared = energon_shards(path)
    if prepared is not None:
        return path, path, prepared
    found = {end: sorted(p for p in path.rglob(f"*.{end}") if p.is_file() and not p.name.startswith(".")) for end in ("tar", "parquet")}
    kinds = [end for end, files in found.items() if files]
    if len(kinds) == 1:
        files = found[kinds[0]]
        splits = {word for file in files for word in _SPLIT.findall(str(file.relative_to(path)).lower())}
        if len(splits) > 1:
            raise Refused(
                f"{path} holds files of {', '.join(sorted(splits))}, and they would all be used. Name one of them by a pattern, such as "
                f"{path}/**/*{min(splits, key=lambda word: word != 'train')}*.{kinds[0]}"
            )
        return path, path, files
    if kinds:
        raise Refused(f"{path} holds both .tar and .parquet files. Name one kind by a pattern, such as {path}/*.tar")
    files = sorted(p.name for p in path.iterdir() if p.suffix in (".json", ".jsonl"))
    raise Refused(
        f"{path} is a folder without a questions.json (easy-VQA's layout), .tar or .parquet files. "
        + (f"Give one of its files: {', '.join(files[:10])}" if files else "It holds no .json or .jsonl file either")
    )


_SPLIT = re.compile(r"(?:^|[/._-])(train|test|valid|validation|val|dev|eval)(?=[/._-])")


def _located(path: str) -> Path:
    if not path.startswith("package:"):
        found = Path(os.path.abspath(os.path.expanduser(path)))
        try:
            if not os.path.lexists(found):
                beside = sorted(os.listdir(found.parent)) if os.path.isdir(found.parent) else []
                raise Refused(f"{found} does not exist.{nearest(found.name, beside)}")
            mode = os.stat(found).st_mode
        except (OSError, ValueError) as error:  # ValueError: half a surrogate pair, or NUL
            raise Refused(f"{str(found)[:300]} cannot be opened: {getattr(error, 'strerror', None) or error}. Give another path") from error
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # opening a pipe would wait for ever
            raise Refused(f"{found} is neither a file nor a folder. Give the path of a file that stays, or of a folder")
        return found
    package, _, inside = path.removeprefix("package:").partition("/")
    try:
        spec = importlib.util.find_spec(package) if re.fullmatch(r"[A-Za-z_]\w*", package) else None
    except ValueError:  # of a module without a spec, such as __main__
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise Refused(f"the Python package {package!r}, which {path} names, is not installed. Try: pip install {package.replace('_', '-')}")
    base = Path(next(iter(spec.submodule_search_locations)))
    found = Path(os.path.normpath(base / inside))
    if not found.is_relative_to(base) or not os.path.exists(found):
        raise Refused(f"{path}: there is no {inside} inside {base}")
    return found


def open_container(files: list[Path], folder: Path, mapping: Mapping, retries: int) -> Container:
    """What the files are, told by their first bytes. Refused when they hold no rows that can be read."""
    first = files[0]
    try:
        with open(first, "rb") as file:
            head = file.read(4096)
    except OSError as error:
        raise Refused(f"{first} cannot be read: {error.strerror or error}") from error
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
