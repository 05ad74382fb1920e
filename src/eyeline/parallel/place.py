"""A planned model onto the devices that it computes on: the one place where it is cut."""

import torch

from eyeline.core.plan import M, Plan, materialise
from eyeline.parallel.mesh import Mesh


def place(plan: Plan[M], device: torch.device | str, mesh: Mesh | None = None) -> None:
    """Give the model memory: each rank its part of it. On one device every tensor is there whole."""
    if mesh is not None:
        if mesh.images is not None:
            mesh.images.join(plan)
        from eyeline.parallel.shard import shard

        shard(plan, mesh)
    materialise(plan, device)
