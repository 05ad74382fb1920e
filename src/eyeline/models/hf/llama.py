"""Llama in Hugging Face's form: tensors and config.json of `LlamaForCausalLM`."""

from typing import Any

from eyeline.core.errors import Refused
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
    record_of,
    refuse_quantised,
    rope,
    rope_to_hf,
)
from eyeline.models.llama import Config, RopeScaling

MODEL_TYPES = ("llama",)
DROPPED = ("model.layers.*.self_attn.rotary_emb.inv_freq",)  # in old files: computed, not trained


def keys(_c: Config) -> tuple[KeyRule, ...]:
    """Our tensors, and their names in a folder of `LlamaForCausalLM`."""
    return decoder.keys_of(decoder.NORM_NAMES | decoder.ATTENTION_NAMES | decoder.FEED_FORWARD_NAMES)


def from_hf(config_json: Json, where: str = "config.json") -> Config:
    """The model described by a Llama config.json. Keys that it leaves out have the defaults of transformers' class. Raises Refused."""
    expect_model_type(where, config_json, "llama", {})
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
    return record_of(where, Config, values)


def _scaling(where: str, type: str, scaling: Json) -> RopeScaling | None:
    known = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    if type not in ("default", "llama3"):
        raise Refused(f"{where} have rope_type={type!r}; Eyeline computes default and llama3. Use a checkpoint of these.")
    expect(where, scaling, {"partial_rotary_factor": 1.0})
    wanted = {"partial_rotary_factor", *(known if type == "llama3" else ())}
    if unknown := sorted(scaling.keys() - wanted):
        raise Refused(f"{where} of type {type} have {', '.join(unknown)}; Eyeline does not support these. Remove them.")
    if type == "default":
        return None
    if missing := [key for key in known if key not in scaling]:
        raise Refused(f"{where} of type llama3 have no {', '.join(missing)}. Is the file damaged?")
    factor, low, high = (number(where, scaling, key, 0.0) for key in known[:3])
    original = integer(where, scaling, known[3], 0)
    values = {"factor": factor, "low_freq_factor": low, "high_freq_factor": high, "original_max_positions": original}
    return record_of(where, RopeScaling, values)


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
