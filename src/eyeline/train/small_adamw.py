"""AdamW whose moments take little of the device's memory: in bfloat16 or in 8 bits, on the host between steps, or both.

The update is torch's fused kernel on float32 moments, a chunk of a parameter at a time. Rounding to bfloat16 is stochastic, and addressed
by seed, parameter and step, so that a resumed run rounds as one that was not interrupted. Rounding to 8 bits is to the nearest level; its
blocks are within the rows of a parameter, so that they are the same however ranks share out rows.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from eyeline.core.randomness import seed_for
from eyeline.core.shards import held, is_sharded, places_in_whole, zeros_in_rows
from eyeline.kernels.dynamic8 import blocks_of, dequantised, quantised
from eyeline.kernels.rounding import stochastic_bf16
from eyeline.train.not_compiled import NotCompiled

CHUNK = 1 << 24  # numbers whose moments are on the device in float32 at once
FEWEST = 4096  # numbers: of smaller tensors, and of vectors, moments stay in float32 where others are in 8 bits
MOMENTS = ("exp_avg", "exp_avg_sq")  # the first has a sign


def in_8_bits(shape: tuple[int, ...]) -> bool:
    """Return whether the moments of a tensor are kept in 8 bits where the optimizer's are."""
    return len(shape) > 1 and math.prod(shape) >= FEWEST


def bytes_in_8_bits(shape: tuple[int, ...]) -> int:
    """The bytes of one moment of a tensor, with the largest magnitudes of its blocks."""
    return math.prod(shape[:-1]) * (shape[-1] + 4 * blocks_of(shape[-1])) if in_8_bits(shape) else 4 * math.prod(shape)


class SmallAdamW(NotCompiled):
    """AdamW with moments of `dtype`, where uint8 stands for levels of 8 bits."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        betas: tuple[float, float],
        eps: float,
        dtype: torch.dtype,
        offload: bool,
        seed: int,
        in_backward: bool = False,
    ) -> None:
        super().__init__(groups, {"lr": 0.0})
        self.betas, self.eps, self.dtype, self.offload, self.seed = betas, eps, dtype, offload, seed
        self.in_backward = in_backward  # parameters are updated as their gradients come: `train/in_backward.py`

    def sizes(self, shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """The shapes and dtypes of what is kept of the moments of a parameter of some shape."""
        if self.dtype != torch.uint8 or not in_8_bits(shape):
            return dict.fromkeys(MOMENTS, (shape, torch.float32 if self.dtype == torch.uint8 else self.dtype))
        largest = ((*shape[:-1], blocks_of(shape[-1])), torch.float32)
        return dict.fromkeys(MOMENTS, (shape, torch.uint8)) | {f"{moment}_largest": largest for moment in MOMENTS}

    def new_moments(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """What is kept of a parameter's moments, zero. On the host it is pinned where the parameter is on a GPU, which copies faster."""
        sizes = self.sizes(tuple(parameter.shape))
        if self.offload:
            assert not is_sharded(parameter), "offloaded moments are of one device"
            return {key: torch.zeros(shape, dtype=dtype, pin_memory=parameter.is_cuda) for key, (shape, dtype) in sizes.items()}
        return {
            key: torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
            if shape == tuple(parameter.shape)
            else zeros_in_rows(parameter, shape[-1], dtype)
            for key, (shape, dtype) in sizes.items()
        }

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002 (as in torch)
        for group in self.param_groups:
            for name, parameter in zip(group["names"], group["params"], strict=True):
                if parameter.grad is not None:
                    self.update(name, parameter, group)

    @torch.no_grad()
    def update(self, name: str, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        """Update a parameter by its gradient."""
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())  # on the host
            state |= self.new_moments(parameter)
        state["step"] += 1
        keys, number = self.sizes(tuple(parameter.shape)), int(state["step"])
        in_rows = len(keys) > len(MOMENTS)  # where blocks are within rows, a chunk is of whole rows
        local, *kept = (_flat(x, in_rows) for x in (parameter, *(state[key] for key in keys)))
        gradient = held(parameter.grad).local.reshape(local.shape)  # type: ignore[arg-type]  # step looked
        done = torch.tensor(float(number), device=local.device)
        for chunk in _chunks(len(local), max(CHUNK // parameter.shape[-1], 1) if in_rows else CHUNK):
            here = [x[chunk].to(local.device) for x in kept]
            floats = _dequantised(here) if in_rows else [x.to(torch.float32, copy=True) for x in here]
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
            values = _quantised(floats) if in_rows else self._rounded(floats, name, parameter, number, chunk)
            for x, value in zip(kept, values, strict=True):
                x[chunk].copy_(value)

    def _rounded(self, floats: list[Tensor], name: str, parameter: nn.Parameter, number: int, chunk: slice) -> list[Tensor]:
        """Moments of a chunk as they are kept, in a step of this number."""
        if self.dtype != torch.bfloat16:
            return floats
        place_N = places_in_whole(held(parameter).box, tuple(parameter.shape), chunk.start, chunk.stop, floats[0].device)
        addresses = [seed_for(self.seed, f"rounding {moment} of {name}", number) for moment in MOMENTS]
        return [stochastic_bf16(value, address, place_N) for value, address in zip(floats, addresses, strict=True)]


def _flat(x: Tensor, in_rows: bool) -> Tensor:
    """What this rank holds of a tensor, which shares its memory: in rows, or one number after another."""
    return held(x).local.view((-1, x.shape[-1]) if in_rows else (-1,))


def _dequantised(kept: Sequence[Tensor]) -> list[Tensor]:
    """Both moments, of their codes and then the largest magnitudes of their blocks."""
    first, second, first_largest, second_largest = kept
    return [dequantised(first, first_largest, signed=True), dequantised(second, second_largest, signed=False)]


def _quantised(moments: Sequence[Tensor]) -> list[Tensor]:
    first, second = quantised(moments[0], signed=True), quantised(moments[1], signed=False)
    return [first[0], second[0], first[1], second[1]]


def _chunks(count: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, count)) for start in range(0, count, size))
