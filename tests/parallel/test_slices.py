"""`update` on ranks that have slices of the model, against the same update in one process."""

from collections import Counter
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from eyeline.bundle.fill import Seed, fill
from eyeline.core.batch import IGNORE, Budget
from eyeline.core.plan import NewRows
from eyeline.core.world import ALONE, World
from eyeline.models.moe import Aux, Bias
from eyeline.models.shape import shape
from eyeline.parallel.mesh import MeshSizes, mesh_of
from eyeline.parallel.place import place
from eyeline.parallel.ranks import ranks_of
from eyeline.parallel.slices import DepthCosts, cuts_of, own_slices
from eyeline.train.memory import activations_of, activations_of_slices
from eyeline.train.slices import cut_along_depth
from eyeline.train.step import add_gradients
from tests.models.parity import Case
from tests.parallel.updates import ADAPTER, BY_NAME, FAMILIES, TOKENS, Setup, compare, packs_of, step_for, whole
from tests.ranks import on_ranks

pytestmark = pytest.mark.ranks

BALANCE = {"qwen3_vl-moe": Aux(coef=0.5), "qwen3_5_vl-moe": Bias(rate=0.02), "some layers of experts": Aux(coef=0.5)}
TEXTS = {
    "qwen2": BY_NAME["text", "qwen2 tied"],
    "llama": BY_NAME["text", "llama"],
    "some layers of experts": BY_NAME["text", "qwen3, some layers of experts"],
}
CASES = FAMILIES | TEXTS
PP = MeshSizes(pp=2)
FULL = Budget(TOKENS, 1000)
SELDOM = ("llama", "qwen2", "qwen3_vl", "qwen3_5_vl")  # what others of the table show in part


def deep(case: Case, layers: int) -> Case:
    """The same with more blocks of the language model."""
    language = case.config.language.model_copy(update={"layers": layers})
    return replace(case, config=case.config.model_copy(update={"language": language}))


@pytest.mark.parametrize("family", [pytest.param(name, marks=pytest.mark.slow if name in SELDOM else ()) for name in CASES])
def test_two_slices_update_as_one_process(family: str) -> None:
    compare(CASES[family], Setup(sizes=PP, momentum=0.9, balance=BALANCE.get(family)), 2)


HOW = {
    "adapters": ("qwen3_vl", Setup({"language": "adapters", "vision": "adapters"}, sizes=PP), 2),
    "DoRA and new tokens": ("qwen3_vl", Setup({"language": "adapters"}, dora=True, new_rows=NewRows(3, 9), sizes=PP), 2),
    "projector alone": ("llava", Setup({"projector": "full"}, sizes=PP, momentum=0.9), 2),
    "gradient checkpointing": ("qwen3_5_vl-moe", Setup(checkpointing=True, sizes=PP), 2),
    "fsdp": ("qwen3_vl", Setup(sizes=MeshSizes(pp=2, dp_shard=2), momentum=0.9), 4),
    "fsdp, never resharded": ("llava", Setup(sizes=MeshSizes(pp=2, dp_shard=2, reshard_after_forward="never")), 4),
    "summed once per step": ("qwen3_vl-moe", Setup(sizes=MeshSizes(pp=2, dp_shard=2, sync_each_batch=False), momentum=0.9), 4),
    "replicate": ("qwen3_vl", Setup(sizes=MeshSizes(pp=2, dp_replicate=2)), 4),
    "tp": ("qwen3_vl", Setup(sizes=MeshSizes(pp=2, tp=2)), 4),
    "cp": ("qwen3_5_vl", Setup(sizes=MeshSizes(pp=2, cp=2)), 4),
    "fsdp x ep": ("qwen3_vl-moe", Setup(sizes=MeshSizes(pp=2, dp_shard=2, ep=2), balance=Aux(coef=0.5)), 4),
    "tp x fsdp": ("qwen3_vl", Setup(sizes=MeshSizes(pp=2, dp_shard=2, tp=2)), 8),
    "compiled": ("qwen3_vl", Setup(sizes=PP, compiles=True, steps=2), 2),
    "compiled, fsdp x ep": (
        "qwen3_vl-moe",
        Setup(sizes=MeshSizes(pp=2, dp_shard=2, ep=2), compiles=True, checkpointing=True, balance=Aux(coef=0.5), backend="aot_eager"),
        4,
    ),
    "bf16": ("llava", Setup(sizes=PP, precision=torch.bfloat16, steps=1), 2),
    "fp16": ("llava", Setup(sizes=PP, precision=torch.float16, loss_scale=64.0, steps=1), 2),
}
OFTEN = ("projector alone", "fsdp x ep")


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in OFTEN else pytest.mark.slow) for name in HOW])
def test_slices_together_with_others_update_as_one_process(name: str) -> None:
    family, setup, ranks = HOW[name]
    every = compare(CASES[family], setup, ranks)
    if name == "compiled":  # a graph of the tower's blocks, and one of the language model's
        assert [one.graphs for one in every] == [2, 1]


