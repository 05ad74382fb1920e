"""FLOPs as whole numbers: equal to what torch's counter sees of the same batch, for every family and way to freeze; and by hand."""

from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode, mm_flop

from eyeline.core.batch import Budget, Document
from eyeline.data.fetch.batches import batch_of
from eyeline.kernels.causal_conv import causal_conv
from eyeline.models import flops
from eyeline.models.layers import EVERY_BLOCK, Attend
from eyeline.models.lora import LoRA
from eyeline.models.moe import Dispatch, ExpertWeights
from eyeline.models.qwen3_5 import Scan
from eyeline.models.shape import build
from tests.models import parity
from tests.models.cases import each_case, each_case_with_images, each_typical_case, each_typical_case_and
from tests.models.freezing import WAYS, ready
from tests.models.parity import Case


class PairByPair(nn.Module):
    """Attention in which each query meets only the keys that it may see, by products that the counter knows."""

    def __init__(self, causal: bool):
        super().__init__()
        self.causal = causal

    def forward(self, q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, cu_S1: Tensor, _longest: int, cache: None = None) -> Tensor:
        groups = q_THK.shape[1] // k_TGK.shape[1]
        k_THK, v_THK = (x.repeat_interleave(groups, 1) for x in (k_TGK, v_TGK))
        outs = []
        for start, end in pairwise(cu_S1.tolist()):
            for first, last in self.queries(start, end):
                q, k, v = (x.transpose(0, 1) for x in (q_THK[first:last], k_THK[start:last], v_THK[start:last]))
                scores = torch.bmm(q, k.mT) * q.shape[-1] ** -0.5
                if self.causal:
                    scores = scores.masked_fill(
                        torch.ones_like(scores, dtype=torch.bool).triu(1 + last - start - (last - first)), -torch.inf
                    )
                outs.append(scores.softmax(-1).bmm(v).transpose(0, 1))
        return torch.cat(outs)

    def queries(self, start: int, end: int) -> list[tuple[int, int]]:
        """One after another where each sees other keys than the one before."""
        return [(t, t + 1) for t in range(start, end)] if self.causal else [(start, end)]


class Squared(PairByPair):
    """The same by whole squares, with what may not be seen masked out: a few products instead of many."""

    def queries(self, start: int, end: int) -> list[tuple[int, int]]:
        return [(start, end)]


class ExpertByExpert(nn.Module):
    """Experts by products that the counter knows."""

    def forward(self, x_TD: Tensor, chosen_TA: Tensor, weight_TA: Tensor, experts: ExpertWeights) -> Tensor:
        y_TD = torch.zeros_like(x_TD)
        for e, (gate, up, down) in enumerate(zip(experts.gate, experts.up, experts.down, strict=True)):
            t, a = torch.where(chosen_TA == e)
            out = (F.silu(x_TD[t] @ gate.T) * (x_TD[t] @ up.T)) @ down.T
            y_TD = y_TD.index_add(0, t, out * weight_TA[t, a, None])
        return y_TD


