"""Our models compute what transformers' compute: logits and every gradient, in float32."""

import logging

import pytest
import torch
import transformers
from torch import Tensor
from torch.nn import functional as F

from eyeline.checkpoint.tensors import entries_in, renamed, write_folder
from eyeline.models import FAMILIES, hf, qwen2, siglip2
from eyeline.models.moe import ExpertWeights
from eyeline.models.shape import build
from tests.models import parity
from tests.models.cases import ALL, CASES, each_case, llava
from tests.models.cases.llava import VISION
from tests.models.parity import Case, close
from tests.weights import load_into


@pytest.fixture(autouse=True, scope="module")
def _quiet():
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    yield
    transformers.logging.set_verbosity(logging.WARNING)


def test_every_family_has_cases():
    assert CASES.keys() == FAMILIES.keys()
    assert all(case.config.family == family for family, cases in CASES.items() for case in cases)


@pytest.mark.parametrize("family", CASES)
def test_cases_show_what_could_go_wrong(family):
    """Tied and untied heads; fewer key/value heads than query heads; texts, several images in one document, images of several grids."""
    cases = CASES[family]
    models = [build(case.config, "meta") for case in cases]
    tied = {model.language.head.weight is model.language.embed.weight for model in models}
    assert tied == {True, False}
    keys = [m for model in models for n, m in model.language.named_modules() if n.endswith("attn.k")]
    queries = [m for model in models for n, m in model.language.named_modules() if n.endswith("attn.q")]
    assert any(k.out_features < q.out_features for k, q in zip(keys, queries, strict=True))
    experts = [m for model in models for m in model.modules() if isinstance(m, ExpertWeights)]
    assert all(m.down.shape[1] != 2 * m.down.shape[2] for m in experts), "a transposed weight would fit"
    for case in cases:
        assert len(case.texts) > 1
        if case.spec.image is not None:
            assert any(len(d.images) > 1 for d in case.documents)
        if case.spec.image is not None and len({u.grid for size in ((7, 90), (90, 7)) for u in case.spec.image.units(*size)}) > 1:
            assert len({i.grid for d in case.documents for i in d.images}) > 1


@each_case
def test_packed_batch_equals_the_reference_one_by_one(case: Case, tmp_path):
    peer, ours = parity.pair(case, tmp_path / "a")
    want, want_logits = parity.reference(case, peer, case.documents)
    batch = parity.batch_of(case.documents, None)
    shown = [i.key for d in case.documents for i in d.images]
    assert batch.counts.images == len(set(shown)), "shared images are encoded once"
    close(parity.logits_of(ours, batch), want_logits, "logits")
    got, gradients = parity.run_batch(ours, batch)
    close(got, want, "loss")

    want.backward()
    theirs = parity.gradients_of(case, peer, tmp_path / "b")
    unreached = theirs.keys() - gradients.keys()
    assert all(not case.spec.uses(n) for n in unreached), unreached
    parity.all_close(gradients | {n: torch.zeros_like(theirs[n]) for n in unreached}, theirs, parity.tolerance_of(case, ours, batch))
    # softmax does not see a bias of all keys, where positions do not turn it
    silent = {n for n, x in theirs.items() if not x.any()} - unreached
    assert all(n.endswith("attn.k.bias") for n in silent), f"no gradient reaches {silent}: nothing was compared"


@each_case
def test_each_document_alone_equals_the_reference(case: Case, tmp_path):
    peer, ours = parity.pair(case, tmp_path)
    with torch.no_grad():
        for d in case.documents:
            close(parity.logits_of(ours, parity.batch_of([d], None)), parity.reference(case, peer, [d])[1], d.id)


@each_case
def test_reference_loads_what_our_rules_write(case: Case, tmp_path):
    """Tensors by our rules with the peer's own config.json: nothing missing, nothing unexpected, the same logits; and back
    again the same bytes."""
    ours = parity.built(case)
    parity.randomise(ours, seed=1)
    peer = case.peer()
    peer.config.save_pretrained(tmp_path)
    write_folder(tmp_path, renamed(((n, p.detach()) for n, p in ours.named_parameters()), case.keys))
    reference, info = type(peer).from_pretrained(tmp_path, output_loading_info=True, attn_implementation="eager")
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    with torch.no_grad():
        want = parity.reference(case, reference.eval(), case.documents)[1]
        close(parity.logits_of(ours, parity.batch_of(case.documents, None)), want, "logits")

    back = parity.built(case)
    parity.fill(case, back, tmp_path)
    for (name, p), (_, q) in zip(ours.named_parameters(), back.named_parameters(), strict=True):
        assert torch.equal(p, q), name


