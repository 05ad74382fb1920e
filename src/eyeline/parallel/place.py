"""A planned model onto the devices that it computes on: the one place where sharding will cut it."""

import torch

from eyeline.core.plan import M, Plan, materialise


def place(plan: Plan[M], device: torch.device | str) -> None:
    """On one device every tensor is there whole: nothing is cut."""
    materialise(plan, device)
