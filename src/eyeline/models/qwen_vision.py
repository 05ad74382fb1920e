"""The vision tower of Qwen3-VL and Qwen3.5, and the mergers behind it (Qwen team 2025; `Qwen3VLVisionModel`, `Qwen3_5VisionModel`).

A vision transformer at native resolution. Patches, each of `temporal_patch` frames, are embedded by a linear layer; a learned square
table of positions, interpolated to each image's grid, is added; pre-norm blocks with two-dimensional rotary positions let the
patches of one image, or of one slice of a video, attend to each other. There is no final norm: mergers have their own.

A merger turns merge² neighbouring patches into one visual token. The main one takes the last block's output. DeepStack's, one for
each of `deepstack_layers`, take the output of earlier blocks, and the language model adds theirs after its own first blocks.

Dims: P patches of all images end to end  C numbers of a patch  D width  N images  H heads  K head dim  F feed-forward  M visual tokens
"""

from collections.abc import Iterable
from typing import cast

import torch
from pydantic import model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from eyeline.core.image_rule import Area, ImageRule, VideoLimits
from eyeline.core.plan import VisionSizes
from eyeline.core.settings import NotNegative, Positive, PositiveFloat, Settings
from eyeline.core.shards import put
from eyeline.kernels.rope import rotate
from eyeline.models.flops import Tally, any_trainable
from eyeline.models.layers import NEVER, Attend, Deliver, GeluMLP, LayerNorm, Linear, Positions, normal_, run_block, together, weights_of
from eyeline.models.siglip2 import HALF, normalised, sine_positions

EPS = 1e-6  # of every norm, in the tower and in the mergers: the reference has no setting for it
THETA = 10_000.0  # base of the rotary frequencies: every checkpoint's


class Config(Settings):
    patch: Positive = 16  # pixels per side
    temporal_patch: Positive = 2  # frames that a patch spans; an image is repeated
    merge: Positive = 2  # r: r×r patches become one visual token
    hidden_size: Positive
    layers: Positive
    heads: Positive
    intermediate_size: Positive
    position_grid: Positive = 48  # side of the square table of positions
    deepstack_layers: tuple[NotNegative, ...] = ()  # blocks whose output DeepStack's mergers take, counted from 0
    mean: tuple[float, float, float] = HALF
    std: tuple[PositiveFloat, PositiveFloat, PositiveFloat] = HALF
    min_pixels: Positive = 256**2  # pixels of an image after resizing
    max_pixels: Positive = 4096**2
    video_min_pixels: Positive = 64**2  # pixels of all frames of a video together
    video_max_pixels: Positive = 24 * 1024**2

    @model_validator(mode="after")
    def _fits(self) -> "Config":
        if self.hidden_size % (4 * self.heads):
            raise ValueError(
                f"hidden_size={self.hidden_size} must be heads={self.heads} times a multiple of 4: rows and columns each turn pairs"
            )
        if list(self.deepstack_layers) != sorted(set(self.deepstack_layers)) or any(i >= self.layers for i in self.deepstack_layers):
            raise ValueError(
                f"deepstack_layers={list(self.deepstack_layers)} must be ascending numbers of blocks, below layers={self.layers}"
            )
        return self

    @model_validator(mode="after")
    def _limits(self) -> "Config":
        for least, most in (("min_pixels", "max_pixels"), ("video_min_pixels", "video_max_pixels")):
            if getattr(self, least) > getattr(self, most):
                raise ValueError(f"{least}={getattr(self, least)} are more than {most}={getattr(self, most)}")
        return self

    @property
    def K(self) -> int:
        return self.hidden_size // self.heads

    def rule(self) -> ImageRule:
        """The image rule of this tower."""
        return ImageRule(
            patch=self.patch,
            merge=self.merge,
            mean=self.mean,
            std=self.std,
            resample="bicubic",
            resize=Area(self.min_pixels, self.max_pixels),
            frames=self.temporal_patch,
            positions="grid",
            video=VideoLimits(self.video_min_pixels, self.video_max_pixels),
        )


