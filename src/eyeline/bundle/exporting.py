"""A trained model as a folder that transformers loads with its own classes and computes the same from."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from eyeline.bundle.bundle import Bundle, projector_rules, refuse_misfit, stop_settings
from eyeline.bundle.folders import new_folder
from eyeline.bundle.importing import write_parts_settings
from eyeline.checkpoint.tensors import SHARD_BYTES, key_of, renamed, write_file, write_folder
from eyeline.core.errors import Refused
from eyeline.core.facts import KeyRule
from eyeline.core.files import write_json
from eyeline.core.log import say
from eyeline.data.tokenizer import save_tokenizer
from eyeline.models import llava, qwen2, siglip2
from eyeline.models.lora import LoRALinear

Dtype = Literal["fp32", "bf16"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
HF_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


def export(
    bundle: Bundle,
    model: llava.Model,
    out: Path,
    *,
    form: Literal["auto", "parts"] = "auto",
    adapter: bool = False,
    dtype: Dtype = "fp32",
    max_shard_bytes: int = SHARD_BYTES,
) -> str:
    """Write `model` into a new folder and return the name of its form. The model is only read.

    `form` auto takes the one class of transformers that computes the same (`llava.form`), or the parts one by one where
    there is none. Adapters on the model are merged into the weights that are written, or, with `adapter`, `out` gets two
    folders: `base`, without them, and `adapter`, which peft loads on it. fp32 is exact; bf16 rounds each weight once.

    Raises Refused for a folder that is not empty, and for an adapter that is not there or that no class can take.
    """
    refuse_misfit(bundle)
    chosen, reason = llava.form(bundle.config)
    if form == "parts":
        chosen, reason = "parts", "it was asked for"
    if adapter:
        if not _adapted(model):
            raise Refused("no layer of the tower or the language model has an adapter: the last stage trained none. Leave --adapter out.")
        if chosen == "parts":
            raise Refused(f"an adapter needs a model that one class of transformers loads, and this one is exported as parts: {reason}.")
    with new_folder(out) as folder:
        base = folder / "base" if adapter else folder
        base.mkdir(exist_ok=True)
        _write(bundle, model, base, chosen, not adapter, dtype, max_shard_bytes)
        if adapter:
            (folder / "adapter").mkdir()
            _write_adapter(bundle, model, folder / "adapter", chosen, str(out / "base"))
    say(f"{out}: {chosen} form ({reason})")
    return chosen


def weights(model: torch.nn.Module, merged: bool, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Every weight of a plain model, one at a time: with the updates of adapters added in float32, or without them."""
    for name, x in model.named_parameters():
        path, _, leaf = name.rpartition(".")
        layer = model.get_submodule(path)
        if isinstance(layer, LoRALinear) and leaf in ("lora_A", "lora_B"):
            continue
        x = x.detach()
        if merged and isinstance(layer, LoRALinear) and leaf == "weight":
            x = x.float() + layer.scale * (layer.lora_B.detach() @ layer.lora_A.detach())
        yield name, x.to(dtype)


def _write(bundle: Bundle, model: llava.Model, folder: Path, form: str, merged: bool, dtype: Dtype, max_shard_bytes: int) -> None:
    """The folder of one form, without adapters."""
    c = bundle.config
    kept = DTYPES[dtype]
    if form == "parts":
        for name, part, rules in (("vision", model.vision, siglip2.KEYS), ("language", model.language, qwen2.keys(c.language))):
            (folder / name).mkdir()
            write_folder(folder / name, renamed(weights(part, merged, kept), rules), max_shard_bytes)
        projector = renamed(weights(model.projector, merged, kept), projector_rules(model.projector))
        write_file(folder / "projector.safetensors", dict(projector), {"format": "pt"})
        write_parts_settings(bundle, folder, HF_DTYPES[dtype])
        return
    write_folder(folder, renamed(weights(model, merged, kept), rules_of(c, form)), max_shard_bytes)
    stops: dict[str, Any] = dict(stop_settings(bundle))
    token = bundle.encoder().image_token
    config = llava.llava_to_hf(c, token) if form == "llava" else llava.lfm2_vl_to_hf(c, token)
    write_json(folder / "config.json", config | {"dtype": HF_DTYPES[dtype]} | stops)
    write_json(folder / "generation_config.json", stops)
    if form == "llava":
        preprocessor = siglip2.to_preprocessor(c.vision)
        processor = {
            "processor_class": "LlavaProcessor",
            "patch_size": c.vision.patch,
            "vision_feature_select_strategy": "full",
            "num_additional_image_tokens": 0,
            "image_token": bundle.encoder().template.image,
        }
        write_json(folder / "processor_config.json", processor)
    else:
        preprocessor = siglip2.to_preprocessor_naflex(c.vision)
    write_json(folder / "preprocessor_config.json", preprocessor)
    save_tokenizer(bundle.tokenizer, folder)


def rules_of(c: llava.Config, form: str) -> tuple[KeyRule, ...]:
    """The names on disk of a form that one class of transformers loads."""
    return llava.LLAVA_KEYS(c) if form == "llava" else llava.LFM2_VL_KEYS(c)


# ---- adapters


def _adapted(model: llava.Model) -> list[tuple[str, LoRALinear]]:
    """The layers outside the projector that have an adapter."""
    named = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, LoRALinear)]
    return [(name, layer) for name, layer in named if not name.startswith("projector.")]


def _module_name(on_disk: str, form: str) -> str:
    """What a tensor of a folder is called in the model that transformers makes of it: adapters go by that name."""
    if form == "lfm2_vl":
        return on_disk
    return "model." + on_disk.replace("language_model.model.", "language_model.", 1)


def _write_adapter(bundle: Bundle, model: llava.Model, folder: Path, form: str, base: str) -> None:
    """adapter_config.json and adapter_model.safetensors as peft writes them, the whole projector in `modules_to_save`.

    A module cannot be adapted and saved, so adapters of the projector are merged into what is saved of it.
    """
    rules = rules_of(bundle.config, form)

    def module_of(name: str) -> str:
        return _module_name(key_of(f"{name}.weight", rules).theirs, form).removesuffix(".weight")

    layers = {module_of(name): layer for name, layer in _adapted(model)}
    tensors = {
        f"base_model.model.{name}.lora_{x}.weight": getattr(layer, f"lora_{x}").detach().float()
        for name, layer in layers.items()
        for x in "AB"
    }
    projector = weights(torch.nn.ModuleDict({"projector": model.projector}), True, torch.float32)
    tensors |= {f"base_model.model.{_module_name(theirs, form)}": x for theirs, x in renamed(projector, rules)}
    write_file(folder / "adapter_model.safetensors", tensors, {"format": "pt"})

    ranks = {name: len(layer.lora_A) for name, layer in layers.items()}
    alphas = {name: _whole(layer.scale * ranks[name]) for name, layer in layers.items()}
    first = next(iter(layers))  # the others are listed apart where they differ
    config = {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": ranks[first],
        "lora_alpha": alphas[first],
        "rank_pattern": {name: rank for name, rank in ranks.items() if rank != ranks[first]},
        "alpha_pattern": {name: alpha for name, alpha in alphas.items() if alpha != alphas[first]},
        "lora_dropout": max(layer.dropout for layer in layers.values()),  # peft has one for all
        "target_modules": sorted(layers),
        "modules_to_save": ["multi_modal_projector"],
        "bias": "none",
        "fan_in_fan_out": False,
    }
    write_json(folder / "adapter_config.json", config)


def _whole(x: float) -> float | int:
    return round(x) if abs(x - round(x)) < 1e-9 else x
