"""The reader: every sample as often as it should be, the same steps in any process and from any state."""

import errno
import json
import os
import pickle
import pickletools
import re
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

import numpy as np
import pydantic
import pytest
import torch

from eyeline.core.batch import Batch, Budget
from eyeline.core.errors import Refused, StorageFailed, TooManyRejects
from eyeline.core.image_rule import ImageRule
from eyeline.data.counts import count_steps
from eyeline.data.fetch import fetch
from eyeline.data.images import patches
from eyeline.data.images.image_files import hold_out_draw
from eyeline.data.images.patches import Augment
from eyeline.data.loader import check_rejects_at_end, training_steps
from eyeline.data.plan.blend import Side
from eyeline.data.reader import Reader, reader_of
from eyeline.data.sets import Data, training_texts
from eyeline.data.sources.sources import Source
from eyeline.data.text.tokenizer import Encoder
from eyeline.data.validation import validation_batches
from tests.data.llava_rows import BUDGET, ROWS, row, write
from tests.data.same_batches import assert_same, assert_same_steps, flat
from tests.processes import children


@pytest.fixture
def folder(tmp_path: Path, draw: Callable[..., Path]) -> Path:
    """A LLaVA set of 31 rows and nine images; one file for each image."""
    for n in range(9):
        draw(f"set/{n}.png", seed=n)
    (tmp_path / "set" / "rows.json").write_text(json.dumps(ROWS))
    return tmp_path / "set"


@pytest.fixture
def open_reader(folder: Path, plain: Encoder, rule: ImageRule) -> Callable[..., Reader]:
    def make(seed: int = 0, out: Path | None = None, **settings: Any) -> Reader:
        settings.setdefault("sources", (Source(path=str(folder / "rows.json")),))
        return reader_of(Data(**{"max_reject_rate": 1.0, **settings}), plain, rule, seed, out)

    return make


def ids(batches: list[Batch]) -> Counter[int]:
    return Counter(int(id.partition("#")[2]) for batch in batches for id in batch.ids)


def rows_on(side: Side) -> list[int]:
    """The rows that are on a side, of data of one shard."""
    return np.flatnonzero(side.kept_rows(0, 0)).tolist()


# Orders and epochs


@pytest.mark.parametrize("share", [1, 2, 3, 7])
def test_every_row_once_an_epoch(open_reader, share: int) -> None:
    reader = open_reader(max_samples_per_image=share)
    for epochs in (1, 3):
        batches = flat(training_steps(reader, BUDGET, 1, epochs))
        assert ids(batches) == Counter(dict.fromkeys(range(len(ROWS)), epochs))
        for batch in batches:
            assert batch.counts.slots == len(batch.tokens_T) == BUDGET.tokens
            assert batch.counts.patches <= BUDGET.patches


def test_epochs_differ_and_seeds_differ(open_reader) -> None:
    def order(seed: int, epochs: int) -> list[str]:
        return [id for batch in flat(training_steps(open_reader(seed), BUDGET, 1, epochs)) for id in batch.ids]

    first, both = order(0, 1), order(0, 2)
    assert order(0, 1) == first
    assert order(1, 1) != first
    assert both[len(first) :] != first


def test_repeats_and_kinds_make_a_mixture(open_reader, folder: Path) -> None:
    rows = [dict(r, kind="text" if r["image"] is None else "image") for r in ROWS]
    write(folder, rows)
    path = str(folder / "rows.json")
    reader = open_reader(sources=(Source(path=path, categories=("text",), repeat=3), Source(path=path, categories=("image",))))
    wanted = Counter({n: 3 if r["kind"] == "text" else 1 for n, r in enumerate(rows)})
    assert ids(flat(training_steps(reader, BUDGET, 1, 1))) == wanted


