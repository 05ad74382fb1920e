"""Worlds of more ranks than there are processes, on torch's fake process group: what a rank holds and saves, counted by hand.

Models are of their published sizes, on the meta device.
"""

import json
import math
import pickle
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from eyeline.checkpoint import store
from eyeline.checkpoint.pieces import covers, pieces_of
from eyeline.core.plan import Plan
from eyeline.core.shards import held
from eyeline.core.world import World
from eyeline.kernels.opaque import FUNCTIONS
from eyeline.models.shape import shape
from eyeline.parallel import experts as experts_of_ranks
from eyeline.parallel.mesh import Mesh, MeshSizes, mesh_of, problems
from eyeline.parallel.place import place, share_out
from eyeline.parallel.ranks import ranks_of
from eyeline.parallel.rows import rows_of
from eyeline.parallel.shard import shard
from eyeline.parallel.shares import Shares
from eyeline.parallel.slices import own_slices
from eyeline.study.roofline.sizes import config_of
from eyeline.train.memory import Memory, memory_of
from eyeline.train.optim import AdamW
from eyeline.train.step import add_gradients
from tests.forked import Forked
from tests.parallel.by_hand import Collective, Layout, passed_by_hand, rows_by_hand, sharded_by_hand, total
from tests.parallel.updates import EVEN, FAMILIES, packs_of, step_for, tight

T = TypeVar("T")
ALL = MeshSizes()  # sharded over all ranks


def as_rank(rank: int, size: int, work: Callable[[Mesh], T], sizes: MeshSizes = ALL) -> T:
    """What a rank of a world makes whose others are not there: what it receives is garbage. In a process of its own, since torch remembers
    which part of a tensor a rank holds by the mesh alone."""
    with NamedTemporaryFile() as file:

        def inside() -> None:
            dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
            mesh = mesh_of(sizes, World(rank, size), "cpu")
            assert mesh is not None
            Path(file.name).write_bytes(pickle.dumps(work(mesh)))

        assert Forked(inside, (file.fileno(),)).wait(300) == 0
        return pickle.loads(Path(file.name).read_bytes())


def sharded(size: str, mesh: Mesh) -> Plan[Any]:
    plan = shape(config_of(size))
    shard(plan, mesh)
    return plan


