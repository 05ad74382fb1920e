"""Depthwise causal convolution with SiLU within documents that are stored end to end, and over a cache of the last inputs.

out[t] = silu(Σ_j w[W-1-j] · x[t-j]), for j from 0 to W-1 and only where t-j is in t's document. Each channel has its own
weights. Float32 inside; the result has x's dtype.

Dims: T tokens  S documents  C channels  W kernel size  B rows of a cache
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from eyeline.core.dims import dims
from eyeline.kernels.gpu import pays
from eyeline.kernels.one_kernel import one_kernel
from eyeline.kernels.opaque import opaque


def causal_conv_plain(x_TC: Tensor, weight_CW: Tensor, cu_S1: Tensor) -> Tensor:
    """The reference: torch's convolution, one document after another."""
    sizes = dims("TC", x_TC, "CW", weight_CW)
    outs = [x_TC[:0]]
    for start, end in pairwise(cu_S1.tolist()):
        if end > start:
            x_1CT = F.pad(x_TC[start:end].float().T, (sizes["W"] - 1, 0))[None]
            outs.append(F.silu(F.conv1d(x_1CT, weight_CW.float()[:, None], groups=sizes["C"]))[0].T.to(x_TC.dtype))
    return torch.cat(outs)


def causal_conv(x_TC: Tensor, weight_CW: Tensor, cu_S1: Tensor) -> Tensor:
    """`causal_conv_plain` for all documents at once, keeping only its input for the backward pass. CPU: one opaque operator, in place where
    it can be. GPU: a kernel forward, two backward, and one for weights that train."""
    dims("TC", x_TC, "CW", weight_CW)
    return (_OneKernel if pays(x_TC) else _Convolved).apply(x_TC, weight_CW, cu_S1)


@torch.no_grad()
def cached_causal_conv(x_TC: Tensor, weight_CW: Tensor, cu_S1: Tensor, window_BWC: Tensor) -> Tensor:
    """The convolution of sequences that are being generated. `window_BWC` holds the last W-1 inputs of every row, zeros where
    there were none, and is brought up to date.

    Prefill: a window of zeros and any documents. Afterwards one token per row.
    """
    dims("TC", x_TC, "CW", weight_CW)
    rows, held = window_BWC.shape[:2]
    assert rows == len(cu_S1) - 1 and held == weight_CW.shape[1] - 1, f"a window {tuple(window_BWC.shape)} for {len(cu_S1) - 1} documents"
    if len(x_TC) == rows:
        inputs_BWC = torch.cat((window_BWC, x_TC[:, None]), 1)
        window_BWC.copy_(inputs_BWC[:, 1:])
        return F.silu((inputs_BWC.float() * weight_CW.float().T).sum(1)).to(x_TC.dtype)
    for row, (start, end) in enumerate(pairwise(cu_S1.tolist())):
        last = min(held, end - start)
        window_BWC[row, held - last :] = x_TC[end - last : end]
    return _causal_conv(x_TC, weight_CW, cu_S1)


def _same_document(tokens: int, cu_S1: Tensor, size: int) -> list[Tensor]:
    """For j = 1 ... W-1: true where token t-j is in the document of t, for t from j on, as a column."""
    age_T = _ages(tokens, cu_S1)
    return [(age_T[j:] >= j)[:, None] for j in range(1, size)]


def _before_silu(x_TC: Tensor, weight_CW: Tensor, same: list[Tensor]) -> Tensor:
    """x and the weights are in float32 here."""
    sum_TC = x_TC * weight_CW[:, -1]
    for j, same_T1 in enumerate(same, 1):
        sum_TC[j:].addcmul_(x_TC[:-j] * same_T1, weight_CW[:, -1 - j])
    return sum_TC


def _like(x_TC: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x_TC, memory_format=torch.contiguous_format)


@opaque(_like)
def _causal_conv(x_TC: Tensor, weight_CW: Tensor, cu_S1: Tensor) -> Tensor:
    same = _same_document(len(x_TC), cu_S1, weight_CW.shape[1])
    return F.silu(_before_silu(x_TC.float(), weight_CW.float(), same)).to(x_TC.dtype)


def _like_inputs(_dout_TC: Tensor, x_TC: Tensor, weight_CW: Tensor, *_: object) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (x_TC, weight_CW))


