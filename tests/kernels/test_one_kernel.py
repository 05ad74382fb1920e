"""What a GPU computes in one pass, run here as it stands: equal to the plain form with its gradients, as near to float64 as today's form in
bfloat16, and a single operator each way. `slow` tests have PyTorch's compiler make kernels of every function, for this CPU."""

import pytest
import torch

from eyeline.kernels import gpu, norms, one_kernel, swiglu
from eyeline.study.roofline.record import Recorder
from tests.kernels.passes import PASSES, H, K, T, given, results


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
    assert (out.shape, out.dtype) == (one.plain(*given(one, torch.bfloat16)).shape, torch.bfloat16)
    ours = [op for op in recorder.operators if op.name.startswith("eyeline::")]
    assert len(ours) == one.operators
    largest = max(x.numel() for x in leaves) * 2
    assert all(op.bytes <= (3 + 2) * largest + 8 * T * K + 12 * T * H for op in ours)  # nothing as large is in float32


@pytest.mark.slow
def test_compiled_passes_compute_the_same_at_every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Called by their operators, as on a GPU: each function is compiled once, and takes other sizes as they come."""
    from torch._dynamo.utils import counters

    exact = {name: results(one.fast, given(one, torch.bfloat16)) for name, one in PASSES.items()}
    monkeypatch.setattr(one_kernel, "on_gpu", lambda _: True)
    monkeypatch.setattr(one_kernel, "_compiles", lambda _: True)
    counters.clear()
    for name, one in PASSES.items():
        for x, want in zip(results(one.fast, given(one, torch.bfloat16)), exact[name], strict=True):
            torch.testing.assert_close(x, want, atol=2e-2, rtol=2e-2)
    compiled = counters["stats"]["unique_graphs"]
    assert compiled > 20
    for rows, width in ((50, 32), (33, 64)):
        norms._OneKernelRMS.apply(torch.randn(rows, 3, width).bfloat16(), torch.randn(width), 1e-6)
        swiglu._OneKernel.apply(*(torch.randn(rows, width).bfloat16() for _ in range(2)))
    assert counters["stats"]["unique_graphs"] == compiled


def test_small_tensors_on_a_gpu_are_left_to_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in generation, token by token: nothing is compiled for them."""
    monkeypatch.setattr(gpu, "on_gpu", lambda _: True)
    assert not gpu.pays(torch.empty(gpu.LEAST - 1))
    assert gpu.pays(torch.empty(gpu.LEAST))
    assert gpu.pays(torch.empty(1, device="meta")), "what is counted is a step of training"


def test_a_device_that_nothing_is_compiled_for_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("no compiler\nand more")

    monkeypatch.setattr(torch, "compile", refuse)
    assert one_kernel.compiler_obstacle.__wrapped__(torch.device("cpu")) == "RuntimeError: no compiler"
