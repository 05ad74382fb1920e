"""Qwen2 and Qwen2.5 language models (Yang et al. 2024; the reference's class is `Qwen2ForCausalLM`).

A decoder: RMS norms before each branch, grouped-query attention with rotary positions and biases on q, k and v, a gated
feed-forward layer. All documents of a batch lie end to end and see only themselves.

Dims: T tokens  S documents  D width  H query heads  G key/value heads  K head dim  F feed-forward  V vocabulary  L wanted rows
"""

from typing import Any, cast

import torch
from pydantic import model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from eyeline.core.errors import Refused
from eyeline.core.facts import KeyRule, Split
from eyeline.core.settings import Positive, PositiveFloat, Settings
from eyeline.kernels.attention import LayerCache
from eyeline.kernels.cross_entropy import summed_cross_entropy
from eyeline.kernels.rope import rope_tables, rotate
from eyeline.models.hf_config import Json, expect, integer, kind, made, number
from eyeline.models.layers import Attend, Linear, RMSNorm, normal_, run_block


class Config(Settings):
    vocabulary: Positive  # rows of the embedding, padding rows included
    width: Positive
    layers: Positive
    heads: Positive
    kv_heads: Positive
    head_dim: Positive | None = None  # None: width / heads
    feed_forward: Positive
    eps: PositiveFloat = 1e-6
    rope_theta: PositiveFloat = 1e6
    longest: Positive = 32768  # positions it was made for
    tied: bool  # the head is the embedding

    @model_validator(mode="after")
    def _fits(self) -> "Config":
        if self.head_dim is None and self.width % self.heads:
            raise ValueError(f"heads={self.heads} must divide width={self.width}, or head_dim must be given")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads={self.kv_heads} must divide heads={self.heads}")
        if self.K % 2:
            raise ValueError(f"head_dim={self.K} must be even: rotary positions turn pairs")
        return self

    @property
    def K(self) -> int:
        return self.head_dim or self.width // self.heads


class Attention(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.K = c.K
        self.q = Linear(c.width, c.heads * c.K)
        self.k, self.v = Linear(c.width, c.kv_heads * c.K), Linear(c.width, c.kv_heads * c.K)
        self.o = Linear(c.heads * c.K, c.width, bias=False)
        self.attend = Attend(causal=True)

    def forward(self, x_TD: Tensor, cos_TK: Tensor, sin_TK: Tensor, cu_S1: Tensor, longest: int, cache: LayerCache | None = None) -> Tensor:
        # -1, not H or G: under tensor parallelism a rank holds some of the heads
        q_THK, k_TGK, v_TGK = (project(x_TD).unflatten(-1, (-1, self.K)) for project in (self.q, self.k, self.v))
        q_THK, k_TGK = rotate(q_THK, cos_TK, sin_TK), rotate(k_TGK, cos_TK, sin_TK)
        return self.o(self.attend(q_THK, k_TGK, v_TGK, cu_S1, longest, cache).flatten(1))


class MLP(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.gate, self.up = Linear(c.width, c.feed_forward, bias=False), Linear(c.width, c.feed_forward, bias=False)
        self.down = Linear(c.feed_forward, c.width, bias=False)

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x_TD)) * self.up(x_TD))


class Block(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(c.width, c.eps), RMSNorm(c.width, c.eps)
        self.attn, self.mlp = Attention(c), MLP(c)

    def forward(self, x_TD: Tensor, cos_TK: Tensor, sin_TK: Tensor, cu_S1: Tensor, longest: int, cache: LayerCache | None = None) -> Tensor:
        x_TD = x_TD + self.attn(self.norm1(x_TD), cos_TK, sin_TK, cu_S1, longest, cache)
        return x_TD + self.mlp(self.norm2(x_TD))


class Head(nn.Module):
    """The way back to the vocabulary. Its forward returns what the caller wants of it, so that hooks on `forward` suffice."""

    def __init__(self, c: Config):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(c.vocabulary, c.width))

    def forward(self, x_TD: Tensor, rows_L: Tensor, labels_L: Tensor | None) -> Tensor:
        """With labels: their summed cross-entropy. Without: logits_LV in float32. Only the rows asked for are touched."""
        x_LD = x_TD[rows_L]
        if labels_L is not None:
            return summed_cross_entropy(x_LD, self.weight, labels_L)
        return F.linear(x_LD, self.weight.to(x_LD.dtype)).float()


