"""Optimizers without torch's compiler."""

import inspect
from typing import Any

import torch


class NotCompiled(torch.optim.Optimizer):
    """An optimizer that torch.compile never sees. torch wraps these methods so that it may, and to that end imports torch._dynamo:
    a quarter of the CPU time from the start of a process to its first step."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        inspect.unwrap(torch.optim.Optimizer.add_param_group)(self, param_group)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        inspect.unwrap(super().step)(self, closure)
