"""Requirements of fast kernels: the compute capability of a GPU, and the reason why a kernel cannot run there. None of it looks at a
tensor's content."""

import torch
from torch import Tensor

Capability = tuple[int, int]  # NVIDIA's compute capability: (8, 0) is an A100, (8, 9) an L4 or 4090, (9, 0) an H100, (10, 0) a B200
HALF = (torch.bfloat16, torch.float16)
LONGEST_HEAD = 256  # of FlashAttention-2
NARROW_BACKWARD = ((8, 6), (8, 9), (12, 0), (12, 1))  # too little shared memory for its backward pass at head dims of 193 to 224


WITHOUT_MEMORY: Capability = (9, 0)  # of the GPU that tensors on the meta device stand for

# Numbers of the first tensor from which on memory, and not launches, takes the time on a GPU: a pass over 4 MB is some 2 µs. Below, as in
# generation token by token, PyTorch's own kernels are as fast, and nothing needs compiling.
LEAST = 1 << 21


def on_gpu(x: Tensor) -> bool:
    """True for a tensor on a GPU, and for one without memory, on the meta device: it stands for one on a GPU, so that what a GPU would be
    asked for can be counted anywhere (`study/roofline`)."""
    return x.is_cuda or x.is_meta


def pays(x: Tensor) -> bool:
    """True where a function of x should be one kernel (`kernels/one_kernel.py`): on a GPU, unless x is small."""
    return on_gpu(x) and (x.is_meta or torch.compiler.is_compiling() or x.numel() >= LEAST)


def capability_of(device: torch.device) -> Capability:
    """The compute capability of a CUDA device; torch keeps it, so asking costs microseconds. A compiled graph has it as a constant."""
    return WITHOUT_MEMORY if device.type == "meta" else torch.cuda.get_device_capability(device)


# What torch.compiler.assume_constant_result does. Calling that imports torch._dynamo, a quarter of the CPU time up to a first step
capability_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


def capability_text(capability: Capability) -> str:
    return f"{capability[0]}.{capability[1]}"


def flash_obstacle(dtype: torch.dtype, head_dim: int, capability: Capability) -> str | None:
    """The reason why PyTorch's variable-length flash attention cannot compute this on a GPU; None where it can."""
    if torch.version.hip is not None:
        return "this is a ROCm build of torch, where flash attention over packed documents is untested"
    if capability < (8, 0):
        return f"flash attention needs compute capability 8.0 (Ampere), and this GPU has {capability_text(capability)}"
    if dtype not in HALF:
        return "flash attention computes in bfloat16 or float16, and this is float32"
    if head_dim % 8 or head_dim > LONGEST_HEAD:
        return f"flash attention needs a head dim that is a multiple of 8 and at most {LONGEST_HEAD}, and this is {head_dim}"
    if 192 < head_dim <= 224 and capability in NARROW_BACKWARD:
        return f"flash attention has no backward pass for a head dim of {head_dim} on compute capability {capability_text(capability)}"
    return None


def grouped_obstacle(dtype: torch.dtype, capability: Capability) -> str | None:
    """The reason why PyTorch's grouped matrix product cannot be called on a GPU; None where it can, fast or not (`grouped_waits`)."""
    if torch.version.hip is not None:
        return "this is a ROCm build of torch, where the grouped matrix product is untested"
    if capability < (8, 0):
        return f"the grouped matrix product needs compute capability 8.0, and this GPU has {capability_text(capability)}"
    if dtype != torch.bfloat16:
        return f"the grouped matrix product computes in bfloat16, and this is {str(dtype).removeprefix('torch.')}"
    return None


def float8_obstacle(capability: Capability) -> str | None:
    """The reason why a GPU has no matrix products in FP8; None where it should have them."""
    if torch.version.hip is not None:
        return "this is a ROCm build of torch, where products in FP8 are untested"
    if capability < (8, 9):
        return f"products in FP8 need compute capability 8.9 (Ada, Hopper or newer), and this GPU has {capability_text(capability)}"
    return None


def grouped_waits(capability: Capability) -> bool:
    """True if torch's grouped matrix product reads the group sizes on the host and loops over groups: everywhere but on data-centre
    Hopper and Blackwell (9.x, 10.x)."""
    return capability[0] not in (9, 10)
