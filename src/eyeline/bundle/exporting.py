"""A trained model as a folder that transformers loads with its own classes and computes the same from."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from eyeline.bundle.bundle import Bundle, refuse_misfit, write_settings
from eyeline.bundle.folders import new_folder
from eyeline.bundle.places import place_of, rules_at
from eyeline.checkpoint.tensors import SHARD_BYTES, Key, key_of, renamed, write_file, write_folder
from eyeline.core.errors import Refused
from eyeline.core.files import write_json
from eyeline.core.key_rules import KeyRule
from eyeline.core.log import say
from eyeline.core.plan import ADAPTER_NAMES, PARTS, Part
from eyeline.models import Config, Model, spec
from eyeline.models.decoder import Head
from eyeline.models.hf import mapping_of
from eyeline.models.hf.forms import Form
from eyeline.models.layers import Embedding, Linear
from eyeline.models.lora import EXPERT_LEAVES, LoRAExperts, LoRALinear, merge, merged, updates_of
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
    saved: Collection[str] = (),
    max_shard_bytes: int = SHARD_BYTES,
) -> str:
    """Write `model` into a new folder and return the name of its form. The model is only read.

    `form` auto takes the one class of transformers that computes the same (the family's `form`), or the parts one by one where
    there is none. Adapters on the model are merged into the weights that are written, or, with `adapter`, `out` gets two
    folders: `base`, without them, and `adapter`, which peft loads on it, with the projector where it is one of the parts that were
    `trained` in full, and with the modules that were `saved`: trained in full in parts with adapters. fp32 is exact; bf16 rounds
    each weight once.

    Raises Refused for a folder that is not empty, for parts of a model that has one, and for an adapter that is not there or
    that no class can take.
    """
    refuse_misfit(bundle)
    _refuse_biases(model)
    chosen = chosen_form(bundle.config, form)
    if adapter:
        if not _adapted_layers(model, trained) and not _adapted_experts(model):
            raise Refused("no layer has an adapter that can be written: the last stage trained none. Leave --adapter out.")
        if chosen.name == "parts":
            raise Refused(
                f"an adapter needs a model that one class of transformers loads, and this one is exported as parts: {chosen.reason}."
            )
        _refuse_lengths_of_parameters(bundle.config, model, trained, chosen)
    with new_folder(out) as folder:
        base = folder / "base" if adapter else folder
        base.mkdir(exist_ok=True)
        write_model(bundle, weights(model, not adapter, DTYPES[dtype]), base, chosen, max_shard_bytes)
        write_settings(bundle, base, chosen, HF_DTYPES[dtype])
        if adapter:
            (folder / "adapter").mkdir()
            _write_adapter(bundle.config, model, folder / "adapter", chosen, str(out / "base"), trained, saved)
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
    updates = updates_of(model) if with_updates else {}
    for name, x in model.named_parameters():
        path, _, leaf = name.rpartition(".")
        layer = model.get_submodule(path)
        if leaf.endswith((*ADAPTER_NAMES, "largest")):
            continue
        x = layer.dense().detach() if isinstance(layer, Linear) and leaf == "weight" else x.detach()
        if with_updates and isinstance(layer, Embedding | Head) and layer.new_rows is not None:
            x, first = x.float(), layer.first
            x = torch.cat([x[:first], layer.new_rows.detach(), x[first + len(layer.new_rows) :]])
        if name in updates:
            x = merged(model, name, updates[name])
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


def _adapted_experts(model: Model) -> dict[str, LoRAExperts]:
    """The experts that have adapters, by the name of the layer that holds them."""
    return {name.rpartition(".")[0]: layer for name, layer in model.named_modules() if isinstance(layer, LoRAExperts)}


class ExpertAdapter(NamedTuple):
    """The adapters of all experts of a layer as peft has them: of one parameter of theirs."""

    parameter: str
    module: str  # as tensors are called: wrapped once more for the second parameter of a module
    a_ErI: Tensor
    b_EOr: Tensor
    scale: float


def _expert_adapters(model: Model, rules: Sequence[KeyRule], form: Form) -> Iterator[ExpertAdapter]:
    """Gate and up are one parameter there: their A's are stacked, and each B is at its own outputs."""
    for name, layer in _adapted_experts(model).items():
        module = f"{_module(key_of(f'{name}.router.weight', rules).theirs, form).rpartition('.')[0]}.experts"
        a, b = ({leaf: layer.get_parameter(f"{leaf}_lora_{end}").detach().float() for leaf in EXPERT_LEAVES} for end in "AB")
        blocks = [F.pad(b["gate"], (0, b["up"].shape[2])), F.pad(b["up"], (b["gate"].shape[2], 0))]
        a_gate_up, b_gate_up = torch.cat([a["gate"], a["up"]], 1), torch.cat(blocks, 1)
        yield ExpertAdapter(f"{module}.gate_up_proj", f"{module}.base_layer", a_gate_up, b_gate_up, layer.scale)
        yield ExpertAdapter(f"{module}.down_proj", module, a["down"], b["down"], layer.scale)


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


def _refuse_lengths_of_parameters(config: Config, model: Model, trained: Collection[Part], form: Form) -> None:
    """Raise Refused for DoRA on layers that peft adapts as parameters of their own, which it offers LoRA for and nothing else."""
    adapted = _adapted_layers(model, trained)
    if spec(config).language.experts is None or all(layer.lora_magnitude is None for layer in adapted.values()):
        return
    rules = mapping_of(config).keys(config, form)
    for name in adapted:
        if (theirs := _module(key_of(f"{name}.weight", rules).theirs, form)).endswith(EXPERTS_NAMES):
            raise Refused(
                f"{theirs} has a DoRA adapter, and in a model with experts peft adapts a layer of this name by LoRA alone. "
                "Leave --adapter out, which merges it"
            )


def _write_adapter(
    config: Config, model: Model, folder: Path, form: Form, base: str, trained: Collection[Part], saved_modules: Collection[str]
) -> None:
    """adapter_config.json and adapter_model.safetensors as peft writes them, modules that were trained in full in `modules_to_save`.

    A layer cannot be adapted and saved, so adapters of such a projector are merged into what is saved of it.
    """
    rules = mapping_of(config).keys(config, form)
    adapted = _adapted_layers(model, trained)
    rows, indices = _new_rows(model, rules, form)
    wanted = {key.theirs: key for key in (key_of(f"{name}.weight", rules) for name in adapted)}
    mixed = spec(config).language.experts is not None
    tensors: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    alphas: dict[str, float | int] = {}
    lengths = any(layer.lora_magnitude is not None for layer in adapted.values())
    stabilized = all(layer.rslora for layer in (*adapted.values(), *_adapted_experts(model).values()))
    parameters: list[str] = []  # that peft adapts as such
    for one in _expert_adapters(model, rules, form):
        a_rI, b_Or = one.a_ErI.flatten(0, 1), one.b_EOr.permute(1, 2, 0).flatten(1)
        tensors |= {f"base_model.model.{one.module}.lora_A.weight": a_rI, f"base_model.model.{one.module}.lora_B.weight": b_Or.contiguous()}
        rank = one.a_ErI.shape[1]
        ranks[one.parameter], alphas[one.parameter] = rank, _whole(one.scale * rank ** (0.5 if stabilized else 1))
        parameters.append(one.parameter)
    for key in wanted.values():
        name = _module(key.theirs, form)
        a_rI, b_Or, scale = _fused(key, model, adapted)
        tensors |= {f"base_model.model.{name}.lora_A.weight": a_rI, f"base_model.model.{name}.lora_B.weight": b_Or}
        target = name.rpartition(".vision_model.")[2]  # peft compares ends of names: so this is the layer in transformers 4 and 5
        target = f"{target}.weight" if mixed and name.endswith(EXPERTS_NAMES) else target
        ranks[target], alphas[target] = len(a_rI), _whole(scale * len(a_rI) ** (0.5 if stabilized else 1))
        if lengths:
            tensors[f"base_model.model.{name}.lora_magnitude_vector"] = _lengths(key, model, adapted)
    prefixes = tuple(f"{path}." for path in (*saved_modules, *(("projector",) if "projector" in trained else ())))
    kept = [(name, x) for name, x in weights(model, True, torch.float32) if name.startswith(prefixes)]
    saved = list(renamed(kept, rules))
    for theirs, x in saved:
        tensors[f"base_model.model.{_module(theirs, form)}.{theirs.rpartition('.')[2]}"] = x
    write_file(folder / "adapter_model.safetensors", tensors | rows, {"format": "pt"})

    parameters = sorted([*parameters, *(target for target in ranks if target.endswith(".weight"))])
    settings = {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": base,
        "inference_mode": True,
        **_by_layer(ranks, alphas),
        "lora_dropout": 0.0 if parameters else max((layer.dropout for layer in adapted.values()), default=0.0),  # peft has one for all
        "target_modules": sorted(ranks.keys() - set(parameters)),
        "target_parameters": parameters or None,
        "use_rslora": stabilized,
        "use_dora": lengths,
        "modules_to_save": sorted({_module(theirs, form) for theirs, _ in saved}) or None,
        **({"trainable_token_indices": indices} if indices else {}),
        "bias": "none",
        "fan_in_fan_out": False,
    }
    write_json(folder / "adapter_config.json", settings)


def _by_layer(ranks: Mapping[str, int], alphas: Mapping[str, float | int]) -> dict[str, Any]:
    """Ranks and alphas: those of the first layer for all, and the others apart."""
    first = next(iter(ranks))
    return {
        "r": ranks[first],
        "lora_alpha": alphas[first],
        "rank_pattern": {name: rank for name, rank in ranks.items() if rank != ranks[first]},
        "alpha_pattern": {name: alpha for name, alpha in alphas.items() if alpha != alphas[first]},
    }


def _new_rows(model: Model, rules: Sequence[KeyRule], form: Form) -> tuple[dict[str, Tensor], dict[str, list[int]]]:
    """Rows of new tokens as peft stores them, and the ids of each module; peft gives a tied head the embedding's."""
    tensors: dict[str, Tensor] = {}
    indices: dict[str, list[int]] = {}
    for name, x in model.named_parameters():
        path, _, leaf = name.rpartition(".")
        if leaf == "new_rows":
            first, module = cast(int, model.get_submodule(path).first), _module(key_of(f"{path}.weight", rules).theirs, form)
            tensors[f"base_model.model.{module}.token_adapter.trainable_tokens_delta"] = x.detach().float()
            indices[module.rpartition(".")[2]] = list(range(first, first + len(x)))
    return tensors, indices


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


def _lengths(key: Key, model: Model, adapted: Mapping[str, LoRALinear]) -> Tensor:
    """The lengths of the rows of one layer of theirs (DoRA): trained ones, and of layers without what they are."""
    made = []
    for name in (one.removesuffix(".weight") for one in key.ours):
        layer, weight_OI = adapted.get(name), model.get_parameter(f"{name}.weight").detach()
        if layer is None:
            magnitude_O = weight_OI.float().norm(dim=1)
        elif layer.lora_magnitude is not None:
            magnitude_O = layer.lora_magnitude.detach()
        else:
            magnitude_O = merge(weight_OI, layer.lora_A.detach(), layer.lora_B.detach(), layer.scale).norm(dim=1)
        made.append(magnitude_O[:, None])
    return key.write(made)[:, 0]


def _whole(x: float) -> float | int:
    return round(x) if abs(x - round(x)) < 1e-9 else x
