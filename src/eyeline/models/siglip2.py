"""SigLIP 2 vision tower (Tschannen et al. 2025; the reference's classes are `SiglipVisionModel` and, for NaFlex, `Siglip2VisionModel`).

A vision transformer: patches are embedded by a linear layer, a learned position is added, pre-norm blocks let the patches
of one image look at each other. No class token. The pooling head of the checkpoints is for contrastive training and dropped.

At fixed resolution every picture is one square, or several of them (tiles). In NaFlex mode a picture keeps its shape, and the square
table of positions is resized to each one's grid.

Dims: P patches of all images end to end  C numbers of a patch  D width  N images  H heads  K head dim  F feed-forward
      S rows (or columns) of the table of positions
"""

import math
from typing import Any

import torch
from pydantic import model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from eyeline.core.errors import Refused
from eyeline.core.facts import KeyRule, Split, prefixed
from eyeline.core.image_rule import ImageRule, Patches, Resample, Square, Tiles
from eyeline.core.settings import Positive, PositiveFloat, Settings
from eyeline.models.flops import Tally, learns
from eyeline.models.hf_config import LAYERS, Json, expect, integer, kind, made, number, refuse_limits, refuse_quantised, section
from eyeline.models.layers import Attend, LayerNorm, Linear, normal_, run_block

HALF = (0.5, 0.5, 0.5)
MOST_TILES = 5


class Config(Settings):
    image_size: (
        Positive  # pixels a side of the square that the table of positions is for; what is left over after whole patches is not looked at
    )
    patch: Positive  # pixels a side
    hidden_size: Positive
    layers: Positive
    heads: Positive
    intermediate_size: Positive
    eps: PositiveFloat = 1e-6
    mean: tuple[float, float, float] = HALF
    std: tuple[PositiveFloat, PositiveFloat, PositiveFloat] = HALF
    resample: Resample = "bicubic"
    patches: Positive | None = None  # NaFlex: a picture keeps its shape and fills at most so many; None: it is squeezed into the square
    tiles: Positive = 1  # images of one picture: the square alone, or with at most tiles - 1 squares cut from it at a larger size

    @model_validator(mode="after")
    def _fits(self) -> "Config":
        if self.hidden_size % self.heads:
            raise ValueError(f"heads={self.heads} must divide hidden_size={self.hidden_size}")
        if self.image_size < self.patch:
            raise ValueError(f"patch={self.patch} is larger than image_size={self.image_size}; wanted at least one patch a side")
        if self.tiles > MOST_TILES:
            raise ValueError(f"tiles={self.tiles} images of one picture are more than {MOST_TILES}: the whole, and a tile a quarter")
        if self.patches is not None and self.tiles > 1:
            raise ValueError(f"patches={self.patches} keeps a picture whole, and tiles={self.tiles} cuts it; give one of them")
        return self

    @property
    def position_grid(self) -> int:
        """Patches a side of the square."""
        return self.image_size // self.patch

    def rule(self, merge: int) -> ImageRule:
        """What preprocessing must do for this tower when r×r = merge² patches become one token."""
        resize = Square(self.image_size) if self.tiles == 1 else Tiles(self.image_size, self.tiles)
        if self.patches is not None:
            resize = Patches(self.patches)
        return ImageRule(self.patch, merge, self.mean, self.std, self.resample, resize)


