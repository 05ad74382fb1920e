"""What computes: one file per family, and the lists that name them all. No model knows a rank, a device or the environment.

A family is a module of the interface `Family`; how Hugging Face names its tensors and settings is in `models/hf/`.
"""

from collections.abc import Collection
from typing import Annotated, Any, Protocol

import torch
from pydantic import Discriminator, Tag, TypeAdapter

from eyeline.core.facts import Facts, Part, part_of
from eyeline.models import decoder, llava, qwen3_5_vl, qwen3_vl, qwen_vl, text


class Family(Protocol):
    """What a module of a family has; `c` is its own Config."""

    def Model(self, c: Any, compute_dtype: torch.dtype, /) -> "Model": ...
    def facts(self, c: Any, /) -> Facts: ...


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


def facts(c: Config) -> Facts:
    """What the model of this config states about itself."""
    return family_of(c).facts(c)


def build(
    c: Config,
    device: torch.device | str,
    dtype: torch.dtype = torch.float32,
    compute_dtype: torch.dtype = torch.float32,
    half: Collection[Part] = (),
    cast_once: bool = False,
) -> Model:
    """A model on `device` whose weights, of `dtype`, are not yet filled: no time is spent on numbers that are overwritten. Matrices
    of the parts in `half` are bfloat16. With `cast_once`, for models that only answer, those that are cast to `compute_dtype` wherever
    they are used are of that dtype, and the answers the same."""
    with torch.device("meta"):
        model = family_of(c).Model(c, compute_dtype).to(dtype)
    if cast_once:
        for weight in decoder.cast_at_use(model):
            weight.data = weight.data.to(compute_dtype)
    if half:
        stated = facts(c)
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and part_of(stated, name) in half:
                parameter.data = parameter.data.to(torch.bfloat16)
    model.to_empty(device=device)
    model.tie()  # to_empty made two tensors of a tied one
    return model
