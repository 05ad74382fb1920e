"""Rotary position embedding, rotate-half layout (Su et al. 2021; the layout of Qwen and Llama checkpoints).

Dims: T tokens  K head dim  R rotated dims of a head (K, or fewer)  H heads (of queries or of keys)
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eyeline.core.dims import dims
from eyeline.kernels.gpu import pays
from eyeline.kernels.one_kernel import one_kernel


class Scaling(NamedTuple):
    """Llama 3.1's longer context: slow frequencies are divided by `factor`, fast ones kept, those between blended.

    A frequency is slow when it turns fewer than `low_freq_factor` times in `original_max_positions`, and fast when it turns more than
    `high_freq_factor` times.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


def rope_tables(
    positions_T3: Tensor,
    head_dim: int,
    theta: float,
    mrope_section: tuple[int, int, int] | None = None,
    scaling: Scaling | None = None,
) -> tuple[Tensor, Tensor]:
    """cos_TR and sin_TR in float32, from positions (time, row, column); R = `head_dim`, the dims of a head that are rotated.

    Frequency j of R/2 is theta^(-2j/R), and each is used twice: for dim j and for dim j + R/2. Nothing is kept in a
    buffer: casting a model to bfloat16 would round stored frequencies, by many per cent for the low ones.

    Without `mrope_section` time alone counts. With them, frequencies 1, 4, 7, ... turn by the row, mrope_section[1] of them, and
    2, 5, 8, ... by the column, mrope_section[2] of them; the rest by time (interleaved M-RoPE, Qwen3-VL).
    """
    j_R2 = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions_T3.device)
    frequency_R2 = 1.0 / theta ** (j_R2 / head_dim)
    if scaling is not None:
        frequency_R2 = _scaled(frequency_R2, scaling)
    if mrope_section is None:
        angles_TR2 = positions_T3[:, :1].float() * frequency_R2
    else:
        n_R2 = torch.arange(head_dim // 2, device=positions_T3.device)
        by_row_R2, by_column_R2 = ((n_R2 % 3 == axis) & (n_R2 < 3 * mrope_section[axis]) for axis in (1, 2))
        angles_TR2 = positions_T3.float()[:, by_row_R2 + 2 * by_column_R2] * frequency_R2
    angles_TR = torch.cat((angles_TR2, angles_TR2), -1)
    return angles_TR.cos(), angles_TR.sin()


def _scaled(frequency_R2: Tensor, by: Scaling) -> Tensor:
    turns_R2 = by.original_max_positions / (2 * math.pi / frequency_R2)  # in the original context
    blend_R2 = ((turns_R2 - by.low_freq_factor) / (by.high_freq_factor - by.low_freq_factor)).clamp(0, 1)
    return (1 - blend_R2) * frequency_R2 / by.factor + blend_R2 * frequency_R2


def rotate(x_THK: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    """Turn each pair (j, j + R/2) of every head by its token's angle, in float32; the result has x's dtype. Dims from R on stay."""
    dims("THK", x_THK, "TR", cos_TR, "TR", sin_TR)
    if pays(x_THK):
        return _OneKernel.apply(x_THK, cos_TR, sin_TR)
    turned = cos_TR.shape[1]
    turned_THR = _Turned.apply(x_THK[..., :turned].float(), cos_TR, sin_TR).to(x_THK.dtype)
    return turned_THR if turned == x_THK.shape[2] else torch.cat((turned_THR, x_THK[..., turned:]), -1)


@one_kernel
def _rotated(x_THK: Tensor, cos_TR: Tensor, sin_TR: Tensor, back: bool) -> Tensor:
    """Turned, or turned back, in one pass. Of the tables half is read: their halves are equal."""
    R2 = cos_TR.shape[1] // 2
    cos_T1r, sin_T1r = cos_TR[:, None, :R2], sin_TR[:, None, :R2]
    if back:
        sin_T1r = -sin_T1r
    first, second = x_THK[..., :R2].float(), x_THK[..., R2 : 2 * R2].float()
    turned = (first * cos_T1r - second * sin_T1r, second * cos_T1r + first * sin_T1r)
    return torch.cat([*(x.to(x_THK.dtype) for x in turned), x_THK[..., 2 * R2 :]], -1)


class _OneKernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_THK: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
        ctx.save_for_backward(cos_TR, sin_TR)
        return _rotated(x_THK, cos_TR, sin_TR, False)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        cos_TR, sin_TR = ctx.saved_tensors
        return _rotated(gradients[0], cos_TR, sin_TR, True), None, None


class _Turned(torch.autograd.Function):
    # by hand: a gradient is turned back by the same angles, and nothing of x need be kept

    @staticmethod
    def forward(ctx: Any, x_THR: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
        ctx.save_for_backward(cos_TR, sin_TR)
        return _turned(x_THR, cos_TR, sin_TR)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        cos_TR, sin_TR = ctx.saved_tensors
        return _turned(gradients[0], cos_TR, -sin_TR), None, None


def _turned(x_THR: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    """first·cos - second·sin and second·cos + first·sin, of the two halves of each head."""
    out_THR = x_THR * cos_TR[:, None]
    (first, second), (out_first, out_second), (sin_first, sin_second) = (x.chunk(2, -1) for x in (x_THR, out_THR, sin_TR[:, None]))
    out_first.sub_(second * sin_first)
    out_second.add_(first * sin_second)
    return out_THR
