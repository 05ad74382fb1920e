"""Code of the user's own in a run: found from the recipe, copied into the run folder, and named where it changes or fails."""

import re
import shutil
from pathlib import Path

import pytest

from eyeline.core.errors import Refused
from eyeline.core.files import read_lines
from eyeline.core.yaml_text import write_yaml
from eyeline.evals.result import Result
from eyeline.recipes.problems import findings
from eyeline.recipes.read import read_recipe
from eyeline.study.evaluate import evaluate
from eyeline.study.report import write_report
from eyeline.train.loop import train
from eyeline.train.prepare import prepare_stage
from eyeline.train.run import Run
from tests.train.recipe import tiny_recipe

ROWS = """
def read(row):
    messages = [{"role": "user" if turn["from"] == "human" else "assistant", "content": turn["value"]} for turn in row["conversations"]]
    return row | {"messages": messages}
"""
SCORE = """
def score(prediction, answer, row):
    return 0.25 if row["id"] == "s0" else int(row["id"] == "s1")
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A recipe of two steps, with code in a folder next to it."""
    values = tiny_recipe(tmp_path)
    values["stages"] = values["stages"][:1]
    values["stages"][0]["steps"] = 2
    values["save_steps"] = 1
    values["stages"][0]["data"]["sources"][0]["layout"] = "code of mine/rows.py:read"
    values["evaluation"]["sources"][0]["layout"] = "code of mine/rows.py:read"
    values["evaluation"]["metric"] = "metric.py:score"
    (tmp_path / "code of mine").mkdir()
    (tmp_path / "code of mine" / "rows.py").write_text(ROWS)
    (tmp_path / "metric.py").write_text(SCORE)
    (tmp_path / "mine.yaml").write_text(write_yaml(values))
    return tmp_path / "mine.yaml"


def forget_the_end(run: Path) -> None:
    """Leave the checkpoint of the first step, as where the run was killed in the second."""
    shutil.rmtree(next((run / "checkpoints").glob("step-00000002-*")))


def losses(run: Run) -> list[float]:
    return [line["loss"] for line in read_lines(Path(run.out or "") / "metrics.jsonl") if line["kind"] == "step"]


def test_training_is_that_of_the_known_layout(recipe: Path, tmp_path: Path) -> None:
    run = read_recipe(str(recipe))
    assert list(findings(run)) == []
    train(run)
    known = read_recipe(str(recipe), ["stages.0.data.sources.0.layout=llava", f"out={tmp_path / 'known'}"])
    train(known)
    assert losses(run) == losses(known) and len(losses(run)) == 2


