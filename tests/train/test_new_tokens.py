"""New tokens: rows that start at the mean, train with LoRA, and are read by transformers and peft."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer, LlavaForConditionalGeneration

import eyeline.train.loop as loop
from eyeline.bundle.bundle import Bundle, Opened, open_bundle
from eyeline.bundle.exporting import export
from eyeline.bundle.fill import load
from eyeline.checkpoint import store
from eyeline.core.batch import Message, Text
from eyeline.core.errors import Refused
from eyeline.core.plan import NewRows
from eyeline.generate.prompts import Prompts
from eyeline.models import spec
from eyeline.recipes.problems import refuse_problems
from eyeline.recipes.read import run_of
from eyeline.train.run import Run
from tests.bundle.tiny import imported, our_logits
from tests.train.ends import digest, stopped_at
from tests.train.recipe import overridden, tiny_recipe

TOKENS = ["<here>", "<there>"]
LORA = "{how: lora, lr: 0.02, rank: 2, alpha: 4, targets: [q_proj, v_proj]}"


@pytest.fixture(scope="module", params=["tied", "untied"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model whose embedding has free rows, and data that write new tokens."""
    folder = tmp_path_factory.mktemp(request.param)
    path, _ = imported(folder, "llava", request.param == "tied")
    recipe = tiny_recipe(folder)
    rows = json.loads((folder / "data" / "data.json").read_text())
    for row in rows:
        row["conversations"][-1]["value"] += " <here> or <there>"
    Path(recipe["stages"][0]["data"]["sources"][0]["path"]).write_text(json.dumps(rows))
    return path


def run_from(model: Path, out: Path, *overrides: str, language: str = LORA) -> Run:
    recipe = tiny_recipe(model.parent)
    recipe |= {"model": {"path": str(model), "add_tokens": TOKENS}, "stages": recipe["stages"][:1], "out": str(out)}
    stage = {"trains": {"language": {}}, "batch": {"max_tokens": 400, "max_patches": 80, "packs_per_step": 2}}
    recipe["stages"][0] |= stage | {"optimizer": {"kind": "adamw"}, "steps": 3}
    return run_of(overridden(recipe, f"stages.whole.trains.language={language}", *overrides), "tiny")


def opened(run: Path) -> tuple[Opened, torch.nn.Module]:
    found = open_bundle(run)
    return found, load(found, "cpu").model


def embedding(model: torch.nn.Module) -> Tensor:
    return model.get_parameter("language.embed.weight").detach()


def asked(bundle: Bundle):
    return Prompts(bundle.encoder(), spec(bundle.config).image).prompt((Message("user", (Text("is it <here>, or<there>?"),)),))


def test_rows_start_at_the_mean_and_only_they_train_with_lora(model: Path, tmp_path: Path) -> None:
    loop.train(run_from(model, tmp_path / "run", "save_total_limit=9", "save_steps=1"))
    found, trained = opened(tmp_path / "run")
    before = embedding(load(open_bundle(model), "cpu").model)
    ids = [found.bundle.tokenizer.get_vocab()[token] for token in TOKENS]
    first = ids[0]
    assert ids == [first, first + 1] == [max(open_bundle(model).bundle.tokenizer.get_vocab().values()) + n for n in (1, 2)]
    after = embedding(trained)
    assert after.shape == before.shape, "rows that are free are taken before an embedding grows"
    assert torch.equal(after[:first], before[:first]), "rows of other tokens stay as they are"
    moved = (after[ids] - before[:first].mean(0)).abs()
    assert (moved > 1e-3).any(1).all()
    assert moved.max() < 0.1, "three steps from the mean, not from what the free rows held"
    state = store.newest(tmp_path / "run" / "checkpoints")
    assert state is not None and state.state["new_rows"] == list(NewRows(first, 2))
    if not found.bundle.config.language.tie_embeddings:
        head = trained.get_parameter("language.head.weight")
        assert (head[ids] - load(open_bundle(model), "cpu").model.get_parameter("language.head.weight")[:first].mean(0)).abs().max() > 1e-3


