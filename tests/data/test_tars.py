"""WebDataset archives: every key once, in order and by place alike; hostile members and torn archives spoil what they must, no more."""

import gzip
import io
import random
import tarfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eyeline.core.batch import EncodedImage, Span, Text
from eyeline.core.errors import BadSample, Refused, StorageFailed
from eyeline.data.containers import tars
from eyeline.data.containers.container import HEADER_BYTES, FileSlice
from eyeline.data.images.decode import decode, width_and_height
from eyeline.data.images.image_files import image_key
from eyeline.data.sources.sources import Rows, Source, open_source
from tests.data.container_files import TALK, archive, encoded
from tests.data.read_back import outcomes


def opened(path: Path) -> Rows:
    return open_source(Source(path=str(path)))


# What is read


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_plain_archives(tmp_path: Path, form: int) -> None:
    long = "deep/" * 30 + "k" * 120  # longer than a header has room for: written in front of it
    names = ["a", "b/c", "ünï", long] if form != tarfile.USTAR_FORMAT else ["a", "b/c", "d"]
    members = [(f"{k}.{end}", encoded(n) if end == "jpg" else TALK) for n, k in enumerate(names) for end in ("jpg", "json")]
    rows = opened(archive(tmp_path / "x.tar", [("b", special(tarfile.DIRTYPE)), *members], form))
    assert rows.layout.name == "llava"
    assert rows.layout.why == "WebDataset; row 0 has conversations"
    assert outcomes(rows) == ["a dot"] * len(names)
    for n, (place, _, sample) in enumerate(rows.rows_in(0)):
        assert not isinstance(sample, BadSample)
        assert rows.origin_of(place) == (f"x.tar#{n}", str(tmp_path / "x.tar"), n)
        [lazy], [held] = sample.images, rows.read(place).images
        assert isinstance(lazy.source, Span) and lazy.source.data == encoded(n)[:HEADER_BYTES]
        assert isinstance(held.source, Span) and held.source.data == encoded(n)
        assert width_and_height(lazy) == (20, 12)
        assert (decode(lazy) == decode(EncodedImage("", encoded(n)))).all() and (decode(held) == decode(lazy)).all()
        assert image_key(lazy) == image_key(held)


def test_a_sample_is_one_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = archive(tmp_path / "x.tar", [(f"{n}.{e}", encoded(n) if e != "json" else TALK) for n in range(5) for e in ("jpg", "json")])
    rows = opened(path)
    places = [place for place, _, _ in rows.rows_in(0)]
    asked: list[int] = []
    real = FileSlice._piece
    monkeypatch.setattr(FileSlice, "_piece", lambda self, wanted: asked.append(wanted) or real(self, wanted))
    rows.read(places[3])
    assert len(asked) == 1
    assert asked[0] == places[3].length < path.stat().st_size / 4
    asked.clear()
    for _, _, sample in rows.rows_in(0):  # all of them in order, with the headers of their images
        assert not isinstance(sample, BadSample) and width_and_height(sample.images[0]) == (20, 12)
    assert asked == [path.stat().st_size]


def test_several_images_in_the_order_that_the_row_names_them(tmp_path: Path) -> None:
    two = {"conversations": [{"from": "human", "value": "<image><image>which?"}, {"from": "gpt", "value": "this"}]}
    files = [("k.0.jpg", encoded(0)), ("k.1.png", encoded(1, "PNG"))]
    for images, wanted in {
        None: ["k.0.jpg", "k.1.png"],
        ("1.png", "0.jpg"): ["k.1.png", "k.0.jpg"],
        ("some/folder/k.1.png", "k.0.jpg"): ["k.1.png", "k.0.jpg"],
        ("0.jpg", "0.jpg"): ["k.0.jpg", "k.0.jpg"],
    }.items():
        rows = opened(archive(tmp_path / "x.tar", [*files, ("k.json", two | ({"images": images} if images else {}))]))
        assert [p.name for p in rows.read(next(rows.rows_in(0))[0]).images] == wanted
    archive(tmp_path / "x.tar", [*files, ("k.json", two | {"images": ["2.jpg", "0.jpg"]})])
    with pytest.raises(Refused, match=r"can be read\. The first: images: '2\.jpg' names none of the images 0\.jpg, 1\.png"):
        opened(tmp_path / "x.tar")


