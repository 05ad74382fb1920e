"""What may not change the answer: packing, padding, shared images, images elsewhere, recomputing; and bfloat16's bound."""

from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from eyeline.core.batch import Budget
from eyeline.data.fetch.batches import batch_of
from eyeline.kernels.kept import KEPT, on_host
from eyeline.models.layers import EVERY_BLOCK, NEVER, Recompute
from eyeline.models.moe import routers
from eyeline.models.shape import build
from tests.models import parity
from tests.models.cases import each_case, each_case_with_images, each_typical_case
from tests.models.parity import Case, close, run, same


@each_case
def test_packed_equals_one_by_one(case: Case):
    model = parity.randomised(case)
    same(run(model, case.documents), parity.one_by_one(model, case.documents))


@each_case
def test_padding_changes_nothing(case: Case):
    model = parity.randomised(case)
    tokens = sum(len(d.tokens_T) for d in case.documents)
    same(run(model, case.documents, Budget(tokens + 13, 10_000)), run(model, case.documents))


@each_case
def test_order_in_the_pack_changes_nothing(case: Case):
    model = parity.randomised(case)
    same(run(model, case.documents[::-1]), run(model, case.documents))


@each_case
def test_documents_do_not_see_one_another(case: Case):
    """Other text in the first document of a pack changes its own logits and not one bit of another's, either way round."""
    model = parity.randomised(case)
    for first, *rest in (case.documents, case.documents[::-1]):
        other = replace(first, tokens_T=np.where(first.tokens_T < parity.IMAGE_TOKEN, 1, first.tokens_T).astype(np.int32))
        for place in (0, len(rest)):
            packs = [[*rest[:place], x, *rest[place:]] for x in (first, other)]
            batch = batch_of(packs[0], None)
            before, after = parity.logits_of(model, batch), parity.logits_of(model, batch_of(packs[1], None))
            mine = (batch.rows_L >= batch.cu_S1[place]) & (batch.rows_L < batch.cu_S1[place + 1])
            assert (before[mine] - after[mine]).abs().max() > 0.01
            close(after[~mine], before[~mine], "logits of the others", tolerance=1e-6)


@each_case_with_images
def test_shared_image_equals_own_copies(case: Case):
    """Three questions on one image: encoded once, or once each, and they do not see each other's answers."""
    model, first = parity.randomised(case), case.with_images[0]
    rng = np.random.default_rng(0)
    text = np.setdiff1d(np.arange(len(first.tokens_T)), first.visual_M)

    def asked(name: str) -> np.ndarray:
        tokens_T = first.tokens_T.copy()
        tokens_T[text] = rng.integers(0, parity.IMAGE_TOKEN, len(text))
        return tokens_T

    asking = [replace(first, id=f"q{i}", tokens_T=asked(f"q{i}")) for i in range(3)]
    alone = [replace(d, images=tuple(replace(x, key=f"{x.key} {d.id}") for x in d.images)) for d in asking]
    shared, copies = batch_of(asking, None), batch_of(alone, None)
    assert copies.counts.images == 3 * shared.counts.images
    same(run(model, asking), run(model, alone))


@each_case_with_images
def test_text_only_equals_a_pass_of_the_tower_over_nothing(case: Case):
    """What a rank without images does where another has some, in a pack with labels or without."""
    model = parity.randomised(case)
    batch = batch_of(case.texts, None)
    want, gradients = parity.run_batch(model, batch)
    assert {n.split(".")[0] for n in gradients} == {"language"}
    got, others = parity.run_batch(model, replace(batch, has_images=True, image_gradients=True))
    close(got, want, "loss")
    reached = parity.run_batch(model, batch_of(case.with_images, None))[1].keys()
    assert others.keys() == reached, "through all that images go through, DeepStack included"
    parity.all_close({n: x for n, x in others.items() if n.startswith("language.")}, gradients)
    assert not any(x.any() for n, x in others.items() if not n.startswith("language."))
    got, others = parity.run_batch(model, replace(batch, has_images=True, image_gradients=False))
    close(got, want, "loss")
    assert others.keys() == gradients.keys(), "zeros are not none"
    parity.all_close(others, gradients)


@each_case_with_images
def test_text_only_batch_does_not_run_the_tower(case: Case):
    model = parity.randomised(case)
    model.vision.register_forward_hook(lambda *_: pytest.fail("the tower ran"))
    run(model, case.texts)


@each_case_with_images
def test_images_and_their_order_matter(case: Case):
    model = parity.randomised(case)
    d = next(d for d in case.documents if len({i.grid for i in d.images}) < len(d.images))
    places = [k for k, i in enumerate(d.images) if [j.grid for j in d.images].count(i.grid) > 1][:2]
    images = list(d.images)
    images[places[0]], images[places[1]] = images[places[1]], images[places[0]]
    before, after = (parity.logits_of(model, batch_of([x], None)) for x in (d, replace(d, images=tuple(images))))
    assert (before - after).abs().max() > 0.01


OFFLOADED = Recompute(None, offload=True)


