"""Facts: what a model states about itself, in strings, numbers and pure functions.

One vocabulary serves freezing, LoRA, learning rates, checkpoints, preprocessing and sharding, so that none of them knows a
model by name. Patterns are `fnmatch` patterns of module or tensor names, where `*` does not cross a dot.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from eyeline.core.image_rule import ImageRule

Part = Literal["vision", "projector", "language"]
PARTS: tuple[Part, ...] = ("vision", "projector", "language")
Split = Literal["split_out", "split_in"]  # a weight [out, in] cut along its outputs or its inputs under tensor parallelism


@dataclass(frozen=True)
class Cost:
    """What a document costs a model, in whole FLOPs (or any other unit): steps are dealt to ranks by it."""

    token: int  # the language model on a token
    pair: int  # its attention on a pair of tokens, the earlier and the later (a token and itself included)
    label: int  # its head on a token that is learned
    patch: int  # the tower, and the projector, on a patch
    patch_pair: int  # the tower's attention on a pair of patches of one image


@dataclass(frozen=True)
class PartFacts:
    """What one part states about itself, by names relative to its root."""

    linears: Mapping[str, str]  # short name (q, k, v, o, ...) -> pattern: what LoRA may wrap
    blocks: str | None = None  # pattern of its blocks
    splits: Mapping[str, Split] = field(default_factory=dict)  # pattern of a linear layer -> how tensor parallelism cuts it
    seams: tuple[str, ...] = ()  # patterns of weightless modules that parallelism may replace
    experts: str | None = None  # pattern of its mixtures of experts


@dataclass(frozen=True)
class Facts:
    """What one built model states about itself."""

    parts: Mapping[Part, str]  # part -> the submodule that is its root; together they hold every parameter
    blocks: Mapping[Part, str]  # part -> pattern of its blocks: units of recomputation and, later, of sharding
    linears: Mapping[Part, Mapping[str, str]]  # part -> short name (q, k, v, o, ...) -> pattern: what LoRA may wrap
    splits: Mapping[str, Split]  # pattern of a linear layer -> how tensor parallelism cuts it
    seams: tuple[str, ...]  # patterns of weightless modules that parallelism may replace
    image: ImageRule | None  # None: a text-only model
    vocab_size: int  # rows of the embedding: no token id may reach it
    max_positions: int  # positions the language model was made for
    experts: str | None = None  # pattern of its mixtures of experts
    unused: tuple[str, ...] = ()  # modules that no output depends on: kept so that exports are whole, never trained


def facts_of(
    parts: Mapping[Part, PartFacts], image: ImageRule | None, vocab_size: int, max_positions: int, unused: tuple[str, ...] = ()
) -> Facts:
    """The facts of a model whose parts are the submodules of their own names."""
    return Facts(
        parts={part: part for part in parts},
        blocks={part: f"{part}.{x.blocks}" for part, x in parts.items() if x.blocks is not None},
        linears={part: {name: f"{part}.{pattern}" for name, pattern in x.linears.items()} for part, x in parts.items()},
        splits={f"{part}.{pattern}": split for part, x in parts.items() for pattern, split in x.splits.items()},
        seams=tuple(f"{part}.{seam}" for part, x in parts.items() for seam in x.seams),
        image=image,
        vocab_size=vocab_size,
        max_positions=max_positions,
        experts=next((f"{part}.{x.experts}" for part, x in parts.items() if x.experts is not None), None),
        unused=unused,
    )


def splits_of(linears: Mapping[str, str]) -> dict[str, Split]:
    """How tensor parallelism cuts these layers: those that return to the residual stream (o, down) along their inputs, the others along
    their outputs."""
    return {pattern: "split_in" if pattern.endswith((".o", ".down")) else "split_out" for pattern in linears.values()}


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern of Facts names this module or tensor: `*` stands for one piece between dots."""
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"[^.]+"), name) is not None


def part_of(facts: Facts, name: str) -> Part:
    """The part that owns a parameter. Exactly one does; anything else is a defect of the family."""
    owners: list[Part] = [part for part, root in facts.parts.items() if name.startswith(root + ".")]
    assert len(owners) == 1, f"{name} belongs to {owners or 'no part'}"
    return owners[0]
