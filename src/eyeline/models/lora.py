"""LoRA: a low-rank update added to a frozen weight (Hu et al. 2021). `y = W·x + s · B·(A·dropout(x))`, PEFT's convention.

The scale s is α/r, or α/√r where it is rank-stabilized (rsLoRA, Kalajdzievski 2023). With DoRA (Liu et al. 2024) the length of each row of
the updated weight is a parameter of its own: `W' = m · (W + s·B·A) / ‖W + s·B·A‖`.

Dims: T tokens  r rank  in, out: widths of the wrapped layer (I, O)
"""

from collections.abc import Collection, Iterator
from typing import Annotated, Literal, NamedTuple

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from eyeline.core.errors import Refused, nearest
from eyeline.core.plan import EXPERTS, INPUTS, Part, Spec, Traits, part_of
from eyeline.core.randomness import seed_for
from eyeline.core.settings import NotNegative, Positive, PositiveFloat, Settings
from eyeline.core.shards import put, whole
from eyeline.kernels.dropout import dropout_mask
from eyeline.kernels.gpu import on_gpu
from eyeline.kernels.linears import Layer, adapted
from eyeline.kernels.moe import grouped_linear
from eyeline.kernels.nf4 import BLOCK
from eyeline.kernels.swiglu import swiglu
from eyeline.models.flops import Rows, Tally
from eyeline.models.layers import Linear, ReplaceableModule
from eyeline.models.moe import Experts, ExpertWeights


class LoRA(Settings):
    rank: Positive
    alpha: PositiveFloat  # the update is scaled by alpha / rank
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0  # of the adapter's input, in training
    targets: Annotated[tuple[str, ...], Field(min_length=1)] | Literal["all-linear"]  # linear layers of the part: q_proj … down_proj
    rslora: bool = False  # the update is scaled by alpha / √rank instead
    dora: bool = False  # the length of each row of the updated weight is trained apart
    freeze_layers: NotNegative = 0  # the first blocks of the part, which get no adapters
    # nf4: linear layers of the part's blocks are stored in 4 bits (QLoRA, Dettmers et al. 2023); nf4_double: and their scales in 8
    quantize: Literal["none", "nf4", "nf4_double"] = "none"

    @model_validator(mode="after")
    def _goes_with_nf4(self) -> "LoRA":
        if self.dora and self.quantize != "none":
            raise ValueError("dora needs the lengths of a weight's rows, and quantize stores them in 4 bits. Leave one of them out")
        return self

    @property
    def scale(self) -> float:
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)


SHORTEST = 1e-12  # a row, where its norm is divided by


class Lengths(ReplaceableModule):
    """Norms of what is here of each row -> of whole rows, where tensor parallelism cuts them."""

    kind = "lengths"

    def forward(self, length_O: Tensor) -> Tensor:
        return length_O


