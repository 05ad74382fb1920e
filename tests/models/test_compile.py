"""Blocks compile to one graph that fits every layout of documents: the attention operator is opaque."""

import pytest
import torch
from torch import Tensor, nn

from eyeline.kernels.rope import rope_tables
from eyeline.models import qwen2, siglip2
from eyeline.models.decoder import Layout
from tests.models import twins
from tests.models.twins import VISION, close

TOKENS = 16  # also the bound on document lengths: it need not be tight
LAYOUTS = [[16], [5, 11], [4, 4, 4, 4], [1, 7, 1, 7]]


def bounds(lengths: list[int], documents: int = 4) -> Tensor:
    """Padded to one shape by empty documents, as fixed capacities will have it."""
    return torch.tensor([0, *lengths, *[0] * (documents - len(lengths))]).cumsum(0).to(torch.int32)


def language_block():
    block = qwen2.Model(twins.language(tied=True)).blocks[0]
    cos_TR, sin_TR = rope_tables(torch.arange(TOKENS)[:, None].expand(-1, 3), 6, 100.0)
    real_T = torch.ones(TOKENS, dtype=torch.bool)
    return block, lambda b, x_TD, cu_S1: b(x_TD, Layout(cos_TR, sin_TR, cu_S1, TOKENS, real_T)), 24


def vision_block():
    return siglip2.Block(VISION), lambda b, x_TD, cu_S1: b(x_TD, cu_S1, TOKENS), 16


@pytest.mark.parametrize("make", [language_block, vision_block])
def test_one_graph_for_every_layout(make):
    block, call, width = make()
    twins.randomise(block)
    torch._dynamo.reset()
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    compiled = torch.compile(block, fullgraph=True, backend=backend)
    x_TD = torch.randn(TOKENS, width, generator=torch.Generator().manual_seed(0))
    for lengths in LAYOUTS:
        results = []
        for run in (block, compiled):
            block.zero_grad()
            x = x_TD.clone().requires_grad_()
            out_TD = call(run, x, bounds(lengths))
            out_TD.square().sum().backward()
            results.append({"out": out_TD, "x": x.grad} | {n: p.grad for n, p in block.named_parameters()})
        for name, want in results[0].items():
            close(results[1][name], want, name, floor=1.0)
    assert len(graphs) == 1, f"compiled {len(graphs)} times for {len(LAYOUTS)} layouts"
    assert isinstance(block, nn.Module)
