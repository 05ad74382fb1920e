"""`precision: fp16`: the loss scale follows torch's GradScaler, skips what overflows, and resumes as it was."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from eyeline.checkpoint import store
from eyeline.core.errors import NotFinite, Stopped
from eyeline.core.files import read_lines
from eyeline.core.step import step_alone
from eyeline.study.replay import replay
from eyeline.train import loop, loss_scale
from eyeline.train.loss_scale import LEAST, LossScale
from eyeline.train.run import Run
from eyeline.train.step import update
from tests.train.ends import end_of, losses, stopped_at
from tests.train.fake_ranks import FakeRanks
from tests.train.recipe import tiny_run
from tests.train.tiny import CONFIG, batch, document, model, update_alone

PACKS = [[document(n, 12, 5), document(n + 50, 30, 1, images=2)] for n in range(9)]
WEIGHT = "language.blocks.0.mlp.up.weight"


def half_model() -> nn.Module:
    return model(CONFIG, compute_dtype=torch.float16)


def test_scales_and_updates_are_those_of_grad_scaler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight steps of two micro-batches from a factor that is too large, with growth after two: skipped, halved, doubled, the same bits."""
    monkeypatch.setattr(loss_scale, "GROWTH_STEPS", 2)
    ours, theirs, scale = half_model(), half_model(), LossScale(2.0**18)
    optimizers = [torch.optim.AdamW(made.parameters(), lr=3e-3) for made in (ours, theirs)]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18, growth_interval=2)  # pyright: ignore[reportPrivateImportUsage]
    seen = []
    for packs in PACKS[:8]:
        packs = [batch(document) for document in packs]
        report = update_alone(ours, optimizers[:1], packs, max_grad_norm=0.5, loss_scale=scale.factor)
        supervised = sum(one.counts.supervised for one in packs)
        for one in packs:
            scaler.scale(theirs(one).out / supervised).backward()
        scaler.unscale_(optimizers[1])
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        scaler.step(optimizers[1])
        scaler.update()
        optimizers[1].zero_grad(set_to_none=True)
        assert report.outcome == ("applied" if norm.isfinite() else "overflow")
        assert report.outcome == "overflow" or report.grad_norm == float(norm)
        scale = scale.after(report.outcome == "applied")
        seen.append(scale.factor)
        assert scale.factor == scaler.get_scale()
        assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    assert len(set(seen)) > 2 and any(b > a for a, b in pairwise(seen)), seen


def test_scale_halves_doubles_and_stays_at_its_least() -> None:
    assert LossScale() == LossScale(65_536.0, 0)
    assert LossScale(8.0, 5).after(False) == LossScale(4.0, 0)
    assert LossScale(LEAST, 7).after(False) == LossScale(LEAST, 0)
    assert LossScale(8.0, 1_998).after(True) == LossScale(8.0, 1_999)
    assert LossScale(8.0, 1_999).after(True) == LossScale(16.0, 0)


def test_gradients_are_near_those_of_float32() -> None:
    exact, half = model(), half_model()
    for made, scale in ((exact, None), (half, 1024.0)):
        report = update_alone(made, [torch.optim.SGD(made.parameters(), lr=1.0)], [batch(*PACKS[0])], loss_scale=scale)
        assert report.outcome == "applied"
    before = nn.utils.parameters_to_vector(model().parameters())
    want, got = (nn.utils.parameters_to_vector(made.parameters()).detach() - before.detach() for made in (exact, half))
    assert float((got - want).norm() / want.norm()) < 0.02


def spoil(made: nn.Module, value: float = float("inf")) -> Any:
    return made.get_parameter(WEIGHT).register_hook(lambda g: g.index_fill(0, torch.tensor([3]), value))


NAN = float("nan")


@pytest.mark.parametrize(("scale", "loss", "outcome"), [(2.0, 1.0, "overflow"), (LEAST, 1.0, "not finite"), (2.0, NAN, "not finite")])
def test_an_overflow_is_no_fault_while_the_scale_can_fall(scale: float, loss: float, outcome: str) -> None:
    made = half_model()
    before = [p.detach().clone() for p in made.parameters()]
    spoil(made)
    if loss != 1.0:
        made.register_forward_hook(lambda _, __, out: out._replace(out=out.out * loss))
    report = update_alone(made, [torch.optim.AdamW(made.parameters())], [batch(*PACKS[0])], loss_scale=scale)
    assert report.outcome == outcome
    assert all(torch.equal(p, q) for p, q in zip(made.parameters(), before, strict=True))


