"""Which rows of a source `where:` leaves: worked out from signals, or as it was when the data were prepared."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eyeline.core.errors import Refused, StorageFailed
from eyeline.core.locations import Location
from eyeline.core.recent import Recent
from eyeline.data.containers.container import File, Shard
from eyeline.data.signals.columns import FOLDER, USABLE, Signals, key_of, open_signals
from eyeline.data.signals.where import Where

Mask = NDArray[np.bool_]
KEPT = 256  # shards whose mask is remembered
NAMED = 3  # shards in a message


@dataclass(frozen=True, eq=False)
class Chosen:
    """The rows that `where` leaves of a source. Pickles small.

    A row that cannot be used is left, so that it is counted among the rejects, whatever it would have been.
    """

    text: str
    digest: str  # of the signals that it was worked out from
    mask_of: Callable[[int], Mask]  # of a shard; pickles
    _known: Recent[int, Mask] = field(default_factory=Recent, repr=False)

    def mask(self, shard: int) -> Mask:
        """Whether each row of a shard is left."""
        known = self._known.get(shard)
        return self._known.keep(shard, self.mask_of(shard), KEPT) if known is None else known


@dataclass(frozen=True, eq=False)
class BySignals:
    """`by_signals(shard)`: a mask, worked out from the columns of a shard."""

    where: Where
    signals: Signals
    keys: tuple[str, ...]  # of the columns of each shard

    def __call__(self, shard: int) -> Mask:
        table = self.signals.table(self.keys[shard])
        return self.where.mask(table) | ~table[USABLE]


def signals_folder(setting: Location | None, path: Location) -> Location:
    """Where the signals of a source are."""
    return path.parent / FOLDER if setting is None else setting


def choose(
    where: Where, folder: Location, path: Location, root: Location, layout: str, shards: Sequence[Shard], retries: int, named: bool
) -> Chosen:
    """The rows that an expression leaves of a source. Refused, with the command that makes them, where there are no signals of all of it;
    `named` says that a setting names the folder."""
    found = open_signals(folder, retries)
    make = f"Run `eyeline prepare RECIPE --signals --out {folder}`"
    if found is None:
        setting = "signals: names that folder" if named else "by default it is looked for next to the source; signals: names another"
        raise Refused(f"{path}: where: needs signals, and {folder} has none ({setting}). {make}")
    absent = [name for name in where.columns if name not in found.columns]
    if absent:
        raise Refused(
            f"{path}: where: needs the column {absent[0]}, and {folder} does not have it. Run `eyeline prepare RECIPE --signals "
            f"--similarity TOWERS --out {folder}`, where TOWERS is the folder of a SigLIP checkpoint. The other columns are kept"
        )
    keys = tuple(key_of(shard, layout, root, path) for shard in shards)
    missing = [shard.name for key, shard in zip(keys, shards, strict=True) if key not in found.shards]
    if missing:
        more = f" and {len(missing) - NAMED:,} more" if len(missing) > NAMED else ""
        raise Refused(
            f"{path}: {folder} has no signals of {', '.join(missing[:NAMED])}{more}: the data, their columns: or images: have changed, or "
            f"the signals are of other data. {make}, into a new folder if that one holds others"
        )
    digest = hashlib.sha256(repr([found.shards[key].sha256 for key in keys]).encode()).hexdigest()[:16]
    return Chosen(where.text, digest, BySignals(where, found, keys))


# As it was when the data were prepared


class Bits(NamedTuple):
    """Where the mask of a shard is in the file of a source."""

    start: int  # byte
    rows: int


@dataclass(frozen=True, eq=False)
class ByBits:
    """`by_bits(shard)`: a mask, read from a file with a bit per row."""

    file: File
    shards: tuple[Bits, ...]

    def __call__(self, shard: int) -> Mask:
        start, rows = self.shards[shard]
        return np.unpackbits(np.frombuffer(self.file.read(start, -(-rows // 8)), np.uint8), count=rows).astype(bool)


def bits_of(chosen: Chosen, shards: int) -> tuple[bytes, list[Bits]]:
    """The masks of all shards as one file, and where each is in it."""
    data, found = bytearray(), list[Bits]()
    for shard in range(shards):
        mask = chosen.mask(shard)
        found.append(Bits(len(data), len(mask)))
        data += np.packbits(mask).tobytes()
    return bytes(data), found


def require_rows(chosen: Chosen, shard: int, rows: int) -> Mask:
    """The mask of a shard of so many rows. StorageFailed where it is of another number."""
    mask = chosen.mask(shard)
    if len(mask) != rows:
        raise StorageFailed(f"the signals of shard {shard} have {len(mask):,} rows, and the data {rows:,}. Compute the signals again")
    return mask
