"""Linear layers with products of 8-bit floats (FP8), whose scales are computed in every pass (dynamic scaling), as in torchao and
torchtitan.

    out = x·Wᵀ      dx = dout·W      dW = doutᵀ·x

Each operand is divided by a scale, which brings its largest magnitude to the largest number of its format, and rounded to that.
`tensorwise`: one scale per operand; e4m3 (3 bits of mantissa), and e5m2 (more range) of dout. `rowwise`: a scale for each row of the left
operand and each column of the right one, which outliers elsewhere do not coarsen; all in e4m3. Sums are in float32; what is given has
x's dtype.

Dims: T rows  I inputs  O outputs  M, N rows and columns of a product  K what it sums over
"""

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from eyeline.core.words import percent
from eyeline.kernels.gpu import on_gpu

Scaling = Literal["tensorwise", "rowwise"]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
OFF = 0.01  # of the norm: a product that is further off the reference is wrong. Rounding to bfloat16 gives 0.002
MULTIPLE = 16  # that GPUs want N and K to be of


def gradient_format(scaling: Scaling) -> torch.dtype:
    return E5M2 if scaling == "tensorwise" else E4M3


def quantised(x_MK: Tensor, dtype: torch.dtype, scaling: Scaling) -> tuple[Tensor, Tensor]:
    """x in 8 bits, row after row in memory, and its scale: of the tensor [], or of each row [M, 1]."""
    x_MK, most = x_MK.float(), torch.finfo(dtype).max
    largest = x_MK.abs().amax() if scaling == "tensorwise" else x_MK.abs().amax(1, keepdim=True)
    scale = (largest / most).clamp_min(torch.finfo(torch.float32).tiny)
    return (x_MK / scale).clamp(-most, most).to(dtype).contiguous(), scale


def product_plain(a_MK: Tensor, b_NK: Tensor, a_dtype: torch.dtype, scaling: Scaling) -> Tensor:
    """The reference: both quantised, then multiplied in float32. b is in e4m3."""
    (a_MK, a_scale), (b_NK, b_scale) = quantised(a_MK, a_dtype, scaling), quantised(b_NK, E4M3, scaling)
    return (a_MK.float() * a_scale) @ (b_NK.float() * b_scale).T


def product_scaled(a_MK: Tensor, b_NK: Tensor, a_dtype: torch.dtype, scaling: Scaling, out: torch.dtype) -> Tensor:
    """`product_plain` by a GPU's FP8 units. K is filled up to a multiple of 16 with zeros."""
    missing = -a_MK.shape[1] % MULTIPLE
    if missing:
        a_MK, b_NK = F.pad(a_MK, (0, missing)), F.pad(b_NK, (0, missing))
    (a_MK, a_scale), (b_NK, b_scale) = quantised(a_MK, a_dtype, scaling), quantised(b_NK, E4M3, scaling)
    b_scale = b_scale if scaling == "tensorwise" else b_scale.T
    return torch._scaled_mm(a_MK, b_NK.T, scale_a=a_scale, scale_b=b_scale, out_dtype=out)  # pyright: ignore[reportPrivateImportUsage]  # torch has no public name for it in 2.11


def product(a_MK: Tensor, b_NK: Tensor, a_dtype: torch.dtype, scaling: Scaling) -> Tensor:
    """a·bᵀ in a's dtype. CPU: the reference."""
    if on_gpu(a_MK):
        return product_scaled(a_MK, b_NK, a_dtype, scaling, a_MK.dtype)
    return product_plain(a_MK, b_NK, a_dtype, scaling).to(a_MK.dtype)


class _Linear(torch.autograd.Function):
    # by hand: what is kept for the backward pass is in 16 bits, and quantised along the other dim there

    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, weight_OI: Tensor, scaling: Scaling) -> Tensor:
        ctx.save_for_backward(x_TI, weight_OI)
        ctx.scaling = scaling
        return product(x_TI, weight_OI, E4M3, scaling)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (x_TI, weight_OI), (dout_TO,), scaling = ctx.saved_tensors, gradients, ctx.scaling
        form = gradient_format(scaling)
        dx_TI = product(dout_TO, weight_OI.T, form, scaling) if ctx.needs_input_grad[0] else None
        dweight_OI = product(dout_TO.T, x_TI.T, form, scaling) if ctx.needs_input_grad[1] else None
        return dx_TI, dweight_OI, None


def float8_linear(x_TI: Tensor, weight_OI: Tensor, scaling: Scaling) -> Tensor:
    """x·Wᵀ with products in FP8, forward and backward. Both are of one dtype, which gradients have, too."""
    rows = x_TI.flatten(0, -2)
    return _Linear.apply(rows, weight_OI, scaling).unflatten(0, x_TI.shape[:-1])


def float8_fault(device: torch.device, scaling: Scaling) -> str | None:
    """What is wrong with this GPU's FP8 products, which are tried on small matrices with a multiple of 16 rows and without; None where they
    equal the reference."""
    rng = torch.Generator().manual_seed(0)
    for rows in (64, 50):
        x_TI, dout_TO = (torch.randn(rows, size, generator=rng).bfloat16().to(device) for size in (96, 48))
        weight_OI = torch.randn(48, 96, generator=rng).bfloat16().to(device)
        form = gradient_format(scaling)
        for what, a, b, dtype in (
            ("the output", x_TI, weight_OI, E4M3),
            ("the gradient of the input", dout_TO, weight_OI.T, form),
            ("the gradient of the weight", dout_TO.T, x_TI.T, form),
        ):
            try:
                got = product_scaled(a, b, dtype, scaling, torch.bfloat16).float()
            except (RuntimeError, ValueError) as error:
                return f"{what}: {str(error).splitlines()[0]}"
            want = product_plain(a, b, dtype, scaling)
            if not bool((got - want).norm() <= OFF * want.norm()):
                return f"{what} is off by {percent(float((got - want).norm() / want.norm()))}"
    return None
