"""Folders: which files are the data, in every kind that there is, and what is refused with the way out of it."""

import base64
import json
import pickle
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pytest

from eyeline.core.batch import Sample
from eyeline.core.errors import BadSample, Refused, StorageFailed
from eyeline.data.containers import sidecars
from eyeline.data.sources.sources import Rows, Source, open_source
from tests.data.container_files import TALK, archive, encoded
from tests.data.container_files import arrow_file as as_arrow
from tests.data.container_files import parquet_file as as_parquet
from tests.data.read_back import everything
from tests.data.short_samples import chat


def opened(path: Path, **settings: Any) -> Rows:
    return open_source(Source(path=str(path), **settings))


def answers(rows: Rows) -> list[str]:
    """The last answer of each row, or the cause of its reject; by place they are the same."""
    everything(rows.container)
    out: list[str] = []
    for place, _, found in rows.kept_rows():
        if isinstance(found, BadSample):
            out.append(found.cause)
        else:
            assert rows.read(place) == found
            out.append(found.messages[-1].parts[0].text)  # type: ignore[union-attr]
    return out


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def lines(*rows: Any) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


# Images and a table


TABLES = {
    "csv": lambda path: write(path, "file_name,text\n1.png,one\nin/2.png,two\n"),
    "jsonl": lambda path: write(path, lines({"file_name": "1.png", "text": "one"}, {"file_name": "in/2.png", "text": "two"})),
    "parquet": lambda path: as_parquet(path, [{"file_name": "1.png", "text": "one"}, {"file_name": "in/2.png", "text": "two"}]),
}


@pytest.mark.parametrize("end", TABLES)
def test_images_with_a_table(tmp_path: Path, end: str) -> None:
    for name in ("1.png", "in/2.png", "3.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(encoded(0, "PNG"))
    write(tmp_path / "2.txt", "no caption")
    TABLES[end](tmp_path / f"metadata.{end}")
    rows = opened(tmp_path)
    assert (rows.layout.name, rows.path) == ("captions", tmp_path / f"metadata.{end}")
    assert answers(rows) == ["one", "two"]
    assert [p.source for *_, found in rows.kept_rows() if isinstance(found, Sample) for p in found.images] == [
        tmp_path / "1.png",
        tmp_path / "in/2.png",
    ]


def test_tables_of_several_splits(tmp_path: Path) -> None:
    for split in ("train", "test"):
        write(tmp_path / split / "metadata.csv", "file_name,text\n1.png,one\n")
    with pytest.raises(Refused, match=r"holds test/metadata\.csv, train/metadata\.csv\. Name one of them"):
        opened(tmp_path)
    rows = opened(tmp_path / "train")
    assert next(iter(rows.kept_rows()))[2].images[0].source == tmp_path / "train" / "1.png"  # type: ignore[union-attr]
    (tmp_path / "test" / "metadata.csv").unlink()
    assert next(iter(opened(tmp_path).kept_rows()))[2].images[0].source == tmp_path / "train" / "1.png"  # type: ignore[union-attr]


def test_questions_in_a_table(tmp_path: Path) -> None:
    write(tmp_path / "metadata.csv", "image_file_name,q,a\n1.png,what?,one\n")
    with pytest.raises(Refused, match=r"its rows have image_file_name, q, a"):
        opened(tmp_path)
    rows = opened(tmp_path, columns={"image": "image_file_name", "question": "q", "answer": "a"})
    assert (rows.layout.name, answers(rows)) == ("question-answer", ["one"])


# Images with a text each


def test_images_with_a_text_beside_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sidecars, "SHARD_ROWS", 2)
    for name in ("b.png", "a.PNG", "in/c.webp", "d.d.jpg", "e.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"never opened")
    for name, text in {"b": "of b\n", "a": "of a", "in/c": "\ufeffof c", "d.d": "of d", "readme": "nothing"}.items():
        write(tmp_path / f"{name}.txt", text)
    rows = opened(tmp_path)
    assert rows.layout.why.startswith("images with a .txt of the same name, but 1 without; row 0 has image and caption")
    assert answers(rows) == ["of a", "of b", "of d", "no_target", "of c"]
    assert [len(list(rows.rows_in(shard))) for shard in range(3)] == [2, 2, 1]
    assert [rows.origin_of(place)[0] for place, _, _ in rows.kept_rows()] == [f"{tmp_path.name}#{n}" for n in range(5)]
    assert [f.images[0].source for *_, f in rows.kept_rows() if isinstance(f, Sample)] == [
        tmp_path / n for n in ("a.PNG", "b.png", "d.d.jpg", "in/c.webp")
    ]
    again = pickle.loads(pickle.dumps(rows))
    assert answers(again) == answers(rows)
    before = [shard.fingerprint for shard in rows.shards]
    (tmp_path / "in/c.txt").write_text("of another")
    with pytest.raises(StorageFailed, match=r"c\.txt has changed"):
        answers(rows)
    assert [a == b for a, b in zip(before, [shard.fingerprint for shard in opened(tmp_path).shards], strict=True)] == [True, True, False]


def test_texts_that_cannot_be_captions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sidecars, "MAX_TEXT_BYTES", 20)
    for n, text in enumerate((b"fine", b"", b"\xff", b"x" * 21)):
        (tmp_path / f"{n}.png").write_bytes(b"never opened")
        (tmp_path / f"{n}.txt").write_bytes(text)
    assert answers(opened(tmp_path))[0] == "fine"
    assert answers(opened(tmp_path))[2:] == ["bad_unicode", "file_too_large"]
    monkeypatch.setattr(sidecars, "MAX_IMAGES", 3)
    with pytest.raises(Refused, match=r"holds 4 images .* metadata\.csv"):
        opened(tmp_path)