class LoRALinear(Linear):
    """A linear layer that keeps its weight and bias, under their names, and adds `lora_A` [r, in] and `lora_B` [out, r].

    With DoRA there is `lora_magnitude` [out], too. Dropout's mask is made of the rows' draws (`Batch.draws_T2`) and of the layer's name.
    """

    lora_magnitude: nn.Parameter | None

    def __init__(self, base: Linear, lora: LoRA, name: str):
        with torch.device("meta"):  # the tensors are the base's
            super().__init__(base.in_features, base.out_features, bias=False, split=base.split, target=base.target)
        self.weight, self.bias = base.weight, base.bias
        self.scale, self.dropout, self.rslora = lora.scale, lora.dropout, lora.rslora
        self.first_input = 0  # of those that are here: under tensor parallelism a rank may have some of the columns
        # a tensor on the host, whatever the device: compiled blocks that differ by it alone are one graph
        self.address = torch.tensor(seed_for(0, name), device="cpu")
        self.lora_A = nn.Parameter(torch.empty(lora.rank, base.in_features, device=base.weight.device))
        self.lora_B = nn.Parameter(torch.empty(base.out_features, lora.rank, device=base.weight.device))
        magnitude = nn.Parameter(torch.empty(base.out_features, device=base.weight.device)) if lora.dora else None
        self.register_parameter("lora_magnitude", magnitude)
        self.lengths = Lengths() if lora.dora else None

    def traits(self) -> dict[str, Traits]:
        """Where outputs are cut, so is B, and A is whole; where inputs are, so is A, and B is whole."""
        a, b = (self.split, None) if self.split == INPUTS else (None, self.split)
        adapter = {"lora_A": Traits(a, role="adapter"), "lora_B": Traits(b, role="adapter")}
        return {**super().traits(), **adapter, "lora_magnitude": Traits(b, exact=True, decays=False, role="adapter")}

    @torch.no_grad()
    def initialise_adapter(self, rng: torch.Generator) -> None:
        """A as PEFT starts it, uniform in ±1/√in; B at zero, and the lengths of rows as they are, so that the layer computes what it did
        without."""
        a_rI = (torch.rand(self.lora_A.shape, generator=rng, device=rng.device) * 2 - 1) * self.in_features**-0.5
        put(self.lora_A, a_rI)
        self.lora_B.zero_()
        if self.lora_magnitude is not None:
            put(self.lora_magnitude, whole(self.weight).float().norm(dim=1))

    def tensors(self) -> Layer | None:
        if self.largest is not None or self.float8 is not None or self.lora_magnitude is not None or (self.training and self.dropout):
            return None
        return Layer(self.weight, self.bias, self.lora_A, self.lora_B, self.scale)

    def forward(self, x_TD: Tensor, draws_T2: Tensor | None = None) -> Tensor:
        if on_gpu(x_TD) and (tensors := self.tensors()) is not None:
            return adapted(x_TD, tensors)
        kept_TD, scale = x_TD, self.scale
        if self.training and self.dropout:
            assert draws_T2 is not None, "dropout in training needs the batch's draws"
            kept_TD = torch.where(dropout_mask(draws_T2, self.address, x_TD.shape[1], self.dropout, self.first_input), 0, x_TD)
            scale /= 1 - self.dropout
        update = F.linear(F.linear(kept_TD, self.lora_A.to(x_TD.dtype)), self.lora_B.to(x_TD.dtype))
        if self.lora_magnitude is not None:
            return self._with_lengths(x_TD, kept_TD, update * scale, scale / self.scale)
        return super().forward(x_TD) + update * scale

    def _with_lengths(self, x_TD: Tensor, kept_TD: Tensor, update_TO: Tensor, kept_scale: float) -> Tensor:
        """DoRA as PEFT computes it: what the lengths change is of the input that dropout kept, and the rows' own norm is a constant to
        gradients (section 4.3 of the paper). `kept_scale`: 1 over the share that dropout keeps."""
        assert self.lora_magnitude is not None
        weight_OI = self.weight.to(x_TD.dtype)
        plain_TO = F.linear(x_TD, weight_OI)
        kept_TO = plain_TO if kept_TD is x_TD else F.linear(kept_TD, weight_OI) * kept_scale
        gain_O = self.lora_magnitude / self._lengths()
        out_TO = plain_TO + (gain_O - 1).to(x_TD.dtype) * kept_TO + gain_O.to(x_TD.dtype) * update_TO
        return out_TO if self.bias is None else out_TO + self.bias.to(x_TD.dtype)

    @torch.no_grad()
    def _lengths(self) -> Tensor:
        """The norm of each row of the updated weight, of which tensor parallelism may have some columns here."""
        assert self.lengths is not None
        return self.lengths(merge(self.weight, self.lora_A, self.lora_B, self.scale).norm(dim=1)).clamp_min(SHORTEST)

    def count(self, tally: Tally, reached: bool, rows: Rows) -> bool:
        rank, a, b = len(self.lora_A), self.lora_A.requires_grad, self.lora_B.requires_grad
        lowered = tally.product(rows, self.in_features, rank, reached, a)
        raised = tally.product(rows, rank, self.out_features, lowered, b)
        if self.lora_magnitude is not None and self.dropout:  # of the input that dropout kept, the weight's product once more
            tally.product(rows, self.in_features, self.out_features, reached, False)
        return super().count(tally, reached, rows) or raised


