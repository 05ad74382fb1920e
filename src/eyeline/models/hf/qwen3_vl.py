"""Qwen3-VL in Hugging Face's form: `Qwen3VLForConditionalGeneration` and `Qwen3VLMoeForConditionalGeneration`."""

from eyeline.core.key_rules import KeyRule
from eyeline.models.hf import qwen3, qwen_vl
from eyeline.models.hf.config_json import Json, record_of
from eyeline.models.hf.forms import NONE, Files, Form, MediaTokens, Shapes
from eyeline.models.qwen3_vl import Config

ARCHITECTURES = {"qwen3_vl": "Qwen3VLForConditionalGeneration", "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration"}
MODEL_TYPES = tuple(ARCHITECTURES)
PARTS = None  # one class of transformers has every config


def form(c: Config) -> Form:
    return Form("qwen3_vl" if c.language.experts is None else "qwen3_vl_moe", "Qwen3-VL's own class")


def keys(c: Config, _form: Form, found: Shapes = NONE) -> tuple[KeyRule, ...]:
    """The hub has experts [E, D, 2·F] and [E, F, D], and so do we write them; transformers 5 writes [E, 2·F, D] and [E, D, F]. It tells
    them apart by their shapes, and takes equal sides for its own."""
    if c.language.experts is None:
        return qwen_vl.keys(c, qwen3.keys(c.language))
    width, narrow = c.language.hidden_size, c.language.experts.intermediate_size

    def turned(name: str, first: int, second: int) -> bool:
        rows = next((shape[1] for theirs, shape in found.items() if theirs.endswith(name)), first)
        return rows == first != second

    turn_up, turn_down = turned(".gate_up_proj", width, 2 * narrow), turned(".down_proj", narrow, width)
    return qwen_vl.keys(c, qwen_vl.fused(qwen3.keys(c.language), turn_up, turn_down))


def dropped(_c: Config, _form: Form) -> tuple[str, ...]:
    return ()


def to_hf(c: Config, form: Form, tokens: MediaTokens) -> Files:
    return qwen_vl.to_hf(c, form.name, ARCHITECTURES[form.name], qwen3.to_hf(c.language), tokens)


def from_hf(config_json: Json, preprocessor_json: Json | None, video_json: Json | None = None) -> Config:
    parts = qwen_vl.from_hf(config_json, preprocessor_json, video_json, MODEL_TYPES, qwen3, deep=(8, 16, 24))
    return record_of("config.json", Config, parts)
