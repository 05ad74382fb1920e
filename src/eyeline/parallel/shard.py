"""Parameters shared out over ranks (FSDP2): each rank keeps a part of every matrix, and gathers a block's when it computes with it.

What the plan calls exact (norms, routers, tables of positions: few numbers) stays whole on every rank and in float32, and its gradients
are summed once a step (`ranks.py`): a block then has one kind of parameter, gathered in the dtype that it computes in, and its products
are those of one device. A rank adds its gradients to those of the others and divides by nothing: the step has done that already.
"""

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from eyeline.core.plan import Plan, tensor_of
from eyeline.parallel.mesh import Mesh


def shard(plan: Plan[Any], mesh: Mesh) -> None:
    """Cut the parameters of a planned model, which has no memory yet, along their first dim over the ranks of `mesh.shard`."""
    model = plan.model
    compute = next((entry.compute for entry in plan.table.values() if not entry.exact), torch.float32)
    whole = {tensor_of(model, name) for name, entry in plan.table.items() if entry.exact and entry.role != "buffer"}
    policy = MixedPrecisionPolicy() if compute == torch.float32 else MixedPrecisionPolicy(compute, torch.float32, cast_forward_inputs=False)
    for modules in units(plan):
        fully_shard(
            modules if len(modules) > 1 else modules[0],  # type: ignore[arg-type]  # both are taken
            mesh=mesh.shard,
            reshard_after_forward=mesh.reshard,
            mp_policy=policy,
            ignored_params=whole,  # type: ignore[arg-type]  # tensor_of gave parameters
        )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # else gloo is asked for a sum that scales, which it does not have


def units(plan: Plan[Any]) -> list[list[nn.Module]]:
    """The modules whose parameters are gathered together, inner ones first; the model itself is the last."""
    paths: dict[str, dict[str, None]] = {name: {name: None} for names in plan.blocks.values() for name in names}
    for name, entry in plan.table.items():
        if entry.exact or entry.role == "buffer" or entry.unit in plan.blocks.get(entry.part, ()):
            continue
        part, child = name.split(".")[:2]
        paths.setdefault(entry.unit, {})[part if entry.unit == part else f"{part}.{child}"] = None
    deepest_first = sorted(paths.values(), key=lambda found: -max(path.count(".") for path in found))
    return [[plan.model.get_submodule(path) for path in found] for found in deepest_first] + [[plan.model]]