EXPERTS_TARGET = "experts"  # the target that stands for gate, up and down of all experts
EXPERT_LEAVES = ("gate", "up", "down")


class LoRAExperts(ExpertWeights):
    """Stacked experts that keep their weights, under their names, and add for each of them `NAME_lora_A` [E, r, in] and `NAME_lora_B`
    [E, out, r]: an adapter per expert, as PEFT's of a parameter (`target_parameters`) has."""

    def __init__(self, base: ExpertWeights, lora: LoRA):
        count, hidden, width = base.gate.shape
        with torch.device("meta"):  # the tensors are the base's
            super().__init__(Experts(num_experts=count, experts_per_token=1, intermediate_size=hidden), width)
        self.gate, self.up, self.down = base.gate, base.up, base.down
        self.scale, self.rslora = lora.scale, lora.rslora
        for leaf in EXPERT_LEAVES:
            _, outputs, inputs = base.get_parameter(leaf).shape
            for end, shape in (("A", (count, lora.rank, inputs)), ("B", (count, outputs, lora.rank))):
                self.register_parameter(f"{leaf}_lora_{end}", nn.Parameter(torch.empty(shape, device=base.gate.device)))

    def traits(self) -> dict[str, Traits]:
        adapter = Traits(EXPERTS, role="adapter")
        return {name: adapter if "_lora_" in name else Traits(EXPERTS) for name in self._parameters}

    @torch.no_grad()
    def initialise_adapter(self, rng: torch.Generator) -> None:
        """As a linear layer's, for each expert."""
        for leaf in EXPERT_LEAVES:
            a_ErI = self.get_parameter(f"{leaf}_lora_A")
            put(a_ErI, (torch.rand(a_ErI.shape, generator=rng, device=rng.device) * 2 - 1) * a_ErI.shape[-1] ** -0.5)
            self.get_parameter(f"{leaf}_lora_B").zero_()

    def forward(self, x_ND: Tensor, ends_E: Tensor) -> Tensor:
        return self._product(swiglu(self._product(x_ND, "gate", ends_E), self._product(x_ND, "up", ends_E)), "down", ends_E)

    def _product(self, x_ND: Tensor, leaf: str, ends_E: Tensor) -> Tensor:
        weight, a, b = (self.get_parameter(name).to(x_ND.dtype) for name in (leaf, f"{leaf}_lora_A", f"{leaf}_lora_B"))
        update = grouped_linear(grouped_linear(x_ND, a, ends_E), b, ends_E)
        return grouped_linear(x_ND, weight, ends_E) + update * self.scale

    def count(self, tally: Tally, reached: bool, active: int) -> bool:
        _, width, hidden = self.down.shape
        sizes = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
        into = {"gate": reached, "up": reached, "down": True}  # down's input comes from adapters, which train
        for leaf, (inputs, outputs) in sizes.items():
            a, b = (self.get_parameter(f"{leaf}_lora_{end}") for end in "AB")
            tally.product("token", inputs, outputs, into[leaf], self.get_parameter(leaf).requires_grad, active)
            lowered = tally.product("token", inputs, a.shape[1], into[leaf], a.requires_grad, active)
            tally.product("token", a.shape[1], outputs, lowered, b.requires_grad, active)
        return True


class Update(NamedTuple):
    """An adapter: the names of its tensors, and the scale of what it adds to a weight."""

    a: str
    b: str
    magnitude: str | None
    scale: float
    rank: int


def updates_of(model: nn.Module) -> dict[str, Update]:
    """The adapters of a model, by the name of the weight that each one updates."""
    found: dict[str, Update] = {}
    for name, module in model.named_modules():
        if isinstance(module, LoRALinear):
            magnitude = None if module.lora_magnitude is None else f"{name}.lora_magnitude"
            found[f"{name}.weight"] = Update(f"{name}.lora_A", f"{name}.lora_B", magnitude, module.scale, len(module.lora_A))
        elif isinstance(module, LoRAExperts):
            for leaf in EXPERT_LEAVES:
                a = f"{name}.{leaf}_lora_A"
                found[f"{name}.{leaf}"] = Update(a, f"{name}.{leaf}_lora_B", None, module.scale, model.get_parameter(a).shape[1])
    return found


