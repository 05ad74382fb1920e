"""`update` on ranks that are processes, to compare with the same update in one: reports, every gradient, weights after some steps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from eyeline.core.batch import IGNORE, Budget, Document
from eyeline.core.cost import Cost
from eyeline.core.plan import PARTS, NewRows, Part, Plan
from eyeline.core.randomness import torch_rng_for
from eyeline.core.shards import Box, held, mesh_of_tensor, put
from eyeline.core.step import Step, step_of
from eyeline.core.world import ALONE, World
from eyeline.data.fetch.batches import batch_of
from eyeline.kernels.float8 import Scaling
from eyeline.models.compiled import compile_blocks
from eyeline.models.float8 import float8_layers
from eyeline.models.layers import EVERY_BLOCK
from eyeline.models.lora import LoRA
from eyeline.models.moe import Balance, Bias
from eyeline.models.shape import Trains, shape
from eyeline.parallel.mesh import MeshSizes, mesh_of
from eyeline.parallel.place import place
from eyeline.parallel.ranks import ONE_DEVICE, Ranks, ranks_of
from eyeline.train.slices import cut_along_depth
from eyeline.train.step import Report, update
from tests.models import parity
from tests.models.cases import ALL
from tests.models.parity import Case
from tests.ranks import on_ranks

BY_NAME = {(case.config.family, case.id): case for case in ALL}
FAMILIES = {
    "llava": BY_NAME["llava", "shuffled untied"],
    "qwen3_vl": BY_NAME["qwen3_vl", "tied"],
    "qwen3_vl-moe": BY_NAME["qwen3_vl", "experts"],
    "qwen3_5_vl": BY_NAME["qwen3_5_vl", "tied"],
    "qwen3_5_vl-moe": BY_NAME["qwen3_5_vl", "experts"],
    "text": BY_NAME["text", "qwen3 tied"],
}


def with_vocabulary(case: Case, rows: int) -> Case:
    """The case with a vocabulary that ranks can share out."""
    return replace(case, config=case.config.model_copy(update={"language": case.config.language.model_copy(update={"vocab_size": rows})}))


EVEN = {name: with_vocabulary(FAMILIES[name], 56) for name in ("llava", "qwen3_vl", "qwen3_vl-moe", "qwen3_5_vl")}
TOKENS = 64
PATCHES = Cost(token=1, pair=0, label=0, patch=10, patch_pair=1)
Pack = tuple[Document, ...]
ADAPTER = LoRA(rank=2, alpha=2, dropout=0.3, targets="all-linear")


@dataclass(frozen=True)
class Setup:
    """What is trained, and how."""

    trains: Mapping[Part, Trains] | None = None  # None: everything
    checkpointing: bool = False
    balance: Balance | None = None
    precision: torch.dtype = torch.float32
    momentum: float = 0.0
    loss_scale: float | None = None
    float8: Scaling | None = None  # of linear layers of the language model
    max_grad_norm: float | None = 0.5
    steps: int = 3  # that are compared; more than there are repeat them
    narrow: tuple[Part, ...] = ()  # whose frozen matrices are stored in bfloat16
    dora: bool = False
    new_rows: NewRows | None = None
    sizes: MeshSizes = field(default_factory=MeshSizes)
    compiles: bool = False  # the blocks on the ranks
    backend: str = "eager"  # of what is compiled


def unlabelled(document: Document) -> Document:
    return replace(document, labels_T=np.full_like(document.labels_T, IGNORE))


def packs_of(case: Case) -> list[list[Pack]]:
    """The packs of each step. Labels are uneven, some packs have none, and images are where only some ranks see them; in the second step
    only packs without labels have images; in the third there are fewer packs than ranks that divide, and the last slot has no images."""
    texts = [d for d in case.documents if not d.images]
    shown = [d for d in case.documents if d.images] or texts
    image, other = tuple(shown[:1]), tuple(shown[1:2])
    text, short = tuple(texts[:2]), tuple(texts[:1])
    without = tuple(map(unlabelled, other))
    return [
        [image, text, short, without, tuple(map(unlabelled, text)), other],
        [without, text, short, without],
        [image, other, text],
    ]


def tight(packs: Sequence[Pack]) -> int:
    """A budget that the longest pack fills: so all ranks that share one have some of its labels."""
    return -(-max(sum(len(d.tokens_T) for d in pack) for pack in packs) // 4) * 4


def step_for(packs: Sequence[Pack], rank: int, ranks: int, deals_by: Cost | None = None, tokens: int = TOKENS, sharing: int = 1) -> Step:
    """The step of a rank: packs are dealt in turn, and the last slot has empty ones. `deals_by`: images are dealt. Where ranks share packs,
    so many each, `rank` and `ranks` are of such groups."""
    slots = [[*packs[n : n + ranks], *[()] * ranks][:ranks] for n in range(0, len(packs), ranks)]
    batches = [[batch_of(slot[r], Budget(tokens, 1000)) for slot in slots] for r in range(ranks)]
    counts, costs = [[one.counts for one in of_rank] for of_rank in batches], [[(0, 0)] * ranks] * len(slots)
    images = [[one.cu_N1.diff().tolist() for one in of_rank] for of_rank in batches]
    return step_of(batches[rank], [n * ranks + rank for n in range(len(slots))], counts, costs, {}, None, images, deals_by, sharing)


class Descent(torch.optim.SGD):
    """Plain descent, which keeps the gradients of its first step, whole."""

    def __init__(self, plan: Plan[Any], momentum: float):
        self.named = {name: x for name, x, entry in plan.tensors() if entry.trains}
        meshes = dict.fromkeys(map(mesh_of_tensor, self.named.values()))
        groups = [[p for p in self.named.values() if mesh_of_tensor(p) == mesh] for mesh in meshes]
        super().__init__([{"params": group} for group in groups] or [{"params": []}], lr=0.02, momentum=momentum, weight_decay=0.1)
        self.first: dict[str, Tensor] = {}

    def step(self, closure: Any = None) -> None:
        if not self.first:
            self.first = whole({name: x.grad for name, x in self.named.items() if x.grad is not None})
        super().step(closure)


def whole(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors put together from what each rank holds; what several hold is the same on each. Not `full_tensor`: of one that is cut twice,
    torch logs that it gathers twice, and where standard error is captured the ranks then wait for one another for ever."""
    own = {name: (tuple(x.shape), held(x.detach()).box, held(x.detach()).local.clone()) for name, x in named.items()}
    of_ranks: list[Any] = [own]
    if torch.distributed.is_initialized():
        of_ranks = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(of_ranks, own)
    found: dict[str, Tensor] = {}
    for name, (size, box, part) in (one for of_rank in of_ranks for one in of_rank.items()):
        out = found.setdefault(name, torch.full(size, float("nan"), dtype=part.dtype))
        place = box.within(Box((0,) * out.ndim, size))
        assert out[place].isnan().all() or torch.equal(out[place], part), f"{name} differs between ranks"
        out[place] = part
    return found


