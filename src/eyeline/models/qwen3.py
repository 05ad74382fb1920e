"""Qwen3 language models (Yang et al. 2025), dense and MoE (`Qwen3ForCausalLM`, `Qwen3MoeForCausalLM`), and those inside Qwen3-VL.

Against Qwen2: no biases, an RMS norm on each query and key head before they are rotated, and a head_dim of its own. MoE
layers have `models/moe.py` in place of the feed-forward layer. Inside Qwen3-VL positions have a row and a column (`mrope_section`).
"""

from collections.abc import Iterator
from functools import partial
from typing import Literal

import torch
from pydantic import model_validator
from torch import nn

from eyeline.core.plan import LanguageSizes
from eyeline.core.settings import Positive, PositiveFloat, Settings
from eyeline.kernels.rope import rope_tables
from eyeline.models import decoder
from eyeline.models.layers import MLP, RMSNorm
from eyeline.models.moe import Experts, MoE


class Config(Settings):
    family: Literal["qwen3"] = "qwen3"
    vocab_size: Positive  # rows of the embedding, padding rows included
    hidden_size: Positive
    layers: Positive
    heads: Positive
    kv_heads: Positive
    head_dim: Positive = 128
    intermediate_size: Positive  # of dense layers
    experts: Experts | None = None
    sparse_every: Positive = 1  # n: every n-th layer has experts
    dense_layers: tuple[int, ...] = ()  # layers, from 0, that have none in any case
    eps: PositiveFloat = 1e-6
    rope_theta: PositiveFloat = 1e6
    mrope_section: tuple[int, int, int] | None = None  # rotary frequencies for time, row, column (Qwen3-VL); None: all for time
    max_positions: Positive = 40960  # positions it was made for
    tie_embeddings: bool  # the head is the embedding

    @model_validator(mode="after")
    def _fits(self) -> "Config":
        decoder.refuse_heads(self.hidden_size, self.heads, self.kv_heads, self.head_dim)
        if self.mrope_section is not None and (sum(self.mrope_section) != self.head_dim // 2 or min(self.mrope_section) < 0):
            raise ValueError(f"mrope_section={self.mrope_section} must add up to {self.head_dim // 2}, half of head_dim={self.head_dim}")
        if self.experts is None and (self.sparse_every > 1 or self.dense_layers):
            raise ValueError("sparse_every and dense_layers say which layers have experts, and experts is not given")
        if self.experts is not None and not any(self.sparse):
            raise ValueError(
                f"experts is given, and sparse_every={self.sparse_every} with dense_layers={self.dense_layers} leave no layer to have them"
            )
        if self.mrope_section is not None and self.experts is not None and not self.experts.norm_topk_prob:
            raise ValueError("experts inside Qwen3-VL have normalised weights; set experts.norm_topk_prob: true")
        return self

    @property
    def sparse(self) -> tuple[bool, ...]:
        """The layers that have experts."""
        dense = [self.experts is None or (i + 1) % self.sparse_every != 0 or i in self.dense_layers for i in range(self.layers)]
        return tuple(not one for one in dense)


def Model(c: Config, compute_dtype: torch.dtype = torch.float32) -> decoder.Decoder:
    tables = partial(rope_tables, head_dim=c.head_dim, theta=c.rope_theta, mrope_section=c.mrope_section)
    return decoder.Decoder(c.vocab_size, c.hidden_size, c.tie_embeddings, _blocks(c), RMSNorm(c.hidden_size, c.eps), tables, compute_dtype)


def _blocks(c: Config) -> Iterator[nn.Module]:
    for sparse in c.sparse:
        attn = decoder.Attention(c.hidden_size, c.heads, c.kv_heads, c.head_dim, biased=False, norm_eps=c.eps)
        if sparse and c.experts is not None:
            yield decoder.ExpertBlock(c.hidden_size, c.eps, attn, MoE(c.experts, c.hidden_size))
        else:
            yield decoder.Block(c.hidden_size, c.eps, attn, MLP(c.hidden_size, c.intermediate_size))


def sizes(c: Config) -> LanguageSizes:
    experts = {} if c.experts is None else {"experts": c.experts.num_experts, "experts_per_token": c.experts.experts_per_token}
    return LanguageSizes(c.layers, c.hidden_size, c.heads, c.kv_heads, **experts)
