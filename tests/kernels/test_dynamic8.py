"""Numbers in 8 bits: each becomes the nearest of 256 levels of its block; levels and codes are bitsandbytes'."""

import pytest
import torch
from torch import Tensor

from eyeline.kernels.dynamic8 import dequantised, levels, quantised

CPU = torch.device("cpu")


def numbers(signed: bool) -> Tensor:
    """Rows of two blocks and a short one, with a block of zeros and one with a single large number."""
    x_NR = torch.randn(4, 600, generator=torch.Generator().manual_seed(0))
    x_NR[0, :256] = 0
    x_NR[1, 300] = 50
    return x_NR if signed else x_NR**2


@pytest.mark.parametrize("signed", [True, False])
def test_each_number_becomes_the_nearest_level_of_its_block(signed: bool) -> None:
    x_NR = numbers(signed)
    code_NR, largest_NB = quantised(x_NR, signed)
    assert (code_NR.dtype, code_NR.shape, tuple(largest_NB.shape)) == (torch.uint8, x_NR.shape, (4, 3))
    got_NR = dequantised(code_NR, largest_NB, signed)
    for block, start in enumerate((0, 256, 512)):
        part_NK = x_NR[:, start : start + 256]
        largest_N1 = part_NK.abs().amax(1, keepdim=True)
        assert torch.equal(largest_N1[:, 0], largest_NB[:, block])
        error_NKL = (part_NK[..., None] - largest_N1[..., None] * levels(signed, CPU)).abs()
        got_error_NK = (got_NR[:, start : start + 256] - part_NK).abs()
        near = got_error_NK <= error_NKL.amin(2) * (1 + 1e-5) + 1e-9
        assert (near | ((part_NK > 0) & (code_NR[:, start : start + 256] == 1) if not signed else near)).all()
    assert torch.equal(quantised(got_NR, signed)[0], code_NR), "what is a level stays one"


def test_positive_number_does_not_become_zero_without_a_sign() -> None:
    """A first moment divided by the root of a second that was rounded to zero would be a huge update."""
    x_NR = torch.tensor([[1.0, 1e-12, 0.0]])
    got_NR = dequantised(*quantised(x_NR, signed=False), signed=False)
    assert got_NR[0, 0] == 1
    assert got_NR[0, 1] > 0
    assert got_NR[0, 2] == 0


@pytest.mark.qlora
@pytest.mark.parametrize("signed", [True, False])
def test_levels_and_codes_are_those_of_bitsandbytes(signed: bool) -> None:
    """Its kernel for CPUs looks levels up in a coarse table, and is now and then the level next to the nearest."""
    from bitsandbytes import functional

    assert torch.equal(functional.create_dynamic_map(signed), levels(signed, CPU))
    x_NR = numbers(signed)[1:, :512].contiguous()
    codes, state = functional.quantize_blockwise(x_NR, code=levels(signed, CPU), blocksize=256)
    code_NR, largest_NB = quantised(x_NR, signed)
    assert torch.equal(state.absmax, largest_NB.view(-1))
    assert (codes == code_NR).float().mean() > 0.9
    got_NR = dequantised(code_NR, largest_NB, signed)
    assert torch.equal(functional.dequantize_blockwise(code_NR.contiguous(), state), got_NR)
    errors = [(y_NR - x_NR).abs() for y_NR in (got_NR, functional.dequantize_blockwise(codes, state))]
    zeroed = (codes == levels(signed, CPU).tolist().index(0)) & (x_NR != 0)
    assert (errors[0] <= errors[1] * (1 + 1e-5) + 1e-9)[~zeroed].all()
