"""Ranks that load a checkpoint: each file is verified once over all of them, and what one finds counts for all."""

from pathlib import Path
from typing import Any

import pytest
import torch

from eyeline.checkpoint import store
from eyeline.checkpoint.pieces import pieces_of
from eyeline.core.errors import EXPECTED, ElsewhereFailed
from eyeline.core.world import World
from tests.ranks import on_ranks

pytestmark = pytest.mark.ranks

SIZES = {"model": 100, "optimizer": 200, "frozen": 50, "ema": 40}


def saved(folder: Path, step: int) -> Path:
    files = {name: pieces_of({name: torch.full((size, 8), float(step))}) for name, size in SIZES.items()}
    return store.save(folder, run="run", step=step, files=files, state={"step": step}, save_total_limit=5)


def found_by(world: World, folder: Path) -> Any:
    """The step that a rank finds, and the files that it read for it; or why there is none."""
    read: list[str] = []
    digest = store.sha256_of

    def counted(path: Path) -> str:
        read.append(f"{path.parent.name[5:13]}/{path.name}")
        return digest(path)

    store.sha256_of = counted
    try:
        found = store.newest(folder, "run", hold=True, world=world)
    except (*EXPECTED, ElsewhereFailed) as error:
        return type(error).__name__, read
    assert found is not None and found.held is not None
    return found.state["step"], read


def test_each_file_is_read_by_one_rank(tmp_path: Path) -> None:
    saved(tmp_path, 7)
    found = on_ranks(3, lambda world: found_by(world, tmp_path))
    assert [step for step, _ in found] == [7, 7, 7]
    read = sorted(name.partition("/")[2] for _, names in found for name in names)
    assert [name for name in read if name != "state.json"] == sorted(f"{name}.safetensors" for name in SIZES)
    assert read.count("state.json") == 3, "all need it"
    assert found[0][1] == ["00000007/optimizer.safetensors", "00000007/state.json"], "the largest is enough for one rank"


def test_damage_that_one_rank_finds_is_damage_for_all(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    saved(tmp_path, 1)
    newest = saved(tmp_path, 2)
    data = bytearray((newest / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (newest / "model.safetensors").write_bytes(data)
    found = on_ranks(3, lambda world: found_by(world, tmp_path))
    assert [step for step, _ in found] == [1, 1, 1]
    said = capfd.readouterr().err
    assert said.count("cannot be used: model.safetensors is not what was saved") == 1


def test_nothing_usable_is_refused_on_all_ranks(tmp_path: Path) -> None:
    (saved(tmp_path, 1) / "frozen.safetensors").unlink()
    assert [why for why, _ in on_ranks(2, lambda world: found_by(world, tmp_path))] == ["Refused", "Refused"]
