"""What trains moves and what is frozen does not, by the family's own facts; LoRA reaches the named layers and merges exactly."""

from collections.abc import Mapping

import pytest
import torch
from torch import nn

from eyeline.core.facts import PARTS, Facts, Part, matches, part_of
from eyeline.core.randomness import torch_rng_for
from eyeline.data.fetch.batches import batch_of
from eyeline.models.lora import LoRA, adapters, merge, targets_of, wrap
from tests.models import parity
from tests.models.cases import each_case
from tests.models.parity import Case, close

ALL_LINEAR = LoRA(rank=3, alpha=7, targets="all-linear")
Q_AND_V = LoRA(rank=2, alpha=2, targets=("q_proj", "v_proj"))
Ways = dict[Part, LoRA | None]  # part that trains -> its adapters, or None in full
WAYS: dict[str, Ways] = {
    "everything": dict.fromkeys(PARTS),
    "vision": {"vision": None},
    "projector": {"projector": None},
    "language": {"language": None},
    "language under a frozen tower": {"projector": None, "language": None},
    "LoRA q v and projector": {"projector": None, "language": Q_AND_V},
    "LoRA of all parts": dict.fromkeys(PARTS, ALL_LINEAR),
}


def ready(model: nn.Module, facts: Facts, ways: Mapping[Part, LoRA | None]) -> set[str]:
    """Adapters with a B that is not zero, freezing by part; the names of what trains."""
    for part, lora in ways.items():
        if lora is not None and part in facts.parts:
            wrap(model, facts, part, lora, torch_rng_for(0, part))
    trains = set()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("lora_B"):
                p.copy_(0.3 * torch.randn(p.shape, generator=torch_rng_for(0, name)))
            part, unused = part_of(facts, name), any(name.startswith(root + ".") for root in facts.unused)
            learns = part in ways and not unused and (ways[part] is None or ".lora_" in name)
            p.requires_grad_(learns)
            trains |= {name} if learns else set()
    return trains


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
