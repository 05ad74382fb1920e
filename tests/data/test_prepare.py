"""Prepared data are the source's, batch by batch, in any process and from any state; what is damaged is noticed."""

import errno
import json
import multiprocessing
import os
import pickle
import shutil
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eyeline.core.batch import Budget, EncodedImage, Message, Sample, Text, Video
from eyeline.core.errors import BadSample, Refused, StorageFailed, TooManyRejects
from eyeline.core.image_rule import Area, ImageRule, Square, VideoLimits
from eyeline.data.containers import container as containers
from eyeline.data.containers import json_rows
from eyeline.data.counts import count_steps
from eyeline.data.images.decode import decode, width_and_height
from eyeline.data.images.patches import Augment
from eyeline.data.loader import training_steps
from eyeline.data.plan import index, order
from eyeline.data.prepared import folder as prepared_folder
from eyeline.data.prepared.folder import Manifest, packed_row, packed_sample
from eyeline.data.reader import Reader, reader_of, sizing_of
from eyeline.data.report.report import THOROUGH, data_report
from eyeline.data.sets import Data, training_samples
from eyeline.data.sources.sources import Source, open_source
from eyeline.data.text.templates import TEMPLATES
from eyeline.data.text.tokenizer import Encoder
from eyeline.data.validation import validation_batches
from eyeline.offline import prepare
from eyeline.offline.plan import existing_plan
from eyeline.offline.run import Where
from eyeline.offline.store import LocalStore
from tests.data.any_rows import line_of, one_source
from tests.data.container_files import archive, encoded
from tests.data.llava_rows import ROWS, row, write
from tests.data.same_batches import assert_same, assert_same_steps
from tests.forked import Forked

