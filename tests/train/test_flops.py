"""The arithmetic that metrics.jsonl states, against formulas by hand over the counts of the same line."""

import json
from pathlib import Path

import pytest

import eyeline.train.loop as loop
import eyeline.train.stage as stage
from eyeline.core.cost import Cost
from eyeline.models.flops import peak_of
from tests.train.recipe import tiny_run

PATCHES, D, F, C = 16, 16, 24, 48  # of an image; width, feed-forward and numbers of a patch of the tower; the language model's are alike


def test_each_step_states_its_arithmetic(tmp_path: Path) -> None:
    """One block of the tower: four square layers, two of the MLP, and attention over the pairs of each image."""
    run = tiny_run(tmp_path, "stages.whole.gradient_checkpointing=[vision]", "stages.adapt.steps=2", "stages.whole.steps=2")
    loop.train(run)
    lines = [line for line in map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) if line["kind"] == "step"]
    assert len(lines) == 4
    for line in lines:
        patches, pairs = line["patches"], line["images"] * PATCHES**2
        assert patches == line["images"] * PATCHES
        embed, block = 2 * C * D * patches, 2 * patches * (4 * D * D + 2 * D * F) + 4 * D * pairs
        hidden = 2 * (patches // 4) * (4 * D * D)  # the first layer of the projector, of 2 by 2 patches
        if line["stage"] == "whole":  # nothing is upstream of the patch embedding
            assert line["flops"]["vision"] == 2 * embed + 3 * block
            assert line["flops"]["projector"] == 3 * (hidden + 2 * (patches // 4) * D * D)
            assert line["flops_recomputed"] == block - 2 * patches * D * F, "a block's last layer is not done again"
        else:  # a frozen tower: forward only, and nothing is upstream of the projector
            assert line["flops"]["vision"] == embed + block
            assert line["flops"]["projector"] == 2 * hidden + 3 * 2 * (patches // 4) * D * D
            assert line["flops_recomputed"] == 0
        assert line["flops"]["head"] == 2 * 300 * D * line["supervised"] * (3 if line["stage"] == "whole" else 2)
        assert line["flops_per_s"] == pytest.approx(sum(line["flops"].values()) / line["step_s"])
        assert line["mfu"] <= line["hfu"]


def test_packs_are_dealt_by_what_the_stage_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A frozen tower is not gone through backwards, and adapters are cheaper than weights. One process deals nothing, so it is asked."""
    told: list[Cost] = []
    steps = stage.training_steps
    monkeypatch.setattr(stage, "training_steps", lambda reader, *rest: told.append(reader.cost) or steps(reader, *rest))
    loop.train(tiny_run(tmp_path, "stages.whole.steps=1", "stages.adapt.steps=1"))
    whole, adapt = told
    embed, block, projector = 2 * C * D, 2 * (4 * D * D + 2 * D * F), (2 * 4 * D * D + 2 * D * D) // 4
    assert whole.patch == 2 * embed + 3 * block + 3 * projector
    assert (whole.patch_pair, adapt.patch_pair) == (3 * 4 * D, 4 * D)
    assert embed + block < adapt.patch < whole.patch
    assert adapt.token < whole.token
    assert (whole.label, adapt.label) == (3 * 2 * 300 * D, 2 * 2 * 300 * D)


def test_peaks_go_by_the_drivers_names() -> None:
    assert peak_of("NVIDIA H200") == peak_of("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_of("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak_of("NVIDIA GB200") == 2500e12
    assert peak_of("AMD EPYC 7763 64-Core Processor × 2") is None


@pytest.mark.parametrize(
    ("name", "peak"),  # names as drivers give them
    [
        ("NVIDIA B300 SXM6 AC", 2250e12),
        ("NVIDIA GB300", 2500e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H20", 148e12),
        ("NVIDIA A100 80GB PCIe", 312e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA A10G", 70e12),
        ("NVIDIA A40", 149.7e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40", 181e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 5090", 209.5e12),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA RTX A6000", 154.8e12),
        ("NVIDIA RTX 6000 Ada Generation", 364e12),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 504e12),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 439e12),
        ("AMD Instinct MI300X", 1307e12),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("Tesla T4", None),
        ("Tesla V100-SXM2-16GB", None),
    ],
)
def test_peak_of_each_product_is_its_own(name: str, peak: float | None) -> None:
    assert peak_of(name) == peak


def test_peaks_in_fp16_are_those_of_bf16_and_of_older_gpus() -> None:
    names = ("NVIDIA H200", "Tesla T4", "Tesla V100-SXM2-16GB", "Tesla V100-PCIE-32GB", "Tesla V100S-PCIE-32GB", "NVIDIA TITAN V")
    assert [peak_of(name, "fp16") for name in names] == [989e12, 65e12, 125e12, 112e12, 130e12, None]
    assert [peak_of(name, "fp32") for name in names] == [None] * 6


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_utilisation_is_of_the_peak_that_the_start_names(tmp_path: Path, precision: str) -> None:
    """Measured in the run's precision; and in bfloat16, logged steps say which weights they left as they were."""
    loop.train(tiny_run(tmp_path, f"precision={precision}", "stages.whole.steps=2", "stages.adapt.steps=1", "logging_steps=2"))
    start, *lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert f"1 thread, {precision} products of " in start["peak"]["name"] and start["peak"]["name"].endswith(", measured")
    steps = [line for line in lines if line["kind"] == "step"]
    assert [line["mfu"] for line in steps] == [line["flops_per_s"] / start["peak"]["flops_per_s"] for line in steps]
    shares = [line["bf16_unchanged"] for line in steps]
    assert [share is not None for share in shares] == [False, precision == "bf16", False]
    assert all(share is None or 0 < share < 1 for share in shares)
