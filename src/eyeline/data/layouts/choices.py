"""Questions with options: how they are asked, and which letter is the answer.

    {hint}
    {question}
    A. {first option}
    B. {second option}
    Answer with the letter of the option.

The letter is trained. What cannot be told for certain is a reject.
"""

import re
from string import ascii_lowercase, ascii_uppercase
from typing import Any, NamedTuple

from eyeline.core.errors import BadSample
from eyeline.data.layouts.media import as_text, describe_value, parse_list

LISTS = ("options", "choices")  # columns of all options of a question
REQUEST = "Answer with the letter of the option."
_TEN = (tuple(ascii_uppercase[:10]), tuple(ascii_lowercase[:10]), tuple(map(str, range(1, 11))))
FAMILIES = (  # columns of an option each, in order: VLMEvalKit's A, B, ..., and others; with what an answer may call each
    (tuple(ascii_uppercase), tuple(ascii_uppercase)),
    *((tuple(f"{stem}{gap}{x}" for x in ten), ten) for stem in ("option", "choice") for gap in ("_", "") for ten in _TEN),
    (("opa", "opb", "opc", "opd"), tuple(ascii_uppercase[:4])),
)
OPTION_COLUMNS = (*LISTS, *(name for names, _ in FAMILIES for name in names))


class Options(NamedTuple):
    """The options of a question."""

    texts: tuple[str, ...]
    labels: tuple[str, ...]  # what the data call them
    column: str
    counted: bool  # whether a number is the position of an option, from 0


def options_of(row: dict[str, Any]) -> Options | None:
    """The options that a row has, in a column of all or in a column each. None without any."""
    for column in LISTS:
        value = parse_list(row.get(column), column)
        if value in (None, "", [], {}):
            continue
        labels: list[str] | None = None
        if isinstance(value, dict):  # {A: first, B: second}
            found = {str(label): text for label, text in value.items() if text not in (None, "")}
            labels, value = list(found), list(found.values())
        elif isinstance(value, list) and all(isinstance(item, dict) and item.keys() == {"text", "label"} for item in value):
            labels, value = [str(item["label"]) for item in value], [item["text"] for item in value]
        if not isinstance(value, list):
            raise BadSample("wrong_type", column, f"wanted a list of options, got {describe_value(value)}. Write it as a list in JSON")
        return _options(value, labels, column)
    for names, called in FAMILIES:
        there = [n for n, name in enumerate(names) if _has_value(row.get(name))]
        if len(there) < 2:
            continue
        if there != list(range(len(there))):
            raise BadSample(
                "wrong_type", names[there[-1]], f"an option, and the one before it, {names[there.index(there[-1])]}, is empty. Fill it"
            )
        return _options([row[names[n]] for n in there], list(called[: len(there)]), names[0])
    return None


def _has_value(value: Any) -> bool:
    return value is not None and value == value and not (isinstance(value, str) and not value.strip())  # NaN: what pandas has for none


def _options(values: list[Any], labels: list[str] | None, column: str) -> Options:
    texts = [as_text(value, column) for value in values]
    if not all(isinstance(text, str) and text.strip() for text in texts):
        raise BadSample("wrong_type", column, f"wanted texts as options, got {describe_value(values)}")
    if not 2 <= len(texts) <= len(ascii_uppercase):
        raise BadSample("wrong_type", column, f"{len(texts)} options, wanted 2 to {len(ascii_uppercase)}, a letter each")
    return Options(tuple(text.strip() for text in texts), tuple(labels or ascii_uppercase[: len(texts)]), column, labels is None)


def question_with_options(question: str, hint: Any, options: Options) -> str:
    """The question with its hint and its options; as it is where it shows them already."""
    if all(text in question for text in options.texts) and re.search(r"(^|[\s(])A[).:]", question):
        return question
    lines = [f"{letter}. {text}" for letter, text in zip(ascii_uppercase, options.texts, strict=False)]
    above = [hint.strip()] if isinstance(hint, str) and hint.strip() else []
    return "\n".join([*above, question, *lines, REQUEST])


def letter_of(answer: Any, options: Options, column: str) -> str:
    """The letter of the option that an answer means: by its letter, its text, or its position."""
    found = set[int]()
    text = as_text(answer, column)
    if not isinstance(text, str):
        raise BadSample("wrong_type", column, f"wanted a letter or the text of an option, got {describe_value(answer)}")
    text = text.strip()
    if isinstance(answer, int) and options.counted and 0 <= answer < len(options.texts):
        found.add(answer)
    labels = [label.upper() for label in options.labels]
    if (label := text.strip("()[].: ").upper()) in labels:
        found.add(labels.index(label))
    both = re.fullmatch(r"\(?(\w)[).:]\s*(.+)", text, re.DOTALL)
    if both and both[1].upper() in labels and options.texts[labels.index(both[1].upper())] == both[2].strip():
        found.add(labels.index(both[1].upper()))
    found |= {n for n, option in enumerate(options.texts) if option == text}
    if len(found) == 1:
        return ascii_uppercase[found.pop()]
    known = ", ".join(f"{label} ({option[:20]})" for label, option in zip(options.labels, options.texts, strict=True))
    what = "means several of the options" if found else "is none of the options"
    number = " (a number counts from 0)" if options.counted and isinstance(answer, int) else ""
    why = f"{text[:40]!r} {what}{number}: {known[:200]}. Write the letter of the one that is right"
    raise BadSample("wrong_type", column, why)
