"""Passes over memory as one kernel. A function is written plainly, with tensors in float32 between what it reads and what it returns. On a
GPU PyTorch's compiler makes a kernel of it, so that these never reach memory. Everywhere else the function runs as it stands.
"""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

from eyeline.kernels.gpu import on_gpu
from eyeline.kernels.opaque import LIBRARY

Inputs = ParamSpec("Inputs")
Out = TypeVar("Out")


def one_kernel(function: Callable[Inputs, Out]) -> Callable[Inputs, Out]:
    """Decorator: a function of tensors, the first of which says where it runs, as the operator `eyeline::name`.

    It has no gradient: a torch.autograd.Function calls one operator forward and others backward. Inside a graph that is being compiled, the
    compiler gets the function itself, and may fuse it with its neighbours.
    """
    name = function.__name__.strip("_")
    plain: Callable[..., Any] = function

    @functools.cache
    def compiled() -> Callable[..., Any]:
        return torch.compile(function, dynamic=True, fullgraph=True)  # once for all sizes: those of a batch differ from step to step

    def run(*args: Any) -> Any:
        if not _compiles(args[0]):
            return plain(*args)
        # detached: else one more kernel is made for tensors that need gradients
        return compiled()(*(x.detach() if isinstance(x, torch.Tensor) else x for x in args))

    LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=()))
    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"eyeline::{name}", function, lib=LIBRARY)
    operator = getattr(torch.ops.eyeline, name).default

    @functools.wraps(function)
    def call(*args: Inputs.args, **kwargs: Inputs.kwargs) -> Out:
        x: Any = args[0]
        return operator(*args, **kwargs) if on_gpu(x) and not torch.compiler.is_compiling() else function(*args, **kwargs)

    return call


def _compiles(x: torch.Tensor) -> bool:
    return x.is_cuda and x.numel() > 0 and compiler_obstacle(x.device) is None


@functools.cache
def compiler_obstacle(device: torch.device) -> str | None:
    """The reason why PyTorch's compiler makes no kernels for this GPU; None where it does. It is asked once, for a small one."""
    x = torch.arange(8.0, device=device)
    try:
        made = torch.compile(_tried, dynamic=True, fullgraph=True)(x)
    except Exception as error:  # noqa: BLE001 - compilers and drivers raise what they like: it is reported, and functions run as they stand
        lines = str(error).strip().splitlines()
        return f"{type(error).__name__}{f': {lines[0][:200]}' if lines else ''}"
    return None if torch.allclose(made, _tried(x)) else "a kernel that it made computes something else"


def _tried(x: torch.Tensor) -> torch.Tensor:
    return (x * 2 + 1).sum(-1, keepdim=True) * x
