"""Muon over sharded matrices against torch's on one device."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from eyeline.core.world import World
from eyeline.parallel.mesh import MeshSizes, mesh_of
from eyeline.parallel.muon import ShardedMuon
from tests.ranks import on_ranks

pytestmark = pytest.mark.ranks

SHAPES = ((5, 8), (16, 4), (1, 6), (7, 7), (2, 3))  # rows that two and three ranks do not divide, and fewer rows than ranks
HOW = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.3, "adjust_lr_fn": "match_rms_adamw"}


def matrices(seed: int) -> list[Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=rng) for shape in SHAPES]


def stepped(optimizer: Callable[..., torch.optim.Muon], sharded: list[Tensor], gradients: list[list[Tensor]]) -> list[nn.Parameter]:
    """Three steps; in the second one matrix has no gradient."""
    parameters = [nn.Parameter(x) for x in sharded]
    made = optimizer(parameters, **HOW)
    for number, of_step in enumerate(gradients):
        for n, (p, gradient) in enumerate(zip(parameters, of_step, strict=True)):
            p.grad = None if (number, n) == (1, 2) else gradient
        made.step()
    return parameters


@pytest.mark.parametrize("count", [2, 3])
def test_sharded_matrices_take_the_step_of_one_device(count: int) -> None:
    def work(world: World) -> list[Tensor]:
        mesh = mesh_of(MeshSizes(), world, "cpu")
        assert mesh is not None

        def cut(whole: list[Tensor]) -> list[Tensor]:
            return [distribute_tensor(x, mesh.shard, [Shard(0)]) for x in whole]

        done = stepped(partial(ShardedMuon, mesh=mesh), cut(matrices(0)), [cut(matrices(n)) for n in (1, 2, 3)])
        return [p.data.full_tensor() for p in done if isinstance(p.data, DTensor)]

    want = stepped(torch.optim.Muon, matrices(0), [matrices(n) for n in (1, 2, 3)])
    for got in on_ranks(count, work):
        for x, p in zip(got, want, strict=True):
            torch.testing.assert_close(x, p.detach(), rtol=1e-6, atol=1e-7)
