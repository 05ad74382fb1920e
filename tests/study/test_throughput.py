"""`eyeline bench`: throughput and MFU of a run by hand, from a metrics.jsonl that the test writes. No time is asserted."""

from pathlib import Path

import pytest
import torch

from eyeline.core.errors import Refused
from eyeline.core.files import append_line
from eyeline.study.bench import lines, throughput
from eyeline.train.peak import matmul_rate
from tests.command import Command


def step(number: int, seconds: float, wait: float, attempt: int = 1, outcome: str = "applied") -> dict[str, object]:
    counts = dict.fromkeys(("slots", "visual", "text", "supervised", "documents", "images", "patches"), 1)
    return counts | {
        "kind": "step", "stage": "tune", "stage_index": 0, "step": number, "global_step": number, "loss": 1.0, "grad_norm": 1.0,
        "applied": outcome == "applied", "outcome": outcome, "lr": {"language": 1e-3}, "padding": 0.0, "memory_bytes": 1, "wall": "",
        "attempt": attempt, "real": 500, "real_tokens_per_s": 500 / seconds, "step_s": seconds, "data_wait_s": wait,
        "compute_s": seconds - wait, "flops_per_s": 1e12 / seconds,
    }  # fmt: skip


def run_folder(folder: Path, steps: list[dict[str, object]]) -> Path:
    folder.mkdir(exist_ok=True)
    for line in ({"kind": "start", "precision": "bf16", "hardware": "a device", "resumed_from": None}, *steps):
        append_line(folder / "metrics.jsonl", line)
    return folder


def test_throughput_is_of_steps_after_the_warm_up(tmp_path: Path) -> None:
    """Steps of 2, 4 and 10 s count; three of 50 s warm up, and one of 100 s that was not applied is left out."""
    timed = [step(n, 50.0, 50.0) for n in (1, 2, 3)] + [step(4, 2.0, 1.0), step(5, 4.0, 1.0), step(6, 10.0, 2.0)]
    found = throughput(run_folder(tmp_path, [*timed, step(7, 100.0, 0.0, outcome="not finite")]))
    assert (found.precision, found.hardware, found.steps) == ("bf16", "a device", 3)
    assert (found.step_s, found.tokens_per_s, found.flops_per_s, found.data_wait) == (4.0, 125.0, 2.5e11, 0.25)
    said = "\n".join(lines(found, peak=1e12))
    assert "median of 3 steps in bf16: 4.000 s per step, 125 tokens/s, 25.0% of the time" in said
    assert "0.250 TFLOP/s; MFU 25.0%" in said


def test_throughput_is_of_the_last_attempt(tmp_path: Path) -> None:
    steps = [step(n, 1.0, 0.0) for n in range(1, 9)] + [step(n, 2.0, 0.0, attempt=2) for n in range(9, 14)]
    assert throughput(run_folder(tmp_path, steps)).step_s == 2.0


def test_bench_refuses_what_is_no_run_or_too_short(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="not a run folder"):
        throughput(tmp_path)
    with pytest.raises(Refused, match="Train for more steps"):
        throughput(run_folder(tmp_path, [step(n, 1.0, 0.0) for n in (1, 2, 3)]))


def test_matmul_rate_counts_two_flops_per_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that moves 0.05 s whenever it is read: a round ends after five products of 8 × 8."""
    ticks = iter(range(10_000))
    monkeypatch.setattr("eyeline.train.peak.time.perf_counter", lambda: next(ticks) * 0.05)
    rate = matmul_rate(torch.device("cpu"), torch.float32, side=8, rounds=3, round_s=0.22)
    assert rate == pytest.approx(2 * 8**3 * 5 / 0.25)


def test_bench_prints_the_machine_and_a_run(eyeline: Command, tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", [step(n, 1.0, 0.0) for n in range(1, 6)])
    done = eyeline("bench", "machine", str(run))
    assert done.code == 0
    assert "matrix products in fp32" in done.out
    assert "MFU" in done.out
    assert "the run was on a device" in done.err
