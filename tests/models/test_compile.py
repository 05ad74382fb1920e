"""Blocks compile to one graph that fits every layout of documents and images: what depends on the layout is opaque."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from eyeline.core.randomness import rng_for
from eyeline.data.fetch.batches import batch_of
from tests.models import parity
from tests.models.cases import ALL, kinds_of_blocks
from tests.models.parity import Case, close

LAYOUTS = 20


def kinds() -> Iterator[Any]:
    """Every kind of block once, whichever families have it: (its first case, name of the block)."""
    seen = set()
    for case in ALL:
        for name, kind in kinds_of_blocks(case).items():
            if kind not in seen:
                seen.add(kind)
                yield pytest.param(case, name, id=f"{name} of {case.config.family}: {case.id}")


def called(case: Case, model: nn.Module, name: str) -> tuple[tuple[Any, ...], dict[str, Any], Tensor]:
    """How the model calls this block for the case's documents, and the bounds among its arguments.

    Bounds of lengths are those of the whole batch: they need not be tight, and fixed capacities will have them so.
    """
    batch = batch_of(case.documents, None)
    batch = replace(batch, longest=batch.counts.slots, longest_image=batch.counts.patches)
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    hook = model.get_submodule(name).register_forward_pre_hook(lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True)
    model(batch)
    hook.remove()
    [(args, kwargs)] = calls
    return args, kwargs, batch.cu_N1 if name.startswith("vision.") else batch.cu_S1


def layouts(cu_S1: Tensor) -> list[Tensor]:
    """Other bounds of as many documents over as many rows; some are empty."""
    rng, rows = rng_for(0, "layouts"), int(cu_S1[-1])
    inner = [np.sort(rng.integers(0, rows + 1, len(cu_S1) - 2)) for _ in range(LAYOUTS)]
    return [torch.tensor([0, *x, rows], dtype=torch.int32) for x in inner]


def exchanged(x: Any, old: Tensor, new: Tensor, seen: list[Tensor]) -> Any:
    """Arguments with other bounds, and copies of all their other tensors."""
    match x:
        case Tensor() if x.shape == old.shape and torch.equal(x, old):
            seen.append(x)
            return new
        case Tensor():
            return x.detach().clone()
        case dict():
            return {k: exchanged(v, old, new, seen) for k, v in x.items()}
        case tuple():
            members = [exchanged(v, old, new, seen) for v in x]
            return type(x)(*members) if hasattr(x, "_fields") else tuple(members)
        case _:
            return x


def floats(x: Any) -> list[Tensor]:
    """The result of a block: its rows, and the load of experts."""
    return [leaf for child in x for leaf in floats(child)] if isinstance(x, tuple) else [x] if x.is_floating_point() else []


@pytest.mark.parametrize(("case", "name"), list(kinds()))
def test_one_graph_for_twenty_layouts(case: Case, name: str):
    model = parity.randomised(case)
    block = model.get_submodule(name)
    args, kwargs, cu_S1 = called(case, model, name)
    torch._dynamo.reset()
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    compiled = torch.compile(block, fullgraph=True, backend=backend)
    for other in layouts(cu_S1):
        results = []
        for run in (block, compiled):
            block.zero_grad()
            seen: list[Tensor] = []
            new_args, new_kwargs = exchanged((args, kwargs), cu_S1, other, seen)
            assert seen, "the block never sees the layout"
            x_TD = new_args[0].requires_grad_()
            outs = floats(run(*new_args, **new_kwargs))
            torch.stack([out.square().sum() for out in outs]).sum().backward()
            results.append({f"out {i}": out.detach() for i, out in enumerate(outs)} | {"x": x_TD.grad} | parity.gradients(block))
        for n, want in results[0].items():
            close(results[1][n], want, n, floor=1.0)
    assert len(graphs) == 1, f"compiled {len(graphs)} times for {LAYOUTS} layouts"
