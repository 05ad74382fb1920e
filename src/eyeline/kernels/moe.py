"""Mixture of experts (MoE): choosing, sorting rows by expert, each expert's feed-forward layer over its rows, and back.

Nothing is dropped: every token reaches all experts that it chose. The number of rows is always T·A, so the host never waits for
the device to count the rows of an expert.

Dims: T tokens  E experts  A experts per token  N = T·A rows, sorted by expert  D width  F feed-forward of one expert
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from eyeline.core.dims import dims
from eyeline.kernels.gpu import capability_of, grouped_obstacle, on_gpu, pays
from eyeline.kernels.one_kernel import one_kernel
from eyeline.kernels.opaque import opaque
from eyeline.kernels.swiglu import swiglu_backward, swiglu_forward


def choose(probability_TE: Tensor, active: int, normalised: bool, bias_E: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """chosen_TA and weight_TA: the `active` likeliest experts and their probabilities, made to add up to 1 if `normalised`.

    `bias_E` is added for the choice alone: the weights are those of the unbiased probabilities.
    """
    chosen_TA = torch.topk(probability_TE if bias_E is None else probability_TE + bias_E, active, dim=-1).indices
    return chosen_TA, weights_of(probability_TE, chosen_TA, normalised)


def round_robin(tokens: int, experts: int, active: int, device: torch.device) -> Tensor:
    """chosen_TA independent of the tokens: each expert as often as any other (round-robin)."""
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
        ctx.active = max(len(order_N) // max(len(x_TD), 1), 1)  # of no rows, too, which a rank may have
        return x_TD.index_select(0, order_N // ctx.active)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (inverse_N,) = ctx.saved_tensors
        if pays(gradients[0]):
            return _summed_rows(gradients[0], inverse_N.unflatten(0, (-1, ctx.active))), None, None
        return gradients[0].index_select(0, inverse_N).unflatten(0, (-1, ctx.active)).sum(1), None, None


class _Weighted(torch.autograd.Function):
    # by hand too: the gradient of a product of one row by A is an outer product, which matrix kernels are slow at

    @staticmethod
    def forward(ctx: Any, y_ND: Tensor, weight_TA: Tensor, order_N: Tensor, inverse_N: Tensor) -> Tensor:
        y_TAD = y_ND.index_select(0, inverse_N).unflatten(0, weight_TA.shape)
        ctx.save_for_backward(y_TAD, weight_TA, order_N)
        return torch.bmm(weight_TA[:, None], y_TAD)[:, 0]  # A sums, accumulated in float32

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        y_TAD, weight_TA, order_N = ctx.saved_tensors
        (dout_TD,), (y_needed, weight_needed, *_) = gradients, ctx.needs_input_grad
        dy_ND = (weight_TA[:, :, None] * dout_TD[:, None]).flatten(0, 1).index_select(0, order_N) if y_needed else None
        dweight_TA = torch.bmm(y_TAD, dout_TD[:, :, None])[:, :, 0] if weight_needed else None
        return dy_ND, dweight_TA, None, None


# ---- on a GPU: rows are looked up where they are summed, weighted or compared, and never gathered in memory first


@one_kernel
def _summed_rows(x_ND: Tensor, rows_TA: Tensor) -> Tensor:
    return x_ND[rows_TA].float().sum(1).to(x_ND.dtype)


@one_kernel
def _weighted_rows(y_ND: Tensor, weight_TA: Tensor, rows_TA: Tensor) -> Tensor:
    return (y_ND[rows_TA].float() * weight_TA[..., None].float()).sum(1).to(y_ND.dtype)


@one_kernel
def _scaled_rows(dout_TD: Tensor, weight_TA: Tensor, order_N: Tensor) -> Tensor:
    weight_N = weight_TA.flatten()[order_N]
    return (dout_TD[order_N // weight_TA.shape[1]].float() * weight_N[:, None].float()).to(dout_TD.dtype)


@one_kernel
def _products_of_rows(y_ND: Tensor, dout_TD: Tensor, rows_TA: Tensor) -> Tensor:
    return (y_ND[rows_TA].float() * dout_TD[:, None].float()).sum(-1).to(y_ND.dtype)


class _OneKernel(torch.autograd.Function):
    """`_Weighted`, which keeps what the experts gave as it is."""

    @staticmethod
    def forward(ctx: Any, y_ND: Tensor, weight_TA: Tensor, order_N: Tensor, inverse_N: Tensor) -> Tensor:
        rows_TA = inverse_N.unflatten(0, weight_TA.shape)
        ctx.save_for_backward(y_ND, weight_TA, order_N, rows_TA)
        return _weighted_rows(y_ND, weight_TA, rows_TA)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        y_ND, weight_TA, order_N, rows_TA = ctx.saved_tensors
        (dout_TD,), (y_needed, weight_needed, *_) = gradients, ctx.needs_input_grad
        dy_ND = _scaled_rows(dout_TD, weight_TA, order_N) if y_needed else None
        return dy_ND, _products_of_rows(y_ND, dout_TD, rows_TA) if weight_needed else None, None, None


def permute(x_TD: Tensor, order_N: Tensor, inverse_N: Tensor) -> Tensor:
    """x_ND: each token's row once for every expert that it chose, sorted by expert."""
    return _Permuted.apply(x_TD, order_N, inverse_N)


