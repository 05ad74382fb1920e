"""LLaVA: a vision tower, a projector and a language model (Liu et al. 2023), with pixel shuffle as InternVL and LFM2-VL have it.

The tower's features, r×r of them joined where the projector shuffles, become tokens that take the places of the image
placeholders in the embedded text.

Dims: T tokens  D width  P patches  M visual tokens (rows of the merged tower output may be used by several)  L wanted rows
"""

from collections.abc import Collection
from dataclasses import replace
from typing import Any, Literal

import torch
from pydantic import model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from eyeline.core.batch import Batch
from eyeline.core.errors import Refused
from eyeline.core.facts import Facts, KeyRule, Part, Split, prefixed
from eyeline.core.settings import Positive, Settings
from eyeline.models import qwen3, siglip2
from eyeline.models.decoder import Cache
from eyeline.models.flops import Tally, learns
from eyeline.models.forms import NONE, Files, Form, MediaTokens, Shapes, within
from eyeline.models.hf_config import Json, expect, integer, made, refuse_quantised, section
from eyeline.models.languages import LANGUAGES, LanguageConfig, language_from_hf
from eyeline.models.layers import LayerNorm, Linear, normal_


class ProjectorConfig(Settings):
    kind: Literal["mlp", "linear"] = "mlp"  # two linear layers with a GELU between, or one
    hidden_size: Positive | None = None  # hidden width of the MLP; None: the language model's
    shuffle: Positive = 1  # r: r×r patches are joined to one visual token
    norm: bool = False  # a LayerNorm first, as InternVL has


class Config(Settings):
    family: Literal["llava"] = "llava"
    vision: siglip2.Config
    projector: ProjectorConfig = ProjectorConfig()
    language: LanguageConfig
    feature_layer: int = -1  # which hidden state of the tower: 0 the embedded patches, -1 after the last block, -2 before it
    feature_norm: bool = True  # apply the tower's final norm: only after its last block

    @model_validator(mode="after")
    def _fits(self) -> "Config":
        r, side, layers = self.projector.shuffle, self.vision.position_grid, self.vision.layers
        if self.vision.patches is not None and self.vision.patches < r**2:
            raise ValueError(f"projector.shuffle={r} joins {r}×{r} patches, and vision.patches={self.vision.patches} allows fewer")
        if self.vision.patches is None and side % r:
            valid = [n for n in range(1, side + 1) if side % n == 0]
            raise ValueError(
                f"projector.shuffle={r} must divide the {side}×{side} patches of an image "
                f"({self.vision.image_size} pixels a side, patches of {self.vision.patch}); valid: {valid}"
            )
        if not -layers - 1 <= self.feature_layer <= layers:
            raise ValueError(f"feature_layer={self.feature_layer} is not among the {layers + 1} hidden states of {layers} layers")
        if self.feature_norm and self.depth != layers:
            raise ValueError(
                f"feature_norm belongs after the last block, and feature_layer={self.feature_layer} takes features before it; "
                "set feature_norm: false"
            )
        if self.projector.kind == "linear" and self.projector.hidden_size is not None:
            raise ValueError("projector.hidden_size is the hidden width of an mlp, and projector.kind is linear; remove it")
        if isinstance(self.language, qwen3.Config) and self.language.mrope_section is not None:
            raise ValueError("language.mrope_section is for positions with rows and columns, which a LLaVA does not have; remove it")
        return self

    @property
    def depth(self) -> int:
        """Blocks of the tower that run."""
        return range(self.vision.layers + 1)[self.feature_layer]

    @property
    def hidden(self) -> int:
        """Hidden width of an MLP projector."""
        return self.projector.hidden_size or self.language.hidden_size


class Projector(nn.Module):
    """Patch features -> visual tokens of the language model's width."""

    def __init__(self, c: Config):
        super().__init__()
        self.joined = c.projector.shuffle**2
        width = c.vision.hidden_size * self.joined
        self.norm = LayerNorm(width, 1e-5) if c.projector.norm else None
        if c.projector.kind == "mlp":
            self.up, self.down = Linear(width, c.hidden), Linear(c.hidden, c.language.hidden_size)
        else:
            self.out = Linear(width, c.language.hidden_size)

    def forward(self, features_PD: Tensor) -> Tensor:
        # patches lie in merge order, so pixel shuffle is this reshape: the r² patches of a cell follow one another
        x_MD = features_PD.reshape(-1, self.joined * features_PD.shape[-1])
        x_MD = x_MD if self.norm is None else self.norm(x_MD)
        return self.down(F.gelu(self.up(x_MD))) if hasattr(self, "up") else self.out(x_MD)

    def count(self, tally: Tally, reached: bool) -> bool:
        reached |= learns(self.norm)
        if hasattr(self, "up"):
            return self.down.count(tally, self.up.count(tally, reached, "visual"), "visual")
        return self.out.count(tally, reached, "visual")

    @torch.no_grad()
    def initialise(self, rng: torch.Generator) -> None:
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif name.startswith("norm."):
                parameter.fill_(1.0)
            else:
                normal_(parameter, parameter.shape[1] ** -0.5, rng)


