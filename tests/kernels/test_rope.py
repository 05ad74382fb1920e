"""Rotary positions against complex multiplication in float64, and their frequencies against hand numbers."""

import torch

from eyeline.kernels.rope import rope_tables, rotate

T, H, K, THETA = 7, 3, 8, 100.0


def test_rotation_is_multiplication_by_a_unit_complex_number():
    x_THK = torch.randn(T, H, K, generator=torch.Generator().manual_seed(0))
    positions_T = torch.tensor([0, 1, 2, 5, 0, 1, 1001])  # restarting, and far
    got = rotate(x_THK, *rope_tables(positions_T, K, THETA))
    pairs = torch.complex(x_THK[..., : K // 2].double(), x_THK[..., K // 2 :].double())
    frequency = THETA ** -(torch.arange(K // 2).double() * 2 / K)
    turned = pairs * torch.exp(1j * positions_T[:, None, None] * frequency)
    torch.testing.assert_close(got, torch.cat((turned.real, turned.imag), -1).float(), atol=2e-4, rtol=1e-4)
    assert torch.equal(got[0], x_THK[0]), "position 0 turns nothing"


def test_frequencies_by_hand():
    """theta 100, K 4: angles of position 3 are 3·1 and 3/10, each for dims j and j + 2."""
    cos_TK, sin_TK = rope_tables(torch.tensor([3]), 4, 100.0)
    torch.testing.assert_close(cos_TK[0], torch.tensor([-0.9899925, 0.9553365, -0.9899925, 0.9553365]))
    torch.testing.assert_close(sin_TK[0], torch.tensor([0.1411200, 0.2955202, 0.1411200, 0.2955202]))


def test_tables_are_float32_and_only_the_result_is_rounded():
    positions_T = torch.arange(4000)
    cos_TK, sin_TK = rope_tables(positions_T, K, 1e6)
    assert cos_TK.dtype == sin_TK.dtype == torch.float32
    x_THK = torch.randn(4000, 1, K, generator=torch.Generator().manual_seed(0)).bfloat16()
    got = rotate(x_THK, cos_TK, sin_TK)
    assert got.dtype == torch.bfloat16
    want = rotate(x_THK.float(), cos_TK, sin_TK)
    assert ((got.float() - want).abs() <= want.abs() * 2**-8 + 1e-6).all(), "more than one rounding to bfloat16"
