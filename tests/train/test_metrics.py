"""The figures of a step's line, by hand."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import eyeline.train.loop as loop
from eyeline.core.batch import IGNORE
from eyeline.core.files import read_lines
from eyeline.models.decoder import Head
from eyeline.models.flops import NONE, Flops
from eyeline.parallel.idle import DeviceIdle
from eyeline.parallel.launch import Machine
from eyeline.train import peak
from eyeline.train.metrics import Clock, with_starved
from eyeline.train.peak import peak_stamp
from eyeline.train.schedule import factor
from eyeline.train.trainable import rates
from eyeline.train.unchanged import sampled_weights, unchanged_since
from tests.train.figures import step_figures
from tests.train.recipe import tiny_run


def test_rates_of_a_line_leave_padding_out() -> None:
    """90 of 100 slots in half a second; 3 products in the forward pass and 6 in the backward pass, and 1 again."""
    flops = Flops({**NONE.forward, "language": 3_000}, {**NONE.backward, "language": 6_000}, 1_000)
    line = step_figures(flops=flops, peak=90_000.0).line()
    assert line["real_tokens_per_s"] == 180
    assert line["padding"] == pytest.approx(0.1)
    assert line["flops_per_s"] == 18_000 and line["flops_recomputed"] == 1_000
    assert line["mfu"] == 0.2
    assert line["hfu"] == pytest.approx(0.2 * 10 / 9)
    assert line["flops"]["language"] == 9_000


def test_every_second_of_a_step_has_a_name() -> None:
    now = 0.0
    clock = Clock(lambda: now)
    with clock.spending("data_wait"):
        now += 2
    now += 1
    with clock.spending("compute"):
        now += 4
    with clock.spending("data_wait"):
        now += 8
    nothing = {"startup": 0, "compile": 0, "communication": 0, "validation": 0, "checkpoint": 0}
    assert clock.lap() == {"step": 15, "data_wait": 10, "compute": 4, "other": 1} | nothing
    now += 16
    assert clock.lap() == {"step": 16, "data_wait": 0, "compute": 0, "other": 16} | nothing


def test_seconds_inside_of_others_are_counted_once() -> None:
    """A sum over ranks in the middle of an update; and a process that had run for 3 s before."""
    now = 103.0
    clock = Clock(lambda: now, started=100.0)
    with clock.spending("compute"):
        now += 4
        with clock.spending("communication"):
            now += 2
            assert clock.phase == "communication"
        now += 1
        assert clock.phase == "compute"
    lap = clock.lap()
    assert (lap["startup"], lap["compute"], lap["communication"], lap["other"], lap["step"]) == (3, 5, 2, 0, 10)
    assert clock.elapsed() == 10 and clock.named() == 7


def test_what_a_device_waited_for_the_host_is_taken_out_of_other() -> None:
    seconds = {"step": 10.0, "compute": 6.0, "other": 4.0}
    assert with_starved(seconds, 1.5) == {"step": 10.0, "compute": 6.0, "host_starved": 1.5, "other": 2.5}
    assert with_starved(seconds, 9.0)["other"] == 0.0  # never more than there is


def test_device_idle_leaves_out_what_has_a_name() -> None:
    """Two seconds between two updates, half a second of which the loop waited for data."""

    class At:
        def record(self) -> None:
            self.ms = now * 1000

        def elapsed_time(self, later: "At") -> float:
            return later.ms - self.ms

    now, named = 1.0, 0.0
    idle = DeviceIdle((At(), At()), lambda: named)
    idle.update_starts()
    assert idle.seconds() == 0.0  # nothing was before the first one
    idle.update_ended()
    now, named = 3.0, 0.5
    idle.update_starts()
    assert idle.seconds() == 1.5
    idle.update_ended()
    assert idle.seconds() == 0.0


def test_weights_that_stay_the_same_in_bfloat16_are_counted() -> None:
    """After 1.0 the next value in bfloat16 is 1.0078: of 4 weights, two move far enough; of 20,000, each second one is a sample."""
    model = nn.ParameterList([torch.ones(4), torch.ones(20_000), torch.ones(3)])
    model[2].requires_grad_(False)
    before = sampled_weights(model)
    with torch.no_grad():
        model[0] += torch.tensor([0.001, 0.003, 0.01, -0.01])
        model[1][:5_000] += 1
    same = unchanged_since(before, model)
    assert same.weights == 20_004
    assert same.unchanged == 2 + 15_000


def test_published_peak_is_of_a_gpu_and_measured_of_a_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Machine(torch.device("cuda"), "NVIDIA H100 80GB HBM3", 1)
    assert peak_stamp(gpu, "bf16", []) == {"name": "NVIDIA H100 80GB HBM3, published dense bf16 peak", "flops_per_s": 9.89e14}
    assert peak_stamp(gpu, "fp32", []) is None
    monkeypatch.setattr(peak, "_measured", lambda dtype, threads: (5e10, 1024))
    here = Machine(torch.device("cpu"), "a processor", 2)
    measured = {"name": "a processor, 2 threads, fp32 products of 1024 × 1024, measured", "flops_per_s": 5e10}
    assert peak_stamp(here, "fp32", []) == measured
    stamps = {"hardware": "a processor", "threads": 2, "precision": "fp32", "peak": {"name": "then", "flops_per_s": 4e10}}
    assert peak_stamp(here, "fp32", [stamps]) == stamps["peak"]  # of an attempt before, so that its MFU means the same
    assert peak_stamp(here, "fp32", [stamps | {"threads": 1}]) == measured


def test_each_step_has_its_rates_and_its_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates go by the step of the stage, and dropout by the step and seed of the whole run."""
    seen: list[tuple[int, int, dict[str, float]]] = []
    real = loop.update

    def update(model: Any, optimizers: Any, *args: Any, seed: int, step: int, **more: Any) -> Any:
        seen.append((seed, step, {group["part"]: group["lr"] for optimizer in optimizers for group in optimizer.param_groups}))
        return real(model, optimizers, *args, seed=seed, step=step, **more)

    monkeypatch.setattr(loop, "update", update)
    run = tiny_run(tmp_path, "seed=5")
    loop.train(run)
    assert [(seed, step) for seed, step, _ in seen] == [(5, step) for step in range(8)]
    wanted = [
        {part: rate * factor(stage.schedule, step, 4) for part, rate in rates(stage).items()} for stage in run.stages for step in range(4)
    ]
    assert [lr for *_, lr in seen] == wanted
    assert [line["lr"] for line in read_lines(tmp_path / "run" / "metrics.jsonl") if line["kind"] == "step"] == wanted


def test_probabilities_are_means_over_supervised_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every logged step, against the full logits of each micro-batch before its update."""
    wanted: list[Tensor] = []
    forward = Head.forward

    def seen(self: Head, x_TD: Tensor, rows_L: Tensor, labels_L: Tensor | None, *others: Any) -> Any:
        if labels_L is not None:
            p_LV = (x_TD[rows_L] @ self.weight.T).softmax(-1).detach()
            wanted.append(p_LV[labels_L != IGNORE].sort(-1, descending=True).values[:, :2])
        return forward(self, x_TD, rows_L, labels_L, *others)

    monkeypatch.setattr(Head, "forward", seen)
    loop.train(
        tiny_run(tmp_path, "top_k_probabilities=2", "logging_steps=2", "stages.adapt.steps=1", "stages.whole.batch.packs_per_step=2")
    )
    lines = [line for line in read_lines(tmp_path / "run" / "metrics.jsonl") if line["kind"] == "step"]
    assert [line["top_k"] is not None for line in lines] == [False, True, False, True, False]
    first, second = torch.cat(wanted[2:4]).mean(0).tolist()
    assert lines[1]["top_k"] == {"1": pytest.approx(first, rel=1e-5), "2": pytest.approx(second, rel=1e-5)}