def unpermute(y_ND: Tensor, weight_TA: Tensor, order_N: Tensor, inverse_N: Tensor) -> Tensor:
    """y_TD: the weighted sum of what each token's experts gave."""
    return (_OneKernel if pays(y_ND) else _Weighted).apply(y_ND, weight_TA.to(y_ND.dtype), order_N, inverse_N)


def grouped_swiglu_plain(x_ND: Tensor, gate_EFD: Tensor, up_EFD: Tensor, down_EDF: Tensor, ends_E: Tensor) -> Tensor:
    """The reference: `(silu(x·gateᵀ) · x·upᵀ)·downᵀ` of each expert's rows, one expert after another. Reads `ends_E` on the host."""
    outs = []
    for e, (start, end) in enumerate(pairwise([0, *ends_E.tolist()])):
        hidden_NF = F.silu(x_ND[start:end] @ gate_EFD[e].T) * (x_ND[start:end] @ up_EFD[e].T)
        outs.append(hidden_NF @ down_EDF[e].T)
    return torch.cat(outs)


def grouped_swiglu(x_ND: Tensor, gate_EFD: Tensor, up_EFD: Tensor, down_EDF: Tensor, ends_E: Tensor) -> Tensor:
    """`grouped_swiglu_plain` as one opaque operator, for any ends the same graph. All rows must be some expert's: ends[-1] = N.

    CUDA in bfloat16: PyTorch's grouped kernel, which never asks the device on compute capability 9.x and 10.x, and reads the ends on the
    host elsewhere (`gpu.grouped_waits`). CPU, float32, older GPUs, and rows that are not a multiple of 16 bytes long, which that kernel
    does not take: expert by expert, with the ends read on the host.
    """
    dims("ND", x_ND, "EFD", gate_EFD, "EFD", up_EFD, "EDF", down_EDF, "E", ends_E)
    return _Swiglu.apply(x_ND, gate_EFD, up_EFD, down_EDF, ends_E)


def _kernel_takes(*matrices: Tensor) -> bool:
    if not all(on_gpu(x) and x.shape[-1] % 8 == 0 for x in matrices):
        return False
    return all(grouped_obstacle(x.dtype, capability_of(x.device)) is None for x in matrices)


