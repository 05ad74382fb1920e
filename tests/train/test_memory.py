"""Memory that is counted without a device: by hand, in the order that recomputation says, and blocks that are chosen for a budget."""

import re
from pathlib import Path

import pytest
import torch

from eyeline.core.batch import Budget
from eyeline.core.errors import Refused
from eyeline.core.plan import Plan
from eyeline.models.layers import EVERY_BLOCK, NEVER, Recompute
from eyeline.models.shape import shape
from eyeline.recipes.read import read_recipe
from eyeline.study.roofline.sizes import config_of
from eyeline.train.memory import Allocated, activations_of, fewest_recomputed, memory_of
from eyeline.train.optim import AdamW
from eyeline.train.trainable import needed_memory, plan_of
from tests.documented import ROOT
from tests.models.cases import ALL
from tests.train.recipe import tiny_run

BUDGET = Budget(2048, 4096)
CASE = next(case for case in ALL if (case.config.family, case.id) == ("qwen3_vl", "tied"))


def planned() -> Plan:
    return shape(CASE.config, compute_dtype=torch.bfloat16)


def test_bytes_at_once_by_hand() -> None:
    """4,000 bytes each: two inputs that were there, a view of one, a sum, its square, and at most two results at once."""
    a, b = (torch.empty(1000, device="meta") for _ in range(2))
    with Allocated() as allocated:
        c = a.view(10, 100) + b.view(10, 100)
        d = c * c
        del c
        e = d.t().exp()
        del d
        assert (allocated.now, allocated.most) == (4000, 8000)
        del e
    assert (allocated.now, allocated.most) == (0, 8000)


def test_numbers_that_came_from_the_host_are_known() -> None:
    with Allocated():
        x = torch.tensor([0, 3, 7]).to("meta")
        assert x.tolist() == [0, 3, 7]


def test_recomputing_more_needs_less_and_twice_the_tokens_twice_as_much() -> None:
    plan, bytes_of = planned(), {}
    ways = {"none": NEVER, "selective": Recompute(None, True), "first": Recompute(frozenset({0})), "all": EVERY_BLOCK}
    ways["offloaded"] = Recompute(None, offload=True)
    for name, how in ways.items():
        plan.model.recompute(dict.fromkeys(plan.blocks, how))
        bytes_of[name] = activations_of(plan, BUDGET)
    inputs = len(plan.blocks["language"]) * BUDGET.tokens * CASE.config.language.hidden_size * 2
    assert bytes_of["all"] - bytes_of["offloaded"] > inputs / 2, "inputs of blocks are not on the device"
    assert bytes_of["all"] < bytes_of["selective"] < bytes_of["none"]
    assert bytes_of["all"] < bytes_of["first"] < bytes_of["none"]
    plan.model.recompute({})
    assert activations_of(plan, Budget(4096, 8192)) == pytest.approx(2 * bytes_of["none"], rel=0.15)


def test_projector_that_trains_alone_is_counted_where_no_photo_fits() -> None:
    plan = shape(CASE.config, trains={"projector": "full"}, compute_dtype=torch.bfloat16)
    assert activations_of(plan, Budget(64, 0)) > 0


def test_as_few_blocks_as_fit_are_recomputed() -> None:
    plan = planned()
    plan.model.recompute({})
    none = activations_of(plan, BUDGET)
    assert fewest_recomputed(plan, BUDGET, {"language": EVERY_BLOCK}, none) == {"language": NEVER}
    chosen = fewest_recomputed(plan, BUDGET, {"language": EVERY_BLOCK}, none - 1)["language"]
    assert chosen.blocks == {0}
    plan.model.recompute({"language": chosen})
    assert activations_of(plan, BUDGET) < none
    with pytest.raises(Refused, match="with all blocks recomputed they need about"):
        fewest_recomputed(plan, BUDGET, {"language": EVERY_BLOCK}, none // 20)


def test_a_recipe_gives_the_memory_of_a_device(tmp_path: Path) -> None:
    """What weights, gradients and optimizer states leave of it is for activations."""
    setting = "stages.whole.gradient_checkpointing={{parts: [language], memory_gb: {}}}"
    run = tiny_run(tmp_path, setting.format(1))
    config = run.model.config
    assert config is not None
    plan = plan_of(run, 0, config)
    assert plan.model.language.recompute == NEVER
    none = activations_of(plan, run.stages[0].batch.budget)
    device = memory_of(plan, run.stages[0].optimizer).total + none
    plan = plan_of(tiny_run(tmp_path, setting.format((device - 1) / 1e9)), 0, config)
    assert plan.model.language.recompute.blocks == {0}
    assert memory_of(plan, AdamW()).activations == 0


ROWS = re.findall(r"^\| (Qwen\S+) (\S+), (LoRA|QLoRA|in full) \| ([\d.]+) GB \|(.*)\|$", (ROOT / "README.md").read_text(), re.MULTILINE)
CARDS = (24, 48, 80, 141)  # GB


@pytest.mark.parametrize(
    ("family", "size", "how", "memory", "fits"),
    [pytest.param(*row, id=" ".join(row[:3]), marks=[] if row[1:3] == ("2B", "LoRA") else [pytest.mark.slow]) for row in ROWS],
)
def test_what_fits_is_as_the_readme_says(family: str, size: str, how: str, memory: str, fits: str) -> None:
    overrides = ["stages.tune.gradient_checkpointing=true"] + ["stages.tune.trains.language.quantize=nf4"] * (how == "QLoRA")
    run = read_recipe(f"{family.lower()}-{'full' if how == 'in full' else 'lora'}", overrides)
    needed = needed_memory(run, 0, config_of(f"{family}-{size}".lower()), None).total / 1e9
    assert memory == (f"{needed:.1f}" if needed < 100 else f"{needed:.0f}")
    assert [one.strip() for one in fits.split("|")] == ["yes" if needed <= 0.9 * card else "no" for card in CARDS]


def test_the_readme_has_a_table_of_what_fits() -> None:
    assert len(ROWS) == 9
