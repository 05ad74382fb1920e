"""SigLIP 2 vision tower (Tschannen et al. 2025; the reference's classes are `SiglipVisionModel` and, for NaFlex, `Siglip2VisionModel`).

A vision transformer: patches are embedded by a linear layer, a learned position is added, pre-norm blocks let the patches
of one image attend to each other. No class token. The pooling head of the checkpoints is for contrastive training and dropped.

At fixed resolution every image is one square, or several of them (tiles). In NaFlex mode an image keeps its shape, and the square
table of positions is resized to each one's grid.

Dims: P patches of all images end to end  C numbers of a patch  D width  N images  H heads  K head dim  F feed-forward
      S rows (or columns) of the table of positions
"""

import math
from typing import Protocol

import torch
from pydantic import model_validator
from torch import Tensor, nn

from eyeline.core.image_rule import ImageRule, Patches, Resample, Square, Tiles
from eyeline.core.plan import VisionSizes
from eyeline.core.settings import Positive, PositiveFloat, Settings
from eyeline.core.shards import put
from eyeline.models.flops import Tally, any_trainable
from eyeline.models.layers import NEVER, Attend, GeluMLP, LayerNorm, Linear, Positions, normal_, run_block, together, weights_of

HALF = (0.5, 0.5, 0.5)
MOST_TILES = 5


class Config(Settings):
    image_size: Positive  # pixels per side of the square that the table of positions is for; pixels beyond the last whole patch are ignored
    patch: Positive  # pixels per side
    hidden_size: Positive
    layers: Positive
    heads: Positive
    intermediate_size: Positive
    eps: PositiveFloat = 1e-6
    mean: tuple[float, float, float] = HALF
    std: tuple[PositiveFloat, PositiveFloat, PositiveFloat] = HALF
    resample: Resample = "bicubic"
    patches: Positive | None = None  # NaFlex: an image keeps its shape and fills at most this many; None: it is resized to the square
    tiles: Positive = 1  # squares per image: the whole alone, or with at most tiles - 1 squares cut from it at a larger size

    @model_validator(mode="after")
    def _fits(self) -> "Config":
        if self.hidden_size % self.heads:
            raise ValueError(f"heads={self.heads} must divide hidden_size={self.hidden_size}")
        if self.image_size < self.patch:
            raise ValueError(f"patch={self.patch} is larger than image_size={self.image_size}; wanted at least one patch per side")
        if self.tiles > MOST_TILES:
            raise ValueError(f"tiles={self.tiles} squares per image are more than {MOST_TILES}: the whole image, and a tile per quarter")
        if self.patches is not None and self.tiles > 1:
            raise ValueError(f"patches={self.patches} keeps an image whole, and tiles={self.tiles} cuts it; give one of them")
        return self

    @property
    def position_grid(self) -> int:
        """Patches per side of the square."""
        return self.image_size // self.patch

    def rule(self, merge: int) -> ImageRule:
        """The image rule of this tower when r×r = merge² patches become one token."""
        resize = Square(self.image_size) if self.tiles == 1 else Tiles(self.image_size, self.tiles)
        if self.patches is not None:
            resize = Patches(self.patches)
        return ImageRule(self.patch, merge, self.mean, self.std, self.resample, resize)


class BlockSizes(Protocol):
    """What a block needs to know of its tower."""

    @property
    def hidden_size(self) -> int: ...

    @property
    def heads(self) -> int: ...

    @property
    def intermediate_size(self) -> int: ...

    @property
    def eps(self) -> float: ...


