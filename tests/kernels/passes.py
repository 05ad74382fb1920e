"""What a GPU computes in one pass, with its plain form, for tests on any device."""

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from eyeline.kernels import causal_conv, moe, norms, rope, swiglu

T, H, K = 12, 3, 16
BOUNDS = (0, 1, 3, 10, T)  # documents shorter and longer than the convolution
Function = Callable[..., Tensor]


class Pass(NamedTuple):
    """A function of activations and weights: as a GPU has it, and plainly."""

    fast: Function
    plain: Function
    shapes: tuple[tuple[int, ...], ...]  # of activations, then of weights
    activations: int
    operators: int  # forward and backward, where no weight trains


def turned_plainly(x_THK: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    R = cos_TR.shape[1]
    first, second = x_THK[..., :R].to(cos_TR.dtype).chunk(2, -1)
    out = x_THK[..., :R].to(cos_TR.dtype) * cos_TR[:, None] + torch.cat((-second, first), -1) * sin_TR[:, None]
    return torch.cat((out.to(x_THK.dtype), x_THK[..., R:]), -1)


def tables(R: int, x: Tensor) -> tuple[Tensor, Tensor]:
    positions_T3 = torch.arange(T)[:, None].expand(-1, 3)
    return tuple(table.to(x.device) for table in rope.rope_tables(positions_T3, R, 100.0))  # pyright: ignore[reportReturnType]: two


def norm64(x: Tensor, w: Tensor) -> Tensor:
    """The RMS norm in the widest dtype given."""
    return (F.rms_norm(x.to(w.dtype), w.shape, w, 1e-6)).to(x.dtype)


def conv64(x_TC: Tensor, weight_CW: Tensor) -> Tensor:
    """The convolution in the widest dtype given."""
    outs = []
    for start, end in pairwise(BOUNDS):
        x_1CT = F.pad(x_TC[start:end].to(weight_CW.dtype).T, (weight_CW.shape[1] - 1, 0))[None]
        outs.append(F.silu(F.conv1d(x_1CT, weight_CW[:, None], groups=len(weight_CW)))[0].T)
    return torch.cat(outs).to(x_TC.dtype)


def conv(x_TC: Tensor, weight_CW: Tensor) -> Tensor:
    return causal_conv._OneKernel.apply(x_TC, weight_CW, torch.tensor(BOUNDS, dtype=torch.int32).to(x_TC.device))


def choices(device: torch.device) -> tuple[Tensor, Tensor]:
    """order_N and inverse_N of two experts per token."""
    chosen_TA = torch.stack((torch.arange(T) % 5, (torch.arange(T) * 3 + 1) % 5), 1)
    order_N, inverse_N, _ = moe.by_expert(chosen_TA, 5)
    return order_N.to(device), inverse_N.to(device)


def weighted64(y_ND: Tensor, weight_TA: Tensor) -> Tensor:
    """The weighted sum of each token's rows."""
    return (y_ND[choices(y_ND.device)[1]].unflatten(0, weight_TA.shape) * weight_TA[..., None]).sum(1)


PASSES = {
    "unpermute": Pass(lambda y, w: moe._OneKernel.apply(y, w, *choices(y.device)), weighted64, ((2 * T, K), (T, 2)), 2, 3),
    "causal_conv": Pass(conv, conv64, ((T, K), (K, 4)), 1, 3),
    "rms_norm": Pass(lambda x, w: norms._OneKernelRMS.apply(x, w, 1e-6), norm64, ((T, H, K), (K,)), 1, 2),
    "gated_rms_norm": Pass(
        lambda x, z, w: norms._OneKernelGated.apply(x, z, w, 1e-6),
        lambda x, z, w: (norm64(x.to(w.dtype), w) * F.silu(z.to(w.dtype))).to(z.dtype), ((T, H, K), (T, H, K), (K,)), 2, 2,
    ),
    "layer_norm": Pass(
        lambda x, w, b: norms._OneKernelLayer.apply(x, w, b, 1e-6),
        lambda x, w, b: F.layer_norm(x.to(w.dtype), w.shape, w, b, 1e-6).to(x.dtype), ((T, K), (K,), (K,)), 1, 2,
    ),
    "swiglu": Pass(swiglu._OneKernel.apply, lambda gate, up: F.silu(gate) * up, ((T, K), (T, K)), 2, 2),
    "rotate": Pass(
        lambda x: rope._OneKernel.apply(x, *tables(K, x)), lambda x: turned_plainly(x, *tables(K, x)), ((T, H, K),), 1, 2
    ),
    "rotate a part": Pass(
        lambda x: rope._OneKernel.apply(x, *tables(4, x)), lambda x: turned_plainly(x, *tables(4, x)), ((T, H, K),), 1, 2
    ),
}  # fmt: skip


def given(one: Pass, dtype: torch.dtype, weights: torch.dtype = torch.float32, device: str = "cpu") -> list[Tensor]:
    rng = torch.Generator().manual_seed(0)
    made = [torch.randn(shape, generator=rng) for shape in one.shapes]
    return [x.to(device, dtype if i < one.activations else weights).requires_grad_() for i, x in enumerate(made)]


def results(function: Function, leaves: list[Tensor]) -> list[Tensor]:
    """The output, and the gradients of a fixed direction."""
    out = function(*leaves)
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16().to(out.dtype)  # exact in every dtype
    return [out.detach(), *torch.autograd.grad((out * direction.to(out.device)).sum(), leaves)]
