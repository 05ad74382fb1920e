"""Whole runs of the tiny recipe on several ranks: started, waited for, and compared."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from eyeline.checkpoint import store
from eyeline.core.files import read_lines
from eyeline.train import loop
from eyeline.train.run import Run, to_yaml
from tests import ranks
from tests.forked import run_command
from tests.train.recipe import tiny_run


def run_of(folder: Path, name: str, *overrides: str) -> Run:
    return tiny_run(folder, f"out={folder / name}", "validation_steps=2", "save_minutes=null", *overrides)


def start(
    run: Run, count: int, before: Callable[[int], object] = lambda _: None, overrides: Callable[[int], list[str]] = lambda _: []
) -> list[ranks.Forked]:
    """`eyeline train` on so many ranks; `before` runs first, and both it and the overrides are told the rank."""
    recipe = Path(str(run.out) + ".yaml")
    recipe.write_text(to_yaml(run))

    def work() -> None:
        rank = int(os.environ["RANK"])
        before(rank)
        run_command("train", str(recipe), *overrides(rank))

    return ranks.start(count, work, recipe.with_suffix(f".{time.monotonic_ns()}.store"))


def train(run: Run, count: int, before: Callable[[int], object] = lambda _: None, code: int = 0) -> None:
    assert ranks.wait(start(run, count, before)) == [code] * count


def lines(run: Run, kind: str, *names: str) -> list[Any]:
    return [[line[name] for name in names] for line in read_lines(Path(str(run.out)) / "metrics.jsonl") if line["kind"] == kind]


def weights(run: Run) -> dict[str, Tensor]:
    found = store.newest(Path(str(run.out)) / "checkpoints")
    assert found is not None
    return found.load("model", "frozen")


def bits(run: Run) -> Any:
    """What two runs that are the same to the last bit have in common."""
    return lines(run, "step", "global_step", "loss", "grad_norm"), {name: x.numpy().tobytes() for name, x in weights(run).items()}


def uninterrupted(folders: pytest.TempPathFactory, run_in: Callable[[Path, str], Run]) -> tuple[Path, Any]:
    """A folder with data, and the bits of the uninterrupted run on two ranks."""
    folder = folders.mktemp("whole")
    run = run_in(folder, "whole")
    train(run, 2)
    return folder, bits(run)


def at_step(step: int, at_rank: int, do: Callable[[], object]) -> Callable[[int], None]:
    """One rank does something in the middle of a step."""

    def before(rank: int) -> None:
        update, done = loop.update, [0]

        def counted(*args: Any, **how: Any) -> Any:
            done[0] += 1
            if done[0] == step and rank == at_rank:
                do()
            return update(*args, **how)

        loop.update = counted

    return before
