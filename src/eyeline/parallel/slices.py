"""A model cut along its depth (pipeline parallelism): which blocks of the language model are in which slice, and what a rank has of them.

Everything before the first block, the tower and the projector included, is in the first slice, and so are the blocks that DeepStack adds
visual tokens after; the last norm and the head are in the last.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

from torch import Tensor, nn

from eyeline.core.batch import Batch
from eyeline.core.plan import Entry, Plan, Slices, put_module

M = TypeVar("M", bound=nn.Module)
Cuts = tuple[range, ...]  # the blocks of each slice, in order


class DepthCosts(NamedTuple):
    """What a full micro-batch costs along the depth of a model, in FLOPs."""

    first: float  # tower and projector
    blocks: Sequence[float]
    last: float  # head


def cuts_of(costs: DepthCosts, slices: int, least_first: int = 0) -> Cuts:
    """The slices of which the most expensive one costs the least; each has a block at least, and the first `least_first`."""
    layers = len(costs.blocks)
    assert max(1, least_first) + slices - 1 <= layers, f"{layers} blocks for {slices} slices"
    sums = [0.0, *accumulate(costs.blocks)]

    def cost(number: int, start: int, stop: int) -> float:
        return sums[stop] - sums[start] + (costs.first if number == 0 else 0) + (costs.last if number == slices - 1 else 0)

    @cache
    def best(number: int, start: int) -> tuple[float, int]:
        """The most expensive slice from this one on, at its least, and the end of this one."""
        if number == slices - 1:
            return cost(number, start, layers), layers
        ends = range(max(start + 1, least_first if number == 0 else 0), layers - (slices - 1 - number) + 1)
        return min((max(cost(number, start, end), best(number + 1, end)[0]), end) for end in ends)

    cuts, start = [], 0
    for number in range(slices):
        end = best(number, start)[1]
        cuts.append(range(start, end))
        start = end
    return tuple(cuts)


def own_slices(plan: Plan[M], cuts: Cuts, rank: int, ranks: int) -> Plan[M]:
    """What one of `ranks` ranks has of a planned model, which has no memory yet: of the slices every `ranks`-th. The others' modules leave
    the model, and all that the plan says is of what is left."""
    numbers = tuple(range(rank, len(cuts), ranks))
    own = {i for number in numbers for i in cuts[number]}
    absent = [name for i, name in enumerate(plan.blocks["language"]) if i not in own]
    if 0 not in numbers:
        absent += [part for part in plan.spec.parts if part != "language"] + ["language.embed"]
    if len(cuts) - 1 not in numbers:
        absent += ["language.norm", "language.head"]
    modules = {name: plan.model.get_submodule(name) for name in absent}
    for name in absent:
        put_module(plan.model, name, None)

    def here(name: str) -> bool:
        return not any(name == gone or name.startswith(f"{gone}.") for gone in absent)

    table: dict[str, Entry] = {}
    copies: dict[str, str] = {}
    for name, entry in plan.table.items():
        if here(name):
            if entry.tied_to is not None and not here(entry.tied_to):
                copies[entry.tied_to] = name
                table[entry.tied_to] = replace(entry, tied_to=None, unit="language.leave")
            else:
                table[name] = entry
    blocks = {part: tuple(filter(here, names)) for part, names in plan.blocks.items()}
    return replace(
        plan,
        table=table,
        blocks={part: names for part, names in blocks.items() if names},
        branches=tuple(filter(here, plan.branches)),
        replaceable={kind: kept for kind, names in plan.replaceable.items() if (kept := tuple(filter(here, names)))},
        slices=Slices(tuple(cuts[n] for n in numbers), numbers, len(cuts), modules, plan.table, copies),
    )


def tied_copies(plan: Plan[Any]) -> list[str]:
    """The locations of trained tensors of which another slice has a copy, in the order of the model's table."""
    found = []
    for name, entry in plan.whole.items():
        first = entry.tied_to
        if first is None or not plan.whole[first].trains:
            continue
        at = plan.location(first)
        if first in plan.table and (at != first or name not in plan.table):
            found.append(at)
    return found


def moe_layers(plan: Plan[Any]) -> list[int]:
    """The blocks of the whole model that have experts."""
    names = [name for name, entry in plan.whole.items() if entry.split is not None and entry.split.unit == "experts"]
    return list(dict.fromkeys(int(name.split(".")[2]) for name in names))


def slice_of(model: Any, layers: int) -> Callable[..., tuple[Any, Sequence[Any]]]:
    """A forward pass of some blocks of a model: what they give, or its output where the last is among them; and what they routed."""

    def forward(batch: Batch, blocks: range, x_TD: Tensor | None = None) -> tuple[Any, Sequence[Any]]:
        x_TD, deep = model.enter(batch) if x_TD is None else (x_TD, ())
        assert len(deep) <= blocks.stop, "the blocks that DeepStack adds to are in the first slice"
        x_TD, routed = model.language.through(x_TD, batch, None, deep, blocks)
        return (x_TD if blocks.stop < layers else model.language.leave(x_TD, batch, routed)), routed

    return forward


class Asked(NamedTuple):
    """What a step wants of the forward passes of slices."""

    routed: Callable[[Batch, Sequence[int], Sequence[Any]], None]  # told of a slice's MoE layers, by number, and what they routed
    loss: Callable[[Batch, Any, Tensor | None], Tensor]  # of the last slice's output, and the routing of slices before
    backward: Callable[[int], None]  # told the number of a micro-batch, among those that run, before its backward pass
    routing: bool = False  # routing_2E is sent along
