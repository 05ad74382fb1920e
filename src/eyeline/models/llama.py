"""Llama 2 and 3 language models (Touvron et al. 2023; the reference's class is `LlamaForCausalLM`), and SmolLM2, which has their shape.

Qwen2 without biases. Llama 3.1 and later scale their rotary frequencies for a longer context (RoPE scaling).
"""

from functools import partial
from typing import Literal

import torch
from pydantic import model_validator

from eyeline.core.plan import LanguageSizes
from eyeline.core.settings import Positive, PositiveFloat, Settings
from eyeline.kernels.rope import Scaling, rope_tables
from eyeline.models import decoder
from eyeline.models.layers import MLP, RMSNorm


class RopeScaling(Settings):
    """Rotary positions of Llama 3.1 (`rope_type: llama3`): see `kernels/rope.py: Scaling`."""

    factor: PositiveFloat
    low_freq_factor: PositiveFloat = 1.0
    high_freq_factor: PositiveFloat = 4.0
    original_max_positions: Positive = 8192

    @model_validator(mode="after")
    def _fits(self) -> "RopeScaling":
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"rope_scaling.low_freq_factor={self.low_freq_factor} must be below rope_scaling.high_freq_factor={self.high_freq_factor}"
            )
        return self


class Config(Settings):
    family: Literal["llama"] = "llama"
    vocab_size: Positive  # rows of the embedding, padding rows included
    hidden_size: Positive
    layers: Positive
    heads: Positive
    kv_heads: Positive
    head_dim: Positive | None = None  # None: width / heads
    intermediate_size: Positive
    eps: PositiveFloat = 1e-6
    rope_theta: PositiveFloat = 1e4
    rope_scaling: RopeScaling | None = None
    max_positions: Positive = 2048  # positions it was made for
    tie_embeddings: bool  # the head is the embedding

    @model_validator(mode="after")
    def _fits(self) -> "Config":
        decoder.refuse_heads(self.hidden_size, self.heads, self.kv_heads, self.head_dim)
        return self

    @property
    def K(self) -> int:
        return self.head_dim or self.hidden_size // self.heads


def Model(c: Config, compute_dtype: torch.dtype = torch.float32) -> decoder.Decoder:
    blocks = (
        decoder.Block(
            c.hidden_size,
            c.eps,
            decoder.Attention(c.hidden_size, c.heads, c.kv_heads, c.K, biased=False),
            MLP(c.hidden_size, c.intermediate_size),
        )
        for _ in range(c.layers)
    )
    scaling = None if (s := c.rope_scaling) is None else Scaling(s.factor, s.low_freq_factor, s.high_freq_factor, s.original_max_positions)
    tables = partial(rope_tables, head_dim=c.K, theta=c.rope_theta, scaling=scaling)
    return decoder.Decoder(c.vocab_size, c.hidden_size, c.tie_embeddings, blocks, RMSNorm(c.hidden_size, c.eps), tables, compute_dtype)


def sizes(c: Config) -> LanguageSizes:
    return LanguageSizes(c.layers, c.hidden_size, c.heads, c.kv_heads)