class Model(nn.Module):
    def __init__(self, c: Config, compute_dtype: torch.dtype = torch.float32):
        super().__init__()
        self.vision = siglip2.Model(c.vision, compute_dtype, c.feature_layer, c.feature_norm)
        self.projector = Projector(c)
        self.language = LANGUAGES[c.language.family].Model(c.language, compute_dtype)

    def forward(self, batch: Batch, cache: list[Cache] | None = None) -> Tensor:
        """The summed loss over `labels_L`, or float32 logits_LV of `rows_L` where the batch has no labels.

        With a `cache` (see `new_cache`) the batch is the prompts, or one new token a row.
        """
        x_TD = self.language.embedded(batch.tokens_T)
        if len(batch.patches_PC):
            features_PD = self.vision(batch.patches_PC, batch.places_P2, batch.grids_N2, batch.cu_N1, batch.longest_image)
            visual_MD = self.projector(features_PD)[batch.sources_M]
            x_TD = x_TD.index_copy(0, batch.visual_M, visual_MD)
        return self.language(x_TD, batch, cache)

    def tie(self) -> None:
        self.language.tie()

    def new_cache(self, rows: int, room: int) -> list[Cache]:
        """Empty caches for `rows` sequences of at most `room` tokens, one a layer of the language model."""
        return self.language.new_cache(rows, room)

    def count(self, tally: Tally, pictures: bool) -> None:
        """The arithmetic of a batch with or without pictures: see `models/flops.py`."""
        visual = False
        if pictures:
            with tally.within("vision"):
                visual = self.vision.count(tally)
            with tally.within("projector"):
                visual = self.projector.count(tally, visual)
        self.language.count(tally, visual)

    def recompute(self, parts: Collection[Part]) -> None:
        """Run the blocks of these parts again in the backward pass instead of keeping what they computed; of no others."""
        self.vision.recompute, self.language.recompute = "vision" in parts, "language" in parts

    def initialise(self, rng: torch.Generator) -> None:
        """All weights from scratch."""
        self.vision.initialise(rng)
        self.projector.initialise(rng)
        self.language.initialise(rng)


def facts(c: Config) -> Facts:
    """What the model of this config states about itself: the tower's and the language model's own facts, prefixed."""
    language = LANGUAGES[c.language.family]
    linears: dict[Part, dict[str, str]] = {
        "vision": {name: f"vision.{x}" for name, x in siglip2.LINEARS.items()},
        "language": {name: f"language.{x}" for name, x in language.linears(c.language).items()},
        "projector": {name: f"projector.{name}" for name in (("up", "down") if c.projector.kind == "mlp" else ("out",))},
    }
    splits: dict[str, Split] = {f"vision.{x}": split for x, split in siglip2.SPLITS.items()}
    splits |= {f"language.{x}": split for x, split in language.splits(c.language).items()}
    return Facts(
        parts={"vision": "vision", "projector": "projector", "language": "language"},
        blocks={"vision": f"vision.{siglip2.BLOCKS}", "language": f"language.{language.blocks(c.language)}"},
        linears=linears,
        splits=splits,
        seams=(*(f"vision.{x}" for x in siglip2.SEAMS), *(f"language.{x}" for x in language.seams(c.language))),
        keys=keys(c, form(c)),
        image=c.vision.rule(c.projector.shuffle),
        vocab_size=c.language.vocab_size,
        max_positions=c.language.max_positions,
        experts=None if (experts := language.experts(c.language)) is None else f"language.{experts}",
        unused=(
            *(f"vision.blocks.{i}" for i in range(c.depth, c.vision.layers)),
            *(() if c.feature_norm else ("vision.norm",)),
        ),
    )


# ---- Hugging Face's forms

MODEL_TYPES = ("llava", "lfm2_vl")
SQUARE = "processing_square.py"  # LFM2-VL's own processor keeps an image's shape and cuts tiles, and these models are trained on squares
PARTS = Form("parts", "it was asked for")  # every config has this form too


