"""Optimizers: settings, which parameter goes where, and the learning rate of each part."""

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, assert_never

import torch
from pydantic import Field
from torch import Tensor, nn

from eyeline.checkpoint.pieces import Stored
from eyeline.checkpoint.tensors import misfits, refuse_misfits
from eyeline.core.plan import Entry, Part, Plan
from eyeline.core.settings import PositiveFloat, Settings, Share
from eyeline.core.shards import held, mesh_of_tensor
from eyeline.train.muon import StackedMuon
from eyeline.train.not_compiled import NotCompiled
from eyeline.train.small_adamw import SmallAdamW

if TYPE_CHECKING:
    from eyeline.parallel.mesh import Mesh


class AdamW(Settings):
    """AdamW (Loshchilov and Hutter 2019) on everything. Decay spares norms, biases and embeddings."""

    kind: Literal["adamw"] = "adamw"
    betas: tuple[Share, Share] = (0.9, 0.95)
    eps: PositiveFloat = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    state_dtype: Literal["fp32", "bf16"] = "fp32"  # of the two moments; to bf16 they are rounded stochastically
    offload: bool = False  # the moments are in the host's memory between steps
    in_backward: bool = False  # each parameter is updated as soon as its gradient is there, which is then freed

    @property
    def small(self) -> bool:
        """Return whether moments or gradients take less of the device's memory than with torch's AdamW."""
        return self.offload or self.in_backward or self.state_dtype == "bf16"


class AdamW8bit(Settings):
    """AdamW whose moments are kept in 8 bits (Dettmers et al. 2022), in blocks of 256 within rows; those of small tensors in float32."""

    kind: Literal["adamw_8bit"] = "adamw_8bit"
    betas: tuple[Share, Share] = (0.9, 0.95)
    eps: PositiveFloat = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    offload: bool = False  # the moments are in the host's memory between steps
    in_backward: bool = False  # each parameter is updated as soon as its gradient is there, which is then freed


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


STATES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Optimizer = Annotated[AdamW | AdamW8bit | Muon, Field(discriminator="kind")]


def make_optimizers(plan: Plan[Any], settings: Optimizer, seed: int = 0, mesh: "Mesh | None" = None) -> list[torch.optim.Optimizer]:
    """Optimizers over every trainable parameter, none twice and none left out. A group of nothing does not exist. `seed` is of stochastic
    rounding, `mesh` what the model was placed on.

    Each group says its `part` and `ratio`: `set_learning_rates` gives it rate(part) × ratio. Groups have a fixed order,
    so that a saved state finds its parameters again. None where this rank has slices of a model in which nothing trains.
    """
    trainable = [(name, x, entry) for name, x, entry in plan.tensors() if entry.trains]
    if not trainable:
        return []
    match settings:
        case AdamW(small=True):
            groups, dtype = _groups(trainable, settings.weight_decay, ratio=1.0), STATES[settings.state_dtype]
            return [SmallAdamW(groups, settings.betas, settings.eps, dtype, settings.offload, seed, settings.in_backward)]
        case AdamW():
            return [_adamw(settings, _groups(trainable, settings.weight_decay, ratio=1.0))]
        case AdamW8bit():
            groups = _groups(trainable, settings.weight_decay, ratio=1.0)
            return [SmallAdamW(groups, settings.betas, settings.eps, torch.uint8, settings.offload, seed, settings.in_backward)]
        case Muon():
            matrices = [one for one in trainable if one[2].muon]
            rest = [one for one in trainable if not one[2].muon]
            optimizers: list[torch.optim.Optimizer] = []
            if matrices:
                groups = _groups(matrices, settings.weight_decay, ratio=1.0)
                how: dict[str, Any] = {"lr": 0.0, "momentum": settings.momentum, "weight_decay": settings.weight_decay}
                optimizers.append(_muon(mesh)(groups, **how, adjust_lr_fn="match_rms_adamw"))
            if rest:
                optimizers.append(_adamw(settings, _groups(rest, settings.weight_decay, settings.adamw_lr_ratio)))
            return optimizers
        case _:
            assert_never(settings)


def updates_in_backward(settings: Optimizer) -> bool:
    """Return whether parameters are updated as soon as their gradients are there."""
    return not isinstance(settings, Muon) and settings.in_backward


