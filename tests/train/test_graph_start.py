"""`cuda_graph: true` from a recipe: the losses of a run without, the same bits after a resume, what `check` says, and what is refused. In
place of a capture the work runs again."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import eyeline.train.loop as loop
from eyeline.core.errors import Refused, Stopped
from eyeline.core.files import read_lines
from eyeline.models import CONFIG
from eyeline.models.shape import shape
from eyeline.parallel.launch import machine
from eyeline.recipes.device import device_report
from eyeline.recipes.problems import problems_of_ranks, settings_problems
from eyeline.train import graph_start
from eyeline.train.cuda_graph import GraphedUpdate, Work
from eyeline.train.graph_start import graph_problems, model_problem, refuse_without_graphs
from eyeline.train.run import Run
from eyeline.train.trainable import needed_memory
from tests.train.ends import end_of, losses
from tests.train.recipe import tiny_run


def warmed(work: Work) -> Work:
    """In place of a capture, with a run to warm up."""
    work()
    return work


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_start, "captures", lambda _: warmed)
    monkeypatch.setattr(graph_start, "device_problem", lambda *_: None)


def short_run(folder: Path, name: str, *overrides: str) -> Run:
    """Two stages of three steps, validated, in bf16 with AdamW: all parts in full, then LoRA with dropout."""
    lengths = [f"stages.{n}.steps=3" for n in (0, 1)]
    adamw = "stages.0.optimizer={kind: adamw, weight_decay: 0.1}"
    return tiny_run(folder, f"out={folder / name}", "precision=bf16", adamw, *lengths, "validation_steps=2", *overrides)


@pytest.mark.usefixtures("captured")
def test_graphed_run_has_the_losses_of_one_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step by graphs, captured before the first of each stage; a stop changes nothing."""
    plain, whole, stopped = short_run(tmp_path, "plain"), *(short_run(tmp_path, name, "cuda_graph=true") for name in ("whole", "stopped"))
    loop.train(plain)
    monkeypatch.setattr(loop, "update", lambda *_, **__: pytest.fail("a step without graphs"))
    loop.train(whole)
    assert losses(whole) == pytest.approx(losses(plain), rel=2e-2), "in bf16"
    steps = [line for line in read_lines(tmp_path / "whole" / "metrics.jsonl") if line["kind"] == "step"]
    assert [line["compile_s"] > 0 for line in steps] == [True, False, False] * 2
    assert [line["slots"] for line in steps] == [320] * 6, "what a graph pads is no token of the step"
    stops: list[Any] = []
    graphed, signal = GraphedUpdate.update, loop.StopSignal

    def update(self: GraphedUpdate, data: Any, seed: int, step: int, *rest: Any) -> Any:
        if step + 1 in (2, 4):
            stops[-1].asked = "SIGTERM"
        return graphed(self, data, seed, step, *rest)

    monkeypatch.setattr(loop, "StopSignal", lambda *tell, **how: stops.append(signal(*tell, **how)) or stops[-1])
    monkeypatch.setattr(GraphedUpdate, "update", update)
    for _ in range(2):
        with pytest.raises(Stopped):
            loop.train(stopped)
    loop.train(stopped)
    assert end_of(stopped) == end_of(whole)


@pytest.mark.usefixtures("captured")
def test_step_that_is_not_finite_is_skipped_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = short_run(tmp_path, "bad", "cuda_graph=true", "stages.0.steps=3", "stages.1.steps=1")
    original, calls = GraphedUpdate._pass, iter(range(1000))

    def spoilt(self: GraphedUpdate, batch: Any) -> None:
        original(self, batch)
        if next(calls) == 6:  # four to capture, two in the first step
            self._loss.fill_(float("nan"))

    monkeypatch.setattr(GraphedUpdate, "_pass", spoilt)
    loop.train(run)
    outcomes = [line["outcome"] for line in read_lines(tmp_path / "bad" / "metrics.jsonl") if line["kind"] == "step"]
    assert outcomes == ["applied", "not finite", "applied", "applied"]
    assert [folder.name for folder in (tmp_path / "bad" / "evidence").iterdir()] == ["step-00000002"]


def test_cpu_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    run = short_run(tmp_path, "run", "cuda_graph=true")
    with pytest.raises(Refused, match="cuda_graph captures what a GPU runs, and this run is on cpu"):
        loop.train(run)
    assert not (tmp_path / "run").exists()
    with pytest.raises(Refused, match=r"on cpu\. Leave it out\n  cuda_graph with compile: blocks"):  # as `bench step` asks
        refuse_without_graphs(run.model_copy(update={"compile": "blocks"}), machine("cpu"))
    report = device_report(run, None)
    assert [line[:39] for line in report.problems] == ["cuda_graph captures what a GPU runs, an"]
    assert "below about 2,048 tokens per micro-batch" in report.lines[1]


