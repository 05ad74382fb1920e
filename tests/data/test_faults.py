"""Faults that other data readers had, with the inputs that showed them, where no other test has that input."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from eyeline.core.batch import IGNORE, Budget
from eyeline.core.image_rule import Area, ImageRule
from eyeline.core.world import World
from eyeline.data.loader import training_steps
from eyeline.data.reader import reader_of
from eyeline.data.sets import Data
from eyeline.data.sources.sources import Source
from eyeline.data.text.tokenizer import Encoder
from tests.data.container_files import archive, encoded
from tests.data.llava_rows import row
from tests.data.same_batches import flat

NATIVE = ImageRule(8, 2, (0.5,) * 3, (0.5,) * 3, "bicubic", Area(64, 1 << 22))


def lines(path: Path, rows: list[dict]) -> Source:
    path.write_text("\n".join(map(json.dumps, rows)))
    return Source(path=str(path))


def test_who_copies_its_input_is_wrong(tmp_path: Path, plain: Encoder) -> None:
    """Labels that are not shifted are learned to a loss of 0. Targets here are what comes next, so a copy is right by chance only."""
    source = lines(tmp_path / "rows.jsonl", [row(f"say {n}", answer="a b c d e f g") for n in range(20)])
    [batch, *_] = flat(training_steps(reader_of(Data(sources=(source,)), plain, None, 0), Budget(300, 0), 1, 1))
    assert batch.labels_L is not None and len(batch.labels_L) > 100
    inputs = batch.tokens_T[batch.rows_L]
    assert (batch.labels_L == batch.tokens_T[batch.rows_L + 1]).all()
    assert (batch.labels_L == inputs).float().mean() < 0.3  # of " a b c" a space or two may repeat
    assert IGNORE not in batch.labels_L


@pytest.mark.parametrize("policy", ["reject", "drop_turns"])
def test_an_image_over_the_length_is_rejected_before_any_step(tmp_path: Path, draw, plain: Encoder, policy: str) -> None:
    """It alone, by name: never with a part of its tokens."""
    draw("large.png", width=480, height=480)  # 900 tokens
    draw("small.png", width=32, height=32)
    source = lines(tmp_path / "rows.jsonl", [row("what", "small.png"), row("what", "large.png"), row("what", "small.png")])
    data = Data(sources=(source,), max_reject_rate=1.0, overlong=policy)  # type: ignore[arg-type]
    reader = reader_of(data, plain, NATIVE, 0, longest=512)
    batches = flat(training_steps(reader, Budget(2048, 1 << 16), 1, 1))
    assert sorted(id.partition("#")[2] for batch in batches for id in batch.ids) == ["0", "2"]
    assert reader.rejects.counts == {"too_long": 1}


def test_one_huge_image_does_not_make_a_huge_pack(tmp_path: Path, draw, plain: Encoder) -> None:
    draw("huge.png", width=2000, height=2000)
    draw("small.png", width=32, height=32)
    source = lines(tmp_path / "rows.jsonl", [row(f"{n}", "huge.png" if n == 31 else "small.png") for n in range(60)])
    reader = reader_of(Data(sources=(source,), max_reject_rate=0.1), plain, NATIVE, 0)
    batches = flat(training_steps(reader, Budget(400, 300), 1, 1))
    assert max(batch.counts.patches for batch in batches) <= 300
    assert reader.rejects.counts == {"too_long": 1}
    assert sum(batch.counts.documents for batch in batches) == 59


def test_fewer_shards_than_processes(tmp_path: Path, plain: Encoder, rule: ImageRule) -> None:
    """Three shards, two ranks with two workers each: as many steps on both, and every row once."""
    for shard in range(3):
        members = [(f"{n}.{end}", encoded(n, "PNG") if end == "png" else f"it is {n}") for n in range(7) for end in ("png", "txt")]
        archive(tmp_path / f"{shard}.tar", members)
    data = Data(sources=(Source(path=str(tmp_path / "*.tar")),), workers=2)
    ranks = [list(training_steps(reader_of(data, plain, rule, 0, world=World(rank, 2)), Budget(90, 48), 4, 1)) for rank in (0, 1)]
    assert len(ranks[0]) == len(ranks[1]) > 1
    seen = Counter(id for steps in ranks for batch in flat(steps) for id in batch.ids)
    assert seen == Counter(f"{shard}.tar#{n}" for shard in range(3) for n in range(7))


def test_the_order_in_which_files_were_made_is_no_matter(tmp_path: Path, plain: Encoder, rule: ImageRule) -> None:
    def packs(folder: Path, order: list[int]) -> list[tuple[str, ...]]:
        folder.mkdir()
        for shard in order:
            archive(folder / f"{shard}.tar", [("k.png", encoded(shard, "PNG")), ("k.txt", f"of {shard}")])
        return [
            batch.ids
            for batch in flat(training_steps(reader_of(Data(sources=(Source(path=str(folder)),)), plain, rule, 0), Budget(60, 32), 1, 2))
        ]

    order = np.random.default_rng(0).permutation(12).tolist()
    one = packs(tmp_path / "a", order)
    assert one == packs(tmp_path / "b", order[::-1]) and len(set(one)) > 5


def test_a_row_is_given_once_however_many_workers_read(tmp_path: Path, draw: Callable[..., Path], plain: Encoder, rule: ImageRule) -> None:
    draw("0.png")
    source = lines(tmp_path / "rows.jsonl", [row(f"{n}", "0.png") for n in range(10)])
    batches = flat(training_steps(reader_of(Data(sources=(source,), workers=4), plain, rule, 0), Budget(40, 32), 1, 2))
    assert Counter(id for batch in batches for id in batch.ids) == {f"rows.jsonl#{n}": 2 for n in range(10)}
