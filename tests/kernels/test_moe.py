"""Experts against a loop over tokens: routes, products, gradients; unused experts; rows that no fast kernel takes."""

import pytest
import torch
from torch import Tensor

from eyeline.kernels import moe
from eyeline.kernels.gpu import grouped_obstacle, grouped_waits
from eyeline.kernels.moe import by_expert, choose, grouped_swiglu, grouped_swiglu_plain, permute, round_robin, unpermute

T, E, A, D = 9, 5, 2, 6


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("normalised", [True, False])
def test_choice_is_the_likeliest(normalised):
    probability_TE = random(T, E).softmax(-1)
    chosen_TA, weight_TA = choose(probability_TE, A, normalised)
    for p_E, chosen_A, weight_A in zip(probability_TE.tolist(), chosen_TA.tolist(), weight_TA, strict=True):
        best = sorted(range(E), key=lambda e: -p_E[e])[:A]
        assert chosen_A == best
        total = sum(p_E[e] for e in best) if normalised else 1.0
        torch.testing.assert_close(weight_A, torch.tensor([p_E[e] / total for e in best]))


def test_a_bias_changes_the_choice_and_not_the_weights():
    probability_TE = torch.tensor([[0.4, 0.3, 0.2, 0.1]])
    chosen_TA, weight_TA = choose(probability_TE, 2, normalised=False, bias_E=torch.tensor([-0.35, 0.0, 0.0, 0.15]))
    assert chosen_TA.tolist() == [[1, 3]], "0.3 and 0.25; 0.2 and 0.05 lose"
    torch.testing.assert_close(weight_TA, torch.tensor([[0.3, 0.1]]))


