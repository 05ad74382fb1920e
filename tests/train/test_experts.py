"""Balancing experts over a run: what a step reports, and biases through checkpoints, stages, resumes and exports."""

from pathlib import Path

import pytest
import torch

import eyeline.train.loop as loop
from eyeline.bundle.bundle import open_bundle
from eyeline.bundle.exporting import export
from eyeline.bundle.fill import load
from eyeline.checkpoint import store
from eyeline.core.errors import Refused
from eyeline.core.files import read_lines
from eyeline.models import llava, qwen3
from eyeline.models.moe import Aux, Balance, Experts, Forced, balance_loss, biases_of, set_balance
from eyeline.parallel.ranks import ONE_DEVICE
from eyeline.recipes.problems import settings_problems
from eyeline.study.report import write_report
from eyeline.train.optim import AdamW, make_optimizers
from eyeline.train.run import Run
from eyeline.train.step import Report, validate
from tests.planned import plan_around
from tests.train.ends import end_of
from tests.train.recipe import tiny_run
from tests.train.tiny import CONFIG, batch, document, model, update_alone

LANGUAGE = qwen3.Config(
    vocab_size=50, hidden_size=16, layers=2, heads=2, kv_heads=1, head_dim=8, intermediate_size=24,
    experts=Experts(num_experts=4, experts_per_token=2, intermediate_size=6), tie_embeddings=False,
)  # fmt: skip
SPARSE = CONFIG.model_copy(update={"language": LANGUAGE})
MICRO = [[document(1, 12, 5), document(2, 30, 1, images=2)], [document(4, 20, 14, images=0)]]


def step(by: Balance | None) -> tuple[Report, llava.Model]:
    made = model(SPARSE)
    set_balance(made, by)
    optimizers = make_optimizers(plan_around(made, SPARSE), AdamW())
    return update_alone(made, optimizers, [batch(*m, tokens=60) for m in MICRO], balance=by), made


def test_the_reported_loss_is_without_what_balances() -> None:
    """Both by hand: the loss of labels, and the packs' balance losses, weighted by their 6 and 14 labels."""
    plain, made = step(None)
    balanced, _ = step(Aux(coef=5.0))
    assert balanced.loss == pytest.approx(plain.loss, rel=1e-5)
    assert balanced.grad_norm != pytest.approx(plain.grad_norm, rel=1e-3), "its gradient is applied"
    assert plain.experts is not None
    assert balanced.experts is not None
    assert plain.experts.balance_loss is None

    made = model(SPARSE)
    loads, losses = [], []
    for documents in MICRO:
        load = made(batch(*documents, tokens=60)).load
        assert load is not None
        losses.append(float(balance_loss(load, ONE_DEVICE.sum_of_pack).detach()))
        loads.append(load.tokens_NE)
    assert balanced.experts.balance_loss == pytest.approx((6 * losses[0] + 14 * losses[1]) / 20, rel=1e-5)
    tokens = [row.tolist() for row in sum(loads[1:], loads[0])]
    assert all(sum(row) == 2 * 62 for row in tokens), "two experts a real token"
    assert balanced.experts.max_over_mean == pytest.approx(max(max(row) / (sum(row) / 4) for row in tokens), rel=1e-6)
    assert balanced.experts.unused == sum(n == 0 for row in tokens for n in row)


