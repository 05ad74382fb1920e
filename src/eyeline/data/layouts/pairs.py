"""Questions with answers, and captions: a function `row -> Sample` for each layout of them. BadSample says what cannot be used."""

from collections import Counter
from typing import Any

from eyeline.core.batch import Message, Role, Sample, Text
from eyeline.core.errors import BadSample
from eyeline.core.locations import Location
from eyeline.data.layouts.choices import letter_of, options_of, question_with_options
from eyeline.data.layouts.conversations import (
    Turn,
    checked_object,
    checked_objects,
    named_kind,
    sample_in_turns,
    sample_of_conversation,
    sample_of_messages,
    sample_of_turns,
    text_of,
)
from eyeline.data.layouts.marks import supervised_turns
from eyeline.data.layouts.media import as_text, clean, describe_value, image_of, images_of, parse_list, without_escapes

ANSWERS = ("answer", "multiple_choice_answer", "answers")  # columns of answers: the first of these that a row has is used
CAPTIONS = ("caption", "captions", "text")  # of captions
CAPTION_PROMPT = "Describe the image."  # what they are answers to


def cauldron_sample(row: Any, id: str, root: Location) -> Sample:
    """The Cauldron and FineVision: {images: images, texts: [{user, assistant}]}; images come before the first question."""
    return sample_of_turns(row, id, root, _exchanges(checked_objects(row, "texts"), ("user", "assistant"), "texts"), "texts")


def _exchanges(items: list[dict[str, Any]], keys: tuple[str, str], column: str) -> list[Turn]:
    """The turns of a list of questions with their answers, under these keys."""
    turns: list[Turn] = []
    for n, item in enumerate(items):
        at = f"{column}[{n}]"
        turns.append(Turn("user", text_of(item, keys[0], at), f"{at}.{keys[0]}"))
        turns.append(Turn("assistant", text_of(item, keys[1], at), f"{at}.{keys[1]}", item))  # a mark is of the answer
    return turns


def prompt_completion_sample(row: Any, id: str, root: Location) -> Sample:
    """TRL: {prompt, completion}, both text or both lists of OpenAI's messages."""
    columns = ("prompt", "completion")
    if all(_lists_objects(checked_object(row).get(column)) for column in columns):
        turns = [(column, n, turn) for column in columns for n, turn in enumerate(checked_objects(row, column))]
        return sample_of_messages(row, id, root, turns)
    return sample_of_turns(row, id, root, _exchange(row, *columns), "prompt")


def _lists_objects(value: Any) -> bool:
    return isinstance(value, list) or (isinstance(value, str) and value.startswith(("[{", "[ {")))


def exchanges_sample(row: Any, id: str, root: Location) -> Sample:
    """ms-swift's ShareGPT: {conversation: [{human, assistant}]}, an exchange an item; or turns as LLaVA or OpenAI have them."""
    items = checked_objects(row, "conversation")
    if any(key in item for item in items for key in ("role", "from")):
        return sample_of_conversation(row, id, root, items, "conversation")
    return sample_of_turns(row, id, root, _exchanges(items, ("human", "assistant"), "conversation"), "conversation")


def alpaca_sample(row: Any, id: str, root: Location) -> Sample:
    """Alpaca: {instruction, input, output, history: [[question, answer]], system}; an input is asked below its instruction."""
    turns = [*_history(checked_object(row)), *_exchange(row, "instruction", "output")]
    if row.get("input"):
        asked = turns[-2]
        turns[-2] = asked._replace(text=f"{asked.text}\n{text_of(row, 'input', 'row')}")
    return sample_of_turns(row, id, root, turns, "instruction")


def query_response_sample(row: Any, id: str, root: Location) -> Sample:
    """ms-swift: {query, response, history: [[question, answer]], system}."""
    return sample_of_turns(row, id, root, [*_history(checked_object(row)), *_exchange(row, "query", "response")], "query")


def _exchange(row: dict[str, Any], asked: str, answer: str) -> list[Turn]:
    return [Turn("user", text_of(row, asked, "row"), f"row.{asked}"), Turn("assistant", text_of(row, answer, "row"), f"row.{answer}")]


