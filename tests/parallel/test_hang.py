"""`eyeline explain --hang`: the rank that issues other collectives than the rest is named with the call."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from eyeline.core.errors import Refused
from eyeline.parallel import watch
from eyeline.parallel.calls import Call, Record, read_calls
from eyeline.parallel.watch import PACKAGE
from eyeline.study.hang import crash_in, desynchronised_ranks, explain_hang
from eyeline.train import loop
from tests import ranks
from tests.parallel.whole_runs import at_step, run_of, start

NONE_DIFFERS = "no rank has issued other collectives than the rest"
SEQUENCE = ["all_gather [4] → [8]", "reduce_scatter [8] → [4]", "all_reduce [3] → [3]", "all_gather [6] → [12]", "all_reduce [2] → [2]"]


def numbered(calls: list[str], first: int = 1, until_s: float = 100.0) -> Record:
    """Call number n was issued at second n."""
    return Record({"default": {number: Call("default", number, what, number) for number, what in enumerate(calls, first)}}, until_s)


ODD = {
    "left out": (SEQUENCE[:2] + SEQUENCE[3:], "rank 1 differs at call 3 of default: it left out all_reduce [3] → [3]"),
    "one more": (
        [*SEQUENCE[:2], "barrier [] → []", *SEQUENCE[2:]],
        "rank 1 differs at call 3 of default: it issues barrier [] → [] in addition, before all_reduce [3] → [3]",
    ),
    "another size": (
        [*SEQUENCE[:2], "all_reduce [4] → [4]", *SEQUENCE[3:]],
        "rank 1 differs at call 3 of default: it issues all_reduce [4] → [4], and the others all_reduce [3] → [3]",
    ),
    "behind": (
        SEQUENCE[:3],
        "rank 1 is behind in default: its last call is 3 (all_reduce [3] → [3]), others wait in 5 (all_reduce [2] → [2])",
    ),
}


@pytest.mark.parametrize("how", ODD)
@pytest.mark.parametrize("others", [1, 3])
def test_the_rank_that_differs_is_named_with_the_call(how: str, others: int) -> None:
    calls, words = ODD[how]
    usual = [numbered(SEQUENCE) for _ in range(others)]
    [line] = desynchronised_ranks(dict(enumerate([usual[0], numbered(calls), *usual[1:]])))
    assert line.startswith(words), line


def test_calls_that_fell_out_of_the_record_are_not_compared() -> None:
    [line] = desynchronised_ranks({0: numbered(SEQUENCE), 1: numbered(SEQUENCE[2:], 3)})
    assert line.startswith(NONE_DIFFERS)


def test_a_record_of_an_earlier_moment_accuses_nobody() -> None:
    """Calls 4 and 5 were issued in seconds 4 and 5: a record of second 5 may lack them, one of second 10 may not."""
    old, new = (dict(enumerate([numbered(SEQUENCE), numbered(SEQUENCE[:3], until_s=moment)])) for moment in (5.0, 10.0))
    assert [line[: len(NONE_DIFFERS)] for line in desynchronised_ranks(old)] == [NONE_DIFFERS]
    assert [line[:16] for line in desynchronised_ranks(new)] == ["rank 1 is behind"]


def test_the_calls_of_a_rank_are_read_with_their_times(tmp_path: Path) -> None:
    entry = {
        "process_group": ["0", "default_pg"], "profiling_name": "gloo:all_reduce", "collective_seq_id": 7, "is_p2p": False,
        "input_sizes": [[3]], "output_sizes": [[3]], "time_created_ns": 2_500_000_000,
    }  # fmt: skip
    (tmp_path / "calls").write_text(json.dumps({"until_s": 4.0, "dumps": [{"entries": [entry, entry | {"is_p2p": True}]}]}))
    expected = Call("default_pg", 7, "all_reduce [[3]] → [[3]]", 2.5)
    assert read_calls(tmp_path / "calls") == Record({"default_pg": {7: expected}}, 4.0)


def test_a_rank_that_has_ended_is_told_from_one_that_runs(tmp_path: Path) -> None:
    (tmp_path / "ranks").mkdir()
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    errors = (None, None, "RankLost: a rank was lost\nmore", None)
    for rank, (pid, error) in enumerate(zip((os.getpid(), ended.pid, ended.pid, os.getpid()), errors, strict=True)):
        where = {"host": socket.gethostname(), "pid": pid, "step": 4, "phase": "compute", "line": "", "error": error}
        (tmp_path / "ranks" / f"rank-{rank:05d}.json").write_text(json.dumps(where))
    os.utime(tmp_path / "ranks" / "rank-00003.json", (time.time() - 60, time.time() - 60))
    lines = [line.partition(" on ")[2].partition(") ")[2] or line.partition(")")[2] for line in explain_hang(tmp_path)]
    assert lines[:4] == [
        ": step 5, compute",
        "has ended without an error of its own, as after kill -9; it was last heard of in step 5, compute",
        "has ended with an error, in step 5, compute: RankLost: a rank was lost",
        "does not run: it was last heard of 60 s ago, in step 5, compute",
    ]


def test_a_run_without_files_of_ranks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="has no file of a rank"):
        list(explain_hang(tmp_path))


def stack(*frames: str) -> str:
    return "".join(f'  File "{frame}", line {number} in {name}\n' for number, (frame, name) in enumerate(frame.split() for frame in frames))


ISSUED = ("torch/distributed/distributed_c10d.py all_reduce", "torch/distributed/c10d_logger.py wrapper")
SUMS, TRAINS, FETCHES = (
    f"{PACKAGE}{place}" for place in ("parallel/ranks.py total", "train/step.py update", "data/fetch_thread.py _serve")
)
CRASHES = {
    "in a call": (
        ("Thread", (FETCHES,)),
        ("Thread", (*ISSUED, SUMS, TRAINS)),
        "aborted (Aborted) in all_reduce, in parallel/ranks.py:2 total",
    ),
    "between calls": (("Thread", (FETCHES,)), ("Thread", (TRAINS, *ISSUED)), "aborted (Aborted) in train/step.py:0 update"),
    "in another thread": (
        ("Current thread", (FETCHES,)),
        ("Thread", (*ISSUED, SUMS)),
        "aborted (Aborted) in data/fetch_thread.py:0 _serve",
    ),
    "in a library's thread": (("Current thread", ("x.py run",)), ("Thread", (TRAINS,)), "aborted (Aborted) in train/step.py:0 update"),
}


@pytest.mark.parametrize("how", CRASHES)
def test_the_stack_of_an_abort_names_call_and_line(how: str, tmp_path: Path) -> None:
    *threads, expected = CRASHES[how]
    written = "\n".join(f"{kind} 0x0000000{n} (most recent call first):\n{stack(*frames)}" for n, (kind, frames) in enumerate(threads))
    (tmp_path / "x.crash").write_text(f"Fatal Python error: Aborted\n\n{written}")
    assert crash_in(tmp_path / "x.crash") == expected


def leaves_out_a_call() -> None:
    """One all-reduce of the step is not issued."""
    loop_sum = loop.ranks_of
    loop.ranks_of = lambda mesh: loop_sum(mesh).__class__(**vars(loop_sum(mesh)) | {"sum": lambda x: x})


def sums_more() -> None:
    ranks_of = loop.ranks_of

    def of(mesh):
        found = ranks_of(mesh)
        return found.__class__(**vars(found) | {"sum": lambda x: found.sum(torch.cat([x.flatten(), x.flatten()]))[: x.numel()]})

    loop.ranks_of = of


LEFT_OUT = r"rank 1 differs at call \d+ of default_pg: it issues all_gather \[\[\d+, 4\]\] .*, and the others all_reduce \[\[3\]\]"


@pytest.mark.ranks
def test_a_run_that_hangs_names_its_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "EVERY_S", 0.1)
    run = run_of(tmp_path, "run", "mesh.timeout_minutes=0.05")
    codes = ranks.wait(start(run, 2, lambda rank: leaves_out_a_call() if rank == 1 else None))
    assert all(codes), codes
    lines = list(explain_hang(tmp_path / "run"))
    assert sum(bool(re.match(LEFT_OUT, line)) for line in lines) == 1, lines
    assert re.match(
        r"rank 0 \(process \d+ on \S+\) has ended with an error, in step 1, (compute|communication|data_wait), at parallel/\w+\.py:\d+ ",
        lines[0],
    )


@pytest.mark.ranks
@pytest.mark.slow
def test_a_rank_that_gloo_aborts_is_named_with_its_call(tmp_path: Path) -> None:
    """Where sizes differ one rank is aborted at once, with the calls since its file was written: its stack is what is left."""
    run = run_of(tmp_path, "run", "mesh.timeout_minutes=0.1")
    assert all(ranks.wait(start(run, 2, lambda rank: sums_more() if rank == 1 else None)))
    aborted = [line for line in explain_hang(tmp_path / "run") if "was aborted (Aborted)" in line]
    assert aborted and all(re.search(r" in all_reduce, in (parallel|train)/\w+\.py:\d+ ", line) for line in aborted), aborted


@pytest.mark.ranks
def test_a_rank_that_is_aborted_is_named_with_its_line(tmp_path: Path) -> None:
    """As gloo and NCCL do where a call does not fit."""
    run = run_of(tmp_path, "run", "mesh.timeout_minutes=0.5")
    assert ranks.wait(start(run, 2, at_step(2, 1, os.abort))) == [9, -signal.SIGABRT]
    _, aborted, *_ = explain_hang(tmp_path / "run")
    assert re.search(
        r"rank 1 \(.*\) was aborted \(Aborted\) in train/loop\.py:\d+ run_update, and was last heard of in step \d+, ", aborted
    ), aborted