def test_rows_of_one_image_share_it(open_reader) -> None:
    alone, shared = (flat(training_steps(open_reader(max_samples_per_image=share), BUDGET, 1, 1)) for share in (1, 3))
    images = sum(batch.counts.images for batch in shared)
    assert images == 8 + 2 * 2  # eight images for 24 rows, and the two rows that show two images
    assert sum(batch.counts.images for batch in alone) > images
    documents = sum(batch.counts.documents for batch in shared)
    assert documents == len(ROWS)
    assert sum(batch.counts.visual for batch in shared) == 4 * (24 + 4)  # each document still has its own visual tokens


def test_image_group_over_the_budget_is_split(open_reader) -> None:
    assert ids(flat(training_steps(open_reader(max_samples_per_image=3), Budget(90, 32), 1, 1))) == Counter(
        range(len(ROWS))
    )  # patches count once
    tight = Budget(32, 32)  # two of an image's three rows have room
    assert ids(flat(training_steps(open_reader(max_samples_per_image=3, overlong="drop_turns"), tight, 1, 2))) == ids(
        flat(training_steps(open_reader(max_samples_per_image=1, overlong="drop_turns"), tight, 1, 2))
    )


def test_a_long_sample_arrives_shrunk(open_reader, folder: Path, plain: Encoder) -> None:
    write(folder, [row("q1", answer="a1", more=("q2", "a2", "q3 " * 50, "a3"))])
    [batch] = flat(training_steps(open_reader(overlong="drop_turns"), BUDGET, 1, 1))
    assert plain.decode(batch.tokens_T[: batch.counts.real].tolist(), special=True) == "q1\na1<|endoftext|>q2\na2<|endoftext|>"


def test_steps_are_counted_before(open_reader) -> None:
    reader = open_reader(max_samples_per_image=2)
    for micro_batches in (1, 2, 3):
        for epochs in (1, 2):
            steps = list(training_steps(reader, BUDGET, micro_batches, epochs))
            assert count_steps(reader, BUDGET, micro_batches, epochs) == len(steps)
            assert all(len(step.batches) == micro_batches for step in steps[:-1])
            assert 1 <= len(steps[-1].batches) <= micro_batches


