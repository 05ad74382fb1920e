"""Blocks of a model as graphs of PyTorch's compiler (`compile: blocks`): all that is between the products of a block becomes a few kernels.

A block stays the module that it is, with the names of its tensors; only its `forward` is replaced. So what hangs on the module runs outside
its graph, as the hooks that gather sharded parameters do, and checkpoints know nothing of it. Blocks of one kind share a graph: their
tensors are inputs of it. Sizes that differ from batch to batch are symbols in it, so that it is made once. Inside are the gradient
checkpointing of the block, and as opaque operators what reads document bounds on the host. The embedding, the head and what is between
tower and language model stay outside.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from eyeline.core.plan import Plan
from eyeline.kernels.gpu import Capability, flash_obstacle
from eyeline.kernels.one_kernel import compiler_obstacle
from eyeline.models.kernel_paths import attending
from eyeline.models.layers import Again, Compiled, recomputed

BACKEND = "inductor"
MOST_GRAPHS = 64  # of all blocks of a process. PyTorch's own limit, 8, is of a function, and all blocks are run by one


def compile_blocks(plan: Plan[Any], backend: str | Callable[..., Any] | None = None) -> list[str]:
    """Have the blocks of a placed model compiled when they are first called with gradients; the names of these blocks. The packs of a
    stage all have as many tokens, and as many patches as it comes."""
    import torch._dynamo  # a second
    import torch.fx.experimental._config

    torch.fx.experimental._config.use_duck_shape = False  # else sizes that happen to be equal in the first batch are taken for one
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MOST_GRAPHS)
    graph = torch.compile(_run, backend=backend or BACKEND, fullgraph=True, dynamic=True)
    names = [name for part in plan.blocks for name in plan.blocks[part] if plan.spec.uses(name)]
    for name in names:
        block = plan.model.get_submodule(name)
        block.forward = Compiled(block, graph, fixed_rows=name.startswith("language."))
    return names


def _run(block: nn.Module, again: Again | None, *args: Any) -> Any:
    forward = type(block).forward
    return forward(block, *args) if again is None else recomputed(forward, again, block, *args)


def compiler_problem(device: torch.device) -> str | None:
    """What PyTorch's compiler lacks on this machine, and what to do; None where it works. Asked once, it compiles a small function."""
    obstacle = compiler_obstacle(device)
    if obstacle is None:
        return None
    needs = (
        "Triton, which comes with PyTorch for CUDA, a C compiler such as gcc, and Python's headers"
        if device.type == "cuda"
        else "a C++ compiler such as g++, and Python's headers"
    )
    return (
        f"compile: blocks, and PyTorch's compiler fails on this machine: {obstacle}. It needs {needs} (on Debian and Ubuntu: "
        "apt install g++ python3-dev). Install them, or set compile: none"
    )


def attention_problem(model: nn.Module, capability: Capability | None, dtype: torch.dtype) -> str | None:
    """The reason why the attention of a model cannot be part of a graph on this GPU, and what to do; None where it can be."""
    if capability is None:
        return None
    for part, head_dim in attending(model):
        obstacle = flash_obstacle(dtype, head_dim, capability)
        if obstacle is not None:
            return (
                f"compile: blocks, and the attention of {part} cannot be part of a graph here, because {obstacle}: it would read document "
                "bounds on the host. Set compile: none" + (", or precision: bf16" if dtype == torch.float32 else "")
            )
    return None
