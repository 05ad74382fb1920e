"""The RMS norm written by hand against PyTorch's chain of operators: values to the bit, gradients, and only those that are needed."""

import pytest
import torch
from torch import Tensor

from eyeline.kernels.norms import _Normed, rms_norm, rms_norm_plain

SHAPES = [(5, 16), (4, 3, 8), (1, 1), (0, 16)]


def given(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(0)
    x, weight_D, direction = (torch.randn(size, generator=rng) for size in (shape, shape[-1:], shape))
    return (3 * x).to(dtype).requires_grad_(), weight_D.requires_grad_(), direction


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients(shape, dtype):
    x, weight_D, direction = given(shape, dtype)
    results = []
    for norm in (rms_norm, rms_norm_plain):
        out = norm(x, weight_D, 0.1)
        assert out.dtype == dtype
        results.append((out, *torch.autograd.grad((out.float() * direction).sum(), (x, weight_D))))
    assert torch.equal(results[0][0], results[1][0])
    for got, want in zip(*results, strict=True):
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want, atol=1e-5 if dtype == torch.float32 else 0.02, rtol=1e-5 if dtype == torch.float32 else 0.01)


def test_gradients_against_differences():
    x, weight_D, _ = given((3, 2, 5))
    small = tuple(t.detach().double().requires_grad_() for t in (x, weight_D))
    torch.autograd.gradcheck(lambda *inputs: _Normed.apply(*inputs, 0.1), small)


@pytest.mark.parametrize("frozen", ["x", "weight"])
def test_a_frozen_side_gets_no_gradient(frozen):
    x, weight_D, direction = given((5, 16))
    (x if frozen == "x" else weight_D).requires_grad_(False)
    (rms_norm(x, weight_D, 0.1) * direction).sum().backward()
    got = weight_D.grad if frozen == "x" else x.grad
    x2, w2, _ = given((5, 16))
    want = torch.autograd.grad((rms_norm_plain(x2, w2, 0.1) * direction).sum(), w2 if frozen == "x" else x2)[0]
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
