"""Attention within documents that are stored end to end, and over a cache of keys and values.

Dims: T tokens  S documents  H query heads  G key/value heads (H is a multiple of G)  K head dim
      B rows of a cache  U tokens that a row of it has room for
"""

import inspect
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from eyeline.core.dims import dims
from eyeline.kernels.gpu import capability_of, flash_obstacle, on_gpu
from eyeline.kernels.opaque import opaque

FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # returns (out, log-sum-exp)
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
# Older kernels count key heads as if there were H of them, and read beyond the end; 2.13's was checked against a reference.
FLASH_TAKES_GROUPS = torch.__version__ >= "2.13"  # torch compares versions, not letters
LEFT_ONLY, BOTH_SIDES = (-1, 0), (-1, -1)  # varlen_attn's window: how far to see back and ahead, -1 for all


def packed_attention_plain(q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, cu_S1: Tensor, causal: bool) -> Tensor:
    """The reference: softmax(q·kᵀ/√K)·v inside each document [cu[s], cu[s+1]), one document after another."""
    dims("THK", q_THK, "TGK", k_TGK, "TGK", v_TGK)
    outs = [torch.empty_like(q_THK[:0])]
    bounds = cu_S1.tolist()
    for start, end in pairwise(bounds):
        q, k, v = (x[start:end].transpose(0, 1)[None] for x in (q_THK, k_TGK, v_TGK))  # [1, heads, tokens, K]
        outs.append(F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)[0].transpose(0, 1))
    return torch.cat(outs)


def packed_attention(q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, cu_S1: Tensor, longest: int, causal: bool) -> Tensor:
    """`packed_attention_plain`, fast. `longest` bounds the documents' lengths from above: a number on the host, so that
    it need not wait for the device. Every token must belong to a document: cu[0] = 0, cu[S] = T.

    CPU: one opaque operator, for any layout the same graph. CUDA: PyTorch's variable-length flash attention where it can compute this
    (`gpu.flash_obstacle`), else one document after another, with `cu_S1` read on the host.
    """
    dims("THK", q_THK, "TGK", k_TGK, "TGK", v_TGK)
    if not on_gpu(q_THK):
        return _Packed.apply(q_THK, k_TGK, v_TGK, cu_S1, causal)
    return _on_gpu(q_THK, k_TGK, v_TGK, cu_S1, longest, causal)


def _on_gpu(q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, cu_S1: Tensor, longest: int, causal: bool) -> Tensor:
    if not len(q_THK):  # the tower of a rank without images: kernels need not take no rows, and every gradient must be there
        return q_THK + (k_TGK.sum() + v_TGK.sum())
    if flash_obstacle(q_THK.dtype, q_THK.shape[2], capability_of(q_THK.device)) is None:
        return _varlen(q_THK, k_TGK, v_TGK, cu_S1, longest, causal)
    # as many key heads as query heads: PyTorch's memory-efficient kernel takes every dtype and GPU but no groups, and the one that
    # does take them there holds length² scores
    groups = q_THK.shape[1] // k_TGK.shape[1]
    k_THK, v_THK = (x.repeat_interleave(groups, 1) for x in (k_TGK, v_TGK))
    return packed_attention_plain(q_THK, k_THK, v_THK, cu_S1, causal)


def _varlen(q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, cu_S1: Tensor, longest: int, causal: bool) -> Tensor:
    """PyTorch's flash attention over documents of any length. torch 2.11's wants as many key heads as query heads."""
    from torch.nn.attention.varlen import varlen_attn  # brings torch's compiler, whose import takes a second

    options: dict[str, Any] = {"window_size": LEFT_ONLY if causal else BOTH_SIDES}
    groups = q_THK.shape[1] // k_TGK.shape[1]
    if groups > 1 and "enable_gqa" in inspect.signature(varlen_attn).parameters:
        options["enable_gqa"] = True
    elif groups > 1:
        k_TGK, v_TGK = (x.repeat_interleave(groups, 1) for x in (k_TGK, v_TGK))
    out_THK = varlen_attn(q_THK, k_TGK, v_TGK, cu_S1, cu_S1, longest, longest, **options)
    assert isinstance(out_THK, Tensor)  # a pair only when the log-sum-exp is asked for
    return out_THK


