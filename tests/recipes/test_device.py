"""`check`, `train`, `eval` and their kernels on GPUs that are made up: a CPU that says it has a compute capability."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import eyeline.train.loop as loop
from eyeline.core.errors import Refused
from eyeline.core.files import read_lines
from eyeline.kernels import fla
from eyeline.models import CONFIG
from eyeline.models.kernel_paths import choose
from eyeline.models.shape import build
from eyeline.parallel.launch import Machine
from eyeline.recipes import device as module
from eyeline.recipes.check import check
from eyeline.recipes.device import device_report
from eyeline.study import evaluate as evaluation
from eyeline.train.start import description
from tests.fla_stand_in import install, kernel, raising_in_backward
from tests.train.recipe import tiny_run

LLAVA = {  # head dims 8 and 16
    "vision": {"image_size": 16, "patch": 8, "hidden_size": 16, "layers": 1, "heads": 2, "intermediate_size": 16},
    "language": {
        "vocab_size": 300,
        "hidden_size": 32,
        "layers": 1,
        "heads": 2,
        "kv_heads": 1,
        "intermediate_size": 32,
        "tie_embeddings": True,
    },
}
DELTA = {"key_heads": 1, "value_heads": 2, "key_dim": 16, "value_dim": 8}
HYBRID = {
    "family": "text",
    "language": {
        "family": "qwen3_5", "vocab_size": 300, "hidden_size": 16, "layers": 2, "layer_types": ["linear_attention", "full_attention"],
        "heads": 2, "kv_heads": 1, "head_dim": 8, "delta": DELTA, "intermediate_size": 24, "partial_rotary_factor": 0.5,
        "mrope_section": [1, 1, 0], "tie_embeddings": True,
    },
}  # fmt: skip
SPARSE = {"num_experts": 4, "experts_per_token": 2, "intermediate_size": 16}
EXPERTS = {
    "family": "text",
    "language": {
        "family": "qwen3", "vocab_size": 300, "hidden_size": 16, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 8,
        "intermediate_size": 24, "experts": SPARSE, "tie_embeddings": True,
    },
}  # fmt: skip
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def chosen(config: dict[str, Any], capability: tuple[int, int] | None, dtype: torch.dtype = BF16, **how: Any) -> tuple[str, str]:
    """The lines and the warnings."""
    model = build(CONFIG.validate_python(config), "meta")
    found = choose(model, torch.device("cpu"), capability, dtype, **{"trains": True, **how})
    return "\n".join(found.lines), "\n".join(found.warnings)


def with_heads(config: dict[str, Any], heads: int) -> dict[str, Any]:
    return config | {"vision": config["vision"] | {"hidden_size": 24, "heads": heads}}


def test_a_cpu_has_one_kernel_and_says_nothing() -> None:
    assert chosen(LLAVA, None) == chosen(HYBRID, None, FP32) == ("", "")


@pytest.mark.parametrize(
    ("config", "capability", "dtype", "line", "warning"),
    [
        (LLAVA, (9, 0), BF16, "attention of vision (head dim 8) and language (head dim 16): flash attention over packed documents", None),
        (LLAVA, (8, 0), BF16, "flash attention", None),
        (LLAVA, (7, 5), BF16, None, "has no bfloat16 in hardware"),
        (LLAVA, (7, 5), BF16, None, "one document at a time (scaled_dot_product_attention), because flash attention needs compute"),
        (LLAVA, (7, 0), FP16, None, "one document at a time (scaled_dot_product_attention), because flash attention needs compute"),
        (LLAVA, (9, 0), FP16, "flash attention over packed documents", "computes as fast in bf16, which has no such limits"),
        (EXPERTS, (9, 0), FP16, None, "experts: one at a time, with a GPU synchronisation in every layer, because the grouped matrix"),
        (LLAVA, (9, 0), FP32, None, "precision: fp32 on a GPU"),
        (LLAVA, (9, 0), FP32, None, "flash attention computes in bfloat16 or float16, and this is float32"),
        (
            with_heads(LLAVA, 4),
            (9, 0),
            BF16,
            "attention of language (head dim 16): flash",
            "attention of vision (head dim 6): one document",
        ),
        (EXPERTS, (9, 0), BF16, "experts: torch's grouped matrix product (grouped_mm)", None),
        (EXPERTS, (10, 0), BF16, "experts: torch's grouped matrix product (grouped_mm)", None),
        (EXPERTS, (8, 0), BF16, None, "loops over experts on this GPU and synchronises with it in every layer"),
        (EXPERTS, (12, 0), BF16, None, "this one has 12.0"),
        (EXPERTS, (7, 0), FP32, None, "experts: one at a time"),
    ],
)
def test_kernels_are_reported_for_each_gpu(config, capability, dtype, line, warning) -> None:
    lines, warnings = chosen(config, capability, dtype)
    assert line is None or line in lines
    assert warning in warnings if warning else not warnings


def test_experts_of_odd_widths_are_reported() -> None:
    odd = EXPERTS | {"language": EXPERTS["language"] | {"experts": SPARSE | {"intermediate_size": 12}}}
    assert "widths that are multiples of 8, and these are [16, 12]" in chosen(odd, (9, 0))[1]


def test_missing_fla_is_reported_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fla, "installed", lambda: False)
    warnings = chosen(HYBRID, (9, 0))[1]
    assert "because fla is not installed" in warnings
    assert "pip install 'flash-linear-attention>=0.5.2'" in warnings
    assert "fla is" not in "".join(chosen(LLAVA, (9, 0))), "only where a model has such layers"


def test_fla_is_not_tried_where_it_cannot_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    install(monkeypatch, kernel(calls=calls))
    assert "fla computes in half precision" in chosen(HYBRID, (9, 0), FP32)[0]
    assert "deterministic is on" in chosen(HYBRID, (9, 0), deterministic=True)[0]
    assert not calls


def test_fault_of_fla_is_reported_with_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fla, "_version", {"flash-linear-attention": "0.4.2", "triton": "3.6.0"}.get)
    install(monkeypatch, kernel(gradient_by={"decay": 1.5, "beta": 0.5}))
    warnings = chosen(HYBRID, (9, 0))[1]
    assert "fla does not compute the same here: the gradient of decay is off by 50.0%, the gradient of beta is off by 50.0%" in warnings
    assert f"(flash-linear-attention 0.4.2, triton 3.6.0, torch {torch.__version__}, cpu)" in warnings
    assert "fla, compared with our own kernel" in chosen(HYBRID, (9, 0), trains=False)[0], "its output is right"


# ---- runs


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that computes on the CPU, as an H100 is asked."""
    for place in (loop, module, evaluation):
        monkeypatch.setattr(place, "machine", lambda *_, **__: Machine(torch.device("cpu"), "NVIDIA H100", 1, (9, 0)))


