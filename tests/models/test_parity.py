"""Our models compute what transformers' compute: logits and every gradient, in float32."""

import json
import logging
import re

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch.nn import functional as F

from eyeline.models import FAMILIES, qwen2, siglip2
from tests.models import twins
from tests.models.twins import CASES, VISION, close

ALL = [(family, case) for family, cases in CASES.items() for case in cases]


@pytest.fixture(autouse=True, scope="module")
def _quiet():
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    yield
    transformers.logging.set_verbosity(logging.WARNING)


def test_every_family_has_a_twin():
    assert CASES.keys() == FAMILIES.keys()


@pytest.mark.parametrize(("family", "case"), ALL, ids=[case for _, case in ALL])
def test_packed_batch_equals_the_reference_one_by_one(family, case, tmp_path):
    c = CASES[family][case]
    twin = twins.twin_of(c, tmp_path / "a", FAMILIES[family])
    documents = twins.documents(c)
    want, want_logits = twins.reference_loss(twin.reference, documents, c)
    batch = twins.with_labels(documents)
    assert batch.counts.images == 3, "the pictures are shared"
    got = twin.ours(batch)
    close(twins.logits_of(twin.ours, batch), want_logits, "logits")
    close(got, want, "loss")

    want.backward()
    got.backward()
    theirs, ours = twins.gradients_on_disk(twin, tmp_path / "b")
    twins.all_close(ours, theirs)
    reached = {name for name, gradient in ours.items() if gradient.any()}
    unused = {twins.theirs_of(n, twin.rules)[0] for n, p in twin.ours.named_parameters() if p.grad is None}
    keys_have_no_bias = {n for n in ours if n.endswith("k_proj.bias") and n not in reached}
    assert reached | unused | keys_have_no_bias == set(ours)


@pytest.mark.parametrize(("family", "case"), ALL, ids=[case for _, case in ALL])
def test_reference_loads_what_our_rules_write(family, case, tmp_path):
    """config.json from our config, tensors by our rules: nothing missing, nothing unexpected, the same logits."""
    c = CASES[family][case]
    config, rules = twins.hf_config(c)
    ours = FAMILIES[family].build(c, "cpu")
    twins.randomise(ours, seed=1)
    tensors = {}
    for name, p in ours.named_parameters():
        theirs, rule = twins.theirs_of(name, rules)
        tensors[theirs] = (rule.write(p) if rule.write else p).detach().contiguous()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(config))

    cls = getattr(transformers, config["architectures"][0])
    reference, info = cls.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    documents = twins.documents(c)
    with torch.no_grad():
        close(twins.logits_of(ours, twins.with_labels(documents)), twins.reference_loss(reference, documents, c)[1], "logits")


@pytest.mark.parametrize("keys", [siglip2.KEYS, siglip2.HUB_KEYS], ids=["vision model", "hub"])
def test_tower_alone(keys, tmp_path):
    """Normed features of several images, packed and in merge order, and all gradients; under both kinds of names."""
    c = twins.SHUFFLING.model_copy(update={"vision": VISION})
    pixels = [twins.picture(key, c)[1] for key in ("cat", "dog", "cow")]
    record = transformers.SiglipVisionConfig(**siglip2.to_hf(VISION))
    if keys is siglip2.KEYS:
        reference = transformers.SiglipVisionModel._from_config(record, attn_implementation="eager")
        twins.randomise(reference)
        tensors, tower = twins.on_disk(reference, tmp_path), reference
    else:  # the whole model, with its text half and pooling head: these must be the ones that DROPPED names
        text = transformers.SiglipTextConfig(vocab_size=20, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
        record.vision_use_head = True
        reference = transformers.SiglipModel._from_config(
            transformers.SiglipConfig(text_config=text.to_dict(), vision_config=record.to_dict()), attn_implementation="eager"
        )
        twins.randomise(reference)
        tensors, tower = twins.on_disk(reference, tmp_path), reference.vision_model
        dropped = [n for n in tensors if any(re.fullmatch(p.replace(".", r"\.").replace("**", ".+"), n) for p in siglip2.DROPPED)]
        assert len(dropped) > 20
        tensors = {n: x for n, x in tensors.items() if n not in dropped}
    ours = siglip2.Model(VISION)
    twins.fill(ours, tensors, keys)

    want_NPD = tower(torch.stack(pixels)).last_hidden_state
    batch = twins.with_labels([twins.document("pictures", ["cat", "dog", "cow"], c)])
    got_PD = ours(batch.patches_PC, batch.places_P2, batch.cu_N1, batch.longest_image)
    side = VISION.side
    got_NPD = torch.empty_like(want_NPD)
    got_NPD[torch.arange(3).repeat_interleave(side**2), batch.places_P2[:, 0] * side + batch.places_P2[:, 1]] = got_PD
    close(got_NPD, want_NPD, "features")

    direction = torch.randn(want_NPD.shape, generator=torch.Generator().manual_seed(1))
    (want_NPD * direction).sum().backward()
    (got_NPD * direction).sum().backward()
    theirs = {n: p.grad for n, p in tower.named_parameters() if not n.startswith("head.")}
    mine = {}
    for name, p in ours.named_parameters():
        key, rule = twins.theirs_of(name, siglip2.KEYS)
        mine[key] = rule.write(p.grad) if rule.write else p.grad
    twins.all_close(mine, theirs)


@pytest.mark.parametrize("tied", [True, False])
def test_language_model_alone(tied, tmp_path):
    c = twins.language(tied)
    reference = twins.reference_of(qwen2.to_hf(c))
    ours = qwen2.Model(c)
    twins.fill(ours, twins.on_disk(reference, tmp_path), qwen2.keys(c))
    documents = [twins.document(str(n), [n], twins.CASES["llava"]["llava tied"]) for n in (5, 1, 11, 5)]
    batch = twins.with_labels(documents)
    want, _ = twins.reference_loss(reference, documents, twins.SHUFFLING)
    x_TD = ours.embedded(batch.tokens_T)
    got = ours(x_TD, batch)
    close(got, want, "loss")
    want.backward()
    got.backward()
    theirs, mine = twins.gradients_on_disk(twins.Twin(reference, ours, qwen2.keys(c)), tmp_path / "gradients")
    twins.all_close(mine, theirs)


def test_features_are_where_the_reference_takes_them():
    """The final norm is far from the identity here: features before and after it cannot be mistaken for one another."""
    c = twins.CASES["llava"]["llava tied"]
    normed, plain = siglip2.Model(VISION), siglip2.Model(VISION, feature_norm=False)
    twins.randomise(normed)
    plain.load_state_dict(normed.state_dict())
    batch = twins.with_labels([twins.document("one", ["cat"], c)])
    args = (batch.patches_PC, batch.places_P2, batch.cu_N1, batch.longest_image)
    x_PD = plain(*args)
    want_PD = F.layer_norm(x_PD, (VISION.width,), normed.norm.weight, normed.norm.bias, VISION.eps)
    close(normed(*args), want_PD, "normed features")
    assert (normed(*args) - x_PD).abs().max() > 0.5
