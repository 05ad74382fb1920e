"""Qwen2 and Qwen2.5 in Hugging Face's form: tensors and config.json of `Qwen2ForCausalLM`."""

from typing import Any

from eyeline.core.key_rules import KeyRule
from eyeline.models.hf import decoder
from eyeline.models.hf.config_json import (
    LAYERS,
    Json,
    expect,
    expect_model_type,
    flag,
    integer,
    number,
    plain_rope,
    record_of,
    refuse_quantised,
    refuse_windows,
    rope_to_hf,
)
from eyeline.models.qwen2 import Config

MODEL_TYPES = ("qwen2",)
DROPPED: tuple[str, ...] = ()  # what a checkpoint may hold beyond our tensors


def keys(_c: Config) -> tuple[KeyRule, ...]:
    """Our tensors, and their names in a folder of `Qwen2ForCausalLM`."""
    biases = {f"attn.{x}.bias": f"self_attn.{x}_proj.bias" for x in "qkv"}
    return decoder.keys_of(decoder.NORM_NAMES | decoder.ATTENTION_NAMES | biases | decoder.FEED_FORWARD_NAMES)


def from_hf(config_json: Json, where: str = "config.json") -> Config:
    """The model described by a Qwen2 config.json. Keys that it leaves out have the defaults of transformers' class. Raises Refused."""
    expect_model_type(where, config_json, "qwen2", {"qwen3": "a Qwen3 model, which norms its queries and keys"})
    # attention_bias is not one of Qwen2's keys: q, k and v always have one, and a file that denies it means another model
    refuse_quantised(where, config_json)
    expect(where, config_json, {"hidden_act": "silu", "attention_dropout": 0.0, "attention_bias": True})
    layers = integer(where, config_json, "num_hidden_layers", 32, LAYERS)
    heads = integer(where, config_json, "num_attention_heads", 32)
    width = integer(where, config_json, "hidden_size", 4096)
    head_dim = None if config_json.get("head_dim") is None else integer(where, config_json, "head_dim", 0)
    kv_heads = heads if config_json.get("num_key_value_heads", 32) is None else integer(where, config_json, "num_key_value_heads", 32)
    refuse_windows(where, config_json, layers)
    values = {
        "vocab_size": integer(where, config_json, "vocab_size", 151936),
        "hidden_size": width,
        "layers": layers,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": None if head_dim == width // heads else head_dim,
        "intermediate_size": integer(where, config_json, "intermediate_size", 22016),
        "eps": number(where, config_json, "rms_norm_eps", 1e-6),
        "rope_theta": plain_rope(where, config_json, 10_000.0),
        "max_positions": integer(where, config_json, "max_position_embeddings", 32768),
        "tie_embeddings": flag(where, config_json, "tie_word_embeddings", False),
    }
    return record_of(where, Config, values)


def to_hf(c: Config) -> dict[str, Any]:
    """config.json of a `Qwen2ForCausalLM`."""
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads,
        **({} if c.head_dim is None else {"head_dim": c.head_dim}),
        "intermediate_size": c.intermediate_size,
        "hidden_act": "silu",
        "rms_norm_eps": c.eps,
        "attention_dropout": 0.0,
        "max_position_embeddings": c.max_positions,
        **rope_to_hf(c.rope_theta, {"rope_type": "default"}),
        "use_sliding_window": False,
        "tie_word_embeddings": c.tie_embeddings,
    }
