"""Where a model's weights come from: each part from its own source, and adapters merged on the way, rounded once."""

import shlex
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

import eyeline.train.loop as loop
from eyeline.bundle.bundle import open_bundle
from eyeline.bundle.fill import load, merged_part
from eyeline.checkpoint import store
from eyeline.core.errors import Refused, Stopped
from eyeline.core.randomness import torch_rng_for
from eyeline.core.shards import Box
from eyeline.data.text.templates import template_named
from eyeline.data.text.tokenizer import train_bpe
from eyeline.models.layers import Linear
from eyeline.models.lora import LoRA, LoRALinear, merge, updates_of
from eyeline.models.shape import build
from eyeline.parallel.launch import machine
from eyeline.recipes.problems import settings_problems
from eyeline.recipes.read import override, run_of
from eyeline.train.run import Run
from eyeline.train.stage import model_of
from eyeline.train.start import description, onward, start_run
from tests.hub import HUB
from tests.train.ends import stopped_at
from tests.train.recipe import tiny_recipe, tiny_run
from tests.train.test_experts import EXPERTS

LORA = "{how: lora, lr: 0.02, rank: 2, alpha: 4, targets: all-linear}"
OTHER = "{how: lora, lr: 0.02, rank: 3, alpha: 4, targets: all-linear}"


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps of everything, in float32."""
    folder = tmp_path_factory.mktemp("start")
    loop.train(tiny_run(folder, "stages.whole.steps=2", "stages.adapt.steps=1"))
    return folder


def began(run: Run, folder: Path, checkpoint: store.Checkpoint | None = None, stage: int = 0) -> dict[str, torch.Tensor]:
    """Every parameter of the model that a stage begins with."""
    folder.mkdir(exist_ok=True)
    plan = model_of(run, start_run(run, folder), machine("cpu", 1), checkpoint, stage)
    return {name: x.detach() for name, x, _ in plan.tensors()}


@pytest.mark.parametrize(("later", "stored"), [(OTHER, torch.bfloat16), ("{how: full, lr: 0.01}", torch.float32)])
def test_a_border_in_bf16_rounds_the_merged_weight_once(start: Path, tmp_path: Path, later: str, stored: torch.dtype) -> None:
    """W + α/r·B·A in float32, of what the checkpoint holds; then bfloat16 where the language model stays frozen, and float32 where the
    next stage trains it."""
    run = tiny_run(
        start,
        f"model={{path: {start / 'run'}}}",
        f"out={tmp_path / 'run'}",
        "precision=bf16",
        f"stages.whole.trains={{language: {LORA}}}",
        "stages.whole.steps=2",
        f"stages.adapt.trains={{language: {later}}}",
        "save_total_limit=9",
    )
    loop.train(run)
    first = store.verify(min((tmp_path / "run" / "checkpoints").iterdir()))
    held = first.load("model", "frozen")
    got = began(run, tmp_path / "run", first, 1)
    adapted = [name.removesuffix(".lora_A") for name in held if name.endswith(".lora_A")]
    assert adapted
    for name in adapted:
        weight, a, b = (held[f"{name}.{leaf}"] for leaf in ("weight", "lora_A", "lora_B"))
        assert b.any(), "the adapter has learned something"
        want = (weight.float() + 2.0 * (b @ a)).to(stored)
        assert got[f"{name}.weight"].dtype == stored
        assert torch.equal(got[f"{name}.weight"], want), name
    for name, x in held.items():
        if name.rpartition(".")[0] not in adapted:
            assert torch.equal(got[name].float(), x.float()), name


def test_parts_of_a_folder_may_start_from_random_weights(start: Path, tmp_path: Path) -> None:
    run = tiny_run(start, f"model={{path: {start / 'run'}, fresh: [projector]}}", f"out={tmp_path / 'run'}", "seed=5")
    got = began(run, tmp_path / "run")
    whole = dict(load(open_bundle(start / "run"), "cpu").model.named_parameters())
    fresh = build(open_bundle(start / "run").bundle.config, "cpu").projector
    fresh.initialise(torch_rng_for(5, "weights"))
    drawn = {f"projector.{name}": x for name, x in fresh.named_parameters()}
    weights = {name: x for name, x in got.items() if "lora_" not in name}
    assert weights.keys() == whole.keys()
    for name, x in weights.items():
        assert torch.equal(x, drawn.get(name, whole[name])), name
    assert not torch.equal(drawn["projector.up.weight"], whole["projector.up.weight"])


def test_each_part_starts_from_its_own_folder(start: Path, tmp_path: Path) -> None:
    """A language model of one run under a tower of another; the projector is random, the tokenizer and template are the language's."""
    other = tiny_run(tmp_path, f"out={tmp_path / 'other'}", "seed=9", "stages.whole.steps=2", "stages.adapt.steps=1")
    loop.train(other)
    own = tiny_run(start)
    update = {"weights": {"language": str(start / "run"), "vision": str(tmp_path / "other")}, "template": None, "tokenizer": None}
    run = own.model_copy(update={"model": own.model.model_copy(update=update), "out": str(tmp_path / "run")})
    got = began(run, tmp_path / "run")
    language, vision = (dict(load(open_bundle(folder), "cpu").model.named_parameters()) for folder in (start / "run", tmp_path / "other"))
    for name, x in got.items():
        if name.startswith("language."):
            assert torch.equal(x, language[name]), name
        if name.startswith("vision."):
            assert torch.equal(x, vision[name]), name
    assert not torch.equal(got["projector.up.weight"], language["projector.up.weight"])
    made, theirs = description(run), open_bundle(start / "run").bundle
    assert made.template == theirs.template
    assert made.tokenizer.get_vocab() == theirs.tokenizer.get_vocab()
    loop.train(run)


