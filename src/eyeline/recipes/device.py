"""The lines of `check` about the machine: the device that a run would take, and the kernels that its model would compute with there."""

from dataclasses import dataclass, replace

import torch

from eyeline.bundle.bundle import Bundle
from eyeline.core.errors import Refused
from eyeline.core.world import ALONE, World
from eyeline.models.compiled import attention_problem, compiler_problem
from eyeline.models.kernel_paths import KernelPaths, choose
from eyeline.models.shape import shape
from eyeline.parallel.launch import machine
from eyeline.train.float8 import float8_lines, float8_problem
from eyeline.train.graph_start import GRAPHS, device_problem, worth_lines
from eyeline.train.loss_scale import scaling_line
from eyeline.train.run import COMPUTE, Run
from eyeline.train.trainable import plan_of


@dataclass(frozen=True)
class DeviceReport:
    lines: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


def device_report(run: Run, bundle: Bundle | None, world: World = ALONE) -> DeviceReport:
    """Report the device of this machine, and with a bundle also its kernels, which are tried on the GPU as at the start of a stage, on
    one small batch."""
    try:
        here = replace(machine(run.device, world=world), deterministic=run.deterministic)
    except Refused as error:
        return DeviceReport(problems=(f"device: {error}",))
    dtype = COMPUTE[run.precision]
    paths, lines, problems = KernelPaths(), list[str](), list[str | None]()
    if bundle is not None:
        model = shape(bundle.config, trains={}).model
        paths = choose(model, here.device, here.capability, dtype, trains=True, deterministic=here.deterministic)
        problems.append(float8_problem(run, here.device, here.capability))
        if run.float8 != "none":
            try:
                lines += float8_lines(run, plan_of(run, 0, bundle.config), here.capability)
            except Refused as error:
                problems.append(str(error))
        if run.compile == "blocks":
            problems += compiler_problem(here.device), attention_problem(model, here.capability, dtype)
        if run.cuda_graph and dtype == torch.bfloat16:
            problems.append(attention_problem(model, here.capability, dtype, *GRAPHS))
    if run.compile == "blocks":
        lines.append(
            "compile: blocks. Each stage has its graphs made before its first step; embedding, head and validation are not compiled"
        )
    problems.append(device_problem(run, here.device))
    lines += worth_lines(run, here.device)
    capability = f", compute capability {here.capability[0]}.{here.capability[1]}" if here.capability else ""
    line = f"device: {here.device.type} ({here.name}{capability}), {run.precision}"
    lines += [scaling] if (scaling := scaling_line(run.precision)) else []
    return DeviceReport((line, *lines, *paths.lines), paths.warnings, tuple(problem for problem in problems if problem))
