"""Qwen3 in Hugging Face's form: tensors and config.json of `Qwen3ForCausalLM`, `Qwen3MoeForCausalLM`, text_config of Qwen3-VL."""

from typing import Any

from eyeline.core.errors import Refused
from eyeline.core.key_rules import KeyRule
from eyeline.models.hf import decoder
from eyeline.models.hf.config_json import (
    LAYERS,
    Json,
    expect,
    flag,
    integer,
    number,
    plain_rope,
    record_of,
    refuse_quantised,
    refuse_windows,
    rope,
    rope_to_hf,
)
from eyeline.models.moe import Experts
from eyeline.models.qwen3 import Config

MODEL_TYPES = ("qwen3", "qwen3_moe", "qwen3_vl_text", "qwen3_vl_moe_text")  # the latter two: text_config of Qwen3-VL
DROPPED: tuple[str, ...] = ()  # what a checkpoint may hold beyond our tensors


def keys(c: Config) -> tuple[KeyRule, ...]:
    """Our tensors, and their names in a folder of `Qwen3ForCausalLM` or `Qwen3MoeForCausalLM`."""
    names = decoder.NORM_NAMES | decoder.ATTENTION_NAMES | decoder.HEAD_NORM_NAMES
    names |= {} if all(c.sparse) else decoder.FEED_FORWARD_NAMES
    return decoder.keys_of(names | (decoder.ROUTER_NAMES | decoder.EXPERT_NAMES if c.experts else {}))


