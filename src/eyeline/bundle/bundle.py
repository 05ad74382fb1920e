"""Bundles in folders: our own form, a run, and the forms of transformers that we write ourselves.

MODEL/eyeline.json            format version, family, shape, name of the chat template
      vision/                 what transformers' SiglipVisionModel loads, with preprocessor_config.json
      language/               what transformers' Qwen2ForCausalLM loads, with the tokenizer
      projector.safetensors   under our names
RUN/model/                    eyeline.json and the tokenizer; the weights are in RUN/checkpoints
"""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, assert_never

import torch
from jinja2 import TemplateError
from pydantic import ValidationError

from eyeline.bundle.folders import new_folder, read_config, read_preprocessor
from eyeline.checkpoint import store
from eyeline.checkpoint.tensors import entries_in, load_into
from eyeline.core.errors import Refused
from eyeline.core.facts import KeyRule
from eyeline.core.files import read_object, write_json
from eyeline.data.templates import TEMPLATES, template_named
from eyeline.data.tokenizer import Encoder, load_tokenizer, save_tokenizer
from eyeline.models import FAMILIES, llava, qwen2, siglip2
from eyeline.models.lora import LoRA, merge, wrap

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedTokenizerBase

VERSION = 1
DESCRIPTION = "eyeline.json"
PROJECTOR = "projector.safetensors"
Kind = Literal["parts", "llava", "lfm2_vl", "run"]


@dataclass(frozen=True)
class Bundle:
    """What a model is, without its weights."""

    config: llava.Config
    tokenizer: "PreTrainedTokenizerBase"
    template: str  # a name in data.templates

    def encoder(self) -> Encoder:
        return Encoder(self.tokenizer, template_named(self.template))


@dataclass(frozen=True)
class Opened:
    """A bundle and where its weights are."""

    folder: Path
    kind: Kind
    bundle: Bundle
    checkpoint: store.Checkpoint | None = None  # of a run

    def load(self, model: llava.Model, keep_adapters: bool = False) -> None:
        """Fill a model that was built from `bundle.config`. Adapters of a run are merged into its weights, or stay beside them
        with `keep_adapters`. Raises Refused when the weights do not fit."""
        c = self.bundle.config
        match self.kind:
            case "parts":
                _load_parts(model, c, self.folder)
            case "llava":
                _load_whole(model, self.folder, llava.LLAVA_KEYS(c), "vision_tower.")
            case "lfm2_vl":
                _load_whole(model, self.folder, llava.LFM2_VL_KEYS(c), "model.vision_tower.")
            case "run":
                assert self.checkpoint is not None
                load_checkpoint(model, c, self.checkpoint)
                if not keep_adapters:
                    merge(model)
            case _:
                assert_never(self.kind)


def load_checkpoint(model: llava.Model, config: llava.Config, checkpoint: store.Checkpoint) -> None:
    """Fill a plain model from a run's checkpoint, with the adapters that it had when it was saved."""
    anything = torch.Generator()  # the adapters' initial values are overwritten
    for part, settings in checkpoint.state["lora"].items():
        wrap(model, llava.facts(config), part, LoRA(**settings), anything)
    checkpoint.fill(dict(model.named_parameters()), "model", "frozen")


def _load_parts(model: llava.Model, config: llava.Config, folder: Path) -> None:
    load_into(_named(model.vision), folder / "vision", vision_rules(folder / "vision"), siglip2.DROPPED)
    load_into(_named(model.language), folder / "language", qwen2.keys(config.language))
    load_into(_named(model.projector), folder / PROJECTOR, projector_rules(model.projector))


def _load_whole(model: llava.Model, folder: Path, rules: Sequence[KeyRule], tower: str) -> None:
    dropped = tuple(tower + name for name in siglip2.DROPPED)
    if any(name.startswith(tower + siglip2.HUB_PREFIX) for name in entries_in(folder)):  # as transformers 4 wrote it
        rules = [_inside(rule, tower, tower + siglip2.HUB_PREFIX) for rule in rules]
    load_into(_named(model), folder, rules, dropped)


def _inside(rule: KeyRule, old: str, new: str) -> KeyRule:
    theirs = new + rule.theirs.removeprefix(old) if rule.theirs.startswith(old) else rule.theirs
    return replace(rule, theirs=theirs)


