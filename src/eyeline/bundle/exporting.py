"""A trained model as a folder that transformers loads with its own classes and computes the same from."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from eyeline.bundle.bundle import Bundle, refuse_misfit, write_settings
from eyeline.bundle.folders import new_folder
from eyeline.bundle.places import place_of, rules_at
from eyeline.checkpoint.tensors import SHARD_BYTES, Key, key_of, renamed, write_file, write_folder
from eyeline.core.errors import Refused
from eyeline.core.files import write_json
from eyeline.core.log import say
from eyeline.core.plan import PARTS, Part
from eyeline.models import Config, Model, spec
from eyeline.models.hf import mapping_of
from eyeline.models.hf.forms import Form
from eyeline.models.lora import LoRALinear, merge
from eyeline.models.moe import biases_of

Dtype = Literal["fp32", "bf16"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
HF_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


def export(
    bundle: Bundle,
    model: Model,
    out: Path,
    *,
    form: Literal["auto", "parts"] = "auto",
    adapter: bool = False,
    dtype: Dtype = "fp32",
    trained: Collection[Part] = ("projector",),
    max_shard_bytes: int = SHARD_BYTES,
) -> str:
    """Write `model` into a new folder and return the name of its form. The model is only read.

    `form` auto takes the one class of transformers that computes the same (the family's `form`), or the parts one by one where
    there is none. Adapters on the model are merged into the weights that are written, or, with `adapter`, `out` gets two
    folders: `base`, without them, and `adapter`, which peft loads on it, with the projector where it is one of the parts that were
    `trained` in full. fp32 is exact; bf16 rounds each weight once.

    Raises Refused for a folder that is not empty, for parts of a model that has one, and for an adapter that is not there or
    that no class can take.
    """
    refuse_misfit(bundle)
    _refuse_biases(model)
    chosen = chosen_form(bundle.config, form)
    if adapter:
        if not _adapted_layers(model, trained):
            raise Refused("no layer has an adapter that can be written: the last stage trained none. Leave --adapter out.")
        if chosen.name == "parts":
            raise Refused(
                f"an adapter needs a model that one class of transformers loads, and this one is exported as parts: {chosen.reason}."
            )
    with new_folder(out) as folder:
        base = folder / "base" if adapter else folder
        base.mkdir(exist_ok=True)
        write_model(bundle, weights(model, not adapter, DTYPES[dtype]), base, chosen, max_shard_bytes)
        write_settings(bundle, base, chosen, HF_DTYPES[dtype])
        if adapter:
            (folder / "adapter").mkdir()
            _write_adapter(bundle.config, model, folder / "adapter", chosen, str(out / "base"), trained)
    say(f"{out}: {chosen.name} form ({chosen.reason}); docs/exports.md shows how to load and ask it")
    if adapter and (whole := [part for part in PARTS if part in trained and part in spec(bundle.config).parts and part != "projector"]):
        say(f"also trained in full: {', '.join(whole)}. Load the adapter on {out / 'base'} only, which holds those weights.")
    return chosen.name


def _refuse_biases(model: Model) -> None:
    if any(x.any() for x in biases_of(model).values()):
        raise Refused(
            "the model's experts are chosen with biases (a stage with experts: {balance: bias}), which no class of transformers has: "
            "an export would choose other experts. Evaluate and chat from the run itself, or end it with a stage that has experts: "
            "{balance: aux}, which starts without biases and trains the model to do without them."
        )


def chosen_form(config: Config, asked: Literal["auto", "parts"]) -> Form:
    """The form of an export. Raises Refused where a family has no such form."""
    mapping = mapping_of(config)
    best = mapping.form(config)
    if asked == "auto" or best.name == "parts":
        return best
    if mapping.PARTS is None:
        raise Refused(f"a model of family {config.family} is one folder for transformers and has no form of parts. Leave --form parts out.")
    return mapping.PARTS


def weights(model: torch.nn.Module, with_updates: bool, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Every weight of a plain model, one at a time: with the updates of adapters added in float32, or without them."""
    for name, x in model.named_parameters():
        path, _, leaf = name.rpartition(".")
        layer = model.get_submodule(path)
        if isinstance(layer, LoRALinear) and leaf in ("lora_A", "lora_B"):
            continue
        x = x.detach()
        if with_updates and isinstance(layer, LoRALinear) and leaf == "weight":
            x = merge(x, layer.lora_A.detach(), layer.lora_B.detach(), layer.scale)
        yield name, x.to(dtype)


def write_model(bundle: Bundle, tensors: Iterable[tuple[str, Tensor]], folder: Path, form: Form, max_shard_bytes: int) -> None:
    """The weights of one form, one at a time; `tensors` come under our names, those of one place together."""
    rules = mapping_of(bundle.config).keys(bundle.config, form)
    for place, here in groupby(tensors, key=lambda pair: place_of(pair[0], rules)):
        theirs = renamed(here, rules_at(place, rules))
        if place.endswith(".safetensors"):
            write_file(folder / place, dict(theirs), {"format": "pt"})
        else:
            (folder / place).mkdir(exist_ok=True)
            write_folder(folder / place, theirs, max_shard_bytes)


# ---- adapters


def _adapted_layers(model: Model, trained: Collection[Part]) -> dict[str, LoRALinear]:
    """The layers that have an adapter, but for those of a projector that was trained in full too: it is saved as it is."""
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, LoRALinear)}
    return {name: layer for name, layer in layers.items() if not (name.startswith("projector.") and "projector" in trained)}