@pytest.mark.parametrize("keys", [hf.siglip2.KEYS, hf.siglip2.HUB_KEYS], ids=["vision model", "hub"])
def test_tower_alone(keys, tmp_path):
    """Normed features of several images, packed and in merge order, and all gradients; under both kinds of names."""
    c = llava.SHUFFLING.model_copy(update={"vision": VISION})
    shown = llava.shown(c)
    record = transformers.SiglipVisionConfig(**hf.siglip2.to_hf(VISION))
    if keys is hf.siglip2.KEYS:
        reference = tower = transformers.SiglipVisionModel._from_config(record, attn_implementation="eager")
        dropped = ()
    else:  # the whole model, with its text half and pooling head: these must be the ones that DROPPED names
        text = transformers.SiglipTextConfig(vocab_size=20, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
        record.vision_use_head = True
        reference = transformers.SiglipModel._from_config(
            transformers.SiglipConfig(text_config=text.to_dict(), vision_config=record.to_dict()), attn_implementation="eager"
        )
        tower, dropped = reference.vision_model, hf.siglip2.DROPPED
    parity.randomise(reference)
    reference.save_pretrained(tmp_path)
    ours = siglip2.Model(VISION)
    load_into(dict(ours.named_parameters()), tmp_path, keys, dropped)
    unknown = entries_in(tmp_path).keys() - {n for n, _ in renamed(ours.named_parameters(), keys)}
    assert bool(unknown) == bool(dropped)

    want_NPD = tower(torch.stack([llava.pixels(i, c) for i in shown])).last_hidden_state
    batch = parity.batch_of([parity.document("images", *shown)], None)
    got_PD = ours(batch.patches_PC, batch.places_P2, batch.grids_N2, batch.cu_N1, batch.longest_image)
    side = VISION.position_grid
    got_NPD = torch.empty_like(want_NPD)
    got_NPD[torch.arange(3).repeat_interleave(side**2), batch.places_P2[:, 0] * side + batch.places_P2[:, 1]] = got_PD
    close(got_NPD, want_NPD, "features")

    direction = torch.randn(want_NPD.shape, generator=torch.Generator().manual_seed(1))
    (want_NPD * direction).sum().backward()
    (got_NPD * direction).sum().backward()
    theirs = {n: p.grad for n, p in tower.named_parameters() if not n.startswith("head.")}
    parity.all_close(dict(renamed(((n, p.grad) for n, p in ours.named_parameters()), hf.siglip2.KEYS)), theirs)


@pytest.mark.parametrize("tied", [True, False])
def test_language_model_alone(tied, tmp_path):
    c = llava.language(tied)
    reference = parity.peer_of(hf.qwen2.to_hf(c))
    parity.randomise(reference)
    reference.save_pretrained(tmp_path)
    ours = qwen2.Model(c)
    load_into(dict(ours.named_parameters(remove_duplicate=False)), tmp_path, hf.qwen2.keys(c))
    batch = parity.batch_of(parity.texts(), None)
    x_TD = ours.enter(batch.tokens_T)
    got = ours(x_TD, batch).out
    losses = []
    for d in parity.texts():
        logits_TV = reference(**parity.token_inputs(d)).logits[0]
        losses.append(F.cross_entropy(logits_TV, torch.from_numpy(d.labels_T).long(), reduction="sum"))
    want = torch.stack(losses).sum()
    close(got, want, "loss")
    want.backward()
    got.backward()
    theirs: dict[str, Tensor | None] = {n: p.grad for n, p in reference.named_parameters()}
    parity.all_close(dict(renamed(((n, p.grad) for n, p in ours.named_parameters()), hf.qwen2.keys(c))), theirs)


def test_features_are_where_the_reference_takes_them():
    """The final norm is far from the identity here: features before and after it cannot be mistaken for one another."""
    normed, plain = siglip2.Model(VISION), siglip2.Model(VISION, feature_norm=False)
    parity.randomise(normed)
    plain.load_state_dict(normed.state_dict())
    batch = parity.batch_of(ALL[0].with_images[:1], None)
    args = (batch.patches_PC, batch.places_P2, batch.grids_N2, batch.cu_N1, batch.longest_image)
    x_PD = plain(*args)
    want_PD = F.layer_norm(x_PD, (VISION.hidden_size,), normed.norm.weight, normed.norm.bias, VISION.eps)
    close(normed(*args), want_PD, "normed features")
    assert (normed(*args) - x_PD).abs().max() > 0.5
