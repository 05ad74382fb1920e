"""Norms over the last dim: the root-mean-square norm (Zhang and Sennrich 2019) of tokens, or of the heads of each, and the layer norm
(Ba et al. 2016).

Dims: T rows  D width of what is normed
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from eyeline.kernels.gpu import on_gpu, pays
from eyeline.kernels.one_kernel import one_kernel


def rms_norm_plain(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """The reference: x / √(mean(x²) + eps) · w, in float32; the result has x's dtype."""
    return F.rms_norm(x.float(), weight_D.shape, weight_D.float(), eps).to(x.dtype)


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """`rms_norm_plain`, fast. GPU: a kernel forward and one backward, which read and write x's dtype and keep nothing in float32 but a
    number per row. CPU: PyTorch runs a chain of operators there that makes fourteen tensors of x's size, forward and backward together;
    written by hand they are six."""
    if pays(x):
        return _OneKernelRMS.apply(x, weight_D, eps)
    return rms_norm_plain(x, weight_D, eps) if on_gpu(x) else _Normed.apply(x.float(), weight_D.float(), eps).to(x.dtype)


def gated_rms_norm_plain(x: Tensor, z: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """The reference: x / √(mean(x²) + eps) · w · silu(z), in float32; the result has z's dtype."""
    return (rms_norm_plain(x.float(), weight_D, eps) * F.silu(z.float())).to(z.dtype)


def gated_rms_norm(x: Tensor, z: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """`gated_rms_norm_plain`, fast, as `rms_norm` is."""
    if pays(x):
        return _OneKernelGated.apply(x, z, weight_D, eps)
    return (rms_norm(x.float(), weight_D, eps) * F.silu(z.float())).to(z.dtype)


def layer_norm_plain(x_TD: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float) -> Tensor:
    """The reference: (x - mean(x)) / std(x) · w + b, in float32; the result has x's dtype."""
    return F.layer_norm(x_TD.float(), weight_D.shape, weight_D.float(), bias_D.float(), eps).to(x_TD.dtype)


def layer_norm(x_TD: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float) -> Tensor:
    """`layer_norm_plain`, fast. GPU: a kernel forward and one backward, which read and write x's dtype. CPU: PyTorch's own."""
    return _OneKernelLayer.apply(x_TD, weight_D, bias_D, eps) if pays(x_TD) else layer_norm_plain(x_TD, weight_D, bias_D, eps)


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


# ---- on a GPU: the same formulas, from x and s. The weight's gradient sums over rows, and so is a kernel of its own


@one_kernel
def _rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    return (x.float() * scale * weight_D.float()).to(x.dtype), scale


@one_kernel
def _rms_norm_backward(dout: Tensor, x: Tensor, weight_D: Tensor, scale: Tensor) -> Tensor:
    dy, y = dout.float() * weight_D.float(), x.float() * scale
    return (scale * (dy - y * (dy * y).mean(-1, keepdim=True))).to(x.dtype)


@one_kernel
def _rms_norm_weight(dout: Tensor, x: Tensor, scale: Tensor) -> Tensor:
    return (dout.float() * (x.float() * scale)).flatten(0, -2).sum(0)


class _OneKernelRMS(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        out, scale = _rms_norm(x, weight_D, eps)
        ctx.save_for_backward(x, weight_D, scale)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight_D, scale = ctx.saved_tensors
        dx = _rms_norm_backward(gradients[0], x, weight_D, scale) if ctx.needs_input_grad[0] else None
        dweight_D = _rms_norm_weight(gradients[0], x, scale).to(weight_D.dtype) if ctx.needs_input_grad[1] else None
        return dx, dweight_D, None


@one_kernel
def _gated_rms_norm(x: Tensor, z: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    return (x.float() * scale * weight_D.float() * F.silu(z.float())).to(z.dtype), scale


@one_kernel
def _gated_rms_norm_backward(dout: Tensor, x: Tensor, z: Tensor, weight_D: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    y, sigmoid = x.float() * scale, z.float().sigmoid()
    dgated = dout.float() * weight_D.float()
    dy = dgated * z.float() * sigmoid
    dz = dgated * y * sigmoid * (1 + z.float() * (1 - sigmoid))
    return (scale * (dy - y * (dy * y).mean(-1, keepdim=True))).to(x.dtype), dz.to(z.dtype)


@one_kernel
def _gated_rms_norm_weight(dout: Tensor, x: Tensor, z: Tensor, scale: Tensor) -> Tensor:
    return (dout.float() * F.silu(z.float()) * (x.float() * scale)).flatten(0, -2).sum(0)


class _OneKernelGated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, z: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        out, scale = _gated_rms_norm(x, z, weight_D, eps)
        ctx.save_for_backward(x, z, weight_D, scale)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, z, weight_D, scale = ctx.saved_tensors
        dweight_D = _gated_rms_norm_weight(gradients[0], x, z, scale).to(weight_D.dtype) if ctx.needs_input_grad[2] else None
        dx, dz = _gated_rms_norm_backward(gradients[0], x, z, weight_D, scale) if any(ctx.needs_input_grad[:2]) else (None, None)
        return dx, dz, dweight_D, None


@one_kernel
def _layer_norm(x_TD: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    mean_T1 = x_TD.float().mean(-1, keepdim=True)
    scale_T1 = torch.rsqrt((x_TD.float() - mean_T1).square().mean(-1, keepdim=True) + eps)
    return ((x_TD.float() - mean_T1) * scale_T1 * weight_D.float() + bias_D.float()).to(x_TD.dtype), mean_T1, scale_T1


@one_kernel
def _layer_norm_backward(dout_TD: Tensor, x_TD: Tensor, weight_D: Tensor, mean_T1: Tensor, scale_T1: Tensor) -> Tensor:
    dy_TD, y_TD = dout_TD.float() * weight_D.float(), (x_TD.float() - mean_T1) * scale_T1
    return (scale_T1 * (dy_TD - dy_TD.mean(-1, keepdim=True) - y_TD * (dy_TD * y_TD).mean(-1, keepdim=True))).to(x_TD.dtype)


@one_kernel
def _layer_norm_weights(dout_TD: Tensor, x_TD: Tensor, mean_T1: Tensor, scale_T1: Tensor) -> tuple[Tensor, Tensor]:
    return (dout_TD.float() * ((x_TD.float() - mean_T1) * scale_T1)).sum(0), dout_TD.float().sum(0)


class _OneKernelLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float) -> Tensor:
        out_TD, mean_T1, scale_T1 = _layer_norm(x_TD, weight_D, bias_D, eps)
        ctx.save_for_backward(x_TD, weight_D, mean_T1, scale_T1)
        return out_TD

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        (x_TD, weight_D, mean_T1, scale_T1), (dout_TD,) = ctx.saved_tensors, gradients
        dx_TD = _layer_norm_backward(dout_TD, x_TD, weight_D, mean_T1, scale_T1) if ctx.needs_input_grad[0] else None
        dweight_D, dbias_D = _layer_norm_weights(dout_TD, x_TD, mean_T1, scale_T1) if any(ctx.needs_input_grad[1:3]) else (None, None)
        return dx_TD, dweight_D, dbias_D, None
