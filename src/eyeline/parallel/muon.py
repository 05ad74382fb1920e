"""Muon over sharded matrices: the step that one device takes.

The momentum is element by element, so each rank keeps its part of it. What is orthogonalised is a whole matrix: the ranks take turns, each
gathers every n-th matrix, does what torch's Muon does with it, and sends the parts of the result back.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from eyeline.core.shards import held


class ShardedMuon(torch.optim.Muon):
    """`torch.optim.Muon` of DTensors that are cut along their first dim; with Nesterov momentum, as there."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of all matrices that have a gradient: the same on every rank."""
        assert closure is None, "the gradients are there already"
        for group in self.param_groups:
            matrices = [p for p in cast(list[nn.Parameter], group["params"]) if p.grad is not None]
            if not matrices:
                continue
            mesh = cast(DTensor, matrices[0]).device_mesh
            shards = mesh if mesh.ndim == 1 else mesh["dp_shard"]
            for some in (matrices[n : n + shards.size()] for n in range(0, len(matrices), shards.size())):
                updates = [self._momentum(p, group) for p in some]
                deltas = _by_owners(updates, [p.shape for p in some], group, shards.get_group())
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


def _by_owners(parts: Sequence[Tensor], shapes: Sequence[torch.Size], group: dict[str, Any], ranks: ProcessGroup) -> list[Tensor]:
    """The parts of the changes of as many matrices as there are ranks, or fewer: rank k has the k-th."""
    own = ranks.rank()
    rows = [_rows(shape[0], ranks.size()) for shape in shapes] + [[0] * ranks.size()] * (ranks.size() - len(shapes))
    columns = [shape[1] for shape in shapes] + [0] * (ranks.size() - len(shapes))
    sent = [rows[k][own] * columns[k] for k in range(ranks.size())]
    received = [rows[own][r] * columns[own] for r in range(ranks.size())]
    flat = _exchanged(torch.cat([part.flatten() for part in parts]), sent, received, ranks)
    if own < len(shapes):
        flat = _change(flat.view(shapes[own]), group).flatten()
    home = _exchanged(flat, received, sent, ranks)
    return [x.view(part.shape) for x, part in zip(home.split(sent), parts, strict=False)]


def _change(update: Tensor, group: dict[str, Any]) -> Tensor:
    """What Muon adds to a whole matrix: it is given a matrix of zeros, and an update without momentum."""
    zeros = nn.Parameter(torch.zeros_like(update))
    zeros.grad = update
    kept = {key: group[key] for key in ("lr", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")}
    torch.optim.Muon([zeros], momentum=0.0, weight_decay=0.0, **kept).step()
    return zeros.detach()


def _rows(rows: int, ranks: int) -> list[int]:
    """The number of rows of each rank (`torch.chunk`)."""
    most = -(-rows // ranks)
    return [max(0, min(most, rows - rank * most)) for rank in range(ranks)]


def _exchanged(x: Tensor, sent: Sequence[int], received: Sequence[int], ranks: ProcessGroup) -> Tensor:
    import torch.distributed as dist

    out = x.new_empty(sum(received))
    dist.all_to_all_single(out, x.contiguous(), list(received), list(sent), group=ranks)
    return out
