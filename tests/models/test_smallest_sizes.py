"""Sizes of no published model that every config allows: one layer, one head, one expert, one patch, a convolution kernel of one; images of
one visual token; documents of one token or without a label. Against the peers, and packed against one by one."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eyeline.core.batch import IGNORE, Budget, Document
from eyeline.models import hf, llama, llava, qwen2, qwen3, qwen3_5, qwen3_vl, qwen_vision, text
from eyeline.models.moe import Experts
from tests.models import parity
from tests.models.cases import llava as llavas
from tests.models.cases import qwen3_vl as visual
from tests.models.cases import text as texts
from tests.models.parity import Case, document, image

SHAPE: dict[str, Any] = {
    "vocab_size": parity.VOCABULARY, "hidden_size": 24, "layers": 1, "heads": 1, "kv_heads": 1, "head_dim": 8, "intermediate_size": 7,
    "eps": 1e-3, "rope_theta": 100.0, "tie_embeddings": False,
}  # fmt: skip
DELTA = SHAPE | {
    "layers": 2,
    "layer_types": ("linear_attention", "full_attention"),
    "head_dim": 16,
    "partial_rotary_factor": 0.5,
    "mrope_section": (2, 1, 1),
}
TOWER: dict[str, Any] = {"patch": 3, "hidden_size": 8, "layers": 1, "heads": 1, "intermediate_size": 5, "position_grid": 5}


def memories(**how: int) -> qwen3_5.Delta:
    return qwen3_5.Delta(**{"key_heads": 1, "value_heads": 1, "key_dim": 16, "value_dim": 6} | how)


LANGUAGES: dict[str, Any] = {
    "llama, heads of one pair": llama.Config(**SHAPE | {"head_dim": 2}),
    "qwen3, six heads wider than the model": qwen3.Config(**SHAPE | {"heads": 6, "head_dim": 6, "hidden_size": 10, "layers": 2}),
    "qwen3, one expert": qwen3.Config(**SHAPE, experts=Experts(num_experts=1, experts_per_token=1, intermediate_size=5)),
    "qwen3, every expert": qwen3.Config(
        **SHAPE, experts=Experts(num_experts=3, experts_per_token=3, intermediate_size=5, norm_topk_prob=False)
    ),
    "qwen3, more experts than tokens": qwen3.Config(**SHAPE, experts=Experts(num_experts=64, experts_per_token=1, intermediate_size=1)),
    "qwen3_5, a convolution of one tap": qwen3_5.Config(**DELTA, delta=memories(conv_kernel=1)),
    "qwen3_5, seven taps, values of one dim": qwen3_5.Config(
        **DELTA, delta=memories(conv_kernel=7, key_heads=3, value_heads=3, value_dim=1)
    ),
    "qwen3_5, whole heads rotated": qwen3_5.Config(**DELTA | {"partial_rotary_factor": 1.0, "mrope_section": (4, 3, 1)}, delta=memories()),
    "qwen3_5, one expert": qwen3_5.Config(
        **DELTA | {"intermediate_size": None},
        delta=memories(),
        experts=Experts(num_experts=1, experts_per_token=1, intermediate_size=5),
        shared_expert_size=1,
    ),
}
TOWERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a patch a token": ({"merge": 1}, {"mrope_section": (2, 1, 1)}),
    "nine patches a token, one position": ({"merge": 3, "temporal_patch": 1, "position_grid": 1}, {"mrope_section": (1, 3, 0)}),
    "no frequency for time": ({"layers": 2, "deepstack_layers": (0, 1)}, {"mrope_section": (0, 2, 2), "layers": 2}),
    "all frequencies for time": (
        {},
        {"mrope_section": (4, 0, 0), "experts": Experts(num_experts=2, experts_per_token=2, intermediate_size=5)},
    ),
}
LLAVAS = {
    "images of one patch": llava.Config(
        vision=llavas.VISION.model_copy(update={"image_size": 3, "layers": 1}), language=qwen2.Config(**SHAPE), feature_norm=False
    ),
    "features of no block": llava.Config(vision=llavas.VISION, language=qwen2.Config(**SHAPE), feature_layer=0, feature_norm=False),
    "one token an image": llava.Config(
        vision=llavas.EVEN, projector=llava.ProjectorConfig(shuffle=4), language=qwen2.Config(**SHAPE | {"tie_embeddings": True})
    ),
}


def shown(vision: qwen_vision.Config) -> tuple[Document, ...]:
    """Images of one token, of a row of three and of a column of seven; one token of text alone."""
    how, m = {"patch": vision.patch, "merge": vision.merge, "frames": vision.temporal_patch}, vision.merge
    dot, row, column = image("dot", m, m, **how), image("row", m, 3 * m, **how), image("column", 7 * m, m, **how)
    pieces = {"token": (1,), "text": (9,), "first": (dot, 1), "two": (2, dot, 1, row, 1), "tall": (1, column, 2), "again": (1, dot, 3)}
    return tuple(document(name, *content, positions="grid") for name, content in pieces.items())


def qwen3_vl_case(name: str) -> Case:
    vision, language = TOWERS[name]
    c = qwen3_vl.Config(vision=qwen_vision.Config(**TOWER | vision), language=qwen3.Config(**SHAPE | language))
    form = hf.qwen3_vl.form(c)
    config_json = dict(hf.qwen3_vl.to_hf(c, form, visual.TOKENS)["config.json"])
    inputs = visual.inputs_of(c.vision)
    return Case(name, c, lambda: parity.peer_of(config_json), inputs, hf.qwen3_vl.keys(c, form, saved(c)), shown(c.vision))


def saved(c: qwen3_vl.Config) -> dict[str, tuple[int, ...]]:
    """The shapes by which the peer's layout of experts is told."""
    experts, width = c.language.experts, c.language.hidden_size
    if experts is None:
        return {}
    up, down = (experts.num_experts, 2 * experts.intermediate_size, width), (experts.num_experts, width, experts.intermediate_size)
    return {".experts.gate_up_proj": up, ".experts.down_proj": down}


