"""The order of visits: a pure function of (rows, seed, epoch). Nothing here reads a file.

A *visit* is one picture and up to `share` rows that look at it: they are packed as one item, and the picture is encoded once
for all of them. Rows without a picture are visits of their own.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eyeline.core.randomness import rng_for

Longs = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Rounds:
    """What every epoch visits; only the order differs between epochs."""

    rows_R: Longs  # a row as often as an epoch visits it, those of a picture together
    groups_R: Longs  # which picture each looks at: rising numbers
    bounds_V1: Longs  # where in R each visit begins; the last entry is R

    @property
    def visits(self) -> int:
        return len(self.bounds_V1) - 1


def rounds(rows: Sequence[int], keys: Sequence[str | None], repeats: Sequence[int], share: int) -> Rounds:
    """`rows[n]` looks at the picture `keys[n]` (None: at none) and is visited `repeats[n]` times an epoch.

    The visits of a picture are as few as `share` allows and as even as can be: 10 rows, 3 at a time, make 3 + 3 + 2 + 2.
    """
    known: dict[str, int] = {}
    groups: list[int] = []
    count = 0
    for key in keys:
        if key not in known:
            if key is not None:
                known[key] = count
            groups.append(count)
            count += 1
        else:
            groups.append(known[key])
    repeated = np.repeat(np.array(rows, np.int64), repeats)
    of_row = np.repeat(np.array(groups, np.int64), repeats)
    order = np.argsort(of_row, kind="stable")
    sizes = np.bincount(of_row, minlength=count)
    visits = -(-sizes // share)  # of each group
    total = int(visits.sum())
    group_of_visit = np.repeat(np.arange(count), visits)
    first_visit = np.cumsum(visits) - visits
    nth = np.arange(total) - first_visit[group_of_visit]
    first_row = np.cumsum(sizes) - sizes
    # the n-th of v even cuts of s rows begins at ⌈n·s / v⌉
    begins = first_row[group_of_visit] + -(-nth * sizes[group_of_visit] // visits[group_of_visit])
    return Rounds(repeated[order], of_row[order], np.append(begins, len(repeated)).astype(np.int64))


@dataclass(frozen=True, eq=False)
class Order:
    """One epoch: visit number n is `rows_R[bounds[order_V[n]] : ...]`."""

    rows_R: Longs
    order_V: Longs
    bounds_V1: Longs

    def __len__(self) -> int:
        return len(self.order_V)

    def rows(self, n: int) -> list[int]:
        visit = self.order_V[n]
        return self.rows_R[self.bounds_V1[visit] : self.bounds_V1[visit + 1]].tolist()


def order_of(rounds: Rounds, seed: int, epoch: int) -> Order:
    """Which rows share a visit, and in which order visits come, in this epoch."""
    draws = rng_for(seed, "visit", epoch).random(len(rounds.rows_R))
    shuffled = np.lexsort((draws, rounds.groups_R))  # within a picture only: groups_R rises
    order = rng_for(seed, "order", epoch).permutation(rounds.visits)
    return Order(rounds.rows_R[shuffled], order, rounds.bounds_V1)


def unshuffled(rounds: Rounds) -> Order:
    """The visits as the sources list them, for validation."""
    return Order(rounds.rows_R, np.arange(rounds.visits), rounds.bounds_V1)
