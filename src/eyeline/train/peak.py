"""The peak that MFU and HFU are shares of: FLOPs per second, with a name that says whose and in which precision.

A GPU's is published (`models/flops.py: PEAKS`). A processor's is measured once, by products of matrices, and kept in env.json.
"""

import math
import time
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch

from eyeline.models.flops import peak_of
from eyeline.parallel.launch import Machine
from eyeline.train.run import COMPUTE

SIDE, SMALL_SIDE = (
    1024,
    256,
)  # rows and columns of the square matrices; the small ones where a product would take seconds (half precision)
SLOW_S = 0.01  # a product of small matrices that takes longer is not followed by one of large ones
ROUNDS, ROUND_S = 3, 0.03

Peak = dict[str, Any]  # {"name": str, "flops_per_s": float}: plain JSON, a stamp of env.json


def peak_stamp(here: Machine, precision: str, attempts: Sequence[Mapping[str, Any]]) -> Peak | None:
    """The peak of one device in this precision; None where it is not known. `attempts`: stamps of attempts before, of which one that was
    made on the same machine is kept."""
    if here.device.type == "cuda":
        published = peak_of(here.name, precision)
        return None if published is None else {"name": f"{here.name}, published dense {precision} peak", "flops_per_s": published}
    alike = {"hardware": here.name, "threads": here.threads, "precision": precision}
    for stamps in attempts:
        if stamps.get("peak") and all(stamps.get(name) == value for name, value in alike.items()):
            return stamps["peak"]
    rate, side = _measured(COMPUTE[precision], here.threads)
    threads = f"{here.threads} thread{'s' if here.threads > 1 else ''}"
    return {"name": f"{here.name}, {threads}, {precision} products of {side} × {side}, measured", "flops_per_s": rate}


def matmul_rate(device: torch.device, dtype: torch.dtype, side: int, rounds: int, round_s: float) -> float:
    """FLOP/s of a product of two square matrices: that of the fastest of several rounds, since a slower one shared the machine."""
    a, b = (torch.full((side, side), 0.5, device=device, dtype=dtype) for _ in range(2))  # draws no random number
    torch.matmul(a, b)  # loads the kernel
    return max(_round(a, b, round_s) for _ in range(rounds))


@cache  # a process has one machine
def _measured(dtype: torch.dtype, threads: int) -> tuple[float, int]:  # noqa: ARG001 - part of the cache's key
    """The rate of this processor, and the side of the matrices; `threads` is what torch computes with now."""
    device = torch.device("cpu")
    small = matmul_rate(device, dtype, SMALL_SIDE, 1, 0.0)
    if 2 * SMALL_SIDE**3 / small > SLOW_S:
        return small, SMALL_SIDE
    return matmul_rate(device, dtype, SIDE, ROUNDS, ROUND_S), SIDE


def _round(a: torch.Tensor, b: torch.Tensor, least_s: float) -> float:
    """FLOP/s over products that take about `least_s` together."""
    _wait(a.device)
    start, products, took = time.perf_counter(), 0, -math.inf
    while took < least_s:
        torch.matmul(a, b)
        _wait(a.device)
        products += 1
        took = time.perf_counter() - start
    return 2 * len(a) ** 3 * products / took


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
