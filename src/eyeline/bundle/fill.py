"""Filling a placed model: each part from a folder, from a run's checkpoint, or from a seed.

Adapters of a run are merged into its weights on the way, one layer at a time: the sum is made in float32 and rounded once, to what the
plan stores.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from eyeline.bundle.bundle import Opened, Weights
from eyeline.bundle.peft_adapter import continued_parts, put_adapters
from eyeline.bundle.places import parameters_by_name, places, stream_place
from eyeline.bundle.rows import EMBEDDINGS, with_rows, with_vocabulary
from eyeline.checkpoint.pieces import Stored
from eyeline.checkpoint.tensors import misfits, refuse_misfits
from eyeline.core.errors import Refused
from eyeline.core.plan import PARTS, Entry, NewRows, Part, Plan, complete, part_of, tensor_of
from eyeline.core.randomness import torch_rng_for
from eyeline.core.shards import Box, held, put, whole
from eyeline.kernels.nf4 import dequantised, doubled, quantised
from eyeline.models import Config, Model
from eyeline.models.lora import LoRA, Update, adapters, merge, updates_of
from eyeline.models.shape import shape
from eyeline.parallel.mesh import Mesh
from eyeline.parallel.place import place


@dataclass(frozen=True)
class Seed:
    """Weights from scratch."""

    seed: int


Source = Weights | Seed


@torch.no_grad()
def fill(plan: Plan[Model], config: Config, sources: Mapping[Part, Source], keep_adapters: bool = False, seed: int = 0) -> None:
    """Fill every tensor of a placed model of this config, each part from its own source, cast to what the plan stores.

    Adapters of a checkpoint are merged, or kept where the plan has the same ones and `keep_adapters` says so; others in the plan start
    from `seed`. Raises Refused where a source does not fit. Of a model of which this rank has slices the rest is drawn or read, too, and
    not kept.
    """
    with complete(plan):
        _fill(plan, config, sources, keep_adapters, seed)


def _fill(plan: Plan[Model], config: Config, sources: Mapping[Part, Source], keep_adapters: bool, seed: int) -> None:
    done: set[str] = set()
    for source, parts in _by_source(sources):
        if isinstance(source, Seed):
            rng = torch_rng_for(source.seed, "weights")
            for part in parts:
                plan.model.get_submodule(part).initialise(rng)  # type: ignore[operator]  # every part has it
            done |= {name for name, entry in plan.table.items() if entry.part in parts and entry.role == "weight"}
        else:
            if source.config != config:
                refuse_other_parts(plan, config, source, parts)
            done |= _from_folder(plan, source, parts) if source.form is not None else _from_checkpoint(plan, source, parts, keep_adapters)
    done |= _fresh_adapters(plan, done, seed)
    for name, x, entry in plan.tensors():
        if entry.role == "buffer" and name not in done:
            x.zero_()
            done.add(name)
        assert name in done, f"no source has weights for {name}"


def load(
    opened: Opened,
    device: torch.device | str,
    *,
    dtype: torch.dtype = torch.float32,
    compute_dtype: torch.dtype = torch.float32,
    narrow: Collection[Part] = (),
    keep_adapters: bool = False,
    mesh: Mesh | None = None,
) -> Plan[Model]:
    """A model that is opened, on one device, or sharded over the ranks of a mesh. Adapters of a run are merged into its weights, or stay
    with `keep_adapters`."""
    weights, config = opened.weights, opened.bundle.config
    state = {} if opened.checkpoint is None else opened.checkpoint.state
    plan = shape(
        config,
        trains={},
        adapters=lora_of(state) if keep_adapters else {},
        new_rows=new_rows_of(state) if keep_adapters else None,
        dtype=dtype,
        compute_dtype=compute_dtype,
        narrow=narrow,
        biased=has_biases(weights),
    )
    place(plan, device, mesh)
    fill(plan, config, dict.fromkeys(plan.spec.parts, weights), keep_adapters)
    return plan


def load_for_generation(opened: Opened, device: torch.device, compute_dtype: torch.dtype, mesh: Mesh | None = None) -> Model:
    """The model to generate with. Weights are cast to the dtype that they compute in here, once, and not at every token: in
    bfloat16 it needs half the memory. Raises Refused."""
    return load(opened, device, compute_dtype=compute_dtype, narrow=PARTS, mesh=mesh).model.eval()


def lora_of(state: Mapping[str, Any]) -> dict[Part, LoRA]:
    """The adapters that a checkpoint holds, by its state."""
    return {part: LoRA(**settings) for part, settings in state.get("lora", {}).items()}


def new_rows_of(state: Mapping[str, Any]) -> NewRows | None:
    """The rows of new tokens that a checkpoint holds apart, by its state."""
    found = state.get("new_rows")
    return None if found is None else NewRows(*found)


def has_biases(source: Source) -> bool:
    """Return whether the language model of a source is a run's whose routers have biases that balance experts."""
    return isinstance(source, Weights) and source.checkpoint is not None and bool(source.checkpoint.state.get("expert_biases"))


