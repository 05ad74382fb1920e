"""LLaVA in Hugging Face's forms: `LlavaForConditionalGeneration`, `Lfm2VlForConditionalGeneration`, or a folder per part."""

from dataclasses import replace
from typing import Any

from eyeline.core.errors import Refused
from eyeline.core.key_rules import KeyRule, prefixed
from eyeline.models.hf import siglip2
from eyeline.models.hf.config_json import Json, expect, integer, record_of, refuse_quantised, section
from eyeline.models.hf.forms import NONE, Files, Form, MediaTokens, Shapes, within
from eyeline.models.hf.languages import LANGUAGES, language_from_hf
from eyeline.models.llava import Config, ProjectorConfig

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
        return Form("parts", "no class takes images of their own shapes from this tower and processes them as in its training")
    if c.vision.tiles > 1:
        return Form("parts", "no class cuts images into tiles for this tower")
    if c.feature_norm and c.vision.image_size % c.vision.patch:
        return Form("parts", f"LFM2-VL's images are whole patches, and {c.vision.image_size} pixels are not a multiple of {c.vision.patch}")
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
    "language_model.lm_head.": "lm_head.",
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
    layers = [*(["norm"] if c.projector.norm else []), *(["up", "down"] if c.projector.kind == "mlp" else ["out"])]
    tensors = [(f"{x}.{leaf}", f"{PROJECTOR_KEYS[x]}.{leaf}") for x in layers for leaf in ("weight", "bias")]
    return [KeyRule(f"projector.{ours}", prefix + theirs) for ours, theirs in tensors]


def dropped(c: Config, form: Form) -> tuple[str, ...]:
    """What a folder of this form may hold beyond our tensors."""
    tower = {"llava": "vision_tower.", "lfm2_vl": "model.vision_tower.", "parts": "vision/"}[form.name]
    language = {"llava": "language_model.", "lfm2_vl": "", "parts": "language/"}[form.name]
    more = LANGUAGES[c.language.family].DROPPED
    return (*(tower + name for name in siglip2.DROPPED), *(language + name for name in more))


# ---- settings


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
    return record_of(where, Config, {"vision": vision, "language": language, **values})


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
    return {"projector": record_of(where, ProjectorConfig, {"hidden_size": width, "shuffle": r, "norm": norm})}
