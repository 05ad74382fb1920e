"""Recipes: what is read, what is refused, and with which words."""

import re
from pathlib import Path

import pytest
import yaml

from eyeline.core.errors import Refused
from eyeline.recipes.read import find_recipe, load_yaml, override, read_recipe, run_of, shipped_recipes
from eyeline.train.run import Run, differences, from_yaml, to_yaml


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", sorted(shipped_recipes()))
def test_a_shipped_recipe_survives_being_written_and_read(name: str) -> None:
    run = read_recipe(name)
    assert from_yaml(to_yaml(run)) == run
    assert differences(run, run) == []


def test_null_survives_too() -> None:
    """A default that is not null must not come back where the recipe said null."""
    run = read_recipe("easyvqa-tiny", ["stages.shapes.max_grad_norm=null"])
    assert run.stages[0].max_grad_norm is None
    assert from_yaml(to_yaml(run)).stages[0].max_grad_norm is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            "stages.shapes.colour=1",
            ["stages.shapes.colour: there is no such setting. stages.shapes has name, trains, data, steps"],
        ),
        ("stages.0.trains.vision.lrr=1", ["lrr", "Did you mean 'lr'?"]),
        ("model.config.family=lava", ["model.config.family: got 'lava'", "Did you mean 'llava'?"]),
        ("model.config.language.family=qwen33", ["model.config.language.family: got 'qwen33'", "Did you mean 'qwen3'?"]),
        ("stages.0.optimizer.kind=adam", ["stages.shapes.optimizer.kind: got 'adam'", "Did you mean 'adamw'?"]),
        ("stages.0.trains.vision.lr=.nan", ["lr", "finite"]),
        ("stages.0.trains.vision.lr=.inf", ["lr", "finite"]),
        ("stages.0.trains.vision.lr=-1", ["lr", "greater than 0"]),
        ("stages.0.trains.tower={how: full, lr: 1}", ["tower", "vision"]),
        ("stages.0.steps=0", ["steps", "greater than 0"]),
        ("stages.0.epochs=1", ["both steps and epochs are given. Remove one: stages.shapes.steps=null or stages.shapes.epochs=null"]),
        ("save_steps=0", ["save_steps", "greater than 0"]),
        ("save_total_limit=0", ["save_total_limit", "greater than 0"]),
        ("precision=fp8", ["precision: got 'fp8'", "set precision: bf16 and float8: rowwise"]),
        ("precision=float16", ["'float16' is called 'fp16' here"]),
        (
            "stages.0.schedule.warmup_ratio=1.5",
            ["stages.shapes.schedule.warmup_ratio: got 1.5, wanted a number at most 1 (it is a fraction of the whole)"],
        ),
        ("stages.0.schedule.kind=cosinus", ["cosinus", "cosine"]),
        ("stages.1.name=shapes", ["distinct names"]),
        (
            "model.path=x",
            ["both path (a model folder) and config (a new model) are given. Remove one: model.path=null or model.config=null"],
        ),
        ("model.template=null", ["needs a chat template"]),
        ("model.config.projector.shuffle=3", ["must divide", "8"]),
        ("_target_=os.system", ["_target_", "no such setting"]),
        ("seed=one", ["seed: got 'one', wanted a whole number"]),
        ("save_steps=1.5", ["save_steps: got 1.5, wanted a whole number or null"]),
        ("stages.0.max_grad_norm=some", ["stages.shapes.max_grad_norm: got 'some', wanted a number or null"]),
        (
            "stages.0.trains.vison={how: full, lr: 1}",
            ["has 1 problem:\n  stages.shapes.trains: there is no 'vison'", "Did you mean 'vision'?"],
        ),
        ("stages.0.trains.vison.lr=1", ["has 1 problem:\n  stages.shapes.trains: there is no 'vison'"]),
        (
            "stages.0.trains.vision={lr: 1}",
            ["stages.shapes.trains.vision: got {'lr': 1}, which has no `how`: add it, such as {how: full, lr: 1.0e-3}"],
        ),
        ("stages.0.optimizer=adamw", ["stages.shapes.optimizer: got 'adamw', wanted a mapping, such as {kind: adamw}"]),
        ("name=[a]", ["name: got ['a'], wanted text"]),
        (
            "stages.0.batch=5",
            ["stages.shapes.batch: got 5, wanted a mapping, such as {max_tokens: 8192, max_patches: 8192}, or batch: auto"],
        ),
        ("model.config.vision=null", ["model.config.vision: got null, wanted a mapping"]),
        ("stages.0.data.sources=my.json", ["got 'my.json', wanted a list of mappings, such as [{path: my.json}]"]),
        ("stages.0.data.sources=[my.json]", ["stages.shapes.data.sources.0: got 'my.json', wanted a mapping, such as {path: my.json}"]),
        ("epochs=3", ["epochs: there is no such setting here. It belongs elsewhere: stages.NAME.epochs"]),
        ("steps=3", ["steps: there is no such setting here. Did you mean stages.shapes.steps or stages.all.steps?"]),
        ("data.workers=3", ["data: there is no such setting here. Did you mean stages.shapes.data or stages.all.data?"]),
        ("lr=1", ["Did you mean stages.shapes.trains.vision.lr or", "or another?"]),
        ("stages.0.trains.language={how: lora, lr: 1}", ["stages.shapes.trains.language.rank is missing; wanted a whole number"]),
        ("out=''", ["out: got '', which names no folder"]),
    ],
)
def test_a_wrong_setting_is_named(change: str, words: list[str]) -> None:
    with pytest.raises(Refused) as refused:
        read_recipe("easyvqa-tiny", [change])
    for word in words:
        assert word in str(refused.value)
    assert "at least 1 item" not in str(refused.value)