def from_hf(config_json: Json, where: str = "config.json") -> Config:
    """The model described by a config.json of Qwen3, or by Qwen3-VL's text_config. Keys that it leaves out have the defaults of
    transformers' class, which differ between the four. Raises Refused."""
    type = config_json.get("model_type")
    if type not in MODEL_TYPES:
        raise Refused(f"{where} has model_type={type!r}: Eyeline reads {', '.join(MODEL_TYPES)} here.")
    visual, sparse = "_vl_" in type, "moe" in type
    refuse_quantised(where, config_json)
    expect(where, config_json, {"hidden_act": "silu", "attention_dropout": 0.0, "attention_bias": False})
    defaults = _DEFAULTS[type]
    layers = integer(where, config_json, "num_hidden_layers", defaults["num_hidden_layers"], LAYERS)
    heads = integer(where, config_json, "num_attention_heads", defaults["num_attention_heads"])
    width = integer(where, config_json, "hidden_size", defaults["hidden_size"])
    kv_heads = {"num_key_value_heads": defaults["num_key_value_heads"], **config_json}["num_key_value_heads"]
    head_dim = config_json.get("head_dim") or (width // heads if sparse else 128)
    refuse_windows(where, {**config_json, "max_window_layers": 0} if sparse else config_json, layers)  # windows in all layers or none
    values = {
        "vocab_size": integer(where, config_json, "vocab_size", 151936),
        "hidden_size": width,
        "layers": layers,
        "heads": heads,
        "kv_heads": heads if kv_heads is None else integer(where, config_json, "num_key_value_heads", kv_heads),
        "head_dim": integer(where, {"head_dim": head_dim}, "head_dim", 0),
        "intermediate_size": integer(where, config_json, "intermediate_size", defaults["intermediate_size"]),
        "eps": number(where, config_json, "rms_norm_eps", 1e-6),
        "max_positions": integer(where, config_json, "max_position_embeddings", 128000 if visual else 32768),
        "tie_embeddings": flag(where, config_json, "tie_word_embeddings", type == "qwen3_vl_moe_text"),
        **(_visual_rope(where, config_json) if visual else {"rope_theta": plain_rope(where, config_json, 10_000.0)}),
        **(_experts(where, config_json, visual) if sparse else {}),
    }
    return record_of(where, Config, values)


_DEFAULTS = {
    name: dict(zip(("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"), x, strict=True))
    for name, x in {
        "qwen3": (4096, 22016, 32, 32, 32),
        "qwen3_moe": (2048, 6144, 24, 32, 4),
        "qwen3_vl_text": (4096, 22016, 32, 32, 32),
        "qwen3_vl_moe_text": (2048, 5632, 24, 16, 16),
    }.items()
}


def _visual_rope(where: str, config_json: Json) -> dict[str, Any]:
    theta, type, others = rope(where, config_json, 500_000.0)
    others = {"mrope_section": [24, 20, 20], **others}
    plain = {"rope_type": "default", "partial_rotary_factor": 1.0, "mrope_interleaved": True}
    expect(f"rotary positions in {where}", {"rope_type": type, **others}, plain)
    sections = others["mrope_section"]
    if unknown := sorted(others.keys() - plain.keys() - {"mrope_section"}):
        raise Refused(f"rotary positions in {where} have {', '.join(unknown)}; Eyeline computes unscaled ones only. Remove the scaling.")
    if not (isinstance(sections, list | tuple) and len(sections) == 3 and all(isinstance(n, int) for n in sections)):
        raise Refused(f"rotary positions in {where} have mrope_section={sections!r}; wanted three whole numbers. Is the file damaged?")
    return {"rope_theta": theta, "mrope_section": tuple(sections)}


def _experts(where: str, config_json: Json, visual: bool) -> dict[str, Any]:
    count, active, narrow = (60, 4, 1408) if visual else (128, 8, 768)
    renamed = {"num_experts": config_json.get("num_local_experts", count), **config_json}  # transformers 5 writes it under either name
    experts = {
        "num_experts": integer(where, renamed, "num_experts", count),
        "experts_per_token": integer(where, config_json, "num_experts_per_tok", active),
        "intermediate_size": integer(where, config_json, "moe_intermediate_size", narrow),
        "norm_topk_prob": visual or flag(where, config_json, "norm_topk_prob", False),
    }
    dense = config_json.get("mlp_only_layers") or []
    if not (isinstance(dense, list) and all(isinstance(i, int) for i in dense)):
        raise Refused(f"{where} has mlp_only_layers={dense!r}; wanted a list of layer numbers. Is the file damaged?")
    every = integer(where, config_json, "decoder_sparse_step", 1)
    return {"experts": record_of(where, Experts, experts), "sparse_every": every, "dense_layers": tuple(dense)}


def to_hf(c: Config) -> dict[str, Any]:
    """config.json of the `...ForCausalLM` class that computes this; with `mrope_section`, the text_config of Qwen3-VL."""
    name = "qwen3" if c.experts is None else "qwen3_moe"
    scaling: dict[str, Any] = {"rope_type": "default"}
    if c.mrope_section is None:
        kind = {"architectures": ["Qwen3ForCausalLM" if c.experts is None else "Qwen3MoeForCausalLM"], "model_type": name}
    else:
        kind = {"model_type": name.replace("qwen3", "qwen3_vl") + "_text"}
        scaling |= {"mrope_section": list(c.mrope_section), "mrope_interleaved": True}
    experts: dict[str, Any] = {}
    if c.experts is not None:
        experts = {
            "num_experts": c.experts.num_experts,
            "num_experts_per_tok": c.experts.experts_per_token,
            "moe_intermediate_size": c.experts.intermediate_size,
            "decoder_sparse_step": c.sparse_every,
            "mlp_only_layers": list(c.dense_layers),
            **({} if c.mrope_section else {"norm_topk_prob": c.experts.norm_topk_prob}),
        }
    return {
        **kind,
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_dim,
        "intermediate_size": c.intermediate_size,
        "hidden_act": "silu",
        "rms_norm_eps": c.eps,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "max_position_embeddings": c.max_positions,
        **rope_to_hf(c.rope_theta, scaling),
        **({} if c.mrope_section else {"use_sliding_window": False}),
        **experts,
        "tie_word_embeddings": c.tie_embeddings,
    }
