"""Qwen3.5 language models, dense and of experts (`Qwen3_5ForCausalLM`, `Qwen3_5MoeForCausalLM`), and those inside its vision models.

Most layers have no attention: a Gated DeltaNet (Yang et al. 2024) keeps one memory of fixed size a head, which every token fades,
corrects and asks (`kernels/gated_delta.py`), after a short convolution that lets q, k and v see the three tokens before
(`kernels/causal_conv.py`). Every fourth layer has full attention. What a layer gives is gated by its input in both kinds.
Against Qwen3: norms are zero-centred, x·(1 + w), but for the memory's; a quarter of a head's dims is rotated.

The checkpoints also hold `mtp.*`: a layer that predicts a second token ahead, for drafting. As in transformers, it is dropped.

Dims: T tokens  S documents  D width  K head dim of queries and keys  J of a memory's values  H query heads, or heads of memories
      G key heads (H is a multiple of G)  C channels of a convolution  W its taps
"""

from functools import partial
from typing import Any, Literal

import torch
from pydantic import model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from eyeline.core.errors import Refused
from eyeline.core.facts import KeyRule, Split
from eyeline.core.settings import Positive, PositiveFloat, Settings, Share
from eyeline.kernels.attention import LayerCache
from eyeline.kernels.causal_conv import cached_causal_conv, causal_conv
from eyeline.kernels.gated_delta import StateCache, cached_gated_delta_rule, gated_delta_rule
from eyeline.kernels.rms_norm import rms_norm
from eyeline.kernels.rope import rope_tables, rotate
from eyeline.models import decoder
from eyeline.models.decoder import Layout
from eyeline.models.flops import Tally, learns
from eyeline.models.hf_config import LAYERS, Json, expect, flag, integer, layer_types, made, number, refuse_quantised, rope, rope_to_hf
from eyeline.models.layers import MLP, Attend, Linear
from eyeline.models.moe import DISPATCH, EXPERT_NAMES, EXPERTS, ROUTER_NAMES, Experts, MoE, Routed

LayerType = Literal["linear_attention", "full_attention"]  # transformers' words: Gated DeltaNet, attention


class Delta(Settings):
    """Sizes of a Gated DeltaNet."""

    key_heads: Positive = 16
    value_heads: Positive = 32  # memories: each key head serves value_heads / key_heads of them
    key_dim: Positive = 128
    value_dim: Positive = 128
    conv_kernel: Positive = 4  # of the convolution


class Config(Settings):
    family: Literal["qwen3_5"] = "qwen3_5"
    vocab_size: Positive  # rows of the embedding, padding rows included
    hidden_size: Positive
    layers: Positive
    layer_types: tuple[LayerType, ...] | None = None  # of each layer; None: every fourth is full attention, as in all that were published
    heads: Positive
    kv_heads: Positive
    head_dim: Positive = 256
    delta: Delta = Delta()
    intermediate_size: Positive | None = None  # of dense layers; None where there are experts
    experts: Experts | None = None  # in every layer
    shared_expert_size: Positive | None = None  # hidden width of the expert that every token uses, beside the others
    eps: PositiveFloat = 1e-6
    rope_theta: PositiveFloat = 1e7
    partial_rotary_factor: Share = 0.25  # share of a head's dims that is rotated
    mrope_section: tuple[int, int, int] = (11, 11, 10)  # rotary frequencies for time, row, column; in text all three are equal
    max_positions: Positive = 262144  # positions it was made for
    tie_embeddings: bool  # the head is the embedding

    @model_validator(mode="after")
    def _fits(self) -> "Config":
        decoder.refuse_heads(self.hidden_size, self.heads, self.kv_heads, self.head_dim)
        if self.delta.value_heads % self.delta.key_heads:
            raise ValueError(f"delta.key_heads={self.delta.key_heads} must divide delta.value_heads={self.delta.value_heads}")
        if self.R < 2 or self.R % 2:
            raise ValueError(
                f"partial_rotary_factor={self.partial_rotary_factor} of head_dim={self.head_dim} is {self.R} dims; "
                "wanted an even number: pairs turn"
            )
        if sum(self.mrope_section) != self.R // 2 or min(self.mrope_section) < 0:
            raise ValueError(f"mrope_section={self.mrope_section} must add up to {self.R // 2}, half of the {self.R} dims that are rotated")
        if self.layer_types is not None and len(self.layer_types) != self.layers:
            raise ValueError(f"layer_types names {len(self.layer_types)} layers, and there are layers={self.layers}")
        given = (self.intermediate_size is not None, self.experts is not None, self.shared_expert_size is not None)
        if given not in ((True, False, False), (False, True, True)):
            raise ValueError("wanted intermediate_size alone, or experts with shared_expert_size")
        if self.experts is not None and not self.experts.norm_topk_prob:
            raise ValueError("experts of Qwen3.5 have normalised weights; set experts.norm_topk_prob: true")
        return self

    @property
    def R(self) -> int:
        """Dims of a head that are rotated."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def resolved_layer_types(self) -> tuple[LayerType, ...]:
        return self.layer_types or published(self.layers, 4)


def published(layers: int, every: int) -> tuple[LayerType, ...]:
    return tuple("linear_attention" if (i + 1) % every else "full_attention" for i in range(layers))


class CentredRMSNorm(nn.Module):
    """`x / rms(x) · (1 + w)`, in float32; the result has x's dtype."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))
        self.eps = eps

    def forward(self, x_TD: Tensor) -> Tensor:
        return rms_norm(x_TD, 1 + self.weight.float(), self.eps)

    def initialise(self, _rng: torch.Generator) -> None:
        self.weight.zero_()


