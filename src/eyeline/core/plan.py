"""The plan of a model: what it states about itself, and one table of its tensors.

Freezing, adapters, optimizers, checkpoints and sharding read the plan and nothing else, so that none of them knows a model by name.
A model is planned on the meta device (`models/shape.py`), placed on its devices (`parallel/place.py`), and then filled from where each
part's weights come from (`bundle/fill.py`).
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, Literal, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

from eyeline.core.image_rule import ImageRule
from eyeline.core.shards import is_sharded

Part = Literal["vision", "projector", "language"]
PARTS: tuple[Part, ...] = ("vision", "projector", "language")


# ---- what a config says


@dataclass(frozen=True)
class LanguageSizes:
    """Numbers that must divide for the language model to be cut."""

    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    state_key_heads: int | None = None  # of a recurrent state (Gated DeltaNet); None where no layer has one
    state_value_heads: int | None = None
    experts: int | None = None  # of a layer; None where no layer has some
    experts_per_token: int | None = None


@dataclass(frozen=True)
class VisionSizes:
    layers: int
    hidden_size: int
    heads: int
    deepstack: int = 0  # layers of the language model that DeepStack adds visual tokens after


@dataclass(frozen=True)
class Spec:
    """What the config of a model states, before any of it is built."""

    image: ImageRule | None  # None: a text-only model
    vocab_size: int  # rows of the embedding: no token id may reach it
    max_positions: int  # positions the language model was made for
    language: LanguageSizes
    vision: VisionSizes | None  # None: a text-only model
    unused: tuple[str, ...] = ()  # modules that no output depends on: kept so that exports are whole, never trained

    @property
    def parts(self) -> tuple[Part, ...]:
        """The submodules of these names together hold every tensor."""
        return PARTS if self.vision is not None else ("language",)

    def uses(self, name: str) -> bool:
        """Return whether some output depends on a module or tensor."""
        return not any(name == root or name.startswith(root + ".") for root in self.unused)


# ---- what layers say of their own tensors


@dataclass(frozen=True)
class Split:
    """How tensor or expert parallelism cuts a tensor: along a dim, into pieces of whole `unit`s."""

    unit: Literal["outputs", "inputs", "vocabulary", "heads", "experts"]
    dim: int


OUTPUTS, INPUTS, HEADS, VOCABULARY, EXPERTS = (
    Split("outputs", 0),
    Split("inputs", 1),
    Split("heads", 0),
    Split("vocabulary", 0),
    Split("experts", 0),
)


@dataclass(frozen=True)
class Traits:
    """What a layer states about one of its own parameters or buffers."""

    split: Split | None = None
    exact: bool = False  # it is used in float32, whatever the dtype of the activations, and therefore stored in it
    decays: bool = True  # weight decay applies
    muon: bool = False  # a matrix that Muon may train
    role: Literal["weight", "adapter", "buffer"] = "weight"
    storage: "Storage" = "plain"


Storage = Literal[
    "plain", "nf4", "scale"
]  # one tensor of numbers; their levels in 4 bits, two in a byte; the largest of each block of them


class NewRows(NamedTuple):
    """Rows of the vocabulary, one after another, that belong to new tokens and are trained apart from the others."""

    first: int
    count: int

    @property
    def end(self) -> int:
        return self.first + self.count


# of tensors with the role "adapter": what a stage adds to a model, and merging removes
ADAPTER_NAMES = ("lora_A", "lora_B", "lora_magnitude", "new_rows")  # a name may come before it: `gate_lora_A`


# ---- the plan


@dataclass(frozen=True)
class Entry:
    """One parameter or buffer."""

    part: Part
    role: Literal["weight", "adapter", "buffer"]
    shape: tuple[int, ...]
    trains: bool
    stored: torch.dtype
    compute: torch.dtype
    exact: bool  # used in float32, whatever the precision: where parameters are sharded every rank has it whole
    split: Split | None
    partial: bool  # where its branch is cut, each rank's gradient is a summand: it covers some of the heads
    tied_to: str | None  # the first name of the same tensor
    unit: str  # what is gathered together where parameters are sharded
    decays: bool
    muon: bool
    storage: Storage = "plain"


Replaceable = Literal["attend", "scan", "dispatch", "agree", "deliver", "loss", "lengths"]  # kinds of weightless submodules
M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class Slices:
    """What a rank has of a model that is cut along its depth. In the model there is None in place of every other block, and of the
    embedding and the head where they are elsewhere."""

    blocks: tuple[range, ...]  # the language model's, of each slice that is here
    numbers: tuple[int, ...]  # of these slices, from the first of the model on
    count: int  # slices of the model
    absent: Mapping[str, nn.Module]  # what other ranks have, by name, without memory
    whole: Mapping[str, Entry]  # the table of the whole model
    # first name of a tied tensor -> its name here, where this rank has the second of its two copies: another answers for it
    copies: Mapping[str, str]


@dataclass(frozen=True)
class Plan(Generic[M]):
    """A model and the facts about it. `model` is on the meta device until `materialise`."""

    model: M
    spec: Spec
    table: Mapping[str, Entry]  # by name: parameters in the order of `named_parameters`, tied names and buffers included
    blocks: Mapping[Part, tuple[str, ...]]  # units of recomputation, compilation and sharding
    branches: tuple[str, ...]  # modules that take rows and return rows, and whose weights tensor parallelism cuts
    replaceable: Mapping[tuple[Part, Replaceable], tuple[str, ...]]  # submodules that parallelism may replace
    slices: Slices | None = None  # of a model that ranks share out along its depth: all else here is of what this rank has

    def tensors(self) -> Iterator[tuple[str, Tensor, Entry]]:
        """Every tensor once, with its entry: a tied one under its first name."""
        for name, entry in self.table.items():
            if entry.tied_to is None:
                yield name, tensor_of(self.model, self.location(name)), entry

    def location(self, name: str) -> str:
        """Where a tensor is in the model, by its first name."""
        return self.copies.get(name, name)

    @property
    def copies(self) -> Mapping[str, str]:
        """First name -> location of the tied tensors that another rank has too, and answers for."""
        return {} if self.slices is None else self.slices.copies

    @property
    def whole(self) -> Mapping[str, Entry]:
        """The table of the whole model, whatever of it is here."""
        return self.table if self.slices is None else self.slices.whole

    @property
    def biased(self) -> bool:
        """Return whether routers have biases that balance their experts."""
        return any(entry.role == "buffer" for entry in self.whole.values())


def part_of(name: str) -> Part:
    """The part that holds a module or tensor. Any other first name is a defect of the family."""
    first = name.partition(".")[0]
    assert first in PARTS, f"{name} belongs to no part"
    return cast(Part, first)


def tensor_of(model: nn.Module, name: str) -> Tensor:
    """A parameter or buffer by name."""
    path, _, leaf = name.rpartition(".")
    found = getattr(model.get_submodule(path), leaf)
    assert isinstance(found, Tensor), f"{name} is not a tensor"
    return found


@contextmanager
def complete(plan: Plan[Any]) -> Iterator[None]:
    """The whole model in place of what this rank has of it, as long as this lasts: the rest is on the meta device, which takes numbers and
    keeps none. So first values are drawn and arithmetic is counted as in one process."""
    if plan.slices is None:
        yield
        return
    for name, module in plan.slices.absent.items():
        put_module(plan.model, name, module)
    for name, entry in plan.slices.whole.items():
        if entry.tied_to is not None:
            here = plan.location(entry.tied_to)
            other = name if here == entry.tied_to else entry.tied_to
            path, _, leaf = other.rpartition(".")
            setattr(plan.model.get_submodule(path), leaf, tensor_of(plan.model, here))
    try:
        yield
    finally:
        for name in plan.slices.absent:
            put_module(plan.model, name, None)


def put_module(model: nn.Module, name: str, module: nn.Module | None) -> None:
    """Put a module in its place, which keeps its position among the others; None: leave the place empty."""
    path, _, leaf = name.rpartition(".")
    model.get_submodule(path)._modules[leaf] = module


def materialise(plan: Plan[M], device: torch.device | str) -> None:
    """Give every tensor memory on `device`, not yet filled: no time is spent on numbers that are overwritten."""

    def empty(x: Tensor) -> Tensor:
        """What `Module.to_empty` makes, which asks for a meta tensor's strides: torch then imports its compiler's symbolic shapes."""
        return torch.empty_like(x, device=device) if is_sharded(x) else torch.empty(x.shape, dtype=x.dtype, device=device)

    plan.model._apply(empty)
    for name, entry in plan.table.items():  # of a tied tensor there are two now
        if entry.tied_to is not None:
            path, _, leaf = name.rpartition(".")
            setattr(plan.model.get_submodule(path), leaf, tensor_of(plan.model, entry.tied_to))
