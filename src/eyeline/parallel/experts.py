"""Expert parallelism: a rank has some of the experts of a layer, and rows go to the rank that has theirs, and back.

Dims: T tokens  A experts per token  N rows, sorted by expert  E experts  D width
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from eyeline.core.plan import Plan
from eyeline.kernels.moe import by_expert, permute, unpermute
from eyeline.parallel.exchange import exchange_rows, exchanged
from eyeline.parallel.mesh import Mesh
from eyeline.parallel.pieces import along, cut, in_pieces

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class DispatchOverRanks(nn.Module):
    """Every token to its experts, which are on several ranks, and back. The host waits once: for the numbers of rows that are coming."""

    def __init__(self, ranks: "ProcessGroup", count: int):
        super().__init__()
        self.ranks, self.count = ranks, count

    def forward(self, x_TD: Tensor, chosen_TA: Tensor, weight_TA: Tensor, experts: nn.Module) -> Tensor:
        n, here = self.ranks.size(), self.count // self.ranks.size()
        order_N, inverse_N, ends_E = by_expert(chosen_TA, self.count)
        sends_E = torch.diff(ends_E, prepend=ends_E.new_zeros(1)).long()
        receives_E = exchanged(sends_E, [here] * n, [here] * n, self.ranks)  # from each rank: rows of each expert that is here
        sends, receives = torch.stack([sends_E.view(n, here).sum(1), receives_E.view(n, here).sum(1)]).tolist()
        rows_ND = exchange_rows(permute(x_TD, order_N, inverse_N), sends, receives, self.ranks)
        expert_N = torch.arange(here, device=x_TD.device).repeat(n).repeat_interleave(receives_E)
        order, inverse, ends = by_expert(expert_N[:, None], here)
        y_ND = permute(experts(permute(rows_ND, order, inverse), ends), inverse, order)
        return unpermute(exchange_rows(y_ND, receives, sends, self.ranks), weight_TA, order_N, inverse_N)


def spread_experts(plan: Plan[Any], mesh: Mesh) -> None:
    """Give each rank of `ep` its experts of every layer, and let tokens find them."""
    assert mesh.ep is not None
    for name in experts_of(plan):
        experts = plan.model.get_submodule(name)
        count = len(next(experts.parameters()))
        for leaf in experts._parameters:
            cut(experts, leaf, along(0, mesh.ep), mesh.ep)
        in_pieces(experts)
        plan.model.set_submodule(f"{name.rpartition('.')[0]}.dispatch", DispatchOverRanks(mesh.ep.get_group(), count))


def experts_of(plan: Plan[Any]) -> list[str]:
    """The modules that hold the experts of a layer."""
    found = {
        name.rpartition(".")[0]: None for name, entry in plan.table.items() if entry.split is not None and entry.split.unit == "experts"
    }
    return [*found]