def test_captions(tmp_path: Path) -> None:
    members = [
        *[("a.jpg", encoded(0)), ("a.txt", " a red dot\n")],
        *[("b.png", encoded(1, "PNG")), ("b.json", {"caption": "from json", "width": 3})],
        *[("c.jpg", encoded(2)), ("c.json", {"width": 3}), ("c.txt", "of both"), ("c.cls", "7")],
        *[("d.jpg", encoded(3))],
        *[("e.txt", "no image")],
        *[("f.jpg", encoded(4)), ("f.txt", b"\xff\xfe")],
        *[("g.jpg", encoded(4)), ("g.json", [1])],
        *[("h.jpg", encoded(4)), ("h.json", "{torn")],
        *[("i.jpg", encoded(4)), ("i.json", '{"caption": "a", "n": NaN}')],
    ]
    rows = opened(archive(tmp_path / "x.tar", members))
    assert rows.layout.name == "captions"
    assert "'Describe the image.'" in rows.layout.why
    causes = ["no_target", "placeholder_count", "bad_unicode", "wrong_type", "not_json", "not_finite"]
    assert outcomes(rows) == ["a red dot", "from json", "of both", *causes]
    first = rows.read(next(rows.rows_in(0))[0])
    assert [p if isinstance(p, Text) else p.name for p in first.messages[0].parts] == ["a.jpg", Text("Describe the image.")]


def test_a_folder_of_archives_in_order_of_names(tmp_path: Path) -> None:
    for name in ("train-01", "train-00", "more/train-02"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        archive(tmp_path / f"{name}.tar", [("k.jpg", encoded(0)), ("k.txt", name)])
    wanted = ["more/train-02", "train-00", "train-01"]
    assert outcomes(opened(tmp_path)) == wanted
    assert [shard.name for shard in opened(tmp_path).shards] == [f"{name}.tar" for name in wanted]
    assert outcomes(opened(tmp_path / "train-*.tar")) == wanted[1:]
    archive(tmp_path / "val-00.tar", [("k.jpg", encoded(0)), ("k.txt", "validated")])
    with pytest.raises(Refused, match=r"holds files of train, val, .* pattern, such as .*/\*\*/\*train\*\.tar"):
        opened(tmp_path)
    assert outcomes(opened(tmp_path / "**" / "*train*.tar")) == wanted
    (tmp_path / "x.parquet").touch()
    with pytest.raises(Refused, match="both"):
        opened(tmp_path)
    with pytest.raises(Refused, match="no file matches"):
        opened(tmp_path / "*.zip")


def test_a_folder_that_energon_prepared(tmp_path: Path) -> None:
    for n in range(4):
        archive(tmp_path / f"{n}.tar", [("k.jpg", encoded(0)), ("k.txt", str(n))])
    meta = tmp_path / ".nv-meta"
    meta.mkdir()
    (meta / "split.yaml").write_text("exclude: [2.tar]\nsplit_parts:\n  train: [3.tar, 0.tar, 2.tar]\n  val: [1.tar]\n")
    assert outcomes(opened(tmp_path)) == ["3", "0"]
    for text, message in {
        "split_parts: {train: [3.tar, 9.tar]}": r"lists 1 archives that do not exist, such as .*9\.tar",
        "split_parts: {train: [../0.tar]}": "do not exist",
        "split_parts: {val: [0.tar]}": "does not list the archives to train on",
        "split_parts: {train: 0.tar}": "does not list",
        "exclude: [0.tar/k]\nsplit_parts: {train: [0.tar]}": "exclude names files that split_parts does not list",
        "{": "does not list",
    }.items():
        (meta / "split.yaml").write_text(text)
        with pytest.raises(Refused, match=message):
            opened(tmp_path)


def torn(rng: random.Random) -> bytes:
    """An archive of odd and ordinary members, of any format, perhaps with a few bytes changed, or cut."""
    names = ["a.jpg", "b/c.json", "k.txt", "x/" * 60 + "y.jpg", "ünï.png", "l" * 120 + ".jpg", "../z.jpg", "d"]
    types = [tarfile.REGTYPE] * 8 + [tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.AREGTYPE]
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=rng.choice([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])) as archive:
        for _ in range(rng.randint(1, 6)):
            info = tarfile.TarInfo(rng.choice(names))
            info.mtime, info.type, info.uid = rng.choice([0, 1.5, 1_700_000_000.25]), rng.choice(types), rng.choice([0, 1000, 2**22])
            info.size = rng.choice([0, 1, 511, 512, 513, 1000]) if info.isreg() else 0
            with suppress(ValueError):  # where the format cannot say it
                archive.addfile(info, io.BytesIO(rng.randbytes(info.size)))
    data = bytearray(out.getvalue())
    harm = rng.random()
    if harm < 0.5:
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(data) // 512) * 512 + rng.choice([rng.randrange(512), rng.randrange(345), rng.randrange(100, 160)])
            data[at] = rng.choice([0, 32, 48, 55, 56, 255, rng.randrange(256)])
        for at in range(0, len(data), 512) if harm < 0.4 else ():  # checksums that are right again
            if data[at + 257 : at + 262] == b"ustar":
                data[at + 148 : at + 156] = b"%06o\0 " % (sum(data[at : at + 148]) + sum(data[at + 156 : at + 512]) + 256)
    return bytes(data[: rng.randrange(len(data) + 1)] if harm > 0.8 else data)


