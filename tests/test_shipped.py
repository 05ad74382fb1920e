"""Every shipped recipe from import to export, by the commands of its own head, on tiny checkpoints of the classes that they name.

A head's commands, from one `eyeline import` to the next, are a way to use the recipe, and a case here: a recipe that comes along
tomorrow is found by itself. The checkpoints are transformers' own, every tensor random, in folders of the models' names.
"""

import io
import json
import os
import shlex
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import SiglipVisionModel

from eyeline.bundle.bundle import Bundle, open_bundle
from eyeline.bundle.fill import load
from eyeline.core.batch import Document
from eyeline.core.files import read_lines, read_object
from eyeline.core.plan import PARTS, part_of
from eyeline.models import Model, llava, spec
from eyeline.recipes.read import read_recipe, shipped_recipes
from eyeline.train import loop
from eyeline.train.run import Adapted, Full, Run
from tests import ranks as ranks_of_tests
from tests.bundle.tiny import asked, our_logits
from tests.command import Command, Done
from tests.distill.scripted import scripted
from tests.forked import run_command
from tests.hub import HUB, resize, write_mine
from tests.llava_pretrain import write_llava_pretrain
from tests.models.cases.llava import inputs_of as llava_inputs
from tests.models.cases.llava import pixels
from tests.models.cases.qwen3_vl import inputs_of as qwen_inputs
from tests.models.parity import last_bits_moved

# ---- the data sets, tiny


def write_instruct(folder: Path) -> None:
    """LLaVA-Instruct-150K and the images of COCO: several turns on one image, of several shapes."""
    rng = np.random.default_rng(1)
    (folder / "coco/train2017").mkdir(parents=True)
    (folder / "LLaVA-Instruct-150K").mkdir()
    rows = []
    for n in range(30):
        pixels = rng.integers(0, 256, (1, 1, 3)) * np.ones((12 + 5 * (n % 3), 14 + 3 * (n % 5), 1))
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"coco/train2017/{n:012d}.jpg", quality=90)
        said = ["What is it?\n<image>", "A plain image.", "Which number?", f"Number {n}."]
        turns = [{"from": ("human", "gpt")[i % 2], "value": text} for i, text in enumerate(said)]
        rows.append({"id": f"{n:012d}", "image": f"{n:012d}.jpg", "conversations": turns})
    (folder / "LLaVA-Instruct-150K/llava_instruct_150k.json").write_text(json.dumps(rows))


def write_cauldron(folder: Path) -> None:
    """The Cauldron: a folder of Parquet a set; some images are larger than the tower's square, some rows have none."""
    for name in ("ai2d", "vqav2"):
        rng = np.random.default_rng(len(name))
        rows = []
        for n in range(24):
            file = io.BytesIO()
            pixels = rng.integers(0, 256, (1, 1, 3)) * np.ones((12 + 9 * (n % 4), 16 + 8 * (n % 3), 1))
            Image.fromarray(pixels.astype(np.uint8)).save(file, "png")
            images = [{"bytes": file.getvalue(), "path": None}] if n % 6 else []
            rows.append({"images": images, "texts": [{"user": f"Which number, {n}?", "assistant": f"It is {n}.", "source": name}]})
        (folder / "the_cauldron" / name).mkdir(parents=True)
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "the_cauldron" / name / "train-00000-of-00001.parquet")


# ---- the commands


def ways(recipe: str) -> list[list[list[str]]]:
    """The commands in a recipe's head, from one import to the next."""
    head = shipped_recipes()[recipe].read_text().split("\n\nname:")[0].replace("\\\n#", "")
    commands = [shlex.split(line[1:])[1:] for line in head.splitlines() if line.startswith("#   eyeline ")]
    starts = [n for n, words in enumerate(commands) if words[0] == "import"] or [0]
    return [commands[a:b] for a, b in zip(starts, [*starts[1:], len(commands)], strict=True)]


SEVERAL_RANKS = ("qwen3-vl-8b-fsdp", "qwen3-vl-30b-a3b-ep", "qwen3.5-35b-a3b-3d")
CASES = [(recipe, n) for recipe in shipped_recipes() if recipe not in SEVERAL_RANKS for n in range(len(ways(recipe)))]
SLOW = {  # a case -> the quick test that does much the same
    ("easyvqa-tiny", 0): "test_end_to_end.py, and the guide to a first run in test_docs.py",
    ("qwen3-vl-full", 1): "qwen3-vl-full dense, qwen3-vl-lora with experts",
    ("qwen3-vl-lora", 0): "qwen3-vl-full dense, qwen3-vl-lora with experts",
    ("qwen3.5-full", 0): "qwen3.5-full with experts, qwen3.5-lora dense",
    ("qwen3.5-lora", 1): "qwen3.5-full with experts, qwen3.5-lora dense",
}