@pytest.mark.parametrize("family", ["qwen3_vl", pytest.param("qwen3_vl-moe", marks=pytest.mark.slow)])
def test_interleaved_slices_update_as_one_process(family: str) -> None:
    """Two slices on each of two ranks, the second of tied weights on the other."""
    setup = Setup(sizes=MeshSizes(pp=2, pp_slices_per_rank=2), momentum=0.9, balance=BALANCE.get(family))
    compare(deep(FAMILIES[family], 5), setup, 2)


@pytest.mark.parametrize("family", ["qwen3_vl", "llava"])
def test_slices_start_from_the_weights_that_one_process_draws(family: str) -> None:
    """Tied or not, adapters too, whatever slice has them."""
    case = FAMILIES[family]

    def drawn(world: World) -> dict[str, Tensor]:
        mesh = mesh_of(PP if world.size > 1 else MeshSizes(), world, "cpu")
        plan = shape(case.config, trains={"language": "adapters"}, adapters={"language": ADAPTER})
        plan = cut_along_depth(plan, FULL, mesh)
        place(plan, "cpu", mesh)
        fill(plan, case.config, dict.fromkeys(plan.spec.parts, Seed(5)), seed=6)
        return whole({name: x for name, x, _ in plan.tensors()})

    want = drawn(ALONE)
    for got in on_ranks(2, drawn):
        assert got.keys() == want.keys() and all(torch.equal(x, want[name]) for name, x in got.items())


