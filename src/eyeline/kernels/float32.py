"""Products that are summed in float32 and given in it, of matrices in half precision, on a GPU's tensor cores: casting a matrix up first
would cost a pass over it and a product without those units.

Dims: T rows  D width  E outputs
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from eyeline.kernels.gpu import HALF, on_gpu

GIVES_FLOAT32 = "dtype" in torch.ops.aten.mm.overloads() and torch.version.hip is None  # torch.mm(out_dtype=), of CUDA


def product(a_TD: Tensor, b_DE: Tensor) -> Tensor:
    """a·b in float32, of matrices of one dtype."""
    if a_TD.dtype in HALF and on_gpu(a_TD) and GIVES_FLOAT32:
        return torch.mm(a_TD, b_DE, out_dtype=torch.float32)
    return a_TD.float() @ b_DE.float()


def linear_plain(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    """The reference: x·Wᵀ in float32."""
    return F.linear(x_TD.float(), weight_ED.float())


def linear(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    """`linear_plain` of a float32 weight, fast. GPU, for x in bfloat16: the weight is split into two bfloat16 matrices whose sum differs
    from it by less than 2⁻¹⁶ of it, and x is exact, so that sums are as good as float32's. All else: as it stands."""
    if x_TD.dtype == torch.bfloat16 and on_gpu(x_TD) and GIVES_FLOAT32:
        return _Split.apply(x_TD, weight_ED)
    return linear_plain(x_TD, weight_ED)


def _split(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x as the sum of two tensors of a narrower dtype."""
    high = x.to(dtype)
    return high, (x.float() - high.float()).to(dtype)


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_ED: Tensor) -> Tensor:
        high_ED, low_ED = _split(weight_ED, x_TD.dtype)
        ctx.save_for_backward(x_TD, high_ED, low_ED)
        ctx.dtype = weight_ED.dtype
        return product(x_TD, torch.cat((high_ED, low_ED)).T).unflatten(1, (2, -1)).sum(1)  # both by one product

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x_TD, high_ED, low_ED = ctx.saved_tensors
        high_TE, low_TE = _split(gradients[0], x_TD.dtype)
        dx_TD = dweight_ED = None
        if ctx.needs_input_grad[0]:
            dx_TD = torch.cat((high_TE, low_TE, high_TE), 1) @ torch.cat((high_ED, high_ED, low_ED))
        if ctx.needs_input_grad[1]:
            dweight_ED = product(torch.cat((high_TE, low_TE), 1).T, x_TD).unflatten(0, (2, -1)).sum(0).to(ctx.dtype)
        return dx_TD, dweight_ED
