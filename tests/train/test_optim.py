"""Optimizers: who is in which group, against torch's own optimizers on the same gradients."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from eyeline.core.errors import Refused
from eyeline.core.plan import Spec
from eyeline.core.shards import Box
from eyeline.models import llava
from eyeline.train.optim import AdamW, Muon, load_state_tensors, make_optimizers, set_learning_rates, state_tensors, without_state
from tests.planned import plan_around
from tests.train.tiny import CONFIG, model

SPEC: Spec = llava.spec(CONFIG)
RATES = {"vision": 1e-3, "projector": 2e-3, "language": 3e-3}


def fill_gradients(made: torch.nn.Module, seed: int = 1) -> None:
    rng = torch.Generator().manual_seed(seed)
    for parameter in made.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.randn(parameter.shape, generator=rng)


@pytest.mark.parametrize("settings", [AdamW(weight_decay=0.1), Muon(weight_decay=0.1)])
def test_every_trainable_parameter_is_in_one_group_with_its_part(settings) -> None:
    made = model()
    made.get_parameter("projector.up.bias").requires_grad_(False)
    groups = [group for optimizer in make_optimizers(plan_around(made, CONFIG), settings) for group in optimizer.param_groups]
    names = [name for group in groups for name in group["names"]]
    assert sorted(names) == sorted(name for name, p in made.named_parameters() if p.requires_grad)
    assert all(name.startswith(group["part"] + ".") for group in groups for name in group["names"])
    assert all(group["params"] for group in groups)


def test_decay_spares_norms_biases_and_embeddings() -> None:
    made = model()
    decayed = {
        n: g["weight_decay"] > 0
        for o in make_optimizers(plan_around(made, CONFIG), AdamW(weight_decay=0.1))
        for g in o.param_groups
        for n in g["names"]
    }
    spared = {name for name, decays in decayed.items() if not decays}
    assert {"language.embed.weight", "vision.positions.weight"} < spared
    assert all(made.get_parameter(name).ndim == 1 for name in spared - {"language.embed.weight", "vision.positions.weight"})
    assert {name for name in decayed if made.get_parameter(name).ndim == 1} < spared
    assert decayed["language.head.weight"]
    assert decayed["vision.embed.weight"]  # the patch embedding is a linear layer


def test_muon_has_the_matrices_of_blocks_and_projector_only() -> None:
    matrices, rest = make_optimizers(plan_around(model(), CONFIG), Muon())
    in_muon = {n for g in matrices.param_groups for n in g["names"]}
    assert "language.blocks.0.attn.q.weight" in in_muon
    assert "projector.up.weight" in in_muon
    assert "vision.blocks.1.mlp.down.weight" in in_muon
    assert in_muon.isdisjoint({"language.embed.weight", "language.head.weight", "vision.embed.weight", "vision.positions.weight"})
    assert all(not n.endswith("bias") for n in in_muon)
    assert {n for g in rest.param_groups for n in g["names"]}.isdisjoint(in_muon)


def test_updates_of_muon_have_the_size_of_adamws() -> None:
    """0.2 a value for every shape (Liu et al. 2025): torch's default scaling gives 0.11 here."""
    wide = CONFIG.model_copy(update={"language": CONFIG.language.model_copy(update={"hidden_size": 64, "intermediate_size": 256})})
    made = model(wide)
    matrices, _ = make_optimizers(plan_around(made, wide), Muon())
    set_learning_rates([matrices], dict.fromkeys(RATES, 1.0), 1.0)
    before = {name: p.detach().clone() for name, p in made.named_parameters()}
    fill_gradients(made)
    matrices.step()
    for name in ("language.blocks.0.mlp.up.weight", "language.blocks.0.mlp.down.weight", "language.blocks.1.attn.q.weight"):
        moved = (made.get_parameter(name).detach() - before[name]).square().mean().sqrt()
        assert 0.15 < float(moved) < 0.23, f"{name}: {float(moved)}"


def test_rates_follow_part_ratio_and_schedule() -> None:
    optimizers = make_optimizers(plan_around(model(), CONFIG), Muon(adamw_lr_ratio=0.5))
    set_learning_rates(optimizers, RATES, 0.1)
    for optimizer, ratio in zip(optimizers, (1.0, 0.5), strict=True):
        for group in optimizer.param_groups:
            assert group["lr"] == pytest.approx(RATES[group["part"]] * ratio * 0.1)


