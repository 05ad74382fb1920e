"""Every layout read, every bad row rejected by cause and field, every path kept inside its folder."""

import base64
import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eyeline.core.batch import EncodedImage, Sample, Text
from eyeline.core.errors import Refused, StorageFailed
from eyeline.data.containers import json_rows
from eyeline.data.containers.container import Place
from eyeline.data.sources.sources import Rows, Source, open_source
from tests.data.hostile_json import STRICT
from tests.data.read_back import complaint, parts, row_of
from tests.data.short_samples import chat, turns

ASKED = [{"from": "human", "value": "<image>\nwhat?"}, {"from": "gpt", "value": "a dot"}]


@pytest.fixture
def opened(tmp_path: Path) -> Callable[..., Rows]:
    """`opened([rows])` writes them as a JSON list, `opened("text", "x.jsonl")` as they are, and opens the file."""

    def write(content: Any, name: str = "rows.json", **settings: Any) -> Rows:
        text = content if isinstance(content, str | bytes) else json.dumps(content)
        path = tmp_path / name
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return open_source(Source(path=str(path), **settings))

    return write


def count(rows: Rows) -> int:
    return sum(1 for _ in rows.kept_rows())


# LLaVA


def test_llava_as_published(opened, tmp_path: Path) -> None:
    rows = opened([{"id": "000", "image": "00/a.jpg", "conversations": ASKED}, {"conversations": turns("hi", "ho")}])
    assert rows.layout.name == "llava"
    first = row_of(rows)
    assert first.id == "rows.json#0"
    assert [m.role for m in first.messages] == ["user", "assistant"]
    assert first.messages[0].parts == (EncodedImage("00/a.jpg", tmp_path / "00/a.jpg"), Text("what?"))
    assert parts(rows, 1) == [["hi"], ["ho"]]
    assert [p.source for p in row_of(rows).images] == [tmp_path / "00/a.jpg"]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("<image>\nwhat?", ["<a>", "what?"]),
        ("what?\n<image>", ["what?", "<a>"]),
        ("<image>what?", ["<a>", "what?"]),
        ("see <image> here", ["see ", "<a>", " here"]),
        ("<image>", ["<a>"]),
        ("<image>\n\nwhat?\n", ["<a>", "\nwhat?\n"]),
        ("<Image> <image >\n<image>", ["<Image> <image >", "<a>"]),
    ],
)
def test_placeholders_wherever_they_stand(opened, text: str, wanted: list[str]) -> None:
    rows = opened([{"image": "a", "conversations": turns(text, "yes")}])
    assert parts(rows)[0] == wanted


def test_several_images_in_several_turns(opened) -> None:
    rows = opened([{"image": ["a", "b", "c"], "conversations": turns("<image><image>\ncompare", "no", "and <image>?", "yes")}])
    assert parts(rows) == [["<a>", "<b>", "compare"], ["no"], ["and ", "<c>", "?"], ["yes"]]


def test_a_system_message_is_not_an_answer(opened) -> None:
    conversation = [{"from": "system", "value": "Be kind."}, *turns("hi", "ho")]
    assert [m.role for m in row_of(opened([{"conversations": conversation}])).messages] == ["system", "user", "assistant"]