def _module(on_disk: str, form: Form) -> str:
    """The module of the model that transformers makes of a folder, by one of its tensors there: adapters go by that name."""
    for ours, theirs in form.modules.items():
        if on_disk.startswith(ours):
            on_disk = theirs + on_disk.removeprefix(ours)
            break
    return on_disk.rpartition(".")[0]


# In a model with experts peft (0.21) takes every target of these names for the experts', which were layers of such names once. So
# any other layer of these names is adapted as a parameter, which has no dropout.
EXPERTS_NAMES = (".gate_proj", ".up_proj", ".down_proj")


def _write_adapter(config: Config, model: Model, folder: Path, form: Form, base: str, trained: Collection[Part]) -> None:
    """adapter_config.json and adapter_model.safetensors as peft writes them, a projector that was trained in full in `modules_to_save`.

    A layer cannot be adapted and saved, so adapters of such a projector are merged into what is saved of it.
    """
    rules = mapping_of(config).keys(config, form)
    adapted = _adapted_layers(model, trained)
    wanted = {key.theirs: key for key in (key_of(f"{name}.weight", rules) for name in adapted)}
    mixed = spec(config).language.experts is not None
    tensors: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    alphas: dict[str, float | int] = {}
    for key in wanted.values():
        name = _module(key.theirs, form)
        a_rI, b_Or, scale = _fused(key, model, adapted)
        tensors |= {f"base_model.model.{name}.lora_A.weight": a_rI, f"base_model.model.{name}.lora_B.weight": b_Or}
        target = name.rpartition(".vision_model.")[2]  # peft compares ends of names: so this is the layer in transformers 4 and 5
        target = f"{target}.weight" if mixed and name.endswith(EXPERTS_NAMES) else target
        ranks[target], alphas[target] = len(a_rI), _whole(scale * len(a_rI))
    whole = "projector" in trained
    projector = [(name, x) for name, x in weights(model, True, torch.float32) if whole and name.startswith("projector.")]
    saved = list(renamed(projector, rules))
    for theirs, x in saved:
        tensors[f"base_model.model.{_module(theirs, form)}.{theirs.rpartition('.')[2]}"] = x
    write_file(folder / "adapter_model.safetensors", tensors, {"format": "pt"})

    parameters = sorted(target for target in ranks if target.endswith(".weight"))
    first = next(iter(ranks))  # the others are listed apart where they differ
    settings = {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": ranks[first],
        "lora_alpha": alphas[first],
        "rank_pattern": {name: rank for name, rank in ranks.items() if rank != ranks[first]},
        "alpha_pattern": {name: alpha for name, alpha in alphas.items() if alpha != alphas[first]},
        "lora_dropout": 0.0 if parameters else max(layer.dropout for layer in adapted.values()),  # peft has one for all
        "target_modules": sorted(ranks.keys() - set(parameters)),
        "target_parameters": parameters or None,
        "modules_to_save": sorted({_module(theirs, form) for theirs, _ in saved}) or None,
        "bias": "none",
        "fan_in_fan_out": False,
    }
    write_json(folder / "adapter_config.json", settings)


def _fused(key: Key, model: Model, adapted: Mapping[str, LoRALinear]) -> tuple[Tensor, Tensor, float]:
    """lora_A, lora_B and the scale for one layer of theirs. Adapters of several layers of ours that are one layer there become one
    whose rank is the sum: their A's stacked, and each B at the outputs of its layer.
    """
    names = [name.removesuffix(".weight") for name in key.ours]
    layers = [adapted[name] for name in names if name in adapted]
    assert len({layer.scale for layer in layers}) == 1, f"{key.theirs}: the adapters of one part have one scale"
    blocks = []
    for layer in layers:
        rank = len(layer.lora_A)
        outputs = [(adapted.get(name), len(model.get_parameter(f"{name}.weight"))) for name in names]
        blocks.append(key.write([layer.lora_B.detach().float() if x is layer else torch.zeros(rows, rank) for x, rows in outputs]))
    return torch.cat([layer.lora_A.detach().float() for layer in layers]), torch.cat(blocks, 1), layers[0].scale


def _whole(x: float) -> float | int:
    return round(x) if abs(x - round(x)) < 1e-9 else x
