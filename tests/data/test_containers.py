"""Shards: every row once, the same in order and by place, however the file is cut; a store that fails, and files that change."""

import errno
import io
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
from PIL import Image as Pillow

from eyeline.core.batch import Budget, EncodedImage, Span
from eyeline.core.errors import BadSample, Refused, StorageFailed
from eyeline.core.files import read_lines
from eyeline.data.containers import container as containers
from eyeline.data.containers import csv_rows, json_rows
from eyeline.data.containers.container import File, Place, fingerprints, persistent, span_file
from eyeline.data.containers.json_rows import open_lines, open_list
from eyeline.data.images.decode import decode, width_and_height
from eyeline.data.images.image_files import image_key
from eyeline.data.loader import training_steps
from eyeline.data.reader import reader_of
from eyeline.data.sets import Data
from eyeline.data.sources.sources import Source, open_source
from eyeline.data.text.tokenizer import Encoder
from tests.data.read_back import everything

ODD = ["plain", 'nested [ ] { } " , \\', "bytes ä 漢 \N{GRINNING FACE}", "x" * 300, "", "line\nbreak\ttab"]


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize("step", [1, 7, 64, 1000, 1 << 20])
def test_lines_are_read_once_however_the_file_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, ending: str) -> None:
    monkeypatch.setattr(json_rows, "SHARD_BYTES", step)
    rng = random.Random(0)
    rows = [{"n": n, "text": rng.choice(ODD)} for n in range(40)]
    lines = [json.dumps(row, ensure_ascii=rng.random() < 0.5) for row in rows]
    blank = [line + ending * rng.randint(1, 3) for line in lines[:-1]] + [lines[-1]]  # no newline ends the file
    path = tmp_path / "x.jsonl"
    path.write_bytes("".join(blank).encode())
    container = open_lines(path, 0)
    assert everything(container) == rows
    assert len(container.shards) == -(-path.stat().st_size // step)


def test_a_line_over_the_cap_spans_ranges_and_spoils_only_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_rows, "SHARD_BYTES", 64)
    monkeypatch.setattr(json_rows, "MAX_LINE_BYTES", 100)
    path = tmp_path / "x.jsonl"
    path.write_text('{"n": 0}\n' + '{"n": "' + "x" * 500 + '"}\n{"n": 2}\n' + '{"n": "' + "y" * 500)
    rows = everything(open_lines(path, 0))
    assert [row.cause if isinstance(row, BadSample) else row["n"] for row in rows] == [0, "line_too_long", 2, "line_too_long"]


@pytest.mark.parametrize(("shard_rows", "shard_bytes"), [(1, 1 << 20), (7, 1 << 20), (2048, 200), (2048, 1 << 20)])
def test_a_list_is_cut_into_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard_rows: int, shard_bytes: int) -> None:
    monkeypatch.setattr(json_rows, "SHARD_ROWS", shard_rows)
    monkeypatch.setattr(json_rows, "SHARD_BYTES", shard_bytes)
    rng = random.Random(1)
    rows = [[n, {"text": rng.choice(ODD), "deep": [1.5, None, {"a": []}]}] for n in range(50)]
    for name, text in {"dense": json.dumps(rows, ensure_ascii=False), "airy": "\ufeff \n" + json.dumps(rows, indent=2) + "\r\n "}.items():
        path = tmp_path / f"{name}.json"
        path.write_text(text, encoding="utf-8")
        container = open_list(path, 0)
        assert everything(container) == rows
        places = [place for shard in range(len(container.shards)) for place, _ in container.rows(shard)]
        assert [container.origin_of(place)[2] for place in places] == list(range(50))
        assert max(place.number for place in places) < shard_rows


@pytest.mark.parametrize("text", ["[1, 2", "[1 2]", "[1],", "[1,]", "[,1]", "[1]]", "[1] {}", '["a]', "[nul]", "[1,,2]"])
def test_what_is_no_list_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"."):
        json.loads(text)
    with pytest.raises(Refused, match=r"x\.json is not JSON"):
        open_list(path, 0)


