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
from eyeline.models.shape import shape
from eyeline.parallel.mesh import Mesh, MeshSizes, mesh_of
from eyeline.parallel.place import place
from eyeline.parallel.ranks import ranks_of
from eyeline.parallel.shard import shard
from eyeline.parallel.slices import own_slices
from eyeline.study.roofline.sizes import config_of
from eyeline.train.step import add_gradients
from tests.forked import Forked
from tests.parallel.updates import FAMILIES, packs_of, step_for

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


def rows_by_hand(rows: int, ranks: int, rank: int) -> int:
    """Pieces of ⌈rows / ranks⌉ rows; the last ones may be shorter, or empty."""
    most = -(-rows // ranks)
    return max(0, min(most, rows - rank * most))


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


@pytest.mark.parametrize(
    ("ranks", "sizes", "shards"),
    [(64, MeshSizes(), 64), (256, MeshSizes(), 256), (256, MeshSizes(dp_replicate=32), 8)],
    ids=["64", "256", "256, hsdp of 8"],
)
@pytest.mark.parametrize("rank", [0, -1], ids=["first", "last"])
def test_what_a_rank_holds_of_eight_billion_parameters(ranks: int, sizes: MeshSizes, shards: int, rank: int) -> None:
    """Every tensor, by hand: ⌈rows ÷ ranks of a copy⌉ rows of a matrix, and what is exact whole."""
    at = rank % ranks

    def held_by(mesh: Mesh) -> Any:
        plan = sharded("qwen3-vl-8b", mesh)
        return {name: (held(x).local.numel(), x.numel(), entry) for name, x, entry in plan.tensors()}

    found = as_rank(at, ranks, held_by, sizes)
    for name, (got, numbers, entry) in found.items():
        rows = entry.shape[0]
        mine = rows if entry.exact else rows_by_hand(rows, shards, at % shards)
        assert got == numbers // rows * mine, name
    whole = sum(numbers for _, numbers, entry in found.values() if entry.exact)
    assert whole < 4e6
    assert sum(got for got, *_ in found.values()) < 8.8e9 / shards * 1.05 + whole


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
    """Counts collectives by kind and by the bytes of the whole that is gathered or shared out."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[tuple[str, int]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            kind = next(name for name in ("gather", "scatter", "reduce", "") if name in str(func))
            self.seen[kind, max(x.nbytes for x in tree_leaves(args) if isinstance(x, Tensor))] += 1
        return func(*args, **(kwargs or {}))


def collectives_by_hand(plan: Plan[Any], shards: int, copies: int, compute: int, again: bool) -> Counter[tuple[str, int]]:
    """A unit is gathered in the dtype that it computes in, before its forward pass and, where it was freed, before its backward pass; its
    gradients are shared out in float32, and with several copies each part is summed over them. What is exact is summed in one go."""
    units: dict[str, int] = {}
    for _, _, entry in plan.tensors():
        if not entry.exact:
            first, *rest = entry.shape
            units[entry.unit] = units.get(entry.unit, 0) + -(-first // shards) * math.prod(rest)
    wanted: Counter[tuple[str, int]] = Counter()
    for part in units.values():
        wanted["gather", shards * part * compute] += 2 if again else 1
        wanted["scatter", shards * part * 4] += 1
        if copies > 1:
            wanted["reduce", part * 4] += 1
    wanted["reduce", 4 * sum(x.numel() for _, x, entry in plan.tensors() if entry.exact)] += 1
    return wanted


STEPS = {
    "64": (64, MeshSizes(), torch.float32),
    "256": (256, MeshSizes(), torch.float32),
    "64, hsdp": (64, MeshSizes(dp_replicate=8), torch.float32),
    "64, bf16, never resharded": (64, MeshSizes(reshard_after_forward="never"), torch.bfloat16),
}


@pytest.mark.parametrize("how", STEPS)
def test_collectives_of_a_step_are_those_counted_by_hand(how: str) -> None:
    """A real step of a tiny model, whose first rank alone has a pack: number and bytes of all that ranks send."""
    ranks, sizes, precision = STEPS[how]
    case = FAMILIES["qwen3_vl"]

    def step(mesh: Mesh) -> Any:
        plan = shape(case.config, compute_dtype=precision)
        place(plan, "cpu", mesh)
        for _, x, _ in plan.tensors():
            with torch.no_grad():
                held(x).local.normal_(0, 0.02)
        data, over = step_for([packs_of(case)[0][0]], 0, ranks), ranks_of(mesh)
        with Collectives() as counted:
            add_gradients(plan.model, data, over, None, 0, 0)
            over.sum_gradients([p for p in plan.model.parameters() if p.grad is not None])
        shards = sizes.sharded_over(ranks)
        again = sizes.reshard_after_forward == "always"
        return counted.seen, collectives_by_hand(plan, shards, ranks // shards, precision.itemsize, again)

    got, wanted = as_rank(0, ranks, step, sizes)
    assert got == wanted


def test_bytes_of_a_step_in_the_docs_are_those_counted_by_hand() -> None:
    """The same count for Qwen3-VL-8B in bfloat16 on 64 ranks."""
    counted = collectives_by_hand(shape(config_of("qwen3-vl-8b"), compute_dtype=torch.bfloat16), 64, 1, 2, True)
    gathered, shared_out = (sum(size * n for (kind, size), n in counted.items() if kind == wanted) for wanted in ("gather", "scatter"))
    text = " ".join((Path(__file__).parents[2] / "docs" / "parallel.md").read_text().split())
    said = f"each rank receives {gathered / 1e9:.1f} GB of weights per micro-batch and shares out {shared_out / 1e9:.1f} GB of gradients"
    assert said in text
