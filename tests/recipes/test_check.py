"""`check`: every problem at once, before training, with words that help."""

import io
import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from eyeline.bundle.importing import import_model
from eyeline.core.errors import Refused, TooManyRejects
from eyeline.data.report.report import QUICK
from eyeline.data.text.templates import TEMPLATES
from eyeline.recipes.check import check, look
from eyeline.recipes.problems import evaluation_warnings, findings, folder_problems, refuse_problems, settings_problems, untrained_tokens
from eyeline.recipes.read import run_of
from eyeline.train.loop import train
from eyeline.train.run import to_yaml
from eyeline.train.start import description, start_run
from tests.bundle.tiny import save_language, save_vision, tokenizer
from tests.command import Command
from tests.forked import forked_command
from tests.train.recipe import tiny_recipe, tiny_run


def problems(folder: Path, *overrides: str) -> str:
    return "\n".join(settings_problems(tiny_run(folder, *overrides)))


def test_evaluation_on_training_questions_is_warned_of(tmp_path: Path) -> None:
    warned = list(evaluation_warnings(tiny_run(tmp_path)))
    assert len(warned) == 1
    assert "data.json is trained on in whole and adapt" in warned[0]
    other = tmp_path / "data" / "other.json"
    assert not list(evaluation_warnings(tiny_run(tmp_path, f"evaluation.sources.0.path={other}")))
    kinds = (
        "stages.0.data.sources.0.categories=[red]",
        "stages.1.data.sources.0.categories=[green]",
        "evaluation.sources.0.categories=[blue, green]",
    )
    (partly,) = evaluation_warnings(tiny_run(tmp_path, *kinds))
    assert "is trained on in adapt" in partly


def test_check_names_the_control_tokens_that_nothing_has_trained(tmp_path: Path) -> None:
    bare = tokenizer(replace(TEMPLATES["plain"], controls=("<|endoftext|>",)), vocabulary=300)
    language = save_language(tmp_path / "language", tok=bare)
    import_model(save_vision(tmp_path / "siglip"), language, tmp_path / "model", template="smollm2")
    recipe = tiny_recipe(tmp_path) | {"model": {"path": str(tmp_path / "model")}}
    full, adapted = run_of(recipe, "tiny"), run_of(recipe | {"stages": recipe["stages"][1:]}, "tiny")
    heard = io.StringIO()
    check(adapted, 0, Console(file=heard, width=200))
    assert "warning: model: the template 'smollm2' writes <|im_start|>, <|im_end|>, which import added" in heard.getvalue()
    assert "no stage will, since LoRA leaves embeddings as they are. Train language with how: full" in heard.getvalue()
    (line,) = untrained_tokens(full, description(full))
    assert "stage whole starts to train them" in line
    for name in ("adapted", "full"):
        (tmp_path / name).mkdir()
    assert start_run(adapted, tmp_path / "adapted").bundle.untrained == ("<|im_start|>", "<|im_end|>")
    trained = start_run(full, tmp_path / "full").bundle
    assert trained.untrained == ()
    assert not list(untrained_tokens(full, trained))


@pytest.mark.parametrize(("template", "words"), [("qwen3-thinking", "of earlier answers"), ("qwen3.5", "of all answers"), ("qwen3", None)])
def test_reasoning_dropped_by_a_template_is_warned_of_once(eyeline: Command, tmp_path: Path, template: str, words: str | None) -> None:
    """In check, and where training starts: not for each row."""
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(yaml.safe_dump(tiny_recipe(tmp_path)))
    for command in ("check", "train"):
        done = eyeline(command, str(recipe), f"model.template={template}", "model.config.language.vocab_size=320", "stages.0.steps=1")
        assert done.code == 0, done.err
        assert done.out.count("leaves out the reasoning") == (words is not None)
        assert words is None or f"leaves out the reasoning (<think>...</think>) {words}" in " ".join(done.out.split())


