"""Adapters of peft's that a run starts from: equal to peft on the same base, trained on where a stage has the same, refused by name."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen2ForCausalLM

from eyeline.bundle.bundle import open_bundle
from eyeline.bundle.fill import fill
from eyeline.bundle.peft_adapter import PeftAdapter, adapter_lines, continued_parts, open_adapter
from eyeline.core.errors import Refused
from eyeline.core.plan import Plan, materialise
from eyeline.models.lora import LoRA, adapters
from eyeline.models.shape import shape
from tests.bundle.tiny import save_language

IDS = torch.arange(40)[None] % 30
TARGETS = ["q_proj", "v_proj", "down_proj"]
VARIANTS: dict[str, dict[str, Any]] = {
    "lora": {"rank_pattern": {"v_proj": 2}, "alpha_pattern": {"layers.1.self_attn.q_proj": 9}},
    "rslora": {"use_rslora": True, "layers_to_transform": [1]},
    "dora": {"use_dora": True, "use_rslora": True},
    "saved": {"modules_to_save": ["lm_head", "embed_tokens"]},
    "rows": {"trainable_token_indices": {"embed_tokens": [3, 17]}},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_language(tmp_path_factory.mktemp("base") / "model", tied=False)


def trained(base: Path, out: Path, **settings: Any) -> Tensor:
    """An adapter as peft saves it; the logits that it gives."""
    config = peft.LoraConfig(**({"r": 3, "lora_alpha": 5, "target_modules": TARGETS} | settings))
    theirs = peft.get_peft_model(Qwen2ForCausalLM.from_pretrained(base, attn_implementation="eager"), config).eval()
    rng = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in theirs.parameters():
            if p.requires_grad:
                p.add_(torch.randn(p.shape, generator=rng) * 0.2)
    theirs.save_pretrained(out)
    with torch.no_grad():
        return theirs(input_ids=IDS).logits[0]


def opened(base: Path, folder: Path) -> PeftAdapter:
    found = open_bundle(base)
    assert found.form is not None
    return open_adapter(folder, found.bundle.config, found.form)


def filled(base: Path, adapter: PeftAdapter | None, lora: LoRA | None = None) -> Plan:
    found = open_bundle(base)
    plan = shape(found.bundle.config, adapters={} if lora is None else {"language": lora})
    materialise(plan, "cpu")
    fill(plan, found.bundle.config, {"language": replace(found.weights, adapter=adapter)})
    plan.model.eval()
    return plan


@torch.no_grad()
def logits(plan: Plan) -> Tensor:
    from eyeline.core.batch import Document
    from eyeline.data.fetch.batches import batch_of

    tokens_T = IDS[0].int().numpy()
    document = Document("d", tokens_T, tokens_T * 0, tokens_T[:0], ())
    return plan.model(replace(batch_of([document], None), labels_L=None)).out


def close(got: Tensor, want: Tensor) -> None:
    error = float((got - want).abs().max() / want.abs().max())
    assert error < 2e-5, f"off by {error:.1e} of the largest logit"


@pytest.mark.parametrize("variant", VARIANTS)
def test_model_with_an_adapter_computes_what_peft_computes(base: Path, tmp_path: Path, variant: str) -> None:
    want = trained(base, tmp_path / "adapter", **VARIANTS[variant])
    assert (want - logits(filled(base, None))).abs().max() > 0.1, "the adapter does nothing: this test shows nothing"
    close(logits(filled(base, opened(base, tmp_path / "adapter"))), want)


@pytest.mark.parametrize("variant", [{}, {"use_dora": True, "use_rslora": True}], ids=["lora", "dora"])
def test_stage_with_the_same_adapters_trains_them_on(base: Path, tmp_path: Path, variant: dict[str, bool]) -> None:
    """The weights stay those of the base; with another rank, alpha or target the adapter is merged and a fresh one starts."""
    want = trained(base, tmp_path / "adapter", **variant)
    adapter = opened(base, tmp_path / "adapter")
    ours = {name.removeprefix("use_"): value for name, value in variant.items()}
    same = LoRA(rank=3, alpha=5, targets=tuple(TARGETS), dropout=0.1, **ours)
    plan = filled(base, adapter, same)
    assert continued_parts(adapter, plan) == {"language"}
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    layer = plan.model.get_submodule("language.blocks.1.attn.q")
    assert torch.equal(layer.lora_A, stored["base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"])
    assert torch.equal(layer.weight, load_file(base / "model.safetensors")["model.layers.1.self_attn.q_proj.weight"])
    close(logits(plan), want)
    assert "stage tune trains them on" in adapter_lines(adapter, plan, "tune")[0]
    for change in ({"rank": 2}, {"alpha": 4}, {"targets": ("q_proj",)}, {"freeze_layers": 1}):
        other = filled(base, adapter, same.model_copy(update=change))
        assert continued_parts(adapter, other) == set(), change
        assert not any(layer.lora_B.any() for layer in adapters(other.model).values())
        close(logits(other), want)
    assert "merged into the weights, since stage tune does not adapt the same layers" in adapter_lines(adapter, other, "tune")[0]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"peft_type": "LOHA"}, "is an adapter of type LOHA, and Eyeline has LoRA, rsLoRA and DoRA. Otherwise merge it with peft"),
        ({"bias": "all"}, "bias='all'"),
        ({"init_lora_weights": "pissa_niter_4"}, "changes the weights of the base"),
        ({"use_qalora": True}, "has use_qalora, which Eyeline does not compute"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
    ],
)
def test_kinds_that_are_not_computed_are_refused(base: Path, tmp_path: Path, change: dict[str, Any], why: str) -> None:
    trained(base, tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(Refused, match=why):
        opened(base, tmp_path)


def test_adapters_that_do_not_fit_are_refused(base: Path, tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"has no adapter_config\.json: it is not an adapter of peft's"):
        opened(base, base)
    trained(base, tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    stored = load_file(file)
    save_file({name.replace("layers.1", "layers.7"): x for name, x in stored.items()}, file)
    with pytest.raises(Refused, match=r"adapts model\.layers\.7\.mlp\.down_proj, .* and 1 more|adapts model\.layers\.7"):
        opened(base, tmp_path)
    save_file({name: x[:, :-1].clone() if "lora_A" in name else x for name, x in stored.items()}, file)
    with pytest.raises(Refused, match=r"has an adapter of .* from .* to .* numbers, and the layer is"):
        opened(base, tmp_path)
    save_file(stored, file)
    opened(base, tmp_path)
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings | {"r": settings["r"] + 1}))
    with pytest.raises(Refused, match=rf"with rank {settings['r'] + 1} by its adapter_config.json, and its tensors have {settings['r']}"):
        opened(base, tmp_path)
    trained(base, tmp_path / "embedding", target_modules=["embed_tokens", "q_proj"])
    with pytest.raises(Refused, match="LoRA of an embedding, which Eyeline does not compute"):
        opened(base, tmp_path / "embedding")
