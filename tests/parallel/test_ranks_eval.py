"""Answers and evaluations of ranks that share the weights, against one process."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from eyeline.core.batch import Budget, Document
from eyeline.core.errors import Refused
from eyeline.core.world import ALONE, World
from eyeline.evals.exact_match import exact_match
from eyeline.generate.generate import Answer, generate, here
from eyeline.generate.sampling import Sampling
from eyeline.models import spec
from eyeline.models.shape import shape
from eyeline.parallel.mesh import MeshSizes, mesh_of
from eyeline.parallel.place import place
from eyeline.study.evaluate import evaluate, sizes_for
from eyeline.train.loop import train
from tests import ranks
from tests.forked import run_command
from tests.models.parity import Case
from tests.parallel.updates import FAMILIES, fill
from tests.ranks import on_ranks
from tests.train.recipe import tiny_run

pytestmark = pytest.mark.ranks

NEW = 12  # tokens of the longest answer
STOP = tuple(range(0, 10_000, 5))  # enough of them that answers end at different lengths


def answered(case: Case, rounds: Sequence[Sequence[Document]], world: World, sharded: bool = True) -> list[list[Answer]]:
    """What a rank says in each round: of the n-th slot it has the round that follows its number."""
    plan = shape(case.config, trains={})
    mesh = mesh_of(MeshSizes(), world, "cpu") if sharded else None
    place(plan, "cpu", mesh)
    fill(case, plan)
    model = plan.model.eval()
    anywhere = here if mesh is None else lambda mine: any(world.gather(mine))
    own = [rounds[n + world.rank] if n + world.rank < len(rounds) else [] for n in range(0, len(rounds), world.size)]
    return [generate(model, spec(case.config), prompts, Sampling(max_new_tokens=NEW), STOP, None, anywhere) for prompts in own]


def test_sharded_ranks_answer_as_one_process() -> None:
    """All families: three rounds on two ranks, one without images, with answers of different lengths."""

    def rounds(case: Case) -> list[list[Document]]:
        texts = [d for d in case.documents if not d.images]
        return [list(case.documents), texts[:1], [*case.documents[1:], *texts]]

    want = {name: answered(case, rounds(case), ALONE) for name, case in FAMILIES.items()}
    lengths = {len(answer.tokens) for found in want.values() for round in found for answer in round}
    assert len(lengths) > 3 and max(lengths) == NEW
    got = on_ranks(2, lambda world: {name: answered(case, rounds(case), world) for name, case in FAMILIES.items()}, timeout=60)
    for name, (first, second, third) in want.items():
        assert got[0][name] == [first, third]
        assert got[1][name] == [second, []]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with an evaluation of 24 questions, two of which cannot be asked."""
    folder = tmp_path_factory.mktemp("evaluated")
    data = folder / "data" / "data.json"
    train(
        tiny_run(
            folder,
            "stages.0.steps=2",
            "stages.1.steps=1",
            f"evaluation={{sources: [{{path: {data}}}], max_new_tokens: {NEW}}}",
        )
    )
    missing, broken = (next((folder / "data").glob(f"*/{n}.png")) for n in (3, 5))
    missing.unlink()
    broken.write_bytes(broken.read_bytes()[: broken.stat().st_size // 2])  # its header is whole
    return folder / "run"


def result(run: Path) -> dict[str, Any]:
    return {name: value for name, value in json.loads((run / "eval.json").read_text()).items() if name != "seconds"}


def sampled(model: Any, spec: Any, prompts: Any, sampling: Sampling, _: Any, *rest: Any) -> list[Answer]:
    """Answers that are drawn by (place in the round, step), and that end at different lengths: a tiny model repeats itself."""
    return generate(model, spec, prompts, sampling.model_copy(update={"temperature": 1.0}), STOP, *rest)


@pytest.mark.parametrize(("count", "how"), [(2, []), (3, []), (2, ["--dp-shard", "1"])], ids=["2 ranks", "3 ranks", "whole models"])
def test_evaluation_on_ranks_is_that_of_one_process(
    run: Path, count: int, how: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Every answer, score and reject; an uneven number of rounds."""
    monkeypatch.setitem(exact_match.__kwdefaults__, "budget", Budget(150, 80))
    monkeypatch.setattr("eyeline.evals.exact_match.generate", sampled)
    evaluate(run)
    want = result(run)
    assert (want["questions"], want["rejected"]) == (22, {"missing_image": 1, "broken_image": 1})
    assert 0 < want["cut"] < want["questions"], "some answers end before others"
    (run / "eval.json").unlink()
    capfd.readouterr()
    children = ranks.start(count, lambda: run_command("eval", str(run), *how), tmp_path / "store")
    assert ranks.wait(children) == [0] * count
    assert result(run) == want
    assert not capfd.readouterr().err


def test_a_metric_that_fails_on_one_rank_ends_all_with_one_message(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def broken(self: Any, prediction: str, answer: str, row: Any) -> float:
        raise Refused("a metric of a test fails")

    monkeypatch.setitem(exact_match.__kwdefaults__, "budget", Budget(150, 80))

    def work() -> None:
        if os.environ["RANK"] == "1":
            monkeypatch.setattr("eyeline.evals.metric.Metric.score", broken)
        run_command("eval", str(run))

    assert ranks.wait(ranks.start(2, work, tmp_path / "store")) == [2, 2]
    assert capfd.readouterr().err.count("a metric of a test fails") == 1


@pytest.mark.parametrize(("shards", "count", "wanted"), [(-1, 4, (4, 1)), (2, 4, (2, 2)), (1, 3, (1, 3)), (-1, 1, (1, 1))])
def test_mesh_of_an_evaluation(shards: int, count: int, wanted: tuple[int, int]) -> None:
    sizes = sizes_for(shards, count)
    assert (sizes.dp_shard, sizes.dp_replicate) == wanted


@pytest.mark.parametrize(("shards", "count"), [(3, 4), (0, 2), (2, 1)])
def test_a_share_that_does_not_divide_the_ranks_is_refused(shards: int, count: int) -> None:
    with pytest.raises(Refused, match=rf"--dp-shard={shards}: wanted a number that divides the {count} rank"):
        sizes_for(shards, count)
