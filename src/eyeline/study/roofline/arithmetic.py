"""FLOPs of operators, by their shapes: of products of matrices, and of the kernels that are priced as one operator each."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
Arguments = Mapping[str, Any]  # by their names in the operator's schema
Bounds = Callable[[Tensor], Tensor]  # document bounds without memory -> their numbers, on the host
CHUNK = 64  # tokens of a chunk of fla's gated delta rule


@dataclass(frozen=True, slots=True)
class Cost:
    flops: int
    rate: str = "bf16"  # the rate at which they are computed, by name: see `price.py`
    inner_bytes: int = 0  # read and written beyond what goes in and comes out
    groups: int = 1  # kernels where a GPU has none for several products in one (`kernels/gpu.py: grouped_waits`)


def _product(a: Tensor, b: Tensor) -> Cost:
    """[..., n, k] by [..., k, m]."""
    return Cost(2 * a.numel() * b.shape[-1], _rate(a))


def _rate(x: Tensor) -> str:
    return "fp32" if x.dtype == torch.float32 else "bf16"


def _grouped(a: Tensor, b: Tensor, offs: Tensor, *_: Any, **__: Any) -> Cost:
    """Rows sorted by group, each with the matrix of its group; or, of two matrices, the gradient of those matrices."""
    return Cost(2 * a.numel() * b.shape[-1], "grouped", groups=len(offs))


COSTS: dict[Any, Callable[..., Cost]] = {
    aten.mm.default: lambda a, b: _product(a, b),
    aten.mm.dtype: lambda a, b, _: _product(a, b),
    aten.addmm.default: lambda _, a, b, **__: _product(a, b),
    aten.addmm_.default: lambda _, a, b, **__: _product(a, b),
    aten.addmm.dtype: lambda _, a, b, *__, **___: _product(a, b),
    aten.bmm.default: lambda a, b: _product(a, b),
    aten.baddbmm.default: lambda _, a, b, **__: _product(a, b),
    aten.mv.default: lambda a, _: Cost(2 * a.numel(), _rate(a)),
    aten._grouped_mm.default: _grouped,
}


# ---- kernels


def _pairs(cu_S1: Tensor, causal: bool) -> int:
    lengths = cu_S1.long().diff()
    return int((lengths * (lengths + 1) // 2).sum() if causal else lengths.square().sum())


def _attention(given: Arguments, bounds: Bounds) -> Cost:
    """q·kᵀ and its product with v, over the pairs that see each other."""
    return Cost(4 * _pair_products(given, bounds), "attention")


def _attention_backward(given: Arguments, bounds: Bounds) -> Cost:
    """q·kᵀ again, and the gradients of the weights, v, q and k: five products for the two forward."""
    return Cost(10 * _pair_products(given, bounds), "attention backward")


def _pair_products(given: Arguments, bounds: Bounds) -> int:
    (_, H, K), causal = given["query"].shape, given["window_size"][1] == 0
    return H * K * _pairs(bounds(given["cu_seq_q"]), causal)


def _chunks(q_TGK: Tensor, v_THJ: Tensor, passes: int) -> Cost:
    """The rule in chunks. Per token and value head, forward: q·kᵀ and k·kᵀ within the chunk, what the triangular system gives for k and v,
    what the state gives for both, what the chunk gives, and what it adds to the state. In memory meanwhile: for each token what it
    writes, reads and adds, a row of the system, and per chunk the state; each written and read once in a pass."""
    (T, H, J), K = v_THJ.shape, q_TGK.shape[2]
    products = 2 * CHUNK * (2 * K + 2 * J + K) + 6 * K * J
    numbers = K + 2 * J + CHUNK + K * J // CHUNK
    return Cost(T * H * products * passes, "delta", 2 * 2 * T * H * numbers * passes)


def _delta(given: Arguments, _bounds: Bounds) -> Cost:
    return _chunks(given["q_TGK"], given["v_THJ"], passes=1)


def _delta_backward(given: Arguments, _bounds: Bounds) -> Cost:
    """The forward pass again, and two products for each of its own."""
    return _chunks(given["q_TGK"], given["v_THJ"], passes=3)


def _scaled_rows(given: Arguments, _bounds: Bounds) -> Cost:
    """Each row of the gradient is read once for every expert of its token, and not once in all."""
    rows, (tokens, width), size = len(given["order_N"]), given["dout_TD"].shape, given["dout_TD"].itemsize
    return Cost(0, inner_bytes=(rows - tokens) * width * size)


KERNELS: dict[str, Callable[[Arguments, Bounds], Cost]] = {
    "torch_attn::_varlen_attn": _attention,
    "torch_attn::_varlen_attn_backward": _attention_backward,
    "eyeline::gated_delta_rule": _delta,
    "eyeline::gated_delta_rule_backward": _delta_backward,
    "eyeline::scaled_rows": _scaled_rows,
}
