"""`float8`: linear layers whose products are in FP8, where the device has it."""

import torch

from eyeline.core.errors import Refused
from eyeline.core.plan import Plan
from eyeline.core.words import counted
from eyeline.kernels.float8 import float8_fault
from eyeline.kernels.gpu import Capability, float8_obstacle
from eyeline.models import Model
from eyeline.models.float8 import float8_layers
from eyeline.parallel.launch import Machine
from eyeline.train.run import Run


def float8_problem(run: Run, device: torch.device, capability: Capability | None) -> str | None:
    """The reason why a run cannot compute in FP8 on this device, where it asks for that; a CPU emulates it."""
    if run.float8 == "none" or capability is None:
        return None
    obstacle = float8_obstacle(capability)
    if obstacle is None and (fault := float8_fault(device, run.float8)) is not None:
        obstacle = f"this GPU's products in FP8 do not equal their emulation: {fault}"
    return None if obstacle is None else f"float8: {run.float8}, and {obstacle}. Set float8: none"


def refuse_without_float8(run: Run, here: Machine) -> None:
    """Raise Refused where products are to be in FP8 and the device has none."""
    if problem := float8_problem(run, here.device, here.capability):
        raise Refused(problem)


def float8_lines(run: Run, plan: Plan[Model], capability: Capability | None) -> tuple[str, ...]:
    """Which layers of a planned model compute in FP8, and which do not. Raises Refused where none does, and it is asked for."""
    if run.float8 == "none":
        return ()
    found = float8_layers(plan.model, plan.blocks["language"])
    if not found.layers:
        raise Refused(
            f"float8: {run.float8}, and no linear layer of the language model's blocks can compute in FP8: {', '.join(found.others)}. "
            "Set float8: none"
        )
    how = "emulated on this CPU, in float32 and slowly" if capability is None else "experimental"
    rest = ", ".join([*found.others, "embedding and head", *(["vision tower and projector"] if plan.spec.vision else []), "adapters"])
    layers = f"{counted(len(found.layers), 'linear layer')} of the language model's blocks"
    return (
        f"float8: {run.float8} ({how}), in {layers}: {', '.join(found.names)}",
        f"float8: in {run.precision} stay {rest}",
    )
