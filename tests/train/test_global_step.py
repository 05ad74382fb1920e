"""`update` on several ranks against the same update on one: weights, losses, norms, expert loads and reports."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from eyeline.core.batch import IGNORE, Batch, Budget, Document
from eyeline.core.randomness import torch_rng_for
from eyeline.core.step import Step, step_alone, step_of
from eyeline.data.fetch.batches import batch_of
from eyeline.models import FAMILIES
from eyeline.models.lora import LoRA
from eyeline.models.moe import Aux, Balance, Bias, biases_of, set_balance
from eyeline.parallel.ranks import ONE_DEVICE, Ranks
from eyeline.train.step import Report, update, validate
from tests.models import parity
from tests.models.cases import ALL
from tests.models.parity import Case
from tests.planned import adapt
from tests.train.fake_ranks import FakeRanks

BY_NAME = {(case.config.family, case.id): case for case in ALL}
DENSE = {
    "llava": BY_NAME["llava", "shuffled untied"],
    "qwen3_vl": BY_NAME["qwen3_vl", "tied"],
    "qwen3_5_vl": BY_NAME["qwen3_5_vl", "tied"],
    "text": BY_NAME["text", "qwen3 tied"],
}
EXPERTS = {"qwen3_vl": BY_NAME["qwen3_vl", "experts"], "qwen3_5_vl": BY_NAME["qwen3_5_vl", "experts"]}
BALANCED = {"aux": Aux(coef=0.5), "bias": Bias(rate=0.02)}
TOKENS = 64
Pack = tuple[Document, ...]
EMPTY: Pack = ()


def unlabelled(document: Document) -> Document:
    return replace(document, labels_T=np.full_like(document.labels_T, IGNORE))


def layouts(case: Case) -> dict[str, list[tuple[Pack, Pack]]]:
    """The packs of some steps: of each slot those of both ranks."""
    texts = [d for d in case.documents if not d.images]
    shown = [d for d in case.documents if d.images] or texts
    text, image, other = tuple(texts[:2]), tuple(shown[:1]), tuple(shown[1:2])
    without = tuple(map(unlabelled, other))
    return {
        # rank 0: labels with images; then images where only the pack without labels has some; then nothing; then an empty pack
        "all": [(image, text), (text[:1], without), (tuple(map(unlabelled, text)), without), (text[:1], EMPTY)],
        "images without labels": [(without, text), (text[:1], EMPTY)],
        "labels on one rank": [(tuple(map(unlabelled, text)), image), (without, other)],
        "images on one rank": [(text, image), (text[:1], other)],
    }


def batch(pack: Pack) -> Batch:
    return batch_of(pack, Budget(TOKENS, 1000))


def steps_of(slots: Sequence[tuple[Pack, Pack]]) -> tuple[Step, list[Step]]:
    """The step of the only rank, and that of each of two. Numbers of packs do not follow from ranks; the empty ones are the last."""
    order = [(n, rank) for n in range(len(slots)) for rank in ((0, 1) if n % 2 else (1, 0))]
    order.sort(key=lambda place: slots[place[0]][place[1]] == EMPTY)
    alone = step_alone([batch(slots[n][rank]) for n, rank in order if slots[n][rank] != EMPTY])
    batches = [[batch(slot[rank]) for slot in slots] for rank in (0, 1)]
    numbers = [[order.index((n, rank)) for n in range(len(slots))] for rank in (0, 1)]
    counts, costs = [[one.counts for one in of_rank] for of_rank in batches], [[(0, 0)] * 2] * len(slots)
    return alone, [step_of(batches[rank], numbers[rank], counts, costs, {}, None) for rank in (0, 1)]


def model_of(case: Case, by: Balance | None) -> nn.Module:
    """Everything trains, and adapters with dropout are everywhere."""
    made, spec = parity.randomised(case), FAMILIES[case.config.family].spec(case.config)
    for part in spec.parts:
        adapt(made, spec, part, LoRA(rank=2, alpha=2, dropout=0.3, targets="all-linear"), torch_rng_for(0, part))
    with torch.no_grad():
        for name, p in made.named_parameters():
            if name.endswith("lora_B"):
                p.copy_(0.2 * torch.randn(p.shape, generator=torch_rng_for(0, name)))
    set_balance(made, by)
    return made.train()


class Compared:
    """A model on one rank and its copies on two, updated with the same packs and compared after every step."""

    def __init__(self, case: Case, by: Balance | None = None):
        self.case, self.by, self.step = case, by, 0
        self.models = [model_of(case, by) for _ in range(3)]
        self.alone, *self.on_ranks = self.models
        self.fake = FakeRanks(self.on_ranks)
        how: dict[str, Any] = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1}
        self.optimizers: list[torch.optim.Optimizer] = [torch.optim.SGD(made.parameters(), **how) for made in self.models]

    def run(self, name: str) -> tuple[Report, set[str]]:
        """Do one of the `layouts`: what the only rank reports, and the parameters that move."""
        alone, of_ranks = steps_of(layouts(self.case)[name])
        how: dict[str, Any] = {"max_grad_norm": 0.5, "balance": self.by, "seed": 3, "step": self.step}
        before = [{name: p.detach().clone() for name, p in made.named_parameters()} for made in self.models]
        wanted = update(self.alone, self.optimizers[:1], alone, ONE_DEVICE, **how)

        def work(rank: int, ranks: Ranks) -> Report:
            return update(self.on_ranks[rank], [self.optimizers[1 + rank]], of_ranks[rank], ranks, **how)

        for report in self.fake.run(work):
            assert_equal_reports(report, wanted)
        self.fake.gather_weights()
        self.step += 1
        moves = [
            {name: p.detach() - was[name] for name, p in made.named_parameters()} for made, was in zip(self.models, before, strict=True)
        ]
        for made, moved in zip(self.on_ranks, moves[1:], strict=True):
            for name, move in moves[0].items():
                assert move.any() == moved[name].any(), f"{name}: moved on one side only"
                bound = 1e-4 * float(move.abs().max()) + 1e-6
                torch.testing.assert_close(moved[name], move, rtol=0, atol=bound, msg=lambda m, n=name: f"{n}: {m}")
            for name, bias_E in biases_of(self.alone).items():
                assert torch.equal(biases_of(made)[name], bias_E), name
        return wanted, {name for name, move in moves[0].items() if move.any()}


def assert_equal_reports(got: Report, want: Report) -> None:
    assert (got.outcome, got.counts.supervised, got.counts.images) == (want.outcome, want.counts.supervised, want.counts.images)
    assert got.loss == pytest.approx(want.loss, rel=1e-5, nan_ok=True)
    assert got.grad_norm == pytest.approx(want.grad_norm, rel=1e-4, nan_ok=True)
    assert (got.experts is None) == (want.experts is None)
    if got.experts is not None and want.experts is not None:
        assert (got.experts.max_over_mean, got.experts.unused) == (want.experts.max_over_mean, want.experts.unused)
        assert (got.experts.balance_loss is None) == (want.experts.balance_loss is None)
        assert (got.experts.balance_loss or 0) == pytest.approx(want.experts.balance_loss or 0, rel=1e-5)


def parts_of(names: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


@pytest.mark.parametrize(
    ("case", "by"),
    [
        *(pytest.param(case, None, id=name) for name, case in DENSE.items()),
        *(pytest.param(case, by, id=f"{name}-{how}") for name, case in EXPERTS.items() for how, by in BALANCED.items()),
    ],
)
def test_update_on_two_ranks_is_that_on_one(case: Case, by: Balance | None) -> None:
    compared = Compared(case, by)
    everything = parts_of({name for name, _ in compared.alone.named_parameters()})
    for layout in layouts(compared.case):
        report, moved = compared.run(layout)
        assert report.outcome == "applied"
        assert report.grad_norm is not None and report.grad_norm > 0.5, "it is clipped"
        assert parts_of(moved) == ({"language"} if layout == "images without labels" else everything)
        assert (by is None) == (report.experts is None)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_step_that_is_not_finite_on_one_rank_is_dropped_by_all(value: float) -> None:
    compared = Compared(EXPERTS["qwen3_vl"], Bias())
    compared.run("all")
    spoiled = [made.get_parameter("language.norm.weight") for made in (compared.alone, compared.on_ranks[1])]
    hooks = [p.register_hook(lambda g: g.index_fill(0, torch.tensor([3]), value)) for p in spoiled]
    report, moved = compared.run("images on one rank")
    assert (report.outcome, moved) == ("not finite", set())
    for hook in hooks:
        hook.remove()
    assert compared.run("images on one rank")[0].outcome == "applied"


def test_step_without_labels_on_any_rank_has_no_loss() -> None:
    case = DENSE["llava"]
    _, of_ranks = steps_of([(tuple(map(unlabelled, case.documents[:1])), EMPTY)])
    models = [model_of(case, None) for _ in range(2)]
    how: dict[str, Any] = {"max_grad_norm": 0.5, "balance": None, "seed": 3, "step": 0}
    reports = FakeRanks(models).run(lambda rank, ranks: update(models[rank], [], of_ranks[rank], ranks, **how))
    assert [(report.loss, report.grad_norm, report.outcome) for report in reports] == [(None, None, "no targets")] * 2


@pytest.mark.parametrize("case", [*DENSE.values(), *EXPERTS.values()], ids=lambda case: f"{case.config.family}: {case.id}")
def test_validation_on_two_ranks_is_that_on_one(case: Case) -> None:
    """As the reader gives it: an empty batch where another rank has one more, and the tower runs on both or on none."""
    packs, shown = [case.documents[:2], case.documents[2:3], case.documents[3:]], case.spec.image is not None
    made = model_of(case, None)
    want = validate(made, [batch_of(pack, None) for pack in packs], ONE_DEVICE)
    of_ranks = [[replace(batch_of(pack, None), has_images=shown) for pack in own] for own in (packs[::2], [packs[1], EMPTY])]
    got = FakeRanks([made, made]).run(lambda rank, ranks: validate(deepcopy(made), of_ranks[rank], ranks))
    assert [labels for _, labels in got] == [want[1]] * 2
    assert [loss for loss, _ in got] == [pytest.approx(want[0], rel=1e-6)] * 2
