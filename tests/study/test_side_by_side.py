"""`eyeline report A B`: figures by hand, and runs that were not measured alike."""

import json
from pathlib import Path
from typing import Any

import pytest

from eyeline.core.errors import Refused
from eyeline.study.side_by_side import differing, known, numbers, side_by_side
from tests.command import Command
from tests.study.test_report import step_line

START: dict[str, Any] = {
    "kind": "start", "hardware": "a machine", "precision": "fp32", "world_size": 1, "packages": {"torch": "2.13.0", "numpy": "2.4"},
    "peak": {"name": "products", "flops_per_s": 1e9}, "resumed_from": None, "elapsed_s": 0.5,
    "wall": "2026-01-01T00:00:00+00:00", "attempt": 1,
}  # fmt: skip


def run_folder(folder: Path, *, steps: int = 5, step_s: float = 1.0, **stamps: Any) -> Path:
    """Three steps of 9 s warm up; then each takes `step_s`, with an MFU of a half and an HFU of 0.6."""
    folder.mkdir()
    lines = [START | stamps]
    for n in range(1, steps + 1):
        took = 9.0 if n <= 3 else step_s
        lines.append(step_line(n, step_s=took, mfu=0.5, hfu=0.6, flops={"language": 4_000}, data_wait_s=0.25))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_numbers_are_sums_divided_once_after_warm_up(tmp_path: Path) -> None:
    """90 tokens and 4,000 FLOPs per step: over 1 s, and over 2 s."""
    runs = [known(run_folder(tmp_path / name, step_s=step_s)) for name, step_s in (("a", 1.0), ("b", 2.0))]
    shown = numbers(runs)
    assert shown["tokens/s"] == ["90", "45"]
    assert shown["step time, median"] == ["1.000 s", "2.000 s"]
    assert shown["FLOP/s"] == ["4 k", "2 k"]
    assert shown["data wait"] == ["25.0%", "12.5%"]
    assert (shown["MFU"], shown["HFU"]) == (["50.0%"] * 2, ["60.0%"] * 2)
    assert (shown["tokens"], shown["samples"]) == (["450"] * 2, ["20"] * 2)
    assert "exact match" not in shown  # no run has one


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"hardware": "another"}, "hardware: a machine | another"),
        ({"precision": "bf16"}, "precision: fp32 | bf16"),
        ({"world_size": 2}, "world_size: 1 | 2"),
        ({"packages": {"torch": "2.11.0", "numpy": "2.4"}}, "packages.torch: 2.13.0 | 2.11.0"),
        ({"peak": {"name": "other products", "flops_per_s": 1e9}}, "peak: products | other products"),
    ],
)
def test_runs_that_were_not_measured_alike_are_refused(tmp_path: Path, other: dict[str, Any], named: str) -> None:
    folders = [run_folder(tmp_path / "a"), run_folder(tmp_path / "b", **other)]
    with pytest.raises(Refused) as refused:
        side_by_side(folders, different=False)
    assert named in str(refused.value) and "--different" in str(refused.value)
    assert str(refused.value).count(" | ") == 1  # and nothing else


def test_an_attempt_on_another_machine_makes_a_run_different(tmp_path: Path) -> None:
    folders = [run_folder(tmp_path / "a"), run_folder(tmp_path / "b")]
    with open(folders[1] / "metrics.jsonl", "a") as file:
        file.write(json.dumps(START | {"hardware": "another", "resumed_from": 5, "attempt": 2}) + "\n")
    with pytest.raises(Refused, match="hardware"):
        side_by_side(folders, different=False)


def test_what_an_attempt_alone_has_and_the_measured_rate_are_no_stamps(tmp_path: Path, eyeline: Command) -> None:
    a = run_folder(tmp_path / "a")
    b = run_folder(
        tmp_path / "b", elapsed_s=9.0, wall="2026-02-01T00:00:00+00:00", resumed_from=3, peak={"name": "products", "flops_per_s": 2e9}
    )
    done = eyeline("report", str(a), str(b))
    assert (done.code, done.err) == (0, "")
    assert "tokens/s" in done.out and "measured differently" not in done.out


def test_different_runs_are_shown_with_what_differs(tmp_path: Path, eyeline: Command) -> None:
    folders = [str(run_folder(tmp_path / "a")), str(run_folder(tmp_path / "b", steps=6, hardware="another"))]
    assert eyeline("report", *folders).code == 2
    done = eyeline("report", *folders, "--different")
    assert done.code == 0
    assert "measured differently" in done.out and "another" in done.out
    assert "different numbers of steps" in done.out
    assert eyeline("report", folders[0], "--different").code == 2


def test_values_that_differ_are_found_inside_of_mappings() -> None:
    records = [{"a": 1, "b": {"x": 1, "y": 2}, "c": None}, {"a": 1, "b": {"x": 3, "y": 2}, "c": "z"}]
    assert differing(records) == {"b.x": ["1", "3"], "c": ["–", "z"]}
