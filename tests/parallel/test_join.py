"""The place that a process is given among ranks, by its environment."""

import pytest

from eyeline.core.errors import Refused
from eyeline.core.world import ALONE, World
from eyeline.parallel.join import LAUNCHER, STORE, started

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", STORE, LAUNCHER)
MET = {"MASTER_ADDR": "node7", "MASTER_PORT": "29500"}


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, ALONE),
        ({"RANK": "0", "WORLD_SIZE": "1"}, ALONE),
        ({"RANK": "", "WORLD_SIZE": ""}, ALONE),
        ({"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8", **MET}, World(9, 16, 1, 8)),
        ({"RANK": "1", "WORLD_SIZE": "2", STORE: "file"}, World(1, 2, 1, 2)),
    ],
)
def test_place_of_a_rank(environment: pytest.MonkeyPatch, given: dict[str, str], wanted: World) -> None:
    for name, text in given.items():
        environment.setenv(name, text)
    assert started() == wanted


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set and RANK is not. .* or unset WORLD_SIZE for a single process"),
        ({"RANK": "1"}, "RANK is set and WORLD_SIZE is not"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK=x, WORLD_SIZE=2: wanted whole numbers"),
        ({"RANK": "5", "WORLD_SIZE": "2", **MET}, "RANK=5 and WORLD_SIZE=2: wanted a rank from 0 to WORLD_SIZE - 1"),
        ({"RANK": "-1", "WORLD_SIZE": "2", **MET}, "RANK=-1 and WORLD_SIZE=2: wanted a rank"),
        ({"RANK": "0", "WORLD_SIZE": "0", **MET}, "RANK=0 and WORLD_SIZE=0: wanted a rank"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR, MASTER_PORT is not: the ranks cannot find one another"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "node7", "MASTER_PORT": "x"}, "MASTER_PORT=x: wanted a number"),
    ],
)
def test_half_a_place_is_refused(environment: pytest.MonkeyPatch, given: dict[str, str], words: str) -> None:
    for name, text in given.items():
        environment.setenv(name, text)
    with pytest.raises(Refused, match=words):
        started()