def test_weights_that_do_not_fit_are_refused_before_a_run_begins(start: Path, tmp_path: Path) -> None:
    own = tiny_run(start)
    assert own.model.config is not None
    vision = own.model.config.vision.model_copy(update={"layers": own.model.config.vision.layers + 1})
    config = own.model.config.model_copy(update={"vision": vision})
    weights = {"vision": str(start / "run")}
    run = own.model_copy(update={"model": own.model.model_copy(update={"config": config, "weights": weights})})
    layers = own.model.config.vision.layers
    with pytest.raises(
        Refused, match=rf"the vision of .*run is not the vision of this model: layers is {layers} there and {layers + 1} here"
    ):
        description(run)
    marked = tiny_run(start, f"model.weights={{language: {start / 'run'}}}", "model.template=qwen2.5")
    (line,) = (line for line in settings_problems(marked) if "tokenizer" in line)
    assert line.endswith("the language model has 300 rows; leave template out, or use the tokenizer that belongs to the model")
    gone = run.model_copy(update={"model": own.model.model_copy(update={"weights": {"language": str(tmp_path / "nothing")}})})
    with pytest.raises(Refused, match="nothing"):
        description(gone)


def test_budgets_are_not_settings_of_a_part(start: Path) -> None:
    """How many squares of an image are shown, and how many positions are used, is the run's to say; what the tower has seen is not."""
    for shown in ("model.config.vision.tiles=3", "model.config.language.max_positions=99"):
        description(tiny_run(start, f"model.weights={{vision: {start / 'run'}, language: {start / 'run'}}}", shown))
    with pytest.raises(Refused, match=r"mean is \(0\.5, 0\.5, 0\.5\) there"):
        description(tiny_run(start, f"model.weights={{vision: {start / 'run'}}}", "model.config.vision.mean=[0.4, 0.5, 0.5]"))


def test_a_tower_is_taken_from_a_folder_without_a_tokenizer(start: Path, tmp_path: Path) -> None:
    hub = HUB["Qwen/Qwen3-VL-2B-Instruct"](tmp_path / "hub")
    opened = open_bundle(hub)
    shutil.copytree(hub, tmp_path / "bare", ignore=shutil.ignore_patterns("*token*", "*vocab*", "merges*", "*.jinja"))
    model = {"config": opened.bundle.config, "weights": {"vision": str(tmp_path / "bare")}, "template": "plain"}
    run = tiny_run(start, f"out={tmp_path / 'run'}")
    got = began(run.model_copy(update={"model": run.model.model_copy(update=model)}), tmp_path / "run")
    whole = dict(load(opened, "cpu").model.named_parameters())
    tower = {name for name in got if name.startswith("vision.")}
    assert tower and all(torch.equal(got[name], whole[name]) for name in tower)
    assert not torch.equal(got["language.embed.weight"], whole["language.embed.weight"])


def test_another_tokenizer_than_the_language_models_is_refused(start: Path, tmp_path: Path) -> None:
    """Its ids would get the embeddings of other tokens."""
    train_bpe(["other texts give other merges, other texts"] * 3, 290, template_named("plain")).save_pretrained(str(tmp_path / "other"))
    weights = f"model.weights={{language: {start / 'run'}}}"
    with pytest.raises(Refused, match=rf"other is not the tokenizer of the language model in {start / 'run'}: \d+ ids are other tokens"):
        description(tiny_run(start, weights, f"model.tokenizer={tmp_path / 'other'}"))
    description(tiny_run(start, weights, f"model.tokenizer={start / 'run' / 'model'}"))
    description(tiny_run(start, f"model.weights={{vision: {start / 'run'}}}", f"model.tokenizer={tmp_path / 'other'}"))


