"""Linear layers of one input with adapters, as a GPU computes them, against the plain formula: values and gradients, needed or not."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from eyeline.kernels.linears import Layer, adapted, linears, linears_plain
from eyeline.study.roofline.record import Recorder

T, IN, OUTS, RANKS = 11, 8, (12, 4, 6), (2, 3, None)
Function = Callable[[Tensor, Sequence[Layer]], list[Tensor]]


def given(dtype: torch.dtype = torch.float32, device: str = "cpu") -> tuple[Tensor, list[Layer]]:
    """Three layers, the second with a bias, the first two with adapters; weights and adapters in float32 as they train."""
    rng = torch.Generator().manual_seed(0)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng).to(device).requires_grad_()

    x_TI = torch.randn(T, IN, generator=rng).to(device, dtype).requires_grad_()
    layers = []
    for out, rank in zip(OUTS, RANKS, strict=True):
        weight_OI, bias_O = leaf(out, IN), leaf(out) if out == 4 else None
        pair = (None, None) if rank is None else (leaf(rank, IN), leaf(out, rank))
        layers.append(Layer(weight_OI, bias_O, *pair, scale=0.5 if rank else 1.0))
    return x_TI, layers


def results(function: Function, x_TI: Tensor, layers: Sequence[Layer]) -> list[Tensor]:
    """Outputs, and the gradients of fixed directions of whatever needs one."""
    outs = function(x_TI, layers)
    rng = torch.Generator().manual_seed(1)
    loss = sum((out * torch.randn(out.shape, generator=rng).bfloat16().to(out.dtype)).sum() for out in outs)
    leaves = [x for x in (x_TI, *(x for layer in layers for x in layer[:4])) if isinstance(x, Tensor) and x.requires_grad]
    return [*(out.detach() for out in outs), *torch.autograd.grad(torch.as_tensor(loss), leaves)]


def test_values_and_gradients_are_those_of_the_plain_form() -> None:
    got, want = results(linears, *given()), results(linears_plain, *given())
    for x, y in zip(got, want, strict=True):
        assert x.dtype == y.dtype
        torch.testing.assert_close(x, y, atol=2e-6, rtol=2e-6)


def test_one_adapted_layer_is_the_plain_form() -> None:
    for number in (0, 1):
        got = results(lambda x, layers: [adapted(x, layers[0])], given()[0], [given()[1][number]])
        want = results(linears_plain, given()[0], [given()[1][number]])
        for x, y in zip(got, want, strict=True):
            torch.testing.assert_close(x, y, atol=2e-6, rtol=2e-6)


def frozen(trains: str) -> tuple[Tensor, list[Layer]]:
    """Only tensors that are named train: of x, weight_OI, bias_O, a_rI, b_Or."""
    x_TI, layers = given()
    x_TI.requires_grad_("x" in trains.split())
    for layer in layers:
        for name, x in layer._asdict().items():
            if isinstance(x, Tensor):
                x.requires_grad_(name in trains.split())
    return x_TI, layers


@pytest.mark.parametrize("trains", ["x", "a_rI", "b_Or", "weight_OI", "bias_O", "a_rI b_Or", "x a_rI b_Or", "x bias_O"])
def test_what_is_frozen_gets_no_gradient_and_the_rest_its_own(trains: str) -> None:
    for x, y in zip(results(linears, *frozen(trains)), results(linears_plain, *frozen(trains)), strict=True):
        torch.testing.assert_close(x, y, atol=2e-6, rtol=2e-6)


def test_an_output_that_is_not_used_has_no_gradient() -> None:
    def first_and_last(function: Function) -> Function:
        return lambda x, layers: [function(x, layers)[i] for i in (0, 2)]

    results_of = []
    for function in (linears, linears_plain):
        x_TI, layers = given()
        outs = first_and_last(function)(x_TI, layers)
        results_of.append(torch.autograd.grad(outs[0].sum() + outs[1].square().sum(), (x_TI, layers[0].weight_OI, layers[2].weight_OI)))
    for x, y in zip(*results_of, strict=True):
        torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-5)


def test_bfloat16_is_as_near_to_float64_as_the_plain_form() -> None:
    def doubled(x: Tensor | float | None) -> Tensor | float | None:
        return x.detach().double().requires_grad_() if isinstance(x, Tensor) else x

    x_TI, layers = given(torch.bfloat16)
    exact = results(linears_plain, doubled(x_TI), [Layer(*map(doubled, layer)) for layer in layers])  # pyright: ignore[reportArgumentType]
    fast, plain = results(linears, x_TI, layers), results(linears_plain, *given(torch.bfloat16))
    off, off_today = (sum(((x.double() - y).norm() / y.norm()).item() for x, y in zip(one, exact, strict=True)) for one in (fast, plain))
    assert off <= off_today * 1.02


def test_nothing_passes_over_outputs_but_products() -> None:
    """Operators on tensors as large as an output are products alone, forward and backward; those of low rank are small."""
    x_TI = torch.empty(4096, 256, dtype=torch.bfloat16, device="meta", requires_grad=True)
    weight_OI = torch.empty(256, 256, dtype=torch.bfloat16, device="meta")
    a_rI, b_Or = (torch.empty(shape, device="meta", requires_grad=True) for shape in ((4, 256), (256, 4)))
    layers = [Layer(weight_OI, None, a_rI, b_Or, 2.0)] * 3
    with Recorder() as recorder:
        outs = linears(x_TI, layers)
        torch.autograd.backward(outs, [torch.empty_like(out) for out in outs])
    passes = [op for op in recorder.operators if op.kind == "memory-bound"]
    assert passes
    assert max(op.bytes for op in passes) < x_TI.numel() * 2 / 4
    largest = [op for op in recorder.operators if op.bytes > x_TI.numel() * 2]
    assert {op.name for op in largest} <= {"aten::mm", "aten::addmm_"}


@pytest.mark.parametrize("adapter", [False, True])
def test_recomputation_stops_before_the_last_product(adapter: bool) -> None:
    """A checkpointed block that ends in a layer makes its weight's product once forward and, of the gradient, once: not again."""
    from torch.utils.checkpoint import checkpoint

    x_TI = torch.empty(64, 32, dtype=torch.bfloat16, device="meta", requires_grad=True)
    weight_OI = torch.empty(48, 32, dtype=torch.bfloat16, device="meta")
    a_rI, b_Or = (torch.empty(shape, device="meta", requires_grad=True) for shape in ((4, 32), (48, 4)))

    def block(x: Tensor) -> Tensor:
        return adapted(x, Layer(weight_OI, None, a_rI, b_Or, 2.0)) if adapter else F.linear(x, weight_OI)

    with Recorder() as recorder:
        out = checkpoint(block, x_TI, use_reentrant=False)
        out.backward(torch.empty_like(out))
    assert len([op for op in recorder.operators if op.cost.flops == 2 * 64 * 32 * 48]) == 2