def _named(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter under every name it has, so that a tied head is known as one."""
    return dict(module.named_parameters(remove_duplicate=False))


def vision_rules(folder: Path) -> tuple[KeyRule, ...]:
    """The rules for a folder of a SigLIP tower: alone, or as the hub has it, inside the whole model."""
    prefixed = any(name.startswith(siglip2.HUB_PREFIX) for name in entries_in(folder))
    return siglip2.HUB_KEYS if prefixed else siglip2.KEYS


def projector_rules(projector: torch.nn.Module) -> tuple[KeyRule, ...]:
    """projector.safetensors has our own names: no class of transformers' reads it."""
    return tuple(KeyRule(name, name) for name, _ in projector.named_parameters())


# ---- descriptions


def describe(bundle: Bundle, folder: Path) -> None:
    """Write a bundle without weights. A description that is there already is replaced; Refused if weights are there."""
    refuse_misfit(bundle)
    if (folder / DESCRIPTION).exists() or (folder.is_dir() and (folder / "tokenizer.json").exists()):
        if any(path.is_dir() or path.suffix == ".safetensors" for path in folder.iterdir()):
            raise Refused(f"{folder} holds a model, which would be replaced by a description without weights. Choose another out=")
        shutil.rmtree(folder)
    with new_folder(folder) as beside:
        save_tokenizer(bundle.tokenizer, beside)
        write_description(bundle, beside)


def write_description(bundle: Bundle, folder: Path) -> None:
    """Write eyeline.json alone."""
    config = bundle.config.model_dump(mode="json")
    write_json(folder / DESCRIPTION, {"version": VERSION, "template": bundle.template, "config": config})


def read_description(folder: Path) -> Bundle:
    """The bundle that eyeline.json describes, its tokenizer beside it or in language/. Raises Refused."""
    path = folder / DESCRIPTION
    content = read_object(path)
    if content.get("version") != VERSION:
        raise Refused(f"{path} has format version {content.get('version')!r}; this Eyeline knows {VERSION}. Use the Eyeline that wrote it.")
    family = content["config"].get("family") if isinstance(content.get("config"), dict) else None
    if family not in FAMILIES:
        raise Refused(f"{path} describes a model of family {family!r}; this Eyeline has {', '.join(FAMILIES)}.")
    try:
        config = llava.Config(**content["config"])
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors())
        raise Refused(f"{path} describes no model: {faults}. Was it edited?") from error
    tokenizer = load_tokenizer(folder if (folder / "tokenizer.json").exists() else folder / "language")
    bundle = Bundle(config, tokenizer, str(content.get("template")))
    refuse_misfit(bundle)
    return bundle


def refuse_misfit(bundle: Bundle) -> None:
    """Raise Refused when the tokenizer can give ids that the embedding has no row for, or lacks the template's tokens."""
    rows, used = bundle.config.language.vocabulary, bundle.encoder().vocabulary
    if used > rows:
        raise Refused(
            f"the tokenizer has ids up to {used - 1}, and the language model's embedding has {rows} rows. "
            f"They belong to different models; `eyeline import` adds rows for added tokens."
        )


# ---- opening


def open_bundle(folder: Path, checkpoint: Literal["newest", "best"] = "newest") -> Opened:
    """Open any folder that Eyeline can use a model from; `checkpoint` chooses among a run's. Raises Refused with what was found."""
    if (folder / "model" / DESCRIPTION).exists():
        return Opened(folder, "run", read_description(folder / "model"), _checkpoint_of(folder, checkpoint))
    if (folder / DESCRIPTION).exists():
        bundle = read_description(folder)
        _refuse_disagreement(folder, bundle.config)
        return Opened(folder, "parts", bundle)
    if not folder.is_dir():
        raise Refused(f"{folder} is no folder. Give a run folder, or one that `eyeline import` or `eyeline export` made.")
    if not (folder / "config.json").exists():
        found = ", ".join(sorted(p.name for p in folder.iterdir())[:8]) or "nothing"
        raise Refused(
            f"{folder} holds no model: looked for model/{DESCRIPTION} (a run), {DESCRIPTION} (an import) and config.json (transformers), "
            f"found {found}."
        )
    hf = read_config(folder)
    kind = hf.get("model_type")
    if kind not in ("llava", "lfm2_vl"):
        part = " It is one part of a model: `eyeline import` joins it with the other." if kind in ("qwen2", "siglip") else ""
        raise Refused(f"{folder / 'config.json'} has model_type={kind!r}; Eyeline opens llava and lfm2_vl.{part}")
    config = llava.from_hf(hf, read_preprocessor(folder))
    tokenizer = load_tokenizer(folder)
    bundle = Bundle(config, tokenizer, recognised(tokenizer, folder))
    refuse_misfit(bundle)
    claimed, written = hf.get("image_token_id", hf.get("image_token_index")), bundle.encoder().image_token
    if claimed != written:
        raise Refused(f"{folder / 'config.json'} has image token {claimed}, and the template {bundle.template!r} writes {written}.")
    return Opened(folder, "llava" if kind == "llava" else "lfm2_vl", bundle)


