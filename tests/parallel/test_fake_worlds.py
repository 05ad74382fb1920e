"""Worlds of more ranks than there are processes, on torch's fake process group: what a rank holds and saves, counted by hand.

Models are of their published sizes, on the meta device.
"""

import json
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, TypeVar

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from eyeline.checkpoint import store
from eyeline.checkpoint.pieces import covers, pieces_of
from eyeline.core.plan import Plan
from eyeline.core.shards import held
from eyeline.core.world import World
from eyeline.models.shape import shape
from eyeline.parallel.mesh import Mesh, MeshSizes, mesh_of
from eyeline.parallel.shard import shard
from eyeline.study.roofline.sizes import config_of
from tests.forked import Forked

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