def test_a_run_folder_of_another_recipe_is_a_problem(tmp_path: Path) -> None:
    """check says what train would: other settings are refused, those that may change are not, nor is a folder without a step."""
    run = tiny_run(tmp_path, "stages.0.steps=1", "stages.1.steps=1")
    other = tiny_run(tmp_path, "stages.0.steps=1", "stages.1.steps=2", "stages.0.max_grad_norm=0.5")
    out = io.StringIO()
    console = Console(file=out, width=200)
    with pytest.raises(TooManyRejects):
        train(tiny_run(tmp_path, "stages.0.batch.max_tokens=8"))
    assert check(other, 0, console)
    train(run)
    assert check(tiny_run(tmp_path, "stages.0.steps=1", "stages.1.steps=2"), 0, console)
    assert not check(other, 0, console)
    said = out.getvalue()
    assert "tiny has 1 problem:\n  out: " in said
    assert "may not change on resume:\n    stages.whole.max_grad_norm: 1.0 → 0.5\n  Restore the settings that the run" in said


def test_a_good_recipe_has_none(tmp_path: Path) -> None:
    assert problems(tmp_path) == ""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("stages.0.batch.max_patches=15", ["batch.max_patches=15 cannot hold one image, which has 16 patches"]),
        ("stages.0.batch.max_tokens=4", ["batch.max_tokens=4 cannot hold one image (4 tokens)"]),
        (
            "stages.1.trains.language.targets=[q_proj, w_proj]",
            ["stages.adapt.trains.language.targets: there is no linear layer 'w_proj'", "q_proj, k_proj, v_proj, o_proj"],
        ),
        ("stages.0.gradient_checkpointing=[projector]", ["gradient_checkpointing names projector, which has no blocks"]),
        ("model.template=chatml", ["template 'chatml' is not known", "plain"]),
        ("model={path: nowhere}", ["nowhere is not a directory"]),
        ("model.config.language.vocab_size=100", ["vocabulary", "at least"]),
        ("model.config.language.max_positions=4", ["made for 4 positions"]),
        ("stages.0.data.sources.0.path=nowhere.json", ["nowhere.json", "stages.whole.data"]),
        ("evaluation.sources.0.path=nowhere.json", ["nowhere.json", "evaluation"]),
        ("stages.0.data.sources.0.categories=[purple]", ["purple"]),
        (
            "stages.1.data.validation_fraction=0.000001",
            [
                "stages.adapt.data: validation_fraction=1e-06 holds out none of 24 samples",
                "Raise it: 0.5 holds out 10 images with all samples",
            ],
        ),
        (
            "stages.1.data.validation_fraction=0.999999",
            ["stages.adapt.data: validation_fraction=0.999999 holds out all 24 samples", "Lower it: 0.5 holds out 10"],
        ),
        (
            "stages.0.data.sources.0.categories=[]",
            ["stages.whole.data", "no sample is left to train on", "data.json has 0 after categories and limit"],
        ),
    ],
)
def test_a_problem_is_named(tmp_path: Path, change: str, words: list[str]) -> None:
    found = problems(tmp_path, change)
    for word in words:
        assert word in found


def test_text_batch_trains_the_language_model_only(tmp_path: Path) -> None:
    """A tower that is to learn from text would silently stay as it is."""
    assert problems(tmp_path) == ""
    rows = [{"id": f"t{n}", "conversations": [{"from": "human", "value": "say"}, {"from": "gpt", "value": f"{n}"}]} for n in range(20)]
    (tmp_path / "text.json").write_text(json.dumps(rows))
    text = f"stages.0.data.sources=[{{path: {tmp_path / 'text.json'}}}]"
    found = problems(tmp_path, text)
    assert "stages.whole: trains vision and projector, which need images, and no sample has one" in found
    assert "stages.1" not in found
    assert problems(tmp_path, text, "stages.0.trains={language: {how: full, lr: 0.01}}") == ""


def unread_rows(folder: Path, row: dict[str, Any]) -> str:
    """An override: a stage that trains on 20 such rows."""
    (folder / "unread.json").write_text(json.dumps([row] * 20))
    return f"stages.0.data.sources=[{{path: {folder / 'unread.json'}, images: {folder / 'data'}}}]"


