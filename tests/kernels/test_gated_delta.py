"""The gated delta rule in chunks against one token after another, each document alone; the cache against whole sequences."""

import pytest
import torch
from torch import Tensor

from eyeline.kernels import gated_delta
from eyeline.kernels.gated_delta import StateCache, cached_gated_delta_rule, gated_delta_rule, gated_delta_rule_plain
from tests.fla_stand_in import install

G, H, K, J = 2, 6, 12, 7
LAYOUTS = {
    "one": [7],
    "shorter than a convolution": [1, 2, 3, 1],
    "around the smallest chunk": [15, 16, 17],
    "around the largest chunk": [63, 64, 65],
    "several chunks": [128, 129, 200, 5, 131],
    "middle chunks": [31, 32, 33, 20],
    "empty documents": [0, 3, 0, 70, 0],
    "no tokens": [0],
}


def tensors(tokens: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """q, k, v, decay and beta. The first heads remember over several chunks, the last ones forget nearly all with every token."""
    rng = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(tokens, *shape, generator=rng).to(dtype) for shape in ((G, K), (G, K), (H, J)))
    decay = -(torch.linspace(-7, 2, H) + torch.randn(tokens, H, generator=rng)).exp()
    beta = (torch.randn(tokens, H, generator=rng) - 2).sigmoid()
    return tuple(x.requires_grad_() for x in (q, k, v, decay, beta))


