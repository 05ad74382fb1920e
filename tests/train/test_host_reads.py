"""The host waits for the GPU once per step in bf16, for its verdict, and in no layer: the step of every family on tensors without memory,
with the branches that a GPU takes. A read that is planted is seen."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from eyeline.core.batch import Budget
from eyeline.data.fetch.full_batch import full_batch
from eyeline.models import CONFIG, decoder
from eyeline.models.shape import shape
from eyeline.parallel.ranks import ONE_DEVICE
from eyeline.recipes.read import read_recipe
from eyeline.study.roofline.record import Recorder
from eyeline.study.roofline.step import record_step
from eyeline.train.step import validate

VERDICT = ["copy to the host"]
TOWER = {"hidden_size": 64, "layers": 2, "heads": 4, "intermediate_size": 128}
SQUARE = {"image_size": 64, "patch": 8, **TOWER}
SIZES = {"vocab_size": 512, "hidden_size": 64, "layers": 2, "heads": 4, "kv_heads": 2, "tie_embeddings": True}
QWEN2 = {"family": "qwen2", **SIZES, "intermediate_size": 96}
QWEN3 = {"family": "qwen3", **SIZES, "head_dim": 16, "intermediate_size": 96}
EXPERTS = {"num_experts": 8, "experts_per_token": 2, "intermediate_size": 32}
DELTA = {"key_heads": 2, "value_heads": 4, "key_dim": 16, "value_dim": 16}
HYBRID = {"family": "qwen3_5", **SIZES, "layers": 4, "head_dim": 32, "mrope_section": (2, 1, 1), "delta": DELTA}
FAMILIES = {
    "llava": {"vision": SQUARE, "language": QWEN2},
    "llava tiles": {"vision": SQUARE | {"tiles": 5}, "projector": {"shuffle": 2}, "language": QWEN2},
    "llava naflex": {"vision": SQUARE | {"patches": 64}, "language": QWEN3},
    "qwen3_vl": {"family": "qwen3_vl", "vision": TOWER | {"deepstack_layers": (0,)}, "language": QWEN3 | {"mrope_section": (3, 3, 2)}},
    "qwen3_vl experts": {
        "family": "qwen3_vl",
        "vision": TOWER | {"deepstack_layers": (0,)},
        "language": QWEN3 | {"mrope_section": (3, 3, 2), "experts": EXPERTS},
    },
    "qwen3_5_vl": {"family": "qwen3_5_vl", "vision": TOWER, "language": HYBRID | {"intermediate_size": 96}},
    "qwen3_5_vl experts": {
        "family": "qwen3_5_vl",
        "vision": TOWER,
        "language": HYBRID | {"experts": EXPERTS, "shared_expert_size": 32},
    },
}
WAYS = {
    "lora": ("stages.tune.trains.language.dropout=0.1",),
    "full": (
        "stages.tune.trains={vision: {how: full, lr: 1e-4}, projector: {how: full, lr: 1e-4}, language: {how: full, lr: 1e-4}}",
        "stages.tune.gradient_checkpointing=false",
    ),
}


def reads(family: str, *overrides: str, packs: int = 1) -> list[str]:
    """Where the host waits for the device in a step."""
    run = read_recipe("qwen3-vl-lora", list(overrides))
    return record_step(run, 0, CONFIG.validate_python(FAMILIES[family]), Budget(1024, 2048), packs).host_reads


ALL_OF_BOTH = ("llava", "qwen3_5_vl experts")  # in full, the other families are slow tests: each is here with LoRA


@pytest.mark.parametrize(
    ("family", "way"),
    [
        pytest.param(family, way, marks=() if way == "lora" or family in ALL_OF_BOTH else pytest.mark.slow)
        for family in FAMILIES
        for way in WAYS
    ],
)
def test_a_step_reads_once_and_no_layer_does(family: str, way: str) -> None:
    assert reads(family, *WAYS[way], packs=2) == VERDICT


@pytest.mark.parametrize("balance", ["{balance: aux}", "{balance: bias}"])
def test_balancing_experts_reads_nothing_more(balance: str) -> None:
    assert reads("qwen3_vl experts", *WAYS["full"], f"stages.tune.experts={balance}") == VERDICT


def test_muon_reads_nothing() -> None:
    assert reads("qwen3_vl", *WAYS["full"], "stages.tune.optimizer={kind: muon}") == VERDICT


def test_validation_reads_once_however_many_batches() -> None:
    plan = shape(CONFIG.validate_python(FAMILIES["llava"]), trains={}, compute_dtype=torch.bfloat16)
    batch = full_batch(plan.spec.image, plan.spec.vocab_size, Budget(1024, 2048))
    with Recorder() as recorder:
        validate(plan.model, [batch] * 3, ONE_DEVICE)
    assert recorder.host_reads == VERDICT


PLANTED: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x.sum().item(),
    "float": lambda x: float(x.max()),
    "if": lambda x: bool((x > 0).any()),
    "tolist": lambda x: x[0].tolist(),
    "cpu": lambda x: x.cpu(),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "unique": lambda x: x.unique(),
    "equal": lambda x: torch.equal(x, x),
    "repeat_interleave": lambda x: x.repeat_interleave((x[:, 0] > 0).long(), 0),
}


@pytest.mark.parametrize("how", PLANTED)
def test_a_planted_read_is_seen(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = decoder.Block.forward
    monkeypatch.setattr(decoder.Block, "forward", lambda self, x, *rest: (PLANTED[how](x), forward(self, x, *rest))[1])
    try:
        found = reads("llava", *WAYS["full"])
    except (NotImplementedError, RuntimeError):  # what depends on numbers cannot even be asked of tensors without memory
        return
    assert len(found) > len(VERDICT)