BAD_LLAVA: dict[str, tuple[Any, str, str]] = {
    "two placeholders, one image": ({"image": "a", "conversations": turns("<image><image>", "x")}, "placeholder_count", "conversations"),
    "one placeholder, two images": (
        {"image": ["a", "b"], "conversations": turns("<image>", "x")},
        "placeholder_count",
        "conversations",
    ),
    "placeholder without image": ({"conversations": turns("<image>", "x")}, "placeholder_count", "conversations"),
    "image without placeholder": ({"image": "a", "conversations": turns("hi", "x")}, "placeholder_count", "conversations"),
    "empty list of images": ({"image": [], "conversations": ASKED}, "placeholder_count", "conversations"),
    "placeholder in an answer": ({"image": "a", "conversations": turns("hi", "<image>")}, "image_in_answer", "conversations[1].value"),
    "image is a number": ({"image": 7, "conversations": ASKED}, "wrong_type", "image"),
    "image holds a number": ({"image": [7], "conversations": ASKED}, "wrong_type", "image[0]"),
    "image is empty": ({"image": "", "conversations": ASKED}, "placeholder_count", "conversations"),
    "unknown role": ({"conversations": turns("hi", "ho", roles=("human", "robot"))}, "role", "conversations[1].from"),
    "role is no text": ({"conversations": [{"from": 1, "value": "x"}]}, "role", "conversations[0].from"),
    "no role": ({"conversations": [{"value": "x"}]}, "role", "conversations[0].from"),
    "value is null": ({"conversations": [{"from": "human", "value": None}]}, "wrong_type", "conversations[0].value"),
    "turn is a string": ({"conversations": ["hi"]}, "wrong_type", "conversations[0]"),
    "conversations is a string": ({"conversations": "hi"}, "wrong_type", "conversations"),
    "conversations is missing": ({"image": "a"}, "wrong_type", "conversations"),
    "row is a list": ([1, 2], "wrong_type", "row"),
    "row is null": (None, "wrong_type", "row"),
    "empty": ({"conversations": []}, "no_target", "messages"),
    "only system": ({"conversations": [{"from": "system", "value": "x"}]}, "no_target", "messages"),
    "only a question": ({"conversations": turns("hi")}, "no_target", "messages"),
    "an answer first": ({"conversations": turns("ho", "hi", roles=("gpt", "human"))}, "role_order", "messages[0]"),
    "two questions": ({"conversations": [*turns("a"), *turns("b", "c")]}, "role_order", "messages[1]"),
    "two answers": ({"conversations": [*turns("a", "b"), {"from": "gpt", "value": "c"}]}, "role_order", "messages[2]"),
    "a question last": ({"conversations": turns("a", "b", "c")}, "role_order", "messages[2]"),
    "system in the middle": (
        {"conversations": [*turns("a", "b"), {"from": "system", "value": "x"}, *turns("a", "b")]},
        "role_order",
        "messages[2]",
    ),
    "video": ({"video": "a.mp4", "conversations": turns("<video>", "x")}, "video_file", "video"),
}


@pytest.mark.parametrize("name", BAD_LLAVA)
def test_bad_llava_rows(opened, name: str) -> None:
    row, cause, field = BAD_LLAVA[name]
    rows = opened([{"conversations": turns("hi", "ho")}, row, {"conversations": turns("hi", "ho")}])
    assert complaint(rows, 1) == (cause, field)
    assert parts(rows, 2) == [["hi"], ["ho"]]  # the neighbours stay


# OpenAI messages


PIXEL = base64.b64encode(b"not decoded here").decode()


def test_openai_parts(opened) -> None:
    url = f"data:image/png;base64,{PIXEL}"
    content = [
        {"type": "text", "text": "first "},
        {"type": "image_url", "image_url": {"url": "a.png"}},
        {"type": "image_url", "image_url": url},
        {"type": "image", "image": "b.png"},
        {"type": "text", "text": "last"},
    ]
    rows = opened([{"messages": [{"role": "developer", "content": "Be brief."}, *chat(content, [{"type": "text", "text": "ok"}])]}])
    assert rows.layout.name == "openai"
    assert parts(rows) == [["Be brief."], ["first ", "<a.png>", "<data:image/png;base64,…>", "<b.png>", "last"], ["ok"]]
    assert row_of(rows).messages[0].role == "system"
    assert row_of(rows).images[1].source == b"not decoded here"


def test_openai_strings_and_bare_parts_take_images_from_a_column(opened) -> None:
    rows = opened([
        {"messages": chat("<image>\nwhat?", "a"), "images": ["a.png"]},
        {"messages": chat([{"type": "image"}, {"type": "text", "text": "what?"}, {"type": "image"}], "b"), "images": ["a.png", "b.png"]},
    ])  # fmt: skip
    assert parts(rows, 0) == [["<a.png>", "what?"], ["a"]]
    assert parts(rows, 1) == [["<a.png>", "what?", "<b.png>"], ["b"]]


def test_openai_without_any_placeholder_has_the_images_first(opened) -> None:
    """As TRL and ms-swift take such rows."""
    rows = opened([
        {"messages": [{"role": "system", "content": "s"}, *chat("what?", "a", "and?", "b")], "images": ["a.png", "b.png"]},
        {"messages": chat([{"type": "text", "text": "what?"}], "a"), "images": ["a.png"]},
    ])  # fmt: skip
    assert parts(rows, 0) == [["s"], ["<a.png>", "<b.png>", "what?"], ["a"], ["and?"], ["b"]]
    assert parts(rows, 1) == [["<a.png>", "what?"], ["a"]]


