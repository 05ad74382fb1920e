"""Qwen3.5's language models in Hugging Face's form: tensors and config.json of `Qwen3_5ForCausalLM` and `Qwen3_5MoeForCausalLM`."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from eyeline.core.errors import Refused
from eyeline.core.key_rules import KeyRule
from eyeline.models.hf import decoder
from eyeline.models.hf.config_json import (
    LAYERS,
    Json,
    expect,
    flag,
    integer,
    layer_types,
    number,
    record_of,
    refuse_quantised,
    rope,
    rope_to_hf,
)
from eyeline.models.qwen3_5 import Config, LayerType, published

MODEL_TYPES = ("qwen3_5_text", "qwen3_5_moe_text")  # of a language model alone, and of text_config in the vision models
DROPPED = tuple("mtp" + ".*" * pieces for pieces in range(1, 9))  # the layer that predicts a second token ahead


def keys(c: Config) -> tuple[KeyRule, ...]:
    """Our tensors, and their names in a folder of `Qwen3_5ForCausalLM` or `Qwen3_5MoeForCausalLM`."""
    shared = {f"mlp.shared.{x}.weight": f"mlp.shared_expert.{x}_proj.weight" for x in ("gate", "up", "down")}
    shared["mlp.shared_gate.weight"] = "mlp.shared_expert_gate.weight"
    names = decoder.NORM_NAMES | (decoder.FEED_FORWARD_NAMES if c.experts is None else decoder.ROUTER_NAMES | decoder.EXPERT_NAMES | shared)
    fused: tuple[KeyRule, ...] = ()
    if "full_attention" in c.resolved_layer_types:
        names |= decoder.HEAD_NORM_NAMES | {f"attn.{x}.weight": f"self_attn.{x}_proj.weight" for x in "kvo"}
        apart, together = partial(_query_and_gate, head_dim=c.head_dim), partial(_interleaved, head_dim=c.head_dim)
        fused += (_fused("attn.{}.weight", ("q", "gate"), "self_attn.q_proj.weight", apart, together),)
    if "linear_attention" in c.resolved_layer_types:
        theirs = {f"{x}.weight": f"in_proj_{x}.weight" for x in "zab"} | {"o.weight": "out_proj.weight"}
        theirs |= {name: name for name in ("A_log", "dt_bias", "norm.weight")}
        names |= {f"delta.{ours}": f"linear_attn.{name}" for ours, name in theirs.items()}
        channels = [c.delta.key_heads * c.delta.key_dim] * 2 + [c.delta.value_heads * c.delta.value_dim]
        apart, conv_apart = partial(torch.split, split_size_or_sections=channels), partial(_kernels, channels=channels)
        fused += (
            _fused("delta.{}.weight", ("q", "k", "v"), "linear_attn.in_proj_qkv.weight", apart, _stacked),
            _fused("delta.conv_{}.weight", ("q", "k", "v"), "linear_attn.conv1d.weight", conv_apart, _stacked_kernels),
        )
    return (*decoder.keys_of(names), *fused)


def _fused(ours: str, names: tuple[str, ...], theirs: str, read: Any, write: Any) -> KeyRule:
    return KeyRule(tuple(f"blocks.{{i}}.{ours.format(name)}" for name in names), f"model.layers.{{i}}.{theirs}", read, write)


def _query_and_gate(both: Tensor, head_dim: int) -> tuple[Tensor, ...]:
    """Theirs has the gate's rows of a head after the query's rows of that head."""
    return tuple(x.flatten(0, 1) for x in both.unflatten(0, (-1, 2, head_dim)).unbind(1))


def _interleaved(q: Tensor, gate: Tensor, head_dim: int) -> Tensor:
    return torch.stack([x.unflatten(0, (-1, head_dim)) for x in (q, gate)], 1).flatten(0, 2)


def _stacked(*parts: Tensor) -> Tensor:
    return torch.cat(parts)


def _kernels(weight_C1W: Tensor, channels: list[int]) -> tuple[Tensor, ...]:
    return weight_C1W.squeeze(1).split(channels)


def _stacked_kernels(*parts_CW: Tensor) -> Tensor:
    return torch.cat(parts_CW).unsqueeze(1)


# ---- settings


def from_hf(config_json: Json, where: str = "config.json") -> Config:
    """The model described by a config.json of Qwen3.5's language model, or by the text_config of its vision model. Keys that it leaves
    out have the defaults of transformers' class. Raises Refused."""
    type = config_json.get("model_type")
    if type not in MODEL_TYPES:
        raise Refused(f"{where} has model_type={type!r}: Eyeline reads {', '.join(MODEL_TYPES)} here.")
    sparse = type == "qwen3_5_moe_text"
    plain = {"hidden_act": "silu", "attention_dropout": 0.0, "attention_bias": False, "attn_output_gate": True, "output_gate_type": "swish"}
    refuse_quantised(where, config_json)
    expect(where, config_json, plain | {"mlp_only_layers": []})

    def whole(key: str, default: int) -> int:
        return integer(where, config_json, key, default)

    layers = integer(where, config_json, "num_hidden_layers", 40 if sparse else 32, LAYERS)
    values = {
        "vocab_size": whole("vocab_size", 248320),
        "hidden_size": whole("hidden_size", 2048 if sparse else 4096),
        "layers": layers,
        "layer_types": _kinds(where, config_json, layers),
        "heads": whole("num_attention_heads", 16),
        "kv_heads": whole("num_key_value_heads", 2 if sparse else 4),
        "head_dim": whole("head_dim", 256),
        "delta": {
            "key_heads": whole("linear_num_key_heads", 16),
            "value_heads": whole("linear_num_value_heads", 32),
            "key_dim": whole("linear_key_head_dim", 128),
            "value_dim": whole("linear_value_head_dim", 128),
            "conv_kernel": whole("linear_conv_kernel_dim", 4),
        },
        "eps": number(where, config_json, "rms_norm_eps", 1e-6),
        **_rope(where, config_json),
        "max_positions": whole("max_position_embeddings", 32768),
        "tie_embeddings": flag(where, config_json, "tie_word_embeddings", False),
    }
    if not sparse:
        return record_of(where, Config, values | {"intermediate_size": whole("intermediate_size", 12288)})
    experts = {
        "num_experts": whole("num_experts", 256),
        "experts_per_token": whole("num_experts_per_tok", 8),
        "intermediate_size": whole("moe_intermediate_size", 512),
    }
    return record_of(where, Config, values | {"experts": experts, "shared_expert_size": whole("shared_expert_intermediate_size", 512)})


