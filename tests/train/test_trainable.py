"""What a stage trains changes, all of it, and nothing else does: combinations of parts, full and LoRA, and again after a save."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import eyeline.train.loop as loop
from eyeline.bundle.bundle import open_bundle
from eyeline.bundle.exporting import export, weights
from eyeline.bundle.fill import load, load_for_generation
from eyeline.checkpoint import store
from eyeline.core.plan import PARTS
from eyeline.parallel.launch import machine
from eyeline.parallel.mesh import MeshSizes
from eyeline.parallel.shares import Shares
from eyeline.recipes.problems import settings_problems
from eyeline.train.memory import Memory, memory_of
from eyeline.train.optim import AdamW, Muon
from eyeline.train.run import Run
from eyeline.train.stage import model_of
from eyeline.train.start import start_run
from eyeline.train.trainable import plan_of
from tests.train.recipe import tiny_run

FULL = "{how: full, lr: 0.01}"
LORA = "{how: lora, lr: 0.02, rank: 2, alpha: 4, dropout: 0.3, targets: all-linear}"
WAYS = [ways for ways in itertools.product((None, FULL, LORA), repeat=3) if any(ways)]


def names(ways: tuple[str | None, ...]) -> str:
    return "-".join({None: "frozen", FULL: "full", LORA: "lora"}[way] for way in ways)


def in_pairs(ways: tuple[str | None, ...]) -> bool:
    """Return whether it is one of nine combinations in which every two parts have every pair of ways."""
    return sum(map((None, FULL, LORA).index, ways)) % 3 == 1


CASES = [
    pytest.param(ways, precision, id=f"{names(ways)}-{precision}", marks=[] if in_pairs(ways) else pytest.mark.slow)
    for precision in ("fp32", "bf16")
    for ways in WAYS
]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step of everything: in a fresh model some layers are zero, and would hide what does not arrive."""
    folder = tmp_path_factory.mktemp("start")
    loop.train(tiny_run(folder, "stages.whole.steps=2", "stages.adapt.steps=1"))
    return folder


def from_start(start: Path, out: Path, ways: tuple[str | None, ...], *overrides: str) -> Run:
    trains = ", ".join(f"{part}: {way}" for part, way in zip(PARTS, ways, strict=True) if way)
    run = tiny_run(
        start, f"model={{path: {start / 'run'}}}", f"out={out}", f"stages.whole.trains={{{trains}}}", "stages.whole.steps=2", *overrides
    )
    return run.model_copy(update={"stages": run.stages[:1]})


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    newest = store.newest(folder / "checkpoints")
    assert newest is not None
    return newest.load("model", "frozen")


