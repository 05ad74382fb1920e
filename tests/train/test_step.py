"""One update against the same update done by hand, cut otherwise, or not done at all."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import nn

from eyeline.core.batch import Batch, Document
from eyeline.core.errors import OutOfMemory
from eyeline.models import llava
from eyeline.models.decoder import Output
from eyeline.models.lora import LoRA
from eyeline.parallel.ranks import ONE_DEVICE
from eyeline.train.optim import AdamW, make_optimizers, set_learning_rates
from eyeline.train.step import validate
from tests.planned import adapt, plan_around
from tests.train.tiny import CONFIG, batch, document, model, update_alone

SPEC = llava.spec(CONFIG)
RATES = {"vision": 1e-2, "projector": 1e-2, "language": 1e-2}


def step(made: nn.Module, micro_batches: Sequence[Batch], max_grad_norm: float | None = None, settings: AdamW | None = None):
    optimizers = make_optimizers(plan_around(made, CONFIG), settings or AdamW())
    set_learning_rates(optimizers, RATES, 1.0)
    return update_alone(made, optimizers, micro_batches, max_grad_norm=max_grad_norm)


def tensors(made: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in made.named_parameters()}


UNEVEN = [document(1, 12, 5), document(2, 30, 1, images=2), document(3, 9, 0), document(4, 20, 14, images=0)]


@pytest.mark.parametrize("cut", [[UNEVEN[:2], UNEVEN[2:]], [[d] for d in UNEVEN], [UNEVEN[:1], [], UNEVEN[1:]]])
def test_the_update_does_not_depend_on_how_the_step_is_cut(cut) -> None:
    """Plain descent moves by the gradient itself; AdamW's first step would make a rounding of a gradient near zero as large as any."""
    whole, parts = model(), model()
    before = tensors(whole)
    a = update_alone(whole, [torch.optim.SGD(whole.parameters(), lr=1.0)], [batch(*UNEVEN)])
    cuts = [batch(*documents, tokens=80) for documents in cut]
    b = update_alone(parts, [torch.optim.SGD(parts.parameters(), lr=1.0)], cuts)
    assert b.loss == pytest.approx(a.loss, rel=1e-6)
    assert b.grad_norm == pytest.approx(a.grad_norm, rel=1e-5)
    for name, tensor in tensors(whole).items():
        moved, wanted = parts.get_parameter(name).detach() - before[name], tensor - before[name]
        bound = 1e-5 * float(wanted.abs().max()) + 1e-6
        torch.testing.assert_close(moved, wanted, rtol=1e-4, atol=bound, msg=lambda m, n=name: f"{n}: {m}")


def test_loss_is_the_mean_over_labels_by_hand() -> None:
    made = model()
    with torch.no_grad():
        sums = [float(made(batch(d)).out) for d in UNEVEN]
    report = step(made, [batch(*UNEVEN)])
    assert report.loss == pytest.approx(sum(sums) / 20, rel=1e-6)
    assert report.counts.supervised == 20
    assert report.counts.real == 71


def test_clipping_bounds_the_gradient_that_is_applied() -> None:
    """AdamW does not see the scale of gradients, so plain descent is used: the step is as long as rate × clipped norm."""
    made = model()
    before = tensors(made)
    optimizer = torch.optim.SGD(made.parameters(), lr=1.0)
    report = update_alone(made, [optimizer], [batch(*UNEVEN)], max_grad_norm=1e-3)
    moved = torch.stack([(made.get_parameter(n).detach() - t).norm() for n, t in before.items()]).norm()
    assert report.grad_norm is not None and report.grad_norm > 1.0
    assert float(moved) == pytest.approx(1e-3, rel=1e-2)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_step_that_is_not_finite_changes_nothing(value: float) -> None:
    made = model()
    optimizers = make_optimizers(plan_around(made, CONFIG), AdamW(weight_decay=0.1))
    set_learning_rates(optimizers, RATES, 1.0)
    update_alone(made, optimizers, [batch(*UNEVEN)], max_grad_norm=1.0)
    handle = made.get_parameter("language.blocks.0.mlp.up.weight").register_hook(lambda g: g.index_fill(0, torch.tensor([3]), value))
    before, moments = tensors(made), [s["exp_avg"].clone() for s in optimizers[0].state.values()]
    report = update_alone(made, optimizers, [batch(*UNEVEN)], max_grad_norm=1.0, step=1)
    assert report.outcome == "not finite"
    assert all(torch.equal(made.get_parameter(name), tensor) for name, tensor in before.items())
    assert all(torch.equal(s["exp_avg"], m) for s, m in zip(optimizers[0].state.values(), moments, strict=True))
    handle.remove()
    assert update_alone(made, optimizers, [batch(*UNEVEN)], max_grad_norm=1.0, step=2).outcome == "applied"


