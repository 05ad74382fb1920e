"""Numbers in 8 bits (Dettmers et al. 2022): one of 256 levels, of which those near zero are close together, times the largest magnitude of
its block of 256. Blocks are within a row: the last of a row may be shorter. Levels and rounding are bitsandbytes'.

Dims: N rows  R numbers in each  B blocks of a row  K numbers in each
"""

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

BLOCK = 256
EXPONENTS = 7  # powers of ten, from 10⁻⁶ to 1: each has twice as many levels as the one below


@cache
def levels(signed: bool, device: torch.device) -> Tensor:
    """All 256, ascending, 0 and 1 among them. Without a sign there are twice as many for magnitudes, the first of them 0."""
    positive = list[float]()
    for exponent in range(EXPONENTS):
        bounds = torch.linspace(0.1, 1, 2 ** (exponent + (not signed)) + 1)
        positive += (10.0 ** (exponent - EXPONENTS + 1) * (bounds[:-1] + bounds[1:]) / 2).tolist()
    negative = [-x for x in positive] if signed else []
    # once per device: a copy to a GPU makes the host wait
    return torch.tensor(sorted([*negative, 0.0, *positive, 1.0]), dtype=torch.float32, device=device)


@cache
def _bounds(signed: bool, device: torch.device) -> Tensor:
    return (levels(signed, device)[:-1] + levels(signed, device)[1:]) / 2


def blocks_of(width: int) -> int:
    """Blocks of a row of so many numbers."""
    return -(-width // BLOCK)


def quantised(x_NR: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """code_NR, uint8, and the largest magnitude of each block, largest_NB. Each number becomes the nearest level. Without a sign, what is
    not zero does not become zero: a first moment is divided by the root of a second."""
    width, blocks = x_NR.shape[1], blocks_of(x_NR.shape[1])
    padded_NR = x_NR if width == blocks * BLOCK else F.pad(x_NR, (0, blocks * BLOCK - width))
    x_NBK = padded_NR.unflatten(1, (blocks, BLOCK))
    largest_NB = x_NBK.abs().amax(2)
    scaled_NBK = x_NBK / largest_NB.clamp_min(torch.finfo(torch.float32).tiny)[..., None]
    code_NBK = torch.bucketize(scaled_NBK, _bounds(signed, x_NR.device), out_int32=True)
    if not signed:
        code_NBK += (code_NBK == 0) & (x_NBK > 0)
    return code_NBK.to(torch.uint8).flatten(1)[:, :width], largest_NB


def dequantised(code_NR: Tensor, largest_NB: Tensor, signed: bool) -> Tensor:
    """x_NR, float32, of what `quantised` gives."""
    width = code_NR.shape[1]
    x_NR = levels(signed, code_NR.device)[code_NR.int()]
    return x_NR.mul_(largest_NB.repeat_interleave(BLOCK, 1, output_size=largest_NB.shape[1] * BLOCK)[:, :width])