class Model(nn.Module):
    def __init__(self, c: Config, compute_dtype: torch.dtype = torch.float32):
        super().__init__()
        self.K, self.rope_theta, self.tied = c.K, c.rope_theta, c.tied
        self.compute_dtype = compute_dtype
        self.recompute = False
        self.embed = nn.Embedding(c.vocabulary, c.width)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.norm = RMSNorm(c.width, c.eps)
        self.head = Head(c)
        self.tie()

    def tie(self) -> None:
        """Make the head's weight *the same tensor* as the embedding's, where the config says so.

        To be called again after anything that replaces parameters, such as `to_empty` of a model made on the meta device.
        """
        if self.tied:
            self.head.weight = cast(nn.Parameter, self.embed.weight)  # torch's stub says Tensor; Embedding makes a Parameter

    def embedded(self, tokens_T: Tensor) -> Tensor:
        return self.embed(tokens_T).to(self.compute_dtype)

    def forward(
        self,
        x_TD: Tensor,
        position_T: Tensor,
        cu_S1: Tensor,
        longest: int,
        rows_L: Tensor,
        labels_L: Tensor | None,
        cache: list[LayerCache] | None = None,
    ) -> Tensor:
        """Embedded tokens (and spliced visual ones) -> summed loss, or logits_LV where there are no labels."""
        cos_TK, sin_TK = rope_tables(position_T, self.K, self.rope_theta)
        for i, block in enumerate(self.blocks):
            x_TD = run_block(block, self.recompute, x_TD, cos_TK, sin_TK, cu_S1, longest, cache and cache[i])
        return self.head(self.norm(x_TD), rows_L, labels_L)

    @torch.no_grad()
    def initialise(self, rng: torch.Generator) -> None:
        """From scratch: each residual branch starts at zero, so that a block starts as the identity; the embedding is small,
        so that an untrained model's loss is near ln(vocabulary)."""
        for name, parameter in self.named_parameters():
            leaf = name.rsplit(".", 1)[-1]
            if leaf == "bias" or name.endswith(("attn.o.weight", "mlp.down.weight")):
                parameter.zero_()
            elif "norm" in name:
                parameter.fill_(1.0)
            elif name.startswith(("embed.", "head.")):
                normal_(parameter, 0.02, rng)
            else:
                normal_(parameter, parameter.shape[1] ** -0.5, rng)


BLOCKS = "blocks.*"
LINEARS = {
    **{name: f"blocks.*.attn.{name}" for name in ("q", "k", "v", "o")},
    **{name: f"blocks.*.mlp.{name}" for name in ("gate", "up", "down")},
}
SPLITS: dict[str, Split] = {LINEARS[name]: "split_out" for name in ("q", "k", "v", "gate", "up")}
SPLITS |= {LINEARS[name]: "split_in" for name in ("o", "down")}
SEAMS = ("blocks.*.attn.attend",)


