"""NF4 (Dettmers et al. 2023): a weight in 4 bits per number, which is one of 16 quantiles of a normal distribution, times the largest
magnitude of its block of 64. The layout is bitsandbytes', whose kernels may read it. These magnitudes may be quantised, too ("double"): in
8 bits, less their mean.

Dims: O outputs  I inputs, a multiple of 64  H half of them: two numbers in a byte, the earlier in its upper half  B blocks of a row
T tokens
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from eyeline.kernels import dynamic8

BLOCK = 64
LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334),
    *(-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


@cache
def _levels(device: torch.device) -> Tensor:
    return torch.tensor(LEVELS, device=device)  # once: a copy to a GPU makes the host wait


def bytes_of_scales(blocks: int) -> int:
    """The bytes that `doubled` gives for so many blocks."""
    return 4 * (1 + dynamic8.blocks_of(blocks)) + blocks


def doubled(largest_OB: Tensor) -> Tensor:
    """Largest magnitudes in 8 bits, as bytes: their mean and the scales of their blocks of 256 in float32, then the codes of what is left
    without the mean."""
    mean = largest_OB.mean()
    code_1N, scale_1M = dynamic8.quantised((largest_OB - mean).view(1, -1), signed=True)
    return torch.cat([torch.cat([mean.view(1), scale_1M.view(-1)]).view(torch.uint8), code_1N.view(-1)])


def _largest(packed_OH: Tensor, largest: Tensor) -> Tensor:
    """largest_OB, in float32, of magnitudes that are quantised or not."""
    if largest.dtype != torch.uint8:
        return largest
    rows, blocks = packed_OH.shape[0], packed_OH.shape[1] * 2 // BLOCK
    floats = largest[: len(largest) - rows * blocks].view(torch.float32)
    return (dynamic8.dequantised(largest[None, 4 * len(floats) :], floats[None, 1:], signed=True) + floats[0]).view(rows, blocks)


def quantised(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """packed_OH, uint8, and the largest magnitude of each block, largest_OB. Each number becomes the nearest level; a level's own value
    becomes that level again."""
    blocks_OBK = weight_OI.float().unflatten(1, (-1, BLOCK))
    largest_OB = blocks_OBK.abs().amax(2)
    levels = _levels(weight_OI.device)
    scaled_OI = (blocks_OBK / largest_OB.clamp_min(torch.finfo(torch.float32).tiny)[..., None]).flatten(1)
    code_OI = torch.bucketize(scaled_OI, (levels[1:] + levels[:-1]) / 2).to(torch.uint8)
    return (code_OI[:, ::2] << 4) | code_OI[:, 1::2], largest_OB


def dequantised(packed_OH: Tensor, largest: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """weight_OI of what `quantised` gives, rounded once. `largest`: largest_OB, or what `doubled` gives of it."""
    levels, largest_OB = _levels(packed_OH.device), _largest(packed_OH, largest)
    code_OI = torch.stack([packed_OH >> 4, packed_OH & 15], 2).flatten(1)
    weight_OBK = levels[code_OI.int()].unflatten(1, (-1, BLOCK)) * largest_OB[..., None]
    return weight_OBK.flatten(1).to(dtype)


class _Product(torch.autograd.Function):
    # by hand: autograd would keep the weight as it is multiplied, four times as large as it is stored

    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, packed_OH: Tensor, largest: Tensor) -> Tensor:
        ctx.save_for_backward(packed_OH, largest)
        return F.linear(x_TI, dequantised(packed_OH, largest, x_TI.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None]:
        packed_OH, largest = ctx.saved_tensors
        needed = ctx.needs_input_grad[0]
        return gradients[0] @ dequantised(packed_OH, largest, gradients[0].dtype) if needed else None, None, None


def nf4_linear(x_TI: Tensor, packed_OH: Tensor, largest: Tensor) -> Tensor:
    """x·Wᵀ with a weight in NF4, which gets no gradient. `largest` as of `dequantised`."""
    return _Product.apply(x_TI, packed_OH, largest)