def _by_source(sources: Mapping[Part, Source]) -> list[tuple[Source, list[Part]]]:
    """Each source once, with its parts in their order."""
    found: list[tuple[Source, list[Part]]] = []
    for part in sorted(sources, key=PARTS.index):
        known = next((parts for source, parts in found if source is sources[part]), None)
        if known is None:
            found.append((sources[part], [part]))
        else:
            known.append(part)
    return found


# Settings that may be left out: tensors of the same names and shapes agree in them
SEEN_IN_SHAPES = ("hidden_size", "head_dim", "layer_types")
# Settings that say how much a part is shown, and not what it computes of it
BUDGETS = ("min_pixels", "max_pixels", "video_min_pixels", "video_max_pixels", "tiles", "max_positions")


def refuse_other_parts(plan: Plan[Model], config: Config, source: Weights, parts: Collection[Part]) -> None:
    """Raise Refused where parts of the source are not what they are in the model: another setting of a part, or another shape."""
    theirs = source.config
    if source.known_rows is not None:  # rows of new tokens are added to them
        theirs = with_vocabulary(theirs, config.language.vocab_size)
    there = shape(theirs, trains={}).table
    for part in parts:
        if part not in {entry.part for entry in there.values()}:
            raise Refused(f"{source.folder} has no {part} to take weights from: it is a model of family {theirs.family}.")
        ours, other = (c.model_dump() if (c := getattr(whole, part, None)) is not None else {} for whole in (config, theirs))
        shapes = {name: _dense_shape(entry) for name, entry in plan.whole.items() if entry.part == part and _is_weight(entry)}
        alike = shapes == {name: entry.shape for name, entry in there.items() if entry.part == part}
        differ = [
            f"{name} is {other.get(name)} there and {ours.get(name)} here"
            for name in ours | other
            if ours.get(name) != other.get(name)
            and name not in BUDGETS
            and not (alike and name in SEEN_IN_SHAPES)
            and not (name == "patches" and ours.get(name) and other.get(name))  # a budget, too, unless one has the square
        ]
        if not differ and not alike:
            differ = ["its tensors have other names or shapes"]
        if differ:
            raise Refused(f"the {part} of {source.folder} is not the {part} of this model: {'; '.join(differ)}.")


def _is_weight(entry: Entry) -> bool:
    return entry.role == "weight" and entry.storage != "scale"


def _dense_shape(entry: Entry) -> tuple[int, ...]:
    """The shape of a weight, however it is stored."""
    return (entry.shape[0], 2 * entry.shape[1]) if entry.storage == "nf4" else entry.shape


def _put(plan: Plan[Model], name: str, value: Tensor) -> set[str]:
    """Fill a weight as the plan stores it; the names of the tensors that were filled."""
    x = tensor_of(plan.model, name)
    if x.is_meta:  # of a slice of the model that another rank has
        return {name}
    if plan.whole[name].storage != "nf4":
        put(x, value)
        return {name}
    largest = f"{name.removesuffix('weight')}largest"
    packed_OH, largest_OB = quantised(value.to(x.device))
    put(x, packed_OH)
    put(scales := tensor_of(plan.model, largest), doubled(largest_OB) if scales.dtype == torch.uint8 else largest_OB)
    return {name, largest}


def _put_packed(plan: Plan[Model], stored: Stored, name: str) -> set[str]:
    """Fill a weight in NF4 from one that is stored alike, as it is: its magnitudes in 8 bits would round again."""
    largest = f"{name.removesuffix('weight')}largest"
    for one in (name, largest):
        put(tensor_of(plan.model, one), stored.read(one))
    return {name, largest}


def _from_folder(plan: Plan[Model], source: Weights, parts: Collection[Part]) -> set[str]:
    """Fill parts from a folder of transformers' or of parts; the names that were filled."""
    assert source.form is not None
    config, adapter, done = source.config, source.adapter, set()
    like = parameters_by_name(shape(config).model)
    kept = frozenset() if adapter is None else continued_parts(adapter, plan)
    for at in places(config, source.form):
        for name, value in stream_place(like, config, source.form, at, source.folder / at, lambda name: name.partition(".")[0] in parts):
            x = tensor_of(plan.model, name)
            if adapter is not None:
                value = adapter.applied(name, value, merges=part_of(name) not in kept)
            done |= _put(plan, name, _enlarged(value, source, len(x)) if name in EMBEDDINGS else value)
    return done if adapter is None else done | put_adapters(adapter, plan.model, kept & frozenset(parts))


def _enlarged(x_VD: Tensor, source: Weights, rows: int) -> Tensor:
    """The embedding or head of a source with so many rows."""
    return x_VD if source.known_rows is None else with_rows(x_VD[: source.known_rows], rows)