BUDGET = Budget(90, 80)
EXTRA = [
    row("no file", "absent.png"),
    {"conversations": 1},
    row("q1", answer="a1", more=("q2", "a2", "q3 " * 50, "a3")),  # shrunk, where that is allowed
    row("far too long", answer="x" * 500),  # even then
    row("broken later", "broken.png"),
    row("same twice", "0.png", "0.png"),
]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several shards, several archives."""
    monkeypatch.setattr(json_rows, "SHARD_ROWS", 9)
    monkeypatch.setattr(json_rows, "SHARD_BYTES", 2000)
    monkeypatch.setattr(prepare, "PARTITION_BYTES", 40_000)


@pytest.fixture
def folder(tmp_path: Path, draw: Callable[..., Path]) -> Path:
    """37 rows and ten images: one cannot be found, one not be decoded, two rows are too long."""
    for n in range(9):
        draw(f"set/{n}.png", seed=n)
    whole = draw("set/broken.png", seed=99).read_bytes()
    (tmp_path / "set" / "broken.png").write_bytes(whole[:200])
    write(tmp_path / "set", [*ROWS[:20], *EXTRA, *ROWS[20:]])
    return tmp_path / "set"


Open = Callable[..., Reader]


@pytest.fixture
def open_reader(folder: Path, plain: Encoder, rule: ImageRule) -> Open:
    def make(seed: int = 0, out: Path | None = None, rule: ImageRule = rule, **settings: Any) -> Reader:
        settings.setdefault("sources", (Source(path=str(folder / "rows.json")),))
        return reader_of(Data(**{"max_reject_rate": 1.0, **settings}), plain, rule, seed, out)

    return make


def made(reader: Reader, folder: Path, budget: Budget = BUDGET, **how: Any) -> Manifest:
    return prepare.pack_offline(reader, budget, folder, **how)


# The same batches


SETTINGS: dict[str, dict[str, Any]] = {
    "plainly": {},
    "shared images": {"max_samples_per_image": 3},
    "held out": {"max_samples_per_image": 2, "validation_fraction": 0.4},
    "shrunk": {"overlong": "drop_turns", "max_samples_per_image": 3},
    "shrunk and held out": {"overlong": "drop_turns", "validation_fraction": 0.4},
    "augmented": {"augment": Augment(flip=True, shift=2), "max_samples_per_image": 3},
    "two epochs stored": {"epochs": 2},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_same_batches(open_reader: Open, tmp_path: Path, name: str) -> None:
    settings = dict(SETTINGS[name])
    epochs = settings.pop("epochs", 1)
    manifest = made(open_reader(**settings), tmp_path / "out", epochs=epochs)
    assert len(manifest.archives) >= 3
    there = {"prepared": str(tmp_path / "out"), **settings}
    for more in ({}, {"workers": 2}) if name == "shrunk" else ({},):
        source, stored = open_reader(**settings, **more), open_reader(**there, **more)
        assert_same_steps(list(training_steps(stored, BUDGET, 2, 2)), list(training_steps(source, BUDGET, 2, 2)))
        assert count_steps(stored, BUDGET, 2, 2) == count_steps(source, BUDGET, 2, 2)
        validated = list(validation_batches(source, BUDGET))
        assert bool(validated) == stored.validates == ("validation_fraction" in settings)
        for one, two in zip(validation_batches(stored, BUDGET), validated, strict=True):
            assert_same(one, two)


def several(folder: Path) -> tuple[Source, ...]:
    """Sources of each container, one visited twice, one filtered, one cut; two of them share images."""
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    lines = [json.dumps(dict(r, kind=("a", "b")[n % 2])) for n, r in enumerate(ROWS)]
    (folder / "rows.jsonl").write_text("\n".join(lines))
    talk = row("what?", "x")["conversations"]
    archive(
        folder / "t.tar",
        [(f"{n}.{end}", encoded(n) if end == "jpg" else {"conversations": talk}) for n in range(6) for end in ("jpg", "json")],
    )
    table = {"images": [[encoded(n % 3, "PNG")] for n in range(8)], "texts": [[{"user": f"q{n}", "assistant": f"a{n}"}] for n in range(8)]}
    parquet.write_table(arrow.table(table), folder / "p.parquet", row_group_size=3)
    return (
        Source(path=str(folder / "rows.json"), repeat=2),
        Source(path=str(folder / "rows.jsonl"), categories=("b",)),
        Source(path=str(folder / "t.tar")),
        Source(path=str(folder / "p.parquet"), limit=5),
    )


def test_every_container_and_filter(open_reader: Open, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "WINDOW_HELD", 700)  # a window has as many row groups as are held in memory
    settings = {"sources": several(folder), "max_samples_per_image": 2, "overlong": "drop_turns", "validation_fraction": 0.2}
    made(open_reader(**settings), tmp_path / "out")
    source, stored = open_reader(**settings), open_reader(**settings, prepared=str(tmp_path / "out"))
    assert_same_steps(list(training_steps(stored, BUDGET, 2, 2)), list(training_steps(source, BUDGET, 2, 2)))
    for one, two in zip(validation_batches(stored, BUDGET), validation_batches(source, BUDGET), strict=True):
        assert_same(one, two)


def test_a_blend_by_shares(open_reader: Open, folder: Path, tmp_path: Path) -> None:
    sources = [s.model_copy(update={"repeat": 1, "weight": w}) for s, w in zip(several(folder), (1, 3, 2, 1), strict=True)]
    settings = {"sources": tuple(sources), "mix": "interleave", "validation": (Source(path=str(folder / "rows.json"), limit=12),)}
    for packs in (6, 10**6):  # the plan of a few steps, and until every row has come; the rows are all there in both
        out = tmp_path / str(packs)
        manifest = made(open_reader(**settings), out, packs=packs)
        source, stored = open_reader(**settings), open_reader(**settings, prepared=str(out))
        assert_same_steps(
            list(islice(training_steps(stored, BUDGET, 2, None), 30)), list(islice(training_steps(source, BUDGET, 2, None), 30))
        )
        for one, two in zip(validation_batches(stored, BUDGET), validation_batches(source, BUDGET), strict=True):
            assert_same(one, two)
        rows = sum(archive.rows for archive in manifest.archives if not archive.validates)
        assert rows == 2 + len(  # with those that are too long
            {id for step in islice(training_steps(open_reader(**settings), BUDGET, 2, None), 60) for b in step.batches for id in b.ids}
        )


VIDEO_RULE = ImageRule(8, 2, (0.5,) * 3, (0.5,) * 3, "bicubic", Area(16 * 16, 32 * 32), 2, "grid", VideoLimits(16 * 16, 64 * 64))


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    some=st.lists(one_source, min_size=1, max_size=3),
    validation_fraction=st.sampled_from([0.0, 0.4]),
    max_samples_per_image=st.integers(1, 4),
    overlong=st.sampled_from(["reject", "drop_turns"]),
    budget=st.sampled_from([Budget(60, 32), Budget(200, 48)]),
    seed=st.integers(0, 3),
)
def test_any_data_and_settings(
    folder: Path, plain: Encoder, rule: ImageRule, some, validation_fraction, max_samples_per_image, overlong, budget, seed
) -> None:
    sources = []
    for n, one in enumerate(some):
        (folder / f"{n}.jsonl").write_text("\n".join(line_of(m, *what) for m, what in enumerate(one["rows"])))
        sources.append(Source(path=str(folder / f"{n}.jsonl"), **{name: one[name] for name in ("repeat", "limit", "categories")}))
    data = Data(
        sources=tuple(sources),
        validation_fraction=validation_fraction,
        max_samples_per_image=max_samples_per_image,
        max_reject_rate=1.0,
        overlong=overlong,
    )
    out = folder / "out"
    shutil.rmtree(out, ignore_errors=True)

    def reader(**more: Any) -> Reader:
        return reader_of(data.model_copy(update=more), plain, rule, seed)

    try:
        wanted = list(training_steps(reader(), budget, 2, 2))
    except Refused:  # nothing to learn from, or nothing held out: so says who prepares it
        with pytest.raises(Refused):
            made(reader(), out, budget)
        return
    made(reader(), out, budget)
    assert_same_steps(list(training_steps(reader(prepared=str(out)), budget, 2, 2)), wanted)
    if validation_fraction:
        with suppress(Refused):  # no validation sample can be used
            for one, two in zip(validation_batches(reader(), budget), validation_batches(reader(prepared=str(out)), budget), strict=True):
                assert_same(one, two)


def test_videos(folder: Path, tmp_path: Path, tokenizers: dict[str, Any]) -> None:
    ask = [{"from": "human", "value": "<video>\nand <image> what?"}, {"from": "gpt", "value": "yes"}]
    rows = [
        {"video": [f"{(n + m) % 4}.png" for m in range(3)], "image": f"{n % 2}.png", "fps": 1 + n, "conversations": ask} for n in range(8)
    ]
    write(folder, rows)
    encoder, budget = Encoder(tokenizers["qwen3"], TEMPLATES["qwen3"]), Budget(200, 200)

    def reader(**more: Any) -> Reader:
        return reader_of(Data(sources=(Source(path=str(folder / "rows.json")),), max_samples_per_image=2, **more), encoder, VIDEO_RULE, 0)

    made(reader(), tmp_path / "out", budget)
    assert_same_steps(
        list(training_steps(reader(prepared=str(tmp_path / "out")), budget, 1, 2)), list(training_steps(reader(), budget, 1, 2))
    )
    for one, two in zip(sorted_samples(reader(prepared=str(tmp_path / "out")).data), sorted_samples(reader().data), strict=True):
        assert same_sample(one, two)


# Resuming with either


@pytest.mark.parametrize("at", [4])
def test_state_resumes_in_the_other(open_reader: Open, tmp_path: Path, at: int) -> None:
    settings = {"max_samples_per_image": 3, "overlong": "drop_turns", "augment": Augment(flip=True)}
    made(open_reader(**settings), tmp_path / "out")
    whole = list(training_steps(open_reader(**settings), BUDGET, 2, 3))
    assert len(whole) > 11
    for first, second in (({}, {"prepared": str(tmp_path / "out")}), ({"prepared": str(tmp_path / "out")}, {})):
        some = list(islice(training_steps(open_reader(**settings, **first), BUDGET, 2, 3), at + 1))
        state = json.loads(json.dumps(some[-1].state))
        rest = list(training_steps(open_reader(**settings, **second), BUDGET, 2, 3, state))
        assert_same_steps([*some, *rest], whole)


# What is written


@pytest.mark.parametrize("partition", [40_000, 1 << 30])
def test_each_row_is_stored_once_in_first_epoch_order(
    open_reader: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, partition: int
) -> None:
    monkeypatch.setattr(prepare, "PARTITION_BYTES", partition)
    manifest = made(open_reader(max_samples_per_image=2, validation_fraction=0.3), tmp_path / "out")
    reader = open_reader(max_samples_per_image=2, validation_fraction=0.3)
    wanted = [id for step in training_steps(reader, BUDGET, 1, 1) for batch in step.batches for id in batch.ids]
    validated = [id for batch in validation_batches(reader, BUDGET) for id in batch.ids]
    ids: dict[bool, list[str]] = {False: [], True: []}
    for about in manifest.archives:
        rows = open_source(Source(path=str(tmp_path / "out" / "shards" / about.name)))
        ids[about.validates] += [rows.container.row(place)["id"] for place, _, _ in rows.rows_in(0)]
    assert ids[False] == [*wanted, "rows.json#22", "rows.json#23"]  # last what is too long
    assert ids[True] == validated


def test_an_ordinary_source_reads_the_archives(open_reader: Open, folder: Path, tmp_path: Path) -> None:
    made(open_reader(), tmp_path / "out")
    packed_set = open_source(Source(path=str(tmp_path / "out" / "shards")))
    assert packed_set.layout.name == "openai"
    source = open_source(Source(path=str(folder / "rows.json")))
    wanted = {source.origin_of(place)[0]: found for place, _, found in source.kept_rows()}
    count = 0
    for place, _, found in packed_set.kept_rows():
        assert isinstance(found, Sample)
        assert same_sample(found, wanted[packed_set.container.row(place)["id"]], names=False)
        count += 1
    assert count == len(ROWS) + 4  # without the one that cannot be found, and the one that is no row
    image = folder / "0.png"
    assert any(p.source.data == image.read_bytes() for place, *_ in packed_set.kept_rows() for p in packed_set.read(place).images)


def test_training_samples_are_those_of_the_source(open_reader: Open, tmp_path: Path) -> None:
    made(open_reader(validation_fraction=0.4), tmp_path / "out")
    stored = sorted_samples(open_reader(validation_fraction=0.4, prepared=str(tmp_path / "out")).data)
    ids = {s.id for s in stored}
    assert ids
    source = [s for s in sorted_samples(open_reader(validation_fraction=0.4).data) if s.id in ids]
    assert all(same_sample(one, two) for one, two in zip(stored, source, strict=True))


def test_rejects_are_listed_and_counted_as_in_the_source(open_reader: Open, tmp_path: Path) -> None:
    made(open_reader(), tmp_path / "out")
    listed = [json.loads(line) for line in (tmp_path / "out" / "rejects.jsonl").read_text().splitlines()]
    logs = []
    for more in ({}, {"prepared": str(tmp_path / "out")}):
        (tmp_path / f"run{len(logs)}").mkdir()
        list(training_steps(open_reader(out=tmp_path / f"run{len(logs)}", **more), BUDGET, 2, 2))
        logs.append([json.loads(line) for line in (tmp_path / f"run{len(logs)}" / "rejects.jsonl").read_text().splitlines()])
    assert [{**line, "message": ""} for line in logs[0]] == [{**line, "message": ""} for line in logs[1]]
    assert listed == [line for line in logs[1] if line["cause"] != "broken_image"]  # which is unknown before it is decoded
    assert {line["cause"] for line in listed} == {"missing_image", "wrong_type", "too_long"}
    with pytest.raises(TooManyRejects):
        made(open_reader(max_reject_rate=0.01), tmp_path / "other")


def test_the_report_is_that_of_the_source(open_reader: Open, folder: Path, tmp_path: Path) -> None:
    write(folder, [*EXTRA[:5], *(row(f"question {n}?", f"{n}.png") for n in range(9)), *ROWS[24:29]])  # each image is shown once
    made(open_reader(validation_fraction=0.3), tmp_path / "out")
    source, stored = (
        data_report(open_reader(validation_fraction=0.3, **more), BUDGET, THOROUGH) for more in ({}, {"prepared": str(tmp_path / "out")})
    )
    for field in fields(source):
        if field.name not in ("sources", "rejected"):  # which have the locations of all that
            assert getattr(stored, field.name) == getattr(source, field.name), field.name


def test_first_epoch_is_read_sequentially(open_reader: Open, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(folder, [row(f"question {n}?", f"{n % 9}.png", answer=f"answer {n}") for n in range(9)])
    made(open_reader(), tmp_path / "out")
    reader, real, asked = open_reader(prepared=str(tmp_path / "out")), os.pread, []

    def counted(handle: int, length: int, start: int) -> bytes:
        asked.append((os.readlink(f"/proc/self/fd/{handle}"), start, length))
        return real(handle, length, start)

    monkeypatch.setattr(containers.os, "pread", counted)
    list(training_steps(reader, BUDGET, 1, 1))
    archives = [(path, start, length) for path, start, length in asked if path.endswith(".tar")]
    assert archives == sorted(archives)
    assert len(archives) == 9  # a request an image: no row is read, and no header
    assert sum(length for *_, length in archives) == sum((folder / f"{n}.png").stat().st_size for n in range(9))


# Samples as rows


SAMPLES = {
    "text": Sample("a#1", (Message("user", (Text('héllo\n\0 "<image>" 你好'),)), Message("assistant", (Text(" yes "),)))),
    "kinds and a system": Sample("b", (Message("system", ()), Message("user", (Text(""),)), Message("assistant", (Text("x"),))), "shape"),
    "images": Sample(
        "c", (Message("user", (EncodedImage("1.png", b"1"), Text("and"), EncodedImage("2.png", b"2"))), Message("assistant", (Text("x"),)))
    ),
    "a video": Sample(
        "d",
        (
            Message(
                "user", (Video("v", (EncodedImage("1", b"1"), EncodedImage("2", b"2")), (0.1, 1 / 3)), EncodedImage("3", b"3"), Text("?"))
            ),
            Message("assistant", (Text("x"),)),
            Message("user", (EncodedImage("4", b"4"),)),
            Message("assistant", (Text("y"),)),
        ),
    ),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_a_sample_comes_back(name: str) -> None:
    sample = SAMPLES[name]
    value = json.loads(json.dumps(packed_row(sample, [f"{n}.png" for n in range(len(sample.images))])))
    if sample.images:
        assert value["images"] == [f"{n}.png" for n in range(len(sample.images))]
        value["images"] = [EncodedImage(f"key.{n}.png", p.source) for n, p in enumerate(sample.images)]
    assert packed_sample(value, sample.id, Path()) == sample


# Interrupted, damaged, another's


def contents(folder: Path) -> dict[str, bytes]:
    """What training reads."""
    names = {str(p.relative_to(folder)): p for p in folder.rglob("*") if p.is_file()}
    return {name: p.read_bytes() for name, p in names.items() if name.split("/")[0] not in ("job", "source-index")}


def counted(step: Callable[[], None]) -> pytest.MonkeyPatch:
    """`step` is called before every file that appears: by a link, or by a rename."""
    patch = pytest.MonkeyPatch()
    for name in ("link", "replace"):
        real = getattr(os, name)
        patch.setattr(os, name, lambda *names, real=real: (step(), real(*names))[1])
    return patch


def killed(job: Callable[[], Any], at: int) -> None:
    """Do it in a process that is killed when its file number `at` is about to appear."""

    def run() -> None:
        left = [at]

        def step() -> None:
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1

        counted(step)  # in this process, which does not live long
        job()

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def committed(out: Path) -> dict[str, str]:
    """The attempt that each manifest names."""
    return {str(p.relative_to(out)): json.loads(p.read_bytes())["attempt"] for p in out.glob("job/*/done/*/*.json")}


@pytest.mark.parametrize("share", [0, 0.1, 0.25, 0.4, 0.5, 0.6, 0.75, 0.9, 1])
def test_a_kill_loses_nothing_that_was_done(open_reader: Open, tmp_path: Path, share: float) -> None:
    settings = {"validation_fraction": 0.3, "max_samples_per_image": 2}
    files: list[None] = []
    patch = counted(lambda: files.append(None))
    whole = made(open_reader(**settings), tmp_path / "whole")
    patch.undo()
    assert len(whole.archives) >= 3
    out = tmp_path / "out"
    killed(lambda: made(open_reader(**settings), out), int(share * (len(files) - 1)))
    with pytest.raises(Refused, match="preparing it did not finish"):
        open_reader(**settings, prepared=str(out))
    before = committed(out)
    assert bool(before) == (share > 0.1)
    assert made(open_reader(**settings), out) == whole
    assert contents(out) == contents(tmp_path / "whole")
    assert {name: attempt for name, attempt in committed(out).items() if name in before} == before  # none was done again


def test_indexes_are_kept_in_the_cache_and_taken_from_it(open_reader: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(open_reader(), tmp_path / "whole")
    settings = {"cache": str(tmp_path / "cache")}
    made(open_reader(**settings), tmp_path / "out")
    kept = {p.name: p.read_bytes() for p in (tmp_path / "cache").rglob("*.index")}
    assert len(kept) == 5
    monkeypatch.setattr(index, "shard_index_of", None)  # none is made again
    made(open_reader(**settings), tmp_path / "again")
    assert contents(tmp_path / "again") == contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert {p.name: p.read_bytes() for p in (tmp_path / "cache").rglob("*.index")} == kept


def test_a_killed_runner_loses_nothing(open_reader: Open, tmp_path: Path) -> None:
    whole = made(open_reader(), tmp_path / "whole")
    out = tmp_path / "out"
    runner = Forked(lambda: made(open_reader(), out, where=Where(2)))
    while len(before := committed(out)) < 3 and runner.poll() is None:
        pass
    runner.kill()
    assert runner.wait() == -signal.SIGKILL
    assert made(open_reader(), out, where=Where(2)) == whole
    assert contents(out) == contents(tmp_path / "whole")
    assert {name: attempt for name, attempt in committed(out).items() if name in before} == before


@pytest.mark.parametrize("mode", ["workers", "shards", "shards of workers"])
def test_every_mode_writes_the_same_with_a_kill(open_reader: Open, tmp_path: Path, mode: str) -> None:
    settings = {"validation_fraction": 0.3, "max_samples_per_image": 2}
    made(open_reader(**settings), tmp_path / "whole")
    out, alarm, parent, files = tmp_path / "out", tmp_path / "alarm", os.getpid(), [0]
    alarm.touch()

    def step() -> None:
        files[0] += 1
        if os.getpid() != parent and files[0] > 3 and alarm.exists():
            alarm.unlink()
            os.kill(os.getpid(), signal.SIGKILL)

    patch = counted(step)
    if mode == "workers":
        made(open_reader(**settings), out, where=Where(2))
    else:
        places = [Where(2 * (mode == "shards of workers"), shard, 3) for shard in range(3)]
        for number in range(4):  # one does the indexes, one the archives, one what a killed one left; all three at once
            share = [Forked(lambda place=place: made(open_reader(**settings), out, where=place)) for place in places]
            codes = {one.wait() for one in share}
            assert codes <= ({0, -signal.SIGKILL} if number < 3 else {0})
        before = (out / "prepared.json").stat().st_mtime_ns
        assert made(open_reader(**settings), out, where=places[1]).archives  # a task that comes late finds all done
        assert (out / "prepared.json").stat().st_mtime_ns == before
        with pytest.raises(Refused, match="prepared from other"):
            made(open_reader(**settings, seed=1), out, where=places[1])
    patch.undo()
    assert not alarm.exists()
    assert contents(out) == contents(tmp_path / "whole")


def test_a_job_that_another_completes_while_it_starts_ends_well(open_reader: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It looked before the folder was complete, and then for indexes that are removed at the end."""
    out = tmp_path / "out"
    manifest, answers, completed = made(open_reader(), out), [False], prepare._completed
    monkeypatch.setattr(prepare, "_completed", lambda *about: answers.pop() if answers else completed(*about))
    assert made(open_reader(), out, where=Where(0, 1, 3)) == manifest
    assert not answers and not (out / prepare.INDEXES).exists()