def hybrid_run(folder: Path, *overrides: str):
    source = {"sources": [{"path": str(folder / "text.json")}]}
    rows = [{"conversations": [{"from": "human", "value": f"say {n}"}, {"from": "gpt", "value": f"it is {n}"}]} for n in range(12)]
    (folder / "text.json").write_text(json.dumps(rows))
    stage = {
        "name": "text", "trains": {"language": {"how": "full", "lr": 0.01}}, "data": source, "steps": 2,
        "batch": {"max_tokens": 200, "max_patches": 0},
    }  # fmt: skip
    return tiny_run(
        folder,
        f"model.config={json.dumps(HYBRID)}",
        f"stages={json.dumps([stage])}",
        f"evaluation={json.dumps(source | {'max_new_tokens': 2})}",
        "precision=bf16",
        *overrides,
    )


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in read_lines(folder / "metrics.jsonl") if line["kind"] == "step"]


@pytest.mark.usefixtures("gpu")
def test_stage_takes_fla_only_after_it_agreed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(fla, "installed", lambda: False)
    loop.train(hybrid_run(tmp_path, f"out={tmp_path / 'none'}"))
    assert "because fla is not installed" in capsys.readouterr().err

    calls: list[Any] = []
    with monkeypatch.context() as patch:
        install(patch, kernel(calls=calls))
        loop.train(hybrid_run(tmp_path, f"out={tmp_path / 'right'}"))
        heard = capsys.readouterr()
        assert "gated delta rule: fla, compared with our own kernel on this GPU" in heard.out
        assert "attention of language (head dim 8): flash attention" in heard.out
        assert len(calls) > 1, "it computes the steps too"
        assert losses(tmp_path / "right") == pytest.approx(losses(tmp_path / "none"), rel=1e-3)
        calls.clear()
        evaluation.evaluate(tmp_path / "right", limit=2)
        assert len(calls) > 1
        assert "gated delta rule: fla" in capsys.readouterr().out

    for name, wrong in {"wrong": kernel(gradient_by={"decay": 0.0}, calls=calls), "raising": raising_in_backward}.items():
        calls.clear()
        with monkeypatch.context() as patch:
            install(patch, wrong)
            loop.train(hybrid_run(tmp_path, f"out={tmp_path / name}"))
        assert "because fla does not compute the same here: " in capsys.readouterr().err
        assert len(calls) == (1 if name == "wrong" else 0), "after the comparison it is never called"
        assert losses(tmp_path / name) == losses(tmp_path / "none")


