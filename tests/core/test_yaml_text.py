"""YAML for settings: one meaning per plain word, and text that other readers take for something else is quoted when written."""

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from eyeline.core.errors import Refused
from eyeline.core.yaml_text import read_yaml, write_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8", 8),
        ("-3", -3),
        ("10_000", 10_000),
        ("1e-3", 0.001),  # text in YAML 1.1
        ("1.0e-5", 0.00001),
        (".5", 0.5),
        ("true", True),
        ("False", False),
        ("null", None),
        ("[1, 2.5, x]", [1, 2.5, "x"]),
        # each of these is another value in YAML 1.1, and here the text that it is
        ("010", "010"),
        ("0o10", "0o10"),
        ("0x1F", "0x1F"),
        ("0b11", "0b11"),
        ("1:30", "1:30"),
        ("1_0", "1_0"),
        ("yes", "yes"),
        ("Off", "Off"),
        ("2026-01-31", "2026-01-31"),
        ("=", "="),
    ],
)
def test_a_plain_word_has_one_meaning(text: str, value: object) -> None:
    read = read_yaml(f"a: {text}", "a recipe")["a"]
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: 1\nb:\n", "a recipe, line 2: b has no value. Give it one, write null for none, or remove it"),
        ("a: [1, {b: }]", "a recipe, line 1: b has no value"),
        ("a:\n- 1\n-\n", "a recipe, line 3: an item of a list has no value"),
        ("a: ~\n", "a recipe, line 1: a is ~. Write null for none, or ~/ for the home folder"),
    ],
)
def test_a_missing_value_is_not_null(text: str, words: str) -> None:
    with pytest.raises(Refused) as refused:
        read_yaml(text, "a recipe")
    assert words in str(refused.value)


def test_an_empty_text_in_quotes_is_a_value() -> None:
    assert read_yaml('a: ""\nb: "~"', "a recipe") == {"a": "", "b": "~"}


def test_no_message_names_what_yaml_calls_a_text() -> None:
    with pytest.raises(Refused) as refused:
        read_yaml("a: [1\nb: 2", "my.yaml")
    assert "my.yaml is not valid YAML: line 2" in str(refused.value)
    assert "<unicode string>" not in str(refused.value)


_SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=12)
_LOOKS = st.sampled_from(
    ["010", "1e-3", "1:30", "yes", "null", "~", "2026-01-31", "0x1F", "1_000", ".5", "<<", "=", "true", "", "- a", "a: b"]
)


@given(
    st.recursive(
        _SCALARS | _LOOKS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", min_size=1), inner, max_size=3)
    )
)
def test_what_is_written_is_read_back_by_ours_and_by_pyyaml(value: object) -> None:
    text = write_yaml({"value": value})
    assert read_yaml(text, "written") == {"value": value} == yaml.safe_load(text)
