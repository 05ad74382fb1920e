"""Documents -> Batch: laid end to end, every index made here, on the CPU."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eyeline.core.batch import IGNORE, Batch, Budget, Counts, Document, Image


def batch_of(documents: Sequence[Document], budget: Budget | None, next_tokens: bool = False) -> Batch:
    """Put documents end to end. With a budget, one last document without labels fills the tokens up; patches are not padded. Of no
    documents the batch is one token of padding.

    Images with equal keys are encoded once, and the documents that show them share their rows. `next_tokens` asks for the
    logits after the last token of each document, for generation, instead of the loss. Documents over the budget are a defect.
    """
    lengths = [len(d.tokens_T) for d in documents]
    real = sum(lengths)
    slots = budget.tokens if budget and documents else max(real, 1)
    assert real <= slots, f"{real} tokens do not fit a budget of {slots}"
    bounds = np.cumsum([0, *lengths, *([slots - real] if slots > real else [])]).astype(np.int32)
    spans = np.diff(bounds)

    tokens_T = np.zeros(slots, np.int64)
    labels_T = np.full(slots, IGNORE, np.int64)
    if documents:
        np.concatenate([d.tokens_T for d in documents], out=tokens_T[:real], casting="safe")
        np.concatenate([d.labels_T for d in documents], out=labels_T[:real], casting="safe")
    positions_T3 = np.repeat((np.arange(slots) - np.repeat(bounds[:-1], spans))[:, None], 3, 1)
    for start, d in zip(bounds, documents, strict=False):
        if d.positions_T3 is not None:
            positions_T3[start : start + len(d.tokens_T)] = d.positions_T3
    rows_L = bounds[1 : len(documents) + 1].astype(np.int64) - 1 if next_tokens else np.flatnonzero(labels_T != IGNORE)

    top_LK, logp_LK = _likely_of(documents, bounds, rows_L)
    images, visual_M, sources_M = _images_of(documents, bounds)
    patches_PC = _end_to_end([i.patches_PC for i in images]) if images else np.empty((0, 0), np.uint8)
    places_P2 = np.concatenate([i.places_P2 for i in images]) if images else np.empty((0, 2))
    cu_N1 = np.cumsum([0, *(len(i.patches_PC) for i in images)]).astype(np.int32)
    assert not budget or len(patches_PC) <= budget.patches, f"{len(patches_PC)} patches do not fit a budget of {budget.patches}"

    supervised = 0 if next_tokens else len(rows_L)
    counts = Counts(slots, real, len(visual_M), real - len(visual_M), supervised, len(documents), len(images), len(patches_PC))
    return Batch(
        tokens_T=_long(tokens_T),
        positions_T3=_long(positions_T3),
        real_T=torch.arange(slots) < real,
        cu_S1=torch.from_numpy(bounds),
        longest=int(spans.max(initial=0)),
        rows_L=_long(rows_L),
        labels_L=None if next_tokens else _long(labels_T[rows_L]),
        visual_M=_long(visual_M),
        sources_M=_long(sources_M),
        patches_PC=torch.from_numpy(patches_PC),
        places_P2=_long(places_P2),
        grids_N2=_long(np.array([i.grid for i in images], np.int64).reshape(-1, 2)),
        cu_N1=torch.from_numpy(cu_N1),
        longest_image=int(np.diff(cu_N1).max(initial=0)),
        counts=counts,
        ids=tuple(d.id for d in documents),
        has_images=bool(images),
        image_gradients=bool(images) and len(rows_L) > 0,
        top_LK=top_LK,
        logp_LK=logp_LK,
    )


def _images_of(documents: Sequence[Document], bounds: NDArray[np.int32]) -> tuple[list[Image], NDArray[Any], NDArray[Any]]:
    """The images of a batch, each once; the positions of visual tokens; and the row of all images' tokens that each shows."""
    unique = {image.key: image for d in documents for image in d.images}
    images = list(unique.values())
    starts = dict(zip(unique, np.cumsum([0, *(i.tokens for i in images)]).tolist(), strict=False))
    visual_M = np.concatenate([d.visual_M for d in documents] or [np.empty(0)])
    visual_M = visual_M + np.repeat(bounds[: len(documents)], [len(d.visual_M) for d in documents])
    shown = [(starts[i.key], i.tokens) for d in documents for i in d.images]
    first, length = np.array(shown, np.int64).reshape(-1, 2).T
    sources_M = np.arange(len(visual_M)) + np.repeat(first - (np.cumsum(length) - length), length)
    return images, visual_M, sources_M


def _long(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(x.astype(np.int64, copy=False))


def _end_to_end(arrays: Sequence[NDArray[np.uint8]]) -> NDArray[np.uint8]:
    """The arrays joined; not copied if they follow one another in the memory of one array."""
    whole = arrays[0].base
    if isinstance(whole, np.ndarray) and whole.ndim == 2 and all(a.base is whole and a.flags.c_contiguous for a in arrays):
        at = [a.__array_interface__["data"][0] for a in arrays]
        if all(start + a.nbytes == after for start, after, a in zip(at, at[1:], arrays, strict=False)):
            first = (at[0] - whole.__array_interface__["data"][0]) // arrays[0].strides[0]
            return whole[first : first + sum(map(len, arrays))]
    return np.concatenate(arrays)


def _likely_of(documents: Sequence[Document], bounds: NDArray[np.int32], rows_L: NDArray[np.int64]) -> tuple[Tensor | None, Tensor | None]:
    """The likeliest tokens of teachers, and their log probabilities, at the labelled rows. None where no document has some."""
    found = [(start, d.likely) for start, d in zip(bounds.tolist(), documents, strict=False) if d.likely is not None]
    if not found:
        return None, None
    most = max(likely.top_RK.shape[1] for _, likely in found)
    top_LK, logp_LK = np.zeros((len(rows_L), most), np.int64), np.full((len(rows_L), most), -np.inf, np.float32)
    for start, likely in found:
        at_R = np.searchsorted(rows_L, start + likely.rows_R.astype(np.int64))
        k = likely.top_RK.shape[1]
        top_LK[at_R, :k], logp_LK[at_R, :k] = likely.top_RK, likely.logp_RK
    return torch.from_numpy(top_LK), torch.from_numpy(logp_LK)
