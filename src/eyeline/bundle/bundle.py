"""Bundles in folders: of one class of transformers, our own form of parts, and a run.

MODEL/config.json             and weights, tokenizer and settings of images, for one class of transformers (`Form`)
MODEL/eyeline.json            format version, shape, name of the chat template: the form "parts", which no one class loads
      vision/                 what transformers' SiglipVisionModel loads, with preprocessor_config.json
      language/               what transformers' class of the language model loads, with the tokenizer
      projector.safetensors   under our names
RUN/model/                    eyeline.json and the tokenizer; the weights are in RUN/checkpoints

Next to the tokenizer, if import added control tokens to it: untrained_tokens.json.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, assert_never

from pydantic import ValidationError

from eyeline.bundle.folders import (
    about,
    chat_templates,
    new_folder,
    read_config,
    read_preprocessor,
    read_video_preprocessor,
    warn_of_others,
)
from eyeline.bundle.peft_adapter import PeftAdapter
from eyeline.bundle.places import path_in_place, places, text_place
from eyeline.bundle.rendering import Unbounded, render, rendered
from eyeline.checkpoint import store
from eyeline.checkpoint.tensors import entries_in, refuse_other_formats
from eyeline.core.errors import Refused, nearest
from eyeline.core.files import read_object, write_json
from eyeline.core.log import say, warn
from eyeline.core.plan import Part
from eyeline.core.problems import lines_of
from eyeline.core.world import ALONE, World
from eyeline.data.text.templates import LLAMA_DATE, TEMPLATES, VIDEO, template_named
from eyeline.data.text.tokenizer import Encoder, load_tokenizer, save_tokenizer
from eyeline.models import CONFIG, FAMILIES, Config, spec
from eyeline.models.hf import MAPPINGS, mapping_of
from eyeline.models.hf.forms import Files, Form, MediaTokens

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedTokenizerBase

VERSION = 2  # of eyeline.json; 1 had other names of config fields
DESCRIPTION = "eyeline.json"
UNTRAINED = "untrained_tokens.json"
GENERATION = "generation_config.json"


@dataclass(frozen=True)
class Bundle:
    """The description of a model, without its weights."""

    config: Config
    tokenizer: "PreTrainedTokenizerBase"
    template: str  # a name in data.templates
    generation: Mapping[str, Any] = field(default_factory=dict)  # generation_config.json of the model that this one comes from
    untrained: tuple[str, ...] = ()  # control tokens that import added, whose embedding rows nothing has trained

    def encoder(self) -> Encoder:
        rule = spec(self.config).image
        return Encoder(self.tokenizer, template_named(self.template), rule.marks if rule else None)

    def files(self, form: Form) -> Files:
        """The JSON files of a folder of this form."""
        return mapping_of(self.config).to_hf(self.config, form, self.media_tokens())

    def media_tokens(self) -> MediaTokens:
        image, ids = template_named(self.template).image, self.tokenizer.get_vocab()
        others = (ids.get(token) for token in (VIDEO, "<|vision_start|>", "<|vision_end|>"))
        return MediaTokens(ids.get(image), image, *others)


@dataclass(frozen=True)
class Weights:
    """Where weights are: in a folder of transformers' or of parts, or in a run's checkpoint."""

    folder: Path
    config: Config
    form: Form | None  # None: a run
    checkpoint: store.Checkpoint | None = None  # of a run
    known_rows: int | None = None  # rows of the embedding and head that are taken; those after them start at their mean. None: all
    adapter: PeftAdapter | None = None  # of peft's, for a folder of transformers'


@dataclass(frozen=True)
class Opened:
    """A bundle and where its weights are."""

    folder: Path
    bundle: Bundle
    form: Form | None  # None: a run
    checkpoint: store.Checkpoint | None = None  # of a run

    @property
    def weights(self) -> Weights:
        return Weights(self.folder, self.bundle.config, self.form, self.checkpoint)

    def in_bf16(self) -> bool:
        """Return whether a folder holds bfloat16 and nothing else, which a model of that dtype takes as it is. No run does."""
        if self.form is None:
            return False
        held = (entries_in(self.folder / place) for place in places(self.bundle.config, self.form))
        return {entry.dtype for entries in held for entry in entries.values()} == {"BF16"}

    def trained(self) -> tuple[Part, ...]:
        """The parts that the run has trained in full, in any of its stages so far; an older run's projector may be one."""
        return ("projector",) if self.checkpoint is None else tuple(self.checkpoint.state.get("trained", ("projector",)))

    def saved_modules(self) -> tuple[str, ...]:
        """The modules that the run's last stages have trained in full next to adapters, by path."""
        return () if self.checkpoint is None else tuple(self.checkpoint.state.get("saved_modules", ()))


