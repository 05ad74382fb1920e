"""The language models that a family may have: a module each, with one interface.

A module has `Config`, `Model(c, compute_dtype) -> Decoder`; what it states about itself, relative to the decoder: `blocks`, `linears`,
`splits`, `seams`, `experts` (functions of the config); and its folder of a `...ForCausalLM` class: `MODEL_TYPES`, `DROPPED`, `keys(c)`,
`from_hf(json, where)`, `to_hf(c)`.
"""

from types import ModuleType
from typing import Annotated, Any

from pydantic import Discriminator, Tag

from eyeline.core.errors import Refused
from eyeline.models import llama, qwen2, qwen3, qwen3_5
from eyeline.models.hf_config import Json

LANGUAGES: dict[str, ModuleType] = {"qwen2": qwen2, "qwen3": qwen3, "qwen3_5": qwen3_5, "llama": llama}


def _family(value: Any) -> Any:
    """What a record, or a mapping of settings, says; one that says nothing is a Qwen2, the first that there was."""
    return value.get("family", "qwen2") if isinstance(value, dict) else getattr(value, "family", None)


LanguageConfig = Annotated[
    Annotated[qwen2.Config, Tag("qwen2")]
    | Annotated[qwen3.Config, Tag("qwen3")]
    | Annotated[qwen3_5.Config, Tag("qwen3_5")]
    | Annotated[llama.Config, Tag("llama")],
    Discriminator(_family),
]


def language_from_hf(config_json: Json, where: str = "config.json") -> LanguageConfig:
    """The language model that a config.json describes. Raises Refused."""
    found = config_json.get("model_type")
    for module in LANGUAGES.values():
        if found in module.MODEL_TYPES:
            return module.from_hf(config_json, where)
    known = ", ".join(kind for module in LANGUAGES.values() for kind in module.MODEL_TYPES)
    raise Refused(f"{where} has model_type={found!r}; the language models that Eyeline has are {known}.")
