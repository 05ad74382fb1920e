"""Every family's way out and back, by the cases of `tests/models/cases`: what we write, transformers loads with its own class and computes
the same from; what we take in again is the same file for file; adapters go through peft; answers are those of transformers' `generate`."""

import filecmp
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from eyeline.bundle.bundle import open_bundle
from eyeline.bundle.exporting import export
from eyeline.bundle.fill import fill, load
from eyeline.bundle.importing import import_whole
from eyeline.bundle.peft_adapter import open_adapter
from eyeline.core.plan import materialise
from eyeline.generate.generate import generate
from eyeline.generate.sampling import Sampling
from eyeline.models import Model, spec
from eyeline.models.shape import shape
from tests.bundle.exported import PARTED, WHOLE, Exported, adapted, bundle_of, close, our_logits
from tests.models.cases import is_typical
from tests.models.parity import Case

each_typical_whole = pytest.mark.parametrize(
    "case", [pytest.param(c, id=f"{c.config.family}: {c.id}", marks=[] if is_typical(c) else pytest.mark.slow) for c in WHOLE]
)
each_whole = pytest.mark.parametrize("case", WHOLE, ids=lambda case: f"{case.config.family}: {case.id}")
each_parted = pytest.mark.parametrize("case", PARTED, ids=lambda case: f"{case.config.family}: {case.id}")


def loaded(folder: Path) -> PreTrainedModel:
    """The class that config.json names loads it, and nothing may be missing or left over."""
    cls = getattr(transformers, json.loads((folder / "config.json").read_text())["architectures"][0])
    model, report = cls.from_pretrained(folder, attn_implementation="eager", output_loading_info=True, local_files_only=True)
    assert not any(report[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    return model.eval()


@torch.no_grad()
def their_logits(model: Any, case: Case) -> Tensor:
    rows = [model(**case.inputs(d)).logits[0][torch.from_numpy(d.labels_T) >= 0] for d in case.documents]
    return torch.cat(rows)


def same_files(one: Path, two: Path) -> None:
    names = sorted(p.name for p in one.iterdir())
    assert names == sorted(p.name for p in two.iterdir())
    different = [name for name in names if not filecmp.cmp(one / name, two / name, shallow=False)]
    assert different in ([], ["config.json"]), different
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (one, two))
    assert (before.pop("dtype"), before.pop("torch_dtype")) == ("float32", "float32")
    assert before == after  # an import keeps tensors as they are, of whatever dtype


@each_whole
def test_out_and_back(case: Case, exported: Callable[[Case], Exported], tmp_path: Path) -> None:
    out, model = exported(case).folder, exported(case).model
    close(their_logits(loaded(out), case), our_logits(model, case.documents))

    taken = import_whole(out, tmp_path / "in", max_shard_bytes=20_000)
    same_files(out, tmp_path / "in")
    opened = open_bundle(tmp_path / "in")
    assert (opened.bundle.config, opened.bundle.template) == (taken.config, "qwen2.5")
    again = load(opened, "cpu").model
    assert all(torch.equal(x, dict(again.named_parameters())[name]) for name, x in model.named_parameters())
    assert not any(x.dtype != torch.float32 for x in again.parameters())


@each_whole
def test_what_transformers_saved_is_taken_in(case: Case, exported: Callable[[Case], Exported], tmp_path: Path) -> None:
    """Its own layout of the same tensors, which may differ from the one that we write."""
    out = exported(case).folder
    loaded(out).save_pretrained(tmp_path / "theirs")
    for file in out.iterdir():
        if ".safetensors" not in file.name and file.name != "config.json":
            (tmp_path / "theirs" / file.name).write_bytes(file.read_bytes())
    import_whole(tmp_path / "theirs", tmp_path / "in", max_shard_bytes=20_000)
    shards = [file.name for file in out.iterdir() if ".safetensors" in file.name]
    assert len(shards) > 2
    assert filecmp.cmpfiles(out, tmp_path / "in", shards, shallow=False) == (shards, [], [])


@each_parted
def test_parts_out_and_back(case: Case, exported: Callable[[Case], Exported], tmp_path: Path) -> None:
    """Where no one class of transformers computes the same: each part is loaded by its own."""
    made = exported(case)
    opened = open_bundle(made.folder)
    assert opened.bundle.config == made.bundle.config
    again = load(opened, "cpu").model
    assert all(torch.equal(x, dict(again.named_parameters())[name]) for name, x in made.model.named_parameters())
    export(opened.bundle, again, tmp_path / "again", max_shard_bytes=20_000)
    names = [str(p.relative_to(made.folder)) for p in made.folder.rglob("*") if p.is_file()]
    assert filecmp.cmpfiles(made.folder, tmp_path / "again", names, shallow=False) == (names, [], [])
    for part in ("vision", "language"):
        loaded(made.folder / part)


@each_typical_whole
def test_adapters(case: Case, tmp_path: Path) -> None:
    bundle = bundle_of(case)
    model = adapted(bundle)
    want = our_logits(model, case.documents)
    export(bundle, model, tmp_path / "merged")
    close(their_logits(loaded(tmp_path / "merged"), case), want)
    export(bundle, model, tmp_path / "apart", adapter=True)
    base = loaded(tmp_path / "apart" / "base")
    plain = their_logits(base, case)
    if "projector" in spec(bundle.config).parts:  # the adapter brings it: training began with another
        with torch.no_grad():
            for name in json.loads((tmp_path / "apart" / "adapter" / "adapter_config.json").read_text())["modules_to_save"]:
                for p in base.get_submodule(name).parameters():
                    p.zero_()
    close(their_logits(PeftModel.from_pretrained(base, str(tmp_path / "apart" / "adapter")).eval(), case), want)
    assert (plain - want).abs().max() > 0.05, "the adapters do nothing: this test shows nothing"


@pytest.mark.parametrize(
    "case", [c for c in WHOLE if c.spec.language.experts and is_typical(c)], ids=lambda c: f"{c.config.family}: {c.id}"
)
def test_adapters_of_experts_go_through_peft(case: Case, tmp_path: Path) -> None:
    """Out as peft has them, of two parameters of each layer, and in again; merged without peft."""
    bundle = bundle_of(case)
    model = adapted(bundle, language=("experts", "q_proj"))
    want = our_logits(model, case.documents)
    export(bundle, model, tmp_path / "merged")
    close(their_logits(loaded(tmp_path / "merged"), case), want)
    export(bundle, model, tmp_path / "apart", adapter=True, trained=())
    base = loaded(tmp_path / "apart" / "base")
    assert (their_logits(base, case) - want).abs().max() > 0.05, "the adapters do nothing: this test shows nothing"
    close(their_logits(PeftModel.from_pretrained(base, str(tmp_path / "apart" / "adapter")).eval(), case), want)
    close(our_logits(with_adapter(tmp_path / "apart" / "base", tmp_path / "apart" / "adapter"), case.documents), want)


def with_adapter(base: Path, folder: Path) -> Model:
    """A folder's model with an adapter of peft's in its weights."""
    opened = open_bundle(base)
    assert opened.form is not None
    adapter = open_adapter(folder, opened.bundle.config, opened.form)
    plan = shape(opened.bundle.config, trains={})
    materialise(plan, "cpu")
    fill(plan, opened.bundle.config, dict.fromkeys(plan.spec.parts, replace(opened.weights, adapter=adapter)))
    return plan.model.eval()


@each_typical_whole
def test_adapter_of_peft_is_taken(case: Case, exported: Callable[[Case], Exported], tmp_path: Path) -> None:
    """DoRA of the linear layers, with another rank for some, trained by peft on the same base; q, k and v in one layer there, too. Of a
    model with experts LoRA, and of these as well."""
    made = exported(case)
    theirs = peft_model(loaded(made.folder), case.config.language.model_dump().get("experts") is not None)
    want = their_logits(theirs, case)
    assert (want - our_logits(made.model, case.documents)).abs().max() > 0.05, "the adapters do nothing: this test shows nothing"
    theirs.save_pretrained(tmp_path / "adapter")
    close(our_logits(with_adapter(made.folder, tmp_path / "adapter"), case.documents), want)


def peft_model(base: PreTrainedModel, mixed: bool) -> Any:
    """With adapters that do something. Of a model with experts, peft takes names of feed-forward layers for those of experts."""
    linear = [
        name for name, module in base.named_modules() if isinstance(module, torch.nn.Linear) and "embed" not in name and name != "lm_head"
    ]
    targets = [name for name in linear if not mixed or not name.endswith(("gate_proj", "up_proj", "down_proj", ".gate"))]
    kind = {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]} if mixed else {"use_dora": True}
    config = LoraConfig(r=2, lora_alpha=3, target_modules=targets, rank_pattern={"o_proj": 3}, **kind)
    theirs = get_peft_model(base, config).eval()
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in theirs.named_parameters():
            if "lora_B" in name:
                p.copy_(torch.randn(p.shape, generator=rng) * 0.3)
            if "lora_magnitude" in name:
                p.mul_(torch.linspace(0.6, 1.4, len(p)))
    return theirs