# ---- descriptions


def describe(bundle: Bundle, folder: Path) -> None:
    """Write a bundle without weights. A description that is there already is replaced; Refused if weights are there."""
    refuse_misfit(bundle)
    if (folder / DESCRIPTION).exists() or (folder.is_dir() and (folder / "tokenizer.json").exists()):
        if any(path.is_dir() or path.suffix == ".safetensors" for path in folder.iterdir()):
            raise Refused(f"{folder} holds a model, which would be replaced by a description without weights. Choose another out=")
        shutil.rmtree(folder)
    with new_folder(folder) as new:
        write_tokenizer(bundle, new)
        write_description(bundle, new)


def write_description(bundle: Bundle, folder: Path) -> None:
    """Write eyeline.json alone."""
    config = bundle.config.model_dump(mode="json")
    write_json(folder / DESCRIPTION, {"version": VERSION, "template": bundle.template, "config": config})


def write_tokenizer(bundle: Bundle, folder: Path) -> None:
    """The tokenizer, how text is generated, and which of its tokens are untrained if any are."""
    save_tokenizer(bundle.tokenizer, folder)
    write_json(folder / GENERATION, generation_settings(bundle))
    if bundle.untrained:
        write_json(folder / UNTRAINED, {"tokens": list(bundle.untrained)})


def read_untrained(folder: Path) -> tuple[str, ...]:
    """The tokens that `write_tokenizer` named as untrained. Raises Refused for a file that holds something else."""
    path = folder / UNTRAINED
    tokens = read_object(path).get("tokens") if path.exists() else []
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise Refused(f"{path} has tokens={tokens!r}; wanted a list of token strings. Delete the file, or import the model again.")
    return tuple(tokens)


def read_description(folder: Path) -> Bundle:
    """The bundle that eyeline.json describes, its tokenizer next to it or in language/. Raises Refused."""
    path = folder / DESCRIPTION
    content = read_object(path)
    _refuse_version(path, content.get("version"))
    family = content["config"].get("family") if isinstance(content.get("config"), dict) else None
    if family not in FAMILIES:
        raise Refused(
            f"{path} describes a model of family {family!r}; this Eyeline has {', '.join(FAMILIES)}.{nearest(str(family), list(FAMILIES))}"
        )
    try:
        config = CONFIG.validate_python(content["config"])
    except ValidationError as error:
        faults = "; ".join(lines_of(Config, content["config"], error))
        raise Refused(f"{path} does not describe a model: {faults}. Was it edited?") from error
    at = folder if (folder / "tokenizer.json").exists() else folder / "language"
    bundle = Bundle(config, load_tokenizer(at), str(content.get("template")), read_generation(at), read_untrained(at))
    refuse_misfit(bundle)
    return bundle


def refuse_other_version(folder: Path) -> None:
    """Raise Refused if an eyeline.json in this folder has another format version, before anything else is read."""
    if (folder / DESCRIPTION).exists():
        _refuse_version(folder / DESCRIPTION, read_object(folder / DESCRIPTION).get("version"))


