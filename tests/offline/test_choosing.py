"""Rows chosen by signals: the same batches as of rows that are chosen by a category which says the same; counted, resumed, prepared."""

import json
import shutil
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from eyeline.core.batch import Budget
from eyeline.core.errors import Refused
from eyeline.core.image_rule import ImageRule
from eyeline.data.containers import json_rows
from eyeline.data.loader import training_steps
from eyeline.data.plan import blend
from eyeline.data.reader import Reader, reader_of
from eyeline.data.report.report import data_report
from eyeline.data.sets import Data, training_samples
from eyeline.data.sources.sources import Source, open_source
from eyeline.data.text.tokenizer import Encoder
from eyeline.data.validation import validation_batches
from eyeline.offline import prepare
from eyeline.offline.run import Where
from eyeline.offline.signals import write_signals
from tests.command import Command
from tests.data.llava_rows import ROWS, row
from tests.data.same_batches import assert_same
from tests.train.ends import end_of, losses
from tests.train.recipe import tiny_recipe, tiny_run

BUDGET = Budget(90, 80)
LONG = "a text that is much longer than the others, so it can be left out"
WHERE = "characters < 60 and not duplicate"
LEFT_OUT = 12


def kind_of(number: int) -> str:
    return "drop" if number % 3 == 2 or number in (1, 30) else "keep"


