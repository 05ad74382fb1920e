"""The language models in Hugging Face's form: a module for each of `models/languages.py`, of the interface `LanguageMapping`."""

from typing import Any, Protocol

from eyeline.core.errors import Refused
from eyeline.core.key_rules import KeyRule
from eyeline.models.hf import llama, qwen2, qwen3, qwen3_5
from eyeline.models.hf.config_json import Json
from eyeline.models.languages import LanguageConfig


class LanguageMapping(Protocol):
    """The interface of a language model's module here; `c` is the model's own Config."""

    @property
    def MODEL_TYPES(self) -> tuple[str, ...]: ...  # in config.json
    @property
    def DROPPED(self) -> tuple[str, ...]: ...  # patterns of what a folder may hold beyond our tensors

    def keys(self, c: Any, /) -> tuple[KeyRule, ...]:
        """Our tensors, and their names in a folder of the `...ForCausalLM` class."""
        ...

    def from_hf(self, config_json: Json, where: str = "config.json", /) -> Any: ...
    def to_hf(self, c: Any, /) -> Json: ...


LANGUAGES: dict[str, LanguageMapping] = {"qwen2": qwen2, "qwen3": qwen3, "qwen3_5": qwen3_5, "llama": llama}


def language_from_hf(config_json: Json, where: str = "config.json") -> LanguageConfig:
    """The language model that a config.json describes. Raises Refused."""
    found = config_json.get("model_type")
    for module in LANGUAGES.values():
        if found in module.MODEL_TYPES:
            return module.from_hf(config_json, where)
    known = ", ".join(kind for module in LANGUAGES.values() for kind in module.MODEL_TYPES)
    raise Refused(f"{where} has model_type={found!r}; the language models that Eyeline has are {known}.")