def _refuse_version(path: Path, version: Any) -> None:
    if version == VERSION:
        return
    remedy = "Use the Eyeline that wrote it."
    if isinstance(version, int) and version < VERSION:
        remedy = "An earlier Eyeline wrote it: import the model again, or train the run again."
    raise Refused(f"{path} has format version {version!r}; this Eyeline reads {VERSION}. {remedy}")


def refuse_misfit(bundle: Bundle) -> None:
    """Raise Refused when the tokenizer can give ids that the embedding has no row for, or lacks the template's tokens."""
    rows, used = spec(bundle.config).vocab_size, bundle.encoder().vocabulary
    if used > rows:
        raise Refused(
            f"the tokenizer has ids up to {used - 1}, and the language model's embedding has {rows} rows. "
            f"They belong to different models; `eyeline import` adds rows for added tokens."
        )


# ---- opening


def open_bundle(folder: Path, checkpoint: Literal["newest", "best"] = "newest", world: World = ALONE) -> Opened:
    """Open any folder that Eyeline can use a model from; `checkpoint` chooses among a run's, which ranks verify together. Raises Refused
    with what was found."""
    if (folder / "model" / DESCRIPTION).exists():
        warn_of_others(folder)
        return Opened(folder, read_description(folder / "model"), None, _checkpoint_of(folder, checkpoint, world))
    if checkpoint != "newest" and folder.is_dir():
        raise Refused(f"{folder} is not a run folder, so it has no {checkpoint} checkpoint. Leave --checkpoint out.")
    if (folder / DESCRIPTION).exists():
        bundle = read_description(folder)
        form = mapping_of(bundle.config).PARTS
        if form is None:
            raise Refused(f"{folder} describes a model and holds no weights. Give the run folder that it belongs to.")
        _refuse_disagreement(folder, bundle, form)
        return Opened(folder, bundle, form)
    if not folder.is_dir():
        raise Refused(f"{folder} is not a directory. Give a run folder, or one that `eyeline import` or `eyeline export` made.")
    refuse_other_formats(folder)
    if not (folder / "config.json").exists():
        found = ", ".join(sorted(p.name for p in folder.iterdir())[:8]) or "nothing"
        raise Refused(
            f"{folder} holds no model: looked for model/{DESCRIPTION} (a run), {DESCRIPTION} (an import) and config.json (transformers), "
            f"found {found}."
        )
    config, form = read_shape(folder)
    tokenizer = load_tokenizer(folder)
    bundle = Bundle(config, tokenizer, template_name(tokenizer, folder), read_generation(folder), read_untrained(folder))
    refuse_misfit(bundle)
    _refuse_other_tokens(folder, bundle, form)
    return Opened(folder, bundle, form)


def open_weights(folder: Path, world: World = ALONE) -> Weights:
    """Where the weights of a folder are, as `open_bundle` finds them. Tokenizer and chat template of a folder of transformers' are not
    read: code that takes only its tower needs neither. Raises Refused."""
    ours = (folder / "model" / DESCRIPTION).exists() or (folder / DESCRIPTION).exists()
    if ours or not (folder / "config.json").exists():
        return open_bundle(folder, world=world).weights
    refuse_other_formats(folder)
    return Weights(folder, *read_shape(folder))


def tokenizer_of(folder: Path) -> "PreTrainedTokenizerBase | None":
    """The tokenizer of a folder with a model; None for a folder of transformers' without one. Raises Refused."""
    if (folder / "model" / DESCRIPTION).exists() or (folder / DESCRIPTION).exists():
        return open_bundle(folder).bundle.tokenizer
    files = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "tokenizer.model")
    return load_tokenizer(folder) if any((folder / name).exists() for name in files) else None


