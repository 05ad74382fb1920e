"""The plan and its state: the same packs on any ranks and from any state, each row once an epoch.

P1 same packs for any world and restart · P2 exactly once · P3 constant resume · P5 refusals · P7 equal steps · P8 bounded memory.
A planted fault of each kind is shown to be caught.
"""

import hashlib
import json
import threading
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eyeline.core.batch import Budget
from eyeline.core.cost import Cost
from eyeline.core.errors import Refused, StorageFailed
from eyeline.core.image_rule import Area, ImageRule
from eyeline.core.step import Step
from eyeline.core.world import ALONE, World
from eyeline.data import loader
from eyeline.data.containers import container as containers
from eyeline.data.containers import json_rows
from eyeline.data.counts import count_steps
from eyeline.data.fetch_thread import FetchThread
from eyeline.data.images.patches import Augment
from eyeline.data.loader import planned_windows, training_steps
from eyeline.data.plan import blend, index, plan
from eyeline.data.plan.blend import Cursor, OpenBins, Pool, Position, Side, blended_window, pools_of
from eyeline.data.plan.order import WINDOW_SHARDS
from eyeline.data.plan.plan import ImageGroup, Ordered
from eyeline.data.plan.sizing import Sized
from eyeline.data.reader import Reader, reader_of, sizing_of, training_pools
from eyeline.data.rejects import Reject
from eyeline.data.sets import Data
from eyeline.data.sources.sources import Source, open_source
from eyeline.data.text.tokenizer import Encoder
from eyeline.data.validation import validation_batches
from tests.data.llava_rows import row
from tests.data.same_batches import assert_same

BUDGET = Budget(90, 80)
COST = Cost(token=3, pair=1, label=1, patch=5, patch_pair=1)
ROWS = 240


