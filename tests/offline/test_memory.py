"""The memory of a worker does not grow with the data: an attempt at a partition has the same peak in four times as many shards."""

import ctypes
import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eyeline.core.batch import Budget
from eyeline.core.image_rule import ImageRule
from eyeline.core.log import say
from eyeline.data.containers import json_rows
from eyeline.data.reader import reader_of
from eyeline.data.sets import Data
from eyeline.data.sources.sources import Source, open_source
from eyeline.data.text.tokenizer import Encoder
from eyeline.offline import alike, prepare, run
from eyeline.offline.attempt import Job, Outcome, attempt
from eyeline.offline.run import Where
from eyeline.offline.signals import write_signals

ROWS = 400  # of a shard
SOME, MANY = 4, 16  # shards
RECORDS = 1 << 13  # of a range of hashes
GROWTH = 4 << 20  # bytes


def peak_of(work: Callable[[], object]) -> int:
    """The most resident memory while something is done, above what there was before."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what is resident now

    def kilobytes(name: str) -> int:
        return next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))

    before = kilobytes("VmRSS:")
    work()
    return (kilobytes("VmHWM:") - before) * 1024


def write(folder: Path, shards: int) -> Path:
    text = "a sentence about number {0} that is as long as most of them are, with some more words in it {1}"
    rows = [
        {"conversations": [{"from": "human", "value": text.format(n, n % 7)}, {"from": "gpt", "value": text.format(n % 11, n) * 4}]}
        for n in range(shards * ROWS)
    ]
    folder.mkdir()
    (folder / "rows.json").write_text(json.dumps(rows))
    return folder / "rows.json"


@pytest.mark.slow
def test_a_worker_needs_no_more_for_more_data(
    plain: Encoder, rule: ImageRule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(json_rows, "SHARD_ROWS", ROWS)
    monkeypatch.setattr(alike.ranges_of, "__defaults__", (RECORDS,))
    monkeypatch.setattr(prepare, "PARTITION_BYTES", 1 << 20)
    peaks: dict[tuple[str, int], int] = {}
    shards = 1  # the first fills caches

    def measured(job: Job, *arguments: Any) -> Outcome:
        out: list[Outcome] = []
        peak = peak_of(lambda: out.append(attempt(job, *arguments)))
        peaks[job.name, shards] = max(peak, peaks.get((job.name, shards), 0))
        return out[0]

    monkeypatch.setattr(run, "attempt", measured)
    for shards in (1, SOME, MANY):
        path = write(tmp_path / f"data {shards}", shards)
        write_signals([open_source(Source(path=str(path)))], plain, rule, tmp_path / f"signals {shards}", Where())
        prepare.pack_offline(reader_of(Data(sources=(Source(path=str(path)),)), plain, rule, 0), Budget(2048, 64), tmp_path / f"{shards}")
    with capsys.disabled():
        say(f"MiB at most: { ({name: round(peak / 2**20, 1) for name, peak in peaks.items()}) }")
    for job in ("signals", "duplicates", "indexes", "packs"):
        assert peaks[job, MANY] < peaks[job, SOME] + GROWTH, job
