"""Muon's step with one chain of products for all matrices of a shape, where torch has one for each matrix.

A small model's matrices take microseconds each, and starting a product takes longer: of the tiny model in `easyvqa-tiny`, the step of
Muon takes a fifth of torch's time, and is the same step.
"""

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from eyeline.train.not_compiled import NotCompiled

LARGE = 1 << 17  # numbers in a matrix that keeps a device busy by itself: a stack of such ones is no faster, and on a CPU slower
MOST_STACKED = 1 << 22  # numbers in a stack, which is a copy


class StackedMuon(NotCompiled, torch.optim.Muon):
    """`torch.optim.Muon` with Nesterov momentum and updates scaled to AdamW's size, on one device."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step of all matrices that have a gradient."""
        assert closure is None, "the gradients are there already"
        for group in self.param_groups:
            matrices = [p for p in cast(list[nn.Parameter], group["params"]) if p.grad is not None]
            for same in _stacks(matrices):
                updates = torch.stack([self._momentum(p, group) for p in same])
                changes = orthogonalised(updates, group["ns_coefficients"], group["ns_steps"], group["eps"])
                scale = 0.2 * max(updates.shape[1:]) ** 0.5
                for p, change in zip(same, changes, strict=True):
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.add_(change, alpha=-group["lr"] * scale)

    def _momentum(self, p: nn.Parameter, group: dict[str, Any]) -> Tensor:
        """What is orthogonalised; the momentum moves."""
        state = self.state[p]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p, requires_grad=False)
        assert p.grad is not None and group["nesterov"] and group["adjust_lr_fn"] == "match_rms_adamw"
        momentum = state["momentum_buffer"].lerp_(p.grad, 1 - group["momentum"])
        return p.grad.lerp(momentum, group["momentum"])


def _stacks(matrices: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Matrices of one shape, no more than a stack may have."""
    by_shape: dict[torch.Size, list[nn.Parameter]] = {}
    for p in matrices:
        by_shape.setdefault(p.shape, []).append(p)
    for shape, same in by_shape.items():
        most = 1 if shape.numel() > LARGE else max(1, MOST_STACKED // shape.numel())
        yield from (same[n : n + most] for n in range(0, len(same), most))


def orthogonalised(x_NRC: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Newton-Schulz iteration in bfloat16 (Jordan 2024): N matrices with singular values near 1, and the same singular vectors."""
    a, b, c = coefficients
    tall = x_NRC.shape[1] > x_NRC.shape[2]
    g = x_NRC.bfloat16().mT if tall else x_NRC.bfloat16()
    g = g / g.norm(dim=(1, 2), keepdim=True).clamp(min=eps)  # the largest singular value is at most 1
    add_product = torch.baddbmm
    if len(g) == 1:  # the other kernels are slower on one large matrix
        g, add_product = g[0], torch.addmm
    for _ in range(steps):
        gram = g @ g.mT
        g = add_product(g, add_product(gram, gram, gram, beta=b, alpha=c), g, beta=a)
    return (g.mT if tall else g).reshape(x_NRC.shape)
