"""Packed attention against softmax written out, one document at a time; the cache against packed attention."""

import pytest
import torch
from torch import Tensor

from eyeline.kernels import attention
from eyeline.kernels.attention import LayerCache, cached_attention, packed_attention, packed_attention_plain
from eyeline.kernels.gpu import flash_obstacle, grouped_obstacle

H, G, K = 6, 2, 8
LAYOUTS = {
    "one": [7],
    "neighbours of equal length": [5, 5, 5],
    "equal lengths apart": [4, 1, 4, 9, 1, 4],
    "empty documents": [0, 3, 0, 3],
    "all different": [1, 2, 3, 17],
}


def tensors(tokens: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(tokens, heads, K, generator=rng).to(dtype).requires_grad_() for heads in (H, G, G))


def bounds(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def by_hand(q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, lengths: list[int], causal: bool) -> Tensor:
    """softmax(q·k/√K)·v over one (H, T, T) table: -inf between documents and, if causal, ahead."""
    document_T = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    seen_TT = document_T[:, None] == document_T[None]
    if causal:
        seen_TT = seen_TT & torch.ones_like(seen_TT).tril()
    k_THK, v_THK = (x.repeat_interleave(H // G, 1) for x in (k_TGK, v_TGK))
    scores_HTT = torch.einsum("thk,uhk->htu", q_THK, k_THK) / K**0.5
    return torch.einsum("htu,uhk->thk", scores_HTT.masked_fill(~seen_TT, -torch.inf).softmax(-1), v_THK)


@pytest.mark.parametrize("takes_groups", [True, False], ids=["torch 2.13", "torch 2.11"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lengths", LAYOUTS.values(), ids=LAYOUTS)
def test_output_and_gradients(lengths, causal, takes_groups, monkeypatch):
    if takes_groups and torch.__version__ < "2.13":
        pytest.skip("this torch reads beyond the key heads")
    monkeypatch.setattr(attention, "FLASH_TAKES_GROUPS", takes_groups)
    inputs = tensors(sum(lengths))
    direction = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(1))
    want = by_hand(*inputs, lengths, causal)
    want_gradients = torch.autograd.grad((want * direction).sum(), inputs)
    cu = bounds(lengths)
    for got in (packed_attention(*inputs, cu, max(lengths), causal), packed_attention_plain(*inputs, cu, causal)):
        torch.testing.assert_close(got, want, atol=2e-6, rtol=1e-5)
        for x, y in zip(torch.autograd.grad((got * direction).sum(), inputs), want_gradients, strict=True):
            torch.testing.assert_close(x, y, atol=5e-6, rtol=1e-5)


def test_inputs_need_not_be_contiguous():
    """Heads of one fused projection, and a gradient that is an expanded scalar."""
    fused = torch.randn(9, K, H + 2 * G, generator=torch.Generator().manual_seed(2)).requires_grad_()
    q, k, v = fused.transpose(1, 2).split([H, G, G], 1)
    lengths = [4, 1, 4]
    (want,) = torch.autograd.grad(by_hand(q, k, v, lengths, True).sum(), fused)
    (got,) = torch.autograd.grad(packed_attention(q, k, v, bounds(lengths), 4, True).sum(), fused)
    torch.testing.assert_close(got, want, atol=5e-6, rtol=1e-5)


def test_bfloat16_is_near_float32():
    inputs, lengths = tensors(12, torch.bfloat16), [8, 4]
    got = packed_attention(*inputs, bounds(lengths), 8, True)
    assert got.dtype == torch.bfloat16
    want = by_hand(*(x.float() for x in inputs), lengths, True)
    torch.testing.assert_close(got.float(), want, atol=0.02, rtol=0.02)  # eight bits of mantissa


def test_mistaken_shapes_are_named():
    q, k, v = tensors(5)
    with pytest.raises(ValueError, match="T is 5 and 4"):
        packed_attention(q, k[:4], v, bounds([5]), 5, True)
    with pytest.raises(ValueError, match="G is 2 and 1"):
        packed_attention(q, k, v[:, :1], bounds([5]), 5, True)


@pytest.mark.parametrize("lengths", [[4, 1, 4], [9], []], ids=str)
def test_operators_are_sound(lengths):
    """torch's own checks of operators: schema, fake tensors, dynamic shapes."""
    q, k, v = (x.detach() for x in tensors(sum(lengths)))
    operators = torch.ops.eyeline
    torch.library.opcheck(operators.packed_attention.default, (q, k, v, bounds(lengths), True))
    out, lse = operators.packed_attention(q, k, v, bounds(lengths), True)
    torch.library.opcheck(operators.packed_attention_backward.default, (out, q, k, v, out, lse, bounds(lengths), True))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("takes_groups", [True, False], ids=["torch 2.13", "torch 2.11"])
def test_call_of_variable_length_attention(monkeypatch, takes_groups, causal):
    """What a GPU would be asked, answered by hand: the window, the bounds, and key heads as that version wants them."""

    def answer(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, window_size, options):
        assert options == ({"enable_gqa": True} if takes_groups else {})
        assert key.shape[1] == value.shape[1] == (G if takes_groups else H)
        assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
        assert max_q == max_k == 4
        if not takes_groups:
            assert torch.equal(key[:, 0], key[:, H // G - 1])
            key, value = key[:, :: H // G], value[:, :: H // G]
        return by_hand(query, key, value, cu_seq_q.diff().tolist(), causal={(-1, 0): True, (-1, -1): False}[window_size])

    def of_2_11(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)):
        return answer(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, window_size, {})

    def of_2_13(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, window_size=(-1, -1), enable_gqa=False):
        return answer(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, window_size, {"enable_gqa": enable_gqa})

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", of_2_13 if takes_groups else of_2_11)
    inputs, lengths = tensors(9), [4, 1, 4]
    got = attention._varlen(*inputs, bounds(lengths), 4, causal)
    torch.testing.assert_close(got, by_hand(*inputs, lengths, causal))


# ---- the cache


def test_decoding_equals_attention_over_the_whole_sequence():
    """Prompts of 5, 1 and 3 tokens, then three steps; after the first the middle row has finished."""
    prompts, steps = [5, 1, 3], 3
    whole = [tensors(n + steps, seed=s) for s, n in enumerate(prompts)]
    want = [by_hand(*x, [len(x[0])], causal=True) for x in whole]
    cache = LayerCache(3, 5 + steps, G, K, torch.float32, "cpu")
    with torch.no_grad():
        q, k, v = (torch.cat([x[i][:n] for x, n in zip(whole, prompts, strict=True)]) for i in range(3))
        got = cached_attention(q, k, v, bounds(prompts), 5, cache)
        torch.testing.assert_close(got, torch.cat([w[:n] for w, n in zip(want, prompts, strict=True)]), atol=2e-6, rtol=1e-5)
        rows = [0, 1, 2]
        for step in range(steps):
            if step == 1:
                cache.keep([0, 2])
                rows = [0, 2]
            at = [(row, prompts[row] + step) for row in rows]
            q, k, v = (torch.stack([whole[row][i][t] for row, t in at]) for i in range(3))
            got = cached_attention(q, k, v, bounds([1] * len(rows)), 1, cache)
            torch.testing.assert_close(got, torch.stack([want[row][t] for row, t in at]), atol=2e-6, rtol=1e-5)
    assert cache.lengths == [5 + steps, 3 + steps]


def test_prompts_of_one_token_fill_an_empty_cache():
    q, k, v = tensors(2)
    cache = LayerCache(2, 1, G, K, torch.float32, "cpu")
    got = cached_attention(q, k, v, bounds([1, 1]), 1, cache)
    torch.testing.assert_close(got, by_hand(q, k, v, [1, 1], True), atol=2e-6, rtol=1e-5)
    assert cache.lengths == [1, 1]


def test_cache_is_for_its_rows():
    q, k, v = tensors(4)
    cache = LayerCache(2, 8, G, K, torch.float32, "cpu")
    with pytest.raises(AssertionError, match="3 documents for a cache of 2 rows"):
        cached_attention(q, k, v, bounds([1, 1, 2]), 2, cache)
    cached_attention(q, k, v, bounds([2, 2]), 2, cache)
    with pytest.raises(AssertionError, match="empty cache"):
        cached_attention(q, k, v, bounds([2, 2]), 2, cache)


# ---- on a GPU


@pytest.mark.parametrize(
    ("dtype", "head_dim", "capability", "why"),
    [
        (torch.bfloat16, 64, (8, 0), None),
        (torch.bfloat16, 72, (9, 0), None),  # so400m's
        (torch.float16, 256, (12, 0), None),
        (torch.bfloat16, 64, (7, 5), "needs compute capability 8.0"),
        (torch.float32, 64, (9, 0), "this is float32"),
        (torch.bfloat16, 6, (9, 0), "multiple of 8"),
        (torch.bfloat16, 84, (9, 0), "multiple of 8"),
        (torch.bfloat16, 264, (9, 0), "at most 256"),
        (torch.bfloat16, 200, (8, 9), "no backward pass for a head dim of 200 on compute capability 8.9"),
        (torch.bfloat16, 200, (9, 0), None),
    ],
)
def test_flash_attention_or_not_is_known_beforehand(dtype, head_dim, capability, why):
    """And the kernel goes by it: what flash attention cannot compute equals the plain version, what it can reaches it."""
    obstacle = flash_obstacle(dtype, head_dim, capability)
    assert (obstacle is None) if why is None else (why in obstacle)
    rng, lengths = torch.Generator().manual_seed(0), [3, 1, 4]
    inputs = [torch.randn(8, heads, head_dim, generator=rng).to(dtype).requires_grad_() for heads in (4, 2, 2)]
    reached = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "capability_of", lambda device: capability)
        patch.setattr(attention, "_varlen", lambda *x: reached.append(x) or packed_attention_plain(*x[:4], x[5]))
        got = attention._on_gpu(*inputs, bounds(lengths), 4, True)
        gradients = torch.autograd.grad(got.float().square().sum(), inputs)
    assert len(reached) == (why is None)
    want = packed_attention_plain(*inputs, bounds(lengths), True)
    tolerance = {"rtol": 0.02, "atol": 0.02} if dtype != torch.float32 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(got, want, **tolerance)
    for x, y in zip(gradients, torch.autograd.grad(want.float().square().sum(), inputs), strict=True):
        torch.testing.assert_close(x, y, rtol=0.05, atol=0.05) if dtype != torch.float32 else torch.testing.assert_close(x, y)


def test_fallback_asks_for_no_groups(monkeypatch):
    """The memory-efficient kernel knows none, and the kernel that does holds length² scores."""
    seen = []
    monkeypatch.setattr(attention, "capability_of", lambda device: (9, 0))
    monkeypatch.setattr(attention, "packed_attention_plain", lambda q, k, v, *x: seen.append((q.shape, k.shape, v.shape)) or q)
    attention._on_gpu(*tensors(8), bounds([8]), 8, True)
    assert len(set(seen[0])) == 1


def test_rocm_build_takes_no_untried_kernel(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "ROCm" in flash_obstacle(torch.bfloat16, 64, (9, 4))
    assert "ROCm" in grouped_obstacle(torch.bfloat16, (9, 4))


def test_no_rows_have_gradients_of_zeros_on_a_gpu_too():
    """A rank without images computes nothing, and asks no kernel."""
    q, k, v = (torch.empty(0, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    out_THK = attention._on_gpu(q, k, v, torch.zeros(1, dtype=torch.int32), 0, causal=False)
    assert out_THK.shape == (0, 4, 8)
    out_THK.sum().backward()
    assert all(x.grad is not None and x.grad.shape == x.shape for x in (q, k, v))