def test_a_partition_is_a_pure_function(open_reader: Open, tmp_path: Path) -> None:
    """Any process, in any folder and order, writes the same bytes."""
    manifest = made(open_reader(), tmp_path / "out")
    reader = open_reader()
    plan = existing_plan(LocalStore(tmp_path / "out" / "job" / "packs"))
    assert plan is not None
    [rows] = (tmp_path / "out").glob("job/packs/plan/files-*/rows.npy")
    write = prepare.WriteArchive((reader.training.index.sources, ()), rows, reader.rule, None)
    assert len(plan) == len(manifest.archives) > 1
    for number in reversed(range(len(plan))):
        folder = tmp_path / f"else{number}"
        folder.mkdir()
        pickle.loads(pickle.dumps(write))(plan.partition(number), folder)
        assert (folder / "archive.tar").read_bytes() == (tmp_path / "out" / "shards" / f"{number:05d}.tar").read_bytes()
        [entries] = (tmp_path / "out").glob(f"job/packs/files/*/{number:09d}-*/entries.json")
        assert (folder / "entries.json").read_bytes() == entries.read_bytes()


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "harm",
    [
        lambda out: flipped(out / "shards" / "00001.tar"),
        lambda out: (out / "shards" / "00001.tar").unlink(),
        lambda out: shutil.copy(out / "shards" / "00000.tar", out / "shards" / "00001.tar"),
        lambda out: flipped(next((out / "index").rglob("*.index"))),
        lambda out: next((out / "index").rglob("*.index")).unlink(),
    ],
    ids=["a bit of an archive", "an archive", "a foreign archive", "a bit of an index", "an index"],
)
def test_damage_is_noticed_and_repaired(open_reader: Open, tmp_path: Path, harm: Callable[[Path], Any]) -> None:
    out = tmp_path / "out"
    made(open_reader(), out)
    sound = contents(out)
    harm(out)
    with pytest.raises(StorageFailed, match=r"00001\.tar|\.index"):
        list(training_steps(open_reader(prepared=str(out)), BUDGET, 1, 1))
    made(open_reader(), out)
    assert contents(out) == sound


