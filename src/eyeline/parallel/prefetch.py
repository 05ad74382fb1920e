"""Parameters gathered ahead (FSDP2's explicit prefetch): while a block computes, those of the next ones are on their way.

Without it the host issues in the forward pass the gathering of what comes next while the device still computes, since it runs ahead; and
torch gathers in the backward pass the unit before. Where the host waits for the device in every block, as in the dispatch of expert
parallelism, it is not ahead: then each block has to name what follows, the experts among it, which are sharded over ranks of their own.
"""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from torch.distributed.fsdp import FSDPModule

from eyeline.core.plan import Plan
from eyeline.parallel.mesh import MeshSizes

Units = list[FSDPModule]  # a block, then what in it is sharded apart, in the order in which they are gathered


def prefetch(plan: Plan[Any], sizes: MeshSizes) -> None:
    """Let each block of a sharded model name the units that are gathered ahead: its own further ones, and those of as many blocks as the
    mesh says."""
    for blocks in runs_of_blocks(plan):
        for i, (block, *own) in enumerate(blocks):
            if sizes.forward_prefetch is not None:
                block.set_modules_to_forward_prefetch([*own, *chain(*blocks[i + 1 : i + 1 + sizes.forward_prefetch])])
            if sizes.backward_prefetch is not None:
                before = blocks[max(0, i - sizes.backward_prefetch) : i]
                block.set_modules_to_backward_prefetch([*own, *chain(*reversed(before))])


def runs_of_blocks(plan: Plan[Any]) -> Iterator[Sequence[Units]]:
    """The blocks that run one after another: those of a part, and of a slice. What is between parts is not gathered ahead, since the tower
    does not run in every micro-batch, nor the next slice of a rank, which runs later."""
    slices = plan.slices
    for part, names in plan.blocks.items():
        used = [name for name in names if plan.spec.uses(name)]
        if part != "language" or slices is None:
            yield [units_of(plan, name) for name in used]
        else:
            for cut in slices.blocks:
                yield [units_of(plan, name) for name in used if int(name.rpartition(".")[2]) in cut]


def units_of(plan: Plan[Any], block: str) -> Units:
    return [module for module in plan.model.get_submodule(block).modules() if isinstance(module, FSDPModule)]
