"""The records that join the pillars: Sample -> Document -> Batch. Nothing else crosses from data to a model.

Dims: T tokens (all documents end to end)  S documents  N images  P patches  C numbers per patch  M visual tokens  L labelled rows
"""

from dataclasses import dataclass, field, fields, replace
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eyeline.core.locations import Location, Stamp
from eyeline.core.randomness import rng_for

IGNORE = -100  # a label that asks for no loss
ODD = np.array([1, 0], np.int32)  # a bit of a row's draws: see kernels/dropout.py

Role = Literal["system", "user", "assistant"]
Ints = NDArray[np.int32]


@dataclass(frozen=True)
class Text:
    text: str


@dataclass(frozen=True)
class Span:
    """A part of a file: a member of an archive. `data` are its first bytes, or all, where they came along with something else."""

    path: Location
    start: int
    length: int
    stamp: Stamp  # of the whole file when it was opened
    data: bytes = field(default=b"", repr=False, compare=False)


@dataclass(frozen=True)
class EncodedImage:
    """An encoded image file: its location, or its bytes. `name` is what a message about it says."""

    name: str
    source: Location | Span | bytes


@dataclass(frozen=True)
class Video:
    """A video as the frames that were given of it, in order."""

    name: str
    frames: tuple[EncodedImage, ...]
    seconds: tuple[float, ...]  # when each frame is shown

    def __post_init__(self) -> None:
        assert len(self.frames) == len(self.seconds) > 0, f"{self.name}: {len(self.frames)} frames, {len(self.seconds)} times"


@dataclass(frozen=True)
class Likely:
    """A teacher's answer as tokens, and at each of them the k tokens that it found likeliest."""

    ids: tuple[int, ...]  # the answer's, with the token that ended it
    top: bytes  # int32, k of each
    logp: bytes  # their log probabilities: float16
    k: int


@dataclass(frozen=True)
class Message:
    role: Role
    parts: tuple[Text | EncodedImage | Video, ...]
    supervised: bool = True  # of an answer: whether it is in the loss. One that is not is shown like any other, and has no labels
    likely: Likely | None = None  # of an answer that a teacher wrote


@dataclass(frozen=True)
class Sample:
    """One conversation, before tokenising. Assistant messages are in the loss, but for those that are not `supervised`."""

    id: str  # unique in its source and stable over runs: "questions.json#17"
    messages: tuple[Message, ...]
    kind: str = ""  # a category that evaluations group by

    @property
    def media(self) -> tuple[EncodedImage | Video, ...]:
        """Stills and videos in order."""
        return tuple(p for m in self.messages for p in m.parts if not isinstance(p, Text))

    @property
    def images(self) -> tuple[EncodedImage, ...]:
        """Every image file in order, frames of videos included."""
        return tuple(p for item in self.media for p in (item.frames if isinstance(item, Video) else (item,)))


class Grid(NamedTuple):
    """Patches of one image: rows × columns."""

    rows: int
    columns: int

    @property
    def patches(self) -> int:
        return self.rows * self.columns


@dataclass(frozen=True, eq=False)
class Image:
    """One unit that the tower takes: a still, a tile of one, or a slice of a video. Upright, resized, in patches, not yet normalised.

    Patches are in *merge order*: the r×r patches that become one visual token follow one another (row by row inside the
    cell, cells row by row), so that merging is a plain reshape. `places_P2` says where each patch was.
    """

    key: str  # equal keys = equal pixels: such images are encoded once a batch
    patches_PC: NDArray[np.uint8]  # C = 3·frames·patch², ordered (channel, frame, row, column); a still is repeated over the frames
    places_P2: Ints  # row and column of each patch
    grid: Grid
    merge: int  # r: one visual token for r×r patches
    mark: str | None = None  # a control token that stands before its visual tokens: which tile it is

    @property
    def tokens(self) -> int:
        return self.grid.patches // self.merge**2


