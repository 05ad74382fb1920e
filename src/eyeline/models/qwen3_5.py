"""Qwen3.5 language models, dense and MoE (`Qwen3_5ForCausalLM`, `Qwen3_5MoeForCausalLM`), and those inside its vision models.

Most layers have no attention: a Gated DeltaNet (Yang et al. 2024) has one recurrent state of fixed size per head, which every token
decays, corrects and reads (the gated delta rule: `kernels/gated_delta.py`), after a short convolution that lets q, k and v see the three
tokens before (`kernels/causal_conv.py`). Every fourth layer has full attention. The output of a layer is gated by its input in both kinds.
Unlike in Qwen3, norms are zero-centred, x·(1 + w), except that of the recurrent state's output, and a quarter of a head's dims is rotated.

The checkpoints also hold `mtp.*`: a layer that predicts a second token ahead, for drafting. As in transformers, it is dropped.

Dims: T tokens  S documents  D width  K head dim of queries and keys  J head dim of the state's values  H query heads, or value heads
      G key heads (H is a multiple of G)  C channels of a convolution  W its kernel size
"""

from functools import partial
from typing import Any, Literal

import torch
from pydantic import model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from eyeline.core.plan import HEADS, INPUTS, LanguageSizes, Traits
from eyeline.core.settings import Positive, PositiveFloat, Settings, Share
from eyeline.core.shards import put
from eyeline.kernels.attention import LayerCache
from eyeline.kernels.causal_conv import cached_causal_conv, causal_conv
from eyeline.kernels.gated_delta import StateCache, cached_gated_delta_rule, gated_delta_rule
from eyeline.kernels.norms import gated_rms_norm, rms_norm
from eyeline.kernels.rope import rope_tables, rotate
from eyeline.models import decoder
from eyeline.models.decoder import Layout
from eyeline.models.flops import Tally, any_trainable
from eyeline.models.layers import MLP, Attend, Branch, Linear, Norm, ReplaceableModule, together
from eyeline.models.moe import Experts, MoE, Routed

LayerType = Literal["linear_attention", "full_attention"]  # transformers' words: Gated DeltaNet, attention


class Delta(Settings):
    """Sizes of a Gated DeltaNet."""

    key_heads: Positive = 16
    value_heads: Positive = 32  # each has a recurrent state; a key head serves value_heads / key_heads of them
    key_dim: Positive = 128
    value_dim: Positive = 128
    conv_kernel: Positive = 4  # tokens that the convolution sees


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
    shared_expert_size: Positive | None = None  # intermediate size of the shared expert, which every token uses
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


class CentredRMSNorm(Norm):
    """`x / rms(x) · (1 + w)`, in float32; the result has x's dtype."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))
        self.eps = eps

    def forward(self, x_TD: Tensor) -> Tensor:
        return rms_norm(x_TD, 1 + self.weight.float(), self.eps)

    def initialise(self, _rng: torch.Generator) -> None:
        self.weight.zero_()


class GatedRMSNorm(Norm):
    """`x / rms(x) · w · silu(z)`, in float32; the result has z's dtype."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x_THJ: Tensor, z_THJ: Tensor) -> Tensor:
        return gated_rms_norm(x_THJ, z_THJ, self.weight, self.eps)


