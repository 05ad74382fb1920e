"""`eyeline bench roofline`: FLOPs, bytes, launches and waits by hand, and FLOPs against `models/flops.py`."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from eyeline.core.batch import Budget
from eyeline.core.errors import Refused
from eyeline.core.yaml_text import read_yaml
from eyeline.kernels import float32
from eyeline.models import CONFIG
from eyeline.recipes.read import read_recipe
from eyeline.study.roofline import gpus
from eyeline.study.roofline.gpus import GPUS
from eyeline.study.roofline.price import fused, priced
from eyeline.study.roofline.record import Operator, Recorder
from eyeline.study.roofline.roofline import roofline
from eyeline.study.roofline.sizes import SIZES, config_of
from eyeline.study.roofline.step import Recording, record_step
from eyeline.train.run import Run
from tests.command import Command

H100 = GPUS["h100-80"]


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def recorded(*overrides: str, config: object, packs: int = 1) -> Recording:
    return record_step(read_recipe("qwen3-vl-lora", list(overrides)), 0, CONFIG.validate_python(config), Budget(1024, 1024), packs)


TINY = {
    "family": "qwen3_vl",
    "vision": {"hidden_size": 64, "layers": 2, "heads": 4, "intermediate_size": 128, "deepstack_layers": (0,)},
    "language": {"family": "qwen3", "vocab_size": 512, "hidden_size": 64, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16,
                 "intermediate_size": 96, "mrope_section": (3, 3, 2), "tie_embeddings": True},
}  # fmt: skip
EXPERTS = TINY | {"language": TINY["language"] | {"experts": {"num_experts": 8, "experts_per_token": 2, "intermediate_size": 32}}}
DELTA = {
    "family": "qwen3_5_vl",
    "vision": TINY["vision"] | {"deepstack_layers": ()},
    "language": {"family": "qwen3_5", "vocab_size": 512, "hidden_size": 64, "layers": 4, "heads": 4, "kv_heads": 2, "head_dim": 32,
                 "mrope_section": (2, 1, 1), "intermediate_size": 96, "tie_embeddings": True,
                 "delta": {"key_heads": 2, "value_heads": 4, "key_dim": 16, "value_dim": 16}},
}  # fmt: skip
FULL = "stages.tune.trains.language={how: full, lr: 1e-4}"


def test_layer_norm_costs_what_the_example_says() -> None:
    """docs/measuring.md: cast, norm, cast are 20 bytes per element in three launches, and one chain of 4."""
    x_TD, weight_D = empty(100, 64), empty(64, dtype=torch.float32)
    with Recorder() as recorder:
        out = F.layer_norm(x_TD.float(), weight_D.shape, weight_D, weight_D).to(x_TD.dtype)
        x_TD @ out.T  # which needs it
    *norm, _ = recorder.operators
    rows = 100 * 2 * 4  # mean and scale of each row, which the gradient needs
    assert [op.bytes for op in norm] == [6 * 6400, 8 * 6400 + 64 * 4 + rows, 6 * 6400]
    chain, _ = fused(recorder.operators, H100)
    assert (chain.launches, chain.bytes) == (1, 4 * 6400 + 64 * 4)


def test_a_chain_writes_only_what_is_used_after_it() -> None:
    """b is used up within the first chain; a, which the product reads, is written; the second chain reads a again."""
    x, y = empty(8, 8), empty(8, 8)
    with Recorder() as recorder:
        a = x + y
        b = a * 2
        c = b.exp()
        d = c @ a
        d + a
    first, product, second = fused(recorder.operators, H100)
    assert (first.bytes, product.bytes, second.bytes) == (4 * 128, 3 * 128, 2 * 128)  # what comes last is used by nothing
    assert [line.launches for line in (first, product, second)] == [1, 1, 1]
    assert [line.bytes for line in priced(recorder.operators, H100)] == [384, 256, 256, 384, 384]


def test_bytes_by_hand() -> None:
    table, index, row = empty(1000, 64), empty(10, dtype=torch.int64), empty(1, 64)
    with Recorder() as recorder:
        table.index_select(0, index)  # ten rows are read and written
        empty(10, 64) + row.expand(10, 64)  # an expanded row is read once
        table.add_(1)
        table.zero_()
        table.T.flatten(0)  # a copy, since the view is not contiguous
        table.unflatten(1, (8, 8)).transpose(0, 1)[1:]  # views
    rows = 10 * 64 * 2
    assert [op.bytes for op in recorder.operators] == [2 * rows + 80, 2 * rows + 128, 256_000, 128_000, 256_000]


def test_products_are_counted_and_priced_by_hand() -> None:
    a, b = empty(8192, 4096), empty(4096, 2048)
    with Recorder() as recorder:
        a @ b
        empty(64, 64, dtype=torch.float32) @ empty(64, 64, dtype=torch.float32)
    large, small = priced(recorder.operators, H100)
    assert large.flops == 2 * 8192 * 4096 * 2048
    assert large.seconds == pytest.approx(large.flops / (9.89e14 * 0.70))
    assert small.seconds == gpus.KERNEL_S  # nothing is faster than a launch


def test_waits_of_the_host_are_counted() -> None:
    with Recorder() as recorder:
        x = torch.tensor([0, 3, 7], dtype=torch.int32).to("meta")
        assert x.tolist() == [0, 3, 7]  # what came from the host is known
        empty().item()
    assert len(recorder.host_reads) == 2


@pytest.mark.parametrize("config", [TINY, EXPERTS, DELTA], ids=["dense", "experts", "delta"])
@pytest.mark.parametrize("ways", [(), (FULL,), (FULL, "stages.tune.gradient_checkpointing=false")], ids=["lora", "full", "kept"])
def test_flops_are_those_of_models_flops(config: dict[str, object], ways: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """To the last one, recomputed blocks included. Flash attention has five products backward where four are needed; the delta rule is
    counted token by token there, and in chunks here; the weighted sum of experts, which is batched products, is not counted there."""
    monkeypatch.setattr(float32, "GIVES_FLOAT32", False)  # else a router is two or three products, of what its weight is split into
    recording = recorded(*ways, config=config)

    def named(name: str) -> list[Operator]:
        return [op for op in recording.operators if op.name.endswith(name)]

    products = sum(op.cost.flops for op in recording.operators if op.kind == "matrix products" and op.name != "aten::bmm")
    forward, backward = (sum(op.cost.flops for op in named(name)) for name in ("_varlen_attn", "_varlen_attn_backward"))
    token = 2 * 4 * 16 * 16  # the delta rule's unit, of 4 heads of 16 × 16
    delta = 1024 * token * (3 * len(named("::gated_delta_rule")) + 6 * len(named("::gated_delta_rule_backward")))
    assert backward % 5 == 0
    assert products + forward + backward * 4 // 5 + delta == recording.needed.total + recording.needed.again


@pytest.mark.parametrize("config", [TINY, EXPERTS, DELTA], ids=["dense", "experts", "delta"])
def test_a_step_waits_once_and_repeats_by_packs(config: dict[str, object]) -> None:
    one, three = recorded(config=config), recorded(config=config, packs=3)
    assert one.host_reads == three.host_reads == ["copy to the host"]
    assert three.needed.total == 3 * one.needed.total
    count = len([op for op in one.operators if op.kind == "attention"])
    assert len([op for op in three.operators if op.kind == "attention"]) == 3 * count


@pytest.mark.parametrize("size", SIZES)
def test_published_sizes_have_the_parameters_of_their_names(size: str) -> None:
    from eyeline.models.shape import shape

    named = {"so400m-qwen2.5-0.5b": 0.91, "qwen3-vl-2b": 2.13, "qwen3-vl-8b": 8.77, "qwen3-vl-30b-a3b": 31.07, "qwen3.5-2b": 2.21,
             "qwen3.5-35b-a3b": 35.11}  # fmt: skip
    total = sum(x.numel() for _, x, _ in shape(config_of(size)).tensors())
    assert total / 1e9 == pytest.approx(named[size], abs=0.01)


def test_roofline_prints_and_writes_a_model(eyeline: Command, tmp_path: Path) -> None:
    tiny = tmp_path / "tiny.yaml"
    recipe = read_yaml(Path("src/eyeline/recipes/qwen3-vl-lora.yaml").read_text(), "the recipe")
    recipe["model"] = {"config": TINY, "template": "plain"}
    tiny.write_text(json.dumps(recipe))
    done = eyeline("bench", "roofline", str(tiny), "--gpu", "l40s", "--tokens", "2048", "--out", str(tmp_path / "out.json"))
    assert done.code == 0, done.err
    assert "both modelled" in done.out
    assert "not a measurement" in done.out
    out = json.loads((tmp_path / "out.json").read_text())
    assert out["modelled"] is True
    assert out["micro_batch"]["slots"] == 2048
    assert out["fused"]["launches"] < out["eager"]["launches"]


@pytest.mark.parametrize(
    ("settings", "change", "message"),
    [
        ({"gpu_name": "h100-8"}, (), "Did you mean 'h100-80'"),
        ({"size": "qwen3-vl-2"}, (), "Did you mean 'qwen3-vl-2b'"),
        ({"stage": "tun"}, (), "Did you mean 'tune'"),
        ({}, ("precision=fp32",), "Set precision=bf16"),
        ({}, ("cuda_graph=true",), "Set cuda_graph=false"),
        ({}, ("stages.0.optimizer={kind: adamw_8bit}",), r"Set stages\.tune\.optimizer={kind: adamw}"),
        ({}, ("stages.0.optimizer={kind: adamw, in_backward: true}",), "prices for torch's fused AdamW and Muon"),
        ({"size": None}, (), "does not exist"),
    ],
)
def test_roofline_refuses_what_it_does_not_know(settings: dict[str, str], change: tuple[str, ...], message: str) -> None:
    run: Run = read_recipe("qwen3-vl-lora", list(change))
    given = {"gpu_name": "h100-80", "stage": None, "size": "qwen3-vl-2b", "tokens": None, "patches": None, "packs": None, "out": None}
    with pytest.raises(Refused, match=message):
        roofline(run, **(given | settings))  # pyright: ignore[reportArgumentType]
