"""`compile: blocks` from a recipe: the losses of a run without, the same bits after a resume, graphs before the first step, refusals."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

import eyeline.train.loop as loop
from eyeline.core.errors import Refused, Stopped
from eyeline.core.files import read_lines
from eyeline.kernels import one_kernel
from eyeline.models import CONFIG, compiled
from eyeline.models.compiled import attention_problem, compiler_problem
from eyeline.models.shape import build
from eyeline.recipes.device import device_report
from eyeline.train import compile as module
from eyeline.train.run import Run
from eyeline.train.start import description
from tests.train.ends import end_of, losses, stopped_at
from tests.train.recipe import tiny_recipe, tiny_run


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Graphs as PyTorch traces them, without the minute that making kernels of them takes."""
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    monkeypatch.setattr(compiled, "compiler_obstacle", lambda _: None)
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def short_run(folder: Path, name: str, *overrides: str) -> Run:
    """Two stages of two steps, validated; gradient checkpointing in the second."""
    lengths = [f"stages.{n}.steps=2" for n in (0, 1)]
    return tiny_run(folder, f"out={folder / name}", *lengths, "stages.1.gradient_checkpointing=true", "validation_steps=1", *overrides)


@pytest.mark.usefixtures("traced")
def test_compiled_run_has_the_losses_of_one_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With Muon and AdamW, in full and by LoRA with dropout; no graph is made after the first step of a stage; a stop changes nothing."""
    plain, whole, stopped = short_run(tmp_path, "plain"), *(short_run(tmp_path, name, "compile=blocks") for name in ("whole", "stopped"))
    loop.train(plain)
    graphs: list[int] = []
    update = loop.update
    with monkeypatch.context() as patch:
        patch.setattr(loop, "update", lambda *x, **how: (graphs.append(counters["stats"]["unique_graphs"]), update(*x, **how))[1])
        loop.train(whole)
    assert graphs[0] == graphs[1] > 0
    assert graphs[2] == graphs[3] == counters["stats"]["unique_graphs"]
    assert losses(whole) == pytest.approx(losses(plain), rel=1e-4)
    seconds = [line["compile_s"] for line in read_lines(tmp_path / "whole" / "metrics.jsonl") if line["kind"] == "step"]
    assert [one > 0 for one in seconds] == [True, False, True, False]
    stopped_at(monkeypatch, {1, 3})
    for _ in range(2):
        with pytest.raises(Stopped):
            loop.train(stopped)
    loop.train(stopped)
    assert end_of(stopped) == end_of(whole)


@pytest.mark.usefixtures("traced")
def test_made_up_batches_have_images_where_the_budget_has_room(tmp_path: Path) -> None:
    from eyeline.train.trainable import plan_of

    run = tiny_run(tmp_path)
    plan = plan_of(run, 0, description(run).config)
    budget = run.stages[0].batch.budget
    shown, text = module.made_up_batches(plan, budget)
    assert shown.has_images and not text.has_images
    assert shown.counts.slots == text.counts.slots == budget.tokens
    assert [batch.has_images for batch in module.made_up_batches(plan, budget.__class__(budget.tokens, 0))] == [False]


def test_missing_compiler_is_refused_with_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "compiler_obstacle", lambda _: "InvalidCxxCompiler: No working C++ compiler found")
    run = tiny_run(tmp_path, "compile=blocks", f"out={tmp_path / 'run'}")
    with pytest.raises(Refused, match=r"No working C\+\+ compiler found. It needs a C\+\+ compiler such as g\+\+.*apt install g\+\+"):
        loop.train(run)
    assert not (tmp_path / "run").exists(), "before anything is written"
    report = device_report(run, description(run))
    assert len(report.problems) == 1 and "apt install g++" in report.problems[0]
    assert "compile: blocks" in report.lines[1]
    assert "Triton" in str(compiler_problem(torch.device("cuda")))
    loop.train(tiny_run(tmp_path, f"out={tmp_path / 'run'}", "stages.0.steps=1", "stages.1.steps=1"))  # without it nothing is asked


def test_attention_that_reads_bounds_on_the_host_is_refused(tmp_path: Path) -> None:
    config = tiny_recipe(tmp_path)["model"]["config"]
    model = build(CONFIG.validate_python(config), "meta")  # head dims of 8
    assert attention_problem(model, None, torch.float32) is None, "a CPU"
    assert attention_problem(model, (9, 0), torch.bfloat16) is None
    assert "precision: bf16" in str(attention_problem(model, (9, 0), torch.float32))
    assert "Set compile: none" in str(attention_problem(model, (7, 5), torch.bfloat16))


@pytest.mark.slow
def test_a_machine_without_a_compiler_says_so() -> None:
    """The real thing: PATH and CXX name none."""
    code = "import torch; from eyeline.models.compiled import compiler_problem; print(compiler_problem(torch.device('cpu')))"
    env = {"PATH": "/nowhere", "CXX": "/nowhere/g++", "TORCHINDUCTOR_CACHE_DIR": "/tmp/nowhere-cache"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    assert "apt install g++" in done.stdout
    assert one_kernel.compiler_obstacle(torch.device("cpu")) is None, "and here there is one"