def merged(model: nn.Module, weight: str, update: Update) -> Tensor:
    """A weight of a model with its update added, in float32."""
    a_rI, b_Or = model.get_parameter(update.a).detach(), model.get_parameter(update.b).detach()
    magnitude_O = None if update.magnitude is None else model.get_parameter(update.magnitude).detach()
    layer = model.get_submodule(weight.rpartition(".")[0])
    dense = layer.dense() if isinstance(layer, Linear) else model.get_parameter(weight)
    return merge(dense.detach(), a_rI, b_Or, update.scale, magnitude_O)


def targets_of(model: nn.Module, spec: Spec, part: Part) -> dict[str, list[str]]:
    """The linear layers of a part by the name that a recipe calls them: `q_proj` … `down_proj`; and its experts. Those that no output
    depends on are left out."""
    found: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        if isinstance(module, Linear) and module.target is not None and part_of(name) == part and spec.uses(name):
            found.setdefault(module.target, []).append(name)
        elif isinstance(module, ExpertWeights) and part_of(name) == part:
            found.setdefault(EXPERTS_TARGET, []).append(name)
    return found


def experts_problems(lora: LoRA) -> Iterator[str]:
    """The settings that adapters of experts do not have."""
    if lora.targets == "all-linear" or EXPERTS_TARGET not in lora.targets:
        return
    if lora.dora:
        yield "dora: an adapter of experts is plain LoRA, as peft's is. Leave dora or the target experts out"
    if lora.dropout:
        yield "dropout: an adapter of experts has none, as peft's has none. Set dropout: 0, or leave the target experts out"


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
    for problem in experts_problems(lora):
        raise Refused(f"LoRA of {part}: {problem}")
    targets = tuple(name for name in known if name != EXPERTS_TARGET) if lora.targets == "all-linear" else lora.targets
    for target in targets:
        if target not in known:
            raise Refused(f"LoRA targets of {part}: {unknown_target(target, known)}")
    frozen = tuple(f"{part}.blocks.{i}." for i in range(lora.freeze_layers))
    wrapped = [
        name for name, _ in model.named_modules() if any(name in known[target] for target in targets) and not name.startswith(frozen)
    ]
    for name in wrapped:
        layer = model.get_submodule(name)
        assert not isinstance(layer, LoRALinear | LoRAExperts), f"{name} has an adapter already"
        if isinstance(layer, ExpertWeights):
            model.set_submodule(name, LoRAExperts(layer, lora))
        else:
            assert isinstance(layer, Linear), f"{name} is a linear layer"
            model.set_submodule(name, LoRALinear(layer, lora, name))
    if lora.quantize != "none":
        for layer in quantizable(model, part):
            layer.pack(double=lora.quantize == "nf4_double")
    return wrapped


def quantizable(model: nn.Module, part: Part) -> list[Linear]:
    """The linear layers of a part's blocks whose rows are whole blocks of NF4."""
    return [
        module
        for name, module in model.named_modules()
        if isinstance(module, Linear) and name.startswith(f"{part}.blocks.") and module.in_features % BLOCK == 0
    ]


def adapters(model: nn.Module) -> dict[str, LoRALinear | LoRAExperts]:
    """The layers and experts that have an adapter, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoRALinear | LoRAExperts)}


def merge(weight_OI: Tensor, a_rI: Tensor, b_Or: Tensor, scale: float, magnitude_O: Tensor | None = None) -> Tensor:
    """A weight with the update of its adapter added, in float32: it is rounded once, where it is stored. With `magnitude_O` (DoRA) each
    row, which must be whole, has that length. Of stacked experts there is an adapter for each."""
    merged_OI = weight_OI.float() + scale * (b_Or.float() @ a_rI.float())
    return merged_OI if magnitude_O is None else merged_OI * (magnitude_O / lengths_of(merged_OI))[:, None]


def lengths_of(weight_OI: Tensor) -> Tensor:
    """The norm of each row, never zero: a row of zeros, as in a layer that starts at zero, has no direction to divide by."""
    return weight_OI.norm(dim=1).clamp_min(SHORTEST)