def test_headers_are_read_as_tarfile_reads_them() -> None:
    """Ordinary ones are read without it: members, and what is said of damage, must be the same."""
    rng = random.Random(0)
    ours = both = 0
    for _ in range(500):
        data = torn(rng)
        with tars._Archive(io.BytesIO(data), len(data)) as one, tars._Archive(io.BytesIO(data), len(data)) as other:
            found = [m if isinstance(m, tars.Member) else str(m) for m in tars._members(one)]
            assert found == [m if isinstance(m, tars.Member) else str(m) for m in tars._odd_members(other, 0)]
            ours, both = ours + (tars._plain(one, 0) is not None), both + bool(found)
    assert ours > 250 and both > 450


# Names with dots, and what macOS leaves


def told(n: int) -> dict[str, Any]:
    return {"conversations": [{"from": "human", "value": "<image>\nwhen?"}, {"from": "gpt", "value": f"at {n}"}]}


def shown(rows: Rows) -> list[Any]:
    """Answer and images of each row, or its cause."""
    outcomes(rows)  # the same by place
    found = [found for _, _, found in rows.kept_rows()]
    return [f.cause if isinstance(f, BadSample) else (f.messages[-1].parts[0].text, [p.name for p in f.images]) for f in found]  # type: ignore[union-attr]


