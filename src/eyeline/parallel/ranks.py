"""What a step asks of the other ranks that share it. On one device there are none."""

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from eyeline.core.batch import Batch
from eyeline.core.plan import PARTS, Part
from eyeline.core.shards import is_sharded
from eyeline.core.step import Slot
from eyeline.parallel.mesh import Mesh


def _same(x: Tensor) -> Tensor:
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

    sum: Callable[[Tensor], Tensor]  # over all ranks
    sum_of_pack: Callable[[Tensor], Tensor]  # over the ranks that share a pack, each with some of its rows
    sum_gradients: Callable[[Iterable[Parameter]], None]  # over all ranks, in place: of parameters whose backward pass has not done so
    norm: Callable[[Sequence[Parameter]], Tensor]  # of all gradients together, whatever rank has them
    clip: Callable[[Sequence[Parameter], float, Tensor], None]  # gradients of so large a norm are scaled down to the given one
    dealt: Callable[[Batch, Slot], AbstractContextManager[Batch]] = _as_it_is  # the batch with the images that this rank encodes
    # the next backward pass sums the gradients of these parts over ranks, and of no others; what was not summed yet is summed with them
    sum_next: Callable[[nn.Module, Collection[Part]], None] = _as_ever


def _norm(parameters: Sequence[Parameter]) -> Tensor:
    return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])


ONE_DEVICE = Ranks(_same, _same, _nothing, _norm, torch.nn.utils.clip_grads_with_norm_)


def ranks_of(mesh: Mesh) -> Ranks:
    """The ranks of a mesh. Gradients of sharded parameters arrive summed; those of the others are summed here, all in one go."""
    import torch.distributed as dist
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    def total(x: Tensor) -> Tensor:
        summed = x.clone()
        dist.all_reduce(summed, group=mesh.everyone)
        return summed

    def sum_gradients(parameters: Iterable[Parameter]) -> None:
        gradients = [p.grad for p in parameters if p.grad is not None and not is_sharded(p)]
        if not gradients:
            return
        flat = total(torch.cat([gradient.float().flatten() for gradient in gradients]))
        for gradient, summed in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(summed.view_as(gradient))

    def norm(parameters: Sequence[Parameter]) -> Tensor:
        norms = [_norm(alike) for alike in _alike(parameters)]
        norms = [x.full_tensor() if isinstance(x, DTensor) else x for x in norms]
        return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())

    def clip(parameters: Sequence[Parameter], most: float, norm: Tensor) -> None:
        for alike in _alike(parameters):
            torch.nn.utils.clip_grads_with_norm_(alike, most, norm)

    def sum_next(model: nn.Module, parts: Collection[Part]) -> None:
        for name, module in model.named_modules():
            if isinstance(module, FSDPModule):
                part = name.partition(".")[0]
                module.set_requires_gradient_sync(part not in PARTS or part in parts, recurse=False)

    dealt = _as_it_is if mesh.images is None else mesh.images.dealt
    return Ranks(total, _same, sum_gradients, norm, clip, dealt, _as_ever if mesh.sizes.sync_each_batch else sum_next)


def _alike(parameters: Sequence[Parameter]) -> list[list[Parameter]]:
    """The parameters that are sharded, and those that are whole: no operator takes both at once."""
    kinds = [[p for p in parameters if is_sharded(p) == sharded] for sharded in (True, False)]
    return [kind for kind in kinds if kind]
