"""No dead settings: every leaf of the recipe schema, turned, changes something that can be seen. A leaf without a case fails."""

import contextlib
import errno
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from PIL import Image
from torch._dynamo.utils import counters

import eyeline.data.containers.container
import eyeline.data.fetch.fetch
import eyeline.train.loop as loop
from eyeline.checkpoint import store
from eyeline.core.errors import Refused, StorageFailed, TooManyRejects
from eyeline.core.files import read_lines
from eyeline.core.world import World
from eyeline.data.fetch.fetch import Fetch, PackToRead
from eyeline.data.text.templates import template_named
from eyeline.data.text.tokenizer import train_bpe
from eyeline.data.workers import Workers
from eyeline.models import compiled, decoder, siglip2, spec
from eyeline.models.shape import shape
from eyeline.parallel.mesh import mesh_of, problems
from eyeline.parallel.ranks import ranks_of
from eyeline.parallel.shard import shard
from eyeline.recipes.problems import settings_problems
from eyeline.recipes.read import run_of
from eyeline.study.evaluate import evaluate
from eyeline.train.evidence import LossSpikes
from eyeline.train.memory import activations_of, memory_of
from eyeline.train.trackers import trackers
from eyeline.train.trainable import plan_of
from tests.distill.cases import CASES as DISTILL
from tests.ranks import on_ranks
from tests.settings import LEAVES
from tests.train.recipe import overridden, tiny_recipe, write_data

Observe = Callable[[dict[str, Any], Path], Any]  # (recipe, an empty folder) -> what can be seen


# What can be seen


def trained(recipe: dict[str, Any], folder: Path) -> Path:
    loop.train(run_of(recipe | {"out": str(folder / "run")}, "recipe"))
    return folder / "run"


def steps(recipe: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """The metrics of each step, without the times."""
    lines = read_lines(trained(recipe, folder) / "metrics.jsonl")
    return [
        {k: v for k, v in line.items() if not k.endswith("_s") and k not in ("wall", "memory_bytes", "mfu", "hfu")}
        for line in lines
        if line["kind"] == "step"
    ]


def refusal(recipe: dict[str, Any], folder: Path) -> str:
    """Why the recipe is refused; nothing when it is not."""
    try:
        problems = list(settings_problems(run_of(recipe | {"out": str(folder / "run")}, "recipe")))
    except Refused as refused:
        return str(refused)
    return "\n".join(problems)


def validations(recipe: dict[str, Any], folder: Path) -> list[Any]:
    return [
        (line["loss"], line["supervised"]) for line in read_lines(trained(recipe, folder) / "metrics.jsonl") if line["kind"] == "validation"
    ]


def kept(recipe: dict[str, Any], folder: Path) -> list[str]:
    return sorted(path.name[:13] for path in (trained(recipe, folder) / "checkpoints").iterdir())


def stamps(recipe: dict[str, Any], folder: Path) -> Any:
    env = json.loads((trained(recipe, folder) / "env.json").read_text())["attempts"][0]
    return env["threads"]


def device(recipe: dict[str, Any], folder: Path) -> Any:
    try:
        return json.loads((trained(recipe, folder) / "env.json").read_text())["attempts"][0]["device"]
    except Refused as refused:
        return str(refused)


def deterministic(recipe: dict[str, Any], folder: Path) -> Any:
    """What torch is asked for while the run computes, and what the run says of itself."""
    asked = set()
    with pytest.MonkeyPatch.context() as patch:
        forward = siglip2.Block.forward
        patch.setattr(siglip2.Block, "forward", lambda *x: asked.add(torch.are_deterministic_algorithms_enabled()) or forward(*x))
        run = trained(recipe, folder)
    return asked, json.loads((run / "env.json").read_text())["attempts"][0]["deterministic"]


def graphs(recipe: dict[str, Any], folder: Path) -> int:
    """How many graphs of blocks are made."""
    torch._dynamo.reset()
    counters.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "BACKEND", "eager")
        patch.setattr(compiled, "compiler_obstacle", lambda _: None)
        trained(recipe, folder)
    return counters["stats"]["unique_graphs"]


def mesh(recipe: dict[str, Any], folder: Path) -> Any:
    """What is wrong with it for four ranks, and what two ranks make of it."""
    sizes = run_of(recipe, "recipe").mesh
    if found := list(problems(sizes, 4)):
        return found

    def of(world: World) -> Any:
        made = mesh_of(sizes, world, "cpu")
        assert made is not None
        return made.reshard, made.images is not None, ranks_of(made).sum_next.__name__

    return on_ranks(2, of)


def ahead(recipe: dict[str, Any], folder: Path) -> Any:
    """How many units each one gathers ahead, on two ranks."""
    run = run_of(recipe, "recipe")

    def of(world: World) -> Any:
        made = mesh_of(run.mesh, world, "cpu")
        assert made is not None and run.model.config is not None
        plan = shape(run.model.config, trains={})
        shard(plan, made)
        states = [module._get_fsdp_state() for module in plan.model.modules() if hasattr(module, "_get_fsdp_state")]
        return [(len(state._states_to_forward_prefetch), len(state._states_to_backward_prefetch)) for state in states]

    return on_ranks(2, of)


