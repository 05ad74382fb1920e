"""`float8`: a run in FP8 learns as one in bf16 does; what does not go with it is refused, and `check` says where it is."""

from pathlib import Path
from typing import Any

import pytest
import torch

import eyeline.train.loop as loop
from eyeline.core.errors import Refused
from eyeline.core.files import read_lines
from eyeline.data.fetch.full_batch import full_batch
from eyeline.models import CONFIG, Config
from eyeline.models.float8 import float8_layers
from eyeline.models.layers import Linear
from eyeline.models.shape import shape
from eyeline.parallel.launch import Machine
from eyeline.train.float8 import refuse_without_float8
from eyeline.train.run import Run
from eyeline.train.trainable import plan_of
from tests.models.cases import ALL
from tests.train.ends import losses
from tests.train.recipe import tiny_run

WIDE = ("model.config.language.hidden_size=32", "model.config.language.intermediate_size=48", "validation_steps=null")


def run_of(folder: Path, *overrides: str) -> Run:
    return tiny_run(folder, *WIDE, "precision=bf16", *overrides)


def config_of(run: Run) -> Config:
    assert run.model.config is not None
    return run.model.config


def test_runs_learn_as_in_bf16(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All parts in full, recomputed, then LoRA."""
    found = {}
    for name in ("none", "tensorwise", "rowwise"):
        how = ("stages.0.gradient_checkpointing=true", "stages.0.steps=3", "stages.1.steps=2")
        loop.train(run := run_of(tmp_path, f"out={tmp_path / name}", f"float8={name}", *how))
        found[name] = losses(run)
    said = capsys.readouterr().out
    wanted = "float8: rowwise (emulated on this CPU, in float32 and slowly), in 14 linear layers of the language model's blocks: q_proj"
    assert wanted in said
    assert len({tuple(one.values()) for one in found.values()}) == 3
    for name in ("tensorwise", "rowwise"):
        assert found[name] == pytest.approx(found["none"], abs=0.08)
        assert found[name][3] < found[name][1] - 0.2, "it learns"
    [start] = [line for line in read_lines(tmp_path / "rowwise" / "metrics.jsonl") if line["kind"] == "stage" and line["stage"] == "whole"]
    assert any(line.startswith("float8: in bf16 stay embedding and head") for line in start["kernels"])


def test_every_layer_computes_as_it_is_listed() -> None:
    """In every family: blocks of the language model alone, no rates, no experts, no gate of one number; adapters stay as they are."""
    for case in ALL:
        plan = shape(case.config, trains={}, adapters={})
        found = float8_layers(plan.model, plan.blocks["language"])
        names = {name for name, module in plan.model.named_modules() if any(module is layer for layer in found.layers)}
        assert len(names) == len(found.layers) and all(name.startswith("language.blocks.") for name in names)
        assert not any(name.endswith((".delta.a", ".delta.b", ".shared_gate", ".router")) for name in names)
        assert all(layer.in_features % 16 == layer.out_features % 16 == 0 for layer in found.layers)
        if any(".experts." in name for name in plan.table):
            assert "experts (a grouped product)" in found.others


def test_rates_of_the_recurrent_state_stay_whatever_their_sizes() -> None:
    delta = {"key_heads": 16, "value_heads": 16, "key_dim": 16, "value_dim": 16}
    sizes = {"vocab_size": 300, "hidden_size": 32, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 16, "intermediate_size": 48}
    hybrid = {"family": "qwen3_5", **sizes, "layer_types": ["linear_attention"], "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
    language = {**hybrid, "delta": delta, "tie_embeddings": True}
    plan = shape(CONFIG.validate_python({"family": "text", "language": language}), trains={})
    found = float8_layers(plan.model, plan.blocks["language"])
    assert {"delta_q_proj", "delta_z_proj", "delta_o_proj", "down_proj"} <= set(found.names)
    assert found.others == ("delta_a_proj (rates of the recurrent state)", "delta_b_proj (rates of the recurrent state)")


def test_sizes_that_are_no_multiples_are_named(tmp_path: Path) -> None:
    run = run_of(tmp_path, "float8=rowwise", "model.config.language.intermediate_size=40")
    plan = plan_of(run, 0, config_of(run))
    assert "down_proj (40 × 32, not multiples of 16)" in float8_layers(plan.model, plan.blocks["language"]).others
    layers = {name: module.float8 for name, module in plan.model.named_modules() if isinstance(module, Linear)}
    assert layers["language.blocks.0.attn.q"] == "rowwise"
    assert layers["language.blocks.0.mlp.up"] is layers["vision.blocks.0.attn.q"] is None


def test_a_gpu_takes_no_other_product_for_these_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On tensors without memory, with a GPU's branches: 14 layers forward, and two gradients each in full. With adapters
    one, of the input; and none of q, k and v of the first block, whose input is frozen text."""
    seen, original = list[torch.dtype](), torch._scaled_mm
    monkeypatch.setattr(torch, "_scaled_mm", lambda a, b, **how: (seen.append(a.dtype), original(a, b, **how))[1])
    run = run_of(tmp_path, "float8=tensorwise", "stages.1.trains.language.dropout=0")
    for index, gradients in enumerate((28, 11)):
        plan = plan_of(run, index, config_of(run))
        batch = full_batch(plan.spec.image, plan.spec.vocab_size, run.stages[index].batch.budget).with_draws(0, 0)
        plan.model.train()
        seen.clear()
        plan.model(batch.to("meta")).out.backward()
        assert (seen.count(torch.float8_e4m3fn), seen.count(torch.float8_e5m2)) == (14, gradients)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["precision=fp32"], "precision: fp32; what is not in FP8 is in bf16"),
        (["compile=blocks"], "compile: blocks"),
        (["mesh.tp=2"], "mesh.tp"),
        (["stages.1.trains.language.quantize=nf4"], r"stages.adapt.trains.language.quantize: nf4"),
        (["stages.1.trains.language.dora=true"], r"stages.adapt.trains.language.dora"),
        (["precision=fp16", "mesh.ep=2"], r"precision: fp16.*Nor with mesh.ep"),
        (["float8=fp8"], "float8: got 'fp8', wanted"),
    ],
)
def test_what_does_not_go_with_it_is_refused(tmp_path: Path, overrides: list[str], words: str) -> None:
    with pytest.raises(Refused, match=words):
        run_of(tmp_path, "float8=rowwise", *overrides)


@pytest.mark.parametrize(("capability", "words"), [((8, 0), "need compute capability 8.9"), ((9, 0), None), (None, None)])
def test_a_gpu_without_it_is_refused_at_the_start(tmp_path: Path, capability: Any, words: str | None) -> None:
    here = Machine(torch.device("cpu"), "NVIDIA", 1, capability)
    if words is None:
        refuse_without_float8(run_of(tmp_path, "float8=rowwise"), here)
        return
    refuse_without_float8(run_of(tmp_path), here)
    with pytest.raises(Refused, match=words):
        refuse_without_float8(run_of(tmp_path, "float8=rowwise"), here)


def test_a_model_without_such_layers_is_refused(tmp_path: Path) -> None:
    narrow = ("model.config.language.hidden_size=24", "model.config.language.heads=3", "model.config.language.kv_heads=1")
    with pytest.raises(Refused, match="no linear layer of the language model's blocks can compute in FP8: q_proj"):
        loop.train(run_of(tmp_path, "float8=rowwise", *narrow))
