"""A stand-in for fla, which needs a GPU: a function in place of its kernel, right, wrong in one result, or raising."""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from eyeline.kernels import fla
from eyeline.kernels.gated_delta import StateCache, cached_gated_delta_rule, gated_delta_rule

Kernel = Callable[..., tuple[Tensor, Tensor]]
INPUTS = ("q", "k", "v", "decay", "beta")


def install(monkeypatch: pytest.MonkeyPatch, kernel: Kernel) -> None:
    """Make `kernel` what `import fla` gives."""
    module = ModuleType("fla.ops.gated_delta_rule")
    module.chunk_gated_delta_rule = kernel  # type: ignore[attr-defined]
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(fla, "installed", lambda: True)


def kernel(
    out_by: float = 1.0, state_by: float = 1.0, gradient_by: dict[str, float] | None = None, calls: list[Tensor] | None = None
) -> Kernel:
    """fla's function by our chunks, with its output, memory, or the gradients of some inputs multiplied."""

    def chunk_gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor, **_: Any):
        if calls is not None:
            calls.append(cu_seqlens)
        by = gradient_by or {}
        inputs = [_with_gradient(x[0], by.get(name, 1.0)) for name, x in zip(INPUTS, (q, k, v, g, beta), strict=True)]
        cu_S1 = cu_seqlens.to(torch.int32)
        cache = StateCache(len(cu_S1) - 1, (v.shape[2], k.shape[3], v.shape[3]), (), 1, v.dtype, v.device)
        cached_gated_delta_rule(*[x.detach() for x in inputs], cu_S1, cache)
        out = gated_delta_rule(*inputs, cu_S1) * out_by
        return out[None], cache.state_BHKJ * state_by

    return chunk_gated_delta_rule


def _with_gradient(x: Tensor, by: float) -> Tensor:
    """x, whose gradient is `by` times what it should be."""
    return x if by == 1.0 else x * by - (x * (by - 1)).detach()


class _Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise RuntimeError("Triton 3.6.0 is not supported on Hopper\nsecond line")


def raising_in_backward(**inputs: Any) -> tuple[Tensor, Tensor]:
    """As fla 0.5 and 0.6 on Hopper with Triton from 3.4 to 3.7.0."""
    out, state = kernel()(**inputs)
    return _Raises.apply(out), state