def test_round_robin_is_even_and_gives_a_token_different_experts():
    chosen_TA = round_robin(10, E, A, torch.device("cpu"))
    assert torch.equal(chosen_TA.flatten().bincount(minlength=E), torch.full((E,), 10 * A // E))
    assert all(len(set(row)) == A for row in chosen_TA.tolist())


def test_rows_are_sorted_by_expert_and_then_by_token():
    chosen_TA = torch.tensor([[3, 1], [1, 3], [0, 3]])
    order_N, inverse_N, ends_E = by_expert(chosen_TA, 5)
    assert order_N.tolist() == [4, 1, 2, 0, 3, 5]
    assert ends_E.tolist() == [1, 3, 3, 6, 6]
    assert order_N[inverse_N].tolist() == list(range(6))


def test_there_and_back_is_a_loop_over_tokens():
    """Values and gradients of a weighted sum of scaled copies."""
    chosen_TA = torch.stack([torch.randperm(E, generator=torch.Generator().manual_seed(t))[:A] for t in range(T)])
    x_TD, weight_TA, scale_E = random(T, D).requires_grad_(), random(T, A, seed=1).requires_grad_(), random(E, seed=2)
    order_N, inverse_N, _ = by_expert(chosen_TA, E)
    x_ND = permute(x_TD, order_N, inverse_N)
    got_TD = unpermute(x_ND * scale_E[chosen_TA.flatten()[order_N]][:, None], weight_TA, order_N, inverse_N)
    want_TD = torch.stack([sum(weight_TA[t, a] * scale_E[chosen_TA[t, a]] * x_TD[t] for a in range(A)) for t in range(T)])
    torch.testing.assert_close(got_TD, want_TD)
    got, want = (torch.autograd.grad((y * random(T, D, seed=3)).sum(), (x_TD, weight_TA)) for y in (got_TD, want_TD))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


ENDS = [[2, 2, 5, 9, 9], [0, 0, 0, 0, 9], [9, 9, 9, 9, 9]]
INPUTS = ("x", "gate", "up", "down")


def inputs(rows: int, needed: tuple[str, ...] = INPUTS) -> tuple[Tensor, ...]:
    """Rows of width D, and E experts of hidden width 7."""
    shapes = {"x": (rows, D), "gate": (E, 7, D), "up": (E, 7, D), "down": (E, D, 7)}
    return tuple(random(*shape, seed=i).requires_grad_(name in needed) for i, (name, shape) in enumerate(shapes.items()))


@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize("needed", [INPUTS, ("x",), ("gate", "up", "down"), ("gate",), ("up",), ("down",), ("x", "down")], ids=" ".join)
def test_experts_are_a_loop(ends, needed):
    """Values and the gradients that are needed, which are of an expanded number here."""
    given, ends_E = inputs(9, needed), torch.tensor(ends, dtype=torch.int32)
    wanted = [x for x in given if x.requires_grad]
    results = []
    for function in (grouped_swiglu, grouped_swiglu_plain):
        out_ND = function(*given, ends_E)
        results.append([out_ND, *torch.autograd.grad(out_ND.sum(), wanted)])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)


def test_an_experts_layer_by_hand():
    """One row, x = 2: gate 1·2, up 3·2, silu(2)·6 = 10.5696, down -0.5."""
    weights = [torch.full((1, 1, 1), w) for w in (1.0, 3.0, -0.5)]
    got = grouped_swiglu(torch.tensor([[2.0]]), *weights, torch.tensor([1], dtype=torch.int32))
    torch.testing.assert_close(got, torch.tensor([[-5.2848]]), atol=1e-4, rtol=0)


def test_no_rows_at_all():
    given = inputs(0)
    out_ND = grouped_swiglu(*given, torch.zeros(E, dtype=torch.int32))
    assert out_ND.shape == (0, D)
    assert all(not x.any() and x.shape == y.shape for x, y in zip(torch.autograd.grad(out_ND.sum(), given), given, strict=True))


@pytest.mark.parametrize("needed", [INPUTS, ("x",), ("up", "down")], ids=" ".join)
def test_operators_keep_torchs_rules(needed):
    given, ends_E = inputs(9, ()), torch.tensor(ENDS[0], dtype=torch.int32)
    operators = torch.ops.eyeline
    torch.library.opcheck(operators.grouped_swiglu.default, (*given, ends_E))
    out_ND, *products = operators.grouped_swiglu(*given, ends_E)
    flags = [name in needed for name in INPUTS]
    torch.library.opcheck(operators.grouped_swiglu_backward.default, (out_ND, *given, ends_E, *products, flags))


# ---- on a GPU


@pytest.mark.parametrize(
    ("capability", "dtype", "obstacle", "waits"),
    [
        ((9, 0), torch.bfloat16, None, False),
        ((10, 0), torch.bfloat16, None, False),
        ((10, 3), torch.bfloat16, None, False),
        ((8, 0), torch.bfloat16, None, True),
        ((8, 9), torch.bfloat16, None, True),
        ((12, 0), torch.bfloat16, None, True),
        ((7, 5), torch.bfloat16, "compute capability 8.0", True),
        ((9, 0), torch.float32, "float32", False),
    ],
)
def test_grouped_product_or_not_is_known_beforehand(capability, dtype, obstacle, waits):
    found = grouped_obstacle(dtype, capability)
    assert (found is None) if obstacle is None else (obstacle in found)
    assert grouped_waits(capability) == waits


@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (10, 3)])
def test_expert_without_rows_has_a_gradient_of_zero_on_blackwell(capability, monkeypatch):
    """There the kernel leaves it as the memory was: nothing of that reaches an optimizer."""
    ends = torch.tensor([0, 3, 3, 8], dtype=torch.int32)

    def grouped_mm(dout_FN, x_ND, offs):
        parts = [(dout_FN[:, a:b] @ x_ND[a:b]) for a, b in ((0, 0), (0, 3), (3, 3), (3, 8))]
        return torch.stack([torch.full_like(part, torch.nan) if e in (0, 2) else part for e, part in enumerate(parts)])

    monkeypatch.setattr(moe, "_kernel_takes", lambda *x: True)
    monkeypatch.setattr(moe, "capability_of", lambda device: capability)
    monkeypatch.setattr(moe.F, "grouped_mm", grouped_mm)
    dout, x = random(8, 4), random(8, 6, seed=1)
    got = moe._gradient(dout, x, ends)
    assert got.isnan().any() == (capability[0] == 9)  # a real Hopper gives zeros
    if capability[0] == 10:
        assert not got[[0, 2]].any()
        torch.testing.assert_close(got[1], dout[:3].T @ x[:3])
        torch.testing.assert_close(got[3], dout[3:].T @ x[3:])


def test_rows_are_summed_as_they_are_looked_up() -> None:
    """The gradient of `permute` on a GPU, where nothing is gathered first."""
    from eyeline.kernels.moe import _summed_rows

    x_ND = torch.randn(10, 4, generator=torch.Generator().manual_seed(0))
    inverse_N = torch.tensor([3, 1, 4, 0, 5, 9, 2, 6, 8, 7])
    torch.testing.assert_close(_summed_rows(x_ND, inverse_N.view(5, 2)), x_ND[inverse_N].view(5, 2, 4).sum(1))