def _from_checkpoint(plan: Plan[Model], source: Weights, parts: Collection[Part], keep_adapters: bool) -> set[str]:
    """Fill parts from a run's checkpoint, its adapters kept or merged; the names that were filled."""
    assert source.checkpoint is not None
    state, done = source.checkpoint.state, set()
    before, apart = lora_of(state), new_rows_of(state)
    like = shape(source.config, trains={}, adapters=before, biased=bool(state.get("expert_biases")), new_rows=apart)
    with source.checkpoint.reading("model", "frozen") as stored:
        refuse_misfits(str(source.checkpoint.folder), misfits(stored.meta, {name: x for name, x, _ in like.tensors()}, "any"))
        updates = updates_of(like.model)
        assert not keep_adapters or updates.keys() == updates_of(plan.model).keys(), "adapters are kept where the plan has the same ones"
        for name, x, entry in plan.tensors():
            if entry.part not in parts or name not in stored or (entry.role == "adapter" and not keep_adapters):
                continue
            update = None if keep_adapters else updates.get(name)
            if "nf4" in (entry.storage, like.table[name].storage):
                largest = f"{name.removesuffix('weight')}largest"
                same = entry.storage == like.table[name].storage and plan.table[largest].stored == like.table[largest].stored
                done |= _put_packed(plan, stored, name) if same and update is None else _put(plan, name, _dense(stored, name, like, update))
                continue
            if entry.storage == "scale":
                continue  # filled with its weight
            part = held(x)
            if name in EMBEDDINGS and not keep_adapters and (apart is not None or source.known_rows is not None):
                put(x, _enlarged(_with_new_rows(stored, name, apart), source, len(x)))
                done.add(name)
                continue
            value = stored.read(name, part.box) if update is None else merged_part(stored, name, part.box, tuple(x.shape), update, x.device)
            part.local.copy_(value)
            done.add(name)
    return done


def merged_part(stored: Stored, name: str, box: Box, shape: tuple[int, ...], update: Update, device: torch.device) -> Tensor:
    """A part of a weight of a checkpoint, with the update of its adapter. With DoRA whole rows are read, whose lengths are set."""
    (*first, row, column), (*experts, rows, columns) = box  # of stacked experts there are some
    start, count, magnitude_O = (column, columns, None) if update.magnitude is None else (0, shape[-1], update.magnitude)
    if magnitude_O is not None:
        magnitude_O = stored.read(magnitude_O, Box((row,), (rows,))).to(device)
    weight_OI = stored.read(name, Box((*first, row, start), (*experts, rows, count))).to(device)
    a_rI = stored.read(update.a, Box((*first, 0, start), (*experts, update.rank, count))).to(device)
    b_Or = stored.read(update.b, Box((*first, row, 0), (*experts, rows, update.rank))).to(device)
    return merge(weight_OI, a_rI, b_Or, update.scale, magnitude_O)[..., column - start : column - start + columns]


def _dense(stored: Stored, name: str, like: Plan[Model], update: Update | None) -> Tensor:
    """A whole weight of a checkpoint as numbers, from NF4 where it is stored so, with the update of its adapter."""
    value = stored.read(name)
    if like.table[name].storage == "nf4":
        value = dequantised(value, stored.read(f"{name.removesuffix('weight')}largest"))
    if update is None:
        return value
    magnitude_O = None if update.magnitude is None else stored.read(update.magnitude)
    return merge(value, stored.read(update.a), stored.read(update.b), update.scale, magnitude_O)


def _with_new_rows(stored: Stored, name: str, apart: NewRows | None) -> Tensor:
    """The embedding or head of a checkpoint, whole, with the rows that were trained apart in their place."""
    x_VD = stored.read(name)
    if apart is None:
        return x_VD
    rows_ND = stored.read(f"{name.removesuffix('.weight')}.new_rows")
    return torch.cat([x_VD[: apart.first].float(), rows_ND, x_VD[apart.end :].float()])


def _fresh_adapters(plan: Plan[Model], filled: Collection[str], seed: int) -> set[str]:
    """Adapters that came from nowhere start from the seed, rows of new tokens from the weight's."""
    done: set[str] = set()
    for name, rows, _ in plan.tensors():
        path, _, leaf = name.rpartition(".")
        if leaf == "new_rows" and name not in filled:
            first, weight = cast(int, plan.model.get_submodule(path).first), plan.model.get_parameter(f"{path}.weight")
            put(rows, whole(weight)[first : first + len(rows)])
            done.add(name)
    of_layer: dict[str, list[str]] = {}  # the tensors of each layer's adapter
    for weight, update in updates_of(plan.model).items():
        of_layer.setdefault(weight.rpartition(".")[0], []).extend(name for name in update[:3] if name is not None)
    new = {name: layer for name, layer in adapters(plan.model).items() if of_layer[name][0] not in filled}
    for part in plan.spec.parts:
        rng = torch_rng_for(seed, f"lora {part}")
        for name, layer in new.items():
            if name.startswith(part + "."):
                layer.initialise_adapter(rng)
                done |= {*of_layer[name]}
    return done
