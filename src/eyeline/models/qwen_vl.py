"""The shared parts of Qwen3-VL and Qwen3.5: the tower of `qwen_vision.py`, its mergers as the projector, and a decoder.

The main merger's tokens take the places of the placeholders in the embedded text; DeepStack's, where there are any, are added
to the same places after the decoder's first blocks. `qwen3_vl.py` and `qwen3_5_vl.py` say which decoder, and how a folder names it.

Dims: T tokens  D width  P patches  M visual tokens  E experts  F feed-forward of an expert
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from eyeline.core.batch import Batch
from eyeline.core.plan import LanguageSizes, Part, Spec
from eyeline.models import qwen_vision
from eyeline.models.decoder import Cache, Decoder, Output
from eyeline.models.flops import Tally
from eyeline.models.layers import NEVER, Recompute


class Model(nn.Module):
    def __init__(self, vision: qwen_vision.Config, language: Decoder, compute_dtype: torch.dtype = torch.float32):
        super().__init__()
        self.vision = qwen_vision.Model(vision, compute_dtype)
        self.projector = qwen_vision.Projector(vision, language.embed.embedding_dim)
        self.language = language

    def forward(self, batch: Batch, cache: list[Cache] | None = None) -> Output:
        """The summed loss over `labels_L`, or float32 logits_LV of `rows_L` where the batch has no labels; and the expert load.

        With a `cache` (see `new_cache`) the batch is the prompts, or one new token per row.
        """
        x_TD, deep = self.enter(batch)
        return self.language(x_TD, batch, cache, deep)

    def enter(self, batch: Batch) -> tuple[Tensor, Sequence[Tensor]]:
        """The input of the first block, tokens and images embedded; and what DeepStack adds after each of the first blocks."""
        x_TD, deep = self.language.enter(batch.tokens_T), []
        if batch.has_images:
            images = (batch.patches_PC, batch.places_P2, batch.grids_N2, batch.cu_N1, batch.longest_image)
            with torch.set_grad_enabled(batch.image_gradients and torch.is_grad_enabled()):
                features = self.vision(*images, batch.draws_P2)
                tokens_MD, deep = self.projector(features, batch.draws_P2)
            x_TD = x_TD.index_copy(0, batch.visual_M, tokens_MD[batch.sources_M])
            deep = [tokens_MD[batch.sources_M] for tokens_MD in deep]
        return x_TD, deep

    def count(self, tally: Tally, images: bool) -> None:
        """The arithmetic of a batch with or without images: see `models/flops.py`."""
        visual, deep = False, []
        if images:
            with tally.within("vision"):
                reached = self.vision.count(tally)
            with tally.within("projector"):
                visual, deep = self.projector.count(tally, reached)
        self.language.count(tally, visual, deep)

    def new_cache(self, rows: int, room: int) -> list[Cache]:
        """Empty caches for `rows` sequences of at most `room` tokens, one per layer of the language model."""
        return self.language.new_cache(rows, room)

    def recompute(self, how: Mapping[Part, Recompute]) -> None:
        """Make activations of some blocks of these parts again in the backward pass instead of keeping them; of no others."""
        self.vision.recompute, self.language.recompute = how.get("vision", NEVER), how.get("language", NEVER)


class Config(Protocol):
    """The settings that the families of this design share."""

    @property
    def vision(self) -> qwen_vision.Config: ...
    @property
    def language(self) -> Any: ...


def spec(c: Config, language: LanguageSizes) -> Spec:
    """What a model of this config states; `language` is what its decoder does."""
    return Spec(c.vision.rule(), c.language.vocab_size, c.language.max_positions, language, qwen_vision.sizes(c.vision))
