"""AdamW whose moments take little of the device's memory: in bfloat16, on the host between steps, or both.

The update is torch's fused kernel on float32 moments, a chunk of a parameter at a time. Rounding to bfloat16 is stochastic, and addressed
by seed, parameter and step, so that a resumed run rounds as one that was not interrupted.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from eyeline.core.randomness import seed_for
from eyeline.core.shards import held, is_sharded, places_in_whole
from eyeline.kernels.rounding import stochastic_bf16
from eyeline.train.not_compiled import NotCompiled

CHUNK = 1 << 24  # numbers whose moments are on the device in float32 at once
MOMENTS = ("exp_avg", "exp_avg_sq")


class SmallAdamW(NotCompiled):
    def __init__(
        self, groups: list[dict[str, Any]], betas: tuple[float, float], eps: float, dtype: torch.dtype, offload: bool, seed: int
    ) -> None:
        super().__init__(groups, {"lr": 0.0})
        self.betas, self.eps, self.dtype, self.offload, self.seed = betas, eps, dtype, offload, seed

    def new_moment(self, parameter: nn.Parameter) -> Tensor:
        """A moment of a parameter, zero. On the host it is pinned where the parameter is on a GPU, which copies faster."""
        if not self.offload:
            return torch.zeros_like(parameter, dtype=self.dtype, requires_grad=False)
        assert not is_sharded(parameter), "offloaded moments are of one device"
        return torch.zeros(parameter.shape, dtype=self.dtype, pin_memory=parameter.is_cuda)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002 (as in torch)
        for group in self.param_groups:
            for name, parameter in zip(group["names"], group["params"], strict=True):
                if parameter.grad is not None:
                    self._move(name, parameter, group)

    def _move(self, name: str, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())  # on the host
            state |= {moment: self.new_moment(parameter) for moment in MOMENTS}
        state["step"] += 1
        part, number = held(parameter), int(state["step"])
        local, gradient = part.local.view(-1), held(parameter.grad).local.reshape(-1)  # type: ignore[arg-type]  # step looked
        moments = [held(state[moment]).local.view(-1) for moment in MOMENTS]
        addresses = [seed_for(self.seed, f"rounding {moment} of {name}", number) for moment in MOMENTS]
        done = torch.tensor(float(number), device=local.device)
        for chunk in _chunks(len(local)):
            floats = [moment[chunk].to(local.device, torch.float32, copy=True) for moment in moments]
            torch._fused_adamw_(  # pyright: ignore[reportPrivateImportUsage]
                [local[chunk]],
                [gradient[chunk]],
                [floats[0]],
                [floats[1]],
                [],
                [done],
                lr=group["lr"],
                beta1=self.betas[0],
                beta2=self.betas[1],
                weight_decay=group["weight_decay"],
                eps=self.eps,
                amsgrad=False,
                maximize=False,
            )
            if self.dtype != torch.float32:
                place_N = places_in_whole(part.box, tuple(parameter.shape), chunk.start, chunk.stop, local.device)
                floats = [stochastic_bf16(value, address, place_N) for value, address in zip(floats, addresses, strict=True)]
            for moment, value in zip(moments, floats, strict=True):
                moment[chunk].copy_(value)


def _chunks(count: int) -> Iterator[slice]:
    return (slice(start, min(start + CHUNK, count)) for start in range(0, count, CHUNK))