def _checkpoint_of(run: Path, which: Literal["newest", "best"]) -> store.Checkpoint:
    run_id = read_object(run / "env.json").get("run") if (run / "env.json").exists() else None
    folder = run / "checkpoints"
    match which:
        case "newest":
            found, remedy = store.newest(folder, run_id, hold=True), "Train it until its first checkpoint."
        case "best":
            found, remedy = store.best(folder, run_id, hold=True), "A best one is kept when validate_every is set; take the newest."
        case _:
            assert_never(which)
    if found is None:
        raise Refused(f"{folder} has no {which} checkpoint. {remedy}")
    return found


def _refuse_disagreement(folder: Path, config: llava.Config) -> None:
    """A part that was exchanged by hand would be computed with the old one's settings."""
    vision = siglip2.from_hf(read_config(folder / "vision"), read_preprocessor(folder / "vision"))
    language = qwen2.from_hf(read_config(folder / "language"))
    # through the same reader, which leaves out what has its default
    written = (
        siglip2.from_hf(siglip2.to_hf(config.vision), siglip2.to_preprocessor(config.vision)),
        qwen2.from_hf(qwen2.to_hf(config.language)),
    )
    for part, got, want in zip(("vision", "language"), (vision, language), written, strict=True):
        if got != want:
            names = [name for name in type(got).model_fields if getattr(got, name) != getattr(want, name)]
            changed = ", ".join(f"{name}: {getattr(want, name)!r} and {getattr(got, name)!r}" for name in names)
            raise Refused(f"{folder / DESCRIPTION} and {part}/ describe different models ({changed}). Import the parts anew.")


# ---- chat templates

_PROBES: tuple[list[dict[str, str]], ...] = (
    [{"role": "user", "content": "a b?\n"}],
    [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "v"},
    ],
)


def recognised(tokenizer: "PreTrainedTokenizerBase", where: Path) -> str:
    """The name of the chat template that a tokenizer carries, found by what it renders. Raises Refused when it is none of ours."""
    theirs = _rendered(tokenizer, tokenizer.chat_template) if isinstance(tokenizer.chat_template, str) else None
    for name, template in TEMPLATES.items():
        if theirs is not None and theirs == _rendered(tokenizer, template.jinja):
            return name
    raise Refused(
        f"the chat template of {where} {'is none that Eyeline knows' if theirs else 'is missing'}; it has {', '.join(TEMPLATES)}. "
        f"Import the model with --template, which replaces it."
    )


def _rendered(tokenizer: "PreTrainedTokenizerBase", jinja: str) -> list[str] | None:
    try:
        return [
            str(tokenizer.apply_chat_template(probe, chat_template=jinja, tokenize=False, add_generation_prompt=True)) for probe in _PROBES
        ]
    except (TemplateError, ValueError, TypeError, KeyError):  # a template that does not take such a conversation is another one
        return None


def stop_settings(bundle: Bundle) -> Mapping[str, Any]:
    """generation_config.json: where generation stops, so that whoever loads the model stops there too."""
    encoder = bundle.encoder()
    pad = bundle.tokenizer.pad_token_id
    return {"eos_token_id": list(encoder.stop_ids), "pad_token_id": encoder.stop_ids[0] if pad is None else pad}
