"""Qwen3.5, dense and with experts (Qwen team 2026; `Qwen3_5ForConditionalGeneration`, `Qwen3_5MoeForConditionalGeneration`).

The design of `qwen_vl.py` with the decoder of Qwen3.5, Gated DeltaNet and gated attention, and without DeepStack.
"""

from typing import Literal

import torch
from pydantic import model_validator

from eyeline.core.facts import Facts, KeyRule
from eyeline.core.settings import Settings
from eyeline.models import qwen3_5, qwen_vision, qwen_vl
from eyeline.models.forms import NONE, Files, Form, MediaTokens, Shapes
from eyeline.models.hf_config import Json, expect, made, section


class Config(Settings):
    family: Literal["qwen3_5_vl"] = "qwen3_5_vl"
    vision: qwen_vision.Config
    language: qwen3_5.Config

    @model_validator(mode="after")
    def _fits(self) -> "Config":
        if self.vision.deepstack_layers:
            raise ValueError(
                f"vision.deepstack_layers={list(self.vision.deepstack_layers)} is DeepStack, which Qwen3.5 does not have; leave it empty"
            )
        return self


def Model(c: Config, compute_dtype: torch.dtype = torch.float32) -> qwen_vl.Model:
    return qwen_vl.Model(c.vision, qwen3_5.Model(c.language, compute_dtype), compute_dtype)


def facts(c: Config) -> Facts:
    return qwen_vl.facts(c, qwen3_5, keys(c, form(c)))


# ---- Hugging Face's form

ARCHITECTURES = {"qwen3_5": "Qwen3_5ForConditionalGeneration", "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration"}
MODEL_TYPES = tuple(ARCHITECTURES)
PARTS = None  # one class of transformers has every config


def form(c: Config) -> Form:
    return Form("qwen3_5" if c.language.experts is None else "qwen3_5_moe", "Qwen3.5's own class")


def keys(c: Config, _form: Form, found: Shapes = NONE) -> tuple[KeyRule, ...]:
    """The hub has one tensor for all experts of a layer; transformers 5 writes one an expert."""
    language = qwen3_5.keys(c.language)
    apart = any(".experts.0." in name for name in found)
    return qwen_vl.keys(c, language if apart else qwen_vl.fused(language))


def dropped(_c: Config, _form: Form) -> tuple[str, ...]:
    return qwen3_5.DROPPED


def to_hf(c: Config, form: Form, tokens: MediaTokens) -> Files:
    return qwen_vl.to_hf(c, form.name, ARCHITECTURES[form.name], qwen3_5.to_hf(c.language), tokens)


def from_hf(config_json: Json, preprocessor_json: Json | None, video_json: Json | None = None) -> Config:
    expect("vision_config of config.json", section("config.json", config_json, "vision_config"), {"deepstack_visual_indexes": []})
    return made("config.json", Config, qwen_vl.from_hf(config_json, preprocessor_json, video_json, MODEL_TYPES, qwen3_5, deep=()))