def shortened(run: Run) -> list[str]:
    """Overrides with which a recipe fits a test: its stages, data, precision and evaluation stay what they are."""
    out = ["device=cpu", "threads=1", "validation_steps=4", "save_steps=100"]
    if run.evaluation is not None:
        out += ["evaluation.sources.0.limit=3", "evaluation.max_new_tokens=3"]
    for stage in run.stages:
        out += [f"stages.{stage.name}.{change}" for change in ("steps=8", "epochs=null", "data.validation_fraction=0.2", "data.workers=0")]
        out += [f"stages.{stage.name}.data.sources.{n}.limit=40" for n in range(len(stage.data.sources))]
        out.append(f"stages.{stage.name}.batch={{max_tokens: 320, max_patches: 400, packs_per_step: 2}}")
        out += [f"stages.{stage.name}.trains.{part}.lr=0.01" for part in stage.trains]  # few steps must show
    return out


def distilled(words: list[str], eyeline: Command) -> None:
    """A command of a head that asks a teacher, asked of one on this machine that says the same to everything."""
    said = "I look at the image, then at the question, and I see that the number is named in the question itself."
    with scripted(lambda body: f"{said} ({body['seed']})\nAnswer: {body['seed']}") as server:
        few = ("distill.sources.0.limit=20", "distill.accept={by: any}", f"distill.teacher.urls=['{server.url}']")
        passed(eyeline(*words, *few))
    assert server.asked


def passed(done: Done) -> Done:
    assert done.code == 0, done.out + done.err
    return done


@pytest.fixture
def world(tmp_path: Path) -> None:
    """Every data set."""
    write_llava_pretrain(tmp_path / "data/LLaVA-Pretrain")
    write_instruct(tmp_path / "data")
    write_cauldron(tmp_path / "data")
    write_mine(tmp_path)


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize(
    ("recipe", "way"),
    [pytest.param(*case, id=f"{case[0]}-{case[1]}", marks=pytest.mark.slow if case in SLOW else ()) for case in CASES],
)
def test_from_import_to_export(recipe: str, way: int, eyeline: Command, tmp_path: Path) -> None:
    commands = ways(recipe)[way]
    for name in {words[n + 1] for words in commands for n, word in enumerate(words) if word in ("--model", "--vision", "--language")}:
        HUB[name](tmp_path / name)
    [overrides] = [words[2:] for words in commands if words[:2] == ["train", recipe]]
    run = read_recipe(recipe, overrides)
    short = shortened(run)
    run = read_recipe(recipe, [*overrides, *short])

    for words in commands:
        if words[0] == "import":
            passed(eyeline(*words))
            resize(tmp_path / words[1] / "preprocessor_config.json")
        if words[0] == "distill":
            distilled(words, eyeline)
    assert "no problems" in passed(eyeline("check", recipe, *overrides, *short)).out
    passed(eyeline("train", recipe, *overrides, *short))
    folder = tmp_path / "runs" / run.name
    learned(folder, run)
    if run.model.path is not None:
        changed(loaded(tmp_path / run.model.path), loaded(folder), run)

    if run.evaluation is not None:
        passed(eyeline("eval", f"runs/{run.name}"))
        assert json.loads((folder / "eval.json").read_text())["questions"] == 3
    passed(eyeline("export", f"runs/{run.name}", "exported"))
    image = ["--image", "data/coco/train2017/000000000000.jpg", "--ask", "What is it?", "--max-new-tokens", "5"]
    assert passed(eyeline("chat", f"runs/{run.name}", *image)).out == passed(eyeline("chat", "exported", *image)).out

    if any(isinstance(trained, Adapted) for trained in run.stages[-1].trains.values()):
        passed(eyeline("export", f"runs/{run.name}", "apart", "--adapter"))
        saved = read_object(tmp_path / "apart" / "adapter" / "adapter_config.json")["modules_to_save"]
        assert bool(saved) is any(isinstance(stage.trains.get("projector"), Full) for stage in run.stages)

    exported_alike(folder, tmp_path)


# the ranks that train, stop and resume, with the mesh of each
MESHES = {
    "qwen3-vl-8b-fsdp": (2, "mesh.dp_shard=-1", 1, "mesh.balance_images=false"),
    "qwen3-vl-30b-a3b-ep": (2, "mesh.ep=2", 2, "mesh={ep: 1}"),
    "qwen3.5-35b-a3b-3d": (4, "mesh.ep=2", 2, "mesh={dp_shard: 2}"),
}


