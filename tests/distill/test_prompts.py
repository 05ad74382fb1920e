"""Prompts: templates in a sandbox, with the question's images where they were."""

from pathlib import Path

import pytest

from eyeline.core.batch import EncodedImage, Message, Sample, Text
from eyeline.core.errors import BadSample, Refused
from eyeline.distill.prompts import SHIPPED, Prompt, asked, prompt_named, question_text, with_question

RED, BLUE = EncodedImage("red.png", b"red"), EncodedImage("blue.png", b"blue")
SAMPLE = Sample("s", (Message("user", (Text("Is "), RED, Text("like "), BLUE, Text("?"))), Message("assistant", (Text("no"),))), "compare")


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_prompt_asks_the_question_with_its_images_in_place(name: str) -> None:
    form = asked(prompt_named(name), SAMPLE)
    parts = form.messages[-1].parts
    assert [part for part in parts if isinstance(part, EncodedImage)] == [RED, BLUE]
    assert parts[:2] == (Text("Is "), RED) and isinstance(parts[-1], Text)
    assert f"\n{form.marker} <final answer>" in parts[-1].text
    assert "no" not in parts[-1].text.split()  # the true answer is not given away
    assert form.rewrites_question == (name == "question-rewriting")
    assert "Is " not in form.instructions and "final answer" in form.instructions


def test_a_prompt_may_set_a_system_message_and_a_marker() -> None:
    text = '{% set system = "Be brief." %}{% set marker = "So:" %}{{ kind }}, {{ images }}, {{ answer }}: {{ question }}'
    form = asked(Prompt("own", text), SAMPLE)
    assert form.messages[0] == Message("system", (Text("Be brief."),))
    assert form.marker == "So:"
    assert form.messages[1].parts[0] == Text("compare, 2, no: Is ")


def test_images_come_first_where_a_prompt_leaves_no_place() -> None:
    form = asked(Prompt("own", "What is shown?"), SAMPLE)
    assert form.messages[-1].parts == (RED, BLUE, Text("What is shown?"))
    with pytest.raises(BadSample, match="has places for 1 images or videos, and the question has 2"):
        asked(Prompt("own", "<image> What is shown?"), SAMPLE)


def test_text_that_looks_like_a_place_stays_text() -> None:
    sample = Sample("s", (Message("user", (RED, Text("what does <image> mean?"))), Message("assistant", (Text("x"),))))
    assert question_text(sample) == "<image>\nwhat does \\<image> mean?"
    assert asked(Prompt("own", "{{ question }}"), sample).messages[-1].parts == (RED, Text("what does <image> mean?"))


def test_earlier_turns_are_asked_as_they_are() -> None:
    earlier = (Message("user", (Text("hello"),)), Message("assistant", (Text("hi"),)))
    sample = Sample("s", (*earlier, *SAMPLE.messages))
    assert asked(prompt_named("self-check"), sample).messages[:2] == earlier


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{{ question", "line 1: unexpected end of template"),
        ("{{ qestion }}", "'qestion' is undefined"),
        ("{{ question.__class__.__mro__ }}", "SecurityError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
    ],
    ids=["syntax", "name", "sandbox", "error"],
)
def test_a_template_that_fails_is_refused_with_its_name(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "mine.jinja"
    path.write_text(text)
    with pytest.raises(Refused, match=rf"the prompt .*mine.*{said}"):
        asked(prompt_named(str(path)), SAMPLE)


def test_a_file_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"none.jinja does not exist, and a recipe names it"):
        prompt_named(str(tmp_path / "none.jinja"))


def test_a_question_is_replaced_after_its_images() -> None:
    assert with_question(SAMPLE, "Same?").messages[0].parts == (RED, BLUE, Text("Same?"))