def read_shape(folder: Path) -> tuple[Config, Form]:
    """The config and form of a folder of transformers', by its config.json and preprocessor_config.json. Raises Refused."""
    hf = read_config(folder)
    kind = hf.get("model_type")
    for mapping in MAPPINGS.values():
        if kind in mapping.MODEL_TYPES:
            stills, videos = read_preprocessor(folder), read_video_preprocessor(folder)
            with about(folder):
                config = mapping.from_hf(hf, stills, videos)
            form = mapping.form(config)
            if form.name == "parts":
                raise Refused(f"{folder} holds a {kind} model that Eyeline would not compute as transformers does: {form.reason}.")
            return config, form
    known = ", ".join(kind for mapping in MAPPINGS.values() for kind in mapping.MODEL_TYPES)
    part = " A vision tower is one part of a model: `eyeline import` joins it with a language model." if "siglip" in str(kind) else ""
    raise Refused(f"{folder / 'config.json'} has model_type={kind!r}; Eyeline opens {known}.{part}")


def _refuse_other_tokens(folder: Path, bundle: Bundle, form: Form) -> None:
    """Raise Refused where config.json names other tokens for media than the template writes."""
    there, ours = read_config(folder), bundle.files(form)["config.json"]
    for name, written in ours.items():
        claimed = there.get(name)
        if "token_i" in name and written is not None and claimed is not None and claimed != written:
            raise Refused(
                f"{folder / 'config.json'} has {name} {claimed}, and the template {bundle.template!r} writes {written}. "
                "Take the model's own config.json."
            )


def _checkpoint_of(run: Path, which: Literal["newest", "best"], world: World) -> store.Checkpoint:
    run_id = read_object(run / "env.json").get("run") if (run / "env.json").exists() else None
    folder = run / "checkpoints"
    match which:
        case "newest":
            found, remedy = store.newest(folder, run_id, hold=True, world=world), "Train it until its first checkpoint."
        case "best":
            found, remedy = (
                store.best(folder, run_id, hold=True, world=world),
                "Only a run with validation_steps keeps its best checkpoint; use the newest.",
            )
        case _:
            assert_never(which)
    if found is None:
        raise Refused(f"{folder} has no {which} checkpoint. {remedy}")
    return found


def _refuse_disagreement(folder: Path, bundle: Bundle, form: Form) -> None:
    """A part that was exchanged by hand would be computed with the old one's settings."""
    for name, content in bundle.files(form).items():
        there, ours = read_object(folder / name), json.loads(json.dumps(content))
        changed = [f"{key}: {ours[key]!r} and {there[key]!r}" for key in ours if there.get(key, ours[key]) != ours[key]]
        if changed:
            raise Refused(f"{folder / DESCRIPTION} and {name} describe different models ({', '.join(changed)}). Import the parts again.")


# ---- chat templates

_DAY: dict[str, Any] = {"date_string": LLAMA_DATE}  # else 3.2's writes today's
_PROBES: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "a b?\n"}],
    [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}],  # some put a think block before a last answer
    [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "v"},
    ],
]


def template_name(tokenizer: "PreTrainedTokenizerBase", where: Path) -> str:
    """The name of the chat template that a model's folder carries, found by what it renders. Of several, the default comes first, and
    the first that Eyeline knows is taken. Raises Refused when none is ours."""
    found = chat_templates(tokenizer.chat_template, where)
    for name, jinja in found.items():
        try:
            known = _known_as(jinja, tokenizer)
        except Unbounded as error:
            raise Refused(f"the chat template of {where} {error}. Import the model with --template, which replaces it.") from error
        if known is not None:
            if name != next(iter(found)):
                say(f"{where}: the chat template {name!r} is used ({known}); Eyeline does not know {next(iter(found))!r}")
            return known
    fault = "is missing" if not found else "is not one that Eyeline knows"
    listed = f" ({', '.join(found)}: none)" if len(found) > 1 else ""
    raise Refused(
        f"the chat template of {where} {fault}{listed}; Eyeline has {', '.join(TEMPLATES)}. Import the model with "
        "--template, which replaces it."
    )


