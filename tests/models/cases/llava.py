"""LLaVA's form (features before the tower's final norm) and LFM2-VL's (after it, with pixel shuffle)."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from eyeline.core.batch import Document, Image
from eyeline.core.randomness import rng_for
from eyeline.models import hf, llava, qwen2, siglip2
from eyeline.models.hf.forms import MediaTokens
from tests.models.cases import text
from tests.models.parity import IMAGE_TOKEN, VOCABULARY, Case, documents, image, normalised, peer_of, token_inputs

VISION = siglip2.Config(
    image_size=13,  # one pixel more than four patches of three: the tower must not look at it
    patch=3,
    hidden_size=16,
    layers=3,
    heads=2,
    intermediate_size=24,
    eps=1e-3,
    mean=(0.4, 0.5, 0.6),
    std=(0.3, 0.4, 0.5),
)


def language(tie_embeddings: bool, head_dim: int | None = None) -> qwen2.Config:
    return qwen2.Config(
        vocab_size=VOCABULARY,
        hidden_size=24,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=head_dim,
        intermediate_size=40,
        eps=1e-3,
        rope_theta=100.0,
        tie_embeddings=tie_embeddings,
    )


EVEN = VISION.model_copy(update={"image_size": 12})  # whole patches, as LFM2-VL's class has them
SHUFFLED = llava.ProjectorConfig(shuffle=2, norm=True, hidden_size=20)
TIED = llava.Config(vision=VISION, language=language(tie_embeddings=True), feature_norm=False)
EARLIER = llava.Config(vision=VISION, language=language(tie_embeddings=False, head_dim=8), feature_layer=-2, feature_norm=False)
SHUFFLING = llava.Config(vision=EVEN, projector=SHUFFLED, language=language(tie_embeddings=False))
BY_FOUR = llava.Config(vision=EVEN, projector=llava.ProjectorConfig(shuffle=4), language=language(tie_embeddings=True, head_dim=4))
CONFIGS = {"tied": TIED, "untied, layer before the last": EARLIER, "shuffled untied": SHUFFLING, "shuffled by four, tied": BY_FOUR}
for name in ("qwen3 tied", "qwen3, some layers of experts", "llama, stretched"):  # both classes take any language model
    CONFIGS[f"{name}, as LLaVA"] = llava.Config(vision=VISION, language=text.CONFIGS[name], feature_norm=False)
for name in ("qwen3 of experts", "llama"):
    CONFIGS[f"{name}, as LFM2-VL"] = llava.Config(vision=EVEN, projector=SHUFFLED, language=text.CONFIGS[name])
NAFLEX = EVEN.model_copy(update={"patches": 40})  # images keep their shape; the table of positions is stretched over them


def shown(c: llava.Config) -> list[Image]:
    """Three random images as the tower takes them: squares, or in NaFlex mode one larger than its table and two that are flat."""
    square = (c.vision.position_grid, c.vision.position_grid)
    grids = (square,) * 3 if c.vision.patches is None else ((6, 6), (2, 4), (2, 4))
    return [image(key, *grid, c.vision.patch, c.projector.shuffle) for key, grid in zip(("cat", "dog", "cow"), grids, strict=True)]


def pixels(image: Image, c: llava.Config) -> Tensor:
    """[3, height, width] as the reference takes them. Noise fills what the tower must not read."""
    v, side = c.vision, c.vision.position_grid
    patches = normalised([image], v.mean, v.std).unflatten(1, (3, v.patch, v.patch))
    cells = torch.empty(side, side, 3, v.patch, v.patch)
    rows, columns = torch.from_numpy(image.places_P2.T.astype(np.int64))
    cells[rows, columns] = patches
    whole = torch.from_numpy(rng_for(0, "edge " + image.key).normal(size=(3, v.image_size, v.image_size)).astype(np.float32))
    whole[:, : side * v.patch, : side * v.patch] = cells.permute(2, 0, 3, 1, 4).reshape(3, side * v.patch, side * v.patch)
    return whole


# the tower's names where transformers 5 saved a model; the hub's have one level more
SAVED = {f"{prefix}embeddings.patch_embedding.bias": (1,) for prefix in ("vision_tower.", "model.vision_tower.")}


def inputs_of(c: llava.Config) -> Callable[[Document], dict[str, Tensor]]:
    """Pixel values for LLaVA's class; for LFM2-VL's, padded rows of patches."""

    def inputs(d: Document) -> dict[str, Tensor]:
        if not d.images:
            return token_inputs(d)
        if not c.feature_norm:
            return token_inputs(d) | {"pixel_values": torch.stack([pixels(i, c) for i in d.images])}
        rows = [row_by_row(i, c) for i in d.images]
        return token_inputs(d) | {
            "pixel_values": pad_sequence(rows, batch_first=True),
            "pixel_attention_mask": pad_sequence([torch.ones(len(x), dtype=torch.int64) for x in rows], batch_first=True),
            "spatial_shapes": torch.tensor([i.grid for i in d.images]),
        }

    return inputs


def row_by_row(image: Image, c: llava.Config) -> Tensor:
    """Patches as LFM2-VL's class takes them: row by row, each ordered (y, x, channel)."""
    patches = normalised([image], c.vision.mean, c.vision.std).unflatten(1, (3, c.vision.patch, c.vision.patch))
    order = np.lexsort(image.places_P2.T[::-1])
    return patches[torch.from_numpy(order)].permute(0, 2, 3, 1).flatten(1)


def config_json(c: llava.Config) -> dict:
    """The config.json that we write."""
    return hf.llava.to_hf(c, hf.llava.form(c), MediaTokens(IMAGE_TOKEN, "<|image_pad|>"))["config.json"]


def case(id: str, c: llava.Config, as_written: llava.Config | None = None) -> Case:
    """`as_written`: what is exported to the peer's class, where that is not this config."""
    w = as_written or c
    return Case(id, c, lambda: peer_of(config_json(w)), inputs_of(c), hf.llava.keys(w, hf.llava.form(w), SAVED), documents(*shown(c)))


CASES = [case(id, c) for id, c in CONFIGS.items()]
# we do not export it so, since the class's own processor prepares images in another way; what the class computes is the same
CASES += [case("NaFlex", SHUFFLING.model_copy(update={"vision": NAFLEX}), as_written=SHUFFLING)]
