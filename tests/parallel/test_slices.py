"""`update` on ranks that have slices of the model, against the same update in one process."""

from dataclasses import replace

import pytest
import torch

from eyeline.models.moe import Aux, Bias
from eyeline.parallel.mesh import MeshSizes
from tests.models.parity import Case
from tests.parallel.updates import BY_NAME, FAMILIES, Setup, compare

pytestmark = pytest.mark.ranks

BALANCE = {"qwen3_vl-moe": Aux(coef=0.5), "qwen3_5_vl-moe": Bias(rate=0.02), "some layers of experts": Aux(coef=0.5)}
TEXTS = {
    "qwen2": BY_NAME["text", "qwen2 tied"],
    "llama": BY_NAME["text", "llama"],
    "some layers of experts": BY_NAME["text", "qwen3, some layers of experts"],
}
CASES = FAMILIES | TEXTS
PP = MeshSizes(pp=2)
SELDOM = ("llama", "qwen2", "qwen3_vl", "qwen3_5_vl")  # what others of the table show in part


def deep(case: Case, layers: int) -> Case:
    """The same with more blocks of the language model."""
    language = case.config.language.model_copy(update={"layers": layers})
    return replace(case, config=case.config.model_copy(update={"language": language}))


@pytest.mark.parametrize("family", [pytest.param(name, marks=pytest.mark.slow if name in SELDOM else ()) for name in CASES])
def test_two_slices_update_as_one_process(family: str) -> None:
    compare(CASES[family], Setup(sizes=PP, momentum=0.9, balance=BALANCE.get(family)), 2)


HOW = {
    "adapters": ("qwen3_vl", Setup({"language": "adapters", "vision": "adapters"}, sizes=PP), 2),
    "projector alone": ("llava", Setup({"projector": "full"}, sizes=PP, momentum=0.9), 2),
    "gradient checkpointing": ("qwen3_5_vl-moe", Setup(checkpointing=True, sizes=PP), 2),
    "fsdp": ("qwen3_vl", Setup(sizes=MeshSizes(pp=2, dp_shard=2), momentum=0.9), 4),
    "fsdp, never resharded": ("llava", Setup(sizes=MeshSizes(pp=2, dp_shard=2, reshard_after_forward="never")), 4),
    "replicate": ("qwen3_vl", Setup(sizes=MeshSizes(pp=2, dp_replicate=2)), 4),
    "tp": ("qwen3_vl", Setup(sizes=MeshSizes(pp=2, tp=2)), 4),
    "cp": ("qwen3_5_vl", Setup(sizes=MeshSizes(pp=2, cp=2)), 4),
    "fsdp x ep": ("qwen3_vl-moe", Setup(sizes=MeshSizes(pp=2, dp_shard=2, ep=2), balance=Aux(coef=0.5)), 4),
    "tp x fsdp": ("qwen3_vl", Setup(sizes=MeshSizes(pp=2, dp_shard=2, tp=2)), 8),
    "bf16": ("llava", Setup(sizes=PP, precision=torch.bfloat16, steps=1), 2),
}
OFTEN = ("adapters", "projector alone", "fsdp x ep")


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in OFTEN else pytest.mark.slow) for name in HOW])
def test_slices_together_with_others_update_as_one_process(name: str) -> None:
    family, setup, ranks = HOW[name]
    compare(CASES[family], setup, ranks)


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_vl-moe"])
def test_interleaved_slices_update_as_one_process(family: str) -> None:
    """Two slices on each of two ranks, the second of tied weights on the other."""
    setup = Setup(sizes=MeshSizes(pp=2, pp_slices_per_rank=2), momentum=0.9, balance=BALANCE.get(family))
    compare(deep(FAMILIES[family], 5), setup, 2)
