"""FP8 linear layers: the emulation against rounding by hand, gradients, and torch's own product against the emulation, on this CPU too."""

from typing import Any

import pytest
import torch
from torch import Tensor

from eyeline.kernels import float8
from eyeline.kernels.float8 import E4M3, E5M2, float8_fault, float8_linear, product_plain, product_scaled, quantised

SCALINGS: list[Any] = ["tensorwise", "rowwise"]


def rounded(x: Tensor, bits: int, least: int, most: float) -> Tensor:
    """x with so many bits of mantissa, down to subnormal numbers of exponent `least`: by arithmetic, without torch's dtypes."""
    exponent = torch.floor(torch.log2(x.abs().clamp_min(1e-30))).clamp_min(least)
    step = 2.0 ** (exponent - bits)
    return (torch.round(x / step) * step).clamp(-most, most)


def by_hand(x: Tensor, form: torch.dtype, dim: int | None) -> Tensor:
    bits, least, most = {E4M3: (3, -6, 448.0), E5M2: (2, -14, 57344.0)}[form]
    largest = x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)
    return rounded(x / (largest / most), bits, least, most) * (largest / most)


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    """x with an outlier, a weight, and a gradient of the output. Rows are no multiple of 16."""
    rng = torch.Generator().manual_seed(0)
    x_TI, weight_OI, dout_TO = torch.randn(21, 32, generator=rng), torch.randn(48, 32, generator=rng), torch.randn(21, 48, generator=rng)
    x_TI[3, 5] = 60.0
    return x_TI, weight_OI, dout_TO


@pytest.mark.parametrize("scaling", SCALINGS)
def test_output_and_gradients_are_those_of_rounded_operands(scaling: Any) -> None:
    x_TI, weight_OI, dout_TO = inputs()
    leaves = [x_TI.clone().requires_grad_(), weight_OI.clone().requires_grad_()]
    out = float8_linear(*leaves, scaling)
    out.backward(dout_TO)
    rows = scaling == "rowwise"
    form = E4M3 if rows else E5M2
    left, right = (1, 0) if rows else (None, None)  # the dim that a product sums over, of its operands
    want = [
        by_hand(x_TI, E4M3, left) @ by_hand(weight_OI.T, E4M3, right),
        by_hand(dout_TO, form, left) @ by_hand(weight_OI, E4M3, right),
        by_hand(dout_TO.T, form, left) @ by_hand(x_TI, E4M3, right),
    ]
    for got, hand in zip([out.detach(), *(x.grad for x in leaves)], want, strict=True):
        assert got is not None
        torch.testing.assert_close(got, hand, rtol=1e-4, atol=1e-4)
    exact = x_TI @ weight_OI.T
    assert 0.005 < float((out.detach() - exact).norm() / exact.norm()) < 0.06


def test_an_outlier_coarsens_its_own_row_alone() -> None:
    """One scale leaves nothing of numbers that are ten million times smaller."""
    x_TI, weight_OI, _ = inputs()
    x_TI *= 1e-3
    x_TI[3, 5] = 1e4
    other = torch.arange(len(x_TI)) != 3
    exact = (x_TI @ weight_OI.T)[other]
    off = [float((float8_linear(x_TI, weight_OI, one)[other] - exact).norm() / exact.norm()) for one in SCALINGS]
    assert off[0] > 0.9 and off[1] < 0.06


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("form", [E4M3, E5M2])
def test_torchs_product_equals_the_emulation(scaling: Any, form: torch.dtype) -> None:
    """What a GPU's branch calls, which this CPU has, too: operands, layouts, scales, and rows filled up to a multiple of 16."""
    x_TI, weight_OI, dout_TO = inputs()
    for a, b in ((x_TI, weight_OI), (dout_TO, weight_OI.T), (dout_TO.T, x_TI.T)):
        got = product_scaled(a, b, form, scaling, torch.float32)
        torch.testing.assert_close(got, product_plain(a, b, form, scaling), rtol=1e-4, atol=1e-4)


def test_rows_are_filled_up_for_torchs_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU wants what is summed over to be a multiple of 16; the CPU takes any."""
    seen, original = [], torch._scaled_mm
    monkeypatch.setattr(torch, "_scaled_mm", lambda a, b, **how: (seen.append((a.shape[1], b.stride())), original(a, b, **how))[1])
    x_TI, _, dout_TO = inputs()
    product_scaled(dout_TO.T, x_TI.T, E5M2, "tensorwise", torch.float32)
    assert seen == [(32, (1, 32))]  # of 21 rows; and the right operand is column after column


def test_zeros_stay_zeros_and_what_is_not_finite_stays_so() -> None:
    q, scale = quantised(torch.zeros(2, 16), E4M3, "rowwise")
    assert not q.float().any() and scale.isfinite().all()
    x_TI, weight_OI, _ = inputs()
    for value in (float("inf"), float("nan")):
        x_TI[0, 0] = value
        assert not float8_linear(x_TI, weight_OI, "tensorwise").isfinite().all()


@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_wrong_product_is_a_fault(scaling: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert float8_fault(torch.device("cpu"), scaling) is None
    monkeypatch.setattr(float8, "product_scaled", lambda a, b, form, how, out: (1.1 * product_plain(a, b, form, how)).to(out))
    assert str(float8_fault(torch.device("cpu"), scaling)).startswith("the output is off by 10.")
