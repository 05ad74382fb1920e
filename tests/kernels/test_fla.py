"""fla inside a compiled graph, by a stand-in for its kernel: one operator each way with the gradients of our chunks, one graph for every
layout, and its chunks derived once per batch."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eyeline.kernels import fla
from eyeline.kernels.fla import first_of
from eyeline.kernels.gated_delta import gated_delta_rule
from tests.fla_stand_in import INPUTS, install, kernel

G, H, K, J = 2, 4, 8, 6


def given(lengths: list[int], seed: int = 0) -> tuple[list[Tensor], Tensor]:
    rng, T = torch.Generator().manual_seed(seed), sum(lengths)
    q, k, v = (torch.randn(T, *shape, generator=rng) for shape in ((G, K), (G, K), (H, J)))
    decay, beta = -torch.rand(T, H, generator=rng), torch.rand(T, H, generator=rng)
    return [x.requires_grad_() for x in (q, k, v, decay, beta)], torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


class Layers(nn.Module):
    """Three layers of the rule, each on what the one before gave."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, cu_S1: Tensor) -> Tensor:
        for _ in range(3):
            v = gated_delta_rule(q, k, v.sin(), decay, beta, cu_S1, fla=True)
        return v


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_one_graph_with_the_results_of_our_chunks(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Tensor] = []
    install(monkeypatch, kernel(calls=calls))
    torch._dynamo.reset()
    graphs: list[Any] = []

    def counting(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    compiled = torch.compile(Layers(), fullgraph=True, dynamic=True, backend=counting)
    for n, lengths in enumerate(([3, 1, 6, 2], [12], [2, 2, 2, 2, 1, 3])):
        inputs, cu_S1 = given(lengths, n)
        direction = torch.randn(sum(lengths), H, J, generator=torch.Generator().manual_seed(9))
        wanted = inputs[2]
        for _ in range(3):
            wanted = gated_delta_rule(inputs[0], inputs[1], wanted.sin(), *inputs[3:], cu_S1)
        want = torch.autograd.grad((wanted * direction).sum(), inputs)
        calls.clear()
        out = compiled(*inputs, cu_S1)
        got = torch.autograd.grad((out * direction).sum(), inputs)
        torch.testing.assert_close(out, wanted)
        for name, x, y in zip(INPUTS, got, want, strict=True):
            torch.testing.assert_close(x, y, msg=lambda said, name=name: f"{name}: {said}")
        assert len(calls) == 6, "three layers forward, and again for their gradients"
        assert all(bounds is calls[0] for bounds in calls), "fla remembers the chunks of a batch by the tensor of its bounds"
    assert len(graphs) == 1


def test_bounds_of_another_batch_are_its_own() -> None:
    a, b = torch.tensor([0, 3, 5]), torch.tensor([0, 3, 5])
    assert first_of(a) is a
    assert first_of(a.detach()) is a
    assert first_of(b) is b
    assert first_of(b[:2]) is not b
    fla._BOUNDS.clear()


def test_operator_and_gradient_are_registered_as_torch_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, kernel())
    inputs, cu_S1 = given([3, 4])
    plain = tuple(x.detach() for x in inputs)
    torch.library.opcheck(torch.ops.eyeline.fla_delta_rule.default, (*plain, cu_S1), test_utils=("test_schema", "test_faketensor"))
    torch.library.opcheck(
        torch.ops.eyeline.fla_delta_rule_backward.default,
        (torch.ones_like(plain[2]), *plain, cu_S1),
        test_utils=("test_schema", "test_faketensor"),
    )
