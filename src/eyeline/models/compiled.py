"""Blocks of a model as graphs of PyTorch's compiler (`compile: blocks`): all that is between the products of a block becomes a few kernels.

A block stays the module that it is, with the names of its tensors; only its `forward` is replaced. So what hangs on the module runs outside
its graph, as the hooks that gather sharded parameters do, and checkpoints know nothing of it. Blocks of one kind share a graph: their
tensors are inputs of it. Sizes that differ from batch to batch are symbols in it, so that it is made once. Inside are the gradient
checkpointing of the block, and as opaque operators what reads document bounds on the host. The embedding, the head and what is between
tower and language model stay outside.

Experts that are sharded over other ranks than their block are gathered inside it, by hooks, and where rows go to the ranks of their experts
the host waits for how many come. Such a block is two graphs, and what is between them runs as it stands: attention, norm and router, then
the dispatch with the experts, then the sum.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from eyeline.core.plan import Plan
from eyeline.kernels.gpu import Capability, flash_obstacle
from eyeline.kernels.one_kernel import compiler_obstacle
from eyeline.models.decoder import Layout
from eyeline.models.kernel_paths import attending
from eyeline.models.layers import Again, Compiled, recomputed
from eyeline.models.moe import MoE

BACKEND = "inductor"
MOST_GRAPHS = 64  # of all blocks of a process. PyTorch's own limit, 8, is of a function, and all blocks are run by one


def compile_blocks(plan: Plan[Any], backend: str | Callable[..., Any] | None = None, experts_apart: bool = False) -> list[str]:
    """Have the blocks of a placed model compiled when they are first called with gradients; the names of these blocks. The packs of a
    stage all have as many tokens, and as many patches as it comes. `experts_apart`: they are sharded over other ranks than their blocks."""
    import torch._dynamo  # a second
    import torch.fx.experimental._config

    torch.fx.experimental._config.use_duck_shape = False  # else sizes that happen to be equal in the first batch are taken for one
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MOST_GRAPHS)
    graph, before, after = (
        torch.compile(function, backend=backend or BACKEND, fullgraph=True, dynamic=True) for function in (_run, _before, _after)
    )
    names = [name for part in plan.blocks for name in plan.blocks[part] if plan.spec.uses(name)]
    for name in names:
        block: Any = plan.model.get_submodule(name)
        whole = not (experts_apart and isinstance(getattr(block, "mlp", None), MoE))
        run = graph if whole else partial(_around_experts, before, after)
        block.forward = Compiled(block, run, fixed_rows=name.startswith("language."), whole=whole)
    return names


def _run(block: nn.Module, again: Again | None, *args: Any) -> Any:
    forward = type(block).forward
    return forward(block, *args) if again is None else recomputed(forward, again, block, *args)


def _around_experts(before: Any, after: Any, block: Any, again: Again | None, x_TD: Tensor, layout: Layout, cache: Any = None) -> Any:
    assert cache is None, "nothing is generated with gradients"
    x_TD = x_TD.view_as(x_TD)  # FSDP gives a view in the forward pass and none when activations are made again: another graph
    torch._dynamo.mark_static(x_TD, 0)
    x_TD, normed_TD, chosen_TA, weight_TA, routed = before(block, again, x_TD, layout)
    apart = block.mlp.apart if again is None else partial(recomputed, block.mlp.apart, again)
    y_TD, gate_T1 = apart(normed_TD, chosen_TA, weight_TA)
    for x in (x_TD, normed_TD, y_TD):
        torch._dynamo.mark_static(x, 0)
    return after(block, again, x_TD, normed_TD, y_TD, gate_T1, layout.draws_T2), routed


def _before(block: Any, again: Again | None, *args: Any) -> Any:
    return _to_experts(block, *args) if again is None else recomputed(_to_experts, again, block, *args)


def _to_experts(block: Any, x_TD: Tensor, layout: Layout) -> Any:
    x_TD = x_TD + block.attn(block.norm1(x_TD), layout)
    normed_TD = block.norm2(x_TD)
    return x_TD, normed_TD, *block.mlp.router(normed_TD, layout.real_T)


def _after(block: Any, again: Again | None, *args: Any) -> Tensor:
    return _from_experts(block, *args) if again is None else recomputed(_from_experts, again, block, *args)


def _from_experts(block: Any, x_TD: Tensor, normed_TD: Tensor, y_TD: Tensor, gate_T1: Tensor | None, draws_T2: Tensor | None) -> Tensor:
    return x_TD + block.mlp.joined(normed_TD, y_TD, gate_T1, draws_T2)


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


def attention_problem(
    model: nn.Module, capability: Capability | None, dtype: torch.dtype, setting: str = "compile: blocks", off: str = "compile: none"
) -> str | None:
    """The reason why the attention of a model cannot be part of a graph on this GPU, and what to do; None where it can be. `setting` asks
    for graphs, and `off` for none."""
    if capability is None:
        return None
    for part, head_dim in attending(model):
        obstacle = flash_obstacle(dtype, head_dim, capability)
        if obstacle is not None:
            return (
                f"{setting}, and the attention of {part} cannot be part of a graph here, because {obstacle}: it would read document "
                f"bounds on the host. Set {off}" + (", or precision: bf16" if dtype == torch.float32 else "")
            )
    return None