def test_images_alone(tmp_path: Path) -> None:
    for n in range(3):
        (tmp_path / f"{n}.png").write_bytes(b"never opened")
    with pytest.raises(Refused, match=r"3 images, and no file that describes them\. Put a metadata\.csv"):
        opened(tmp_path)


# What `datasets` saves


def saved(folder: Path, captions: list[str], files: int = 1) -> Path:
    """As `Dataset.save_to_disk` writes it (datasets 5.2)."""
    folder.mkdir(parents=True)
    names = [f"data-{n:05}-of-{files:05}.arrow" for n in range(files)]
    for n, name in enumerate(names):
        as_arrow(
            folder / name,
            arrow.Table.from_pylist([{"image": {"bytes": encoded(0), "path": None}, "caption": c} for c in captions[n::files]]),
        )
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "26c1", "_format_type": None, "_split": None}
    write(folder / "state.json", json.dumps(state, indent=2))
    write(folder / "dataset_info.json", json.dumps({"features": {"image": {"_type": "Image"}}}))
    return folder


def test_a_set_that_datasets_saved(tmp_path: Path) -> None:
    rows = opened(saved(tmp_path / "set", ["a", "b", "c"], files=2))
    assert rows.layout.why.startswith("Arrow; row 0 has image and caption")
    assert answers(rows) == ["a", "c", "b"]


def test_several_splits_that_datasets_saved(tmp_path: Path) -> None:
    for split in ("test", "train"):
        saved(tmp_path / split, [split])
    write(tmp_path / "dataset_dict.json", '{"splits": ["test", "train"]}')
    with pytest.raises(Refused, match=r"holds the splits test, train\. Name one of them, such as .*/train$"):
        opened(tmp_path)
    assert answers(opened(tmp_path / "train")) == ["train"]
    write(tmp_path / "dataset_dict.json", '{"splits": ["train"]}')
    assert answers(opened(tmp_path)) == ["train"]
    write(tmp_path / "dataset_dict.json", '{"splits": ["training"]}')
    with pytest.raises(Refused, match=r"names training, and its state\.json does not exist"):
        opened(tmp_path)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ('{"_data_files": [{"filename": "data-1.arrow"}]}', r"names data-1\.arrow, and it does not exist"),
        ('{"_data_files": []}', "names no files"),
        ('{"_data_files": [{"filename": "../x.arrow"}]}', r"names \.\./x\.arrow, and it does not exist"),
        (
            '{"_data_files": [{"filename": "data-00000-of-00001.arrow"}], "_indices_data_files": [{"filename": "i.arrow"}]}',
            "flatten_indices",
        ),
        ("{torn", "is not JSON"),
        ("[]", "names no files"),
    ],
)
def test_saved_sets_that_are_not_whole(tmp_path: Path, state: str, message: str) -> None:
    saved(tmp_path / "set", ["a"])
    write(tmp_path / "set" / "state.json", state)
    with pytest.raises(Refused, match=message):
        opened(tmp_path / "set")


# Several files


def row(n: int) -> dict[str, Any]:
    return {"messages": chat("hi", f"answer {n}")}


