"""What trains moves and what is frozen does not, by the family's own facts; LoRA reaches the named layers and merges exactly."""

import pytest
import torch

from eyeline.core.facts import matches, part_of
from eyeline.data.fetch.batches import batch_of
from eyeline.models.lora import LoRA, adapters, merge, targets_of
from tests.models import parity
from tests.models.cases import each_case
from tests.models.freezing import WAYS, ready
from tests.models.parity import Case, close


@each_case
def test_every_parameter_belongs_to_exactly_one_part(case: Case):
    """`part_of` asserts it; no part is empty."""
    owners = {part_of(case.facts, n) for n, _ in parity.built(case).named_parameters(remove_duplicate=False)}
    assert owners == case.facts.parts.keys()


@each_case
@pytest.mark.parametrize("way", WAYS)
def test_frozen_is_bit_equal_after_a_step_and_all_that_trains_has_moved(case: Case, way: str):
    model, facts = parity.randomised(case), case.facts
    trains = ready(model, facts, WAYS[way])
    if not trains:
        assert facts.image is None, "only a model without a tower has nothing there"
        return
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01)
    model.recompute(list(facts.blocks))
    model(batch_of(case.documents, None)).out.backward()
    assert {n for n, p in model.named_parameters() if p.grad is not None} == trains
    optimizer.step()
    assert {n for n, p in model.named_parameters() if not torch.equal(p, before[n])} == trains


@each_case
def test_adapters_go_where_the_facts_say_and_merge_exactly(case: Case):
    """q and v name layers of the tower too (G1)."""
    model, facts = parity.randomised(case), case.facts
    names = {n for n, _ in model.named_parameters()}
    batch = batch_of(case.documents, None)
    plain = parity.logits_of(model, batch)
    for targets in (tuple(targets_of(facts, "language"))[:2], "all-linear"):
        lora = LoRA(rank=3, alpha=7, targets=targets)
        ready(model, facts, {"language": lora})
        patterns = [p for n, p in targets_of(facts, "language").items() if targets == "all-linear" or n in targets]
        assert set(adapters(model)) == {n for n, _ in model.named_modules() if any(matches(p, n) for p in patterns)}
        assert {part_of(facts, n) for n in adapters(model)} == {"language"}
        want = parity.logits_of(model, batch)
        assert (want - plain).abs().max() > 0.1
        merge(model)
        assert {n for n, _ in model.named_parameters()} == names
        close(parity.logits_of(model, batch), want, "logits")
        plain = want
