"""Tensor parallelism, with the rows between branches shared out too (sequence parallelism).

A branch (attention, a Gated DeltaNet, a feed-forward layer) gathers the rows of its ranks, computes with its piece of the weights, which is
some heads or hidden units, and sums what the ranks give, of which each keeps its own rows. Everything else computes on a rank's own rows
alone with weights that are whole, as in data parallelism: embedding, norms, router, experts, tower, projector, head and loss need no other
code.
"""

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.distributed.tensor import Replicate

from eyeline.core.plan import INPUTS, Entry, Plan
from eyeline.parallel.exchange import gather_rows, sum_rows, summed
from eyeline.parallel.mesh import Mesh
from eyeline.parallel.pieces import along, around, cut, in_pieces

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class LengthsOverColumns(nn.Module):
    """Norms of rows whose columns are on several ranks (DoRA of a layer whose inputs are cut)."""

    def __init__(self, ranks: "ProcessGroup"):
        super().__init__()
        self.ranks = ranks

    def forward(self, length_O: Tensor) -> Tensor:
        return summed(length_O.square(), self.ranks).sqrt()


def cut_branches(plan: Plan[Any], mesh: Mesh) -> None:
    """Cut the weights of the language model's branches over tp. Their sizes fit (`mesh.model_problems`)."""
    tp = mesh.tp
    assert tp is not None and mesh.axes is not None
    ranks = tp.get_group()
    for name in (name for name in plan.branches if name.startswith("language.")):
        branch = plan.model.get_submodule(name)
        for path, entry in plan.table.items():
            if path.startswith(f"{name}."):
                owner, _, leaf = path.rpartition(".")
                _cut(plan.model.get_submodule(owner), leaf, entry, mesh)
        for path in plan.replaceable.get(("language", "lengths"), ()):
            layer = path.rpartition(".")[0]
            if path.startswith(f"{name}.") and plan.table[f"{layer}.weight"].split == INPUTS:
                plan.model.set_submodule(path, LengthsOverColumns(ranks))
        around(branch, lambda x: gather_rows(x, ranks), lambda x: sum_rows(x, ranks))
    for name in plan.blocks["language"]:  # around the block, so that its graph, where it is compiled, knows nothing of it
        branches = [plan.model.get_submodule(branch) for branch in plan.branches if branch.startswith(f"{name}.")]
        in_pieces(plan.model.get_submodule(name), within=branches)


def _cut(module: nn.Module, leaf: str, entry: Entry, mesh: Mesh) -> None:
    assert mesh.tp is not None and mesh.axes is not None
    if entry.split is not None:
        # what is used in float32 is not sharded further: on all axes at once a checkpoint knows which ranks have the same
        at = mesh.axes if entry.exact else mesh.tp
        cut(module, leaf, along(entry.split.dim, at), at)
        if entry.role == "adapter" and entry.split.unit == "inputs":  # its dropout is addressed by columns of the whole input
            module.first_input = mesh.pack_rank[1] * (entry.shape[1] // mesh.sizes.tp)  # type: ignore[assignment]
    elif entry.partial and not entry.exact:
        cut(module, leaf, [Replicate()], mesh.tp)