def _known_as(jinja: str, tokenizer: "PreTrainedTokenizerBase") -> str | None:
    """The template of ours that writes the same. Raises Unbounded."""
    for name, template in TEMPLATES.items():
        if jinja == template.jinja:
            return name
    roles = {key: str(token) for key, token in tokenizer.special_tokens_map.items() if not isinstance(token, list | tuple)}
    theirs = rendered(jinja, _PROBES, roles | _DAY)
    return next((name for name in TEMPLATES if theirs == _ours(name)), None)


@cache
def _ours(name: str) -> list[str]:
    return [render(TEMPLATES[name].jinja, probe, _DAY) for probe in _PROBES]


def stop_settings(bundle: Bundle) -> dict[str, Any]:
    """The tokens that end an answer and the one that fills up: the template's, and those that the model came with."""
    stops, pad = bundle.encoder().stop_ids, bundle.tokenizer.pad_token_id
    return {
        "eos_token_id": sorted({*stops, *_ids(bundle.generation.get("eos_token_id"))}),
        "pad_token_id": stops[0] if pad is None else pad,
    }


def generation_settings(bundle: Bundle) -> dict[str, Any]:
    """generation_config.json: where generation stops, and the sampling that the model came with (temperature, top_p, ...)."""
    return {**bundle.generation, **stop_settings(bundle)}


def read_generation(folder: Path) -> dict[str, Any]:
    """A folder's generation_config.json, but for what says which version wrote it; empty where there is none. Raises Refused."""
    path = folder / GENERATION
    found = read_object(path) if path.exists() else {}
    if found.get("eos_token_id") is not None and not _ids(found["eos_token_id"]):
        raise Refused(f"{path} has eos_token_id={found['eos_token_id']!r}; wanted a token's id, or a list of them. Download it again.")
    return {key: value for key, value in found.items() if key not in ("transformers_version", "_from_model_config") and value is not None}


def _ids(value: Any) -> list[int]:
    """The ids in an `eos_token_id`; none where it holds something else."""
    ids = value if isinstance(value, list) else [value]
    return ids if all(isinstance(one, int) and not isinstance(one, bool) for one in ids) else []


# ---- everything but the weights


def write_settings(bundle: Bundle, folder: Path, form: Form, dtype: str | None = None) -> None:
    """Settings for transformers' classes, the tokenizer, and for the form "parts" the description.

    `dtype` is transformers' name of the one that all weights have; None where they differ, or are as they came.
    """
    kept = {} if dtype is None else {"dtype": dtype, "torch_dtype": dtype}  # the name until transformers 4.55
    place = text_place(bundle.config, form)
    stops = stop_settings(bundle)
    for name, content in bundle.files(form).items():
        if name == path_in_place(place, "config.json"):
            content = {**content, **kept, **stops}
        elif name.endswith("/config.json"):
            content = {**content, **kept}
        write_json(folder / name, content)
    write_tokenizer(bundle, folder / place)
    if form.code is not None:
        shutil.copyfile(Path(__file__).with_name(form.code), folder / form.code)
    _warn_if_read_otherwise(bundle, folder / place)
    if form.name == "parts":
        write_description(bundle, folder)


def classes(bundle: Bundle, form: Form) -> str:
    """The classes of transformers that load a folder of this form."""
    named = [name for content in bundle.files(form).values() for name in content.get("architectures", ())]
    return " and ".join(named)


PROBE = "I'll ask: 1234 cafe\u0301s?\n\n  \ufb01ne, \u00c5ngstr\u00f6m"  # contractions, digits, spaces, text that normalisation changes


def _warn_if_read_otherwise(bundle: Bundle, folder: Path) -> None:
    """See `load_tokenizer`: Eyeline reads the file to the letter, users of transformers may get something else."""
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    if theirs.encode(PROBE) != bundle.tokenizer.encode(PROBE):
        warn(
            "transformers' AutoTokenizer splits text by the class of the model, which differs from this model's own tokenizer; "
            "with transformers, load the tokenizer with PreTrainedTokenizerFast.from_pretrained."
        )
