"""What a run makes of samples that cannot be used: how it ends, what it says, and what it writes."""

import json
from pathlib import Path
from typing import Any

import pytest

from eyeline.core.files import read_lines
from eyeline.train.run import to_yaml
from tests.command import Command
from tests.train.recipe import tiny_run


def spoil(folder: Path, images: int, absent: bool = False) -> None:
    """Truncate the first `count` images behind their headers, or delete them."""
    for n in range(images):
        image = folder / "data" / "pictures" / f"{n}.png"
        image.unlink() if absent else image.write_bytes(image.read_bytes()[:60])


def command(folder: Path, *overrides: str) -> list[str]:
    """One stage of the tiny recipe, without anything held out: 24 rows, of which 4 are text alone."""
    run = tiny_run(folder, "stages.whole.data.validation_fraction=0", "stages.adapt.data.validation_fraction=0", *overrides)
    recipe = json.loads(run.model_dump_json())
    (folder / "recipe.yaml").write_text(to_yaml(run.model_validate(recipe | {"stages": recipe["stages"][:1]})))
    return ["train", "recipe.yaml"]


def lines(folder: Path, kind: str = "step") -> list[dict[str, Any]]:
    return [line for line in read_lines(folder / "run" / "metrics.jsonl") if line["kind"] == kind]


@pytest.mark.parametrize("workers", [0, 1])
def test_run_whose_images_break_in_decoding_ends_with_code_3(tmp_path: Path, eyeline: Command, workers: int) -> None:
    """Nothing of it is known until the images are decoded, the last of them in the last packs."""
    arguments = command(tmp_path, "stages.whole.steps=null", "stages.whole.epochs=1", f"stages.whole.data.workers={workers}")
    spoil(tmp_path, 24)
    done = eyeline(*arguments)
    assert done.code == 3, done.err
    assert "broken_image" in done.err and "of 24 samples were rejected" in done.err
    assert "done:" not in done.out


def test_run_whose_every_step_had_no_labels_ends_with_code_3(tmp_path: Path, eyeline: Command) -> None:
    """It ends within its data, an image a step, of which the others might be sound."""
    arguments = command(tmp_path, "stages.whole.batch.packs_per_step=1", "stages.whole.batch.max_patches=16", "stages.whole.steps=1")
    spoil(tmp_path, 24)
    rows = json.loads((tmp_path / "data" / "data.json").read_text())
    (tmp_path / "data" / "data.json").write_text(json.dumps([row for row in rows if "image" in row]))
    done = eyeline(*arguments)
    assert done.code == 3, done.out + done.err
    assert "done:" not in done.out and not list((tmp_path / "run").glob("checkpoints/*"))


def test_step_without_labels_has_no_loss_anywhere(tmp_path: Path, eyeline: Command) -> None:
    """20 of 24 rows break, which the limit allows: some packs have no label."""
    arguments = command(
        tmp_path, "stages.whole.data.max_reject_rate=0.9", "logging_steps=1", "stages.whole.batch.packs_per_step=1", "stages.whole.steps=8"
    )
    spoil(tmp_path, 24)
    done = eyeline(*arguments)
    assert done.code == 0, done.err
    without = [line for line in lines(tmp_path) if line["outcome"] == "no targets"]
    assert without and all(line["loss"] is None and line["grad_norm"] is None and not line["applied"] for line in without)
    assert "loss no targets" in done.out and "grad norm –" in done.out
    assert "samples skipped: broken_image" in done.out
    assert lines(tmp_path)[-1]["rejected"] <= 19 + 1
    page = (tmp_path / "run" / "report.html").read_text()
    assert "broken_image" in page and "not finite" not in page


def test_check_and_train_agree_at_the_limit(tmp_path: Path, eyeline: Command) -> None:
    """1 of 24 is 4.2 %: allowed by 5 %, in all epochs; 2 are not, in both."""
    arguments = command(tmp_path, "stages.whole.data.max_reject_rate=0.05", "stages.whole.steps=12")
    spoil(tmp_path, 1, absent=True)
    assert eyeline("check", *arguments[1:]).code == 0
    done = eyeline(*arguments)
    assert done.code == 0, done.err
    assert "whole: 1 of 24 samples skipped: missing_image 1× (the file does not exist)" in done.out
    assert lines(tmp_path)[-1]["rejected"] == 1
    (tmp_path / "data" / "pictures" / "1.png").unlink()
    checked = eyeline("check", *arguments[1:], f"out={tmp_path / 'other'}")
    assert checked.code == 2 and "2 of 24 examined training samples would be rejected" in checked.out
    done = eyeline(*arguments, f"out={tmp_path / 'other'}")
    assert done.code == 3 and "2 of 24 samples were rejected" in done.err
