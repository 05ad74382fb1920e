"""Rows read in order and by their places: both give the same."""

import pickle
from typing import Any

import pytest

from eyeline.core.batch import EncodedImage, Sample, Text
from eyeline.core.errors import BadSample
from eyeline.data.containers.container import Container
from eyeline.data.rejects import CAUSES
from eyeline.data.sources.sources import Rows


def everything(container: Container) -> list[Any]:
    """Every row in the order of shards; each is also read by its place, from an unpickled copy, and must be the same."""
    copy = pickle.loads(pickle.dumps(container))
    out = []
    for shard in range(len(container.shards)):
        numbers = []
        for place, row in container.rows(shard):
            assert place.shard == shard
            numbers.append(place.number)
            if isinstance(row, BadSample):
                with pytest.raises(BadSample, match=r".") as caught:
                    copy.row(place)
                assert (caught.value.cause, caught.value.field) == (row.cause, row.field)
            else:
                assert copy.row(place) == row
            out.append(row)
        assert numbers == list(range(len(numbers)))
    return out


def row_of(rows: Rows, i: int = 0) -> Sample:
    """Kept row i, found in order and read by its place: the same, or the same complaint."""
    place, _, found = list(rows.kept_rows())[i]
    if isinstance(found, BadSample):
        with pytest.raises(BadSample) as caught:
            rows.read(place)
        assert (caught.value.cause, caught.value.field) == (found.cause, found.field)
        raise found
    assert rows.read(place) == found
    return found


def parts(rows: Rows, i: int = 0) -> list[list[str]]:
    """Each message's parts: images as <name>, texts as they are."""
    messages = row_of(rows, i).messages
    return [[f"<{p.name}>" if isinstance(p, EncodedImage) else p.text for p in m.parts] for m in messages]


def complaint(rows: Rows, i: int = 0) -> tuple[str, str]:
    with pytest.raises(BadSample) as caught:
        row_of(rows, i)
    assert caught.value.cause in CAUSES
    return caught.value.cause, caught.value.field


def outcomes(rows: Rows) -> list[Any]:
    """Each row's answer, or the cause for which there is none; sequential and random reading must agree."""
    everything(rows.container)
    out: list[Any] = []
    for shard in range(len(rows.shards)):
        for place, _, found in rows.rows_in(shard):
            if isinstance(found, BadSample):
                assert found.cause in CAUSES
                with pytest.raises(BadSample):
                    rows.read(place)
                out.append(found.cause)
            else:
                again = rows.read(place)
                assert again == found  # an image's bytes do not count
                part = found.messages[-1].parts[0]
                assert isinstance(part, Text)
                out.append(part.text)
    return out


def samples(rows: Rows) -> list[Any]:
    """Each sample in order, or its cause; by place it must be the same."""
    everything(rows.container)
    out: list[Any] = []
    for shard in range(len(rows.shards)):
        for place, _, found in rows.rows_in(shard):
            if isinstance(found, BadSample):
                with pytest.raises(BadSample):
                    rows.read(place)
                out.append(found.cause)
            else:
                assert rows.read(place) == found
                out.append(found)
    return out
