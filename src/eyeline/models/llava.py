"""LLaVA: a vision tower, a projector and a language model (Liu et al. 2023), with pixel shuffle as InternVL and LFM2-VL have it.

The tower's features, r×r of them joined where the projector shuffles, become tokens that take the places of the image
placeholders in the embedded text.

Dims: T tokens  D width  P patches  M visual tokens (rows of the merged tower output may be used by several)  L wanted rows
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from pydantic import model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from eyeline.core.batch import Batch
from eyeline.core.plan import Part, Spec
from eyeline.core.settings import Positive, Settings
from eyeline.models import qwen3, siglip2
from eyeline.models.decoder import Cache, Output
from eyeline.models.flops import Tally, any_trainable
from eyeline.models.languages import LANGUAGES, LanguageConfig
from eyeline.models.layers import NEVER, Deliver, LayerNorm, Linear, Recompute, normal_, weights_of


class ProjectorConfig(Settings):
    kind: Literal["mlp", "linear"] = "mlp"  # two linear layers with a GELU between, or one
    hidden_size: Positive | None = None  # hidden width of the MLP; None: the language model's
    shuffle: Positive = 1  # r: r×r patches are joined to one visual token
    norm: bool = False  # a LayerNorm first, as InternVL has


class Config(Settings):
    family: Literal["llava"] = "llava"
    vision: siglip2.Config
    projector: ProjectorConfig = ProjectorConfig()
    language: LanguageConfig
    feature_layer: int = -1  # which hidden state of the tower: 0 the embedded patches, -1 after the last block, -2 before it
    feature_norm: bool = True  # apply the tower's final norm: only after its last block

    @model_validator(mode="after")
    def _fits(self) -> "Config":
        r, side, layers = self.projector.shuffle, self.vision.position_grid, self.vision.layers
        if self.vision.patches is not None and self.vision.patches < r**2:
            raise ValueError(f"projector.shuffle={r} joins {r}×{r} patches, and vision.patches={self.vision.patches} allows fewer")
        if self.vision.patches is None and side % r:
            valid = [n for n in range(1, side + 1) if side % n == 0]
            raise ValueError(
                f"projector.shuffle={r} must divide the {side}×{side} patches of an image "
                f"({self.vision.image_size} pixels per side, patches of {self.vision.patch}); valid: {valid}"
            )
        if not -layers - 1 <= self.feature_layer <= layers:
            raise ValueError(f"feature_layer={self.feature_layer} is not among the {layers + 1} hidden states of {layers} layers")
        if self.feature_norm and self.depth != layers:
            raise ValueError(
                f"feature_norm belongs after the last block, and feature_layer={self.feature_layer} takes features before it; "
                "set feature_norm: false"
            )
        if self.projector.kind == "linear" and self.projector.hidden_size is not None:
            raise ValueError("projector.hidden_size is the hidden width of an mlp, and projector.kind is linear; remove it")
        if isinstance(self.language, qwen3.Config) and self.language.mrope_section is not None:
            raise ValueError("language.mrope_section is for positions with rows and columns, which a LLaVA does not have; remove it")
        return self

    @property
    def depth(self) -> int:
        """Blocks of the tower that run."""
        return range(self.vision.layers + 1)[self.feature_layer]

    @property
    def hidden(self) -> int:
        """Hidden width of an MLP projector."""
        return self.projector.hidden_size or self.language.hidden_size


class Projector(nn.Module):
    """Patch features -> visual tokens of the language model's width."""

    def __init__(self, c: Config):
        super().__init__()
        self.joined = c.projector.shuffle**2
        width = c.vision.hidden_size * self.joined
        self.norm = LayerNorm(width, 1e-5) if c.projector.norm else None
        if c.projector.kind == "mlp":
            self.up = Linear(width, c.hidden, target="up_proj")
            self.down = Linear(c.hidden, c.language.hidden_size, target="down_proj")
        else:
            self.out = Linear(width, c.language.hidden_size, target="out_proj")
        self.deliver = Deliver()

    def forward(self, features_PD: Tensor, draws_P2: Tensor | None = None) -> Tensor:
        # patches are stored in merge order, so pixel shuffle is this reshape: the r² patches of a cell follow one another
        x_MD = features_PD.reshape(-1, self.joined * features_PD.shape[-1])
        x_MD = x_MD if self.norm is None else self.norm(x_MD)
        draws_M2 = None if draws_P2 is None else draws_P2[:: self.joined]
        x_MD = self.down(F.gelu(self.up(x_MD, draws_M2)), draws_M2) if hasattr(self, "up") else self.out(x_MD, draws_M2)
        return self.deliver(x_MD)

    def count(self, tally: Tally, reached: bool) -> bool:
        reached |= any_trainable(self.norm)
        if hasattr(self, "up"):
            return self.down.count(tally, self.up.count(tally, reached, "visual"), "visual")
        return self.out.count(tally, reached, "visual")

    @torch.no_grad()
    def initialise(self, rng: torch.Generator) -> None:
        for name, parameter in weights_of(self):
            if name.endswith("bias"):
                parameter.zero_()
            elif name.startswith("norm."):
                parameter.fill_(1.0)
            else:
                normal_(parameter, parameter.shape[1] ** -0.5, rng)


