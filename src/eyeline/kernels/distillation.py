"""Cross-entropy, and the divergence from a teacher that gave its likeliest tokens, in chunks: the full logits never exist in training.

A teacher's row is its k likeliest tokens with their log probabilities at temperature 1. Both are compared on these tokens alone: at
temperature T the teacher's p is softmax(logp / T), the student's q the softmax of its k logits / T, and each row adds
kl · T² · Σ p (log p - log q). So a student that is its teacher is left as it is, at every k and T; what it gives other tokens is the
cross-entropy's matter. T² keeps the size of the gradient the same at every temperature (Hinton et al. 2015, section 2.1).

Dims: L labelled rows  D width  V vocabulary  R rows of one chunk  K tokens of the teacher
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from eyeline.core.batch import IGNORE
from eyeline.core.dims import dims
from eyeline.kernels.cross_entropy import LOGITS_PER_CHUNK, gain_of, gradient_like, gradient_product, times_loss
from eyeline.kernels.gpu import on_gpu


class Teacher(NamedTuple):
    """The rows of a teacher. A token that it does not give, in any place, has the log probability -inf; so has all of a row without one."""

    top_LK: Tensor  # int64
    logp_LK: Tensor  # float32
    kl: float  # weight, next to the cross-entropy's 1
    temperature: float


class Losses(NamedTuple):
    """Sums over rows."""

    total: Tensor  # what is trained on
    divergence: Tensor  # of it, what the teacher adds. No gradient


def summed_losses_plain(x_LD: Tensor, weight_VD: Tensor, labels_L: Tensor, teacher: Teacher) -> Losses:
    """The reference: all logits at once."""
    logits_LV = (x_LD @ weight_VD.to(x_LD.dtype).T).float()
    cross_entropy = F.cross_entropy(logits_LV, labels_L, ignore_index=IGNORE, reduction="sum")
    given_LK = teacher.logp_LK > -torch.inf
    p_LK, logp_LK = probabilities(teacher.logp_LK, given_LK, teacher.temperature)
    _, logq_LK = probabilities(logits_LV.gather(1, teacher.top_LK), given_LK, teacher.temperature)
    divergence = teacher.kl * teacher.temperature**2 * (p_LK * (logp_LK - logq_LK)).sum()
    return Losses(cross_entropy + divergence, divergence.detach())


def probabilities(x_LK: Tensor, given_LK: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """The softmax of x / T over the tokens that are given, and its logarithm; 0 and 0 for others."""
    lowest = torch.finfo(x_LK.dtype).min
    log_LK = torch.where(given_LK, x_LK / temperature, lowest).log_softmax(-1)
    return torch.where(given_LK, log_LK.exp(), 0.0), torch.where(given_LK, log_LK, 0.0)


def summed_losses(x_LD: Tensor, weight_VD: Tensor, labels_L: Tensor, teacher: Teacher, chunk: int | None = None) -> Losses:
    """`summed_losses_plain`, `chunk` rows at a time, as `cross_entropy.summed_cross_entropy` is: gradients are made in the forward pass,
    and the weight's is skipped where the weight is frozen."""
    sizes = dims("LD", x_LD, "VD", weight_VD, "L", labels_L, "LK", teacher.top_LK, "LK", teacher.logp_LK)
    chunk = chunk or max(1, LOGITS_PER_CHUNK["cuda" if on_gpu(x_LD) else "cpu"] // sizes["V"])
    return Losses(*_Chunked.apply(x_LD, weight_VD, labels_L, teacher, chunk))


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_LD: Tensor, weight_VD: Tensor, labels_L: Tensor, teacher: Teacher, chunk: int) -> tuple[Tensor, Tensor]:
        (x_needed, weight_needed), gain = ctx.needs_input_grad[:2], gain_of(x_LD.dtype)
        cast_VD = weight_VD.to(x_LD.dtype)
        loss, divergence = (x_LD.new_zeros((), dtype=torch.float32) for _ in range(2))
        dx_LD = gradient_like(x_LD) if x_needed else None
        dweight_VD = torch.zeros_like(weight_VD, dtype=torch.float32) if weight_needed else None
        for start in range(0, len(x_LD), chunk):
            rows = slice(start, start + chunk)
            x_RD = x_LD[rows]
            logits_RV = (x_RD @ cast_VD.T).float()
            of_rows = teacher._replace(top_LK=teacher.top_LK[rows], logp_LK=teacher.logp_LK[rows])
            ours, added, dlogits_RV = _rows_losses(logits_RV, labels_L[rows], of_rows, x_needed or weight_needed)
            loss, divergence = loss + ours + added, divergence + added
            if dlogits_RV is None:
                continue
            dlogits_RV = (dlogits_RV if gain == 1 else dlogits_RV.mul_(gain)).to(x_LD.dtype)
            if dx_LD is not None:
                dx_LD[rows] = gradient_product(dlogits_RV, cast_VD)
            if dweight_VD is not None:
                dweight_VD += gradient_product(dlogits_RV.T, x_RD)
        ctx.gradients = (dx_LD, dweight_VD)
        ctx.dtypes = (x_LD.dtype, weight_VD.dtype)
        ctx.mark_non_differentiable(divergence)
        return loss, divergence

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        # handed over, not saved, as in cross_entropy.py
        made, ctx.gradients = ctx.gradients, None
        dx_LD, dweight_VD = times_loss(made, ctx.dtypes, gradients[0], gain_of(ctx.dtypes[0]))
        return dx_LD, dweight_VD, None, None, None


def _rows_losses(logits_RV: Tensor, labels_R: Tensor, teacher: Teacher, needed: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """The cross-entropy of some rows, the divergence that they add, and the gradient of both."""
    temperature, scale = teacher.temperature, teacher.kl * teacher.temperature**2
    logp_RV = logits_RV.log_softmax(-1)
    cross_entropy = F.nll_loss(logp_RV, labels_R, ignore_index=IGNORE, reduction="sum")
    given_RK = teacher.logp_LK > -torch.inf
    p_RK, logp_RK = probabilities(teacher.logp_LK, given_RK, temperature)
    q_RK, logq_RK = probabilities(logits_RV.gather(1, teacher.top_LK), given_RK, temperature)
    divergence = scale * (p_RK * (logp_RK - logq_RK)).sum()
    if not needed:
        return cross_entropy, divergence, None
    wanted_R1 = (labels_R != IGNORE)[:, None].float()
    gradient_RV = logp_RV.exp_() * wanted_R1  # softmax - one-hot; and scale / T times (q - p)
    gradient_RV.scatter_add_(1, labels_R[:, None] * wanted_R1.long(), -wanted_R1)
    gradient_RV.scatter_add_(1, teacher.top_LK, (q_RK - p_RK) * (scale / temperature))
    return cross_entropy, divergence, gradient_RV