class GatedAttention(Branch):
    """Grouped-query attention whose output is gated; queries and keys are normed, and the first dims of a head rotated."""

    def __init__(self, c: Config):
        super().__init__()
        self.K = c.head_dim
        queries, keys = c.heads * c.head_dim, c.kv_heads * c.head_dim
        self.q = Linear(c.hidden_size, queries, bias=False, split=HEADS, target="q_proj")
        self.gate = Linear(c.hidden_size, queries, bias=False, split=HEADS, target="attn_gate_proj")
        self.k, self.v = (Linear(c.hidden_size, keys, bias=False, split=HEADS, target=f"{name}_proj") for name in "kv")
        self.o = Linear(queries, c.hidden_size, bias=False, split=INPUTS, target="o_proj")
        self.q_norm, self.k_norm = (CentredRMSNorm(c.head_dim, c.eps) for _ in range(2))
        self.attend = Attend(causal=True)

    def forward(self, x_TD: Tensor, layout: Layout, cache: LayerCache | None = None) -> Tensor:
        # -1, not H or G: under tensor parallelism a rank holds some of the heads
        *mixed, gate_TD = together((self.q, self.k, self.v, self.gate), x_TD, layout.draws_T2)
        q_THK, k_TGK, v_TGK = (x.unflatten(-1, (-1, self.K)) for x in mixed)
        q_THK = rotate(self.q_norm(q_THK), layout.cos_TR, layout.sin_TR)
        k_TGK = rotate(self.k_norm(k_TGK), layout.cos_TR, layout.sin_TR)
        out_THK = self.attend(q_THK, k_TGK, v_TGK, layout.cu_S1, layout.longest, cache)
        return self.o(out_THK.flatten(1) * gate_TD.sigmoid(), layout.draws_T2)

    def count(self, tally: Tally, reached: bool) -> bool:
        q, k, v, gate = (project.count(tally, reached, "token") for project in (self.q, self.k, self.v, self.gate))
        q, k = q or any_trainable(self.q_norm), k or any_trainable(self.k_norm)
        mixed = tally.attention("pair", self.q.out_features // self.K, self.K, self.K, q, k, v)
        return self.o.count(tally, mixed or gate, "token")

    def new_cache(self, rows: int, room: int, dtype: torch.dtype, device: torch.device) -> LayerCache:
        return decoder.new_layer_cache(self.k, self.K, rows, room, dtype, device)


class ConvKernel(nn.Module):
    """The weights of a depthwise convolution; the oldest token's come first."""

    def __init__(self, channels: int, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, size))

    def traits(self) -> dict[str, Traits]:
        return {"weight": Traits(HEADS, exact=True)}


class Scan(ReplaceableModule):
    """What passes along a document: convolutions and recurrent state."""

    kind = "scan"

    def __init__(self, key_dim: int, value_dim: int):
        super().__init__()
        self.K, self.J = key_dim, value_dim
        self.fla = False  # set where fla's kernel was found to compute the same: `kernel_paths.choose`

    def forward(
        self,
        mixed: tuple[Tensor, Tensor, Tensor],  # q, k and v: [T, C]
        kernels: tuple[Tensor, Tensor, Tensor],  # of each: [C, W]
        decay_TH: Tensor,
        beta_TH: Tensor,
        cu_S1: Tensor,
        cache: StateCache | None = None,
    ) -> Tensor:
        if cache is None:
            q_TC, k_TC, v_TC = (causal_conv(x_TC, weight_CW, cu_S1) for x_TC, weight_CW in zip(mixed, kernels, strict=True))
        else:
            triples = zip(mixed, kernels, cache.windows, strict=True)
            q_TC, k_TC, v_TC = (cached_causal_conv(x_TC, weight_CW, cu_S1, window_BWC) for x_TC, weight_CW, window_BWC in triples)
        q_TGK, k_TGK = (x_TC.unflatten(-1, (-1, self.K)) for x_TC in (q_TC, k_TC))
        v_THJ = v_TC.unflatten(-1, (-1, self.J))
        if cache is None:
            return gated_delta_rule(q_TGK, k_TGK, v_THJ, decay_TH, beta_TH, cu_S1, self.fla)
        return cached_gated_delta_rule(q_TGK, k_TGK, v_THJ, decay_TH, beta_TH, cu_S1, cache, self.fla)


