"""Messages about settings: every wrong value of every setting gets a line in our words, at the place that the recipe names."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eyeline.core.aliases import ALIASES, VALUES
from eyeline.core.errors import Refused
from eyeline.core.problems import _schema_paths
from eyeline.recipes.read import find_recipe, override, read_recipe, run_of
from eyeline.train.run import Run

# what pydantic would say, and the names that it gives to members of a union
FOREIGN = (
    "Input should",
    "input should",
    "Field required",
    "valid",
    "tuple[",
    "literal[",
    "List should",
    "dictionary",
    "function-",
    "[key]",
)
WRONG = ("?!", "", -1, 1.5, True, None, [], ["?!"], [[1]], {}, {"?!": 1}, float("nan"))


def leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every setting of a recipe, records and lists too, as the pieces of an override."""
    if path:
        yield path, value
    if isinstance(value, dict):
        for key, child in value.items():
            yield from leaves(child, (*path, key))
    elif isinstance(value, list):
        for index, child in enumerate(value):
            yield from leaves(child, (*path, str(index)))


def changed(recipe: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    copy = override(recipe, [])
    place: Any = copy
    for piece in path[:-1]:
        place = place[int(piece) if isinstance(place, list) else piece]
    place[int(path[-1]) if isinstance(place, list) else path[-1]] = value
    return copy


def refusal(recipe: dict[str, Any]) -> str:
    """What is said against a recipe; empty where nothing is."""
    try:
        run_of(recipe, "mine.yaml")
    except Refused as refused:
        return str(refused)
    return ""


def recipes() -> list[dict[str, Any]]:
    """Resolved: with every default written out. LoRA, Muon, and the settings of MoE models are in one of them."""
    lora = "stages.0.trains.language={how: lora, lr: 1.0e-4, rank: 2, alpha: 4, targets: [q_proj]}"
    muon = "stages.0.optimizer={kind: muon}"
    some = [read_recipe("easyvqa-tiny", [lora, muon]), read_recipe("qwen3-vl-full", ["stages.0.experts={balance: aux}"])]
    return [run.model_dump(mode="json") for run in some]


@pytest.mark.parametrize("recipe", recipes(), ids=["easyvqa-tiny", "qwen3-vl-full"])
def test_no_wrong_value_of_any_setting_gets_a_foreign_word(recipe: dict[str, Any]) -> None:
    seen = 0
    for path, _ in leaves(recipe):
        for value in WRONG:
            words = refusal(changed(recipe, path, value)).replace("validat", "")
            seen += bool(words)
            assert not [word for word in FOREIGN if word in words], f"{path} = {value!r}: {words}"
            assert path[-1] in ("name", "0") or "stages.0." not in words, f"{path} = {value!r}: a stage is called by its name: {words}"
    assert seen > 500


@pytest.mark.parametrize("recipe", recipes(), ids=["easyvqa-tiny", "qwen3-vl-full"])
def test_numbers_booleans_and_texts_are_not_converted(recipe: dict[str, Any]) -> None:
    numbers = [(path, value) for path, value in leaves(recipe) if isinstance(value, int | float)]
    assert len(numbers) > 30
    for path, value in numbers:
        others: list[Any] = [0, 1] if isinstance(value, bool) else [True, str(value)]
        for other in others:
            with pytest.raises(Refused, match=r"wanted (true or false|a number|a whole number)"):
                run_of(changed(recipe, path, other), "mine.yaml")


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (["seed=010"], "seed: got '010', wanted a whole number. A leading zero may mean octal, so it is not read as a number: write 10"),
        (["seed=1:30"], "seed: got '1:30', wanted a whole number. A number with colons is not read as one"),
        (["seed='8'"], "seed: got '8', wanted a whole number. Write it without quotes and separators"),
        (["stages.all.steps=true"], "stages.all.steps: got true, wanted a whole number or null"),
        (["device=gpu"], "device: got 'gpu', wanted auto, cpu or cuda. Did you mean 'cuda'?"),
        (["out=2024"], "out: got 2024, wanted text or null. Put it in quotes to have it as text"),
        (
            ["stages.all.batch.size=8"],
            "stages.all.batch.size: there is no such setting. stages.all.batch has max_tokens, max_patches, packs_per_step, auto, "
            "memory_gb",
        ),
        (["stages.all.batch.max_token=8"], "stages.all.batch.max_token: there is no such setting. Did you mean 'max_tokens'?"),
        (["stages.all.schedule=cosine"], "stages.all.schedule: got 'cosine', wanted a mapping, such as {kind: cosine}"),
        (["model.weights={vision: null}"], "model.weights.vision: got null, wanted text, such as runs/first"),
        (["stages.all.trains.vision=null"], "stages.all.trains.vision: got null, wanted a mapping, such as {how: full, lr: 1.0e-3}"),
        (["stages.all.optimizer.betas=[0.9]"], "stages.all.optimizer.betas.1 is missing; wanted a number"),
        (["stages.all.optimizer.betas=[0.9, 0.9, 0.9]"], "stages.all.optimizer.betas: got 3 values, wanted 2"),
        (["stages.all.steps=null"], "stages.all: neither steps nor epochs is given. Give one of them, such as stages.all.steps=1000"),
        (
            ["stages.all.trains.language={how: lora, lr: 1, rank: 1, alpha: 1, targets: all}"],
            "stages.all.trains.language.targets: got 'all', wanted a list of texts or all-linear",
        ),
        (
            ["stages.all.trains.language={how: lora, lr: 1, rank: 1, alpha: 1, targets: [1]}"],
            "stages.all.trains.language.targets.0: got 1, wanted text. Put it in quotes to have it as text",
        ),
        (
            ["model.config.vision.shuffle=2"],
            "model.config.vision.shuffle: there is no such setting here. Did you mean model.config.projector.shuffle?",
        ),
        (["stages.all.trains={}"], "stages.all.trains is empty; wanted at least 1"),
        (["stages.all.data.validation_fraction=no"], "stages.all.data.validation_fraction: got 'no', wanted a number"),
        (
            ["stages.all.trains.language={how: full, lr: 1, dora: true}"],
            "stages.all.trains.language.dora is a setting of how: lora, and this is how: full. Leave it out, or change how",
        ),
        (
            ["stages.all.optimizer={kind: muon, state_dtype: bf16}"],
            "stages.all.optimizer.state_dtype is a setting of kind: adamw, and this is kind: muon. Leave it out, or change kind",
        ),
        (
            ["stages.all.schedule={kind: linear, decay_ratio: 0.1}"],
            "stages.all.schedule.decay_ratio is a setting of kind: wsd, and this is kind: linear. Leave it out, or change kind",
        ),
        (
            ["stages.all.gradient_checkpointing={every: 2, memory_gb: 1}"],
            "stages.all.gradient_checkpointing: memory_gb chooses the blocks that are recomputed, and so does every. Leave one of them out",
        ),
        (["name=a b"], "name: got 'a b', wanted letters, digits, ., - and _, at most 80 of them, a letter or digit first"),
    ],
)
def test_a_problem_is_one_line(changes: list[str], line: str) -> None:
    with pytest.raises(Refused) as refused:
        read_recipe("easyvqa-tiny", changes)
    assert str(refused.value).splitlines()[1:] == [f"  {line}"]


