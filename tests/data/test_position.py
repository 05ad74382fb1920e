"""A position: what is written is read back, by every way of blending; and bins of many short rows stay small."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eyeline.core.batch import Budget
from eyeline.core.image_rule import ImageRule
from eyeline.data.containers import json_rows
from eyeline.data.loader import training_steps
from eyeline.data.plan import blend
from eyeline.data.plan.blend import Position
from eyeline.data.reader import Reader, reader_of
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

    def steps(state: Any = None) -> list[Any]:
        found = training_steps(reader(), BUDGET, 2, None, state)
        return [next(found) for _ in range(24 - (state["step"] if state else 0))]

    whole = steps()
    for step in whole:
        state = json.loads(json.dumps(step.state))
        assert state == step.state  # plain JSON, as checkpoints want it
        assert Position.of(state).state().items() <= state.items()
    assert any(step.state["bins"] for step in whole)
    for at in (5, 14):
        assert_same_steps(steps(json.loads(json.dumps(whole[at].state)) | {"step": at + 1}), whole[at + 1 :])


def test_many_short_rows_are_a_small_state(tmp_path: Path, plain: Encoder) -> None:
    lines = [row(f"{n}", answer="yes") for n in range(3500)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
    reader = reader_of(Data(sources=(Source(path=str(tmp_path / "rows.jsonl")),)), plain, None, 0)
    steps = training_steps(reader, Budget(2048, 0), 1, None)
    states = [next(steps).state for _ in range(45)]

    def rows(state: dict[str, Any]) -> int:
        return sum(len(group.rows) for bin in Position.of(state).bins.bins for group in bin)

    largest = max(states, key=rows)
    assert rows(largest) > 1000
    assert len(json.dumps(largest)) < 1500 + 20 * rows(largest)