@pytest.mark.parametrize("origin", ["model={{path: {}}}", "model.weights={{language: {}}}"])
def test_a_run_resumes_without_the_folders_that_it_started_from(
    start: Path, tmp_path: Path, origin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(start / "run", tmp_path / "origin")
    settings = (origin.format(tmp_path / "origin"), "stages.whole.steps=2", "stages.adapt.steps=2")
    run = tiny_run(start, *settings, f"out={tmp_path / 'run'}")
    with monkeypatch.context() as patch:
        stopped_at(patch, {3})
        with pytest.raises(Stopped):
            loop.train(run)
    shutil.rmtree(tmp_path / "origin")
    assert list(settings_problems(run)) == []
    loop.train(run)
    newest = store.newest(tmp_path / "run" / "checkpoints")
    assert newest is not None
    assert newest.step == 4
    another = tiny_run(start, *settings, f"out={tmp_path / 'another'}")
    assert any("origin is not a directory" in line for line in settings_problems(another))


def test_what_starts_from_a_run_of_its_own_goes_on_from_it(start: Path) -> None:
    """The words of `onward` undo what says where the run's own weights came from: no weight is random or read again."""
    for origin in (f"model={{path: {start / 'run'}, fresh: [projector]}}", f"model.weights={{vision: {start / 'run'}}}"):
        recipe = override(tiny_recipe(start), [origin])
        words = onward(run_of(recipe, "tiny"), start / "run").rpartition(": ")[2]
        model = run_of(override(recipe, shlex.split(words)), "tiny").model
        assert (model.path, model.fresh, model.weights, model.config) == (str(start / "run"), (), {}, None)


def test_biases_of_experts_come_with_the_language_model_of_a_run(tmp_path: Path) -> None:
    loop.train(tiny_run(tmp_path, *EXPERTS, "stages.whole.steps=2", "stages.adapt.steps=1"))
    source = open_bundle(tmp_path / "run").checkpoint
    assert source is not None
    biases = {name: x for name, x in source.load("model").items() if name.endswith("bias_E")}
    assert any(x.any() for x in biases.values())
    own = [*EXPERTS, "stages.whole.experts=null"]
    for number, (origin, want) in enumerate(
        [
            (f"model={{path: {tmp_path / 'run'}}}", biases),
            (f"model={{path: {tmp_path / 'run'}, fresh: [language]}}", {}),
            (f"model.weights={{language: {tmp_path / 'run'}}}", biases),
            (f"model.weights={{vision: {tmp_path / 'run'}}}", {}),
        ]
    ):
        words = own if "weights" in origin else own[1:]
        got = began(tiny_run(tmp_path, *words, origin, f"out={tmp_path / str(number)}"), tmp_path / str(number))
        assert {name for name in got if name.endswith("bias_E")} == want.keys(), origin
        assert all(torch.equal(got[name], x) for name, x in want.items())


def test_a_setting_that_is_left_out_is_the_same_as_what_it_stands_for(start: Path, tmp_path: Path) -> None:
    """An export states the projector's hidden width, which the recipe of its run leaves out."""
    run = tiny_run(
        start, f"model.weights={{projector: {start / 'run'}}}", f"out={tmp_path / 'run'}", "model.config.projector.hidden_size=16"
    )
    whole = dict(load(open_bundle(start / "run"), "cpu").model.named_parameters())
    got = began(run, tmp_path / "run")
    assert torch.equal(got["projector.up.weight"], whole["projector.up.weight"])


def test_the_order_of_fresh_parts_is_no_difference(tmp_path: Path) -> None:
    runs = [tiny_run(tmp_path, f"model={{path: x, fresh: {parts}}}") for parts in ("[projector, vision]", "[vision, projector, vision]")]
    assert runs[0] == runs[1]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("model.fresh=[projector]", "fresh names parts of the model in path, and there is no path"),
        ("model={path: x, weights: {language: y}}", "weights belongs to a new model"),
    ],
)
def test_settings_that_contradict_are_refused(tmp_path: Path, setting: str, message: str) -> None:
    with pytest.raises(Refused, match=message):
        tiny_run(tmp_path, setting)


class Kept:
    """Tensors in memory, to be read in parts."""

    def __init__(self, tensors: dict[str, torch.Tensor]):
        self.meta = tensors

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        x = self.meta[name]
        return x if box is None else x[box.within(Box((0,) * x.ndim, tuple(x.shape)))]


@pytest.mark.parametrize("dora", [False, True])
def test_a_part_of_a_merged_weight_is_that_of_the_whole(dora: bool) -> None:
    """Some rows and some columns, as FSDP and tensor parallelism cut a weight; the length that DoRA sets is of whole rows."""
    layer = LoRALinear(Linear(8, 6, bias=False), LoRA(rank=2, alpha=6, dora=dora, targets="all-linear"), "x")
    rng = torch_rng_for(0, "merged")
    tensors = {f"x.{name}": torch.randn(x.shape, generator=rng) for name, x in layer.named_parameters()}
    whole = merge(tensors["x.weight"], tensors["x.lora_A"], tensors["x.lora_B"], layer.scale, tensors.get("x.lora_magnitude"))
    update = updates_of(nn.ModuleDict({"x": layer}))["x.weight"]
    part = merged_part(Kept(tensors), "x.weight", Box((2, 4), (3, 4)), (6, 8), update, torch.device("cpu"))
    torch.testing.assert_close(part, whole[2:5, 4:8])
