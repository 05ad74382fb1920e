"""Chunked cross-entropy against torch's on all logits at once: the loss, both gradients, and what is kept in memory."""

import pytest
import torch
from torch.nn import functional as F

from eyeline.core.batch import IGNORE
from eyeline.kernels.cross_entropy import summed_cross_entropy, summed_cross_entropy_plain
from eyeline.kernels.distillation import Teacher, summed_losses

L, D, V = 11, 6, 37


def inputs(dtype: torch.dtype = torch.float32):
    rng = torch.Generator().manual_seed(0)
    x_LD = (2 * torch.randn(L, D, generator=rng)).to(dtype).requires_grad_()
    weight_VD = torch.randn(V, D, generator=rng).requires_grad_()
    labels_L = torch.randint(0, V, (L,), generator=rng)
    labels_L[[0, 7]] = IGNORE
    return x_LD, weight_VD, labels_L


@pytest.mark.parametrize("chunk", [1, 4, L, None])
def test_loss_and_gradients(chunk):
    x_LD, weight_VD, labels_L = inputs()
    want = F.cross_entropy(x_LD @ weight_VD.T, labels_L, ignore_index=IGNORE, reduction="sum")
    want_gradients = torch.autograd.grad(want / 3, (x_LD, weight_VD))
    got = summed_cross_entropy(x_LD, weight_VD, labels_L, chunk)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, want)
    for x, y in zip(torch.autograd.grad(got / 3, (x_LD, weight_VD)), want_gradients, strict=True):
        torch.testing.assert_close(x, y, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("chunk", [1, 4, None])
@pytest.mark.parametrize("first", [0, 20, V - 3])
def test_rows_apart_take_the_place_of_the_weights(first, chunk):
    """Loss and gradients are those of one weight; labels that are new tokens, and others, are among them."""
    x_LD, weight_VD, labels_L = inputs()
    labels_L[[1, 2]] = torch.tensor([first, first + 2])
    rows_ND = weight_VD[first : first + 3].detach().clone().mul_(-1.5).requires_grad_()
    one_VD = torch.cat([weight_VD[:first], rows_ND, weight_VD[first + 3 :]])
    want = F.cross_entropy(x_LD @ one_VD.T, labels_L, ignore_index=IGNORE, reduction="sum")
    wants = torch.autograd.grad(want / 3, (x_LD, rows_ND))
    got = summed_cross_entropy(x_LD, weight_VD.detach(), labels_L, chunk, rows_ND, first)
    torch.testing.assert_close(got, want)
    for x, y in zip(torch.autograd.grad(got / 3, (x_LD, rows_ND)), wants, strict=True):
        torch.testing.assert_close(x, y, atol=2e-6, rtol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(summed_cross_entropy(x_LD, weight_VD.detach(), labels_L, chunk, rows_ND, first), want)


def test_by_hand():
    """Two rows of logits (0, 0) and (log 3, 0), labels 0 and 1: log 2 + log 4."""
    x_LD = torch.tensor([[1.0, 1.0], [3.0, 1.0]]).log()
    got = summed_cross_entropy(x_LD, torch.eye(2), torch.tensor([0, 1]), chunk=1)
    assert got.item() == pytest.approx(0.6931472 + 1.3862944, rel=1e-6)


def test_nothing_labelled_is_zero_with_zero_gradients():
    x_LD, weight_VD, _ = inputs()
    for rows in (x_LD[:0], x_LD):
        labels_L = torch.full((len(rows),), IGNORE)
        loss = summed_cross_entropy(rows, weight_VD, labels_L, 4)
        assert loss.item() == 0
        gradients = torch.autograd.grad(loss, (x_LD, weight_VD))
        assert all(torch.equal(g, torch.zeros_like(g)) for g in gradients)


@pytest.mark.parametrize("needs", ["x", "weight"])
def test_frozen_side_gets_none(needs):
    x_LD, weight_VD, labels_L = inputs()
    frozen = weight_VD if needs == "x" else x_LD
    frozen.requires_grad_(False)
    learning = x_LD if needs == "x" else weight_VD
    summed_cross_entropy(x_LD, weight_VD, labels_L, 4).backward()
    assert frozen.grad is None
    (want,) = torch.autograd.grad(summed_cross_entropy_plain(x_LD, weight_VD, labels_L), learning)
    torch.testing.assert_close(learning.grad, want, atol=2e-6, rtol=1e-5)


def test_without_autograd_only_the_loss_is_made():
    x_LD, weight_VD, labels_L = inputs()
    with torch.no_grad():
        got = summed_cross_entropy(x_LD, weight_VD, labels_L, 4)
    assert not got.requires_grad
    torch.testing.assert_close(got, summed_cross_entropy_plain(x_LD, weight_VD, labels_L).detach())


def test_bfloat16_rows_over_a_float32_weight():
    """Gradients come in each tensor's own dtype; the weight's is summed in float32: 2000 equal small rows do not stall."""
    x_LD, weight_VD, labels_L = inputs(torch.bfloat16)
    x_LD, labels_L = x_LD.detach().repeat(200, 1).requires_grad_(), labels_L.repeat(200)
    loss = summed_cross_entropy(x_LD, weight_VD, labels_L, 4)
    loss.backward()
    assert loss.dtype == torch.float32
    assert (x_LD.grad.dtype, weight_VD.grad.dtype) == (torch.bfloat16, torch.float32)
    want = summed_cross_entropy_plain(x_LD.detach().float(), weight_VD.detach().bfloat16().float().requires_grad_(), labels_L)
    assert loss.item() == pytest.approx(want.item(), rel=0.01)
    once = torch.autograd.grad(summed_cross_entropy_plain(x_LD.detach()[:L].float(), weight_VD, labels_L[:L]), weight_VD)[0]
    torch.testing.assert_close(weight_VD.grad, 200 * once, atol=200 * 0.05, rtol=0.02)


@pytest.mark.parametrize("teacher", [False, True])
def test_small_gradients_survive_float16(teacher: bool) -> None:
    """Rows that are all but learned: 1 - p is below what float16 can hold, and the loss scale comes only in the backward pass."""
    x_LD = torch.eye(8)[:5] * 17
    weight_VD, labels_L = torch.eye(8), torch.arange(5)
    found = []
    for dtype, scale in ((torch.float32, 1.0), (torch.float16, 65536.0)):
        x, weight = x_LD.clone().to(dtype).requires_grad_(), weight_VD.clone().requires_grad_()
        if teacher:
            of_rows = Teacher(labels_L[:, None], torch.zeros(5, 1), kl=1.0, temperature=1.0)
            loss = summed_losses(x, weight, labels_L, of_rows).total
        else:
            loss = summed_cross_entropy(x, weight, labels_L, 4)
        (loss * scale).backward()
        assert (x.grad.dtype, weight.grad.dtype) == (dtype, torch.float32)
        found.append((x.grad.float() / scale, weight.grad / scale))
    assert 0 < float(found[0][0].abs().max()) < 1e-6
    for got, want in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(got, want, rtol=0.02, atol=1e-12)


def test_no_tensor_as_large_as_all_logits():
    """The largest tensor of forward and backward has the weight's size or a chunk's logits', never rows × vocabulary."""
    sizes = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            sizes.extend(x.numel() for x in (out if isinstance(out, tuple | list) else [out]) if isinstance(x, torch.Tensor))
            return out

    x_LD = torch.randn(400, D, requires_grad=True)
    weight_VD = torch.randn(V, D, requires_grad=True)
    with Watch():
        summed_cross_entropy(x_LD, weight_VD, torch.zeros(400, dtype=torch.int64), chunk=8).backward()
    assert max(sizes) == max(400 * D, V * D, 8 * V)


def test_second_backward_fails_instead_of_scaling_twice():
    x_LD, weight_VD, labels_L = inputs()
    loss = summed_cross_entropy(x_LD, weight_VD, labels_L, 4)
    loss.backward(retain_graph=True)
    with pytest.raises(TypeError):
        loss.backward()
