"""Whole runs on several ranks against one process: what is trained, saved, resumed and said."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eyeline.train import loop
from eyeline.train.run import Run, to_yaml
from tests import ranks
from tests.forked import run_command
from tests.parallel.whole_runs import bits, lines, run_of, train, weights

pytestmark = pytest.mark.ranks


COUNTED = ("global_step", "real", "supervised", "images", "flops", "epoch", "outcome", "rejected")
CLOSE = 5e-3  # of losses after some steps: AdamW makes a whole step of the rounding of a gradient that is zero


def assert_same_course(many: Run, one: Run) -> None:
    assert lines(many, "step", *COUNTED) == lines(one, "step", *COUNTED)
    for kind, name in (("step", "loss"), ("step", "grad_norm"), ("validation", "loss")):
        for [got], [want] in zip(lines(many, kind, name), lines(one, kind, name), strict=True):
            assert got == pytest.approx(want, rel=CLOSE), (kind, name)


DEALT = "mesh={balance_images: true, sync_each_batch: false}"


@pytest.mark.parametrize(
    ("count", "mesh"),
    [
        (2, "mesh.dp_shard=2"),
        (2, "mesh.dp_replicate=2"),
        (3, "mesh.dp_shard=-1"),
        pytest.param(2, "mesh.pp=2", marks=pytest.mark.slow),
        (2, "mesh={balance_images: true, sync_each_batch: false}"),
    ],
)
def test_ranks_train_what_one_process_does(count: int, mesh: str, tmp_path: Path) -> None:
    """Two stages: Muon on everything, then LoRA with dropout, and the projector."""
    packs = "stages.whole.batch.packs_per_step=3", "stages.adapt.batch.packs_per_step=3"
    one, many = run_of(tmp_path, "one", *packs), run_of(tmp_path, "many", mesh, *packs)
    train(one, 1)
    train(many, count)
    assert_same_course(many, one)
    assert lines(many, "start", "world_size") == [[count]]
    imbalance = [figures for [figures] in lines(many, "step", "imbalance")]
    assert all(figures["vision"] <= figures["vision_before"] for figures in imbalance)
    assert any(figures["vision"] < figures["vision_before"] for figures in imbalance) == (mesh == DEALT)
    assert {name: x.shape for name, x in weights(many).items()} == {name: x.shape for name, x in weights(one).items()}


PLAIN = (
    "model.config.language.kv_heads=2",
    "stages.whole.optimizer={kind: adamw}",
    "stages.whole.batch.packs_per_step=3",
    "stages.adapt.batch.packs_per_step=3",
)


@pytest.mark.parametrize("mesh", ["mesh.tp=2", "mesh.cp=2", "mesh.pp=2"])
def test_ranks_that_share_packs_train_what_one_process_does(mesh: str, tmp_path: Path) -> None:
    """One of them fetches, and both are told what they did together; then one process resumes, and two that shard."""
    one, many = run_of(tmp_path, "one", *PLAIN), run_of(tmp_path, "many", mesh, *PLAIN)
    train(one, 1)
    train(many, 2, stop_after(2, 1), code=75)
    train(many, 2, stop_after(1, 0), code=75)
    train(run_of(tmp_path, "many", "mesh.dp_shard=2", *PLAIN), 2, stop_after(1, 0), code=75)
    train(run_of(tmp_path, "many", mesh, *PLAIN), 2)
    assert_same_course(many, one)
    assert {name: x.shape for name, x in weights(many).items()} == {name: x.shape for name, x in weights(one).items()}


@pytest.mark.slow
def test_slices_start_from_a_folder_as_one_process_does(tmp_path: Path) -> None:
    """Tied weights are read into both of their copies."""
    first, folder = run_of(tmp_path, "first", "stages.whole.steps=1", "stages.adapt.steps=1"), tmp_path / "exported"
    train(first, 1)
    export = ranks.start(1, lambda: run_command("export", str(first.out), str(folder)), tmp_path / "export.store")
    assert ranks.wait(export) == [0]
    start_there = f"model={{path: {folder}}}"
    one, many = run_of(tmp_path, "one", *PLAIN[1:], start_there), run_of(tmp_path, "many", *PLAIN[1:], start_there, "mesh.pp=2")
    train(one, 1)
    train(many, 2)
    assert_same_course(many, one)


def stop_after(step: int, at_rank: int) -> Callable[[int], None]:
    """A signal reaches one rank in that step, and no other."""

    def before(rank: int) -> None:
        update, done = loop.update, [0]

        def counted(*args: Any, **how: Any) -> Any:
            report = update(*args, **how)
            done[0] += 1
            if done[0] == step and rank == at_rank:
                os.kill(os.getpid(), signal.SIGTERM)
            return report

        loop.update = counted

    return before


@pytest.mark.parametrize(
    ("mesh", "stops"),
    [
        pytest.param("mesh.dp_shard=-1", (2,), id="in the first stage"),
        pytest.param("mesh.dp_shard=-1", (3, 3), id="in both stages"),
        pytest.param("mesh.pp=2", (3, 3), id="slices of the model", marks=pytest.mark.slow),
    ],
)
def test_a_run_resumed_on_as_many_ranks_is_the_uninterrupted_one(mesh: str, stops: tuple[int, ...], tmp_path: Path) -> None:
    whole, cut = run_of(tmp_path, "whole", mesh), run_of(tmp_path, "cut", mesh)
    train(whole, 2)
    for n, stop in enumerate(stops):
        train(cut, 2, stop_after(stop, at_rank=1 - n % 2), code=75)
    train(cut, 2)
    assert bits(cut) == bits(whole)


def test_a_run_resumed_on_other_ranks_goes_the_same_course(tmp_path: Path) -> None:
    """1 → 2 → 3 → 1 ranks; weights, both optimizers' states and the position of the data are found again."""
    packs = "stages.whole.batch.packs_per_step=3", "stages.adapt.batch.packs_per_step=3"
    one, moved = run_of(tmp_path, "one", *packs), run_of(tmp_path, "moved", *packs)
    train(one, 1)
    for count, stop in ((1, 2), (2, 3), (3, 2)):
        train(moved, count, stop_after(stop, at_rank=0), code=75)
    train(moved, 1)
    assert_same_course(moved, one)
    assert lines(moved, "start", "world_size", "resumed_from") == [[1, None], [2, 2], [3, 5], [1, 7]]


def test_nproc_starts_ranks_and_leaves_nothing_behind(tmp_path: Path) -> None:
    """The command as a user gives it, in new processes."""
    run = run_of(tmp_path, "run", "stages.whole.steps=1", "stages.adapt.steps=1", "mesh.dp_shard=2")
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(to_yaml(run))
    command = [sys.executable, "-m", "eyeline", "train", str(recipe), "--nproc", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert "on 2 ranks, each on cpu" in done.stdout
    assert done.stdout.count("saved: ") == 1
    assert (Path(str(run.out)) / "report.html").exists()
    left = subprocess.run(["pgrep", "-f", str(recipe)], capture_output=True, text=True, check=False).stdout
    assert not left, "ranks are still running"
