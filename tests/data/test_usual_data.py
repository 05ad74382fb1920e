"""What usual data have that a strict reader would refuse: long ids, base64 as programs write it, numbers as answers, empty columns of
images, placeholders that are text, lists as lines, and turns in a mixture of LLaVA's and OpenAI's words."""

import base64
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pyarrow.parquet as pq
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from eyeline.core.batch import Sample
from eyeline.core.errors import BadSample, Refused
from eyeline.data.prepared.folder import packed_row, packed_sample
from eyeline.data.sources.sources import Source, open_source
from tests.data.read_back import row_of
from tests.data.short_samples import chat, turns
from tests.data.small_training import causes, draw, one

RED = "red.png"


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., Path]:
    for name in (RED, "blue.png"):
        draw(tmp_path / name)

    def write(*rows: Any, name: str = "rows.json") -> Path:
        text = "".join(json.dumps(row) + "\n" for row in rows) if name.endswith("l") else json.dumps(rows)
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return write


ASKED = {"image": RED, "conversations": turns("<image>What?", "A.")}
A = ["user: [red]What?", "assistant: «A.»"]


# Long numbers


@pytest.mark.parametrize("id", [2**63 - 1, -(2**63), 2**64 - 1, 1465432143214321432, 2**128 - 1])
@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl"])
def test_ids_of_64_and_128_bits_are_numbers_like_others(written, id: int, name: str) -> None:
    row = ASKED | {"id": id, "meta": {"photo": [id]}}
    assert one(written(row, row, name=name)) == [A, A]


def test_a_number_of_41_digits_is_rejected(written) -> None:
    rows = open_source(Source(path=str(written(ASKED | {"id": 10**40 - 1}, ASKED | {"id": 10**40}))))
    sound, broken = (found for _, _, found in rows.kept_rows())
    assert isinstance(sound, Sample)
    assert isinstance(broken, BadSample)
    assert (broken.cause, broken.field) == ("huge_number", "id")


# Base64


def encoded(form: str = "PNG") -> str:
    """The base64 of a red image: long enough not to be a path, with padding, and with letters that URLs write otherwise."""
    for length in range(3):
        file, about = io.BytesIO(), PngInfo()
        about.add_text("c", "?~" * 40 + "x" * length)
        Image.new("RGB", (8, 8), (255, 0, 0)).save(
            file, form, **({"pnginfo": about} if form == "PNG" else {"comment": "?~" * 40 + "x" * length})
        )
        if len(file.getvalue()) % 3 == 1:
            break
    text = base64.b64encode(file.getvalue()).decode()
    assert text.endswith("==")
    assert "/" in text
    assert "+" in text
    return text


def lines(text: str, end: str) -> str:
    return end.join(text[n : n + 76] for n in range(0, len(text), 76)) + end


WAYS: dict[str, Callable[[str], Any]] = {
    "as it is": str,
    "line breaks": lambda text: lines(text, "\n"),
    "line breaks of Windows": lambda text: lines(text, "\r\n"),
    "spaces around": lambda text: f"  {text}\n",
    "spaces and tabs inside": lambda text: lines(text, " \t"),
    "without padding": lambda text: text.rstrip("="),
    "padding too long": lambda text: text.rstrip("=") + "====",
    "padding on its own line": lambda text: text.rstrip("=") + "\n" + "=" * (-len(text.rstrip("=")) % 4),
    "letters of URLs": lambda text: text.replace("+", "-").replace("/", "_"),
    "letters of URLs without padding": lambda text: text.replace("+", "-").replace("/", "_").rstrip("="),
}
URLS: dict[str, Callable[[str], str]] = {
    "as it is": lambda text: f"data:image/png;base64,{text}",
    "a space behind the comma": lambda text: f"data:image/png;base64, {text}",
    "a space before": lambda text: f" data:image/png;base64,{text}",
    "percent signs": lambda text: "data:image/png;base64," + text.replace("+", "%2B").replace("/", "%2F").replace("=", "%3D"),
    "another type": lambda text: f"data:image/x-png;charset=utf-8;base64,{text}",
}


@pytest.mark.parametrize("form", ["PNG", "JPEG"])
@pytest.mark.parametrize("way", WAYS)
def test_base64_is_read_as_programs_write_it(written, way: str, form: str) -> None:
    text = WAYS[way](encoded(form))
    rows = [{"image": image, "caption": "Red."} for image in (text, URLS["as it is"](text), {"bytes": text})]
    assert one(written(*rows)) == [["user: [red]Describe the image.", "assistant: «Red.»"]] * 3