PHOTO = {"photo": "pictures/0.png", "question": "which colour?", "answer": "red"}
TEXT_ALONE = "stages.0.trains={language: {how: lora, lr: 0.01, rank: 2, alpha: 4, targets: [q_proj]}}"


def test_unread_images_are_a_problem_with_a_frozen_tower(tmp_path: Path) -> None:
    """As in the LoRA recipes: nothing else would say that a vision-language model is trained on the text alone."""
    tiny_run(tmp_path)
    source = unread_rows(tmp_path, PHOTO)
    for trains in ((), (TEXT_ALONE,)):
        (line,) = problems(tmp_path, source, *trains).splitlines()
        assert line.startswith(f"stages.whole.data: {tmp_path}/unread.json: none of the 20 rows looked at shows an image")
        assert "Write columns: {image: photo} for this source" in line
    with pytest.raises(Refused, match="none of the 20 rows"):
        refuse_problems(tiny_run(tmp_path, source, TEXT_ALONE))
    ignored = source.replace(f"images: {tmp_path / 'data'}", "images: ignore")
    assert problems(tmp_path, ignored, TEXT_ALONE) == ""
    assert "which need images, and no sample has one" in problems(tmp_path, ignored)
    assert problems(tmp_path, source.replace("images:", "columns: {image: photo}, images:"), "stages.0.data.validation_fraction=0") == ""
    asked = source.replace("stages.0.data.sources", "evaluation.sources")
    assert problems(tmp_path, asked).startswith("evaluation: ")


def test_source_warnings_in_check_data_and_at_start(tmp_path: Path) -> None:
    tiny_run(tmp_path)
    row = {"image": "pictures/0.png", "photo": "pictures/1.png", "conversations": [{"from": "human", "value": "<image><IMG_CONTEXT>?"}]}
    row["conversations"].append({"from": "gpt", "value": "a"})
    run = tiny_run(tmp_path, unread_rows(tmp_path, row), "stages.0.data.validation_fraction=0")
    warned = refuse_problems(run)
    assert ["column photo names images" in warned[0], "the text has <IMG_CONTEXT>" in warned[1], len(warned)] == [True, True, 2]
    lines = [f"warning: {line.partition(': ')[2]}" for line in warned]
    said, page = io.StringIO(), tmp_path / "data.html"
    assert check(run, 0, Console(file=said, width=2000))
    looked = io.StringIO()
    look(run, page, 0, QUICK, Console(file=looked, width=2000))
    for line in lines:
        assert said.getvalue().count(line) == looked.getvalue().count(line) == 1
        assert "names images and is not read" in page.read_text()
    assert "all examined samples are usable" not in said.getvalue().partition("stage adapt")[0]


def test_train_warns_of_what_is_not_read(tmp_path: Path, eyeline: Command) -> None:
    tiny_run(tmp_path)
    row = PHOTO | {"image": "pictures/1.png"}
    run = tiny_run(
        tmp_path,
        unread_rows(tmp_path, row),
        "stages.0.data.validation_fraction=0",
        "stages.0.steps=1",
        "stages.1.steps=1",
        "evaluation=null",
    )
    (tmp_path / "run.yaml").write_text(to_yaml(run))
    found = eyeline("train", str(tmp_path / "run.yaml"))
    assert found.code == 0
    assert "warning: stages.whole.data: " in found.err
    assert "column photo names images and is not read (20 of 20 rows looked at" in found.err


def test_rows_that_cannot_be_used_are_no_text(tmp_path: Path) -> None:
    """What is wrong with them is said of each; that none has an image would only lead astray."""
    rows = [{"imgae": "a.png", "conversations": [{"from": "human", "value": "<image>?"}, {"from": "gpt", "value": "a"}]}] * 20
    (tmp_path / "bad.json").write_text(json.dumps(rows))
    assert "which need images" not in problems(tmp_path, f"stages.0.data.sources=[{{path: {tmp_path / 'bad.json'}}}]")


