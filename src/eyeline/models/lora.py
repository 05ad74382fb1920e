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
from eyeline.core.facts import Facts, Part, matches
from eyeline.core.randomness import seed_for
from eyeline.core.settings import Positive, PositiveFloat, Settings
from eyeline.kernels.dropout import dropout_mask
from eyeline.models.flops import Rows, Tally
from eyeline.models.layers import Linear


class LoRA(Settings):
    rank: Positive
    alpha: PositiveFloat  # the update is scaled by alpha / rank
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0  # of the adapter's input, in training
    targets: Annotated[tuple[str, ...], Field(min_length=1)] | Literal["all-linear"]  # linear layers of the part: q_proj … down_proj


class LoRALinear(Linear):
    """A linear layer that keeps its weight and bias, under their names, and adds `lora_A` [r, in] and `lora_B` [out, r].

    B starts at zero: a freshly wrapped layer computes what it did before. A starts as PEFT's does, uniform in ±1/√in. Dropout's mask
    is made of the rows' draws (`Batch.draws_T2`) and of the layer's name.
    """

    def __init__(self, base: Linear, lora: LoRA, rng: torch.Generator, name: str):
        super().__init__(base.in_features, base.out_features, bias=False, device="meta")  # the real tensors are the base's
        self.weight, self.bias = base.weight, base.bias
        self.scale, self.dropout = lora.alpha / lora.rank, lora.dropout
        # a tensor on the host, whatever the device: compiled blocks that differ by it alone are one graph
        self.address = torch.tensor(seed_for(0, name), device="cpu")
        a_rI = (torch.rand(lora.rank, base.in_features, generator=rng, device=rng.device) * 2 - 1) * base.in_features**-0.5
        device = base.weight.device
        self.lora_A = nn.Parameter(a_rI.to(device))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, lora.rank, device=device))

    def forward(self, x_TD: Tensor, draws_T2: Tensor | None = None) -> Tensor:
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


def targets_of(facts: Facts, part: Part) -> dict[str, str]:
    """The pattern of each linear layer of a part, by the name that a recipe calls it: `q_proj` … `down_proj`."""
    return {f"{name}_proj": pattern for name, pattern in facts.linears.get(part, {}).items()}


def unknown_target(target: str, known: Collection[str]) -> str:
    """What to say of a target that a part does not have."""
    if f"{target}_proj" in known:
        return f"{target!r} is called '{target}_proj' here."
    return f"there is no linear layer {target!r}.{nearest(target, list(known))} There are {', '.join(known)}, or the word all-linear."


def wrap(model: nn.Module, facts: Facts, part: Part, lora: LoRA, rng: torch.Generator) -> list[str]:
    """Put adapters on the targeted linear layers of one part, and only of that part; return the names of those layers.

    Raises Refused for a target that the part does not have. Layers that nothing depends on (`facts.unused`) get none.
    """
    known = targets_of(facts, part)
    targets = tuple(known) if lora.targets == "all-linear" else lora.targets
    for target in targets:
        if target not in known:
            raise Refused(f"LoRA targets of {part}: {unknown_target(target, known)}")
    patterns = [known[target] for target in targets]
    wrapped = []
    for name, module in list(model.named_modules()):
        if any(matches(pattern, name) for pattern in patterns) and not _unused(facts, name):
            assert isinstance(module, Linear), f"{name} is a {type(module).__name__}"
            assert not isinstance(module, LoRALinear), f"{name} has an adapter already; merge first"
            model.set_submodule(name, LoRALinear(module, lora, rng, name))
            wrapped.append(name)
    return wrapped


def _unused(facts: Facts, name: str) -> bool:
    return any(name == root or name.startswith(root + ".") for root in facts.unused)


def adapters(model: nn.Module) -> list[str]:
    """Names of the layers that have an adapter."""
    return [name for name, module in model.named_modules() if isinstance(module, LoRALinear)]


@torch.no_grad()
def merge(model: nn.Module, dtype: torch.dtype = torch.float32) -> list[str]:
    """Add every update to its weight and take the adapters off; return the names of the layers that had one.

    The sum is made in float32, also where the frozen weight was kept in bfloat16, and kept in `dtype`: in float32, nothing of the
    update is rounded away.
    """
    merged = adapters(model)
    for name in merged:
        adapted = model.get_submodule(name)
        assert isinstance(adapted, LoRALinear)
        plain = Linear(adapted.in_features, adapted.out_features, bias=False, device="meta")
        sum_OI = adapted.weight.float() + adapted.scale * (adapted.lora_B @ adapted.lora_A)
        plain.weight = nn.Parameter(sum_OI.to(dtype), requires_grad=adapted.weight.requires_grad)
        plain.bias = adapted.bias
        model.set_submodule(name, plain)
    return merged