BAD_OPENAI: dict[str, tuple[Any, str, str]] = {
    "messages is a string": ({"messages": "hi"}, "wrong_type", "messages"),
    "images is a number": ({"messages": chat("a", "b"), "images": 3}, "wrong_type", "images"),
    "more images than parts": (
        {"messages": chat([{"type": "image"}, {"type": "text", "text": "a"}], "b"), "images": ["a", "b"]},
        "placeholder_count",
        "messages",
    ),
    "an image in a part and others": (
        {"messages": chat([{"type": "image", "image": "a"}], "b"), "images": ["b"]},
        "placeholder_count",
        "messages",
    ),
    "placeholder without image": ({"messages": chat("<image>", "b")}, "placeholder_count", "messages"),
    "placeholder in a part": (
        {"messages": chat([{"type": "text", "text": "<image>"}], "b")},
        "placeholder_count",
        "messages[0].content[0].text",
    ),
    "content is null": ({"messages": chat(None, "b")}, "wrong_type", "messages[0].content"),
    "part is a string": ({"messages": chat(["hi"], "b")}, "wrong_type", "messages[0].content[0]"),
    "part of unknown type": ({"messages": chat([{"type": "audio"}], "b")}, "unsupported", "messages[0].content[0].type"),
    "text is a list": ({"messages": chat([{"type": "text", "text": [1]}], "b")}, "wrong_type", "messages[0].content[0].text"),
    "image_url without url": ({"messages": chat([{"type": "image_url"}], "b")}, "wrong_type", "messages[0].content[0].image_url"),
    "an image in an answer": ({"messages": chat("a", [{"type": "image", "image": "a"}])}, "image_in_answer", "messages[1]"),
    "a tool's answer": ({"messages": [*chat("a", "b"), {"role": "tool", "content": "c"}]}, "tool_turn", "messages[2].role"),
    "a call of a tool": (
        {"messages": [*chat("a"), {"role": "assistant", "content": "b", "tool_calls": [{}]}]},
        "tool_turn",
        "messages[1].tool_calls",
    ),
}


@pytest.mark.parametrize("name", BAD_OPENAI)
def test_bad_openai_rows(opened, name: str) -> None:
    row, cause, field = BAD_OPENAI[name]
    assert complaint(opened([{"messages": chat("a", "b")}, row]), 1) == (cause, field)


# JSON that is not quite


SOUND = b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}'


@pytest.mark.parametrize("name", STRICT)
@pytest.mark.parametrize("container", ["list", "lines"])
def test_what_json_forbids_spoils_its_own_row_only(opened, name: str, container: str) -> None:
    text, cause, field = STRICT[name]
    bad = text if isinstance(text, bytes) else text.encode()
    lined = container == "lines"
    data = b"\n".join([SOUND, bad, SOUND]) if lined else b"[" + b",".join([SOUND, bad, SOUND]) + b"]"
    rows = opened(data, "rows.jsonl" if lined else "rows.json")
    assert count(rows) == 3
    assert parts(rows, 0) == parts(rows, 2) == [["a"], ["b"]]
    assert complaint(rows, 1) == (cause, field)


def test_lines_that_are_no_json_spoil_only_themselves(opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_rows, "MAX_LINE_BYTES", 2000)
    bad = [b"{torn", b"[" * 1500, b'"text"', b'{"messages": "' + b"x" * 5000 + b'"}', SOUND + b"}"]
    rows = opened(b"\xef\xbb\xbf" + SOUND + b"\r\n\n" + b"\n".join(bad) + b"\n  \n" + SOUND, "rows.jsonl")
    assert count(rows) == 7  # blank lines are no rows
    assert parts(rows, 0) == parts(rows, 6) == [["a"], ["b"]]
    assert [complaint(rows, i)[0] for i in range(1, 6)] == ["not_json", "nesting", "wrong_type", "line_too_long", "not_json"]


def test_deep_nesting_inside_a_row(opened) -> None:
    rows = opened(SOUND + b'\n{"messages": [], "deep": ' + b"[" * 900 + b"NaN" + b"]" * 900 + b"}", "rows.jsonl")
    assert complaint(rows, 1)[0] == "not_finite"


