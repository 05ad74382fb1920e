"""Resumed = uninterrupted, bit for bit: after an asked stop at every step, a kill in mid-step, and signals to a real process."""

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import signal
import time
from pathlib import Path
from typing import Any, TextIO

import pytest
from rich.console import Console

import eyeline.train.loop as loop
import eyeline.train.start as start
from eyeline.bundle.bundle import open_bundle
from eyeline.bundle.exporting import export
from eyeline.bundle.fill import load
from eyeline.checkpoint import store
from eyeline.core.batch import Batch
from eyeline.core.errors import Abandoned, NotFinite, OutOfMemory, Refused, RunLocked, Stopped, TooManyRejects
from eyeline.core.files import read_lines
from eyeline.core.log import say
from eyeline.data import counts
from eyeline.data.fetch_thread import FetchThread
from eyeline.models import llava
from eyeline.recipes.check import check
from eyeline.recipes.read import override, run_of
from eyeline.train import metrics
from eyeline.train import stage as stages
from eyeline.train.run import Run, to_yaml
from eyeline.train.stop import StopSignal, sole_owner
from tests.command import Command
from tests.forked import Forked, forked_command
from tests.train.ends import end_of, losses, stopped_at
from tests.train.recipe import tiny_recipe, tiny_run, write_data

STEPS = 8


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, dict[int, float]]:
    """The data's folder, the digest of the last checkpoint, and every loss of a run that was left alone."""
    folder = tmp_path_factory.mktemp("whole")
    run = tiny_run(folder)
    loop.train(run)
    return folder, end_of(run), losses(run)


@pytest.mark.parametrize("steps", [{4}, set(range(1, STEPS))])
def test_stopped_and_resumed_is_bit_equal(uninterrupted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: set[int]) -> None:
    """A stop at every step of both stages, the stage border among them, with dropout and augmentation on."""
    folder, whole, whole_losses = uninterrupted
    run = tiny_run(folder, f"out={tmp_path / 'run'}")
    stopped_at(monkeypatch, steps)
    for step in sorted(steps):
        with pytest.raises(Stopped):
            loop.train(run)
        newest = store.newest(tmp_path / "run" / "checkpoints")
        assert newest is not None
        assert newest.step == step
    loop.train(run)
    assert end_of(run) == whole
    assert losses(run) == whole_losses


@pytest.mark.parametrize("ahead", ["always one step ahead", "never ahead"])
def test_position_saved_is_of_steps_trained_not_of_those_fetched(
    uninterrupted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: str
) -> None:
    """When a checkpoint is written the thread has the next step, or has not begun with it."""
    folder, whole, whole_losses = uninterrupted
    fetched, start, save = list[int](), FetchThread.start, loop.save

    def waited_for(thread: FetchThread) -> None:
        start(thread)
        thread.settle()

    monkeypatch.setattr(FetchThread, "start", waited_for if ahead.startswith("always") else lambda _: None)
    monkeypatch.setattr(
        loop, "save", lambda process, *rest, **how: fetched.append(process.fetching._next is not None) or save(process, *rest, **how)
    )
    run = tiny_run(folder, f"out={tmp_path / 'run'}", "save_steps=1")
    stopped_at(monkeypatch, {1, 3, 6})
    for _ in range(3):
        with pytest.raises(Stopped):
            loop.train(run)
    loop.train(run)
    assert fetched.count(True) == (6 if ahead.startswith("always") else 0), "all but the last step of a stage, which needs no other"
    assert losses(run) == whole_losses
    assert end_of(run) == whole


def test_run_whose_tower_no_step_has_used_resumes_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text alone: neither tower nor projector has a gradient, and so no state in the optimizer."""
    rows = json.loads(write_data(tmp_path / "data", 60).read_text())
    (tmp_path / "data" / "data.json").write_text(json.dumps([row for row in rows if "image" not in row]))
    runs = [tiny_run(tmp_path, f"out={tmp_path / name}") for name in ("whole", "again")]
    loop.train(runs[0])
    stopped_at(monkeypatch, {2, 6})
    for _ in range(2):
        with pytest.raises(Stopped):
            loop.train(runs[1])
    loop.train(runs[1])
    assert end_of(runs[1]) == end_of(runs[0])


def test_epochs_are_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not again when the run resumes, unless there are to be more of them; the rates are those of a run that was left alone."""
    counted: list[int] = []
    real = counts.index_all
    monkeypatch.setattr(counts, "index_all", lambda reader: counted.append(1) or real(reader))

    def run(name: str, epochs: int) -> Run:
        lengths = [f"stages.{stage}.{how}" for stage in (0, 1) for how in ("steps=null", f"epochs={epochs}")]
        return tiny_run(tmp_path, f"out={tmp_path / name}", *lengths)

    loop.train(run("whole", 2))
    steps = losses(run("whole", 2))
    assert len(counted) == 2 and len(steps) > 6  # two stages
    with monkeypatch.context() as patch:
        stopped_at(patch, {1, 2, len(steps) - 1})
        for _ in range(3):
            with pytest.raises(Stopped):
                loop.train(run("again", 2))
        loop.train(run("again", 2))
    assert len(counted) == 4
    assert losses(run("again", 2)) == steps
    with monkeypatch.context() as patch:
        stopped_at(patch, {1})
        with pytest.raises(Stopped):
            loop.train(run("more", 2))
    [count] = (tmp_path / "more" / "index" / "counts").iterdir()
    count.write_text("torn")
    with monkeypatch.context() as patch:
        stopped_at(patch, {2})
        with pytest.raises(Stopped):
            loop.train(run("more", 2))
    assert len(counted) == 6  # a damaged count is counted again
    loop.train(run("more", 3))
    assert len(counted) == 8
    assert len(losses(run("more", 3))) == len(steps) * 3 // 2