def _times(x_NF: Tensor, weight_EFD: Tensor, ends_E: Tensor) -> Tensor:
    """x·W of each expert's rows with its own matrix, which may be a transposed one."""
    out_ND = x_NF.new_empty(len(x_NF), weight_EFD.shape[2])
    if _kernel_takes(x_NF, weight_EFD, out_ND):
        return F.grouped_mm(x_NF, weight_EFD, offs=ends_E)
    for weight_FD, (start, end) in zip(weight_EFD.unbind(), pairwise([0, *ends_E.tolist()]), strict=True):
        torch.mm(x_NF[start:end], weight_FD, out=out_ND[start:end])
    return out_ND


def _gradient(dout_NF: Tensor, x_ND: Tensor, ends_E: Tensor) -> Tensor:
    """doutᵀ·x of each expert's rows: the gradient of its matrix [F, D]."""
    if _kernel_takes(dout_NF, x_ND):
        dweight_EFD = F.grouped_mm(dout_NF.T, x_ND, offs=ends_E)
        # on Blackwell that kernel leaves the gradient of an expert without rows as the memory was (PyTorch's issue 172439)
        return _without_unused(dweight_EFD, ends_E) if capability_of(x_ND.device)[0] == 10 else dweight_EFD
    dweight_EFD = x_ND.new_empty(len(ends_E), dout_NF.shape[1], x_ND.shape[1])
    for dweight_FD, (start, end) in zip(dweight_EFD.unbind(), pairwise([0, *ends_E.tolist()]), strict=True):
        torch.mm(dout_NF[start:end].T, x_ND[start:end], out=dweight_FD)
    return dweight_EFD


def _without_unused(dweight_EFD: Tensor, ends_E: Tensor) -> Tensor:
    """The gradient with zeros for experts that had no rows, whatever stood there."""
    unused_E = ends_E.diff(prepend=ends_E.new_zeros(1)) == 0
    return dweight_EFD.masked_fill_(unused_E[:, None, None], 0)


# torch's own fake kernel of grouped_mm takes bfloat16 only, and its gradient fails on expanded ones: hence an operator of ours


