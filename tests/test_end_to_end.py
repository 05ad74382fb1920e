"""The shipped recipes themselves, shortened: `llava-siglip2-qwen2.5` on tiny checkpoints of the same classes and JPEG files in its
layout, from import to export; `easyvqa-tiny` on its own data."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoTokenizer, LlavaForConditionalGeneration, SiglipImageProcessor

import eyeline.train.loop as loop
from eyeline.checkpoint import store
from eyeline.core.files import read_lines, read_object
from tests.bundle.tiny import save_language, save_vision
from tests.command import Command
from tests.llava_pretrain import TINY, write_llava_pretrain
from tests.train.ends import digest, stopped_at


@pytest.fixture
def models(tmp_path: Path) -> None:
    save_vision(tmp_path / "hub" / "siglip")
    save_language(tmp_path / "hub" / "qwen")
    write_llava_pretrain(tmp_path / "data" / "LLaVA-Pretrain")


@pytest.mark.usefixtures("models")
def test_llava_recipe_from_import_to_export(eyeline: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = eyeline("import", "models/siglip2-qwen2.5", "--vision", "hub/siglip", "--language", "hub/qwen", "--no-feature-norm")
    assert made.code == 0, made.err
    assert "llava" in made.out

    checked = eyeline("check", "llava-siglip2-qwen2.5", *TINY)
    assert checked.code == 0, checked.out + checked.err
    assert "LlavaForConditionalGeneration" in checked.out
    assert "A plain image, number" in checked.out

    # interrupted once in each stage, against a run that was left alone
    whole = eyeline("train", "llava-siglip2-qwen2.5", *TINY, "out=runs/whole")
    assert whole.code == 0, whole.err
    with monkeypatch.context() as patch:
        stopped_at(patch, {2, 9})
        for step in (2, 9):
            stopped = eyeline("train", "llava-siglip2-qwen2.5", *TINY, "out=runs/llava")
            assert stopped.code == 75, stopped.err
            assert f"{step} steps saved" in stopped.err
    resumed = eyeline("train", "llava-siglip2-qwen2.5", *TINY, "out=runs/llava")
    assert resumed.code == 0, resumed.err
    run = tmp_path / "runs" / "llava"
    ends = [store.newest(tmp_path / "runs" / name / "checkpoints") for name in ("llava", "whole")]
    assert ends[0] is not None
    assert ends[1] is not None
    assert ends[0].manifest.step == 12
    assert digest(ends[0]) == digest(ends[1])
    assert {line["kind"] for line in read_lines(run / "metrics.jsonl")} == {"start", "stage", "step", "validation", "end"}
    assert (run / "report.html").read_text().startswith("<!doctype html>")

    evaluated = eyeline("eval", "runs/llava", "--show", "2")
    assert evaluated.code == 0, evaluated.err
    result = json.loads((run / "eval.json").read_text())
    assert result["questions"] == 5
    assert 0 <= result["accuracy"] <= 1

    image = str(tmp_path / "data/LLaVA-Pretrain/00000/000000000.jpg")
    assert eyeline("export", "runs/llava", "exported").code == 0
    from_run = eyeline("chat", "runs/llava", "--image", image, "--ask", "Describe it.", "--max-new-tokens", "8")
    from_export = eyeline("chat", "exported", "--image", image, "--ask", "Describe it.", "--max-new-tokens", "8")
    assert from_run.code == from_export.code == 0, from_run.err + from_export.err
    assert from_run.out == from_export.out  # both in fp32 on a CPU

    # transformers alone: its own model, tokenizer, image processor and chat template, from the folder
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "exported")
    processor = SiglipImageProcessor.from_pretrained(tmp_path / "exported")
    model = LlavaForConditionalGeneration.from_pretrained(tmp_path / "exported").eval()
    content = [{"type": "image"}, {"type": "text", "text": "Describe it."}]
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True)
    prompt = prompt.replace("<|image_pad|>", "<|image_pad|>" * 16)
    inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    pixels = processor(Image.open(image), return_tensors="pt")["pixel_values"]
    theirs = model.generate(**inputs, pixel_values=pixels, max_new_tokens=8, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert tokenizer.decode(theirs, skip_special_tokens=True).strip() == from_run.out.strip()

    adapter = eyeline("export", "runs/llava", "with-adapter", "--adapter")
    assert adapter.code == 0, adapter.err
    saved = read_object(tmp_path / "with-adapter" / "adapter" / "adapter_config.json")["modules_to_save"]
    assert saved and all("projector" in name for name in saved)  # which the recipe trains in full


@pytest.mark.usefixtures("models")
def test_bf16_keeps_masters_in_fp32_and_frozen_parts_in_bf16(eyeline: Command, tmp_path: Path) -> None:
    """The recipe's own precision. What learns is float32 in the checkpoint; matrices of the tower, frozen in all stages, are bfloat16."""
    eyeline("import", "models/siglip2-qwen2.5", "--vision", "hub/siglip", "--language", "hub/qwen", "--no-feature-norm")
    short = [setting.replace(".steps=6", ".steps=2") for setting in TINY]
    done = eyeline("train", "llava-siglip2-qwen2.5", *short, "out=runs/b")
    assert done.code == 0, done.err
    newest = store.newest(tmp_path / "runs" / "b" / "checkpoints")
    assert newest is not None
    learned, frozen = newest.load("model"), newest.load("frozen")
    assert {t.dtype for t in learned.values()} == {torch.float32}
    exact = {name for name, t in frozen.items() if t.ndim == 1 or name.endswith("positions.weight")}  # what is used in float32, and biases
    assert {t.dtype for name, t in frozen.items() if name not in exact} == {torch.bfloat16}
    assert {frozen[name].dtype for name in exact} == {torch.float32}
    assert any(name.endswith("lora_A") for name in learned)
    assert all(name.startswith(("vision.", "language.")) for name in frozen)


