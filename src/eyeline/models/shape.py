"""The shape of a model: built on the meta device, adapters included, with the table of its tensors. It costs no memory.

Layers state what is true of their own tensors (`traits`); what is true of a tensor because of where it stands, its part, its unit and
whether it is in a branch, is read off the model here, and what a stage decides comes as arguments.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal

import torch
from torch import Tensor, nn

from eyeline.core.plan import Entry, NewRows, Part, Plan, Replaceable, Spec, Traits, materialise, part_of
from eyeline.models import Config, Model, family_of, spec
from eyeline.models.layers import Branch, HoldsTensors, ReplaceableModule
from eyeline.models.lora import LoRA, wrap
from eyeline.models.moe import Balance, add_biases, set_balance

Trains = Literal["full", "adapters"]  # what of a part trains: everything, or what LoRA added
ENTERS = ("embed", "positions")  # the children of a part that its first block's input is made with


@dataclass(frozen=True)
class Ways:
    """What of a model a stage trains."""

    trains: Mapping[Part, Trains]
    freeze_layers: Mapping[Part, int] = field(default_factory=dict)  # the first blocks of a part, and what comes before them, are frozen
    saved: Collection[str] = ()  # modules that train in full although their part has adapters

    def train(self, spec: Spec, name: str) -> bool:
        """Return whether a weight trains."""
        return spec.uses(name) and self.cover(name)

    def cover(self, name: str) -> bool:
        """Return whether a weight is among those that a stage is to train, used or not."""
        part, child, *rest = name.split(".")
        match self.trains.get(part_of(part)):
            case "full":
                frozen = self.freeze_layers.get(part_of(part), 0)
                first = bool(frozen) and (child in ENTERS or (child == "blocks" and int(rest[0]) < frozen))
                return not first
            case "adapters":
                return f"{part}.{child}" in self.saved
            case None:
                return False


def shape(
    c: Config,
    *,
    trains: Mapping[Part, Trains] | Ways | None = None,
    later: Sequence[Ways] = (),
    adapters: Mapping[Part, LoRA] | None = None,
    dtype: torch.dtype = torch.float32,
    compute_dtype: torch.dtype = torch.float32,
    narrow: Collection[Part] = (),
    balance: Balance | None = None,
    biased: bool = False,
    new_rows: NewRows | None = None,
) -> Plan[Model]:
    """The plan of a model of this config. Without `trains`, everything trains that some output depends on.

    Tensors are stored in `dtype`; in the parts that are `narrow`, matrices that neither this stage nor a `later` one trains, and that
    are cast to `compute_dtype` wherever they are used, are stored in that. `biased`: the weights that it is to be filled with have
    biases that balance experts. `new_rows`: rows of the vocabulary that are adapters of the language model, apart from the others.

    Raises Refused for an adapter's target that the part does not have.
    """
    stated = spec(c)
    model = _model(c, stated, compute_dtype, adapters or {}, new_rows)
    if biased:
        add_biases(model)
    set_balance(model, balance)
    blocks = _blocks(model)
    branches = tuple(name for name, module in model.named_modules() if isinstance(module, Branch))
    every_block = {name for names in blocks.values() for name in names}
    ways = trains if isinstance(trains, Ways) else Ways(dict.fromkeys(stated.parts, "full") if trains is None else trains)
    names: dict[int, str] = {}  # the first name of each tensor
    table: dict[str, Entry] = {}
    for name, tensor, traits in _stated(model):
        part = part_of(name)
        first = names.setdefault(id(tensor), name)
        in_training = ways.trains.get(part) == "adapters" if traits.role == "adapter" else ways.train(stated, first)
        in_training &= traits.role != "buffer"
        kept = in_training or any(one.cover(first) for one in (ways, *later))
        narrowed = (
            part in narrow and traits.storage == "plain" and not kept and tensor.ndim > 1 and traits.role == "weight" and not traits.exact
        )
        table[name] = Entry(
            part=part,
            role=traits.role,
            shape=tuple(tensor.shape),
            trains=in_training,
            stored=torch.uint8 if tensor.dtype == torch.uint8 else compute_dtype if narrowed else dtype,
            compute=torch.float32 if traits.exact else compute_dtype,
            exact=traits.exact,
            split=traits.split,
            partial=traits.split is None and any(name.startswith(branch + ".") for branch in branches),
            tied_to=None if first == name else first,
            unit=_unit(model, every_block, first),
            decays=traits.decays if first == name else table[first].decays,
            muon=traits.muon,
            storage=traits.storage,
        )
    _give_dtypes(model, table)
    return Plan(model, stated, table, blocks, branches, _replaceable(model))


def _model(c: Config, stated: Spec, compute_dtype: torch.dtype, adapters: Mapping[Part, LoRA], new_rows: NewRows | None) -> Model:
    """The model without memory, with what a stage adds to it."""
    with torch.device("meta"):
        model = family_of(c).Model(c, compute_dtype)
        for part, lora in adapters.items():
            wrap(model, stated, part, lora)
        if new_rows is not None:
            model.language.train_apart(new_rows)
    return model


SAVED = {"embed_tokens": "embed", "lm_head": "head", "norm": "norm", "patch_embedding": "embed", "position_embedding": "positions"}


def savable(model: nn.Module, spec: Spec, part: Part) -> dict[str, str]:
    """The modules of a part that a stage may train in full next to adapters: the name that a recipe calls each -> its path."""
    submodule = model.get_submodule(part)
    names = [name for name in SAVED if hasattr(submodule, SAVED[name]) and getattr(submodule, SAVED[name]) is not None]
    towers = ("patch_embedding", "position_embedding")
    of_part = [name for name in names if name == "norm" or (name in towers) == (part == "vision")]
    of_part = [name for name in of_part if spec.uses(f"{part}.{SAVED[name]}")]
    tied = part == "language" and submodule.head.weight is submodule.embed.weight  # type: ignore[union-attr]
    return {name: f"{part}.{SAVED[name]}" for name in of_part if not (tied and name == "lm_head")}


def build(c: Config, device: torch.device | str, dtype: torch.dtype = torch.float32, compute_dtype: torch.dtype = torch.float32) -> Model:
    """A whole model on one device, not yet filled, all of which trains."""
    plan = shape(c, dtype=dtype, compute_dtype=compute_dtype)
    materialise(plan, device)
    return plan.model


def _stated(model: nn.Module) -> Iterator[tuple[str, Tensor, Traits]]:
    """Every parameter and buffer under every name it has, with what its layer states about it."""
    for place, module in model.named_modules():
        own = {leaf: x for leaf, x in chain(module._parameters.items(), module._buffers.items()) if x is not None}
        if not own:
            continue
        assert isinstance(module, HoldsTensors), f"{place}, a {type(module).__name__}, does not state what its tensors are"
        traits = module.traits()
        for leaf, x in own.items():
            yield f"{place}.{leaf}", x, traits[leaf]


def _give_dtypes(model: nn.Module, table: Mapping[str, Entry]) -> None:
    """Replace every tensor by a new one as the table says, tied ones by one."""
    made: dict[str, Tensor] = {}
    for name, entry in table.items():
        if entry.tied_to is not None:
            x = made[entry.tied_to]
        else:
            x = torch.empty(entry.shape, dtype=entry.stored, device="meta")
            x = x if entry.role == "buffer" else nn.Parameter(x, requires_grad=entry.trains)
        made[name] = x
        place, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(place), leaf, x)


def _blocks(model: nn.Module) -> dict[Part, tuple[str, ...]]:
    """Part -> the names of its blocks, of the parts that have some."""
    found: dict[Part, list[str]] = {}
    for name, module in model.named_children():
        if isinstance(blocks := getattr(module, "blocks", None), nn.ModuleList):
            found[part_of(name)] = [f"{name}.blocks.{i}" for i in range(len(blocks))]
    return {part: tuple(names) for part, names in found.items()}


def _unit(model: nn.Module, blocks: Collection[str], name: str) -> str:
    """What a tensor is gathered with: its block, or what else of its part goes together."""
    part, child, *rest = name.split(".")
    if rest and (block := f"{part}.{child}.{rest[0]}") in blocks:
        return block
    units = getattr(model.get_submodule(part), "units", {})
    return f"{part}.{units[child]}" if child in units else part


def _replaceable(model: nn.Module) -> dict[tuple[Part, Replaceable], tuple[str, ...]]:
    found: dict[tuple[Part, Replaceable], list[str]] = {}
    for name, module in model.named_modules():
        if isinstance(module, ReplaceableModule):
            assert not list(module.parameters()), f"{name} has weights, which whatever replaces it would lose"
            found.setdefault((part_of(name), module.kind), []).append(name)
    return {key: tuple(names) for key, names in found.items()}
