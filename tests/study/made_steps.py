"""Training steps of a vision-language model on the GPU of `made_gpu.py`: which operators run, and how long each kernel takes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tests.study.made_gpu import (
    ADAM,
    ADD,
    AUTOGRAD,
    BINARY,
    CAST,
    COMPUTE,
    COPIES,
    FLASH,
    FLASH_BACK,
    GATHER,
    GEMM,
    GEMM_BACK,
    GLU_FUSED,
    MAIN,
    NCCL,
    NORM_FUSED,
    REDUCE,
    ROPE_FUSED,
    SCATTER,
    Timeline,
)

NORM = (
    ("to", CAST),
    ("pow", BINARY),
    ("mean", REDUCE),
    ("rsqrt", None),
    ("mul", BINARY),
    ("mul", BINARY),
    ("to", CAST),
)  # None: of a row each
ROPE = (("slice", CAST), ("neg", BINARY), ("cat", CAST), ("mul", BINARY), ("mul", BINARY), ("add", ADD))
GLU = (("silu", BINARY), ("mul", BINARY))


@dataclass(frozen=True)
class Net:
    """A model by the microseconds of its kernels, and what the host and the network do."""

    vision: int  # blocks
    language: int
    product_us: float  # of a product in the language model; those of the vision encoder take a share of it
    pass_us: float  # of one pass over the activations of a block
    attention_us: float
    vision_share: float = 0.5
    plain: bool = False  # norms, rotary positions and SwiGLU as separate operators, instead of a kernel each
    trains_base: bool = True  # weights have gradients; otherwise activations alone, and adapters that are not shown
    wait_us: float = 90.0  # for the data of a step
    block_us: float = 35.0  # of Python in each block
    reads: int = 0  # times per block that the host reads a number from the GPU, in the forward pass of the language model
    read_us: float = 0.0  # of Python after such a read, before the next launch
    gather_us: float = 0.0  # to gather the parameters of a block from all ranks; 0: one rank
    optimizer_us: float = 900.0


class Done(NamedTuple):
    """An operator of a forward pass, for the backward one."""

    name: str
    sequence: int
    us: float
    address: int | None


class Block(NamedTuple):
    done: list[Done]
    gathered: bool


def run_step(gpu: Timeline, number: int, net: Net) -> None:
    """One step: what `train/step.py` does, in its order."""
    with gpu.range(f"step {number}"):
        gpu.python(gpu.vary(net.wait_us))
        with gpu.op("aten::to"), gpu.op("aten::_to_copy"), gpu.op("aten::copy_"):
            arrived = gpu.copy("HtoD (Pinned -> Device)", 6_291_456, 262.0, COPIES)
        gpu.free[COMPUTE] = max(gpu.free.get(COMPUTE, 0.0), arrived)
        blocks: list[Block] = []
        for part, count, share in (("vision", net.vision, net.vision_share), ("projector", 0, 1.0), ("language", net.language, 1.0)):
            with gpu.range(f"part {part}"):
                if part == "projector":
                    blocks.append(Block([product(gpu, net.product_us), product(gpu, net.product_us)], False))
                blocks += forward_blocks(gpu, net, part, count, share)
                if part == "language":
                    blocks.append(Block(head(gpu, net), False))
        gpu.python(14.0)
        gpu.now, gpu.thread = gpu.now + 22.0, AUTOGRAD
        backward_blocks(gpu, net, blocks)
        gpu.now, gpu.thread = gpu.now + 31.0, MAIN
        update(gpu, net)
        gpu.python(gpu.vary(310.0))


def forward_blocks(gpu: Timeline, net: Net, part: str, count: int, share: float) -> list[Block]:
    found = []
    coming = gather(gpu, net) if count else 0.0
    for n in range(count):
        ready, coming = coming, gather(gpu, net) if n + 1 < count else 0.0
        if net.gather_us:
            gpu.free[COMPUTE] = max(gpu.free.get(COMPUTE, 0.0), ready)
        gpu.python(gpu.vary(net.block_us))
        found.append(Block(forward_block(gpu, net, part, share), bool(net.gather_us)))
    return found


def forward_block(gpu: Timeline, net: Net, part: str, share: float) -> list[Done]:
    us, each = net.product_us * share, net.pass_us * share
    done = passes(gpu, net, NORM, NORM_FUSED, each)
    done += [product(gpu, us * size) for size in (1.0, 0.4, 0.4)]
    if part == "language":
        for _ in range(2):
            done += passes(gpu, net, ROPE, ROPE_FUSED, each * 0.5)
    with gpu.op("torch_attn::_varlen_attn") as sequence:
        gpu.launch(FLASH, net.attention_us * share)
    done += [Done("VarlenAttn", sequence, net.attention_us * share, None), product(gpu, us)]
    for _ in range(net.reads if part == "language" else 0):
        read_number(gpu, net)
    done += [*single(gpu, "add", ADD, each), *passes(gpu, net, NORM, NORM_FUSED, each)]
    done += [product(gpu, us * 2.6) for _ in range(2 if part == "language" else 1)]
    done += passes(gpu, net, GLU, GLU_FUSED, each * 2.6)
    return [*done, product(gpu, us * 2.6), *single(gpu, "add", ADD, each)]


def read_number(gpu: Timeline, net: Net) -> None:
    """`.item()`: the host waits for all that it has asked for."""
    with gpu.op("aten::item"), gpu.op("aten::_local_scalar_dense"):
        gpu.copy("DtoH (Device -> Pageable)", 8, 1.2)
        gpu.wait()
    gpu.python(gpu.vary(net.read_us))


def passes(gpu: Timeline, net: Net, plain: Sequence[tuple[str, str | None]], fused: str, us: float) -> list[Done]:
    """Passes over activations: operator by operator, or one kernel that a compiler made."""
    if net.plain:
        return [one for name, kernel in plain for one in single(gpu, name, kernel or BINARY, us if kernel else 2.4)]
    with gpu.op("Torch-Compiled Region: 0/0") as sequence, gpu.op(fused, sequence=sequence):
        gpu.launch(fused, us)
    return [Done("CompiledFunction", sequence, us, None)]


def single(gpu: Timeline, name: str, kernel: str, us: float) -> list[Done]:
    with gpu.op(f"aten::{name}") as sequence:
        address = gpu.allocate(size_of(us))
        gpu.launch(kernel, us)
    return [Done(name.title(), sequence, us, address)]


def size_of(us: float) -> int:
    """The bytes that a pass of so many microseconds writes."""
    return int(us * 1_048_576 / 512) * 512


def product(gpu: Timeline, us: float) -> Done:
    with gpu.op("aten::linear") as sequence, gpu.op("aten::mm", sequence=sequence):
        address = gpu.allocate(size_of(us))
        gpu.launch(GEMM, us)
    return Done("Mm", sequence, us, address)


def head(gpu: Timeline, net: Net) -> list[Done]:
    with gpu.range("part head"):
        done = [product(gpu, net.product_us * 3)]
        with gpu.op("aten::_log_softmax") as sequence:
            gpu.launch(REDUCE, net.pass_us * 2)
        return [*done, Done("LogSoftmax", sequence, net.pass_us * 2, None)]


def gather(gpu: Timeline, net: Net) -> float:
    """Have the parameters of a block gathered; when they are there."""
    return collective(gpu, "_allgather_base", GATHER, net.gather_us, ()) if net.gather_us else 0.0


def collective(gpu: Timeline, name: str, kernel: str, us: float, after: Sequence[float]) -> float:
    elements = int(us * 180_000)
    more = {"Collective name": name, "In msg nelems": elements // gpu.ranks, "Out msg nelems": elements, "Group size": gpu.ranks}
    more |= {"dtype": "BFloat16", "Process Group Name": "0", "Process Group Description": "default_pg"}
    with gpu.op(f"c10d::{name}_"), gpu.op("record_param_comms"):
        return gpu.launch(kernel, us, NCCL, after, **more)


def backward_blocks(gpu: Timeline, net: Net, blocks: Sequence[Block]) -> None:
    coming = gather(gpu, net)
    for n, block in enumerate(reversed(blocks)):
        if block.gathered:
            gpu.free[COMPUTE] = max(gpu.free[COMPUTE], coming)
            coming = gather(gpu, net) if n + 1 < len(blocks) else 0.0
        for one in reversed(block.done):
            backward(gpu, net, one)
        if block.gathered:
            collective(gpu, "_reduce_scatter_base", SCATTER, net.gather_us, (gpu.free[COMPUTE],))


def backward(gpu: Timeline, net: Net, one: Done) -> None:
    name = f"{one.name}Backward0"
    with gpu.op(f"autograd::engine::evaluate_function: {name}", 1, one.sequence), gpu.op(name, 1, one.sequence):
        if one.name == "Mm":
            for _ in range(2 if net.trains_base else 1):
                with gpu.op("aten::mm", 1, one.sequence):
                    gpu.launch(GEMM_BACK, one.us)
        elif one.name == "VarlenAttn":
            gpu.launch(FLASH_BACK, one.us * 2.5)
        elif one.name == "CompiledFunction":
            gpu.launch("triton_red_fused__to_copy_add_mul_sum_2", one.us * 1.6)
        else:
            with gpu.op("aten::mul", 1, one.sequence):
                gpu.launch(BINARY, one.us * 1.4)
    if one.address is not None:
        gpu.release(size_of(one.us), one.address)


def update(gpu: Timeline, net: Net) -> None:
    """The norm, the step's one read by the host, clipping and the optimizer."""
    if net.gather_us:
        gpu.free[COMPUTE] = max(gpu.free[COMPUTE], gpu.free[NCCL])
    with gpu.op("aten::_foreach_norm"):
        gpu.launch(REDUCE, 40.0)
    with gpu.op("aten::stack"), gpu.op("aten::cat"):
        gpu.launch(CAST, 2.2)
    with gpu.op("aten::to"), gpu.op("aten::_to_copy"), gpu.op("aten::copy_"):
        gpu.copy("DtoH (Device -> Pageable)", 16, 1.3)
        gpu.wait()
    with gpu.op("aten::_foreach_mul_"):
        gpu.launch(BINARY, 30.0)
    with gpu.range("Optimizer.step#AdamW.step"):
        for _ in range(4):
            with gpu.op("aten::_fused_adamw_"):
                gpu.launch(ADAM, net.optimizer_us / 4)


def seconds_of_steps(gpu: Timeline) -> list[float]:
    """The wall time of each step that was recorded."""
    return [e["dur"] / 1e6 for e in gpu.events if e["ph"] == "X" and e["cat"] == "user_annotation" and e["name"].startswith("step ")]