@pytest.fixture
def folder(tmp_path: Path, draw: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """31 rows in several shards, and signals of them next to the file. `where` leaves those of a kind, two of which cannot be used."""
    monkeypatch.setattr(json_rows, "SHARD_ROWS", 9)
    monkeypatch.setattr(json_rows, "SHARD_BYTES", 2000)
    monkeypatch.setattr(prepare, "PARTITION_BYTES", 20_000)
    for n in range(9):
        draw(f"set/{n}.png", seed=n)
    rows: list[dict[str, Any]] = [dict(one, kind=kind_of(n)) for n, one in enumerate(ROWS)]
    for n in range(31):
        if n % 3 == 2:
            rows[n] = dict(row(LONG, *rows[n]["image"] or (), answer=str(n)), kind="drop")
    for n, equal in ((1, 0), (30, 28)):  # the second of two
        rows[n] = dict(rows[equal], kind="drop")
    rows[4] = dict(row("absent", "absent.png"), kind="keep")
    rows[10] = dict(rows[10], conversations=1)
    assert sum(one["kind"] == "drop" for one in rows) == LEFT_OUT
    (tmp_path / "set" / "rows.json").write_text(json.dumps(rows))
    return tmp_path / "set"


Open = Callable[..., Reader]


@pytest.fixture
def open_reader(folder: Path, plain: Encoder, rule: ImageRule) -> Open:
    found = open_source(Source(path=str(folder / "rows.json")))
    write_signals([found], plain, rule, folder / "signals", Where())

    def make(source: dict[str, Any], **settings: Any) -> Reader:
        sources = (Source(path=str(folder / "rows.json"), **source), *settings.pop("more", ()))
        return reader_of(Data(**{"max_reject_rate": 1.0, "sources": sources, **settings}), plain, rule, 0)

    return make


BY_SIGNALS, BY_CATEGORY = {"where": WHERE}, {"categories": ("keep",)}

SETTINGS: dict[str, dict[str, Any]] = {
    "plainly": {},
    "shared images": {"max_samples_per_image": 3},
    "held out": {"validation_fraction": 0.4},
    "limited": {"limit": 7},
    "twice an epoch": {"repeat": 2},
    "interleaved": {"mix": "interleave"},
}


def batches(reader: Reader) -> list:
    return [batch for step in islice(training_steps(reader, BUDGET, 2, None), 14) for batch in step.batches]


@pytest.mark.parametrize("name", SETTINGS)
def test_batches_are_those_of_rows_chosen_by_category(open_reader: Open, tmp_path: Path, name: str) -> None:
    settings = dict(SETTINGS[name])
    of_source = {key: settings.pop(key) for key in ("limit", "repeat") if key in settings}
    by_signals = open_reader({**BY_SIGNALS, **of_source}, **settings)
    by_category = open_reader({**BY_CATEGORY, **of_source}, **settings)
    wanted = batches(by_category)
    assert len(wanted) > 10
    prepare.pack_offline(open_reader({**BY_SIGNALS, **of_source}, **settings), BUDGET, tmp_path / "out")
    stored = open_reader({**BY_SIGNALS, "signals": "/nowhere", **of_source}, prepared=str(tmp_path / "out"), **settings)
    for reader in (by_signals, stored):
        for one, two in zip(batches(reader), wanted, strict=True):
            assert_same(one, two)
        assert (reader.rejects.seen, reader.rejects.counts) == (by_category.rejects.seen, by_category.rejects.counts)
        for one, two in zip(validation_batches(reader, BUDGET), validation_batches(by_category, BUDGET), strict=True):
            assert_same(one, two)
    assert [s.id for s in training_samples(by_signals.data)] == [s.id for s in training_samples(by_category.data)]
    if name != "limited":
        both = by_signals.training.shards(0)
        held_out = sum(by_signals.validation.left_out(0, shard) for shard in range(both)) if "validation_fraction" in settings else 0
        assert by_signals.rejects.left_out == LEFT_OUT - held_out
        assert stored.rejects.left_out == by_signals.rejects.left_out
        assert f"where: left out {LEFT_OUT - held_out} of" in by_signals.rejects.summary()


@pytest.mark.parametrize("mix", ["concat", "interleave"])
def test_resuming_at_any_step_counts_and_gives_the_same(open_reader: Open, folder: Path, mix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blend, "MIXED_ROWS", (8, 8))  # a source's window continues in the next mixed one
    other = (Source(path=str(folder / "rows.json"), where="images == 0"),)
    reader = open_reader(BY_SIGNALS, mix=mix, more=other)
    steps = list(islice(training_steps(reader, BUDGET, 1, None), 40))
    assert steps[-1].state["rejects"]["where"] == reader.rejects.left_out == LEFT_OUT + 31 - 8
    for at in (0, 3, 8, 12, 25):
        again = open_reader(BY_SIGNALS, mix=mix, more=other)
        rest = list(islice(training_steps(again, BUDGET, 1, None, steps[at].state), 39 - at))
        assert [step.state for step in rest] == [step.state for step in steps[at + 1 :]]
        assert again.rejects.left_out == reader.rejects.left_out
    for changed, what in (({"where": "characters < 50"}, "sources"), ({}, "where, and signals"), (BY_CATEGORY, "where, and signals")):
        with pytest.raises(Refused, match=rf"other data or settings.*{what}"):
            next(training_steps(open_reader(changed, mix=mix, more=other), BUDGET, 1, None, steps[3].state))


def test_other_signals_are_noticed_on_resume(open_reader: Open, folder: Path, plain: Encoder) -> None:
    step = next(training_steps(open_reader(BY_SIGNALS), BUDGET, 1, None))
    shutil.rmtree(folder / "signals")
    write_signals([open_source(Source(path=str(folder / "rows.json")))], plain, None, folder / "signals", Where())
    with pytest.raises(Refused, match="where, and signals"):
        next(training_steps(open_reader(BY_SIGNALS), BUDGET, 1, None, step.state))


def test_the_report_counts_what_is_left_out(open_reader: Open) -> None:
    [found] = data_report(open_reader(BY_SIGNALS, validation_fraction=0.4), BUDGET).sources
    assert (found.where, found.left_out, found.rows) == (WHERE, LEFT_OUT, 31 - LEFT_OUT)
    [found] = data_report(open_reader(BY_CATEGORY), BUDGET).sources
    assert (found.where, found.left_out) == (None, 0)


def test_missing_signals_are_refused_with_the_command(open_reader: Open, folder: Path) -> None:
    make = r"Run `eyeline prepare RECIPE --signals --out \S+/set/signals`"
    shutil.move(folder / "signals", folder / "other")
    with pytest.raises(Refused, match=rf"rows.json: where: needs signals, and \S+ has none.*{make}"):
        open_reader(BY_SIGNALS)
    open_reader({**BY_SIGNALS, "signals": str(folder / "other")})
    shutil.move(folder / "other", folder / "signals")
    (folder / "rows.json").write_text((folder / "rows.json").read_text().replace("question 3", "question x"))
    with pytest.raises(Refused, match=rf"has no signals of rows\.json.*have changed.*{make}"):
        open_reader(BY_SIGNALS)


def test_nothing_left_is_refused(open_reader: Open) -> None:
    with pytest.raises(Refused, match=r"no sample (can be used|is left)"):
        next(training_steps(open_reader({"where": "width > 5000"}), BUDGET, 1, None))


def test_idle_signals_are_refused() -> None:
    with pytest.raises(ValueError, match="there is no where:"):
        Source(path="a.json", signals="b")


def test_recipe_with_where_end_to_end(eyeline: Command, tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path)
    for stage in recipe["stages"]:
        stage["data"]["sources"][0]["where"] = "images > 0 and not duplicate"
    (tmp_path / "tiny.yaml").write_text(json.dumps(recipe))
    refused = eyeline("train", "tiny.yaml")
    assert refused.code == 2
    assert f"Run `eyeline prepare RECIPE --signals --out {tmp_path}/data/signals`" in refused.err
    assert eyeline("prepare", "tiny.yaml", "--stage", "0", "--signals", "--out", "data/signals").code == 0
    checked = eyeline("check", "tiny.yaml")
    assert "where: images > 0 and not duplicate keeps" in checked.out, checked.err
    wrong = eyeline("check", "tiny.yaml", "stages.0.data.sources.0.where=tokns < 40")
    assert "no column 'tokns'. Did you mean 'tokens'?" in wrong.err
    done = eyeline("train", "tiny.yaml")
    assert done.code == 0
    assert "where: left out" in done.out + done.err
    assert eyeline("prepare", "tiny.yaml", "--stage", "0", "--out", "prepared").code == 0
    shutil.rmtree(tmp_path / "data" / "signals")
    stages = ["stages.0.data.prepared=prepared", "stages.1.data.sources.0.where=null"]
    with_prepared = eyeline("train", "tiny.yaml", *stages, "out=second")
    assert with_prepared.code == 0, with_prepared.err
    first = losses(tiny_run(tmp_path))
    second = losses(tiny_run(tmp_path, f"out={tmp_path}/second"))
    steps = recipe["stages"][0]["steps"]
    assert [first[n] for n in range(1, steps + 1)] == [second[n] for n in range(1, steps + 1)]
    assert end_of(tiny_run(tmp_path))