def header_bytes(tensors: Mapping[str, tuple[tuple[int, ...], int]], offsets: Mapping[str, list[int]]) -> int:
    """Bytes of the header of a safetensors file of float32 tensors, given as (shape, bytes), written by hand."""
    entries: dict[str, Any] = {
        "__metadata__": {
            "format": "pt",
            "DCP_VERSION": "1.0",
            "DCP_SHARDING_INFO": json.dumps({name: {"saved_offsets": offset} for name, offset in offsets.items()}),
        }
    }
    at = 0
    for name in sorted(tensors):
        found, size = tensors[name]
        entries[name] = {"dtype": "F32", "shape": list(found), "data_offsets": [at, at + size]}
        at += size
    text = len(json.dumps(entries, separators=(",", ":")))
    return 8 + -(-text // 8) * 8


def test_a_save_of_two_billion_parameters_on_four_ranks_has_the_bytes_counted_by_hand() -> None:
    """2,127 million parameters in float32: four files, each number in exactly one of them."""
    boxes: dict[str, list[Any]] = {}
    total, numbers, table = 0, 0, {}
    for rank in range(4):

        def saved(mesh: Mesh, rank: int = rank) -> Any:
            plan = sharded("qwen3-vl-2b", mesh)
            pieces = pieces_of({name: x for name, x, _ in plan.tensors()}, first=rank == 0)
            sizes = store.sizes_of({"model": pieces}, rank, 4)
            return sizes, [(piece.name, piece.box) for piece in pieces], {name: plan.table[name] for name, _, _ in plan.tensors()}

        sizes, written, table = as_rank(rank, 4, saved)
        wanted: dict[str, tuple[tuple[int, ...], int]] = {}
        offsets: dict[str, list[int]] = {}
        for name, entry in table.items():
            first, *rest = entry.shape
            rows = (first if rank == 0 else 0) if entry.exact else rows_by_hand(first, 4, rank)
            if rows:
                count = rows
                for n in rest:
                    count *= n
                wanted[name] = ((rows, *rest), 4 * count)
                offsets[name] = [0 if entry.exact else rank * -(-first // 4), *[0] * len(rest)]
        data = sum(size for _, size in wanted.values())
        assert sizes == {f"model-0000{rank + 1}-of-00004.safetensors": header_bytes(wanted, offsets) + data}
        total, numbers = total + data, numbers + data // 4
        for name, box in written:
            boxes.setdefault(name, []).append(box)
    assert numbers == 2_127_532_032 and total == 4 * numbers
    assert all(covers(table[name].shape, boxes[name]) for name in table)


LAYOUTS = {
    "8b fsdp": ("qwen3-vl-8b", 64, MeshSizes()),
    "8b hsdp": ("qwen3-vl-8b", 256, MeshSizes(dp_replicate=32)),
    "8b hsdp x tp": ("qwen3-vl-8b", 512, MeshSizes(dp_replicate=8, tp=4, vocab_parallel=True)),
    "30b ep": ("qwen3-vl-30b-a3b", 128, MeshSizes(ep=8)),
    "30b tp x ep": ("qwen3-vl-30b-a3b", 1024, MeshSizes(tp=4, ep=64)),
    "35b cp x tp x ep": ("qwen3.5-35b-a3b", 1024, MeshSizes(cp=2, tp=2, ep=128)),
}
BOTH = [(how, rank) for how in LAYOUTS for rank in (0, -1)]
QUICK = (("8b fsdp", 0), ("8b hsdp", -1), ("8b hsdp x tp", -1), ("30b ep", 0), ("30b ep", -1))


@pytest.mark.parametrize(
    ("how", "rank"),
    [
        pytest.param(how, rank, id=f"{'last' if rank else 'first'}-{how}", marks=() if (how, rank) in QUICK else pytest.mark.slow)
        for how, rank in BOTH
    ],
)
def test_what_a_rank_holds_of_a_published_model(how: str, rank: int) -> None:
    """Every tensor, by hand (`by_hand.py`)."""
    size, ranks, sizes = LAYOUTS[how]

    def held_by(mesh: Mesh) -> Any:
        plan = shape(config_of(size))
        share_out(plan, mesh)
        layout = Layout(plan, sizes, ranks)
        return [
            (name, held(x).local.numel(), layout.held(name, entry, rank % ranks), x.numel(), entry) for name, x, entry in plan.tensors()
        ]

    found = as_rank(rank % ranks, ranks, held_by, sizes)
    for name, got, wanted, _, _ in found:
        assert got == wanted, name
    whole = sum(numbers for _, _, _, numbers, entry in found if entry.exact)
    shards = ranks // sizes.dp_replicate
    assert whole < 27e6
    assert sum(got for _, got, *_ in found) < sum(numbers for _, _, _, numbers, _ in found) / shards * 1.05 + whole


@pytest.mark.parametrize("how", [pytest.param(how, marks=() if how in ("8b hsdp x tp", "30b ep") else pytest.mark.slow) for how in LAYOUTS])
def test_memory_of_a_rank_is_counted_as_it_holds_it(how: str) -> None:
    """Before anything is placed, to the byte: what the first rank has of a published model, and of its gradients where they stay whole."""
    size, ranks, sizes = LAYOUTS[how]

    def held_by(mesh: Mesh) -> tuple[int, int]:
        plan = shape(config_of(size))
        share_out(plan, mesh)
        layout, held_bytes, pieces = Layout(plan, sizes, ranks), 0, 0
        for name, x, entry in plan.tensors():
            held_bytes += held(x).local.nbytes
            pieces += 4 * math.prod(layout.piece(name, entry))
        return held_bytes, pieces

    weights, pieces = as_rank(0, ranks, held_by, sizes)
    counted = memory_of(shape(config_of(size)), AdamW(), Shares(sizes, ranks), whole_gradients=True)
    assert counted == Memory(weights, pieces, 2 * weights)


def held_of_slices(mesh: Mesh) -> dict[str, tuple[int, bool]]:
    """Name -> numbers that a rank holds, and whether another answers for them, of Qwen3-VL-8B (36 blocks, of which 3 have DeepStack) cut
    where one would cut it by hand."""
    assert mesh.pipeline is not None
    plan = own_slices(shape(config_of("qwen3-vl-8b")), BY_HAND, mesh.pipeline.rank, mesh.pipeline.ranks)
    shard(plan, mesh)
    return {name: (held(x).local.numel(), name in plan.copies) for name, x, _ in plan.tensors()}


BY_HAND = (range(6), range(6, 16), range(16, 26), range(26, 36))


@pytest.mark.parametrize("at", range(4))
def test_what_a_rank_holds_of_a_slice_of_eight_billion_parameters(at: int) -> None:
    """64 ranks, pp 4 × dp_shard 16: every tensor of its blocks, and of the ends of the model, by hand."""
    found = as_rank(16 * at + 5, 64, held_of_slices, MeshSizes(pp=4))
    wanted = {}
    for name, entry in shape(config_of("qwen3-vl-8b")).table.items():
        part, child, *rest = name.split(".")
        first, last = part != "language" or child == "embed", part == "language" and child in ("norm", "head")
        slice_of_it = 0 if first else 3 if last else next(n for n, cut in enumerate(BY_HAND) if int(rest[0]) in cut)
        if slice_of_it == at:
            rows, numbers = entry.shape[0], math.prod(entry.shape)
            wanted[name] = (numbers // rows * (rows if entry.exact else rows_by_hand(rows, 16, 5)), False)
    assert found == wanted


class Collectives(TorchDispatchMode):
    """Counts collectives by axis, kind, and the bytes of the whole that is gathered, shared out, summed or exchanged."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.seen: Counter[Collective] = Counter()
        self.everyone = mesh.everyone.group_name
        every: dict[str, Any] = {"dp": mesh.shard.get_group(mesh.shard.ndim - 1)}
        for axis, of in (("dp", mesh.split), ("dp", mesh.experts), ("ep", mesh.ep)):
            if of is not None:
                every[f"{axis} {id(of)}"] = of.get_group(of.ndim - 1)
        if mesh.sizes.dp_replicate > 1:
            every["dp_replicate"] = mesh.shard.get_group(0)
        for axis in ("tp", "cp") if mesh.axes is not None else ():
            every[axis] = mesh.axes[axis].get_group()
        self.axes = {group.group_name: axis.partition(" ")[0] for axis, group in every.items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in FUNCTIONS:  # an operator of ours: what is in it counts
            with self:
                return FUNCTIONS[func](*args, **(kwargs or {}))
        if func.namespace == "c10d":
            kind = next(name for name in ("gather", "scatter", "alltoall", "reduce") if name in str(func)).replace("alltoall", "all_to_all")
            groups = [x for x in tree_leaves(args) if isinstance(x, torch.ScriptObject) and "ProcessGroup" in str(x._type())]
            name = dist.ProcessGroup.unbox(groups[0]).group_name
            size = max(x.nbytes for x in tree_leaves(args) if isinstance(x, Tensor))
            axis = self.axes.get(name, "same piece")
            if name == self.everyone:  # which is the group of FSDP, too, where there is one copy
                axis = "all" if kind == "reduce" else "dp"
            self.seen[axis, kind, size] += 1
        return func(*args, **(kwargs or {}))


STEPS: dict[str, tuple[str, int, MeshSizes, torch.dtype]] = {
    "64": ("qwen3_vl", 64, MeshSizes(), torch.float32),
    "256": ("qwen3_vl", 256, MeshSizes(), torch.float32),
    "64, hsdp": ("qwen3_vl", 64, MeshSizes(dp_replicate=8), torch.float32),
    "64, bf16, never resharded": ("qwen3_vl", 64, MeshSizes(reshard_after_forward="never"), torch.bfloat16),
    "64, tp": ("qwen3_vl", 64, MeshSizes(dp_replicate=4, tp=2), torch.bfloat16),
    "64, vocabulary": ("qwen3_vl", 64, MeshSizes(tp=2, vocab_parallel=True), torch.float32),
    "64, cp x tp": ("qwen3_vl", 64, MeshSizes(cp=2, tp=2), torch.float32),
    "256, ep": ("qwen3_vl-moe", 256, MeshSizes(ep=2), torch.bfloat16),
    "64, cp x tp x ep": ("qwen3_vl-moe", 64, MeshSizes(cp=2, tp=2, ep=2), torch.float32),
}


@pytest.mark.parametrize("how", STEPS)
def test_collectives_of_a_step_are_those_counted_by_hand(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real step of a tiny model, whose first rank alone has a pack: number and bytes of all that ranks send, by axis."""
    family, ranks, sizes, precision = STEPS[how]
    case = (EVEN if sizes.vocab_parallel else FAMILIES)[family]
    # what comes from the wire is garbage here, so each rank of ep is taken to send as many rows as this one
    counts = experts_of_ranks.exchanged
    monkeypatch.setattr(experts_of_ranks, "exchanged", lambda x, *where: (counts(x, *where), x)[1])

    def step(mesh: Mesh) -> Any:
        plan = shape(case.config, compute_dtype=precision)
        place(plan, "cpu", mesh)
        for _, x, entry in plan.tensors():
            with torch.no_grad():
                held(x).local.normal_(0, 0.02) if entry.role != "buffer" else x.zero_()
        packs, groups = [packs_of(case)[0][0]], ranks // sizes.per_pack
        tokens = tight(packs)
        data, over = step_for(packs, 0, groups, tokens=tokens, sharing=sizes.per_pack), ranks_of(mesh)
        own = rows_of(data.batches[0], sizes, *mesh.pack_rank)
        with Collectives(mesh) as counted:
            add_gradients(plan.model, data, over, None, 0, 0)
            over.sum_gradients([p for p in plan.model.parameters() if p.grad is not None])
        layout = Layout(plan, sizes, ranks)
        wanted = sharded_by_hand(layout, precision.itemsize, sizes.reshard_after_forward == "always")
        return counted.seen, wanted + passed_by_hand(layout, tokens, own.label_counts or (), precision.itemsize, mesh.pack_rank[1])

    got, wanted = as_rank(int(sizes.vocab_parallel), ranks, step, sizes)  # the second of tp has labels
    assert got == wanted, f"more: {got - wanted}, missing: {wanted - got}"


def test_bytes_of_a_step_in_the_docs_are_those_counted_by_hand() -> None:
    """The same count for published models in bfloat16."""
    plan = shape(config_of("qwen3-vl-8b"), compute_dtype=torch.bfloat16)
    counted = sharded_by_hand(Layout(plan, MeshSizes(), 64), 2, True)
    gathered, shared_out = (total(counted, "dp", kind) for kind in ("gather", "scatter"))
    text = " ".join((Path(__file__).parents[2] / "docs" / "parallel.md").read_text().split())
    said = f"each rank receives {gathered / 1e9:.1f} GB of weights per micro-batch and shares out {shared_out / 1e9:.1f} GB of gradients"
    assert said in text


TABLE = {
    "`dp_shard: 64`": ("qwen3-vl-8b", 64, MeshSizes()),
    "`tp: 4, vocab_parallel: true`": ("qwen3-vl-8b", 64, MeshSizes(tp=4, vocab_parallel=True)),
    "`cp: 4`": ("qwen3-vl-8b", 64, MeshSizes(cp=4)),
    "`dp_shard: 64` ": ("qwen3-vl-30b-a3b", 64, MeshSizes()),
    "`ep: 8`": ("qwen3-vl-30b-a3b", 64, MeshSizes(ep=8)),
    "`tp: 2, ep: 8, vocab_parallel: true`": ("qwen3.5-35b-a3b", 64, MeshSizes(tp=2, ep=8, vocab_parallel=True)),
}
PACK = 32768  # tokens, a quarter of them supervised


def bytes_per_axis(size: str, ranks: int, sizes: MeshSizes) -> list[float]:
    """GB that the first rank gathers, shares out or exchanges per pack: FSDP's weights and gradients, then what tp, cp and ep pass."""
    layout = Layout(shape(config_of(size), compute_dtype=torch.bfloat16), sizes, ranks)
    sharded = sharded_by_hand(layout, 2, True)
    labels = (PACK // 4 // sizes.per_pack,) * sizes.tp
    passed = passed_by_hand(layout, PACK, labels, 2)
    sent = [total(sharded, "dp", "gather"), total(sharded, "dp", "scatter"), *(total(passed, axis) for axis in ("tp", "cp", "ep"))]
    return [count / 1e9 for count in sent]


@pytest.mark.parametrize("how", TABLE)
def test_bytes_per_axis_in_the_docs_are_those_counted_by_hand(how: str) -> None:
    size, ranks, sizes = TABLE[how]
    cells = " | ".join(f"{count:.1f}" if count else "–" for count in bytes_per_axis(size, ranks, sizes))
    assert f"| {how.strip()} | {cells} |" in (Path(__file__).parents[2] / "docs" / "parallel.md").read_text()


# what happens in turn, of four blocks with experts on two ranks each: "g2" block 2 is gathered, "e2" its experts are, "2" it computes
IN_TURN = {
    (None, None): ("g0 0 e0 g1 1 e1 g2 2 e2 g3 3 e3", "g3 e3 g2 3 e2 g1 2 e1 g0 1 e0 0"),
    (1, 1): ("g0 e0 g1 e1 0 g2 e2 1 g3 e3 2 3", "g3 e3 g2 e2 3 g1 e1 2 g0 e0 1 0"),
    (2, 2): ("g0 e0 g1 e1 g2 e2 0 g3 e3 1 2 3", "g3 e3 g2 e2 g1 e1 3 g0 e0 2 1 0"),
}


@pytest.mark.parametrize("ahead", IN_TURN, ids=str)
def test_blocks_and_their_experts_are_gathered_ahead(ahead: tuple[int | None, int | None], monkeypatch: pytest.MonkeyPatch) -> None:
    """In the forward and in the backward pass, each ahead of the attention of the block that is named before."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group

    case = FAMILIES["qwen3_vl-moe"]
    language = case.config.language.model_copy(update={"layers": 4})
    vision = case.config.vision.model_copy(update={"deepstack_layers": []})
    config = case.config.model_copy(update={"language": language, "vision": vision})

    def step(mesh: Mesh) -> list[str]:
        plan, seen = shape(config), list[str]()
        place(plan, "cpu", mesh)
        names = {id(module): name for name, module in plan.model.named_modules()}
        groups: Any = _fsdp_param_group
        gather = groups.foreach_all_gather

        def gathered(params: Any, *args: Any) -> Any:
            name = names[id(params[0]._module_info.module)]
            if name.startswith("language.blocks."):
                seen.append(("e" if "experts" in name else "g") + name.split(".")[2])
            return gather(params, *args)

        monkeypatch.setattr(groups, "foreach_all_gather", gathered)
        for i, name in enumerate(plan.blocks["language"]):
            attn = plan.model.get_submodule(f"{name}.attn")
            attn.register_forward_hook(lambda *_, i=i: seen.append(str(i)))
            attn.register_full_backward_hook(lambda *_, i=i: seen.append(str(i)))
        for _, x, _ in plan.tensors():
            held(x).local.data.normal_(0, 0.02)
        data = step_for([packs_of(case)[0][1]], 0, 4)
        add_gradients(plan.model, data, ranks_of(mesh), None, 0, 0)
        return seen

    counts = experts_of_ranks.exchanged
    monkeypatch.setattr(experts_of_ranks, "exchanged", lambda x, *where: (counts(x, *where), x)[1])
    found = as_rank(0, 4, step, MeshSizes(ep=2, forward_prefetch=ahead[0], backward_prefetch=ahead[1]))
    assert found == " ".join(IN_TURN[ahead]).split()


@pytest.mark.parametrize(
    ("sizes", "world", "why"),
    [
        (MeshSizes(forward_prefetch=1), 1, "this is one process"),
        (MeshSizes(forward_prefetch=2, dp_shard=1, dp_replicate=4), None, "with dp_shard=1 each rank has them whole"),
        (MeshSizes(backward_prefetch=1, pp=4), 4, "with dp_shard=1 each rank has them whole"),
        (MeshSizes(backward_prefetch=1, reshard_after_forward="never"), 4, "which gathers none"),
    ],
)
def test_prefetch_is_refused_where_nothing_is_gathered(sizes: MeshSizes, world: int | None, why: str) -> None:
    [line] = problems(sizes, world)
    assert why in line