REFUSED = {
    "precision=fp32": "cuda_graph with precision: fp32: attention reads document bounds",
    "precision=fp16": "cuda_graph with precision: fp16: the loss scale is a number of the host",
    "compile=blocks": "cuda_graph with compile: blocks is not there yet",
    "float8=rowwise": "cuda_graph with float8: rowwise is not there yet",
    "top_k_probabilities=3": "cuda_graph with top_k_probabilities",
    "stages.0.optimizer={kind: muon}": "stages.whole.optimizer.kind: muon with cuda_graph",
    "stages.0.optimizer={kind: adamw_8bit}": "stages.whole.optimizer.kind: adamw_8bit with cuda_graph",
    "stages.0.optimizer={kind: adamw, state_dtype: bf16}": "stages.whole.optimizer with cuda_graph: with state_dtype",
    "stages.0.gradient_checkpointing={offload: true}": "stages.whole.gradient_checkpointing.offload with cuda_graph",
    "stages.0.distill={kl: 1.0}": "stages.whole.distill with cuda_graph",
    "stages.1.trains.language.quantize=nf4": "stages.adapt.trains.language.quantize with cuda_graph",
}


@pytest.mark.parametrize("setting", REFUSED)
def test_pair_that_cannot_be_captured_is_refused(tmp_path: Path, setting: str) -> None:
    found = [*settings_problems(short_run(tmp_path, "run", "cuda_graph=true", setting))]
    assert any(line.startswith(REFUSED[setting]) for line in found)
    assert not [*graph_problems(short_run(tmp_path, "run", setting))]


def test_all_problems_are_told_at_once_and_ranks_among_them(tmp_path: Path) -> None:
    settings = ("precision=fp32", "compile=blocks", "stages.0.optimizer={kind: muon}", "stages.0.distill={kl: 1.0}")
    run = short_run(tmp_path, "run", "cuda_graph=true", *settings)
    assert len([*graph_problems(run)]) == len(settings)
    assert "cuda_graph is for one device, and there are 2 ranks" in next(
        problems_of_ranks(short_run(tmp_path, "run", "cuda_graph=true"), 2)
    )


SIZES = {"vocab_size": 300, "hidden_size": 16, "layers": 4, "heads": 2, "kv_heads": 1, "intermediate_size": 24, "tie_embeddings": True}
DELTA = {"key_heads": 2, "value_heads": 4, "key_dim": 16, "value_dim": 16}


def test_models_that_read_on_the_host_are_refused() -> None:
    experts = {"num_experts": 8, "experts_per_token": 2, "intermediate_size": 32}
    languages = {
        "mixture of experts": {"family": "qwen3", "head_dim": 16, "experts": experts, **SIZES},
        "Gated DeltaNet": {"family": "qwen3_5", "head_dim": 32, "mrope_section": (2, 1, 1), "delta": DELTA, **SIZES},
    }
    for name, language in languages.items():
        problem = model_problem(shape(CONFIG.validate_python({"family": "text", "language": language}), trains={}))
        assert problem is not None and name in problem
    assert (
        model_problem(shape(CONFIG.validate_python({"family": "text", "language": {"family": "qwen3", "head_dim": 16, **SIZES}}))) is None
    )


def test_check_says_when_graphs_are_worth_it(tmp_path: Path) -> None:
    gpu = torch.device("cuda")
    small, off = short_run(tmp_path, "run", "cuda_graph=true"), short_run(tmp_path, "run")
    large = short_run(tmp_path, "run", "cuda_graph=true", "stages.1.batch.max_tokens=4096")
    assert len([*graph_start.worth_lines(small, gpu)]) == 1
    assert "stage adapt has 4,096 tokens per micro-batch" in [*graph_start.worth_lines(large, gpu)][1]
    assert [line[:31] for line in graph_start.worth_lines(off, gpu)] == ["cuda_graph: true may save time:"]
    assert not [*graph_start.worth_lines(off, torch.device("cpu"))]
    assert not [*graph_start.worth_lines(short_run(tmp_path, "run", "compile=blocks"), gpu)], "which it does not go with"


def test_memory_is_that_of_padded_batches(tmp_path: Path) -> None:
    run, on = short_run(tmp_path, "run"), short_run(tmp_path, "run", "cuda_graph=true")
    assert run.model.config is not None
    plain, padded = (needed_memory(one, 1, run.model.config, None) for one in (run, on))
    assert replace(padded, activations=0) == replace(plain, activations=0)
    assert padded.activations > plain.activations


def test_memory_is_counted_where_graphs_are_refused(tmp_path: Path) -> None:
    """`check` reports it next to the refusal."""
    plain, refused = (short_run(tmp_path, "run", *settings) for settings in (["precision=fp32"], ["precision=fp32", "cuda_graph=true"]))
    assert plain.model.config is not None
    assert needed_memory(refused, 0, plain.model.config, None) == needed_memory(plain, 0, plain.model.config, None)
