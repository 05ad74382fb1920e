"""What rows are: every layout, what is declared against what is detected, and every way in which a row may hold an image."""

import base64
import csv
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pytest

from eyeline.core.batch import EncodedImage
from eyeline.core.errors import BadSample, Refused
from eyeline.data.layouts.layouts import SHAPES
from eyeline.data.sources.sources import Rows, Source, open_source
from tests.data.container_files import archive, encoded
from tests.data.container_files import arrow_file as as_arrow
from tests.data.container_files import parquet_file as as_parquet
from tests.data.read_back import complaint, parts
from tests.data.short_samples import chat, turns


@pytest.fixture
def opened(tmp_path: Path) -> Callable[..., Rows]:
    """`opened([rows], **settings)` writes them as a JSON list and opens it."""

    def write(content: Any, **settings: Any) -> Rows:
        (tmp_path / "rows.json").write_text(json.dumps(content))
        return open_source(Source(path=str(tmp_path / "rows.json"), **settings))

    return write


# Layouts


LAYOUTS: dict[str, tuple[str, dict[str, Any], list[list[str]]]] = {
    "question and answer": ("question-answer", {"image": "a", "question": "what?", "answer": "a dot"}, [["<a>", "what?"], ["a dot"]]),
    "where the image stands": (
        "question-answer",
        {"image": "a", "question": "in <image>\nwhat?", "answer": "a dot"},
        [["in ", "<a>", "what?"], ["a dot"]],
    ),
    "text alone": ("question-answer", {"question": "what?", "answer": "a dot"}, [["what?"], ["a dot"]]),
    "several images": (
        "question-answer",
        {"images": ["a", "b"], "question": "which?", "answer": "b", "system": "Be brief."},
        [["Be brief."], ["<a>", "<b>", "which?"], ["b"]],
    ),
    "VQAv2": (
        "question-answer",
        {"question": "what?", "image": "a", "multiple_choice_answer": "net", "answers": [{"answer": "nets", "answer_id": 1}]},
        [["<a>", "what?"], ["net"]],
    ),
    "the most frequent answer": (
        "question-answer",
        {"question": "what?", "image": "a", "answers": ["x", "net", "y", "net"]},
        [["<a>", "what?"], ["net"]],
    ),
    "of equals the first": (
        "question-answer",
        {"question": "what?", "answers": [{"answer": "b"}, {"answer": "a"}, {"answer": "a"}, {"answer": "b"}]},
        [["what?"], ["b"]],
    ),
    "a number": ("question-answer", {"question": "how many?", "answer": 3}, [["how many?"], ["3"]]),
    "an answer in brackets": ("question-answer", {"question": "which box?", "answer": "[1, 2]"}, [["which box?"], ["[1, 2]"]]),
    "prompt and completion": (
        "prompt-completion",
        {"prompt": "[INST] <image>what?", "completion": "a dot", "image": "a"},
        [["[INST] ", "<a>", "what?"], ["a dot"]],
    ),
    "messages in prompt and completion": (
        "prompt-completion",
        {"prompt": chat("what?", "a", "and?"), "completion": [{"role": "assistant", "content": "b"}], "images": ["a"]},
        [["<a>", "what?"], ["a"], ["and?"], ["b"]],
    ),
    "Alpaca": (
        "alpaca",
        {"instruction": "Name it.", "input": "<image>", "output": "a dot", "image": "a", "history": [["hi", "ho"]], "system": "s"},
        [["s"], ["hi"], ["ho"], ["Name it.", "<a>"], ["a dot"]],
    ),
    "Alpaca without an input": ("alpaca", {"instruction": "Say ho.", "input": "", "output": "ho"}, [["Say ho."], ["ho"]]),
    "ms-swift": (
        "query-response",
        {"query": "<image>what?", "response": "a dot", "images": "a", "history": [["<image>hi", "ho"]]} | {"images": ["a", "b"]},
        [["<a>", "hi"], ["ho"], ["<b>", "what?"], ["a dot"]],
    ),
    "ShareGPT": (
        "llava",
        {"conversations": turns("<image>hi", "ho"), "images": ["a"], "system": "s", "tools": "[]"},
        [["s"], ["<a>", "hi"], ["ho"]],
    ),
    "pairs of ms-swift": (
        "exchanges",
        {"conversation": [{"human": "hi", "assistant": "ho"}, {"human": "<image>?", "assistant": "a"}], "image": "a", "system": "s"},
        [["s"], ["hi"], ["ho"], ["<a>", "?"], ["a"]],
    ),
    "messages under its name": ("exchanges", {"conversation": chat("hi", "ho")}, [["hi"], ["ho"]]),
    "turns under its name": ("exchanges", {"conversation": turns("hi", "ho")}, [["hi"], ["ho"]]),
    "several captions": ("captions", {"image": "a", "captions": ["one", "two"]}, [["<a>", "Describe the image."], ["one"]]),
    "imagefolder's table": ("captions", {"file_name": "a", "text": "one"}, [["<a>", "Describe the image."], ["one"]]),
    "turns as JSON text": (
        "llava",
        {"conversations": json.dumps(turns("<image><image>hi", "ho")), "image": '["a", "b"]'},
        [["<a>", "<b>", "hi"], ["ho"]],
    ),
    "messages as JSON text": ("openai", {"messages": json.dumps(chat("hi", "ho"))}, [["hi"], ["ho"]]),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(opened, name: str) -> None:
    layout, row, wanted = LAYOUTS[name]
    rows = opened([row])
    assert rows.layout.name == layout
    assert parts(rows) == wanted
    declared = opened([row], layout=layout)
    assert parts(declared) == wanted
    assert "declared" in declared.layout.why


SOUND = {"question": "what?", "answer": "a dot"}
BAD: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "two images, one place": (SOUND, {"image": ["a", "b"], "question": "<image>", "answer": "x"}, "placeholder_count", "question"),
    "a place, no image": (SOUND, {"question": "<image>", "answer": "x"}, "placeholder_count", "question"),
    "no answers": (SOUND, {"question": "q", "answers": []}, "no_target", "answers"),
    "answers that are no texts": (SOUND, {"question": "q", "answers": [{"a": 1}]}, "wrong_type", "answers"),
    "an answer that is true": (SOUND, {"question": "q", "answer": True}, "wrong_type", "answer"),
    "no answer": (SOUND, {"question": "q"}, "no_target", "answer"),
    "no question": (SOUND, {"question": None, "answer": "a"}, "wrong_type", "row.question"),
    "an answer beyond the choices": (SOUND, SOUND | {"answer": 2, "choices": ["a", "b"]}, "wrong_type", "answer"),
    "tools": (SOUND, SOUND | {"tools": "[{}]"}, "tool_turn", "tools"),
    "a system that is no text": (SOUND, SOUND | {"system": [3]}, "wrong_type", "row.system"),
    "history of strings": ({"query": "a", "response": "b"}, {"query": "a", "response": "b", "history": ["x"]}, "wrong_type", "history"),
    "half a prompt in messages": (
        {"prompt": "a", "completion": "b"},
        {"prompt": chat("a"), "completion": "b"},
        "wrong_type",
        "row.prompt",
    ),
    "Python's lists": ({"messages": chat("a", "b")}, {"messages": "[{'role': 'user', 'content': 'a'}]"}, "not_json", "messages"),
    "NaN in JSON text": ({"messages": chat("a", "b")}, {"messages": '[{"role": NaN}]'}, "not_finite", "messages"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_rows(opened, name: str) -> None:
    sound, row, cause, field = BAD[name]
    assert complaint(opened([sound, sound, row]), 2) == (cause, field)


# What is detected


def test_most_rows_decide_and_of_equals_the_order(opened) -> None:
    talk, caption = {"conversations": turns("a", "b")}, {"image": "a", "caption": "c"}
    rows = opened([caption, talk, talk])
    assert rows.layout.name == "llava"
    assert (
        rows.layout.why
        == "JSON list; row 1 has conversations; 2 of the first 3 rows do; captions would fit too (set layout: NAME); not read: caption"
    )
    assert opened([caption, caption, talk]).layout.name == "captions"
    assert opened([talk | caption] * 2).layout.name == "llava"
    both = opened([talk | caption] * 2, layout="captions")
    assert (both.layout.name, parts(both)) == ("captions", [["<a>", "Describe the image."], ["c"]])


def test_unknown_layout_names_the_columns_found(opened) -> None:
    with pytest.raises(Refused, match=r"no known layout\. Found: JSON list; its rows have foto, titel\. Wanted: conversations \(llava\)"):
        opened([{"foto": "a", "titel": "b"}])
    with pytest.raises(
        Refused, match=r"none of its first rows is of the layout openai\. Found: .*; its rows have conversations\. Wanted: messages"
    ):
        opened([{"conversations": turns("a", "b")}], layout="openai")


# What is declared


def test_columns_are_called_otherwise(opened) -> None:
    rows = opened(
        [{"meta": {"foto": "a", "n": 1}, "frage": "<image>was?", "antwort": ["ein Punkt"], "gruppe": "k", "image": "a thumbnail"}],
        columns={"image": "meta.foto", "question": "frage", "answers": "antwort", "kind": "gruppe"},
    )
    assert parts(rows) == [["<a>", "was?"], ["ein Punkt"]]
    assert [kind for _, kind, _ in rows.kept_rows()] == ["k"]
    assert rows.layout.why == "JSON list; row 0 has question (frage) and answers (antwort)"
    again = pickle.loads(pickle.dumps(rows))
    assert parts(again) == parts(rows)


def test_a_renamed_column_is_not_taken_as_what_it_was_called(opened) -> None:
    swapped = opened([{"question": "a dot", "answer": "what?"}], columns={"question": "answer", "answer": "question"})
    assert parts(swapped) == [["what?"], ["a dot"]]
    other = opened([{"image": "a", "text": "long", "short": "one"}], columns={"caption": "short"})
    assert parts(other) == [["<a>", "Describe the image."], ["one"]]
    kinds = opened([SOUND | {"system": "a kind"}], columns={"kind": "system"})
    assert (parts(kinds), [kind for _, kind, _ in kinds.kept_rows()]) == ([["what?"], ["a dot"]], ["a kind"])


@pytest.mark.parametrize("as_text", [False, True])
def test_turns_and_speakers_are_called_otherwise(opened, as_text: bool) -> None:
    said = [
        {"wer": "guest", "was": "<image>hi"},
        {"wer": "bot", "was": "ho"},
        {"wer": "gpt", "was": "hm"},
        {"wer": "assistant", "was": "ha"},
    ]
    rows = opened(
        [{"dialog": json.dumps(said) if as_text else said, "image": "a"}],
        columns={"conversations": "dialog", "from": "wer", "value": "was"},
        roles={"user": "guest", "assistant": "bot"},
    )
    assert complaint(rows)[0] == "role_order"  # the third turn is an assistant's as well
    del said[2:]
    rows = opened([{"dialog": said, "image": "a"}], layout="llava", columns=dict(rows.source.columns), roles=dict(rows.source.roles))
    assert parts(rows) == [["<a>", "hi"], ["ho"]]
    swapped = opened([{"conversations": turns("ho", "hi", roles=("gpt", "human"))}], roles={"user": "gpt", "assistant": "human"})
    assert [m.role for m in swapped.read(next(swapped.rows_in(0))[0]).messages] == ["user", "assistant"]


WRONG: dict[str, tuple[Any, dict[str, Any], str]] = {
    "theirs first": (SOUND, {"columns": {"frage": "question"}}, r"Write {question: frage}, ours first\."),
    "a column that rows are rejected for": (SOUND, {"columns": {"rejected": "x"}}, "rejected is not a column of any layout"),
    "ours is unknown": (SOUND, {"columns": {"imgae": "x"}}, r"imgae is not a column of any layout\. Did you mean 'image'\?"),
    "ours is another layout's": (
        SOUND,
        {"layout": "question-answer", "columns": {"completion": "answer"}},
        r"completion is not a column of the layout question-answer\.",
    ),
    "ours is not read": (SOUND, {"columns": {"instruction": "answer"}}, r"no known layout|instruction has no meaning in the layout"),
    "theirs is not there": (
        {"foto": "a", "titel": "b"},
        {"columns": {"image": "fotos", "caption": "titel"}},
        r"image: fotos, but its rows have foto, titel\. Did you mean 'foto'\?",
    ),
    "theirs is not there, inside": (
        {"meta": {"foto": "a"}, "text": "b"},
        {"columns": {"image": "meta.photo"}},
        r"image: meta\.photo, but its rows have meta, text\. Did you mean 'meta\.foto'\?",
    ),
    "a key is not there": (
        {"conversations": [{"who": "human", "value": "a"}]},
        {"columns": {"from": "whom"}},
        r"from: whom, but its turns have who, value\. Did you mean 'who'\?",
    ),
    "a speaker is not there": (
        {"conversations": turns("a", "b", roles=("guest", "bot"))},
        {"roles": {"user": "guest", "assistant": "bott"}},
        r"assistant: bott, but the speakers of its turns are guest, bot\. Did you mean 'bot'\?",
    ),
    "two columns of images": (
        {"conversations": turns("a", "b"), "foto": "a", "more": ["b"]},
        {"columns": {"images": "more", "image": "foto"}},
        r"columns: image and images are names of the same column\. Keep one of them",
    ),
    "roles without turns": (SOUND, {"layout": "captions", "roles": {"user": "x"}}, r"the layout captions has no turns with roles"),
    "roles of another layout": (SOUND, {"roles": {"user": "x"}}, r"the speakers of its turns are "),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_declared_and_wrong(opened, name: str) -> None:
    row, settings, message = WRONG[name]
    with pytest.raises(Refused, match=message):
        opened([row], **settings)


def test_what_is_declared_is_part_of_what_an_index_depends_on(opened) -> None:
    row = {"image": "a", "caption": "c", "text": "t"}
    identities = {
        opened([row], **settings).layout.identity
        for settings in ({}, {"columns": {"caption": "text"}}, {"columns": {"captions": "text"}}, {"columns": {"kind": "text"}})
    }
    assert len(identities) == 4
    assert opened([row], layout="captions").layout.identity == opened([row]).layout.identity == "captions"


def test_every_layout_is_tried_here() -> None:
    assert {shape.name for shape in SHAPES} <= {layout for layout, _, _ in LAYOUTS.values()} | {"cauldron", "easy-vqa"}


ASKED = turns("<image>what?", "a dot")
MISSPELT: dict[str, tuple[dict[str, Any], str]] = {
    "a column that a layout needs": ({"image": "a", "mesages": ASKED}, "Perhaps columns: {messages: mesages}."),
    "columns in capitals": (
        {"Image": "a", "Question": "b", "Answer": "c"},
        "Perhaps columns: {image: Image, question: Question, answer: Answer}.",
    ),
    "words of another language": ({"foto": "a", "frage": "b", "antwort": "c"}, "its rows have foto, frage, antwort. Wanted"),
    "a table without names": ({"a.jpg": "b.jpg", "one": "two"}, "That looks like a row: a table starts with a line of the names"),
    "the column of images": ({"imgae": "a", "conversations": ASKED}, "'imgae' is not a column of them. Did you mean 'image'?"),
    "the key of a speaker": (
        {"image": "a", "conversations": [{"form": t["from"], "value": t["value"]} for t in ASKED]},
        "the turn has no from, but form, value. Rename form, or say columns: {from: form}",
    ),
    "the key of a text": (
        {"image": "a", "conversations": [{"from": t["from"], "valeu": t["value"]} for t in ASKED]},
        "there is no value, but from, valeu. Rename valeu, or say columns: {value: valeu}",
    ),
}


@pytest.mark.parametrize("name", MISSPELT)
def test_misspelt_names_are_guessed_at(opened, name: str) -> None:
    row, wanted = MISSPELT[name]
    try:
        said = complaint_of(opened([row]))
    except Refused as refused:
        said = str(refused)
    assert wanted in said


def complaint_of(rows: Rows) -> str:
    [(_, _, found)] = rows.kept_rows()
    assert isinstance(found, BadSample)
    return found.message


# In every container


TALKS: dict[str, tuple[dict[str, Any], Any]] = {
    "one image as a text": ({"image": "test1.jpg", "conversations": turns("<image>\nwhat?", "x")}, [["<test1.jpg>", "what?"], ["x"]]),
    "a place at the end": ({"image": "a", "conversations": turns("what?\n<image>", "x")}, [["what?", "<a>"], ["x"]]),
    "places in a row": ({"image": ["a", "b"], "conversations": turns("<image><image>what?", "x")}, [["<a>", "<b>", "what?"], ["x"]]),
    "two images, one place": ({"image": ["a", "b"], "conversations": turns("<image>what?", "x")}, "placeholder_count"),
    "one image, two places": ({"image": "a", "conversations": turns("<image><image>what?", "x")}, "placeholder_count"),
    "an odd number of turns": ({"image": "a", "conversations": turns("<image>what?", "x", "and?")}, "role_order"),
    "a system turn": ({"conversations": [{"from": "system", "value": "s"}, *turns("what?", "x")]}, [["s"], ["what?"], ["x"]]),
    "an unknown role": ({"conversations": turns("what?", "x", roles=("human", "model"))}, "role"),
    "an empty answer": ({"conversations": turns("what?", "")}, [["what?"], []]),
}


def as_text(row: dict[str, Any]) -> dict[str, Any]:
    """A row whose lists are JSON text, as cells of a table have them."""
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in row.items()}


def as_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    with open(path, "w", newline="") as file:
        table = csv.DictWriter(file, ["image", "conversations"])
        table.writeheader()
        table.writerows(map(as_text, rows))


CONTAINERS: dict[str, Callable[[Path, list[dict[str, Any]]], Any]] = {
    "rows.json": lambda path, rows: path.write_text(json.dumps(rows)),
    "rows.jsonl": lambda path, rows: path.write_text("\n".join(map(json.dumps, rows))),
    "rows.csv": as_csv,
    "rows.parquet": lambda path, rows: as_parquet(path, [row | {"image": as_text(row).get("image")} for row in rows]),
    "rows.arrow": lambda path, rows: as_arrow(path, arrow.Table.from_pylist([{"image": None} | as_text(row) for row in rows])),
    "rows.tar": lambda path, rows: archive(path, [(f"{n:02}.json", row) for n, row in enumerate(rows)]),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_row_is_the_same_in_every_container(tmp_path: Path, name: str) -> None:
    CONTAINERS[name](tmp_path / name, [row for row, _ in TALKS.values()])
    rows = open_source(Source(path=str(tmp_path / name)))
    got = [complaint(rows, n)[0] if isinstance(found, BadSample) else parts(rows, n) for n, (*_, found) in enumerate(rows.kept_rows())]
    assert got == [wanted for _, wanted in TALKS.values()]


# Images


PNG = encoded(0, "PNG")
BASE64 = base64.b64encode(PNG).decode()


@pytest.mark.parametrize(
    "value",
    [
        BASE64,
        "\n".join(BASE64[n : n + 76] for n in range(0, len(BASE64), 76)) + "\n",
        f"data:image/png;base64,{BASE64}",
        [BASE64],
        json.dumps([BASE64]),
    ],
)
def test_images_as_base64(opened, value: Any) -> None:
    rows = opened([{"image": value, "caption": "c"}])
    [image] = rows.read(next(rows.rows_in(0))[0]).images
    assert image.source == PNG
    assert len(image.name) < 40


@pytest.mark.parametrize("form", ["JPEG", "PNG", "GIF", "BMP", "WEBP", "TIFF"])
def test_base64_is_recognised_by_its_start(opened, form: str) -> None:
    rows = opened([{"image": base64.b64encode(encoded(1, form)).decode(), "caption": "c"}])
    assert rows.read(next(rows.rows_in(0))[0]).images[0].source == encoded(1, form)


@pytest.mark.parametrize("name", ["a" * 100, "9j/" + "4AAQ" * 20, f"{BASE64[:80]}.png", BASE64[:40], "images/" * 10 + "1"])
def test_paths_that_look_like_base64_are_paths(opened, tmp_path: Path, name: str) -> None:
    rows = opened([{"image": name, "caption": "c"}])
    assert rows.read(next(rows.rows_in(0))[0]).images == (EncodedImage(name, tmp_path / name),)


def test_base64_that_is_damaged_or_too_long(opened, monkeypatch: pytest.MonkeyPatch) -> None:
    assert complaint(opened([{"image": BASE64[:101], "caption": "c"}])) == ("data_url", "image")
    assert complaint(opened([{"image": '["a", ', "caption": "c"}, {"image": "['a', 'b']", "caption": "c"}]), 1) == ("not_json", "image")
    monkeypatch.setattr("eyeline.data.layouts.media.MAX_DATA_URL", 100)
    assert complaint(opened([{"image": BASE64, "caption": "c"}])) == ("data_url", "image")