def patience(recipe: dict[str, Any], folder: Path) -> Any:
    """The time that ranks give one another."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "joined", lambda place, device, timeout_s: contextlib.nullcontext(World(rank=timeout_s)))
        patch.setattr(loop, "mesh_of", lambda sizes, world, device, packs: pytest.fail(str(world.rank)))
        try:
            trained(recipe, folder)
        except pytest.fail.Exception as failed:
            return str(failed)


def writers(recipe: dict[str, Any], folder: Path) -> list[str]:
    """The threads that write checkpoints."""
    names, write = list[str](), store.write
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "write", lambda *args, **how: names.append(threading.current_thread().name) or write(*args, **how))
        trained(recipe, folder)
    return names


def sampled(recipe: dict[str, Any], folder: Path) -> int:
    """Answers that a run keeps."""
    files = (trained(recipe, folder) / "samples").glob("*.json")
    return sum(len(json.loads(file.read_text())["answers"]) for file in files)


def tracked(recipe: dict[str, Any], folder: Path) -> list[Any]:
    """What trackers are opened with."""
    opened: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "missing", lambda names: [])
        patch.setattr(trackers, "InThread", lambda name, open_tracker: opened.append(name) or MagicMock())
        patch.setattr(trackers, "opener", lambda name, about: opened.append(about.online))
        trained(recipe, folder)
    return opened


def run_folders(recipe: dict[str, Any], folder: Path) -> str:
    return str(loop.run_folder(run_of(recipe, "recipe")))


def printed(recipe: dict[str, Any], folder: Path, capsys: pytest.CaptureFixture[str]) -> int:
    capsys.readouterr()
    trained(recipe, folder)
    return capsys.readouterr().out.count("loss")


def evaluated(recipe: dict[str, Any], folder: Path) -> Any:
    result = evaluate(trained(recipe, folder), show=0)
    return result.questions, result.cut, result.rejected, result.max_new_tokens


def block_calls(recipe: dict[str, Any], folder: Path) -> int:
    calls = 0

    def counted(self, *arguments):
        nonlocal calls
        calls += 1
        return forward(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        forward = siglip2.Block.forward
        patch.setattr(siglip2.Block, "forward", counted)
        trained(recipe, folder)
    return calls


def recomputed(recipe: dict[str, Any], folder: Path) -> int:
    """The FLOPs that are done a second time."""
    return sum(line["flops_recomputed"] for line in steps(recipe, folder))


def activations(recipe: dict[str, Any], folder: Path) -> int:
    """What a step keeps on the device."""
    run = run_of(recipe | {"out": str(folder / "run")}, "recipe")
    assert run.model.config is not None
    return activations_of(plan_of(run, 0, run.model.config), run.stages[0].batch.budget)


def memory(recipe: dict[str, Any], folder: Path) -> str:
    """What a stage keeps in memory."""
    run = run_of(recipe | {"out": str(folder / "run")}, "recipe")
    assert run.model.config is not None
    return str(memory_of(plan_of(run, 0, run.model.config), run.stages[0].optimizer))


def gradient_bytes(recipe: dict[str, Any], folder: Path) -> int:
    """What a stage needs for gradients."""
    run = run_of(recipe | {"out": str(folder / "run")}, "recipe")
    assert run.model.config is not None
    return memory_of(plan_of(run, 0, run.model.config), run.stages[0].optimizer).gradients


def refused_by_plan(recipe: dict[str, Any], folder: Path) -> str:
    """Why a stage cannot be planned."""
    try:
        return str(len(steps(recipe, folder)))
    except Refused as refused:
        return str(refused)


def workers(recipe: dict[str, Any], folder: Path) -> Workers | None:
    """What the reader asks of its workers, if it has any; the work itself is done here."""
    found = None

    def here(asked: Iterator[tuple[Any, PackToRead]], fetch: Fetch, workers: Workers) -> Iterator[Any]:
        nonlocal found
        found = workers
        return ((mark, fetch(job)) for mark, job in asked)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eyeline.data.fetch.fetch, "in_order", here)
        trained(recipe, folder)
    return found


def tries(recipe: dict[str, Any], folder: Path) -> int:
    """How often an image is asked of a store that fails."""
    asked = 0

    def failing(_: Any) -> None:
        nonlocal asked
        asked += 1
        raise StorageFailed("could not read it.") from OSError(errno.EIO, "Input/output error")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eyeline.data.containers.container.time, "sleep", lambda _: None)
        patch.setattr(eyeline.data.fetch.fetch, "in_memory", failing)
        with pytest.raises(StorageFailed):
            trained(recipe, folder)
    return asked


def indexes(recipe: dict[str, Any], folder: Path) -> int:
    """How many indexes a run keeps in its own folder."""
    return len(list((trained(recipe, folder) / "index").glob("*/*.index")))


def outcome(recipe: dict[str, Any], folder: Path) -> str:
    try:
        return str(len(steps(recipe, folder)))
    except TooManyRejects:
        return "too many rejects"


def budgeted(recipe: dict[str, Any], folder: Path) -> str:
    """A run whose every step is not finite."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoder.Head, "forward", lambda self, x, *_: (x * float("nan")).sum())
        try:
            return str(len(steps(recipe, folder)))
        except Exception as error:  # noqa: BLE001 - whichever way it ends is what is seen
            return type(error).__name__


def skipped(recipe: dict[str, Any], folder: Path) -> list[str]:
    """The outcomes of a run whose every step is said to have a loss spike."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LossSpikes, "add", lambda self, loss: True)
        return [line["outcome"] for line in steps(recipe, folder)]


def evidence(recipe: dict[str, Any], folder: Path) -> int:
    """How many steps a run keeps whole whose every step is not finite."""
    budgeted(recipe, folder)
    return len(list((folder / "run" / "evidence").glob("*/weights")))


def rank_files(recipe: dict[str, Any], folder: Path) -> list[str]:
    return sorted(path.name for path in (trained(recipe, folder) / "metrics-ranks").glob("*"))


def video(recipe: dict[str, Any], folder: Path) -> Any:
    """The size of a video's slices."""
    config = run_of(recipe | {"out": str(folder / "run")}, "recipe").model.config
    assert config is not None
    rule = spec(config).image
    assert rule is not None
    return rule.slices(8, 40, 24)


