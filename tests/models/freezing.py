"""Ways to train parts of a model, and a model made ready for one."""

from collections.abc import Mapping

import torch
from torch import nn

from eyeline.core.plan import PARTS, Part, Spec, part_of
from eyeline.core.randomness import torch_rng_for
from eyeline.models.lora import LoRA
from tests.planned import adapt

ALL_LINEAR = LoRA(rank=3, alpha=7, targets="all-linear")
Q_AND_V = LoRA(rank=2, alpha=2, targets=("q_proj", "v_proj"))


Ways = dict[Part, LoRA | None]  # part that trains -> its adapters, or None in full


WAYS: dict[str, Ways] = {
    "everything": dict.fromkeys(PARTS),
    "vision": {"vision": None},
    "projector": {"projector": None},
    "language": {"language": None},
    "language under a frozen tower": {"projector": None, "language": None},
    "LoRA q v and projector": {"projector": None, "language": Q_AND_V},
    "LoRA of all parts": dict.fromkeys(PARTS, ALL_LINEAR),
}


def ready(model: nn.Module, spec: Spec, ways: Mapping[Part, LoRA | None]) -> set[str]:
    """Adapters with a B that is not zero, freezing by part; the names of what trains."""
    for part, lora in ways.items():
        if lora is not None and part in spec.parts:
            adapt(model, spec, part, lora, torch_rng_for(0, part))
    trains = set()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("lora_B"):
                p.copy_(0.3 * torch.randn(p.shape, generator=torch_rng_for(0, name)))
            part, unused = part_of(name), not spec.uses(name)
            learns = part in ways and not unused and (ways[part] is None or ".lora_" in name)
            p.requires_grad_(learns)
            trains |= {name} if learns else set()
    return trains
