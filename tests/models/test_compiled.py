"""Compiled blocks: as few graphs as stated over 50 varied batches, loss and every gradient as without, and nothing else of the model
changed."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters

from eyeline.core.batch import Batch, Budget, Document
from eyeline.core.plan import Part, Plan, materialise
from eyeline.core.randomness import rng_for
from eyeline.data.fetch.batches import batch_of
from eyeline.models.compiled import compile_blocks
from eyeline.models.layers import EVERY_BLOCK, Compiled, Recompute
from eyeline.models.lora import LoRA
from eyeline.models.shape import Trains, shape
from tests.models import parity
from tests.models.cases import ALL
from tests.models.parity import Case, all_close, close

BY_NAME = {(case.config.family, case.id): case for case in ALL}
BUDGET, BATCHES = Budget(128, 1000), 50
ADAPTER = LoRA(rank=2, alpha=3, dropout=0.25, targets="all-linear")


@dataclass(frozen=True)
class Way:
    """What trains, and how many graphs that takes."""

    case: Case
    graphs: int
    trains: Mapping[Part, Trains] | None = None
    checkpointing: tuple[Part, ...] = ()
    how: Recompute = EVERY_BLOCK
    experts_apart: bool = False  # as where ranks share out experts: they run between two graphs


LANGUAGE: Mapping[Part, Trains] = {"language": "adapters"}
PROJECTOR: Mapping[Part, Trains] = {"projector": "full"}
BOTH: Mapping[Part, Trains] = {"vision": "adapters", "projector": "full", "language": "adapters"}


def ways() -> Iterator[Any]:
    """Every family; its parts frozen, adapted and in full; with and without recomputation."""
    llava, naflex = BY_NAME["llava", "shuffled untied"], BY_NAME["llava", "NaFlex"]
    qwen3_vl, experts = BY_NAME["qwen3_vl", "tied"], BY_NAME["qwen3_vl", "experts"]
    qwen3_5, qwen3_5_experts = BY_NAME["qwen3_5_vl", "tied"], BY_NAME["qwen3_5_vl", "experts"]
    found = {
        "text": Way(BY_NAME["text", "qwen3 tied"], 1),
        "llava": Way(llava, 2),
        "llava-lora": Way(llava, 3, LANGUAGE),
        "naflex-projector": Way(naflex, 3, PROJECTOR),
        "qwen3_vl": Way(qwen3_vl, 2, None, ("vision", "language")),
        "qwen3_vl-lora": Way(qwen3_vl, 4, BOTH, ("vision", "language")),
        "qwen3_vl-selective": Way(qwen3_vl, 2, None, ("vision", "language"), Recompute(None, selective=True)),
        "qwen3_vl-some-blocks": Way(qwen3_vl, 3, None, ("language",), Recompute(frozenset({0}))),
        "qwen3_vl-experts": Way(experts, 2),
        "qwen3_vl-experts-lora": Way(experts, 3, LANGUAGE, ("language",)),
        "qwen3_5_vl": Way(qwen3_5, 3),
        "qwen3_5_vl-lora": Way(qwen3_5, 3, LANGUAGE, ("language",)),
        "qwen3_5_vl-experts": Way(qwen3_5_experts, 3, None, ("language",)),
        "qwen3_vl-experts-apart": Way(experts, 3, None, ("vision", "language"), experts_apart=True),
        "qwen3_vl-experts-apart-lora": Way(experts, 4, LANGUAGE, experts_apart=True),
        "qwen3_5_vl-experts-apart": Way(qwen3_5_experts, 4, None, ("language",), Recompute(None, selective=True), experts_apart=True),
    }
    for name, way in found.items():
        yield pytest.param(way, id=name, marks=[] if name == "text" else [pytest.mark.slow])


def planned(way: Way) -> Plan[Any]:
    """The model in memory, every tensor random."""
    adapters: dict[Part, LoRA] = {part: ADAPTER for part, how in (way.trains or {}).items() if how == "adapters"}
    plan = shape(way.case.config, trains=way.trains, adapters=adapters)
    plan.model.recompute(dict.fromkeys(way.checkpointing, way.how))
    materialise(plan, "cpu")
    parity.randomise(plan.model)
    plan.model.train()
    return plan


def varied(case: Case, count: int) -> list[Batch]:
    """Batches of other documents, images and labels each; some without images, and one of them without documents."""
    rng, made = rng_for(0, "varied batches"), list[Batch]()
    for n in range(count):
        chosen: list[Document] = [case.documents[i] for i in rng.permutation(len(case.documents))[: 1 + n % len(case.documents)]]
        if n % 5 == 1:
            chosen = case.texts or chosen
        made.append(batch_of([] if n == 3 else chosen, BUDGET).with_draws(0, n))
    return made


@pytest.mark.parametrize("way", list(ways()))
def test_graphs_over_varied_batches_and_equality_with_eager(way: Way) -> None:
    eager, plan = planned(way), planned(way)
    torch._dynamo.reset()
    counters.clear()
    assert compile_blocks(plan, backend="aot_eager", experts_apart=way.experts_apart)
    for n, batch in enumerate(varied(way.case, BATCHES)):
        if way.trains == PROJECTOR and not batch.has_images:
            close(plan.model(batch).out, eager.model(batch).out, "loss")  # which no gradient reaches
            continue
        loss, gradients = parity.run_batch(plan.model, batch)
        if not batch.ids:
            assert not any(x.any() for x in gradients.values())
        elif n < 8 or n % 10 == 0:
            want = parity.run_batch(eager.model, batch)
            close(loss, want[0], "loss")
            all_close(gradients, want[1], parity.tolerance_of(way.case, eager.model, batch))
    assert dict(counters["graph_break"]) == {}
    assert counters["stats"]["unique_graphs"] == way.graphs


def test_recomputation_is_in_the_graph() -> None:
    """And it stops before the last product: the backward graph of a block has the forward's other products again."""
    products: dict[bool, list[int]] = {}
    for recompute in (False, True):
        way = Way(BY_NAME["text", "qwen3 tied"], 1, None, ("language",) if recompute else ())
        plan, found = planned(way), list[int]()

        def counting(graph: torch.fx.GraphModule, _: Any, found: list[int] = found) -> Any:
            found.append(sum(node.target is torch.ops.aten.mm.default for node in graph.graph.nodes))
            return make_boxed_func(graph.forward)

        torch._dynamo.reset()
        compile_blocks(plan, backend=aot_autograd(fw_compiler=counting, partition_fn=min_cut_rematerialization_partition))
        plan.model(batch_of(way.case.documents, BUDGET)).out.backward()
        products[recompute] = found
    assert products[True] == [products[False][0], products[False][1] + products[False][0] - 1]