def test_a_step_without_targets_changes_nothing() -> None:
    made = model()
    before = tensors(made)
    report = step(made, [batch(document(3, 9, 0)), batch(document(5, 9, 0))], settings=AdamW(weight_decay=0.5))
    assert report.outcome == "no targets"
    assert all(torch.equal(made.get_parameter(name), tensor) for name, tensor in before.items())


def test_a_text_only_step_leaves_the_tower_alone_and_undecayed() -> None:
    made = model()
    before = tensors(made)
    step(made, [batch(document(4, 20, 14, images=0))], settings=AdamW(weight_decay=0.5))
    for name, tensor in before.items():
        touched = not torch.equal(made.get_parameter(name), tensor)
        assert touched == name.startswith("language."), name


def test_dropout_is_addressed_by_step_and_pack() -> None:
    """The same step gives the same masks, whatever was drawn before; another seed, step or pack gives others."""

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))
            self.drawn: list[bytes] = []

        def forward(self, batch: Batch) -> Output:
            for draws in (batch.draws_T2, batch.draws_P2):
                assert draws is not None
                self.drawn.append(draws.numpy().tobytes())
            return Output(self.weight * batch.counts.supervised, None)

    def draw(seed: int, step: int) -> list[bytes]:
        noisy = Noisy()
        torch.rand(step + 7)
        update_alone(noisy, [], [batch(UNEVEN[0]), batch(UNEVEN[0])], seed=seed, step=step)
        return noisy.drawn

    assert draw(5, 3) == draw(5, 3)
    assert len({*draw(5, 3), *draw(5, 4), *draw(6, 3)}) == 12


@pytest.mark.parametrize("with_image", [[], [document(3, 9, 0)]])  # or one that has no label
def test_parameters_of_an_earlier_step_are_left_unchanged(with_image: list[Document]) -> None:
    """Gradients are gone after a step, not zero: else momentum and decay would keep moving a tower that text does not use."""
    made = model()
    optimizers = make_optimizers(plan_around(made, CONFIG), AdamW(weight_decay=0.5))
    set_learning_rates(optimizers, RATES, 1.0)
    update_alone(made, optimizers, [batch(*UNEVEN)], max_grad_norm=1.0)
    before = tensors(made)
    text = batch(document(4, 20, 14, images=0))
    assert update_alone(made, optimizers, [text, batch(*with_image)], max_grad_norm=1.0, step=1).outcome == "applied"
    for name, tensor in before.items():
        assert torch.equal(made.get_parameter(name), tensor) != name.startswith("language."), name


def test_validation_turns_dropout_off() -> None:
    made = model()
    adapt(made, SPEC, "language", LoRA(rank=2, alpha=4, dropout=0.9, targets="all-linear"), torch.Generator().manual_seed(0))
    with torch.no_grad():
        for name, p in made.named_parameters():
            if name.endswith("lora_B"):
                p.fill_(0.1)
    made.train()
    first, second = (validate(made, [batch(*UNEVEN)], ONE_DEVICE)[0] for _ in range(2))
    assert first == second
    assert made.training


def test_validation_is_the_mean_over_all_labels_without_dropout() -> None:
    made = model().train()
    whole, labels = validate(made, [batch(*UNEVEN)], ONE_DEVICE)
    parts, _ = validate(made, [batch(d) for d in UNEVEN], ONE_DEVICE)
    assert labels == 20
    assert parts == pytest.approx(whole, rel=1e-6)
    assert made.training