def test_ids_name_file_and_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_rows, "SHARD_BYTES", 20)
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps({"n": n}) + "\n" for n in range(5)))  # nine bytes each
    container = open_lines(path, 0)
    assert [container.origin_of(p)[0] for s in range(3) for p, _ in container.rows(s)] == [
        *("x.jsonl#0", "x.jsonl#1", "x.jsonl#2"),
        *("x.jsonl@20#0", "x.jsonl@20#1"),
    ]


# Numbers that a user can go by


def odd_text(tmp_path: Path, kind: str) -> tuple[Path, list[int], list[int]]:
    """A file in several ranges, in which row 7 of every ten is broken; the numbers and the lines of the broken rows."""
    say = {"messages": [{"role": "user", "content": "a" * 30}, {"role": "assistant", "content": "b"}]}
    rows = [json.dumps(say | ({"n": 10**50} if n % 10 == 7 else {})) for n in range(40)]
    bad = list(range(7, 40, 10))
    match kind:
        case "lines":
            (tmp_path / "x.jsonl").write_text("\n".join(rows))
            return tmp_path / "x.jsonl", bad, [n + 1 for n in bad]
        case "lines, some of them blank":  # an editor counts them
            (tmp_path / "x.jsonl").write_text("\n".join(row + "\n" * (n % 3) for n, row in enumerate(rows)) + "\n")
            lines = (tmp_path / "x.jsonl").read_text().split("\n")
            bad = [n for n, line in enumerate(lines) if "000000" in line]
            return tmp_path / "x.jsonl", bad, [n + 1 for n in bad]
        case "list":
            (tmp_path / "x.json").write_text("[\n" + ",\n\n".join(rows) + "]")
            return tmp_path / "x.json", bad, [2 * n + 2 for n in bad]
        case _:
            cells = [f'"a line\nand another {n}",{"b" if n % 10 != 7 else "b,c"}\n' for n in range(40)]
            (tmp_path / "x.csv").write_text("question,answer\n" + "".join(cells))
            return tmp_path / "x.csv", bad, [2 * n + 2 for n in bad]


@pytest.mark.parametrize("block", [50, 1 << 20])
@pytest.mark.parametrize("kind", ["lines", "lines, some of them blank", "list", "table"])
def test_numbers_of_rejects_count_from_the_start_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, block: int, plain: Encoder
) -> None:
    """As `sed -n` and an editor find them, in every range; by the index, by the page of `check`, and in rejects.jsonl."""
    monkeypatch.setattr(containers, "COUNTED_BYTES", block)
    for module in (json_rows, csv_rows):
        monkeypatch.setattr(module, "SHARD_BYTES", 300)
    path, numbers, lines = odd_text(tmp_path, kind)
    rows = open_source(Source(path=str(path)))
    assert len(rows.shards) >= 4
    found = [rows.reject(place, bad) for place, _, bad in rows.kept_rows() if isinstance(bad, BadSample)]
    assert [(reject.row, reject.message.rpartition(" ")[2]) for reject in found] == [
        (n, f"{m})") for n, m in zip(numbers, lines, strict=True)
    ]
    reader = reader_of(Data(sources=(Source(path=str(path)),), max_reject_rate=1.0), plain, None, 0, tmp_path / "run")
    assert len([id for step in training_steps(reader, Budget(400, 100), 1, 1) for batch in step.batches for id in batch.ids]) == 36
    written = sorted((line["row"], line["message"]) for line in read_lines(tmp_path / "run" / "rejects.jsonl"))
    assert written == [(reject.row, reject.message) for reject in found]


