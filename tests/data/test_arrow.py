"""Arrow: the same rows as the same table gives in Parquet, from streams and files; what is damaged is refused or costs its batch."""

import pickle
import random
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pyarrow.ipc as ipc
import pytest

from eyeline.core.batch import Text
from eyeline.core.errors import BadSample, Refused
from eyeline.data.containers import arrow as arrow_rows
from eyeline.data.sources.sources import Rows, Source, open_source
from tests.data.container_files import arrow_file, encoded
from tests.data.container_files import parquet_file as as_parquet
from tests.data.read_back import samples
from tests.data.short_samples import talk


def opened(path: Path, **settings: Any) -> Rows:
    return open_source(Source(path=str(path), **settings))


ROWS = [{"id": n, "messages": talk(n), "images": [{"bytes": encoded(n), "path": f"{n}.jpg"}], "kind": "dot"} for n in range(8)]


@pytest.mark.parametrize("compression", [None, "zstd", "lz4"])
@pytest.mark.parametrize("form", ["stream", "file"])
def test_the_same_as_parquet(tmp_path: Path, form: str, compression: str | None) -> None:
    table = arrow.Table.from_pylist(ROWS)
    found = opened(arrow_file(tmp_path / "x.arrow", table, form=form, compression=compression))
    assert (found.layout.name, found.layout.why) == ("openai", "Arrow; row 0 has messages")
    assert [shard.name for shard in found.shards] == [f"x.arrow[{n}]" for n in range(3)]
    wanted = samples(opened(as_parquet(tmp_path / "x.parquet", ROWS)))
    got = samples(found)
    assert [(s.messages, s.kind) for s in got] == [(s.messages, s.kind) for s in wanted]
    assert got[7].id == "x.arrow[2]#1"
    again = pickle.loads(pickle.dumps(found))
    assert samples(again) == got
    last = [place for place, _, _ in found.rows_in(2)][-1]
    assert found.origin_of(last)[1:] == (str(tmp_path / "x.arrow"), 7)


@pytest.mark.parametrize("form", ["stream", "file"])
def test_every_type_that_texts_and_images_have(tmp_path: Path, form: str) -> None:
    text, data = [f"answer {n}" for n in range(8)], [encoded(n) for n in range(8)]
    types: list[tuple[Any, Any]] = [
        (arrow.large_string(), arrow.large_binary()),
        (arrow.dictionary(arrow.int32(), arrow.string()), arrow.binary()),
        (arrow.string_view(), arrow.binary_view()),
    ]
    for n, (texts, bytes) in enumerate(types):
        columns = {"caption": arrow.array(text, arrow.string()).cast(texts), "image": arrow.array(data, bytes), "label": range(8)}
        got = samples(opened(arrow_file(tmp_path / f"{n}.arrow", arrow.table(columns), form=form)))
        assert [(s.images[0].source, s.messages[1].parts) for s in got] == [(d, (Text(t),)) for d, t in zip(data, text, strict=True)]


def test_turns_as_a_sequence_of_objects(tmp_path: Path) -> None:
    """`datasets` stores a Sequence of objects as an object of lists."""
    rows = [{"conversations": {"from": ["human", "gpt"], "value": ["hi", f"ho {n}"]}} for n in range(3)]
    got = samples(opened(arrow_file(tmp_path / "x.arrow", arrow.Table.from_pylist(rows))))
    assert [[part.text for m in s.messages for part in m.parts] for s in got] == [["hi", f"ho {n}"] for n in range(3)]


def test_several_files_are_one_source(tmp_path: Path) -> None:
    for n in range(2):
        arrow_file(tmp_path / f"data-0000{n}-of-00002.arrow", arrow.Table.from_pylist(ROWS[4 * n : 4 * n + 4]))
    got = samples(opened(tmp_path / "data-*.arrow"))
    assert [s.messages[1].parts[0].text for s in got] == [f"answer {n}" for n in range(8)]
    arrow_file(tmp_path / "data-00002-of-00002.arrow", arrow.table({"caption": ["a"]}))
    with pytest.raises(Refused, match=r"data-00002-of-00002\.arrow has the columns caption, and .* has images, kind, messages"):
        opened(tmp_path / "data-*.arrow")


def test_columns_that_are_called_otherwise(tmp_path: Path) -> None:
    table = arrow.Table.from_pylist([{"meta": {"foto": encoded(n)}, "titel": f"t {n}", "big": "x" * 1000} for n in range(4)])
    found = opened(arrow_file(tmp_path / "x.arrow", table), columns={"image": "meta.foto", "caption": "titel"})
    assert [s.messages[1].parts[0].text for s in samples(found)] == [f"t {n}" for n in range(4)]
    with pytest.raises(Refused, match=r"caption: tite, but its rows have meta, titel, big\. Did you mean 'titel'\?"):
        opened(tmp_path / "x.arrow", columns={"image": "meta.foto", "caption": "tite"})


def test_a_batch_that_is_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrow_rows, "MAX_GROUP_BYTES", 1000)
    with pytest.raises(Refused, match=r"record batch 0 has 3 rows of .*writer_batch_size"):
        opened(arrow_file(tmp_path / "x.arrow", arrow.Table.from_pylist(ROWS)))


def test_words_of_a_dictionary_that_change(tmp_path: Path) -> None:
    with open(tmp_path / "x.arrow", "wb") as file:
        schema = arrow.schema([("caption", arrow.dictionary(arrow.int8(), arrow.string())), ("image", arrow.string())])
        with ipc.new_stream(file, schema) as out:
            for words in (["a", "b"], ["c", "d"]):
                caption = arrow.DictionaryArray.from_arrays(arrow.array([0, 1], arrow.int8()), arrow.array(words))
                out.write_batch(arrow.record_batch([caption, arrow.array(["a.png", "b.png"])], schema))
    with pytest.raises(Refused, match="replaces a dictionary between its record batches"):
        opened(tmp_path / "x.arrow")


# Damage


@pytest.mark.parametrize("form", ["stream", "file"])
def test_files_that_are_cut_are_refused(tmp_path: Path, form: str) -> None:
    whole = arrow_file(tmp_path / "x.arrow", arrow.Table.from_pylist(ROWS), form=form).read_bytes()
    end = len(whole) if form == "stream" else opened(tmp_path / "x.arrow").container.groups[-1].part  # type: ignore[attr-defined]
    for length in [9, 100, *range(200, end - 8, 97), end - 9]:
        (tmp_path / "x.arrow").write_bytes(whole[:length])
        with pytest.raises(Refused, match="is not a complete Arrow file"):
            opened(tmp_path / "x.arrow")


def test_bits_that_flip_never_crash(tmp_path: Path) -> None:
    """There are no checksums: what still fits together is read, anything else is refused or costs its rows."""
    whole = arrow_file(tmp_path / "x.arrow", arrow.Table.from_pylist(ROWS)).read_bytes()
    rng = random.Random(0)
    causes: set[str] = set()
    for _ in range(300):
        data = bytearray(whole)
        data[rng.randrange(8, len(data))] ^= 1 << rng.randrange(8)
        (tmp_path / "x.arrow").write_bytes(data)
        try:
            causes |= {f.cause if isinstance(f, BadSample) else "read" for *_, f in opened(tmp_path / "x.arrow").kept_rows()}
        except Refused:
            causes.add("refused")
    assert {"read", "refused", "damaged_parquet"} <= causes