def test_an_overflow_on_one_rank_is_skipped_by_all() -> None:
    models = [half_model() for _ in range(2)]
    spoil(models[1])
    how: dict[str, Any] = {"max_grad_norm": 0.5, "balance": None, "seed": 0, "step": 0, "loss_scale": 64.0}
    steps = [step_alone([batch(*PACKS[rank])]) for rank in range(2)]
    reports = FakeRanks(models).run(lambda rank, ranks: update(models[rank], [], steps[rank], ranks, **how))
    assert [report.outcome for report in reports] == ["overflow"] * 2


# ---- whole runs


def half_run(folder: Path, *overrides: str) -> Run:
    return tiny_run(folder, "precision=fp16", "validation_steps=2", "max_nonfinite_steps=0", *overrides)


def spoiled_at(monkeypatch: pytest.MonkeyPatch, steps: set[int]) -> None:
    """Make gradients overflow in these steps."""
    original = loop.update

    def update(model: nn.Module, *args: Any, step: int, **how: Any) -> Any:
        hook = spoil(model) if step + 1 in steps else None
        report = original(model, *args, step=step, **how)
        if hook is not None:
            hook.remove()
        return report

    monkeypatch.setattr(loop, "update", update)


def scales(run: Run) -> list[tuple[str, float]]:
    lines = read_lines(Path(str(run.out)) / "metrics.jsonl")
    return [(line["outcome"], line["loss_scale"]) for line in lines if line["kind"] == "step"]


def test_planted_overflow_skips_one_step_and_a_resume_is_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Muon in full, then LoRA, from a scale that fits; it grows every second step. The stop is between two doublings."""
    monkeypatch.setattr(loss_scale, "GROWTH_STEPS", 3)
    monkeypatch.setattr(loop, "LossScale", lambda factor=64.0, good_steps=0: LossScale(factor, good_steps))
    spoiled_at(monkeypatch, {2})
    whole, cut = half_run(tmp_path), half_run(tmp_path, f"out={tmp_path / 'cut'}")
    loop.train(whole)
    applied = ["applied", "overflow", *["applied"] * 6]
    assert scales(whole) == list(zip(applied, [64.0, 64.0, 32.0, 32.0, 32.0, 64.0, 64.0, 64.0], strict=True))
    assert not (tmp_path / "run" / "evidence").exists()
    with monkeypatch.context() as patch:
        stopped_at(patch, {4})
        with pytest.raises(Stopped):
            loop.train(cut)
    capsys.readouterr()
    loop.train(cut)
    assert "fp16: the loss scale is 32, as in the checkpoint" in capsys.readouterr().out
    assert scales(cut) == scales(whole)
    assert end_of(cut) == end_of(whole)


def test_a_run_is_near_float32_with_checkpointing_and_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(loop, "LossScale", lambda factor=64.0, good_steps=0: LossScale(factor, good_steps))
    runs = [
        half_run(tmp_path, f"out={tmp_path / name}", "validation_steps=null", "stages.0.steps=2", "stages.1.steps=1", *more)
        for name, more in {
            "half": (),
            "again": [f"stages.{n}.gradient_checkpointing=true" for n in range(2)],
            "exact": ["precision=fp32"],
        }.items()
    ]
    for run in runs:
        loop.train(run)
    half, again, exact = (losses(run) for run in runs)
    assert capsys.readouterr().out.count("fp16: the loss scale starts at 65,536 and adapts") == 2
    assert half == again and half != exact
    assert half == pytest.approx(exact, abs=0.05)
    newest = store.newest(tmp_path / "half" / "checkpoints")
    assert newest is not None
    dtypes = {name: x.dtype for name, x in newest.load("frozen").items()}
    assert dtypes["language.blocks.0.attn.k.weight"] == torch.float16
    assert dtypes["language.norm.weight"] == dtypes["vision.positions.weight"] == torch.float32, "what is exact stays so"
    assert {x.dtype for x in newest.load("model").values()} == {torch.float32}


def test_gradients_that_overflow_at_the_least_scale_are_faults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two halvings from a scale of 4; then the step counts, is kept, and is replayed with its scale."""
    monkeypatch.setattr(loop, "LossScale", lambda factor=4.0, good_steps=0: LossScale(factor, good_steps))
    spoiled_at(monkeypatch, {1, 2, 3})
    run = half_run(tmp_path, "validation_steps=null")
    with pytest.raises(NotFinite, match=r"fp16 has no number above 65,504"):
        loop.train(run)
    assert scales(run) == [("overflow", 4.0), ("overflow", 2.0), ("not finite", 1.0)]
    [folder] = (tmp_path / "run" / "evidence").iterdir()
    capsys.readouterr()
    assert not replay(folder)
    assert "everything is finite here" in capsys.readouterr().out
