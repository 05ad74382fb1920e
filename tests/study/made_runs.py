"""Run folders of trainings on GPUs that do not exist: `metrics.jsonl` and `metrics-ranks/` with the fields that `train/metrics.py` writes.

Numbers are consistent with one another, as those of a real run are: seconds add up to a step's wall time, rates and MFU follow from counts
and seconds. Their values come from `random.Random.random` alone.
"""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

STARTED = datetime(2026, 11, 24, 9, 12, 40, tzinfo=UTC)
CAUSES = ("startup", "compile", "data_wait", "compute", "communication", "validation", "checkpoint", "other")
Line = dict[str, Any]


@dataclass(frozen=True)
class Card:
    hardware: str
    capability: tuple[int, int]
    memory: int  # bytes
    peak: float  # published dense bf16 FLOPs per second


H100 = Card("NVIDIA H100 80GB HBM3", (9, 0), 85_029_158_912, 9.89e14)
A100 = Card("NVIDIA A100-SXM4-80GB", (8, 0), 85_097_971_712, 3.12e14)
L40S = Card("NVIDIA L40S", (8, 9), 47_697_362_944, 3.62e14)


@dataclass(frozen=True)
class Rank:
    """What one rank did by itself in a step, in seconds."""

    cost: float  # of its packs, over the mean of all ranks
    forward: float
    data: float


@dataclass(frozen=True)
class Moment:
    """One step: seconds by cause as rank 0 has them, and what else differs from step to step."""

    seconds: Mapping[str, float]
    ranks: Sequence[Rank] = ()
    starved: float = 0.0
    memory: int = 31_138_512_896
    reserved: int = 41_104_179_200
    retries: int = 0
    imbalance: Mapping[str, float] = field(default_factory=lambda: {"language": 1.0, "vision": 1.0, "all": 1.0, "vision_before": 1.0})
    slow_ranks: Sequence[int] = ()
    validated: float | None = None  # the loss of a validation in this step


@dataclass(frozen=True)
class Training:
    """A run: its machine, its size, and its steps."""

    seed: int
    card: Card
    ranks: int
    name: str
    steps: int
    tokens: int  # non-padding, of a step
    slots: int
    flops: Mapping[str, int]  # of a step
    moment: Callable[[random.Random, int], Moment]
    recipe: str
    again: int = 0  # FLOPs of a step that are recomputed
    stage: str = "adapt"


def files_of(training: Training) -> dict[str, str]:
    """The files of the run folder, by their paths in it."""
    rng, clock = random.Random(training.seed), 0.0
    lines: list[Line] = [start_line(training, 21.4), stage_line(training, 38.9)]
    of_ranks: list[list[Line]] = [[] for _ in range(training.ranks)]
    for number in range(1, training.steps + 1):
        moment = training.moment(rng, number)
        counts = counts_of(training, rng)
        seconds = {name: moment.seconds.get(name, 0.0) for name in CAUSES}
        wall = sum(seconds.values()) + moment.starved
        clock += wall
        if moment.validated is not None:
            lines.append(stamped(validation_line(training, number, moment.validated), clock - 0.004))
        lines.append(stamped(step_line(training, number, moment, counts, {"step": wall, **seconds}, rng), clock))
        for rank, own in enumerate(moment.ranks):
            of_ranks[rank].append(rank_line(training, number, moment, own, counts, {"step": wall, **seconds}))
    end = {"kind": "end", "outcome": "done", "global_step": training.steps, **{f"{n}_s": 0.0 for n in CAUSES[:-1]}, "other_s": 0.031}
    lines.append(stamped(end, clock + 0.031))
    found = {"metrics.jsonl": text_of(lines), "recipe.yaml": training.recipe}
    return found | {f"metrics-ranks/rank-{rank:05d}.jsonl": text_of(of_rank) for rank, of_rank in enumerate(of_ranks) if of_rank}


def text_of(lines: Sequence[Line]) -> str:
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


def stamped(line: Line, elapsed: float) -> Line:
    wall = (STARTED + timedelta(milliseconds=round(elapsed * 1000))).isoformat(timespec="milliseconds")
    return {**line, "elapsed_s": round(elapsed, 6), "wall": wall, "attempt": 1}


def start_line(training: Training, elapsed: float) -> Line:
    card = training.card
    line: Line = {"kind": "start", "eyeline": "0.1.0", "commit": None, "python": "3.12.12"}
    line["packages"] = {"torch": "2.13.0+cu128", "triton": "3.7.0", "numpy": "2.4.6", "transformers": "5.24.0", "safetensors": "0.8.0"}
    line |= {"system": "Linux-6.8.0-1031-x86_64-with-glibc2.39", "device": "cuda", "hardware": card.hardware, "threads": 8}
    line |= {"capability": list(card.capability), "device_memory_bytes": card.memory, "cuda": "12.8", "rocm": None, "cudnn": 91002}
    line |= {"driver": "570.172.08", "allocator": "expandable_segments:True", "deterministic": False, "precision": "bf16"}
    line["world_size"] = training.ranks
    line["peak"] = {"name": f"{card.hardware}, published dense bf16 peak", "flops_per_s": card.peak}
    return stamped(line | {"resumed_from": None, "forced_expert_balance": False}, elapsed)


