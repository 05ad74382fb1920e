"""A tiny model and documents made by hand, for tests of the update."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from eyeline.core.batch import IGNORE, Batch, Budget, Document, Grid, Image
from eyeline.core.step import step_alone
from eyeline.data.fetch.batches import batch_of
from eyeline.models import llava, qwen2, siglip2
from eyeline.models.moe import Balance
from eyeline.models.shape import build
from eyeline.parallel.ranks import ONE_DEVICE
from eyeline.train.step import Report, update

CONFIG = llava.Config(
    vision=siglip2.Config(image_size=16, patch=4, hidden_size=16, layers=2, heads=2, intermediate_size=24),
    projector=llava.ProjectorConfig(shuffle=2),
    language=qwen2.Config(vocab_size=50, hidden_size=16, layers=2, heads=2, kv_heads=1, intermediate_size=24, tie_embeddings=False),
)


def model(config: llava.Config = CONFIG, seed: int = 0, compute_dtype: torch.dtype = torch.float32) -> llava.Model:
    """A model whose every tensor is random: zeros at the start would hide what does not arrive."""
    made = build(config, "cpu", compute_dtype=compute_dtype)
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=rng) * 0.2 + (1.0 if parameter.ndim == 1 else 0.0))
    return made


def document(seed: int, tokens: int, labels: int, images: int = 1) -> Document:
    """`images` images of 4 visual tokens each at the front, then text; the last `labels` positions ask for a loss."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 50, tokens).astype(np.int32)
    targets = np.full(tokens, IGNORE, np.int32)
    targets[tokens - labels :] = rng.integers(0, 50, labels)
    places = np.stack(np.meshgrid(range(4), range(4), indexing="ij"), -1).reshape(2, 2, 2, 2, 2).swapaxes(1, 2).reshape(16, 2)
    units = tuple(
        Image(f"{seed}.{n}", rng.integers(0, 256, (16, 48)).astype(np.uint8), places.astype(np.int32), Grid(4, 4), 2) for n in range(images)
    )
    return Document(f"d{seed}", ids, targets, np.arange(4 * images, dtype=np.int32), units)


def batch(*documents: Document, tokens: int | None = None) -> Batch:
    """One micro-batch, padded to `tokens` if given."""
    return batch_of(documents, Budget(tokens, 1000) if tokens else None)


def update_alone(
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    batches: Sequence[Batch],
    *,
    max_grad_norm: float | None = None,
    balance: Balance | None = None,
    seed: int = 0,
    step: int = 0,
    loss_scale: float | None = None,
) -> Report:
    """One update by the only rank."""
    how = {"max_grad_norm": max_grad_norm, "balance": balance, "seed": seed, "step": step, "loss_scale": loss_scale}
    return update(model, optimizers, step_alone(batches), ONE_DEVICE, **how)