def test_easyvqa_recipe_trains_evaluates_and_reports(eyeline: Command, tmp_path: Path) -> None:
    """The quick start, shortened to some steps of some rows: the words are learned, if not yet the images, and every file is there."""
    short = ["stages.shapes.steps=40", "stages.all.steps=4", "validation_steps=20", "save_steps=10", "threads=1"]
    short += [f"stages.{stage}.data.sources.0.limit=2000" for stage in ("shapes", "all")] + ["evaluation.sources.0.limit=100"]
    eyeline.draws = True
    done = eyeline("train", "easyvqa-tiny", *short)
    assert done.code == 0, done.err
    run = tmp_path / "runs" / "easyvqa-tiny"
    steps = [line for line in read_lines(run / "metrics.jsonl") if line["kind"] == "step"]
    assert len(steps) == 44
    assert steps[0]["loss"] == pytest.approx(np.log(384), rel=0.15)  # an untrained model knows nothing
    assert steps[39]["loss"] < 1.2  # guessing one of 13 answers, then ending, is ln(13) / 2 = 1.28 per label; one of three shapes 0.55
    evaluated = eyeline("eval", "runs/easyvqa-tiny", "--show", "10")
    assert evaluated.code == 0, evaluated.err
    assert evaluated.out.count("→") == 10
    result = json.loads((run / "eval.json").read_text())
    assert result["questions"] == 100
    assert set(result["by_kind"]) <= {"shape", "color", "yes/no"}
    assert eyeline("eval", "runs/easyvqa-tiny", "--limit", "20").code == 0
    assert json.loads((run / "eval-first-20.json").read_text())["questions"] == 20
    (run / "eval-first-20.json").unlink()
    assert json.loads((run / "eval.json").read_text()) == result
    assert eyeline("report", "runs/easyvqa-tiny").code == 0
    page = (run / "report.html").read_text()
    assert page.count("data:image/png;base64") >= 10
    assert page.count("data:image/svg+xml;base64") >= 10
    assert "<script" not in page
    assert sorted(p.name for p in run.iterdir()) == [
        "checkpoints", "env.json", "eval.json", "index", "lock", "metrics.jsonl", "model", "recipe.yaml", "report.html", "sources",
    ]  # fmt: skip


def test_run_folder_moves_and_resumes(eyeline: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run folder holds all it needs: moved elsewhere, it is evaluated, exported and resumed."""
    short = ["stages.shapes.steps=4", "stages.all.steps=4", "threads=1"]
    short += [f"stages.{stage}.data.sources.0.limit=1000" for stage in ("shapes", "all")]
    with monkeypatch.context() as patch:
        stopped_at(patch, {6})
        assert eyeline("train", "easyvqa-tiny", *short, "out=first").code == 75
    shutil.move(tmp_path / "first", tmp_path / "second")
    assert eyeline("train", "easyvqa-tiny", *short, "out=second").code == 0
    assert eyeline("export", "second", "exported").code == 0
    assert loop.run_folder  # the module under test is the one that ran
