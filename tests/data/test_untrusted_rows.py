"""What a row may say, against every container that holds rows: names that no image may have, and texts of every kind.

A hostile row costs itself: the rows around it stay, and nothing is opened or sent. Layouts are in test_layouts.py, images in
test_image_formats.py.
"""

import csv
import importlib
import json
import os
import pkgutil
import socket
from collections.abc import Callable
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import eyeline.data
from eyeline.core.batch import Sample, Text
from eyeline.core.errors import BadSample
from eyeline.data.images.decode import decode
from eyeline.data.images.patches import grey_images
from eyeline.data.layouts.layouts import COLUMNS, SHAPES, Shape
from eyeline.data.rejects import CAUSES
from eyeline.data.sources.sources import Rows, Source, open_source
from eyeline.data.text.documents import document_of
from eyeline.data.text.templates import TEMPLATES
from eyeline.data.text.tokenizer import Encoder
from tests.data.container_files import COCO, archive, parquet_file
from tests.data.container_files import arrow_file as written_arrow
from tests.data.hostile_json import STRICT

Row = tuple[str, str]  # name of an image, caption


def as_list(folder: Path, rows: list[Row]) -> Path:
    (folder / "rows.json").write_text(json.dumps([{"image": image, "caption": caption} for image, caption in rows]))
    return folder / "rows.json"


def as_lines(folder: Path, rows: list[Row]) -> Path:
    lines = [json.dumps({"image": image, "caption": caption}, ensure_ascii=False) for image, caption in rows]
    (folder / "rows.jsonl").write_bytes("\n".join(lines).encode("utf-8", "surrogatepass"))
    return folder / "rows.jsonl"


def as_csv(folder: Path, rows: list[Row]) -> Path:
    with open(folder / "rows.csv", "w", encoding="utf-8", errors="surrogatepass", newline="") as file:
        csv.writer(file, quoting=csv.QUOTE_ALL).writerows([("image", "caption"), *rows])
    return folder / "rows.csv"


def as_parquet(folder: Path, rows: list[Row]) -> Path:
    return parquet_file(folder / "rows.parquet", [{"image": image, "caption": caption} for image, caption in rows])


def as_structs(folder: Path, rows: list[Row]) -> Path:
    return parquet_file(folder / "rows.parquet", [{"image": {"bytes": None, "path": image}, "caption": caption} for image, caption in rows])


def as_tar(folder: Path, rows: list[Row]) -> Path:
    members = [(f"{n}.json", json.dumps({"image": image, "caption": caption})) for n, (image, caption) in enumerate(rows)]
    return archive(folder / "rows.tar", members)


def as_arrow(folder: Path, rows: list[Row]) -> Path:
    table = arrow.Table.from_pylist([{"image": image, "caption": caption} for image, caption in rows])
    return written_arrow(folder / "rows.arrow", table)


def as_coco(folder: Path, rows: list[Row]) -> Path:
    images = [{"id": n, "file_name": image} for n, (image, _) in enumerate(rows)]
    annotations = [{"image_id": n, "id": n, "caption": caption} for n, (_, caption) in enumerate(rows)]
    (folder / "rows.json").write_text(json.dumps(COCO | {"images": images, "annotations": annotations}))
    return folder / "rows.json"


def as_several(folder: Path, rows: list[Row]) -> Path:
    for n, part in enumerate((rows[:1], rows[1:])):
        as_lines(folder, part).rename(folder / f"part-{n}.jsonl")
    return folder / "part-*.jsonl"


def as_texts_beside(folder: Path, rows: list[Row]) -> Path:
    """Here the images have names of their own: nothing in the data names one."""
    (folder / "set").mkdir(exist_ok=True)
    for n, (_, caption) in enumerate(rows):
        (folder / f"set/{n:03}.png").write_bytes(b"not opened")
        (folder / f"set/{n:03}.txt").write_bytes(caption.encode("utf-8", "surrogatepass"))
    return folder / "set"


CONTAINERS: dict[str, Callable[[Path, list[Row]], Path]] = {
    "JSON list": as_list,
    "JSON lines": as_lines,
    "CSV": as_csv,
    "Parquet": as_parquet,
    "Parquet, images as structs": as_structs,
    "Arrow": as_arrow,
    "WebDataset": as_tar,
    "COCO": as_coco,
    "several files": as_several,
}
OF_TEXTS = CONTAINERS | {"texts of images": as_texts_beside}
UNICODE_ONLY = {"Parquet", "Parquet, images as structs", "Arrow"}  # their writers take no lone surrogates: test_parquet.py
SOUND: Row = ("a.png", "a dot")