def test_every_source_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    sources = f"[{{path: {tmp_path}/no.json}}, {{path: {tmp_path}/data/data.json}}, {{path: '{tmp_path}/no-*.tar'}}]"
    lines = problems(tmp_path, f"stages.1.data.sources={sources}", f"evaluation.sources={sources}").splitlines()
    stage = [line for line in lines if line.startswith("stages.adapt.data: ")]
    listed = [line for line in lines if line.startswith("evaluation: ")]
    assert ["no.json does not exist" in stage[0], "no file matches" in stage[1], len(stage)] == [True, True, 2]
    assert [line.partition(": ")[2] for line in listed] == [line.partition(": ")[2] for line in stage]


def test_all_problems_come_at_once(tmp_path: Path) -> None:
    run = tiny_run(
        tmp_path, "stages.0.batch.max_patches=1", "stages.1.trains.language.targets=[w_proj]", "evaluation.sources.0.path=no.json"
    )
    with pytest.raises(Refused) as refused:
        refuse_problems(run)
    assert "3 problems" in str(refused.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("/", "not a folder to put a run in"),
        ("~nobody-of-that-name", "this user has no home folder here"),
        ("~nobody-of-that-name/run", "this user has no home folder here"),
        ("a\nb", "control characters"),
        ("a\x9bb", "control characters"),
        ("a\ud800b", "not UTF-8"),
        ("x" * 300, "longer than 200 bytes"),
        ("file", "is a file"),
        ("file/run", "cannot be a folder"),
        ("loop/run", "cannot be a folder"),
    ],
)
def test_a_run_folder_that_cannot_be_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, words: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    os.symlink("loop", "loop")
    assert words in "\n".join(folder_problems(Path(name)))


def test_the_home_folder_is_no_run_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert "not a folder to put a run in" in "\n".join(folder_problems(tmp_path))
    assert list(folder_problems(tmp_path / "run")) == []


def test_a_name_that_a_shell_would_run_is_only_a_name(tmp_path: Path) -> None:
    assert list(folder_problems(tmp_path / "$(touch canary)")) == []


def broken_recipe(folder: Path) -> str:
    """The tiny recipe as a file, on data of which a quarter is unusable."""
    run = tiny_run(folder)
    rows = json.loads((folder / "data" / "data.json").read_text())
    for row in rows[::4]:
        row["conversations"][-1]["value"] = ""
    rows[1]["image"] = "pictures/none.png"
    rows[2]["conversations"][0]["value"] = "[bold]<image> <|endoftext|> not markup"
    (folder / "data" / "data.json").write_text(json.dumps(rows))
    (folder / "broken.yaml").write_text(to_yaml(run))
    return "broken.yaml"


def test_check_shows_data_and_refuses_what_would_stop_the_run(eyeline: Command, tmp_path: Path) -> None:
    done = eyeline("check", broken_recipe(tmp_path), "--samples", "20")
    assert done.code == 2
    assert "no_target 6" in done.out
    assert "missing_image 1" in done.out
    assert "data.json row 1, image" in done.out
    assert "6 of 21 examined training samples would be rejected" in done.out  # one more of 3 that are held out
    assert "spells a control token (trained on as text): 1" in done.out
    assert "[bold]" in done.out  # data is no markup
    assert "[image 1: 4 tokens]" in done.out
    assert not (tmp_path / "run").exists()


def test_the_reject_rate_may_be_raised(eyeline: Command, tmp_path: Path) -> None:
    recipe = broken_recipe(tmp_path)
    rates = [f"stages.{n}.data.max_reject_rate=0.4" for n in (0, 1)]
    assert eyeline("check", recipe, *rates).code == 0
    assert eyeline("train", recipe, *rates).code == 0
    lines = (tmp_path / "run" / "rejects.jsonl").read_text().splitlines()
    assert {json.loads(line)["cause"] for line in lines} <= {"no_target", "missing_image"}
    assert len(lines) == len({(json.loads(line)["file"], json.loads(line)["row"]) for line in lines})


