"""The language models that a family may have: one module each, of the interface `Language`."""

from typing import Annotated, Any, Protocol

import torch
from pydantic import Discriminator, Tag

from eyeline.core.plan import LanguageSizes
from eyeline.models import llama, qwen2, qwen3, qwen3_5
from eyeline.models.decoder import Decoder


class Language(Protocol):
    """The interface of a language model's module; `c` is its own Config."""

    def Model(self, c: Any, compute_dtype: torch.dtype = torch.float32, /) -> Decoder: ...
    def sizes(self, c: Any, /) -> LanguageSizes: ...


LANGUAGES: dict[str, Language] = {"qwen2": qwen2, "qwen3": qwen3, "qwen3_5": qwen3_5, "llama": llama}


def _family(value: Any) -> Any:
    """The family that a record, or a mapping of settings, names. `qwen2` may be left out."""
    return value.get("family", "qwen2") if isinstance(value, dict) else getattr(value, "family", None)


LanguageConfig = Annotated[
    Annotated[qwen2.Config, Tag("qwen2")]
    | Annotated[qwen3.Config, Tag("qwen3")]
    | Annotated[qwen3_5.Config, Tag("qwen3_5")]
    | Annotated[llama.Config, Tag("llama")],
    Discriminator(_family),
]
