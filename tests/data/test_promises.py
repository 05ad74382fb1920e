"""What the data engine promises as a whole, on random data and settings, in real processes, and with a model behind it."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eyeline.core.batch import Budget
from eyeline.core.errors import Refused, StorageFailed
from eyeline.core.facts import ImageRule
from eyeline.data import json_rows
from eyeline.data.loader import Data, Reader, held_out
from eyeline.data.sources import Source, open_source
from eyeline.data.tokenizer import Encoder
from tests.data.test_loader import row

# P2: any data and any settings


def text(n: int) -> dict[str, Any]:
    return row(f"text {n}", answer="a b c d e " * (n % 4 + 1))


ANY: dict[str, Callable[[int], Any]] = {
    "text": text,
    "picture": lambda n: row(f"question {n}?", f"{n % 4}.png"),
    "same picture": lambda n: row(f"again {n}?", "0.png"),
    "two pictures": lambda n: row("compare", f"{n % 3}.png", f"{n % 2}.png"),
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
        "kinds": st.sampled_from([None, None, ("a",)]),
    }
)


def line_of(n: int, what: str, kind: str) -> str:
    made = ANY[what](n)
    return made if isinstance(made, str) else json.dumps(made | {"kind": kind})


@pytest.fixture
def pictures(tmp_path: Path, draw: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(json_rows, "SHARD_BYTES", 500)
    for n in range(4):
        draw(f"set/{n}.png", seed=n)
    return tmp_path / "set"


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    some=st.lists(one_source, min_size=1, max_size=3),
    hold_out=st.sampled_from([0.0, 0.0, 0.3, 0.7]),
    share_images=st.integers(1, 4),
    budget=st.sampled_from([Budget(60, 32), Budget(90, 80), Budget(200, 48)]),
    epochs=st.integers(1, 3),
    packs=st.integers(1, 6),
    history=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), max_size=3),
    seed=st.integers(0, 3),
)
def test_every_usable_row_as_often_as_it_should_be(
    pictures: Path, plain: Encoder, rule: ImageRule, some, hold_out, share_images, budget, epochs, packs, history, seed
) -> None:
    """Whatever the data, the settings, and the (steps, ranks) after which a run was stopped and taken up again."""
    sources = []
    for n, one in enumerate(some):
        (pictures / f"{n}.jsonl").write_text("\n".join(line_of(m, *what) for m, what in enumerate(one["rows"])))
        rest = {name: one[name] for name in ("repeat", "limit", "kinds")}
        sources.append(Source(path=str(pictures / f"{n}.jsonl"), **rest))
    data = Data(sources=tuple(sources), hold_out=hold_out, share_images=share_images, max_reject_rate=1.0)

    def reader() -> Reader:
        return Reader(data, plain, rule, seed)

    trained, judged, met, lost = Counter[str](), Counter[str](), 0, 0
    sides, absent = set(), False
    for source, one in zip(sources, some, strict=True):
        try:
            rows = open_source(source)
        except Refused:  # no row of it can be recognised
            with pytest.raises(Refused):
                reader()
            return
        absent |= source.kinds == ("a",) and source.limit is None and not any(k == "a" and w != "no row" for w, k in one["rows"])
        numbers = {place: n for n, (place, _, _) in enumerate(p for shard in range(len(rows.shards)) for p in rows.rows_in(shard))}
        for place, _, found in rows.kept():
            usable = one["rows"][numbers[place]][0] not in UNUSABLE
            held = held_out(rows, place, found, hold_out)
            sides.add(held)
            if held:
                judged[rows.named(place)[0]] += usable
            else:
                trained[rows.named(place)[0]] += usable * source.repeat * epochs
                met += source.repeat * epochs
                lost += (not usable) * source.repeat * epochs
    if absent or False not in sides or (hold_out and True not in sides):
        with pytest.raises(Refused):
            reader()
        return
    trained, judged = +trained, +judged
    if not trained:
        with pytest.raises(Refused, match="no sample can be used"):
            list(reader().steps(budget, packs, epochs))
        with pytest.raises(Refused, match="no sample can be used"):
            reader().count_steps(budget, packs, epochs)
        return
    got, state, count = Counter[str](), None, 0
    for stop, ranks in [*history, (10**9, 1)]:
        after = state
        for rank in range(ranks):
            last = reader()
            for n, step in enumerate(last.steps(budget, packs, epochs, json.loads(json.dumps(state)), rank, ranks)):
                got.update(id for batch in step.batches for id in batch.ids)
                count += rank == 0
                after = step.state
                if n + 1 == stop:
                    break
        state = after
    assert got == trained
    assert count == reader().count_steps(budget, packs, epochs)
    assert (last.rejects.seen, last.rejects.rejected) == (met, lost)
    if hold_out and judged:
        assert Counter(id for batch in reader().validation(budget) for id in batch.ids) == judged


def test_a_set_smaller_than_a_pack_is_counted(pictures: Path, plain: Encoder, rule: ImageRule) -> None:
    """Its first epochs fill no pack, which does not mean that nothing can be used."""
    (pictures / "few.json").write_text(json.dumps([text(n) for n in range(3)]))
    reader = Reader(Data(sources=(Source(path=str(pictures / "few.json")),)), plain, rule, 0)
    for epochs in (1, 4, 30):
        assert reader.count_steps(Budget(300, 32), 2, epochs) == len(list(reader.steps(Budget(300, 32), 2, epochs)))


def test_a_carried_row_that_can_no_longer_be_used_is_named(pictures: Path, plain: Encoder, rule: ImageRule, tmp_path: Path) -> None:
    lines = [json.dumps(row(f"question {n}", f"{n % 4}.png")) for n in range(40)]
    (pictures / "rows.jsonl").write_text("\n".join(lines))
    data = Data(sources=(Source(path=str(pictures / "rows.jsonl")),), max_reject_rate=1.0, cache=str(tmp_path / "index"))
    state = next(s.state for s in Reader(data, plain, rule, 0).steps(Budget(90, 80), 1, None) if s.state["bins"] and s.state["number"] > 1)
    for n in range(4):
        (pictures / f"{n}.png").unlink()
    with pytest.raises(StorageFailed, match=r"rows\.jsonl row \d+ is planned, and can no longer be used: .*\.png does not exist"):
        next(Reader(data, plain, rule, 0).steps(Budget(90, 80), 1, None, state))