# Cases: leaf -> (overrides of the base, overrides that turn the leaf, what is seen)


@dataclass(frozen=True)
class Case:
    turn: tuple[str, ...]
    see: Observe | str = steps
    base: tuple[str, ...] = ()


def turned(*turn: str, see: Observe | str = steps, base: tuple[str, ...] = ()) -> Case:
    return Case(turn, see, base)


ADAMW = ("stages.0.optimizer={kind: adamw, weight_decay: 0.1}",)
IN_8_BITS = ("stages.0.optimizer={kind: adamw_8bit, weight_decay: 0.1}", "stages.0.steps=3")
# on o as well: in a fresh model o is zero, and without it nothing reaches the other adapters
DEEPER = ("model.config.vision.layers=2",)
LORA = ("stages.0.trains.language={how: lora, lr: 0.02, rank: 2, alpha: 4, dropout: 0.3, targets: [o_proj, v_proj]}",)
AUTO = ("stages.0.batch={auto: true, memory_gb: 100, packs_per_step: 2}",)
VALIDATED = ("validation_steps=1",)
OWN_JUDGES = (
    "stages.0.data.validation_fraction=0",
    "stages.0.data.validation=[{path: DATA, categories: [red, blue], limit: 6}]",
    *VALIDATED,
)
CHOSEN = ("stages.0.data.sources.0.where=width > 12",)
MIXED = ("stages.0.data.sources=[{path: MIXED}]", "stages.0.data.max_reject_rate=1")


SHARES = (
    "stages.0.data.sources=[{path: DATA, categories: [red]}, {path: DATA, categories: [blue]}]",
    "stages.0.data.mix=interleave",
    "stages.0.data.validation_fraction=0",
    "validation_steps=null",
)


def schedule(kind: str, **more: float) -> tuple[str, ...]:
    return (f"stages.0.schedule={json.dumps({'kind': kind, **more})}",)


def language(family: str, more: tuple[str, ...] = (), **turns: Any) -> dict[str, Case]:
    """Cases of the settings that every language model has."""
    at = "model.config.language."
    base = tuple(at + text for text in (f"family={family}", *more))
    turns = {
        "vocab_size": 280,
        "hidden_size": 8,
        "layers": 1,
        "heads": 1,
        "kv_heads": 2,
        "intermediate_size": 16,
        "eps": 0.1,
        "rope_theta": 10,
    } | turns
    return {
        f"model.config<llava>.language<{family}>.family": turned(f"{at}family=other", see=refusal, base=base),
        f"model.config<llava>.language<{family}>.max_positions": turned(f"{at}max_positions=4", see=refusal, base=base),
        f"model.config<llava>.language<{family}>.tie_embeddings": turned(f"{at}tie_embeddings=false", base=base),
        **{f"model.config<llava>.language<{family}>.{leaf}": turned(f"{at}{leaf}={value}", base=base) for leaf, value in turns.items()},
    }


QWEN3 = ("model.config.language.family=qwen3", "model.config.language.head_dim=8")
EXPERTS = (
    *QWEN3,
    "model.config.language.layers=2",
    "model.config.language.experts={num_experts: 4, experts_per_token: 2, intermediate_size: 8}",
)
SPARSE = {
    "experts.num_experts": "experts.num_experts=3",
    "experts.experts_per_token": "experts.experts_per_token=1",
    "experts.intermediate_size": "experts.intermediate_size=6",
    "experts.norm_topk_prob": "experts.norm_topk_prob=false",
    "sparse_every": "sparse_every=2",
    "dense_layers": "dense_layers=[0]",
}
DELTA = (
    "layers=4",
    "head_dim=16",
    "partial_rotary_factor=0.5",
    "mrope_section=[2, 1, 1]",
    "delta={key_heads: 1, value_heads: 2, key_dim: 8, value_dim: 6}",
)
QWEN3_5 = tuple(f"model.config.language.{text}" for text in ("family=qwen3_5", *DELTA))
SHARED = tuple(
    f"model.config.language.{text}"
    for text in ("intermediate_size=null", "shared_expert_size=12", "experts={num_experts: 4, experts_per_token: 2, intermediate_size: 8}")
)
REMEMBERED = {
    "layer_types": "layer_types=[full_attention, linear_attention, linear_attention, full_attention]",
    **{
        f"delta.{leaf}": f"delta.{leaf}={n}"
        for leaf, n in {"key_heads": 2, "value_heads": 3, "key_dim": 4, "value_dim": 4, "conv_kernel": 2}.items()
    },
}
SHARING = {
    leaf: turn for leaf, turn in SPARSE.items() if leaf in ("experts.num_experts", "experts.experts_per_token", "experts.intermediate_size")
}
STRETCHED = ("model.config.language.family=llama", "model.config.language.rope_scaling={factor: 8, original_max_positions: 16}")
TEXT = (
    "model.config={family: text, language: {vocab_size: 300, hidden_size: 16, layers: 1, heads: 2, kv_heads: 1, "
    "intermediate_size: 24, tie_embeddings: true}}",
)
QWEN3_VL = (
    "model.config={family: qwen3_vl, "
    "vision: {patch: 4, hidden_size: 16, layers: 1, heads: 2, intermediate_size: 24, position_grid: 6, "
    "deepstack_layers: [0], min_pixels: 1, max_pixels: 600}, "
    "language: {family: qwen3, vocab_size: 300, hidden_size: 16, layers: 2, heads: 2, kv_heads: 1, head_dim: 8, mrope_section: [2, 1, 1], "
    "intermediate_size: 24, tie_embeddings: true}}",
)
QWEN3_5_VL = (
    "model.config={family: qwen3_5_vl, "
    "vision: {patch: 4, hidden_size: 16, layers: 1, heads: 2, intermediate_size: 24, min_pixels: 1, max_pixels: 600}, "
    "language: {family: qwen3_5, vocab_size: 300, hidden_size: 16, layers: 2, heads: 2, kv_heads: 1, head_dim: 8, "
    "partial_rotary_factor: 1, mrope_section: [2, 1, 1], delta: {key_heads: 1, value_heads: 2, key_dim: 8, value_dim: 8}, "
    "intermediate_size: 24, tie_embeddings: true}}",
)
FOUR_STEPS = ("stages.0.steps=4",)  # for what two do not show
QWEN_VISION: dict[str, Any] = {
    "patch": 8, "temporal_patch": 1, "merge": 1, "hidden_size": 8, "layers": 2, "heads": 1, "intermediate_size": 16,
    "position_grid": 4, "deepstack_layers": [], "min_pixels": 500,
    "max_pixels": 100, "mean": [0.4, 0.5, 0.5], "std": [0.4, 0.5, 0.5],
}  # fmt: skip


