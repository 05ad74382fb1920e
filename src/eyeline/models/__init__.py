"""Models: one file per family, and the lists that name them all. No model knows a rank, a device or the environment.

A family is a module of the interface `Family`; how Hugging Face names its tensors and settings is in `models/hf/`.
"""

from typing import Annotated, Any, Protocol

import torch
from pydantic import Discriminator, Tag, TypeAdapter

from eyeline.core.plan import Spec
from eyeline.models import llava, qwen3_5_vl, qwen3_vl, qwen_vl, text


class Family(Protocol):
    """The interface of a family's module; `c` is its own Config."""

    def Model(self, c: Any, compute_dtype: torch.dtype, /) -> "Model": ...
    def spec(self, c: Any, /) -> Spec: ...


FAMILIES: dict[str, Family] = {"llava": llava, "text": text, "qwen3_vl": qwen3_vl, "qwen3_5_vl": qwen3_5_vl}
Model = llava.Model | text.Model | qwen_vl.Model


def _family(config: Any) -> Any:
    """The family that a config, or the mapping that is to become one, names. `llava` may be left out."""
    return config.get("family", "llava") if isinstance(config, dict) else getattr(config, "family", None)


Config = Annotated[
    Annotated[llava.Config, Tag("llava")]
    | Annotated[text.Config, Tag("text")]
    | Annotated[qwen3_vl.Config, Tag("qwen3_vl")]
    | Annotated[qwen3_5_vl.Config, Tag("qwen3_5_vl")],
    Discriminator(_family),
]
CONFIG: TypeAdapter[Config] = TypeAdapter(Config)


def family_of(c: Config) -> Family:
    return FAMILIES[c.family]


def spec(c: Config) -> Spec:
    """The facts of the model of this config."""
    return family_of(c).spec(c)
