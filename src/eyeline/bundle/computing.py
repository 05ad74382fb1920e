"""Models on the machine that they compute on: the kernels that they take there."""

import torch

from eyeline.core.log import say, warn
from eyeline.models import Model
from eyeline.models.kernel_paths import choose
from eyeline.parallel.launch import Machine


def choose_kernels(model: Model, here: Machine, dtype: torch.dtype, *, trains: bool, quiet: bool = False) -> tuple[str, ...]:
    """Choose the kernels of a model that computes in `dtype` here and print them, or with `quiet` only what is slow or was found wrong.
    All that could be printed."""
    found = choose(model, here.device, here.capability, dtype, trains=trains, deterministic=here.deterministic)
    for line in () if quiet else found.lines:
        say(line)
    for line in found.warnings:
        warn(line)
    return found.lines + found.warnings
