"""Records the traces in tests/study/traces that a CPU can show: real runs of the real commands, each with a real fault.

    python -m tests.study.record_traces NAME… --scratch FOLDER

runs them and replaces their folders. Times differ from one recording to the next, so no test does this. A fault is in the data or
the settings, in what happens to processes from outside (SIGSTOP), or planted into the process before it trains (`PLANTS`).
"""

import argparse
import gzip
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from eyeline.study.history import read_history
from eyeline.study.ledger import read_ledger

FOLDER = Path(__file__).parent / "traces"
ROOT = Path(__file__).parent.parent.parent
KEPT = ("metrics.jsonl", "recipe.yaml", "metrics-ranks")  # of a run folder
WORDS = (
    "red",
    "green",
    "blue",
    "large",
    "small",
    "dog",
    "cat",
    "tree",
    "house",
    "car",
    "on",
    "under",
    "near",
    "left",
    "of",
    "and",
    "two",
    "seen",
)

# What is planted into a process


def graphs_of_fixed_sizes() -> None:
    """Have the compiler make a graph for every size that it meets."""
    import torch

    compiled = torch.compile

    def fixed(function: Any, **settings: Any) -> Any:
        return compiled(function, **settings | {"dynamic": False})  # type: ignore[call-overload]

    torch.compile = fixed  # type: ignore[assignment]


def python_before_every_module() -> None:
    """A hook that was left in: some Python before each module."""
    from torch.nn.modules.module import register_module_forward_pre_hook

    def count(_module: Any, _inputs: Any) -> None:
        sum(number * number for number in range(9_000))

    register_module_forward_pre_hook(count)


def check_after_every_module() -> None:
    """A watchdog that was left in: several passes over what each module gives."""
    import torch
    from torch.nn.modules.module import register_module_forward_hook

    def check(_module: Any, _inputs: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor) and output.is_floating_point() and output.numel() > 1_000:
            wide = output.detach().double().clone()
            for _ in range(3):
                wide = wide.abs().add(1.0).sqrt().mul(0.5).clamp(-1e6, 1e6)
            assert wide.isfinite().all()

    register_module_forward_hook(check)


def slow_network() -> None:
    """Each sum over ranks takes a moment longer."""
    import torch.distributed as dist

    summed = dist.all_reduce

    def late(*arguments: Any, **settings: Any) -> Any:
        time.sleep(0.35)
        return summed(*arguments, **settings)

    dist.all_reduce = late


def late_images(seconds: float, every: int = 1) -> None:
    """A storage that takes a moment for every n-th image."""
    from eyeline.data.fetch import fetch

    read = fetch.in_memory

    def late(item: Any) -> Any:
        if int(Path(item.name).stem) % every == 0:
            time.sleep(seconds)
        return read(item)

    fetch.in_memory = late


def late_images_in_workers(seconds: float) -> None:
    """The same storage, for processes that decode."""
    import eyeline.data.workers as workers

    def new_process(handle: int, progress: int, most_bytes: int | None) -> "subprocess.Popen[bytes]":
        code = f"import sys; sys.path[:] = {sys.path!r}; from tests.study.record_traces import late_images; late_images({seconds}); "
        code += f"from eyeline.data.workers import serve; serve({handle}, {progress}, {os.getpid()}, {most_bytes})"
        return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.DEVNULL, pass_fds=(handle, progress))

    workers.new_process = new_process


PLANTS: dict[str, Callable[[], None]] = {
    "graphs of fixed sizes": graphs_of_fixed_sizes,
    "Python before every module": python_before_every_module,
    "checks after every module": check_after_every_module,
    "a late loader": lambda: late_images(0.06),
    "a later loader": lambda: late_images(0.6),
    "late loaders": lambda: late_images_in_workers(0.025),
    "later loaders": lambda: late_images_in_workers(0.05),
    "a loader that is late now and then": lambda: late_images(0.16, 240),
    "a late loader and a slow network": lambda: (late_images(0.11), slow_network())[0],
}

# Data