def form(c: Config) -> Form:
    """The form in which transformers' own classes compute what this config computes; the parts one by one if none does.

    LFM2-VL's class takes any tower and language model, pixel shuffle with or without a LayerNorm, and normed features.
    InternVL's takes the same on paper, but reads every `vision_config` in config.json as InternVL's own tower (transformers
    5.17 to 5.24), so that a folder with a SigLIP tower would load as another model with random weights.
    """
    if c.projector.kind == "linear":
        return Form("parts", "transformers' classes have an MLP as the projector, and projector.kind is linear")
    if c.vision.patches is not None:
        return Form("parts", "no class takes pictures of their own shapes from this tower and prepares them as it was trained")
    if c.vision.tiles > 1:
        return Form("parts", "no class cuts pictures into tiles for this tower")
    if c.feature_norm and c.vision.image_size % c.vision.patch:
        return Form(
            "parts", f"LFM2-VL's pictures are whole patches, and {c.vision.image_size} pixels are not a multiple of {c.vision.patch}"
        )
    if c.feature_norm:
        return Form("lfm2_vl", "an MLP, on features after the tower's final norm", SQUARE, _LFM2_VL_MODULES)
    if c.projector.shuffle > 1 or c.projector.norm:
        return Form("parts", "only LLaVA takes features before the tower's final norm, and it has no pixel shuffle and no projector.norm")
    if c.hidden != c.language.hidden_size:
        return Form(
            "parts",
            f"LLaVA's projector is as wide as its language model ({c.language.hidden_size}), and projector.hidden_size is {c.hidden}",
        )
    return Form("llava", "an MLP without pixel shuffle, on features before the tower's final norm", None, _LLAVA_MODULES)


# LLaVA's class keeps on disk the names that it had before transformers 4.52. In transformers 5 the towers have no module `vision_model`:
# for LLaVA's class peft renames the adapters of it, for LFM2-VL's (peft 0.21) it does not.
_LLAVA_MODULES = {
    "language_model.model.": "model.language_model.",
    "vision_tower.": "model.vision_tower.",
    "multi_modal_projector.": "model.multi_modal_projector.",
}

_LFM2_VL_MODULES = {"model.vision_tower.vision_model.": "model.vision_tower."}

PROJECTOR_KEYS = {"norm": "layer_norm", "up": "linear_1", "down": "linear_2", "out": "linear"}


def keys(c: Config, form: Form, found: Shapes = NONE) -> tuple[KeyRule, ...]:
    """Our tensors, and their names in a folder of this form as the hub has it, which every transformers reads. `found` are the names
    that a folder has: a tower as transformers 5 writes it is read too."""
    language = LANGUAGES[c.language.family].keys(c.language)
    match form.name:
        case "llava":
            tower = _tower(siglip2.KEYS, "vision_tower.", found)
            return (*tower, *_projector(c, "multi_modal_projector."), *prefixed(language, "language.", "language_model."))
        case "lfm2_vl":
            tower = _tower(siglip2.NAFLEX_KEYS, "model.vision_tower.", found)
            inside = [replace(rule, theirs=within(rule.theirs)) for rule in prefixed(language, "language.", "")]
            return (*tower, *_projector(c, "model.multi_modal_projector."), *inside)
        case "parts":
            tower = _tower(siglip2.keys(c.vision), "vision/", found)
            own = [replace(rule, theirs=f"projector.safetensors/{rule.ours}".replace("/projector.", "/")) for rule in _projector(c, "")]
            return (*tower, *own, *prefixed(language, "language.", "language/"))
        case _:
            raise AssertionError(form.name)


def _tower(rules: tuple[KeyRule, ...], prefix: str, found: Shapes) -> tuple[KeyRule, ...]:
    hub = prefix + siglip2.HUB_PREFIX
    short = any(name.startswith(prefix) for name in found) and not any(name.startswith(hub) for name in found)
    return prefixed(rules, "vision.", prefix if short else hub)


def _projector(c: Config, prefix: str) -> list[KeyRule]:
    held = [*(["norm"] if c.projector.norm else []), *(["up", "down"] if c.projector.kind == "mlp" else ["out"])]
    tensors = [(f"{x}.{leaf}", f"{PROJECTOR_KEYS[x]}.{leaf}") for x in held for leaf in ("weight", "bias")]
    return [KeyRule(f"projector.{ours}", prefix + theirs) for ours, theirs in tensors]


def dropped(c: Config, form: Form) -> tuple[str, ...]:
    """What a folder of this form may hold beyond our tensors."""
    tower = {"llava": "vision_tower.", "lfm2_vl": "model.vision_tower.", "parts": "vision/"}[form.name]
    language = {"llava": "language_model.", "lfm2_vl": "", "parts": "language/"}[form.name]
    more = LANGUAGES[c.language.family].DROPPED
    return (*(tower + name for name in siglip2.DROPPED), *(language + name for name in more))


# ---- Hugging Face's settings


