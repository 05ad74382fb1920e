"""The memory that a stage needs on a GPU: weights, gradients and optimizer states by the plan, and activations as they are counted while
the model runs on tensors without memory.

Such tensors stand for tensors on a GPU (`kernels/gpu.py: on_gpu`). What is counted is what operators give: what they need meanwhile, and
what PyTorch keeps unused between allocations, comes on top.
"""

import math
import weakref
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, assert_never

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from eyeline.core.batch import Budget
from eyeline.core.errors import Refused
from eyeline.core.plan import Entry, Part, Plan
from eyeline.core.words import gib
from eyeline.data.fetch.full_batch import full_batch
from eyeline.models.layers import Recompute
from eyeline.parallel.shares import WHOLE, Shares
from eyeline.parallel.slices import slice_of
from eyeline.train.fixed_batch import capacities_of, empty_batch
from eyeline.train.optim import AdamW, AdamW8bit, Muon, Optimizer, updates_in_backward
from eyeline.train.small_adamw import bytes_in_8_bits

aten = torch.ops.aten


@dataclass(frozen=True)
class Memory:
    """Bytes on the device. The first three last as long as a stage."""

    weights: int
    gradients: int
    optimizer: int
    activations: int = 0  # at the peak of a full micro-batch; 0: not counted
    offloaded: int = 0  # of the optimizer's state, in the host's memory: not in the total

    def __str__(self) -> str:
        parts = {"weights": self.weights, "gradients": self.gradients, "optimizer state": self.optimizer}
        parts |= {"activations": self.activations} if self.activations else {}
        if self.offloaded:
            parts["optimizer state on the host"] = self.offloaded
        return ", ".join(f"{name} {gib(size)}" for name, size in parts.items())

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations


def memory_of(plan: Plan[Any], optimizer: Optimizer, shares: Shares = WHOLE, whole_gradients: bool = False) -> Memory:
    """What a stage keeps of its model, on the rank that has most of it. A gradient has its weight's dtype, and so has each moment: two of
    AdamW, one of Muon; AdamW's may be bfloat16, in 8 bits, or on the host. `whole_gradients`: a rank keeps them unsharded until the
    step's last micro-batch."""
    weights = moments = 0
    gradients = Counter[str]()
    for name, x, entry in plan.tensors():
        share, of_gradient = shares.of(plan, name, entry)
        size = round(x.numel() * share) * entry.stored.itemsize
        weights += size
        if entry.trains:
            gradients[entry.unit] += round(x.numel() * of_gradient) * entry.stored.itemsize if whole_gradients else size
            moments += _moments(tuple(x.shape), entry, optimizer, share)
    # in the backward pass they are freed as they come: those of one block, or of what else is together, at most
    at_once = max(gradients.values(), default=0) if updates_in_backward(optimizer) else gradients.total()
    if isinstance(optimizer, AdamW | AdamW8bit) and optimizer.offload:
        return Memory(weights, at_once, 0, offloaded=moments)
    return Memory(weights, at_once, moments)


def _moments(shape: tuple[int, ...], entry: Entry, optimizer: Optimizer, share: float) -> int:
    """The bytes of what a rank that has this share of a parameter keeps of its moments."""
    match optimizer:
        case AdamW8bit():
            return 2 * round(bytes_in_8_bits(shape) * share)
        case AdamW():
            return round(math.prod(shape) * share) * (2 if optimizer.state_dtype == "bf16" else entry.stored.itemsize) * 2
        case Muon():
            return round(math.prod(shape) * share) * entry.stored.itemsize * (1 if entry.muon else 2)
        case _:
            assert_never(optimizer)


def activations_of(plan: Plan[Any], budget: Budget, padded: bool = False) -> int:
    """The bytes of activations at the peak of a step on full micro-batches of conversations about one photo each: of what is allocated
    beyond weights and gradients. `plan` is on the meta device. `padded`: batches are padded to their capacities, for CUDA graphs."""
    model = plan.model
    if padded:
        batch = empty_batch(capacities_of(plan.spec.image, budget), torch.device("meta"), draws=True)
    else:
        batch = full_batch(plan.spec.image, plan.spec.vocab_size, budget).with_draws(0, 0)
    was_training = model.training
    model.train()
    with Allocated() as allocated:
        for _ in range(2):  # in the second one gradients are there already
            loss = model(batch.to("meta")).out
            if loss.requires_grad:  # of a projector that trains alone it does not, where no photo fits into the budget
                loss.backward()
            del loss
    gradients = sum(x.grad.nbytes for x in model.parameters() if x.grad is not None)
    model.zero_grad(set_to_none=True)
    model.train(was_training)
    return allocated.most - gradients


