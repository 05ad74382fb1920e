"""The machine that this process runs on, asked once, at the start."""

import os
import platform
from dataclasses import dataclass

import torch

from eyeline.core.errors import Refused


@dataclass(frozen=True)
class Machine:
    """One process and its device."""

    device: torch.device
    name: str  # of the accelerator, or of the processor
    threads: int  # CPU threads that torch computes with

    def memory_bytes(self) -> int:
        """Bytes in use at their highest: of the accelerator's allocator, or of this process on a CPU."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts KiB


def machine(device: str = "auto", threads: int | None = None) -> Machine:
    """Choose the device ("auto", "cpu", "cuda") and set the number of threads. Refuses what is not there."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        raise Refused(
            f"WORLD_SIZE is {world}: this version trains in one process on one device, and {world} copies of it would "
            "write over each other. Start it without torchrun."
        )
    if device == "cuda" and not torch.cuda.is_available():
        raise Refused("device is cuda, but torch sees no CUDA device here. Use device=cpu, or install a CUDA build of torch.")
    chosen = "cuda" if device == "auto" and torch.cuda.is_available() else "cpu" if device == "auto" else device
    if threads is not None:
        torch.set_num_threads(threads)
    name = torch.cuda.get_device_name() if chosen == "cuda" else _processor()
    return Machine(torch.device(chosen), name, torch.get_num_threads())


def _processor() -> str:
    """The processor's name as Linux tells it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return f"{names[0] if names else platform.processor() or platform.machine()} × {os.cpu_count()}"
