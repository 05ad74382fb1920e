"""Llama 2 and 3 language models (Touvron et al. 2023; the reference's class is `LlamaForCausalLM`), and SmolLM2, which has their shape.

Qwen2 without biases. Llama 3.1 and later scale their rotary frequencies for a longer context (RoPE scaling).
"""

from functools import partial
from typing import Any, Literal

import torch
from pydantic import model_validator

from eyeline.core.errors import Refused
from eyeline.core.facts import KeyRule, Split
from eyeline.core.settings import Positive, PositiveFloat, Settings
from eyeline.kernels.rope import Scaling, rope_tables
from eyeline.models import decoder
from eyeline.models.hf_config import LAYERS, Json, expect, flag, integer, kind, made, number, refuse_quantised, rope, rope_to_hf
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


def blocks(_c: Config) -> str:
    return decoder.BLOCKS


def linears(_c: Config) -> dict[str, str]:
    return decoder.ATTENTION | decoder.FEED_FORWARD


def splits(c: Config) -> dict[str, Split]:
    return decoder.splits_of(linears(c))


def seams(_c: Config) -> tuple[str, ...]:
    return (decoder.ATTEND,)


def experts(_c: Config) -> str | None:
    return None


# ---- Hugging Face's names and settings

MODEL_TYPES = ("llama",)
DROPPED = ("model.layers.*.self_attn.rotary_emb.inv_freq",)  # in files of old: computed, not learned


def keys(_c: Config) -> tuple[KeyRule, ...]:
    """Our tensors, and their names in a folder of `LlamaForCausalLM`."""
    return decoder.keys_of(decoder.NORM_NAMES | decoder.ATTENTION_NAMES | decoder.FEED_FORWARD_NAMES)


def from_hf(config_json: Json, where: str = "config.json") -> Config:
    """The model described by a Llama config.json. Keys that it leaves out have the defaults of transformers' class. Raises Refused."""
    kind(where, config_json, "llama", {})
    refuse_quantised(where, config_json)
    others = {"hidden_act": "silu", "attention_dropout": 0.0, "attention_bias": False, "mlp_bias": False}
    expect(where, config_json, others)
    width, heads = integer(where, config_json, "hidden_size", 4096), integer(where, config_json, "num_attention_heads", 32)
    head_dim = None if config_json.get("head_dim") is None else integer(where, config_json, "head_dim", 0)
    theta, type, scaling = rope(where, config_json, 10_000.0)
    values = {
        "vocab_size": integer(where, config_json, "vocab_size", 32000),
        "hidden_size": width,
        "layers": integer(where, config_json, "num_hidden_layers", 32, LAYERS),
        "heads": heads,
        "kv_heads": heads if config_json.get("num_key_value_heads") is None else integer(where, config_json, "num_key_value_heads", 0),
        "head_dim": None if head_dim == width // heads else head_dim,
        "intermediate_size": integer(where, config_json, "intermediate_size", 11008),
        "eps": number(where, config_json, "rms_norm_eps", 1e-6),
        "rope_theta": theta,
        "rope_scaling": _scaling(f"rotary positions in {where}", type, scaling),
        "max_positions": integer(where, config_json, "max_position_embeddings", 2048),
        "tie_embeddings": flag(where, config_json, "tie_word_embeddings", False),
    }
    return made(where, Config, values)


def _scaling(where: str, type: str, scaling: Json) -> RopeScaling | None:
    known = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    if type not in ("default", "llama3"):
        raise Refused(f"{where} have rope_type={type!r}; Eyeline computes default and llama3. Use a checkpoint of these.")
    expect(where, scaling, {"partial_rotary_factor": 1.0})
    wanted = {"partial_rotary_factor", *(known if type == "llama3" else ())}
    if unknown := sorted(scaling.keys() - wanted):
        raise Refused(f"{where} of type {type} have {', '.join(unknown)}; Eyeline does not know what to do with that. Remove it.")
    if type == "default":
        return None
    if missing := [key for key in known if key not in scaling]:
        raise Refused(f"{where} of type llama3 have no {', '.join(missing)}. Is the file damaged?")
    factor, low, high = (number(where, scaling, key, 0.0) for key in known[:3])
    original = integer(where, scaling, known[3], 0)
    values = {"factor": factor, "low_freq_factor": low, "high_freq_factor": high, "original_max_positions": original}
    return made(where, RopeScaling, values)


def to_hf(c: Config) -> dict[str, Any]:
    """config.json of a `LlamaForCausalLM`."""
    scaling: dict[str, Any] = {"rope_type": "default"}
    if c.rope_scaling is not None:
        scaling = {
            "rope_type": "llama3",
            "factor": c.rope_scaling.factor,
            "low_freq_factor": c.rope_scaling.low_freq_factor,
            "high_freq_factor": c.rope_scaling.high_freq_factor,
            "original_max_position_embeddings": c.rope_scaling.original_max_positions,
        }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads,
        **({} if c.head_dim is None else {"head_dim": c.head_dim}),
        "intermediate_size": c.intermediate_size,
        "hidden_act": "silu",
        "rms_norm_eps": c.eps,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "max_position_embeddings": c.max_positions,
        **rope_to_hf(c.rope_theta, scaling),
        "tie_word_embeddings": c.tie_embeddings,
    }
