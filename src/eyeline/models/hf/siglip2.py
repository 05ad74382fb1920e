"""SigLIP 2 in Hugging Face's form: tensors and files of `SiglipVisionModel` and, for NaFlex, of `Siglip2VisionModel`."""

import math
from typing import Any

from torch import Tensor

from eyeline.core.errors import Refused
from eyeline.core.image_rule import Resample
from eyeline.core.key_rules import KeyRule, prefixed
from eyeline.models.hf.config_json import (
    LAYERS,
    Json,
    expect,
    expect_model_type,
    integer,
    number,
    record_of,
    refuse_limits,
    refuse_quantised,
    section,
)
from eyeline.models.siglip2 import HALF, Config


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


# ---- settings

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
        expect_model_type(where, config_json, f"{whole}_vision_model", {})
    if config_json.get("model_type") == "siglip2_vision_model":
        return _naflex(where, config_json, preprocessor_json or {})
    expect_model_type(where, config_json, "siglip_vision_model", {})
    sizes = _sizes(where, config_json)
    image_size = integer(where, config_json, "image_size", 224)
    square = {"height": image_size, "width": image_size}  # another size would need positions in between the trained ones
    given = preprocessor_json or {}
    refuse_limits("preprocessor_config.json", given, f"this tower takes squares of {image_size} pixels per side")
    if given.get("size") in (image_size, [image_size, image_size]):  # as older files have it
        given = {**given, "size": square}
    preprocessor = _read_preprocessor(given, {"do_center_crop": False, "do_pad": False, "size": square}, "bicubic")
    return record_of(where, Config, {"image_size": image_size, **sizes, **preprocessor})


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
    preprocessor = _read_preprocessor(preprocessor_json, {"patch_size": sizes["patch"]}, "bilinear")
    patches = integer("preprocessor_config.json", preprocessor_json, "max_num_patches", 256)
    return record_of(where, Config, {"image_size": side * sizes["patch"], "patches": patches, **sizes, **preprocessor})


def from_hf_naflex(config_json: Json, preprocessor_json: Json | None) -> Config:
    """What `to_hf_naflex` and `to_preprocessor_naflex` wrote: a NaFlex tower that is used on its largest grid only."""
    where = "vision_config of config.json"
    expect_model_type(where, config_json, "siglip2_vision_model", {})
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
    """preprocessor_config.json of the image processor that processes images as the model was trained (but for tiles)."""
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
    """preprocessor_config.json of a `Siglip2ImageProcessor`. It keeps the shape of an image: for a fixed tower give it square ones."""
    fixed = _fixed_to_preprocessor(c)
    del fixed["size"]
    most = c.patches or c.position_grid**2
    return {**fixed, "image_processor_type": "Siglip2ImageProcessor", "patch_size": c.patch, "max_num_patches": most}
