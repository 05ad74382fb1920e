"""The rows of a pack that one rank has: whatever names rows is cut and renumbered, on the host, so that a model needs no word of it.

Ranks that share a pack have consecutive parts of its rows: over cp, and within a part over tp. A branch that tensor parallelism cuts
gathers the rows of its tp ranks, so positions and draws are those of all of them; bounds of documents stay the pack's.
"""

from dataclasses import replace

import torch
from torch import Tensor

from eyeline.core.batch import Batch
from eyeline.parallel.mesh import MeshSizes


def rows_of(batch: Batch, sizes: MeshSizes, cp_rank: int, tp_rank: int) -> Batch:
    """The part of a pack that the rank at these places has. `counts` stay the pack's."""
    if sizes.per_pack == 1:
        return batch
    batch = padded(batch, len(batch.tokens_T) + -len(batch.tokens_T) % sizes.per_pack)
    total = len(batch.tokens_T)
    wide, rows = total // sizes.cp, total // sizes.per_pack
    start = cp_rank * wide + tp_rank * rows
    of_tp, own = slice(cp_rank * wide, (cp_rank + 1) * wide), slice(start, start + rows)

    def here(x: Tensor) -> Tensor:
        return (x >= start) & (x < start + rows)

    wanted, visual = here(batch.rows_L), here(batch.visual_M)
    return replace(
        batch,
        tokens_T=batch.tokens_T[own],
        real_T=batch.real_T[own],
        positions_T3=batch.positions_T3[of_tp],
        draws_T2=None if batch.draws_T2 is None else batch.draws_T2[of_tp],
        rows_L=batch.rows_L[wanted] - start,
        labels_L=None if batch.labels_L is None else batch.labels_L[wanted],
        visual_M=batch.visual_M[visual] - start,
        sources_M=batch.sources_M[visual],
        top_LK=None if batch.top_LK is None else batch.top_LK[wanted],
        logp_LK=None if batch.logp_LK is None else batch.logp_LK[wanted],
        label_counts=_label_counts(batch, cp_rank * wide, rows, sizes.tp) if sizes.vocab_parallel else None,
        ahead=None,
    )


def _label_counts(batch: Batch, start: int, rows: int, ranks: int) -> tuple[int, ...]:
    """The labelled rows of each of some ranks, which have so many rows each, from `start` on."""
    bounds = torch.arange(start, start + rows * (ranks + 1), rows)
    return tuple(((batch.rows_L >= bounds[:-1, None]) & (batch.rows_L < bounds[1:, None])).sum(1).tolist())


def padded(batch: Batch, tokens: int) -> Batch:
    """The same pack with so many rows: empty packs and those of validation are not filled up to a budget."""
    more = tokens - len(batch.tokens_T)
    if more == 0:
        return batch

    def longer(x: Tensor) -> Tensor:
        return torch.cat([x, x.new_zeros(more, *x.shape[1:])])

    return replace(
        batch,
        tokens_T=longer(batch.tokens_T),
        real_T=longer(batch.real_T),
        positions_T3=longer(batch.positions_T3),
        draws_T2=None if batch.draws_T2 is None else longer(batch.draws_T2),
        cu_S1=torch.cat([batch.cu_S1, batch.cu_S1[-1:] + more]),
        longest=max(batch.longest, more),
    )
