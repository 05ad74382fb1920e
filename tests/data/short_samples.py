"""Conversations made in one line."""

import pytest

from eyeline.core.batch import Message, Picture, Sample, Text
from eyeline.core.errors import BadSample
from eyeline.data.sources.sources import Rows


def said(*turns: str | tuple[Picture | str, ...], system: str | None = None) -> tuple[Message, ...]:
    """Messages from texts (or tuples of texts and images), user first."""
    out = [] if system is None else [Message("system", (Text(system),))]
    for n, turn in enumerate(turns):
        parts = (turn,) if isinstance(turn, str) else turn
        out.append(Message(("user", "assistant")[n % 2], tuple(Text(p) if isinstance(p, str) else p for p in parts)))
    return tuple(out)


def sample(*turns: str | tuple[Picture | str, ...], system: str | None = None) -> Sample:
    return Sample("made#0", said(*turns, system=system))


DOT = Picture("dot.png", b"never opened")


def row_of(rows: Rows, i: int = 0) -> Sample:
    """Kept row i, found in order and read by its place: the same, or the same complaint."""
    place, _, found = list(rows.kept())[i]
    if isinstance(found, BadSample):
        with pytest.raises(BadSample) as caught:
            rows.read(place)
        assert (caught.value.cause, caught.value.field) == (found.cause, found.field)
        raise found
    assert rows.read(place) == found
    return found
