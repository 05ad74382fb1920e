"""The columns of signals, and the folder that keeps them: figures of every row, which `eyeline prepare --signals` writes.

    signals.json        which file has which shard of the sources, and what they were made from: written last
    columns/KEY.npz     the columns of one shard: an array each, a value per row, in the order of the rows
    job/                the plans and manifests of the jobs that made them; not read here

A shard is known by its content and by the layout that its rows are read with, so data that were moved keep their signals.
"""

import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from eyeline.core.errors import Refused, StorageFailed
from eyeline.core.locations import Location
from eyeline.core.recent import Recent
from eyeline.data.containers.container import File, Shard

VERSION = 1
MANIFEST = "signals.json"
FOLDER = "signals"  # next to a source, where its signals are looked for unless a setting names another folder
KEPT = 64  # shards whose columns are remembered

Kind = Literal["number", "text", "flag"]
Table = Mapping[str, NDArray[Any]]  # a column each: numbers as float64 (NaN: no value), texts as bytes in UTF-8, flags as bool


class Column(NamedTuple):
    """What a column holds."""

    kind: Kind
    meaning: str


COLUMNS: dict[str, Column] = {
    "images": Column("number", "images and videos of the row"),
    "width": Column("number", "pixels; of several images the smallest width"),
    "height": Column("number", "pixels; of several images the smallest height"),
    "aspect": Column("number", "longer side over shorter; of several images the largest"),
    "entropy": Column("number", "bits of the histogram of 256 grays, 0 to 8; of several images the smallest"),
    "sharpness": Column("number", "variance of the Laplacian; small means blurred; of several images the smallest"),
    "characters": Column("number", "of all texts of the row"),
    "tokens": Column("number", "of the text as the template renders it, without visual tokens"),
    "answer_tokens": Column("number", "of them, those in the loss"),
    "repetition": Column("number", "share of an answer's characters in repeated 5-grams of words, 0 to 1; of several answers the largest"),
    "script": Column("text", "the script of most letters, as Unicode names it: latin, cjk, cyrillic, arabic, ...; empty without letters"),
    "answer_in_question": Column("flag", "whether the words of an answer are in the question before it"),
    "similarity": Column("number", "cosine of image and answers, -1 to 1, by the towers of --similarity; of several images the smallest"),
    "duplicate": Column("text", "id of the first row with equal texts and equal bytes of images; empty where this is the first"),
    "near_duplicate": Column("text", "id of the first row of those that are alike; empty where this is the first"),
}
SCORE = "similarity"  # the column that is there only where towers were named
ID, USABLE = "id", "usable"  # columns that are not chosen by: the name of the row; whether it can be read, so that it has signals


def key_of(shard: Shard, layout: str, root: Location, path: Location) -> str:
    """The name of a shard's columns. `root` is where paths of images start; it counts relative to the source's path where it is near."""
    near = [str(folder) for folder in (path, path.parent) if str(root) == str(folder) or str(root).startswith(f"{folder}/")]
    where = str(root).removeprefix(near[0]) if near else str(root)
    said = [VERSION, shard.fingerprint, shard.name, layout, where]
    return hashlib.sha256(repr(said).encode("utf-8", "surrogatepass")).hexdigest()[:32]


def columns_key(key: str) -> str:
    """The name of a shard's file in the folder."""
    return f"columns/{key[:2]}/{key}.npz"


def to_bytes(table: Table) -> bytes:
    """The file of some columns: the same bytes for the same columns."""
    out = io.BytesIO()
    np.savez(out, allow_pickle=False, **dict(table))
    return out.getvalue()


def from_bytes(data: bytes) -> dict[str, NDArray[Any]]:
    with np.load(io.BytesIO(data), allow_pickle=False) as found:
        return {name: found[name] for name in found.files}


class Stored(NamedTuple):
    """The columns of one shard."""

    sha256: str  # of their file
    rows: int
    name: str  # of the shard, for people


@dataclass(frozen=True, eq=False)
class Signals:
    """A folder of signals, opened. Pickles small."""

    folder: Location
    shards: dict[str, Stored]  # by key
    columns: tuple[str, ...]  # that there are
    identity: dict[str, Any]  # what they were made from
    retries: int
    _known: Recent[str, dict[str, NDArray[Any]]] = field(default_factory=Recent, repr=False)

    def table(self, key: str) -> dict[str, NDArray[Any]]:
        """The columns of a shard. StorageFailed where they are missing or damaged."""
        known = self._known.get(key)
        if known is None:
            path = self.folder / columns_key(key)
            file = File.of(path, self.retries)
            data = file.read(0, file.size)
            if hashlib.sha256(data).hexdigest() != self.shards[key].sha256:
                raise StorageFailed(
                    f"{path} is damaged. Run `eyeline prepare --signals` into {self.folder} again: it repairs what is damaged"
                )
            known = self._known.keep(key, from_bytes(data), KEPT)
        return known


def write_manifest(shards: Mapping[str, Stored], identity: dict[str, Any], columns: Sequence[str]) -> str:
    """The text of signals.json."""
    return json.dumps({"version": VERSION, "identity": identity, "columns": list(columns), "shards": shards}, indent=1)


def open_signals(folder: Location, retries: int) -> Signals | None:
    """The signals in a folder; None where there are none. Refused for those of another version; StorageFailed where the store fails."""
    path = folder / MANIFEST
    if isinstance(path, Path) and not path.is_file():
        return None
    file = File.of(path, retries)
    try:
        value = json.loads(file.read(0, file.size))
    except ValueError as error:
        raise StorageFailed(f"{path} is not JSON ({error}). Delete it, and run `eyeline prepare --signals` again") from error
    if value.get("version") != VERSION:
        raise Refused(f"{path} has format version {value.get('version')!r}; this Eyeline reads {VERSION}. Compute the signals again")
    shards = {key: Stored(*one) for key, one in value["shards"].items()}
    return Signals(folder, shards, tuple(value["columns"]), value["identity"], retries)
