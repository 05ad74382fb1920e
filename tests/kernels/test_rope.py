"""Rotary positions against complex multiplication in float64, their frequencies against hand numbers and transformers' tables."""

import pytest
import torch
from torch import Tensor

from eyeline.kernels.rope import Scaling, rope_tables, rotate

T, H, K, THETA = 7, 3, 8, 100.0


def along(position_T: Tensor) -> Tensor:
    """positions_T3 of text, with rows and columns that must not matter."""
    return torch.stack([position_T, position_T + 3, position_T * 2], -1)


def test_rotation_is_multiplication_by_a_unit_complex_number():
    x_THK = torch.randn(T, H, K, generator=torch.Generator().manual_seed(0))
    position_T = torch.tensor([0, 1, 2, 5, 0, 1, 1001])  # restarting, and far
    got = rotate(x_THK, *rope_tables(along(position_T), K, THETA))
    pairs = torch.complex(x_THK[..., : K // 2].double(), x_THK[..., K // 2 :].double())
    frequency = THETA ** -(torch.arange(K // 2).double() * 2 / K)
    turned = pairs * torch.exp(1j * position_T[:, None, None] * frequency)
    torch.testing.assert_close(got, torch.cat((turned.real, turned.imag), -1).float(), atol=2e-4, rtol=1e-4)
    assert torch.equal(got[0], x_THK[0]), "position 0 turns nothing"


def test_a_part_of_the_head_is_rotated():
    x_THK = torch.randn(T, H, K, generator=torch.Generator().manual_seed(0))
    tables = rope_tables(along(torch.arange(T)), 4, THETA)
    got = rotate(x_THK, *tables)
    assert torch.equal(got[..., 4:], x_THK[..., 4:])
    assert torch.equal(got[..., :4], rotate(x_THK[..., :4], *tables))


@pytest.mark.parametrize("turned", [K, 4])
def test_gradient_is_that_of_the_formula(turned):
    """x·cos + (-second, first)·sin, differentiated by autograd: the same to the bit."""
    rng = torch.Generator().manual_seed(0)
    x_THK, direction = (torch.randn(T, H, K, generator=rng) for _ in range(2))
    cos_TR, sin_TR = rope_tables(along(torch.arange(T)), turned, THETA)

    def by_formula(x_THK: Tensor) -> Tensor:
        x_THR = x_THK[..., :turned]
        first, second = x_THR.chunk(2, -1)
        out = x_THR * cos_TR[:, None] + torch.cat((-second, first), -1) * sin_TR[:, None]
        return torch.cat((out, x_THK[..., turned:]), -1)

    results = []
    for function in (by_formula, lambda x: rotate(x, cos_TR, sin_TR)):
        leaf = x_THK.clone().requires_grad_()
        out = function(leaf)
        (out * direction).sum().backward()
        results.append((out, leaf.grad))
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


def test_frequencies_by_hand():
    """theta 100, K 4: angles of position 3 are 3·1 and 3/10, each for dims j and j + 2."""
    cos_TK, sin_TK = rope_tables(along(torch.tensor([3])), 4, 100.0)
    torch.testing.assert_close(cos_TK[0], torch.tensor([-0.9899925, 0.9553365, -0.9899925, 0.9553365]))
    torch.testing.assert_close(sin_TK[0], torch.tensor([0.1411200, 0.2955202, 0.1411200, 0.2955202]))


@pytest.mark.parametrize("sections", [(24, 20, 20), (4, 2, 2), (2, 1, 1), (11, 11, 10)])
def test_interleaved_sections_are_those_of_qwen3_vl(sections):
    from transformers import Qwen3VLTextConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

    head_dim = 2 * sum(sections)
    rope = {"rope_type": "default", "rope_theta": THETA, "mrope_section": list(sections), "mrope_interleaved": True}
    reference = Qwen3VLTextRotaryEmbedding(Qwen3VLTextConfig(head_dim=head_dim, rope_parameters=rope))
    positions_T3 = torch.randint(0, 300, (50, 3), generator=torch.Generator().manual_seed(0))
    want = reference(torch.zeros(1), positions_T3.T[:, None])
    for got, table in zip(rope_tables(positions_T3, head_dim, THETA, sections), want, strict=True):
        torch.testing.assert_close(got, table[0], atol=1e-6, rtol=0)


@pytest.mark.parametrize(("factor", "original", "theta"), [(8.0, 8192, 5e5), (32.0, 8192, 5e5), (4.0, 64, 1e4)])
def test_stretch_is_that_of_llama_3(factor, original, theta):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    scaling = {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": original}
    config = LlamaConfig(head_dim=128, rope_parameters={"rope_type": "llama3", "rope_theta": theta, **scaling})
    position_T = torch.tensor([0, 1, 7, 100, 5000])
    want = LlamaRotaryEmbedding(config)(torch.zeros(1), position_T[None])
    got = rope_tables(along(position_T), 128, theta, scaling=Scaling(factor, 1.0, 4.0, original))
    plain = rope_tables(along(position_T), 128, theta)
    for table, expected, unscaled in zip(got, want, plain, strict=True):
        torch.testing.assert_close(table, expected[0], atol=2e-3, rtol=0)  # float32 angles up to 5000
        torch.testing.assert_close(table[:4], expected[0, :4], atol=1e-5, rtol=0)
        assert (table - unscaled).abs().max() > 0.5


def test_tables_are_float32_and_only_the_result_is_rounded():
    cos_TK, sin_TK = rope_tables(along(torch.arange(4000)), K, 1e6)
    assert cos_TK.dtype == sin_TK.dtype == torch.float32
    x_THK = torch.randn(4000, 1, K, generator=torch.Generator().manual_seed(0)).bfloat16()
    got = rotate(x_THK, cos_TK, sin_TK)
    assert got.dtype == torch.bfloat16
    want = rotate(x_THK.float(), cos_TK, sin_TK)
    assert ((got.float() - want).abs() <= want.abs() * 2**-8 + 1e-6).all(), "more than one rounding to bfloat16"
