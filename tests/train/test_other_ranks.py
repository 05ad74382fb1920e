"""Ranks whose code, libraries, recipe, tokenizer or folder are not those of rank 0 are named before the first step."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eyeline.core.errors import Refused
from eyeline.train.environment import versions
from eyeline.train.start import refuse_other_ranks
from tests.train.recipe import tiny_run

OWN = [*versions(), "recipe", "tokenizer", "run folder"]


def refuse(folder: Path, there: dict[str, str]) -> None:
    """Two ranks of which the second says `there` where the first says its own."""
    world: Any = SimpleNamespace(size=2, gather_patiently=lambda own: [own, own | there])
    home: Any = SimpleNamespace(encoder=SimpleNamespace(identity="bpe"), id="a run")
    refuse_other_ranks(tiny_run(folder), home, world)


def test_ranks_that_are_alike_start(tmp_path: Path) -> None:
    refuse(tmp_path, {})
    assert {"eyeline", "code of eyeline", "Python", "torch", "tokenizer"} <= set(OWN)


def test_each_difference_of_a_rank_is_named_with_what_rank_0_has(tmp_path: Path) -> None:
    for name in OWN:
        with pytest.raises(Refused, match=f"rank 1 is not like rank 0: {name} is another there and .+ on rank 0. Start all ranks with"):
            refuse(tmp_path, {name: "another"})
