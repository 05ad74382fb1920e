"""Rows of tensors that ranks exchange within a model, with the gradients: the only file that calls collectives there. Rows are dim 0.

Dims: T rows  H heads
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from eyeline.kernels.opaque import opaque

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# torch 2.13 has new names for them, and warns of the old ones, which are all that 2.11 has
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_c10d: Any = dist.distributed_c10d  # the one that finds a group by its name is private


def _ranks(name: str) -> Any:
    return _c10d._resolve_process_group(name)


# Operators of ours, so that a compiled block is one graph with its collectives inside: ranks are known by the name of their group


@opaque(lambda x, _, n: x.new_empty(x.shape[0] * n, *x.shape[1:]))
def _gather(x: Tensor, ranks: str, n: int) -> Tensor:
    out = x.new_empty(len(x) * n, *x.shape[1:])
    _all_gather(out, x.contiguous(), group=_ranks(ranks))
    return out


@opaque(lambda x, _, n: x.new_empty(x.shape[0] // n, *x.shape[1:]))
def _sum_parts(x: Tensor, ranks: str, n: int) -> Tensor:
    out = x.new_empty(len(x) // n, *x.shape[1:])
    _reduce_scatter(out, x.contiguous(), group=_ranks(ranks))
    return out


@opaque(lambda x, _: torch.empty_like(x))
def _sum(x: Tensor, ranks: str) -> Tensor:
    out = x.clone()
    dist.all_reduce(out, group=_ranks(ranks))
    return out


@opaque(lambda x, _sends, receives, _ranks: x.new_empty(sum(receives), *x.shape[1:]))
def _exchange(x: Tensor, sends: list[int], receives: list[int], ranks: str) -> Tensor:
    out = x.new_empty(sum(receives), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), receives, sends, group=_ranks(ranks))
    return out


def gathered(x: Tensor, ranks: "ProcessGroup") -> Tensor:
    """The rows of all ranks, in their order. Without gradients."""
    return _gather(x, ranks.group_name, ranks.size())


def exchanged(x: Tensor, sends: Sequence[int], receives: Sequence[int], ranks: "ProcessGroup") -> Tensor:
    """sends[r] rows go to rank r, receives[r] come from it. Without gradients."""
    return _exchange(x, list(sends), list(receives), ranks.group_name)


def summed(x: Tensor, ranks: "ProcessGroup") -> Tensor:
    """The sum over ranks. Without gradients."""
    return _sum(x, ranks.group_name)


def _summed(x: Tensor, ranks: "ProcessGroup") -> Tensor:
    return _sum_parts(x, ranks.group_name, ranks.size())


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Any) -> Tensor:
        ctx.ranks = ranks
        return gathered(x, ranks)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _summed(gradients[0], ctx.ranks), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Any) -> Tensor:
        ctx.ranks = ranks
        return _summed(x, ranks)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gathered(gradients[0], ctx.ranks), None


class _SomeGathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: Sequence[int], ranks: Any) -> Tensor:
        ctx.counts, ctx.ranks, n = counts, ranks, ranks.size()
        return exchanged(x.repeat(n, *[1] * (x.ndim - 1)), [len(x)] * n, counts, ranks)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        n, own = ctx.ranks.size(), ctx.counts[ctx.ranks.rank()]
        parts = exchanged(gradients[0], ctx.counts, [own] * n, ctx.ranks)
        return parts.unflatten(0, (n, own)).sum(0, dtype=torch.float32).to(parts.dtype), None, None


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sends: Sequence[int], receives: Sequence[int], ranks: Any) -> Tensor:
        ctx.sends, ctx.receives, ctx.ranks = sends, receives, ranks
        return exchanged(x, sends, receives, ranks)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return exchanged(gradients[0], ctx.receives, ctx.sends, ctx.ranks), None, None, None


def gather_rows(x: Tensor, ranks: "ProcessGroup") -> Tensor:
    """The rows of all ranks, in their order; gradients are summed over ranks, and each keeps those of its rows."""
    return _Gathered.apply(x, ranks)  # type: ignore[return-value]


def gather_some(x: Tensor, counts: Sequence[int], ranks: "ProcessGroup") -> Tensor:
    """As `gather_rows`, where rank r has counts[r] rows. Gradients are summed in float32."""
    return _SomeGathered.apply(x, counts, ranks)  # type: ignore[return-value]


def sum_rows(x: Tensor, ranks: "ProcessGroup") -> Tensor:
    """The sum over ranks, of which each keeps its part of the rows."""
    return _Summed.apply(x, ranks)  # type: ignore[return-value]


def exchange_rows(x: Tensor, sends: Sequence[int], receives: Sequence[int], ranks: "ProcessGroup") -> Tensor:
    """sends[r] rows go to rank r, receives[r] come from it."""
    return _Exchanged.apply(x, sends, receives, ranks)  # type: ignore[return-value]


def rows_to_heads(x_TH: Tensor, ranks: "ProcessGroup") -> Tensor:
    """[T/n, H, …] -> [T, H/n, …]: from some rows of all heads to all rows of some heads."""
    n, (rows, heads) = ranks.size(), x_TH.shape[:2]
    by_rank = x_TH.unflatten(1, (n, heads // n)).transpose(0, 1).flatten(0, 1)
    return exchange_rows(by_rank, [rows] * n, [rows] * n, ranks)


def heads_to_rows(x_TH: Tensor, ranks: "ProcessGroup") -> Tensor:
    """[T, H/n, …] -> [T/n, H, …], the way back."""
    n = ranks.size()
    rows = len(x_TH) // n
    by_rank = exchange_rows(x_TH, [rows] * n, [rows] * n, ranks)
    return by_rank.unflatten(0, (n, rows)).transpose(0, 1).flatten(1, 2)
