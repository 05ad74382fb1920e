"""The tower and the mergers of Qwen3-VL and Qwen3.5 in Hugging Face's form: the `visual` module, vision_config, processors."""

import math
from typing import Any

import torch
from torch import Tensor

from eyeline.core.errors import Refused
from eyeline.core.key_rules import KeyRule
from eyeline.models.hf.config_json import LAYERS, Json, expect, integer, mapping, number, record_of, refuse_quantised
from eyeline.models.hf.siglip2 import FILTERS
from eyeline.models.qwen_vision import THETA, Config
from eyeline.models.siglip2 import HALF


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
            KeyRule(tuple(f"blocks.{{i}}.attn.{x}.{leaf}" for x in "qkv"), f"blocks.{{i}}.attn.qkv.{leaf}", _in_three, _cat)
            for leaf in ("weight", "bias")
        ),
    )


def _in_three(qkv: Tensor) -> tuple[Tensor, ...]:
    return qkv.chunk(3)


def _cat(*qkv: Tensor) -> Tensor:
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


# ---- settings

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
    """preprocessor_config.json of the `Qwen2VLImageProcessor` that processes images as the model was trained."""
    older = {"min_pixels": c.min_pixels, "max_pixels": c.max_pixels}  # transformers 4.57 without torchvision does not read `size`
    return {"image_processor_type": "Qwen2VLImageProcessor", **_to_processor(c, c.min_pixels, c.max_pixels), **older}


def to_video_preprocessor(c: Config) -> dict[str, Any]:
    """video_preprocessor_config.json of the `Qwen3VLVideoProcessor` that processes videos in the same way."""
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
    images, videos = {}, {}
    if preprocessor is not None:
        images = _from_processor("preprocessor_config.json", preprocessor, tower, ("min_pixels", "max_pixels"), (56**2, 28**2 * 1280), CLIP)
    if video is not None:
        name = "video_preprocessor_config.json"
        videos = _from_processor(name, video, tower, ("video_min_pixels", "video_max_pixels"), (128 * 32**2, 768 * 32**2), (HALF, HALF))
        for key in ("mean", "std"):
            if images and videos[key] != images[key]:
                raise Refused(
                    f"{name} has image_{key}={videos[key]}, and images have {images[key]}; Eyeline processes both in the same way."
                )
    return record_of(where, Config, {**tower, **videos, **images})


CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))  # what the image processor has by default


def _limits(where: str, json: Json, names: tuple[str, str], limits: tuple[int, int]) -> dict[str, int]:
    """The pixels that an image, or a video, has at least and at most, under these names: `size` has them as shortest_edge and
    longest_edge, older files as min_pixels and max_pixels, in `size` or next to it. Raises Refused for any other key of `size`."""
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
        # the class for videos does not read the older name outside `size`
        if names[0] == "video_min_pixels" and json.get(older) not in (None, size.get(key, default)):
            raise Refused(f"{where} has {older}={json[older]!r}, which transformers does not read there. Write it into size, as {key}.")
        if len(given) > 1 and given[0] != given[1]:
            raise Refused(f"{where} has {older} twice, in size and next to it, with different values. Remove one.")
        found[name] = integer(where, {key: given[0] if given else size.get(key, default)}, key, default)
    return found


def _from_processor(
    where: str, json: Json, tower: Json, names: tuple[str, str], limits: tuple[int, int], colours: tuple[tuple[float, ...], ...]
) -> dict[str, Any]:
    """Limits under these names, mean and std of images or videos; `limits` and `colours` are what the class has by default."""
    same = {"patch_size": tower["patch"], "temporal_patch_size": tower["temporal_patch"], "merge_size": tower["merge"]}
    always = dict.fromkeys(("do_resize", "do_rescale", "do_normalize"), True)
    expect(where, json, {**always, **same, "resample": FILTERS.index("bicubic")})
    if json.get("cap_pixels_per_frame"):
        raise Refused(f"{where} has cap_pixels_per_frame=true; Eyeline limits the pixels of a whole video only. Set it to false.")
    if abs(number(where, json, "rescale_factor", 1 / 255) * 255 - 1) > 1e-6:
        raise Refused(f"{where} has rescale_factor={json['rescale_factor']!r}; wanted 1/255. Use the model's own file.")
    found: dict[str, Any] = _limits(where, json, names, limits)
    for key, default in zip(("mean", "std"), colours, strict=True):
        got = json.get(f"image_{key}", default)
        if not isinstance(got, list | tuple) or len(got) != 3 or not all(isinstance(x, int | float) for x in got):
            raise Refused(f"{where} has image_{key}={got!r}; wanted three numbers. Use the model's own file.")
        found[key] = tuple(map(float, got))
    return found