TOWER = {
    "patch": 4,
    "hidden_size": 16,
    "layers": 2,
    "heads": 2,
    "intermediate_size": 24,
    "position_grid": 4,
    "min_pixels": 64,
    "max_pixels": 512,
}
ROUTED = {"num_experts": 4, "experts_per_token": 2, "intermediate_size": 8}
SMALL = {"vocab_size": 300, "hidden_size": 16, "layers": 2, "heads": 2, "kv_heads": 1}
SECTIONS = {"head_dim": 8, "mrope_section": [2, 1, 1]}
DELTA = {"key_heads": 1, "value_heads": 2, "key_dim": 8, "value_dim": 4}
HYBRID = {
    "head_dim": 16,
    "partial_rotary_factor": 0.5,
    "mrope_section": [2, 1, 1],
    "layer_types": ["linear_attention", "full_attention"],
    "delta": DELTA,
}
SHAPES = {
    "qwen3_vl of experts": {
        "family": "qwen3_vl",
        "vision": {**TOWER, "deepstack_layers": [0]},
        "language": {"family": "qwen3", **SMALL, **SECTIONS, "intermediate_size": 24, "experts": ROUTED, "tie_embeddings": False},
    },
    "qwen3_5_vl of experts": {
        "family": "qwen3_5_vl",
        "vision": TOWER,
        "language": {"family": "qwen3_5", **SMALL, **HYBRID, "experts": ROUTED, "shared_expert_size": 8, "tie_embeddings": True},
    },
    "llava, naflex and llama": {
        "family": "llava",
        "vision": {"image_size": 16, "patch": 4, "hidden_size": 16, "layers": 1, "heads": 2, "intermediate_size": 24, "patches": 12},
        "language": {"family": "llama", **SMALL, "intermediate_size": 24, "tie_embeddings": True},
    },
}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_family_resumes_bit_for_bit(shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16, stopped at the stage border and on both sides of it; experts with biases that the second stage keeps and moves."""
    recipe = tiny_recipe(tmp_path)
    recipe["precision"], recipe["model"]["config"] = "bf16", SHAPES[shape]
    for stage in recipe["stages"]:
        stage |= {"steps": 2, "gradient_checkpointing": ["vision", "language"]}
        stage |= {"experts": {"balance": "bias", "rate": 0.01}} if "experts" in shape else {}
    recipe["stages"][1]["trains"]["language"]["targets"] = "all-linear"
    whole = run_of(override(recipe, [f"out={tmp_path / 'whole'}"]), "tiny")
    loop.train(whole)
    run = run_of(override(recipe, [f"out={tmp_path / 'parts'}"]), "tiny")
    with monkeypatch.context() as patch:
        stopped_at(patch, {1, 2, 3})
        for _ in range(3):
            with pytest.raises(Stopped):
                loop.train(run)
        loop.train(run)
    assert end_of(run) == end_of(whole)
    assert losses(run) == losses(whole)


def test_killed_in_mid_accumulation_is_bit_equal(uninterrupted, tmp_path: Path) -> None:
    """The process is killed between the micro-batches of step 6, without a chance to save; step 5 was the last that was."""
    folder, whole, whole_losses = uninterrupted
    run = tiny_run(folder, f"out={tmp_path / 'run'}", "save_steps=1")

    def killed() -> None:
        forward, calls = llava.Model.forward, 0

        def counted(self: llava.Model, batch: Batch, cache: Any = None) -> Any:
            nonlocal calls
            calls += 1
            if calls == 2 * 5 + 2:
                os.kill(os.getpid(), signal.SIGKILL)
            return forward(self, batch, cache)

        llava.Model.forward = counted
        loop.train(run)

    assert Forked(killed).wait(120) == -signal.SIGKILL
    newest = store.newest(tmp_path / "run" / "checkpoints")
    assert newest is not None
    assert newest.step == 5
    loop.train(run)
    assert end_of(run) == whole
    assert losses(run) == whole_losses


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_real_signal_saves_and_exits_with_its_code(uninterrupted, tmp_path: Path, number: signal.Signals) -> None:
    folder, *_ = uninterrupted
    run = tiny_run(folder, f"out={tmp_path / 'run'}", "stages.adapt.steps=2000", "logging_steps=1")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(to_yaml(run))
    child, output = piped_command("train", str(recipe))
    with output:
        assert any(line.startswith("adapt 2/") for line in output)
        os.kill(child.pid, number)
        rest = output.read()
    assert child.wait(60) == 75, rest
    assert "saved" in rest
    assert "Traceback" not in rest
    newest = store.newest(tmp_path / "run" / "checkpoints")
    assert newest is not None
    lines = losses(run)
    assert newest.step == max(lines) >= 6
    # a longer stage has another schedule: only that the resumed run continues from there, to a new end
    shorter = tiny_run(folder, f"out={tmp_path / 'run'}", f"stages.adapt.steps={newest.step - 4 + 2}")
    loop.train(shorter)
    assert max(losses(shorter)) == newest.step + 2


def test_a_finished_run_is_left_alone(uninterrupted, capsys: pytest.CaptureFixture[str]) -> None:
    folder, whole, whole_losses = uninterrupted
    loop.train(tiny_run(folder))
    said = capsys.readouterr().out
    assert "run: nothing is left to train, fp32" in said
    assert "resumed" not in said
    assert end_of(tiny_run(folder)) == whole
    assert losses(tiny_run(folder)) == whole_losses


def test_another_recipe_is_refused_with_the_difference(uninterrupted) -> None:
    folder, *_ = uninterrupted
    with pytest.raises(Refused, match=r"stages\.whole\.max_grad_norm: 1\.0 → 0\.5"):
        loop.train(tiny_run(folder, "stages.whole.max_grad_norm=0.5"))


def test_new_run_starts_from_the_weights_as_the_refusal_says(uninterrupted, tmp_path: Path) -> None:
    """The words that the message tells to add, added to the refused command."""
    folder, *_ = uninterrupted
    shutil.copytree(folder / "run", tmp_path / "run")
    command = [f"out={tmp_path / 'run'}", "stages.whole.batch.max_tokens=200"]
    with pytest.raises(Refused) as refused:
        loop.train(tiny_run(folder, *command))
    message = str(refused.value)
    assert "batch.max_tokens: 160 → 200" in message
    added = shlex.split(message.rpartition(": ")[2])
    assert added == [f"out={tmp_path / 'run-2'}", f"model.path={tmp_path / 'run'}", "model.config=null", "model.template=null"]
    run = tiny_run(folder, *command, *added, "stages.whole.steps=1", "stages.adapt.steps=1")
    loop.train(run)
    old, new = (open_bundle(tmp_path / name) for name in ("run", "run-2"))
    assert new.bundle.tokenizer.get_vocab() == old.bundle.tokenizer.get_vocab()
    assert losses(run)[1] < max(losses(tiny_run(folder))[n] for n in (1, 2))  # not from scratch
    with pytest.raises(Refused, match=re.escape(f"out={tmp_path / 'run-3'}")):
        loop.train(tiny_run(folder, *command))


def test_recompute_may_change_on_resume_and_changes_no_number(uninterrupted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, whole, whole_losses = uninterrupted
    parts = ["stages.whole.gradient_checkpointing=[vision, language]", "stages.adapt.gradient_checkpointing=[language]"]
    with monkeypatch.context() as patch:
        stopped_at(patch, {2})
        with pytest.raises(Stopped):
            loop.train(tiny_run(folder, f"out={tmp_path / 'run'}"))
    loop.train(run := tiny_run(folder, f"out={tmp_path / 'run'}", *parts))
    assert end_of(run) == whole
    assert losses(run) == whole_losses


class Given:
    """A clock that advances by a given number of seconds per step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float):
        self.time = 1000.0
        original = loop.update

        def update(*args, **more):
            self.time += seconds
            return original(*args, **more)

        monkeypatch.setattr(loop, "update", update)

    def __call__(self) -> float:
        return self.time