def write_data(folder: Path, count: int, sizes: Sequence[tuple[int, int]], words: int = 12) -> None:
    """Images of noise in these sizes, with a question and an answer each."""
    (folder / "images").mkdir(parents=True)
    rng, chance = np.random.default_rng(1), random.Random(1)
    rows = []
    for n in range(count):
        side = sizes[n % len(sizes)]
        pixels = rng.integers(0, 255, (side[1], side[0], 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "images" / f"{n}.jpg", quality=90)
        ask, answer = (" ".join(chance.choice(WORDS) for _ in range(chance.randint(words // 2, words))) for _ in range(2))
        turns = [{"from": "human", "value": f"<image>\n{ask}?"}, {"from": "gpt", "value": answer}]
        rows.append({"id": f"s{n}", "image": f"images/{n}.jpg", "conversations": turns})
    (folder / "rows.json").write_text(json.dumps(rows))


# Recipes


def vision(size: int = 64, patch: int = 8, width: int = 64, layers: int = 2, **more: Any) -> dict[str, Any]:
    return {"image_size": size, "patch": patch, "hidden_size": width, "layers": layers, "heads": 2, "intermediate_size": 3 * width, **more}


def language(width: int = 96, layers: int = 3, **more: Any) -> dict[str, Any]:
    known = {"vocab_size": 320, "hidden_size": width, "layers": layers, "heads": 4, "kv_heads": 2, "intermediate_size": 3 * width}
    return known | {"max_positions": 2048, "tie_embeddings": True, **more}


def qwen(width: int, layers: int, words: int, blocks: int) -> dict[str, Any]:
    """A model of images of any size: of its vision encoder, then of its language model."""
    tower = {"patch": 8, "temporal_patch": 1, "hidden_size": width, "layers": layers, "heads": 2, "intermediate_size": 3 * width}
    tower |= {"position_grid": 16, "deepstack_layers": [0], "min_pixels": 256, "max_pixels": 65536}
    model = {"family": "qwen3", "vocab_size": 320, "hidden_size": words, "layers": blocks, "heads": 4, "kv_heads": 2, "head_dim": 16}
    model |= {"intermediate_size": 3 * words, "mrope_section": [4, 2, 2], "tie_embeddings": True}
    return {"family": "qwen3_vl", "vision": tower, "language": model}


def recipe(config: dict[str, Any], batch: dict[str, int], steps: int, **more: Any) -> dict[str, Any]:
    """`more`: settings of the run, and `data` of its stage."""
    data, lr = more.pop("data", {}), more.pop("lr", 0.001)
    return {
        "name": "traced",
        "model": {"template": "plain", "config": config},
        "device": "cpu",
        "threads": 1,
        "save_minutes": None,
        "stages": [
            {
                "name": "whole",
                "trains": {part: {"how": "full", "lr": lr} for part in ("vision", "projector", "language")},
                "data": {"sources": [{"path": "rows.json"}], **data},
                "batch": batch,
                "steps": steps,
            }
        ],
        **more,
    }


SMALL = [(40, 32), (64, 64), (96, 48)]


def long_texts(folder: Path) -> None:
    """Few documents per pack: fewer events in a trace."""
    write_data(folder, 160, SMALL, 160)


@dataclass(frozen=True)
class Recorded:
    """A run to record, and the truth about it."""

    causes: tuple[str, ...]
    fault: str
    recipe: dict[str, Any]
    data: Callable[[Path], None] = lambda folder: write_data(folder, 160, SMALL)
    plant: str = ""
    profile: tuple[int, int] | None = None  # steps of warm-up, and to profile; None: a run
    ranks: int = 1
    while_it_runs: Callable[["Running"], None] = lambda running: None
    launches: int = 1
    ceiling_of: str = "steps from the fourth on"


@dataclass(frozen=True)
class Running:
    """The processes of a recording."""

    ranks: list["subprocess.Popen[bytes]"]
    metrics: Path

    @property
    def alive(self) -> bool:
        return any(rank.poll() is None for rank in self.ranks)

    def steps(self) -> int:
        return self.metrics.read_text().count('"kind": "step"') if self.metrics.exists() else 0


def starve(pick: Callable[[Running], int | None], stopped_s: float, running_s: float) -> Callable[[Running], None]:
    """Let a process have the processor for a part of the time alone, from the second step on."""

    def meanwhile(running: Running) -> None:
        pid = None
        while running.alive:
            if running.steps() < 1 or (pid := pid or pick(running)) is None:
                time.sleep(0.05)
                continue
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
                time.sleep(stopped_s)
                os.kill(pid, signal.SIGCONT)
            time.sleep(running_s)

    return meanwhile


def worker_of(rank: int) -> Callable[[Running], int | None]:
    """A worker that decodes for a rank: the last that it has started."""

    def pick(running: Running) -> int | None:
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
                command = (path / "cmdline").read_text()
                if parent == running.ranks[rank].pid and "serve(" in command and not command.rstrip("\0").endswith("None)"):
                    found.append(int(path.name))
        return max(found, default=None)

    return pick


def kill_at(step: int) -> Callable[[Running], None]:
    """Kill the first launch in the middle of its work."""

    def meanwhile(running: Running) -> None:
        if running.steps():
            return
        while running.alive and running.steps() < step:
            time.sleep(0.02)
        for rank in running.ranks:
            rank.kill()

    return meanwhile


def tiny(steps: int = 60, tower: dict[str, Any] | None = None, model: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """The recipe of a small llava, or of `config`."""
    config = {"vision": tower or vision(), "projector": {"shuffle": 2}, "language": model or language()}
    batch = {"max_tokens": 512, "max_patches": 1024} | more.pop("batch", {})
    return recipe(more.pop("config", config), batch, steps, **more)


RECORDED = {
    "01-sleeping-loader": Recorded(
        ("data_wait",),
        "the loader sleeps for 600 ms before it reads an image, as over a slow network",
        tiny(),
        data=long_texts,
        plant="a later loader",
        profile=(3, 2),
        ceiling_of="profiled steps",
    ),
    "02-huge-photos": Recorded(
        ("data_wait",),
        "photos of 12 megapixels are decoded by the training process itself, and the model sees 64 pixels of each",
        tiny(24, vision(width=48), language(64, 2), batch={"max_tokens": 256, "max_patches": 512}),
        data=lambda folder: write_data(folder, 40, [(4000, 3000), (3000, 2400)]),
    ),
    "03-starved-worker": Recorded(
        ("slow_worker",),
        "one of two workers that decode has the processor for a tenth of the time (SIGSTOP and SIGCONT in turns)",
        tiny(60, vision(width=96), language(128, 3), data={"workers": 2, "read_ahead": 1}),
        data=lambda folder: write_data(folder, 240, [(300, 200), (200, 260)]),
        plant="later loaders",
        while_it_runs=starve(worker_of(0), 1.35, 0.15),
    ),
    "04-starved-worker-of-a-rank": Recorded(
        ("slow_worker",),
        "the worker that decodes for rank 1 of two has the processor for a twentieth of the time (SIGSTOP and SIGCONT in turns)",
        tiny(50, batch={"packs_per_step": 2}, data={"workers": 1}, metrics_for_all_ranks=True),
        data=lambda folder: write_data(folder, 240, [(400, 300), (500, 300)]),
        plant="late loaders",
        ranks=2,
        while_it_runs=starve(worker_of(1), 1.9, 0.1),
    ),
    "05-a-graph-per-size": Recorded(
        ("recompilation",),
        "blocks are compiled for fixed sizes (dynamic=False), and every step has another number of patches",
        tiny(9, config=qwen(32, 1, 48, 1), batch={"max_tokens": 384, "max_patches": 768}, compile="blocks"),
        data=lambda folder: write_data(folder, 120, [(n % 11 * 16 + 24, n % 7 * 16 + 24) for n in range(77)]),
        plant="graphs of fixed sizes",
        profile=(1, 1),
        ceiling_of="profiled steps",
    ),
    "06-checkpoint-each-step": Recorded(
        ("checkpoint",),
        "a checkpoint is written after every step (save_steps: 1)",
        tiny(50, model=language(192, 4), batch={"max_tokens": 192}, save_steps=1),
    ),
    "07-validation-each-step": Recorded(
        ("validation",),
        "the whole validation set is run after every second step (validation_steps: 2)",
        tiny(40, validation_steps=2, lr=0.03, data={"validation_fraction": 0.4}),
    ),
    "08-slow-rank": Recorded(
        ("slow_rank",),
        "rank 1 of two has the processor for half of the time (SIGSTOP and SIGCONT in turns)",
        tiny(60, batch={"packs_per_step": 2}, metrics_for_all_ranks=True),
        ranks=2,
        while_it_runs=starve(lambda running: running.ranks[1].pid, 0.03, 0.03),
    ),
    "09-large-images-on-one-rank": Recorded(
        ("imbalance",),
        "one image in twenty has 40 times as many pixels as the others: in half of the steps one rank of two has one to encode",
        tiny(40, config=qwen(128, 3, 64, 1), batch={"packs_per_step": 2}, metrics_for_all_ranks=True),
        data=lambda folder: write_data(folder, 400, [(256, 256)] + [(40, 40)] * 19),
        ranks=2,
    ),
    "10-python-before-every-module": Recorded(
        ("launch_gaps",),
        "a hook that was left in runs half a millisecond of Python before every module",
        tiny(tower=vision(layers=2), model=language(96, 2)),
        data=long_texts,
        plant="Python before every module",
        profile=(3, 2),
        ceiling_of="profiled steps",
    ),
    "11-checks-after-every-module": Recorded(
        ("memory_bound",),
        "a watchdog that was left in makes fifteen passes in float64 over what every module gives",
        tiny(tower=vision(layers=1), model=language(128, 2)),
        data=long_texts,
        plant="checks after every module",
        profile=(3, 2),
        ceiling_of="profiled steps",
    ),
    "12-killed-without-checkpoints": Recorded(
        ("lost_work",),
        "no checkpoint is written before the end, and the run is killed after 32 of 40 steps and starts again from the first",
        tiny(40, vision(width=96, layers=3), language(160, 4), batch={"max_tokens": 768, "max_patches": 1536}),
        while_it_runs=kill_at(32),
        launches=2,
        ceiling_of="whole run",
    ),
    "13-sleeping-loader-and-checkpoints": Recorded(
        ("data_wait", "checkpoint"),
        "the loader sleeps for 60 ms before it reads an image, and a checkpoint is written after every step",
        tiny(30, model=language(160, 3), save_steps=1),
        plant="a late loader",
    ),
    "20-slow-network-and-loader": Recorded(
        ("communication", "data_wait"),
        "each sum over the two ranks takes 350 ms longer, and the loaders of both sleep for 110 ms before they read an image",
        tiny(24, batch={"packs_per_step": 2}, metrics_for_all_ranks=True),
        plant="a late loader and a slow network",
        ranks=2,
    ),
    "21-demo": Recorded((), "nothing: the quick start with few steps; the first step of each stage waits for its data", {}),
    "22-short-waits": Recorded(
        (),
        "nothing that matters: one image in 240 is read late, so that now and then a step waits",
        tiny(60, vision(width=96), language(128, 3)),
        data=lambda folder: write_data(folder, 240, SMALL),
        plant="a loader that is late now and then",
    ),
    "23-compiled": Recorded(
        (),
        "nothing: blocks are compiled before the first step, and no graph is made after that",
        tiny(9, config=qwen(48, 2, 64, 2), compile="blocks"),
        data=lambda folder: write_data(folder, 120, [(n % 11 * 16 + 24, n % 7 * 16 + 24) for n in range(77)]),
        profile=(3, 2),
        ceiling_of="profiled steps",
    ),
}

# Recording


def record(name: str, scratch: Path) -> None:
    one, folder = RECORDED[name], scratch / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if one.recipe:
        one.data(folder)
        (folder / "recipe.yaml").write_text(json.dumps(one.recipe, indent=1))
    run = folder / "out" / "run" if one.profile else folder / "run"
    for _ in range(one.launches):
        running = Running(launch(one, folder), run / "metrics.jsonl")
        one.while_it_runs(running)
        codes = [rank.wait() for rank in running.ranks]
        print(name, codes, flush=True)  # noqa: T201 - progress of a script
    keep(name, folder, run)


def launch(one: Recorded, folder: Path) -> list["subprocess.Popen[bytes]"]:
    what = ["recipe.yaml"] if one.recipe else ["easyvqa-tiny", *DEMO]
    words = ["train", *what, "out=run"]
    if one.profile:
        words = ["profile", *what, "--warm-up", str(one.profile[0]), "--steps", str(one.profile[1]), "--out", "out"]
    command = [sys.executable, "-m", "tests.study.record_traces", "--planted", one.plant or "nothing", *words]
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "OMP_NUM_THREADS": "1"}
    with socket.socket() as free, open(folder / "log", "ab") as log:
        free.bind(("127.0.0.1", 0))
        met = {"WORLD_SIZE": one.ranks, "LOCAL_WORLD_SIZE": one.ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free.getsockname()[1]}
        shared = env | {key: str(value) for key, value in met.items()} if one.ranks > 1 else env
        free.close()
        return [
            subprocess.Popen(
                command, cwd=folder, stdout=log, stderr=log, env=shared | ({"RANK": str(n), "LOCAL_RANK": str(n)} if one.ranks > 1 else {})
            )
            for n in range(one.ranks)
        ]


DEMO = (
    "stages.shapes.steps=25",
    "stages.all.steps=35",
    "validation_steps=null",
    "save_steps=50",
)


def keep(name: str, folder: Path, run: Path) -> None:
    """Copy what a trace has of a run folder, or of a profile, with the scratch folder's name replaced."""
    one, target = RECORDED[name], FOLDER / name
    shutil.rmtree(target, ignore_errors=True)
    kept = target / "run" if one.profile else target
    kept.mkdir(parents=True)
    for path in (path for start in KEPT for path in [run / start, *(run / start).rglob("*")] if path.is_file()):
        place = kept / path.relative_to(run)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(path.read_text().replace(str(folder), "/data"))
    if one.profile:
        text = json.dumps(json.loads((folder / "out" / "trace.json").read_text()), separators=(",", ":"))
        (target / "trace.json.gz").write_bytes(gzip.compress(text.encode(), 9, mtime=0))
    truth = {"causes": list(one.causes), "fault": one.fault, "origin": "recorded", "form": "profile" if one.profile else "run"}
    truth |= {"ceiling": {cause: ceiling(one, cause, kept / "metrics.jsonl") for cause in one.causes}, "ceiling_of": one.ceiling_of}
    (target / "truth.json").write_text(json.dumps(truth, indent=1, ensure_ascii=False) + "\n")


def ceiling(one: Recorded, cause: str, metrics: Path) -> float | None:
    """The share of wall time that has the cause's own name, or that of what it makes the loop do; None where no second has."""
    if cause == "lost_work":
        ledger = read_ledger(metrics)
        return round(ledger.seconds["lost_work"] / ledger.wall_s, 4)
    spent = {"slow_worker": "data_wait"}.get(cause, cause)
    steps, start = read_history(metrics).steps, 3
    if one.profile:
        start, steps = one.profile[0], steps[: sum(one.profile)]
    if spent not in steps[0].seconds:
        return None
    other = sum(step.seconds["other"] for step in steps[start:]) if one.profile else 0.0  # the start of the profiler is in it
    return round(sum(step.seconds[spent] for step in steps[start:]) / (sum(step.step_s for step in steps[start:]) - other), 4)


def planted(plant: str, words: list[str]) -> None:
    """Train as the command line does, with a fault in the process."""
    from eyeline.cli import main

    PLANTS.get(plant, lambda: None)()
    sys.argv = ["eyeline", *words]
    main()


if __name__ == "__main__":
    if sys.argv[1] == "--planted":
        planted(sys.argv[2], sys.argv[3:])
    else:
        parser = argparse.ArgumentParser()
        parser.add_argument("names", nargs="*", default=list(RECORDED))
        parser.add_argument("--scratch", type=Path, required=True)
        asked = parser.parse_args()
        for each in asked.names:
            record(each, asked.scratch.resolve())
