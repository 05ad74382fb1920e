"""Compares a kernel that others wrote with ours on this device, once, before anything depends on it."""

import torch
from torch import Tensor

from eyeline.core.words import percent
from eyeline.kernels.gated_delta import StateCache, cached_gated_delta_rule, gated_delta_rule

LENGTHS = (1, 63, 64, 130, 5)  # of the documents compared: within, at and across the bounds of fla's chunks of 64 tokens
OFF = 0.05  # of the norm of what is compared. Rounding to bfloat16 gives less than 0.02; fla's own tests allow as much
TRAINING = tuple(f"the gradient of {name}" for name in ("q", "k", "v", "decay", "beta"))
GENERATING = ("the state after each document",)


def fla_fault(
    key_heads: int, value_heads: int, key_dim: int, value_dim: int, dtype: torch.dtype, device: torch.device, gradients: bool
) -> str | None:
    """The fault of fla's gated delta rule on this device, for heads of these sizes; None if nothing is.

    Compared on one packed batch, against our chunks in float32: the output, and with `gradients` the gradients of all five inputs, or
    without the states that generation continues from. Whatever fla raises is a fault too.
    """
    inputs, cu_S1 = _batch(key_heads, value_heads, key_dim, value_dim, device)
    inputs = tuple(x.to(dtype) if i < 3 else x for i, x in enumerate(inputs))  # decay and beta are float32 in the model too
    results = _trained if gradients else _generated
    try:
        theirs = [x.float() for x in results(inputs, cu_S1, fla=True)]
        wanted = results(tuple(x.float() for x in inputs), cu_S1, fla=False)
        off = [float((got - want).norm() / want.norm().clamp_min(1e-12)) for got, want in zip(theirs, wanted, strict=True)]
    except Exception as error:  # noqa: BLE001 - compilers and drivers raise any error: it is reported, and our own kernel computes
        lines = str(error).strip().splitlines()
        return f"it raised {type(error).__name__}{f': {lines[0][:200]}' if lines else ''}"
    names = ("the output", *(TRAINING if gradients else GENERATING))
    wrong = [f"{name} is off by {percent(x)}" for name, x in zip(names, off, strict=True) if not x <= OFF]  # also where x is not a number
    return ", ".join(wrong) or None


def _trained(inputs: tuple[Tensor, ...], cu_S1: Tensor, fla: bool) -> list[Tensor]:
    q, k, v, decay, beta = leaves = tuple(x.detach().requires_grad_() for x in inputs)
    direction_THJ = torch.randn(v.shape, generator=torch.Generator().manual_seed(1)).to(v.device)
    with torch.enable_grad():
        out_THJ = gated_delta_rule(q, k, v, decay, beta, cu_S1, fla)
        return [out_THJ.detach(), *torch.autograd.grad((out_THJ.float() * direction_THJ).sum(), leaves)]


def _generated(inputs: tuple[Tensor, ...], cu_S1: Tensor, fla: bool) -> list[Tensor]:
    q, k, v, decay, beta = inputs
    cache = StateCache(len(LENGTHS), (v.shape[1], k.shape[2], v.shape[2]), (), 1, v.dtype, v.device)
    out_THJ = cached_gated_delta_rule(q, k, v, decay, beta, cu_S1, cache, fla)
    return [out_THJ, cache.state_BHKJ]


def _batch(G: int, H: int, K: int, J: int, device: torch.device) -> tuple[tuple[Tensor, ...], Tensor]:
    """q, k, v, decay and beta of documents of LENGTHS, and their bounds. Heads decay fast and slowly, as in published models."""
    rng, tokens = torch.Generator().manual_seed(0), sum(LENGTHS)
    q, k, v = (torch.randn(tokens, *shape, generator=rng) for shape in ((G, K), (G, K), (H, J)))
    decay = -(torch.linspace(-5, 1, H) + 0.5 * torch.randn(tokens, H, generator=rng)).exp()
    beta = torch.randn(tokens, H, generator=rng).sigmoid()
    cu_S1 = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
    return tuple(x.to(device) for x in (q, k, v, decay, beta)), cu_S1.to(device)
