"""Tiny models of transformers with the same shape as ours, every tensor random, and documents to run both on.

A twin is the reference: our model is filled from the folder that the twin's `save_pretrained` wrote, through our key rules,
and gradients are compared under the names of that same kind of folder. So a mistake in a name, a layout or the
arithmetic shows as a number.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from eyeline.core.batch import IGNORE, Batch, Document, Grid, Image
from eyeline.core.facts import KeyRule
from eyeline.core.randomness import rng_for
from eyeline.data.batches import batch_of
from eyeline.models import llava, qwen2, siglip2

IMAGE_TOKEN = 50
VISION = siglip2.Config(
    image_size=13,  # one pixel more than four patches of three: the tower must not look at it
    patch=3,
    width=16,
    layers=3,
    heads=2,
    feed_forward=24,
    eps=1e-3,
    mean=(0.4, 0.5, 0.6),
    std=(0.3, 0.4, 0.5),
)


def language(tied: bool, head_dim: int | None = None) -> qwen2.Config:
    return qwen2.Config(
        vocabulary=53, width=24, layers=2, heads=4, kv_heads=2, head_dim=head_dim, feed_forward=40, eps=1e-3, rope_theta=100.0, tied=tied
    )


EVEN = VISION.model_copy(update={"image_size": 12})  # whole patches, as LFM2-VL's class has them
SHUFFLED = llava.ProjectorConfig(shuffle=2, norm=True, width=20)
CASES = {
    "llava": {
        "llava tied": llava.Config(vision=VISION, language=language(tied=True), feature_norm=False),
        "llava untied, layer before the last": llava.Config(
            vision=VISION, language=language(tied=False, head_dim=8), feature_layer=-2, feature_norm=False
        ),
        "shuffled untied": llava.Config(vision=EVEN, projector=SHUFFLED, language=language(tied=False)),
        "shuffled by four, tied": llava.Config(
            vision=EVEN, projector=llava.ProjectorConfig(shuffle=4), language=language(tied=True, head_dim=4)
        ),
    }
}
SHUFFLING = CASES["llava"]["shuffled untied"]


@dataclass(frozen=True)
class Twin:
    reference: transformers.PreTrainedModel
    ours: nn.Module
    rules: tuple[KeyRule, ...]


def randomise(model: nn.Module, seed: int = 0) -> None:
    """Every parameter: a bias that is zero or a norm that is one would hide a wrong mapping."""
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=rng)
            is_norm = "norm" in name and name.endswith("weight")
            p.copy_(1 + 0.3 * noise if is_norm else noise * (0.3 if p.ndim == 1 else 1.2 * p[0].numel() ** -0.5))


def reference_of(config: dict) -> transformers.PreTrainedModel:
    """The transformers model of a config.json that we wrote, with random weights. Eager attention: nothing in common with ours."""
    record = transformers.AutoConfig.for_model(**config)
    cls = getattr(transformers, config["architectures"][0])
    model = cls._from_config(record, attn_implementation="eager").eval()
    randomise(model)
    return model


def hf_config(c: llava.Config) -> tuple[dict, tuple[KeyRule, ...]]:
    match llava.form(c).name:
        case "llava":
            return llava.llava_to_hf(c, IMAGE_TOKEN), llava.LLAVA_KEYS(c)
        case "lfm2_vl":
            return llava.lfm2_vl_to_hf(c, IMAGE_TOKEN), llava.LFM2_VL_KEYS(c)
        case name:
            raise AssertionError(name)


def twin_of(c: llava.Config, folder: Path, family: ModuleType = llava) -> Twin:
    config, rules = hf_config(c)
    reference = reference_of(config)
    ours = family.build(c, "cpu")
    fill(ours, on_disk(reference, folder), rules)
    return Twin(reference, ours, rules)


def on_disk(model: transformers.PreTrainedModel, folder: Path) -> dict[str, Tensor]:
    """The tensors as `save_pretrained` names and shapes them."""
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def theirs_of(name: str, rules: Iterable[KeyRule]) -> tuple[str, KeyRule]:
    """The one rule for a tensor of ours, and its name there."""
    hits = [(m, r) for r in rules if (m := re.fullmatch(re.escape(r.ours).replace(r"\{i\}", r"(\d+)"), name))]
    assert len(hits) == 1, f"{name}: {len(hits)} rules"
    match, rule = hits[0]
    return (rule.theirs.replace("{i}", match.group(1)) if match.groups() else rule.theirs), rule


def fill(ours: nn.Module, tensors: dict[str, Tensor], rules: tuple[KeyRule, ...]) -> None:
    """Copy every tensor by name; both sides must be used up."""
    left = set(tensors)
    with torch.no_grad():
        for name, p in ours.named_parameters():
            theirs, rule = theirs_of(name, rules)
            value = tensors[theirs]
            p.copy_(rule.read(value) if rule.read else value)
            left.remove(theirs)
    assert not left, left


def gradients_on_disk(twin: Twin, folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(theirs, ours), under the names of a saved folder. A parameter without a gradient has zeros."""
    with torch.no_grad():
        for p in twin.reference.parameters():
            p.copy_(torch.zeros_like(p) if p.grad is None else p.grad)
    ours = {}
    for name, p in twin.ours.named_parameters():
        theirs, rule = theirs_of(name, twin.rules)
        gradient = torch.zeros_like(p) if p.grad is None else p.grad
        ours[theirs] = rule.write(gradient) if rule.write else gradient
    return on_disk(twin.reference, folder), ours


