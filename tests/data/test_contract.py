"""What is promised of rows, whatever holds them, wherever that is stored, prepared or not, read by workers or not: the same steps, bit for
bit, wherever a run resumes. Workers that read a store are in test_stores.py."""

import json
import os
import pickle
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from eyeline.core.batch import Budget, Sample, Text
from eyeline.core.errors import BadSample, Refused
from eyeline.core.image_rule import ImageRule
from eyeline.core.step import Step
from eyeline.core.world import World
from eyeline.data.containers import csv_rows, json_rows, parquet, sidecars, tars
from eyeline.data.containers.container import File
from eyeline.data.loader import training_steps
from eyeline.data.reader import Reader, reader_of
from eyeline.data.sets import Data
from eyeline.data.sources.sources import Source, open_source
from eyeline.data.text.tokenizer import Encoder
from eyeline.offline import prepare
from tests.data.every_container import CONTAINERS, Rows
from tests.data.same_batches import assert_same_steps
from tests.data.store import Store

BUDGET = Budget(90, 80)
ROWS = 31


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (json_rows, csv_rows, sidecars, tars, parquet):
        monkeypatch.setattr(module, "SHARD_ROWS", 7)
    monkeypatch.setattr(json_rows, "SHARD_BYTES", 400)
    monkeypatch.setattr(csv_rows, "SHARD_BYTES", 400)
    monkeypatch.setattr(tars, "RUN_BYTES", 12_000)
    monkeypatch.setattr(prepare, "PARTITION_BYTES", 15_000)


@pytest.fixture
def rows(tmp_path: Path, draw: Callable[..., Path]) -> Rows:
    for n in range(9):
        draw(f"set/p{n}.png", seed=n)
    (tmp_path / "set/torn.png").write_bytes(draw("elsewhere.png", seed=10).read_bytes()[:200])
    out = [{"image": f"p{n * 5 % 9}.png", "caption": f"caption {n} " + "word " * (n % 7), "kind": "ab"[n % 3 == 0]} for n in range(ROWS)]
    out[13]["caption"] = "a kestrel"
    out[4]["caption"] = " "
    out[11]["image"] = "absent.png"
    out[17]["caption"] = "x" * 400
    out[23]["image"] = "torn.png"
    return out


USABLE = ROWS - 3  # an image that turns out to be torn keeps its place


def ids(steps: Iterable[Step]) -> list[list[tuple[str, ...]]]:
    """The ids of each pack of each step."""
    return [sorted(tuple(batch.ids) for batch in step.batches) for step in steps]


def stopped(make: Callable[[], Reader], stops: Sequence[tuple[int, int]]) -> list[list[tuple[str, ...]]]:
    """The packs of a run that was stopped after a number of steps, on a number of ranks, again and again."""
    out, state = [], None
    for count, ranks in [*stops, (10**9, 1)]:
        parts = [
            list(islice(training_steps(replace(make(), world=World(rank, ranks)), BUDGET, 3, 2, json.loads(json.dumps(state))), count))
            for rank in range(ranks)
        ]
        out += [sorted(tuple(b.ids) for step in steps for b in step.batches if b.ids) for steps in zip(*parts, strict=True)]
        state = parts[0][-1].state if parts[0] else state
    return out


SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # of the data and of the source
    "plainly": ({}, {}),
    "held out": ({"max_samples_per_image": 3, "validation_fraction": 0.3}, {"repeat": 2, "limit": 25}),
}
KINDS = tuple(name for name in CONTAINERS if not name.endswith("mapped") and "several" not in name and " in one " not in name)
FEW = ("JSON lines", "CSV mapped", "Parquet inside", "saved", "WebDataset", "COCO", "texts in files")  # images in all their places
PLAIN = ("JSON lines", "WebDataset", "Parquet inside")
each_container = pytest.mark.parametrize("name", CONTAINERS)


def containers_and_settings(fast: Sequence[str], plainly: Sequence[str] = ("JSON lines",)) -> pytest.MarkDecorator:
    """Those named `fast` with the harder settings, and `plainly` those of the plain ones. The slow tests have all others."""
    return pytest.mark.parametrize(
        ("name", "way"),
        [
            pytest.param(name, way, marks=[] if name in (plainly if way == "plainly" else fast) else pytest.mark.slow)
            for way in SETTINGS
            for name in CONTAINERS
        ],
    )


