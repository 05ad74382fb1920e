"""What trains moves and what is frozen does not, by the family's own spec; LoRA reaches the named layers and merges exactly."""

import torch

from eyeline.core.plan import part_of
from eyeline.data.fetch.batches import batch_of
from eyeline.models.layers import EVERY_BLOCK
from eyeline.models.lora import EXPERTS_TARGET, LoRA, adapters, targets_of
from tests.models import parity
from tests.models.cases import each_case, each_typical_case_and
from tests.models.freezing import WAYS, ready
from tests.models.parity import Case, close
from tests.planned import merged


@each_case
def test_every_parameter_belongs_to_exactly_one_part(case: Case):
    """`part_of` asserts it; no part is empty."""
    owners = {part_of(n) for n, _ in parity.built(case).named_parameters(remove_duplicate=False)}
    assert owners == set(case.spec.parts)


@each_typical_case_and("way", list(WAYS))
def test_frozen_is_bit_equal_and_trained_moves(case: Case, way: str):
    model, spec = parity.randomised(case), case.spec
    trains = ready(model, spec, WAYS[way])
    if not trains:
        assert spec.image is None, "only a model without a tower has nothing there"
        return
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01)
    model.recompute(dict.fromkeys(case.plan.blocks, EVERY_BLOCK))
    model(batch_of(case.documents, None)).out.backward()
    assert {n for n, p in model.named_parameters() if p.grad is not None} == trains
    optimizer.step()
    assert {n for n, p in model.named_parameters() if not torch.equal(p, before[n])} == trains


@each_case
def test_adapters_go_where_the_facts_say_and_merge_exactly(case: Case):
    """q and v name layers of the tower too (G1)."""
    model, spec = parity.randomised(case), case.spec
    names = {n for n, _ in model.named_parameters()}
    batch = batch_of(case.documents, None)
    plain = parity.logits_of(model, batch)
    for targets in (tuple(targets_of(model, spec, "language"))[:2], "all-linear"):
        lora = LoRA(rank=3, alpha=7, targets=targets)
        ready(model, spec, {"language": lora})
        known = targets_of(model, spec, "language")
        wanted = set(known) - {EXPERTS_TARGET} if targets == "all-linear" else set(targets)
        assert set(adapters(model)) == {n for t in wanted for n in known[t]}
        assert {part_of(n) for n in adapters(model)} == {"language"}
        want = parity.logits_of(model, batch)
        assert (want - plain).abs().max() > 0.1
        model = merged(model, case.config)
        assert {n for n, _ in model.named_parameters()} == names
        close(parity.logits_of(model, batch), want, "logits")
        plain = want
