"""A teacher in this process: its answers are those of `generate`, and a stage learns from its probabilities."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eyeline.bundle.bundle import open_bundle
from eyeline.bundle.fill import load
from eyeline.core.batch import IGNORE, Document, Likely, Sample
from eyeline.core.files import read_lines
from eyeline.data.fetch.batches import batch_of
from eyeline.data.images.patches import image_patches
from eyeline.data.sources.sources import Source, open_source
from eyeline.data.text.documents import document_of, with_likely
from eyeline.distill.model import FolderTeacher
from eyeline.distill.prompts import asked, prompt_named
from eyeline.distill.settings import Distill
from eyeline.distill.teacher import Request
from eyeline.generate.generate import generate
from eyeline.generate.prompts import Prompts
from eyeline.generate.sampling import Sampling
from eyeline.models import spec as spec_of
from eyeline.recipes.read import override, run_of
from eyeline.train.loop import train
from eyeline.train.run import Distillation
from eyeline.train.stage import set_distillation
from tests.command import Command
from tests.distill.recipe import recipe_with, rows_of, write_recipe
from tests.train.recipe import tiny_recipe


def settings_of(home: Path, **more: Any) -> Distill:
    source = {"path": str(home / "data" / "data.json"), "limit": 8}
    return Distill.model_validate({"sources": [source], "teacher": {"kind": "model", "path": str(home / "run")}, **more})


def samples_in(path: Path) -> list[Sample]:
    return [found for _, _, found in open_source(Source(path=str(path))).kept_rows() if isinstance(found, Sample)]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_answers_are_those_of_generate_one_by_one(home: Path, temperature: float) -> None:
    settings = settings_of(
        home, temperature=temperature, max_new_tokens=9, teacher={"kind": "model", "path": str(home / "run"), "max_tokens": 200}
    )
    prompt = prompt_named("chain-of-thought")
    requests = [Request(asked(prompt, sample).messages, 100 + n) for n, sample in enumerate(samples_in(home / "data" / "data.json")[:8])]
    teacher = FolderTeacher(settings.teacher, settings, "cpu", 1)  # type: ignore[arg-type]
    got = teacher.answers(requests)
    opened = open_bundle(home / "run")
    model, spec, encoder = load(opened, "cpu").model.eval(), spec_of(opened.bundle.config), opened.bundle.encoder()
    prompts = Prompts(encoder, spec.image)
    for request, said in zip(requests, got, strict=True):
        sampling = Sampling(max_new_tokens=9, temperature=temperature, seed=request.seed)
        [alone] = generate(model, spec, [prompts.prompt(request.messages)], sampling, encoder.stop_ids)
        assert (said.text, said.finish, said.answer_tokens) == (encoder.decode(alone.tokens), alone.finish, len(alone.tokens))
    assert temperature == 0 or len({said.text for said in got}) > 1


# Probabilities


def distilled(home: Path, folder: Path, eyeline: Command, *more: str) -> Path:
    """What the run answers to its own questions, with probabilities."""
    recipe = recipe_with(home, {"kind": "model", "path": str(home / "run")})
    recipe["model"] = {"path": str(home / "run")}
    recipe["distill"] |= {"prompts": [str(home / "bare.jinja")], "temperature": 0, "max_new_tokens": 12, "accept": {"by": "any"}}
    recipe["distill"]["filters"] = {"min_words": 0, "same_script": False, "max_repetition": 1.0}
    path = write_recipe(folder, recipe)
    done = eyeline("distill", str(path), "--out", str(folder / "out"), "--top-logprobs", "4", *more)
    assert done.code == 0, done.err
    return folder / "out"


def documents_of(home: Path, out: Path) -> list[Document]:
    opened = open_bundle(home / "run")
    encoder, rule = opened.bundle.encoder(), spec_of(opened.bundle.config).image
    assert rule is not None
    found = []
    for sample in samples_in(out):
        document = document_of(sample, encoder, rule, [image_patches(item, rule) for item in sample.media])
        likely = sample.messages[-1].likely
        assert likely is not None
        found.append(with_likely(document, likely))
    return found


def test_stored_probabilities_are_those_of_the_model_at_the_labels(home: Path, tmp_path: Path, eyeline: Command) -> None:
    out = distilled(home, tmp_path, eyeline)
    assert len(rows_of(out)) >= 3
    model = load(open_bundle(home / "run"), "cpu").model.eval()
    for document in documents_of(home, out):
        likely = document.likely
        assert likely is not None
        labelled = np.flatnonzero(document.labels_T != IGNORE)
        assert set(likely.rows_R) <= set(labelled) and len(likely.rows_R) >= 2
        batch = batch_of([document], None)
        with torch.no_grad():
            logits_TV = model(type(batch)(**{**vars(batch), "labels_L": None, "rows_L": torch.arange(len(document.tokens_T))})).out
        logp_RK, top_RK = logits_TV.log_softmax(-1)[likely.rows_R.tolist()].topk(4)
        torch.testing.assert_close(torch.tensor(likely.logp_RK), logp_RK, atol=2e-2, rtol=2e-3)
        assert (torch.tensor(likely.top_RK) == top_RK).float().mean() > 0.9  # of equal ones the order may differ


def test_probabilities_hold_up_to_the_first_other_token() -> None:
    """Labels 5 6 7 9 after a gap, a teacher that wrote 5 6 8 9: what it found likely after 8 says nothing here."""
    labels_T = np.array([IGNORE, 4, IGNORE, 5, 6, 7, 9, IGNORE], np.int32)
    document = Document("d", np.zeros(8, np.int32), labels_T, np.empty(0, np.int32), ())
    top = np.arange(8, dtype=np.int32).reshape(4, 2)
    likely = Likely((5, 6, 8, 9), top.tobytes(), (-top).astype(np.float16).tobytes(), 2)
    found = with_likely(document, likely).likely
    assert found is not None
    assert found.rows_R.tolist() == [3, 4, 5]
    assert found.top_RK.tolist() == [[0, 1], [2, 3], [4, 5]] and found.logp_RK.tolist() == [[0, -1], [-2, -3], [-4, -5]]


def test_a_teacher_adds_the_same_packed_and_unpacked(home: Path, tmp_path: Path, eyeline: Command) -> None:
    documents = documents_of(home, distilled(home, tmp_path, eyeline))
    torch.manual_seed(0)
    model = load(open_bundle(home / "run"), "cpu").model.eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape)  # another model than the teacher
    set_distillation(model, Distillation(kl=0.5, temperature=2.0))
    plain = Document(**{**vars(documents[0]), "likely": None})  # packed with one without a teacher
    whole = model(batch_of([*documents, plain], None))
    alone = [model(batch_of([one], None)) for one in (*documents, plain)]
    assert alone[-1].divergence is None and whole.divergence > 0
    torch.testing.assert_close(whole.out, sum(one.out for one in alone), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(whole.divergence, sum(one.divergence for one in alone[:-1]), rtol=1e-5, atol=1e-5)


def test_a_stage_learns_from_a_teacher(home: Path, tmp_path: Path, eyeline: Command) -> None:
    out = distilled(home, tmp_path, eyeline)
    recipe = tiny_recipe(home)
    stage = recipe["stages"][0] | {"data": {"sources": [{"path": str(out)}]}, "steps": 3, "distill": {"kl": 2.0}}

    def steps(name: str, *more: str) -> list[dict[str, Any]]:
        run = run_of(override(recipe | {"stages": [stage], "out": str(tmp_path / name)}, more), "recipe")
        train(run)
        return [line for line in read_lines(tmp_path / name / "metrics.jsonl") if line["kind"] == "step"]

    fresh = steps("fresh")
    assert all(line["divergence"] > 1e-3 for line in fresh)
    same = steps("same", f"model={{path: {home / 'run'}}}")
    assert abs(same[0]["divergence"]) < 0.02 * fresh[0]["divergence"]
    off = steps("off", "stages.0.distill=null")
    assert off[0]["divergence"] is None
    assert off[0]["loss"] == pytest.approx(fresh[0]["loss"], rel=1e-5) and off[2]["loss"] != pytest.approx(fresh[2]["loss"], rel=1e-5)
    recipe_path = tmp_path / "stage.json.yaml"
    recipe_path.write_text(json.dumps(recipe | {"stages": [stage]}))
    done = eyeline("prepare", str(recipe_path), "--out", str(tmp_path / "prepared"))
    assert done.code == 0, done.err
    prepared = steps("prepared-run", f"stages.0.data.prepared={tmp_path / 'prepared'}")
    assert [line["divergence"] for line in prepared] == pytest.approx([line["divergence"] for line in fresh], rel=1e-6)
    workers = steps("workers", "stages.0.data.workers=1")
    assert [line["divergence"] for line in workers] == [line["divergence"] for line in fresh]


def test_another_tokenizer_is_refused(home: Path, tmp_path: Path, eyeline: Command) -> None:
    recipe = recipe_with(home, {"kind": "model", "path": str(home / "run")}, top_logprobs=4)
    recipe["model"]["config"]["language"]["vocab_size"] = 290
    done = eyeline("distill", str(write_recipe(tmp_path, recipe)), "--out", "out")
    assert done.code == 2 and "has another tokenizer or chat template than the recipe's model" in done.err, done.err


def test_a_damaged_column_of_probabilities_rejects_its_row(home: Path, tmp_path: Path, eyeline: Command) -> None:
    out = distilled(home, tmp_path, eyeline)
    rows = rows_of(out)
    rows[0]["messages"][-1]["likely"]["k"] = 3
    (tmp_path / "damaged.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = [one for _, _, one in open_source(Source(path=str(tmp_path / "damaged.jsonl"), images=str(out))).kept_rows()]
    assert str(found[0]).startswith("messages[1].likely: is not what `eyeline distill --top-logprobs` writes")
    assert all(isinstance(one, Sample) for one in found[1:])
