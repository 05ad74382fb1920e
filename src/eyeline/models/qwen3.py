"""Qwen3 language models (Yang et al. 2025), dense and of experts (`Qwen3ForCausalLM`, `Qwen3MoeForCausalLM`), and those inside Qwen3-VL.

Against Qwen2: no biases, an RMS norm on each query and key head before they are rotated, and a head width of its own. Layers of
experts have `models/moe.py` in place of the feed-forward layer. Inside Qwen3-VL positions have a row and a column (`mrope_section`).
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, Literal

import torch
from pydantic import model_validator
from torch import nn

from eyeline.core.errors import Refused
from eyeline.core.facts import KeyRule, Split
from eyeline.core.settings import Positive, PositiveFloat, Settings
from eyeline.kernels.rope import rope_tables
from eyeline.models import decoder
from eyeline.models.hf_config import (
    LAYERS,
    Json,
    expect,
    flag,
    integer,
    made,
    number,
    plain_rope,
    refuse_quantised,
    refuse_windows,
    rope,
    rope_to_hf,
)
from eyeline.models.layers import MLP, RMSNorm
from eyeline.models.moe import DISPATCH, EXPERT_NAMES, EXPERTS, ROUTER_NAMES, Experts, MoE


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
    sparse_every: Positive = 1  # each so many-th layer has experts
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
        """Which layers have experts."""
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


def blocks(_c: Config) -> str:
    return decoder.BLOCKS


def linears(c: Config) -> dict[str, str]:
    return decoder.ATTENTION | ({} if all(c.sparse) else decoder.FEED_FORWARD)


def splits(c: Config) -> dict[str, Split]:
    return decoder.splits_of(linears(c))


def seams(c: Config) -> tuple[str, ...]:
    return (decoder.ATTEND, *((DISPATCH,) if c.experts else ()))


def experts(c: Config) -> str | None:
    return EXPERTS if c.experts else None


# ---- Hugging Face's names and settings

MODEL_TYPES = ("qwen3", "qwen3_moe", "qwen3_vl_text", "qwen3_vl_moe_text")  # the latter two: text_config of Qwen3-VL
DROPPED: tuple[str, ...] = ()  # what a checkpoint may hold beyond our tensors


def keys(c: Config) -> tuple[KeyRule, ...]:
    """Our tensors, and their names in a folder of `Qwen3ForCausalLM` or `Qwen3MoeForCausalLM`."""
    names = decoder.NORM_NAMES | decoder.ATTENTION_NAMES | decoder.HEAD_NORM_NAMES
    names |= {} if all(c.sparse) else decoder.FEED_FORWARD_NAMES
    return decoder.keys_of(names | (ROUTER_NAMES | EXPERT_NAMES if c.experts else {}))


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
    return made(where, Config, values)


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
    return {"experts": made(where, Experts, experts), "sparse_every": every, "dense_layers": tuple(dense)}


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
