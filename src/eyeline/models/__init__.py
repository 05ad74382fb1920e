"""What computes: one file a family, and the lists that name them all. No model knows a rank, a device or the environment.

A family is a module of the interface `Family`. To add one: write it, and add it to `FAMILIES` and to `Config` and `Model`.
"""

from collections.abc import Collection
from typing import Annotated, Any, Protocol

import torch
from pydantic import Discriminator, Tag, TypeAdapter

from eyeline.core.facts import Facts, KeyRule
from eyeline.models import llava, text
from eyeline.models.forms import Files, Form, MediaTokens
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

    def keys(self, c: Any, form: Form, found: Collection[str] = (), /) -> tuple[KeyRule, ...]:
        """Our tensors, and their names in a folder of this form; where folders differ, by the names `found` in one."""
        ...

    def dropped(self, c: Any, form: Form, /) -> tuple[str, ...]:
        """Patterns of what such a folder may hold beyond them."""
        ...

    def to_hf(self, c: Any, form: Form, tokens: MediaTokens, /) -> Files: ...
    def from_hf(self, config_json: Json, preprocessor_json: Json | None, /) -> Any:
        """The config that such a folder describes. Raises Refused."""
        ...


FAMILIES: dict[str, Family] = {"llava": llava, "text": text}
Model = llava.Model | text.Model


def _family(config: Any) -> Any:
    """Of a config, or of the mapping that is to become one. The first family there was may be left out."""
    return config.get("family", "llava") if isinstance(config, dict) else getattr(config, "family", None)


Config = Annotated[Annotated[llava.Config, Tag("llava")] | Annotated[text.Config, Tag("text")], Discriminator(_family)]
CONFIG: TypeAdapter[Config] = TypeAdapter(Config)


def family_of(c: Config) -> Family:
    return FAMILIES[c.family]


def facts(c: Config) -> Facts:
    """What the model of this config states about itself."""
    return family_of(c).facts(c)


def build(c: Config, device: torch.device | str, dtype: torch.dtype = torch.float32, compute_dtype: torch.dtype = torch.float32) -> Model:
    """A model on `device` whose weights, of `dtype`, are not yet filled: no time is spent on numbers that are overwritten."""
    with torch.device("meta"):
        model = family_of(c).Model(c, compute_dtype).to(dtype)
    model.to_empty(device=device)
    model.tie()  # to_empty made two tensors of a tied one
    return model
