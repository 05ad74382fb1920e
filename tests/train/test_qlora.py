"""QLoRA: a stage whose frozen weights are in NF4, from its start to an export."""

from pathlib import Path

import pytest
import torch

import eyeline.train.loop as loop
from eyeline.bundle.bundle import open_bundle
from eyeline.bundle.exporting import weights
from eyeline.bundle.fill import load
from eyeline.checkpoint import store
from eyeline.core.errors import Refused, Stopped
from eyeline.kernels.nf4 import bytes_of_scales, dequantised, doubled, quantised
from eyeline.models.shape import shape
from eyeline.recipes.problems import settings_problems
from eyeline.train.memory import memory_of
from eyeline.train.run import Run
from eyeline.train.trainable import plan_of, rank_problems, rows_of
from tests.train.ends import end_of, stopped_at
from tests.train.recipe import tiny_run

WIDE = (
    "model.config.language.hidden_size=64",
    "model.config.language.intermediate_size=96",
    "stages.whole.steps=2",
    "stages.adapt.steps=3",
)
NF4 = "stages.adapt.trains.language={how: lora, lr: 0.02, rank: 2, alpha: 4, targets: [q_proj, o_proj], quantize: nf4}"
Q, DOWN = "language.blocks.0.attn.q", "language.blocks.0.mlp.down"


def qlora(folder: Path, *more: str) -> Run:
    return tiny_run(folder, *WIDE, NF4, *more)


def tensors(folder: Path, step: int) -> dict[str, torch.Tensor]:
    checkpoint = store.newest(folder / "checkpoints")
    assert checkpoint is not None
    assert checkpoint.step == step
    return checkpoint.load("model", "frozen")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qlora")
    loop.train(qlora(folder))
    return folder


def test_frozen_weights_are_those_of_the_stage_before_in_nf4(trained: Path) -> None:
    """Only layers with a multiple of 64 inputs have some: down has 96, and stays in float32."""
    loop.train(tiny_run(trained, *WIDE, f"out={trained / 'plain'}"))
    plain, packed = tensors(trained / "plain", 5), tensors(trained / "run", 5)
    for got, want in zip((packed[f"{Q}.weight"], packed[f"{Q}.largest"]), quantised(plain[f"{Q}.weight"]), strict=True):
        assert torch.equal(got, want)
    assert packed[f"{Q}.weight"].dtype == torch.uint8
    assert torch.equal(packed[f"{DOWN}.weight"], plain[f"{DOWN}.weight"])
    assert packed[f"{Q}.lora_B"].any()


def test_export_merges_into_the_weights_that_were_trained_on(trained: Path) -> None:
    packed, opened = tensors(trained / "run", 5), open_bundle(trained / "run")
    kept = load(opened, "cpu", keep_adapters=True).model
    plain = load(opened, "cpu").model
    want = dequantised(packed[f"{Q}.weight"], packed[f"{Q}.largest"]) + 2 * packed[f"{Q}.lora_B"] @ packed[f"{Q}.lora_A"]
    assert torch.equal(plain.get_parameter(f"{Q}.weight"), want)
    x_TD = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(kept.get_submodule(Q)(x_TD), plain.get_submodule(Q)(x_TD), atol=1e-5, rtol=1e-5)
    exported = dict(weights(kept, True, torch.float32))
    assert exported.keys() == dict(plain.named_parameters()).keys()
    for name, x in plain.named_parameters():
        assert torch.equal(exported[name], x), name
    assert dict(weights(kept, False, torch.float32))[f"{Q}.weight"].shape == (64, 64)