Make = Callable[..., Reader]


def located(source: Source, folder: Path, there: Path | str) -> Source:
    """The same source where its folder is another."""
    moved = {field: value.replace(str(folder), str(there)) for field in ("path", "images") if (value := getattr(source, field))}
    return source.model_copy(update=moved)


@pytest.fixture
def source(tmp_path: Path, rows: Rows, name: str, way: str) -> Source:
    declared = CONTAINERS[name](tmp_path / "set", rows)
    assert len(open_source(declared).shards) >= 3
    return declared.model_copy(update=SETTINGS[way][1])


@pytest.fixture
def make(source: Source, way: str, plain: Encoder, rule: ImageRule) -> Make:
    """A new reader of the source, wherever it is and however it is read."""

    def reader(source: Source = source, **more: Any) -> Reader:
        return reader_of(Data(sources=(source,), max_reject_rate=1.0, **SETTINGS[way][0], **more), plain, rule, 0)

    return reader


@pytest.fixture(scope="module")
def first_read() -> dict[tuple[str, str], list[Step]]:
    return {}


@pytest.fixture
def whole(make: Make, name: str, way: str, first_read: dict[tuple[str, str], list[Step]]) -> list[Step]:
    """All steps of two epochs, from files, read where they are used: what every other way must give. They are the same wherever the files
    are, and so are read once."""
    if (name, way) not in first_read:
        first_read[name, way] = steps(make())
    return first_read[name, way]


def steps(reader: Reader, state: Any = None) -> list[Step]:
    return list(training_steps(reader, BUDGET, 3, 2, state))


def contents(reader: Reader) -> dict[str, tuple[Any, ...]]:
    """What is in each row, by its id; images by their names."""
    [rows] = reader.training.index.sources
    shards = range(reader.training.shards(0))  # that the limit leaves
    samples = [found for shard in shards for _, _, found in rows.rows_in(shard) if isinstance(found, Sample)]
    return {
        sample.id: tuple(
            (message.role, message.supervised, tuple(part.text if isinstance(part, Text) else part.name for part in message.parts))
            for message in sample.messages
        )
        for sample in samples
    }


@containers_and_settings(tuple(CONTAINERS), PLAIN)
def test_each_row_as_often_as_it_should_be(name: str, way: str, make: Make, whole: list[Step]) -> None:
    """Each epoch, for any number of ranks, wherever the run was stopped; with indexes that are there, and without."""
    settings, choice = SETTINGS[way]
    seen = Counter(id for step in whole for batch in step.batches for id in batch.ids)
    assert set(seen.values()) == {2 * choice.get("repeat", 1)}
    assert settings or len(seen) == USABLE
    assert stopped(make, [(1, 2), (1, 3)]) == ids(whole)


@containers_and_settings(KINDS)
def test_workers_and_indexes_change_nothing(name: str, way: str, source: Source, make: Make, whole: list[Step], tmp_path: Path) -> None:
    """And data that moved are the same data: a run resumes there, with the indexes of before."""
    cache = str(tmp_path / "cache")
    for workers in (2, 0):  # who makes the indexes, and who finds them
        assert_same_steps(steps(make(cache=cache, workers=workers)), whole)
    (tmp_path / "set").rename(tmp_path / "moved")
    there = make(located(source, tmp_path / "set", tmp_path / "moved"), cache=cache)
    assert_same_steps(steps(there, whole[1].state), whole[2:])


@containers_and_settings(FEW)
def test_prepared_data_are_the_same(name: str, way: str, make: Make, whole: list[Step], tmp_path: Path) -> None:
    """It is read by workers, on other ranks, without the source; and a run resumes with either in the other."""
    manifest = prepare.pack_offline(make(), BUDGET, tmp_path / "out")
    assert len(manifest.archives) > 1
    (tmp_path / "out").rename(tmp_path / "prepared")
    stored = str(tmp_path / "prepared")
    kept = contents(make(prepared=stored))
    assert kept.keys() >= {id for step in whole for batch in step.batches for id in batch.ids}
    assert kept.items() <= contents(make()).items(), "no step reads a row again: its tokens are in the index"
    assert_same_steps(steps(make(), next(training_steps(make(prepared=stored), BUDGET, 3, 2)).state), whole[1:])
    (tmp_path / "set").rename(tmp_path / "gone")
    assert_same_steps(steps(make(prepared=stored, workers=2)), whole)
    assert_same_steps(steps(make(prepared=stored), whole[0].state), whole[1:])
    assert stopped(lambda: make(prepared=stored), [(1, 2), (1, 3)]) == ids(whole)