@opaque(_like_inputs)
def _causal_conv_backward(dout_TC: Tensor, x_TC: Tensor, weight_CW: Tensor, cu_S1: Tensor) -> tuple[Tensor, Tensor]:
    same = _same_document(len(x_TC), cu_S1, weight_CW.shape[1])
    x, weight = x_TC.float(), weight_CW.float()
    sum_TC = _before_silu(x, weight, same)
    sigmoid_TC = sum_TC.sigmoid()
    dsum_TC = dout_TC.float() * sigmoid_TC * (1 + sum_TC * (1 - sigmoid_TC))
    dx_TC = dsum_TC * weight[:, -1]
    dweight_WC = torch.empty_like(weight.T)
    dweight_WC[-1] = (dsum_TC * x).sum(0)
    for j, same_T1 in enumerate(same, 1):
        later = dsum_TC[j:] * same_T1
        dx_TC[:-j].addcmul_(later, weight[:, -1 - j])
        dweight_WC[-1 - j] = later.mul_(x[:-j]).sum(0)
    return dx_TC.to(x_TC.dtype), dweight_WC.T.contiguous().to(weight_CW.dtype)


class _Convolved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TC: Tensor, weight_CW: Tensor, cu_S1: Tensor) -> Tensor:
        ctx.save_for_backward(x_TC, weight_CW, cu_S1)
        return _causal_conv(x_TC, weight_CW, cu_S1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return *_causal_conv_backward(gradients[0], *ctx.saved_tensors), None


# ---- on a GPU


def _ages(tokens: int, cu_S1: Tensor) -> Tensor:
    """How many tokens of its document come before each."""
    t_T = torch.arange(tokens, device=cu_S1.device, dtype=cu_S1.dtype)
    return t_T - cu_S1[torch.searchsorted(cu_S1, t_T, right=True) - 1]


def _earlier(x_TC: Tensor, age_T: Tensor, j: int) -> Tensor:
    """x[t-j], and zero where that is in another document."""
    return torch.where((age_T >= j)[:, None], F.pad(x_TC, (0, 0, j, 0))[: len(x_TC)], 0)


def _summed(x_TC: Tensor, weight_CW: Tensor, age_T: Tensor) -> Tensor:
    sum_TC = x_TC.float() * weight_CW[:, -1].float()
    for j in range(1, weight_CW.shape[1]):
        sum_TC = sum_TC + _earlier(x_TC.float(), age_T, j) * weight_CW[:, -1 - j].float()
    return sum_TC


@one_kernel
def _conv_forward(x_TC: Tensor, weight_CW: Tensor, age_T: Tensor) -> Tensor:
    return F.silu(_summed(x_TC, weight_CW, age_T)).to(x_TC.dtype)


@one_kernel
def _conv_gradient(dout_TC: Tensor, x_TC: Tensor, weight_CW: Tensor, age_T: Tensor) -> Tensor:
    """The gradient of what SiLU gets, in float32."""
    sum_TC = _summed(x_TC, weight_CW, age_T)
    sigmoid_TC = sum_TC.sigmoid()
    return dout_TC.float() * sigmoid_TC * (1 + sum_TC * (1 - sigmoid_TC))


@one_kernel
def _conv_input(dsum_TC: Tensor, weight_CW: Tensor, age_T: Tensor, dtype: torch.dtype) -> Tensor:
    """The gradient of x."""
    dx_TC = dsum_TC * weight_CW[:, -1].float()
    for j in range(1, weight_CW.shape[1]):
        masked_TC = torch.where((age_T >= j)[:, None], dsum_TC, 0)
        dx_TC = dx_TC + F.pad(masked_TC, (0, 0, 0, j))[j:] * weight_CW[:, -1 - j].float()
    return dx_TC.to(dtype)


@one_kernel
def _conv_weight(dsum_TC: Tensor, x_TC: Tensor, weight_CW: Tensor, age_T: Tensor) -> Tensor:
    taps = [_earlier(x_TC.float(), age_T, j) for j in range(weight_CW.shape[1] - 1, 0, -1)]
    return torch.stack([(dsum_TC * tap_TC).sum(0) for tap_TC in (*taps, x_TC.float())], 1).to(weight_CW.dtype)


class _OneKernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TC: Tensor, weight_CW: Tensor, cu_S1: Tensor) -> Tensor:
        age_T = _ages(len(x_TC), cu_S1)
        ctx.save_for_backward(x_TC, weight_CW, age_T)
        return _conv_forward(x_TC, weight_CW, age_T)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_TC, weight_CW, age_T = ctx.saved_tensors
        dsum_TC = _conv_gradient(gradients[0], x_TC, weight_CW, age_T)
        dx_TC = _conv_input(dsum_TC, weight_CW, age_T, x_TC.dtype) if ctx.needs_input_grad[0] else None
        return dx_TC, _conv_weight(dsum_TC, x_TC, weight_CW, age_T) if ctx.needs_input_grad[1] else None, None