def test_the_auxiliary_loss_moves_weights_by_its_gradient() -> None:
    """Computed by hand: each micro-batch's auxiliary loss is weighted by its labels."""
    stepped, by_hand, by = model(SPARSE), model(SPARSE), Aux(coef=0.5)
    sgd = torch.optim.SGD(stepped.parameters(), lr=1.0)
    update_alone(stepped, [sgd], [batch(*m, tokens=60) for m in MICRO], balance=by)
    for documents, labels in zip(MICRO, (6, 14), strict=True):
        loss, load, _ = by_hand(batch(*documents, tokens=60))
        assert load is not None
        ((loss + 0.5 * labels * balance_loss(load, ONE_DEVICE.sum_of_pack)) / 20).backward()
    for (name, got), want in zip(stepped.named_parameters(), by_hand.parameters(), strict=True):
        moved = 0 if want.grad is None else want.grad
        torch.testing.assert_close(got, want - moved, atol=1e-6, rtol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


def test_validation_is_the_loss_of_labels_alone() -> None:
    made = model(SPARSE)
    want = validate(made, [batch(*m) for m in MICRO], ONE_DEVICE)
    set_balance(made, Aux(coef=0.5))
    assert validate(made, [batch(*m) for m in MICRO], ONE_DEVICE) == want


def test_even_loads_are_reported_as_one() -> None:
    report, _ = step(Forced())
    assert report.experts is not None
    assert report.experts.unused == 0
    assert report.experts.max_over_mean == pytest.approx(1.0, abs=0.1)


EXPERTS = (
    "model.config.language={family: qwen3, vocab_size: 300, hidden_size: 16, layers: 2, heads: 2, kv_heads: 1, head_dim: 8, "
    "intermediate_size: 24, experts: {num_experts: 4, experts_per_token: 1, intermediate_size: 8}, tie_embeddings: true}",
    "stages.0.experts={balance: bias, rate: 0.02}",
    "stages.1.trains.language.targets=[q_proj, v_proj]",
)


def last(run: Run) -> store.Checkpoint:
    assert run.out
    found = store.newest(Path(run.out) / "checkpoints")
    assert found is not None
    return found


def test_biases_go_through_resumes_stages_and_not_through_exports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = tiny_run(tmp_path, *EXPERTS, f"out={tmp_path / 'whole'}")
    loop.train(whole)
    parts = tiny_run(tmp_path, *EXPERTS, f"out={tmp_path / 'parts'}", "save_steps=2")

    def interrupted(*args, step: int, **more):
        if step == 3:
            raise KeyboardInterrupt
        return original(*args, step=step, **more)

    original = loop.update
    with monkeypatch.context() as patch:
        patch.setattr(loop, "update", interrupted)
        with pytest.raises(KeyboardInterrupt):
            loop.train(parts)
    assert last(parts).state["expert_biases"]
    loop.train(parts)
    assert end_of(parts) == end_of(whole)

    opened = open_bundle(tmp_path / "whole")
    made = load(opened, "cpu").model
    biases = biases_of(made)
    assert len(biases) == 2
    assert all(x.any() for x in biases.values()), "a stage that says nothing keeps them"
    steps = torch.stack(list(biases.values())) / 0.02
    torch.testing.assert_close(steps, steps.round(), atol=1e-3, rtol=0)
    with pytest.raises(Refused, match=r"chosen with biases .* which no class of transformers has.*balance: aux"):
        export(opened.bundle, made, tmp_path / "exported")

    again = tiny_run(tmp_path, *EXPERTS, f"out={tmp_path / 'again'}", "stages.1.experts={balance: aux}")
    loop.train(again)
    opened = open_bundle(tmp_path / "again")
    made = load(opened, "cpu").model
    assert not biases_of(made)
    assert not last(again).state["expert_biases"]


def test_forced_balance_is_stamped(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, *EXPERTS, "stages.0.experts={balance: forced}")
    loop.train(run)
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["forced_expert_balance"] for line in lines if line["kind"] == "start"] == [True]
    steps = [line for line in lines if line["kind"] == "step"]
    assert all(line["expert_max_over_mean"] >= 1 and line["experts_unused"] >= 0 and line["balance_loss"] is None for line in steps)
    assert "Forced expert balance" in write_report(tmp_path / "run").read_text()


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("stages.0.experts={balance: aux}",), "experts sets how experts are balanced, and the model has no experts"),
        ((*EXPERTS, "stages.0.trains={projector: {how: full, lr: 0.1}}"), "moves biases of the language model, which is frozen"),
    ],
)
def test_balance_that_cannot_be_is_a_problem(tmp_path: Path, overrides: tuple[str, ...], words: str) -> None:
    assert words in "\n".join(settings_problems(tiny_run(tmp_path, *overrides)))
    assert "experts" not in "\n".join(settings_problems(tiny_run(tmp_path, *EXPERTS)))
