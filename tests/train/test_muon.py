"""Muon of stacked matrices takes torch's step."""

import pytest
import torch
from torch import nn

from eyeline.train import muon
from eyeline.train.muon import StackedMuon

SHAPES = [(64, 64)] * 5 + [(64, 256), (256, 64), (64, 256), (96, 64), (1, 7), (7, 1), (300, 500)]
HOW = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}


def matrices(seed: int) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


@pytest.mark.parametrize("most", [muon.MOST_STACKED, 2 * 64 * 64, 1])
def test_stacked_matrices_take_the_step_of_torch(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three steps, with a matrix that has no gradient in the second, and one whose gradient is zero in the third."""
    monkeypatch.setattr(muon, "MOST_STACKED", most)
    ours, theirs = matrices(0), matrices(0)
    optimizers = StackedMuon(ours, **HOW), torch.optim.Muon(theirs, **HOW)  # type: ignore[arg-type]
    for step in range(3):
        for own, other, gradient in zip(ours, theirs, matrices(step + 1), strict=True):
            own.grad, other.grad = gradient.detach().clone(), gradient.detach().clone()
        for own, other in ((ours[1], theirs[1]),) if step == 1 else ():
            own.grad = other.grad = None
        for some in (ours, theirs) if step == 2 else ():
            some[2].grad = torch.zeros(64, 64)
        for optimizer in optimizers:
            optimizer.step()
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=2e-6)
        torch.testing.assert_close(*(x.state[p]["momentum_buffer"] for x, p in zip(optimizers, (own, other), strict=True)), rtol=0, atol=0)
