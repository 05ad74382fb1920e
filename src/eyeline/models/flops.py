"""The arithmetic of a training step, counted exactly and from sizes alone.

Every module with weights has a method `count` next to its `forward`: it goes the same way, names each product of matrices and
what one row of it stands for, and says whether a gradient reaches its output. So what a frozen weight, a frozen tower or an
adapter saves follows from the model as it stands, and a new family counts itself. docs/flops.md derives an example a family.

Counted: products with weights, attention's two products over pairs, and the gated delta rule. Not counted: looking up embeddings,
norms, rotations, softmax, activations, short convolutions, weighting experts, the optimizer. Padding does not count.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast, get_args

import numpy as np
from torch import nn

from eyeline.core.batch import Batch
from eyeline.core.cost import Cost
from eyeline.core.image_rule import ImageRule

Where = Literal["vision", "projector", "language", "head"]
Rows = Literal["patch", "visual", "token", "label"]  # what a row of a product stands for; visual: a token that patches were merged to
Pairs = Literal["pair", "patch_pair"]  # a token and itself or an earlier one of its document; two patches of one image, or one twice


class Tally:
    """FLOPs of each part per row or pair, filled by `count` methods."""

    def __init__(self) -> None:
        self.where: Where = "language"  # the part that is being counted
        self.forward: Counter[tuple[Where, Rows | Pairs]] = Counter()
        self.backward: Counter[tuple[Where, Rows | Pairs]] = Counter()
        self.again: Counter[tuple[Where, Rows | Pairs]] = Counter()  # of forward, what is recomputed
        self._last: tuple[tuple[Where, Rows | Pairs], int] | None = None

    def product(self, rows: Rows, inputs: int, outputs: int, reached: bool, trains: bool, times: int = 1) -> bool:
        """rows × inputs by inputs × outputs, `times` times per row. `reached`: its input needs a gradient; `trains`: its weight does."""
        flops = 2 * inputs * outputs * times
        self.forward[self.where, rows] += flops
        self.backward[self.where, rows] += flops * (reached + trains)
        self._last = (self.where, rows), flops
        return reached or trains

    def attention(self, pairs: Pairs, heads: int, key_dim: int, value_dim: int, q: bool, k: bool, v: bool) -> bool:
        """softmax(q·kᵀ)·v. Backward: the gradient of v, of the softmax (if it leads on), of q and of k."""
        scores, mixed = 2 * heads * key_dim, 2 * heads * value_dim
        self.forward[self.where, pairs] += scores + mixed
        self.backward[self.where, pairs] += mixed * (v + (q or k)) + scores * (q + k)
        self._last = None
        return q or k or v

    def delta_rule(self, heads: int, key_dim: int, value_dim: int, q: bool, k: bool, v: bool, gates: bool) -> bool:
        """The gated delta rule token by token: a head's recurrent state is read with the key, corrected, and read with the query."""
        flops = 2 * heads * key_dim * value_dim
        state = k or v or gates
        self.forward[self.where, "token"] += 3 * flops
        self.backward[self.where, "token"] += flops * (2 * (state + k) + state + q)
        self._last = None
        return state or q

    def all_kept(self) -> None:
        """What follows the last product keeps its result for the backward pass: recomputing a block does not stop before it."""
        self._last = None

    @contextmanager
    def within(self, where: Where) -> Iterator[None]:
        before, self.where = self.where, where
        yield
        self.where = before

    def block(self, block: nn.Module, recompute: bool, reached: bool) -> bool:
        """`layers.run_block`. `recompute`: products, too, are made again. That stops at the last one, whose result nothing keeps."""
        before = self.forward.copy()
        reached = cast(Counted, block).count(self, reached)
        if recompute and reached:
            self.again += self.forward - before
            if self._last is not None:
                where, flops = self._last
                self.again[where] -= flops
        return reached


class Counted(Protocol):
    def count(self, tally: Tally, reached: bool) -> bool: ...


class CountedModel(Protocol):
    def count(self, tally: Tally, images: bool) -> None: ...


def any_trainable(*modules: nn.Module | None) -> bool:
    """True if one of these modules has a parameter of its own that trains."""
    return any(p.requires_grad for m in modules if m is not None for p in m.parameters(recurse=False))


@dataclass(frozen=True)
class Work:
    """The amounts that arithmetic grows with, of a batch, without padding."""

    patch: int
    patch_pair: int
    visual: int  # visual tokens that the projector makes; documents may share them
    token: int
    pair: int
    label: int


