"""What may not change the answer: packing, padding, sharing a picture, recomputing, asking for logits; and bfloat16's bound."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from eyeline.core.batch import Budget, Document
from eyeline.data.batches import batch_of
from eyeline.models import FAMILIES
from tests.models import twins
from tests.models.twins import CASES, close

MODELS = [(family, case) for family, cases in CASES.items() for case in cases]


@pytest.fixture(params=MODELS, ids=[case for _, case in MODELS])
def made(request):
    """A config and its randomised model."""
    family, case = request.param
    c = CASES[family][case]
    model = FAMILIES[family].build(c, "cpu")
    twins.randomise(model)
    return c, model


def run(model: nn.Module, documents: list[Document], budget: Budget | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of one batch."""
    model.zero_grad()
    loss = model(batch_of(documents, budget))
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def one_by_one(model: nn.Module, documents: list[Document]) -> tuple[Tensor, dict[str, Tensor]]:
    """The same, each document a batch of its own; gradients add up. The text-only ones never run the tower."""
    model.zero_grad()
    losses = [model(batch_of([d], None)) for d in documents]
    torch.stack(losses).sum().backward()
    return torch.stack(losses).sum().detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def same(a: tuple[Tensor, dict[str, Tensor]], b: tuple[Tensor, dict[str, Tensor]]) -> None:
    close(a[0], b[0], "loss")
    twins.all_close(a[1], b[1])


def test_packed_equals_one_by_one(made):
    c, model = made
    same(run(model, twins.documents(c)), one_by_one(model, twins.documents(c)))


def test_padding_changes_nothing(made):
    c, model = made
    documents = twins.documents(c)
    tokens = sum(len(d.tokens_T) for d in documents)
    same(run(model, documents, Budget(tokens + 13, 10_000)), run(model, documents))


def test_order_in_the_pack_changes_nothing(made):
    c, model = made
    same(run(model, twins.documents(c)[::-1]), run(model, twins.documents(c)))


def test_shared_picture_equals_own_copies(made):
    """Three questions on one picture: encoded once, or once each, and they do not see each other's answers."""
    c, model = made
    asking = [twins.document(f"q{i}", [2, "cat", 3 + i], c) for i in range(3)]
    alone = [replace(d, images=tuple(replace(x, key=f"{x.key} {d.id}") for x in d.images)) for d in asking]
    shared, copies = batch_of(asking, None), batch_of(alone, None)
    assert (shared.counts.images, copies.counts.images) == (1, 3)
    same(run(model, asking), run(model, alone))

    other = replace(asking[0], tokens_T=np.where(asking[0].tokens_T < 50, 1, asking[0].tokens_T).astype(np.int32))
    before, after = twins.logits_of(model, shared), twins.logits_of(model, batch_of([other, *asking[1:]], None))
    mine = shared.rows_L < shared.cu_S1[1]
    assert (before[mine] - after[mine]).abs().max() > 0.01
    assert torch.equal(before[~mine], after[~mine]), "one question's text reaches another's answer"


def test_recomputing_changes_nothing(made):
    c, model = made
    kept = run(model, twins.documents(c))
    calls = []
    for part in (model.vision, model.language):
        part.recompute = True
        part.blocks[0].register_forward_pre_hook(lambda *_: calls.append(1))
    recomputed = run(model, twins.documents(c))
    assert len(calls) == 4, "each block runs once more in the backward pass"
    assert torch.equal(kept[0], recomputed[0])
    assert all(torch.equal(kept[1][n], recomputed[1][n]) for n in kept[1])


def test_recomputing_above_a_frozen_input_keeps_gradients(made):
    """Only the adapters-like case: everything frozen but one weight in the middle of a recomputed stack (F5)."""
    c, model = made
    model.requires_grad_(False)
    weight = model.language.blocks[0].attn.v.weight.requires_grad_()
    batch = batch_of(twins.documents(c), None)
    (want,) = torch.autograd.grad(model(batch), weight)
    model.language.recompute = True
    (got,) = torch.autograd.grad(model(batch), weight)
    assert torch.equal(got, want)


def test_logits_give_the_loss(made):
    c, model = made
    batch = batch_of(twins.documents(c), None)
    logits_LV = twins.logits_of(model, batch)
    assert logits_LV.shape == (len(batch.rows_L), c.language.vocabulary)
    close(nn.functional.cross_entropy(logits_LV, batch.labels_L, reduction="sum"), model(batch), "loss")


def test_text_only_batch_does_not_run_the_tower(made):
    c, model = made
    model.vision.register_forward_hook(lambda *_: pytest.fail("the tower ran"))
    _, gradients = run(model, [d for d in twins.documents(c) if not d.images])
    assert {n.split(".")[0] for n in gradients} == {"language"}


def test_unused_modules_are_those_without_a_gradient(made):
    c, model = made
    _, gradients = run(model, twins.documents(c))
    facts = FAMILIES["llava"].facts(c)
    unused = {n for n, _ in model.named_parameters() if any(n.startswith(root + ".") for root in facts.unused)}
    assert unused == {n for n, _ in model.named_parameters()} - gradients.keys()


def test_bfloat16_over_float32_masters_stays_near(made):
    """One rounding has eight bits: a few of them a layer give per cents of the largest logit, not tens of per cents."""
    c, model = made
    batch = batch_of(twins.documents(c), None)
    half = FAMILIES["llava"].build(c, "cpu", compute_dtype=torch.bfloat16)
    half.load_state_dict(model.state_dict())
    stream = []
    for part in (half.vision, half.language):
        for block in part.blocks:
            block.register_forward_hook(lambda *args: stream.append(args[-1].dtype))
    logits_LV = twins.logits_of(half, batch)
    assert logits_LV.dtype == torch.float32
    close(logits_LV, twins.logits_of(model, batch), "logits", tolerance=0.05)
    assert set(stream) == {torch.bfloat16}, "a float32 weight or table has raised the stream's precision"

    half(batch).backward()
    model(batch).backward()
    assert all(p.grad.dtype == torch.float32 for p in half.parameters() if p.grad is not None)
    got, want = (torch.cat([p.grad.flatten() for p in m.parameters() if p.grad is not None]) for m in (half, model))
    assert torch.nn.functional.cosine_similarity(got, want, dim=0) > 0.99


def test_frozen_parts_may_be_bfloat16(made):
    """In a bfloat16 run, a weight kept in bfloat16 gives what the same value kept in float32 gives."""
    c, model = made
    batch = batch_of(twins.documents(c), None)
    outputs = []
    for dtype in (torch.float32, torch.bfloat16):
        half = FAMILIES["llava"].build(c, "cpu", dtype=dtype, compute_dtype=torch.bfloat16)
        half.load_state_dict({n: x.bfloat16() for n, x in model.state_dict().items()})
        outputs.append(twins.logits_of(half, batch).detach())
    assert torch.equal(*outputs)
