"""Updates in the backward pass: the same bits as after it, gradients of one block at most, and a stop where a step is not finite."""

from pathlib import Path

import pytest
import torch
from torch import nn

import eyeline.train.loop as loop
from eyeline.checkpoint import store
from eyeline.core.errors import NotFinite, Refused
from eyeline.core.files import read_lines
from eyeline.models import decoder
from eyeline.recipes.problems import refuse_problems
from eyeline.train.memory import memory_of
from eyeline.train.optim import AdamW, AdamW8bit, make_optimizers, set_learning_rates
from eyeline.train.run import Run
from eyeline.train.small_adamw import SmallAdamW
from eyeline.train.trainable import plan_of, rank_problems
from tests.planned import plan_around
from tests.train.ends import end_of, losses
from tests.train.recipe import tiny_run
from tests.train.tiny import CONFIG, batch, document, model, update_alone

GOES = ("stages.whole.max_grad_norm=0", "stages.whole.batch.packs_per_step=1", "max_nonfinite_steps=0", "keep_bad_steps=0")
LORA = "{how: lora, lr: 0.02, rank: 2, alpha: 4, dropout: 0.3, targets: [o_proj, v_proj]}"


def one_stage(folder: Path, optimizer: str, *more: str) -> Run:
    run = tiny_run(folder, *GOES, f"stages.whole.optimizer={{{optimizer}, weight_decay: 0.1}}", "stages.whole.steps=3", *more)
    return run.model_copy(update={"stages": run.stages[:1]})


@pytest.mark.parametrize(
    ("optimizer", "more"),
    [
        ("kind: adamw", ()),
        ("kind: adamw_8bit", ("stages.whole.gradient_checkpointing=true",)),
        ("kind: adamw, offload: true, state_dtype: bf16", (f"stages.whole.trains.language={LORA}", "stages.whole.experts=null")),
    ],
)
def test_run_ends_with_the_bits_of_updates_after_the_backward_pass(tmp_path: Path, optimizer: str, more: tuple[str, ...]) -> None:
    """Tied embeddings, steps of text alone, and frozen weights included."""
    after = one_stage(tmp_path, optimizer, f"out={tmp_path / 'after'}", *more)
    inside = one_stage(tmp_path, f"{optimizer}, in_backward: true", f"out={tmp_path / 'inside'}", *more)
    assert not [*rank_problems(inside, 1)]
    for run in (after, inside):
        loop.train(run)
    assert end_of(inside) == end_of(after)
    assert losses(inside) == losses(after)
    norms = [
        [line["grad_norm"] for line in read_lines(tmp_path / name / "metrics.jsonl") if line["kind"] == "step"]
        for name in ("after", "inside")
    ]
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)


def test_gradients_of_one_block_at_most_exist_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = model()
    plan = plan_around(made, CONFIG)
    optimizers = make_optimizers(plan, AdamW(in_backward=True))
    set_learning_rates(optimizers, {"vision": 1e-2, "projector": 1e-2, "language": 1e-2}, 1.0)
    live: list[int] = []
    moved: list[str] = []
    update = SmallAdamW.update

    def counted(self: SmallAdamW, name: str, parameter: nn.Parameter, group: dict) -> None:
        live.append(sum(p.grad.nbytes for p in made.parameters() if p.grad is not None))
        moved.append(name)
        update(self, name, parameter, group)

    monkeypatch.setattr(SmallAdamW, "update", counted)
    update_alone(made, optimizers, [batch(document(1, 12, 5), document(2, 30, 1, images=2))])
    assert sorted(moved) == sorted(name for name, _ in made.named_parameters()), "each once: a tied weight, too"
    whole = memory_of(plan, AdamW())
    at_once = memory_of(plan, AdamW(in_backward=True))
    assert 0 < max(live) <= at_once.gradients < whole.gradients
    assert memory_of(plan, AdamW8bit(in_backward=True)).gradients == at_once.gradients
    assert not any(p._post_accumulate_grad_hooks for p in made.parameters()), "only while a step runs"


def test_blocks_count_for_memory_by_hand(tmp_path: Path) -> None:
    run = one_stage(tmp_path, "kind: adamw, in_backward: true")
    assert run.model.config is not None
    plan = plan_of(run, 0, run.model.config)
    sizes: dict[str, int] = {}
    for _, x, entry in plan.tensors():
        if entry.trains:
            sizes[entry.unit] = sizes.get(entry.unit, 0) + 4 * x.numel()
    assert memory_of(plan, run.stages[0].optimizer).gradients == max(sizes.values())


def test_step_that_is_not_finite_stops_the_run_unsaved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without in_backward the same folder resumes from the checkpoint before it."""
    run = one_stage(tmp_path, "kind: adamw, in_backward: true", "save_steps=1")
    calls = 0
    forward = decoder.Head.forward

    def third_is_not(self, x, *rest):
        nonlocal calls
        calls += 1
        return forward(self, x * float("nan") if calls == 3 else x, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(decoder.Head, "forward", third_is_not)
        with pytest.raises(NotFinite, match=r"Step 3 has a loss or gradient .* and max_nonfinite_steps=5 the same command"):
            loop.train(run)
    told = capsys.readouterr().out
    assert "step 3: loss or gradient is not finite; its samples are in" in told and "skipped" not in told
    kept = store.newest(tmp_path / "run" / "checkpoints")
    assert kept is not None
    assert kept.step == 2
    assert all(x.isfinite().all() for x in kept.load("model").values())
    assert (tmp_path / "run" / "evidence" / "step-00000003" / "step.json").is_file()
    loop.train(one_stage(tmp_path, "kind: adamw", "save_steps=1"))
    assert end_of(run)


def test_what_looks_at_all_gradients_is_refused_at_once(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, "stages.whole.optimizer={kind: adamw, in_backward: true}", "precision=fp16")
    with pytest.raises(Refused) as refused:
        refuse_problems(run, 2)
    for word in ("max_grad_norm=0", "packs_per_step=2", "max_nonfinite_steps=5", "keep_bad_steps=2", "precision: fp16", "2 ranks sum"):
        assert word in str(refused.value)
    with pytest.raises(Refused, match=r"in_backward is a setting of kind: adamw and kind: adamw_8bit, and this is kind: muon"):
        tiny_run(tmp_path, "stages.whole.optimizer={kind: muon, in_backward: true}")
    with pytest.raises(Refused, match=r"optimizer_in_bwd is called stages\.NAME\.optimizer\.in_backward here"):
        tiny_run(tmp_path, "optimizer_in_bwd=true")
    refuse_problems(one_stage(tmp_path, "kind: adamw, in_backward: true"), 1)


def test_gradients_are_taken_in_updates_alone() -> None:
    """A backward pass outside of one, as the warm-up of compiled blocks is, changes nothing."""
    made = model()
    before = {name: p.detach().clone() for name, p in made.named_parameters()}
    make_optimizers(plan_around(made, CONFIG), AdamW(in_backward=True))
    made(batch(document(1, 12, 5))).out.backward()
    assert all(torch.equal(p, before[name]) for name, p in made.named_parameters())
    assert any(p.grad is not None for p in made.parameters())
