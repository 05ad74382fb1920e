"""The vision tower of Qwen3-VL and Qwen3.5, and the mergers behind it (Qwen team 2025; `Qwen3VLVisionModel`, `Qwen3_5VisionModel`).

A vision transformer at native resolution. Patches, each of `temporal_patch` frames, are embedded by a linear layer; a learned square
table of positions, stretched to each image's grid, is added; pre-norm blocks with two-dimensional rotary positions let the
patches of one image, or of one slice of a film, look at each other. There is no final norm: mergers have their own.

A merger turns merge² neighbouring patches into one visual token. The main one takes the last block's output. DeepStack's, one for
each of `deepstack_layers`, take the output of earlier blocks, and the language model adds theirs after its own first blocks.

Dims: P patches of all images end to end  C numbers of a patch  D width  N images  H heads  K head dim  F feed-forward  M visual tokens
"""

import math
from collections.abc import Iterable
from typing import Any, cast

import torch
from pydantic import model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from eyeline.core.errors import Refused
from eyeline.core.facts import KeyRule, Split
from eyeline.core.image_rule import Area, Film, ImageRule
from eyeline.core.settings import NotNegative, Positive, PositiveFloat, Settings
from eyeline.kernels.rope import rotate
from eyeline.models.flops import Tally, learns
from eyeline.models.hf_config import LAYERS, Json, expect, integer, made, mapping, number, refuse_quantised
from eyeline.models.layers import Attend, LayerNorm, Linear, normal_, run_block
from eyeline.models.siglip2 import FILTERS, HALF, normalised, sine_positions

EPS = 1e-6  # of every norm, in the tower and in the mergers: the reference has no setting for it
THETA = 10_000.0  # base of the rotary frequencies: every checkpoint's


class Config(Settings):
    patch: Positive = 16  # pixels a side
    temporal_patch: Positive = 2  # that a patch spans; a still is repeated
    merge: Positive = 2  # r: r×r patches become one visual token
    hidden_size: Positive
    layers: Positive
    heads: Positive
    intermediate_size: Positive
    position_grid: Positive = 48  # of the square table of positions
    deepstack_layers: tuple[NotNegative, ...] = ()  # blocks whose output DeepStack's mergers take, counted from 0
    mean: tuple[float, float, float] = HALF
    std: tuple[PositiveFloat, PositiveFloat, PositiveFloat] = HALF
    min_pixels: Positive = 256**2  # pixels of a still after resizing
    max_pixels: Positive = 4096**2
    video_min_pixels: Positive = 64**2  # pixels of all frames of a film together
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
        """What preprocessing must do for this tower."""
        return ImageRule(
            patch=self.patch,
            merge=self.merge,
            mean=self.mean,
            std=self.std,
            resample="bicubic",
            resize=Area(self.min_pixels, self.max_pixels),
            frames=self.temporal_patch,
            positions="grid",
            film=Film(self.video_min_pixels, self.video_max_pixels),
        )


