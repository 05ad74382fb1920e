"""LoRA: a low-rank update added to a frozen weight (Hu et al. 2021). `y = W·x + α/r · B·(A·dropout(x))`, PEFT's convention.

Dims: T tokens  r rank  in, out: widths of the wrapped layer
"""

from collections.abc import Collection
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from eyeline.core.errors import Refused, nearest
from eyeline.core.plan import INPUTS, Part, Spec, Traits, part_of
from eyeline.core.randomness import seed_for
from eyeline.core.settings import Positive, PositiveFloat, Settings
from eyeline.core.shards import put
from eyeline.kernels.dropout import dropout_mask
from eyeline.kernels.gpu import on_gpu
from eyeline.kernels.linears import Layer, adapted
from eyeline.models.flops import Rows, Tally
from eyeline.models.layers import Linear


class LoRA(Settings):
    rank: Positive
    alpha: PositiveFloat  # the update is scaled by alpha / rank
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0  # of the adapter's input, in training
    targets: Annotated[tuple[str, ...], Field(min_length=1)] | Literal["all-linear"]  # linear layers of the part: q_proj … down_proj


class LoRALinear(Linear):
    """A linear layer that keeps its weight and bias, under their names, and adds `lora_A` [r, in] and `lora_B` [out, r].

    Dropout's mask is made of the rows' draws (`Batch.draws_T2`) and of the layer's name.
    """

    def __init__(self, base: Linear, lora: LoRA, name: str):
        with torch.device("meta"):  # the tensors are the base's
            super().__init__(base.in_features, base.out_features, bias=False, split=base.split, target=base.target)
        self.weight, self.bias = base.weight, base.bias
        self.scale, self.dropout = lora.alpha / lora.rank, lora.dropout
        # a tensor on the host, whatever the device: compiled blocks that differ by it alone are one graph
        self.address = torch.tensor(seed_for(0, name), device="cpu")
        self.lora_A = nn.Parameter(torch.empty(lora.rank, base.in_features, device=base.weight.device))
        self.lora_B = nn.Parameter(torch.empty(base.out_features, lora.rank, device=base.weight.device))

    def traits(self) -> dict[str, Traits]:
        """Where outputs are cut, so is B, and A is whole; where inputs are, so is A, and B is whole."""
        a, b = (self.split, None) if self.split == INPUTS else (None, self.split)
        return {**super().traits(), "lora_A": Traits(a, role="adapter"), "lora_B": Traits(b, role="adapter")}

    @torch.no_grad()
    def initialise_adapter(self, rng: torch.Generator) -> None:
        """A as PEFT starts it, uniform in ±1/√in; B at zero, so that the layer computes what it did without."""
        a_rI = (torch.rand(self.lora_A.shape, generator=rng, device=rng.device) * 2 - 1) * self.in_features**-0.5
        put(self.lora_A, a_rI)
        self.lora_B.zero_()

    def tensors(self) -> Layer | None:
        if self.training and self.dropout:
            return None
        return Layer(self.weight, self.bias, self.lora_A, self.lora_B, self.scale)

    def forward(self, x_TD: Tensor, draws_T2: Tensor | None = None) -> Tensor:
        if on_gpu(x_TD) and (tensors := self.tensors()) is not None:
            return adapted(x_TD, tensors)
        kept_TD, scale = x_TD, self.scale
        if self.training and self.dropout:
            assert draws_T2 is not None, "dropout in training needs the batch's draws"
            kept_TD = torch.where(dropout_mask(draws_T2, self.address, self.in_features, self.dropout), 0, x_TD)
            scale /= 1 - self.dropout
        update = F.linear(F.linear(kept_TD, self.lora_A.to(x_TD.dtype)), self.lora_B.to(x_TD.dtype))
        return super().forward(x_TD) + update * scale

    def count(self, tally: Tally, reached: bool, rows: Rows) -> bool:
        rank, a, b = len(self.lora_A), self.lora_A.requires_grad, self.lora_B.requires_grad
        lowered = tally.product(rows, self.in_features, rank, reached, a)
        raised = tally.product(rows, rank, self.out_features, lowered, b)
        return super().count(tally, reached, rows) or raised


def targets_of(model: nn.Module, spec: Spec, part: Part) -> dict[str, list[str]]:
    """The linear layers of a part by the name that a recipe calls them: `q_proj` … `down_proj`. Those that no output depends on are
    left out."""
    found: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        if isinstance(module, Linear) and module.target is not None and part_of(name) == part and spec.uses(name):
            found.setdefault(module.target, []).append(name)
    return found


def unknown_target(target: str, known: Collection[str]) -> str:
    """The message about a target that a part does not have."""
    if f"{target}_proj" in known:
        return f"{target!r} is called '{target}_proj' here."
    return f"there is no linear layer {target!r}.{nearest(target, list(known))} There are {', '.join(known)}, or the word all-linear."


def wrap(model: nn.Module, spec: Spec, part: Part, lora: LoRA) -> list[str]:
    """Put adapters, not yet filled, on the targeted linear layers of one part, and only of that part; return the names of those layers.

    Raises Refused for a target that the part does not have.
    """
    known = targets_of(model, spec, part)
    targets = tuple(known) if lora.targets == "all-linear" else lora.targets
    for target in targets:
        if target not in known:
            raise Refused(f"LoRA targets of {part}: {unknown_target(target, known)}")
    wrapped = [name for name, _ in model.named_modules() if any(name in known[target] for target in targets)]
    for name in wrapped:
        layer = model.get_submodule(name)
        assert isinstance(layer, Linear) and not isinstance(layer, LoRALinear), f"{name} has an adapter already"
        model.set_submodule(name, LoRALinear(layer, lora, name))
    return wrapped


def adapters(model: nn.Module) -> dict[str, LoRALinear]:
    """The layers that have an adapter, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoRALinear)}


def merge(weight_OI: Tensor, a_rI: Tensor, b_Or: Tensor, scale: float) -> Tensor:
    """A weight with the update of its adapter added, in float32: it is rounded once, where it is stored."""
    return weight_OI.float() + scale * (b_Or.float() @ a_rI.float())
