"""Qwen3.5, dense and MoE (Qwen team 2026; `Qwen3_5ForConditionalGeneration`, `Qwen3_5MoeForConditionalGeneration`).

The design of `qwen_vl.py` with the decoder of Qwen3.5, Gated DeltaNet and gated attention, and without DeepStack.
"""

from typing import Literal

import torch
from pydantic import model_validator

from eyeline.core.plan import Spec
from eyeline.core.settings import Settings
from eyeline.models import qwen3_5, qwen_vision, qwen_vl


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


def spec(c: Config) -> Spec:
    return qwen_vl.spec(c, qwen3_5.sizes(c.language))