class Attention(nn.Module):
    def __init__(self, c: BlockSizes):
        super().__init__()
        self.K = c.hidden_size // c.heads
        self.q, self.k, self.v, self.o = (Linear(c.hidden_size, c.hidden_size, target=f"{name}_proj") for name in "qkvo")
        self.attend = Attend(causal=False)

    def forward(self, x_PD: Tensor, cu_N1: Tensor, longest: int, draws_P2: Tensor | None = None) -> Tensor:
        q_PHK, k_PHK, v_PHK = (x.unflatten(-1, (-1, self.K)) for x in together((self.q, self.k, self.v), x_PD, draws_P2))
        return self.o(self.attend(q_PHK, k_PHK, v_PHK, cu_N1, longest).flatten(1), draws_P2)

    def count(self, tally: Tally, reached: bool) -> bool:
        q, k, v = (project.count(tally, reached, "patch") for project in (self.q, self.k, self.v))
        mixed = tally.attention("patch_pair", self.q.out_features // self.K, self.K, self.K, q, k, v)
        return self.o.count(tally, mixed, "patch")


class Block(nn.Module):
    def __init__(self, c: BlockSizes):
        super().__init__()
        self.norm1, self.norm2 = LayerNorm(c.hidden_size, c.eps), LayerNorm(c.hidden_size, c.eps)
        self.attn, self.mlp = Attention(c), GeluMLP(c.hidden_size, c.intermediate_size)

    def forward(self, x_PD: Tensor, cu_N1: Tensor, longest: int, draws_P2: Tensor | None = None) -> Tensor:
        x_PD = x_PD + self.attn(self.norm1(x_PD), cu_N1, longest, draws_P2)
        return x_PD + self.mlp(self.norm2(x_PD), draws_P2)

    def count(self, tally: Tally, reached: bool) -> bool:
        reached |= self.attn.count(tally, reached or any_trainable(self.norm1))
        return self.mlp.count(tally, reached or any_trainable(self.norm2)) or reached


class Model(nn.Module):
    """`feature_layer` counts hidden states as the reference does: 0 the embedded patches, -1 after the last block, -2 before
    it. `feature_norm` applies the final norm. Blocks after the feature layer are kept, for exports, and never run."""

    def __init__(self, c: Config, compute_dtype: torch.dtype = torch.float32, feature_layer: int = -1, feature_norm: bool = True):
        super().__init__()
        self.mean, self.std, self.side, self.naflex = c.mean, c.std, c.position_grid, c.patches is not None
        self.compute_dtype = compute_dtype
        self.depth = range(c.layers + 1)[feature_layer]
        self.normed = feature_norm
        self.recompute = NEVER
        self.embed = Linear(3 * c.patch**2, c.hidden_size)
        self.positions = Positions(c.position_grid**2, c.hidden_size)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.norm = LayerNorm(c.hidden_size, c.eps)

    def forward(
        self, patches_PC: Tensor, places_P2: Tensor, grids_N2: Tensor, cu_N1: Tensor, longest: int, draws_P2: Tensor | None = None
    ) -> Tensor:
        """uint8 patches of all images, in any order within an image -> their features_PD in the same order."""
        patches_PC = patches_PC.reshape(-1, self.embed.in_features)  # of no images there are no columns either
        x_PD = self.embed(normalised(patches_PC, self.mean, self.std).to(self.compute_dtype))
        if self.naflex:
            position_PD = resized(self.positions.weight, places_P2, grids_N2, cu_N1, self.side)
        else:
            position_PD = self.positions(places_P2[:, 0] * self.side + places_P2[:, 1])
        x_PD = x_PD + position_PD.to(x_PD.dtype)
        for i, block in enumerate(self.blocks[: self.depth]):
            x_PD = run_block(block, self.recompute.of(i), x_PD, cu_N1, longest, draws_P2)
        return self.norm(x_PD) if self.normed else x_PD

    def count(self, tally: Tally) -> bool:
        reached = self.embed.count(tally, False, "patch") or any_trainable(self.positions)
        if self.naflex:
            tally.product("patch", self.side**2, self.embed.out_features, False, any_trainable(self.positions))
        for i, block in enumerate(self.blocks[: self.depth]):
            reached = tally.block(block, self.recompute.repeats_products(i), reached)
        return reached or (self.normed and any_trainable(self.norm))

    @torch.no_grad()
    def initialise(self, rng: torch.Generator) -> None:
        """From scratch: each residual branch starts at zero, so that a block starts as the identity; positions start at half
        the two-dimensional sine and cosine table, so that neighbours are alike before training."""
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


def normalised(patches_PC: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """`(x/255 - mean)/std` of each channel, float32. The numbers stay on the host: no buffers to cast or to move."""
    pixels_P3c = patches_PC.unflatten(1, (3, -1)).float() / 255
    channels = [(pixels_Pc - m) / s for pixels_Pc, m, s in zip(pixels_P3c.unbind(1), mean, std, strict=True)]
    return torch.stack(channels, 1).flatten(1)


def resized(table_SSD: Tensor, places_P2: Tensor, grids_N2: Tensor, cu_N1: Tensor, side: int) -> Tensor:
    """The square table of positions [side², D] resized to each image's grid, at every patch's place: float32.

    `F.interpolate(mode="bilinear", antialias=True)`: along each axis a triangle around the place, as wide as one row of the table,
    or of the image where that has fewer. As weights of the whole table it is one product, whatever sizes there are.
    """
    grid_P2 = grids_N2.repeat_interleave(cu_N1.diff(), 0, output_size=len(places_P2)).float()
    scale_P2 = side / grid_P2
    centre_P2 = (places_P2.float() + 0.5) * scale_P2 - 0.5
    row_S = torch.arange(side, device=places_P2.device)
    weight_P2S = (1 - (row_S - centre_P2[..., None]).abs() / scale_P2.clamp(min=1)[..., None]).clamp(min=0)
    weight_P2S = weight_P2S / weight_P2S.sum(-1, keepdim=True)
    weight_PSS = weight_P2S[:, 0, :, None] * weight_P2S[:, 1, None, :]
    return weight_PSS.flatten(1) @ table_SSD.float()


def sine_positions(side: int, width: int) -> Tensor:
    """The two-dimensional sine and cosine table [side², width] (MoCo v3; big_vision's ViT baselines): a quarter of the width
    each for the sine and cosine of the column, then of the row, with frequencies from 1 down to 1/10,000."""
    quarter = math.ceil(width / 4)
    omega_q = 10_000.0 ** -(torch.arange(quarter) / max(1, quarter - 1))
    row_P, column_P = (x.flatten().float() for x in torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij"))
    waves = [wave(place_P[:, None] * omega_q) for place_P in (column_P, row_P) for wave in (torch.sin, torch.cos)]
    return torch.cat(waves, 1)[:, :width]


def sizes(c: Config) -> VisionSizes:
    return VisionSizes(c.layers, c.hidden_size, c.heads)