def bounds(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def one_by_one(inputs: tuple[Tensor, ...], lengths: list[int]) -> tuple[Tensor, Tensor]:
    parts = zip(*(x.split(lengths) for x in inputs), strict=True)
    outs, states = zip(*(gated_delta_rule_plain(*part, bounds([len(part[0])])) for part in parts), strict=True)
    return torch.cat(outs), torch.cat(states)


def by_transformers(inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule as rule

    q, k, v, decay, beta = (x[None] for x in inputs)
    out, state = rule(q, k, v, g=decay, beta=beta, output_final_state=True, use_qk_l2norm_in_kernel=True)
    return out[0], state


def close(got: Tensor, want: Tensor, tolerance: float = 2e-5) -> None:
    largest = float(want.detach().abs().max()) if want.numel() else 0.0
    torch.testing.assert_close(got, want, atol=tolerance * max(1.0, largest), rtol=tolerance)


def test_loop_equals_the_reference_model():
    inputs = tensors(20)
    for got, want in zip(gated_delta_rule_plain(*inputs, bounds([20])), by_transformers(inputs), strict=True):
        close(got, want)


@pytest.mark.parametrize("lengths", LAYOUTS.values(), ids=LAYOUTS)
def test_output_memory_and_gradients(lengths):
    inputs = tensors(sum(lengths))
    direction = torch.randn(sum(lengths), H, J, generator=torch.Generator().manual_seed(1))
    want, want_states = one_by_one(inputs, lengths)
    want_gradients = torch.autograd.grad((want * direction).sum(), inputs, allow_unused=True, materialize_grads=True)
    packed, states = gated_delta_rule_plain(*inputs, bounds(lengths))
    close(packed, want)
    close(states, want_states)
    close(gated_delta._forward(*inputs, bounds(lengths))[1], want_states)
    got = gated_delta_rule(*inputs, bounds(lengths))
    close(got, want)
    for x, y in zip(torch.autograd.grad((got * direction).sum(), inputs), want_gradients, strict=True):
        close(x, y)


def test_gradients_by_differences():
    """Float32 inside, so the step is coarse; the numbers are those of autograd through the loop, and not derived by hand."""
    inputs = tensors(70, seed=3)
    cu = bounds([20, 50])
    direction = torch.randn(70, H, J, generator=torch.Generator().manual_seed(1))
    gradients = torch.autograd.grad((gated_delta_rule(*inputs, cu) * direction).sum(), inputs)
    for i, gradient in enumerate(gradients):
        step = torch.randn(inputs[i].shape, generator=torch.Generator().manual_seed(i)) * 3e-3
        moved = [[x + sign * step if j == i else x for j, x in enumerate(inputs)] for sign in (1, -1)]
        ahead, back = (float((gated_delta_rule_plain(*x, cu)[0].detach().double() * direction).sum()) for x in moved)
        assert (ahead - back) / 2 == pytest.approx(float((gradient * step).sum()), rel=0.02, abs=2e-3)


def test_nothing_of_another_document_is_seen():
    """Not even a number that is not one, and not in the places that fill a chunk up."""
    lengths = [5, 20, 70]
    inputs = [x.detach() for x in tensors(sum(lengths))]
    want = gated_delta_rule(*inputs, bounds(lengths))
    for x in inputs[:3]:
        x[5:25] = torch.nan
    got = gated_delta_rule(*inputs, bounds(lengths))
    assert torch.equal(got[:5], want[:5]) and torch.equal(got[25:], want[25:]) and got[5:25].isnan().all()


def test_inputs_need_not_be_contiguous():
    inputs = tensors(40)
    fused = torch.cat([x.detach().flatten(1) for x in inputs], 1).T.contiguous().T.requires_grad_()
    pieces = fused.split([x[0].numel() for x in inputs], 1)
    cut = tuple(piece.unflatten(1, x.shape[1:]) for piece, x in zip(pieces, inputs, strict=True))
    (want,) = torch.autograd.grad(gated_delta_rule_plain(*cut, bounds([9, 31]))[0].sum(), fused)
    (got,) = torch.autograd.grad(gated_delta_rule(*cut, bounds([9, 31])).sum(), fused)
    close(got, want)


def test_bfloat16_is_near_float32():
    inputs, lengths = tensors(90, dtype=torch.bfloat16), [20, 70]
    got = gated_delta_rule(*inputs, bounds(lengths))
    assert got.dtype == torch.bfloat16
    want, _ = one_by_one(tuple(x.float() for x in inputs), lengths)
    assert (got.float() - want).abs().max() <= 2**-8 * want.abs().max()  # only the result is rounded: eight bits of mantissa


def test_mistaken_shapes_are_named():
    q, k, v, decay, beta = tensors(5)
    with pytest.raises(ValueError, match="T is 5 and 4"):
        gated_delta_rule(q, k[:4], v, decay, beta, bounds([5]))
    with pytest.raises(AssertionError, match="5 value heads for 2 key heads"):
        gated_delta_rule(q, k, v[:, :5], decay[:, :5], beta[:, :5], bounds([5]))


def test_operators_are_sound():
    inputs = tuple(x.detach() for x in tensors(25))
    torch.library.opcheck(torch.ops.eyeline.gated_delta_rule.default, (*inputs, bounds([4, 1, 20])))
    torch.library.opcheck(torch.ops.eyeline.gated_delta_rule_backward.default, (inputs[2], *inputs, bounds([4, 1, 20])))


# ---- fla


def test_call_of_fla(monkeypatch):
    """What a GPU would be asked, answered by the loop: one row of documents, their bounds as they are, its own division by the length."""
    inputs, cu = tensors(9), bounds([4, 5])

    def chunk_gated_delta_rule(  # as fla 0.4 to 0.6 have it, without what we leave alone
        q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False, cu_seqlens=None, **_
    ):
        assert q.shape == k.shape == (1, 9, H, K) and v.shape == (1, 9, H, J) and g.shape == beta.shape == (1, 9, H)
        assert cu_seqlens.data_ptr() == cu.data_ptr() and g.dtype == torch.float32 and scale is None and initial_state is None
        assert use_qk_l2norm_in_kernel
        assert torch.equal(q[:, :, 0], q[:, :, H // G - 1])
        out, state = gated_delta_rule_plain(q[0, :, :: H // G], k[0, :, :: H // G], v[0], g[0], beta[0], cu_seqlens)
        return out[None], state

    install(monkeypatch, chunk_gated_delta_rule)
    want, states = gated_delta_rule_plain(*inputs, cu)
    close(gated_delta_rule(*inputs, cu, fla=True), want)
    cache = state_cache(2)
    close(cached_gated_delta_rule(*inputs, cu, cache, fla=True), want.detach())
    close(cache.state_BHKJ, states.detach())


def test_running_sums_without_cumsum_are_the_same(monkeypatch):
    """cumsum has no deterministic version on CUDA, so that where one is asked for, the rule does without."""
    inputs, cu = tensors(90), bounds([20, 70])
    want = gated_delta_rule(*inputs, cu)
    want_gradients = torch.autograd.grad(want.square().sum(), inputs)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    cumsum, floats = Tensor.cumsum, []
    monkeypatch.setattr(Tensor, "cumsum", lambda x, *a: floats.append(x.dtype) or cumsum(x, *a))
    got = gated_delta_rule(*inputs, cu)
    close(got, want)
    for x, y in zip(torch.autograd.grad(got.square().sum(), inputs), want_gradients, strict=True):
        close(x, y)
    assert set(floats) == {torch.int64}


# ---- the cache


def state_cache(rows: int) -> StateCache:
    return StateCache(rows, (H, K, J), (3,), 4, torch.float32, "cpu")


def test_decoding_equals_the_whole_sequence():
    """Prompts of 5, 1 and 70 tokens, then three steps; after the first the middle row has finished."""
    prompts, steps = [5, 1, 70], 3
    whole = [tuple(x.detach() for x in tensors(n + steps, seed=s)) for s, n in enumerate(prompts)]
    want = [gated_delta_rule_plain(*x, bounds([len(x[0])])) for x in whole]
    cache = state_cache(3)
    packed = [torch.cat([x[i][:n] for x, n in zip(whole, prompts, strict=True)]) for i in range(5)]
    got = cached_gated_delta_rule(*packed, bounds(prompts), cache)
    close(got, torch.cat([w[:n] for (w, _), n in zip(want, prompts, strict=True)]))
    rows = [0, 1, 2]
    for step in range(steps):
        if step == 1:
            cache.keep([2, 0])
            rows = [2, 0]
        at = [(row, prompts[row] + step) for row in rows]
        now = [torch.stack([whole[row][i][t] for row, t in at]) for i in range(5)]
        got = cached_gated_delta_rule(*now, bounds([1] * len(rows)), cache)
        close(got, torch.stack([want[row][0][t] for row, t in at]))
    assert cache.lengths == [73, 8]
    close(cache.state_BHKJ, torch.cat([want[2][1], want[0][1]]))


def test_prompts_of_one_token_fill_an_empty_cache():
    inputs = tensors(2)
    cache = state_cache(2)
    want, states = gated_delta_rule_plain(*inputs, bounds([1, 1]))
    close(cached_gated_delta_rule(*inputs, bounds([1, 1]), cache), want.detach())
    close(cache.state_BHKJ, states.detach())
    assert cache.lengths == [1, 1]


def test_cache_is_for_its_rows():
    cache = state_cache(2)
    with pytest.raises(AssertionError, match="3 documents for a cache of 2 rows"):
        cached_gated_delta_rule(*tensors(4), bounds([1, 1, 2]), cache)
    cached_gated_delta_rule(*tensors(4), bounds([2, 2]), cache)
    with pytest.raises(AssertionError, match="empty cache"):
        cached_gated_delta_rule(*tensors(4), bounds([2, 2]), cache)