@pytest.mark.parametrize(
    ("minutes", "saved"), [("null", [4, 8]), ("30", [3, 4, 7, 8]), ("20", [2, 4, 6, 8]), ("10", [1, 2, 3, 4, 5, 6, 7, 8]), ("1000", [4, 8])]
)
def test_checkpoints_by_the_clock_are_where_they_are_due(
    uninterrupted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, minutes: str, saved: list[int]
) -> None:
    """Steps of 10 minutes each, by a clock that is given; both stages end after 4."""
    folder, whole, whole_losses = uninterrupted
    steps: list[int] = []
    save = store.save
    monkeypatch.setattr(store, "save", lambda *args, step, **more: (steps.append(step), save(*args, step=step, **more))[1])
    run = tiny_run(folder, f"out={tmp_path / 'run'}", f"save_minutes={minutes}")
    loop.train(run, now=Given(monkeypatch, 600.0))
    assert steps == saved
    assert end_of(run) == whole
    assert losses(run) == whole_losses


def test_run_that_is_killed_resumes_from_a_checkpoint_by_the_clock(uninterrupted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, whole, whole_losses = uninterrupted

    class Killed(BaseException):
        pass

    with monkeypatch.context() as patch:
        clock = Given(patch, 600.0)
        write = metrics.write

        def killing(folder: Path, line: dict[str, Any], attempt: int) -> None:
            write(folder, line, attempt)
            if line.get("global_step") == 4 and line["kind"] == "step":
                raise Killed

        patch.setattr(metrics, "write", killing)
        patch.setattr(loop, "save", lambda *a, **m: None if a[2].global_step == 4 else original(*a, **m)) if (
            original := loop.save
        ) else None
        with pytest.raises(Killed):
            loop.train(tiny_run(folder, f"out={tmp_path / 'run'}"), now=clock)
    newest = store.newest(tmp_path / "run" / "checkpoints")
    assert newest is not None and newest.step == 3
    loop.train(run := tiny_run(folder, f"out={tmp_path / 'run'}"))
    assert end_of(run) == whole
    assert losses(run) == whole_losses


@pytest.mark.parametrize("saved", ["nothing", "steps without a checkpoint", "a checkpoint"])
def test_too_little_memory_says_what_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: str) -> None:
    """The command that it tells is accepted."""
    run = tiny_run(tmp_path, *(["save_steps=1"] if saved == "a checkpoint" else []))
    original, fails = loop.update, 0 if saved == "nothing" else 5 if saved == "a checkpoint" else 1

    def update(*args, step: int, **more):
        if step == fails:
            raise OutOfMemory("micro-batch 0 of step 6 does not fit into memory (none)")
        return original(*args, step=step, **more)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "update", update)
        with pytest.raises(OutOfMemory) as raised:
            loop.train(run)
    said, stage = str(raised.value), "adapt" if fails == 5 else "whole"
    [less] = re.findall(r"add (stages\.\S*) to the same command", said)
    assert shlex.split(less) == [f"stages.{stage}.gradient_checkpointing=true"]
    match saved:
        case "nothing":
            assert said.endswith("or lower batch.max_tokens and batch.max_patches: no step was done yet")
            loop.train(tiny_run(tmp_path, "stages.whole.batch.max_tokens=150", "stages.whole.steps=1", "stages.adapt.steps=1"))
        case "a checkpoint":
            assert "it resumes from the last checkpoint. Lower batch.max_tokens and batch.max_patches in a new run." in said
            assert said.endswith(f"out={tmp_path / 'run-2'} model.path={tmp_path / 'run'} model.config=null model.template=null "
                                 "stages.adapt.batch.max_tokens=N")  # fmt: skip
            loop.train(tiny_run(tmp_path, "save_steps=1", *shlex.split(less)))
            assert max(losses(run)) == STEPS
        case _:
            assert said.endswith("with another out=: nothing has been saved yet")