class Attention(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.K = c.K
        self.q, self.k, self.v, self.o = (Linear(c.hidden_size, c.hidden_size) for _ in range(4))
        self.attend = Attend(causal=False)

    def forward(self, x_PD: Tensor, cos_PK: Tensor, sin_PK: Tensor, cu_N1: Tensor, longest: int) -> Tensor:
        # -1, not the number of heads: under tensor parallelism a rank holds some of them
        q_PHK, k_PHK, v_PHK = (project(x_PD).unflatten(-1, (-1, self.K)) for project in (self.q, self.k, self.v))
        q_PHK, k_PHK = rotate(q_PHK, cos_PK, sin_PK), rotate(k_PHK, cos_PK, sin_PK)
        return self.o(self.attend(q_PHK, k_PHK, v_PHK, cu_N1, longest).flatten(1))

    def count(self, tally: Tally, reached: bool) -> bool:
        q, k, v = (project.count(tally, reached, "patch") for project in (self.q, self.k, self.v))
        mixed = tally.attention("patch_pair", self.q.out_features // self.K, self.K, self.K, q, k, v)
        return self.o.count(tally, mixed, "patch")


class MLP(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.up, self.down = Linear(c.hidden_size, c.intermediate_size), Linear(c.intermediate_size, c.hidden_size)

    def forward(self, x_PD: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x_PD), approximate="tanh"))

    def count(self, tally: Tally, reached: bool) -> bool:
        return self.down.count(tally, self.up.count(tally, reached, "patch"), "patch")


class Block(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.norm1, self.norm2 = LayerNorm(c.hidden_size, EPS), LayerNorm(c.hidden_size, EPS)
        self.attn, self.mlp = Attention(c), MLP(c)

    def forward(self, x_PD: Tensor, cos_PK: Tensor, sin_PK: Tensor, cu_N1: Tensor, longest: int) -> Tensor:
        x_PD = x_PD + self.attn(self.norm1(x_PD), cos_PK, sin_PK, cu_N1, longest)
        return x_PD + self.mlp(self.norm2(x_PD))

    def count(self, tally: Tally, reached: bool) -> bool:
        reached |= self.attn.count(tally, reached or learns(self.norm1))
        return self.mlp.count(tally, reached or learns(self.norm2)) or reached


class Model(nn.Module):
    """The tower. No images, zero patches, give zero features, and zeros as the gradient of every weight: so a rank without pictures
    may call it for the sake of the others."""

    def __init__(self, c: Config, compute_dtype: torch.dtype = torch.float32):
        super().__init__()
        self.K, self.side = c.K, c.position_grid
        self.mean, self.std, self.deep = c.mean, c.std, c.deepstack_layers
        self.compute_dtype = compute_dtype
        self.recompute = False
        self.embed = Linear(3 * c.temporal_patch * c.patch**2, c.hidden_size)
        self.positions = nn.Embedding(c.position_grid**2, c.hidden_size)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.layers))

    def forward(self, patches_PC: Tensor, places_P2: Tensor, grids_N2: Tensor, cu_N1: Tensor, longest: int) -> list[Tensor]:
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
            x_PD = run_block(block, self.recompute, x_PD, cos_PK, sin_PK, cu_N1, longest)
            if i in self.deep:
                deep.append(x_PD)
        return [x_PD, *deep]

    def count(self, tally: Tally) -> list[bool]:
        reached = self.embed.count(tally, False, "patch") or learns(self.positions)
        deep = []
        for i, block in enumerate(self.blocks):
            reached = tally.block(block, self.recompute, reached)
            if i in self.deep:
                deep.append(reached)
        return [reached, *deep]

    @torch.no_grad()
    def initialise(self, rng: torch.Generator) -> None:
        """From scratch, as SigLIP 2: each residual branch starts at zero, positions at half the sine and cosine table."""
        for name, parameter in self.named_parameters():
            leaf = name.rsplit(".", 1)[-1]
            if parameter is self.positions.weight:
                parameter.copy_(0.5 * sine_positions(self.side, parameter.shape[1]))
            elif leaf == "bias" or name.endswith(("attn.o.weight", "mlp.down.weight")):
                parameter.zero_()
            elif "norm" in name:
                parameter.fill_(1.0)
            else:
                normal_(parameter, parameter.shape[1] ** -0.5, rng)


