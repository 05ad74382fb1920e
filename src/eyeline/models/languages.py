"""The language models that a family may have: a module each, with one interface.

A module has `Config`, `Model(c, compute_dtype) -> Decoder`, and what it states about itself, relative to the decoder: `blocks`, `linears`,
`splits`, `seams`, `experts` (functions of the config).
"""

from types import ModuleType
from typing import Annotated, Any

from pydantic import Discriminator, Tag

from eyeline.models import llama, qwen2, qwen3, qwen3_5

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