def _kinds(where: str, config_json: Json, layers: int) -> tuple[LayerType, ...] | None:
    known: tuple[LayerType, ...] = ("linear_attention", "full_attention")
    types = layer_types(where, config_json, layers, known) or published(layers, integer(where, config_json, "full_attention_interval", 4))
    return None if tuple(types) == published(layers, 4) else tuple(types)


def _rope(where: str, config_json: Json) -> dict[str, Any]:
    theta, type, others = rope(where, config_json, 10_000.0)
    share = config_json.get("partial_rotary_factor", 0.25)
    others = {"partial_rotary_factor": share, "mrope_section": [11, 11, 10], "mrope_interleaved": True, **others}
    expect(f"rotary positions in {where}", {"rope_type": type, **others}, {"rope_type": "default", "mrope_interleaved": True})
    sections = others["mrope_section"]
    if unknown := sorted(others.keys() - {"partial_rotary_factor", "mrope_section", "mrope_interleaved"}):
        raise Refused(f"rotary positions in {where} have {', '.join(unknown)}; Eyeline computes unscaled ones only. Remove the scaling.")
    if not (isinstance(sections, list | tuple) and len(sections) == 3 and all(isinstance(n, int) for n in sections)):
        raise Refused(f"rotary positions in {where} have mrope_section={sections!r}; wanted three whole numbers. Is the file damaged?")
    return {
        "rope_theta": theta,
        "partial_rotary_factor": number(where, others, "partial_rotary_factor", share),
        "mrope_section": tuple(sections),
    }


def to_hf(c: Config) -> dict[str, Any]:
    """config.json of a `Qwen3_5ForCausalLM` or `Qwen3_5MoeForCausalLM`."""
    if c.experts is None:
        kind = {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text"}
        sizes = {"intermediate_size": c.intermediate_size}
    else:
        kind = {"architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text"}
        sizes = {
            "num_experts": c.experts.num_experts,
            "num_experts_per_tok": c.experts.experts_per_token,
            "moe_intermediate_size": c.experts.intermediate_size,
            "shared_expert_intermediate_size": c.shared_expert_size,
        }
    scaling = {
        "rope_type": "default",
        "partial_rotary_factor": c.partial_rotary_factor,
        "mrope_section": list(c.mrope_section),
        "mrope_interleaved": True,
    }
    return {
        **kind,
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "num_hidden_layers": c.layers,
        "layer_types": list(c.resolved_layer_types),
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_dim,
        "linear_num_key_heads": c.delta.key_heads,
        "linear_num_value_heads": c.delta.value_heads,
        "linear_key_head_dim": c.delta.key_dim,
        "linear_value_head_dim": c.delta.value_dim,
        "linear_conv_kernel_dim": c.delta.conv_kernel,
        **sizes,
        "hidden_act": "silu",
        "rms_norm_eps": c.eps,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "max_position_embeddings": c.max_positions,
        **rope_to_hf(c.rope_theta, scaling),
        "tie_word_embeddings": c.tie_embeddings,
    }
