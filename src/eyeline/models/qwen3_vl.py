"""Qwen3-VL, dense and with experts (Qwen team 2025; `Qwen3VLForConditionalGeneration`, `Qwen3VLMoeForConditionalGeneration`).

The design of `qwen_vl.py` with the decoder of Qwen3: DeepStack, and rotary positions of time, row and column, interleaved.
"""

from typing import Literal

import torch
from pydantic import model_validator

from eyeline.core.facts import Facts, KeyRule
from eyeline.core.settings import Settings
from eyeline.models import qwen3, qwen_vision, qwen_vl
from eyeline.models.forms import NONE, Files, Form, MediaTokens, Shapes
from eyeline.models.hf_config import Json, made


class Config(Settings):
    family: Literal["qwen3_vl"] = "qwen3_vl"
    vision: qwen_vision.Config
    language: qwen3.Config

    @model_validator(mode="after")
    def _fits(self) -> "Config":
        if self.language.mrope_section is None:
            raise ValueError(
                "language.mrope_section must share the rotary frequencies among time, row and column; Qwen3-VL's are 24, 20, 20"
            )
        if len(self.vision.deepstack_layers) > self.language.layers:
            raise ValueError(
                f"vision.deepstack_layers has {len(self.vision.deepstack_layers)} blocks, and the language model only "
                f"layers={self.language.layers}"
            )
        return self


def Model(c: Config, compute_dtype: torch.dtype = torch.float32) -> qwen_vl.Model:
    return qwen_vl.Model(c.vision, qwen3.Model(c.language, compute_dtype), compute_dtype)


def facts(c: Config) -> Facts:
    return qwen_vl.facts(c, qwen3, keys(c, form(c)))


# ---- Hugging Face's form

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
    return made("config.json", Config, parts)
