"""`update` on ranks that share out parameters against the same update in one process."""

from dataclasses import replace

import pytest
import torch

from eyeline.core.plan import PARTS, NewRows
from eyeline.core.shards import held
from eyeline.core.world import World
from eyeline.models.moe import Aux, Bias
from eyeline.models.shape import shape
from eyeline.parallel.mesh import MeshSizes, mesh_of
from eyeline.parallel.place import place
from tests.parallel.updates import FAMILIES, Setup, compare, train
from tests.ranks import on_ranks

pytestmark = pytest.mark.ranks

SHARDED, REPLICATED, BOTH = MeshSizes(), MeshSizes(dp_replicate=2), MeshSizes(dp_replicate=2, dp_shard=2)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sizes", [pytest.param(SHARDED, id="fsdp"), pytest.param(REPLICATED, id="replicate")])
def test_two_ranks_update_as_one(family: str, sizes: MeshSizes) -> None:
    balance = {"qwen3_vl-moe": Aux(coef=0.5), "qwen3_5_vl-moe": Bias(rate=0.02)}.get(family)
    compare(FAMILIES[family], Setup(sizes=sizes, momentum=0.9, balance=balance), 2)


HOW: dict[str, Setup] = {
    "hsdp": Setup(sizes=BOTH, momentum=0.9),
    "DoRA and new tokens": Setup(trains={"language": "adapters"}, dora=True, new_rows=NewRows(3, 9)),
    "adapters": Setup(trains={"language": "adapters", "vision": "adapters"}),
    "projector alone": Setup(trains={"projector": "full"}, momentum=0.9),
    "adapters and projector": Setup(trains={"language": "adapters", "projector": "full"}, checkpointing=True),
    "gradient checkpointing": Setup(checkpointing=True),
    "images dealt": Setup(sizes=MeshSizes(balance_images=True), momentum=0.9),
    "images dealt to replicas": Setup(
        {"language": "adapters", "vision": "adapters"}, sizes=MeshSizes(dp_replicate=2, balance_images=True), checkpointing=True
    ),
    "summed once per step": Setup(sizes=MeshSizes(sync_each_batch=False), momentum=0.9),
    "summed once per step, hsdp": Setup(sizes=BOTH.model_copy(update={"sync_each_batch": False, "balance_images": True})),
    "never resharded": Setup(sizes=MeshSizes(reshard_after_forward="never")),
    # of one step, whose loss is then the same to the last bit: a second one starts from weights that differ, and bfloat16 is coarse
    "bf16": Setup(precision=torch.bfloat16, steps=1),
    "fp16": Setup(precision=torch.float16, loss_scale=64.0, steps=1, narrow=PARTS, checkpointing=True),
    "float8": Setup(precision=torch.bfloat16, float8="rowwise", steps=1, checkpointing=True),
    "bf16 adapters": Setup({"language": "adapters"}, precision=torch.bfloat16, steps=1, narrow=PARTS),
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("family", ["llava", "qwen3_vl", "qwen3_5_vl-moe"])
def test_ranks_update_as_one(family: str, how: str) -> None:
    compare(FAMILIES[family], HOW[how], 4 if how.endswith("hsdp") else 2)


@pytest.mark.slow
def test_replicas_are_equal_to_the_bit_after_fifty_steps() -> None:
    """`whole` compares what several ranks hold."""
    setup = Setup(sizes=REPLICATED, momentum=0.9, steps=50)
    one, other = on_ranks(2, lambda world: train(FAMILIES["qwen3_vl"], setup, world), 240)
    assert len(one.reports) == 50 and one.moved == set(one.weights)
    assert [report.loss for report in one.reports] == [report.loss for report in other.reports]


LAYOUTS = {"replicate": REPLICATED, "fsdp": SHARDED, "hsdp": BOTH}
WAYS: dict[str, Setup] = {
    "full": Setup(momentum=0.9),
    "adapters": HOW["adapters"],
    "projector alone": HOW["projector alone"],
    "adapters and projector, gradient checkpointing": HOW["adapters and projector"],
    "gradient checkpointing": HOW["gradient checkpointing"],
}
PAIRS = [(family, way) for family in FAMILIES for way in WAYS if family != "text" or "projector" not in way]


@pytest.mark.slow  # the whole product, of which the tests above have what differs most
@pytest.mark.parametrize("synced", [True, False], ids=["summed per batch", "summed once per step"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("family", "way"), PAIRS)
def test_every_way_to_train_on_every_layout_updates_as_one(family: str, way: str, layout: str, synced: bool) -> None:
    sizes = LAYOUTS[layout].model_copy(update={"sync_each_batch": synced})
    compare(FAMILIES[family], replace(WAYS[way], sizes=sizes), 4 if layout == "hsdp" else 2)


@pytest.mark.parametrize(
    ("family", "setup"),
    [
        pytest.param("llava", Setup(compiles=True, checkpointing=True, steps=2), id="llava"),
        pytest.param("qwen3_vl", Setup({"language": "adapters"}, compiles=True, steps=2), id="adapters", marks=pytest.mark.slow),
        pytest.param("qwen3_5_vl-moe", Setup(compiles=True, checkpointing=True, steps=1), id="experts", marks=pytest.mark.slow),
        pytest.param("llava", Setup(compiles=True, sizes=REPLICATED, steps=1), id="replicated", marks=pytest.mark.slow),
    ],
)
def test_compiled_blocks_on_ranks_update_as_one_without(family: str, setup: Setup) -> None:
    """A block is a graph between the hooks that gather its parameters and free them."""
    compare(FAMILIES[family], setup, 2)


def test_a_rank_holds_its_share() -> None:
    """Counted by hand: a matrix of n rows is cut into pieces of ⌈n/2⌉, and what is exact is whole."""
    case = FAMILIES["qwen3_vl"]

    def held_by(world: World) -> dict[str, int]:
        plan = shape(case.config)
        place(plan, "cpu", mesh_of(MeshSizes(), world, "cpu"))
        return {name: held(x).local.numel() for name, x, _ in plan.tensors()}

    plan = shape(case.config)
    for rank, got in enumerate(on_ranks(2, held_by)):
        for name, x, entry in plan.tensors():
            rows = entry.shape[0]
            mine = rows if entry.exact else [-(-rows // 2), rows // 2][rank]
            assert got[name] == x.numel() // rows * mine, name