def test_memory_remedy_names_no_part_that_is_recomputed_already(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    home = start.start_run(tiny_run(tmp_path), tmp_path / "run")
    one, all = (tiny_run(tmp_path, f"stages.whole.gradient_checkpointing={parts}") for parts in ("[vision]", "true"))
    assert start.smaller(one, home, 0).startswith(
        "To keep less in memory, add stages.whole.gradient_checkpointing=true to the same command"
    )
    assert start.smaller(all, home, 0).startswith("Lower batch.max_tokens and batch.max_patches")


@pytest.mark.parametrize("workers", [0, 1])
def test_batch_that_no_host_can_hold_is_exit_code_7(tmp_path: Path, eyeline: Command, workers: int) -> None:
    """A real one, padded to the given number of tokens."""
    (tmp_path / "recipe.yaml").write_text(to_yaml(tiny_run(tmp_path)))
    done = eyeline("train", "recipe.yaml", "stages.whole.batch.max_tokens=1000000000000000", f"stages.whole.data.workers={workers}")
    assert done.code == 7, done.err
    assert "does not fit into" in done.err and "Traceback" not in done.err
    assert "stages.whole.gradient_checkpointing" in done.err


def test_start_says_when_checkpoints_are_written(uninterrupted, capsys: pytest.CaptureFixture[str]) -> None:
    folder, *_ = uninterrupted
    loop.train(tiny_run(folder, "save_steps=7"))
    said = capsys.readouterr().out
    assert "checkpoints: every 30 minutes (save_minutes), every 7 steps (save_steps), at the end of each stage, and when a signal" in said


def test_data_that_moved_are_gone_on_with_and_others_are_not(uninterrupted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, whole, whole_losses = uninterrupted
    names = ("before", "after", "others")
    paths = [[f"stages.{stage}.data.sources.0.path={tmp_path / name / 'data.json'}" for stage in ("whole", "adapt")] for name in names]
    runs = [tiny_run(folder, f"out={tmp_path / 'run'}", *of) for of in paths]
    shutil.copytree(folder / "data", tmp_path / "before")
    with monkeypatch.context() as patch:
        stopped_at(patch, {3})
        with pytest.raises(Stopped):
            loop.train(runs[0])
    shutil.move(tmp_path / "before", tmp_path / "after")
    shutil.copytree(tmp_path / "after", tmp_path / "others")
    rows = (tmp_path / "others" / "data.json").read_text()
    (tmp_path / "others" / "data.json").write_text(rows.replace("it is red", "it is RED"))
    words = (
        f"{tmp_path / 'run'} cannot be resumed: since its checkpoint of step 3, {tmp_path / 'others' / 'data.json'} has changed. Restore it"
    )
    with pytest.raises(Refused, match=re.escape(words)) as refused:
        loop.train(runs[2])
    assert f"out={tmp_path / 'run-2'} model.path={tmp_path / 'run'}" in str(refused.value)
    out = io.StringIO()
    assert not check(runs[2], 0, Console(file=out, width=300))
    assert words in out.getvalue()
    assert check(runs[1], 0, Console(file=out, width=300))
    loop.train(runs[1])
    assert end_of(runs[1]) == whole
    assert losses(runs[1]) == whole_losses


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("do not touch")
    with pytest.raises(Refused, match=r"holds thesis\.tex"):
        loop.train(tiny_run(tmp_path))
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["thesis.tex"]  # not even a lock
    assert (tmp_path / "run" / "thesis.tex").read_text() == "do not touch"


def test_a_second_process_is_locked_out(uninterrupted) -> None:
    folder, *_ = uninterrupted
    with sole_owner(folder / "run"), pytest.raises(RunLocked, match=f"process {os.getpid()}"):
        loop.train(tiny_run(folder))


def test_a_damaged_newest_checkpoint_falls_back_loudly(
    uninterrupted, tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, whole, _ = uninterrupted
    run = tiny_run(folder, f"out={tmp_path / 'run'}", "save_steps=1")
    stopped_at(monkeypatch, {6})
    with pytest.raises(Stopped):
        loop.train(run)
    newest = store.newest(tmp_path / "run" / "checkpoints")
    assert newest is not None
    file = newest.folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    monkeypatch.undo()
    loop.train(run)
    assert "cannot be used" in capsys.readouterr().err
    assert end_of(run) == whole


def test_steps_that_are_not_finite_end_the_run_with_evidence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three bad steps against a budget of two. Nothing of them is in the weights, and a file names their samples."""
    run = tiny_run(tmp_path, "max_nonfinite_steps=2")
    original = loop.update

    def update(model, *args, step: int, **more):
        if step < 3:
            hook = model.language.norm.weight.register_hook(lambda g: g * float("nan"))
        report = original(model, *args, step=step, **more)
        if step < 3:
            hook.remove()
        return report

    monkeypatch.setattr(loop, "update", update)
    with pytest.raises(NotFinite, match="max_nonfinite_steps=2"):
        loop.train(run)
    folders = sorted((tmp_path / "run" / "evidence").iterdir())
    assert len(folders) == 3
    evidence = json.loads((folders[0] / "step.json").read_text())
    assert evidence["step"] == 1
    assert [(folder / "weights").exists() for folder in folders] == [True, True, False]  # keep_bad_steps is 2
    assert all(name.startswith("s") or "#" in name for batch in evidence["samples"] for name in batch)
    lines = [line for line in read_lines(tmp_path / "run" / "metrics.jsonl") if line["kind"] == "step"]
    assert [line["loss"] for line in lines] == [None] * 3
    newest = store.newest(tmp_path / "run" / "checkpoints")
    assert newest is not None
    assert newest.load("optimizer") == {}  # no step was applied


@pytest.mark.parametrize("steps", [2, 3])
def test_a_stage_no_longer_than_what_was_done_is_refused(
    uninterrupted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    folder, *_ = uninterrupted
    stopped_at(monkeypatch, {3})
    with pytest.raises(Stopped):
        loop.train(tiny_run(folder, f"out={tmp_path / 'run'}"))
    with pytest.raises(Refused, match="has already done 3"):
        loop.train(tiny_run(folder, f"out={tmp_path / 'run'}", f"stages.whole.steps={steps}"))


def test_a_longer_length_for_a_stage_that_has_ended_is_refused(uninterrupted) -> None:
    """Not "done" without a step: the wish would be silently ignored."""
    folder, whole, _ = uninterrupted
    with pytest.raises(Refused, match="stage adapt has ended, with steps=4; steps=9 would change nothing"):
        loop.train(tiny_run(folder, "stages.adapt.steps=9"))
    loop.train(tiny_run(folder))  # the recipe on record is still the old one
    assert end_of(tiny_run(folder)) == whole


def test_nonfinite_validation_loss_is_not_best_and_does_not_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The figures of four validations: NaN, 2, infinity, 3. The second one is the best."""
    figures = iter([float("nan"), 2.0, float("inf"), 3.0, float("inf")])
    monkeypatch.setattr(loop, "validate", lambda *_: (next(figures), 7))
    run = tiny_run(tmp_path, "validation_steps=1", "stages.whole.steps=4", "stages.adapt.steps=1", "save_steps=1")
    loop.train(run)
    lines = [line for line in read_lines(tmp_path / "run" / "metrics.jsonl") if line["kind"] == "validation"]
    assert [line["loss"] for line in lines] == [None, 2.0, None, 3.0, None]
    best = store.best(tmp_path / "run" / "checkpoints")
    assert best is not None
    assert best.step == 2


def test_a_start_that_was_killed_is_begun_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before each write of a fresh run folder; what was half written is gone afterwards."""

    class Killed(BaseException):
        pass

    def killed(*_: object) -> None:
        raise Killed

    for name in ("describe", "write_json", "write_recipe"):
        with monkeypatch.context() as patch:
            patch.setattr(start, name, killed)
            with pytest.raises(Killed):
                loop.train(tiny_run(tmp_path))
    (tmp_path / "run" / ".model.0123abcd.tmp").mkdir()
    (tmp_path / "run" / ".recipe.yaml.0123abcd.tmp").write_text("half")
    loop.train(tiny_run(tmp_path, "stages.whole.steps=1", "stages.adapt.steps=1"))
    assert not list((tmp_path / "run").glob(".*"))


def test_a_run_does_not_write_over_a_model(uninterrupted, tmp_path: Path) -> None:
    """A model in `out`/model is the user's, though a run keeps its description under that name."""
    folder, *_ = uninterrupted
    found = open_bundle(folder / "run")
    made = load(found, "cpu").model
    export(found.bundle, made, tmp_path / "run" / "model", form="parts")
    with pytest.raises(Refused, match="holds a model, which would be replaced"):
        loop.train(tiny_run(folder, f"out={tmp_path / 'run'}"))
    kept = open_bundle(tmp_path / "run" / "model").form
    assert kept is not None and kept.name == "parts"


@pytest.mark.parametrize("content", [None, "{}", "[]", "nothing"])
def test_a_lost_or_damaged_record_of_the_run_is_refused(uninterrupted, tmp_path: Path, content: str | None) -> None:
    folder, *_ = uninterrupted
    shutil.copytree(folder / "run", tmp_path / "run")
    env = tmp_path / "run" / "env.json"
    env.unlink()
    if content is not None:
        env.write_text(content)
    with pytest.raises(Refused, match=r"env\.json"):
        loop.train(tiny_run(folder, f"out={tmp_path / 'run'}"))


def piped_command(*arguments: str, session: bool = False) -> tuple[Forked, TextIO]:
    """The command line in a process of its own, and what it writes."""
    read, write = os.pipe()
    child = forked_command(*arguments, stdout=write, session=session)
    os.close(write)
    return child, open(read)


def commands_of_children(process: int) -> list[str]:
    """Those that any of its threads has started."""
    commands = []
    for thread in Path(f"/proc/{process}/task").glob("*/children"):
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):  # it ended meanwhile
            commands += [Path(f"/proc/{child}/cmdline").read_text() for child in thread.read_text().split()]
    return commands


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for the worker's process there")
@pytest.mark.parametrize(("when", "number"), [("as the first worker starts", signal.SIGTERM), ("in mid-stage", signal.SIGINT)])
@pytest.mark.fresh_workers
def test_a_signal_to_the_whole_job_ends_it_in_order(uninterrupted, tmp_path: Path, when: str, number: signal.Signals) -> None:
    """Schedulers signal every process of a job; workers leave the end to the main one, and are gone with it."""
    folder, *_ = uninterrupted
    workers = [f"stages.{stage}.data.workers=1" for stage in ("whole", "adapt")]
    run = tiny_run(folder, f"out={tmp_path / 'run'}", "stages.adapt.steps=2000", "logging_steps=1", *workers)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(to_yaml(run))
    child, output = piped_command("train", str(recipe), session=True)
    with output:
        assert any(line.startswith("└" if when != "in mid-stage" else "adapt 2/") for line in output)
        while not any("eyeline.data.workers" in command for command in commands_of_children(child.pid)):
            time.sleep(0.002)
        os.killpg(child.pid, number)
        rest = output.read()  # ends when the last process has closed it
    assert child.wait(60) == 75, rest
    assert "Traceback" not in rest
    newest = store.newest(tmp_path / "run" / "checkpoints")
    assert newest is not None
    assert newest.step == max(losses(run))


def test_a_signal_during_the_save_is_for_the_next_step(uninterrupted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked while step 2 is written down, after it was decided not to save for a stop: step 3 is done and saved."""
    folder, whole, _ = uninterrupted
    stops: list[loop.StopSignal] = []
    original_stop, original_write = loop.StopSignal, metrics.write

    def made(*tell: Any, **how: Any) -> loop.StopSignal:
        stops.append(original_stop(*tell, **how))
        return stops[-1]

    def write(folder: Path, line: dict, attempt: int) -> None:
        original_write(folder, line, attempt)
        if line.get("global_step") == 2 and attempt == 1:
            stops[-1].asked = "SIGTERM"

    monkeypatch.setattr(loop, "StopSignal", made)
    monkeypatch.setattr(metrics, "write", write)
    run = tiny_run(folder, f"out={tmp_path / 'run'}")
    with pytest.raises(Stopped, match="3 steps saved"):
        loop.train(run)
    loop.train(run)
    assert end_of(run) == whole


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_second_signal_quits_and_says_what_is_lost(number: signal.Signals) -> None:
    before, told = signal.getsignal(number), []
    stop = loop.StopSignal(told.append)
    try:
        stop.done, stop.saved = 9, 4
        os.kill(os.getpid(), number)
        assert stop.asked == number.name
        assert len(told) == 1 and "steps 5 to 9 are lost; the same command resumes from step 4" in told[0]
        with pytest.raises(Abandoned, match=f"second {number.name}: quit without saving; steps 5 to 9 are lost") as raised:
            os.kill(os.getpid(), number)
        assert raised.value.code == 128 + number
        assert signal.getsignal(number) == before  # a third one is the system's
    finally:
        stop.close()


def test_second_signal_while_the_first_is_shown_quits_after_it() -> None:
    """The line may be in the middle of being painted, where rich would swallow an exception."""
    told: list[str] = []

    def tell(message: str) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        told.append(message)

    stop = loop.StopSignal(tell)
    try:
        with pytest.raises(Abandoned, match="second SIGINT: quit without saving"):
            os.kill(os.getpid(), signal.SIGTERM)
        assert len(told) == 1 and told[0].startswith("SIGTERM: stopping after this step")
    finally:
        stop.close()


@pytest.mark.parametrize(
    ("done", "saved", "said"),
    [
        (4, 4, "no step that was done is lost"),
        (5, 4, "step 5 is lost; the same command resumes from step 4"),
        (2, 0, "steps 1 to 2 are lost; nothing has been saved yet"),
    ],
)
def test_what_a_second_signal_loses(done: int, saved: int, said: str) -> None:
    stop = loop.StopSignal()
    stop.close()
    stop.done, stop.saved = done, saved
    assert stop.lost() == said


def test_hangup_stops_once_and_nohup_keeps_it_ignored() -> None:
    """A terminal that is closed sends SIGHUP more than once; a second one must not end the save."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup
    stop = loop.StopSignal(lambda _: None)
    try:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGHUP)
        assert stop.asked == "SIGHUP"
    finally:
        stop.close()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        stop = loop.StopSignal(lambda _: None)
        os.kill(os.getpid(), signal.SIGHUP)
        stop.close()
        assert stop.asked is None
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_each_run_attempt_and_stage_is_known_by_itself(uninterrupted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs have ids of their own, attempts count up, stages order their data otherwise and each have a whole schedule;
    a stage is validated at its end too, and steps that were dropped are counted over the border."""
    folder, *_ = uninterrupted
    seeds: list[int] = []

    open_reader = stages.reader_of

    def watched(data, encoder, rule, seed: int, *more, **named):
        seeds.append(seed)
        return open_reader(data, encoder, rule, seed, *more, **named)

    monkeypatch.setattr(stages, "reader_of", watched)
    run = tiny_run(folder, f"out={tmp_path / 'run'}", "validation_steps=3", "max_nonfinite_steps=1")
    original = loop.update

    def update(model, *args, step: int, **more):
        hook = model.projector.up.weight.register_hook(lambda g: g * float("nan")) if step in (3, 6) else None
        report = original(model, *args, step=step, **more)
        if hook:
            hook.remove()
        return report

    with monkeypatch.context() as patch:
        patch.setattr(loop, "update", update)
        with pytest.raises(NotFinite, match="2 steps had"):
            loop.train(run)
    loop.train(tiny_run(folder, f"out={tmp_path / 'run'}", "validation_steps=3"))
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["global_step"] for line in lines if line["kind"] == "validation"] == [3, 4, 7, 8]
    assert [line["attempt"] for line in lines if line["kind"] == "start"] == [1, 2]
    rates = [line["lr"]["projector"] for line in lines if line["kind"] == "step"]
    assert rates[:4] == rates[4:], "the same schedule in both stages"
    assert rates[0] == 0.01
    assert len(set(seeds)) == 2
    ids = {json.loads((place / "env.json").read_text())["run"] for place in (tmp_path / "run", folder / "run")}
    assert len(ids) == 2


def test_a_run_without_a_step_may_have_another_recipe(tmp_path: Path) -> None:
    """A start that was refused or failed before its first step does not hold the folder against the corrected recipe."""
    with pytest.raises(TooManyRejects):
        loop.train(tiny_run(tmp_path, "stages.whole.batch.max_tokens=8", "model.config.language.hidden_size=8"))
    assert (tmp_path / "run" / "recipe.yaml").exists()
    loop.train(tiny_run(tmp_path))
    assert losses(tiny_run(tmp_path)).keys() == set(range(1, STEPS + 1))
    with pytest.raises(Refused, match="may not change on resume"):
        loop.train(tiny_run(tmp_path, "model.config.language.hidden_size=8"))


def test_changes_since_the_last_attempt_are_reported(
    uninterrupted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An override that is left out of the same command goes back to what the recipe says, and is not silent about it."""
    folder, *_ = uninterrupted
    for overrides in (["stages.adapt.steps=5", "logging_steps=2"], []):
        with monkeypatch.context() as patch:
            stopped_at(patch, {2} if overrides else {3})
            with pytest.raises(Stopped):
                loop.train(tiny_run(folder, f"out={tmp_path / 'run'}", *overrides))
        said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("changed since: ")]
        assert said == ([] if overrides else ["changed since: logging_steps: 2 → 10", "changed since: stages.adapt.steps: 5 → 4"])


def test_a_refused_length_leaves_the_record_as_it_was(uninterrupted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, *_ = uninterrupted
    stopped_at(monkeypatch, {3})
    with pytest.raises(Stopped):
        loop.train(tiny_run(folder, f"out={tmp_path / 'run'}"))
    files = [tmp_path / "run" / name for name in ("recipe.yaml", "env.json", "metrics.jsonl")]
    before = [file.read_bytes() for file in files]
    with pytest.raises(Refused, match="has already done 3"):
        loop.train(tiny_run(folder, f"out={tmp_path / 'run'}", "stages.whole.steps=2"))
    assert [file.read_bytes() for file in files] == before


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for the worker's process there")
@pytest.mark.fresh_workers
def test_a_worker_whose_run_is_killed_as_it_starts_ends(uninterrupted, tmp_path: Path) -> None:
    """While it imports, its parent becomes another process, which never ends."""
    folder, *_ = uninterrupted
    run = tiny_run(folder, f"out={tmp_path / 'run'}", "stages.whole.data.workers=1")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(to_yaml(run))
    child, output = piped_command("train", str(recipe), session=True)
    while not any("eyeline.data.workers" in command for command in commands_of_children(child.pid)):
        time.sleep(0.002)
    time.sleep(0.3)  # the worker has been told what to do
    child.kill()
    try:
        with output:
            output.read()  # ends when the last process has closed it
        child.wait(60)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)


def test_a_signal_in_the_middle_of_a_line_is_noted(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Its handler runs inside the write of the line, where Python refuses a second one."""

    class Interrupted(io.RawIOBase):
        def writable(self) -> bool:
            return True

        def write(self, data: Any) -> int:
            if stop.asked is None:
                os.kill(os.getpid(), signal.SIGTERM)
            return len(data)

    stop = StopSignal()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BufferedWriter(Interrupted())))
    say("step 1")
    assert stop.asked == "SIGTERM"
    assert "stopping after this step" in capfd.readouterr().out
