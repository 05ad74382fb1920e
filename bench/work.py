"""The same tiny model and the same samples for both sides."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from eyeline.bundle.bundle import Bundle
from eyeline.bundle.exporting import export
from eyeline.core.batch import IGNORE, Document, Grid, Image
from eyeline.core.randomness import rng_for, torch_rng_for
from eyeline.data.text.templates import template_named
from eyeline.data.text.tokenizer import train_bpe
from eyeline.models import Config, Model, llava, qwen2, siglip2
from eyeline.models.shape import build

TEMPLATE = "plain"


@dataclass(frozen=True)
class Sized:
    """A LLaVA-form model's sizes: SigLIP tower, two-layer projector, Qwen2 decoder."""

    image: int  # pixels per side; one visual token per patch
    width: int
    layers: int
    vocabulary: int = 1024
    patch: int = 8

    @property
    def config(self) -> llava.Config:
        return llava.Config(
            vision=siglip2.Config(
                image_size=self.image,
                patch=self.patch,
                hidden_size=self.width,
                layers=self.layers,
                heads=4,
                intermediate_size=2 * self.width,
            ),
            language=qwen2.Config(
                vocab_size=self.vocabulary, hidden_size=self.width, layers=self.layers, heads=4, kv_heads=2,
                intermediate_size=3 * self.width, rope_theta=1e4, max_positions=4096, tie_embeddings=True,
            ),
            feature_norm=False,
        )  # fmt: skip

    @property
    def visual(self) -> int:
        """Visual tokens of an image."""
        return (self.image // self.patch) ** 2


def made(sized: Sized, folder: Path) -> tuple[Bundle, Model]:
    """A model with random weights, also as a folder that transformers loads. No weight is zero: zeros would hide a difference."""
    template = template_named(TEMPLATE)
    bundle = Bundle(sized.config, train_bpe(["what is in the image? a red circle"], 300, template), TEMPLATE)
    model = random_model(sized.config)
    export(bundle, model, folder)
    return bundle, model


def random_model(c: Config) -> Model:
    """A model of random weights, none of which is zero: zeros would hide a difference."""
    model = build(c, "cpu")
    for part in model.children():
        part.initialise(torch_rng_for(0, "bench weights"))  # type: ignore[operator]
    rng = torch_rng_for(0, "bench noise")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=rng))
    return model


def log_normal(name: str, count: int, median: int, p95: int, least: int, most: int) -> list[int]:
    """So many lengths of the given median and 95th percentile, cut to what is between `least` and `most`."""
    sigma = math.log(p95 / median) / 1.6449  # the 95th percentile of the standard normal distribution
    drawn = np.exp(math.log(median) + sigma * rng_for(0, name).standard_normal(count))
    return np.clip(np.rint(drawn), least, most).astype(int).tolist()


def documents(sized: Sized, image_token: int, lengths: Sequence[int], answer: float = 0.5) -> list[Document]:
    """Samples of the given lengths: an image, random text, and of the text the last share `answer` to be learned."""
    out: list[Document] = []
    visual, side = sized.visual, sized.image // sized.patch
    places_P2 = np.stack(np.divmod(np.arange(visual, dtype=np.int32), side), 1)
    for number, length in enumerate(lengths):
        rng = rng_for(0, "bench sample", number)
        patches_PC = rng.integers(0, 256, (visual, 3 * sized.patch**2), np.uint8)
        image = Image(f"image {number}", patches_PC, places_P2, Grid(side, side), 1)
        text = rng.integers(0, 256, length - visual).astype(np.int32)  # ids of bytes: no control token is among them
        tokens_T = np.concatenate([np.full(visual, image_token, np.int32), text])
        labels_T = np.full(length, IGNORE, np.int32)
        begin = length - max(1, round(answer * len(text)))
        labels_T[begin - 1 : -1] = tokens_T[begin:]
        out.append(Document(f"sample {number}", tokens_T, labels_T, np.arange(visual, dtype=np.int32), (image,)))
    return out
