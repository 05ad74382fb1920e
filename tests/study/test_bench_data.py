"""Benchmarks of packing and of reading data: the arithmetic by hand, and that all sides do the same work. No time is asserted."""

import pytest

from eyeline.core.errors import Refused
from eyeline.study.bench import packer


def test_decreasing_packs_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 10 tokens and 2 images."""
    monkeypatch.setattr(packer, "TOKENS", 10)
    monkeypatch.setattr(packer, "IMAGES", 2)
    assert packer.decreasing([(3, 2), (7, 0), (2, 1), (6, 0), (2, 0)]) == [[1, 0], [3, 2, 4]]  # 7 + 3, 6 + 2 + 2
    assert packer.decreasing([(3, 2), (7, 1), (2, 1), (6, 0), (2, 0)]) == [[1, 2], [3, 0], [4]]  # no 3 beside the 7: three images
    items = [(7, 0), (8, 0), (2, 0), (3, 2)]  # 8, then 7; the 3 fits the 7 alone, the 2 the 8
    assert packer.decreasing(items) == packer.decreasing(items, best=True) == [[1, 2], [0, 3]]
    items = [(6, 0), (7, 2), (5, 0), (3, 1), (1, 0)]  # 7 | 6 + 3 | 5: the first for the 1 is the 7, the best the 6 + 3
    assert packer.decreasing(items) == [[1, 4], [0, 3], [2]]
    assert packer.decreasing(items, best=True) == [[1], [0, 3, 4], [2]]


def test_samples_held_back_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of equal samples, four to a pack, the bin is closed when it is full: the fourth waits until then."""
    monkeypatch.setattr(packer, "TOKENS", 4)
    assert packer.most_held([(1, 0)] * 12) == 4


def test_all_sides_pack_everything_and_lost_samples_are_refused() -> None:
    made_of = packer.run(pairs=1, count=2000)
    assert made_of.comparisons[0].amount == 2000
    assert {f.name: f.met for f in made_of.facts}["fill, ours ÷ best known"] is not None
    with pytest.raises(Refused, match="not pack every sample once"):
        packer.check("made-up", [[0], [0]], [(1, 0), (1, 0)])
    with pytest.raises(Refused, match="10000 tokens"):
        packer.check("made-up", [[0, 1]], [(5000, 0), (5000, 0)])
