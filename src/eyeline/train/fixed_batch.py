"""Batches of fixed shapes, as a CUDA graph takes them: every array has a constant length, its capacity, and every number of the host is a
constant. A padded batch has the loss and the gradients of the one that it was made of.

Rows of padding change nothing: tokens belong to a document without labels, patches to images that no document shows, labels are IGNORE,
and visual tokens beyond the real ones go to the last PADDING rows, which no document of the data has. Each of these rows gets a gradient
of exactly zero.

Dims: T tokens  S documents  N images  P patches  C numbers per patch  M visual tokens  L labelled rows, here all of T
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from eyeline.core.batch import IGNORE, Batch, Budget, Counts
from eyeline.core.image_rule import ImageRule, Square, Tiles

PADDING = 8  # rows of T that are always padding: matrix kernels like multiples of 8
# Documents and images that a batch has room for. Attention starts blocks for each of them and the longest possible one, most of which end
# at once, so room for every number would cost more than the graph saves. A batch with more runs without a graph.
TOKENS_PER_DOCUMENT, PATCHES_PER_IMAGE, FEWEST = 32, 64, 16
PATCHES_OF_PADDING = 256  # of one image of padding, where images differ in size: attention within it costs their square


@dataclass(frozen=True)
class Capacities:
    """The length of every array."""

    tokens: int  # T, with PADDING
    documents: int  # S, with those of padding
    visual: int  # M
    patches: int  # P; 0: the batches have no images
    columns: int  # C
    images: int  # N, with those of padding
    longest_image: int
    padding_image: int  # patches of an image of padding
    merge: int  # r: r×r patches become one visual token

    @property
    def without_images(self) -> "Capacities":
        """The same for batches of text alone."""
        return replace(self, visual=0, patches=0, columns=0, images=0, longest_image=0, padding_image=0)

    def fit(self, batch: Batch) -> bool:
        """Return whether a batch has room."""
        images = len(batch.grids_N2) + -(-(self.patches - len(batch.patches_PC)) // max(self.padding_image, 1))
        return len(batch.ids) < self.documents and (not batch.has_images or images <= self.images)


def capacities_of(rule: ImageRule | None, budget: Budget) -> Capacities:
    """The capacities of all batches within a budget, of a model with this image rule."""
    documents = max(FEWEST, budget.tokens // TOKENS_PER_DOCUMENT)
    tokens = budget.tokens + PADDING
    if rule is None:
        return Capacities(tokens, documents, 0, 0, 0, 0, 0, 0, 1)
    columns, cell = 3 * rule.frames * rule.patch**2, rule.merge**2
    if isinstance(rule.resize, Square | Tiles):  # images of one size
        each = rule.units(1, 1)[0].grid.patches
        count = budget.patches // each
        return Capacities(tokens, documents, budget.tokens, count * each, columns, count, each, each, rule.merge)
    patches = budget.patches // cell * cell
    count, padding = max(FEWEST, patches // PATCHES_PER_IMAGE), PATCHES_OF_PADDING // cell * cell
    return Capacities(tokens, documents, budget.tokens, patches, columns, count, patches, padding, rule.merge)


def fixed(batch: Batch, to: Capacities) -> Batch:
    """The batch padded to its capacities, on the host; apart from patches and their draws, whose last rows may be anything."""
    assert to.fit(batch), f"{len(batch.ids)} documents and {len(batch.grids_N2)} images do not fit {to}"
    assert batch.labels_L is not None and batch.top_LK is None and batch.label_counts is None, "a batch of training, on one device"
    labelled_T = torch.zeros(to.tokens, dtype=torch.bool)
    labelled_T[batch.rows_L] = True
    bounds = batch.cu_S1[: len(batch.ids) + 1]
    padded = replace(
        batch,
        tokens_T=_padded(batch.tokens_T, to.tokens),
        positions_T3=_padded(batch.positions_T3, to.tokens),
        real_T=_padded(batch.real_T, to.tokens),
        cu_S1=_padded(bounds, to.documents + 1, to.tokens),
        longest=to.tokens,
        rows_L=torch.cat([batch.rows_L, (~labelled_T).nonzero()[:, 0]]),
        labels_L=_padded(batch.labels_L, to.tokens, IGNORE),
        draws_T2=None if batch.draws_T2 is None else _padded(batch.draws_T2, to.tokens),
        ahead=None,
    )
    return _with_images(padded, to) if batch.has_images else padded


def _with_images(batch: Batch, to: Capacities) -> Batch:
    """The batch with its images, and where they are shown, padded."""
    at_end = to.tokens - PADDING + torch.arange(to.visual) % PADDING
    anywhere = torch.arange(to.visual) % (to.patches // to.merge**2)
    ends = torch.arange(len(batch.patches_PC), to.patches, to.padding_image)[1:]  # of images of padding, but for the last
    side = round(to.longest_image**0.5) if to.longest_image == to.padding_image else 1
    return replace(
        batch,
        visual_M=torch.cat([batch.visual_M, at_end[len(batch.visual_M) :]]),
        sources_M=torch.cat([batch.sources_M, anywhere[len(batch.sources_M) :]]),
        places_P2=_padded(batch.places_P2, to.patches),
        grids_N2=_padded(batch.grids_N2, to.images, side),
        cu_N1=_padded(torch.cat([batch.cu_N1, ends.int()]), to.images + 1, to.patches),
        longest_image=to.longest_image,
    )


def _padded(x: Tensor, length: int, value: int = 0) -> Tensor:
    """`x` with rows of `value` after its own."""
    return torch.cat([x, x.new_full((length - len(x), *x.shape[1:]), value)])


def empty_batch(to: Capacities, device: torch.device, draws: bool) -> Batch:
    """A batch of these capacities on a device, to be copied into. `draws`: dropout needs those of the rows."""
    long, short = ({"dtype": dtype, "device": device} for dtype in (torch.int64, torch.int32))
    return Batch(
        tokens_T=torch.zeros(to.tokens, **long),
        positions_T3=torch.zeros(to.tokens, 3, **long),
        real_T=torch.zeros(to.tokens, dtype=torch.bool, device=device),
        cu_S1=torch.zeros(to.documents + 1, **short),
        longest=to.tokens,
        rows_L=torch.zeros(to.tokens, **long),
        labels_L=torch.zeros(to.tokens, **long),
        visual_M=torch.zeros(to.visual, **long),
        sources_M=torch.zeros(to.visual, **long),
        patches_PC=torch.zeros(to.patches, to.columns, dtype=torch.uint8, device=device),
        places_P2=torch.zeros(to.patches, 2, **long),
        grids_N2=torch.zeros(to.images, 2, **long),
        cu_N1=torch.zeros(to.images + 1, **short),
        longest_image=to.longest_image,
        counts=Counts.zero(),
        ids=(),
        has_images=to.patches > 0,
        image_gradients=to.patches > 0,
        draws_T2=torch.zeros(to.tokens, 2, **short) if draws else None,
        draws_P2=torch.zeros(to.patches, 2, **short) if draws else None,
    )