class Model(nn.Module):
    def __init__(self, c: Config, compute_dtype: torch.dtype = torch.float32):
        super().__init__()
        self.vision = siglip2.Model(c.vision, compute_dtype, c.feature_layer, c.feature_norm)
        self.projector = Projector(c)
        self.language = LANGUAGES[c.language.family].Model(c.language, compute_dtype)

    def forward(self, batch: Batch, cache: list[Cache] | None = None) -> Output:
        """The summed loss over `labels_L`, or float32 logits_LV of `rows_L` where the batch has no labels; and the expert load.

        With a `cache` (see `new_cache`) the batch is the prompts, or one new token per row.
        """
        x_TD, _ = self.enter(batch)
        return self.language(x_TD, batch, cache)

    def enter(self, batch: Batch) -> tuple[Tensor, Sequence[Tensor]]:
        """The input of the first block: tokens and images, embedded. No DeepStack."""
        x_TD = self.language.enter(batch.tokens_T)
        if batch.has_images:
            images = (batch.patches_PC, batch.places_P2, batch.grids_N2, batch.cu_N1, batch.longest_image)
            with torch.set_grad_enabled(batch.image_gradients and torch.is_grad_enabled()):
                features_PD = self.vision(*images, batch.draws_P2)
                visual_MD = self.projector(features_PD, batch.draws_P2)[batch.sources_M]
            x_TD = x_TD.index_copy(0, batch.visual_M, visual_MD)
        return x_TD, ()

    def new_cache(self, rows: int, room: int) -> list[Cache]:
        """Empty caches for `rows` sequences of at most `room` tokens, one per layer of the language model."""
        return self.language.new_cache(rows, room)

    def count(self, tally: Tally, images: bool) -> None:
        """The arithmetic of a batch with or without images: see `models/flops.py`."""
        visual = False
        if images:
            with tally.within("vision"):
                visual = self.vision.count(tally)
            with tally.within("projector"):
                visual = self.projector.count(tally, visual)
        self.language.count(tally, visual)

    def recompute(self, how: Mapping[Part, Recompute]) -> None:
        """Make activations of some blocks of these parts again in the backward pass instead of keeping them; of no others."""
        self.vision.recompute, self.language.recompute = how.get("vision", NEVER), how.get("language", NEVER)


def spec(c: Config) -> Spec:
    unused = [f"vision.blocks.{i}" for i in range(c.depth, c.vision.layers)]
    return Spec(
        image=c.vision.rule(c.projector.shuffle),
        vocab_size=c.language.vocab_size,
        max_positions=c.language.max_positions,
        language=LANGUAGES[c.language.family].sizes(c.language),
        vision=siglip2.sizes(c.vision),
        unused=(*unused, *(() if c.feature_norm else ("vision.norm",))),
    )
