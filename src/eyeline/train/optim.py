"""Optimizers: settings, which parameter goes where, and the learning rate of each part."""

from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any, Literal, assert_never

import torch
from pydantic import Field
from torch import nn

from eyeline.checkpoint.tensors import misfits, refuse_misfits
from eyeline.core.facts import Facts, Part, matches, part_of
from eyeline.core.settings import PositiveFloat, Settings, Share


class AdamW(Settings):
    """AdamW (Loshchilov and Hutter 2019) on everything. Decay spares norms, biases and embeddings."""

    kind: Literal["adamw"] = "adamw"
    betas: tuple[Share, Share] = (0.9, 0.95)
    eps: PositiveFloat = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.0


class Muon(Settings):
    """Muon (Jordan 2024) on the matrices of blocks and projector, AdamW on everything else.

    A part's learning rate is that of its matrices, with updates scaled to AdamW's size (0.2·√max dim, Liu et al. 2025); the
    rest of the part has `adamw_lr_ratio` times as much.
    """

    kind: Literal["muon"] = "muon"
    momentum: Share = 0.95
    adamw_lr_ratio: PositiveFloat = 1.0
    betas: tuple[Share, Share] = (0.9, 0.95)
    eps: PositiveFloat = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.0


Optimizer = Annotated[AdamW | Muon, Field(discriminator="kind")]


def make_optimizers(model: nn.Module, facts: Facts, settings: Optimizer) -> list[torch.optim.Optimizer]:
    """Optimizers over every trainable parameter, none twice and none left out. A group of nothing does not exist.

    Each group says its `part` and `ratio`: `set_learning_rates` gives it rate(part) × ratio. Groups lie in a fixed order,
    so that a saved state finds its parameters again.
    """
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    match settings:
        case AdamW():
            return [_adamw(settings, _groups(model, facts, trainable, settings.weight_decay, ratio=1.0))]
        case Muon():
            matrices = {n: p for n, p in trainable.items() if is_matrix(facts, n)}
            rest = {n: p for n, p in trainable.items() if n not in matrices}
            optimizers: list[torch.optim.Optimizer] = []
            if matrices:
                groups = _groups(model, facts, matrices, settings.weight_decay, ratio=1.0)
                optimizers.append(
                    torch.optim.Muon(
                        groups, lr=0.0, momentum=settings.momentum, weight_decay=settings.weight_decay, adjust_lr_fn="match_rms_adamw"
                    )
                )
            if rest:
                optimizers.append(_adamw(settings, _groups(model, facts, rest, settings.weight_decay, settings.adamw_lr_ratio)))
            return optimizers
        case _:
            assert_never(settings)


def set_learning_rates(optimizers: list[torch.optim.Optimizer], rates: Mapping[Part, float], factor: float) -> None:
    """Give every group its part's rate × the group's ratio × the schedule's factor."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rates[group["part"]] * group["ratio"] * factor


def is_matrix(facts: Facts, name: str) -> bool:
    """Whether a parameter is the weight of one of the linear layers that the facts name: Muon's share."""
    module, _, leaf = name.rpartition(".")
    patterns = facts.linears.get(part_of(facts, name), {}).values()
    return leaf == "weight" and any(matches(pattern, module) for pattern in patterns)


def decays(model: nn.Module, name: str) -> bool:
    """Whether weight decay applies: to matrices, never to norms, biases or embeddings (position tables are such)."""
    module = model.get_submodule(name.rpartition(".")[0])
    return model.get_parameter(name).ndim >= 2 and not isinstance(module, nn.Embedding)


def _groups(
    model: nn.Module, facts: Facts, parameters: Mapping[str, nn.Parameter], weight_decay: float, ratio: float
) -> list[dict[str, Any]]:
    """Parameter groups by (part, decayed or not), in order of first appearance, each with the names it holds."""
    groups: dict[tuple[Part, bool], dict[str, Any]] = {}
    for name, parameter in parameters.items():
        part, decayed = part_of(facts, name), decays(model, name)
        new = {"params": [], "names": [], "part": part, "ratio": ratio, "weight_decay": weight_decay if decayed else 0.0}
        group = groups.setdefault((part, decayed), new)
        group["params"].append(parameter)
        group["names"].append(name)
    return list(groups.values())


def _adamw(settings: AdamW | Muon, groups: list[dict[str, Any]]) -> torch.optim.AdamW:
    # fused: one kernel for all tensors, on a CPU too; the rate is set before every step, so 0 here is never used
    return torch.optim.AdamW(groups, lr=0.0, betas=settings.betas, eps=settings.eps, fused=True)


def state_tensors(optimizers: list[torch.optim.Optimizer]) -> dict[str, torch.Tensor]:
    """Every tensor of every optimizer's state, named `parameter:key`, for a checkpoint. A parameter that never had a gradient has none."""
    return {
        f"{name}:{key}": value
        for optimizer, name, parameter in _parameters(optimizers)
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def without_state(optimizers: list[torch.optim.Optimizer]) -> list[str]:
    """Names of the parameters that have no state yet: no step has used them. A checkpoint says which, so that nothing else is missing."""
    return [name for optimizer, name, parameter in _parameters(optimizers) if not optimizer.state.get(parameter)]


def load_state_tensors(
    optimizers: list[torch.optim.Optimizer],
    tensors: Mapping[str, torch.Tensor],
    without: Collection[str] = (),
    where: str = "the checkpoint",
) -> None:
    """Put back what `state_tensors` gave. `without` are the parameters that had no state; all others must have theirs.

    Raises Refused, with what is missing, unknown, or has another shape or dtype, before anything is put back: an optimizer's kernel
    reads as many numbers as the parameter has, whatever there are.
    """
    wanted = {
        f"{name}:{key}": tensor
        for optimizer, name, parameter in _parameters(optimizers)
        if name not in without
        for key, tensor in _state_of(optimizer, parameter).items()
    }
    refuse_misfits(f"the optimizer state of {where}", misfits(tensors, wanted, "exact"))
    for optimizer, name, parameter in _parameters(optimizers):
        # `step` is a number on the host for AdamW's plain kernel and lies on the parameter's device for the fused one
        keys = () if name in without else _state_of(optimizer, parameter)
        optimizer.state[parameter] = {key: tensors[f"{name}:{key}"].to(parameter.device) for key in keys}


def _state_of(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
    """What an optimizer keeps of a parameter once it has moved it, without values."""
    like = torch.empty_like(parameter, device="meta")
    match optimizer:
        case torch.optim.AdamW():
            return {"step": torch.empty((), dtype=torch.float32, device="meta"), "exp_avg": like, "exp_avg_sq": like}
        case torch.optim.Muon():
            return {"momentum_buffer": like}
        case _:
            raise AssertionError(f"{type(optimizer).__name__} is not supported")


def _parameters(optimizers: list[torch.optim.Optimizer]) -> Iterator[tuple[torch.optim.Optimizer, str, nn.Parameter]]:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for name, parameter in zip(group["names"], group["params"], strict=True):
                yield optimizer, name, parameter
