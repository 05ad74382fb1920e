"""Rows of every kind, usable and not, and sources of them for hypothesis."""

import json
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from tests.data.llava_rows import row


def text(n: int) -> dict[str, Any]:
    return row(f"text {n}", answer="a b c d e " * (n % 4 + 1))


ANY: dict[str, Callable[[int], Any]] = {
    "text": text,
    "image": lambda n: row(f"question {n}?", f"{n % 4}.png"),
    "same image": lambda n: row(f"again {n}?", "0.png"),
    "two images": lambda n: row("compare", f"{n % 3}.png", f"{n % 2}.png"),
    "missing": lambda n: row("gone", "absent.png"),
    "no answer": lambda n: row("q", answer=" "),
    "too long": lambda n: row("q", answer="x" * 400),
    "no row": lambda n: "{torn",
}


UNUSABLE = {"missing", "no answer", "too long", "no row"}


one_source = st.fixed_dictionaries(
    {
        "rows": st.lists(st.tuples(st.sampled_from(sorted(ANY)), st.sampled_from("ab")), min_size=1, max_size=25),
        "repeat": st.integers(1, 3),
        "limit": st.one_of(st.none(), st.integers(1, 30)),
        "categories": st.sampled_from([None, None, ("a",)]),
    }
)


def line_of(n: int, what: str, kind: str) -> str:
    made = ANY[what](n)
    return made if isinstance(made, str) else json.dumps(made | {"kind": kind})
