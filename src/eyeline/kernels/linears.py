"""Linear layers of one input, with low-rank adapters (LoRA), for a GPU: sums are made where products write their results.

    out = x·Wᵀ + b + (x·Aᵀ)·s·Bᵀ

Written operator by operator, an adapter passes three times over what its layer gives, and every layer of an input adds its gradient in a
pass of its own. Here one product adds to the result of another, the A of all layers are one product, and gradients of the input accumulate
in one tensor, product by product.

Dims: T rows  I inputs  O outputs of a layer  r rank of an adapter  R ranks of all adapters together
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Layer(NamedTuple):
    """The tensors of a layer. `a_rI` and `b_Or` are of its adapter, if it has one, whose update is scaled by `scale`."""

    weight_OI: Tensor
    bias_O: Tensor | None = None
    a_rI: Tensor | None = None
    b_Or: Tensor | None = None
    scale: float = 1.0


def linears_plain(x_TI: Tensor, layers: Sequence[Layer]) -> list[Tensor]:
    """The reference: the formula above, layer by layer, in x's dtype."""
    outs = []
    for weight_OI, bias_O, a_rI, b_Or, scale in layers:
        out_TO = F.linear(x_TI, weight_OI.to(x_TI.dtype), None if bias_O is None else bias_O.to(x_TI.dtype))
        if a_rI is not None and b_Or is not None:
            out_TO = out_TO + F.linear(F.linear(x_TI, a_rI.to(x_TI.dtype)), b_Or.to(x_TI.dtype)) * scale
        outs.append(out_TO)
    return outs


def linears(x_TI: Tensor, layers: Sequence[Layer]) -> list[Tensor]:
    """`linears_plain` with the fewest passes over activations."""
    tensors = [x for layer in layers for x in layer[:4]]
    return list(_Linears.apply(x_TI, tuple(layer.scale for layer in layers), *tensors))


def adapted(x_TI: Tensor, layer: Layer) -> Tensor:
    """`linears_plain` of one layer with an adapter, whose own product comes last and adds to the adapter's. By operators that keep their
    inputs before they run, so that recomputing a block that ends here stops before that product."""
    assert layer.a_rI is not None
    assert layer.b_Or is not None
    rows, bias_O = x_TI.flatten(0, -2), None if layer.bias_O is None else layer.bias_O.to(x_TI.dtype)
    low_Tr = F.linear(rows, layer.a_rI.to(x_TI.dtype)) * layer.scale
    update_TO = F.linear(low_Tr, layer.b_Or.to(x_TI.dtype), bias_O)
    return torch.addmm(update_TO, rows, layer.weight_OI.to(x_TI.dtype).T).unflatten(0, x_TI.shape[:-1])


class _Linears(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, scales: tuple[float, ...], *tensors: Tensor | None) -> tuple[Tensor, ...]:
        layers = [tensors[i : i + 4] for i in range(0, len(tensors), 4)]
        cast = [[None if x is None else x.to(x_TI.dtype) for x in layer] for layer in layers]
        rows = x_TI.flatten(0, -2)
        lows = _lowered(rows, cast)
        outs = []
        for (weight_OI, bias_O, _, b_Or), low_Tr, scale in zip(cast, lows, scales, strict=True):
            assert weight_OI is not None
            out_TO = F.linear(rows, weight_OI, bias_O)
            if b_Or is not None:
                low_Tr.mul_(scale)
                out_TO.addmm_(low_Tr, b_Or.T)
            outs.append(out_TO.unflatten(0, x_TI.shape[:-1]))
        ctx.scales, ctx.dtypes = scales, [None if x is None else x.dtype for x in tensors]
        ctx.save_for_backward(x_TI, *lows, *(x for layer in cast for x in layer))
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        x_TI, *others = ctx.saved_tensors
        count = len(ctx.scales)
        lows, flat = others[:count], others[count:]
        layers = [flat[i : i + 4] for i in range(0, len(flat), 4)]
        needed = [ctx.needs_input_grad[i : i + 4] for i in range(2, len(ctx.needs_input_grad), 4)]
        rows, reached = x_TI.flatten(0, -2), ctx.needs_input_grad[0]
        dx_TI: Tensor | None = None
        made: list[list[Tensor | None]] = []
        dlows: list[Tensor] = []  # of the adapters, and which layers have them
        adapted: list[int] = []
        for i, dout in enumerate(gradients):
            made.append([None] * 4)
            if dout is None:
                continue
            dout_TO = dout.flatten(0, -2)
            weight_OI, _, _, b_Or = layers[i]
            if reached:
                dx_TI = dout_TO @ weight_OI if dx_TI is None else dx_TI.addmm_(dout_TO, weight_OI)
            if needed[i][0]:
                made[i][0] = dout_TO.T @ rows
            if needed[i][1]:
                made[i][1] = dout_TO.sum(0, dtype=torch.float32)
            if b_Or is not None and (reached or needed[i][2]):
                dlows.append((dout_TO @ b_Or).mul_(ctx.scales[i]))
                adapted.append(i)
            if needed[i][3]:
                made[i][3] = dout_TO.T @ lows[i]
        if adapted:
            dlow_TR = dlows[0] if len(dlows) == 1 else torch.cat(dlows, 1)
            ranks = [x.shape[1] for x in dlows]
            if reached:
                assert dx_TI is not None
                dx_TI.addmm_(dlow_TR, _stacked([layers[i][2] for i in adapted]))
            if any(needed[i][2] for i in adapted):
                for i, da_rI in zip(adapted, (dlow_TR.T @ rows).split(ranks), strict=True):
                    made[i][2] = da_rI if needed[i][2] else None
        flat_made = [x for one in made for x in one]
        out = [None if x is None else x.to(dtype) for x, dtype in zip(flat_made, ctx.dtypes, strict=True)]
        return None if dx_TI is None else dx_TI.view_as(x_TI), None, *out


def _lowered(rows: Tensor, layers: Sequence[Sequence[Tensor | None]]) -> list[Tensor]:
    """x·Aᵀ of every layer, by one product; no columns for a layer without an adapter."""
    adapters = [layer[2] for layer in layers]
    if all(a_rI is None for a_rI in adapters):
        return [rows.new_empty(0, 0) for _ in layers]
    low_TR = rows @ _stacked(adapters).T
    return [x.contiguous() for x in low_TR.split([0 if a_rI is None else len(a_rI) for a_rI in adapters], 1)]


def _stacked(adapters: Sequence[Tensor | None]) -> Tensor:
    held = [a_rI for a_rI in adapters if a_rI is not None]
    return held[0] if len(held) == 1 else torch.cat(held)