def test_the_first_row_of_a_range_is_numbered_without_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prepared folder keeps the number of the first row of each range."""
    monkeypatch.setattr(json_rows, "SHARD_BYTES", 20)
    (tmp_path / "x.jsonl").write_text("".join(json.dumps({"n": n}) + "\n" for n in range(500)))
    container = open_lines(tmp_path / "x.jsonl", 0)
    for shard in range(len(container.shards)):
        place = next((place for place, _ in container.rows(shard)), None)
        if place is not None:
            assert (
                container.origin_of(place)
                == container.origin_of(Place(shard, 0, 0, 0))
                == (container.id(place), *container.origin_of(place)[1:])
            )


# Brackets


def test_a_row_of_a_list_that_is_nested_too_deep_is_rejected_alone(tmp_path: Path) -> None:
    deep = {"nine hundred": "[" * 909 + "]" * 909, "more": "[" * 910 + "]" * 910, "far more": '{"a": [' * 90_000 + "]}" * 90_000}
    for name, value in deep.items():
        (tmp_path / "x.json").write_text(f'[{{"n": 0, "a": "[[ \\" ]"}}, {{"n": {value}}}, {{"n": 2}}]')
        found = everything(open_list(tmp_path / "x.json", 0))
        assert [row.cause if isinstance(row, BadSample) else row["n"] == n or "deep" for n, row in enumerate(found)] == [
            *(True, "deep" if name == "nine hundred" else "nesting", True),
        ]
        (tmp_path / "x.jsonl").write_text(f'{{"n": 0}}\n{{"n": {value}}}\n{{"n": 2}}')
        found = everything(open_lines(tmp_path / "x.jsonl", 0))
        assert [isinstance(row, BadSample) for row in found] == [False, name != "nine hundred", False]
    (tmp_path / "x.json").write_text('[{"n": ' + "[" * 90_000 + "}]")
    with pytest.raises(Refused, match=r"x\.json is not JSON: Brackets are nested too deep and never closed"):
        open_list(tmp_path / "x.json", 0)


def test_brackets_in_texts_are_not_counted(tmp_path: Path) -> None:
    rows = [{"text": '[{"\\' * 500}, {"wide": [[1]] * 1000}, {"text": "\\" * 301 + '"[' * 200}]
    (tmp_path / "x.json").write_text(json.dumps(rows))
    assert everything(open_list(tmp_path / "x.json", 0)) == rows


@pytest.mark.parametrize(("text", "where"), [('{"a": "b', "Unterminated string starting at character 6"), ('{"a" 1}', "delimiter at char")])
def test_messages_of_broken_json_read_as_sentences(text: str, where: str) -> None:
    with pytest.raises(BadSample, match=where):
        json_rows.row_of(text.encode())


# Content and change


def test_fingerprint_of_small_and_large_files(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_bytes(b"a" * 100)
    two.write_bytes(b"a" * 100)
    os.utime(two, ns=(1, 1))

    def prints(hashed: int = 200) -> list[str]:
        return fingerprints([File.of(path, 0) for path in (one, two)], hashed)

    assert len(set(prints())) == 1
    assert len(set(prints(199))) == 2
    two.write_bytes(b"b" * 100)
    os.utime(two, ns=(os.stat(one).st_mtime_ns,) * 2)
    assert len(set(prints(199))) == 1  # their content was not read


def test_one_changed_row_changes_the_fingerprint_of_its_shard_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_rows, "SHARD_ROWS", 4)
    path = tmp_path / "x.json"

    def prints(rows: list[int]) -> list[str]:
        path.write_text(json.dumps(rows))
        return [shard.fingerprint for shard in open_list(path, 0).shards]

    before, after = prints(list(range(10, 22))), prints([*range(10, 16), 99, *range(17, 22)])
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, False, True]


@pytest.mark.parametrize("name", ["x.jsonl", "x.json"])
@pytest.mark.parametrize("how", ["grown", "cut", "rewritten", "gone"])
def test_a_file_that_changes_while_it_is_used_stops_the_run(tmp_path: Path, name: str, how: str) -> None:
    path = tmp_path / name
    rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": str(n)}]} for n in range(9)]
    path.write_text("\n".join(map(json.dumps, rows)) if name == "x.jsonl" else json.dumps(rows))
    opened = open_source(Source(path=str(path)))
    place = next(opened.rows_in(0))[0]
    text = path.read_bytes()
    match how:
        case "grown":
            path.write_bytes(text + b"\n")
        case "cut":
            path.write_bytes(text[:-10])
        case "rewritten":
            path.write_bytes(text.replace(b"a", b"b"))
        case _:
            path.unlink()
    for read in (lambda: opened.read(place), lambda: list(opened.rows_in(0))):
        with pytest.raises(StorageFailed, match=r"No such file" if how == "gone" else rf"{name} has changed since it was opened"):
            read()


def test_a_file_that_ends_early_is_no_short_answer(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"12345")
    file = File.of(path, 0)
    assert file.read(1, 3) == b"234"
    with pytest.raises(StorageFailed, match="ended 2 bytes early"):
        file.read(3, 4)


# A store that fails


def failing(numbers: list[int | None]) -> Any:
    """A reader that fails with each error in turn (None: without one), and then answers 7."""
    left = list(numbers)

    def read() -> int:
        if left:
            number = left.pop(0)
            cause = OSError(number, os.strerror(number)) if number else None
            raise StorageFailed("could not read x.") from cause
        return 7

    read.left = left  # type: ignore[attr-defined]
    return read


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    out: list[float] = []
    monkeypatch.setattr(containers.time, "sleep", out.append)
    return out


def test_a_store_that_comes_back_is_waited_for(waits: list[float]) -> None:
    assert persistent(failing([errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ECONNRESET, errno.EIO]), 5) == 7
    assert waits == [0.5, 2, 8, 30, 30]


def test_a_store_that_stays_away_stops_the_run(waits: list[float]) -> None:
    with pytest.raises(StorageFailed, match=r"could not read x\. Tried 3 times"):
        persistent(failing([errno.EIO] * 3), 2)
    assert len(waits) == 2


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EACCES, errno.EISDIR, None])
def test_what_will_not_pass_is_not_tried_again(waits: list[float], number: int | None) -> None:
    read = failing([number, errno.EIO])
    with pytest.raises(StorageFailed, match=r"^could not read x\.$"):
        persistent(read, 5)
    assert waits == []
    assert len(read.left) == 1


@pytest.mark.parametrize("name", ["x.jsonl", "x.json"])
def test_a_store_that_fails_now_and_then_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits: list[float], name: str
) -> None:
    """Every second request of the system fails, opening and reading; every one comes in pieces."""
    path = tmp_path / name
    rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": str(n)}]} for n in range(9)]
    path.write_text("\n".join(map(json.dumps, rows)) if name == "x.jsonl" else json.dumps(rows))
    container = open_source(Source(path=str(path)), retries=1).container
    wanted = everything(container)
    calls = {"open": 0, "pread": 0}

    def often(what: str, real: Any) -> Any:
        def call(*args: Any) -> Any:
            calls[what] += 1
            if calls[what] % 2:
                raise OSError(errno.EIO, "Input/output error")
            return real(*args) if what == "open" else real(args[0], min(args[1], 50), args[2])

        return call

    monkeypatch.setattr(containers.os, "open", often("open", os.open))
    monkeypatch.setattr(containers.os, "pread", often("pread", os.pread))
    assert everything(container) == wanted
    assert min(calls.values()) > 10
    assert len(waits) == sum(calls.values()) // 2
    monkeypatch.setattr(containers.os, "pread", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "Input/output error")))
    calls["open"] = 1
    with pytest.raises(StorageFailed, match=r"could not read .*Input/output error.* Tried 2 times"):
        list(container.rows(0))


# Parts of files


def test_an_image_inside_a_file_is_read_as_far_as_needed(tmp_path: Path) -> None:
    out = io.BytesIO()
    Pillow.effect_noise((400, 300), 90).convert("RGB").save(out, "JPEG", quality=95)
    data = out.getvalue()
    path = tmp_path / "x.bin"
    path.write_bytes(b"before" + data + b"after")
    stamp = File.of(path, 0).stamp
    here = EncodedImage("a.jpg", Span(path, 6, len(data), stamp))
    assert width_and_height(here) == (400, 300)
    assert (decode(here) == decode(EncodedImage("a.jpg", data))).all()
    held = EncodedImage("a.jpg", Span(path, 6, len(data), stamp, data))
    assert image_key(held) == image_key(here) == f"{path}@6+{len(data)}"
    with span_file(here.source) as file:  # type: ignore[arg-type]
        assert file.read() == data
        assert file.read() == b""
        file.seek(-5, os.SEEK_END)
        assert file.read(100) == data[-5:]
        file.seek(2)
        assert (file.tell(), file.read(3)) == (2, data[2:5])
    cut = EncodedImage("a.jpg", Span(path, 6, len(data) // 2, stamp))
    with pytest.raises(BadSample, match="truncated") as caught:
        decode(cut)
    assert caught.value.cause == "broken_image"
    path.write_bytes(b"other")
    with pytest.raises(StorageFailed, match=r"x\.bin has changed since it was opened"):
        width_and_height(here)
    assert width_and_height(held) == (400, 300)  # nothing is read
