"""Parquet as Hugging Face writes it: structs of bytes and path, conversations as lists of structs, row groups one at a time."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as arrow
import pyarrow.parquet as pq
import pytest

from eyeline.core.batch import EncodedImage, Text
from eyeline.core.errors import Refused, StorageFailed
from eyeline.data.containers import parquet
from eyeline.data.containers.container import FileSlice
from eyeline.data.images.image_files import image_key
from eyeline.data.plan.blend import Cursor, Side, pool_of
from eyeline.data.plan.index import Index
from eyeline.data.sources.sources import Rows, Source, open_source
from tests.data.container_files import encoded, parquet_file
from tests.data.read_back import samples
from tests.data.short_samples import talk
from tests.data.small_training import encoder


def opened(path: Path) -> Rows:
    return open_source(Source(path=str(path)))


def test_messages_and_images_as_structs(tmp_path: Path) -> None:
    more = {"kind": "dot", "embedding": [0.5] * 9}
    rows = [{"messages": talk(n), "images": [{"bytes": encoded(n), "path": f"{n}.jpg"}], **more} for n in range(8)]
    found = opened(parquet_file(tmp_path / "x.parquet", rows))
    assert (found.layout.name, found.layout.why) == ("openai", "Parquet; row 0 has messages; not read: embedding")
    assert [shard.name for shard in found.shards] == ["x.parquet[0]", "x.parquet[1]", "x.parquet[2]"]
    got = samples(found)
    for n, sample in enumerate(got):
        assert (sample.id, sample.kind) == (f"x.parquet[{n // 3}]#{n % 3}", "dot")
        assert sample.images[0].source == encoded(n)
        assert sample.messages[1].parts == (Text(f"answer {n}"),)
    last = [place for place, _, _ in found.rows_in(2)][-1]
    assert found.origin_of(last)[1:] == (str(tmp_path / "x.parquet"), 7)
    assert found.container.columns == ("images", "kind", "messages")  # type: ignore[attr-defined]  # unused columns are not read


@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        ({"image": {"bytes": b"xyz", "path": None}}, b"xyz"),
        ({"image": {"bytes": None, "path": "a/b.jpg"}}, "a/b.jpg"),
        ({"image": b"xyz"}, b"xyz"),
        ({"image": "a/b.jpg"}, "a/b.jpg"),
        ({"images": [b"xyz"]}, b"xyz"),
        ({"images": ["a/b.jpg"]}, "a/b.jpg"),
        ({"image": {"bytes": None, "path": "../b.jpg"}}, "outside_root"),
        ({"image": {"bytes": None, "path": None}}, "placeholder_count"),  # no image, and the text has a place for one
        ({"image": 7}, "wrong_type"),
    ],
)
def test_every_way_to_hold_an_image(tmp_path: Path, row: dict[str, Any], wanted: Any) -> None:
    rows = [row | {"conversations": [{"from": "human", "value": "<image>?"}, {"from": "gpt", "value": "a"}]}]
    [sample] = samples(opened(parquet_file(tmp_path / "x.parquet", rows)))
    if isinstance(sample, str):
        assert sample == wanted
    else:
        [image] = sample.images
        assert image.source == (tmp_path / wanted if isinstance(wanted, str) else wanted)
        assert image_key(image)


def test_the_cauldron(tmp_path: Path) -> None:
    asked = [{"user": "what?", "assistant": "a dot", "source": "made"}, {"user": "and?", "assistant": "a line", "source": "made"}]
    rows = [
        {"images": [{"bytes": encoded(0), "path": None}, {"bytes": encoded(1), "path": None}], "texts": asked},
        {"images": [], "texts": asked[:1]},
        {"images": None, "texts": [{"user": "what?", "assistant": None, "source": "made"}]},
        {"images": None, "texts": []},
    ]
    found = opened(parquet_file(tmp_path / "x.parquet", rows))
    assert found.layout.name == "cauldron"
    both, text, *causes = samples(found)
    assert [[p if isinstance(p, Text) else p.source for p in m.parts] for m in both.messages] == [
        [encoded(0), encoded(1), Text("what?")],
        *([Text("a dot")], [Text("and?")], [Text("a line")]),
    ]
    assert [m.parts for m in text.messages] == [(Text("what?"),), (Text("a dot"),)]
    assert causes == ["wrong_type", "no_target"]


def test_captions(tmp_path: Path) -> None:
    rows = [{"image": {"bytes": encoded(0), "path": "0.jpg"}, "text": "a dot"}, {"image": None, "text": "nothing"}]
    found = opened(parquet_file(tmp_path / "x.parquet", rows))
    first, cause = samples(found)
    assert [p if isinstance(p, Text) else "<image>" for p in first.messages[0].parts] == ["<image>", Text("Describe the image.")]
    assert (first.messages[1].parts, cause) == ((Text("a dot"),), "placeholder_count")


def test_several_files_are_one_source(tmp_path: Path) -> None:
    for n in (1, 0):
        parquet_file(tmp_path / f"{n}.parquet", [{"messages": talk(10 * n + k), "images": [encoded(k)]} for k in range(4)])
    assert [s.messages[1].parts[0].text for s in samples(opened(tmp_path))] == [f"answer {n}" for n in (0, 1, 2, 3, 10, 11, 12, 13)]
    parquet_file(tmp_path / "2.parquet", [{"messages": talk(0)}])
    with pytest.raises(Refused, match=r"2\.parquet has the columns messages, and .*0\.parquet has images, messages"):
        opened(tmp_path)


def test_row_groups_in_bounded_memory_and_needed_columns_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noise = np.random.default_rng(0)
    rows = [{"messages": talk(n), "images": [noise.bytes(20_000)], "other": noise.bytes(200_000)} for n in range(12)]
    path = parquet_file(tmp_path / "x.parquet", rows, group=2)
    found = opened(path)
    places = [next(found.rows_in(shard))[0] for shard in range(6)]
    assert [40_000 < shard.held < 45_000 for shard in found.shards] == [True] * 6
    asked: list[int] = []
    real = FileSlice._piece
    monkeypatch.setattr(FileSlice, "_piece", lambda self, wanted: asked.append(wanted) or real(self, wanted))

    def cost(of: list[int]) -> int:
        asked.clear()
        for shard in of:
            found.read(places[shard])
        return sum(asked)

    monkeypatch.setattr(parquet, "KEPT_BYTES", 90_000)  # two groups
    found = pickle.loads(pickle.dumps(found))  # keeps no group
    assert 0 < cost([0, 0, 0]) < 150_000 < path.stat().st_size / 10
    assert cost([0, 1, 0, 1]) < 150_000
    assert cost([0, 1, 0, 1]) == 0
    assert cost([2, 3]) > 0
    assert cost([0]) > 0
    monkeypatch.setattr(parquet, "KEPT", 1)  # small groups, of which there may be many thousands
    assert cost([0, 1, 0, 1]) > cost([0, 0, 1, 1]) > 0


def test_a_group_of_many_rows_is_several_shards_that_come_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group is decoded once a window, whatever the number of its parts, and every row keeps its name."""
    rows = [{"messages": talk(n), "images": [encoded(n)]} for n in range(23)]
    path = parquet_file(tmp_path / "x.parquet", rows, group=10)
    whole = opened(path)
    names = [whole.origin_of(place) for shard in range(3) for place, _, _ in whole.rows_in(shard)]
    monkeypatch.setattr(parquet, "SHARD_ROWS", 4)
    found = opened(path)
    assert [shard.name for shard in found.shards] == [f"x.parquet[{g}]#{r}" for g in (0, 1) for r in (0, 4, 8)] + ["x.parquet[2]"]
    assert [shard.joined for shard in found.shards] == [False, True, True, False, True, True, False]
    assert len({shard.fingerprint for shard in found.shards}) == 7
    assert [shard.held for shard in found.shards[:6]] == [whole.shards[0].held] * 3 + [whole.shards[1].held] * 3
    assert 0 <= whole.shards[0].bytes - sum(shard.bytes for shard in found.shards[:3]) < 3
    assert samples(found) == samples(whole)
    assert [found.origin_of(place) for shard in range(7) for place, _, _ in found.rows_in(shard)] == names
    found = pickle.loads(pickle.dumps(found))
    read: list[int] = []
    real = found.container.read  # type: ignore[attr-defined]
    object.__setattr__(
        found.container, "read", lambda file, group, columns, most: read.append(group.part) or real(file, group, columns, most)
    )
    monkeypatch.setattr(parquet, "KEPT", 1)
    for seed in range(5):
        read.clear()
        found.container._kept.clear()  # type: ignore[attr-defined]
        pool = pool_of(Side(Index((found,), encoder(), None, None), 0.0, held_out=False), 1, seed)
        cursor, drawn = Cursor(), []
        while cursor.epoch == 0:
            drawn += pool.window(cursor).row_R5.tolist()
            cursor = pool.after(cursor)
        assert len({tuple(row) for row in drawn}) == len(drawn) == 23
        assert sorted(read) == [0, 1, 2]
    monkeypatch.setattr(parquet, "MAX_GROUP_ROWS", 9)
    with pytest.raises(Refused, match=r"has 10 rows \(of at most 9\)"):
        opened(path)


