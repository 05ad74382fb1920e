"""Dropout whose mask has an address: every row brings random numbers of its own, so any cut of a batch drops what the whole would.

    dropped_TD = (a_t · c_d + b_t) mod 2³² < rate · 2³²

a_t and b_t are the row's random numbers (`Batch.with_draws`), and c_d is hashed from the address of the module and the column. This is
multiply-add hashing (Dietzfelbinger 1996): any two entries are independent, so that sums have the mean and the variance that
independent random numbers give them. There is no generator, no state and nothing that the host reads: recomputing a block gives
the same mask, and so does a GPU.

Dims: T rows  D columns
"""

import torch
from torch import Tensor

from eyeline.core.dims import dims


def dropout_mask(draws_T2: Tensor, address: Tensor, columns: int, rate: float, first: int = 0) -> Tensor:
    """bool [T, columns], True where an entry is dropped: a share `rate` of them. `draws_T2` (int32, the first of a row odd) are of the
    rows, `address` (a 63-bit number) of the module; `first` is the number of the first column, where others are elsewhere."""
    dims("T2", draws_T2)
    odd = address | 1
    hashed_D = torch.arange(first + 1, first + columns + 1, device=draws_T2.device) * odd
    hashed_D = ((hashed_D ^ (hashed_D >> 32)) * odd >> 32).int()
    bits_TD = torch.addcmul(draws_T2[:, 1:], draws_T2[:, :1], hashed_D)
    return bits_TD < min(round(rate * 2**32), 2**32 - 1) - 2**31
