"""In which order data comes: a keyed permutation of shards, windows of shards, a keyed permutation of the image groups in a window.

Everything is a pure function of its arguments, and any position can be computed alone: nothing is shuffled, stored or drawn
one after another. The permutations are our own, so that no release of numpy changes the order of a run.

Dims: N positions  R rows of a window  V image groups
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from eyeline.core.randomness import seed_for

Longs = NDArray[np.int64]
Hashes = NDArray[np.uint64]

RAMP = (1, 1, 2, 4, 8, 16)  # shards of the first windows of the first epoch: the first step waits for one shard to be indexed
WINDOW_SHARDS = 32  # of every other window, or of all the windows together that are open at once
WINDOW_HELD = 256 << 20  # bytes that reading the window's rows in any order may keep in memory
ROUNDS = 6


def mix_hash(x_N: Hashes) -> Hashes:
    """SplitMix64's finaliser: every bit of the input moves every bit of the output."""
    x_N = (x_N ^ (x_N >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x_N = (x_N ^ (x_N >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x_N ^ (x_N >> np.uint64(31))


@dataclass(frozen=True)
class Permutation:
    """A permutation of 0 ... size-1 that belongs to `key`: a Feistel network, whose values are sent through it again while they are
    outside (Black and Rogaway 2002, "cycle walking"). No memory, whatever the size."""

    size: int
    key: int

    def __call__(self, positions_N: Longs) -> Longs:
        """The items at these positions."""
        if self.size < 2:
            return positions_N
        half = np.uint64(max((self.size - 1).bit_length() + 1, 2) // 2)
        keys = mix_hash(np.arange(1, ROUNDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(self.key))
        out_N = positions_N.astype(np.uint64)
        outside_N = np.ones(out_N.shape, bool)
        while outside_N.any():
            out_N[outside_N] = _feistel(out_N[outside_N], half, keys)
            outside_N = out_N >= np.uint64(self.size)
        return out_N.astype(np.int64)


def _feistel(x_N: Hashes, half: np.uint64, keys: Hashes) -> Hashes:
    mask = (np.uint64(1) << half) - np.uint64(1)
    left_N, right_N = x_N >> half, x_N & mask
    for key in keys:
        left_N, right_N = right_N, left_N ^ (mix_hash(right_N + key) & mask)
    return (left_N << half) | right_N


@dataclass(frozen=True, eq=False)
class Runs:
    """Shards in runs that stay together, such as the parts of a row group. Run r is `bounds_R1[r] : bounds_R1[r + 1]` of them; most
    are one shard long."""

    bounds_R1: Longs
    _epoch: dict[int, tuple[Longs, Longs]] = field(default_factory=dict, repr=False)  # the order of the last one that was asked for

    @staticmethod
    def of(joined_N: NDArray[np.bool_]) -> "Runs":
        """The runs of shards, given whether each belongs to the one before it."""
        return Runs(np.append(np.flatnonzero(~joined_N), len(joined_N)))

    @property
    def shards(self) -> int:
        return int(self.bounds_R1[-1])

    def at(self, positions_N: Longs, seed: int | None, epoch: int) -> tuple[Longs, Longs]:
        """The shards at these positions of an epoch's order, and the run of each. Runs are permuted, then the shards in each. Without a
        seed, shards come as they are listed."""
        runs = len(self.bounds_R1) - 1
        if seed is None:
            return positions_N, np.searchsorted(self.bounds_R1, positions_N, side="right") - 1
        permutation = Permutation(runs, seed_for(seed, "shards", epoch))
        if runs == self.shards:
            chosen_N = permutation(positions_N)
            return chosen_N, chosen_N
        if permutation.key not in self._epoch:
            self._epoch.clear()
            run_R = permutation(np.arange(runs))
            self._epoch[permutation.key] = run_R, np.cumsum(np.diff(self.bounds_R1)[run_R])
        run_R, ends_R = self._epoch[permutation.key]
        nth_N = np.searchsorted(ends_R, positions_N, side="right")
        run_N = run_R[nth_N]
        lengths_N = np.diff(self.bounds_R1)[run_N]
        inside_N = positions_N - (ends_R[nth_N] - lengths_N)
        for run in np.unique(run_N[lengths_N > 1]).tolist():
            here = run_N == run
            length = int(self.bounds_R1[run + 1] - self.bounds_R1[run])
            inside_N[here] = Permutation(length, seed_for(seed, "parts", epoch, run))(inside_N[here])
        return self.bounds_R1[run_N] + inside_N, run_N


def shards_of(
    runs: Runs, seed: int | None, epoch: int, first: int, window: int, held: Callable[[int], int], most: int = WINDOW_SHARDS
) -> list[int]:
    """The shards of a window that begins at position `first` of the epoch's order, in the order in which they come.

    `held(n)` are the bytes that shard n keeps in memory, with all of its run. Without a seed, shards come as they are listed.
    """
    most = min(most, RAMP[window]) if epoch == 0 and window < len(RAMP) else most
    chosen_N, run_N = runs.at(np.arange(first, min(first + most, runs.shards)), seed, epoch)
    starts_N = np.diff(run_N, prepend=-1) != 0
    total_N = np.cumsum([held(n) if starts else 0 for n, starts in zip(chosen_N.tolist(), starts_N.tolist(), strict=True)])
    return chosen_N[(total_N <= WINDOW_HELD) | (run_N == run_N[:1])].tolist()  # of the first run all: it is held once for all of them


@dataclass(frozen=True, eq=False)
class ImageGroups:
    """The rows of a window in the order in which they come. Image group v is `rows_R[bounds_V1[v] : bounds_V1[v + 1]]`.

    An *image group* is one image (or one list of images) and up to `share` rows that look at it: they are packed together, and the
    image is encoded once for all of them. Rows without an image are groups of their own.
    """

    rows_R: Longs
    bounds_V1: Longs

    def __len__(self) -> int:
        return len(self.bounds_V1) - 1

    def __iter__(self) -> Iterator[list[int]]:
        return (self.rows_R[a:b].tolist() for a, b in zip(self.bounds_V1, self.bounds_V1[1:], strict=False))


def image_groups_of(images_R: Hashes, share: int, seed: int | None, *address: int) -> ImageGroups:
    """Group the rows of a window by what they look at (`images_R`: equal for the same images, 0 for none), and order the image groups.

    The image groups of one image are as few as `share` allows and as even as can be: 10 rows, 3 at a time, make 3 + 3 + 2 + 2. Which
    rows meet is drawn, too. Without a seed, image groups and their rows come as they are listed.
    """
    rows = len(images_R)
    if share == 1 or rows == 0:
        grouped_R, starts_V = np.arange(rows), np.arange(rows)
    else:
        grouped_R, starts_V = _shared(images_R, share, None if seed is None else seed_for(seed, "meet", *address))
    bounds_V1 = np.append(starts_V, rows)
    if seed is None:
        return ImageGroups(grouped_R, bounds_V1)
    order_V = Permutation(len(starts_V), seed_for(seed, "visits", *address))(np.arange(len(starts_V)))
    lengths_V = np.diff(bounds_V1)[order_V]
    ends_V = np.cumsum(lengths_V)
    from_R = np.arange(rows) + np.repeat(bounds_V1[order_V] - (ends_V - lengths_V), lengths_V)
    return ImageGroups(grouped_R[from_R], np.concatenate([[0], ends_V]))


def _shared(images_R: Hashes, share: int, key: int | None) -> tuple[Longs, Longs]:
    """The rows, those of an image together, and where each image group begins."""
    rows = len(images_R)
    _, first, group_R = np.unique(images_R, return_index=True, return_inverse=True)
    first_R = np.where(images_R == 0, np.arange(rows), first[group_R])  # groups are told apart, and ordered, by their first row
    drawn_R = (
        np.arange(rows) if key is None else mix_hash(np.arange(rows, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key))
    )
    grouped_R = np.lexsort((drawn_R, first_R))
    _, starts_G, sizes_G = np.unique(first_R[grouped_R], return_index=True, return_counts=True)
    visits_G = -(-sizes_G // share)
    group_V = np.repeat(np.arange(len(sizes_G)), visits_G)
    nth_V = np.arange(len(group_V)) - (np.cumsum(visits_G) - visits_G)[group_V]
    # the n-th of v even cuts of s rows begins at ⌈n·s / v⌉
    return grouped_R, starts_G[group_V] + -(-nth_V * sizes_G[group_V] // visits_G[group_V])