@pytest.mark.usefixtures("gpu")
def test_check_says_what_the_device_would_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, raising_in_backward)
    out = io.StringIO()
    assert check(hybrid_run(tmp_path), 0, Console(file=out, width=200)), "slow is no problem"
    said = out.getvalue()
    assert "device: cpu (NVIDIA H100, compute capability 9.0), bf16" in said
    assert "attention of language (head dim 8): flash attention over packed documents" in said
    assert (
        "warning: gated delta rule: our own kernel, in chunks of plain PyTorch, because fla does not compute the same here: it raised"
        in said
    )


def test_check_names_a_device_that_is_not_there(tmp_path: Path) -> None:
    """Also where there is no model to look at."""
    for overrides in ((), (f"model={{path: {tmp_path / 'nowhere'}}}",)):
        out = io.StringIO()
        assert not check(tiny_run(tmp_path, "device=cuda", *overrides), 0, Console(file=out, width=200))
        assert "  device: device is cuda, but torch sees no CUDA device here. Use device=cpu" in out.getvalue()


def test_check_on_a_cpu_names_the_cpu(tmp_path: Path) -> None:
    run = tiny_run(tmp_path)
    report = device_report(run, description(run))
    assert not report.warnings and not report.problems
    (line,) = report.lines
    assert line.startswith("device: cpu (") and line.endswith("), fp32")


def test_deterministic_is_not_left_on_by_check(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, "deterministic=true")
    device_report(run, description(run))
    assert not torch.are_deterministic_algorithms_enabled()


def test_unknown_device_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="device"):
        tiny_run(tmp_path, "device=gpu")


def test_check_names_what_is_in_fp8_and_why_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wide = ("precision=bf16", "float8=rowwise", "model.config.language.hidden_size=32")
    run = tiny_run(tmp_path, *wide)
    bundle = description(run)
    assert "float8: rowwise (emulated on this CPU" in "\n".join(device_report(run, bundle).lines)
    assert "gate_proj (32 × 24, not multiples of 16)" in "\n".join(device_report(run, bundle).lines)
    monkeypatch.setattr(module, "machine", lambda *_, **__: Machine(torch.device("cpu"), "NVIDIA A100", 1, (8, 0)))
    [problem] = device_report(run, bundle).problems
    assert problem.startswith("float8: rowwise, and products in FP8 need compute capability 8.9") and problem.endswith("Set float8: none")
