"""The decoder that every language model here is: embedded tokens through blocks, a last norm, and a head.

What differs between families is the block, and how positions turn into angles; both are given to `Decoder`. All documents
of a batch are stored end to end, and each sees only itself.

Dims: T tokens  S documents  D width  H query heads  G key/value heads  K head dim  R rotated dims  F feed-forward
      V vocabulary  L wanted rows  M visual tokens
"""

from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar, NamedTuple, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from eyeline.core.batch import Batch
from eyeline.core.plan import HEADS, INPUTS, VOCABULARY, NewRows, Traits
from eyeline.kernels.attention import LayerCache
from eyeline.kernels.cross_entropy import summed_cross_entropy
from eyeline.kernels.distillation import Losses, Teacher, summed_losses
from eyeline.kernels.rope import rotate
from eyeline.models.flops import Tally, any_trainable
from eyeline.models.layers import (
    MLP,
    NEVER,
    Attend,
    Branch,
    Embedding,
    Linear,
    ReplaceableModule,
    RMSNorm,
    normal_,
    run_block,
    together,
    weights_of,
)
from eyeline.models.moe import Agree, Load, MoE, Routed, load_of


class Layout(NamedTuple):
    """The layout of the batch, as every block gets it."""

    cos_TR: Tensor  # float32: of each token's position
    sin_TR: Tensor
    cu_S1: Tensor
    longest: int
    real_T: Tensor  # bool: no padding. A tensor, so that compiled blocks do not depend on how much there is
    draws_T2: Tensor | None  # of dropout


class Cache(Protocol):
    """The cache of one layer for the sequences that are being generated."""

    lengths: list[int]  # tokens of each row so far

    def keep(self, rows: list[int]) -> None: ...


class GeneratingBlock(Protocol):
    def new_cache(self, rows: int, room: int, dtype: torch.dtype, device: torch.device) -> Cache: ...


@runtime_checkable
class StartsItself(Protocol):
    """A layer that `Decoder.initialise` leaves its tensors to."""

    def initialise(self, rng: torch.Generator) -> None: ...


