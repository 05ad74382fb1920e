"""What a step asks of the other ranks that share it. On one device there are none."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter


@dataclass(frozen=True)
class Ranks:
    """Every rank calls the same of these, in the same order, on as many tensors of the same shapes."""

    sum: Callable[[Tensor], Tensor]  # over all ranks
    sum_of_pack: Callable[[Tensor], Tensor]  # over the ranks that share a pack, each with some of its rows
    sum_gradients: Callable[[Iterable[Parameter]], None]  # over all ranks, in place: of parameters whose backward pass has not done so
    norm: Callable[[Sequence[Parameter]], Tensor]  # of all gradients together, whatever rank has them
    clip: Callable[[Sequence[Parameter], float, Tensor], None]  # gradients of so large a norm are scaled down to the given one


def _same(x: Tensor) -> Tensor:
    return x


def _nothing(_: Iterable[Parameter]) -> None:
    pass


def _norm(parameters: Sequence[Parameter]) -> Tensor:
    return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])


ONE_DEVICE = Ranks(_same, _same, _nothing, _norm, torch.nn.utils.clip_grads_with_norm_)
