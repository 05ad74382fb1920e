"""Ranks in one process: each has a thread and a model, and they sum by hand what they tell one another."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, BrokenBarrierError
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from eyeline.parallel.ranks import Ranks

T = TypeVar("T")


class FakeRanks:
    """As where weights are sharded, rank r alone keeps the summed gradients of every n-th parameter: no rank knows the norm by itself,
    and `gather_weights` comes after the update."""

    def __init__(self, models: Sequence[nn.Module]):
        self.models, self.count = models, len(models)
        self.barrier, self.told = Barrier(self.count, timeout=60), [None] * self.count
        self.owners = {id(p): n % self.count for model in models for n, p in enumerate(model.parameters())}

    def everywhere(self, rank: int, value: Any) -> list[Any]:
        self.told[rank] = value
        self.barrier.wait()
        told = list(self.told)
        self.barrier.wait()
        return told

    def of(self, rank: int) -> Ranks:
        def sum_gradients(parameters: Iterable[Parameter]) -> None:
            parameters = list(parameters)
            told = self.everywhere(rank, [p.grad for p in parameters])
            sums = [torch.stack(gradients).sum(0) for gradients in zip(*told, strict=True)]  # the same have one on every rank
            for p, total in zip(parameters, sums, strict=True):
                p.grad = total if self.owners[id(p)] == rank else None

        def norm(parameters: Sequence[Parameter]) -> Tensor:
            own = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
            return torch.linalg.vector_norm(torch.stack(self.everywhere(rank, own)))

        return Ranks(
            rows=lambda batch: batch,
            sum=lambda x: torch.stack(self.everywhere(rank, x)).sum(0),
            sum_of_pack=lambda x: x,
            sum_gradients=sum_gradients,
            norm=norm,
            clip=torch.nn.utils.clip_grads_with_norm_,
        )

    def run(self, work: Callable[[int, Ranks], T]) -> list[T]:
        """What `work(rank, ranks)` gives on each, at the same time."""

        def guarded(rank: int) -> T:
            try:
                return work(rank, self.of(rank))
            except BaseException:
                self.barrier.abort()
                raise

        with ThreadPoolExecutor(self.count) as pool:
            done = [pool.submit(guarded, rank) for rank in range(self.count)]
        errors = [error for future in done if (error := future.exception()) is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, BrokenBarrierError)):  # it only follows from another
            raise error
        return [future.result() for future in done]

    @torch.no_grad()
    def gather_weights(self) -> None:
        """Give every rank the parameters that another keeps."""
        for of_ranks in zip(*(model.parameters() for model in self.models), strict=True):
            for p in of_ranks:
                p.copy_(of_ranks[self.owners[id(p)]])