@each_typical_whole
def test_answers_are_those_of_transformers(case: Case, exported: Callable[[Case], Exported]) -> None:
    made = exported(case)
    peer, limit = loaded(made.folder), 7
    ours = generate(made.model, spec(made.bundle.config), case.documents, Sampling(max_new_tokens=limit), [])
    for answer, document in zip(ours, case.documents, strict=True):
        inputs = case.inputs(document)
        theirs = peer.generate(
            **inputs, attention_mask=torch.ones_like(inputs["input_ids"]), max_new_tokens=limit, do_sample=False, eos_token_id=None
        )
        assert list(answer.tokens) == theirs[0, inputs["input_ids"].shape[1] :].tolist(), document.id


@pytest.mark.parametrize("case", [c for c in WHOLE if c.config.language.family == "qwen3_5"][:1], ids=lambda case: case.id)
def test_unread_tensors_are_reported_once(
    case: Case, exported: Callable[[Case], Exported], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line is about the layer for multi-token prediction, when a folder is imported or loaded as it is; not about computed buffers."""
    shutil.copytree(exported(case).folder, tmp_path / "hub")
    index = json.loads((tmp_path / "hub" / "model.safetensors.index.json").read_text())
    extra = {f"mtp.layers.0.{name}": torch.zeros(2) for name in ("a.weight", "b.weight")} | {"mtp.norm.weight": torch.zeros(2)}
    save_file(extra, tmp_path / "hub" / "extra.safetensors")
    index["weight_map"] |= dict.fromkeys(extra, "extra.safetensors")
    index["metadata"]["total_size"] += 24
    (tmp_path / "hub" / "model.safetensors.index.json").write_text(json.dumps(index))
    why = "tensors that are not read, since Eyeline's model has no such layers: mtp.* (3)"
    said = f"{tmp_path / 'hub'} has {why}. An export will lack them.\n"
    capsys.readouterr()
    import_whole(tmp_path / "hub", tmp_path / "in")
    assert capsys.readouterr().out.count(said) == 1
    opened = open_bundle(tmp_path / "hub")
    load(opened, "cpu")
    assert capsys.readouterr().out == said
    opened = open_bundle(tmp_path / "in")
    load(opened, "cpu")
    assert capsys.readouterr().out == ""
