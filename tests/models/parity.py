"""Tools to compare a model with its peer: a tiny model of transformers, every tensor random, whose weights ours is filled with.

Weights come from the folder that the peer's `save_pretrained` wrote, through the family's key rules, and the peer's
gradients take the same way. So a mistake in a name, a layout or the arithmetic shows as a number. The peer sees one
document at a time: nothing can leak there.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from eyeline.core.batch import IGNORE, Batch, Budget, Document, Grid, Image
from eyeline.core.key_rules import KeyRule
from eyeline.core.plan import Plan, Spec
from eyeline.core.randomness import rng_for
from eyeline.data.fetch.batches import batch_of
from eyeline.models import FAMILIES
from eyeline.models.shape import build, shape
from tests.weights import load_into

IMAGE_TOKEN = 50  # text of test documents stays below it
VOCABULARY = 53


@dataclass(frozen=True)
class Case:
    """One tiny model of a family, its peer, and what both are shown. See `tests/models/cases/__init__.py`."""

    id: str
    config: Any  # the family's Config
    peer: Callable[[], PreTrainedModel]  # eager attention; weights are overwritten
    inputs: Callable[[Document], dict[str, Tensor]]  # one document as the peer's forward and generate take it
    keys: tuple[KeyRule, ...]  # for the folder that the peer's save_pretrained writes
    documents: tuple[Document, ...]
    dropped: tuple[str, ...] = ()  # names in that folder that ours has no use for
    half: float = 0.07  # bound of the error of bfloat16, as a share of the largest logit

    @cached_property
    def spec(self) -> Spec:
        return FAMILIES[self.config.family].spec(self.config)

    @cached_property
    def plan(self) -> Plan[Any]:
        """To be read only: its model has no weights, and all tests share it."""
        return shape(self.config)

    @property
    def texts(self) -> list[Document]:
        return [d for d in self.documents if not d.images]

    @property
    def with_images(self) -> list[Document]:
        return [d for d in self.documents if d.images]


# ---- models


def built(case: Case, compute_dtype: torch.dtype = torch.float32) -> nn.Module:
    """Ours, with weights that are not filled yet."""
    return build(case.config, "cpu", compute_dtype=compute_dtype)


def randomised(case: Case) -> nn.Module:
    """Ours, every tensor random."""
    model = built(case)
    randomise(model)
    return model


def randomise(model: nn.Module, seed: int = 0) -> None:
    """Every parameter: a bias that is zero or a norm that is one would hide a wrong mapping."""
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=rng)
            fan_in = p.shape[-1] if p.ndim == 3 else p[:1].numel()  # of experts, or of a linear layer or convolution
            is_norm = "norm" in name and name.endswith("weight")
            p.copy_(1 + 0.3 * noise if is_norm else noise * (0.3 if p.ndim == 1 else 1.2 * fan_in**-0.5))


def peer_of(config_json: dict[str, Any]) -> PreTrainedModel:
    """transformers' model of a config.json that we wrote. Eager attention and experts: nothing in common with ours."""
    record = transformers.AutoConfig.for_model(**config_json)
    cls = getattr(transformers, config_json["architectures"][0])
    return cls._from_config(record, attn_implementation="eager", experts_implementation="eager").eval()


def pair(case: Case, folder: Path) -> tuple[PreTrainedModel, nn.Module]:
    """The peer with every tensor random, and ours with the same values."""
    peer = case.peer()
    randomise(peer)
    peer.save_pretrained(folder)
    ours = built(case)
    fill(case, ours, folder)
    return peer, ours.eval()


def fill(case: Case, ours: nn.Module, folder: Path) -> None:
    """Every tensor by name; both sides must be used up."""
    load_into(dict(ours.named_parameters(remove_duplicate=False)), folder, case.keys, case.dropped)