def set_learning_rates(optimizers: list[torch.optim.Optimizer], rates: Mapping[Part, float], factor: float) -> None:
    """Give every group its part's rate × the group's ratio × the schedule's factor."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            rate = rates[group["part"]] * group["ratio"] * factor
            if isinstance(group["lr"], Tensor):  # which a CUDA graph reads
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate


def _groups(trainable: Iterable[tuple[str, Tensor, Entry]], weight_decay: float, ratio: float) -> list[dict[str, Any]]:
    """Parameter groups by (part, decayed or not, mesh they are sharded over), in order of first appearance, each with its names."""
    groups: dict[tuple[Part, bool, Hashable], dict[str, Any]] = {}
    for name, parameter, entry in trainable:
        new = {"params": [], "names": [], "part": entry.part, "ratio": ratio, "weight_decay": weight_decay if entry.decays else 0.0}
        group = groups.setdefault((entry.part, entry.decays, mesh_of_tensor(parameter)), new)  # no fused kernel takes several
        group["params"].append(parameter)
        group["names"].append(name)
    return list(groups.values())


class _AdamW(NotCompiled, torch.optim.AdamW):
    pass


def _muon(mesh: "Mesh | None") -> Callable[..., torch.optim.Muon]:
    if mesh is None:
        return StackedMuon
    from eyeline.parallel.muon import ShardedMuon

    return partial(ShardedMuon, mesh=mesh)


def _adamw(settings: AdamW | Muon, groups: list[dict[str, Any]]) -> torch.optim.AdamW:
    # fused: one kernel for all tensors, on a CPU too; the rate is set before every step, so 0 here is never used
    return _AdamW(groups, lr=0.0, betas=settings.betas, eps=settings.eps, fused=True)


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
    stored: Stored,
    without: Collection[str] = (),
    where: str = "the checkpoint",
    elsewhere: Collection[str] = (),
) -> None:
    """Put back what `state_tensors` gave, each rank its part. `without` are the parameters that had no state; all others must have theirs.
    `elsewhere`: parameters that other ranks have.

    Raises Refused, with what is missing, unknown, or has another shape or dtype, before anything is put back: an optimizer's kernel
    reads as many numbers as the parameter has, whatever there are.
    """
    wanted = {
        f"{name}:{key}": tensor
        for optimizer, name, parameter in _parameters(optimizers)
        if name not in without
        for key, tensor in _state_of(optimizer, parameter).items()
    }
    given = {name: meta for name, meta in stored.meta.items() if name.rpartition(":")[0] not in elsewhere}
    refuse_misfits(f"the optimizer state of {where}", misfits(given, wanted, "exact"))
    for optimizer, name, parameter in _parameters(optimizers):
        kept = {} if name in without else _state_of(optimizer, parameter)
        optimizer.state[parameter] = _loaded(stored, name, parameter, optimizer, kept)


def _loaded(
    stored: Stored, name: str, parameter: nn.Parameter, optimizer: torch.optim.Optimizer, keys: Collection[str]
) -> dict[str, Tensor]:
    """What is stored of a parameter, on its device and sharded as it is. AdamW's fused kernel wants `step`, a number, there too; ours keeps
    it on the host, where it is read."""
    small = isinstance(optimizer, SmallAdamW)
    new = optimizer.new_moments(parameter) if small and keys else {}
    values: dict[str, Tensor] = {}
    for key in keys:
        if key == "step":
            number = stored.read(f"{name}:{key}")
            values[key] = number if small else number.to(parameter.device)
            continue
        values[key] = new[key] if small else torch.empty_like(parameter, requires_grad=False)
        part = held(values[key])
        part.local.copy_(stored.read(f"{name}:{key}", part.box))
    return values


def _state_of(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
    """What an optimizer keeps of a parameter once it has moved it, without values."""
    like = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
    match optimizer:
        case SmallAdamW():
            sizes = optimizer.sizes(tuple(parameter.shape))
            moments = {key: torch.empty(shape, dtype=dtype, device="meta") for key, (shape, dtype) in sizes.items()}
            return {"step": torch.empty((), dtype=torch.float32, device="meta")} | moments
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
