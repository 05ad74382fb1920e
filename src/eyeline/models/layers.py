"""Layers that are the same mathematics in every family, and the one place where weights are cast.

Weights are kept in float32 while they train (bfloat16 where frozen) and cast to the dtype of the activations where they are
used: there is no autocast. Norms compute in float32 and give back the activations' dtype.

Dims: T tokens  D width  H query heads  G key/value heads  K head dim  F feed-forward  S documents
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from eyeline.core.plan import ADAPTER_NAMES, INPUTS, OUTPUTS, VOCABULARY, Replaceable, Split, Traits
from eyeline.core.shards import put
from eyeline.kernels.attention import LayerCache, cached_attention, packed_attention
from eyeline.kernels.float8 import Scaling, float8_linear
from eyeline.kernels.gpu import on_gpu
from eyeline.kernels.kept import keeping_products, on_host
from eyeline.kernels.linears import Layer, linears
from eyeline.kernels.nf4 import BLOCK, bytes_of_scales, dequantised, nf4_linear
from eyeline.kernels.norms import layer_norm, rms_norm
from eyeline.kernels.swiglu import swiglu
from eyeline.models.flops import Rows, Tally, any_trainable


@runtime_checkable
class HoldsTensors(Protocol):
    """A layer with parameters or buffers of its own."""

    def traits(self) -> dict[str, Traits]:
        """What it states about each, by its name in the layer."""
        ...


class Branch(nn.Module):
    """Takes the rows of the residual stream and returns rows to be added to it. Tensor parallelism cuts the weights inside by heads or
    hidden units, and gathers and sums rows at its two ends."""


class ReplaceableModule(nn.Module):
    """A submodule without weights through which tensors pass that parallelism routes over ranks: it may put another in its place."""

    kind: ClassVar[Replaceable]


class Unfilled(nn.Module):
    """A layer of torch's whose tensors get no first values here: `bundle/fill.py` fills every one. A meta tensor that is to be filled with
    normal numbers makes torch import its compiler."""

    def reset_parameters(self) -> None:
        pass


class Linear(Unfilled, nn.Linear):
    """`x·Wᵀ + b` in x's dtype. `target` is the name by which a recipe puts an adapter on it; None: it takes none. `draws_T2` are of the
    rows, for an adapter in its place, which drops some of its input. A frozen weight may be stored in NF4 (`pack`): then `largest` has the
    largest magnitude of each block."""

    def __init__(self, inputs: int, outputs: int, bias: bool = True, *, split: Split | None = None, target: str | None = None):
        super().__init__(inputs, outputs, bias)
        assert not (bias and split == INPUTS), "each rank would add the bias"
        self.split, self.target = split, target
        self.register_parameter("largest", None)
        self.float8: Scaling | None = None  # its products are in FP8, scaled so

    def traits(self) -> dict[str, Traits]:
        weight = Traits(self.split, muon=self.target is not None, storage="plain" if self.largest is None else "nf4")
        largest = Traits(exact=True, decays=False, storage="scale")
        return {"weight": weight, "bias": Traits(self.split, decays=False), "largest": largest}

    def pack(self, double: bool) -> None:
        """Store the weight in NF4, and the largest magnitudes of its blocks in 8 bits if `double`: not yet filled."""
        rows, device = self.out_features, self.weight.device
        packed = torch.empty(rows, self.in_features // 2, dtype=torch.uint8, device=device)
        self.weight = nn.Parameter(packed, requires_grad=False)
        blocks = self.in_features // BLOCK
        doubled = torch.empty(bytes_of_scales(rows * blocks), dtype=torch.uint8, device=device)
        self.largest = nn.Parameter(doubled if double else torch.empty(rows, blocks, device=device), requires_grad=False)

    def dense(self) -> Tensor:
        """The weight as numbers."""
        return self.weight if self.largest is None else dequantised(self.weight, self.largest)

    def forward(self, x_TD: Tensor, draws_T2: Tensor | None = None) -> Tensor:  # noqa: ARG002 (for LoRALinear)
        if self.largest is not None:
            out_TO = nf4_linear(x_TD, self.weight, self.largest)
            return out_TO if self.bias is None else out_TO + self.bias.to(x_TD.dtype)
        if self.float8 is not None:
            out_TO = float8_linear(x_TD, self.weight.to(x_TD.dtype), self.float8)
            return out_TO if self.bias is None else out_TO + self.bias.to(x_TD.dtype)
        return F.linear(x_TD, self.weight.to(x_TD.dtype), None if self.bias is None else self.bias.to(x_TD.dtype))

    def tensors(self) -> Layer | None:
        """What the layer computes with, for `together`; None where it does more than a linear layer with an adapter."""
        return None if self.largest is not None or self.float8 is not None else Layer(self.weight, self.bias)

    def count(self, tally: Tally, reached: bool, rows: Rows) -> bool:
        return tally.product(rows, self.in_features, self.out_features, reached, self.weight.requires_grad) or any_trainable(self)


def together(layers: Sequence[Linear], x_TD: Tensor, draws_T2: Tensor | None) -> list[Tensor]:
    """What each of several linear layers gives for the same input. On a GPU their sums are made inside products (`kernels/linears.py`)."""
    tensors = [layer.tensors() for layer in layers] if on_gpu(x_TD) and torch.is_grad_enabled() else [None]
    known = [one for one in tensors if one is not None]
    return linears(x_TD, known) if len(known) == len(tensors) else [layer(x_TD, draws_T2) for layer in layers]


class MLP(Branch):
    """The gated feed-forward layer (SwiGLU). `prefix` goes before the names of its targets."""

    def __init__(self, width: int, feed_forward: int, prefix: str = ""):
        super().__init__()
        self.gate, self.up = (
            Linear(width, feed_forward, bias=False, split=OUTPUTS, target=f"{prefix}{name}_proj") for name in ("gate", "up")
        )
        self.down = Linear(feed_forward, width, bias=False, split=INPUTS, target=f"{prefix}down_proj")

    def forward(self, x_TD: Tensor, draws_T2: Tensor | None = None) -> Tensor:
        return self.down(swiglu(*together((self.gate, self.up), x_TD, draws_T2)), draws_T2)

    def count(self, tally: Tally, reached: bool) -> bool:
        gate, up = (project.count(tally, reached, "token") for project in (self.gate, self.up))
        return self.down.count(tally, gate or up, "token")


class GeluMLP(nn.Module):
    """The feed-forward layer of the vision towers: linear, GELU (tanh form), linear, with biases."""

    def __init__(self, width: int, feed_forward: int):
        super().__init__()
        self.up, self.down = Linear(width, feed_forward, target="up_proj"), Linear(feed_forward, width, target="down_proj")

    def forward(self, x_PD: Tensor, draws_P2: Tensor | None = None) -> Tensor:
        return self.down(F.gelu(self.up(x_PD, draws_P2), approximate="tanh"), draws_P2)

    def count(self, tally: Tally, reached: bool) -> bool:
        return self.down.count(tally, self.up.count(tally, reached, "patch"), "patch")


class Embedding(Unfilled, nn.Embedding):
    """The rows of the vocabulary. From `first` on, `new_rows` are taken instead, where there are any: those of new tokens, which train
    while the weight does not."""

    new_rows: nn.Parameter | None

    def __init__(self, vocabulary: int, width: int):
        super().__init__(vocabulary, width)
        self.first = 0
        self.register_parameter("new_rows", None)

    def traits(self) -> dict[str, Traits]:
        return {"weight": Traits(VOCABULARY, decays=False), "new_rows": Traits(decays=False, role="adapter")}

    def forward(self, tokens_T: Tensor) -> Tensor:
        x_TD = super().forward(tokens_T)
        if self.new_rows is None:
            return x_TD
        at_T = tokens_T - self.first
        new_T = (at_T >= 0) & (at_T < len(self.new_rows))
        return torch.where(new_T[:, None], F.embedding(at_T.clamp(0, len(self.new_rows) - 1), self.new_rows), x_TD)


class Positions(Unfilled, nn.Embedding):
    """A learned table of positions, in float32: what is read of it is interpolated."""

    def traits(self) -> dict[str, Traits]:
        return {"weight": Traits(exact=True, decays=False)}


class Norm(nn.Module):
    """A layer whose tensors are vectors that are used in float32."""

    def traits(self) -> dict[str, Traits]:
        return {name: Traits(exact=True, decays=False) for name in self._parameters}


class RMSNorm(Norm):
    """`x / rms(x) · w`, in float32; the result has x's dtype."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x_TD: Tensor) -> Tensor:
        return rms_norm(x_TD, self.weight, self.eps)


