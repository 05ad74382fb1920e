"""The machine as torch tells it, with GPUs that are made up; what is asked of it before torch is imported."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import eyeline.train.loop as loop
from eyeline.core.errors import Refused
from eyeline.parallel import launch
from eyeline.parallel.launch import machine
from eyeline.parallel.threads import ALLOCATOR, expandable_segments
from eyeline.train.environment import environment
from tests.train.recipe import tiny_run


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA L4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 9))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: SimpleNamespace(total_memory=24 << 30))
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    monkeypatch.setattr(launch, "_driver", lambda: "570.124.06")


@pytest.mark.usefixtures("gpu")
def test_stamps_name_everything_that_a_gpu_computes_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyeline.train.environment.version", lambda name: f"1 of {name}")
    for name in ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    found = environment(machine())
    wanted = {
        "device": "cuda", "hardware": "NVIDIA L4", "capability": "8.9", "device_memory_bytes": 24 << 30, "cuda": "12.8", "rocm": None,
        "cudnn": 91002, "driver": "570.124.06", "allocator": "expandable_segments:True", "deterministic": False,
    }  # fmt: skip
    assert {name: found[name] for name in wanted} == wanted
    for package in ("torch", "triton", "flash-linear-attention", "fla-core"):
        assert found["packages"][package] == f"1 of {package}"


def test_stamps_of_a_cpu_have_the_same_names() -> None:
    found = environment(machine("cpu", 1))
    assert found["device"] == "cpu"
    assert [found[name] for name in ("capability", "device_memory_bytes", "cuda", "cudnn", "driver", "allocator")] == [None] * 6


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.124.06  Thu Feb 20 11:11:11 UTC 2025\n", "570.124.06"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n", "580.65.06"),
        ("\n", None),
    ],
)
def test_driver_is_what_its_kernel_module_says(monkeypatch: pytest.MonkeyPatch, tmp_path, text: str, version: str | None) -> None:
    (tmp_path / "version").write_text(text)
    real = open
    monkeypatch.setattr("builtins.open", lambda path, **how: real(tmp_path / "version" if str(path).startswith("/proc") else path, **how))
    assert launch._driver() == version


@pytest.mark.parametrize(("backend", "named"), [("mps", "an Apple GPU (MPS)"), ("xpu", "an Intel GPU (XPU)")])
def test_auto_says_which_accelerator_it_leaves_idle(monkeypatch: pytest.MonkeyPatch, capsys, backend: str, named: str) -> None:
    module = torch.backends.mps if backend == "mps" else torch.xpu
    monkeypatch.setattr(module, "is_available", lambda: True)
    assert machine("auto", 1).device.type == "cpu"
    assert f"device: auto chooses the CPU: this machine has {named}" in capsys.readouterr().err
    machine("cpu", 1)
    assert not capsys.readouterr().err


def test_cuda_without_a_gpu_is_refused() -> None:
    with pytest.raises(Refused, match="torch sees no CUDA device"):
        machine("cuda")


def test_deterministic_algorithms_are_set_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    here = machine("cpu", 1, deterministic=True)
    assert here.deterministic and torch.are_deterministic_algorithms_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8", "without it, torch refuses every product"
    assert environment(here)["deterministic"] is True
    machine("cpu", 1)
    assert not torch.are_deterministic_algorithms_enabled()


def test_operator_without_a_deterministic_version_is_named(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recognised by torch's own message, for an operator that has none on a CPU either; any other error stays a defect."""

    def forward(*_: object) -> None:
        torch.zeros(4).put_(torch.tensor([0, 0]), torch.ones(2))
        raise RuntimeError("something else")

    monkeypatch.setattr("eyeline.models.siglip2.Block.forward", forward)
    with pytest.raises(Refused, match=r"has no deterministic version of put_ on this device\. Set deterministic: false"):
        loop.train(tiny_run(tmp_path, "deterministic=true"))
    with pytest.raises(RuntimeError, match="something else"):
        loop.train(tiny_run(tmp_path))


def test_expandable_segments_unless_the_user_set_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    expandable_segments()
    assert "PYTORCH_ALLOC_CONF" not in os.environ
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")  # so that monkeypatch puts it back
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    expandable_segments()
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"


def test_allocator_is_asked_before_torch_is_imported() -> None:
    code = (
        f"import sys, os; sys.path[:] = {sys.path!r}; os.environ.pop('PYTORCH_ALLOC_CONF', None)\n"
        "from eyeline.cli import _calm; _calm(); assert 'torch' not in sys.modules; print(os.environ['PYTORCH_ALLOC_CONF'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "expandable_segments:True\n"
