"""Ranks that share packs: one of them fetches, and all have the same batches and rejects, whatever goes wrong on one."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from eyeline.core.batch import Batch
from eyeline.core.errors import ElsewhereFailed, StorageFailed
from eyeline.core.files import read_lines
from eyeline.core.image_rule import ImageRule
from eyeline.core.world import World
from eyeline.data import loader
from eyeline.data.fetch import fetch
from eyeline.data.loader import training_steps
from eyeline.data.reader import Reader, reader_of
from eyeline.data.sets import Data
from eyeline.data.sources.sources import Source
from eyeline.data.text.tokenizer import Encoder
from eyeline.data.validation import validation_batches
from eyeline.parallel.join import sharing
from tests.data.failing_jobs import Mined
from tests.data.llava_rows import BUDGET
from tests.data.test_fetch import as_files, number, rows
from tests.ranks import on_ranks

pytestmark = pytest.mark.ranks


def plain_batch(batch: Batch) -> dict[str, Any]:
    """A batch as values that can be compared."""
    return {name: x.tolist() if hasattr(x, "tolist") else x for name, x in vars(batch).items()}


@pytest.fixture
def opened(tmp_path: Path, plain: Encoder, rule: ImageRule) -> Any:
    """Opens data of 12 rows. Image 7 has a mine, which hangs the decoder of a process that decodes it as `Mined`."""
    path = as_files(tmp_path, rows(12, {7: "hang"}))

    def make(world: World, group: World, **settings: Any) -> Reader:
        data = Data(**{"sources": (Source(path=path),), "max_reject_rate": 1.0, "validation_fraction": 0.3, **settings})
        return reader_of(data, plain, rule, 0, tmp_path / "run", world=world, group=group)

    (tmp_path / "run").mkdir()
    return make


def test_a_decode_that_times_out_on_one_rank_is_rejected_by_both(opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second rank would decode the image well: it never tries."""
    real = loader.fetched_in_order

    def work(world: World) -> Any:
        group = sharing(world, 2, 60).group
        assert (group.rank, group.size) == (world.rank, 2)
        decoded = Counter[int]()
        if world.rank == 0:
            monkeypatch.setattr(loader, "fetched_in_order", lambda asked, fetch, *rest: real(asked, Mined(fetch), *rest))  # type: ignore[arg-type]
        else:
            resize = fetch.resize
            monkeypatch.setattr(fetch, "resize", lambda *x: decoded.update([0]) or resize(*x))
        reader = opened(World(), group, workers=1 - world.rank, decode_timeout=0.7)
        steps = list(training_steps(reader, BUDGET, 2, 2))
        batches = [plain_batch(batch) for step in steps for batch in step.batches]
        validation = [plain_batch(batch) for batch in validation_batches(reader, BUDGET)]
        return batches, validation, [step.state for step in steps], reader.rejects.counts, decoded.total()

    first, second = on_ranks(2, work, timeout=120)
    assert first[:4] == second[:4]
    assert first[3] == {"decoder_hung": 1} and second[4] == 0
    assert [(number(line["id"]), line["cause"]) for line in read_lines(tmp_path / "run" / "rejects.jsonl")] == [(7, "decoder_hung")]
    assert len(first[0]) >= 4 and first[1]


def test_groups_have_packs_of_their_own(opened: Any) -> None:
    """Two groups of two ranks have what two ranks have that share nothing."""

    def work(count: int, world: World) -> Any:
        found = sharing(world, count, 60)
        reader = opened(found.across, found.group)
        return [plain_batch(batch) for step in training_steps(reader, BUDGET, 4, 1) for batch in step.batches]

    apart = on_ranks(2, lambda world: work(1, world))
    together = on_ranks(4, lambda world: work(2, world))
    assert apart[0] != apart[1]
    assert together == [apart[0], apart[0], apart[1], apart[1]]


def test_what_ends_the_rank_that_fetches_ends_the_others(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise StorageFailed("a disk of a test is gone")

    def work(world: World) -> str:
        if world.rank == 0:
            monkeypatch.setattr(fetch.Fetch, "__call__", broken)
        try:
            list(training_steps(opened(World(), sharing(world, 2, 60).group), BUDGET, 2, 1))
        except (StorageFailed, ElsewhereFailed) as error:
            return f"{type(error).__name__} {error.code}"
        return "nothing"

    assert on_ranks(2, work) == ["StorageFailed 5", "ElsewhereFailed 5"]