@dataclass(frozen=True, eq=False)
class LikelyRows:
    """A teacher's likeliest tokens at some positions of a document."""

    rows_R: Ints  # positions in T
    top_RK: Ints
    logp_RK: NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Document:
    """One sample after tokenising. `labels_T[t]` is the target *of* position t: there is no shift later."""

    id: str
    tokens_T: Ints
    labels_T: Ints  # IGNORE where nothing is supervised
    visual_M: Ints  # the position in T of each visual token, images in order, each row by row
    images: tuple[Image, ...]
    positions_T3: Ints | None = None  # time, row, column; None: 0, 1, 2 ... in all three
    likely: LikelyRows | None = None  # of a teacher, where the stage learns from its probabilities

    def __post_init__(self) -> None:
        assert len(self.tokens_T) == len(self.labels_T), f"{self.id}: {len(self.tokens_T)} tokens, {len(self.labels_T)} labels"
        assert self.positions_T3 is None or self.positions_T3.shape == (len(self.tokens_T), 3), f"{self.id}: {self.positions_T3.shape}"
        assert len(self.visual_M) == sum(i.tokens for i in self.images), f"{self.id}: visual places and image tokens differ"


@dataclass(frozen=True)
class Counts:
    """The contents of a batch, as host integers: every rate is computed from these."""

    slots: int  # T: tokens with padding
    real: int  # tokens that are not padding = visual + text
    visual: int
    text: int
    supervised: int  # labelled rows
    documents: int
    images: int  # encoded ones: an image that several documents share counts once
    patches: int

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @staticmethod
    def zero() -> "Counts":
        return Counts(0, 0, 0, 0, 0, 0, 0, 0)


@dataclass(frozen=True, eq=False)
class Batch:
    """Documents laid end to end: the only layout there is. Padding is one last document without labels.

    Every index array is made on the CPU by `data/fetch/batches.py`, so that the model never searches for placeholder ids and
    never waits for the device to count them.
    """

    tokens_T: Tensor  # int64
    positions_T3: Tensor  # int64: time, row, column; all three equal for text
    real_T: Tensor  # bool: no padding
    cu_S1: Tensor  # int32: document bounds, 0 ... T
    longest: int  # tokens of the longest document
    rows_L: Tensor  # int64: the rows of T whose logits are wanted (the labelled rows, in training)
    labels_L: Tensor | None  # int64: their targets; None asks for logits
    visual_M: Tensor  # int64: where in T each visual token goes
    sources_M: Tensor  # int64: which row of the merged tower output it is; documents may share rows
    patches_PC: Tensor  # uint8
    places_P2: Tensor  # int64: row and column of each patch in its image
    grids_N2: Tensor  # int64: rows and columns of each image, in patches
    cu_N1: Tensor  # int32: image bounds in P
    longest_image: int  # patches of the largest image
    counts: Counts
    ids: tuple[str, ...]  # sample ids, for blame; padding has none
    has_images: bool  # images are shown on some rank: the tower runs, on no patches where there are none here
    # images are shown by a batch with labels, on some rank. Without, tower and projector run without gradients: these would be zeros,
    # and zeros are not none, since momentum and weight decay would move what did not train
    image_gradients: bool
    pack: int = 0  # its number among the packs of its step on all ranks
    draws_T2: Tensor | None = None  # int32: random numbers of each token, which dropout's masks are made of; None: nothing is dropped
    draws_P2: Tensor | None = None  # int32: of each patch
    top_LK: Tensor | None = None  # int64: a teacher's likeliest tokens at each labelled row; None: no document of the batch has some
    logp_LK: Tensor | None = None  # float32: their log probabilities; -inf where there is none
    label_counts: tuple[int, ...] | None = None  # labelled rows of each rank that shares the vocabulary; None: none does
    ahead: "Batch | None" = field(default=None, repr=False)  # on the device, as much of it as was copied there before its turn

    def with_draws(self, seed: int, step: int) -> "Batch":
        """The same batch with the draws of dropout for its rows."""
        draws = (
            torch.from_numpy(rng_for(seed, purpose, step, self.pack).integers(-(2**31), 2**31, (rows, 2), np.int32) | ODD)
            for purpose, rows in (("dropout", len(self.tokens_T)), ("dropout of patches", len(self.patches_PC)))
        )
        return replace(self, **dict(zip(("draws_T2", "draws_P2"), draws, strict=True)))

    def to(self, device: torch.device | str) -> "Batch":
        """The same batch with every tensor on `device` (copies do not block). What was copied ahead is there."""
        named = {f.name: x for f in fields(self) if isinstance(x := getattr(self, f.name), Tensor)}
        there = {name: getattr(self.ahead, name, None) for name in named}
        moved = {name: x.to(device, non_blocking=True) if (known := there[name]) is None else known for name, x in named.items()}
        return replace(self, **moved, ahead=None)


@dataclass(frozen=True)
class Budget:
    """Capacities of one micro-batch. The packer enforces them."""

    tokens: int  # T
    patches: int  # P; an image that documents of the batch share counts once
