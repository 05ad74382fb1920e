"""Questions with options show them and train the letter; what cannot be told is rejected; files of questions alone are refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eyeline.core.errors import Refused
from eyeline.data.sources.sources import Source, open_source
from tests.data.small_training import draw, one


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., Path]:
    draw(tmp_path / "red.png")

    def write(*rows: Any) -> Path:
        (tmp_path / "rows.json").write_text(json.dumps(rows))
        return tmp_path / "rows.json"

    return write


SHOWN = "Which?\nA. ape\nB. bee\nC. cow\nAnswer with the letter of the option."
LETTERS = {"A": "ape", "B": "bee", "C": "cow"}
WAYS: dict[str, tuple[dict[str, Any], Any]] = {
    "VLMEvalKit's columns": (LETTERS, "B"),
    "columns that are empty": ({**LETTERS, "D": None, "E": ""}, "B"),
    "options": ({"options": ["ape", "bee", "cow"]}, "B"),
    "a position, from 0": ({"choices": ["ape", "bee", "cow"]}, 1),
    "the text of an option": ({"choices": ["ape", "bee", "cow"]}, "bee"),
    "a letter in brackets": (LETTERS, "(B)"),
    "a small letter with a dot": (LETTERS, "b."),
    "a letter with its text": (LETTERS, "B. bee"),
    "options as JSON text": ({"options": '["ape", "bee", "cow"]'}, "B"),
    "options by letter": ({"options": LETTERS}, "B"),
    "texts and labels": ({"choices": {"text": ["ape", "bee", "cow"], "label": ["A", "B", "C"]}}, "B"),
    "labels that are numbers": ({"choices": {"text": ["ape", "bee", "cow"], "label": ["1", "2", "3"]}}, "2"),
    "option_a": ({"option_a": "ape", "option_b": "bee", "option_c": "cow"}, "b"),
    "optionA": ({"optionA": "ape", "optionB": "bee", "optionC": "cow"}, "B"),
    "choice1": ({"choice1": "ape", "choice2": "bee", "choice3": "cow"}, 2),
    "one answer in a list": ({"options": ["ape", "bee", "cow"]}, ["B", "B"]),
}


@pytest.mark.parametrize("name", WAYS)
def test_options_are_shown_and_the_letter_is_trained(written, name: str) -> None:
    options, answer = WAYS[name]
    row = {"image": "red.png", "question": "Which?", **options, ("answers" if isinstance(answer, list) else "answer"): answer}
    assert one(written(row)) == [[f"user: [red]{SHOWN}", "assistant: «B»"]]


def test_a_table_of_vlmevalkit(tmp_path: Path) -> None:
    draw(tmp_path / "red.png")
    head = "index\tquestion\thint\tA\tB\tC\tD\tanswer\tcategory\timage\n"
    rows = "0\tWhich?\tLook twice.\tape\tbee\tcow\t\tC\tx\tred.png\n1\tWhich?\t\tape\tbee\tcow\t\tB\tx\tred.png\n"
    (tmp_path / "rows.tsv").write_text(head + rows)
    assert one(tmp_path / "rows.tsv") == [
        [f"user: [red]Look twice.\n{SHOWN}", "assistant: «C»"],
        [f"user: [red]{SHOWN}", "assistant: «B»"],
    ]
    (tmp_path / "rows.tsv").write_text(head + rows.replace("B\tx\tred.png", "B\tx\t0"))
    rows_found = [str(found) for _, _, found in open_source(Source(path=str(tmp_path / "rows.tsv"))).kept_rows()]
    assert "0 is the index of another row" in rows_found[1]


def test_a_question_that_shows_its_options_is_left_as_it_is(written) -> None:
    question = "Which?\n(A) ape (B) bee"
    assert one(written({"question": question, "options": ["ape", "bee"], "answer": "A"})) == [[f"user: {question}", "assistant: «A»"]]


def test_places_of_images_in_options(written) -> None:
    row = {"image": "red.png", "question": "Which?", "A": "<image>", "B": "none", "answer": "A"}
    assert one(written(row)) == [["user: Which?\nA. [red]B. none\nAnswer with the letter of the option.", "assistant: «A»"]]


UNCLEAR: dict[str, tuple[dict[str, Any], str, str]] = {
    "a letter beyond": (LETTERS | {"answer": "D"}, "wrong_type", "answer"),
    "no option's text": (LETTERS | {"answer": "bees"}, "wrong_type", "answer"),
    "a number where letters are": (LETTERS | {"answer": 1}, "wrong_type", "answer"),
    "a position beyond": ({"choices": ["ape", "bee"], "answer": 2}, "wrong_type", "answer"),
    "a position or a text": ({"choices": ["3", "5", "1"], "answer": 1}, "wrong_type", "answer"),
    "a letter or a text": ({"choices": ["B", "A"], "answer": "B"}, "wrong_type", "answer"),
    "the text of two": ({"choices": ["ape", "ape"], "answer": "ape"}, "wrong_type", "answer"),
    "several answers": ({"choices": ["ape", "bee"], "answers": ["A", "B"]}, "wrong_type", "answers"),
    "true": (LETTERS | {"answer": True}, "wrong_type", "answer"),
    "no answer": (LETTERS | {"answer": None}, "no_target", "answer"),
    "one option": ({"choices": ["ape"], "answer": "A"}, "wrong_type", "choices"),
    "an option left out": ({"A": "ape", "C": "cow", "answer": "C"}, "wrong_type", "C"),
    "Python's list": ({"options": "['ape', 'bee']", "answer": "A"}, "not_json", "options"),
    "options that are text": ({"options": "ape or bee", "answer": "A"}, "wrong_type", "options"),
}


@pytest.mark.parametrize("name", UNCLEAR)
def test_ambiguous_rows_are_rejected(written, name: str) -> None:
    row, cause, field = UNCLEAR[name]
    good = {"question": "Which?", "answer": "x"}
    rows = open_source(Source(path=str(written(good, {"question": "Which?", **row}))))
    _, (_, _, bad) = rows.kept_rows()
    assert (bad.cause, bad.field) == (cause, field)


QUESTIONS: dict[str, tuple[list[dict[str, Any]], str]] = {
    "LLaVA-bench": ([{"question_id": 1, "image": "red.png", "text": "Describe it.", "category": "x"}], "next to a column question_id"),
    "POPE": ([{"question_id": 1, "image": "red.png", "text": "Is there a dog?", "label": "no"}], "next to a column question_id"),
    "questions by their look": ([{"image": "red.png", "text": "What is it?"}] * 2, "which is a question in each of the first rows"),
    "answers of LLaVA": (
        [{"question_id": 1, "prompt": "What?", "text": "A dog.", "image": "red.png"}],
        "next to a column question_id",
    ),
    "question alone": ([{"image": "red.png", "question": "What?"}], r"They ask \(question\), and no column of answers is known"),
    "query alone": ([{"image": "red.png", "query": "What?"}], r"They ask \(query\)"),
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_files_of_questions_alone_are_refused(written, name: str) -> None:
    rows, words = QUESTIONS[name]
    with pytest.raises(Refused, match=words):
        open_source(Source(path=str(written(*rows))))


def test_the_remedies_for_questions_alone_work(written) -> None:
    pope = {"question_id": 1, "image": "red.png", "text": "Is there a dog?", "label": "no"}
    assert one(written(pope), columns={"question": "text", "answer": "label"}) == [["user: [red]Is there a dog?", "assistant: «no»"]]
    odd = {"image": "red.png", "text": "Who sleeps?"}
    assert one(written(odd), columns={"caption": "text"}) == [["user: [red]Describe the image.", "assistant: «Who sleeps?»"]]
    assert one(written(odd), layout="captions") == [["user: [red]Describe the image.", "assistant: «Who sleeps?»"]]
    assert one(written(odd, {"image": "red.png", "text": "A cat."})) == [
        ["user: [red]Describe the image.", "assistant: «Who sleeps?»"],
        ["user: [red]Describe the image.", "assistant: «A cat.»"],
    ]
