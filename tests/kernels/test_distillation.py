"""The chunked loss with a teacher against autograd on all logits at once: values, both gradients, and cases by hand."""

import math

import pytest
import torch

from eyeline.core.batch import IGNORE
from eyeline.kernels.cross_entropy import summed_cross_entropy
from eyeline.kernels.distillation import Teacher, summed_losses, summed_losses_plain

L, D, V, K = 11, 6, 37, 5


def inputs(kl: float = 0.7, temperature: float = 1.0):
    rng = torch.Generator().manual_seed(0)
    x_LD = (2 * torch.randn(L, D, generator=rng)).requires_grad_()
    weight_VD = torch.randn(V, D, generator=rng).requires_grad_()
    labels_L = torch.randint(0, V, (L,), generator=rng)
    labels_L[[0, 7]] = IGNORE
    logp_LK, top_LK = torch.randn(L, V, generator=rng).log_softmax(-1).topk(K)
    logp_LK[3] = -torch.inf  # a row without a teacher
    logp_LK[5, 3:] = -torch.inf  # one of a teacher with fewer tokens
    return x_LD, weight_VD, labels_L, Teacher(top_LK, logp_LK, kl, temperature)


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("chunk", [1, 4, L, None])
def test_losses_and_gradients(chunk: int | None, temperature: float) -> None:
    x_LD, weight_VD, labels_L, teacher = inputs(temperature=temperature)
    want = summed_losses_plain(x_LD, weight_VD, labels_L, teacher)
    got = summed_losses(x_LD, weight_VD, labels_L, teacher, chunk)
    torch.testing.assert_close(got.total, want.total)
    torch.testing.assert_close(got.divergence, want.divergence)
    assert not got.divergence.requires_grad
    wanted = torch.autograd.grad(want.total / 3, (x_LD, weight_VD))
    for x, y in zip(torch.autograd.grad(got.total / 3, (x_LD, weight_VD)), wanted, strict=True):
        torch.testing.assert_close(x, y, atol=3e-6, rtol=1e-5)


def test_by_hand() -> None:
    """Logits (0, 0), label 0, a teacher that gives token 1 three quarters and token 0 a quarter: log 2 + 2 (¾ log 1.5 + ¼ log 0.5)."""
    teacher = Teacher(torch.tensor([[1, 0]]), torch.tensor([[0.75, 0.25]]).log(), 2.0, 1.0)
    got = summed_losses(torch.zeros(1, 2), torch.eye(2), torch.tensor([0]), teacher)
    divergence = 2 * (0.75 * math.log(1.5) + 0.25 * math.log(0.5))
    assert got.divergence.item() == pytest.approx(divergence, rel=1e-6)
    assert got.total.item() == pytest.approx(math.log(2) + divergence, rel=1e-6)


def test_without_rows_of_a_teacher_it_is_the_cross_entropy() -> None:
    x_LD, weight_VD, labels_L, teacher = inputs()
    none = teacher._replace(logp_LK=torch.full_like(teacher.logp_LK, -torch.inf))
    got = summed_losses(x_LD, weight_VD, labels_L, none, 4)
    want = summed_cross_entropy(x_LD, weight_VD, labels_L, 4)
    torch.testing.assert_close(got.total, want)
    assert got.divergence.item() == 0
    gradients = [torch.autograd.grad(loss, (x_LD, weight_VD)) for loss in (got.total, want)]
    for x, y in zip(*gradients, strict=True):
        torch.testing.assert_close(x, y, atol=2e-6, rtol=1e-5)


def test_a_frozen_side_gets_no_gradient() -> None:
    x_LD, weight_VD, labels_L, teacher = inputs()
    weight_VD.requires_grad_(False)
    summed_losses(x_LD, weight_VD, labels_L, teacher, 4).total.backward()
    assert weight_VD.grad is None and x_LD.grad is not None


def test_a_student_that_is_the_teacher_has_no_divergence() -> None:
    x_LD, weight_VD, labels_L, _ = inputs()
    for temperature in (1.0, 3.0):
        for k in (1, K, V):
            logp_LK, top_LK = (x_LD @ weight_VD.T).detach().log_softmax(-1).topk(k)
            got = summed_losses(x_LD, weight_VD, labels_L, Teacher(top_LK, logp_LK, 1.0, temperature))
            assert got.divergence.item() == pytest.approx(0, abs=1e-4)
