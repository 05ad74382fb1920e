"""Stochastic rounding to bfloat16: up or down by chance, so that the mean is the number itself. A moment that changes by less than half of
bfloat16's last bit at each step would never change if it were rounded to the nearest.

Dims: N numbers
"""

import torch
from torch import Tensor

ODD = 0x2545F4914F6CDD1D  # of xorshift64* (Vigna 2016)


def stochastic_bf16(x_N: Tensor, address: int, place_N: Tensor) -> Tensor:
    """Float32 numbers in bfloat16. What a number is rounded by follows from the address (63 bits) and from its place in the whole tensor,
    so that it is the same however the tensor is cut."""
    n_N = (place_N + 1) * (address | 1)
    hashed_N = (n_N ^ (n_N >> 32)) * ODD
    hashed_N = (hashed_N ^ (hashed_N >> 29)) * (address | 1)
    chance_N = (hashed_N >> 40 & 0xFFFF).int()
    return ((x_N.contiguous().view(torch.int32) + chance_N) & -0x10000).view(torch.float32).bfloat16()