def between_corners(places_P2: Tensor, grids_N2: Tensor, cu_N1: Tensor, side: int) -> list[tuple[Tensor, Tensor]]:
    """The four rows of a square table [side²] between which each patch lies when the table is stretched over its image, corner on
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
        self.norm = LayerNorm(self.width if joined else c.hidden_size, EPS)
        self.up, self.down = Linear(self.width, self.width), Linear(self.width, out)

    def forward(self, x_PD: Tensor) -> Tensor:
        # patches lie in merge order: those of one token follow one another
        x_MD = self.norm(x_PD.reshape(-1, self.width)) if self.joined else self.norm(x_PD).reshape(-1, self.width)
        return self.down(F.gelu(self.up(x_MD)))

    def count(self, tally: Tally, reached: bool) -> bool:
        return self.down.count(tally, self.up.count(tally, reached or learns(self.norm), "visual"), "visual")


class Projector(nn.Module):
    """All mergers: visual tokens for the embedded text, and for each of `deepstack_layers` those that DeepStack adds later."""

    def __init__(self, c: Config, out: int):
        super().__init__()
        self.main = Merger(c, out, joined=False)
        self.deep = nn.ModuleList(Merger(c, out, joined=True) for _ in c.deepstack_layers)

    def forward(self, features: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """What the tower gave -> tokens_MD, and one more of that shape a DeepStack merger."""
        last_PD, *deep = features
        return self.main(last_PD), [merger(x_PD) for merger, x_PD in zip(self.deep, deep, strict=True)]

    def count(self, tally: Tally, reached: list[bool]) -> tuple[bool, list[bool]]:
        mergers = cast(Iterable[Merger], self.deep)  # a ModuleList forgets what it holds
        return self.main.count(tally, reached[0]), [merger.count(tally, r) for merger, r in zip(mergers, reached[1:], strict=True)]

    @torch.no_grad()
    def initialise(self, rng: torch.Generator) -> None:
        """From scratch. What DeepStack adds starts at zero: at first the language model sees the main merger's tokens alone."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias") or (name.startswith("deep.") and name.endswith("down.weight")):
                parameter.zero_()
            elif "norm" in name:
                parameter.fill_(1.0)
            else:
                normal_(parameter, parameter.shape[1] ** -0.5, rng)


BLOCKS = "blocks.*"
LINEARS = {
    **{name: f"blocks.*.attn.{name}" for name in ("q", "k", "v", "o")},
    **{name: f"blocks.*.mlp.{name}" for name in ("up", "down")},
}
SPLITS: dict[str, Split] = {LINEARS[name]: "split_out" for name in ("q", "k", "v", "up")}
SPLITS |= {LINEARS[name]: "split_in" for name in ("o", "down")}
SEAMS = ("blocks.*.attn.attend",)


def projector_linears(c: Config) -> dict[str, str]:
    deep = {"deep_up": "deep.*.up", "deep_down": "deep.*.down"} if c.deepstack_layers else {}
    return {"up": "main.up", "down": "main.down", **deep}


# ---- Hugging Face's names


def keys(c: Config) -> tuple[KeyRule, ...]:
    """The tower's tensors, and their names in the `visual` module of Qwen3-VL's and Qwen3.5's classes."""

    def as_convolution(weight_DC: Tensor) -> Tensor:
        return weight_DC.unflatten(1, (3, c.temporal_patch, c.patch, c.patch))

    norms = [(f"blocks.{{i}}.{norm}", f"blocks.{{i}}.{norm}") for norm in ("norm1", "norm2")]
    linears = [("attn.o", "attn.proj"), ("mlp.up", "mlp.linear_fc1"), ("mlp.down", "mlp.linear_fc2")]
    same = [*norms, *((f"blocks.{{i}}.{ours}", f"blocks.{{i}}.{theirs}") for ours, theirs in linears)]
    return (
        KeyRule("embed.weight", "patch_embed.proj.weight", lambda weight_D3fpp: weight_D3fpp.flatten(1), as_convolution),
        KeyRule("embed.bias", "patch_embed.proj.bias"),
        KeyRule("positions.weight", "pos_embed.weight"),
        *(KeyRule(f"{ours}.{leaf}", f"{theirs}.{leaf}") for ours, theirs in same for leaf in ("weight", "bias")),
        *(
            KeyRule(tuple(f"blocks.{{i}}.attn.{x}.{leaf}" for x in "qkv"), f"blocks.{{i}}.attn.qkv.{leaf}", _in_three, _joined)
            for leaf in ("weight", "bias")
        ),
    )


def _in_three(qkv: Tensor) -> tuple[Tensor, ...]:
    return qkv.chunk(3)


