"""Sizes of rows under one budget: tokens, patches and costs, from the index of their shard. What cannot be used is rejected here.

Rows that are too long are read from their source again, where some turns of them may still fit (`overlong: drop_turns`): besides making
indexes, that is all that planning asks of the data.

Dims: R rows of a shard  M media  N different sizes of media
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eyeline.core.batch import Budget, Sample
from eyeline.core.cost import Cost
from eyeline.core.errors import BadSample
from eyeline.core.recent import Recent
from eyeline.data.images.patches import units_of
from eyeline.data.plan.index import KEPT_OPEN, Index
from eyeline.data.plan.order import Longs
from eyeline.data.plan.shard_index import ShardIndex
from eyeline.data.text.documents import Measured, Overlong, fit_to_limits, too_long


@dataclass(frozen=True, eq=False)
class Sized:
    """The rows of a shard under one budget."""

    tokens_R: Longs  # of the document, visual ones included
    visual_R: Longs
    supervised_R: Longs
    patches_R: Longs
    language_R: Longs  # cost of the language model on it
    vision_R: Longs  # cost of the tower on its images
    usable_R: NDArray[np.bool_]
    messages: dict[int, int]  # of rows that are shrunk: how many messages are kept
    rejects: dict[int, tuple[str, str, str]]  # rows that cannot be used -> cause, field, message


@dataclass(frozen=True, eq=False)
class Sizing:
    """Sizes of rows under one budget, a shard at a time."""

    index: Index
    budget: Budget
    longest: int  # tokens that one document may have: those of the budget, or fewer if the model has fewer positions
    overlong: Overlong
    cost: Cost
    _known: Recent[tuple[int, int], Sized] = field(default_factory=Recent, repr=False)

    def __call__(self, source: int, shard: int) -> Sized:
        known = self._known.get((source, shard))
        if known is None:
            known = self._known.keep((source, shard), self._sized(source, shard, self.index.shard(source, shard)), KEPT_OPEN)
        return known

    def _sized(self, source: int, shard: int, index: ShardIndex) -> Sized:
        unique_N3, size_M = np.unique(index.sizes_M3, axis=0, return_inverse=True)
        per_size = [self._of_size(tuple(size[0 if size[0] else 1 :])) for size in unique_N3.tolist()]
        table_N4 = np.array([(0,) * 4 if isinstance(s, BadSample) else s for s in per_size], np.int64).reshape(-1, 4)
        media_R4 = np.diff(np.concatenate([np.zeros((1, 4), np.int64), np.cumsum(table_N4[size_M.ravel()], 0)])[index.media_R1], axis=0)
        visual_R, marks_R, patches_R, squares_R = media_R4.T
        tokens_R = np.diff(index.bounds_R1) - np.diff(index.places_R1) + visual_R + marks_R
        supervised_R = np.diff(np.concatenate([[0], np.cumsum(index.trained_U)])[index.bounds_R1])
        rejects = dict(index.rejects)
        for row in np.flatnonzero(~index.bad_R & self._any(index, np.array([isinstance(s, BadSample) for s in per_size], bool), size_M)):
            bad = next(s for n in size_M.ravel()[index.media_R1[row] : index.media_R1[row + 1]] if isinstance(s := per_size[n], BadSample))
            rejects[int(row)] = (bad.cause, bad.field, bad.message)
        messages: dict[int, int] = {}
        for row in np.flatnonzero((tokens_R > self.longest) | (patches_R > self.budget.patches)).tolist():
            if row in rejects:
                continue
            try:
                if self.overlong == "reject":
                    raise too_long(int(tokens_R[row]), self.longest, int(patches_R[row]), self.budget.patches)
                kept, size = self._read_again(index, source, shard, row)
            except BadSample as bad:
                rejects[row] = (bad.cause, bad.field, bad.message)
                continue
            messages[row] = len(kept.messages)
            units = [unit for item in index.sizes(row)[: len(kept.media)] for unit in self._units(item)]
            tokens_R[row], visual_R[row], supervised_R[row], patches_R[row] = size.tokens, size.visual, size.supervised, size.patches
            squares_R[row] = sum(unit.grid.patches**2 for unit in units)
        usable_R = np.ones(len(index), bool)
        usable_R[list(rejects)] = False
        language_R = self.cost.token * tokens_R + self.cost.pair * (tokens_R * (tokens_R + 1) // 2) + self.cost.label * supervised_R
        vision_R = self.cost.patch * patches_R + self.cost.patch_pair * squares_R
        return Sized(tokens_R, visual_R, supervised_R, patches_R, language_R, vision_R, usable_R, messages, rejects)

    def _read_again(self, index: ShardIndex, source: int, shard: int, row: int) -> tuple[Sample, Measured]:
        """A row that is too long, read from its source and cut to the turns that fit. BadSample where none do."""
        sample = self.index.sources[source].read(index.place(shard, row))
        return fit_to_limits(
            sample, index.sizes(row), self.longest, self.budget.patches, self.overlong, self.index.encoder, self.index.rule
        )

    def _units(self, size: Any) -> tuple[Any, ...]:
        return units_of(size, self.index.rule) if self.index.rule else ()

    def _of_size(self, size: Any) -> tuple[int, int, int, int] | BadSample:
        """Visual tokens, marks, patches and their squares of a media item of this size."""
        try:
            units = self._units(size)
        except BadSample as bad:
            return bad
        patches = [unit.grid.patches for unit in units]
        return sum(unit.tokens for unit in units), sum(unit.mark is not None for unit in units), sum(patches), sum(p * p for p in patches)

    @staticmethod
    def _any(index: ShardIndex, bad_N: NDArray[np.bool_], size_M: Longs) -> NDArray[np.bool_]:
        """A mask of the rows with a media item of a bad size."""
        return np.diff(np.concatenate([[0], np.cumsum(bad_N[size_M.ravel()])])[index.media_R1]) > 0
