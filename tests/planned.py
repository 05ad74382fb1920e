"""Models for tests: with adapters that are filled, merged, from scratch, or with a plan around them."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn

from eyeline.bundle.exporting import weights
from eyeline.core.plan import PARTS, Part, Plan, Spec, tensor_of
from eyeline.core.randomness import torch_rng_for
from eyeline.models import Config, Model
from eyeline.models.lora import LoRA, LoRAExperts, LoRALinear, wrap
from eyeline.models.shape import build, shape


def adapt(model: nn.Module, spec: Spec, part: Part, lora: LoRA, rng: torch.Generator) -> list[str]:
    """Put fresh adapters on a model; the layers that have one now."""
    names = wrap(model, spec, part, lora)
    for name in names:
        layer = model.get_submodule(name)
        assert isinstance(layer, LoRALinear | LoRAExperts)
        layer.initialise_adapter(rng)
    return names


@torch.no_grad()
def merged(model: nn.Module, c: Config) -> Model:
    """A plain model with the updates of the adapters in its weights, as an export writes them."""
    plain = build(c, "cpu")
    for name, x in weights(model, True, torch.float32):
        plain.get_parameter(name).copy_(x)
    return plain


def initialise(model: nn.Module, seed: int = 0) -> None:
    """All weights from scratch, as a fresh run has them."""
    rng = torch_rng_for(seed, "weights")
    for part in PARTS:
        if hasattr(model, part):
            model.get_submodule(part).initialise(rng)


def plan_around(model: Model, c: Config, adapters: Mapping[Part, LoRA] | None = None) -> Plan[Model]:
    """The plan of a model that is there; what trains in it is what needs a gradient."""
    plan = shape(c, adapters=adapters)
    table = {name: replace(entry, trains=tensor_of(model, name).requires_grad) for name, entry in plan.table.items()}
    return replace(plan, model=model, table=table)
