"""Mixture of experts: choosing, sorting rows by expert, one matrix product an expert, and back.

Nothing is dropped: every token reaches all experts that it chose, however many came. The number of rows is T·A always, so
nobody asks the device how many an expert has.

Dims: T tokens  E experts  A experts a token uses  N = T·A rows, sorted by expert  D, F widths of a matrix
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from eyeline.core.dims import dims


def choose(probability_TE: Tensor, active: int, normalised: bool, bias_E: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """chosen_TA and weight_TA: the `active` likeliest experts and their probabilities, made to add up to 1 if `normalised`.

    `bias_E` is added for the choice alone: the weights are those of the unbiased probabilities.
    """
    chosen_TA = torch.topk(probability_TE if bias_E is None else probability_TE + bias_E, active, dim=-1).indices
    return chosen_TA, weights_of(probability_TE, chosen_TA, normalised)


def round_robin(tokens: int, experts: int, active: int, device: torch.device) -> Tensor:
    """chosen_TA without looking at the tokens: each expert as often as any other."""
    n_N = torch.arange(tokens * active, device=device)
    return (n_N % experts).view(tokens, active)


def weights_of(probability_TE: Tensor, chosen_TA: Tensor, normalised: bool) -> Tensor:
    weight_TA = probability_TE.gather(1, chosen_TA)
    return weight_TA / weight_TA.sum(-1, keepdim=True) if normalised else weight_TA


def by_expert(chosen_TA: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """order_N, inverse_N and ends_E (int32): row n of the sorted ones is choice order_N[n] of T·A, and expert e's rows end before
    ends_E[e]. An expert's rows stay in the order of their tokens."""
    sorted_N, order_N = torch.sort(chosen_TA.flatten(), stable=True)
    inverse_N = torch.empty_like(order_N).scatter_(0, order_N, torch.arange(len(order_N), device=order_N.device))
    ends_E = torch.searchsorted(sorted_N, torch.arange(experts, device=sorted_N.device), right=True)
    return order_N, inverse_N, ends_E.to(torch.int32)