def _history(row: dict[str, Any]) -> list[Turn]:
    """The turns before: pairs of a question and its answer."""
    pairs = parse_list(row.get("history") or [], "history")
    if isinstance(pairs, list):
        pairs = [[as_text(text, "history") for text in pair] if isinstance(pair, list) else pair for pair in pairs]
    if not isinstance(pairs, list) or not all(isinstance(p, list) and len(p) == 2 and all(isinstance(t, str) for t in p) for p in pairs):
        raise BadSample("wrong_type", "history", f"wanted a list of [question, answer], got {describe_value(pairs)}")
    roles: tuple[Role, Role] = ("user", "assistant")
    return [
        Turn(role, clean(text, f"history[{n}]"), f"history[{n}]") for n, p in enumerate(pairs) for role, text in zip(roles, p, strict=True)
    ]


def question_answer_sample(row: Any, id: str, root: Location) -> Sample:
    """Visual questions: {question, answer}. Of a list of answers, which items {answer} may be, too, the most frequent is supervised; of
    equals the first. Of a question with options (A, B, ... or a list) that is the letter of the right one."""
    options = options_of(checked_object(row))
    column = next((c for c in ANSWERS if row.get(c) is not None), ANSWERS[0])
    answer = row.get(column) if column == "answer" else parse_list(row.get(column), column)
    if isinstance(answer, list):
        given = [item.get("answer") if isinstance(item, dict) else item for item in answer]
        texts = [as_text(item, column) for item in given]
        if not given:
            raise BadSample("no_target", column, "the list of answers is empty")
        if not all(isinstance(text, str) for text in texts):
            raise BadSample("wrong_type", column, f"wanted a list of texts, got {describe_value(answer)}")
        if options and len(set(texts)) > 1:
            raise BadSample(
                "wrong_type", column, f"several answers to a question with options, {describe_value(answer)}. Keep the one that is right"
            )
        answer = given[texts.index(Counter(texts).most_common(1)[0][0])]
    if answer is None:
        raise BadSample("no_target", column, "there is no answer")
    question = text_of(row, "question", "row")
    if options is not None:
        _refuse_numbers_of_rows(row)
        question, answer = question_with_options(question, row.get("hint"), options), letter_of(answer, options, column)
    answer = as_text(answer, column)
    if not isinstance(answer, str):
        raise BadSample("wrong_type", column, f"wanted text, got {describe_value(answer)}")
    turns = [Turn("user", question, "row.question"), Turn("assistant", clean(answer, column), column)]
    return sample_of_turns(row, id, root, turns, "question")


def _refuse_numbers_of_rows(row: dict[str, Any]) -> None:
    """BadSample for a table of VLMEvalKit's whose image is the index of another row, which has it."""
    image = row.get("image")
    if isinstance(image, str) and image.strip().isdigit() and row.get("index") is not None:
        why = (
            f"{image.strip()} is the index of another row, and images of other rows are not looked up. Write the image of that row "
            f"into this one"
        )
        raise BadSample("missing_image", "image", why)


def caption_sample(row: Any, id: str, root: Location) -> Sample:
    """An image (or several) and a caption (of a list, the first): nothing is asked but CAPTION_PROMPT."""
    images = images_of(checked_object(row), root)
    if not images:
        raise BadSample("placeholder_count", "image", "a caption without an image")
    column = next((c for c in CAPTIONS if row.get(c) is not None), CAPTIONS[0])
    caption = parse_list(row.get(column), column) if column == "captions" else row.get(column)
    if caption is None:
        raise BadSample("no_target", column, "there is no caption")
    caption = without_escapes(text_of({column: caption[0] if isinstance(caption, list) and caption else caption}, column, "row"))
    supervised_turns(row, [("assistant", f"row.{column}", None)])
    return sample_in_turns(
        id, [Message("user", (*images, Text(CAPTION_PROMPT))), Message("assistant", (Text(caption.strip()),))], named_kind(row)
    )


# easy-VQA

_SHAPES = {"circle", "rectangle", "triangle"}


def easy_vqa_sample(row: Any, id: str, root: Location) -> Sample:
    """easy-VQA: [question, answer, number of the image], the image at images/NUMBER.png."""
    match row:
        case [str(question), str(answer), int(number)] if not isinstance(number, bool):
            image = image_of(f"images/{number}.png", root, "image")
            asked = Message("user", (image, Text(clean(question, "question"))))
            return sample_in_turns(id, [asked, Message("assistant", (Text(clean(answer, "answer")),))], vqa_kind(row))
        case _:
            raise BadSample("wrong_type", "row", f"wanted [question, answer, number of the image], got {describe_value(row)}")


def vqa_kind(row: Any) -> str:
    """yes/no, shape or color: what easy-VQA's 13 answers are."""
    answer = row[1] if isinstance(row, list) and len(row) == 3 else ""
    return "yes/no" if answer in ("yes", "no") else "shape" if answer in _SHAPES else "color"