Groups = list[tuple[int, Tensor | slice]]  # of documents of one length: the length, rows of T


def _rows_by_length(cu_S1: Tensor) -> Groups:
    """All documents of one length together, so that each length costs one kernel call.

    Rows are a slice where those documents are neighbours, else indices, document by document.
    """
    starts: dict[int, list[int]] = {}
    bounds = cu_S1.tolist()
    for start, end in pairwise(bounds):
        if end > start:
            starts.setdefault(end - start, []).append(start)
    groups: Groups = []
    for length, firsts in starts.items():
        if firsts == list(range(firsts[0], firsts[0] + length * len(firsts), length)):
            groups.append((length, slice(firsts[0], firsts[-1] + length)))
        else:
            groups.append((length, (torch.tensor(firsts)[:, None] + torch.arange(length)).flatten()))
    return groups


def _for_flash(x_TGK: Tensor, q_THK: Tensor) -> Tensor:
    """Keys or values with as many heads as the kernel of this torch wants."""
    return x_TGK.contiguous() if FLASH_TAKES_GROUPS else x_TGK.repeat_interleave(q_THK.shape[1] // x_TGK.shape[1], 1)


def _stacked(x_THK: Tensor, rows: Tensor | slice, length: int) -> Tensor:
    """Rows of equal documents as the kernel wants them: [documents, heads, length, K], and without K of a log-sum-exp."""
    return x_THK[rows].unflatten(0, (-1, length)).transpose(1, 2)


def _end_to_end(groups: Groups, parts: Sequence[Tensor], tokens: int) -> Tensor:
    """`_stacked` of each group undone: rows in the order of the tokens."""
    ends = [x.transpose(1, 2).flatten(0, 1).contiguous() for x in parts]
    if len(ends) == 1:  # documents of one length, which make up all tokens
        return ends[0]
    out_THK = ends[0].new_empty(tokens, *ends[0].shape[1:])
    for (_, rows), x_THK in zip(groups, ends, strict=True):
        out_THK[rows] = x_THK
    return out_THK


def _like(q_THK: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q_THK, memory_format=torch.contiguous_format), q_THK.new_empty(q_THK.shape[:2], dtype=torch.float32)


@opaque(_like)
def _packed_attention(q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, cu_S1: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """out_THK and the log-sum-exp lse_TH that the backward pass needs."""
    q_THK, k_TGK, v_TGK = q_THK.contiguous(), _for_flash(k_TGK, q_THK), _for_flash(v_TGK, q_THK)
    groups = _rows_by_length(cu_S1)
    made = [FLASH(*(_stacked(x, rows, length) for x in (q_THK, k_TGK, v_TGK)), 0.0, causal) for length, rows in groups]
    if not made:
        return torch.empty_like(q_THK), q_THK.new_empty(q_THK.shape[:2], dtype=torch.float32)
    out_THK, lse_TH = (_end_to_end(groups, parts, len(q_THK)) for parts in zip(*made, strict=True))
    return out_THK, lse_TH


def _like_inputs(_dout_THK: Tensor, q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, *_: object) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q_THK, k_TGK, v_TGK))