def test_nothing_in_data_steers_the_terminal(eyeline: Command, tmp_path: Path) -> None:
    """Names, keys and kinds are shown as they are: no mark-up is obeyed, no control character or half of a pair gets out."""
    evil = "\x1b[31m\x9b[/no]\u202e\ud800"
    row = {"conversations": [{"from": "human", "value": "q" + evil[:-1]}, {"from": "gpt", "value": "a"}], "kind": evil[:-1]}
    with_images = {"image": evil[:-1] + ".png", "conversations": [{"from": "human", "value": "<image>q"}, {"from": "gpt", "value": "a"}]}
    data = tmp_path / "[bold]x[red].jsonl"
    data.write_text("\n".join([json.dumps(row), json.dumps(with_images), json.dumps({evil: float("nan")})]))
    recipe = tmp_path / "tiny.yaml"
    stages = [tiny_recipe(tmp_path)["stages"][0] | {"data": {"sources": [{"path": str(data)}], "max_reject_rate": 1}, "steps": 1}]
    evaluation = {"sources": [{"path": str(data)}], "max_new_tokens": 2}
    recipe.write_text(yaml.safe_dump(tiny_recipe(tmp_path) | {"stages": stages, "evaluation": evaluation}))
    for done in (
        eyeline("check", str(recipe)),
        eyeline("train", str(recipe)),
        eyeline("eval", str(tmp_path / "run"), "--show", "3"),
        eyeline("train", str(recipe), "stages.whole.data.sources.0.categories=[nothing]"),
    ):
        assert done.code == (2 if done.err else 0), done
        assert all(c.isprintable() or c == "\n" for c in done.out + done.err)
    assert r"\x1b[31m\x9b[/no]\u202e" in done.err


def test_epochs_of_nothing_usable_say_so(eyeline: Command, tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path)
    rows = [{"image": "gone.png", "conversations": [{"from": "human", "value": "<image>q"}, {"from": "gpt", "value": "a"}]}] * 3
    (tmp_path / "gone.json").write_text(json.dumps(rows))
    recipe["stages"] = [{k: v for k, v in recipe["stages"][0].items() if k != "steps"}]
    recipe["stages"][0] |= {"epochs": 2, "data": {"sources": [{"path": str(tmp_path / "gone.json")}]}}
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(recipe))
    done = eyeline("train", str(tmp_path / "tiny.yaml"))
    assert (done.code, done.err) == (2, "eyeline: no sample can be used: all 3 were rejected. `eyeline check` says why\n")