class _Permuted(torch.autograd.Function):
    # by hand: indexing's own gradient adds into rows one after another, atomically on a GPU, and rounds each time

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, order_N: Tensor, inverse_N: Tensor) -> Tensor:
        ctx.save_for_backward(inverse_N)
        ctx.active = len(order_N) // max(len(x_TD), 1)
        return x_TD[order_N // ctx.active]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (inverse_N,) = ctx.saved_tensors
        return gradients[0][inverse_N].unflatten(0, (-1, ctx.active)).sum(1), None, None


class _Weighted(torch.autograd.Function):
    # by hand too: the gradient of a product of one row by A is an outer product, which matrix kernels are slow at

    @staticmethod
    def forward(ctx: Any, y_ND: Tensor, weight_TA: Tensor, order_N: Tensor, inverse_N: Tensor) -> Tensor:
        y_TAD = y_ND[inverse_N].unflatten(0, weight_TA.shape)
        ctx.save_for_backward(y_TAD, weight_TA, order_N)
        return torch.bmm(weight_TA[:, None], y_TAD)[:, 0]  # A sums, accumulated in float32

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        y_TAD, weight_TA, order_N = ctx.saved_tensors
        (dout_TD,), (y_needed, weight_needed, *_) = gradients, ctx.needs_input_grad
        dy_ND = (weight_TA[:, :, None] * dout_TD[:, None]).flatten(0, 1)[order_N] if y_needed else None
        dweight_TA = torch.bmm(y_TAD, dout_TD[:, :, None])[:, :, 0] if weight_needed else None
        return dy_ND, dweight_TA, None, None


def permute(x_TD: Tensor, order_N: Tensor, inverse_N: Tensor) -> Tensor:
    """x_ND: each token's row once for every expert that it chose, sorted by expert."""
    return _Permuted.apply(x_TD, order_N, inverse_N)


def unpermute(y_ND: Tensor, weight_TA: Tensor, order_N: Tensor, inverse_N: Tensor) -> Tensor:
    """y_TD: the weighted sum of what each token's experts gave."""
    return _Weighted.apply(y_ND, weight_TA.to(y_ND.dtype), order_N, inverse_N)


def grouped_matmul_plain(x_ND: Tensor, weight_EFD: Tensor, ends_E: Tensor) -> Tensor:
    """The reference: x·Wᵀ of each expert's rows with its own matrix, one expert after another. Reads `ends_E` on the host."""
    bounds = [0, *ends_E.tolist()]
    return torch.cat([x_ND[start:end] @ weight_FD.T for weight_FD, (start, end) in zip(weight_EFD, pairwise(bounds), strict=True)])


def grouped_matmul(x_ND: Tensor, weight_EFD: Tensor, ends_E: Tensor) -> Tensor:
    """`grouped_matmul_plain` as one opaque operator, for any ends the same graph. All rows must be some expert's: ends[-1] = N.

    CUDA in bfloat16: PyTorch's grouped kernel, which never asks the device. CPU, float32 (comparisons), and rows that are not a
    multiple of 16 bytes long, which that kernel does not take: expert by expert, with the ends read on the host.
    """
    dims("ND", x_ND, "EFD", weight_EFD, "E", ends_E)
    return _grouped(x_ND, weight_EFD, ends_E)


def _grouped_kernel_takes(*matrices: Tensor) -> bool:
    return all(x.is_cuda and x.dtype == torch.bfloat16 and x.shape[-1] % 8 == 0 for x in matrices)


# torch's own fake kernel of grouped_mm takes bfloat16 only, and its gradient fails on expanded ones: hence an operator of ours


@torch.library.custom_op("eyeline::grouped_matmul", mutates_args=())
def _grouped(x_ND: Tensor, weight_EFD: Tensor, ends_E: Tensor) -> Tensor:
    x_ND, weight_EFD = x_ND.contiguous(), weight_EFD.contiguous()
    out_NF = x_ND.new_empty(len(x_ND), weight_EFD.shape[1])
    if _grouped_kernel_takes(x_ND, weight_EFD, out_NF):
        return F.grouped_mm(x_ND, weight_EFD.transpose(1, 2), offs=ends_E)
    for weight_FD, (start, end) in zip(weight_EFD, pairwise([0, *ends_E.tolist()]), strict=True):
        torch.mm(x_ND[start:end], weight_FD.T, out=out_NF[start:end])
    return out_NF


@_grouped.register_fake
def _(x_ND: Tensor, weight_EFD: Tensor, _ends_E: Tensor) -> Tensor:
    return x_ND.new_empty(x_ND.shape[0], weight_EFD.shape[1])


@torch.library.custom_op("eyeline::grouped_matmul_backward", mutates_args=())
def _grouped_backward(
    dout_NF: Tensor, x_ND: Tensor, weight_EFD: Tensor, ends_E: Tensor, x_needed: bool, weight_needed: bool
) -> list[Tensor]:
    """dx_ND and dweight_EFD; an empty tensor for one that nobody needs."""
    dout_NF, x_ND, weight_EFD = dout_NF.contiguous(), x_ND.contiguous(), weight_EFD.contiguous()
    dx_ND = torch.empty_like(x_ND) if x_needed else x_ND.new_empty(0)
    dweight_EFD = torch.empty_like(weight_EFD) if weight_needed else weight_EFD.new_empty(0)
    if _grouped_kernel_takes(x_ND, weight_EFD, dout_NF):
        return [
            F.grouped_mm(dout_NF, weight_EFD, offs=ends_E) if x_needed else dx_ND,
            F.grouped_mm(dout_NF.T, x_ND, offs=ends_E) if weight_needed else dweight_EFD,
        ]
    for e, (start, end) in enumerate(pairwise([0, *ends_E.tolist()])):
        if x_needed:
            torch.mm(dout_NF[start:end], weight_EFD[e], out=dx_ND[start:end])
        if weight_needed:
            torch.mm(dout_NF[start:end].T, x_ND[start:end], out=dweight_EFD[e])
    return [dx_ND, dweight_EFD]


@_grouped_backward.register_fake
def _(_dout: Tensor, x_ND: Tensor, weight_EFD: Tensor, _ends_E: Tensor, x_needed: bool, weight_needed: bool) -> list[Tensor]:
    pairs = ((x_ND, x_needed), (weight_EFD, weight_needed))
    return [torch.empty_like(x, memory_format=torch.contiguous_format) if needed else x.new_empty(0) for x, needed in pairs]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, dout_NF: Tensor) -> tuple[Tensor | None, ...]:
    x_needed, weight_needed, _ = ctx.needs_input_grad
    dx_ND, dweight_EFD = _grouped_backward(dout_NF, *ctx.saved_tensors, x_needed, weight_needed)
    return dx_ND if x_needed else None, dweight_EFD if weight_needed else None, None


_grouped.register_autograd(_backward, setup_context=_save)
