"""The root-mean-square norm (Zhang and Sennrich 2019) of tokens, or of the heads of each: over the last dim, whatever there is before it.

Dims: D width of what is normed
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from eyeline.kernels.gpu import on_gpu


def rms_norm_plain(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """The reference: x / √(mean(x²) + eps) · w, in float32; the result has x's dtype."""
    return F.rms_norm(x.float(), weight_D.shape, weight_D.float(), eps).to(x.dtype)


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """`rms_norm_plain`, fast. CUDA: PyTorch's kernel. CPU: PyTorch has none there and runs a chain of operators that makes fourteen
    tensors of x's size, forward and backward together; written by hand they are six."""
    return rms_norm_plain(x, weight_D, eps) if on_gpu(x) else _Normed.apply(x.float(), weight_D.float(), eps).to(x.dtype)


class _Normed(torch.autograd.Function):
    """y = x·s with s = 1/√(mean(x²) + eps); out = y·w. So dx = s·(dout·w - y·mean(dout·w·y)), and dw = Σ dout·y."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        scale = x.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        y = x * scale
        ctx.save_for_backward(y, scale, weight_D)
        return y * weight_D

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        y, scale, weight_D = ctx.saved_tensors
        (dout,), (x_needed, weight_needed, _) = gradients, ctx.needs_input_grad
        both = dout * y
        dweight_D = both.flatten(0, -2).sum(0) if weight_needed else None
        if not x_needed:
            return None, dweight_D, None
        mean = (both @ weight_D)[..., None] / len(weight_D)
        return (dout * weight_D).sub_(y * mean).mul_(scale), dweight_D, None
