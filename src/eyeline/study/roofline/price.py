"""Prices of a recording on a named GPU: the time of each operator, and of each as a compiler would fuse it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from eyeline.kernels.gpu import grouped_waits
from eyeline.study.roofline import gpus
from eyeline.study.roofline.gpus import GPU
from eyeline.study.roofline.record import Kind, Operator


@dataclass(frozen=True)
class Line:
    """One kernel, or several operators as one."""

    name: str
    kind: Kind
    flops: int
    bytes: int
    seconds: float
    launches: int
    host_reads: int = 0


def priced(operators: Sequence[Operator], gpu: GPU) -> list[Line]:
    """Every operator by itself, as PyTorch runs them one after another."""
    return [_line(op, gpu) for op in operators]


def fused(operators: Sequence[Operator], gpu: GPU) -> list[Line]:
    """The same, with every chain of passes over memory as one kernel.

    A chain is a longest run of operators that are fusible, one after another. It reads what comes from before it, each tensor once, as far
    as any of its operators reaches, and writes what is used after it. What it makes and uses up itself costs nothing.
    """
    last_use = {number: i for i, op in enumerate(operators) for number, _ in op.reads}
    lines: list[Line] = []
    for start, chain in _chains(operators):
        if len(chain) == 1 and not chain[0].fusible:
            lines.append(_line(chain[0], gpu))
            continue
        entering, leaving, made = dict[int, int](), dict[int, int](), set[int]()
        for op in chain:
            for number, size in op.reads:
                if number not in made:
                    entering[number] = max(entering.get(number, 0), size)
            for number, size in op.writes:
                made.add(number)
                if last_use.get(number, -1) >= start + len(chain):
                    leaving[number] = max(leaving.get(number, 0), size)
        moved = sum(entering.values()) + sum(leaving.values()) + sum(op.cost.inner_bytes for op in chain)
        lines.append(Line("chains", "memory-bound", 0, moved, _seconds(0, "bf16", moved, gpu), 1))
    return lines


def _chains(operators: Sequence[Operator]) -> Iterator[tuple[int, Sequence[Operator]]]:
    """Each longest run of fusible operators, and every other operator alone, with the place of the first."""
    start = 0
    while start < len(operators):
        end = start + 1
        while operators[start].fusible and end < len(operators) and operators[end].fusible:
            end += 1
        yield start, operators[start:end]
        start = end


def _line(op: Operator, gpu: GPU) -> Line:
    if op.kind == "copies":
        return Line(op.name, op.kind, 0, op.bytes, op.bytes / (gpu.link * gpus.LINK), 1)
    looped = op.cost.groups > 1 and grouped_waits(gpu.capability)  # torch reads the groups' bounds on the host and asks for each product
    launches = op.cost.groups if looped else 1
    seconds = max(_seconds(op.cost.flops, op.cost.rate, op.bytes, gpu), launches * gpus.KERNEL_S)
    return Line(op.name, op.kind, op.cost.flops, op.bytes, seconds, launches, int(looped))


def _seconds(flops: int, rate: str, moved: int, gpu: GPU) -> float:
    return max(flops / rates(gpu)[rate], moved / (gpu.bandwidth * gpus.BANDWIDTH), gpus.KERNEL_S)


def rates(gpu: GPU) -> dict[str, float]:
    """FLOPs per second that kernels reach, by the names that `arithmetic.Cost` has."""
    return {
        "bf16": gpu.bf16 * gpus.PRODUCTS,
        "fp32": gpu.fp32 * gpus.FLOAT32,
        "grouped": gpu.bf16 * gpus.GROUPED,
        "attention": gpu.bf16 * gpu.attention,
        "attention backward": gpu.bf16 * gpu.attention * gpus.BACKWARD,
        "delta": gpu.bf16 * gpus.DELTA,
    }
