"""Run folders and descriptions: the weights that count are the checkpoint's, and what is not a model is refused with what was found."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from eyeline.bundle.bundle import Bundle, describe, open_bundle, read_description
from eyeline.bundle.fill import load
from eyeline.checkpoint import store
from eyeline.checkpoint.pieces import pieces_of
from eyeline.core.errors import Refused
from eyeline.core.plan import Part
from eyeline.models import llava
from eyeline.models.lora import LoRA, LoRALinear, adapters
from tests.bundle.tiny import asked, built, imported, our_logits, tokenizer
from tests.planned import adapt, merged


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Bundle]:
    return imported(tmp_path_factory.mktemp("parts"), "llava")


LORA: dict[Part, LoRA] = {
    "vision": LoRA(rank=2, alpha=5, targets=("q_proj", "up_proj")),
    "language": LoRA(rank=3, alpha=6, dropout=0.1, targets="all-linear"),
}


def trained(bundle: Bundle, seed: int, lora: dict[Part, LoRA]) -> llava.Model:
    model = built(bundle, seed)
    for part, settings in lora.items():
        adapt(model, llava.spec(bundle.config), part, settings, torch.Generator().manual_seed(seed))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("lora_B"):
                p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(seed)) * 0.3)
    return model


def save(
    run: Path, bundle: Bundle, seed: int, lora: dict[Part, LoRA], *, best: bool = False, half: bool = False, run_id: str = "a1"
) -> llava.Model:
    """A checkpoint as the training loop writes it."""
    model = trained(bundle, seed, lora)
    tensors = {n: x.bfloat16() if half and n.startswith("vision.") else x for n, x in model.named_parameters()}
    learns = {n for n in tensors if "lora_" in n or n.startswith("projector.")}
    files = {
        "model": pieces_of({n: x for n, x in tensors.items() if n in learns}),
        "frozen": pieces_of({n: x for n, x in tensors.items() if n not in learns}),
        "optimizer": pieces_of({"state/0": torch.zeros(3)}),
    }
    state = {"lora": {part: settings.model_dump(mode="json") for part, settings in lora.items()}, "stage": 0}
    store.save(
        run / "checkpoints",
        run=run_id,
        step=seed,
        files=files,
        state=state,
        save_total_limit=9,
        best=best,
    )
    return model


def a_run(folder: Path, bundle: Bundle) -> Path:
    describe(bundle, folder / "model")
    (folder / "env.json").write_text(json.dumps({"run": "a1"}))
    return folder


def logits(model: llava.Model, bundle: Bundle, folder: Path) -> torch.Tensor:
    return our_logits(model, asked(bundle, llava.spec(bundle.config).image, folder))


@pytest.mark.parametrize("lora", [{}, LORA], ids=["plain", "adapters"])
def test_a_run_is_opened_at_its_newest_or_best_checkpoint(parts: tuple[Path, Bundle], tmp_path: Path, lora: dict[Part, LoRA]) -> None:
    run = a_run(tmp_path / "run", parts[1])
    saved = {seed: save(run, parts[1], seed, lora, best=seed == 2) for seed in (1, 2, 3)}
    for which, seed in (("newest", 3), ("best", 2)):
        opened = open_bundle(run, which)
        assert opened.form is None
        assert opened.checkpoint is not None
        assert opened.checkpoint.step == seed
        model = load(opened, "cpu").model
        assert not adapters(model)
        want = logits(saved[seed], parts[1], tmp_path)
        torch.testing.assert_close(logits(model, parts[1], tmp_path), want, rtol=1e-4, atol=1e-4)
        want = merged(saved[seed], parts[1].config)
        assert all(torch.equal(x, want.get_parameter(name)) for name, x in model.named_parameters())


def test_adapters_may_stay_beside_the_weights(parts: tuple[Path, Bundle], tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", parts[1])
    saved = save(run, parts[1], 4, LORA)
    opened = open_bundle(run)
    model = load(opened, "cpu", keep_adapters=True).model
    assert adapters(model).keys() == adapters(saved).keys()
    assert all(torch.equal(x, dict(model.named_parameters())[name]) for name, x in saved.named_parameters())
    layer = model.get_submodule("language.blocks.0.attn.q")
    assert isinstance(layer, LoRALinear)
    assert (layer.scale, layer.dropout) == (2.0, 0.1)
    assert torch.equal(logits(model, parts[1], tmp_path), logits(saved, parts[1], tmp_path))


def test_parts_that_were_kept_in_half_precision_widen(parts: tuple[Path, Bundle], tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", parts[1])
    saved = save(run, parts[1], 4, {}, half=True)
    opened = open_bundle(run)
    model = load(opened, "cpu").model
    assert torch.equal(model.vision.norm.weight, saved.vision.norm.weight.bfloat16().float())
    assert torch.equal(model.projector.up.weight, saved.projector.up.weight)


def test_damaged_checkpoint_falls_back_foreign_one_is_skipped(
    parts: tuple[Path, Bundle], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = a_run(tmp_path / "run", parts[1])
    save(run, parts[1], 1, {})
    save(run, parts[1], 2, {})
    save(run, parts[1], 3, {}, run_id="another")
    (newest,) = (run / "checkpoints").glob("step-00000002-*")
    (newest / "model.safetensors").write_bytes(b"x")
    opened = open_bundle(run)
    assert opened.checkpoint is not None
    assert opened.checkpoint.step == 1
    said = capsys.readouterr().err
    assert "model.safetensors has 1 bytes" in said
    assert "belongs to run another" in said


def test_a_checkpoint_of_another_shape_is_refused(parts: tuple[Path, Bundle], tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", parts[1])
    save(run, parts[1], 1, {})
    language = parts[1].config.language.model_copy(update={"intermediate_size": 44})
    other = Bundle(parts[1].config.model_copy(update={"language": language}), parts[1].tokenizer, "qwen2.5")
    describe(other, run / "model")
    opened = open_bundle(run)
    with pytest.raises(Refused, match=r"language\.blocks\.0\.mlp\.down\.weight is \[24, 40\]"):
        load(opened, "cpu")


# ---- descriptions


def test_a_description_is_read_as_it_was_written(parts: tuple[Path, Bundle], tmp_path: Path) -> None:
    for _ in range(2):  # the second replaces the first
        describe(parts[1], tmp_path / "model")
    again = read_description(tmp_path / "model")
    assert (again.config, again.template) == (parts[1].config, parts[1].template)
    assert again.tokenizer.chat_template == parts[1].tokenizer.chat_template
    assert again.encoder().identity == parts[1].encoder().identity
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_a_folder_that_is_no_description_is_not_replaced(parts: tuple[Path, Bundle], tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "thesis.txt").write_text("mine")
    with pytest.raises(Refused, match="exists already"):
        describe(parts[1], tmp_path / "model")
    assert (tmp_path / "model" / "thesis.txt").exists()


def edit(change: Callable[[dict], object]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        content = json.loads((folder / "eyeline.json").read_text())
        change(content)
        (folder / "eyeline.json").write_text(json.dumps(content))

    return spoil


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "later version": (edit(lambda c: c.update(version=3)), r"format version 3; this Eyeline reads 2\. Use the Eyeline that wrote it"),
    "earlier version": (
        edit(lambda c: c.update(version=1, config={"vision": {"width": 16}})),
        r"format version 1; this Eyeline reads 2\. An earlier Eyeline wrote it: import the model again, or train the run again\.$",
    ),
    "no version": (edit(lambda c: c.pop("version")), "format version None"),
    "other family": (edit(lambda c: c["config"].update(family="flamingo")), "family 'flamingo'"),
    "no config": (edit(lambda c: c.pop("config")), "family None"),
    "unknown setting": (edit(lambda c: c["config"].update(depth=3)), "depth: there is no such setting"),
    "impossible setting": (edit(lambda c: c["config"]["language"].update(heads=5)), "does not describe a model"),
    "other template": (edit(lambda c: c.update(template="vicuna")), "template 'vicuna' is not known"),
    "not JSON": (lambda f: (f / "eyeline.json").write_text("{"), "is not JSON"),
    "rows for fewer tokens": (edit(lambda c: c["config"]["language"].update(vocab_size=290)), "ids up to 2.., and .* 290 rows"),
    "tower of another size": (
        edit(lambda c: c["config"]["vision"].update(intermediate_size=25)),
        r"vision/config\.json describe different models \(intermediate_size: 25 and 24\)",
    ),
    "language model exchanged": (
        edit(lambda c: c["config"]["language"].update(rope_theta=5e5)),
        r"language/config\.json describe different models \(rope_parameters: .*500000\.0.* and .*10000\.0",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_description_is_refused_by_name(parts: tuple[Path, Bundle], tmp_path: Path, name: str) -> None:
    shutil.copytree(parts[0], tmp_path / "model")
    assert open_bundle(tmp_path / "model").bundle.config == parts[1].config
    spoil, message = BROKEN[name]
    spoil(tmp_path / "model")
    with pytest.raises(Refused, match=message):
        open_bundle(tmp_path / "model")


def test_what_is_no_model_is_refused_with_what_was_found(parts: tuple[Path, Bundle], tmp_path: Path) -> None:
    with pytest.raises(Refused, match="is not a directory"):
        open_bundle(tmp_path / "gone")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "questions.json").write_text("[]")
    with pytest.raises(Refused, match=r"looked for .*found questions\.json"):
        open_bundle(tmp_path / "data")
    with pytest.raises(Refused, match=r"model_type='siglip_vision_model'; .*A vision tower is one part"):
        open_bundle(parts[0] / "vision")
    (tmp_path / "data" / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(Refused, match=r"model_type='bert'; Eyeline opens llava, lfm2_vl, qwen2"):
        open_bundle(tmp_path / "data")


def test_a_run_without_checkpoints_or_without_a_best_one_is_refused(parts: tuple[Path, Bundle], tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", parts[1])
    with pytest.raises(Refused, match=r"no newest checkpoint\. Train it"):
        open_bundle(run)
    save(run, parts[1], 1, {})
    with pytest.raises(Refused, match=r"no best checkpoint\. .*validation_steps"):
        open_bundle(run, "best")


def test_a_tokenizer_with_more_ids_than_rows_never_becomes_a_bundle(parts: tuple[Path, Bundle], tmp_path: Path) -> None:
    language = parts[1].config.language.model_copy(update={"vocab_size": 260})
    with pytest.raises(Refused, match="260 rows"):
        describe(Bundle(parts[1].config.model_copy(update={"language": language}), tokenizer(), "qwen2.5"), tmp_path / "model")
    assert not (tmp_path / "model").exists()