def test_a_run_folder_has_its_code_and_can_be_moved(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(read_recipe(str(recipe)))
    shutil.move(tmp_path / "run", tmp_path / "moved")
    shutil.rmtree(tmp_path / "code of mine")
    (tmp_path / "metric.py").unlink()
    result = evaluate(tmp_path / "moved", show=6)
    assert (result.overall.correct, result.questions, result.metric.partition(" ")[0]) == (1.25, 6, "metric.py:score")
    assert result.text_only.overall.correct == 1.25  # the metric looks at rows alone, and so it scores a guess as it does an answer
    assert Result.model_validate_json((tmp_path / "moved" / "eval.json").read_bytes()).accuracy == 1.25 / 6
    said = capsys.readouterr().out
    assert "(score 0.25, it is " in said and "metric.py:score" in said
    assert "Answers with a score below 1" in write_report(tmp_path / "moved").read_text()
    forget_the_end(tmp_path / "moved")
    train(read_recipe(str(tmp_path / "moved" / "recipe.yaml"), [f"out={tmp_path / 'moved'}"]))
    assert "resumed from step 1" in capsys.readouterr().out


def test_changed_layout_is_refused_changed_metric_is_reported(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(read_recipe(str(recipe)))
    (tmp_path / "metric.py").write_text(SCORE.replace("0.25", "0.5"))
    (tmp_path / "code of mine").rename(tmp_path / "elsewhere")
    recipe.write_text(recipe.read_text().replace("code of mine", "elsewhere"))
    forget_the_end(tmp_path / "run")
    train(read_recipe(str(recipe)))
    assert "changed since: metric.py, which the recipe names" in capsys.readouterr().out
    assert evaluate(tmp_path / "run").overall.correct == 1.5
    forget_the_end(tmp_path / "run")
    (tmp_path / "elsewhere" / "rows.py").write_text(ROWS + "\n# more")
    with pytest.raises(Refused, match=r"cannot be resumed: since its checkpoint of step 1, layout: .*rows\.py:read .* → .*rows\.py:read"):
        train(read_recipe(str(recipe)))
    kept = [path for path in (tmp_path / "run" / "code").glob("rows-*.py") if path.read_text() == ROWS]
    assert len(kept) == 1  # what would have to be restored


def test_prepared_data_of_a_function_are_trained_on_alike(recipe: Path, tmp_path: Path) -> None:
    """The sources need not be there, and the file may be in another folder: its name and the folder's identity tell it."""
    run = read_recipe(str(recipe))
    train(run)
    prepare_stage(run, None, tmp_path / "prepared", epochs=1, quality=None)
    (tmp_path / "code of mine").rename(tmp_path / "elsewhere")
    recipe.write_text(recipe.read_text().replace("code of mine", "elsewhere"))
    shutil.rmtree(tmp_path / "data" / "pictures")
    again = read_recipe(str(recipe), [f"out={tmp_path / 'again'}", f"stages.0.data.prepared={tmp_path / 'prepared'}"])
    train(again)
    assert losses(again) == losses(run) and len(losses(run)) == 2


def test_check_tells_every_fault_of_code_with_its_line(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "code of mine" / "rows.py").write_text("def read(row):\n    return row['messages']")
    (tmp_path / "metric.py").write_text("\ndef score(prediction): ...")
    said = [line.text for line in findings(read_recipe(str(recipe)))]
    rows = r"rows.py:read makes a sample of none of its first 20 rows. The first: .*rows\.py:2: KeyError: 'messages'"
    assert [line for line in said if line.startswith("evaluation.metric: ") and "metric.py:2: score does not take the arguments" in line]
    assert any(line.startswith("stages.whole.data: ") and re.search(rows, line) for line in said)


@pytest.mark.parametrize(
    ("score", "said"),
    [
        ("    return 1 / 0", r"metric\.py:2: ZeroDivisionError: division by zero\. It was to score .* where '.*' is right"),
        ("    return 1.5", r"metric\.py: score returned 1\.5 for .*; wanted a number from 0 to 1"),
        ("    return None", r"metric\.py: score returned None for .*; wanted a number from 0 to 1"),
    ],
)
def test_a_metric_that_fails_stops_the_evaluation(recipe: Path, tmp_path: Path, score: str, said: str) -> None:
    train(read_recipe(str(recipe)))
    (tmp_path / "run" / "code" / "metric.py").write_text(f"def score(prediction, answer):\n{score}")
    with pytest.raises(Refused, match=said):
        evaluate(tmp_path / "run")
    assert not (tmp_path / "run" / "eval.json").exists()


def test_two_files_of_one_name_are_refused(recipe: Path, tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"are two code files with the same name, and a run keeps copies of them by name\. Rename one"):
        read_recipe(str(recipe), [f"evaluation.metric={tmp_path}/rows.py:score"])


def test_code_of_an_override_is_found_from_the_current_folder(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    run = read_recipe(str(recipe), ["evaluation.metric=other.py:score"])
    assert run.evaluation and run.evaluation.metric == f"{tmp_path}/here/other.py:score"
    assert run.stages[0].data.sources[0].layout == f"{tmp_path}/code of mine/rows.py:read"