@pytest.fixture
def folder(tmp_path: Path, draw: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """240 rows in some forty shards: images that three rows share, text, rows that are too long, rows that cannot be used."""
    monkeypatch.setattr(json_rows, "SHARD_BYTES", 900)
    for n in range(12):
        draw(f"set/{n}.png", seed=n)
    lines = []
    for n in range(ROWS):
        if n % 40 == 39:
            lines.append(row(f"gone {n}", "absent.png"))
        elif n % 5 == 4:
            lines.append(row(f"text {n}", answer="a b c d e " * (n % 4 + 1)))
        else:
            lines.append(row(f"question {n}?", f"{n // 3 % 12}.png", answer=f"answer {n}"))
    (tmp_path / "set" / "rows.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    return tmp_path / "set"


BAD = {n for n in range(ROWS) if n % 40 == 39}


@pytest.fixture
def make(folder: Path, plain: Encoder, rule: ImageRule) -> Callable[..., Reader]:
    def reader(seed: int = 0, out: Path | None = None, world: World = ALONE, **settings: Any) -> Reader:
        settings.setdefault("sources", (Source(path=str(folder / "rows.jsonl")),))
        settings.setdefault("max_samples_per_image", 3)
        return reader_of(Data(**{"max_reject_rate": 1.0, **settings}), plain, rule, seed, out, cost=COST, world=world)

    return reader


def numbers(folder: Path) -> dict[str, int]:
    """Sample id -> number of the row in the file: ids in later ranges of bytes count from the range's begin."""
    rows = open_source(Source(path=str(folder / "rows.jsonl")))
    return {rows.origin_of(place)[0]: n for n, (place, _, _) in enumerate(rows.kept_rows())}


def packs_of(steps: list[list[Step]]) -> list[list[list[tuple[str, ...]]]]:
    """For each step the packs of all ranks, as the ids in them, without the empty ones, in an order of their own."""
    return [sorted([b.ids for step in of_all for b in step.batches if b.ids]) for of_all in zip(*steps, strict=True)]


def run(
    make: Callable[..., Reader], ranks: int, packs: int, epochs: int | None, state: Any = None, count: int | None = None, **settings: Any
):
    """The steps of every rank, each with a reader of its own."""
    out = []
    for rank in range(ranks):
        steps = training_steps(make(**settings, world=World(rank, ranks)), BUDGET, packs, epochs, json.loads(json.dumps(state)))
        out.append([next(steps) for _ in range(count)] if count is not None else list(steps))
    return out


# P1, P2, P7


def test_the_same_packs_for_any_number_of_ranks(make) -> None:
    alone = run(make, 1, 6, 2)
    wanted = packs_of(alone)
    states = [step.state for step in alone[0]]
    assert len(wanted) >= 8
    for ranks in (2, 3, 4, 7):
        steps = run(make, ranks, 6, 2)
        assert packs_of(steps) == wanted
        assert [len(rank) for rank in steps] == [len(wanted)] * ranks  # P7: no rank waits for a step that another does not have
        for at in range(len(wanted)):
            assert len({len(rank[at].batches) for rank in steps}) == 1
            assert len({json.dumps(rank[at].state) for rank in steps}) == 1
            assert steps[0][at].state == states[at]
        assert all(batch.counts.slots == (BUDGET.tokens if batch.ids else 1) for rank in steps for step in rank for batch in step.batches)


def test_steps_that_a_thread_fetches_are_the_same(make) -> None:
    """Always one ahead, over several windows and two epochs. Ranks are asked by the thread that trains alone."""
    asking = set[str]()

    def gather(value: Any) -> Sequence[Any]:
        asking.add(threading.current_thread().name)
        return [value]

    wanted = list(training_steps(make(), BUDGET, 3, 2))
    with FetchThread() as thread:
        thread.left = len(wanted) + 5
        steps = training_steps(make(world=World(gather=gather)), BUDGET, 3, 2, thread=thread)
        found = [step for step in steps if thread.settle() is None]
    assert len(found) == len(wanted) > 20
    for got, want in zip(found, wanted, strict=True):
        assert got.state == want.state and got.slots == want.slots
        for a, b in zip(got.batches, want.batches, strict=True):
            assert_same(a, b)
    assert asking == {"MainThread"}


def test_who_fetches_is_nothing_to_the_plan(make) -> None:
    """Nor how far ahead, how patiently, or with what kept: three epochs over many windows, packs, states and digests."""

    def planned(**settings: Any) -> list[tuple[Any, ...]]:
        return [
            (pack, window.after(n).state(), window.plan.rest, window.plan.digest)
            for reader in [make(**settings)]
            for window in planned_windows(reader, sizing_of(reader, BUDGET), 3)
            for n, pack in enumerate(window.packs, 1)
        ]

    wanted = planned()
    assert wanted[-1][1]["number"] > 10
    for other in (
        {"workers": 1},
        {"workers": 7, "read_ahead": 1},
        {"decode_timeout": 1.0, "read_retries": 0},
        {"augment": Augment(shift=2)},
    ):
        assert planned(**other) == wanted


def test_an_empty_pack_is_only_padding(make) -> None:
    """Six packs over four ranks: two of eight slots are empty; they count nothing and have no label."""
    steps = run(make, 4, 6, 1)
    first = [rank[0] for rank in steps]
    empty = [batch for step in first for batch in step.batches if not batch.ids]
    assert len(empty) == 2
    for batch in empty:
        assert (batch.counts.real, batch.counts.supervised, batch.counts.slots) == (0, 0, 1)  # no rank computes for nothing
        assert batch.cu_S1.tolist() == [0, 1]


def test_the_last_step_of_the_last_epoch_is_partial(make) -> None:
    """Epochs run into one another: bins stay open over them, so only the very last step may have fewer packs."""
    packs = [len(step.batches) for step in run(make, 1, 7, 3)[0]]
    assert packs[:-1] == [7] * (len(packs) - 1)
    assert 1 <= packs[-1] < 7
    assert count_steps(make(), BUDGET, 7, 3) == len(packs)
    over_four = run(make, 4, 7, 3)
    assert [len(step.batches) for step in over_four[0]] == [2] * (len(packs) - 1) + [-(-packs[-1] // 4)]


@pytest.mark.parametrize("share", [1, 3])
def test_every_usable_row_once_an_epoch(make, folder: Path, share: int) -> None:
    known = numbers(folder)
    for epochs in (1, 2):
        [steps] = run(make, 1, 4, epochs, max_samples_per_image=share)
        seen = Counter(known[id] for step in steps for batch in step.batches for id in batch.ids)
        assert seen == Counter(dict.fromkeys(set(range(ROWS)) - BAD, epochs))
        # the rejects between the last pack and the end of the epoch are counted by the next call
        assert steps[-1].state["rejects"]["counts"] == {"missing_image": len(BAD)}


@settings(deadline=None, max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4), st.booleans()), min_size=1, max_size=5))
def test_any_history_of_restarts_on_any_ranks_gives_the_same_steps(make, tmp_path: Path, history: list[tuple[int, int, bool]]) -> None:
    """(steps until the next stop, ranks, whether the index was lost) again and again; the state goes through JSON each time."""
    wanted = packs_of(run(make, 1, 3, None, count=30))
    state, done = None, 0
    for steps, ranks, cold in history:
        got = run(make, ranks, 3, None, state, steps, out=None if cold else tmp_path)
        assert packs_of(got) == wanted[done : done + steps]
        state, done = got[0][-1].state, done + steps


def test_tensors_are_the_same_on_any_rank(make) -> None:
    """P4: augmentation and all."""
    settings = {"augment": Augment(flip=True, shift=2)}
    by_ids = {batch.ids: batch for step in run(make, 1, 6, 1, **settings)[0] for batch in step.batches}
    for rank in run(make, 3, 6, 1, **settings):
        for batch in (batch for step in rank for batch in step.batches if batch.ids):
            assert_same(batch, by_ids[batch.ids])


GOLDEN = {  # of plan version 2: another plan is another version
    0: ["53077507cdacfdb1", "d412df54dbbd6eca", "cfdd0dd91b3f120c"],
    1: ["406f096a1254de9f", "175839f8f9b5727d", "a0a93c76579115ca"],
}


@pytest.mark.parametrize("seed", GOLDEN)
def test_golden_plans(seed: int) -> None:
    """Digests of three windows of made-up rows. They change with the packing, the order or the digest: then VERSION must change, too."""
    assert plan.VERSION == 2
    assert golden(seed) == GOLDEN[seed]


def golden(seed: int) -> list[str]:
    """Windows of 1,000 rows, with images that rows share, in the order of that seed."""
    rng = np.random.RandomState(7)  # of all numpy's generators the one that is promised never to change
    tokens, patches = rng.randint(5, 900, 3000), rng.randint(0, 5, 3000) * 64
    images = np.where(patches > 0, np.arange(3000) // 2 + 1, 0).astype(np.uint64)
    sizing, carried, digests = made_up(tokens, patches, Budget(2048, 640)), (), []
    for window in range(3):
        groups = blend.image_groups_of(images[window * 1000 : (window + 1) * 1000], 4, seed, 0, window)
        rows = np.zeros((1000, 5), np.int64)
        rows[:, 1], rows[:, 4] = window, groups.rows_R + window * 1000
        done = plan.plan(Ordered(rows, groups.bounds_V1, np.ones(len(rows), np.bool_)), carried, sizing)
        carried, digests = done.bins, [*digests, done.digest]
    return digests


GOLDEN_ROADS = {"once": "adeab686e1615209", "shares": "9cc71389e2be269e", "runs": "234b936f9b51b4b8"}  # they belong to the version, too


@pytest.mark.parametrize("how", GOLDEN_ROADS)
def test_golden_roads(how: str) -> None:
    """The same of whole roads over two made-up sources: shards (of the third road, some of which stay together), windows, visits, blends
    and packs, over the end of an epoch."""
    rng = np.random.RandomState(7)
    tokens, patches = rng.randint(5, 900, 60), rng.randint(0, 5, 60) * 64
    images = np.where(patches > 0, np.arange(60) // 2 + 1, 0).astype(np.uint64)
    sources = [
        SimpleNamespace(shards=_Many(many, 5 if how == "runs" else 1), source=SimpleNamespace(repeat=repeat))
        for many, repeat in ((70, 1), (9, 2))
    ]
    side: Any = SimpleNamespace(
        index=SimpleNamespace(sources=sources, shard=lambda *_: SimpleNamespace(images_R=images), make=lambda _: None),
        kept_rows=lambda *_: np.ones(60, bool),
        left_out=lambda *_: 0,
        shards=lambda source: len(sources[source].shards),
    )
    sizing, carried, digests, cursor = made_up(tokens, patches, Budget(2048, 640)), (), [], Cursor()
    pools, cursors = pools_of(side, 3, 5), (Cursor(), Cursor())
    for number in range(4 if how == "shares" else 10):
        if how != "shares":
            ordered, cursor = blend.window_of(blend.pool_of(side, 3, 5), cursor)
        else:
            ordered, cursors = blended_window(pools, (3.0, 1.0), cursors, number, sizing)
        done = plan.plan(ordered, carried, sizing)
        carried, digests = done.bins, [*digests, done.digest]
    assert max(cursor.epoch, *(c.epoch for c in cursors)) >= 1
    assert hashlib.sha256("".join(digests).encode()).hexdigest()[:16] == GOLDEN_ROADS[how]


def made_up(tokens: Any, patches: Any, budget: Budget) -> Any:
    """A Sizing of rows that are in no file."""
    sized = Sized(tokens, patches // 4, tokens, patches, tokens, patches, np.ones(len(tokens), bool), {}, {})

    class Made:
        def __call__(self, source: int, shard: int) -> Sized:
            return sized

    made: Any = Made()
    made.budget = budget
    return made


# P3, P8


@contextmanager
def counted() -> Iterator[SimpleNamespace]:
    """Reads of the data's files and their bytes, and shards that were indexed."""
    seen = SimpleNamespace(reads=0, bytes=0, indexed=0)
    read, made = containers.File.read, index.shard_index_of

    def noted(file: containers.File, start: int, length: int) -> bytes:
        seen.reads, seen.bytes = seen.reads + 1, seen.bytes + length
        return read(file, start, length)

    def indexed(*arguments: Any) -> Any:
        seen.indexed += 1
        return made(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(containers.File, "read", noted)
        patch.setattr(index, "shard_index_of", indexed)
        yield seen


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """3,000 rows of text of one length in 200 shards: an epoch is seven windows, but for the first."""
    line = len(json.dumps(row("q 0000", answer="a b c"))) + 1
    monkeypatch.setattr(json_rows, "SHARD_BYTES", 15 * line)
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row(f"q {n:04d}", answer="a b c")) for n in range(3000)))
    return tmp_path


@pytest.mark.parametrize("warm", [False, True])
def test_resuming_costs_the_same_everywhere(large: Path, plain: Encoder, tmp_path: Path, warm: bool) -> None:
    """At 1, 50 and 99 % of an epoch a fresh process reads what one window needs, whatever came before: with an index nothing at all."""
    data = Data(sources=(Source(path=str(large / "rows.jsonl")),), cache=str(tmp_path / "index"))
    cold = data.model_copy(update={"cache": None})
    budget = Budget(100, 0)
    states: dict[str, Any] = {}
    whole = count_steps(reader_of(data, plain, None, 3), budget, 2, 1)
    for n, step in enumerate(training_steps(reader_of(data, plain, None, 3), budget, 2, None)):
        for share in (0.01, 0.5, 0.985):
            if n == round(whole * (1 + share)):
                states[str(share)] = (step.state, n)
        if n > 2 * whole:
            break
    costs = {}
    for share, (state, _) in states.items():
        with counted() as seen:
            reader = reader_of(data if warm else cold, plain, None, 3)
            opened = SimpleNamespace(**vars(seen))
            next(training_steps(reader, budget, 2, None, json.loads(json.dumps(state))))
        costs[share] = (seen.reads - opened.reads, round((seen.bytes - opened.bytes) / 1000), seen.indexed)
        assert len(json.dumps(state)) < 8000
    assert len(states) == 3
    if warm:
        assert set(costs.values()) == {(0, 0, 0)}  # text is in the index
        return
    for (
        reads,
        _,
        indexed,
    ) in costs.values():  # the window's shards, those of the rows that its bins carry from the one before, one of the next
        assert reads == indexed
        assert WINDOW_SHARDS <= indexed <= 2 * WINDOW_SHARDS + 2


def test_memory_does_not_grow_with_the_data() -> None:
    """P8: a hundred million rows are a hundred thousand shards; their order, a window and a plan hold no more than a window."""
    shards = 100_000
    side = Side(SimpleNamespace(sources=()), 0.0, False)  # type: ignore[arg-type]  # never asked: `kept` is replaced
    rows_a_shard = 1000
    index_ = SimpleNamespace(images_R=np.zeros(rows_a_shard, np.uint64))
    fake: Any = SimpleNamespace(
        index=SimpleNamespace(
            sources=[SimpleNamespace(shards=_Many(shards))], shard=lambda source, shard: index_, make=lambda wanted: None
        ),
        kept_rows=lambda source, shard: np.ones(rows_a_shard, bool),
        left_out=lambda source, shard: 0,
    )
    assert side.validation_fraction == 0
    pool = Pool(fake, _Entries(shards), 1, 0)  # type: ignore[arg-type]  # entries without a list of them
    rng = np.random.default_rng(0)
    sizing = made_up(rng.integers(16, 900, rows_a_shard), np.zeros(rows_a_shard, np.int64), Budget(8192, 0))
    tracemalloc.start()
    cursor = Cursor(epoch=1, window=1500, first=1500 * WINDOW_SHARDS)
    ordered, after = blend.window_of(pool, cursor)
    done = plan.plan(ordered, (), sizing)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(ordered.row_R5) == WINDOW_SHARDS * rows_a_shard
    assert after.first == 1501 * WINDOW_SHARDS
    assert len(done.packs) > 1500
    assert peak < 40 << 20


class _Many:
    """Shards, none of which exists, in runs of that length."""

    def __init__(self, count: int, run: int = 1):
        self.count, self.run = count, run

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, n: int) -> Any:
        return SimpleNamespace(held=0, joined=n % self.run > 0)


class _Entries(_Many):
    def __getitem__(self, n: int) -> tuple[int, int]:
        return 0, n

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return ((0, n) for n in range(self.count))


def test_every_window_of_every_epoch_has_an_order_of_its_own(large: Path, plain: Encoder) -> None:
    """Which shards it has, in which order, and how their rows are mixed: windows of 32 shards of 15 rows each."""
    for blend_of in ("concat", "interleave"):
        reader = reader_of(Data(sources=(Source(path=str(large / "rows.jsonl")),), mix=blend_of), plain, None, 3)  # type: ignore[arg-type]
        [pool] = training_pools(reader)
        seen: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
        for epoch, window in ((1, 0), (1, 1), (2, 0), (3, 0)):
            cursor = Cursor(epoch)
            while cursor.window < window:
                cursor = pool.after(cursor)
            shards = [shard for _, shard in pool.shards(cursor)]
            place = {shard: 15 * n for n, shard in enumerate(shards)}
            seen[epoch, window] = shards, [place[shard] + number for *_, shard, number in pool.window(cursor).row_R5.tolist()]
        assert all(sorted(mixed) == list(range(len(shards) * 15)) for shards, mixed in seen.values())
        for of in (0, 1):
            assert len({tuple(both[of]) for both in seen.values()}) == 4


def test_an_index_is_mapped_and_not_loaded(large: Path, plain: Encoder, tmp_path: Path) -> None:
    """Two hundred shards are read through, and no more than some stay open."""
    data = Data(sources=(Source(path=str(large / "rows.jsonl")),), cache=str(tmp_path / "index"))
    reader = reader_of(data, plain, None, 3)
    count_steps(reader, Budget(256, 0), 2, 1)
    assert len(list((tmp_path / "index").glob("*/*.index"))) == 200
    assert len(reader.training.index._open) <= index.KEPT_OPEN


def test_the_next_window_is_indexed_while_this_one_is_used(large: Path, plain: Encoder) -> None:
    """So no step waits for a whole window."""
    reader = reader_of(Data(sources=(Source(path=str(large / "rows.jsonl")),), cache=str(large / "index")), plain, None, 3)
    steps, most, all = training_steps(reader, Budget(100, 0), 1, None), 0, 0
    while all < 200:
        with counted() as seen:
            next(steps)
        most, all = max(most, seen.indexed if all > 64 else 0), all + seen.indexed  # at first the open bins take whole windows in
    assert 0 < most <= 3


# P5


def test_a_state_of_something_else_is_refused_by_name(
    make, folder: Path, plain: Encoder, qwen: Encoder, rule: ImageRule, monkeypatch
) -> None:
    state = run(make, 1, 3, None, count=4)[0][-1].state

    def refused(reader: Reader, words: str, budget: Budget = BUDGET) -> None:
        with pytest.raises(Refused, match=words):
            next(training_steps(reader, budget, 3, None, json.loads(json.dumps(state))))

    refused(make(seed=1), "order")
    refused(make(max_samples_per_image=2), "order")
    refused(make(validation_fraction=0.3), "order")
    for other in ({"repeat": 2}, {"limit": 200}, {"categories": ("",)}):
        refused(make(sources=(Source(path=str(folder / "rows.jsonl"), **other),)), "order")
    refused(make(mix="interleave"), "order")
    refused(make(sources=(Source(path=str(folder / "rows.jsonl"), columns={"image": "image"}),)), "layout")
    refused(reader_of(make().data, plain, rule, 0, longest=89), r"budget .*\[90, 80, \d+, 'reject'\] → \[90, 80, 89, 'reject'\]")
    refused(make(), r"budget .*\[90, 80, .*→ \[91, 80", Budget(91, 80))
    refused(make(overlong="drop_turns"), "budget .*reject.*drop_turns")
    data = make().data
    refused(reader_of(data, qwen, rule, 0), "tokenizer")
    other = ImageRule(8, 2, (0.5,) * 3, (0.4,) * 3, "bicubic", rule.resize)
    refused(reader_of(data, plain, other, 0), "image rule")
    with monkeypatch.context() as patch:
        patch.setattr(plan, "VERSION", 3)
        refused(make(), r"plan version \(2 → 3\)")
    lines = (folder / "rows.jsonl").read_text()
    (folder / "rows.jsonl").write_text(lines.replace("question 10?", "question X?"))
    refused(make(), "These differ: data")
    (folder / "rows.jsonl").write_text(lines)
    next(training_steps(make(), BUDGET, 3, None, state))  # and with the state restored it continues
    validated = {"validation_fraction": 0.0, "validation": (Source(path=str(folder / "validated.jsonl")),)}
    (folder / "validated.jsonl").write_text(lines)
    state = next(training_steps(make(**validated), BUDGET, 3, None)).state
    next(training_steps(make(**validated), BUDGET, 3, None, state))
    (folder / "validated.jsonl").write_text(lines.replace("question 10?", "question X?"))
    refused(make(**validated), "These differ: validation")


def test_an_image_of_another_size_under_a_saved_window_is_refused(make, folder: Path, draw, plain: Encoder) -> None:
    """Files of images are in no fingerprint; the window's plan has a digest."""
    rule = ImageRule(8, 2, (0.5,) * 3, (0.5,) * 3, "bicubic", Area(64, 4096))
    data = make().data
    steps = training_steps(reader_of(data, plain, rule, 0), BUDGET, 1, None)
    state = [next(steps) for _ in range(12)][-1].state
    for n in range(12):
        draw(f"set/{n}.png", seed=n, width=60, height=30)
    with pytest.raises((Refused, StorageFailed), match=r"no longer those that were planned|have grown"):
        next(training_steps(reader_of(data, plain, rule, 0), BUDGET, 1, None, state))


def test_an_image_that_changes_after_it_was_planned_stops_the_run(make, folder: Path, draw, plain: Encoder) -> None:
    rule = ImageRule(8, 2, (0.5,) * 3, (0.5,) * 3, "bicubic", Area(64, 4096))
    reader = reader_of(make().data, plain, rule, 0)
    count_steps(reader, BUDGET, 1, 1)
    for n in range(12):
        draw(f"set/{n}.png", seed=n, width=60, height=30)
    with pytest.raises(StorageFailed, match=r"tokens where \d+ were planned"):
        list(training_steps(reader, BUDGET, 1, 1))


def test_ranks_that_plan_differently_stop(make) -> None:
    steps = training_steps(make(world=World(0, 2, gather=lambda value: [value, [["another"], value[1], value[2], []]])), BUDGET, 1, None)
    with pytest.raises(StorageFailed, match="ranks have different plans from window 1"):
        next(steps)


def test_rejects_of_other_ranks_count_here(make, folder: Path) -> None:
    """All ranks decide alike: what one finds while it fetches is told to the others before the rate is looked at."""
    there = [["rows.jsonl#0", "rows.jsonl", 0, "image", "broken_image", "cut"], 0, [0, 0, 0]]  # in the first epoch
    told = []

    def gather(value: Any) -> list[Any]:
        told.append(there)
        return [value, [*value[:3], [there]]]

    steps = training_steps(make(world=World(0, 2, gather=gather)), BUDGET, 2, None)
    for _ in range(3):
        assert next(steps).state["rejects"]["counts"]["broken_image"] == len(told)


def test_ranks_gather_in_the_same_order_with_any_read_ahead(make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers take packs before their turn, as many as there is room for, which differs by rank: a question asked then would meet
    another one, and the run would hang."""

    def asked(ahead: int) -> list[Any]:
        seen: list[Any] = []

        def hasty(asked: Any, fetch: Any, workers: Any, verdicts: Any, group: Any) -> Any:
            waiting: list[Any] = []
            for mark, groups in asked:
                waiting.append((mark, fetch(fetch.job(groups, verdicts))))
                if len(waiting) > ahead:
                    yield waiting.pop(0)
            yield from waiting

        with monkeypatch.context() as patch:
            patch.setattr(loader, "fetched_in_order", hasty)
            list(training_steps(make(world=World(gather=lambda value: seen.append(value) or [value])), BUDGET, 3, 2))
        return seen

    assert len(asked(0)) > 8
    assert asked(0) == asked(3) == asked(20)


# Blends


def sources(folder: Path) -> tuple[Source, Source]:
    (folder / "other.jsonl").write_text("\n".join(json.dumps(row(f"other {n}", answer="yes")) for n in range(37)))
    return Source(path=str(folder / "rows.jsonl"), weight=3), Source(path=str(folder / "other.jsonl"), weight=1)


def test_shares_are_exact_at_any_place(make, folder: Path) -> None:
    """After any window each source has its share of the usable rows, give or take a visit; a small one comes again and again."""
    reader = make(sources=sources(folder), mix="interleave")
    sizing = sizing_of(reader, BUDGET)
    pools = pools_of(reader.training, 3, 0)
    cursors = tuple(Cursor() for _ in pools)
    usable = Counter[int]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blend, "MIXED_ROWS", (50, 400))
        for number in range(6):
            ordered, cursors = blended_window(pools, (3.0, 1.0), cursors, number, sizing)
            for _, _, source, shard, row in ordered.row_R5.tolist():
                usable[source] += sizing(source, shard).usable_R[row]
            given = [cursor.given for cursor in cursors]
            assert given == [usable[0], usable[1]]  # what cannot be used is in no share
            assert abs(given[0] - 3 * given[1]) <= 4 * 3
            assert len(ordered.row_R5) >= min(50 << number, 400)
    assert cursors[1].epoch >= 6  # of 37 rows
    assert sum(given) > 900


@pytest.mark.parametrize("stop", [1, 5, 13])
def test_a_blend_resumes_exactly(make, folder: Path, stop: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In windows that begin anywhere in an epoch of each source."""
    monkeypatch.setattr(blend, "MIXED_ROWS", (16, 40))
    settings = {"sources": sources(folder), "mix": "interleave"}
    whole = run(make, 1, 3, None, count=30, **settings)[0]
    assert len({json.dumps(cursor) for cursor in whole[stop].state["cursors"]}) == 2
    again = run(make, 1, 3, None, whole[stop].state, 29 - stop, **settings)[0]
    for one, two in zip(whole[stop + 1 :], again, strict=True):
        assert one.state == two.state
        for a, b in zip(one.batches, two.batches, strict=True):
            assert_same(a, b)
    seen = Counter(id.split(".")[0] for step in whole for batch in step.batches for id in batch.ids)
    assert 2.4 < seen["rows"] / seen["other"] < 3.6
    heavier = make(sources=tuple(s.model_copy(update={"weight": 2.0}) for s in settings["sources"]), mix="interleave")
    with pytest.raises(Refused, match="These differ: order"):
        next(training_steps(heavier, BUDGET, 3, None, whole[stop].state))


def test_a_source_without_a_usable_row_cannot_have_a_share(make, folder: Path) -> None:
    (folder / "bad.jsonl").write_text("\n".join(json.dumps(row("gone", "absent.png")) for _ in range(5)))
    both = (Source(path=str(folder / "rows.jsonl")), Source(path=str(folder / "bad.jsonl")))
    with pytest.raises(Refused, match=r"bad\.jsonl: no sample can be used, so it cannot have a share"):
        next(training_steps(make(sources=both, mix="interleave"), BUDGET, 1, None))


def test_limits_over_shards(make, folder: Path) -> None:
    """The first `limit` rows, though they are in several shards; validation_fraction takes its part of those."""
    known = numbers(folder)
    limited = (Source(path=str(folder / "rows.jsonl"), limit=50),)
    seen = {known[id] for step in run(make, 1, 2, 1, sources=limited)[0] for batch in step.batches for id in batch.ids}
    assert seen == set(range(50)) - BAD
    reader = make(sources=limited, validation_fraction=0.4)
    validated = {known[id] for batch in validation_batches(reader, BUDGET) for id in batch.ids}
    trained = {known[id] for step in training_steps(reader, BUDGET, 2, 1) for batch in step.batches for id in batch.ids}
    assert validated | trained == set(range(50)) - BAD
    assert not validated & trained


def test_a_limit_counts_rows_of_the_kinds_that_are_kept(make, folder: Path) -> None:
    """Through all the shards that it takes."""
    lines = [json.loads(line) | {"kind": "ab"[n % 3 == 0]} for n, line in enumerate((folder / "rows.jsonl").read_text().splitlines())]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
    known = numbers(folder)
    for limit in (1, 20, 60):
        reader = make(sources=(Source(path=str(folder / "rows.jsonl"), categories=("b",), limit=limit),))
        seen = {known[id] for step in training_steps(reader, BUDGET, 2, 1) for batch in step.batches for id in batch.ids}
        assert seen == set(range(0, 3 * limit, 3)) - BAD
        assert reader.training.shards(0) == 1 + max(
            shard for shard in range(reader.training.shards(0)) if reader.training.kept_rows(0, shard).any()
        )


def test_validation_is_cut_between_ranks_and_complete(make, folder: Path) -> None:
    known = numbers(folder)
    reader = make(validation=(Source(path=str(folder / "rows.jsonl")),))
    whole = [batch.ids for batch in validation_batches(reader, BUDGET)]
    assert Counter(known[id] for ids in whole for id in ids) == Counter(set(range(ROWS)) - BAD)
    for ranks in (2, 3, 5):
        parts = [list(validation_batches(replace(reader, world=World(rank, ranks)), BUDGET)) for rank in range(ranks)]
        assert [[batch.ids for batch in part if batch.ids] for part in parts] == [whole[rank::ranks] for rank in range(ranks)]
        for of_ranks in zip(*parts, strict=True):  # all have as many
            assert {batch.has_images for batch in of_ranks} == {any(len(batch.patches_PC) for batch in of_ranks)}
            assert all(batch.counts.slots == 1 and batch.counts.supervised == 0 for batch in of_ranks if not batch.ids)
        assert any(not batch.ids for part in parts for batch in part) == bool(len(whole) % ranks)
    assert [batch.ids for batch in validation_batches(make(seed=1, validation=reader.data.validation), BUDGET)] == whole
    for batch in validation_batches(make(validation=reader.data.validation, max_samples_per_image=1), BUDGET):
        assert [known[id] for id in batch.ids] == sorted(known[id] for id in batch.ids)  # as listed


# Planted faults


def test_a_plan_that_depends_on_the_world_is_noticed(make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that each take every n-th row, as most loaders do."""
    wanted = packs_of(run(make, 1, 6, 1))
    world = 2
    groups = blend.image_groups_of

    def sharded(images: Any, *rest: Any) -> Any:
        return groups(images[: len(images) // world * world], *rest)

    monkeypatch.setattr(blend, "image_groups_of", sharded)
    assert packs_of(run(make, 2, 6, 1)) != wanted


def test_a_state_that_forgets_the_carried_bins_is_noticed(make, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The window's digest would refuse it; without that, rows would be lost."""
    whole = run(make, 1, 3, None, count=20)[0]
    at = next(n for n, step in enumerate(whole) if step.state["bins"] and step.state["done"])
    state = whole[at].state | {"bins": []}
    with pytest.raises(Refused, match="no longer those that were planned"):
        run(make, 1, 3, None, state, 1)
    rest = run(make, 1, 3, None, state | {"digest": None}, 19 - at)
    assert packs_of(rest) != packs_of([whole[at + 1 :]])


def test_a_reject_that_shifts_its_neighbours_is_noticed(make, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An image that cannot be decoded keeps its place. Were its rows left out when they are met, the packs after would be others."""
    wanted = packs_of(run(make, 1, 2, 1))
    (folder / "5.png").write_bytes((folder / "5.png").read_bytes()[:200])
    assert packs_of(run(make, 1, 2, 1)) == wanted

    columns = plan._columns

    def shifted(rows: Any, sizing: Any) -> Any:
        sizes, usable = columns(rows, sizing)
        usable &= rows[:, 4] != 3  # "already known to be bad"
        return sizes, usable

    monkeypatch.setattr(plan, "_columns", shifted)
    monkeypatch.setattr(plan, "reject_of", lambda sizing, row: Reject("x", "x", 0, "image", "broken_image", "x"))
    assert packs_of(run(make, 1, 2, 1)) != wanted


def test_items_are_written_and_read_back() -> None:
    bins = (
        (ImageGroup(0, 1, ((0, 3, 5),)), ImageGroup(0, 1, ((0, 3, 6), (0, 3, 9), (1, 0, 2))), ImageGroup(0, 2, ((0, 1, 1),))),
        (ImageGroup(1, 0, ((2, 2, 2),)),),
    )
    position = Position((Cursor(1, 2, 3, 4, 5),), 7, 8, OpenBins(bins), "d")
    state = json.loads(json.dumps(position.state()))
    assert Position.of(state) == position
    assert state["bins"][0] == [[0, 1, [[[0, 3, 5]], [[0, 3, 6, 9], [1, 0, 2]]]], [0, 2, [[[0, 1, 1]]]]]


def test_torch_is_not_asked_for_randomness(make) -> None:
    """The order does not move with a global seed."""
    torch.manual_seed(1)
    np.random.seed(1)
    one = packs_of(run(make, 1, 3, 1))
    torch.manual_seed(2)
    np.random.seed(2)
    assert packs_of(run(make, 1, 3, 1)) == one