class Products(TorchDispatchMode):
    """Counts the matrix products and attentions that run while it is entered."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func._schema.name in KEPT - {"aten::mul_"}
        return func(*args, **(kwargs or {}))


@each_typical_case
def test_some_blocks_or_cheap_activations_recomputed_change_nothing(case: Case):
    """With `selective` no product runs twice; with every other block, fewer do than with all."""
    counts, outcomes = {}, []
    ways = {"none": NEVER, "selective": Recompute(None, True), "first": Recompute(frozenset({0})), "all": EVERY_BLOCK}
    for name, how in (ways | {"offloaded": OFFLOADED}).items():
        model = parity.randomised(case)
        model.recompute(dict.fromkeys(case.plan.blocks, how))
        with Products() as products:
            outcomes.append(run(model, case.documents))
        want, got = outcomes[0], outcomes[-1]
        counts[name] = products.count
        assert torch.equal(got[0], want[0])
        assert got[1].keys() == want[1].keys()
        assert all(torch.equal(got[1][n], want[1][n]) for n in got[1])
    assert counts["none"] == counts["selective"] < counts["first"] < counts["all"] == counts["offloaded"]


def test_a_copy_on_the_host_is_what_autograd_keeps() -> None:
    """What is overwritten afterwards changes no gradient that is made with the copy."""
    x, weight = torch.randn(3, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    want = x.detach().T @ torch.ones(3, 4)
    with on_host(x):
        y = x @ weight
    x.data.zero_()
    weight.data.zero_()
    y.sum().backward()
    assert torch.equal(weight.grad, want)
    assert torch.equal(x.grad, torch.zeros(3, 4)), "the weight stays where it is"


@each_typical_case
def test_recomputing_changes_nothing(case: Case):
    model, blocked = parity.randomised(case), case.plan.blocks
    kept = run(model, case.documents)
    calls: list[str] = []
    blocks = [(part, model.get_submodule(name)) for part, names in blocked.items() for name in names]
    for part, block in blocks:
        block.register_forward_pre_hook(lambda *_, part=part: calls.append(part))
    run(model, case.documents)
    once = {part: calls.count(part) for part in blocked}
    for parts in [[part] for part in blocked] + [list(blocked)]:
        model.recompute(dict.fromkeys(parts, EVERY_BLOCK))
        calls.clear()
        recomputed = run(model, case.documents)
        assert {part: calls.count(part) for part in blocked} == {part: n * (1 + (part in parts)) for part, n in once.items()}
        assert torch.equal(kept[0], recomputed[0])
        assert all(torch.equal(kept[1][n], recomputed[1][n]) for n in kept[1])


@each_typical_case
def test_recomputing_above_a_frozen_input_keeps_gradients(case: Case):
    """Everything frozen but one weight in the middle of a recomputed stack (F5)."""
    model = parity.randomised(case)
    model.requires_grad_(False)
    weight = next(p for n, p in model.named_parameters() if n.startswith("language.blocks.0.") and p.ndim == 2)
    weight.requires_grad_()
    batch = batch_of(case.documents, None)
    (want,) = torch.autograd.grad(model(batch).out, weight)
    assert want.any()
    model.recompute({"language": EVERY_BLOCK})
    (got,) = torch.autograd.grad(model(batch).out, weight)
    assert torch.equal(got, want)


@each_case
def test_logits_give_the_loss(case: Case):
    model = parity.randomised(case)
    batch = batch_of(case.documents, None)
    logits_LV = parity.logits_of(model, batch)
    assert logits_LV.shape == (len(batch.rows_L), case.spec.vocab_size)
    close(nn.functional.cross_entropy(logits_LV, batch.labels_L, reduction="sum"), model(batch).out, "loss")


@each_case
def test_unused_modules_are_those_without_a_gradient(case: Case):
    model = parity.randomised(case)
    _, gradients = run(model, case.documents)
    unused = {n for n, _ in model.named_parameters() if not case.spec.uses(n)}
    assert unused == {n for n, _ in model.named_parameters()} - gradients.keys()


@each_typical_case
def test_bfloat16_over_float32_masters_stays_near(case: Case):
    """One rounding has eight bits: a few of them a layer give per cents of the largest logit, not tens of per cents.

    Experts are taken in turn: at a near tie another one is chosen after a rounding, and the token's answer is another one.
    """
    model = parity.randomised(case)
    batch = batch_of(case.documents, None)
    half = parity.built(case, torch.bfloat16)
    half.load_state_dict(model.state_dict())
    for router in (*routers(model), *routers(half)):
        router.forced = True
    stream = []
    for name in chain.from_iterable(case.plan.blocks.values()):
        half.get_submodule(name).register_forward_hook(lambda *args: stream.append(parity.first(args[-1]).dtype))
    logits_LV = parity.logits_of(half, batch)
    assert logits_LV.dtype == torch.float32
    close(logits_LV, parity.logits_of(model, batch), "logits", tolerance=case.half)
    assert set(stream) == {torch.bfloat16}, "a float32 weight or table has raised the stream's precision"

    half(batch).out.backward()
    model(batch).out.backward()
    assert all(p.grad.dtype == torch.float32 for p in half.parameters() if p.grad is not None)
    got, want = (torch.cat([p.grad.flatten() for p in m.parameters() if p.grad is not None]) for m in (half, model))
    assert torch.nn.functional.cosine_similarity(got, want, dim=0) > 0.98


@each_case
def test_frozen_parts_may_be_bfloat16(case: Case):
    """In a bfloat16 run, a weight kept in bfloat16 gives what the same value kept in float32 gives."""
    model = parity.randomised(case)
    batch = batch_of(case.documents, None)
    outputs = []
    for dtype in (torch.float32, torch.bfloat16):
        half = build(case.config, "cpu", dtype, torch.bfloat16)
        half.load_state_dict({n: x.bfloat16() for n, x in model.state_dict().items()})
        outputs.append(parity.logits_of(half, batch).detach())
    assert torch.equal(*outputs)
