"""What an answer says, and what it is rejected for: cases by hand."""

import pytest

from eyeline.distill.settings import Accept, Filters
from eyeline.distill.teacher import Said
from eyeline.distill.verdicts import CAUSES, Parsed, agree, flaw, letter_in, majority, number_in, parsed, verdicts

GOOD = "I count the shapes in the image one by one: a red disc, a blue disc and a green one."
QUESTION = "How many discs are there?"
TOLD = "Think step by step, and say what you see in the image that matters for the question."


@pytest.mark.parametrize(
    ("text", "rationale", "answer"),
    [
        ("Because.\nAnswer: 3", "Because.", "3"),
        ("Because.\n**Answer:** three\n", "Because.", "three"),
        ("Because.\n**Answer: red**", "Because.", "red"),
        ("Answer: 2? No.\nAnswer: `3`", "Answer: 2? No.", "3"),
        ("<think>\nit is 3\n</think>\n\nAnswer: 3", "it is 3", "3"),
        ("it is 3\n</think>\nSo.\nanswer: \\boxed{3}.", "it is 3\n\nSo.", "3"),
        ("Because it is so.", "Because it is so.", None),
        ("Because.\nAnswer:", "Because.", None),
    ],
)
def test_the_final_answer_follows_the_last_marker(text: str, rationale: str, answer: str | None) -> None:
    assert parsed(Said(text, "stop"), "Answer:") == Parsed(rationale, answer)


def test_reasoning_that_a_server_keeps_apart_comes_first() -> None:
    assert parsed(Said("So.\nAnswer: 3", "stop", "I count."), "Answer:") == Parsed("I count.\n\nSo.", "3")


def test_another_wording_of_the_question_is_taken_out() -> None:
    text = "**Question:** What is the number of discs?\nThere are three.\nAnswer: 3"
    assert parsed(Said(text, "stop"), "Answer:", rewrites_question=True) == Parsed("There are three.", "3", "What is the number of discs?")


@pytest.mark.parametrize(
    ("cause", "said", "filters"),
    [
        ("cut", Said(f"{GOOD}\nAnswer: 3", "length"), {}),
        ("filtered", Said("", "filtered"), {}),
        ("request_refused", Said("", "failed"), {}),
        ("broken_image", Said("", "failed", cause="broken_image"), {}),
        ("refusal", Said("I'm sorry, but I cannot help with that.\nAnswer: none", "stop"), {}),
        ("no_answer", Said(GOOD, "stop"), {}),
        ("other_script", Said("我看到图像中有三个圆盘，一个红色，一个蓝色，一个绿色。\nAnswer: 3", "stop"), {"min_words": 0}),
        ("leak", Said(f"{GOOD} I say what you see in the image that matters for the question.\nAnswer: 3", "stop"), {}),
        ("leak", Said(f"{GOOD} That agrees with the provided answer.\nAnswer: 3", "stop"), {}),
        ("too_short", Said("Three.\nAnswer: 3", "stop"), {}),
        ("too_long", Said(f"{GOOD}\nAnswer: 3", "stop"), {"max_words": 10}),
        ("repetition", Said("a red disc is here and " * 20 + "\nAnswer: 3", "stop"), {}),
        ("image_not_mentioned", Said("Three is the number that there are of them.\nAnswer: 3", "stop"), {"mentions_image": True}),
        (None, Said("Three is the number that there are of them.\nAnswer: 3", "stop"), {}),
        (None, Said(f"{GOOD}\nAnswer: 3", "stop"), {"mentions_image": True}),
        (None, Said("Je vois trois disques dans cette image.\nAnswer: 3", "stop"), {}),  # same script
    ],
)
def test_each_cause_is_found(cause: str | None, said: Said, filters: dict) -> None:
    assert flaw(said, parsed(said, "Answer:"), Filters(**filters), QUESTION, TOLD, 1, False) == cause
    assert cause is None or cause in CAUSES or cause == said.cause


@pytest.mark.parametrize("name", ["refusals", "leaks", "same_script"])
def test_a_filter_that_is_off_rejects_nothing(name: str) -> None:
    texts = {
        "refusals": "I'm sorry, but I cannot help with that, it is so.",
        "leaks": "This agrees with the provided answer, as I can see.",
        "same_script": "我 看 到 图 像 中 有 三 个 圆 盘",
    }
    said = Said(f"{texts[name]}\nAnswer: 3", "stop")
    cause, off = (flaw(said, parsed(said, "Answer:"), Filters(**{name: on}), QUESTION, TOLD, 1, False) for on in (True, False))
    assert cause is not None and off is None


def test_a_rewritten_question_is_missed() -> None:
    said = Said(f"{GOOD}\nAnswer: 3", "stop")
    assert flaw(said, parsed(said, "Answer:", True), Filters(), QUESTION, TOLD, 1, True) == "no_question"


@pytest.mark.parametrize(
    ("compare", "one", "other", "same"),
    [
        ("exact", "Red", "red", False),
        ("normalised", " Red. ", "red", True),
        ("normalised", "dark red", "red", False),
        ("number", "three", "3", True),
        ("number", "about 1,234.0 metres", "1234", True),
        ("number", "50%", "0.5", True),
        ("number", "between 2 and 3", "3", False),
        ("number", "−4", "-4", True),
        ("choice", "(b)", "B", True),
        ("choice", "B. a cat", "b", True),
        ("choice", "The answer is C", "C", True),
        ("choice", "a cat", "A", False),
        ("choice", "D", "A", False),
    ],
)
def test_answers_are_compared(compare: str, one: str, other: str, same: bool) -> None:
    assert agree(one, other, Accept(compare=compare)) is same  # type: ignore[arg-type]


def test_numbers_agree_within_the_tolerance() -> None:
    near = Accept(compare="number", tolerance=0.05)
    assert agree("104", "100", near) and not agree("106", "100", near)


def test_numbers_and_letters_are_found_where_there_is_one() -> None:
    assert (number_in("no digits"), number_in("two or three"), number_in("seven")) == (None, None, 7.0)
    assert (letter_in("Apples"), letter_in("")) == (None, None)


def test_a_majority_is_more_than_its_share() -> None:
    by = Accept(by="majority")
    assert majority(["3", "3.", "4"], by) == "3"
    assert majority(["3", "3", "4", "4"], by) is None
    assert majority(["3", "4", "5"], Accept(by="majority", min_share=0.3)) == "3"
    assert majority([], by) is None


def test_the_first_accepted_answers_are_kept() -> None:
    found = [Parsed("why not", "4"), Parsed("so", "3"), Parsed("so", "3"), Parsed("thus", "three"), Parsed("hence", "3")]
    flaws = [None, None, None, None, "cut"]
    truth = Accept(compare="number")
    assert verdicts(flaws, found, "3", truth, 2) == ["wrong", None, "duplicate", None, "cut"]
    assert verdicts(flaws, found, "3", truth, 1) == ["wrong", None, "duplicate", "surplus", "cut"]
    by_vote = Accept(by="majority", compare="number")
    assert verdicts(flaws, found, "9", by_vote, 1) == ["minority", None, "duplicate", "surplus", "cut"]
    assert verdicts([None], [Parsed("x", "4")], "3", Accept(by="any"), 1) == [None]