def before_training(run: Run, folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor, adapters included, of the model that the stage begins with."""
    here = machine("cpu", 1)
    folder.mkdir()
    model = model_of(run, start_run(run, folder), here, None, 0).model
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize(("ways", "precision"), CASES)
def test_all_that_trains_changes_and_nothing_else(start: Path, tmp_path: Path, ways: tuple[str | None, ...], precision: str) -> None:
    """With blocks recomputed and a checkpoint after the first of two steps: what was saved in between must not end training."""
    run = from_start(
        start, tmp_path / "run", ways, f"precision={precision}", "save_steps=1", "stages.whole.gradient_checkpointing=[vision, language]"
    )
    before = before_training(run, tmp_path / "before")
    loop.train(run)
    saved = sorted((tmp_path / "run" / "checkpoints").iterdir())
    first, second = (store.verify(path).load("model", "frozen") for path in saved)
    assert before.keys() == first.keys() == second.keys()
    for name, tensor in before.items():
        way = dict(zip(PARTS, ways, strict=True))[name.split(".")[0]]
        trains = way == FULL or (way == LORA and name.endswith(("lora_A", "lora_B")))
        if name.endswith("lora_A"):  # it has no gradient in the first step, while B is zero, and may be decayed
            assert torch.equal(first[name], second[name]) != trains, name
            continue
        unchanged = [torch.equal(tensor, first[name]), torch.equal(first[name], second[name])]
        assert unchanged == [not trains] * 2, f"{name}: unchanged {unchanged} by the two steps, and trains is {trains}"
        assert tensor.dtype == first[name].dtype == second[name].dtype


def test_stage_border_merges_adapters_that_do_not_continue(start: Path, tmp_path: Path) -> None:
    """LoRA, the same LoRA, LoRA of another rank, full training: each stage begins with what the one before it ended with."""
    run = from_start(start, tmp_path / "run", (LORA, FULL, LORA), "save_total_limit=9")
    first = run.stages[0]
    language = first.trains["language"].model_copy(update={"rank": 3})
    stages = [
        first,
        first.model_copy(update={"name": "same"}),
        first.model_copy(update={"name": "other", "trains": first.trains | {"language": language}}),
        first.model_copy(update={"name": "full", "trains": from_start(start, tmp_path, (FULL, FULL, FULL)).stages[0].trains}),
    ]
    run = run.model_copy(update={"stages": tuple(stages)})
    loop.train(run)
    saved = sorted((tmp_path / "run" / "checkpoints").iterdir())
    assert len(saved) == len(stages)
    home = start_run(run, tmp_path / "run")
    for border, path in enumerate(saved[:-1], 1):
        checkpoint = store.verify(path)
        ended = load(replace(open_bundle(tmp_path / "run"), checkpoint=checkpoint), "cpu").model
        model = model_of(run, home, machine("cpu", 1), checkpoint, border).model
        for name, x in weights(model, True, torch.float32):
            torch.testing.assert_close(x, ended.get_parameter(name).detach(), rtol=0, atol=1e-6, msg=f"{name} at border {border}")
        bs = [p for name, p in model.named_parameters() if name.endswith("lora_B")]
        assert bool(bs) == (border < 3)
        assert all(bool(p.any()) == (border == 1) for p in bs), "the same adapters continue, others start at zero"


def test_fresh_adapters_have_the_seed_of_their_part(start: Path, tmp_path: Path) -> None:
    """The same recipe begins with the same adapters, another seed with others; parts do not share them."""
    run = from_start(start, tmp_path / "run", (LORA, None, LORA))
    folder = tmp_path / "a"
    folder.mkdir()
    made = {}
    for seed in (0, 0, 1):
        home = start_run(run, folder)
        model = model_of(run.model_copy(update={"seed": seed}), home, machine("cpu", 1), None, 0).model
        made.setdefault(seed, []).append({n: p.detach() for n, p in model.named_parameters() if n.endswith("lora_A")})
    (one, same), (other,) = made[0], made[1]
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not any(torch.equal(one[name], other[name]) for name in one)


def test_a_fresh_model_has_the_seed_of_its_run(tmp_path: Path) -> None:
    made = []
    for n, seed in enumerate((3, 3, 4)):
        run = tiny_run(tmp_path, f"seed={seed}")
        (tmp_path / str(n)).mkdir()
        model = model_of(run, start_run(run, tmp_path / str(n)), machine("cpu", 1), None, 0).model
        made.append(model.projector.up.weight)
    assert torch.equal(made[0], made[1])
    assert not torch.equal(made[0], made[2])


def test_bf16_keeps_what_a_later_stage_trains_in_fp32(start: Path, tmp_path: Path) -> None:
    """Rounded while it is frozen, it would start_run that stage with other values than it had."""
    run = tiny_run(
        start,
        f"out={tmp_path / 'run'}",
        "precision=bf16",
        "stages.whole.trains={projector: {how: full, lr: 0.01}}",
        "stages.adapt.trains={vision: {how: full, lr: 0.01}}",
        "save_total_limit=9",
    )
    loop.train(run)
    saved = sorted((tmp_path / "run" / "checkpoints").iterdir())
    frozen = [store.verify(path).load("model", "frozen").items() for path in saved]
    dtypes = [{name.split(".")[0]: x.dtype for name, x in tensors if x.ndim > 1} for tensors in frozen]
    assert {x.dtype for tensors in frozen for _, x in tensors if x.ndim == 1} == {torch.float32}
    half, single = torch.bfloat16, torch.float32
    assert dtypes == [{"projector": single, "vision": single, "language": half}, {"projector": half, "vision": single, "language": half}]


def test_a_model_that_is_only_adapted_is_never_whole_in_fp32(start: Path, tmp_path: Path) -> None:
    """Neither where it begins from a folder nor where it is resumed: a large one would not fit. The values are those of rounding once."""
    opened = open_bundle(start / "run")
    whole = load(opened, "cpu").model
    export(opened.bundle, whole, tmp_path / "folder")
    run = from_start(start, tmp_path / "run", (None, FULL, LORA), "precision=bf16")
    run = run.model_copy(update={"model": run.model.model_copy(update={"path": str(tmp_path / "folder")})})
    (tmp_path / "run").mkdir()
    home = start_run(run, tmp_path / "run")
    model = model_of(run, home, machine("cpu", 1), None, 0).model
    for name, p in model.named_parameters():
        if "lora_" in name:
            continue
        half = p.ndim > 1 and not name.startswith("projector.") and "positions" not in name
        assert p.dtype == (torch.bfloat16 if half else torch.float32), name
        assert torch.equal(p, whole.get_parameter(name).to(p.dtype)), name

    loop.train(run)
    checkpoint = store.newest(tmp_path / "run" / "checkpoints")
    assert checkpoint is not None
    resumed = model_of(run, home, machine("cpu", 1), checkpoint, 0).model
    assert {x.dtype for x in checkpoint.load("model").values()} == {torch.float32}, "what trains is kept in full"
    stored = checkpoint.load("model", "frozen")
    assert {name: p.dtype for name, p in resumed.named_parameters()} == {name: x.dtype for name, x in stored.items()}
    assert all(torch.equal(p, stored[name]) for name, p in resumed.named_parameters())


@pytest.mark.parametrize("ways", [(FULL, FULL, FULL), (LORA, FULL, LORA), (None, None, LORA)], ids=names)
@torch.no_grad()
def test_generating_model_stores_weights_in_compute_dtype(start: Path, tmp_path: Path, ways) -> None:
    """Cast once where it is loaded, after adapters were merged in float32: what is held is what each use would have made of it."""
    for precision in ("fp32", "bf16"):
        loop.train(from_start(start, tmp_path / precision, ways, f"precision={precision}"))
        opened = open_bundle(tmp_path / precision)
        whole = load(opened, "cpu").model
        for dtype in (torch.float32, torch.bfloat16):
            model = load_for_generation(opened, torch.device("cpu"), dtype)
            assert not model.training
            held = dict(model.named_parameters())
            assert held.keys() == dict(whole.named_parameters()).keys(), "adapters are merged"
            for name, p in held.items():
                cast = p.ndim > 1 and "positions" not in name
                assert p.dtype == (dtype if cast else torch.float32), name
                assert torch.equal(p, whole.get_parameter(name).to(p.dtype)), name


def test_model_that_answers_from_a_folder_is_cast_once_too(start: Path, tmp_path: Path) -> None:
    opened = open_bundle(start / "run")
    whole = load(opened, "cpu").model
    export(opened.bundle, whole, tmp_path / "folder")
    model = load_for_generation(open_bundle(tmp_path / "folder"), torch.device("cpu"), torch.bfloat16)
    assert model.language.blocks[0].attn.q.weight.dtype == torch.bfloat16
    assert torch.equal(model.language.blocks[0].attn.q.weight, whole.language.blocks[0].attn.q.weight.bfloat16())


def changed(run: Run) -> set[str]:
    """The names of the tensors that differ from where the run's model started; adapters are left out."""
    before = load(open_bundle(Path(run.model.path or "")), "cpu").model
    after = tensors(Path(run.out or ""))
    return {name for name, p in before.named_parameters() if not torch.equal(p.to(after[name].dtype), after[name])}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_first_blocks_and_what_comes_before_them_stay_frozen(start: Path, tmp_path: Path, precision: str) -> None:
    """What is frozen of a part that trains is stored as frozen parts are; the tied head is the embedding."""
    run = from_start(start, tmp_path / "run", (None, None, "{how: full, lr: 0.01, freeze_layers: 1}"), f"precision={precision}")
    loop.train(run)
    moved = {name for name in changed(run) if name.startswith("language.")}
    every = {name for name in tensors(tmp_path / "run") if name.startswith("language.")}
    assert moved == {name for name in every if not name.startswith(("language.blocks.0.", "language.embed."))}
    kept = tensors(tmp_path / "run")["language.blocks.0.mlp.up.weight"]
    assert kept.dtype == (torch.float32 if precision == "fp32" else torch.bfloat16)


def test_what_a_later_stage_trains_is_not_rounded_before(start: Path, tmp_path: Path) -> None:
    run = from_start(start, tmp_path / "run", (None, None, "{how: full, lr: 0.01, freeze_layers: 1}"), "precision=bf16")
    whole = from_start(start, tmp_path / "x", (None, None, FULL)).stages[0].model_copy(update={"name": "all"})
    plan = plan_of(run.model_copy(update={"stages": (run.stages[0], whole)}), 0, open_bundle(start / "run").bundle.config)
    assert plan.table["language.blocks.0.mlp.up.weight"].stored == torch.float32


def test_modules_to_save_train_in_full_beside_adapters(start: Path, tmp_path: Path) -> None:
    lora = LORA.replace("}", ", modules_to_save: [embed_tokens, norm]}")
    run = from_start(start, tmp_path / "run", (None, None, lora), "precision=bf16")
    loop.train(run)
    moved = {name for name in changed(run) if store_dtype(tmp_path / "run", name) == torch.float32 and "language" in name}
    assert {"language.embed.weight", "language.norm.weight"} <= moved
    assert not [name for name in moved if "blocks" in name]
    opened = open_bundle(tmp_path / "run")
    assert opened.saved_modules() == ("language.embed", "language.norm")


def store_dtype(folder: Path, name: str) -> torch.dtype:
    return tensors(folder)[name].dtype


@pytest.mark.parametrize(
    ("language", "why"),
    [
        ("{how: full, lr: 0.01, freeze_layers: 2}", "freeze_layers=2 leaves none of its 2 blocks to train; lower it"),
        (
            LORA.replace("}", ", modules_to_save: [lm_head]}"),
            "lm_head is tied to embed_tokens in this model: they are one tensor. Name embed_tokens instead, and both train",
        ),
    ],
)
def test_settings_that_name_what_a_part_lacks_are_refused(start: Path, tmp_path: Path, language: str, why: str) -> None:
    assert [line for line in settings_problems(from_start(start, tmp_path / "run", (None, None, language))) if why in line]


def test_memory_of_a_stage_by_hand(start: Path, tmp_path: Path) -> None:
    """Frozen matrices in bfloat16, 2 bytes; what trains in float32 with its gradient, and two moments of AdamW or one of Muon."""
    run = from_start(start, tmp_path, (None, FULL, LORA), "precision=bf16")
    plan = plan_of(run, 0, open_bundle(start / "run").bundle.config)
    sizes = {name: (x.numel(), x.ndim > 1 and "positions" not in name) for name, x, _ in plan.tensors()}
    trained = sum(n for name, (n, _) in sizes.items() if name.startswith("projector.") or "lora_" in name)
    matrices = sum(n for name, (n, m) in sizes.items() if name.startswith("projector.") and name.endswith(".weight"))
    frozen = sum(n * (2 if m else 4) for name, (n, m) in sizes.items() if not name.startswith("projector.") and "lora_" not in name)
    assert memory_of(plan, AdamW()) == Memory(frozen + 4 * trained, 4 * trained, 8 * trained)
    assert memory_of(plan, Muon()) == Memory(frozen + 4 * trained, 4 * trained, 8 * trained - 4 * matrices)
    assert str(Memory(3 << 30, 1 << 29, 1 << 40)) == "weights 3.00 GiB, gradients 0.50 GiB, optimizer state 1,024.00 GiB"


def test_memory_with_gradients_that_are_summed_once_per_step(start: Path, tmp_path: Path) -> None:
    """Whole gradients, and a half of all else but what is exact."""
    run = from_start(start, tmp_path, (None, None, FULL))
    plan = plan_of(run, 0, open_bundle(start / "run").bundle.config)
    trained = sum(x.numel() for _, x, entry in plan.tensors() if entry.trains)
    two = Shares(MeshSizes(), 2)
    sharded, whole = memory_of(plan, AdamW(), two), memory_of(plan, AdamW(), two, whole_gradients=True)
    assert (whole.weights, whole.optimizer) == (sharded.weights, sharded.optimizer)
    assert sharded.gradients < whole.gradients == 4 * trained
