"""Steps with a loss spike are skipped, within `max_spike_steps`: nothing of them is in the weights, and a resumed run decides alike."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from eyeline.checkpoint import store
from eyeline.core.errors import NotFinite, Stopped
from eyeline.core.files import read_lines
from eyeline.train import evidence, loop
from eyeline.train.saving import state_of
from tests.train.ends import end_of, losses, stopped_at
from tests.train.recipe import tiny_run


def spoiled(monkeypatch: pytest.MonkeyPatch, steps: Sequence[int], factor: float) -> None:
    """In these steps the embedding is `factor` times as large, a power of two, and as it was after them."""
    original = loop.update

    def update(model, *args, step: int, **how):
        weight = model.language.embed.weight.data
        before = weight.clone()
        if step + 1 in steps:
            weight.mul_(factor)
        report = original(model, *args, step=step, **how)
        if step + 1 in steps:
            weight.copy_(before)
        return report

    monkeypatch.setattr(loop, "update", update)


def outcomes(folder: Path) -> list[str]:
    return [line["outcome"] for line in read_lines(folder / "metrics.jsonl") if line["kind"] == "step"]


def tensor_files(folder: Path) -> dict[str, bytes]:
    """The tensors of the last checkpoint, as they are on disk."""
    newest = store.newest(folder / "checkpoints")
    assert newest is not None
    files = {path.name: path.read_bytes() for path in newest.folder.glob("*.safetensors")}
    assert "model.safetensors" in files
    return files


def test_a_skipped_spike_leaves_what_a_step_that_is_not_finite_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same steps end the run with the same weights and optimizer states, whether they are skipped for one reason or the other. That
    the second spike is seen shows that the first does not count among the losses before it."""
    monkeypatch.setattr(evidence, "FEWEST", 2)
    spiking = tiny_run(tmp_path, "validation_steps=null", "max_spike_steps=2", f"out={tmp_path / 'spiking'}")
    broken = tiny_run(tmp_path, "validation_steps=null", "max_spike_steps=0", f"out={tmp_path / 'broken'}")
    with monkeypatch.context() as patch:
        spoiled(patch, (3, 4), 128.0)
        loop.train(spiking)
    with monkeypatch.context() as patch:
        spoiled(patch, (3, 4), float("inf"))
        loop.train(broken)
    assert outcomes(tmp_path / "spiking")[:5] == ["applied", "applied", "spike", "spike", "applied"]
    assert outcomes(tmp_path / "broken")[:5] == ["applied", "applied", "not finite", "not finite", "applied"]
    good = {step: loss for step, loss in losses(broken).items() if step not in (3, 4)}
    assert {step: loss for step, loss in losses(spiking).items() if step not in (3, 4)} == good
    for name in (folder.name for folder in (tmp_path / "broken" / "evidence").iterdir()):
        assert (tmp_path / "spiking" / "evidence" / name / "step.json").exists()
    assert tensor_files(tmp_path / "spiking") == tensor_files(tmp_path / "broken")


def test_a_resumed_run_skips_the_spikes_of_an_uninterrupted_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "FEWEST", 2)
    settings = ("validation_steps=null", "max_spike_steps=2")
    whole, run = (tiny_run(tmp_path, *settings, f"out={tmp_path / name}") for name in ("whole", "run"))
    spoiled(monkeypatch, (3, 8), 128.0)
    loop.train(whole)
    assert outcomes(tmp_path / "whole").count("spike") == 2
    stopped_at(monkeypatch, {2, 3, 7})
    for _ in range(3):
        with pytest.raises(Stopped):
            loop.train(run)
    loop.train(run)
    assert (end_of(run), losses(run), outcomes(tmp_path / "run")) == (end_of(whole), losses(whole), outcomes(tmp_path / "whole"))


def test_more_spikes_than_may_be_skipped_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "FEWEST", 2)
    spoiled(monkeypatch, (3, 4), 128.0)
    with pytest.raises(NotFinite, match=r"2 steps had a loss spike, more than max_spike_steps=1\. None was applied; .*evidence says which"):
        loop.train(tiny_run(tmp_path, "validation_steps=null", "max_spike_steps=1"))


def test_the_losses_of_a_stage_are_not_compared_with_those_of_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state at the end of a stage has none, so that the next one starts as its first attempt does."""
    states: list[dict[str, Any]] = []
    original = loop.save

    def save(process, running, state, **how):
        states.append(state_of(process, running, state, how["ended"])["progress"])
        original(process, running, state, **how)

    monkeypatch.setattr(loop, "save", save)
    loop.train(tiny_run(tmp_path, "validation_steps=null", "max_spike_steps=1", "save_steps=1"))
    assert [len(one["losses"] or ()) for one in states] == [*range(1, 4), 0, *range(1, 4), 0]
