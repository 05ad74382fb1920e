"""Muon over matrices that ranks share out: the step that one device takes.

The momentum is element by element, so each rank keeps its part of it. What is orthogonalised is a whole matrix: the ranks take turns, each
gathers every n-th matrix, does what torch's Muon does with it, and sends the parts of the result back. A rank's part may be some of the
rows, of the columns, or of both (FSDP and tensor parallelism).
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from eyeline.core.shards import Box, held
from eyeline.parallel.exchange import exchanged, gathered
from eyeline.parallel.mesh import Mesh


class ShardedMuon(torch.optim.Muon):
    """`torch.optim.Muon` of DTensors of the ranks of a mesh; with Nesterov momentum, as there."""

    def __init__(self, params: Any, mesh: Mesh, **how: Any):
        super().__init__(params, **how)
        self.ranks = mesh.shard.get_group(mesh.shard.ndim - 1)  # that together have each matrix once
        self.boxes: dict[nn.Parameter, list[Box]] = {}  # of each rank, once they have told one another

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of all matrices that have a gradient: the same on every rank."""
        assert closure is None, "the gradients are there already"
        if not self.boxes:
            self.boxes = _boxes([p for group in self.param_groups for p in group["params"]], self.ranks)
        for group in self.param_groups:
            matrices = [p for p in cast(list[nn.Parameter], group["params"]) if p.grad is not None]
            for some in (matrices[n : n + self.ranks.size()] for n in range(0, len(matrices), self.ranks.size())):
                updates = [self._momentum(p, group) for p in some]
                deltas = _by_owners(updates, [(p.shape, self.boxes[p]) for p in some], group, self.ranks)
                for p, delta in zip(some, deltas, strict=True):
                    part = held(p).local
                    part.mul_(1 - group["lr"] * group["weight_decay"])
                    part.add_(delta)
        return None

    def _momentum(self, p: nn.Parameter, group: dict[str, Any]) -> Tensor:
        """This rank's part of what is orthogonalised; its part of the momentum moves."""
        state = self.state[p]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p, requires_grad=False)
        assert p.grad is not None and group["nesterov"]
        gradient, momentum = held(p.grad).local, held(state["momentum_buffer"]).local
        momentum.lerp_(gradient, 1 - group["momentum"])
        return gradient.lerp(momentum, group["momentum"])


def _boxes(matrices: Sequence[nn.Parameter], ranks: ProcessGroup) -> dict[nn.Parameter, list[Box]]:
    """The part of each matrix that each rank has."""
    own = [held(p).box for p in matrices]
    numbers = torch.tensor([[*box.offset, *box.lengths] for box in own], device=held(matrices[0]).local.device)
    there = gathered(numbers, ranks).view(ranks.size(), len(own), 4).tolist()
    found = {p: [Box((at[0], at[1]), (at[2], at[3])) for at in of] for p, of in zip(matrices, zip(*there, strict=True), strict=True)}
    assert all(sum(box.size for box in of) == p.numel() for p, of in found.items()), "some of a matrix is on no rank, or on two"
    return found


def _by_owners(
    parts: Sequence[Tensor], wholes: Sequence[tuple[torch.Size, Sequence[Box]]], group: dict[str, Any], ranks: ProcessGroup
) -> list[Tensor]:
    """The parts of the changes of as many matrices as there are ranks, or fewer: rank k has the k-th."""
    own, idle = ranks.rank(), ranks.size() - len(wholes)
    sent = [boxes[own].size for _, boxes in wholes] + [0] * idle
    received = [box.size for box in wholes[own][1]] if own < len(wholes) else [0] * ranks.size()
    flat = exchanged(torch.cat([part.flatten() for part in parts]), sent, received, ranks)
    if own < len(wholes):
        shape, boxes = wholes[own]
        places = [box.within(Box((0, 0), (shape[0], shape[1]))) for box in boxes]
        update = flat.new_empty(shape)
        for place, box, part in zip(places, boxes, flat.split(received), strict=True):
            update[place] = part.view(box.lengths)
        change = _change(update, group)
        flat = torch.cat([change[place].flatten() for place in places])
    home = exchanged(flat, received, sent, ranks)
    return [x.view(part.shape) for x, part in zip(home.split(sent), parts, strict=False)]


def _change(update: Tensor, group: dict[str, Any]) -> Tensor:
    """What Muon adds to a whole matrix: it is given a matrix of zeros, and an update without momentum."""
    zeros = nn.Parameter(torch.zeros_like(update))
    zeros.grad = update
    kept = {key: group[key] for key in ("lr", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")}
    torch.optim.Muon([zeros], momentum=0.0, weight_decay=0.0, **kept).step()
    return zeros.detach()
