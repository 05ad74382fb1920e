"""What `eyeline eval` prints with the scores: questions that are trained on are counted, and so are answers that are given."""

import json
import shutil
from pathlib import Path

import pytest

from eyeline.core.errors import Refused
from eyeline.data.sets import training_samples
from eyeline.study.evaluate import evaluate, remarks, scores
from eyeline.study.report import write_report
from eyeline.train.loop import train
from tests.train.recipe import tiny_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that is evaluated on the file that it learns from, a fifth of whose images it holds out."""
    folder = tmp_path_factory.mktemp("evaluated")
    data = str(folder / "data" / "data.json")
    train(tiny_run(folder, "stages.0.steps=1", "stages.1.steps=1", f"evaluation={{sources: [{{path: {data}}}], max_new_tokens: 2}}"))
    return folder / "run"


def test_evaluation_questions_trained_on_are_counted(run: Path) -> None:
    rows = json.loads((run.parent / "data" / "data.json").read_text())
    learned = {sample.id for sample in training_samples(tiny_run(run.parent).stages[0].data)}
    found = evaluate(run)
    assert found.questions == len(rows)
    assert 0 < found.also_trained_on == len(learned) < len(rows)
    assert found.given == sum(len(row["conversations"]) == 4 for row in rows)
    said = "\n".join(remarks(found))
    assert f"{found.also_trained_on} of {len(rows)} questions are also trained on" in said
    assert f"{found.given} earlier answers were given as context" in said
    page = write_report(run).read_text()
    assert "exact match, questions partly trained on" in page
    assert f"{found.also_trained_on} of {len(rows)} questions are also trained on" in page


def test_a_run_of_an_earlier_format_is_refused_in_one_message(run: Path, tmp_path: Path) -> None:
    old = tmp_path / "run"
    shutil.copytree(run, old)
    described = json.loads((old / "model" / "eyeline.json").read_text())
    (old / "model" / "eyeline.json").write_text(json.dumps(described | {"version": 1}))
    (old / "recipe.yaml").write_text((run / "recipe.yaml").read_text().replace("vocab_size", "vocabulary"))
    wanted = r"model/eyeline\.json has format version 1; this Eyeline reads 2\. .*: import the model again, or train the run again\.$"
    for command in (lambda: evaluate(old), lambda: train(tiny_run(run.parent, f"out={old}"))):
        with pytest.raises(Refused, match=wanted):
            command()


def test_a_limit_counts_what_it_asks(run: Path) -> None:
    whole, first = evaluate(run), evaluate(run, limit=5)
    assert first.questions == 5
    assert 0 <= first.also_trained_on <= min(5, whole.also_trained_on)


def test_what_is_new_is_not_warned_of(run: Path) -> None:
    found = evaluate(run).model_copy(update={"also_trained_on": 0, "given": 0})
    assert [line.partition(":")[0] for line in remarks(found)] == ["text-only baseline"]


def test_one_kind_without_a_name_is_the_row_of_all(run: Path) -> None:
    found = evaluate(run)
    assert scores(found).row_count == len(found.by_kind) + 1
    bare = found.model_copy(update={"by_kind": {"": found.overall}})
    assert scores(bare).row_count == 1