def test_too_many_rejects_end_training_with_their_code(eyeline: Command, tmp_path: Path) -> None:
    """`check` would have said so; a run whose data went bad afterwards is ended too, once an epoch was seen."""
    done = eyeline("train", broken_recipe(tmp_path), "stages.whole.steps=40")
    assert done.code == 3
    assert "max_reject_rate" in done.err
    assert "no_target" in done.err


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["train", "nothing"], 2, "no recipe is called 'nothing'"),
        (["train", "easyvqa-tiny", "seed"], 2, "write key=value"),
        (["train", "easyvqa-tiny", "device=tpu"], 2, "device"),
        (["eval", "nowhere"], 2, "not a run folder"),
        (["report", "nowhere"], 2, "not a run folder"),
        (["chat", "nowhere", "--ask", "x"], 2, "is not a directory"),
        (["export", "nowhere", "out"], 2, "is not a directory"),
        (["export", "nowhere", "out", "--form", "onnx"], 2, "onnx"),
        (["frobnicate"], 2, "frobnicate"),
        (["import", "out", "--vision", "a b", "--language", "c"], 2, "not a directory here"),
    ],
)
def test_errors_are_one_message_and_a_code(eyeline: Command, arguments: list[str], code: int, words: str) -> None:
    done = eyeline(*arguments)
    assert done.code == code
    assert words in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    "words",
    [("check", "{}/r.yaml"), ("data", "easyvqa-tiny", "--out", "{}/d.html"), ("eval", "{}"), ("report", "{}"), ("export", "{}", "x")],
)
def test_unreadable_folder_is_named(eyeline: Command, tmp_path: Path, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever verb it is given to. (Root may look anywhere, so the system's answers are made.)"""
    closed, stat = str(tmp_path / "closed"), os.stat

    def refuse(of: Any, *args: Any, **more: Any) -> Any:
        if str(of).startswith(closed + "/"):
            raise PermissionError(13, "Permission denied", str(of))
        return stat(of, *args, **more)

    monkeypatch.setattr(os, "stat", refuse)
    done = eyeline(*(word.format(closed + "/in") for word in words))
    assert done.code == 5
    assert re.fullmatch(rf"eyeline: {closed}/in.*: Permission denied\. Give the user who runs this permission to use it, or .*\n", done.err)


def test_debug_shows_the_traceback(eyeline: Command) -> None:
    with pytest.raises(Refused):
        eyeline("train", "nothing", "--debug")


def test_problems_of_settings_come_before_the_data_and_name_their_stage(tmp_path: Path) -> None:
    out = io.StringIO()
    run = tiny_run(tmp_path, "stages.0.batch.packs_per_step=4", "stages.1.batch.packs_per_step=3")
    assert not check(run, 0, Console(file=out, width=200), world_size=4)
    problem = f"stages.{run.stages[1].name}.batch.packs_per_step=3 is less than the 4 ranks"
    before, data, after = out.getvalue().partition("epoch ≈")
    assert data and problem in before and problem in after
    assert f"stages.{run.stages[0].name}.batch" not in out.getvalue()


def test_a_world_size_without_a_rank_is_refused(eyeline: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(tiny_recipe(tmp_path)))
    done = eyeline("train", "tiny.yaml")
    assert done.code == 2
    assert "WORLD_SIZE is set and RANK is not. Start the ranks with torchrun" in done.err


def test_data_problem_is_reported_once(tmp_path: Path) -> None:
    """A fresh model's tokenizer reads the same sources, and stumbles over the same thing."""
    found = problems(tmp_path, "stages.0.data.sources.0.path=nowhere.json")
    assert found.count("does not exist") == 1
    assert found.startswith("stages.whole.data: ")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["check", "{recipe}", "--samples", "-1"], "--samples"),
        (["eval", "{run}", "--limit", "-1"], "--limit"),
        (["eval", "{run}", "--show", "-1"], "--show"),
        (["chat", "{run}", "--ask", "x", "--max-new-tokens", "0"], "max_new_tokens: got 0, wanted a whole number greater than 0"),
        (["chat", "{run}", "--ask", "x", "--temperature", "nan"], "temperature: got nan"),
        (["train", "{recipe}", "steps"], "not an override"),
    ],
)
def test_numbers_out_of_range_are_refused(eyeline: Command, tmp_path: Path, arguments: list[str], words: str) -> None:
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(tiny_recipe(tmp_path)))
    done = eyeline(*(a.format(recipe=tmp_path / "tiny.yaml", run=tmp_path / "run") for a in arguments))
    assert done.code == 2
    assert words in done.err