SOUND = [("b.jpg", encoded(0)), ("b.txt", "b")]
NO = {"caption": "no"}
DOTS: dict[str, tuple[list[tuple[str, Any]], list[Any]]] = {
    "times": (
        [(f"v_{n}.{end}", encoded(0) if end == "jpg" else told(n)) for n in (1.25, 1.5, 2.75) for end in ("jpg", "json")],
        [(f"at {n}", [f"v_{n}.jpg"]) for n in (1.25, 1.5, 2.75)],
    ),
    "versions, with captions": (
        [(f"in/v1.2.{n}.{end}", encoded(0) if end == "png" else f"text {n}") for n in range(3) for end in ("png", "txt")],
        [(f"text {n}", [f"in/v1.2.{n}.png"]) for n in range(3)],
    ),
    "two a and two b": (
        [("a.b.jpg", encoded(0)), ("a.b.txt", "one"), ("a.c.txt", "two"), ("a.c.jpg", encoded(0))],
        [("one", ["a.b.jpg"]), ("two", ["a.c.jpg"])],
    ),
    "questions": (
        [(f"a.{n}.{e}", encoded(0) if e == "jpg" else f"{e[0]}{n}") for n in range(2) for e in ("answer.txt", "jpg", "question.txt")],
        [("a0", ["a.0.jpg"]), ("a1", ["a.1.jpg"])],
    ),
    "several images of each": (
        [(f"a.{n}.{e}", told(n) if e == "json" else encoded(0)) for n in range(2) for e in ("0.jpg", "json")],
        [("at 0", ["a.0.0.jpg"]), ("at 1", ["a.1.0.jpg"])],
    ),
    "a text is missing": (
        [("v.25.jpg", encoded(0)), ("v.25.txt", "one"), ("v.50.jpg", encoded(0)), ("v.75.jpg", encoded(0)), ("v.75.txt", "three")],
        [("one", ["v.25.jpg"]), "no_target", ("three", ["v.75.jpg"])],
    ),
    "keys in turns": (
        [(f"{k}.{n}.{e}", encoded(0) if e == "jpg" else f"{k}{n}") for n in range(2) for k in "vw" for e in ("jpg", "txt")],
        [(f"{k}{n}", [f"{k}.{n}.jpg"]) for n in range(2) for k in "vw"],
    ),
    "images and their text": (
        [("a.image.png", encoded(0, "PNG")), ("a.mask.png", encoded(1, "PNG")), ("a.txt", "both")],
        [("both", ["a.image.png", "a.mask.png"])],
    ),
    "texts of parts": (
        [*[(f"a.{n}.{e}", encoded(0) if e == "jpg" else NO) for n in range(2) for e in ("jpg", "json")], ("a.json", told(0))],
        ["placeholder_count"],  # it has two images, and one place
    ),
    "one of two texts": ([("a.jpg", encoded(0)), ("a.json", {"caption": "one"}), ("a.meta.json", NO)], [("one", ["a.jpg"])]),
    "two texts": ([("a.jpg", encoded(0)), ("a.0.json", {"caption": "one"}), ("a.1.json", {"caption": "two"})], ["tar_key"]),
    "a key within another": (
        [("a.1.jpg", encoded(0)), ("a.1.txt", "one"), ("a.jpg", encoded(0)), ("a.txt", "two"), *SOUND],
        ["tar_key", ("b", ["b.jpg"])],
    ),
    "images, then texts": (
        [*[(f"a.{n}.jpg", encoded(0)) for n in range(2)], *[(f"a.{n}.txt", "x") for n in range(2)], *SOUND],
        ["tar_key", ("b", ["b.jpg"])],
    ),
    "a text far from its image": (
        [("a.1.jpg", encoded(0)), ("b.jpg", encoded(0)), ("b.txt", "b"), ("a.1.txt", "x")],
        ["no_target", ("b", ["b.jpg"]), "tar_key"],
    ),
    "one name twice": ([("a.jpg", encoded(0)), ("a.jpg", encoded(1)), ("a.txt", "x"), *SOUND], ["tar_key", ("b", ["b.jpg"])]),
    "one name in two cases": ([("a.jpg", encoded(0)), ("a.JPG", encoded(1)), ("a.txt", "x"), *SOUND], ["tar_key", ("b", ["b.jpg"])]),
}  # fmt: skip


@pytest.mark.parametrize("name", DOTS)
def test_keys_with_dots_are_samples_of_their_own(tmp_path: Path, name: str) -> None:
    members, wanted = DOTS[name]
    end = [
        ("z.jpg", encoded(0)),
        ("z.json" if "conversations" in str(members) else "z.txt", TALK if "conversations" in str(members) else "z"),
    ]
    assert shown(opened(archive(tmp_path / "x.tar", [*members, *end])))[:-1] == wanted