@pytest.mark.parametrize("way", URLS)
def test_data_urls_are_read_as_programs_write_them(written, way: str) -> None:
    row = {"messages": chat([{"type": "image_url", "image_url": {"url": URLS[way](encoded())}}, {"type": "text", "text": "What?"}], "A.")}
    assert one(written(row)) == [A]


@pytest.mark.parametrize("way", ["line breaks", "letters of URLs without padding"])
def test_tables_hold_base64(tmp_path: Path, way: str) -> None:
    (tmp_path / "rows.tsv").write_text("image\tquestion\tanswer\n" + f'"{WAYS[way](encoded())}"\tWhat?\tA.\n')
    assert one(tmp_path / "rows.tsv") == [A]


def test_base64_that_is_cut_inside_a_letter_is_rejected(written) -> None:
    assert causes(written({"image": encoded()[:101], "caption": "c"})) == [("data_url", "image")]
    assert causes(written({"image": {"bytes": "not base64!"}, "caption": "c"})) == [("data_url", "image")]


# Numbers


NUMBERS = {"6": 6, "6.5": 6.5, "0": 0, "-3": -3, "6.0": 6.0, "12345678901234567890": 12345678901234567890}


@pytest.mark.parametrize("text", NUMBERS)
def test_a_number_is_the_text_that_json_has_for_it(written, text: str) -> None:
    number = NUMBERS[text]
    rows = [
        {"conversations": turns("How many?", number)},
        {"conversations": turns(number, number)},
    ]
    assert one(written(*rows)) == [["user: How many?", f"assistant: «{text}»"], [f"user: {text}", f"assistant: «{text}»"]]
    wanted = [["user: How many?", f"assistant: «{text}»"]]
    assert one(written({"messages": chat("How many?", number)})) == wanted
    assert one(written({"messages": chat("How many?", [{"type": "text", "text": number}])})) == wanted
    assert one(written({"question": "How many?", "answer": number})) == wanted
    assert one(written({"question": "How many?", "answers": [1, number, number]})) == wanted
    assert one(written({"prompt": "How many?", "completion": number})) == wanted
    assert one(written({"texts": [{"user": "How many?", "assistant": number}]})) == wanted
    assert one(written({"query": "How many?", "response": number, "history": [[1, 2]]})) == [["user: 1", "assistant: «2»", *wanted[0]]]
    assert one(written({"image": RED, "caption": number})) == [["user: [red]Describe the image.", f"assistant: «{text}»"]]


@pytest.mark.parametrize("value", [True, False])
def test_true_and_false_as_texts_are_rejected(written, value: bool) -> None:
    row = {"conversations": [*turns("a"), {"from": "gpt", "value": value}]}
    assert causes(written(row)) == [("wrong_type", "conversations[1].value")]
    assert causes(written({"question": "q", "answer": value})) == [("wrong_type", "answer")]
    assert causes(written({"messages": chat("q", value)})) == [("wrong_type", "messages[1].content")]


def test_a_missing_number_of_pandas_is_no_answer(tmp_path: Path) -> None:
    pq.write_table(arrow.table({"question": ["a", "b"], "answer": [6.5, float("nan")]}), tmp_path / "rows.parquet")
    rows = open_source(Source(path=str(tmp_path / "rows.parquet")))
    found = [bad for _, _, bad in rows.kept_rows()]
    assert "stands for a missing value" in str(found[1])


# No image


NONE = [None, "", "  ", [], [""], [None], "[]", {}, {"bytes": None, "path": None}, {"bytes": None, "path": ""}, {"url": ""}]


@pytest.mark.parametrize("none", NONE, ids=repr)
@pytest.mark.parametrize("column", ["image", "images", "video", "videos", "image_path"])
def test_an_empty_column_is_no_image(written, none: Any, column: str) -> None:
    rows = [
        {column: none, "conversations": turns("Say A.", "A.")},
        {column: none, "messages": chat("Say A.", "A.")},
    ]
    for row in rows:
        assert one(written(row)) == [["user: Say A.", "assistant: «A.»"]]
    assert one(written(rows[0] | {"image_paths": [RED], "conversations": turns("<image>What?", "A.")})) == [A]


