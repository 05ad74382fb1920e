"""Carried bins: what is written is read back, by every way of blending; and many short rows stay small."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from eyeline.core.batch import Budget
from eyeline.core.image_rule import ImageRule
from eyeline.data.containers import json_rows
from eyeline.data.loader import training_steps
from eyeline.data.plan import blend, position
from eyeline.data.plan.position import Position
from eyeline.data.reader import Reader, reader_of, rows_in_order
from eyeline.data.sets import Data
from eyeline.data.sources.sources import Source
from eyeline.data.text.tokenizer import Encoder
from tests.data.llava_rows import row
from tests.data.same_batches import assert_same_steps

BUDGET = Budget(120, 64)
WAYS: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "once": ({}, [{}, {}]),
    "images shared": ({"max_samples_per_image": 3}, [{}, {}]),
    "twice": ({}, [{"repeat": 2}, {}]),
    "shares": ({"mix": "interleave", "max_samples_per_image": 2}, [{"weight": 2.0}, {"weight": 1.0}]),
    "some": ({"validation_fraction": 0.2}, [{"limit": 30}, {"categories": ("a",)}]),
}


@pytest.mark.parametrize("way", WAYS)
def test_bins_are_read_back(
    tmp_path: Path, draw: Callable[..., Path], plain: Encoder, rule: ImageRule, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_rows, "SHARD_BYTES", 1500)
    monkeypatch.setattr(blend, "MIXED_ROWS", (16, 40))
    for n in range(7):
        draw(f"{n}.png", seed=n)
    for name in "xy":
        lines = [row(f"{name} {n}", f"{n % 7}.png", answer="a " * (n % 11)) | {"kind": "ab"[n % 2]} for n in range(60)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(json.dumps(line | {"answer": n}) for n, line in enumerate(lines)))
    settings, of = WAYS[way]
    sources = tuple(Source(path=str(tmp_path / f"{name}.jsonl"), **more) for name, more in zip("xy", of, strict=True))

    def reader() -> Reader:
        return reader_of(Data(sources=sources, max_reject_rate=1.0, **settings), plain, rule, 5)

    def steps(many: int, state: Any = None) -> list[Any]:
        monkeypatch.setattr(position, "MANY", many)
        found = training_steps(reader(), BUDGET, 2, None, state)
        return [next(found) for _ in range(40 - (state["step"] if state else 0))]

    plainly, packed = steps(10**9), steps(0)
    assert all(len(stretch) == 3 for step in plainly for bin in step.state["bins"] for stretch in bin)
    assert all(len(stretch) == 2 for step in packed for bin in step.state["bins"] for stretch in bin)
    order = partial(rows_in_order, reader())
    for one, two in zip(plainly, packed, strict=True):
        state = json.loads(json.dumps(two.state))
        assert state == two.state  # plain JSON, as checkpoints want it
        assert Position.of(one.state) == Position.of(state, order)
        assert {k: v for k, v in one.state.items() if k != "bins"} == {k: v for k, v in state.items() if k != "bins"}
    assert any(step.state["bins"] for step in packed)
    for at in (7, 23):
        assert_same_steps(steps(0, json.loads(json.dumps(packed[at].state)) | {"step": at + 1}), packed[at + 1 :])


def test_many_short_rows_are_a_small_state(tmp_path: Path, plain: Encoder) -> None:
    lines = [row(f"{n}", answer="yes") for n in range(6000)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
    reader = reader_of(Data(sources=(Source(path=str(tmp_path / "rows.jsonl")),)), plain, None, 0)
    steps = training_steps(reader, Budget(2048, 0), 1, None)
    states = [next(steps).state for _ in range(80)]
    order = partial(rows_in_order, reader)
    largest = max(states, key=lambda state: sum(len(bin) for bin in Position.of(state, order).bins.bins))
    rows = sum(len(group.rows) for bin in Position.of(largest, order).bins.bins for group in bin)
    assert rows > 1000
    assert len(json.dumps(largest)) < 1500 + 2 * rows  # written out they take about 15 bytes each
