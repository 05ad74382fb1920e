"""The quick start's promise, whole: `make test-slow`."""

import json
from pathlib import Path

import pytest

from eyeline.core.files import read_lines
from tests.command import Command


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_at_least_ninety_percent_on_the_whole_test_split(seed: int, eyeline: Command, tmp_path: Path) -> None:
    """Trained on the training split, asked every question of the test split. The time is printed, and not asserted."""
    assert eyeline("train", "easyvqa-tiny", f"seed={seed}", "out=run").code == 0
    assert eyeline("eval", "run").code == 0
    result = json.loads((tmp_path / "run" / "eval.json").read_text())
    seconds = sum(line["step_s"] for line in read_lines(tmp_path / "run" / "metrics.jsonl") if line["kind"] == "step")
    kinds = {kind: round(score["accuracy"], 4) for kind, score in result["by_kind"].items()}
    print(f"seed {seed}: accuracy {result['accuracy']:.4f}, {kinds}, trained in {seconds:.0f} s")  # noqa: T201
    assert result["questions"] == 9673
    assert result["text_only"]["overall"]["accuracy"] == pytest.approx(0.670, abs=0.001)
    assert result["accuracy"] >= 0.90
