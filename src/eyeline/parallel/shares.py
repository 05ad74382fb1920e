"""What a rank holds of each parameter, counted from a plan before anything is placed: the rules of `shard.py`, in numbers."""

import math
from dataclasses import dataclass
from typing import Any

from eyeline.core.plan import Entry, Plan
from eyeline.parallel.mesh import MeshSizes


@dataclass(frozen=True)
class Shares:
    """How so many ranks share out the parameters of a model. Their mesh fits them."""

    sizes: MeshSizes
    world: int

    @property
    def ranks(self) -> int:
        """Ranks that share out a parameter which no other axis cuts."""
        return self.sizes.sharded_over(self.world)

    def whole_gradients(self, packs_per_step: int) -> bool:
        """Return whether a rank keeps its gradients unsharded until the last micro-batch of a step."""
        several = packs_per_step > self.world // self.sizes.same_packs
        return self.ranks > 1 and not self.sizes.sync_each_batch and several

    def of(self, plan: Plan[Any], name: str, entry: Entry) -> tuple[float, float]:
        """The share of a tensor that the rank with most of it holds, and the share of its gradient before ranks have shared that out."""
        piece, over = self._piece(plan, name, entry)
        numbers = math.prod(entry.shape)
        if not numbers:
            return 1.0, 1.0
        first, *rest = piece or [1]
        most = math.prod(piece) // over if self._each_cut(plan, name, entry, first, over) else -(-first // over) * math.prod(rest)
        return most / numbers, math.prod(piece) / numbers

    def _piece(self, plan: Plan[Any], name: str, entry: Entry) -> tuple[list[int], int]:
        """The shape of what tp or ep leaves of a tensor on a rank, and the ranks that share it out."""
        shape, unit, tp = list(entry.shape), None if entry.split is None else entry.split.unit, self.sizes.tp
        if unit == "experts":
            shape[0] //= self.sizes.ep
            return shape, self.ranks // self.sizes.ep
        in_branch = any(name.startswith(f"{branch}.") for branch in plan.branches if branch.startswith("language."))
        if not in_branch and not (unit == "vocabulary" and self.sizes.vocab_parallel):
            return shape, 1 if entry.exact else self.ranks
        if entry.split is not None:
            shape[entry.split.dim] //= tp
        return shape, 1 if entry.exact else self.ranks // tp

    def _each_cut(self, plan: Plan[Any], name: str, entry: Entry, here: int, over: int) -> bool:
        """Return whether each expert is cut along its second dim: where there are fewer of them here than ranks to share them out."""
        if not self.sizes.experts_apart or entry.split is None or entry.split.unit != "experts" or here >= over:
            return False
        owner = name.rpartition(".")[0]
        shapes = [other.shape for path, other in plan.table.items() if path.rpartition(".")[0] == owner]
        return len(shapes[0]) > 2 and not any(shape[1] % over for shape in shapes)


WHOLE = Shares(MeshSizes(), 1)  # a single process
