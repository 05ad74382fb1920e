"""fla's kernel against our chunks before it is used, by stand-ins: right, wrong in the output, in each gradient, in the memory, raising."""

import math
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from eyeline.kernels import fla
from eyeline.kernels.self_test import fla_fault
from tests.fla_stand_in import INPUTS, install, kernel, raising_in_backward

CPU = torch.device("cpu")


def fault(gradients: bool = True, dtype: torch.dtype = torch.bfloat16) -> str | None:
    return fla_fault(2, 4, 16, 8, dtype, CPU, gradients)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gradients", [True, False])
def test_right_kernel_passes(monkeypatch: pytest.MonkeyPatch, gradients: bool, dtype: torch.dtype) -> None:
    calls: list[Any] = []
    install(monkeypatch, kernel(calls=calls))
    assert fault(gradients, dtype) is None
    assert len(calls) == 1


def test_wrong_output_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, kernel(out_by=1.2))
    assert fault(gradients=False) == "the output is off by 20.0%"
    assert (fault() or "").startswith("the output is off by 20.0%, the gradient of q is off by 20.0%")


def test_output_that_is_not_a_number_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, kernel(out_by=math.nan))
    assert (fault() or "").startswith("the output is off by nan")


@pytest.mark.parametrize("name", INPUTS)
def test_each_wrong_gradient_is_named_alone(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    install(monkeypatch, kernel(gradient_by={name: 0.8}))
    assert fault() == f"the gradient of {name} is off by 20.0%"
    assert fault(gradients=False) is None, "nothing is trained, so nothing of it is asked"


def test_wrong_recurrent_state_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, kernel(state_by=1.1))
    assert fault(gradients=False) == "the state after each document is off by 10.0%"
    assert fault() is None


def test_exception_in_the_backward_pass_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, raising_in_backward)
    assert fault() == "it raised RuntimeError: Triton 3.6.0 is not supported on Hopper"


class OfTriton(Exception):
    """Compilers have exceptions of their own."""


@pytest.mark.parametrize(
    "raised", [OfTriton("cannot compile"), AssertionError(), TypeError("unexpected keyword"), ImportError("no triton")]
)
def test_exception_of_any_kind_is_a_fault(monkeypatch: pytest.MonkeyPatch, raised: Exception) -> None:
    def raising(**_: Any) -> Any:
        raise raised

    install(monkeypatch, raising)
    assert fault() == f"it raised {type(raised).__name__}" + (f": {raised}" if str(raised) else "")


def test_fla_that_cannot_be_imported_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("fla", "fla.ops", "fla.ops.gated_delta_rule"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))  # without the function
    monkeypatch.setattr(fla, "installed", lambda: True)
    assert (fault() or "").startswith("it raised ImportError")


def test_shapes_that_differ_are_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def shorter(**inputs: Any) -> Any:
        out, state = kernel()(**inputs)
        return out[:, :-1], state

    install(monkeypatch, shorter)
    assert (fault(gradients=False) or "").startswith("it raised")


def test_versions_name_torch_and_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = {"flash-linear-attention": "0.5.2", "triton": "3.6.0"}
    monkeypatch.setattr(fla, "_version", numbers.get)
    assert fla.versions() == f"flash-linear-attention 0.5.2, triton 3.6.0, torch {torch.__version__}"