def _like(x_ND: Tensor, gate_EFD: Tensor, *_: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    hidden = x_ND.shape[0], gate_EFD.shape[1]
    return torch.empty_like(x_ND, memory_format=torch.contiguous_format), x_ND.new_empty(hidden), x_ND.new_empty(hidden)


@opaque(_like)
def _grouped_swiglu(x_ND: Tensor, gate_EFD: Tensor, up_EFD: Tensor, down_EDF: Tensor, ends_E: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """out_ND, and the two products gate_NF and up_NF that the backward pass needs."""
    x_ND, gate_EFD, up_EFD, down_EDF = (x.contiguous() for x in (x_ND, gate_EFD, up_EFD, down_EDF))
    gate_NF, up_NF = (_times(x_ND, weight_EFD.mT, ends_E) for weight_EFD in (gate_EFD, up_EFD))
    hidden_NF = swiglu_forward(gate_NF, up_NF) if pays(gate_NF) else F.silu(gate_NF).mul_(up_NF)
    return _times(hidden_NF, down_EDF.mT, ends_E), gate_NF, up_NF


def _like_inputs(_dout_ND: Tensor, *others: Any) -> list[Tensor]:
    inputs, needed = others[: len(others[-1])], others[-1]
    return [
        torch.empty_like(x, memory_format=torch.contiguous_format) if n else x.new_empty(0) for x, n in zip(inputs, needed, strict=True)
    ]


@opaque(_like_inputs)
def _grouped_swiglu_backward(
    dout_ND: Tensor,
    x_ND: Tensor,
    gate_EFD: Tensor,
    up_EFD: Tensor,
    down_EDF: Tensor,
    ends_E: Tensor,
    gate_NF: Tensor,
    up_NF: Tensor,
    needed: list[bool],
) -> list[Tensor]:
    """Gradients of x_ND, gate_EFD, up_EFD and down_EDF; an empty tensor for one that is not needed."""
    dout_ND, x_ND, gate_EFD, up_EFD, down_EDF = (x.contiguous() for x in (dout_ND, x_ND, gate_EFD, up_EFD, down_EDF))
    x_needed, gate_needed, up_needed, down_needed = needed
    made = [x_ND.new_empty(0) for _ in needed]
    opened_NF = None if pays(gate_NF) else F.silu(gate_NF)
    if x_needed or gate_needed or up_needed:
        dhidden_NF = _times(dout_ND, down_EDF, ends_E)
        if opened_NF is None:
            dgate_NF, dup_NF = swiglu_backward(dhidden_NF, gate_NF, up_NF)
        else:
            dgate_NF, dup_NF = torch.ops.aten.silu_backward(dhidden_NF * up_NF, gate_NF), dhidden_NF.mul_(opened_NF)
        if x_needed:
            made[0] = _times(dgate_NF, gate_EFD, ends_E).add_(_times(dup_NF, up_EFD, ends_E))
        if gate_needed:
            made[1] = _gradient(dgate_NF, x_ND, ends_E)
        if up_needed:
            made[2] = _gradient(dup_NF, x_ND, ends_E)
    if down_needed:
        hidden_NF = swiglu_forward(gate_NF, up_NF) if opened_NF is None else opened_NF.mul_(up_NF)
        made[3] = _gradient(dout_ND, hidden_NF, ends_E)
    return made


# ---- one product, where experts have adapters


def _like_product(x_ND: Tensor, weight_EFD: Tensor, _ends_E: Tensor) -> Tensor:
    return x_ND.new_empty(x_ND.shape[0], weight_EFD.shape[1])


@opaque(_like_product)
def _grouped_product(x_ND: Tensor, weight_EFD: Tensor, ends_E: Tensor) -> Tensor:
    return _times(x_ND.contiguous(), weight_EFD.contiguous().mT, ends_E)


@opaque(_like_inputs)
def _grouped_product_backward(dout_NF: Tensor, x_ND: Tensor, weight_EFD: Tensor, ends_E: Tensor, needed: list[bool]) -> list[Tensor]:
    """Gradients of x_ND and weight_EFD; an empty tensor for one that is not needed."""
    dout_NF, x_ND, weight_EFD = (x.contiguous() for x in (dout_NF, x_ND, weight_EFD))
    x_needed, weight_needed = needed
    dx_ND = _times(dout_NF, weight_EFD, ends_E) if x_needed else x_ND.new_empty(0)
    return [dx_ND, _gradient(dout_NF, x_ND, ends_E) if weight_needed else x_ND.new_empty(0)]


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, weight_EFD: Tensor, ends_E: Tensor) -> Tensor:
        ctx.save_for_backward(x_ND, weight_EFD, ends_E)
        return _grouped_product(x_ND, weight_EFD, ends_E)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_ND, weight_EFD, ends_E = ctx.saved_tensors
        needed = list(ctx.needs_input_grad[:2])
        made = _grouped_product_backward(gradients[0], x_ND, weight_EFD, ends_E, needed)
        return *(x if n else None for x, n in zip(made, needed, strict=True)), None


def grouped_linear(x_ND: Tensor, weight_EFD: Tensor, ends_E: Tensor) -> Tensor:
    """x·Wᵀ of each expert's rows with its own matrix; of rows and matrices as `grouped_swiglu` takes them."""
    dims("ND", x_ND, "EFD", weight_EFD, "E", ends_E)
    return _Product.apply(x_ND, weight_EFD, ends_E)


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        out_ND, gate_NF, up_NF = _grouped_swiglu(*inputs)
        ctx.save_for_backward(*inputs, gate_NF, up_NF)
        return out_ND

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_ND, gate_EFD, up_EFD, down_EDF, ends_E, gate_NF, up_NF = ctx.saved_tensors
        needed = list(ctx.needs_input_grad[:4])
        made = _grouped_swiglu_backward(gradients[0], x_ND, gate_EFD, up_EFD, down_EDF, ends_E, gate_NF, up_NF, needed)
        return *(x if n else None for x, n in zip(made, needed, strict=True)), None