@pytest.mark.parametrize("way", ["held out"])
@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in KINDS else pytest.mark.slow) for name in CONTAINERS])
def test_data_in_a_store_are_the_same(
    name: str, way: str, source: Source, make: Make, whole: list[Step], store: Store, tmp_path: Path
) -> None:
    """And a run that started with files resumes there."""
    store.put_folder(tmp_path / "set", "set")
    there = located(source, tmp_path / "set", f"{store.url}/set")
    assert_same_steps(steps(make(there)), whole)
    assert_same_steps(steps(make(there), whole[1].state), whole[2:])


@each_container
def test_one_other_caption_is_noticed(name: str, tmp_path: Path, rows: Rows, plain: Encoder, rule: ImageRule) -> None:
    """Another text of the same length, in a file with the old modification time and existing indexes; and so is another mapping."""
    source = CONTAINERS[name](tmp_path / "set", rows)

    def make(**columns: str) -> Reader:
        other = source.model_copy(update={"columns": source.columns | columns})
        return reader_of(Data(sources=(other,), max_reject_rate=1.0, cache=str(tmp_path / "cache")), plain, rule, 0)

    state = next(training_steps(make(), BUDGET, 3, 2)).state
    with pytest.raises(Refused, match=r"These differ: layout|its rows have image, caption\."):
        next(training_steps(make(caption=source.columns.get("kind", "kind")), BUDGET, 3, 2, state))
    [path] = [file for file in (tmp_path / "set").rglob("*") if file.is_file() and b"kestrel" in file.read_bytes()]
    about = path.stat()
    path.write_bytes(path.read_bytes().replace(b"kestrel", b"buzzard"))
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
    with pytest.raises(Refused, match=r"These differ: data"):
        next(training_steps(make(), BUDGET, 3, 2, state))
    learned = [plain.decode(batch.tokens_T.tolist()) for step in training_steps(make(), BUDGET, 3, 1) for batch in step.batches]
    assert sum("buzzard" in text for text in learned) == 1


def test_rows_are_the_same_by_place_in_another_process(tmp_path: Path, rows: Rows) -> None:
    jobs = []
    for n, (name, write) in enumerate(CONTAINERS.items()):
        shutil.copytree(tmp_path / "set", tmp_path / f"{n}/set")
        opened = open_source(write(tmp_path / f"{n}/set", rows))
        found = [(place, (f.cause, f.field, f.message) if isinstance(f, BadSample) else f) for place, _, f in opened.kept_rows()]
        assert len(found) == ROWS, name
        jobs.append((name, opened, found[::-1]))
    (tmp_path / "jobs").write_bytes(pickle.dumps(jobs))
    subprocess.run([sys.executable, "-c", BY_PLACE, str(tmp_path / "jobs")], check=True, timeout=60)


BY_PLACE = """
import pickle, sys
from eyeline.core.errors import BadSample
for name, rows, wanted in pickle.load(open(sys.argv[1], "rb")):
    for place, one in wanted:
        try:
            found = rows.read(place)
        except BadSample as bad:
            found = (bad.cause, bad.field, bad.message)
        assert found == one, (name, place, found, one)
"""


@pytest.mark.timeout(4)
def test_the_file_of_a_shard_is_found_at_once(tmp_path: Path) -> None:
    """Each visit of a row asks for it, and there may be as many files as rows."""
    (tmp_path / "a.txt").write_text("a")
    one = File.of(tmp_path / "a.txt", 0)
    many = sidecars.Sidecars(("a.png",) * 200_000, (None, *[one] * 199_998, None), tmp_path, 2048, (), "")
    assert all(many.file_of(shard) is one for _ in range(20) for shard in range(98))
    last = sidecars.Sidecars(("a.png",) * 3, (one, None, None), tmp_path, 2, (), "")
    assert last.file_of(1) is one