class GatedRMSNorm(nn.Module):
    """`x / rms(x) · w · silu(z)`, in float32; the result has z's dtype."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x_THJ: Tensor, z_THJ: Tensor) -> Tensor:
        normed_THJ = rms_norm(x_THJ.float(), self.weight, self.eps)
        return (normed_THJ * F.silu(z_THJ.float())).to(z_THJ.dtype)


class GatedAttention(nn.Module):
    """Grouped-query attention whose output is gated; queries and keys are normed, and the first dims of a head rotated."""

    def __init__(self, c: Config):
        super().__init__()
        self.K = c.head_dim
        self.q, self.gate = (Linear(c.hidden_size, c.heads * c.head_dim, bias=False) for _ in range(2))
        self.k, self.v = (Linear(c.hidden_size, c.kv_heads * c.head_dim, bias=False) for _ in range(2))
        self.o = Linear(c.heads * c.head_dim, c.hidden_size, bias=False)
        self.q_norm, self.k_norm = (CentredRMSNorm(c.head_dim, c.eps) for _ in range(2))
        self.attend = Attend(causal=True)

    def forward(self, x_TD: Tensor, layout: Layout, cache: LayerCache | None = None) -> Tensor:
        # -1, not H or G: under tensor parallelism a rank holds some of the heads
        q_THK, k_TGK, v_TGK = (project(x_TD).unflatten(-1, (-1, self.K)) for project in (self.q, self.k, self.v))
        q_THK = rotate(self.q_norm(q_THK), layout.cos_TR, layout.sin_TR)
        k_TGK = rotate(self.k_norm(k_TGK), layout.cos_TR, layout.sin_TR)
        out_THK = self.attend(q_THK, k_TGK, v_TGK, layout.cu_S1, layout.longest, cache)
        return self.o(out_THK.flatten(1) * self.gate(x_TD).sigmoid())

    def count(self, tally: Tally, reached: bool) -> bool:
        q, k, v, gate = (project.count(tally, reached, "token") for project in (self.q, self.k, self.v, self.gate))
        q, k = q or learns(self.q_norm), k or learns(self.k_norm)
        mixed = tally.attention("pair", self.q.out_features // self.K, self.K, self.K, q, k, v)
        return self.o.count(tally, mixed or gate, "token")

    def new_cache(self, rows: int, room: int, dtype: torch.dtype, device: torch.device) -> LayerCache:
        return decoder.new_layer_cache(self.k, self.K, rows, room, dtype, device)


class Taps(nn.Module):
    """The weights of a depthwise convolution; the oldest token's come first."""

    def __init__(self, channels: int, taps: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, taps))


class Scan(nn.Module):
    """Seam: what passes along a document, convolutions and memory. Weightless, so that `parallel` may replace it."""

    def __init__(self, key_dim: int, value_dim: int):
        super().__init__()
        self.K, self.J = key_dim, value_dim
        self.fla = False  # set where fla's kernel was found to compute the same: `kernel_paths.choose`

    def forward(
        self,
        mixed: tuple[Tensor, Tensor, Tensor],  # q, k and v: [T, C]
        taps: tuple[Tensor, Tensor, Tensor],  # of each: [C, W]
        decay_TH: Tensor,
        beta_TH: Tensor,
        cu_S1: Tensor,
        cache: StateCache | None = None,
    ) -> Tensor:
        if cache is None:
            q_TC, k_TC, v_TC = (causal_conv(x_TC, weight_CW, cu_S1) for x_TC, weight_CW in zip(mixed, taps, strict=True))
        else:
            held = zip(mixed, taps, cache.windows, strict=True)
            q_TC, k_TC, v_TC = (cached_causal_conv(x_TC, weight_CW, cu_S1, window_BWC) for x_TC, weight_CW, window_BWC in held)
        q_TGK, k_TGK = (x_TC.unflatten(-1, (-1, self.K)) for x_TC in (q_TC, k_TC))
        v_THJ = v_TC.unflatten(-1, (-1, self.J))
        if cache is None:
            return gated_delta_rule(q_TGK, k_TGK, v_THJ, decay_TH, beta_TH, cu_S1, self.fla)
        return cached_gated_delta_rule(q_TGK, k_TGK, v_THJ, decay_TH, beta_TH, cu_S1, cache, self.fla)


