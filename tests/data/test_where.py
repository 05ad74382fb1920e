"""The expressions of `where:`, against the same ones in Python, row by row; and what is refused."""

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyeline.data.signals.columns import COLUMNS
from eyeline.data.signals.where import LONGEST, where_of

NAN = float("nan")
ROWS: list[dict[str, Any]] = [
    {"width": 640.0, "height": 480.0, "images": 1.0, "tokens": 12.0, "script": "latin", "duplicate": "", "answer_in_question": True},
    {"width": 100.0, "height": 480.0, "images": 2.0, "tokens": 90.0, "script": "cjk", "duplicate": "a#1", "answer_in_question": False},
    {"width": NAN, "height": NAN, "images": 0.0, "tokens": 5.0, "script": "", "duplicate": "", "answer_in_question": False},
    {"width": 224.0, "height": 224.0, "images": 1.0, "tokens": 0.0, "script": "ελ", "duplicate": "b", "answer_in_question": True},
]
TABLE = {name: np.array([row[name].encode() if isinstance(row[name], str) else row[name] for row in ROWS]) for name in ROWS[0]}


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("width >= 224 and not duplicate", [0]),
        ("width >= 224 or images == 0", [0, 2, 3]),
        ("width < 224", [1]),  # a row without a width is in no comparison
        ("width != 224", [0, 1]),
        ("not width < 224", [0, 2, 3]),
        ("script in ['latin', 'cjk']", [0, 1]),
        ("script not in ('latin', 'ελ')", [1, 2]),
        ("width in [100, 224]", [1, 3]),
        ("width not in [100]", [0, 3]),
        ("script", [0, 1, 3]),
        ("answer_in_question", [0, 3]),
        ("answer_in_question == False", [1, 2]),
        ("100 < width <= 640", [0, 3]),
        ("width * height / 1000 > 50 and tokens % 4 == 0", [0, 3]),
        ("1000 / tokens > 200", [3]),  # infinite
        ("0 / tokens == 0", [0, 1, 2]),  # not a number
        ("-width < -200", [0, 3]),
        ("True", [0, 1, 2, 3]),
        ("  duplicate == 'b'  ", [3]),
    ],
)
def test_rows_by_hand(text: str, wanted: list[int]) -> None:
    assert np.flatnonzero(where_of(text).mask(TABLE)).tolist() == wanted


NUMBERS = st.recursive(
    st.sampled_from(["height", "images", "tokens", "3", "0.5", "12"]),
    lambda inner: st.tuples(inner, st.sampled_from("+-*"), inner).map(lambda t: f"({' '.join(t)})"),
    max_leaves=4,
)
CONDITIONS = st.recursive(
    st.tuples(NUMBERS, st.sampled_from(["<", "<=", ">", ">=", "==", "!="]), NUMBERS).map(" ".join)
    | st.sampled_from(["duplicate", "answer_in_question", "script == 'cjk'", "script in ['latin', '']", "images not in [1, 2]"]),
    lambda inner: (
        inner.map(lambda t: f"not ({t})") | st.tuples(inner, st.sampled_from(["and", "or"]), inner).map(lambda t: f"({' '.join(t)})")
    ),
    max_leaves=8,
)


@given(CONDITIONS)
def test_as_python_has_it(text: str) -> None:
    there = [n for n, row in enumerate(ROWS) if row["images"]]  # a row without a value has rules of its own
    mask = where_of(text).mask(TABLE)
    assert [bool(mask[n]) for n in there] == [bool(eval(text, {}, ROWS[n])) for n in there]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("__import__('os').system('true')", "not accepted"),
        ("duplicate.__class__ == 'x'", "not accepted"),
        ("width[0] > 1", "not accepted"),
        ("(lambda: 1)() > 0", "not accepted"),
        ("[w for w in [1]] == 1", "not accepted"),
        ("width ** 9999 > 1", "not accepted"),
        ("width if images else 0", "not accepted"),
        ("(w := 1) > 0", "not accepted"),
        ("f'{width}' == '1'", "not accepted"),
        ("width is not None", "not accepted"),
        ("width == None", "not accepted"),
        ("width", "is a number.*Compare it: width > 0"),
        ("width and not duplicate", "'width' is a number, where something true or false is wanted. Compare it: width > 0"),
        ("duplicate > 3", "texts are compared with == and !="),
        ("duplicate == 3", "'duplicate' is a text, and '3' is not"),
        ("width == 'large'", "'width' is a number, and \"'large'\" is not"),
        ("script + 'x' == 'y'", "'script' is a text, where a number is wanted"),
        ("script < 'x'", "texts are compared with == and !="),
        ("width in duplicate", "not a list of values. Write them in brackets"),
        ("width in [height]", "something else than numbers and texts"),
        ("width in ['a']", "'width' is a number"),
        ("widht > 3", r"no column 'widht'\. Did you mean 'width'\? Columns: images, width, height"),
        ("clip_score > 0.3", "Did you mean 'similarity'"),
        ("width >", "wanted an expression such as width >= 224"),
        ("", "wanted an expression such as width >= 224"),
        ("width > 1; height", "wanted an expression such as width >= 224"),
        ("(" * 300 + "1" + ")" * 300 + " > 0", "wanted an expression|nested"),
        ("not " * 100 + "duplicate", "nested over 40 levels"),
        ("width > 1" + "0" * 400, "too large"),
        ("width > 1" + " " * LONGEST, f"over {LONGEST:,}"),
    ],
)
def test_anything_else_is_refused_with_the_reason(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        where_of(text)


def test_every_column_can_be_chosen_by() -> None:
    for name, column in COLUMNS.items():
        text = f"{name} > 0" if column.kind == "number" else name
        assert where_of(text).text == text
    assert not re.findall(r"[^a-z_]", "".join(COLUMNS))
