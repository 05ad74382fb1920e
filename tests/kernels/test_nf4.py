"""NF4: each number becomes the nearest level of its block; products with packed weights; the layout is bitsandbytes'."""

import pytest
import torch

from eyeline.kernels.nf4 import LEVELS, dequantised, nf4_linear, quantised


def weight() -> torch.Tensor:
    weight_OI = torch.randn(6, 192, generator=torch.Generator().manual_seed(0)) * 0.1
    weight_OI[0, :64] = 0
    weight_OI[1, 5] = -3
    return weight_OI


def test_each_number_becomes_the_nearest_level() -> None:
    """Compared one by one: a block of zeros, and one with a single large number, included."""
    weight_OI = weight()
    packed_OH, largest_OB = quantised(weight_OI)
    assert (packed_OH.dtype, tuple(packed_OH.shape), tuple(largest_OB.shape)) == (torch.uint8, (6, 96), (6, 3))
    got_OI = dequantised(packed_OH, largest_OB)
    for row, column in ((0, 3), (1, 5), (1, 6), (2, 64), (3, 100), (5, 191)):
        block = weight_OI[row, column // 64 * 64 : column // 64 * 64 + 64]
        levels = torch.tensor(LEVELS) * block.abs().max()
        want = levels[(levels - weight_OI[row, column]).abs().argmin()]
        torch.testing.assert_close(got_OI[row, column], want, atol=1e-7, rtol=1e-6)
    again = quantised(got_OI)
    assert torch.equal(again[0], packed_OH), "what is a level stays one: a weight may be packed again"
    assert torch.equal(again[1], largest_OB)


def test_product_is_that_of_the_dense_weight() -> None:
    packed_OH, largest_OB = quantised(weight())
    x_TI = torch.randn(5, 192, generator=torch.Generator().manual_seed(1))
    ours, theirs = x_TI.clone().requires_grad_(), x_TI.clone().requires_grad_()
    got_TO = nf4_linear(ours, packed_OH, largest_OB)
    want_TO = theirs @ dequantised(packed_OH, largest_OB).T
    torch.testing.assert_close(got_TO, want_TO)
    (got_TO**2).sum().backward()
    (want_TO**2).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)
    assert nf4_linear(x_TI.bfloat16(), packed_OH, largest_OB).dtype == torch.bfloat16


@pytest.mark.qlora
def test_layout_is_that_of_bitsandbytes() -> None:
    from bitsandbytes import functional

    weight_OI = weight()
    theirs, state = functional.quantize_4bit(weight_OI, blocksize=64, quant_type="nf4")
    packed_OH, largest_OB = quantised(weight_OI)
    assert torch.equal(theirs.view(-1), packed_OH.view(-1))
    torch.testing.assert_close(state.absmax.view(-1), largest_OB.view(-1))
    torch.testing.assert_close(functional.dequantize_4bit(theirs, state), dequantised(packed_OH, largest_OB))
