"""What Qwen3-VL and Qwen3.5 share: the tower of `qwen_vision.py`, its mergers as the projector, and a decoder.

The main merger's tokens take the places of the placeholders in the embedded text; DeepStack's, where there are any, are added
to the same places after the decoder's first blocks. `qwen3_vl.py` and `qwen3_5_vl.py` say which decoder, and how a folder names it.

Dims: T tokens  D width  P patches  M visual tokens  E experts  F feed-forward of an expert
"""

from collections.abc import Collection, Iterable
from dataclasses import replace
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from eyeline.core.batch import Batch
from eyeline.core.errors import Refused
from eyeline.core.facts import Facts, KeyRule, Part, Split, prefixed
from eyeline.models import qwen_vision
from eyeline.models.decoder import Cache, Decoder
from eyeline.models.flops import Tally
from eyeline.models.forms import Files, MediaTokens, within
from eyeline.models.hf_config import Json, expect, integer, refuse_quantised, section


class Model(nn.Module):
    def __init__(self, vision: qwen_vision.Config, language: Decoder, compute_dtype: torch.dtype = torch.float32):
        super().__init__()
        self.vision = qwen_vision.Model(vision, compute_dtype)
        self.projector = qwen_vision.Projector(vision, language.embed.embedding_dim)
        self.language = language

    def forward(self, batch: Batch, cache: list[Cache] | None = None) -> Tensor:
        """The summed loss over `labels_L`, or float32 logits_LV of `rows_L` where the batch has no labels.

        With a `cache` (see `new_cache`) the batch is the prompts, or one new token a row.
        """
        x_TD = self.language.embedded(batch.tokens_T)
        deep = []
        if len(batch.patches_PC):
            features = self.vision(batch.patches_PC, batch.places_P2, batch.grids_N2, batch.cu_N1, batch.longest_image)
            tokens_MD, deep = self.projector(features)
            x_TD = x_TD.index_copy(0, batch.visual_M, tokens_MD[batch.sources_M])
            deep = [tokens_MD[batch.sources_M] for tokens_MD in deep]
        return self.language(x_TD, batch, cache, deep)

    def count(self, tally: Tally, pictures: bool) -> None:
        """The arithmetic of a batch with or without pictures: see `models/flops.py`."""
        visual, deep = False, []
        if pictures:
            with tally.within("vision"):
                reached = self.vision.count(tally)
            with tally.within("projector"):
                visual, deep = self.projector.count(tally, reached)
        self.language.count(tally, visual, deep)

    def tie(self) -> None:
        self.language.tie()

    def new_cache(self, rows: int, room: int) -> list[Cache]:
        """Empty caches for `rows` sequences of at most `room` tokens, one a layer of the language model."""
        return self.language.new_cache(rows, room)

    def recompute(self, parts: Collection[Part]) -> None:
        """Run the blocks of these parts again in the backward pass instead of keeping what they computed; of no others."""
        self.vision.recompute, self.language.recompute = "vision" in parts, "language" in parts

    def initialise(self, rng: torch.Generator) -> None:
        """All weights from scratch."""
        self.vision.initialise(rng)
        self.projector.initialise(rng)
        self.language.initialise(rng)


class Config(Protocol):
    """What the families of this design have in common."""

    @property
    def vision(self) -> qwen_vision.Config: ...
    @property
    def language(self) -> Any: ...


def facts(c: Config, language: ModuleType, keys: tuple[KeyRule, ...]) -> Facts:
    """What the model of this config states about itself; `language` is the decoder's module."""
    linears: dict[Part, dict[str, str]] = {
        "vision": {name: f"vision.{x}" for name, x in qwen_vision.LINEARS.items()},
        "projector": {name: f"projector.{x}" for name, x in qwen_vision.projector_linears(c.vision).items()},
        "language": {name: f"language.{x}" for name, x in language.linears(c.language).items()},
    }
    splits: dict[str, Split] = {f"vision.{x}": split for x, split in qwen_vision.SPLITS.items()}
    splits |= {f"language.{x}": split for x, split in language.splits(c.language).items()}
    return Facts(
        parts={"vision": "vision", "projector": "projector", "language": "language"},
        blocks={"vision": f"vision.{qwen_vision.BLOCKS}", "language": f"language.{language.blocks(c.language)}"},
        linears=linears,
        splits=splits,
        seams=(*(f"vision.{x}" for x in qwen_vision.SEAMS), *(f"language.{x}" for x in language.seams(c.language))),
        keys=keys,
        image=c.vision.rule(),
        vocab_size=c.language.vocab_size,
        max_positions=c.language.max_positions,
        experts=None if (experts := language.experts(c.language)) is None else f"language.{experts}",
    )


# ---- Hugging Face's names


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

    def joined(gate_EFD: Tensor, up_EFD: Tensor) -> Tensor:
        both = torch.cat((gate_EFD, up_EFD), 1)
        return both.transpose(1, 2) if turn_up else both

    def turned(down: Tensor) -> Tensor:
        return down.transpose(1, 2) if turn_down else down

    gate, up, down = (str(stacked[name].ours) for name in ("gate_proj", "up_proj", "down_proj"))
    folder = stacked["down_proj"].theirs.split(".{e}.")[0]
    return (
        *(rule for rule in rules if "{e}" not in rule.theirs),
        KeyRule((gate, up), f"{folder}.gate_up_proj", apart, joined),
        KeyRule(down, f"{folder}.down_proj", turned, turned),
    )


# ---- Hugging Face's settings


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
    language: ModuleType,
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
