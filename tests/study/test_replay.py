"""`eyeline replay`: a step that was not finite is run again on one device, and the place where that starts is named."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from eyeline.core.errors import NotFinite, Refused
from eyeline.core.files import read_lines
from eyeline.models import decoder, siglip2
from eyeline.study.replay import replay
from eyeline.train import evidence, loop
from eyeline.train.evidence import FEWEST, LossSpikes, batches_in
from eyeline.train.run import Run
from tests.train.recipe import tiny_run


def planted(monkeypatch: pytest.MonkeyPatch, plant: Callable[[torch.nn.Module], object], at: int = 1) -> None:
    """Something is done to the model before a step."""
    update = loop.update

    def planting(model, *args, step: int, **how):
        if step == at:
            plant(model)
        return update(model, *args, step=step, **how)

    monkeypatch.setattr(loop, "update", planting)


def ends_not_finite(run: Run) -> Path:
    """The run ends at its first step that is not finite; the folder that it has kept."""
    with pytest.raises(NotFinite):
        loop.train(run)
    [folder] = (Path(str(run.out)) / "evidence").iterdir()
    return folder


def run_of(folder: Path, *overrides: str) -> Run:
    return tiny_run(folder, "max_nonfinite_steps=0", "validation_steps=null", *overrides)


def test_an_infinity_in_a_weight_is_located(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def plant(model: torch.nn.Module) -> None:
        with torch.no_grad():
            model.get_parameter("language.blocks.1.mlp.down.weight")[3, 2] = float("inf")

    planted(monkeypatch, plant)
    folder = ends_not_finite(run_of(tmp_path))
    assert f"eyeline replay {folder} says where it comes from" in capsys.readouterr().out
    assert replay(folder)
    said = capsys.readouterr().out
    assert "weights: language.blocks.1.mlp.down.weight: 1 number not finite, the first at [3, 2]" in said
    assert "first not finite: the output of language.blocks.1.mlp.down" in said, said


def test_an_image_that_is_not_finite_is_located_with_its_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first image of the second micro-batch becomes infinite where pixels are normalised."""
    bad: list[torch.Tensor] = []
    update, normalised = loop.update, siglip2.normalised

    def choosing(model, optimizers, data, *args, step: int, **how):
        if step == 1:
            bad.append(data.batches[1].patches_PC[0].clone())
        return update(model, optimizers, data, *args, step=step, **how)

    def breaking(patches_PC, *how):
        x_PC = normalised(patches_PC, *how)
        return x_PC.masked_fill((patches_PC == bad[0]).all(1, keepdim=True), float("inf")) if bad else x_PC

    monkeypatch.setattr(loop, "update", choosing)
    monkeypatch.setattr(siglip2, "normalised", breaking)
    folder = ends_not_finite(run_of(tmp_path))
    assert replay(folder)
    said = capsys.readouterr().out
    assert "first not finite: the input of vision.embed, 48 of " in said, said
    assert "in the forward pass, micro-batch 1 (pack " in said
    assert f"its rows belong to images of {batches_in(folder)[1].ids[0]}\n" in said, said


def test_a_gradient_that_is_not_finite_is_located(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The loss is finite; the square root of zero after the first block is not differentiable."""
    block = decoder.Block.forward

    def breaking(self, *args):
        x_TD = block(self, *args)
        return x_TD + (x_TD.sum() * 0 + 0.0).sqrt() if breaks else x_TD

    breaks = False
    monkeypatch.setattr(decoder.Block, "forward", breaking)

    def plant(_: torch.nn.Module) -> None:
        nonlocal breaks
        breaks = True

    planted(monkeypatch, plant)
    folder = ends_not_finite(run_of(tmp_path))
    assert replay(folder)
    said = capsys.readouterr().out
    assert "first not finite: the gradient of the output of language.blocks.1" in said, said
    assert "gradients that are not finite: " in said


def test_a_step_that_is_finite_elsewhere_is_said_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The loss of the replay is the loss that the step would have had: the run's own without the fault, dropout included."""
    run = run_of(tmp_path)
    loop.train(tiny_run(tmp_path, "validation_steps=null", f"out={tmp_path / 'good'}"))
    steps = [line for line in read_lines(tmp_path / "good" / "metrics.jsonl") if line["kind"] == "step"]
    planted(monkeypatch, lambda model: model.projector.down.weight.register_hook(lambda gradient: gradient * float("nan")), at=5)
    folder = ends_not_finite(run)
    assert json.loads((folder / "step.json").read_text())["stage"] == "adapt"
    assert not replay(folder)
    said = capsys.readouterr().out
    assert "everything is finite here: look at the device that it was computed on" in said
    loss, norm = re.search(r"loss (\S+), gradient norm (\S+)\n.*everything", said).groups()  # type: ignore[union-attr]
    assert float(loss) == pytest.approx(steps[5]["loss"], rel=1e-5)
    assert float(norm) == pytest.approx(steps[5]["grad_norm"], rel=1e-4)


def test_a_loss_spike_is_kept_with_its_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(evidence, "FEWEST", 2)
    planted(monkeypatch, lambda model: model.language.embed.weight.data.mul_(100), at=3)
    loop.train(run_of(tmp_path))
    assert [line["spike"] for line in read_lines(tmp_path / "run" / "metrics.jsonl") if line["kind"] == "step"][:4] == [False] * 3 + [True]
    folder = tmp_path / "run" / "evidence" / "step-00000004"
    assert f"step 4: loss spike; eyeline replay {folder} says where it comes from" in capsys.readouterr().out
    assert not replay(folder)
    told, said = json.loads((folder / "step.json").read_text()), capsys.readouterr().out
    assert f"loss {float(told['loss']):.6g}, gradient norm {float(told['grad_norm']):.6g}\n" in said
    losses = [float(text) for text in re.findall(r"^loss (\S+) over", said, re.MULTILINE)]
    assert len(losses) == 5 and losses == sorted(losses, reverse=True)


def test_what_is_kept_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tiny_run(tmp_path, "max_nonfinite_steps=4", "validation_steps=null", "keep_bad_steps=1")
    monkeypatch.setattr(decoder.Head, "forward", lambda self, x, *_: (x * float("nan")).sum())
    with pytest.raises(NotFinite):
        loop.train(run)
    kept = sorted((tmp_path / "run" / "evidence").iterdir())
    assert [(folder / "weights").exists() for folder in kept] == [True, False, False, False, False]
    with pytest.raises(Refused, match=r"step-00000002 has no batches, only names of samples in step\.json\. Raise keep_bad_steps"):
        replay(kept[1])


def test_frozen_weights_are_linked_and_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(tmp_path, "save_steps=1")
    planted(monkeypatch, lambda model: model.projector.down.weight.register_hook(lambda gradient: gradient * float("nan")), at=6)
    frozen = next(ends_not_finite(run).glob("weights/*/frozen.safetensors"))
    assert frozen.stat().st_nlink > 1


def test_a_loss_is_a_spike_far_above_those_before_it_alone() -> None:
    spikes = LossSpikes()
    losses = [2 + 0.001 * (n % 5) for n in range(FEWEST)]
    assert not any(map(spikes.add, losses))
    assert not spikes.add(float("nan"))
    assert not spikes.add(2.09)  # many deviations, and nothing to speak of
    assert spikes.add(2.3)
    assert not spikes.add(2.02)


def test_a_first_high_loss_is_no_spike() -> None:
    spikes = LossSpikes()
    assert not any(map(spikes.add, [*[2.0] * (FEWEST - 1), 9.0]))


def test_other_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="is not a step that a run has kept"):
        replay(tmp_path)