def gradients_of(case: Case, peer: PreTrainedModel, folder: Path) -> dict[str, Tensor]:
    """The peer's gradients under our names and in our layout, zeros where there is none. The peer's weights are lost."""
    with torch.no_grad():
        for p in peer.parameters():
            p.copy_(torch.zeros_like(p) if p.grad is None else p.grad)
    peer.save_pretrained(folder)
    holder = built(case)
    fill(case, holder, folder)
    return {name: p.detach() for name, p in holder.named_parameters()}


def reference(case: Case, peer: PreTrainedModel, documents: Sequence[Document]) -> tuple[Tensor, Tensor]:
    """Summed loss, and the logits of the labelled rows: one document after another, by the peer."""
    losses, logits = [], []
    for d in documents:
        logits_TV = peer(**case.inputs(d)).logits[0]
        labels_T = torch.from_numpy(d.labels_T).long()
        losses.append(F.cross_entropy(logits_TV, labels_T, reduction="sum", ignore_index=IGNORE))
        logits.append(logits_TV[labels_T != IGNORE])
    return torch.stack(losses).sum(), torch.cat(logits)


def logits_of(model: nn.Module, batch: Batch) -> Tensor:
    """Logits of the same rows that the labels are for."""
    return model(replace(batch, labels_L=None)).out


def first(out: Tensor | tuple[Tensor, ...]) -> Tensor:
    """The stream that a block returns; blocks with experts also return where tokens went."""
    return out[0] if isinstance(out, tuple) else out


Run = tuple[Tensor, dict[str, Tensor]]


def run(model: nn.Module, documents: Sequence[Document], budget: Budget | None = None) -> Run:
    """Loss and gradients of one batch."""
    return run_batch(model, batch_of(documents, budget))


def run_batch(model: nn.Module, batch: Batch) -> Run:
    model.zero_grad()
    loss = model(batch).out
    loss.backward()
    return loss.detach(), gradients(model)


def one_by_one(model: nn.Module, documents: Sequence[Document]) -> Run:
    """The same, each document a batch of its own; gradients add up. The text-only ones never run the tower."""
    model.zero_grad()
    losses = [model(batch_of([d], None)).out for d in documents]
    torch.stack(losses).sum().backward()
    return torch.stack(losses).sum().detach(), gradients(model)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


# ---- comparing


def close(got: Tensor, want: Tensor, what: str, tolerance: float = 2e-5, floor: float = 1e-6) -> None:
    """Equal but for rounding, relative to the largest number of the reference or to `floor`."""
    assert got.shape == want.shape, f"{what}: {got.shape} and {want.shape}"
    if want.numel():
        error = (got - want).abs().max() / want.abs().max().clamp_min(floor)
        assert error < tolerance, f"{what}: off by {error:.2e} of its largest number"


def all_close(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float = 2e-5) -> None:
    """The same names, and `close` for each. A gradient that is zero but for rounding (a key's bias without rotary
    positions: softmax does not see it) is measured by a hundredth of the largest of all."""
    assert got.keys() == want.keys()
    floor = 0.01 * max(float(x.abs().max()) for x in want.values())
    for name, x in want.items():
        close(got[name], x, name, tolerance, floor)


def last_bits_moved(model: nn.Module) -> nn.Module:
    """A copy, each weight of which is the next larger or smaller float32."""
    moved = deepcopy(model)
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in moved.parameters():
            p.copy_(torch.nextafter(p, torch.where(torch.rand(p.shape, generator=rng) < 0.5, -torch.inf, torch.inf)))
    return moved


def tolerance_of(case: Case, model: nn.Module, batch: Batch) -> float:
    """The tolerance of `all_close`; of a model with experts, twice what moving each weight by its last bit moves the gradients, where that
    is more: a tiny one may be so badly conditioned that two right answers differ by more than rounding."""
    if not case.spec.language.experts:
        return 2e-5
    before, after = run_batch(model, batch)[1], run_batch(last_bits_moved(model), batch)[1]
    floor = 0.01 * max(float(x.abs().max()) for x in before.values())
    return max(2e-5, 2 * max(float((after[n] - x).abs().max() / x.abs().max().clamp_min(floor)) for n, x in before.items()))