def test_two_members_that_would_be_one_are_both_named(tmp_path: Path) -> None:
    archive(tmp_path / "x.tar", [*DOTS["two texts"][0], ("z.jpg", encoded(0)), ("z.txt", "z")])
    [bad] = [found.message for _, _, found in opened(tmp_path / "x.tar").kept_rows() if isinstance(found, BadSample)]
    assert "'a.0.json' and 'a.1.json' have the same key" in bad and "without dots" in bad


def test_columns_of_keys_with_dots(tmp_path: Path) -> None:
    members = [(f"v.{n}.{e}", encoded(0) if e == "jpg" else {"best": f"at {n}"}) for n in range(2) for e in ("jpg", "meta.json")]
    archive(tmp_path / "x.tar", members)
    rows = open_source(Source(path=str(tmp_path / "x.tar"), columns={"image": "jpg", "caption": "meta.json.best"}))
    assert shown(rows) == [("at 0", ["v.0.jpg"]), ("at 1", ["v.1.jpg"])]


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_members_that_macos_and_editors_leave_are_read_past(tmp_path: Path, form: int) -> None:
    members: list[tuple[str, Any]] = [(".DS_Store", b"Bud1"), ("Thumbs.db", b"x")]
    for n in range(2):
        for e in ("jpg", "txt"):
            members += [
                (f"./in/._{n}.{e}", b"\0\5\x16\7"),
                (f"./in/{n}.{e}", encoded(n) if e == "jpg" else f"{n}"),
                (f"__MACOSX/{n}.{e}", b"x"),
            ]
    rows = opened(
        archive(tmp_path / "x.tar", [*members, ("./in/.ipynb_checkpoints/0.txt", "x"), ("PaxHeaders.7/0.jpg", b"x"), ("1.txt~", "x")], form)
    )
    assert shown(rows) == [("0", ["./in/0.jpg"]), ("1", ["./in/1.jpg"])]
    assert rows.skipped(0) == 2 + 4 + 4 + 3


@pytest.mark.parametrize("name", ["{n}.jpg", "a.{n}.jpg", "a.{n}.txt"])
def test_too_many_small_members_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(tars, "MAX_MEMBERS", 100)
    monkeypatch.setattr(tars, "MAX_TOGETHER", 50)
    path = archive(tmp_path / "x.tar", [("k.jpg", encoded(0)), ("k.txt", "x"), *[(name.format(n=n), b"") for n in range(98)]])
    found = [found.cause for _, _, found in opened(path).kept_rows() if isinstance(found, BadSample)]
    assert found == (["tar_key"] if name[0] == "a" else ["no_target"] * 98)
    archive(path, [("k.jpg", encoded(0)), ("k.txt", "x"), *[(name.format(n=n), b"") for n in range(99)]])
    with pytest.raises(Refused, match=r"x\.tar has more than 100 members, most empty or small"):
        list(tars.open_tars([path], tmp_path, (), "", {}, 0).rows(0))
    archive(path, [(f"{n}.{e}", bytes(8000) if e == "jpg" else f"{n}") for n in range(60) for e in ("jpg", "txt")])
    assert len(list(tars.open_tars([path], tmp_path, (), "", {}, 0).rows(0))) == 60


def test_a_name_of_a_megabyte_costs_its_sample(tmp_path: Path) -> None:
    members = [("k.jpg", encoded(0)), ("k.txt", "x"), ("x" + "a." * 300_000 + "txt", "x"), *SOUND]
    found = shown(opened(archive(tmp_path / "x.tar", members, tarfile.PAX_FORMAT)))
    assert [one if isinstance(one, str) else one[0] for one in found] == ["x", "tar_member", "b"]


# What goes wrong