def test_repositories_of_the_hub(tmp_path: Path) -> None:
    """data/train-00000-of-00002.parquet and a card, with another split next to it."""
    write(tmp_path / "README.md", "---\nconfigs: []\n---")
    write(tmp_path / "dataset_infos.json", "{}")
    (tmp_path / "data").mkdir()
    for n in range(2):
        as_parquet(tmp_path / "data" / f"train-0000{n}-of-00002.parquet", [row(n)])
    assert answers(opened(tmp_path)) == ["answer 0", "answer 1"]
    as_parquet(tmp_path / "data" / "validation-00000-of-00001.parquet", [row(2)])
    with pytest.raises(Refused, match=r"files of train, validation, .* such as .*/\*\*/\*train\*\.parquet"):
        opened(tmp_path)
    assert answers(opened(tmp_path / "**/*train*.parquet")) == ["answer 0", "answer 1"]


@pytest.mark.parametrize("how", ["folder", "pattern"])
def test_several_files_of_rows_are_one_source(tmp_path: Path, how: str) -> None:
    write(tmp_path / "in" / "a.jsonl", lines(row(0), row(1)))
    write(tmp_path / "in" / "b.jsonl", lines(row(2)))
    write(tmp_path / "c" / "a.jsonl", lines(row(3)) + "{torn\n")
    rows = opened(tmp_path if how == "folder" else tmp_path / "**/*.jsonl")
    assert answers(rows) == ["answer 3", "not_json", "answer 0", "answer 1", "answer 2"]
    assert [rows.origin_of(place)[0] for place, _, _ in rows.kept_rows()] == [
        "c/a.jsonl#0",
        "c/a.jsonl#1",
        "in/a.jsonl#0",
        "in/a.jsonl#1",
        "in/b.jsonl#0",
    ]
    assert [rows.origin_of(place)[1:] for place, _, _ in rows.kept_rows()][3] == (str(tmp_path / "in" / "a.jsonl"), 1)
    assert [shard.name for shard in rows.shards] == ["c/a.jsonl@0", "in/a.jsonl@0", "in/b.jsonl@0"]
    assert answers(pickle.loads(pickle.dumps(rows))) == answers(rows)


def test_several_tables_and_lists(tmp_path: Path) -> None:
    for n in range(2):
        write(tmp_path / f"{n}.csv", f"question,answer\nhi,answer {n}\n")
        write(tmp_path / f"{n}.json", json.dumps([row(n)] * n))
    assert answers(opened(tmp_path / "*.csv")) == answers(opened(tmp_path)) == ["answer 0", "answer 1"]
    assert answers(opened(tmp_path / "*.json")) == ["answer 1"]
    write(tmp_path / "2.json", lines(row(2)))
    with pytest.raises(Refused, match=r"0\.json is JSON list, and .*2\.json is JSON lines"):
        opened(tmp_path / "*.json")


def test_the_one_json_file_of_a_folder(tmp_path: Path) -> None:
    write(tmp_path / "llava.json", json.dumps([TALK | {"image": "a.png"}]))
    write(tmp_path / "a.png", "never opened")
    write(tmp_path / "dataset_info.json", "{}")
    rows = opened(tmp_path)
    assert (rows.path, answers(rows)) == (tmp_path / "llava.json", ["a dot"])
    write(tmp_path / "other.json", "[]")
    with pytest.raises(Refused, match=r"several \.json files\. Give one of its files: llava\.json, other\.json"):
        opened(tmp_path)


def test_folders_of_several_kinds_or_none(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="without known data: none of its 0 files"):
        opened(tmp_path)
    write(tmp_path / "a.jsonl", lines(row(0)))
    archive(tmp_path / "a.tar", [("a.json", row(0))])
    with pytest.raises(Refused, match=r"holds both \.tar and \.jsonl files"):
        opened(tmp_path)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"<!DOCTYPE html><html>", "is a web page: the download returned one"),
        (b"<html><body>", "is a web page"),
        (b"\x1f\x8b\x08\0", "is gzip: unpack it first"),
        (b"PK\x03\x04", "is a zip archive: unpack it first"),
        ("[]".encode("utf-16"), "is UTF-16: save it as UTF-8"),
        (b"version https://git-lfs.github.com/spec/v1\noid", "git lfs pull"),
        (encoded(0), "is an image"),
        (base64.b64encode(encoded(0)), "is something that starts with b'/9j/"),
    ],
)
@pytest.mark.parametrize("name", ["rows.json", "rows.csv"])
def test_files_that_hold_no_rows(tmp_path: Path, data: bytes, message: str, name: str) -> None:
    if message.startswith("is something") and name == "rows.csv":
        return
    (tmp_path / name).write_bytes(data)
    with pytest.raises(Refused, match=message):
        opened(tmp_path / name)


# What is followed, and what is skipped