def test_transformers_and_peft_compute_the_same(model: Path, tmp_path: Path) -> None:
    loop.train(run_from(model, tmp_path / "run"))
    found, merged = opened(tmp_path / "run")
    question = asked(found.bundle)
    want = our_logits(merged, question)  # type: ignore[arg-type]
    tokens = torch.tensor(question.tokens_T)[None].long()

    export(found.bundle, merged, tmp_path / "out")  # type: ignore[arg-type]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = tokenizer.convert_tokens_to_ids(TOKENS)
    assert tokenizer.encode("is it <here>, or<there>?", add_special_tokens=False)[-2] == ids[1]
    assert set(ids) <= set(question.tokens_T.tolist()), "text has them whole"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<here><there>"
    theirs = LlavaForConditionalGeneration.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    torch.testing.assert_close(theirs(input_ids=tokens).logits[0], want, atol=2e-5, rtol=1e-4)

    kept = load(found, "cpu", keep_adapters=True).model
    torch.testing.assert_close(our_logits(kept, question), want, atol=2e-5, rtol=1e-4)  # type: ignore[arg-type]
    export(found.bundle, kept, tmp_path / "kept")  # as `eyeline export` does: what is apart is merged while it is written
    written = [load_file(tmp_path / name / "model.safetensors") for name in ("out", "kept")]
    assert written[0].keys() == written[1].keys()
    for name, x in written[0].items():
        torch.testing.assert_close(written[1][name], x, atol=1e-6, rtol=1e-6, msg=name)
    export(found.bundle, kept, tmp_path / "both", adapter=True)
    base = LlavaForConditionalGeneration.from_pretrained(tmp_path / "both" / "base", attn_implementation="eager")
    plain = base.eval()(input_ids=tokens).logits[0]
    adapted = PeftModel.from_pretrained(base, str(tmp_path / "both" / "adapter")).eval()
    torch.testing.assert_close(adapted(input_ids=tokens).logits[0], want, atol=2e-5, rtol=1e-4)
    assert (plain[:, ids] - want[:, ids]).abs().max() > 1e-3, "the rows do nothing: this test shows nothing"


def test_a_stopped_run_resumes_to_the_same_bits(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop.train(run_from(model, tmp_path / "whole"))
    with monkeypatch.context() as patch:
        stopped_at(patch, {2})
        with pytest.raises(BaseException, match="2 steps saved"):
            loop.train(run_from(model, tmp_path / "run"))
    loop.train(run_from(model, tmp_path / "run"))
    ends = [store.newest(tmp_path / name / "checkpoints") for name in ("run", "whole")]
    assert ends[0] is not None and ends[1] is not None
    assert digest(ends[0]) == digest(ends[1])


def test_an_embedding_without_free_rows_grows_and_a_later_run_trains_on(model: Path, tmp_path: Path) -> None:
    many = [f"<{n}>" for n in range(200)]
    run = run_from(model, tmp_path / "run", f"model.add_tokens={json.dumps(many)}", "stages.whole.steps=1")
    loop.train(run)
    found, first = opened(tmp_path / "run")
    assert found.bundle.config.language.vocab_size % 64 == 0
    assert len(embedding(first)) == found.bundle.config.language.vocab_size > 384
    again = run.model_copy(update={"model": run.model.model_copy(update={"path": str(tmp_path / "run")}), "out": str(tmp_path / "again")})
    loop.train(again)
    _, second = opened(tmp_path / "again")
    heads = [one.get_parameter("language.head.weight") for one in (first, second)]  # a softmax moves every row that trains
    moved = (heads[0] != heads[1]).any(1)
    ids = sorted(found.bundle.tokenizer.get_vocab()[token] for token in many)
    assert moved.nonzero().flatten().tolist() == ids


def test_full_training_starts_from_the_same_rows(model: Path, tmp_path: Path) -> None:
    """At a learning rate of next to nothing the rows are where they started."""
    loop.train(run_from(model, tmp_path / "run", language="{how: full, lr: 1e-12}"))
    found, trained = opened(tmp_path / "run")
    first = found.bundle.tokenizer.get_vocab()[TOKENS[0]]
    torch.testing.assert_close(embedding(trained)[first], embedding(trained)[:first].mean(0), atol=1e-6, rtol=0)


def test_stage_border_merges_rows_and_trains_on(model: Path, tmp_path: Path) -> None:
    run = run_from(model, tmp_path / "run", "save_total_limit=9")
    full = run_from(model, tmp_path / "x", language="{how: full, lr: 1e-12}").stages[0]
    loop.train(run.model_copy(update={"stages": (run.stages[0], full.model_copy(update={"name": "full", "steps": 1}))}))
    saved = [store.verify(path) for path in sorted((tmp_path / "run" / "checkpoints").iterdir())]
    one, two = (embedding(load(replace(open_bundle(tmp_path / "run"), checkpoint=x), "cpu").model) for x in saved)
    torch.testing.assert_close(one, two, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("tokens", "why"),
    [
        ('["a"]', "'a' is in the vocabulary already"),
        ('["<|im_start|>", "<new>"]', r"the rows of these tokens do not follow one another: <\|im_start\|> \(\d+\), <new> \(\d+\)"),
        ('["<x>", "<x>"]', "'<x>' is named twice"),
        ('[" <x>"]', "starts or ends with a space"),
    ],
)
def test_tokens_that_cannot_be_added_are_refused(model: Path, tmp_path: Path, tokens: str, why: str) -> None:
    with pytest.raises(Refused, match=why):
        refuse_problems(run_from(model, tmp_path / "run", f"model.add_tokens={tokens}"))


def test_tokens_that_no_stage_trains_are_warned_of(model: Path, tmp_path: Path) -> None:
    run, full = run_from(model, tmp_path / "run"), run_from(model, tmp_path, language="{how: full, lr: 0.1}")
    projector = run.stages[0].model_copy(update={"trains": {"projector": full.stages[0].trains["language"]}})
    assert "no stage trains the language model" in "".join(refuse_problems(run.model_copy(update={"stages": (projector,)})))