def special(kind: bytes, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo()
    info.type, info.linkname = kind, link
    return info


HOSTILE: dict[str, list[tuple[str, Any]]] = {
    "symbolic link": [("k.jpg", special(tarfile.SYMTYPE, "/etc/passwd")), ("k.json", TALK)],
    "hard link": [("k.jpg", special(tarfile.LNKTYPE, "a.jpg")), ("k.json", TALK)],
    "device": [("k.jpg", special(tarfile.CHRTYPE)), ("k.json", TALK)],
    "pipe": [("k.jpg", special(tarfile.FIFOTYPE)), ("k.json", TALK)],
    "sparse file": [("k.jpg", special(tarfile.GNUTYPE_SPARSE)), ("k.json", TALK)],
    "absolute": [("/k.jpg", encoded(0)), ("/k.json", TALK)],
    "out of it": [("../k.jpg", encoded(0)), ("../k.json", TALK)],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_members_spoil_their_own_sample(tmp_path: Path, name: str) -> None:
    sound = [("a.jpg", encoded(0)), ("a.json", TALK)]
    after = [("z.jpg", encoded(1)), ("z.json", TALK)]
    assert outcomes(opened(archive(tmp_path / "x.tar", [*sound, *HOSTILE[name], *after]))) == ["a dot", "tar_member", "a dot"]


def test_keys_that_come_twice(tmp_path: Path) -> None:
    def pair(key: str) -> list[tuple[str, Any]]:
        return [(f"{key}.jpg", encoded(0)), (f"{key}.json", TALK)]

    assert outcomes(opened(archive(tmp_path / "x.tar", [*pair("a"), *pair("b"), *pair("a"), *pair("c")]))) == [
        *("a dot", "a dot", "tar_key", "a dot"),
    ]
    assert outcomes(opened(archive(tmp_path / "x.tar", [*pair("a"), *pair("a"), *pair("b")]))) == ["tar_key", "a dot"]


def test_members_over_the_caps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tars, "MAX_MEMBER_BYTES", 5000)
    monkeypatch.setattr(tars, "MAX_TEXT_BYTES", 500)
    members = [
        ("a.jpg", bytes(6000)),
        ("a.json", TALK),
        ("b.jpg", encoded(0)),
        ("b.json", TALK),
        ("c.jpg", encoded(1)),
        ("c.txt", "x" * 600),
    ]
    assert outcomes(opened(archive(tmp_path / "x.tar", members))) == ["file_too_large", "a dot", "file_too_large"]


@pytest.mark.parametrize("at", range(0, 9000, 450))
def test_an_archive_cut_anywhere_keeps_what_is_whole(tmp_path: Path, at: int) -> None:
    """And says so, unless it ends between two members, where it cannot be told."""
    members = [(f"{n}.{e}", encoded(n) if e == "jpg" else TALK) for n in range(4) for e in ("jpg", "json")]
    path = archive(tmp_path / "x.tar", members)
    data = path.read_bytes()
    with tarfile.open(path) as whole:
        starts = [m.offset for m in whole][2::2]  # of the second sample and those after it
        end = max(m.offset_data + m.size for m in whole)
    path.write_bytes(data[:at])
    archive(tmp_path / "a.tar", [("k.jpg", encoded(0)), ("k.json", TALK)])
    found = outcomes(open_source(Source(path=str(tmp_path / "*.tar"))))[1:]
    if at >= end + 512:
        assert found == ["a dot"] * 4
    else:
        assert found == ["a dot"] * sum(start + 512 <= at for start in starts) + ["damaged_tar"]


def test_a_header_that_is_none_does_not_end_an_archive_in_silence(tmp_path: Path) -> None:
    members = [(f"{n}.{e}", encoded(n) if e == "jpg" else TALK) for n in range(4) for e in ("jpg", "json")]
    path = archive(tmp_path / "x.tar", members)
    with tarfile.open(path) as whole:
        start = whole.getmembers()[4].offset
    data = bytearray(path.read_bytes())
    data[start : start + 512] = b"\x7f" * 512
    path.write_bytes(data)
    assert outcomes(opened(path)) == ["a dot", "damaged_tar"]  # whether the second one had more members was told there


def test_a_size_beyond_the_archive(tmp_path: Path) -> None:
    path = archive(tmp_path / "x.tar", [("a.jpg", encoded(0)), ("a.json", TALK)])
    info = tarfile.TarInfo("b.jpg")
    info.size = 1 << 60
    data = path.read_bytes()
    with tarfile.open(path) as whole:
        end = whole.getmembers()[-1].offset_data + 512
    path.write_bytes(data[:end] + info.tobuf(tarfile.GNU_FORMAT) + bytes(1024))
    assert outcomes(opened(path)) == ["a dot", "damaged_tar"]


def test_a_long_name_of_a_hostile_length_takes_no_memory(tmp_path: Path) -> None:
    info = tarfile.TarInfo("././@LongLink")
    info.type, info.size = tarfile.GNUTYPE_LONGNAME, 1 << 40
    path = archive(tmp_path / "x.tar", [(f"{k}.{e}", encoded(0) if e == "jpg" else TALK) for k in "ab" for e in ("jpg", "json")])
    with tarfile.open(path) as whole:
        end = whole.getmembers()[-1].offset_data + 512
    path.write_bytes(path.read_bytes()[:end] + info.tobuf(tarfile.GNU_FORMAT) + b"x" * 1024)
    assert outcomes(opened(path)) == ["a dot", "damaged_tar"]


@pytest.mark.parametrize("name", ["x.tar.gz", "x.tgz", "x.tar"])
def test_compressed_archives_are_refused(tmp_path: Path, name: str) -> None:
    plain = archive(tmp_path / "plain.tar", [("a.jpg", encoded(0)), ("a.json", TALK)])
    (tmp_path / name).write_bytes(gzip.compress(plain.read_bytes()))
    with pytest.raises(Refused, match=r"is compressed .* Decompress it"):
        opened(tmp_path / name)


def test_an_archive_that_changes_stops_the_run(tmp_path: Path) -> None:
    path = archive(tmp_path / "x.tar", [("a.jpg", encoded(0)), ("a.json", TALK)])
    rows = opened(path)
    place, _, sample = next(rows.rows_in(0))
    assert not isinstance(sample, BadSample)
    source = sample.images[0].source
    assert isinstance(source, Span)
    archive(path, [("a.jpg", encoded(1)), ("a.json", TALK), ("b.jpg", encoded(1))])
    for read in (lambda: rows.read(place), lambda: list(rows.rows_in(0)), lambda: decode(EncodedImage("", replace(source, data=b"")))):
        with pytest.raises(StorageFailed, match=r"x\.tar has changed since it was opened"):
            read()
    path.unlink()
    with pytest.raises(StorageFailed, match="No such file"):
        rows.read(place)


@pytest.mark.parametrize("last", [[(f"{n}.txt", "a dot") for n in range(30)], [("metadata.csv", "file_name,caption\n0.jpg,a dot\n")]])
def test_archive_of_images_first_explains_sample_order(tmp_path: Path, last: list[tuple[str, str]]) -> None:
    members = [(f"{n}.jpg", encoded(n)) for n in range(30)]
    with pytest.raises(Refused, match=r"a sample's text follows its image.* If it is a folder that was packed up, unpack it"):
        open_source(Source(path=str(archive(tmp_path / "x.tar", [*members, *last]))))


def test_unreadable_rows_are_named_not_the_declared_layout(tmp_path: Path) -> None:
    members = [("0.left.png", b"a"), ("0.right.png", b"b"), ("0.said.txt", "what?"), ("0.json", {"image": "other.png"})]
    path = archive(tmp_path / "x.tar", members)
    with pytest.raises(
        Refused, match=r"none of its first rows can be read\. The first: .*names none of the images left.*name images in the JSON as"
    ) as caught:
        open_source(Source(path=str(path), columns={"caption": "said.txt"}))
    assert "images alone" not in str(caught.value)
    (tmp_path / "x.tar").write_bytes(b"")
    with pytest.raises(Refused, match=r"the archive is empty: even its end marker is missing\. Download or write the archive again"):
        open_source(Source(path=str(path)))