CASES: dict[str, Case] = {
    "name": turned("name=other", see=run_folders, base=("out=null",)),
    "validation_samples": turned("validation_samples=2", see=sampled, base=VALIDATED),
    "top_k_probabilities": turned("top_k_probabilities=2", base=("logging_steps=1",)),
    "report_to": turned("report_to=[wandb]", see=tracked),
    "report_online": turned("report_online=true", see=tracked, base=("report_to=[wandb]",)),
    "out": turned("out=elsewhere", see=run_folders),
    "seed": turned("seed=1"),
    "model.path": turned("model={path: nowhere}", see=refusal),
    "model.adapter": turned("model.adapter=nowhere", see=refusal),
    "model.fresh": turned("model.fresh=[vision]", see=refusal),
    "model.weights.*": turned("model.weights={vision: nowhere}", see=refusal),
    "model.config<llava>.family": turned("model.config.family=other", see=refusal),
    "model.config<llava>.vision.image_size": turned("model.config.vision.image_size=24"),
    "model.config<llava>.vision.patch": turned("model.config.vision.patch=8"),
    "model.config<llava>.vision.hidden_size": turned("model.config.vision.hidden_size=8"),
    "model.config<llava>.vision.layers": turned("model.config.vision.layers=2"),
    "model.config<llava>.vision.heads": turned("model.config.vision.heads=1", base=FOUR_STEPS),
    "model.config<llava>.vision.intermediate_size": turned("model.config.vision.intermediate_size=16"),
    "model.config<llava>.vision.eps": turned("model.config.vision.eps=0.1"),
    "model.config<llava>.vision.mean": turned("model.config.vision.mean=[0.4, 0.5, 0.5]"),
    "model.config<llava>.vision.std": turned("model.config.vision.std=[0.4, 0.5, 0.5]"),
    "model.config<llava>.vision.resample": turned("model.config.vision.resample=nearest"),
    "model.config<llava>.vision.patches": turned("model.config.vision.patches=6"),
    "model.config<llava>.vision.tiles": turned("model.config.vision.tiles=3"),
    "model.config<llava>.projector.kind": turned("model.config.projector.kind=linear"),
    "model.config<llava>.projector.hidden_size": turned("model.config.projector.hidden_size=12"),
    "model.config<llava>.projector.shuffle": turned("model.config.projector.shuffle=4"),
    "model.config<llava>.projector.norm": turned("model.config.projector.norm=true", base=("stages.0.steps=2",)),  # of a tower with a norm
    **language("qwen2", head_dim=4),
    **language("qwen3", ("head_dim=8",), head_dim=4),
    **language("llama", head_dim=4),
    **{
        f"model.config<llava>.language<qwen3>.{leaf}": Case((f"model.config.language.{turn}",), base=EXPERTS)
        for leaf, turn in SPARSE.items()
    },
    "model.config<llava>.language<qwen3>.mrope_section": turned("model.config.language.mrope_section=[2, 1, 1]", see=refusal, base=QWEN3),
    **language("qwen3_5", DELTA, layers=3),
    "model.config<llava>.language<qwen3_5>.head_dim": turned(
        "model.config.language.head_dim=32", "model.config.language.partial_rotary_factor=0.25", base=QWEN3_5
    ),
    **{
        f"model.config<llava>.language<qwen3_5>.{leaf}": turned(f"model.config.language.{turn}", base=QWEN3_5)
        for leaf, turn in REMEMBERED.items()
    },
    **{
        f"model.config<llava>.language<qwen3_5>.{leaf}": turned(f"model.config.language.{turn}", base=(*QWEN3_5, *SHARED))
        for leaf, turn in {**SHARING, "shared_expert_size": "shared_expert_size=8"}.items()
    },
    "model.config<llava>.language<qwen3_5>.experts.norm_topk_prob": turned(
        "model.config.language.experts.norm_topk_prob=false", see=refusal, base=(*QWEN3_5, *SHARED)
    ),
    "model.config<llava>.language<qwen3_5>.partial_rotary_factor": turned(
        "model.config.language.partial_rotary_factor=0.25", "model.config.language.mrope_section=[1, 1, 0]", base=QWEN3_5
    ),
    "model.config<llava>.language<qwen3_5>.mrope_section": turned(
        "model.config.language.mrope_section=[2, 2, 1]", see=refusal, base=QWEN3_5
    ),
    **{
        f"model.config<llava>.language<llama>.rope_scaling.{leaf}": turned(
            f"model.config.language.rope_scaling.{leaf}={value}", base=STRETCHED
        )
        for leaf, value in {"factor": 2, "low_freq_factor": 2, "high_freq_factor": 6, "original_max_positions": 32}.items()
    },
    "model.config<llava>.feature_layer": turned("model.config.feature_layer=0", base=("model.config.feature_norm=false",)),
    "model.config<llava>.feature_norm": turned("model.config.feature_norm=false"),
    "model.config<text>.family": turned("model.config.family=other", see=refusal, base=TEXT),
    "model.config<qwen3_vl>.family": turned("model.config.family=other", see=refusal, base=QWEN3_VL),
    **{
        f"model.config<qwen3_vl>.vision.{leaf}": turned(
            f"model.config.vision.{leaf}={value}", base=QWEN3_VL + (FOUR_STEPS if leaf == "heads" else ())
        )
        for leaf, value in QWEN_VISION.items()
    },
    "model.config<qwen3_vl>.vision.video_min_pixels": turned("model.config.vision.video_min_pixels=9000", see=video, base=QWEN3_VL),
    "model.config<qwen3_vl>.vision.video_max_pixels": turned("model.config.vision.video_max_pixels=5000", see=video, base=QWEN3_VL),
    "model.config<qwen3_5_vl>.family": turned("model.config.family=other", see=refusal, base=QWEN3_5_VL),
    "model.template": turned("model.template=qwen2.5"),
    "model.tokenizer": turned("model.tokenizer=TOKENIZER"),
    "stages[].name": turned("stages.0.name=other"),
    "stages[].trains.*<Full>.how": turned(*LORA),
    "stages[].trains.*<Full>.lr": turned("stages.0.trains.vision.lr=0.1"),
    "stages[].trains.*<Adapted>.how": turned("stages.0.trains.language={how: full, lr: 0.02}", base=LORA),
    "stages[].trains.*<Adapted>.lr": turned("stages.0.trains.language.lr=0.1", base=LORA),
    "stages[].trains.*<Adapted>.rank": turned("stages.0.trains.language.rank=3", base=LORA),
    "stages[].trains.*<Adapted>.alpha": turned("stages.0.trains.language.alpha=8", base=LORA),
    "stages[].trains.*<Adapted>.dropout": turned("stages.0.trains.language.dropout=0", base=LORA),
    "stages[].trains.*<Adapted>.targets": turned("stages.0.trains.language.targets=all-linear", base=LORA),
    "stages[].data.sources[].path": turned("stages.0.data.sources.0.path=MIXED", base=("stages.0.data.max_reject_rate=1",)),
    "stages[].data.sources[].images": turned("stages.0.data.sources.0.images=OTHER"),
    "stages[].data.sources[].layout": turned("stages.0.data.sources.0.layout=openai", see=refusal),
    "stages[].data.sources[].columns.*": turned(
        "stages.0.data.sources.0.columns={kind: id}", see=refusal, base=("stages.0.data.sources.0.categories=[red]",)
    ),
    "stages[].data.sources[].roles.*": turned("stages.0.data.sources.0.roles={user: guest}", see=refusal),
    "stages[].data.sources[].categories": turned("stages.0.data.sources.0.categories=[red]", base=("stages.0.data.validation_fraction=0",)),
    "stages[].data.sources[].where": turned("stages.0.data.sources.0.where=width > 12", see=refusal),
    "stages[].data.sources[].signals": turned("stages.0.data.sources.0.signals=NOWHERE", see=refusal, base=CHOSEN),
    "stages[].data.sources[].repeat": turned("stages.0.data.sources.0.repeat=2"),
    "stages[].data.sources[].limit": turned("stages.0.data.sources.0.limit=9", base=("stages.0.data.validation_fraction=0",)),
    "stages[].data.sources[].weight": turned("stages.0.data.sources.0.weight=4", base=SHARES),
    "stages[].data.mix": turned("stages.0.data.mix=concat", base=SHARES),
    "stages[].data.cache": turned("stages.0.data.cache=INDEXES", see=indexes),
    "stages[].data.prepared": turned("stages.0.data.prepared=NOWHERE", see=refusal),
    "stages[].data.max_samples_per_image": turned(
        "stages.0.data.max_samples_per_image=2", base=("stages.0.data.sources=[{path: DATA}, {path: DATA}]",)
    ),
    "stages[].data.validation_fraction": turned("stages.0.data.validation_fraction=0.5"),
    "stages[].data.validation[].path": turned("stages.0.data.validation.0.path=MIXED", see=validations, base=OWN_JUDGES),
    "stages[].data.validation[].images": turned("stages.0.data.validation.0.images=OTHER", see=validations, base=OWN_JUDGES),
    "stages[].data.validation[].layout": turned("stages.0.data.validation.0.layout=openai", see=refusal, base=OWN_JUDGES),
    "stages[].data.validation[].columns.*": turned("stages.0.data.validation.0.columns={kind: id}", see=refusal, base=OWN_JUDGES),
    "stages[].data.validation[].roles.*": turned("stages.0.data.validation.0.roles={user: guest}", see=refusal, base=OWN_JUDGES),
    "stages[].data.validation[].categories": turned("stages.0.data.validation.0.categories=[red]", see=validations, base=OWN_JUDGES),
    "stages[].data.validation[].where": turned("stages.0.data.validation.0.where=width > 12", see=refusal, base=OWN_JUDGES),
    "stages[].data.validation[].signals": turned(
        "stages.0.data.validation.0.signals=NOWHERE", see=refusal, base=(*OWN_JUDGES, "stages.0.data.validation.0.where=width > 12")
    ),
    "stages[].data.validation[].repeat": turned("stages.0.data.validation.0.repeat=2", see=refusal, base=OWN_JUDGES),
    "stages[].data.validation[].weight": turned("stages.0.data.validation.0.weight=2", see=refusal, base=OWN_JUDGES),
    "stages[].data.validation[].limit": turned("stages.0.data.validation.0.limit=3", see=validations, base=OWN_JUDGES),
    "stages[].data.max_reject_rate": turned("stages.0.data.max_reject_rate=0", see=outcome, base=(*MIXED, "stages.0.steps=8")),
    "stages[].data.max_length": turned("stages.0.data.max_length=30", base=(*MIXED, "stages.0.data.max_reject_rate=1")),
    "stages[].data.overlong": turned("stages.0.data.overlong=drop_turns", base=(*MIXED, "stages.0.batch.max_tokens=64")),
    "stages[].data.augment.flip": turned("stages.0.data.augment.flip=false"),
    "stages[].data.augment.shift": turned("stages.0.data.augment.shift=3"),
    "stages[].data.workers": turned("stages.0.data.workers=2", see=workers),
    "stages[].data.read_ahead": turned("stages.0.data.read_ahead=9", see=workers, base=("stages.0.data.workers=1",)),
    "stages[].data.decode_timeout": turned("stages.0.data.decode_timeout=9", see=workers, base=("stages.0.data.workers=1",)),
    "stages[].data.read_timeout": turned("stages.0.data.read_timeout=9", see=workers, base=("stages.0.data.workers=1",)),
    "stages[].data.read_retries": turned("stages.0.data.read_retries=1", see=tries),
    "stages[].steps": turned("stages.0.steps=3"),
    "stages[].epochs": turned("stages.0.epochs=2", base=("stages.0.steps=null", "stages.0.epochs=1")),
    "stages[].batch.max_tokens": turned("stages.0.batch.max_tokens=200"),
    "stages[].batch.max_patches": turned("stages.0.batch.max_patches=32"),
    "stages[].batch.packs_per_step": turned("stages.0.batch.packs_per_step=1"),
    "stages[].batch.auto": turned(*AUTO),
    "stages[].batch.memory_gb": turned("stages.0.batch.memory_gb=1.0e-5", see=refused_by_plan, base=AUTO),
    "stages[].optimizer<AdamW>.kind": turned("stages.0.optimizer.kind=muon", base=ADAMW),
    "stages[].optimizer<AdamW>.betas": turned("stages.0.optimizer.betas=[0.5, 0.6]", base=ADAMW),
    "stages[].optimizer<AdamW>.eps": turned("stages.0.optimizer.eps=0.1", base=ADAMW),
    "stages[].optimizer<AdamW>.weight_decay": turned("stages.0.optimizer.weight_decay=5", base=ADAMW),
    "stages[].optimizer<AdamW>.state_dtype": turned(
        "stages.0.optimizer.state_dtype=bf16", base=("stages.0.optimizer={kind: adamw}", "stages.0.steps=3")
    ),
    "stages[].optimizer<AdamW>.offload": turned("stages.0.optimizer.offload=true", see=memory, base=("stages.0.optimizer={kind: adamw}",)),
    "stages[].optimizer<AdamW8bit>.kind": turned("stages.0.optimizer.kind=adamw", base=IN_8_BITS),
    "stages[].optimizer<AdamW8bit>.betas": turned("stages.0.optimizer.betas=[0.5, 0.6]", base=IN_8_BITS),
    "stages[].optimizer<AdamW8bit>.eps": turned("stages.0.optimizer.eps=0.1", base=IN_8_BITS),
    "stages[].optimizer<AdamW8bit>.weight_decay": turned("stages.0.optimizer.weight_decay=5", base=IN_8_BITS),
    "stages[].optimizer<AdamW8bit>.offload": turned("stages.0.optimizer.offload=true", see=memory, base=IN_8_BITS),
    "stages[].optimizer<AdamW8bit>.in_backward": turned("stages.0.optimizer.in_backward=true", see=gradient_bytes, base=IN_8_BITS),
    "stages[].optimizer<AdamW>.in_backward": turned(
        "stages.0.optimizer.in_backward=true", see=gradient_bytes, base=("stages.0.optimizer={kind: adamw}",)
    ),
    "stages[].optimizer<Muon>.kind": turned("stages.0.optimizer={kind: adamw}"),
    "stages[].optimizer<Muon>.momentum": turned("stages.0.optimizer.momentum=0.5"),
    "stages[].optimizer<Muon>.adamw_lr_ratio": turned("stages.0.optimizer.adamw_lr_ratio=3"),
    "stages[].optimizer<Muon>.betas": turned("stages.0.optimizer.betas=[0.5, 0.6]", base=FOUR_STEPS),
    "stages[].optimizer<Muon>.eps": turned("stages.0.optimizer.eps=0.1"),
    "stages[].optimizer<Muon>.weight_decay": turned("stages.0.optimizer.weight_decay=5"),
    "stages[].schedule<Constant>.kind": turned("stages.0.schedule.kind=linear", base=schedule("constant")),
    "stages[].schedule<Constant>.warmup_steps": turned("stages.0.schedule={kind: constant, warmup_steps: 2}", base=schedule("constant")),
    "stages[].schedule<Constant>.warmup_ratio": turned("stages.0.schedule.warmup_ratio=0.9", base=schedule("constant")),
    "stages[].schedule<Linear>.kind": turned("stages.0.schedule.kind=cosine", base=(*schedule("linear"), "stages.0.steps=3")),
    "stages[].schedule<Linear>.warmup_steps": turned("stages.0.schedule={kind: linear, warmup_steps: 2}", base=schedule("linear")),
    "stages[].schedule<Linear>.warmup_ratio": turned("stages.0.schedule.warmup_ratio=0.9", base=schedule("linear")),
    "stages[].schedule<Linear>.min_lr_ratio": turned("stages.0.schedule.min_lr_ratio=0.9", base=schedule("linear")),
    "stages[].schedule<Cosine>.kind": turned("stages.0.schedule.kind=linear", base=(*schedule("cosine"), "stages.0.steps=3")),
    "stages[].schedule<Cosine>.warmup_steps": turned("stages.0.schedule={kind: cosine, warmup_steps: 2}", base=schedule("cosine")),
    "stages[].schedule<Cosine>.warmup_ratio": turned("stages.0.schedule.warmup_ratio=0.9", base=schedule("cosine")),
    "stages[].schedule<Cosine>.min_lr_ratio": turned("stages.0.schedule.min_lr_ratio=0.9", base=schedule("cosine")),
    "stages[].schedule<WSD>.kind": turned("stages.0.schedule={kind: constant}", base=schedule("wsd", decay_ratio=0.9)),
    "stages[].schedule<WSD>.warmup_steps": turned("stages.0.schedule={kind: wsd, warmup_steps: 2}", base=schedule("wsd")),
    "stages[].schedule<WSD>.warmup_ratio": turned(
        "stages.0.schedule.warmup_ratio=0.8", base=(*schedule("wsd", warmup_ratio=0.0), "stages.0.steps=3")
    ),
    "stages[].schedule<WSD>.decay_ratio": turned(
        "stages.0.schedule.decay_ratio=0.9", base=(*schedule("wsd", decay_ratio=0.4), "stages.0.steps=3")
    ),
    "stages[].schedule<WSD>.min_lr_ratio": turned("stages.0.schedule.min_lr_ratio=0.9", base=schedule("wsd", decay_ratio=0.9)),
    "stages[].max_grad_norm": turned("stages.0.max_grad_norm=0.0001", base=ADAMW),
    **{
        f"stages[].experts<{record}>.{leaf}": Case((f"stages.0.experts={turn}",), base=(*EXPERTS, f"stages.0.experts={base}"))
        for record, leaf, base, turn in (
            ("Aux", "balance", "{balance: aux, coef: 1}", "null"),
            ("Aux", "coef", "{balance: aux}", "{balance: aux, coef: 1}"),
            ("Bias", "balance", "{balance: bias, rate: 1}", "null"),
            ("Bias", "rate", "{balance: bias}", "{balance: bias, rate: 1}"),
            ("Forced", "balance", "{balance: forced}", "null"),
        )
    },
    "stages[].gradient_checkpointing.parts": turned("stages.0.gradient_checkpointing={parts: [vision]}", see=block_calls),
    "stages[].gradient_checkpointing.every": turned(
        "stages.0.gradient_checkpointing.every=2", see=block_calls, base=(*DEEPER, "stages.0.gradient_checkpointing={every: 1}")
    ),
    "stages[].gradient_checkpointing.policy": turned(
        "stages.0.gradient_checkpointing.policy=selective", see=recomputed, base=("stages.0.gradient_checkpointing={every: 1}",)
    ),
    "stages[].gradient_checkpointing.offload": turned(
        "stages.0.gradient_checkpointing.offload=true", see=activations, base=("stages.0.gradient_checkpointing={every: 1}",)
    ),
    "stages[].gradient_checkpointing.memory_gb": turned(
        "stages.0.gradient_checkpointing.memory_gb=1.0e-5", see=refused_by_plan, base=("stages.0.gradient_checkpointing={every: 1}",)
    ),
    "evaluation.sources[].path": turned("evaluation.sources.0.path=MIXED", see=evaluated, base=("evaluation.sources.0.limit=30",)),
    "evaluation.sources[].images": turned("evaluation.sources.0.images=NOWHERE", see=refusal),
    "evaluation.sources[].layout": turned("evaluation.sources.0.layout=openai", see=refusal),
    "evaluation.sources[].columns.*": turned(
        "evaluation.sources.0.columns={kind: id}", see=refusal, base=("evaluation.sources.0.categories=[red]",)
    ),
    "evaluation.sources[].roles.*": turned("evaluation.sources.0.roles={user: guest}", see=refusal),
    "evaluation.sources[].categories": turned(
        "evaluation.sources.0.categories=[red]", see=evaluated, base=("evaluation.sources.0.limit=30",)
    ),
    "evaluation.sources[].where": turned("evaluation.sources.0.where=width > 12", see=refusal),
    "evaluation.sources[].signals": turned(
        "evaluation.sources.0.signals=NOWHERE", see=refusal, base=("evaluation.sources.0.where=width > 12",)
    ),
    "evaluation.sources[].repeat": turned("evaluation.sources.0.repeat=2", see=refusal),
    "evaluation.sources[].weight": turned("evaluation.sources.0.weight=2", see=refusal),
    "evaluation.sources[].limit": turned("evaluation.sources.0.limit=3", see=evaluated),
    "evaluation.metric": turned("evaluation.metric=nowhere.py:score", see=refusal),
    "evaluation.max_new_tokens": turned("evaluation.max_new_tokens=2", see=evaluated),
    **{leaf: Case(*case) for leaf, case in DISTILL.items()},
    "model.add_tokens": turned("model.add_tokens=[<red>, <blue>]"),
    "stages[].trains.*<Full>.freeze_layers": turned("stages.0.trains.language.freeze_layers=1"),
    "stages[].trains.*<Adapted>.freeze_layers": turned("stages.0.trains.language.freeze_layers=1", base=LORA),
    "stages[].trains.*<Adapted>.quantize": turned("stages.0.trains.language.quantize=nf4", see=refusal, base=LORA),
    "stages[].trains.*<Adapted>.rslora": turned("stages.0.trains.language.rslora=true", base=LORA),
    "stages[].trains.*<Adapted>.dora": turned("stages.0.trains.language.dora=true", base=LORA),
    "stages[].trains.*<Adapted>.modules_to_save": turned("stages.0.trains.language.modules_to_save=[norm]", base=LORA),
    "precision": turned("precision=bf16"),
    "float8": turned("float8=rowwise", base=("precision=bf16",)),
    "device": turned("device=cuda", see=device),
    "compile": turned("compile=blocks", see=graphs),
    "cuda_graph": turned("cuda_graph=true", see=refusal),
    "deterministic": turned("deterministic=true", see=deterministic),
    "threads": turned("threads=2", see=stamps),
    "mesh.dp_replicate": turned("mesh.dp_replicate=3", see=mesh),
    "mesh.dp_shard": turned("mesh.dp_shard=3", see=mesh),
    **{f"mesh.{axis}": turned(f"mesh.{axis}=2", see=refusal) for axis in ("tp", "ep")},
    **{f"mesh.{axis}": turned(f"mesh.{axis}=3", see=refusal) for axis in ("cp", "pp")},
    "mesh.pp_slices_per_rank": turned("mesh.pp_slices_per_rank=2", see=refusal),
    "mesh.reshard_after_forward": turned("mesh.reshard_after_forward=never", see=mesh),
    "mesh.vocab_parallel": turned("mesh.vocab_parallel=true", see=refusal),
    "mesh.balance_images": turned("mesh.balance_images=true", see=mesh),
    "mesh.forward_prefetch": turned("mesh.forward_prefetch=1", see=ahead),
    "mesh.backward_prefetch": turned("mesh.backward_prefetch=2", see=ahead),
    "mesh.sync_each_batch": turned("mesh.sync_each_batch=false", see=mesh),
    "mesh.timeout_minutes": turned("mesh.timeout_minutes=1", see=patience),
    "logging_steps": turned("logging_steps=1", see="printed", base=("stages.0.steps=5",)),
    "validation_steps": turned("validation_steps=1", see=validations),
    "save_steps": turned("save_steps=1", see=kept, base=("stages.0.steps=3",)),
    "save_minutes": turned("save_minutes=1.0e-9", see=kept, base=("stages.0.steps=3",)),
    "async_save": turned("async_save=true", see=writers, base=("stages.0.steps=3", "save_steps=1")),
    "save_total_limit": turned("save_total_limit=3", see=kept, base=("stages.0.steps=3", "save_steps=1")),
    "max_nonfinite_steps": turned("max_nonfinite_steps=0", see=budgeted),
    "max_spike_steps": turned("max_spike_steps=9", see=skipped),
    "keep_bad_steps": turned("keep_bad_steps=1", see=evidence),
    "metrics_for_all_ranks": turned("metrics_for_all_ranks=true", see=rank_files),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data, the same data with other images, a set with long and broken rows, and a tokenizer."""
    made = tmp_path_factory.mktemp("live")
    write_data(made / "data")
    (made / "other" / "pictures").mkdir(parents=True)
    for path in sorted((made / "data" / "pictures").iterdir()):
        pixels = 255 - np.asarray(Image.open(path))
        Image.fromarray(pixels).save(made / "other" / "pictures" / path.name)
    rows = json.loads((made / "data" / "data.json").read_text())
    for n, row in enumerate(rows):
        if n % 4 == 0:
            row["conversations"] += [{"from": "human", "value": "and " * 60}, {"from": "gpt", "value": "long"}]
        if n % 4 == 3:
            row["conversations"][0]["from"] = "nobody"
    (made / "data" / "mixed.json").write_text(json.dumps(rows))
    train_bpe(["other texts give other merges, other texts"] * 3, 290, template_named("plain")).save_pretrained(str(made / "tokenizer"))
    return made


def placed(text: str, folder: Path) -> str:
    """The words in capitals as paths."""
    paths = {
        "DATA": "data/data.json",
        "MIXED": "data/mixed.json",
        "OTHER": "other",
        "NOWHERE": "nowhere",
        "TOKENIZER": "tokenizer",
        "INDEXES": "indexes",
    }
    for word, path in paths.items():
        text = text.replace(word, str(folder / path))
    return text


def recipe_of(folder: Path, overrides: tuple[str, ...]) -> dict[str, Any]:
    base = tiny_recipe(folder)
    base["stages"] = base["stages"][:1]
    return overridden(base, "stages.0.steps=2", "logging_steps=100", *(placed(text, folder) for text in overrides))


def test_every_setting_has_a_case() -> None:
    assert set(LEAVES) - CASES.keys() == set(), "settings that no case changes"
    assert CASES.keys() - set(LEAVES) == set(), "cases of settings that are gone"


@pytest.fixture(scope="module")
def seen(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[tuple[str, ...], Observe], Any]:
    """What is seen of a recipe; the same base is looked at once."""

    @cache
    def look(overrides: tuple[str, ...], see: Observe) -> Any:
        return see(recipe_of(folder, overrides), tmp_path_factory.mktemp("look"))

    return look


@pytest.mark.parametrize("leaf", CASES)
def test_a_turned_setting_changes_something(leaf: str, seen, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = CASES[leaf]
    if leaf.startswith("model.") and case.see is steps:  # a model is another at once; a schedule or an optimizer is seen after a step
        case = replace(case, base=("stages.0.steps=1", *case.base))
    if case.see == "printed":
        before, after = (printed(recipe_of(folder, o), tmp_path / str(n), capsys) for n, o in enumerate((case.base, case.base + case.turn)))
    else:
        assert callable(case.see)
        before, after = seen(case.base, case.see), seen(case.base + case.turn, case.see)
    assert before != after, f"{leaf} changes nothing that {case.see} shows"


def test_a_setting_that_changes_nothing_is_noticed(seen) -> None:
    """The same recipe twice is the same: what the cases see is not noise."""
    again = ("name=tiny",)
    assert seen((), steps) == seen(again, steps)
    assert seen((), evaluated) == seen(again, evaluated)
    assert seen((), kept) == seen(again, kept)