@pytest.mark.ranks
@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("recipe", [pytest.param(name, marks=() if "3d" in name else pytest.mark.slow) for name in SEVERAL_RANKS])
def test_a_recipe_of_several_ranks_from_import_to_export(recipe: str, eyeline: Command, tmp_path: Path) -> None:
    """The mesh of the recipe, with axes as long as a tiny model has heads and experts; it resumes on another mesh."""
    [[imported, checked, *_]] = ways(recipe)
    HUB[imported[3]](tmp_path / imported[3])
    passed(eyeline(*imported))
    resize(tmp_path / imported[1] / "preprocessor_config.json")
    ranks, mesh, fewer, other = MESHES[recipe]
    short = [line for line in shortened(read_recipe(recipe)) if "batch=" not in line]
    short += [mesh, "save_minutes=null", "stages.tune.batch={max_tokens: 320, max_patches: 400, packs_per_step: 4}"]
    run = read_recipe(recipe, short)
    assert "no problems" in passed(eyeline(*checked[:2], *short, "--world-size", str(ranks))).out
    assert trained_on(ranks, recipe, short, tmp_path, stop=3) == [75] * ranks
    assert trained_on(fewer, recipe, [*short, other], tmp_path) == [0] * fewer
    folder = tmp_path / "runs" / run.name
    learned(folder, run)
    assert [line["world_size"] for line in read_lines(folder / "metrics.jsonl") if line["kind"] == "start"] == [ranks, fewer]
    assert run.model.path is not None
    changed(loaded(tmp_path / run.model.path), loaded(folder), run)
    passed(eyeline("export", f"runs/{run.name}", "exported"))
    exported_alike(folder, tmp_path)


def trained_on(count: int, recipe: str, overrides: list[str], folder: Path, stop: int | None = None) -> list[int]:
    """The exit codes of `eyeline train` on so many ranks; after step `stop` a signal reaches the first."""

    def work() -> None:
        os.chdir(folder)
        update, done = loop.update, [0]

        def counted(*args: Any, **how: Any) -> Any:
            report = update(*args, **how)
            done[0] += 1
            if done[0] == stop and os.environ["RANK"] == "0":
                os.kill(os.getpid(), signal.SIGTERM)
            return report

        loop.update = counted
        run_command("train", recipe, *overrides)

    return ranks_of_tests.wait(ranks_of_tests.start(count, work, folder / f"store-{count}-{stop}"))


def exported_alike(folder: Path, out: Path) -> None:
    """The export in transformers gives our answers."""
    bundle, model = loaded(folder)
    document = asked(bundle, spec(bundle.config).image, out, size=24)
    assert len(document.images) >= 2
    ours, theirs = our_logits(model, document), their_logits(out / "exported", bundle, document)
    moved = our_logits(last_bits_moved(model), document)  # a tiny model after steps of this size may be badly conditioned
    tolerance = max(5e-5 * theirs.abs().max(), 2 * (ours - moved).abs().max())
    assert (ours - theirs).abs().max() < tolerance


def test_slow_cases_are_of_recipes_with_another_case() -> None:
    quick = set(CASES) - SLOW.keys()
    assert {recipe for recipe, _ in CASES} - {recipe for recipe, _ in quick} == {"easyvqa-tiny"}


def test_a_heads_commands_are_found() -> None:
    """Two ways of a recipe for both kinds of a family; a continued line is one command."""
    first, second = ways("llava-siglip2-smollm2")
    assert [words[0] for words in first] == ["import", "check", "train"]
    assert [words[0] for words in second] == ["import", "train"]
    assert second[0][-4:] == ["--projector", "linear", "--tiles", "5"]


@pytest.mark.parametrize("recipe", shipped_recipes())
def test_documents_list_it(recipe: str) -> None:
    root = Path(__file__).parent.parent
    for document in ("README.md", "docs/recipes.md"):
        assert f"{recipe}.yaml)" in (root / document).read_text(), document


def test_my_data_needs_its_path_and_nothing_else(eyeline: Command, tmp_path: Path) -> None:
    """The recipe that `eyeline recipe` prints, with one line changed, trains three epochs on a file of thirty samples."""
    HUB["Qwen/Qwen3-VL-2B-Instruct"](tmp_path / "hub")
    passed(eyeline("import", "models/qwen3-vl-2b", "--model", "hub", "--max-pixels", str(40**2), "--min-pixels", str(8**2)))
    write_mine(tmp_path)
    text = passed(eyeline("recipe", "my-data")).out
    [line] = [line for line in text.splitlines() if "# your file or folder" in line]
    (tmp_path / "mine.yaml").write_text(text.replace(line, "        - path: mine.json"))
    passed(eyeline("check", "mine.yaml"))
    few = "stages.tune.batch={max_tokens: 1024, max_patches: 2048}"  # a pack is padded to its budget
    passed(eyeline("train", "mine.yaml", "device=cpu", "threads=1", few))
    epochs = [one["epoch"] for one in read_lines(tmp_path / "runs" / "my-data" / "metrics.jsonl") if one["kind"] == "step"]
    assert epochs[-1] == 3


