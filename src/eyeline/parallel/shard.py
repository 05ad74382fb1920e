"""Parameters shared out over ranks (FSDP2): each rank keeps a part of every matrix, and gathers a block's when it computes with it.

What the plan calls exact (norms, routers, tables of positions: few numbers) stays whole on every rank and in float32, and its gradients
are summed once a step (`ranks.py`): a block then has one kind of parameter, gathered in the dtype that it computes in, and its products
are those of one device. A rank adds its gradients to those of the others and divides by nothing: the step has done that already.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from eyeline.core.plan import Plan, tensor_of
from eyeline.core.shards import held
from eyeline.parallel.experts import experts_of
from eyeline.parallel.mesh import Mesh
from eyeline.parallel.prefetch import prefetch
from eyeline.parallel.vocabulary import EMBED, HEAD


def shard(plan: Plan[Any], mesh: Mesh) -> None:
    """Cut the parameters of a planned model, which has no memory yet, over the ranks that see other rows than one another: of a branch that
    tensor parallelism has cut, each rank its piece."""
    model = plan.model
    compute = next((entry.compute for entry in plan.table.values() if not entry.exact), torch.float32)
    whole = {tensor_of(model, plan.location(name)) for name, entry in plan.table.items() if entry.exact and entry.role != "buffer"}
    policy = MixedPrecisionPolicy() if compute == torch.float32 else MixedPrecisionPolicy(compute, torch.float32, cast_forward_inputs=False)
    how: dict[str, Any] = {"reshard_after_forward": mesh.reshard, "mp_policy": policy, "ignored_params": whole}
    for name, over in apart(plan, mesh).items():
        fully_shard(model.get_submodule(name), mesh=over, shard_placement_fn=across(plan, name, over), **how)
    cut = {model.get_submodule(name) for name in plan.blocks["language"]} if mesh.sizes.tp > 1 else set()
    if mesh.sizes.vocab_parallel:
        cut |= {model.get_submodule(name) for name in (EMBED, HEAD)}
    for modules in units(plan):
        over = mesh.split if not cut.isdisjoint(modules) else mesh.shard
        fully_shard(modules if len(modules) > 1 else modules[0], mesh=over, **how)  # type: ignore[arg-type]  # both are taken
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # else gloo is asked for a sum that scales, which it does not have
    prefetch(plan, mesh.sizes)


def apart(plan: Plan[Any], mesh: Mesh) -> dict[str, DeviceMesh]:
    """What of the language model's blocks is sharded over other ranks than their branches are: experts, of which a rank may have some,
    and, where branches are cut, what else computes on a rank's own rows."""
    found: dict[str, DeviceMesh] = {}
    if mesh.sizes.experts_apart:
        found = dict.fromkeys(experts_of(plan), mesh.experts or mesh.shard)
    if mesh.sizes.tp > 1:
        for name, entry in plan.table.items():
            owner = name.rpartition(".")[0]
            in_block = entry.part == "language" and entry.unit in plan.blocks["language"]
            in_branch = any(f"{owner}.".startswith(f"{branch}.") for branch in plan.branches)
            if in_block and not in_branch and not entry.exact and entry.role != "buffer":
                found.setdefault(owner, mesh.shard)
    return found


def across(plan: Plan[Any], name: str, over: DeviceMesh) -> Callable[[nn.Parameter], Shard | None] | None:
    """Where there are fewer experts here than ranks to share them out, each is cut: else the ranks beyond would hold nothing."""
    tensors = [held(p).local for p in plan.model.get_submodule(name).parameters()]
    ranks = over.size(-1)
    if tensors[0].ndim < 3 or len(tensors[0]) >= ranks or any(x.shape[1] % ranks for x in tensors):
        return None
    return lambda _: Shard(1)


def units(plan: Plan[Any]) -> list[list[nn.Module]]:
    """The modules whose parameters are gathered together, inner ones first; the model itself is the last."""
    paths: dict[str, dict[str, None]] = {name: {name: None} for names in plan.blocks.values() for name in names}
    for name, entry in plan.table.items():
        if entry.exact or entry.role == "buffer" or entry.unit in plan.blocks.get(entry.part, ()):
            continue
        part, child = plan.location(name).split(".")[:2]
        paths.setdefault(entry.unit, {})[part if entry.unit == part else f"{part}.{child}"] = None
    deepest_first = sorted(paths.values(), key=lambda found: -max(path.count(".") for path in found))
    return [[plan.model.get_submodule(path) for path in found] for found in deepest_first] + [[plan.model]]
