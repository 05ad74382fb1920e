"""What a step asks of the other ranks that share it. On one device there are none."""

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from eyeline.core.batch import Batch
from eyeline.core.plan import PARTS, Part
from eyeline.core.shards import is_sharded, mesh_of_tensor
from eyeline.core.step import Slot
from eyeline.parallel.mesh import Mesh
from eyeline.parallel.rows import rows_of

if TYPE_CHECKING:
    from eyeline.parallel.pipeline import Pipeline

T = TypeVar("T")


def _same(x: T) -> T:
    return x


def _nothing(_: Iterable[Parameter]) -> None:
    pass


def _as_it_is(batch: Batch, _: Slot) -> AbstractContextManager[Batch]:
    return nullcontext(batch)


def _as_ever(model: nn.Module, parts: Collection[Part]) -> None:
    pass


@dataclass(frozen=True)
class Ranks:
    """Every rank calls the same of these, in the same order, on as many tensors of the same shapes."""

    rows: Callable[[Batch], Batch]  # the rows of a pack that this rank has, where ranks share it
    sum: Callable[[Tensor], Tensor]  # over all ranks
    sum_of_pack: Callable[[Tensor], Tensor]  # over the ranks that share a pack, each with some of its rows
    sum_gradients: Callable[[Iterable[Parameter]], None]  # over all ranks, in place: of parameters whose backward pass has not done so
    norm: Callable[[Sequence[Parameter]], Tensor]  # of all gradients together, whatever rank has them
    clip: Callable[[Sequence[Parameter], float, Tensor], None]  # gradients of so large a norm are scaled down to the given one
    dealt: Callable[[Batch, Slot], AbstractContextManager[Batch]] = _as_it_is  # the batch with the images that this rank encodes
    # the next backward pass sums the gradients of these parts over ranks, and of no others; what was not summed yet is summed with them
    sum_next: Callable[[nn.Module, Collection[Part]], None] = _as_ever
    pipeline: "Pipeline | None" = None  # where ranks have slices of the model


def _norm(parameters: Sequence[Parameter]) -> Tensor:
    return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])


ONE_DEVICE = Ranks(_same, _same, _same, _nothing, _norm, torch.nn.utils.clip_grads_with_norm_)


def ranks_of(mesh: Mesh) -> Ranks:
    """The ranks of a mesh. Gradients of sharded parameters arrive summed; those of the others are summed here, all in one go."""
    import torch.distributed as dist
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    sizes, axes, pipeline = mesh.sizes, mesh.axes, mesh.pipeline
    pack = None if axes is None or sizes.per_pack == 1 else axes["cp", "tp"]._flatten("cp_tp").get_group()
    # of what tensor parallelism cuts and nothing else does, each rank has a piece; the ranks with the same piece see other rows
    same_piece = None if axes is None else axes["dp_replicate", "dp_shard", "cp"]._flatten("dp_replicate_dp_shard_cp").get_group()

    def total(x: Tensor, group: Any = mesh.everyone) -> Tensor:
        summed = x.clone()
        dist.all_reduce(summed, group=group)
        return summed

    def sum_gradients(parameters: Iterable[Parameter]) -> None:
        gradients = [(p, p.grad) for p in parameters if p.grad is not None]
        _sum_all([gradient for p, gradient in gradients if not is_sharded(p)], lambda x: total(x, mesh.same_slices))
        cut = [gradient.to_local() for p, gradient in gradients if isinstance(gradient, DTensor) and p.device_mesh == axes]  # type: ignore[attr-defined]
        _sum_all(cut, lambda x: total(x, same_piece))
        if pipeline is not None:
            pipeline.sum_tied()

    def norm(parameters: Sequence[Parameter]) -> Tensor:
        norms = [_norm(alike) for alike in _alike(parameters if pipeline is None else filter(pipeline.answers_for, parameters))]
        norms = [x.full_tensor() if isinstance(x, DTensor) else x for x in norms]
        if pipeline is None:
            return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
        own = torch.stack(norms) if norms else torch.zeros(1, device=mesh.shard.device_type)
        return pipeline.norm(torch.linalg.vector_norm(own))

    def clip(parameters: Sequence[Parameter], most: float, norm: Tensor) -> None:
        for alike in _alike(parameters):
            torch.nn.utils.clip_grads_with_norm_(alike, most, norm)

    def sum_next(model: nn.Module, parts: Collection[Part]) -> None:
        for name, module in model.named_modules():
            if isinstance(module, FSDPModule):
                part = name.partition(".")[0]
                module.set_requires_gradient_sync(part not in PARTS or part in parts, recurse=False)

    return Ranks(
        rows=lambda batch: rows_of(batch, sizes, *mesh.pack_rank),
        sum=total,
        sum_of_pack=_same if pack is None else lambda x: total(x, pack),
        sum_gradients=sum_gradients,
        norm=norm,
        clip=clip,
        dealt=_as_it_is if mesh.images is None else mesh.images.dealt,
        sum_next=_as_ever if mesh.sizes.sync_each_batch else sum_next,
        pipeline=pipeline,
    )


def _sum_all(gradients: Sequence[Tensor], total: Callable[[Tensor], Tensor]) -> None:
    """Replace tensors by their sums over ranks, in one go."""
    if not gradients:
        return
    flat = total(torch.cat([gradient.float().flatten() for gradient in gradients]))
    for gradient, summed in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(summed.view_as(gradient))


def _alike(parameters: Iterable[Parameter]) -> list[list[Parameter]]:
    """The parameters by the mesh that they are sharded over, whole ones apart: no operator takes those of several."""
    found: dict[Any, list[Parameter]] = {}
    for p in parameters:
        found.setdefault(mesh_of_tensor(p), []).append(p)
    return [*found.values()]
