"""The language models in Hugging Face's form: a module for each of `models/languages.py`, with one interface.

A module has `MODEL_TYPES` (of config.json), `keys(c)` (our tensors and their names in a folder of the `...ForCausalLM` class), `DROPPED`
(patterns of what such a folder may hold beyond them), `from_hf(config_json, where)` and `to_hf(c)`.
"""

from types import ModuleType

from eyeline.core.errors import Refused
from eyeline.models.hf import llama, qwen2, qwen3, qwen3_5
from eyeline.models.hf.config_json import Json
from eyeline.models.languages import LanguageConfig

LANGUAGES: dict[str, ModuleType] = {"qwen2": qwen2, "qwen3": qwen3, "qwen3_5": qwen3_5, "llama": llama}


def language_from_hf(config_json: Json, where: str = "config.json") -> LanguageConfig:
    """The language model that a config.json describes. Raises Refused."""
    found = config_json.get("model_type")
    for module in LANGUAGES.values():
        if found in module.MODEL_TYPES:
            return module.from_hf(config_json, where)
    known = ", ".join(kind for module in LANGUAGES.values() for kind in module.MODEL_TYPES)
    raise Refused(f"{where} has model_type={found!r}; the language models that Eyeline has are {known}.")