class GatedDeltaNet(Branch):
    """A recurrent state per head in place of attention. Its decay, exp(-exp(A_log)·softplus(a + dt_bias)), and beta, sigmoid(b), the share
    that a token writes, come from the input; in float32, where the exponents would be coarse in bfloat16."""

    def __init__(self, c: Config):
        super().__init__()
        d = c.delta
        self.J = d.value_dim
        keys, values = d.key_heads * d.key_dim, d.value_heads * d.value_dim
        sizes = {"q": keys, "k": keys, "v": values, "z": values, "a": d.value_heads, "b": d.value_heads}
        self.q, self.k, self.v, self.z, self.a, self.b = (
            Linear(c.hidden_size, size, bias=False, split=HEADS, target=f"delta_{name}_proj") for name, size in sizes.items()
        )
        self.conv_q, self.conv_k, self.conv_v = (ConvKernel(channels, d.conv_kernel) for channels in (keys, keys, values))
        self.A_log, self.dt_bias = (nn.Parameter(torch.empty(d.value_heads)) for _ in range(2))
        self.scan = Scan(d.key_dim, d.value_dim)
        self.norm = GatedRMSNorm(d.value_dim, c.eps)
        self.o = Linear(values, c.hidden_size, bias=False, split=INPUTS, target="delta_o_proj")

    def traits(self) -> dict[str, Traits]:
        return dict.fromkeys(("A_log", "dt_bias"), Traits(HEADS, exact=True, decays=False))

    def forward(self, x_TD: Tensor, layout: Layout, cache: StateCache | None = None) -> Tensor:
        draws_T2 = layout.draws_T2
        q_TC, k_TC, v_TC, z_TC, a_TH, b_TH = together((self.q, self.k, self.v, self.z, self.a, self.b), x_TD, draws_T2)
        decay_TH = -self.A_log.float().exp() * F.softplus(a_TH.float() + self.dt_bias.float())
        beta_TH = b_TH.float().sigmoid()
        kernels = (self.conv_q.weight, self.conv_k.weight, self.conv_v.weight)
        out_THJ = self.scan((q_TC, k_TC, v_TC), kernels, decay_TH, beta_TH, layout.cu_S1, cache)
        return self.o(self.norm(out_THJ, z_TC.unflatten(-1, (-1, self.J))).flatten(1), draws_T2)

    def count(self, tally: Tally, reached: bool) -> bool:
        q, k, v, z, a, b = (x.count(tally, reached, "token") for x in (self.q, self.k, self.v, self.z, self.a, self.b))
        q, k, v = q or any_trainable(self.conv_q), k or any_trainable(self.conv_k), v or any_trainable(self.conv_v)
        gates = a or b or any_trainable(self)
        mixed = tally.delta_rule(self.v.out_features // self.J, self.scan.K, self.J, q, k, v, gates)
        return self.o.count(tally, mixed or z or any_trainable(self.norm), "token")

    def new_cache(self, rows: int, _room: int, dtype: torch.dtype, device: torch.device) -> StateCache:
        channels = [conv.weight.shape[0] for conv in (self.conv_q, self.conv_k, self.conv_v)]
        state = (len(self.A_log), self.scan.K, self.J)
        return StateCache(rows, state, channels, self.conv_q.weight.shape[1], dtype, device)

    def initialise(self, rng: torch.Generator) -> None:
        """As the reference: exp(A_log) uniform from 0.01 to 16, dt_bias one. The way back starts at zero, as in every branch."""
        put(self.A_log, (torch.rand(self.A_log.shape, generator=rng, device=rng.device) * (16 - 0.01) + 0.01).log())
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

    def mixed(self, x_TD: Tensor, layout: Layout, cache: Any = None) -> Tensor:
        return x_TD + self.mix(self.norm1(x_TD), layout, cache)

    def forward(self, x_TD: Tensor, layout: Layout, cache: Any = None) -> Tensor | tuple[Tensor, Routed]:
        x_TD = self.mixed(x_TD, layout, cache)
        if isinstance(self.mlp, MLP):
            return x_TD + self.mlp(self.norm2(x_TD), layout.draws_T2)
        y_TD, routed = self.mlp(self.norm2(x_TD), layout.real_T, layout.draws_T2)
        return x_TD + y_TD, routed

    def count(self, tally: Tally, reached: bool) -> bool:
        reached |= self.mix.count(tally, reached or any_trainable(self.norm1))
        return self.mlp.count(tally, reached or any_trainable(self.norm2)) or reached

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


def sizes(c: Config) -> LanguageSizes:
    recurrent = "linear_attention" in c.resolved_layer_types
    keys, values = (c.delta.key_heads, c.delta.value_heads) if recurrent else (None, None)
    experts = {} if c.experts is None else {"experts": c.experts.num_experts, "experts_per_token": c.experts.experts_per_token}
    return LanguageSizes(c.layers, c.hidden_size, c.heads, c.kv_heads, keys, values, **experts)