def test_recipe_prints_what_ships_and_refuses_the_rest(eyeline: Command) -> None:
    for name, path in shipped_recipes().items():
        assert passed(eyeline("recipe", name)).out == path.read_text()
    listed = passed(eyeline("recipe")).out
    assert [line.partition(":")[0] for line in listed.splitlines()] == list(shipped_recipes())
    assert "qwen3-vl-full: Qwen3-VL, fine-tuned in full" in listed
    wrong = eyeline("recipe", "my-dat")
    assert wrong.code == 2
    assert "Did you mean 'my-data'?" in wrong.err


# ---- what came of it


def learned(folder: Path, run: Run) -> None:
    """In every stage the loss is finite and falls, and validation sees it."""
    lines = read_lines(folder / "metrics.jsonl")
    for stage in run.stages:
        losses = [line["loss"] for line in lines if line["kind"] == "step" and line["stage"] == stage.name]
        assert np.isfinite(losses).all()
        assert len(losses) == 8
        assert np.mean(losses[-3:]) < losses[0]
        assert any(line["kind"] == "validation" and line["stage"] == stage.name for line in lines)


def loaded(folder: Path) -> tuple[Bundle, Model]:
    """In float32, adapters merged."""
    found = open_bundle(folder)
    model = load(found, "cpu").model
    return found.bundle, model.eval()


def changed(before: tuple[Bundle, Model], after: tuple[Bundle, Model], run: Run) -> None:
    """Weights that were to learn are others now, and all that were not are what they were, in bfloat16 where that is kept."""
    how = {part: [stage.trains[part] for stage in run.stages if part in stage.trains] for part in PARTS}
    old, new = dict(before[1].named_parameters()), dict(after[1].named_parameters())
    assert old.keys() == new.keys()
    for name, x in old.items():
        layer, _, leaf = name.rpartition(".")
        linear = leaf == "weight" and isinstance(before[1].get_submodule(layer), nn.Linear)
        learns = any(isinstance(trained, Full) or (linear and _adapts(trained, layer)) for trained in how[part_of(name)])
        kept = torch.equal(new[name], x) or torch.equal(new[name], x.bfloat16().float())
        assert kept != learns, f"{name}: {'unchanged' if kept else 'changed'}, contrary to the recipe"


def _adapts(trained: Adapted, layer: str) -> bool:
    short = layer.rpartition(".")[2]
    return (
        short != "shared_gate" if trained.targets == "all-linear" else short in [target.removesuffix("_proj") for target in trained.targets]
    )  # the gate routes, to one expert


@torch.no_grad()
def their_logits(folder: Path, bundle: Bundle, document: Document) -> Tensor:
    """Answers of the export, from the class of transformers that it names; or from those of its parts, joined by hand."""
    c = bundle.config
    if (folder / "vision").exists():
        assert isinstance(c, llava.Config)
        return of_parts(folder, c, document)
    cls = getattr(transformers, json.loads((folder / "config.json").read_text())["architectures"][0])
    model, report = cls.from_pretrained(folder, attn_implementation="eager", output_loading_info=True, local_files_only=True)
    assert not any(report[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    inputs = llava_inputs(c) if isinstance(c, llava.Config) else qwen_inputs(c.vision)
    return model.eval()(**inputs(document)).logits[0]


def of_parts(folder: Path, c: llava.Config, document: Document) -> Tensor:
    tower = SiglipVisionModel.from_pretrained(folder / "vision").eval()
    language = transformers.AutoModelForCausalLM.from_pretrained(folder / "language").eval()
    features_NPD = tower(torch.stack([pixels(image, c) for image in document.images])).last_hidden_state
    r, cells = c.projector.shuffle, c.vision.position_grid // c.projector.shuffle
    grid = features_NPD.unflatten(1, (cells, r, cells, r)).transpose(2, 3)  # [N, cell's row, cell's column, y, x, D]
    linear = load_file(folder / "projector.safetensors")
    visual_MD = F.linear(grid.reshape(len(document.images) * cells**2, -1), linear["out.weight"], linear["out.bias"])
    embedded_TD = language.get_input_embeddings()(torch.from_numpy(document.tokens_T).long())
    embedded_TD[torch.from_numpy(document.visual_M).long()] = visual_MD
    return language(inputs_embeds=embedded_TD[None]).logits[0]
