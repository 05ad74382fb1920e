"""Hugging Face's names and settings of every family: a module for each of `models.FAMILIES`, with the interface `Mapping`."""

from typing import Any, Protocol

from eyeline.core.key_rules import KeyRule
from eyeline.models import Config
from eyeline.models.hf import languages, llama, llava, qwen2, qwen3, qwen3_5, qwen3_5_vl, qwen3_vl, qwen_vision, siglip2, text
from eyeline.models.hf.config_json import Json
from eyeline.models.hf.forms import NONE, Files, Form, MediaTokens, Shapes

__all__ = [
    "MAPPINGS",
    "Mapping",
    "languages",
    "llama",
    "llava",
    "mapping_of",
    "qwen2",
    "qwen3",
    "qwen3_5",
    "qwen3_5_vl",
    "qwen3_vl",
    "qwen_vision",
    "siglip2",
    "text",
]


class Mapping(Protocol):
    """The interface of a family's module here; `c` is the family's own Config."""

    @property
    def MODEL_TYPES(self) -> tuple[str, ...]: ...  # in config.json
    @property
    def PARTS(self) -> Form | None: ...  # our own form, a folder per part, for families that have it

    def form(self, c: Any, /) -> Form:
        """The class of transformers that computes the same."""
        ...

    def keys(self, c: Any, form: Form, found: Shapes = NONE, /) -> tuple[KeyRule, ...]:
        """Our tensors, and their names in a folder of this form; where folders differ, by what is `found` in one."""
        ...

    def dropped(self, c: Any, form: Form, /) -> tuple[str, ...]:
        """Patterns of what such a folder may hold beyond them."""
        ...

    def to_hf(self, c: Any, form: Form, tokens: MediaTokens, /) -> Files: ...
    def from_hf(self, config_json: Json, preprocessor_json: Json | None, video_json: Json | None = None, /) -> Any:
        """The config that such a folder describes, with its files for images and videos. Raises Refused."""
        ...


MAPPINGS: dict[str, Mapping] = {"llava": llava, "text": text, "qwen3_vl": qwen3_vl, "qwen3_5_vl": qwen3_5_vl}


def mapping_of(c: Config) -> Mapping:
    return MAPPINGS[c.family]
