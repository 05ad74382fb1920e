"""Qwen3.5 with images in Hugging Face's form: `Qwen3_5ForConditionalGeneration` and `Qwen3_5MoeForConditionalGeneration`."""

from eyeline.core.key_rules import KeyRule
from eyeline.models.hf import qwen3_5, qwen_vl
from eyeline.models.hf.config_json import Json, expect, record_of, section
from eyeline.models.hf.forms import NONE, Files, Form, MediaTokens, Shapes
from eyeline.models.qwen3_5_vl import Config

ARCHITECTURES = {"qwen3_5": "Qwen3_5ForConditionalGeneration", "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration"}
MODEL_TYPES = tuple(ARCHITECTURES)
PARTS = None  # one class of transformers has every config


def form(c: Config) -> Form:
    return Form("qwen3_5" if c.language.experts is None else "qwen3_5_moe", "Qwen3.5's own class")


def keys(c: Config, _form: Form, found: Shapes = NONE) -> tuple[KeyRule, ...]:
    """The hub has one tensor for all experts of a layer; transformers 5 writes one per expert."""
    language = qwen3_5.keys(c.language)
    apart = any(".experts.0." in name for name in found)
    return qwen_vl.keys(c, language if apart else qwen_vl.fused(language))


def dropped(_c: Config, _form: Form) -> tuple[str, ...]:
    return qwen3_5.DROPPED


def to_hf(c: Config, form: Form, tokens: MediaTokens) -> Files:
    return qwen_vl.to_hf(c, form.name, ARCHITECTURES[form.name], qwen3_5.to_hf(c.language), tokens)


def from_hf(config_json: Json, preprocessor_json: Json | None, video_json: Json | None = None) -> Config:
    expect("vision_config of config.json", section("config.json", config_json, "vision_config"), {"deepstack_visual_indexes": []})
    return record_of("config.json", Config, qwen_vl.from_hf(config_json, preprocessor_json, video_json, MODEL_TYPES, qwen3_5, deep=()))
