"""Waste at several budgets, against the batches that the reader then gives."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eyeline.core.batch import Budget
from eyeline.core.image_rule import ImageRule
from eyeline.data.reader import Reader, reader_of, sizing_of
from eyeline.data.report import budgets
from eyeline.data.report.budgets import Load, Packing, packing, packings, suggest_budget
from eyeline.data.report.report import THOROUGH, data_report
from eyeline.data.sets import Data
from eyeline.data.sources.sources import Source
from eyeline.data.text.tokenizer import Encoder
from tests.data.later_batches import batches_of
from tests.data.llava_rows import row


@pytest.fixture
def sources(tmp_path: Path, draw: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> tuple[Source, ...]:
    """Two sets: 40 rows of 14 images, and 20 of text, of many lengths."""
    monkeypatch.setattr(budgets, "ROWS", (150, 400))
    for n in range(14):
        draw(f"{n}.png", seed=n)
    rng = np.random.default_rng(0)
    with_images = [
        row(f"q{n} " + "a " * int(rng.integers(1, 9)), f"{n % 14}.png", answer="b " * int(rng.integers(1, 30))) for n in range(40)
    ]
    texts = [row("c " * int(rng.integers(1, 40)), answer="d") for _ in range(20)]
    for name, rows in (("with_images", with_images), ("texts", texts)):
        (tmp_path / f"{name}.json").write_text(json.dumps(rows))
    return tuple(Source(path=str(tmp_path / f"{name}.json")) for name in ("with_images", "texts"))


def opened(sources: tuple[Source, ...], plain: Encoder, rule: ImageRule, **settings: Any) -> Reader:
    return reader_of(Data(**{"max_reject_rate": 1.0, "sources": sources, **settings}), plain, rule, 7)


ALL = frozenset({(0, 0), (1, 0)})


@pytest.mark.parametrize("settings", [{}, {"max_samples_per_image": 3}, {"mix": "interleave"}, {"validation_fraction": 0.2}])
@pytest.mark.parametrize("budget", [Budget(90, 80), Budget(60, 500), Budget(45, 16)])
def test_waste_is_that_of_the_packs_that_training_gets(
    sources: tuple[Source, ...], plain: Encoder, rule: ImageRule, settings: dict[str, Any], budget: Budget
) -> None:
    if settings.get("mix") == "interleave":
        sources = (sources[0], sources[1].model_copy(update={"weight": 2.0}))
    reader = opened(sources, plain, rule, **settings)
    found = packing(reader, ALL, budget)
    assert found is not None and found.settled
    load = found.load
    batches = batches_of(reader, budget, load.packs)
    assert sum(batch.counts.real for batch in batches) == load.token
    assert sum(batch.counts.supervised for batch in batches) == load.label
    assert sum(batch.counts.documents for batch in batches) == load.sample
    assert sum(batch.counts.slots for batch in batches) == load.packs * budget.tokens
    lengths = [np.diff(batch.cu_S1[: batch.counts.documents + 1].numpy().astype(np.int64)) for batch in batches]
    assert sum(int((n * (n + 1) // 2).sum()) for n in lengths) == load.pair
    assert sum(bool(batch.counts.patches) for batch in batches) == found.with_images.packs
    # an image that two visits of a pack show is planned twice and encoded once
    patches = sum(batch.counts.patches for batch in batches)
    assert patches <= load.patch <= 1.2 * patches
    assert load.patch_pair == 16 * load.patch
    assert found.waste == pytest.approx(1 - load.token / sum(batch.counts.slots for batch in batches))


def test_what_is_too_long_for_a_budget_is_counted(sources: tuple[Source, ...], plain: Encoder, rule: ImageRule) -> None:
    for too_long in ("reject", "drop_turns"):
        reader = opened(sources, plain, rule, overlong=too_long)
        sized = [sizing_of(reader, Budget(999, 999))(source, 0) for source in (0, 1)]
        longer = np.concatenate([s.tokens_R > 40 for s in sized])
        found = packing(reader, ALL, Budget(40, 16))
        assert found is not None
        assert 0 < longer.mean() < 1
        assert found.lost == pytest.approx(longer.mean())  # whole epochs are planned
        assert found.rows % 60 == 0


def test_few_rows_are_packed_as_an_epoch_that_ends(sources: tuple[Source, ...], plain: Encoder, rule: ImageRule) -> None:
    """Nothing is closed by then: the packs that are open are counted, and the page says so."""
    reader = opened(sources, plain, rule)
    found = packing(reader, ALL, Budget(4096, 4096))
    assert found is not None and not found.settled
    assert found.load.sample == found.rows == 180


def test_a_budget_that_holds_nothing_is_none(sources: tuple[Source, ...], plain: Encoder, rule: ImageRule) -> None:
    assert packing(opened(sources, plain, rule), ALL, Budget(2, 0)) is None
    shares = opened(sources, plain, rule, mix="interleave")
    assert packing(shares, ALL, Budget(90, 0)) is None  # no image fits, and that source has a share
    assert packing(opened(sources, plain, rule), ALL, Budget(90, 0)) is not None
    assert packing(opened(sources, plain, rule), frozenset(), Budget(90, 90)) is None


def test_budgets_start_with_the_stages_and_keep_its_ratio(
    sources: tuple[Source, ...], plain: Encoder, rule: ImageRule, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budgets, "ROWS", (1200, 2000))
    report = data_report(opened(sources, plain, rule), Budget(90, 160), THOROUGH)
    now, *others = report.budgets
    assert now.budget == Budget(90, 160)
    assert [p.budget.tokens for p in others] == [256, 512, 1024, 2048]  # of the last too few packs are closed to continue
    assert [p.settled for p in others] == [True, True, True, False]
    share = now.load.patch / now.load.token
    for other in others:
        assert other.budget.patches % 16 == 0
        assert other.budget.patches / other.budget.tokens == pytest.approx(1.25 * share, abs=16 / other.budget.tokens)
        assert other.patch_share < 0.9  # text fills a pack before images do


def made(tokens: int, waste: float, too_long: int = 0, settled: bool = True) -> Packing:
    return Packing(Budget(tokens, 0), Load(), Load(packs=1000, token=round(1000 * tokens * (1 - waste))), 10_000, too_long, settled)


@pytest.mark.parametrize(
    ("found", "best"),
    [
        ([(999, 0.05), (1000, 0.02), (2000, 0.009), (4000, 0.001)], 2000),  # the smallest that is good
        ([(1000, 0.001, 11), (2000, 0.009, 10), (4000, 0.0)], 2000),  # 0.1 % too long is allowed, more is not
        ([(1000, 0.04), (2000, 0.02), (4000, 0.03)], 2000),  # none is good: the least waste
        ([(1000, 0.02, 500), (2000, 0.04, 100), (4000, 0.05, 100)], 2000),  # none is good: first the least lost
        ([(1000, 0.03), (2000, 0.0, 0, False)], 1000),  # of few packs nothing is known
        ([(2000, 0.0, 0, False)], 2000),
    ],
)
def test_the_suggestion_by_its_rule(found: list[tuple], best: int) -> None:
    chosen = suggest_budget([made(*one) for one in found])
    assert chosen is not None
    assert chosen.budget.tokens == best
    assert suggest_budget([]) is None


def test_packings_of_nothing_usable_are_none(tmp_path: Path, plain: Encoder, rule: ImageRule) -> None:
    (tmp_path / "a.json").write_text(json.dumps([row("x", answer="")]))
    assert packings(opened((Source(path=str(tmp_path / "a.json")),), plain, rule), frozenset({(0, 0)}), Budget(90, 80)) == ()
