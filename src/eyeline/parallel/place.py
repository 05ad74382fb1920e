"""A planned model onto the devices that it computes on: the one place where it is cut."""

from typing import Any

import torch

from eyeline.core.plan import M, Plan, materialise
from eyeline.parallel.mesh import Mesh


def share_out(plan: Plan[Any], mesh: Mesh) -> None:
    """Every axis of the mesh, in the order that they build on one another: what passes between ranks inside a model, then what a rank has
    of each parameter."""
    from eyeline.parallel.context import share_heads
    from eyeline.parallel.experts import spread_experts
    from eyeline.parallel.shard import shard
    from eyeline.parallel.tensor import cut_branches
    from eyeline.parallel.vocabulary import share_vocabulary

    if mesh.sizes.cp > 1:
        share_heads(plan, mesh)
    if mesh.sizes.tp > 1:
        cut_branches(plan, mesh)
    if mesh.sizes.vocab_parallel:
        share_vocabulary(plan, mesh)
    if mesh.sizes.ep > 1:
        spread_experts(plan, mesh)
    shard(plan, mesh)


def place(plan: Plan[M], device: torch.device | str, mesh: Mesh | None = None) -> None:
    """Give the model memory: each rank its part of it. On one device every tensor is there whole. A model that ranks have slices of is cut
    before (`slices.py`)."""
    if mesh is not None:
        if mesh.images is not None:
            mesh.images.join(plan)
        if mesh.pipeline is not None:
            mesh.pipeline.join(plan)
        share_out(plan, mesh)
    materialise(plan, device)
