"""Operators of ours: functions of tensors that torch.compile takes as they are, so that what they ask the host leaves its graph one."""

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

Inputs = ParamSpec("Inputs")
Out = TypeVar("Out")
LIBRARY = torch.library.Library("eyeline", "FRAGMENT")
FUNCTIONS: dict[Any, Callable[..., Any]] = {}  # operator -> what it runs


def opaque(fake: Callable[..., Any]) -> Callable[[Callable[Inputs, Out]], Callable[Inputs, Out]]:
    """Decorator: a function as the operator `eyeline::name`, of which tracing knows what `fake` gives: tensors of the right shapes.

    It has no gradient: a torch.autograd.Function calls one operator forward and one backward. `torch.library.custom_op`, which does
    this too, asks so much at every call that forward and backward together take 0.1 ms longer: a third of a short document's attention.
    """

    def operator(function: Callable[Inputs, Out]) -> Callable[Inputs, Out]:
        name = function.__name__.strip("_")
        LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=()))
        LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"eyeline::{name}", fake, lib=LIBRARY)
        made = getattr(torch.ops.eyeline, name).default
        FUNCTIONS[made] = function
        return made

    return operator
