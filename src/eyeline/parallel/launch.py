"""The machine that this process runs on, asked once, at the start."""

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from eyeline.core.errors import Refused
from eyeline.core.log import warn
from eyeline.core.world import ALONE, World
from eyeline.parallel.join import started
from eyeline.parallel.threads import ALLOCATOR


@dataclass(frozen=True)
class Machine:
    """One process and its device."""

    device: torch.device
    name: str  # of the accelerator, or of the processor
    threads: int  # CPU threads that torch computes with
    capability: tuple[int, int] | None = None  # compute capability of a CUDA device
    deterministic: bool = False  # torch uses deterministic algorithms only

    def memory_bytes(self) -> int:
        """Bytes in use at their highest: of the accelerator's allocator, or of this process on a CPU."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts KiB

    def reserved_bytes(self) -> int | None:
        """Bytes that the accelerator's allocator held at their highest, in use or not; None on a CPU."""
        return torch.cuda.max_memory_reserved(self.device) if self.device.type == "cuda" else None

    def allocator_retries(self) -> int | None:
        """How often the accelerator's allocator found no memory, gave back what it held in reserve and tried again; None on a CPU."""
        return torch.cuda.memory_stats(self.device)["num_alloc_retries"] if self.device.type == "cuda" else None

    def stamps(self) -> dict[str, Any]:
        """Versions of what a GPU computes with, as plain JSON; null on a CPU."""
        on_gpu = self.device.type == "cuda"
        return {
            "capability": f"{self.capability[0]}.{self.capability[1]}" if self.capability else None,
            "device_memory_bytes": torch.cuda.get_device_properties(self.device).total_memory if on_gpu else None,
            "cuda": torch.version.cuda if on_gpu else None,
            "rocm": torch.version.hip if on_gpu else None,
            "cudnn": torch.backends.cudnn.version() if on_gpu else None,
            "driver": _driver() if on_gpu else None,
            "allocator": next((os.environ[name] for name in ALLOCATOR if name in os.environ), None) if on_gpu else None,
            "deterministic": self.deterministic,
        }


def machine(device: str = "auto", threads: int | None = None, deterministic: bool = False, world: World = ALONE) -> Machine:
    """Choose the device ("auto", "cpu", "cuda"), set the number of threads, and whether torch uses deterministic algorithms only. Each
    rank of a machine has a device of its own, or its share of the cores. Refuses what is not there."""
    if world.size == 1 and (size := started().size) > 1:
        raise Refused(
            f"WORLD_SIZE is {size}, and only `eyeline train`, `eval` and `check --cluster` run in several processes. Start this command "
            "without torchrun."
        )
    if device == "cuda" and not torch.cuda.is_available():
        raise Refused("device is cuda, but torch sees no CUDA device here. Use device=cpu, or install a CUDA build of torch.")
    chosen = "cuda" if device == "auto" and torch.cuda.is_available() else "cpu" if device == "auto" else device
    if device == "auto" and chosen == "cpu" and (other := _other_accelerator()):
        warn(f"device: auto chooses the CPU: this machine has {other}, which Eyeline does not support. Set device=cpu to silence this")
    if threads is None and world.local_size > 1 and "OMP_NUM_THREADS" not in os.environ:
        threads = max(1, (os.cpu_count() or 1) // world.local_size)
    if threads is not None:
        torch.set_num_threads(threads)
    _set_deterministic(deterministic)
    if chosen == "cpu":
        return Machine(torch.device("cpu"), _processor(), torch.get_num_threads(), deterministic=deterministic)
    own = torch.device("cuda")
    if world.size > 1:
        if world.local_rank >= (count := torch.cuda.device_count()):
            raise Refused(
                f"rank {world.rank} is number {world.local_rank} on this machine, which has {count} CUDA devices. Start fewer ranks"
            )
        own = torch.device("cuda", world.local_rank)
        torch.cuda.set_device(own)
    name, capability = torch.cuda.get_device_name(own), torch.cuda.get_device_capability(own)
    return Machine(own, name, torch.get_num_threads(), capability, deterministic)


@contextmanager
def deterministic_or_refused() -> Iterator[None]:
    """Refused where torch has no deterministic version of an operator and was asked for such alone."""
    try:
        yield
    except RuntimeError as error:
        said = str(error)
        if "does not have a deterministic implementation" not in said:
            raise
        operator = said.split(maxsplit=1)[0]
        raise Refused(
            f"deterministic: true, and this torch has no deterministic version of {operator} on this device. Set deterministic: false "
            "and resume: the run resumes from its last checkpoint"
        ) from error


def _set_deterministic(on: bool) -> None:
    """Process-wide: torch then raises where an operator has no deterministic version."""
    if torch.are_deterministic_algorithms_enabled() != on:  # the call imports torch's compiler
        torch.use_deterministic_algorithms(on)
    # a search for defects, which costs time: what it fills is overwritten
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]: a property of the module
    if on:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it is first used, and torch asks for it


def _other_accelerator() -> str | None:
    """An accelerator that torch sees and Eyeline does not use."""
    if torch.backends.mps.is_available():
        return "an Apple GPU (MPS)"
    if torch.xpu.is_available():
        return "an Intel GPU (XPU)"
    return None


def _driver() -> str | None:
    """The version of NVIDIA's kernel module as Linux tells it."""
    try:
        with open("/proc/driver/nvidia/version", encoding="utf-8") as file:
            words = file.readline().split()
    except OSError:
        return None
    return next((word for word in words if word[0].isdigit() and "." in word), None)


def _processor() -> str:
    """The processor's name as Linux tells it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return f"{names[0] if names else platform.processor() or platform.machine()} × {os.cpu_count()}"
