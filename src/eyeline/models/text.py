"""A language model alone: any of `models/languages.py`, as a family that is trained and answers without images."""

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from eyeline.core.batch import Batch
from eyeline.core.plan import Part, Spec
from eyeline.core.settings import Settings
from eyeline.models.decoder import Cache, Output
from eyeline.models.flops import Tally
from eyeline.models.languages import LANGUAGES, LanguageConfig
from eyeline.models.layers import NEVER, Recompute


class Config(Settings):
    family: Literal["text"] = "text"
    language: LanguageConfig


class Model(nn.Module):
    def __init__(self, c: Config, compute_dtype: torch.dtype = torch.float32):
        super().__init__()
        self.language = LANGUAGES[c.language.family].Model(c.language, compute_dtype)

    def forward(self, batch: Batch, cache: list[Cache] | None = None) -> Output:
        """The summed loss over `labels_L`, or float32 logits_LV of `rows_L` where the batch has no labels; and the expert load."""
        x_TD, _ = self.enter(batch)
        return self.language(x_TD, batch, cache)

    def enter(self, batch: Batch) -> tuple[Tensor, Sequence[Tensor]]:
        """The input of the first block: tokens, embedded."""
        return self.language.enter(batch.tokens_T), ()

    def new_cache(self, rows: int, room: int) -> list[Cache]:
        return self.language.new_cache(rows, room)

    def count(self, tally: Tally, images: bool) -> None:
        """The arithmetic of a batch: see `models/flops.py`."""
        assert not images, "a model without a tower"
        self.language.count(tally, visual=False)

    def recompute(self, how: Mapping[Part, Recompute]) -> None:
        self.language.recompute = how.get("language", NEVER)


def spec(c: Config) -> Spec:
    return Spec(None, c.language.vocab_size, c.language.max_positions, LANGUAGES[c.language.family].sizes(c.language), None)