def test_large_archives_are_known_by_their_size(open_reader: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared_folder, "HASHED", 10)
    made(open_reader(), tmp_path / "out")
    path = tmp_path / "out" / "shards" / "00001.tar"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(StorageFailed, match=r"00001\.tar is damaged"):
        open_reader(prepared=str(tmp_path / "out"))


def test_an_index_of_another_plan_is_noticed(open_reader: Open, tmp_path: Path) -> None:
    """Its digest is sound, and still it is not what was planned over."""
    made(open_reader(), tmp_path / "out")
    path = tmp_path / "out" / "prepared.json"
    value = json.loads(path.read_text())
    path.write_text(json.dumps(value | {"windows": ["0" * 16, *value["windows"][1:]]}))
    with pytest.raises(StorageFailed, match="window 0 has plan"):
        list(training_steps(open_reader(prepared=str(tmp_path / "out")), BUDGET, 1, 1))


def test_other_settings_are_refused_by_name(open_reader: Open, folder: Path, tmp_path: Path, qwen: Encoder, rule: ImageRule) -> None:
    made(open_reader(), tmp_path / "out")
    there = {"prepared": str(tmp_path / "out")}

    def refused(match: str, budget: Budget = BUDGET, **more: Any) -> None:
        with pytest.raises(Refused, match=match):
            sizing_of(open_reader(**there, **more), budget)

    refused(r"budget .*\.1 \(80 → 81\)|budget", Budget(90, 81))
    refused(r"order \(seed", seed=1)
    refused(r"image rule", rule=ImageRule(8, 2, rule.mean, rule.std, "bicubic", Square(64)))
    refused(r"validation_fraction \(0\.0 → 0\.2\)", validation_fraction=0.2)
    refused(r"max_samples_per_image \(1 → 2\)", max_samples_per_image=2)
    refused(r"overlong \('reject' → 'drop_turns'\)", overlong="drop_turns")
    refused(r"sources\.0\.limit \(None → 3\)", sources=(Source(path=str(folder / "rows.json"), limit=3),))
    refused(r"sources\.0\.path", sources=(Source(path=str(folder / "other.json")),))
    with pytest.raises(Refused, match="tokenizer"):
        sizing_of(reader_of(open_reader(**there).data, qwen, rule, 0), BUDGET)
    with pytest.raises(Refused, match="is not a folder of prepared data"):
        open_reader(prepared=str(folder))
    path = tmp_path / "out" / "prepared.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 2, "packs": 4, "plan": "0"}))
    refused("has format version 2.*Prepare the data again")