def test_a_list_without_its_empty_items_must_fit_the_text(written) -> None:
    assert one(written({"images": ["", RED, None], "messages": chat("<image>What?", "A.")})) == [A]
    assert causes(written({"images": ["", RED], "messages": chat("<image><image>What?", "A.")})) == [("placeholder_count", "messages")]
    assert causes(written({"image": "", "conversations": turns("<image>What?", "A.")})) == [("placeholder_count", "conversations")]
    assert causes(written({"image": "", "caption": "A."})) == [("placeholder_count", "image")]


def test_a_missing_image_of_pandas_is_no_image(tmp_path: Path) -> None:
    table = arrow.table({"image": arrow.array([float("nan")]), "question": ["Say A."], "answer": ["A."]})
    pq.write_table(table, tmp_path / "rows.parquet")
    assert one(tmp_path / "rows.parquet") == [["user: Say A.", "assistant: «A.»"]]


# Placeholders that are text


PAGE = "# Title\n\n![Figure 3](<image>)\n\nEnd."


@pytest.mark.parametrize("column", ["messages", "conversations", "conversation"])
def test_placeholder_in_an_answer_is_text_if_questions_have_all(written, column: str) -> None:
    talk = turns("<image>\nParse.", PAGE) if column == "conversations" else chat("<image>\nParse.", PAGE)
    wanted = ["user: [red]Parse.", f"assistant: «{PAGE}»"]
    assert one(written({"images": [RED], column: talk})) == [wanted]


def test_placeholder_in_an_answer_is_text_without_images(written) -> None:
    assert one(written({"conversations": turns("How do I write one?", "As <image> or <video>.")})) == [
        ["user: How do I write one?", "assistant: «As <image> or <video>.»"]
    ]
    assert one(written({"images": [RED], "messages": chat("Parse.", "<image> and <image>")})) == [
        ["user: [red]Parse.", "assistant: «<image> and <image>»"]
    ]
    assert one(written({"messages": chat([{"type": "image", "image": RED}], [{"type": "text", "text": "<image>"}])})) == [
        ["user: [red]", "assistant: «<image>»"]
    ]
    assert one(written({"image": RED, "caption": "An <image>."})) == [["user: [red]Describe the image.", "assistant: «An <image>.»"]]


def test_image_placeholder_in_an_answer_is_rejected(written) -> None:
    assert causes(written({"image": RED, "conversations": turns("Draw.", "<image>")})) == [("image_in_answer", "conversations[1].value")]
    assert causes(written({"images": [RED, "blue.png"], "messages": chat("<image>?", "As <image>.")})) == [
        ("image_in_answer", "messages[1].content")
    ]
    [(_, _, bad)] = open_source(Source(path=str(written({"image": RED, "conversations": turns("Draw.", "<image>")})))).kept_rows()
    assert r"or write it as \<image> where it is text" in str(bad)


ESCAPED = [
    {"images": [RED], "messages": chat(r"<image>What does \<image> mean?", r"\<image> is a place.")},
    {"image": RED, "conversations": turns(r"<image>What does \<image> mean?", r"\<image> is a place.")},
    {"image": RED, "question": r"<image>What does \<image> mean?", "answer": r"\<image> is a place."},
    {
        "messages": chat(
            [{"type": "image", "image": RED}, {"type": "text", "text": r"What does \<image> mean?"}],
            [{"type": "text", "text": r"\<image> is a place."}],
        )
    },
    {"images": [RED], "texts": [{"user": r"<image>What does \<image> mean?", "assistant": r"\<image> is a place."}]},
]


@pytest.mark.parametrize("row", ESCAPED, ids=lambda row: " ".join(row))
def test_a_backslash_makes_a_placeholder_text(written, row: dict[str, Any]) -> None:
    assert one(written(row)) == [["user: [red]What does <image> mean?", "assistant: «<image> is a place.»"]]


def test_prepared_archives_keep_placeholders_that_are_text(written) -> None:
    sample = row_of(open_source(Source(path=str(written({"conversations": turns(r"a \<image> \\<video>", "<image>")})))))
    row = json.loads(json.dumps(packed_row(sample, [])))
    assert packed_sample(row, sample.id, Path()) == sample
    assert one(written({"messages": row["messages"]})) == [["user: a <image> \\<video>", "assistant: «<image>»"]]


# Rows that are lists, and turns in other words


