"""Tensors of which this rank holds a part. Code that fills, saves or loads a tensor asks here which part that is, and needs to know nothing
of ranks; a tensor that is not cut is held whole."""

import math
import sys
from collections.abc import Hashable
from typing import NamedTuple

import torch
from torch import Tensor


class Box(NamedTuple):
    """A part of a tensor."""

    offset: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.lengths)

    def common(self, other: "Box") -> "Box | None":
        """What is in both; None where nothing is."""
        start = tuple(map(max, self.offset, other.offset))
        end = tuple(min(a + n, b + m) for a, n, b, m in zip(*self, *other, strict=True))
        return (
            None
            if any(a >= b for a, b in zip(start, end, strict=True))
            else Box(start, tuple(b - a for a, b in zip(start, end, strict=True)))
        )

    def within(self, outer: "Box") -> tuple[slice, ...]:
        """Where this is located in an outer box."""
        return tuple(slice(a - o, a - o + n) for a, n, o in zip(*self, outer.offset, strict=True))


class Held(NamedTuple):
    """What this rank holds of a tensor."""

    local: Tensor  # shares its memory with the tensor
    box: Box
    replica: int  # 0 on the one rank that answers for this part among those that hold the same


def is_sharded(x: Tensor) -> bool:
    """Return whether a tensor belongs to a mesh of ranks (it is a DTensor)."""
    module = sys.modules.get("torch.distributed.tensor")  # nothing is sharded before it is imported, which takes a while
    return module is not None and isinstance(x, module.DTensor)


def mesh_of_tensor(x: Tensor) -> Hashable:
    """The mesh of ranks that a tensor is sharded over: no operator takes tensors of several. None of a tensor that is whole."""
    return x.device_mesh if is_sharded(x) else None  # type: ignore[attr-defined]


def held(x: Tensor) -> Held:
    """The part that this rank holds. Of a tensor that is not sharded, all; `replica` is then not known, and 0."""
    if not is_sharded(x):
        return Held(x, Box((0,) * x.ndim, tuple(x.shape)), 0)
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    assert isinstance(x, DTensor)
    lengths, offset = compute_local_shape_and_global_offset(x.shape, x.device_mesh, x.placements)
    coordinate = x.device_mesh.get_coordinate()
    assert coordinate is not None, "a rank holds parameters of meshes that it is in, and of no others"
    replica = sum(at for at, placement in zip(coordinate, x.placements, strict=True) if placement.is_replicate())
    with torch.no_grad():
        local = x.to_local()
    return Held(local, Box(tuple(offset), tuple(lengths)), replica)


@torch.no_grad()
def put(x: Tensor, whole: Tensor) -> None:
    """Fill a tensor, or the part of it that this rank holds, from a whole one of any device and dtype."""
    if not is_sharded(x):
        x.copy_(whole)
        return
    part = held(x)
    part.local.copy_(whole[part.box.within(Box((0,) * x.ndim, tuple(x.shape)))])


@torch.no_grad()
def whole(x: Tensor) -> Tensor:
    """A whole tensor, put together where it is sharded: then all ranks ask for it at once. Not `full_tensor`: of a tensor that is cut on
    two axes torch warns that it gathers twice."""
    if not is_sharded(x):
        return x
    import torch.distributed as dist

    part, mesh = held(x), x.device_mesh  # type: ignore[attr-defined]
    out = torch.zeros(x.shape, dtype=x.dtype, device=part.local.device)
    if part.replica == 0:
        out[part.box.within(Box((0,) * x.ndim, tuple(x.shape)))] = part.local
    for dim in range(mesh.ndim):
        dist.all_reduce(out, group=mesh.get_group(dim))
    return out


def zeros_in_rows(x: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Zeros in the shape of a tensor, with rows of another width: as the tensor they are sharded, which is not within rows."""
    if not is_sharded(x):
        return torch.zeros((*x.shape[:-1], width), dtype=dtype, device=x.device)
    from torch.distributed.tensor import DTensor

    assert isinstance(x, DTensor)
    assert not any(placement.is_shard(x.ndim - 1) for placement in x.placements), "ranks share out rows, and not what is within them"
    whole, local = torch.empty((*x.shape[:-1], width), device="meta"), held(x).local
    zeros = torch.zeros((*local.shape[:-1], width), dtype=dtype, device=local.device)
    return DTensor.from_local(zeros, x.device_mesh, x.placements, run_check=False, shape=whole.shape, stride=whole.stride())


def places_in_whole(box: Box, shape: tuple[int, ...], start: int, end: int, device: torch.device) -> Tensor:
    """The places that numbers `start` to `end` of a part have in the whole tensor: both are counted row by row."""
    place_N = torch.arange(start, end, device=device)
    if box.lengths[1:] == shape[1:]:  # whole rows, or a number
        return place_N + math.prod(shape[1:]) * (box.offset[0] if shape else 0)
    rest_N, place_N, stride = place_N, torch.zeros_like(place_N), 1
    for first, length, size in zip(*(reversed(x) for x in (*box, shape)), strict=True):
        place_N += (rest_N % length + first) * stride
        rest_N, stride = rest_N // length, stride * size
    return place_N