class Attention(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.K = c.K
        self.q, self.k, self.v, self.o = (Linear(c.hidden_size, c.hidden_size, target=f"{name}_proj") for name in "qkvo")
        self.attend = Attend(causal=False)

    def forward(self, x_PD: Tensor, cos_PK: Tensor, sin_PK: Tensor, cu_N1: Tensor, longest: int, draws_P2: Tensor | None = None) -> Tensor:
        q_PHK, k_PHK, v_PHK = (x.unflatten(-1, (-1, self.K)) for x in together((self.q, self.k, self.v), x_PD, draws_P2))
        q_PHK, k_PHK = rotate(q_PHK, cos_PK, sin_PK), rotate(k_PHK, cos_PK, sin_PK)
        return self.o(self.attend(q_PHK, k_PHK, v_PHK, cu_N1, longest).flatten(1), draws_P2)

    def count(self, tally: Tally, reached: bool) -> bool:
        q, k, v = (project.count(tally, reached, "patch") for project in (self.q, self.k, self.v))
        mixed = tally.attention("patch_pair", self.q.out_features // self.K, self.K, self.K, q, k, v)
        return self.o.count(tally, mixed, "patch")


class Block(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.norm1, self.norm2 = LayerNorm(c.hidden_size, EPS), LayerNorm(c.hidden_size, EPS)
        self.attn, self.mlp = Attention(c), GeluMLP(c.hidden_size, c.intermediate_size)

    def forward(self, x_PD: Tensor, cos_PK: Tensor, sin_PK: Tensor, cu_N1: Tensor, longest: int, draws_P2: Tensor | None = None) -> Tensor:
        x_PD = x_PD + self.attn(self.norm1(x_PD), cos_PK, sin_PK, cu_N1, longest, draws_P2)
        return x_PD + self.mlp(self.norm2(x_PD), draws_P2)

    def count(self, tally: Tally, reached: bool) -> bool:
        reached |= self.attn.count(tally, reached or any_trainable(self.norm1))
        return self.mlp.count(tally, reached or any_trainable(self.norm2)) or reached


class Model(nn.Module):
    """The tower. No images, zero patches, give zero features, and zeros as the gradient of every weight: so a rank without images
    may call it for the sake of the others."""

    def __init__(self, c: Config, compute_dtype: torch.dtype = torch.float32):
        super().__init__()
        self.K, self.side = c.K, c.position_grid
        self.mean, self.std, self.deep = c.mean, c.std, c.deepstack_layers
        self.compute_dtype = compute_dtype
        self.recompute = NEVER
        self.embed = Linear(3 * c.temporal_patch * c.patch**2, c.hidden_size)
        self.positions = Positions(c.position_grid**2, c.hidden_size)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.layers))

    def forward(
        self, patches_PC: Tensor, places_P2: Tensor, grids_N2: Tensor, cu_N1: Tensor, longest: int, draws_P2: Tensor | None = None
    ) -> list[Tensor]:
        """uint8 patches of all images, in merge order -> features_PD of the last block, then those of each block in `deepstack_layers`."""
        patches_PC = patches_PC.reshape(-1, self.embed.in_features)  # of no images there are no columns either
        x_PD = self.embed(normalised(patches_PC, self.mean, self.std).to(self.compute_dtype))
        position_PD = torch.zeros_like(x_PD, dtype=torch.float32)
        for corner_P, share_P in between_corners(places_P2, grids_N2, cu_N1, self.side):
            position_PD = position_PD + self.positions(corner_P) * share_P[:, None]
        x_PD = x_PD + position_PD.to(x_PD.dtype)
        cos_PK, sin_PK = axial_tables(places_P2, self.K)
        deep = []
        for i, block in enumerate(self.blocks):
            x_PD = run_block(block, self.recompute.of(i), x_PD, cos_PK, sin_PK, cu_N1, longest, draws_P2)
            if i in self.deep:
                deep.append(x_PD)
        return [x_PD, *deep]

    def count(self, tally: Tally) -> list[bool]:
        reached = self.embed.count(tally, False, "patch") or any_trainable(self.positions)
        deep = []
        for i, block in enumerate(self.blocks):
            reached = tally.block(block, self.recompute.repeats_products(i), reached)
            if i in self.deep:
                deep.append(reached)
        return [reached, *deep]

    @torch.no_grad()
    def initialise(self, rng: torch.Generator) -> None:
        """From scratch, as SigLIP 2: each residual branch starts at zero, positions at half the sine and cosine table."""
        for name, parameter in weights_of(self):
            leaf = name.rsplit(".", 1)[-1]
            if parameter is self.positions.weight:
                put(parameter, 0.5 * sine_positions(self.side, parameter.shape[1]))
            elif leaf == "bias" or name.endswith(("attn.o.weight", "mlp.down.weight")):
                parameter.zero_()
            elif "norm" in name:
                parameter.fill_(1.0)
            else:
                normal_(parameter, parameter.shape[1] ** -0.5, rng)


def between_corners(places_P2: Tensor, grids_N2: Tensor, cu_N1: Tensor, side: int) -> list[tuple[Tensor, Tensor]]:
    """The four rows of a square table [side²] between which each patch is when the table is interpolated over its image, corner on
    corner, and the share of each: four times (corner_P, share_P), int64 and float32. `F.interpolate(align_corners=True)`, bilinear.
    """
    size_P2 = grids_N2.repeat_interleave(cu_N1.diff(), 0, output_size=len(places_P2))
    at_P2 = places_P2.float() * (side - 1) / (size_P2 - 1).clamp(min=1)
    low_P2 = at_P2.floor()
    far_P2 = at_P2 - low_P2  # how far beyond the lower of two rows, and columns
    low_P2 = low_P2.long()
    high_P2 = (low_P2 + 1).clamp(max=side - 1)
    rows, columns = ([(low_P2[:, i], 1 - far_P2[:, i]), (high_P2[:, i], far_P2[:, i])] for i in (0, 1))
    return [(row_P * side + column_P, down_P * right_P) for row_P, down_P in rows for column_P, right_P in columns]


def axial_tables(places_P2: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """cos_PK and sin_PK of two-dimensional rotary positions, float32: of the K/2 pairs of a head the first half turns by the row
    and the second half by the column, with the frequencies THETA^(-4j/K), j < K/4, each."""
    j = torch.arange(0, head_dim // 2, 2, dtype=torch.float32, device=places_P2.device)
    angles_PK2 = (places_P2.float()[:, :, None] * (1.0 / THETA ** (j / (head_dim // 2)))).flatten(1)
    angles_PK = torch.cat((angles_PK2, angles_PK2), -1)
    return angles_PK.cos(), angles_PK.sin()


# ---- mergers: the part that is called the projector


class Merger(nn.Module):
    """merge² neighbouring patches -> one visual token. The main merger norms each patch (`joined` False), DeepStack's norm all
    merge² together."""

    def __init__(self, c: Config, out: int, joined: bool):
        super().__init__()
        self.width, self.joined = c.hidden_size * c.merge**2, joined
        prefix = "deep_" if joined else ""
        self.norm = LayerNorm(self.width if joined else c.hidden_size, EPS)
        self.up = Linear(self.width, self.width, target=f"{prefix}up_proj")
        self.down = Linear(self.width, out, target=f"{prefix}down_proj")

    def forward(self, x_PD: Tensor, draws_M2: Tensor | None) -> Tensor:
        # patches are stored in merge order: those of one token follow one another
        x_MD = self.norm(x_PD.reshape(-1, self.width)) if self.joined else self.norm(x_PD).reshape(-1, self.width)
        return self.down(F.gelu(self.up(x_MD, draws_M2)), draws_M2)

    def count(self, tally: Tally, reached: bool) -> bool:
        return self.down.count(tally, self.up.count(tally, reached or any_trainable(self.norm), "visual"), "visual")


class Projector(nn.Module):
    """All mergers: visual tokens for the embedded text, and for each of `deepstack_layers` those that DeepStack adds later."""

    def __init__(self, c: Config, out: int):
        super().__init__()
        self.patches = c.merge**2  # of a visual token
        self.main = Merger(c, out, joined=False)
        self.deep = nn.ModuleList(Merger(c, out, joined=True) for _ in c.deepstack_layers)
        self.deliver = Deliver()

    def forward(self, features: list[Tensor], draws_P2: Tensor | None = None) -> tuple[Tensor, list[Tensor]]:
        """The tower's features -> tokens_MD, and one more tensor of that shape per DeepStack merger."""
        last_PD, *deep = features
        draws_M2 = None if draws_P2 is None else draws_P2[:: self.patches]
        later = [self.deliver(merger(x_PD, draws_M2)) for merger, x_PD in zip(self.deep, deep, strict=True)]
        return self.deliver(self.main(last_PD, draws_M2)), later

    def count(self, tally: Tally, reached: list[bool]) -> tuple[bool, list[bool]]:
        mergers = cast(Iterable[Merger], self.deep)  # a ModuleList forgets what it holds
        return self.main.count(tally, reached[0]), [merger.count(tally, r) for merger, r in zip(mergers, reached[1:], strict=True)]

    @torch.no_grad()
    def initialise(self, rng: torch.Generator) -> None:
        """From scratch. What DeepStack adds starts at zero: at first the language model sees the main merger's tokens alone."""
        for name, parameter in weights_of(self):
            if name.endswith("bias") or (name.startswith("deep.") and name.endswith("down.weight")):
                parameter.zero_()
            elif "norm" in name:
                parameter.fill_(1.0)
            else:
                normal_(parameter, parameter.shape[1] ** -0.5, rng)


def sizes(c: Config) -> VisionSizes:
    return VisionSizes(c.layers, c.hidden_size, c.heads, len(c.deepstack_layers))
