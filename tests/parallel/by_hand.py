"""What a rank of a mesh holds and sends, counted by hand: from the shapes of a plan and the sizes of the mesh alone."""

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

from eyeline.core.plan import Entry, Plan
from eyeline.parallel.mesh import MeshSizes

Collective = tuple[str, str, int]  # axis, kind, bytes of the whole that is gathered, shared out, summed or exchanged


def rows_by_hand(rows: int, ranks: int, rank: int) -> int:
    """Pieces of ⌈rows / ranks⌉ rows; the last ones may be shorter, or empty."""
    most = -(-rows // ranks)
    return max(0, min(most, rows - rank * most))


@dataclass(frozen=True)
class Layout:
    """Places of a rank: tp varies fastest, then cp, dp_shard and dp_replicate; ep is the fastest of all that shard."""

    plan: Plan[Any]
    sizes: MeshSizes
    world: int

    @property
    def shards(self) -> int:
        return self.world // self.sizes.dp_replicate

    @property
    def split(self) -> int:
        return self.shards // self.sizes.tp

    @property
    def experts(self) -> int:
        return self.shards // self.sizes.ep

    def kind(self, name: str, entry: Entry) -> str:
        """What shares out a tensor: no rank (exact), the ranks with the same experts, those with the same piece, or all that shard."""
        unit = None if entry.split is None else entry.split.unit
        if entry.exact:
            return "exact"
        if unit == "experts" and (self.sizes.ep > 1 or self.sizes.tp > 1):
            return "experts"
        in_branch = any(name.startswith(f"{branch}.") for branch in self.plan.branches if branch.startswith("language."))
        if self.sizes.tp > 1 and (in_branch or (unit == "vocabulary" and self.sizes.vocab_parallel)):
            return "split"
        return "every"

    def piece(self, name: str, entry: Entry) -> tuple[int, ...]:
        """The shape of what tp or ep leaves of a tensor on a rank, before it is sharded."""
        shape, kind = list(entry.shape), self.kind(name, entry)
        in_branch = any(name.startswith(f"{branch}.") for branch in self.plan.branches if branch.startswith("language."))
        if entry.split is not None and (kind == "split" or (kind == "exact" and in_branch)):
            shape[entry.split.dim] //= self.sizes.tp
        if kind == "experts":
            shape[0] //= self.sizes.ep
        return tuple(shape)

    def ranks(self, kind: str) -> int:
        return {"exact": 1, "experts": self.experts, "split": self.split, "every": self.shards}[kind]

    def held(self, name: str, entry: Entry, rank: int) -> int:
        """Numbers of a tensor that a rank holds."""
        kind, (first, *rest) = self.kind(name, entry), self.piece(name, entry)
        at = rank % self.shards
        place = {"exact": 0, "experts": at // self.sizes.ep, "split": at // self.sizes.tp, "every": at}[kind]
        if kind == "experts" and self._each_cut(name, first):
            return first * math.prod(rest) // self.experts
        return rows_by_hand(first, self.ranks(kind), place) * math.prod(rest)

    def _each_cut(self, name: str, here: int) -> bool:
        """Where a rank has fewer experts than there are ranks to share them out, each is cut along its second dim."""
        module = name.rpartition(".")[0]
        widths = [entry.shape[1] for other, entry in self.plan.table.items() if other.rpartition(".")[0] == module]
        return here < self.experts and all(width % self.experts == 0 for width in widths)

    def most(self, name: str, entry: Entry) -> int:
        """Numbers of a tensor that the rank with most of it holds."""
        return self.held(name, entry, 0)


def sharded_by_hand(layout: Layout, compute: int, again: bool) -> Counter[Collective]:
    """A unit is gathered in the dtype that it computes in, before its forward pass and, where it was freed, before its backward pass; its
    gradients are shared out in float32, and with several copies each part is summed over them. What is exact is summed in one go."""
    units: dict[tuple[str, str], int] = {}
    for name, _, entry in layout.plan.tensors():
        kind = layout.kind(name, entry)
        if kind == "exact" or entry.role == "buffer":
            continue
        module = name.rpartition(".")[0]
        apart = kind == "experts" or (kind == "every" and layout.sizes.tp > 1 and entry.unit in layout.plan.blocks["language"])
        key = (kind, module if apart else entry.unit)
        units[key] = units.get(key, 0) + layout.most(name, entry)
    wanted: Counter[Collective] = Counter()
    for (kind, _), part in units.items():
        whole = layout.ranks(kind) * part
        wanted["dp", "gather", whole * compute] += 2 if again else 1
        wanted["dp", "scatter", whole * 4] += 1
        if layout.sizes.dp_replicate > 1:
            wanted["dp_replicate", "reduce", part * 4] += 1
    exact = [(name, entry) for name, _, entry in layout.plan.tensors() if entry.exact and entry.role != "buffer"]
    cut = [math.prod(layout.piece(name, entry)) for name, entry in exact if layout.piece(name, entry) != entry.shape]
    wanted["all", "reduce", 4 * sum(math.prod(entry.shape) for name, entry in exact if layout.piece(name, entry) == entry.shape)] += 1
    if cut:
        wanted["same piece", "reduce", 4 * sum(cut)] += 1
    return wanted


def passed_by_hand(layout: Layout, tokens: int, labels: tuple[int, ...], item: int, rank: int = 0) -> Counter[Collective]:
    """What a pack of so many tokens passes between ranks inside the language model, forward and backward: over tp the rows of each branch
    are gathered and its sums shared out; over cp queries, keys, values and what they give are exchanged; over ep rows go to their experts
    and back. `labels`: labelled rows of each rank of tp, of which this is `rank`; `item`: bytes of an activation."""
    sizes, plan = layout.sizes, layout.plan
    language, model = plan.spec.language, plan.model.language
    wide, own = tokens // sizes.cp, tokens // sizes.per_pack
    wanted: Counter[Collective] = Counter()
    rows = wide * language.hidden_size * item
    for name in plan.branches if sizes.tp > 1 else ():
        if name.startswith("language."):
            wanted["tp", "gather", rows] += 2
            wanted["tp", "scatter", rows] += 2
    for name in plan.replaceable.get(("language", "attend"), ()) if sizes.cp > 1 else ():
        attention = model.get_submodule(name.removeprefix("language.").rpartition(".")[0])
        head = wide * attention.K * item
        heads, kv_heads = language.heads // sizes.tp, max(language.kv_heads // sizes.tp, sizes.cp)
        wanted["cp", "all_to_all", heads * head] += 4  # queries and what they give
        wanted["cp", "all_to_all", kv_heads * head] += 4
    for name, entry in plan.table.items() if sizes.ep > 1 else ():
        if entry.split is not None and entry.split.unit == "experts" and name.endswith(".gate"):
            assert language.experts is not None and language.experts_per_token is not None
            wanted["ep", "all_to_all", 8 * language.experts] += 1  # how many rows come from each rank for each expert
            wanted["ep", "all_to_all", own * language.experts_per_token * language.hidden_size * item] += 4
    if sizes.vocab_parallel:
        wanted += _of_vocabulary(layout, wide, labels, rows, item, rank)
    return wanted


def _of_vocabulary(layout: Layout, wide: int, labels: tuple[int, ...], rows: int, item: int, rank: int) -> Counter[Collective]:
    every = sum(labels)
    wanted: Counter[Collective] = Counter()
    wanted["tp", "gather", 8 * wide] += 1  # ids
    wanted["tp", "scatter", rows] += 1
    wanted["tp", "gather", rows] += 1
    most = max(every, labels[rank] * layout.sizes.tp)  # of what goes out and what comes in
    wanted["tp", "all_to_all", most * layout.plan.spec.language.hidden_size * item] += 2
    wanted["tp", "all_to_all", 8 * most] += 1
    wanted["tp", "gather", 3 * 4 * every * layout.sizes.tp] += 1  # the largest logit, the sum, and the label's of each row: one chunk
    return wanted


def total(counted: Counter[Collective], axis: str, kind: str = "") -> int:
    return sum(size * n for (of, what, size), n in counted.items() if of == axis and what.startswith(kind))
