"""Parameters of which a rank has a piece: DTensors while they rest, so that optimizers, checkpoints and norms know the whole; plain local
tensors while the module that computes with them runs, so that kernels never meet a DTensor."""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor


def cut(module: nn.Module, leaf: str, placements: Sequence[Placement], mesh: DeviceMesh) -> None:
    """Make a parameter, which has no memory yet, a piece of itself: no rank sends another anything."""
    whole = module._parameters[leaf]
    assert whole is not None and whole.is_meta
    piece = distribute_tensor(whole.detach(), mesh, placements, src_data_rank=None)
    module._parameters[leaf] = nn.Parameter(piece, requires_grad=whole.requires_grad)


def along(dim: int, mesh: DeviceMesh) -> list[Placement]:
    """Cut over the last axis of a mesh; the ranks of the others have the same."""
    return [*[Replicate()] * (mesh.ndim - 1), Shard(dim)]


def in_pieces(
    root: nn.Module,
    before: Callable[[Tensor], Tensor] | None = None,
    after: Callable[[Tensor], Tensor] | None = None,
    within: Sequence[nn.Module] | None = None,
) -> None:
    """While `root` runs, the DTensors in it, or in what is `within` it, are this rank's pieces. `before` is applied to its first argument,
    `after` to its result.

    What is whole on ranks that each see a part of what it does (LoRA's A before outputs that are cut) has a gradient that is a summand:
    its sum is taken where the gradient leaves.
    """
    kept: list[list[tuple[nn.Module, str, nn.Parameter]]] = []

    def enter(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        kept.append([])
        for module in chain.from_iterable(one.modules() for one in within or (root,)):
            for leaf, p in module._parameters.items():
                if isinstance(p, DTensor):
                    kept[-1].append((module, leaf, p))  # type: ignore[arg-type]  # a parameter that is a DTensor
                    module._parameters[leaf] = p.to_local(grad_placements=_of_gradient(p))  # type: ignore[assignment]
        return args if before is None else (before(args[0]), *args[1:])

    def leave(_: nn.Module, __: tuple[Any, ...], out: Tensor | None) -> Tensor | None:
        for module, leaf, p in kept.pop():
            module._parameters[leaf] = p
        return out if after is None or out is None else after(out)

    root.register_forward_pre_hook(enter)
    # also where it does not end: when activations are made again, all that is wanted may be there before
    root.register_forward_hook(leave, always_call=True)


def around(root: nn.Module, before: Callable[[Tensor], Tensor], after: Callable[[Tensor], Tensor]) -> None:
    """Apply `before` to the first argument of `root`, and `after` to its result."""

    def enter(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return before(args[0]), *args[1:]

    def leave(_: nn.Module, __: tuple[Any, ...], out: Tensor) -> Tensor:
        return after(out)

    root.register_forward_pre_hook(enter)
    root.register_forward_hook(leave)


def _of_gradient(p: DTensor) -> list[Placement]:
    """On one axis: a piece has a piece of the gradient, and what is whole a summand. On several, the ranks of all but the last see other
    rows, and `ranks.py` sums over them once a step."""
    return [Partial()] if p.placements == (Replicate(),) else list(p.placements)
