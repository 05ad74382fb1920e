"""Qwen3-VL and Qwen3.5 on disk: the hub's layout of experts, settings that come back, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from eyeline.checkpoint.tensors import entries_in, renamed, write_folder
from eyeline.core.errors import Refused
from eyeline.models import hf, qwen3_vl
from eyeline.models.hf import mapping_of
from eyeline.models.shape import build
from tests.models import parity
from tests.models.cases import CASES
from tests.models.cases.qwen3_vl import SPARSE, TOKENS, VISION, inputs_of, language
from tests.models.parity import Case, close
from tests.weights import load_into

CONFIGS = [case for family in ("qwen3_vl", "qwen3_5_vl") for case in CASES[family]]


def files(c: qwen3_vl.Config) -> dict[str, dict]:
    return {name: dict(content) for name, content in hf.qwen3_vl.to_hf(c, hf.qwen3_vl.form(c), TOKENS).items()}


def through_the_hubs_layout(c: Any, shapes: dict[str, tuple[int, ...]], folder: Path) -> None:
    """Written as we write it, experts in these shapes; read by transformers' class and by ours, to the same logits."""
    mapping, documents = mapping_of(c), CASES[c.family][0].documents
    form, ours = mapping.form(c), build(c, "cpu").eval()
    parity.randomise(ours)
    write_folder(folder, renamed(((name, p.detach()) for name, p in ours.named_parameters()), mapping.keys(c, form)))
    config = dict(mapping.to_hf(c, form, TOKENS)["config.json"])
    (folder / "config.json").write_text(json.dumps(config))

    there = {name: entry.shape for name, entry in entries_in(folder).items()}
    layer = "model.language_model.layers.1.mlp.experts."
    assert {name.removeprefix(layer): shape for name, shape in there.items() if name.startswith(layer)} == shapes
    reference, info = getattr(transformers, config["architectures"][0]).from_pretrained(folder, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    again = build(c, "cpu").eval()
    load_into(dict(again.named_parameters()), folder, mapping.keys(c, form, there))
    case = Case("", c, lambda: reference, inputs_of(c.vision), (), documents)
    with torch.no_grad():
        logits = parity.logits_of(ours, parity.batch_of(documents, None))
        close(logits, parity.reference(case, reference, documents)[1], "logits")
        assert torch.equal(logits, parity.logits_of(again, parity.batch_of(documents, None)))


@pytest.mark.parametrize("narrow", [8, 12, 24], ids=["I < D/2", "D = 2·I", "D = I"])
def test_experts_of_qwen3_vl_as_the_hub_has_them(narrow, tmp_path):
    """Turned, but for sides that are equal: transformers takes those for its own layout."""
    experts = SPARSE.model_copy(update={"intermediate_size": narrow})
    c = qwen3_vl.Config(vision=VISION, language=language(tie_embeddings=False, experts=experts))
    through_the_hubs_layout(c, {"gate_up_proj": (6, 24, 2 * narrow), "down_proj": (6, narrow, 24)}, tmp_path)


def test_experts_of_qwen3_5_as_the_hub_has_them(tmp_path):
    """Its class saves them one by one; the cases of every family have them so."""
    c = next(case.config for case in CASES["qwen3_5_vl"] if case.id == "experts")
    through_the_hubs_layout(c, {"gate_up_proj": (6, 16, 24), "down_proj": (6, 24, 8)}, tmp_path)


@pytest.mark.parametrize("case", CONFIGS, ids=[case.id for case in CONFIGS])
def test_settings_come_back(case):
    vision = case.config.vision.model_copy(update={"min_pixels": 12, "max_pixels": 345, "video_min_pixels": 67, "video_max_pixels": 890})
    c, mapping = case.config.model_copy(update={"vision": vision}), mapping_of(case.config)
    written = mapping.to_hf(c, mapping.form(c), TOKENS)
    stored = {name: json.loads(json.dumps(content)) for name, content in written.items()}
    assert mapping.from_hf(stored["config.json"], stored["preprocessor_config.json"], stored["video_preprocessor_config.json"]) == c
    assert stored["config.json"]["model_type"] in mapping.MODEL_TYPES


def test_limits_of_published_checkpoints_where_files_are_missing():
    c = qwen3_vl.Config(vision=VISION, language=language(tie_embeddings=True))
    found = hf.qwen3_vl.from_hf(files(c)["config.json"], None).vision
    assert (found.min_pixels, found.max_pixels, found.video_min_pixels, found.video_max_pixels) == (65_536, 16_777_216, 4_096, 25_165_824)


@pytest.mark.parametrize(
    ("where", "change", "says"),
    [
        (None, {"model_type": "qwen2_5_vl"}, "qwen3_vl and qwen3_vl_moe"),
        (None, {"quantization_config": {"bits": 4}}, "quantization_config"),
        (None, {"vision_config": None}, "no vision_config"),
        ("text_config", {"model_type": "qwen3_vl_moe_text"}, "qwen3_vl_text"),
        ("text_config", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "yarn"),
        ("text_config", {"attention_bias": True}, "attention_bias"),
        ("vision_config", {"out_hidden_size": 25}, "out_hidden_size=25"),
        ("vision_config", {"hidden_act": "silu"}, "hidden_act"),
        ("vision_config", {"deepstack_visual_indexes": [0, 1, 2, 3]}, "below layers"),
    ],
)
def test_another_model_is_refused(where, change, says):
    config = files(qwen3_vl.Config(vision=VISION, language=language(tie_embeddings=True)))["config.json"]
    config |= change if where is None else {where: config[where] | change}
    with pytest.raises(Refused, match=says):
        hf.qwen3_vl.from_hf(config, None)


def test_ties_are_what_the_whole_folder_says():
    """As the reference reads it: text_config may say otherwise."""
    config = files(qwen3_vl.Config(vision=VISION, language=language(tie_embeddings=True)))["config.json"]
    config["text_config"]["tie_word_embeddings"] = False
    assert hf.qwen3_vl.from_hf(config, None).language.tie_embeddings
    del config["tie_word_embeddings"]
    config["text_config"]["tie_word_embeddings"] = True
    assert not hf.qwen3_vl.from_hf(config, None).language.tie_embeddings


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"language": language(tie_embeddings=True).model_copy(update={"mrope_section": None})}, "mrope_section"),
        ({"language": language(tie_embeddings=True).model_copy(update={"layers": 1})}, "layers=1"),
    ],
)
def test_contradictions_are_named(change, says):
    c = qwen3_vl.Config(vision=VISION, language=language(tie_embeddings=True))
    with pytest.raises(ValueError, match=says):
        qwen3_vl.Config(**({"vision": c.vision, "language": c.language} | change))
