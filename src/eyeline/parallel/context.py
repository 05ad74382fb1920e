"""Context parallelism: ranks share out the rows of a pack. What looks along a document, attention and a recurrent state, is computed by
each rank for all rows and some of the heads; everything else sees a rank's own rows.

Dims: T rows  H query or value heads  G key heads  K, J head dims
"""

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from eyeline.core.plan import Plan
from eyeline.parallel.exchange import heads_to_rows, rows_to_heads
from eyeline.parallel.mesh import Mesh

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class AttendOverHeads(nn.Module):
    """Attention of all rows for some of the heads. Of fewer key heads than ranks, each is computed with on several."""

    def __init__(self, inner: nn.Module, ranks: "ProcessGroup"):
        super().__init__()
        self.inner, self.ranks = inner, ranks

    def forward(self, q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, cu_S1: Tensor, longest: int, cache: Any = None) -> Tensor:
        assert cache is None, "answers are generated without context parallelism"
        n, heads = self.ranks.size(), k_TGK.shape[1]
        if heads % n:
            k_TGK, v_TGK = (x.repeat_interleave(n // heads, 1) for x in (k_TGK, v_TGK))
        q_THK, k_TGK, v_TGK = (rows_to_heads(x, self.ranks) for x in (q_THK, k_TGK, v_TGK))
        return heads_to_rows(self.inner(q_THK, k_TGK, v_TGK, cu_S1, longest), self.ranks)


class ScanOverHeads(nn.Module):
    """Convolutions and recurrent states of all rows for some of the heads."""

    def __init__(self, inner: Any, ranks: "ProcessGroup"):
        super().__init__()
        self.inner, self.ranks = inner, ranks

    def forward(
        self,
        mixed: tuple[Tensor, Tensor, Tensor],
        kernels: tuple[Tensor, Tensor, Tensor],
        decay_TH: Tensor,
        beta_TH: Tensor,
        cu_S1: Tensor,
        cache: Any = None,
    ) -> Tensor:
        assert cache is None, "answers are generated without context parallelism"
        n, rank = self.ranks.size(), self.ranks.rank()
        dims = (self.inner.K, self.inner.K, self.inner.J)
        keys = mixed[0].shape[1] // self.inner.K
        if keys % n:  # a key head serves the value heads of several ranks
            often = n // keys
            q, k = (x.unflatten(1, (keys, self.inner.K)).repeat_interleave(often, 1).flatten(1) for x in mixed[:2])
            of_q, of_k = (w.unflatten(0, (keys, self.inner.K)).repeat_interleave(often, 0).flatten(0, 1) for w in kernels[:2])
            mixed, kernels = (q, k, mixed[2]), (of_q, of_k, kernels[2])
        heads = [rows_to_heads(x.unflatten(1, (-1, dim)), self.ranks).flatten(1) for x, dim in zip(mixed, dims, strict=True)]
        own = [kernel.chunk(n)[rank] for kernel in kernels]
        decay, beta = (rows_to_heads(x, self.ranks) for x in (decay_TH, beta_TH))
        return heads_to_rows(self.inner((heads[0], heads[1], heads[2]), (own[0], own[1], own[2]), decay, beta, cu_S1), self.ranks)


def share_heads(plan: Plan[Any], mesh: Mesh) -> None:
    """Let the language model's attention and recurrent states exchange rows for heads over cp."""
    assert mesh.axes is not None
    ranks = mesh.axes["cp"].get_group()
    for name in plan.replaceable.get(("language", "attend"), ()):
        plan.model.set_submodule(name, AttendOverHeads(plan.model.get_submodule(name), ranks))
    for name in plan.replaceable.get(("language", "scan"), ()):
        plan.model.set_submodule(name, ScanOverHeads(plan.model.get_submodule(name), ranks))