class GatedDeltaNet(nn.Module):
    """A memory a head in place of attention. How much a token forgets, exp(-exp(A_log)·softplus(a + dt_bias)), and what it writes,
    sigmoid(b), come from its input; in float32, where the exponents would be coarse in bfloat16."""

    def __init__(self, c: Config):
        super().__init__()
        d = c.delta
        self.J = d.value_dim
        keys, values = d.key_heads * d.key_dim, d.value_heads * d.value_dim
        self.q, self.k = (Linear(c.hidden_size, keys, bias=False) for _ in range(2))
        self.v, self.z = (Linear(c.hidden_size, values, bias=False) for _ in range(2))
        self.a, self.b = (Linear(c.hidden_size, d.value_heads, bias=False) for _ in range(2))
        self.conv_q, self.conv_k, self.conv_v = (Taps(channels, d.conv_kernel) for channels in (keys, keys, values))
        self.A_log, self.dt_bias = (nn.Parameter(torch.empty(d.value_heads)) for _ in range(2))
        self.scan = Scan(d.key_dim, d.value_dim)
        self.norm = GatedRMSNorm(d.value_dim, c.eps)
        self.o = Linear(values, c.hidden_size, bias=False)

    def forward(self, x_TD: Tensor, layout: Layout, cache: StateCache | None = None) -> Tensor:
        decay_TH = -self.A_log.float().exp() * F.softplus(self.a(x_TD).float() + self.dt_bias.float())
        beta_TH = self.b(x_TD).float().sigmoid()
        mixed = (self.q(x_TD), self.k(x_TD), self.v(x_TD))
        taps = (self.conv_q.weight, self.conv_k.weight, self.conv_v.weight)
        out_THJ = self.scan(mixed, taps, decay_TH, beta_TH, layout.cu_S1, cache)
        return self.o(self.norm(out_THJ, self.z(x_TD).unflatten(-1, (-1, self.J))).flatten(1))

    def count(self, tally: Tally, reached: bool) -> bool:
        q, k, v, z, a, b = (x.count(tally, reached, "token") for x in (self.q, self.k, self.v, self.z, self.a, self.b))
        q, k, v = q or learns(self.conv_q), k or learns(self.conv_k), v or learns(self.conv_v)
        gates = a or b or learns(self)
        mixed = tally.delta_rule(self.v.out_features // self.J, self.scan.K, self.J, q, k, v, gates)
        return self.o.count(tally, mixed or z or learns(self.norm), "token")

    def new_cache(self, rows: int, _room: int, dtype: torch.dtype, device: torch.device) -> StateCache:
        channels = [conv.weight.shape[0] for conv in (self.conv_q, self.conv_k, self.conv_v)]
        memory = (len(self.A_log), self.scan.K, self.J)
        return StateCache(rows, memory, channels, self.conv_q.weight.shape[1], dtype, device)

    def initialise(self, rng: torch.Generator) -> None:
        """As the reference: exp(A_log) uniform from 0.01 to 16, dt_bias one. The way back starts at zero, as in every branch."""
        self.A_log.copy_((torch.rand(self.A_log.shape, generator=rng, device=rng.device) * (16 - 0.01) + 0.01).log())
        self.dt_bias.fill_(1.0)
        self.o.weight.zero_()


class Block(nn.Module):
    """`x + mix(norm1(x))`, and of that `x + mlp(norm2(x))`. `mix` is `attn` or `delta`, the other one is None."""

    def __init__(self, c: Config, kind: LayerType):
        super().__init__()
        self.norm1, self.norm2 = CentredRMSNorm(c.hidden_size, c.eps), CentredRMSNorm(c.hidden_size, c.eps)
        self.attn = GatedAttention(c) if kind == "full_attention" else None
        self.delta = GatedDeltaNet(c) if kind == "linear_attention" else None
        self.mlp = MLP(c.hidden_size, c.intermediate_size) if c.intermediate_size else MoE(_experts(c), c.hidden_size, c.shared_expert_size)

    @property
    def mix(self) -> GatedAttention | GatedDeltaNet:
        mix = self.attn or self.delta
        assert mix is not None
        return mix

    def forward(self, x_TD: Tensor, layout: Layout, cache: Any = None) -> Tensor | tuple[Tensor, Routed]:
        x_TD = x_TD + self.mix(self.norm1(x_TD), layout, cache)
        if isinstance(self.mlp, MLP):
            return x_TD + self.mlp(self.norm2(x_TD))
        y_TD, routed = self.mlp(self.norm2(x_TD), layout.real_T)
        return x_TD + y_TD, routed

    def count(self, tally: Tally, reached: bool) -> bool:
        reached |= self.mix.count(tally, reached or learns(self.norm1))
        return self.mlp.count(tally, reached or learns(self.norm2)) or reached

    def new_cache(self, rows: int, room: int, dtype: torch.dtype, device: torch.device) -> decoder.Cache:
        return self.mix.new_cache(rows, room, dtype, device)


def _experts(c: Config) -> Experts:
    assert c.experts is not None, "a config has intermediate_size or experts"
    return c.experts


def Model(c: Config, compute_dtype: torch.dtype = torch.float32) -> decoder.Decoder:
    tables = partial(rope_tables, head_dim=c.R, theta=c.rope_theta, mrope_section=c.mrope_section)
    blocks = (Block(c, kind) for kind in c.resolved_layer_types)
    return decoder.Decoder(
        c.vocab_size, c.hidden_size, c.tie_embeddings, blocks, CentredRMSNorm(c.hidden_size, c.eps), tables, compute_dtype
    )


def blocks(_c: Config) -> str:
    return decoder.BLOCKS


def linears(c: Config) -> dict[str, str]:
    attention = decoder.ATTENTION | {"attn_gate": "blocks.*.attn.gate"}
    delta = {f"delta_{x}": f"blocks.*.delta.{x}" for x in ("q", "k", "v", "z", "a", "b", "o")}
    shared = {f"shared_{x}": f"blocks.*.mlp.shared.{x}" for x in ("gate", "up", "down")}
    return {
        **(attention if "full_attention" in c.resolved_layer_types else {}),
        **(delta if "linear_attention" in c.resolved_layer_types else {}),
        **(decoder.FEED_FORWARD if c.experts is None else shared),
    }


def splits(c: Config) -> dict[str, Split]:
    return {pattern: "split_in" if pattern.endswith((".o", ".down")) else "split_out" for pattern in linears(c).values()}


def seams(c: Config) -> tuple[str, ...]:
    return (
        *((decoder.ATTEND,) if "full_attention" in c.resolved_layer_types else ()),
        *(("blocks.*.delta.scan",) if "linear_attention" in c.resolved_layer_types else ()),
        *((DISPATCH,) if c.experts else ()),
    )


def experts(c: Config) -> str | None:
    return EXPERTS if c.experts else None


# ---- Hugging Face's names

MODEL_TYPES = ("qwen3_5_text", "qwen3_5_moe_text")  # of a language model alone, and of text_config in the vision models
DROPPED = tuple("mtp" + ".*" * pieces for pieces in range(1, 9))  # the layer that predicts a second token ahead


def keys(c: Config) -> tuple[KeyRule, ...]:
    """Our tensors, and their names in a folder of `Qwen3_5ForCausalLM` or `Qwen3_5MoeForCausalLM`."""
    shared = {f"mlp.shared.{x}.weight": f"mlp.shared_expert.{x}_proj.weight" for x in ("gate", "up", "down")}
    shared["mlp.shared_gate.weight"] = "mlp.shared_expert_gate.weight"
    names = decoder.NORM_NAMES | (decoder.FEED_FORWARD_NAMES if c.experts is None else ROUTER_NAMES | EXPERT_NAMES | shared)
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
        apart, conv_apart = partial(torch.split, split_size_or_sections=channels), partial(_taps, channels=channels)
        fused += (
            _fused("delta.{}.weight", ("q", "k", "v"), "linear_attn.in_proj_qkv.weight", apart, _stacked),
            _fused("delta.conv_{}.weight", ("q", "k", "v"), "linear_attn.conv1d.weight", conv_apart, _stacked_taps),
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


def _taps(weight_C1W: Tensor, channels: list[int]) -> tuple[Tensor, ...]:
    return weight_C1W.squeeze(1).split(channels)


def _stacked_taps(*parts_CW: Tensor) -> Tensor:
    return torch.cat(parts_CW).unsqueeze(1)


# ---- Hugging Face's settings


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
        return made(where, Config, values | {"intermediate_size": whole("intermediate_size", 12288)})
    experts = {
        "num_experts": whole("num_experts", 256),
        "experts_per_token": whole("num_experts_per_tok", 8),
        "intermediate_size": whole("moe_intermediate_size", 512),
    }
    return made(where, Config, values | {"experts": experts, "shared_expert_size": whole("shared_expert_intermediate_size", 512)})


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
