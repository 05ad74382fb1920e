"""A run folder has one owner: of two starts at the same moment one wins, and the lock of an owner that is killed is free."""

import os
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path

from eyeline.core.errors import RunLocked
from eyeline.train.stop import sole_owner

ROUNDS = 50
FORK = get_context("fork")


def start(folder: Path, at_once: Barrier, told: Connection) -> None:
    at_once.wait(30)
    try:
        with sole_owner(folder):
            told.send("owner")
            told.recv()
    except RunLocked as error:
        told.send(str(error))
    except EOFError:
        os._exit(0)


def test_of_two_starts_at_once_one_wins_though_the_owner_before_was_killed(tmp_path: Path) -> None:
    for _ in range(ROUNDS):
        at_once, pipes = FORK.Barrier(2), [FORK.Pipe() for _ in range(2)]
        starts = [FORK.Process(target=start, args=(tmp_path, at_once, there)) for _, there in pipes]
        for one in starts:
            one.start()
        answers = []
        for here, _ in pipes:
            assert here.poll(30)
            answers.append(here.recv())
        try:
            assert answers.count("owner") == 1, answers
            loser = next(answer for answer in answers if answer != "owner")
            assert loser.startswith(f"{tmp_path} is in use by "), loser
        finally:
            for one in starts:
                one.kill()
                one.join(30)
