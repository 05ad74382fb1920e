"""Ranks on one machine without torchrun: the same command, once for each rank (`eyeline train RECIPE --nproc N`)."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from eyeline.core.errors import RankLost, Refused
from eyeline.core.log import warn
from eyeline.parallel.join import LAUNCHER, STORE, started

GRACE_S = 10.0  # for the other ranks to end by themselves once one has failed


def run_ranks(count: int, arguments: Sequence[str]) -> int:
    """Run `eyeline` with these arguments on several ranks, and wait for them. Signals are passed on to each. The exit code is that of the
    rank that failed first; the others are ended then, and none is left behind."""
    if started().size > 1:
        raise Refused("--nproc starts the ranks of one machine, and torchrun has started this process as one. Leave one of them out")
    with tempfile.TemporaryDirectory(prefix="eyeline-ranks-") as folder:
        places = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, STORE: Path(folder) / "store", LAUNCHER: os.getpid()}
        shared = os.environ | {name: str(value) for name, value in places.items()}
        command = [sys.executable, "-m", "eyeline", *arguments]
        ranks = [  # sessions of their own: a terminal's Ctrl-C reaches them through this process alone, and once
            subprocess.Popen(command, env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, start_new_session=True)
            for rank in range(count)
        ]
        try:
            with _signals_passed_on(ranks):
                return _wait(ranks)
        finally:
            for rank in ranks:
                if rank.poll() is None:
                    rank.kill()
                rank.wait()


def _wait(ranks: Sequence["subprocess.Popen[bytes]"]) -> int:
    """Wait until all have ended, or until GRACE_S after one has failed."""
    failed: dict[int, int] = {}  # rank -> its exit code, in the order in which they ended
    deadline = float("inf")
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
        time.sleep(0.05)
        for number, rank in enumerate(ranks):
            if rank.poll() and number not in failed:
                failed[number] = rank.returncode
                asked = rank.returncode in (130, 143, -signal.SIGTERM, -signal.SIGINT)  # before its first step: there is nothing to save
                deadline = min(deadline, time.monotonic() + (1.0 if asked else GRACE_S))
    failed |= {number: rank.returncode for number, rank in enumerate(ranks) if rank.poll() and number not in failed}
    for number, code in failed.items():
        if code < 0:
            warn(f"rank {number} was ended by {signal.Signals(-code).name}")
    codes = [128 - code if code < 0 else code for code in failed.values()]
    return next((code for code in codes if code != RankLost.code), codes[0] if codes else 0)


@contextmanager
def _signals_passed_on(ranks: Sequence["subprocess.Popen[bytes]"]) -> Iterator[None]:
    def pass_on(number: int, _: FrameType | None) -> None:
        for rank in ranks:
            if rank.poll() is None:
                rank.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