def activations_of_slices(plan: Plan[Any], budget: Budget, rank: int, ranks: int, count: int) -> int:
    """The same for a rank that has slices of the model, of whose `count` micro-batches several are under way at once; with the tensors that
    it exchanges with other ranks, of which torch's schedules keep those of all micro-batches. `plan` is of these slices."""
    slices, language = plan.slices, plan.spec.language
    assert slices is not None
    of = len(slices.blocks)
    under_way = min(of * count, ranks - rank if of == 1 else 2 * (ranks - rank - 1) + (of - 1) * ranks + 1)
    run, batch = slice_of(plan.model, language.layers), full_batch(plan.spec.image, plan.spec.vocab_size, budget).with_draws(0, 0)
    x_TD = torch.empty(budget.tokens, language.hidden_size, dtype=plan.model.language.compute_dtype, device="meta", requires_grad=True)

    def forward(at: int) -> Tensor:
        out, _ = run(batch.to("meta"), slices.blocks[at], x_TD if slices.numbers[at] else None)
        return out.out if slices.blocks[at].stop == language.layers else out

    def passes(which: Iterable[int]) -> None:
        kept = deque(map(forward, which))
        while kept:
            if (first := kept.popleft()).requires_grad:
                first.backward(torch.empty_like(first))
            del first

    plan.model.train()
    with Allocated() as allocated:
        passes(range(of))  # so that gradients are there already
        passes(n // ranks % of for n in range(under_way))
    gradients = sum(x.grad.nbytes for x in plan.model.parameters() if x.grad is not None)
    plan.model.zero_grad(set_to_none=True)
    # what a slice receives with the gradient that it sends back; and the gradient that it receives
    exchanged = sum(2 * (number > 0) + (number < slices.count - 1) for number in slices.numbers) * count * x_TD.nbytes
    return allocated.most - gradients + exchanged


def fewest_recomputed(
    plan: Plan[Any], budget: Budget, how: Mapping[Part, Recompute], room: int, padded: bool = False
) -> dict[Part, Recompute]:
    """As few blocks of these parts as leave activations within `room` bytes, spread evenly, recomputed as `how` says. Raises Refused where
    all are too few. `padded` as in `activations_of`."""
    parts = list(how)
    most = max(len(plan.blocks[part]) for part in parts)

    def blocks(share: int) -> dict[Part, Recompute]:
        counts: dict[Part, int] = {part: -(-len(plan.blocks[part]) * share // most) for part in parts}
        return {part: how[part]._replace(blocks=frozenset(i * len(plan.blocks[part]) // n for i in range(n))) for part, n in counts.items()}

    def needed(share: int) -> int:
        plan.model.recompute(blocks(share))
        return activations_of(plan, budget, padded)

    if (least := needed(most)) > room:
        raise Refused(
            f"gradient_checkpointing.memory_gb leaves {gib(max(room, 0))} for activations, and with all blocks recomputed they need "
            f"about {gib(least)}. Lower batch.max_tokens and batch.max_patches, or raise memory_gb"
        )
    return blocks(bisect_left(range(most + 1), True, key=lambda share: needed(share) <= room))


class Allocated(TorchDispatchMode):
    """While it is entered: the bytes of tensors without memory that were made meanwhile and are there, and most of them at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._sizes: dict[int, int] = {}  # address of a storage's record -> bytes
        self._host: dict[int, Tensor] = {}  # integers that came from the host, by that address: document bounds

    def __torch_dispatch__(self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, Tensor) and first.is_meta and self._asks_host(func, args, kwargs):
            known = self._host.get(_address(first), torch.ones(first.shape, dtype=first.dtype))
            return known.item() if func is aten._local_scalar_dense.default else known.to(kwargs.get("dtype") or first.dtype)
        given = {_address(x) for x in _tensors((args, kwargs))}  # a view of them is no new memory
        out = func(*args, **kwargs)
        for x in _tensors(out):
            if _address(x) not in given:
                self._add(x)
        if func is aten._to_copy.default and isinstance(first, Tensor) and not first.is_meta and not first.is_floating_point():
            self._host[_address(out)] = first
        return out

    def _asks_host(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        to_host = func is aten._to_copy.default and torch.device(kwargs.get("device") or args[0].device).type == "cpu"
        return to_host or func is aten._local_scalar_dense.default

    def _add(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        if x.is_meta and storage._cdata not in self._sizes:
            self._sizes[storage._cdata] = storage.nbytes()
            self.now += storage.nbytes()
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._free, storage._cdata)

    def _free(self, address: int) -> None:
        self.now -= self._sizes.pop(address)
        self._host.pop(address, None)


def _tensors(out: Any) -> Iterator[Tensor]:
    return (x for x in tree_leaves(out) if isinstance(x, Tensor))


def _address(x: Tensor) -> int:
    return x.untyped_storage()._cdata
