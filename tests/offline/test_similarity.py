"""Similarity of images and answers: transformers' own numbers, the same bytes however they were computed, and rows chosen by them."""

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from eyeline.bundle import two_towers
from eyeline.bundle.two_towers import TwoTowers, open_two_towers
from eyeline.core.errors import Refused, StorageFailed
from eyeline.core.image_rule import ImageRule
from eyeline.data.containers import json_rows
from eyeline.data.signals.columns import key_of, open_signals
from eyeline.data.sources.sources import Rows, Source, open_source
from eyeline.data.text.tokenizer import Encoder
from eyeline.offline import similarity
from eyeline.offline.run import Where
from eyeline.offline.signals import write_signals
from tests.bundle.towers import save_towers, wanted_scores
from tests.command import Command
from tests.data.llava_rows import row
from tests.offline.alarmed import AlarmedTowers
from tests.offline.signal_files import files_of
from tests.train.recipe import tiny_recipe

ANSWERS = ["a circle", "It is BLUE", "how many corners has the square in this image, and which colour is it?"]


@pytest.fixture
def towers(tmp_path: Path) -> TwoTowers:
    return open_two_towers(save_towers(tmp_path / "towers"), "cpu", None)


@pytest.fixture
def rows(tmp_path: Path, draw: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Rows:
    """Thirteen rows in several shards: of one image, of two, without, with an absent one; they share images and answers."""
    monkeypatch.setattr(json_rows, "SHARD_ROWS", 4)
    monkeypatch.setattr(json_rows, "SHARD_BYTES", 500)
    monkeypatch.setattr(similarity, "BLOCK", 3)
    monkeypatch.setattr(similarity, "BATCH", 2)
    for n in range(5):
        draw(f"set/{n}.png", seed=n, width=20 + 9 * n, height=16)
    made = [row(f"question {n}?", f"{n % 5}.png", answer=ANSWERS[n % 3]) for n in range(10)]
    made += [row("two", "0.png", "3.png", answer=ANSWERS[0]), row("none", answer="no"), row("absent", "absent.png")]
    (tmp_path / "set" / "rows.jsonl").write_text("\n".join(map(json.dumps, made)))
    return open_source(Source(path=str(tmp_path / "set" / "rows.jsonl")))


def column(rows: Rows, folder: Path, name: str = "similarity") -> list[float]:
    found = open_signals(folder, 0)
    assert found is not None
    keys = [key_of(shard, rows.layout.identity, rows.root, rows.path) for shard in rows.shards]
    return np.concatenate([found.table(key)[name] for key in keys]).tolist()


@pytest.mark.parametrize("naflex", [False, True], ids=["square", "NaFlex"])
def test_vectors_are_those_of_transformers(tmp_path: Path, rows: Rows, plain: Encoder, rule: ImageRule, naflex: bool) -> None:
    folder = save_towers(tmp_path / "other", naflex)
    towers = open_two_towers(folder, "cpu", None)
    images = [tmp_path / "set" / f"{n}.png" for n in range(5)]
    wanted_IJ = wanted_scores(folder, images, ANSWERS)
    assert np.ptp(wanted_IJ) > 0.2  # it tells them apart
    write_signals([rows], plain, rule, tmp_path / "out", Where(), towers)
    got = column(rows, tmp_path / "out")
    wanted = [wanted_IJ[n % 5, n % 3] for n in range(10)] + [min(wanted_IJ[0, 0], wanted_IJ[3, 0]), np.nan, np.nan]
    np.testing.assert_allclose(got, wanted, atol=2e-5)


def test_every_mode_writes_the_same_with_a_worker_killed(
    rows: Rows, plain: Encoder, rule: ImageRule, towers: TwoTowers, tmp_path: Path
) -> None:
    write_signals([rows], plain, rule, tmp_path / "one", Where(), towers)
    wanted = files_of(tmp_path / "one")
    alarm = tmp_path / "alarm"
    alarm.touch()
    assert write_signals([rows], plain, rule, tmp_path / "two", Where(2), AlarmedTowers(towers, alarm)) is not None
    assert not alarm.exists()
    assert files_of(tmp_path / "two") == wanted
    for shard in (1, 0, 1):
        made = write_signals([rows], plain, rule, tmp_path / "shards", Where(0, shard, 2), towers)
    assert made is not None
    assert files_of(tmp_path / "shards") == wanted


def test_towers_are_loaded_once_and_not_pickled(rows: Rows, plain: Encoder, rule: ImageRule, towers: TwoTowers, tmp_path: Path) -> None:
    loads, passes = [], []
    with pytest.MonkeyPatch.context() as patch:
        stream, vectors = two_towers.stream, TwoTowers.image_vectors
        patch.setattr(two_towers, "stream", lambda *some, **named: loads.append(some) or stream(*some, **named))
        patch.setattr(TwoTowers, "image_vectors", lambda self, images: passes.append(len(images)) or vectors(self, images))
        write_signals([rows], plain, rule, tmp_path / "out", Where(), towers)
    assert len(rows.shards) > 2
    assert len(loads) == 1
    assert max(passes) == 2 and len(passes) < sum(passes)  # in batches
    assert len(pickle.dumps(towers)) < 5_000


def test_similarity_is_added_to_signals_that_are_there(
    rows: Rows, plain: Encoder, rule: ImageRule, towers: TwoTowers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_signals([rows], plain, rule, tmp_path / "whole", Where(), towers)
    out = tmp_path / "out"
    write_signals([rows], plain, rule, out, Where())
    with pytest.raises(Refused, match=r"needs the column similarity, and \S+ does not have it.*--signals --similarity TOWERS --out"):
        open_source(Source(path=str(rows.path), where="similarity > 0", signals=str(out)))
    with monkeypatch.context() as patch:
        patch.setattr("eyeline.offline.signals.WriteSignals.__call__", None)  # the other columns are not made again
        write_signals([rows], plain, rule, out, Where(), towers)
        assert files_of(out) == files_of(tmp_path / "whole")
        write_signals([rows], plain, rule, out, Where())  # without the option what is there stays
        assert files_of(out) == files_of(tmp_path / "whole")
    chosen = open_source(Source(path=str(rows.path), where="similarity > 0", signals=str(out)))
    numbers = [place.number for place, *_ in chosen.kept_rows()]
    assert 0 < len(numbers) < 13
    other = open_two_towers(save_towers(tmp_path / "other", seed=6), "cpu", None)
    with pytest.raises(Refused, match="These differ: towers"):
        write_signals([rows], plain, rule, out, Where(), other)


def test_damaged_scores_are_named_with_what_to_delete(
    rows: Rows, plain: Encoder, rule: ImageRule, towers: TwoTowers, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    write_signals([rows], plain, rule, out, Where(), towers)
    wanted = files_of(out)
    shutil.rmtree(out / "columns")
    write_signals([rows], plain, rule, out, Where())  # made again, with the scores that are there
    assert files_of(out) == wanted
    shutil.rmtree(out / "columns")
    next((out / "job" / "similarity" / "files").rglob("similarity.npy")).write_bytes(b"broken")
    with pytest.raises(StorageFailed, match=r"missing or damaged\. Delete \S+/job/similarity and run the same command"):
        write_signals([rows], plain, rule, out, Where(), towers)
    shutil.rmtree(out / "job" / "similarity")
    write_signals([rows], plain, rule, out, Where(), towers)
    assert files_of(out) == wanted


def test_command_scores_and_chooses(eyeline: Command, tmp_path: Path) -> None:
    save_towers(tmp_path / "towers")
    (tmp_path / "tiny.yaml").write_text(json.dumps(tiny_recipe(tmp_path)))
    asked = ("prepare", "tiny.yaml", "--stage", "0", "--out", "data/signals")
    assert "--similarity is a signal" in eyeline(*asked, "--similarity", "towers").err
    done = eyeline(*asked, "--signals", "--similarity", "towers")
    assert (done.code, done.err) == (0, "")
    told = eyeline("report", "data/signals").out
    assert "similarity: smallest " in told
    assert "similarity: 1 of 1 partitions are done: 20 rows" in told and "dropped: 4 without_image" in told
    checked = eyeline("check", "tiny.yaml", "stages.0.data.sources.0.where=similarity > 0.1")
    assert "where: similarity > 0.1 keeps" in checked.out, checked.err


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda folder: shutil.rmtree(folder), "is not a directory. Download a checkpoint with two towers"),
        (lambda folder: edit(folder, model_type="clip"), "model_type='clip'; wanted a checkpoint with an image and a text tower"),
        (lambda folder: edit(folder, text_config={"hidden_size": 16, "projection_size": 8}), "wanted equal ones"),
        (lambda folder: edit(folder, text_config={"hidden_size": 16, "num_attention_heads": 2}), "do not fit the model"),
    ],
    ids=["absent", "CLIP", "widths", "other shapes"],
)
def test_folders_without_known_towers_are_refused(tmp_path: Path, change: Callable[[Path], object], said: str) -> None:
    folder = save_towers(tmp_path / "towers")
    change(folder)
    with pytest.raises(Refused) as refused:
        open_two_towers(folder, "cpu", None)
    assert said in str(refused.value) and str(folder) in str(refused.value)


def edit(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