def _joined(*qkv: Tensor) -> Tensor:
    return torch.cat(qkv)


def projector_keys(c: Config) -> tuple[KeyRule, ...]:
    """The mergers' tensors, and their names in the same module."""
    mergers = [("main", "merger"), *([("deep.{i}", "deepstack_merger_list.{i}")] if c.deepstack_layers else [])]
    layers = [("norm", "norm"), ("up", "linear_fc1"), ("down", "linear_fc2")]
    return tuple(
        KeyRule(f"{ours}.{mine}.{leaf}", f"{theirs}.{its}.{leaf}")
        for ours, theirs in mergers
        for mine, its in layers
        for leaf in ("weight", "bias")
    )


# ---- Hugging Face's settings

FIXED = {"hidden_act": "gelu_pytorch_tanh", "in_channels": 3}


def to_hf(c: Config, out: int) -> dict[str, Any]:
    """`vision_config` of config.json, but for its model_type; `out` is the width of the language model."""
    return {
        **FIXED,
        "patch_size": c.patch,
        "temporal_patch_size": c.temporal_patch,
        "spatial_merge_size": c.merge,
        "hidden_size": c.hidden_size,
        "depth": c.layers,
        "num_heads": c.heads,
        "intermediate_size": c.intermediate_size,
        "num_position_embeddings": c.position_grid**2,
        "out_hidden_size": out,
        "deepstack_visual_indexes": list(c.deepstack_layers),
    }


def to_preprocessor(c: Config) -> dict[str, Any]:
    """preprocessor_config.json of the `Qwen2VLImageProcessor` that prepares stills as the model was trained."""
    older = {"min_pixels": c.min_pixels, "max_pixels": c.max_pixels}  # transformers 4.57 without torchvision does not read `size`
    return {"image_processor_type": "Qwen2VLImageProcessor", **_to_processor(c, c.min_pixels, c.max_pixels), **older}


def to_video_preprocessor(c: Config) -> dict[str, Any]:
    """video_preprocessor_config.json of the `Qwen3VLVideoProcessor` that prepares films alike."""
    sampling = {"do_sample_frames": True, "fps": 2, "min_frames": 4, "max_frames": 768, "cap_pixels_per_frame": False}
    return {"video_processor_type": "Qwen3VLVideoProcessor", **_to_processor(c, c.video_min_pixels, c.video_max_pixels), **sampling}


def _to_processor(c: Config, least: int, most: int) -> dict[str, Any]:
    return {
        "processor_class": "Qwen3VLProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"shortest_edge": least, "longest_edge": most},  # misnomers: pixels in all
        "resample": FILTERS.index("bicubic"),
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(c.mean),
        "image_std": list(c.std),
        "patch_size": c.patch,
        "temporal_patch_size": c.temporal_patch,
        "merge_size": c.merge,
    }


def from_hf(json: Json, preprocessor: Json | None, video: Json | None, where: str, deep: tuple[int, ...]) -> Config:
    """The tower of a `vision_config`, preprocessor_config.json and video_preprocessor_config.json. Keys that a file leaves out have
    the defaults of transformers' classes, `deep` among them; a file that is not there has those of Qwen3-VL's. Raises Refused."""
    refuse_quantised(where, json)
    expect(where, json, FIXED)
    expect(f"rope_parameters in {where}", mapping(where, json, "rope_parameters"), {"rope_type": "axial", "rope_theta": THETA})
    positions = integer(where, json, "num_position_embeddings", 2304)
    side = math.isqrt(positions)
    if side**2 != positions:
        raise Refused(f"{where} has num_position_embeddings={positions}; wanted a square number, for a square table. Is the file damaged?")
    tower = {
        "patch": integer(where, json, "patch_size", 16),
        "temporal_patch": integer(where, json, "temporal_patch_size", 2),
        "merge": integer(where, json, "spatial_merge_size", 2),
        "hidden_size": integer(where, json, "hidden_size", 1152),
        "layers": integer(where, json, "depth", 27, LAYERS),
        "heads": integer(where, json, "num_heads", 16),
        "intermediate_size": integer(where, json, "intermediate_size", 4304),
        "position_grid": side,
        "deepstack_layers": json.get("deepstack_visual_indexes", deep),
    }
    stills, films = {}, {}
    if preprocessor is not None:
        stills = _from_processor("preprocessor_config.json", preprocessor, tower, ("min_pixels", "max_pixels"), (56**2, 28**2 * 1280), CLIP)
    if video is not None:
        name = "video_preprocessor_config.json"
        films = _from_processor(name, video, tower, ("video_min_pixels", "video_max_pixels"), (128 * 32**2, 768 * 32**2), (HALF, HALF))
        for key in ("mean", "std"):
            if stills and films[key] != stills[key]:
                raise Refused(f"{name} has image_{key}={films[key]}, and stills have {stills[key]}; Eyeline prepares both alike.")
    return made(where, Config, {**tower, **films, **stills})


CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))  # what the image processor has by default


def _limits(where: str, json: Json, names: tuple[str, str], limits: tuple[int, int]) -> dict[str, int]:
    """The pixels that an image, or a film, has at least and at most, under these names: `size` has them as shortest_edge and
    longest_edge, older files as min_pixels and max_pixels, in `size` or beside it. Raises Refused for any other key of `size`."""
    size = mapping(where, json, "size")
    keys = (("shortest_edge", "min_pixels"), ("longest_edge", "max_pixels"))
    unknown = sorted(size.keys() - {*keys[0], *keys[1]})
    if unknown:
        raise Refused(
            f"{where} has size={dict(size)!r}, and Eyeline takes shortest_edge and longest_edge there, in pixels of the whole image: not "
            f"{', '.join(map(str, unknown))}. Use the model's own file."
        )
    found: dict[str, int] = {}
    for name, (key, older), default in zip(names, keys, limits, strict=True):
        given = [value for value in (size.get(older), json.get(older)) if value is not None]
        if names[0] == "video_min_pixels" and json.get(older) not in (None, size.get(key, default)):  # the class for films does not read it
            raise Refused(f"{where} has {older}={json[older]!r}, which transformers does not read there. Write it into size, as {key}.")
        if len(given) > 1 and given[0] != given[1]:
            raise Refused(f"{where} has {older} twice, in size and beside it, with different values. Remove one.")
        found[name] = integer(where, {key: given[0] if given else size.get(key, default)}, key, default)
    return found


def _from_processor(
    where: str, json: Json, tower: Json, names: tuple[str, str], limits: tuple[int, int], colours: tuple[tuple[float, ...], ...]
) -> dict[str, Any]:
    """Limits under these names, mean and std of stills or films; `limits` and `colours` are what the class has by default."""
    same = {"patch_size": tower["patch"], "temporal_patch_size": tower["temporal_patch"], "merge_size": tower["merge"]}
    always = dict.fromkeys(("do_resize", "do_rescale", "do_normalize"), True)
    expect(where, json, {**always, **same, "resample": FILTERS.index("bicubic")})
    if json.get("cap_pixels_per_frame"):
        raise Refused(f"{where} has cap_pixels_per_frame=true; Eyeline limits the pixels of a whole film only. Set it to false.")
    if abs(number(where, json, "rescale_factor", 1 / 255) * 255 - 1) > 1e-6:
        raise Refused(f"{where} has rescale_factor={json['rescale_factor']!r}; wanted 1/255. Use the model's own file.")
    found: dict[str, Any] = _limits(where, json, names, limits)
    for key, default in zip(("mean", "std"), colours, strict=True):
        got = json.get(f"image_{key}", default)
        if not isinstance(got, list | tuple) or len(got) != 3 or not all(isinstance(x, int | float) for x in got):
            raise Refused(f"{where} has image_{key}={got!r}; wanted three numbers. Use the model's own file.")
        found[key] = tuple(map(float, got))
    return found
