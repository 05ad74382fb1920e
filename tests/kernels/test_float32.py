"""Products that are summed in float32 out of bfloat16, as a GPU makes them, against float64; the head's gradient against its plain form."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from eyeline.core.batch import IGNORE
from eyeline.kernels import float32
from eyeline.kernels.cross_entropy import logits_gradient
from eyeline.study.roofline.record import Recorder

T, D, E = 50, 64, 6


def given(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(0)
    x_TD, weight_ED, direction = (torch.randn(shape, generator=rng) for shape in ((T, D), (E, D), (T, E)))
    return x_TD.bfloat16().to(dtype).requires_grad_(), weight_ED.to(torch.promote_types(dtype, torch.float32)).requires_grad_(), direction


def test_split_products_are_as_near_to_float64_as_float32_is() -> None:
    exact_x, exact_weight, direction = given(torch.float64)
    exact_out = exact_x @ exact_weight.T
    exact = [exact_out, *torch.autograd.grad((exact_out * direction).sum(), (exact_x, exact_weight))]
    off = []
    for function in (float32._Split.apply, float32.linear_plain):
        x_TD, weight_ED, _ = given()
        out = function(x_TD, weight_ED)
        assert out.dtype == torch.float32
        found = [out, *torch.autograd.grad((out * direction).sum(), (x_TD, weight_ED))]
        off.append([((got.double() - want).norm() / want.norm()).item() for got, want in zip(found, exact, strict=True)])
    split, plain = off
    assert split[0] < 2**-16  # a rounded weight would be off by 2⁻⁹
    assert split[1] < plain[1] * 1.02  # rounded to bfloat16 in both
    assert split[2] < 2**-15


@pytest.mark.parametrize("frozen", ["x", "weight"])
def test_a_frozen_side_gets_no_gradient(frozen: str) -> None:
    x_TD, weight_ED, _ = given()
    (x_TD if frozen == "x" else weight_ED).requires_grad_(False)
    float32._Split.apply(x_TD, weight_ED).sum().backward()
    assert (x_TD.grad is None, weight_ED.grad is None) == (frozen == "x", frozen == "weight")


def test_a_gpu_makes_no_float32_copy() -> None:
    x_TD, weight_ED = torch.empty(4096, 512, dtype=torch.bfloat16, device="meta"), torch.empty(E, 512, device="meta")
    with Recorder() as recorder:
        assert float32.linear(x_TD, weight_ED).dtype == torch.float32
    (product,) = [op for op in recorder.operators if op.kind == "matrix products"]
    assert (product.name, product.cost.rate) == ("aten::mm", "bf16")
    assert all(op.bytes < x_TD.numel() for op in recorder.operators if op is not product)


def test_gradient_of_logits_is_that_of_cross_entropy() -> None:
    rng = torch.Generator().manual_seed(0)
    logits_RV = torch.randn(5, 9, generator=rng).requires_grad_()
    labels_R = torch.tensor([0, 8, IGNORE, 3, IGNORE])
    (want,) = torch.autograd.grad(F.cross_entropy(logits_RV, labels_R, ignore_index=IGNORE, reduction="sum"), logits_RV)
    torch.testing.assert_close(logits_gradient(logits_RV.log_softmax(-1), labels_R, torch.float32), want, atol=1e-6, rtol=1e-6)
