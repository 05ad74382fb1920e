"""Qwen3-VL, dense and MoE (Qwen team 2025; `Qwen3VLForConditionalGeneration`, `Qwen3VLMoeForConditionalGeneration`).

The design of `qwen_vl.py` with the decoder of Qwen3: DeepStack, and rotary positions of time, row and column, interleaved.
"""

from typing import Literal

import torch
from pydantic import model_validator

from eyeline.core.plan import Spec
from eyeline.core.settings import Settings
from eyeline.models import qwen3, qwen_vision, qwen_vl


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


def spec(c: Config) -> Spec:
    return qwen_vl.spec(c, qwen3.sizes(c.language))