MADE: dict[str, Callable[[], Case]] = {
    **{name: lambda name=name, c=c: texts.case(name, text.Config(language=c)) for name, c in LANGUAGES.items()},
    **{f"qwen3_vl, {name}": lambda name=name: qwen3_vl_case(name) for name in TOWERS},
    **{f"llava, {name}": lambda name=name, c=c: llavas.case(name, c) for name, c in LLAVAS.items()},
}


@pytest.mark.parametrize("name", MADE)
def test_odd_sizes_equal_the_reference(name: str, tmp_path: Path) -> None:
    case = MADE[name]()
    peer, ours = parity.pair(case, tmp_path / "a")
    want, want_logits = parity.reference(case, peer, case.documents)
    batch = parity.batch_of(case.documents, None)
    parity.close(parity.logits_of(ours, batch), want_logits, "logits")
    got, gradients = parity.run_batch(ours, batch)
    parity.close(got, want, "loss")
    want.backward()
    theirs = parity.gradients_of(case, peer, tmp_path / "b")
    parity.all_close(gradients, {n: theirs[n] for n in gradients}, tolerance=5e-5)  # one head's error is not hidden by another's size
    assert all(not case.spec.uses(n) for n in theirs.keys() - gradients.keys())
    parity.same((got, gradients), parity.one_by_one(ours, case.documents))
    parity.same((got, gradients), parity.run(ours, case.documents, Budget(len(batch.tokens_T) + 7, len(batch.patches_PC) + 36)))


@pytest.mark.parametrize("name", MADE)
def test_a_document_without_a_label_changes_nothing(name: str) -> None:
    case = MADE[name]()
    model, (first, other, *_) = parity.randomised(case), case.documents
    silent = replace(other, labels_T=np.full_like(other.labels_T, IGNORE))
    parity.same(parity.run(model, [silent, first]), parity.run(model, [first]))
    loss, gradients = parity.run(model, [silent])
    assert loss == 0
    assert all(not x.any() for x in gradients.values())
    with torch.no_grad():
        assert model(parity.batch_of([silent], None)).out == 0
