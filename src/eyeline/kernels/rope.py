"""Rotary position embedding, rotate-half layout (Su et al. 2021; the layout of Qwen and Llama checkpoints).

Dims: T tokens  K head dim  H heads (of queries or of keys)
"""

import torch
from torch import Tensor

from eyeline.core.dims import dims


def rope_tables(positions_T: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos_TK and sin_TK in float32, from positions.

    Frequency j of K/2 is theta^(-2j/K), and each is used twice: for dim j and for dim j + K/2. Nothing is kept in a
    buffer: casting a model to bfloat16 would round stored frequencies, by many per cent for the low ones.
    """
    j_K2 = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions_T.device)
    angles_TK2 = positions_T.float()[:, None] * (1.0 / theta ** (j_K2 / head_dim))
    angles_TK = torch.cat((angles_TK2, angles_TK2), -1)
    return angles_TK.cos(), angles_TK.sin()


def rotate(x_THK: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
    """Turn each pair (j, j + K/2) of every head by its token's angle, in float32; the result has x's dtype."""
    dims("THK", x_THK, "TK", cos_TK, "TK", sin_TK)
    x = x_THK.float()
    first, second = x.chunk(2, -1)
    turned_THK = x * cos_TK[:, None] + torch.cat((-second, first), -1) * sin_TK[:, None]
    return turned_THK.to(x_THK.dtype)