def pair(folder: Path, name: str) -> None:
    """An image with its caption in a file next to it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.png").write_bytes(encoded(0, "PNG"))
    (folder / f"{name}.txt").write_text(name)


def why_of(rows: Rows) -> str:
    return rows.layout.why.partition("skipped: ")[2]


def test_linked_folders_are_followed_once(tmp_path: Path) -> None:
    """Wherever they are, and never in a circle; a folder itself comes before a link to it."""
    pair(tmp_path / "set/real", "one")
    pair(tmp_path / "away/deep", "two")
    pair(tmp_path / "away/deep", "three")
    (tmp_path / "set/a-linked").symlink_to(tmp_path / "away")
    (tmp_path / "set/b-linked").symlink_to(tmp_path / "away/deep")
    (tmp_path / "set/a-real").symlink_to("real")
    (tmp_path / "set/real/up").symlink_to(tmp_path / "set")
    (tmp_path / "set/far-up").symlink_to("/")
    (tmp_path / "away/deep/back").symlink_to(tmp_path / "away")
    (tmp_path / "set/itself").symlink_to(tmp_path / "set/itself")
    (tmp_path / "set/gone.png").symlink_to(tmp_path / "nowhere.png")
    (tmp_path / "set/four.png").symlink_to(tmp_path / "set/real/one.png")
    (tmp_path / "set/four.txt").write_text("four")
    rows = opened(tmp_path / "set")
    assert answers(rows) == ["three", "two", "four", "one"]
    assert why_of(rows) == (
        "5 links to folders that are read already (a-linked/deep/back, a-real, b-linked, …), "
        "2 links to files that do not exist (gone.png, itself)"
    )
    (tmp_path / "door").symlink_to(tmp_path / "set")
    assert answers(opened(tmp_path / "door")) == ["three", "two", "four", "one"]


def test_pattern_finds_each_file_once_with_circular_links(tmp_path: Path) -> None:
    for name in ("in/a", "b"):
        write(tmp_path / f"{name}.jsonl", lines({"messages": chat("?", name)}))
    (tmp_path / "in/up").symlink_to(tmp_path)
    (tmp_path / "in/c.jsonl").symlink_to(tmp_path / "b.jsonl")  # a file is what its name says
    assert answers(opened(tmp_path / "**/*.jsonl")) == ["b", "in/a", "b"]


def test_hidden_backup_and_system_files_are_skipped(tmp_path: Path) -> None:
    pair(tmp_path, "one")
    folders = [".ipynb_checkpoints", ".git", "__MACOSX", ".cache/huggingface", ".Trash", "@eaDir", "__pycache__", "in/.hidden"]
    for folder in folders:
        pair(tmp_path / folder, "copy")
    for name in ("._one.png", "._one.txt", ".two.png", "one.txt~", "#one.txt#", "Thumbs.db", "desktop.ini", ".DS_Store"):
        (tmp_path / name).write_bytes(b"\0")
    rows = opened(tmp_path)
    assert answers(rows) == ["one"]
    assert why_of(rows) == f"{len(folders) + 8} hidden, backup or system files or folders (#one.txt#, .DS_Store, .Trash, …)"
    (tmp_path / "one.txt").unlink()
    with pytest.raises(Refused, match=r"no file that describes them\. Skipped: 16 hidden, backup or system files"):
        opened(tmp_path)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv", "rows.parquet", "rows.tar", "metadata.csv"])
def test_copies_of_an_editor_are_no_second_file(tmp_path: Path, name: str) -> None:
    """They are found in sets of any kind, and under any name."""
    row = {"image": "1.png", "caption": "one"}
    (tmp_path / "1.png").write_bytes(encoded(0, "PNG"))
    match name.partition(".")[2]:
        case "jsonl":
            write(tmp_path / name, lines(row))
        case "csv":
            write(tmp_path / name, "image,caption\n1.png,one\n")
        case "parquet":
            as_parquet(tmp_path / name, [row])
        case _:
            archive(tmp_path / name, [("1.png", encoded(0, "PNG")), ("1.txt", "one")])
    data = (tmp_path / name).read_bytes()
    for copy in (
        f".ipynb_checkpoints/{name}",
        f".ipynb_checkpoints/test-{name}",
        f"{name}~",
        f"._{name}",
        f"__MACOSX/{name}",
        ".git/x.tar",
    ):
        (tmp_path / copy).parent.mkdir(exist_ok=True)
        (tmp_path / copy).write_bytes(data)
    rows = opened(tmp_path)
    assert answers(rows) == ["one"]
    assert why_of(rows).startswith("5 hidden, backup or system files or folders")


def test_a_hidden_folder_that_is_named_is_read(tmp_path: Path) -> None:
    pair(tmp_path / ".cache/set", "one")
    assert answers(opened(tmp_path / ".cache/set")) == ["one"]