@dataclass
class Trained:
    """What some steps came to."""

    reports: list[Report]
    gradients: dict[str, Tensor]  # of the first step
    weights: dict[str, Tensor]  # after the last
    moved: set[str]  # names of the parameters that differ from where they started
    graphs: int = 0  # that were compiled


def train(case: Case, setup: Setup, world: World = ALONE) -> Trained:
    trains, sizes = setup.trains, setup.sizes if world.size > 1 else MeshSizes()
    mesh = mesh_of(sizes, world, "cpu")
    adapters: dict[Part, LoRA] = {
        part: ADAPTER.model_copy(update={"dora": setup.dora}) for part, how in (trains or {}).items() if how == "adapters"
    }
    plan = shape(
        case.config,
        trains=trains,
        adapters=adapters,
        compute_dtype=setup.precision,
        narrow=setup.narrow,
        balance=setup.balance,
        biased=isinstance(setup.balance, Bias),
        new_rows=setup.new_rows,
    )
    for layer in float8_layers(plan.model, plan.blocks["language"]).layers:
        layer.float8 = setup.float8
    if setup.checkpointing:
        plan.model.recompute(dict.fromkeys(PARTS, EVERY_BLOCK))
    plan = cut_along_depth(plan, Budget(TOKENS, 1000), mesh)
    place(plan, "cpu", mesh)
    fill(case, plan)
    before = whole({name: x for name, x, _ in plan.tensors()})
    plan.model.train()
    if setup.compiles and world.size > 1:
        torch._dynamo.reset()
        counters.clear()
        compile_blocks(plan, backend=setup.backend, experts_apart=sizes.experts_apart)
    optimizer = Descent(plan, setup.momentum)
    ranks: Ranks = ONE_DEVICE if mesh is None else ranks_of(mesh)
    reports = [
        update(
            plan.model,
            [optimizer],
            step_for(
                packs,
                world.rank % (world.size // sizes.pp) // sizes.per_pack,
                world.size // sizes.same_packs,
                PATCHES if mesh is not None and mesh.sizes.balance_images else None,
                tight(packs) if sizes.per_pack > 1 else TOKENS,
                sizes.per_pack,
            ),
            ranks,
            max_grad_norm=setup.max_grad_norm,
            balance=setup.balance,
            seed=3,
            step=number,
            loss_scale=setup.loss_scale,
        )
        for number, packs in enumerate(islice(cycle(packs_of(case)), setup.steps))
    ]
    weights = whole({name: x for name, x, _ in plan.tensors()})
    moved = {name for name, x in weights.items() if not torch.equal(x, before[name])}
    return Trained(reports, optimizer.first, weights, moved, counters["stats"]["unique_graphs"])


def fill(case: Case, plan: Plan[Any]) -> None:
    """The weights of the case, and adapters that compute something, however they are sharded."""
    known = dict(parity.randomised(case).named_parameters())
    for name, x, entry in plan.tensors():
        if entry.role == "buffer":
            x.zero_()
        else:
            put(x, known[name] if name in known else 0.2 * torch.randn(entry.shape, generator=torch_rng_for(0, name)))


def tolerance_of(case: Case, setup: Setup) -> float:
    if setup.precision != torch.float32:
        return 1e-2  # a rank's gradients are summed in float32; on one device matrices' are rounded pack by pack
    return parity.tolerance_of(case, parity.randomised(case), batch_of(packs_of(case)[0][0], Budget(TOKENS, 1000)))


def compare(case: Case, setup: Setup, ranks: int) -> list[Trained]:
    """What each rank came to, which is what one process does."""
    want = train(case, setup)
    assert [report.outcome for report in want.reports] == ["applied"] * setup.steps
    tolerance = tolerance_of(case, setup)
    every = on_ranks(ranks, lambda world: train(case, setup, world), 240 if setup.compiles else 60)
    for got in every:
        for one, other in zip(got.reports, want.reports, strict=True):
            assert (one.outcome, one.counts.supervised, one.counts.images) == (other.outcome, other.counts.supervised, other.counts.images)
            assert one.loss == pytest.approx(other.loss, rel=1e-5 if setup.precision != torch.float32 else max(1e-5, tolerance / 10))
            assert one.grad_norm == pytest.approx(other.grad_norm, rel=max(1e-4, tolerance))
        parity.all_close(got.gradients, want.gradients, tolerance)
        assert got.moved == want.moved
        parity.all_close(got.weights, want.weights, tolerance)
    return every