class Sent(TorchDispatchMode):
    """Counts what is sent to one rank, and received from one, by bytes; and sums of gradients that ranks share out."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[tuple[str, int]] = Counter()
        self.sums = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and (kind := func.__name__.split(".")[0]) in ("send", "recv_"):
            self.seen[kind, sum(x.nbytes for x in tree_leaves(args) if isinstance(x, Tensor))] += 1
        self.sums += func.namespace == "c10d" and "reduce_scatter" in func.__name__
        return func(*args, **(kwargs or {}))


def test_a_slice_sends_one_tensor_per_micro_batch_and_direction() -> None:
    """And in its first step asks once whether all know the shapes."""
    case = FAMILIES["llava"]

    def sent(world: World) -> Any:
        mesh = mesh_of(PP, world, "cpu")
        assert mesh is not None
        plan = cut_along_depth(shape(case.config), FULL, mesh)
        place(plan, "cpu", mesh)
        fill(plan, case.config, dict.fromkeys(plan.spec.parts, Seed(5)))
        over, found = ranks_of(mesh), []
        for _ in range(2):
            with Sent() as sent:
                add_gradients(plan.model, step_for(packs_of(case)[0][:4], 0, 1), over, None, 0, 0)
            found.append(sent.seen)
        return found

    x = TOKENS * case.spec.language.hidden_size * 4
    labelled = sum(any(d.labels_T.max() > IGNORE for d in pack) for pack in packs_of(case)[0][:4])  # others are not run
    each, asked = Counter({("send", x): labelled, ("recv_", x): labelled}), Counter({("send", 4): 1, ("recv_", 4): 1})
    assert on_ranks(2, sent) == [[each + asked, each]] * 2


def test_slices_sum_gradients_once_per_step_where_it_is_asked() -> None:
    case = FAMILIES["text"]

    def sums(world: World, each: bool) -> int:
        mesh = mesh_of(MeshSizes(pp=2, dp_shard=2, sync_each_batch=each), world, "cpu")
        plan = cut_along_depth(shape(case.config), FULL, mesh)
        place(plan, "cpu", mesh)
        fill(plan, case.config, dict.fromkeys(plan.spec.parts, Seed(5)))
        assert mesh is not None
        with Sent() as sent:
            add_gradients(plan.model, step_for(packs_of(case)[0][:1] * 6, world.rank % 2, 2), ranks_of(mesh), None, 0, 0)
        return sent.sums

    each, once = (on_ranks(4, lambda world, each=each: sums(world, each)) for each in (True, False))
    assert all(once) and each == [3 * n for n in once]


def test_slices_are_cut_where_the_most_expensive_costs_the_least() -> None:
    ten = [1.0] * 10
    assert [len(cut) for cut in cuts_of(DepthCosts(0, ten, 0), 2)] == [5, 5]
    assert [len(cut) for cut in cuts_of(DepthCosts(4, ten, 2), 2)] == [4, 6]  # 4 + 4 and 6 + 2
    assert [len(cut) for cut in cuts_of(DepthCosts(4, ten, 2), 4)] == [1, 3, 4, 2]  # 5, 3, 4, 4
    assert [len(cut) for cut in cuts_of(DepthCosts(4, ten, 2), 4, least_first=3)] == [3, 3, 3, 1]  # 7, 3, 3, 3
    assert len(cuts_of(DepthCosts(90, ten, 0), 3)[0]) == 1
    assert [*chain.from_iterable(cuts_of(DepthCosts(4, ten, 2), 4))] == [*range(10)]


def test_slices_need_the_activations_of_the_micro_batches_that_are_under_way() -> None:
    """Together those of the whole model for one; the first of two has two of them, the last has one however many there are."""
    case = FAMILIES["llava"]
    cuts = (range(1), range(1, 2))

    def needed(rank: int, count: int) -> int:
        return activations_of_slices(own_slices(shape(case.config), cuts, rank, 2), FULL, rank, 2, count)

    exchanged = TOKENS * case.spec.language.hidden_size * 4
    first, last = needed(0, 1), needed(1, 1)
    whole_model = activations_of(shape(case.config), FULL)
    assert whole_model < first + last - 3 * exchanged < 1.5 * whole_model  # each has a peak of its own
    assert needed(1, 8) == last + 7 * 2 * exchanged
    assert 1.5 * first < needed(0, 8) - 8 * exchanged < 2 * first


def test_bubbles_in_the_docs_are_those_of_torchs_schedules() -> None:
    """The passes of a rank, and how long the pipeline takes when a pass takes as long on each."""
    text = (Path(__file__).parents[2] / "docs" / "parallel.md").read_text()
    for count in (4, 8, 16, 32):
        row = []
        for sizes in (PP, MeshSizes(pp=4), MeshSizes(pp=4, pp_slices_per_rank=2)):
            waits, passes = sizes.bubble(count)
            row.append(f"{100 * waits / passes:.0f}%")
            if sizes.pp_slices_per_rank == 1:
                assert length_of_1f1b(sizes.pp, count) == 2 * passes  # forward and backward passes
        assert f"| {count} | {' | '.join(row)} |" in text


def length_of_1f1b(ranks: int, count: int) -> int:
    """The passes from the first to the last of 1F1B, each as soon as what it needs is there."""
    orders = []
    for rank in range(ranks):
        ahead = min(count, ranks - rank - 1)
        forward, backward = [("F", n) for n in range(count)], [("B", n) for n in range(count)]
        pairs = [one for pair in zip(forward[ahead:], backward, strict=False) for one in pair]
        orders.append([*forward[:ahead], *pairs, *backward[count - ahead :]])
    done: dict[tuple[int, str, int], int] = {}
    at = [0] * ranks
    now = 0
    while any(at[rank] < len(order) for rank, order in enumerate(orders)):
        started = []
        for rank, order in enumerate(orders):
            if at[rank] < len(order):
                kind, n = order[at[rank]]
                needed = (rank - 1, kind, n) if kind == "F" else (rank + 1, kind, n)
                if needed[0] in (-1, ranks) or done.get(needed, now + 1) <= now:
                    started.append((rank, kind, n))
        now += 1
        for rank, kind, n in started:
            done[rank, kind, n] = now
            at[rank] += 1
    return now
