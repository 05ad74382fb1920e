"""What a GPU computes in one pass, run here as it stands: equal to the plain form with its gradients, as near to float64 as today's form in
bfloat16, and a single operator each way. `slow` tests have PyTorch's compiler make kernels of every function, for this CPU."""

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from eyeline.kernels import causal_conv, norms, one_kernel, rope, swiglu
from eyeline.study.roofline.record import Recorder

T, H, K = 12, 3, 16
BOUNDS = (0, 1, 3, 10, T)  # documents shorter and longer than the convolution
Function = Callable[..., Tensor]


class Pass(NamedTuple):
    """A function of activations and weights: as a GPU has it, and plainly."""

    fast: Function
    plain: Function
    shapes: tuple[tuple[int, ...], ...]  # of activations, then of weights
    activations: int
    operators: int  # forward and backward, where no weight trains


def turned_plainly(x_THK: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    R = cos_TR.shape[1]
    first, second = x_THK[..., :R].to(cos_TR.dtype).chunk(2, -1)
    out = x_THK[..., :R].to(cos_TR.dtype) * cos_TR[:, None] + torch.cat((-second, first), -1) * sin_TR[:, None]
    return torch.cat((out.to(x_THK.dtype), x_THK[..., R:]), -1)


def tables(R: int, x: Tensor) -> tuple[Tensor, Tensor]:
    positions_T3 = torch.arange(T)[:, None].expand(-1, 3)
    return tuple(table.to(x.device) for table in rope.rope_tables(positions_T3, R, 100.0))  # pyright: ignore[reportReturnType]: two


def norm64(x: Tensor, w: Tensor) -> Tensor:
    """The RMS norm in the widest dtype given."""
    return (F.rms_norm(x.to(w.dtype), w.shape, w, 1e-6)).to(x.dtype)


def conv64(x_TC: Tensor, weight_CW: Tensor) -> Tensor:
    """The convolution in the widest dtype given."""
    outs = []
    for start, end in pairwise(BOUNDS):
        x_1CT = F.pad(x_TC[start:end].to(weight_CW.dtype).T, (weight_CW.shape[1] - 1, 0))[None]
        outs.append(F.silu(F.conv1d(x_1CT, weight_CW[:, None], groups=len(weight_CW)))[0].T)
    return torch.cat(outs).to(x_TC.dtype)


def conv(x_TC: Tensor, weight_CW: Tensor) -> Tensor:
    return causal_conv._OneKernel.apply(x_TC, weight_CW, torch.tensor(BOUNDS, dtype=torch.int32).to(x_TC.device))


PASSES = {
    "causal_conv": Pass(conv, conv64, ((T, K), (K, 4)), 1, 3),
    "rms_norm": Pass(lambda x, w: norms._OneKernelRMS.apply(x, w, 1e-6), norm64, ((T, H, K), (K,)), 1, 2),
    "gated_rms_norm": Pass(
        lambda x, z, w: norms._OneKernelGated.apply(x, z, w, 1e-6),
        lambda x, z, w: (norm64(x.to(w.dtype), w) * F.silu(z.to(w.dtype))).to(z.dtype), ((T, H, K), (T, H, K), (K,)), 2, 2,
    ),
    "layer_norm": Pass(
        lambda x, w, b: norms._OneKernelLayer.apply(x, w, b, 1e-6),
        lambda x, w, b: F.layer_norm(x.to(w.dtype), w.shape, w, b, 1e-6).to(x.dtype), ((T, K), (K,), (K,)), 1, 2,
    ),
    "swiglu": Pass(swiglu._OneKernel.apply, lambda gate, up: F.silu(gate) * up, ((T, K), (T, K)), 2, 2),
    "rotate": Pass(
        lambda x: rope._OneKernel.apply(x, *tables(K, x)), lambda x: turned_plainly(x, *tables(K, x)), ((T, H, K),), 1, 2
    ),
    "rotate a part": Pass(
        lambda x: rope._OneKernel.apply(x, *tables(4, x)), lambda x: turned_plainly(x, *tables(4, x)), ((T, H, K),), 1, 2
    ),
}  # fmt: skip


def given(one: Pass, dtype: torch.dtype, weights: torch.dtype = torch.float32, device: str = "cpu") -> list[Tensor]:
    rng = torch.Generator().manual_seed(0)
    made = [torch.randn(shape, generator=rng) for shape in one.shapes]
    return [x.to(device, dtype if i < one.activations else weights).requires_grad_() for i, x in enumerate(made)]


def results(function: Function, leaves: list[Tensor]) -> list[Tensor]:
    """The output, and the gradients of a fixed direction."""
    out = function(*leaves)
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    return [out.detach(), *torch.autograd.grad((out * direction.to(out.device)).sum(), leaves)]


@pytest.mark.parametrize("name", PASSES)
def test_values_and_gradients_are_those_of_the_plain_form(name: str) -> None:
    one = PASSES[name]
    for got, want in zip(results(one.fast, given(one, torch.float32)), results(one.plain, given(one, torch.float32)), strict=True):
        torch.testing.assert_close(got, want, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("name", PASSES)
def test_bfloat16_is_as_near_to_float64_as_the_plain_form(name: str) -> None:
    one = PASSES[name]
    leaves = given(one, torch.bfloat16)
    exact = results(one.plain, [x.detach().double().requires_grad_() for x in leaves])
    fast, plain = results(one.fast, leaves), results(one.plain, given(one, torch.bfloat16))
    for got, today, want in zip(fast, plain, exact, strict=True):
        assert got.dtype == today.dtype
        off, off_today = ((x.double() - want).norm() for x in (got, today))
        assert off <= off_today * 1.02 + 1e-5 * want.norm()


@pytest.mark.parametrize("name", PASSES)
def test_a_pass_is_one_operator_each_way(name: str) -> None:
    one = PASSES[name]
    leaves = given(one, torch.bfloat16, device="meta")
    for x in leaves[one.activations :]:
        x.requires_grad_(False)
    with Recorder() as recorder:
        out = one.fast(*leaves)
        out.backward(torch.empty_like(out))
    assert (out.shape, out.dtype) == (leaves[0].shape, torch.bfloat16)
    ours = [op for op in recorder.operators if op.name.startswith("eyeline::")]
    assert len(ours) == one.operators
    largest = max(x.numel() for x in leaves) * 2
    assert all(op.bytes <= (3 + 2) * largest + 8 * T * K + 12 * T * H for op in ours)  # nothing as large is in float32


@pytest.mark.slow
@pytest.mark.parametrize("name", PASSES)
def test_compiled_passes_compute_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they are compiled for a GPU: for all sizes at once."""
    one, made = PASSES[name], dict[str, Function]()

    def compiled(function: Function) -> Function:
        kernel = torch.compile(function, dynamic=True, fullgraph=True)
        return lambda *args: made.setdefault(function.__name__, kernel)(*args)

    for module in (causal_conv, norms, rope, swiglu):
        for key, value in list(vars(module).items()):
            if hasattr(value, "__wrapped__") and value.__module__ == module.__name__:
                monkeypatch.setattr(module, key, compiled(value.__wrapped__))
    leaves = given(one, torch.bfloat16)
    got = results(one.fast, leaves)
    monkeypatch.undo()
    assert made
    for x, want in zip(got, results(one.fast, leaves), strict=True):
        torch.testing.assert_close(x, want, atol=2e-2, rtol=2e-2)


def test_a_device_that_nothing_is_compiled_for_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("no compiler\nand more")

    monkeypatch.setattr(torch, "compile", refuse)
    assert one_kernel.compiler_obstacle.__wrapped__(torch.device("cpu")) == "RuntimeError: no compiler"