def work_of(batch: Batch, image: ImageRule | None) -> Work:
    """The work of a batch that is still on the host."""
    tokens_S = np.diff(batch.cu_S1[: batch.counts.documents + 1].numpy().astype(np.int64))
    patches_N = np.diff(batch.cu_N1.numpy().astype(np.int64))
    patches = int(patches_N.sum())
    return Work(
        patch=patches,
        patch_pair=int((patches_N**2).sum()),
        visual=patches // image.merge**2 if image else 0,
        token=int(tokens_S.sum()),
        pair=int((tokens_S * (tokens_S + 1) // 2).sum()),
        label=batch.counts.supervised,
    )


@dataclass(frozen=True)
class Flops:
    """The FLOPs of one or several batches."""

    forward: Mapping[Where, int]
    backward: Mapping[Where, int]
    again: int = 0  # done a second time in the backward pass, beyond what the model needs

    @property
    def by_part(self) -> dict[Where, int]:
        """The FLOPs that the model needs: forward and backward."""
        return {where: self.forward[where] + self.backward[where] for where in self.forward}

    @property
    def total(self) -> int:
        return sum(self.by_part.values())

    def __add__(self, other: "Flops") -> "Flops":
        return Flops(
            {where: self.forward[where] + other.forward[where] for where in self.forward},
            {where: self.backward[where] + other.backward[where] for where in self.forward},
            self.again + other.again,
        )


NONE = Flops(dict.fromkeys(get_args(Where), 0), dict.fromkeys(get_args(Where), 0))


@dataclass(frozen=True)
class Arithmetic:
    """A model's FLOPs per row and pair, as it now trains."""

    with_images: Tally  # of a batch with images
    texts: Tally  # of one without: the tower does not run, and no gradient comes from it
    image: ImageRule | None

    def of(self, batch: Batch) -> Flops:
        """One batch's, on the host. A batch without labels is not run."""
        return self.of_work(work_of(batch, self.image)) if batch.counts.supervised else NONE

    def of_work(self, work: Work) -> Flops:
        """The FLOPs of a batch with these contents."""
        tally = self.with_images if work.patch else self.texts

        def summed(counts: Counter[tuple[Where, Rows | Pairs]]) -> dict[Where, int]:
            out = dict(NONE.forward)
            for (where, unit), flops in counts.items():
                out[where] += flops * getattr(work, unit)
            return out

        return Flops(summed(tally.forward), summed(tally.backward), sum(summed(tally.again).values()))

    def cost(self) -> Cost:
        """What steps are planned by: forward, backward and what is recomputed."""
        tally = self.with_images
        whole = tally.forward + tally.backward + tally.again
        of = {unit: sum(flops for (_, u), flops in whole.items() if u == unit) for unit in (*get_args(Rows), *get_args(Pairs))}
        merged = self.image.merge**2 if self.image else 1
        return Cost(of["token"], of["pair"], of["label"], of["patch"] + -(-of["visual"] // merged), of["patch_pair"])


def count(model: nn.Module, image: ImageRule | None) -> Arithmetic:
    """Count a model on any device (meta suffices), frozen, adapted and recomputed as it stands."""
    tallies = {}
    for images in (False, True):
        tallies[images] = tally = Tally()
        cast(CountedModel, model).count(tally, images and image is not None)
    return Arithmetic(with_images=tallies[True], texts=tallies[False], image=image)


def along_depth(model: nn.Module, image: ImageRule | None, work: Work) -> tuple[int, list[int], int]:
    """The FLOPs of a batch of a language model's blocks, each with its part of what is recomputed; of all before them, and after."""

    def of(*tallied: tuple[Counter[tuple[Where, Rows | Pairs]], tuple[Where, ...] | None]) -> int:
        return sum(
            flops * getattr(work, unit)
            for counts, wanted in tallied
            for (where, unit), flops in counts.items()
            if wanted is None or where in wanted
        )

    tally = count(model, image).with_images
    ends: tuple[tuple[Where, ...], ...] = (("vision", "projector"), ("head",))
    before, after = (of(*((x, where) for x in (tally.forward, tally.backward, tally.again))) for where in ends)
    language, blocks = cast(Any, model).language, []
    for i, block in enumerate(language.blocks):
        own = Tally()
        own.block(block, language.recompute.repeats_products(i), reached=True)
        blocks.append(of((own.forward, None), (own.backward, None), (own.again, None)))
    return before, blocks, after


# Dense bfloat16 products with float32 accumulation, FLOPs per second, without sparsity, as the maker publishes them. NVIDIA's data sheets
# of the products; its Ampere (GA102), Ada and Blackwell white papers, appendices, for GeForce, RTX and L40S; AMD's data sheets of
# Instinct. Data sheets with an asterisk give twice as much, "with sparsity". Longer names first.
PEAKS = {
    "GB300": 2.5e15,
    "GB200": 2.5e15,
    "B300": 2.25e15,
    "B200": 2.25e15,
    "GH200": 9.89e14,
    "H200": 9.89e14,
    "H100 PCIe": 7.56e14,
    "H100 NVL": 8.35e14,
    "H100": 9.89e14,
    "H800": 9.89e14,
    "H20": 1.48e14,
    "A100": 3.12e14,
    "A800": 3.12e14,
    "A30": 1.65e14,
    "A40": 1.497e14,
    "A10G": 7.0e13,  # of Amazon's, with fewer units
    "A10": 1.25e14,
    "L40S": 3.62e14,
    "L40": 1.81e14,
    "L4": 1.21e14,
    "RTX PRO 6000 Blackwell Max-Q": 4.39e14,
    "RTX PRO 6000 Blackwell": 5.04e14,
    "RTX 6000 Ada": 3.64e14,
    "RTX A6000": 1.548e14,
    "RTX 5090": 2.095e14,
    "RTX 4090": 1.652e14,
    "RTX 3090": 7.1e13,
    "MI355X": 2.517e15,
    "MI350X": 2.307e15,
    "MI325X": 1.307e15,
    "MI300X": 1.307e15,
    "MI300A": 9.81e14,
    "MI250X": 3.83e14,
}
# Of GPUs without bfloat16, in float16: the data sheets of V100 and T4. The GPUs above compute as fast in float16.
FP16_PEAKS = {
    "V100S": 1.3e14,
    "V100-PCIE": 1.12e14,
    "V100": 1.25e14,
    "T4": 6.5e13,
}
_OTHER = r"(?! (Laptop|D|Ti|SUPER)\b)"  # a word after the name that makes it another product


def peak_of(device_name: str, precision: str = "bf16") -> float | None:
    """The peak of a device, by the name that the driver gives, in whole words; None where it is not known, as for a CPU, a part of a GPU
    (MIG), or in fp32."""
    if " MIG " in device_name:
        return None
    peaks = {"bf16": PEAKS, "fp16": PEAKS | FP16_PEAKS}.get(precision, {})
    return next((peak for name, peak in peaks.items() if re.search(rf"\b{re.escape(name)}\b{_OTHER}", device_name)), None)
