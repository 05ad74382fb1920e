"""Cross-entropy of labelled rows, in chunks: the full logits never exist in training.

Dims: L labelled rows  D width  V vocabulary  R rows of one chunk  N rows of the vocabulary that are trained apart
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from eyeline.core.batch import IGNORE
from eyeline.core.dims import dims
from eyeline.kernels import float32
from eyeline.kernels.gpu import on_gpu
from eyeline.kernels.one_kernel import one_kernel

# float32 logits alive at once. CPU: 64 MiB, some 110 rows of a vocabulary of 151,936, whose pages stay in use from chunk to
# chunk. GPU: 512 MiB, some 880 rows, so that a product of matrices is not slower in chunks.
LOGITS_PER_CHUNK = {"cpu": 1 << 24, "cuda": 1 << 27}


def summed_cross_entropy_plain(x_LD: Tensor, weight_VD: Tensor, labels_L: Tensor) -> Tensor:
    """The reference: all logits at once. -log softmax(x·Wᵀ)[label], summed over rows whose label is not IGNORE, in float32."""
    logits_LV = (x_LD @ weight_VD.to(x_LD.dtype).T).float()
    return F.cross_entropy(logits_LV, labels_L, ignore_index=IGNORE, reduction="sum")


def summed_cross_entropy(
    x_LD: Tensor,
    weight_VD: Tensor,
    labels_L: Tensor,
    chunk: int | None = None,
    rows_ND: Tensor | None = None,
    first: int = 0,
) -> Tensor:
    """`summed_cross_entropy_plain`, `chunk` rows at a time. Products are in x's dtype, softmax and sums in float32.

    Gradients are made in the forward pass, while a chunk's logits are there, and only scaled in the backward pass; the
    weight's is accumulated in float32 and skipped where the weight is frozen. Without autograd only the loss is computed.
    `chunk` is chosen from the vocabulary when it is None; it changes memory and speed, and the result by rounding only.
    `rows_ND` are taken in place of the weight's rows from `first` on: they can train while the weight is frozen.
    """
    sizes = dims("LD", x_LD, "VD", weight_VD, "L", labels_L)
    chunk = chunk or max(1, LOGITS_PER_CHUNK["cuda" if on_gpu(x_LD) else "cpu"] // sizes["V"])
    assert rows_ND is None or not weight_VD.requires_grad, "rows are trained apart from a weight that is frozen"
    if torch.is_grad_enabled() and (x_LD.requires_grad or weight_VD.requires_grad or (rows_ND is not None and rows_ND.requires_grad)):
        return _Chunked.apply(x_LD, weight_VD, labels_L, chunk, rows_ND, first)
    weight_VD = weight_VD.to(x_LD.dtype)
    if rows_ND is not None:
        weight_VD = torch.cat([weight_VD[:first], rows_ND.to(x_LD.dtype), weight_VD[first + len(rows_ND) :]])
    losses = [summed_cross_entropy_plain(x_RD, weight_VD, labels_R) for x_RD, labels_R in _chunks(x_LD, labels_L, chunk)]
    return sum(losses, x_LD.new_zeros((), dtype=torch.float32))


def _chunks(x_LD: Tensor, labels_L: Tensor, chunk: int) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x_LD.split(chunk), labels_L.split(chunk), strict=True)) if len(x_LD) else []


def logits_of(x_RD: Tensor, weight_VD: Tensor) -> Tensor:
    """In float32, summed in it on a GPU; on a CPU as products are there."""
    return float32.product(x_RD, weight_VD.T) if on_gpu(x_RD) else (x_RD @ weight_VD.T).float()


# Gradients of logits are made before the factor of the loss is known (`_Chunked`), and are 1 at most: float16 would round those
# below 3e-8 to zero. There they are this much larger, and their products, which float16 could not hold, are in float32.
FLOAT16_GAIN = 1024.0


def gain_of(dtype: torch.dtype) -> float:
    """What gradients of logits are multiplied by before they are rounded to `dtype`: what follows from them is divided by it."""
    return FLOAT16_GAIN if dtype == torch.float16 else 1.0


def gradient_product(a_TD: Tensor, b_DE: Tensor) -> Tensor:
    """a·b of gradients of logits: of float16 in float32, else in their dtype."""
    return float32.product(a_TD, b_DE) if a_TD.dtype == torch.float16 else a_TD @ b_DE


def gradient_like(x: Tensor) -> Tensor:
    """Memory for what products of gradients of logits give."""
    return torch.empty_like(x, dtype=torch.float32 if x.dtype == torch.float16 else x.dtype)


def times_loss(made: Sequence[Tensor | None], dtypes: Sequence[torch.dtype | None], dloss: Tensor, gain: float) -> list[Tensor | None]:
    """Gradients that were made in the forward pass, scaled in place and cast."""
    factor = dloss if gain == 1 else dloss / gain
    return [None if x is None else x.mul_(factor).to(dtype) for x, dtype in zip(made, dtypes, strict=True)]


@one_kernel
def logits_gradient(logp_RV: Tensor, labels_R: Tensor, dtype: torch.dtype, gain: float = 1.0) -> Tensor:
    """softmax - one-hot, and nothing in a row without a label; times `gain`."""
    picked_RV = torch.arange(logp_RV.shape[1], device=labels_R.device) == labels_R[:, None]
    made_RV = torch.where((labels_R != IGNORE)[:, None], logp_RV.exp() - picked_RV.float(), 0)
    return (made_RV if gain == 1 else made_RV * gain).to(dtype)


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_LD: Tensor, weight_VD: Tensor, labels_L: Tensor, chunk: int, rows_ND: Tensor | None, first: int) -> Tensor:
        (x_needed, weight_needed), gain = ctx.needs_input_grad[:2], gain_of(x_LD.dtype)
        cast_VD = weight_VD.to(x_LD.dtype)
        apart = slice(first, first + (0 if rows_ND is None else len(rows_ND)))
        cast_ND = None if rows_ND is None else rows_ND.to(x_LD.dtype)
        drows_ND = None if rows_ND is None else torch.zeros_like(rows_ND, dtype=torch.float32)
        loss = x_LD.new_zeros((), dtype=torch.float32)
        dx_LD = gradient_like(x_LD) if x_needed else None
        dweight_VD = torch.zeros_like(weight_VD, dtype=torch.float32) if weight_needed else None
        start = 0
        for x_RD, labels_R in _chunks(x_LD, labels_L, chunk):
            rows = slice(start, start := start + len(x_RD))
            logits_RV = logits_of(x_RD, cast_VD)
            if cast_ND is not None:
                logits_RV[:, apart] = logits_of(x_RD, cast_ND)
            logp_RV = F.log_softmax(logits_RV, -1)
            loss += F.nll_loss(logp_RV, labels_R, ignore_index=IGNORE, reduction="sum")
            if on_gpu(logp_RV):
                dlogits_RV = logits_gradient(logp_RV, labels_R, x_LD.dtype, gain)
            else:
                dlogits_RV = logp_RV.exp_()  # softmax - one-hot, and nothing in a row without a label
                wanted_R1 = (labels_R != IGNORE)[:, None]
                dlogits_RV.scatter_add_(1, labels_R[:, None] * wanted_R1, -wanted_R1.to(dlogits_RV.dtype))
                dlogits_RV = dlogits_RV.mul_(wanted_R1 if gain == 1 else wanted_R1 * gain).to(x_LD.dtype)
            dnew_RN = dlogits_RV[:, apart].clone()
            dlogits_RV[:, apart] = 0
            if dx_LD is not None:
                dx_LD[rows] = gradient_product(dlogits_RV, cast_VD)
            if drows_ND is not None and cast_ND is not None:
                drows_ND += gradient_product(dnew_RN.T, x_RD)
                if dx_LD is not None:
                    dx_LD[rows] += gradient_product(dnew_RN, cast_ND)
            if dweight_VD is not None and x_RD.dtype == torch.float32:
                dweight_VD.addmm_(dlogits_RV.T, x_RD)  # no extra product as large as the weight
            elif dweight_VD is not None:
                dweight_VD += gradient_product(dlogits_RV.T, x_RD)
        ctx.gradients = (dx_LD, dweight_VD, drows_ND)
        ctx.dtypes = (x_LD.dtype, weight_VD.dtype, None if rows_ND is None else rows_ND.dtype)
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        # handed over, not saved: scaled in place, they would be wrong in a second backward pass, which fails here instead
        made, ctx.gradients = ctx.gradients, None
        dx_LD, dweight_VD, drows_ND = times_loss(made, ctx.dtypes, gradients[0], gain_of(ctx.dtypes[0]))
        return dx_LD, dweight_VD, None, None, drows_ND, None