def test_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"messages": talk(n), "images": [encoded(n)]} for n in range(4)]
    whole = parquet_file(tmp_path / "x.parquet", rows).read_bytes()
    (tmp_path / "cut.parquet").write_bytes(whole[:-20])
    with pytest.raises(Refused, match=r"cut\.parquet is not a complete Parquet file"):
        opened(tmp_path / "cut.parquet")
    parquet_file(tmp_path / "strange.parquet", [{"foto": "a", "title": "b"}])
    with pytest.raises(Refused, match=r"no known columns\. It has foto, title\. Wanted some of: conversations, image"):
        opened(tmp_path / "strange.parquet")
    monkeypatch.setattr(parquet, "MAX_GROUP_BYTES", 1000)
    with pytest.raises(Refused, match=r"row group 0 has 3 rows .* row_group_size"):
        opened(tmp_path / "x.parquet")
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    with pytest.raises(Refused, match=r"pip install 'eyeline\[parquet\]'"):
        opened(tmp_path / "x.parquet")


def test_a_group_that_cannot_be_decoded_spoils_itself_only(tmp_path: Path) -> None:
    rows = [{"messages": talk(n), "images": [encoded(n)]} for n in range(9)]
    path = parquet_file(tmp_path / "x.parquet", rows, write_page_checksum=True, use_dictionary=False)
    column = pq.ParquetFile(path).metadata.row_group(1).column(2)
    assert column.path_in_schema.startswith("images")
    data = bytearray(path.read_bytes())
    start = column.data_page_offset + column.total_compressed_size - 100  # its last page: statistics are in front
    data[start : start + 60] = bytes(60)
    path.write_bytes(data)
    found = samples(opened(path))
    assert found[3:6] == ["damaged_parquet"] * 3
    assert [s.messages[1].parts[0].text for s in found[:3] + found[6:]] == [f"answer {n}" for n in (0, 1, 2, 6, 7, 8)]


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    text = arrow.array([b"good", b"\xff\xfe", b"fine"], arrow.binary()).view(arrow.string())
    image = arrow.array([encoded(0)] * 3, arrow.binary())
    pq.write_table(arrow.table({"caption": text, "image": image}), tmp_path / "x.parquet")
    found = samples(opened(tmp_path / "x.parquet"))
    assert [f if isinstance(f, str) else f.messages[1].parts[0].text for f in found] == ["good", "bad_unicode", "fine"]