@pytest.mark.parametrize("texts", [["seed=1", "seed=1"], ["stages.all.steps=3", "stages.1.steps=4"]])
def test_setting_that_is_given_twice_is_refused(texts: list[str]) -> None:
    with pytest.raises(Refused, match=re.escape(f"{texts[0]!r} and {texts[1]!r} are both given, and set the same. Leave one of them out")):
        read_recipe("easyvqa-tiny", texts)
    assert read_recipe("easyvqa-tiny", ["evaluation={sources: [{path: a.json}]}", "evaluation.max_new_tokens=3"]).evaluation


def test_all_problems_come_at_once() -> None:
    with pytest.raises(Refused) as refused:
        read_recipe("easyvqa-tiny", ["seed=-1", "stages.0.max_grad_norm=-1", "colour=red"])
    assert "3 problems" in str(refused.value)
    assert all(word in str(refused.value) for word in ("seed", "stages.shapes.max_grad_norm", "colour"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "contains nothing"),
        ("# only a comment\n", "contains nothing"),
        ("- a\n- b\n", "contains a list"),
        ("name: a\nname: b\n", "'name' is given twice"),
        ("model: {path: a, path: b}\n", "'path' is given twice"),
        ("a: [1, 2\n", "not valid YAML"),
        ("a: !!python/object/apply:os.system ['touch canary']\n", "not valid YAML"),
        ("a: \x00\n", "not valid YAML"),
        ("a: " + "9" * 5000, "not valid YAML"),
        ("stages\n  - name: a\n", "not valid YAML: line 2, character 9: .* the line above has no colon after its key"),
        ("just a sentence", "contains a single text"),
        ("a: !!int x\n", "not valid YAML"),
        ("a: !!timestamp x\n", "not valid YAML"),
        ("a: " + "[" * 3000, "not valid YAML"),
        ("x0: &x0 [1,1,1,1,1,1,1,1,1]\n" + "".join(f"x{i}: &x{i} [{','.join([f'*x{i - 1}'] * 9)}]\n" for i in range(1, 9)), "aliases"),
        ("x" * (1 << 20) + ": 1", "bytes"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(Refused, match=words):
        load_yaml(written(tmp_path, text))
    assert not Path("canary").exists()


def test_a_recipe_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="Did you mean 'easyvqa-tiny'"):
        find_recipe("easyvqa-tny")
    written(tmp_path, "name: x")
    with pytest.raises(Refused, match=r"recipe\.yml does not exist\. Did you mean '.*recipe\.yaml'\? Give the path"):
        find_recipe(str(tmp_path / "recipe.yml"))
    with pytest.raises(Refused, match=r"the recipe file .* does not exist"):
        find_recipe(str(tmp_path / "mine.yaml"))


def test_overrides_reach_one_place_by_number_or_name() -> None:
    recipe = yaml.safe_load("stages: [{name: a, data: &d {n: 1}}, {name: b, data: *d}]")
    changed = override(recipe, ["stages.b.data.n=2", "stages.0.new.deep=[1, x]", "seed=3"])
    assert changed == {"stages": [{"name": "a", "data": {"n": 1}, "new": {"deep": [1, "x"]}}, {"name": "b", "data": {"n": 2}}], "seed": 3}
    assert recipe["stages"][1]["data"]["n"] == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("seed", "write key=value"),
        ("=3", "write key=value"),
        ("stages.7.steps=1", "stages has no '7'; it has 2 items: 0 \\(a\\), 1 \\(b\\)"),
        ("stages.-1.steps=1", "stages has no '-1'"),
        ("stages.c.steps=1", "stages has no 'c'"),
        ("seed.x=1", "seed is 1, which is not a mapping and has no setting 'x'"),
        ("seed=[1", "not valid YAML"),
        ("seed=" + "9" * 5000, "not valid YAML"),
        ("seed=" + "[" * 3000, "not valid YAML"),
    ],
)
def test_a_wrong_override_is_refused(text: str, words: str) -> None:
    with pytest.raises(Refused, match=words):
        override({"seed": 1, "stages": [{"name": "a"}, {"name": "b"}]}, [text])


def test_what_may_change_on_resume() -> None:
    before = read_recipe("easyvqa-tiny")
    may = [
        "stages.all.steps=7",
        "logging_steps=3",
        "save_total_limit=9",
        "out=elsewhere",
        "stages.0.data.workers=2",
        "stages.0.data.sources.0.path=elsewhere",
        "evaluation.max_new_tokens=3",
        "threads=1",
    ]
    assert differences(before, read_recipe("easyvqa-tiny", may)) == []
    may_not = read_recipe("easyvqa-tiny", ["seed=1", "stages.0.trains.vision.lr=0.5", "stages.1.batch.max_tokens=4096", "logging_steps=3"])
    assert differences(before, may_not) == [
        "seed: 0 → 1",
        "stages.shapes.trains.vision.lr: 0.003 → 0.5",
        "stages.all.batch.max_tokens: 2304 → 4096",
    ]


def test_a_stage_that_is_added_or_dropped_is_a_difference() -> None:
    before = read_recipe("easyvqa-tiny")
    raw = before.model_dump(mode="json")
    raw["stages"] = raw["stages"][:1]
    after = run_of(raw, "x")
    assert any("stages.1.name" in line and "absent" in line for line in differences(before, after))
    assert isinstance(after, Run)
