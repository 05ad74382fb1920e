"""`eyeline check --cluster`: the rank that is unlike the others is named with its host, and nothing is left behind."""

import os
import re
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from eyeline.parallel.rates import AxisRate
from eyeline.recipes import cluster
from eyeline.recipes.cluster import RankReport, checkpoint_bytes, findings
from eyeline.train import environment, loop
from eyeline.train.run import Run, to_yaml
from tests import ranks
from tests.forked import run_command
from tests.parallel.whole_runs import run_of
from tests.train.recipe import tiny_run

ALIKE = RankReport("node0", "H100", {"eyeline": "1", "code of eyeline": "ab", "Python": "3", "torch": "2"}, {}, {}, 100.0, 50e12, 10**12)
SLOW = AxisRate("dp_shard", (2, 3), 10e9, True)
FAST = AxisRate("dp_shard", (0, 1), 20e9, True)


def reports(**odd: object) -> list[RankReport]:
    """Four ranks, of which the third is odd."""
    each = [replace(ALIKE, host=f"node{rank // 2}") for rank in range(4)]
    return [*each[:2], replace(each[2], **odd), each[3]]  # type: ignore[arg-type]


ODD: dict[str, tuple[list[RankReport], str]] = {
    "slow": (reports(matmul=30e12), r"rank 2 \(node1\) computes matrix products at 30 TFLOP/s, 60.0% of the median"),
    "versions": (reports(versions=ALIKE.versions | {"torch": "1"}), r"rank 2 \(node1\): torch is 1, on rank 0 2"),
    "paths": (reports(paths={"/data": "does not exist"}), r"rank 2 \(node1\): /data is does not exist, on rank 0 not there"),
    "disk": (reports(free=10), r"disk: 10 bytes free in .*, and one checkpoint takes"),
}
WARNED: dict[str, tuple[list[RankReport], str]] = {
    "clock": (reports(clock=90.0), r"the clock of rank 2 \(node1\) is 10.0 s behind"),
    "driver": (reports(drivers={"driver": "5"}), r"rank 2 \(node1\): driver is 5, on rank 0 not there"),
}


def of(run: Run, told: list[RankReport], rates: list[list[AxisRate]]) -> tuple[list[str], list[str]]:
    _, problems, warnings = findings(run, told, rates, [])
    return problems, warnings


def test_ranks_that_are_alike_have_no_problems(tmp_path: Path) -> None:
    assert of(tiny_run(tmp_path), reports(), [[FAST]] * 4) == ([], [])


@pytest.mark.parametrize("what", [*ODD, *WARNED])
def test_an_odd_rank_is_named_with_its_host(what: str, tmp_path: Path) -> None:
    told, words = (ODD | WARNED)[what]
    problems, warnings = of(tiny_run(tmp_path), told, [])
    [line], others = (problems, warnings) if what in ODD else (warnings, problems)
    assert not others
    assert re.search(words, line), line


def test_a_slow_group_of_an_axis_is_named(tmp_path: Path) -> None:
    problems, _ = of(tiny_run(tmp_path), reports(), [[FAST], [FAST], [SLOW], [SLOW]])
    assert problems == [
        "all-reduce over dp_shard among rank 2 (node1), rank 3 (node1): 10 GB/s, 50.0% of the median. Look at their network"
    ]


def test_checkpoints_take_what_is_computed_for_them(tmp_path: Path) -> None:
    """The files of a run's first checkpoints, against the numbers."""
    run = tiny_run(tmp_path, "save_steps=1", "stages.0.steps=3", "validation_steps=null")
    one, kept = checkpoint_bytes(run)
    loop.train(run)
    sizes = [file.stat().st_size for folder in (tmp_path / "run" / "checkpoints").iterdir() for file in folder.glob("*.safetensors")]
    assert 0 < sum(sizes) <= kept < 10 * sum(sizes)
    assert one < kept


def checked(run: Run, before: Callable[[int], object]) -> list[int]:
    """The exit codes of `eyeline check --cluster` on three ranks. What they print is on standard error."""
    recipe = Path(str(run.out) + ".yaml")
    recipe.write_text(to_yaml(run))

    def work() -> None:
        rank = int(os.environ["RANK"])
        os.dup2(2, 1)
        measured = cluster.matmul_rate
        cluster.matmul_rate = lambda *how: 1e9 if measured(*how) else 0.0  # the same on all: they share the processor
        before(rank)
        run_command("check", str(recipe), "--cluster", "--samples", "0")

    return ranks.wait(ranks.start(3, work, recipe.with_suffix(".store")))


@pytest.mark.ranks
def test_ranks_that_are_alike_pass(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = run_of(tmp_path, "run", *(f"stages.{name}.batch.packs_per_step=3" for name in ("whole", "adapt")))
    assert checked(run, lambda rank: None) == [0, 0, 0]
    said = capfd.readouterr().err
    assert "tiny: no problems" in said
    assert said.count("the cluster: no problems") == 1, said
    assert f"cluster: 3 ranks on 1 host: {socket.gethostname()} (3)" in said
    assert "all-reduce over dp_shard, 3 ranks: " in said
    assert {path.name for path in tmp_path.iterdir()} <= {"data", "run.store", "run.yaml"}


@pytest.mark.ranks
def test_a_slow_rank_a_missing_path_and_another_version_are_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Each on a rank of its own; the path is relative, and the rank is elsewhere."""
    packs = [f"stages.{name}.batch.packs_per_step=3" for name in ("whole", "adapt")]
    run = run_of(tmp_path, "run", *packs, "evaluation=null", *(f"stages.{n}.data.sources.0.path=data/data.json" for n in (0, 1)))
    (tmp_path / "elsewhere").mkdir()

    def before(rank: int) -> None:
        os.chdir(tmp_path / ("elsewhere" if rank == 1 else "."))
        known = environment.packages
        if rank == 1:
            cluster.matmul_rate = lambda *how: 1e8
        if rank == 2:
            environment.packages = lambda: known() | {"numpy": "0.1"}

    assert checked(run, before) == [2, 2, 2]
    said, host = capfd.readouterr().err, socket.gethostname()
    assert "the cluster has 3 problems" in said, said
    assert f"rank 1 ({host}) computes matrix products at 0.0001 TFLOP/s, 10.0% of the median" in said
    assert f"rank 1 ({host}): data/data.json is {tmp_path / 'elsewhere' / 'data' / 'data.json'} does not exist" in said
    assert f"rank 2 ({host}): numpy is 0.1, on rank 0 " in said


@pytest.mark.ranks
def test_a_rank_with_a_run_folder_of_its_own_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = run_of(tmp_path, "run", *(f"stages.{name}.batch.packs_per_step=3" for name in ("whole", "adapt")))

    def before(rank: int) -> None:
        cluster.SEEN_S = 0.2
        if rank == 2:
            (tmp_path / "own").mkdir()
            cluster.run_folder = lambda run: tmp_path / "own" / "run"

    assert checked(run, before) == [2, 2, 2]
    said = capfd.readouterr().err
    assert f"rank 2 ({socket.gethostname()}) cannot write into {tmp_path}: it does not see what rank 0 wrote there" in said, said