def to_hf(c: Config, form: Form, tokens: MediaTokens) -> Files:
    """The JSON files of a folder of this form."""
    language, vision = LANGUAGES[c.language.family], c.vision
    match form.name:
        case "llava":
            config = {
                "architectures": ["LlavaForConditionalGeneration"],
                "model_type": "llava",
                "vision_config": siglip2.to_hf(vision),
                "text_config": language.to_hf(c.language),
                "image_token_index": tokens.image,
                "image_seq_length": vision.position_grid**2,
                "projector_hidden_act": "gelu",
                "multimodal_projector_bias": True,
                "vision_feature_layer": c.feature_layer or -vision.layers - 1,  # a 0 is taken for none at all by transformers 5.24
                "vision_feature_select_strategy": "full",  # the other one drops a class token, which SigLIP does not have
                "tie_word_embeddings": c.language.tie_embeddings,
            }
            processor = {
                "processor_class": "LlavaProcessor",
                "patch_size": vision.patch,
                "vision_feature_select_strategy": "full",
                "num_additional_image_tokens": 0,
                "image_token": tokens.written,
            }
            return {"config.json": config, "preprocessor_config.json": siglip2.to_preprocessor(vision), "processor_config.json": processor}
        case "lfm2_vl":
            config = {
                "architectures": ["Lfm2VlForConditionalGeneration"],
                "model_type": "lfm2_vl",
                "vision_config": siglip2.to_hf_naflex(vision),
                "text_config": language.to_hf(c.language),
                "image_token_id": tokens.image,
                "downsample_factor": c.projector.shuffle,
                "projector_hidden_act": "gelu",
                "projector_hidden_size": c.hidden,
                "projector_bias": True,
                "projector_use_layernorm": c.projector.norm,
                "tie_word_embeddings": c.language.tie_embeddings,
            }
            processor = {
                "processor_class": "SquareProcessor",
                "auto_map": {"AutoProcessor": f"{SQUARE.removesuffix('.py')}.SquareProcessor"},
                "image_token": tokens.written,
                "image_size": vision.image_size,
                "tokens_per_image": (vision.position_grid // c.projector.shuffle) ** 2,
            }
            preprocessor = siglip2.to_preprocessor_naflex(vision)
            return {"config.json": config, "preprocessor_config.json": preprocessor, "processor_config.json": processor}
        case "parts":
            return {
                "vision/config.json": siglip2.to_hf(vision),
                "vision/preprocessor_config.json": siglip2.to_preprocessor(vision),
                "language/config.json": language.to_hf(c.language),
            }
        case _:
            raise AssertionError(form.name)


def from_hf(config_json: Json, preprocessor_json: Json | None, _video_json: Json | None = None) -> Config:
    """The model described by a LLaVA or LFM2-VL folder with a SigLIP 2 tower and any language model of ours. Raises Refused."""
    where = "config.json"
    refuse_quantised(where, config_json)
    expect(where, config_json, {"projector_hidden_act": "gelu"})
    towers, texts = section(where, config_json, "vision_config"), section(where, config_json, "text_config")
    match config_json.get("model_type"):
        case "llava":
            tied = config_json.get("tie_word_embeddings") or texts.get("tie_word_embeddings", False)  # as the reference reads it
            values = _from_llava(where, config_json, towers)
            vision = siglip2.from_hf(towers, preprocessor_json)
        case "lfm2_vl":
            tied = config_json.get("tie_word_embeddings", True)
            values = _from_lfm2_vl(where, config_json)
            vision = siglip2.from_hf_naflex(towers, preprocessor_json)
        case other:
            raise Refused(f"{where} has model_type={other!r}; Eyeline reads llava and lfm2_vl here. Import its parts one by one.")
    language = language_from_hf({**texts, "tie_word_embeddings": tied}, "text_config of config.json")
    return made(where, Config, {"vision": vision, "language": language, **values})


def _from_llava(where: str, config_json: Json, towers: Json) -> dict[str, Any]:
    expect(where, config_json, {"multimodal_projector_bias": True})
    expect(where, {"vision_feature_select_strategy": "default", **config_json}, {"vision_feature_select_strategy": "full"})
    expect("vision_config of config.json", towers, {"tie_last_hidden_states": None})  # would put the final norm before the projector
    layer = config_json.get("vision_feature_layer", -2)
    if not isinstance(layer, int):
        raise Refused(f"{where} has vision_feature_layer={layer!r}; Eyeline takes features of one layer only.")
    return {"feature_layer": layer, "feature_norm": False}


def _from_lfm2_vl(where: str, config_json: Json) -> dict[str, Any]:
    expect(where, config_json, {"projector_bias": True})
    norm = config_json.get("projector_use_layernorm", True)
    width, r = integer(where, config_json, "projector_hidden_size", 2560), integer(where, config_json, "downsample_factor", 2)
    return {"projector": made(where, ProjectorConfig, {"hidden_size": width, "shuffle": r, "norm": norm})}
