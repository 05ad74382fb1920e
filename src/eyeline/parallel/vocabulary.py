"""The vocabulary shared out over tp (`mesh.vocab_parallel`): a rank has some rows of embedding and head, and some of the logits.

Dims: T rows of this rank  L its labelled rows  A labelled rows of all ranks that share the vocabulary  R of one chunk  D width
      v rows of the vocabulary that are here
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from eyeline.core.batch import IGNORE
from eyeline.core.plan import Plan
from eyeline.kernels.cross_entropy import LOGITS_PER_CHUNK, gain_of, gradient_like, gradient_product, logits_of, times_loss
from eyeline.kernels.gpu import on_gpu
from eyeline.parallel.exchange import exchanged, gather_some, gathered, sum_rows
from eyeline.parallel.mesh import Mesh
from eyeline.parallel.pieces import along, cut, in_pieces

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

EMBED, HEAD = "language.embed", "language.head"


def share_vocabulary(plan: Plan[Any], mesh: Mesh) -> None:
    """Cut the rows of embedding and head over tp, which divides them (`mesh.model_problems`)."""
    tp = mesh.tp
    assert tp is not None
    ranks = tp.get_group()
    embed, head = plan.model.get_submodule(EMBED), plan.model.get_submodule(HEAD)
    rows = plan.table[f"{EMBED}.weight"].shape[0] // tp.size()
    cut(embed, "weight", along(0, tp), tp)
    if plan.table[f"{HEAD}.weight"].tied_to is None:
        cut(head, "weight", along(0, tp), tp)
    else:
        head._parameters["weight"] = embed._parameters["weight"]
    own = Own(ranks, rows)
    in_pieces(embed, own.ids, own.rows)
    in_pieces(head)
    head.loss = LossOverVocabulary(ranks, rows)


class Own:
    """Around an embedding of some rows of the vocabulary: tokens of all ranks come in, and what each is embedded as goes to its rank."""

    def __init__(self, ranks: "ProcessGroup", count: int):
        self.ranks, self.count = ranks, count
        self.here_T: Tensor | None = None  # tokens, of all ranks, whose rows are here; while the embedding runs

    def ids(self, tokens_T: Tensor) -> Tensor:
        ids_T = gathered(tokens_T, self.ranks) - self.ranks.rank() * self.count
        self.here_T = (ids_T >= 0) & (ids_T < self.count)
        return ids_T * self.here_T

    def rows(self, x_TD: Tensor) -> Tensor:
        here_T, self.here_T = self.here_T, None
        assert here_T is not None
        return sum_rows(x_TD * here_T[:, None], self.ranks)


class LossOverVocabulary(nn.Module):
    """The summed cross-entropy of this rank's labelled rows; every rank computes its logits of all of them."""

    def __init__(self, ranks: "ProcessGroup", count: int):
        super().__init__()
        self.ranks, self.count = ranks, count

    def forward(
        self,
        x_LD: Tensor,
        weight_vD: Tensor,
        labels_L: Tensor,
        rows_ND: Tensor | None = None,
        first: int = 0,  # noqa: ARG002 (as in HeadLoss)
        counts: tuple[int, ...] | None = None,
    ) -> Tensor:
        assert rows_ND is None, "rows of new tokens are of the whole vocabulary"
        assert counts is not None, "the host knows the labelled rows of each rank"
        n, own = self.ranks.size(), self.ranks.rank()
        x_AD = gather_some(x_LD, counts, self.ranks)
        labels_A = exchanged(labels_L.repeat(n), [len(labels_L)] * n, counts, self.ranks)
        chunk = max(1, LOGITS_PER_CHUNK["cuda" if on_gpu(x_LD) else "cpu"] // len(weight_vD))
        return loss_over_vocabulary(x_AD, weight_vD, labels_A, (sum(counts[:own]), counts[own]), own * self.count, chunk, self.ranks)


def loss_over_vocabulary(
    x_AD: Tensor, weight_vD: Tensor, labels_A: Tensor, own: tuple[int, int], first: int, chunk: int, ranks: "ProcessGroup"
) -> Tensor:
    """The loss of rows `own` (their first, and their number), `chunk` rows at a time; gradients of all rows by the logits that are here.
    `first`: of the vocabulary's rows that are here."""
    return _Loss.apply(x_AD, weight_vD, labels_A, own, first, chunk, ranks)  # type: ignore[return-value]


class _Loss(torch.autograd.Function):
    """As `kernels/cross_entropy.py`: gradients are made in the forward pass, while the logits of a chunk are there."""

    @staticmethod
    def forward(
        ctx: Any, x_AD: Tensor, weight_vD: Tensor, labels_A: Tensor, own: tuple[int, int], first: int, chunk: int, ranks: Any
    ) -> Tensor:
        (x_needed, weight_needed), gain = ctx.needs_input_grad[:2], gain_of(x_AD.dtype)
        cast_vD = weight_vD.to(x_AD.dtype)
        dx_AD = gradient_like(x_AD) if x_needed else None
        dweight_vD = torch.zeros_like(weight_vD, dtype=torch.float32) if weight_needed else None
        losses_A = x_AD.new_zeros(len(x_AD), dtype=torch.float32)
        for start in range(0, len(x_AD), chunk):
            rows = slice(start, start + chunk)
            wanted_R = labels_A[rows] != IGNORE
            at_R = labels_A[rows] - first
            here_R = wanted_R & (at_R >= 0) & (at_R < len(weight_vD))
            at_R1 = (at_R * here_R)[:, None]
            logits_Rv = logits_of(x_AD[rows], cast_vD)
            most_R = logits_Rv.amax(1)
            picked_R = torch.where(here_R, logits_Rv.gather(1, at_R1)[:, 0], -torch.inf)
            p_Rv = logits_Rv.sub_(most_R[:, None]).exp_()
            of_ranks = gathered(torch.stack([most_R, p_Rv.sum(1), picked_R])[None], ranks)  # [ranks, 3, R]
            top_R = of_ranks[:, 0].amax(0)
            sum_R = (of_ranks[:, 1] * (of_ranks[:, 0] - top_R).exp()).sum(0)
            losses_A[rows] = torch.where(wanted_R, sum_R.log() + top_R - of_ranks[:, 2].amax(0), 0)
            if not x_needed and not weight_needed:
                continue
            p_Rv.mul_(((most_R - top_R).exp() / sum_R * wanted_R)[:, None])
            p_Rv.scatter_add_(1, at_R1, -here_R[:, None].to(p_Rv.dtype))
            dlogits_Rv = (p_Rv if gain == 1 else p_Rv.mul_(gain)).to(x_AD.dtype)
            if dx_AD is not None:
                dx_AD[rows] = gradient_product(dlogits_Rv, cast_vD)
            if dweight_vD is not None:
                dweight_vD += gradient_product(dlogits_Rv.T, x_AD[rows])
        ctx.gradients = (dx_AD, dweight_vD)
        ctx.dtypes = (x_AD.dtype, weight_vD.dtype)
        return losses_A[own[0] : own[0] + own[1]].sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        made, ctx.gradients = ctx.gradients, None
        dx_AD, dweight_vD = times_loss(made, ctx.dtypes, gradients[0], gain_of(ctx.dtypes[0]))
        return dx_AD, dweight_vD, None, None, None, None, None