def test_names_and_checkpoints_are_as_without() -> None:
    way = Way(BY_NAME["llava", "shuffled untied"], 0)
    plan = planned(way)
    before = [name for name, _ in plan.model.named_parameters()], list(plan.model.state_dict()), [*plan.tensors()]
    names = compile_blocks(plan, backend="aot_eager")
    assert [name for name, _ in plan.model.named_parameters()] == before[0]
    assert list(plan.model.state_dict()) == before[1]
    assert all(got is want for (_, got, _), (_, want, _) in zip(plan.tensors(), before[2], strict=True))
    assert names == [name for part in plan.blocks.values() for name in part if plan.spec.uses(name)]
    assert all(isinstance(plan.model.get_submodule(name).forward, Compiled) for name in names)


def test_passes_without_gradients_compile_nothing() -> None:
    way = Way(BY_NAME["text", "qwen3 tied"], 0)
    plan = planned(way)
    torch._dynamo.reset()
    counters.clear()
    compile_blocks(plan, backend="aot_eager")
    with torch.no_grad():
        got = plan.model.eval()(batch_of(way.case.documents, None)).out
        want = planned(way).model.eval()(batch_of(way.case.documents, None)).out
    assert torch.equal(got, want)
    assert counters["stats"]["unique_graphs"] == 0