def test_adamw_is_torchs_with_a_rate_a_part() -> None:
    """Against one plain torch.optim.AdamW a part: a group that got another part's rate would differ."""
    ours, theirs = model(), model()
    settings = AdamW(betas=(0.8, 0.9), eps=1e-6, weight_decay=0.0)
    optimizers = make_optimizers(plan_around(ours, CONFIG), settings)
    set_learning_rates(optimizers, RATES, 1.0)
    plain = [
        torch.optim.AdamW(
            [p for n, p in theirs.named_parameters() if n.startswith(part)], lr=lr, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.0
        )
        for part, lr in RATES.items()
    ]
    for seed in range(3):
        fill_gradients(ours, seed)
        fill_gradients(theirs, seed)
        for optimizer in (*optimizers, *plain):
            optimizer.step()
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(ours.get_parameter(name), parameter, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("settings", [AdamW(weight_decay=0.1), Muon(weight_decay=0.1)])
def test_saved_state_resumes_bit_for_bit(settings) -> None:
    whole, first, second = model(), model(), model()

    def go(made, optimizers, seeds) -> None:
        set_learning_rates(optimizers, RATES, 1.0)
        for seed in seeds:
            fill_gradients(made, seed)
            for optimizer in optimizers:
                optimizer.step()

    go(whole, make_optimizers(plan_around(whole, CONFIG), settings), range(4))
    optimizers = make_optimizers(plan_around(first, CONFIG), settings)
    go(first, optimizers, range(2))
    saved = {name: tensor.clone() for name, tensor in state_tensors(optimizers).items()}
    second.load_state_dict(first.state_dict())
    again = make_optimizers(plan_around(second, CONFIG), settings)
    load_state_tensors(again, Kept(saved))
    go(second, again, range(2, 4))
    assert all(torch.equal(p, second.get_parameter(n)) for n, p in whole.named_parameters())


@dataclass(frozen=True)
class Kept:
    """Tensors in memory, to be read as those of a checkpoint are."""

    meta: dict[str, torch.Tensor]

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        return self.meta[name]


def stepped(settings: Any) -> tuple[list[torch.optim.Optimizer], dict[str, torch.Tensor]]:
    """Fresh optimizers, and what others had after a step."""
    made = model()
    optimizers = make_optimizers(plan_around(made, CONFIG), settings)
    set_learning_rates(optimizers, RATES, 1.0)
    fill_gradients(made, 0)
    for optimizer in optimizers:
        optimizer.step()
    return make_optimizers(plan_around(model(), CONFIG), settings), {
        name: tensor.clone() for name, tensor in state_tensors(optimizers).items()
    }


NORM, MATRIX = "language.norm.weight", "language.blocks.0.mlp.up.weight"  # moved by AdamW and, if there is one, by Muon
SPOILT: dict[str, tuple[Callable[[dict[str, torch.Tensor]], Any], str]] = {
    "a missing tensor": (lambda s: s.pop(f"{NORM}:exp_avg"), rf"{NORM}:exp_avg is not in the checkpoint"),
    "a missing step": (lambda s: s.pop(f"{NORM}:step"), rf"{NORM}:step is not in the checkpoint"),
    "a missing parameter": (lambda s: [s.pop(name) for name in list(s) if name.startswith(NORM)], rf"{NORM}:step is not in the checkpoint"),
    "nothing at all": (lambda s: s.clear(), "is not in the checkpoint.*\n  ... and [0-9]+ more"),
    "another parameter's": (lambda s: s.update({"language.no:exp_avg": torch.zeros(1)}), "language.no:exp_avg is not in the model"),
    "another optimizer's": (lambda s: s.update({f"{NORM}:momentum_buffer": torch.zeros(16)}), "momentum_buffer is not in the model"),
    "a short tensor": (lambda s: s.update({f"{NORM}:exp_avg": s[f"{NORM}:exp_avg"][:3]}), r"exp_avg is \[3\] torch.float32, wanted \[16\]"),
    "as many numbers in another shape": (lambda s: turned(s, MATRIX), r"wanted \[24, 16\]"),
    "a longer step": (lambda s: s.update({f"{NORM}:step": torch.ones(1)}), r"step is \[1\] torch.float32, wanted \[\]"),
    "halved numbers": (lambda s: s.update({f"{NORM}:exp_avg": torch.ones(16).half()}), r"torch.float16, wanted \[16\] torch.float32"),
    "whole numbers": (lambda s: s.update({f"{NORM}:step": torch.ones((), dtype=torch.int64)}), r"step is \[\] torch.int64, wanted"),
}  # fmt: skip


def turned(state: dict[str, torch.Tensor], name: str) -> None:
    state |= {full: tensor.T for full, tensor in state.items() if full.startswith(name) and tensor.ndim}


@pytest.mark.parametrize("what", SPOILT)
@pytest.mark.parametrize("settings", [AdamW(), Muon()])
def test_state_that_does_not_fit_is_refused_and_nothing_is_loaded(settings, what: str) -> None:
    """A kernel would read past the end of a short one."""
    optimizers, state = stepped(settings)
    spoil, words = SPOILT[what]
    spoil(state)
    with pytest.raises(Refused, match=rf"(?s)the optimizer state of runs/x does not fit this model:.*{words}.*Use the recipe"):
        load_state_tensors(optimizers, Kept(state), where="runs/x")
    assert state_tensors(optimizers) == {}


@pytest.mark.parametrize("settings", [AdamW(), Muon()])
def test_parameter_without_a_gradient_has_no_state_and_loads(settings) -> None:
    made = model()
    optimizers = make_optimizers(plan_around(made, CONFIG), settings)
    fill_gradients(made, 0)
    made.language.norm.weight.grad = None
    for optimizer in optimizers:
        optimizer.step()
    state, without = state_tensors(optimizers), without_state(optimizers)
    assert without == [NORM]
    load_state_tensors(again := make_optimizers(plan_around(model(), CONFIG), settings), Kept(state), without)
    assert state_tensors(again).keys() == state.keys()
    with pytest.raises(Refused, match=f"{NORM}:exp_avg is not in the checkpoint"):
        load_state_tensors(again, Kept(state))