def test_every_container_is_in_the_table(tmp_path: Path) -> None:
    """One that is new is tried with hostile rows, too."""
    tried = {type(open_source(Source(path=str(write(tmp_path, [SOUND, SOUND])))).container).__name__ for write in OF_TEXTS.values()}
    found: set[str] = set()
    for module in pkgutil.walk_packages(eyeline.data.__path__, "eyeline.data."):
        kinds = [kind for kind in vars(importlib.import_module(module.name)).values() if isinstance(kind, type) and is_dataclass(kind)]
        found |= {kind.__name__ for kind in kinds if all(callable(getattr(kind, name, None)) for name in ("rows", "row", "origin_of"))}
    assert tried < found
    assert found - tried == {"Packed"}  # what `eyeline prepare` wrote, from rows that one of the others had read


def outcomes(path: Path) -> list[str | BadSample]:
    """The answer of each row, or what is wrong with it; by its place it is the same."""
    rows: Rows = open_source(Source(path=str(path)))
    out: list[str | BadSample] = []
    for place, _, found in rows.kept_rows():
        if isinstance(found, Sample):
            assert rows.read(place) == found
            [answer] = found.messages[-1].parts
            assert isinstance(answer, Text)
            out.append(answer.text)
        else:
            with pytest.raises(BadSample) as caught:
                rows.read(place)
            assert (caught.value.cause, caught.value.message) == (found.cause, found.message)
            assert found.cause in CAUSES
            out.append(found)
    return out


# Names and URLs

NAMES = {
    "../secret.png": "outside_root",
    "a/../../secret.png": "outside_root",
    "./../secret.png": "outside_root",
    "/etc/passwd": "outside_root",
    "../data_evil/x.png": "outside_root",  # a sibling whose name begins like the root's
    ".": "outside_root",
    "a/..": "outside_root",
    "~/../../etc/passwd": "outside_root",
    "file:///etc/passwd": "remote_url",
    "FILE:/etc/passwd": "remote_url",
    "http://169.254.169.254/latest/meta-data": "remote_url",
    "http://localhost:8080/a.png": "remote_url",
    "http://[::1]/a.png": "remote_url",
    "http://0x7f000001/": "remote_url",
    "http://2130706433/": "remote_url",
    "http://good@bad/": "remote_url",
    "http://good\\@bad/": "remote_url",
    "http:\\\\bad/": "remote_url",
    "HTTPS://example.org/a.png": "remote_url",
    "ftp://example.org/a.png": "remote_url",
    "s3://bucket/a.png": "remote_url",
    "gs://bucket/a.png": "remote_url",
    "hf://datasets/a/b.png": "remote_url",
    "javascript://%0aalert(1)": "remote_url",
    "a\0b.png": "bad_path",
    "x" * 4097: "bad_path",
    "ü" * 2049: "bad_path",  # 4,098 bytes
    "a\udce9.png": "bad_unicode",
    f"a{chr(0xD800)}.png": "bad_unicode",
    "data:text/html;base64,AAAA": "data_url",
    "data:image/png,AAAA": "data_url",
    "data:image/png;base64,A": "data_url",
    "data:image/png;base64,AA!AA===": "data_url",
    "data:image/png;base64": "data_url",
    "data:": "data_url",
}


