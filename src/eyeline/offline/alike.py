"""The job that finds duplicates: the records of all rows, a range of keys per partition, so that no process holds more than one range.

A partition reads its range from the sorted side files of all shards, puts it in order, and writes pairs of rows (`links`). Where one key
has many rows, each is compared with the first of them and with the few before it.

Dims: N records  L links  D rows that are like an earlier one
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from eyeline.data.plan.order import Hashes, Longs
from eyeline.offline.attempt import Done
from eyeline.offline.hashes import DIFFERENT_BITS, different_bits, sorted_records
from eyeline.offline.local_jobs import output_path
from eyeline.offline.manifests import manifests
from eyeline.offline.plan import Partition, Plan

EQUAL, NEAR = "equal.npy", "near.npy"  # side files of a shard's rows: sorted records
LINKS = {EQUAL: "equal-links.npy", NEAR: "near-links.npy"}
MOST_BITS = {EQUAL: 0, NEAR: DIFFERENT_BITS}
RECORDS = 1 << 22  # of a partition, about: 100 MB, and four times that while they are put in order
RECORD_BYTES = 24
NEIGHBOURS = 8  # rows of one key that each is compared with, besides the first


@dataclass(frozen=True)
class WriteLinks:
    """`write_links(partition, folder)`: the work on a range of keys. Pickles."""

    hashed: Plan  # the job whose outputs are the side files
    ranges: int  # a power of two

    def __call__(self, partition: Partition, folder: Path) -> Done:
        for side, links in LINKS.items():
            np.save(folder / links, links_of(self._records(side, partition.number), MOST_BITS[side]))
        return Done({}, {})

    def _records(self, side: str, number: int) -> Hashes:
        width = (1 << 64) // self.ranges
        first, last = np.uint64(number * width), np.uint64((number + 1) * width - 1)
        found: list[Hashes] = []
        for one in manifests(self.hashed):
            record_N3 = np.load(output_path(self.hashed, one, side), mmap_mode="r")
            key_N = record_N3[:, 0]
            found.append(np.array(record_N3[np.searchsorted(key_N, first) : np.searchsorted(key_N, last, "right")]))
        return sorted_records(found)


def ranges_of(hashed: Plan, records: int = RECORDS) -> int:
    """The number of ranges for the records of a job that is complete."""
    bytes = max(sum(output.bytes for one in manifests(hashed) for output in one.outputs if output.name == side) for side in LINKS)
    return 1 << (-(-bytes // (records * RECORD_BYTES)) - 1).bit_length()


def links_of(record_N3: Hashes, most_bits: int) -> Hashes:
    """(row, an earlier row that it is like) of sorted records: of the same key, and with at most so many different bits."""
    key_N, row_N, check_N = record_N3.T
    found = [np.empty((0, 2), np.uint64)]

    def compare(later_M: Longs, earlier_M: Longs) -> None:
        alike_M = (key_N[later_M] == key_N[earlier_M]) & (row_N[later_M] != row_N[earlier_M])
        alike_M &= different_bits(check_N[later_M], check_N[earlier_M]) <= most_bits
        found.append(np.stack([row_N[later_M[alike_M]], row_N[earlier_M[alike_M]]], 1))

    number_N = np.arange(len(key_N))
    first_N = np.maximum.accumulate(np.where(np.diff(key_N, prepend=~key_N[:1]) != 0, number_N, 0)) if len(key_N) else number_N
    compare(number_N, first_N)
    for back in range(1, min(NEIGHBOURS, len(key_N) - 1) + 1):
        compare(number_N[back:], number_N[:-back])
    return np.unique(np.concatenate(found), axis=0)


def first_rows(links: Sequence[Hashes]) -> tuple[Hashes, Hashes]:
    """(rows, in order; the first row of those that each is linked with, directly or through others) of all rows that are not the first."""
    link_L2 = np.concatenate([np.empty((0, 2), np.uint64), *links])
    row_D, at = np.unique(link_L2, return_inverse=True)
    at_L2 = at.reshape(-1, 2)
    first_D = np.arange(len(row_D))
    while True:
        least_L = first_D[at_L2].min(1)
        now_D = first_D.copy()
        for side in (0, 1):
            np.minimum.at(now_D, at_L2[:, side], least_L)
        now_D = now_D[now_D]
        if (now_D == first_D).all():
            later_D = first_D != np.arange(len(row_D))
            return row_D[later_D], row_D[first_D[later_D]]
        first_D = now_D
