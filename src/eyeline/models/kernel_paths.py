"""Choose the kernels of a model on a device before its first batch, and report them, so that nothing slow or wrong is silent."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from eyeline.kernels import fla
from eyeline.kernels.gpu import HALF, Capability, capability_text, flash_obstacle, grouped_obstacle, grouped_waits
from eyeline.kernels.one_kernel import compiler_obstacle
from eyeline.kernels.self_test import fla_fault
from eyeline.models.layers import Attend
from eyeline.models.moe import ExpertWeights
from eyeline.models.qwen3_5 import GatedDeltaNet

FLA = "flash-linear-attention>=0.5.2"  # of these versions the oldest that raises, and does not compute wrongly, where Triton is too old
INSTALL_FLA = f"pip install '{FLA}'"


@dataclass(frozen=True)
class KernelPaths:
    """The kernels and warnings, as lines for the user."""

    lines: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()  # each with its reason and remedy


def choose(
    model: nn.Module, device: torch.device, capability: Capability | None, dtype: torch.dtype, *, trains: bool, deterministic: bool = False
) -> KernelPaths:
    """Choose the kernels of a model that computes in `dtype` on `device`, and set them. `capability` is None on a CPU, which has one
    kernel for everything. The model may be on the meta device: only its sizes are looked at.
    """
    if capability is None:
        return KernelPaths()
    lines: list[str] = []
    warnings = [*_precision(capability, dtype)]
    for found in (_passes(device), _attention(model, capability, dtype), _experts(model, capability, dtype)):
        lines += found.lines
        warnings += found.warnings
    delta = _delta(model, device, dtype, trains, deterministic)
    return KernelPaths((*lines, *delta.lines), (*warnings, *delta.warnings))


def _precision(capability: Capability, dtype: torch.dtype) -> Iterator[str]:
    if dtype == torch.float32 and capability >= (8, 0):
        yield (
            "precision: fp32 on a GPU computes without tensor cores (TF32 stays off) and synchronises with the GPU in every "
            "attention layer: "
            "several times slower than bf16, with twice the memory for activations. Set precision: bf16 unless you compare numbers"
        )
    if dtype == torch.bfloat16 and capability < (8, 0):
        yield (
            f"precision: this GPU (compute capability {capability_text(capability)}) has no bfloat16 in hardware and emulates it slowly. "
            "Set precision: fp16, which it computes with tensor cores if it has some (V100, T4), or use a GPU of compute capability 8.0 or "
            "newer"
        )
    if dtype == torch.float16 and capability >= (8, 0):
        yield (
            "precision: fp16 has a small range: steps are skipped until the loss scale fits, and activations above 65,504 are infinite. "
            f"This GPU (compute capability {capability_text(capability)}) computes as fast in bf16, which has no such "
            "limits. Set precision: bf16"
        )


def _passes(device: torch.device) -> KernelPaths:
    """Norms, rotations and the like, each of which one kernel computes if it can be compiled."""
    obstacle = compiler_obstacle(device) if device.type == "cuda" else None
    if obstacle is None:
        return KernelPaths(("norms, rotations and activations: a kernel each, which PyTorch's compiler makes in the first step",))
    return KernelPaths(
        warnings=(
            f"norms, rotations and activations: several kernels each, because PyTorch's compiler fails here: {obstacle}. This is slower; "
            "results are the same. It needs Triton, which comes with PyTorch for CUDA, and a C compiler such as gcc",
        )
    )


def _attention(model: nn.Module, capability: Capability, dtype: torch.dtype) -> KernelPaths:
    """One line per part of the model, since head dims differ."""
    flash: list[str] = []
    slow: dict[str, list[str]] = {}
    for place, head_dim in attending(model):
        obstacle = flash_obstacle(dtype, head_dim, capability)
        named = f"{place} (head dim {head_dim})"
        if obstacle is None:
            flash.append(named)
        else:
            slow.setdefault(obstacle, []).append(named)
    lines = (f"attention of {' and '.join(flash)}: flash attention over packed documents",) if flash else ()
    remedy = "It is slower; results are the same"
    return KernelPaths(
        lines,
        tuple(
            f"attention of {' and '.join(places)}: one document at a time (scaled_dot_product_attention), because {obstacle}. {remedy}"
            for obstacle, places in slow.items()
        ),
    )


def attending(model: nn.Module) -> dict[tuple[str, int], None]:
    """(part, head dim) of every kind of attention in the model, in order."""
    return {
        (name.partition(".")[0], int(module.K)): None  # type: ignore[arg-type]  # every module with an `attend` has K
        for name, module in model.named_modules()
        if isinstance(getattr(module, "attend", None), Attend)
    }


def _experts(model: nn.Module, capability: Capability, dtype: torch.dtype) -> KernelPaths:
    first = next((module for module in model.modules() if isinstance(module, ExpertWeights)), None)
    if first is None:
        return KernelPaths()
    obstacle = grouped_obstacle(dtype, capability)
    if obstacle is None and any(size % 8 for size in first.down.shape[1:]):
        obstacle = f"the grouped matrix product needs widths that are multiples of 8, and these are {list(first.down.shape[1:])}"
    if obstacle is not None:
        return KernelPaths(
            warnings=(f"experts: one at a time, with a GPU synchronisation in every layer, because {obstacle}. This is slow",)
        )
    if grouped_waits(capability):
        return KernelPaths(
            warnings=(
                "experts: torch's grouped matrix product (grouped_mm) loops over experts on this GPU and synchronises with it in "
                "every layer: it is fast on compute capability 9.x and 10.x (H100, H200, B200), and this one has "
                f"{capability_text(capability)}. Expect a fraction of the speed that the arithmetic allows; "
                "dense models do not have this cost",
            )
        )
    return KernelPaths(("experts: torch's grouped matrix product (grouped_mm)",))


def _delta(model: nn.Module, device: torch.device, dtype: torch.dtype, trains: bool, deterministic: bool) -> KernelPaths:
    """fla's kernel for the gated delta rule, if it computes here what ours does."""
    layers = [module for module in model.modules() if isinstance(module, GatedDeltaNet)]
    for layer in layers:
        layer.scan.fla = False
    if not layers:
        return KernelPaths()
    ours, slower = (
        "gated delta rule: our own kernel, in chunks of plain PyTorch",
        "It gives the same results, several times slower than fla",
    )
    if dtype not in HALF:
        return KernelPaths((f"{ours}: fla computes in half precision, and this is float32",))
    if deterministic:
        return KernelPaths((f"{ours}: fla chooses its kernels by timing, and deterministic is on",))
    if not fla.installed():
        return KernelPaths(warnings=(f"{ours}, because fla is not installed. {slower}: {INSTALL_FLA}",))
    scan = layers[0].scan
    heads = layers[0].k.out_features // scan.K, layers[0].v.out_features // scan.J
    fault = fla_fault(*heads, scan.K, scan.J, dtype, device, gradients=trains)
    if fault is not None:
        return KernelPaths(
            warnings=(
                f"{ours}, because fla does not compute the same here: {fault} ({fla.versions()}, {_gpu(device)}). {slower}; install "
                f"versions of fla and Triton that pass, such as {FLA} and a torch whose Triton is 3.7.1 or newer",
            )
        )
    for layer in layers:
        layer.scan.fla = True
    return KernelPaths((f"gated delta rule: fla, compared with our own kernel on this GPU ({fla.versions()})",))


def _gpu(device: torch.device) -> str:
    """The GPU's name, where there is one to ask."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