@pytest.mark.parametrize("container", CONTAINERS)
def test_names_that_no_image_may_have(container: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is a reject by its cause, and no packet is sent for any."""
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: pytest.fail("a name was looked up"))
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("a packet was sent"))
    for folder in ("data", "data_evil"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.png").write_bytes(b"secret")
    (tmp_path / "secret.png").write_bytes(b"secret")
    names = [name for name in NAMES if container not in UNICODE_ONLY or name.isprintable() or "\0" in name]
    assert len(names) > len(NAMES) - 3
    path = CONTAINERS[container](tmp_path / "data", [SOUND, *[row for name in names for row in ((name, "hostile"), SOUND)]])
    found = outcomes(path)
    assert found[::2] == ["a dot"] * (len(names) + 1)
    causes = {name: bad.cause if isinstance(bad, BadSample) else bad for name, bad in zip(names, found[1::2], strict=True)}
    assert causes == {name: NAMES[name] for name in names}


SLOW_NAMES = {  # for patterns that go back over what they have matched
    "spaces": "A" * 64 + " " * 1_000_000 + "!",
    "newlines": "iVBORw0K" + "\n" * 1_000_000 + "!",
    "equal signs": "A" * 64 + "=" * 1_000_000 + "!",
    "attributes": "data:image/png" + ";a" * 500_000 + "!,AAAA",
    "a format": "data:image/" + "a" * 1_000_000 + "!,AAAA",
    "a scheme": "a" * 1_000_000 + ":",
    "folders": "a/../" * 200_000,
    "placeholders": "<image" * 200_000,
}


@pytest.mark.timeout(20)
def test_no_name_and_no_text_takes_long(tmp_path: Path) -> None:
    rows = [row for text in SLOW_NAMES.values() for row in ((text, "named"), ("a.png", text))]
    found = outcomes(as_lines(tmp_path, rows))
    assert {bad.cause if isinstance(bad, BadSample) else "" for bad in found[::2]} <= {"bad_path", "data_url"}
    assert found[1::2] == list(SLOW_NAMES.values())


ODD_NAMES = [
    *("a b.png", "line\nbreak.png", "ünï.png", "a/./b.png", "a/../b.png", "-rf.png", "C:\\x.png", "<b>.png", "$(id).png", "%2e%2e.png"),
    *("A.PNG", "a.png"),
]


@pytest.mark.parametrize("container", CONTAINERS)
def test_odd_names_are_exact(container: str, tmp_path: Path) -> None:
    rows = open_source(Source(path=str(CONTAINERS[container](tmp_path, [(name, "odd") for name in ODD_NAMES]))))
    for name, (_, _, found) in zip(ODD_NAMES, rows.kept_rows(), strict=True):
        assert isinstance(found, Sample), name
        assert found.images[0].source == Path(os.path.normpath(tmp_path / name))


def test_links_are_followed_wherever_they_lead(tmp_path: Path, draw: Callable[..., Path]) -> None:
    """Data cannot make links, and people keep images on another disk. Paths through them obey the same rules."""
    draw("elsewhere/a.png")
    (tmp_path / "data").mkdir()
    (tmp_path / "data/one.png").symlink_to(tmp_path / "elsewhere/a.png")
    (tmp_path / "data/all").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "data/gone.png").symlink_to(tmp_path / "nowhere")
    (tmp_path / "data/loop.png").symlink_to(tmp_path / "data/loop.png")
    (tmp_path / "data/null.png").symlink_to("/dev/null")
    names = ["one.png", "all/a.png", "gone.png", "loop.png", "null.png", "all/../all/a.png", "all/../../elsewhere/a.png"]
    rows = open_source(Source(path=str(as_list(tmp_path / "data", [(name, "linked") for name in names]))))
    found: dict[str, str] = {}
    for name, (_, _, sample) in zip(names, rows.kept_rows(), strict=True):
        try:
            assert isinstance(sample, Sample) or name.endswith("elsewhere/a.png")
            if isinstance(sample, BadSample):
                raise sample
            found[name] = str(decode(sample.images[0]).shape)
        except BadSample as bad:
            found[name] = bad.cause
    assert found == {
        "one.png": "(12, 20, 3)",
        "all/a.png": "(12, 20, 3)",
        "all/../all/a.png": "(12, 20, 3)",
        "gone.png": "missing_image",
        "loop.png": "missing_image",
        "null.png": "not_a_file",
        "all/../../elsewhere/a.png": "outside_root",
    }


# Texts

TEXTS = {
    "NUL": "a\0b",
    "control characters": "".join(map(chr, range(1, 32))) + "x\x7f\x9b",
    "newlines of every kind": "a\nb\rc\r\nd\u2028e\u2029f\x85g\x0bh\x0ci",
    "right to left": "\u202eabc\u202c עברית \u2066x\u2069 العربية",
    "combining marks": "e" + "\u0301" * 500,
    "beyond the basic plane": "𝕏🧑‍🚀👩‍👩‍👧‍👦 \U0010ffff",
    "noncharacters": "\ufffe\uffff\ufdd0",
    "a byte order mark inside": "a\ufeffb",
    "nothing visible": "\u200b\u00ad\u2060x\u200b",
    "HTML": "<script>alert(1)</script><img src=x onerror=alert(1)>",
    "escapes of terminals": "\x1b[31mred\x1b]0;title\x07",
    "quotes and commas": '"a", ""b"", c\t; \'d\' \\" \\n {"a": [1]}',
    "formula": "=HYPERLINK(1)",
    "a number": "12e400",
    "JSON in text": '{"a": NaN}',
    "placeholders of other layouts": "<image> <video> <audio>",  # captions have none
    "names of others' visual tokens": "<|image_pad|> <|vision_start|> <img> [IMG] <image_soft_token>",
    "control strings": " ".join(sorted({control for template in TEMPLATES.values() for control in template.controls})),
    "a million letters": "word " * 200_000 + "end",
    "one long word": "z" * 300_000,
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("container", OF_TEXTS)
def test_texts_of_every_kind_are_trained_on_unchanged(container: str, tmp_path: Path, plain: Encoder, rule: Any) -> None:
    path = OF_TEXTS[container](tmp_path, [row for text in TEXTS.values() for row in (("a.png", text), SOUND)])
    rows = open_source(Source(path=str(path)))
    found = [sample for *_, sample in rows.kept_rows()]
    for (name, text), sample in zip(TEXTS.items(), found[::2], strict=True):
        assert isinstance(sample, Sample), name
        assert sample.messages[-1].parts == (Text(text.strip()),), name
        if container == "JSON list":
            document = document_of(sample, plain, rule, [grey_images(rule)])
            learned = [t for t in document.labels_T.tolist() if t >= 0]
            assert plain.decode(learned[:-1]) == plain.decode(plain.ids(text.strip())), name
            assert learned[-1] == plain.controls["<|endoftext|>"]
            assert plain.image_token not in learned
    assert all(isinstance(sample, Sample) for sample in found[1::2])


BAD_TEXTS = {"": "no_target", "  \n\t": "no_target", "\u2003\u3000": "no_target", "a\ud800": "bad_unicode", "a\udce9b": "bad_unicode"}


@pytest.mark.parametrize("container", OF_TEXTS)
def test_texts_that_no_answer_may_be(container: str, tmp_path: Path, plain: Encoder, rule: Any) -> None:
    texts = [text for text in BAD_TEXTS if container not in UNICODE_ONLY or max(text, default="") < "\ud800"]
    path = OF_TEXTS[container](tmp_path, [SOUND, *[row for text in texts for row in (("a.png", text), SOUND)]])
    found: list[str] = []
    for _, _, sample in open_source(Source(path=str(path))).kept_rows():
        try:
            if isinstance(sample, BadSample):
                raise sample
            document_of(sample, plain, rule, [grey_images(rule)])
            found.append("sound")
        except BadSample as bad:
            found.append(bad.cause)
    assert found == ["sound", *[cause for text in texts for cause in (BAD_TEXTS[text], "sound")]]


@pytest.mark.parametrize("name", STRICT)
def test_what_json_forbids_spoils_its_member_of_an_archive_only(name: str, tmp_path: Path) -> None:
    """As it does in a JSON list and in JSON lines (test_sources.py)."""
    text, cause, _ = STRICT[name]
    sound = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}'
    found = outcomes(archive(tmp_path / "rows.tar", [("0.json", sound), ("1.json", text), ("2.json", sound)]))
    assert [bad.cause if isinstance(bad, BadSample) else bad for bad in found] == ["b", cause, "b"]


# Rows of any shape

_KEYS = sorted(
    {key for shape in SHAPES for key in shape.keys} | {"type", "text", "image", "image_url", "url", "path", "bytes", "video", "tool_calls"}
)
_WORDS = [
    "",
    "a",
    "user",
    "assistant",
    "gpt",
    "<image>",
    "<video>",
    "text",
    "image",
    "a.png",
    "http://x/y",
    '["a.png"]',
    '{"a": 1}',
    "a\ud800",
]
_leaf = st.none() | st.booleans() | st.integers(-1, 10**17) | st.floats(allow_nan=False) | st.sampled_from(_WORDS) | st.just(b"\x89PNG")
_value = st.recursive(
    _leaf, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(_KEYS), inner, max_size=3), max_leaves=12
)
_turn = st.sampled_from([("role", "content", "user", "assistant"), ("from", "value", "human", "gpt")]).flatmap(
    lambda names: st.tuples(_value | st.just("what?"), _value | st.just("that")).map(
        lambda said: [{names[0]: names[2], names[1]: said[0]}, {names[0]: names[3], names[1]: said[1]}]
    )
)
_columns = st.dictionaries(st.sampled_from(COLUMNS), _value, max_size=4)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(SHAPES), st.data())
def test_a_row_of_any_shape_is_a_sample_or_a_reject(shape: Shape, data: st.DataObject) -> None:
    """What a layout needs is there, with any values. (340,000 such rows were tried when this was written.)"""
    row: Any = {data.draw(st.sampled_from(one)): data.draw(_turn | _value) for one in shape.needs} | data.draw(_columns)
    if data.draw(st.integers(0, 20)) == 0:
        row = data.draw(_value)
    try:
        assert isinstance(shape.read(row, "id", Path("/x")), Sample)
        assert isinstance(shape.kind(row), str)
        return
    except BadSample as caught:
        bad = caught
    assert bad.cause in CAUSES
    assert isinstance(bad.field, str)
    assert 0 < len(bad.message) < 1_000
