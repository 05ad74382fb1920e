"""Optimizers whose step is not element by element alone, over parameters that several axes cut: the step of one device."""

from typing import Any

import pytest
import torch
from torch import Tensor

from eyeline.core.plan import Plan
from eyeline.core.randomness import torch_rng_for
from eyeline.core.shards import is_sharded, put, whole
from eyeline.core.world import ALONE, World
from eyeline.models.shape import shape
from eyeline.parallel.mesh import MeshSizes, mesh_of
from eyeline.parallel.place import place
from eyeline.train.optim import AdamW, Muon, Optimizer, make_optimizers, state_tensors
from tests.parallel.updates import FAMILIES, fill
from tests.ranks import on_ranks

pytestmark = pytest.mark.ranks

CASE = FAMILIES["qwen3_5_vl-moe"]
MESHES = {
    "fsdp x tp x ep": (4, MeshSizes(dp_shard=2, tp=2, ep=2)),
    "ep, experts cut": (4, MeshSizes(ep=2)),
    "hsdp x tp": (4, MeshSizes(dp_replicate=2, tp=2)),
}


def gradient(name: str, shape: tuple[int, ...], step: int) -> Tensor:
    return torch.randn(shape, generator=torch_rng_for(step, name))


def stepped(settings: Optimizer, sizes: MeshSizes, world: World = ALONE) -> dict[str, Tensor]:
    """Weights and moments after three steps with made-up gradients; one parameter has none in the second."""
    mesh = mesh_of(sizes if world.size > 1 else MeshSizes(), world, "cpu")
    plan: Plan[Any] = shape(CASE.config)
    place(plan, "cpu", mesh)
    fill(CASE, plan)
    optimizers = make_optimizers(plan, settings, 3, mesh)
    trained = [(name, x) for name, x, entry in plan.tensors() if entry.trains]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = 0.02
    for step in range(3):
        for n, (name, x) in enumerate(trained):
            x.grad = None if (step, n) == (1, 7) else torch.zeros_like(x, requires_grad=False)
            if x.grad is not None:
                put(x.grad, gradient(name, tuple(x.shape), step))
        for optimizer in optimizers:
            optimizer.step()
    found = {name: whole(x.detach()).clone() for name, x in trained}
    return found | {name: whole(x) for name, x in state_tensors(optimizers).items() if x.ndim and (is_sharded(x) or mesh is None)}


@pytest.mark.parametrize("mesh", MESHES)
def test_cut_parameters_take_the_step_of_one_device(mesh: str) -> None:
    """Muon, whose matrices are orthogonalised whole, and moments that are rounded by their places in whole tensors."""
    ranks, sizes = MESHES[mesh]
    how: list[Optimizer] = [Muon(weight_decay=0.1), AdamW(state_dtype="bf16", weight_decay=0.1)]
    want = [stepped(settings, sizes) for settings in how]
    for got in on_ranks(ranks, lambda world: [stepped(settings, sizes, world) for settings in how]):
        for one, other in zip(got, want, strict=True):
            assert {name for name in one if ":" not in name} == {name for name in other if ":" not in name}
            for name, x in one.items():
                torch.testing.assert_close(x, other[name], rtol=1e-6, atol=1e-7, msg=lambda text, name=name: f"{name}: {text}")