def test_a_recipe_that_is_torn_in_a_run_folder_is_refused(eyeline: Command, tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(tiny_recipe(tmp_path)))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").write_text("a: [1\n")
    for done in (eyeline("train", str(tmp_path / "tiny.yaml")), eyeline("eval", str(tmp_path / "run"))):
        assert done.code == 2
        assert "recipe.yaml cannot be read by this version of Eyeline: the file is not valid YAML: line 2" in done.err


def test_a_terminal_without_unicode_is_no_reason_to_end(tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(tiny_recipe(tmp_path)))

    def ascii_only() -> None:
        sys.stdout.reconfigure(encoding="ascii")

    with open(tmp_path / "out", "wb") as out, open(tmp_path / "errors", "wb") as errors:
        streams = {"stdout": out.fileno(), "stderr": errors.fileno()}
        done = forked_command("check", str(tmp_path / "tiny.yaml"), **streams, before=ascii_only)
    assert (done.wait(60), (tmp_path / "errors").read_text()) == (0, "")
    assert r"one step: 2 \xd7 up to 160 tokens" in (tmp_path / "out").read_text()


def test_a_conversation_longer_than_the_models_positions_is_rejected(eyeline: Command, tmp_path: Path) -> None:
    """Though a batch would hold it: positions that the model was not made for are not trained on."""
    (tmp_path / "tiny.yaml").write_text(to_yaml(tiny_run(tmp_path, "model.config.language.max_positions=18")))
    done = eyeline("check", "tiny.yaml")
    assert done.code == 2
    assert "too_long" in done.out
    assert "overlong: drop_turns" in done.out
    trained = eyeline("train", "tiny.yaml", *(f"stages.{n}.data.overlong=drop_turns" for n in (0, 1)))
    assert trained.code == 0, trained.err


@pytest.mark.parametrize(
    ("trains", "words"),
    [
        ("{language: {how: full, lr: 0.01}}", ["the vision starts from random weights and is never trained", "the projector starts"]),
        (
            "{vision: {how: lora, lr: 0.01, rank: 2, alpha: 2, targets: all-linear}, projector: {how: full, lr: 0.01}}",
            ["the vision starts from random weights and is only adapted", "the language starts from random weights and is never trained"],
        ),
    ],
)
def test_a_random_part_that_no_stage_trains_is_warned_of(tmp_path: Path, trains: str, words: list[str]) -> None:
    run = tiny_run(tmp_path, f"stages.0.trains={trains}", f"stages.1.trains={trains}")
    said = [line.text for line in findings(run) if line.warns]
    assert len(said) == len(words)
    assert all(any(word in line for line in said) for word in words)
    assert not [line for line in findings(tiny_run(tmp_path)) if line.warns]


def test_dora_of_random_weights_is_refused(tmp_path: Path) -> None:
    """Their last layers are zero, and a row of length zero stays so: nothing would train. After a stage that trains them, it may."""
    dora = "stages.adapt.trains.language.dora=true"
    refuse_problems(tiny_run(tmp_path, dora))
    with pytest.raises(Refused, match="language starts from random weights, and where their rows are zero DoRA trains nothing"):
        refuse_problems(tiny_run(tmp_path, dora, "stages.whole.trains={projector: {how: full, lr: 0.01}}"))


@pytest.mark.parametrize(
    ("recipe", "size", "ranks", "weights"),
    [  # of a rank, in GiB: parameters of the whole model by hand, over the ranks that share them
        ("qwen3-vl-8b-fsdp", "qwen3-vl-8b", 8, (0.576e9 * 2 + 8.191e9 * 4) / 8),
        pytest.param("qwen3-vl-30b-a3b-ep", "qwen3-vl-30b-a3b", 16, (0.54e9 * 2 + 30.53e9 * 4) / 16, marks=pytest.mark.slow),
        pytest.param("qwen3.5-35b-a3b-3d", "qwen3.5-35b-a3b", 32, (0.45e9 * 2 + 34.66e9 * 4) / 32, marks=pytest.mark.slow),
    ],
)
def test_a_published_size_is_checked_without_model_and_data(eyeline: Command, recipe: str, size: str, ranks: int, weights: float) -> None:
    done = eyeline("check", recipe, "--size", size, "--world-size", str(ranks))
    assert done.code == 0, done.err
    [shown] = re.findall(r"memory of stage tune per rank: weights ([\d.]+) GiB", done.out)
    assert float(shown) == pytest.approx(weights / 2**30, rel=0.03)
    assert eyeline("check", recipe, "--size", size, "--world-size", str(ranks + 1), "mesh.tp=4").code == 2


def test_a_size_that_is_not_known_is_refused(eyeline: Command) -> None:
    done = eyeline("check", "qwen3-vl-lora", "--size", "qwen3-vl-9b")
    assert done.code == 2 and "Did you mean 'qwen3-vl-8b'?" in done.err
    done = eyeline("check", "qwen3-vl-lora", "--size", "qwen3-vl-8b", "model.add_tokens=['<a>']")
    assert done.code == 2 and "model.add_tokens=[]" in done.err