def test_each_step_says_how_many_epochs_are_done(open_reader) -> None:
    """Also after a resume, and in each epoch from its own start; not where sources have epochs of their own."""
    found = list(training_steps(open_reader(), BUDGET, 1, 2))
    epochs = [step.epoch for step in found]
    assert epochs == sorted(epochs) and epochs[0] > 0 and epochs[-1] == 2.0
    for at in (0, 1, len(found) // 2, len(found) - 2):
        assert [step.epoch for step in training_steps(open_reader(), BUDGET, 1, 2, found[at].state)] == epochs[at + 1 :]
    assert next(training_steps(open_reader(mix="interleave"), BUDGET, 1, None)).epoch is None


def test_epochs_are_those_of_the_samples_that_were_given(open_reader) -> None:
    """A shard is planned before its first pack: what counts is the share of samples that were given, not of packs that are closed."""
    reader = open_reader()
    given = list(accumulate(sum(len(batch.ids) for batch in step.batches) for step in training_steps(reader, BUDGET, 1, 1)))
    assert [step.epoch for step in training_steps(reader, BUDGET, 1, 1)] == pytest.approx([done / given[-1] for done in given])


def test_accumulation_only_groups_the_same_batches(open_reader) -> None:
    single = flat(training_steps(open_reader(), BUDGET, 1, 2))
    for n, (one, two) in enumerate(zip(single, flat(training_steps(open_reader(), BUDGET, 3, 2)), strict=True)):
        assert_same(replace(one, pack=n % 3), two)


# Resume


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_it_resumes_exactly_after_every_step(open_reader, folder: Path, micro_batches: int) -> None:
    """With rejects of both kinds, visits that are split, augmentation, and packs carried over epochs."""
    (folder / "2.png").unlink()
    (folder / "5.png").write_bytes((folder / "5.png").read_bytes()[:200])
    settings = {"max_samples_per_image": 3, "augment": Augment(flip=True, shift=2)}
    budget = Budget(40, 32)
    whole = list(training_steps(open_reader(**settings), budget, micro_batches, 2))
    assert len(whole) >= 8
    assert any(step.state["bins"] for step in whole)
    assert whole[-1].state["rejects"]["counts"].keys() == {"missing_image", "broken_image"}
    for at in range(len(whole)):
        state = json.loads(json.dumps(whole[at].state))
        rest = list(training_steps(open_reader(**settings), budget, micro_batches, 2, state))
        assert_same_steps(rest, whole[at + 1 :])


def test_endless_stream_continues_over_epochs(open_reader) -> None:
    steps = training_steps(open_reader(), BUDGET, 1, None)
    some = [next(steps) for _ in range(40)]
    assert some[-1].state["epoch"] >= 2
    again = training_steps(open_reader(), BUDGET, 1, None, some[19].state)
    assert_same_steps([next(again) for _ in range(20)], some[20:])


def test_a_state_of_other_data_is_refused(open_reader, folder: Path) -> None:
    def state_of(reader: Reader, budget: Budget = BUDGET) -> dict[str, Any]:
        return next(training_steps(reader, budget, 1, None)).state

    state = state_of(open_reader())
    others = {
        "seed": (open_reader(seed=1), BUDGET),
        "share": (open_reader(max_samples_per_image=2), BUDGET),
        "validation_fraction": (open_reader(validation_fraction=0.3), BUDGET),
        "policy": (open_reader(overlong="drop_turns"), BUDGET),
        "budget": (open_reader(), Budget(91, 80)),
    }
    write(folder, ROWS[1:])
    others["rows"] = (open_reader(), BUDGET)
    for reader, budget in others.values():
        with pytest.raises(Refused, match="saved for other data"):
            next(training_steps(reader, budget, 1, None, state))
    with pytest.raises(Refused, match="version 99"):
        next(training_steps(open_reader(), BUDGET, 1, None, state | {"version": 99}))


def test_a_set_that_moved_is_the_same(open_reader, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "elsewhere")
    sources = (Source(path=str(tmp_path / "elsewhere" / "rows.json")),)
    here, there = open_reader(validation_fraction=0.3), open_reader(validation_fraction=0.3, sources=sources)
    assert rows_on(here.validation) == rows_on(there.validation)
    assert_same_steps(list(training_steps(here, BUDGET, 1, 1)), list(training_steps(there, BUDGET, 1, 1)))


# Workers


def test_what_workers_get_does_not_import_transformers(plain: Encoder) -> None:
    """That would cost every worker seconds."""
    names = {instruction[1] for instruction in pickletools.genops(pickle.dumps(plain)) if isinstance(instruction[1], str)}
    assert not {name for name in names if name.startswith("transformers")}
    assert pickle.loads(pickle.dumps(plain)).ids("what is it?") == plain.ids("what is it?")


def test_workers_change_nothing(open_reader, folder: Path, tmp_path: Path) -> None:
    (folder / "2.png").unlink()
    (folder / "5.png").write_bytes((folder / "5.png").read_bytes()[:200])
    settings = {"max_samples_per_image": 3, "augment": Augment(flip=True, shift=2)}
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    here = training_steps(open_reader(out=tmp_path / "here", **settings), BUDGET, 2, None)
    there = training_steps(open_reader(out=tmp_path / "there", workers=2, **settings), BUDGET, 2, None)
    before = children()  # of other tests, which may be ending
    wanted = [next(here) for _ in range(9)]
    assert wanted[-1].state["epoch"] >= 2
    assert_same_steps([next(there) for _ in range(9)], wanted)
    assert len(children() - before) == 2
    there.close()
    assert children() <= before
    assert (tmp_path / "here" / "rejects.jsonl").read_text() == (tmp_path / "there" / "rejects.jsonl").read_text()


# Rejects


def test_a_bad_row_leaves_the_plan_before_it_is_made(open_reader, folder: Path, tmp_path: Path) -> None:
    write(folder, [*ROWS[:10], {"conversations": 1}, row("no file", "absent.png"), row("long", answer="x" * 500), *ROWS[10:]])
    reader = open_reader(out=tmp_path)
    steps = list(training_steps(reader, BUDGET, 1, 1))
    assert ids(flat(steps)) == Counter(set(range(len(ROWS) + 3)) - {10, 11, 12})
    lines = [json.loads(line) for line in (tmp_path / "rejects.jsonl").read_text().splitlines()]
    assert {(line["row"], line["cause"], line["field"]) for line in lines} == {
        (10, "wrong_type", "conversations"),
        (11, "missing_image", "image"),
        (12, "too_long", "messages"),
    }
    assert steps[-1].state["rejects"] == {"seen": len(ROWS) + 3, "counts": {"wrong_type": 1, "missing_image": 1, "too_long": 1}}


def test_an_image_that_breaks_at_fetching_keeps_its_place(open_reader, folder: Path) -> None:
    """Its rows stay in the batch, grey and without labels; everything else is as it was."""
    sound = list(training_steps(open_reader(max_samples_per_image=3), BUDGET, 1, 1))
    (folder / "5.png").write_bytes((folder / "5.png").read_bytes()[:200])
    broken = list(training_steps(open_reader(max_samples_per_image=3), BUDGET, 1, 1))
    hit = {f"rows.json#{n}" for n in (15, 16, 17)}
    masked = 0
    for one, two in zip(flat(sound), flat(broken), strict=True):
        assert one.ids == two.ids
        assert torch.equal(one.tokens_T, two.tokens_T)
        spans = dict(zip(one.ids, zip(one.cu_S1.tolist(), one.cu_S1.tolist()[1:], strict=False), strict=False))
        for id, (start, end) in spans.items():
            labels = [[r for r in b.rows_L.tolist() if start <= r < end] for b in (one, two)]
            assert labels[1] == ([] if id in hit else labels[0])
            masked += id in hit
        if not hit & set(one.ids):
            assert_same(one, two)
        else:
            assert (two.patches_PC == 128).all(1).sum() == 16
    assert masked == 3
    assert broken[-1].state["rejects"]["counts"] == {"broken_image": 3}


def test_too_many_rejects_stop_the_run_at_the_same_step(open_reader, folder: Path, tmp_path: Path) -> None:
    rows = [row("fine", answer="x" * 60) if n % 4 else row("no file", "absent.png") for n in range(400)]
    write(folder, rows)

    def until_it_stops(**settings: Any) -> list[dict[str, Any]]:
        steps = training_steps(open_reader(max_reject_rate=0.2, **settings), BUDGET, 1, None)
        done = []
        with pytest.raises(TooManyRejects, match=r"missing_image \d+× \(the file does not exist\)"):
            done += (step.state for step in islice(steps, 1000))  # more than all rows: else they are endless where nothing stops them
        return done

    steps = until_it_stops(out=tmp_path)
    assert len(steps) > 5
    assert steps == until_it_stops()
    assert len((tmp_path / "rejects.jsonl").read_text().splitlines()) >= 20
    assert flat(training_steps(open_reader(max_reject_rate=0.4), BUDGET, 1, 1))


def test_few_rejects_count_at_the_end_of_an_epoch(open_reader, folder: Path) -> None:
    write(folder, [*ROWS, row("no file", "absent.png")])
    with pytest.raises(TooManyRejects, match="1 of 32 samples"):
        list(training_steps(open_reader(max_reject_rate=0.01), BUDGET, 1, 1))


@pytest.mark.parametrize("rows", [3, 1000])
def test_a_set_without_one_usable_row_ends(open_reader, folder: Path, rows: int) -> None:
    write(folder, [row("no file", "absent.png")] * rows)
    with pytest.raises(TooManyRejects, match=f"{rows:,} of {rows:,} samples"):
        next(training_steps(open_reader(max_reject_rate=0.5), BUDGET, 1, None))
    with pytest.raises(Refused, match="no sample can be used"):
        next(training_steps(open_reader(max_reject_rate=1.0), BUDGET, 1, None))


def spoilt(folder: Path, rows: int, missing: int = 0, broken: int = 0, name: str = "rows.json") -> str:
    """Rows with an image each, of which the first ones cannot be used: absent, or truncated behind a good header."""
    (folder / "broken.png").write_bytes((folder / "5.png").read_bytes()[:200])
    images = ["absent.png"] * missing + ["broken.png"] * broken
    (folder / name).write_text(json.dumps([row(f"question {n}", images[n] if n < len(images) else "0.png") for n in range(rows)]))
    return str(folder / name)


def read_through(reader: Reader, epochs: int | None, steps: int = 10**9, state: dict[str, Any] | None = None) -> dict[str, Any]:
    """Read as a stage does, a number of steps or epochs, then check the rate of rejects. The last state."""
    for _, step in zip(range(steps), training_steps(reader, BUDGET, 2, epochs, state), strict=False):
        state = step.state
    assert state is not None
    check_rejects_at_end(reader, state)
    return state


@pytest.mark.parametrize("kind", ["missing", "broken"])
@pytest.mark.parametrize("seed", range(3))
def test_reject_rate_is_of_different_rows_whatever_the_order(open_reader, folder: Path, kind: str, seed: int) -> None:
    """2 of 200 are 1.0 %, in any order, after any step, in any epoch; 3 of 200 are not."""
    path = spoilt(folder, 200, **{kind: 2})
    reader = open_reader(seed, sources=(Source(path=path),), max_reject_rate=0.01)
    assert read_through(reader, 3)["rejects"] == {"seen": 200, "counts": {f"{kind}_image": 2}}
    for steps in (1, 10, 30):
        read_through(open_reader(seed, sources=(Source(path=path),), max_reject_rate=0.01), None, steps)
    spoilt(folder, 200, **{kind: 3})
    with pytest.raises(TooManyRejects, match=r"3 of 200 samples were rejected \(1\.5%\)"):
        read_through(open_reader(seed, sources=(Source(path=path),), max_reject_rate=0.01), 1)


@pytest.mark.parametrize("settings", [{"repeat": 4}, {"repeat": 1}])
def test_row_of_a_repeated_source_counts_once(open_reader, folder: Path, settings: dict[str, Any]) -> None:
    """Counted by hand: 40 + 60 rows, 2 absent and 1 broken among those that come four times an epoch. Resumed after each step, too."""
    sources = (Source(path=spoilt(folder, 40, 2, 1, "few.json"), **settings), Source(path=spoilt(folder, 60)))

    def reader() -> Reader:
        return open_reader(sources=sources, max_reject_rate=0.03)

    whole = [step.state for step in training_steps(reader(), BUDGET, 2, 2)]
    assert whole[-1]["rejects"]["seen"] == 100
    assert whole[-1]["rejects"]["counts"] == {"missing_image": 2, "broken_image": 1}
    for at in range(0, len(whole), 3):
        assert read_through(reader(), 2, state=json.loads(json.dumps(whole[at])))["rejects"] == whole[-1]["rejects"]
    with pytest.raises(TooManyRejects, match="3 of 100"):
        read_through(open_reader(sources=sources, max_reject_rate=0.029), 2)


def test_row_of_a_blend_by_shares_counts_in_its_sources_first_epoch(open_reader, folder: Path) -> None:
    """The small source comes again many times before the large one is through."""
    sources = (Source(path=spoilt(folder, 10, 1, 1, "few.json"), weight=3.0), Source(path=spoilt(folder, 90)))
    state = read_through(open_reader(sources=sources, mix="interleave", max_reject_rate=0.02), None, 100)
    assert state["rejects"] == {"seen": 100, "counts": {"missing_image": 1, "broken_image": 1}}


def test_reject_rate_of_adjacent_bad_rows_is_over_all_rows(open_reader, folder: Path) -> None:
    """A file of 150 rows without an image is 10 % of the data, whether it comes first or last."""
    sources = (Source(path=spoilt(folder, 150, missing=150, name="bad.json")), Source(path=spoilt(folder, 1350)))
    for seed in range(2):
        assert read_through(open_reader(seed, sources=sources, max_reject_rate=0.1), None, 200)["rejects"]["seen"] > 0
        with pytest.raises(TooManyRejects, match="150 of 1,500"):
            read_through(open_reader(seed, sources=sources, max_reject_rate=0.09), 1)


def test_reject_rate_includes_the_last_packs(open_reader, folder: Path) -> None:
    """What decoding finds in the packs that are still open when the last row has been planned."""
    for broken, rows in ((45, 90), (3, 3)):
        with pytest.raises(TooManyRejects, match=f"[0-9,]+ of {rows:,} samples"):
            read_through(open_reader(sources=(Source(path=spoilt(folder, rows, broken=broken)),), max_reject_rate=0.1), 1)
    with pytest.raises(Refused, match="no sample can be used: all 3"):
        read_through(open_reader(sources=(Source(path=spoilt(folder, 3, broken=3)),), max_reject_rate=1.0), 1)


@pytest.mark.parametrize(("rows", "broken", "steps", "ends"), [(2000, 2000, 1, True), (2000, 1000, 4, True), (400, 4, 8, False)])
def test_reject_rate_of_a_stage_that_ends_within_its_data(
    open_reader, folder: Path, rows: int, broken: int, steps: int, ends: bool
) -> None:
    reader = open_reader(sources=(Source(path=spoilt(folder, rows, broken=broken)),), max_reject_rate=0.01)
    if ends:
        with pytest.raises(TooManyRejects, match="samples were rejected"):
            read_through(reader, None, steps)
    else:
        read_through(reader, None, steps)


def test_endless_bad_data_end_the_run_early(open_reader, folder: Path) -> None:
    """Long before all rows were read: three times what the limit allows of all are enough."""
    reader = open_reader(sources=(Source(path=spoilt(folder, 2000, broken=1500)),), max_reject_rate=0.05)
    with pytest.raises(TooManyRejects) as raised:
        read_through(reader, 1)
    rejected, _, seen = str(raised.value).split()[:3]
    assert 200 < int(rejected) < 230 and int(seen) < 400


def test_a_file_that_changes_under_the_run_stops_it(open_reader, folder: Path) -> None:
    lines = folder / "rows.jsonl"
    lines.write_text("\n".join(json.dumps(r) for r in ROWS))
    reader = open_reader(sources=(Source(path=str(lines)),))
    count_steps(reader, BUDGET, 1, 1)
    lines.write_text("x" * 10000)
    with pytest.raises(StorageFailed, match=r"rows\.jsonl has changed since it was opened"):
        next(training_steps(reader, BUDGET, 1, None))


def test_a_store_that_fails_stops_the_run(open_reader, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No sample is to blame for an input error. That workers hand it on: tests/data/test_workers.py."""
    write(folder, [row("what?", "failing.png")])
    stat = os.stat

    def failing(path: Any, **options: Any) -> os.stat_result:
        if str(path).endswith("failing.png"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return stat(path, **options)

    monkeypatch.setattr("eyeline.data.images.image_files.os.stat", failing)
    reader = open_reader(sources=(Source(path=str(folder / "rows.json")),), read_retries=0)
    with pytest.raises(StorageFailed, match=r"^could not read .*failing\.png: Input/output error"):
        next(training_steps(reader, BUDGET, 1, None))
    assert reader.rejects.counts == {}


# Validation


def test_held_out_images_are_never_trained_on(open_reader) -> None:
    reader = open_reader(validation_fraction=0.4, max_samples_per_image=3)
    trained, validated = flat(training_steps(reader, BUDGET, 1, 2)), list(validation_batches(reader, BUDGET))
    assert set(ids(trained)) | set(ids(validated)) == set(range(len(ROWS)))
    assert not set(ids(trained)) & set(ids(validated))
    assert set(ids(validated).values()) == {1}
    shown = [{name for n in ids(batches) for name in ROWS[n]["image"] or []} for batches in (trained, validated)]
    held = {f"{n // 3}.png" for n in ids(validated) if n < 24}
    assert held
    assert not held & shown[0]
    assert reader.validates
    assert not open_reader().validates


def test_what_is_held_out_depends_on_nothing_but_the_image(open_reader, folder: Path) -> None:
    one, other = open_reader(validation_fraction=0.4, seed=1), open_reader(validation_fraction=0.4, seed=2, max_samples_per_image=2)
    assert rows_on(one.validation) == rows_on(other.validation)
    more = set(rows_on(open_reader(validation_fraction=0.7).validation))
    assert set(rows_on(one.validation)) < more
    before = {json.dumps(ROWS[n]["image"]) for n in rows_on(one.validation) if ROWS[n]["image"]}
    write(folder, ROWS[::-1])
    images = {
        json.dumps(ROWS[::-1][n]["image"]) for n in rows_on(open_reader(validation_fraction=0.4).validation) if ROWS[::-1][n]["image"]
    }
    assert images == before


def test_the_held_out_share_is_about_what_was_asked() -> None:
    draws = [hold_out_draw([f"/images/{n}.png"]) for n in range(4000)]
    assert 0.08 < sum(d < 0.1 for d in draws) / 4000 < 0.12
    assert hold_out_draw(["/images/1.png", "/images/2.png"]) == min(hold_out_draw(["/images/1.png"]), hold_out_draw(["/images/2.png"]))


def test_validation_is_complete_repeatable_and_as_it_is(open_reader, folder: Path, tmp_path: Path) -> None:
    held_out = (Source(path=str(folder / "rows.json")),)
    reader = open_reader(validation=held_out, augment=Augment(flip=True, shift=3), max_samples_per_image=3, out=tmp_path)
    first, second = list(validation_batches(reader, BUDGET)), list(validation_batches(reader, BUDGET))
    assert ids(first) == Counter(range(len(ROWS)))
    assert sum(b.counts.slots - b.counts.real for b in first) == 0
    for one, two in zip(first, second, strict=True):
        assert_same(one, two)
    plainly = open_reader(validation=held_out, max_samples_per_image=3)
    for one, two in zip(first, validation_batches(plainly, BUDGET), strict=True):
        assert_same(one, two)
    assert reader.rejects.seen == 0


def test_validation_rejects_are_written_not_counted(open_reader, folder: Path, tmp_path: Path) -> None:
    (folder / "2.png").unlink()
    (folder / "5.png").write_bytes(b"cut")
    reader = open_reader(validation=(Source(path=str(folder / "rows.json")),), out=tmp_path)
    for _ in range(2):
        assert sum(b.counts.supervised > 0 for b in validation_batches(reader, BUDGET)) > 0
    rows = [json.loads(line)["row"] for line in (tmp_path / "rejects.jsonl").read_text().splitlines()]
    assert sorted(rows) == [6, 7, 8, 15, 16, 17]
    assert reader.rejects.counts == {}


def test_validation_without_one_usable_row_is_refused(open_reader, folder: Path) -> None:
    (folder / "bad.json").write_text(json.dumps([row("x", "absent.png")]))
    with pytest.raises(Refused, match="no validation sample can be used"):
        list(validation_batches(open_reader(validation=(Source(path=str(folder / "bad.json")),)), BUDGET))


def test_kinds_that_are_not_there_are_refused_on_either_side(open_reader, folder: Path) -> None:
    source = Source(path=str(folder / "rows.json"), categories=("none",))
    for settings in ({"sources": (source,)}, {"validation": (source,)}):
        with pytest.raises(Refused, match=r"rows\.json has no samples of kind none; it has \(none\)"):
            open_reader(**settings)


def test_settings_that_contradict_are_refused(folder: Path, open_reader) -> None:
    source = Source(path=str(folder / "rows.json"))
    with pytest.raises(pydantic.ValidationError, match="validation_fraction and validation both set"):
        Data(sources=(source,), validation=(source,), validation_fraction=0.1)
    with pytest.raises(pydantic.ValidationError, match="leaves nothing to train on"):
        Data(sources=(source,), validation_fraction=1)
    with pytest.raises(Refused, match="holds out none of 31 samples"):
        open_reader(validation_fraction=1e-9)


@pytest.mark.parametrize(("fraction", "images"), [(1e-9, 2), (0.999999, 2), (1e-9, 4), (0.999999, 1)])
def test_advised_validation_fraction_holds_out_so_many_images(folder: Path, open_reader, fraction: float, images: int) -> None:
    write(folder, [row(f"question {n}?", f"{n % images}.png") for n in range(12)])
    with pytest.raises(Refused, match=r"holds out (none|all) (of )?12 samples") as refused:
        open_reader(validation_fraction=fraction)
    if images == 1:
        assert "these cannot be divided. Leave it out, and give validation: sources of its own" in str(refused.value)
        return
    advised = re.search(r"(Raise|Lower) it: (\S+) holds out (\d) images? with all samples that show", str(refused.value))
    assert advised is not None
    assert (advised[1], int(advised[3])) == ("Raise" if fraction < 0.5 else "Lower", images // 2)
    held_out = rows_on(open_reader(validation_fraction=float(advised[2])).validation)
    assert len({n % images for n in held_out}) == images // 2


# Images


def test_augmentation_follows_the_image_group(open_reader, folder: Path) -> None:
    def pixels(seed: int, epochs: int) -> list[bytes]:
        write(folder, [row("a", "0.png")])
        return [
            b.patches_PC.numpy().tobytes() for b in flat(training_steps(open_reader(seed, augment=Augment(shift=4)), BUDGET, 1, epochs))
        ]

    assert pixels(0, 1) == pixels(0, 1)
    assert pixels(0, 1) != pixels(1, 1)
    write(folder, [row("a", "0.png")])
    [both] = flat(training_steps(open_reader(0, augment=Augment(shift=4)), BUDGET, 1, 2))
    one, two = both.patches_PC[:16], both.patches_PC[16:]
    assert both.counts.images == 2  # two visits, two augmentations, in one batch
    assert not torch.equal(one, two)


def test_remembering_images_changes_nothing(open_reader, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = list(training_steps(open_reader(augment=Augment(flip=True)), BUDGET, 1, 2))
    monkeypatch.setattr(fetch, "KEPT_IMAGE_BYTES", 0)
    assert_same_steps(list(training_steps(open_reader(augment=Augment(flip=True)), BUDGET, 1, 2)), kept)


def test_images_that_come_again_are_decoded_once(open_reader, folder: Path, draw, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until others have taken their room; and one that a single row shows is not remembered."""
    lines = [row(f"q {n}", f"{n % 3}.png") for n in range(12)] + [row("alone", "4.png")]
    (folder / "rows.jsonl").write_text("\n".join(json.dumps(r) for r in lines))
    decoded = Counter[str]()
    upright = patches.upright
    monkeypatch.setattr(patches, "upright", lambda image: decoded.update([image.name]) or upright(image))

    def counts(share: int) -> list[int]:
        decoded.clear()
        list(training_steps(open_reader(sources=(Source(path=str(folder / "rows.jsonl")),), max_samples_per_image=share), BUDGET, 1, 2))
        return sorted(decoded.values())

    assert counts(1) == [1, 1, 1, 2]
    assert counts(4) == [2, 2, 2, 2]  # all rows of an image are together: it does not come again
    monkeypatch.setattr(fetch, "KEPT_IMAGE_BYTES", 2 * 32 * 32 * 3)
    assert counts(1) > [1, 1, 2, 2]


def test_a_text_model_rejects_images(folder: Path, plain: Encoder) -> None:
    reader = reader_of(Data(sources=(Source(path=str(folder / "rows.json")),), max_reject_rate=1), plain, None, 0)
    assert set(ids(flat(training_steps(reader, BUDGET, 1, 1)))) == set(range(24, 29))


def test_texts_for_a_tokenizer_leave_out_what_is_held_out(open_reader) -> None:
    reader = open_reader(validation_fraction=0.4)
    texts = list(training_texts(reader.data))
    answers = {f"answer {n}" for n in range(24) if n in rows_on(reader.training)}
    assert {t for t in texts if t.startswith("answer")} == answers
    assert "compare" in texts or not {29, 30} & set(rows_on(reader.training))