class TokenByToken(nn.Module):
    """The gated delta rule by products that the counter knows; a memory is in need of a gradient from the start."""

    def __init__(self, scan: Scan):
        super().__init__()
        self.K, self.J = scan.K, scan.J

    def forward(
        self, mixed: tuple[Tensor, ...], taps: tuple[Tensor, ...], decay_TH: Tensor, beta_TH: Tensor, cu_S1: Tensor, _cache: None = None
    ) -> Tensor:
        q_TC, k_TC, v_TC = (causal_conv(x_TC, weight_CW, cu_S1) for x_TC, weight_CW in zip(mixed, taps, strict=True))
        K, v_THJ = self.K, v_TC.unflatten(-1, (-1, self.J))
        q_TGK, k_TGK = (x_TC.unflatten(-1, (-1, K)) for x_TC in (q_TC, k_TC))
        unit = [x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q_TGK, k_TGK)]
        q_THK, k_THK = (x.repeat_interleave(v_THJ.shape[1] // x.shape[1], 1) for x in unit)
        outs = []
        for start, end in pairwise(cu_S1.tolist()):
            state_HKJ = torch.zeros(v_THJ.shape[1], K, self.J) + 0 * (k_THK.sum() + v_THJ.sum() + decay_TH.sum() + beta_TH.sum())
            for t in range(start, end):
                q_HK1, k_HK1 = q_THK[t, :, :, None], k_THK[t, :, :, None]
                state_HKJ = state_HKJ * decay_TH[t].exp()[:, None, None]
                error_H1J = (v_THJ[t, :, None] - torch.bmm(k_HK1.mT, state_HKJ)) * beta_TH[t, :, None, None]
                state_HKJ = state_HKJ + torch.bmm(k_HK1, error_H1J)
                outs.append(torch.bmm(q_HK1.mT, state_HKJ)[None, :, 0] * K**-0.5)
        return torch.cat(outs)


IN_PLACE = {torch.ops.aten.addmm_: lambda _, a, b, **kwargs: mm_flop(a, b)}  # a product that the counter knows only out of place


def visible(model: nn.Module, attend: type[PairByPair] = PairByPair) -> nn.Module:
    """The same model with products that the counter sees in place of opaque kernels."""
    for name, module in list(model.named_modules()):
        if isinstance(module, Attend | PairByPair):
            model.set_submodule(name, attend(module.causal))
        if isinstance(module, Scan):
            model.set_submodule(name, TokenByToken(module))
        if isinstance(module, Dispatch):
            model.set_submodule(name, ExpertByExpert())
    return model


def seen(model: nn.Module, documents: list[Document]) -> int:
    """What the counter sees of forward and backward."""
    with FlopCounterMode(display=False, custom_mapping=IN_PLACE) as counter:
        loss = model(batch_of(documents, None)).out
        if loss.requires_grad:
            loss.backward()
    return counter.get_total_flops()


def counted(model: nn.Module, case: Case, documents: list[Document]) -> flops.Flops:
    """Our count of the same, with the squares that `Squared` computes in place of causal pairs."""
    batch = batch_of(documents, None)
    squares = sum(len(d.tokens_T) ** 2 for d in documents)
    return flops.count(model, case.spec.image).of_work(replace(flops.work_of(batch, case.spec.image), pair=squares))


def few(case: Case) -> list[Document]:
    """A short document with images, where there are any, and a text."""
    return [min(case.with_images or case.documents, key=lambda d: len(d.tokens_T)), case.texts[0]]


@each_typical_case
def test_visible_products_compute_the_same(case: Case):
    model = parity.randomised(case)
    want = parity.run(model, case.documents)
    for attend in (Squared, PairByPair):
        parity.same(parity.run(visible(model, attend), case.documents), want)


@each_typical_case
def test_forward_of_each_part_is_what_the_counter_sees(case: Case):
    model = parity.randomised(case)
    want = flops.count(model, case.spec.image).of(batch_of(case.documents, None)).forward
    with FlopCounterMode(display=False, custom_mapping=IN_PLACE) as counter, torch.no_grad():
        visible(model)(batch_of(case.documents, None))
    root = type(model).__name__
    by_module = {name.removeprefix(root + "."): sum(ops.values()) for name, ops in counter.get_flop_counts().items()}
    head = by_module["language.head"]
    got = {part: by_module.get(part, 0) for part in ("vision", "projector", "language")}
    assert got | {"language": got["language"] - head, "head": head} == want


@each_typical_case_and("way", [*WAYS, "frozen embedding", "LoRA on one layer kind of the tower"], turns=3, always=["LoRA of all parts"])
def test_every_way_to_freeze_equals_the_counter(case: Case, way: str):
    model, spec = parity.randomised(case), case.spec
    match way:
        case "frozen embedding":
            ready(model, spec, WAYS["language"])
            model.language.embed.weight.requires_grad_(False)
        case "LoRA on one layer kind of the tower":
            ready(model, spec, {"vision": LoRA(rank=2, alpha=2, targets=("k_proj",))} if spec.image else {})
        case _:
            ready(model, spec, WAYS[way])
    for documents, parts in ((few(case), list(case.plan.blocks)), (few(case)[1:], [])):
        model.recompute(dict.fromkeys(parts, EVERY_BLOCK))
        work = counted(model, case, documents)
        assert work.total + work.again == seen(visible(model, Squared), documents), (parts, work)
        assert parts or work.again == 0


@each_typical_case
def test_recomputing_any_part_equals_the_counter(case: Case):
    model = parity.randomised(case)
    kept = counted(model, case, few(case))
    for part in case.plan.blocks:
        model.recompute({part: EVERY_BLOCK})
        work = counted(model, case, few(case))
        assert (work.forward, work.backward) == (kept.forward, kept.backward)
        assert work.again > 0
        assert work.total + work.again == seen(visible(model, Squared), few(case))


@each_typical_case
def test_causal_pairs_equal_the_counter(case: Case):
    """Each token with itself and those before it, forward and backward."""
    model = parity.randomised(case)
    want = flops.count(model, case.spec.image).of(batch_of(few(case), None))
    assert want.total == seen(visible(model), few(case))


@each_case
def test_padding_and_batches_without_labels_cost_nothing(case: Case):
    model = parity.randomised(case)
    arithmetic = flops.count(model, case.spec.image)
    tokens = sum(len(d.tokens_T) for d in case.documents)
    assert arithmetic.of(batch_of(case.documents, Budget(tokens + 17, 10_000))) == arithmetic.of(batch_of(case.documents, None))
    batch = batch_of(case.texts, None, next_tokens=True)
    assert arithmetic.of(batch) == flops.NONE


@each_case
def test_a_packs_cost_is_the_sum_of_its_documents(case: Case):
    """Each alone, but that a shared image is encoded once."""
    arithmetic = flops.count(parity.randomised(case), case.spec.image)
    alone = [d for d in case.documents if not d.images] + case.with_images[:1]
    whole = arithmetic.of(batch_of(alone, None))
    parts = [arithmetic.of(batch_of([d], None)) for d in alone]
    assert whole == sum(parts[1:], parts[0])


@each_case
def test_costs_for_planning_are_the_same_numbers(case: Case):
    model = parity.randomised(case)
    model.recompute(dict.fromkeys(case.plan.blocks, EVERY_BLOCK))
    arithmetic = flops.count(model, case.spec.image)
    batch = batch_of(case.documents, None)
    work, cost, done = flops.work_of(batch, case.spec.image), arithmetic.cost(), arithmetic.of(batch)
    planned = cost.token * work.token + cost.pair * work.pair + cost.label * work.label
    planned += cost.patch * work.patch + cost.patch_pair * work.patch_pair
    assert 0 <= planned - done.total - done.again <= work.patch, "merged patches are rounded up"


@each_case_with_images
def test_meta_models_count_alike(case: Case):
    """A plan needs no memory."""
    real, meta = parity.randomised(case), build(case.config, "meta")
    batch = batch_of(case.documents, None)
    assert flops.count(meta, case.spec.image).of(batch) == flops.count(real, case.spec.image).of(batch)
