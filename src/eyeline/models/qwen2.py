"""Qwen2 and Qwen2.5 language models (Yang et al. 2024; the reference's class is `Qwen2ForCausalLM`).

A decoder: RMS norms before each branch, grouped-query attention with rotary positions and biases on q, k and v, a gated
feed-forward layer. The decoder is `models/decoder.py`'s.
"""

from functools import partial
from typing import Literal

import torch
from pydantic import model_validator

from eyeline.core.plan import LanguageSizes
from eyeline.core.settings import Positive, PositiveFloat, Settings
from eyeline.kernels.rope import rope_tables
from eyeline.models import decoder
from eyeline.models.layers import MLP, RMSNorm


class Config(Settings):
    family: Literal["qwen2"] = "qwen2"
    vocab_size: Positive  # rows of the embedding, padding rows included
    hidden_size: Positive
    layers: Positive
    heads: Positive
    kv_heads: Positive
    head_dim: Positive | None = None  # None: width / heads
    intermediate_size: Positive
    eps: PositiveFloat = 1e-6
    rope_theta: PositiveFloat = 1e6
    max_positions: Positive = 32768  # positions it was made for
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
            decoder.Attention(c.hidden_size, c.heads, c.kv_heads, c.K, biased=True),
            MLP(c.hidden_size, c.intermediate_size),
        )
        for _ in range(c.layers)
    )
    tables = partial(rope_tables, head_dim=c.K, theta=c.rope_theta)
    return decoder.Decoder(c.vocab_size, c.hidden_size, c.tie_embeddings, blocks, RMSNorm(c.hidden_size, c.eps), tables, compute_dtype)


def sizes(c: Config) -> LanguageSizes:
    return LanguageSizes(c.layers, c.hidden_size, c.heads, c.kv_heads)