def test_a_folder_of_another_job_is_left_alone(open_reader: Open, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(open_reader(), tmp_path / "out")
    before = contents(tmp_path / "out")
    with pytest.raises(Refused, match="prepared from other"):
        made(open_reader(seed=1), tmp_path / "out")
    os.utime(folder / "3.png", (1, 1))  # another image, as far as its time says
    with pytest.raises(Refused, match="prepared from other"):
        made(open_reader(), tmp_path / "out")
    assert contents(tmp_path / "out") == before
    monkeypatch.setattr(prepare.os, "statvfs", lambda path: type("", (), {"f_bavail": 10, "f_frsize": 512}))
    with pytest.raises(Refused, match=r"has room for 5,120 bytes, and about [0-9,]+ are needed"):
        made(open_reader(), tmp_path / "new")


def test_a_disk_that_is_full_leaves_no_part_of_an_archive(open_reader: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fsync

    def full(handle: int) -> None:
        if os.readlink(f"/proc/self/fd/{handle}").endswith(".tar"):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(handle)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageFailed, match=r"could not write .*archive\.tar.*No space left"):
        made(open_reader(), tmp_path / "out")
    assert not list((tmp_path / "out").rglob("*.tar"))


# Images scaled down


def test_large_images_are_scaled_down_and_the_data_are_others(
    open_reader: Open, folder: Path, tmp_path: Path, draw: Callable[..., Path], rule: ImageRule
) -> None:
    for n in range(4):
        draw(f"set/{n}.png", seed=n, width=200, height=100)
    draw("set/4.png", seed=4, width=20, height=300)  # not larger than the square both ways: it stays
    settings = {"max_samples_per_image": 2}
    plainly = made(open_reader(**settings), tmp_path / "plain")
    manifest = made(open_reader(**settings), tmp_path / "small", quality=90)
    assert sum(a.bytes for a in manifest.archives) < 0.7 * sum(a.bytes for a in plainly.archives)
    source, stored = open_reader(**settings), open_reader(**settings, prepared=str(tmp_path / "small"))
    one, two = list(training_steps(source, BUDGET, 2, 1)), list(training_steps(stored, BUDGET, 2, 1))
    for left, right in zip(one, two, strict=True):
        for a, b in zip(left.batches, right.batches, strict=True):
            assert a.ids == b.ids  # the square takes as many patches of a large image as of a small one
            assert (a.patches_PC.float() - b.patches_PC.float()).abs().mean() < 12
    assert any(
        not (a.patches_PC == b.patches_PC).all() for x, y in zip(one, two, strict=True) for a, b in zip(x.batches, y.batches, strict=True)
    )
    sizes = {width_and_height(p) for s in sorted_samples(stored.data) for p in s.images if p.name != "broken.png"}
    assert sizes == {(32, 32), (20, 12), (20, 300)}
    assert_sizes_are_those_of_the_images(stored)
    for reader, state in ((source, two[0].state), (stored, one[0].state)):
        with pytest.raises(Refused, match="These differ: data"):
            next(training_steps(reader, BUDGET, 2, 1, state))
    assert all(
        p.name.endswith(".png") and decode(p) is not None for s in sorted_samples(stored.data) for p in s.images if "br" not in p.name
    )


def test_a_model_without_a_tower_looks_at_no_images(folder: Path, tmp_path: Path, plain: Encoder) -> None:
    """Rows with images are rejects then, here and there; and there is nothing to scale down."""

    def reader(**more: Any) -> Reader:
        return reader_of(Data(sources=(Source(path=str(folder / "rows.json")),), max_reject_rate=1.0, **more), plain, None, 0)

    made(reader(), tmp_path / "out")
    wanted = list(training_steps(reader(), BUDGET, 2, 2))
    assert_same_steps(list(training_steps(reader(prepared=str(tmp_path / "out")), BUDGET, 2, 2)), wanted)
    with pytest.raises(Refused, match="reads text only"):
        made(reader(), tmp_path / "other", quality=90)


def test_scaled_to_the_area_that_a_model_looks_at(open_reader: Open, folder: Path, tmp_path: Path, draw: Callable[..., Path]) -> None:
    """The plan then stays: an image of that size is taken as it is."""
    for n in range(9):
        draw(f"set/{n}.png", seed=n, width=90 + 10 * n, height=120)
    rule = ImageRule(8, 2, (0.5,) * 3, (0.5,) * 3, "bicubic", Area(16 * 16, 48 * 48))
    plainly = made(open_reader(rule=rule), tmp_path / "plain")
    small = made(open_reader(rule=rule), tmp_path / "small", quality=95)
    assert small.windows == plainly.windows
    stored = open_reader(rule=rule, prepared=str(tmp_path / "small"))
    assert list(training_steps(stored, BUDGET, 1, 2))
    assert {max(width_and_height(p)) for s in sorted_samples(stored.data) for p in s.images if p.name != "broken.png"} <= {32, 48, 64}


def assert_sizes_are_those_of_the_images(reader: Reader) -> None:
    [rows] = reader.training.index.sources
    for shard in range(len(rows.shards)):
        index = reader.training.index.shard(0, shard)
        for n in np.flatnonzero(~index.bad_R).tolist():
            images = rows.read(index.place(shard, n)).images
            assert index.sizes(n) == tuple(width_and_height(p)[::-1] for p in images)


def sorted_samples(data: Data) -> list[Sample]:
    return sorted(training_samples(data), key=lambda sample: sample.id)


def same_sample(one: Sample, two: Sample, names: bool = True) -> bool:
    """Whether they say and show the same, wherever their images are stored."""

    def image(p: EncodedImage) -> Any:
        try:
            shown = decode(p).tobytes()
        except BadSample as bad:
            shown = bad.cause
        return p.name if names else "", shown

    def part(p: Text | EncodedImage | Video) -> Any:
        match p:
            case Text():
                return p
            case EncodedImage():
                return image(p)
            case Video():
                return [image(frame) for frame in p.frames], p.seconds

    said = [[(m.role, [part(p) for p in m.parts]) for m in s.messages] for s in (one, two)]
    return said[0] == said[1] and one.kind == two.kind and (not names or one.id == two.id)