def stage_line(training: Training, elapsed: float) -> Line:
    line: Line = {"kind": "stage", "stage": training.stage, "stage_index": 0, "steps": training.steps, "epochs": None}
    line |= {"family": "qwen3_vl", "model": f"/models/{training.name}", "fresh": [], "weights": {}, "template": "qwen3"}
    line["parts"] = [
        {"part": "vision", "parameters": 407_000_000, "trained": 0, "how": "frozen", "lr": None},
        {"part": "projector", "parameters": 50_000_000, "trained": 50_000_000, "how": "full", "lr": 0.00002},
        {"part": "language", "parameters": 2_030_000_000, "trained": 2_030_000_000, "how": "full", "lr": 0.00001},
    ]
    source = {"path": "/data/mixture", "layout": "messages", "container": "tar", "samples": 1_204_331, "exact": False, "held_out": None}
    line |= {"sources": [source], "validation": []}
    line["batch"] = {"max_tokens": training.slots // training.ranks, "max_patches": 32_768, "packs_per_step": training.ranks}
    return stamped(line | {"optimizer": "adamw", "schedule": "cosine", "kernels": [], "global_step": 0}, elapsed)


def counts_of(training: Training, rng: random.Random) -> Line:
    real = min(training.slots, int(training.tokens * (0.99 + 0.02 * rng.random())))
    visual = int(real * 0.41)
    text = real - visual
    return {
        "slots": training.slots,
        "real": real,
        "visual": visual,
        "text": text,
        "supervised": int(text * 0.6),
        "documents": real // 620,
        "images": real // 640,
        "patches": visual * 4,
    }


def step_line(training: Training, number: int, moment: Moment, counts: Line, seconds: Mapping[str, float], rng: random.Random) -> Line:
    share = counts["real"] / training.tokens
    flops = {part: int(value * share) for part, value in training.flops.items()}
    total, again, wall = sum(flops.values()), int(training.again * share), seconds["step"]
    peak = training.card.peak * training.ranks
    line: Line = {"kind": "step", "stage": training.stage, "stage_index": 0, "step": number, "global_step": number}
    line |= {"loss": round(1.1 + 3.2 / (number + 2) + 0.05 * rng.random(), 6), "grad_norm": round(0.6 + 0.5 * rng.random(), 6)}
    line |= {"applied": True, "outcome": "applied", "lr": {"projector": 0.00002, "language": 0.00001}, **counts}
    line["sample_ids"] = int(rng.random() * 2**32)
    line |= dict.fromkeys(("expert_max_over_mean", "experts_unused", "balance_loss", "divergence"))
    line |= {"padding": 1 - counts["real"] / counts["slots"], "real_tokens_per_s": counts["real"] / wall}
    line |= {f"{name}_s": value for name, value in seconds.items()} | {"host_starved_s": moment.starved}
    line |= {"memory_bytes": moment.memory, "reserved_bytes": moment.reserved, "allocator_retries": moment.retries, "rejected": 0}
    line |= {"flops": flops, "flops_recomputed": again, "flops_per_s": total / wall, "mfu": total / wall / peak}
    line |= {"hfu": (total + again) / wall / peak, "bf16_unchanged": 0.981 if number % 10 == 0 else None, "top_k": None}
    line |= {"imbalance": dict(moment.imbalance), "epoch": number * 0.0001, "spike": False, "slow_ranks": list(moment.slow_ranks)}
    return line


def rank_line(training: Training, number: int, moment: Moment, own: Rank, counts: Line, seconds: Mapping[str, float]) -> Line:
    """What `metrics_for_all_ranks` writes. Ranks wait for the slowest inside of the sharded passes: their compute is as long."""
    late = own.data - moment.ranks[0].data
    of_rank = {**seconds, "data_wait": seconds["data_wait"] + late, "compute": seconds["compute"] - late}
    line: Line = {"stage": training.stage, "step": number, "global_step": number}
    line |= {name: int(value / training.ranks) for name, value in counts.items()}
    line |= {f"{name}_s": value for name, value in of_rank.items()} | {"host_starved_s": 0.0}
    line |= {"flops": training.flops["language"] * own.cost / training.ranks, "own_forward_s": own.forward, "own_data_s": own.data}
    return line | {"attempt": 1}


def validation_line(training: Training, number: int, loss: float) -> Line:
    line: Line = {"kind": "validation", "stage": training.stage, "stage_index": 0, "step": number, "global_step": number}
    return line | {"loss": loss, "supervised": 48_211}