def test_stopped_run_resumes_to_the_same_bits(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cut = qlora(trained, f"out={trained / 'cut'}")
    with monkeypatch.context() as patch:
        stopped_at(patch, {4})
        with pytest.raises(Stopped):
            loop.train(cut)
    loop.train(cut)
    assert end_of(cut) == end_of(qlora(trained))


def test_scales_in_8_bits_resume_as_they_are_and_export(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantised again they would be others: a resumed run copies them."""
    more = (NF4.replace("quantize: nf4", "quantize: nf4_double"), f"out={trained / 'double'}")
    run = tiny_run(trained, *WIDE, *more)
    with monkeypatch.context() as patch:
        stopped_at(patch, {4})
        with pytest.raises(Stopped):
            loop.train(run)
    before = tensors(trained / "double", 4)
    loop.train(run)
    after, plain = tensors(trained / "double", 5), tensors(trained / "run", 5)
    assert before[f"{Q}.largest"].dtype == torch.uint8
    assert len(before[f"{Q}.largest"]) == bytes_of_scales(64)
    assert torch.equal(after[f"{Q}.largest"], before[f"{Q}.largest"])
    assert torch.equal(after[f"{Q}.weight"], plain[f"{Q}.weight"])
    assert torch.equal(after[f"{Q}.largest"], doubled(plain[f"{Q}.largest"]))
    again = load(open_bundle(trained / "double"), "cpu", keep_adapters=True).model
    assert all(torch.equal(x, after[name]) for name, x in again.named_parameters() if name.endswith("largest"))
    merged = load(open_bundle(trained / "double"), "cpu").model
    want = dequantised(after[f"{Q}.weight"], after[f"{Q}.largest"]) + 2 * after[f"{Q}.lora_B"] @ after[f"{Q}.lora_A"]
    assert torch.equal(merged.get_parameter(f"{Q}.weight"), want)
    assert run.model.config is not None
    double, single = (memory_of(plan_of(one, 1, run.model.config), run.stages[1].optimizer).weights for one in (run, qlora(trained)))
    assert double < single


def test_stage_after_it_starts_from_the_merged_weights(trained: Path) -> None:
    """In full, and in NF4 again with other adapters."""
    out = str(trained / "next")
    start = ("model={path: " + str(trained / "run") + "}", f"out={out}")
    run = tiny_run(
        trained,
        *start,
        "stages.whole.steps=1",
        "stages.whole.trains={language: {how: full, lr: 1.0e-30}}",
        "stages.whole.optimizer={kind: adamw}",
    )
    loop.train(run.model_copy(update={"stages": run.stages[:1]}))
    merged = load(open_bundle(trained / "run"), "cpu").model
    assert torch.equal(tensors(trained / "next", 1)[f"{Q}.weight"], merged.get_parameter(f"{Q}.weight"))


def test_memory_and_the_table_of_what_trains_count_4_bits(tmp_path: Path) -> None:
    run, plain = qlora(tmp_path), tiny_run(tmp_path, *WIDE, NF4.replace(", quantize: nf4", ""))
    assert run.model.config is not None
    plans = [plan_of(one, 1, run.model.config) for one in (run, plain)]
    layers = [
        x
        for name, x, entry in plans[1].tensors()
        if name.startswith("language.blocks") and x.ndim == 2 and x.shape[1] == 64 and "lora" not in name
    ]
    numbers = sum(x.numel() for x in layers)
    saved = memory_of(plans[1], run.stages[1].optimizer).weights - memory_of(plans[0], run.stages[1].optimizer).weights
    assert saved == 4 * numbers - numbers // 2 - 4 * numbers // 64
    tables = [{row.part: (row.parameters, row.trained) for row in rows_of(plan, run.stages[1])} for plan in plans]
    assert tables[0] == tables[1]
    assert "LoRA on weights in NF4, r 2" in next(row.how for row in rows_of(plans[0], run.stages[1]) if row.part == "language")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (NF4.replace("quantize", "dora: true, quantize"), "quantize stores them in 4 bits"),
        ("compile=blocks", r"compile: blocks with stages\.adapt\.trains\.language\.quantize is not there yet"),
    ],
)
def test_what_nf4_does_not_go_with_is_refused(tmp_path: Path, change: str, why: str) -> None:
    with pytest.raises(Refused, match=why):
        qlora(tmp_path, change)


def test_problems_of_nf4_are_named(tmp_path: Path) -> None:
    run = qlora(tmp_path)
    assert not [*settings_problems(run)]
    (why,) = rank_problems(run, 2)
    assert "stages.adapt.trains.language.quantize: weights in NF4 are on one device, and there are 2 ranks" in why
    alone = run.model_copy(update={"stages": run.stages[1:]})
    assert any("quantize: the language starts from random weights" in line for line in settings_problems(alone))
    narrow = tiny_run(tmp_path, *WIDE[2:], NF4)
    assert any("no linear layer of the language has a multiple of 64 inputs" in line for line in settings_problems(narrow))
    assert shape(run.model.config, trains={}).model  # type: ignore[arg-type]
