"""A recording of every operator that runs on tensors without memory: its FLOPs, and the bytes that it must read and write.

Tensors on the meta device stand for tensors on a GPU, here and in the kernels (`kernels/gpu.py: on_gpu`), so what is recorded is what a
GPU would be asked for. Views cost nothing. A tensor is read as far as its memory reaches: what is expanded counts once.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from eyeline.kernels.opaque import FUNCTIONS
from eyeline.study.roofline.arithmetic import COSTS, KERNELS, Cost

aten, ours = torch.ops.aten, torch.ops.eyeline
Kind = Literal["matrix products", "attention", "gated delta rule", "memory-bound", "optimizer", "copies"]

# Opaque operators of ours that are one kernel, whatever their function is made of, as those of `kernels/one_kernel.py` are. All other
# opaque ones are recorded as what they are made of.
ONE_KERNEL = ("gated_delta_rule", "gated_delta_rule_backward")
FREE = {  # nothing runs on the device
    aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default, aten.new_empty.default, aten.new_empty_strided.default,
    aten.lift_fresh.default, aten._unsafe_view.default, aten._reshape_alias.default, aten._assert_async.msg,
}  # fmt: skip
OVERWRITTEN = {aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor, aten.copy_.default}  # in place, and what was there is not read
# Rows that are looked up: of the source as much is read as is written
GATHERS = {aten.embedding.default, aten.index_select.default, aten.gather.default, aten.index.Tensor, aten.nll_loss_forward.default}
# In place at some rows: as much is read and written as is added. The first tensor is the target
SCATTERS = {
    aten.scatter_add_.default, aten.index_add_.default, aten.index_copy_.default, aten.index_put_.default, aten.scatter_.src,
    aten.index_put_.default, aten._index_put_impl_.default,
}  # fmt: skip
# What a compiler does not put into one kernel with its neighbours, apart from products, attention and rows that are looked up or scattered
ALONE = {aten.sort.stable, aten.sort.default, aten.topk.default, aten.cumsum.default, aten.searchsorted.Tensor, aten.scatter_add.default,
         aten.scatter.src, aten.index_add.default, aten.index_copy.default, aten.embedding_dense_backward.default,
         aten.repeat_interleave.Tensor, aten.index_put.default}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Operator:
    name: str
    kind: Kind
    cost: Cost
    reads: tuple[tuple[int, int], ...]  # memory by a number of its own, and bytes
    writes: tuple[tuple[int, int], ...]
    fusible: bool

    @property
    def bytes(self) -> int:
        return sum(size for _, size in (*self.reads, *self.writes)) + self.cost.inner_bytes


class Recorder(TorchDispatchMode):
    """While it is entered, operators are recorded in `operators`, and where the host would wait for the device in `host_reads`."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[Operator] = []
        self.host_reads: list[str] = []
        self._region: Kind | None = None
        self._memory: dict[int, int] = {}  # address of a storage's record -> its number
        self._count = 0
        self._host: dict[int, Tensor] = {}  # integers that came from the host, by the number of their copy: document bounds

    def __torch_dispatch__(self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func in FUNCTIONS and func._schema.name.split("::")[1] not in ONE_KERNEL:
            with self:
                return FUNCTIONS[func](*args, **kwargs)
        if func is aten._local_scalar_dense.default and args[0].is_meta:
            self.host_reads.append(func._schema.name)
            return self._value(args[0]).item()
        if func is aten._to_copy.default and _target(args, kwargs) == "cpu" and args[0].is_meta:
            self.host_reads.append("copy to the host")
            return self._value(args[0]).to(kwargs.get("dtype") or args[0].dtype)
        if func._can_decompose() and not func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CPU):
            # made of others on every device: autograd has seen to that but inside an operator that is opened
            with self:
                return func.decompose(*args, **kwargs)
        before = {_address(x) for x in _tensors(args, kwargs)}
        out = func(*args, **kwargs)
        self._record(func, args, kwargs, out, before)
        return out

    @contextmanager
    def within(self, kind: Kind) -> Iterator[None]:
        """Record what runs inside as of this kind, whatever it is."""
        before, self._region = self._region, kind
        yield
        self._region = before

    def bounds(self, x: Tensor) -> Tensor:
        """The document bounds that a tensor without memory stands for."""
        return self._host[self._number(x)]

    def _value(self, x: Tensor) -> Tensor:
        return self._host.get(self._number(x), torch.ones(x.shape, dtype=x.dtype))

    def _number(self, x: Tensor, fresh: bool = False) -> int:
        address = _address(x)
        if fresh or address not in self._memory:
            self._count += 1
            self._memory[address] = self._count
        return self._memory[address]

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, before: set[int]) -> None:
        outs = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        inputs = list(_tensors(args, kwargs))
        if not any(x.is_meta for x in (*inputs, *outs)):
            return
        fresh = [x for x in outs if _address(x) not in before]
        made = [(self._number(x, fresh=True), footprint(x)) for x in fresh]
        if func is aten._to_copy.default and inputs[0].device.type == "cpu":
            if not inputs[0].is_floating_point():
                self._host[made[0][0]] = inputs[0]
            self.operators.append(Operator("copy to the device", "copies", Cost(0), (), tuple(made), False))
            return
        written = list(_written(func, args, kwargs))
        if func in FREE or not (made or written):
            return
        changed = [(self._number(x), footprint(x)) for x in written]
        reads = [(self._number(x), footprint(x)) for x in inputs if not (func in OVERWRITTEN and any(x is w for w in written))]
        if func in GATHERS:
            reads = [(reads[0][0], sum(size for _, size in made)), *reads[1:]]
        if func in SCATTERS:
            moved = sum(footprint(x) for x in inputs[1:] if x.is_floating_point()) or footprint(inputs[-1])
            reads, changed = [(reads[0][0], moved), *reads[1:]], [(changed[0][0], moved)]
        kind, cost = _kind(func), _cost(func, args, kwargs, self.bounds)
        fusible = self._region is None and kind == "memory-bound" and func not in GATHERS | SCATTERS | ALONE
        once = tuple(dict.fromkeys(reads))  # an input that is given twice is read once
        self.operators.append(Operator(func._schema.name, self._region or kind, cost, once, (*made, *changed), fusible))


def footprint(x: Tensor) -> int:
    """Bytes of memory that a tensor reaches."""
    numbers = 1
    for size, stride in zip(x.shape, x.stride(), strict=True):
        numbers *= size if stride else min(size, 1)
    return numbers * x.itemsize


def _address(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    return (x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor))


def _target(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    device = kwargs.get("device")
    return args[0].device.type if device is None else torch.device(device).type


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The tensors that an operator changes in place, or writes its result to."""
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        given = args[i] if i < len(args) else kwargs.get(argument.name)
        yield from (x for x in tree_leaves(given) if isinstance(x, Tensor))


def _kind(func: Any) -> Kind:
    space, name = func._schema.name.split("::")
    if name.startswith("gated_delta_rule"):
        return "gated delta rule"
    if space == "torch_attn":
        return "attention"
    return "matrix products" if func in COSTS else "memory-bound"


def _cost(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], bounds: Callable[[Tensor], Tensor]) -> Cost:
    if func in COSTS:
        return COSTS[func](*args, **kwargs)
    kernel = KERNELS.get(func._schema.name)
    if kernel is None:
        return Cost(0)
    names = [argument.name for argument in func._schema.arguments]
    return kernel(dict(zip(names, args, strict=False)) | kwargs, bounds)