class Attention(Branch):
    """Grouped-query attention with rotary positions. `biased`: whether q, k and v have biases; `norm_eps`: of an RMS norm over each
    head of q and of k, where they have one."""

    def __init__(self, width: int, heads: int, kv_heads: int, head_dim: int, biased: bool, norm_eps: float | None = None):
        super().__init__()
        self.K = head_dim
        self.q = Linear(width, heads * head_dim, biased, split=HEADS, target="q_proj")
        self.k, self.v = (Linear(width, kv_heads * head_dim, biased, split=HEADS, target=f"{name}_proj") for name in "kv")
        self.o = Linear(heads * head_dim, width, bias=False, split=INPUTS, target="o_proj")
        self.q_norm, self.k_norm = (None if norm_eps is None else RMSNorm(head_dim, norm_eps) for _ in "qk")
        self.attend = Attend(causal=True)

    def forward(self, x_TD: Tensor, layout: Layout, cache: LayerCache | None = None) -> Tensor:
        # -1, not H or G: under tensor parallelism a rank holds some of the heads
        q_THK, k_TGK, v_TGK = (x.unflatten(-1, (-1, self.K)) for x in together((self.q, self.k, self.v), x_TD, layout.draws_T2))
        if self.q_norm is not None and self.k_norm is not None:  # before the rotation, which a scale of each channel does not commute with
            q_THK, k_TGK = self.q_norm(q_THK), self.k_norm(k_TGK)
        q_THK, k_TGK = rotate(q_THK, layout.cos_TR, layout.sin_TR), rotate(k_TGK, layout.cos_TR, layout.sin_TR)
        out_THK = self.attend(q_THK, k_TGK, v_TGK, layout.cu_S1, layout.longest, cache)
        return self.o(out_THK.flatten(1), layout.draws_T2)

    def count(self, tally: Tally, reached: bool) -> bool:
        q, k, v = (project.count(tally, reached, "token") for project in (self.q, self.k, self.v))
        mixed = tally.attention("pair", self.q.out_features // self.K, self.K, self.K, q, k, v)
        return self.o.count(tally, mixed, "token")


class Block(nn.Module):
    """`x + attn(norm1(x))`, and of that `x + mlp(norm2(x))`."""

    def __init__(self, width: int, eps: float, attn: Attention, mlp: MLP):
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(width, eps), RMSNorm(width, eps)
        self.attn, self.mlp = attn, mlp

    def forward(self, x_TD: Tensor, layout: Layout, cache: LayerCache | None = None) -> Tensor:
        x_TD = x_TD + self.attn(self.norm1(x_TD), layout, cache)
        return x_TD + self.mlp(self.norm2(x_TD), layout.draws_T2)

    def count(self, tally: Tally, reached: bool) -> bool:
        reached |= self.attn.count(tally, reached or any_trainable(self.norm1))
        return self.mlp.count(tally, reached or any_trainable(self.norm2)) or reached

    def new_cache(self, rows: int, room: int, dtype: torch.dtype, device: torch.device) -> LayerCache:
        return new_layer_cache(self.attn.k, self.attn.K, rows, room, dtype, device)


class ExpertBlock(nn.Module):
    """The same with experts in place of the MLP: says also where its tokens went."""

    def __init__(self, width: int, eps: float, attn: Attention, mlp: MoE):
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(width, eps), RMSNorm(width, eps)
        self.attn, self.mlp = attn, mlp

    def forward(self, x_TD: Tensor, layout: Layout, cache: LayerCache | None = None) -> tuple[Tensor, Routed]:
        x_TD = x_TD + self.attn(self.norm1(x_TD), layout, cache)
        y_TD, routed = self.mlp(self.norm2(x_TD), layout.real_T, layout.draws_T2)
        return x_TD + y_TD, routed

    def count(self, tally: Tally, reached: bool) -> bool:
        reached |= self.attn.count(tally, reached or any_trainable(self.norm1))
        return self.mlp.count(tally, reached or any_trainable(self.norm2)) or reached

    def new_cache(self, rows: int, room: int, dtype: torch.dtype, device: torch.device) -> LayerCache:
        return new_layer_cache(self.attn.k, self.attn.K, rows, room, dtype, device)


def new_layer_cache(k: Linear, head_dim: int, rows: int, room: int, dtype: torch.dtype, device: torch.device) -> LayerCache:
    """The cache of a layer whose keys `k` projects: the module knows how many heads of them are here."""
    return LayerCache(rows, room, k.out_features // head_dim, head_dim, dtype, device)


def refuse_heads(width: int, heads: int, kv_heads: int, head_dim: int | None) -> None:
    """Raise ValueError for heads that do not fit one another."""
    if head_dim is None and width % heads:
        raise ValueError(f"heads={heads} must divide hidden_size={width}, or head_dim must be given")
    if heads % kv_heads:
        raise ValueError(f"kv_heads={kv_heads} must divide heads={heads}")
    if (each := head_dim or width // heads) % 2:
        raise ValueError(f"head_dim={each} must be even: rotary positions turn pairs")


class HeadLoss(ReplaceableModule):
    """The summed cross-entropy of labelled rows, and what a teacher adds to it."""

    kind = "loss"

    def forward(
        self,
        x_LD: Tensor,
        weight_VD: Tensor,
        labels_L: Tensor,
        rows_ND: Tensor | None = None,
        first: int = 0,
        counts: tuple[int, ...] | None = None,  # noqa: ARG002 (for ranks that share the vocabulary)
    ) -> Tensor:
        return summed_cross_entropy(x_LD, weight_VD, labels_L, rows_ND=rows_ND, first=first)

    def distilled(self, x_LD: Tensor, weight_VD: Tensor, labels_L: Tensor, teacher: Teacher) -> Losses:
        return summed_losses(x_LD, weight_VD, labels_L, teacher)


class Head(nn.Module):
    """The way back to the vocabulary. Its forward returns what the caller wants of it, so that hooks on `forward` suffice. `new_rows` and
    `first` as in `Embedding`."""

    new_rows: nn.Parameter | None

    def __init__(self, vocabulary: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocabulary, width))
        self.first = 0
        self.register_parameter("new_rows", None)
        self.loss = HeadLoss()

    def traits(self) -> dict[str, Traits]:
        return {"weight": Traits(VOCABULARY), "new_rows": Traits(decays=False, role="adapter")}

    def forward(
        self,
        x_TD: Tensor,
        rows_L: Tensor,
        labels_L: Tensor | None,
        teacher: Teacher | None = None,
        counts: tuple[int, ...] | None = None,
    ) -> Tensor | Losses:
        """With labels: their summed cross-entropy; with a teacher, also what that adds. Without: logits_LV in float32. Only the rows asked
        for are touched. `counts` as in `Batch.label_counts`."""
        x_LD = x_TD.index_select(0, rows_L)
        if labels_L is not None and teacher is not None:
            return self.loss.distilled(x_LD, self._whole_weight(), labels_L, teacher)
        if labels_L is not None:
            return self.loss(x_LD, self.weight, labels_L, self.new_rows, self.first, counts)
        logits_LV = F.linear(x_LD, self.weight.to(x_LD.dtype)).float()
        if self.new_rows is None:
            return logits_LV
        new_LN, end = F.linear(x_LD, self.new_rows.to(x_LD.dtype)).float(), self.first + len(self.new_rows)
        return torch.cat([logits_LV[:, : self.first], new_LN, logits_LV[:, end:]], 1)

    def _whole_weight(self) -> Tensor:
        """The weight with its new rows, in a copy where there are some."""
        if self.new_rows is None:
            return self.weight
        return torch.cat([self.weight[: self.first], self.new_rows.to(self.weight.dtype), self.weight[self.first + len(self.new_rows) :]])

    def count(self, tally: Tally, reached: bool) -> None:
        vocabulary, width = self.weight.shape
        with tally.within("head"):
            tally.product("label", width, vocabulary, reached, self.weight.requires_grad)
            if self.new_rows is not None:
                tally.product("label", width, len(self.new_rows), reached, self.new_rows.requires_grad)


class Output(NamedTuple):
    """The output of a model for a batch."""

    out: Tensor  # the summed loss of the labelled rows; float32 logits_LV of `rows_L` where the batch has no labels
    load: Load | None  # of a batch with labels, where the model has MoE layers
    divergence: Tensor | None = None  # from a teacher: what `out` has of it


class Decoder(nn.Module):
    """`tables` turns positions_T3 into cos_TR and sin_TR.

    A forward pass has three parts, `enter`, `through` and `leave`. A slice of the model, with None in place of other blocks, of the
    embedding or of the norm and head, runs those that it has.
    """

    units: ClassVar = {"embed": "enter", "norm": "leave", "head": "leave"}

    def __init__(
        self,
        vocabulary: int,
        width: int,
        tied: bool,
        blocks: Iterable[nn.Module],
        norm: nn.Module,
        tables: Callable[[Tensor], tuple[Tensor, Tensor]],
        compute_dtype: torch.dtype,
    ):
        super().__init__()
        self.tables, self.compute_dtype = tables, compute_dtype
        self.recompute = NEVER
        self.distillation = (0.0, 1.0)  # weight of the divergence from a teacher, and its temperature
        self.embed = Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(blocks)
        self.norm = norm
        self.head = Head(vocabulary, width)
        self.agree = Agree()
        if tied:  # the same tensor under two names
            self.head.weight = cast(nn.Parameter, self.embed.weight)  # torch's stub says Tensor; Embedding makes a Parameter

    def forward(self, x_TD: Tensor, batch: Batch, cache: Sequence[Cache] | None = None, deep_MD: Sequence[Tensor] = ()) -> Output:
        """Embedded tokens (and spliced visual ones) -> summed loss, or logits_LV where there are no labels."""
        x_TD, routed = self.through(x_TD, batch, cache, deep_MD)
        return self.leave(x_TD, batch, routed)

    def train_apart(self, rows: NewRows) -> None:
        """Take these rows of the embedding and of the head, not yet filled, from parameters of their own; a tied head has the same."""
        holders = (self.embed, self.head)
        for holder in holders:
            holder.first = rows.first
            holder.new_rows = nn.Parameter(torch.empty(rows.count, self.embed.embedding_dim, device=self.embed.weight.device))
        if self.head.weight is self.embed.weight:
            self.head.new_rows = self.embed.new_rows

    def enter(self, tokens_T: Tensor) -> Tensor:
        """Tokens, embedded."""
        return self.embed(tokens_T).to(self.compute_dtype)

    def through(
        self,
        x_TD: Tensor,
        batch: Batch,
        cache: Sequence[Cache] | None = None,
        deep_MD: Sequence[Tensor] = (),
        only: range | None = None,
    ) -> tuple[Tensor, list[Routed]]:
        """The blocks that are here, or `only` some of them. `deep_MD[i]` is added to the visual tokens after block i (DeepStack)."""
        cos_TR, sin_TR = self.tables(batch.positions_T3)
        layout = Layout(cos_TR, sin_TR, batch.cu_S1, batch.longest, batch.real_T, batch.draws_T2)
        routed: list[Routed] = []
        for i, block in enumerate(self.blocks):
            if block is None or (only is not None and i not in only):
                continue
            out = run_block(block, self.recompute.of(i), x_TD, layout, None if cache is None else cache[i])
            if isinstance(out, tuple):  # of a block with experts
                x_TD = out[0]
                routed.append(out[1])
            else:
                x_TD = out
            if i < len(deep_MD):
                x_TD = x_TD.index_add(0, batch.visual_M, deep_MD[i].to(x_TD.dtype))
        return x_TD, routed

    def leave(self, x_TD: Tensor, batch: Batch, routed: Sequence[Routed]) -> Output:
        """The loss or the logits, and where the tokens of all MoE layers went."""
        teacher = self._teacher(batch)
        out = self.head(self.norm(x_TD), batch.rows_L, batch.labels_L, teacher, batch.label_counts)
        out, divergence = (out, None) if teacher is None else out
        return Output(out, self.agree(load_of(routed)) if routed and batch.labels_L is not None else None, divergence)

    def _teacher(self, batch: Batch) -> Teacher | None:
        """The teacher that a batch brings, where the stage learns from it."""
        kl, temperature = self.distillation
        if not kl or batch.top_LK is None or batch.logp_LK is None or batch.labels_L is None:
            return None
        return Teacher(batch.top_LK, batch.logp_LK, kl, temperature)

    def count(self, tally: Tally, visual: bool, deep: Sequence[bool] = ()) -> None:
        """`visual`, `deep`: whether gradients reach the visual tokens, and those that DeepStack adds."""
        reached = visual or any_trainable(self.embed)
        for i, block in enumerate(self.blocks):
            reached = tally.block(block, self.recompute.repeats_products(i), reached) or (i < len(deep) and deep[i])
        self.head.count(tally, reached or any_trainable(self.norm))

    def new_cache(self, rows: int, room: int) -> list[Cache]:
        """Empty caches for `rows` sequences of at most `room` tokens, one per layer."""
        blocks = cast(Iterable[GeneratingBlock], self.blocks)  # a ModuleList forgets what it holds
        return [block.new_cache(rows, room, self.compute_dtype, self.embed.weight.device) for block in blocks]

    @torch.no_grad()
    def initialise(self, rng: torch.Generator) -> None:
        """From scratch: each residual branch starts at zero, so that a block starts as the identity; the embedding is small,
        so that an untrained model's loss is near ln(vocabulary)."""
        for name, parameter in weights_of(self):
            leaf = name.rsplit(".", 1)[-1]
            if leaf == "bias" or name.endswith(("attn.o.weight", "mlp.down.weight", "experts.down", "shared.down.weight")):
                parameter.zero_()
            elif "norm" in name:
                parameter.fill_(1.0)
            elif name.startswith(("embed.", "head.")):
                normal_(parameter, 0.02, rng)
            else:
                normal_(parameter, parameter.shape[-1] ** -0.5, rng)
        for module in self.modules():
            if module is not self and isinstance(module, StartsItself):
                module.initialise(rng)