@pytest.mark.parametrize("part", ["vision", "projector"])
def test_text_batch_skips_parts_that_only_images_reach(part: str) -> None:
    """Nothing of a text's loss depends on a projector or tower that learns alone; its labels count in the step's mean."""
    text, image = document(4, 20, 14, images=0), document(1, 12, 5)

    def only_part() -> nn.Module:
        made = model()
        for name, p in made.named_parameters():
            p.requires_grad_(name.startswith(part))
        return made

    alone = only_part()
    before = tensors(alone)
    report = step(alone, [batch(text)], max_grad_norm=1.0, settings=AdamW(weight_decay=0.5))
    assert report.grad_norm == 0
    assert all(torch.equal(alone.get_parameter(name), tensor) for name, tensor in before.items())

    together, apart = only_part(), only_part()
    a, b = step(together, [batch(text, image)]), step(apart, [batch(text), batch(image)])
    assert b.loss == pytest.approx(a.loss, rel=1e-6)
    assert b.grad_norm == pytest.approx(a.grad_norm, rel=1e-5)
    assert b.grad_norm is not None and b.grad_norm > 0


TOO_LARGE = 2**55  # numbers: no host has so much memory


def no_device_memory(*_: object, **__: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")


def no_host_memory(*_: object, **__: object) -> None:
    torch.empty(TOO_LARGE)  # as torch's own allocator says it


def no_array_memory(*_: object, **__: object) -> None:
    np.empty(TOO_LARGE)


FULL = {"device": (no_device_memory, "2.00 GiB"), "host": (no_host_memory, "allocate memory"), "array": (no_array_memory, "Unable to")}


@pytest.mark.parametrize("where", FULL)
@pytest.mark.parametrize("validated", [False, True])
@pytest.mark.parametrize("what", ["forward", "backward", "copy"])
def test_batch_that_does_not_fit_into_memory_is_named(what: str, validated: bool, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if validated and what == "backward":
        return
    made, large = model(), batch(document(7, 12, 5), document(8, 30, 1, images=2), tokens=80)
    full, words = FULL[where]
    match what:
        case "forward":
            monkeypatch.setattr(made, "forward", full)
        case "backward":
            monkeypatch.setattr(torch.Tensor, "backward", full)
        case _:
            monkeypatch.setattr(type(large), "to", lambda self, device: full() if self.counts.slots == 80 else self)
    with pytest.raises(OutOfMemory) as caught:
        validate(made, [large], ONE_DEVICE) if validated else step(made, [batch(document(1, 9, 0)), large])
    said = str(caught.value)
    if validated and what == "copy":  # while the batch before it computes
        assert said.startswith("a batch of validation does not fit") and words in said
        return
    assert said.startswith("a batch of validation (80 tokens" if validated else "micro-batch 1 of step 1 (80 tokens")
    assert f"80 tokens; its longest document is {large.ids[1]} with 30; {large.counts.patches} patches" in said
    assert words in said and "more" not in said.rpartition("(")[2]


@pytest.mark.parametrize("where", FULL)
def test_optimizer_state_that_does_not_fit_into_memory_is_named(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.optim.AdamW, "step", FULL[where][0])
    with pytest.raises(OutOfMemory, match="the optimizer's state in step 1 does not fit into memory"):
        step(model(), [batch(*UNEVEN)])


def test_other_errors_are_not_taken_for_a_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    made = model()
    monkeypatch.setattr(made, "forward", lambda _: torch.zeros(2) + torch.zeros(3))
    with pytest.raises(RuntimeError, match="must match"):
        step(made, [batch(*UNEVEN)])


def test_step_without_labels_has_no_loss() -> None:
    made = model()
    before = tensors(made)
    report = step(made, [batch(document(1, 9, 0)), batch(document(2, 12, 0))])
    assert (report.loss, report.grad_norm, report.outcome) == (None, None, "no targets")
    assert all(torch.equal(made.get_parameter(name), tensor) for name, tensor in before.items())
