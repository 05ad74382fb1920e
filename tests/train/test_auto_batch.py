"""`batch: auto`: the largest packs that fit into memory, by the estimate that `check` prints; and the same ones for a run that resumes."""

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from eyeline.checkpoint import store
from eyeline.core.batch import Budget
from eyeline.core.errors import Refused, Stopped
from eyeline.recipes.check import check
from eyeline.train import auto_batch, loop
from eyeline.train.auto_batch import Chosen, choose_batches
from eyeline.train.prepare import prepare_stage
from eyeline.train.run import Run, from_yaml
from eyeline.train.start import description
from eyeline.train.trainable import needed_memory
from tests.train.ends import end_of, stopped_at
from tests.train.recipe import tiny_run

ADAMW = "stages.whole.optimizer={kind: adamw}"


def auto_run(folder: Path, memory_gb: float | None, *overrides: str) -> Run:
    stated = "" if memory_gb is None else f", memory_gb: {memory_gb!r}"
    run = tiny_run(folder, f"stages.whole.batch={{auto: true, packs_per_step: 2{stated}}}", ADAMW, *overrides)
    return run.model_copy(update={"stages": run.stages[:1]})


def chosen(run: Run, device: int | None = None, folder: Path = Path("nowhere")) -> Chosen:
    return choose_batches(run, description(run), folder, device, 1)


def test_largest_packs_that_fit_are_taken(tmp_path: Path) -> None:
    """With a byte less than a size needs, the next smaller one; the bytes are those of the memory table."""
    large = chosen(auto_run(tmp_path, 100))
    run, (choice,) = large.run, large.choices
    taken = run.stages[0].batch.budget
    assert taken == choice.taken.budget
    bundle = description(run)
    needed = needed_memory(run, 0, bundle.config, None).total
    counted = {one.packing.budget: one.memory.total for one in choice.tried if one.memory is not None}
    assert counted[taken] == needed
    again = chosen(auto_run(tmp_path, needed / 1e9)).run.stages[0].batch.budget
    assert again == taken
    less = chosen(auto_run(tmp_path, (needed - 1) / 1e9)).run.stages[0].batch.budget
    assert less.tokens == taken.tokens // 2
    assert less.patches < taken.patches
    assert chosen(auto_run(tmp_path, None), round(needed / 0.9) + 1).run.stages[0].batch.budget == taken, "nine tenths of a GPU"
    assert chosen(auto_run(tmp_path, None), round(needed / 0.9) - 2).run.stages[0].batch.budget == less


def test_resumed_run_takes_what_its_folder_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where another size would be chosen now."""
    whole, cut = (auto_run(tmp_path, 100, "stages.whole.steps=3", f"out={tmp_path / name}") for name in ("whole", "cut"))
    loop.train(whole)
    with monkeypatch.context() as patch:
        stopped_at(patch, {2})
        with pytest.raises(Stopped):
            loop.train(cut)
    recorded = from_yaml((tmp_path / "cut" / "recipe.yaml").read_text()).stages[0].batch
    assert recorded.auto
    assert recorded.budget == chosen(whole).run.stages[0].batch.budget
    with monkeypatch.context() as patch:
        patch.setattr(auto_batch, "_choice", refuse_to_choose)
        loop.train(cut)
    assert end_of(cut) == end_of(whole)
    assert from_yaml((tmp_path / "cut" / "recipe.yaml").read_text()).stages[0].batch == recorded
    with pytest.raises(Refused, match=r"may not change on resume:\s+stages.whole.batch.memory_gb: 100.0 → 50.0"):
        loop.train(auto_run(tmp_path, 50, "stages.whole.steps=4", f"out={tmp_path / 'cut'}"))
    loop.train(from_yaml((tmp_path / "cut" / "recipe.yaml").read_text()).model_copy(update={"out": str(tmp_path / "third")}))
    newest = store.newest(tmp_path / "third" / "checkpoints")
    assert newest is not None
    assert newest.state["global_step"] == 3


def refuse_to_choose(*_: Any) -> None:
    raise AssertionError("the size of packs is on record")


def test_check_shows_what_auto_takes_and_why(tmp_path: Path) -> None:
    out = io.StringIO()
    assert check(auto_run(tmp_path, 100), 0, Console(file=out, width=200))
    said = out.getvalue()
    assert "batch of stage whole: auto takes max_tokens" in said
    assert "(93.13 GiB: memory_gb)" in said
    assert "max_tokens │ max_patches │ padding │ too long │ memory" in " ".join(said.replace("┃", "│").split())
    assert "(taken)" in said


@pytest.mark.parametrize(
    ("memory_gb", "overrides", "why"),
    [
        (None, (), r"stages.whole.batch: auto needs the memory of a GPU, and this machine has none.*batch=\{auto: true, memory_gb: 16\}"),
        (1e-5, (), r"auto has 9.77 KiB of a device, and with packs of .* tokens, the smallest that suit the data, the stage needs about"),
    ],
)
def test_too_little_memory_is_refused_before_anything_is_written(
    tmp_path: Path, memory_gb: float | None, overrides: tuple[str, ...], why: str
) -> None:
    run = auto_run(tmp_path, memory_gb, *overrides)
    with pytest.raises(Refused, match=why):
        loop.train(run)
    assert not (tmp_path / "run" / "recipe.yaml").exists()


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ("{auto: true, max_tokens: 100}", "auto chooses max_tokens and max_patches together, and max_patches is not given"),
        ("{max_patches: 100}", "max_tokens must be given, as whole numbers; or write batch: auto"),
        ("{max_tokens: 100, max_patches: 100, memory_gb: 3}", "memory_gb is for auto: true"),
    ],
)
def test_sizes_that_are_given_by_half_are_refused(tmp_path: Path, settings: str, why: str) -> None:
    with pytest.raises(Refused, match=why):
        tiny_run(tmp_path, f"stages.whole.batch={settings}")


def test_what_chooses_with_auto_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"gradient_checkpointing\.memory_gb chooses blocks for packs"):
        tiny_run(tmp_path, "stages.whole.batch=auto", "stages.whole.gradient_checkpointing={memory_gb: 1}")
    with pytest.raises(Refused, match=r"data\.prepared has packs already"):
        tiny_run(tmp_path, "stages.whole.batch=auto", "stages.whole.data.prepared=somewhere")
    with pytest.raises(Refused, match="write max_tokens and max_patches"):
        prepare_stage(auto_run(tmp_path, 1), None, tmp_path / "prepared")


def test_data_without_images_leave_room_for_one(tmp_path: Path) -> None:
    """The model's smallest image has 16 patches, and no pack may be too small for it."""
    (tmp_path / "text.json").write_text(
        '[{"id": "a", "conversations": [{"from": "human", "value": "say"}, {"from": "gpt", "value": "a"}]}]'
    )
    text = f"stages.whole.data={{sources: [{{path: {tmp_path / 'text.json'}}}]}}"
    run = chosen(auto_run(tmp_path, 100, text, "stages.whole.trains={language: {how: full, lr: 0.01}}")).run
    assert run.stages[0].batch.budget == Budget(256, 16)