REFUSED = {
    "torn list": (b"[" + SOUND + b",", r"is not JSON: .*: it ends early"),
    "list torn in a string": (b'[{"a": "b', r"Unterminated string starting at byte 7, in line 1: it ends early"),
    "a comma too many": (b"[\n" + SOUND + b",\n]", r"in line 3: there is a comma before the bracket"),
    "written by Python's print": (b"[{'a': 1}]", "at byte 2, in line 1: JSON has double quotes"),
    "list nested too deep": (b"[" * 100_000, "nested too deep"),
    "empty": (b"", "is empty"),
    "blank": (b" \n ", "starts with|is empty"),
    "no rows": (b"[]", "holds no rows"),
    "Parquet": (b"PAR1xxxx", "is not a complete Parquet file"),
    "gzip": (b"\x1f\x8bxxxx", "gzip"),
    "CSV": (b"image,text\na.png,hi\n", "starts with b'image,text"),
    "unknown columns": (
        b'[{"img": "a", "caption": "b"}]',
        r"its rows have img, caption\. Perhaps columns: {image: img}\. Wanted: conversations \(llava\); messages",
    ),
    "one row over several lines": (b'{\n  "image": "a",\n  "conversations": []\n}', r"is one JSON object, with 'image' in it"),
    "rows inside an object": (b'{"data": [{"messages": []}]}', r"is one JSON object, with 'data' in it, and neither a list"),
    "rows in an object over several lines": (
        b'{\r\n "data": [\r\n  {\r\n   "messages": []\r\n  }\r\n ]\r\n}',
        r"one JSON object, with 'data'",
    ),
    "one row with a misspelt name": (b'{"mesages": [{"role": "user"}]}', "Perhaps columns: {messages: mesages}"),
    "rows by number": (b'{\n "0": {"messages": []},\n "1": {"messages": []}\n}', r"one JSON object, with '0'"),
    "lines of which none is right": (
        b'{"messages": [}\n{"messages": [}\n',
        r"none of its first rows can be read\. The first: row: .*\. Write one JSON value per line",
    ),
    "rows of strings": (b'["a", "b"]', "none of its first rows is an object"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_files_that_are_refused(opened, name: str) -> None:
    data, message = REFUSED[name]
    with pytest.raises(Refused, match=message) as caught:
        opened(data)
    assert "rows.json" in str(caught.value)


def test_a_list_with_a_broken_first_row_is_still_recognised(opened) -> None:
    assert opened([None, {"messages": chat("a", "b")}]).layout.why == "JSON list; row 1 has messages"


# Paths and URLs


def test_a_data_url_over_the_cap(opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyeline.data.layouts.media.MAX_DATA_URL", 100)
    assert complaint(opened([{"image": "data:image/png;base64," + "A" * 104, "conversations": ASKED}])) == ("data_url", "image")


def test_the_folder_of_the_images_can_be_another(opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "images").mkdir()
    rows = opened([{"image": "a.png", "conversations": ASKED}], images=str(tmp_path / "images"))
    assert row_of(rows).images[0].source == tmp_path / "images" / "a.png"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert opened([{"image": "a.png", "conversations": ASKED}], images="~/images").root == tmp_path / "images"
    absolute = opened([{"image": str(tmp_path / "b.png"), "conversations": ASKED}], images="/")
    assert row_of(absolute).images[0].source == tmp_path / "b.png"
    with pytest.raises(Refused, match=r"the folder of the images, .*nowhere, does not exist"):
        opened([{"image": "a", "conversations": ASKED}], images=str(tmp_path / "nowhere"))


# easy-VQA, kinds, limits


def test_easy_vqa_as_its_package_has_it() -> None:
    rows = open_source(Source(path="package:easy_vqa/data/train"))
    kept = list(rows.kept_rows())
    assert (rows.layout.name, len(kept)) == ("easy-vqa", 38575)
    place, _, first = kept[0]
    assert isinstance(first, Sample) and rows.read(place) == first
    assert (first.id, first.kind) == ("questions.json#0", "shape")
    assert [p.text for m in first.messages for p in m.parts if isinstance(p, Text)] == ["what is the blue shape?", "rectangle"]
    assert isinstance(first.images[0].source, Path)
    assert first.images[0].source.is_file()
    kinds = [kind for _, kind, _ in kept]
    assert kinds.count("yes/no") == 28407  # as the package's README says
    assert set(kinds) == {"yes/no", "shape", "color"}
    tested = open_source(Source(path="package:easy_vqa/data/test"))
    assert Counter(kind == "yes/no" for _, kind, _ in tested.kept_rows()) == {True: 7136, False: 9673 - 7136}


def test_bad_easy_vqa_rows(opened) -> None:
    rows = opened([["q", "a", 0], ["q", "a"], ["q", 1, 0], ["q", "a", "0"], ["q", "a", True], {"q": 1}])
    assert [complaint(rows, i) for i in range(1, 6)] == [("wrong_type", "row")] * 5


def test_kinds_and_limits(opened) -> None:
    rows = opened([{"messages": chat("a", str(n)), "kind": "odd" if n % 2 else "even"} for n in range(10)], categories=("odd",), limit=3)
    assert [rows.origin_of(place)[0] for place, _, _ in rows.kept_rows()] == ["rows.json#1", "rows.json#3", "rows.json#5"]
    assert parts(rows, 2) == [["a"], ["5"]]
    assert [rows.origin_of(place)[2] for place, _, _ in rows.kept_rows()] == [1, 3, 5]


def test_places_that_do_not_exist(tmp_path: Path) -> None:
    for name in ("train.json", "val.json"):
        (tmp_path / name).write_text("[]")
    (tmp_path / "vel2").mkdir()
    for path, message in {
        str(tmp_path / "trian.json"): r"does not exist\. Did you mean 'train\.json'",
        str(tmp_path / "train{0..3}.json"): r"does not exist\. A range in braces is not supported: write train\*\.json for all files",
        str(tmp_path / "vel" / "x.json"): rf"does not exist, nor does the folder {tmp_path}/vel \(did you mean 'vel2'\?\)",
        str(tmp_path / "vel" / "*.tar"): rf"no file matches .*: {tmp_path}/vel does not exist\. Did you mean 'vel2'\?$",
        str(tmp_path / "x*.tar"): r"x\*\.tar\. Give another path",
        str(tmp_path / "{a,b}*.tar"): r"A range in braces is not supported: write \* in its place",
        str(tmp_path): r"holds several \.json files\. Give one of its files: train\.json, val\.json",
        "package:no_such_package/data": "is not installed. Try: pip install no-such-package",
        "package:easy_vqa/data/nothing": "there is no data/nothing inside",
        "package:easy_vqa/../..": r"there is no \.\./\.\. inside",
        "package:os.path/x": "is not installed",
        "package:__main__/x": "is not installed",
        "package:easy_vqa/" + "x" * 300: "there is no x+ inside",
        "x" * 300: "does not exist",
        "a\0b": "does not exist",
        "a\ud800b": "does not exist",
    }.items():
        with pytest.raises(Refused, match=message):
            open_source(Source(path=path))


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(Refused, match="neither a file nor a folder"):
        open_source(Source(path=str(tmp_path / "pipe.json")))
    (tmp_path / "rows.json").write_text(json.dumps([{"messages": chat("a", "b")}]))
    with pytest.raises(Refused, match="the folder of the images"):
        open_source(Source(path=str(tmp_path / "rows.json"), images="x" * 300))


def test_a_row_that_cannot_be_parsed_is_of_every_kind(opened) -> None:
    """Left out, it would be lost silently."""
    line = json.dumps({"messages": chat("a", "b"), "kind": "k"}).encode()
    rows = opened(line + b'\n{"torn\n' + line.replace(b"}]", b'}], "n": NaN', 1), "rows.jsonl", categories=("k",))
    assert [complaint(rows, i)[0] for i in range(1, 3)] == ["not_json", "not_finite"]


def test_lines_that_changed_since_they_were_listed_stop_the_run(opened) -> None:
    line = json.dumps({"messages": chat("a", "b")}).encode() + b"\n"
    rows = opened(line * 3, "rows.jsonl")
    rows.path.write_bytes(line.replace(b'"b"', b'"c"') * 3 + line)
    with pytest.raises(StorageFailed, match=r"rows\.jsonl has changed since it was opened"):
        rows.read(Place(0, 1, len(line), len(line)))