def same(a: Run, b: Run) -> None:
    close(a[0], b[0], "loss")
    all_close(a[1], b[1])


# ---- images and documents


def image(key: str, rows: int, columns: int, patch: int, merge: int = 1, frames: int = 1) -> Image:
    """A random image of rows × columns patches."""
    pixels = rng_for(0, key).integers(0, 256, (rows * columns, 3 * frames * patch**2), dtype=np.uint8)
    cells = [(row, column) for row in range(0, rows, merge) for column in range(0, columns, merge)]
    places = [(row + y, column + x) for row, column in cells for y in range(merge) for x in range(merge)]
    return Image(key, pixels, np.array(places, np.int32), Grid(rows, columns), merge)


def document(
    name: str, *pieces: int | Image, positions: Literal["sequential", "grid"] = "sequential", image_token: int = IMAGE_TOKEN
) -> Document:
    """Pieces: a number of random text tokens, or an image. A third of the text tokens are targets."""
    rng = rng_for(0, "document " + name)
    tokens: list[int] = []
    visual: list[int] = []
    for piece in pieces:
        if isinstance(piece, Image):
            visual += range(len(tokens), len(tokens) + piece.tokens)
            tokens += [image_token] * piece.tokens
        else:
            tokens += rng.integers(0, IMAGE_TOKEN, piece).tolist()
    tokens_T = np.array(tokens, np.int32)
    labels_T = np.where(rng.random(len(tokens)) < 0.33, rng.integers(0, IMAGE_TOKEN, len(tokens)), IGNORE).astype(np.int32)
    labels_T[visual] = IGNORE
    labels_T[-1] = 7  # at least one
    images = tuple(p for p in pieces if isinstance(p, Image))
    where_T3 = grid_positions(pieces) if positions == "grid" else None
    return Document(name, tokens_T, labels_T, np.array(visual, np.int32), images, where_T3)


def grid_positions(pieces: Sequence[int | Image]) -> np.ndarray:
    """M-RoPE by hand: an image's tokens share the next time and count rows and columns from it; text continues after the largest."""
    where: list[tuple[int, int, int]] = []
    at = 0
    for piece in pieces:
        if isinstance(piece, Image):
            rows, columns = piece.grid.rows // piece.merge, piece.grid.columns // piece.merge
            where += [(at, at + row, at + column) for row in range(rows) for column in range(columns)]
            at += max(rows, columns)
        else:
            where += [(at + i,) * 3 for i in range(piece)]
            at += piece
    return np.array(where, np.int32)


def documents(cat: Image, dog: Image, cow: Image, **how: Any) -> tuple[Document, ...]:
    """Images in different turns, two neighbouring ones, a text alone, documents of equal length, a shared image."""
    return (
        document("two turns", 3, cat, 4, dog, 5, **how),
        document("text", 9, **how),
        document("neighbours", 2, dog, cow, 3, **how),
        document("twelve", 12, **how),
        document("also nine", 9, **how),
        document("shared", cat, 6, **how),
    )


def texts() -> tuple[Document, ...]:
    """Documents for a model without a tower: lengths that repeat, one token, a long one."""
    return tuple(document(f"{i}: {n} tokens", n) for i, n in enumerate((9, 1, 14, 9, 5, 33)))


def normalised(images: Sequence[Image], mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Patches of several images end to end, as float32 `(x/255 - mean)/std` of each channel: rows of channel, (frame,) y, x."""
    patches_P3x = torch.from_numpy(np.concatenate([i.patches_PC for i in images])).float().unflatten(1, (3, -1)) / 255
    mean_31, std_31 = (torch.tensor(x)[:, None] for x in (mean, std))
    return ((patches_P3x - mean_31) / std_31).flatten(1)


def token_inputs(d: Document) -> dict[str, Tensor]:
    """The text of one document, as every class of transformers takes it."""
    return {"input_ids": torch.from_numpy(d.tokens_T).long()[None]}