class Attention(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.K = c.hidden_size // c.heads
        self.q, self.k, self.v, self.o = (Linear(c.hidden_size, c.hidden_size) for _ in range(4))
        self.attend = Attend(causal=False)

    def forward(self, x_PD: Tensor, cu_N1: Tensor, longest: int) -> Tensor:
        # -1, not the number of heads: under tensor parallelism a rank holds some of them
        q_PHK, k_PHK, v_PHK = (project(x_PD).unflatten(-1, (-1, self.K)) for project in (self.q, self.k, self.v))
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
        self.norm1, self.norm2 = LayerNorm(c.hidden_size, c.eps), LayerNorm(c.hidden_size, c.eps)
        self.attn, self.mlp = Attention(c), MLP(c)

    def forward(self, x_PD: Tensor, cu_N1: Tensor, longest: int) -> Tensor:
        x_PD = x_PD + self.attn(self.norm1(x_PD), cu_N1, longest)
        return x_PD + self.mlp(self.norm2(x_PD))

    def count(self, tally: Tally, reached: bool) -> bool:
        reached |= self.attn.count(tally, reached or learns(self.norm1))
        return self.mlp.count(tally, reached or learns(self.norm2)) or reached


class Model(nn.Module):
    """`feature_layer` counts hidden states as the reference does: 0 the embedded patches, -1 after the last block, -2 before
    it. `feature_norm` applies the final norm. Blocks after the feature layer are kept, for exports, and never run."""

    def __init__(self, c: Config, compute_dtype: torch.dtype = torch.float32, feature_layer: int = -1, feature_norm: bool = True):
        super().__init__()
        self.mean, self.std, self.side, self.naflex = c.mean, c.std, c.position_grid, c.patches is not None
        self.compute_dtype = compute_dtype
        self.depth = range(c.layers + 1)[feature_layer]
        self.normed = feature_norm
        self.recompute = False
        self.embed = Linear(3 * c.patch**2, c.hidden_size)
        self.positions = nn.Embedding(c.position_grid**2, c.hidden_size)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.norm = LayerNorm(c.hidden_size, c.eps)

    def forward(self, patches_PC: Tensor, places_P2: Tensor, grids_N2: Tensor, cu_N1: Tensor, longest: int) -> Tensor:
        """uint8 patches of all images, in any order within an image -> their features_PD in the same order."""
        patches_PC = patches_PC.reshape(-1, self.embed.in_features)  # of no images there are no columns either
        x_PD = self.embed(normalised(patches_PC, self.mean, self.std).to(self.compute_dtype))
        if self.naflex:
            position_PD = resized(self.positions.weight, places_P2, grids_N2, cu_N1, self.side)
        else:
            position_PD = self.positions(places_P2[:, 0] * self.side + places_P2[:, 1])
        x_PD = x_PD + position_PD.to(x_PD.dtype)
        for block in self.blocks[: self.depth]:
            x_PD = run_block(block, self.recompute, x_PD, cu_N1, longest)
        return self.norm(x_PD) if self.normed else x_PD

    def count(self, tally: Tally) -> bool:
        reached = self.embed.count(tally, False, "patch") or learns(self.positions)
        if self.naflex:
            tally.product("patch", self.side**2, self.embed.out_features, False, learns(self.positions))
        for block in self.blocks[: self.depth]:
            reached = tally.block(block, self.recompute, reached)
        return reached or (self.normed and learns(self.norm))

    @torch.no_grad()
    def initialise(self, rng: torch.Generator) -> None:
        """From scratch: each residual branch starts at zero, so that a block starts as the identity; positions start at half
        the two-dimensional sine and cosine table, so that neighbours are alike before anything is learned."""
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


BLOCKS = "blocks.*"
LINEARS = {
    **{name: f"blocks.*.attn.{name}" for name in ("q", "k", "v", "o")},
    **{name: f"blocks.*.mlp.{name}" for name in ("up", "down")},
}
SPLITS: dict[str, Split] = {LINEARS[name]: "split_out" for name in ("q", "k", "v", "up")}
SPLITS |= {LINEARS[name]: "split_in" for name in ("o", "down")}
SEAMS = ("blocks.*.attn.attend",)


def _flat(weight_D3pp: Tensor) -> Tensor:
    return weight_D3pp.flatten(1)


def _square(weight_DC: Tensor) -> Tensor:
    patch = math.isqrt(weight_DC.shape[1] // 3)
    return weight_DC.unflatten(1, (3, patch, patch))


_THEIRS = {
    "blocks.{i}.norm1": "encoder.layers.{i}.layer_norm1",
    "blocks.{i}.attn.q": "encoder.layers.{i}.self_attn.q_proj",
    "blocks.{i}.attn.k": "encoder.layers.{i}.self_attn.k_proj",
    "blocks.{i}.attn.v": "encoder.layers.{i}.self_attn.v_proj",
    "blocks.{i}.attn.o": "encoder.layers.{i}.self_attn.out_proj",
    "blocks.{i}.norm2": "encoder.layers.{i}.layer_norm2",
    "blocks.{i}.mlp.up": "encoder.layers.{i}.mlp.fc1",
    "blocks.{i}.mlp.down": "encoder.layers.{i}.mlp.fc2",
    "norm": "post_layernorm",
}
KEYS = (  # our tensors, and their names in a folder that `SiglipVisionModel.save_pretrained` of transformers 5 wrote
    KeyRule("embed.weight", "embeddings.patch_embedding.weight", _flat, _square),  # their convolution is our linear layer
    KeyRule("embed.bias", "embeddings.patch_embedding.bias"),
    KeyRule("positions.weight", "embeddings.position_embedding.weight"),
    *(KeyRule(f"{ours}.{leaf}", f"{theirs}.{leaf}") for ours, theirs in _THEIRS.items() for leaf in ("weight", "bias")),
)
HUB_PREFIX = "vision_model."  # before each of those names in the hub's files, which hold a text model too
HUB_KEYS = prefixed(KEYS, "", HUB_PREFIX)


def _flat_channels_last(weight_DC: Tensor) -> Tensor:
    patch = math.isqrt(weight_DC.shape[1] // 3)
    return weight_DC.unflatten(1, (patch, patch, 3)).permute(0, 3, 1, 2).flatten(1)


def _channels_last(weight_DC: Tensor) -> Tensor:
    return _square(weight_DC).permute(0, 2, 3, 1).flatten(1)


# The NaFlex class `Siglip2VisionModel` names tensors alike, and is a linear layer too, on patches ordered (row, column, channel).
# On a grid as large as the table of positions it computes what the fixed one does.
NAFLEX_KEYS = (KeyRule("embed.weight", "embeddings.patch_embedding.weight", _flat_channels_last, _channels_last), *KEYS[1:])
DROPPED = (  # what a checkpoint may hold beyond these, and we do not use; `**` crosses dots
    "text_model.**",
    "logit_scale",
    "logit_bias",
    *(prefix + name for prefix in ("", HUB_PREFIX) for name in ("head.**", "embeddings.position_ids")),
)


def keys(c: Config) -> tuple[KeyRule, ...]:
    """Our tensors, and their names in a folder of the class that computes what this config does."""
    return KEYS if c.patches is None else NAFLEX_KEYS


# ---- Hugging Face's settings

ACTIVATION = {"hidden_act": "gelu_pytorch_tanh"}
FILTERS: tuple[Resample, ...] = ("nearest", "lanczos", "bilinear", "bicubic")  # by Pillow's numbers, which processors store


def from_hf(config_json: Json, preprocessor_json: Json | None) -> Config:
    """The tower described by a SigLIP or SigLIP 2 folder: config.json of the whole model or of the vision model alone, and
    preprocessor_config.json. Keys that a file leaves out have the defaults of transformers' classes. Raises Refused.
    """
    where, whole = "config.json", config_json.get("model_type")
    if whole in ("siglip", "siglip2"):
        where, config_json = "vision_config of config.json", section(where, config_json, "vision_config")
        config_json = {"model_type": f"{whole}_vision_model", **config_json}
        kind(where, config_json, f"{whole}_vision_model", {})
    if config_json.get("model_type") == "siglip2_vision_model":
        return _naflex(where, config_json, preprocessor_json or {})
    kind(where, config_json, "siglip_vision_model", {})
    sizes = _sizes(where, config_json)
    image_size = integer(where, config_json, "image_size", 224)
    square = {"height": image_size, "width": image_size}  # another size would need positions in between the learned ones
    given = preprocessor_json or {}
    refuse_limits("preprocessor_config.json", given, f"this tower takes squares of {image_size} pixels a side")
    if given.get("size") in (image_size, [image_size, image_size]):  # as older files have it
        given = {**given, "size": square}
    prepared = _read_preprocessor(given, {"do_center_crop": False, "do_pad": False, "size": square}, "bicubic")
    return made(where, Config, {"image_size": image_size, **sizes, **prepared})


def _sizes(where: str, config_json: Json) -> dict[str, Any]:
    refuse_quantised(where, config_json)
    expect(where, config_json, ACTIVATION | {"num_channels": 3, "attention_dropout": 0.0})
    return {
        "patch": integer(where, config_json, "patch_size", 16),
        "hidden_size": integer(where, config_json, "hidden_size", 768),
        "layers": integer(where, config_json, "num_hidden_layers", 12, LAYERS),
        "heads": integer(where, config_json, "num_attention_heads", 12),
        "intermediate_size": integer(where, config_json, "intermediate_size", 3072),
        "eps": number(where, config_json, "layer_norm_eps", 1e-6),
    }


def _naflex(where: str, config_json: Json, preprocessor_json: Json) -> Config:
    sizes, table = _sizes(where, config_json), integer(where, config_json, "num_patches", 256)
    side = math.isqrt(table)
    if side**2 != table:
        raise Refused(f"{where} has num_patches={table}; wanted a square number, for a square table of positions. Is the file damaged?")
    refuse_limits("preprocessor_config.json", preprocessor_json, "this tower takes as many patches as max_num_patches says")
    prepared = _read_preprocessor(preprocessor_json, {"patch_size": sizes["patch"]}, "bilinear")
    patches = integer("preprocessor_config.json", preprocessor_json, "max_num_patches", 256)
    return made(where, Config, {"image_size": side * sizes["patch"], "patches": patches, **sizes, **prepared})


def from_hf_naflex(config_json: Json, preprocessor_json: Json | None) -> Config:
    """What `to_hf_naflex` and `to_preprocessor_naflex` wrote: a NaFlex tower that is used on its largest grid only."""
    where = "vision_config of config.json"
    kind(where, config_json, "siglip2_vision_model", {})
    absent = {"resample": FILTERS.index("bicubic"), "max_num_patches": config_json.get("num_patches", 256)}
    c = _naflex(where, config_json, absent | dict(preprocessor_json or {}))
    if c.patches != c.position_grid**2:
        raise Refused(f"preprocessor_config.json has max_num_patches={c.patches}; wanted {c.position_grid**2}, for one square grid.")
    return c.model_copy(update={"patches": None})


def _read_preprocessor(json: Json, wanted: Json, resample: Resample) -> dict[str, Any]:
    """Filter, mean and std; `wanted` is what else the file must say if it says it, `resample` the class's filter."""
    where = "preprocessor_config.json"
    expect(where, json, {**dict.fromkeys(("do_resize", "do_rescale", "do_normalize"), True), **wanted})
    if abs(number(where, json, "rescale_factor", 1 / 255) * 255 - 1) > 1e-6:
        raise Refused(f"{where} has rescale_factor={json['rescale_factor']!r}; wanted 1/255. Use the model's own file.")
    number_of_filter = json.get("resample", FILTERS.index(resample))
    if number_of_filter not in range(len(FILTERS)):
        raise Refused(f"{where} has resample={number_of_filter!r}; wanted one of {dict(enumerate(FILTERS))}. Use the model's own file.")
    three = {name: json.get(f"image_{name}", HALF) for name in ("mean", "std")}
    for name, got in three.items():
        if not isinstance(got, list | tuple) or len(got) != 3 or not all(isinstance(x, int | float) for x in got):
            raise Refused(f"{where} has image_{name}={got!r}; wanted three numbers. Use the model's own file.")
    return {"resample": FILTERS[number_of_filter], **{name: tuple(map(float, got)) for name, got in three.items()}}


def to_hf(c: Config) -> dict[str, Any]:
    """config.json of the vision model alone, without its pooling head."""
    if c.patches is not None:
        return to_hf_naflex(c)
    return _fixed_to_hf(c)


def _fixed_to_hf(c: Config) -> dict[str, Any]:
    return {
        "architectures": ["SiglipVisionModel"],
        "model_type": "siglip_vision_model",
        "image_size": c.image_size,
        "patch_size": c.patch,
        "num_channels": 3,
        "hidden_size": c.hidden_size,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "intermediate_size": c.intermediate_size,
        "layer_norm_eps": c.eps,
        "attention_dropout": 0.0,
        "vision_use_head": False,
        **ACTIVATION,
    }


def to_hf_naflex(c: Config) -> dict[str, Any]:
    """config.json of a `Siglip2VisionModel`, the NaFlex class, also of a fixed tower: its square is then the only grid."""
    fixed = _fixed_to_hf(c)
    del fixed["image_size"]
    return {**fixed, "architectures": ["Siglip2VisionModel"], "model_type": "siglip2_vision_model", "num_patches": c.position_grid**2}


def to_preprocessor(c: Config) -> dict[str, Any]:
    """preprocessor_config.json of the image processor that prepares pictures as the model was trained (but for tiles)."""
    if c.patches is not None:
        return to_preprocessor_naflex(c)
    return _fixed_to_preprocessor(c)


def _fixed_to_preprocessor(c: Config) -> dict[str, Any]:
    return {
        "image_processor_type": "SiglipImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"height": c.image_size, "width": c.image_size},
        "resample": FILTERS.index(c.resample),
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(c.mean),
        "image_std": list(c.std),
    }


def to_preprocessor_naflex(c: Config) -> dict[str, Any]:
    """preprocessor_config.json of a `Siglip2ImageProcessor`. It keeps the shape of a picture: for a fixed tower give it square ones."""
    fixed = _fixed_to_preprocessor(c)
    del fixed["size"]
    most = c.patches or c.position_grid**2
    return {**fixed, "image_processor_type": "Siglip2ImageProcessor", "patch_size": c.patch, "max_num_patches": most}
