"""What Qwen3-VL and Qwen3.5 share in Hugging Face's form: tensors and settings of the tower, the mergers and the decoder in one folder."""

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from eyeline.core.errors import Refused
from eyeline.core.key_rules import KeyRule, prefixed
from eyeline.models.hf import qwen_vision
from eyeline.models.hf.config_json import Json, expect, integer, refuse_quantised, section
from eyeline.models.hf.forms import Files, MediaTokens, within
from eyeline.models.hf.languages import LanguageMapping
from eyeline.models.qwen_vl import Config


def keys(c: Config, language: Iterable[KeyRule]) -> tuple[KeyRule, ...]:
    """Our tensors, and their names in a folder of the `...ForConditionalGeneration`; `language` has the rules for a folder of the
    language model alone."""
    visual = (*prefixed(qwen_vision.keys(c.vision), "vision.", ""), *prefixed(qwen_vision.projector_keys(c.vision), "projector.", ""))
    inside = (replace(rule, theirs=within(rule.theirs)) for rule in prefixed(language, "language.", ""))
    return (*prefixed(visual, "", "model.visual."), *inside)


def fused(rules: Iterable[KeyRule], turn_up: bool = False, turn_down: bool = False) -> tuple[KeyRule, ...]:
    """The same rules for a folder that has one tensor for all experts of a layer, and gate and up in one: [E, 2·F, D] and
    [E, D, F]; or turned, [E, D, 2·F] and [E, F, D]."""
    rules = list(rules)
    stacked = {rule.theirs.rsplit(".", 2)[1]: rule for rule in rules if "{e}" in rule.theirs}  # gate_proj, up_proj, down_proj
    if not stacked:
        return tuple(rules)

    def apart(both: Tensor) -> tuple[Tensor, ...]:
        return (both.transpose(1, 2) if turn_up else both).chunk(2, 1)

    def gate_and_up(gate_EFD: Tensor, up_EFD: Tensor) -> Tensor:
        both = torch.cat((gate_EFD, up_EFD), 1)
        return both.transpose(1, 2) if turn_up else both

    def turned(down: Tensor) -> Tensor:
        return down.transpose(1, 2) if turn_down else down

    gate, up, down = (str(stacked[name].ours) for name in ("gate_proj", "up_proj", "down_proj"))
    folder = stacked["down_proj"].theirs.split(".{e}.")[0]
    return (
        *(rule for rule in rules if "{e}" not in rule.theirs),
        KeyRule((gate, up), f"{folder}.gate_up_proj", apart, gate_and_up),
        KeyRule(down, f"{folder}.down_proj", turned, turned),
    )


# ---- settings


def to_hf(c: Config, kind: str, architecture: str, text: Json, tokens: MediaTokens) -> Files:
    """The JSON files of a folder of this class; `text` is its text_config."""
    config = {
        "architectures": [architecture],
        "model_type": kind,
        "vision_config": {"model_type": f"{kind}_vision", **qwen_vision.to_hf(c.vision, c.language.hidden_size)},
        "text_config": text,
        "image_token_id": tokens.image,
        "tie_word_embeddings": c.language.tie_embeddings,
    }
    others = {"video_token_id": tokens.video, "vision_start_token_id": tokens.start, "vision_end_token_id": tokens.end}
    return {
        "config.json": config | {name: token for name, token in others.items() if token is not None},
        "preprocessor_config.json": qwen_vision.to_preprocessor(c.vision),
        "video_preprocessor_config.json": qwen_vision.to_video_preprocessor(c.vision),
    }


def from_hf(
    config_json: Json,
    preprocessor_json: Json | None,
    video_json: Json | None,
    kinds: Collection[str],
    language: LanguageMapping,
    deep: tuple[int, ...],
) -> dict[str, Any]:
    """The parts of a Config, from a folder's config.json, preprocessor_config.json and video_preprocessor_config.json. `kinds` are the
    model types that there are; `deep` is the default of `deepstack_visual_indexes`. Raises Refused."""
    where, inside, visual = "config.json", "text_config of config.json", "vision_config of config.json"
    kind = config_json.get("model_type")
    if kind not in kinds:
        raise Refused(f"{where} has model_type={kind!r}; Eyeline reads {' and '.join(kinds)} here.")
    refuse_quantised(where, config_json)
    towers, texts = section(where, config_json, "vision_config"), section(where, config_json, "text_config")
    expect(inside, texts, {"model_type": f"{kind}_text"})
    tied = config_json.get("tie_word_embeddings", False)  # the folder's, whatever its text_config says: as the reference reads it
    decoder = language.from_hf({**texts, "model_type": f"{kind}_text", "tie_word_embeddings": tied}, inside)
    vision = qwen_vision.from_hf(towers, preprocessor_json, video_json, visual, deep)
    if (out := integer(visual, towers, "out_hidden_size", 3584)) != decoder.hidden_size:
        raise Refused(f"{visual} has out_hidden_size={out}, and the language model is {decoder.hidden_size} wide. Is the file damaged?")
    return {"vision": vision, "language": decoder}
