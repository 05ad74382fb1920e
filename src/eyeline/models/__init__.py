"""What computes: one file a family, and the lists that name them all. No model knows a rank, a device or the environment.

A family is a module of the interface `Family`. To add one: write it, and add it to `FAMILIES` and to `Config` and `Model`.
"""

from collections.abc import Collection
from typing import Annotated, Any, Protocol

import torch
from pydantic import Discriminator, Tag, TypeAdapter

from eyeline.core.facts import Facts, KeyRule, Part, part_of
from eyeline.models import decoder, llava, qwen3_5_vl, qwen3_vl, qwen_vl, text
from eyeline.models.forms import NONE, Files, Form, MediaTokens, Shapes
from eyeline.models.hf_config import Json


class Family(Protocol):
    """What a module of a family has; `c` is its own Config."""

    @property
    def MODEL_TYPES(self) -> tuple[str, ...]: ...  # of Hugging Face's config.json
    @property
    def PARTS(self) -> Form | None: ...  # our own form, a folder a part, for families that have it

    def Model(self, c: Any, compute_dtype: torch.dtype, /) -> "Model": ...
    def facts(self, c: Any, /) -> Facts: ...
    def form(self, c: Any, /) -> Form:
        """Which class of transformers computes the same."""
        ...

    def keys(self, c: Any, form: Form, found: Shapes = NONE, /) -> tuple[KeyRule, ...]:
        """Our tensors, and their names in a folder of this form; where folders differ, by what is `found` in one."""
        ...

    def dropped(self, c: Any, form: Form, /) -> tuple[str, ...]:
        """Patterns of what such a folder may hold beyond them."""
        ...

    def to_hf(self, c: Any, form: Form, tokens: MediaTokens, /) -> Files: ...
    def from_hf(self, config_json: Json, preprocessor_json: Json | None, video_json: Json | None = None, /) -> Any:
        """The config that such a folder describes, with its files for stills and films. Raises Refused."""
        ...


FAMILIES: dict[str, Family] = {"llava": llava, "text": text, "qwen3_vl": qwen3_vl, "qwen3_5_vl": qwen3_5_vl}
Model = llava.Model | text.Model | qwen_vl.Model


def _family(config: Any) -> Any:
    """Of a config, or of the mapping that is to become one. The first family there was may be left out."""
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