class LayerNorm(Norm):
    """`(x - mean(x)) / std(x) · w + b`, in float32; the result has x's dtype."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.eps = eps

    def forward(self, x_TD: Tensor) -> Tensor:
        return layer_norm(x_TD, self.weight, self.bias, self.eps)


class Attend(ReplaceableModule):
    """Attention within documents, or over a cache while generating."""

    kind = "attend"

    def __init__(self, causal: bool):
        super().__init__()
        self.causal = causal

    def forward(self, q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, cu_S1: Tensor, longest: int, cache: LayerCache | None = None) -> Tensor:
        if cache is None:
            return packed_attention(q_THK, k_TGK, v_TGK, cu_S1, longest, self.causal)
        assert self.causal, "a cache is for causal attention"
        return cached_attention(q_THK, k_TGK, v_TGK, cu_S1, longest, cache)


class Deliver(ReplaceableModule):
    """Visual tokens of the images that were encoded here -> of those that are shown here, where images are shared out over ranks."""

    kind = "deliver"

    def forward(self, tokens_MD: Tensor) -> Tensor:
        return tokens_MD


# what of a block is made again in the backward pass. cheap: all but products and attention; offloaded: all, from an input on the host
Again = Literal["everything", "cheap", "offloaded"]


class Recompute(NamedTuple):
    """The blocks of a part whose activations are dropped, and made again in the backward pass."""

    blocks: frozenset[int] | None = frozenset()  # by number; None: all
    selective: bool = False  # what matrix products and attention gave is kept
    offload: bool = False  # the input of each block is on the host meanwhile

    def of(self, block: int) -> Again | None:
        if self.blocks is not None and block not in self.blocks:
            return None
        return "cheap" if self.selective else "offloaded" if self.offload else "everything"

    def repeats_products(self, block: int) -> bool:
        """Return whether the products of a block are made again."""
        return self.of(block) in ("everything", "offloaded")

    def whole(self, count: int) -> bool:
        """Return whether everything of all `count` blocks is made again."""
        return not self.selective and (self.blocks is None or len(self.blocks) == count)


NEVER, EVERY_BLOCK = Recompute(), Recompute(None)


def run_block(block: nn.Module, again: Again | None, *args: Any) -> Any:
    """`block(*args)`; some or all of its activations are dropped, and made `again` in the backward pass. A compiled block (`compiled.py`)
    does that inside its graph; one with experts outside of its graphs is recomputed as it is called, hooks included.

    Non-re-entrant: the re-entrant form gives no gradient to a block whose input needs none, such as the first block above
    a frozen embedding. Nothing in a block draws from a generator, so there is no state of one to put back.
    """
    if isinstance(block.forward, Compiled) and (block.forward.whole or again != "everything"):
        block.forward.again = again
        return block(*args)
    if again is None or not torch.is_grad_enabled():
        return block(*args)
    if again == "offloaded":
        with on_host(args[0]):
            return recomputed(block, "everything", *args)
    return recomputed(block, again, *args)


def recomputed(function: Callable[..., Any], again: Again, *args: Any) -> Any:
    how: dict[str, Any] = {} if again == "everything" else {"context_fn": keeping_products}
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False, **how)


class Compiled:
    """The `forward` of a block that is compiled, for passes with gradients. Other passes run as they stand, since they would need graphs
    of their own; so do those of an empty pack, whose sizes differ in kind from all others: no patches, and one token."""

    def __init__(self, block: nn.Module, graph: Callable[..., Any], fixed_rows: bool, whole: bool = True):
        """`graph(block, again, *args)` is compiled. `fixed_rows`: all batches have as many. `whole`: nothing of it is outside of graphs."""
        self.block, self.graph, self.fixed_rows, self.whole = block, graph, fixed_rows, whole
        self.again: Again | None = None

    def __call__(self, x_TD: Tensor, *args: Any) -> Any:
        if not torch.is_grad_enabled() or len(x_TD) < 2:
            return type(self.block).forward(self.block, x_TD, *args)
        if self.fixed_rows:
            torch._dynamo.mark_static(x_TD, 0)
        return self.graph(self.block, self.again, x_TD, *args)


def weights_of(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Every parameter but those of adapters, whose first values are no matter of the model's."""
    return ((name, parameter) for name, parameter in model.named_parameters() if not name.endswith(ADAPTER_NAMES))


def normal_(weight: Tensor, std: float, rng: torch.Generator) -> None:
    """Fill a weight of any device and dtype with normal numbers from float32 on the generator's device."""
    put(weight, torch.randn(weight.shape, generator=rng, device=rng.device).mul_(std))