HI = ["user: Hi", "assistant: «Ho»"]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.txt"])
@pytest.mark.parametrize("talk", [chat("Hi", "Ho"), turns("Hi", "Ho")], ids=["OpenAI", "LLaVA"])
def test_rows_that_are_lists_of_turns(tmp_path: Path, name: str, talk: list[Any]) -> None:
    (tmp_path / name).write_text("".join(json.dumps(talk) + "\n" for _ in range(3)))
    rows = open_source(Source(path=str(tmp_path / name)))
    assert rows.layout.why.startswith("JSON lines; row 0 has ")
    assert one(tmp_path / name) == [HI] * 3
    (tmp_path / name).write_text(json.dumps([talk] * 3, indent=1))
    assert open_source(Source(path=str(tmp_path / name))).layout.why.startswith("JSON list; row 0 has ")
    assert one(tmp_path / name) == [HI] * 3


def test_one_line_that_is_a_list_of_turns(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(chat("Hi", "Ho")))
    assert one(tmp_path / "rows.jsonl") == [HI]
    (tmp_path / "rows.jsonl").write_text(json.dumps([{"messages": chat("Hi", "Ho")}]) + "\n")  # a list of rows under a name of lines
    assert one(tmp_path / "rows.jsonl") == [HI]


def test_lists_in_lines_keep_their_rejects_apart(tmp_path: Path) -> None:
    rows = [chat("Hi", "Ho"), chat("Hi"), [], ["Hi"], chat("Hi", "Ho")]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n[torn\n")
    found = [
        bad.cause if isinstance(bad, Exception) else "" for _, _, bad in open_source(Source(path=str(tmp_path / "rows.jsonl"))).kept_rows()
    ]
    assert found == ["", "no_target", "wrong_type", "wrong_type", "", "not_json"]


def test_lists_in_lines_with_keys_and_speakers_of_other_names(tmp_path: Path) -> None:
    talk = [{"who": "me", "said": "Hi"}, {"who": "bot", "said": "Ho"}]
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(talk)}\n{json.dumps(talk)}\n")
    settings = {"columns": {"role": "who", "content": "said"}, "roles": {"user": "me", "assistant": "bot"}, "layout": "openai"}
    assert one(tmp_path / "rows.jsonl", **settings) == [HI, HI]


def mixed(who: str, what: str, user: str, assistant: str) -> list[dict[str, str]]:
    return [{who: user, what: "<image>What?"}, {who: assistant, what: "A."}]


@pytest.mark.parametrize("column", ["conversations", "messages", "conversation"])
@pytest.mark.parametrize("who", ["role", "from"])
@pytest.mark.parametrize("what", ["content", "value"])
@pytest.mark.parametrize("speakers", [("user", "assistant"), ("human", "gpt")])
def test_turns_in_any_mixture_of_words(written, column: str, who: str, what: str, speakers: tuple[str, str]) -> None:
    assert one(written({"image": RED, column: mixed(who, what, *speakers)})) == [A]


def test_turns_of_parquet_whose_other_keys_are_null(tmp_path: Path) -> None:
    draw(tmp_path / RED)
    talk = [{"from": None, "value": None, **turn} for turn in mixed("role", "content", "user", "assistant")]
    pq.write_table(arrow.Table.from_pylist([{"image": RED, "conversations": talk}]), tmp_path / "rows.parquet")
    assert one(tmp_path / "rows.parquet") == [A]


def test_messages_in_conversations_are_messages(written) -> None:
    """Images come before the first question where none has a place, parts are read, and reasoning and tools are rejected."""
    assert one(written({"image": RED, "conversations": chat("What?", "A.")})) == [A]
    parts = [{"type": "image"}, {"type": "text", "text": "What?"}]
    assert one(written({"image": RED, "conversations": chat(parts, "A.")})) == [A]
    assert causes(written({"conversations": [*chat("a"), {"role": "assistant", "content": "b", "reasoning": "c"}]})) == [
        ("unsupported", "conversations[1].reasoning")
    ]
    assert causes(written({"conversations": [*chat("a"), {"from": "gpt", "value": "b", "tool_calls": [{}]}]})) == [
        ("tool_turn", "conversations[1].tool_calls")
    ]


def test_speakers_of_other_names_in_a_mixture(written) -> None:
    row = {"image": RED, "conversations": mixed("role", "content", "visitor", "bot")}
    assert one(written(row), roles={"user": "visitor", "assistant": "bot"}) == [A]
    with pytest.raises(Refused, match="the speakers of its turns are visitor, bot"):
        open_source(Source(path=str(written(row)), roles={"user": "guest"}))
