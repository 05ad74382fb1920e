"""NF4: each number becomes the nearest level of its block; products with packed weights; the layout is bitsandbytes'."""

import pytest
import torch

from eyeline.kernels import dynamic8
from eyeline.kernels.nf4 import LEVELS, bytes_of_scales, dequantised, doubled, nf4_linear, quantised


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


def test_doubled_scales_are_near_and_a_byte_each() -> None:
    """300 blocks: one of 256 magnitudes, and a short one."""
    weight_OI = torch.randn(100, 192, generator=torch.Generator().manual_seed(0)) * 0.1
    packed_OH, largest_OB = quantised(weight_OI)
    bytes_N = doubled(largest_OB)
    assert (bytes_N.dtype, len(bytes_N)) == (torch.uint8, bytes_of_scales(300))
    assert bytes_of_scales(300) == 300 + 4 * 3
    mean = largest_OB.mean()
    parts = (largest_OB.flatten() - mean).split(256)
    want_N = torch.cat([dynamic8.dequantised(*dynamic8.quantised(part[None], True), signed=True)[0] for part in parts]) + mean
    ones_OH = torch.full_like(packed_OH, 0xFF)  # each number is the largest of its block
    assert torch.equal(dequantised(ones_OH, bytes_N).unflatten(1, (-1, 64))[:, :, 0].flatten(), want_N)
    error = (dequantised(packed_OH, bytes_N) - dequantised(packed_OH, largest_OB)).abs()
    assert 0 < error.max() < 0.01 * largest_OB.max()
    x_TI = torch.randn(5, 192, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(nf4_linear(x_TI, packed_OH, bytes_N), x_TI @ dequantised(packed_OH, bytes_N).T)


@pytest.mark.qlora
def test_doubled_layout_is_that_of_bitsandbytes() -> None:
    """Its codes for scales come from a coarse table, and are now and then one off the nearest."""
    from bitsandbytes import functional

    weight_OI = torch.randn(256, 1024, generator=torch.Generator().manual_seed(0)) * 0.05
    theirs, state = functional.quantize_4bit(weight_OI, blocksize=64, quant_type="nf4", compress_statistics=True)
    packed_OH, largest_OB = quantised(weight_OI)
    bytes_N = doubled(largest_OB)
    assert torch.equal(theirs.view(-1), packed_OH.view(-1))
    floats, codes_N = bytes_N[: 4 * 17].view(torch.float32), bytes_N[4 * 17 :]
    torch.testing.assert_close(floats[0], state.offset)
    torch.testing.assert_close(floats[1:], state.state2.absmax)
    assert (codes_N == state.absmax.view(-1)).float().mean() > 0.99
    assert (codes_N.int() - state.absmax.view(-1).int()).abs().max() <= 1
    of_theirs = torch.cat([floats.view(torch.uint8), state.absmax.view(-1)])
    torch.testing.assert_close(functional.dequantize_4bit(theirs, state), dequantised(packed_OH, of_theirs))


@pytest.mark.qlora
def test_layout_is_that_of_bitsandbytes() -> None:
    from bitsandbytes import functional

    weight_OI = weight()
    theirs, state = functional.quantize_4bit(weight_OI, blocksize=64, quant_type="nf4")
    packed_OH, largest_OB = quantised(weight_OI)
    assert torch.equal(theirs.view(-1), packed_OH.view(-1))
    torch.testing.assert_close(state.absmax.view(-1), largest_OB.view(-1))
    torch.testing.assert_close(functional.dequantize_4bit(theirs, state), dequantised(packed_OH, largest_OB))
