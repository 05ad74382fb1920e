"""What is promised of rows, whatever they are stored in: each once an epoch, in the same packs, wherever a run goes on."""

import csv
import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pytest

from eyeline.core.batch import Budget
from eyeline.core.errors import BadSample, Refused
from eyeline.core.image_rule import ImageRule
from eyeline.core.step import Step
from eyeline.data import prepare
from eyeline.data.containers import csv_rows, json_rows, parquet, sidecars, tars
from eyeline.data.containers.container import File
from eyeline.data.loader import training_steps
from eyeline.data.reader import Reader, reader_of
from eyeline.data.sets import Data
from eyeline.data.sources.sources import Source, open_source
from eyeline.data.text.tokenizer import Encoder
from tests.data.container_files import COCO, archive, parquet_file
from tests.data.container_files import arrow_file as written_arrow
from tests.data.container_files import energon_folder as energon

BUDGET = Budget(90, 80)
ROWS = 31
Rows = list[dict[str, Any]]


def listed(set_: Path, rows: Rows) -> Source:
    (set_ / "rows.json").write_text(json.dumps(rows))
    return Source(path=str(set_ / "rows.json"))


def lines(set_: Path, rows: Rows, name: str = "rows") -> Source:
    (set_ / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return Source(path=str(set_ / f"{name}.jsonl"))


def table(set_: Path, rows: Rows, name: str = "rows", columns: tuple[str, ...] = ("image", "caption", "kind")) -> Source:
    with open(set_ / f"{name}.csv", "w", newline="") as file:
        csv.writer(file).writerows([columns, *[(row.get("image"), row["caption"], row["kind"]) for row in rows]])
    return Source(path=str(set_ / f"{name}.csv"))


def foreign(set_: Path, rows: Rows) -> Source:
    made = table(set_, rows, columns=("foto", "said", "which"))
    return Source(path=made.path, columns={"image": "foto", "caption": "said", "kind": "which"})


def inlined(set_: Path, rows: Rows) -> Rows:
    def of(name: str) -> dict[str, Any]:
        path = set_ / name
        return {"bytes": path.read_bytes() if path.exists() else None, "path": name}

    return [{"images": [of(row["image"])], "caption": row["caption"], "kind": row["kind"]} for row in rows]


def members(set_: Path, rows: Rows) -> list[tuple[str, Any]]:
    out: list[tuple[str, Any]] = []
    for n, row in enumerate(rows):
        data = (set_ / row["image"]).read_bytes() if (set_ / row["image"]).exists() else b""
        out += [(f"{n:03}.png", data), (f"{n:03}.json", {"caption": row["caption"], "kind": row["kind"]})]
    return out


def crude(set_: Path, rows: Rows) -> Source:
    out: list[tuple[str, Any]] = []
    for n, row in enumerate(rows):
        data = (set_ / row["image"]).read_bytes() if (set_ / row["image"]).exists() else b""
        out += [(f"{n:03}.foto.png", data), (f"{n:03}.meta.json", {"said": row["caption"], "which": row["kind"]})]
    for n in range(3):
        archive(set_ / f"{n}.tar", out[n * 22 : (n + 1) * 22])
    columns = {"image": "foto.png", "caption": "meta.json.said", "kind": "meta.json.which"}
    return Source(path=str(set_ / "*.tar"), columns=columns, layout="captions")


def tarred(set_: Path, rows: Rows) -> Source:
    for n in range(3):
        archive(set_ / f"{n}.tar", members(set_, rows)[n * 22 : (n + 1) * 22])
    return Source(path=str(set_ / "*.tar"))


def energons(set_: Path, rows: Rows) -> Source:
    energon(set_, [members(set_, rows)])
    with tarfile.open(set_ / "shard_000.tar") as tar:
        offsets = [info.offset for info in tar.getmembers()[::2]] + [tar.offset]
    (set_ / "shard_000.tar.idx").write_bytes(struct.pack(f"<{len(offsets)}Q", *offsets))
    return Source(path=str(set_))


def coco(set_: Path, rows: Rows) -> Source:
    names = sorted({row["image"] for row in rows})
    images = [{"id": n, "file_name": name} for n, name in enumerate(names)]
    notes = [{"id": n, "image_id": names.index(row["image"]), "caption": row["caption"], "kind": row["kind"]} for n, row in enumerate(rows)]
    (set_ / "rows.json").write_text(json.dumps(COCO | {"images": images, "annotations": notes}))
    return Source(path=str(set_ / "rows.json"))


def saved(set_: Path, rows: Rows) -> Source:
    (set_ / "saved").mkdir()
    for n in range(2):
        part = inlined(set_, rows)[n * 16 : (n + 1) * 16]
        written_arrow(set_ / f"saved/data-{n:05}-of-00002.arrow", arrow.Table.from_pylist(part), 7)
    files = [{"filename": f"data-{n:05}-of-00002.arrow"} for n in range(2)]
    (set_ / "saved/state.json").write_text(json.dumps({"_data_files": files}))
    (set_ / "saved/dataset_info.json").write_text("{}")
    return Source(path=str(set_ / "saved"))


def besides(set_: Path, rows: Rows) -> Source:
    (set_ / "pairs").mkdir()
    for n, row in enumerate(rows):
        if (set_ / row["image"]).exists():
            shutil.copy(set_ / row["image"], set_ / f"pairs/{n:03}.png")
        else:
            (set_ / f"pairs/{n:03}.png").write_bytes(b"")
        (set_ / f"pairs/{n:03}.txt").write_text(row["caption"])
    return Source(path=str(set_ / "pairs"))


def mapped(set_: Path, rows: Rows) -> Source:
    made = [{"meta": {"foto": row["image"], "said": row["caption"]}, "which": row["kind"], "other": n} for n, row in enumerate(rows)]
    columns = {"image": "meta.foto", "caption": "meta.said", "kind": "which"}
    return Source(path=str(parquet_file(set_ / "rows.parquet", made, 7)), columns=columns, images=str(set_))


def several(write: Callable[..., Source], set_: Path, rows: Rows) -> Source:
    ends = {write(set_, part, f"part-{n}").path.rpartition(".")[2] for n, part in enumerate((rows[:10], rows[10:12], rows[12:]))}
    return Source(path=f"{set_}/part-*.{ends.pop()}")


CONTAINERS: dict[str, Callable[[Path, Rows], Source]] = {
    "JSON list": listed,
    "JSON lines": lines,
    "CSV": table,
    "CSV mapped": foreign,
    "several JSON lines": lambda s, r: several(lines, s, r),
    "several CSV": lambda s, r: several(table, s, r),
    "Parquet": lambda s, r: Source(path=str(parquet_file(s / "rows.parquet", r, 7))),
    "Parquet in one group": lambda s, r: Source(path=str(parquet_file(s / "rows.parquet", r, 100))),
    "Parquet mapped": mapped,
    "Parquet inside": lambda s, r: Source(path=str(parquet_file(s / "rows.parquet", inlined(s, r), 7))),
    "Arrow": lambda s, r: Source(path=str(written_arrow(s / "rows.arrow", arrow.Table.from_pylist(r), 7, "file"))),
    "Arrow in one batch": lambda s, r: Source(path=str(written_arrow(s / "rows.arrow", arrow.Table.from_pylist(r), 100, "file"))),
    "saved": saved,
    "WebDataset": tarred,
    "WebDataset mapped": crude,
    "Energon": energons,
    "COCO": coco,
    "imagefolder": lambda s, r: (table(s, r, "metadata"), Source(path=str(s)))[1],
    "texts beside": besides,
}  # fmt: skip


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
    """Of each pack of each step."""
    return [sorted(tuple(batch.ids) for batch in step.batches) for step in steps]


def stopped(make: Callable[[], Reader], stops: Sequence[tuple[int, int]]) -> list[list[tuple[str, ...]]]:
    """The packs of a run that was stopped after so many steps, on so many ranks, again and again."""
    out, state = [], None
    for count, ranks in [*stops, (10**9, 1)]:
        parts = [
            list(islice(training_steps(make(), BUDGET, 3, 2, json.loads(json.dumps(state)), rank, ranks), count)) for rank in range(ranks)
        ]
        out += [sorted(tuple(b.ids) for step in steps for b in step.batches if b.ids) for steps in zip(*parts, strict=True)]
        state = parts[0][-1].state if parts[0] else state
    return out


SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # of the data and of the source
    "plainly": ({}, {}),
    "held out": ({"max_samples_per_image": 3, "validation_fraction": 0.3}, {"repeat": 2, "limit": 25}),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_promises_hold_however_rows_are_stored(name: str, tmp_path: Path, rows: Rows, plain: Encoder, rule: ImageRule) -> None:
    """On other ranks, taken up again, with indexes or without, from another folder, and prepared: the same packs, of each row once."""
    declared = CONTAINERS[name](tmp_path / "set", rows)
    assert len(open_source(declared).shards) >= 3
    cache, out = str(tmp_path / "cache"), tmp_path / "out"
    for settings, choice in SETTINGS.values():
        source = declared.model_copy(update=choice)

        def make(source: Source = source, settings: dict[str, Any] = settings, **more: Any) -> Reader:
            return reader_of(Data(sources=(source,), max_reject_rate=1.0, **settings, **more), plain, rule, 0)

        whole = list(training_steps(make(), BUDGET, 3, 2))
        seen = Counter(id for step in whole for batch in step.batches for id in batch.ids)
        assert set(seen.values()) == {2 * choice.get("repeat", 1)}
        assert settings or len(seen) == USABLE
        assert stopped(make, [(1, 2), (1, 3)]) == ids(whole)
        for _ in ("cold", "warm"):
            assert stopped(lambda make=make: make(cache=cache), [(2, 1)]) == ids(whole)
        manifest = prepare.pack_offline(make(), BUDGET, out)
        assert len(manifest.archives) > 1
        assert ids(training_steps(make(prepared=str(out)), BUDGET, 3, 2, whole[0].state)) == ids(whole[1:])
        assert ids(training_steps(make(), BUDGET, 3, 2, next(training_steps(make(prepared=str(out)), BUDGET, 3, 2)).state)) == ids(
            whole[1:]
        )
        shutil.rmtree(out)
        (tmp_path / "set").rename(tmp_path / "moved")
        moved = {field: value.replace("/set", "/moved") for field in ("path", "images") if (value := getattr(source, field))}
        there = make(source.model_copy(update=moved), cache=cache)
        assert ids(training_steps(there, BUDGET, 3, 2, whole[1].state)) == ids(whole[2:])
        (tmp_path / "moved").rename(tmp_path / "set")


@pytest.mark.parametrize("name", CONTAINERS)
def test_one_other_caption_is_noticed(name: str, tmp_path: Path, rows: Rows, plain: Encoder, rule: ImageRule) -> None:
    """Of as many letters, in a file whose time of change is the old one, with indexes that are there; and so is another mapping."""
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
        found = [(place, (f.cause, f.field, f.message) if isinstance(f, BadSample) else f) for place, _, f in opened.kept()]
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
    assert all(many.lies_in(shard) is one for _ in range(20) for shard in range(98))
    last = sidecars.Sidecars(("a.png",) * 3, (one, None, None), tmp_path, 2, (), "")
    assert last.lies_in(1) is one