def close(got: Tensor, want: Tensor, what: str, tolerance: float = 2e-5, floor: float = 1e-6) -> None:
    """Equal but for rounding, relative to the largest number of the reference or to `floor`."""
    assert got.shape == want.shape, f"{what}: {got.shape} and {want.shape}"
    error = (got - want).abs().max() / want.abs().max().clamp_min(floor)
    assert error < tolerance, f"{what}: off by {error:.2e} of its largest number"


def all_close(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float = 2e-5) -> None:
    """The same names, and `close` for each. A gradient that is zero but for rounding (a key's bias without rotary
    positions: softmax does not see it) is measured by a hundredth of the largest of all."""
    assert got.keys() == want.keys()
    floor = 0.01 * max(float(x.abs().max()) for x in want.values())
    for name, x in want.items():
        close(got[name], x, name, tolerance, floor)


# ---- pictures and documents


def picture(key: str, c: llava.Config) -> tuple[Image, Tensor]:
    """A random picture: as our model takes it, and the pixel values that the reference takes."""
    v, r = c.vision, c.projector.shuffle
    pixels = rng_for(0, key).integers(0, 256, (3, v.image_size, v.image_size), dtype=np.uint8)
    cells = v.side // r
    places = [(cy * r + y, cx * r + x) for cy in range(cells) for cx in range(cells) for y in range(r) for x in range(r)]
    patches = [pixels[:, y * v.patch : (y + 1) * v.patch, x * v.patch : (x + 1) * v.patch].flatten() for y, x in places]
    image = Image(key, np.stack(patches), np.array(places, np.int32), Grid(v.side, v.side), r)
    mean, std = (torch.tensor(x)[:, None, None] for x in (v.mean, v.std))
    return image, (torch.from_numpy(pixels).float() / 255 - mean) / std


def document(name: str, pieces: list[int | str], c: llava.Config) -> Document:
    """Pieces: a number of random text tokens, or the key of a picture. A third of the text tokens are targets."""
    rng = rng_for(0, "document " + name)
    tokens, visual, images = [], [], []
    for piece in pieces:
        if isinstance(piece, int):
            tokens += rng.integers(0, IMAGE_TOKEN, piece).tolist()
        else:
            images.append(picture(piece, c)[0])
            visual += range(len(tokens), len(tokens) + images[-1].tokens)
            tokens += [IMAGE_TOKEN] * images[-1].tokens
    tokens_T = np.array(tokens, np.int32)
    labels_T = np.where(rng.random(len(tokens)) < 0.33, rng.integers(0, IMAGE_TOKEN, len(tokens)), IGNORE).astype(np.int32)
    labels_T[tokens_T == IMAGE_TOKEN] = IGNORE
    labels_T[-1] = 7  # at least one
    return Document(name, tokens_T, labels_T, np.array(visual, np.int32), tuple(images))


def documents(c: llava.Config) -> list[Document]:
    """Pictures in different turns, two neighbouring ones, a text alone, documents of equal length, a shared picture."""
    return [
        document("two turns", [3, "cat", 4, "dog", 5], c),
        document("text", [9], c),
        document("neighbours", [2, "dog", "cow", 3], c),
        document("twelve", [12], c),
        document("also nine", [9], c),
        document("shared", ["cat", 6], c),
    ]


def with_labels(documents: list[Document]) -> Batch:
    return batch_of(documents, None)


def reference_loss(model: transformers.PreTrainedModel, documents: list[Document], c: llava.Config) -> tuple[Tensor, Tensor]:
    """Summed loss, and the logits of the labelled rows: one document after another, by the reference."""
    losses, logits = [], []
    for d in documents:
        tokens_1T = torch.from_numpy(d.tokens_T).long()[None]
        logits_TV = model(input_ids=tokens_1T, **reference_pictures(d, c)).logits[0]
        labels_T = torch.from_numpy(d.labels_T).long()
        losses.append(F.cross_entropy(logits_TV, labels_T, reduction="sum", ignore_index=IGNORE))
        logits.append(logits_TV[labels_T != IGNORE])
    return torch.stack(losses).sum(), torch.cat(logits)


def reference_pictures(d: Document, c: llava.Config) -> dict[str, Tensor]:
    """What the reference's class takes for the pictures of one document."""
    if not d.images:
        return {}
    pixels_N3hw = torch.stack([picture(i.key, c)[1] for i in d.images])
    if not c.feature_norm:
        return {"pixel_values": pixels_N3hw}
    p, side = c.vision.patch, c.vision.side
    cells = pixels_N3hw.unflatten(3, (side, p)).unflatten(2, (side, p))  # [N, channel, row, y, column, x]
    patches = cells.permute(0, 2, 4, 3, 5, 1).reshape(len(d.images), side**2, -1)
    shapes = torch.full((len(d.images), 2), side)
    return {"pixel_values": patches, "pixel_attention_mask": torch.ones(patches.shape[:2], dtype=torch.int64), "spatial_shapes": shapes}


def logits_of(model: nn.Module, batch: Batch) -> Tensor:
    """Logits of the same rows that the labels are for."""
    return model(replace(batch, labels_L=None))
