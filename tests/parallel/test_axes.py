"""`update` on ranks that share the rows of a pack, or the experts of a layer, against the same update in one process."""

import pytest

from eyeline.models.moe import Aux, Bias
from eyeline.parallel.mesh import MeshSizes
from tests.parallel.updates import EVEN, FAMILIES, Setup, compare

pytestmark = pytest.mark.ranks

BALANCE = {"qwen3_vl-moe": Aux(coef=0.5), "qwen3_5_vl-moe": Bias(rate=0.02)}


@pytest.mark.parametrize("axis", ["tp", "cp", "ep"])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_axis_of_two_updates_as_one_process(family: str, axis: str) -> None:
    if axis == "ep" and family not in BALANCE:
        pytest.skip("no experts")
    compare(FAMILIES[family], Setup(sizes=MeshSizes.model_validate({axis: 2}), momentum=0.9, balance=BALANCE.get(family)), 2)


HOW = {
    "tp adapters": ("qwen3_5_vl-moe", Setup({"language": "adapters", "vision": "adapters"}, sizes=MeshSizes(tp=2)), 2),
    "tp DoRA": ("qwen3_vl", Setup({"language": "adapters"}, dora=True, sizes=MeshSizes(tp=2)), 2),
    "cp adapters": ("qwen3_5_vl", Setup({"language": "adapters"}, sizes=MeshSizes(cp=2)), 2),
    "tp gradient checkpointing": ("qwen3_5_vl", Setup(checkpointing=True, sizes=MeshSizes(tp=2)), 2),
    "ep gradient checkpointing": ("qwen3_vl-moe", Setup(checkpointing=True, sizes=MeshSizes(ep=2)), 2),
    "fsdp x tp": ("qwen3_vl", Setup(sizes=MeshSizes(dp_shard=2, tp=2), momentum=0.9), 4),
    "fsdp x tp adapters": ("qwen3_vl", Setup({"language": "adapters"}, sizes=MeshSizes(tp=2)), 4),
    "fsdp x tp, images dealt": ("qwen3_vl", Setup(sizes=MeshSizes(dp_shard=2, tp=2, balance_images=True), momentum=0.9), 4),
    "cp, images dealt": ("llava", Setup(sizes=MeshSizes(cp=2, balance_images=True), momentum=0.9), 2),
    "tp, summed once per step": ("qwen3_vl", Setup(sizes=MeshSizes(tp=2, sync_each_batch=False), momentum=0.9), 2),
    "tp adapters, summed once per step": (
        "qwen3_5_vl",
        Setup({"language": "adapters"}, sizes=MeshSizes(tp=2, sync_each_batch=False)),
        4,
    ),
    "fsdp x cp x ep, summed once per step": (
        "qwen3_5_vl-moe",
        Setup(sizes=MeshSizes(dp_shard=2, cp=2, ep=2, sync_each_batch=False), balance=Bias(rate=0.02)),
        4,
    ),
    "tp, vocabulary": ("qwen3_5_vl", Setup(sizes=MeshSizes(tp=2, vocab_parallel=True), momentum=0.9), 2),
    "fsdp x cp x tp, vocabulary": ("qwen3_vl-moe", Setup(sizes=MeshSizes(cp=2, tp=2, vocab_parallel=True)), 4),
    "tp, vocabulary adapters": ("llava", Setup({"language": "adapters"}, sizes=MeshSizes(tp=2, vocab_parallel=True)), 4),
    "fsdp x cp": ("qwen3_5_vl", Setup(sizes=MeshSizes(dp_shard=2, cp=2), momentum=0.9), 4),
    "fsdp x ep": ("qwen3_vl-moe", Setup(sizes=MeshSizes(dp_shard=4, ep=2), balance=Aux(coef=0.5)), 4),
    "hsdp x tp": ("qwen3_vl", Setup(sizes=MeshSizes(dp_replicate=2, dp_shard=1, tp=2), momentum=0.9), 4),
    "ep x tp": ("qwen3_5_vl-moe", Setup(sizes=MeshSizes(tp=2, ep=2), balance=Bias(rate=0.02)), 2),
    "fsdp, gathered ahead": ("qwen3_vl-moe", Setup(sizes=MeshSizes(forward_prefetch=1, backward_prefetch=2), momentum=0.9), 2),
    "fsdp x ep, gathered ahead": (
        "qwen3_vl-moe",
        Setup({"language": "adapters"}, checkpointing=True, sizes=MeshSizes(ep=2, forward_prefetch=2, backward_prefetch=1)),
        4,
    ),
    "cp x tp x ep": ("qwen3_5_vl-moe", Setup(sizes=MeshSizes(cp=2, tp=2, ep=2), balance=Aux(coef=0.5)), 4),
}


SELDOM = (  # what others of the table show in part
    "cp adapters", "ep gradient checkpointing", "fsdp x tp adapters", "hsdp x tp", "fsdp x tp, images dealt",
    "tp adapters, summed once per step", "fsdp x cp x ep, summed once per step", "fsdp x cp x tp, vocabulary", "tp, vocabulary adapters",
    "fsdp x ep, gathered ahead",
)  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name in SELDOM else ()) for name in HOW])
def test_axes_together_update_as_one_process(name: str) -> None:
    family, setup, ranks = HOW[name]
    compare((EVEN if setup.sizes.vocab_parallel else FAMILIES)[family], setup, ranks)


COMPILED = {
    "cp x tp x ep adapters": (
        "qwen3_5_vl-moe",
        Setup({"language": "adapters"}, sizes=MeshSizes(cp=2, tp=2, ep=2), compiles=True, checkpointing=True, steps=1, backend="aot_eager"),
        4,
    ),
    "ep": ("qwen3_vl-moe", Setup(sizes=MeshSizes(ep=2), compiles=True, checkpointing=True, balance=Aux(coef=0.5), steps=2), 2),
    "tp, experts": ("qwen3_5_vl-moe", Setup(sizes=MeshSizes(tp=2), compiles=True, steps=1), 2),
    "tp": ("qwen3_vl", Setup(sizes=MeshSizes(tp=2), compiles=True, checkpointing=True, steps=1, backend="aot_eager"), 2),
    "cp, experts": ("qwen3_5_vl-moe", Setup(sizes=MeshSizes(cp=2), compiles=True, steps=1, backend="aot_eager"), 2),
    "fsdp x tp adapters": (
        "qwen3_5_vl",
        Setup({"language": "adapters"}, dora=True, sizes=MeshSizes(tp=2), compiles=True, steps=1, backend="aot_eager"),
        4,
    ),
}


# the tower's; then one for each kind of block, or two around its experts
GRAPHS = {
    "cp x tp x ep adapters": 1 + 2 + 1,
    "ep": 1 + 2,
    "tp, experts": 1 + 2 + 1,
    "tp": 1 + 1,
    "cp, experts": 1 + 2,
    "fsdp x tp adapters": 1 + 2,
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in ("ep", "tp") else pytest.mark.slow) for name in COMPILED])
def test_compiled_blocks_with_collectives_update_as_one_process(name: str) -> None:
    """Each block is one graph, with its collectives and what is recomputed inside: a break in a graph is an error."""
    family, setup, ranks = COMPILED[name]
    every = compare(FAMILIES[family], setup, ranks)
    assert [one.graphs for one in every] == [GRAPHS[name]] * ranks