_THEIRS = {
    "norm1.weight": "input_layernorm.weight",
    **{f"attn.{x}.{leaf}": f"self_attn.{x}_proj.{leaf}" for x in "qkv" for leaf in ("weight", "bias")},
    "attn.o.weight": "self_attn.o_proj.weight",
    "norm2.weight": "post_attention_layernorm.weight",
    **{f"mlp.{x}.weight": f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")},
}
KEYS = (  # our tensors, and their names in a folder of `Qwen2ForCausalLM`
    KeyRule("embed.weight", "model.embed_tokens.weight"),
    *(KeyRule(f"blocks.{{i}}.{ours}", f"model.layers.{{i}}.{theirs}") for ours, theirs in _THEIRS.items()),
    KeyRule("norm.weight", "model.norm.weight"),
    KeyRule("head.weight", "lm_head.weight"),  # of a tied model it is the embedding, and most files leave it out
)


# ---- Hugging Face's settings


def from_hf(config_json: Json, where: str = "config.json") -> Config:
    """The model described by a Qwen2 config.json. Keys that it leaves out have the defaults of transformers' class. Raises Refused."""
    kind(where, config_json, "qwen2", {"qwen3": "a Qwen3 model, which norms its queries and keys; this version reads Qwen2 and Qwen2.5"})
    # attention_bias is not one of Qwen2's keys: q, k and v always have one, and a file that denies it means another model
    expect(where, config_json, {"hidden_act": "silu", "attention_dropout": 0.0, "attention_bias": True, "quantization_config": None})
    layers, heads = integer(where, config_json, "num_hidden_layers", 32), integer(where, config_json, "num_attention_heads", 32)
    width = integer(where, config_json, "hidden_size", 4096)
    head_dim = None if config_json.get("head_dim") is None else integer(where, config_json, "head_dim", 0)
    kv_heads = heads if config_json.get("num_key_value_heads", 32) is None else integer(where, config_json, "num_key_value_heads", 32)
    _refuse_windows(where, config_json, layers)
    tied = config_json.get("tie_word_embeddings", False)
    if not isinstance(tied, bool):
        raise Refused(f"{where} has tie_word_embeddings={tied!r}; wanted true or false. Is the file damaged?")
    values = {
        "vocabulary": integer(where, config_json, "vocab_size", 151936),
        "width": width,
        "layers": layers,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": None if head_dim == width // heads else head_dim,
        "feed_forward": integer(where, config_json, "intermediate_size", 22016),
        "eps": number(where, config_json, "rms_norm_eps", 1e-6),
        "rope_theta": _rope_theta(where, config_json),
        "longest": integer(where, config_json, "max_position_embeddings", 32768),
        "tied": tied,
    }
    return made(where, Config, values)


def _rope_theta(where: str, config_json: Json) -> float:
    """The base of plain rotary positions: `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (4)."""
    scaled = {**(config_json.get("rope_scaling") or {}), **(config_json.get("rope_parameters") or {})}
    plain = {"rope_type": "default", "type": "default", "partial_rotary_factor": 1.0}
    expect(f"rotary positions in {where}", scaled, plain)
    unknown = sorted(scaled.keys() - plain.keys() - {"rope_theta"})
    if unknown:
        raise Refused(f"rotary positions in {where} have {', '.join(unknown)}; Eyeline computes unscaled ones only. Remove the scaling.")
    return number(where, {**config_json, **scaled}, "rope_theta", 10_000.0)


def _refuse_windows(where: str, config_json: Json, layers: int) -> None:
    types = config_json.get("layer_types") or ["full_attention"] * layers
    if set(types) != {"full_attention"} or len(types) != layers:
        raise Refused(f"{where} has layer_types={types!r}; Eyeline computes {layers} layers of full attention only.")
    window = config_json.get("use_sliding_window", False) and config_json.get("sliding_window", 4096)
    if window and not config_json.get("layer_types") and config_json.get("max_window_layers", 28) < layers:
        raise Refused(f"{where} has use_sliding_window=True with a window of {window} tokens; Eyeline attends to whole documents only.")


def to_hf(c: Config) -> dict[str, Any]:
    """config.json of a `Qwen2ForCausalLM`."""
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": c.vocabulary,
        "hidden_size": c.width,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads,
        **({} if c.head_dim is None else {"head_dim": c.head_dim}),
        "intermediate_size": c.feed_forward,
        "hidden_act": "silu",
        "rms_norm_eps": c.eps,
        "attention_dropout": 0.0,
        "max_position_embeddings": c.longest,
        "rope_parameters": {"rope_type": "default", "rope_theta": c.rope_theta},
        "use_sliding_window": False,
        "tie_word_embeddings": c.tied,
    }
