"""`eyeline prepare --signals`: figures of every row, the same bytes however they were computed; duplicates that were put there by hand."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image as Pillow

from eyeline.core.errors import Refused, Stopped, StorageFailed
from eyeline.core.image_rule import ImageRule
from eyeline.data.containers import json_rows
from eyeline.data.signals.columns import MANIFEST, columns_key, key_of, open_signals
from eyeline.data.sources.sources import Rows, Source, open_source
from eyeline.data.text.tokenizer import Encoder
from eyeline.offline import signals
from eyeline.offline.manifests import manifests
from eyeline.offline.plan import existing_plan
from eyeline.offline.run import Where
from eyeline.offline.signals import Made, write_signals
from eyeline.offline.store import LocalStore
from tests.command import Command
from tests.data.llava_rows import row
from tests.offline.signal_files import files_of
from tests.train.recipe import tiny_recipe

LONG = "the quick brown fox jumps over the lazy dog and runs far away from all of the other animals in this old forest"


@pytest.fixture
def folder(tmp_path: Path, draw: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Twelve rows in several shards. One cannot be used; 4 equals 1 under another name of the image, 11 equals 8, 6 and 9 are like 2."""
    monkeypatch.setattr(json_rows, "SHARD_ROWS", 4)
    monkeypatch.setattr(json_rows, "SHARD_BYTES", 500)
    for n in range(3):
        draw(f"set/{n}.png", seed=n, width=20 + n, height=10)
    shutil.copy(tmp_path / "set" / "1.png", tmp_path / "set" / "copy.png")
    with Pillow.open(tmp_path / "set" / "2.png") as image:  # smooth, as photos are
        image.resize((88, 40), Pillow.Resampling.BICUBIC).save(tmp_path / "set" / "2.png")
        image.resize((176, 80), Pillow.Resampling.BICUBIC).save(tmp_path / "set" / "larger.png")
    rows = [
        row("say hello", answer="hello hello hello hello hello hello hello hello hello hello"),
        row("question one?", "1.png", answer="yes"),
        row("look: " + LONG, "2.png", answer=LONG),
        row("question one?", "0.png", answer="yes"),
        row("question one?", "copy.png", answer="yes"),
        row("question one?", "absent.png", answer="yes"),
        row("look: " + LONG, "larger.png", answer=LONG),
        row("two", "0.png", "2.png", answer="no"),
        row("question one?", "1.png", answer="no"),
        row("Look - " + LONG, "2.png", answer=LONG + "."),
        row("你好吗", answer="好"),
        row("question one?", "1.png", answer="no"),
    ]
    (tmp_path / "set" / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path / "set"


@pytest.fixture
def rows(folder: Path) -> Rows:
    found = open_source(Source(path=str(folder / "rows.jsonl")))
    assert len(found.shards) > 2
    return found


def table_of(rows: Rows, folder: Path) -> dict[str, list]:
    """All columns of a source, as lists."""
    found = open_signals(folder, 0)
    assert found is not None
    keys = [key_of(shard, rows.layout.identity, rows.root, rows.path) for shard in rows.shards]
    tables = [found.table(key) for key in keys]
    return {name: np.concatenate([table[name] for table in tables]).tolist() for name in ("id", "usable", *found.columns)}


def test_columns_by_hand(rows: Rows, plain: Encoder, rule: ImageRule, tmp_path: Path) -> None:
    made = write_signals([rows], plain, rule, tmp_path / "out", Where())
    assert made == Made(rows=12, usable=11, duplicate=2, near_duplicate=4)
    found = table_of(rows, tmp_path / "out")
    ids = [one.decode() for one in found["id"]]
    assert len({*ids}) == 12
    assert found["usable"] == [n != 5 for n in range(12)]
    assert np.isnan([found["width"][n] for n in (0, 5, 10)]).all()
    assert [found["width"][n] for n in (1, 2, 6, 7)] == [21, 88, 176, 20]
    assert found["aspect"][7] == 2.2
    assert [found["images"][n] for n in (0, 1, 7)] == [0, 1, 2]
    assert found["characters"][1] == len("question one?\nyes")
    assert found["repetition"][:2] == [0.5, 0]
    assert [found["script"][n] for n in (0, 5, 10)] == [b"latin", b"", b"cjk"]
    assert [n for n in range(12) if found["answer_in_question"][n]] == [2, 6, 9, 10]
    assert all(found["tokens"][n] > found["answer_tokens"][n] > 0 for n in range(12) if n != 5)
    assert {n: one.decode() for n, one in enumerate(found["duplicate"]) if one} == {4: ids[1], 11: ids[8]}
    assert {n: one.decode() for n, one in enumerate(found["near_duplicate"]) if one} == {4: ids[1], 6: ids[2], 9: ids[2], 11: ids[8]}


def test_every_mode_writes_the_same_bytes(
    rows: Rows, plain: Encoder, rule: ImageRule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_signals([rows], plain, rule, tmp_path / "one", Where())
    wanted = files_of(tmp_path / "one")
    assert len(wanted) == len(rows.shards) + 1
    assert write_signals([rows], plain, rule, tmp_path / "two", Where(2)) is not None
    assert files_of(tmp_path / "two") == wanted
    monkeypatch.setattr(signals, "ranges_of", lambda plan: 4)  # more ranges of keys find the same
    for shard in (1, 0, 1):
        made = write_signals([rows], plain, rule, tmp_path / "shards", Where(0, shard, 2))
    assert made is not None
    assert files_of(tmp_path / "shards") == wanted


def test_a_killed_job_resumes_to_the_same_bytes(
    rows: Rows, plain: Encoder, rule: ImageRule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_signals([rows], plain, rule, tmp_path / "one", Where())
    work = signals.WriteSignals.__call__

    def dies(self: signals.WriteSignals, partition, folder):
        if partition.number == 2:
            raise KeyboardInterrupt
        return work(self, partition, folder)

    with monkeypatch.context() as patch:
        patch.setattr(signals.WriteSignals, "__call__", dies)
        with pytest.raises(Stopped, match=r"stopped: 2 of \d+ partitions of signals are done, and the same command does the rest"):
            write_signals([rows], plain, rule, tmp_path / "two", Where())
    assert not (tmp_path / "two" / MANIFEST).exists()
    write_signals([rows], plain, rule, tmp_path / "two", Where())
    assert files_of(tmp_path / "two") == files_of(tmp_path / "one")
    plan = existing_plan(LocalStore(tmp_path / "two" / "job" / "signals"))
    assert plan is not None
    assert sum(one.rows + sum(one.counts.values()) for one in manifests(plan)) == 12
    assert {cause: n for one in manifests(plan) for cause, n in one.counts.items()} == {"missing_image": 1}


def test_damaged_columns_are_written_again(rows: Rows, plain: Encoder, rule: ImageRule, tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_signals([rows], plain, rule, out, Where())
    wanted = files_of(out)
    assert not list((out / "job" / "signals" / "files").glob("*"))  # side files go when all is done
    key = key_of(rows.shards[1], rows.layout.identity, rows.root, rows.path)
    (out / columns_key(key)).write_bytes(b"broken")
    with pytest.raises(StorageFailed, match=r"is damaged\. Run `eyeline prepare --signals`"):
        table_of(rows, out)
    write_signals([rows], plain, rule, out, Where())
    assert files_of(out) == wanted


def test_changed_data_are_refused_by_name(folder: Path, plain: Encoder, rule: ImageRule, tmp_path: Path) -> None:
    path = folder / "rows.jsonl"
    write_signals([open_source(Source(path=str(path)))], plain, rule, tmp_path / "out", Where())
    path.write_text(path.read_text().replace("say hello", "say hallo"))
    with pytest.raises(Refused, match=r"prepared from other inputs.*rows\.jsonl"):
        write_signals([open_source(Source(path=str(path)))], plain, rule, tmp_path / "out", Where())


def test_data_that_were_moved_keep_their_signals(rows: Rows, folder: Path, plain: Encoder, rule: ImageRule, tmp_path: Path) -> None:
    write_signals([rows], plain, rule, tmp_path / "out", Where())
    wanted = table_of(rows, tmp_path / "out")
    shutil.move(folder, tmp_path / "elsewhere")
    moved = open_source(Source(path=str(tmp_path / "elsewhere" / "rows.jsonl")))
    np.testing.assert_equal(table_of(moved, tmp_path / "out"), wanted)
    other = replace(moved, root=tmp_path)
    with pytest.raises(StorageFailed, match="columns"):  # other images
        table_of(other, tmp_path / "out")


def test_the_command_writes_and_says_what(eyeline: Command, tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(json.dumps(tiny_recipe(tmp_path)))
    asked = ("prepare", "tiny.yaml", "--stage", "0", "--signals", "--out", "signals")
    done = eyeline(*asked)
    assert (done.code, done.err) == (0, "")
    assert "signals: signals of 24 rows. 0 cannot be used" in done.out
    told = eyeline("report", "signals").out
    assert "signals: 1 of 1 partitions are done: 24 rows" in told
    assert "duplicates: 1 of 1 partitions are done: " in told and " 0 rows" not in told
    refused = eyeline(*asked, "--resize", "90")
    assert refused.code == 2
    assert "--resize changes archives, and --signals writes none" in refused.err