@opaque(_like_inputs)
def _packed_attention_backward(
    dout_THK: Tensor, q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, out_THK: Tensor, lse_TH: Tensor, cu_S1: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    kv_heads = k_TGK.shape[1]
    q_THK, dout_THK, k_TGK, v_TGK = q_THK.contiguous(), dout_THK.contiguous(), _for_flash(k_TGK, q_THK), _for_flash(v_TGK, q_THK)
    inputs, groups = (dout_THK, q_THK, k_TGK, v_TGK, out_THK, lse_TH), _rows_by_length(cu_S1)
    made = [FLASH_BACKWARD(*(_stacked(x, rows, length) for x in inputs), 0.0, causal) for length, rows in groups]
    if not made:
        return torch.empty_like(q_THK), torch.empty_like(k_TGK), torch.empty_like(v_TGK)
    dq_THK, dk_TGK, dv_TGK = (_end_to_end(groups, parts, len(q_THK)) for parts in zip(*made, strict=True))
    if dk_TGK.shape[1] != kv_heads:  # heads that _for_flash repeated
        dk_TGK, dv_TGK = (x.unflatten(1, (kv_heads, -1)).sum(2) for x in (dk_TGK, dv_TGK))
    return dq_THK, dk_TGK, dv_TGK


class _Packed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, cu_S1: Tensor, causal: bool) -> Tensor:
        out_THK, lse_TH = _packed_attention(q_THK, k_TGK, v_TGK, cu_S1, causal)
        ctx.save_for_backward(q_THK, k_TGK, v_TGK, out_THK, lse_TH, cu_S1)
        ctx.causal = causal
        return out_THK

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q_THK, k_TGK, v_TGK, out_THK, lse_TH, cu_S1 = ctx.saved_tensors
        made = _packed_attention_backward(gradients[0], q_THK, k_TGK, v_TGK, out_THK, lse_TH, cu_S1, ctx.causal)
        return *made, None, None


class LayerCache:
    """Keys and values of B sequences in one layer: allocated once, filled from the left; `lengths` says how far, on the host."""

    def __init__(self, rows: int, room: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device | str):
        self.k_BUGK = torch.zeros(rows, room, kv_heads, head_dim, dtype=dtype, device=device)
        self.v_BUGK = torch.zeros_like(self.k_BUGK)
        self.lengths = [0] * rows

    def keep(self, rows: list[int]) -> None:
        """Continue with these rows only, in this order: the others have finished."""
        index_B = torch.tensor(rows, dtype=torch.int64, device=self.k_BUGK.device)
        self.k_BUGK, self.v_BUGK = self.k_BUGK[index_B], self.v_BUGK[index_B]
        self.lengths = [self.lengths[row] for row in rows]


def cached_attention(q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, cu_S1: Tensor, longest: int, cache: LayerCache) -> Tensor:
    """Causal attention of sequences that are being generated; document s belongs to row s of the cache, which grows by it.

    Prefill: an empty cache and any documents. Afterwards one token per row, which attends to its row of the cache and to itself.
    """
    rows = len(cu_S1) - 1
    assert rows == len(cache.lengths), f"{rows} documents for a cache of {len(cache.lengths)} rows"
    if len(q_THK) == rows:
        return _attend_to_rows(q_THK, k_TGK, v_TGK, cache)
    assert not any(cache.lengths), "several tokens per row fit an empty cache only"
    bounds = cu_S1.tolist()
    for row, (start, end) in enumerate(pairwise(bounds)):
        cache.k_BUGK[row, : end - start] = k_TGK[start:end]
        cache.v_BUGK[row, : end - start] = v_TGK[start:end]
        cache.lengths[row] = end - start
    return packed_attention(q_THK, k_TGK, v_TGK, cu_S1, longest, causal=True)


def _attend_to_rows(q_BHK: Tensor, k_BGK: Tensor, v_BGK: Tensor, cache: LayerCache) -> Tensor:
    """One new token per row: append its key and value, then attend to the row."""
    last_B = torch.tensor(cache.lengths, device=q_BHK.device)
    row_B = torch.arange(len(q_BHK), device=q_BHK.device)
    cache.k_BUGK[row_B, last_B] = k_BGK
    cache.v_BUGK[row_B, last_B] = v_BGK
    cache.lengths = [length + 1 for length in cache.lengths]
    used = max(cache.lengths)
    held_B11U = (torch.arange(used, device=q_BHK.device) <= last_B[:, None])[:, None, None]
    k, v = (x[:, :used].transpose(1, 2) for x in (cache.k_BUGK, cache.v_BUGK))  # [B, G, used, K]
    out = F.scaled_dot_product_attention(q_BHK[:, :, None], k, v, attn_mask=held_B11U, enable_gqa=True)
    return out[:, :, 0]