def test_a_file_that_changes_or_a_store_that_fails_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"messages": talk(n), "images": [encoded(n)]} for n in range(4)]
    found = opened(parquet_file(tmp_path / "x.parquet", rows))
    place = next(found.rows_in(1))[0]
    copy = pickle.loads(pickle.dumps(found))  # keeps no group

    def broken(*_: Any) -> bytes:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("eyeline.data.containers.container.os.pread", broken)
    monkeypatch.setattr("eyeline.data.containers.container.time.sleep", lambda _: None)
    with pytest.raises(StorageFailed, match=r"could not read .*x\.parquet: Input/output error.*Tried 4 times"):
        copy.read(place)
    monkeypatch.undo()
    parquet_file(tmp_path / "x.parquet", rows[:1])
    with pytest.raises(StorageFailed, match=r"x\.parquet has changed since it was opened"):
        copy.read(place)


def test_an_image_says_where_it_came_from(tmp_path: Path) -> None:
    rows = [{"caption": "a", "images": [{"bytes": b"x", "path": "photo.jpg"}, {"bytes": b"y", "path": None}]}]
    [sample] = samples(opened(parquet_file(tmp_path / "x.parquet", rows)))
    assert sample.images == (EncodedImage("photo.jpg", b"x"), EncodedImage("images[1]", b"y"))