@pytest.mark.parametrize("text", ["out=", "seed= ", "stages.all.max_grad_norm=  "])
def test_an_empty_override_is_not_null(text: str) -> None:
    """`seed=$SEED` with the variable unset."""
    with pytest.raises(Refused, match=r"has no value \(is a shell variable unset\?\). Give one, or write .*=null for none"):
        read_recipe("easyvqa-tiny", [text])


def test_data_or_run_folder_given_as_recipe_is_named(tmp_path: Path) -> None:
    (tmp_path / "llava.json").write_text("[]")
    with pytest.raises(Refused, match=r"llava.json is a file, and its name does not end in \.yaml: is it data\?"):
        find_recipe(str(tmp_path / "llava.json"))
    with pytest.raises(Refused, match=r"is a folder. A recipe is a \.yaml file$"):
        find_recipe(str(tmp_path))
    (tmp_path / "recipe.yaml").write_text("name: a")
    with pytest.raises(Refused, match=r"is a folder. A recipe is a \.yaml file, such as .*recipe\.yaml"):
        find_recipe(str(tmp_path))


def test_tilde_is_the_home_folder_in_every_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    run = read_recipe("easyvqa-tiny", ["out=~/runs/x", "model.tokenizer=~/tok"])
    assert (run.out, run.model.tokenizer) == (f"{tmp_path}/runs/x", f"{tmp_path}/tok")
    assert read_recipe("easyvqa-tiny", ["model={path: ~/model}"]).model.path == f"{tmp_path}/model"
    (tmp_path / "mine.yaml").write_text("name: a")
    assert find_recipe("~/mine.yaml") == tmp_path / "mine.yaml"


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (["stages.all.clip=1"], "stages.all.clip is called stages.all.max_grad_norm here"),
        (["learning_rate=1"], "learning_rate is called stages.NAME.trains.PART.lr here; each part has its own"),
        (["stages.all.batch.tokens=1"], "stages.all.batch.tokens is called stages.all.batch.max_tokens here"),
        (
            ["model.config.language.width=8"],
            "model.config.language.width is called model.config.language.hidden_size here",
        ),
        (["evaluation.max_tokens=1"], "evaluation.max_tokens is called evaluation.max_new_tokens here"),
        (["stages.all.data.mix=once"], "stages.all.data.mix: got 'once', wanted concat or interleave. 'once' is called 'concat' here."),
        (
            ["stages.all.schedule={kind: cosine_with_min_lr}"],
            "stages.all.schedule.kind: got 'cosine_with_min_lr'; there are constant, linear, cosine, wsd. "
            "'cosine_with_min_lr' is called 'cosine' here.",
        ),
        (
            ["stages.all.optimizer={kind: paged_adamw_8bit}"],
            "stages.all.optimizer.kind: got 'paged_adamw_8bit'; there are adamw, adamw_8bit, muon. 'paged_adamw_8bit': moments are not "
            "paged: {kind: adamw_8bit, offload: true} keeps them on the host between steps",
        ),
        (
            ["stages.all.optimizer={kind: adamw, optimizer_in_bwd: true}"],
            "stages.all.optimizer.optimizer_in_bwd is called stages.all.optimizer.in_backward here; of AdamW, in each stage",
        ),
        (
            ["logging_dir=logs"],
            "logging_dir: there is no such setting; trackers write into the folder `trackers` of the run folder: report_to names them",
        ),
    ],
)
def test_setting_of_another_name_is_pointed_to(changes: list[str], line: str) -> None:
    with pytest.raises(Refused) as refused:
        read_recipe("easyvqa-tiny", changes)
    assert str(refused.value).splitlines()[1:] == [f"  {line}"]


def test_every_alias_points_to_a_setting() -> None:
    """And is the name of none at the place where it would be typed."""
    paths = {path for _, path in _schema_paths(Run)}
    for typed, (target, note) in ALIASES.items():
        assert note if not target else any(path == target or path.endswith(f".{target}") for path in paths), typed
        assert not any(path == typed or path.endswith(f".{typed}") for path in paths if "config" not in path), typed
    for (setting, typed), word in VALUES.items():
        assert typed != word and any(name == setting for name, _ in _schema_paths(Run))


def test_docs_have_the_table_of_aliases() -> None:
    text = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text(encoding="utf-8")
    rows = [f"| `{typed}` | {f'`{target}`' if target else '–'} | {note} |" for typed, (target, note) in ALIASES.items()]
    assert text.endswith("\n".join(rows) + "\n")
